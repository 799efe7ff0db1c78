//! What people look at and change.

use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};

use crate::Error;
use crate::store::{
    Action, AttemptRow, Backlog, Candidate, Chunk, Hit, HouseRow, MessageDetail, MessageFilter, MessageRow, MessageStatus,
    Search, Tables, Which, each_house,
};

macro_rules! columns {
    () => {
        "l.id, l.message_id, l.type, coalesce(p.destination, l.destination) AS destination, l.message_key, coalesce(p.status, 'SENT') AS status, \
         {house_of}(l.destination, l.message_key, l.message_id) AS house, coalesce(p.attempts, 0) AS attempts, coalesce(p.claims, 0) AS claims, \
         p.last_error, (extract(epoch FROM l.created_at) * 1000)::bigint AS created_at_ms, \
         CASE WHEN p.status <> 'FAILED' THEN (extract(epoch FROM p.due_at) * 1000)::bigint END AS next_attempt_ms, \
         (octet_length(l.payload) + coalesce(octet_length(l.headers::text), 0))::bigint AS size"
    };
}

// What every list wants of a row that it looks at; the sources below bound how many it looks at.
macro_rules! wanted {
    () => {
        " WHERE ($3::text IS NULL OR coalesce(p.status, 'SENT') = $3) \
            AND ($4::text IS NULL OR coalesce(p.destination, l.destination) = $4) AND ($5::text IS NULL OR l.message_key = $5) \
            AND ($6::bigint IS NULL OR (extract(epoch FROM l.created_at) * 1000)::bigint >= $6) \
            AND ($7::bigint IS NULL OR (extract(epoch FROM l.created_at) * 1000)::bigint < $7) \
            AND ($8::text IS NULL OR position($8 IN l.message_id) > 0 OR position($8 IN l.message_key) > 0 OR position($8 IN l.type) > 0 \
                 OR position($8 IN coalesce(p.destination, l.destination)) > 0 OR position($8 IN p.last_error) > 0 \
                 OR position(convert_to($8, 'UTF8') IN l.payload) > 0) \
          ORDER BY l.id DESC LIMIT $9"
    };
}

/// What is kept before its partition leaves the log is in both for a while; one lookup by primary key for each kept row.
macro_rules! alone {
    () => {
        " AND (SELECT d.id FROM {message} d WHERE d.id = k.id) IS NULL"
    };
}

// OFFSET 0 keeps the planner from reading all of pending instead: how many rows it has changes faster than statistics.

// Plan: the log by a range of its primary key (partitions outside of it are pruned), pending looked up by its primary key.
const RANGE: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination AS published_to FROM (SELECT * FROM {message} WHERE id >= $1 AND id < $2 \
                                           UNION ALL SELECT * FROM {kept} k WHERE k.id >= $1 AND k.id < $2",
    alone!(),
    ") l \
       LEFT JOIN LATERAL (SELECT * FROM {pending} q WHERE q.house = {house_of}(l.destination, l.message_key, l.message_id) AND q.id = l.id OFFSET 0) p ON true",
    wanted!()
);

// Plan: the log and pending by their primary keys.
const PENDING: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination AS published_to FROM (SELECT * FROM {message} WHERE id = ANY($1) UNION ALL SELECT * FROM {kept} k WHERE k.id = ANY($1)",
    alone!(),
    ") l \
       JOIN unnest($1::bigint[], $2::integer[]) c (id, house) ON c.id = l.id CROSS JOIN LATERAL (SELECT * FROM {pending} q WHERE q.house = c.house AND q.id = c.id OFFSET 0) p",
    wanted!()
);

// Plan: the log by the index of its message ids, pending looked up by its primary key.
const MESSAGE_ID: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.destination AS published_to FROM (SELECT * FROM {message} WHERE message_id = $1 AND id < $2 \
                                           UNION ALL SELECT * FROM {kept} k WHERE k.message_id = $1 AND k.id < $2",
    alone!(),
    ") l \
       LEFT JOIN LATERAL (SELECT * FROM {pending} q WHERE q.house = {house_of}(l.destination, l.message_key, l.message_id) AND q.id = l.id OFFSET 0) p ON true",
    wanted!()
);

