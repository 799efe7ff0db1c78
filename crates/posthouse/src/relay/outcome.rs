//! What came of a try, written back in batches.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::destination::Cursor;
use super::engine::{Engine, Event, State};
use super::stats::AttemptCounts;
use crate::error::storable;
use crate::store::{Attempt, Done, Setback};
use crate::transport::{Answer, Failure, Outcome, shown};
use crate::{Error, ErrorKind};

/// Error text kept per attempt, in bytes.
const ERROR_TEXT: usize = 2_000;

/// Response text kept per attempt, in bytes.
const RESPONSE_TEXT: usize = 4_000;

/// The longest wait a receiver may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 86_400);

/// How long an outcome that can't be written, though its neighbours can, is left alone.
const QUARANTINE: Duration = Duration::from_secs(30);

/// Outcomes per statement.
const BATCH: usize = 2_000;

/// While outcomes come in, writing them takes one part in this many of the time, and waits no longer than this, nor for more than
/// so many: each write waits for the disk once, whatever its size, and publishers wait for the same disk.
const WRITE_SHARE: u32 = 4;
const WRITE_PAUSE: Duration = Duration::from_millis(5);
const WRITE_NOW: usize = 256;

impl Engine {
    pub(super) fn on_answers(&mut self, answers: impl Iterator<Item = Answer>) {
        for answer in answers {
            // A late answer to a try that was given up changes nothing: its outcome is written, or a newer try is under way.
            let Some(State::Sending { try_number, started }) = self.rows.get(&answer.id).map(|r| r.state) else { continue };
            if try_number == answer.try_number {
                self.conclude(answer.id, started.elapsed(), answer.outcome);
            }
        }
    }

    /// The outcome of a try.
    pub(super) fn conclude(&mut self, id: i64, took: Duration, outcome: Outcome) {
        let Some(row) = self.rows.get(&id) else { return };
        let (dest, now) = (row.dest, Instant::now());
        let done = Done { house: row.thin.house, id, version: row.thin.version };
        match outcome {
            Outcome::Delivered => {
                self.timing.confirmed(row.since, now);
                self.timing.tried(&mut self.destinations[dest], Some(row.thin.attempts + 1), Some(took), |c| &mut c.delivered);
                self.destinations[dest].confirmed(now);
                self.enter(id, State::Writing { delivered: true });
                self.done.push(done);
                if let Some(key) = self.rows.get(&id).and_then(|r| r.key.clone()) {
                    self.key_delivered(&key, id);
                }
            }
            Outcome::HeldBack => {
                self.key_broken(id);
                self.key_returned(id);
            }
            Outcome::NoAnswer(failure) if self.destinations[dest].is_down() => {
                self.conclude(id, took, Outcome::Unavailable(failure));
            }
            // Of those of a key that fail together only the first is to blame.
            Outcome::Retry { .. } | Outcome::NoAnswer(_) if self.key_broken(id) => self.key_returned(id),
            Outcome::Unavailable(failure) => {
                self.shared.stats().unavailable += 1;
                self.timing.tried(&mut self.destinations[dest], None, None, |c| &mut c.unavailable);
                if self.destinations[dest].down(&failure.error, now) {
                    tracing::warn!(
                        destination = shown(&self.destinations[dest].name),
                        error = failure.error,
                        "destination is down; its messages wait, no attempts are counted"
                    );
                }
                if self.destinations[dest].pipelined && self.rows.get(&id).is_some_and(|r| r.key.is_some()) {
                    self.key_broken(id);
                    self.key_returned(id);
                } else {
                    self.put_back(id);
                }
                self.shed(dest);
            }
            Outcome::NoAnswer(error) => self.failed_attempt(id, took, error, Some(None)),
            Outcome::Retry { after, error } => self.failed_attempt(id, took, error, Some(after)),
            Outcome::Rejected(error) => {
                self.key_broken(id);
                self.failed_attempt(id, took, error, None);
            }
        }
    }

