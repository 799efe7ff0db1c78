//! Which rows to read next.
//!
//! One *fast lane* (forward, due, key, destination and change reads, one at a time) and one *slow lane* (sweeps).
//! The forward read goes up from each house's mark. Ids commit out of order, so the near sweep reads recent ids below the
//! mark again, and the full sweep reads everything: whatever a hint or a cursor misses, a sweep finds.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use super::destination::{Cursor, Destination};
use super::engine::{Engine, Event, Gate, HouseState};
use super::ordering::Found;
use crate::store::{House, KeyHash, Mark, Poll, Thin};
use crate::{Error, RelaySettings};

/// First wait after a read that found something, or after a hint.
const EAGER: Duration = Duration::from_millis(2);

/// How far back the near sweep reaches.
const NEAR: Duration = Duration::from_secs(10);

/// Followers read at a time per key.
const PER_KEY: u32 = 128;

/// Houses with a backlog that one forward read reads on.
const BUSY_AT_ONCE: usize = 8;

/// Rows read per house at least, however many houses are busy.
const PER_HOUSE_LEAST: u32 = 16;

/// A full sweep may take at most one part in this many of the time.
const SWEEP_SHARE: u32 = 50;

/// Due rows seen by a poll are read at most this often, in case all of them are rows that can't go.
const DUE_AGAIN: Duration = Duration::from_millis(200);

/// While messages come in, the forward read takes one part in this many of the time, and waits no longer than this: it costs the
/// database the same for one new message as for a hundred, and publishers need the database too.
const READ_SHARE: u32 = 4;
const READ_PAUSE: Duration = Duration::from_millis(5);

/// When as many rows as may be in memory have been there for so long, those that wait are receivers' that are slow: the others' are
/// read all the same.
const CROWDED: Duration = Duration::from_millis(250);

/// Before every time there is (the year 1, in microseconds): a cursor that has passed nothing.
const BEFORE_ALL: (i64, i64) = (-62_135_596_800_000_000, 0);

#[derive(Debug)]
pub(super) struct Reading {
    /// Counts reads, so that what left memory meanwhile can be told from what a read saw.
    pub(super) issued: u64,
    fast: Option<u64>,
    slow: Option<u64>,
    /// Last looks of runs.
    pub(super) looks: std::collections::BTreeSet<u64>,
    /// After an error, nothing is read before this.
    after: Instant,
    failures: u32,
    turn: usize,
    next_poll: Instant,
    /// When the last poll was issued, and before when there is none, whoever asks.
    polled_at: Instant,
    not_before: Instant,
    /// Something was committed since the last poll was issued.
    woken: bool,
    interval: Duration,
    /// The destination whose lagging rows were read last.
    lag_turn: usize,
    /// The house with a backlog whose turn was last.
    busy_last: House,
    /// Number of the last completed poll that found nothing new.
    pub(super) completed_poll: u64,
    due_at: Option<Instant>,
    due_read_at: Instant,
    due_cursor: (i64, i64),
    /// How long due rows that a poll sees are left alone after a due read, in case they are those that can't go.
    due_pause: Duration,
    /// The last due read left out what is due of a destination that is up.
    due_left_out: bool,
    /// Changes known, and changes seen in the last poll.
    changes: Option<i64>,
    changes_seen: i64,
    /// Before this the forward read doesn't reach back.
    back_at: Instant,
    near_at: Instant,
    full_at: Instant,
    sweep: Option<Sweep>,
    /// Since when as many rows as may be are in memory.
    full_since: Option<Instant>,
    /// Rows that may wait for a destination: without a limit, but where memory has been full for a while.
    pub(super) share: usize,
}

/// A sweep under way: what is left of it, page by page.
#[derive(Debug)]
struct Sweep {
    full: bool,
    /// (mark, life) per house that isn't finished.
    left: Vec<(Mark, u64)>,
    took: Duration,
}

