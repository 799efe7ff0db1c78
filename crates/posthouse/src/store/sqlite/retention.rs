//! Taking old rows out. The log is one table here, so they go one by one.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row, SqliteConnection};

use super::relay::{bytes, json, millis, text, text_or_null};
use super::{SqliteStore, WRITE, now};
use crate::Error;
use crate::store::{
    ArchiveFilter, ArchiveRow, Beside, Bisection, Boundary, Expired, LogRow, OldPage, Partition, Reply, RetentionStore, Retired,
    RowSize, Shelf, Tables, expired_ids, numbers, on,
};

/// For calls that read many rows.
const LONG: Duration = Duration::from_secs(600);

const SIZE: &str = "length(CAST(payload AS BLOB)) + coalesce(length(CAST(headers AS BLOB)), 0)";

const ROWS: &str = "SELECT id, message_id, type, destination, message_key, payload, content_type, headers, created_at, deliver_at, \
        max_attempts \
     FROM {message} WHERE id IN (SELECT value FROM json_each(?1)) ORDER BY id";

// Plan: a range of the primary key.
const OLD: &str =
    concat!("SELECT id, %SIZE%, created_at < ", now!(), " - ?3 FROM {message} WHERE id > ?1 AND id < ?2 ORDER BY id LIMIT ?4");

const PENDING: &str = "SELECT id FROM {pending} WHERE id >= ?1 AND id <= ?2";

// Plan: lookups in two primary keys.
const REMOVE: &str = "DELETE FROM {message} WHERE id IN (SELECT value FROM json_each(?1)) \
     AND NOT EXISTS (SELECT 1 FROM {pending} p WHERE p.house = 0 AND p.id = {message}.id)";

const ARCHIVES: &str = "SELECT id, location, shelf, part, low, high, amount, bytes, sha256, written_at, removed_at \
     FROM {archive} WHERE id < ?1 AND (?2 IS NULL OR part = ?2) AND (NOT ?3 OR removed_at IS NULL) ORDER BY id DESC LIMIT ?4";

const NOTE: &str = concat!(
    "INSERT INTO {archive} AS a (location, shelf, part, low, high, amount, bytes, sha256, written_at, removed_at) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, CASE WHEN ?9 THEN ",
    now!(),
    " END, CASE WHEN ?10 THEN ",
    now!(),
    " END) ON CONFLICT (location) DO UPDATE SET shelf = excluded.shelf, part = excluded.part, low = excluded.low, \
        high = excluded.high, amount = excluded.amount, bytes = excluded.bytes, sha256 = excluded.sha256, \
        written_at = CASE WHEN ?9 THEN coalesce(a.written_at, excluded.written_at) END, \
        removed_at = CASE WHEN ?10 THEN coalesce(a.removed_at, excluded.removed_at) END"
);

/// The table of a kind of rows, its key, and its time.
fn place(what: Beside) -> (&'static str, &'static str, &'static str) {
    match what {
        Beside::Receipts => ("receipt", "id", "at"),
        Beside::Attempts => ("attempt", "id", "at"),
        Beside::Dedup => ("dedup", "dedup_key", "created_at"),
        Beside::Audit => ("audit", "id", "at"),
    }
}

