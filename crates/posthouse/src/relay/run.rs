//! Runs: the houses of a group that isn't continuous are sent from only while one goes.
//!
//! A run opens its houses to the ordinary reads, from the smallest id up to the highest pending one of that moment. When
//! nothing of it is in memory any more, a last look at all of it (a sweep) decides whether it is done: whatever a cursor
//! missed, that finds. Then the houses are closed again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use super::destination::Cursor;
use super::engine::{Engine, Event, Gate, Row, State};
use super::membership::Report;
use super::ordering::Found;
use super::{Command, Relay};
use crate::store::{Ends, House, Mark, Taken, Thin};
use crate::{Error, Houses};

/// Rows that a last look reads per house at least.
const LOOK_LEAST: u32 = 16;

/// A run that is asked for: of a group, or of a part of its houses.
#[derive(Debug, Clone)]
#[must_use = "a run takes place when it is given to Relay::run"]
pub struct Run {
    pub(crate) group: String,
    pub(crate) houses: Option<Houses>,
    pub(crate) limit: Option<u64>,
    pub(crate) adopted: Option<Vec<String>>,
    pub(crate) stop: Option<watch::Receiver<bool>>,
}

impl Run {
    /// A run of all houses of this group that the instance owns. Of a group with an external trigger: of all of the group's
    /// houses, which are taken for it.
    pub fn of(group: impl Into<String>) -> Self {
        Self { group: group.into(), houses: None, limit: None, adopted: None, stop: None }
    }

    /// Only these of the group's houses, and of its adopted tables those that [`adopted`](Self::adopted) names.
    pub fn houses(mut self, houses: Houses) -> Self {
        self.houses = Some(houses);
        self
    }

    /// Only these of the group's adopted tables, each as `mapping/table`.
    pub fn adopted(mut self, tables: impl IntoIterator<Item = String>) -> Self {
        self.adopted = Some(tables.into_iter().collect());
        self
    }

    /// At most this many messages are taken up; the group's own limit when this isn't called.
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// Once this is true (or its sender is gone), no more messages are taken up, and the run ends when those in flight are done.
    pub fn stop(mut self, stop: watch::Receiver<bool>) -> Self {
        self.stop = Some(stop);
        self
    }
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunOutcome {
    /// What it did.
    pub counts: RunCounts,
    /// Why it ended.
    pub end: RunEnd,
}

impl RunOutcome {
    /// Both together: the counts of both, and the end that says more.
    pub(crate) fn and(self, other: Self) -> Self {
        let (one, two) = (self.counts, other.counts);
        let counts = RunCounts {
            messages: one.messages + two.messages,
            delivered: one.delivered + two.delivered,
            retried: one.retried + two.retried,
            failed: one.failed + two.failed,
        };
        let end = match (self.end, other.end) {
            (RunEnd::Lost(one), RunEnd::Lost(two)) => RunEnd::Lost(format!("{one}; {two}")),
            (lost @ RunEnd::Lost(_), _) | (_, lost @ RunEnd::Lost(_)) => lost,
            (RunEnd::Stopped, _) | (_, RunEnd::Stopped) => RunEnd::Stopped,
            (RunEnd::Limit, _) | (_, RunEnd::Limit) => RunEnd::Limit,
            (RunEnd::Done, RunEnd::Done) => RunEnd::Done,
        };
        Self { counts, end }
    }
}

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunCounts {
    /// Messages it took up. Those whose destination was found to be down are among them, and in none of the others.
    pub messages: u64,
    /// Messages confirmed by their receivers.
    pub delivered: u64,
    /// Attempts that failed and will be tried again.
    pub retried: u64,
    /// Messages that became FAILED.
    pub failed: u64,
}

/// Why a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunEnd {
    /// All that was there when it began was tried, or waits for a destination that is down.
    Done,
    /// Its limit was reached, and there was more.
    Limit,
    /// It was told to stop, or the relay was.
    Stopped,
    /// It couldn't begin, or lost some of its houses: why. What it had of other houses is done.
    Lost(String),
}

