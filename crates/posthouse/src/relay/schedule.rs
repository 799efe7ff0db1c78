//! Runs groups when their triggers are due, and when somebody asks; writes down what came of it.
//!
//! What is to be done when is decided by [`Plan`], one per group, by the database's clock. Here the clock is read, runs are
//! given to the engine, and what other processes want is looked for: requests, pauses, stops.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::stats::{GroupStats, LastRun};
use super::{AdoptedScans, Command, Relay, Run, RunCounts, RunEnd, RunOutcome, Shared};
use crate::schedule::{Ask, Cause, Do, Ended, Plan};
use crate::store::{GroupRow, House, NewRun, RunFilter, RunRequest, RunRow, RunStatus, RunWatch, TIDY};
use crate::{Error, ErrorKind, Group};

pub(super) const NAME: &str = "schedule";

/// How often old runs are removed, and when first: by then all heirs of a dead instance have seen its runs.
const TIDY_PERIOD: Duration = Duration::from_secs(60);

/// A request is closed without instances that have not answered by then: they don't have the group.
const ANSWERS: i64 = 10_000_000;

/// Runs that a request leads to, at most: one per instance and retry.
const PAGE: u32 = 1_000;

/// The wait between two tries to write something down.
const AGAIN: Duration = Duration::from_millis(500);

/// What came of a run that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunReport {
    /// How it ended.
    pub status: RunStatus,
    /// What it did.
    pub counts: RunCounts,
    /// Why it ended so, or did not take place.
    pub error: Option<String>,
}

impl RunReport {
    fn new(status: RunStatus, error: impl Into<Option<String>>) -> Self {
        Self { status, counts: RunCounts::default(), error: error.into() }
    }
}

/// A run that somebody in this process waits for.
#[derive(Debug)]
pub(crate) struct Asked {
    run: Run,
    done: oneshot::Sender<RunReport>,
}

impl Relay {
    /// Runs a group now: what is there and due in the houses of it that this instance owns. The run is recorded, and when the
    /// group is running already, [`Group::when_busy`] says what happens. To run it on all instances, see
    /// [`RunStore::request`](crate::store::RunStore::request).
    ///
    /// ```no_run
    /// # async fn f(relay: &posthouse::Relay) -> Result<(), posthouse::Error> {
    /// let report = relay.trigger("reports").await?;
    /// println!("{:?}: {} delivered", report.status, report.counts.delivered);
    /// # Ok(()) }
    /// ```
    ///
    /// The run is asked for with this call, and doesn't end with the future; see [`Run::stop`].
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such group, or when it is continuous.
    pub fn trigger<R: Into<Run>>(&self, run: R) -> impl Future<Output = Result<RunReport, Error>> + Send + use<R> {
        let asked = self.ask(run.into());
        async move {
            let gone = || RunReport::new(RunStatus::Stopped, "the relay was shut down".to_owned());
            Ok(asked?.await.unwrap_or_else(|_| gone()))
        }
    }

    fn ask(&self, run: Run) -> Result<oneshot::Receiver<RunReport>, Error> {
        let wrong = |why: String| Err(Error::invalid("group", why));
        match self.shared.groups.iter().find(|g| g.name == run.group) {
            None => return wrong(format!("there is no group {:?} here", run.group)),
            Some(group) if group.is_continuous() => return wrong(format!("{:?} is continuous, and has no runs", run.group)),
            Some(_) => {}
        }
        let (done, report) = oneshot::channel();
        // The loops are gone only after shutdown; then the sender of the report is dropped here.
        let _ = self.asks.send(Asked { run, done });
        Ok(report)
    }

    /// The groups and how they stand.
    pub fn groups(&self) -> Vec<(Group, GroupStats)> {
        let stats = self.shared.stats();
        let of = |g: &Group| (g.clone(), stats.groups.get(&g.name).cloned().unwrap_or_default());
        self.shared.groups.iter().map(of).collect()
    }
}

impl From<&str> for Run {
    fn from(group: &str) -> Self {
        Self::of(group)
    }
}

