//! `posthouse groups list`.

use comfy_table::{Cell, Row};
use posthouse::Trigger;
use serde_json::{Value, json};

use super::{due_text, now_us};
use crate::cli::Global;
use crate::commands::runs;
use crate::config::{Config, trigger_text};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::groups;
use crate::output::{self, clean};

/// A group of one database.
struct Line {
    database: String,
    of: groups::Line,
}

pub(super) async fn run(global: &Global, config: &Config) -> Result<(), Failure> {
    let databases = config.sources().iter().map(|(name, d)| Database::open(name, d)).collect::<Result<Vec<_>, _>>()?;
    let found = futures_util::future::join_all(databases.iter().map(|d| lines(d, config))).await;
    let (mut all, mut failure) = (Vec::new(), None::<Failure>);
    for found in found {
        match found {
            Ok(lines) => all.extend(lines),
            Err(e) => {
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
            }
        }
    }
    if global.json {
        let groups: Vec<Value> = all.iter().map(value).collect();
        let mut told = json!({ "groups": groups });
        if let Some(failure) = &failure {
            told["error"] = failure.text.clone().into();
        }
        output::json(&told);
    } else {
        print(&all, databases.len() > 1, config);
    }
    match failure {
        None => Ok(()),
        Some(failure) => Err(Failure { printed: true, ..failure }),
    }
}

async fn lines(database: &Database, config: &Config) -> Result<Vec<Line>, Failure> {
    let (store, ..) = database.ready().await?;
    let found = groups::of(store.as_ref(), config.groups_of(&database.name)).await.map_err(|e| database.failure(&e))?;
    Ok(found.into_iter().map(|of| Line { database: database.name.clone(), of }).collect())
}

fn value(line: &Line) -> Value {
    json!({
        "database": line.database,
        "name": line.of.name,
        "configured": line.of.group.is_some(),
        "houses": line.of.group.as_ref().map(|g| g.houses.to_string()),
        "trigger": line.of.group.as_ref().map(|g| &g.trigger),
        "paused_us": line.of.row.paused_us,
        "fired_us": line.of.row.fired_us,
        "next_due_us": line.of.next_due_us,
        "running": line.of.running(),
        "last": line.of.last(),
    })
}

fn print(all: &[Line], several: bool, config: &Config) {
    if all.is_empty() {
        output::say(if config.groups.is_empty() {
            "no groups are configured: every house is sent from all the time"
        } else {
            "no groups"
        });
        return;
    }
    let mut header = vec!["group"];
    header.extend(several.then_some("database"));
    header.extend(["houses", "trigger", "next due", "last run"]);
    let mut table = output::table(&header);
    for line in all {
        let mut cells = vec![Cell::new(clean(&line.of.name))];
        if several {
            cells.push(Cell::new(clean(&line.database)));
        }
        let (houses, trigger) = match &line.of.group {
            Some(g) if g.houses.is_empty() => ("-".into(), trigger_text(&g.trigger)),
            Some(g) => (g.houses.to_string(), trigger_text(&g.trigger)),
            None => ("?".into(), "(not configured here)".into()),
        };
        cells.extend([Cell::new(houses), Cell::new(clean(&trigger)), Cell::new(next(line)), Cell::new(last(line))]);
        table.add_row(Row::from(cells));
    }
    output::unbroken(&mut table, &["GROUP", "DATABASE"]);
    output::print_table(table);
}

fn next(line: &Line) -> String {
    if let Some(at) = line.of.row.paused_us {
        return format!("paused {}", output::relative(at / 1_000));
    }
    match (&line.of.group, line.of.next_due_us) {
        (Some(g), Some(us)) if matches!(g.trigger, Trigger::Cron { .. }) && us - now_us() > 3_600_000_000 => {
            due_text(&g.trigger, us)
        }
        (_, Some(us)) => output::relative(us / 1_000),
        _ => "-".into(),
    }
}

fn last(line: &Line) -> String {
    let running = match line.of.running() {
        0 => String::new(),
        1 => "running; ".into(),
        n => format!("running on {n} instances; "),
    };
    match line.of.last() {
        Some(run) => format!("{running}{} {}", run.status.as_str(), runs::ended(run)),
        None if running.is_empty() => "-".into(),
        None => running.trim_end_matches("; ").into(),
    }
}