impl Relay {
    /// Runs a group that isn't continuous once: sends what is there and due in its houses, from the smallest id, and answers
    /// what came of it. What is published meanwhile, and what becomes due meanwhile, waits for the next run.
    ///
    /// Of the group's houses, these are the ones that this instance owns; the other instances have theirs. Of a group with an
    /// external trigger all are taken first, or the run doesn't take place because another instance has one of them.
    ///
    /// The run begins with this call, and doesn't end with the future; see [`Run::stop`].
    pub fn run(&self, run: Run) -> impl Future<Output = RunOutcome> + Send + use<> {
        let (done, outcome) = oneshot::channel();
        // The engine is gone only after shutdown; then the sender of the outcome is dropped here.
        let _ = self.commands.send(Command::Run(run, done));
        async move {
            let gone = "the relay has been shut down, or its loops were started anew";
            outcome.await.unwrap_or_else(|_| RunOutcome { counts: RunCounts::default(), end: RunEnd::Lost(gone.into()) })
        }
    }
}

/// A run under way.
#[derive(Debug)]
pub(super) struct Running {
    group: usize,
    /// The houses it was asked for.
    wanted: Houses,
    /// Its houses, as long as they are ours.
    houses: BTreeSet<House>,
    /// Those that were lost meanwhile.
    lost: Vec<u16>,
    limit: Option<u64>,
    phase: Phase,
    /// Rows of it in memory.
    rows: usize,
    /// Messages taken up.
    taken: u64,
    /// Some were not, for the limit.
    refused: bool,
    /// Rows that were tried and left memory without an outcome: taken up again, they count once.
    returned: HashSet<i64>,
    counts: RunCounts,
    /// Why it is to end.
    end: Option<RunEnd>,
    done: oneshot::Sender<RunOutcome>,
    /// Dropped with the run: ends the task that waits for its stop.
    _going: oneshot::Sender<()>,
}

#[derive(Debug)]
enum Phase {
    /// Until it is known which houses are ours.
    Waiting,
    /// Until the membership has taken its houses.
    Taking,
    /// Until it is known where its houses end.
    Opening,
    Going,
    /// The last look: what is left of it, and whether it found something.
    Looking {
        left: Vec<Mark>,
        found: bool,
    },
    /// Nothing more is taken up.
    Ending,
}

impl Engine {
    /// Somebody asked for a run.
    pub(super) fn run_asked(&mut self, run: Run, done: oneshot::Sender<RunOutcome>) {
        let (place, wanted) = match self.run_possible(&run) {
            Ok(possible) => possible,
            Err(end) => {
                // Whoever asked may have gone.
                let _ = done.send(RunOutcome { counts: RunCounts::default(), end });
                return;
            }
        };
        let limit = run.limit.or(self.shared.groups[place].limit);
        let id = self.number();
        let (going, over) = oneshot::channel::<()>();
        if let Some(mut stop) = run.stop {
            self.io.spawn(async move {
                tokio::select! {
                    // An error: its sender is gone.
                    _ = stop.wait_for(|stop| *stop) => Event::Stop(id),
                    _ = over => Event::Nothing,
                }
            });
        }
        let running = Running {
            group: place,
            wanted,
            houses: BTreeSet::new(),
            lost: Vec::new(),
            limit,
            phase: Phase::Waiting,
            rows: 0,
            taken: 0,
            refused: false,
            returned: HashSet::new(),
            counts: RunCounts::default(),
            end: None,
            done,
            _going: going,
        };
        self.runs.insert(id, running);
    }

