//! What a relay did and how it stands, as seen from outside.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::{RunCounts, coverage};
use crate::schedule::Cause;
use crate::store::{House, RunStatus};
use crate::{Histogram, Houses};

/// A snapshot of a relay. Counters start at 0 with the relay and only grow.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct RelayStats {
    /// The name under which it owns houses; None while it has no lease.
    pub instance: Option<String>,
    /// Until when its lease is valid.
    pub lease_until: Option<Instant>,
    /// Leases that ran out.
    pub leases_lost: u64,
    /// Houses it owns.
    pub houses: u32,
    /// Messages confirmed by their receivers.
    pub delivered: u64,
    /// Attempts that failed and will be tried again.
    pub retried: u64,
    /// Messages that became FAILED.
    pub failed: u64,
    /// Tries that found the destination down.
    pub unavailable: u64,
    /// What came of tries to send, of all destinations, forgotten ones included.
    pub attempts: AttemptCounts,
    /// From publishing to the receiver's confirmation, of messages that were confirmed, all their attempts included: from the
    /// moment at which the message was inserted (the end of its transaction comes a little later), or from
    /// [`deliver_at`](crate::Message::deliver_at), to the confirmation. By the database's clock: as exactly as a round trip to it.
    pub latency: Histogram,
    /// How long tries took that gave a result, from handing the message to its transport to the answer.
    pub attempt_time: Histogram,
    /// How long near sweeps took, which find what committed late. Only reads that came back count.
    pub near_sweeps: Histogram,
    /// How long full sweeps took.
    pub full_sweeps: Histogram,
    /// Connections to the database, of its own pools.
    pub connections: Connections,
    /// Outcomes that changed nothing because somebody else had changed the row.
    pub stale: u64,
    /// Pending rows without a log row. More than 0 is an alarm.
    pub missing: u64,
    /// Messages in memory: waiting, in flight, being written back.
    pub in_memory: u64,
    /// Messages in flight.
    pub in_flight: u64,
    /// Payload bytes in memory.
    pub bytes: u64,
    /// Reads of the pending set.
    pub reads: u64,
    /// Database calls that failed.
    pub database_errors: u64,
    /// The last database error, while there has been no success since.
    pub database_error: Option<String>,
    /// Times the loops were started anew after a panic.
    pub restarts: u64,
    /// Partitions of the log that are ready ahead.
    pub partitions_ahead: Option<u32>,
    /// What keeps messages from being published or sent until a person mends it: a missing trigger, for example.
    pub problems: Vec<String>,
    /// Houses that no live instance covers.
    pub uncovered: Option<Uncovered>,
    /// Messages in houses that no live instance covers, or that don't exist: up to 16 houses, up to 10 000 messages of each.
    pub orphaned: Vec<(House, u64)>,
    /// How long the last full sweep took.
    pub full_sweep: Option<Duration>,
    /// Groups, by name.
    pub groups: BTreeMap<String, GroupStats>,
    /// Destinations, by name.
    pub destinations: BTreeMap<String, DestinationStats>,
    /// The last successful pass of each loop.
    pub passes: BTreeMap<&'static str, Instant>,
}

impl RelayStats {
    /// What a person should see to though this relay does its work, one sentence each with what to do: messages in houses that
    /// nobody covers, and houses that nobody has covered for a minute.
    pub fn warnings(&self) -> Vec<String> {
        let uncovered = self.uncovered.as_ref().filter(|u| u.since.elapsed() >= coverage::ALERT).map(ToString::to_string);
        let orphaned = (!self.orphaned.is_empty()).then(|| coverage::told(&self.orphaned));
        uncovered.into_iter().chain(orphaned).collect()
    }

    pub(super) fn pass(&mut self, name: &'static str) {
        self.passes.insert(name, Instant::now());
    }
}

/// What came of tries to send. Counters start at 0 with the relay and only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttemptCounts {
    /// The receiver confirmed.
    pub delivered: u64,
    /// Failed, and tried again.
    pub retried: u64,
    /// Failed, and that was the last attempt: FAILED.
    pub failed: u64,
    /// It can never work: FAILED at once.
    pub rejected: u64,
    /// The destination was down, and no attempt was counted.
    pub unavailable: u64,
    /// Of all but the unavailable ones, those that were their message's first.
    pub first: u64,
    /// Those that were their message's third: so many messages were tried at least three times. `third / first` is the share of
    /// messages that are retried again and again.
    pub third: u64,
}

impl AttemptCounts {
    /// Counts one more; `attempt` is its number, None where no attempt is counted.
    pub(super) fn add(&mut self, attempt: Option<u32>, count: fn(&mut Self) -> &mut u64) {
        *count(self) += 1;
        match attempt {
            Some(1) => self.first += 1,
            Some(3) => self.third += 1,
            _ => {}
        }
    }
}

/// Connections of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Connections {
    /// The most that it opens.
    pub most: u32,
    /// Open ones.
    pub open: u32,
    /// Those of them that nothing uses at the moment.
    pub idle: u32,
}

/// How a group stands on this instance. Counters start at 0 with the relay.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct GroupStats {
    /// How many of its houses this instance owns.
    pub houses: u32,
    /// Its trigger does nothing (nothing is sent, of a continuous group) until somebody resumes it.
    pub paused: bool,
    /// A run is going.
    pub running: bool,
    /// Another one waits for its end.
    pub waiting: bool,
    /// When its trigger is due next, in microseconds since 1970 UTC by the database's clock.
    pub next_due_us: Option<i64>,
    /// The run that ended last.
    pub last: Option<LastRun>,
    /// Runs that ended, or did not take place, by what came of them.
    pub runs: BTreeMap<RunStatus, u64>,
}

/// A run that ended.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LastRun {
    /// Why it took place.
    pub cause: Cause,
    /// How it ended.
    pub status: RunStatus,
    /// What it did.
    pub counts: RunCounts,
    /// Why it ended so.
    pub error: Option<String>,
    /// How long it took.
    pub took: Duration,
    /// When it ended.
    pub ended: Instant,
}

/// Houses that no live instance covers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uncovered {
    /// These.
    pub houses: Houses,
    /// Since when there have been any.
    pub since: Instant,
    /// It was logged as an error.
    pub(super) alerted: bool,
}

impl fmt::Display for Uncovered {
    /// A sentence with what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "houses {} are covered by no live instance: their messages are not sent; start an instance with a group that has them",
            self.houses
        )
    }
}

/// How a destination stands.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct DestinationStats {
    /// Its breaker.
    pub breaker: BreakerState,
    /// Messages in flight.
    pub in_flight: u32,
    /// Messages waiting in memory; there may be more in the database.
    pub waiting: u32,
    /// Messages confirmed.
    pub delivered: u64,
    /// What came of tries to send to it.
    pub attempts: AttemptCounts,
    /// The last error, while nothing was confirmed since.
    pub last_error: Option<String>,
    /// The last confirmation.
    pub last_confirmed: Option<Instant>,
    /// Why its transport asks to be sent nothing at the moment, though it is connected.
    pub blocked: Option<String>,
}

/// Whether a destination is being sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BreakerState {
    /// It answers.
    #[default]
    Closed,
    /// It is down since this moment; one message at a time is tried.
    Open(Instant),
}
