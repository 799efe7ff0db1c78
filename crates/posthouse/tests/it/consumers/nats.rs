//! NATS JetStream: the suite's feed, and what is peculiar to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::AckPolicy;
use async_nats::jetstream::consumer::pull::Config;
use async_nats::jetstream::{self, Context};
use posthouse::consumer::{Consumer, NatsConsumer};
use posthouse::inbox::{Inbox, Source};
use posthouse::testing::deliver;
use posthouse::transport::{Nats, Outcome};
use posthouse::{ConsumerOrder, ConsumerSettings, Envelope, Error, Route};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::away::Away;
use super::{Bench, Feed, PATIENCE, Script, message, with};
use crate::inbox::{Fixture, quick};
use crate::support::broker::{Broker, Kind, test_url};
use crate::support::{SOON, Sqlite, bounded, wait_for};
use posthouse_faults::{Mode, Proxy};

/// The name of the durable consumers.
const DURABLE: &str = "inventory";

/// A fresh stream on the shared server.
#[derive(Clone)]
pub(super) struct FromNats {
    url: String,
    js: Context,
    stream: String,
}

impl FromNats {
    /// On this server.
    async fn on(url: &str) -> Self {
        let js = jetstream::new(async_nats::connect(url).await.expect("connect"));
        let feed = Self { url: url.into(), js, stream: format!("t_{:016x}", fastrand::u64(..)) };
        feed.make_stream().await;
        feed
    }

    async fn make_stream(&self) {
        let config =
            jetstream::stream::Config { name: self.stream.clone(), subjects: vec![self.subject()], ..Default::default() };
        self.js.create_stream(config).await.expect("create a stream");
    }

    fn subject(&self) -> String {
        format!("{}.orders", self.stream)
    }

    async fn publish(&self, headers: &[(&str, &str)], payload: &[u8]) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, *value);
        }
        let published = self.js.publish_with_headers(self.subject(), map, payload.to_vec().into()).await.expect("publish");
        published.await.expect("stored");
    }

    async fn info(&self) -> Option<jetstream::consumer::Info> {
        self.js.get_stream_no_info(&self.stream).await.expect("stream").consumer_info(DURABLE).await.ok()
    }

    fn consumer(&self) -> NatsConsumer {
        NatsConsumer::new(&*self.url, &self.stream, DURABLE).expect("settings")
    }
}

impl Feed for FromNats {
    const IN_HAND: usize = usize::MAX;

    async fn new() -> Self {
        Self::on(&test_url(Kind::Nats)).await
    }

    async fn consume(&self, inbox: &Inbox<sqlx::Sqlite>, settings: ConsumerSettings) -> Consumer {
        self.consumer().settings(settings).start(inbox).await.expect("start")
    }

    async fn send(&self, m: &Envelope, change: impl FnOnce(Route) -> Route + Send) {
        let route = change(Route::to(format!("nats:{}", self.subject())));
        let nats = Nats::new(&*self.url).expect("settings");
        while deliver(&nats, m.clone(), route.clone(), PATIENCE).await != Outcome::Delivered {}
    }

    /// Without `Nats-Msg-Id`, by which the stream would drop it.
    async fn send_again(&self, m: &Envelope) {
        self.publish(&[("posthouse-message-id", m.message_id.as_str()), ("posthouse-type", &m.kind)], &m.payload).await;
    }

    async fn send_raw(&self, payload: &[u8]) {
        self.js.publish(self.subject(), payload.to_vec().into()).await.expect("publish").await.expect("stored");
    }

    async fn unacknowledged(&self) -> u64 {
        match self.info().await {
            Some(info) => info.num_pending + info.num_ack_pending as u64,
            // Nobody has consumed yet.
            None => self.js.get_stream(&self.stream).await.expect("stream").cached_info().state.messages,
        }
    }

    fn check_source(&self, source: &Source) {
        assert_eq!(*source, Source::Nats { subject: self.subject() });
    }
}

