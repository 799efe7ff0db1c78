//! What every consumer must do, against its real broker. What is peculiar to one has its own tests.

mod away;
mod feeds;
mod http;
mod kafka;
mod nats;
mod rabbitmq;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::consumer::Consumer;
use posthouse::inbox::{Handler, HandlerError, Inbox, Incoming};
use posthouse::store::{InboxFilter, InboxStatus};
use posthouse::{CloudEvents, ConsumerOrder, ConsumerSettings, Envelope, InboxSettings, MissingId, Tx};
use sqlx::Sqlite as Db;
use tokio::sync::Semaphore;

use self::feeds::Feed;
use crate::inbox::{Fixture, effect, quick};
use crate::support::{SOON, Sqlite, wait_for};

const PATIENCE: Duration = Duration::from_secs(30);

macro_rules! on_all_consumers {
    ($($name:ident),+ $(,)?) => {
        mod suite {
            on_all_consumers!(@ rabbitmq FromRabbitMq $($name)+);
            on_all_consumers!(@ kafka FromKafka $($name)+);
            on_all_consumers!(@ nats FromNats $($name)+);
            on_all_consumers!(@ http FromHttp $($name)+);
        }
    };
    (@ $kind:ident $feed:ident $($name:ident)+) => {
        mod $kind { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(crate::consumers::$name::<crate::consumers::$kind::$feed>()).await } )+ }
    };
}

on_all_consumers!(
    a_message_has_its_effect_once_however_often_it_is_sent,
    everything_of_a_message_reaches_the_handler,
    cloudevents_of_both_modes_are_understood,
    a_failed_message_is_run_again_and_disturbs_no_other,
    a_message_that_never_works_is_given_up_and_acknowledged,
    a_message_without_an_id_is_set_aside_with_its_bytes,
    a_message_without_an_id_can_be_refused,
    the_id_can_be_taken_from_the_payload,
    no_more_handlers_run_than_the_settings_allow,
    stopping_lets_what_runs_finish_and_gives_the_rest_back,
    what_a_stopped_consumer_was_running_is_delivered_again,
    in_key_order_a_failed_message_holds_back_its_key_alone,
);

/// What the handler shall do with each message, and what it did.
#[derive(Clone)]
struct Script {
    effects: String,
    /// How often the message of an id fails before it works.
    failures: Arc<Mutex<HashMap<String, usize>>>,
    /// Permits for handlers to go on, where a test holds them.
    gate: Option<Arc<Semaphore>>,
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    seen: Arc<Mutex<Vec<Incoming>>>,
}

impl Script {
    fn new(effects: &str) -> Self {
        Self {
            effects: effects.into(),
            failures: Arc::default(),
            gate: None,
            running: Arc::default(),
            most: Arc::default(),
            seen: Arc::default(),
        }
    }

    fn failing(self, id: &str, times: usize) -> Self {
        self.failures.lock().unwrap().insert(id.into(), times);
        self
    }

    fn seen(&self) -> Vec<Incoming> {
        self.seen.lock().unwrap().clone()
    }

    fn ids(&self) -> Vec<String> {
        self.seen().into_iter().map(|m| m.message_id.unwrap_or_default()).collect()
    }
}

/// Counts a running handler, also one that is dropped.
struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Handler<Db> for Script {
    type Message = Incoming;

    async fn handle(&self, tx: &mut Tx<Db>, m: Incoming) -> Result<(), HandlerError> {
        let now = self.running.fetch_add(1, SeqCst) + 1;
        let _running = Running(self.running.clone());
        self.most.fetch_max(now, SeqCst);
        let id = m.message_id.clone().unwrap_or_default();
        self.seen.lock().unwrap().push(m);
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        effect::<Sqlite>(tx, &self.effects, &id).await;
        let fails = self.failures.lock().unwrap().get_mut(&id).is_some_and(|left| {
            let fails = *left > 0;
            *left = left.saturating_sub(1);
            fails
        });
        if fails { Err(HandlerError::retry("not yet")) } else { Ok(()) }
    }

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
}

/// A feed, tables, and what is needed to consume it.
struct Bench<F: Feed> {
    feed: F,
    fixture: Fixture<Sqlite>,
    script: Script,
}

