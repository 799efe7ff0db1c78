//! `/readyz`: whether every relay does its work, and if not, why.

use std::time::{Duration, Instant};

use posthouse::{RelaySettings, RelayStats};
use serde_json::{Map, Value, json};

use super::Served;
use crate::health::{self, Health, State, seconds};
use crate::output::span;

/// Partitions of the log that must be ready ahead; without one, publishing fails.
pub(crate) const PARTITIONS: u32 = 8;

/// A forward read is never late before this.
const READ_LEAST: Duration = Duration::from_secs(30);

/// The document tells at most this many destinations: every probe reads it, also when the whole network is down.
const DESTINATIONS: usize = 200;

/// Whether all is well, and the document that says so.
pub(crate) fn document(served: &Served) -> (bool, Value) {
    let mut ready = !served.draining();
    let mut databases = Map::new();
    for database in &served.databases {
        let (good, told) = match database.stats() {
            Some(stats) => {
                let now = Instant::now();
                let (ready, mut told) = judge(&stats, &served.config.relay, now);
                tell_destinations(&mut told, health::all(&stats, &served.routes, now));
                (ready, told)
            }
            None if !served.relaying => (true, json!({ "ready": true, "relaying": false })),
            None => {
                let why = if served.draining() { "stopped" } else { "starting" };
                (false, json!({ "ready": false, "reasons": [why] }))
            }
        };
        ready &= good;
        databases.insert(database.name.clone(), told);
    }
    (ready, json!({ "ready": ready, "draining": served.draining(), "databases": databases }))
}

fn judge(stats: &RelayStats, settings: &RelaySettings, now: Instant) -> (bool, Value) {
    let mut reasons = Vec::new();
    let lease = stats.lease_until.map(|until| until.saturating_duration_since(now)).unwrap_or_default();
    let read = stats.passes.get("forward read").map(|at| now.saturating_duration_since(*at));
    let late = READ_LEAST.max(settings.idle_poll * 10);
    let mut reachable = true;
    if let Some(error) = &stats.database_error {
        reachable = false;
        reasons.push(format!("the last database call failed: {error}"));
    }
    if lease.is_zero() {
        reachable &= stats.passes.contains_key("membership");
        reasons.push(match stats.lease_until {
            Some(_) => "the lease has run out".into(),
            None => "no lease yet".into(),
        });
    }
    // An instance beyond the number of houses owns none and reads nothing, by design.
    if stats.houses > 0 {
        match read {
            Some(age) if age < late => {}
            Some(age) => reasons.push(format!("the last forward read was {} ago", span(age))),
            None => reasons.push("no forward read yet".into()),
        }
    }
    if let Some(ahead) = stats.partitions_ahead
        && ahead < PARTITIONS
    {
        reasons.push(format!("only {ahead} partitions of the message log are ready ahead, {PARTITIONS} are wanted"));
    }
    reasons.extend(stats.problems.iter().cloned());
    let ready = reasons.is_empty();
    let told = json!({
        "ready": ready,
        "reasons": reasons,
        // It does its work all the same.
        "warnings": stats.warnings(),
        "reachable": reachable,
        "instance": stats.instance,
        "houses": stats.houses,
        "lease_seconds_left": seconds(lease),
        "forward_read_seconds_ago": read.map(seconds),
        "partitions_ahead": stats.partitions_ahead,
    });
    (ready, told)
}

