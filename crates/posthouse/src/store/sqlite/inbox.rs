//! What consumers received.

use std::time::Duration;

use sqlx::sqlite::{SqlitePoolOptions, SqliteRow};
use sqlx::{Row, Sqlite, SqliteConnection, SqlitePool};

use super::now;
use crate::Error;
use crate::store::{
    Copied, InboxAction, InboxBacklog, InboxDetail, InboxFilter, InboxRow, InboxRows, InboxStatus, NewRow, RowKey, RunFailed,
    Standing, Tables, TakenRow, audit_detail,
};

const INSERT: &str = concat!(
    "INSERT INTO {inbox} (consumer, message_id, status, type, source, message_key, content_type, headers, payload, \
        attempts, claims, next_attempt_at, owner, last_error) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, CASE ?3 WHEN 'FAILED' THEN 253402214400000 ELSE ",
    now!(),
    " + ?12 END, ?13, ?14) ON CONFLICT DO NOTHING"
);

/// The same for a SUCCESS, which every message pays for.
const INSERT_SUCCESS: &str = concat!(
    "INSERT INTO {inbox} (consumer, message_id, type, source, success_at) VALUES (?1, ?2, ?3, ?4, ",
    now!(),
    ") ON CONFLICT DO NOTHING"
);

const STANDING: &str = concat!(
    "SELECT status, coalesce(next_attempt_at <= ",
    now!(),
    ", 0), next_attempt_at, version, attempts, claims FROM {inbox} WHERE consumer = ?1 AND message_id = ?2"
);

const CLAIM: &str = concat!(
    "UPDATE {inbox} SET status = 'RETRYING', claims = claims + 1, version = version + 1, owner = ?4, next_attempt_at = ",
    now!(),
    " + ?5, last_at = ",
    now!(),
    " WHERE consumer = ?1 AND message_id = ?2 AND version = ?3 AND status IN ('PENDING_RETRY', 'RETRYING')"
);

/// What a row is once its message had its effect.
macro_rules! succeeded {
    () => {
        concat!(
            "UPDATE {inbox} SET status = 'SUCCESS', claims = 0, version = version + 1, owner = NULL, next_attempt_at = NULL, \
                message_key = NULL, content_type = NULL, headers = NULL, payload = NULL, last_at = ",
            now!(),
            ", success_at = ",
            now!(),
            " WHERE consumer = ?1 AND message_id = ?2"
        )
    };
}

const SUCCEED: &str = concat!(succeeded!(), " AND version = ?3 AND status = 'RETRYING'");

const FAIL: &str = concat!(
    "UPDATE {inbox} SET status = CASE WHEN ?6 IS NULL THEN 'FAILED' ELSE 'PENDING_RETRY' END, attempts = ?4, claims = ?5, \
        version = version + 1, owner = NULL, last_error = coalesce(?7, last_error), last_at = ",
    now!(),
    ", next_attempt_at = coalesce(",
    now!(),
    " + ?6, 253402214400000) \
     WHERE consumer = ?1 AND message_id = ?2 AND version = ?3 AND status IN ('PENDING_RETRY', 'RETRYING')"
);

const ADOPT: &str = concat!(succeeded!(), " AND status = 'PENDING_RETRY' AND next_attempt_at <= ", now!());

// Plan: one range scan of (consumer, next_attempt_at, message_id), in its order; then a lookup by primary key for each row.
// There is one writer at a time, so nothing has to be passed over.
const TAKE: &str = concat!(
    "UPDATE {inbox} SET status = 'RETRYING', owner = ?2, version = version + 1, next_attempt_at = ",
    now!(),
    " + ?3 WHERE consumer = ?1 AND message_id IN (SELECT message_id FROM {inbox} WHERE consumer = ?1 AND next_attempt_at <= ",
    now!(),
    " AND status IN ('PENDING_RETRY', 'RETRYING') ORDER BY next_attempt_at, message_id LIMIT ?4) \
     RETURNING message_id, version, attempts, claims"
);

const RENEW: &str = concat!(
    "UPDATE {inbox} SET next_attempt_at = ",
    now!(),
    " + ?4 WHERE consumer = ?1 AND owner = ?2 AND message_id IN (SELECT value FROM json_each(?3)) AND status = 'RETRYING'"
);

