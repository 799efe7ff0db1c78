//! Creating the tables and the partitions ahead.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};

use crate::store::{SCHEMA_VERSION, Tables};
use crate::{Error, ErrorKind};

/// Ids per partition of the log.
pub(crate) const PARTITION_SIZE: i64 = 4_000_000;

/// Partitions kept ready ahead of the newest id.
pub(super) const PARTITIONS_AHEAD: i64 = 32;

/// Partitions ahead that migration makes, and upkeep in one go when there are fewer. Each is some twenty entries in the
/// catalogue, so the others come a few at a time.
const PARTITIONS_AT_ONCE: i64 = 8;

/// How many upkeep adds per round beyond these: 16 million ids a minute, which is more than any publisher needs.
const PARTITIONS_PER_ROUND: i64 = 4;

/// How long one piece of DDL waits for its locks before it steps back and lets others pass.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

/// How long migration keeps trying.
const PATIENCE: Duration = Duration::from_secs(60);

const FIRST: &str = include_str!("0001_first.sql");

/// What leads from each version to the next one, from version 1 on. Each ends by writing its version.
const LATER: [&str; 4] = [
    include_str!("0002_inbox.sql"),
    include_str!("0003_inbox_retention.sql"),
    include_str!("0004_groups.sql"),
    include_str!("0005_operate.sql"),
];

/// Replaced whole by a resize. The number stands in it as a constant, because sessions keep plans in which this function is
/// expanded, and throw them away when it is replaced; had it called a function for the number, that one's result would have
/// stayed in their plans, and their messages would have gone to houses that nobody reads.
pub(super) const HOUSE_OF: &str =
    "CREATE OR REPLACE FUNCTION {house_of}(destination text, message_key text, message_id text) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$SELECT ({hash}(destination, message_key, message_id) % %HOUSES%)::integer$$";

fn first(houses: u16) -> String {
    FIRST.replace("%HOUSE_OF%", HOUSE_OF).replace("%HOUSES%", &houses.to_string())
}

/// All steps of migration, as templates.
#[cfg(feature = "relay")]
pub(super) fn templates() -> String {
    [FIRST].into_iter().chain(LATER).collect::<Vec<_>>().join("\n")
}

/// The notification channel of a set of tables.
pub(crate) fn channel(tables: &Tables) -> String {
    format!("{}.{}wake", tables.schema().unwrap_or("public"), tables.prefix())
}

/// What leads from version `from` (at least 1) to this one.
fn later(from: i32) -> impl Iterator<Item = &'static str> {
    LATER.into_iter().skip(usize::try_from(from - 1).unwrap_or(0))
}

pub(crate) fn text(tables: &Tables, houses: u16, from: i32) -> String {
    let mut out = String::new();
    if from < 1 {
        out.push_str(&tables.text(&first(houses)));
        for number in 0..=PARTITIONS_AT_ONCE {
            out.push('\n');
            out.push_str(&partition(tables, number));
        }
    }
    for step in later(from) {
        out.push('\n');
        out.push_str(&tables.text(step));
    }
    out
}

/// Made apart and attached, so that the log is never locked against publishers (ATTACH takes SHARE UPDATE EXCLUSIVE).
fn partition(tables: &Tables, number: i64) -> String {
    let (from, to) = (number * PARTITION_SIZE, (number + 1) * PARTITION_SIZE);
    let name = format!("message_p{number:07}");
    tables.text(&format!(
        "CREATE TABLE {{{name}}} (LIKE {{message}} INCLUDING DEFAULTS INCLUDING CONSTRAINTS, \
             CHECK (id >= {from} AND id < {to}));\n\
         ALTER TABLE {{message}} ATTACH PARTITION {{{name}}} FOR VALUES FROM ({from}) TO ({to});\n"
    ))
}

pub(crate) async fn migrate(pool: &PgPool, tables: &Tables, houses: u16) -> Result<(), Error> {
    let mut conn = pool.acquire().await?;
    let started = Instant::now();
    loop {
        let holdup = match try_migrate(&mut conn, tables, houses).await {
            Ok(true) => return Ok(()),
            Ok(false) => "another process is migrating".to_owned(),
            Err(e) if e.kind() == ErrorKind::Conflict => e.to_string(),
            Err(e) => return Err(e),
        };
        if started.elapsed() > PATIENCE {
            return Err(Error::Schema(format!(
                "could not get the locks that migration needs within {PATIENCE:?} ({holdup}); look for idle transactions in pg_stat_activity"
            )));
        }
        tracing::info!(holdup, "migration waits");
        tokio::time::sleep(Duration::from_millis(100 + fastrand::u64(0..200))).await;
    }
}

