//! Integration tests, one module per behaviour.

#[cfg(all(feature = "http", feature = "testing"))]
mod http;
