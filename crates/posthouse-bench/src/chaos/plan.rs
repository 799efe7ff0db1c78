//! Which fault comes when: the same for the same seed.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    KillRelay,
    StopRelay,
    PauseRelay,
    SkewRelay,
    KillConsumer,
    PauseConsumer,
    SkewConsumer,
    KillBackends,
    RestartDatabase,
    KillDatabase,
    RestartBroker,
    KillBroker,
    SlowLink,
    SilentLink,
    UnansweredLink,
    CutLink,
}

/// All of them, and how often each comes beside the others.
pub(super) const KINDS: [(Kind, u32); 16] = [
    (Kind::KillRelay, 4),
    (Kind::StopRelay, 2),
    (Kind::PauseRelay, 2),
    (Kind::SkewRelay, 1),
    (Kind::KillConsumer, 4),
    (Kind::PauseConsumer, 2),
    (Kind::SkewConsumer, 1),
    (Kind::KillBackends, 3),
    (Kind::RestartDatabase, 1),
    (Kind::KillDatabase, 1),
    (Kind::RestartBroker, 1),
    (Kind::KillBroker, 1),
    (Kind::SlowLink, 2),
    (Kind::SilentLink, 3),
    (Kind::UnansweredLink, 3),
    (Kind::CutLink, 3),
];

impl Kind {
    /// Its name in the report.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::KillRelay => "relay killed",
            Kind::StopRelay => "relay stopped in good order",
            Kind::PauseRelay => "relay paused beyond its lease",
            Kind::SkewRelay => "relay with a wrong clock",
            Kind::KillConsumer => "consumer killed",
            Kind::PauseConsumer => "consumer paused",
            Kind::SkewConsumer => "consumer with a wrong clock",
            Kind::KillBackends => "database sessions ended",
            Kind::RestartDatabase => "database restarted",
            Kind::KillDatabase => "database killed",
            Kind::RestartBroker => "broker restarted",
            Kind::KillBroker => "broker killed",
            Kind::SlowLink => "link slow",
            Kind::SilentLink => "link silent",
            Kind::UnansweredLink => "link without answers",
            Kind::CutLink => "link cut",
        }
    }
}

/// What there is to break.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cast {
    pub(super) relays: usize,
    pub(super) consumers: usize,
    pub(super) databases: usize,
    pub(super) links: usize,
    pub(super) lease: Duration,
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fault {
    /// From the start.
    pub(super) at: Duration,
    pub(super) kind: Kind,
    /// Number of the relay, consumer, database or link.
    pub(super) target: usize,
    /// How long it lasts, or how long what was ended stays away.
    pub(super) lasts: Duration,
    /// Milliseconds of a slow link, seconds of a wrong clock, number of sessions.
    pub(super) by: i64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind.name())?;
        let lasts = self.lasts.as_secs_f64();
        match self.kind {
            Kind::KillBackends => write!(f, ": {}", self.by),
            Kind::SkewRelay | Kind::SkewConsumer => write!(f, ": {:+} s", self.by),
            Kind::SlowLink => write!(f, ": {} ms for {lasts:.1} s", self.by),
            Kind::RestartDatabase | Kind::RestartBroker => Ok(()),
            _ => write!(f, ": {lasts:.1} s"),
        }
    }
}

/// Nothing breaks before this.
const QUIET: Duration = Duration::from_secs(1);

/// The mean time between two faults once each kind has come.
const EVERY: Duration = Duration::from_millis(2_500);

