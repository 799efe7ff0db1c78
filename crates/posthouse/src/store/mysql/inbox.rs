//! What consumers received.

use std::time::Duration;

use sqlx::mysql::{MySqlPoolOptions, MySqlQueryResult, MySqlRow};
use sqlx::{AssertSqlSafe, Executor as _, MySql, MySqlConnection, MySqlPool, Row, SqlSafeStr as _};

use crate::Error;
use crate::store::{
    Copied, InboxAction, InboxBacklog, InboxDetail, InboxFilter, InboxRow, InboxRows, InboxStatus, NewRow, RowKey, RunFailed,
    Standing, Tables, TakenRow, audit_detail, micros,
};

/// A plain one: it waits for a transaction that inserts the same id, takes no gap locks when the id is new, and when it isn't
/// the statement fails alone.
const INSERT: &str = "INSERT INTO {inbox} (consumer, message_id, status, type, source, message_key, content_type, headers, payload, \
        attempts, claims, next_attempt_at, owner, last_error) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ";

/// The end of a row, by its status; the status is settled in the text, because no parameter can stand twice in it.
const END_FAILED: &str = "TIMESTAMP'9999-12-31 00:00:00.000000', ?, ?)";
const END_WAITING: &str = "UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, ?, ?)";

/// The same for a SUCCESS, which every message pays for.
const INSERT_SUCCESS: &str =
    "INSERT INTO {inbox} (consumer, message_id, type, source, success_at) VALUES (?, ?, ?, ?, UTC_TIMESTAMP(6))";

/// A duplicate key.
const DUPLICATE: u16 = 1062;

/// There is no such savepoint.
const NO_SAVEPOINT: u16 = 1305;

const STANDING: &str = "SELECT status, CAST(COALESCE(next_attempt_at <= UTC_TIMESTAMP(6), 0) AS SIGNED), \
        TIMESTAMPDIFF(MICROSECOND, '1970-01-01', next_attempt_at), version, attempts, claims \
    FROM {inbox} WHERE consumer = ? AND message_id = ?";

const CLAIM: &str = "UPDATE {inbox} SET status = 'RETRYING', claims = claims + 1, version = version + 1, owner = ?, \
        next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, last_at = UTC_TIMESTAMP(6) \
    WHERE consumer = ? AND message_id = ? AND version = ? AND status IN ('PENDING_RETRY', 'RETRYING')";

/// What a row is once its message had its effect.
macro_rules! succeeded {
    () => {
        "UPDATE {inbox} SET status = 'SUCCESS', claims = 0, version = version + 1, owner = NULL, next_attempt_at = NULL, \
            message_key = NULL, content_type = NULL, headers = NULL, payload = NULL, last_at = UTC_TIMESTAMP(6), \
            success_at = UTC_TIMESTAMP(6) WHERE consumer = ? AND message_id = ?"
    };
}

const SUCCEED: &str = concat!(succeeded!(), " AND version = ? AND status = 'RETRYING'");

/// With the wait twice, because MySQL's parameters have no numbers.
const FAIL: &str = "UPDATE {inbox} SET status = CASE WHEN ? IS NULL THEN 'FAILED' ELSE 'PENDING_RETRY' END, attempts = ?, claims = ?, \
        version = version + 1, owner = NULL, last_error = COALESCE(?, last_error), last_at = UTC_TIMESTAMP(6), \
        next_attempt_at = COALESCE(UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, TIMESTAMP'9999-12-31 00:00:00.000000') \
    WHERE consumer = ? AND message_id = ? AND version = ? AND status IN ('PENDING_RETRY', 'RETRYING')";

const ADOPT: &str = concat!(succeeded!(), " AND status = 'PENDING_RETRY' AND next_attempt_at <= UTC_TIMESTAMP(6)");

