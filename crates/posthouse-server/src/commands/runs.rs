//! `posthouse runs`.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Row, Table};
use posthouse::store::{RunFilter, RunRow, RunStatus};
use serde_json::json;

use super::{load, one_database};
use crate::cli::{Global, Runs};
use crate::failure::Failure;
use crate::output::{self, clean};

/// A terminal of this width has room for all columns.
const WIDE: u16 = 140;

pub(crate) async fn run(global: &Global, command: Runs) -> Result<(), Failure> {
    let config = load(global)?;
    let database = one_database(&config)?;
    let Runs::List { group, limit, before } = command;
    if let Some(group) = &group {
        config.group(group).map_err(Failure::usage)?;
    }
    let (store, ..) = database.ready().await?;
    let filter = RunFilter { group, before, limit, ..RunFilter::default() };
    let rows = store.runs().list(&filter).await.map_err(|e| database.failure(&e))?;
    // A full page may have another one behind it.
    let next = rows.last().filter(|_| rows.len() == limit as usize).map(|r| r.id);
    if global.json {
        output::json(&json!({ "database": database.name, "runs": rows, "next_before": next }));
        return Ok(());
    }
    if rows.is_empty() {
        output::say("no runs");
        return Ok(());
    }
    let wide = output::terminal_width().is_none_or(|w| w >= WIDE);
    output::print_table(table(&rows, wide));
    if !wide {
        errors(&rows);
    }
    if let Some(next) = next {
        output::say(&format!("\nthere may be more: --before {next}"));
    }
    Ok(())
}

/// Below the table, where there is no room in it.
fn errors(rows: &[RunRow]) {
    for (n, run) in rows.iter().filter(|r| r.error.is_some()).enumerate() {
        let gap = if n == 0 { "\n" } else { "" };
        output::say(&format!("{gap}{}: {}", run.id, clean(run.error.as_deref().unwrap_or_default())));
    }
}

fn table(rows: &[RunRow], wide: bool) -> Table {
    let troubled = wide && rows.iter().any(|r| r.error.is_some());
    let mut header = vec!["id", "group", "cause", "status", "began", "took", "sent", "retry", "fail"];
    header.extend(wide.then_some("instance"));
    header.extend(troubled.then_some("error"));
    let mut table = output::table(&header);
    let number = |n: i64| Cell::new(n).set_alignment(CellAlignment::Right);
    for r in rows {
        let mut cells = vec![
            number(r.id),
            Cell::new(clean(&r.group)),
            Cell::new(clean(&r.cause)),
            output::status(r.status.as_str()),
            Cell::new(output::relative(r.started_us.unwrap_or(r.requested_us) / 1_000)),
            Cell::new(took(r)).set_alignment(CellAlignment::Right),
            number(r.delivered),
            number(r.retried),
            number(r.failed),
        ];
        if wide {
            cells.push(Cell::new(r.instance.as_deref().map_or_else(|| "(all)".into(), clean)));
        }
        if troubled {
            cells.push(Cell::new(clean(r.error.as_deref().unwrap_or(""))));
        }
        table.add_row(Row::from(cells));
    }
    output::unbroken(&mut table, &["ID", "CAUSE", "STATUS", "BEGAN", "TOOK", "SENT", "RETRY", "FAIL"]);
    table
}

fn took(run: &RunRow) -> String {
    match (run.started_us, run.ended_us) {
        (Some(began), Some(ended)) if run.status != RunStatus::Lost => {
            output::span(Duration::from_micros(u64::try_from(ended - began).unwrap_or(0)))
        }
        _ => "-".into(),
    }
}

/// When a run ended.
pub(super) fn ended(run: &RunRow) -> String {
    run.ended_us.or(run.started_us).map(|us| output::relative(us / 1_000)).unwrap_or_default()
}
