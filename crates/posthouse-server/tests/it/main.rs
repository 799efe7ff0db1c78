//! The `posthouse` program, run as people run it.

mod cli;
mod config;
mod relay;
mod support;
