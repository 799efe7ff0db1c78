//! How fast messages get from a database to a receiver, beside what receiver and database do at most.

use std::time::Duration;

use posthouse::testing::deliver;
use posthouse::transport::{Outcome, Transport};
use posthouse::{Envelope, Ordering, Outbox, Relay, Route};

use crate::RelayArgs;
use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::drain::fill;
use crate::meter::Spent;
use crate::receiver::{Http, Kafka, Load, Nats, RabbitMq, Receiver, To};
use crate::report::{Compared, Figure, Report, Row, median, spread};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
N messages from a database to a receiver, in rounds of three measurements, one after the other:

  publish   a loop that publishes N messages with the same client library, as many bytes, headers and confirmations, and
            as many in flight as the transport's default (Kafka: what the client's own queue holds), until all are confirmed
  database  a loop on one connection that reads and deletes N pending messages, 2 000 at a time
  ours      a relay with default settings, started with N messages in the outbox, until all are confirmed and none is
            pending; its transport has delivered one message before, as the publish loop has

A row's limit is the slower of the two loops, its ratio ours / limit. Each loop has the whole machine for itself. Where all
share few cores, the relay can't reach that: it does the work of both. So `in turn` compares it with doing one loop after the
other, 1 / (1/publish + 1/database). CPU is of this process, in seconds per 1 000 messages, user and system, all threads (of
HTTP's receiver, which runs in this process too, it is left out).

Every receiver is measured without keys and with keys (strict order: one message of a key in flight); Kafka also with
`ordering = \"pipelined\"`.";

/// One message, to make the connection.
const WARM_UP: Duration = Duration::from_secs(10);

/// What the raw loop reads at a time, as much as a relay.
const BATCH: usize = 2_000;

/// How often it says how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

pub(crate) async fn run(from: Kind, to: To, args: &RelayArgs, rounds: usize, report: &mut Report) {
    match from {
        Kind::Postgres => run_from::<sqlx::Postgres>(to, args, rounds, report).await,
        Kind::Mysql => run_from::<sqlx::MySql>(to, args, rounds, report).await,
        Kind::Sqlite => run_from::<sqlx::Sqlite>(to, args, rounds, report).await,
    }
}

async fn run_from<DB: Rig>(to: To, args: &RelayArgs, rounds: usize, report: &mut Report) {
    match to {
        To::Rabbitmq => measure::<DB, RabbitMq>(args, rounds, report).await,
        To::Kafka => measure::<DB, Kafka>(args, rounds, report).await,
        To::Nats => measure::<DB, Nats>(args, rounds, report).await,
        To::Http => measure::<DB, Http>(args, rounds, report).await,
    }
}

async fn measure<DB: Rig, R: Receiver>(args: &RelayArgs, rounds: usize, report: &mut Report) {
    let keys = Some(args.keys as usize);
    let mut shapes =
        vec![("unkeyed".to_owned(), None, Ordering::Strict), (format!("{} keys", args.keys), keys, Ordering::Strict)];
    let mut receiver = R::prepare().await;
    if receiver.transport().pipelines() {
        shapes.push((format!("{} keys, pipelined", args.keys), keys, Ordering::Pipelined));
    }
    for (shape, keys, ordering) in shapes {
        let what = format!("to {}, {shape}", R::NAME);
        let in_flight = args.concurrency.unwrap_or_else(|| receiver.transport().concurrency());
        let load = || Load::new(args.n.unwrap_or(R::MESSAGES), args.payload, keys, in_flight as usize);
        let mut route = Route::to(receiver.to()).ordering(ordering);
        route.concurrency = args.concurrency;
        // Fresh for each, so that none has more to search through than another.
        let outbox = DB::fresh(CONNECTIONS).await;
        let mut figures = Rounds::default();
        for round in 1..=rounds {
            let say = |text: &str| eprintln!("{}: {what}: round {round} of {rounds}: {text}", DB::KIND.name());
            say("publishing without a database");
            let load = load();
            figures.publish.add(load.n, receiver.publish(&load).await);
            let arrived = receiver.arrived().await;
            assert!(arrived >= load.n, "{arrived} of {} messages arrived", load.n);
            receiver.clear().await;

            say("filling the outbox");
            fill(&outbox, load.n, args.payload, keys).await;
            say("reading and deleting without a receiver");
            let meter = receiver.meter();
            let drained = must("raw drain", DB::raw_drain(&outbox, BATCH).await);
            figures.database.add(load.n, meter.stop());
            assert_eq!(drained, load.n, "the raw loop drains what was published");

            say("filling the outbox");
            fill(&outbox, load.n, args.payload, keys).await;
            say("relaying");
            let (spent, reads) = relay(&outbox, &receiver, &route, load.n, args.payload).await;
            figures.ours.add(load.n, spent);
            figures.reads.push(reads as f64 * 1_000.0 / load.n as f64);
            let arrived = receiver.arrived().await;
            assert!(arrived >= load.n, "{arrived} of {} messages arrived", load.n);
            receiver.clear().await;
        }
        DB::remove(outbox).await;
        report.add(figures.row(DB::KIND.name(), what));
    }
    receiver.remove().await;
}

/// A relay that sends what is in the outbox; also answers how often it read the pending set.
async fn relay<DB: Rig, R: Receiver>(outbox: &Outbox<DB>, receiver: &R, route: &Route, n: usize, payload: usize) -> (Spent, u64) {
    let transport = receiver.transport();
    match deliver(&transport, Envelope::for_test("bench", vec![b'x'; payload]), route.clone(), WARM_UP).await {
        Outcome::Delivered => {}
        other => must("the first message", Err(format!("{other:?}"))),
    }

    let meter = receiver.meter();
    let builder = Relay::builder(outbox).transport(R::SCHEME, transport).route("bench", route.clone());
    let relay = must("relay", builder.start().await);
    {
        let mut drained = std::pin::pin!(relay.drain_once());
        while tokio::time::timeout(PROGRESS, &mut drained).await.is_err() {
            eprintln!("  {} of {n}", relay.stats().delivered);
        }
    }
    let spent = meter.stop();

    let stats = relay.stats();
    let left = must("count", DB::pending(outbox).await);
    if stats.delivered != n as u64 || left != 0 {
        let error = stats.destinations.values().find_map(|d| d.last_error.clone()).unwrap_or_default();
        let text = format!("{} of {n} delivered, {} tried again, {left} pending: {error}", stats.delivered, stats.retried);
        must::<(), _>("the relay", Err(text));
    }
    relay.shutdown(Duration::from_secs(30)).await;
    (spent, stats.reads)
}

/// What all rounds of one kind of measurement gave.
#[derive(Debug, Default)]
struct Measured {
    per_second: Vec<f64>,
    cpu_per_thousand: Vec<f64>,
}

impl Measured {
    fn add(&mut self, n: usize, spent: Spent) {
        self.per_second.push(n as f64 / spent.time);
        self.cpu_per_thousand.push(spent.cpu * 1_000.0 / n as f64);
    }
}

#[derive(Debug, Default)]
struct Rounds {
    publish: Measured,
    database: Measured,
    ours: Measured,
    /// The relay's reads of the pending set for 1 000 messages.
    reads: Vec<f64>,
}

impl Rounds {
    fn row(&self, database: &'static str, what: String) -> Row {
        let ours = &self.ours.per_second;
        let both = || self.publish.per_second.iter().zip(&self.database.per_second);
        let limits: Vec<_> = both().map(|(publish, database)| publish.min(*database)).collect();
        let in_turn = both().zip(ours).map(|((publish, database), ours)| ours * (1.0 / publish + 1.0 / database));
        let mut figures = Vec::new();
        let mut add = |name, title, value| figures.push(Figure { name, title, value });
        let (publish, publish_min, publish_max) = spread(self.publish.per_second.clone());
        add("publish", "publish", publish);
        add("publish_min", "", publish_min);
        add("publish_max", "", publish_max);
        let (read, read_min, read_max) = spread(self.database.per_second.clone());
        add("read_and_delete", "database", read);
        add("read_and_delete_min", "", read_min);
        add("read_and_delete_max", "", read_max);
        let (_, ours_min, ours_max) = spread(ours.clone());
        add("ours_min", "ours min", ours_min);
        add("ours_max", "max", ours_max);
        add("ratio_in_turn", "in turn", median(&in_turn.collect::<Vec<_>>()));
        add("cpu_seconds_per_1000", "CPU s/1000", median(&self.ours.cpu_per_thousand));
        add("cpu_seconds_per_1000_publish", "publish's", median(&self.publish.cpu_per_thousand));
        add("cpu_seconds_per_1000_database", "database's", median(&self.database.cpu_per_thousand));
        add("reads_per_1000", "", median(&self.reads));
        Row { database, what, unit: "messages/s", compared: Some(Compared::new(ours, &limits)), figures }
    }
}