// Plan: one range scan of (consumer, success_at), in its order; then a lookup by rowid for each row.
const PURGE: &str = concat!(
    "DELETE FROM {inbox} WHERE rowid IN (SELECT rowid FROM {inbox} WHERE consumer = ?1 AND success_at < ",
    now!(),
    " - ?2 AND success_at >= ?3 / 1000 AND status = 'SUCCESS' ORDER BY success_at LIMIT ?4) RETURNING success_at"
);

macro_rules! columns {
    () => {
        "consumer, message_id, status, type, source, attempts, claims, version, CASE WHEN status <> 'FAILED' THEN next_attempt_at * 1000 END, \
         owner, last_error, first_at * 1000, last_at * 1000, success_at * 1000"
    };
}

const READ: &str = concat!(
    "SELECT ",
    columns!(),
    ", message_key, content_type, headers, payload FROM {inbox} WHERE consumer = ?1 AND message_id = ?2"
);

/// Whether bytes of a column have the text `?8` in them.
macro_rules! has {
    ($column:literal) => {
        concat!("instr(CAST(", $column, " AS BLOB), CAST(?8 AS BLOB)) > 0")
    };
}

// Plan: the primary key in its order; of those that aren't done, the index of these alone, sorted.
const LIST: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {inbox} WHERE (consumer, message_id) > (?1, ?2)%BOUNDS% AND (?4 IS NULL OR status = ?4) AND (?5 IS NULL OR type = ?5) \
         AND (?6 IS NULL OR first_at * 1000 >= ?6) AND (?7 IS NULL OR first_at * 1000 < ?7) AND (?8 IS NULL OR ",
    has!("message_id"),
    " OR ",
    has!("type"),
    " OR ",
    has!("message_key"),
    " OR ",
    has!("last_error"),
    " OR ",
    has!("source"),
    " OR ?9 AND ",
    has!("payload"),
    ") ORDER BY consumer, message_id LIMIT ?10"
);

// Plan: the same, in the index alone.
const STEP: &str = "SELECT consumer, message_id FROM {inbox} WHERE (consumer, message_id) > (?1, ?2)%BOUNDS% \
       ORDER BY consumer, message_id LIMIT 1 OFFSET ?4";

/// What bounds a list by its indexes.
fn bounds(template: &str, filter: &InboxFilter, upto: bool) -> String {
    let consumer = if filter.consumer.is_some() { " AND consumer = ?3" } else { " AND ?3 IS NULL" };
    let unfinished = match filter.status {
        None | Some(InboxStatus::Success) => "",
        Some(_) => " AND next_attempt_at IS NOT NULL",
    };
    let upto = if upto { " AND (consumer, message_id) <= (?11, ?12)" } else { "" };
    template.replace("%BOUNDS%", &format!("{consumer}{unfinished}{upto}"))
}

const BACKLOG: &str = "SELECT consumer, status, count(*), min(first_at) * 1000 FROM {inbox} \
    WHERE next_attempt_at IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2";

/// How long a write waits for another one.
const BUSY: Duration = Duration::from_secs(5);

/// In milliseconds, rounded up: nothing is due before its time.
fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

/// Text as it lies there; what isn't UTF-8 in it becomes U+FFFD.
fn text(r: &SqliteRow, column: usize) -> Result<Option<String>, sqlx::Error> {
    let bytes: Option<Vec<u8>> = r.try_get_unchecked(column)?;
    Ok(bytes.map(|b| String::from_utf8_lossy(&b).into_owned()))
}

