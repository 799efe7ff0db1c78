//! Messages of the outbox.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use posthouse::store::{Action, MessageFilter, MessageStatus};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use super::extract::{Asked, Body};
use super::views::{BulkAction, Changed, Count, MessageDetails, Messages};
use super::{Answer, Problem};
use crate::http::{Served, Who};
use crate::ops::bulk::Bulk;
use crate::ops::{self, Counted, Refusal, Refused, messages, operator};

/// Which messages.
#[derive(Debug, Clone, Default, Deserialize, IntoParams, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Filter {
    /// `PENDING`, `SENDING`, `SENT` or `FAILED`.
    #[param(value_type = Option<String>)]
    #[schema(value_type = Option<String>)]
    status: Option<MessageStatus>,
    /// Effective destination.
    destination: Option<String>,
    key: Option<String>,
    message_id: Option<String>,
    /// Created at this time or later, milliseconds since 1970 UTC.
    since_ms: Option<i64>,
    /// Created before this time, milliseconds since 1970 UTC.
    until_ms: Option<i64>,
    /// In message id, key, type, destination, last error or payload, byte for byte. Hidden payloads are not searched.
    text: Option<String>,
    /// Row ids below this one: `next_before` of the page before.
    before: Option<i64>,
    /// 1 to 1000; 50 by default.
    limit: Option<u32>,
    /// How long to search for what no index leads to, in milliseconds: 1 to 10000.
    within_ms: Option<u64>,
}

impl Filter {
    fn asked(self) -> Result<MessageFilter, Refused> {
        let within = match self.within_ms {
            None => None,
            Some(ms @ 1..=10_000) => Some(Duration::from_millis(ms)),
            Some(ms) => return Err(Refused::field("within_ms", format!("must be 1 to 10000, not {ms}")).limit(10_000)),
        };
        let filter = MessageFilter {
            status: self.status,
            destination: self.destination,
            key: self.key,
            message_id: self.message_id,
            created_after_ms: self.since_ms,
            created_before_ms: self.until_ms,
            text: self.text,
            sealed: Vec::new(),
            within,
            before: self.before,
            limit: ops::page(self.limit, 50)?,
        };
        messages::check(&filter)?;
        Ok(filter)
    }
}

/// Messages, newest first.
#[utoipa::path(get, path = "/databases/{database}/messages", tag = "messages", params(("database" = String, Path), Filter),
    responses((status = 200, body = Messages), (status = "default", body = Problem)))]
pub(super) async fn list(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(filter): Asked<Filter>,
) -> Answer<Messages> {
    let page = messages::list(&served.config, served.database(&database)?, &filter.asked()?).await?;
    Ok(Json(Messages {
        messages: page.rows.into_iter().map(Into::into).collect(),
        next_before: page.next,
        stopped: page.stopped,
    }))
}

/// How many messages a filter finds, exactly up to 100000.
#[utoipa::path(get, path = "/databases/{database}/messages/count", tag = "messages", params(("database" = String, Path), Filter),
    responses((status = 200, body = Count), (status = "default", body = Problem)))]
pub(super) async fn count(
    State(served): State<Arc<Served>>,
    Path(database): Path<String>,
    Asked(filter): Asked<Filter>,
) -> Answer<Count> {
    let relay = served.database(&database)?;
    let counted = messages::count(&served.config, relay.people.as_ref(), &filter.asked()?).await?;
    Ok(Json(counted.into()))
}

/// One message, with payload, headers and attempts.
#[utoipa::path(get, path = "/databases/{database}/messages/{id}", tag = "messages",
    params(("database" = String, Path), ("id" = i64, Path, description = "Row id")),
    responses((status = 200, body = MessageDetails), (status = "default", body = Problem)))]
pub(super) async fn show(
    State(served): State<Arc<Served>>,
    Path((database, id)): Path<(String, String)>,
) -> Answer<MessageDetails> {
    let detail = messages::show(served.database(&database)?, row(&id)?).await?;
    Ok(Json(MessageDetails::of(&served.config, detail)))
}

/// The bytes of a payload, unless something in it is hidden. Needs the role operator.
#[utoipa::path(get, path = "/databases/{database}/messages/{id}/payload", tag = "messages",
    params(("database" = String, Path), ("id" = i64, Path, description = "Row id")),
    responses((status = 200, content_type = "application/octet-stream"), (status = "default", body = Problem)))]
pub(super) async fn payload(
    State(served): State<Arc<Served>>,
    who: Who,
    Path((database, id)): Path<(String, String)>,
) -> Result<Response, Refused> {
    operator(&who)?;
    let detail = messages::show(served.database(&database)?, row(&id)?).await?;
    let hidden = ops::payload::hidden_of(&served.config, &detail.row.destination, &detail.published_to);
    download(hidden.payload(), detail.payload, &format!("message-{}", detail.row.id))
}

