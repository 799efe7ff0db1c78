//! Brokers, topics and databases that are not there.

use std::sync::Arc;
use std::time::Duration;

use posthouse::consumer::KafkaConsumer;
use posthouse::inbox::{Handler, HandlerError, Inbox, Incoming};
use posthouse::{ConsumerOrder, ConsumerSettings, Tx};

use super::super::{Bench, PATIENCE, with};
use super::{FromKafka, RawRecord};
use crate::inbox::{Fixture, quick, try_effect};
use crate::kafka::{client, create_topic, url};
use crate::support::broker::Broker;
use crate::support::{Postgres, SOON, TestDb, bounded, wait_for};
use posthouse_faults::{Mode, Proxy};

fn in_order() -> ConsumerSettings {
    let mut settings = with(4, 20);
    settings.order = ConsumerOrder::Source;
    settings
}

fn records(ids: std::ops::Range<usize>) -> Vec<RawRecord> {
    ids.map(|n| RawRecord::new(&n.to_string()).partition(0)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_and_comes_back_is_consumed_on() {
    bounded(async {
        let broker = Broker::kafka().await;
        let bench = Bench::of(FromKafka::on(broker.url(), 1).await, quick(), |script| script).await;
        bench.feed.produce(records(0..50)).await;
        broker.kill().await;
        // It is away when the consumer starts.
        let consumer = bench.consume(in_order()).await;
        wait_for("it to say so", PATIENCE, async || consumer.status().last_error.is_some_and(|e| e.contains(broker.url()))).await;
        assert!(!consumer.status().connected);
        broker.start().await;
        bench.wait_effects(50).await;
        wait_for("it to say so", PATIENCE, async || consumer.status().connected).await;
        for round in 1..2 {
            broker.kill().await;
            wait_for("it to notice", PATIENCE, async || !consumer.status().connected).await;
            broker.start().await;
            bench.feed.produce(records(round * 50..(round + 1) * 50)).await;
            bench.wait_effects((round as i64 + 1) * 50).await;
        }
        bench.wait_acknowledged().await;
        wait_for("it to say so", PATIENCE, async || consumer.status().connected).await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_made_later_is_consumed_then() {
    bounded(async {
        let bench = Bench::of(FromKafka::without_topic(&url()), quick(), |script| script).await;
        let consumer = bench.consume(in_order()).await;
        wait_for("it to say so", PATIENCE, async || {
            let status = consumer.status();
            !status.connected && status.last_error.is_some_and(|e| e.contains(&bench.feed.topic) && e.contains("doesn't exist"))
        })
        .await;
        create_topic(&client(&url(), &[]), &bench.feed.topic, 1, &[]).await;
        bench.feed.produce(records(0..5)).await;
        bench.wait_effects(5).await;
        wait_for("it to say so", PATIENCE, async || consumer.status().connected).await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// Otherwise one that kills its process at once would do so for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_begins_before_a_commit_says_so_and_the_status_says_why() {
    bounded(async {
        // No commit with metadata goes through.
        let broker = Broker::kafka_with("offset.metadata.max.bytes=1").await;
        let bench = Bench::of(FromKafka::on(broker.url(), 1).await, quick(), |script| script).await;
        bench.feed.produce(records(0..3)).await;
        let consumer = bench.consume(in_order()).await;
        wait_for("it to say so", PATIENCE, async || {
            consumer.status().last_error.is_some_and(|e| e.contains("committed") && e.to_lowercase().contains("metadata"))
        })
        .await;
        assert!(!consumer.status().connected);
        assert_eq!((bench.script.seen().len(), consumer.status().in_hand), (0, 0));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopping_is_quick_while_the_brokers_are_away() {
    bounded(async {
        let bench = Bench::<FromKafka>::new().await;
        let consumer = KafkaConsumer::new("127.0.0.1:9", "g", ["t"]).unwrap().start(&bench.inbox()).await.unwrap();
        wait_for("it to say so", PATIENCE, async || consumer.status().last_error.is_some()).await;
        let since = std::time::Instant::now();
        consumer.shutdown(SOON).await;
        assert!(since.elapsed() < Duration::from_secs(6), "{:?}", since.elapsed());
    })
    .await;
}

struct Effect(String);

impl Handler<sqlx::Postgres> for Effect {
    type Message = Incoming;

    async fn handle(&self, tx: &mut Tx<sqlx::Postgres>, m: Incoming) -> Result<(), HandlerError> {
        try_effect::<Postgres>(tx, &self.0, &m.message_id.unwrap_or_default()).await?;
        Ok(())
    }

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
}

/// The database falls silent, then refuses, then is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_database_nothing_is_committed_and_order_holds_when_it_is_back() {
    bounded(async {
        let fixture = Fixture::<Postgres>::new().await;
        let (host, path) =
            fixture.place.url.rsplit_once('@').map_or(("", fixture.place.url.as_str()), |(login, rest)| (login, rest));
        let (address, database) = path.trim_start_matches("postgres://").split_once('/').expect("a URL with a database");
        let proxy = Arc::new(Proxy::start(address.to_owned()).await);
        let through = if host.is_empty() {
            format!("postgres://{}/{database}", proxy.address)
        } else {
            format!("{host}@{}/{database}", proxy.address)
        };
        let mut settings = quick();
        settings.database_timeout = Duration::from_millis(500);
        let pool = Postgres::connect(&through).await;
        let inbox: Inbox<sqlx::Postgres> = fixture.beside(pool, "inventory", settings).on("t", Effect(fixture.effects.clone()));

        let feed = FromKafka::with(1).await;
        feed.produce(records(0..10)).await;
        let consumer = feed.start(&inbox, in_order(), &[]).await;
        wait_for("the first effects", PATIENCE, async || fixture.effects().await == 10).await;
        for (n, mode) in [Mode::Silent, Mode::Cut].into_iter().enumerate() {
            let begin = (n + 1) * 10;
            proxy.set(mode);
            let before = consumer.status().given_back;
            feed.produce(records(begin..begin + 10)).await;
            wait_for("it to fail a few times", PATIENCE, async || consumer.status().given_back > before + 3).await;
            let committed = feed.committed().await[0].offset.unwrap();
            assert!(committed <= begin as i64, "{committed}");
            assert_eq!(fixture.effects().await, begin as i64);
            proxy.set(Mode::Open);
            wait_for("the later effects", PATIENCE, async || fixture.effects().await == begin as i64 + 10).await;
        }
        wait_for("all to be committed", PATIENCE, async || feed.committed().await[0].offset == Some(30)).await;
        let sql = format!("SELECT message FROM {} ORDER BY ctid", fixture.effects);
        let ids: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(&fixture.place.pool).await.unwrap();
        assert_eq!(ids, (0..30).map(|n| n.to_string()).collect::<Vec<_>>());
        consumer.shutdown(SOON).await;
    })
    .await;
}
