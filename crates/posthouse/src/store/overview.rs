//! [`OverviewStore`]: what a dashboard asks about a set of tables as a whole.

use std::fmt;

use serde::Serialize;

use super::Reply;

/// How far [`OverviewStore::progress`] had counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// The newest receipt's id.
    pub receipt: i64,
    /// The newest failed attempt's id.
    pub attempt: i64,
}

/// What all instances together did since an earlier [`Seen`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// How far was counted now.
    pub seen: Seen,
    /// Lowest and highest row id of the log; None while it is empty. Ids have gaps where publishing was rolled back.
    pub log: Option<(i64, i64)>,
    /// Messages in receipts; of up to [`MOST_RECEIPTS`] receipts.
    pub delivered: i64,
    /// Attempts that failed; up to [`MOST_RECEIPTS`].
    pub failed_attempts: i64,
    /// Milliseconds from publishing to the confirmation, of the oldest message of up to [`MOST_LATENCIES`] batches.
    /// Delayed messages are left out.
    pub latencies_ms: Vec<i64>,
}

/// Receipts that are counted at once. At a higher rate the rest is left out.
pub const MOST_RECEIPTS: i64 = 20_000;

/// Batches whose latency is looked at.
pub const MOST_LATENCIES: i64 = 50;

/// An instance that is known to a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct InstanceRow {
    /// Its name.
    pub instance: String,
    /// When it joined, milliseconds since 1970 UTC.
    pub started_ms: i64,
    /// What is left of its lease, in milliseconds. Not positive: it ran out.
    pub lease_left_ms: i64,
    /// The houses it takes, such as `0-31,40`; None: all.
    pub houses: Option<String>,
    /// The houses it takes only for a run; None: none.
    pub run_houses: Option<String>,
    /// How many houses it owns.
    pub owned: i64,
}

/// A house, who owns it and what waits in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HouseLag {
    /// House number.
    pub house: i32,
    /// The instance that owns it.
    pub owner: Option<String>,
    /// Whether the owner's lease is valid.
    pub alive: bool,
    /// Counts its owners.
    pub epoch: i64,
    /// Messages whose delivery goes on.
    pub pending: i64,
    /// Messages that were given up.
    pub failed: i64,
    /// Age of the oldest pending one in milliseconds; None when there is none.
    pub oldest_ms: Option<i64>,
}

/// What a dashboard asks about a set of tables as a whole. Every call has a deadline inside.
pub trait OverviewStore: Send + Sync + fmt::Debug {
    /// What was done since; without `since` only how far things are now.
    fn progress(&self, since: Option<Seen>) -> Reply<'_, Progress>;
    /// Instances by name, also those whose lease ran out lately.
    fn instances(&self) -> Reply<'_, Vec<InstanceRow>>;
    /// Every house by its number. Reads the whole pending set once.
    fn lag(&self) -> Reply<'_, Vec<HouseLag>>;
}