impl<F: Feed> Bench<F> {
    async fn new() -> Self {
        Self::with(quick(), |script| script).await
    }

    async fn with(settings: InboxSettings, script: impl FnOnce(Script) -> Script) -> Self {
        Self::of(F::new().await, settings, script).await
    }

    async fn of(feed: F, settings: InboxSettings, script: impl FnOnce(Script) -> Script) -> Self {
        let fixture = Fixture::<Sqlite>::with(settings).await;
        let script = script(Script::new(&fixture.effects));
        Self { feed, fixture, script }
    }

    fn inbox(&self) -> Inbox<Db> {
        self.fixture.inbox.clone().on("t", self.script.clone())
    }

    async fn consume(&self, settings: ConsumerSettings) -> Consumer {
        self.feed.consume(&self.inbox(), settings).await
    }

    /// Sends through Posthouse's own transport.
    async fn send(&self, m: &Envelope) {
        self.feed.send(m, |route| route).await;
    }

    async fn wait_effects(&self, n: i64) {
        wait_for(&format!("{n} effects"), PATIENCE, async || self.fixture.effects().await >= n).await;
        assert_eq!(self.fixture.effects().await, n);
    }

    async fn wait_acknowledged(&self) {
        wait_for("everything to be acknowledged", PATIENCE, async || self.feed.unacknowledged().await == 0).await;
    }
}

