//! What an inbox did, as seen from outside.

use crate::Histogram;

/// A snapshot of what an inbox and its clones did in this process. Counters start at 0 with the inbox and only grow. What others
/// did, and what waits, stands in the database: [`InboxStore::backlog`](crate::store::InboxStore::backlog).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboxStats {
    /// Messages that had their effect.
    pub processed: u64,
    /// Messages that had their effect before; the handler was not called.
    pub duplicates: u64,
    /// Runs that failed and are tried again.
    pub retried: u64,
    /// Messages that were given up or set aside: FAILED.
    pub failed: u64,
    /// How often a message could neither be handled nor be written down, because the database didn't answer or refused it.
    pub errors: u64,
    /// How long calls of handlers took, whatever came of them.
    pub handler_time: Histogram,
}
