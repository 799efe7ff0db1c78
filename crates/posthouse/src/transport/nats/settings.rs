//! `[transports.NAME]` with `kind = "nats"`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Settings of the [`Nats`](super::Nats) transport.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NatsSettings {
    /// `nats://user:password@host:4222`, `tls://…`; several, separated by commas. Passwords and tokens are never shown.
    pub url: String,
    /// A `.creds` file (JWT and key).
    pub credentials: Option<PathBuf>,
    /// PEM file with the certificates to trust, in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// A connection must stand within this time. 5 s by default.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
}

impl Default for NatsSettings {
    fn default() -> Self {
        Self { url: String::new(), credentials: None, ca_file: None, connect_timeout: Duration::from_secs(5) }
    }
}

impl From<&str> for NatsSettings {
    fn from(url: &str) -> Self {
        Self { url: url.into(), ..Self::default() }
    }
}

impl fmt::Debug for NatsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsSettings").field("credentials", &self.credentials).finish_non_exhaustive()
    }
}

impl NatsSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}
