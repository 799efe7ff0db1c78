//! Creating the tables and the partitions ahead.
//!
//! DDL commits by itself, so a migration is a row of steps that each change nothing when done already; the row with the
//! version is written last, and an interrupted migration goes on where it stopped.

use std::fmt::Write;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Executor, MySqlConnection, MySqlPool};

use super::number;
use crate::store::{SCHEMA_VERSION, Tables};
use crate::{Error, ErrorKind};

/// Ids per partition of the log.
pub(crate) const PARTITION_SIZE: i64 = 4_000_000;

/// Partitions kept ready ahead of the newest id.
pub(super) const PARTITIONS_AHEAD: i64 = 32;

/// How many are made beyond that, so that the log is seldom altered.
pub(super) const PARTITIONS_SPARE: i64 = 8;

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

/// Ends a statement of [`STEPS`].
const END: &str = "-- ;;";

// Error numbers.
const NO_SUCH_DATABASE: u16 = 1049;
const COLUMN_EXISTS: u16 = 1060;
const NO_SUCH_TABLE: u16 = 1146;
const ROUTINE_EXISTS: u16 = 1304;
const TRIGGER_EXISTS: u16 = 1359;
const UNSAFE_ROUTINE: u16 = 1418;
const NEEDS_SUPER: u16 = 1419;