/// Adds every destination that isn't ok. They don't make the relay unready: it does its work, and messages wait for them.
fn tell_destinations(told: &mut Value, all: Vec<Health>) {
    let troubled: Vec<&Health> = all.iter().filter(|d| d.state != State::Ok).collect();
    told["destinations_not_ok_count"] = troubled.len().into();
    let shown = troubled.iter().take(DESTINATIONS);
    let shown = shown.map(|d| {
        json!({
            "destination": d.destination, "to": d.to, "state": d.state,
            "since": d.since, "down_seconds": d.down_seconds, "error": d.error,
        })
    });
    told["destinations_not_ok"] = shown.collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(now: Instant) -> RelayStats {
        let mut stats = RelayStats::default();
        stats.houses = 4;
        stats.lease_until = Some(now + Duration::from_secs(10));
        stats.partitions_ahead = Some(8);
        stats.passes.insert("forward read", now);
        stats.passes.insert("membership", now);
        stats
    }

    fn reasons(change: impl Fn(&mut RelayStats, Instant)) -> Vec<String> {
        let now = Instant::now();
        let mut stats = healthy(now);
        change(&mut stats, now);
        let (ready, told) = judge(&stats, &RelaySettings::default(), now + Duration::from_millis(1));
        let reasons: Vec<String> = serde_json::from_value(told["reasons"].clone()).unwrap();
        assert_eq!(ready, reasons.is_empty());
        reasons
    }

    #[test]
    fn each_limit_is_judged_on_its_boundary() {
        assert!(reasons(|_, _| {}).is_empty());
        assert_eq!(reasons(|s, _| s.partitions_ahead = Some(7)).len(), 1);
        assert!(reasons(|s, _| s.partitions_ahead = None).is_empty(), "not every database has partitions");
        assert_eq!(reasons(|s, now| s.lease_until = Some(now)).len(), 1);
        assert_eq!(reasons(|s, _| s.lease_until = None).len(), 1);
        assert_eq!(reasons(|s, _| s.database_error = Some("gone".into())).len(), 1);
        assert_eq!(reasons(|s, _| s.problems.push("no trigger".into())), ["no trigger"]);
        assert_eq!(reasons(|s, _| s.passes.clear()).len(), 1);
        assert!(
            reasons(|s, _| {
                s.passes.remove("forward read");
                s.houses = 0;
            })
            .is_empty(),
            "an instance without houses reads nothing"
        );
    }

    #[test]
    fn orphaned_messages_are_a_warning() {
        let now = Instant::now();
        let mut stats = healthy(now);
        stats.orphaned = vec![(posthouse::store::House(-1), 3)];
        let (ready, told) = judge(&stats, &RelaySettings::default(), now);
        assert!(ready, "this instance does its work");
        assert!(told["warnings"][0].as_str().unwrap().contains("house -1 (3 messages)"), "{told}");
    }

    #[test]
    fn at_most_so_many_destinations_are_told_and_all_are_counted() {
        let now = Instant::now();
        let mut stats = healthy(now);
        for n in 0..DESTINATIONS + 5 {
            let mut down = posthouse::DestinationStats::default();
            down.breaker = posthouse::BreakerState::Open(now);
            stats.destinations.insert(format!("d{n}"), down);
        }
        stats.destinations.insert("ok".into(), posthouse::DestinationStats::default());
        let (ready, mut told) = judge(&stats, &RelaySettings::default(), now);
        tell_destinations(&mut told, health::all(&stats, &Default::default(), now));
        assert!(ready, "they don't make it unready");
        assert_eq!(told["destinations_not_ok_count"], DESTINATIONS + 5);
        assert_eq!(told["destinations_not_ok"].as_array().unwrap().len(), DESTINATIONS);
    }

    #[test]
    fn a_read_is_late_after_thirty_seconds_or_ten_polls() {
        let now = Instant::now();
        let ready = |settings: &RelaySettings, age: u64| {
            let mut stats = healthy(now);
            stats.lease_until = Some(now + Duration::from_secs(3600));
            judge(&stats, settings, now + Duration::from_secs(age)).0
        };
        let mut settings = RelaySettings::default();
        assert!(ready(&settings, 29));
        assert!(!ready(&settings, 30));
        settings.idle_poll = Duration::from_secs(10);
        assert!(ready(&settings, 99));
        assert!(!ready(&settings, 100));
    }
}
