//! Databases, destinations, houses, instances, the audit log, and who asks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, State};
use posthouse::store::AuditFilter;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::extract::Asked;
use super::views::AuditLine;
use super::{Answer, Problem};
use crate::config::redact_url;
use crate::health;
use crate::http::{By, Role, Served, Who};
use crate::ops::{self, Refused};

/// Who asks.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Me {
    /// As it stands in the audit log.
    name: String,
    role: Role,
    by: By,
    /// To be sent as `X-CSRF-Token` with every change; empty where a token is sent.
    csrf: String,
}

/// Who asks, by this server's judgement.
#[utoipa::path(get, path = "/whoami", tag = "system", responses((status = 200, body = Me), (status = "default", body = Problem)))]
pub(super) async fn whoami(who: Who) -> Json<Me> {
    Json(Me { name: who.name, role: who.role, by: who.by, csrf: who.csrf })
}

/// A database: one set of tables.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DatabaseState {
    name: String,
    /// Without secrets.
    url: String,
    /// `postgres`, `mysql` or `sqlite`.
    kind: String,
    /// A relay of this process is running for it.
    relaying: bool,
}

/// All databases.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Databases {
    databases: Vec<DatabaseState>,
}

/// The databases of this server.
#[utoipa::path(get, path = "/databases", tag = "system", responses((status = 200, body = Databases), (status = "default", body = Problem)))]
pub(super) async fn databases(State(served): State<Arc<Served>>) -> Json<Databases> {
    let told = served.databases.iter().map(|d| DatabaseState {
        name: d.name.clone(),
        url: d.database.shown.clone(),
        kind: d.people.kind().into(),
        relaying: d.is_running(),
    });
    Json(Databases { databases: told.collect() })
}

/// Unfinished messages of one destination and status.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Waiting {
    destination: String,
    status: String,
    messages: i64,
    oldest_ms: i64,
}

/// What the relay of this process has done since it started.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Counters {
    instance: Option<String>,
    delivered: u64,
    retried: u64,
    failed: u64,
    unavailable: u64,
    houses: u32,
    in_flight: u64,
    in_memory: u64,
    leases_lost: u64,
    database_error: Option<String>,
}

/// How a database stands.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Overview {
    /// Unfinished messages; null while they can't be counted.
    backlog: Option<Vec<Waiting>>,
    /// How old that count is.
    backlog_age_ms: Option<u64>,
    /// Null while no relay of this process runs for it.
    relay: Option<Counters>,
}

/// Unfinished messages, and what the relay has done.
#[utoipa::path(get, path = "/databases/{database}/overview", tag = "system", params(("database" = String, Path)),
    responses((status = 200, body = Overview), (status = "default", body = Problem)))]
pub(super) async fn overview(State(served): State<Arc<Served>>, Path(database): Path<String>) -> Answer<Overview> {
    let relay = served.database(&database)?;
    let (backlog, age) = relay.backlog().await.unzip();
    let waiting = |b: posthouse::store::Backlog| Waiting {
        destination: redact_url(&b.destination),
        status: b.status,
        messages: b.messages,
        oldest_ms: b.oldest_ms,
    };
    let counters = relay.stats().map(|s| Counters {
        instance: s.instance,
        delivered: s.delivered,
        retried: s.retried,
        failed: s.failed,
        unavailable: s.unavailable,
        houses: s.houses,
        in_flight: s.in_flight,
        in_memory: s.in_memory,
        leases_lost: s.leases_lost,
        database_error: s.database_error,
    });
    Ok(Json(Overview {
        backlog: backlog.map(|all| all.into_iter().map(waiting).collect()),
        backlog_age_ms: age.map(|age| age.as_millis() as u64),
        relay: counters,
    }))
}

/// How a destination stands, as the relay of this process sees it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DestinationState {
    destination: String,
    /// Where its route leads, without secrets.
    to: String,
    /// `ok`, `blocked` or `down`.
    state: &'static str,
    down_seconds: Option<f64>,
    error: Option<String>,
    in_flight: u64,
    waiting: u64,
    delivered: u64,
    last_confirm_seconds: Option<f64>,
}

/// Destinations by database; null where no relay of this process runs.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct DestinationStates {
    databases: BTreeMap<String, Option<Vec<DestinationState>>>,
}

