//! What there is: the tables, the instances' memory, and what the receiver has got.

use std::hash::{Hash, Hasher};

use super::Budget;
use crate::digest::digest;

/// Messages at most. Ids are counted from 1, places in arrays from 0.
pub const MESSAGES: usize = 3;

/// Keys at most.
pub const KEYS: usize = 2;

/// Processes with a relay at most.
pub const INSTANCES: usize = 2;

/// Destinations: the one that was published to, and the one that an operator's edit leads to.
pub const DESTINATIONS: usize = 2;

/// Everything at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// `posthouse_message`, and what has become of each.
    pub messages: [Message; MESSAGES],
    /// `posthouse_pending`, as others see it: committed.
    pub pending: [Option<Pending>; MESSAGES],
    /// `posthouse_house`: one house, which is all that one message's protocol ever touches.
    pub owner: Owner,
    /// `posthouse_meta.changes`.
    pub changes: u8,
    /// `posthouse_audit`: the last change of each message.
    pub touched: [u8; MESSAGES],
    /// The relays.
    pub instances: [Instance; INSTANCES],
    /// Faults that may still happen.
    pub left: Budget,
    /// What was seen on the way here.
    pub seen: Seen,
}

/// A row of the log, its transaction, and its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Message {
    /// Its publisher's transaction.
    pub tx: Tx,
    /// Its destination acted on it.
    pub arrived: [bool; DESTINATIONS],
    /// A copy that its sender has given up may still get there.
    pub late: [bool; DESTINATIONS],
    /// Failed tries since it was published, requeued or edited.
    pub failures: u8,
    /// The places of messages of its key that may go first, because it had left the queue (`on_exhausted = "skip"`, or skipped by
    /// a person).
    pub may_pass: u8,
    /// An operator sent it to the second destination.
    pub edited: bool,
    /// Committed without its pending row, which only a broken publisher does.
    pub owed: bool,
}

/// A publisher's transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Tx {
    /// Not begun.
    #[default]
    None,
    /// The row is inserted and has its id.
    Open,
    /// Committed.
    Committed,
    /// Rolled back.
    RolledBack,
}

/// A row of `posthouse_pending`. Its version is not a number here: whoever read the row knows whether that is still the
/// [current](Thin::current) one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pending {
    /// `status`.
    pub status: Status,
    /// `due_at`.
    pub due: Due,
    /// `attempts`.
    pub attempts: u8,
    /// `claims`.
    pub claims: u8,
    /// `destination`.
    pub destination: u8,
    /// `key_hash` is not null.
    pub keyed: bool,
}

/// `posthouse_pending.status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Status {
    Pending,
    Sending,
    Failed,
}

/// `posthouse_pending.due_at`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Due {
    /// NULL: fresh.
    Fresh,
    /// Reached.
    Now,
    /// In the future.
    Later,
    /// 9999-12-31.
    Never,
}

/// `posthouse_house.owner`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// NULL.
    Free,
    /// The present life of a process; its lease is [`Instance::leased`].
    Of(u8),
    /// A name that nobody uses any more: a process that died, or that lost its lease and joined again under another name.
    Gone {
        /// The lease hasn't run out yet.
        leased: bool,
    },
}

/// A process with a relay. One that isn't alive is as it is by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Instance {
    /// The process runs.
    pub alive: bool,
    /// The database says that its lease is valid (`posthouse_instance.lease_until`).
    pub leased: bool,
    /// Its own clock says that what is left of the lease covers a send (`Engine::lease_covers_a_send`).
    pub covered: bool,
    /// The house, while the engine believes that it is its own.
    pub house: Option<HouseState>,
    /// `Engine::rows`.
    pub rows: [Option<Row>; MESSAGES],
    /// `Engine::keys`.
    pub keys: [Queue; KEYS],
    /// `Engine::key_reads`.
    pub key_reads: [bool; KEYS],
    /// `Engine::recent`.
    pub recent: [Recent; MESSAGES],
    /// `Passed`.
    pub passed: [Passed; KEYS],
    /// `Reading::changes`, and `Reading::changes_seen`.
    pub changes: Option<u8>,
    /// See there.
    pub changes_seen: u8,
    /// The read under way in the fast lane, and the one in the slow lane.
    pub fast: Option<Read>,
    /// See there.
    pub slow: Option<Read>,
    /// `Destination::breaker`.
    pub breaker: Breaker,
    /// `Destination::lag`.
    pub lag: Lag,
    /// Answers to tries that were given up, which may still come.
    pub echoes: [bool; MESSAGES],
    /// A pipelining transport holds a key's messages back, until one that follows none.
    pub shut: [bool; KEYS],
    /// It was told of a commit. Only looked at where that alone makes it read.
    pub woken: bool,
}

/// `engine::HouseState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as there")]
pub struct HouseState {
    pub mark: u8,
    pub suspect: bool,
    pub windows: [Option<Window>; DESTINATIONS],
    pub polled_out: bool,
    pub due_read: bool,
    pub draining: bool,
}

/// `engine::Window`; those that it holds are [`Step::Held`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as there")]
pub struct Window {
    pub left: u8,
    pub open: u8,
}

