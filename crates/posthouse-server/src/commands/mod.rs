//! One file per verb.

pub(crate) mod alerts;
pub(crate) mod completions;
pub(crate) mod dashboard;
pub(crate) mod destinations;
pub(crate) mod doctor;
pub(crate) mod groups;
pub(crate) mod health;
pub(crate) mod houses;
pub(crate) mod inbox;
pub(crate) mod messages;
pub(crate) mod migrate;
pub(crate) mod payload;
pub(crate) mod publish;
pub(crate) mod reference;
pub(crate) mod relay;
pub(crate) mod retention;
pub(crate) mod runs;

use std::io::{BufRead, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::{By, Global};
use crate::config::{self, Config};
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{clean, count};

fn load(global: &Global) -> Result<Config, Failure> {
    config::load(global.config.as_deref(), global.database.as_deref())
}

/// The database that a command works on, where it can only be one.
fn one_database(config: &Config) -> Result<Database, Failure> {
    match config.sources().as_slice() {
        [(name, database)] => Database::open(name, database),
        several => {
            let names: Vec<&str> = several.iter().map(|(name, _)| name.as_str()).collect();
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

/// Who acts, for the audit log.
fn actor(by: &By) -> String {
    actor_named(by.actor.as_deref())
}

/// The same where nothing is asked.
fn actor_named(name: Option<&str>) -> String {
    name.filter(|a| !a.is_empty()).map_or_else(user, str::to_owned)
}

/// The name of the user, for the audit log.
fn user() -> String {
    whoami::username().ok().filter(|a| !a.is_empty()).unwrap_or_else(|| "unknown".into())
}

/// Draws on stderr, and not at all where that is no terminal.
fn progress(expected: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len}  {eta} left").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(expected).with_style(style)
}

/// An error after a part of the work was done.
fn interrupted(database: &Database, e: &posthouse::Error, changed: usize) -> Failure {
    let mut failure = database.failure(e);
    failure.text.push_str(&format!("; {} changed before that, the command can be run again", count(changed, "message")));
    failure
}

fn capital(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map(|c| c.to_uppercase().chain(chars).collect()).unwrap_or_default()
}
