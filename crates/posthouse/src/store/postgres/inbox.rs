//! What consumers received.

use std::time::Duration;

use sqlx::postgres::{PgPoolOptions, PgRow};
use sqlx::{PgConnection, PgPool, Postgres, Row};

use crate::Error;
use crate::store::{
    Copied, InboxAction, InboxBacklog, InboxDetail, InboxFilter, InboxRow, InboxRows, InboxStatus, NewRow, RowKey, RunFailed,
    Standing, Tables, TakenRow, audit_detail, micros,
};

/// A bare ON CONFLICT waits for a transaction that inserted the same id, and leaves this one usable.
const INSERT: &str = "INSERT INTO {inbox} (consumer, message_id, status, type, source, message_key, content_type, headers, payload, \
        attempts, claims, next_attempt_at, owner, last_error) \
    VALUES ($1, $2, $3, $4, $5::text::json, $6, $7, $8::text::json, $9, $10, $11, \
        CASE $3 WHEN 'FAILED' THEN timestamptz '9999-12-31 00:00Z' ELSE clock_timestamp() + $12 * interval '1 microsecond' END, \
        $13, $14) ON CONFLICT DO NOTHING";

/// The same for a SUCCESS, which every message pays for.
const INSERT_SUCCESS: &str = "INSERT INTO {inbox} (consumer, message_id, type, source, success_at) \
    VALUES ($1, $2, $3, $4::text::json, clock_timestamp()) ON CONFLICT DO NOTHING";

/// What [`BEGIN`](InboxRows::INBOX_BEGIN) sets, for this transaction; it is empty or NULL after it.
const MARK: &str = "SELECT current_setting('posthouse.inbox', true)";

const STANDING: &str = "SELECT status, next_attempt_at <= statement_timestamp(), (extract(epoch FROM next_attempt_at) * 1000000)::bigint, \
        version, attempts, claims FROM {inbox} WHERE consumer = $1 AND message_id = $2";

const CLAIM: &str = "UPDATE {inbox} SET status = 'RETRYING', claims = claims + 1, version = version + 1, owner = $4, \
        next_attempt_at = clock_timestamp() + $5 * interval '1 microsecond', last_at = clock_timestamp() \
    WHERE consumer = $1 AND message_id = $2 AND version = $3 AND status IN ('PENDING_RETRY', 'RETRYING')";

const SUCCEED: &str = "UPDATE {inbox} SET status = 'SUCCESS', claims = 0, version = version + 1, owner = NULL, next_attempt_at = NULL, \
        message_key = NULL, content_type = NULL, headers = NULL, payload = NULL, last_at = clock_timestamp(), success_at = clock_timestamp() \
    WHERE consumer = $1 AND message_id = $2 AND version = $3 AND status = 'RETRYING'";

const FAIL: &str = "UPDATE {inbox} SET status = CASE WHEN $6::bigint IS NULL THEN 'FAILED' ELSE 'PENDING_RETRY' END, \
        attempts = $4, claims = $5, version = version + 1, owner = NULL, last_error = coalesce($7, last_error), last_at = clock_timestamp(), \
        next_attempt_at = coalesce(clock_timestamp() + $6::bigint * interval '1 microsecond', timestamptz '9999-12-31 00:00Z') \
    WHERE consumer = $1 AND message_id = $2 AND version = $3 AND status IN ('PENDING_RETRY', 'RETRYING')";

const ADOPT: &str = "UPDATE {inbox} SET status = 'SUCCESS', claims = 0, version = version + 1, owner = NULL, next_attempt_at = NULL, \
        message_key = NULL, content_type = NULL, headers = NULL, payload = NULL, last_at = clock_timestamp(), success_at = clock_timestamp() \
    WHERE consumer = $1 AND message_id = $2 AND status = 'PENDING_RETRY' AND next_attempt_at <= statement_timestamp()";

