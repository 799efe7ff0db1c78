//! What people look at and change.

use sqlx::mysql::MySqlRow;
use sqlx::{Connection, MySqlConnection, Row};

use super::relay::{int, text, text_or_null};
use crate::Error;
use crate::store::{
    Action, AttemptRow, Backlog, HouseRow, Listed, MessageDetail, MessageFilter, MessageRow, MessageStatus, Tables,
};

/// The house of the log row `l`: an expression that the primary key of pending can be looked up by, which a function that
/// reads the number of houses could not.
macro_rules! house {
    () => {
        "CAST({hash}(l.destination, l.message_key, l.message_id) % t.houses AS SIGNED)"
    };
}

macro_rules! columns {
    () => {
        concat!(
            "l.id, l.message_id, l.type, COALESCE(p.destination, l.destination) AS destination, l.message_key, \
             COALESCE(p.status, 'SENT') AS status, ",
            house!(),
            " AS house, COALESCE(p.attempts, 0) AS attempts, COALESCE(p.claims, 0) AS claims, p.last_error, \
             TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.created_at) DIV 1000 AS created_at_ms, \
             CASE WHEN p.status <> 'FAILED' THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.due_at) DIV 1000 END AS next_attempt_ms, \
             COALESCE(p.size, LENGTH(l.payload) + COALESCE(LENGTH(l.headers), 0)) AS size"
        )
    };
}

/// The log by id, pending looked up by its primary key.
const ALL: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {meta} t STRAIGHT_JOIN {%LOG%} l LEFT JOIN {pending} p ON p.house = ",
    house!(),
    " AND p.id = l.id WHERE t.one = 1 AND l.id < ?"
);

/// The pending set, the log looked up by its primary key.
const UNFINISHED: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {meta} t STRAIGHT_JOIN {pending} p STRAIGHT_JOIN {%LOG%} l ON l.id = p.id WHERE t.one = 1 AND p.id < ? AND p.status = ?"
);

const SHOW: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.content_type, l.headers, l.payload, l.destination FROM {meta} t STRAIGHT_JOIN {%LOG%} l LEFT JOIN {pending} p ON p.house = ",
    house!(),
    " AND p.id = l.id WHERE t.one = 1 AND l.id = ?"
);

/// Where messages lie.
const LOGS: [&str; 2] = ["message", "kept"];

fn row(r: &MySqlRow) -> Result<MessageRow, sqlx::Error> {
    Ok(MessageRow {
        id: int(r, 0)?,
        message_id: text(r, 1)?,
        kind: text(r, 2)?,
        destination: text(r, 3)?,
        key: text_or_null(r, 4)?,
        status: text(r, 5)?,
        house: r.try_get(6)?,
        attempts: r.try_get(7)?,
        claims: r.try_get(8)?,
        last_error: text_or_null(r, 9)?,
        created_at_ms: int(r, 10)?,
        next_attempt_ms: r.try_get(11)?,
        size: int(r, 12)?,
    })
}

pub(super) async fn list(
    conn: &mut MySqlConnection,
    tables: &Tables,
    filter: &MessageFilter,
) -> Result<Listed<MessageRow>, Error> {
    let (mut template, status) = match filter.status {
        None => (ALL.to_owned(), None),
        Some(MessageStatus::Sent) => (format!("{ALL} AND p.id IS NULL"), None),
        Some(MessageStatus::Failed) => {
            // Failed rows lie together in the index (house, due_at, id).
            let failed = "STRAIGHT_JOIN {house} h STRAIGHT_JOIN {pending} p FORCE INDEX (pending_due) \
                 ON p.house = h.house AND p.due_at = '9999-12-31'";
            (UNFINISHED.replace("STRAIGHT_JOIN {pending} p", failed), Some("FAILED"))
        }
        Some(other) => (UNFINISHED.to_owned(), Some(other.as_str())),
    };
    let filters = [
        (&filter.destination, " AND COALESCE(p.destination, l.destination) = ?"),
        (&filter.key, " AND l.message_key = ?"),
        (&filter.message_id, " AND l.message_id = ?"),
    ];
    for (value, condition) in filters {
        if value.is_some() {
            template.push_str(condition);
        }
    }
    template.push_str(" ORDER BY l.id DESC LIMIT ?");
    if filter.message_id.is_some() {
        // By id alone the log would be walked to its start.
        template = template.replace("{%LOG%} l", "{%LOG%} l FORCE INDEX (message_message_id, PRIMARY)");
    }
    let mut out = Vec::new();
    for log in LOGS {
        let mut query = sqlx::query(tables.sql(&template.replace("%LOG%", log))).bind(filter.before.unwrap_or(i64::MAX));
        if let Some(status) = status {
            query = query.bind(status);
        }
        for (value, _) in filters {
            if let Some(value) = value {
                query = query.bind(value.as_bytes());
            }
        }
        for r in &query.bind(i64::from(filter.limit)).fetch_all(&mut *conn).await? {
            out.push(row(r)?);
        }
    }
    out.sort_unstable_by_key(|m| std::cmp::Reverse(m.id));
    out.truncate(filter.limit as usize);
    Ok(Listed::page(out, filter.limit, |r| r.id))
}

