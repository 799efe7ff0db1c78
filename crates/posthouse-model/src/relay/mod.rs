//! Outbox and relay: publishers, the pending set, one house that two relays may own, their memory, and a receiver.
//!
//! Nothing here is a simpler protocol than the one that runs: each step is named after the function or the statement that takes
//! it. Time is left out: whatever waits for a clock may happen at any moment at which the order of the clocks allows it.

mod database;
mod engine;
mod state;

use stateright::{Model, Property};

use self::engine::Engine;
pub use self::state::*;
use crate::search::Live;

/// What happens at most how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Budget {
    /// A relay is killed.
    pub crashes: u8,
    /// A relay can't renew its lease, and notices by its own clock: cut off from the database, or too slow.
    pub cut_offs: u8,
    /// A process stands still with a send under way, for longer than its lease.
    pub overruns: u8,
    /// The receiver refuses a message.
    pub refusals: u8,
    /// A message, or its confirmation, gets lost on the way.
    pub losses: u8,
    /// A message, or its confirmation, comes after its sender has given up.
    pub late: u8,
    /// The answer of a statement that writes gets lost.
    pub lost_answers: u8,
    /// The receiver can't be reached.
    pub outages: u8,
    /// An operator sends a message somewhere else.
    pub edits: u8,
    /// An operator requeues a message.
    pub requeues: u8,
    /// An operator skips a message.
    pub skips: u8,
    /// A house is given to another instance in an orderly way.
    pub handovers: u8,
    /// A publisher rolls back.
    pub rollbacks: u8,
    /// A publisher dies.
    pub publishers: u8,
    /// A hint of a commit gets lost.
    pub hints: u8,
}

/// What keeps the promises. Each can be taken out, to see which promise it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protection {
    /// The pending row is written in the transaction of the message.
    PendingWithMessage,
    /// Reads see committed rows only.
    CommittedOnly,
    /// Sweeps read below the mark.
    Sweep,
    /// The forward read is asked again and again, whatever hints come.
    IdlePoll,
    /// A row goes after the one that its read saw before it.
    Predecessor,
    /// A pipelining transport holds back what follows a failed one.
    HoldsBack,
    /// A FAILED row stands before those behind it.
    FailedBlocks,
    /// Of a key's queue only the first is on its way.
    OneOfAKey,
    /// When a row goes back to the database, so do those behind it; in a pipelined queue, once what is in flight is answered.
    FollowersGoBack,
    /// What left memory while a read was under way is not taken up from that read.
    Recent,
    /// A row that was read before an operator touched its key doesn't speak for what stands before it.
    OutdatedRows,
    /// What has passed isn't trusted where an operator may have put something back.
    PassedHeedsOperators,
    /// The lowest row that was left out for a destination is remembered.
    LagCursor,
    /// Only a confirmed message is deleted.
    ConfirmedOnly,
    /// A row is deleted only with the version that was sent.
    VersionOfDelete,
    /// A row is written back only with the version that was sent.
    VersionOfSetback,
    /// An answer counts for its own try only.
    TryNumbers,
    /// A send starts only if the lease covers it.
    LeaseCoversSend,
    /// A lease that has run out is never renewed.
    NoLateRenewal,
    /// A house is taken only if its owner's lease has run out.
    TakesOnlyExpired,
    /// A house is released only when nothing of it is in memory.
    ReleasesDrained,
    /// Suspects are claimed before they are sent.
    Claims,
}

/// `ordering` of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "named as there")]
pub enum Ordering {
    None,
    Strict,
    Pipelined,
}

