//! `/metrics`: what the relays know, in Prometheus' text format.
//!
//! A relay keeps its own counters, so each scrape fills a fresh registry from one snapshot per database.

use std::time::{Duration, Instant};

use posthouse::{BreakerState, RelayStats};
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry, TextEncoder};

use super::Served;
use crate::config::redact_url;

const DATABASE: &[&str] = &["database"];
const DESTINATION: &[&str] = &["database", "destination"];

/// Finds metrics by name, making them when they are first used.
struct Page {
    registry: Registry,
}

impl Page {
    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        let made = IntCounterVec::new(Opts::new(format!("posthouse_{name}"), help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
        let made = GaugeVec::new(Opts::new(format!("posthouse_{name}"), help), labels)?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }
}

pub(super) async fn text(served: &Served) -> prometheus::Result<String> {
    let page = Page { registry: Registry::new() };
    let build = page.gauge("build_info", "1, labelled by version.", &["version"])?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
    let stats: Vec<(&str, Option<RelayStats>)> = served.databases.iter().map(|d| (d.name.as_str(), d.stats())).collect();
    let up = page.gauge("relay_running", "1 while a relay runs for this database.", DATABASE)?;
    for (name, stats) in &stats {
        up.with_label_values(&[name]).set(f64::from(u8::from(stats.is_some())));
    }
    let running: Vec<(&str, RelayStats)> = stats.into_iter().filter_map(|(name, s)| s.map(|s| (name, s))).collect();
    totals(&page, &running)?;
    gauges(&page, &running)?;
    destinations(&page, &running)?;
    backlog(&page, served).await?;
    TextEncoder::new().encode_to_string(&page.registry.gather())
}

type Count = fn(&RelayStats) -> u64;

fn totals(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let counters: [(&str, &str, Count); 9] = [
        ("delivered_total", "Messages confirmed by their receivers.", |s| s.delivered),
        ("retried_total", "Attempts that failed and are tried again.", |s| s.retried),
        ("failed_total", "Messages that became FAILED.", |s| s.failed),
        ("unavailable_total", "Tries that found the destination down.", |s| s.unavailable),
        ("stale_total", "Outcomes that changed nothing because somebody else had changed the row.", |s| s.stale),
        ("missing_total", "Pending rows without a log row; more than 0 is an alarm.", |s| s.missing),
        ("database_errors_total", "Database calls that failed.", |s| s.database_errors),
        ("leases_lost_total", "Leases that ran out.", |s| s.leases_lost),
        ("restarts_total", "Times the loops were started anew after a panic.", |s| s.restarts),
    ];
    for (name, help, value) in counters {
        let counter = page.counter(name, help, DATABASE)?;
        for (database, stats) in all {
            counter.with_label_values(&[database]).inc_by(value(stats));
        }
    }
    Ok(())
}

fn gauges(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let now = Instant::now();
    let houses = page.gauge("houses", "Houses this instance owns.", DATABASE)?;
    let memory = page.gauge("in_memory", "Messages in memory: waiting, in flight, being written back.", DATABASE)?;
    let flight = page.gauge("in_flight", "Messages in flight.", DATABASE)?;
    let bytes = page.gauge("in_memory_bytes", "Payload bytes in memory.", DATABASE)?;
    let lease = page.gauge("lease_seconds_left", "What is left of the lease; 0 without one.", DATABASE)?;
    let partitions = page.gauge("partitions_ahead", "Partitions of the message log that are ready ahead.", DATABASE)?;
    let sweep = page.gauge("full_sweep_seconds", "How long the last full sweep took.", DATABASE)?;
    let pass = page.gauge("last_pass_age_seconds", "Time since the last successful pass of a loop.", &["database", "loop"])?;
    for (database, stats) in all {
        let label = &[*database];
        houses.with_label_values(label).set(f64::from(stats.houses));
        memory.with_label_values(label).set(stats.in_memory as f64);
        flight.with_label_values(label).set(stats.in_flight as f64);
        bytes.with_label_values(label).set(stats.bytes as f64);
        let left = stats.lease_until.map(|until| until.saturating_duration_since(now)).unwrap_or_default();
        lease.with_label_values(label).set(left.as_secs_f64());
        if let Some(ahead) = stats.partitions_ahead {
            partitions.with_label_values(label).set(f64::from(ahead));
        }
        if let Some(took) = stats.full_sweep {
            sweep.with_label_values(label).set(took.as_secs_f64());
        }
        for (name, at) in &stats.passes {
            pass.with_label_values(&[*database, &name.replace(' ', "_")]).set(now.saturating_duration_since(*at).as_secs_f64());
        }
    }
    Ok(())
}

fn destinations(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let delivered = page.counter("destination_delivered_total", "Messages confirmed by this destination.", DESTINATION)?;
    let down =
        page.gauge("destination_down", "1 while the destination is down and one message at a time is tried.", DESTINATION)?;
    let flight = page.gauge("destination_in_flight", "Messages in flight to this destination.", DESTINATION)?;
    let waiting = page.gauge("destination_waiting", "Messages waiting in memory for this destination.", DESTINATION)?;
    for (database, stats) in all {
        for (name, d) in &stats.destinations {
            let label = &[*database, &redact_url(name)];
            // Added, because two names may be the same without their secrets.
            delivered.with_label_values(label).inc_by(d.delivered);
            down.with_label_values(label).add(f64::from(u8::from(matches!(d.breaker, BreakerState::Open(_)))));
            flight.with_label_values(label).add(f64::from(d.in_flight));
            waiting.with_label_values(label).add(f64::from(d.waiting));
        }
    }
    Ok(())
}

async fn backlog(page: &Page, served: &Served) -> prometheus::Result<()> {
    let labels = &["database", "destination", "status"];
    let messages = page.gauge("backlog_messages", "Unfinished messages in the database.", labels)?;
    let oldest = page.gauge("backlog_oldest_seconds", "Age of the oldest of them.", labels)?;
    let age = page.gauge("backlog_age_seconds", "How long ago the backlog was counted.", DATABASE)?;
    let counted = futures_util::future::join_all(served.databases.iter().map(|d| d.backlog())).await;
    for (database, counted) in served.databases.iter().zip(counted) {
        let Some((rows, since)) = counted else { continue };
        age.with_label_values(&[&database.name]).set(since.as_secs_f64());
        for row in rows {
            let label = &[&database.name, &redact_url(&row.destination), &row.status];
            messages.with_label_values(label).add(row.messages as f64);
            let old = Duration::from_millis(u64::try_from(row.oldest_ms).unwrap_or(0)).as_secs_f64();
            let gauge = oldest.with_label_values(label);
            gauge.set(gauge.get().max(old));
        }
    }
    Ok(())
}
