//! Whether a message costs as much beside many retained ones as beside few.

use std::time::Instant;

use posthouse::{Message, Outbox};
use sqlx::{AssertSqlSafe, Postgres};

use crate::GrowthArgs;
use crate::database::{CONNECTIONS, Rig, must};
use crate::drain::{fill, relayed};
use crate::publish::make_orders;
use crate::report::{Compared, Figure, Report, Row, median};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
Fills new tables with delivered messages, ten times as many from step to step, and measures at each step, with PostgreSQL:

  drain     a relay with a transport that confirms at once sends N messages
  publish   transactions with one business row and one message, one after the other

A row's limit is what the same took at the first step: the ratio must stay near 1, however much is retained.";

/// Rows per statement while the log is filled.
const CHUNK: u64 = 500_000;

/// With so many retained messages, those that a round adds to them don't count.
const MANY: u64 = 1_000_000;

/// New tables with so many retained messages.
async fn filled(retained: u64) -> Outbox<Postgres> {
    let outbox = Postgres::fresh(CONNECTIONS).await;
    make_orders(&outbox).await;
    retain(&outbox, retained).await;
    outbox
}

pub(crate) async fn run(args: &GrowthArgs, rounds: usize, report: &mut Report) {
    let mut order = 0;
    let mut first: Option<(f64, f64)> = None;
    let steps = std::iter::successors(Some(1_000_u64), |n| Some(n * 10)).take_while(|n| *n <= args.upto);
    for step in steps {
        let (mut rates, mut times, mut wals) = (Vec::new(), Vec::new(), Vec::new());
        let mut outbox = filled(step).await;
        let mut retained = step;
        for round in 0..rounds {
            if round > 0 && step < MANY {
                Postgres::remove(outbox).await;
                outbox = filled(step).await;
                retained = step;
            }
            let before = Postgres::wal(&outbox).await;
            fill(&outbox, args.n, args.payload, Some(1_000)).await;
            rates.push(relayed(&outbox, args.n).await);
            if let (Some(before), Some(after)) = (before, Postgres::wal(&outbox).await) {
                wals.push((after - before) as f64 / args.n as f64);
            }
            times.push(publish(&outbox, args, &mut order).await);
            retained += args.n as u64 + u64::from(args.transactions);
        }
        let (rate, time) = (median(&rates), median(&times));
        let (rate_first, time_first) = *first.get_or_insert((rate, time));
        let size = size(&outbox).await;
        let retained_figure = Figure { name: "retained", title: "", value: step as f64 };
        report.add(Row {
            database: "postgres",
            what: format!("drain, {step} retained"),
            unit: "messages/s",
            compared: Some(Compared::new(&rates, &vec![rate_first; rates.len()])),
            figures: vec![
                retained_figure.clone(),
                Figure { name: "wal_bytes_per_message", title: "WAL B/message", value: median(&wals) },
                Figure { name: "log_bytes_per_message", title: "log B/message", value: size / retained as f64 },
            ],
        });
        report.add(Row {
            database: "postgres",
            what: format!("publish, {step} retained"),
            unit: "µs/transaction",
            compared: Some(Compared::new(&times, &vec![time_first; times.len()])),
            figures: vec![retained_figure],
        });
        Postgres::remove(outbox).await;
    }
}

/// Delivered messages: the triggers don't fire, so that no pending row has to be deleted again.
async fn retain(outbox: &Outbox<Postgres>, n: u64) {
    let message = outbox.tables().name("message");
    let started = Instant::now();
    for from in (1..=n).step_by(CHUNK as usize) {
        let to = (from + CHUNK - 1).min(n);
        let insert = format!(
            "SET session_replication_role = replica; \
             INSERT INTO {message} (type, destination, message_key, payload) \
             SELECT 'order.placed.v1', 'bench', (g % 1000)::text, convert_to(repeat('x', 256), 'UTF8') FROM generate_series({from}, {to}) g; \
             SET session_replication_role = origin"
        );
        must("fill the log (this needs a superuser)", Postgres::execute(outbox, insert).await);
        if n >= MANY {
            eprintln!("{to} of {n} retained messages, {:.0} s", started.elapsed().as_secs_f64());
        }
    }
    // One statement each: VACUUM runs in no transaction, and several statements at once are one.
    must("analyze", Postgres::execute(outbox, format!("VACUUM ANALYZE {message}")).await);
    // What was filled in isn't written to disk while something else is measured.
    must("checkpoint", Postgres::execute(outbox, "CHECKPOINT".into()).await);
}

async fn size(outbox: &Outbox<Postgres>) -> f64 {
    let bytes = "SELECT sum(pg_total_relation_size(relid))::float8 FROM pg_partition_tree(to_regclass($1)) WHERE isleaf";
    must("size", sqlx::query_scalar(bytes).bind(outbox.tables().name("message")).fetch_one(outbox.pool()).await)
}

/// Microseconds per transaction.
async fn publish(outbox: &Outbox<Postgres>, args: &GrowthArgs, order: &mut i64) -> f64 {
    let body = vec![b'x'; args.payload];
    let started = Instant::now();
    for _ in 0..args.transactions {
        *order += 1;
        let mut tx = must("begin", outbox.begin().await);
        must("order", Postgres::business(outbox, &mut tx, *order, None).await);
        must("publish", tx.publish(Message::to("bench").payload(body.clone())).await);
        must("commit", tx.commit().await);
    }
    let time = started.elapsed().as_secs_f64() * 1e6 / f64::from(args.transactions);
    // They are delivered by nobody.
    let pending = outbox.tables().name("pending");
    must("forget", sqlx::raw_sql(AssertSqlSafe(format!("DELETE FROM {pending}"))).execute(outbox.pool()).await);
    time
}