/// What is tried out.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// One entry per message: its key.
    pub keys: Vec<Option<u8>>,
    /// The application serialises the writers of a key.
    pub serialised: bool,
    /// The route's.
    pub ordering: Ordering,
    /// `on_exhausted = "skip"`; otherwise `"block"`.
    pub skip: bool,
    /// Relays.
    pub instances: usize,
    /// Other things may happen between a read's snapshot and its answer, and between a forward read's two statements.
    pub slow_reads: bool,
    /// Other things may happen between a row's turn and its sending.
    pub loads: bool,
    /// `max_attempts`.
    pub max_attempts: u8,
    /// `max_claims`.
    pub max_claims: u8,
    /// `concurrency` of the destination.
    pub concurrency: u8,
    /// This message kills whoever sends it.
    pub poison: Option<usize>,
    /// Refusals and operators befall this message only.
    pub only: Option<usize>,
    /// Faults that may happen.
    pub budget: Budget,
    /// These are taken out.
    pub without: Vec<Protection>,
    /// What must never be seen beyond what no scenario may show.
    pub never: Vec<Never>,
    /// What must be seen somewhere.
    pub sometimes: Vec<Sometimes>,
}

/// What some scenarios rule out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as the fields of Seen")]
pub enum Never {
    Overtaken,
    Duplicate,
    Late,
    TwoSenders,
}

/// What some scenarios lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "as the fields of Seen")]
pub enum Sometimes {
    Overtaken,
    Duplicate,
    Late,
    TwoSenders,
    Failed,
    AllDelivered,
}

impl Default for Scenario {
    /// Two messages of one key, one relay, and no faults.
    fn default() -> Self {
        Self {
            keys: vec![Some(0), Some(0)],
            serialised: true,
            ordering: Ordering::Strict,
            skip: false,
            instances: 1,
            slow_reads: false,
            loads: false,
            max_attempts: 2,
            max_claims: 2,
            concurrency: 1,
            poison: None,
            only: None,
            budget: Budget::default(),
            without: Vec::new(),
            never: vec![Never::Overtaken],
            sometimes: vec![Sometimes::AllDelivered],
        }
    }
}

/// A step: who takes it (`i`: which relay), and with which message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "each step says in `next_state` what it stands for")]
pub enum Action {
    // Publishers.
    Insert(usize),
    Commit(usize),
    CommitUnheard(usize),
    Rollback(usize),
    WritePending(usize),
    PublisherDies(usize),
    // The clock.
    Due(usize),
    LeaseEnds(usize),
    LeaseOfTheGoneEnds,
    LeaseGetsShort(usize),
    // Membership.
    Renew(usize),
    Balance(usize),
    Take(usize),
    Release(usize),
    Drained(usize),
    Dies(usize),
    Starts(usize),
    // Reads.
    Poll(usize),
    Probe(usize),
    ReadDue(usize),
    ReadKeys(usize),
    ReadDestination(usize),
    ReadChanges(usize),
    Sweep(usize),
    FastAnswer(usize),
    SlowAnswer(usize),
    // Rows.
    Claim(usize, usize),
    ClaimRuns(usize, usize),
    Claimed(usize, usize),
    Load(usize, usize),
    Send(usize, usize),
    Arrives(usize, usize),
    Confirmed(usize, usize),
    Refused(usize, usize),
    HeldBack(usize, usize),
    Unreachable(usize, usize),
    Lost(usize, usize),
    Delayed(usize, usize),
    GivesUp(usize, usize),
    KillsItsProcess(usize, usize),
    ArrivesLate(usize, usize),
    ConfirmedLate(usize, usize),
    Writes(usize, usize),
    Written(usize, usize),
    AnswerLost(usize, usize),
    BreakerTime(usize),
    // Operators.
    Edit(usize),
    Requeue(usize),
    Skip(usize),
}

impl Scenario {
    pub(crate) fn lacks(&self, protection: Protection) -> bool {
        self.without.contains(&protection)
    }

    fn concerns(&self, place: usize) -> bool {
        self.only.is_none_or(|only| only == place)
    }

    pub(crate) fn messages(&self) -> usize {
        self.keys.len()
    }

