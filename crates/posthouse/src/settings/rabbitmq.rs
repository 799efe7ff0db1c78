//! `rabbitmq` of a route.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// RabbitMQ message properties and topology of one route.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RabbitMqRoute {
    /// Survive a restart of the broker in durable queues (delivery mode 2). True by default.
    pub persistent: bool,
    /// Priority 0 to 255, for queues with `x-max-priority`. The message header `amqp-priority` comes first.
    pub priority: Option<u8>,
    /// The broker drops the message from its queue after this time. The message header `amqp-expiration` (milliseconds)
    /// comes first. Never by default.
    #[serde(with = "humantime_serde")]
    pub expiration: Option<Duration>,
    /// The property `app_id`.
    pub app_id: Option<String>,
    /// Headers set on each message, before those of the message; numbers, truth values, lists and tables keep their types.
    pub headers: BTreeMap<String, serde_json::Value>,
    /// Declare what the address names when a connection is made: the exchange (`amqp:exchange/routing.key`) or the queue
    /// (`amqp:/queue`), durable. False by default: what isn't there is an error.
    pub declare: bool,
    /// Type of a declared exchange: `topic` by default.
    pub exchange_type: ExchangeType,
    /// With `declare`, a durable queue to declare too and bind to the exchange by the routing key.
    pub queue: Option<String>,
    /// Type of a declared queue: `classic` by default.
    pub queue_type: QueueType,
}

/// Types of exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeType {
    /// Patterns of routing keys.
    #[default]
    Topic,
    /// Equal routing keys.
    Direct,
    /// Every bound queue.
    Fanout,
    /// Message headers.
    Headers,
}

/// Types of queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// On one node.
    #[default]
    Classic,
    /// Replicated by consensus.
    Quorum,
}

impl Default for RabbitMqRoute {
    fn default() -> Self {
        Self {
            persistent: true,
            priority: None,
            expiration: None,
            app_id: None,
            headers: BTreeMap::new(),
            declare: false,
            exchange_type: ExchangeType::default(),
            queue: None,
            queue_type: QueueType::default(),
        }
    }
}

impl RabbitMqRoute {
    pub(super) fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let short = |text: &String| text.is_empty() || text.len() > crate::message::MAX_NAME;
        for (field, text) in [("app_id", &self.app_id), ("queue", &self.queue)] {
            if let Some(text) = text.as_ref().filter(|t| short(t)) {
                out.push((format!("rabbitmq.{field}"), format!("{} bytes, must be 1 to 255", text.len())));
            }
        }
        for name in self.headers.keys().filter(|name| short(name)) {
            out.push(("rabbitmq.headers".into(), format!("a name has {} bytes, must be 1 to 255", name.len())));
        }
        if let Some(after) = self.expiration
            && after > Duration::from_millis(u32::MAX.into())
        {
            out.push(("rabbitmq.expiration".into(), format!("{after:?}, must be at most {} ms", u32::MAX)));
        }
        if self.queue.is_some() && !self.declare {
            out.push(("rabbitmq.queue".into(), "is used only with rabbitmq.declare = true".into()));
        }
        out
    }
}
