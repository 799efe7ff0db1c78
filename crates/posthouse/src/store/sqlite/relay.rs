//! Membership, reads and outcomes.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::sqlite::{SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous};
use sqlx::{Connection, Row, SqlStr, SqlitePool};

use super::now;
use crate::Error;
use crate::message::{Envelope, Headers, MessageId};
use crate::store::{
    Action, Ahead, AuditFilter, AuditRow, Backlog, Change, Coverage, Done, DuePage, Ends, Exactly, Examination, House, HousePoll,
    HouseRow, KeyHash, Listed, Live, Mark, Membership, MessageDetail, MessageFilter, MessageRow, ORPHAN_HOUSES, ORPHAN_ROWS,
    OverviewStore, PEOPLE_IDLE, Passed, Poll, Record, Reply, RetentionStore, RunStore, Setback, Store, Tables, Taken, Thin,
    Upkeep, Wanted, exactly, no_trigger, on, search,
};

/// The columns of a [`Thin`]. `before` is the nearest lower pending id of the key: an index-only probe of (house, key_hash, id).
macro_rules! thin {
    () => {
        "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
         CASE WHEN p.key_hash IS NOT NULL THEN (SELECT k.id FROM {pending} k INDEXED BY {-pending_key} WHERE k.house = p.house AND k.key_hash = p.key_hash AND k.id < p.id \
              ORDER BY k.id DESC LIMIT 1) END AS before, \
         p.due_at * 1000 AS due"
    };
}

/// In every read of the relay.
macro_rules! eligible {
    () => {
        concat!("p.status <> 'FAILED' AND (p.due_at IS NULL OR p.due_at <= ", now!(), ")")
    };
}

/// The columns of a row of the forward read: see [`Ahead`].
macro_rules! ahead {
    () => {
        concat!(
            "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
             CASE WHEN ",
            eligible!(),
            " THEN 1 ELSE 0 END AS before, p.due_at * 1000 AS due"
        )
    };
}

/// Leaves out the destinations in parameter 3, a JSON array.
macro_rules! not_excluded {
    () => {
        " AND p.destination NOT IN (SELECT value FROM json_each(?3))"
    };
}

// INDEXED BY: without statistics SQLite prefers the primary key, and would walk the whole pending set for each key.
// There is one house, so a statement is about one house; callers with more marks run it once for each.

// Plan: a lookup at the end of a range, one at the start of the due index, and one range scan of the primary key.
const POLL: &str = concat!(
    "SELECT ?1 AS house, coalesce((SELECT max(p.id) FROM {pending} p WHERE p.house = ?1 AND p.id > ?2), ?2) AS id, NULL AS destination, \
            NULL AS key_hash, 0 AS size, 0 AS attempts, 0 AS claims, 0 AS version, NULL AS max_attempts, \
            (SELECT changes FROM {meta}) AS before, \
            (SELECT (p.due_at - ",
    now!(),
    ") * 1000 FROM {pending} p WHERE p.house = ?1 AND p.due_at < 253370764800000 ORDER BY p.due_at LIMIT 1) AS due \
     UNION ALL SELECT * FROM (SELECT ",
    ahead!(),
    " FROM {pending} p WHERE p.house = ?1 AND p.id > ?2 AND (p.key_hash IS NOT NULL OR ",
    eligible!(),
    ")",
    not_excluded!(),
    " ORDER BY p.id LIMIT ?4)"
);

// Plan: per key one lookup in (house, key_hash, id).
const BEFORE: &str = "SELECT d.value->>0, (SELECT k.id FROM {pending} k INDEXED BY {-pending_key} WHERE k.house = d.value->>1 \
     AND k.key_hash = d.value->>2 AND k.id < d.value->>0 ORDER BY k.id DESC LIMIT 1) FROM json_each(?1) d";

// Plan: one range scan of the primary key; an anti-join probe of (house, key_hash, id) for keyed rows.
const SWEEP: &str = concat!(
    "SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = ?1 AND p.id > ?2 AND p.id <= ?5 AND ",
    eligible!(),
    not_excluded!(),
    " AND (p.key_hash IS NULL OR NOT EXISTS (SELECT 1 FROM {pending} k INDEXED BY {-pending_key} WHERE k.house = p.house AND k.key_hash = p.key_hash AND k.id < p.id)) \
      ORDER BY p.id LIMIT ?4"
);

// Plan: one range scan of the partial index (house, due_at, id).
const DUE: &str = concat!(
    "SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = ?1 AND p.due_at IS NOT NULL AND p.due_at <= ",
    now!(),
    " AND (p.due_at, p.id) > (?2, ?5) AND p.status <> 'FAILED'",
    not_excluded!(),
    " ORDER BY p.due_at, p.id LIMIT ?4"
);