/// A group that has runs.
struct Slot {
    group: Group,
    plan: Plan,
    /// Its plan keeps time.
    started: bool,
    /// What is known of it in the database.
    row: GroupRow,
    /// Stops the run that is going.
    stop: Option<watch::Sender<bool>>,
    began: Option<Instant>,
    stats: GroupStats,
}

impl Slot {
    fn new(group: &Group) -> Option<Self> {
        let mut group = group.clone();
        if group.is_external() {
            // Whoever runs it from outside sees how it ended.
            group.retries = 0;
        }
        // Expressions are checked before a relay starts.
        let plan = Plan::new(&group).ok().filter(|_| !group.is_continuous())?;
        Some(Self {
            group,
            plan,
            started: false,
            row: GroupRow::default(),
            stop: None,
            began: None,
            stats: GroupStats::default(),
        })
    }
}

/// What a task came back with.
enum Event {
    Watched(Instant, Result<RunWatch, Error>),
    Ended(usize, Ask, RunReport, Duration),
    /// Another instance was in the middle of a run when houses came from it, by then.
    Unfinished(usize, Instant),
    /// Something may have changed in the database that concerns us.
    Look,
    Checked(i64),
    Nothing,
}

struct Scheduler {
    shared: Arc<Shared>,
    engine: mpsc::UnboundedSender<Command>,
    stop: watch::Receiver<bool>,
    slots: Vec<Slot>,
    /// Continuous groups, and whether the engine knows them as paused.
    continuous: Vec<(Group, Option<bool>)>,
    /// The database's clock, and when it was read.
    clock: Option<(i64, Instant)>,
    /// None: not known yet.
    owned: Option<HashSet<House>>,
    runs: JoinSet<Event>,
    io: JoinSet<Event>,
    watching: bool,
    watch_at: Instant,
    tidy_at: Instant,
    /// Open requests that this instance has answered, or is about to.
    answered: HashSet<i64>,
    /// Requests that are being looked at, to be closed.
    closing: HashSet<i64>,
    tickets: HashMap<u64, (Run, oneshot::Sender<RunReport>)>,
    /// Asked for before it was known what this instance owns.
    early: Vec<Asked>,
    numbers: u64,
    timer: Instant,
}

pub(super) async fn run(
    shared: Arc<Shared>,
    engine: mpsc::UnboundedSender<Command>,
    asked: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Asked>>>,
    mut stop: watch::Receiver<bool>,
) -> &'static str {
    let mut asked = asked.lock().await;
    let mut owned = shared.owned.subscribe();
    owned.mark_changed();
    let now = Instant::now();
    let mut scheduler = Scheduler {
        slots: slots(&shared),
        continuous: shared.groups.iter().filter(|g| g.is_continuous()).map(|g| (g.clone(), None)).collect(),
        shared,
        engine,
        stop: stop.clone(),
        clock: None,
        owned: None,
        runs: JoinSet::new(),
        io: JoinSet::new(),
        watching: false,
        watch_at: now,
        tidy_at: now + TIDY_PERIOD,
        answered: HashSet::new(),
        closing: HashSet::new(),
        tickets: HashMap::new(),
        early: Vec::new(),
        numbers: 0,
        timer: now,
    };
    while !*stop.borrow() {
        scheduler.turn();
        let timer = scheduler.timer;
        tokio::select! {
            changed = stop.changed() => {
                if changed.is_err() {
                    break;
                }
            }
            Some(event) = scheduler.runs.join_next(), if !scheduler.runs.is_empty() => scheduler.on_joined(event),
            Some(event) = scheduler.io.join_next(), if !scheduler.io.is_empty() => scheduler.on_joined(event),
            Some(asked) = asked.recv() => scheduler.on_asked(asked),
            Ok(()) = owned.changed() => {
                let now = owned.borrow_and_update().clone();
                scheduler.on_owned(now);
            }
            () = tokio::time::sleep_until(timer.into()) => {}
        }
    }
    // The engine ends the runs that are going; that is written down.
    while let Some(event) = scheduler.runs.join_next().await {
        scheduler.on_joined(event);
    }
    NAME
}

/// The groups that have runs, with the figures of the loops before these.
fn slots(shared: &Shared) -> Vec<Slot> {
    let stats = shared.stats();
    let with_figures = |mut slot: Slot| {
        slot.stats = stats.groups.get(&slot.group.name).cloned().unwrap_or_default();
        slot
    };
    shared.groups.iter().filter_map(Slot::new).map(with_figures).collect()
}

