//! `posthouse demo`: an order service, a relay and an inventory service on two SQLite files, with everything going wrong
//! that usually does; and then the books.
//!
//! | file | what it holds |
//! |---|---|
//! | `stage.rs` | who is started, killed and restarted when |
//! | `shop.rs` | the order service: an order and its message in one transaction |
//! | `relay.rs` | the relay, a child process |
//! | `inventory.rs` | the receiver, a child process that fails a third of its calls |
//! | `books.rs` | what the two database files say, during the run and at its end |
//! | `report.rs` | the books as a table or as JSON, and whether they balance |
//! | `view.rs` | progress, on a terminal or as lines |
//! | `child.rs` | child processes: starting, talking to, never outliving |
//! | `scratch.rs` | the directory of the files |

mod books;
mod child;
mod inventory;
mod relay;
mod report;
mod scratch;
mod shop;
mod stage;
mod view;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous};

/// The destination that the shop publishes to; the relay's route knows the receiver's address.
const DESTINATION: &str = "inventory.deduct";

/// What the shop sells. Every order deducts from one of these.
const SKUS: [&str; 5] = ["saddle", "bridle", "horseshoe", "lantern", "mailbag"];

/// The most pieces of an order.
const MOST_PIECES: u32 = 5;

/// Exit codes of this command, as of every other one: 1 says that what was asked is not so, 3 that something needed is not there.
const UNBALANCED: u8 = 1;
const BROKEN: u8 = 3;
/// What shells say of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

/// Takes orders, kills the relay, fails a third of the calls, and checks the books. Needs nothing but this program.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// How many orders are placed, of which about every tenth is rolled back on purpose
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    orders: u64,
    /// Decides the orders and which calls fail; drawn and shown when absent
    #[arg(long)]
    seed: Option<u64>,
    /// Keep the database files and say where they are
    #[arg(long)]
    keep: bool,
    /// One JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// Makes the run wrong in one way, so that tests see that the books can fail
    #[arg(long, hide = true)]
    cook: Option<Cook>,
    /// What this process is in a demo that runs already
    #[arg(long, hide = true, requires_all = ["dir", "port"])]
    role: Option<Role>,
    /// Where the files of that demo are
    #[arg(long, hide = true)]
    dir: Option<PathBuf>,
    /// The receiver's port; 0: any
    #[arg(long, hide = true)]
    port: Option<u16>,
}

/// The children of a demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Relay,
    Inventory,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Inventory => "inventory",
        }
    }
}

/// Ways to cook the books. Each is caught by a line of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cook {
    /// The receiver confirms some messages without doing anything.
    Lost,
    /// The receiver doesn't recognise duplicates.
    Twice,
    /// The shop publishes the message of a rolled back order on its own.
    Phantom,
    /// The relay doesn't keep a customer's messages in order.
    Order,
}

impl Cook {
    fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Twice => "twice",
            Self::Phantom => "phantom",
            Self::Order => "order",
        }
    }
}

/// What the shop writes and the inventory reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
struct Order {
    id: u64,
    customer: String,
    sku: String,
    pieces: u32,
}

/// Why a demo could not be played to its end.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("stopped")]
    Interrupted,
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("database: {0}")]
    Sql(#[from] sqlx::Error),
    #[error("{0}")]
    Posthouse(#[from] posthouse::Error),
    #[error("the {name} process {what}{log}")]
    Child { name: &'static str, what: String, log: String },
}

impl Failure {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    fn exit_code(&self) -> ExitCode {
        ExitCode::from(if matches!(self, Self::Interrupted) { INTERRUPTED } else { BROKEN })
    }
}

/// Plays the demo, or one role of a demo that another process plays.
pub(crate) async fn run(args: DemoArgs) -> ExitCode {
    // Drawn from 32 bits, so that it is short to type and every JSON reader has it exactly.
    let seed = args.seed.unwrap_or_else(|| fastrand::u32(..).into());
    let result = match (args.role, args.dir, args.port) {
        (Some(Role::Relay), Some(dir), Some(port)) => relay::run(&dir, port, args.cook).await,
        (Some(Role::Inventory), Some(dir), Some(port)) => inventory::run(&dir, port, seed, args.cook).await,
        _ => {
            let play = stage::Play { orders: args.orders, seed, keep: args.keep, cook: args.cook };
            return match stage::run(play).await {
                Ok(report) => report.print(args.json),
                Err(e) => {
                    eprintln!("posthouse demo: {e}");
                    e.exit_code()
                }
            };
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            e.exit_code()
        }
    }
}

/// How every process opens its files: several of them read and write at once, and wait for each other instead of failing.
fn sqlite(file: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // Survives every crash of a process; only a power failure could take the last transactions back.
        .synchronous(SqliteSynchronous::Normal)
        .busy_timeout(Duration::from_secs(10))
}
