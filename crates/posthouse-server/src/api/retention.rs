//! How retention stands: partitions of the log, those that went, files of the archive.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use posthouse::store::{ArchiveRow, Partition, Retired};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::Asked;
use super::{Answer, Problem};
use crate::config::redact_url;
use crate::http::Served;
use crate::ops;
use crate::ops::retention::{fate, standing};

/// A partition of the log.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct PartitionState {
    number: i64,
    /// The first id that belongs into it.
    low: i64,
    /// The first id that belongs into the next one.
    high: i64,
    /// As the database estimates them; null where it has no idea.
    rows: Option<i64>,
    bytes: Option<i64>,
    /// Null when it is empty.
    newest_ms: Option<i64>,
    /// `goes`, `current` or `stays`.
    next: &'static str,
}

/// A partition on its way out, or one that went.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RetiredState {
    number: i64,
    low: i64,
    high: i64,
    /// `FOUND`, `DETACHED`, `KEPT`, `ARCHIVED`, `VERIFIED` or `DROPPED`.
    step: &'static str,
    /// Messages of it that weren't delivered, and were kept.
    kept: i64,
    /// Messages that went with it; 0 as long as they aren't counted.
    messages: i64,
    found_ms: i64,
    step_ms: i64,
}

/// A file of the archive.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct FileState {
    id: i64,
    location: String,
    /// The ids of its first and last message.
    low: i64,
    high: i64,
    messages: i64,
    bytes: i64,
    sha256: String,
    /// When it was written and read back.
    written_ms: Option<i64>,
    /// When its messages had been removed from the database.
    removed_ms: Option<i64>,
}

/// How retention stands in a database.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RetentionState {
    /// Whether anything is ever removed.
    configured: bool,
    /// How long delivered messages stay, in seconds; null: for ever.
    sent_seconds: Option<u64>,
    /// Where messages are written before they go, without secrets.
    archive: Option<String>,
    /// Null where the log isn't partitioned.
    partitions: Option<Vec<PartitionState>>,
    /// The newest first.
    retired: Vec<RetiredState>,
    /// The newest first.
    files: Vec<FileState>,
    /// `before` of the next page of files; null when this one was not full.
    next_before: Option<i64>,
}

/// Which page of the files.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RetentionAsked {
    /// Files below this one: `next_before` of the page before.
    before: Option<i64>,
    /// Partitions that went, and files: 1 to 1000; 50 by default.
    limit: Option<u32>,
}

fn retired(r: Retired) -> RetiredState {
    RetiredState {
        number: r.number,
        low: r.low,
        high: r.high,
        step: r.step.as_str(),
        kept: r.survivors,
        messages: r.amount,
        found_ms: r.found_ms,
        step_ms: r.step_ms,
    }
}

fn file(a: ArchiveRow) -> FileState {
    FileState {
        id: a.id,
        location: redact_url(&a.location),
        low: a.low,
        high: a.high,
        messages: a.amount,
        bytes: a.bytes,
        sha256: a.sha256,
        written_ms: a.written_ms,
        removed_ms: a.removed_ms,
    }
}

/// Partitions of the log, those that went, and the files of the archive.
#[utoipa::path(get, path = "/databases/{database}/retention", tag = "system", params(("database" = String, Path), RetentionAsked),
    responses((status = 200, body = RetentionState), (status = "default", body = Problem)))]
pub(super) async fn standing_of(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(asked): Asked<RetentionAsked>,
) -> Answer<RetentionState> {
    let limit = ops::page(asked.limit, 50)?;
    let database = served.database(&database)?;
    let settings = database.database.retention_settings();
    let sent = settings.and_then(|s| s.sent);
    let found = standing(&*database.people, limit, asked.before).await?;
    let part = |p: Partition| PartitionState {
        next: fate(&p, sent),
        number: p.number,
        low: p.low,
        high: p.high,
        rows: p.rows,
        bytes: p.bytes,
        newest_ms: p.newest_ms,
    };
    Ok(Json(RetentionState {
        configured: settings.is_some(),
        sent_seconds: sent.map(|d| d.as_secs()),
        archive: settings.and_then(|s| s.archive.as_deref()).map(redact_url),
        partitions: found.partitions.map(|all| all.into_iter().map(part).collect()),
        retired: found.retired.into_iter().map(retired).collect(),
        files: found.archives.into_iter().map(file).collect(),
        next_before: found.next,
    }))
}
