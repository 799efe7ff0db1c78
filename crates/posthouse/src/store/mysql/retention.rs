//! Taking old rows out.
//!
//! No statement of MySQL takes a partition out while transactions that used the log are open: any change of the table waits for
//! their ends, and publishers who come meanwhile wait behind it. So it waits for a second at most, the least that MySQL knows,
//! and not at all at first where the server can do that (MariaDB). What it does then takes milliseconds: a partition changes
//! places with an empty table, and the empty partition is dropped.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection, Row};

use super::migrate::PARTITION_SIZE;
use super::relay::{int, micros, text, text_or_null};
use super::{MySqlStore, number};
use crate::store::{
    ArchiveFilter, ArchiveRow, Beside, Bisection, Boundary, Expired, LogRow, OldPage, Partition, Reply, RetentionStore, Retired,
    RowSize, Shelf, Step, Tables, expired_ids, numbers, on,
};
use crate::{Error, ErrorKind};

/// For calls that take in a whole partition.
const LONG: Duration = Duration::from_secs(600);

/// Tries without waiting, where the server can do that; then it waits.
const AT_ONCE: u32 = 4;

/// The error numbers of a partition that isn't there, and of a list of partitions that would be empty.
const NO_SUCH_PARTITION: [u16; 2] = [1507, 1735];

const PARTITIONS: &str = "SELECT CAST(PARTITION_NAME AS BINARY), CAST(TABLE_ROWS AS SIGNED), CAST(DATA_LENGTH + INDEX_LENGTH AS SIGNED) \
     FROM information_schema.PARTITIONS WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ? \
     ORDER BY PARTITION_ORDINAL_POSITION";

// Plan: one lookup at the end of a range of the primary key.
const NEWEST: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at) DIV 1000, \
        TIMESTAMPDIFF(MICROSECOND, created_at, UTC_TIMESTAMP(6)) DIV 1000 \
     FROM {message} WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT 1";

const RETIRED: &str = "SELECT part, low, high, step, survivors, amount, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', found_at) DIV 1000, \
        TIMESTAMPDIFF(MICROSECOND, '1970-01-01', step_at) DIV 1000 \
     FROM {retired} ORDER BY step = 'DROPPED', part DESC LIMIT ?";

const RETIRE: &str = "INSERT INTO {retired} (part, low, high, step) VALUES (?, ?, ?, 'FOUND') \
     ON DUPLICATE KEY UPDATE survivors = IF(step = 'DROPPED', 0, survivors), amount = IF(step = 'DROPPED', 0, amount), \
        found_at = IF(step = 'DROPPED', UTC_TIMESTAMP(6), found_at), step_at = IF(step = 'DROPPED', UTC_TIMESTAMP(6), step_at), \
        step = IF(step = 'DROPPED', 'FOUND', step)";

const ADVANCE: &str = "UPDATE {retired} SET step = ?, survivors = ?, amount = ?, step_at = UTC_TIMESTAMP(6) WHERE part = ?";

// Plan: pending is scanned once, whatever houses its rows are in; then lookups in two primary keys.
const KEEP: &str = "INSERT INTO {kept} (id, message_id, type, destination, message_key, payload, content_type, headers, created_at, \
        deliver_at, max_attempts) \
     SELECT m.id, m.message_id, m.type, m.destination, m.message_key, m.payload, m.content_type, m.headers, m.created_at, \
        m.deliver_at, m.max_attempts \
       FROM {pending} p STRAIGHT_JOIN {%LOG%} m ON m.id = p.id LEFT JOIN {kept} k ON k.id = p.id \
      WHERE p.id >= ? AND p.id < ? AND k.id IS NULL";

const KEPT: &str = "SELECT COUNT(*) FROM {kept} WHERE id >= ? AND id < ?";

// Plan: pending is scanned once; then lookups in two primary keys.
const LEFT_OVER: &str = "SELECT COUNT(*) FROM {pending} p STRAIGHT_JOIN {%LOG%} m ON m.id = p.id LEFT JOIN {kept} k ON k.id = p.id \
     WHERE p.id >= ? AND p.id < ? AND k.id IS NULL";

const NOT_KEPT: &str = "NOT EXISTS (SELECT 1 FROM {kept} k WHERE k.id = m.id)";

const SIZE: &str = "CAST(LENGTH(m.payload) + COALESCE(LENGTH(m.headers), 0) AS SIGNED)";