/// How destinations stand, those that need a person first.
#[utoipa::path(get, path = "/destinations", tag = "system", responses((status = 200, body = DestinationStates), (status = "default", body = Problem)))]
pub(super) async fn destinations(State(served): State<Arc<Served>>) -> Json<DestinationStates> {
    let told = |h: health::Health| DestinationState {
        destination: h.destination,
        to: h.to,
        state: h.state.word(),
        down_seconds: h.down_seconds,
        error: h.error,
        in_flight: h.in_flight,
        waiting: h.waiting,
        delivered: h.delivered,
        last_confirm_seconds: h.last_confirm_seconds,
    };
    let databases = served.databases.iter().map(|d| {
        let all = d.stats().map(|stats| health::all(&stats, &served.routes, Instant::now()).into_iter().map(told).collect());
        (d.name.clone(), all)
    });
    Json(DestinationStates { databases: databases.collect() })
}

/// A house.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct HouseState {
    house: i32,
    owner: Option<String>,
    /// The owner's lease is valid.
    alive: bool,
    epoch: i64,
    pending: i64,
}

/// All houses of a database.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct HouseStates {
    houses: Vec<HouseState>,
}

/// Houses: who owns them, and what waits in them.
#[utoipa::path(get, path = "/databases/{database}/houses", tag = "system", params(("database" = String, Path)),
    responses((status = 200, body = HouseStates), (status = "default", body = Problem)))]
pub(super) async fn houses(State(served): State<Arc<Served>>, Path(database): Path<String>) -> Answer<HouseStates> {
    let rows = served.database(&database)?.people.houses().await.map_err(Refused::from)?;
    let told = rows.into_iter().map(|h| HouseState {
        house: h.house,
        owner: h.owner,
        alive: h.alive,
        epoch: h.epoch,
        pending: h.pending,
    });
    Ok(Json(HouseStates { houses: told.collect() }))
}

/// A live instance.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct InstanceState {
    instance: String,
    /// Houses it owns.
    houses: Vec<i32>,
    /// Pending rows in them.
    pending: i64,
}

/// Live instances of a database.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct InstanceStates {
    instances: Vec<InstanceState>,
}

/// Instances whose lease is valid, and what they own.
#[utoipa::path(get, path = "/databases/{database}/instances", tag = "system", params(("database" = String, Path)),
    responses((status = 200, body = InstanceStates), (status = "default", body = Problem)))]
pub(super) async fn instances(State(served): State<Arc<Served>>, Path(database): Path<String>) -> Answer<InstanceStates> {
    let store = &served.database(&database)?.people;
    let live = store.runs().watch().await.map_err(Refused::from)?.live;
    let houses = store.houses().await.map_err(Refused::from)?;
    let told = |instance: String| {
        let own = || houses.iter().filter(|h| h.owner.as_ref() == Some(&instance));
        InstanceState { houses: own().map(|h| h.house).collect(), pending: own().map(|h| h.pending).sum(), instance }
    };
    let told = live.into_iter().map(told).collect();
    Ok(Json(InstanceStates { instances: told }))
}

/// Which lines of the audit log.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditAsked {
    /// Only what this person did.
    actor: Option<String>,
    /// Only this action.
    action: Option<String>,
    /// Only about the message with this row id.
    row_id: Option<i64>,
    /// Lines below this one: `next_before` of the page before.
    before: Option<i64>,
    /// 1 to 1000; 50 by default.
    limit: Option<u32>,
}

/// A page of the audit log, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AuditLines {
    lines: Vec<AuditLine>,
    /// `before` of the next page; null when nothing lies behind this one.
    next_before: Option<i64>,
    /// The search came to its limit before the page was full; the next page goes on where it stopped.
    stopped: bool,
}

/// Who did what, newest first.
#[utoipa::path(get, path = "/databases/{database}/audit", tag = "system", params(("database" = String, Path), AuditAsked),
    responses((status = 200, body = AuditLines), (status = "default", body = Problem)))]
pub(super) async fn audit(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(asked): Asked<AuditAsked>,
) -> Answer<AuditLines> {
    let filter = AuditFilter {
        actor: asked.actor,
        action: asked.action,
        row_id: asked.row_id,
        before: asked.before,
        limit: ops::page(asked.limit, 50)?,
    };
    ops::plain("actor", filter.actor.as_deref())?;
    ops::plain("action", filter.action.as_deref())?;
    let page = ops::audit::list(served.database(&database)?, &filter).await?;
    Ok(Json(AuditLines { lines: page.rows.into_iter().map(Into::into).collect(), next_before: page.next, stopped: page.stopped }))
}
