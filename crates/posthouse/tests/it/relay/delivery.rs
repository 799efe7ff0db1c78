//! A message leaves after its commit, and only then.

use std::time::{Duration, Instant, SystemTime};

use posthouse::store::{Backend, Done, MessageStatus};
use posthouse::{Message, Relay};
use sqlx::Connection;

use super::{Log, Recorder, quick};
use crate::support::{SOON, TestDb, messages, on_all_databases, pending, wait_for};

on_all_databases!(
    sent_after_commit_never_before_or_after_rollback,
    plain_commit_is_seen_quickly,
    plain_sql_publishes,
    late_commit_below_the_mark_is_delivered,
    bytes_arrive_as_they_were,
    delayed_messages_wait,
    pending_row_without_log_row_alarms,
    stale_outcome_changes_nothing,
    application_that_holds_all_connections_does_not_stop_the_relay,
);

async fn sent_after_commit_never_before_or_after_rollback<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    // It owns its houses before a long transaction holds SQLite's only write lock.
    relay.drain_once().await;

    let mut tx = outbox.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:a").payload("rolled back")).await.unwrap();
    tx.rollback().await.unwrap();

    let mut tx = outbox.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:a").payload("dropped")).await.unwrap();
    drop(tx);

    let mut tx = outbox.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:a").payload("kept")).await.unwrap();
    {
        let mut savepoint = tx.begin().await.unwrap();
        outbox.publish(&mut savepoint, Message::to("test:a").payload("savepoint")).await.unwrap();
        savepoint.rollback().await.unwrap();
    }
    relay.drain_once().await;
    assert_eq!(log.len(), 0, "nothing leaves before the commit");
    outbox.commit(tx).await.unwrap();
    relay.drain_once().await;
    assert_eq!(log.payloads(), ["kept"]);
    assert_eq!(pending::<T>(&outbox).await, 0);
    let list = messages(&**relay.store()).await;
    assert_eq!(list.len(), 1);
    assert_eq!(list[0].status, MessageStatus::Sent.as_str());
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn plain_commit_is_seen_quickly<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let mut settings = quick();
    // Only the hint window can find it soon.
    settings.idle_poll = Duration::from_secs(60);
    settings.near_sweep = Duration::from_secs(60);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", Recorder(log.clone())).start().await.unwrap();
    relay.drain_once().await;
    let mut tx = outbox.pool().begin_with(T::Db::BEGIN).await.unwrap();
    outbox.publish(&mut tx, Message::to("test:a").payload("x")).await.unwrap();
    let committed = Instant::now();
    tx.commit().await.unwrap();
    log.wait_len(1).await;
    assert!(committed.elapsed() < Duration::from_secs(10), "{:?}", committed.elapsed());
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn plain_sql_publishes<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    let table = outbox.tables().name("message");
    T::execute(
        outbox.pool(),
        format!("INSERT INTO {table} (destination, message_key, payload) VALUES ('test:a', 'k', 'from sql')"),
    )
    .await;
    log.wait_len(1).await;
    assert_eq!(log.payloads(), ["from sql"]);
    assert!(!log.seen()[0].message_id.is_empty(), "the database made an id");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// L17: the transaction with the lower id commits after the reader has passed it.
