//! `[transports.NAME]` with `kind = "rabbitmq"`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Settings of the [`RabbitMq`](super::RabbitMq) transport.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RabbitMqSettings {
    /// `amqp://user:password@host:5672/vhost`, or `amqps://` for TLS. The password is never shown.
    pub url: String,
    /// After two of these without a sign of life the connection counts as lost. 10 s by default.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// A connection, name lookup and TLS handshake included, must stand within this time. 5 s by default.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// The name that RabbitMQ's management shows for the connection. `posthouse` by default.
    pub connection_name: String,
    /// PEM file with the certificates to trust, in addition to the system's.
    pub ca_file: Option<PathBuf>,
}

impl Default for RabbitMqSettings {
    fn default() -> Self {
        Self {
            url: String::new(),
            heartbeat: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            connection_name: "posthouse".into(),
            ca_file: None,
        }
    }
}

impl From<&str> for RabbitMqSettings {
    fn from(url: &str) -> Self {
        Self { url: url.into(), ..Self::default() }
    }
}

impl fmt::Debug for RabbitMqSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqSettings").field("heartbeat", &self.heartbeat).finish_non_exhaustive()
    }
}

impl RabbitMqSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}
