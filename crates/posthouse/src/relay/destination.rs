//! One destination: what waits for it, how much may be in flight, whether it is up, how far it lags.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::stats::{AttemptCounts, BreakerState, DestinationStats};
use crate::store::{House, Thin};
use crate::transport::Transport;
use crate::{Envelope, Ordering, Route};

/// First and longest wait between two tries of a destination that is down.
const PROBE_FIRST: Duration = Duration::from_millis(500);
const PROBE_CAP: Duration = Duration::from_secs(30);

/// Rows kept ready in memory for one destination; more of it stay in the database until there is room.
const READY_LEAST: usize = 256;

#[derive(Debug)]
pub(super) struct Destination {
    pub(super) name: String,
    pub(super) route: Arc<Route>,
    /// None: nothing here serves its route.
    pub(super) transport: Option<Arc<dyn Transport>>,
    concurrency: usize,
    /// A key's messages are sent without waiting for each other's confirmation.
    pub(super) pipelined: bool,
    /// Rows that may go, in order. May hold ids that are no longer in memory.
    pub(super) ready: VecDeque<i64>,
    /// Rows whose content is in memory, in order.
    pub(super) loaded: VecDeque<(i64, Envelope)>,
    /// Rows being claimed or loaded.
    pub(super) loading: usize,
    pub(super) in_flight: usize,
    /// Rows of it in memory, in any state.
    pub(super) rows: usize,
    /// Those that wait, also for their key or for suspects.
    pub(super) waiting: usize,
    /// Since when there has been nothing to do for it.
    pub(super) idle_since: Option<Instant>,
    /// Some: this destination is left out of the forward read and has cursors of its own. A house without one starts at its mark.
    pub(super) lag: Option<HashMap<House, Cursor>>,
    /// Whose turn it is while it lags, so that what is tried again and again doesn't take all the room: of its own reads, the one
    /// that goes on where fresh messages are; and after one of its own, the due read.
    fresh_next: bool,
    due_next: bool,
    breaker: Breaker,
    bucket: Option<Bucket>,
    delivered: u64,
    pub(super) attempts: AttemptCounts,
    last_error: Option<String>,
    last_confirmed: Option<Instant>,
}

/// How far a house has been read for a destination that lags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    /// All rows that were passed over have higher ids.
    pub(super) all: i64,
    /// All fresh ones, which have never been due, have ids above this one: it isn't held back by what is tried again and again.
    pub(super) fresh: i64,
}

impl Cursor {
    /// Everything up to `id` has been read.
    pub(super) fn at(id: i64) -> Self {
        Self { all: id, fresh: id }
    }

    /// This row was passed over.
    pub(super) fn back_to(&mut self, thin: &Thin) {
        self.all = self.all.min(thin.id - 1);
        if thin.due.is_none() {
            self.fresh = self.fresh.min(thin.id - 1);
        }
    }

    /// A read from `after` came to `last`, unless something was passed over meanwhile. True if nothing was.
    pub(super) fn advance(&mut self, fresh: bool, after: i64, last: i64) -> bool {
        let cursor = if fresh { &mut self.fresh } else { &mut self.all };
        let in_place = *cursor == after;
        if in_place {
            *cursor = last.max(after);
        }
        self.fresh = self.fresh.max(self.all);
        in_place
    }
}

#[derive(Debug)]
enum Breaker {
    Closed,
    Open { since: Instant, until: Instant, wait: Duration },
}

