//! The [`Store`] trait: what a relay asks of a database, and the rows it gets.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use super::{AlertStore, Examination, Listed, OverviewStore, Passed, RetentionStore, RunStore};
use crate::{Envelope, Error, Houses};

/// What a store answers with.
pub type Reply<'a, T> = BoxFuture<'a, Result<T, Error>>;

/// A house number: `hash(destination, key) mod houses`, the unit that instances share out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct House(pub i32);

impl fmt::Display for House {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies one ordering key (destination and key together) within a database.
///
/// PostgreSQL and MySQL store a 60-bit hash; SQLite, which has no hash function, stores the text itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyHash {
    /// The stored number; 0 where `text` is what is stored.
    pub number: i64,
    /// The stored text.
    pub text: Option<Arc<str>>,
}

impl KeyHash {
    /// A hash that is stored as a number.
    pub fn number(number: i64) -> Self {
        Self { number, text: None }
    }

    /// A key that is stored as text.
    pub fn text(text: &str) -> Self {
        Self { number: 0, text: Some(text.into()) }
    }
}

/// The thin part of a pending message: all but its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thin {
    /// Row id.
    pub id: i64,
    /// Its house.
    pub house: House,
    /// Effective destination.
    pub destination: String,
    /// Its ordering key; None when unkeyed.
    pub key: Option<KeyHash>,
    /// Bytes of content.
    pub size: u32,
    /// Attempts that gave a failure.
    pub attempts: u32,
    /// Tries that gave no result because the process died.
    pub claims: u32,
    /// Guards every change.
    pub version: i32,
    /// The message's own attempt limit.
    pub max_attempts: Option<u32>,
    /// The nearest lower pending id of the same key in the snapshot of the statement that read this row.
    pub before: Option<i64>,
    /// When it is (was) due, in microseconds of the database's clock; None for a fresh message.
    pub due: Option<i64>,
}

/// How far a house has been read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// The house.
    pub house: House,
    /// Rows above this id are wanted.
    pub after: i64,
    /// Rows up to this id are wanted.
    pub upto: i64,
}

/// What the forward read found.
#[derive(Debug, Clone, Default)]
pub struct Poll {
    /// Rows, by house and id.
    pub rows: Vec<Thin>,
    /// One entry per house that was asked for.
    pub houses: Vec<HousePoll>,
    /// Counts operator actions.
    pub changes: i64,
}

/// What the forward read learned about one house.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HousePoll {
    /// The house.
    pub house: House,
    /// Highest pending id, or the mark when nothing lies above it.
    pub max_id: i64,
    /// The read stopped at this id because its limit was reached.
    pub cut_off: Option<i64>,
    /// Microseconds until the earliest due row is due; not positive when one is due already.
    pub next_due: Option<i64>,
}

/// The rows of a forward read on their way to being a [`Poll`].
///
/// Its statement reads, in order of id and without a gap, every row above the mark that is eligible or keyed. So of each key
/// only the first row has to be asked for what stands before it; for the others that is the row before in this very read.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    /// Rows by house and id, and whether they are eligible.
    rows: Vec<(Thin, bool)>,
}

impl Ahead {
    /// Takes a row as its statement gives it: with 1 or 0 for "eligible" in place of what stands before it.
    pub(crate) fn push(&mut self, mut thin: Thin) {
        let eligible = thin.before.take() == Some(1);
        self.rows.push((thin, eligible));
    }

    /// Links rows of one key; answers the first of each key, which must be asked for. With destinations left out of the read,
    /// a row that was edited to one of them leaves a gap in its key, so then all keyed rows must be asked for.
    pub(crate) fn link(&mut self, gaps: bool) -> Vec<&mut Thin> {
        self.rows.sort_unstable_by_key(|(t, _)| (t.house, t.id));
        let mut last: std::collections::HashMap<(House, KeyHash), i64> = std::collections::HashMap::new();
        let mut first = Vec::new();
        for (thin, eligible) in &mut self.rows {
            let Some(key) = thin.key.clone() else { continue };
            match last.insert((thin.house, key), thin.id) {
                Some(before) if !gaps => thin.before = Some(before),
                _ if *eligible => first.push(thin),
                _ => {}
            }
        }
        first
    }

