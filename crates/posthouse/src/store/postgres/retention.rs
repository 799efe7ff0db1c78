//! Taking old rows out.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use super::PostgresStore;
use super::migrate::{LOCK_TIMEOUT, PARTITION_SIZE, ahead};
use super::relay::micros;
use crate::store::{
    ArchiveFilter, ArchiveRow, Beside, Bisection, Boundary, Expired, LogRow, OldPage, Partition, Reply, RetentionStore, Retired,
    RowSize, Shelf, Step, Tables, expired_ids, numbers, on,
};
use crate::{Error, ErrorKind};

/// For calls that take in a whole partition.
const LONG: Duration = Duration::from_secs(600);

/// The first server that detaches without locking the log against publishers.
const DETACHES_CONCURRENTLY: i32 = 140_000;

// Plan: per partition one lookup at the end of its primary key.
const PARTITIONS: &str = "SELECT n.number, n.rows, n.bytes, (extract(epoch FROM x.created_at) * 1000)::bigint, \
        (extract(epoch FROM clock_timestamp() - x.created_at) * 1000)::bigint \
     FROM (SELECT (regexp_match(c.relname, '_p([0-9]+)$'))[1]::bigint AS number, nullif(c.reltuples, -1)::bigint AS rows, \
                  pg_total_relation_size(c.oid) AS bytes \
             FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
            WHERE i.inhparent = to_regclass($1) AND NOT coalesce((to_jsonb(i)->>'inhdetachpending')::boolean, false)) n \
     LEFT JOIN LATERAL (SELECT m.created_at FROM {message} m WHERE m.id >= n.number * $2 AND m.id < (n.number + 1) * $2 \
                         ORDER BY m.id DESC LIMIT 1) x ON true \
     WHERE n.number <= $3 ORDER BY n.number";

const RETIRED: &str = "SELECT part, low, high, step, survivors, amount, (extract(epoch FROM found_at) * 1000)::bigint, \
        (extract(epoch FROM step_at) * 1000)::bigint \
     FROM {retired} ORDER BY step = 'DROPPED', part DESC LIMIT $1";

const RETIRE: &str = "INSERT INTO {retired} AS r (part, low, high, step) VALUES ($1, $2, $3, 'FOUND') \
     ON CONFLICT (part) DO UPDATE SET low = EXCLUDED.low, high = EXCLUDED.high, step = 'FOUND', survivors = 0, amount = 0, \
        found_at = clock_timestamp(), step_at = clock_timestamp() WHERE r.step = 'DROPPED'";

const ADVANCE: &str = "UPDATE {retired} SET step = $2, survivors = $3, amount = $4, step_at = clock_timestamp() WHERE part = $1";

// Plan: pending is scanned once, whatever houses its rows are in; then lookups in the partition's primary key.
const KEEP: &str = "INSERT INTO {kept} (id, message_id, type, destination, message_key, payload, content_type, headers, created_at, \
        deliver_at, max_attempts) \
     SELECT m.id, m.message_id, m.type, m.destination, m.message_key, m.payload, m.content_type, m.headers, m.created_at, \
        m.deliver_at, m.max_attempts \
       FROM {%PART%} m WHERE m.id IN (SELECT p.id FROM {pending} p WHERE p.id >= $1 AND p.id < $2) ON CONFLICT (id) DO NOTHING";

const KEPT: &str = "SELECT count(*) FROM {kept} WHERE id >= $1 AND id < $2";

// Somebody who has published into a partition holds this lock on it until the end of the transaction.
const WRITERS: &str = "SELECT count(DISTINCT (l.virtualtransaction, l.pid)) FROM pg_locks l \
     WHERE l.locktype = 'relation' AND l.mode = 'RowExclusiveLock' AND l.relation = to_regclass($1) \
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())";

const ATTACHED: &str = "SELECT coalesce((to_jsonb(i)->>'inhdetachpending')::boolean, false) FROM pg_inherits i \
     WHERE i.inhparent = to_regclass($1) AND i.inhrelid = to_regclass($2)";

