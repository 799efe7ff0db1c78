//! Retention: which partitions of the log go, which went, and the files of the archive.

use std::time::Duration;

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;
use posthouse::RetentionSettings;
use posthouse::store::{ArchiveRow, Partition, Retired};
use serde::Deserialize;

use super::view::{Badge, Frame, Href, Oops, Place, Trail, When, about, badge, number, page as shown_page, shown};
use super::{ROWS, Shared, asked, first_of};
use crate::config::redact_url;
use crate::http::Who;
use crate::ops::retention::{fate, standing, step, term};
use crate::output;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    db: String,
    before: String,
    trail: String,
}

#[derive(Template)]
#[template(path = "retention.html")]
struct Page {
    frame: Frame,
    error: Option<String>,
    /// How long things stay; empty: nothing is removed.
    terms: Vec<(&'static str, String)>,
    archive: Option<String>,
    /// None where the log isn't partitioned.
    partitions: Option<Vec<Part>>,
    retired: Vec<Gone>,
    files: Vec<File>,
    newer: Option<String>,
    older: Option<String>,
}

struct Part {
    number: i64,
    low: String,
    high: String,
    rows: String,
    size: String,
    newest: Option<When>,
    fate: Badge,
}

struct Gone {
    number: i64,
    low: String,
    high: String,
    amount: String,
    kept: String,
    step: Badge,
    at: When,
}

struct File {
    location: String,
    amount: String,
    size: String,
    written: Option<When>,
    removed: Option<When>,
    sha256: String,
}

fn terms(settings: &RetentionSettings) -> Vec<(&'static str, String)> {
    vec![
        ("Delivered messages", term(settings.sent)),
        ("Receipts", term(settings.receipts)),
        ("Failed attempts", term(settings.attempts)),
        ("Dedup keys", term(settings.dedup)),
        ("Audit log", term(settings.audit)),
    ]
}

fn part(p: &Partition, sent: Option<Duration>) -> Part {
    Part {
        number: p.number,
        low: number(p.low),
        high: number(p.high - 1),
        rows: p.rows.map_or_else(|| "?".into(), about),
        size: p.bytes.map(output::bytes).unwrap_or_default(),
        newest: p.newest_ms.map(When::ms),
        fate: badge(fate(p, sent)),
    }
}

fn gone(r: &Retired) -> Gone {
    Gone {
        number: r.number,
        low: number(r.low),
        high: number(r.high - 1),
        amount: number(r.amount),
        kept: number(r.survivors),
        step: badge(&step(r.step)),
        at: When::ms(r.step_ms),
    }
}

fn file(a: &ArchiveRow) -> File {
    File {
        location: shown(&redact_url(&a.location)),
        amount: number(a.amount),
        size: output::bytes(a.bytes),
        written: a.written_ms.map(When::ms),
        removed: a.removed_ms.map(When::ms),
        sha256: shown(&a.sha256),
    }
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let settings = database.database.retention_settings();
    let href =
        |before: &str, trail: &str| Href::new("/retention").add("db", &query.db).add("before", before).add("trail", trail).done();
    let trail = Trail::parse(&query.trail);
    let mut page = Page {
        frame: Frame::new(&served, &who, Place::Retention, "Retention", Some(&database.name), false),
        error: None,
        terms: settings.map(terms).unwrap_or_default(),
        archive: settings.and_then(|s| s.archive.as_deref()).map(|to| shown(&redact_url(to))),
        partitions: None,
        retired: Vec::new(),
        files: Vec::new(),
        newer: trail.back().map(|(before, trail)| href(&before, &trail)),
        older: None,
    };
    match asked(database, standing(&*database.people, ROWS, query.before.parse().ok())).await {
        Ok(found) => {
            let sent = settings.and_then(|s| s.sent);
            page.partitions = found.partitions.map(|all| all.iter().map(|p| part(p, sent)).collect());
            page.retired = found.retired.iter().map(gone).collect();
            page.older = found.next.map(|next| href(&next.to_string(), &trail.onward(&query.before)));
            page.files = found.archives.iter().map(file).collect();
        }
        Err(e) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}