const ROWS: &str = "SELECT id, message_id, type, destination, message_key, payload, content_type, headers, \
        TIMESTAMPDIFF(MICROSECOND, '1970-01-01', created_at), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', deliver_at), max_attempts \
     FROM {%SHELF%} WHERE id IN (%IDS%) ORDER BY id";

// Plan: a range of the primary key.
const OLD: &str = "SELECT m.id, %SIZE%, m.created_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND FROM {%SHELF%} m \
     WHERE m.id > ? AND m.id < ? ORDER BY m.id LIMIT ?";

// Plan: pending is scanned, once per page; a row counts whatever house it is in.
const PENDING: &str = "SELECT id FROM {pending} WHERE id >= ? AND id <= ?";

// Plan: lookups in two primary keys. The number of houses is locked, as a publisher locks it, until the statement is done.
const REMOVE: &str = "DELETE m FROM {%SHELF%} m WHERE m.id IN (%IDS%) AND NOT EXISTS ( \
        SELECT 1 FROM {pending} p WHERE p.house = {hash}(m.destination, m.message_key, m.message_id) % ? AND p.id = m.id)";

const ARCHIVES: &str = "SELECT id, location, shelf, part, low, high, amount, bytes, sha256, \
        TIMESTAMPDIFF(MICROSECOND, '1970-01-01', written_at) DIV 1000, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', removed_at) DIV 1000 \
     FROM {archive} WHERE id < ? AND (? IS NULL OR part = ?) AND (NOT ? OR removed_at IS NULL) ORDER BY id DESC LIMIT ?";

const NOTE: &str = "INSERT INTO {archive} (location, shelf, part, low, high, amount, bytes, sha256, written_at, removed_at) \
     VALUES (?, ?, ?, ?, ?, ?, ?, ?, IF(?, UTC_TIMESTAMP(6), NULL), IF(?, UTC_TIMESTAMP(6), NULL)) \
     ON DUPLICATE KEY UPDATE shelf = VALUES(shelf), part = VALUES(part), low = VALUES(low), high = VALUES(high), \
        amount = VALUES(amount), bytes = VALUES(bytes), sha256 = VALUES(sha256), \
        written_at = IF(VALUES(written_at) IS NULL, NULL, COALESCE(written_at, VALUES(written_at))), \
        removed_at = IF(VALUES(removed_at) IS NULL, NULL, COALESCE(removed_at, VALUES(removed_at)))";

/// The table of a kind of rows, its key, and its time.
fn place(what: Beside) -> (&'static str, &'static str, &'static str) {
    match what {
        Beside::Receipts => ("receipt", "id", "at"),
        Beside::Attempts => ("attempt", "id", "at"),
        Beside::Dedup => ("dedup", "dedup_key", "created_at"),
        Beside::Audit => ("audit", "id", "at"),
    }
}

/// The table that a partition becomes.
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

/// Numbers for an IN: the only way in which the server looks each of them up by the primary key in a DELETE too.
fn list(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")
}

/// Which of these ids are pending.
async fn pending(conn: &mut MySqlConnection, tables: &Tables, ids: &[i64]) -> Result<HashSet<i64>, Error> {
    let (Some(low), Some(high)) = (ids.iter().min(), ids.iter().max()) else { return Ok(HashSet::new()) };
    let found: Vec<i64> = sqlx::query_scalar(tables.sql(PENDING)).bind(low).bind(high).fetch_all(conn).await?;
    Ok(found.into_iter().collect())
}

/// Name, rows and bytes, as the catalogue has them.
type Found = (Option<Vec<u8>>, Option<i64>, Option<i64>);

/// The numbers of the log's partitions, with what is known of their rows and bytes.
async fn partitions(conn: &mut MySqlConnection, tables: &Tables) -> Result<Vec<(i64, Option<i64>, Option<i64>)>, Error> {
    // MySQL keeps these figures for a day unless told otherwise; MariaDB skips the comment, as it knows no such variable.
    sqlx::raw_sql("SET @posthouse = 1 /*!80000 , SESSION information_schema_stats_expiry = 0 */").execute(&mut *conn).await?;
    let query = sqlx::query_as(PARTITIONS).bind(tables.schema()).bind(format!("{}message", tables.prefix()));
    let rows: Vec<Found> = query.fetch_all(conn).await?;
    let number = |name: Vec<u8>| std::str::from_utf8(&name).ok()?.strip_prefix('p')?.parse().ok();
    Ok(rows.into_iter().filter_map(|(name, rows, bytes)| Some((name.and_then(number)?, rows, bytes))).collect())
}

