//! Relays that die, leases that run out, receivers that are slow, databases that go away.

use std::time::Duration;

use posthouse::transport::Delivery;
use posthouse::{Route, RunEnd};

use super::{Answers, add, count, jobs, mapping, on_both, once, own, relay, scanned};
use crate::relay::{Log, Recorder};
use crate::support::{SOON, TestDb, wait_for};

on_both!(
    a_relay_that_dies_before_its_write_back_loses_nothing,
    a_row_that_kills_its_process_ends_failed_and_takes_no_other_along,
    claims_are_renewed_while_a_slow_receiver_answers,
    shutdown_gives_back_what_was_not_sent,
    an_outcome_is_not_written_over_somebody_elses_claim,
    a_row_that_cannot_be_marked_holds_up_no_other
);

/// Never answers; the process dies first.
fn silent(log: &Log) -> Answers<impl Fn(Delivery) -> std::future::Pending<()> + Clone + Send + Sync + 'static> {
    let log = log.clone();
    Answers(move |d: Delivery| {
        log.add(&d);
        std::mem::forget(d);
        std::future::pending()
    })
}

async fn a_relay_that_dies_before_its_write_back_loses_nothing<T: TestDb>() {
    let dies = async |sending: bool| {
        let outbox = T::fresh().await;
        let table = jobs::<T>(&outbox).await;
        add::<T>(&outbox, &table, &[("1", "a", "x"), ("2", "a", "x"), ("3", "a", "x")]).await;
        let mut it = mapping();
        if !sending {
            it.state.sending = None;
        }
        let log = Log::default();
        let dying = relay::<T>(&outbox, &it, silent(&log)).start().await.unwrap();
        log.wait_len(3).await;
        drop(dying);
        assert_eq!(own::<T>(&outbox, "owner IS NOT NULL").await, 3);
        assert_eq!(count::<T>(&outbox, &table, "state = 1").await, if sending { 3 } else { 0 });
        // One is finished by its owner meanwhile, and one removed.
        T::execute(outbox.pool(), format!("UPDATE {table} SET state = 2 WHERE id = '2'; DELETE FROM {table} WHERE id = '3'"))
            .await;
        let (early, outcome) = scanned::<T>(&outbox, &it).await;
        assert_eq!((early.len(), outcome.counts.messages), (0, 0), "the lease has not run out");
        let second = Log::default();
        let living = relay::<T>(&outbox, &it, Recorder(second.clone())).start().await.unwrap();
        wait_for("the row to be sent again", SOON, async || count::<T>(&outbox, &table, "state = 2").await == 2).await;
        assert_eq!((second.len(), second.distinct()), (1, 1));
        // Where the claims stand only in Posthouse's own table, those of rows that are done go with the lease.
        wait_for("what was left to be cleared", SOON, async || own::<T>(&outbox, "1 = 1").await == 0).await;
        living.shutdown(Duration::from_secs(5)).await;
    };
    tokio::join!(dies(true), dies(false));
}

async fn a_row_that_kills_its_process_ends_failed_and_takes_no_other_along<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    add::<T>(&outbox, &table, &[("1", "a", "good"), ("2", "a", "deadly"), ("3", "a", "good")]).await;
    let it = mapping();
    let expire = format!("UPDATE {} SET next_attempt_at = '2001-01-01 00:00:00'", outbox.tables().name("adopted"));
    for death in 1..=3 {
        let log = Log::default();
        // The first process dies with all of them under way, the next ones at the deadly one.
        let answers = {
            let log = log.clone();
            Answers(move |d: Delivery| {
                log.add(&d);
                let deadly = death == 1 || d.message().payload == b"deadly";
                async move {
                    if !deadly {
                        // Long enough to be under way when the other one kills the process, if it were sent beside it.
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        return d.delivered();
                    }
                    std::mem::forget(d);
                    std::future::pending().await
                }
            })
        };
        let dying = relay::<T>(&outbox, &it, answers).start().await.unwrap();
        wait_for("the deadly row", SOON, async || log.count("deadly") == 1 && (death > 1 || log.len() == 3)).await;
        drop(dying);
        assert_eq!(own::<T>(&outbox, &format!("row_id = '2' AND claims = {death}")).await, 1);
        T::execute(outbox.pool(), expire.clone()).await;
    }
    let (log, outcome) = scanned::<T>(&outbox, &it).await;
    assert_eq!((log.count("deadly"), outcome.counts.failed), (0, 1), "{outcome:?}");
    assert_eq!(count::<T>(&outbox, &table, "id = '2' AND state = 3").await, 1);
    assert_eq!(count::<T>(&outbox, &table, "state = 2").await, 2, "the others went");
    assert_eq!(own::<T>(&outbox, "row_id = '2' AND last_error LIKE '3 processes died%'").await, 1);
}

