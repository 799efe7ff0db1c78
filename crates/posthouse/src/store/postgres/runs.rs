//! Runs of groups.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::relay::{PostgresStore, micros};
use crate::RunCounts;
use crate::store::{
    GroupRow, NewRun, Reply, RunFilter, RunRequest, RunRow, RunStatus, RunStore, RunWatch, TIDY, UNANSWERED, checked, on, stored,
    stored_error,
};

macro_rules! us {
    ($time:literal) => {
        concat!("(extract(epoch FROM ", $time, ") * 1000000)::bigint")
    };
}

macro_rules! at {
    ($us:literal) => {
        concat!("'epoch'::timestamptz + ", $us, " * interval '1 microsecond'")
    };
}

/// Whether the instance of the run `r` lives.
macro_rules! lives {
    () => {
        "EXISTS (SELECT FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > clock_timestamp())"
    };
}

// Plan: the open requests by the partial index run_open; groups and instances are few.
const WATCH: &str = concat!(
    "SELECT 0, NULL::bigint, NULL::text, NULL::text, ",
    us!("clock_timestamp()"),
    ", NULL::bigint, NULL::bigint \
     UNION ALL SELECT 1, NULL, group_name, NULL, ",
    us!("fired_at"),
    ", ",
    us!("paused_at"),
    ", ",
    us!("stopped_at"),
    " FROM {group} \
     UNION ALL SELECT 2, id, group_name, cause, ",
    us!("due_at"),
    ", ",
    us!("requested_at"),
    ", NULL FROM {run} WHERE status = 'REQUESTED' \
     UNION ALL SELECT 3, NULL, instance, NULL, NULL, NULL, NULL FROM {instance} WHERE lease_until > clock_timestamp()"
);

/// A due time never moves back, whoever comes last.
macro_rules! seen {
    ($from:literal) => {
        concat!(
            "INSERT INTO {group} AS g (group_name, fired_at) ",
            $from,
            " ON CONFLICT (group_name) DO UPDATE SET fired_at = greatest(g.fired_at, EXCLUDED.fired_at)"
        )
    };
}

// An instance has one run of a group at a time: one that seems to be going was never known to have begun.
const INSERT: &str = concat!(
    "WITH seen AS (",
    seen!("SELECT $1, 'epoch'::timestamptz + $7 * interval '1 microsecond' WHERE $7 IS NOT NULL"),
    "), stale AS (UPDATE {run} SET status = 'LOST', ended_at = clock_timestamp() \
        WHERE $3 = 'RUNNING' AND status = 'RUNNING' AND group_name = $1 AND instance = $4) \
     INSERT INTO {run} (group_name, cause, status, instance, due_at, request, started_at, ended_at, error) \
       SELECT $1, $2, $3, $4, ",
    at!("$5"),
    ", $6, CASE WHEN $3 = 'RUNNING' THEN clock_timestamp() END, CASE WHEN $3 <> 'RUNNING' THEN clock_timestamp() END, $8 RETURNING id"
);

// A run that was taken for lost may still end.
const END: &str = "UPDATE {run} SET status = $2, ended_at = clock_timestamp(), messages = $3, delivered = $4, retried = $5, failed = $6, \
        error = $7 WHERE id = $1 AND status IN ('RUNNING', 'LOST')";

const CLOSE: &str = "UPDATE {run} SET status = $2, ended_at = clock_timestamp(), messages = $3, delivered = $4, retried = $5, failed = $6, \
        error = $7 WHERE id = $1 AND status = 'REQUESTED'";

const UNFINISHED: &str =
    "SELECT EXISTS (SELECT FROM {run} WHERE status = 'RUNNING' AND group_name = $1 AND instance IS DISTINCT FROM $2)";

const FOLLOW: &str = concat!(
    "INSERT INTO {run} (group_name, cause, status, due_at) SELECT $3, 'after', 'REQUESTED', ",
    at!("$4"),
    " WHERE NOT EXISTS (SELECT FROM {run} r WHERE r.status = 'RUNNING' AND r.group_name = $1 AND r.instance IS DISTINCT FROM $2 AND ",
    lives!(),
    ")"
);

// Plan: the primary key backwards, (group_name, id) backwards, or the primary key and run_request together.
const LIST: &str = concat!(
    "SELECT r.id, r.group_name, r.cause, CASE WHEN r.status = 'RUNNING' AND NOT ",
    lives!(),
    " THEN 'LOST' ELSE r.status END, r.instance, r.request, ",
    us!("r.due_at"),
    ", ",
    us!("r.requested_at"),
    ", ",
    us!("r.started_at"),
    ", ",
    us!("r.ended_at"),
    ", r.messages, r.delivered, r.retried, r.failed, r.error FROM {run} r WHERE r.id < $1%WHICH% ORDER BY r.id DESC LIMIT $2"
);

