//! Inserting messages inside the caller's transaction.

use std::time::{Duration, SystemTime};

use sqlx::{AssertSqlSafe, MySql, MySqlConnection, MySqlPool, Row as _, SqlSafeStr};

use super::super::{Backend, InsertStatement, Param, Tables, private};
use crate::Error;
use crate::message::{Checked, Due};

const INSERT: &str = "INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) VALUES ";

const ROW: &str = "(?, ?, ?, ?, ?, ?, ?, COALESCE(TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL ? MICROSECOND, \
     UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND), ?)";

const DEDUP: &str = "INTO {dedup} (dedup_key, message_id) VALUES ";

/// Rows per statement.
const ROWS: usize = 500;

/// Statements up to this many rows, and those with [`ROWS`], stay prepared; others would crowd the connection's cache.
const ROWS_PREPARED: usize = 16;

/// Content per statement, beyond its first row: well below the smallest default `max_allowed_packet` (16 MiB).
const BYTES: usize = 4 << 20;

/// A duplicate key.
const DUPLICATE: u16 = 1062;

/// What the pending set holds, with texts as their bytes.
#[cfg(feature = "testing")]
const PUBLISHED: &str = "SELECT m.id, m.message_id, m.type, m.destination, m.message_key, m.payload, m.content_type, CAST(m.headers AS BINARY) \
      FROM {pending} p JOIN {message} m ON m.id = p.id \
     UNION ALL \
    SELECT m.id, m.message_id, m.type, m.destination, m.message_key, m.payload, m.content_type, CAST(m.headers AS BINARY) \
      FROM {pending} p JOIN {kept} m ON m.id = p.id WHERE NOT EXISTS (SELECT 1 FROM {message} l WHERE l.id = p.id) \
     ORDER BY 1";

/// (absolute, relative) in microseconds.
fn due(due: Option<Due>) -> (Option<i64>, Option<i64>) {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
    match due {
        None => (None, None),
        Some(Due::At(at)) => (Some(at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, micros)), None),
        Some(Due::In(after)) => (None, Some(micros(after))),
    }
}

/// `head` with `rows` rows of placeholders.
fn values(tables: &Tables, head: &str, row: &str, rows: usize) -> sqlx::SqlStr {
    let mut text = tables.text(head);
    text.reserve((row.len() + 2) * rows);
    for n in 0..rows {
        if n > 0 {
            text.push_str(", ");
        }
        text.push_str(row);
    }
    AssertSqlSafe(text).into_sql_str()
}

fn prepared(rows: usize) -> bool {
    rows <= ROWS_PREPARED || rows == ROWS
}

/// Inserts messages, whatever their dedup keys, in one statement. A multi-row INSERT gives out ids in the order of its rows.
async fn insert_rows(conn: &mut MySqlConnection, tables: &Tables, messages: &[Checked]) -> Result<(), sqlx::Error> {
    let mut query = sqlx::query(values(tables, INSERT, ROW, messages.len())).persistent(prepared(messages.len()));
    for m in messages {
        let (at, after) = due(m.due);
        // As bytes, so that no character set of the connection touches them.
        query = query
            .bind(m.id.as_str().as_bytes())
            .bind(m.kind.as_bytes())
            .bind(m.destination.as_bytes())
            .bind(m.key.as_deref().map(str::as_bytes))
            .bind(m.payload.as_slice())
            .bind(m.content_type.as_bytes())
            .bind(m.headers.as_deref().map(str::as_bytes))
            .bind(at)
            .bind(after)
            .bind(m.max_attempts);
    }
    query.execute(conn).await?;
    Ok(())
}

/// Claims one dedup key; false when it was used before.
///
/// IGNORE hides other errors too, but none that this row could have: both values were checked. ON DUPLICATE KEY UPDATE would
/// need the privilege to update, and answers 1 for a duplicate on connections that count found rows, as sqlx's do.
async fn claim(conn: &mut MySqlConnection, tables: &Tables, m: &Checked, key: &str) -> Result<bool, sqlx::Error> {
    let sql = values(tables, &format!("INSERT IGNORE {DEDUP}"), "(?, ?)", 1);
    Ok(sqlx::query(sql).bind(key.as_bytes()).bind(m.id.as_str().as_bytes()).execute(conn).await?.rows_affected() > 0)
}

/// Claims the dedup keys of these messages and leaves out those whose key was used before.
async fn fresh(conn: &mut MySqlConnection, tables: &Tables, messages: Vec<Checked>) -> Result<Vec<Checked>, sqlx::Error> {
    let keys = messages.iter().filter(|m| m.dedup_key.is_some()).count();
    if keys > 1 {
        let sql = values(tables, &format!("INSERT {DEDUP}"), "(?, ?)", keys);
        let mut query = sqlx::query(sql).persistent(prepared(keys));
        for m in &messages {
            if let Some(key) = &m.dedup_key {
                query = query.bind(key.as_bytes()).bind(m.id.as_str().as_bytes());
            }
        }
        match query.execute(&mut *conn).await {
            Ok(_) => return Ok(messages),
            // The statement left nothing behind; which keys are used shows one by one.
            Err(e) if super::number(&e) == Some(DUPLICATE) => {}
            Err(e) => return Err(e),
        }
    }
    let mut out = Vec::with_capacity(messages.len());
    for m in messages {
        let new = match &m.dedup_key {
            Some(key) => claim(conn, tables, &m, key).await?,
            None => true,
        };
        if new {
            out.push(m);
        }
    }
    Ok(out)
}

