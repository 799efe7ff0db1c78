//! Groups and their runs.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use posthouse::store::RunFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::Asked;
use super::views::{Done, Run};
use super::{Answer, Problem};
use crate::config::trigger_text;
use crate::http::{Served, Who};
use crate::ops::{self, Refused, groups};

/// A group of one database.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct GroupState {
    name: String,
    /// This configuration has it; otherwise only the database knows of it.
    configured: bool,
    houses: Option<String>,
    /// In words.
    trigger: Option<String>,
    paused_us: Option<i64>,
    /// The last time at which its trigger was due and somebody saw to it.
    fired_us: Option<i64>,
    next_due_us: Option<i64>,
    /// Instances that are running it.
    running: usize,
    /// The last run that ended.
    last: Option<Run>,
}

/// The groups of one database.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Groups {
    groups: Vec<GroupState>,
}

/// Groups, when they are due, and what their last run came to.
#[utoipa::path(get, path = "/databases/{database}/groups", tag = "groups", params(("database" = String, Path)),
    responses((status = 200, body = Groups), (status = "default", body = Problem)))]
pub(super) async fn list(State(served): State<Arc<Served>>, Path(database): Path<String>) -> Answer<Groups> {
    let found = groups::list(&served.config, served.database(&database)?).await?;
    let told = |line: groups::Line| GroupState {
        running: line.running(),
        last: line.last().cloned().map(Into::into),
        configured: line.group.is_some(),
        houses: line.group.as_ref().map(|g| g.houses.to_string()),
        trigger: line.group.as_ref().map(|g| trigger_text(&g.trigger)),
        paused_us: line.row.paused_us,
        fired_us: line.row.fired_us,
        next_due_us: line.next_due_us,
        name: line.name,
    };
    Ok(Json(Groups { groups: found.into_iter().map(told).collect() }))
}

/// What became of a request for a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Requested {
    /// Its runs are listed by this number (`request`).
    request: i64,
}

/// Asks all instances for a run of a group, now.
#[utoipa::path(post, path = "/databases/{database}/groups/{group}/run", tag = "groups", params(("database" = String, Path), ("group" = String, Path)),
    responses((status = 202, body = Requested), (status = "default", body = Problem)))]
pub(super) async fn run(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, group)): Path<(String, String)>,
) -> Result<(StatusCode, Json<Requested>), Refused> {
    let request = groups::run(&served.config, served.database(&database)?, &who, &group).await?;
    Ok((StatusCode::ACCEPTED, Json(Requested { request })))
}

/// Tells all instances to stop the runs of a group that are going; its trigger goes on.
#[utoipa::path(post, path = "/databases/{database}/groups/{group}/stop", tag = "groups", params(("database" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = Done), (status = "default", body = Problem)))]
pub(super) async fn stop(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, group)): Path<(String, String)>,
) -> Answer<Done> {
    groups::stop(&served.config, served.database(&database)?, &who, &group).await?;
    Ok(Json(Done { changed: true }))
}

/// Pauses a group: its trigger does nothing until it is resumed.
#[utoipa::path(post, path = "/databases/{database}/groups/{group}/pause", tag = "groups", params(("database" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = Done), (status = "default", body = Problem)))]
pub(super) async fn pause(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, group)): Path<(String, String)>,
) -> Answer<Done> {
    let changed = groups::pause(&served.config, served.database(&database)?, &who, &group, true).await?;
    Ok(Json(Done { changed }))
}

/// Lets a paused group go on.
#[utoipa::path(post, path = "/databases/{database}/groups/{group}/resume", tag = "groups", params(("database" = String, Path), ("group" = String, Path)),
    responses((status = 200, body = Done), (status = "default", body = Problem)))]
pub(super) async fn resume(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, group)): Path<(String, String)>,
) -> Answer<Done> {
    let changed = groups::pause(&served.config, served.database(&database)?, &who, &group, false).await?;
    Ok(Json(Done { changed }))
}

/// Which runs.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RunsAsked {
    /// Only this group.
    group: Option<String>,
    /// Only this request and the runs it led to.
    request: Option<i64>,
    /// Ids below this one: `next_before` of the page before.
    before: Option<i64>,
    /// 1 to 1000; 50 by default.
    limit: Option<u32>,
}

/// A page of runs, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Runs {
    runs: Vec<Run>,
    next_before: Option<i64>,
}

/// Runs of groups, newest first.
#[utoipa::path(get, path = "/databases/{database}/runs", tag = "groups", params(("database" = String, Path), RunsAsked),
    responses((status = 200, body = Runs), (status = "default", body = Problem)))]
pub(super) async fn runs(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(asked): Asked<RunsAsked>,
) -> Answer<Runs> {
    let limit = ops::page(asked.limit, 50)?;
    let filter = RunFilter { group: asked.group, request: asked.request, before: asked.before, limit };
    let rows = served.database(&database)?.people.runs().list(&filter).await.map_err(Refused::from)?;
    let next_before = rows.last().filter(|_| rows.len() == limit as usize).map(|last| last.id);
    Ok(Json(Runs { runs: rows.into_iter().map(Into::into).collect(), next_before }))
}
