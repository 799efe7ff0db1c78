//! What people look at and change.

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row, SqliteConnection};

use super::now;
use super::relay::{bytes, json, text, text_or_null};
use crate::Error;
use crate::store::{
    Action, AttemptRow, Backlog, HouseRow, Listed, MessageDetail, MessageFilter, MessageRow, MessageStatus, Tables,
};

macro_rules! columns {
    () => {
        "l.id, l.message_id, l.type, coalesce(p.destination, l.destination), l.message_key, coalesce(p.status, 'SENT'), coalesce(p.house, 0), \
         coalesce(p.attempts, 0), coalesce(p.claims, 0), p.last_error, l.created_at, CASE WHEN p.status <> 'FAILED' THEN p.due_at END, \
         length(CAST(l.payload AS BLOB)) + coalesce(length(CAST(l.headers AS BLOB)), 0)"
    };
}

macro_rules! filters {
    () => {
        " AND (?2 IS NULL OR coalesce(p.destination, l.destination) = ?2) AND (?3 IS NULL OR l.message_key = ?3) \
          AND (?4 IS NULL OR l.message_id = ?4) ORDER BY l.id DESC LIMIT ?5"
    };
}

// The log by id, pending looked up by its primary key.
const LIST_ALL: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {message} l LEFT JOIN {pending} p ON p.house = 0 AND p.id = l.id WHERE l.id < ?1 AND (?6 IS NULL OR p.id IS NULL)",
    filters!()
);

// The pending set, the log looked up by its primary key.
const LIST_UNFINISHED: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {pending} p CROSS JOIN {message} l ON l.id = p.id WHERE p.house = 0 AND p.id < ?1 AND p.status = ?6",
    filters!()
);

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

pub(super) async fn list(
    conn: &mut SqliteConnection,
    tables: &Tables,
    filter: &MessageFilter,
) -> Result<Listed<MessageRow>, Error> {
    let (template, status) = match filter.status {
        None => (LIST_ALL, None),
        Some(MessageStatus::Sent) => (LIST_ALL, Some("SENT")),
        Some(other) => (LIST_UNFINISHED, Some(other.as_str())),
    };
    let rows = sqlx::query(tables.sql(template))
        .bind(filter.before.unwrap_or(i64::MAX))
        .bind(&filter.destination)
        .bind(&filter.key)
        .bind(&filter.message_id)
        .bind(filter.limit)
        .bind(status)
        .fetch_all(conn)
        .await?;
    Ok(Listed::page(rows.iter().map(row).collect::<Result<_, _>>()?, filter.limit, |r| r.id))
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
