//! Membership, reads and outcomes.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::mysql::{MySqlArguments, MySqlPoolOptions, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection, Executor, MySql, MySqlConnection, MySqlPool, Row, SqlSafeStr, SqlStr};

use crate::Error;
use crate::message::{Envelope, Headers, MessageId};
use crate::store::{
    Action, Ahead, AuditFilter, AuditRow, Backlog, Change, Coverage, Done, DuePage, Ends, Exactly, Examination, House, HousePoll,
    HouseRow, KeyHash, Listed, Live, Mark, Membership, MessageDetail, MessageFilter, MessageRow, ORPHAN_HOUSES, ORPHAN_ROWS,
    OverviewStore, PEOPLE_IDLE, Passed, Poll, Record, Reply, RetentionStore, RunStore, Setback, Store, Tables, Taken, Thin,
    Upkeep, exactly, on, search,
};

/// The columns of a [`Thin`]. Whether a row is its key's lowest is an index lookup; only for others `before` is asked, which
/// may read a later snapshot than the statement: it then misses rows that are delivered by now, and sees lower ones that came
/// later, so that what it answers is never less than what the statement's own snapshot would have.
macro_rules! thin {
    () => {
        "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
         CASE WHEN p.key_hash IS NULL OR p.id = (SELECT k.id FROM {pending} k FORCE INDEX (pending_key) \
              WHERE k.house = p.house AND k.key_hash = p.key_hash ORDER BY k.id LIMIT 1) \
              THEN NULL ELSE {before}(p.house, p.key_hash, 0, p.id) END AS before_id, \
         TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.due_at) AS due"
    };
}

/// In every read of the relay.
macro_rules! eligible {
    () => {
        "p.status <> 'FAILED' AND (p.due_at IS NULL OR p.due_at <= UTC_TIMESTAMP(6))"
    };
}

/// The columns of a row of the forward read: see [`Ahead`].
macro_rules! ahead {
    () => {
        concat!(
            "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
             CASE WHEN ",
            eligible!(),
            " THEN 1 ELSE 0 END AS before_id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.due_at) AS due"
        )
    };
}

// MariaDB has no LATERAL, and a join with a list of houses would use only the first column of the index. So each house has an
// arm of its own, with constants, joined by UNION ALL. %EXCLUDED% becomes a list of destinations.

// Plan: two lookups at the ends of index ranges ("Select tables optimized away").
const PEEK_ARM: &str = "(SELECT CAST(? AS SIGNED) AS house, MAX(p.id) AS id, NULL AS due FROM {pending} p WHERE p.house = ? AND p.id > ?) \
     UNION ALL (SELECT CAST(? AS SIGNED), NULL, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(p.due_at)) FROM {pending} p \
                 WHERE p.house = ? AND p.due_at > '1000-01-01' AND p.due_at < '9999-01-01')";

const CHANGES: &str = " UNION ALL (SELECT -1, changes, NULL FROM {changes})";

// Plan: one range scan of the primary key.
const POLL_ARM: &str = concat!(
    "(SELECT ",
    ahead!(),
    " FROM {pending} p FORCE INDEX (PRIMARY) WHERE p.house = ? AND p.id > ? AND (p.key_hash IS NOT NULL OR ",
    eligible!(),
    ")%EXCLUDED% ORDER BY p.id LIMIT ?)"
);

// Plan: per key one lookup at the start of (house, key_hash), and for those that aren't its head one more; for keys of which
// something is done one that ends there.
const BEFORE: &str = "SELECT d.id, CASE WHEN d.passed = 0 AND d.id = (SELECT k.id FROM {pending} k FORCE INDEX (pending_key) \
          WHERE k.house = d.house AND k.key_hash = d.key_hash ORDER BY k.id LIMIT 1) THEN NULL ELSE {before}(d.house, d.key_hash, d.passed, d.id) END, \
     (SELECT changes FROM {changes}) \
     FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', key_hash BIGINT PATH '$[1]', passed BIGINT PATH '$[2]', id BIGINT PATH '$[3]')) d";

// Plan: one range scan of the primary key; a lookup in (house, key_hash, id) for keyed rows. `before` is NULL for all of them.
const SWEEP_ARM: &str = concat!(
    "(SELECT p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
             NULL AS before_id, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.due_at) AS due \
        FROM {pending} p FORCE INDEX (PRIMARY) WHERE p.house = ? AND p.id > ? AND p.id <= ? AND ",
    eligible!(),
    "%EXCLUDED% AND (p.key_hash IS NULL OR p.id = (SELECT k.id FROM {pending} k FORCE INDEX (pending_key) \
          WHERE k.house = p.house AND k.key_hash = p.key_hash ORDER BY k.id LIMIT 1)) ORDER BY p.id LIMIT ?)"
);

// Plan: one range scan of (house, due_at, id). A comparison of pairs would not be a range.
const DUE_ARM: &str = concat!(
    "(SELECT ",
    thin!(),
    " FROM {pending} p FORCE INDEX (pending_due) WHERE p.house = ? \
        AND p.due_at >= TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL ? MICROSECOND AND p.due_at <= UTC_TIMESTAMP(6) \
        AND (p.due_at > TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL ? MICROSECOND OR p.id > ?) AND p.status <> 'FAILED'\
        %EXCLUDED% ORDER BY p.due_at, p.id LIMIT ?)"
);

// Plan: one lookup at the start of a range of (house, due_at, id).
const NEXT_DUE_ARM: &str = "(SELECT TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), MIN(p.due_at)) AS due FROM {pending} p \
     WHERE p.house = ? AND p.due_at > UTC_TIMESTAMP(6) AND p.due_at < '9999-01-01')";

// Plan: one range scan of (house, key_hash, id).
const KEY_ARM: &str = concat!(
    "(SELECT ",
    ahead!(),
    ", (SELECT changes FROM {changes}) AS changes \
       FROM {pending} p FORCE INDEX (pending_key) WHERE p.house = ? AND p.key_hash = ? AND p.id > ? ORDER BY p.id LIMIT ?)"
);

