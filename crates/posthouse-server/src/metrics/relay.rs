//! What the relays of this process did and how they stand.

use std::collections::{BTreeMap, HashSet};
use std::time::Instant;

use posthouse::{AttemptCounts, RelayStats};

use super::page::Page;
use super::{DATABASE, NAMED, OTHER, longest};
use crate::config::redact_url;
use crate::health::{self, State};

const DESTINATION: &[&str] = &["database", "destination"];

pub(super) fn add(page: &Page, running: &[(&str, RelayStats)], routes: &BTreeMap<String, String>) -> prometheus::Result<()> {
    totals(page, running)?;
    attempts(page, running)?;
    times(page, running)?;
    gauges(page, running)?;
    destinations(page, running, routes)?;
    groups(page, running)
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

/// What came of tries to send, as the label `outcome`.
fn outcomes(counts: &AttemptCounts) -> [(&'static str, u64); 5] {
    [
        ("delivered", counts.delivered),
        ("retried", counts.retried),
        ("failed", counts.failed),
        ("rejected", counts.rejected),
        ("unavailable", counts.unavailable),
    ]
}

fn attempts(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let by_outcome = page.counter("attempts_total", "Tries to send, by what came of them.", &["database", "outcome"])?;
    let reached = page.counter(
        "tried_messages_total",
        "Messages whose first, or third, attempt gave a result: the latter over the former is the share that is retried again and again.",
        &["database", "attempt"],
    )?;
    for (database, stats) in all {
        for (outcome, n) in outcomes(&stats.attempts) {
            by_outcome.with_label_values(&[*database, outcome]).inc_by(n);
        }
        reached.with_label_values(&[*database, "1"]).inc_by(stats.attempts.first);
        reached.with_label_values(&[*database, "3"]).inc_by(stats.attempts.third);
    }
    Ok(())
}

fn times(page: &Page, all: &[(&str, RelayStats)]) -> prometheus::Result<()> {
    let latency = page.histogram(
        "delivery_latency_seconds",
        "From publishing (or the time to deliver at) to the receiver's confirmation, by the database's clock.",
        DATABASE,
    )?;
    let attempt = page.histogram("attempt_duration_seconds", "How long attempts took that gave a result.", DATABASE)?;
    let sweep = page.histogram("sweep_duration_seconds", "How long sweeps of the pending set took.", &["database", "sweep"])?;
    for (database, stats) in all {
        latency.add(&[database], &stats.latency);
        attempt.add(&[database], &stats.attempt_time);
        sweep.add(&[database, "near"], &stats.near_sweeps);
        sweep.add(&[database, "full"], &stats.full_sweeps);
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
    let problems = page.gauge(
        "problems",
        "Problems with the tables that keep messages from being published or sent until a person mends them; /readyz tells which.",
        DATABASE,
    )?;
    let pool = page.gauge("pool_connections", "Open connections of the relay's own pools.", &["database", "state"])?;
    let most = page.gauge("pool_connections_max", "The most connections that the relay opens.", DATABASE)?;
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
        problems.with_label_values(label).set(stats.problems.len() as f64);
        let connections = stats.connections;
        pool.with_label_values(&[*database, "idle"]).set(connections.idle.into());
        pool.with_label_values(&[*database, "in_use"]).set(connections.open.saturating_sub(connections.idle).into());
        most.with_label_values(label).set(connections.most.into());
        for (name, at) in &stats.passes {
            pass.with_label_values(&[*database, &name.replace(' ', "_")]).set(now.saturating_duration_since(*at).as_secs_f64());
        }
    }
    Ok(())
}

fn destinations(page: &Page, all: &[(&str, RelayStats)], routes: &BTreeMap<String, String>) -> prometheus::Result<()> {
    let now = Instant::now();
    let delivered = page.counter("destination_delivered_total", "Messages confirmed by this destination.", DESTINATION)?;
    let attempts = page.counter(
        "destination_attempts_total",
        "Tries to send to this destination, by what came of them.",
        &["database", "destination", "outcome"],
    )?;
    let down =
        page.gauge("destination_down", "1 while the destination is down and one message at a time is tried.", DESTINATION)?;
    let blocked = page.gauge("destination_blocked", "1 while the destination asks to be sent nothing.", DESTINATION)?;
    let since = page.gauge("destination_down_seconds", "How long nothing has got through; 0 when it is ok.", DESTINATION)?;
    let flight = page.gauge("destination_in_flight", "Messages in flight to this destination.", DESTINATION)?;
    let waiting = page.gauge("destination_waiting", "Messages waiting in memory for this destination.", DESTINATION)?;
    let confirmed = page.gauge("destination_last_confirm_seconds", "Time since the last confirmation.", DESTINATION)?;
    for (database, stats) in all {
        let healths = health::all(stats, routes, now);
        let named: HashSet<&str> = healths.iter().take(NAMED).map(|d| d.destination.as_str()).collect();
        for (name, d) in &stats.destinations {
            let name = redact_url(name);
            for (outcome, n) in outcomes(&d.attempts).into_iter().filter(|_| named.contains(name.as_str())) {
                attempts.with_label_values(&[*database, &name, outcome]).inc_by(n);
            }
        }
        for (place, d) in healths.iter().enumerate() {
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

#[cfg(test)]
mod tests {
    use posthouse::{BreakerState, DestinationStats};
    use prometheus::TextEncoder;

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
        let page = Page::new();
        destinations(&page, &[("main", stats)], &BTreeMap::new()).unwrap();
        let text = TextEncoder::new().encode_to_string(&page.families()).unwrap();
        let lines = |name: &str| text.lines().filter(|l| l.starts_with(&format!("posthouse_{name}{{"))).count();
        let has = |line: &str| text.lines().any(|l| l == format!("posthouse_{line}"));
        assert_eq!(lines("destination_in_flight"), NAMED + 1);
        assert_eq!(lines("destination_delivered_total"), NAMED);
        assert_eq!(lines("destination_attempts_total"), NAMED * 5);
        assert!(has("destination_down{database=\"main\",destination=\"d0249\"} 1"), "{text}");
        assert!(has("destination_down{database=\"main\",destination=\"other\"} 0"), "{text}");
        assert!(has("destination_in_flight{database=\"main\",destination=\"other\"} 50"), "{text}");
        assert!(has("destination_waiting{database=\"main\",destination=\"other\"} 100"), "{text}");
    }

    #[test]
    fn orphaned_messages_are_summed() {
        let mut stats = RelayStats::default();
        stats.orphaned = vec![(posthouse::store::House(-1), 3), (posthouse::store::House(70), 4)];
        let page = Page::new();
        gauges(&page, &[("main", stats)]).unwrap();
        let text = TextEncoder::new().encode_to_string(&page.families()).unwrap();
        for line in ["posthouse_orphaned_messages{database=\"main\"} 7", "posthouse_uncovered_houses{database=\"main\"} 0"] {
            assert!(text.lines().any(|l| l == line), "{line}: {text}");
        }
    }
}
