//! `amqp:` destinations against a real RabbitMQ, one behaviour per file.

mod blocked;
mod connection;
mod message;
mod outage;
mod routing;

use std::collections::HashSet;
use std::time::Duration;

use lapin::options::{BasicGetOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};
use posthouse::testing::{deliver, deliver_batch};
use posthouse::transport::Outcome;
use posthouse::{Envelope, RabbitMqRoute, Route};

use crate::support::broker::{Kind, test_url};

pub(crate) use posthouse::transport::RabbitMq;

/// The deadline of a delivery, where a test is not about deadlines.
const PATIENCE: Duration = Duration::from_secs(20);

/// A receiver on the broker, with names of its own.
struct Rig {
    _connection: Connection,
    channel: Channel,
    name: String,
}

impl Rig {
    async fn new() -> Self {
        Self::at(&test_url(Kind::RabbitMq)).await
    }

    async fn at(url: &str) -> Self {
        let connection = Connection::connect(url, ConnectionProperties::default()).await.expect("RabbitMQ");
        let channel = connection.create_channel().await.expect("channel");
        Self { _connection: connection, channel, name: format!("t-{:016x}", fastrand::u64(..)) }
    }

    /// A topic exchange with this test's name.
    async fn exchange(&self) -> &str {
        let options = ExchangeDeclareOptions::default();
        let name = self.name.as_str();
        self.channel.exchange_declare(name.into(), ExchangeKind::Topic, options, FieldTable::default()).await.expect("exchange");
        name
    }

    /// A queue, gone with the connection.
    async fn queue(&self, suffix: &str, arguments: &[(&str, AMQPValue)]) -> String {
        let name = format!("{}-{suffix}", self.name);
        let mut table = FieldTable::default();
        for (key, value) in arguments {
            table.insert((*key).into(), value.clone());
        }
        let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
        self.channel.queue_declare(name.as_str().into(), options, table).await.expect("queue");
        name
    }

    async fn bind(&self, queue: &str, key: &str) {
        let (exchange, options) = (self.name.as_str(), QueueBindOptions::default());
        self.channel.queue_bind(queue.into(), exchange.into(), key.into(), options, FieldTable::default()).await.expect("bind");
    }

    async fn take(&self, queue: &str) -> Option<lapin::message::Delivery> {
        let got = self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.expect("get");
        got.map(|message| message.delivery)
    }

    /// Ids of everything in the queue.
    async fn ids(&self, queue: &str) -> HashSet<String> {
        let mut ids = HashSet::new();
        while let Some(delivery) = self.take(queue).await {
            ids.insert(delivery.properties.message_id().as_ref().expect("an id").to_string());
        }
        ids
    }
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

fn transport() -> RabbitMq {
    RabbitMq::new(test_url(Kind::RabbitMq).as_str()).expect("settings")
}

fn message(payload: impl Into<Vec<u8>>) -> Envelope {
    Envelope::for_test("amqp", payload)
}

fn route(address: &str) -> Route {
    Route::to(format!("amqp:{address}"))
}

fn with(address: &str, change: impl FnOnce(&mut RabbitMqRoute)) -> Route {
    let mut rabbitmq = RabbitMqRoute::default();
    change(&mut rabbitmq);
    route(address).rabbitmq(rabbitmq)
}

async fn send(transport: &RabbitMq, address: &str) -> Outcome {
    deliver(transport, message("{}"), route(address), PATIENCE).await
}

/// Sends one message to each address in one batch; the outcomes in the order of the addresses, with the messages' ids.
async fn send_all(transport: &RabbitMq, batch: Vec<(Envelope, Route)>) -> Vec<(String, Outcome)> {
    let ids: Vec<String> = batch.iter().map(|(message, _)| message.message_id.to_string()).collect();
    let mut outcomes = deliver_batch(transport, batch, PATIENCE).await;
    outcomes.sort_by_key(|(position, _)| *position);
    outcomes.into_iter().map(|(position, outcome)| (ids[position].clone(), outcome)).collect()
}

#[track_caller]
fn retry(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Retry { error, .. } => &error.error,
        other => panic!("expected Retry, got {other:?}"),
    }
}

#[track_caller]
fn rejected(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Rejected(failure) => &failure.error,
        other => panic!("expected Rejected, got {other:?}"),
    }
}

#[track_caller]
fn unavailable(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Unavailable(failure) => &failure.error,
        other => panic!("expected Unavailable, got {other:?}"),
    }
}

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in {error:?}");
    }
}