// Plan: one range scan of the primary key, filtered.
const DESTINATION_ARM: &str = concat!(
    "(SELECT ",
    thin!(),
    " FROM {pending} p FORCE INDEX (PRIMARY) WHERE p.house = ? AND p.id > ? AND ",
    eligible!(),
    " AND p.destination = ? ORDER BY p.id LIMIT ?)"
);

/// Fills the arms up to a power of two, so that few texts exist: no house has the number -1.
const NOTHING: [(i32, i64); ARMS] = [(-1, 0); ARMS];

/// Arms per statement; more houses or keys take several statements.
const ARMS: usize = 64;

// Plan: per id one lookup of the primary key, which also finds the partition.
const LOAD: &str = "SELECT l.id, l.message_id, l.type, l.destination, l.message_key, l.payload, l.content_type, l.headers, \
     TIMESTAMPDIFF(MICROSECOND, '1970-01-01', l.created_at) AS created \
     FROM JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$')) d STRAIGHT_JOIN {%LOG%} l FORCE INDEX (PRIMARY) ON l.id = d.id";

/// The rows of a batch as a table: one statement text for every size of batch, and a lookup of the primary key per row
/// whatever the statistics say.
macro_rules! batch {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', id BIGINT PATH '$[1]', version INT PATH '$[2]')) d \
         STRAIGHT_JOIN {pending} p FORCE INDEX (PRIMARY) ON p.house = d.house AND p.id = d.id AND p.version = d.version"
    };
}

const DELIVERED: &str = concat!("DELETE p FROM ", batch!());

/// Locks what is still there at the version that was read, and tells what that is.
const HOLD: &str = concat!("SELECT p.house, p.id, p.version FROM ", batch!(), " FOR UPDATE");

const RECEIPT: &str = "INSERT INTO {receipt} (house, instance, low, ids, versions) \
     SELECT d.house, ?, d.low, d.ids, d.versions FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', low BIGINT PATH '$[1]', \
         ids MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[2]', versions MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[3]')) d";

const SETBACK: &str = "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$[0]', id BIGINT PATH '$[1]', attempts INT PATH '$[2]', \
         claims INT PATH '$[3]', wait BIGINT PATH '$[4]', leave_key INT PATH '$[5]', error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[6]')) d \
     STRAIGHT_JOIN {pending} p FORCE INDEX (PRIMARY) ON p.house = d.house AND p.id = d.id \
     SET p.status = CASE WHEN d.wait IS NULL THEN 'FAILED' ELSE 'PENDING' END, p.attempts = d.attempts, p.claims = d.claims, \
         p.due_at = CASE WHEN d.wait IS NULL THEN TIMESTAMP'9999-12-31 00:00:00.000000' ELSE UTC_TIMESTAMP(6) + INTERVAL d.wait MICROSECOND END, \
         p.key_hash = CASE WHEN d.leave_key = 1 THEN NULL ELSE p.key_hash END, p.owner = NULL, p.version = p.version + 1, \
         p.last_error = d.error, p.updated_at = UTC_TIMESTAMP(6)";

const ATTEMPTS: &str = "INSERT INTO {attempt} (row_id, attempt, instance, outcome, error, response, took_ms) \
     SELECT d.id, d.attempts, ?, d.outcome, d.error, d.response, d.took FROM JSON_TABLE(?, '$[*]' COLUMNS (id BIGINT PATH '$[0]', \
         attempts INT PATH '$[1]', outcome VARCHAR(10) PATH '$[2]', error MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[3]', response MEDIUMTEXT CHARACTER SET utf8mb4 PATH '$[4]', \
         took INT PATH '$[5]')) d";

const CLAIM: &str = concat!(
    "UPDATE ",
    batch!(),
    " SET p.status = 'SENDING', p.claims = p.claims + 1, p.version = p.version + 1, p.owner = ?, \
      p.due_at = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, p.updated_at = UTC_TIMESTAMP(6)"
);

// A lease that ran out is never renewed. The clock is read when the statement starts, so waiting only shortens a lease.
const RENEW: &str = "UPDATE {instance} SET lease_until = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND \
     WHERE instance = ? AND lease_until > UTC_TIMESTAMP(6)";

const MEMBERS: &str = "SELECT h.house, h.owner AS name, h.epoch AS number, NULL AS takes, NULL AS for_runs FROM {house} h \
     UNION ALL \
     SELECT NULL, i.instance, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), i.lease_until), CAST(i.houses AS BINARY), \
            CAST(i.run_houses AS BINARY) FROM {instance} i \
      WHERE i.lease_until > UTC_TIMESTAMP(6)";

// Plan: the primary key in order, up to the limit; a join with the list of houses would lock all of them.
const FREE: &str = "SELECT f.house, f.epoch + 1, CAST(f.owner IS NOT NULL AS SIGNED) FROM {house} f \
     WHERE FIND_IN_SET(f.house, ?) \
       AND (f.owner IS NULL OR NOT EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = f.owner AND i.lease_until > UTC_TIMESTAMP(6))) \
       AND EXISTS (SELECT 1 FROM {instance} me WHERE me.instance = ? AND me.lease_until > UTC_TIMESTAMP(6)) \
     ORDER BY f.house LIMIT ? FOR UPDATE SKIP LOCKED";

// Houses before instances, as in `leave`: the two wait for each other instead of deadlocking. `take` waits for no house.
const WANTED_LOCK: &str = "SELECT h.house FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$')) d STRAIGHT_JOIN {house} h ON h.house = d.house \
     FOR UPDATE";

/// Waits for renewals that are being committed: the next statement sees them. (READ COMMITTED: each has a snapshot of its own.)
const INSTANCES_LOCK: &str = "SELECT instance FROM {instance} ORDER BY instance LOCK IN SHARE MODE";

