//! The one loop that owns all of a relay's state in memory. It never waits for I/O: reads, loads, writes and sends run
//! in tasks it owns, and come back as events.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::clock::Clock;
use super::destination::Destination;
use super::membership::{HouseEvent, Report};
use super::ordering::{KeyQueue, Recent};
use super::outcome::Lane;
use super::reading::Reading;
use super::run::Running;
use super::stats::{AttemptCounts, RelayStats};
use super::{Command, Shared};
use crate::store::{Change, Done, DuePage, Ends, House, KeyHash, Poll, Setback, Store, Taken, Thin};
use crate::transport::{Answer, Delivery, Transport};
use crate::{Envelope, Error, Histogram};

/// A pending message in memory.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) thin: Thin,
    pub(super) dest: usize,
    /// Its queue; None when it waits for nobody.
    pub(super) key: Option<(House, KeyHash)>,
    pub(super) state: State,
    /// Read while its house was suspect.
    pub(super) suspect: bool,
    /// Marked SENDING by us.
    pub(super) claimed: bool,
    /// Read before an operator touched its key: that it is delivered says nothing of what was put back before it.
    pub(super) outdated: bool,
    /// The group of its house.
    pub(super) group: Option<usize>,
    /// The run that took it up.
    pub(super) run: Option<u64>,
    /// It was handed to its transport, or concluded without.
    pub(super) tried: bool,
    /// From when its latency counts, in microseconds since 1970 by the database's clock. None before its content is read.
    pub(super) since: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Waiting,
    Claiming,
    Loading,
    Loaded,
    Sending {
        try_number: u64,
        started: Instant,
    },
    Writing {
        delivered: bool,
    },
    /// Its log row is gone. Stays here, and blocks its key, until the next full sweep looks again.
    Missing,
}

/// The suspects of one destination in one house: as many rows as one instance can have had in flight. The rows behind them
/// wait until they are done, so that each life of a process gets further, even if it ends with one of the later rows.
#[derive(Debug)]
pub(super) struct Window {
    /// Rows that may still become suspects.
    pub(super) left: usize,
    /// Suspects in memory.
    pub(super) open: usize,
    /// Rows that wait for them.
    pub(super) held: Vec<i64>,
}

#[derive(Debug)]
pub(super) struct HouseState {
    /// Another number each time the house is read from the start.
    pub(super) life: u64,
    pub(super) group: Option<usize>,
    pub(super) gate: Gate,
    /// Everything visible up to here has been read.
    pub(super) mark: i64,
    /// Earlier marks, for the near sweep.
    pub(super) marks: VecDeque<(Instant, i64)>,
    /// Taken from an owner that may have died of one of its messages; until it has been read once.
    pub(super) suspect: bool,
    /// The suspects of each destination.
    pub(super) windows: HashMap<usize, Window>,
    /// The forward read, and the due read, have seen all of it once.
    pub(super) polled_out: bool,
    pub(super) due_read: bool,
    pub(super) draining: bool,
    /// To be drained once its run has ended.
    pub(super) leaves: bool,
    /// The lowest id that was left in the database because its group had no room: the forward read goes back to it.
    pub(super) refused: Option<i64>,
    /// Rows in memory.
    pub(super) rows: usize,
    /// The last forward read of it was cut off by its limit.
    pub(super) busy: bool,
}

/// Whether a house's messages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// All the time.
    Open,
    /// Not now: its group isn't continuous.
    Closed,
    /// For a run.
    Run {
        run: u64,
        /// Its highest pending id when the run began.
        bound: i64,
        /// The database's clock when the run began; what became due later waits for the next run.
        began: i64,
        /// The run takes up messages. Otherwise it ends.
        open: bool,
        /// The run's limit is reached for now.
        paused: bool,
    },
}

/// What a group has in memory.
#[derive(Debug, Default)]
pub(super) struct GroupLoad {
    /// Most in flight.
    pub(super) concurrency: Option<usize>,
    pub(super) rows: usize,
    /// Being claimed, loaded, or in flight; or loaded.
    pub(super) busy: usize,
    pub(super) in_flight: usize,
    /// Rows were refused; none is read before there is room again.
    pub(super) full: bool,
}