    /// The rows that are eligible, of a read that began with the first row of each key (or behind those that are done).
    pub(crate) fn of_keys(mut self) -> Vec<Thin> {
        self.link(false);
        self.finish(u32::MAX, &mut [])
    }

    /// The rows that are eligible; notes in `houses` where the limit cut the read off.
    pub(crate) fn finish(self, limit: u32, houses: &mut [HousePoll]) -> Vec<Thin> {
        let mut counts: std::collections::HashMap<House, (u32, i64)> = std::collections::HashMap::new();
        for (thin, _) in &self.rows {
            let count = counts.entry(thin.house).or_default();
            *count = (count.0 + 1, thin.id);
        }
        for house in houses {
            house.cut_off = counts.get(&house.house).filter(|(n, _)| *n >= limit).map(|(_, last)| *last);
        }
        self.rows.into_iter().filter(|(_, eligible)| *eligible).map(|(thin, _)| thin).collect()
    }
}

/// A page of due rows.
#[derive(Debug, Clone, Default)]
pub struct DuePage {
    /// Rows, by due time and id.
    pub rows: Vec<Thin>,
    /// Microseconds until the next row that isn't due yet.
    pub next_due: Option<i64>,
}

/// A confirmed delivery, to be removed from the pending set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Its house.
    pub house: House,
    /// Row id.
    pub id: i64,
    /// The version that was read; another one in the table means that somebody else changed the row.
    pub version: i32,
}

/// A try that did not deliver, to be written back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setback {
    /// The row, as in [`Done`].
    pub row: Done,
    /// Attempts, now.
    pub attempts: u32,
    /// Claims, now.
    pub claims: u32,
    /// Wait before the next try; None: FAILED.
    pub wait: Option<Duration>,
    /// It leaves its key's queue.
    pub leave_key: bool,
    /// Why; storable text.
    pub error: String,
    /// The attempt to log; None when no attempt is counted.
    pub attempt: Option<Attempt>,
}

/// A line of the attempt log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// `retry`, `rejected` or `claims`.
    pub outcome: &'static str,
    /// The start of the receiver's response.
    pub response: Option<String>,
    /// How long it took.
    pub took: Duration,
}

/// The houses that an instance is there for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// Those it takes its share of, and keeps.
    pub takes: Houses,
    /// Those it takes only for a run, when it is asked to.
    pub for_runs: Houses,
}

impl Default for Coverage {
    /// It takes all.
    fn default() -> Self {
        Self { takes: Houses::ALL, for_runs: Houses::of([]) }
    }
}

impl Coverage {
    /// Whether it sees to this house, in one way or the other.
    pub fn covers(&self, house: House) -> bool {
        self.takes.contains(house.0) || self.for_runs.contains(house.0)
    }

    /// As it stands in the columns `houses` and `run_houses`.
    pub(crate) fn columns(&self) -> (Option<String>, Option<String>) {
        let takes = (!self.takes.is_all()).then(|| self.takes.to_string());
        let for_runs = (!self.for_runs.is_empty()).then(|| self.for_runs.to_string());
        (takes, for_runs)
    }

    /// Out of these columns. An instance of the version before writes neither, and takes all. What can't be read counts as none:
    /// others then take these houses, or miss them.
    pub(crate) fn of_columns(takes: Option<&str>, for_runs: Option<&str>) -> Self {
        let read = |text: &str| text.parse().unwrap_or_else(|_| Houses::of([]));
        Self { takes: takes.map_or(Houses::ALL, read), for_runs: for_runs.map_or_else(|| Houses::of([]), read) }
    }
}

/// An instance whose lease is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Live {
    /// Its name.
    pub name: String,
    /// What is left of its lease.
    pub left: Duration,
    /// Its houses.
    pub coverage: Coverage,
}

/// Who is alive and who owns what, by the database's clock.
#[derive(Debug, Clone, Default)]
pub struct Membership {
    /// The database's clock, in microseconds since 1970.
    pub now: i64,
    /// Live instances.
    pub live: Vec<Live>,
    /// Every house: owner (if any) and epoch.
    pub houses: Vec<(House, Option<String>, i64)>,
}

/// A house that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// The house.
    pub house: House,
    /// Its new epoch; epochs never restart.
    pub epoch: i64,
    /// Its last owner's lease ran out, so it may hold a message that kills processes.
    pub expired: bool,
}