// Plan: the primary key downwards, as far as the limit, without the table.
const LOG_STEP: &str = "SELECT min(id) FROM ((SELECT id FROM {message} WHERE id >= $1 AND id < $2 ORDER BY id DESC LIMIT $3) \
         UNION ALL (SELECT id FROM {kept} WHERE id >= $1 AND id < $2 ORDER BY id DESC LIMIT $3) ORDER BY 1 DESC LIMIT $3) c HAVING count(*) = $3";

// Plan: per house the primary key downwards, as far as the limit. Rows may lie in houses that don't exist (any more).
const PENDING_STEP: &str = "SELECT p.house, p.id, p.status, p.destination \
       FROM generate_series(0, greatest((SELECT max(house) FROM {pending}), (SELECT max(house) FROM {house}))) h (house) \
      CROSS JOIN LATERAL (SELECT q.house, q.id, q.status, q.destination FROM {pending} q \
            WHERE q.house = h.house AND q.id >= $1 AND q.id < $2 ORDER BY q.id DESC LIMIT $3) p";

// Plan: the index of FAILED ones downwards, as far as the limit.
const FAILED_STEP: &str = "SELECT house, id, status, destination FROM {pending} WHERE status = 'FAILED' AND id >= $1 AND id < $2 \
      ORDER BY id DESC LIMIT $3";

// Plan: one row of the primary key.
const CREATED: &str =
    "SELECT id, (extract(epoch FROM created_at) * 1000)::bigint FROM {message} WHERE id >= $1 ORDER BY id LIMIT 1";

const SHOW: &str = concat!(
    "SELECT ",
    columns!(),
    ", l.content_type, l.headers::text AS headers, l.payload, l.destination AS published_to FROM (SELECT * FROM {message} WHERE id = $1 UNION ALL SELECT * FROM {kept} WHERE id = $1) l \
     LEFT JOIN {pending} p ON p.house = {house_of}(l.destination, l.message_key, l.message_id) AND p.id = l.id LIMIT 1"
);

fn row(r: &PgRow) -> Result<MessageRow, sqlx::Error> {
    Ok(MessageRow {
        id: r.try_get("id")?,
        message_id: r.try_get("message_id")?,
        kind: r.try_get("type")?,
        destination: r.try_get("destination")?,
        key: r.try_get("message_key")?,
        status: r.try_get("status")?,
        house: r.try_get("house")?,
        attempts: r.try_get("attempts")?,
        claims: r.try_get("claims")?,
        last_error: r.try_get("last_error")?,
        created_at_ms: r.try_get("created_at_ms")?,
        next_attempt_ms: r.try_get("next_attempt_ms")?,
        size: r.try_get("size")?,
    })
}

/// The steps of a search, on a connection.
pub(super) struct Steps<'c>(pub(super) &'c mut PgConnection, pub(super) &'c Tables);

