//! Who did what.

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;
use posthouse::store::{AuditFilter, AuditRow};
use serde::Deserialize;

use super::view::{Frame, Href, Oops, Place, Trail, When, number, page as shown_page, short, shown, stopped};
use super::{ROWS, Shared, asked, first_of};
use crate::http::Who;
use crate::ops;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    db: String,
    actor: String,
    action: String,
    row: String,
    before: String,
    trail: String,
}

#[derive(Template)]
#[template(path = "audit.html")]
struct Audit {
    frame: Frame,
    error: Option<String>,
    actor: String,
    action: String,
    row: String,
    narrowed: bool,
    lines: Vec<Line>,
    stopped: Option<&'static str>,
    newer: Option<String>,
    older: Option<String>,
}

/// A line of the audit log.
pub(super) struct Line {
    pub(super) at: When,
    pub(super) actor: String,
    pub(super) action: String,
    /// The message's row, and its page.
    pub(super) message: Option<(i64, String)>,
    pub(super) amount: Option<String>,
    pub(super) detail: Option<String>,
}

impl Line {
    pub(super) fn of(row: &AuditRow, db: &str) -> Self {
        Self {
            at: When::ms(row.at_ms),
            actor: shown(&row.actor),
            action: shown(&row.action),
            message: row.row_id.map(|id| (id, Href::new(&format!("/messages/{id}")).add("db", db).done())),
            amount: row.amount.map(number),
            detail: row.detail.as_deref().map(|d| short(&crate::config::redact_url(d), 300)),
        }
    }
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let some = |text: &str| Some(text.trim().to_owned()).filter(|t| !t.is_empty());
    let filter = AuditFilter {
        actor: some(&query.actor),
        action: some(&query.action),
        row_id: query.row.trim().parse().ok(),
        before: query.before.parse().ok(),
        limit: ROWS,
    };
    let href = |before: &str, trail: &str| {
        let href = Href::new("/audit").add("db", &query.db).add("actor", &query.actor).add("action", &query.action);
        href.add("row", &query.row).add("before", before).add("trail", trail).done()
    };
    let trail = Trail::parse(&query.trail);
    let mut page = Audit {
        frame: Frame::new(&served, &who, Place::Audit, "Audit log", Some(&database.name), false),
        error: None,
        actor: query.actor.clone(),
        action: query.action.clone(),
        row: query.row.clone(),
        narrowed: [&query.actor, &query.action, &query.row].iter().any(|f| !f.is_empty()),
        lines: Vec::new(),
        stopped: None,
        newer: trail.back().map(|(before, trail)| href(&before, &trail)),
        older: None,
    };
    match asked(database, ops::audit::list(database, &filter)).await {
        Ok(listed) => {
            page.older = listed.next.map(|next| href(&next.to_string(), &trail.onward(&query.before)));
            page.stopped = stopped(&listed);
            page.lines = listed.rows.iter().map(|row| Line::of(row, &query.db)).collect();
        }
        Err(e) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}