    /// What publishers may do.
    fn publishing(&self, s: &State, out: &mut Vec<Action>) {
        for place in 0..self.messages() {
            let message = s.messages[place];
            match message.tx {
                Tx::None => {
                    let earlier = &s.messages[..place];
                    let of_key = |other: &usize| self.keys[place].is_some() && self.keys[*other] == self.keys[place];
                    let alone = !(0..place).filter(of_key).any(|other| s.messages[other].tx == Tx::Open);
                    // Ids are given out at insert, so in the order of these.
                    if earlier.iter().all(|m| m.tx != Tx::None) && (alone || !self.serialised) {
                        out.push(Action::Insert(place));
                    }
                }
                Tx::Open => {
                    out.push(Action::Commit(place));
                    if s.left.rollbacks > 0 {
                        out.push(Action::Rollback(place));
                    }
                    if s.left.hints > 0 {
                        out.push(Action::CommitUnheard(place));
                    }
                }
                Tx::Committed if message.owed => {
                    out.push(Action::WritePending(place));
                    if s.left.publishers > 0 {
                        out.push(Action::PublisherDies(place));
                    }
                }
                Tx::Committed | Tx::RolledBack => {}
            }
            if s.pending[place].is_some_and(|row| row.due == Due::Later) {
                out.push(Action::Due(place));
            }
            for destination in (0..DESTINATIONS).filter(|d| message.late[*d]) {
                out.push(Action::ArrivesLate(place, destination));
            }
            self.operating(s, place, out);
        }
    }

    fn operating(&self, s: &State, place: usize, out: &mut Vec<Action>) {
        let concerned = s.messages[place].tx == Tx::Committed && self.concerns(place);
        let Some(row) = s.pending[place].filter(|_| concerned) else { return };
        if s.left.edits > 0 && row.destination == 0 {
            out.push(Action::Edit(place));
        }
        if s.left.requeues > 0 && (row.status == Status::Failed || row.status == Status::Pending && row.due == Due::Later) {
            out.push(Action::Requeue(place));
        }
        if s.left.skips > 0 && row.status != Status::Failed {
            out.push(Action::Skip(place));
        }
    }

    /// What membership may do.
    fn belonging(&self, s: &State, i: usize, out: &mut Vec<Action>) {
        let instance = &s.instances[i];
        let tries = instance.rows.iter().flatten().any(|r| matches!(r.step, Step::Sending(Try::Under | Try::Arrived)));
        if !instance.alive {
            out.push(Action::Starts(i));
            return;
        }
        if s.left.crashes > 0 {
            out.push(Action::Dies(i));
        }
        if instance.covered && s.left.cut_offs > 0 && instance.leased {
            out.push(Action::LeaseGetsShort(i));
        }
        // Tries end before the lease does, because they began with enough of it left; unless the process stands still.
        let sends_end = self.lacks(Protection::LeaseCoversSend) || !tries || s.left.overruns > 0;
        if instance.leased && !instance.covered && sends_end {
            out.push(Action::LeaseEnds(i));
        }
        if !instance.covered || !instance.leased {
            out.push(Action::Renew(i));
        }
        if instance.leased && instance.house.is_some() && s.owner != Owner::Of(i as u8) {
            out.push(Action::Balance(i));
        }
        if instance.house.is_none() && s.take(self, i).is_some() {
            out.push(Action::Take(i));
        }
        if let Some(house) = instance.house {
            if !house.draining && s.left.handovers > 0 && instance.leased {
                out.push(Action::Release(i));
            }
            if house.draining && (instance.rows == [None; MESSAGES] || self.lacks(Protection::ReleasesDrained)) {
                out.push(Action::Drained(i));
            }
        }
    }