impl Reading {
    pub(super) fn new(now: Instant, settings: &RelaySettings) -> Self {
        Self {
            issued: 0,
            fast: None,
            slow: None,
            looks: Default::default(),
            after: now,
            failures: 0,
            turn: 0,
            next_poll: now,
            polled_at: now,
            not_before: now,
            woken: false,
            interval: EAGER,
            completed_poll: 0,
            lag_turn: 0,
            busy_last: House(i32::MIN),
            due_at: None,
            due_read_at: now,
            due_cursor: BEFORE_ALL,
            due_pause: DUE_AGAIN,
            due_left_out: false,
            changes: None,
            changes_seen: 0,
            back_at: now,
            near_at: now + settings.near_sweep,
            full_at: now + settings.full_sweep,
            sweep: None,
            full_since: None,
            share: usize::MAX,
        }
    }

    /// Something was committed.
    pub(super) fn poll_now(&mut self) {
        self.next_poll = Instant::now();
        self.woken = true;
    }

    /// Something was published whose commit can't be seen: poll from 2 ms upwards.
    pub(super) fn hinted(&mut self) {
        self.interval = EAGER;
    }

    /// Houses were taken: read them from the start, due rows too.
    pub(super) fn gained(&mut self) {
        self.poll_now();
        self.interval = EAGER;
        self.due_at = Some(Instant::now());
        self.due_cursor = BEFORE_ALL;
    }

    /// A row becomes due at `at`.
    pub(super) fn due_by(&mut self, at: Instant) {
        self.due_at = Some(self.due_at.map_or(at, |known| known.min(at)));
    }

    pub(super) fn is_idle(&self, now: Instant) -> bool {
        self.fast.is_none()
            && self.due_at.is_none_or(|at| at > now || self.due_read_at + self.due_pause > now)
            && self.changes.is_none_or(|known| known >= self.changes_seen)
    }

    pub(super) fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    fn oldest_outstanding(&self) -> u64 {
        let looks = self.looks.first().copied();
        [self.fast, self.slow, looks].into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    /// Until when nothing is read, after an error.
    pub(super) fn after_error(&self, now: Instant) -> Option<Instant> {
        (now < self.after).then_some(self.after)
    }

    pub(super) fn reads_now(&self) -> bool {
        self.fast.is_some()
    }
}

/// (house, life, cursor) of a read, to recognise a house that is read from the start since.
type Asked = Vec<(House, u64, i64)>;

impl Engine {
    /// Whether more may be read: until memory is full, and then what is others' than of those that fill it.
    fn has_room(&self) -> bool {
        self.reading.full_since.is_none() || self.reading.share < usize::MAX
    }

    /// Looks whether memory is full. One receiver may fill it for a moment, which keeps reads large; who fills it for long gets
    /// no more than a share, so that what is read beside it finds room: half as much as memory may hold, shared by those that wait.
    fn measure_room(&mut self, now: Instant) {
        let most = self.shared.settings.batch as usize * 4;
        if self.rows.len() < most {
            self.reading.full_since = None;
            self.reading.share = usize::MAX;
            return;
        }
        let crowded_at = *self.reading.full_since.get_or_insert(now) + CROWDED;
        if now < crowded_at {
            self.wake_by(crowded_at);
            return;
        }
        let waiting = self.destinations.iter().filter(|d| d.waiting > 0).count();
        self.reading.share = (most / 2 / waiting.max(1)).max(1);
    }

    /// Houses that are read now.
    fn readable(&self) -> impl Iterator<Item = (House, &HouseState)> {
        self.houses.iter().filter(|(_, h)| h.is_read() && !self.is_full(h)).map(|(house, h)| (*house, h))
    }

    /// Houses that the forward read reads now.
    fn ahead(&self) -> impl Iterator<Item = (House, &HouseState)> {
        self.readable().filter(|(_, h)| h.is_ahead())
    }

    /// Houses that are read all the time.
    fn open(&self) -> impl Iterator<Item = (House, &HouseState)> {
        self.readable().filter(|(_, h)| h.is_open())
    }

