//! Membership, reads and outcomes.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions, PgRow};
use sqlx::{Connection, PgPool, Row, SqlStr};

use crate::Error;
use crate::message::{Envelope, Headers, MessageId};
use crate::store::{
    Action, Ahead, AuditFilter, AuditRow, Backlog, Change, Coverage, Done, DuePage, Ends, Exactly, Examination, House, HousePoll,
    HouseRow, KeyHash, Listed, Live, Mark, Membership, MessageDetail, MessageFilter, MessageRow, ORPHAN_HOUSES, ORPHAN_ROWS,
    OverviewStore, PEOPLE_IDLE, Passed, Poll, Record, Reply, RetentionStore, RunStore, Setback, Store, Tables, Taken, Thin,
    Upkeep, Wanted, exactly, on, search,
};

/// The columns of a [`Thin`]. `before` is the nearest lower pending id of the key: an index-only probe of (house, key_hash, id).
macro_rules! thin {
    () => {
        "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
         CASE WHEN p.key_hash IS NOT NULL THEN (SELECT k.id FROM {pending} k WHERE k.house = p.house AND k.key_hash = p.key_hash AND k.id < p.id \
              ORDER BY k.id DESC LIMIT 1) END AS before, \
         (extract(epoch FROM p.due_at) * 1000000)::bigint AS due"
    };
}

/// In every read of the relay.
macro_rules! eligible {
    () => {
        "p.status <> 'FAILED' AND (p.due_at IS NULL OR p.due_at <= statement_timestamp())"
    };
}

/// The columns of a row of the forward read: see [`Ahead`].
macro_rules! ahead {
    () => {
        concat!(
            "p.house, p.id, p.destination, p.key_hash, p.size, p.attempts, p.claims, p.version, p.max_attempts, \
             CASE WHEN ",
            eligible!(),
            " THEN 1 ELSE 0 END::bigint AS before, (extract(epoch FROM p.due_at) * 1000000)::bigint AS due"
        )
    };
}

// Plan: per house one range scan of the primary key (house, id), plus a backward probe of it and a probe of the due index.
const POLL: &str = concat!(
    "WITH h AS MATERIALIZED (SELECT * FROM unnest($1::integer[], $2::bigint[]) AS h(house, mark)) \
     SELECT h.house, coalesce((SELECT p.id FROM {pending} p WHERE p.house = h.house AND p.id > h.mark ORDER BY p.id DESC LIMIT 1), h.mark) AS id, \
            NULL::text AS destination, NULL::bigint AS key_hash, 0 AS size, 0 AS attempts, 0 AS claims, 0 AS version, NULL::integer AS max_attempts, \
            (SELECT changes FROM {meta}) AS before, \
            (SELECT (extract(epoch FROM p.due_at - statement_timestamp()) * 1000000)::bigint FROM {pending} p \
              WHERE p.house = h.house AND p.due_at IS NOT NULL AND p.due_at < '9999-01-01' ORDER BY p.due_at LIMIT 1) AS due \
       FROM h \
     UNION ALL \
     SELECT r.* FROM h CROSS JOIN LATERAL (SELECT ",
    ahead!(),
    " FROM {pending} p WHERE p.house = h.house AND p.id > h.mark AND (p.key_hash IS NOT NULL OR ",
    eligible!(),
    ") AND p.destination <> ALL($3) ORDER BY p.id LIMIT $4) r"
);

// Plan: per key one lookup in (house, key_hash, id), which ends at what is passed.
const BEFORE: &str = "SELECT d.id, (SELECT k.id FROM {pending} k WHERE k.house = d.house AND k.key_hash = d.key_hash AND k.id < d.id \
     AND k.id > d.passed ORDER BY k.id DESC LIMIT 1) \
     FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[]) AS d(house, key_hash, id, passed)";

// Plan: per house one range scan of the primary key; for keyed rows a backward probe of (house, key_hash, id), which finds the
// neighbour of all but a key's first row. NOT EXISTS would begin at the start of the key, with all that was delivered and is
// not cleaned away yet, for each of them.
const SWEEP: &str = concat!(
    "SELECT r.* FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) AS h(house, mark, upto) CROSS JOIN LATERAL (SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = h.house AND p.id > h.mark AND p.id <= h.upto AND ",
    eligible!(),
    " AND p.destination <> ALL($4) AND (p.key_hash IS NULL OR (SELECT k.id FROM {pending} k \
          WHERE k.house = p.house AND k.key_hash = p.key_hash AND k.id < p.id ORDER BY k.id DESC LIMIT 1) IS NULL) ORDER BY p.id LIMIT $5) r"
);