    /// What may be read.
    fn reading(&self, s: &State, i: usize, out: &mut Vec<Action>) {
        let instance = &s.instances[i];
        match instance.fast {
            Some(read) if read.probe != 0 => out.push(Action::Probe(i)),
            Some(_) => out.push(Action::FastAnswer(i)),
            None => {}
        }
        if instance.slow.is_some() {
            out.push(Action::SlowAnswer(i));
        }
        let Some(house) = instance.house.filter(|h| !h.draining) else { return };
        if instance.fast.is_none() {
            if instance.woken || !self.lacks(Protection::IdlePoll) {
                out.push(Action::Poll(i));
            }
            if !house.due_read || s.pending.iter().flatten().any(|row| row.due == Due::Now) {
                out.push(Action::ReadDue(i));
            }
            if instance.key_reads != [false; KEYS] {
                out.push(Action::ReadKeys(i));
            }
            if instance.changes.is_some_and(|known| known < instance.changes_seen) {
                out.push(Action::ReadChanges(i));
            }
            let engine = Engine { scenario: self, state: &mut s.clone(), i };
            if engine.wants_rows() {
                out.push(Action::ReadDestination(i));
            }
        }
        if instance.slow.is_none() && house.mark > 0 && !self.lacks(Protection::Sweep) {
            out.push(Action::Sweep(i));
        }
        if instance.breaker == (Breaker::Open { waiting: true }) {
            out.push(Action::BreakerTime(i));
        }
    }

    /// What may become of a row in memory.
    fn sending(&self, s: &State, i: usize, place: usize, out: &mut Vec<Action>) {
        let instance = &s.instances[i];
        if instance.echoes[place] {
            out.push(Action::ConfirmedLate(i, place));
        }
        let Some(row) = instance.rows[place] else { return };
        let engine = Engine { scenario: self, state: &mut s.clone(), i };
        match row.step {
            Step::Chained | Step::Held => {}
            Step::Ready | Step::Loaded | Step::MustClaim => {
                if engine.may_claim(&row) {
                    out.push(Action::Claim(i, place));
                }
                if row.step == Step::Ready && self.loads {
                    out.push(Action::Load(i, place));
                }
                if engine.may_send_row(place, &row) {
                    out.push(Action::Send(i, place));
                }
            }
            Step::Claiming(Call::Asked) => out.push(Action::ClaimRuns(i, place)),
            Step::Claiming(Call::Ran(_)) => {
                out.push(Action::Claimed(i, place));
                if s.left.lost_answers > 0 {
                    out.push(Action::AnswerLost(i, place));
                }
            }
            Step::Sending(Try::Under) if self.poison == Some(place) => out.push(Action::KillsItsProcess(i, place)),
            Step::Sending(Try::Under) => {
                match engine.in_line(place, &row) {
                    (false, _) => return,
                    (true, true) => return out.push(Action::HeldBack(i, place)),
                    (true, false) => out.push(Action::Arrives(i, place)),
                }
                if s.left.refusals > 0 && self.concerns(place) {
                    out.push(Action::Refused(i, place));
                }
                if s.left.outages > 0 {
                    out.push(Action::Unreachable(i, place));
                }
                // A pipelining transport knows what has become of what it holds.
                if self.ordering != Ordering::Pipelined {
                    self.losing(s, i, place, out);
                }
            }
            Step::Sending(Try::Arrived) => {
                out.push(Action::Confirmed(i, place));
                self.losing(s, i, place, out);
            }
            Step::Sending(Try::Lost) => out.push(Action::GivesUp(i, place)),
            Step::Delivered(call) | Step::SetBack(_, call) => match call {
                Call::Asked => out.push(Action::Writes(i, place)),
                Call::Ran(_) => {
                    out.push(Action::Written(i, place));
                    if s.left.lost_answers > 0 {
                        out.push(Action::AnswerLost(i, place));
                    }
                }
            },
        }
    }

    fn losing(&self, s: &State, i: usize, place: usize, out: &mut Vec<Action>) {
        if s.left.losses > 0 {
            out.push(Action::Lost(i, place));
        }
        if s.left.late > 0 {
            out.push(Action::Delayed(i, place));
        }
    }

