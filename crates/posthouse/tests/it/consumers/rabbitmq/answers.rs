//! L7: what the broker is told, and when.

use super::*;
use crate::support::{Postgres, TestDb, bounded};
use posthouse_faults::Mode;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_acknowledged_after_the_commit() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromRabbitMq>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        bench.send(&message("1")).await;
        wait_for("it to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
        assert_eq!(bench.feed.count("messages_unacknowledged").await, 1);
        gate.add_permits(1);
        bench.wait_effects(1).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// The broker is given no more than the settings say, whatever waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_broker_hands_out_no_more_than_the_prefetch() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromRabbitMq>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        for n in 0..20 {
            bench.send(&message(&n.to_string())).await;
        }
        let consumer = bench.consume(with(2, 7)).await;
        wait_for("the prefetch to be used", PATIENCE, async || consumer.status().in_hand == 7).await;
        assert_eq!((bench.feed.count("messages_unacknowledged").await, bench.feed.count("messages").await), (7, 20));
        gate.add_permits(1_000);
        bench.wait_effects(20).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// The connection breaks while the handler runs: it commits, its acknowledgement goes nowhere, and the second delivery has no
/// effect. The number of the old delivery is that of another one on the new channel, which must not be acknowledged by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_between_commit_and_acknowledgement_costs_a_duplicate() {
    bounded(async {
        let mut feed = FromRabbitMq::with(&[]).await;
        let proxy = feed.by_proxy().await;
        let gate = Arc::new(Semaphore::new(0));
        let bench = feed.bench(Fixture::with(quick()).await, |script| Script { gate: Some(gate.clone()), ..script });
        let consumer = bench.consume(with(1, 3)).await;
        for id in ["1", "2", "3"] {
            bench.send(&message(id)).await;
        }
        wait_for("all to be taken", PATIENCE, async || consumer.status().in_hand == 3).await;
        proxy.set(Mode::Cut);
        wait_for("the loss", PATIENCE, async || !consumer.status().connected).await;
        wait_for("their return", PATIENCE, async || bench.feed.count("messages_ready").await == 3).await;
        // What has run by then is still running, or waiting, and answers on a channel that is gone.
        proxy.set(Mode::Open);
        wait_connected(&consumer).await;
        gate.add_permits(1_000);
        bench.wait_effects(3).await;
        bench.wait_acknowledged().await;
        assert_eq!(bench.fixture.effects().await, 3);
        let status = consumer.status();
        assert!(
            status.connected && !status.last_error.clone().unwrap_or_default().contains("unknown delivery tag"),
            "{status:?}"
        );
        assert_eq!((status.processed, status.duplicates), (3, 3), "{status:?}");
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// The database as the test reaches it, and as the consumer does.
pub(super) async fn behind_proxy() -> (Fixture<Postgres>, Inbox<sqlx::Postgres>, Proxy) {
    let fixture = Fixture::<Postgres>::new().await;
    let address = fixture.place.url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
    let proxy = Proxy::start(address.clone()).await;
    let pool = Postgres::connect(&fixture.place.url.replace(&address, &proxy.address.to_string())).await;
    let mut settings = quick();
    settings.database_timeout = Duration::from_secs(2);
    let inbox = fixture.beside(pool, "inventory", settings);
    (fixture, inbox, proxy)
}

#[derive(Clone)]
pub(super) struct Effect {
    pub(super) effects: String,
    pub(super) seen: Arc<Mutex<Vec<Incoming>>>,
}

impl Handler<sqlx::Postgres> for Effect {
    type Message = Incoming;

    async fn handle(&self, tx: &mut Tx<sqlx::Postgres>, m: Incoming) -> Result<(), HandlerError> {
        self.seen.lock().unwrap().push(m.clone());
        effect::<Postgres>(tx, &self.effects, &m.message_id.unwrap_or_default()).await;
        Ok(())
    }

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
}

/// The database is away for more failures than a message may be delivered. In a quorum queue, which counts returns and drops
/// what had too many, it goes back once at most.
async fn the_database_is_away(queue_type: QueueType, limits: &[(&str, AMQPValue)]) {
    let (fixture, inbox, proxy) = behind_proxy().await;
    let mut arguments = vec![("x-queue-type", type_of(queue_type))];
    arguments.extend(limits.iter().cloned());
    let feed = FromRabbitMq::with(&arguments).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let inbox = inbox.on("t", Effect { effects: fixture.effects.clone(), seen: seen.clone() });
    let consumer = feed.consumer().start(&inbox).await.expect("start");
    wait_connected(&consumer).await;
    proxy.set(Mode::Cut);
    let away = std::time::Instant::now();
    feed.send(&message("1"), |route| route).await;
    wait_for("several tries in vain", PATIENCE, async || consumer.status().given_back >= 5).await;
    // Half of 0.1 s before it goes back at least, then of 0.1, 0.2 and 0.4 s where it is kept.
    assert!(away.elapsed() > Duration::from_millis(400), "{:?}", away.elapsed());
    proxy.set(Mode::Open);
    wait_for("its effect", PATIENCE, async || fixture.effects().await == 1).await;
    wait_for("the acknowledgement", PATIENCE, async || consumer.status().in_hand == 0).await;
    assert_eq!((fixture.effects().await, consumer.status().processed), (1, 1));
    // It had been delivered before, so its run was written down before it began.
    assert!(seen.lock().unwrap().iter().all(|m| m.redelivered), "{seen:?}");
    if queue_type == QueueType::Classic {
        assert_eq!(feed.count("messages").await, 0);
    }
    consumer.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_outlives_an_absent_database() {
    bounded(the_database_is_away(QueueType::Classic, &[])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_queues_delivery_limit_is_not_used_up_by_an_absent_database() {
    bounded(the_database_is_away(QueueType::Quorum, &[("x-delivery-limit", AMQPValue::LongInt(2))])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_consumers_share_a_queue() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let (first, second) = (bench.consume(with(4, 10)).await, bench.consume(with(4, 10)).await);
        wait_connected(&first).await;
        wait_connected(&second).await;
        for n in 0..200 {
            bench.send(&message(&n.to_string())).await;
        }
        bench.wait_effects(200).await;
        bench.wait_acknowledged().await;
        let (a, b) = (first.status(), second.status());
        assert_eq!((a.processed + b.processed, a.duplicates + b.duplicates), (200, 0));
        assert!(a.processed > 0 && b.processed > 0, "{a:?} {b:?}");
        first.shutdown(SOON).await;
        second.shutdown(SOON).await;
    })
    .await;
}

/// Stopping waits for a handler, but nobody else waits for what stood behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_gives_back_at_once_what_is_not_running() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromRabbitMq>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        for n in 0..9 {
            bench.send(&message(&n.to_string())).await;
        }
        let consumer = bench.consume(with(1, 5)).await;
        wait_for("the prefetch to be used", PATIENCE, async || bench.feed.count("messages_unacknowledged").await == 5).await;
        wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
        let stopping = tokio::spawn(consumer.shutdown(SOON));
        wait_for("their return", PATIENCE, async || bench.feed.count("messages_ready").await == 8).await;
        assert_eq!(bench.script.running.load(SeqCst), 1);
        gate.add_permits(1);
        stopping.await.unwrap();
        assert_eq!((bench.fixture.effects().await, bench.feed.count("messages").await), (1, 8));
    })
    .await;
}
