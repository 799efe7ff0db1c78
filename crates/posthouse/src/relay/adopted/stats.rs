//! What scans of adopted tables did and how they stand, as seen from outside.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::DestinationStats;

/// A snapshot of an [`AdoptedRelay`](crate::AdoptedRelay). Counters start at 0 with it and only grow.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AdoptedStats {
    /// By table.
    pub tables: BTreeMap<String, AdoptedTableStats>,
    /// What the catalogue has.
    pub coverage: AdoptedCoverage,
    /// Destinations, by name.
    pub destinations: BTreeMap<String, DestinationStats>,
    /// Database calls that failed.
    pub database_errors: u64,
    /// The last database error, while there has been no success since.
    pub database_error: Option<String>,
    /// Times that the loop of a table was started anew after a panic.
    pub restarts: u64,
}

/// How one adopted table stands.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AdoptedTableStats {
    /// Rows that are to be sent, waiting ones included, when they were last counted; not counted beyond 100 000 of a state.
    pub pending: Option<u64>,
    /// Rows in flight.
    pub in_flight: u64,
    /// Rows confirmed by their receivers, and marked as sent.
    pub sent: u64,
    /// Attempts that failed and will be tried again.
    pub retried: u64,
    /// Rows that were given up.
    pub failed: u64,
    /// Tries that found the destination down.
    pub unavailable: u64,
    /// Outcomes that were not written because somebody else had changed the row.
    pub stale: u64,
    /// Rows that can't be claimed because their id is longer than 255 bytes. More than 0 is an alarm.
    pub too_long: u64,
    /// The end of the last scan that went well.
    pub last_scan: Option<Instant>,
    /// The last error of a scan, while none went well since.
    pub last_error: Option<String>,
}

/// Which tables a mapping means in one database.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdoptedCoverage {
    /// Connections that scanning them opens at most.
    pub connections: u32,
    /// The tables, by name.
    pub tables: Vec<String>,
    /// Names that are missing in their numbering.
    pub gaps: Vec<String>,
    /// Tables whose columns differ from the first one's, and how.
    pub differences: Vec<String>,
    /// Statements that would make indexes that reads need, and that the owner should run.
    pub missing_indexes: Vec<String>,
}