/// What became of taking houses all together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exactly {
    /// All of them were taken.
    Taken(Vec<Taken>),
    /// None was taken, because live instances own these.
    Held(Vec<(House, String)>),
    /// None was taken, because the asking instance's own lease has run out.
    NoLease,
    /// None was taken, because these don't exist.
    Missing(Vec<House>),
}

/// A house that somebody wants: number, owner, epoch, whether the owner lives, whether who wants it lives.
pub(crate) type Wanted = (i32, Option<String>, i64, bool, bool);

/// Whether houses can be taken all together, and as what. The caller holds the locks under which they were found.
pub(crate) fn exactly(instance: &str, houses: &[House], found: Vec<Wanted>) -> Exactly {
    let missing: Vec<House> = houses.iter().filter(|h| found.iter().all(|f| f.0 != h.0)).copied().collect();
    if !missing.is_empty() {
        return Exactly::Missing(missing);
    }
    if found.iter().any(|f| !f.4) {
        return Exactly::NoLease;
    }
    let others = found.iter().filter(|f| f.3).filter_map(|f| Some((House(f.0), f.1.clone().filter(|owner| owner != instance)?)));
    let held: Vec<_> = others.collect();
    if !held.is_empty() {
        return Exactly::Held(held);
    }
    let taken = |(house, owner, epoch, alive, _): Wanted| Taken {
        house: House(house),
        epoch: epoch + 1,
        expired: owner.is_some() && !alive,
    };
    Exactly::Taken(found.into_iter().map(taken).collect())
}

/// Where the pending rows of some houses end, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ends {
    /// The database's clock, in microseconds since 1970.
    pub now: i64,
    /// The highest pending id of each house; 0 when there is none.
    pub houses: Vec<(House, i64)>,
}

/// A row that an operator touched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Its house.
    pub house: House,
    /// Row id.
    pub id: i64,
    /// Its key after (or before) the change.
    pub key: Option<KeyHash>,
}

/// What maintenance found and did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Upkeep {
    /// Partitions made now.
    pub created: u32,
    /// Partitions ready ahead of the newest id; None where the log isn't partitioned.
    pub ahead: Option<u32>,
    /// What keeps messages from being published or sent until a person mends it: one sentence each, with what to do.
    pub problems: Vec<String>,
}

/// What a missing trigger means.
pub(crate) fn no_trigger(tables: &super::Tables, how: &str) -> String {
    format!(
        "the trigger {} on {} {how}, so messages are published but never sent; make it again with its statement in `posthouse migrate --print`",
        tables.text("{=enqueue}"),
        tables.name("message"),
    )
}

/// A message as the lists show it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MessageRow {
    /// Row id.
    pub id: i64,
    /// Message id.
    pub message_id: String,
    /// Type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Effective destination.
    pub destination: String,
    /// Ordering key.
    pub key: Option<String>,
    /// `PENDING`, `SENDING`, `SENT` or `FAILED`.
    pub status: String,
    /// House.
    pub house: i32,
    /// Failed attempts.
    pub attempts: i32,
    /// Tries without a result.
    pub claims: i32,
    /// Last error.
    pub last_error: Option<String>,
    /// Milliseconds since 1970 UTC.
    pub created_at_ms: i64,
    /// Next try, milliseconds since 1970 UTC; None when it is fresh, sent or failed.
    pub next_attempt_ms: Option<i64>,
    /// Size of payload and headers in bytes.
    pub size: i64,
}

/// One message with everything there is to know.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MessageDetail {
    /// The row.
    #[serde(flatten)]
    pub row: MessageRow,
    /// The destination it was published to; an edit changes only the effective one.
    pub published_to: String,
    /// Media type.
    pub content_type: String,
    /// Headers, as stored (JSON).
    pub headers: Option<String>,
    /// Payload bytes.
    #[serde(skip)]
    pub payload: Vec<u8>,
    /// The failed attempts, oldest first.
    pub history: Vec<AttemptRow>,
    /// When and by which instance it was delivered, if a receipt is still there. Milliseconds since 1970 UTC.
    pub delivered: Option<(i64, String)>,
}

