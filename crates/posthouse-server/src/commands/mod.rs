//! One file per verb.

pub(crate) mod destinations;
pub(crate) mod houses;
pub(crate) mod messages;
pub(crate) mod migrate;
pub(crate) mod publish;
pub(crate) mod relay;

use std::io::{BufRead, IsTerminal, Write};

use crate::cli::Global;
use crate::config::{self, Config};
use crate::database::Database;
use crate::failure::Failure;
use crate::output::clean;

fn load(global: &Global) -> Result<Config, Failure> {
    config::load(global.config.as_deref(), global.database.as_deref())
}

/// The database that a command works on, where it can only be one.
fn one_database(config: &Config) -> Result<Database, Failure> {
    let mut all = config.databases.iter();
    match (all.next(), all.next()) {
        (Some((name, database)), None) => Database::open(name, database),
        _ => {
            let names: Vec<&str> = config.databases.keys().map(String::as_str).collect();
            Err(Failure::usage(format!(
                "several databases are configured: {}; choose one with --database NAME",
                names.join(", ")
            )))
        }
    }
}

/// Asks on the terminal. Where nobody can answer, `--yes` must have been given.
fn confirm(question: &str, yes: bool) -> Result<(), Failure> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(Failure::usage("this asks before it acts, and there is no terminal to ask on; give --yes"));
    }
    let mut stderr = std::io::stderr();
    let mut answer = String::new();
    // A terminal that can't be written to or read from gives no answer, which means no.
    let _ = write!(stderr, "{} [y/N] ", clean(question)).and_then(|()| stderr.flush());
    let _ = std::io::stdin().lock().read_line(&mut answer);
    match answer.trim().to_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::not_so("nothing was done")),
    }
}

/// The destination must lead somewhere by this configuration; without a file nobody knows the relay's routes.
fn known_destination(config: &Config, destination: &str, any: bool) -> Result<(), Failure> {
    if any || config.file.is_none() {
        return Ok(());
    }
    config::check::destination(destination, config).map_err(|why| {
        Failure::usage(format!(
            "destination {destination:?}: {why}\nIf the relay that sends it is configured elsewhere, give --any-destination"
        ))
    })
}