    fn engine<'a>(&'a self, state: &'a mut State, i: usize) -> Engine<'a> {
        Engine { scenario: self, state, i }
    }

    /// Answers what waits only for its answer, where nothing is to come in between.
    fn answer(&self, s: &mut State, i: usize) {
        if self.slow_reads {
            return;
        }
        if s.instances[i].fast.is_some() {
            s.probe(self, i);
        }
        for fast in [true, false] {
            let lane = if fast { &mut s.instances[i].fast } else { &mut s.instances[i].slow };
            if let Some(read) = lane.take() {
                self.engine(s, i).on_read(&read);
            }
        }
    }

    fn publish(&self, s: &mut State, place: usize, heard: bool) {
        s.messages[place].tx = Tx::Committed;
        if heard && self.lacks(Protection::IdlePoll) {
            for instance in &mut s.instances[..self.instances] {
                instance.woken = true;
            }
        }
    }

    fn act(&self, s: &mut State, action: Action) {
        match action {
            Action::Insert(place) => s.insert(place, self),
            Action::Commit(place) => self.publish(s, place, true),
            Action::CommitUnheard(place) => {
                s.left.hints -= 1;
                self.publish(s, place, false);
            }
            Action::Rollback(place) => {
                s.left.rollbacks -= 1;
                s.messages[place] = Message { tx: Tx::RolledBack, owed: false, ..s.messages[place] };
                s.pending[place] = None;
            }
            Action::WritePending(place) => {
                s.messages[place].owed = false;
                s.enqueue(place, self);
            }
            Action::PublisherDies(place) => {
                s.left.publishers -= 1;
                s.messages[place].owed = false;
            }
            Action::Due(place) => {
                if let Some(row) = &mut s.pending[place] {
                    row.due = Due::Now;
                }
            }
            Action::LeaseOfTheGoneEnds => s.owner = Owner::Gone { leased: false },
            Action::ArrivesLate(place, destination) => {
                s.messages[place].late[destination] = false;
                s.arrive(self, place, destination as u8);
            }
            // `admin::act`.
            Action::Edit(place) => {
                s.left.edits -= 1;
                s.messages[place].failures = 0;
                s.messages[place].edited = true;
                s.act(place, |row| {
                    *row = Pending { status: Status::Pending, due: Due::Now, attempts: 0, claims: 0, destination: 1, ..*row };
                });
            }
            Action::Requeue(place) => {
                s.left.requeues -= 1;
                s.messages[place].failures = 0;
                let keyed = self.keys[place].is_some();
                s.act(place, |row| {
                    *row = Pending { status: Status::Pending, due: Due::Now, attempts: 0, claims: 0, keyed, ..*row };
                });
            }
            Action::Skip(place) => {
                s.left.skips -= 1;
                s.messages[place].may_pass = u8::MAX;
                s.act(place, |row| *row = Pending { status: Status::Failed, due: Due::Never, keyed: false, ..*row });
            }
            Action::LeaseEnds(i) => {
                let tries = |r: &Row| matches!(r.step, Step::Sending(Try::Under | Try::Arrived));
                if s.instances[i].rows.iter().flatten().any(tries) && !self.lacks(Protection::LeaseCoversSend) {
                    s.left.overruns -= 1;
                }
                s.instances[i].leased = false;
            }
            Action::LeaseGetsShort(i) => {
                s.left.cut_offs -= 1;
                s.instances[i].covered = false;
            }
            Action::Renew(_) | Action::Balance(_) | Action::Take(_) | Action::Release(_) | Action::Drained(_) => {
                self.belong(s, action);
            }
            // A process that is killed. What it had under way arrived before, or doesn't.
            Action::Dies(i) => {
                s.left.crashes -= 1;
                Self::die(s, i);
            }
            Action::KillsItsProcess(i, _) => Self::die(s, i),
            // `Member::beat` of a process that has just started: a name that was never used.
            Action::Starts(i) => s.instances[i] = Instance { alive: true, leased: true, covered: true, ..Instance::default() },
            Action::Probe(i) => s.probe(self, i),
            Action::Poll(i) => self.engine(s, i).poll(),
            Action::ReadDue(i) => self.engine(s, i).read_due(),
            Action::ReadKeys(i) => self.engine(s, i).read_keys(),
            Action::ReadDestination(i) => self.engine(s, i).read_destination(),
            Action::ReadChanges(i) => self.engine(s, i).read_changes(),
            Action::Sweep(i) => self.engine(s, i).sweep(),
            Action::FastAnswer(i) => {
                if let Some(read) = s.instances[i].fast.take() {
                    self.engine(s, i).on_read(&read);
                }
            }
            Action::SlowAnswer(i) => {
                if let Some(read) = s.instances[i].slow.take() {
                    self.engine(s, i).on_read(&read);
                }
            }
            Action::BreakerTime(i) => s.instances[i].breaker = Breaker::Open { waiting: false },
            other => self.row(s, other),
        }
        if let Action::Poll(i)
        | Action::ReadDue(i)
        | Action::ReadKeys(i)
        | Action::ReadDestination(i)
        | Action::ReadChanges(i)
        | Action::Sweep(i) = action
        {
            self.answer(s, i);
        }
    }

