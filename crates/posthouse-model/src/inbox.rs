//! The inbox: a message that a broker delivers again and again, processes that consume it and run it again, and its effect.
//!
//! Steps are named after the functions of `inbox/process.rs` and `inbox/worker.rs` and the statements of
//! `store/postgres/inbox.rs` that take them.

use stateright::{Model, Property};

use crate::search::Live;

/// Tasks that consume, or run what is due: in as many processes.
pub const TASKS: usize = 2;

/// Copies that the broker has of the message at first.
pub const COPIES: usize = 2;

/// What happens at most how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Budget {
    /// A process is killed.
    pub crashes: u8,
    /// The handler fails.
    pub failures: u8,
    /// A commit, or its answer, gets lost: whether it is committed is unknown.
    pub unknown_commits: u8,
    /// A failure can't be recorded.
    pub unrecorded: u8,
    /// A run goes on for longer than its lease.
    pub stalls: u8,
    /// The row of a success is removed while the broker may still deliver the message.
    pub purges: u8,
}

/// What keeps the promises. Each can be taken out, to see which promise it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protection {
    /// The id is inserted in the transaction of the effect.
    OneTransaction,
    /// An id is inserted once.
    UniqueId,
    /// A message is acknowledged after its commit.
    CommitsBeforeAnswer,
    /// A failure is recorded, with a copy of the message, before it is acknowledged.
    RecordsBeforeAnswer,
    /// A claimed run succeeds only under the version of its claim.
    VersionOfSuccess,
    /// What was delivered before is written down before it is run.
    ClaimsRedelivered,
}

/// What is tried out.
#[derive(Debug, Clone, Default)]
pub struct Scenario {
    /// Faults that may happen.
    pub budget: Budget,
    /// The handler kills its process, each time.
    pub poison: bool,
    /// These are taken out.
    pub without: Vec<Protection>,
    /// A message has its effect more than once somewhere.
    pub twice: bool,
}

/// `max_attempts` and `max_claims`: more than one.
const LIMIT: u8 = 2;

/// Everything at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// What the broker has.
    pub copies: [Copied; COPIES],
    /// The row of `posthouse_inbox`.
    pub row: Option<Row>,
    /// Effects that are committed.
    pub effects: u8,
    /// What runs.
    pub tasks: [Task; TASKS],
    /// Faults that may still happen.
    pub left: Budget,
}

/// A copy of the message at the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Copied {
    Waiting { redelivered: bool },
    Delivered,
    Acknowledged,
}

/// A row of `posthouse_inbox`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as there")]
pub struct Row {
    pub status: Status,
    /// `next_attempt_at` is reached.
    pub due: bool,
    pub attempts: u8,
    pub claims: u8,
}

/// `store::InboxStatus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as there")]
pub enum Status {
    Success,
    PendingRetry,
    Retrying,
    Failed,
}

/// A task of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Task {
    /// The delivery that it has in hand.
    pub delivery: Option<u8>,
    /// How far it is.
    pub step: Step,
}

/// How far a message is in a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Step {
    /// Nothing to do.
    #[default]
    Idle,
    /// Taken from the broker.
    Begun {
        /// It was delivered before.
        redelivered: bool,
    },
    /// `Inbox::first_once`: the id is inserted, the handler runs, nothing is committed.
    First,
    /// A handler has failed for the first time, which is not recorded.
    Failed,
    /// The row is known (`inbox_standing`), or taken by a worker.
    Known(Held),
    /// `Inbox::claimed_once`: written down, the handler runs.
    Claimed(Held),
    /// To be answered: acknowledged, or given back.
    Settled {
        /// Acknowledged.
        done: bool,
    },
}

/// What was read of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Held {
    /// Its version is still that of the table.
    pub current: bool,
    /// `attempts`.
    pub attempts: u8,
    /// `claims`.
    pub claims: u8,
}

/// A step, and the task that takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "each step says in `act` what it stands for")]
pub enum Action {
    Delivered(usize, usize),
    Inserts(usize),
    ClaimsNew(usize),
    Commits(usize),
    CommitUnknown(usize, bool),
    HandlerFails(usize),
    Records(usize),
    RecordingFails(usize),
    ClaimsKnown(usize),
    Succeeds(usize),
    SuccessUnknown(usize, bool),
    Answers(usize),
    TakesDue(usize),
    Killed(usize),
    KillsItsProcess(usize),
    LeaseEnds,
    Due,
    Purged,
}

