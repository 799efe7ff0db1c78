//! The broker's side: queues for the receivers, and one that keeps everything for the checker.

use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use tokio::time::timeout;

use super::check::Arrival;

/// Where the relays send to.
pub(super) const EXCHANGE: &str = "bookings";
/// Routing keys, and the receivers' queues.
pub(super) const QUEUES: [&str; 2] = ["keyed", "loose"];
/// Gets a copy of everything, and nobody takes anything from it before the end: the broker's own log of what came, in order.
const LOG: &str = "log";

const DEADLINE: Duration = Duration::from_secs(30);

async fn channel(url: &str) -> lapin::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    Ok((connection, channel))
}

/// Declares everything.
pub(super) async fn prepare(url: &str) -> lapin::Result<()> {
    let (connection, channel) = channel(url).await?;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    channel.exchange_declare(EXCHANGE.into(), ExchangeKind::Direct, durable, FieldTable::default()).await?;
    for queue in QUEUES.into_iter().chain([LOG]) {
        let mut arguments = FieldTable::default();
        if queue == "keyed" {
            // One consumer at a time: with that, the order in which keyed messages come is the order in which they are handled.
            arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(queue.into(), durable, arguments).await?;
    }
    for key in QUEUES {
        for queue in [key, LOG] {
            channel
                .queue_bind(queue.into(), EXCHANGE.into(), key.into(), QueueBindOptions::default(), FieldTable::default())
                .await?;
        }
    }
    connection.close(200, "OK".into()).await
}

async fn count(channel: &Channel, queue: &str) -> lapin::Result<u32> {
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    Ok(channel.queue_declare(queue.into(), passive, FieldTable::default()).await?.message_count())
}

/// Messages in the receivers' queues that no consumer has.
pub(super) async fn waiting(url: &str) -> lapin::Result<u32> {
    let (connection, channel) = channel(url).await?;
    let mut waiting = 0;
    for queue in QUEUES {
        waiting += count(&channel, queue).await?;
    }
    connection.close(200, "OK".into()).await?;
    Ok(waiting)
}

/// Everything that ever came, in order. Once.
pub(super) async fn log(url: &str) -> Result<Vec<Arrival>, String> {
    let read = async {
        let (connection, channel) = channel(url).await?;
        let count = count(&channel, LOG).await? as usize;
        let unacknowledged = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let deliveries = channel.basic_consume(LOG.into(), "checker".into(), unacknowledged, FieldTable::default()).await?;
        let mut all = Vec::with_capacity(count);
        let mut deliveries = deliveries.take(count);
        while let Some(delivery) = timeout(DEADLINE, deliveries.next()).await.map_err(|_| "the log's messages stopped coming")? {
            let delivery = delivery?;
            all.push(arrival(&delivery.properties, delivery.data));
        }
        connection.close(200, "OK".into()).await?;
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(all)
    };
    read.await.map_err(|e| format!("reading the broker's log: {e}"))
}

fn arrival(properties: &BasicProperties, payload: Vec<u8>) -> Arrival {
    let text = |of: &Option<ShortString>| of.as_ref().map(|text| text.as_str().to_owned()).unwrap_or_default();
    let key = properties.headers().as_ref().and_then(|headers| headers.inner().get("posthouse-key").cloned());
    let key = key.and_then(|key| match key {
        AMQPValue::LongString(key) => Some(String::from_utf8_lossy(key.as_bytes()).into_owned()),
        _ => None,
    });
    Arrival { id: text(properties.message_id()), kind: text(properties.kind()), key, payload }
}
