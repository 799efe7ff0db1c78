//! Several relays on the same tables, and the application beside them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::transport::Delivery;
use posthouse::{Adopted, AdoptedPreset, StateCode};
use sqlx::AssertSqlSafe;

use super::layouts::user_strategy_export;
use super::{Answers, count, jobs, mapping, on_both, own, relay};
use crate::relay::{Log, Recorder};
use crate::support::{MySql, SOON, TestDb, bounded, scale, wait_for};

on_both!(four_relays_send_each_row_once);

async fn four_relays_send_each_row_once<T: TestDb>() {
    let outbox = T::fresh().await;
    let rows = 100 * scale();
    let log = Log::default();
    let answers = {
        let log = log.clone();
        Answers(move |d: Delivery| {
            log.add(&d);
            async move {
                // So long that others come across rows that are being sent.
                tokio::time::sleep(Duration::from_millis(20)).await;
                d.delivered();
            }
        })
    };
    for n in 1..=8 {
        let table = super::beside::<T>(&outbox, &format!("job_{n:03}"));
        let values: Vec<String> = (0..rows).map(|row| format!("('{n}-{row:05}', 'g{}', 'x', 0)", row % 7)).collect();
        T::execute(
            outbox.pool(),
            format!(
                "CREATE TABLE {table} (id varchar(40) PRIMARY KEY, grp varchar(40), body varchar(200), state int); \
                 CREATE INDEX job_state_{n} ON {table} (state, id); INSERT INTO {table} (id, grp, body, state) VALUES {}",
                values.join(", ")
            ),
        )
        .await;
    }
    for sending in [true, false] {
        let mut it = mapping();
        it.table = "job_*".into();
        it.batch = Some(20);
        if !sending {
            it.state.sending = None;
            it.state.sent = Some(StateCode::Number(7));
            it.state.pending = Some(vec![StateCode::Number(2)]);
        }
        let done = if sending { "state = 2" } else { "state = 7" };
        let starting = (0..4).map(|_| relay::<T>(&outbox, &it, answers.clone()).start());
        let relays: Vec<_> = futures_util::future::join_all(starting).await.into_iter().map(Result::unwrap).collect();
        wait_for("all rows", SOON * scale() as u32, async || {
            let mut left = 0;
            for n in 1..=8 {
                left += count::<T>(&outbox, &super::beside::<T>(&outbox, &format!("job_{n:03}")), &format!("NOT {done}")).await;
            }
            left == 0
        })
        .await;
        let all = rows * 8 * if sending { 1 } else { 2 };
        assert_eq!((log.len(), log.distinct()), (all, rows * 8), "each once, without a fault");
        let stale: u64 = relays.iter().flat_map(|r| r.stats().tables.into_values()).map(|t| t.stale).sum();
        assert_eq!(stale, 0);
        for relay in relays {
            relay.shutdown(Duration::from_secs(5)).await;
        }
    }
    assert_eq!(own::<T>(&outbox, "1 = 1").await, 0);
}

/// What the application wrote into a row last.
type History = Arc<Mutex<HashMap<i64, (i64, i64)>>>;

/// The application writes new content and sets rows back to pending, all the time, guarded by nothing but their locks, and
/// notes what it wrote. When it is done, each row must have been delivered with what was written last, and every value that the
/// application alone writes must be there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_applications_update_is_never_overwritten() {
    for (sending, version) in [(true, true), (true, false), (false, true), (false, false)] {
        bounded(never_overwritten(sending, version)).await;
    }
}