const LOST: &str = "UPDATE {run} r SET status = 'LOST', ended_at = clock_timestamp() \
     WHERE r.status = 'RUNNING' AND r.started_at < clock_timestamp() - interval '1 minute' \
       AND NOT EXISTS (SELECT FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > clock_timestamp() - interval '1 minute')";

const GIVE_UP: &str = "UPDATE {run} SET status = 'DISCARDED', ended_at = clock_timestamp(), error = $1 \
     WHERE status = 'REQUESTED' AND requested_at < clock_timestamp() - interval '1 hour'";

// Plan: the first rows of the primary key, however many are old.
const PURGE: &str = "DELETE FROM {run} WHERE id IN (SELECT id FROM (SELECT id, status, requested_at FROM {run} ORDER BY id LIMIT $2) first \
     WHERE first.requested_at < clock_timestamp() - $1 * interval '1 microsecond' AND first.status NOT IN ('REQUESTED', 'RUNNING'))";

fn row(r: &PgRow) -> Result<RunRow, sqlx::Error> {
    Ok(RunRow {
        id: r.try_get(0)?,
        group: r.try_get(1)?,
        cause: r.try_get(2)?,
        status: RunStatus::parse(r.try_get(3)?),
        instance: r.try_get(4)?,
        request: r.try_get(5)?,
        due_us: r.try_get(6)?,
        requested_us: r.try_get(7)?,
        started_us: r.try_get(8)?,
        ended_us: r.try_get(9)?,
        messages: r.try_get(10)?,
        delivered: r.try_get(11)?,
        retried: r.try_get(12)?,
        failed: r.try_get(13)?,
        error: r.try_get(14)?,
    })
}

impl PostgresStore {
    fn insert_run<'a>(&'a self, run: &'a NewRun<'a>, status: RunStatus, why: Option<&'a str>) -> Reply<'a, i64> {
        on!(self.work, self.deadline, "recording a run", |c| {
            let id = sqlx::query_scalar(self.tables.sql(INSERT))
                .bind(run.group)
                .bind(run.cause.as_str())
                .bind(status.as_str())
                .bind(run.instance)
                .bind(run.due_us)
                .bind(run.request)
                .bind(run.sees_to())
                .bind(stored_error(why))
                .fetch_one(&mut *c)
                .await?;
            Ok(id)
        })
    }

    fn finish_run<'a>(
        &'a self,
        sql: &'static str,
        id: i64,
        status: RunStatus,
        counts: RunCounts,
        error: Option<&'a str>,
    ) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "recording the end of a run", |c| {
            let done = sqlx::query(self.tables.sql(sql))
                .bind(id)
                .bind(status.as_str())
                .bind(stored(counts.messages))
                .bind(stored(counts.delivered))
                .bind(stored(counts.retried))
                .bind(stored(counts.failed))
                .bind(stored_error(error))
                .execute(&mut *c)
                .await?;
            Ok(done.rows_affected() == 1)
        })
    }
}

