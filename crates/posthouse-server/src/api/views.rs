//! What the API tells: shapes of its own, so that they stay as they are while the tables change.

use std::collections::BTreeMap;

use posthouse::store::{AttemptRow, AuditRow, InboxDetail, InboxRow, MessageDetail, MessageRow, RunRow};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{Config, redact_url};
use crate::ops::bulk::Progress;
use crate::ops::payload::{self, Form, Shown};
use crate::ops::{Acted, Counted};

/// Whether something changed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Done {
    /// False: it was so already.
    pub(super) changed: bool,
}

/// A message of the outbox.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Message {
    /// Row id.
    id: i64,
    message_id: String,
    #[serde(rename = "type")]
    kind: String,
    /// Effective destination, without secrets.
    destination: String,
    key: Option<String>,
    /// `PENDING`, `SENDING`, `SENT` or `FAILED`.
    status: String,
    house: i32,
    /// Failed attempts.
    attempts: i32,
    /// Tries without a result.
    claims: i32,
    last_error: Option<String>,
    created_at_ms: i64,
    /// None when it is fresh, sent or failed.
    next_attempt_ms: Option<i64>,
    /// Payload and headers, in bytes.
    size: i64,
}

impl From<MessageRow> for Message {
    fn from(r: MessageRow) -> Self {
        Self {
            id: r.id,
            message_id: r.message_id,
            kind: r.kind,
            destination: redact_url(&r.destination),
            key: r.key,
            status: r.status,
            house: r.house,
            attempts: r.attempts,
            claims: r.claims,
            last_error: r.last_error,
            created_at_ms: r.created_at_ms,
            next_attempt_ms: r.next_attempt_ms,
            size: r.size,
        }
    }
}

/// A page of messages, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Messages {
    pub(super) messages: Vec<Message>,
    /// `before` of the next page; null when nothing lies behind this one.
    pub(super) next_before: Option<i64>,
    /// The search came to its time limit before the page was full; the next page goes on where it stopped.
    pub(super) stopped: bool,
}

/// A payload as it may be shown.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Payload {
    /// `json` (laid out), `text`, `hex` (a dump) or `hidden`.
    form: &'static str,
    /// Control characters in it are written out.
    text: String,
    /// Size of the whole payload.
    bytes: usize,
    /// Only its beginning is in `text`.
    cut: bool,
    /// Values in it, or all of it, are hidden by the configuration.
    masked: bool,
}

impl From<Shown> for Payload {
    fn from(shown: Shown) -> Self {
        let form = match shown.form {
            Form::Json => "json",
            Form::Text => "text",
            Form::Hex => "hex",
            Form::Hidden => "hidden",
        };
        Self { form, text: shown.text, bytes: shown.bytes, cut: shown.cut, masked: shown.masked }
    }
}

/// A failed attempt.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Attempt {
    at_ms: i64,
    attempt: i32,
    /// `retry`, `rejected` or `claims`.
    outcome: String,
    error: String,
    /// The beginning of what the receiver answered.
    response: Option<String>,
    took_ms: i32,
    instance: String,
}

impl From<AttemptRow> for Attempt {
    fn from(a: AttemptRow) -> Self {
        Self {
            at_ms: a.at_ms,
            attempt: a.attempt,
            outcome: a.outcome,
            error: a.error,
            response: a.response,
            took_ms: a.took_ms,
            instance: a.instance,
        }
    }
}

/// When and by whom a message was delivered.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Delivered {
    at_ms: i64,
    instance: String,
}

/// A message with everything that may be shown of it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MessageDetails {
    #[serde(flatten)]
    message: Message,
    /// Where it was published to; `destination` differs once somebody has sent it elsewhere.
    published_to: String,
    content_type: String,
    /// Values that the configuration hides are `[masked]`.
    headers: BTreeMap<String, String>,
    payload: Payload,
    /// Failed attempts, oldest first.
    history: Vec<Attempt>,
    delivered: Option<Delivered>,
}

impl MessageDetails {
    pub(super) fn of(config: &Config, detail: MessageDetail) -> Self {
        let hidden = payload::hidden_of(config, &detail.row.destination, &detail.published_to);
        Self {
            headers: payload::headers(&hidden, detail.headers.as_deref()).into_iter().collect(),
            payload: payload::shown(&hidden, &detail.payload).into(),
            published_to: redact_url(&detail.published_to),
            content_type: detail.content_type,
            history: detail.history.into_iter().map(Into::into).collect(),
            delivered: detail.delivered.map(|(at_ms, instance)| Delivered { at_ms, instance }),
            message: detail.row.into(),
        }
    }
}

/// A received message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReceivedMessage {
    consumer: String,
    message_id: String,
    /// `SUCCESS`, `PENDING_RETRY`, `RETRYING` or `FAILED`.
    status: &'static str,
    #[serde(rename = "type")]
    kind: String,
    /// Where it came from (JSON).
    source: Option<String>,
    attempts: i32,
    claims: i32,
    next_attempt_us: Option<i64>,
    owner: Option<String>,
    last_error: Option<String>,
    first_us: i64,
    last_us: i64,
    success_us: Option<i64>,
}

impl From<InboxRow> for ReceivedMessage {
    fn from(r: InboxRow) -> Self {
        Self {
            consumer: r.consumer,
            message_id: r.message_id,
            status: r.status.as_str(),
            kind: r.kind,
            source: r.source,
            attempts: r.attempts,
            claims: r.claims,
            next_attempt_us: r.next_attempt_us,
            owner: r.owner,
            last_error: r.last_error,
            first_us: r.first_us,
            last_us: r.last_us,
            success_us: r.success_us,
        }
    }
}