// Plan: per house one range scan of the partial index (house, due_at, id).
const DUE: &str = concat!(
    "SELECT r.* FROM unnest($1::integer[]) AS h(house) CROSS JOIN LATERAL (SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = h.house AND p.due_at IS NOT NULL AND p.due_at <= statement_timestamp() AND p.status <> 'FAILED' \
        AND (p.due_at, p.id) > ('epoch'::timestamptz + $2 * interval '1 microsecond', $3) AND p.destination <> ALL($4) \
      ORDER BY p.due_at, p.id LIMIT $5) r ORDER BY r.due, r.id LIMIT $5"
);

const NEXT_DUE: &str = "SELECT min(d.due) FROM unnest($1::integer[]) AS h(house) CROSS JOIN LATERAL ( \
     SELECT (extract(epoch FROM p.due_at - statement_timestamp()) * 1000000)::bigint AS due FROM {pending} p \
      WHERE p.house = h.house AND p.due_at > statement_timestamp() AND p.due_at < '9999-01-01' ORDER BY p.due_at LIMIT 1) d";

// Plan: per key one range scan of (house, key_hash, id).
const OF_KEYS: &str = concat!(
    "SELECT r.*, (SELECT changes FROM {meta}) FROM unnest($1::integer[], $2::bigint[], $3::bigint[]) AS h(house, key_hash, passed) \
       CROSS JOIN LATERAL (SELECT ",
    ahead!(),
    " FROM {pending} p WHERE p.house = h.house AND p.key_hash = h.key_hash AND p.id > h.passed ORDER BY p.id LIMIT $4) r"
);

// Plan: per house one range scan of the primary key, filtered.
const OF_DESTINATION: &str = concat!(
    "SELECT r.* FROM unnest($1::integer[], $2::bigint[]) AS h(house, mark) CROSS JOIN LATERAL (SELECT ",
    thin!(),
    " FROM {pending} p WHERE p.house = h.house AND p.id > h.mark AND ",
    eligible!(),
    " AND p.destination = $3 ORDER BY p.id LIMIT $4) r"
);

// The bounds prune partitions also in a generic plan.
const LOAD: &str = "SELECT id, message_id, type, destination, message_key, payload, content_type, headers::text AS headers, \
     (extract(epoch FROM created_at) * 1000000)::bigint AS created FROM {message} WHERE id >= $1 AND id <= $2 AND id = ANY($3)";

const LOAD_KEPT: &str = "SELECT id, message_id, type, destination, message_key, payload, content_type, headers::text AS headers, \
     (extract(epoch FROM created_at) * 1000000)::bigint AS created FROM {kept} WHERE id >= $1 AND id <= $2 AND id = ANY($3)";

// Delete and receipt in one statement.
const DELIVERED: &str = "WITH gone AS (DELETE FROM {pending} p USING unnest($1::integer[], $2::bigint[], $3::integer[]) AS d(house, id, version) \
        WHERE p.house = d.house AND p.id = d.id AND p.version = d.version RETURNING p.house, p.id, p.version), \
     told AS (INSERT INTO {receipt} (house, instance, low, ids, versions) \
        SELECT house, $4, min(id), array_agg(id ORDER BY id), array_agg(version ORDER BY id) FROM gone GROUP BY house) \
     SELECT id FROM gone";

const SETBACK: &str = "WITH s AS (SELECT * FROM unnest($1::integer[], $2::bigint[], $3::integer[], $4::integer[], $5::integer[], $6::bigint[], \
        $7::boolean[], $8::text[], $9::text[], $10::text[], $11::integer[]) \
        AS s(house, id, version, attempts, claims, wait, leave_key, error, outcome, response, took)), \
     changed AS (UPDATE {pending} p SET status = CASE WHEN s.wait IS NULL THEN 'FAILED' ELSE 'PENDING' END, attempts = s.attempts, claims = s.claims, \
        due_at = CASE WHEN s.wait IS NULL THEN '9999-12-31'::timestamptz ELSE clock_timestamp() + s.wait * interval '1 microsecond' END, \
        key_hash = CASE WHEN s.leave_key THEN NULL ELSE p.key_hash END, owner = NULL, version = p.version + 1, last_error = s.error, \
        updated_at = clock_timestamp() \
        FROM s WHERE p.house = s.house AND p.id = s.id AND p.version = s.version RETURNING p.id), \
     logged AS (INSERT INTO {attempt} (row_id, attempt, instance, outcome, error, response, took_ms) \
        SELECT s.id, s.attempts, $12, s.outcome, s.error, s.response, s.took FROM s JOIN changed USING (id) WHERE s.outcome IS NOT NULL) \
     SELECT id FROM changed";

