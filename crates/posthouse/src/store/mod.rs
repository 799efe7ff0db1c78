//! What the outbox and the relay ask of a database. One folder per database, with the same file names in each.
//!
//! | file | what it holds |
//! |---|---|
//! | `publish.rs` | inserting messages inside the caller's transaction |
//! | `migrate.rs` | creating and upgrading the tables |
//! | `relay.rs` | membership, reads, outcomes |
//! | `admin.rs` | what people look at and change |
//! | `upkeep.rs` | partitions ahead, what is wrong with the tables, resizing houses; not in SQLite, where each is next to nothing |
//! | `inbox.rs` | what consumers received |
//! | `runs.rs` | runs of groups |
//! | `retention.rs` | taking old rows out |
//! | `examine.rs` | what `posthouse doctor` asks |
//! | `duty.rs` | work that one instance does for all; audit lines |
//! | `overview.rs` | what a dashboard asks about the tables as a whole |
//!
//! `listing.rs` pages through what people look for, with steps that each database does in its own way.

use std::future::Future;

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::Error;
use crate::message::Checked;

#[cfg(feature = "relay")]
pub(crate) mod adopted;
#[cfg(any(feature = "relay", feature = "inbox"))]
mod deadline;
#[cfg(feature = "relay")]
mod examine;
mod inbox;
mod insert;
#[cfg(any(feature = "relay", feature = "inbox"))]
mod listing;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "relay")]
mod overview;
#[cfg(feature = "relay")]
mod passed;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "relay")]
mod relay;
#[cfg(feature = "relay")]
mod retention;
#[cfg(feature = "relay")]
mod runs;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

#[cfg(any(feature = "relay", feature = "inbox"))]
pub(crate) use deadline::*;
#[cfg(feature = "relay")]
pub use examine::{Examination, Finding, LogFacts, Severity};
#[cfg(feature = "relay")]
pub(crate) use examine::{expected_indexes, expected_tables};
pub use inbox::*;
pub use insert::{InsertStatement, Param};
#[cfg(any(feature = "relay", feature = "inbox"))]
pub use listing::*;
#[cfg(feature = "relay")]
pub use overview::*;
#[cfg(feature = "relay")]
pub use passed::Passed;
#[cfg(feature = "relay")]
pub use relay::*;
#[cfg(feature = "relay")]
pub use retention::*;
#[cfg(feature = "relay")]
pub use runs::*;

/// Connections for people are closed when nobody has asked anything for this long.
#[cfg(feature = "relay")]
pub(crate) const PEOPLE_IDLE: std::time::Duration = std::time::Duration::from_secs(60);

/// The version of the tables this library makes. A newer one in the database is left alone and used as it is.
pub const SCHEMA_VERSION: i32 = 5;

/// How many houses a database gets at its first migration, unless told otherwise.
pub const DEFAULT_HOUSES: u16 = 64;

/// The most houses a database may have.
pub const MAX_HOUSES: u16 = 4096;

/// The names of one set of tables: a schema (PostgreSQL) or database (MySQL), and a prefix.
///
/// Both are checked once, quoted once, and never come from messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    schema: Option<String>,
    prefix: String,
    quote: char,
}

impl Tables {
    /// Checks the names. `schema` None means the connection's own database, and `public` in PostgreSQL.
    pub(crate) fn new(schema: Option<&str>, prefix: &str, quote: char) -> Result<Self, Error> {
        if let Some(schema) = schema {
            identifier("schema", schema, 63)?;
        }
        // The longest name behind a prefix has 24 characters; PostgreSQL cuts names at 63, MySQL refuses above 64.
        identifier("prefix", prefix, 32)?;
        Ok(Self { schema: schema.map(str::to_owned), prefix: prefix.to_owned(), quote })
    }

    /// Quoted and qualified name of a table, view or function.
    pub fn name(&self, table: &str) -> String {
        let q = self.quote;
        match &self.schema {
            Some(schema) => format!("{q}{schema}{q}.{q}{}{table}{q}", self.prefix),
            None => format!("{q}{}{table}{q}", self.prefix),
        }
    }

    /// The schema, if one was named.
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// The prefix.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Fills a statement of ours: `{x}` becomes the qualified name of x, `{-x}` the bare name, `{=x}` the bare name as text
    /// within quotes of the statement's own, `{schema}` the quoted schema.
    pub(crate) fn text(&self, template: &str) -> String {
        let mut out = String::with_capacity(template.len() + 256);
        let mut rest = template;
        while let Some(open) = rest.find('{') {
            out.push_str(&rest[..open]);
            let after = &rest[open + 1..];
            let Some(close) = after.find('}') else { break };
            match &after[..close] {
                "schema" => {
                    let q = self.quote;
                    out.push_str(&format!("{q}{}{q}", self.schema.as_deref().unwrap_or("public")));
                }
                name if name.starts_with('-') => {
                    let q = self.quote;
                    out.push_str(&format!("{q}{}{}{q}", self.prefix, &name[1..]));
                }
                name if name.starts_with('=') => out.push_str(&format!("{}{}", self.prefix, &name[1..])),
                name => out.push_str(&self.name(name)),
            }
            rest = &after[close + 1..];
        }
        out.push_str(rest);
        out
    }

