//! How destinations stand, in the words that people read.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use posthouse::{BreakerState, DestinationStats, RelayStats};
use serde::{Deserialize, Serialize};

use crate::config::redact_url;

/// Whether a destination is being sent to. Ordered: those that need a person come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It doesn't answer; one message at a time is tried.
    Down,
    /// It is connected and asks to be sent nothing.
    Blocked,
    /// It answers, or nobody has tried yet.
    Ok,
}

impl State {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::Blocked => "blocked",
            Self::Ok => "ok",
        }
    }
}

/// One destination of a running relay, as `/destinations` tells it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Health {
    /// Its name, without secrets.
    pub(crate) destination: String,
    /// Where its route leads, without secrets.
    pub(crate) to: String,
    pub(crate) state: State,
    /// Since when nothing gets through: RFC 3339, UTC.
    pub(crate) since: Option<String>,
    /// The same as seconds until now.
    pub(crate) down_seconds: Option<f64>,
    /// Why it is blocked, or the last error while nothing was confirmed since.
    pub(crate) error: Option<String>,
    pub(crate) in_flight: u64,
    /// Messages waiting in memory.
    pub(crate) waiting: u64,
    /// Messages confirmed since the relay started.
    pub(crate) delivered: u64,
    /// How long ago the last one was confirmed.
    pub(crate) last_confirm_seconds: Option<f64>,
}

impl Health {
    fn of(name: &str, to: &str, stats: &DestinationStats, now: Instant) -> Self {
        // A broker that blocks counts as unavailable, so its breaker is open too; that it is connected says more.
        let state = match (&stats.blocked, stats.breaker) {
            (Some(_), _) => State::Blocked,
            (None, BreakerState::Open(_)) => State::Down,
            (None, BreakerState::Closed) => State::Ok,
        };
        let ago = |at: Instant| now.saturating_duration_since(at);
        let down = match stats.breaker {
            BreakerState::Open(since) => Some(ago(since)),
            BreakerState::Closed => None,
        };
        Self {
            destination: name.to_owned(),
            to: to.to_owned(),
            state,
            since: down.and_then(|down| SystemTime::now().checked_sub(down)).map(rfc3339),
            down_seconds: down.map(seconds),
            error: stats.blocked.clone().or_else(|| stats.last_error.clone()),
            in_flight: stats.in_flight.into(),
            waiting: stats.waiting.into(),
            delivered: stats.delivered,
            last_confirm_seconds: stats.last_confirmed.map(|at| seconds(ago(at))),
        }
    }

    /// Those that need a person come first.
    pub(crate) fn urgency(&self) -> (State, bool) {
        (self.state, self.error.is_none())
    }

    /// Two names can be the same without their secrets: the worse of them is told, with the figures of both.
    fn join(&mut self, other: Self) {
        let (mut worse, better) = if other.urgency() < self.urgency() { (other, self.clone()) } else { (self.clone(), other) };
        worse.in_flight += better.in_flight;
        worse.waiting += better.waiting;
        worse.delivered += better.delivered;
        *self = worse;
    }
}

/// Every destination of a relay, those that need a person first. `routes` says where names lead, without secrets.
pub(crate) fn all(stats: &RelayStats, routes: &BTreeMap<String, String>, now: Instant) -> Vec<Health> {
    let mut joined: BTreeMap<String, Health> = BTreeMap::new();
    for (name, stats) in &stats.destinations {
        let shown = redact_url(name);
        let to = routes.get(name).unwrap_or(&shown);
        let health = Health::of(&shown, to, stats, now);
        match joined.get_mut(&shown) {
            Some(there) => there.join(health),
            None => {
                joined.insert(shown, health);
            }
        }
    }
    let mut all: Vec<Health> = joined.into_values().collect();
    all.sort_by(|a, b| a.urgency().cmp(&b.urgency()).then_with(|| a.destination.cmp(&b.destination)));
    all
}

/// Seconds to the millisecond.
pub(crate) fn seconds(d: Duration) -> f64 {
    (d.as_secs_f64() * 1000.0).round() / 1000.0
}

fn rfc3339(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(change: impl FnOnce(&mut DestinationStats)) -> DestinationStats {
        let mut stats = DestinationStats::default();
        change(&mut stats);
        stats
    }

    #[test]
    fn states_errors_and_times() {
        let now = Instant::now() + Duration::from_secs(3600);
        let ago = |seconds| now - Duration::from_secs(seconds);
        let of = |stats: &DestinationStats| Health::of("d", "nats:d", stats, now);

        let ok = of(&stats(|s| s.last_confirmed = Some(ago(5))));
        assert_eq!((ok.state, ok.down_seconds, ok.last_confirm_seconds, ok.since), (State::Ok, None, Some(5.0), None));
        let refused = of(&stats(|s| s.last_error = Some("503".into())));
        assert_eq!((refused.state, refused.error.as_deref()), (State::Ok, Some("503")));
        let down = of(&stats(|s| {
            s.breaker = BreakerState::Open(ago(90));
            s.last_error = Some("refused".into());
        }));
        assert_eq!((down.state, down.down_seconds, down.error.as_deref()), (State::Down, Some(90.0), Some("refused")));
        assert!(down.since.is_some_and(|s| humantime::parse_rfc3339(&s).is_ok()));
        let blocked = of(&stats(|s| {
            s.breaker = BreakerState::Open(ago(7));
            s.last_error = Some("not sent".into());
            s.blocked = Some("low on memory".into());
        }));
        assert_eq!(
            (blocked.state, blocked.down_seconds, blocked.error.as_deref()),
            (State::Blocked, Some(7.0), Some("low on memory"))
        );
        assert_eq!(of(&stats(|s| s.blocked = Some("low".into()))).state, State::Blocked, "also before the first try");
    }

    #[test]
    fn one_line_per_name_that_may_be_shown_failing_first() {
        let now = Instant::now();
        let mut relay = RelayStats::default();
        let mut add = |name: &str, down: bool| {
            let made = stats(|s| {
                s.delivered = 1;
                if down {
                    s.breaker = BreakerState::Open(now);
                }
            });
            relay.destinations.insert(name.into(), made);
        };
        add("a", false);
        add("https://x/?k=1", false);
        add("https://x/?k=2", true);
        let routes = BTreeMap::from([("a".to_owned(), "nats:a".to_owned())]);
        let all = all(&relay, &routes, now);
        let told: Vec<_> = all.iter().map(|h| (h.destination.as_str(), h.to.as_str(), h.state, h.delivered)).collect();
        let hook = "https://x/?k=[redacted]";
        assert_eq!(told, [(hook, hook, State::Down, 2), ("a", "nats:a", State::Ok, 1)]);
    }
}
