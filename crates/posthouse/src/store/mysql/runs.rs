//! Runs of groups.

use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{Connection, Row};

use super::relay::{MySqlStore, int, micros, text, text_or_null};
use crate::RunCounts;
use crate::store::{
    GroupRow, NewRun, Reply, RunFilter, RunRequest, RunRow, RunStatus, RunStore, RunWatch, TIDY, UNANSWERED, checked, on, stored,
    stored_error,
};

macro_rules! us {
    ($time:literal) => {
        concat!("TIMESTAMPDIFF(MICROSECOND, '1970-01-01', ", $time, ")")
    };
}

/// A moment that is given in microseconds; NULL stays NULL.
macro_rules! at {
    () => {
        "TIMESTAMP'1970-01-01 00:00:00.000000' + INTERVAL ? MICROSECOND"
    };
}

/// Whether the instance of the run `r` lives.
macro_rules! lives {
    () => {
        "EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > UTC_TIMESTAMP(6))"
    };
}

// Plan: the open requests by the index run_open; groups and instances are few.
const WATCH: &str = concat!(
    "SELECT 0 AS kind, NULL AS id, NULL AS name, NULL AS cause, ",
    us!("UTC_TIMESTAMP(6)"),
    " AS a, NULL AS b, NULL AS c UNION ALL SELECT 1, NULL, group_name, NULL, ",
    us!("fired_at"),
    ", ",
    us!("paused_at"),
    ", ",
    us!("stopped_at"),
    " FROM {group} UNION ALL SELECT 2, id, group_name, cause, ",
    us!("due_at"),
    ", ",
    us!("requested_at"),
    ", NULL FROM {run} WHERE status = 'REQUESTED' \
     UNION ALL SELECT 3, NULL, instance, NULL, NULL, NULL, NULL FROM {instance} WHERE lease_until > UTC_TIMESTAMP(6)"
);

/// A due time never moves back, whoever comes last.
const SEEN: &str = concat!(
    "INSERT INTO {group} (group_name, fired_at) VALUES (?, ",
    at!(),
    ") ON DUPLICATE KEY UPDATE fired_at = GREATEST(COALESCE(fired_at, VALUES(fired_at)), VALUES(fired_at))"
);

// An instance has one run of a group at a time: one that seems to be going was never known to have begun.
const STALE: &str = "UPDATE {run} SET status = 'LOST', ended_at = UTC_TIMESTAMP(6) \
     WHERE status = 'RUNNING' AND group_name = ? AND instance = ?";

const INSERT: &str = concat!(
    "INSERT INTO {run} (group_name, cause, status, instance, due_at, request, started_at, ended_at, error) VALUES (?, ?, ?, ?, ",
    at!(),
    ", ?, CASE WHEN ? THEN UTC_TIMESTAMP(6) END, CASE WHEN ? THEN UTC_TIMESTAMP(6) END, ?)"
);

macro_rules! ended {
    () => {
        "UPDATE {run} SET status = ?, ended_at = UTC_TIMESTAMP(6), messages = ?, delivered = ?, retried = ?, failed = ?, error = ? \
          WHERE id = ? AND status "
    };
}

// A run that was taken for lost may still end.
const END: &str = concat!(ended!(), "IN ('RUNNING', 'LOST')");

const CLOSE: &str = concat!(ended!(), "= 'REQUESTED'");

const UNFINISHED: &str =
    "SELECT EXISTS (SELECT 1 FROM {run} WHERE status = 'RUNNING' AND group_name = ? AND NOT (instance <=> ?))";

// The inner table: MySQL doesn't read from the table that it inserts into otherwise.
const FOLLOW: &str = concat!(
    "INSERT INTO {run} (group_name, cause, status, due_at) SELECT ?, 'after', 'REQUESTED', ",
    at!(),
    " FROM (SELECT COUNT(*) AS others FROM {run} r WHERE r.status = 'RUNNING' AND r.group_name = ? AND NOT (r.instance <=> ?) AND ",
    lives!(),
    ") going WHERE going.others = 0"
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
    ", r.messages, r.delivered, r.retried, r.failed, r.error FROM {run} r WHERE r.id < ?%WHICH% ORDER BY r.id DESC LIMIT ?"
);

