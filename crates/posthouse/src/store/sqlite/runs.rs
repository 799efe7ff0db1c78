//! Runs of groups. Times are milliseconds here, and microseconds outside.

use std::time::Duration;

use sqlx::sqlite::SqliteRow;
use sqlx::{Connection, Row};

use super::now;
use super::relay::{SqliteStore, millis, text, text_or_null};
use crate::RunCounts;
use crate::store::{
    GroupRow, NewRun, Reply, RunFilter, RunRequest, RunRow, RunStatus, RunStore, RunWatch, TIDY, UNANSWERED, checked, on, stored,
    stored_error,
};

/// Whether the instance of the run `r` lives.
macro_rules! lives {
    () => {
        concat!("EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > ", now!(), ")")
    };
}

/// Written out, so that the partial index run_open is used.
macro_rules! open {
    () => {
        "status IN ('REQUESTED', 'RUNNING')"
    };
}

// Plan: the open requests by the partial index run_open; groups and instances are few.
const WATCH: &str = concat!(
    "SELECT 0, NULL, NULL, NULL, ",
    now!(),
    ", NULL, NULL UNION ALL SELECT 1, NULL, group_name, NULL, fired_at, paused_at, stopped_at FROM {group} \
     UNION ALL SELECT 2, id, group_name, cause, due_at, requested_at, NULL FROM {run} WHERE ",
    open!(),
    " AND status = 'REQUESTED' UNION ALL SELECT 3, NULL, instance, NULL, NULL, NULL, NULL FROM {instance} WHERE lease_until > ",
    now!()
);

/// A due time never moves back, whoever comes last.
const SEEN: &str = "INSERT INTO {group} (group_name, fired_at) VALUES (?1, ?2) \
     ON CONFLICT (group_name) DO UPDATE SET fired_at = max(coalesce(fired_at, excluded.fired_at), excluded.fired_at)";

// An instance has one run of a group at a time: one that seems to be going was never known to have begun.
const STALE: &str = concat!(
    "UPDATE {run} SET status = 'LOST', ended_at = ",
    now!(),
    " WHERE ",
    open!(),
    " AND status = 'RUNNING' AND group_name = ?1 AND instance = ?2"
);

const INSERT: &str = concat!(
    "INSERT INTO {run} (group_name, cause, status, instance, due_at, request, started_at, ended_at, error) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, CASE WHEN ?3 = 'RUNNING' THEN ",
    now!(),
    " END, CASE WHEN ?3 <> 'RUNNING' THEN ",
    now!(),
    " END, ?7)"
);

macro_rules! ended {
    () => {
        concat!(
            "UPDATE {run} SET status = ?2, ended_at = ",
            now!(),
            ", messages = ?3, delivered = ?4, retried = ?5, failed = ?6, error = ?7 WHERE id = ?1 AND status "
        )
    };
}

// A run that was taken for lost may still end.
const END: &str = concat!(ended!(), "IN ('RUNNING', 'LOST')");

const CLOSE: &str = concat!(ended!(), "= 'REQUESTED'");

const UNFINISHED: &str = concat!(
    "SELECT EXISTS (SELECT 1 FROM {run} WHERE ",
    open!(),
    " AND status = 'RUNNING' AND group_name = ?1 AND instance IS NOT ?2)"
);

const FOLLOW: &str = concat!(
    "INSERT INTO {run} (group_name, cause, status, due_at) SELECT ?3, 'after', 'REQUESTED', ?4 \
     WHERE NOT EXISTS (SELECT 1 FROM {run} r WHERE r.status IN ('REQUESTED', 'RUNNING') AND r.status = 'RUNNING' \
        AND r.group_name = ?1 AND r.instance IS NOT ?2 AND ",
    lives!(),
    ")"
);

