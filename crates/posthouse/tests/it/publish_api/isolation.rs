//! D2, D3: publishing at every isolation level of PostgreSQL.

use std::time::Duration;

use posthouse::testing::Script;
use posthouse::{ErrorKind, Message, Relay};

use super::{destinations, orders};
use crate::relay::quick;
use crate::support::{Postgres, TestDb};

const LEVELS: [&str; 3] =
    ["BEGIN ISOLATION LEVEL READ COMMITTED", "BEGIN ISOLATION LEVEL REPEATABLE READ", "BEGIN ISOLATION LEVEL SERIALIZABLE"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_level_publishes() {
    let outbox = Postgres::fresh().await;
    let script = Script::new();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", script.clone()).start().await.unwrap();
    for (n, level) in LEVELS.into_iter().enumerate() {
        let mut tx = outbox.pool().begin_with(level).await.unwrap();
        sqlx::query("SELECT 1").execute(&mut *tx).await.unwrap();
        outbox.publish(&mut tx, Message::to("test:a").key("k").payload(n.to_string())).await.unwrap();
        // New dedup keys, alone and in a batch; then one that this transaction used itself.
        outbox.publish(&mut tx, Message::to("test:b").dedup_key(format!("d{n}"))).await.unwrap();
        outbox.publish(&mut tx, Message::to("test:b").dedup_key(format!("d{n}"))).await.unwrap();
        outbox.publish_many(&mut tx, [Message::to("test:c").dedup_key(format!("e{n}")), Message::to("test:c")]).await.unwrap();
        outbox.commit(tx).await.unwrap();
        relay.drain_once().await;
        assert_eq!(script.deliveries().len(), 4 * (n + 1), "{level}");
    }
    relay.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_dedup_key_is_no_error_or_a_conflict_to_try_again() {
    let outbox = Postgres::fresh().await;
    let table = orders::<Postgres>(&outbox).await;
    for (n, level) in LEVELS.into_iter().enumerate() {
        let message = || Message::to(format!("once-{n}")).dedup_key(format!("once-{n}"));
        let mut tx = outbox.pool().begin_with(level).await.unwrap();
        // From here on the higher levels see the database as it is now.
        Postgres::number_in(&mut tx, format!("SELECT count(*) FROM {table}")).await;
        let first = outbox.publish_alone(message()).await.unwrap();
        let again = outbox.publish(&mut tx, message()).await;
        if n == 0 {
            assert_eq!(again.unwrap(), first);
            outbox.publish(&mut tx, Message::to(format!("after-{n}"))).await.unwrap();
            outbox.commit(tx).await.unwrap();
        } else {
            let conflict = again.unwrap_err();
            assert_eq!(conflict.kind(), ErrorKind::Conflict, "{level}: {conflict}");
            tx.rollback().await.unwrap();
            // The whole transaction again: now it sees the key.
            let mut tx = outbox.pool().begin_with(level).await.unwrap();
            assert_eq!(outbox.publish(&mut tx, message()).await.unwrap(), first);
            outbox.publish(&mut tx, Message::to(format!("after-{n}"))).await.unwrap();
            outbox.commit(tx).await.unwrap();
        }
    }
    assert_eq!(destinations::<Postgres>(&outbox).await, ["once-0", "after-0", "once-1", "after-1", "once-2", "after-2"]);
}

/// Publishing makes no two serializable transactions conflict; their own rows do, and then the commit says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_of_the_callers_own_rows_shows_as_one() {
    let outbox = Postgres::fresh().await;
    let table = orders::<Postgres>(&outbox).await;
    let begin = async || outbox.pool().begin_with(LEVELS[2]).await.unwrap();
    let (mut a, mut b) = (begin().await, begin().await);
    for (n, tx) in [&mut a, &mut b].into_iter().enumerate() {
        // Each reads what the other one writes.
        Postgres::number_in(tx, format!("SELECT count(*) FROM {table}")).await;
        Postgres::execute_in(tx, format!("INSERT INTO {table} (id) VALUES ({n})")).await;
        outbox.publish(tx, Message::to(format!("skewed-{n}"))).await.unwrap();
    }
    outbox.commit(a).await.unwrap();
    let conflict = outbox.commit(b).await.unwrap_err();
    assert_eq!(conflict.kind(), ErrorKind::Conflict, "{conflict}");
    assert_eq!(destinations::<Postgres>(&outbox).await, ["skewed-0"]);
}