impl Search for Steps<'_> {
    async fn log_step(&mut self, from: i64, below: i64, n: u32) -> Result<Option<i64>, Error> {
        let low = sqlx::query_scalar(self.1.sql(LOG_STEP)).bind(from).bind(below).bind(i64::from(n));
        Ok(low.fetch_optional(&mut *self.0).await?)
    }

    async fn pending_step(&mut self, failed: bool, from: i64, below: i64, n: u32) -> Result<Chunk, Error> {
        let (template, limit) = if failed { (FAILED_STEP, n) } else { (PENDING_STEP, each_house(n)) };
        let found =
            sqlx::query(self.1.sql(template)).bind(from).bind(below).bind(i64::from(limit)).fetch_all(&mut *self.0).await?;
        let candidate = |r: &PgRow| {
            Ok(Candidate { house: r.try_get(0)?, id: r.try_get(1)?, status: r.try_get(2)?, destination: r.try_get(3)? })
        };
        let rows = found.iter().map(candidate).collect::<Result<_, sqlx::Error>>()?;
        Ok(if failed { Chunk::of_all(rows, limit) } else { Chunk::of_houses(rows, limit) })
    }

    async fn rows(&mut self, which: Which<'_>, filter: &MessageFilter, limit: u32) -> Result<Vec<Hit>, Error> {
        let query = match which {
            Which::Range(from, below) => sqlx::query(self.1.sql(RANGE)).bind(from).bind(below),
            Which::MessageId(message_id, below) => sqlx::query(self.1.sql(MESSAGE_ID)).bind(message_id.to_owned()).bind(below),
            Which::Pending(rows) => {
                let ids: Vec<i64> = rows.iter().map(|r| r.id).collect();
                let houses: Vec<i32> = rows.iter().map(|r| r.house).collect();
                sqlx::query(self.1.sql(PENDING)).bind(ids).bind(houses)
            }
        };
        let found = query
            .bind(filter.status.map(MessageStatus::as_str))
            .bind(&filter.destination)
            .bind(&filter.key)
            .bind(filter.created_after_ms)
            .bind(filter.created_before_ms)
            .bind(&filter.text)
            .bind(i64::from(limit))
            .fetch_all(&mut *self.0)
            .await?;
        let hit = |r: &PgRow| Ok(Hit { row: row(r)?, published_to: r.try_get("published_to")? });
        Ok(found.iter().map(hit).collect::<Result<_, sqlx::Error>>()?)
    }

    async fn ends(&mut self) -> Result<Option<(i64, i64)>, Error> {
        let (first, last): (Option<i64>, Option<i64>) =
            sqlx::query_as(self.1.sql("SELECT min(id), max(id) FROM {message}")).fetch_one(&mut *self.0).await?;
        Ok(first.zip(last))
    }

    async fn created(&mut self, id: i64) -> Result<Option<(i64, i64)>, Error> {
        Ok(sqlx::query_as(self.1.sql(CREATED)).bind(id).fetch_optional(&mut *self.0).await?)
    }
}

pub(super) async fn show(conn: &mut PgConnection, tables: &Tables, id: i64) -> Result<Option<MessageDetail>, Error> {
    let Some(found) = sqlx::query(tables.sql(SHOW)).bind(id).fetch_optional(&mut *conn).await? else { return Ok(None) };
    let message = row(&found)?;
    let history = sqlx::query(tables.sql(
        "SELECT (extract(epoch FROM at) * 1000)::bigint, attempt, outcome, error, response, took_ms, instance FROM {attempt} WHERE row_id = $1 ORDER BY id",
    ))
    .bind(id)
    .fetch_all(&mut *conn)
    .await?;
    let attempt = |r: &PgRow| {
        Ok(AttemptRow {
            at_ms: r.try_get(0)?,
            attempt: r.try_get(1)?,
            outcome: r.try_get(2)?,
            error: r.try_get(3)?,
            response: r.try_get(4)?,
            took_ms: r.try_get(5)?,
            instance: r.try_get(6)?,
        })
    };
    let delivered = sqlx::query_as(tables.sql(
        "SELECT (extract(epoch FROM at) * 1000)::bigint, instance FROM {receipt} WHERE house = $1 AND low <= $2 AND low > $2 - 1000000 AND $2 = ANY(ids) \
          ORDER BY id DESC LIMIT 1",
    ))
    .bind(message.house)
    .bind(id)
    .fetch_optional(conn)
    .await?;
    Ok(Some(MessageDetail {
        row: message,
        published_to: found.try_get("published_to")?,
        content_type: found.try_get("content_type")?,
        headers: found.try_get("headers")?,
        payload: found.try_get("payload")?,
        history: history.iter().map(attempt).collect::<Result<_, sqlx::Error>>()?,
        delivered,
    }))
}