// Plan: the primary key backwards, (group_name, id) backwards, or the primary key and run_request together.
const LIST: &str = concat!(
    "SELECT r.id, r.group_name, r.cause, CASE WHEN r.status = 'RUNNING' AND NOT ",
    lives!(),
    " THEN 'LOST' ELSE r.status END, r.instance, r.request, r.due_at * 1000, r.requested_at * 1000, r.started_at * 1000, \
     r.ended_at * 1000, r.messages, r.delivered, r.retried, r.failed, r.error FROM {run} r WHERE r.id < ?1%WHICH% \
     ORDER BY r.id DESC LIMIT ?2"
);

const LOST: &str = concat!(
    "UPDATE {run} AS r SET status = 'LOST', ended_at = ",
    now!(),
    " WHERE r.status IN ('REQUESTED', 'RUNNING') AND r.status = 'RUNNING' AND r.started_at < ",
    now!(),
    " - 60000 AND NOT EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > ",
    now!(),
    " - 60000)"
);

const GIVE_UP: &str = concat!(
    "UPDATE {run} SET status = 'DISCARDED', ended_at = ",
    now!(),
    ", error = ?1 WHERE ",
    open!(),
    " AND status = 'REQUESTED' AND requested_at < ",
    now!(),
    " - 3600000"
);

// Plan: the first rows of the primary key, however many are old.
const PURGE: &str = concat!(
    "DELETE FROM {run} WHERE id IN (SELECT id FROM (SELECT id, status, requested_at FROM {run} ORDER BY id LIMIT ?2) \
     WHERE requested_at < ",
    now!(),
    " - ?1 AND status NOT IN ('REQUESTED', 'RUNNING'))"
);

fn row(r: &SqliteRow) -> Result<RunRow, sqlx::Error> {
    Ok(RunRow {
        id: r.try_get(0)?,
        group: text(r, 1)?,
        cause: text(r, 2)?,
        status: RunStatus::parse(&text(r, 3)?),
        instance: text_or_null(r, 4)?,
        request: r.try_get(5)?,
        due_us: r.try_get(6)?,
        requested_us: r.try_get(7)?,
        started_us: r.try_get(8)?,
        ended_us: r.try_get(9)?,
        messages: r.try_get(10)?,
        delivered: r.try_get(11)?,
        retried: r.try_get(12)?,
        failed: r.try_get(13)?,
        error: text_or_null(r, 14)?,
    })
}

fn us(r: &SqliteRow, column: usize) -> Result<Option<i64>, sqlx::Error> {
    Ok(r.try_get::<Option<i64>, _>(column)?.map(|ms| ms.saturating_mul(1_000)))
}

fn ms(us: i64) -> i64 {
    us.div_euclid(1_000)
}