impl Destination {
    pub(super) fn new(name: String, route: Arc<Route>, transport: Option<Arc<dyn Transport>>, now: Instant) -> Self {
        let bucket = route.rate.map(|rate| Bucket::new(rate, now));
        let usual = transport.as_ref().map_or(1, |t| t.concurrency());
        Self {
            name,
            concurrency: route.concurrency.unwrap_or(usual).max(1) as usize,
            // A default route may say so for transports that can't.
            pipelined: route.ordering == Ordering::Pipelined && transport.as_ref().is_some_and(|t| t.pipelines()),
            route,
            transport,
            ready: VecDeque::new(),
            loaded: VecDeque::new(),
            loading: 0,
            in_flight: 0,
            rows: 0,
            waiting: 0,
            idle_since: None,
            lag: None,
            fresh_next: false,
            due_next: true,
            breaker: Breaker::Closed,
            bucket,
            delivered: 0,
            attempts: AttemptCounts::default(),
            last_error: None,
            last_confirmed: None,
        }
    }

    pub(super) fn concurrency(&self) -> usize {
        self.concurrency
    }

    /// How many may be in flight at this moment.
    fn limit(&self, now: Instant) -> usize {
        match self.breaker {
            Breaker::Closed => self.concurrency(),
            Breaker::Open { until, .. } => usize::from(now >= until),
        }
    }

    /// How many more may be sent now.
    pub(super) fn may_send(&self, now: Instant) -> usize {
        self.limit(now).saturating_sub(self.in_flight)
    }

    /// How many more may be loaded now: as many again as may be in flight, so that the next is at hand when one is answered.
    pub(super) fn may_load(&self, now: Instant) -> usize {
        let ahead = match self.breaker {
            // Loads of one destination may come back in any order.
            Breaker::Closed if self.pipelined && self.loading > 0 => 0,
            Breaker::Closed => self.concurrency() * 2,
            Breaker::Open { .. } => self.limit(now),
        };
        ahead.saturating_sub(self.in_flight + self.loading + self.loaded.len())
    }

    /// `share`: what it may have where memory is full.
    fn room(&self, share: usize) -> usize {
        READY_LEAST.max(self.concurrency() * 4).min(share)
    }

    /// Nothing of it is in memory, and nothing is known to be left behind.
    pub(super) fn is_idle(&self) -> bool {
        self.rows == 0 && self.lag.is_none() && !self.is_down()
    }

    /// Whether a row more may wait in memory.
    pub(super) fn has_room(&self, share: usize) -> bool {
        match self.breaker {
            Breaker::Closed => self.waiting < self.room(share),
            Breaker::Open { .. } => self.waiting == 0,
        }
    }

    /// Whether half of its room is free again.
    fn has_much_room(&self, share: usize) -> bool {
        self.waiting * 2 <= self.room(share)
    }

    /// Whether its lagging rows should be read now.
    pub(super) fn wants_rows(&self, now: Instant, share: usize) -> bool {
        self.lag.is_some()
            && match self.breaker {
                Breaker::Closed => self.has_much_room(share),
                Breaker::Open { until, .. } => {
                    now >= until && self.waiting + self.in_flight + self.loading + self.loaded.len() == 0
                }
            }
    }

    /// Whether the due read should bring rows of it. While it lags they come in turn with its own read, because what is tried again
    /// and again would otherwise fill each place that becomes free.
    pub(super) fn wants_due(&self, share: usize) -> bool {
        self.lag.is_none()
            || match self.breaker {
                Breaker::Closed => self.due_next && self.has_much_room(share),
                Breaker::Open { .. } => self.has_room(share),
            }
    }

    /// A due read begins.
    pub(super) fn due_is_read(&mut self) {
        self.due_next = false;
    }

    /// A read of this destination begins. True when it goes on from where fresh messages are.
    pub(super) fn is_read(&mut self) -> bool {
        self.due_next = true;
        let apart = self.lag.iter().flat_map(HashMap::values).any(|cursor| cursor.fresh > cursor.all);
        let fresh = apart && self.fresh_next;
        self.fresh_next = !fresh;
        fresh
    }

    /// Takes one permit of the rate limit, or says when there will be one.
    pub(super) fn take_rate(&mut self, now: Instant) -> Result<(), Instant> {
        self.bucket.as_mut().map_or(Ok(()), |b| b.take(now))
    }

