//! What people look at and change.

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row, SqliteConnection};

use super::now;
use super::relay::{bytes, json, text, text_or_null};
use crate::Error;
use crate::store::{
    Action, AttemptRow, Backlog, Candidate, Chunk, Hit, HouseRow, MessageDetail, MessageFilter, MessageRow, MessageStatus,
    Search, Tables, Which,
};

macro_rules! columns {
    () => {
        "l.id, l.message_id, l.type, coalesce(p.destination, l.destination), l.message_key, coalesce(p.status, 'SENT'), coalesce(p.house, 0), \
         coalesce(p.attempts, 0), coalesce(p.claims, 0), p.last_error, l.created_at, CASE WHEN p.status <> 'FAILED' THEN p.due_at END, \
         length(CAST(l.payload AS BLOB)) + coalesce(length(CAST(l.headers AS BLOB)), 0)"
    };
}

/// Whether bytes of a column have the text `?8` in them.
macro_rules! has {
    ($column:literal) => {
        concat!("instr(CAST(", $column, " AS BLOB), CAST(?8 AS BLOB)) > 0")
    };
}

// What every list wants of a row that it looks at; the sources below bound how many it looks at.
macro_rules! wanted {
    () => {
        concat!(
            " AND (?3 IS NULL OR coalesce(p.status, 'SENT') = ?3) AND (?4 IS NULL OR coalesce(p.destination, l.destination) = ?4) \
              AND (?5 IS NULL OR l.message_key = ?5) AND (?6 IS NULL OR l.created_at >= ?6) AND (?7 IS NULL OR l.created_at < ?7) \
              AND (?8 IS NULL OR ",
            has!("l.message_id"),
            " OR ",
            has!("l.message_key"),
            " OR ",
            has!("l.type"),
            " OR ",
            has!("coalesce(p.destination, l.destination)"),
            " OR ",
            has!("p.last_error"),
            " OR ",
            has!("l.payload"),
            ") ORDER BY l.id DESC LIMIT ?9"
        )
    };
}

// Plan: the log by a range of its primary key, pending looked up by its primary key.
const RANGE: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM {message} l LEFT JOIN {pending} p ON p.house = 0 AND p.id = l.id WHERE l.id >= ?1 AND l.id < ?2",
    wanted!()
);

// Plan: pending and the log by their primary keys.
const PENDING: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM json_each(?1) d CROSS JOIN {pending} p ON p.house = 0 AND p.id = d.value CROSS JOIN {message} l ON l.id = p.id \
      WHERE ?2 = 0",
    wanted!()
);

// Plan: the log by the index of its message ids, pending looked up by its primary key.
const MESSAGE_ID: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination FROM {message} l INDEXED BY {-message_message_id} LEFT JOIN {pending} p ON p.house = 0 AND p.id = l.id \
      WHERE l.message_id = ?1 AND l.id < ?2",
    wanted!()
);

// Plan: the primary key downwards, as far as the limit.
const LOG_STEP: &str =
    "SELECT min(id) FROM (SELECT id FROM {message} WHERE id >= ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3) HAVING count(*) = ?3";

// Plan: the primary key downwards, as far as the limit.
const PENDING_STEP: &str =
    "SELECT house, id, status, destination FROM {pending} WHERE house = 0 AND id >= ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3";

// Plan: the index of FAILED ones downwards, as far as the limit.
const FAILED_STEP: &str = "SELECT house, id, status, destination FROM {pending} INDEXED BY {-pending_failed} \
      WHERE status = 'FAILED' AND id >= ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3";

const SHOW: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.content_type, l.headers, l.payload, l.destination FROM {message} l LEFT JOIN {pending} p ON p.house = 0 AND p.id = l.id WHERE l.id = ?"
);

fn row(r: &SqliteRow) -> Result<MessageRow, sqlx::Error> {
    Ok(MessageRow {
        id: r.try_get(0)?,
        message_id: text(r, 1)?,
        kind: text(r, 2)?,
        destination: text(r, 3)?,
        key: text_or_null(r, 4)?,
        status: text(r, 5)?,
        house: r.try_get(6)?,
        attempts: r.try_get(7)?,
        claims: r.try_get(8)?,
        last_error: text_or_null(r, 9)?,
        created_at_ms: r.try_get(10)?,
        next_attempt_ms: r.try_get(11)?,
        size: r.try_get(12)?,
    })
}

/// The steps of a search, on a connection.
pub(super) struct Steps<'c>(pub(super) &'c mut SqliteConnection, pub(super) &'c Tables);