impl GroupLoad {
    /// Rows of it that may be in memory. Few enough to leave room to other groups' rows for the same destination.
    pub(super) fn room(&self) -> usize {
        self.concurrency.map_or(usize::MAX, |n| (n * 2).max(64))
    }

    /// How many more may be loaded: as many again as may be in flight.
    pub(super) fn may_load(&self) -> bool {
        self.concurrency.is_none_or(|n| self.busy < n * 2)
    }

    pub(super) fn may_send(&self) -> bool {
        self.concurrency.is_none_or(|n| self.in_flight < n)
    }
}

impl HouseState {
    /// Its rows may be taken up, or go on.
    pub(super) fn is_kept(&self) -> bool {
        !self.draining && matches!(self.gate, Gate::Open | Gate::Run { open: true, .. })
    }

    /// Its rows are to be read.
    pub(super) fn is_read(&self) -> bool {
        self.is_kept() && !matches!(self.gate, Gate::Run { paused: true, .. })
    }

    pub(super) fn is_open(&self) -> bool {
        !self.draining && self.gate == Gate::Open
    }

    /// The forward read has something to find.
    pub(super) fn is_ahead(&self) -> bool {
        match self.gate {
            Gate::Run { bound, .. } => self.is_read() && (self.mark < bound || self.refused.is_some()),
            _ => self.is_read(),
        }
    }

    /// It is read from the start.
    pub(super) fn restart(&mut self, life: u64) {
        self.life = life;
        self.mark = 0;
        self.marks.clear();
        self.refused = None;
        self.polled_out = false;
        self.busy = true;
    }

    fn new(taken: &Taken, life: u64, group: Option<usize>, gate: Gate) -> Self {
        Self {
            life,
            group,
            gate,
            mark: 0,
            marks: VecDeque::new(),
            suspect: taken.expired,
            windows: HashMap::new(),
            polled_out: false,
            due_read: false,
            draining: false,
            leaves: false,
            refused: None,
            rows: 0,
            busy: true,
        }
    }
}

/// A row's content, or why it can't be decoded.
pub(super) type Loaded = (i64, Result<Envelope, String>);

/// A transport that gets one batch at a time, and the way to it.
type Line = (Arc<dyn Transport>, mpsc::UnboundedSender<Vec<Delivery>>);

/// What a task of the engine came back with.
#[derive(Debug)]
pub(super) enum Event {
    Polled {
        seq: u64,
        asked: Vec<(House, u64, i64)>,
        all: bool,
        unfiltered: bool,
        reached_back: Option<Duration>,
        result: Result<Poll, Error>,
    },
    Due {
        limit: u32,
        asked: Vec<(House, u64)>,
        took: Duration,
        result: Result<DuePage, Error>,
    },
    OfKeys {
        keys: Vec<(House, KeyHash)>,
        limit: u32,
        result: Result<Vec<Thin>, Error>,
    },
    OfDestination {
        dest: usize,
        fresh: bool,
        asked: Vec<(House, u64, i64)>,
        limit: u32,
        result: Result<Vec<Thin>, Error>,
    },
    Changes {
        upto: i64,
        result: Result<Vec<Change>, Error>,
    },
    Swept {
        limit: u32,
        took: Duration,
        result: Result<Vec<Thin>, Error>,
    },
    /// Where the houses of a run end.
    Opened {
        run: u64,
        result: Result<Ends, Error>,
    },
    /// A page of a run's last look.
    Looked {
        run: u64,
        seq: u64,
        limit: u32,
        result: Result<Vec<Thin>, Error>,
    },
    /// A run is told to stop.
    Stop(u64),
    /// A task that ended with its run.
    Nothing,
    Claimed {
        ids: Vec<i64>,
        result: Result<Vec<i64>, Error>,
    },
    Loaded {
        ids: Vec<i64>,
        result: Result<Vec<Loaded>, Error>,
    },
    Delivered {
        batch: Vec<Done>,
        result: Result<Vec<i64>, Error>,
    },
    SetBack {
        batch: Vec<Setback>,
        result: Result<Vec<i64>, Error>,
    },
}

