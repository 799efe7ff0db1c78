//! `/metrics`: what the relays know, in Prometheus' text format.
//!
//! A relay keeps its own counters, so each scrape fills a fresh registry from one snapshot per database.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use posthouse::RelayStats;
use posthouse::store::Backlog;
use prometheus::{Gauge, GaugeVec, IntCounterVec, Opts, Registry, TextEncoder};

use super::Served;
use crate::config::redact_url;
use crate::health::{self, State};

/// At most this many destinations of a database are told by name, those that need a person first: users write destinations,
/// and a monitoring system keeps every name that it has ever seen.
const NAMED: usize = 200;

/// The name under which the others are summed.
const OTHER: &str = "other";

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
    destinations(&page, &running, &served.routes)?;
    groups(&page, &running)?;
    adopted(&page, served)?;
    backlog(&page, served).await?;
    brokers(&page, served)?;
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
    let uncovered = page.gauge("uncovered_houses", "Houses that no live instance covers.", DATABASE)?;
    let orphaned = page.gauge(
        "orphaned_messages",
        "Messages in houses that no live instance covers or that don't exist; counted up to 10 000 in each of up to 16 houses.",
        DATABASE,
    )?;
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
        let houses = stats.uncovered.as_ref().and_then(|u| u.houses.count());
        uncovered.with_label_values(label).set(f64::from(houses.unwrap_or(0)));
        orphaned.with_label_values(label).set(stats.orphaned.iter().map(|(_, rows)| *rows as f64).sum());
        for (name, at) in &stats.passes {
            pass.with_label_values(&[*database, &name.replace(' ', "_")]).set(now.saturating_duration_since(*at).as_secs_f64());
        }
    }
    Ok(())
}

fn destinations(page: &Page, all: &[(&str, RelayStats)], routes: &BTreeMap<String, String>) -> prometheus::Result<()> {
    let now = Instant::now();
    let delivered = page.counter("destination_delivered_total", "Messages confirmed by this destination.", DESTINATION)?;
    let down =
        page.gauge("destination_down", "1 while the destination is down and one message at a time is tried.", DESTINATION)?;
    let blocked = page.gauge("destination_blocked", "1 while the destination asks to be sent nothing.", DESTINATION)?;
    let since = page.gauge("destination_down_seconds", "How long nothing has got through; 0 when it is ok.", DESTINATION)?;
    let flight = page.gauge("destination_in_flight", "Messages in flight to this destination.", DESTINATION)?;
    let waiting = page.gauge("destination_waiting", "Messages waiting in memory for this destination.", DESTINATION)?;
    let confirmed = page.gauge("destination_last_confirm_seconds", "Time since the last confirmation.", DESTINATION)?;
    for (database, stats) in all {
        for (place, d) in health::all(stats, routes, now).iter().enumerate() {
            let named = place < NAMED;
            let label = &[*database, if named { &d.destination } else { OTHER }];
            // Who is among the others changes, so their sum could go down, which a counter must not.
            if named {
                delivered.with_label_values(label).inc_by(d.delivered);
            }
            down.with_label_values(label).add(f64::from(u8::from(d.state == State::Down)));
            blocked.with_label_values(label).add(f64::from(u8::from(d.state == State::Blocked)));
            flight.with_label_values(label).add(d.in_flight as f64);
            waiting.with_label_values(label).add(d.waiting as f64);
            longest(&since.with_label_values(label), d.down_seconds.unwrap_or(0.0));
            if let Some(ago) = d.last_confirm_seconds {
                longest(&confirmed.with_label_values(label), ago);
            }
        }
    }
    Ok(())
}

