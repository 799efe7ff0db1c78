//! Nothing that fails or stalls keeps the others waiting.

use std::time::Duration;

use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Relay, Retry, Route};

use super::{Log, Recorder, patient, quick};
use crate::support::{SOON, TestDb, on_all_databases, scale, wait_for};

on_all_databases!(
    failing_rows_do_not_starve_a_good_one,
    what_is_always_due_leaves_room_for_a_good_row,
    many_stalled_destinations_beside_a_healthy_one,
    stalled_destination_ahead_of_a_healthy_one,
    memory_is_bounded_in_bytes,
    huge_backlog_drains_with_bounded_memory,
);

/// P1: 1 000 failing rows older than one good row; the good one leaves in under a second (bound: wide).
async fn failing_rows_do_not_starve_a_good_one<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let good = d.message().payload == b"good";
        if good {
            l.add(&d);
        }
        async move { if good { d.delivered() } else { d.retry("bad", None) } }
    });
    let mut settings = quick();
    // Not more tries in a second than a slow machine can write down: what is too much for it delays the good one as well.
    settings.default_route.retry = Retry::new(10_000, Duration::from_millis(250), Duration::from_secs(1));
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, (0..1_000).map(|_| Message::to("test:a").payload("bad"))).await.unwrap();
    tx.commit().await.unwrap();
    wait_for("all have failed once", SOON, async || relay.stats().retried >= 1_000).await;
    outbox.publish_alone(Message::to("test:a").payload("good")).await.unwrap();
    // The others fail for hours.
    wait_for("the good one", SOON * 2, async || log.len() == 1).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// The same where the receiver can't even answer as fast as the failing rows come back: of their destination too, something new
/// goes in between.
async fn what_is_always_due_leaves_room_for_a_good_row<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let log = l.clone();
        async move {
            if d.message().payload == b"good" {
                log.add(&d);
                return d.delivered();
            }
            // Eight at a time: 1 600 in a second, of 60 000 that are due.
            tokio::time::sleep(Duration::from_millis(5)).await;
            d.retry("bad", None)
        }
    });
    let mut settings = quick();
    settings.default_route.retry = Retry::new(10_000, Duration::from_millis(100), Duration::from_millis(100));
    settings.default_route.concurrency = Some(8);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    // More than one read of what was passed over takes.
    outbox.publish_many(&mut tx, (0..6_000).map(|_| Message::to("test:a").payload("bad"))).await.unwrap();
    tx.commit().await.unwrap();
    wait_for("as many have failed", SOON * 3, async || relay.stats().retried >= 6_000).await;
    // Later ones as well: behind those that failed, and behind each other's followers.
    for i in 0..5 {
        let message = Message::to("test:a").payload("good");
        outbox.publish_alone(if i % 2 == 0 { message } else { message.key(i) }).await.unwrap();
        let before = relay.stats().retried;
        wait_for("a good one", SOON, async || log.len() == i + 1).await;
        // It waits for what is in memory and a read or two, not until all have had their turn.
        let meanwhile = relay.stats().retried - before;
        assert!(meanwhile < 1_500, "{meanwhile} others were tried first");
    }
    // Nor are the failing ones starved.
    let before = relay.stats().retried;
    wait_for("failing ones go on", SOON, async || relay.stats().retried >= before + 1_000).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// Nor do many receivers that take nothing and aren't known to be down.
async fn many_stalled_destinations_beside_a_healthy_one<T: TestDb>() {
    let outbox = T::fresh().await;
    let mut tx = outbox.begin().await.unwrap();
    for n in 0..60 {
        let messages = (0..400).map(|_| Message::to(format!("stalled:{n}")).payload("x"));
        outbox.publish_many(&mut tx, messages).await.unwrap();
    }
    tx.commit().await.unwrap();
    let log = Log::default();
    let stalled = from_fn(|d: Delivery| async move {
        std::future::pending::<()>().await;
        drop(d);
    });
    let relay = Relay::builder(&outbox)
        .settings(patient())
        .transport("stalled", stalled)
        .transport("test", Recorder(log.clone()))
        .start()
        .await
        .unwrap();
    wait_for("many are in flight", SOON, async || relay.stats().in_flight >= 60).await;
    for i in 0..20 {
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
        log.wait_len(i + 1).await;
    }
    let held = relay.stats().in_memory;
    assert!(held < 14_000, "{held} rows in memory");
    relay.shutdown(Duration::from_millis(100)).await;
}

