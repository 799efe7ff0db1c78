//! The outbox: its messages, one message with everything there is to know, and what can be done about it.

use askama::Template;
use axum::Form;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Redirect, Response};
use posthouse::store::{Action, AuditFilter, MessageDetail, MessageFilter, MessageRow, MessageStatus};
use serde::{Deserialize, Serialize};

use super::payload::{self, Sent};
use super::view::{
    Badge, Choice, Frame, Href, Notice, Oops, Place, Trail, When, badge, page as shown_page, short, shown, span, stopped,
};
use super::{ROWS, Shared, asked, audit, first_of};
use crate::config::redact_url;
use crate::http::{Served, ServedRelay, Who};
use crate::ops::{self, Refused};
use crate::output;

/// Characters of an error in a list.
const ERROR: usize = 200;

/// Destinations that are offered while one is typed.
const OFFERED: usize = 200;

/// What a list shows, as it stands in its address and in forms.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Asked {
    pub(super) db: String,
    status: String,
    destination: String,
    key: String,
    id: String,
    text: String,
    from: String,
    until: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    before: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    trail: String,
}

impl Asked {
    /// The filter; an error names what can't be understood.
    pub(super) fn filter(&self) -> Result<MessageFilter, Refused> {
        let some = |text: &str| Some(text.trim().to_owned()).filter(|t| !t.is_empty());
        let status = match self.status.as_str() {
            "" => None,
            "PENDING" => Some(MessageStatus::Pending),
            "SENDING" => Some(MessageStatus::Sending),
            "SENT" => Some(MessageStatus::Sent),
            "FAILED" => Some(MessageStatus::Failed),
            other => {
                return Err(Refused::field("status", format!("status {other:?}: must be PENDING, SENDING, SENT or FAILED")));
            }
        };
        Ok(MessageFilter {
            status,
            destination: some(&self.destination),
            key: some(&self.key),
            message_id: some(&self.id),
            created_after_ms: moment("from", &self.from)?,
            created_before_ms: moment("until", &self.until)?,
            // Blanks are part of what is searched for.
            text: Some(self.text.clone()).filter(|t| !t.is_empty()),
            before: self.before.parse().ok(),
            limit: ROWS,
            ..MessageFilter::default()
        })
    }

    /// An address with this filter.
    pub(super) fn href(&self, path: &str) -> Href {
        let href = Href::new(path).add("db", &self.db).add("status", &self.status).add("destination", &self.destination);
        let href = href.add("key", &self.key).add("id", &self.id).add("text", &self.text);
        href.add("from", &self.from).add("until", &self.until)
    }

    /// Whether anything but the status is asked for.
    fn narrowed(&self) -> bool {
        [&self.destination, &self.key, &self.id, &self.text, &self.from, &self.until].iter().any(|f| !f.is_empty())
    }

    /// The filter in words, for a person who is to agree.
    pub(super) fn words(&self) -> Vec<(&'static str, String)> {
        let fields = [
            ("status", &self.status),
            ("destination", &self.destination),
            ("key", &self.key),
            ("message id", &self.id),
            ("text", &self.text),
            ("from", &self.from),
            ("until", &self.until),
        ];
        fields.into_iter().filter(|(_, value)| !value.is_empty()).map(|(name, value)| (name, shown(&redact_url(value)))).collect()
    }
}

/// What a browser's field for a date and time gives, taken as UTC.
pub(super) fn moment(field: &'static str, text: &str) -> Result<Option<i64>, Refused> {
    let text = text.trim().trim_end_matches('Z');
    if text.is_empty() {
        return Ok(None);
    }
    // "2026-11-30T08:15", or with seconds.
    let whole = if text.len() == 16 { format!("{text}:00") } else { text.to_owned() };
    let at = humantime::parse_rfc3339_weak(&whole).map_err(|_| {
        Refused::field(field, format!("{field} {text:?}: must be a date and time such as 2026-11-30T08:15, in UTC"))
    })?;
    let since = at.duration_since(std::time::SystemTime::UNIX_EPOCH).unwrap_or_default();
    Ok(Some(i64::try_from(since.as_millis()).unwrap_or(i64::MAX)))
}

#[derive(Template)]
#[template(path = "messages.html")]
struct Messages {
    frame: Frame,
    here: String,
    /// Whether the list may look again by itself: on its first page, and where that costs little.
    live: bool,
    events: String,
    asked: Asked,
    statuses: Vec<Choice>,
    narrowed: bool,
    destinations: Vec<String>,
    error: Option<String>,
    rows: Vec<Row>,
    /// Which columns hold anything: the others take no room.
    keyed: bool,
    waiting: bool,
    troubled: bool,
    stopped: Option<&'static str>,
    newer: Option<String>,
    older: Option<String>,
    clear: String,
    actions: Vec<BulkLink>,
}

