//! `posthouse groups list`.

use comfy_table::{Cell, Row};
use posthouse::store::{GroupRow, RunFilter, RunRow, RunStatus};
use posthouse::{Group, Trigger};
use serde_json::{Value, json};

use super::{due_text, now_us};
use crate::cli::Global;
use crate::commands::runs;
use crate::config::{Config, trigger_text};
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean};

/// Of each group so many runs are looked at: those that are going, and the last one that ended.
const LOOK: u32 = 50;

/// A group of one database.
struct Line {
    database: String,
    name: String,
    /// None: only the database knows of it.
    group: Option<Group>,
    row: GroupRow,
    runs: Vec<RunRow>,
    next_due_us: Option<i64>,
}

impl Line {
    fn running(&self) -> usize {
        self.runs.iter().filter(|r| r.status == RunStatus::Running).count()
    }

    fn last(&self) -> Option<&RunRow> {
        self.runs.iter().find(|r| r.status.is_over() && r.instance.is_some())
    }
}

pub(super) async fn run(global: &Global, config: &Config) -> Result<(), Failure> {
    let databases = config.sources().iter().map(|(name, d)| Database::open(name, d)).collect::<Result<Vec<_>, _>>()?;
    let found = futures_util::future::join_all(databases.iter().map(|d| lines(d, config.groups_of(&d.name)))).await;
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

async fn lines(database: &Database, groups: Vec<Group>) -> Result<Vec<Line>, Failure> {
    let (store, ..) = database.ready().await?;
    let failure = |e: posthouse::Error| database.failure(&e);
    let watch = store.runs().watch().await.map_err(failure)?;
    let mut named: Vec<(String, Option<Group>)> = groups.into_iter().map(|g| (g.name.clone(), Some(g))).collect();
    for row in &watch.groups {
        if named.iter().all(|(name, _)| *name != row.group) {
            named.push((row.group.clone(), None));
        }
    }
    let mut out = Vec::new();
    for (name, group) in named {
        let filter = RunFilter { group: Some(name.clone()), limit: LOOK, ..RunFilter::default() };
        let runs = store.runs().list(&filter).await.map_err(failure)?;
        let row = watch.groups.iter().find(|row| row.group == name).cloned().unwrap_or_default();
        let due = group.as_ref().filter(|_| row.paused_us.is_none()).map(|g| g.trigger.due_after(watch.now_us, 1));
        let next_due_us = due.and_then(|due| due.first().copied());
        out.push(Line { database: database.name.clone(), name, group, row, runs, next_due_us });
    }
    Ok(out)
}

fn value(line: &Line) -> Value {
    json!({
        "database": line.database,
        "name": line.name,
        "configured": line.group.is_some(),
        "houses": line.group.as_ref().map(|g| g.houses.to_string()),
        "trigger": line.group.as_ref().map(|g| &g.trigger),
        "paused_us": line.row.paused_us,
        "fired_us": line.row.fired_us,
        "next_due_us": line.next_due_us,
        "running": line.running(),
        "last": line.last(),
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
        let mut cells = vec![Cell::new(clean(&line.name))];
        if several {
            cells.push(Cell::new(clean(&line.database)));
        }
        let (houses, trigger) = match &line.group {
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
    if let Some(at) = line.row.paused_us {
        return format!("paused {}", output::relative(at / 1_000));
    }
    match (&line.group, line.next_due_us) {
        (Some(g), Some(us)) if matches!(g.trigger, Trigger::Cron { .. }) && us - now_us() > 3_600_000_000 => {
            due_text(&g.trigger, us)
        }
        (_, Some(us)) => output::relative(us / 1_000),
        _ => "-".into(),
    }
}

fn last(line: &Line) -> String {
    let running = match line.running() {
        0 => String::new(),
        1 => "running; ".into(),
        n => format!("running on {n} instances; "),
    };
    match line.last() {
        Some(run) => format!("{running}{} {}", run.status.as_str(), runs::ended(run)),
        None if running.is_empty() => "-".into(),
        None => running.trim_end_matches("; ").into(),
    }
}
