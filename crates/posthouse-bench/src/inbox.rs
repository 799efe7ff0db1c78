//! What an inbox costs: the same handler with and without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use clap::ValueEnum;
use futures_util::future::join_all;
use posthouse::inbox::{Handled, HandlerError, Inbox, Incoming, Source};
use posthouse::{InboxSettings, Tx};
use serde::{Deserialize, Serialize};

use crate::InboxArgs;
use crate::database::{Kind, Rig, StockTables, must};
use crate::meter::Meter;
use crate::report::{Compared, Figure, Report, Row, median};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
Received messages, handled in a process with as many connections as messages are handled at once, in three ways:

  without     the handler in a transaction of the pool's own: begin, handler, commit
  with        the handler called by an inbox: the message's id is in the same transaction
  duplicates  the inbox once more, with the ids it had just now; the handler isn't called

The handler `small` decodes a JSON payload, updates one of 1 000 articles by its primary key and inserts one row. `none` does
nothing: what is left is the inbox's own work beside an empty transaction.

The three take turns in blocks of a twentieth of a round, so that the machine's drift meets all alike. A row's limit is the rate
without the inbox, its ratio with / without: the inbox costs 1 - ratio of the throughput. Every message has a new id, and ids
are random, as they are in practice. CPU is of this process, in seconds per 1 000 messages, user and system.";

/// What is done for each message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Work {
    /// Nothing.
    None,
    /// JSON, one update, one insert.
    Small,
}

/// So many that two handlers seldom wait for one row.
const ARTICLES: u32 = 1_000;

/// Of a round.
const BLOCKS: u32 = 20;

pub(crate) async fn run(kind: Kind, args: &InboxArgs, rounds: usize, report: &mut Report) {
    match kind {
        Kind::Postgres => measure::<sqlx::Postgres>(args, rounds, report).await,
        Kind::Mysql => measure::<sqlx::MySql>(args, rounds, report).await,
        Kind::Sqlite => measure::<sqlx::Sqlite>(args, rounds, report).await,
    }
}

/// The payload.
#[derive(Debug, Serialize, Deserialize)]
struct Deduct {
    order: i64,
    sku: String,
    count: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Without,
    With,
    Duplicates,
}

/// One service that receives messages.
struct Service<DB: Rig> {
    inbox: Inbox<DB>,
    tables: StockTables,
    work: Work,
}

impl<DB: Rig> Service<DB> {
    /// What both ways do with a message.
    async fn effect(&self, conn: &mut DB::Connection, incoming: &Incoming) -> Result<(), HandlerError> {
        if self.work == Work::Small {
            let deduct: Deduct = incoming.json()?;
            DB::deduct(&self.tables, conn, deduct.order, &deduct.sku, deduct.count).await?;
        }
        Ok(())
    }

    async fn handle(&self, way: Way, incoming: &Incoming) {
        if way == Way::Without {
            let mut tx = must("begin", self.inbox.outbox().pool().begin_with(DB::BEGIN).await);
            must("handler", self.effect(&mut tx, incoming).await);
            return must("commit", tx.commit().await);
        }
        let handler = async |tx: &mut Tx<DB>| self.effect(tx, incoming).await;
        let handled = must("inbox", self.inbox.process(incoming, handler).await);
        let expected = if way == Way::With { Handled::Processed } else { Handled::Duplicate };
        assert_eq!(handled, expected, "each message is new once");
    }
}

/// Messages as RabbitMQ would bring them.
fn messages(n: u32) -> Vec<Incoming> {
    let message = |order: u32| {
        let deduct = Deduct { order: order.into(), sku: format!("sku-{}", fastrand::u32(..ARTICLES)), count: 1 };
        let id = format!("{:032x}", fastrand::u128(..));
        let source = Source::RabbitMq { exchange: "orders".into(), routing_key: "stock.deduct".into() };
        Incoming::new(id, must("json", serde_json::to_vec(&deduct)))
            .typed("stock.deduct.v1")
            .key(order.to_string())
            .source(source)
    };
    (0..n).map(message).collect()
}

/// Seconds and CPU seconds for these messages, `concurrency` at once.
async fn block<DB: Rig>(service: &Arc<Service<DB>>, way: Way, messages: &Arc<Vec<Incoming>>, concurrency: u32) -> [f64; 2] {
    let next = Arc::new(AtomicU32::new(0));
    let meter = Meter::start(None);
    let tasks = (0..concurrency).map(|_| {
        let (service, messages, next) = (service.clone(), messages.clone(), next.clone());
        tokio::spawn(async move {
            while let Some(incoming) = messages.get(next.fetch_add(1, Relaxed) as usize) {
                service.handle(way, incoming).await;
            }
        })
    });
    for ended in join_all(tasks.collect::<Vec<_>>()).await {
        must("a task", ended);
    }
    let spent = meter.stop();
    [spent.time, spent.cpu]
}

async fn measure<DB: Rig>(args: &InboxArgs, rounds: usize, report: &mut Report) {
    let outbox = DB::fresh(args.concurrency).await;
    let tables = StockTables::make(&outbox, ARTICLES).await;
    let inbox = must("inbox", Inbox::of(&outbox, "inventory", InboxSettings::default()));
    let service = Arc::new(Service { inbox, tables, work: args.handler });
    let of_block = args.n / BLOCKS;
    let n = f64::from(of_block * BLOCKS);
    let ways = [Way::Without, Way::With, Way::Duplicates];
    // Connections and prepared statements.
    let first = Arc::new(messages(args.concurrency * 20));
    for way in ways {
        block(&service, way, &first, args.concurrency).await;
    }
    let (mut rates, mut cpus) = ([vec![], vec![], vec![]], [vec![], vec![], vec![]]);
    for round in 1..=rounds {
        eprintln!("{}: inbox: round {round} of {rounds}", DB::KIND.name());
        let mut spent = [[0.0; 2]; 3];
        for number in 0..BLOCKS {
            let messages = Arc::new(messages(of_block));
            // Each of the first two is the first one in half of the blocks.
            let order = if number % 2 == 0 { [0, 1, 2] } else { [1, 0, 2] };
            for way in order {
                let [time, cpu] = block(&service, ways[way], &messages, args.concurrency).await;
                spent[way][0] += time;
                spent[way][1] += cpu;
            }
        }
        for (way, [time, cpu]) in spent.into_iter().enumerate() {
            rates[way].push(n / time);
            cpus[way].push(cpu * 1_000.0 / n);
        }
    }
    let [without, with, duplicates] = rates;
    let [cpu_without, cpu_with, _] = cpus;
    let work = match args.handler {
        Work::None => "no handler",
        Work::Small => "small handler",
    };
    report.add(Row {
        database: DB::KIND.name(),
        what: format!("inbox, {work}, {} at once", args.concurrency),
        unit: "messages/s",
        compared: Some(Compared::new(&with, &without)),
        figures: vec![
            Figure { name: "duplicates", title: "duplicates/s", value: median(&duplicates) },
            Figure { name: "cpu_seconds_per_1000", title: "CPU s/1000", value: median(&cpu_with) },
            Figure { name: "cpu_seconds_per_1000_without", title: "without", value: median(&cpu_without) },
        ],
    });
    DB::remove(outbox).await;
}
