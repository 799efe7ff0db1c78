//! The database's clock, carried on by this process's own between two readings. Latencies are told by it: a message's time of
//! publishing is the database's, and the clocks of two machines differ.

use std::time::{Duration, Instant};

/// How far two clocks may drift apart: one part in this many (200 ppm).
const DRIFT: u32 = 5_000;

/// A reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Clock {
    /// Microseconds since 1970.
    us: i64,
    /// The moment to which they belong, by this process's clock; it may be wrong by `within`.
    at: Instant,
    within: Duration,
}

impl Clock {
    /// What was read between two moments.
    pub(super) fn read(us: i64, asked: Instant, answered: Instant) -> Self {
        let within = answered.saturating_duration_since(asked) / 2;
        Self { us, at: asked + within, within }
    }

    fn at(&self, now: Instant) -> i64 {
        let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
        let gone = micros(now.saturating_duration_since(self.at)) - micros(self.at.saturating_duration_since(now));
        self.us.saturating_add(gone)
    }

    fn within(&self, now: Instant) -> Duration {
        self.within + now.saturating_duration_since(self.at) / DRIFT
    }

    /// Of two readings the one that is known more exactly by now. If they contradict each other, one of the clocks was set, and
    /// the new one counts.
    pub(super) fn or(self, newer: Self) -> Self {
        let now = newer.at;
        let (old, new) = (self.within(now), newer.within(now));
        let apart = Duration::from_micros(self.at(now).abs_diff(newer.at(now)));
        if new <= old || apart > old + new { newer } else { self }
    }

    /// The time between a moment of the database's clock and one of this process's.
    pub(super) fn between(&self, us: i64, now: Instant) -> Duration {
        Duration::from_micros(u64::try_from(self.at(now).saturating_sub(us)).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn time_passes_on_the_databases_clock() {
        let asked = Instant::now();
        let clock = Clock::read(5_000_000, asked, asked + 10 * MS);
        assert_eq!(clock.between(5_000_000, asked + 105 * MS), 100 * MS, "it was read in the middle");
        assert_eq!(clock.between(4_000_000, asked + 5 * MS), 1_000 * MS);
        assert_eq!(clock.between(6_000_000, asked + 5 * MS), Duration::ZERO, "from the future");
        assert_eq!(clock.at(asked), 4_995_000, "also before the reading");
    }

    #[test]
    fn the_reading_that_is_known_more_exactly_counts() {
        let asked = Instant::now();
        let good = Clock::read(1_000_000, asked, asked + 2 * MS);
        // A second later, with an answer that took 200 ms and seems to be 30 ms off.
        let later = asked + 1_000 * MS;
        let slow = Clock::read(2_069_000, later, later + 200 * MS);
        assert_eq!(good.or(slow), good, "a slow answer says less");
        let quick = Clock::read(2_000_000, later, later + 2 * MS);
        assert_eq!(good.or(quick), quick, "as quick as the old one, and newer");
        let hours = asked + 3_600_000 * MS;
        let late = Clock::read(3_601_000_000, hours, hours + 200 * MS);
        assert_eq!(good.or(late), late, "the old one has drifted by more");
        let set = Clock::read(60_000_000, later, later + 200 * MS);
        assert_eq!(good.or(set), set, "the database's clock was set");
    }
}