impl Scheduler {
    fn stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// The database's time: as it was read last, carried on by this process's own clock.
    fn now(&self) -> Option<i64> {
        self.clock.map(|(us, at)| us.saturating_add(i64::try_from(at.elapsed().as_micros()).unwrap_or(i64::MAX)))
    }

    fn owns(&self, slot: usize) -> bool {
        let group = &self.slots[slot].group;
        let scans = self.shared.scans.iter().any(|(name, _)| *name == group.name);
        group.is_external() || scans || self.owned.iter().flatten().any(|house| group.houses.contains(house.0))
    }

    /// It is known what time it is, and what this instance owns.
    fn is_ready(&self) -> bool {
        self.clock.is_some() && self.owned.is_some()
    }

    /// Everything that can be started now, is.
    fn turn(&mut self) {
        let at = Instant::now();
        if self.is_ready() {
            for asked in std::mem::take(&mut self.early) {
                self.on_asked(asked);
            }
        }
        self.timer = at + Duration::from_secs(3600);
        if !self.watching && at >= self.watch_at {
            self.watching = true;
            let store = self.shared.store.clone();
            self.io.spawn(async move {
                let read = store.runs().watch().await;
                // The later moment: what is carried on from it is never ahead of the database.
                Event::Watched(Instant::now(), read)
            });
        }
        if at >= self.tidy_at {
            self.tidy_at = at + TIDY_PERIOD;
            self.tidy();
        }
        self.timer = self.timer.min(self.tidy_at);
        if !self.watching {
            self.timer = self.timer.min(self.watch_at);
        }
        if let Some(now) = self.now() {
            for slot in 0..self.slots.len() {
                if !self.slots[slot].started && self.owns(slot) {
                    self.slots[slot].started = true;
                    let seen = self.slots[slot].row.fired_us;
                    let todo = self.slots[slot].plan.start(now, seen);
                    if seen.is_none() {
                        self.seen_from_now(slot, now);
                    }
                    self.apply(slot, todo);
                }
                if self.slots[slot].started {
                    let todo = self.slots[slot].plan.tick(now);
                    self.apply(slot, todo);
                    if let Some(wakes) = self.slots[slot].plan.wakes() {
                        // A microsecond more, as clocks are read in whole ones.
                        let wait = Duration::from_micros(wakes.saturating_sub(now).max(0) as u64 + 1);
                        self.timer = self.timer.min(at + wait.min(Duration::from_secs(3600)));
                    }
                }
            }
        }
        self.publish();
    }

    /// A group that nobody has seen before misses what comes from now on.
    fn seen_from_now(&mut self, slot: usize, now: i64) {
        if !self.slots[slot].plan.keeps_times() {
            return;
        }
        let (store, group) = (self.shared.store.clone(), self.slots[slot].group.name.clone());
        self.io.spawn(async move {
            if let Err(e) = store.runs().seen(&group, now).await {
                tracing::warn!(error = %e, group, "could not write down since when the group is known");
            }
            Event::Nothing
        });
    }

    fn tidy(&mut self) {
        const MOST: usize = 100;
        let (store, older) = (self.shared.store.clone(), self.shared.settings.runs_retention);
        self.io.spawn(async move {
            for _ in 0..MOST {
                match store.runs().tidy(older).await {
                    Ok(gone) if gone >= TIDY => {}
                    Ok(_) => break,
                    Err(e) => {
                        tracing::warn!(error = %e, "old runs could not be removed; tried again later");
                        break;
                    }
                }
            }
            Event::Nothing
        });
    }