    fn excluded(&self) -> Vec<String> {
        self.destinations.iter().filter(|d| d.lag.is_some()).map(|d| d.name.clone()).collect()
    }

    /// Starts the reads that are wanted now.
    pub(super) fn read(&mut self, now: Instant) {
        self.recent.prune(self.reading.oldest_outstanding());
        self.measure_room(now);
        if self.readable().next().is_none() {
            return;
        }
        if now < self.reading.after {
            self.wake_by(self.reading.after);
            return;
        }
        if self.reading.fast.is_none() {
            // Each kind gets its turn, so that none starves the others.
            for _ in 0..5 {
                self.reading.turn = (self.reading.turn + 1) % 5;
                let started = match self.reading.turn {
                    0 => self.read_changes(),
                    1 => self.read_keys(),
                    2 => self.read_due(now),
                    3 => self.read_destination(now),
                    _ => self.poll(now),
                };
                if started {
                    break;
                }
            }
        }
        if self.reading.slow.is_none() {
            self.sweep(now);
        }
    }

    fn poll(&mut self, now: Instant) -> bool {
        let at = self.reading.next_poll.max(self.reading.not_before);
        if now < at {
            self.wake_by(at);
            return false;
        }
        if !self.has_room() || self.ahead().next().is_none() {
            return false;
        }
        // With nothing in memory the forward read reaches back as far as the near sweep and replaces it, but not so often that it
        // costs much where what was delivered can't be cleaned away.
        let reach_back = now >= self.reading.back_at && self.rows.is_empty() && !self.ahead().any(|(_, h)| h.busy);
        // Of the houses that were cut off last time a few in turn, in large steps; all of the others.
        let mut busy: Vec<House> = self.ahead().filter(|(_, h)| h.busy).map(|(house, _)| house).collect();
        busy.sort_unstable();
        let first = busy.partition_point(|house| *house <= self.reading.busy_last);
        let n = busy.len().max(1);
        busy.rotate_left(first % n);
        let left_out: HashSet<House> = busy.split_off(busy.len().min(BUSY_AT_ONCE)).into_iter().collect();
        if let Some(last) = busy.last() {
            self.reading.busy_last = *last;
        }
        let from = |h: &HouseState| h.refused.map_or(i64::MAX, |id| id - 1).min(if reach_back { h.floor() } else { h.mark });
        let asked: Asked =
            self.ahead().filter(|(house, _)| !left_out.contains(house)).map(|(house, h)| (house, h.life, from(h))).collect();
        for (house, ..) in &asked {
            if let Some(h) = self.houses.get_mut(house) {
                h.refused = None;
            }
        }
        let all = left_out.is_empty();
        let busy = busy.len().max(asked.len() / BUSY_AT_ONCE).max(1) as u32;
        let batch = self.shared.settings.batch;
        let limit = (batch / busy).max(PER_HOUSE_LEAST.min(batch));
        // A destination that lags starts, in every house, where this read leaves it out for the first time.
        let marks: Vec<(House, i64)> = self.readable().map(|(house, h)| (house, h.mark)).collect();
        for d in &mut self.destinations {
            if let Some(cursors) = &mut d.lag {
                for (house, mark) in &marks {
                    cursors.entry(*house).or_insert(Cursor::at(*mark));
                }
            }
        }
        if reach_back {
            self.reading.near_at = now + self.shared.settings.near_sweep;
        }
        let excluded = self.excluded();
        let unfiltered = excluded.is_empty();
        let seq = self.reading.issue();
        self.reading.fast = Some(seq);
        self.reading.polled_at = now;
        self.reading.woken = false;
        let store = self.store.clone();
        self.io.spawn(async move {
            let (started, marks) = (Instant::now(), marks_of(&asked));
            let result = store.poll(&marks, limit, &excluded).await;
            let reached_back = reach_back.then(|| started.elapsed());
            Event::Polled { seq, asked, all, unfiltered, reached_back, result }
        });
        true
    }