async fn insert_chunks(conn: &mut MySqlConnection, tables: &Tables, messages: Vec<Checked>) -> Result<(), sqlx::Error> {
    let mut rest = messages.into_iter().peekable();
    while rest.peek().is_some() {
        let mut chunk = Vec::new();
        let mut bytes = 0;
        while let Some(m) = rest.next_if(|m| chunk.is_empty() || chunk.len() < ROWS && bytes + m.payload.len() <= BYTES) {
            bytes += m.payload.len() + m.headers.as_ref().map_or(0, String::len);
            chunk.push(m);
        }
        let chunk = if chunk.iter().any(|m| m.dedup_key.is_some()) { fresh(conn, tables, chunk).await? } else { chunk };
        if !chunk.is_empty() {
            insert_rows(conn, tables, &chunk).await?;
        }
    }
    Ok(())
}

impl private::Sealed for MySql {}

impl Backend for MySql {
    const NOTIFIES: bool = false;
    const QUOTE: char = '`';
    const DEFAULT_SCHEMA: Option<&'static str> = None;
    const SCHEMAS: bool = true;
    const BEGIN: &'static str = "BEGIN";
    /// sqlx 0.9.0 expects one answer to a statement that was dropped. While it is being prepared there are several, and from
    /// then on the connection waits for ever, or takes the answers to earlier statements for those to later ones.
    const STATEMENTS_CAN_BE_DROPPED: bool = false;

    async fn in_step(conn: &mut MySqlConnection) -> bool {
        // A number that no earlier answer has in it.
        let number = fastrand::i64(1 << 40..1 << 60);
        let select = sqlx::raw_sql(AssertSqlSafe(format!("SELECT {number}"))).fetch_one(conn);
        match tokio::time::timeout(Duration::from_secs(1), select).await {
            Ok(Ok(row)) => row.try_get::<i64, _>(0).is_ok_and(|answer| answer == number),
            Ok(Err(_)) | Err(_) => false,
        }
    }

    async fn end_session(conn: &mut MySqlConnection) {
        // It succeeds by failing.
        if sqlx::raw_sql("KILL CONNECTION_ID()").execute(conn).await.is_ok() {
            tracing::debug!("the server did not end the session");
        }
    }

    fn insert_statement(tables: &Tables, m: Checked) -> Result<InsertStatement, Error> {
        if m.dedup_key.is_some() {
            return Err(Error::invalid(
                "dedup_key",
                format!(
                    "needs two statements in MySQL: INSERT INTO {} (dedup_key, message_id), and, unless that fails with error 1062, \
                     the statement of the message without its dedup key",
                    tables.name("dedup")
                ),
            ));
        }
        let (at, after) = due(m.due);
        let params = vec![
            Param::Text(Some(m.id.to_string())),
            Param::Text(Some(m.kind)),
            Param::Text(Some(m.destination)),
            Param::Text(m.key),
            Param::Bytes(m.payload),
            Param::Text(Some(m.content_type.into_owned())),
            Param::Text(m.headers),
            Param::Int(at),
            Param::Int(after),
            Param::Int(m.max_attempts.map(i64::from)),
        ];
        Ok(InsertStatement { sql: tables.text(INSERT) + ROW, params, message_id: m.id })
    }

    async fn insert<'c>(conn: &'c mut MySqlConnection, tables: &'c Tables, messages: Vec<Checked>) -> Result<(), Error> {
        if messages.iter().all(|m| m.dedup_key.is_none()) {
            return Ok(insert_chunks(conn, tables, messages).await?);
        }
        // A key must never stay claimed without its message, also when the caller goes on after an error and commits.
        sqlx::raw_sql("SAVEPOINT posthouse_publish").execute(&mut *conn).await?;
        let result = insert_chunks(conn, tables, messages).await;
        if result.is_err()
            && let Err(e) = sqlx::raw_sql("ROLLBACK TO SAVEPOINT posthouse_publish").execute(conn).await
        {
            // After a deadlock the whole transaction is gone already, and the savepoint with it.
            tracing::debug!(error = %e, "no savepoint to go back to");
        }
        Ok(result?)
    }

    async fn migrate<'c>(pool: &'c MySqlPool, tables: &'c Tables, houses: u16) -> Result<(), Error> {
        super::migrate::migrate(pool, tables, houses).await
    }

    fn migration_text(tables: &Tables, houses: u16, from: i32) -> String {
        super::migrate::text(tables, houses, from)
    }

    async fn notify(_: &MySqlPool, _: &Tables) -> Result<(), Error> {
        Ok(())
    }

    #[cfg(feature = "testing")]
    async fn published<'c>(conn: &'c mut MySqlConnection, tables: &'c Tables) -> Result<Vec<crate::testing::Published>, Error> {
        let rows = sqlx::query(tables.sql(PUBLISHED)).fetch_all(conn).await?;
        rows.iter().map(crate::testing::published_row).collect()
    }

    #[cfg(feature = "relay")]
    fn store(
        pool: &MySqlPool,
        tables: &Tables,
        deadline: Duration,
        people: Option<u32>,
    ) -> std::sync::Arc<dyn crate::store::Store> {
        std::sync::Arc::new(super::MySqlStore::new(pool, tables, deadline, people))
    }

    #[cfg(feature = "relay")]
    fn adopted(pool: &MySqlPool, tables: &Tables, deadline: Duration) -> Option<crate::store::adopted::AdoptedHandle> {
        let store = crate::store::adopted::MySqlAdopted::new(pool, tables, deadline);
        Some(crate::store::adopted::AdoptedHandle(std::sync::Arc::new(store)))
    }
}