fn message(id: &str) -> Envelope {
    let mut m = Envelope::for_test("suite", format!(r#"{{"order":"{id}"}}"#));
    m.message_id = id.into();
    m.kind = "t".into();
    m
}

fn with(concurrency: u32, prefetch: u32) -> ConsumerSettings {
    let mut settings = ConsumerSettings::default();
    settings.concurrency = concurrency;
    settings.prefetch = prefetch;
    settings
}

async fn a_message_has_its_effect_once_however_often_it_is_sent<F: Feed>() {
    let bench = Bench::<F>::new().await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    for n in 0..50 {
        bench.send(&message(&n.to_string())).await;
    }
    bench.wait_effects(50).await;
    for n in 0..50 {
        bench.feed.send_again(&message(&n.to_string())).await;
    }
    wait_for("the duplicates", PATIENCE, async || consumer.status().duplicates >= 50).await;
    bench.wait_acknowledged().await;
    assert_eq!(bench.fixture.effects().await, 50);
    let status = consumer.status();
    assert_eq!((status.processed, status.failures, status.in_hand, status.connected), (50, 0, 0, true), "{status:?}");
    consumer.shutdown(SOON).await;
}

async fn everything_of_a_message_reaches_the_handler<F: Feed>() {
    let bench = Bench::<F>::new().await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    let every_byte: Vec<u8> = (0..=255).collect();
    for (n, payload) in [every_byte.clone(), every_byte.repeat(400), Vec::new()].into_iter().enumerate() {
        let mut m = message(&format!("id %20 ä 💶 {n}"));
        m.key = Some("Kunde „7“ 客户".into());
        m.content_type = "application/x-order".into();
        m.payload = payload;
        m.headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        bench.send(&m).await;
        wait_for("the message", PATIENCE, async || bench.script.seen().len() == n + 1).await;
        let got = bench.script.seen().pop().unwrap();
        assert_eq!((got.message_id.as_deref(), &*got.kind), (Some(m.message_id.as_str()), "t"));
        assert_eq!((&got.key, &got.content_type), (&m.key, &m.content_type));
        assert!(got.payload == m.payload, "{} bytes of {}", got.payload.len(), m.payload.len());
        assert_eq!(got.headers.get("traceparent"), m.headers.get("traceparent"));
        assert!(!got.redelivered);
        bench.feed.check_source(got.source.as_ref().unwrap());
    }
    consumer.shutdown(SOON).await;
}

async fn cloudevents_of_both_modes_are_understood<F: Feed>() {
    let bench = Bench::<F>::new().await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    for (n, how) in [CloudEvents::binary("/shop"), CloudEvents::structured("/shop")].into_iter().enumerate() {
        let mut m = message(&format!("ä {n}"));
        m.key = Some("ü".into());
        m.content_type = "application/json".into();
        m.headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        bench.feed.send(&m, |route| route.cloudevents(how)).await;
        wait_for("the event", PATIENCE, async || bench.script.seen().len() == n + 1).await;
        let got = bench.script.seen().pop().unwrap();
        assert_eq!((got.message_id.as_deref(), &*got.kind, &got.key), (Some(m.message_id.as_str()), "t", &m.key));
        assert_eq!(
            (String::from_utf8_lossy(&got.payload), &*got.content_type),
            (String::from_utf8_lossy(&m.payload), "application/json")
        );
        assert_eq!(got.headers.get("traceparent"), m.headers.get("traceparent"));
    }
    consumer.shutdown(SOON).await;
}

async fn a_failed_message_is_run_again_and_disturbs_no_other<F: Feed>() {
    let bench = Bench::<F>::with(quick(), |script| script.failing("3", 2)).await;
    let consumer = bench.consume(with(1, 1)).await;
    for n in 0..10 {
        bench.send(&message(&n.to_string())).await;
    }
    bench.wait_effects(10).await;
    bench.wait_acknowledged().await;
    assert_eq!(bench.fixture.shown("3").await.row.attempts, 2);
    consumer.shutdown(SOON).await;
}

async fn a_message_that_never_works_is_given_up_and_acknowledged<F: Feed>() {
    let bench = Bench::<F>::with(quick(), |script| script.failing("poison", usize::MAX)).await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    for id in ["poison", "good"] {
        bench.send(&message(id)).await;
    }
    bench.fixture.wait_status("poison", InboxStatus::Failed).await;
    bench.wait_effects(1).await;
    bench.wait_acknowledged().await;
    let row = bench.fixture.shown("poison").await;
    assert_eq!((row.row.attempts, row.payload), (3, Some(message("poison").payload)));
    // Sent again it is not run again.
    bench.feed.send_again(&message("poison")).await;
    wait_for("the second copy", PATIENCE, async || consumer.status().failed >= 1).await;
    bench.wait_acknowledged().await;
    consumer.shutdown(SOON).await;
}

async fn a_message_without_an_id_is_set_aside_with_its_bytes<F: Feed>() {
    let bench = Bench::<F>::new().await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    bench.feed.send_raw(b"\x00\xff raw").await;
    bench.send(&message("good")).await;
    bench.wait_effects(1).await;
    wait_for("the quarantine", PATIENCE, async || bench.fixture.count(InboxStatus::Failed).await == 1).await;
    bench.wait_acknowledged().await;
    let filter = InboxFilter { status: Some(InboxStatus::Failed), limit: 10, ..Default::default() };
    let rows = bench.fixture.inbox.store().list(&filter).await.unwrap().rows;
    let detail = bench.fixture.shown(&rows[0].message_id).await;
    assert_eq!(detail.payload.as_deref(), Some(&b"\x00\xff raw"[..]));
    consumer.shutdown(SOON).await;
}

async fn a_message_without_an_id_can_be_refused<F: Feed>() {
    let mut settings = quick();
    settings.missing_id = MissingId::Reject;
    let bench = Bench::<F>::with(settings, |script| script).await;
    let consumer = bench.consume(ConsumerSettings::default()).await;
    bench.feed.send_raw(b"raw").await;
    bench.send(&message("good")).await;
    bench.wait_effects(1).await;
    wait_for("the refusal", PATIENCE, async || consumer.status().refused == 1).await;
    bench.wait_acknowledged().await;
    assert_eq!(bench.fixture.count(InboxStatus::Failed).await, 0);
    consumer.shutdown(SOON).await;
}

async fn the_id_can_be_taken_from_the_payload<F: Feed>() {
    let bench = Bench::<F>::new().await;
    let mut settings = ConsumerSettings::default();
    settings.id_from = "json:/order".parse().unwrap();
    let consumer = bench.consume(settings).await;
    for (id, order) in [("1", "a"), ("2", "b"), ("3", "a")] {
        let mut m = message(id);
        m.payload = format!(r#"{{"order":"{order}"}}"#).into_bytes();
        bench.send(&m).await;
    }
    wait_for("all three", PATIENCE, async || consumer.status().processed + consumer.status().duplicates == 3).await;
    assert_eq!((bench.fixture.effects().await, consumer.status().duplicates), (2, 1));
    assert_eq!(bench.fixture.effects_of("a").await, 1);
    consumer.shutdown(SOON).await;
}

async fn no_more_handlers_run_than_the_settings_allow<F: Feed>() {
    let gate = Arc::new(Semaphore::new(0));
    let bench = Bench::<F>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
    let consumer = bench.consume(with(3, 5)).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move {
            for n in 0..12 {
                feed.offer(&message(&n.to_string())).await;
            }
        }
    });
    // SQLite has one writer at a time, so one handler is inside its transaction and the others wait for theirs.
    wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) >= 1).await;
    wait_for("the prefetch to be used", PATIENCE, async || consumer.status().in_hand >= F::IN_HAND.min(5)).await;
    assert!(consumer.status().in_hand <= 5, "{:?}", consumer.status());
    gate.add_permits(1_000);
    bench.wait_effects(12).await;
    sending.await.unwrap();
    bench.wait_acknowledged().await;
    assert!(bench.script.most.load(SeqCst) <= 3);
    consumer.shutdown(SOON).await;
}