    fn read_due(&mut self, now: Instant) -> bool {
        let Some(at) = self.reading.due_at else { return false };
        if now < at {
            self.wake_by(at);
            return false;
        }
        if !self.has_room() {
            return false;
        }
        // A run reads what is due with everything else.
        let asked: Vec<(House, u64)> = self.open().map(|(house, h)| (house, h.life)).collect();
        if asked.is_empty() {
            return false;
        }
        let (after, limit) = (self.reading.due_cursor, self.shared.settings.batch.min(500));
        let share = self.reading.share;
        let left_out: Vec<&Destination> = self.destinations.iter().filter(|d| !d.wants_due(share)).collect();
        self.reading.due_left_out = left_out.iter().any(|d| !d.is_down());
        let excluded: Vec<String> = left_out.iter().map(|d| d.name.clone()).collect();
        self.destinations.iter_mut().for_each(Destination::due_is_read);
        let seq = self.reading.issue();
        self.reading.fast = Some(seq);
        self.reading.due_read_at = now;
        self.reading.due_at = None;
        let store = self.store.clone();
        self.io.spawn(async move {
            let (started, houses) = (Instant::now(), asked.iter().map(|(house, _)| *house).collect::<Vec<_>>());
            let result = store.due(&houses, after, limit, &excluded).await;
            Event::Due { limit, asked, took: started.elapsed(), result }
        });
        true
    }

    fn read_keys(&mut self) -> bool {
        let houses = &self.houses;
        self.key_reads.retain(|key| houses.get(&key.0).is_some_and(HouseState::is_read));
        if self.key_reads.is_empty() || !self.has_room() {
            return false;
        }
        let readable = |key: &&(House, KeyHash)| self.houses.get(&key.0).is_some_and(|h| !self.is_full(h));
        let keys: Vec<(House, KeyHash)> = self.key_reads.iter().filter(readable).take(200).cloned().collect();
        if keys.is_empty() {
            return false;
        }
        for key in &keys {
            self.key_reads.remove(key);
        }
        let seq = self.reading.issue();
        self.reading.fast = Some(seq);
        let store = self.store.clone();
        self.io.spawn(async move {
            let result = store.of_keys(&keys, PER_KEY).await;
            Event::OfKeys { keys, limit: PER_KEY, result }
        });
        true
    }

    fn read_destination(&mut self, now: Instant) -> bool {
        if !self.has_room() {
            return false;
        }
        // In turn, so that one with a large backlog doesn't keep the others from theirs.
        let count = self.destinations.len();
        let mut turns = (1..=count).map(|n| (self.reading.lag_turn + n) % count);
        let Some(dest) = turns.find(|place| self.destinations[*place].wants_rows(now, self.reading.share)) else { return false };
        self.reading.lag_turn = dest;
        let marks: Vec<(House, u64, i64)> = self.readable().map(|(house, h)| (house, h.life, h.mark)).collect();
        if marks.is_empty() {
            self.end_lag(dest);
            return false;
        }
        let d = &mut self.destinations[dest];
        let (name, fresh) = (d.name.clone(), d.is_read());
        let Some(cursors) = &mut d.lag else { return false };
        let mut from = |house, mark| {
            let cursor = cursors.entry(house).or_insert(Cursor::at(mark));
            if fresh { cursor.fresh } else { cursor.all }
        };
        let asked: Asked = marks.iter().map(|(house, life, mark)| (*house, *life, from(*house, *mark))).collect();
        let limit = (self.shared.settings.batch.min(1_000) / asked.len().max(1) as u32).max(4);
        let seq = self.reading.issue();
        self.reading.fast = Some(seq);
        let store = self.store.clone();
        self.io.spawn(async move {
            let marks = marks_of(&asked);
            let result = store.of_destination(&marks, &name, limit).await;
            Event::OfDestination { dest, fresh, asked, limit, result }
        });
        true
    }

