//! What consumers received: list, one message, what can be done about it.

use askama::Template;
use axum::Form;
use axum::extract::{Query, State};
use axum::response::Response;
use posthouse::store::{InboxAction, InboxDetail, InboxFilter, InboxRow, InboxStatus};
use serde::{Deserialize, Serialize};

use super::messages::{BulkLink, Fact, moment};
use super::payload::{self, Sent};
use super::view::{
    Badge, Choice, Frame, Href, Notice, Oops, Place, Trail, When, badge, page as shown_page, short, shown, stopped,
};
use super::{ROWS, Shared, asked, first_of};
use crate::http::Who;
use crate::ops::{self, Refused};
use crate::output::now_ms;

/// Characters of an error in a list.
const ERROR: usize = 200;

/// Consumers that are offered to choose from.
const OFFERED: usize = 200;

/// What a list shows, as it stands in its address and in forms.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Asked {
    pub(super) db: String,
    status: String,
    consumer: String,
    kind: String,
    text: String,
    from: String,
    until: String,
    /// Where the page begins: consumer and message id, as JSON.
    #[serde(skip_serializing_if = "String::is_empty")]
    after: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    trail: String,
}

impl Asked {
    pub(super) fn filter(&self) -> Result<InboxFilter, Refused> {
        let some = |text: &str| Some(text.trim().to_owned()).filter(|t| !t.is_empty());
        let status = match self.status.as_str() {
            "" => None,
            "SUCCESS" => Some(InboxStatus::Success),
            "PENDING_RETRY" => Some(InboxStatus::PendingRetry),
            "RETRYING" => Some(InboxStatus::Retrying),
            "FAILED" => Some(InboxStatus::Failed),
            other => {
                let text = format!("status {other:?}: must be SUCCESS, PENDING_RETRY, RETRYING or FAILED");
                return Err(Refused::field("status", text));
            }
        };
        let us = |ms: Option<i64>| ms.map(|ms| ms.saturating_mul(1_000));
        Ok(InboxFilter {
            consumer: some(&self.consumer),
            status,
            kind: some(&self.kind),
            first_after_us: us(moment("from", &self.from)?),
            first_before_us: us(moment("until", &self.until)?),
            text: Some(self.text.clone()).filter(|t| !t.is_empty()),
            after: serde_json::from_str(&self.after).ok(),
            limit: ROWS,
            ..InboxFilter::default()
        })
    }

    pub(super) fn href(&self, path: &str) -> Href {
        let href = Href::new(path).add("db", &self.db).add("status", &self.status).add("consumer", &self.consumer);
        href.add("kind", &self.kind).add("text", &self.text).add("from", &self.from).add("until", &self.until)
    }

    fn narrowed(&self) -> bool {
        [&self.consumer, &self.kind, &self.text, &self.from, &self.until].iter().any(|f| !f.is_empty())
    }

    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        let fields = [
            ("status", &self.status),
            ("consumer", &self.consumer),
            ("type", &self.kind),
            ("text", &self.text),
            ("from", &self.from),
            ("until", &self.until),
        ];
        fields.into_iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| (name, shown(value))).collect()
    }
}

#[derive(Template)]
#[template(path = "inbox.html")]
struct Inbox {
    frame: Frame,
    here: String,
    live: bool,
    events: String,
    asked: Asked,
    statuses: Vec<Choice>,
    narrowed: bool,
    consumers: Vec<Choice>,
    error: Option<String>,
    rows: Vec<Row>,
    /// Which columns hold anything: the others take no room.
    waiting: bool,
    troubled: bool,
    stopped: Option<&'static str>,
    newer: Option<String>,
    older: Option<String>,
    clear: String,
    actions: Vec<BulkLink>,
}

struct Row {
    href: String,
    consumer: String,
    message_id: String,
    status: Badge,
    kind: String,
    first: When,
    tries: String,
    next: Option<When>,
    error: Option<String>,
}

impl Row {
    fn of(row: &InboxRow, db: &str) -> Self {
        Self {
            href: Href::new("/inbox/message").add("db", db).add("consumer", &row.consumer).add("id", &row.message_id).done(),
            consumer: shown(&row.consumer),
            message_id: shown(&row.message_id),
            status: badge(row.status.as_str()),
            kind: shown(&row.kind),
            first: When::us(row.first_us),
            tries: if row.claims > 0 { format!("{}+{}", row.attempts, row.claims) } else { row.attempts.to_string() },
            next: next(row).map(When::us),
            error: row.last_error.as_deref().map(|e| short(e, ERROR)),
        }
    }
}