/// Which of these ids are pending.
async fn pending(conn: &mut SqliteConnection, tables: &Tables, ids: &[i64]) -> Result<HashSet<i64>, Error> {
    let (Some(low), Some(high)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let found: Vec<i64> = sqlx::query_scalar(tables.sql(PENDING)).bind(low).bind(high).fetch_all(conn).await?;
    Ok(found.into_iter().collect())
}

fn no_partitions<T: Send + 'static>() -> Reply<'static, T> {
    Box::pin(std::future::ready(Err(Error::Schema("SQLite has no partitions".into()))))
}

impl RetentionStore for SqliteStore {
    fn partitions(&self) -> Reply<'_, Option<Vec<Partition>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    fn retired(&self, _limit: u32) -> Reply<'_, Vec<Retired>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn retire<'a>(&'a self, _partition: &'a Partition) -> Reply<'a, ()> {
        no_partitions()
    }

    fn advance<'a>(&'a self, _retired: &'a Retired) -> Reply<'a, ()> {
        no_partitions()
    }

    fn survivors(&self, low: i64, high: i64) -> Reply<'_, i64> {
        let count = self.tables.sql("SELECT COUNT(*) FROM {pending} WHERE id >= ?1 AND id < ?2");
        on!(self.work, LONG.max(self.deadline), "counting pending messages", |c| {
            Ok(sqlx::query_scalar(count).bind(low).bind(high).fetch_one(&mut *c).await?)
        })
    }

    fn keep(&self, _number: i64) -> Reply<'_, i64> {
        no_partitions()
    }

    fn held(&self, _number: i64) -> Reply<'_, Option<String>> {
        no_partitions()
    }

    fn detach(&self, _number: i64, _attempt: u32) -> Reply<'_, bool> {
        no_partitions()
    }

    fn count(&self, _number: i64) -> Reply<'_, i64> {
        no_partitions()
    }

    fn discard(&self, _number: i64) -> Reply<'_, i64> {
        no_partitions()
    }

    fn sizes(&self, shelf: Shelf, after: i64, upto: i64, limit: u32) -> Reply<'_, Vec<RowSize>> {
        let sizes = format!("SELECT id, {SIZE} FROM {{message}} WHERE id > ?1 AND id <= ?2 ORDER BY id LIMIT ?3");
        on!(self.work, LONG.max(self.deadline), "sizes of messages", |c| {
            if shelf != Shelf::Message {
                return Ok(Vec::new());
            }
            let query = sqlx::query_as(self.tables.sql(&sizes)).bind(after).bind(upto).bind(limit);
            let rows: Vec<(i64, i64)> = query.fetch_all(&mut *c).await?;
            Ok(rows.into_iter().map(|(id, size)| RowSize { id, size }).collect())
        })
    }

    fn rows<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, Vec<LogRow>> {
        on!(self.work, LONG.max(self.deadline), "messages for the archive", |c| {
            if shelf != Shelf::Message {
                return Ok(Vec::new());
            }
            let rows = sqlx::query(self.tables.sql(ROWS)).bind(json(ids)?).fetch_all(&mut *c).await?;
            let message = |r: &SqliteRow| {
                Ok(LogRow {
                    id: r.try_get(0)?,
                    message_id: text(r, 1)?,
                    kind: text(r, 2)?,
                    destination: text(r, 3)?,
                    key: text_or_null(r, 4)?,
                    payload: bytes(r, 5)?.unwrap_or_default(),
                    content_type: text(r, 6)?,
                    headers: text_or_null(r, 7)?,
                    created_us: r.try_get::<i64, _>(8)?.saturating_mul(1_000),
                    deliver_us: r.try_get::<Option<i64>, _>(9)?.map(|ms| ms.saturating_mul(1_000)),
                    max_attempts: r.try_get(10)?,
                })
            };
            Ok(rows.iter().map(message).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn boundary(&self, term: Duration) -> Reply<'_, Option<Boundary>> {
        const ENDS: &str = "SELECT (SELECT min(id) FROM {message}), (SELECT max(id) FROM {message})";
        const AT: &str = concat!("SELECT id, created_at < ", now!(), " - ?2 FROM {message} WHERE id >= ?1 ORDER BY id LIMIT 1");
        on!(self.work, self.deadline, "age of the log", |c| {
            let ends: (Option<i64>, Option<i64>) = sqlx::query_as(self.tables.sql(ENDS)).fetch_one(&mut *c).await?;
            let (Some(lowest), Some(highest)) = ends else { return Ok(None) };
            let mut search = Bisection::new(lowest, highest);
            while let Some(at) = search.next() {
                let found = sqlx::query_as(self.tables.sql(AT)).bind(at).bind(millis(term)).fetch_optional(&mut *c).await?;
                search.seen(at, found);
            }
            Ok(Some(search.boundary(highest, None)))
        })
    }

    fn old(&self, shelf: Shelf, after: i64, below: i64, term: Duration, limit: u32) -> Reply<'_, OldPage> {
        on!(self.work, LONG.max(self.deadline), "old messages", |c| {
            if shelf != Shelf::Message {
                return Ok(OldPage::default());
            }
            // One snapshot for both: a message that is seen here and isn't seen as pending is delivered, and stays so.
            let mut tx = c.begin().await?;
            let page: Vec<(i64, i64, bool)> = sqlx::query_as(self.tables.sql(&OLD.replace("%SIZE%", SIZE)))
                .bind(after)
                .bind(below)
                .bind(millis(term))
                .bind(limit)
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
        on!(self.work, self.deadline, "removing old messages", |c| {
            if shelf != Shelf::Message {
                return Ok(0);
            }
            let mut tx = c.begin_with(WRITE).await?;
            let done = sqlx::query(self.tables.sql(REMOVE)).bind(json(ids)?).execute(&mut *tx).await?;
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
                .bind(filter.limit)
                .fetch_all(&mut *c)
                .await?;
            let archive = |r: &SqliteRow| {
                Ok(ArchiveRow {
                    id: r.try_get(0)?,
                    location: text(r, 1)?,
                    shelf: Shelf::parse(&text(r, 2)?, r.try_get(3)?),
                    low: r.try_get(4)?,
                    high: r.try_get(5)?,
                    amount: r.try_get(6)?,
                    bytes: r.try_get(7)?,
                    sha256: text(r, 8)?,
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
            sqlx::query(self.tables.sql("DELETE FROM {archive} WHERE id = ?1")).bind(id).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn expired<'a>(&'a self, what: Beside, term: Duration, after: &'a str, limit: u32) -> Reply<'a, Expired> {
        on!(self.work, LONG.max(self.deadline), "old rows", |c| {
            let (table, key, time) = place(what);
            let row = if what == Beside::Attempts { "row_id" } else { "0" };
            // Plan: a range of the primary key.
            let page = self.tables.sql(&format!(
                "SELECT {key}, {time} < {} - ?2, {row} FROM {{{table}}} WHERE {key} > ?1 ORDER BY {key} LIMIT ?3",
                now!()
            ));
            if what == Beside::Dedup {
                let query = sqlx::query_as(page).bind(after).bind(millis(term)).bind(limit);
                let rows: Vec<(String, bool, i64)> = query.fetch_all(&mut *c).await?;
                let last = rows.last().filter(|_| rows.len() == limit as usize).map(|r| r.0.clone());
                return Ok(Expired { keys: rows.into_iter().filter(|r| r.1).map(|r| r.0).collect(), last });
            }
            let query = sqlx::query_as(page).bind(after.parse::<i64>().unwrap_or(0)).bind(millis(term)).bind(limit);
            let rows: Vec<(i64, bool, i64)> = query.fetch_all(&mut *c).await?;
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
        on!(self.work, self.deadline, "removing old rows", |c| {
            let (table, key, time) = place(what);
            let keys = if what == Beside::Dedup { json(keys)? } else { json(&numbers(keys))? };
            let clear = self.tables.sql(&format!(
                "DELETE FROM {{{table}}} WHERE {key} IN (SELECT value FROM json_each(?1)) AND {time} < {} - ?2",
                now!()
            ));
            let mut tx = c.begin_with(WRITE).await?;
            let done = sqlx::query(clear).bind(keys).bind(millis(term)).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(done.rows_affected())
        })
    }
}
