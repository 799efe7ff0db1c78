//! Inserting messages inside the caller's transaction.

use std::time::{Duration, SystemTime};

use sqlx::{PgConnection, PgPool, Postgres};

use super::super::{Backend, InsertStatement, Param, Tables, private};
use crate::Error;
use crate::message::{Checked, Due};

/// The casts tell drivers that ask the server for the types of parameters the ones of [`Param`].
const INSERT: &str = "INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) \
    VALUES ($1::text, $2::text, $3::text, $4::text, $5::bytea, $6::text, $7::text::json, \
            coalesce('epoch'::timestamptz + $8::bigint * interval '1 microsecond', statement_timestamp() + $9::bigint * interval '1 microsecond'), \
            $10::bigint::integer)";

/// Inserts the message only if its dedup key is new. A bare ON CONFLICT, so that the caller's transaction stays usable.
const INSERT_ONCE: &str = "WITH fresh AS (INSERT INTO {dedup} (dedup_key, message_id) VALUES ($11::text, $1::text) ON CONFLICT DO NOTHING RETURNING dedup_key) \
    INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) \
    SELECT $1::text, $2::text, $3::text, $4::text, $5::bytea, $6::text, $7::text::json, \
           coalesce('epoch'::timestamptz + $8::bigint * interval '1 microsecond', statement_timestamp() + $9::bigint * interval '1 microsecond'), \
           $10::bigint::integer FROM fresh";

/// Many in one round trip; ids follow the order of the arrays.
const INSERT_MANY: &str = "INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) \
    SELECT message_id, type, destination, message_key, payload, content_type, headers::json, \
           coalesce('epoch'::timestamptz + at * interval '1 microsecond', statement_timestamp() + after * interval '1 microsecond'), max_attempts \
      FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], $8::bigint[], $9::bigint[], $10::integer[]) \
           WITH ORDINALITY AS i(message_id, type, destination, message_key, payload, content_type, headers, at, after, max_attempts, n) ORDER BY n";

/// The same where there are dedup keys among them. Only then: a publisher without them needs no grant on their table.
const INSERT_MANY_ONCE: &str = "WITH input AS (SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[], \
           $8::bigint[], $9::bigint[], $10::integer[], $11::text[]) WITH ORDINALITY \
           AS i(message_id, type, destination, message_key, payload, content_type, headers, at, after, max_attempts, dedup_key, n)), \
    fresh AS (INSERT INTO {dedup} (dedup_key, message_id) SELECT dedup_key, message_id FROM input WHERE dedup_key IS NOT NULL \
              ON CONFLICT DO NOTHING RETURNING dedup_key) \
    INSERT INTO {message} (message_id, type, destination, message_key, payload, content_type, headers, deliver_at, max_attempts) \
    SELECT message_id, type, destination, message_key, payload, content_type, headers::json, \
           coalesce('epoch'::timestamptz + at * interval '1 microsecond', statement_timestamp() + after * interval '1 microsecond'), max_attempts \
      FROM input WHERE dedup_key IS NULL OR dedup_key IN (SELECT dedup_key FROM fresh) ORDER BY n";

/// What the pending set holds, with texts as their bytes.
#[cfg(feature = "testing")]
const PUBLISHED: &str = "SELECT m.id, convert_to(m.message_id, 'UTF8'), convert_to(m.type, 'UTF8'), convert_to(m.destination, 'UTF8'), \
           convert_to(m.message_key, 'UTF8'), m.payload, convert_to(m.content_type, 'UTF8'), convert_to(m.headers::text, 'UTF8') \
      FROM {pending} p JOIN LATERAL (SELECT * FROM {message} l WHERE l.id = p.id UNION ALL SELECT * FROM {kept} k WHERE k.id = p.id LIMIT 1) m ON true \
     ORDER BY m.id";

/// (absolute, relative) in microseconds.
fn due(due: Option<Due>) -> (Option<i64>, Option<i64>) {
    let micros = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
    match due {
        None => (None, None),
        Some(Due::At(at)) => (Some(at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, micros)), None),
        Some(Due::In(after)) => (None, Some(micros(after))),
    }
}

impl private::Sealed for Postgres {}

