//! Loading content, claiming suspects, handing messages to transports.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::engine::{Engine, Event, Loaded, State};
use crate::store::{Attempt, Done, Setback};
use crate::transport::{Delivery, Outcome, Token, Transport, shown};
use crate::{Envelope, Error};

/// Messages per load statement.
const LOAD: usize = 2_000;

/// Messages that each destination may have in a load statement at least.
const LOAD_SHARE: usize = 32;

/// Loads under way at once.
const LOADS: usize = 2;

/// A transport that misses the deadline gets this long to say so itself before the relay gives up on it.
const GRACE: Duration = Duration::from_millis(500);

/// Microseconds since 1970; None before.
fn micros(at: SystemTime) -> Option<i64> {
    at.duration_since(SystemTime::UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_micros()).ok())
}

impl Engine {
    /// Whether a send that starts now ends before somebody else may own the house.
    fn lease_covers_a_send(&mut self, now: Instant) -> bool {
        let settings = &self.shared.settings;
        let covered = self.lease_until.is_some_and(|until| now + settings.send_timeout + settings.lease_margin < until);
        if !covered {
            self.wake_by(now + Duration::from_millis(50));
        }
        covered
    }

    /// Reads the content of ready rows, within the byte budget.
    pub(super) fn load(&mut self, now: Instant) {
        if self.loads >= LOADS || (self.active.is_empty() && self.to_load.is_empty() && self.next_up.is_empty()) {
            return;
        }
        if now < self.load_after {
            self.wake_by(self.load_after);
            return;
        }
        let memory = self.shared.settings.memory;
        let mut ids = std::mem::take(&mut self.to_load);
        for id in &ids {
            self.enter(*id, State::Loading);
        }
        // Each gets its share of the statement, and another is first each time.
        let mut active: Vec<usize> = self.active.iter().copied().collect();
        active.sort_unstable();
        self.load_turn = self.load_turn.wrapping_add(1);
        let turn = self.load_turn % active.len().max(1);
        active.rotate_left(turn);
        let share = (LOAD / active.len().max(1)).max(LOAD_SHARE);
        for dest in active {
            let mut room = self.destinations[dest].may_load(now).min(share);
            if room == 0
                && let Some(at) = self.destinations[dest].probe_at()
                && at > now
            {
                self.wake_by(at);
            }
            let mut passed_over = Vec::new();
            while room > 0 {
                if ids.len() >= LOAD {
                    break;
                }
                let Some(id) = self.destinations[dest].ready.front().copied() else { break };
                let Some(row) = self.rows.get(&id).filter(|r| r.state == State::Waiting && r.dest == dest) else {
                    self.destinations[dest].ready.pop_front();
                    continue;
                };
                // Its group has as much as it may have: others go first.
                if row.group.is_some_and(|group| !self.groups[group].may_load()) {
                    self.destinations[dest].ready.pop_front();
                    passed_over.push(id);
                    continue;
                }
                // A destination that holds nothing may load one message even so: another's slow sends must not starve it,
                // and a message larger than the whole budget must go. So the bound is the budget and one message per destination.
                let d = &self.destinations[dest];
                let holds = d.in_flight + d.loading + d.loaded.len() > 0;
                if self.bytes + row.thin.size as usize > memory && holds {
                    break;
                }
                self.destinations[dest].ready.pop_front();
                room -= 1;
                if let Some(envelope) = self.take_ahead(id) {
                    self.loaded(id, envelope);
                    continue;
                }
                self.enter(id, State::Loading);
                ids.push(id);
            }
            for id in passed_over.into_iter().rev() {
                self.destinations[dest].ready.push_front(id);
            }
            let d = &self.destinations[dest];
            if d.ready.is_empty() && d.loaded.is_empty() {
                self.active.remove(&dest);
            }
        }
        self.load_ahead(&mut ids);
        if ids.is_empty() {
            return;
        }
        self.loads += 1;
        let store = self.store.clone();
        self.io.spawn(async move {
            let result = store.load(&ids).await;
            Event::Loaded { ids, result }
        });
    }