const NEXT_DUE: &str = concat!(
    "SELECT (p.due_at - ",
    now!(),
    ") * 1000 FROM {pending} p WHERE p.house = ?1 AND p.due_at > ",
    now!(),
    " AND p.due_at < 253370764800000 ORDER BY p.due_at LIMIT 1"
);

// Plan: one range scan of (house, key_hash, id).
const OF_KEY: &str = concat!(
    "SELECT ",
    ahead!(),
    ", (SELECT changes FROM {meta}) AS changes \
       FROM {pending} p INDEXED BY {-pending_key} WHERE p.house = ?1 AND p.key_hash = ?2 AND p.id > ?4 ORDER BY p.id LIMIT ?3"
);

// Plan: one range scan of the primary key, filtered.
const OF_DESTINATION: &str = concat!(
    "SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = ?1 AND p.id > ?2 AND ",
    eligible!(),
    " AND p.destination = ?3 ORDER BY p.id LIMIT ?4"
);

// Plan: one lookup of the primary key per id.
const LOAD: &str = "SELECT l.id, l.message_id, l.type, l.destination, l.message_key, l.payload, l.content_type, l.headers, l.created_at \
     FROM json_each(?1) d CROSS JOIN {message} l ON l.id = d.value";

/// The (house, id, version) of a batch: a JSON array of arrays in parameter 1.
macro_rules! batch {
    () => {
        "(SELECT value->>0, value->>1, value->>2 FROM json_each(?1))"
    };
}

// Plan: one lookup of the primary key per row.
const DELIVERED: &str =
    concat!("DELETE FROM {pending} WHERE (house, id, version) IN ", batch!(), " RETURNING house, id, version");

const RECEIPT: &str = "INSERT INTO {receipt} (house, instance, low, ids, versions) VALUES (?, ?, ?, ?, ?)";

const SETBACK: &str = concat!(
    "UPDATE {pending} AS p SET status = CASE WHEN s.wait IS NULL THEN 'FAILED' ELSE 'PENDING' END, attempts = s.attempts, claims = s.claims, \
        due_at = CASE WHEN s.wait IS NULL THEN 253402214400000 ELSE ",
    now!(),
    " + s.wait END, key_hash = CASE WHEN s.leave_key THEN NULL ELSE p.key_hash END, owner = NULL, version = p.version + 1, \
        last_error = s.error, updated_at = ",
    now!(),
    " FROM (SELECT value->>0 AS house, value->>1 AS id, value->>2 AS version, value->>3 AS attempts, value->>4 AS claims, value->>5 AS wait, \
                value->>6 AS leave_key, value->>7 AS error FROM json_each(?1)) s \
     WHERE p.house = s.house AND p.id = s.id AND p.version = s.version RETURNING id"
);

const ATTEMPTS: &str = "INSERT INTO {attempt} (row_id, attempt, instance, outcome, error, response, took_ms) \
     SELECT value->>0, value->>1, ?2, value->>2, value->>3, value->>4, value->>5 FROM json_each(?1)";

const CLAIM: &str = concat!(
    "UPDATE {pending} SET status = 'SENDING', claims = claims + 1, version = version + 1, owner = ?2, due_at = ",
    now!(),
    " + ?3, updated_at = ",
    now!(),
    " WHERE (house, id, version) IN ",
    batch!(),
    " RETURNING id"
);

// A lease that ran out is never renewed.
const RENEW: &str =
    concat!("UPDATE {instance} SET lease_until = ", now!(), " + ?2 WHERE instance = ?1 AND lease_until > ", now!());

const MEMBERS: &str = concat!(
    "SELECT h.house, h.owner AS name, h.epoch AS number, NULL AS takes, NULL AS for_runs FROM {house} h \
     UNION ALL SELECT NULL, i.instance, i.lease_until - ",
    now!(),
    ", i.houses, i.run_houses FROM {instance} i WHERE i.lease_until > ",
    now!()
);

const FREE: &str = concat!(
    "SELECT f.house, f.epoch + 1, f.owner IS NOT NULL FROM {house} f \
     WHERE f.house IN (SELECT value FROM json_each(?3)) AND (f.owner IS NULL OR NOT EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = f.owner AND i.lease_until > ",
    now!(),
    ")) AND EXISTS (SELECT 1 FROM {instance} me WHERE me.instance = ?1 AND me.lease_until > ",
    now!(),
    ") ORDER BY f.house LIMIT ?2"
);