const CLAIM: &str = "UPDATE {pending} p SET status = 'SENDING', claims = p.claims + 1, version = p.version + 1, owner = $4, \
        due_at = clock_timestamp() + $5 * interval '1 microsecond', updated_at = clock_timestamp() \
     FROM unnest($1::integer[], $2::bigint[], $3::integer[]) AS d(house, id, version) \
     WHERE p.house = d.house AND p.id = d.id AND p.version = d.version RETURNING p.id";

// One statement: renews, and tells who is alive and who owns what. A lease that ran out is never renewed.
const RENEW: &str = "WITH me AS (UPDATE {instance} SET lease_until = clock_timestamp() + $2 * interval '1 microsecond' \
        WHERE instance = $1 AND lease_until > clock_timestamp() RETURNING instance) \
     SELECT h.house, h.owner AS name, h.epoch AS number, (SELECT count(*) FROM me) AS renewed, NULL AS takes, NULL AS for_runs FROM {house} h \
     UNION ALL \
     SELECT NULL, i.instance, (extract(epoch FROM i.lease_until - clock_timestamp()) * 1000000)::bigint, (SELECT count(*) FROM me), \
            i.houses, i.run_houses \
       FROM {instance} i WHERE i.lease_until > clock_timestamp()";

// Takers go one after the other, and renewals that are under way are waited for: otherwise the statement below could judge an
// owner by a snapshot from before it joined, or before its lease was renewed, and take a house from the living.
// Upkeep removes rows that are older than those locked here, so the two don't meet.
const TAKE_LOCKS: &str = "SET LOCAL idle_in_transaction_session_timeout = '5s'; LOCK TABLE {house} IN SHARE ROW EXCLUSIVE MODE; \
     SELECT FROM {instance} WHERE lease_until > clock_timestamp() - interval '1 hour' ORDER BY instance FOR SHARE";

const TAKE: &str = "UPDATE {house} h SET owner = $1, epoch = h.epoch + 1, taken_at = clock_timestamp() \
     FROM (SELECT f.house, f.owner FROM {house} f \
            WHERE f.house = ANY($3) \
              AND (f.owner IS NULL OR NOT EXISTS (SELECT FROM {instance} i WHERE i.instance = f.owner AND i.lease_until > clock_timestamp())) \
            ORDER BY f.house LIMIT $2) free \
     WHERE h.house = free.house AND EXISTS (SELECT FROM {instance} i WHERE i.instance = $1 AND i.lease_until > clock_timestamp()) \
     RETURNING h.house, h.epoch, free.owner IS NOT NULL AS expired";

// After the locks of TAKE: whether the asking instance lives, and who owns the houses that it wants.
const WANTED: &str = "SELECT h.house, h.owner, h.epoch, \
        EXISTS (SELECT FROM {instance} i WHERE i.instance = h.owner AND i.lease_until > clock_timestamp()) AS alive, \
        EXISTS (SELECT FROM {instance} i WHERE i.instance = $1 AND i.lease_until > clock_timestamp()) AS me \
     FROM {house} h WHERE h.house = ANY($2) ORDER BY h.house";

const TAKE_ALL: &str = "UPDATE {house} SET owner = $1, epoch = epoch + 1, taken_at = clock_timestamp() WHERE house = ANY($2)";

// Plan: per house one lookup at the end of a range of the primary key.
const ENDS: &str = "SELECT h.house, coalesce((SELECT p.id FROM {pending} p WHERE p.house = h.house ORDER BY p.id DESC LIMIT 1), 0), \
     (extract(epoch FROM statement_timestamp()) * 1000000)::bigint FROM unnest($1::integer[]) AS h(house)";