    /// Adds rows whose turn comes next in their key, so that they go at once when the one before is confirmed. They may take
    /// half of the byte budget, which leaves the other half to what may go now.
    fn load_ahead(&mut self, ids: &mut Vec<i64>) {
        let budget = self.shared.settings.memory / 2;
        let mut asked = 0;
        for id in std::mem::take(&mut self.next_up) {
            let Some(row) = self.rows.get(&id).filter(|r| r.state == State::Waiting && !self.ahead.contains_key(&id)) else {
                continue;
            };
            let size = row.thin.size as usize;
            if ids.len() >= LOAD || self.bytes + asked + size > budget || self.destinations[row.dest].is_down() {
                continue;
            }
            asked += size;
            self.ahead.insert(id, None);
            ids.push(id);
        }
    }

    /// The content that was loaded ahead of a row's turn, if it is there; what is on its way comes for nothing.
    pub(super) fn take_ahead(&mut self, id: i64) -> Option<Envelope> {
        let envelope = self.ahead.remove(&id)??;
        self.bytes -= self.rows.get(&id).map_or(0, |row| row.thin.size as usize);
        Some(envelope)
    }

    /// A row's content is there, and it may go.
    pub(super) fn loaded(&mut self, id: i64, mut envelope: Envelope) {
        let Some(row) = self.rows.get_mut(&id) else { return };
        let dest = row.dest;
        row.since = micros(envelope.deliver_at.map_or(envelope.created_at, |at| at.max(envelope.created_at)));
        envelope.attempt = row.thin.attempts + 1;
        envelope.destination.clone_from(&row.thin.destination);
        self.enter(id, State::Loaded);
        self.destinations[dest].loaded.push_back((id, envelope));
        self.active.insert(dest);
    }

    pub(super) fn on_loaded(&mut self, ids: &[i64], result: Result<Vec<Loaded>, Error>) {
        self.loads -= 1;
        let mut found: HashMap<i64, Result<Envelope, String>> = match result {
            Ok(found) => found.into_iter().collect(),
            Err(e) => {
                self.database_failed(&e);
                tracing::warn!(error = %e, messages = ids.len(), "could not load messages");
                for id in ids.iter().rev() {
                    if self.ahead.get(id).is_some_and(Option::is_none) {
                        self.ahead.remove(id);
                    }
                    if self.rows.get(id).is_some_and(|r| r.state == State::Loading) {
                        self.put_back(*id);
                    }
                }
                self.load_after = Instant::now() + Duration::from_millis(200);
                return;
            }
        };
        for id in ids {
            let Some(row) = self.rows.get(id) else { continue };
            if row.state == State::Waiting && self.ahead.get(id).is_some_and(Option::is_none) {
                match found.remove(id) {
                    Some(Ok(envelope)) => {
                        self.bytes += row.thin.size as usize;
                        self.ahead.insert(*id, Some(envelope));
                    }
                    // What is wrong with it comes out when its turn has come.
                    _ => drop(self.ahead.remove(id)),
                }
            }
            let Some(row) = self.rows.get(id).filter(|r| r.state == State::Loading) else { continue };
            match found.remove(id) {
                Some(Ok(envelope)) => self.loaded(*id, envelope),
                Some(Err(why)) => self.conclude(*id, Duration::ZERO, Outcome::Rejected(why.into())),
                None => {
                    // Never dropped or failed silently.
                    tracing::error!(id, house = %row.thin.house, "pending row without a log row: nothing can be sent, and nothing is removed; restore the log row");
                    self.shared.stats().missing += 1;
                    if row.claimed {
                        self.unclaim(*id, Duration::from_secs(60));
                    } else {
                        self.enter(*id, State::Missing);
                        // What was let go behind it must not pass it.
                        self.key_broken(*id);
                    }
                }
            }
        }
    }

    /// A row that could not be sent after all waits again, first in line.
    pub(super) fn put_back(&mut self, id: i64) {
        let Some(row) = self.rows.get(&id) else { return };
        if matches!(row.state, State::Waiting | State::Writing { .. }) {
            return;
        }
        if row.claimed {
            self.unclaim(id, Duration::ZERO);
            return;
        }
        // Its house is leaving, or has left: whoever takes it sends the row.
        if !self.keeps(row.thin.house) {
            self.forget(id);
            return;
        }
        let dest = row.dest;
        self.enter(id, State::Waiting);
        self.destinations[dest].ready.push_front(id);
        self.active.insert(dest);
    }

