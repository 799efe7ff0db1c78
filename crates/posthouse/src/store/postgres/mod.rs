//! PostgreSQL 13 and newer.

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
mod upkeep;

#[cfg(feature = "relay")]
pub(crate) use relay::PostgresStore;