// Plan: one lookup at the start of a range of the primary key, and one range scan that ends at the limit.
const FIRST_HOUSE: &str = "SELECT house FROM {pending} WHERE house >= $1 AND house <= $2 ORDER BY house LIMIT 1";
const COUNT_HOUSE: &str = "SELECT count(*) FROM (SELECT FROM {pending} WHERE house = $1 LIMIT $2) r";

/// PostgreSQL as a relay sees it, on connections of its own: one reserved for the lease, five for work.
#[derive(Debug)]
pub(crate) struct PostgresStore {
    lease: PgPool,
    pub(super) work: PgPool,
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
    of_keys: SqlStr,
    of_destination: SqlStr,
    load: SqlStr,
    load_kept: SqlStr,
    delivered: SqlStr,
    setback: SqlStr,
    claim: SqlStr,
    renew: SqlStr,
    take_locks: SqlStr,
    take: SqlStr,
}

/// Connections for work: forward read, sweep, load, outcomes, and the one that listens.
const WORK_CONNECTIONS: u32 = 5;

impl PostgresStore {
    pub(crate) fn new(pool: &PgPool, tables: &Tables, deadline: Duration, people: Option<u32>) -> Self {
        let options = (*pool.connect_options()).clone();
        // A ping per acquire would double the round trips; a broken connection is found by its next call and closed.
        let own = |n| {
            PgPoolOptions::new()
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
                of_keys: sql(OF_KEYS),
                of_destination: sql(OF_DESTINATION),
                load: sql(LOAD),
                load_kept: sql(LOAD_KEPT),
                delivered: sql(DELIVERED),
                setback: sql(SETBACK),
                claim: sql(CLAIM),
                renew: sql(RENEW),
                take_locks: sql(TAKE_LOCKS),
                take: sql(TAKE),
            },
            passed: Passed::default(),
        }
    }
}

pub(super) fn micros(d: Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX)
}

fn thin(row: &PgRow) -> Result<Thin, sqlx::Error> {
    Ok(Thin {
        house: House(row.try_get(0)?),
        id: row.try_get(1)?,
        destination: row.try_get(2)?,
        key: row.try_get::<Option<i64>, _>(3)?.map(KeyHash::number),
        size: row.try_get::<i32, _>(4)?.max(0) as u32,
        attempts: row.try_get::<i32, _>(5)?.max(0) as u32,
        claims: row.try_get::<i32, _>(6)?.max(0) as u32,
        version: row.try_get(7)?,
        max_attempts: row.try_get::<Option<i32>, _>(8)?.map(|n| n.max(1) as u32),
        before: row.try_get(9)?,
        due: row.try_get(10)?,
    })
}

fn thins(rows: &[PgRow]) -> Result<Vec<Thin>, Error> {
    Ok(rows.iter().map(thin).collect::<Result<_, _>>()?)
}

fn numbers(houses: &[House]) -> Vec<i32> {
    houses.iter().map(|h| h.0).collect()
}

fn houses_of(marks: &[Mark]) -> Vec<i32> {
    marks.iter().map(|m| m.house.0).collect()
}

fn afters_of(marks: &[Mark]) -> Vec<i64> {
    marks.iter().map(|m| m.after).collect()
}

/// A row of the log as an envelope; the attempt is filled in by the relay, and so is an edited destination.
fn envelope(row: &PgRow) -> Result<(i64, Result<Envelope, String>), sqlx::Error> {
    let id: i64 = row.try_get(0)?;
    let headers: Option<String> = row.try_get(7)?;
    let headers = match headers.as_deref().map(Headers::from_json) {
        None => Headers::new(),
        Some(Ok(h)) => h,
        Some(Err(e)) => return Ok((id, Err(format!("headers of this message are not a JSON object: {e}")))),
    };
    let created: i64 = row.try_get(8)?;
    Ok((
        id,
        Ok(Envelope {
            id,
            message_id: MessageId::from(row.try_get::<String, _>(1)?),
            kind: row.try_get(2)?,
            destination: row.try_get(3)?,
            key: row.try_get(4)?,
            payload: row.try_get(5)?,
            content_type: row.try_get(6)?,
            headers,
            created_at: std::time::UNIX_EPOCH + Duration::from_micros(created.max(0) as u64),
            attempt: 1,
        }),
    ))
}