async fn never_overwritten(sending: bool, version: bool) {
    const ROWS: i64 = 12;
    let outbox = MySql::fresh().await;
    let table = jobs::<MySql>(&outbox).await;
    let rows: Vec<String> = (0..ROWS).map(|n| format!("('{n:02}', 'a', '0', 0, '0', 0)")).collect();
    MySql::execute(
        outbox.pool(),
        format!("ALTER TABLE {table} ADD COLUMN version int NOT NULL; INSERT INTO {table} (id, grp, body, state, note, version) VALUES {}", rows.join(", ")),
    )
    .await;
    let mut it = mapping();
    it.version = version.then(|| "version".into());
    if !sending {
        it.state.sending = None;
    }
    let delivered: Arc<Mutex<HashMap<i64, i64>>> = Arc::default();
    let answers = {
        let delivered = delivered.clone();
        Answers(move |d: Delivery| {
            let number = |text: &[u8]| String::from_utf8_lossy(text).parse::<i64>().unwrap();
            let (row, body) = (number(d.message().message_id.as_str().as_bytes()), number(&d.message().payload));
            delivered.lock().unwrap().insert(row, body);
            async move {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(0..8))).await;
                d.delivered();
            }
        })
    };
    it.interval = Some(Duration::from_millis(10));
    let relays = [
        relay::<MySql>(&outbox, &it, answers.clone()).start().await.unwrap(),
        relay::<MySql>(&outbox, &it, answers).start().await.unwrap(),
    ];

    let history: History = Arc::default();
    let over = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..2i64)
        .map(|writer| {
            let (history, over, pool, table) = (history.clone(), over.clone(), outbox.pool().clone(), table.clone());
            tokio::spawn(async move {
                let mut n = 0;
                while !over.load(Relaxed) {
                    n += 1;
                    // Each writer has rows of its own, so that it knows what is there.
                    let row = fastrand::i64(0..ROWS / 2) * 2 + writer;
                    let set = match fastrand::u8(..3) {
                        // Content only: a row that is sent stays sent, and one that isn't is sent with it.
                        0 => format!("note = '{n}'"),
                        _ => format!("note = '{n}', body = '{n}', state = 0"),
                    };
                    let sql = format!("UPDATE {table} SET {set}, version = version + 1 WHERE id = '{row:02}'");
                    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await.expect("the application is never in the relay's way");
                    {
                        let mut history = history.lock().unwrap();
                        let last = history.entry(row).or_default();
                        last.0 = n;
                        if set.contains("body") {
                            last.1 = n;
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..4))).await;
                }
            })
        })
        .collect();
    let stale = || relays.iter().flat_map(|r| r.stats().tables.into_values()).map(|t| t.stale).sum::<u64>();
    wait_for("outcomes that met a change", SOON, async || stale() >= 20).await;
    over.store(true, Relaxed);
    for writer in writers {
        writer.await.unwrap();
    }
    wait_for("all rows", SOON, async || count::<MySql>(&outbox, &table, "state = 2").await == ROWS).await;
    for relay in relays {
        relay.shutdown(Duration::from_secs(5)).await;
    }
    let history = history.lock().unwrap().clone();
    for (row, (note, body)) in history {
        let there = format!("id = '{row:02}' AND note = '{note}' AND body = '{body}'");
        assert_eq!(count::<MySql>(&outbox, &table, &there).await, 1, "{there} (sending {sending}, version {version})");
        let last = delivered.lock().unwrap().get(&row).copied();
        assert_eq!(
            last,
            Some(body),
            "row {row}: marked as sent, and what was written last was not (sending {sending}, version {version})"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_applications_locks_are_not_waited_for() {
    bounded(async {
        let outbox = MySql::fresh().await;
        MySql::execute(outbox.pool(), user_strategy_export("user_strategy_export_000")).await;
        let rows: Vec<String> = (0..20).map(|n| format!("('uuid-{n:02}', NULL, NOW() - INTERVAL 1 HOUR)")).collect();
        let insert = format!("INSERT INTO user_strategy_export_000 (uuid, mq_state, create_time) VALUES {}", rows.join(", "));
        MySql::execute(outbox.pool(), insert).await;
        let mut it = Adopted::preset(AdoptedPreset::MqState);
        it.lease = Some(Duration::from_secs(3));
        it.interval = Some(Duration::from_millis(20));
        let mut tx = outbox.pool().begin().await.unwrap();
        MySql::execute_in(&mut tx, "UPDATE user_strategy_export_000 SET award_name = 'mine' WHERE uuid = 'uuid-03'".into()).await;
        let log = Log::default();
        let relay = relay::<MySql>(&outbox, &it, Recorder(log.clone())).start().await.unwrap();
        let sent = async || count::<MySql>(&outbox, "user_strategy_export_000", "mq_state = 1").await;
        wait_for("the others", SOON, async || sent().await == 19).await;
        tx.commit().await.unwrap();
        wait_for("the row that was locked", SOON, async || sent().await == 20).await;
        assert_eq!((log.len(), log.distinct()), (20, 20));
        assert_eq!(log.seen().iter().filter(|s| String::from_utf8_lossy(&s.payload).contains("\"mine\"")).count(), 1);
        relay.shutdown(Duration::from_secs(5)).await;
    })
    .await;
}

/// The application sends rows itself, beside the relays: those are left alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_the_application_sends_itself_are_left_alone() {
    bounded(async {
        const ROWS: i64 = 400;
        let outbox = MySql::fresh().await;
        let table = jobs::<MySql>(&outbox).await;
        let rows: Vec<String> = (0..ROWS).map(|n| format!("('{n:03}', 'a', 'x', 0)")).collect();
        MySql::execute(outbox.pool(), format!("INSERT INTO {table} (id, grp, body, state) VALUES {}", rows.join(", "))).await;
        let mut it = mapping();
        it.batch = Some(20);
        it.concurrency = Some(20);
        let log = Log::default();
        let answers = {
            let log = log.clone();
            Answers(move |d: Delivery| {
                log.add(&d);
                async move {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    d.delivered();
                }
            })
        };
        let relay = relay::<MySql>(&outbox, &it, answers).start().await.unwrap();
        log.wait_len(1).await;
        let mut mine = Vec::new();
        // From behind, and through what the relay has read already.
        for id in (0..ROWS).rev().map(|n| format!("{n:03}")) {
            let take = format!("UPDATE {table} SET state = 1, note = 'mine' WHERE id = '{id}' AND state = 0");
            if sqlx::raw_sql(AssertSqlSafe(take)).execute(outbox.pool()).await.unwrap().rows_affected() == 1 {
                mine.push(id);
            }
        }
        wait_for("the others", SOON, async || count::<MySql>(&outbox, &table, "state = 2").await == ROWS - mine.len() as i64)
            .await;
        assert_eq!(count::<MySql>(&outbox, &table, "state = 1 AND note = 'mine'").await, mine.len() as i64);
        assert!(!mine.is_empty() && log.seen().iter().all(|s| !mine.contains(&s.message_id)));
        relay.shutdown(Duration::from_secs(5)).await;
    })
    .await;
}
