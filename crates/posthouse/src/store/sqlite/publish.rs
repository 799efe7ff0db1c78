//! Inserting messages inside the caller's transaction.

use std::time::{Duration, SystemTime};

use sqlx::{Connection as _, Sqlite, SqliteConnection, SqlitePool};

use super::super::{Backend, InsertStatement, Param, Tables, private};
use super::now;
use crate::Error;
use crate::message::{Checked, Due};

const INSERT: &str = concat!(
    "INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) \
     VALUES (?, ?, ?, ?, ?, ?, ?, coalesce(?, ",
    now!(),
    " + ?), ?)"
);

const DEDUP: &str = "INSERT INTO {dedup} (dedup_key, message_id) VALUES (?, ?) ON CONFLICT DO NOTHING";

/// What the pending set holds, with texts as their bytes.
#[cfg(feature = "testing")]
const PUBLISHED: &str = "SELECT m.id, CAST(m.message_id AS BLOB), CAST(m.type AS BLOB), CAST(m.destination AS BLOB), \
           CAST(m.message_key AS BLOB), CAST(m.payload AS BLOB), CAST(m.content_type AS BLOB), CAST(m.headers AS BLOB) \
      FROM {pending} p JOIN {message} m ON m.id = p.id ORDER BY m.id";

/// (absolute, relative) in milliseconds, rounded up: nothing is sent before its time.
fn due(due: Option<Due>) -> (Option<i64>, Option<i64>) {
    let millis = |d: Duration| i64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX);
    match due {
        None => (None, None),
        Some(Due::At(at)) => (Some(at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, millis)), None),
        Some(Due::In(after)) => (None, Some(millis(after))),
    }
}

/// One row after the other: there is no round trip to save in SQLite.
async fn insert_rows(conn: &mut SqliteConnection, tables: &Tables, messages: &[Checked]) -> Result<(), sqlx::Error> {
    let (insert, dedup) = (tables.sql(INSERT), tables.sql(DEDUP));
    for m in messages {
        if let Some(key) = &m.dedup_key {
            let claimed = sqlx::query(dedup.clone()).bind(key).bind(m.id.as_str()).execute(&mut *conn).await?;
            if claimed.rows_affected() == 0 {
                continue;
            }
        }
        let (at, after) = due(m.due);
        sqlx::query(insert.clone())
            .bind(m.id.as_str())
            .bind(&m.kind)
            .bind(&m.destination)
            .bind(&m.key)
            .bind(&m.payload)
            .bind(&*m.content_type)
            .bind(&m.headers)
            .bind(at)
            .bind(after)
            .bind(m.max_attempts)
            .execute(&mut *conn)
            .await?;
    }
    Ok(())
}

impl private::Sealed for Sqlite {}

impl Backend for Sqlite {
    const NOTIFIES: bool = false;
    const QUOTE: char = '"';
    const DEFAULT_SCHEMA: Option<&'static str> = None;
    const SCHEMAS: bool = false;
    const BEGIN: &'static str = super::WRITE;
    const STATEMENTS_CAN_BE_DROPPED: bool = true;

    async fn in_transaction(conn: &mut SqliteConnection) -> Result<bool, Error> {
        // The rollback of a transaction that was dropped may be in the queue of the connection's thread; behind this it isn't.
        conn.ping().await?;
        Ok(conn.is_in_transaction())
    }

    fn insert_statement(tables: &Tables, m: Checked) -> Result<InsertStatement, Error> {
        if m.dedup_key.is_some() {
            return Err(Error::invalid(
                "dedup_key",
                format!(
                    "needs two statements in SQLite: INSERT INTO {} (dedup_key, message_id) … ON CONFLICT DO NOTHING, and, if that \
                     inserted a row, the statement of the message without its dedup key",
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
        Ok(InsertStatement { sql: tables.text(INSERT), params, message_id: m.id })
    }

    async fn insert<'c>(conn: &'c mut SqliteConnection, tables: &'c Tables, messages: Vec<Checked>) -> Result<(), Error> {
        if messages.len() == 1 && messages[0].dedup_key.is_none() {
            return Ok(insert_rows(conn, tables, &messages).await?);
        }
        // All or nothing, also when the caller goes on after an error and commits.
        sqlx::raw_sql("SAVEPOINT posthouse_publish").execute(&mut *conn).await?;
        let result = insert_rows(conn, tables, &messages).await;
        if result.is_err()
            && let Err(e) = sqlx::raw_sql("ROLLBACK TO posthouse_publish").execute(&mut *conn).await
        {
            // After some errors (a full disk) the whole transaction is gone already, and the savepoint with it.
            tracing::debug!(error = %e, "no savepoint to go back to");
        }
        let released = sqlx::raw_sql("RELEASE posthouse_publish").execute(conn).await;
        result?;
        released?;
        Ok(())
    }

    async fn migrate<'c>(pool: &'c SqlitePool, tables: &'c Tables, _houses: u16) -> Result<(), Error> {
        super::migrate::migrate(pool, tables).await
    }

    fn migration_text(tables: &Tables, _houses: u16, from: i32) -> String {
        super::migrate::text(tables, from)
    }

    async fn notify(_: &SqlitePool, _: &Tables) -> Result<(), Error> {
        Ok(())
    }

    #[cfg(feature = "testing")]
    async fn published<'c>(conn: &'c mut SqliteConnection, tables: &'c Tables) -> Result<Vec<crate::testing::Published>, Error> {
        let rows = sqlx::query(tables.sql(PUBLISHED)).fetch_all(conn).await?;
        rows.iter().map(crate::testing::published_row).collect()
    }

    #[cfg(feature = "relay")]
    fn store(
        pool: &SqlitePool,
        tables: &Tables,
        deadline: Duration,
        people: Option<u32>,
    ) -> std::sync::Arc<dyn crate::store::Store> {
        std::sync::Arc::new(super::SqliteStore::new(pool, tables, deadline, people))
    }

    #[cfg(feature = "relay")]
    fn adopted(_: &SqlitePool, _: &Tables, _: Duration) -> Option<crate::store::adopted::AdoptedHandle> {
        None
    }
}