// Whether the asking instance lives, and who owns the houses that it wants.
const WANTED: &str = concat!(
    "SELECT h.house, h.owner, h.epoch, EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = h.owner AND i.lease_until > ",
    now!(),
    "), EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = ?1 AND i.lease_until > ",
    now!(),
    ") FROM {house} h WHERE h.house IN (SELECT value FROM json_each(?2)) ORDER BY h.house"
);

const TAKE_ALL: &str = concat!(
    "UPDATE {house} SET owner = ?1, epoch = epoch + 1, taken_at = ",
    now!(),
    " WHERE house IN (SELECT value FROM json_each(?2))"
);

// Plan: per house one lookup at the end of a range of the primary key.
const ENDS: &str = concat!(
    "SELECT h.value, coalesce((SELECT max(p.id) FROM {pending} p WHERE p.house = h.value), 0), ",
    now!(),
    " * 1000 FROM json_each(?1) h"
);

// Plan: one lookup at the start of a range of the primary key, and one range scan that ends at the limit.
const FIRST_HOUSE: &str = "SELECT house FROM {pending} WHERE house >= ?1 AND house <= ?2 ORDER BY house LIMIT 1";
const COUNT_HOUSE: &str = "SELECT count(*) FROM (SELECT 1 FROM {pending} WHERE house = ?1 LIMIT ?2)";

/// SQLite as a relay sees it, on connections of its own: one reserved for the lease, three for work.
#[derive(Debug)]
pub(crate) struct SqliteStore {
    lease: SqlitePool,
    pub(super) work: SqlitePool,
    pub(super) tables: Tables,
    pub(super) deadline: Duration,
    sql: Statements,
    passed: Passed,
}

#[derive(Debug)]
struct Statements {
    poll: SqlStr,
    before: SqlStr,
    sweep: SqlStr,
    due: SqlStr,
    next_due: SqlStr,
    of_key: SqlStr,
    of_destination: SqlStr,
    load: SqlStr,
    delivered: SqlStr,
    receipt: SqlStr,
    setback: SqlStr,
    attempts: SqlStr,
    claim: SqlStr,
    renew: SqlStr,
    members: SqlStr,
    free: SqlStr,
}

/// Rows that may lie between a connection's thread and its reader: as many as a forward read brings by default.
const ROWS_BUFFERED: usize = 2_000;

/// Connections for reads and outcomes: forward read or sweep, load, outcome.
const WORK_CONNECTIONS: u32 = 3;

/// How long a write waits for another one.
const BUSY: Duration = Duration::from_secs(5);

impl SqliteStore {
    pub(crate) fn new(pool: &SqlitePool, tables: &Tables, deadline: Duration, people: Option<u32>) -> Self {
        let options = (*pool.connect_options())
            .clone()
            .create_if_missing(false)
            .journal_mode(SqliteJournalMode::Wal)
            // With less, a power cut could take back what was acknowledged: an outcome, or the epoch of a house.
            .synchronous(SqliteSynchronous::Full)
            // Rows come from a thread of their own through a channel; a short one would switch threads every few rows.
            .row_buffer_size(ROWS_BUFFERED)
            .busy_timeout(BUSY);
        let own = |n| {
            SqlitePoolOptions::new()
                .max_connections(n)
                .acquire_timeout(deadline)
                .test_before_acquire(false)
                .idle_timeout(people.map(|_| PEOPLE_IDLE))
                .connect_lazy_with(options.clone())
        };
        let sql = |template| tables.sql(template);
        Self {
            lease: own(1),
            work: own(people.unwrap_or(WORK_CONNECTIONS)),
            tables: tables.clone(),
            deadline,
            sql: Statements {
                poll: sql(POLL),
                before: sql(BEFORE),
                sweep: sql(SWEEP),
                due: sql(DUE),
                next_due: sql(NEXT_DUE),
                of_key: sql(OF_KEY),
                of_destination: sql(OF_DESTINATION),
                load: sql(LOAD),
                delivered: sql(DELIVERED),
                receipt: sql(RECEIPT),
                setback: sql(SETBACK),
                attempts: sql(ATTEMPTS),
                claim: sql(CLAIM),
                renew: sql(RENEW),
                members: sql(MEMBERS),
                free: sql(FREE),
            },
            passed: Passed::default(),
        }
    }
}

pub(super) fn millis(d: Duration) -> i64 {
    i64::try_from(d.as_millis()).unwrap_or(i64::MAX)
}

