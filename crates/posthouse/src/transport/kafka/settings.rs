//! `[transports.NAME]` with `kind = "kafka"`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Settings of the [`Kafka`](super::Kafka) transport.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KafkaSettings {
    /// Brokers to ask first: `host:9092,host2:9092`.
    pub brokers: String,
    /// Any librdkafka producer property (`security.protocol`, `sasl.username`, `compression.type`, …). Values are never shown.
    /// Those that the guarantee rests on (`acks`, `enable.idempotence`, …) can't be set.
    pub properties: BTreeMap<String, String>,
}

impl From<&str> for KafkaSettings {
    fn from(brokers: &str) -> Self {
        Self { brokers: brokers.into(), ..Self::default() }
    }
}

impl fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be passwords.
        f.debug_struct("KafkaSettings").field("brokers", &self.brokers).field("properties", &self.properties.keys()).finish()
    }
}

impl KafkaSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}