impl State {
    /// The row's version has changed.
    fn bump(&mut self) {
        for task in &mut self.tasks {
            if let Step::Known(held) | Step::Claimed(held) = &mut task.step {
                held.current = false;
            }
        }
    }

    fn settle(&mut self, t: usize, done: bool) {
        let worker = self.tasks[t].delivery.is_none();
        self.tasks[t].step = if worker { Step::Idle } else { Step::Settled { done } };
    }

    /// The process of a task has died: its transaction is rolled back, its delivery is void.
    fn die(&mut self, t: usize) {
        if let Some(copy) = self.tasks[t].delivery
            && self.copies[usize::from(copy)] == Copied::Delivered
        {
            self.copies[usize::from(copy)] = Copied::Waiting { redelivered: true };
        }
        self.tasks[t] = Task::default();
    }

    /// What is known of the row (`inbox_standing`): an answer, unless it is due.
    fn look_up(&mut self, t: usize) {
        match self.row {
            Some(row) if row.due && matches!(row.status, Status::PendingRetry | Status::Retrying) => {
                self.tasks[t].step = Step::Known(Held { current: true, attempts: row.attempts, claims: row.claims });
            }
            _ => self.settle(t, true),
        }
    }

    /// `FAIL`, `SUCCEED` and `CLAIM` find their row.
    fn is_found(&self, held: Held) -> bool {
        held.current && self.row.is_some_and(|row| matches!(row.status, Status::PendingRetry | Status::Retrying))
    }

    /// `FAIL`.
    fn fail(&mut self, held: Held, attempts: u8, claims: u8, failed: bool) {
        if self.is_found(held) {
            let status = if failed { Status::Failed } else { Status::PendingRetry };
            self.row = Some(Row { status, due: false, attempts, claims });
            self.bump();
        }
    }
}

impl Scenario {
    fn lacks(&self, protection: Protection) -> bool {
        self.without.contains(&protection)
    }

    /// Whether another transaction has inserted the id and not ended: then an insert waits.
    fn waits(s: &State) -> bool {
        s.tasks.iter().any(|task| task.step == Step::First)
    }

    fn steps(&self, s: &State, t: usize, out: &mut Vec<Action>) {
        let task = s.tasks[t];
        match task.step {
            Step::Idle => {
                for (copy, at) in s.copies.iter().enumerate() {
                    if matches!(at, Copied::Waiting { .. }) {
                        out.push(Action::Delivered(t, copy));
                    }
                }
                if s.row.is_some_and(|row| row.due && matches!(row.status, Status::PendingRetry | Status::Retrying)) {
                    out.push(Action::TakesDue(t));
                }
            }
            Step::Begun { redelivered } => {
                if !Self::waits(s) || self.lacks(Protection::UniqueId) || self.lacks(Protection::OneTransaction) {
                    out.push(if redelivered && !self.lacks(Protection::ClaimsRedelivered) {
                        Action::ClaimsNew(t)
                    } else {
                        Action::Inserts(t)
                    });
                }
            }
            Step::First if self.poison => out.push(Action::KillsItsProcess(t)),
            Step::First => {
                out.push(Action::Commits(t));
                if s.left.failures > 0 {
                    out.push(Action::HandlerFails(t));
                }
                if s.left.unknown_commits > 0 {
                    out.extend([Action::CommitUnknown(t, true), Action::CommitUnknown(t, false)]);
                }
            }
            Step::Failed => {
                if !Self::waits(s) {
                    out.push(Action::Records(t));
                }
                if s.left.unrecorded > 0 {
                    out.push(Action::RecordingFails(t));
                }
            }
            Step::Known(_) => out.push(Action::ClaimsKnown(t)),
            Step::Claimed(_) if self.poison => out.push(Action::KillsItsProcess(t)),
            Step::Claimed(_) => {
                out.push(Action::Succeeds(t));
                if s.left.failures > 0 {
                    out.push(Action::HandlerFails(t));
                }
                if s.left.unknown_commits > 0 {
                    out.extend([Action::SuccessUnknown(t, true), Action::SuccessUnknown(t, false)]);
                }
            }
            Step::Settled { .. } => out.push(Action::Answers(t)),
        }
        if s.left.crashes > 0 && task.step != Step::Idle {
            out.push(Action::Killed(t));
        }
    }