fn row(r: &SqliteRow) -> Result<InboxRow, sqlx::Error> {
    Ok(InboxRow {
        consumer: text(r, 0)?.unwrap_or_default(),
        message_id: text(r, 1)?.unwrap_or_default(),
        status: InboxStatus::parse(r.try_get(2)?),
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

impl InboxRows for Sqlite {
    const INBOX_BEGIN: &'static str = "BEGIN IMMEDIATE; SAVEPOINT posthouse_inbox";

    fn inbox_pool(pool: &SqlitePool, deadline: Duration, connections: u32) -> SqlitePool {
        let options = (*pool.connect_options()).clone().create_if_missing(false).busy_timeout(BUSY);
        SqlitePoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(deadline)
            .idle_timeout(None)
            .connect_lazy_with(options)
    }

    async fn inbox_insert<'c>(conn: &'c mut SqliteConnection, tables: &'c Tables, row: &'c NewRow<'c>) -> Result<bool, Error> {
        if row.status == InboxStatus::Success {
            let insert = sqlx::query(tables.sql(INSERT_SUCCESS)).bind(row.consumer).bind(row.id).bind(row.kind).bind(row.source);
            return Ok(insert.execute(conn).await?.rows_affected() == 1);
        }
        let copy = row.copy;
        let done = sqlx::query(tables.sql(INSERT))
            .bind(row.consumer)
            .bind(row.id)
            .bind(row.status.as_str())
            .bind(row.kind)
            .bind(row.source)
            .bind(copy.and_then(|c| c.key.as_deref()))
            .bind(copy.map(|c: &Copied<'_>| c.content_type.as_str()))
            .bind(copy.and_then(|c| c.headers.as_deref()))
            .bind(copy.map(|c| c.payload))
            .bind(row.attempts)
            .bind(row.claims)
            .bind(millis(row.wait))
            .bind(row.owner)
            .bind(row.error)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_marked<'c>(conn: &'c mut SqliteConnection, _: &'c Tables) -> Result<bool, Error> {
        match sqlx::raw_sql("RELEASE SAVEPOINT posthouse_inbox").execute(conn).await {
            Ok(_) => Ok(true),
            // SQLITE_ERROR, which it also says when there is no such savepoint.
            Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("1") => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    async fn inbox_resume<'c>(conn: &'c mut SqliteConnection, _: &'c Tables) -> Result<(), Error> {
        // Refused within a transaction, which is the usual case.
        let _ = sqlx::raw_sql("BEGIN").execute(conn).await;
        Ok(())
    }

    async fn inbox_standing<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<Standing>, Error> {
        let found = sqlx::query(tables.sql(STANDING)).bind(consumer).bind(id).fetch_optional(conn).await?;
        let standing = |r: SqliteRow| {
            Ok::<_, sqlx::Error>(Standing {
                status: InboxStatus::parse(r.try_get(0)?),
                due: r.try_get(1)?,
                next_us: r.try_get::<Option<i64>, _>(2)?.map(|ms| ms * 1_000),
                version: r.try_get(3)?,
                attempts: r.try_get(4)?,
                claims: r.try_get(5)?,
            })
        };
        Ok(found.map(standing).transpose()?)
    }

    async fn inbox_claim<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        key: RowKey<'c>,
        owner: &'c str,
        lease: Duration,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(CLAIM))
            .bind(key.consumer)
            .bind(key.id)
            .bind(key.version)
            .bind(owner)
            .bind(millis(lease))
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_succeed<'c>(conn: &'c mut SqliteConnection, tables: &'c Tables, key: RowKey<'c>) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(SUCCEED)).bind(key.consumer).bind(key.id).bind(key.version).execute(conn).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_fail<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        key: RowKey<'c>,
        failed: &'c RunFailed<'c>,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(FAIL))
            .bind(key.consumer)
            .bind(key.id)
            .bind(key.version)
            .bind(failed.attempts)
            .bind(failed.claims)
            .bind(failed.wait.map(millis))
            .bind(failed.error)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_adopt<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(ADOPT)).bind(consumer).bind(id).execute(conn).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_take<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<TakenRow>, Error> {
        let rows = sqlx::query(tables.sql(TAKE))
            .bind(consumer)
            .bind(owner)
            .bind(millis(lease))
            .bind(i64::from(limit))
            .fetch_all(conn)
            .await?;
        let taken = |r: &SqliteRow| {
            Ok(TakenRow {
                id: text(r, 0)?.unwrap_or_default(),
                version: r.try_get(1)?,
                attempts: r.try_get(2)?,
                claims: r.try_get(3)?,
            })
        };
        Ok(rows.iter().map(taken).collect::<Result<_, sqlx::Error>>()?)
    }

    async fn inbox_renew<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        ids: &'c [String],
        lease: Duration,
    ) -> Result<(), Error> {
        sqlx::query(tables.sql(RENEW))
            .bind(consumer)
            .bind(owner)
            .bind(serde_json::to_string(ids)?)
            .bind(millis(lease))
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn inbox_purge<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        older: Duration,
        from_us: i64,
        limit: u32,
    ) -> Result<(u64, Option<i64>), Error> {
        let gone: Vec<i64> = sqlx::query_scalar(tables.sql(PURGE))
            .bind(consumer)
            .bind(millis(older))
            .bind(from_us)
            .bind(i64::from(limit))
            .fetch_all(conn)
            .await?;
        Ok((gone.len() as u64, gone.into_iter().max().map(|ms| ms * 1_000)))
    }

    async fn inbox_read<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<InboxDetail>, Error> {
        let found = sqlx::query(tables.sql(READ)).bind(consumer).bind(id).fetch_optional(conn).await?;
        let detail = |r: SqliteRow| {
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
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        filter: &'c InboxFilter,
        upto: Option<&'c (String, String)>,
    ) -> Result<Vec<InboxRow>, Error> {
        let (consumer, id) = filter.after.as_ref().map_or(("", ""), |(consumer, id)| (consumer, id));
        let mut query = sqlx::query(tables.sql(&bounds(LIST, filter, upto.is_some())))
            .bind(consumer)
            .bind(id)
            .bind(&filter.consumer)
            .bind(filter.status.map(InboxStatus::as_str))
            .bind(&filter.kind)
            .bind(filter.first_after_us)
            .bind(filter.first_before_us)
            .bind(&filter.text)
            .bind(!filter.sealed)
            .bind(filter.limit);
        if let Some((consumer, id)) = upto {
            query = query.bind(consumer).bind(id);
        }
        let rows = query.fetch_all(conn).await?;
        Ok(rows.iter().map(row).collect::<Result<_, _>>()?)
    }

    async fn inbox_step<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        filter: &'c InboxFilter,
        n: u32,
    ) -> Result<Option<(String, String)>, Error> {
        let (consumer, id) = filter.after.as_ref().map_or(("", ""), |(consumer, id)| (consumer, id));
        let reached = sqlx::query_as(tables.sql(&bounds(STEP, filter, false)))
            .bind(consumer)
            .bind(id)
            .bind(&filter.consumer)
            .bind(i64::from(n) - 1)
            .fetch_optional(conn)
            .await?;
        Ok(reached)
    }

    async fn inbox_act<'c>(
        conn: &'c mut SqliteConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
        action: InboxAction,
        actor: &'c str,
    ) -> Result<bool, Error> {
        let update = match action {
            InboxAction::Requeue => {
                "UPDATE {inbox} SET status = 'PENDING_RETRY', attempts = 0, claims = 0, version = version + 1, owner = NULL, \
                        next_attempt_at = %NOW%, last_at = %NOW% \
                  WHERE consumer = ?1 AND message_id = ?2 AND status IN ('FAILED', 'PENDING_RETRY') AND ?3 IS NOT NULL"
            }
            InboxAction::Skip => {
                "UPDATE {inbox} SET status = 'FAILED', version = version + 1, owner = NULL, last_at = %NOW%, \
                        next_attempt_at = 253402214400000, \
                        last_error = coalesce(last_error || '; ', '') || 'skipped by ' || ?3 \
                  WHERE consumer = ?1 AND message_id = ?2 AND status <> 'SUCCESS'"
            }
        };
        let done = sqlx::query(tables.sql(&update.replace("%NOW%", now!())))
            .bind(consumer)
            .bind(id)
            .bind(actor)
            .execute(&mut *conn)
            .await?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        // Change 0: nothing that a relay would have to read again.
        sqlx::query(
            tables.sql("INSERT INTO {audit} (change, actor, action, row_id, house, detail) VALUES (0, ?1, ?2, 0, -1, ?3)"),
        )
        .bind(actor)
        .bind(action.name())
        .bind(audit_detail(consumer, id))
        .execute(conn)
        .await?;
        Ok(true)
    }

    async fn inbox_backlog<'c>(conn: &'c mut SqliteConnection, tables: &'c Tables) -> Result<Vec<InboxBacklog>, Error> {
        let rows = sqlx::query(tables.sql(BACKLOG)).fetch_all(conn).await?;
        let line = |r: &SqliteRow| {
            Ok(InboxBacklog {
                consumer: text(r, 0)?.unwrap_or_default(),
                status: InboxStatus::parse(r.try_get(1)?),
                messages: r.try_get(2)?,
                oldest_us: r.try_get(3)?,
            })
        };
        Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
    }
}