// Plan: one range scan of (consumer, next_attempt_at), in its order, so that no more rows are locked than taken.
const DUE: &str = "SELECT message_id, version, attempts, claims FROM {inbox} FORCE INDEX (inbox_due) \
    WHERE consumer = ? AND next_attempt_at > '1000-01-01' AND next_attempt_at <= UTC_TIMESTAMP(6) \
      AND status IN ('PENDING_RETRY', 'RETRYING') ORDER BY next_attempt_at LIMIT ? FOR UPDATE SKIP LOCKED";

/// By primary key.
const TAKE: &str = "UPDATE {inbox} FORCE INDEX (PRIMARY) SET status = 'RETRYING', owner = ?, version = version + 1, \
        next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND WHERE consumer = ? AND message_id IN (%IDS%)";

/// By primary key.
const RENEW: &str = "UPDATE {inbox} FORCE INDEX (PRIMARY) SET next_attempt_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND \
    WHERE consumer = ? AND owner = ? AND status = 'RETRYING' AND message_id IN (%IDS%)";

// Plan: one range scan of (consumer, NULL, success_at), in its order, so that no more rows are locked than removed.
const OLD: &str = "SELECT message_id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', success_at) FROM {inbox} FORCE INDEX (inbox_due) \
    WHERE consumer = ? AND next_attempt_at IS NULL AND success_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND \
      AND success_at >= TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ? MICROSECOND AND status = 'SUCCESS' \
    ORDER BY success_at LIMIT ? FOR UPDATE SKIP LOCKED";

/// By primary key.
const PURGE: &str = "DELETE FROM {inbox} WHERE consumer = ? AND message_id IN (%IDS%)";

macro_rules! columns {
    () => {
        "i.consumer, i.message_id, i.status, i.type, CAST(i.source AS BINARY), i.attempts, i.claims, i.version, \
         CASE WHEN i.status <> 'FAILED' THEN TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.next_attempt_at) END, i.owner, CAST(i.last_error AS BINARY), \
         TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.first_at), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.last_at), \
         TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.success_at)"
    };
}

macro_rules! unfinished {
    () => {
        "(SELECT DISTINCT consumer FROM {inbox}) c STRAIGHT_JOIN {inbox} i FORCE INDEX (inbox_due) \
             ON i.consumer = c.consumer AND i.next_attempt_at > '1000-01-01' WHERE 1 = 1"
    };
}

const READ: &str = concat!(
    "SELECT ",
    columns!(),
    ", i.message_key, i.content_type, CAST(i.headers AS BINARY), i.payload FROM {inbox} i WHERE i.consumer = ? AND i.message_id = ?"
);

// Plan: a range of the primary key, in its order.
const LIST: &str = concat!("SELECT ", columns!(), " FROM {inbox} i FORCE INDEX (PRIMARY) WHERE 1 = 1");

// Plan: the consumers by skipping from one to the next, and of each a range of (consumer, next_attempt_at), sorted: those that
// are done have NULL there and are not read.
const LIST_UNFINISHED: &str = concat!("SELECT ", columns!(), " FROM ", unfinished!());

const STEP: &str = "SELECT i.consumer, i.message_id FROM {inbox} i FORCE INDEX (PRIMARY) WHERE 1 = 1";

const STEP_UNFINISHED: &str = concat!("SELECT i.consumer, i.message_id FROM ", unfinished!());

/// Bounds a list by its indexes. Written so that each end is a range of the primary key: a comparison of pairs would not be one.
fn bounds<'f>(sql: &mut String, values: &mut Vec<&'f [u8]>, filter: &'f InboxFilter, upto: Option<&'f (String, String)>) {
    if let Some(consumer) = &filter.consumer {
        sql.push_str(" AND i.consumer = ?");
        values.push(consumer.as_bytes());
    }
    if let Some((consumer, id)) = &filter.after {
        sql.push_str(" AND (i.consumer = ? AND i.message_id > ? OR i.consumer > ?)");
        values.extend([consumer.as_bytes(), id.as_bytes(), consumer.as_bytes()]);
    }
    if let Some((consumer, id)) = upto {
        sql.push_str(" AND (i.consumer = ? AND i.message_id <= ? OR i.consumer < ?)");
        values.extend([consumer.as_bytes(), id.as_bytes(), consumer.as_bytes()]);
    }
}

