//! `posthouse messages show`.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment};
use posthouse::store::{MessageDetail, Store};
use serde::Serialize;

use super::resolve;
use crate::cli::Global;
use crate::commands::payload;
use crate::config::redact_url;
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean};

pub(super) async fn run(global: &Global, database: &Database, store: &dyn Store, name: &str, full: bool) -> Result<(), Failure> {
    let ids = resolve(database, store, name).await?;
    let [id] = ids[..] else {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        return Err(Failure::not_so(format!("several messages have the id {name:?}; choose a row: {}", ids.join(", "))));
    };
    let Some(detail) = store.show(id).await.map_err(|e| database.failure(&e))? else {
        return Err(Failure::not_so(format!("message {name:?} has just gone")));
    };
    if global.json {
        output::json(&Document { detail: &detail, payload: payload::document(&detail.payload, full) });
    } else {
        for_people(&detail, full);
    }
    Ok(())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    detail: &'a MessageDetail,
    #[serde(flatten)]
    payload: payload::Document<'a>,
}

fn for_people(detail: &MessageDetail, full: bool) {
    let row = &detail.row;
    let line = |name: &str, value: &str| output::say(&format!("{:<14}{value}", format!("{name}:")));
    line("row", &row.id.to_string());
    line("message id", &clean(&row.message_id));
    line("status", &row.status);
    line("destination", &clean(&redact_url(&row.destination)));
    if !row.kind.is_empty() {
        line("type", &clean(&row.kind));
    }
    if let Some(key) = &row.key {
        line("key", &clean(key));
    }
    line("house", &row.house.to_string());
    line("created", &output::moment(row.created_at_ms));
    if let Some((at, by)) = &detail.delivered {
        line("delivered", &format!("{} by {}", output::moment(*at), clean(by)));
    }
    if let Some(next) = row.next_attempt_ms {
        line("next try", &output::moment(next));
    }
    line("attempts", &row.attempts.to_string());
    if row.claims > 0 {
        line("claims", &format!("{} (tries during which the process died)", row.claims));
    }
    if let Some(error) = &row.last_error {
        line("last error", &clean(error));
    }
    if let Some(headers) = &detail.headers {
        payload::say_headers(headers);
    }
    payload::say(&detail.content_type, &detail.payload, full);
    history(detail);
}

fn history(detail: &MessageDetail) {
    if detail.history.is_empty() {
        return;
    }
    output::say("\nattempts");
    let mut table = output::table(&["#", "when", "took", "outcome", "error", "by"]);
    for a in &detail.history {
        let took = output::span(Duration::from_millis(u64::try_from(a.took_ms).unwrap_or(0)));
        let error = match &a.response {
            Some(response) => format!("{}\nresponse: {}", clean(&a.error), clean(response)),
            None => clean(&a.error).into_owned(),
        };
        table.add_row(vec![
            Cell::new(a.attempt).set_alignment(CellAlignment::Right),
            Cell::new(output::relative(a.at_ms)),
            Cell::new(took),
            Cell::new(clean(&a.outcome)),
            Cell::new(error),
            Cell::new(clean(&a.instance)),
        ]);
    }
    output::print_table(table);
}