/// P7: many rows of a destination that takes nothing, older than those of a healthy one.
async fn stalled_destination_ahead_of_a_healthy_one<T: TestDb>() {
    let outbox = T::fresh().await;
    let n = 20_000 * scale();
    for _ in 0..n / 2_000 {
        let mut tx = outbox.begin().await.unwrap();
        outbox.publish_many(&mut tx, (0..2_000).map(|_| Message::to("stalled:a").payload(vec![b'x'; 200]))).await.unwrap();
        tx.commit().await.unwrap();
    }
    let log = Log::default();
    let stalled = from_fn(|d: Delivery| async move {
        std::future::pending::<()>().await;
        drop(d);
    });
    let mut settings = quick();
    settings.lease = Duration::from_secs(40);
    settings.send_timeout = Duration::from_secs(30);
    let relay = Relay::builder(&outbox)
        .settings(settings)
        .transport("stalled", stalled)
        .transport("test", Recorder(log.clone()))
        .start()
        .await
        .unwrap();
    for i in 0..50 {
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
        log.wait_len(i + 1).await;
    }
    let held = relay.stats().in_memory;
    assert!(held < 1_000, "{held} rows in memory");
    // The stall ends with the process: what is in flight is given up.
    relay.shutdown(Duration::from_millis(100)).await;
}

async fn memory_is_bounded_in_bytes<T: TestDb>() {
    let outbox = T::fresh().await;
    let (n, size) = (60, 300_000);
    for _ in 0..n {
        outbox.publish_alone(Message::to("test:a").payload(vec![b'x'; size])).await.unwrap();
    }
    // One message larger than the whole budget still goes.
    outbox.publish_alone(Message::to("test:a").payload(vec![b'x'; 2 << 20])).await.unwrap();
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        let log = l.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            log.add(&d);
            d.delivered();
        }
    });
    let mut settings = quick();
    settings.memory = 1 << 20;
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.unwrap();
    let mut most = 0;
    wait_for("all", SOON, async || {
        most = most.max(relay.stats().bytes);
        log.len() == n + 1
    })
    .await;
    assert!(most <= (2 << 20) + 1_000, "{most} bytes");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// P6, P11, scaled: a backlog larger than memory may hold.
async fn huge_backlog_drains_with_bounded_memory<T: TestDb>() {
    let outbox = T::fresh().await;
    let n = 30_000 * scale();
    for chunk in 0..n / 2_000 {
        let mut tx = outbox.begin().await.unwrap();
        let ids = chunk * 2_000..(chunk + 1) * 2_000;
        let due = Duration::from_millis(1);
        let messages = ids.map(|i| {
            let m = Message::to("test:a").payload(i.to_string());
            // A third keyed, a third due long ago, a third plain.
            match i % 3 {
                0 => m.key(i % 100),
                1 => m.deliver_in(due),
                _ => m,
            }
        });
        outbox.publish_many(&mut tx, messages).await.unwrap();
        tx.commit().await.unwrap();
    }
    let log = Log::default();
    let mut settings = quick();
    settings.batch = 500;
    let relay = Relay::builder(&outbox)
        .settings(settings)
        .transport("test", Recorder(log.clone()))
        .route("test:a", Route::to("test:a").concurrency(200))
        .start()
        .await
        .unwrap();
    let mut most = 0;
    wait_for("all", SOON * 3 * scale() as u32, async || {
        most = most.max(relay.stats().in_memory);
        log.len() >= n
    })
    .await;
    relay.drain_once().await;
    assert_eq!((log.len(), log.distinct()), (n, n));
    assert_eq!(log.order_violations(), 0);
    // Four batches, and what one read more brings.
    assert!(most <= 500 * 4 + 2_000, "{most} rows in memory");
    relay.shutdown(Duration::from_secs(5)).await;
}
