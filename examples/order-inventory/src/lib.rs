//! What the two services have in common: the event between them, and where it travels.

use posthouse::Event;
use serde::{Deserialize, Serialize};

/// The order service tells: take these from the stock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeductStock {
    /// Number of the order.
    pub order: i64,
    /// What was ordered.
    pub sku: String,
    /// How many.
    pub count: i32,
}

impl Event for DeductStock {
    const TYPE: &'static str = "stock.deduct.v1";
    const DESTINATION: &'static str = "inventory.deduct";
    /// Orders of one article reach the inventory in the order in which they were placed.
    fn key(&self) -> Option<String> {
        Some(self.sku.clone())
    }
}

/// The exchange between the services (RabbitMQ).
pub const EXCHANGE: &str = "shop";
/// The inventory's own queue (RabbitMQ).
pub const QUEUE: &str = "inventory.deduct";
/// The topic between the services (Kafka).
pub const TOPIC: &str = "inventory.deduct";

/// The broker that `BROKER_URL` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Broker {
    /// `amqp://…`
    RabbitMq(String),
    /// `kafka://host:port,…`
    Kafka(String),
}

impl Broker {
    /// From the environment; RabbitMQ on this machine by default.
    ///
    /// # Errors
    /// What is wrong with the variable.
    pub fn from_env() -> Result<Self, String> {
        let url = setting("BROKER_URL", "amqp://guest:guest@localhost:5672");
        match url.split_once("://") {
            Some(("amqp" | "amqps", _)) => Ok(Self::RabbitMq(url)),
            Some(("kafka", brokers)) => Ok(Self::Kafka(brokers.into())),
            _ => Err("BROKER_URL: must begin with amqp://, amqps:// or kafka://".into()),
        }
    }
}

/// An environment variable, or its default.
pub fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

/// Logs to standard error what `RUST_LOG` asks for; `info` by default.
pub fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

/// Ends with Ctrl-C, or SIGTERM.
pub async fn asked_to_stop() {
    let terminated = async {
        #[cfg(unix)]
        if let Ok(mut signal) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            signal.recv().await;
            return;
        }
        std::future::pending::<()>().await;
    };
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = terminated => {}
        () = interrupted => {}
    }
}
