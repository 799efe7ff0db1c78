//! `posthouse messages`.

mod act;
mod show;

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Row};
use posthouse::store::{Action, Listed, MessageFilter, MessageRow, Store};
use serde_json::json;

use super::{known_destination, load, one_database};
use crate::cli::{Global, Messages};
use crate::config::redact_url;
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::messages;
use crate::output::{self, clean};

/// A terminal of this width has room for message ids.
const WIDE: u16 = 140;

/// A message takes at most this many lines in a list; `show` tells the rest.
const LINES: usize = 2;

pub(crate) async fn run(global: &Global, command: Messages) -> Result<(), Failure> {
    let config = load(global)?;
    let database = one_database(&config)?;
    if let Messages::Edit { destination, any_destination, .. } = &command {
        known_destination(&config, destination, *any_destination)?;
    }
    let (store, ..) = database.ready().await?;
    match command {
        Messages::List { filter, key, id, since, until, text, within, limit, before } => {
            let filter = MessageFilter {
                status: filter.status.map(Into::into),
                destination: filter.destination,
                key,
                message_id: id,
                created_after_ms: since,
                created_before_ms: until,
                text,
                within: Some(within),
                before,
                limit,
                ..MessageFilter::default()
            };
            let Listed { rows, next, stopped } = store.list(&filter).await.map_err(|e| database.failure(&e))?;
            if global.json {
                output::json(&json!({ "database": database.name, "messages": rows, "next_before": next, "stopped": stopped }));
            } else {
                list(&rows, next, stopped, within);
            }
            Ok(())
        }
        Messages::Show { id, full } => show::run(global, &database, store.as_ref(), &id, full).await,
        Messages::Requeue { which, by } => act::run(global, &database, store.as_ref(), which, Action::Requeue, by).await,
        Messages::Skip { which, by } => act::run(global, &database, store.as_ref(), which, Action::Skip, by).await,
        Messages::Edit { ids, destination, by, .. } => {
            act::these(global, &database, store.as_ref(), &ids, Action::Edit { destination }, by).await
        }
    }
}

fn list(rows: &[MessageRow], next: Option<i64>, stopped: bool, within: Duration) {
    if rows.is_empty() {
        output::say("no messages");
    } else {
        print(rows);
    }
    let Some(next) = next else { return };
    if stopped {
        let time = output::span(within);
        output::say(&format!("\nstopped searching after {time} (--within); go on with --before {next}"));
    } else {
        output::say(&format!("\nthere may be more: --before {next}"));
    }
}

fn print(rows: &[MessageRow]) {
    let keyed = rows.iter().any(|r| r.key.is_some());
    let troubled = rows.iter().any(|r| r.last_error.is_some());
    let waiting = rows.iter().any(|r| r.next_attempt_ms.is_some());
    // An id that is broken over two lines can't be copied; where there is no room, the row names the message as well.
    let ids = output::terminal_width().is_none_or(|w| w >= WIDE);
    // A column that would be empty takes no room from the others.
    let mut header = vec!["row", "status", "destination"];
    header.extend(keyed.then_some("key"));
    header.extend(ids.then_some("message id"));
    header.extend(["created", "tries"]);
    header.extend(waiting.then_some("next try"));
    header.extend(troubled.then_some("error"));
    let mut table = output::table(&header);
    for r in rows {
        let mut cells = vec![
            Cell::new(r.id).set_alignment(CellAlignment::Right),
            output::status(&r.status),
            Cell::new(clean(&redact_url(&r.destination))),
        ];
        if keyed {
            cells.push(Cell::new(clean(r.key.as_deref().unwrap_or(""))));
        }
        if ids {
            cells.push(Cell::new(clean(&r.message_id)));
        }
        cells.push(Cell::new(output::relative(r.created_at_ms)));
        let claims = if r.claims > 0 { format!("+{}", r.claims) } else { String::new() };
        cells.push(Cell::new(format!("{}{claims}", r.attempts)).set_alignment(CellAlignment::Right));
        if waiting {
            cells.push(Cell::new(r.next_attempt_ms.map(output::relative).unwrap_or_default()));
        }
        if troubled {
            cells.push(Cell::new(clean(r.last_error.as_deref().unwrap_or(""))));
        }
        let mut row = Row::from(cells);
        row.max_height(LINES);
        table.add_row(row);
    }
    output::unbroken(&mut table, &["ROW", "STATUS", "MESSAGE ID", "CREATED", "TRIES", "NEXT TRY"]);
    output::print_table(table);
}

/// Row ids of what a person named by row id or message id.
async fn resolve(database: &Database, store: &dyn Store, name: &str) -> Result<Vec<i64>, Failure> {
    let ids = messages::resolve(store, name).await.map_err(|e| database.failure(&e))?;
    if ids.is_empty() {
        return Err(Failure::not_so(format!(
            "database {:?} has no message {name:?}, neither as row id nor as message id",
            database.name
        )));
    }
    Ok(ids)
}
