//! Which rows may go, and in what order.
//!
//! The rule: a keyed row is sent only after every lower pending id of its key that was visible in the snapshot that read it.
//! A row says which pending id stands directly before it (`Thin::before`). If that one is in memory, the row is chained
//! behind it; if it has just been delivered, the row goes; otherwise it is left in the database and comes back when its
//! predecessor is done. By induction along `before`, a row goes after all of them, whichever path found it.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::destination::Cursor;
use super::engine::{Engine, Gate, Row, State, Window};
use crate::store::{House, KeyHash, Thin};
use crate::{OnExhausted, Ordering};

/// Followers of one key kept in memory; more stay in the database.
const CHAIN: usize = 256;

/// The rows of one key in memory, lowest id first.
///
/// Only the first may be on its way, unless the route is pipelined: then all are let go in order, and one that fails breaks
/// the queue: what is not in flight goes back to the database, what is in flight is awaited, and the key is read anew.
#[derive(Debug, Default)]
pub(super) struct KeyQueue {
    chain: VecDeque<i64>,
    /// Rows that have been let go: waiting for their destination, being loaded, in flight.
    active: BTreeSet<i64>,
    /// Those in flight; known only where several may be.
    flying: BTreeSet<i64>,
    /// One of those in flight has failed.
    broken: bool,
    /// There may be followers in the database that were passed over: look when the chain is empty.
    more: bool,
}

/// How a row was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    /// By the forward read, which passes its followers later.
    Ahead,
    /// By any other read: followers may have been passed over already.
    Behind,
}

impl Engine {
    /// Takes a row into memory if it may go now or soon. True when it is new.
    pub(super) fn admit(&mut self, thin: Thin, found: Found) -> bool {
        if self.rows.contains_key(&thin.id) || self.recent.contains(thin.id) {
            return false;
        }
        if !self.keeps(thin.house) || !self.run_wants(&thin) || !self.group_has_room(&thin) {
            return false;
        }
        let dest = self.destination(&thin.destination);
        let d = &self.destinations[dest];
        if (found == Found::Ahead && d.lag.is_some()) || !d.has_room(self.reading.share) {
            // Left in the database; its own read goes back to here when there is room.
            self.passed_over(dest, &thin);
            return false;
        }
        let strict = d.route.ordering != Ordering::None;
        let id = thin.id;
        let key = thin.key.clone().filter(|_| strict).map(|k| (thin.house, k));
        let Some(key) = key else {
            self.insert(thin, dest, None);
            self.ready(id);
            return true;
        };
        if let Some(before) = thin.before {
            match self.rows.get(&before) {
                // What it goes after may have been put back meanwhile. The key is read anew when it is done.
                Some(Row { outdated: true, .. }) => return false,
                // Delivered, only its deletion is still on its way.
                Some(Row { state: State::Writing { delivered: true }, .. }) => {}
                Some(Row { state: State::Writing { delivered: false } | State::Missing, .. }) => return false,
                Some(_) => {
                    // A queue whose house was lost and came back, or whose head was edited, while its head was in flight.
                    if let Some(ahead) = self.rows.get_mut(&before) {
                        ahead.key = Some(key.clone());
                    }
                    let queue = self.keys.entry(key.clone()).or_default();
                    if queue.chain.is_empty() {
                        queue.chain.push_back(before);
                        queue.active.insert(before);
                        // With it, those before it that are in flight too.
                        let flying = |(id, row): (&i64, &Row)| {
                            (row.key.as_ref() == Some(&key) && matches!(row.state, State::Sending { .. })).then_some(*id)
                        };
                        queue.flying = self.rows.iter().filter_map(flying).collect();
                    }
                }
                None if self.recent.was_delivered(before) => {}
                None => return false,
            }
        }
        let queue = self.keys.entry(key.clone()).or_default();
        queue.more |= found == Found::Behind;
        if queue.chain.len() >= CHAIN || queue.broken {
            queue.more = true;
            return false;
        }
        let place = queue.chain.partition_point(|other| *other < id);
        queue.chain.insert(place, id);
        self.insert(thin, dest, Some(key.clone()));
        self.advance(&key);
        if place == 1 {
            self.look_ahead(&key);
        }
        true
    }

    /// Whether the row's group, if it has a limit, may have one more in memory; otherwise the row is read again when it may.
    fn group_has_room(&mut self, thin: &Thin) -> bool {
        let Some(house) = self.houses.get_mut(&thin.house) else { return false };
        let Some(load) = house.group.map(|group| &mut self.groups[group]) else { return true };
        if load.rows < load.room() {
            return true;
        }
        load.full = true;
        house.refused = Some(house.refused.map_or(thin.id, |known| known.min(thin.id)));
        // A destination that lags is left out of the forward read.
        let lags = |dest: &usize| self.destinations[*dest].lag.is_some();
        if let Some(dest) = self.by_name.get(&thin.destination).copied().filter(lags) {
            self.passed_over(dest, thin);
        }
        false
    }

