//! Messages of one key arrive in the order in which they were published.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::store::Action;
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, OnExhausted, Relay};

use super::{Log, Recorder, patient, quick, quick_route};
use crate::support::{SOON, TestDb, messages, on_all_databases, pending, scale, wait_for};

on_all_databases!(
    failing_head_blocks_its_key_alone,
    exhausted_head_blocks_until_a_person_decides,
    exhausted_head_is_skipped_where_the_route_says_so,
    many_writers_many_keys_stay_in_order,
    keys_that_look_alike_are_different,
    backlog_goes_before_new_messages_after_a_restart,
    hot_key_longer_than_memory_stays_in_order,
    late_commit_of_a_key_goes_first,
    what_is_requeued_goes_before_what_is_published_after_it,
    same_key_to_a_dead_destination_holds_up_nobody,
);

/// O1.
async fn failing_head_blocks_its_key_alone<T: TestDb>() {
    let outbox = T::fresh().await;
    let (log, broken) = (Log::default(), Arc::new(AtomicBool::new(true)));
    let (l, b) = (log.clone(), broken.clone());
    let transport = from_fn(move |d: Delivery| {
        let fail = d.message().payload == b"1" && b.load(Ordering::SeqCst);
        if !fail {
            l.add(&d);
        }
        async move { if fail { d.retry("not yet", None) } else { d.delivered() } }
    });
    let mut settings = quick();
    settings.default_route.retry.max_attempts = 10_000;
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    for i in 1..=3 {
        outbox.publish_alone(Message::to("test:a").key("k").payload(i.to_string())).await.unwrap();
    }
    outbox.publish_alone(Message::to("test:a").key("other").payload("9")).await.unwrap();
    wait_for("the other key", SOON, async || log.count("9") == 1).await;
    wait_for("three failures", SOON, async || relay.stats().retried >= 3).await;
    assert_eq!(log.payloads(), ["9"], "2 and 3 wait for 1");
    broken.store(false, Ordering::SeqCst);
    log.wait_len(4).await;
    assert_eq!(log.payloads(), ["9", "1", "2", "3"]);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O1 and O9: FAILED, then skipped by an operator; followers go promptly, also those published meanwhile.
async fn exhausted_head_blocks_until_a_person_decides<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let fail = d.message().payload == b"1";
        if !fail {
            l.add(&d);
        }
        async move { if fail { d.rejected("never") } else { d.delivered() } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    for i in 1..=3 {
        outbox.publish_alone(Message::to("test:a").key("k").payload(i.to_string())).await.unwrap();
    }
    wait_for("FAILED", SOON, async || messages(&**relay.store()).await.iter().any(|m| m.status == "FAILED")).await;
    outbox.publish_alone(Message::to("test:a").key("k").payload("4")).await.unwrap();
    relay.drain_once().await;
    assert_eq!(log.len(), 0, "the later ones wait");
    let failed = messages(&**relay.store()).await.into_iter().find(|m| m.status == "FAILED").unwrap();
    relay.store().act(&[failed.id], &Action::Skip, "ann").await.unwrap();
    log.wait_len(3).await;
    assert_eq!(log.payloads(), ["2", "3", "4"]);
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn exhausted_head_is_skipped_where_the_route_says_so<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let fail = d.message().payload == b"1";
        if !fail {
            l.add(&d);
        }
        async move { if fail { d.retry("no", None) } else { d.delivered() } }
    });
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport("test", transport)
        .route("orders", quick_route("test:a").on_exhausted(OnExhausted::Skip))
        .start()
        .await
        .unwrap();
    for i in 1..=3 {
        outbox.publish_alone(Message::to("orders").key("k").payload(i.to_string())).await.unwrap();
    }
    log.wait_len(2).await;
    assert_eq!(log.payloads(), ["2", "3"]);
    let failed = messages(&**relay.store()).await.into_iter().find(|m| m.status == "FAILED").unwrap();
    assert_eq!(failed.attempts, 3, "it had all its attempts first");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O2, O3, O8: writers that the application serialises per key by a row lock, with transactions of 0 to 20 ms;
