//! `posthouse inbox`.

mod act;
mod show;

use comfy_table::{Cell, CellAlignment, Row, Table};
use posthouse::store::{InboxAction, InboxDetail, InboxFilter, InboxRow, InboxStore, Listed};
use serde_json::json;

use super::{load, one_database};
use crate::cli::{Global, Inbox};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::inbox as received;
use crate::output::{self, clean};

/// A terminal of this width has room for all columns.
const WIDE: u16 = 140;

/// Ids up to this length are kept whole; the usual ones have 36 characters.
const COPIED: usize = 44;

/// A message takes at most this many lines in a list; `show` tells the rest.
const LINES: usize = 2;

pub(crate) async fn run(global: &Global, command: Inbox) -> Result<(), Failure> {
    let config = load(global)?;
    let database = one_database(&config)?;
    // Its check says what is wrong with the tables, if anything is.
    database.ready().await?;
    let store = database.inbox()?;
    match command {
        Inbox::List { filter, consumer, since, until, text, within, limit, after } => {
            let after = match &after[..] {
                [consumer, id] => Some((consumer.clone(), id.clone())),
                _ => None,
            };
            let filter = InboxFilter {
                consumer,
                status: filter.status.map(Into::into),
                kind: filter.kind,
                first_after_us: since.map(|ms| ms.saturating_mul(1_000)),
                first_before_us: until.map(|ms| ms.saturating_mul(1_000)),
                text,
                within: Some(within),
                after,
                limit,
                ..InboxFilter::default()
            };
            let Listed { rows, next, stopped } = store.list(&filter).await.map_err(|e| database.failure(&e))?;
            if global.json {
                output::json(&json!({ "database": database.name, "messages": rows, "next_after": next, "stopped": stopped }));
            } else {
                list(&rows);
                let named = next.map(|(consumer, id)| format!("--after {} {}", word(&consumer), word(&id)));
                match named {
                    Some(next) if stopped => {
                        output::say(&format!("\nstopped searching after {} (--within); go on with {next}", output::span(within)));
                    }
                    Some(next) => output::say(&format!("\nthere may be more: {next}")),
                    None => {}
                }
            }
            Ok(())
        }
        Inbox::Show { id, consumer, full } => show::run(global, &database, store.as_ref(), &id, consumer, full).await,
        Inbox::Requeue { which, by } => act::run(global, &database, store.as_ref(), which, InboxAction::Requeue, by).await,
        Inbox::Skip { which, by } => act::run(global, &database, store.as_ref(), which, InboxAction::Skip, by).await,
    }
}

fn list(rows: &[InboxRow]) {
    let Some(first) = rows.first() else {
        output::say("no messages");
        return;
    };
    let wide = output::terminal_width().is_none_or(|w| w >= WIDE);
    let several = rows.iter().any(|r| r.consumer != first.consumer);
    if several && wide {
        output::print_table(table(rows, wide, several));
    } else {
        for (n, of_one) in rows.chunk_by(|a, b| a.consumer == b.consumer).enumerate() {
            let gap = if n == 0 { "" } else { "\n" };
            output::say(&format!("{gap}received by {}", of_one.first().map_or("".into(), |r| clean(&r.consumer))));
            output::print_table(table(of_one, wide, false));
        }
    }
}

/// A column that would be empty takes no room from the others. An id that is broken over two lines can't be copied, and it is
/// all that names the message: where there is no room, `show` tells the rest.
fn table(rows: &[InboxRow], wide: bool, several: bool) -> Table {
    let troubled = rows.iter().any(|r| r.last_error.is_some());
    let waiting = wide && rows.iter().any(|r| r.next_attempt_us.is_some());
    let typed = wide && rows.iter().any(|r| !r.kind.is_empty());
    let mut header = Vec::from(["message id", "status"]);
    header.extend(several.then_some("consumer"));
    header.extend(typed.then_some("type"));
    header.extend(wide.then_some("received"));
    header.push("tries");
    header.extend(waiting.then_some("next try"));
    header.extend(troubled.then_some("error"));
    let mut table = output::table(&header);
    for r in rows {
        let mut cells = vec![Cell::new(clean(&r.message_id)), output::status(r.status.as_str())];
        if several {
            cells.push(Cell::new(clean(&r.consumer)));
        }
        if typed {
            cells.push(Cell::new(clean(&r.kind)));
        }
        if wide {
            cells.push(Cell::new(output::relative(r.first_us / 1_000)));
        }
        let claims = if r.claims > 0 { format!("+{}", r.claims) } else { String::new() };
        cells.push(Cell::new(format!("{}{claims}", r.attempts)).set_alignment(CellAlignment::Right));
        if waiting {
            cells.push(Cell::new(r.next_attempt_us.map(|us| output::relative(us / 1_000)).unwrap_or_default()));
        }
        if troubled {
            cells.push(Cell::new(clean(r.last_error.as_deref().unwrap_or(""))));
        }
        let mut row = Row::from(cells);
        row.max_height(LINES);
        table.add_row(row);
    }
    let mut unbroken = vec!["STATUS", "RECEIVED", "TRIES", "NEXT TRY"];
    if rows.iter().all(|r| r.message_id.chars().count() <= COPIED) {
        unbroken.push("MESSAGE ID");
    }
    output::unbroken(&mut table, &unbroken);
    table
}

/// Text as one word of a shell's command line.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@%+,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        clean(&format!("'{}'", text.replace('\'', "'\\''"))).into_owned()
    }
}

/// The message that a person named; a failure unless it is exactly one.
async fn resolve(database: &Database, store: &dyn InboxStore, id: &str, consumers: &[String]) -> Result<InboxDetail, Failure> {
    let mut found = Vec::new();
    for consumer in consumers {
        found.extend(store.show(consumer, id).await.map_err(|e| database.failure(&e))?);
    }
    if found.len() > 1 {
        let names: Vec<String> = found.iter().map(|d| d.row.consumer.clone()).collect();
        return Err(Failure::not_so(format!(
            "several consumers have received {id:?}; choose one with --consumer: {}",
            names.join(", ")
        )));
    }
    found.pop().ok_or_else(|| match consumers {
        [one] => Failure::not_so(format!("consumer {one:?} in database {:?} has received no message {id:?}", database.name)),
        _ => Failure::not_so(format!("no consumer in database {:?} has received a message {id:?}", database.name)),
    })
}

/// The consumer that a person named, or all there are.
async fn named(database: &Database, store: &dyn InboxStore, consumer: Option<String>) -> Result<Vec<String>, Failure> {
    let all = received::consumers(store).await.map_err(|e| database.failure(&e))?;
    match consumer {
        None => Ok(all),
        Some(name) if all.contains(&name) => Ok(vec![name]),
        Some(name) => {
            let meant = crate::config::suggest(&name, all.iter().map(String::as_str)).map(|m| format!("; did you mean {m:?}?"));
            Err(Failure::not_so(format!("no consumer {name:?} has received anything{}", meant.unwrap_or_default())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_can_be_pasted() {
        assert_eq!(word("order-7"), "order-7");
        assert_eq!(word("it's; rm"), r"'it'\''s; rm'");
        assert_eq!(word(""), "''");
    }
}
