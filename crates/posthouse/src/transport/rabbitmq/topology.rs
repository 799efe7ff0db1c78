//! `rabbitmq.declare`: makes what a route's address names, where it isn't there yet.

use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};

use super::job::Job;
use super::link::Live;
use crate::settings::{ExchangeType, QueueType};

/// What one route declares. Equal ones need it only once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Topology {
    /// Empty: only the queue, in which the default exchange puts messages by its name.
    exchange: ShortString,
    exchange_type: ExchangeType,
    queue: Option<ShortString>,
    queue_type: QueueType,
    routing_key: ShortString,
}

/// What a message's route declares, if it does.
pub(super) fn wanted(exchange: &ShortString, job: &Job) -> Option<Topology> {
    let route = &job.delivery.route().rabbitmq;
    if !route.declare {
        return None;
    }
    let queue = match exchange.as_str() {
        "" => Some(job.routing_key.clone()),
        // Settings allow 255 bytes.
        _ => route.queue.as_deref().and_then(|queue| ShortString::try_new(queue).ok()),
    };
    // Without a queue the routing key changes nothing.
    let routing_key = if queue.is_some() { job.routing_key.clone() } else { "".into() };
    Some(Topology {
        exchange: exchange.clone(),
        exchange_type: route.exchange_type,
        queue,
        queue_type: route.queue_type,
        routing_key,
    })
}

impl Topology {
    /// Declares all of it on a channel of its own.
    pub(super) async fn declare(&self, live: &Live) -> lapin::Result<()> {
        let channel = live.open_channel().await?;
        let named = !self.exchange.as_str().is_empty();
        if named {
            let kind = match self.exchange_type {
                ExchangeType::Topic => ExchangeKind::Topic,
                ExchangeType::Direct => ExchangeKind::Direct,
                ExchangeType::Fanout => ExchangeKind::Fanout,
                ExchangeType::Headers => ExchangeKind::Headers,
            };
            let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
            channel.exchange_declare(self.exchange.clone(), kind, durable, FieldTable::default()).await?;
        }
        if let Some(queue) = &self.queue {
            let mut arguments = FieldTable::default();
            if self.queue_type == QueueType::Quorum {
                arguments.insert("x-queue-type".into(), AMQPValue::LongString(LongString::from("quorum")));
            }
            let durable = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.clone(), durable, arguments).await?;
            if named {
                channel
                    .queue_bind(
                        queue.clone(),
                        self.exchange.clone(),
                        self.routing_key.clone(),
                        QueueBindOptions::default(),
                        FieldTable::default(),
                    )
                    .await?;
            }
        }
        channel.close(200, "OK".into()).await
    }

    /// What to do when the broker refuses.
    pub(super) fn refused(&self, text: &str) -> String {
        let what = match &self.queue {
            Some(queue) if self.exchange.as_str().is_empty() => format!("queue \"{queue}\""),
            Some(queue) => format!("exchange \"{}\" and queue \"{queue}\"", self.exchange),
            None => format!("exchange \"{}\"", self.exchange),
        };
        format!(
            "RabbitMQ refused to declare {what}: {text}; make the route's rabbitmq settings agree with what is there, or remove rabbitmq.declare"
        )
    }
}
