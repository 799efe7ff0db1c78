//! The `posthouse` program, run as people run it. One behaviour per file.

mod adopted;
mod api;
mod auth;
mod cli;
mod config;
mod demo;
mod destinations;
mod doctor;
mod groups;
mod inbox;
mod many;
mod relay;
#[cfg(feature = "archive")]
mod retention;
mod support;
mod transports;
mod xxl_job;
