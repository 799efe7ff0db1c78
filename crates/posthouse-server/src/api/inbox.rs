//! Received messages.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use posthouse::store::{InboxAction, InboxFilter, InboxStatus};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::extract::{Asked, Body};
use super::messages::download;
use super::views::{After, BulkAction, Count, ReceivedChanged, ReceivedDetails, ReceivedMessages};
use super::{Answer, Problem};
use crate::http::{Served, Who};
use crate::ops::bulk::Bulk;
use crate::ops::{self, Counted, Refused, inbox, operator};

/// Which received messages.
#[derive(Debug, Clone, Default, Deserialize, IntoParams, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReceivedFilter {
    /// `SUCCESS`, `PENDING_RETRY`, `RETRYING` or `FAILED`.
    #[param(value_type = Option<String>)]
    #[schema(value_type = Option<String>)]
    status: Option<InboxStatus>,
    consumer: Option<String>,
    #[serde(rename = "type")]
    #[param(rename = "type")]
    kind: Option<String>,
    /// First seen at this time or later, milliseconds since 1970 UTC.
    since_ms: Option<i64>,
    /// First seen before this time, milliseconds since 1970 UTC.
    until_ms: Option<i64>,
    /// In message id, type, key, last error, source or payload, byte for byte. Hidden payloads are not searched.
    text: Option<String>,
    /// `next_after.consumer` of the page before.
    after_consumer: Option<String>,
    /// `next_after.message_id` of the page before.
    after_id: Option<String>,
    /// 1 to 1000; 50 by default.
    limit: Option<u32>,
    /// How long to search for what no index leads to, in milliseconds: 1 to 10000.
    within_ms: Option<u64>,
}

impl ReceivedFilter {
    fn asked(self) -> Result<InboxFilter, Refused> {
        let within = match self.within_ms {
            None => None,
            Some(ms @ 1..=10_000) => Some(Duration::from_millis(ms)),
            Some(ms) => return Err(Refused::field("within_ms", format!("must be 1 to 10000, not {ms}")).limit(10_000)),
        };
        let after = match (self.after_consumer, self.after_id) {
            (None, None) => None,
            (Some(consumer), Some(id)) => Some((consumer, id)),
            _ => return Err(Refused::field("after_consumer", "after_consumer and after_id go together")),
        };
        let filter = InboxFilter {
            consumer: self.consumer,
            status: self.status,
            kind: self.kind,
            first_after_us: self.since_ms.map(|ms| ms.saturating_mul(1_000)),
            first_before_us: self.until_ms.map(|ms| ms.saturating_mul(1_000)),
            text: self.text,
            sealed: false,
            within,
            after,
            limit: ops::page(self.limit, 50)?,
        };
        inbox::check(&filter)?;
        Ok(filter)
    }
}

/// Received messages, by consumer and message id.
#[utoipa::path(get, path = "/databases/{database}/inbox", tag = "inbox", params(("database" = String, Path), ReceivedFilter),
    responses((status = 200, body = ReceivedMessages), (status = "default", body = Problem)))]
pub(super) async fn list(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(filter): Asked<ReceivedFilter>,
) -> Answer<ReceivedMessages> {
    let page = inbox::list(&served.config, served.database(&database)?, &filter.asked()?).await?;
    Ok(Json(ReceivedMessages {
        messages: page.rows.into_iter().map(Into::into).collect(),
        next_after: page.next.map(|(consumer, message_id)| After { consumer, message_id }),
        stopped: page.stopped,
    }))
}

/// How many received messages a filter finds, exactly up to 100000.
#[utoipa::path(get, path = "/databases/{database}/inbox/count", tag = "inbox", params(("database" = String, Path), ReceivedFilter),
    responses((status = 200, body = Count), (status = "default", body = Problem)))]
pub(super) async fn count(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(filter): Asked<ReceivedFilter>,
) -> Answer<Count> {
    let store = served.database(&database)?.inbox()?;
    Ok(Json(inbox::count(&served.config, store.as_ref(), &filter.asked()?).await?.into()))
}