/// Something that can be done to all that the filter finds.
pub(super) struct BulkLink {
    pub(super) text: &'static str,
    pub(super) href: String,
}

struct Row {
    id: i64,
    href: String,
    status: Badge,
    destination: String,
    kind: String,
    key: Option<String>,
    message_id: String,
    created: When,
    tries: String,
    next: Option<When>,
    error: Option<String>,
}

impl Row {
    fn of(row: &MessageRow, db: &str) -> Self {
        Self {
            id: row.id,
            href: Href::new(&format!("/messages/{}", row.id)).add("db", db).done(),
            status: badge(&row.status),
            destination: shown(&redact_url(&row.destination)),
            kind: shown(&row.kind),
            key: row.key.as_deref().map(shown),
            message_id: shown(&row.message_id),
            created: When::ms(row.created_at_ms),
            tries: tries(row),
            next: row.next_attempt_ms.map(When::ms),
            error: row.last_error.as_deref().map(|e| short(e, ERROR)),
        }
    }
}

fn tries(row: &MessageRow) -> String {
    if row.claims > 0 { format!("{}+{}", row.attempts, row.claims) } else { row.attempts.to_string() }
}

pub(super) async fn list(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let filter = query.filter();
    let trail = Trail::parse(&query.trail);
    let at = |before: &str, trail: &str| query.href("/messages").add("before", before).add("trail", trail).done();
    let status = |value: &str, label: &str| Choice {
        value: Asked { status: value.to_owned(), ..query.clone() }.href("/messages").done(),
        label: label.to_owned(),
        chosen: query.status == value,
    };
    let mut page = Messages {
        frame: Frame::new(&served, &who, Place::Messages, "Messages", Some(&database.name), false),
        here: at(&query.before, &query.trail),
        live: query.before.is_empty() && !query.narrowed(),
        events: Href::new("/events").add("db", &query.db).done(),
        statuses: vec![
            status("", "All"),
            status("PENDING", "Pending"),
            status("SENDING", "Sending"),
            status("SENT", "Sent"),
            status("FAILED", "Failed"),
        ],
        narrowed: query.narrowed(),
        destinations: offered(&served, database),
        error: None,
        rows: Vec::new(),
        keyed: false,
        waiting: false,
        troubled: false,
        stopped: None,
        newer: trail.back().map(|(before, trail)| at(&before, &trail)),
        older: None,
        clear: Href::new("/messages").add("db", &query.db).add("status", &query.status).done(),
        actions: Vec::new(),
        asked: query.clone(),
    };
    match filter {
        Ok(filter) => {
            match asked(database, ops::messages::list(&served.config, database, &filter)).await {
                Ok(listed) => {
                    page.stopped = stopped(&listed);
                    page.older = listed.next.map(|next| at(&next.to_string(), &trail.onward(&query.before)));
                    page.keyed = listed.rows.iter().any(|r| r.key.is_some());
                    page.waiting = listed.rows.iter().any(|r| r.next_attempt_ms.is_some());
                    page.troubled = listed.rows.iter().any(|r| r.last_error.is_some());
                    page.rows = listed.rows.iter().map(|row| Row::of(row, &query.db)).collect();
                }
                Err(e) => page.error = Some(e),
            }
            if page.frame.operator && !page.rows.is_empty() {
                page.actions = bulk_links(&query, &filter);
            }
        }
        Err(refused) => page.error = Some(shown(&refused.text)),
    }
    Ok(shown_page(&page))
}

fn bulk_links(query: &Asked, filter: &MessageFilter) -> Vec<BulkLink> {
    let edit = Action::Edit { destination: String::new() };
    let all = [("Requeue all…", Action::Requeue), ("Skip all…", Action::Skip), ("Send all elsewhere…", edit)];
    let can = all.into_iter().filter(|(_, action)| ops::messages::can_act(filter, action).is_ok());
    let link = |(text, action): (&'static str, Action)| BulkLink {
        text,
        href: query.href("/messages/bulk").add("action", action.name()).done(),
    };
    can.map(link).collect()
}