    fn read_changes(&mut self) -> bool {
        let (Some(known), upto) = (self.reading.changes, self.reading.changes_seen) else { return false };
        if known >= upto {
            return false;
        }
        let seq = self.reading.issue();
        self.reading.fast = Some(seq);
        let store = self.store.clone();
        self.io.spawn(async move {
            let result = store.changes(known).await;
            Event::Changes { upto, result }
        });
        true
    }

    fn sweep(&mut self, now: Instant) {
        let full = now >= self.reading.full_at;
        // Rows whose log row is missing don't keep the sweep away that gives them another look.
        if !(self.has_room() || full && self.reading.sweep.is_none()) {
            return;
        }
        if self.reading.sweep.is_none() {
            if !full && (now < self.reading.near_at || self.rows.is_empty()) {
                let next =
                    self.reading.full_at.min(if self.rows.is_empty() { self.reading.full_at } else { self.reading.near_at });
                self.wake_by(next);
                return;
            }
            if full {
                // What committed late below the cursor of a destination that lags is found like everything else.
                for d in self.destinations.iter_mut().filter(|d| !d.is_down()) {
                    if let Some(cursors) = &mut d.lag {
                        cursors.values_mut().for_each(|cursor| *cursor = Cursor::at(0));
                    }
                }
                // Rows whose log row was missing get another look.
                let missing: Vec<i64> =
                    self.rows.iter().filter(|(_, r)| r.state == super::engine::State::Missing).map(|(id, _)| *id).collect();
                for id in missing {
                    if let Some(key) = self.rows.get(&id).and_then(|r| r.key.clone()) {
                        self.key_set_back(&key, id);
                    }
                    self.forget(id);
                }
            }
            let left = self
                .open()
                .map(|(house, h)| (Mark { house, after: if full { 0 } else { h.floor() }, upto: h.mark }, h.life))
                .filter(|(mark, _)| mark.after < mark.upto)
                .collect();
            self.reading.near_at = now + self.shared.settings.near_sweep;
            self.reading.sweep = Some(Sweep { full, left, took: Duration::ZERO });
        }
        let houses: HashSet<(House, u64)> = self.open().map(|(house, h)| (house, h.life)).collect();
        let Some(sweep) = &mut self.reading.sweep else { return };
        sweep.left.retain(|(mark, life)| houses.contains(&(mark.house, *life)));
        if sweep.left.is_empty() {
            let (full, took) = (sweep.full, sweep.took);
            self.reading.sweep = None;
            if full {
                self.reading.full_at = now + self.shared.settings.full_sweep.max(took * SWEEP_SHARE);
                let mut stats = self.shared.stats();
                stats.full_sweep = Some(took);
                stats.full_sweeps.record(took);
                stats.pass("full sweep");
            } else {
                self.reading.near_at = now + self.shared.settings.near_sweep.max(took * SWEEP_SHARE);
                if took > Duration::ZERO {
                    self.shared.stats().near_sweeps.record(took);
                }
            }
            self.wake_by(self.reading.near_at.min(self.reading.full_at));
            return;
        }
        let marks: Vec<Mark> = sweep.left.iter().map(|(mark, _)| *mark).collect();
        let limit = (self.shared.settings.batch / marks.len() as u32).max(PER_HOUSE_LEAST);
        let excluded = self.excluded();
        let seq = self.reading.issue();
        self.reading.slow = Some(seq);
        let store = self.store.clone();
        self.io.spawn(async move {
            let started = Instant::now();
            let result = store.sweep(&marks, limit, &excluded).await;
            Event::Swept { limit, took: started.elapsed(), result }
        });
    }