fn is_unfinished(filter: &InboxFilter) -> bool {
    filter.status.is_some_and(|status| status != InboxStatus::Success)
}

const BACKLOG: &str = concat!(
    "SELECT i.consumer, i.status, COUNT(*), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', MIN(i.first_at)), \
            TIMESTAMPDIFF(MICROSECOND, MIN(i.first_at), UTC_TIMESTAMP(6)) FROM ",
    unfinished!(),
    " GROUP BY i.consumer, i.status ORDER BY i.consumer, i.status"
);

/// Bytes as text; what isn't UTF-8 in them becomes U+FFFD.
fn text(r: &MySqlRow, column: usize) -> Result<Option<String>, sqlx::Error> {
    Ok(r.try_get::<Option<Vec<u8>>, _>(column)?.map(|b| String::from_utf8_lossy(&b).into_owned()))
}

fn status(r: &MySqlRow, column: usize) -> Result<InboxStatus, sqlx::Error> {
    Ok(InboxStatus::parse(&text(r, column)?.unwrap_or_default()))
}

fn row(r: &MySqlRow) -> Result<InboxRow, sqlx::Error> {
    Ok(InboxRow {
        consumer: text(r, 0)?.unwrap_or_default(),
        message_id: text(r, 1)?.unwrap_or_default(),
        status: status(r, 2)?,
        kind: text(r, 3)?.unwrap_or_default(),
        source: text(r, 4)?,
        attempts: r.try_get(5)?,
        claims: r.try_get(6)?,
        version: r.try_get(7)?,
        next_attempt_us: r.try_get(8)?,
        owner: text(r, 9)?,
        last_error: text(r, 10)?,
        first_us: r.try_get(11)?,
        last_us: r.try_get(12)?,
        success_us: r.try_get(13)?,
    })
}