/// Destinations to choose from: those with a route, and those that something waits for.
fn offered(served: &Served, database: &ServedRelay) -> Vec<String> {
    let waiting = served.history.standing(&database.name).backlog;
    let mut all: Vec<String> = served.config.routes.keys().cloned().collect();
    all.extend(waiting.iter().flat_map(|(lines, _)| lines.iter()).map(|line| line.destination.clone()));
    // One that can't be shown as it is would not find itself again.
    all.retain(|name| shown(&redact_url(name)) == *name);
    all.sort_unstable();
    all.dedup();
    all.truncate(OFFERED);
    all
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Of {
    db: String,
}

#[derive(Template)]
#[template(path = "message.html")]
struct Message {
    frame: Frame,
    here: String,
    events: String,
    /// It is waiting for something: look again by itself.
    live: bool,
    id: i64,
    db: String,
    status: Badge,
    facts: Vec<Fact>,
    error: Option<String>,
    sent: Sent,
    download: Option<String>,
    timeline: Vec<Event>,
    destinations: Vec<String>,
    can_requeue: bool,
    can_change: bool,
}

/// Something that is known of a message.
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) value: String,
    pub(super) mono: bool,
    pub(super) href: Option<String>,
    pub(super) at: Option<When>,
}

impl Fact {
    pub(super) fn text(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), mono: false, href: None, at: None }
    }

    pub(super) fn mono(name: &'static str, value: impl Into<String>) -> Self {
        Self { mono: true, ..Self::text(name, value) }
    }

    pub(super) fn at(name: &'static str, when: When) -> Self {
        Self { at: Some(when), ..Self::text(name, "") }
    }
}

/// Something that happened to a message.
struct Event {
    at_ms: i64,
    at: When,
    what: String,
    kind: &'static str,
    detail: Option<String>,
    response: Option<String>,
    by: Option<String>,
}

/// By row id; by message id it leads to the row, or to the list of those that share it.
pub(super) async fn detail(
    State(served): State<Shared>,
    who: Who,
    Path(name): Path<String>,
    Query(of): Query<Of>,
) -> Result<Response, Oops> {
    let database = first_of(&served, &of.db)?;
    let Ok(id) = name.parse::<i64>() else {
        let found = asked(database, ops::messages::resolve(database.people.as_ref(), &name)).await;
        let to = match found.as_deref() {
            Ok([id]) => Href::new(&format!("/messages/{id}")).add("db", &of.db),
            Ok([]) => return Err(Oops::missing(format!("there is no message {:?}", shown(&name)))),
            _ => Href::new("/messages").add("db", &of.db).add("id", &name),
        };
        return Ok(Redirect::to(&to.done()).into_response());
    };
    let lines = AuditFilter { row_id: Some(id), limit: ROWS, ..AuditFilter::default() };
    let (message, acted) = tokio::join!(ops::messages::show(database, id), ops::audit::list(database, &lines));
    let message = message?;
    let acted: Vec<_> = acted.map(|listed| listed.rows).unwrap_or_default();
    let row = &message.row;
    let waits = row.next_attempt_ms.is_some_and(|at| at > output::now_ms());
    let sent = payload::of_message(&served.config, &message);
    let here = Href::new(&format!("/messages/{id}")).add("db", &of.db).done();
    Ok(shown_page(&Message {
        frame: Frame::new(&served, &who, Place::Messages, &format!("Message {id}"), Some(&database.name), false),
        events: Href::new("/events").add("db", &of.db).done(),
        live: row.status != "SENT",
        id,
        db: of.db.clone(),
        status: badge(&row.status),
        facts: facts(&served, &message, &of.db),
        error: row.last_error.as_deref().map(shown),
        download: sent.whole.then(|| Href::new(&format!("/messages/{id}/payload")).add("db", &of.db).done()),
        sent,
        timeline: timeline(&message, &acted, &of.db),
        destinations: offered(&served, database),
        can_requeue: row.status == "FAILED" || row.status == "PENDING" && waits,
        can_change: row.status != "SENT",
        here,
    }))
}

fn facts(served: &Served, message: &MessageDetail, db: &str) -> Vec<Fact> {
    let row = &message.row;
    let list = |name: &str, value: &str| Href::new("/messages").add("db", db).add(name, value).done();
    let secret = redact_url(&row.destination) != row.destination;
    let mut out = vec![
        Fact::mono("Message id", shown(&row.message_id)),
        Fact {
            href: (!secret).then(|| list("destination", &row.destination)),
            ..Fact::mono("Destination", shown(&redact_url(&row.destination)))
        },
    ];
    if message.published_to != row.destination {
        out.push(Fact::mono("Published to", shown(&redact_url(&message.published_to))));
    }
    if let Some(to) = served.routes.get(&row.destination).filter(|to| **to != row.destination) {
        out.push(Fact::mono("Leads to", shown(to)));
    }
    if !row.kind.is_empty() {
        out.push(Fact::mono("Type", shown(&row.kind)));
    }
    if let Some(key) = &row.key {
        out.push(Fact { href: Some(list("key", key)), ..Fact::mono("Key", shown(key)) });
    }
    out.push(Fact::text("House", row.house.to_string()));
    out.push(Fact::at("Published", When::ms(row.created_at_ms)));
    if let Some((at, by)) = &message.delivered {
        out.push(Fact { value: format!("by {}", shown(by)), ..Fact::at("Delivered", When::ms(*at)) });
    }
    if let Some(next) = row.next_attempt_ms {
        out.push(Fact::at("Next try", When::ms(next)));
    }
    out.push(Fact::text("Attempts", row.attempts.to_string()));
    if row.claims > 0 {
        out.push(Fact::text("Claims", format!("{} (tries during which the process died)", row.claims)));
    }
    if let Some(trace) = payload::trace(message.headers.as_deref()) {
        let href = served.config.server.trace_url.as_deref().map(|url| url.replace("{trace_id}", &trace));
        out.push(Fact { href, ..Fact::mono("Trace", trace) });
    }
    out
}