impl Search for Steps<'_> {
    async fn log_step(&mut self, from: i64, below: i64, n: u32) -> Result<Option<i64>, Error> {
        Ok(sqlx::query_scalar(self.1.sql(LOG_STEP)).bind(from).bind(below).bind(n).fetch_optional(&mut *self.0).await?)
    }

    async fn pending_step(&mut self, failed: bool, from: i64, below: i64, n: u32) -> Result<Chunk, Error> {
        let template = if failed { FAILED_STEP } else { PENDING_STEP };
        let found = sqlx::query(self.1.sql(template)).bind(from).bind(below).bind(n).fetch_all(&mut *self.0).await?;
        let candidate = |r: &SqliteRow| {
            Ok(Candidate { house: r.try_get(0)?, id: r.try_get(1)?, status: text(r, 2)?, destination: text(r, 3)? })
        };
        Ok(Chunk::of_all(found.iter().map(candidate).collect::<Result<_, sqlx::Error>>()?, n))
    }

    async fn rows(&mut self, which: Which<'_>, filter: &MessageFilter, limit: u32) -> Result<Vec<Hit>, Error> {
        let query = match which {
            Which::Range(from, below) => sqlx::query(self.1.sql(RANGE)).bind(from).bind(below),
            Which::MessageId(message_id, below) => sqlx::query(self.1.sql(MESSAGE_ID)).bind(message_id.to_owned()).bind(below),
            Which::Pending(rows) => {
                let ids: Vec<i64> = rows.iter().map(|r| r.id).collect();
                sqlx::query(self.1.sql(PENDING)).bind(json(&ids)?).bind(0)
            }
        };
        let found = query
            .bind(filter.status.map(MessageStatus::as_str))
            .bind(&filter.destination)
            .bind(&filter.key)
            .bind(filter.created_after_ms)
            .bind(filter.created_before_ms)
            .bind(&filter.text)
            .bind(limit)
            .fetch_all(&mut *self.0)
            .await?;
        let hit = |r: &SqliteRow| Ok(Hit { row: row(r)?, published_to: text(r, 13)? });
        Ok(found.iter().map(hit).collect::<Result<_, sqlx::Error>>()?)
    }

    async fn ends(&mut self) -> Result<Option<(i64, i64)>, Error> {
        // Two subqueries: with both in one SELECT the whole table would be read.
        let (first, last): (Option<i64>, Option<i64>) =
            sqlx::query_as(self.1.sql("SELECT (SELECT min(id) FROM {message}), (SELECT max(id) FROM {message})"))
                .fetch_one(&mut *self.0)
                .await?;
        Ok(first.zip(last))
    }

    async fn created(&mut self, id: i64) -> Result<Option<(i64, i64)>, Error> {
        const CREATED: &str = "SELECT id, created_at FROM {message} WHERE id >= ?1 ORDER BY id LIMIT 1";
        Ok(sqlx::query_as(self.1.sql(CREATED)).bind(id).fetch_optional(&mut *self.0).await?)
    }
}

pub(super) async fn show(conn: &mut SqliteConnection, tables: &Tables, id: i64) -> Result<Option<MessageDetail>, Error> {
    let Some(found) = sqlx::query(tables.sql(SHOW)).bind(id).fetch_optional(&mut *conn).await? else { return Ok(None) };
    let message = row(&found)?;
    let history = sqlx::query(
        tables.sql("SELECT at, attempt, outcome, error, response, took_ms, instance FROM {attempt} WHERE row_id = ? ORDER BY id"),
    )
    .bind(id)
    .fetch_all(&mut *conn)
    .await?;
    let attempt = |r: &SqliteRow| {
        Ok(AttemptRow {
            at_ms: r.try_get(0)?,
            attempt: r.try_get(1)?,
            outcome: text(r, 2)?,
            error: text(r, 3)?,
            response: text_or_null(r, 4)?,
            took_ms: r.try_get::<i64, _>(5)?.min(i32::MAX.into()) as i32,
            instance: text(r, 6)?,
        })
    };
    let delivered = sqlx::query_as(tables.sql(
        "SELECT at, instance FROM {receipt} WHERE house = ?1 AND low <= ?2 AND low > ?2 - 1000000 \
            AND EXISTS (SELECT 1 FROM json_each(ids) WHERE value = ?2) ORDER BY id DESC LIMIT 1",
    ))
    .bind(message.house)
    .bind(id)
    .fetch_optional(conn)
    .await?;
    Ok(Some(MessageDetail {
        row: message,
        published_to: text(&found, 16)?,
        content_type: text(&found, 13)?,
        headers: text_or_null(&found, 14)?,
        payload: bytes(&found, 15)?.unwrap_or_default(),
        history: history.iter().map(attempt).collect::<Result<_, sqlx::Error>>()?,
        delivered,
    }))
}

