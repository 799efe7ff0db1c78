//! The `posthouse` command.

mod demo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Posthouse: the relay of the transactional outbox.
#[derive(Debug, Parser)]
#[command(name = "posthouse", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the whole thing at work on SQLite: orders, a relay that is killed, a receiver that fails, and the books.
    Demo(demo::DemoArgs),
}

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(args).await,
    }
}