impl SqliteStore {
    fn insert_run<'a>(&'a self, run: &'a NewRun<'a>, status: RunStatus, why: Option<&'a str>) -> Reply<'a, i64> {
        on!(self.work, self.deadline, "recording a run", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            if let Some(due_us) = run.sees_to() {
                sqlx::query(self.tables.sql(SEEN)).bind(run.group).bind(ms(due_us)).execute(&mut *tx).await?;
            }
            if status == RunStatus::Running {
                sqlx::query(self.tables.sql(STALE)).bind(run.group).bind(run.instance).execute(&mut *tx).await?;
            }
            let done = sqlx::query(self.tables.sql(INSERT))
                .bind(run.group)
                .bind(run.cause.as_str())
                .bind(status.as_str())
                .bind(run.instance)
                .bind(run.due_us.map(ms))
                .bind(run.request)
                .bind(stored_error(why))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(done.last_insert_rowid())
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

impl RunStore for SqliteStore {
    fn watch(&self) -> Reply<'_, RunWatch> {
        on!(self.work, self.deadline, "looking at groups", |c| {
            let mut out = RunWatch::default();
            for r in &sqlx::query(self.tables.sql(WATCH)).fetch_all(&mut *c).await? {
                match r.try_get::<i64, _>(0)? {
                    0 => out.now_us = us(r, 4)?.unwrap_or_default(),
                    1 => out.groups.push(GroupRow {
                        group: text(r, 2)?,
                        fired_us: us(r, 4)?,
                        paused_us: us(r, 5)?,
                        stopped_us: us(r, 6)?,
                    }),
                    2 => out.requests.push(RunRequest {
                        id: r.try_get(1)?,
                        group: text(r, 2)?,
                        after: text(r, 3)? == "after",
                        due_us: us(r, 4)?,
                        requested_us: us(r, 5)?.unwrap_or_default(),
                    }),
                    _ => out.live.push(text(r, 2)?),
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
        on!(self.work, self.deadline, "marking a due time", |c| {
            sqlx::query(self.tables.sql(SEEN)).bind(checked(group)?).bind(ms(due_us)).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn unfinished<'a>(&'a self, group: &'a str, instance: &'a str) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "looking for unfinished runs", |c| {
            Ok(sqlx::query_scalar(self.tables.sql(UNFINISHED)).bind(group).bind(instance).fetch_one(&mut *c).await?)
        })
    }

    fn request<'a>(&'a self, group: &'a str) -> Reply<'a, i64> {
        const REQUEST: &str = "INSERT INTO {run} (group_name, cause, status) VALUES (?1, 'manual', 'REQUESTED')";
        on!(self.work, self.deadline, "asking for a run", |c| {
            Ok(sqlx::query(self.tables.sql(REQUEST)).bind(checked(group)?).execute(&mut *c).await?.last_insert_rowid())
        })
    }

    fn follow<'a>(&'a self, group: &'a str, instance: &'a str, child: &'a str, due_us: Option<i64>) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "asking for the next group's run", |c| {
            let query = sqlx::query(self.tables.sql(FOLLOW)).bind(group).bind(instance).bind(child).bind(due_us.map(ms));
            Ok(query.execute(&mut *c).await?.rows_affected() == 1)
        })
    }

    fn stop<'a>(&'a self, group: &'a str) -> Reply<'a, ()> {
        const STOP: &str = concat!(
            "INSERT INTO {group} (group_name, stopped_at) VALUES (?1, ",
            now!(),
            ") ON CONFLICT (group_name) DO UPDATE SET stopped_at = excluded.stopped_at"
        );
        on!(self.work, self.deadline, "stopping a group", |c| {
            sqlx::query(self.tables.sql(STOP)).bind(checked(group)?).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn pause<'a>(&'a self, group: &'a str, paused: bool) -> Reply<'a, bool> {
        const PAUSE: &str = concat!(
            "UPDATE {group} SET paused_at = CASE WHEN ?2 THEN ",
            now!(),
            " END WHERE group_name = ?1 AND (paused_at IS NULL) = ?2"
        );
        on!(self.work, self.deadline, "pausing a group", |c| {
            let mut tx = c.begin_with(super::WRITE).await?;
            let known = "INSERT INTO {group} (group_name) VALUES (?1) ON CONFLICT (group_name) DO NOTHING";
            sqlx::query(self.tables.sql(known)).bind(checked(group)?).execute(&mut *tx).await?;
            let done = sqlx::query(self.tables.sql(PAUSE)).bind(group).bind(paused).execute(&mut *tx).await?;
            tx.commit().await?;
            Ok(done.rows_affected() == 1)
        })
    }

    fn list<'a>(&'a self, filter: &'a RunFilter) -> Reply<'a, Vec<RunRow>> {
        on!(self.work, self.deadline, "run list", |c| {
            let which = match (&filter.request, &filter.group) {
                (Some(_), _) => " AND (r.id = ?3 OR r.request = ?3)",
                (None, Some(_)) => " AND r.group_name = ?3",
                (None, None) => "",
            };
            let sql = self.tables.sql(&LIST.replace("%WHICH%", which));
            let query = sqlx::query(sql).bind(filter.before.unwrap_or(i64::MAX)).bind(filter.limit);
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
            let gone = sqlx::query(self.tables.sql(PURGE)).bind(millis(older)).bind(TIDY as i64).execute(&mut *c).await?;
            Ok(gone.rows_affected())
        })
    }
}