// Whether the asking instance lives, and who owns the houses that it wants.
const WANTED: &str = "SELECT h.house, h.owner, h.epoch, \
        CAST(EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = h.owner AND i.lease_until > UTC_TIMESTAMP(6)) AS SIGNED), \
        CAST(EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = ? AND i.lease_until > UTC_TIMESTAMP(6)) AS SIGNED) \
     FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$')) d STRAIGHT_JOIN {house} h ON h.house = d.house";

const TAKE_ALL: &str = "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$')) d STRAIGHT_JOIN {house} h ON h.house = d.house \
     SET h.owner = ?, h.epoch = h.epoch + 1, h.taken_at = UTC_TIMESTAMP(6)";

// Plan: per house one lookup at the end of a range of the primary key.
const ENDS: &str = "SELECT d.house, COALESCE((SELECT MAX(p.id) FROM {pending} p WHERE p.house = d.house), 0), \
     TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) FROM JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$')) d";

// Plan: one lookup at the start of a range of the primary key, and one range scan that ends at the limit.
const FIRST_HOUSE: &str =
    "SELECT house FROM {pending} FORCE INDEX (PRIMARY) WHERE house >= ? AND house <= ? ORDER BY house LIMIT 1";
const COUNT_HOUSE: &str = "SELECT COUNT(*) FROM (SELECT 1 FROM {pending} FORCE INDEX (PRIMARY) WHERE house = ? LIMIT ?) r";

/// MySQL or MariaDB as a relay sees it, on connections of its own: one reserved for the lease, four for work.
#[derive(Debug)]
pub(crate) struct MySqlStore {
    lease: MySqlPool,
    pub(super) work: MySqlPool,
    pub(super) tables: Tables,
    pub(super) deadline: Duration,
    sql: Statements,
    /// Statements of many arms, by template, arms and excluded destinations.
    unions: Mutex<HashMap<(&'static str, usize, usize), SqlStr>>,
    passed: Passed,
}

#[derive(Debug)]
struct Statements {
    before: SqlStr,
    load: SqlStr,
    load_kept: SqlStr,
    delivered: SqlStr,
    hold: SqlStr,
    receipt: SqlStr,
    setback: SqlStr,
    attempts: SqlStr,
    claim: SqlStr,
    renew: SqlStr,
    members: SqlStr,
    free: SqlStr,
}

/// Connections for reads and outcomes: forward read, sweep, load, outcome.
const WORK_CONNECTIONS: u32 = 4;

impl MySqlStore {
    pub(crate) fn new(pool: &MySqlPool, tables: &Tables, deadline: Duration, people: Option<u32>) -> Self {
        // Whatever the application's connections are set to, these send and understand UTF-8.
        let options = (*pool.connect_options()).clone().charset("utf8mb4");
        let session = AssertSqlSafe(session(deadline)).into_sql_str();
        // A ping per acquire would double the round trips; a broken connection is found by its next call and closed.
        let own = |n| {
            let session = session.clone();
            MySqlPoolOptions::new()
                .max_connections(n)
                .acquire_timeout(deadline)
                .test_before_acquire(false)
                // Before the server's own wait_timeout for these sessions.
                .idle_timeout(people.map_or(Duration::from_secs(IDLE / 2), |_| PEOPLE_IDLE))
                .after_connect(move |conn, _| {
                    let session = session.clone();
                    Box::pin(async move {
                        conn.execute(sqlx::raw_sql(session)).await?;
                        Ok(())
                    })
                })
                .connect_lazy_with(options.clone())
        };
        let sql = |template| tables.sql(template);
        Self {
            lease: own(1),
            work: own(people.unwrap_or(WORK_CONNECTIONS)),
            tables: tables.clone(),
            deadline,
            sql: Statements {
                before: sql(BEFORE),
                load: sql(&LOAD.replace("%LOG%", "message")),
                load_kept: sql(&LOAD.replace("%LOG%", "kept")),
                delivered: sql(DELIVERED),
                hold: sql(HOLD),
                receipt: sql(RECEIPT),
                setback: sql(SETBACK),
                attempts: sql(ATTEMPTS),
                claim: sql(CLAIM),
                renew: sql(RENEW),
                members: sql(MEMBERS),
                free: sql(FREE),
            },
            unions: Mutex::default(),
            passed: Passed::default(),
        }
    }

    /// `arm` once per house or key, with room for `excluded` destinations in each.
    fn union(&self, arm: &'static str, arms: usize, excluded: usize) -> SqlStr {
        // Nothing panics while the lock is held, so a poisoned map is as good as any.
        let mut unions = self.unions.lock().unwrap_or_else(PoisonError::into_inner);
        unions.entry((arm, arms, excluded)).or_insert_with(|| union_text(&self.tables, arm, arms, excluded)).clone()
    }
}

fn union_text(tables: &Tables, template: &str, arms: usize, excluded: usize) -> SqlStr {
    let list = match excluded {
        0 => String::new(),
        n => format!(" AND p.destination NOT IN ({})", vec!["?"; n].join(", ")),
    };
    let arm = template.replace("%EXCLUDED%", &list);
    let mut text = vec![tables.text(&arm); arms].join(" UNION ALL ");
    if template == PEEK_ARM {
        text.push_str(&tables.text(CHANGES));
    }
    AssertSqlSafe(text).into_sql_str()
}

/// After this many seconds without a word the server ends a session of the relay: one whose host vanished in the middle of a
/// transaction must not keep rows locked for hours.
const IDLE: u64 = 60;

/// What the relay's sessions are set to. READ COMMITTED: no gap locks, and every statement sees what is committed by then.
/// The server gives up waiting for a row when nobody waits for the answer any more.
fn session(deadline: Duration) -> String {
    format!(
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
         SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, innodb_lock_wait_timeout = {}, wait_timeout = {IDLE}",
        lock_wait(deadline)
    )
}

pub(super) fn lock_wait(deadline: Duration) -> u64 {
    deadline.as_secs().clamp(1, 50)
}

pub(super) fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX)
}