async fn stopping_lets_what_runs_finish_and_gives_the_rest_back<F: Feed>() {
    let gate = Arc::new(Semaphore::new(0));
    let bench = Bench::<F>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
    let consumer = bench.consume(with(1, 5)).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move {
            for n in 0..5 {
                feed.offer(&message(&n.to_string())).await;
            }
        }
    });
    wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
    let mut stopping = Box::pin(consumer.shutdown(SOON));
    // It only ends when the handler does, and from here on none is started.
    assert!(futures_util::poll!(&mut stopping).is_pending());
    gate.add_permits(1);
    tokio::time::timeout(PATIENCE, stopping).await.expect("a shutdown in time");
    assert_eq!((bench.fixture.effects().await, bench.script.ids().len()), (1, 1), "one was running");
    gate.add_permits(1_000);
    let next = bench.consume(with(1, 5)).await;
    bench.wait_effects(5).await;
    sending.await.unwrap();
    bench.wait_acknowledged().await;
    next.shutdown(SOON).await;
}

async fn what_a_stopped_consumer_was_running_is_delivered_again<F: Feed>() {
    let gate = Arc::new(Semaphore::new(0));
    let bench = Bench::<F>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
    let consumer = bench.consume(with(1, 5)).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move { feed.offer(&message("1")).await }
    });
    wait_for("it to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
    consumer.shutdown(Duration::from_millis(50)).await;
    assert_eq!((bench.script.running.load(SeqCst), bench.fixture.effects().await), (0, 0), "rolled back");
    gate.add_permits(1_000);
    let next = bench.consume(with(1, 5)).await;
    bench.wait_effects(1).await;
    sending.await.unwrap();
    bench.wait_acknowledged().await;
    next.shutdown(SOON).await;
}

async fn in_key_order_a_failed_message_holds_back_its_key_alone<F: Feed>() {
    let bench = Bench::<F>::with(quick(), |script| script.failing("a1", 2)).await;
    let mut settings = with(4, 50);
    settings.order = ConsumerOrder::Key;
    let consumer = bench.consume(settings).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move {
            for n in 1..=5 {
                for key in ["a", "b"] {
                    let mut m = message(&format!("{key}{n}"));
                    m.key = Some(key.into());
                    feed.offer(&m).await;
                }
            }
        }
    });
    bench.wait_effects(10).await;
    sending.await.unwrap();
    bench.wait_acknowledged().await;
    let of = |key: &str| bench.script.ids().into_iter().filter(|id| id.starts_with(key)).collect::<Vec<_>>();
    assert_eq!(of("a"), ["a1", "a1", "a1", "a2", "a3", "a4", "a5"]);
    assert_eq!(of("b"), ["b1", "b2", "b3", "b4", "b5"]);
    consumer.shutdown(SOON).await;
}