/// A line of the attempt log, as read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttemptRow {
    /// Milliseconds since 1970 UTC.
    pub at_ms: i64,
    /// Attempt number.
    pub attempt: i32,
    /// `retry`, `rejected` or `claims`.
    pub outcome: String,
    /// Why.
    pub error: String,
    /// Start of the response.
    pub response: Option<String>,
    /// Milliseconds.
    pub took_ms: i32,
    /// By which instance.
    pub instance: String,
}

/// Which messages a list shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageFilter {
    /// Only this status.
    pub status: Option<MessageStatus>,
    /// Only this destination.
    pub destination: Option<String>,
    /// Only this key.
    pub key: Option<String>,
    /// Only this message id.
    pub message_id: Option<String>,
    /// Only those created at this time or later, milliseconds since 1970 UTC.
    pub created_after_ms: Option<i64>,
    /// Only those created before this time, milliseconds since 1970 UTC.
    pub created_before_ms: Option<i64>,
    /// Only those with this text in message id, key, type, destination, last error or payload, byte for byte.
    pub text: Option<String>,
    /// Patterns of destinations whose payloads are not searched for text; see [`destination_matches`](super::destination_matches).
    pub sealed: Vec<String>,
    /// How long to search when no index leads to what is wanted. None: [`LIST_TIME`](super::LIST_TIME), with text
    /// [`TEXT_TIME`](super::TEXT_TIME).
    pub within: Option<Duration>,
    /// Only ids below this one (where the page before says that the next one begins).
    pub before: Option<i64>,
    /// At most this many. 1 to 10 000.
    pub limit: u32,
}

/// The statuses people see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MessageStatus {
    /// Waiting for its first or next try.
    Pending,
    /// Marked in flight (suspect windows).
    Sending,
    /// Delivered.
    Sent,
    /// Given up; a person decides.
    Failed,
}

impl MessageStatus {
    /// As it is written in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "PENDING",
            Self::Sending => "SENDING",
            Self::Sent => "SENT",
            Self::Failed => "FAILED",
        }
    }
}

/// What an operator does to messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Try again from the start, now, in its key's place. Applies to FAILED ones and to ones that wait for a retry.
    Requeue,
    /// Give it up: FAILED, and out of its key's queue. Applies to everything that isn't delivered.
    Skip,
    /// Send it to another destination, now, with all its attempts. Applies to everything that isn't delivered.
    Edit {
        /// The new destination.
        destination: String,
    },
}

impl Action {
    /// As the audit log names it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Requeue => "requeue",
            Self::Skip => "skip",
            Self::Edit { .. } => "edit",
        }
    }
}

/// An audit line about something else than one message: a group, an alert, many messages at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Who did it.
    pub actor: &'a str,
    /// What: at most 20 bytes of ASCII.
    pub action: &'a str,
    /// To what.
    pub detail: &'a str,
    /// To how many messages; None where it isn't about messages.
    pub amount: Option<i64>,
}

/// A line of the audit log, as read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AuditRow {
    /// Line number.
    pub id: i64,
    /// Milliseconds since 1970 UTC.
    pub at_ms: i64,
    /// Who did it.
    pub actor: String,
    /// What.
    pub action: String,
    /// To which message; None where it isn't about one message of the outbox.
    pub row_id: Option<i64>,
    /// To what, or with what.
    pub detail: Option<String>,
    /// To how many messages; None in lines about one.
    pub amount: Option<i64>,
}

/// Which lines of the audit log a list shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Only what this person did.
    pub actor: Option<String>,
    /// Only this action.
    pub action: Option<String>,
    /// Only about the message with this row id.
    pub row_id: Option<i64>,
    /// Only lines below this one (where the page before says that the next one begins).
    pub before: Option<i64>,
    /// At most this many. 1 to 10 000.
    pub limit: u32,
}

/// How many messages there are per status and destination. SENT isn't counted here: it is the absence of a pending row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Backlog {
    /// Destination.
    pub destination: String,
    /// PENDING, SENDING or FAILED.
    pub status: String,
    /// Messages.
    pub messages: i64,
    /// Age of the oldest in milliseconds.
    pub oldest_ms: i64,
}

/// Houses of which [`Store::rows_in`] tells.
pub const ORPHAN_HOUSES: usize = 16;

/// Rows up to which [`Store::rows_in`] counts.
pub const ORPHAN_ROWS: u64 = 10_000;

