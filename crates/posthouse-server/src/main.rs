//! `posthouse`: the relay of the transactional outbox as a program, and what people need around it.

mod alerts;
mod api;
#[cfg(test)]
mod book;
mod cli;
mod commands;
mod config;
mod dashboard;
mod database;
mod demo;
mod depth;
mod failure;
mod health;
mod http;
mod mask;
mod metrics;
mod ops;
mod output;
#[cfg(feature = "xxl-job")]
mod xxl_job;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::cli::{Cli, Command};

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    logs(&cli);
    let json = cli.global.json;
    let result = match cli.command {
        Command::Demo(mut args) => {
            args.json |= json;
            return demo::run(args).await;
        }
        Command::Migrate { print } => commands::migrate::run(&cli.global, print).await,
        Command::Relay(args) => commands::relay::run(&cli.global, args).await,
        Command::Dashboard => commands::dashboard::run(&cli.global).await,
        Command::Health { live } => commands::health::run(&cli.global, live).await,
        Command::Doctor => commands::doctor::run(&cli.global).await,
        Command::Config(args) => commands::reference::run(&cli.global, &args),
        Command::Completions { shell } => {
            commands::completions::run(shell);
            Ok(())
        }
        Command::Publish(args) => commands::publish::run(&cli.global, args).await,
        Command::Messages(command) => commands::messages::run(&cli.global, command).await,
        Command::Inbox(command) => commands::inbox::run(&cli.global, command).await,
        Command::Houses(command) => commands::houses::run(&cli.global, command).await,
        Command::Groups(command) => commands::groups::run(&cli.global, command).await,
        Command::Retention(command) => commands::retention::run(&cli.global, command).await,
        Command::Runs(command) => commands::runs::run(&cli.global, command).await,
        Command::Alerts(command) => commands::alerts::run(&cli.global, command).await,
        Command::Destinations => commands::destinations::run(&cli.global).await,
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(json),
    }
}

fn logs(cli: &Cli) {
    let runs_long = matches!(cli.command, Command::Relay(_));
    let default = match (cli.global.verbose, runs_long) {
        // A person who waits needs no report of slow statements across the progress bar.
        (0, false) => "warn,sqlx=error",
        (0, true) | (1, false) => "info",
        (1, true) | (2, false) => "info,posthouse=debug",
        _ => "debug,posthouse=trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // On its levels below this one it writes the server's URL with its password into the log.
    let filter = match "async_nats::connector=info".parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).init();
}
