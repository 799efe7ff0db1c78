//! What the servers do at most, without Posthouse: the yardstick of everything else.

use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Instant;

use futures_util::future::join_all;
use posthouse::transport::Transport;

use crate::LimitsArgs;
use crate::database::{Kind, Rig, must};
use crate::drain::fill;
use crate::publish::make_orders;
use crate::receiver::{Http, Kafka, Load, Nats, RabbitMq, Receiver, To, named};
use crate::report::{Figure, Report, Row, spread};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
The raw speed of databases and receivers, without Posthouse:

  transactions      transactions of one inserted row each, on 1 and on 8 connections
  read and delete   one connection that reads and deletes pending messages, 2 000 at a time
  publish           the receiver's own client library, as many messages in flight as the transport has, until all are confirmed

A row has the median of the rounds, and the slowest and the fastest.";

/// Connections of the busy row.
const BUSY: u32 = 8;

/// What the raw loop reads at a time, as much as a relay.
const BATCH: usize = 2_000;

pub(crate) async fn databases(kind: Kind, args: &LimitsArgs, rounds: usize, report: &mut Report) {
    match kind {
        Kind::Postgres => database::<sqlx::Postgres>(args, rounds, report).await,
        Kind::Mysql => database::<sqlx::MySql>(args, rounds, report).await,
        Kind::Sqlite => database::<sqlx::Sqlite>(args, rounds, report).await,
    }
}

/// Those whose servers are named.
pub(crate) async fn receivers(args: &LimitsArgs, rounds: usize, report: &mut Report) {
    for to in named(args.to, report) {
        match to {
            To::Rabbitmq => receiver::<RabbitMq>(args, rounds, report).await,
            To::Kafka => receiver::<Kafka>(args, rounds, report).await,
            To::Nats => receiver::<Nats>(args, rounds, report).await,
            To::Http => receiver::<Http>(args, rounds, report).await,
        }
    }
}

async fn database<DB: Rig>(args: &LimitsArgs, rounds: usize, report: &mut Report) {
    let outbox = DB::fresh(BUSY).await;
    make_orders(&outbox).await;
    let order = AtomicI64::new(0);
    for connections in [1, BUSY] {
        let each = args.transactions / connections;
        let mut rates = Vec::new();
        for _ in 0..rounds {
            let task = async || {
                for _ in 0..each {
                    let mut tx = must("begin", outbox.begin().await);
                    must("insert", DB::business(&outbox, &mut tx, order.fetch_add(1, Relaxed), None).await);
                    must("commit", tx.commit().await);
                }
            };
            let started = Instant::now();
            join_all((0..connections).map(|_| task())).await;
            rates.push(f64::from(each * connections) / started.elapsed().as_secs_f64());
        }
        let s = if connections == 1 { "" } else { "s" };
        report.add(row(DB::KIND.name(), format!("transactions, {connections} connection{s}"), "per second", rates));
    }
    let mut rates = Vec::new();
    for _ in 0..rounds {
        fill(&outbox, args.n, args.payload, None).await;
        let started = Instant::now();
        let drained = must("raw drain", DB::raw_drain(&outbox, BATCH).await);
        assert_eq!(drained, args.n, "the raw loop drains what was published");
        rates.push(args.n as f64 / started.elapsed().as_secs_f64());
    }
    report.add(row(DB::KIND.name(), "read and delete".into(), "messages/s", rates));
    DB::remove(outbox).await;
}

async fn receiver<R: Receiver>(args: &LimitsArgs, rounds: usize, report: &mut Report) {
    let mut receiver = R::prepare().await;
    let in_flight = receiver.transport().concurrency() as usize;
    let mut rates = Vec::new();
    for _ in 0..rounds {
        let load = Load::new(args.n.min(R::MESSAGES), args.payload, None, in_flight);
        rates.push(load.n as f64 / receiver.publish(&load).await.time);
        receiver.clear().await;
    }
    receiver.remove().await;
    report.add(row(R::SCHEME, format!("publish to {}", R::NAME), "messages/s", rates));
}

fn row(server: &'static str, what: String, unit: &'static str, rates: Vec<f64>) -> Row {
    let (median, min, max) = spread(rates);
    let figures = vec![
        Figure { name: "rate", title: "median", value: median },
        Figure { name: "rate_min", title: "slowest", value: min },
        Figure { name: "rate_max", title: "fastest", value: max },
    ];
    Row { database: server, what, unit, compared: None, figures }
}
