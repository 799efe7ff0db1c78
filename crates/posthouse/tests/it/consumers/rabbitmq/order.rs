//! Order across what goes wrong.

use super::answers::{Effect, behind_proxy};
use super::*;
use crate::support::bounded;
use posthouse_faults::Mode;

fn in_order(concurrency: u32, prefetch: u32) -> ConsumerSettings {
    let mut settings = with(concurrency, prefetch);
    settings.order = ConsumerOrder::Key;
    settings
}

fn of_key(key: &str, n: usize) -> Envelope {
    let mut m = message(&format!("{key}{n:05}"));
    m.key = Some(key.into());
    m
}

/// Ids in the order in which they first ran.
fn firsts(ids: &[String], key: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for id in ids.iter().filter(|id| id.starts_with(key)) {
        if !out.contains(id) {
            out.push(id.clone());
        }
    }
    out
}

/// A single active consumer's queue goes from one process to the next, several times, with messages in hand each time.
async fn handover(queue_type: QueueType) {
    let arguments = [("x-single-active-consumer", AMQPValue::Boolean(true)), ("x-queue-type", type_of(queue_type))];
    let feed = FromRabbitMq::with(&arguments).await;
    let mut settings = quick();
    // What was delivered again and was running when its process died is that process's own for as long as it could have run.
    settings.handler_timeout = Duration::from_secs(1);
    settings.database_timeout = Duration::from_secs(1);
    settings.lease = Duration::from_secs(1);
    let bench = feed.bench(Fixture::with(settings).await, |script| script);
    let mut active = bench.consume(in_order(4, 20)).await;
    wait_connected(&active).await;
    let enough = Arc::new(AtomicUsize::new(0));
    let sending = tokio::spawn({
        let (feed, enough) = (bench.feed.clone(), enough.clone());
        async move {
            for n in 0.. {
                if enough.load(SeqCst) > 0 {
                    return n;
                }
                for key in ["a", "b"] {
                    feed.send(&of_key(key, n), |route| route).await;
                }
            }
            0
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
    enough.store(1, SeqCst);
    let sent = sending.await.unwrap();
    wait_for("every effect", PATIENCE, async || bench.fixture.effects().await >= 2 * sent as i64).await;
    for key in ["a", "b"] {
        let expected: Vec<_> = (0..sent).map(|n| of_key(key, n).message_id.to_string()).collect();
        assert_eq!(firsts(&bench.script.ids(), key), expected);
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

/// While the database is away, what can't be handled keeps its place before what comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_survives_an_absent_database() {
    bounded(async {
        let (fixture, inbox, proxy) = behind_proxy().await;
        let feed = FromRabbitMq::with(&[]).await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let inbox = inbox.on("t", Effect { effects: fixture.effects.clone(), seen: seen.clone() });
        let consumer = feed.consumer().settings(in_order(4, 10)).start(&inbox).await.expect("start");
        wait_connected(&consumer).await;
        for n in 0..200 {
            feed.send(&of_key("a", n), |route| route).await;
            if n % 50 == 25 {
                let before = consumer.status().given_back;
                proxy.set(Mode::Cut);
                wait_for("tries in vain", PATIENCE, async || consumer.status().given_back >= before + 2).await;
                proxy.set(Mode::Open);
            }
        }
        wait_for("every effect", PATIENCE, async || fixture.effects().await == 200).await;
        let ids: Vec<_> = seen.lock().unwrap().iter().filter_map(|m| m.message_id.clone()).collect();
        let expected: Vec<_> = (0..200).map(|n| of_key("a", n).message_id.to_string()).collect();
        assert_eq!(firsts(&ids, "a"), expected);
        consumer.shutdown(SOON).await;
    })
    .await;
}