/// When it is run next; of one that was given up never, though a time stands there.
fn next(row: &InboxRow) -> Option<i64> {
    row.next_attempt_us.filter(|_| matches!(row.status, InboxStatus::PendingRetry | InboxStatus::Retrying))
}

pub(super) async fn list(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let trail = Trail::parse(&query.trail);
    let at = |after: &str, trail: &str| query.href("/inbox").add("after", after).add("trail", trail).done();
    let status = |value: &str, label: &str| Choice {
        value: Asked { status: value.to_owned(), ..query.clone() }.href("/inbox").done(),
        label: label.to_owned(),
        chosen: query.status == value,
    };
    let mut page = Inbox {
        frame: Frame::new(&served, &who, Place::Inbox, "Inbox", Some(&database.name), false),
        here: at(&query.after, &query.trail),
        live: query.after.is_empty() && !query.narrowed(),
        events: Href::new("/events").add("db", &query.db).done(),
        statuses: vec![
            status("", "All"),
            status("PENDING_RETRY", "Waiting"),
            status("RETRYING", "Retrying"),
            status("SUCCESS", "Success"),
            status("FAILED", "Failed"),
        ],
        narrowed: query.narrowed(),
        consumers: Vec::new(),
        error: None,
        rows: Vec::new(),
        waiting: false,
        troubled: false,
        stopped: None,
        newer: trail.back().map(|(after, trail)| at(&after, &trail)),
        older: None,
        clear: Href::new("/inbox").add("db", &query.db).add("status", &query.status).done(),
        actions: Vec::new(),
        asked: query.clone(),
    };
    match query.filter() {
        Ok(filter) => {
            let consumers = async { ops::inbox::consumers(database.inbox()?.as_ref()).await.map_err(Refused::from) };
            let listed = ops::inbox::list(&served.config, database, &filter);
            let (consumers, listed) = tokio::join!(asked(database, consumers), asked(database, listed));
            let names = consumers.unwrap_or_default();
            page.consumers = names.iter().take(OFFERED).map(|name| Choice::new(name, &query.consumer)).collect();
            match listed {
                Ok(listed) => {
                    page.stopped = stopped(&listed);
                    let behind = listed.next.as_ref().and_then(|next| serde_json::to_string(next).ok());
                    page.older = behind.map(|next| at(&next, &trail.onward(&query.after)));
                    page.waiting = listed.rows.iter().any(|r| next(r).is_some());
                    page.troubled = listed.rows.iter().any(|r| r.last_error.is_some());
                    page.rows = listed.rows.iter().map(|row| Row::of(row, &query.db)).collect();
                }
                Err(e) => page.error = Some(e),
            }
            if page.frame.operator && !page.rows.is_empty() {
                let all = [("Requeue all…", "requeue", InboxAction::Requeue), ("Skip all…", "skip", InboxAction::Skip)];
                let can = all.into_iter().filter(|(.., action)| ops::inbox::can_act(&filter, *action).is_ok());
                let link = |(text, name, _)| BulkLink { text, href: query.href("/inbox/bulk").add("action", name).done() };
                page.actions = can.map(link).collect();
            }
        }
        Err(refused) => page.error = Some(shown(&refused.text)),
    }
    Ok(shown_page(&page))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct One {
    db: String,
    consumer: String,
    id: String,
}

#[derive(Template)]
#[template(path = "received.html")]
struct Received {
    frame: Frame,
    here: String,
    events: String,
    live: bool,
    db: String,
    consumer: String,
    id: String,
    shown_id: String,
    status: Badge,
    facts: Vec<Fact>,
    error: Option<String>,
    sent: Sent,
    download: Option<String>,
    can_requeue: bool,
    can_skip: bool,
}

pub(super) async fn detail(State(served): State<Shared>, who: Who, Query(one): Query<One>) -> Result<Response, Oops> {
    let database = first_of(&served, &one.db)?;
    let received = ops::inbox::show(database, &one.consumer, &one.id).await?;
    let row = &received.row;
    let waits = row.status == InboxStatus::PendingRetry && row.next_attempt_us.is_some_and(|us| us / 1_000 > now_ms());
    let at = |path: &str| Href::new(path).add("db", &one.db).add("consumer", &one.consumer).add("id", &one.id).done();
    let sent = payload::of_received(&served.config, &received);
    Ok(shown_page(&Received {
        frame: Frame::new(&served, &who, Place::Inbox, "Received message", Some(&database.name), false),
        here: at("/inbox/message"),
        events: Href::new("/events").add("db", &one.db).done(),
        live: row.status != InboxStatus::Success,
        db: one.db.clone(),
        shown_id: shown(&one.id),
        status: badge(row.status.as_str()),
        facts: facts(&received, &one.db),
        error: row.last_error.as_deref().map(shown),
        download: sent.whole.then(|| at("/inbox/message/payload")),
        sent,
        can_requeue: row.status == InboxStatus::Failed || waits,
        can_skip: matches!(row.status, InboxStatus::PendingRetry | InboxStatus::Retrying),
        consumer: one.consumer,
        id: one.id,
    }))
}

fn facts(received: &InboxDetail, db: &str) -> Vec<Fact> {
    let row = &received.row;
    let list = |name: &str, value: &str| Some(Href::new("/inbox").add("db", db).add(name, value).done());
    let mut out = vec![
        Fact::mono("Message id", shown(&row.message_id)),
        Fact { href: list("consumer", &row.consumer), ..Fact::mono("Consumer", shown(&row.consumer)) },
    ];
    let mut mono = |name: &'static str, value: Option<&str>| out.extend(value.map(|v| Fact::mono(name, shown(v))));
    mono("Type", Some(row.kind.as_str()).filter(|k| !k.is_empty()));
    mono("Key", received.key.as_deref());
    mono("Source", row.source.as_deref());
    mono("Running on", row.owner.as_deref());
    out.push(Fact::at("First seen", When::us(row.first_us)));
    out.push(Fact::at("Last change", When::us(row.last_us)));
    out.extend(row.success_us.map(|us| Fact::at("Success", When::us(us))));
    out.extend(
        next(row).map(|us| Fact::at(if row.status == InboxStatus::Retrying { "Lease ends" } else { "Next run" }, When::us(us))),
    );
    out.push(Fact::text("Attempts", row.attempts.to_string()));
    if row.claims > 0 {
        out.push(Fact::text("Claims", format!("{} (runs without a result)", row.claims)));
    }
    out
}

/// The payload as it is, as a file. Only where all of it may be seen.
pub(super) async fn payload(State(served): State<Shared>, _: Who, Query(one): Query<One>) -> Result<Response, Oops> {
    let database = first_of(&served, &one.db)?;
    let received = ops::inbox::show(database, &one.consumer, &one.id).await?;
    let whole = payload::of_received(&served.config, &received).whole;
    let bytes = received.payload.ok_or_else(|| Oops::missing("the payload of a message that had its effect isn't kept"))?;
    if !whole {
        return Err(Oops::from(Refused::new(ops::Refusal::Forbidden, "this payload is hidden or masked by the configuration")));
    }
    Ok(payload::file("received", bytes))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Act {
    db: String,
    consumer: String,
    id: String,
    action: String,
}

pub(super) fn action(name: &str) -> Result<InboxAction, Refused> {
    match name {
        "requeue" => Ok(InboxAction::Requeue),
        "skip" => Ok(InboxAction::Skip),
        other => Err(Refused::field("action", format!("there is no action {other:?}"))),
    }
}

/// Does something to one received message.
pub(super) async fn act(State(served): State<Shared>, who: Who, Form(act): Form<Act>) -> Response {
    let done = async {
        let database = first_of(&served, &act.db).map_err(|_| Refused::missing(format!("there is no database {:?}", act.db)))?;
        let action = action(&act.action)?;
        let acted = ops::inbox::act(database, &who, &act.consumer, std::slice::from_ref(&act.id), action).await?;
        if acted.changed.is_empty() {
            return Err(Refused::new(ops::Refusal::Conflict, format!("it was left as it is: {}", acted.why)));
        }
        Ok(format!("message {} {}", shown(&act.id), ops::inbox::done(action)))
    };
    match done.await {
        Ok(text) => Notice::done(text),
        Err(refused) => Notice::not_done(&refused),
    }
}
