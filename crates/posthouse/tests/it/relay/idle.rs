//! An idle relay costs next to nothing, and a busy one reads by index.

use std::time::Duration;

use posthouse::{Message, Relay};

use super::{Log, Recorder, quick};
use crate::support::{Postgres, SOON, TestDb, scale, wait_for};

/// About one read-only statement per second and one lease write per renewal period; no other write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_costs_one_read_a_second_and_one_write_a_heartbeat() {
    let outbox = Postgres::fresh().await;
    let log = Log::default();
    let mut settings = quick();
    settings.lease = Duration::from_secs(20);
    settings.heartbeat = Duration::from_secs(2);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", Recorder(log.clone())).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a")).await.unwrap();
    relay.drain_once().await;
    let schema = outbox.tables().schema().expect("a schema").to_owned();
    let writes = async || {
        Postgres::number(
            outbox.pool(),
            format!(
                "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint FROM pg_stat_user_tables WHERE schemaname = '{schema}'"
            ),
        )
        .await
    };
    // One scan of posthouse_meta per forward read: the change counter.
    let reads = async || {
        Postgres::number(
            outbox.pool(),
            format!("SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname = 'posthouse_meta'"),
        )
        .await
    };
    // Statistics arrive late; wait until they stand still but for the heartbeat.
    let mut last = (-1, -1);
    wait_for("quiet", SOON, async || {
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        let now = (writes().await, reads().await);
        let quiet = now.0 - last.0 <= 1 && now.1 - last.1 <= 3;
        last = now;
        quiet
    })
    .await;
    let (w, r) = (writes().await, reads().await);
    tokio::time::sleep(Duration::from_secs(8)).await;
    let (w, r) = (writes().await - w, reads().await - r);
    assert!((2..=6).contains(&w), "{w} writes in 8 s, 4 heartbeats were due");
    assert!((4..=16).contains(&r), "{r} forward reads in 8 s, 8 were due");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// D5, scaled: with many delivered rows no statement of a working relay reads a table from end to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_never_scans_the_log_or_the_pending_set() {
    let outbox = Postgres::fresh().await;
    let (message, pending) = (outbox.tables().name("message"), outbox.tables().name("pending"));
    let n = 100_000 * scale();
    Postgres::execute(
        outbox.pool(),
        format!(
            "INSERT INTO {message} (destination, payload) SELECT 'test:a', 'x' FROM generate_series(1, {n}); DELETE FROM {pending}; \
             INSERT INTO {message} (destination, message_key, payload, deliver_at) \
             SELECT CASE WHEN i % 2 = 0 THEN 'test:a' ELSE 'test:b' END, CASE WHEN i % 3 > 0 THEN (i % 50)::text END, 'x', \
                    CASE WHEN i % 3 = 0 AND i % 2 = 0 THEN now() END FROM generate_series(1, 1000) i; \
             ANALYZE {message}; ANALYZE {pending}"
        ),
    )
    .await;
    let schema = outbox.tables().schema().expect("a schema").to_owned();
    let scans = async || {
        Postgres::number(
            outbox.pool(),
            format!(
                "SELECT sum(seq_tup_read)::bigint FROM pg_stat_user_tables WHERE schemaname = '{schema}' AND relname ~ '^posthouse_(message|pending|receipt|attempt|audit)'"
            ),
        )
        .await
    };
    let before = scans().await;
    let log = Log::default();
    let l = log.clone();
    let flaky = posthouse::transport::from_fn(move |d: posthouse::transport::Delivery| {
        let first = d.message().attempt == 1 && d.message().id % 5 == 0;
        if !first {
            l.add(&d);
        }
        async move { if first { d.retry("once", None) } else { d.delivered() } }
    });
    let mut settings = quick();
    settings.full_sweep = Duration::from_millis(200);
    settings.near_sweep = Duration::from_millis(50);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", flaky).start().await.unwrap();
    log.wait_len(1_000).await;
    wait_for("full sweeps", SOON, async || relay.stats().full_sweep.is_some()).await;
    wait_for("completion", SOON, async || crate::support::pending::<Postgres>(&outbox).await == 0).await;
    relay.shutdown(Duration::from_secs(5)).await;
    // The backends that shut down have reported their statistics. Only our own count(*) of pending reads all of it.
    let after = scans().await;
    assert!(after - before < 50_000, "{} rows read by sequential scans", after - before);
}