impl Backend for Postgres {
    const NOTIFIES: bool = true;
    const QUOTE: char = '"';
    const DEFAULT_SCHEMA: Option<&'static str> = Some("public");
    const SCHEMAS: bool = true;
    const BEGIN: &'static str = "BEGIN";
    const STATEMENTS_CAN_BE_DROPPED: bool = true;

    fn insert_statement(tables: &Tables, m: Checked) -> Result<InsertStatement, Error> {
        let (at, after) = due(m.due);
        let mut params = vec![
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
        let template = match m.dedup_key {
            Some(key) => {
                params.push(Param::Text(Some(key)));
                INSERT_ONCE
            }
            None => INSERT,
        };
        Ok(InsertStatement { sql: tables.text(template), params, message_id: m.id })
    }

    async fn insert<'c>(conn: &'c mut PgConnection, tables: &'c Tables, mut messages: Vec<Checked>) -> Result<(), Error> {
        if messages.len() == 1 {
            let m = messages.remove(0);
            let (at, after) = due(m.due);
            let sql = tables.sql(if m.dedup_key.is_some() { INSERT_ONCE } else { INSERT });
            let mut query = sqlx::query(sql)
                .bind(m.id.as_str())
                .bind(&m.kind)
                .bind(&m.destination)
                .bind(&m.key)
                .bind(&m.payload)
                .bind(&*m.content_type)
                .bind(&m.headers)
                .bind(at)
                .bind(after)
                .bind(m.max_attempts);
            if let Some(key) = &m.dedup_key {
                query = query.bind(key);
            }
            query.execute(conn).await?;
            return Ok(());
        }
        let dues: Vec<_> = messages.iter().map(|m| due(m.due)).collect();
        let once = messages.iter().any(|m| m.dedup_key.is_some());
        let mut query = sqlx::query(tables.sql(if once { INSERT_MANY_ONCE } else { INSERT_MANY }))
            .bind(messages.iter().map(|m| m.id.as_str()).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.kind.as_str()).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.destination.as_str()).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.key.as_deref()).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.payload.as_slice()).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| &*m.content_type).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.headers.as_deref()).collect::<Vec<_>>())
            .bind(dues.iter().map(|d| d.0).collect::<Vec<_>>())
            .bind(dues.iter().map(|d| d.1).collect::<Vec<_>>())
            .bind(messages.iter().map(|m| m.max_attempts).collect::<Vec<_>>());
        if once {
            query = query.bind(messages.iter().map(|m| m.dedup_key.as_deref()).collect::<Vec<_>>());
        }
        query.execute(conn).await?;
        Ok(())
    }

    async fn migrate<'c>(pool: &'c PgPool, tables: &'c Tables, houses: u16) -> Result<(), Error> {
        super::migrate::migrate(pool, tables, houses).await
    }

    fn migration_text(tables: &Tables, houses: u16, from: i32) -> String {
        super::migrate::text(tables, houses, from)
    }

    async fn notify(pool: &PgPool, tables: &Tables) -> Result<(), Error> {
        sqlx::query("SELECT pg_notify($1, '')").bind(super::migrate::channel(tables)).execute(pool).await?;
        Ok(())
    }

    #[cfg(feature = "testing")]
    async fn published<'c>(conn: &'c mut PgConnection, tables: &'c Tables) -> Result<Vec<crate::testing::Published>, Error> {
        let rows = sqlx::query(tables.sql(PUBLISHED)).fetch_all(conn).await?;
        rows.iter().map(crate::testing::published_row).collect()
    }

    #[cfg(feature = "relay")]
    fn store(pool: &PgPool, tables: &Tables, deadline: Duration, people: Option<u32>) -> std::sync::Arc<dyn crate::store::Store> {
        std::sync::Arc::new(super::PostgresStore::new(pool, tables, deadline, people))
    }

    #[cfg(feature = "relay")]
    fn adopted(pool: &PgPool, tables: &Tables, deadline: Duration) -> Option<crate::store::adopted::AdoptedHandle> {
        let store = crate::store::adopted::PostgresAdopted::new(pool, tables, deadline);
        Some(crate::store::adopted::AdoptedHandle(std::sync::Arc::new(store)))
    }
}