    /// `again`: None when it can never work; else what the receiver asked for.
    fn failed_attempt(&mut self, id: i64, took: Duration, failure: Failure, again: Option<Option<Duration>>) {
        let Some(row) = self.rows.get(&id) else { return };
        let d = &mut self.destinations[row.dest];
        if matches!(row.state, State::Sending { .. }) {
            d.refused(&failure.error);
        }
        let retry = d.route.retry;
        let attempts = row.thin.attempts + 1;
        let limit = row.thin.max_attempts.unwrap_or(retry.max_attempts);
        let wait = match again {
            Some(after) if attempts < limit => {
                Some(retry.wait(attempts, fastrand::f64()).max(after.unwrap_or_default().min(LONGEST_WAIT)))
            }
            _ => None,
        };
        let setback = Setback {
            row: Done { house: row.thin.house, id, version: row.thin.version },
            attempts,
            // A try that gave a result is no claim.
            claims: row.thin.claims - u32::from(row.claimed),
            wait,
            leave_key: wait.is_none() && self.leaves_key(row),
            error: storable(&failure.error, ERROR_TEXT),
            attempt: Some(Attempt {
                outcome: if again.is_some() { "retry" } else { "rejected" },
                response: failure.response.map(|r| storable(&r, RESPONSE_TEXT)),
                took,
            }),
        };
        let sent = matches!(row.state, State::Sending { .. });
        let count: fn(&mut AttemptCounts) -> &mut u64 = match (again, wait) {
            (None, _) => |c| &mut c.rejected,
            (Some(_), None) => |c| &mut c.failed,
            (Some(_), Some(_)) => |c| &mut c.retried,
        };
        self.timing.tried(&mut self.destinations[row.dest], Some(attempts), sent.then_some(took), count);
        let mut stats = self.shared.stats();
        if wait.is_some() {
            stats.retried += 1;
        } else {
            stats.failed += 1;
        }
        drop(stats);
        let again = wait.is_some();
        self.run_counts(id, |counts| *(if again { &mut counts.retried } else { &mut counts.failed }) += 1);
        self.set_back(id, setback);
    }

    /// Writes a row back to the database; its key's followers go back too.
    pub(super) fn set_back(&mut self, id: i64, setback: Setback) {
        self.enter(id, State::Writing { delivered: false });
        if let Some(key) = self.rows.get(&id).and_then(|r| r.key.clone()) {
            self.key_set_back(&key, id);
        }
        self.setbacks.push(setback);
    }

    /// The breaker of a destination has opened: all but one of its rows go back to the database, so that nothing waits in memory.
    fn shed(&mut self, dest: usize) {
        let mut ids: Vec<i64> = std::mem::take(&mut self.destinations[dest].loaded).into_iter().map(|(id, _)| id).collect();
        ids.extend(std::mem::take(&mut self.destinations[dest].ready));
        ids.retain(|id| self.rows.get(id).is_some_and(|r| r.dest == dest && matches!(r.state, State::Waiting | State::Loaded)));
        ids.sort_unstable();
        ids.dedup();
        let mut cursors = self.destinations[dest].lag.take().unwrap_or_default();
        // Left out from where its forward read stands.
        for (house, h) in &self.houses {
            cursors.entry(*house).or_insert(Cursor::at(h.mark));
        }
        let mut kept = None;
        for id in ids {
            let Some(row) = self.rows.get(&id) else { continue };
            if row.claimed {
                self.unclaim(id, Duration::from_secs(1));
                continue;
            }
            let key = row.key.clone();
            // Of a key whose messages fly together none may go while others of it are still out.
            if kept.is_none() && !(self.destinations[dest].pipelined && key.is_some()) {
                kept = Some(id);
                continue;
            }
            if let Some(cursor) = cursors.get_mut(&row.thin.house) {
                cursor.back_to(&row.thin);
            }
            if let Some(key) = key {
                self.key_set_back(&key, id);
            }
            self.forget(id);
        }
        self.destinations[dest].lag = Some(cursors);
        if let Some(id) = kept {
            self.enter(id, State::Waiting);
            self.destinations[dest].ready.push_back(id);
            self.active.insert(dest);
        }
    }