impl Store for PostgresStore {
    fn kind(&self) -> &'static str {
        "postgres"
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
                    let houses: i32 = sqlx::query_scalar(self.tables.sql("SELECT houses FROM {meta}")).fetch_one(&mut *c).await?;
                    Ok((v, houses as u16))
                }
            }
        })
    }

    fn join<'a>(&'a self, instance: &'a str, coverage: &'a Coverage, lease: Duration) -> Reply<'a, ()> {
        let sql = self.tables.sql(
            "INSERT INTO {instance} (instance, lease_until, houses, run_houses) \
             VALUES ($1, clock_timestamp() + $2 * interval '1 microsecond', $3, $4)",
        );
        on!(self.lease, self.deadline, "join", |c| {
            let (takes, for_runs) = coverage.columns();
            sqlx::query(sql).bind(instance).bind(micros(lease)).bind(takes).bind(for_runs).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn renew<'a>(&'a self, instance: &'a str, lease: Duration) -> Reply<'a, Option<Membership>> {
        on!(self.lease, self.deadline, "lease renewal", |c| {
            let rows = sqlx::query(self.sql.renew.clone()).bind(instance).bind(micros(lease)).fetch_all(&mut *c).await?;
            let mut out = Membership::default();
            for row in &rows {
                if row.try_get::<i64, _>(3)? == 0 {
                    return Ok(None);
                }
                match row.try_get::<Option<i32>, _>(0)? {
                    Some(house) => out.houses.push((House(house), row.try_get(1)?, row.try_get(2)?)),
                    None => out.live.push(Live {
                        name: row.try_get(1)?,
                        left: Duration::from_micros(row.try_get::<i64, _>(2)?.max(0) as u64),
                        coverage: Coverage::of_columns(row.try_get(4)?, row.try_get(5)?),
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
            sqlx::raw_sql(self.sql.take_locks.clone()).execute(&mut *tx).await?;
            let take = sqlx::query(self.sql.take.clone()).bind(instance).bind(most as i64).bind(numbers(among));
            let rows = take.fetch_all(&mut *tx).await?;
            tx.commit().await?;
            let taken = |r: &PgRow| Ok(Taken { house: House(r.try_get(0)?), epoch: r.try_get(1)?, expired: r.try_get(2)? });
            Ok(rows.iter().map(taken).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn take_exactly<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, Exactly> {
        on!(self.lease, self.deadline, "taking houses for a run", |c| {
            let mut tx = c.begin().await?;
            sqlx::raw_sql(self.sql.take_locks.clone()).execute(&mut *tx).await?;
            let found: Vec<Wanted> =
                sqlx::query_as(self.tables.sql(WANTED)).bind(instance).bind(numbers(houses)).fetch_all(&mut *tx).await?;
            let answer = exactly(instance, houses, found);
            if let Exactly::Taken(_) = &answer {
                sqlx::query(self.tables.sql(TAKE_ALL)).bind(instance).bind(numbers(houses)).execute(&mut *tx).await?;
                tx.commit().await?;
            } else {
                tx.rollback().await?;
            }
            Ok(answer)
        })
    }

    fn release<'a>(&'a self, instance: &'a str, houses: &'a [House]) -> Reply<'a, ()> {
        let sql = self.tables.sql("UPDATE {house} SET owner = NULL WHERE owner = $1 AND house = ANY($2)");
        on!(self.lease, self.deadline, "releasing houses", |c| {
            let houses: Vec<i32> = houses.iter().map(|h| h.0).collect();
            sqlx::query(sql).bind(instance).bind(houses).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a self, instance: &'a str) -> Reply<'a, ()> {
        let sql = self.tables.sql(
            "WITH mine AS (UPDATE {house} SET owner = NULL WHERE owner = $1 RETURNING house) \
             DELETE FROM {instance} WHERE instance = $1 AND (SELECT count(*) FROM mine) >= 0",
        );
        on!(self.lease, self.deadline, "leaving", |c| {
            sqlx::query(sql).bind(instance).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn ends<'a>(&'a self, houses: &'a [House]) -> Reply<'a, Ends> {
        on!(self.work, self.deadline, "start of a run", |c| {
            let rows: Vec<(i32, i64, i64)> =
                sqlx::query_as(self.tables.sql(ENDS)).bind(numbers(houses)).fetch_all(&mut *c).await?;
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
            let rows = sqlx::query(self.sql.poll.clone())
                .bind(houses_of(marks))
                .bind(afters_of(marks))
                .bind(excluded)
                .bind(i64::from(limit))
                .fetch_all(&mut *c)
                .await?;
            let mut out = Poll::default();
            let mut ahead = Ahead::default();
            for row in &rows {
                if row.try_get::<Option<&str>, _>(2)?.is_some() {
                    ahead.push(thin(row)?);
                } else {
                    out.changes = row.try_get(9)?;
                    let (max_id, next_due) = (row.try_get(1)?, row.try_get(10)?);
                    out.houses.push(HousePoll { house: House(row.try_get(0)?), max_id, cut_off: None, next_due });
                }
            }
            let mut first = ahead.link(!excluded.is_empty());
            if !first.is_empty() {
                let known = self.passed.counts(out.changes);
                let passed = |t: &Thin| t.key.clone().filter(|_| known).map_or(0, |k| self.passed.after(&(t.house, k), t.id));
                let rows = sqlx::query_as(self.sql.before.clone())
                    .bind(first.iter().map(|t| t.house.0).collect::<Vec<_>>())
                    .bind(first.iter().map(|t| t.key.as_ref().map(|k| k.number)).collect::<Vec<_>>())
                    .bind(first.iter().map(|t| t.id).collect::<Vec<_>>())
                    .bind(first.iter().map(|t| passed(t)).collect::<Vec<_>>())
                    .fetch_all(&mut *c)
                    .await?;
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
            let rows = sqlx::query(self.sql.sweep.clone())
                .bind(houses_of(marks))
                .bind(afters_of(marks))
                .bind(marks.iter().map(|m| m.upto).collect::<Vec<_>>())
                .bind(excluded)
                .bind(i64::from(limit))
                .fetch_all(&mut *c)
                .await?;
            thins(&rows)
        })
    }

    fn due<'a>(&'a self, houses: &'a [House], after: (i64, i64), limit: u32, excluded: &'a [String]) -> Reply<'a, DuePage> {
        on!(self.work, self.deadline, "due read", |c| {
            let houses: Vec<i32> = houses.iter().map(|h| h.0).collect();
            let rows = sqlx::query(self.sql.due.clone())
                .bind(&houses)
                .bind(after.0)
                .bind(after.1)
                .bind(excluded)
                .bind(i64::from(limit))
                .fetch_all(&mut *c)
                .await?;
            let next_due = sqlx::query_scalar(self.sql.next_due.clone()).bind(&houses).fetch_one(&mut *c).await?;
            Ok(DuePage { rows: thins(&rows)?, next_due })
        })
    }

    fn of_keys<'a>(&'a self, keys: &'a [(House, KeyHash)], limit: u32) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "key read", |c| {
            let mut passed: Vec<i64> = keys.iter().map(|k| self.passed.after(k, i64::MAX)).collect();
            loop {
                let rows = sqlx::query(self.sql.of_keys.clone())
                    .bind(keys.iter().map(|k| k.0.0).collect::<Vec<_>>())
                    .bind(keys.iter().map(|k| k.1.number).collect::<Vec<_>>())
                    .bind(&passed)
                    .bind(i64::from(limit))
                    .fetch_all(&mut *c)
                    .await?;
                let changes = rows.first().map(|row| row.try_get(11)).transpose()?;
                if changes.is_some_and(|n| !self.passed.counts(n)) && passed.iter().any(|id| *id > 0) {
                    // An operator may have put a row back.
                    passed.fill(0);
                    continue;
                }
                let mut ahead = Ahead::default();
                for row in &rows {
                    ahead.push(thin(row)?);
                }
                break Ok(ahead.of_keys());
            }
        })
    }

    fn of_destination<'a>(&'a self, marks: &'a [Mark], destination: &'a str, limit: u32) -> Reply<'a, Vec<Thin>> {
        on!(self.work, self.deadline, "destination read", |c| {
            let rows = sqlx::query(self.sql.of_destination.clone())
                .bind(houses_of(marks))
                .bind(afters_of(marks))
                .bind(destination)
                .bind(i64::from(limit))
                .fetch_all(&mut *c)
                .await?;
            thins(&rows)
        })
    }

    fn load<'a>(&'a self, ids: &'a [i64]) -> Reply<'a, Vec<(i64, Result<Envelope, String>)>> {
        on!(self.work, self.deadline, "load", |c| {
            let (Some(low), Some(high)) = (ids.iter().min(), ids.iter().max()) else { return Ok(Vec::new()) };
            let mut rows = sqlx::query(self.sql.load.clone()).bind(low).bind(high).bind(ids).fetch_all(&mut *c).await?;
            if rows.len() < ids.len() {
                rows.extend(sqlx::query(self.sql.load_kept.clone()).bind(low).bind(high).bind(ids).fetch_all(&mut *c).await?);
            }
            Ok(rows.iter().map(envelope).collect::<Result<_, _>>()?)
        })
    }

    fn changes<'a>(&'a self, since: i64) -> Reply<'a, Vec<Change>> {
        let sql = self.tables.sql("SELECT house, row_id, key_hash FROM {audit} WHERE change > $1");
        on!(self.work, self.deadline, "change read", |c| {
            let rows = sqlx::query(sql).bind(since).fetch_all(&mut *c).await?;
            let change = |r: &PgRow| {
                Ok(Change {
                    house: House(r.try_get(0)?),
                    id: r.try_get(1)?,
                    key: r.try_get::<Option<i64>, _>(2)?.map(KeyHash::number),
                })
            };
            Ok(rows.iter().map(change).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn delivered<'a>(&'a self, instance: &'a str, done: &'a [Done]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "completion", |c| {
            Ok(sqlx::query_scalar(self.sql.delivered.clone())
                .bind(done.iter().map(|d| d.house.0).collect::<Vec<_>>())
                .bind(done.iter().map(|d| d.id).collect::<Vec<_>>())
                .bind(done.iter().map(|d| d.version).collect::<Vec<_>>())
                .bind(instance)
                .fetch_all(&mut *c)
                .await?)
        })
    }

    fn setback<'a>(&'a self, instance: &'a str, setbacks: &'a [Setback]) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "recording failures", |c| {
            Ok(sqlx::query_scalar(self.sql.setback.clone())
                .bind(setbacks.iter().map(|s| s.row.house.0).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.row.id).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.row.version).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.attempts as i32).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.claims as i32).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.wait.map(micros)).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.leave_key).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.error.as_str()).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.attempt.as_ref().map(|a| a.outcome)).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.attempt.as_ref().and_then(|a| a.response.as_deref())).collect::<Vec<_>>())
                .bind(setbacks.iter().map(|s| s.attempt.as_ref().map_or(0, |a| a.took.as_millis() as i32)).collect::<Vec<_>>())
                .bind(instance)
                .fetch_all(&mut *c)
                .await?)
        })
    }

    fn claim<'a>(&'a self, instance: &'a str, rows: &'a [Done], lease: Duration) -> Reply<'a, Vec<i64>> {
        on!(self.work, self.deadline, "claim", |c| {
            Ok(sqlx::query_scalar(self.sql.claim.clone())
                .bind(rows.iter().map(|d| d.house.0).collect::<Vec<_>>())
                .bind(rows.iter().map(|d| d.id).collect::<Vec<_>>())
                .bind(rows.iter().map(|d| d.version).collect::<Vec<_>>())
                .bind(instance)
                .bind(micros(lease))
                .fetch_all(&mut *c)
                .await?)
        })
    }

    fn upkeep(&self) -> Reply<'_, Upkeep> {
        on!(self.work, self.deadline, "upkeep", |c| {
            let (created, ahead) = super::upkeep::upkeep(c, &self.tables).await?;
            // An instance's row is only needed while its houses may still name it.
            sqlx::query(self.tables.sql(
                "DELETE FROM {instance} i WHERE i.lease_until < clock_timestamp() - interval '1 day' \
                        AND NOT EXISTS (SELECT FROM {house} h WHERE h.owner = i.instance)",
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
            super::upkeep::resize(c, &self.tables, houses).await
        })
    }

    fn listen<'a>(&'a self, heard: &'a (dyn Fn() + Send + Sync)) -> Reply<'a, ()> {
        Box::pin(async move {
            let mut listener = PgListener::connect_with(&self.work).await?;
            listener.listen(&super::migrate::channel(&self.tables)).await?;
            // Something may have been published before LISTEN took effect.
            heard();
            loop {
                // None: the connection broke and was made again; what was said meanwhile is lost, so look.
                listener.try_recv().await?;
                heard();
            }
        })
    }
}