pub(super) struct Engine {
    pub(super) shared: Arc<Shared>,
    pub(super) store: Arc<dyn Store>,
    pub(super) instance: Arc<str>,
    pub(super) houses: HashMap<House, HouseState>,
    /// How many houses it should own; None before that is known.
    pub(super) share: Option<usize>,
    pub(super) rows: HashMap<i64, Row>,
    pub(super) keys: HashMap<(House, KeyHash), KeyQueue>,
    pub(super) destinations: Vec<Destination>,
    pub(super) by_name: HashMap<String, usize>,
    /// Places in `destinations` that are free again.
    vacant: Vec<usize>,
    /// Destinations that have something ready or loaded.
    pub(super) active: HashSet<usize>,
    /// Rows that must be claimed before they are sent.
    pub(super) suspects: VecDeque<i64>,
    pub(super) recent: Recent,
    pub(super) reading: Reading,
    pub(super) key_reads: HashSet<(House, KeyHash)>,
    pub(super) io: JoinSet<Event>,
    sends: JoinSet<()>,
    /// Batches on their way to transports that get one at a time.
    lines: Vec<Line>,
    pub(super) answers: mpsc::UnboundedSender<Answer>,
    pub(super) loads: usize,
    /// After an error, nothing is loaded before this.
    pub(super) load_after: Instant,
    /// Whose turn it is to be loaded first.
    pub(super) load_turn: usize,
    /// Claimed rows on their way to be loaded.
    pub(super) to_load: Vec<i64>,
    /// Rows whose turn comes next in their key: their content is worth loading ahead.
    pub(super) next_up: Vec<i64>,
    /// Content loaded before its row's turn; None while it is on its way.
    pub(super) ahead: HashMap<i64, Option<Envelope>>,
    pub(super) bytes: usize,
    pub(super) tries: u64,
    pub(super) deadlines: BinaryHeap<Reverse<(Instant, i64, u64)>>,
    pub(super) done: Lane<Done>,
    pub(super) setbacks: Lane<Setback>,
    pub(super) lease_until: Option<Instant>,
    pub(super) to_membership: mpsc::UnboundedSender<Report>,
    /// By place in the settings.
    pub(super) groups: Vec<GroupLoad>,
    /// Whether each of the groups is paused; None: not known yet, so nothing is sent from its houses.
    pauses: Vec<Option<bool>>,
    pub(super) runs: BTreeMap<u64, Running>,
    /// Numbers of runs, and of lives of houses.
    pub(super) numbers: u64,
    /// Rows whose log row is gone.
    pub(super) missing: usize,
    pub(super) stopping: bool,
    drains: Vec<(u64, oneshot::Sender<()>)>,
    /// The loop comes round again by this moment.
    timer: Instant,
    stats_at: Instant,
    /// There were rows in memory when the figures were last published.
    stats_moving: bool,
    pub(super) in_flight: usize,
    pub(super) timing: Timing,
}

/// Figures that change with every message; published with the others.
#[derive(Debug, Default)]
pub(super) struct Timing {
    /// The database's clock.
    clock: Option<Clock>,
    attempts: AttemptCounts,
    latency: Histogram,
    attempt_time: Histogram,
}

impl Timing {
    /// Goes on from what an engine before has counted.
    fn new(stats: &RelayStats) -> Self {
        let RelayStats { attempts, latency, attempt_time, .. } = *stats;
        Self { clock: None, attempts, latency, attempt_time }
    }

    /// A message was confirmed.
    pub(super) fn confirmed(&mut self, since: Option<i64>, now: Instant) {
        if let (Some(clock), Some(since)) = (&self.clock, since) {
            self.latency.record(clock.between(since, now));
        }
    }

