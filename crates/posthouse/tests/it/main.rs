//! Integration tests, one module per behaviour.
#![allow(clippy::disallowed_methods, reason = "the databases of the tests run on this machine, and so share its clock")]

#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "relay"))]
mod adopted;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "relay"))]
mod broker;
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "http",
    feature = "inbox",
    feature = "rabbitmq",
    feature = "kafka",
    feature = "nats",
    feature = "axum",
    feature = "testing"
))]
mod consumers;
#[cfg(all(feature = "http", feature = "testing"))]
mod http;
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "relay",
    feature = "inbox",
    feature = "testing"
))]
mod inbox;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "kafka", feature = "testing"))]
mod kafka;
#[cfg(all(feature = "mysql", feature = "relay"))]
mod mysql;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "nats", feature = "testing"))]
mod nats;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "http", feature = "testing"))]
mod other_drivers;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "http", feature = "testing"))]
mod publish_api;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "rabbitmq", feature = "testing"))]
mod rabbitmq;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "relay"))]
mod relay;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "archive"))]
mod retention;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "http", feature = "testing"))]
mod roles;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "relay"))]
mod store;
#[cfg(all(feature = "postgres", feature = "mysql", feature = "sqlite", feature = "relay"))]
mod support;
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "rabbitmq",
    feature = "kafka",
    feature = "nats",
    feature = "testing"
))]
mod tls;
#[cfg(all(feature = "sqlite", feature = "inbox", feature = "rabbitmq", feature = "testing"))]
mod trace;
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "relay",
    feature = "inbox",
    feature = "macros",
    feature = "testing"
))]
mod transactional;
#[cfg(all(
    feature = "postgres",
    feature = "mysql",
    feature = "sqlite",
    feature = "http",
    feature = "rabbitmq",
    feature = "kafka",
    feature = "nats",
    feature = "testing"
))]
mod transports;
