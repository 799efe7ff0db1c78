//! The `posthouse` program, run as people run it. One behaviour per file.

mod adopted;
mod alerts;
mod api;
mod auth;
mod book;
mod browser;
mod cli;
mod config;
mod dashboard;
mod demo;
mod destinations;
mod doctor;
mod groups;
mod health;
mod inbox;
mod languages;
mod many;
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats", feature = "otlp"))]
mod metrics;
#[cfg(feature = "rabbitmq")]
mod packaging;
mod relay;
#[cfg(feature = "archive")]
mod retention;
mod sql_contract;
mod support;
mod transports;
mod xxl_job;
