//! The `posthouse` program, run as people run it. One behaviour per file.

mod cli;
mod config;
mod demo;
mod destinations;
mod inbox;
mod many;
mod relay;
mod support;
mod transports;
