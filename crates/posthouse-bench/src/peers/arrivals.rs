//! What arrives at the broker, and when.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, ConnectionProperties, ExchangeKind};

use super::{at, unix_micros};

/// A queue that an interrupted run left goes away by itself, in milliseconds.
const LEFT_BEHIND: i32 = 3_600_000;

/// Between two looks at the queue.
const LOOK: Duration = Duration::from_millis(5);

/// A queue of its own.
pub(super) struct Arrivals {
    connection: Connection,
    channel: Channel,
    queue: ShortString,
    seen: Arc<Mutex<Seen>>,
}

/// What a consumer has got.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// By number: when it should have been published and when it arrived, in microseconds since 1970.
    pub(super) times: HashMap<u64, (u64, u64)>,
    pub(super) duplicates: u64,
    /// Bodies without a number.
    pub(super) strange: u64,
}

impl Seen {
    fn add(&mut self, body: &[u8], now: u64) {
        match numbers(body) {
            None => self.strange += 1,
            Some((number, intended)) => match self.times.entry(number) {
                std::collections::hash_map::Entry::Occupied(_) => self.duplicates += 1,
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert((intended, now));
                }
            },
        }
    }
}

/// A body is a number, a time, and padding; a peer may have made a JSON string of it.
fn numbers(body: &[u8]) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(body).ok()?.trim_start_matches('"');
    let mut words = text.split(' ');
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

impl Arrivals {
    pub(super) async fn prepare(url: &str, queue: &str) -> Result<Self, String> {
        let connection = at("RabbitMQ", Connection::connect(url, ConnectionProperties::default()).await)?;
        let channel = at("channel", connection.create_channel().await)?;
        let arrivals = Self { connection, channel, queue: queue.into(), seen: Arc::default() };
        arrivals.declare(false).await?;
        let exchange = || arrivals.queue.clone();
        let options = ExchangeDeclareOptions { auto_delete: true, ..Default::default() };
        let declared = arrivals.channel.exchange_declare(exchange(), ExchangeKind::Direct, options, FieldTable::default()).await;
        at("exchange", declared)?;
        let bind = QueueBindOptions::default();
        at("bind", arrivals.channel.queue_bind(exchange(), exchange(), exchange(), bind, FieldTable::default()).await)?;
        Ok(arrivals)
    }

    async fn declare(&self, passive: bool) -> Result<u64, String> {
        let mut arguments = FieldTable::default();
        arguments.insert("x-expires".into(), AMQPValue::LongInt(LEFT_BEHIND));
        let options = QueueDeclareOptions { durable: true, passive, ..Default::default() };
        let queue = at("queue", self.channel.queue_declare(self.queue.clone(), options, arguments).await)?;
        Ok(u64::from(queue.message_count()))
    }

    /// How many messages wait in the queue.
    pub(super) async fn waiting(&self) -> Result<u64, String> {
        self.declare(true).await
    }

    /// Returns as soon as so many messages wait in the queue.
    pub(super) async fn wait_for(&self, n: u64, patience: Duration) -> Result<(), String> {
        let until = Instant::now() + patience;
        loop {
            let arrived = self.waiting().await?;
            if arrived >= n {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("{arrived} of {n} messages arrived within {patience:?}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// From now on messages are taken out of the queue as they come.
    pub(super) async fn consume(&self) -> Result<(), String> {
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let consumer = self.channel.basic_consume(self.queue.clone(), "".into(), options, FieldTable::default()).await;
        let mut arriving = at("consume", consumer)?;
        let seen = self.seen.clone();
        // Ends with the channel.
        tokio::spawn(async move {
            while let Some(Ok(delivery)) = arriving.next().await {
                let now = unix_micros();
                seen.lock().unwrap_or_else(PoisonError::into_inner).add(&delivery.data, now);
            }
        });
        Ok(())
    }

    pub(super) fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when a consumer has got so many different messages and the queue is empty.
    pub(super) async fn wait_consumed(&self, n: u64, patience: Duration) -> Result<(), String> {
        let until = Instant::now() + patience;
        loop {
            let seen = self.seen().times.len() as u64;
            if seen >= n && self.waiting().await? == 0 {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("{seen} of {n} different messages arrived within {patience:?}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    pub(super) async fn remove(self) -> Result<(), String> {
        at("delete", self.channel.queue_delete(self.queue.clone(), QueueDeleteOptions::default()).await)?;
        at("delete", self.channel.exchange_delete(self.queue.clone(), ExchangeDeleteOptions::default()).await)?;
        at("close", self.connection.close(200, "OK".into()).await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_counts_once_whatever_a_peer_made_of_its_body() {
        let mut seen = Seen::default();
        seen.add(b"0000000007 0000000000000100 xxx", 150);
        seen.add(b"\"0000000008 0000000000000110 xxx\"", 160);
        seen.add(b"0000000007 0000000000000100 xxx", 170);
        seen.add(b"{}", 180);
        assert_eq!(seen.times, HashMap::from([(7, (100, 150)), (8, (110, 160))]));
        assert_eq!((seen.duplicates, seen.strange), (1, 1));
    }
}
