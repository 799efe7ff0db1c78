//! What a dashboard asks: what was done since, who is alive, what waits where.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{Action, Attempt, Coverage, Done, House, Seen};

use crate::store::tables::{Fresh, StoreDb, done, on_all_stores, setback};

on_all_stores!(progress_counts_what_all_instances_did, houses_and_instances_are_told_with_what_waits);

async fn progress_counts_what_all_instances_did<T: StoreDb>(db: &Fresh<T>) {
    let overview = db.store.overview();
    let empty = overview.progress(None).await.unwrap();
    assert_eq!((empty.seen, empty.log), (Seen::default(), None));
    assert_eq!(overview.progress(Some(empty.seen)).await.unwrap(), empty);

    let published = db.publish((0..10).map(|n| Message::to("d").key(n))).await;
    let rows = db.eligible().await;
    let first: Vec<Done> = rows[..4].iter().map(done).collect();
    db.store.delivered("a", &first).await.unwrap();
    let seen = overview.progress(None).await.unwrap();
    assert_eq!(seen.log, Some((published[0], published[9])));
    assert_eq!((seen.delivered, seen.latencies_ms.len()), (0, 0), "nothing is counted without a beginning");

    let second: Vec<Done> = rows[4..9].iter().map(done).collect();
    db.store.delivered("b", &second).await.unwrap();
    let mut failed = setback(&rows[9], Some(Duration::from_secs(60)));
    failed.attempt = Some(Attempt { outcome: "retry", response: None, took: Duration::ZERO });
    db.store.setback("b", &[failed]).await.unwrap();
    let now = overview.progress(Some(seen.seen)).await.unwrap();
    assert_eq!((now.delivered, now.failed_attempts, now.log), (5, 1, seen.log));
    let houses: std::collections::HashSet<House> = rows[4..9].iter().map(|t| t.house).collect();
    assert_eq!(now.latencies_ms.len(), houses.len(), "one for each batch");
    assert!(now.latencies_ms.iter().all(|ms| (0..600_000).contains(ms)), "{:?}", now.latencies_ms);
    let since_the_start = overview.progress(Some(Seen::default())).await.unwrap();
    assert_eq!((since_the_start.delivered, since_the_start.failed_attempts), (9, 1));
    assert_eq!(overview.progress(Some(now.seen)).await.unwrap().delivered, 0, "nothing is counted twice");
}

async fn houses_and_instances_are_told_with_what_waits<T: StoreDb>(db: &Fresh<T>) {
    let overview = db.store.overview();
    let some = Coverage { takes: posthouse::Houses::ALL, for_runs: "0".parse().unwrap() };
    db.store.join("here", &some, Duration::from_secs(3600)).await.unwrap();
    db.store.join("gone", &Coverage::default(), Duration::from_secs(3600)).await.unwrap();
    db.store.take("gone", &[House(0)], 1).await.unwrap();
    db.run("UPDATE {instance} SET lease_until = {PAST} WHERE instance = 'gone'").await;
    let rest: Vec<House> = db.all_houses().await.into_iter().filter(|h| h.0 != 0).collect();
    db.store.take("here", &rest, 99).await.unwrap();

    let ids = db.publish((0..12).map(|n| Message::to("d").key(n))).await;
    db.store.act(&ids[..2], &Action::Skip, "somebody").await.unwrap();

    let instances = overview.instances().await.unwrap();
    let told: Vec<_> = instances.iter().map(|i| (i.instance.as_str(), i.lease_left_ms > 0, i.owned)).collect();
    assert_eq!(told, [("gone", false, 1), ("here", true, T::HOUSES as i64 - 1)]);
    assert_eq!((instances[1].houses.as_deref(), instances[1].run_houses.as_deref()), (None, Some("0")));
    assert!(instances[1].started_ms > 1_600_000_000_000);

    let houses = overview.lag().await.unwrap();
    assert_eq!(houses.len(), T::HOUSES);
    assert_eq!((houses[0].owner.as_deref(), houses[0].alive, houses[0].epoch), (Some("gone"), false, 1));
    assert!(houses[1..].iter().all(|h| h.alive && h.owner.as_deref() == Some("here")), "{houses:?}");
    assert_eq!(houses.iter().map(|h| h.failed).sum::<i64>(), 2);
    let pending = format!("SELECT CAST(house AS {}) FROM {{pending}} WHERE status <> 'FAILED'", T::BIGINT);
    let pending = db.ints(&pending).await;
    for house in &houses {
        let expected = pending.iter().filter(|h| **h == Some(house.house.into())).count() as i64;
        assert_eq!((house.pending, house.oldest_ms.is_some()), (expected, expected > 0), "{house:?}");
        assert!(house.oldest_ms.is_none_or(|ms| (0..600_000).contains(&ms)), "{house:?}");
    }
}