    /// A row stays in the database until its destination's own read comes for it.
    fn passed_over(&mut self, dest: usize, thin: &Thin) {
        // Whoever takes a house that is gone reads it from the start.
        if let Some(house) = self.houses.get(&thin.house) {
            let cursors = self.destinations[dest].lag.get_or_insert_default();
            cursors.entry(thin.house).or_insert(Cursor::at(house.mark)).back_to(thin);
        }
    }

    fn insert(&mut self, thin: Thin, dest: usize, key: Option<(House, KeyHash)>) {
        let (mut suspect, mut group, mut run) = (false, None, None);
        if let Some(house) = self.houses.get_mut(&thin.house) {
            house.rows += 1;
            group = house.group;
            if let Gate::Run { run: number, .. } = house.gate {
                run = Some(number);
            }
            if house.suspect {
                let left = self.destinations[dest].concurrency();
                let window = house.windows.entry(dest).or_insert(Window { left, open: 0, held: Vec::new() });
                suspect = window.left > 0;
                if suspect {
                    window.left -= 1;
                    window.open += 1;
                }
            }
        }
        self.destinations[dest].rows += 1;
        self.destinations[dest].waiting += 1;
        if let Some(group) = group {
            self.groups[group].rows += 1;
        }
        self.join_run(run, thin.id);
        let state = State::Waiting;
        let (claimed, outdated, tried, since) = (false, false, false, None);
        self.rows.insert(thin.id, Row { thin, dest, key, state, suspect, claimed, outdated, group, run, tried, since });
    }

    /// Lets the next of a key's queue go: the first if none is on its way; of a pipelined route all of them, in order.
    fn advance(&mut self, key: &(House, KeyHash)) {
        loop {
            let Some(queue) = self.keys.get_mut(key).filter(|q| !q.broken) else { return };
            let Some(next) = queue.chain.iter().copied().find(|id| !queue.active.contains(id)) else { return };
            // One that must be claimed goes alone: others would pass it while it is marked.
            let alone = |id: &i64| {
                self.rows.get(id).is_none_or(|r| r.suspect || r.thin.claims > 0 || !self.destinations[r.dest].pipelined)
            };
            if !queue.active.is_empty() && (alone(&next) || queue.active.iter().any(alone)) {
                return;
            }
            queue.active.insert(next);
            self.ready(next);
            self.look_ahead(key);
        }
    }

    /// The row behind the one that was let go is the next to be sent.
    fn look_ahead(&mut self, key: &(House, KeyHash)) {
        let Some(queue) = self.keys.get(key) else { return };
        if let [first, second] = *queue.chain.iter().take(2).copied().collect::<Vec<_>>()
            && queue.active.contains(&first)
            && self.rows.get(&second).is_some_and(|r| !self.destinations[r.dest].pipelined)
        {
            self.next_up.push(second);
        }
    }

    /// A row is handed to its transport. Whether an earlier one of its key is in flight.
    pub(super) fn key_sent(&mut self, id: i64) -> bool {
        let Some(row) = self.rows.get(&id).filter(|r| self.destinations[r.dest].pipelined) else { return false };
        let Some(queue) = row.key.as_ref().and_then(|key| self.keys.get_mut(key)) else { return false };
        let follows = !queue.flying.is_empty();
        queue.flying.insert(id);
        follows
    }

    /// A keyed row was delivered: its follower may go.
    pub(super) fn key_delivered(&mut self, key: &(House, KeyHash), id: i64) {
        self.store.passed().delivered(key, id);
        let Some(queue) = self.keys.get_mut(key) else { return };
        queue.chain.retain(|other| *other != id);
        queue.active.remove(&id);
        queue.flying.remove(&id);
        if queue.broken {
            self.key_mended(key);
        } else if queue.chain.is_empty() {
            if queue.more {
                self.key_reads.insert(key.clone());
            }
            self.keys.remove(key);
        } else {
            self.advance(key);
        }
    }

    /// A row of a pipelined route failed in flight. True if an earlier one of its key has failed before it, which may be why.
    pub(super) fn key_broken(&mut self, id: i64) -> bool {
        let Some(row) = self.rows.get(&id).filter(|r| self.destinations[r.dest].pipelined) else { return false };
        let Some(key) = row.key.clone() else { return false };
        let Some(queue) = self.keys.get_mut(&key) else { return false };
        let known = queue.broken;
        self.break_queue(&key, id);
        known
    }