    /// Starts the writes that are wanted now: one of each kind at a time, each as large as what has gathered meanwhile.
    pub(super) fn write(&mut self, now: Instant) {
        if let Some(batch) = self.done.next(now) {
            let (store, instance) = (self.store.clone(), self.instance.clone());
            self.io.spawn(async move {
                let result = store.delivered(&instance, &batch).await;
                Event::Delivered { batch, result }
            });
        }
        if let Some(batch) = self.setbacks.next(now) {
            let (store, instance) = (self.store.clone(), self.instance.clone());
            self.io.spawn(async move {
                let result = store.setback(&instance, &batch).await;
                Event::SetBack { batch, result }
            });
        }
        for at in [self.done.wake_at(), self.setbacks.wake_at()].into_iter().flatten() {
            self.wake_by(at);
        }
    }

    pub(super) fn on_delivered(&mut self, batch: Vec<Done>, result: Result<Vec<i64>, Error>) {
        match result {
            Ok(gone) => {
                self.done.worked(Instant::now());
                let mut stats = self.shared.stats();
                stats.delivered += gone.len() as u64;
                stats.stale += (batch.len() - gone.len()) as u64;
                stats.pass("completion");
                drop(stats);
                // Somebody else changed the others: they may be pending again.
                let gone: HashSet<i64> = gone.into_iter().collect();
                for done in batch {
                    if !gone.contains(&done.id)
                        && let Some(key) = self.rows.get(&done.id).and_then(|r| r.key.as_ref())
                    {
                        self.store.passed().leave_out(key);
                    }
                    self.run_counts(done.id, |counts| counts.delivered += 1);
                    self.finished(done.id, true);
                }
            }
            Err(e) => {
                self.database_failed(&e);
                self.done.failed(batch, &e);
            }
        }
    }

    pub(super) fn on_set_back(&mut self, batch: Vec<Setback>, result: Result<Vec<i64>, Error>) {
        match result {
            Ok(changed) => {
                self.setbacks.worked(Instant::now());
                self.shared.stats().stale += (batch.len() - changed.len()) as u64;
                let now = Instant::now();
                for setback in batch {
                    if let Some(wait) = setback.wait {
                        self.reading.due_by(now + wait);
                    }
                    let row = self.rows.get(&setback.row.id);
                    if let Some(key) = row.and_then(|r| r.thin.key.clone())
                        && (setback.leave_key || !changed.contains(&setback.row.id))
                    {
                        self.key_reads.insert((setback.row.house, key));
                    }
                    self.finished(setback.row.id, false);
                }
            }
            Err(e) => {
                self.database_failed(&e);
                self.setbacks.failed(batch, &e);
            }
        }
    }

    fn finished(&mut self, id: i64, delivered: bool) {
        // Only rows with keys are ever outdated.
        let outdated = self.rows.get(&id).filter(|row| row.outdated);
        let key = outdated.and_then(|row| Some((row.thin.house, row.thin.key.clone()?)));
        self.forget(id);
        self.recent.add(id, delivered && key.is_none(), self.reading.issued);
        self.key_reads.extend(key);
    }
}

/// Outcomes of one kind on their way to the database. After a failure batches get smaller until the row that can't be written
/// stands alone; it is set aside for a while, so that it doesn't hold up the others.
#[derive(Debug)]
pub(super) struct Lane<T> {
    queue: Vec<T>,
    busy: bool,
    /// When the last write began, and until when few outcomes wait for more.
    began: Instant,
    gathers_until: Instant,
    /// After an error, nothing is written before this.
    after: Instant,
    failures: u32,
    most: usize,
    aside: Vec<(Instant, T)>,
}