    /// `INSERT_SUCCESS` with the effect, and COMMIT.
    fn commit(&self, s: &mut State) {
        s.effects += 1;
        if s.row.is_none() {
            s.row = Some(Row { status: Status::Success, due: false, attempts: 0, claims: 0 });
        }
    }

    /// `SUCCEED` with the effect, and COMMIT; rolled back where another process took the row over.
    fn succeed(&self, s: &mut State, held: Held) -> bool {
        let found = s.is_found(held) || self.lacks(Protection::VersionOfSuccess);
        if found {
            s.effects += 1;
            s.row = Some(Row { status: Status::Success, due: false, attempts: 0, claims: 0 });
            s.bump();
        }
        found
    }

    fn act(&self, s: &mut State, action: Action) {
        match action {
            // `Intake::take`.
            Action::Delivered(t, copy) => {
                let redelivered = s.copies[copy] == Copied::Waiting { redelivered: true };
                let early = self.lacks(Protection::CommitsBeforeAnswer);
                s.copies[copy] = if early { Copied::Acknowledged } else { Copied::Delivered };
                s.tasks[t] = Task { delivery: Some(copy as u8), step: Step::Begun { redelivered } };
            }
            // `Inbox::first_once` up to the handler.
            Action::Inserts(t) => {
                if s.row.is_some() && !self.lacks(Protection::UniqueId) {
                    s.look_up(t);
                    return;
                }
                if self.lacks(Protection::OneTransaction) {
                    s.row = Some(Row { status: Status::Success, due: false, attempts: 0, claims: 0 });
                }
                s.tasks[t].step = Step::First;
            }
            // `Inbox::claim_new`.
            Action::ClaimsNew(t) => {
                if s.row.is_some() {
                    s.look_up(t);
                    return;
                }
                s.row = Some(Row { status: Status::Retrying, due: false, attempts: 0, claims: 1 });
                s.tasks[t].step = Step::Claimed(Held { current: true, attempts: 0, claims: 1 });
            }
            Action::Commits(t) => {
                self.commit(s);
                s.settle(t, true);
            }
            // The answer to COMMIT is lost, so it is given back.
            Action::CommitUnknown(t, committed) => {
                s.left.unknown_commits -= 1;
                if committed {
                    self.commit(s);
                }
                s.settle(t, false);
            }
            Action::HandlerFails(t) => {
                s.left.failures -= 1;
                match s.tasks[t].step {
                    Step::First if self.lacks(Protection::RecordsBeforeAnswer) => s.settle(t, true),
                    Step::First => s.tasks[t].step = Step::Failed,
                    Step::Claimed(held) => {
                        let attempts = held.attempts + 1;
                        s.fail(held, attempts, 0, attempts >= LIMIT);
                        s.settle(t, true);
                    }
                    _ => {}
                }
            }
            // The end of `Inbox::first`: where somebody else has written about it meanwhile, that stands.
            Action::Records(t) => {
                s.row.get_or_insert(Row { status: Status::PendingRetry, due: false, attempts: 1, claims: 0 });
                s.settle(t, true);
            }
            Action::RecordingFails(t) => {
                s.left.unrecorded -= 1;
                s.settle(t, false);
            }
            // `Inbox::claim_known`, or `Worker::try_row`.
            Action::ClaimsKnown(t) => {
                let Step::Known(held) = s.tasks[t].step else { return };
                if held.claims >= LIMIT {
                    s.fail(held, held.attempts, held.claims, true);
                    s.settle(t, true);
                } else if s.is_found(held) {
                    let claims = held.claims + 1;
                    s.row = Some(Row { status: Status::Retrying, due: false, attempts: held.attempts, claims });
                    s.bump();
                    s.tasks[t].step = Step::Claimed(Held { current: true, attempts: held.attempts, claims });
                } else if s.tasks[t].delivery.is_some() {
                    // Somebody else was quicker.
                    s.tasks[t].step = Step::Begun { redelivered: true };
                } else {
                    s.settle(t, true);
                }
            }
            // `Inbox::claimed_once`. One that lost its claim rolls back, and answers what is known.
            Action::Succeeds(t) => {
                let Step::Claimed(held) = s.tasks[t].step else { return };
                self.succeed(s, held);
                s.settle(t, true);
            }
            Action::SuccessUnknown(t, committed) => {
                s.left.unknown_commits -= 1;
                let Step::Claimed(held) = s.tasks[t].step else { return };
                if committed {
                    self.succeed(s, held);
                }
                s.settle(t, false);
            }
            // `Answerable::answer`.
            Action::Answers(t) => {
                if let (Some(copy), Step::Settled { done }) = (s.tasks[t].delivery, s.tasks[t].step) {
                    let answered = if done { Copied::Acknowledged } else { Copied::Waiting { redelivered: true } };
                    s.copies[usize::from(copy)] = answered;
                }
                s.tasks[t] = Task::default();
            }
            // `TAKE`.
            Action::TakesDue(t) => {
                let Some(row) = s.row else { return };
                s.row = Some(Row { status: Status::Retrying, due: false, ..row });
                s.bump();
                s.tasks[t].step = Step::Known(Held { current: true, attempts: row.attempts, claims: row.claims });
            }
            Action::Killed(t) => {
                s.left.crashes -= 1;
                s.die(t);
            }
            Action::KillsItsProcess(t) => s.die(t),
            // A lease is renewed while its run goes on, or is longer than a run may take.
            Action::LeaseEnds | Action::Due => {
                if action == Action::LeaseEnds && Self::is_run(s) {
                    s.left.stalls -= 1;
                }
                if let Some(row) = &mut s.row {
                    row.due = true;
                }
            }
            Action::Purged => {
                s.left.purges -= 1;
                s.row = None;
            }
        }
    }