async fn exists(conn: &mut MySqlConnection, tables: &Tables, table: &str) -> Result<bool, Error> {
    let found: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ?",
    )
    .bind(tables.schema())
    .bind(format!("{}{table}", tables.prefix()))
    .fetch_one(conn)
    .await?;
    Ok(found > 0)
}

async fn any(conn: &mut MySqlConnection, tables: &Tables, from: &str) -> Result<bool, Error> {
    let found: i64 =
        sqlx::query_scalar(tables.sql(&format!("SELECT CAST(EXISTS (SELECT 1 FROM {from}) AS SIGNED)"))).fetch_one(conn).await?;
    Ok(found == 1)
}

/// Changes the log; false when somebody holds it.
async fn alter(conn: &mut MySqlConnection, tables: &Tables, what: &str, wait: u32) -> Result<bool, Error> {
    // A server that can't do without waiting takes 0 for 1.
    sqlx::raw_sql(if wait == 0 { "SET SESSION lock_wait_timeout = 0" } else { "SET SESSION lock_wait_timeout = 1" })
        .execute(&mut *conn)
        .await?;
    let result = conn.execute(sqlx::raw_sql(tables.sql(&format!("ALTER TABLE {{message}} {what}")))).await;
    sqlx::raw_sql("SET SESSION lock_wait_timeout = DEFAULT").execute(&mut *conn).await?;
    match result {
        Ok(_) => Ok(true),
        Err(e) if number(&e).is_some_and(|n| NO_SUCH_PARTITION.contains(&n)) => Ok(true),
        Err(e) if Error::kind_of(&e) == ErrorKind::Conflict => Ok(false),
        Err(e) => Err(e.into()),
    }
}