// Plan: one range scan of (consumer, next_attempt_at, message_id), in its order; then a lookup by primary key for each row.
const TAKE: &str = "WITH due AS MATERIALIZED (SELECT message_id FROM {inbox} \
         WHERE consumer = $1 AND next_attempt_at <= statement_timestamp() AND status IN ('PENDING_RETRY', 'RETRYING') \
         ORDER BY next_attempt_at, message_id LIMIT $4 FOR UPDATE SKIP LOCKED) \
    UPDATE {inbox} i SET status = 'RETRYING', owner = $2, version = i.version + 1, \
           next_attempt_at = clock_timestamp() + $3 * interval '1 microsecond' \
      FROM due WHERE i.consumer = $1 AND i.message_id = due.message_id RETURNING i.message_id, i.version, i.attempts, i.claims";

const RENEW: &str = "UPDATE {inbox} SET next_attempt_at = clock_timestamp() + $4 * interval '1 microsecond' \
    WHERE consumer = $1 AND owner = $2 AND message_id = ANY($3) AND status = 'RETRYING'";

// Plan: one range scan of (consumer, success_at), in its order; then a lookup by primary key for each row.
const PURGE: &str = "WITH old AS MATERIALIZED (SELECT message_id FROM {inbox} \
         WHERE consumer = $1 AND success_at < statement_timestamp() - $2 * interval '1 microsecond' \
           AND success_at >= timestamptz 'epoch' + $3 * interval '1 microsecond' AND status = 'SUCCESS' \
         ORDER BY success_at LIMIT $4 FOR UPDATE SKIP LOCKED), \
    gone AS (DELETE FROM {inbox} i USING old WHERE i.consumer = $1 AND i.message_id = old.message_id RETURNING i.success_at) \
    SELECT count(*), (extract(epoch FROM max(success_at)) * 1000000)::bigint FROM gone";

macro_rules! columns {
    () => {
        "consumer, message_id, status, type, source::text, attempts, claims, version, \
         CASE WHEN status <> 'FAILED' THEN (extract(epoch FROM next_attempt_at) * 1000000)::bigint END, owner, last_error, \
         (extract(epoch FROM first_at) * 1000000)::bigint, (extract(epoch FROM last_at) * 1000000)::bigint, \
         (extract(epoch FROM success_at) * 1000000)::bigint"
    };
}

const READ: &str = concat!(
    "SELECT ",
    columns!(),
    ", message_key, content_type, headers::text, payload FROM {inbox} WHERE consumer = $1 AND message_id = $2"
);

// Plan: the primary key in its order; of those that aren't done, the index of these alone, sorted.
const LIST: &str = concat!(
    "SELECT ",
    columns!(),
    " FROM {inbox} WHERE (consumer, message_id) > ($1, $2)%BOUNDS% AND ($4::text IS NULL OR status = $4) AND ($5::text IS NULL OR type = $5) \
         AND ($6::bigint IS NULL OR (extract(epoch FROM first_at) * 1000000)::bigint >= $6) \
         AND ($7::bigint IS NULL OR (extract(epoch FROM first_at) * 1000000)::bigint < $7) \
         AND ($8::text IS NULL OR position($8 IN message_id) > 0 OR position($8 IN type) > 0 OR position($8 IN message_key) > 0 \
              OR position($8 IN last_error) > 0 OR position($8 IN source::text) > 0 OR $9 AND position(convert_to($8, 'UTF8') IN payload) > 0) \
       ORDER BY consumer, message_id LIMIT $10"
);

// Plan: the same, in the index alone.
const STEP: &str = "SELECT consumer, message_id FROM {inbox} WHERE (consumer, message_id) > ($1, $2)%BOUNDS% \
       ORDER BY consumer, message_id LIMIT 1 OFFSET $4";

/// What bounds a list by its indexes.
fn bounds(template: &str, filter: &InboxFilter, upto: bool) -> String {
    let consumer = if filter.consumer.is_some() { " AND consumer = $3" } else { " AND $3::text IS NULL" };
    let unfinished = match filter.status {
        None | Some(InboxStatus::Success) => "",
        Some(_) => " AND next_attempt_at IS NOT NULL",
    };
    let upto = if upto { " AND (consumer, message_id) <= ($11, $12)" } else { "" };
    template.replace("%BOUNDS%", &format!("{consumer}{unfinished}{upto}"))
}