    /// The place of its group, and the houses that it is about; or why it can't take place.
    fn run_possible(&self, run: &Run) -> Result<(usize, Houses), RunEnd> {
        if self.stopping {
            return Err(RunEnd::Stopped);
        }
        let groups = &self.shared.groups;
        let Some(place) = groups.iter().position(|g| g.name == run.group) else {
            let known: Vec<&str> = groups.iter().map(|g| g.name.as_str()).collect();
            return Err(RunEnd::Lost(format!("there is no group {:?} here; there are: {}", run.group, known.join(", "))));
        };
        let group = &groups[place];
        if group.is_continuous() {
            return Err(RunEnd::Lost(format!(
                "group {:?} is continuous: it is sent from all the time, without runs",
                group.name
            )));
        }
        let wanted = run.houses.as_ref().filter(|houses| !houses.is_all()).unwrap_or(&group.houses);
        if wanted.common(&group.houses) != *wanted {
            let why = format!("group {:?} has the houses {}, and not all of {wanted}", group.name, group.houses);
            return Err(RunEnd::Lost(why));
        }
        Ok((place, wanted.clone()))
    }

    /// Each run does what it can do now.
    pub(super) fn step_runs(&mut self) {
        let ids: Vec<u64> = self.runs.keys().copied().collect();
        for id in ids {
            self.step_run(id);
        }
    }

    fn step_run(&mut self, id: u64) {
        let Some(run) = self.runs.get(&id) else { return };
        match run.phase {
            // Its houses come, and go back at once.
            Phase::Taking => return,
            Phase::Waiting if run.end.is_none() => {
                // Without a lease no house is ours, and which will be isn't known.
                let lives = self.lease_until.is_some_and(|until| Instant::now() < until);
                if self.share.is_some() && lives {
                    self.begin_run(id);
                }
            }
            Phase::Going if run.end.is_none() => self.advance_run(id),
            _ => {}
        }
        let Some(run) = self.runs.get_mut(&id).filter(|run| run.end.is_some()) else { return };
        if !matches!(run.phase, Phase::Ending) {
            run.phase = Phase::Ending;
            self.set_gates(id, |gate| {
                if let Gate::Run { open, .. } = gate {
                    *open = false;
                }
            });
            self.drop_waiting();
        }
        if self.runs.get(&id).is_some_and(|run| run.rows == 0) {
            self.finish_run(id);
        }
    }