    fn die(s: &mut State, i: usize) {
        s.abandon(i);
        s.instances[i] = Instance::default();
    }

    fn belong(&self, s: &mut State, action: Action) {
        match action {
            // `RENEW`; `Member::lost_lease`, and joining again under another name.
            Action::Renew(i) => {
                if !s.instances[i].leased && !self.lacks(Protection::NoLateRenewal) {
                    s.abandon(i);
                    self.engine(s, i).lose_house();
                }
                s.instances[i].leased = true;
                s.instances[i].covered = true;
            }
            // `Member::balance`: the database says that a house is somebody else's.
            Action::Balance(i) => self.engine(s, i).lose_house(),
            // `TAKE` and `HouseEvent::Gained`.
            Action::Take(i) => {
                let expired = s.take(self, i).unwrap_or_default();
                s.owner = Owner::Of(i as u8);
                self.engine(s, i).gain(expired);
            }
            // `HouseEvent::Release`.
            Action::Release(i) => {
                s.left.handovers -= 1;
                if let Some(house) = &mut s.instances[i].house {
                    house.draining = true;
                }
                self.engine(s, i).drop_waiting();
            }
            // `Engine::report_drained` and `Member::release`.
            Action::Drained(i) => {
                s.instances[i].house = None;
                s.release(i);
                if self.lacks(Protection::ReleasesDrained) {
                    self.engine(s, i).lose_house();
                }
            }
            _ => {}
        }
    }

