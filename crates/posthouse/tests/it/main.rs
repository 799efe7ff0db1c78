//! Integration tests, one module per behaviour.

#[cfg(all(feature = "http", feature = "testing"))]
mod http;
#[cfg(all(feature = "mysql", feature = "relay"))]
mod mysql;
