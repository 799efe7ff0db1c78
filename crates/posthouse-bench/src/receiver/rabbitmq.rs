//! A durable queue, reached through the default exchange.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use posthouse::transport;

use super::{CONTENT_TYPE, Load, Receiver};
use crate::database::{fresh_name, must, url};
use crate::meter::Spent;

pub(super) const VARIABLE: &str = "POSTHOUSE_TEST_RABBITMQ_URL";

/// A queue that an interrupted run left goes away by itself, in milliseconds.
const LEFT_BEHIND: i32 = 3_600_000;

#[derive(Debug)]
pub(crate) struct RabbitMq {
    queue: ShortString,
    connection: Connection,
    channel: Channel,
}

async fn connect() -> Connection {
    must("RabbitMQ", Connection::connect(&url(VARIABLE), ConnectionProperties::default()).await)
}

impl RabbitMq {
    async fn declare(&self, passive: bool) -> usize {
        let mut arguments = FieldTable::default();
        arguments.insert("x-expires".into(), AMQPValue::LongInt(LEFT_BEHIND));
        let options = QueueDeclareOptions { durable: true, passive, ..Default::default() };
        let queue = must("queue", self.channel.queue_declare(self.queue.clone(), options, arguments).await);
        queue.message_count() as usize
    }

    fn properties(load: &Load, n: usize) -> BasicProperties {
        let mut headers = FieldTable::default();
        if let Some(key) = load.key(n) {
            headers.insert("posthouse-key".into(), AMQPValue::LongString(key.into()));
        }
        headers.insert("posthouse-attempt".into(), AMQPValue::LongLongInt(1));
        let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |d| d.as_secs());
        let properties = BasicProperties::default().with_delivery_mode(2).with_timestamp(now).with_headers(headers);
        properties.with_message_id(load.id(n).into()).with_content_type(CONTENT_TYPE.into())
    }
}

impl Receiver for RabbitMq {
    const NAME: &'static str = "rabbitmq";
    const SCHEME: &'static str = "amqp";
    type Transport = transport::RabbitMq;

    async fn prepare() -> Self {
        let connection = connect().await;
        let channel = must("channel", connection.create_channel().await);
        let receiver = Self { queue: fresh_name().into(), connection, channel };
        receiver.declare(false).await;
        receiver
    }

    fn to(&self) -> String {
        format!("amqp:/{}", self.queue)
    }

    fn transport(&self) -> Self::Transport {
        must("transport", transport::RabbitMq::new(&*url(VARIABLE)))
    }

    async fn publish(&self, load: &Load) -> Spent {
        let connection = connect().await;
        let channel = must("channel", connection.create_channel().await);
        must("confirms", channel.confirm_select(ConfirmSelectOptions::default()).await);
        let publish = |n: usize| {
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            channel.basic_publish("".into(), self.queue.clone(), options, &load.payload, Self::properties(load, n))
        };
        let confirmed = |confirmation: lapin::Result<Confirmation>| match must("confirm", confirmation) {
            Confirmation::Ack(None) => {}
            other => must("confirm", Err(format!("{other:?}"))),
        };
        confirmed(must("publish", publish(load.n).await).await);

        let meter = self.meter();
        let mut confirms = FuturesUnordered::new();
        for n in 0..load.n {
            if confirms.len() >= load.in_flight
                && let Some(confirmation) = confirms.next().await
            {
                confirmed(confirmation);
            }
            confirms.push(must("publish", publish(n).await));
        }
        while let Some(confirmation) = confirms.next().await {
            confirmed(confirmation);
        }
        let spent = meter.stop();
        must("close", connection.close(200, "OK".into()).await);
        spent
    }

    async fn arrived(&self) -> usize {
        self.declare(true).await
    }

    async fn clear(&mut self) {
        must("purge", self.channel.queue_purge(self.queue.clone(), QueuePurgeOptions::default()).await);
    }

    async fn remove(self) {
        must("delete", self.channel.queue_delete(self.queue, QueueDeleteOptions::default()).await);
        must("close", self.connection.close(200, "OK".into()).await);
    }
}