fn groups(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let labels = &["database", "group"];
    let runs = page.counter(
        "group_runs_total",
        "Runs of a group on this instance, by what came of them.",
        &["database", "group", "status"],
    )?;
    let last = page.gauge("group_last_run_seconds", "Time since the end of the last run of a group on this instance.", labels)?;
    let running = page.gauge("group_running", "1 while a run of the group is going on this instance.", labels)?;
    let paused = page.gauge("group_paused", "1 while the group is paused.", labels)?;
    for (database, stats) in all {
        for (name, group) in &stats.groups {
            let label = &[*database, name.as_str()];
            for (status, n) in &group.runs {
                runs.with_label_values(&[*database, name, status.as_str()]).inc_by(*n);
            }
            if let Some(run) = &group.last {
                last.with_label_values(label).set(run.ended.elapsed().as_secs_f64());
            }
            running.with_label_values(label).set(f64::from(u8::from(group.running)));
            paused.with_label_values(label).set(f64::from(u8::from(group.paused)));
        }
    }
    Ok(())
}

/// Of several under one name the longest time is told.
fn longest(gauge: &Gauge, seconds: f64) {
    gauge.set(gauge.get().max(seconds));
}

/// Tables of other applications.
fn adopted(page: &Page, served: &Served) -> prometheus::Result<()> {
    if served.adopted.is_empty() {
        return Ok(());
    }
    let labels = &["database", "source", "table"];
    let pending = page.gauge("adopted_pending", "Rows of an adopted table that are to be sent.", labels)?;
    let flight = page.gauge("adopted_in_flight", "Rows of an adopted table in flight.", labels)?;
    let scan = page.gauge("adopted_last_scan_age_seconds", "Time since the last scan that went well.", labels)?;
    let sent = page.counter("adopted_sent_total", "Rows confirmed by their receivers.", labels)?;
    let retried = page.counter("adopted_retried_total", "Attempts that failed and are tried again.", labels)?;
    let failed = page.counter("adopted_failed_total", "Rows that were given up.", labels)?;
    let stale = page.counter("adopted_stale_total", "Outcomes that met a row which its owner had changed.", labels)?;
    let errors = page.counter("adopted_database_errors_total", "Database calls that failed.", &["database", "source"])?;
    for one in &served.adopted {
        let Some(stats) = one.stats() else { continue };
        errors.with_label_values(&[&one.database, &one.name]).inc_by(stats.database_errors);
        for (table, of) in &stats.tables {
            let label = &[&one.database, &one.name, table];
            if let Some(rows) = of.pending {
                pending.with_label_values(label).set(rows as f64);
            }
            flight.with_label_values(label).set(of.in_flight as f64);
            if let Some(at) = of.last_scan {
                scan.with_label_values(label).set(at.elapsed().as_secs_f64());
            }
            sent.with_label_values(label).inc_by(of.sent);
            retried.with_label_values(label).inc_by(of.retried);
            failed.with_label_values(label).inc_by(of.failed);
            stale.with_label_values(label).inc_by(of.stale);
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
        let named = named(&rows);
        for row in rows {
            let name = redact_url(&row.destination);
            let label = &[database.name.as_str(), if named.contains(&name) { &name } else { OTHER }, &row.status];
            messages.with_label_values(label).add(row.messages as f64);
            let old = Duration::from_millis(u64::try_from(row.oldest_ms).unwrap_or(0)).as_secs_f64();
            longest(&oldest.with_label_values(label), old);
        }
    }
    Ok(())
}

/// What waits in brokers. Its names are those of the configuration.
fn brokers(page: &Page, served: &Served) -> prometheus::Result<()> {
    let depths = served.depths.all();
    if depths.is_empty() {
        return Ok(());
    }
    let labels = &["transport", "kind", "name", "group"];
    let up = page.gauge("broker_watch_up", "1 while the broker tells what waits there, 0 while it doesn't.", labels)?;
    let messages = page.gauge(
        "broker_messages",
        "Messages that wait: ready in a RabbitMQ queue, the lag of a Kafka group in a topic, not yet given to a NATS consumer.",
        labels,
    )?;
    let consumers = page.gauge("broker_consumers", "Who receives from it, where the broker says so.", labels)?;
    for d in depths.iter().filter(|d| d.at.is_some()) {
        let label = &[d.transport.as_str(), d.kind, &d.name, d.group.as_deref().unwrap_or_default()];
        up.with_label_values(label).set(f64::from(u8::from(d.messages.is_some())));
        if let Some(n) = d.messages {
            messages.with_label_values(label).set(n as f64);
        }
        if let Some(n) = d.consumers {
            consumers.with_label_values(label).set(n as f64);
        }
    }
    Ok(())
}

/// The destinations of a backlog that are told by name: those with the most FAILED messages, then those with the most others.
fn named(rows: &[Backlog]) -> BTreeSet<String> {
    let mut counted: BTreeMap<String, (i64, i64)> = BTreeMap::new();
    for row in rows {
        let (failed, others) = counted.entry(redact_url(&row.destination)).or_default();
        *(if row.status == "FAILED" { failed } else { others }) += row.messages;
    }
    let mut ranked: Vec<_> = counted.into_iter().collect();
    ranked.sort_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    ranked.into_iter().take(NAMED).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use posthouse::{BreakerState, DestinationStats};

    use super::*;

    #[test]
    fn destinations_beyond_the_limit_are_summed_and_failing_ones_are_named() {
        let mut stats = RelayStats::default();
        for n in 0..NAMED + 50 {
            let mut d = DestinationStats::default();
            (d.in_flight, d.waiting, d.delivered) = (1, 2, 3);
            stats.destinations.insert(format!("d{n:04}"), d);
        }
        let Some(last) = stats.destinations.last_entry() else { unreachable!() };
        last.into_mut().breaker = BreakerState::Open(Instant::now());
        let page = Page { registry: Registry::new() };
        destinations(&page, &[("main", stats)], &BTreeMap::new()).unwrap();
        let text = TextEncoder::new().encode_to_string(&page.registry.gather()).unwrap();
        let lines = |name: &str| text.lines().filter(|l| l.starts_with(&format!("posthouse_{name}{{"))).count();
        let has = |line: &str| text.lines().any(|l| l == format!("posthouse_{line}"));
        assert_eq!(lines("destination_in_flight"), NAMED + 1);
        assert_eq!(lines("destination_delivered_total"), NAMED);
        assert!(has("destination_down{database=\"main\",destination=\"d0249\"} 1"), "{text}");
        assert!(has("destination_down{database=\"main\",destination=\"other\"} 0"), "{text}");
        assert!(has("destination_in_flight{database=\"main\",destination=\"other\"} 50"), "{text}");
        assert!(has("destination_waiting{database=\"main\",destination=\"other\"} 100"), "{text}");
    }

    #[test]
    fn orphaned_messages_are_summed() {
        let mut stats = RelayStats::default();
        stats.orphaned = vec![(posthouse::store::House(-1), 3), (posthouse::store::House(70), 4)];
        let page = Page { registry: Registry::new() };
        gauges(&page, &[("main", stats)]).unwrap();
        let text = TextEncoder::new().encode_to_string(&page.registry.gather()).unwrap();
        for line in ["posthouse_orphaned_messages{database=\"main\"} 7", "posthouse_uncovered_houses{database=\"main\"} 0"] {
            assert!(text.lines().any(|l| l == line), "{line}: {text}");
        }
    }

    #[test]
    fn a_backlog_names_failed_ones_first_and_then_long_ones() {
        let row =
            |destination: String, status: &str, messages| Backlog { destination, status: status.into(), messages, oldest_ms: 0 };
        let mut rows: Vec<Backlog> = (0..NAMED as i64 + 1).map(|n| row(format!("d{n:04}"), "PENDING", n)).collect();
        rows.push(row("z".into(), "FAILED", 1));
        let named = named(&rows);
        assert_eq!(named.len(), NAMED);
        assert!(named.contains("z") && named.contains("d0200"), "{named:?}");
        assert!(!named.contains("d0000") && !named.contains("d0001"), "the shortest ones");
    }
}