/// A statement, and the function or trigger that it makes.
struct Step {
    makes: Option<(&'static str, String)>,
    sql: String,
}

/// The statements that lead from version `from` to this one.
fn steps(tables: &Tables, houses: u16, from: i32) -> Vec<Step> {
    let mut rows = String::new();
    for house in 0..houses {
        let _ = write!(rows, "{}({house})", if house == 0 { "" } else { ", " });
    }
    let partitions: Vec<String> = (0..=PARTITIONS_AHEAD + PARTITIONS_SPARE).map(partition).collect();
    let text = STEPS[usize::try_from(from).unwrap_or(0).min(STEPS.len())..]
        .join(&format!("\n{END}\n"))
        .replace("%HOUSE_ROWS%", &rows)
        .replace("%HOUSES%", &houses.to_string())
        .replace("%PARTITIONS%", &partitions.join(", "));
    let mut out = vec![Step { makes: None, sql: String::new() }];
    if text.is_empty() {
        out.clear();
    }
    for line in text.lines() {
        if let Some(next) = line.strip_prefix(END) {
            let makes = match next.trim().split_once(' ') {
                Some(("function", name)) => Some(("function", name.to_owned())),
                Some(("trigger", name)) => Some(("trigger", name.to_owned())),
                _ => None,
            };
            out.push(Step { makes, sql: String::new() });
        } else if let Some(step) = out.last_mut() {
            step.sql.push_str(line);
            step.sql.push('\n');
        }
    }
    for step in &mut out {
        step.sql = tables.text(step.sql.trim_end());
    }
    out
}

pub(super) fn partition(number: i64) -> String {
    format!("PARTITION p{number:07} VALUES LESS THAN ({})", (number + 1) * PARTITION_SIZE)
}

/// All steps of migration, as templates.
#[cfg(feature = "relay")]
pub(super) fn templates() -> String {
    STEPS.join("\n")
}

pub(crate) fn text(tables: &Tables, houses: u16, from: i32) -> String {
    steps(tables, houses, from).into_iter().fold(String::new(), |out, step| out + &step.sql + ";\n\n")
}

pub(crate) async fn migrate(pool: &MySqlPool, tables: &Tables, houses: u16) -> Result<(), Error> {
    let mut conn = pool.acquire().await?;
    // Its session is changed below, and closing it gives back the lock in every case.
    conn.close_on_drop();
    if version(&mut conn, tables).await?.is_some_and(|v| v >= SCHEMA_VERSION) {
        return Ok(());
    }
    // Functions and triggers keep the sql_mode of the session that made them, so theirs doesn't depend on the server's.
    // Publishers hold the row with the version; a long wait for it would hold up the next ones.
    sqlx::raw_sql(
        "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', lock_wait_timeout = 1, innodb_lock_wait_timeout = 1",
    )
    .execute(&mut *conn)
    .await?;
    let seconds = i64::try_from(PATIENCE.as_secs()).unwrap_or(60);
    // Lock names have at most 64 characters, and are of the whole server.
    let locked: Option<i64> =
        sqlx::query_scalar("SELECT GET_LOCK(CONCAT('posthouse ', MD5(CONCAT(COALESCE(?, DATABASE()), '.', ?))), ?)")
            .bind(tables.schema())
            .bind(tables.prefix())
            .bind(seconds)
            .fetch_one(&mut *conn)
            .await?;
    if locked != Some(1) {
        return Err(Error::Schema(format!("another process has been migrating {} for {PATIENCE:?}", tables.name("meta"))));
    }
    let from = version(&mut conn, tables).await?.unwrap_or(0);
    if from >= SCHEMA_VERSION {
        return Ok(());
    }
    if let Some(schema) = tables.schema() {
        // An IF NOT EXISTS still needs the CREATE privilege, so it is only asked for where the database is missing.
        let exists: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = ?")
            .bind(schema)
            .fetch_one(&mut *conn)
            .await?;
        if exists == 0 {
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE IF NOT EXISTS `{schema}`"))).execute(&mut *conn).await?;
        }
    }
    let started = Instant::now();
    for step in steps(tables, houses, from) {
        if let Some((kind, name)) = &step.makes
            && exists(&mut conn, tables, kind, name).await?
        {
            continue;
        }
        loop {
            match conn.execute(sqlx::raw_sql(AssertSqlSafe(step.sql.clone()))).await {
                Ok(_) => break,
                // Made where information_schema doesn't show it to this account, or by a migration that was cut off.
                Err(e) if matches!(number(&e), Some(ROUTINE_EXISTS | TRIGGER_EXISTS | COLUMN_EXISTS)) => break,
                Err(e) if matches!(number(&e), Some(UNSAFE_ROUTINE | NEEDS_SUPER)) => {
                    return Err(Error::Schema(format!(
                        "this account may not create functions and triggers while the binary log is on; either run \
                         SET GLOBAL log_bin_trust_function_creators = 1, or migrate with an account that has SUPER ({e})"
                    )));
                }
                Err(e) => {
                    let e = Error::from(e);
                    if e.kind() != ErrorKind::Conflict || started.elapsed() > PATIENCE {
                        return Err(e);
                    }
                    tracing::info!(holdup = %e, "migration waits");
                    tokio::time::sleep(Duration::from_millis(100 + fastrand::u64(0..200))).await;
                }
            }
        }
    }
    Ok(())
}

async fn exists(conn: &mut MySqlConnection, tables: &Tables, kind: &str, name: &str) -> Result<bool, Error> {
    let sql = if kind == "trigger" {
        "SELECT COUNT(*) FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA = COALESCE(?, DATABASE()) AND TRIGGER_NAME = ?"
    } else {
        "SELECT COUNT(*) FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = COALESCE(?, DATABASE()) AND ROUTINE_NAME = ?"
    };
    let found: i64 =
        sqlx::query_scalar(sql).bind(tables.schema()).bind(format!("{}{name}", tables.prefix())).fetch_one(conn).await?;
    Ok(found > 0)
}

/// The version in the database; None when there are no tables, or not all of them yet.
pub(super) async fn version(conn: &mut MySqlConnection, tables: &Tables) -> Result<Option<i32>, Error> {
    match sqlx::query_scalar(tables.sql("SELECT schema_version FROM {meta}")).fetch_optional(conn).await {
        Ok(version) => Ok(version),
        Err(e) if matches!(number(&e), Some(NO_SUCH_TABLE | NO_SUCH_DATABASE)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}