impl RetentionStore for MySqlStore {
    fn partitions(&self) -> Reply<'_, Option<Vec<Partition>>> {
        on!(self.work, self.deadline, "partitions", |c| {
            let parts = partitions(c, &self.tables).await?;
            let (current, _) = super::upkeep::ahead(c, &self.tables).await?;
            let mut out = Vec::new();
            for (number, rows, bytes) in parts.into_iter().filter(|p| p.0 <= current) {
                let (low, high) = range(number);
                let newest = sqlx::query_as(self.tables.sql(NEWEST)).bind(low).bind(high).fetch_optional(&mut *c).await?;
                let (newest_ms, newest_age_ms): (Option<i64>, Option<i64>) = newest.unwrap_or_default();
                out.push(Partition { number, low, high, rows, bytes, newest_ms, newest_age_ms, current: number >= current });
            }
            Ok(Some(out))
        })
    }

    fn retired(&self, limit: u32) -> Reply<'_, Vec<Retired>> {
        on!(self.work, self.deadline, "partitions on their way out", |c| {
            let rows = sqlx::query(self.tables.sql(RETIRED)).bind(limit).fetch_all(&mut *c).await?;
            let retired = |r: &MySqlRow| {
                Ok(Retired {
                    number: int(r, 0)?,
                    low: int(r, 1)?,
                    high: int(r, 2)?,
                    step: Step::parse(&text(r, 3)?),
                    survivors: int(r, 4)?,
                    amount: int(r, 5)?,
                    found_ms: int(r, 6)?,
                    step_ms: int(r, 7)?,
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
            let query = sqlx::query(self.tables.sql(ADVANCE)).bind(retired.step.as_str().as_bytes());
            query.bind(retired.survivors).bind(retired.amount).bind(retired.number).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn survivors(&self, low: i64, high: i64) -> Reply<'_, i64> {
        let count = self.tables.sql("SELECT COUNT(*) FROM {pending} WHERE id >= ? AND id < ?");
        on!(self.work, LONG.max(self.deadline), "counting pending messages", |c| {
            Ok(sqlx::query_scalar(count).bind(low).bind(high).fetch_one(&mut *c).await?)
        })
    }

    fn keep(&self, number: i64) -> Reply<'_, i64> {
        on!(self.work, LONG.max(self.deadline), "keeping messages that aren't delivered", |c| {
            let (low, high) = range(number);
            // As the table that it has become, and where it still is in the log. What isn't committed yet is read too, so that it
            // is there already when it is: somebody who has published into the partition may commit at any moment.
            let detached = exists(c, &self.tables, &part(number)).await?;
            for log in ["message".to_owned()].into_iter().chain(detached.then(|| part(number))) {
                let keep = self.tables.sql(&KEEP.replace("%LOG%", &log));
                // Read like that, what is being delivered would be missing, which may yet fail: so once more.
                for level in ["READ UNCOMMITTED", "READ COMMITTED"] {
                    let set = AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {level}"));
                    sqlx::raw_sql(set).execute(&mut *c).await?;
                    sqlx::query(keep.clone()).bind(low).bind(high).execute(&mut *c).await?;
                }
            }
            let kept = sqlx::query(self.tables.sql(KEPT)).bind(low).bind(high).fetch_one(&mut *c).await?;
            Ok(int(&kept, 0)?)
        })
    }

    fn held(&self, _number: i64) -> Reply<'_, Option<String>> {
        // Whoever has used the log keeps it from being changed.
        Box::pin(std::future::ready(Ok(None)))
    }

    fn detach(&self, number: i64, attempt: u32) -> Reply<'_, bool> {
        on!(self.work, LONG.max(self.deadline), "detaching a partition", |c| {
            let attached = |parts: Vec<(i64, Option<i64>, Option<i64>)>| parts.iter().any(|p| p.0 == number);
            if !attached(partitions(c, &self.tables).await?) {
                return Ok(true);
            }
            let own = part(number);
            if !exists(c, &self.tables, &own).await? {
                // Made apart, so that its name tells that it is ready.
                let new = format!("{own}_new");
                sqlx::raw_sql(self.tables.sql(&format!("DROP TABLE IF EXISTS {{{new}}}"))).execute(&mut *c).await?;
                sqlx::raw_sql(self.tables.sql(&format!("CREATE TABLE {{{new}}} LIKE {{message}}"))).execute(&mut *c).await?;
                sqlx::raw_sql(self.tables.sql(&format!("ALTER TABLE {{{new}}} REMOVE PARTITIONING"))).execute(&mut *c).await?;
                sqlx::raw_sql(self.tables.sql(&format!("RENAME TABLE {{{new}}} TO {{{own}}}"))).execute(&mut *c).await?;
            }
            let wait = u32::from(attempt >= AT_ONCE);
            // Where the table has rows they have changed places already.
            if !any(c, &self.tables, &format!("{{{own}}}")).await? {
                let exchange = format!("EXCHANGE PARTITION p{number:07} WITH TABLE {{{own}}}");
                if !alter(c, &self.tables, &exchange, wait).await? {
                    return Ok(false);
                }
            }
            // Nothing can have come into it since, as ids only grow; but what did would go with it.
            if any(c, &self.tables, &format!("{{message}} PARTITION (p{number:07})")).await? {
                return Err(Error::Schema(format!(
                    "messages came into partition p{number:07} of {} after it had been emptied; the partition stays, and so does {}",
                    self.tables.name("message"),
                    self.tables.name(&own),
                )));
            }
            alter(c, &self.tables, &format!("DROP PARTITION p{number:07}"), wait).await
        })
    }

    fn count(&self, number: i64) -> Reply<'_, i64> {
        let count = self.tables.sql(&format!("SELECT COUNT(*) FROM {{{}}} m WHERE {NOT_KEPT}", part(number)));
        on!(self.work, LONG.max(self.deadline), "counting a partition", |c| {
            Ok(int(&sqlx::query(count).fetch_one(&mut *c).await?, 0)?)
        })
    }

    fn discard(&self, number: i64) -> Reply<'_, i64> {
        on!(self.work, LONG.max(self.deadline), "dropping a partition", |c| {
            if !exists(c, &self.tables, &part(number)).await? {
                return Ok(0);
            }
            let (low, high) = range(number);
            let left = sqlx::query(self.tables.sql(&LEFT_OVER.replace("%LOG%", &part(number)))).bind(low).bind(high);
            let left = int(&left.fetch_one(&mut *c).await?, 0)?;
            if left == 0 {
                sqlx::raw_sql(self.tables.sql(&format!("DROP TABLE {{{}}}", part(number)))).execute(&mut *c).await?;
            }
            Ok(left)
        })
    }

    fn sizes(&self, shelf: Shelf, after: i64, upto: i64, limit: u32) -> Reply<'_, Vec<RowSize>> {
        let only = if shelf.part().is_some() { format!(" AND {NOT_KEPT}") } else { String::new() };
        let sizes =
            format!("SELECT m.id, {SIZE} FROM {{{}}} m WHERE m.id > ? AND m.id <= ?{only} ORDER BY m.id LIMIT ?", table(shelf));
        on!(self.work, LONG.max(self.deadline), "sizes of messages", |c| {
            let query = sqlx::query_as(self.tables.sql(&sizes)).bind(after).bind(upto).bind(limit);
            let rows: Vec<(i64, i64)> = query.fetch_all(&mut *c).await?;
            Ok(rows.into_iter().map(|(id, size)| RowSize { id, size }).collect())
        })
    }

    fn rows<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, Vec<LogRow>> {
        on!(self.work, LONG.max(self.deadline), "messages for the archive", |c| {
            if ids.is_empty() {
                return Ok(Vec::new());
            }
            let query = sqlx::query(self.tables.sql(&ROWS.replace("%SHELF%", &table(shelf)).replace("%IDS%", &list(ids))));
            let rows = query.fetch_all(&mut *c).await?;
            let message = |r: &MySqlRow| {
                Ok(LogRow {
                    id: int(r, 0)?,
                    message_id: text(r, 1)?,
                    kind: text(r, 2)?,
                    destination: text(r, 3)?,
                    key: text_or_null(r, 4)?,
                    payload: r.try_get(5)?,
                    content_type: text(r, 6)?,
                    headers: text_or_null(r, 7)?,
                    created_us: int(r, 8)?,
                    deliver_us: r.try_get(9)?,
                    max_attempts: r.try_get(10)?,
                })
            };
            Ok(rows.iter().map(message).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn boundary(&self, term: Duration) -> Reply<'_, Option<Boundary>> {
        const ENDS: &str = "SELECT MIN(id), MAX(id) FROM {message}";
        const AT: &str = "SELECT id, created_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND FROM {message} \
             WHERE id >= ? ORDER BY id LIMIT 1";
        on!(self.work, LONG.max(self.deadline), "age of the log", |c| {
            let ends: (Option<i64>, Option<i64>) = sqlx::query_as(self.tables.sql(ENDS)).fetch_one(&mut *c).await?;
            let (Some(lowest), Some(highest)) = ends else { return Ok(None) };
            let mut search = Bisection::new(lowest, highest);
            while let Some(at) = search.next() {
                let found: Option<(i64, i64)> =
                    sqlx::query_as(self.tables.sql(AT)).bind(micros(term)).bind(at).fetch_optional(&mut *c).await?;
                search.seen(at, found.map(|(id, old)| (id, old == 1)));
            }
            Ok(Some(search.boundary(highest, Some(PARTITION_SIZE))))
        })
    }

    fn old(&self, shelf: Shelf, after: i64, below: i64, term: Duration, limit: u32) -> Reply<'_, OldPage> {
        on!(self.work, LONG.max(self.deadline), "old messages", |c| {
            // One snapshot for both: a message that is seen here and isn't seen as pending is delivered, and stays so.
            sqlx::raw_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").execute(&mut *c).await?;
            let mut tx = c.begin_with("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY").await?;
            let page: Vec<(i64, i64, i64)> =
                sqlx::query_as(self.tables.sql(&OLD.replace("%SIZE%", SIZE).replace("%SHELF%", &table(shelf))))
                    .bind(micros(term))
                    .bind(after)
                    .bind(below)
                    .bind(limit)
                    .fetch_all(&mut *tx)
                    .await?;
            let ids: Vec<i64> = page.iter().map(|r| r.0).collect();
            let pending = pending(&mut tx, &self.tables, &ids).await?;
            tx.commit().await?;
            let rows = page.iter().filter(|r| r.2 == 1 && !pending.contains(&r.0)).map(|r| RowSize { id: r.0, size: r.1 });
            Ok(OldPage { rows: rows.collect(), last: page.last().map(|r| r.0) })
        })
    }

    fn remove<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, u64> {
        on!(self.work, LONG.max(self.deadline), "removing old messages", |c| {
            if ids.is_empty() {
                return Ok(0);
            }
            let mut tx = c.begin().await?;
            // A resize waits for this lock, as it does for publishers.
            let houses = self.tables.sql("SELECT houses FROM {meta} LOCK IN SHARE MODE");
            let houses: i32 = sqlx::query_scalar(houses).fetch_one(&mut *tx).await?;
            let query = sqlx::query(self.tables.sql(&REMOVE.replace("%SHELF%", &table(shelf)).replace("%IDS%", &list(ids))));
            let done = query.bind(houses).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(done.rows_affected())
        })
    }

    fn archives<'a>(&'a self, filter: &'a ArchiveFilter) -> Reply<'a, Vec<ArchiveRow>> {
        on!(self.work, self.deadline, "archives", |c| {
            let rows = sqlx::query(self.tables.sql(ARCHIVES))
                .bind(filter.before.unwrap_or(i64::MAX))
                .bind(filter.part)
                .bind(filter.part)
                .bind(filter.open)
                .bind(filter.limit)
                .fetch_all(&mut *c)
                .await?;
            let archive = |r: &MySqlRow| {
                Ok(ArchiveRow {
                    id: int(r, 0)?,
                    location: text(r, 1)?,
                    shelf: Shelf::parse(&text(r, 2)?, r.try_get(3)?),
                    low: int(r, 4)?,
                    high: int(r, 5)?,
                    amount: int(r, 6)?,
                    bytes: int(r, 7)?,
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
                .bind(file.location.as_bytes())
                .bind(file.shelf.as_str().as_bytes())
                .bind(file.shelf.part())
                .bind(file.low)
                .bind(file.high)
                .bind(file.amount)
                .bind(file.bytes)
                .bind(file.sha256.as_bytes())
                .bind(file.written_ms.is_some())
                .bind(file.removed_ms.is_some())
                .execute(&mut *c)
                .await?;
            Ok(())
        })
    }

    fn forget(&self, id: i64) -> Reply<'_, ()> {
        on!(self.work, self.deadline, "forgetting an archive", |c| {
            sqlx::query(self.tables.sql("DELETE FROM {archive} WHERE id = ?")).bind(id).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn expired<'a>(&'a self, what: Beside, term: Duration, after: &'a str, limit: u32) -> Reply<'a, Expired> {
        on!(self.work, LONG.max(self.deadline), "old rows", |c| {
            let (table, key, time) = place(what);
            // Plan: a range of the primary key.
            let page = |shown: &str, behind: &str| {
                self.tables.sql(&format!(
                    "SELECT {shown}, {time} < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND FROM {{{table}}} \
                      WHERE {key} > {behind} ORDER BY {key} LIMIT ?"
                ))
            };
            if what == Beside::Dedup {
                // Keys are bytes.
                let query = sqlx::query(page("HEX(dedup_key)", "UNHEX(?)")).bind(micros(term)).bind(after).bind(limit);
                let rows = query.fetch_all(&mut *c).await?;
                let mut out = Expired::default();
                for r in &rows {
                    let key = text(r, 0)?;
                    if rows.len() == limit as usize {
                        out.last = Some(key.clone());
                    }
                    if int(r, 1)? == 1 {
                        out.keys.push(key);
                    }
                }
                return Ok(out);
            }
            let shown = if what == Beside::Attempts { "id, row_id" } else { "id, 0" };
            let query = sqlx::query_as(page(shown, "?")).bind(micros(term)).bind(after.parse::<i64>().unwrap_or(0)).bind(limit);
            let rows: Vec<(i64, i64, i64)> = query.fetch_all(&mut *c).await?;
            // Looked at afterwards: a message that isn't pending then is delivered, and stays so.
            let stays = if what == Beside::Attempts {
                pending(c, &self.tables, &rows.iter().map(|r| r.1).collect::<Vec<_>>()).await?
            } else {
                HashSet::new()
            };
            let ids: Vec<(i64, bool)> = rows.iter().map(|r| (r.0, r.2 == 1)).collect();
            Ok(expired_ids(&ids, |n| stays.contains(&rows[n].1), limit))
        })
    }

    fn clear<'a>(&'a self, what: Beside, term: Duration, keys: &'a [String]) -> Reply<'a, u64> {
        on!(self.work, LONG.max(self.deadline), "removing old rows", |c| {
            let (table, key, time) = place(what);
            if keys.is_empty() {
                return Ok(0);
            }
            let listed = if what == Beside::Dedup {
                let hex = |key: &&String| !key.is_empty() && key.bytes().all(|b| b.is_ascii_hexdigit());
                keys.iter().filter(hex).map(|key| format!("x'{key}'")).collect::<Vec<_>>().join(", ")
            } else {
                list(&numbers(keys))
            };
            let query = sqlx::query(self.tables.sql(&format!(
                "DELETE FROM {{{table}}} WHERE {key} IN ({listed}) AND {time} < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND"
            )));
            Ok(query.bind(micros(term)).execute(&mut *c).await?.rows_affected())
        })
    }
}