pub(super) async fn show(conn: &mut MySqlConnection, tables: &Tables, id: i64) -> Result<Option<MessageDetail>, Error> {
    let mut found = None;
    for log in LOGS {
        if found.is_none() {
            found = sqlx::query(tables.sql(&SHOW.replace("%LOG%", log))).bind(id).fetch_optional(&mut *conn).await?;
        }
    }
    let Some(found) = found else { return Ok(None) };
    let message = row(&found)?;
    let history = sqlx::query(tables.sql(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, attempt, outcome, error, response, took_ms, instance \
           FROM {attempt} WHERE row_id = ? ORDER BY id",
    ))
    .bind(id)
    .fetch_all(&mut *conn)
    .await?;
    let attempt = |r: &MySqlRow| {
        Ok(AttemptRow {
            at_ms: int(r, 0)?,
            attempt: r.try_get(1)?,
            outcome: text(r, 2)?,
            error: text(r, 3)?,
            response: text_or_null(r, 4)?,
            took_ms: r.try_get(5)?,
            instance: text(r, 6)?,
        })
    };
    // Where its house is now, or was before a resize: the index (low, house) serves both.
    let mut delivered = None;
    for house in ["house = ?", "house <> ?"] {
        if delivered.is_none() {
            delivered = sqlx::query(tables.sql(&format!(
                "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', at) DIV 1000, instance FROM {{receipt}} FORCE INDEX (receipt_low) \
                  WHERE low <= ? AND low > ? AND {house} AND JSON_CONTAINS(ids, ?) ORDER BY low DESC LIMIT 1"
            )))
            .bind(id)
            .bind(id - 1_000_000)
            .bind(message.house)
            .bind(id.to_string())
            .fetch_optional(&mut *conn)
            .await?;
        }
    }
    Ok(Some(MessageDetail {
        row: message,
        published_to: text(&found, 16)?,
        content_type: text(&found, 13)?,
        headers: text_or_null(&found, 14)?,
        payload: found.try_get(15)?,
        history: history.iter().map(attempt).collect::<Result<_, sqlx::Error>>()?,
        delivered: delivered.map(|r| Ok::<_, sqlx::Error>((int(&r, 0)?, text(&r, 1)?))).transpose()?,
    }))
}