    fn on_joined(&mut self, event: Result<Event, tokio::task::JoinError>) {
        match event {
            Ok(event) => self.on_event(event),
            // A bug in a store: the supervisor starts everything anew, from the database.
            Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
            Err(_) => {}
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Watched(at, result) => {
                self.watching = false;
                self.watch_at = Instant::now() + self.shared.settings.idle_poll;
                match result {
                    Ok(watch) => self.on_watched(at, watch),
                    Err(e) => {
                        tracing::warn!(error = %e, "could not look at groups; their schedules go on");
                        // The other tables may be there all the same: messages don't wait for what a person has to mend.
                        if e.kind() != ErrorKind::Unavailable {
                            self.pauses(|_, known| known.unwrap_or(false));
                        }
                    }
                }
            }
            Event::Ended(slot, ask, report, took) => self.on_ended(slot, &ask, report, took),
            Event::Unfinished(slot, gained) => {
                // One that began since has these houses too.
                if self.slots[slot].began.is_none_or(|began| began < gained) {
                    let todo = self.slots[slot].plan.ask(Ask::new(Cause::Takeover));
                    self.apply(slot, todo);
                }
            }
            Event::Look => self.watch_at = Instant::now(),
            Event::Checked(request) => {
                self.closing.remove(&request);
            }
            Event::Nothing => {}
        }
    }

    fn on_watched(&mut self, at: Instant, watch: RunWatch) {
        let first = self.clock.is_none();
        self.clock = Some((watch.now_us, at));
        self.shared.stats().pass(NAME);
        for slot in 0..self.slots.len() {
            let name = self.slots[slot].group.name.as_str();
            let row = watch.groups.iter().find(|row| row.group == name).cloned().unwrap_or_default();
            let before = std::mem::replace(&mut self.slots[slot].row, row.clone());
            let plan = &mut self.slots[slot].plan;
            let mut todo = Vec::new();
            if !first && row.stopped_us != before.stopped_us {
                tracing::info!(group = row.group, "told to stop");
                todo = plan.stop();
            }
            if row.paused_us.is_some() {
                plan.pause();
            } else {
                todo.extend(plan.resume(watch.now_us, row.fired_us));
            }
            self.apply(slot, todo);
        }
        self.pauses(|name, _| watch.groups.iter().any(|row| row.group == name && row.paused_us.is_some()));
        self.answered.retain(|id| watch.requests.iter().any(|r| r.id == *id));
        for request in &watch.requests {
            if self.answered.contains(&request.id) {
                self.check(request, &watch);
            } else if self.owned.is_some() {
                self.on_request(request);
            }
        }
    }

    /// Tells the engine which continuous groups are paused.
    fn pauses(&mut self, is_paused: impl Fn(&str, Option<bool>) -> bool) {
        for (group, known) in &mut self.continuous {
            let paused = is_paused(&group.name, *known);
            if known.replace(paused) != Some(paused) {
                tracing::info!(group = group.name, paused, "continuous group");
                // The engine is gone only when everything is being torn down.
                let _ = self.engine.send(Command::Pause(group.name.clone(), paused));
            }
        }
    }

    /// Somebody asks all instances for a run.
    fn on_request(&mut self, request: &RunRequest) {
        let Some(group) = self.shared.groups.iter().find(|g| g.name == request.group).cloned() else { return };
        self.answered.insert(request.id);
        let cause = if request.after { Cause::After } else { Cause::Manual };
        let ask = Ask { due: request.due_us, request: Some(request.id), ..Ask::new(cause) };
        let slot = self.slots.iter().position(|s| s.group.name == group.name).filter(|_| !group.is_external());
        let Some(slot) = slot else {
            let why = if group.is_external() { "the group is run by a scheduler outside" } else { "the group is continuous" };
            self.record_discarded(&group.name, &ask, why);
            return;
        };
        if self.slots[slot].row.stopped_us.is_some_and(|at| at > request.requested_us) {
            self.record_discarded(&group.name, &ask, "the group was stopped");
            return;
        }
        let todo = self.slots[slot].plan.ask(ask);
        self.apply(slot, todo);
    }

    /// Closes a request when all instances are done with it.
    fn check(&mut self, request: &RunRequest, watch: &RunWatch) {
        let running = self.slots.iter().any(|s| s.group.name == request.group && s.plan.has(request.id));
        if running || !self.closing.insert(request.id) {
            return;
        }
        let store = self.shared.store.clone();
        let (id, live) = (request.id, watch.live.clone());
        let late = watch.now_us - request.requested_us > ANSWERS;
        self.io.spawn(async move {
            let filter = RunFilter { request: Some(id), limit: PAGE, ..RunFilter::default() };
            let closed = match store.runs().list(&filter).await {
                Ok(rows) => match outcome_of(id, &rows, &live, late) {
                    Some(report) => {
                        store.runs().close(id, report.status, report.counts, report.error.as_deref()).await.map(|_| ())
                    }
                    None => Ok(()),
                },
                Err(e) => Err(e),
            };
            if let Err(e) = closed {
                tracing::warn!(error = %e, request = id, "could not close a request for a run; tried again");
            }
            Event::Checked(id)
        });
    }

