//! Order of a key, back-off, limits of attempts, destinations that are down.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthouse::transport::Delivery;
use posthouse::{OnExhausted, Retry};

use super::{Answers, add, count, jobs, mapping, on_both, once, own, relay};
use crate::relay::Log;
use crate::support::{SOON, TestDb, wait_for};

on_both!(
    rows_of_a_key_go_in_order_and_wait_for_one_that_fails,
    a_row_that_is_given_up_blocks_or_is_skipped,
    attempts_wait_longer_and_longer_and_end,
    a_destination_that_is_down_holds_up_no_other
);

async fn rows_of_a_key_go_in_order_and_wait_for_one_that_fails<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    let rows: Vec<(String, String)> = (0..30).map(|n| (format!("{n:03}"), format!("k{}", n % 6))).collect();
    let rows: Vec<(&str, &str, &str)> = rows.iter().map(|(id, key)| (id.as_str(), key.as_str(), id.as_str())).collect();
    add::<T>(&outbox, &table, &rows).await;
    let log = Log::default();
    let failed = Arc::new(Mutex::new(std::collections::HashSet::new()));
    let answers = {
        let (log, failed) = (log.clone(), failed.clone());
        Answers(move |d: Delivery| {
            let id = d.message().message_id.to_string();
            // Each third one fails at first.
            let fails = id.parse::<u32>().unwrap().is_multiple_of(3) && failed.lock().unwrap().insert(id);
            if !fails {
                log.add(&d);
            }
            async move { if fails { d.retry("not yet", None) } else { d.delivered() } }
        })
    };
    let mut it = mapping();
    it.key = Some("grp".into());
    it.destination = Some("test:all".into());
    // Two at once: neither may overtake the other.
    let (one, two) = (
        relay::<T>(&outbox, &it, answers.clone()).start().await.unwrap(),
        relay::<T>(&outbox, &it, answers).start().await.unwrap(),
    );
    wait_for("every row", SOON, async || count::<T>(&outbox, &table, "state = 2").await == 30).await;
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (30, 30, 0));
    one.shutdown(Duration::from_secs(5)).await;
    two.shutdown(Duration::from_secs(5)).await;
}

async fn a_row_that_is_given_up_blocks_or_is_skipped<T: TestDb>() {
    for skip in [false, true] {
        let outbox = T::fresh().await;
        let table = jobs::<T>(&outbox).await;
        add::<T>(&outbox, &table, &[("1", "k", "bad"), ("2", "k", "good")]).await;
        let mut it = mapping();
        it.key = Some("grp".into());
        it.destination = Some("test:all".into());
        if skip {
            it.on_exhausted = OnExhausted::Skip;
        }
        let answers =
            Answers(|d: Delivery| async move { if d.message().payload == b"bad" { d.rejected("never") } else { d.delivered() } });
        let relay = relay::<T>(&outbox, &it, answers).continuous(false).start().await.unwrap();
        once(&relay).await;
        let outcome = once(&relay).await;
        assert_eq!(outcome.counts.delivered, u64::from(skip), "{outcome:?}");
        assert_eq!(count::<T>(&outbox, &table, "id = '1' AND state = 3").await, 1);
        // Set back by its owner, it is first again.
        T::execute(outbox.pool(), format!("UPDATE {table} SET state = 0, body = 'mended' WHERE id = '1'")).await;
        let outcome = once(&relay).await;
        assert_eq!(outcome.counts.delivered, if skip { 1 } else { 2 }, "{outcome:?}");
        assert_eq!(count::<T>(&outbox, &table, "state = 2").await, 2);
        relay.shutdown(Duration::from_secs(5)).await;
    }
}

