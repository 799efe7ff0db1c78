//! What came of a try, written back in batches.

use std::time::{Duration, Instant};

use super::engine::{Engine, Event, State};
use crate::error::storable;
use crate::store::{Attempt, Done, Setback};
use crate::transport::{Answer, Failure, Outcome};
use crate::{Error, ErrorKind, Retry};

/// Error text kept per attempt, in bytes.
const ERROR_TEXT: usize = 2_000;

/// Response text kept per attempt, in bytes.
const RESPONSE_TEXT: usize = 4_000;

/// Outcomes per statement.
const BATCH: usize = 2_000;

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
                self.destinations[dest].confirmed(now);
                self.enter(id, State::Writing { delivered: true });
                self.done.push(done);
                if let Some(key) = self.rows.get(&id).and_then(|r| r.key.clone()) {
                    self.key_delivered(&key, id);
                }
            }
            Outcome::Unavailable(failure) => {
                self.shared.stats().unavailable += 1;
                if self.destinations[dest].down(&failure.error, now) {
                    tracing::warn!(
                        destination = self.destinations[dest].name,
                        error = failure.error,
                        "destination is down; its messages wait, no attempts are counted"
                    );
                }
                self.put_back(id);
                self.shed(dest);
            }
            Outcome::Retry { after, error } => self.failed_attempt(id, took, error, Some(after)),
            Outcome::Rejected(error) => self.failed_attempt(id, took, error, None),
        }
    }

    /// `again`: None when it can never work; else what the receiver asked for.
    fn failed_attempt(&mut self, id: i64, took: Duration, failure: Failure, again: Option<Option<Duration>>) {
        let Some(row) = self.rows.get(&id) else { return };
        let d = &mut self.destinations[row.dest];
        d.refused(&failure.error);
        let retry = d.route.as_ref().map_or_else(Retry::default, |r| r.retry);
        let attempts = row.thin.attempts + 1;
        let limit = row.thin.max_attempts.unwrap_or(retry.max_attempts);
        let wait = match again {
            Some(after) if attempts < limit => Some(retry.wait(attempts, fastrand::f64()).max(after.unwrap_or_default())),
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
        let mut stats = self.shared.stats();
        if wait.is_some() {
            stats.retried += 1;
        } else {
            stats.failed += 1;
        }
        drop(stats);
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
        let mut kept = None;
        for id in ids {
            let Some(row) = self.rows.get(&id) else { continue };
            if row.claimed {
                self.unclaim(id, Duration::from_secs(1));
                continue;
            }
            if kept.is_none() {
                kept = Some(id);
                continue;
            }
            let cursor = cursors.entry(row.thin.house).or_insert(i64::MAX);
            *cursor = (*cursor).min(id - 1);
            if let Some(key) = row.key.clone() {
                self.key_set_back(&key, id);
            }
            self.forget(id);
        }
        // A house without rows here is left out from where its forward read stands.
        for (house, h) in &self.houses {
            cursors.entry(*house).or_insert(h.mark);
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
        if self.done.is_empty() && self.setbacks.is_empty() {
            return;
        }
        if now < self.write_after {
            self.wake_by(self.write_after);
            return;
        }
        if !self.writing_done && !self.done.is_empty() {
            // After a failure that may be one row's own, one at a time finds it.
            let most = if self.write_failures > 2 { 1 } else { BATCH };
            let batch: Vec<Done> = self.done.drain(..self.done.len().min(most)).collect();
            self.writing_done = true;
            let (store, instance) = (self.store.clone(), self.instance.clone());
            self.io.spawn(async move {
                let result = store.delivered(&instance, &batch).await;
                Event::Delivered { batch, result }
            });
        }
        if !self.writing_setbacks && !self.setbacks.is_empty() {
            let most = if self.write_failures > 2 { 1 } else { BATCH };
            let batch: Vec<Setback> = self.setbacks.drain(..self.setbacks.len().min(most)).collect();
            self.writing_setbacks = true;
            let (store, instance) = (self.store.clone(), self.instance.clone());
            self.io.spawn(async move {
                let result = store.setback(&instance, &batch).await;
                Event::SetBack { batch, result }
            });
        }
    }

    pub(super) fn on_delivered(&mut self, batch: Vec<Done>, result: Result<Vec<i64>, Error>) {
        self.writing_done = false;
        match result {
            Ok(gone) => {
                self.write_worked();
                let mut stats = self.shared.stats();
                stats.delivered += gone.len() as u64;
                stats.stale += (batch.len() - gone.len()) as u64;
                stats.pass("completion");
                drop(stats);
                for done in batch {
                    self.finished(done.id, true);
                }
            }
            Err(e) => {
                self.write_failed(&e);
                // Behind the others: a row that can't be written doesn't hold them up.
                self.done.extend(batch);
            }
        }
    }

    pub(super) fn on_set_back(&mut self, batch: Vec<Setback>, result: Result<Vec<i64>, Error>) {
        self.writing_setbacks = false;
        match result {
            Ok(changed) => {
                self.write_worked();
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
                self.write_failed(&e);
                self.setbacks.extend(batch);
            }
        }
    }

    fn finished(&mut self, id: i64, delivered: bool) {
        self.forget(id);
        self.recent.add(id, delivered, self.reading.issued);
    }

    fn write_worked(&mut self) {
        if self.write_failures > 0 {
            self.write_failures -= 1;
        }
    }

    fn write_failed(&mut self, e: &Error) {
        self.write_failures = match e.kind() {
            // A deadlock or a lost connection says nothing about the rows.
            ErrorKind::Conflict | ErrorKind::Unavailable => self.write_failures.max(1),
            _ => (self.write_failures + 1).min(10),
        };
        let wait = Duration::from_millis(50) * 2u32.pow(self.write_failures.min(6));
        self.write_after = Instant::now() + wait.mul_f64(0.75 + 0.5 * fastrand::f64());
        self.database_failed(e);
        tracing::warn!(error = %e, again_in = ?wait, "could not write outcomes");
    }
}