const LOST: &str = "UPDATE {run} r SET r.status = 'LOST', r.ended_at = UTC_TIMESTAMP(6) \
     WHERE r.status = 'RUNNING' AND r.started_at < UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE \
       AND NOT EXISTS (SELECT 1 FROM {instance} i WHERE i.instance = r.instance AND i.lease_until > UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE)";

const GIVE_UP: &str = "UPDATE {run} SET status = 'DISCARDED', ended_at = UTC_TIMESTAMP(6), error = ? \
     WHERE status = 'REQUESTED' AND requested_at < UTC_TIMESTAMP(6) - INTERVAL 1 HOUR";

// Plan: the first rows of the primary key, however many are old.
const PURGE: &str = "DELETE r FROM {run} r JOIN (SELECT id FROM {run} ORDER BY id LIMIT ?) first ON first.id = r.id \
     WHERE r.requested_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND AND r.status NOT IN ('REQUESTED', 'RUNNING')";

fn int_or_null(r: &MySqlRow, column: usize) -> Result<Option<i64>, sqlx::Error> {
    r.try_get(column)
}

fn row(r: &MySqlRow) -> Result<RunRow, sqlx::Error> {
    Ok(RunRow {
        id: int(r, 0)?,
        group: text(r, 1)?,
        cause: text(r, 2)?,
        status: RunStatus::parse(&text(r, 3)?),
        instance: text_or_null(r, 4)?,
        request: int_or_null(r, 5)?,
        due_us: int_or_null(r, 6)?,
        requested_us: int(r, 7)?,
        started_us: int_or_null(r, 8)?,
        ended_us: int_or_null(r, 9)?,
        messages: int(r, 10)?,
        delivered: int(r, 11)?,
        retried: int(r, 12)?,
        failed: int(r, 13)?,
        error: text_or_null(r, 14)?,
    })
}

impl MySqlStore {
    fn insert_run<'a>(&'a self, run: &'a NewRun<'a>, status: RunStatus, why: Option<&'a str>) -> Reply<'a, i64> {
        on!(self.work, self.deadline, "recording a run", |c| {
            let mut tx = c.begin().await?;
            if let Some(due_us) = run.sees_to() {
                sqlx::query(self.tables.sql(SEEN)).bind(run.group.as_bytes()).bind(due_us).execute(&mut *tx).await?;
            }
            if status == RunStatus::Running {
                sqlx::query(self.tables.sql(STALE))
                    .bind(run.group.as_bytes())
                    .bind(run.instance.as_bytes())
                    .execute(&mut *tx)
                    .await?;
            }
            let done = sqlx::query(self.tables.sql(INSERT))
                .bind(run.group.as_bytes())
                .bind(run.cause.as_str().as_bytes())
                .bind(status.as_str().as_bytes())
                .bind(run.instance.as_bytes())
                .bind(run.due_us)
                .bind(run.request)
                .bind(status == RunStatus::Running)
                .bind(status != RunStatus::Running)
                .bind(stored_error(why))
                .execute(&mut *tx)
                .await?;
            tx.commit().await?;
            Ok(done.last_insert_id() as i64)
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
                .bind(status.as_str().as_bytes())
                .bind(stored(counts.messages))
                .bind(stored(counts.delivered))
                .bind(stored(counts.retried))
                .bind(stored(counts.failed))
                .bind(stored_error(error))
                .bind(id)
                .execute(&mut *c)
                .await?;
            Ok(done.rows_affected() == 1)
        })
    }
}