/// An integer of whatever width the server made of the expression.
pub(super) fn int(row: &MySqlRow, column: usize) -> Result<i64, sqlx::Error> {
    row.try_get(column)
}

/// Text out of a column of bytes or characters; what isn't UTF-8 in it becomes U+FFFD.
pub(super) fn text(row: &MySqlRow, column: usize) -> Result<String, sqlx::Error> {
    Ok(text_or_null(row, column)?.unwrap_or_default())
}

pub(super) fn text_or_null(row: &MySqlRow, column: usize) -> Result<Option<String>, sqlx::Error> {
    Ok(row.try_get::<Option<Vec<u8>>, _>(column)?.map(|b| match String::from_utf8(b) {
        Ok(text) => text,
        Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
    }))
}

fn count(row: &MySqlRow, column: usize) -> Result<u32, sqlx::Error> {
    Ok(u32::try_from(int(row, column)?).unwrap_or(0))
}

fn house(row: &MySqlRow, column: usize) -> Result<House, sqlx::Error> {
    Ok(House(row.try_get(column)?))
}

fn thin(row: &MySqlRow) -> Result<Thin, sqlx::Error> {
    Ok(Thin {
        house: house(row, 0)?,
        id: int(row, 1)?,
        destination: text(row, 2)?,
        key: row.try_get::<Option<i64>, _>(3)?.map(KeyHash::number),
        size: count(row, 4)?,
        attempts: count(row, 5)?,
        claims: count(row, 6)?,
        version: row.try_get(7)?,
        max_attempts: row.try_get::<Option<i32>, _>(8)?.map(|n| n.max(1) as u32),
        before: row.try_get(9)?,
        due: row.try_get(10)?,
    })
}

/// A union's arms come in no promised order.
fn thins(rows: &[MySqlRow]) -> Result<Vec<Thin>, Error> {
    let mut out = rows.iter().map(thin).collect::<Result<Vec<_>, _>>()?;
    out.sort_unstable_by_key(|t| (t.house, t.id));
    Ok(out)
}

/// A list of destinations with as many entries as a power of two, so that few statement texts exist; the last is repeated.
fn padded(excluded: &[String]) -> Vec<&[u8]> {
    let mut out: Vec<&[u8]> = excluded.iter().map(String::as_bytes).collect();
    if let Some(last) = out.last().copied() {
        out.resize(out.len().next_power_of_two(), last);
    }
    out
}

/// Arms per statement: a statement may have 65 535 placeholders, and each arm has some of its own besides the list.
fn arms(excluded: &[&[u8]]) -> usize {
    let fit = (60_000 / (excluded.len() + 8)).clamp(1, ARMS);
    // The largest power of two that fits.
    1 << fit.ilog2()
}

type Statement<'q> = Query<'q, MySql, MySqlArguments>;

fn bind_all<'q>(mut query: Statement<'q>, values: &[&[u8]]) -> Statement<'q> {
    for value in values {
        query = query.bind(value.to_vec());
    }
    query
}

/// A JSON array of arrays. Sorted by house and id, so that all batches lock rows in one order.
fn batch(rows: &[Done]) -> String {
    let mut rows: Vec<&Done> = rows.iter().collect();
    rows.sort_unstable_by_key(|d| (d.house, d.id));
    let mut out = String::with_capacity(rows.len() * 24 + 2);
    for d in rows {
        out.push(if out.is_empty() { '[' } else { ',' });
        let _ = write!(out, "[{},{},{}]", d.house.0, d.id, d.version);
    }
    if out.is_empty() {
        out.push('[');
    }
    out.push(']');
    out
}

fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    Ok(serde_json::to_string(value)?)
}

/// One receipt per house, of rows sorted by house and id.
fn receipts(mut rows: Vec<Done>) -> Result<String, Error> {
    rows.sort_unstable_by_key(|d| (d.house, d.id));
    let mut out = Vec::new();
    for of_house in rows.chunk_by(|a, b| a.house == b.house) {
        let ids: Vec<i64> = of_house.iter().map(|d| d.id).collect();
        let versions: Vec<i32> = of_house.iter().map(|d| d.version).collect();
        out.push((of_house[0].house.0, ids[0], json(&ids)?, json(&versions)?));
    }
    json(&out)
}

/// A row of the log as an envelope; the attempt is filled in by the relay, and so is an edited destination.
fn envelope(row: &MySqlRow) -> Result<(i64, Result<Envelope, String>), sqlx::Error> {
    let id = int(row, 0)?;
    let headers = text_or_null(row, 7)?;
    let created = int(row, 8)?;
    let bytes = |column| row.try_get::<Option<Vec<u8>>, _>(column);
    let (message_id, kind, destination, key, content_type) = (bytes(1)?, bytes(2)?, bytes(3)?, bytes(4)?, bytes(6)?);
    let payload: Vec<u8> = row.try_get(5)?;
    let utf8 = |column: &str, value: Option<Vec<u8>>| {
        value
            .map(String::from_utf8)
            .transpose()
            .map_err(|_| format!("{column} of this message is not UTF-8; publish on a connection that uses utf8mb4"))
    };
    let decode = || {
        let headers = match headers.as_deref().map(Headers::from_json) {
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
            created_at: std::time::UNIX_EPOCH + Duration::from_micros(created.max(0) as u64),
            attempt: 1,
        })
    };
    Ok((id, decode()))
}

impl MySqlStore {
    /// Locks the rows of a batch that still have the version that was read.
    async fn hold(&self, conn: &mut MySqlConnection, rows: &[Done]) -> Result<Vec<Done>, Error> {
        let rows = sqlx::query(self.sql.hold.clone()).bind(batch(rows)).fetch_all(conn).await?;
        let held = |r: &MySqlRow| Ok(Done { house: house(r, 0)?, id: int(r, 1)?, version: r.try_get(2)? });
        Ok(rows.iter().map(held).collect::<Result<_, sqlx::Error>>()?)
    }
}

