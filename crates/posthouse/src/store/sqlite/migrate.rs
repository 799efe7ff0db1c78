//! Creating the tables.

use std::time::{Duration, Instant};

use sqlx::{Connection, SqliteConnection, SqlitePool};

use crate::store::Tables;
use crate::{Error, ErrorKind};

/// How long migration keeps trying.
const PATIENCE: Duration = Duration::from_secs(60);

/// What leads from each version to the next one, from none on. Each ends by writing its version.
const STEPS: [&str; 5] = [
    include_str!("0001_first.sql"),
    include_str!("0002_inbox.sql"),
    include_str!("0003_inbox_retention.sql"),
    include_str!("0004_groups.sql"),
    include_str!("0005_operate.sql"),
];

/// What leads from a version to this one.
fn steps(from: i32) -> impl Iterator<Item = String> {
    STEPS.into_iter().skip(usize::try_from(from).unwrap_or(0)).map(|step| step.replace("%NOW%", super::now!()))
}

/// All steps of migration, as templates.
#[cfg(feature = "relay")]
pub(super) fn templates() -> String {
    STEPS.join("\n")
}

pub(crate) fn text(tables: &Tables, from: i32) -> String {
    steps(from).map(|step| tables.text(&step)).collect::<Vec<_>>().join("\n")
}

pub(crate) async fn migrate(pool: &SqlitePool, tables: &Tables) -> Result<(), Error> {
    let mut conn = pool.acquire().await?;
    let started = Instant::now();
    loop {
        let holdup = match try_migrate(&mut conn, tables).await {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::Conflict => e.to_string(),
            Err(e) => return Err(e),
        };
        if started.elapsed() > PATIENCE {
            return Err(Error::Schema(format!(
                "could not get the lock that migration needs within {PATIENCE:?} ({holdup}); look for a process with an open transaction"
            )));
        }
        tracing::info!(holdup, "migration waits");
        tokio::time::sleep(Duration::from_millis(20 + fastrand::u64(0..100))).await;
    }
}

async fn try_migrate(conn: &mut SqliteConnection, tables: &Tables) -> Result<(), Error> {
    let encoding: String = sqlx::query_scalar("PRAGMA encoding").fetch_one(&mut *conn).await?;
    if encoding != "UTF-8" {
        return Err(Error::Schema(format!(
            "this database stores text as {encoding}, so text would not be delivered as the bytes it was written in; \
             use a database whose encoding is UTF-8"
        )));
    }
    // Readers don't wait for the writer, nor the writer for them. It is a property of the file and can't be changed inside a
    // transaction; a database in memory has no such mode and stays as it is.
    let mode: String = sqlx::query_scalar("PRAGMA journal_mode").fetch_one(&mut *conn).await?;
    if mode != "wal" && !in_memory(conn).await? {
        let mode: String = sqlx::query_scalar("PRAGMA journal_mode = WAL").fetch_one(&mut *conn).await?;
        if mode != "wal" {
            tracing::warn!(
                mode,
                "the database file could not be put into WAL mode; publishers and the relay will wait for each other"
            );
        }
    }
    let mut tx = conn.begin_with(super::WRITE).await?;
    // A newer version has no steps here.
    for step in steps(version(&mut tx, tables).await?.unwrap_or(0)) {
        sqlx::raw_sql(tables.sql(&step)).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(())
}

/// Whether the connection's main database has no file.
pub(super) async fn in_memory(conn: &mut SqliteConnection) -> Result<bool, Error> {
    let file: Option<String> =
        sqlx::query_scalar("SELECT file FROM pragma_database_list WHERE name = 'main'").fetch_one(conn).await?;
    Ok(file.is_none_or(|f| f.is_empty()))
}

/// The version in the database; None when there are no tables.
pub(super) async fn version(conn: &mut SqliteConnection, tables: &Tables) -> Result<Option<i32>, Error> {
    let exists: bool = sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?)")
        .bind(tables.text("{=meta}"))
        .fetch_one(&mut *conn)
        .await?;
    if !exists {
        return Ok(None);
    }
    Ok(sqlx::query_scalar(tables.sql("SELECT schema_version FROM {meta}")).fetch_optional(conn).await?)
}