// Plan: pending is scanned once; then lookups in two primary keys.
const LEFT_OVER: &str = "SELECT count(*) FROM {pending} p JOIN {%PART%} m ON m.id = p.id \
     WHERE p.id >= $1 AND p.id < $2 AND NOT EXISTS (SELECT FROM {kept} k WHERE k.id = p.id)";

const NOT_KEPT: &str = "NOT EXISTS (SELECT FROM {kept} k WHERE k.id = m.id)";

const SIZE: &str = "(octet_length(m.payload) + coalesce(octet_length(m.headers::text), 0))::bigint";

const ROWS: &str = "SELECT id, message_id, type, destination, message_key, payload, content_type, headers::text, \
        (extract(epoch FROM created_at) * 1000000)::bigint, (extract(epoch FROM deliver_at) * 1000000)::bigint, max_attempts \
     FROM {%SHELF%} WHERE id >= $1 AND id <= $2 AND id = ANY($3) ORDER BY id";

// Plan: a range of the primary key.
const OLD: &str = "SELECT m.id, %SIZE%, m.created_at < clock_timestamp() - $3 * interval '1 microsecond' FROM {%SHELF%} m \
     WHERE m.id > $1 AND m.id < $2 ORDER BY m.id LIMIT $4";

// Plan: pending is scanned, once per page; a row counts whatever house it is in.
const PENDING: &str = "SELECT id FROM {pending} WHERE id >= $1 AND id <= $2";

// Plan: lookups in two primary keys.
const REMOVE: &str = "DELETE FROM {%SHELF%} m WHERE m.id >= $1 AND m.id <= $2 AND m.id = ANY($3) AND NOT EXISTS ( \
        SELECT FROM {pending} p WHERE p.house = {house_of}(m.destination, m.message_key, m.message_id) AND p.id = m.id)";

const ARCHIVES: &str = "SELECT id, location, shelf, part, low, high, amount, bytes, sha256, (extract(epoch FROM written_at) * 1000)::bigint, \
        (extract(epoch FROM removed_at) * 1000)::bigint \
     FROM {archive} WHERE id < $1 AND ($2::bigint IS NULL OR part = $2) AND (NOT $3 OR removed_at IS NULL) ORDER BY id DESC LIMIT $4";

const NOTE: &str = "INSERT INTO {archive} AS a (location, shelf, part, low, high, amount, bytes, sha256, written_at, removed_at) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, CASE WHEN $9 THEN clock_timestamp() END, CASE WHEN $10 THEN clock_timestamp() END) \
     ON CONFLICT (location) DO UPDATE SET shelf = EXCLUDED.shelf, part = EXCLUDED.part, low = EXCLUDED.low, high = EXCLUDED.high, \
        amount = EXCLUDED.amount, bytes = EXCLUDED.bytes, sha256 = EXCLUDED.sha256, \
        written_at = CASE WHEN $9 THEN coalesce(a.written_at, EXCLUDED.written_at) END, \
        removed_at = CASE WHEN $10 THEN coalesce(a.removed_at, EXCLUDED.removed_at) END";

/// The table of a kind of rows, its key, and its time.
fn place(what: Beside) -> (&'static str, &'static str, &'static str) {
    match what {
        Beside::Receipts => ("receipt", "id", "at"),
        Beside::Attempts => ("attempt", "id", "at"),
        Beside::Dedup => ("dedup", "dedup_key", "created_at"),
        Beside::Audit => ("audit", "id", "at"),
    }
}

fn part(number: i64) -> String {
    format!("message_p{number:07}")
}

fn table(shelf: Shelf) -> String {
    match shelf {
        Shelf::Partition(number) => part(number),
        other => other.as_str().to_owned(),
    }
}

fn range(number: i64) -> (i64, i64) {
    (number * PARTITION_SIZE, (number + 1) * PARTITION_SIZE)
}

