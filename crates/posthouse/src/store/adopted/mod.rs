//! Tables of other applications: claims on their rows, and what came of them, written back.
//!
//! | file | what it holds |
//! |---|---|
//! | `sql.rs` | putting statements together out of quoted names and bound values |
//! | `catalogue.rs` | which tables there are, what their columns are, whether an index fits |
//! | `claim.rs` | finding rows, claiming them, renewing claims |
//! | `settle.rs` | what came of them, written back unless somebody else has changed the row |
//! | `mysql.rs`, `postgres.rs` | connections, and what the two catalogues say |
//!
//! The application that owns the table writes the same rows at any time. So a row is claimed under its own lock, which is tried
//! and not waited for; its state is changed only from what it was seen to be; and what comes of it is written only if the row is
//! still as it was claimed. Locks are taken in one order, the owner's row first and Posthouse's own second, by claims and
//! write-backs alike.
#![cfg_attr(not(any(feature = "mysql", feature = "postgres")), allow(dead_code, unused_imports, reason = "SQLite has none"))]

mod catalogue;
mod claim;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod settle;
mod sql;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;

use crate::settings::Template;
use crate::store::{Tables, on};
use crate::{Adopted, Error, ErrorKind};

pub(crate) use catalogue::Found;
use claim::{Cells, cell};
#[cfg(feature = "mysql")]
pub(crate) use mysql::MySqlAdopted;
#[cfg(feature = "postgres")]
pub(crate) use postgres::PostgresAdopted;
pub(crate) use settle::{Settle, Settled, What};
pub(crate) use sql::Kind;
use sql::{Column, Dialect, Sql};

/// The longest row id that Posthouse's own table holds, in bytes.
const LONGEST_ID: usize = 255;

/// What scanning adopted tables asks of a database.
pub(crate) trait AdoptedStore: fmt::Debug + Send + Sync {
    /// Fails unless Posthouse's own tables are there and new enough.
    fn check(&self) -> BoxFuture<'_, Result<(), Error>>;
    /// The tables that the mapping means, as they are.
    fn discover<'a>(&'a self, mapping: &'a Adopted) -> BoxFuture<'a, Result<Found, Error>>;
    /// Ids of rows that may be claimed, in ascending order.
    fn candidates<'a>(&'a self, source: &'a Source, ask: &'a Ask) -> BoxFuture<'a, Result<Vec<String>, Error>>;
    /// Ids of rows whose claim has run out.
    fn expired<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<Vec<String>, Error>>;
    /// Claims those of the rows that may still be claimed and that nobody else holds.
    fn claim<'a>(&'a self, source: &'a Source, ids: &'a [String], claim: &'a Claim) -> BoxFuture<'a, Result<Taken, Error>>;
    /// Renews claims; the ids of those that are still ours.
    fn renew<'a>(
        &'a self,
        source: &'a Source,
        owner: &'a str,
        ids: &'a [String],
        lease: Duration,
    ) -> BoxFuture<'a, Result<Vec<String>, Error>>;
    /// Writes back what came of rows. `patient`: waits for locks.
    fn settle<'a>(
        &'a self,
        source: &'a Source,
        owner: (&'a str, Duration),
        rows: &'a [Settle],
        patient: bool,
    ) -> BoxFuture<'a, Result<Vec<Settled>, Error>>;
    /// How many rows are to be sent, waiting ones included; at most a bit more than 100 000 are counted.
    fn pending<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<u64, Error>>;
    /// Connections it opens at most.
    fn connections(&self) -> u32;
}

/// An [`AdoptedStore`], as [`Backend`](crate::store::Backend) hands it over.
#[derive(Debug, Clone)]
pub struct AdoptedHandle(pub(crate) Arc<dyn AdoptedStore>);

/// One adopted table, with the columns that its mapping names.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    /// The table's name, behind its schema's if that is not the one of Posthouse's own tables.
    pub(crate) name: String,
    /// Quoted and qualified.
    table: String,
    id: Column,
    state: Column,
    key: Option<Column>,
    attempts: Option<Column>,
    max_attempts: Option<Column>,
    next_attempt: Option<Column>,
    error: Option<Column>,
    version: Option<Column>,
    created: Option<Column>,
    updated: Option<Column>,
    house: Option<Column>,
    /// Columns that go into the message.
    pub(crate) message: Vec<Column>,
    destination: Option<Template>,
    /// The index over `id` alone, quoted.
    id_index: String,
    /// An index that finds rows by their state, quoted.
    state_index: Option<String>,
    /// Rows of a key are told apart by nothing but their id: the rule of the lowest one is empty.
    unique_key: bool,
    codes: Codes,
    unsent_after: Option<Duration>,
    stuck_after: Option<Duration>,
    skip_failed: bool,
    dialect: Dialect,
}

/// What the values of the state column mean.
#[derive(Debug, Clone)]
struct Codes {
    pending: Vec<String>,
    null: bool,
    sending: Option<String>,
    sent: String,
    failed: Option<String>,
    resend_failed: bool,
}