impl Bench<FromNats> {
    async fn on(url: &str, script: impl FnOnce(Script) -> Script) -> Self {
        let fixture = Fixture::<Sqlite>::with(quick()).await;
        let script = script(Script::new(&fixture.effects));
        Self { feed: FromNats::on(url).await, fixture, script }
    }

    /// One whose handlers wait for permits.
    async fn gated() -> (Self, Arc<Semaphore>) {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Self::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        (bench, gate)
    }
}

async fn wait_error(consumer: &Consumer, word: &str) {
    wait_for(&format!("the status to say {word:?}"), PATIENCE, async || {
        let status = consumer.status();
        !status.connected && status.last_error.is_some_and(|e| e.contains(word))
    })
    .await;
}

async fn wait_connected(consumer: &Consumer) {
    wait_for("a subscription", PATIENCE, async || consumer.status().connected).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_starts_without_its_server_and_survives_its_restarts() {
    bounded(async {
        let broker = Broker::nats().await;
        let bench = Bench::on(broker.url(), |script| script).await;
        broker.kill().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        wait_error(&consumer, "can't connect").await;
        broker.start().await;
        wait_connected(&consumer).await;
        let sending = tokio::spawn({
            let feed = bench.feed.clone();
            async move {
                for n in 0..100 {
                    feed.send(&message(&n.to_string()), |route| route).await;
                }
            }
        });
        for n in [20, 50, 80] {
            wait_for("messages flow", PATIENCE, async || bench.fixture.effects().await >= n).await;
            broker.kill().await;
            wait_for("it to be noticed", PATIENCE, async || !consumer.status().connected).await;
            broker.start().await;
        }
        sending.await.unwrap();
        bench.wait_effects(100).await;
        // Of what was acknowledged while the server died, it may want to know again.
        bench.wait_acknowledged().await;
        assert_eq!(bench.fixture.effects().await, 100);
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_longer_than_ack_wait_is_not_delivered_again() {
    bounded(async {
        let (bench, gate) = Bench::gated().await;
        let stream = bench.feed.js.get_stream(&bench.feed.stream).await.unwrap();
        let config = Config {
            durable_name: Some(DURABLE.into()),
            ack_wait: Duration::from_secs(1),
            // Its limits are kept to as well.
            max_batch: 1,
            max_expires: Duration::from_secs(2),
            ..Config::default()
        };
        stream.create_consumer(config).await.unwrap();
        let consumer = bench.consume(with(1, 4)).await;
        for id in ["runs", "waits"] {
            bench.send(&message(id)).await;
        }
        let started = Instant::now();
        wait_for("both to be in hand", PATIENCE, async || consumer.status().in_hand == 2).await;
        wait_for("three times ack_wait", PATIENCE, async || started.elapsed() > Duration::from_secs(3)).await;
        let info = bench.feed.info().await.unwrap();
        assert_eq!((info.delivered.consumer_sequence, info.num_redelivered, info.num_ack_pending), (2, 0, 2));
        assert_eq!(consumer.status().last_error, None);
        gate.add_permits(2);
        bench.wait_effects(2).await;
        bench.wait_acknowledged().await;
        assert_eq!(consumer.status().duplicates, 0);
        assert!(bench.script.seen().iter().all(|m| !m.redelivered));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_was_deleted_is_consumed_when_it_is_there_again() {
    bounded(async {
        let bench = Bench::<FromNats>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        bench.send(&message("1")).await;
        bench.wait_effects(1).await;
        bench.feed.js.delete_stream(&bench.feed.stream).await.unwrap();
        wait_error(&consumer, "there is no JetStream stream").await;
        bench.feed.make_stream().await;
        bench.send(&message("2")).await;
        bench.wait_effects(2).await;
        assert!(consumer.status().connected);
        // The durable consumer alone.
        let stream = bench.feed.js.get_stream(&bench.feed.stream).await.unwrap();
        let before = bench.feed.info().await.unwrap().created;
        stream.delete_consumer(DURABLE).await.unwrap();
        wait_for("a new one", PATIENCE, async || bench.feed.info().await.is_some_and(|info| info.created != before)).await;
        bench.send(&message("3")).await;
        bench.wait_effects(3).await;
        wait_for("the old ones again", PATIENCE, async || consumer.status().duplicates >= 1).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_is_noticed_while_nothing_is_asked_for() {
    bounded(async {
        let (bench, gate) = Bench::gated().await;
        let stream = bench.feed.js.get_stream(&bench.feed.stream).await.unwrap();
        let config = Config { durable_name: Some(DURABLE.into()), ack_wait: Duration::from_secs(1), ..Config::default() };
        stream.create_consumer(config).await.unwrap();
        let consumer = bench.consume(with(1, 1)).await;
        bench.send(&message("1")).await;
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        stream.delete_consumer(DURABLE).await.unwrap();
        // Before the handler's deadline, after which one is asked for again.
        wait_for("a new one", PATIENCE / 6, async || bench.feed.info().await.is_some()).await;
        gate.add_permits(1);
        wait_for("the message again", PATIENCE, async || consumer.status().duplicates == 1).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_leaves_nothing_that_waits_for_ack_wait() {
    bounded(async {
        let (bench, _gate) = Bench::gated().await;
        for n in 0..3_000 {
            let headers = [("Nats-Msg-Id", &*n.to_string()), ("posthouse-type", "t")];
            bench.feed.publish(&headers, &[b'x'; 1_000]).await;
        }
        for _ in 0..5 {
            let consumer = bench.consume(with(1, 1_000)).await;
            // Many are on their way then.
            wait_for("the first", PATIENCE, async || consumer.status().in_hand > 0).await;
            consumer.shutdown(Duration::from_millis(50)).await;
        }
        let next = bench.consume(with(1, 10_000)).await;
        // ack_wait is 30 s. On a busy machine a few can be so late that they wait for it; given back in vain it would be hundreds.
        let left = PATIENCE / 2;
        wait_for("nearly all to be delivered again", left, async || next.status().in_hand >= 2_900).await;
        wait_for("all to be delivered again", 2 * PATIENCE, async || next.status().in_hand == 3_000).await;
        next.shutdown(Duration::from_millis(50)).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_again_counts_as_redelivered() {
    bounded(async {
        let (bench, gate) = Bench::gated().await;
        let consumer = bench.consume(with(1, 1)).await;
        bench.send(&message("1")).await;
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        consumer.shutdown(Duration::from_millis(50)).await;
        gate.add_permits(1);
        let next = bench.consume(with(1, 1)).await;
        bench.wait_effects(1).await;
        assert_eq!(bench.script.seen().iter().map(|m| m.redelivered).collect::<Vec<_>>(), [false, true]);
        next.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_falls_silent_is_noticed() {
    bounded(async {
        let mut bench = Bench::<FromNats>::new().await;
        let proxy = Proxy::start(bench.feed.url.strip_prefix("nats://").unwrap().to_owned()).await;
        let direct = bench.feed.clone();
        bench.feed.url = format!("nats://{}", proxy.address);
        // What the server sends into the silence comes again after it.
        let stream = direct.js.get_stream(&direct.stream).await.unwrap();
        let config = Config { durable_name: Some(DURABLE.into()), ack_wait: Duration::from_secs(2), ..Config::default() };
        stream.create_consumer(config).await.unwrap();
        let consumer = bench.consume(ConsumerSettings::default()).await;
        direct.send(&message("1"), |route| route).await;
        bench.wait_effects(1).await;
        proxy.set(Mode::Silent);
        wait_for("the silence to be noticed", PATIENCE, async || !consumer.status().connected).await;
        direct.send(&message("2"), |route| route).await;
        proxy.set(Mode::Open);
        bench.wait_effects(2).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_waits_for_the_next_connection() {
    bounded(async {
        let (mut bench, gate) = Bench::gated().await;
        let proxy = Proxy::start(bench.feed.url.strip_prefix("nats://").unwrap().to_owned()).await;
        let direct = bench.feed.clone();
        bench.feed.url = format!("nats://{}", proxy.address);
        let consumer = bench.consume(ConsumerSettings::default()).await;
        direct.send(&message("1"), |route| route).await;
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        proxy.set(Mode::Cut);
        wait_for("it to be noticed", PATIENCE, async || !consumer.status().connected).await;
        gate.add_permits(1);
        bench.wait_effects(1).await;
        assert_eq!(consumer.status().in_hand, 1);
        proxy.set(Mode::Open);
        bench.wait_acknowledged().await;
        let info = direct.info().await.unwrap();
        assert_eq!((info.delivered.consumer_sequence, info.num_redelivered), (1, 0));
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// The new stream gives its first message the number that the old one's had: an answer to the old one must not count for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_never_counts_for_a_message_of_a_stream_made_later() {
    bounded(async {
        let (bench, gate) = Bench::gated().await;
        let consumer = bench.consume(with(1, 4)).await;
        bench.send(&message("old")).await;
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        bench.feed.js.delete_stream(&bench.feed.stream).await.unwrap();
        wait_error(&consumer, "there is no JetStream stream").await;
        bench.feed.make_stream().await;
        wait_connected(&consumer).await;
        bench.send(&message("new")).await;
        wait_for("the new one", PATIENCE, async || consumer.status().in_hand == 2).await;
        gate.add_permits(1);
        wait_for("the old one's end", PATIENCE, async || consumer.status().processed == 1).await;
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until {
            assert_eq!(bench.feed.unacknowledged().await, 1, "the new one is not done");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        gate.add_permits(1);
        bench.wait_effects(2).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_with_one_durable_share_its_messages() {
    bounded(async {
        let bench = Bench::<FromNats>::new().await;
        let consumers = [bench.consume(with(2, 10)).await, bench.consume(with(2, 10)).await];
        for n in 0..100 {
            bench.send(&message(&n.to_string())).await;
        }
        bench.wait_effects(100).await;
        bench.wait_acknowledged().await;
        let done = consumers.each_ref().map(|consumer| consumer.status().processed);
        assert!(done.iter().all(|&n| n > 0) && done.iter().sum::<u64>() == 100, "{done:?}");
        for consumer in consumers {
            consumer.shutdown(SOON).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_headers_are_read_as_they_are() {
    bounded(async {
        let bench = Bench::<FromNats>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let headers = [
            ("Nats-Msg-Id", "100%"),
            ("Posthouse-Type", "t"),
            ("posthouse-key", "a%20b"),
            ("x", "1"),
            ("x", "2"),
            ("empty", ""),
            ("umlaut", "ä"),
            ("percent", "%41"),
        ];
        bench.feed.publish(&headers, b"{}").await;
        bench.wait_effects(1).await;
        let got = bench.script.seen().remove(0);
        assert_eq!((got.message_id.as_deref(), got.key.as_deref()), (Some("100%"), Some("a b")));
        for (name, value) in [("x", "1, 2"), ("empty", ""), ("umlaut", "ä"), ("percent", "%41")] {
            assert_eq!(got.headers.get(name), Some(value), "{name}");
        }
        // Whoever may publish can make a message look like the server's own word.
        let head = "NATS/1.0 409 Consumer Deleted\r\nNats-Msg-Id: forged\r\nposthouse-type: t\r\n\r\n";
        let publish = format!("HPUB {} {} {}\r\n{head}{{}}\r\n", bench.feed.subject(), head.len(), head.len() + 2);
        let mut raw = TcpStream::connect(bench.feed.url.strip_prefix("nats://").unwrap()).await.unwrap();
        raw.write_all(format!("CONNECT {{\"verbose\":false,\"headers\":true}}\r\n{publish}PING\r\n").as_bytes()).await.unwrap();
        let mut said = Vec::new();
        while !said.windows(4).any(|w| w == b"PONG") {
            assert_ne!(raw.read_buf(&mut said).await.unwrap(), 0, "{}", String::from_utf8_lossy(&said));
        }
        bench.wait_effects(2).await;
        assert_eq!(bench.script.ids()[1], "forged");
        bench.wait_acknowledged().await;
        let status = consumer.status();
        assert_eq!((status.connected, status.last_error), (true, None));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_database_is_away_messages_go_back_and_their_effect_comes_later() {
    bounded(async {
        let (away, feed) = (Away::new().await, FromNats::new().await);
        let consumer = feed.consumer().start(&away.inbox).await.unwrap();
        feed.send(&message("1"), |route| route).await;
        wait_for("the first effect", PATIENCE, async || away.fixture.effects().await == 1).await;
        away.proxy.set(Mode::Cut);
        for id in ["2", "3"] {
            feed.send(&message(id), |route| route).await;
        }
        let started = Instant::now();
        wait_for("both to go back twice", PATIENCE, async || consumer.status().given_back >= 4).await;
        wait_for("more time", PATIENCE, async || started.elapsed() > Duration::from_millis(1_500)).await;
        let (given_back, open) = (consumer.status().given_back, feed.unacknowledged().await);
        assert!(given_back < 40 && open == 2, "delayed, or there would be many more: {given_back} {open}");
        away.proxy.set(Mode::Open);
        wait_for("their effects", PATIENCE, async || away.fixture.effects().await == 3).await;
        wait_for("their acknowledgement", PATIENCE, async || feed.unacknowledged().await == 0).await;
        let status = consumer.status();
        assert_eq!((status.failures, status.failed), (0, 0), "not their fault");
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_survives_an_absent_database() {
    bounded(async {
        let (away, feed) = (Away::new().await, FromNats::new().await);
        let mut settings = ConsumerSettings::default();
        settings.order = ConsumerOrder::Key;
        let consumer = feed.consumer().settings(settings).start(&away.inbox).await.unwrap();
        let send = async |id: &str| {
            let mut m = message(id);
            m.key = Some("k".into());
            feed.send(&m, |route| route).await;
        };
        send("1").await;
        wait_for("the first effect", PATIENCE, async || away.fixture.effects().await == 1).await;
        away.proxy.set(Mode::Cut);
        send("2").await;
        wait_for("its failure", PATIENCE, async || consumer.status().given_back >= 2).await;
        for id in ["3", "4"] {
            send(id).await;
        }
        away.proxy.set(Mode::Open);
        wait_for("all effects", PATIENCE, async || away.fixture.effects().await == 4).await;
        wait_for("their acknowledgement", PATIENCE, async || feed.unacknowledged().await == 0).await;
        assert_eq!(*away.order.lock().unwrap(), ["1", "2", "3", "4"]);
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_loses_messages_is_not_used() {
    bounded(async {
        let bench = Bench::<FromNats>::new().await;
        let stream = bench.feed.js.get_stream(&bench.feed.stream).await.unwrap();
        let config = Config { durable_name: Some(DURABLE.into()), ack_policy: AckPolicy::None, ..Config::default() };
        stream.create_consumer(config).await.unwrap();
        let consumer = bench.consume(ConsumerSettings::default()).await;
        wait_error(&consumer, "it must be Explicit").await;
        bench.send(&message("1")).await;
        stream.delete_consumer(DURABLE).await.unwrap();
        bench.wait_effects(1).await;
        let made = bench.feed.info().await.unwrap().config;
        assert_eq!((made.ack_policy, made.max_deliver, made.max_ack_pending), (AckPolicy::Explicit, -1, 1_000));
        assert_eq!(made.ack_wait, Duration::from_secs(30), "a handler at its deadline, and two calls of the database");
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[test]
fn names_and_addresses_are_checked() {
    for (url, stream, durable, word) in [
        ("nats://h", "a b", "d", "stream: "),
        ("nats://h", "", "d", "stream: "),
        ("nats://h", "s", "a.b", "durable: "),
        ("nats://h", "s", "a/b", "durable: "),
        ("http://h", "s", "d", "url: "),
    ] {
        let Err(Error::Config(text)) = NatsConsumer::new(url, stream, durable) else { panic!("{stream} {durable}") };
        assert!(text.starts_with(word), "{text}");
    }
}
