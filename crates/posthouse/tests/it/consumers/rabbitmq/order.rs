//! Order across what goes wrong.

use super::*;
use crate::support::bounded;

fn in_order(concurrency: u32, prefetch: u32) -> ConsumerSettings {
    let mut settings = with(concurrency, prefetch);
    settings.order = ConsumerOrder::Key;
    settings
}

fn of_key(key: &str, n: usize) -> Envelope {
    let mut m = message(&format!("{key}{n:03}"));
    m.key = Some(key.into());
    m
}

/// Ids in the order in which they first ran.
fn firsts(script: &Script, key: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for id in script.ids().into_iter().filter(|id| id.starts_with(key)) {
        if !out.contains(&id) {
            out.push(id);
        }
    }
    out
}

/// A single active consumer's queue goes from one process to the next, several times, with messages in hand each time.
async fn handover(queue_type: QueueType) {
    let arguments = [("x-single-active-consumer", AMQPValue::Boolean(true)), ("x-queue-type", type_of(queue_type))];
    let feed = FromRabbitMq::with(&arguments).await;
    let bench = feed.bench(Fixture::with(quick()).await, |script| script);
    let mut active = bench.consume(in_order(4, 20)).await;
    wait_connected(&active).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move {
            for n in 0..150 {
                for key in ["a", "b"] {
                    feed.send(&of_key(key, n), |route| route).await;
                }
            }
        }
    });
    for round in 1..=5 {
        let standby = bench.consume(in_order(4, 20)).await;
        wait_connected(&standby).await;
        wait_for("some to be done", PATIENCE, async || active.status().processed >= 20).await;
        if round % 2 == 0 {
            // As if it had been killed.
            drop(active);
        } else {
            active.shutdown(SOON).await;
        }
        active = standby;
    }
    sending.await.unwrap();
    bench.wait_effects(300).await;
    for key in ["a", "b"] {
        let expected: Vec<_> = (0..150).map(|n| format!("{key}{n:03}")).collect();
        assert_eq!(firsts(&bench.script, key), expected);
    }
    active.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_active_consumers_order_survives_its_handover_on_a_classic_queue() {
    bounded(handover(QueueType::Classic)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_active_consumers_order_survives_its_handover_on_a_quorum_queue() {
    bounded(handover(QueueType::Quorum)).await;
}
