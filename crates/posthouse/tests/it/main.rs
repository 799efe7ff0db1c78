//! Integration tests, one module per behaviour.

#[cfg(all(feature = "http", feature = "testing"))]
mod http;
#[cfg(feature = "relay")]
mod store;
#[cfg(feature = "relay")]
mod support;
