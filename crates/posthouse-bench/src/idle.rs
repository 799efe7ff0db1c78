//! What a relay costs that has nothing to do.

use std::time::Duration;

use posthouse::{Outbox, Relay, Route};

use crate::IdleArgs;
use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::drain::Null;
use crate::meter::Meter;
use crate::report::{Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
A relay with default settings and an empty outbox, for a while: transactions (MySQL: statements) per second that the server has
counted, whoever made them, so nothing else should use it; the bytes of its log; and the CPU time of this process.";

pub(crate) async fn run(kind: Kind, args: &IdleArgs, report: &mut Report) {
    match kind {
        Kind::Postgres => measure::<sqlx::Postgres>(args, report).await,
        Kind::Mysql => measure::<sqlx::MySql>(args, report).await,
        Kind::Sqlite => measure::<sqlx::Sqlite>(args, report).await,
    }
}

/// Waits until the server has done what new tables make it do, and what measurements before this one did.
async fn quiet<DB: Rig>(outbox: &Outbox<DB>) {
    let mut still = 0;
    for _ in 0..60 {
        let before = (DB::statements_seen(outbox).await, DB::wal(outbox).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = (DB::statements_seen(outbox).await, DB::wal(outbox).await);
        let more = |before: Option<i64>, after: Option<i64>| after.unwrap_or(0) - before.unwrap_or(0);
        // A server counts what asks it, too.
        still = if more(before.0, after.0) <= 3 && more(before.1, after.1) <= 1_000 { still + 1 } else { 0 };
        if still == 5 {
            return;
        }
    }
    eprintln!("{}: the server has something to do even so", DB::KIND.name());
}

async fn measure<DB: Rig>(args: &IdleArgs, report: &mut Report) {
    let outbox = DB::fresh(CONNECTIONS).await;
    quiet(&outbox).await;
    for instances in [0_u32, 1, 4] {
        let mut relays = Vec::new();
        for _ in 0..instances {
            let relay = Relay::builder(&outbox).transport("null", Null).route("bench", Route::to("null:")).start().await;
            relays.push(must("relay", relay));
        }
        // Shares settle first.
        tokio::time::sleep(Duration::from_secs(args.seconds.into()) / 2).await;
        let (before, wal) = (DB::statements_seen(&outbox).await, DB::wal(&outbox).await);
        let meter = Meter::start(None);
        tokio::time::sleep(Duration::from_secs(args.seconds.into())).await;
        let spent = meter.stop();
        let after = DB::statements_seen(&outbox).await;
        let mut figures = vec![Figure { name: "cpu_percent", title: "CPU %", value: spent.cpu * 100.0 / spent.time }];
        if let (Some(before), Some(after)) = (before, after) {
            let per_second = (after - before) as f64 / spent.time;
            figures.push(Figure { name: "statements_per_second", title: "statements/s", value: per_second });
        }
        if let (Some(before), Some(after)) = (wal, DB::wal(&outbox).await) {
            let per_second = (after - before) as f64 / spent.time;
            figures.push(Figure { name: "wal_bytes_per_second", title: "WAL B/s", value: per_second });
        }
        for relay in relays {
            relay.shutdown(Duration::from_secs(10)).await;
        }
        let what = match instances {
            0 => "idle, no relay".to_owned(),
            1 => "idle, 1 instance".to_owned(),
            n => format!("idle, {n} instances"),
        };
        report.add(Row { database: DB::KIND.name(), what, unit: "", compared: None, figures });
    }
    DB::remove(outbox).await;
}
