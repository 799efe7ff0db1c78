//! Messages of the outbox: look, count, requeue, skip, send elsewhere.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use posthouse::store::{Action, Listed, MessageDetail, MessageFilter, MessageRow, MessageStatus, Store, destination_matches};

use super::{Acted, CHUNK, COUNTED, Counted, Refusal, Refused, operator, plain};
use crate::config::{Config, check, redact_url};
use crate::http::{ServedRelay, Who};

/// How long a count may take.
const COUNT_TIME: Duration = Duration::from_secs(2);

/// Messages that can be named at once.
pub(crate) const NAMED: usize = 1_000;

/// What was done, in the words that people read.
pub(crate) fn done(action: &Action) -> &'static str {
    match action {
        Action::Requeue => "requeued",
        Action::Skip => "skipped",
        Action::Edit { .. } => "sent elsewhere",
    }
}

/// Why an action may leave a message out.
pub(crate) fn why_not(action: &Action) -> &'static str {
    match action {
        Action::Requeue => "only FAILED messages and those that wait for a retry can be requeued",
        Action::Skip | Action::Edit { .. } => "messages that are delivered can't be changed",
    }
}

/// A page of messages, newest first. Text is not searched for in payloads that are hidden or masked.
pub(crate) async fn list(config: &Config, relay: &ServedRelay, filter: &MessageFilter) -> Result<Listed<MessageRow>, Refused> {
    Ok(relay.people.list(&sealed(config, filter)).await?)
}

/// Refuses what no database can be asked.
pub(crate) fn check(filter: &MessageFilter) -> Result<(), Refused> {
    plain("destination", filter.destination.as_deref())?;
    plain("key", filter.key.as_deref())?;
    plain("message_id", filter.message_id.as_deref())?;
    searchable(filter.text.as_deref())?;
    ordered(filter.created_after_ms, filter.created_before_ms)
}

/// Text that can be searched for.
pub(super) fn searchable(text: Option<&str>) -> Result<(), Refused> {
    if text == Some("") {
        return Err(Refused::field("text", "text: must not be empty"));
    }
    plain("text", text)
}

/// A span of time that ends after it begins.
pub(super) fn ordered(from: Option<i64>, to: Option<i64>) -> Result<(), Refused> {
    match (from, to) {
        (Some(from), Some(to)) if from >= to => Err(Refused::field("until_ms", "the span of time ends before it begins")),
        _ => Ok(()),
    }
}

/// The filter as it may be asked: hidden payloads can't be guessed by searching for what is in them.
pub(crate) fn sealed(config: &Config, filter: &MessageFilter) -> MessageFilter {
    let mut sealed = config.masks.sealed();
    // A pattern may mean where a route leads.
    let leads = config.routes.iter().filter(|(_, route)| sealed.iter().any(|p| destination_matches(p, &route.to)));
    let leads: Vec<String> = leads.map(|(name, _)| name.clone()).collect();
    sealed.extend(leads);
    MessageFilter { sealed, ..filter.clone() }
}

/// One message by row id. Its payload and headers are shown only through [`super::payload`].
pub(crate) async fn show(relay: &ServedRelay, id: i64) -> Result<MessageDetail, Refused> {
    let found = relay.people.show(id).await?;
    found.ok_or_else(|| Refused::missing(format!("database {:?} has no message with the row id {id}", relay.name)))
}

/// Row ids of what a person named by row id or message id; none: there is no such message.
pub(crate) async fn resolve(store: &dyn Store, name: &str) -> Result<Vec<i64>, posthouse::Error> {
    if let Ok(id) = name.parse::<i64>()
        && store.show(id).await?.is_some()
    {
        return Ok(vec![id]);
    }
    let filter = MessageFilter { message_id: Some(name.to_owned()), limit: 100, ..MessageFilter::default() };
    Ok(store.list(&filter).await?.rows.into_iter().map(|r| r.id).collect())
}

/// The destination must lead somewhere by this configuration.
pub(crate) fn known_destination(config: &Config, destination: &str) -> Result<(), Refused> {
    if config.file.is_none() {
        return Ok(());
    }
    check::destination(destination, config)
        .map_err(|why| Refused::field("destination", format!("destination {:?}: {why}", redact_url(destination))))
}

/// Acts on messages that were named by their row ids.
pub(crate) async fn act(relay: &ServedRelay, who: &Who, ids: &[i64], action: &Action) -> Result<Acted<i64>, Refused> {
    operator(who)?;
    if ids.is_empty() || ids.len() > NAMED {
        let text = format!("must name 1 to {NAMED} messages, not {}; for more, act on a filter", ids.len());
        return Err(Refused::field("ids", text).limit(NAMED as u64));
    }
    let wanted: BTreeSet<i64> = ids.iter().copied().collect();
    let all: Vec<i64> = wanted.iter().copied().collect();
    let mut changed = BTreeSet::new();
    for chunk in all.chunks(CHUNK as usize) {
        changed.extend(relay.people.act(chunk, action, &who.name).await?);
    }
    let unchanged = wanted.difference(&changed).copied().collect();
    Ok(Acted { changed: changed.into_iter().collect(), unchanged, why: why_not(action) })
}

/// Refuses filters whose messages an action can't apply to.
pub(crate) fn can_act(filter: &MessageFilter, action: &Action) -> Result<(), Refused> {
    match (filter.status, action) {
        (None, _) => Err(Refused::field(
            "status",
            "an action on all messages that a filter finds needs a status: FAILED, PENDING or SENDING",
        )),
        (Some(MessageStatus::Sent), _) => {
            Err(Refused::new(Refusal::Conflict, "SENT messages are delivered; to send one again, publish it again"))
        }
        (Some(MessageStatus::Sending), Action::Requeue) => {
            Err(Refused::new(Refusal::Conflict, "SENDING messages are in flight; skip them, or wait for what comes of it"))
        }
        _ => Ok(()),
    }
}

/// How many messages a filter finds: exactly up to [`COUNTED`] and as far as the time goes.
pub(crate) async fn count(config: &Config, store: &dyn Store, filter: &MessageFilter) -> Result<Counted, Refused> {
    if let Some(exact) = by_backlog(store, filter).await? {
        return Ok(Counted { messages: exact, more: false });
    }
    let started = Instant::now();
    let mut page = MessageFilter { limit: 5_000, before: None, ..sealed(config, filter) };
    let mut messages = 0;
    loop {
        page.within = Some(COUNT_TIME.saturating_sub(started.elapsed()));
        let listed = store.list(&page).await?;
        messages += listed.rows.len() as u64;
        page.before = listed.next;
        if page.before.is_none() || messages >= COUNTED || started.elapsed() >= COUNT_TIME {
            return Ok(Counted { messages, more: page.before.is_some() });
        }
    }
}

/// The pending set is counted by status and destination at once.
async fn by_backlog(store: &dyn Store, filter: &MessageFilter) -> Result<Option<u64>, Refused> {
    let MessageFilter { status: Some(status), destination, .. } = filter else { return Ok(None) };
    let plain = MessageFilter { status: Some(*status), destination: destination.clone(), ..MessageFilter::default() };
    let asked = MessageFilter { limit: 0, within: None, sealed: Vec::new(), before: None, ..filter.clone() };
    if *status == MessageStatus::Sent || asked != plain {
        return Ok(None);
    }
    let backlog = store.backlog().await?;
    let of = backlog.iter().filter(|b| b.status == status.as_str() && destination.as_ref().is_none_or(|d| *d == b.destination));
    Ok(Some(of.map(|b| b.messages.unsigned_abs()).sum()))
}