    /// The row's claim is that of a run that goes on.
    fn is_run(s: &State) -> bool {
        s.tasks.iter().any(|task| matches!(task.step, Step::Known(held) | Step::Claimed(held) if held.current))
    }
}

/// A message whose last copy is acknowledged has had its effect, or there is a row that says what is to become of it.
fn not_lost(_: &Scenario, s: &State) -> bool {
    let kept = s.copies.iter().any(|copy| *copy != Copied::Acknowledged);
    kept || s.effects > 0 || s.row.is_some_and(|row| row.status != Status::Success)
}

impl Model for Scenario {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let copies = [Copied::Waiting { redelivered: false }; COPIES];
        vec![State { copies, row: None, effects: 0, tasks: Default::default(), left: self.budget }]
    }

    fn actions(&self, s: &State, out: &mut Vec<Action>) {
        for t in 0..TASKS {
            self.steps(s, t, out);
        }
        match s.row {
            Some(Row { status: Status::PendingRetry, due: false, .. }) => out.push(Action::Due),
            Some(Row { status: Status::Retrying, due: false, .. }) if s.left.stalls > 0 || !Self::is_run(s) => {
                out.push(Action::LeaseEnds);
            }
            Some(Row { status: Status::Success, .. }) if s.left.purges > 0 => out.push(Action::Purged),
            _ => {}
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = *s;
        self.act(&mut next, action);
        (next != *s).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut all = vec![
            Property::always("no message is lost", not_lost),
            Property::always("a success has had its effect", |_, s: &State| {
                s.effects > 0 || s.row.is_none_or(|row| row.status != Status::Success)
            }),
            Property::always("what failed has had no effect", |_, s: &State| {
                s.effects == 0 || s.row.is_none_or(|row| row.status != Status::Failed)
            }),
        ];
        if self.twice {
            all.push(Property::sometimes("two effects", |_, s: &State| s.effects > 1));
        } else {
            all.push(Property::always("one effect at most", |_, s: &State| s.effects < 2));
        }
        all
    }
}

impl Live for Scenario {
    fn is_fault(action: &Action) -> bool {
        matches!(
            action,
            Action::CommitUnknown(..)
                | Action::HandlerFails(_)
                | Action::RecordingFails(_)
                | Action::SuccessUnknown(..)
                | Action::Killed(_)
                | Action::Purged
        )
    }

    /// Every copy is acknowledged, and the message is done with.
    fn is_settled(&self, s: &State) -> bool {
        let done = s.row.is_none_or(|row| matches!(row.status, Status::Success | Status::Failed));
        s.copies.iter().all(|copy| *copy == Copied::Acknowledged) && done && s.tasks == [Task::default(); TASKS]
    }
}
