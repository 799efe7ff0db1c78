//! MySQL 8.0.16 and newer, MariaDB 10.6 and newer: only what both understand.

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
pub(crate) use relay::MySqlStore;

/// The server's number of an error; what it means doesn't depend on the language of its text.
fn number(e: &sqlx::Error) -> Option<u16> {
    let sqlx::Error::Database(d) = e else { return None };
    d.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>().map(sqlx::mysql::MySqlDatabaseError::number)
}