impl<T> Lane<T> {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            queue: Vec::new(),
            busy: false,
            began: now,
            gathers_until: now,
            after: now,
            failures: 0,
            most: BATCH,
            aside: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, outcome: T) {
        self.queue.push(outcome);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty() && self.aside.is_empty() && !self.busy
    }

    fn next(&mut self, now: Instant) -> Option<Vec<T>> {
        if self.busy || now < self.after || (now < self.gathers_until && self.queue.len() < WRITE_NOW) {
            return None;
        }
        self.queue.extend(self.aside.extract_if(.., |(until, _)| *until <= now).map(|(_, outcome)| outcome));
        if self.queue.is_empty() {
            return None;
        }
        self.busy = true;
        self.began = now;
        Some(self.queue.drain(..self.queue.len().min(self.most)).collect())
    }

    fn wake_at(&self) -> Option<Instant> {
        if self.busy {
            return None;
        }
        let aside = self.aside.iter().map(|(until, _)| *until).min();
        let queue = (!self.queue.is_empty()).then_some(self.after);
        [queue, aside].into_iter().flatten().min().map(|at| at.max(self.after).max(self.gathers_until))
    }

    fn worked(&mut self, now: Instant) {
        self.busy = false;
        let took = now.saturating_duration_since(self.began);
        self.gathers_until = now + (took * (WRITE_SHARE - 1)).min(WRITE_PAUSE);
        self.failures = 0;
        self.most = (self.most * 2).min(BATCH);
    }

    fn failed(&mut self, batch: Vec<T>, e: &Error) {
        let now = Instant::now();
        self.busy = false;
        self.failures += 1;
        // A lost connection says nothing about the rows, and a conflict not at first: another transaction may hold some of them.
        let blamed = match e.kind() {
            ErrorKind::Unavailable => false,
            ErrorKind::Conflict => self.failures > 2,
            _ => true,
        };
        let wait = if blamed { Duration::from_millis(50) } else { Duration::from_millis(50) * 2u32.pow(self.failures.min(6)) };
        self.after = now + wait.mul_f64(0.75 + 0.5 * fastrand::f64());
        tracing::warn!(error = %e, outcomes = batch.len(), again_in = ?wait, "could not write outcomes");
        if blamed && batch.len() == 1 {
            self.aside.extend(batch.into_iter().map(|outcome| (now + QUARANTINE, outcome)));
            return;
        }
        if blamed {
            self.most = (batch.len() / 2).max(1);
        }
        // First again, so that the search for the row goes on where it was.
        self.queue.splice(0..0, batch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_unwritable_outcome_does_not_hold_up_the_others() {
        let start = Instant::now();
        let mut lane = Lane::new(start);
        for n in 0..1_000 {
            lane.push(n);
        }
        let (mut written, mut now, mut rounds) = (Vec::new(), start, 0);
        while written.len() < 999 {
            now += Duration::from_secs(1);
            rounds += 1;
            assert!(rounds < 40, "still at {} after {rounds} rounds", written.len());
            let Some(batch) = lane.next(now) else { continue };
            if batch.contains(&77) {
                lane.failed(batch, &Error::Schema("this row".into()));
            } else {
                written.extend(batch);
                lane.worked(now);
            }
        }
        assert!(!written.contains(&77) && !lane.is_empty(), "it is set aside, not dropped");
        let mut later = None;
        for _ in 0..3 {
            now += QUARANTINE;
            later = later.or(lane.next(now));
        }
        assert_eq!(later, Some(vec![77]), "and tried again");
    }

    #[test]
    fn few_outcomes_wait_for_more_and_many_do_not() {
        let start = Instant::now();
        let mut lane = Lane::new(start);
        lane.push(0);
        assert_eq!(lane.next(start).map(|batch| batch.len()), Some(1), "the first doesn't wait");
        let written = start + Duration::from_millis(1);
        lane.worked(written);
        lane.push(1);
        let at = lane.wake_at().expect("it is to be written");
        assert_eq!(at - written, Duration::from_millis(1) * (WRITE_SHARE - 1));
        assert!(lane.next(at - Duration::from_micros(1)).is_none());
        assert_eq!(lane.next(at).map(|batch| batch.len()), Some(1));
        let slow = at + Duration::from_secs(1);
        lane.worked(slow);
        (0..WRITE_NOW).for_each(|n| lane.push(n));
        assert_eq!(lane.next(slow).map(|batch| batch.len()), Some(WRITE_NOW), "enough for a write");
        lane.worked(slow + Duration::from_secs(1));
        lane.push(2);
        assert_eq!(lane.wake_at(), Some(slow + Duration::from_secs(1) + WRITE_PAUSE), "not for long");
    }

    #[test]
    fn an_outage_blames_no_row() {
        let mut lane = Lane::new(Instant::now());
        lane.push(1);
        for _ in 0..10 {
            let batch = lane.next(Instant::now() + Duration::from_secs(60)).expect("still there");
            lane.failed(batch, &Error::Timeout { what: "completion", after: Duration::ZERO });
        }
        assert!(lane.aside.is_empty());
    }
}
