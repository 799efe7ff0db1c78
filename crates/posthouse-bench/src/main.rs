//! `posthouse-bench`: what the servers can do, what Posthouse does with them, in the same run.
//!
//! | command | what it measures |
//! |---|---|
//! | `drain` | how fast messages leave the database, to a transport that confirms at once |
//! | `publish` | what a publish costs inside a business transaction |
//! | `inbox` | what an inbox costs the handler of received messages |
//! | `relay` | messages per second from a database to a receiver, beside the receiver's and the database's own limits |
//! | `latency` | from publish to confirmation, under a steady load |
//! | `peers` | Posthouse beside other outboxes and job queues, from PostgreSQL to RabbitMQ |
//! | `pages` | how fast the dashboard and the API answer on a large database |
//!
//! Every command prints a table; `--json` prints one object with `machine`, `command` and `rows` instead. A row that compares
//! has `ours`, `limit` and `ratio`. Progress goes to stderr. Servers are named by `POSTHOUSE_TEST_POSTGRES_URL`,
//! `POSTHOUSE_TEST_MYSQL_URL`, `POSTHOUSE_TEST_RABBITMQ_URL`, `POSTHOUSE_TEST_KAFKA_URL` and `POSTHOUSE_TEST_NATS_URL`
//! (`scripts/services start && eval "$(scripts/services env)"`; with `POSTHOUSE_SERVICES_DURABLE=1` databases flush as in
//! production). `relay` and `latency` skip servers that aren't named and say so. Tables, queues, topics and streams get names
//! of their own and are removed at the end.
//!
//! ```text
//! cargo run --release -p posthouse-bench -- relay --to rabbitmq --from postgres
//! cargo run --release -p posthouse-bench -- latency --to rabbitmq --from postgres --seconds 60
//! ```

mod database;
mod drain;
mod inbox;
mod latency;
mod meter;
mod pages;
mod peers;
mod publish;
mod receiver;
mod relay;
mod report;

use clap::{Args, Parser, Subcommand};

use database::Kind;
use receiver::To;

#[derive(Debug, Parser)]
#[command(name = "posthouse-bench", version, about = "Measures limits and Posthouse side by side")]
struct Cli {
    /// Print one JSON object instead of a table.
    #[arg(long, global = true)]
    json: bool,
    /// Only this database; all three by default, PostgreSQL and MySQL for `relay` and `latency`.
    #[arg(long, visible_alias = "from", global = true, value_enum)]
    database: Option<Kind>,
    /// How often each comparison is measured; the median counts. `latency` compares nothing and measures once.
    #[arg(long, global = true, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// N messages to a transport that confirms at once, beside a raw loop that reads and deletes the same rows.
    Drain {
        /// Messages per round.
        #[arg(short, default_value_t = 100_000)]
        n: usize,
        /// Payload bytes.
        #[arg(long, default_value_t = 256)]
        payload: usize,
        /// Distinct keys in the keyed run.
        #[arg(long, default_value_t = 1_000)]
        keys: usize,
    },
    /// A business transaction alone, with one more plain insert, and with a publish.
    Publish {
        /// Transactions per round.
        #[arg(short, default_value_t = 2_000)]
        n: usize,
        /// Payload bytes.
        #[arg(long, default_value_t = 256)]
        payload: usize,
    },
    /// Received messages handled by an inbox, beside the same handler in a plain transaction.
    #[command(long_about = inbox::ABOUT)]
    Inbox(InboxArgs),
    /// N messages from a database to a receiver, beside a raw publish loop and a raw loop that reads and deletes the rows.
    #[command(long_about = relay::ABOUT)]
    Relay(RelayArgs),
    /// From publish to confirmation, with an embedded relay, under a load that doesn't wait for anything.
    #[command(long_about = latency::ABOUT)]
    Latency(LatencyArgs),
    /// Posthouse beside other outboxes and job queues, in one run on one PostgreSQL and one RabbitMQ.
    #[command(long_about = peers::ABOUT)]
    Peers(PeersArgs),
    /// The driver of one of them.
    #[command(hide = true)]
    Peer {
        name: peers::Name,
        config: String,
        #[arg(long)]
        home: Option<std::path::PathBuf>,
        #[arg(long)]
        java: Option<std::path::PathBuf>,
    },
    /// How fast the dashboard and the API answer when there are N delivered messages.
    #[command(long_about = pages::ABOUT)]
    Pages(PagesArgs),
}