/// the receiver answers after a random moment, and one answer in ten is a failure.
async fn many_writers_many_keys_stay_in_order<T: TestDb>() {
    let outbox = T::fresh().await;
    let (keys, per_writer, writers) = (if T::NAME == "sqlite" { 20 } else { 200 }, 75 * scale(), 8);
    let locks = outbox.tables().name("test_lock");
    T::execute(outbox.pool(), format!("CREATE TABLE {locks} (k integer PRIMARY KEY, n integer NOT NULL)")).await;
    for k in 0..keys {
        T::execute(outbox.pool(), format!("INSERT INTO {locks} VALUES ({k}, 0)")).await;
    }
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let log = l.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..5))).await;
            if fastrand::u32(0..10) == 0 {
                d.retry("bad luck", None);
            } else {
                log.add(&d);
                d.delivered();
            }
        }
    });
    let mut settings = quick();
    settings.default_route.retry.max_attempts = 10_000;
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..writers {
        let (outbox, locks) = (outbox.clone(), locks.clone());
        tasks.spawn(async move {
            for i in 0..per_writer {
                let k = fastrand::usize(0..keys);
                let mut tx = outbox.begin().await.unwrap();
                // The row lock serialises writers of one key; the counter is the order they agree on.
                T::execute_in(&mut tx, format!("UPDATE {locks} SET n = n + 1 WHERE k = {k}")).await;
                let n: i64 = T::number_in(&mut tx, format!("SELECT CAST(n AS {}) FROM {locks} WHERE k = {k}", T::BIGINT)).await;
                outbox.publish(&mut tx, Message::to("test:a").key(k).payload(n.to_string())).await.unwrap();
                if T::NAME != "sqlite" {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..20))).await;
                }
                // Half of the commits are seen by the relay, half are not.
                if i % 2 == 0 {
                    tx.commit().await.unwrap();
                } else {
                    let tx: sqlx::Transaction<'static, T::Db> = tx.try_into().unwrap();
                    tx.commit().await.unwrap();
                }
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let total = per_writer * writers;
    wait_for("all delivered", SOON * 3 * scale() as u32, async || log.len() >= total).await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!((log.len(), log.distinct()), (total, total), "T1: once each");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O7.
async fn keys_that_look_alike_are_different<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        l.add(&d);
        let fail = d.message().key.as_deref() == Some("a");
        async move { if fail { d.rejected("blocks its key") } else { d.delivered() } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("a").payload("1")).await.unwrap();
    wait_for("FAILED", SOON, async || messages(&**relay.store()).await.iter().any(|m| m.status == "FAILED")).await;
    for (i, key) in ["A", "á", "a ", "ａ"].iter().enumerate() {
        outbox.publish_alone(Message::to("test:a").key(key).payload(i.to_string())).await.unwrap();
    }
    outbox.publish_alone(Message::to("test:a").key("a").payload("waits")).await.unwrap();
    log.wait_len(5).await;
    relay.drain_once().await;
    assert_eq!(log.count("waits"), 0);
    assert_eq!(log.len(), 5);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O6.
async fn backlog_goes_before_new_messages_after_a_restart<T: TestDb>() {
    let outbox = T::fresh().await;
    let n = 2_000;
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, (0..n).map(|i| Message::to("test:a").key(i % 3).payload(i.to_string()))).await.unwrap();
    tx.commit().await.unwrap();
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    for i in n..n + 100 {
        outbox.publish_alone(Message::to("test:a").key(i % 3).payload(i.to_string())).await.unwrap();
    }
    log.wait_len(n + 100).await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!(log.len(), n + 100);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn hot_key_longer_than_memory_stays_in_order<T: TestDb>() {
    let outbox = T::fresh().await;
    // More than the rows of a batch.
    let n = 2_200;
    let log = Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    for chunk in (0..n).collect::<Vec<_>>().chunks(500) {
        let mut tx = outbox.begin().await.unwrap();
        outbox
            .publish_many(&mut tx, chunk.iter().map(|i| Message::to("test:a").key("hot").payload(i.to_string())))
            .await
            .unwrap();
        tx.commit().await.unwrap();
    }
    // One after the other: on a slow machine a few milliseconds each.
    wait_for("all of the key", SOON * 3, async || log.len() >= n).await;
    relay.drain_once().await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!(log.len(), n);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O8 step by step: the first message of a key is in flight, the second commits late below the mark, the third comes after it.
async fn late_commit_of_a_key_goes_first<T: TestDb>() {
    if T::NAME == "sqlite" {
        return; // One writer at a time: ids commit in order.
    }
    let outbox = T::fresh().await;
    let (log, hold) = (Log::default(), Arc::new(tokio::sync::Semaphore::new(0)));
    let (l, h) = (log.clone(), hold.clone());
    let transport = from_fn(move |d: Delivery| {
        let (log, hold) = (l.clone(), h.clone());
        async move {
            if d.message().payload == b"1" {
                let _ = hold.acquire().await;
            }
            log.add(&d);
            d.delivered();
        }
    });
    let mut settings = quick();
    settings.lease = Duration::from_secs(30);
    settings.send_timeout = Duration::from_secs(20);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("k").payload("1")).await.unwrap();
    wait_for("1 in flight", SOON, async || relay.stats().in_flight == 1).await;
    let mut late = outbox.begin().await.unwrap();
    outbox.publish(&mut late, Message::to("test:a").key("k").payload("2")).await.unwrap();
    // Other traffic, in every house, moves the marks past it.
    for i in 0..300 {
        outbox.publish_alone(Message::to("test:a").payload(format!("{}", 1_000 + i))).await.unwrap();
    }
    log.wait_len(300).await;
    late.commit().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("k").payload("3")).await.unwrap();
    wait_for("3 was read", SOON, async || relay.stats().in_flight == 1).await;
    hold.add_permits(1);
    log.wait_len(303).await;
    let keyed: Vec<String> =
        log.seen().into_iter().filter(|s| s.key.is_some()).map(|s| String::from_utf8(s.payload).unwrap()).collect();
    assert_eq!(keyed, ["1", "2", "3"]);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O10.
async fn same_key_to_a_dead_destination_holds_up_nobody<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport("test", Recorder(log.clone()))
        .transport("dead", from_fn(|d: Delivery| async move { d.unavailable("down") }))
        .start()
        .await
        .unwrap();
    for i in 0..20 {
        outbox.publish_alone(Message::to("dead:a").key("k").payload(i.to_string())).await.unwrap();
        outbox.publish_alone(Message::to("test:a").key("k").payload(i.to_string())).await.unwrap();
    }
    log.wait_len(20).await;
    assert_eq!(log.order_violations(), 0);
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 20).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// A message that was passed over and is requeued is in its place again, also while one that passed it is delivered but not yet
/// deleted: that one's row was read when there was nothing before it, so it doesn't speak for what is there now.
async fn what_is_requeued_goes_before_what_is_published_after_it<T: TestDb>() {
    if T::NAME == "sqlite" {
        // One writer at a time: a delete can't be held up while others go on.
        return;
    }
    let outbox = T::fresh().await;
    let (log, answer) = (Log::default(), Arc::new(tokio::sync::Semaphore::new(0)));
    let (l, a) = (log.clone(), answer.clone());
    let tries = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let transport = from_fn(move |d: Delivery| {
        let (log, answer, tries) = (l.clone(), a.clone(), tries.clone());
        async move {
            if d.message().payload == b"1" {
                match tries.fetch_add(1, Ordering::SeqCst) {
                    0 => return d.rejected("never"),
                    1 => return d.retry("not yet", Some(Duration::from_secs(3_600))),
                    _ => {}
                }
            }
            log.add(&d);
            if d.message().payload == b"2" {
                let _ = answer.acquire().await;
            }
            d.delivered();
        }
    });
    let relay = Relay::builder(&outbox)
        .settings(patient())
        .transport("test", transport)
        .route("orders", quick_route("test:a").on_exhausted(OnExhausted::Skip))
        .start()
        .await
        .unwrap();
    let store = relay.store();
    let row = async |status: &str| messages(&**store).await.into_iter().find(|m| m.status == status);
    outbox.publish_alone(Message::to("orders").key("k").payload("1")).await.unwrap();
    wait_for("FAILED", SOON, async || row("FAILED").await.is_some()).await;
    let first = row("FAILED").await.unwrap();
    outbox.publish_alone(Message::to("orders").key("k").payload("2")).await.unwrap();
    log.wait_len(1).await;
    let second = row("PENDING").await.unwrap();

    // Its delete waits for this lock.
    let mut lock = outbox.begin().await.unwrap();
    let table = outbox.tables().name("pending");
    let (house, id) = (second.house, second.id);
    T::number_in(
        &mut lock,
        format!("SELECT CAST(id AS {}) FROM {table} WHERE house = {house} AND id = {id} FOR UPDATE", T::BIGINT),
    )
    .await;
    answer.add_permits(1);
    wait_for("confirmation", SOON, async || relay.stats().destinations.get("orders").is_some_and(|d| d.delivered == 1)).await;

    store.act(&[first.id], &Action::Requeue, "ann").await.unwrap();
    wait_for("a failure of the requeued one", SOON, async || {
        messages(&**store).await.iter().any(|m| m.id == first.id && m.status == "PENDING" && m.attempts == 1)
    })
    .await;
    for (key, payload) in [("k", "3"), ("other", "8"), ("other", "9")] {
        outbox.publish_alone(Message::to("orders").key(key).payload(payload)).await.unwrap();
    }
    wait_for("the other key", SOON, async || log.count("9") == 1).await;
    assert_eq!(log.payloads(), ["2", "8", "9"], "3 waits for 1");
    lock.rollback().await.unwrap();
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 2).await;
    store.act(&[first.id], &Action::Requeue, "ann").await.unwrap();
    log.wait_len(5).await;
    assert_eq!(log.payloads(), ["2", "8", "9", "1", "3"]);
    relay.shutdown(Duration::from_secs(5)).await;
}