/// Counter and rows change in one transaction, and writers come one after the other: a relay that saw number n has seen all up to n.
pub(super) async fn act(
    conn: &mut SqliteConnection,
    tables: &Tables,
    ids: &[i64],
    action: &Action,
    actor: &str,
) -> Result<Vec<i64>, Error> {
    const KEY: &str = "length(CAST(l.destination AS BLOB)) || ':' || l.destination || l.message_key";
    let now = now!();
    let (set, which, value) = match action {
        Action::Requeue => (
            format!("status = 'PENDING', due_at = {now}, attempts = 0, claims = 0, key_hash = l.key_hash"),
            format!("(p.status = 'FAILED' OR p.status = 'PENDING' AND p.due_at > {now})"),
            None,
        ),
        Action::Skip => (
            "status = 'FAILED', due_at = 253402214400000, key_hash = NULL, \
             last_error = coalesce(p.last_error || '; ', '') || 'skipped by ' || ?2"
                .to_owned(),
            "1".to_owned(),
            Some(actor),
        ),
        Action::Edit { destination } => (
            format!("status = 'PENDING', due_at = {now}, attempts = 0, claims = 0, destination = ?2"),
            "1".to_owned(),
            Some(destination.as_str()),
        ),
    };
    let detail = match action {
        Action::Edit { destination } => Some(destination.as_str()),
        _ => None,
    };
    let mut tx = conn.begin_with(super::WRITE).await?;
    let change: i64 =
        sqlx::query_scalar(tables.sql("UPDATE {meta} SET changes = changes + 1 RETURNING changes")).fetch_one(&mut *tx).await?;
    let update = format!(
        "UPDATE {{pending}} AS p SET {set}, owner = NULL, version = p.version + 1, updated_at = {now} \
           FROM (SELECT l.id, {KEY} AS key_hash FROM json_each(?1) d CROSS JOIN {{message}} l ON l.id = d.value) l \
          WHERE p.house = 0 AND p.id = l.id AND {which} RETURNING id"
    );
    let changed: Vec<i64> = sqlx::query_scalar(tables.sql(&update)).bind(json(ids)?).bind(value).fetch_all(&mut *tx).await?;
    let audit = format!(
        "INSERT INTO {{audit}} (change, actor, action, row_id, house, key_hash, detail) \
         SELECT ?2, ?3, ?4, l.id, 0, {KEY}, ?5 FROM json_each(?1) d CROSS JOIN {{message}} l ON l.id = d.value"
    );
    sqlx::query(tables.sql(&audit))
        .bind(json(&changed)?)
        .bind(change)
        .bind(actor)
        .bind(action.name())
        .bind(detail)
        .execute(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(changed)
}

pub(super) async fn backlog(conn: &mut SqliteConnection, tables: &Tables) -> Result<Vec<Backlog>, Error> {
    let rows = sqlx::query(tables.sql(concat!(
        "SELECT b.destination, b.status, b.messages, ",
        now!(),
        " - (SELECT created_at FROM {message} m WHERE m.id = b.low) \
           FROM (SELECT destination, status, count(*) AS messages, min(id) AS low FROM {pending} GROUP BY 1, 2) b ORDER BY 1, 2"
    )))
    .fetch_all(conn)
    .await?;
    let line = |r: &SqliteRow| {
        Ok(Backlog {
            destination: text(r, 0)?,
            status: text(r, 1)?,
            messages: r.try_get(2)?,
            oldest_ms: r.try_get::<Option<i64>, _>(3)?.unwrap_or(0).max(0),
        })
    };
    Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
}

pub(super) async fn houses(conn: &mut SqliteConnection, tables: &Tables) -> Result<Vec<HouseRow>, Error> {
    let rows = sqlx::query(tables.sql(concat!(
        "SELECT h.house, h.owner, coalesce(i.lease_until > ",
        now!(),
        ", 0), h.epoch, (SELECT count(*) FROM {pending} p WHERE p.house = h.house) \
           FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner ORDER BY 1"
    )))
    .fetch_all(conn)
    .await?;
    let house = |r: &SqliteRow| {
        Ok(HouseRow {
            house: r.try_get(0)?,
            owner: text_or_null(r, 1)?,
            alive: r.try_get(2)?,
            epoch: r.try_get(3)?,
            pending: r.try_get(4)?,
        })
    };
    Ok(rows.iter().map(house).collect::<Result<_, sqlx::Error>>()?)
}