impl Store for MySqlStore {
    fn kind(&self) -> &'static str {
        "mysql"
    }

    fn connections(&self) -> u32 {
        1 + self.work.options().get_max_connections()
    }

    fn check(&self) -> Reply<'_, (i32, u16)> {
        on!(self.work, self.deadline, "schema check", |c| {
            match super::migrate::version(c, &self.tables).await? {
                None => Err(Error::Schema(format!(
                    "{} is missing; run `posthouse migrate`, or call posthouse::migrate",
                    self.tables.name("meta")
                ))),
                Some(v) => {
                    // Statements under READ COMMITTED can't be logged as statements: every write of the relay would fail (1665).
                    let by_statement: i64 =
                        sqlx::query_scalar("SELECT CAST(@@log_bin = 1 AND @@binlog_format = 'STATEMENT' AS SIGNED)")
                            .fetch_one(&mut *c)
                            .await?;
                    if by_statement == 1 {
                        return Err(Error::Schema(
                            "binlog_format is STATEMENT, which the relay can't work with; set it to ROW or MIXED".into(),
                        ));
                    }
                    let houses: i32 = sqlx::query_scalar(self.tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *c).await?;
                    Ok((v, houses as u16))
                }
            }
        })
    }

    fn join<'a>(&'a self, instance: &'a str, coverage: &'a Coverage, lease: Duration) -> Reply<'a, ()> {
        let sql = self.tables.sql(
            "INSERT INTO {instance} (instance, lease_until, houses, run_houses) \
             VALUES (?, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, ?, ?)",
        );
        on!(self.lease, self.deadline, "join", |c| {
            let (takes, for_runs) = coverage.columns();
            let query = sqlx::query(sql).bind(instance.as_bytes()).bind(micros(lease)).bind(takes).bind(for_runs);
            query.execute(&mut *c).await?;
            Ok(())
        })
    }

    fn renew<'a>(&'a self, instance: &'a str, lease: Duration) -> Reply<'a, Option<Membership>> {
        on!(self.lease, self.deadline, "lease renewal", |c| {
            // sqlx counts found rows, so a renewal that changes nothing counts too.
            let renewed =
                sqlx::query(self.sql.renew.clone()).bind(micros(lease)).bind(instance.as_bytes()).execute(&mut *c).await?;
            if renewed.rows_affected() == 0 {
                return Ok(None);
            }
            let mut out = Membership::default();
            for row in sqlx::query(self.sql.members.clone()).fetch_all(&mut *c).await? {
                match row.try_get::<Option<i32>, _>(0)? {
                    Some(house) => out.houses.push((House(house), text_or_null(&row, 1)?, int(&row, 2)?)),
                    None => out.live.push(Live {
                        name: text(&row, 1)?,
                        left: Duration::from_micros(int(&row, 2)?.max(0) as u64),
                        coverage: Coverage::of_columns(text_or_null(&row, 3)?.as_deref(), text_or_null(&row, 4)?.as_deref()),
                    }),
                }
            }
            out.houses.sort_unstable_by_key(|h| h.0);
            Ok(Some(out))
        })
    }

    fn take<'a>(&'a self, instance: &'a str, among: &'a [House], most: usize) -> Reply<'a, Vec<Taken>> {
        on!(self.lease, self.deadline, "taking houses", |c| {
            let mut tx = c.begin().await?;
            sqlx::query(self.tables.sql(INSTANCES_LOCK)).fetch_all(&mut *tx).await?;
            let among: Vec<String> = among.iter().map(House::to_string).collect();
            let free = sqlx::query(self.sql.free.clone()).bind(among.join(",")).bind(instance.as_bytes()).bind(most as i64);
            let rows = free.fetch_all(&mut *tx).await?;
            let taken = |r: &MySqlRow| Ok(Taken { house: house(r, 0)?, epoch: int(r, 1)?, expired: int(r, 2)? == 1 });
            let taken = rows.iter().map(taken).collect::<Result<Vec<_>, sqlx::Error>>()?;
            if !taken.is_empty() {
                let houses: Vec<House> = taken.iter().map(|t| t.house).collect();
                let take = sqlx::query(self.tables.sql(TAKE_ALL)).bind(json(&houses)?).bind(instance.as_bytes());
                take.execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(taken)
        })
    }

    fn take_exactly<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, Exactly> {
        on!(self.lease, self.deadline, "taking houses for a run", |c| {
            let mut sorted = houses.to_vec();
            sorted.sort_unstable();
            let list = json(&sorted)?;
            let mut tx = c.begin().await?;
            sqlx::query(self.tables.sql(WANTED_LOCK)).bind(&list).fetch_all(&mut *tx).await?;
            sqlx::query(self.tables.sql(INSTANCES_LOCK)).fetch_all(&mut *tx).await?;
            let wanted = sqlx::query(self.tables.sql(WANTED)).bind(instance.as_bytes()).bind(&list);
            let found = |r: &MySqlRow| Ok((r.try_get(0)?, text_or_null(r, 1)?, int(r, 2)?, int(r, 3)? == 1, int(r, 4)? == 1));
            let found = wanted.fetch_all(&mut *tx).await?.iter().map(found).collect::<Result<Vec<_>, sqlx::Error>>()?;
            let answer = exactly(instance, houses, found);
            if let Exactly::Taken(_) = &answer {
                sqlx::query(self.tables.sql(TAKE_ALL)).bind(&list).bind(instance.as_bytes()).execute(&mut *tx).await?;
                tx.commit().await?;
            } else {
                tx.rollback().await?;
            }
            Ok(answer)
        })
    }

    fn release<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, ()> {
        let sql = self.tables.sql(
            "UPDATE JSON_TABLE(?, '$[*]' COLUMNS (house INT PATH '$')) d STRAIGHT_JOIN {house} h ON h.house = d.house \
                SET h.owner = NULL WHERE h.owner = ?",
        );
        on!(self.lease, self.deadline, "releasing houses", |c| {
            let mut houses: Vec<i32> = houses.iter().map(|h| h.0).collect();
            houses.sort_unstable();
            sqlx::query(sql).bind(json(&houses)?).bind(instance.as_bytes()).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a self, instance: &'a str) -> Reply<'a, ()> {
        on!(self.lease, self.deadline, "leaving", |c| {
            let mut tx = c.begin().await?;
            for sql in ["UPDATE {house} SET owner = NULL WHERE owner = ?", "DELETE FROM {instance} WHERE instance = ?"] {
                sqlx::query(self.tables.sql(sql)).bind(instance.as_bytes()).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(())
        })
    }

    fn ends<'a>(&'a self, houses: &'a [House]) -> Reply<'a, Ends> {
        on!(self.work, self.deadline, "start of a run", |c| {
            let rows = sqlx::query(self.tables.sql(ENDS)).bind(json(&houses)?).fetch_all(&mut *c).await?;
            let mut out = Ends::default();
            for row in &rows {
                out.now = int(row, 2)?;
                out.houses.push((house(row, 0)?, int(row, 1)?));
            }
            Ok(out)
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
                    next = i32::checked_add(house, 1);
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
            let excluded = padded(excluded);
            let mut out = Poll::default();
            let mut rows = Vec::new();
            let mut changes = None;
            for marks in marks.chunks(arms(&excluded)) {
                // First what there is: most polls find nothing new in most houses, and this costs a third.
                let mut query = sqlx::query(self.union(PEEK_ARM, marks.len(), 0));
                for m in marks {
                    query = query.bind(m.house.0).bind(m.house.0).bind(m.after).bind(m.house.0).bind(m.house.0);
                }
                let mut high = HashMap::new();
                let mut next_due = HashMap::new();
                for row in &query.fetch_all(&mut *c).await? {
                    let house = house(row, 0)?;
                    let id: Option<i64> = row.try_get(1)?;
                    let due: Option<i64> = row.try_get(2)?;
                    if house.0 < 0 {
                        // Of several statements the first counts: what changed since is read again.
                        changes.get_or_insert(id.unwrap_or(0));
                    } else {
                        high.extend(id.map(|id| (house, id)));
                        next_due.extend(due.map(|due| (house, due)));
                    }
                }
                out.houses.extend(marks.iter().map(|m| HousePoll {
                    house: m.house,
                    max_id: high.get(&m.house).copied().unwrap_or(m.after),
                    cut_off: None,
                    next_due: next_due.get(&m.house).copied(),
                }));
                let news: Vec<(i32, i64)> =
                    marks.iter().filter(|m| high.contains_key(&m.house)).map(|m| (m.house.0, m.after)).collect();
                if news.is_empty() {
                    continue;
                }
                // The later snapshot has all that the first had up to its highest ids, but for what was delivered meanwhile.
                let arms = news.len().next_power_of_two();
                let mut query = sqlx::query(self.union(POLL_ARM, arms, excluded.len()));
                for (house, after) in news.into_iter().chain(NOTHING).take(arms) {
                    query = bind_all(query.bind(house).bind(after), &excluded).bind(i64::from(limit));
                }
                rows.extend(query.fetch_all(&mut *c).await?);
            }
            out.changes = changes.unwrap_or(0);
            let mut ahead = Ahead::default();
            for row in &rows {
                ahead.push(thin(row)?);
            }
            let mut first = ahead.link(!excluded.is_empty());
            if !first.is_empty() {
                let mut known = self.passed.counts(out.changes);
                let before: HashMap<i64, Option<i64>> = loop {
                    let passed = |t: &Thin| t.key.clone().filter(|_| known).map_or(0, |k| self.passed.after(&(t.house, k), t.id));
                    let keys: Vec<_> =
                        first.iter().map(|t| (t.house.0, t.key.as_ref().map(|k| k.number), passed(t), t.id)).collect();
                    let rows: Vec<(i64, Option<i64>, i64)> =
                        sqlx::query_as(self.sql.before.clone()).bind(json(&keys)?).fetch_all(&mut *c).await?;
                    if known && rows.iter().any(|row| !self.passed.counts(row.2)) {
                        // An operator may have put a row back.
                        known = false;
                        continue;
                    }
                    break rows.into_iter().map(|row| (row.0, row.1)).collect();
                };
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
            let excluded = padded(excluded);
            let mut rows = Vec::new();
            for marks in marks.chunks(arms(&excluded)) {
                let mut query = sqlx::query(self.union(SWEEP_ARM, marks.len(), excluded.len()));
                for m in marks {
                    query = bind_all(query.bind(m.house.0).bind(m.after).bind(m.upto), &excluded).bind(i64::from(limit));
                }
                rows.extend(query.fetch_all(&mut *c).await?);
            }
            thins(&rows)
        })
    }

    fn due<'a>(&'a self, houses: &'a [House], after: (i64, i64), limit: u32, excluded: &'a [String]) -> Reply<'a, DuePage> {
        on!(self.work, self.deadline, "due read", |c| {
            let excluded = padded(excluded);
            // Below 1970 there is nothing; lower numbers would leave the range of DATETIME.
            let (at, id) = if after.0 < 0 { (0, 0) } else { after };
            let mut page = DuePage::default();
            for houses in houses.chunks(arms(&excluded)) {
                let mut query = sqlx::query(self.union(DUE_ARM, houses.len(), excluded.len()));
                for h in houses {
                    query = bind_all(query.bind(h.0).bind(at).bind(at).bind(id), &excluded).bind(i64::from(limit));
                }
                for row in &query.fetch_all(&mut *c).await? {
                    page.rows.push(thin(row)?);
                }
                let mut query = sqlx::query_scalar(self.union(NEXT_DUE_ARM, houses.len(), 0));
                for h in houses {
                    query = query.bind(h.0);
                }
                let next: Vec<Option<i64>> = query.fetch_all(&mut *c).await?;
                page.next_due = next.into_iter().flatten().chain(page.next_due).min();
            }
            page.rows.sort_unstable_by_key(|t| (t.due, t.id));
            page.rows.truncate(limit as usize);
            Ok(page)
        })
    }

    fn of_keys<'a>(&'a self, keys: &'a [(House, KeyHash)], limit: u32) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "key read", |c| {
            let mut ahead = Ahead::default();
            for keys in keys.chunks(ARMS) {
                let arms = keys.len().next_power_of_two();
                let mut passed: Vec<i64> = keys.iter().map(|k| self.passed.after(k, i64::MAX)).collect();
                let rows = loop {
                    let mut query = sqlx::query(self.union(KEY_ARM, arms, 0));
                    let arm = keys.iter().map(|(h, k)| (h.0, k.number)).chain(NOTHING).take(arms);
                    for ((house, key), passed) in arm.zip(passed.iter().copied().chain(std::iter::repeat(0))) {
                        query = query.bind(house).bind(key).bind(passed).bind(i64::from(limit));
                    }
                    let rows = query.fetch_all(&mut *c).await?;
                    let changes = rows.first().map(|row| int(row, 11)).transpose()?;
                    if changes.is_none_or(|n| self.passed.counts(n)) || passed.iter().all(|id| *id == 0) {
                        break rows;
                    }
                    // An operator may have put a row back.
                    passed.fill(0);
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
            for marks in marks.chunks(ARMS) {
                let mut query = sqlx::query(self.union(DESTINATION_ARM, marks.len(), 0));
                for m in marks {
                    query = query.bind(m.house.0).bind(m.after).bind(destination.as_bytes()).bind(i64::from(limit));
                }
                rows.extend(query.fetch_all(&mut *c).await?);
            }
            thins(&rows)
        })
    }

    fn load<'a>(&'a self, ids: &'a [i64]) -> Reply<'a, Vec<(i64, Result<Envelope, String>)>> {
        on!(self.work, self.deadline, "load", |c| {
            if ids.is_empty() {
                return Ok(Vec::new());
            }
            let list = json(&ids)?;
            let mut rows = sqlx::query(self.sql.load.clone()).bind(&list).fetch_all(&mut *c).await?;
            if rows.len() < ids.len() {
                rows.extend(sqlx::query(self.sql.load_kept.clone()).bind(&list).fetch_all(&mut *c).await?);
            }
            Ok(rows.iter().map(envelope).collect::<Result<_, _>>()?)
        })
    }

    fn changes<'a>(&'a self, since: i64) -> Reply<'a, Vec<Change>> {
        let sql = self.tables.sql("SELECT house, row_id, key_hash FROM {audit} WHERE `change` > ?");
        on!(self.work, self.deadline, "change read", |c| {
            let rows = sqlx::query(sql).bind(since).fetch_all(&mut *c).await?;
            let change = |r: &MySqlRow| {
                Ok(Change { house: house(r, 0)?, id: int(r, 1)?, key: r.try_get::<Option<i64>, _>(2)?.map(KeyHash::number) })
            };
            Ok(rows.iter().map(change).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn delivered<'a>(&'a self, instance: &'a str, done: &'a [Done]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "completion", |c| {
            if done.is_empty() {
                return Ok(Vec::new());
            }
            let mut tx = c.begin().await?;
            let mut gone = done.to_vec();
            let deleted = sqlx::query(self.sql.delivered.clone()).bind(batch(done)).execute(&mut *tx).await?.rows_affected();
            if deleted != done.len() as u64 {
                // Somebody else changed a row: take the delete back and find out which are left.
                tx.rollback().await?;
                tx = c.begin().await?;
                gone = self.hold(&mut tx, done).await?;
                sqlx::query(self.sql.delivered.clone()).bind(batch(&gone)).execute(&mut *tx).await?;
            }
            let ids = gone.iter().map(|d| d.id).collect();
            if !gone.is_empty() {
                sqlx::query(self.sql.receipt.clone()).bind(instance.as_bytes()).bind(receipts(gone)?).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(ids)
        })
    }

    fn setback<'a>(&'a self, instance: &'a str, setbacks: &'a [Setback]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "recording failures", |c| {
            if setbacks.is_empty() {
                return Ok(Vec::new());
            }
            let mut tx = c.begin().await?;
            let rows: Vec<Done> = setbacks.iter().map(|s| s.row).collect();
            let held = self.hold(&mut tx, &rows).await?;
            let ids: Vec<i64> = held.iter().map(|d| d.id).collect();
            let here: std::collections::HashSet<i64> = ids.iter().copied().collect();
            let mut held: Vec<&Setback> = setbacks.iter().filter(|s| here.contains(&s.row.id)).collect();
            held.sort_unstable_by_key(|s| (s.row.house, s.row.id));
            let changes: Vec<_> = held
                .iter()
                .map(|s| {
                    let (wait, leave) = (s.wait.map(micros), i32::from(s.leave_key));
                    (s.row.house.0, s.row.id, s.attempts, s.claims, wait, leave, &s.error)
                })
                .collect();
            sqlx::query(self.sql.setback.clone()).bind(json(&changes)?).execute(&mut *tx).await?;
            let attempts: Vec<_> = held
                .iter()
                .filter_map(|s| s.attempt.as_ref().map(|a| (s, a)))
                .map(|(s, a)| (s.row.id, s.attempts, a.outcome, &s.error, &a.response, a.took.as_millis() as i32))
                .collect();
            if !attempts.is_empty() {
                sqlx::query(self.sql.attempts.clone()).bind(instance.as_bytes()).bind(json(&attempts)?).execute(&mut *tx).await?;
            }
            tx.commit().await?;
            Ok(ids)
        })
    }

    fn claim<'a>(&'a self, instance: &'a str, rows: &'a [Done], lease: Duration) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "claim", |c| {
            let mut tx = c.begin().await?;
            let held = self.hold(&mut tx, rows).await?;
            sqlx::query(self.sql.claim.clone())
                .bind(batch(&held))
                .bind(instance.as_bytes())
                .bind(micros(lease))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(held.iter().map(|d| d.id).collect())
        })
    }

    fn upkeep(&self) -> Reply<'_, Upkeep> {
        on!(self.work, self.deadline, "upkeep", |c| {
            let (created, ahead) = super::upkeep::upkeep(c, &self.tables).await?;
            // An instance's row is only needed while its houses may still name it.
            sqlx::query(self.tables.sql(
                "DELETE FROM {instance} WHERE lease_until < UTC_TIMESTAMP(6) - INTERVAL 1 DAY \
                        AND NOT EXISTS (SELECT 1 FROM {house} h WHERE h.owner = instance)",
            ))
            .execute(&mut *c)
            .await?;
            let problems = super::upkeep::problems(c, &self.tables).await?;
            Ok(Upkeep { created, ahead: Some(ahead), problems })
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
        // Re-housing a large pending set takes longer than any other call.
        on!(self.work, Duration::from_secs(600).max(self.deadline), "resizing houses", |c| {
            super::upkeep::resize(c, &self.tables, houses, lock_wait(self.deadline)).await
        })
    }

    fn listen<'a>(&'a self, _heard: &'a (dyn Fn() + Send + Sync)) -> Reply<'a, ()> {
        Box::pin(std::future::pending())
    }
}