    /// A try gave a result; the number of the attempt, or None where no attempt is counted.
    pub(super) fn tried(
        &mut self,
        dest: &mut Destination,
        attempt: Option<u32>,
        took: Option<Duration>,
        count: fn(&mut AttemptCounts) -> &mut u64,
    ) {
        self.attempts.add(attempt, count);
        dest.attempts.add(attempt, count);
        if let Some(took) = took {
            self.attempt_time.record(took);
        }
    }
}

/// A destination to which nothing has gone for this long is forgotten, with its figures.
const FORGET: Duration = Duration::from_secs(600);

/// The longest nap of the loop.
const NAP: Duration = Duration::from_secs(1);

pub(super) async fn run(
    shared: Arc<Shared>,
    mut membership: mpsc::UnboundedReceiver<HouseEvent>,
    to_membership: mpsc::UnboundedSender<Report>,
    mut lease: watch::Receiver<Option<Instant>>,
    commands: &mut mpsc::UnboundedReceiver<Command>,
    mut stop: watch::Receiver<bool>,
) {
    let (answers, mut answered) = mpsc::unbounded_channel();
    shared.store.passed().clear();
    let now = Instant::now();
    let mut engine = Engine {
        store: shared.store.clone(),
        instance: "".into(),
        houses: HashMap::new(),
        share: None,
        rows: HashMap::new(),
        keys: HashMap::new(),
        destinations: Vec::new(),
        by_name: HashMap::new(),
        vacant: Vec::new(),
        active: HashSet::new(),
        suspects: VecDeque::new(),
        recent: Recent::default(),
        reading: Reading::new(now, &shared.settings),
        key_reads: HashSet::new(),
        io: JoinSet::new(),
        sends: JoinSet::new(),
        lines: Vec::new(),
        answers,
        loads: 0,
        load_after: now,
        load_turn: 0,
        to_load: Vec::new(),
        next_up: Vec::new(),
        ahead: HashMap::new(),
        bytes: 0,
        tries: 0,
        deadlines: BinaryHeap::new(),
        done: Lane::new(now),
        setbacks: Lane::new(now),
        lease_until: None,
        to_membership,
        groups: shared
            .groups
            .iter()
            .map(|g| GroupLoad { concurrency: g.concurrency.map(|n| n as usize), ..GroupLoad::default() })
            .collect(),
        pauses: shared.groups.iter().map(|g| (!g.is_continuous()).then_some(false)).collect(),
        runs: BTreeMap::new(),
        numbers: 0,
        missing: 0,
        stopping: false,
        drains: Vec::new(),
        timer: now,
        stats_at: now,
        stats_moving: false,
        in_flight: 0,
        timing: Timing::new(&shared.stats()),
        shared: shared.clone(),
    };
    let mut batch = Vec::new();
    let mut membership_open = true;
    let mut commands_open = true;
    loop {
        engine.lease_until = *lease.borrow_and_update();
        engine.turn();
        if engine.stopping && engine.is_done() {
            break;
        }
        let timer = engine.timer;
        tokio::select! {
            biased;
            event = membership.recv(), if membership_open => match event {
                Some(event) => engine.on_house_event(event),
                None => membership_open = false,
            },
            // Its sender is gone when the relay was dropped: that ends everything at once, and nothing is handed over.
            Ok(()) = stop.changed(), if !engine.stopping => {
                if *stop.borrow() {
                    engine.stop();
                }
            }
            _ = answered.recv_many(&mut batch, 4096) => engine.on_answers(batch.drain(..)),
            Some(event) = engine.io.join_next(), if !engine.io.is_empty() => engine.on_io(event),
            Some(sent) = engine.sends.join_next(), if !engine.sends.is_empty() => {
                if let Err(e) = sent {
                    tracing::error!(error = %e, "a transport panicked; its messages are tried again");
                }
            }
            command = commands.recv(), if commands_open => match command {
                Some(Command::Drain(done)) => {
                    engine.drains.push((engine.reading.issued, done));
                    engine.reading.poll_now();
                }
                Some(Command::Run(run, done)) => engine.run_asked(run, done),
                Some(Command::Pause(group, paused)) => engine.pause(&group, paused),
                None => commands_open = false,
            },
            () = shared.wake.notify.notified() => {
                if shared.wake.take_hint() {
                    engine.reading.hinted();
                }
                engine.reading.poll_now();
            }
            _ = lease.changed() => {}
            () = tokio::time::sleep_until(timer.into()) => {}
        }
    }
    engine.publish_stats(true);
    engine.end_runs();
    // What a transport still holds has been given up; nothing is sent while it closes.
    engine.sends.shutdown().await;
    for transport in shared.directory.transports.values() {
        transport.close().await;
    }
    // The membership task is gone only when everything is being torn down.
    let _ = engine.to_membership.send(Report::Leave);
}