/// What a relay asks of a database. Every call has a deadline inside.
pub trait Store: Send + Sync + fmt::Debug + 'static {
    /// Kind of database, for logs.
    fn kind(&self) -> &'static str;

    /// The most connections it keeps open: its own, beside those of the pool it was made from.
    fn connections(&self) -> u32;

    /// How many connections are open at the moment, and how many of these are idle. Asks nobody.
    fn open(&self) -> (u32, u32);

    /// Fails unless the tables are there and usable; answers (schema version, houses).
    fn check(&self) -> Reply<'_, (i32, u16)>;

    // Membership

    /// Adds an instance with a fresh lease, and tells the others which houses it is there for.
    fn join<'a>(&'a self, instance: &'a str, coverage: &'a Coverage, lease: Duration) -> Reply<'a, ()>;
    /// Renews the lease unless it has run out (then None: join again under another name), and tells who owns what.
    fn renew<'a>(&'a self, instance: &'a str, lease: Duration) -> Reply<'a, Option<Membership>>;
    /// Takes up to `most` of these houses that are free or whose owner's lease ran out.
    fn take<'a>(&'a self, instance: &'a str, among: &'a [House], most: usize) -> Reply<'a, Vec<Taken>>;
    /// Takes all of these houses, or none: each must be free, or its owner's lease run out, or be the instance's own already.
    fn take_exactly<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, Exactly>;
    /// Gives houses back.
    fn release<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, ()>;
    /// Removes the instance and gives back whatever it still owns.
    fn leave<'a>(&'a self, instance: &'a str) -> Reply<'a, ()>;

    // Reads; all see only eligible rows.

    /// The forward read: up to `limit` rows per house above its mark, without the excluded destinations.
    fn poll<'a>(&'a self, marks: &'a [Mark], limit: u32, excluded: &'a [String]) -> Reply<'a, Poll>;
    /// A sweep: rows within the marks that are unkeyed or the lowest of their key, up to `limit` per house.
    fn sweep<'a>(&'a self, marks: &'a [Mark], limit: u32, excluded: &'a [String]) -> Reply<'a, Vec<Thin>>;
    /// Rows whose due time has come, after the cursor (due, id).
    fn due<'a>(&'a self, houses: &'a [House], after: (i64, i64), limit: u32, excluded: &'a [String]) -> Reply<'a, DuePage>;
    /// Where the pending rows of these houses end.
    fn ends<'a>(&'a self, houses: &'a [House]) -> Reply<'a, Ends>;
    /// How far keys are done.
    fn passed(&self) -> &Passed;

    /// Runs of groups.
    fn runs(&self) -> &dyn RunStore;
    /// Alerts.
    fn alerts(&self) -> &dyn AlertStore;
    /// Taking old rows out.
    fn retention(&self) -> &dyn RetentionStore;
    /// What a dashboard asks.
    fn overview(&self) -> &dyn OverviewStore;

    /// The lowest rows of each key, as far as they are eligible, of up to `limit` per key. Starts behind what is [`Passed`].
    fn of_keys<'a>(&'a self, keys: &'a [(House, KeyHash)], limit: u32) -> Reply<'a, Vec<Thin>>;
    /// Rows of one destination above the marks, up to `limit` per house.
    fn of_destination<'a>(&'a self, marks: &'a [Mark], destination: &'a str, limit: u32) -> Reply<'a, Vec<Thin>>;
    /// The content of messages, from the log or the kept table. A row that can't be decoded comes back as its error.
    fn load<'a>(&'a self, ids: &'a [i64]) -> Reply<'a, Vec<(i64, Result<Envelope, String>)>>;
    /// Rows operators touched after change number `since`.
    fn changes<'a>(&'a self, since: i64) -> Reply<'a, Vec<Change>>;

    // Outcomes; every write is guarded by (house, id, version).

    /// Removes delivered rows and writes receipts; answers the ids that were there.
    fn delivered<'a>(&'a self, instance: &'a str, done: &'a [Done]) -> Reply<'a, Vec<i64>>;
    /// Writes tries that did not deliver; answers the ids that were changed.
    fn setback<'a>(&'a self, instance: &'a str, setbacks: &'a [Setback]) -> Reply<'a, Vec<i64>>;
    /// Marks rows SENDING before they are sent: claims + 1, version + 1, due after the lease. Answers the ids that were changed.
    fn claim<'a>(&'a self, instance: &'a str, rows: &'a [Done], lease: Duration) -> Reply<'a, Vec<i64>>;

    // Upkeep and people

    /// Creates partitions ahead and removes instances that are long gone.
    fn upkeep(&self) -> Reply<'_, Upkeep>;
    /// Pending rows in houses of these ranges (both ends included): house and number of rows, of up to [`ORPHAN_HOUSES`] houses,
    /// counted up to [`ORPHAN_ROWS`] each.
    fn rows_in<'a>(&'a self, ranges: &'a [(i32, i32)]) -> Reply<'a, Vec<(House, u64)>>;
    /// Messages by descending id.
    fn list<'a>(&'a self, filter: &'a MessageFilter) -> Reply<'a, Listed<MessageRow>>;
    /// One message by row id.
    fn show(&self, id: i64) -> Reply<'_, Option<MessageDetail>>;
    /// Applies an action to messages by row id, with an audit line each; answers the ids it applied to.
    fn act<'a>(&'a self, ids: &'a [i64], action: &'a Action, actor: &'a str) -> Reply<'a, Vec<i64>>;
    /// Unfinished messages by destination and status.
    fn backlog(&self) -> Reply<'_, Vec<Backlog>>;
    /// Takes a duty (work that one instance does for all) when it is free or its holder's lease has run out, or renews one's own.
    /// True: it is `owner`'s for this long.
    fn duty<'a>(&'a self, duty: &'a str, owner: &'a str, lease: Duration) -> Reply<'a, bool>;
    /// Gives a duty back, so that others need not wait for the end of its lease.
    fn lay_down<'a>(&'a self, duty: &'a str, owner: &'a str) -> Reply<'a, ()>;
    /// What `posthouse doctor` wants to know. Changes nothing (in MySQL a message is published and rolled back, which costs an id).
    fn examine(&self) -> Reply<'_, Examination>;
    /// Writes an audit line about something else than one message.
    fn record<'a>(&'a self, record: &'a Record<'a>) -> Reply<'a, ()>;
    /// Lines of the audit log, newest first. Looks through at most [`AUDIT_SCAN`](super::AUDIT_SCAN) of them.
    fn audits<'a>(&'a self, filter: &'a AuditFilter) -> Reply<'a, Listed<AuditRow>>;
    /// Every house: number, owner, epoch, whether the owner's lease is valid, pending rows.
    fn houses(&self) -> Reply<'_, Vec<HouseRow>>;
    /// Changes the number of houses and re-houses every pending row under one lock; answers how many rows there were.
    fn resize(&self, houses: u16) -> Reply<'_, u64>;

    /// Resolves when another process published; never resolves where the database has no such signal.
    /// Returns (with an error) when its connection broke, to be called again.
    fn listen<'a>(&'a self, heard: &'a (dyn Fn() + Send + Sync)) -> Reply<'a, ()>;
}