    /// [`text`](Self::text) as a statement sqlx takes. Safe because the only dynamic parts are checked identifiers.
    pub(crate) fn sql(&self, template: &str) -> SqlStr {
        AssertSqlSafe(self.text(template)).into_sql_str()
    }
}

fn identifier(what: &str, name: &str, max: usize) -> Result<(), Error> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_');
    if !first || !bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_') || name.len() > max {
        return Err(Error::Config(format!(
            "{what} {name:?}: must be 1 to {max} characters out of a-z, 0-9 and _, not starting with a digit"
        )));
    }
    Ok(())
}

mod private {
    pub trait Sealed {}
}

/// A database that can hold an outbox: [`sqlx::Postgres`], [`sqlx::MySql`], [`sqlx::Sqlite`].
///
/// Sealed; its methods are for this library.
pub trait Backend: sqlx::Database + private::Sealed + InboxRows {
    /// Whether [`notify`](Self::notify) does anything.
    #[doc(hidden)]
    const NOTIFIES: bool;
    /// How identifiers are quoted.
    #[doc(hidden)]
    const QUOTE: char;
    /// The schema used when none is named.
    #[doc(hidden)]
    const DEFAULT_SCHEMA: Option<&'static str>;
    /// Whether tables can be in a schema other than the connection's own.
    #[doc(hidden)]
    const SCHEMAS: bool;
    /// How `Outbox::begin` starts a transaction.
    #[doc(hidden)]
    const BEGIN: &'static str;
    /// Whether a connection is as good as before after a statement that nobody waited for.
    #[doc(hidden)]
    const STATEMENTS_CAN_BE_DROPPED: bool;
    /// Whether the connection takes the answer to a statement for the answer to that statement, within a time.
    #[doc(hidden)]
    fn in_step(_: &mut Self::Connection) -> impl Future<Output = bool> + Send {
        std::future::ready(true)
    }
    /// Makes the server close this connection.
    #[doc(hidden)]
    fn end_session(_: &mut Self::Connection) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
    /// Whether a transaction is open that sqlx began.
    #[doc(hidden)]
    fn in_transaction(conn: &mut Self::Connection) -> impl Future<Output = Result<bool, Error>> + Send {
        std::future::ready(Ok(sqlx::Connection::is_in_transaction(conn)))
    }
    /// Statement text for other drivers.
    #[doc(hidden)]
    fn insert_statement(tables: &Tables, message: Checked) -> Result<InsertStatement, Error>;
    /// Writes messages on the caller's connection; a dedup key that was used before leaves its message out.
    #[doc(hidden)]
    fn insert<'c>(
        conn: &'c mut Self::Connection,
        tables: &'c Tables,
        messages: Vec<Checked>,
    ) -> impl Future<Output = Result<(), Error>> + Send + 'c;
    /// Creates or upgrades the tables.
    #[doc(hidden)]
    fn migrate<'c>(
        pool: &'c sqlx::Pool<Self>,
        tables: &'c Tables,
        houses: u16,
    ) -> impl Future<Output = Result<(), Error>> + Send + 'c;
    /// The statements that lead from a version (0: no tables) to this library's, for people with their own migration tool.
    #[doc(hidden)]
    fn migration_text(tables: &Tables, houses: u16, from: i32) -> String;
    /// Wakes relays in other processes, where the database has such a signal.
    #[doc(hidden)]
    fn notify(pool: &sqlx::Pool<Self>, tables: &Tables) -> impl Future<Output = Result<(), Error>> + Send;
    /// What is published and not delivered yet, as this connection sees it.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    fn published<'c>(
        conn: &'c mut Self::Connection,
        tables: &'c Tables,
    ) -> impl Future<Output = Result<Vec<crate::testing::Published>, Error>> + Send + 'c;
    /// The store a relay works on, with connections of its own; for people with this many, which are closed when nobody asks.
    #[cfg(feature = "relay")]
    #[doc(hidden)]
    fn store(
        pool: &sqlx::Pool<Self>,
        tables: &Tables,
        deadline: std::time::Duration,
        people: Option<u32>,
    ) -> std::sync::Arc<dyn Store>;
    /// The same for tables of other applications, where rows can be locked one by one.
    #[cfg(feature = "relay")]
    #[doc(hidden)]
    fn adopted(pool: &sqlx::Pool<Self>, tables: &Tables, deadline: std::time::Duration) -> Option<adopted::AdoptedHandle>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_configuration_cannot_carry_sql() {
        for bad in ["", "A", "1a", "a-b", "a\"b", "a`b", "a;drop", "a b", "ä", "a.b", &"x".repeat(33)] {
            assert!(Tables::new(None, bad, '"').is_err(), "{bad:?}");
        }
        let t = Tables::new(Some("app"), "ph_", '"').unwrap();
        assert_eq!(t.text("SELECT {meta} {-idx} {=idx} {schema}"), r#"SELECT "app"."ph_meta" "ph_idx" ph_idx "app""#);
    }
}