/// Milliseconds, rounded up: nothing is tried before its time.
fn millis_up(d: Duration) -> i64 {
    i64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

/// Text as it is stored; what isn't UTF-8 in it becomes U+FFFD, so that one bad row doesn't stop the reading of all.
pub(super) fn text(row: &SqliteRow, column: usize) -> Result<String, sqlx::Error> {
    Ok(text_or_null(row, column)?.unwrap_or_default())
}

pub(super) fn text_or_null(row: &SqliteRow, column: usize) -> Result<Option<String>, sqlx::Error> {
    Ok(bytes(row, column)?.map(|b| match String::from_utf8(b) {
        Ok(text) => text,
        Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
    }))
}

/// The bytes of text or of a blob.
pub(super) fn bytes(row: &SqliteRow, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
    row.try_get_unchecked(column)
}

fn count(row: &SqliteRow, column: usize) -> Result<u32, sqlx::Error> {
    Ok(u32::try_from(row.try_get::<i64, _>(column)?).unwrap_or(0))
}

fn thin(row: &SqliteRow) -> Result<Thin, sqlx::Error> {
    Ok(Thin {
        house: House(row.try_get(0)?),
        id: row.try_get(1)?,
        destination: text(row, 2)?,
        key: text_or_null(row, 3)?.map(|k| KeyHash::text(&k)),
        size: count(row, 4)?,
        attempts: count(row, 5)?,
        claims: count(row, 6)?,
        version: row.try_get(7)?,
        max_attempts: row.try_get::<Option<i32>, _>(8)?.map(|n| n.max(1) as u32),
        before: row.try_get(9)?,
        due: row.try_get(10)?,
    })
}

fn thins(rows: &[SqliteRow]) -> Result<Vec<Thin>, Error> {
    Ok(rows.iter().map(thin).collect::<Result<_, _>>()?)
}

pub(super) fn json(value: &(impl serde::Serialize + ?Sized)) -> Result<String, Error> {
    Ok(serde_json::to_string(value)?)
}

fn batch(rows: &[Done]) -> Result<String, Error> {
    json(&rows.iter().map(|d| (d.house.0, d.id, d.version)).collect::<Vec<_>>())
}

/// The place of a cursor (microseconds, id) in milliseconds.
fn cursor((due, id): (i64, i64)) -> (i64, i64) {
    // Between two milliseconds, all rows of the lower one have been passed.
    (due.div_euclid(1_000), if due.rem_euclid(1_000) == 0 { id } else { i64::MAX })
}

/// A row of the log as an envelope; the attempt is filled in by the relay, and so is an edited destination.
fn envelope(row: &SqliteRow) -> Result<(i64, Result<Envelope, String>), sqlx::Error> {
    let id = row.try_get(0)?;
    let (message_id, kind, destination, key) = (bytes(row, 1)?, bytes(row, 2)?, bytes(row, 3)?, bytes(row, 4)?);
    let (payload, content_type, headers) = (bytes(row, 5)?.unwrap_or_default(), bytes(row, 6)?, bytes(row, 7)?);
    let created: i64 = row.try_get(8)?;
    let utf8 = |column: &str, value: Option<Vec<u8>>| {
        value.map(String::from_utf8).transpose().map_err(|_| format!("{column} of this message is not UTF-8"))
    };
    let decode = || {
        let headers = match utf8("headers", headers)?.as_deref().map(Headers::from_json) {
            None => Headers::new(),
            Some(Ok(h)) => h,
            Some(Err(e)) => return Err(format!("headers of this message are not a JSON object: {e}")),
        };
        Ok(Envelope {
            id,
            message_id: MessageId::from(utf8("message_id", message_id)?.unwrap_or_default()),
            kind: utf8("type", kind)?.unwrap_or_default(),
            destination: utf8("destination", destination)?.unwrap_or_default(),
            key: utf8("message_key", key)?,
            payload,
            content_type: utf8("content_type", content_type)?.unwrap_or_default(),
            headers,
            created_at: std::time::UNIX_EPOCH + Duration::from_millis(created.max(0) as u64),
            attempt: 1,
        })
    };
    Ok((id, decode()))
}

/// What keeps messages from being sent.
pub(super) async fn problems(conn: &mut sqlx::SqliteConnection, tables: &Tables) -> Result<Vec<String>, Error> {
    let trigger: bool =
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE type = 'trigger' AND name = ? AND tbl_name = ?)")
            .bind(tables.text("{=enqueue}"))
            .bind(tables.text("{=message}"))
            .fetch_one(conn)
            .await?;
    Ok(if trigger { Vec::new() } else { vec![no_trigger(tables, "is missing")] })
}