/// The change counter is raised first: its row lock puts actions in one order, so a relay that saw number n has seen all up to
/// n. Resizing raises it first too, so the number of houses holds until the end.
pub(super) async fn act(
    conn: &mut MySqlConnection,
    tables: &Tables,
    ids: &[i64],
    action: &Action,
    actor: &str,
) -> Result<Vec<i64>, Error> {
    let (which, set) = match action {
        Action::Requeue => (
            " AND (p.status = 'FAILED' OR p.status = 'PENDING' AND p.due_at > UTC_TIMESTAMP(6))",
            "p.status = 'PENDING', p.due_at = UTC_TIMESTAMP(6), p.attempts = 0, p.claims = 0, p.key_hash = d.key_hash",
        ),
        Action::Skip => (
            "",
            "p.status = 'FAILED', p.due_at = TIMESTAMP'9999-12-31 00:00:00.000000', p.key_hash = NULL, \
             p.last_error = CONCAT(COALESCE(CONCAT(p.last_error, '; '), ''), 'skipped by ', ?)",
        ),
        Action::Edit { .. } => (
            "",
            "p.status = 'PENDING', p.due_at = UTC_TIMESTAMP(6), p.attempts = 0, p.claims = 0, p.destination = CAST(? AS BINARY)",
        ),
    };
    let detail = match action {
        Action::Edit { destination } => Some(destination.as_str()),
        _ => None,
    };
    let mut tx = conn.begin().await?;
    sqlx::raw_sql(tables.sql("UPDATE {changes} SET changes = changes + 1")).execute(&mut *tx).await?;
    let change: i64 = sqlx::query_scalar(tables.sql("SELECT changes FROM {changes}")).fetch_one(&mut *tx).await?;
    // Where the rows are, by the log; then those of them that the action applies to, locked in the order all batches use.
    let mut rows: Vec<(i32, i64, Option<i64>)> = Vec::new();
    let list = serde_json::to_string(ids)?;
    for log in LOGS {
        let sql = concat!(
            "SELECT l.id, ",
            house!(),
            ", CASE WHEN l.message_key IS NOT NULL THEN {hash}(l.destination, l.message_key, l.message_id) END \
             FROM {meta} t STRAIGHT_JOIN JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$')) d STRAIGHT_JOIN {%LOG%} l ON l.id = d.id \
             WHERE t.one = 1"
        );
        for r in sqlx::query(tables.sql(&sql.replace("%LOG%", log))).bind(&list).fetch_all(&mut *tx).await? {
            rows.push((r.try_get(1)?, r.try_get(0)?, r.try_get(2)?));
        }
    }
    rows.sort_unstable();
    rows.dedup();
    let batch = "JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', id BIGINT PATH '$[1]', key_hash BIGINT PATH '$[2]')) d \
         STRAIGHT_JOIN {pending} p FORCE INDEX (PRIMARY) ON p.house = d.house AND p.id = d.id";
    let held = sqlx::query(tables.sql(&format!("SELECT p.id FROM {batch} WHERE 1 = 1{which} FOR UPDATE")))
        .bind(serde_json::to_string(&rows)?)
        .fetch_all(&mut *tx)
        .await?;
    let held = held.iter().map(|r| int(r, 0)).collect::<Result<std::collections::HashSet<_>, _>>()?;
    rows.retain(|r| held.contains(&r.1));
    if !rows.is_empty() {
        let list = serde_json::to_string(&rows)?;
        let update =
            format!("UPDATE {batch} SET {set}, p.owner = NULL, p.version = p.version + 1, p.updated_at = UTC_TIMESTAMP(6)");
        let mut query = sqlx::query(tables.sql(&update)).bind(&list);
        query = match action {
            Action::Requeue => query,
            Action::Skip => query.bind(actor),
            Action::Edit { destination } => query.bind(destination.as_bytes()),
        };
        query.execute(&mut *tx).await?;
        sqlx::query(tables.sql(
            "INSERT INTO {audit} (`change`, actor, action, row_id, house, key_hash, detail) \
             SELECT ?, ?, ?, d.id, d.house, d.key_hash, ? FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', \
                 id BIGINT PATH '$[1]', key_hash BIGINT PATH '$[2]')) d",
        ))
        .bind(change)
        .bind(actor)
        .bind(action.name().as_bytes())
        .bind(detail)
        .bind(&list)
        .execute(&mut *tx)
        .await?;
    }
    tx.commit().await?;
    Ok(rows.into_iter().map(|r| r.1).collect())
}

pub(super) async fn backlog(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<Backlog>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT b.destination, b.status, b.messages, TIMESTAMPDIFF(MICROSECOND, m.created_at, UTC_TIMESTAMP(6)) DIV 1000 \
           FROM (SELECT p.destination, p.status, COUNT(*) AS messages, MIN(p.id) AS low FROM {pending} p GROUP BY p.destination, p.status) b \
           LEFT JOIN {message} m ON m.id = b.low ORDER BY b.destination, b.status",
    ))
    .fetch_all(conn)
    .await?;
    let line = |r: &MySqlRow| {
        Ok(Backlog {
            destination: text(r, 0)?,
            status: text(r, 1)?,
            messages: int(r, 2)?,
            oldest_ms: r.try_get::<Option<i64>, _>(3)?.unwrap_or(0).max(0),
        })
    };
    Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
}

pub(super) async fn houses(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<HouseRow>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT h.house, h.owner, CAST(COALESCE(i.lease_until > UTC_TIMESTAMP(6), 0) AS SIGNED), h.epoch, \
                (SELECT COUNT(*) FROM {pending} p WHERE p.house = h.house) \
           FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner ORDER BY h.house",
    ))
    .fetch_all(conn)
    .await?;
    let house = |r: &MySqlRow| {
        Ok(HouseRow {
            house: r.try_get(0)?,
            owner: text_or_null(r, 1)?,
            alive: int(r, 2)? == 1,
            epoch: int(r, 3)?,
            pending: int(r, 4)?,
        })
    };
    Ok(rows.iter().map(house).collect::<Result<_, sqlx::Error>>()?)
}