impl Engine {
    /// Everything that can be started now, is.
    fn turn(&mut self) {
        let now = Instant::now();
        self.timer = now + NAP;
        self.timing.clock = *self.shared.clock.borrow();
        while let Some(done) = self.io.try_join_next() {
            self.on_io(done);
        }
        self.expire(now);
        self.write(now);
        self.step_runs();
        if !self.stopping {
            self.make_room();
            self.claim_suspects(now);
            self.load(now);
            self.send(now);
            self.read(now);
        }
        self.report_drained();
        self.answer_drains(now);
        // An idle engine wakes for its own reads, not for this.
        if now >= self.stats_at {
            self.publish_stats(false);
        } else if self.stats_moving || !self.rows.is_empty() {
            self.wake_by(self.stats_at);
        }
    }

    /// The loop comes round by `at`.
    pub(super) fn wake_by(&mut self, at: Instant) {
        self.timer = self.timer.min(at);
    }

    fn on_io(&mut self, event: Result<Event, tokio::task::JoinError>) {
        match event {
            Ok(event) => self.on_event(event),
            // A bug in a store: the supervisor starts everything anew, from the database.
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Err(_) => {}
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Opened { run, result } => self.on_opened(run, result),
            Event::Looked { run, seq, limit, result } => self.on_looked(run, seq, limit, result),
            Event::Stop(run) => self.stop_run(run),
            Event::Nothing => {}
            Event::Claimed { ids, result } => self.on_claimed(ids, result),
            Event::Loaded { ids, result } => self.on_loaded(&ids, result),
            Event::Delivered { batch, result } => self.on_delivered(batch, result),
            Event::SetBack { batch, result } => self.on_set_back(batch, result),
            read => self.on_read(read),
        }
    }

    fn on_house_event(&mut self, event: HouseEvent) {
        match event {
            HouseEvent::Instance(name) => {
                self.instance = name.into();
                self.share = None;
            }
            HouseEvent::Share(share) => self.share = Some(share),
            HouseEvent::Gained(taken) => {
                for t in taken {
                    self.gain(&t, false);
                }
                self.reading.gained();
            }
            HouseEvent::Exactly(run, answer) => self.on_taken(run, answer),
            HouseEvent::Release(houses) => {
                for house in &houses {
                    match self.houses.get_mut(house) {
                        // What a run has begun it finishes.
                        Some(h) if matches!(h.gate, Gate::Run { .. }) => h.leaves = true,
                        Some(h) => h.draining = true,
                        None => {}
                    }
                }
                self.drop_waiting();
            }
            HouseEvent::Lost(houses) => {
                for house in &houses {
                    self.houses.remove(house);
                }
                self.run_lost(&houses);
                self.drop_waiting();
            }
        }
    }

    /// A house is ours from now on. One that was taken for a run is closed whatever its group.
    pub(super) fn gain(&mut self, taken: &Taken, for_run: bool) {
        let rows = self.rows.values().filter(|r| r.thin.house == taken.house).count();
        let groups = &self.shared.groups;
        let group = groups.iter().position(|g| g.houses.contains(taken.house.0));
        let continuous =
            groups.is_empty() || group.is_some_and(|place| groups[place].is_continuous() && self.pauses[place] == Some(false));
        let gate = if continuous && !for_run { Gate::Open } else { Gate::Closed };
        let life = self.number();
        self.houses.insert(taken.house, HouseState { rows, ..HouseState::new(taken, life, group, gate) });
    }