const BACKLOG: &str = "SELECT consumer, status, count(*), (extract(epoch FROM min(first_at)) * 1000000)::bigint FROM {inbox} \
    WHERE next_attempt_at IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 2";

fn row(r: &PgRow) -> Result<InboxRow, sqlx::Error> {
    Ok(InboxRow {
        consumer: r.try_get(0)?,
        message_id: r.try_get(1)?,
        status: InboxStatus::parse(r.try_get(2)?),
        kind: r.try_get(3)?,
        source: r.try_get(4)?,
        attempts: r.try_get(5)?,
        claims: r.try_get(6)?,
        version: r.try_get(7)?,
        next_attempt_us: r.try_get(8)?,
        owner: r.try_get(9)?,
        last_error: r.try_get(10)?,
        first_us: r.try_get(11)?,
        last_us: r.try_get(12)?,
        success_us: r.try_get(13)?,
    })
}

impl InboxRows for Postgres {
    const INBOX_BEGIN: &'static str = "BEGIN; SET LOCAL posthouse.inbox = 'begun'";

    fn inbox_pool(pool: &PgPool, deadline: Duration, connections: u32) -> PgPool {
        PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(deadline)
            .idle_timeout(None)
            .connect_lazy_with((*pool.connect_options()).clone())
    }