    fn begin_run(&mut self, id: u64) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        if self.shared.groups[run.group].is_external() {
            run.phase = Phase::Taking;
            // The membership is gone only when everything is being torn down.
            let _ = self.to_membership.send(Report::Take(id, run.wanted.clone()));
            return;
        }
        let mine = self.houses.iter().filter(|(house, h)| run.wanted.contains(house.0) && !h.draining);
        let (houses, busy): (Vec<_>, Vec<_>) = mine.partition(|(_, h)| h.gate == Gate::Closed);
        if !busy.is_empty() {
            let busy = Houses::of(busy.iter().filter_map(|(house, _)| u16::try_from(house.0).ok()));
            run.end = Some(RunEnd::Lost(format!("houses {busy} are in another run of the group")));
            return;
        }
        let houses = houses.into_iter().map(|(house, _)| *house).collect();
        self.open_houses(id, houses);
    }

    /// The membership has taken a run's houses, or couldn't.
    pub(super) fn on_taken(&mut self, id: u64, answer: Result<Vec<Taken>, String>) {
        let wanted = self.runs.get(&id).is_some_and(|run| run.end.is_none());
        match answer {
            Ok(taken) => {
                for t in &taken {
                    self.gain(t, true);
                    if let Some(h) = self.houses.get_mut(&t.house) {
                        // Of a run that was stopped meanwhile: given back at once.
                        h.draining = !wanted;
                    }
                }
                if wanted {
                    self.open_houses(id, taken.iter().map(|t| t.house).collect());
                } else if let Some(run) = self.runs.get_mut(&id) {
                    run.phase = Phase::Ending;
                }
            }
            Err(why) => {
                if let Some(run) = self.runs.get_mut(&id) {
                    run.phase = Phase::Ending;
                    run.end.get_or_insert(RunEnd::Lost(why));
                }
            }
        }
    }

    /// These are the run's houses: asks where they end.
    fn open_houses(&mut self, id: u64, houses: Vec<House>) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        run.houses = houses.iter().copied().collect();
        run.phase = Phase::Opening;
        if houses.is_empty() {
            // All of them are other instances'.
            run.end = Some(RunEnd::Done);
            return;
        }
        for house in &houses {
            if let Some(h) = self.houses.get_mut(house) {
                h.gate = Gate::Run { run: id, bound: 0, began: 0, open: false, paused: false };
            }
        }
        let store = self.store.clone();
        self.io.spawn(async move {
            let result = store.ends(&houses).await;
            Event::Opened { run: id, result }
        });
    }

    pub(super) fn on_opened(&mut self, id: u64, result: Result<Ends, Error>) {
        let Some(run) = self.runs.get_mut(&id).filter(|run| matches!(run.phase, Phase::Opening)) else { return };
        let ends = match result {
            Ok(ends) => ends,
            Err(e) => {
                run.end.get_or_insert(RunEnd::Lost(format!("where its houses end could not be read: {e}")));
                self.database_failed(&e);
                return;
            }
        };
        run.phase = Phase::Going;
        let bounds: HashMap<House, i64> = ends.houses.into_iter().collect();
        for house in run.houses.clone() {
            if let Some(h) = self.houses.get_mut(&house) {
                let bound = bounds.get(&house).copied().unwrap_or(0);
                h.gate = Gate::Run { run: id, bound, began: ends.now, open: true, paused: false };
                // What is due it reads with everything else.
                h.due_read = true;
            }
        }
        self.rewind_run(id);
    }

    /// The run's houses are read from the start.
    fn rewind_run(&mut self, id: u64) {
        let Some(run) = self.runs.get_mut(&id) else { return };
        run.refused = false;
        for house in run.houses.clone() {
            let life = self.number();
            if let Some(h) = self.houses.get_mut(&house) {
                h.restart(life);
            }
            for d in &mut self.destinations {
                if let Some(cursors) = &mut d.lag {
                    cursors.remove(&house);
                }
            }
        }
        self.set_gates(id, |gate| {
            if let Gate::Run { paused, .. } = gate {
                *paused = false;
            }
        });
        self.reading.hinted();
        self.reading.poll_now();
    }

    fn set_gates(&mut self, id: u64, change: impl Fn(&mut Gate)) {
        for h in self.houses.values_mut().filter(|h| matches!(h.gate, Gate::Run { run, .. } if run == id)) {
            change(&mut h.gate);
        }
    }

    /// Looks whether a run has come to its end, or has to go back.
    fn advance_run(&mut self, id: u64) {
        let now = Instant::now();
        let Some(run) = self.runs.get(&id) else { return };
        if run.rows > 0 && self.is_moving(id) {
            return;
        }
        if run.refused {
            if run.limit.is_some_and(|limit| run.taken >= limit) {
                self.end_run(id, RunEnd::Limit);
            } else {
                // Some of those that were taken up went back untried, so others may go.
                self.rewind_run(id);
            }
            return;
        }
        let behind = |house: &House| {
            self.houses.get(house).is_some_and(|h| {
                let bound = match h.gate {
                    Gate::Run { bound, .. } => bound,
                    _ => 0,
                };
                let lags = |cursors: &HashMap<House, Cursor>| cursors.get(house).is_some_and(|cursor| cursor.all < bound);
                let up = self.destinations.iter().filter(|d| !d.is_down());
                h.is_ahead() || self.is_full(h) || up.filter_map(|d| d.lag.as_ref()).any(lags)
            })
        };
        if self.reading.reads_now()
            || self.key_reads.iter().any(|key| run.houses.contains(&key.0))
            || run.houses.iter().any(behind)
        {
            return;
        }
        if let Some(at) = self.reading.after_error(now) {
            self.wake_by(at);
            return;
        }
        let left = run.houses.iter().filter_map(|house| match self.houses.get(house)?.gate {
            Gate::Run { bound, .. } if bound > 0 => Some(Mark { house: *house, after: 0, upto: bound }),
            _ => None,
        });
        let left = left.collect();
        self.look(id, left, false);
    }

    /// Whether something of the run is on its way, or will be without anybody's doing.
    fn is_moving(&self, id: u64) -> bool {
        if self.missing == 0 && !self.destinations.iter().any(|d| d.is_down()) {
            return true;
        }
        self.rows.values().filter(|r| r.run == Some(id)).any(|r| match r.state {
            State::Missing => false,
            State::Waiting => !self.destinations[r.dest].is_down(),
            _ => true,
        })
    }

    /// The next page of a run's last look.
    fn look(&mut self, id: u64, left: Vec<Mark>, found: bool) {
        if left.is_empty() {
            if found {
                self.set_phase(id, Phase::Going);
            } else {
                self.end_run(id, RunEnd::Done);
            }
            return;
        }
        let marks = left.clone();
        self.set_phase(id, Phase::Looking { left, found });
        let limit = (self.shared.settings.batch / marks.len() as u32).max(LOOK_LEAST);
        let down: Vec<String> = self.destinations.iter().filter(|d| d.is_down()).map(|d| d.name.clone()).collect();
        let seq = self.reading.issue();
        self.reading.looks.insert(seq);
        let store = self.store.clone();
        self.io.spawn(async move {
            let result = store.sweep(&marks, limit, &down).await;
            Event::Looked { run: id, seq, limit, result }
        });
    }

    pub(super) fn on_looked(&mut self, id: u64, seq: u64, limit: u32, result: Result<Vec<Thin>, Error>) {
        self.reading.looks.remove(&seq);
        let rows = self.read_result(Instant::now(), result);
        let Some(run) = self.runs.get_mut(&id) else { return };
        let Phase::Looking { left, found } = &mut run.phase else { return };
        let Some(rows) = rows else {
            run.phase = Phase::Going;
            return;
        };
        let (mut left, mut found) = (std::mem::take(left), *found);
        let mut last: HashMap<House, (u32, i64)> = HashMap::new();
        for thin in &rows {
            let entry = last.entry(thin.house).or_default();
            *entry = (entry.0 + 1, thin.id);
        }
        left.retain_mut(|mark| match last.get(&mark.house) {
            Some((n, id)) if *n >= limit => {
                mark.after = *id;
                true
            }
            _ => false,
        });
        left.retain(|mark| run.houses.contains(&mark.house));
        for thin in rows {
            let (house, destination) = (thin.house, thin.destination.clone());
            found |= self.admit(thin, Found::Behind) || self.is_put_off(house, &destination);
        }
        // What its limit kept it from is looked at when it is clear what became of the others.
        found |= self.runs.get(&id).is_some_and(|run| run.refused);
        self.look(id, left, found);
    }

    /// Whether a row that wasn't taken into memory comes back, for room.
    fn is_put_off(&self, house: House, destination: &str) -> bool {
        let full = self.houses.get(&house).is_some_and(|h| h.refused.is_some());
        full || self.destinations.iter().any(|d| d.name == destination && !d.is_down() && !d.has_room(self.reading.share))
    }

    fn set_phase(&mut self, id: u64, phase: Phase) {
        if let Some(run) = self.runs.get_mut(&id) {
            run.phase = phase;
        }
    }

    fn end_run(&mut self, id: u64, end: RunEnd) {
        if let Some(run) = self.runs.get_mut(&id) {
            run.end.get_or_insert(end);
        }
    }

    /// The houses are closed, or given back, and whoever asked is told.
    fn finish_run(&mut self, id: u64) {
        let Some(run) = self.runs.remove(&id) else { return };
        let external = self.shared.groups[run.group].is_external();
        for h in self.houses.values_mut().filter(|h| matches!(h.gate, Gate::Run { run, .. } if run == id)) {
            h.gate = Gate::Closed;
            h.draining |= external || h.leaves;
        }
        run.tell();
    }

    /// A run was told to stop.
    pub(super) fn stop_run(&mut self, id: u64) {
        self.end_run(id, RunEnd::Stopped);
    }

    pub(super) fn stop_runs(&mut self) {
        for run in self.runs.values_mut() {
            run.end.get_or_insert(RunEnd::Stopped);
        }
    }

    /// The engine ends: whoever asked for a run is told.
    pub(super) fn end_runs(&mut self) {
        for (_, run) in std::mem::take(&mut self.runs) {
            run.tell();
        }
    }

    /// Houses were lost: their runs go on without them.
    pub(super) fn run_lost(&mut self, houses: &[House]) {
        for run in self.runs.values_mut() {
            let lost = houses.iter().filter(|house| run.houses.remove(house));
            run.lost.extend(lost.filter_map(|house| u16::try_from(house.0).ok()));
        }
    }

    /// Whether a row is to be sent now, as far as its house's gate is concerned.
    pub(super) fn run_wants(&mut self, thin: &Thin) -> bool {
        let (id, bound, began) = match self.houses.get(&thin.house).map(|h| h.gate) {
            Some(Gate::Open) => return true,
            Some(Gate::Run { run, bound, began, open: true, .. }) => (run, bound, began),
            _ => return false,
        };
        if thin.id > bound || thin.due.is_some_and(|due| due > began) {
            return false;
        }
        let Some(run) = self.runs.get_mut(&id) else { return false };
        if run.limit.is_none_or(|limit| run.taken < limit) || run.returned.contains(&thin.id) {
            return true;
        }
        if !run.refused {
            run.refused = true;
            self.set_gates(id, |gate| {
                if let Gate::Run { paused, .. } = gate {
                    *paused = true;
                }
            });
        }
        false
    }

    /// A row was taken into memory for a run.
    pub(super) fn join_run(&mut self, run: Option<u64>, id: i64) {
        let Some(run) = run.and_then(|run| self.runs.get_mut(&run)) else { return };
        run.rows += 1;
        if !run.returned.remove(&id) {
            run.taken += 1;
        }
    }

    /// A row has left memory.
    pub(super) fn leave_run(&mut self, row: &Row) {
        let Some(run) = row.run.and_then(|run| self.runs.get_mut(&run)) else { return };
        run.rows -= 1;
        if !row.tried {
            run.taken -= 1;
        } else if !matches!(row.state, State::Writing { .. }) {
            run.returned.insert(row.thin.id);
        }
    }

    /// A row of a run, perhaps, came to something.
    pub(super) fn run_counts(&mut self, id: i64, count: impl Fn(&mut RunCounts)) {
        let Some(row) = self.rows.get_mut(&id) else { return };
        row.tried = true;
        if let Some(run) = row.run.and_then(|run| self.runs.get_mut(&run)) {
            count(&mut run.counts);
        }
    }
}

impl Running {
    fn tell(self) {
        let end = match self.end.unwrap_or(RunEnd::Stopped) {
            RunEnd::Lost(why) => RunEnd::Lost(why),
            RunEnd::Stopped => RunEnd::Stopped,
            _ if !self.lost.is_empty() => RunEnd::Lost(format!(
                "houses {} were lost in the middle: this instance's lease ran out, or somebody took them from it",
                Houses::of(self.lost)
            )),
            end => end,
        };
        // Whoever asked may have gone.
        let _ = self.done.send(RunOutcome { counts: RunCounts { messages: self.taken, ..self.counts }, end });
    }
}
