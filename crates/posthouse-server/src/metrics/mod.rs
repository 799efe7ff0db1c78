//! What relays, databases and brokers know, as metrics: for Prometheus, and for OpenTelemetry.
//!
//! Everything keeps its own counters, so each scrape fills a fresh registry from one snapshot of each. `docs/metrics.md` lists
//! them all; a test keeps that list.
//!
//! | file | what it does |
//! |---|---|
//! | `otlp.rs` | sends them to an OpenTelemetry collector |
//! | `page.rs` | makes families of metrics out of snapshots |
//! | `relay.rs` | what the relays of this process did and how they stand |
//! | `waiting.rs` | what waits in databases and brokers, whoever works on it |

#[cfg(feature = "otlp")]
mod otlp;
mod page;
mod relay;
mod waiting;

use std::collections::BTreeMap;

use posthouse::RelayStats;
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, TextEncoder};

#[cfg(feature = "otlp")]
pub(crate) use self::otlp::Otlp;
use self::page::Page;
use crate::http::Served;

/// At most this many destinations of a database, or consumers, are told by name, those that need a person first: users write
/// destinations, and a monitoring system keeps every name that it has ever seen.
const NAMED: usize = 200;

/// The name under which the others are summed.
const OTHER: &str = "other";

const DATABASE: &[&str] = &["database"];

/// In Prometheus' text format.
pub(crate) async fn text(served: &Served) -> prometheus::Result<String> {
    TextEncoder::new().encode_to_string(&families(served).await?)
}

/// All there is, by name.
pub(crate) async fn families(served: &Served) -> prometheus::Result<Vec<MetricFamily>> {
    let page = Page::new();
    let build = page.gauge("build_info", "1, labelled by version.", &["version"])?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
    let stats: Vec<(&str, Option<RelayStats>)> = served.databases.iter().map(|d| (d.name.as_str(), d.stats())).collect();
    let up = page.gauge("relay_running", "1 while a relay runs for this database.", DATABASE)?;
    for (name, stats) in &stats {
        up.with_label_values(&[name]).set(f64::from(u8::from(stats.is_some())));
    }
    let running: Vec<(&str, RelayStats)> = stats.into_iter().filter_map(|(name, s)| s.map(|s| (name, s))).collect();
    relay::add(&page, &running, &served.routes)?;
    waiting::add(&page, served).await?;
    Ok(page.families())
}

/// Of several under one name the longest time is told.
fn longest(gauge: &Gauge, seconds: f64) {
    gauge.set(gauge.get().max(seconds));
}

/// Those that are told by name: with the most FAILED messages, then with the most others.
fn named(rows: impl Iterator<Item = (String, bool, i64)>) -> std::collections::BTreeSet<String> {
    let mut counted: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for (name, is_failed, messages) in rows {
        let (failed, others) = counted.entry(name).or_default();
        *(if is_failed { failed } else { others }) += messages;
    }
    let mut ranked: Vec<_> = counted.into_iter().collect();
    ranked.sort_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    ranked.into_iter().take(NAMED).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_ones_are_named_first_and_then_long_ones() {
        let mut rows: Vec<(String, bool, i64)> = (0..NAMED as i64 + 1).map(|n| (format!("d{n:04}"), false, n)).collect();
        rows.push(("z".into(), true, 1));
        let named = named(rows.into_iter());
        assert_eq!(named.len(), NAMED);
        assert!(named.contains("z") && named.contains("d0200"), "{named:?}");
        assert!(!named.contains("d0000") && !named.contains("d0001"), "the shortest ones");
    }
}
