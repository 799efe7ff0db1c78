//! `watch` in `[transports.NAME]`: what of brokers is looked at.

use std::collections::{BTreeMap, BTreeSet};

#[cfg(feature = "rabbitmq")]
use posthouse::Route;
use serde::Serialize;
use toml::{Table, Value};

#[cfg(feature = "rabbitmq")]
use super::Config;
#[cfg(feature = "rabbitmq")]
use super::TransportConfig;
use super::problem::{Problem, join};
use super::shape::Walk;

/// A queue; or a topic or stream, and a group or durable consumer that receives from it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Watched {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
}

/// What is watched, by transport.
pub(crate) type Watches = BTreeMap<String, BTreeSet<Watched>>;

/// Takes `watch` out of a transport's table.
pub(super) fn take(walk: &mut Walk<'_>, at: &str, kind: &str, table: &mut Table) -> BTreeSet<Watched> {
    let at = join(at, "watch");
    let Some(Value::Array(items)) = table.remove("watch") else { return BTreeSet::new() };
    let mut out = BTreeSet::new();
    for (place, item) in items.into_iter().enumerate() {
        let here = format!("{at}[{place}]");
        match item {
            Value::String(queue) if named(walk, &here, &queue) => {
                out.insert(Watched { name: queue, group: None });
            }
            Value::Table(table) => out.extend(pairs(walk, &here, kind, &table)),
            // Told by the walk.
            _ => {}
        }
    }
    out
}

/// `{ group = "…", topics = ["…"] }`, or for NATS `{ stream = "…", consumers = ["…"] }`.
fn pairs(walk: &mut Walk<'_>, at: &str, kind: &str, table: &Table) -> Vec<Watched> {
    let (one, several, example) = match kind {
        "nats" => ("stream", "consumers", "{ stream = \"ORDERS\", consumers = [\"stock\"] }"),
        _ => ("group", "topics", "{ group = \"invoices\", topics = [\"lottery_invoice\"] }"),
    };
    let below = format!("{at}.");
    if walk.problems.iter().any(|p| p.path.starts_with(&below)) {
        return Vec::new();
    }
    let single = table.get(one).and_then(Value::as_str);
    let list = table.get(several).and_then(Value::as_array).filter(|list| !list.is_empty());
    let (Some(single), Some(list)) = (single, list) else {
        let missing = if single.is_none() { one } else { several };
        walk.problems.push(Problem::new(join(at, missing), None, "is missing").fix(example));
        return Vec::new();
    };
    let list: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
    let all = named(walk, &join(at, one), single);
    if !list.iter().fold(all, |all, name| named(walk, &join(at, several), name) && all) {
        return Vec::new();
    }
    let watched = |other: &&str| match kind {
        "nats" => Watched { name: single.to_owned(), group: Some((*other).to_owned()) },
        _ => Watched { name: (*other).to_owned(), group: Some(single.to_owned()) },
    };
    list.iter().map(watched).collect()
}

/// What a broker can have as a name at all, and a metric as a label.
fn named(walk: &mut Walk<'_>, at: &str, name: &str) -> bool {
    let reason = match name {
        "" => "has an empty name",
        long if long.len() > 255 => "has a name of more than 255 bytes, the most that there is",
        odd if odd.contains(char::is_control) => "has a name with control characters",
        _ => return true,
    };
    walk.problems.push(Problem::new(at, None, reason));
    false
}

/// Adds the queues that routes lead to by name: those that they declare, and those without an exchange in between.
#[cfg(feature = "rabbitmq")]
pub(super) fn of_routes(config: &mut Config) {
    for (name, route) in &config.routes {
        let to = if route.to.is_empty() { name } else { &route.to };
        let Some((transport, address)) = to.split_once(':') else { continue };
        if matches!(config.transports.get(transport), Some(TransportConfig::RabbitMq(_)))
            && let Some(queue) = queue_of(route, address)
        {
            config.watch.entry(transport.to_owned()).or_default().insert(Watched { name: queue.to_owned(), group: None });
        }
    }
}

#[cfg(feature = "rabbitmq")]
fn queue_of<'r>(route: &'r Route, address: &'r str) -> Option<&'r str> {
    match address.strip_prefix('/') {
        Some(queue) => Some(queue),
        None => route.rabbitmq.queue.as_deref().filter(|_| route.rabbitmq.declare),
    }
}
