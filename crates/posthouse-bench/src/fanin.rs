//! How several instances share one outbox.

use std::time::Instant;

use futures_util::future::join_all;
use posthouse::transport::{Delivery, Transport};
use posthouse::{Relay, Route};
use tokio::sync::watch;

use crate::FaninArgs;
use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::drain::fill;
use crate::report::{Compared, Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
1, 2, 4 and 8 instances of a relay, all in this process, send the same N messages to a transport that confirms at once. First
they share the houses out among them, and the outbox is filled while the transport holds everything back; the clock starts when
it lets go.

A row's limit is what one instance does. With as few cores as a small machine has, more instances can't be faster: what counts
is that they aren't slower.";

/// Confirms everything at once, as soon as it may.
#[derive(Debug)]
struct Gate(watch::Receiver<bool>);

impl Transport for Gate {
    fn send(&self, batch: Vec<Delivery>) -> futures_util::future::BoxFuture<'_, ()> {
        let mut open = self.0.clone();
        Box::pin(async move {
            // Gone only at the end of the run.
            let _ = open.wait_for(|open| *open).await;
            batch.into_iter().for_each(Delivery::delivered);
        })
    }
}

pub(crate) async fn run(kind: Kind, args: &FaninArgs, rounds: usize, report: &mut Report) {
    match kind {
        Kind::Postgres => measure::<sqlx::Postgres>(args, rounds, report).await,
        Kind::Mysql => measure::<sqlx::MySql>(args, rounds, report).await,
        Kind::Sqlite => report.skip("sqlite: one instance owns all houses of a file".into()),
    }
}

async fn measure<DB: Rig>(args: &FaninArgs, rounds: usize, report: &mut Report) {
    let mut alone = Vec::new();
    for instances in [1_u32, 2, 4, 8] {
        let outbox = DB::fresh(CONNECTIONS).await;
        let mut rates = Vec::new();
        let mut least = f64::NAN;
        for _ in 0..rounds {
            let (open, gate) = watch::channel(false);
            let start = || {
                let builder = Relay::builder(&outbox).transport("gate", Gate(gate.clone()));
                builder.route("bench", Route::to("gate:").concurrency(4_000)).start()
            };
            let mut relays = Vec::new();
            for _ in 0..instances {
                relays.push(must("relay", start().await));
            }
            // Each has its share: no house changes hands while it is measured.
            let share = |relay: &Relay| relay.stats().houses;
            let until = Instant::now() + std::time::Duration::from_secs(60);
            let all: u32 = loop {
                let shares: Vec<u32> = relays.iter().map(share).collect();
                let (min, max) = (shares.iter().min().copied().unwrap_or(0), shares.iter().max().copied().unwrap_or(0));
                if min > 0 && max - min <= 1 {
                    break shares.iter().sum();
                }
                if Instant::now() > until {
                    must::<(), _>("shares", Err(format!("after a minute the instances own {shares:?}")));
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            };
            least = f64::from(all / instances);
            fill(&outbox, args.n, args.payload, Some(1_000)).await;
            let started = Instant::now();
            open.send_replace(true);
            join_all(relays.iter().map(Relay::drain_once)).await;
            // An instance may be done with its houses before the others are.
            while must("count", DB::pending(&outbox).await) > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            rates.push(args.n as f64 / started.elapsed().as_secs_f64());
            join_all(relays.into_iter().map(|relay| relay.shutdown(std::time::Duration::from_secs(10)))).await;
        }
        DB::remove(outbox).await;
        if instances == 1 {
            alone.clone_from(&rates);
        }
        let s = if instances == 1 { "" } else { "s" };
        report.add(Row {
            database: DB::KIND.name(),
            what: format!("drain, {instances} instance{s}"),
            unit: "messages/s",
            compared: Some(Compared::new(&rates, &alone)),
            figures: vec![Figure { name: "houses_each", title: "houses each", value: least }],
        });
    }
}