    /// A continuous group is paused: nothing more is taken from its houses, and what is in flight ends. Or it goes on, from the
    /// start. Of other groups only the trigger is paused, which isn't known here.
    fn pause(&mut self, group: &str, paused: bool) {
        let place = self.shared.groups.iter().position(|g| g.name == group && g.is_continuous());
        let Some(place) = place.filter(|place| self.pauses[*place].replace(paused) != Some(paused)) else { return };
        let (from, to) = if paused { (Gate::Open, Gate::Closed) } else { (Gate::Closed, Gate::Open) };
        let mut number = self.numbers;
        for h in self.houses.values_mut().filter(|h| h.group == Some(place) && h.gate == from) {
            h.gate = to;
            if !paused {
                number += 1;
                h.restart(number);
                h.due_read = false;
            }
        }
        self.numbers = number;
        if paused {
            self.drop_waiting();
        } else {
            self.reading.gained();
        }
    }

    pub(super) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    /// Groups that had too much in memory are read again.
    fn make_room(&mut self) {
        for load in &mut self.groups {
            if load.full && load.rows * 2 <= load.room() {
                load.full = false;
                self.reading.poll_now();
            }
        }
    }

    pub(super) fn is_full(&self, h: &HouseState) -> bool {
        h.group.is_some_and(|group| self.groups[group].full)
    }

    /// Whether rows of a house may go on, or stay.
    pub(super) fn keeps(&self, house: House) -> bool {
        !self.stopping && self.houses.get(&house).is_some_and(HouseState::is_kept)
    }