    pub(super) fn on_read(&mut self, event: Event) {
        let now = Instant::now();
        match event {
            Event::Polled { seq, asked, all, unfiltered, reached_back, result } => {
                self.reading.fast = None;
                if let Some(took) = reached_back {
                    self.reading.back_at = now + took * SWEEP_SHARE;
                }
                match self.read_result(now, result) {
                    Some(poll) => self.on_polled((seq, all, unfiltered), &asked, poll, now),
                    // What it went back for is still to be read.
                    None => self.read_again(&asked),
                }
            }
            Event::Due { limit, asked, took, result } => {
                self.reading.fast = None;
                match self.read_result(now, result) {
                    Some(page) => {
                        let full_page = page.rows.len() as u32 >= limit;
                        self.reading.due_cursor = match page.rows.last() {
                            Some(last) if full_page => (last.due.unwrap_or(0), last.id),
                            _ => BEFORE_ALL,
                        };
                        for thin in page.rows {
                            self.admit(thin, Found::Behind);
                        }
                        if full_page {
                            self.reading.due_by(now);
                        } else {
                            self.reading.due_pause = DUE_AGAIN.max(took * SWEEP_SHARE);
                            for (house, life) in asked {
                                if let Some(h) = self.houses.get_mut(&house).filter(|h| h.life == life) {
                                    h.due_read = true;
                                    h.settle();
                                }
                            }
                            if let Some(next) = page.next_due {
                                self.reading.due_by(now + Duration::from_micros(next.max(0) as u64));
                            }
                        }
                    }
                    None => self.reading.due_by(now),
                }
            }
            Event::OfKeys { keys, limit, result } => {
                self.reading.fast = None;
                match self.read_result(now, result) {
                    Some(rows) => {
                        let mut count = std::collections::HashMap::new();
                        for thin in rows {
                            // Only what has been delivered meanwhile hides what lies behind it; what is refused has its own way back.
                            if let (true, Some(key)) = (self.is_delivered(thin.id), thin.key.clone()) {
                                *count.entry((thin.house, key)).or_insert(0) += 1;
                            }
                            self.admit(thin, Found::Behind);
                        }
                        // A key whose rows all went meanwhile but had more behind them.
                        for (key, n) in count {
                            if n >= limit && !self.keys.contains_key(&key) {
                                self.key_reads.insert(key);
                            }
                        }
                    }
                    None => self.key_reads.extend(keys),
                }
            }
            Event::OfDestination { dest, fresh, asked, limit, result } => {
                self.reading.fast = None;
                if let Some(rows) = self.read_result(now, result) {
                    self.on_destination_read(dest, fresh, &asked, limit, rows);
                }
            }
            Event::Changes { upto, result } => {
                self.reading.fast = None;
                if let Some(changes) = self.read_result(now, result) {
                    self.reading.changes = Some(upto);
                    let keys: HashSet<_> = changes.iter().filter_map(|c| Some((c.house, c.key.clone()?))).collect();
                    keys.iter().for_each(|key| self.store.passed().leave_out(key));
                    self.keys_touched(Some(&keys));
                    self.store.passed().caught_up(upto);
                    for change in changes {
                        if self.rows.get(&change.id).is_some_and(|r| r.state == super::engine::State::Waiting) {
                            if let Some(key) = self.rows.get(&change.id).and_then(|r| r.key.clone()) {
                                self.key_set_back(&key, change.id);
                            }
                            self.forget(change.id);
                        }
                        if let Some(key) = change.key
                            && self.houses.get(&change.house).is_some_and(HouseState::is_read)
                        {
                            self.key_reads.insert((change.house, key));
                        }
                    }
                    self.reading.due_by(now);
                }
            }
            Event::Swept { limit, took, result } => {
                self.reading.slow = None;
                if let Some(rows) = self.read_result(now, result) {
                    let mut last: std::collections::HashMap<House, (u32, i64)> = std::collections::HashMap::new();
                    for thin in &rows {
                        let entry = last.entry(thin.house).or_insert((0, 0));
                        *entry = (entry.0 + 1, thin.id);
                    }
                    if let Some(sweep) = &mut self.reading.sweep {
                        sweep.took += took;
                        sweep.left.retain_mut(|(mark, _)| match last.get(&mark.house) {
                            Some((n, id)) if *n >= limit => {
                                mark.after = *id;
                                true
                            }
                            _ => false,
                        });
                    }
                    for thin in rows {
                        self.admit(thin, Found::Behind);
                    }
                }
            }
            _ => {}
        }
    }

