//! D6: while a transaction holds an old snapshot, nothing that is delivered can be cleaned away. The relay must not walk over it
//! again and again.

use std::time::Duration;

use posthouse::{Message, Relay};

use super::{Log, Recorder, quick};
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, pending, scale, wait_for};

/// Messages that pass while the snapshot is held.
fn many() -> usize {
    20_000 * scale()
}

/// Entries of indexes read per message: well above what is needed (10 to 50), and well below what walking over everything that
/// was delivered costs.
const READS: i64 = 100;

/// The same for messages that go one after the other, which takes long. Meanwhile the near sweep goes over those delivered in the
/// last ten seconds four times a second, as it may: it takes no more than its share of the time. On a machine with much else to do
/// that makes up to 170 per message. Walking over everything that was delivered for each message costs 2 500.
const READS_ONE_BY_ONE: i64 = 700;

/// A backlog, then one message after the other, all while the snapshot is held.
async fn drains<T: TestDb>(begin: &str, keys: Option<usize>) -> (posthouse::Outbox<T::Db>, usize) {
    let outbox = T::fresh().await;
    // Messages of one key go one after the other. In MySQL a snapshot holds up cleaning in the whole server, and with it other tests.
    let n = if keys == Some(1) || T::NAME == "mysql" { many() / 4 } else { many() };
    let log = Log::default();
    let message = |i: usize| {
        let m = Message::to("test:a").payload(i.to_string());
        if let Some(keys) = keys { m.key(i % keys) } else { m }
    };
    let mut holder = outbox.pool().acquire().await.unwrap();
    T::execute_in(&mut holder, begin.to_owned()).await;
    let count = format!("SELECT count(*) FROM {}", outbox.tables().name("pending"));
    assert_eq!(T::number_in(&mut holder, count.clone()).await, 0, "the snapshot begins here");
    for from in (0..n).step_by(2_000) {
        let mut tx = outbox.begin().await.unwrap();
        outbox.publish_many(&mut tx, (from..from + 2_000.min(n - from)).map(message)).await.unwrap();
        tx.commit().await.unwrap();
    }
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    wait_for("the backlog", SOON * 3 * scale() as u32, async || relay.stats().delivered >= n as u64).await;
    for i in n..n + 100 {
        outbox.publish_alone(message(i)).await.unwrap();
        log.wait_len(i + 1).await;
    }
    relay.drain_once().await;
    assert_eq!(T::number_in(&mut holder, count).await, 0, "the snapshot is still the old one");
    relay.shutdown(Duration::from_secs(5)).await;
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (n + 100, n + 100, 0));
    assert_eq!(pending::<T>(&outbox).await, 0);
    // Its session ends here, and with it the snapshot.
    holder.detach();
    (outbox, n + 100)
}

/// Entries of the indexes of pending that were read, per message.
async fn postgres_reads(keys: Option<usize>) -> i64 {
    let (outbox, n) = drains::<Postgres>("BEGIN ISOLATION LEVEL REPEATABLE READ", keys).await;
    let schema = outbox.tables().schema().expect("a schema");
    // The sessions of a relay that was shut down have reported.
    let sql = format!(
        "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE schemaname = '{schema}' AND relname = 'posthouse_pending'"
    );
    let mut read = 0;
    wait_for("statistics", SOON, async || {
        read = Postgres::number(outbox.pool(), sql.clone()).await;
        read > n as i64
    })
    .await;
    println!("{read} entries of indexes read for {n} messages");
    read / n as i64
}

mod postgres {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn unkeyed_messages_pass() {
        bounded(async { assert!(postgres_reads(None).await < READS) }).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn messages_of_many_keys_pass() {
        bounded(async { assert!(postgres_reads(Some(200)).await < READS) }).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn messages_of_one_busy_key_pass() {
        bounded(async { assert!(postgres_reads(Some(1)).await < READS_ONE_BY_ONE) }).await;
    }
}

mod mysql {
    use super::*;

    const BEGIN: &str = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ; START TRANSACTION WITH CONSISTENT SNAPSHOT";

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn unkeyed_messages_pass() {
        bounded(async { drop(drains::<MySql>(BEGIN, None).await) }).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn messages_of_many_keys_pass() {
        bounded(async { drop(drains::<MySql>(BEGIN, Some(200)).await) }).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn messages_of_one_busy_key_pass() {
        bounded(async { drop(drains::<MySql>(BEGIN, Some(1)).await) }).await;
    }
}
