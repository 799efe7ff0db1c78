//! What a relay tells of itself: latencies, attempts, connections.

use std::time::Duration;

use posthouse::transport::{Delivery, from_fn};
use posthouse::{Histogram, Message, Relay};

use super::{publish, quick};
use crate::support::{SOON, TestDb, on_all_databases, wait_for};

on_all_databases!(latencies_and_attempts_are_counted);

/// A message that was published an hour ago, by the database's clock; another one that was to be delivered ten minutes ago.
async fn publish_old<T: TestDb>(outbox: &posthouse::Outbox<T::Db>) {
    let ago = |minutes: i64| match T::NAME {
        "postgres" => format!("clock_timestamp() - interval '{minutes} minutes'"),
        "mysql" => format!("UTC_TIMESTAMP(6) - INTERVAL {minutes} MINUTE"),
        _ => format!("CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) - {}", minutes * 60_000),
    };
    let table = outbox.tables().name("message");
    for due in ["NULL".to_owned(), ago(10)] {
        let sql = format!(
            "INSERT INTO {table} (destination, payload, created_at, deliver_at) VALUES ('test:a', 'ok', {}, {due})",
            ago(60)
        );
        T::execute(outbox.pool(), sql).await;
    }
}

async fn latencies_and_attempts_are_counted<T: TestDb>() {
    let outbox = T::fresh().await;
    publish::<T>(&outbox, ["ok", "flaky", "never", "bad"].map(|what| Message::to("test:a").payload(what))).await;
    publish::<T>(&outbox, [Message::to("test:a").payload("ok"), Message::to("test:down").payload("down")]).await;
    publish_old::<T>(&outbox).await;
    let transport = from_fn(|d: Delivery| async move {
        match (&d.message().payload[..], d.message().attempt) {
            (b"flaky", 1 | 2) | (b"never", _) => d.retry("not now", None),
            (b"bad", _) => d.rejected("never"),
            (b"down", _) => d.unavailable("refused"),
            _ => d.delivered(),
        }
    });
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", transport).start().await.unwrap();
    wait_for("the last attempts", SOON, async || {
        let stats = relay.stats();
        stats.latency.count() == 5 && stats.attempts.failed == 1 && stats.attempts.unavailable > 0
    })
    .await;
    let stats = relay.stats();
    let of = |a: posthouse::AttemptCounts| (a.delivered, a.retried, a.failed, a.rejected);
    assert_eq!(of(stats.attempts), (5, 4, 1, 1));
    assert_eq!((stats.attempts.first, stats.attempts.third), (7, 2), "of flaky and never the third gave a result");
    assert_eq!(stats.attempt_time.count(), 11, "all but those that found it down");
    assert_eq!(of(stats.destinations["test:a"].attempts), (5, 4, 1, 1));
    let down = stats.destinations["test:down"].attempts;
    assert!(of(down) == (0, 0, 0, 0) && down.unavailable > 0 && down.first == 0, "{down:?}");

    // Published an hour ago, and due ten minutes ago: whatever this machine's clock says.
    let above = |bound: u64| Histogram::BOUNDS.iter().position(|b| b.as_secs() == bound).unwrap();
    let counts = stats.latency.counts();
    assert_eq!((counts[above(1_800)], counts[above(7_200)]), (1, 1), "{counts:?}");
    assert!(counts[..above(300)].iter().sum::<u64>() == 3, "the others took no minute: {counts:?}");
    let sum = stats.latency.sum();
    assert!(
        sum >= Duration::from_secs(4_200) - Duration::from_millis(200) && sum < Duration::from_secs(4_200) + 3 * SOON,
        "{sum:?}"
    );

    let connections = stats.connections;
    assert_eq!(connections.most, relay.store().connections());
    assert!((1..=connections.most).contains(&connections.open) && connections.idle <= connections.open, "{connections:?}");
    relay.shutdown(Duration::from_secs(5)).await;
}
