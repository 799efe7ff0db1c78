//! Messages that kill their process, in processes of their own.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use posthouse::inbox::{Handler, HandlerError, Inbox, Incoming};
use posthouse::store::InboxStatus;
use posthouse::{ConsumerOrder, InboxSettings, Tx};

use super::super::{Bench, PATIENCE, with};
use super::{FromKafka, RawRecord};
use crate::inbox::{quick, try_effect};
use crate::support::{Sqlite, TestDb, bounded, dies, outbox_at};

fn settings() -> InboxSettings {
    let mut s = quick();
    // Short enough that what a dead process held comes back within the test.
    s.lease = Duration::from_millis(400);
    s.handler_timeout = Duration::from_millis(500);
    s.database_timeout = Duration::from_secs(1);
    s
}

struct Kill(String);

impl Handler<sqlx::Sqlite> for Kill {
    type Message = Incoming;

    async fn handle(&self, tx: &mut Tx<sqlx::Sqlite>, m: Incoming) -> Result<(), HandlerError> {
        let id = m.message_id.unwrap_or_default();
        try_effect::<Sqlite>(tx, &self.0, &id).await?;
        if id == "poison" {
            std::process::abort();
        }
        Ok(())
    }

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
}

/// Not a test by itself: what a child process runs. The test harness calls it with the name of this function as a filter.
#[test]
fn child() {
    let Ok(url) = std::env::var("POSTHOUSE_KAFKA_CHILD") else { return };
    let [topic, group] = ["TOPIC", "GROUP"].map(|name| std::env::var(format!("POSTHOUSE_CHILD_{name}")).unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let outbox = outbox_at::<sqlx::Sqlite>(Sqlite::connect(&url).await, None);
        let effects = outbox.tables().name("effects");
        let inbox = Inbox::of(&outbox, "inventory", settings()).unwrap().on("t", Kill(effects));
        let feed = FromKafka { topic, group, ..FromKafka::without_topic(&crate::kafka::url()) };
        let mut settings = with(4, 20);
        settings.order = ConsumerOrder::Source;
        let _consumer = feed.start(&inbox, settings, &[]).await;
        std::future::pending::<()>().await;
    });
}

fn spawn(bench: &Bench<FromKafka>) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "consumers::kafka::deaths::child", "--nocapture", "--test-threads=1"])
        .env("POSTHOUSE_KAFKA_CHILD", &bench.fixture.place.url)
        .env("POSTHOUSE_CHILD_TOPIC", &bench.feed.topic)
        .env("POSTHOUSE_CHILD_GROUP", &bench.feed.group)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("child")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_kills_its_process_ends_failed_and_its_partition_goes_on() {
    bounded(async {
        let bench = Bench::<FromKafka>::with(settings(), |script| script).await;
        let id = |n: i32| if n == 7 { "poison".to_owned() } else { n.to_string() };
        bench.feed.produce((0..20).map(|n| RawRecord::new(&id(n)).partition(0)).collect()).await;
        let finished = async || bench.fixture.count(InboxStatus::Failed).await == 1 && bench.fixture.effects().await == 19;
        let mut deaths = 0;
        while !finished().await {
            assert!(deaths < 8, "it goes on for ever");
            let mut child = spawn(&bench);
            deaths += i32::from(dies(&mut child, PATIENCE * 2, &finished).await);
        }
        let row = bench.fixture.shown("poison").await.row;
        assert!(row.last_error.as_deref().unwrap().contains("processes died"), "{row:?}");
        // One before anything was written down, and three that were.
        assert!((3..=5).contains(&deaths), "{deaths}");
        for n in 0..20 {
            assert_eq!(bench.fixture.effects_of(&id(n)).await, i64::from(n != 7), "{n}");
        }
    })
    .await;
}