/// What two faults at a time would get into each other's way on.
type Target = (&'static str, usize);

struct Planner {
    random: fastrand::Rng,
    cast: Cast,
    /// Until when each target is broken.
    busy: HashMap<Target, Duration>,
}

/// The faults of a run, in order. Each kind comes at least once.
pub(super) fn plan(seed: u64, length: Duration, cast: Cast) -> Vec<Fault> {
    let mut planner = Planner { random: fastrand::Rng::with_seed(seed), cast, busy: HashMap::new() };
    let mut first: Vec<_> = KINDS.iter().map(|(kind, _)| *kind).collect();
    planner.random.shuffle(&mut first);
    // What takes long to get over comes early enough, and not together. A restart comes before the first kill, as RabbitMQ 3.10
    // may forget a queue that was declared a moment before it is killed; a restart puts it on its disk.
    let third = first.len() / 3;
    for (kind, from) in [(Kind::RestartBroker, 0), (Kind::KillBroker, third), (Kind::PauseRelay, third)] {
        let now = first.iter().position(|k| *k == kind).unwrap_or_default();
        let to = from + planner.random.usize(..third - 1);
        let fault = first.remove(now);
        first.insert(to, fault);
    }
    let step = ((length - QUIET) / first.len() as u32).min(EVERY);
    let mut faults = Vec::new();
    let mut now = QUIET;
    for kind in first {
        faults.push(planner.fault(now, kind));
        now += step;
    }
    let all: Vec<_> = KINDS.iter().flat_map(|(kind, weight)| (0..*weight).map(|_| *kind)).collect();
    while now < length {
        let kind = all[planner.random.usize(..all.len())];
        let fault = planner.fault(now, kind);
        if fault.at + fault.lasts <= length {
            faults.push(fault);
        }
        now += EVERY.mul_f64(0.5 + planner.random.f64());
    }
    faults
}

impl Planner {
    fn fault(&mut self, at: Duration, kind: Kind) -> Fault {
        let (of, count) = match kind {
            Kind::KillRelay | Kind::StopRelay | Kind::PauseRelay | Kind::SkewRelay => ("relay", self.cast.relays),
            Kind::KillConsumer | Kind::PauseConsumer | Kind::SkewConsumer => ("consumer", self.cast.consumers),
            Kind::KillBackends => ("sessions", self.cast.databases),
            Kind::RestartDatabase | Kind::KillDatabase => ("database", self.cast.databases),
            Kind::RestartBroker | Kind::KillBroker => ("broker", 1),
            Kind::SlowLink | Kind::SilentLink | Kind::UnansweredLink | Kind::CutLink => ("link", self.cast.links),
        };
        let free: Vec<_> = (0..count).filter(|n| self.busy.get(&(of, *n)).is_none_or(|until| *until <= at)).collect();
        let target = if free.is_empty() { self.random.usize(..count) } else { free[self.random.usize(..free.len())] };
        let lease = self.cast.lease.as_millis() as u64;
        let milliseconds = match kind {
            Kind::KillRelay | Kind::StopRelay | Kind::KillConsumer => self.random.u64(0..1_500),
            Kind::PauseRelay => self.random.u64(lease * 13 / 10..lease * 2),
            Kind::PauseConsumer => self.random.u64(3_000..8_000),
            Kind::SlowLink | Kind::SilentLink => self.random.u64(2_000..6_000),
            Kind::KillDatabase | Kind::KillBroker => self.random.u64(0..1_000),
            Kind::UnansweredLink => self.random.u64(500..2_000),
            Kind::CutLink => self.random.u64(500..4_000),
            Kind::SkewRelay | Kind::SkewConsumer | Kind::KillBackends | Kind::RestartDatabase | Kind::RestartBroker => 0,
        };
        let by = match kind {
            Kind::KillBackends => self.random.i64(1..=8),
            Kind::SlowLink => self.random.i64(20..300),
            Kind::SkewRelay | Kind::SkewConsumer => self.random.i64(60..=3_600) * if self.random.bool() { 1 } else { -1 },
            _ => 0,
        };
        let fault = Fault { at, kind, target, lasts: Duration::from_millis(milliseconds), by };
        self.busy.insert((of, target), at + fault.lasts);
        fault
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const CAST: Cast = Cast { relays: 3, consumers: 2, databases: 1, links: 11, lease: Duration::from_secs(6) };

    #[test]
    fn the_same_seed_gives_the_same_plan() {
        let length = Duration::from_secs(120);
        assert_eq!(plan(7, length, CAST), plan(7, length, CAST));
        assert_ne!(plan(7, length, CAST), plan(8, length, CAST));
    }

    #[test]
    fn every_kind_comes_within_the_time() {
        for seed in 0..200 {
            let length = Duration::from_secs(30 + seed);
            let plan = plan(seed, length, CAST);
            let kinds: HashSet<_> = plan.iter().map(|f| f.kind).collect();
            assert_eq!(kinds.len(), KINDS.len(), "seed {seed}");
            assert!(plan.iter().all(|f| f.at < length && f.at + f.lasts <= length + Duration::from_secs(8)), "seed {seed}");
            assert!(plan.is_sorted_by_key(|f| f.at), "seed {seed}");
            let first = |kind| plan.iter().position(|f| f.kind == kind);
            assert!(first(Kind::RestartBroker) < first(Kind::KillBroker), "seed {seed}");
            assert!(plan.iter().filter(|f| f.kind == Kind::PauseRelay).all(|f| f.lasts > CAST.lease), "seed {seed}");
        }
    }
}
