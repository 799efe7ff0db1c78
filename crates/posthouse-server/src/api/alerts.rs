//! Alerts and silences.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::extract::Body;
use super::views::Done;
use super::{Answer, Problem};
use crate::config::ALL_ALERTS;
use crate::http::{Served, Who};
use crate::ops::alerts;

/// Something that isn't fine.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Alert {
    rule: String,
    /// What it is about within the database: a destination, a consumer, a queue, an instance. Empty: the database itself.
    subject: String,
    /// False: it has not been so for long enough yet.
    firing: bool,
    since_us: i64,
    value: f64,
    threshold: f64,
    detail: Option<String>,
    /// When people were told last.
    told_us: Option<i64>,
    silenced: bool,
}

/// Alerts that nobody is told about for a while.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Silence {
    /// `all` stands for all rules.
    rule: String,
    /// Empty: all of the rule.
    subject: String,
    since_us: i64,
    until_us: i64,
    /// Who said so.
    actor: String,
    reason: String,
}

/// How a database stands.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Alerts {
    /// The instance that judges; null while none does.
    judge: Option<String>,
    alerts: Vec<Alert>,
    silences: Vec<Silence>,
}

/// What isn't fine, and what is silenced.
#[utoipa::path(get, path = "/databases/{database}/alerts", tag = "alerts", params(("database" = String, Path)),
    responses((status = 200, body = Alerts), (status = "default", body = Problem)))]
pub(super) async fn list(State(served): State<Arc<Served>>, Path(database): Path<String>) -> Answer<Alerts> {
    let watch = served.database(&database)?.people.alerts().watch().await?;
    let silenced = |rule: &str, subject: &str| watch.silences.iter().any(|s| s.covers(rule, subject));
    let alert = |row: &posthouse::store::AlertRow| Alert {
        silenced: silenced(&row.rule, &row.subject),
        rule: row.rule.clone(),
        subject: row.subject.clone(),
        firing: row.firing,
        since_us: row.since_us,
        value: row.value,
        threshold: row.threshold,
        detail: row.detail.clone(),
        told_us: row.told_us,
    };
    let silence = |s: &posthouse::store::AlertSilence| Silence {
        rule: if s.rule.is_empty() { ALL_ALERTS.to_owned() } else { s.rule.clone() },
        subject: s.subject.clone(),
        since_us: s.since_us,
        until_us: s.until_us,
        actor: s.actor.clone(),
        reason: s.reason.clone(),
    };
    Ok(Json(Alerts {
        alerts: watch.alerts.iter().map(alert).collect(),
        silences: watch.silences.iter().map(silence).collect(),
        judge: watch.judge.clone(),
    }))
}

/// Which alerts to silence.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Silencing {
    /// A rule, or `all`.
    rule: String,
    /// Without it all of the rule.
    #[serde(default)]
    subject: String,
    /// How long, in seconds: 1 to a year.
    seconds: u64,
    #[serde(default)]
    reason: String,
}

/// Tells nobody about alerts for a while.
#[utoipa::path(post, path = "/databases/{database}/alerts/silence", tag = "alerts", params(("database" = String, Path)), request_body = Silencing,
    responses((status = 200, body = Done), (status = "default", body = Problem)))]
pub(super) async fn silence(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(asked, _): Body<Silencing>,
) -> Answer<Done> {
    let about = (asked.rule.as_str(), asked.subject.as_str());
    let time = Duration::from_secs(asked.seconds);
    alerts::silence(&served.config, served.database(&database)?, &who, about, time, &asked.reason).await?;
    Ok(Json(Done { changed: true }))
}

/// Which silence to end.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Unsilencing {
    /// A rule, or `all`.
    rule: String,
    #[serde(default)]
    subject: String,
}

/// Ends a silence.
#[utoipa::path(post, path = "/databases/{database}/alerts/unsilence", tag = "alerts", params(("database" = String, Path)), request_body = Unsilencing,
    responses((status = 200, body = Done), (status = "default", body = Problem)))]
pub(super) async fn unsilence(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(asked, _): Body<Unsilencing>,
) -> Answer<Done> {
    let changed = alerts::unsilence(served.database(&database)?, &who, &asked.rule, &asked.subject).await?;
    Ok(Json(Done { changed }))
}