async fn attempts_wait_longer_and_longer_and_end<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    add::<T>(&outbox, &table, &[("1", "a", "x")]).await;
    T::execute(outbox.pool(), format!("ALTER TABLE {table} ADD COLUMN tries int; ALTER TABLE {table} ADD COLUMN most int; \
        ALTER TABLE {table} ADD COLUMN err varchar(12); ALTER TABLE {table} ADD COLUMN due timestamp NULL; UPDATE {table} SET most = 2")).await;
    let at = Arc::new(Mutex::new(Vec::new()));
    let answers = {
        let at = at.clone();
        Answers(move |d: Delivery| {
            at.lock().unwrap().push((Instant::now(), d.message().attempt));
            async move { d.retry("a reason that is longer than its column 😀", None) }
        })
    };
    // Kept in Posthouse's own table.
    let mut it = mapping();
    it.retry = Some(Retry::new(3, Duration::from_millis(200), Duration::from_secs(2)));
    let relay = relay::<T>(&outbox, &it, answers.clone()).start().await.unwrap();
    wait_for("it to be given up", SOON, async || count::<T>(&outbox, &table, "state = 3").await == 1).await;
    let seen = std::mem::take(&mut *at.lock().unwrap());
    assert_eq!(seen.iter().map(|(_, attempt)| *attempt).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(
        seen[1].0 - seen[0].0 >= Duration::from_millis(100) && seen[2].0 - seen[1].0 >= Duration::from_millis(200),
        "{seen:?}"
    );
    assert_eq!(own::<T>(&outbox, "attempts = 3 AND claims = 0 AND last_error LIKE 'a reason%'").await, 1);
    relay.shutdown(Duration::from_secs(5)).await;

    // Kept in the owner's columns, with the row's own limit.
    T::execute(outbox.pool(), format!("UPDATE {table} SET state = 0")).await;
    it.attempts = Some("tries".into());
    it.max_attempts = Some("most".into());
    it.error = Some("err".into());
    it.next_attempt = Some("due".into());
    let relay = super::relay::<T>(&outbox, &it, answers).continuous(false).start().await.unwrap();
    assert_eq!(once(&relay).await.counts.retried, 1);
    assert_eq!(count::<T>(&outbox, &table, "state = 0 AND tries = 1 AND err = 'a reason tha' AND due IS NOT NULL").await, 1);
    assert_eq!(own::<T>(&outbox, "1 = 1").await, 0, "what the owner has columns for is kept nowhere else");
    T::execute(outbox.pool(), format!("UPDATE {table} SET due = CURRENT_TIMESTAMP + INTERVAL '1' HOUR")).await;
    assert_eq!(once(&relay).await.counts.messages, 0, "not due");
    T::execute(outbox.pool(), format!("UPDATE {table} SET due = CURRENT_TIMESTAMP - INTERVAL '1' HOUR")).await;
    assert_eq!(once(&relay).await.counts.failed, 1);
    assert_eq!(count::<T>(&outbox, &table, "state = 3 AND tries = 2").await, 1);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_destination_that_is_down_holds_up_no_other<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    let ids: Vec<String> = (0..200).map(|n| format!("{n:04}")).collect();
    let mut rows: Vec<(&str, &str, &str)> = ids.iter().map(|id| (id.as_str(), "down", "x")).collect();
    rows.push(("9999", "up", "x"));
    add::<T>(&outbox, &table, &rows).await;
    let (up, tried) = (Arc::new(AtomicBool::new(false)), Log::default());
    let answers = {
        let (up, tried) = (up.clone(), tried.clone());
        Answers(move |d: Delivery| {
            let good = d.address() == "up" || up.load(Relaxed);
            tried.add(&d);
            async move { if good { d.delivered() } else { d.unavailable("closed") } }
        })
    };
    let relay = relay::<T>(&outbox, &mapping(), answers).start().await.unwrap();
    wait_for("the other destination's row", SOON, async || count::<T>(&outbox, &table, "state = 2 AND grp = 'up'").await == 1)
        .await;
    wait_for("a probe", SOON, async || tried.len() > 33).await;
    assert_eq!(own::<T>(&outbox, "attempts > 0").await, 0, "no attempt is counted");
    assert!(tried.len() < 50, "{} tries", tried.len());
    up.store(true, Relaxed);
    wait_for("all rows", SOON, async || count::<T>(&outbox, &table, "state = 2").await == 201).await;
    relay.shutdown(Duration::from_secs(5)).await;
    assert_eq!(own::<T>(&outbox, "1 = 1").await, 0);
}