    fn row(&self, s: &mut State, action: Action) {
        let (Action::Claim(i, place)
        | Action::ClaimRuns(i, place)
        | Action::Claimed(i, place)
        | Action::Load(i, place)
        | Action::Send(i, place)
        | Action::Arrives(i, place)
        | Action::Confirmed(i, place)
        | Action::Refused(i, place)
        | Action::HeldBack(i, place)
        | Action::Unreachable(i, place)
        | Action::Lost(i, place)
        | Action::Delayed(i, place)
        | Action::GivesUp(i, place)
        | Action::ConfirmedLate(i, place)
        | Action::Writes(i, place)
        | Action::Written(i, place)
        | Action::AnswerLost(i, place)) = action
        else {
            return;
        };
        let enter = |s: &mut State, step| {
            if let Some(row) = &mut s.instances[i].rows[place] {
                row.step = step;
            }
        };
        let row = s.instances[i].rows[place];
        let destination = row.map_or(0, |row| row.thin.destination);
        match (action, row.map(|row| row.step)) {
            (Action::Claim(..), _) => enter(s, Step::Claiming(Call::Asked)),
            (Action::ClaimRuns(..), _) => {
                let claimed = s.claim(i, place, row.is_some_and(|row| row.thin.current));
                enter(s, Step::Claiming(Call::Ran(claimed)));
            }
            (Action::Claimed(..), Some(Step::Claiming(Call::Ran(claimed)))) => self.engine(s, i).on_claimed(place, claimed),
            // An error: whether it is marked is unknown.
            (Action::AnswerLost(..), Some(Step::Claiming(_))) => {
                s.left.lost_answers -= 1;
                self.engine(s, i).on_claimed(place, false);
            }
            (Action::Load(..), _) => enter(s, Step::Loaded),
            (Action::Send(..), _) => self.engine(s, i).send(place),
            (Action::Arrives(..), _) => {
                enter(s, Step::Sending(Try::Arrived));
                s.arrive(self, place, destination);
            }
            (Action::Confirmed(..), _) => self.engine(s, i).conclude_delivered(place),
            (Action::Refused(..), _) => {
                s.left.refusals -= 1;
                self.engine(s, i).shut(place);
                self.engine(s, i).conclude_retry(place);
            }
            (Action::HeldBack(..), _) => self.engine(s, i).conclude_held_back(place),
            (Action::Unreachable(..), _) => {
                s.left.outages -= 1;
                self.engine(s, i).shut(place);
                self.engine(s, i).conclude_unavailable(place);
            }
            (Action::Lost(..), _) => {
                s.left.losses -= 1;
                enter(s, Step::Sending(Try::Lost));
            }
            // Given up at its deadline; the request, or its answer, is still on its way.
            (Action::Delayed(..), Some(step)) => {
                s.left.late -= 1;
                match step {
                    Step::Sending(Try::Under) => s.messages[place].late[usize::from(destination)] = true,
                    _ => s.instances[i].echoes[place] = true,
                }
                enter(s, Step::Sending(Try::Lost));
            }
            // `Engine::expire`.
            (Action::GivesUp(..), _) => self.engine(s, i).conclude_no_answer(place),
            // `Engine::on_answers`: not the number of the current try.
            (Action::ConfirmedLate(..), step) => {
                s.instances[i].echoes[place] = false;
                if self.lacks(Protection::TryNumbers) && matches!(step, Some(Step::Sending(_))) {
                    self.engine(s, i).conclude_delivered(place);
                }
            }
            (Action::Writes(..), Some(Step::Delivered(_))) => {
                let gone = s.delete(self, place, row.is_some_and(|row| row.thin.current));
                enter(s, Step::Delivered(Call::Ran(gone)));
            }
            (Action::Writes(..), Some(Step::SetBack(setback, _))) => {
                let changed = s.set_back(self, place, row.is_some_and(|row| row.thin.current), setback);
                enter(s, Step::SetBack(setback, Call::Ran(changed)));
            }
            // `Lane::failed`: written again.
            (Action::AnswerLost(..), Some(Step::Delivered(_))) => {
                s.left.lost_answers -= 1;
                enter(s, Step::Delivered(Call::Asked));
            }
            (Action::AnswerLost(..), Some(Step::SetBack(setback, _))) => {
                s.left.lost_answers -= 1;
                enter(s, Step::SetBack(setback, Call::Asked));
            }
            (Action::Written(..), Some(Step::Delivered(Call::Ran(gone)))) => self.engine(s, i).on_delivered(place, gone),
            (Action::Written(..), Some(Step::SetBack(setback, Call::Ran(changed)))) => {
                self.engine(s, i).on_set_back(place, setback.leave_key, changed);
            }
            _ => {}
        }
    }
}

/// A committed message that has left the pending set has got to where it was to go in the end.
fn not_lost(scenario: &Scenario, s: &State) -> bool {
    (0..scenario.messages()).all(|place| {
        let message = s.messages[place];
        let gone = message.tx == Tx::Committed && s.pending[place].is_none() && !message.owed;
        !gone || message.arrived[usize::from(message.edited)]
    })
}