    /// Notes success or failure of a read.
    pub(super) fn read_result<T>(&mut self, now: Instant, result: Result<T, Error>) -> Option<T> {
        match result {
            Ok(value) => {
                if self.reading.failures > 0 {
                    self.reading.failures = 0;
                    self.shared.stats().database_error = None;
                    tracing::info!("reading works again");
                }
                Some(value)
            }
            Err(e) => {
                self.reading.failures += 1;
                // Never a spin: at least 50 ms, at most 5 s.
                let wait = (Duration::from_millis(50) * 2u32.pow(self.reading.failures.min(7) - 1)).min(Duration::from_secs(5));
                self.reading.after = now + wait.mul_f64(0.75 + 0.5 * fastrand::f64());
                self.database_failed(&e);
                tracing::warn!(error = %e, again_in = ?wait, "could not read pending messages");
                None
            }
        }
    }

    pub(super) fn database_failed(&self, e: &Error) {
        let mut stats = self.shared.stats();
        stats.database_errors += 1;
        stats.database_error = Some(e.to_string());
    }

    fn on_polled(&mut self, (seq, all, unfiltered): (u64, bool, bool), asked: &Asked, poll: Poll, now: Instant) {
        let mut found_new = false;
        if self.reading.changes.is_none() {
            // What was read before this may be older than the last of those that count as dealt with.
            self.keys_touched(None);
        }
        for thin in poll.rows {
            found_new |= self.admit(thin, Found::Ahead);
        }
        let lives: std::collections::HashMap<House, u64> = asked.iter().map(|(house, life, _)| (*house, *life)).collect();
        let mut cut_off = false;
        let mut next_due: Option<i64> = None;
        for found in &poll.houses {
            let Some(h) = self.houses.get_mut(&found.house) else { continue };
            if h.is_open() {
                next_due = [next_due, found.next_due].into_iter().flatten().min();
            }
            // Read from the start since: its new life starts from 0.
            if lives.get(&found.house) != Some(&h.life) {
                continue;
            }
            let read_to = match (found.cut_off, h.refused) {
                (_, Some(refused)) => {
                    h.busy = true;
                    refused - 1
                }
                (Some(last), None) => {
                    h.busy = true;
                    cut_off = true;
                    last
                }
                (None, None) => {
                    h.busy = false;
                    // What was left out for a destination that lags may hold suspects of its own.
                    h.polled_out |= unfiltered;
                    h.settle();
                    match h.gate {
                        // There is nothing more up to there, whatever else has been delivered meanwhile.
                        Gate::Run { bound, .. } => found.max_id.max(bound),
                        _ => found.max_id,
                    }
                }
            };
            h.advance(read_to, now);
        }
        if let Some(next) = next_due {
            let at = if next > 0 {
                now + Duration::from_micros(next as u64)
            } else {
                self.reading.due_read_at + self.reading.due_pause
            };
            self.reading.due_by(at);
        }
        if self.reading.changes.is_none() {
            self.reading.changes = Some(poll.changes);
            self.store.passed().caught_up(poll.changes);
        }
        self.reading.changes_seen = self.reading.changes_seen.max(poll.changes);
        self.reading.interval = if found_new { EAGER } else { (self.reading.interval * 2).min(self.shared.settings.idle_poll) };
        let cut_off = cut_off || !all;
        self.reading.next_poll = if cut_off || self.reading.woken { now } else { now + self.reading.interval };
        let took = now.saturating_duration_since(self.reading.polled_at);
        self.reading.not_before = if cut_off { now } else { now + (took * (READ_SHARE - 1)).min(READ_PAUSE) };
        if !found_new && !cut_off {
            self.reading.completed_poll = seq;
        }
        self.shared.stats().pass("forward read");
    }

