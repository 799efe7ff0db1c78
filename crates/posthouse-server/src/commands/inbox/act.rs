//! `posthouse inbox requeue | skip`.

use std::collections::{BTreeMap, BTreeSet};

use posthouse::store::{InboxAction, InboxFilter, InboxStatus, InboxStore, Listed};
use serde_json::json;

use super::{named, resolve};
use crate::cli::{By, Global, WhichReceived};
use crate::commands::{actor, capital, confirm, interrupted, progress};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::{CHUNK, inbox as received};
use crate::output::{self, clean, count};

fn verb(action: InboxAction) -> &'static str {
    match action {
        InboxAction::Requeue => "requeue",
        InboxAction::Skip => "skip",
    }
}

pub(super) async fn run(
    global: &Global,
    database: &Database,
    store: &dyn InboxStore,
    which: WhichReceived,
    action: InboxAction,
    by: By,
) -> Result<(), Failure> {
    if !which.all {
        if which.filter.status.is_some() || which.filter.kind.is_some() {
            return Err(Failure::usage("--status and --type go with --all, not with ids"));
        }
        return these(global, database, store, &which.ids, which.consumer, action, by).await;
    }
    let filter = InboxFilter {
        consumer: which.consumer,
        status: which.filter.status.map(Into::into),
        kind: which.filter.kind,
        limit: CHUNK,
        ..InboxFilter::default()
    };
    all(global, database, store, filter, action, by).await
}

/// Acts on messages that were named one by one.
async fn these(
    global: &Global,
    database: &Database,
    store: &dyn InboxStore,
    names: &[String],
    consumer: Option<String>,
    action: InboxAction,
    by: By,
) -> Result<(), Failure> {
    let consumers = named(database, store, consumer).await?;
    let mut ids: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for name in names {
        let row = resolve(database, store, name, &consumers).await?.row;
        ids.entry(row.consumer).or_default().insert(row.message_id);
    }
    let messages: usize = ids.values().map(BTreeSet::len).sum();
    if messages > 1 {
        confirm(&format!("{} {}?", capital(verb(action)), count(messages, "message")), by.yes)?;
    }
    let (mut changed, mut left) = (Vec::new(), Vec::new());
    for (consumer, ids) in ids {
        let ids: Vec<String> = ids.into_iter().collect();
        for chunk in ids.chunks(CHUNK as usize) {
            let acted =
                store.act(&consumer, chunk, action, &actor(&by)).await.map_err(|e| interrupted(database, &e, changed.len()))?;
            left.extend(chunk.iter().filter(|id| !acted.contains(id)).cloned());
            changed.extend(acted);
        }
    }
    if global.json {
        output::json(&json!({ "action": verb(action), "changed": changed, "unchanged": left }));
    } else {
        output::say(&format!("{} {}", received::done(action), count(changed.len(), "message")));
    }
    if left.is_empty() {
        return Ok(());
    }
    let told: Vec<String> = left.iter().take(20).cloned().collect();
    let text = format!(
        "left as they are: {}{}; {}",
        told.join(", "),
        if left.len() > 20 { ", …" } else { "" },
        received::why_not(action)
    );
    Err(Failure { printed: true, ..Failure::not_so(text) })
}

/// Acts on all messages that a filter finds, page by page, each once.
async fn all(
    global: &Global,
    database: &Database,
    store: &dyn InboxStore,
    mut filter: InboxFilter,
    action: InboxAction,
    by: By,
) -> Result<(), Failure> {
    let status = filter.status.map_or("", InboxStatus::as_str);
    received::can_act(&filter, action).map_err(|refused| Failure::usage(refused.text))?;
    if filter.consumer.is_some() {
        named(database, store, filter.consumer.clone()).await?;
    }
    let expected = expected(database, store, &filter).await?;
    if expected > 0 {
        let of = filter.consumer.as_ref().map(|c| format!(" of consumer {c:?}")).unwrap_or_default();
        let typed = filter.kind.as_ref().map(|t| format!(" of type {t:?}")).unwrap_or_default();
        let what = count(expected, &format!("{status} message"));
        confirm(&format!("{} {what}{typed}{of} in database {:?}?", capital(verb(action)), database.name), by.yes)?;
    }
    let actor = actor(&by);
    let bar = progress(expected as u64);
    let (mut changed, mut seen) = (0, 0);
    loop {
        let Listed { rows, next, .. } = store.list(&filter).await.map_err(|e| interrupted(database, &e, changed))?;
        for of_one in rows.chunk_by(|a, b| a.consumer == b.consumer) {
            let ids: Vec<String> = of_one.iter().map(|r| r.message_id.clone()).collect();
            let acted = store.act(&of_one[0].consumer, &ids, action, &actor).await;
            changed += acted.map_err(|e| interrupted(database, &e, changed))?.len();
        }
        seen += rows.len();
        bar.inc(rows.len() as u64);
        filter.after = next;
        if filter.after.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    if global.json {
        output::json(&json!({ "action": verb(action), "changed": changed, "unchanged": seen - changed }));
    } else {
        let left = if seen > changed { format!("; {} changed meanwhile and were left", seen - changed) } else { String::new() };
        output::say(&clean(&format!("{} {}{left}", received::done(action), count(changed, "message"))));
    }
    Ok(())
}

/// How many there are now. The backlog doesn't know types, so those are counted one by one.
async fn expected(database: &Database, store: &dyn InboxStore, filter: &InboxFilter) -> Result<usize, Failure> {
    if filter.kind.is_none() {
        let backlog = store.backlog().await.map_err(|e| database.failure(&e))?;
        let of = backlog.iter().filter(|b| Some(b.status) == filter.status);
        let of = of.filter(|b| filter.consumer.as_ref().is_none_or(|c| *c == b.consumer));
        return Ok(of.map(|b| usize::try_from(b.messages).unwrap_or(0)).sum());
    }
    let mut page = InboxFilter { limit: 10_000, ..filter.clone() };
    let mut counted = 0;
    loop {
        let listed = store.list(&page).await.map_err(|e| database.failure(&e))?;
        counted += listed.rows.len();
        page.after = listed.next;
        if page.after.is_none() {
            return Ok(counted);
        }
    }
}