impl RunStore for PostgresStore {
    fn watch(&self) -> Reply<'_, RunWatch> {
        on!(self.work, self.deadline, "looking at groups", |c| {
            let mut out = RunWatch::default();
            for r in &sqlx::query(self.tables.sql(WATCH)).fetch_all(&mut *c).await? {
                match r.try_get::<i32, _>(0)? {
                    0 => out.now_us = r.try_get(4)?,
                    1 => out.groups.push(GroupRow {
                        group: r.try_get(2)?,
                        fired_us: r.try_get(4)?,
                        paused_us: r.try_get(5)?,
                        stopped_us: r.try_get(6)?,
                    }),
                    2 => out.requests.push(RunRequest {
                        id: r.try_get(1)?,
                        group: r.try_get(2)?,
                        after: r.try_get::<&str, _>(3)? == "after",
                        due_us: r.try_get(4)?,
                        requested_us: r.try_get(5)?,
                    }),
                    _ => out.live.push(r.try_get(2)?),
                }
            }
            Ok(out)
        })
    }

    fn begin<'a>(&'a self, run: &'a NewRun<'a>) -> Reply<'a, i64> {
        self.insert_run(run, RunStatus::Running, None)
    }

    fn discard<'a>(&'a self, run: &'a NewRun<'a>, why: &'a str) -> Reply<'a, i64> {
        self.insert_run(run, RunStatus::Discarded, Some(why))
    }

    fn end<'a>(&'a self, id: i64, status: RunStatus, counts: RunCounts, error: Option<&'a str>) -> Reply<'a, bool> {
        self.finish_run(END, id, status, counts, error)
    }

    fn close<'a>(&'a self, request: i64, status: RunStatus, counts: RunCounts, error: Option<&'a str>) -> Reply<'a, bool> {
        self.finish_run(CLOSE, request, status, counts, error)
    }

    fn seen<'a>(&'a self, group: &'a str, due_us: i64) -> Reply<'a, ()> {
        const SEEN: &str = seen!("VALUES ($1, 'epoch'::timestamptz + $2 * interval '1 microsecond')");
        on!(self.work, self.deadline, "marking a due time", |c| {
            sqlx::query(self.tables.sql(SEEN)).bind(checked(group)?).bind(due_us).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn unfinished<'a>(&'a self, group: &'a str, instance: &'a str) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "looking for unfinished runs", |c| {
            Ok(sqlx::query_scalar(self.tables.sql(UNFINISHED)).bind(group).bind(instance).fetch_one(&mut *c).await?)
        })
    }

    fn request<'a>(&'a self, group: &'a str) -> Reply<'a, i64> {
        const REQUEST: &str = "INSERT INTO {run} (group_name, cause, status) VALUES ($1, 'manual', 'REQUESTED') RETURNING id";
        on!(self.work, self.deadline, "asking for a run", |c| {
            Ok(sqlx::query_scalar(self.tables.sql(REQUEST)).bind(checked(group)?).fetch_one(&mut *c).await?)
        })
    }

    fn follow<'a>(&'a self, group: &'a str, instance: &'a str, child: &'a str, due_us: Option<i64>) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "asking for the next group's run", |c| {
            let query = sqlx::query(self.tables.sql(FOLLOW)).bind(group).bind(instance).bind(child).bind(due_us);
            Ok(query.execute(&mut *c).await?.rows_affected() == 1)
        })
    }

    fn stop<'a>(&'a self, group: &'a str) -> Reply<'a, ()> {
        const STOP: &str = "INSERT INTO {group} (group_name, stopped_at) VALUES ($1, clock_timestamp()) \
             ON CONFLICT (group_name) DO UPDATE SET stopped_at = EXCLUDED.stopped_at";
        on!(self.work, self.deadline, "stopping a group", |c| {
            sqlx::query(self.tables.sql(STOP)).bind(checked(group)?).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn pause<'a>(&'a self, group: &'a str, paused: bool) -> Reply<'a, bool> {
        // Of a group that nothing is known of, only a pause is a change.
        const PAUSE: &str = "INSERT INTO {group} AS g (group_name, paused_at) SELECT $1, CASE WHEN $2 THEN clock_timestamp() END \
             WHERE $2 OR EXISTS (SELECT FROM {group} WHERE group_name = $1) \
             ON CONFLICT (group_name) DO UPDATE SET paused_at = EXCLUDED.paused_at WHERE (g.paused_at IS NULL) = $2";
        on!(self.work, self.deadline, "pausing a group", |c| {
            let done = sqlx::query(self.tables.sql(PAUSE)).bind(checked(group)?).bind(paused).execute(&mut *c).await?;
            Ok(done.rows_affected() == 1)
        })
    }

    fn list<'a>(&'a self, filter: &'a RunFilter) -> Reply<'a, Vec<RunRow>> {
        on!(self.work, self.deadline, "run list", |c| {
            let which = match (&filter.request, &filter.group) {
                (Some(_), _) => " AND (r.id = $3 OR r.request = $3)",
                (None, Some(_)) => " AND r.group_name = $3",
                (None, None) => "",
            };
            let sql = self.tables.sql(&LIST.replace("%WHICH%", which));
            let query = sqlx::query(sql).bind(filter.before.unwrap_or(i64::MAX)).bind(i64::from(filter.limit));
            let query = match (filter.request, &filter.group) {
                (Some(request), _) => query.bind(request),
                (None, Some(group)) => query.bind(group),
                (None, None) => query,
            };
            Ok(query.fetch_all(&mut *c).await?.iter().map(row).collect::<Result<_, _>>()?)
        })
    }

    fn tidy(&self, older: Duration) -> Reply<'_, u64> {
        on!(self.work, self.deadline, "removing old runs", |c| {
            sqlx::query(self.tables.sql(LOST)).execute(&mut *c).await?;
            sqlx::query(self.tables.sql(GIVE_UP)).bind(UNANSWERED).execute(&mut *c).await?;
            let gone = sqlx::query(self.tables.sql(PURGE)).bind(micros(older)).bind(TIDY as i64).execute(&mut *c).await?;
            Ok(gone.rows_affected())
        })
    }
}
