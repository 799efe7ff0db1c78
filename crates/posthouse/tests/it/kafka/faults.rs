//! Brokers that die and come back.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use posthouse::transport::Kafka;
use posthouse::{Message, OnExhausted, Ordering, Outbox, Relay};

use super::{Record, client, create_topic, records, to};
use crate::relay::quick;
use crate::support::broker::Broker;
use crate::support::{Postgres, SOON, TestDb, bounded, pending, scale, wait_for};

const TOPIC: &str = "stream";

async fn relay(outbox: &Outbox<sqlx::Postgres>, brokers: &str, ordering: Ordering) -> Relay {
    let mut settings = quick();
    settings.default_route.retry.max_attempts = 10_000;
    let route =
        to(TOPIC).retry(settings.default_route.retry).concurrency(1_000).ordering(ordering).on_exhausted(OnExhausted::Skip);
    let kafka = Kafka::new(brokers).unwrap();
    Relay::builder(outbox).settings(settings).transport("kafka", kafka).route("stream", route).start().await.unwrap()
}

/// Numbers of a key in the order of their first arrival.
fn first_arrivals(found: &[Record]) -> HashMap<String, Vec<usize>> {
    let mut seen = HashSet::new();
    let mut out: HashMap<String, Vec<usize>> = HashMap::new();
    for record in found {
        let number: usize = record.text().trim().parse().unwrap();
        if seen.insert(number) {
            out.entry(record.key.clone().unwrap()).or_default().push(number);
        }
    }
    out
}

/// B5: the broker is killed again and again while messages stream: none is lost, first arrivals of a key are in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_again_and_again_nothing_is_lost() {
    killed_again_and_again(Ordering::Strict).await;
}

/// O4 and B5: the same with a key's messages in flight together, while the topic refuses some of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_again_and_again_pipelined_order_holds() {
    killed_again_and_again(Ordering::Pipelined).await;
}

async fn killed_again_and_again(ordering: Ordering) {
    bounded(async {
        // Too large for the topic: FAILED at once, and what follows goes on.
        let refused = |n: usize| ordering == Ordering::Pipelined && n % 97 == 50;
        let (count, kills) = if scale() > 1 { (100_000, 20) } else { (2_000, 1) };
        let broker = Broker::kafka().await;
        create_topic(&client(broker.url(), &[]), TOPIC, 3, &[("max.message.bytes", "20000")]).await;
        let outbox = Postgres::fresh().await;
        let relay = relay(&outbox, broker.url(), ordering).await;
        let per_kill = count / (kills + 1);
        for round in 0..=kills {
            for i in (round * per_kill..(round + 1) * per_kill).step_by(50) {
                let mut tx = outbox.begin().await.unwrap();
                for n in i..(i + 50).min((round + 1) * per_kill) {
                    let m = Message::to("stream").id(format!("m{n}")).key(n % 20);
                    let m = m.payload(if refused(n) { format!("{n:30000}") } else { n.to_string() });
                    outbox.publish(&mut tx, m).await.unwrap();
                }
                outbox.commit(tx).await.unwrap();
                // In the middle of it, with records under way.
                if round < kills && i - round * per_kill == per_kill / 100 * 50 {
                    let before = relay.stats().delivered;
                    wait_for("some are delivered", SOON * 3, async || relay.stats().delivered > before).await;
                    broker.kill().await;
                }
            }
            if round < kills {
                broker.start().await;
            }
        }
        let published = per_kill * (kills + 1);
        let failed = (0..published).filter(|n| refused(*n)).count();
        wait_for("everything is done", SOON * 4 * scale() as u32, async || {
            pending::<Postgres>(&outbox).await == failed as i64 && relay.stats().in_memory == 0
        })
        .await;
        relay.shutdown(Duration::from_secs(10)).await;

        let found = records(client(broker.url(), &[]), TOPIC).await;
        let ids: HashSet<_> = found.iter().map(|r| r.headers["posthouse-message-id"].clone()).collect();
        let lost: Vec<_> =
            (0..published).filter(|n| !refused(*n)).map(|n| format!("m{n}")).filter(|id| !ids.contains(id)).collect();
        println!(
            "{ordering:?}: {published} messages, {kills} kills: {} lost, {} duplicates",
            lost.len(),
            found.len() - ids.len()
        );
        assert!(lost.is_empty(), "lost: {lost:?}");
        for (key, numbers) in first_arrivals(&found) {
            assert!(numbers.is_sorted(), "key {key}: {numbers:?}");
        }
    })
    .await;
}

/// L5, L16, B3: nothing runs when the relay starts, and one message is enough to get going when the broker comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_comes_later_gets_what_waits() {
    bounded(async {
        let broker = Broker::kafka().await;
        create_topic(&client(broker.url(), &[]), TOPIC, 1, &[]).await;
        broker.kill().await;
        let outbox = Postgres::fresh().await;
        let relay = relay(&outbox, broker.url(), Ordering::Strict).await;
        outbox.publish_alone(Message::to("stream").key(1).payload("0")).await.unwrap();
        wait_for("the destination counts as down", SOON, async || relay.stats().unavailable > 0).await;
        assert_eq!(relay.stats().retried, 0, "no attempt is counted");
        broker.start().await;
        wait_for("it is delivered", SOON * 2, async || pending::<Postgres>(&outbox).await == 0).await;
        assert_eq!(relay.stats().retried, 0);
        relay.shutdown(Duration::from_secs(10)).await;
        let found: HashSet<_> = records(client(broker.url(), &[]), TOPIC).await.iter().map(Record::text).collect();
        assert_eq!(found, HashSet::from(["0".to_owned()]));
    })
    .await;
}