/// A house, as `posthouse houses list` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HouseRow {
    /// House number.
    pub house: i32,
    /// The instance that owns it.
    pub owner: Option<String>,
    /// Whether the owner's lease is valid.
    pub alive: bool,
    /// Counts its owners.
    pub epoch: i64,
    /// Pending rows in it.
    pub pending: i64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coverage_is_written_and_read() {
        let houses = |text: &str| text.parse::<Houses>().unwrap();
        let none = || Houses::of([]);
        for (coverage, takes, for_runs) in [
            (Coverage::default(), None, None),
            (Coverage { takes: houses("0-3,9"), for_runs: none() }, Some("0-3,9"), None),
            (Coverage { takes: none(), for_runs: Houses::ALL }, Some(""), Some("all")),
            (Coverage { takes: houses("1"), for_runs: houses("2") }, Some("1"), Some("2")),
        ] {
            let columns = coverage.columns();
            assert_eq!((columns.0.as_deref(), columns.1.as_deref()), (takes, for_runs));
            assert_eq!(Coverage::of_columns(takes, for_runs), coverage);
        }
        let strange = Coverage::of_columns(Some("even ones"), None);
        assert!(!strange.covers(House(2)), "what can't be read is covered by nobody");
        assert!(Coverage { takes: none(), for_runs: houses("2") }.covers(House(2)));
    }
}