/// Where a page of received messages ends.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct After {
    /// `after_consumer` of the next page.
    pub(super) consumer: String,
    /// `after_id` of the next page.
    pub(super) message_id: String,
}

/// A page of received messages, by consumer and message id.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReceivedMessages {
    pub(super) messages: Vec<ReceivedMessage>,
    /// Null when nothing lies behind this page.
    pub(super) next_after: Option<After>,
    /// The search came to its time limit before the page was full; the next page goes on where it stopped.
    pub(super) stopped: bool,
}

/// A received message with everything that may be shown of it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReceivedDetails {
    #[serde(flatten)]
    message: ReceivedMessage,
    key: Option<String>,
    /// Null once it had its effect, like the payload.
    content_type: Option<String>,
    /// Values that the configuration hides are `[masked]`.
    headers: BTreeMap<String, String>,
    payload: Option<Payload>,
}

impl ReceivedDetails {
    pub(super) fn of(config: &Config, detail: InboxDetail) -> Self {
        let hidden = config.masks.of_received(&detail.row.consumer);
        Self {
            key: detail.key,
            content_type: detail.content_type,
            headers: payload::headers(&hidden, detail.headers.as_deref()).into_iter().collect(),
            payload: detail.payload.map(|all| payload::shown(&hidden, &all).into()),
            message: detail.row.into(),
        }
    }
}

/// How many messages a filter finds.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct Count {
    pub(super) messages: u64,
    /// There are more, which were not counted.
    #[serde(default)]
    pub(super) more: bool,
}

impl From<Counted> for Count {
    fn from(counted: Counted) -> Self {
        Self { messages: counted.messages, more: counted.more }
    }
}

/// What an action on messages of the outbox came to.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Changed {
    /// Row ids.
    changed: Vec<i64>,
    /// Row ids of those that the action doesn't apply to.
    unchanged: Vec<i64>,
    /// Why it may leave messages out.
    why: &'static str,
}

impl From<Acted<i64>> for Changed {
    fn from(acted: Acted<i64>) -> Self {
        Self { changed: acted.changed, unchanged: acted.unchanged, why: acted.why }
    }
}

/// What an action on received messages came to.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReceivedChanged {
    /// Message ids.
    changed: Vec<String>,
    /// Message ids of those that the action doesn't apply to.
    unchanged: Vec<String>,
    /// Why it may leave messages out.
    why: &'static str,
}

impl From<Acted<String>> for ReceivedChanged {
    fn from(acted: Acted<String>) -> Self {
        Self { changed: acted.changed, unchanged: acted.unchanged, why: acted.why }
    }
}

/// How far an action on everything that a filter finds is.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BulkAction {
    id: u64,
    database: String,
    /// As the audit log names it.
    action: &'static str,
    /// The filter, and where an edit sends to.
    #[schema(value_type = Object)]
    what: serde_json::Value,
    actor: String,
    started_ms: i64,
    ended_ms: Option<i64>,
    finished: bool,
    /// Messages there were when it was confirmed.
    total: u64,
    /// There were more than `total`.
    more: bool,
    /// Messages it has come past.
    done: u64,
    /// Messages that it changed; the others had changed meanwhile.
    changed: u64,
    /// Somebody stopped it, or the server ended.
    stopped: bool,
    error: Option<String>,
}

impl From<Progress> for BulkAction {
    fn from(p: Progress) -> Self {
        Self {
            finished: p.finished(),
            id: p.id,
            database: p.database,
            action: p.action,
            what: p.what,
            actor: p.actor,
            started_ms: p.started_ms,
            ended_ms: p.ended_ms,
            total: p.total,
            more: p.more,
            done: p.done,
            changed: p.changed,
            stopped: p.stopped,
            error: p.error,
        }
    }
}

/// A line of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AuditLine {
    id: i64,
    at_ms: i64,
    actor: String,
    action: String,
    /// The message it is about, where it is about one of the outbox.
    row_id: Option<i64>,
    detail: Option<String>,
    /// How many messages, in lines that sum something up.
    amount: Option<i64>,
}

impl From<AuditRow> for AuditLine {
    fn from(a: AuditRow) -> Self {
        let detail = if a.action == "edit" { a.detail.map(|d| redact_url(&d)) } else { a.detail };
        Self { id: a.id, at_ms: a.at_ms, actor: a.actor, action: a.action, row_id: a.row_id, detail, amount: a.amount }
    }
}

/// A run of a group on one instance, or a request that all instances run it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Run {
    id: i64,
    group: String,
    cause: String,
    /// `REQUESTED`, `RUNNING`, `DONE`, `FAILED`, `TIMEOUT`, `STOPPED`, `DISCARDED` or `LOST`.
    status: &'static str,
    /// Null: a request.
    instance: Option<String>,
    /// The request that it belongs to.
    request: Option<i64>,
    due_us: Option<i64>,
    requested_us: i64,
    started_us: Option<i64>,
    ended_us: Option<i64>,
    messages: i64,
    delivered: i64,
    retried: i64,
    failed: i64,
    error: Option<String>,
}

impl From<RunRow> for Run {
    fn from(r: RunRow) -> Self {
        Self {
            id: r.id,
            group: r.group,
            cause: r.cause,
            status: r.status.as_str(),
            instance: r.instance,
            request: r.request,
            due_us: r.due_us,
            requested_us: r.requested_us,
            started_us: r.started_us,
            ended_us: r.ended_us,
            messages: r.messages,
            delivered: r.delivered,
            retried: r.retried,
            failed: r.failed,
            error: r.error,
        }
    }
}
