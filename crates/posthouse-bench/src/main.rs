//! `posthouse-bench`: what the servers can do, what Posthouse does with them, in the same run.
//!
//! | command | what it measures |
//! |---|---|
//! | `limits` | what databases and receivers do without Posthouse |
//! | `drain` | how fast messages leave the database, to a transport that confirms at once |
//! | `publish` | what a publish costs inside a business transaction |
//! | `inbox` | what an inbox costs the handler of received messages |
//! | `relay` | messages per second from a database to a receiver, beside the receiver's and the database's own limits |
//! | `latency` | from publish to confirmation, under a steady load |
//! | `growth` | whether a message costs as much beside millions of retained ones |
//! | `pinned` | whether a relay stays fast beside a transaction that doesn't end |
//! | `fanin` | how several instances share one outbox |
//! | `idle` | what a relay costs that has nothing to do |
//! | `peers` | Posthouse beside other outboxes and job queues, from PostgreSQL to RabbitMQ |
//! | `pages` | how fast the dashboard and the API answer on a large database |
//! | `plot` | draws what other commands have written with `--out` |
//! | `chaos` | nothing: it breaks everything while messages flow, and checks that every promise is kept |
//!
//! Every command prints a table; `--json` prints one object with `machine`, `command` and `rows` instead, and `--out FILE` writes
//! it into a file besides. A row that compares has `ours`, `limit` and `ratio`. Progress goes to stderr. Servers are named by `POSTHOUSE_TEST_POSTGRES_URL`,
//! `POSTHOUSE_TEST_MYSQL_URL`, `POSTHOUSE_TEST_RABBITMQ_URL`, `POSTHOUSE_TEST_KAFKA_URL` and `POSTHOUSE_TEST_NATS_URL`
//! (`scripts/services start && eval "$(scripts/services env)"`; with `POSTHOUSE_SERVICES_DURABLE=1` databases flush as in
//! production). `relay` and `latency` skip servers that aren't named and say so. Tables, queues, topics and streams get names
//! of their own and are removed at the end.
//!
//! ```text
//! cargo run --release -p posthouse-bench -- relay --to rabbitmq --from postgres
//! cargo run --release -p posthouse-bench -- latency --to rabbitmq --from postgres --seconds 60
//! cargo run -p posthouse-bench -- chaos --minutes 10
//! ```

mod chaos;
mod database;
mod drain;
mod fanin;
mod growth;
mod idle;
mod inbox;
mod latency;
mod limits;
mod meter;
mod pages;
mod peers;
mod pinned;
mod plot;
mod program;
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
    /// Also write that object into this file.
    #[arg(long, global = true, value_name = "FILE")]
    out: Option<std::path::PathBuf>,
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
    /// What databases and receivers do without Posthouse.
    #[command(long_about = limits::ABOUT)]
    Limits(LimitsArgs),
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
    /// What a message costs beside more and more retained ones.
    #[command(long_about = growth::ABOUT)]
    Growth(GrowthArgs),
    /// How fast a relay is beside an old snapshot, and beside a transaction that has published and doesn't end.
    #[command(long_about = pinned::ABOUT)]
    Pinned(PinnedArgs),
    /// 1, 2, 4 and 8 instances on one outbox.
    #[command(long_about = fanin::ABOUT)]
    Fanin(FaninArgs),
    /// What a relay costs that has nothing to do.
    #[command(long_about = idle::ABOUT)]
    Idle(IdleArgs),
    /// Draws a chart of each file that `--out` has written, as SVG beside it.
    Plot {
        /// Files written with `--out`.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<std::path::PathBuf>,
    },
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
    /// Breaks everything while messages flow, then checks what was lost, came twice or out of order.
    #[command(long_about = chaos::ABOUT)]
    Chaos(chaos::ChaosArgs),
    /// A receiver of `chaos`.
    #[command(hide = true)]
    ChaosConsumer(chaos::ConsumerArgs),
}

/// See [`limits`].
#[derive(Debug, Args)]
struct LimitsArgs {
    /// Only this receiver; all by default.
    #[arg(long, value_enum)]
    to: Option<To>,
    /// Messages per round; at most 30 000 for HTTP.
    #[arg(short, default_value_t = 50_000)]
    n: usize,
    /// Transactions per round.
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u32).range(8..))]
    transactions: u32,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
}

/// See [`growth`].
#[derive(Debug, Args)]
struct GrowthArgs {
    /// The last step has at most so many retained messages.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1_000..=100_000_000))]
    upto: u64,
    /// Messages that are sent per round.
    #[arg(short, default_value_t = 20_000)]
    n: usize,
    /// Transactions that publish per round.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    transactions: u32,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
}

/// See [`pinned`].
#[derive(Debug, Args)]
struct PinnedArgs {
    /// Messages per pass.
    #[arg(short, default_value_t = 20_000)]
    n: usize,
    /// Passes, one after the other.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    passes: u32,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
}

/// See [`fanin`].
#[derive(Debug, Args)]
struct FaninArgs {
    /// Messages per round.
    #[arg(short, default_value_t = 50_000)]
    n: usize,
    /// Payload bytes.
    #[arg(long, default_value_t = 256)]
    payload: usize,
}

/// See [`idle`].
#[derive(Debug, Args)]
struct IdleArgs {
    /// How long each is watched.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(2..))]
    seconds: u32,
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
    let all = [Kind::Postgres, Kind::Mysql, Kind::Sqlite];
    match &cli.what {
        What::Limits(args) => {
            for kind in kinds(cli.database, &all) {
                limits::databases(kind, args, rounds, &mut report).await;
            }
            limits::receivers(args, rounds, &mut report).await;
        }
        What::Growth(args) => growth::run(args, rounds, &mut report).await,
        What::Pinned(args) => {
            for kind in kinds(cli.database, &all) {
                pinned::run(kind, args, &mut report).await;
            }
        }
        What::Fanin(args) => {
            for kind in kinds(cli.database, &all) {
                fanin::run(kind, args, rounds, &mut report).await;
            }
        }
        What::Idle(args) => {
            for kind in kinds(cli.database, &all) {
                idle::run(kind, args, &mut report).await;
            }
        }
        What::Plot { files } => return plot::run(files),
        What::Drain { n, payload, keys } => {
            for kind in kinds(cli.database, &all) {
                drain::run(kind, *n, *payload, *keys, rounds, &mut report).await;
            }
        }
        What::Publish { n, payload } => {
            for kind in kinds(cli.database, &all) {
                publish::run(kind, *n, *payload, rounds, &mut report).await;
            }
        }
        What::Inbox(args) => {
            for kind in kinds(cli.database, &all) {
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
        What::Chaos(args) => {
            let code = chaos::run(cli.database, args, &mut report).await;
            if !report.is_empty() {
                finish(&report, cli.out.as_deref());
            }
            std::process::exit(code);
        }
        What::ChaosConsumer(args) => return database::must("receiver", chaos::run_consumer(args).await),
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
    finish(&report, cli.out.as_deref());
}

/// Tells what was measured.
fn finish(report: &report::Report, out: Option<&std::path::Path>) {
    if let Some(file) = out {
        database::must("--out", report.write(file));
    }
    report.print();
}

fn kinds(only: Option<Kind>, all: &[Kind]) -> Vec<Kind> {
    only.map_or_else(|| all.to_vec(), |kind| vec![kind])
}