    async fn inbox_insert<'c>(conn: &'c mut PgConnection, tables: &'c Tables, row: &'c NewRow<'c>) -> Result<bool, Error> {
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
            .bind(micros(row.wait))
            .bind(row.owner)
            .bind(row.error)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_marked<'c>(conn: &'c mut PgConnection, _: &'c Tables) -> Result<bool, Error> {
        let mark: Option<String> = sqlx::query_scalar(MARK).fetch_one(conn).await?;
        Ok(mark.as_deref() == Some("begun"))
    }

    /// ROLLBACK without a transaction is no error.
    async fn inbox_resume<'c>(_: &'c mut PgConnection, _: &'c Tables) -> Result<(), Error> {
        Ok(())
    }

    async fn inbox_standing<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<Standing>, Error> {
        let found = sqlx::query(tables.sql(STANDING)).bind(consumer).bind(id).fetch_optional(conn).await?;
        let standing = |r: PgRow| {
            Ok::<_, sqlx::Error>(Standing {
                status: InboxStatus::parse(r.try_get(0)?),
                due: r.try_get::<Option<bool>, _>(1)?.unwrap_or(false),
                next_us: r.try_get(2)?,
                version: r.try_get(3)?,
                attempts: r.try_get(4)?,
                claims: r.try_get(5)?,
            })
        };
        Ok(found.map(standing).transpose()?)
    }

    async fn inbox_claim<'c>(
        conn: &'c mut PgConnection,
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
            .bind(micros(lease))
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_succeed<'c>(conn: &'c mut PgConnection, tables: &'c Tables, key: RowKey<'c>) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(SUCCEED)).bind(key.consumer).bind(key.id).bind(key.version).execute(conn).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_fail<'c>(
        conn: &'c mut PgConnection,
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
            .bind(failed.wait.map(micros))
            .bind(failed.error)
            .execute(conn)
            .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_adopt<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<bool, Error> {
        let done = sqlx::query(tables.sql(ADOPT)).bind(consumer).bind(id).execute(conn).await?;
        Ok(done.rows_affected() == 1)
    }

    async fn inbox_take<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        lease: Duration,
        limit: u32,
    ) -> Result<Vec<TakenRow>, Error> {
        let rows = sqlx::query(tables.sql(TAKE))
            .bind(consumer)
            .bind(owner)
            .bind(micros(lease))
            .bind(i64::from(limit))
            .fetch_all(conn)
            .await?;
        let taken = |r: &PgRow| {
            Ok(TakenRow { id: r.try_get(0)?, version: r.try_get(1)?, attempts: r.try_get(2)?, claims: r.try_get(3)? })
        };
        Ok(rows.iter().map(taken).collect::<Result<_, sqlx::Error>>()?)
    }

    async fn inbox_renew<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        owner: &'c str,
        ids: &'c [String],
        lease: Duration,
    ) -> Result<(), Error> {
        sqlx::query(tables.sql(RENEW)).bind(consumer).bind(owner).bind(ids).bind(micros(lease)).execute(conn).await?;
        Ok(())
    }

    async fn inbox_purge<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        older: Duration,
        from_us: i64,
        limit: u32,
    ) -> Result<(u64, Option<i64>), Error> {
        let (rows, last_us): (i64, _) = sqlx::query_as(tables.sql(PURGE))
            .bind(consumer)
            .bind(micros(older))
            .bind(from_us)
            .bind(i64::from(limit))
            .fetch_one(conn)
            .await?;
        Ok((rows.unsigned_abs(), last_us))
    }

    async fn inbox_read<'c>(
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
    ) -> Result<Option<InboxDetail>, Error> {
        let found = sqlx::query(tables.sql(READ)).bind(consumer).bind(id).fetch_optional(conn).await?;
        let detail = |r: PgRow| {
            Ok::<_, sqlx::Error>(InboxDetail {
                row: row(&r)?,
                key: r.try_get(14)?,
                content_type: r.try_get(15)?,
                headers: r.try_get(16)?,
                payload: r.try_get(17)?,
            })
        };
        Ok(found.map(detail).transpose()?)
    }

    async fn inbox_list<'c>(
        conn: &'c mut PgConnection,
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
            .bind(i64::from(filter.limit));
        if let Some((consumer, id)) = upto {
            query = query.bind(consumer).bind(id);
        }
        let rows = query.fetch_all(conn).await?;
        Ok(rows.iter().map(row).collect::<Result<_, _>>()?)
    }

    async fn inbox_step<'c>(
        conn: &'c mut PgConnection,
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
        conn: &'c mut PgConnection,
        tables: &'c Tables,
        consumer: &'c str,
        id: &'c str,
        action: InboxAction,
        actor: &'c str,
    ) -> Result<bool, Error> {
        let update = match action {
            InboxAction::Requeue => {
                "UPDATE {inbox} SET status = 'PENDING_RETRY', attempts = 0, claims = 0, version = version + 1, owner = NULL, \
                        next_attempt_at = clock_timestamp(), last_at = clock_timestamp() \
                  WHERE consumer = $1 AND message_id = $2 AND status IN ('FAILED', 'PENDING_RETRY') AND $3::text IS NOT NULL"
            }
            InboxAction::Skip => {
                "UPDATE {inbox} SET status = 'FAILED', version = version + 1, owner = NULL, last_at = clock_timestamp(), \
                        next_attempt_at = timestamptz '9999-12-31 00:00Z', \
                        last_error = coalesce(last_error || '; ', '') || 'skipped by ' || $3 \
                  WHERE consumer = $1 AND message_id = $2 AND status <> 'SUCCESS'"
            }
        };
        let done = sqlx::query(tables.sql(update)).bind(consumer).bind(id).bind(actor).execute(&mut *conn).await?;
        if done.rows_affected() == 0 {
            return Ok(false);
        }
        // Change 0: nothing that a relay would have to read again.
        sqlx::query(
            tables.sql("INSERT INTO {audit} (change, actor, action, row_id, house, detail) VALUES (0, $1, $2, 0, -1, $3)"),
        )
        .bind(actor)
        .bind(action.name())
        .bind(audit_detail(consumer, id))
        .execute(conn)
        .await?;
        Ok(true)
    }

    async fn inbox_backlog<'c>(conn: &'c mut PgConnection, tables: &'c Tables) -> Result<Vec<InboxBacklog>, Error> {
        let rows = sqlx::query(tables.sql(BACKLOG)).fetch_all(conn).await?;
        let line = |r: &PgRow| {
            Ok(InboxBacklog {
                consumer: r.try_get(0)?,
                status: InboxStatus::parse(r.try_get(1)?),
                messages: r.try_get(2)?,
                oldest_us: r.try_get(3)?,
            })
        };
        Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
    }
}