    /// When an open breaker lets the next try through.
    pub(super) fn probe_at(&self) -> Option<Instant> {
        match self.breaker {
            Breaker::Closed => None,
            Breaker::Open { until, .. } => Some(until),
        }
    }

    pub(super) fn is_down(&self) -> bool {
        matches!(self.breaker, Breaker::Open { .. })
    }

    /// The receiver confirmed.
    pub(super) fn confirmed(&mut self, now: Instant) {
        self.breaker = Breaker::Closed;
        self.delivered += 1;
        self.last_error = None;
        self.last_confirmed = Some(now);
    }

    /// The receiver answered, though not with a confirmation: it is up.
    pub(super) fn refused(&mut self, error: &str) {
        self.breaker = Breaker::Closed;
        self.last_error = Some(error.to_owned());
    }

    /// The receiver is down. True when that is news.
    pub(super) fn down(&mut self, error: &str, now: Instant) -> bool {
        self.last_error = Some(error.to_owned());
        let (since, wait, news) = match self.breaker {
            Breaker::Closed => (now, PROBE_FIRST, true),
            // Those that were in flight together report the same outage once.
            Breaker::Open { until, .. } if now < until => return false,
            Breaker::Open { since, wait, .. } => (since, (wait * 2).min(PROBE_CAP), false),
        };
        let jittered = wait.mul_f64(0.75 + 0.5 * fastrand::f64());
        self.breaker = Breaker::Open { since, until: now + jittered, wait };
        news
    }

    pub(super) fn stats(&self) -> DestinationStats {
        DestinationStats {
            breaker: match self.breaker {
                Breaker::Closed => BreakerState::Closed,
                Breaker::Open { since, .. } => BreakerState::Open(since),
            },
            in_flight: self.in_flight as u32,
            waiting: self.waiting as u32,
            delivered: self.delivered,
            attempts: self.attempts,
            blocked: self.transport.as_ref().and_then(|t| t.blocked()),
            last_error: self.last_error.clone(),
            last_confirmed: self.last_confirmed,
        }
    }
}

/// A token bucket that holds at most one second's worth.
#[derive(Debug)]
struct Bucket {
    rate: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn new(rate: f64, now: Instant) -> Self {
        Self { rate, tokens: 1.0, at: now }
    }

    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let grown = self.tokens + now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        self.tokens = grown.min(self.rate.max(1.0));
        self.at = now;
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(now + Duration::from_secs_f64((1.0 - self.tokens) / self.rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bucket_lets_through_its_rate() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10.0, start);
        let mut now = start;
        let mut sent = 0;
        while now < start + Duration::from_secs(10) {
            match bucket.take(now) {
                Ok(()) => sent += 1,
                Err(next) => {
                    assert!(next > now);
                    now = next;
                }
            }
        }
        assert!((99..=102).contains(&sent), "{sent}");
    }

    #[test]
    fn a_down_destination_is_probed_one_at_a_time_less_and_less_often() {
        let now = Instant::now();
        let mut d = Destination::new("d".into(), Arc::new(Route::to("local:d").concurrency(32)), None, now);
        assert_eq!(d.may_send(now), 32);
        assert!(d.down("refused", now));
        assert!(!d.down("refused", now), "reported once");
        assert_eq!(d.may_send(now), 0);
        let mut last = now;
        let mut waits = Vec::new();
        for _ in 0..12 {
            let probe = d.probe_at().unwrap();
            waits.push(probe - last);
            assert_eq!(d.may_send(probe), 1);
            assert!(!d.down("refused", probe));
            last = probe;
        }
        assert!(
            waits[0] < Duration::from_secs(1) && waits[11] > Duration::from_secs(20) && waits[11] < Duration::from_secs(40),
            "{waits:?}"
        );
        d.confirmed(last);
        assert_eq!(d.may_send(last), 32);
    }
}