/// One try; false when another process is at it.
async fn try_migrate(conn: &mut PgConnection, tables: &Tables, houses: u16) -> Result<bool, Error> {
    let mut tx = conn.begin().await?;
    sqlx::raw_sql(AssertSqlSafe(format!("SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))).execute(&mut *tx).await?;
    let lock = format!("posthouse migration {}", tables.name("meta"));
    let locked: bool =
        sqlx::query_scalar("SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))").bind(lock).fetch_one(&mut *tx).await?;
    if !locked {
        return Ok(false);
    }
    match version(&mut tx, tables).await? {
        Some(v) if v >= SCHEMA_VERSION => {}
        Some(v) if v >= 1 => {
            for step in later(v) {
                sqlx::raw_sql(tables.sql(step)).execute(&mut *tx).await?;
            }
        }
        _ => {
            if let Some(schema) = tables.schema() {
                // An IF NOT EXISTS still needs the CREATE privilege, so it is only asked for where the schema is missing.
                // Not to_regnamespace: what that didn't find it may not find when another session has made it meanwhile.
                let exists = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)";
                let mut there: bool = sqlx::query_scalar(exists).bind(schema).fetch_one(&mut *tx).await?;
                if !there {
                    // Other sets of tables may be on their way into the same schema.
                    let lock = format!("posthouse schema {schema}");
                    let lock = sqlx::query_scalar("SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))").bind(lock);
                    let locked: bool = lock.fetch_one(&mut *tx).await?;
                    if !locked {
                        return Ok(false);
                    }
                    there = sqlx::query_scalar(exists).bind(schema).fetch_one(&mut *tx).await?;
                }
                if !there {
                    sqlx::raw_sql(tables.sql("CREATE SCHEMA {schema}")).execute(&mut *tx).await?;
                }
            }
            sqlx::raw_sql(tables.sql(&first(houses))).execute(&mut *tx).await?;
            partitions_ahead(&mut tx, tables).await?;
            for step in later(1) {
                sqlx::raw_sql(tables.sql(step)).execute(&mut *tx).await?;
            }
        }
    }
    tx.commit().await?;
    Ok(true)
}

/// The version in the database; None when there are no tables.
pub(super) async fn version(conn: &mut PgConnection, tables: &Tables) -> Result<Option<i32>, Error> {
    let exists: bool =
        sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(tables.name("meta")).fetch_one(&mut *conn).await?;
    if !exists {
        return Ok(None);
    }
    Ok(sqlx::query_scalar(tables.sql("SELECT schema_version FROM {meta}")).fetch_optional(conn).await?)
}

/// The newest id given out (or to be given out next), and the numbers of the partitions.
pub(super) async fn ahead(conn: &mut PgConnection, tables: &Tables) -> Result<(i64, Vec<i64>), Error> {
    // The sequence itself: pg_sequence_last_value knows nothing about one that was restarted until it is used again.
    let sequence: String =
        sqlx::query_scalar("SELECT pg_get_serial_sequence($1, 'id')").bind(tables.name("message")).fetch_one(&mut *conn).await?;
    let last = sqlx::query_scalar(AssertSqlSafe(format!("SELECT last_value FROM {sequence}"))).fetch_one(&mut *conn).await?;
    let parts: Vec<Option<i64>> = sqlx::query_scalar(
        "SELECT ARRAY(SELECT (regexp_match(c.relname, '_p([0-9]+)$'))[1]::bigint FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
                       WHERE i.inhparent = to_regclass($1) ORDER BY 1)",
    )
    .bind(tables.name("message"))
    .fetch_one(conn)
    .await?;
    Ok((last, parts.into_iter().flatten().collect()))
}

/// Makes missing partitions, up to what one round makes; answers how many, and how many are ready ahead now. Runs inside a
/// transaction with a lock timeout.
pub(super) async fn partitions_ahead(conn: &mut PgConnection, tables: &Tables) -> Result<(u32, u32), Error> {
    let (last, parts) = ahead(conn, tables).await?;
    let current = last / PARTITION_SIZE;
    let wanted = (ready(current, &parts) + PARTITIONS_PER_ROUND).clamp(PARTITIONS_AT_ONCE, PARTITIONS_AHEAD);
    let mut created = 0;
    for number in current..=current + wanted {
        if !parts.contains(&number) {
            sqlx::raw_sql(AssertSqlSafe(partition(tables, number))).execute(&mut *conn).await?;
            created += 1;
        }
    }
    Ok((created, wanted as u32))
}

/// How many partitions without a gap follow the current one.
pub(super) fn ready(current: i64, parts: &[i64]) -> i64 {
    (1..).take_while(|n| parts.contains(&(current + n))).count() as i64
}