/// A payload as a file: a browser saves it and shows nothing of it.
pub(super) fn download(hidden: bool, payload: Vec<u8>, name: &str) -> Result<Response, Refused> {
    if hidden {
        let text = "the configuration hides this payload or values in it (masks), so it can't be had as it is";
        return Err(Refused::new(Refusal::Forbidden, text));
    }
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_DISPOSITION, format!("attachment; filename=\"{name}.bin\"")),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; sandbox".to_owned()),
    ];
    Ok((headers, payload).into_response())
}

fn row(id: &str) -> Result<i64, Refused> {
    id.parse().map_err(|_| Refused::field("id", format!("{id:?} is no row id, which is a number")))
}

/// Messages by their row ids.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    /// Row ids, up to 1000.
    ids: Vec<i64>,
}

/// Messages by their row ids, and where to send them.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Edit {
    /// Row ids, up to 1000.
    ids: Vec<i64>,
    /// A route's name or an address.
    destination: String,
    /// Accept a destination that this configuration doesn't know.
    #[serde(default)]
    any_destination: bool,
}

async fn act(served: &Served, who: &Who, database: &str, ids: &[i64], action: &Action) -> Answer<Changed> {
    Ok(Json(messages::act(served.database(database)?, who, ids, action).await?.into()))
}

/// Sends FAILED messages (and ones that wait for a retry) again, now, with all their attempts.
#[utoipa::path(post, path = "/databases/{database}/messages/requeue", tag = "messages", params(("database" = String, Path)), request_body = Named,
    responses((status = 200, body = Changed), (status = "default", body = Problem)))]
pub(super) async fn requeue(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(named, _): Body<Named>,
) -> Answer<Changed> {
    act(&served, &who, &database, &named.ids, &Action::Requeue).await
}

/// Gives messages up: FAILED, and later ones of their key go on.
#[utoipa::path(post, path = "/databases/{database}/messages/skip", tag = "messages", params(("database" = String, Path)), request_body = Named,
    responses((status = 200, body = Changed), (status = "default", body = Problem)))]
pub(super) async fn skip(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(named, _): Body<Named>,
) -> Answer<Changed> {
    act(&served, &who, &database, &named.ids, &Action::Skip).await
}

/// Sends messages that aren't delivered yet to another destination.
#[utoipa::path(post, path = "/databases/{database}/messages/edit", tag = "messages", params(("database" = String, Path)), request_body = Edit,
    responses((status = 200, body = Changed), (status = "default", body = Problem)))]
pub(super) async fn edit(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(edit, _): Body<Edit>,
) -> Answer<Changed> {
    operator(&who)?;
    if !edit.any_destination {
        messages::known_destination(&served.config, &edit.destination)?;
    }
    act(&served, &who, &database, &edit.ids, &Action::Edit { destination: edit.destination }).await
}

/// What to do with messages of the outbox.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verb {
    Requeue,
    Skip,
    Edit,
}

/// An action on everything that a filter finds.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct OnAll {
    action: Verb,
    /// Where `edit` sends them.
    destination: Option<String>,
    /// Which; `status` is needed.
    filter: Filter,
    /// What the count said, as it was agreed to.
    confirmed: Count,
}

/// Acts on all messages that a filter finds, in the background.
#[utoipa::path(post, path = "/databases/{database}/messages/bulk", tag = "messages", params(("database" = String, Path)), request_body = OnAll,
    responses((status = 202, body = BulkAction), (status = "default", body = Problem)))]
pub(super) async fn bulk(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(on, _): Body<OnAll>,
) -> Result<(StatusCode, Json<BulkAction>), Refused> {
    operator(&who)?;
    let action = match (on.action, on.destination) {
        (Verb::Edit, Some(destination)) => Action::Edit { destination },
        (Verb::Edit, None) => return Err(Refused::field("destination", "edit needs a destination")),
        (_, Some(_)) => return Err(Refused::field("destination", "goes with edit alone")),
        (Verb::Requeue, None) => Action::Requeue,
        (Verb::Skip, None) => Action::Skip,
    };
    let confirmed = Counted { messages: on.confirmed.messages, more: on.confirmed.more };
    let bulk = Bulk::Messages { filter: on.filter.asked()?, action };
    let progress = served.bulks.start(&served.config, served.database(&database)?, &who, bulk, confirmed)?;
    Ok((StatusCode::ACCEPTED, Json(progress.into())))
}