    fn on_asked(&mut self, asked: Asked) {
        if !self.is_ready() {
            self.early.push(asked);
            return;
        }
        let Asked { run, done } = asked;
        let Some(slot) = self.slots.iter().position(|s| s.group.name == run.group) else { return };
        let cause = if self.slots[slot].group.is_external() { Cause::External } else { Cause::Manual };
        self.numbers += 1;
        self.tickets.insert(self.numbers, (run, done));
        let todo = self.slots[slot].plan.ask(Ask { ticket: Some(self.numbers), ..Ask::new(cause) });
        self.apply(slot, todo);
    }

    /// Houses came or went.
    fn on_owned(&mut self, owned: Option<HashSet<House>>) {
        let before = std::mem::replace(&mut self.owned, owned).unwrap_or_default();
        let gained: Vec<House> = self.owned.iter().flatten().filter(|house| !before.contains(house)).copied().collect();
        let Some(instance) = self.shared.stats().instance.clone().filter(|_| !gained.is_empty()) else { return };
        let at = Instant::now();
        for (slot, s) in self.slots.iter().enumerate() {
            if s.group.is_external() || !gained.iter().any(|house| s.group.houses.contains(house.0)) {
                continue;
            }
            let (store, group, instance) = (self.shared.store.clone(), s.group.name.clone(), instance.clone());
            self.io.spawn(async move {
                loop {
                    match store.runs().unfinished(&group, &instance).await {
                        Ok(true) => return Event::Unfinished(slot, at),
                        Ok(false) => return Event::Nothing,
                        Err(e) => tracing::warn!(error = %e, group, "could not see whether a run was left unfinished"),
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            });
        }
    }

    fn apply(&mut self, slot: usize, todo: Vec<Do>) {
        for one in todo {
            match one {
                Do::Begin(ask) if self.stopping() || !self.owns(slot) => {
                    let why = if self.stopping() {
                        "the instance was shut down"
                    } else {
                        "the instance owns none of the group's houses"
                    };
                    if ask.request.is_some() {
                        let name = self.slots[slot].group.name.clone();
                        self.record_discarded(&name, &ask, why);
                    }
                    self.answer(&ask, RunReport::new(RunStatus::Discarded, why.to_owned()));
                    if let Some(now) = self.now() {
                        let more = self.slots[slot].plan.ended(now, Ended::Cut);
                        self.apply(slot, more);
                    }
                }
                Do::Begin(ask) => self.begin(slot, ask),
                Do::Discard(ask, why) => {
                    let name = self.slots[slot].group.name.clone();
                    *self.slots[slot].stats.runs.entry(RunStatus::Discarded).or_default() += 1;
                    self.record_discarded(&name, &ask, why);
                    self.answer(&ask, RunReport::new(RunStatus::Discarded, why.to_owned()));
                }
                Do::Stop => {
                    if let Some(stop) = &self.slots[slot].stop {
                        stop.send_replace(true);
                    }
                }
                Do::Follow(ask) => self.follow(slot, &ask),
            }
        }
    }

    fn answer(&mut self, ask: &Ask, report: RunReport) {
        if let Some((_, done)) = ask.ticket.and_then(|ticket| self.tickets.remove(&ticket)) {
            // Whoever asked may have gone.
            let _ = done.send(report);
        }
    }

    fn begin(&mut self, slot: usize, ask: Ask) {
        let (stop, stopped) = watch::channel(false);
        let s = &mut self.slots[slot];
        s.stop = Some(stop);
        s.began = Some(Instant::now());
        let asked = ask.ticket.and_then(|ticket| self.tickets.get(&ticket)).map(|(run, _)| run.clone());
        let going = Going {
            shared: self.shared.clone(),
            engine: self.engine.clone(),
            relay_stops: self.stop.clone(),
            instance: self.shared.stats().instance.clone().unwrap_or_default(),
            group: s.group.clone(),
            asked: asked.unwrap_or_else(|| Run::of(&s.group.name)),
            stopped,
        };
        self.runs.spawn(async move {
            let began = Instant::now();
            let report = going.run(&ask).await;
            Event::Ended(slot, ask, report, began.elapsed())
        });
    }

    fn on_ended(&mut self, slot: usize, ask: &Ask, report: RunReport, took: Duration) {
        let s = &mut self.slots[slot];
        s.stop = None;
        *s.stats.runs.entry(report.status).or_default() += 1;
        s.stats.last = Some(LastRun {
            cause: ask.cause,
            status: report.status,
            counts: report.counts,
            error: report.error.clone(),
            took,
            ended: Instant::now(),
        });
        let RunCounts { messages, delivered, retried, failed } = report.counts;
        tracing::info!(
            group = s.group.name,
            cause = ask.cause.as_str(),
            status = report.status.as_str(),
            messages,
            delivered,
            retried,
            failed,
            error = report.error,
            ?took,
            "run ended"
        );
        let how = match report.status {
            RunStatus::Done => Ended::Done,
            RunStatus::Failed => Ended::Failed,
            _ => Ended::Cut,
        };
        self.answer(ask, report);
        // It was known before the run began.
        let Some(now) = self.now() else { return };
        let todo = self.slots[slot].plan.ended(now, how);
        self.apply(slot, todo);
        if ask.request.is_some() {
            // Somebody waits for the request to be closed.
            self.watch_at = Instant::now();
        }
    }

    fn record_discarded(&mut self, group: &str, ask: &Ask, why: &'static str) {
        let (shared, ask, group) = (self.shared.clone(), ask.clone(), group.to_owned());
        let instance = shared.stats().instance.clone().unwrap_or_default();
        self.io.spawn(async move {
            loop {
                let run = new_run(&group, &ask, &instance);
                match shared.store.runs().discard(&run, why).await {
                    Ok(_) => return Event::Nothing,
                    Err(e) => tracing::warn!(error = %e, group, "could not record a run that did not take place"),
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
    }

    /// The child's turn, on all instances.
    fn follow(&mut self, slot: usize, ask: &Ask) {
        let group = &self.slots[slot].group;
        let Some(child) = group.then.clone() else { return };
        let (shared, group, due) = (self.shared.clone(), group.name.clone(), ask.due);
        let instance = shared.stats().instance.clone().unwrap_or_default();
        self.io.spawn(async move {
            loop {
                match shared.store.runs().follow(&group, &instance, &child, due).await {
                    Ok(true) => return Event::Look,
                    Ok(false) => return Event::Nothing,
                    Err(e) => tracing::warn!(error = %e, group, child, "could not ask for the next group's run"),
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
    }

    fn publish(&mut self) {
        let mut groups = BTreeMap::new();
        let owned = |group: &Group| self.owned.iter().flatten().filter(|house| group.houses.contains(house.0)).count() as u32;
        for (group, paused) in &self.continuous {
            let stats = GroupStats { houses: owned(group), paused: *paused == Some(true), ..GroupStats::default() };
            groups.insert(group.name.clone(), stats);
        }
        for Slot { plan, stats, group, .. } in &mut self.slots {
            stats.houses = owned(group);
            stats.paused = plan.is_paused();
            stats.running = plan.is_running();
            stats.waiting = plan.is_waiting();
            stats.next_due_us = plan.next_due();
            groups.insert(group.name.clone(), stats.clone());
        }
        self.shared.stats().groups = groups;
    }
}

fn new_run<'a>(group: &'a str, ask: &Ask, instance: &'a str) -> NewRun<'a> {
    NewRun { group, cause: ask.cause, instance, due_us: ask.due, request: ask.request }
}

/// What became of a request; None while an instance is at it, or may still answer.
fn outcome_of(request: i64, rows: &[RunRow], live: &[String], late: bool) -> Option<RunReport> {
    let answers: Vec<&RunRow> = rows.iter().filter(|r| r.request == Some(request)).collect();
    let answered = |instance: &String| answers.iter().any(|r| r.instance.as_ref() == Some(instance));
    if answers.iter().any(|r| !r.status.is_over()) || !late && !live.iter().all(answered) {
        return None;
    }
    let status = RunStatus::of_all(answers.iter().map(|r| r.status))?;
    let mut counts = RunCounts::default();
    for r in &answers {
        counts.messages += r.messages.unsigned_abs();
        counts.delivered += r.delivered.unsigned_abs();
        counts.retried += r.retried.unsigned_abs();
        counts.failed += r.failed.unsigned_abs();
    }
    let error = answers.iter().filter(|r| r.status == status).find_map(|r| r.error.clone());
    Some(RunReport { status, counts, error })
}

/// A run on its way.
struct Going {
    shared: Arc<Shared>,
    engine: mpsc::UnboundedSender<Command>,
    relay_stops: watch::Receiver<bool>,
    instance: String,
    group: Group,
    asked: Run,
    stopped: watch::Receiver<bool>,
}

impl Going {
    async fn run(mut self, ask: &Ask) -> RunReport {
        let Some(id) = self.record_begin(ask).await else {
            return RunReport::new(RunStatus::Stopped, "it was stopped before it began".to_owned());
        };
        let Some(report) = self.work().await else {
            // On record it goes on, until the lease of this instance ends and whoever takes its houses does what is left of it.
            return RunReport::new(RunStatus::Stopped, "the relay's loops were started anew".to_owned());
        };
        self.record_end(id, &report).await;
        report
    }

    /// Writes down that it begins; None when it was stopped before that was possible.
    async fn record_begin(&mut self, ask: &Ask) -> Option<i64> {
        loop {
            if *self.stopped.borrow() || *self.relay_stops.borrow() {
                return None;
            }
            let run = new_run(&self.group.name, ask, &self.instance);
            match self.shared.store.runs().begin(&run).await {
                Ok(id) => return Some(id),
                Err(e) => tracing::warn!(error = %e, group = self.group.name, "a run waits for the database"),
            }
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                _ = self.stopped.changed() => {}
                _ = self.relay_stops.changed() => {}
            }
        }
    }

    /// The adopted tables of a run: all of the group's, or those that it names.
    fn scans(&self, run: &Run) -> Vec<(AdoptedScans, Option<Vec<String>>)> {
        let of_group = self.shared.scans.iter().filter(|(group, _)| *group == self.group.name).map(|(_, scans)| scans.clone());
        match (&run.adopted, &run.houses) {
            (None, None) => of_group.map(|scans| (scans, None)).collect(),
            (None, Some(_)) => Vec::new(),
            (Some(named), _) => {
                let tables = |scans: AdoptedScans| {
                    let before = format!("{}/", scans.name());
                    let tables: Vec<String> = named.iter().filter_map(|n| n.strip_prefix(&before)).map(str::to_owned).collect();
                    (!tables.is_empty()).then_some((scans, Some(tables)))
                };
                of_group.filter_map(tables).collect()
            }
        }
    }

    /// None when the engine ended in the midst of it.
    async fn work(&mut self) -> Option<RunReport> {
        let (stop, stops) = watch::channel(false);
        let mut run = self.asked.clone();
        let mut asker = run.stop.replace(stops);
        run.limit = run.limit.or(self.group.limit);
        let scans = self.scans(&run);
        let (limit, stops) = (run.limit, run.stop.clone());
        let adopted = async move {
            let Some(stops) = stops else { return Vec::new() };
            join_all(scans.iter().map(|(scans, tables)| scans.run_once(limit, tables.as_deref(), &stops))).await
        };
        let nothing = RunOutcome { counts: RunCounts::default(), end: RunEnd::Done };
        let mut own = None;
        if !run.houses.as_ref().unwrap_or(&self.group.houses).is_empty() {
            let (done, outcome) = oneshot::channel();
            if self.engine.send(Command::Run(run, done)).is_err() {
                return Some(RunReport::new(RunStatus::Stopped, "the relay was shut down".to_owned()));
            }
            own = Some(outcome);
        }
        let own = async move {
            match own {
                Some(outcome) => outcome.await.ok(),
                None => Some(nothing),
            }
        };
        let all = async { tokio::join!(own, adopted) };
        tokio::pin!(all);
        let budget = self.group.budget.unwrap_or(Duration::MAX);
        // Far beyond any run, and still a moment that can be computed.
        let over = tokio::time::sleep(budget.min(Duration::from_secs(30 * 365 * 86_400)));
        tokio::pin!(over);
        let mut timed_out = false;
        let outcome = loop {
            tokio::select! {
                all = &mut all => break all,
                () = &mut over, if !timed_out => {
                    timed_out = true;
                    stop.send_replace(true);
                }
                // The sender lives as long as the scheduler does.
                _ = self.stopped.wait_for(|stopped| *stopped), if !*stop.borrow() => {
                    stop.send_replace(true);
                }
                () = told(&mut asker), if asker.is_some() => {
                    asker = None;
                    stop.send_replace(true);
                }
            }
        };
        let (own, adopted) = outcome;
        let own = own?;
        let RunOutcome { counts, end } = adopted.into_iter().fold(own, RunOutcome::and);
        let (status, error) = match end {
            RunEnd::Done | RunEnd::Limit => (RunStatus::Done, None),
            RunEnd::Stopped if timed_out => (RunStatus::Timeout, Some(format!("it took longer than its budget of {budget:?}"))),
            RunEnd::Stopped => (RunStatus::Stopped, None),
            RunEnd::Lost(why) => (RunStatus::Failed, Some(why)),
        };
        Some(RunReport { status, counts, error })
    }

    async fn record_end(&mut self, id: i64, report: &RunReport) {
        loop {
            let last = *self.relay_stops.borrow();
            match self.shared.store.runs().end(id, report.status, report.counts, report.error.as_deref()).await {
                Ok(_) => return,
                Err(e) if last => {
                    tracing::warn!(error = %e, group = self.group.name, "the end of a run could not be recorded");
                    return;
                }
                Err(e) => tracing::warn!(error = %e, group = self.group.name, "the end of a run is not recorded yet"),
            }
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                _ = self.relay_stops.changed() => {}
            }
        }
    }
}

/// Resolves when whoever asked for a run wants it to stop, or is gone.
async fn told(asker: &mut Option<watch::Receiver<bool>>) {
    match asker {
        // An error: its sender is gone.
        Some(asker) => drop(asker.wait_for(|stop| *stop).await),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(instance: &str, status: RunStatus, delivered: i64, error: Option<&str>) -> RunRow {
        RunRow {
            id: 2,
            group: "g".into(),
            cause: "manual".into(),
            status,
            instance: Some(instance.into()),
            request: Some(1),
            due_us: None,
            requested_us: 0,
            started_us: None,
            ended_us: None,
            messages: delivered,
            delivered,
            retried: 0,
            failed: 0,
            error: error.map(Into::into),
        }
    }

    #[test]
    fn a_request_is_over_when_all_live_instances_are_done() {
        use RunStatus::*;
        let live = ["a".to_owned(), "b".to_owned()];
        let of = |rows: &[RunRow], late| outcome_of(1, rows, &live, late);
        assert_eq!(of(&[], false), None);
        assert_eq!(of(&[], true), None, "nobody has taken it");
        let (a, b) = (row("a", Done, 3, None), row("b", Done, 4, None));
        assert_eq!(of(std::slice::from_ref(&a), false), None, "b may still answer");
        assert_eq!(of(std::slice::from_ref(&a), true).map(|r| (r.status, r.counts.delivered)), Some((Done, 3)));
        assert_eq!(of(&[a.clone(), b], false).map(|r| (r.status, r.counts.delivered)), Some((Done, 7)));
        assert_eq!(of(&[a.clone(), row("b", Running, 0, None)], true), None, "b is at it");
        let failed = of(&[a.clone(), row("b", Failed, 1, Some("why"))], false).unwrap();
        assert_eq!((failed.status, failed.error.as_deref()), (Failed, Some("why")));
        let other = RunRow { request: Some(9), ..row("b", Done, 1, None) };
        assert_eq!(of(&[a, other], false), None, "that was another request");
    }
}