/// See [`peers`].
#[derive(Debug, Args)]
struct PeersArgs {
    /// Messages of a backlog, and as many again while they are published.
    #[arg(short, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(20..=1_000_000))]
    n: u32,
    /// Only these, separated by commas; all by default.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PEER")]
    only: Vec<peers::Name>,
    /// How long the load lasts that is measured, in seconds.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// How long it is watched with nothing to do, in seconds.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    idle: u32,
    /// Connections that publish.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=50))]
    publishers: u32,
    /// Payload bytes.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(32..=65_536))]
    payload: u32,
}

/// See [`pages`].
#[derive(Debug, Args)]
struct PagesArgs {
    /// Delivered messages.
    #[arg(short, default_value_t = 10_000_000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    n: u32,
    /// The server's program; the one beside this one by default.
    #[arg(long, value_name = "FILE")]
    posthouse: Option<std::path::PathBuf>,
}

/// See [`inbox`].
#[derive(Debug, Args)]
struct InboxArgs {
    /// Messages per round.
    #[arg(short, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(20..))]
    n: u32,
    /// Messages handled at once, each on a connection of its own.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100))]
    concurrency: u32,
    /// What is done for each message.
    #[arg(long, value_enum, default_value_t = inbox::Work::Small)]
    handler: inbox::Work,
}

/// See [`relay`].
#[derive(Debug, Args)]
struct RelayArgs {
    /// Only this receiver; all by default.
    #[arg(long, value_enum)]
    to: Option<To>,
    /// Messages per round; 100 000 by default, 30 000 for HTTP.
    #[arg(short)]
    n: Option<usize>,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
    /// Distinct keys in the keyed runs.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    keys: u32,
    /// Messages in flight, for the publish loop and the relay; the transport's default by default.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: Option<u32>,
}

/// See [`latency`].
#[derive(Debug, Args)]
struct LatencyArgs {
    /// Only this receiver; all by default.
    #[arg(long, value_enum)]
    to: Option<To>,
    /// Messages per second; by default half of what the same publishers and relay together manage at most.
    #[arg(long)]
    rate: Option<f64>,
    /// How long the load lasts that is measured, in seconds.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Tasks that publish, each on a connection of its own.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100))]
    publishers: u32,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
    /// Distinct keys; without it, messages have no key.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    keys: Option<u32>,
}

#[tokio::main]
async fn main() {
    let cli = Cli::parse();
    let mut report = report::Report::new(cli.json);
    let rounds = cli.rounds as usize;
    match &cli.what {
        What::Drain { n, payload, keys } => {
            for kind in kinds(cli.database, &[Kind::Postgres, Kind::Mysql, Kind::Sqlite]) {
                drain::run(kind, *n, *payload, *keys, rounds, &mut report).await;
            }
        }
        What::Publish { n, payload } => {
            for kind in kinds(cli.database, &[Kind::Postgres, Kind::Mysql, Kind::Sqlite]) {
                publish::run(kind, *n, *payload, rounds, &mut report).await;
            }
        }
        What::Inbox(args) => {
            for kind in kinds(cli.database, &[Kind::Postgres, Kind::Mysql, Kind::Sqlite]) {
                inbox::run(kind, args, rounds, &mut report).await;
            }
        }
        What::Relay(args) => {
            for (from, to) in receiver::pairs(&kinds(cli.database, &[Kind::Postgres, Kind::Mysql]), args.to, &mut report) {
                relay::run(from, to, args, rounds, &mut report).await;
            }
        }
        What::Peers(args) => peers::run(args, cli.database, &mut report).await,
        What::Peer { name, config, home, java } => {
            return peers::serve(*name, config, home.as_deref(), java.as_deref()).await;
        }
        What::Pages(args) => pages::run(args, &mut report).await,
        What::Latency(args) => {
            for (from, to) in receiver::pairs(&kinds(cli.database, &[Kind::Postgres, Kind::Mysql]), args.to, &mut report) {
                latency::run(from, to, args, &mut report).await;
            }
        }
    }
    if report.is_empty() {
        eprintln!("nothing was measured; {}", database::HOW_TO_SET);
        std::process::exit(3);
    }
    report.print();
}

fn kinds(only: Option<Kind>, all: &[Kind]) -> Vec<Kind> {
    only.map_or_else(|| all.to_vec(), |kind| vec![kind])
}