    /// Lets go of all of a key but what is in flight, which is awaited before the key is read anew.
    fn break_queue(&mut self, key: &(House, KeyHash), but: i64) {
        let Some(queue) = self.keys.get_mut(key) else { return };
        queue.broken = true;
        queue.flying.remove(&but);
        let flying = &queue.flying;
        let chain = std::mem::take(&mut queue.chain).into_iter().filter(|id| *id != but && !flying.contains(id));
        let chain: Vec<i64> = chain.collect();
        // No trace may stay: read again, a row must not take its old place before those that it follows.
        let gone: HashSet<i64> = chain.iter().copied().chain([but]).collect();
        if let Some(dest) = gone.iter().find_map(|id| self.rows.get(id)).map(|r| r.dest) {
            self.destinations[dest].ready.retain(|id| !gone.contains(id));
            self.destinations[dest].loaded.retain(|(id, _)| !gone.contains(id));
        }
        for id in chain {
            match self.rows.get(&id).map(|r| (r.state, r.claimed)) {
                Some((State::Waiting | State::Loading | State::Loaded, false)) => self.forget(id),
                Some((State::Waiting | State::Loading | State::Loaded, true)) => self.unclaim(id, Duration::ZERO),
                _ => {}
            }
        }
        self.key_mended(key);
    }

    /// Once nothing of a broken queue is in flight, its key starts anew from the database.
    fn key_mended(&mut self, key: &(House, KeyHash)) {
        if self.keys.get(key).is_some_and(|q| q.broken && q.flying.is_empty()) {
            self.keys.remove(key);
            self.key_reads.insert(key.clone());
        }
    }

    /// A row of a pipelined route that wasn't sent, or met a destination that is down: it stays in the database, and is read
    /// again behind what failed before it.
    pub(super) fn key_returned(&mut self, id: i64) {
        let Some(row) = self.rows.get(&id) else { return };
        if row.claimed {
            self.unclaim(id, Duration::ZERO);
            return;
        }
        let (dest, thin) = (row.dest, row.thin.clone());
        if self.destinations[dest].is_down() {
            self.passed_over(dest, &thin);
        }
        self.forget(id);
    }

    /// A keyed row goes back to the database: so do its followers, which come back after it.
    pub(super) fn key_set_back(&mut self, key: &(House, KeyHash), id: i64) {
        if self.rows.get(&id).is_some_and(|r| self.destinations[r.dest].pipelined) {
            return self.break_queue(key, id);
        }
        let Some(queue) = self.keys.remove(key) else { return };
        for other in queue.chain {
            if other != id && self.rows.get(&other).is_some_and(|r| matches!(r.state, State::Waiting)) {
                self.forget(other);
            }
        }
    }

    /// An operator may have put rows of these keys back below those in memory; of all keys for None.
    pub(super) fn keys_touched(&mut self, keys: Option<&HashSet<(House, KeyHash)>>) {
        // Most reads of changes find none.
        if keys.is_some_and(HashSet::is_empty) {
            return;
        }
        for row in self.rows.values_mut() {
            let Some(key) = &row.thin.key else { continue };
            row.outdated |= keys.is_none_or(|keys| keys.contains(&(row.thin.house, key.clone())));
        }
    }

    /// Whether a row was delivered, though a read may still have seen it.
    pub(super) fn is_delivered(&self, id: i64) -> bool {
        self.recent.was_delivered(id) || self.rows.get(&id).is_some_and(|r| r.state == State::Writing { delivered: true })
    }

    /// Drops the queues of houses that are gone.
    pub(super) fn forget_keys(&mut self, gone: impl Fn(House) -> bool) {
        self.keys.retain(|key, queue| {
            if gone(key.0) && !queue.flying.is_empty() {
                // Should the house come back soon, its key goes on when these have been answered.
                queue.broken = true;
                queue.chain.clear();
                return true;
            }
            !gone(key.0)
        });
        self.key_reads.retain(|key| !gone(key.0));
        self.store.passed().forget_houses(gone);
    }

    /// Whether a row that becomes FAILED leaves its key's queue.
    pub(super) fn leaves_key(&self, row: &Row) -> bool {
        row.thin.key.is_some() && self.destinations[row.dest].route.on_exhausted == OnExhausted::Skip
    }
}

/// Ids that left memory while a read was on its way: what that read says about them is out of date.
#[derive(Debug, Default)]
pub(super) struct Recent {
    ids: HashMap<i64, bool>,
    order: VecDeque<(u64, i64)>,
}

impl Recent {
    pub(super) fn add(&mut self, id: i64, delivered: bool, reads_issued: u64) {
        self.ids.insert(id, delivered);
        self.order.push_back((reads_issued, id));
    }

    pub(super) fn contains(&self, id: i64) -> bool {
        self.ids.contains_key(&id)
    }

    fn was_delivered(&self, id: i64) -> bool {
        self.ids.get(&id) == Some(&true)
    }

    /// Forgets what no outstanding read can have seen: everything that left before the oldest of them was issued.
    pub(super) fn prune(&mut self, oldest_outstanding: u64) {
        while let Some((issued, id)) = self.order.front().copied()
            && issued < oldest_outstanding
        {
            self.order.pop_front();
            self.ids.remove(&id);
        }
    }
}
