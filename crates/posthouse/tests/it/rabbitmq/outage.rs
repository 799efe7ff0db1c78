//! Whole relays: the broker dies, comes back, or isn't there at first.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions};
use posthouse::{Message, Relay};

use super::*;
use crate::relay::{quick, quick_route};
use crate::support::broker::Broker;
use crate::support::{Postgres, SOON, TestDb, pending, scale, wait_for};

fn declaring(queue: &str) -> Route {
    let mut rabbitmq = RabbitMqRoute::default();
    rabbitmq.declare = true;
    quick_route(&format!("amqp:/{queue}")).concurrency(500).rabbitmq(rabbitmq)
}

/// Everything in a durable queue: (id, key, payload) in order.
async fn drain(url: &str, queue: &str) -> Vec<(String, String, u64)> {
    let rig = Rig::at(url).await;
    let (consumer, options) = ("".into(), BasicConsumeOptions { no_ack: true, ..Default::default() });
    let mut arriving = rig.channel.basic_consume(queue.into(), consumer, options, FieldTable::default()).await.expect("consume");
    let mut out = Vec::new();
    // Everything is confirmed before this is called, so a pause is the end.
    while let Ok(Some(delivery)) = tokio::time::timeout(Duration::from_secs(2), arriving.next()).await {
        let delivery = delivery.expect("delivery");
        let header = delivery.properties.headers().as_ref().and_then(|h| h.inner().get("posthouse-key").cloned());
        let Some(AMQPValue::LongString(key)) = header else { panic!("no key") };
        let id = delivery.properties.message_id().as_ref().expect("an id").to_string();
        let number = String::from_utf8_lossy(&delivery.data).parse().expect("a number");
        out.push((id, key.to_string(), number));
        drop(delivery.ack(BasicAckOptions::default()));
    }
    out
}

/// A durable queue.
async fn declare(url: &str, queue: &str) {
    let connection = lapin::Connection::connect(url, lapin::ConnectionProperties::default()).await.expect("connect");
    let channel = connection.create_channel().await.expect("channel");
    let options = lapin::options::QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, lapin::types::FieldTable::default()).await.expect("declare");
}

/// First arrivals of each key, in the order in which they were published.
fn order_violations(arrived: &[(String, String, u64)]) -> usize {
    let (mut first, mut last) = (HashSet::new(), HashMap::new());
    let mut wrong = 0;
    for (id, key, number) in arrived {
        if first.insert(id) && last.insert(key, *number).is_some_and(|before| before > *number) {
            wrong += 1;
        }
    }
    wrong
}

/// B5, L2, L16: killed and started again, with messages arriving all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hard_kills_lose_nothing() {
    let count = (2_000 * scale()).min(100_000);
    let restarts = if scale() > 1 { (3 * scale()).min(20) } else { 1 };
    let limit = Duration::from_secs(100 + 30 * restarts as u64);
    let test = async {
        let broker = Broker::rabbitmq().await;
        let outbox = Postgres::fresh().await;
        let queue = "stream";
        // A queue that is not on the broker's disk yet would be lost with it, and what it confirmed too.
        declare(broker.url(), queue).await;
        broker.restart().await;
        let transport = RabbitMq::new(broker.url()).expect("settings");
        let relay = Relay::builder(&outbox)
            .settings(quick())
            .transport("amqp", transport)
            .route("stream", declaring(queue))
            .start()
            .await
            .expect("relay");
        let publish = async {
            let mut ids = HashMap::new();
            for round in 0..(count / 100) {
                let mut tx = outbox.pool().begin().await.expect("begin");
                for i in 0..100 {
                    let number = round * 100 + i;
                    let message = Message::to("stream").key(number % 50).payload(number.to_string());
                    ids.insert(outbox.publish(&mut *tx, message).await.expect("publish").to_string(), number);
                }
                outbox.commit(tx).await.expect("commit");
                // Spread over the restarts.
                let pace = Duration::from_secs(3) * restarts as u32 * 100 / count as u32;
                tokio::time::sleep(pace).await;
            }
            ids
        };
        let restart = async {
            for _ in 0..restarts {
                let before = relay.stats().delivered;
                wait_for("a few more are delivered", SOON, async || relay.stats().delivered > before).await;
                broker.kill().await;
                wait_for("the relay notices", SOON, async || {
                    pending::<Postgres>(&outbox).await == 0 || relay.stats().unavailable > 0
                })
                .await;
                broker.start().await;
            }
        };
        let (ids, ()) = tokio::join!(publish, restart);
        let started = Instant::now();
        wait_for("all are delivered", limit, async || pending::<Postgres>(&outbox).await == 0).await;
        let (stats, last) = (relay.stats(), started.elapsed());
        relay.shutdown(Duration::from_secs(10)).await;
        let arrived = drain(broker.url(), queue).await;
        let distinct: HashSet<_> = arrived.iter().map(|(id, ..)| id.clone()).collect();
        let mut lost: Vec<usize> = ids.iter().filter(|(id, _)| !distinct.contains(*id)).map(|(_, number)| *number).collect();
        lost.sort_unstable();
        println!(
            "{count} messages, {restarts} restarts: {} lost, {} duplicates, {} times unavailable, {} retried; the rest came {last:.1?} after the last start",
            lost.len(),
            arrived.len() - distinct.len(),
            stats.unavailable,
            stats.retried,
        );
        assert!(lost.is_empty(), "lost: {lost:?}");
        assert_eq!(distinct.len(), ids.len());
        assert_eq!(order_violations(&arrived), 0);
        assert_eq!((stats.failed, stats.retried), (0, 0), "an outage counts no attempts");
    };
    tokio::time::timeout(limit, test).await.expect("the test ends");
}

/// L5: published while the broker is down; all of it flows when it comes, without another message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_later_gets_everything() {
    crate::support::bounded(async {
        let broker = Broker::rabbitmq().await;
        broker.kill().await;
        let outbox = Postgres::fresh().await;
        let relay = Relay::builder(&outbox)
            .settings(quick())
            .transport("amqp", RabbitMq::new(broker.url()).expect("settings"))
            .route("stream", declaring("late"))
            .start()
            .await
            .expect("relay");
        for i in 0..100 {
            outbox.publish_alone(Message::to("stream").key(i % 7).payload(i.to_string())).await.expect("publish");
        }
        wait_for("the destination counts as down", SOON, async || relay.stats().unavailable > 0).await;
        assert_eq!(pending::<Postgres>(&outbox).await, 100);
        broker.start().await;
        wait_for("all are delivered", SOON * 2, async || pending::<Postgres>(&outbox).await == 0).await;
        assert_eq!((relay.stats().failed, relay.stats().retried), (0, 0));
        relay.shutdown(Duration::from_secs(10)).await;
        let arrived = drain(broker.url(), "late").await;
        assert_eq!(arrived.iter().map(|a| a.2).collect::<HashSet<_>>(), (0..100).collect());
        assert_eq!(order_violations(&arrived), 0);
    })
    .await;
}