    /// Lets go of rows that aren't in flight and whose houses aren't ours any more (or all of them when stopping).
    pub(super) fn drop_waiting(&mut self) {
        let drop: Vec<i64> = self
            .rows
            .iter()
            .filter(|(_, r)| {
                matches!(r.state, State::Waiting | State::Loading | State::Loaded | State::Missing) && !self.keeps(r.thin.house)
            })
            .map(|(id, _)| *id)
            .collect();
        for id in drop {
            match self.rows.get(&id) {
                Some(row) if row.claimed => self.unclaim(id, Duration::ZERO),
                _ => self.forget(id),
            }
        }
        let houses: HashSet<House> = self.houses.keys().copied().filter(|house| self.keeps(*house)).collect();
        self.forget_keys(|house| !houses.contains(&house));
        for d in &mut self.destinations {
            if let Some(cursors) = &mut d.lag {
                cursors.retain(|house, _| houses.contains(house));
            }
            // No trace may stay: read again, a row must not take its old place, before those that it follows.
            d.ready.retain(|id| self.rows.contains_key(id));
            d.loaded.retain(|(id, _)| self.rows.contains_key(id));
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.stop_runs();
        for id in std::mem::take(&mut self.to_load) {
            self.unclaim(id, Duration::ZERO);
        }
        self.drop_waiting();
    }

    fn is_done(&self) -> bool {
        self.rows.values().all(|r| !matches!(r.state, State::Sending { .. } | State::Writing { .. } | State::Claiming))
            && self.done.is_empty()
            && self.setbacks.is_empty()
    }

    /// Tells the membership which draining houses are empty.
    fn report_drained(&mut self) {
        let drained: Vec<House> =
            self.houses.iter().filter(|(_, h)| h.draining && h.rows == 0).map(|(house, _)| *house).collect();
        if !drained.is_empty() {
            for house in &drained {
                self.houses.remove(house);
            }
            let _ = self.to_membership.send(Report::Drained(drained));
        }
    }

    /// The place of a destination in the list; made on first sight.
    pub(super) fn destination(&mut self, name: &str) -> usize {
        if let Some(place) = self.by_name.get(name) {
            return *place;
        }
        let route = self.shared.directory.route(name);
        let transport = self.shared.directory.transport(&route.to).cloned();
        let made = Destination::new(name.to_owned(), route, transport, Instant::now());
        let place = match self.vacant.pop() {
            Some(place) => {
                self.destinations[place] = made;
                place
            }
            None => {
                self.destinations.push(made);
                self.destinations.len() - 1
            }
        };
        self.by_name.insert(name.to_owned(), place);
        place
    }

    /// Takes a row out of memory, with all its traces but its place in a key's queue.
    pub(super) fn forget(&mut self, id: i64) {
        drop(self.take_ahead(id));
        let Some(row) = self.rows.remove(&id) else { return };
        self.leave_state(&row);
        self.destinations[row.dest].rows -= 1;
        if let Some(group) = row.group {
            self.groups[group].rows -= 1;
        }
        self.leave_run(&row);
        let Some(house) = self.houses.get_mut(&row.thin.house) else { return };
        house.rows = house.rows.saturating_sub(1);
        if !row.suspect {
            return;
        }
        // The last suspect of its destination is done: what waited for it goes.
        let Some(window) = house.windows.get_mut(&row.dest) else { return };
        window.open = window.open.saturating_sub(1);
        if window.open == 0 {
            let held = std::mem::take(&mut window.held);
            if !house.suspect {
                house.windows.remove(&row.dest);
            }
            for id in held {
                self.ready(id);
            }
        }
    }

    /// Undoes what a row's state counts for.
    fn leave_state(&mut self, row: &Row) {
        self.count(row.state, (row.dest, row.group), row.thin.size, |n, by| *n -= by);
    }

    /// Moves a row to another state.
    pub(super) fn enter(&mut self, id: i64, state: State) {
        let Some(row) = self.rows.get_mut(&id) else { return };
        let (before, of, size) = (std::mem::replace(&mut row.state, state), (row.dest, row.group), row.thin.size);
        self.count(before, of, size, |n, by| *n -= by);
        self.count(state, of, size, |n, by| *n += by);
    }

    /// What a row in some state counts for.
    fn count(&mut self, state: State, (dest, group): (usize, Option<usize>), size: u32, change: impl Fn(&mut usize, usize)) {
        if let Some(load) = group.map(|group| &mut self.groups[group]) {
            if matches!(state, State::Sending { .. }) {
                change(&mut load.in_flight, 1);
            }
            if matches!(state, State::Claiming | State::Loading | State::Loaded | State::Sending { .. }) {
                change(&mut load.busy, 1);
            }
        }
        let d = &mut self.destinations[dest];
        match state {
            State::Waiting => change(&mut d.waiting, 1),
            State::Claiming | State::Loading => change(&mut d.loading, 1),
            State::Sending { .. } => {
                change(&mut d.in_flight, 1);
                change(&mut self.in_flight, 1);
            }
            State::Missing => change(&mut self.missing, 1),
            State::Loaded | State::Writing { .. } => {}
        }
        if matches!(state, State::Loading | State::Loaded | State::Sending { .. }) {
            change(&mut self.bytes, size as usize);
        }
    }

    /// Hands a batch to its transport.
    pub(super) fn hand_over(&mut self, transport: Arc<dyn Transport>, batch: Vec<Delivery>) {
        if !transport.pipelines() {
            self.sends.spawn(async move { transport.send(batch).await });
            return;
        }
        // One after the other, in this order.
        let mut batch = batch;
        if let Some((_, line)) = self.lines.iter().find(|(t, _)| Arc::ptr_eq(t, &transport)) {
            match line.send(batch) {
                Ok(()) => return,
                // The transport panicked; what it held has been answered by its tokens.
                Err(mpsc::error::SendError(unsent)) => batch = unsent,
            }
        }
        let (line, mut batches) = mpsc::unbounded_channel();
        // The receiver is right here.
        let _ = line.send(batch);
        self.lines.retain(|(t, _)| !Arc::ptr_eq(t, &transport));
        self.lines.push((transport.clone(), line));
        self.sends.spawn(async move {
            while let Some(batch) = batches.recv().await {
                transport.send(batch).await;
            }
        });
    }

    /// A row may go: it waits for its destination, or to be claimed first.
    pub(super) fn ready(&mut self, id: i64) {
        let Some(row) = self.rows.get(&id) else { return };
        let window = self.houses.get_mut(&row.thin.house).and_then(|h| h.windows.get_mut(&row.dest));
        if row.thin.claims >= self.shared.settings.max_claims {
            self.give_up_claims(id);
        } else if let Some(window) = window.filter(|w| !row.suspect && row.thin.claims == 0 && w.open > 0) {
            window.held.push(id);
        } else if row.suspect || row.thin.claims > 0 {
            self.suspects.push_back(id);
        } else {
            let dest = row.dest;
            match self.take_ahead(id) {
                Some(envelope) => self.loaded(id, envelope),
                None => self.destinations[dest].ready.push_back(id),
            }
            self.active.insert(dest);
        }
    }

    fn answer_drains(&mut self, now: Instant) {
        if self.drains.is_empty() || self.pauses.contains(&None) {
            return;
        }
        // More instances than houses, or none that is open: nothing is this one's to send.
        let open = self.houses.values().any(HouseState::is_open);
        let all = self.share.is_some_and(|share| self.houses.len() >= share);
        if !open && all && self.lease_until.is_some_and(|until| now < until) {
            for (_, done) in self.drains.drain(..) {
                // Whoever asked may have gone.
                let _ = done.send(());
            }
            return;
        }
        let moving = |r: &Row| match r.state {
            _ if r.run.is_some() => false,
            State::Missing => false,
            State::Waiting => !self.destinations[r.dest].is_down(),
            _ => true,
        };
        let of_open = |key: &(House, KeyHash)| self.houses.get(&key.0).is_some_and(HouseState::is_open);
        if !open || self.rows.values().any(moving) || !self.reading.is_idle(now) || self.key_reads.iter().any(of_open) {
            return;
        }
        if !self.done.is_empty()
            || !self.setbacks.is_empty()
            || self.destinations.iter().any(|d| d.wants_rows(now, self.reading.share))
        {
            return;
        }
        let completed = self.reading.completed_poll;
        self.drains.retain_mut(|(after, done)| {
            if completed <= *after {
                return true;
            }
            let (spare, _) = oneshot::channel();
            // Whoever asked may have gone.
            let _ = std::mem::replace(done, spare).send(());
            false
        });
    }

    fn publish_stats(&mut self, last: bool) {
        const PERIOD: Duration = Duration::from_millis(250);
        self.stats_at = Instant::now() + PERIOD;
        let mut stats = self.shared.stats();
        stats.in_memory = self.rows.len() as u64;
        stats.in_flight = self.in_flight as u64;
        stats.bytes = self.bytes as u64;
        stats.reads = self.reading.issued;
        (stats.attempts, stats.latency, stats.attempt_time) =
            (self.timing.attempts, self.timing.latency, self.timing.attempt_time);
        let now = Instant::now();
        for (name, place) in &self.by_name {
            let d = &mut self.destinations[*place];
            if d.is_idle() {
                d.idle_since.get_or_insert(now);
            } else {
                d.idle_since = None;
            }
            match stats.destinations.get_mut(name) {
                Some(known) => *known = d.stats(),
                None => drop(stats.destinations.insert(name.clone(), d.stats())),
            }
        }
        // One address per tenant must not fill the memory: what has been idle for long is forgotten.
        let windows: HashSet<usize> = self.houses.values().flat_map(|h| h.windows.keys().copied()).collect();
        let gone = self.by_name.extract_if(|_, place| {
            let idle = self.destinations[*place].idle_since;
            idle.is_some_and(|since| now.saturating_duration_since(since) > FORGET) && !windows.contains(place)
        });
        for (name, place) in gone.collect::<Vec<_>>() {
            stats.destinations.remove(&name);
            self.active.remove(&place);
            self.destinations[place].lag = None;
            self.vacant.push(place);
        }
        stats.pass("engine");
        // With every house closed there is nothing to read.
        if !self.houses.is_empty() && !self.houses.values().any(HouseState::is_read) {
            stats.pass("forward read");
        }
        if last {
            stats.houses = 0;
        }
        drop(stats);
        self.stats_moving = !self.rows.is_empty();
    }
}
