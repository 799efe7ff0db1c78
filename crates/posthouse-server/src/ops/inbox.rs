//! Received messages: look, count, requeue, skip.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use posthouse::store::{InboxAction, InboxDetail, InboxFilter, InboxRow, InboxStatus, InboxStore, Listed};

use super::messages::{NAMED, ordered, searchable};
use super::{Acted, CHUNK, COUNTED, Counted, Refusal, Refused, operator, plain};
use crate::config::Config;
use crate::http::{ServedRelay, Who};

/// How long a count may take.
const COUNT_TIME: Duration = Duration::from_secs(2);

/// A page of received messages, by consumer and message id.
pub(crate) type Received = Listed<InboxRow, (String, String)>;

/// What was done, in the words that people read.
pub(crate) fn done(action: InboxAction) -> &'static str {
    match action {
        InboxAction::Requeue => "requeued",
        InboxAction::Skip => "skipped",
    }
}

/// Why an action may leave a message out.
pub(crate) fn why_not(action: InboxAction) -> &'static str {
    match action {
        InboxAction::Requeue => "only FAILED messages and those that wait for a retry can be requeued",
        InboxAction::Skip => "messages that had their effect can't be changed",
    }
}

/// A page of received messages. Text is not searched for in payloads that are hidden or masked.
pub(crate) async fn list(config: &Config, relay: &ServedRelay, filter: &InboxFilter) -> Result<Received, Refused> {
    Ok(relay.inbox()?.list(&sealed(config, filter)).await?)
}

/// Refuses what no database can be asked.
pub(crate) fn check(filter: &InboxFilter) -> Result<(), Refused> {
    plain("consumer", filter.consumer.as_deref())?;
    plain("type", filter.kind.as_deref())?;
    searchable(filter.text.as_deref())?;
    ordered(filter.first_after_us, filter.first_before_us)?;
    let after = filter.after.as_ref();
    plain("after_consumer", after.map(|a| a.0.as_str()))?;
    plain("after_id", after.map(|a| a.1.as_str()))
}

/// The filter as it may be asked: hidden payloads can't be guessed by searching for what is in them.
pub(crate) fn sealed(config: &Config, filter: &InboxFilter) -> InboxFilter {
    InboxFilter { sealed: config.masks.seals_received(), ..filter.clone() }
}

/// One received message. Its payload and headers are shown only through [`super::payload`].
pub(crate) async fn show(relay: &ServedRelay, consumer: &str, message_id: &str) -> Result<InboxDetail, Refused> {
    let found = relay.inbox()?.show(consumer, message_id).await?;
    found.ok_or_else(|| {
        Refused::missing(format!("consumer {consumer:?} in database {:?} has received no message {message_id:?}", relay.name))
    })
}

/// The consumers that have received anything: for each, the first row that lies behind those of the one before.
pub(crate) async fn consumers(store: &dyn InboxStore) -> Result<Vec<String>, posthouse::Error> {
    let mut found: Vec<String> = Vec::new();
    loop {
        // No name lies between one and the same with U+0001 behind it, because names have no NUL.
        let after = found.last().map(|last| (format!("{last}\u{1}"), String::new()));
        let filter = InboxFilter { after, limit: 1, ..InboxFilter::default() };
        match store.list(&filter).await?.rows.pop() {
            Some(row) => found.push(row.consumer),
            None => return Ok(found),
        }
    }
}

/// Acts on messages that were named.
pub(crate) async fn act(
    relay: &ServedRelay,
    who: &Who,
    consumer: &str,
    ids: &[String],
    action: InboxAction,
) -> Result<Acted<String>, Refused> {
    operator(who)?;
    if ids.is_empty() || ids.len() > NAMED {
        let text = format!("must name 1 to {NAMED} messages, not {}; for more, act on a filter", ids.len());
        return Err(Refused::field("ids", text).limit(NAMED as u64));
    }
    let store = relay.inbox()?;
    let wanted: BTreeSet<String> = ids.iter().cloned().collect();
    let all: Vec<String> = wanted.iter().cloned().collect();
    let mut changed = BTreeSet::new();
    for chunk in all.chunks(CHUNK as usize) {
        changed.extend(store.act(consumer, chunk, action, &who.name).await?);
    }
    let unchanged = wanted.difference(&changed).cloned().collect();
    Ok(Acted { changed: changed.into_iter().collect(), unchanged, why: why_not(action) })
}

/// Refuses filters whose messages an action can't apply to.
pub(crate) fn can_act(filter: &InboxFilter, action: InboxAction) -> Result<(), Refused> {
    match (filter.status, action) {
        (None, _) => Err(Refused::field(
            "status",
            "an action on all messages that a filter finds needs a status: FAILED, PENDING_RETRY or RETRYING",
        )),
        (Some(InboxStatus::Success), _) => {
            Err(Refused::new(Refusal::Conflict, "SUCCESS messages had their effect, and it can't be taken back or had again"))
        }
        (Some(InboxStatus::Retrying), InboxAction::Requeue) => {
            Err(Refused::new(Refusal::Conflict, "RETRYING messages are being run; skip them, or wait for what comes of it"))
        }
        _ => Ok(()),
    }
}

/// How many messages a filter finds: exactly up to [`COUNTED`] and as far as the time goes.
pub(crate) async fn count(config: &Config, store: &dyn InboxStore, filter: &InboxFilter) -> Result<Counted, Refused> {
    if let Some(exact) = by_backlog(store, filter).await? {
        return Ok(Counted { messages: exact, more: false });
    }
    let started = Instant::now();
    let mut page = InboxFilter { limit: 5_000, after: None, ..sealed(config, filter) };
    let mut messages = 0;
    loop {
        page.within = Some(COUNT_TIME.saturating_sub(started.elapsed()));
        let listed = store.list(&page).await?;
        messages += listed.rows.len() as u64;
        page.after = listed.next;
        if page.after.is_none() || messages >= COUNTED || started.elapsed() >= COUNT_TIME {
            return Ok(Counted { messages, more: page.after.is_some() });
        }
    }
}

/// What isn't done is counted by consumer and status at once.
async fn by_backlog(store: &dyn InboxStore, filter: &InboxFilter) -> Result<Option<u64>, Refused> {
    let InboxFilter { status: Some(status), consumer, .. } = filter else { return Ok(None) };
    let plain = InboxFilter { status: Some(*status), consumer: consumer.clone(), ..InboxFilter::default() };
    let asked = InboxFilter { limit: 0, within: None, sealed: false, after: None, ..filter.clone() };
    if *status == InboxStatus::Success || asked != plain {
        return Ok(None);
    }
    let backlog = store.backlog().await?;
    let of = backlog.iter().filter(|b| b.status == *status && consumer.as_ref().is_none_or(|c| *c == b.consumer));
    Ok(Some(of.map(|b| b.messages.unsigned_abs()).sum()))
}