/// One received message.
#[utoipa::path(get, path = "/databases/{database}/inbox/{consumer}/{id}", tag = "inbox",
    params(("database" = String, Path), ("consumer" = String, Path), ("id" = String, Path, description = "Message id")),
    responses((status = 200, body = ReceivedDetails), (status = "default", body = Problem)))]
pub(super) async fn show(
    State(served): State<Arc<Served>>,
    Path((database, consumer, id)): Path<(String, String, String)>,
) -> Answer<ReceivedDetails> {
    let detail = inbox::show(served.database(&database)?, &consumer, &id).await?;
    Ok(Json(ReceivedDetails::of(&served.config, detail)))
}

/// The bytes of a payload, unless something in it is hidden. Needs the role operator.
#[utoipa::path(get, path = "/databases/{database}/inbox/{consumer}/{id}/payload", tag = "inbox",
    params(("database" = String, Path), ("consumer" = String, Path), ("id" = String, Path, description = "Message id")),
    responses((status = 200, content_type = "application/octet-stream"), (status = "default", body = Problem)))]
pub(super) async fn payload(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, consumer, id)): Path<(String, String, String)>,
) -> Result<Response, Refused> {
    operator(&who)?;
    let detail = inbox::show(served.database(&database)?, &consumer, &id).await?;
    let hidden = served.config.masks.of_received(&consumer).payload();
    let payload = detail.payload.ok_or_else(|| Refused::missing("the copy of a message is kept until it has had its effect"))?;
    download(hidden, payload, "received")
}

/// Received messages of one consumer.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NamedReceived {
    consumer: String,
    /// Message ids, up to 1000.
    ids: Vec<String>,
}

/// Runs FAILED messages (and ones that wait for a retry) again, now, with all their attempts.
#[utoipa::path(post, path = "/databases/{database}/inbox/requeue", tag = "inbox", params(("database" = String, Path)), request_body = NamedReceived,
    responses((status = 200, body = ReceivedChanged), (status = "default", body = Problem)))]
pub(super) async fn requeue(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(named, _): Body<NamedReceived>,
) -> Answer<ReceivedChanged> {
    let relay = served.database(&database)?;
    Ok(Json(inbox::act(relay, &who, &named.consumer, &named.ids, InboxAction::Requeue).await?.into()))
}

/// Gives messages up: FAILED, and not run again.
#[utoipa::path(post, path = "/databases/{database}/inbox/skip", tag = "inbox", params(("database" = String, Path)), request_body = NamedReceived,
    responses((status = 200, body = ReceivedChanged), (status = "default", body = Problem)))]
pub(super) async fn skip(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(named, _): Body<NamedReceived>,
) -> Answer<ReceivedChanged> {
    let relay = served.database(&database)?;
    Ok(Json(inbox::act(relay, &who, &named.consumer, &named.ids, InboxAction::Skip).await?.into()))
}

/// What to do with received messages.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum ReceivedVerb {
    Requeue,
    Skip,
}

/// An action on everything that a filter finds.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OnAllReceived {
    action: ReceivedVerb,
    /// Which; `status` is needed.
    filter: ReceivedFilter,
    /// What the count said, as it was agreed to.
    confirmed: Count,
}

/// Acts on all received messages that a filter finds, in the background.
#[utoipa::path(post, path = "/databases/{database}/inbox/bulk", tag = "inbox", params(("database" = String, Path)), request_body = OnAllReceived,
    responses((status = 202, body = BulkAction), (status = "default", body = Problem)))]
pub(super) async fn bulk(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(on, _): Body<OnAllReceived>,
) -> Result<(StatusCode, Json<BulkAction>), Refused> {
    operator(&who)?;
    let action = match on.action {
        ReceivedVerb::Requeue => InboxAction::Requeue,
        ReceivedVerb::Skip => InboxAction::Skip,
    };
    let confirmed = Counted { messages: on.confirmed.messages, more: on.confirmed.more };
    let bulk = Bulk::Inbox { filter: on.filter.asked()?, action };
    let progress = served.bulks.start(&served.config, served.database(&database)?, &who, bulk, confirmed)?;
    Ok((StatusCode::ACCEPTED, Json(progress.into())))
}