/// The change counter is raised first: its row lock puts actions in one order, so a relay that saw number n has seen all up to n.
pub(super) async fn act(
    conn: &mut PgConnection,
    tables: &Tables,
    ids: &[i64],
    action: &Action,
    actor: &str,
) -> Result<Vec<i64>, Error> {
    let (set, which, detail) = match action {
        Action::Requeue => (
            "status = 'PENDING', due_at = clock_timestamp(), attempts = 0, claims = 0, \
             key_hash = CASE WHEN l.message_key IS NOT NULL THEN {hash}(l.destination, l.message_key, l.message_id) END",
            "(p.status = 'FAILED' OR p.status = 'PENDING' AND p.due_at > clock_timestamp())",
            None,
        ),
        Action::Skip => (
            "status = 'FAILED', due_at = '9999-12-31', key_hash = NULL, last_error = coalesce(p.last_error || '; ', '') || 'skipped by ' || $4::text",
            "p.status <> 'x'",
            None,
        ),
        Action::Edit { destination } => (
            "status = 'PENDING', due_at = clock_timestamp(), attempts = 0, claims = 0, destination = $3::text",
            "p.status <> 'x'",
            Some(destination),
        ),
    };
    let sql = format!(
        "WITH u AS (UPDATE {{pending}} p SET {set}, owner = NULL, version = p.version + 1, updated_at = clock_timestamp() \
            FROM (SELECT id, destination, message_key, message_id FROM {{message}} WHERE id = ANY($1) \
                  UNION ALL SELECT id, destination, message_key, message_id FROM {{kept}} WHERE id = ANY($1)) l \
            WHERE p.house = {{house_of}}(l.destination, l.message_key, l.message_id) AND p.id = l.id AND {which} \
            RETURNING p.id, p.house, CASE WHEN l.message_key IS NOT NULL THEN {{hash}}(l.destination, l.message_key, l.message_id) END AS key_hash) \
         INSERT INTO {{audit}} (change, actor, action, row_id, house, key_hash, detail) \
         SELECT $2, $4, $5, u.id, u.house, u.key_hash, $3::text FROM u RETURNING row_id"
    );
    let mut tx = conn.begin().await?;
    let change: i64 =
        sqlx::query_scalar(tables.sql("UPDATE {meta} SET changes = changes + 1 RETURNING changes")).fetch_one(&mut *tx).await?;
    let changed = sqlx::query_scalar(tables.sql(&sql))
        .bind(ids)
        .bind(change)
        .bind(detail)
        .bind(actor)
        .bind(action.name())
        .fetch_all(&mut *tx)
        .await?;
    tx.commit().await?;
    Ok(changed)
}

pub(super) async fn backlog(conn: &mut PgConnection, tables: &Tables) -> Result<Vec<Backlog>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT p.destination, p.status, count(*) AS messages, \
                (extract(epoch FROM clock_timestamp() - coalesce((SELECT created_at FROM {message} m WHERE m.id = min(p.id)), \
                    (SELECT created_at FROM {kept} k WHERE k.id = min(p.id)))) * 1000)::bigint AS oldest \
           FROM {pending} p GROUP BY 1, 2 ORDER BY 1, 2",
    ))
    .fetch_all(conn)
    .await?;
    let line = |r: &PgRow| {
        Ok(Backlog {
            destination: r.try_get(0)?,
            status: r.try_get(1)?,
            messages: r.try_get(2)?,
            oldest_ms: r.try_get::<Option<i64>, _>(3)?.unwrap_or(0).max(0),
        })
    };
    Ok(rows.iter().map(line).collect::<Result<_, sqlx::Error>>()?)
}

pub(super) async fn houses(conn: &mut PgConnection, tables: &Tables) -> Result<Vec<HouseRow>, Error> {
    let rows = sqlx::query(tables.sql(
        "SELECT h.house, h.owner, coalesce(i.lease_until > clock_timestamp(), false), h.epoch, \
                (SELECT count(*) FROM {pending} p WHERE p.house = h.house) \
           FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner ORDER BY 1",
    ))
    .fetch_all(conn)
    .await?;
    let house = |r: &PgRow| {
        Ok(HouseRow {
            house: r.try_get(0)?,
            owner: r.try_get(1)?,
            alive: r.try_get(2)?,
            epoch: r.try_get(3)?,
            pending: r.try_get(4)?,
        })
    };
    Ok(rows.iter().map(house).collect::<Result<_, sqlx::Error>>()?)
}