impl Source {
    /// Where in a row's values a column is.
    pub(crate) fn position(&self, column: &str) -> Option<usize> {
        self.message.iter().position(|c| c.plain == column)
    }

    /// Whether rows wait for others of their key.
    pub(crate) fn is_ordered(&self) -> bool {
        self.key.is_some() && !self.unique_key
    }

    /// Whether a destination can be left out of a read.
    pub(crate) fn excludes(&self) -> bool {
        self.destination.as_ref().is_some_and(|d| d.fixed().is_none())
    }

    pub(crate) fn has_houses(&self) -> bool {
        self.house.is_some()
    }
}

/// What a read of candidates is limited to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ask {
    /// Only ids above this one.
    pub(crate) after: Option<String>,
    /// Only houses from the first number, or below it.
    pub(crate) houses: Option<(i64, bool)>,
    /// Not to these destinations.
    pub(crate) without: Vec<String>,
    pub(crate) limit: usize,
}

/// How rows are claimed.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) owner: String,
    pub(crate) lease: Duration,
    /// Claims rows during whose sending a process has died. Otherwise these are named and left.
    pub(crate) suspects: bool,
}

/// What came of a claim.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    /// Claimed rows, in the order of their ids.
    pub(crate) rows: Vec<Row>,
    /// Rows during whose sending a process has died; not claimed.
    pub(crate) suspects: Vec<String>,
    /// Rows whose id is longer than Posthouse's own table can hold.
    pub(crate) too_long: usize,
}

/// A claimed row.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    /// Its id, as text.
    pub(crate) id: String,
    /// Its state before the claim.
    state: Option<String>,
    /// It was in the sending state already.
    was_sending: bool,
    /// Its version as it must be when the outcome is written.
    version: Option<i64>,
    /// Failed attempts so far.
    pub(crate) attempts: u32,
    /// The row's own limit.
    pub(crate) max_attempts: Option<u32>,
    /// Claims, this one included.
    pub(crate) claims: u32,
    /// Version of Posthouse's own row.
    side: i32,
    pub(crate) key: Option<String>,
    pub(crate) created_at: SystemTime,
    /// Values of [`Source::message`].
    pub(crate) values: Vec<Option<Vec<u8>>>,
}

/// What differs from database to database.
trait Engine: fmt::Debug + Send + Sync {
    type Db: sqlx::Database;
    const DIALECT: Dialect;
    const CONNECTIONS: u32;
    fn pool(&self) -> &sqlx::Pool<Self::Db>;
    fn tables(&self) -> &Tables;
    fn deadline(&self) -> Duration;
    /// Runs a statement whose columns are all text or bytes.
    fn fetch(
        conn: &mut <Self::Db as sqlx::Database>::Connection,
        sql: Sql,
    ) -> impl Future<Output = Result<Vec<Cells>, sqlx::Error>> + Send;
    fn execute(
        conn: &mut <Self::Db as sqlx::Database>::Connection,
        sql: Sql,
    ) -> impl Future<Output = Result<u64, sqlx::Error>> + Send;
    /// The schema of Posthouse's own tables, and the tables that the mapping means.
    fn catalogue(
        conn: &mut <Self::Db as sqlx::Database>::Connection,
        tables: &Tables,
        mapping: &Adopted,
    ) -> impl Future<Output = Result<(String, Vec<catalogue::Table>), Error>> + Send;
}

fn ids(cells: &[Cells]) -> Vec<String> {
    cells.iter().filter_map(|c| cell(c, 0)).collect()
}

