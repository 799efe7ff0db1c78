//! Destinations that are down: no attempts, no losses, no harm to others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use posthouse::transport::{Delivery, from_fn};
use posthouse::{BreakerState, Message, Relay, Route};

use super::{Log, Recorder, quick};
use crate::support::{SOON, TestDb, messages, on_all_databases, pending, wait_for};

on_all_databases!(
    one_message_goes_out_by_itself_after_an_outage,
    silence_keeps_a_destination_that_was_down_down,
    backlog_of_a_dead_destination_stays_in_the_database_and_drains_in_order,
    rows_held_by_a_breaker_go_to_another_instance,
    rate_limit_spaces_sends,
    an_outage_is_not_read_again_and_again,
    houses_move_though_a_destination_is_down,
    slow_keyed_destination_leaves_room_for_others,
);

/// L5, L16: one message only, no new traffic, no attempt counted.
async fn one_message_goes_out_by_itself_after_an_outage<T: TestDb>() {
    let outbox = T::fresh().await;
    let (up, tries) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (u, t) = (up.clone(), tries.clone());
    let transport = from_fn(move |d: Delivery| {
        t.fetch_add(1, Ordering::SeqCst);
        let up = u.load(Ordering::SeqCst);
        async move { if up { d.delivered() } else { d.unavailable("connection refused") } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").max_attempts(1)).await.unwrap();
    wait_for("several probes", SOON, async || tries.load(Ordering::SeqCst) >= 3).await;
    let row = messages(&**relay.store()).await.remove(0);
    assert_eq!((row.status.as_str(), row.attempts), ("PENDING", 0));
    wait_for("the breaker shows", SOON, async || {
        relay
            .stats()
            .destinations
            .get("test:a")
            .is_some_and(|d| matches!(d.breaker, BreakerState::Open(_)) && d.last_error.is_some())
    })
    .await;
    up.store(true, Ordering::SeqCst);
    wait_for("delivery", SOON, async || pending::<T>(&outbox).await == 0).await;
    // Counted when the answer to the delete is there, a moment after others see the row gone.
    wait_for("it is counted", SOON, async || relay.stats().delivered == 1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// L16: a receiver that refuses connections at first, and then takes them and says nothing, has not come back. One that was up
/// and falls silent costs an attempt.
async fn silence_keeps_a_destination_that_was_down_down<T: TestDb>() {
    let outbox = T::fresh().await;
    let tries = Arc::new(AtomicUsize::new(0));
    let t = tries.clone();
    let transport = from_fn(move |d: Delivery| {
        let first = t.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            match d.address() {
                "silent" => d.no_answer("no response"),
                _ if first => d.unavailable("connection refused"),
                _ => d.no_answer("no response"),
            }
        }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").max_attempts(1)).await.unwrap();
    wait_for("several probes", SOON, async || tries.load(Ordering::SeqCst) >= 3).await;
    let row = messages(&**relay.store()).await.remove(0);
    assert_eq!((row.status.as_str(), row.attempts), ("PENDING", 0));
    assert!(matches!(relay.stats().destinations["test:a"].breaker, BreakerState::Open(_)));

    outbox.publish_alone(Message::to("test:silent").max_attempts(1)).await.unwrap();
    wait_for("an attempt is counted", SOON, async || messages(&**relay.store()).await[0].status == "FAILED").await;
    let row = messages(&**relay.store()).await.remove(0);
    assert_eq!((row.destination.as_str(), row.attempts), ("test:silent", 1));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn backlog_of_a_dead_destination_stays_in_the_database_and_drains_in_order<T: TestDb>() {
    let outbox = T::fresh().await;
    let (up, log) = (Arc::new(AtomicBool::new(true)), Log::default());
    let (u, l) = (up.clone(), log.clone());
    let transport = from_fn(move |d: Delivery| {
        let up = u.load(Ordering::SeqCst);
        if up {
            l.add(&d);
        }
        async move { if up { d.delivered() } else { d.unavailable("down") } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key(0).payload("0")).await.unwrap();
    log.wait_len(1).await;
    up.store(false, Ordering::SeqCst);
    let n = 3_000;
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, (1..n).map(|i| Message::to("test:a").key(i % 50).payload(i.to_string()))).await.unwrap();
    tx.commit().await.unwrap();
    wait_for("the outage is noticed", SOON, async || relay.stats().unavailable > 0).await;
    // Whatever it holds in memory is little, though 3 000 wait.
    wait_for("memory is let go", SOON, async || relay.stats().in_memory < 200).await;
    outbox.publish_alone(Message::to("test:a").key(0).payload(n.to_string())).await.unwrap();
    up.store(true, Ordering::SeqCst);
    log.wait_len(n + 1).await;
    relay.drain_once().await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!((log.len(), log.distinct()), (n + 1, n + 1));
    let rows = messages(&**relay.store()).await;
    assert!(rows.iter().all(|m| m.attempts == 0), "no attempts while it was down");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// L6: what one instance holds back for a dead destination, another sends when the first is gone.
async fn rows_held_by_a_breaker_go_to_another_instance<T: TestDb>() {
    let outbox = T::fresh().await;
    let dead = from_fn(|d: Delivery| async move { d.unavailable("no way from here") });
    let first = Relay::builder(&outbox).settings(quick()).transport("test", dead).start().await.unwrap();
    for i in 0..20 {
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
    }
    wait_for("held", SOON, async || first.stats().unavailable > 0).await;
    drop(first); // Dies without a word.
    let log = Log::default();
    let second = Relay::builder(&outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    log.wait_len(20).await;
    assert_eq!(log.distinct(), 20);
    second.shutdown(Duration::from_secs(5)).await;
}

async fn rate_limit_spaces_sends<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let relay = Relay::builder(&outbox)
        .settings(quick())
        .transport("test", Recorder(log.clone()))
        .route("slow", Route::to("test:a").rate(20.0))
        .start()
        .await
        .unwrap();
    let started = std::time::Instant::now();
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, (0..30).map(|_| Message::to("slow"))).await.unwrap();
    tx.commit().await.unwrap();
    log.wait_len(30).await;
    // The bucket starts with one token: 29 intervals of 50 ms.
    assert!(started.elapsed() >= Duration::from_millis(1_400), "{:?}", started.elapsed());
    relay.shutdown(Duration::from_secs(5)).await;
}

/// P4's kin: rows that can't go now, of a hot key and of many, are not read over and over.
async fn an_outage_is_not_read_again_and_again<T: TestDb>() {
    let outbox = T::fresh().await;
    let up = Arc::new(AtomicBool::new(true));
    let (u, log) = (up.clone(), Log::default());
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let up = u.load(Ordering::SeqCst);
        if up {
            l.add(&d);
        }
        async move { if up { d.delivered() } else { d.unavailable("down") } }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a").key("hot").payload("0")).await.unwrap();
    log.wait_len(1).await;
    wait_for("its completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    up.store(false, Ordering::SeqCst);
    let n = 600;
    let mut tx = outbox.begin().await.unwrap();
    outbox
        .publish_many(
            &mut tx,
            (1..n).map(|i| Message::to("test:a").key(if i % 2 == 0 { "hot" } else { "warm" }).payload(i.to_string())),
        )
        .await
        .unwrap();
    tx.commit().await.unwrap();
    wait_for("the outage is noticed", SOON, async || relay.stats().unavailable > 1).await;
    // An operator takes away the very message that the breaker keeps for its probes.
    let rows = messages(&**relay.store()).await;
    let waiting: Vec<i64> = rows.iter().filter(|m| m.status == "PENDING").map(|m| m.id).collect();
    let heads: Vec<i64> = waiting.iter().rev().take(2).copied().collect();
    relay.store().act(&heads, &posthouse::store::Action::Skip, "ann").await.unwrap();
    let before = relay.stats().reads;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let reads = relay.stats().reads - before;
    assert!(reads < 150, "{reads} reads in 3 s");
    up.store(true, Ordering::SeqCst);
    log.wait_len(n - 2).await;
    relay.drain_once().await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!(pending::<T>(&outbox).await, 2, "the two that were skipped");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// A house whose message is held for a dead destination is handed over all the same.
async fn houses_move_though_a_destination_is_down<T: TestDb>() {
    let outbox = T::fresh().await;
    let dead = || from_fn(|d: Delivery| async move { d.unavailable("down") });
    let log = Log::default();
    let relay = async || {
        Relay::builder(&outbox)
            .settings(quick())
            .transport("dead", dead())
            .transport("test", Recorder(log.clone()))
            .start()
            .await
            .unwrap()
    };
    let first = relay().await;
    for i in 0..100 {
        outbox.publish_alone(Message::to(format!("dead:{}", i % 10)).key(i).payload(i.to_string())).await.unwrap();
    }
    wait_for("the outage is noticed", SOON, async || first.stats().unavailable >= 10).await;
    let all = first.stats().houses;
    let second = relay().await;
    if T::NAME != "sqlite" {
        wait_for("shares", SOON, async || first.stats().houses == all / 2 && second.stats().houses == all / 2).await;
    }
    tokio::time::timeout(SOON, first.shutdown(Duration::from_secs(10))).await.expect("shutdown completes");
    wait_for("all houses moved", SOON, async || second.stats().houses == all).await;
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    log.wait_len(1).await;
    second.shutdown(Duration::from_secs(5)).await;
}

/// Many keys, long queues, one send at a time: others are read and sent meanwhile.
async fn slow_keyed_destination_leaves_room_for_others<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let slow = from_fn(|d: Delivery| async move {
        tokio::time::sleep(Duration::from_millis(100)).await;
        d.delivered();
    });
    let mut settings = quick();
    settings.batch = 200;
    let relay = Relay::builder(&outbox)
        .settings(settings)
        .transport("slow", slow)
        .transport("test", Recorder(log.clone()))
        .route("slow", Route::to("slow:a").concurrency(1))
        .start()
        .await
        .unwrap();
    for _ in 0..4 {
        let mut tx = outbox.begin().await.unwrap();
        outbox.publish_many(&mut tx, (0..1_500).map(|i| Message::to("slow").key(i % 40))).await.unwrap();
        tx.commit().await.unwrap();
    }
    for i in 0..20 {
        let started = std::time::Instant::now();
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
        log.wait_len(i + 1).await;
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    }
    relay.shutdown(Duration::from_secs(5)).await;
}