async fn claims_are_renewed_while_a_slow_receiver_answers<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    let ids: Vec<String> = (0..15).map(|n| format!("{n:02}")).collect();
    let rows: Vec<(&str, &str, &str)> = ids.iter().map(|id| (id.as_str(), "a", "x")).collect();
    add::<T>(&outbox, &table, &rows).await;
    let log = Log::default();
    let slow = {
        let log = log.clone();
        Answers(move |d: Delivery| {
            log.add(&d);
            async move {
                tokio::time::sleep(Duration::from_millis(300)).await;
                d.delivered();
            }
        })
    };
    // One at a time, for longer than a lease; all are claimed at once.
    let one =
        relay::<T>(&outbox, &mapping(), slow.clone()).route("test:a", Route::to("test:a").concurrency(1)).start().await.unwrap();
    wait_for("the claims", SOON, async || own::<T>(&outbox, "owner IS NOT NULL").await > 10).await;
    let two = relay::<T>(&outbox, &mapping(), slow).start().await.unwrap();
    wait_for("all rows", SOON, async || count::<T>(&outbox, &table, "state = 2").await == 15).await;
    assert_eq!((log.len(), log.distinct()), (15, 15), "each once");
    assert_eq!(two.stats().tables["job"].sent, 0, "the one that claimed them kept them");
    one.shutdown(Duration::from_secs(5)).await;
    two.shutdown(Duration::from_secs(5)).await;
}

async fn shutdown_gives_back_what_was_not_sent<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    let ids: Vec<String> = (0..30).map(|n| format!("{n:02}")).collect();
    let rows: Vec<(&str, &str, &str)> = ids.iter().map(|id| (id.as_str(), "a", "x")).collect();
    add::<T>(&outbox, &table, &rows).await;
    let log = Log::default();
    let slow = {
        let log = log.clone();
        Answers(move |d: Delivery| {
            log.add(&d);
            async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                d.delivered();
            }
        })
    };
    let one = relay::<T>(&outbox, &mapping(), slow).route("test:a", Route::to("test:a").concurrency(2)).start().await.unwrap();
    log.wait_len(4).await;
    one.shutdown(SOON).await;
    assert_eq!(count::<T>(&outbox, &table, "state = 2").await, log.len() as i64, "what was sent is marked");
    assert_eq!(count::<T>(&outbox, &table, "state = 0").await, 30 - log.len() as i64, "the rest is as it was");
    assert_eq!(own::<T>(&outbox, "1 = 1").await, 0);
    // And it may be stopped in the middle of a run, which tells so.
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let two = relay::<T>(&outbox, &mapping(), Recorder(log.clone())).continuous(false).start().await.unwrap();
    assert_eq!(two.run_once(Some(3), &stopped).await.end, RunEnd::Limit);
    stop.send_replace(true);
    let outcome = two.run_once(None, &stopped).await;
    assert_eq!((outcome.counts.messages, outcome.end), (0, RunEnd::Stopped));
    assert_eq!(once(&two).await.end, RunEnd::Done);
    assert_eq!((log.len(), log.distinct()), (30, 30));
}

async fn an_outcome_is_not_written_over_somebody_elses_claim<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    add::<T>(&outbox, &table, &[("1", "a", "x")]).await;
    let (log, answer) = (Log::default(), std::sync::Arc::new(tokio::sync::Notify::new()));
    let late = {
        let (log, answer) = (log.clone(), answer.clone());
        Answers(move |d: Delivery| {
            log.add(&d);
            let answer = answer.clone();
            async move {
                answer.notified().await;
                d.delivered();
            }
        })
    };
    let relay = relay::<T>(&outbox, &mapping(), late).continuous(false).start().await.unwrap();
    let (outcome, ()) = tokio::join!(once(&relay), async {
        log.wait_len(1).await;
        // As another relay does when it takes a claim that has run out.
        let own = outbox.tables().name("adopted");
        T::execute(outbox.pool(), format!("UPDATE {own} SET owner = 'another', version = version + 1")).await;
        answer.notify_one();
    });
    assert_eq!((outcome.counts.messages, outcome.counts.delivered), (1, 0), "{outcome:?}");
    assert_eq!(relay.stats().tables["job"].stale, 1);
    assert_eq!(count::<T>(&outbox, &table, "state = 1").await, 1);
    assert_eq!(own::<T>(&outbox, "owner = 'another'").await, 1);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_row_that_cannot_be_marked_holds_up_no_other<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = jobs::<T>(&outbox).await;
    add::<T>(&outbox, &table, &[("1", "a", "x"), ("2", "a", "x"), ("3", "a", "x")]).await;
    T::execute(outbox.pool(), format!("ALTER TABLE {table} ADD CONSTRAINT never CHECK (id <> '2' OR state < 2)")).await;
    let log = Log::default();
    let relay = relay::<T>(&outbox, &mapping(), Recorder(log.clone())).continuous(false).start().await.unwrap();
    assert_eq!(once(&relay).await.counts.delivered, 2);
    assert_eq!(count::<T>(&outbox, &table, "state = 2").await, 2);
    assert_eq!(own::<T>(&outbox, "row_id = '2' AND last_error LIKE 'it was sent, and that can%'").await, 1);
    assert_eq!(once(&relay).await.counts.messages, 0, "it is left alone for a while");
    assert_eq!(log.len(), 3);
    relay.shutdown(Duration::from_secs(5)).await;
}