    /// Hands loaded messages to their transports.
    pub(super) fn send(&mut self, now: Instant) {
        if self.active.is_empty() || !self.lease_covers_a_send(now) {
            return;
        }
        let timeout = self.shared.settings.send_timeout;
        let mut batches: Vec<(Arc<dyn Transport>, Vec<Delivery>)> = Vec::new();
        let active: Vec<usize> = self.active.iter().copied().collect();
        for dest in active {
            let mut room = self.destinations[dest].may_send(now);
            let mut passed_over = Vec::new();
            while room > 0 {
                let Some((id, _)) = self.destinations[dest].loaded.front() else { break };
                let id = *id;
                let Some(row) = self.rows.get(&id).filter(|r| r.state == State::Loaded && r.dest == dest) else {
                    self.destinations[dest].loaded.pop_front();
                    continue;
                };
                if row.group.is_some_and(|group| !self.groups[group].may_send()) {
                    passed_over.extend(self.destinations[dest].loaded.pop_front());
                    continue;
                }
                if let Err(at) = self.destinations[dest].take_rate(now) {
                    self.wake_by(at);
                    break;
                }
                let Some((_, mut envelope)) = self.destinations[dest].loaded.pop_front() else { break };
                self.tries += 1;
                let try_number = self.tries;
                self.enter(id, State::Sending { try_number, started: now });
                if let Some(row) = self.rows.get_mut(&id) {
                    row.tried = true;
                }
                room -= 1;
                let route = self.destinations[dest].route.clone();
                let Some(transport) = self.destinations[dest].transport.clone() else {
                    let error = format!(
                        "no route or transport for destination {:?} here; add [routes.{:?}] or name a configured transport, then requeue",
                        shown(&self.destinations[dest].name),
                        shown(&self.destinations[dest].name)
                    );
                    self.conclude(id, Duration::ZERO, Outcome::Retry { after: None, error: error.into() });
                    continue;
                };
                let deadline = now + timeout;
                self.deadlines.push(Reverse((deadline + GRACE.min(self.shared.settings.lease_margin), id, try_number)));
                let span = self.shared.trace.as_ref().map(|trace| (trace.0)(&mut envelope.headers));
                let token = Token { id, try_number, answers: Some(self.answers.clone()), span };
                let follows = self.key_sent(id);
                let delivery = Delivery::new(envelope, route, deadline, follows, token);
                match batches.iter_mut().find(|(t, _)| Arc::ptr_eq(t, &transport)) {
                    Some((_, batch)) => batch.push(delivery),
                    None => batches.push((transport, vec![delivery])),
                }
            }
            for waiting in passed_over.into_iter().rev() {
                self.destinations[dest].loaded.push_front(waiting);
            }
            let d = &self.destinations[dest];
            if d.ready.is_empty() && d.loaded.is_empty() {
                self.active.remove(&dest);
            }
        }
        for (transport, batch) in batches {
            self.hand_over(transport, batch);
        }
        if let Some(Reverse((at, ..))) = self.deadlines.peek() {
            self.wake_by(*at);
        }
    }

