//! Publishing over HTTP, for scripts: each message in a transaction of its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use posthouse::Message;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::Problem;
use super::extract::{Body, Large};
use crate::config::redact_url;
use crate::http::{Served, Who};
use crate::ops::{Refused, audit, messages, operator};

/// A message to publish.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Published {
    /// A route's name, or an address such as `https://host/path`.
    destination: String,
    /// Ordering key: messages of one destination and key are delivered one after the other.
    key: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// The payload, if it is JSON; it is sent as it is written here.
    #[schema(value_type = Option<Object>)]
    payload: Option<Box<RawValue>>,
    /// The payload, if it is anything else.
    payload_base64: Option<String>,
    /// Of the payload; `application/json` by default, with `payload_base64` `application/octet-stream`.
    content_type: Option<String>,
    /// A new one by default.
    message_id: Option<String>,
    /// Nothing is written if this was used before.
    dedup_key: Option<String>,
    /// FAILED after this many failed attempts, whatever the route says.
    max_attempts: Option<u32>,
    /// Send it no earlier than this from now, in milliseconds.
    deliver_in_ms: Option<u64>,
    /// Accept a destination that this configuration doesn't know.
    #[serde(default)]
    any_destination: bool,
}

/// A message that was published.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Receipt {
    message_id: String,
    destination: String,
}

/// Writes one message, in a transaction of its own.
#[utoipa::path(post, path = "/databases/{database}/messages", tag = "messages", params(("database" = String, Path)), request_body = Published,
    responses((status = 201, body = Receipt), (status = "default", body = Problem)))]
pub(super) async fn publish(
    State(served): State<Arc<Served>>,
    who: Who,
    Path(database): Path<String>,
    Body(given, _): Body<Published, Large>,
) -> Result<(StatusCode, Json<Receipt>), Refused> {
    operator(&who)?;
    let relay = served.database(&database)?;
    if !given.any_destination {
        messages::known_destination(&served.config, &given.destination)?;
    }
    let (payload, content_type) = match (given.payload, given.payload_base64) {
        (Some(_), Some(_)) => return Err(Refused::field("payload", "payload and payload_base64 exclude each other")),
        (Some(json), None) => (json.get().as_bytes().to_vec(), "application/json"),
        (None, Some(text)) => {
            let bytes = BASE64.decode(text).map_err(|e| Refused::field("payload_base64", format!("payload_base64: {e}")))?;
            (bytes, "application/octet-stream")
        }
        (None, None) => (Vec::new(), "application/octet-stream"),
    };
    let mut message = Message::to(&given.destination).payload(payload);
    message = message.content_type(given.content_type.unwrap_or_else(|| content_type.to_owned()));
    if let Some(key) = given.key {
        message = message.key(key);
    }
    if let Some(kind) = given.kind {
        message = message.typed(kind);
    }
    for (name, value) in given.headers {
        message = message.header(name, value);
    }
    if let Some(id) = given.message_id {
        message = message.id(id);
    }
    if let Some(key) = given.dedup_key {
        message = message.dedup_key(key);
    }
    if let Some(attempts) = given.max_attempts {
        message = message.max_attempts(attempts);
    }
    if let Some(ms) = given.deliver_in_ms {
        message = message.deliver_in(Duration::from_millis(ms));
    }
    let id = relay.database.publish(message).await?;
    let detail = json!({ "message_id": id, "destination": redact_url(&given.destination) }).to_string();
    if let Err(e) = audit::record(relay, &who, "publish", &detail, None).await {
        // It is published; an error would make the caller publish it again.
        tracing::error!(database = relay.name, message_id = %id, error = %e, "the audit line about a published message could not be written");
    }
    Ok((StatusCode::CREATED, Json(Receipt { message_id: id.as_str().to_owned(), destination: given.destination })))
}