fn timeline(message: &MessageDetail, acted: &[posthouse::store::AuditRow], db: &str) -> Vec<Event> {
    let event = |at_ms: i64, what: &str, kind: &'static str| Event {
        at_ms,
        at: When::ms(at_ms),
        what: what.to_owned(),
        kind,
        detail: None,
        response: None,
        by: None,
    };
    let mut out = vec![event(message.row.created_at_ms, "published", "plain")];
    for attempt in &message.history {
        out.push(Event {
            detail: Some(shown(&attempt.error)),
            response: attempt.response.as_deref().filter(|r| !r.is_empty()).map(|r| output::clean_lines(&short_lines(r))),
            by: Some(format!("{}, after {}", shown(&attempt.instance), span(attempt.took_ms.into()))),
            ..event(attempt.at_ms, &format!("attempt {}: {}", attempt.attempt, shown(&attempt.outcome)), "bad")
        });
    }
    for row in acted {
        let line = audit::Line::of(row, db);
        out.push(Event { detail: line.detail, by: Some(line.actor), ..event(row.at_ms, &line.action, "warn") });
    }
    if let Some((at, by)) = &message.delivered {
        out.push(Event { by: Some(shown(by)), ..event(*at, "delivered", "good") });
    }
    out.sort_by_key(|e| e.at_ms);
    out
}

/// The start of a response, which is stored cut already.
fn short_lines(text: &str) -> String {
    text.chars().take(4_000).collect()
}

/// The payload as it is, as a file. Only where all of it may be seen.
pub(super) async fn payload(
    State(served): State<Shared>,
    _: Who,
    Path(id): Path<i64>,
    Query(of): Query<Of>,
) -> Result<Response, Oops> {
    let database = first_of(&served, &of.db)?;
    let message = ops::messages::show(database, id).await?;
    if !payload::of_message(&served.config, &message).whole {
        return Err(Oops::from(Refused::new(ops::Refusal::Forbidden, "this payload is hidden or masked by the configuration")));
    }
    Ok(payload::file(&format!("message-{id}"), message.payload))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Act {
    db: String,
    action: String,
    destination: String,
}

/// Puts an action together out of its name and, for an edit, the destination.
pub(super) fn action(name: &str, destination: &str) -> Result<Action, Refused> {
    match name {
        "requeue" => Ok(Action::Requeue),
        "skip" => Ok(Action::Skip),
        "edit" if destination.trim().is_empty() => Err(Refused::field("destination", "must name where to send it")),
        "edit" => Ok(Action::Edit { destination: destination.trim().to_owned() }),
        other => Err(Refused::field("action", format!("there is no action {other:?}"))),
    }
}

/// Does something to one message.
pub(super) async fn act(State(served): State<Shared>, who: Who, Path(id): Path<i64>, Form(act): Form<Act>) -> Response {
    let done = async {
        let database = first_of(&served, &act.db).map_err(|_| Refused::missing(format!("there is no database {:?}", act.db)))?;
        let action = action(&act.action, &act.destination)?;
        if let Action::Edit { destination } = &action {
            ops::messages::known_destination(&served.config, destination)?;
        }
        let acted = ops::messages::act(database, &who, &[id], &action).await?;
        if acted.changed.is_empty() {
            return Err(Refused::new(ops::Refusal::Conflict, format!("message {id} was left as it is: {}", acted.why)));
        }
        Ok(format!("message {id} {}", ops::messages::done(&action)))
    };
    match done.await {
        Ok(text) => Notice::done(text),
        Err(refused) => Notice::not_done(&refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_taken_as_utc() {
        assert_eq!(moment("from", "").unwrap(), None);
        assert_eq!(moment("from", "1970-01-02T00:00").unwrap(), Some(86_400_000));
        assert_eq!(moment("from", "1970-01-01T00:00:05Z").unwrap(), Some(5_000));
        let refused = moment("until", "yesterday").unwrap_err();
        assert!(refused.field == Some("until") && refused.text.contains("yesterday"), "{refused:?}");
    }
}