async fn late_commit_below_the_mark_is_delivered<T: TestDb>() {
    if T::NAME == "sqlite" {
        return; // One writer at a time: ids commit in order.
    }
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    let mut late = outbox.begin().await.unwrap();
    outbox.publish(&mut late, Message::to("test:a").payload("late")).await.unwrap();
    let mut later = outbox.begin().await.unwrap();
    outbox.publish(&mut later, Message::to("test:a").payload("later")).await.unwrap();
    for i in 0..50 {
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
    }
    log.wait_len(50).await;
    late.commit().await.unwrap();
    log.wait_len(51).await;
    // Now without a wake-up, and so long after that only the full sweep of a short period reaches back.
    let tx: sqlx::Transaction<'static, T::Db> = later.try_into().unwrap();
    tx.commit().await.unwrap();
    log.wait_len(52).await;
    assert_eq!(log.distinct(), 52);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// D7.
async fn bytes_arrive_as_they_were<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    let every_byte: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    let key = "ключ 🐎 مفتاح ' \" \\ %";
    outbox.publish_alone(Message::to("test:é🐎").key(key).payload(every_byte.clone()).header("x-ü", "🐎\n")).await.unwrap();
    log.wait_len(1).await;
    let seen = &log.seen()[0];
    assert_eq!(seen.payload, every_byte);
    assert_eq!(seen.key.as_deref(), Some(key));
    assert_eq!(seen.destination, "test:é🐎");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// 1.7: committed at least a second ahead, sent within 50 ms of its time; the upper bound here is wide, the lower is exact.
async fn delayed_messages_wait<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    let started = Instant::now();
    outbox.publish_alone(Message::to("test:a").payload("in").deliver_in(Duration::from_millis(1_200))).await.unwrap();
    outbox
        .publish_alone(Message::to("test:a").payload("at").deliver_at(SystemTime::now() + Duration::from_millis(1_300)))
        .await
        .unwrap();
    outbox
        .publish_alone(Message::to("test:a").payload("past").deliver_at(SystemTime::now() - Duration::from_secs(60)))
        .await
        .unwrap();
    log.wait_len(1).await;
    assert_eq!(log.payloads(), ["past"]);
    log.wait_len(3).await;
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(1_190), "{took:?}");
    relay.drain_once().await;
    assert_eq!(log.len(), 3, "T4: once each");
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn pending_row_without_log_row_alarms<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let (message, pending_table) = (outbox.tables().name("message"), outbox.tables().name("pending"));
    outbox.publish_alone(Message::to("test:a").payload("lost")).await.unwrap();
    outbox.publish_alone(Message::to("test:a").payload("fine")).await.unwrap();
    T::execute(outbox.pool(), format!("DELETE FROM {message} WHERE id = (SELECT min(id) FROM {pending_table})")).await;
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    log.wait_len(1).await;
    wait_for("the alarm", SOON, async || relay.stats().missing == 1).await;
    relay.drain_once().await;
    assert_eq!(pending::<T>(&outbox).await, 1, "never dropped silently");
    assert_eq!(
        T::number(outbox.pool(), format!("SELECT count(*) FROM {pending_table} WHERE status = 'PENDING'")).await,
        1,
        "nor failed"
    );
    relay.shutdown(Duration::from_secs(5)).await;
}

/// 2.2, T2: a finisher that was overtaken changes nothing.
async fn stale_outcome_changes_nothing<T: TestDb>() {
    let outbox = T::fresh().await;
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    let store = T::Db::store(outbox.pool(), outbox.tables(), Duration::from_secs(5), None);
    let row = messages(&*store).await.remove(0);
    store.act(&[row.id], &posthouse::store::Action::Skip, "test").await.unwrap();
    let done = Done { house: posthouse::store::House(row.house), id: row.id, version: 0 };
    assert!(store.delivered("stale", &[done]).await.unwrap().is_empty());
    assert_eq!(pending::<T>(&outbox).await, 1);
    assert!(store.claim("stale", &[done], Duration::from_secs(1)).await.unwrap().is_empty());
}

/// D12.
async fn application_that_holds_all_connections_does_not_stop_the_relay<T: TestDb>() {
    let place = T::place().await;
    let pool = sqlx::pool::PoolOptions::<T::Db>::new()
        .max_connections(1)
        .connect_with((*place.pool.connect_options()).clone())
        .await
        .unwrap();
    let outbox = crate::support::outbox_at(pool.clone(), place.schema.as_deref());
    outbox.migrate().await.unwrap();
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    let _held = pool.acquire().await.unwrap();
    log.wait_len(1).await;
    wait_for("completion", SOON, async || relay.stats().delivered == 1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}
