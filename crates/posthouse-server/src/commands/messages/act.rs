//! `posthouse messages requeue | skip | edit`.

use std::collections::BTreeSet;

use posthouse::store::{Action, MessageFilter, MessageStatus, Store};
use serde_json::json;

use super::resolve;
use crate::cli::{By, Global, Which};
use crate::commands::{actor, capital, confirm, interrupted, progress};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::{CHUNK, messages};
use crate::output::{self, clean, count};

pub(super) async fn run(
    global: &Global,
    database: &Database,
    store: &dyn Store,
    which: Which,
    action: Action,
    by: By,
) -> Result<(), Failure> {
    if !which.all {
        if which.filter.status.is_some() || which.filter.destination.is_some() {
            return Err(Failure::usage("--status and --destination go with --all, not with ids"));
        }
        return these(global, database, store, &which.ids, action, by).await;
    }
    let filter = MessageFilter {
        status: which.filter.status.map(Into::into),
        destination: which.filter.destination,
        limit: CHUNK,
        ..MessageFilter::default()
    };
    all(global, database, store, filter, action, by).await
}

/// Acts on messages that were named one by one.
pub(super) async fn these(
    global: &Global,
    database: &Database,
    store: &dyn Store,
    names: &[String],
    action: Action,
    by: By,
) -> Result<(), Failure> {
    let mut ids = Vec::new();
    for name in names {
        ids.extend(resolve(database, store, name).await?);
    }
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > 1 {
        confirm(&format!("{} {}?", capital(action.name()), count(ids.len(), "message")), by.yes)?;
    }
    let mut changed = BTreeSet::new();
    for chunk in ids.chunks(CHUNK as usize) {
        changed.extend(store.act(chunk, &action, &actor(&by)).await.map_err(|e| database.failure(&e))?);
    }
    let left: Vec<i64> = ids.into_iter().filter(|id| !changed.contains(id)).collect();
    if global.json {
        output::json(&json!({ "action": action.name(), "changed": changed, "unchanged": left }));
    } else {
        output::say(&format!("{} {}", messages::done(&action), count(changed.len(), "message")));
    }
    if left.is_empty() {
        return Ok(());
    }
    let rows: Vec<String> = left.iter().take(20).map(ToString::to_string).collect();
    let text = format!(
        "left as they are: row {}{}; {}",
        rows.join(", "),
        if left.len() > 20 { ", …" } else { "" },
        messages::why_not(&action)
    );
    Err(Failure { printed: true, ..Failure::not_so(text) })
}

/// Acts on all messages that a filter finds, page by page from the newest down; later ones are left alone.
async fn all(
    global: &Global,
    database: &Database,
    store: &dyn Store,
    mut filter: MessageFilter,
    action: Action,
    by: By,
) -> Result<(), Failure> {
    let status = filter.status.map_or("", MessageStatus::as_str);
    messages::can_act(&filter, &action).map_err(|refused| Failure::usage(refused.text))?;
    let backlog = store.backlog().await.map_err(|e| database.failure(&e))?;
    let expected: i64 = backlog
        .iter()
        .filter(|b| b.status == status && filter.destination.as_ref().is_none_or(|d| *d == b.destination))
        .map(|b| b.messages)
        .sum();
    if let Some(destination) = &filter.destination
        && !backlog.iter().any(|b| b.destination == *destination)
    {
        let known: BTreeSet<&str> = backlog.iter().map(|b| b.destination.as_str()).collect();
        let meant = crate::config::suggest(destination, known.iter().copied()).map(|m| format!("; did you mean {m:?}?"));
        return Err(Failure::not_so(format!("no unfinished message goes to {destination:?}{}", meant.unwrap_or_default())));
    }
    if expected > 0 {
        let to = filter.destination.as_ref().map(|d| format!(" to {d:?}")).unwrap_or_default();
        let what = count(expected as usize, &format!("{status} message"));
        confirm(&format!("{} {what}{to} in database {:?}?", capital(action.name()), database.name), by.yes)?;
    }
    let actor = actor(&by);
    let bar = progress(expected as u64);
    let (mut changed, mut seen) = (0, 0);
    loop {
        let listed = store.list(&filter).await.map_err(|e| interrupted(database, &e, changed))?;
        let ids: Vec<i64> = listed.rows.iter().map(|r| r.id).collect();
        changed += store.act(&ids, &action, &actor).await.map_err(|e| interrupted(database, &e, changed))?.len();
        seen += ids.len();
        bar.inc(ids.len() as u64);
        filter.before = listed.next;
        if filter.before.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    if global.json {
        output::json(&json!({ "action": action.name(), "changed": changed, "unchanged": seen - changed }));
    } else {
        let left = if seen > changed { format!("; {} changed meanwhile and were left", seen - changed) } else { String::new() };
        output::say(&clean(&format!("{} {}{left}", messages::done(&action), count(changed, "message"))));
    }
    Ok(())
}