#[cfg(test)]
mod tests {
    use sqlx::mysql::MySqlConnectOptions;

    use super::*;
    use crate::{Message, Outbox};

    /// Every statement of the relay finds the rows of {pending} and the log through the index that it names, without sorting:
    /// a scan would cost more with every message, and lock rows that others have just written.
    #[tokio::test]
    async fn every_read_and_outcome_is_served_by_its_index() {
        // Needs a server, which the other unit tests don't; `scripts/test` names one.
        let Ok(url) = std::env::var("POSTHOUSE_TEST_MYSQL_URL") else { return };
        let options: MySqlConnectOptions = url.parse().unwrap();
        let database = format!("plans_{:016x}", fastrand::u64(..));
        let server = MySqlPoolOptions::new().connect_with(options.clone()).await.unwrap();
        server.execute(AssertSqlSafe(format!("CREATE DATABASE {database}"))).await.unwrap();
        let outbox = Outbox::new(MySqlPoolOptions::new().connect_with(options.database(&database)).await.unwrap());
        outbox.migrate().await.unwrap();
        let store = MySqlStore::new(outbox.pool(), outbox.tables(), Duration::from_secs(30), None);

        let arms = |arm| store.union(arm, 4, 2);
        let union = [
            (POLL_ARM, &["1", "0", "'a'", "'b'", "10"][..], "PRIMARY"),
            (SWEEP_ARM, &["1", "0", "1000", "'a'", "'b'", "10"], "PRIMARY"),
            (DUE_ARM, &["1", "5", "5", "6", "'a'", "'b'", "10"], "pending_due"),
            (KEY_ARM, &["1", "7", "5", "10"], "pending_key"),
            (DESTINATION_ARM, &["1", "0", "'a'", "10"], "PRIMARY"),
            (PEEK_ARM, &["1", "1", "0", "1", "1"], ""),
            (NEXT_DUE_ARM, &["1"], ""),
        ];
        let batch = "'[[1,1,0],[2,2,0],[3,3,0]]'";
        let single = [
            (&store.sql.delivered, &[batch][..], "PRIMARY"),
            (&store.sql.hold, &[batch], "PRIMARY"),
            (&store.sql.claim, &[batch, "'me'", "5"], "PRIMARY"),
            (&store.sql.setback, &["'[[1,1,1,0,null,0,\"x\"]]'"], "PRIMARY"),
            (&store.sql.load, &["'[1,2,3]'"], "PRIMARY"),
        ];
        let mut statements: Vec<(String, &[&str], &str)> = Vec::new();
        statements.extend(union.iter().map(|(arm, values, index)| (arms(arm).as_str().to_owned(), *values, *index)));
        statements.extend(single.iter().map(|(sql, values, index)| (sql.as_str().to_owned(), *values, *index)));

        // With a handful of rows and with many: the optimizer decides by numbers, and must not here.
        for more in [3, 3000] {
            let mut tx = outbox.begin().await.unwrap();
            let messages = (0..more).map(|n| Message::to("x").key(n % 7).payload("y"));
            outbox.publish_many(&mut tx, messages).await.unwrap();
            tx.commit().await.unwrap();
            for (sql, values, index) in &statements {
                let mut literal = String::from("EXPLAIN ");
                let mut values = values.iter().cycle();
                for (n, part) in sql.split('?').enumerate() {
                    literal.push_str(if n == 0 { "" } else { values.next().unwrap() });
                    literal.push_str(part);
                }
                let plan = sqlx::raw_sql(AssertSqlSafe(literal.clone())).fetch_all(outbox.pool()).await;
                let mut found = false;
                for step in plan.unwrap_or_else(|e| panic!("{e}: {literal}")) {
                    let column = |name: &str| {
                        let bytes = step.try_get_unchecked::<Option<Vec<u8>>, _>(name).unwrap().unwrap_or_default();
                        String::from_utf8(bytes).unwrap()
                    };
                    let (table, how, key, extra) = (column("table"), column("type"), column("key"), column("Extra"));
                    let seen = format!("{table} {how} {key} {extra}: {literal}");
                    assert!(!extra.contains("filesort"), "{seen}");
                    if ["p", "k", "l"].contains(&table.as_str()) {
                        assert!(["range", "ref", "eq_ref", "const"].contains(&how.as_str()), "{seen}");
                        assert_eq!(key, if table == "k" { "pending_key" } else { *index }, "{seen}");
                        found = true;
                    }
                }
                assert_eq!(found, !index.is_empty(), "{literal}");
            }
        }
        outbox.pool().close().await;
        server.execute(AssertSqlSafe(format!("DROP DATABASE {database}"))).await.unwrap();
    }
}