/// Whether a row was inserted, or was there.
fn inserted(result: Result<MySqlQueryResult, sqlx::Error>) -> Result<bool, Error> {
    match result {
        Ok(_) => Ok(true),
        Err(e) if super::number(&e) == Some(DUPLICATE) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// A statement with as many placeholders as there are ids; the few texts this makes are not worth keeping prepared.
fn with_ids(tables: &Tables, template: &str, ids: usize) -> sqlx::SqlStr {
    AssertSqlSafe(tables.text(template).replace("%IDS%", &vec!["?"; ids].join(", "))).into_sql_str()
}

impl InboxRows for MySql {
    /// A savepoint before the first write costs the storage engine and the binary log nothing.
    const INBOX_BEGIN: &'static str = "BEGIN; SAVEPOINT posthouse_inbox";

    fn inbox_pool(pool: &MySqlPool, deadline: Duration, connections: u32) -> MySqlPool {
        // READ COMMITTED: taking due rows must not lock the gaps between them, where other consumers insert.
        let session = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED";
        MySqlPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(deadline)
            .after_connect(move |conn, _| {
                Box::pin(async move {
                    conn.execute(sqlx::raw_sql(session)).await?;
                    Ok(())
                })
            })
            .connect_lazy_with((*pool.connect_options()).clone().charset("utf8mb4"))
    }

    async fn inbox_insert<'c>(conn: &'c mut MySqlConnection, tables: &'c Tables, row: &'c NewRow<'c>) -> Result<bool, Error> {
        // As bytes, so that no character set of the connection touches them.
        let end = match row.status {
            InboxStatus::Success => {
                let insert = sqlx::query(tables.sql(INSERT_SUCCESS))
                    .bind(row.consumer.as_bytes())
                    .bind(row.id.as_bytes())
                    .bind(row.kind.as_bytes())
                    .bind(row.source.map(str::as_bytes));
                return inserted(insert.execute(conn).await);
            }
            InboxStatus::Failed => END_FAILED,
            InboxStatus::PendingRetry | InboxStatus::Retrying => END_WAITING,
        };
        let copy = row.copy;
        let mut query = sqlx::query(tables.sql(&[INSERT, end].concat()))
            .bind(row.consumer.as_bytes())
            .bind(row.id.as_bytes())
            .bind(row.status.as_str().as_bytes())
            .bind(row.kind.as_bytes())
            .bind(row.source.map(str::as_bytes))
            .bind(copy.and_then(|c| c.key.as_deref()).map(str::as_bytes))
            .bind(copy.map(|c: &Copied<'_>| c.content_type.as_bytes()))
            .bind(copy.and_then(|c| c.headers.as_deref()).map(str::as_bytes))
            .bind(copy.map(|c| c.payload))
            .bind(row.attempts)
            .bind(row.claims);
        if end == END_WAITING {
            query = query.bind(micros(row.wait));
        }
        inserted(query.bind(row.owner.map(str::as_bytes)).bind(row.error.map(str::as_bytes)).execute(conn).await)
    }

    async fn inbox_marked<'c>(conn: &'c mut MySqlConnection, _: &'c Tables) -> Result<bool, Error> {
        match sqlx::raw_sql("RELEASE SAVEPOINT posthouse_inbox").execute(conn).await {
            Ok(_) => Ok(true),
            Err(e) if super::number(&e) == Some(NO_SAVEPOINT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// ROLLBACK without a transaction is no error.
    async fn inbox_resume<'c>(_: &'c mut MySqlConnection, _: &'c Tables) -> Result<(), Error> {
        Ok(())
    }

    async fn inbox_standing<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<Standing>, Error> {
        let found = sqlx::query(tables.sql(STANDING)).bind(consumer.as_bytes()).bind(id.as_bytes()).fetch_optional(conn).await?;
        let standing = |r: MySqlRow| {
            Ok::<_, sqlx::Error>(Standing {
                status: status(&r, 0)?,
                due: r.try_get::<i64, _>(1)? == 1,
                next_us: r.try_get(2)?,
                version: r.try_get(3)?,
                attempts: r.try_get(4)?,
                claims: r.try_get(5)?,
            })
        };
        Ok(found.map(standing).transpose()?)
    }

    async fn inbox_claim<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        key: RowKey<'c>,
        owner: &'c str,
        lease: Duration,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(CLAIM))
            .bind(owner.as_bytes())
            .bind(micros(lease))
            .bind(key.consumer.as_bytes())
            .bind(key.id.as_bytes())
            .bind(key.version)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_succeed<'c>(conn: &'c mut MySqlConnection, tables: &'c Tables, key: RowKey<'c>) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(SUCCEED))
            .bind(key.consumer.as_bytes())
            .bind(key.id.as_bytes())
            .bind(key.version)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_fail<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        key: RowKey<'c>,
        failed: &'c RunFailed<'c>,
    ) -> Result<bool, Error> {
        let wait = failed.wait.map(micros);
        let done = sqlx::query(tables.sql(FAIL))
            .bind(wait)
            .bind(failed.attempts)
            .bind(failed.claims)
            .bind(failed.error.map(str::as_bytes))
            .bind(wait)
            .bind(key.consumer.as_bytes())
            .bind(key.id.as_bytes())
            .bind(key.version)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_adopt<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(ADOPT)).bind(consumer.as_bytes()).bind(id.as_bytes()).execute(conn).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_take<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<TakenRow>, Error> {
        let rows = sqlx::query(tables.sql(DUE)).bind(consumer.as_bytes()).bind(limit).fetch_all(&mut *conn).await?;
        let taken = |r: &MySqlRow| {
            // The version it has after the update below.
            Ok(TakenRow {
                id: text(r, 0)?.unwrap_or_default(),
                version: r.try_get::<i32, _>(1)? + 1,
                attempts: r.try_get(2)?,
                claims: r.try_get(3)?,
            })
        };
        let taken = rows.iter().map(taken).collect::<Result<Vec<_>, sqlx::Error>>()?;
        if !taken.is_empty() {
            let mut query = sqlx::query(with_ids(tables, TAKE, taken.len())).persistent(false);
            query = query.bind(owner.as_bytes()).bind(micros(lease)).bind(consumer.as_bytes());
            for row in &taken {
                query = query.bind(row.id.as_bytes());
            }
            query.execute(conn).await?;
        }
        Ok(taken)
    }

    async fn inbox_renew<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        ids: &'c [String],
        lease: Duration,
    ) -> Result<(), Error> {
        if !ids.is_empty() {
            let mut query = sqlx::query(with_ids(tables, RENEW, ids.len())).persistent(false);
            query = query.bind(micros(lease)).bind(consumer.as_bytes()).bind(owner.as_bytes());
            for id in ids {
                query = query.bind(id.as_bytes());
            }
            query.execute(conn).await?;
        }
        Ok(())
    }

    async fn inbox_purge<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        older: Duration,
        from_us: i64,
        limit: u32,
    ) -> Result<(u64, Option<i64>), Error> {
        let old: Vec<(Vec<u8>, i64)> = sqlx::query_as(tables.sql(OLD))
            .bind(consumer.as_bytes())
            .bind(micros(older))
            .bind(from_us)
            .bind(limit)
            .fetch_all(&mut *conn)
            .await?;
        let Some((_, last_us)) = old.last() else { return Ok((0, None)) };
        let last_us = *last_us;
        let mut query = sqlx::query(with_ids(tables, PURGE, old.len())).persistent(false).bind(consumer.as_bytes());
        for (id, _) in old {
            query = query.bind(id);
        }
        Ok((query.execute(conn).await?.rows_affected(), Some(last_us)))
    }

    async fn inbox_read<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<InboxDetail>, Error> {
        let found = sqlx::query(tables.sql(READ)).bind(consumer.as_bytes()).bind(id.as_bytes()).fetch_optional(conn).await?;
        let detail = |r: MySqlRow| {
            Ok::<_, sqlx::Error>(InboxDetail {
                row: row(&r)?,
                key: text(&r, 14)?,
                content_type: text(&r, 15)?,
                headers: text(&r, 16)?,
                payload: r.try_get(17)?,
            })
        };
        Ok(found.map(detail).transpose()?)
    }

    async fn inbox_list<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        filter: &'c InboxFilter,
        upto: Option<&'c (String, String)>,
    ) -> Result<Vec<InboxRow>, Error> {
        let mut sql = if is_unfinished(filter) { LIST_UNFINISHED } else { LIST }.to_owned();
        let mut values: Vec<&[u8]> = Vec::new();
        bounds(&mut sql, &mut values, filter, upto);
        if let Some(status) = filter.status {
            sql.push_str(" AND i.status = ?");
            values.push(status.as_str().as_bytes());
        }
        if let Some(kind) = &filter.kind {
            sql.push_str(" AND i.type = ?");
            values.push(kind.as_bytes());
        }
        if let Some(text) = &filter.text {
            let columns = [
                "i.message_id",
                "i.type",
                "i.message_key",
                "CAST(i.last_error AS BINARY)",
                "CAST(i.source AS BINARY)",
                "i.payload",
            ];
            let searched = &columns[..columns.len() - usize::from(filter.sealed)];
            let found: Vec<String> = searched.iter().map(|column| format!("LOCATE(?, {column}) > 0")).collect();
            sql.push_str(&format!(" AND ({})", found.join(" OR ")));
            values.extend(searched.iter().map(|_| text.as_bytes()));
        }
        let times = [(filter.first_after_us, ">="), (filter.first_before_us, "<")];
        for (_, compared) in times.iter().filter(|(at, _)| at.is_some()) {
            sql.push_str(&format!(" AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.first_at) {compared} ?"));
        }
        sql.push_str(" ORDER BY i.consumer, i.message_id LIMIT ?");
        let mut query = sqlx::query(tables.sql(&sql));
        for value in values {
            query = query.bind(value);
        }
        for at in times.iter().filter_map(|(at, _)| *at) {
            query = query.bind(at);
        }
        let rows = query.bind(filter.limit).fetch_all(conn).await?;
        Ok(rows.iter().map(row).collect::<Result<_, _>>()?)
    }

    async fn inbox_step<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        filter: &'c InboxFilter,
        n: u32,
    ) -> Result<Option<(String, String)>, Error> {
        let mut sql = if is_unfinished(filter) { STEP_UNFINISHED } else { STEP }.to_owned();
        let mut values: Vec<&[u8]> = Vec::new();
        bounds(&mut sql, &mut values, filter, None);
        sql.push_str(" ORDER BY i.consumer, i.message_id LIMIT ?, 1");
        let mut query = sqlx::query(tables.sql(&sql));
        for value in values {
            query = query.bind(value);
        }
        let reached = query.bind(n.saturating_sub(1)).fetch_optional(conn).await?;
        let key = |r: MySqlRow| Ok::<_, sqlx::Error>((text(&r, 0)?.unwrap_or_default(), text(&r, 1)?.unwrap_or_default()));
        Ok(reached.map(key).transpose()?)
    }

    async fn inbox_act<'c>(
        conn: &'c mut MySqlConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
        action: InboxAction,
        actor: &'c str,
    ) -> Result<bool, Error> {
        let (update, named) = match action {
            InboxAction::Requeue => (
                "UPDATE {inbox} SET status = 'PENDING_RETRY', attempts = 0, claims = 0, version = version + 1, owner = NULL, \
                        next_attempt_at = UTC_TIMESTAMP(6), last_at = UTC_TIMESTAMP(6) \
                  WHERE consumer = ? AND message_id = ? AND status IN ('FAILED', 'PENDING_RETRY')",
                None,
            ),
            InboxAction::Skip => (
                "UPDATE {inbox} SET status = 'FAILED', version = version + 1, owner = NULL, last_at = UTC_TIMESTAMP(6), \
                        next_attempt_at = TIMESTAMP'9999-12-31 00:00:00.000000', \
                        last_error = CONCAT(COALESCE(CONCAT(last_error, '; '), ''), 'skipped by ', CONVERT(? USING utf8mb4)) \
                  WHERE consumer = ? AND message_id = ? AND status <> 'SUCCESS'",
                Some(actor.as_bytes()),
            ),
        };
        let mut query = sqlx::query(tables.sql(update));
        if let Some(actor) = named {
            query = query.bind(actor);
        }
        if query.bind(consumer.as_bytes()).bind(id.as_bytes()).execute(&mut *conn).await?.rows_affected() == 0 {
            return Ok(false);
        }
        // Change 0: nothing that a relay would have to read again.
        sqlx::query(
            tables.sql("INSERT INTO {audit} (`change`, actor, action, row_id, house, detail) VALUES (0, ?, ?, 0, -1, ?)"),
        )
        .bind(actor.as_bytes())
        .bind(action.name().as_bytes())
        .bind(audit_detail(consumer, id).into_bytes())
        .execute(conn)
        .await?;
        Ok(true)
    }

    async fn inbox_backlog<'c>(conn: &'c mut MySqlConnection, tables: &'c Tables) -> Result<Vec<InboxBacklog>, Error> {
        let rows = sqlx::query(tables.sql(BACKLOG)).fetch_all(conn).await?;
        let line = |r: &MySqlRow| {
            Ok(InboxBacklog {
                consumer: text(r, 0)?.unwrap_or_default(),
                status: status(r, 1)?,
                messages: r.try_get(2)?,
                oldest_us: r.try_get(3)?,
                age_us: r.try_get(4)?,
            })
        };
        Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
    }
}