impl Store for SqliteStore {
    fn kind(&self) -> &'static str {
        "sqlite"
    }

    fn connections(&self) -> u32 {
        1 + self.work.options().get_max_connections()
    }

    fn check(&self) -> Reply<'_, (i32, u16)> {
        on!(self.work, self.deadline, "schema check", |c| {
            if super::migrate::in_memory(c).await? {
                return Err(Error::Config(
                    "this SQLite database is in memory, which the relay's connections can't share with yours; use a file".into(),
                ));
            }
            match super::migrate::version(c, &self.tables).await? {
                None => Err(Error::Schema(format!(
                    "{} is missing; run `posthouse migrate`, or call posthouse::migrate",
                    self.tables.name("meta")
                ))),
                Some(v) => {
                    let houses: i32 = sqlx::query_scalar(self.tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *c).await?;
                    Ok((v, houses as u16))
                }
            }
        })
    }

    fn join<'a>(&'a self, instance: &'a str, coverage: &'a Coverage, lease: Duration) -> Reply<'a, ()> {
        let sql = self.tables.sql(concat!(
            "INSERT INTO {instance} (instance, lease_until, houses, run_houses) VALUES (?, ",
            now!(),
            " + ?, ?, ?)"
        ));
        on!(self.lease, self.deadline, "join", |c| {
            let (takes, for_runs) = coverage.columns();
            sqlx::query(sql).bind(instance).bind(millis(lease)).bind(takes).bind(for_runs).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn renew<'a>(&'a self, instance: &'a str, lease: Duration) -> Reply<'a, Option<Membership>> {
        on!(self.lease, self.deadline, "lease renewal", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let renewed = sqlx::query(self.sql.renew.clone()).bind(instance).bind(millis(lease)).execute(&mut *tx).await?;
            if renewed.rows_affected() == 0 {
                tx.rollback().await?;
                return Ok(None);
            }
            let mut out = Membership::default();
            for row in &sqlx::query(self.sql.members.clone()).fetch_all(&mut *tx).await? {
                match row.try_get::<Option<i32>, _>(0)? {
                    Some(house) => out.houses.push((House(house), text_or_null(row, 1)?, row.try_get(2)?)),
                    None => out.live.push(Live {
                        name: text(row, 1)?,
                        left: Duration::from_millis(row.try_get::<i64, _>(2)?.max(0) as u64),
                        coverage: Coverage::of_columns(text_or_null(row, 3)?.as_deref(), text_or_null(row, 4)?.as_deref()),
                    }),
                }
            }
            tx.commit().await?;
            out.houses.sort_unstable_by_key(|h| h.0);
            Ok(Some(out))
        })
    }

    fn take<'a>(&'a self, instance: &'a str, among: &'a [House], most: usize) -> Reply<'a, Vec<Taken>> {
        on!(self.lease, self.deadline, "taking houses", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let free = sqlx::query(self.sql.free.clone()).bind(instance).bind(most as i64).bind(json(among)?);
            let rows = free.fetch_all(&mut *tx).await?;
            let taken = |r: &SqliteRow| Ok(Taken { house: House(r.try_get(0)?), epoch: r.try_get(1)?, expired: r.try_get(2)? });
            let taken = rows.iter().map(taken).collect::<Result<Vec<_>, sqlx::Error>>()?;
            if !taken.is_empty() {
                let houses: Vec<House> = taken.iter().map(|t| t.house).collect();
                sqlx::query(self.tables.sql(TAKE_ALL)).bind(instance).bind(json(&houses)?).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(taken)
        })
    }

    fn take_exactly<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, Exactly> {
        on!(self.lease, self.deadline, "taking houses for a run", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let found: Vec<Wanted> =
                sqlx::query_as(self.tables.sql(WANTED)).bind(instance).bind(json(houses)?).fetch_all(&mut *tx).await?;
            let answer = exactly(instance, houses, found);
            if let Exactly::Taken(_) = &answer {
                sqlx::query(self.tables.sql(TAKE_ALL)).bind(instance).bind(json(houses)?).execute(&mut *tx).await?;
                tx.commit().await?;
            } else {
                tx.rollback().await?;
            }
            Ok(answer)
        })
    }

    fn release<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, ()> {
        let sql =
            self.tables.sql("UPDATE {house} SET owner = NULL WHERE owner = ?1 AND house IN (SELECT value FROM json_each(?2))");
        on!(self.lease, self.deadline, "releasing houses", |c| {
            sqlx::query(sql).bind(instance).bind(json(houses)?).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a self, instance: &'a str) -> Reply<'a, ()> {
        on!(self.lease, self.deadline, "leaving", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            for sql in ["UPDATE {house} SET owner = NULL WHERE owner = ?", "DELETE FROM {instance} WHERE instance = ?"] {
                sqlx::query(self.tables.sql(sql)).bind(instance).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(())
        })
    }

    fn ends<'a>(&'a self, houses: &'a [House]) -> Reply<'a, Ends> {
        on!(self.work, self.deadline, "start of a run", |c| {
            let rows: Vec<(i32, i64, i64)> = sqlx::query_as(self.tables.sql(ENDS)).bind(json(houses)?).fetch_all(&mut *c).await?;
            let now = rows.first().map_or(0, |row| row.2);
            Ok(Ends { now, houses: rows.into_iter().map(|row| (House(row.0), row.1)).collect() })
        })
    }

    fn rows_in<'a>(&'a self, ranges: &'a [(i32, i32)]) -> Reply<'a, Vec<(House, u64)>> {
        on!(self.work, self.deadline, "search for orphaned messages", |c| {
            let mut out = Vec::new();
            for (low, high) in ranges {
                let mut next = Some(*low);
                while let Some(from) = next.filter(|from| from <= high && out.len() < ORPHAN_HOUSES) {
                    let first = sqlx::query_scalar(self.tables.sql(FIRST_HOUSE)).bind(from).bind(high);
                    let Some(house) = first.fetch_optional(&mut *c).await? else { break };
                    let count = sqlx::query_scalar(self.tables.sql(COUNT_HOUSE)).bind(house).bind(ORPHAN_ROWS as i64);
                    let rows: i64 = count.fetch_one(&mut *c).await?;
                    out.push((House(house), rows as u64));
                    next = house.checked_add(1);
                }
            }
            Ok(out)
        })
    }

    fn passed(&self) -> &Passed {
        &self.passed
    }

    fn overview(&self) -> &dyn OverviewStore {
        self
    }

    fn runs(&self) -> &dyn RunStore {
        self
    }

    fn retention(&self) -> &dyn RetentionStore {
        self
    }

    fn poll<'a>(&'a self, marks: &'a [Mark], limit: u32, excluded: &'a [String]) -> Reply<'a, Poll> {
        on!(self.work, self.deadline, "forward read", |c| {
            let gaps = !excluded.is_empty();
            let excluded = json(excluded)?;
            let mut out = Poll::default();
            let mut ahead = Ahead::default();
            for m in marks {
                let query = sqlx::query(self.sql.poll.clone()).bind(m.house.0).bind(m.after).bind(&excluded).bind(limit);
                for row in &query.fetch_all(&mut *c).await? {
                    if bytes(row, 2)?.is_some() {
                        ahead.push(thin(row)?);
                    } else {
                        out.changes = row.try_get(9)?;
                        let (max_id, next_due) = (row.try_get(1)?, row.try_get(10)?);
                        out.houses.push(HousePoll { house: m.house, max_id, cut_off: None, next_due });
                    }
                }
            }
            let mut first = ahead.link(gaps);
            if !first.is_empty() {
                let keys: Vec<_> =
                    first.iter().map(|t| (t.id, t.house.0, t.key.as_ref().and_then(|k| k.text.as_deref()))).collect();
                let rows = sqlx::query_as(self.sql.before.clone()).bind(json(&keys)?).fetch_all(&mut *c).await?;
                let before: HashMap<i64, Option<i64>> = rows.into_iter().collect();
                for thin in &mut first {
                    thin.before = before.get(&thin.id).copied().flatten();
                }
            }
            out.rows = ahead.finish(limit, &mut out.houses);
            Ok(out)
        })
    }

    fn sweep<'a>(&'a self, marks: &'a [Mark], limit: u32, excluded: &'a [String]) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "sweep", |c| {
            let excluded = json(excluded)?;
            let mut rows = Vec::new();
            for m in marks {
                let query =
                    sqlx::query(self.sql.sweep.clone()).bind(m.house.0).bind(m.after).bind(&excluded).bind(limit).bind(m.upto);
                rows.extend(query.fetch_all(&mut *c).await?);
            }
            thins(&rows)
        })
    }

    fn due<'a>(&'a self, houses: &'a [House], after: (i64, i64), limit: u32, excluded: &'a [String]) -> Reply<'a, DuePage> {
        on!(self.work, self.deadline, "due read", |c| {
            let excluded = json(excluded)?;
            let (at, id) = cursor(after);
            let mut page = DuePage::default();
            for h in houses {
                let query = sqlx::query(self.sql.due.clone()).bind(h.0).bind(at).bind(&excluded).bind(limit).bind(id);
                for row in &query.fetch_all(&mut *c).await? {
                    page.rows.push(thin(row)?);
                }
                let next: Option<i64> = sqlx::query_scalar(self.sql.next_due.clone()).bind(h.0).fetch_optional(&mut *c).await?;
                page.next_due = next.into_iter().chain(page.next_due).min();
            }
            page.rows.sort_by_key(|t| (t.due, t.id));
            page.rows.truncate(limit as usize);
            Ok(page)
        })
    }

    fn of_keys<'a>(&'a self, keys: &'a [(House, KeyHash)], limit: u32) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "key read", |c| {
            let mut ahead = Ahead::default();
            for key in keys {
                let mut passed = self.passed.after(key, i64::MAX);
                let rows = loop {
                    let query = sqlx::query(self.sql.of_key.clone()).bind(key.0.0).bind(key.1.text.as_deref());
                    let rows = query.bind(limit).bind(passed).fetch_all(&mut *c).await?;
                    let changes = rows.first().map(|row| row.try_get(11)).transpose()?;
                    if passed == 0 || changes.is_none_or(|n| self.passed.counts(n)) {
                        break rows;
                    }
                    // An operator may have put a row back.
                    passed = 0;
                };
                for row in &rows {
                    ahead.push(thin(row)?);
                }
            }
            Ok(ahead.of_keys())
        })
    }

    fn of_destination<'a>(&'a self, marks: &'a [Mark], destination: &'a str, limit: u32) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "destination read", |c| {
            let mut rows = Vec::new();
            for m in marks {
                let query =
                    sqlx::query(self.sql.of_destination.clone()).bind(m.house.0).bind(m.after).bind(destination).bind(limit);
                rows.extend(query.fetch_all(&mut *c).await?);
            }
            thins(&rows)
        })
    }

    fn load<'a>(&'a self, ids: &'a [i64]) -> Reply<'a, Vec<(i64, Result<Envelope, String>)>> {
        on!(self.work, self.deadline, "load", |c| {
            let rows = sqlx::query(self.sql.load.clone()).bind(json(ids)?).fetch_all(&mut *c).await?;
            Ok(rows.iter().map(envelope).collect::<Result<_, _>>()?)
        })
    }

    fn changes<'a>(&'a self, since: i64) -> Reply<'a, Vec<Change>> {
        let sql = self.tables.sql("SELECT house, row_id, key_hash FROM {audit} WHERE change > ?");
        on!(self.work, self.deadline, "change read", |c| {
            let rows = sqlx::query(sql).bind(since).fetch_all(&mut *c).await?;
            let change = |r: &SqliteRow| {
                Ok(Change { house: House(r.try_get(0)?), id: r.try_get(1)?, key: text_or_null(r, 2)?.map(|k| KeyHash::text(&k)) })
            };
            Ok(rows.iter().map(change).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn delivered<'a>(&'a self, instance: &'a str, done: &'a [Done]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "completion", |c| {
            let list = batch(done)?;
            let mut tx = c.begin_with(super::WRITE).await?;
            let rows = sqlx::query(self.sql.delivered.clone()).bind(list).fetch_all(&mut *tx).await?;
            let gone = |r: &SqliteRow| Ok((r.try_get(0)?, r.try_get(1)?, r.try_get(2)?));
            let mut gone = rows.iter().map(gone).collect::<Result<Vec<(i32, i64, i32)>, sqlx::Error>>()?;
            gone.sort_unstable();
            for of_house in gone.chunk_by(|a, b| a.0 == b.0) {
                sqlx::query(self.sql.receipt.clone())
                    .bind(of_house[0].0)
                    .bind(instance)
                    .bind(of_house[0].1)
                    .bind(json(&of_house.iter().map(|d| d.1).collect::<Vec<_>>())?)
                    .bind(json(&of_house.iter().map(|d| d.2).collect::<Vec<_>>())?)
                    .execute(&mut *tx)
                    .await?;
            }
            tx.commit().await?;
            Ok(gone.into_iter().map(|d| d.1).collect())
        })
    }

    fn setback<'a>(&'a self, instance: &'a str, setbacks: &'a [Setback]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "recording failures", |c| {
            let changes: Vec<_> = setbacks
                .iter()
                .map(|s| {
                    let (wait, leave) = (s.wait.map(millis_up), i32::from(s.leave_key));
                    (s.row.house.0, s.row.id, s.row.version, s.attempts, s.claims, wait, leave, &s.error)
                })
                .collect();
            let mut tx = c.begin_with(super::WRITE).await?;
            let changed: Vec<i64> =
                sqlx::query_scalar(self.sql.setback.clone()).bind(json(&changes)?).fetch_all(&mut *tx).await?;
            let by_id: HashMap<i64, &Setback> = setbacks.iter().map(|s| (s.row.id, s)).collect();
            let attempts: Vec<_> = changed
                .iter()
                .filter_map(|id| by_id.get(id))
                .filter_map(|s| s.attempt.as_ref().map(|a| (s, a)))
                .map(|(s, a)| (s.row.id, s.attempts, a.outcome, &s.error, &a.response, millis(a.took)))
                .collect();
            if !attempts.is_empty() {
                sqlx::query(self.sql.attempts.clone()).bind(json(&attempts)?).bind(instance).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(changed)
        })
    }

    fn claim<'a>(&'a self, instance: &'a str, rows: &'a [Done], lease: Duration) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "claim", |c| {
            let list = batch(rows)?;
            let mut tx = c.begin_with(super::WRITE).await?;
            let claimed = sqlx::query_scalar(self.sql.claim.clone())
                .bind(list)
                .bind(instance)
                .bind(millis_up(lease))
                .fetch_all(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(claimed)
        })
    }

    fn upkeep(&self) -> Reply<'_, Upkeep> {
        on!(self.work, self.deadline, "upkeep", |c| {
            // An instance's row is only needed while its houses may still name it.
            sqlx::query(self.tables.sql(concat!(
                "DELETE FROM {instance} WHERE lease_until < ",
                now!(),
                " - 86400000 AND NOT EXISTS (SELECT 1 FROM {house} h WHERE h.owner = instance)"
            )))
            .execute(&mut *c)
            .await?;
            let problems = problems(c, &self.tables).await?;
            Ok(Upkeep { created: 0, ahead: None, problems })
        })
    }

    fn list<'a>(&'a self, filter: &'a MessageFilter) -> Reply<'a, Listed<MessageRow>> {
        on!(self.work, self.deadline, "message list", |c| { search(&mut super::admin::Steps(c, &self.tables), filter).await })
    }

    fn show(&self, id: i64) -> Reply<'_, Option<MessageDetail>> {
        on!(self.work, self.deadline, "message", |c| { super::admin::show(c, &self.tables, id).await })
    }

    fn act<'a>(&'a self, ids: &'a [i64], action: &'a Action, actor: &'a str) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "operator action", |c| { super::admin::act(c, &self.tables, ids, action, actor).await })
    }

    fn backlog(&self) -> Reply<'_, Vec<Backlog>> {
        on!(self.work, self.deadline, "backlog", |c| { super::admin::backlog(c, &self.tables).await })
    }

    fn duty<'a>(&'a self, duty: &'a str, owner: &'a str, lease: Duration) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "taking a duty", |c| { super::duty::take(c, &self.tables, duty, owner, lease).await })
    }

    fn lay_down<'a>(&'a self, duty: &'a str, owner: &'a str) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "laying down a duty", |c| { super::duty::lay_down(c, &self.tables, duty, owner).await })
    }

    fn examine(&self) -> Reply<'_, Examination> {
        on!(self.work, self.deadline, "examination", |c| { super::examine::examine(c, &self.tables).await })
    }

    fn record<'a>(&'a self, record: &'a Record<'a>) -> Reply<'a, ()> {
        on!(self.work, self.deadline, "audit", |c| { super::audit::record(c, &self.tables, record).await })
    }

    fn audits<'a>(&'a self, filter: &'a AuditFilter) -> Reply<'a, Listed<AuditRow>> {
        on!(self.work, self.deadline, "audit log", |c| { super::audit::list(c, &self.tables, filter).await })
    }

    fn houses(&self) -> Reply<'_, Vec<HouseRow>> {
        on!(self.work, self.deadline, "houses", |c| { super::admin::houses(c, &self.tables).await })
    }

    fn resize(&self, houses: u16) -> Reply<'_, u64> {
        let strays = self.tables.sql("UPDATE {pending} SET house = 0, version = version + 1 WHERE house <> 0");
        let count = self.tables.sql("SELECT count(*) FROM {pending}");
        on!(self.work, self.deadline, "resizing houses", |c| {
            if houses != 1 {
                return Err(Error::Config(format!(
                    "houses {houses}: SQLite has one house, because one process at a time can write to its file, so sharing out the \
                     work would not make it faster"
                )));
            }
            sqlx::query(strays).execute(&mut *c).await?;
            let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut *c).await?;
            Ok(rows as u64)
        })
    }

    fn listen<'a>(&'a self, _heard: &'a (dyn Fn() + Send + Sync)) -> Reply<'a, ()> {
        Box::pin(std::future::pending())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_between_two_milliseconds_has_passed_the_lower_one() {
        assert_eq!(cursor((5_000, 7)), (5, 7));
        assert_eq!(cursor((5_001, 7)), (5, i64::MAX));
        assert_eq!(cursor((-1, 7)), (-1, i64::MAX));
    }
}