    /// Gives up on tries whose transport said nothing.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some(Reverse((at, id, try_number))) = self.deadlines.peek().copied() {
            let current = |r: &super::engine::Row| matches!(r.state, State::Sending { try_number: n, .. } if n == try_number);
            if !self.rows.get(&id).is_some_and(current) {
                self.deadlines.pop();
                continue;
            }
            if now < at {
                self.wake_by(at);
                break;
            }
            self.deadlines.pop();
            let timeout = self.shared.settings.send_timeout;
            let error = format!("no answer within {timeout:?} (relay.send_timeout)");
            self.conclude(id, timeout, Outcome::NoAnswer(error.into()));
        }
    }

    /// Marks suspects in the database before they are sent, so that one that kills this process is counted.
    ///
    /// Of each house one at a time; a message during which a process has died before goes when no other claimed one is under way,
    /// so that it alone is to blame.
    pub(super) fn claim_suspects(&mut self, now: Instant) {
        if self.suspects.is_empty() || !self.lease_covers_a_send(now) {
            return;
        }
        let mut busy: std::collections::HashSet<_> =
            self.rows.values().filter(|r| r.claimed || r.state == State::Claiming).map(|r| r.thin.house).collect();
        let mut alone = self.rows.values().any(|r| r.thin.claims > 0 && (r.claimed || r.state == State::Claiming));
        let mut chosen: Vec<Done> = Vec::new();
        let mut left = std::collections::VecDeque::new();
        for id in std::mem::take(&mut self.suspects) {
            let Some(row) = self.rows.get(&id).filter(|r| r.state == State::Waiting) else { continue };
            let (house, dest, known) = (row.thin.house, row.dest, row.thin.claims > 0);
            let free = !alone && if known { busy.is_empty() } else { !busy.contains(&house) };
            if !free || self.destinations[dest].may_load(now) == 0 {
                if let Some(at) = self.destinations[dest].probe_at() {
                    self.wake_by(at.max(now + Duration::from_millis(10)));
                }
                left.push_back(id);
                continue;
            }
            busy.insert(house);
            alone |= known;
            chosen.push(Done { house, id, version: row.thin.version });
            self.enter(id, State::Claiming);
        }
        self.suspects = left;
        if chosen.is_empty() {
            return;
        }
        let (store, instance, lease) = (self.store.clone(), self.instance.clone(), self.shared.settings.lease);
        self.io.spawn(async move {
            let result = store.claim(&instance, &chosen, lease).await;
            Event::Claimed { ids: chosen.into_iter().map(|d| d.id).collect(), result }
        });
    }

    pub(super) fn on_claimed(&mut self, ids: Vec<i64>, result: Result<Vec<i64>, Error>) {
        let claimed = match result {
            Ok(claimed) => claimed,
            Err(e) => {
                self.database_failed(&e);
                tracing::warn!(error = %e, "could not claim messages of a house whose owner died");
                // Whether they are marked is unknown: they come back by their due time, or by a sweep.
                Vec::new()
            }
        };
        for id in ids {
            let Some(row) = self.rows.get_mut(&id) else { continue };
            if claimed.contains(&id) {
                row.thin.version += 1;
                row.thin.claims += 1;
                row.claimed = true;
                let house = row.thin.house;
                if !self.keeps(house) {
                    self.unclaim(id, Duration::ZERO);
                } else {
                    self.to_load.push(id);
                }
            } else {
                if let Some(key) = row.key.clone() {
                    self.key_set_back(&key, id);
                }
                self.forget(id);
                self.reading.due_by(Instant::now() + self.shared.settings.lease);
            }
        }
    }

    /// Takes a claim back without an attempt: the message was not sent, or its destination is down.
    pub(super) fn unclaim(&mut self, id: i64, wait: Duration) {
        let Some(row) = self.rows.get(&id) else { return };
        let setback = Setback {
            row: Done { house: row.thin.house, id, version: row.thin.version },
            attempts: row.thin.attempts,
            claims: row.thin.claims.saturating_sub(1),
            wait: Some(wait),
            leave_key: false,
            error: "not sent".into(),
            attempt: None,
        };
        self.set_back(id, setback);
    }

    /// A message during whose sending too many processes died.
    pub(super) fn give_up_claims(&mut self, id: i64) {
        let Some(row) = self.rows.get(&id) else { return };
        let error = format!(
            "{} processes died while sending this message (relay.max_claims); look at what its receiver or handler does with it, then requeue",
            row.thin.claims
        );
        tracing::error!(id, destination = shown(&row.thin.destination), "{error}");
        let setback = Setback {
            row: Done { house: row.thin.house, id, version: row.thin.version },
            attempts: row.thin.attempts,
            claims: row.thin.claims,
            wait: None,
            leave_key: self.leaves_key(row),
            error,
            attempt: Some(Attempt { outcome: "claims", response: None, took: Duration::ZERO }),
        };
        self.shared.stats().failed += 1;
        self.run_counts(id, |counts| counts.failed += 1);
        self.set_back(id, setback);
    }
}
