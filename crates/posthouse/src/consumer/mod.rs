//! Consumers: take messages out of a queue, topic or stream, have the inbox handle each once, and acknowledge it after the
//! commit.
//!
//! A consumer runs messages by the handlers registered with its [`Inbox`](crate::Inbox) ([`Inbox::on`](crate::Inbox::on)), and
//! brings the inbox's retry worker along, which runs again what failed.
//!
//! A message is acknowledged when the inbox has settled it: its effect is committed, was before, or its failure is recorded.
//! Until then the broker has it too, so a consumer may be killed at any moment.
//!
//! | file | what it does |
//! |---|---|
//! | `intake.rs` | runs what was taken: how much at once, what waits for what, when to answer |
//! | `decode.rs` | what stands where in a received message |
//! | `running.rs` | the handle of a running consumer |
//! | `rabbitmq/` | RabbitMQ queues |
//! | `nats/` | NATS JetStream |
//! | `http/` | an axum route |
//! | `kafka/` | Kafka topics |

mod decode;
#[cfg(feature = "axum")]
mod http;
mod intake;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "nats")]
mod nats;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
mod running;

#[cfg(feature = "axum")]
pub use http::{RunningWebhooks, Webhooks};
#[cfg(feature = "kafka")]
pub use kafka::KafkaConsumer;
#[cfg(feature = "nats")]
pub use nats::NatsConsumer;
#[cfg(feature = "rabbitmq")]
pub use rabbitmq::RabbitMqConsumer;
pub use running::{Consumer, ConsumerStatus};