/// `engine::Row`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// How far it is.
    pub step: Step,
    /// What was read of it.
    pub thin: Thin,
    /// It waits in its key's queue (`Row::key` is some).
    pub queued: bool,
    /// `Row::suspect`.
    pub suspect: bool,
    /// `Row::claimed`.
    pub claimed: bool,
    /// `Row::outdated`.
    pub outdated: bool,
    /// `Delivery::follows`.
    pub follows: bool,
}

/// `store::Thin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Thin {
    /// `version` is that of the row in the table.
    pub current: bool,
    /// `attempts`.
    pub attempts: u8,
    /// `claims`.
    pub claims: u8,
    /// `destination`.
    pub destination: u8,
    /// `key` is some.
    pub keyed: bool,
    /// `before`; 0 is none.
    pub before: u8,
}

/// `engine::State`, in the steps that others can come in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Waiting behind another of its key.
    Chained,
    /// Waiting, and let go.
    Ready,
    /// Waiting to be claimed.
    MustClaim,
    /// Waiting for suspects.
    Held,
    /// Claiming.
    Claiming(Call),
    /// Loading, or loaded.
    Loaded,
    /// Sending.
    Sending(Try),
    /// Writing, delivered.
    Delivered(Call),
    /// Writing, not delivered.
    SetBack(Setback, Call),
}

/// A try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Try {
    /// On its way to the receiver.
    Under,
    /// The receiver has acted; its confirmation is on its way.
    Arrived,
    /// Nobody will answer.
    Lost,
}

/// A statement that writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// On its way.
    Asked,
    /// It has taken effect, with or without a row; the answer is on its way.
    Ran(bool),
}

/// `store::Setback`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as there")]
pub struct Setback {
    pub attempts: u8,
    pub claims: u8,
    /// `wait` is none.
    pub failed: bool,
    pub leave_key: bool,
}

/// `ordering::KeyQueue`, as sets of places.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "named as there")]
pub struct Queue {
    pub chain: u8,
    pub active: u8,
    pub flying: u8,
    pub broken: bool,
    pub more: bool,
}

/// An entry of `ordering::Recent`: which of the reads under way may have seen the row before it left memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Recent {
    pub fast: bool,
    pub slow: bool,
    pub delivered: bool,
}

/// An entry of `store::Passed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Passed {
    pub upto: u8,
    pub left_out: bool,
}

/// A read that is under way. Its snapshot is taken when it begins; its answer is dealt with later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Read {
    /// Which.
    pub kind: Kind,
    /// The rows that it found.
    pub rows: [Option<Thin>; MESSAGES],
    /// Those whose predecessor is still to be asked for (the second statement of the forward read).
    pub probe: u8,
    /// `HousePoll::max_id`, or the cursor that a read of one destination began at.
    pub upto: u8,
    /// `Poll::changes`.
    pub changes: u8,
    /// Nothing was left out of it.
    pub unfiltered: bool,
    /// The house has been ours since it began (`HouseState::life`).
    pub same_life: bool,
}

/// Kinds of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named as in reading.rs")]
pub enum Kind {
    Poll,
    Due,
    Keys,
    Destination,
    /// With the places of the rows that were touched.
    Changes(u8),
    Sweep,
}

/// `destination::Breaker`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(missing_docs, reason = "named as there")]
pub enum Breaker {
    #[default]
    Closed,
    Open {
        /// Its time hasn't come yet.
        waiting: bool,
    },
}

/// `Destination::lag`, for the one house.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Lag {
    /// Read with the others.
    #[default]
    None,
    /// Left out, without a cursor for the house.
    Unknown,
    /// Left out; rows above this id are to be read.
    From(u8),
}

/// What was seen; never taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seen {
    /// Something arrived that was not committed.
    pub uncommitted: bool,
    /// A message arrived for the first time before an earlier one of its key had.
    pub overtaken: bool,
    /// A message arrived twice.
    pub duplicate: bool,
    /// A duplicate arrived after a later message of its key.
    pub late: bool,
    /// Two instances were sending one message.
    pub two_senders: bool,
    /// A message became FAILED with tries left.
    pub failed_early: bool,
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        let Self { messages, pending, owner, changes, touched, instances, left, seen } = self;
        // Those that don't run have nothing to tell them apart.
        let instances = instances.each_ref().map(|instance| Some(instance).filter(|i| i.alive));
        hasher.write_u128(digest(&(messages, pending, owner, changes, touched, instances, left, seen)));
    }
}

impl State {
    pub(super) fn new(left: Budget) -> Self {
        Self {
            messages: Default::default(),
            pending: [None; MESSAGES],
            owner: Owner::Free,
            changes: 0,
            touched: [0; MESSAGES],
            instances: Default::default(),
            left,
            seen: Seen::default(),
        }
    }
}

impl Step {
    /// `State::Waiting`.
    pub(super) fn waits(self) -> bool {
        matches!(self, Self::Chained | Self::Ready | Self::MustClaim | Self::Held)
    }
}

impl Pending {
    /// `status <> 'FAILED' AND (due_at IS NULL OR due_at <= now)`.
    pub(super) fn is_eligible(&self) -> bool {
        self.status != Status::Failed && matches!(self.due, Due::Fresh | Due::Now)
    }
}

impl Recent {
    pub(super) fn is_there(self) -> bool {
        self.fast || self.slow
    }
}

/// The places in a set, lowest first.
pub(super) fn places(set: u8) -> impl Iterator<Item = usize> {
    (0..8).filter(move |place| set & 1 << place != 0)
}