impl<E: Engine> AdoptedStore for E {
    fn check(&self) -> BoxFuture<'_, Result<(), Error>> {
        on!(self.pool(), self.deadline(), "check", |c| {
            let table = self.tables().name("adopted");
            let sql = Sql::new(E::DIALECT, &format!("SELECT row_id FROM {table} WHERE 1 = 0"));
            match E::fetch(c, sql).await {
                Ok(_) => Ok(()),
                Err(e) if Error::kind_of(&e) == ErrorKind::Database => Err(Error::Schema(format!(
                    "{table} can't be read; run `posthouse migrate`, or call posthouse::migrate ({e})"
                ))),
                Err(e) => Err(e.into()),
            }
        })
    }

    fn discover<'a>(&'a self, mapping: &'a Adopted) -> BoxFuture<'a, Result<Found, Error>> {
        on!(self.pool(), self.deadline(), "discovery", |c| {
            let (own, tables) = E::catalogue(c, self.tables(), mapping).await?;
            let mut found = catalogue::found(E::DIALECT, mapping, &own, tables);
            for source in &mut found.sources {
                // An index may be there and hidden from statements.
                let Some(probe) = source.hints() else { continue };
                if let Err(e) = E::fetch(c, probe).await {
                    if Error::kind_of(&e) != ErrorKind::Database {
                        return Err(e.into());
                    }
                    tracing::warn!(table = source.name, error = %e, "an index can't be used");
                    source.state_index = None;
                }
            }
            Ok(found)
        })
    }

    fn candidates<'a>(&'a self, source: &'a Source, ask: &'a Ask) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        on!(self.pool(), self.deadline(), "read", |c| {
            Ok(ids(&E::fetch(c, source.candidates(E::DIALECT, self.tables(), ask)).await?))
        })
    }

    fn expired<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        on!(self.pool(), self.deadline(), "expired claims", |c| {
            Ok(ids(&E::fetch(c, source.expired(E::DIALECT, self.tables())).await?))
        })
    }

    fn claim<'a>(&'a self, source: &'a Source, ids: &'a [String], claim: &'a Claim) -> BoxFuture<'a, Result<Taken, Error>> {
        on!(self.pool(), self.deadline(), "claim", |c| {
            if ids.is_empty() {
                return Ok(Taken::default());
            }
            let (dialect, tables) = (E::DIALECT, self.tables());
            let mut tx = sqlx::Connection::begin(c).await?;
            let locked = E::fetch(&mut tx, source.lock(dialect, tables, ids)).await?;
            let own = E::fetch(&mut tx, source.own_rows(dialect, tables, ids)).await?;
            // Rows that their owner has finished or removed since a claim of ours ran out.
            let unclaimed = Source::not_locked(ids, &locked);
            let left: Vec<String> = own.iter().filter(|o| claim::flag(o, 4)).filter_map(|o| cell(o, 0)).collect();
            let mut over: Vec<String> = unclaimed.into_iter().filter(|id| left.contains(id)).collect();
            if !over.is_empty() {
                let open = self::ids(&E::fetch(&mut tx, source.still_open(dialect, tables, &over)).await?);
                over.retain(|id| !open.contains(id));
            }
            if !over.is_empty() {
                let expired = format!(" AND next_attempt_at <= {}", dialect.now());
                E::execute(&mut tx, source.forget(dialect, tables, &over, &expired)).await?;
            }
            let taken = source.choose(locked, own, claim);
            if !taken.rows.is_empty() {
                let ids: Vec<String> = taken.rows.iter().map(|row| row.id.clone()).collect();
                if let Some(sql) = source.mark_sending(dialect, &ids) {
                    E::execute(&mut tx, sql).await?;
                }
                E::execute(&mut tx, source.own_claims(dialect, tables, &taken.rows, claim)).await?;
            }
            tx.commit().await?;
            Ok(taken)
        })
    }

    fn renew<'a>(
        &'a self,
        source: &'a Source,
        owner: &'a str,
        ids: &'a [String],
        lease: Duration,
    ) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        on!(self.pool(), self.deadline(), "renewal", |c| {
            let renewed = E::execute(c, source.renew(E::DIALECT, self.tables(), owner, ids, lease)).await?;
            if renewed == ids.len() as u64 {
                return Ok(ids.to_vec());
            }
            Ok(self::ids(&E::fetch(c, source.owned(E::DIALECT, self.tables(), owner, ids)).await?))
        })
    }

    fn settle<'a>(
        &'a self,
        source: &'a Source,
        (owner, lease): (&'a str, Duration),
        rows: &'a [Settle],
        patient: bool,
    ) -> BoxFuture<'a, Result<Vec<Settled>, Error>> {
        on!(self.pool(), self.deadline(), "write-back", |c| {
            let (dialect, tables) = (E::DIALECT, self.tables());
            let ids: Vec<String> = rows.iter().map(|r| r.row.id.clone()).collect();
            let mut tx = sqlx::Connection::begin(c).await?;
            let locked = E::fetch(&mut tx, source.lock_claimed(dialect, &ids, patient)).await?;
            let unlocked = Source::not_locked(&ids, &locked);
            let present = if unlocked.is_empty() {
                Vec::new()
            } else {
                self::ids(&E::fetch(&mut tx, source.present(dialect, &unlocked)).await?)
            };
            let own = E::fetch(&mut tx, source.own_rows(dialect, tables, &ids)).await?;
            let writes = source.writes(dialect, tables, (owner, lease), rows, (&locked, &own, &present));
            for sql in writes.statements {
                E::execute(&mut tx, sql).await?;
            }
            tx.commit().await?;
            Ok(writes.settled)
        })
    }

    fn pending<'a>(&'a self, source: &'a Source) -> BoxFuture<'a, Result<u64, Error>> {
        on!(self.pool(), self.deadline(), "count", |c| {
            let rows = E::fetch(c, source.count(E::DIALECT, self.tables())).await?;
            let counts = rows.first().map(|r| (0..r.len()).filter_map(|n| claim::number::<u64>(r, n)).sum());
            Ok(counts.unwrap_or(0))
        })
    }

    fn connections(&self) -> u32 {
        E::CONNECTIONS
    }
}

impl Source {
    /// A statement that fails when the index that reads are told to use can't be used.
    fn hints(&self) -> Option<Sql> {
        if self.dialect != Dialect::MySql {
            return None;
        }
        let index = self.state_index.as_ref()?;
        Some(Sql::new(self.dialect, &format!("SELECT '1' FROM {} FORCE INDEX ({index}) WHERE 1 = 0", self.table)))
    }
}