/// Which of these ids are pending.
async fn pending(conn: &mut PgConnection, tables: &Tables, ids: &[i64]) -> Result<HashSet<i64>, Error> {
    let (Some(low), Some(high)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let found: Vec<i64> = sqlx::query_scalar(tables.sql(PENDING)).bind(low).bind(high).fetch_all(conn).await?;
    Ok(found.into_iter().collect())
}

/// Whether it is a partition of the log; and if so, whether its detaching was begun.
async fn attached(conn: &mut PgConnection, tables: &Tables, number: i64) -> Result<Option<bool>, Error> {
    let found = sqlx::query_scalar(tables.sql(ATTACHED)).bind(tables.name("message")).bind(tables.name(&part(number)));
    Ok(found.fetch_optional(conn).await?)
}

/// A partition as [`PARTITIONS`] tells it.
type Found = (i64, Option<i64>, i64, Option<i64>, Option<i64>);

impl RetentionStore for PostgresStore {
    fn partitions(&self) -> Reply<'_, Option<Vec<Partition>>> {
        on!(self.work, self.deadline, "partitions", |c| {
            let (last, _) = ahead(c, &self.tables).await?;
            let current = last / PARTITION_SIZE;
            let rows: Vec<Found> = sqlx::query_as(self.tables.sql(PARTITIONS))
                .bind(self.tables.name("message"))
                .bind(PARTITION_SIZE)
                .bind(current)
                .fetch_all(&mut *c)
                .await?;
            let partition = |(number, rows, bytes, newest_ms, newest_age_ms)| Partition {
                number,
                low: range(number).0,
                high: range(number).1,
                rows,
                bytes: Some(bytes),
                newest_ms,
                newest_age_ms,
                current: number >= current,
            };
            Ok(Some(rows.into_iter().map(partition).collect()))
        })
    }

    fn retired(&self, limit: u32) -> Reply<'_, Vec<Retired>> {
        on!(self.work, self.deadline, "partitions on their way out", |c| {
            let rows = sqlx::query(self.tables.sql(RETIRED)).bind(i64::from(limit)).fetch_all(&mut *c).await?;
            let retired = |r: &PgRow| {
                Ok(Retired {
                    number: r.try_get(0)?,
                    low: r.try_get(1)?,
                    high: r.try_get(2)?,
                    step: Step::parse(r.try_get(3)?),
                    survivors: r.try_get(4)?,
                    amount: r.try_get(5)?,
                    found_ms: r.try_get(6)?,
                    step_ms: r.try_get(7)?,
                })
            };
            Ok(rows.iter().map(retired).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn retire<'a>(&'a self, partition: &'a Partition) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "noting a partition", |c| {
            let query = sqlx::query(self.tables.sql(RETIRE)).bind(partition.number).bind(partition.low).bind(partition.high);
            query.execute(&mut *c).await?;
            Ok(())
        })
    }

    fn advance<'a>(&'a self, retired: &'a Retired) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "noting a step", |c| {
            let query = sqlx::query(self.tables.sql(ADVANCE)).bind(retired.number).bind(retired.step.as_str());
            query.bind(retired.survivors).bind(retired.amount).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn survivors(&self, low: i64, high: i64) -> Reply<'_, i64> {
        let count = self.tables.sql("SELECT COUNT(*) FROM {pending} WHERE id >= $1 AND id < $2");
        on!(self.work, LONG.max(self.deadline), "counting pending messages", |c| {
            Ok(sqlx::query_scalar(count).bind(low).bind(high).fetch_one(&mut *c).await?)
        })
    }

    fn keep(&self, number: i64) -> Reply<'_, i64> {
        on!(self.work, LONG.max(self.deadline), "keeping messages that aren't delivered", |c| {
            let (low, high) = range(number);
            let keep = self.tables.sql(&KEEP.replace("%PART%", &part(number)));
            sqlx::query(keep).bind(low).bind(high).execute(&mut *c).await?;
            Ok(sqlx::query_scalar(self.tables.sql(KEPT)).bind(low).bind(high).fetch_one(&mut *c).await?)
        })
    }

    fn held(&self, number: i64) -> Reply<'_, Option<String>> {
        on!(self.work, self.deadline, "publishers of a partition", |c| {
            let writers: i64 =
                sqlx::query_scalar(self.tables.sql(WRITERS)).bind(self.tables.name(&part(number))).fetch_one(&mut *c).await?;
            Ok((writers > 0).then(|| {
                format!("{writers} transaction(s) that published into it have not ended; look for idle ones in pg_stat_activity")
            }))
        })
    }

    fn detach(&self, number: i64, _attempt: u32) -> Reply<'_, bool> {
        on!(self.work, LONG.max(self.deadline), "detaching a partition", |c| {
            let how = match attached(c, &self.tables, number).await? {
                None => return Ok(true),
                Some(true) => " FINALIZE",
                Some(false) => {
                    let version: i32 =
                        sqlx::query_scalar("SELECT current_setting('server_version_num')::integer").fetch_one(&mut *c).await?;
                    if version >= DETACHES_CONCURRENTLY { " CONCURRENTLY" } else { "" }
                }
            };
            // Outside a transaction. What it changes by then stays when it gives up: the next try finishes it.
            sqlx::raw_sql(AssertSqlSafe(format!("SET lock_timeout = '{LOCK_TIMEOUT}'"))).execute(&mut *c).await?;
            let detach = format!("ALTER TABLE {{message}} DETACH PARTITION {{{}}}{how}", part(number));
            let result = sqlx::raw_sql(self.tables.sql(&detach)).execute(&mut *c).await;
            sqlx::raw_sql("RESET lock_timeout").execute(&mut *c).await?;
            match result.map_err(Error::from) {
                Ok(_) => Ok(true),
                Err(e) if e.kind() == ErrorKind::Conflict => Ok(false),
                Err(e) => Err(e),
            }
        })
    }

    fn count(&self, number: i64) -> Reply<'_, i64> {
        let count = self.tables.sql(&format!("SELECT count(*) FROM {{{}}} m WHERE {NOT_KEPT}", part(number)));
        on!(self.work, LONG.max(self.deadline), "counting a partition", |c| {
            Ok(sqlx::query_scalar(count).fetch_one(&mut *c).await?)
        })
    }

    fn discard(&self, number: i64) -> Reply<'_, i64> {
        on!(self.work, LONG.max(self.deadline), "dropping a partition", |c| {
            let name = self.tables.name(&part(number));
            if attached(c, &self.tables, number).await?.is_some() {
                return Err(Error::Schema(format!("{name} is a partition of the log again; it is not dropped")));
            }
            let there: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(&name).fetch_one(&mut *c).await?;
            if !there {
                return Ok(0);
            }
            let (low, high) = range(number);
            let left = self.tables.sql(&LEFT_OVER.replace("%PART%", &part(number)));
            let left: i64 = sqlx::query_scalar(left).bind(low).bind(high).fetch_one(&mut *c).await?;
            if left == 0 {
                sqlx::raw_sql(AssertSqlSafe(format!("DROP TABLE {name}"))).execute(&mut *c).await?;
            }
            Ok(left)
        })
    }

    fn sizes(&self, shelf: Shelf, after: i64, upto: i64, limit: u32) -> Reply<'_, Vec<RowSize>> {
        let only = if shelf.part().is_some() { format!(" AND {NOT_KEPT}") } else { String::new() };
        let sizes = format!(
            "SELECT m.id, {SIZE} FROM {{{}}} m WHERE m.id > $1 AND m.id <= $2{only} ORDER BY m.id LIMIT $3",
            table(shelf)
        );
        on!(self.work, LONG.max(self.deadline), "sizes of messages", |c| {
            let query = sqlx::query_as(self.tables.sql(&sizes)).bind(after).bind(upto).bind(i64::from(limit));
            let rows: Vec<(i64, i64)> = query.fetch_all(&mut *c).await?;
            Ok(rows.into_iter().map(|(id, size)| RowSize { id, size }).collect())
        })
    }

    fn rows<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, Vec<LogRow>> {
        on!(self.work, LONG.max(self.deadline), "messages for the archive", |c| {
            let (Some(low), Some(high)) = (ids.first(), ids.last()) else { return Ok(Vec::new()) };
            let query = sqlx::query(self.tables.sql(&ROWS.replace("%SHELF%", &table(shelf))));
            let rows = query.bind(low).bind(high).bind(ids).fetch_all(&mut *c).await?;
            let message = |r: &PgRow| {
                Ok(LogRow {
                    id: r.try_get(0)?,
                    message_id: r.try_get(1)?,
                    kind: r.try_get(2)?,
                    destination: r.try_get(3)?,
                    key: r.try_get(4)?,
                    payload: r.try_get(5)?,
                    content_type: r.try_get(6)?,
                    headers: r.try_get(7)?,
                    created_us: r.try_get(8)?,
                    deliver_us: r.try_get(9)?,
                    max_attempts: r.try_get(10)?,
                })
            };
            Ok(rows.iter().map(message).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn boundary(&self, term: Duration) -> Reply<'_, Option<Boundary>> {
        const ENDS: &str = "SELECT min(id), max(id) FROM {message}";
        const AT: &str = "SELECT id, created_at < clock_timestamp() - $2 * interval '1 microsecond' FROM {message} \
             WHERE id >= $1 ORDER BY id LIMIT 1";
        on!(self.work, LONG.max(self.deadline), "age of the log", |c| {
            let ends: (Option<i64>, Option<i64>) = sqlx::query_as(self.tables.sql(ENDS)).fetch_one(&mut *c).await?;
            let (Some(lowest), Some(highest)) = ends else { return Ok(None) };
            let mut search = Bisection::new(lowest, highest);
            while let Some(at) = search.next() {
                let found = sqlx::query_as(self.tables.sql(AT)).bind(at).bind(micros(term)).fetch_optional(&mut *c).await?;
                search.seen(at, found);
            }
            Ok(Some(search.boundary(highest, Some(PARTITION_SIZE))))
        })
    }

    fn old(&self, shelf: Shelf, after: i64, below: i64, term: Duration, limit: u32) -> Reply<'_, OldPage> {
        on!(self.work, LONG.max(self.deadline), "old messages", |c| {
            // One snapshot for both: a message that is seen here and isn't seen as pending is delivered, and stays so.
            let mut tx = c.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
            let page: Vec<(i64, i64, bool)> =
                sqlx::query_as(self.tables.sql(&OLD.replace("%SIZE%", SIZE).replace("%SHELF%", &table(shelf))))
                    .bind(after)
                    .bind(below)
                    .bind(micros(term))
                    .bind(i64::from(limit))
                    .fetch_all(&mut *tx)
                    .await?;
            let ids: Vec<i64> = page.iter().map(|r| r.0).collect();
            let pending = pending(&mut tx, &self.tables, &ids).await?;
            tx.commit().await?;
            let rows = page.iter().filter(|r| r.2 && !pending.contains(&r.0)).map(|r| RowSize { id: r.0, size: r.1 });
            Ok(OldPage { rows: rows.collect(), last: page.last().map(|r| r.0) })
        })
    }

    fn remove<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, u64> {
        on!(self.work, LONG.max(self.deadline), "removing old messages", |c| {
            let (Some(low), Some(high)) = (ids.first(), ids.last()) else { return Ok(0) };
            // A resize moves pending rows to other houses and replaces the function that names them. It waits for this lock, and
            // this one for it, so that the statement sees both from before or both from after.
            let mut tx = c.begin().await?;
            sqlx::raw_sql(self.tables.sql("LOCK TABLE {pending} IN ROW SHARE MODE")).execute(&mut *tx).await?;
            let query = sqlx::query(self.tables.sql(&REMOVE.replace("%SHELF%", &table(shelf))));
            let done = query.bind(low).bind(high).bind(ids).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(done.rows_affected())
        })
    }

    fn archives<'a>(&'a self, filter: &'a ArchiveFilter) -> Reply<'a, Vec<ArchiveRow>> {
        on!(self.work, self.deadline, "archives", |c| {
            let rows = sqlx::query(self.tables.sql(ARCHIVES))
                .bind(filter.before.unwrap_or(i64::MAX))
                .bind(filter.part)
                .bind(filter.open)
                .bind(i64::from(filter.limit))
                .fetch_all(&mut *c)
                .await?;
            let archive = |r: &PgRow| {
                Ok(ArchiveRow {
                    id: r.try_get(0)?,
                    location: r.try_get(1)?,
                    shelf: Shelf::parse(r.try_get(2)?, r.try_get(3)?),
                    low: r.try_get(4)?,
                    high: r.try_get(5)?,
                    amount: r.try_get(6)?,
                    bytes: r.try_get(7)?,
                    sha256: r.try_get(8)?,
                    written_ms: r.try_get(9)?,
                    removed_ms: r.try_get(10)?,
                })
            };
            Ok(rows.iter().map(archive).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn note<'a>(&'a self, file: &'a ArchiveRow) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "noting an archive", |c| {
            sqlx::query(self.tables.sql(NOTE))
                .bind(&file.location)
                .bind(file.shelf.as_str())
                .bind(file.shelf.part())
                .bind(file.low)
                .bind(file.high)
                .bind(file.amount)
                .bind(file.bytes)
                .bind(&file.sha256)
                .bind(file.written_ms.is_some())
                .bind(file.removed_ms.is_some())
                .execute(&mut *c)
                .await?;
            Ok(())
        })
    }

    fn forget(&self, id: i64) -> Reply<'_, ()> {
        on!(self.work, self.deadline, "forgetting an archive", |c| {
            sqlx::query(self.tables.sql("DELETE FROM {archive} WHERE id = $1")).bind(id).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn expired<'a>(&'a self, what: Beside, term: Duration, after: &'a str, limit: u32) -> Reply<'a, Expired> {
        on!(self.work, LONG.max(self.deadline), "old rows", |c| {
            let (table, key, time) = place(what);
            let row = if what == Beside::Attempts { "row_id" } else { "0::bigint" };
            // Plan: a range of the primary key.
            let page = |key_type: &str| {
                self.tables.sql(&format!(
                    "SELECT {key}, {time} < clock_timestamp() - $2 * interval '1 microsecond', {row} FROM {{{table}}} \
                      WHERE {key} > $1::{key_type} ORDER BY {key} LIMIT $3"
                ))
            };
            if what == Beside::Dedup {
                let query = sqlx::query_as(page("text")).bind(after).bind(micros(term)).bind(i64::from(limit));
                let rows: Vec<(String, bool, i64)> = query.fetch_all(&mut *c).await?;
                let last = rows.last().filter(|_| rows.len() == limit as usize).map(|r| r.0.clone());
                return Ok(Expired { keys: rows.into_iter().filter(|r| r.1).map(|r| r.0).collect(), last });
            }
            let query = sqlx::query_as(page("bigint")).bind(after.parse::<i64>().unwrap_or(0)).bind(micros(term));
            let rows: Vec<(i64, bool, i64)> = query.bind(i64::from(limit)).fetch_all(&mut *c).await?;
            // Looked at afterwards: a message that isn't pending then is delivered, and stays so.
            let stays = if what == Beside::Attempts {
                pending(c, &self.tables, &rows.iter().map(|r| r.2).collect::<Vec<_>>()).await?
            } else {
                HashSet::new()
            };
            let ids: Vec<(i64, bool)> = rows.iter().map(|r| (r.0, r.1)).collect();
            Ok(expired_ids(&ids, |n| stays.contains(&rows[n].2), limit))
        })
    }

    fn clear<'a>(&'a self, what: Beside, term: Duration, keys: &'a [String]) -> Reply<'a, u64> {
        on!(self.work, LONG.max(self.deadline), "removing old rows", |c| {
            let (table, key, time) = place(what);
            let query = sqlx::query(self.tables.sql(&format!(
                "DELETE FROM {{{table}}} WHERE {key} = ANY($1) AND {time} < clock_timestamp() - $2 * interval '1 microsecond'"
            )));
            let query = if what == Beside::Dedup { query.bind(keys) } else { query.bind(numbers(keys)) };
            Ok(query.bind(micros(term)).execute(&mut *c).await?.rows_affected())
        })
    }
}