#[cfg(test)]
mod tests {
    use sqlx::postgres::PgPoolOptions;
    use sqlx::{AssertSqlSafe, Executor};

    use super::*;
    use crate::Outbox;

    /// Every step of a list finds its rows through the index that it names, with the values known and without: a scan would
    /// cost more with every message.
    #[tokio::test]
    async fn every_step_of_a_list_is_served_by_its_index() {
        // Needs a server, which the other unit tests don't; `scripts/test` names one.
        let Ok(url) = std::env::var("POSTHOUSE_TEST_POSTGRES_URL") else { return };
        let schema = format!("plans_{:016x}", fastrand::u64(..));
        let pool = PgPoolOptions::new().max_connections(1).connect(&url).await.unwrap();
        pool.execute(AssertSqlSafe(format!("CREATE SCHEMA {schema}"))).await.unwrap();
        let outbox = Outbox::builder(pool.clone()).schema(&schema).build().unwrap();
        outbox.migrate().await.unwrap();
        let tables = outbox.tables();
        // Most are delivered; of the rest some have failed.
        for sql in [
            "INSERT INTO {message} (message_id, destination, message_key) SELECT 'm' || n, 'd', n % 500 FROM generate_series(1, 30000) n",
            "DELETE FROM {pending} WHERE id % 10 <> 0",
            "UPDATE {pending} SET status = 'FAILED', due_at = '9999-12-31' WHERE id % 100 = 0",
            "ANALYZE {message}",
            "ANALYZE {pending}",
        ] {
            pool.execute(tables.sql(sql)).await.unwrap();
        }
        let filter = "NULL, NULL, NULL, NULL, NULL, NULL, 50";
        let pending = tables.text("{=pending}");
        let [pending_key, pending_failed] = ["{=pending}_pkey", "{=pending_failed}"].map(|name| tables.text(name));
        let partition: String = sqlx::query_scalar(
            tables.sql("SELECT relname::text FROM pg_class WHERE oid = (SELECT tableoid FROM {message} LIMIT 1)"),
        )
        .fetch_one(&pool)
        .await
        .unwrap();
        let ids = "ARRAY[29990, 29980]::bigint[], ARRAY[1, 2]::integer[]";
        for (statement, values, index) in [
            (RANGE, format!("29000, 29900, {filter}"), &pending_key),
            (PENDING, format!("{ids}, {filter}"), &pending_key),
            (MESSAGE_ID, format!("'m77', 30000, {filter}"), &pending_key),
            (LOG_STEP, "0, 29900, 500".into(), &partition),
            (PENDING_STEP, "0, 29900, 16".into(), &pending_key),
            (FAILED_STEP, "0, 29900, 50".into(), &pending_failed),
            (CREATED, "15000".into(), &partition),
        ] {
            for mode in ["force_custom_plan", "force_generic_plan"] {
                pool.execute(AssertSqlSafe(format!("SET plan_cache_mode = {mode}"))).await.unwrap();
                pool.execute(AssertSqlSafe(format!("PREPARE step AS {}", tables.text(statement)))).await.unwrap();
                let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(format!("EXPLAIN EXECUTE step ({values})")))
                    .persistent(false)
                    .fetch_all(&pool)
                    .await
                    .unwrap();
                pool.execute("DEALLOCATE step").await.unwrap();
                let plan = lines.join("\n");
                for table in [&pending, &partition] {
                    assert!(!plan.contains(&format!("Seq Scan on {table}")), "{mode}: {statement}\n{plan}");
                }
                assert!(plan.contains(index.as_str()), "{index}, {mode}: {statement}\n{plan}");
            }
        }
        pool.execute(AssertSqlSafe(format!("DROP SCHEMA {schema} CASCADE"))).await.unwrap();
    }
}
