//! SQLite 3.40 and newer.
//!
//! One file, one writer at a time: so there is one house, and every write of the relay begins with `BEGIN IMMEDIATE`, which
//! waits for its turn instead of failing half-way. Times are integers, milliseconds since 1970 UTC: the resolution of SQLite's
//! clock, which is the machine's wall clock. When somebody sets it back, due times and leases shift by as much.

#[cfg(feature = "relay")]
mod admin;
#[cfg(feature = "relay")]
mod audit;
#[cfg(feature = "relay")]
mod duty;
#[cfg(feature = "relay")]
mod examine;
#[cfg(feature = "inbox")]
mod inbox;
mod migrate;
#[cfg(feature = "relay")]
mod overview;
mod publish;
#[cfg(feature = "relay")]
mod relay;
#[cfg(feature = "relay")]
mod retention;
#[cfg(feature = "relay")]
mod runs;

#[cfg(feature = "relay")]
pub(crate) use relay::SqliteStore;

/// Now, in milliseconds since 1970 UTC; the same within one statement. (`'subsec'` came with SQLite 3.42.)
macro_rules! now {
    () => {
        "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)"
    };
}
pub(crate) use now;

/// Begins a transaction that writes. A deferred one that has read can't wait for its turn to write: it fails.
const WRITE: &str = "BEGIN IMMEDIATE";