impl Model for Scenario {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut s = State::new(self.budget);
        for instance in &mut s.instances[..self.instances] {
            *instance = Instance { alive: true, leased: true, covered: true, ..Instance::default() };
        }
        vec![s]
    }

    fn actions(&self, s: &State, out: &mut Vec<Action>) {
        self.publishing(s, out);
        if s.owner == (Owner::Gone { leased: true }) {
            out.push(Action::LeaseOfTheGoneEnds);
        }
        for i in 0..self.instances {
            self.belonging(s, i, out);
            if !s.instances[i].alive {
                continue;
            }
            self.reading(s, i, out);
            for place in 0..self.messages() {
                self.sending(s, i, place, out);
            }
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = *s;
        self.act(&mut next, action);
        (next != *s).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("no committed message is lost", not_lost),
            Property::always("only what is committed is sent", |_, s: &State| !s.seen.uncommitted),
            Property::always("FAILED only when the tries are used up", |_, s: &State| !s.seen.failed_early),
        ];
        all.extend(self.never.iter().map(|never| match never {
            Never::Overtaken => Property::always("first deliveries of a key are in order", |_, s: &State| !s.seen.overtaken),
            Never::Duplicate => Property::always("no duplicate", |_, s: &State| !s.seen.duplicate),
            Never::Late => Property::always("no duplicate after a later message of the key", |_, s: &State| !s.seen.late),
            Never::TwoSenders => Property::always("one sender at a time", |_, s: &State| !s.seen.two_senders),
        }));
        all.extend(self.sometimes.iter().map(|sometimes| match sometimes {
            Sometimes::Overtaken => Property::sometimes("some message is overtaken", |_, s: &State| s.seen.overtaken),
            Sometimes::Duplicate => Property::sometimes("some duplicate", |_, s: &State| s.seen.duplicate),
            Sometimes::Late => Property::sometimes("some duplicate after a later message", |_, s: &State| s.seen.late),
            Sometimes::TwoSenders => Property::sometimes("two senders at a time", |_, s: &State| s.seen.two_senders),
            Sometimes::Failed => Property::sometimes("some message fails", |_, s: &State| {
                s.pending.iter().flatten().any(|row| row.status == Status::Failed)
            }),
            Sometimes::AllDelivered => Property::sometimes("all is delivered", |m: &Scenario, s: &State| {
                (0..m.messages()).all(|place| s.messages[place].tx == Tx::Committed && s.pending[place].is_none())
            }),
        }));
        all
    }
}

impl Live for Scenario {
    fn is_fault(action: &Action) -> bool {
        matches!(
            action,
            Action::CommitUnheard(_)
                | Action::Rollback(_)
                | Action::PublisherDies(_)
                | Action::LeaseGetsShort(_)
                | Action::Release(_)
                | Action::Dies(_)
                | Action::Refused(..)
                | Action::Unreachable(..)
                | Action::Lost(..)
                | Action::Delayed(..)
                | Action::AnswerLost(..)
                | Action::Edit(_)
                | Action::Requeue(_)
                | Action::Skip(_)
        )
    }

    /// Each transaction has ended, and of the pending set only FAILED rows are left, and those that these hold up.
    fn is_settled(&self, s: &State) -> bool {
        (0..self.messages()).all(|place| {
            let blocked = |other: usize| {
                self.keys[other] == self.keys[place]
                    && s.pending[other].is_some_and(|row| row.keyed && row.status == Status::Failed)
            };
            match s.messages[place].tx {
                Tx::None | Tx::Open => false,
                Tx::RolledBack => true,
                Tx::Committed => s.pending[place].is_none_or(|row| {
                    row.status == Status::Failed || (row.keyed && self.ordering != Ordering::None && (0..place).any(blocked))
                }),
            }
        })
    }
}