    /// A forward read failed: what was left in the database below the marks is still to be read.
    fn read_again(&mut self, asked: &Asked) {
        for (house, life, after) in asked {
            if let Some(h) = self.houses.get_mut(house).filter(|h| h.life == *life && *after < h.mark) {
                h.refused = Some(h.refused.map_or(after + 1, |known| known.min(after + 1)));
            }
        }
    }

    fn on_destination_read(&mut self, dest: usize, fresh: bool, asked: &Asked, limit: u32, rows: Vec<Thin>) {
        let mut seen: std::collections::HashMap<House, (u32, i64)> = std::collections::HashMap::new();
        for thin in &rows {
            let entry = seen.entry(thin.house).or_insert((0, 0));
            *entry = (entry.0 + 1, thin.id);
        }
        let current: HashSet<(House, u64)> = self.houses.iter().map(|(house, h)| (*house, h.life)).collect();
        let bounds: std::collections::HashMap<House, i64> = self
            .houses
            .iter()
            .filter_map(|(house, h)| match h.gate {
                Gate::Run { bound, .. } => Some((*house, bound)),
                _ => None,
            })
            .collect();
        // Below the fresh ones there may be more.
        let mut caught_up = !fresh;
        if let Some(cursors) = &mut self.destinations[dest].lag {
            for (house, life, after) in asked {
                if !current.contains(&(*house, *life)) {
                    continue;
                }
                let (n, mut last) = seen.get(house).copied().unwrap_or((0, *after));
                caught_up &= n < limit;
                if n < limit
                    && let Some(bound) = bounds.get(house)
                {
                    // The run has all of it.
                    last = last.max(*bound);
                }
                // What admit refuses below pulls the cursor back.
                caught_up &= cursors.entry(*house).or_insert(Cursor::at(*after)).advance(fresh, *after, last);
            }
        }
        let before = self.destinations[dest].lag.clone();
        for thin in rows {
            self.admit(thin, Found::Behind);
        }
        let d = &self.destinations[dest];
        if caught_up && d.lag == before && (!d.is_down() || d.has_room(self.reading.share)) {
            self.end_lag(dest);
        }
    }

    /// A destination is read together with the others again. Houses that weren't read for it, because their group had no room,
    /// are read from where it stands.
    fn end_lag(&mut self, dest: usize) {
        if std::mem::take(&mut self.reading.due_left_out) {
            // Now, whatever the last due read found.
            self.reading.due_pause = Duration::ZERO;
            self.reading.due_by(Instant::now());
        }
        for (house, cursor) in self.destinations[dest].lag.take().into_iter().flatten() {
            let full = self.houses.get(&house).is_some_and(|h| h.is_read() && self.is_full(h) && cursor.all < h.mark);
            if full && let Some(h) = self.houses.get_mut(&house) {
                h.refused = Some(h.refused.map_or(cursor.all + 1, |known| known.min(cursor.all + 1)));
            }
        }
    }
}

fn marks_of(asked: &Asked) -> Vec<Mark> {
    asked.iter().map(|(house, _, after)| Mark { house: *house, after: *after, upto: i64::MAX }).collect()
}

impl HouseState {
    /// Where the near sweep starts: the mark as it was a while ago.
    fn floor(&self) -> i64 {
        self.marks.front().map_or(self.mark, |(_, mark)| *mark)
    }

    /// All of it has been seen once: what comes now was not in flight when the last owner died.
    fn settle(&mut self) {
        if self.polled_out && self.due_read {
            self.suspect = false;
            self.windows.retain(|_, window| window.open > 0);
        }
    }

    fn advance(&mut self, to: i64, now: Instant) {
        // Where it stood before: what commits late lies above that.
        if self.marks.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) >= Duration::from_secs(1)) {
            self.marks.push_back((now, self.mark));
        }
        self.mark = self.mark.max(to);
        // Keep one entry that is older than the reach.
        while self.marks.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= NEAR) {
            self.marks.pop_front();
        }
    }
}
