//! The integration tests of the `posthouse` program: one binary, one behaviour per file.

mod demo;