impl RunStore for MySqlStore {
    fn watch(&self) -> Reply<'_, RunWatch> {
        on!(self.work, self.deadline, "looking at groups", |c| {
            let mut out = RunWatch::default();
            for r in &sqlx::query(self.tables.sql(WATCH)).fetch_all(&mut *c).await? {
                match int(r, 0)? {
                    0 => out.now_us = int(r, 4)?,
                    1 => out.groups.push(GroupRow {
                        group: text(r, 2)?,
                        fired_us: int_or_null(r, 4)?,
                        paused_us: int_or_null(r, 5)?,
                        stopped_us: int_or_null(r, 6)?,
                    }),
                    2 => out.requests.push(RunRequest {
                        id: int(r, 1)?,
                        group: text(r, 2)?,
                        after: text(r, 3)? == "after",
                        due_us: int_or_null(r, 4)?,
                        requested_us: int(r, 5)?,
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
            sqlx::query(self.tables.sql(SEEN)).bind(checked(group)?.as_bytes()).bind(due_us).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn unfinished<'a>(&'a self, group: &'a str, instance: &'a str) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "looking for unfinished runs", |c| {
            let query = sqlx::query_scalar(self.tables.sql(UNFINISHED)).bind(group.as_bytes()).bind(instance.as_bytes());
            Ok(query.fetch_one(&mut *c).await?)
        })
    }

    fn request<'a>(&'a self, group: &'a str) -> Reply<'a, i64> {
        const REQUEST: &str = "INSERT INTO {run} (group_name, cause, status) VALUES (?, 'manual', 'REQUESTED')";
        on!(self.work, self.deadline, "asking for a run", |c| {
            let done = sqlx::query(self.tables.sql(REQUEST)).bind(checked(group)?.as_bytes()).execute(&mut *c).await?;
            Ok(done.last_insert_id() as i64)
        })
    }

    fn follow<'a>(&'a self, group: &'a str, instance: &'a str, child: &'a str, due_us: Option<i64>) -> Reply<'a, bool> {
        on!(self.work, self.deadline, "asking for the next group's run", |c| {
            let done = sqlx::query(self.tables.sql(FOLLOW))
                .bind(child.as_bytes())
                .bind(due_us)
                .bind(group.as_bytes())
                .bind(instance.as_bytes())
                .execute(&mut *c)
                .await?;
            Ok(done.rows_affected() == 1)
        })
    }

    fn stop<'a>(&'a self, group: &'a str) -> Reply<'a, ()> {
        const STOP: &str = "INSERT INTO {group} (group_name, stopped_at) VALUES (?, UTC_TIMESTAMP(6)) \
             ON DUPLICATE KEY UPDATE stopped_at = VALUES(stopped_at)";
        on!(self.work, self.deadline, "stopping a group", |c| {
            sqlx::query(self.tables.sql(STOP)).bind(checked(group)?.as_bytes()).execute(&mut *c).await?;
            Ok(())
        })
    }

    fn pause<'a>(&'a self, group: &'a str, paused: bool) -> Reply<'a, bool> {
        const PAUSE: &str = "UPDATE {group} SET paused_at = CASE WHEN ? THEN UTC_TIMESTAMP(6) END \
             WHERE group_name = ? AND (paused_at IS NULL) = ?";
        on!(self.work, self.deadline, "pausing a group", |c| {
            let known = "INSERT IGNORE INTO {group} (group_name) VALUES (?)";
            sqlx::query(self.tables.sql(known)).bind(checked(group)?.as_bytes()).execute(&mut *c).await?;
            let done =
                sqlx::query(self.tables.sql(PAUSE)).bind(paused).bind(group.as_bytes()).bind(paused).execute(&mut *c).await?;
            Ok(done.rows_affected() == 1)
        })
    }

    fn list<'a>(&'a self, filter: &'a RunFilter) -> Reply<'a, Vec<RunRow>> {
        on!(self.work, self.deadline, "run list", |c| {
            let which = match (&filter.request, &filter.group) {
                (Some(_), _) => " AND (r.id = ? OR r.request = ?)",
                (None, Some(_)) => " AND r.group_name = ?",
                (None, None) => "",
            };
            let sql = self.tables.sql(&LIST.replace("%WHICH%", which));
            let query = sqlx::query(sql).bind(filter.before.unwrap_or(i64::MAX));
            let query = match (filter.request, &filter.group) {
                (Some(request), _) => query.bind(request).bind(request),
                (None, Some(group)) => query.bind(group.as_bytes()),
                (None, None) => query,
            };
            Ok(query.bind(filter.limit).fetch_all(&mut *c).await?.iter().map(row).collect::<Result<_, _>>()?)
        })
    }

    fn tidy(&self, older: Duration) -> Reply<'_, u64> {
        on!(self.work, self.deadline, "removing old runs", |c| {
            sqlx::query(self.tables.sql(LOST)).execute(&mut *c).await?;
            sqlx::query(self.tables.sql(GIVE_UP)).bind(UNANSWERED).execute(&mut *c).await?;
            let gone = sqlx::query(self.tables.sql(PURGE)).bind(TIDY).bind(micros(older)).execute(&mut *c).await?;
            Ok(gone.rows_affected())
        })
    }
}
