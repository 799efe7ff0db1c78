//! `posthouse-bench`: what the database can do, what Posthouse does on it, in the same run.
//!
//! Every command prints a table; `--json` prints one object with `machine`, `command` and `rows` instead.
//! A row that compares has `ours`, `limit` and `ratio`. Servers are named by `POSTHOUSE_TEST_POSTGRES_URL` and
//! `POSTHOUSE_TEST_MYSQL_URL` (`eval "$(scripts/services env)"`).

mod database;
mod drain;
mod publish;
mod report;

use clap::{Parser, Subcommand};

use database::Kind;

#[derive(Debug, Parser)]
#[command(name = "posthouse-bench", version, about = "Measures limits and Posthouse side by side")]
struct Cli {
    /// Print one JSON object instead of a table.
    #[arg(long, global = true)]
    json: bool,
    /// Only this database; all three by default.
    #[arg(long, global = true, value_enum)]
    database: Option<Kind>,
    /// How often each pair is measured; the median counts.
    #[arg(long, global = true, default_value_t = 3)]
    rounds: usize,
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
}

#[tokio::main]
async fn main() {
    let cli = Cli::parse();
    let kinds = cli.database.map_or_else(|| vec![Kind::Postgres, Kind::Mysql, Kind::Sqlite], |kind| vec![kind]);
    let mut report = report::Report::new(cli.json);
    for kind in kinds {
        match cli.what {
            What::Drain { n, payload, keys } => drain::run(kind, n, payload, keys, cli.rounds, &mut report).await,
            What::Publish { n, payload } => publish::run(kind, n, payload, cli.rounds, &mut report).await,
        }
    }
    report.print();
}
