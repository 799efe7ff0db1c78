//! `posthouse groups`.

mod ask;
mod list;

use std::time::SystemTime;

use posthouse::schedule::Cron;
use posthouse::{Group, Trigger};
use serde_json::{Value, json};

use super::load;
use crate::cli::{Global, Groups};
use crate::config::{Config, trigger_text};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops;
use crate::output::{self, clean};

/// How many due times are told ahead.
const AHEAD: usize = 3;

pub(crate) async fn run(global: &Global, command: Groups) -> Result<(), Failure> {
    let config = load(global)?;
    match command {
        Groups::List => list::run(global, &config).await,
        Groups::Run { name, no_wait, within } => {
            let databases = of_group(&config, &name, true)?;
            ask::run(global, &databases, &name, (!no_wait).then_some(within)).await
        }
        Groups::Stop { name } => ask::stop(global, &of_group(&config, &name, true)?, &name).await,
        Groups::Pause { name } => ask::pause(global, &of_group(&config, &name, false)?, &name, true).await,
        Groups::Resume { name } => ask::pause(global, &of_group(&config, &name, false)?, &name, false).await,
    }
}

/// The databases that a group works on. `runs`: it must be one that has runs which can be asked for.
fn of_group(config: &Config, name: &str, runs: bool) -> Result<Vec<Database>, Failure> {
    let group = config.group(name).map_err(Failure::usage)?;
    if runs {
        ops::groups::runnable(group.map(|g| &g.trigger), name).map_err(|refused| Failure::not_so(refused.text))?;
    }
    let mut databases = Vec::new();
    for (database, settings) in &config.sources() {
        if group.is_none() || config.groups_of(database).iter().any(|g| g.name == name) {
            databases.push(Database::open(database, settings)?);
        }
    }
    if databases.is_empty() {
        return Err(Failure::usage(format!("group {name:?} works on none of the databases that were chosen")));
    }
    Ok(databases)
}

fn now_us() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// A due time, in the zone that it is meant in.
fn due_text(trigger: &Trigger, us: i64) -> String {
    match trigger {
        Trigger::Cron { cron, tz } => Cron::parse(cron, tz).map_or_else(|e| e.to_string(), |cron| cron.show(us)),
        _ => output::moment(us / 1_000),
    }
}

/// The groups as `relay --check --json` tells them.
pub(crate) fn planned(config: &Config) -> Vec<Value> {
    let now = now_us();
    let told = |group: &Group| {
        json!({
            "name": group.name, "databases": group.databases, "tables": group.tables, "houses": config.houses_of(group),
            "trigger": group.trigger, "next_due_us": group.trigger.due_after(now, AHEAD),
        })
    };
    config.groups.iter().map(told).collect()
}

/// The groups as `relay --check` tells them.
pub(crate) fn print_plan(config: &Config) {
    let now = now_us();
    let several = config.sources().len() > 1;
    let mut header = vec!["group", "houses", "trigger", "next due"];
    if several {
        header.push("databases");
    }
    let mut table = output::table(&header);
    for group in &config.groups {
        let due: Vec<String> = group.trigger.due_after(now, AHEAD).into_iter().map(|us| due_text(&group.trigger, us)).collect();
        let mut cells = vec![
            clean(&group.name).into_owned(),
            config.houses_of(group),
            clean(&trigger_text(&group.trigger)).into_owned(),
            if due.is_empty() { "-".into() } else { due.join("\n") },
        ];
        if several {
            let named = |names: &[String]| if names.is_empty() { "all".into() } else { names.join(", ") };
            let tables = if group.tables.is_empty() { String::new() } else { format!(" / {}", named(&group.tables)) };
            cells.push(clean(&format!("{}{tables}", named(&group.databases))).into_owned());
        }
        table.add_row(cells);
    }
    output::print_table(table);
}
