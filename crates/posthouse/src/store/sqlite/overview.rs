//! What a dashboard asks about the tables as a whole.

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::relay::{text, text_or_null};
use super::{SqliteStore, now};
use crate::store::{HouseLag, InstanceRow, MOST_LATENCIES, MOST_RECEIPTS, OverviewStore, Progress, Reply, Seen, on};

// Plan: one end of each primary key.
const ENDS: &str = "SELECT (SELECT max(id) FROM {receipt}), (SELECT max(id) FROM {attempt}), (SELECT min(id) FROM {message}), \
            (SELECT max(id) FROM {message})";

// Plan: the primary keys from the newest down to what was seen.
const DONE: &str = "SELECT coalesce((SELECT sum(json_array_length(r.ids)) FROM (SELECT ids FROM {receipt} WHERE id > ?1 AND id <= ?2 \
                      ORDER BY id DESC LIMIT ?5) r), 0), \
            (SELECT count(*) FROM (SELECT id FROM {attempt} WHERE id > ?3 AND id <= ?4 ORDER BY id DESC LIMIT ?5) a)";

// Plan: the same, then one row of the log each, by its primary key.
const LATENCIES: &str = "SELECT r.at - m.created_at FROM (SELECT at, low FROM {receipt} WHERE id > ?1 AND id <= ?2 ORDER BY id DESC LIMIT ?3) r \
      CROSS JOIN {message} m ON m.id = r.low WHERE m.deliver_at IS NULL";

// A row for each instance of the last day, and the houses: both are few.
const INSTANCES: &str = concat!(
    "SELECT i.instance, i.started_at, i.lease_until - ",
    now!(),
    ", i.houses, i.run_houses, (SELECT count(*) FROM {house} h WHERE h.owner = i.instance) FROM {instance} i ORDER BY i.instance LIMIT 1000"
);

// Plan: pending read once and grouped; then, for each house, one row of the log by its primary key.
const LAG: &str = concat!(
    "SELECT h.house, h.owner, coalesce(i.lease_until > ",
    now!(),
    ", 0), h.epoch, coalesce(p.pending, 0), coalesce(p.failed, 0), ",
    now!(),
    " - (SELECT created_at FROM {message} m WHERE m.id = p.low) FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner \
       LEFT JOIN (SELECT house, sum(status <> 'FAILED') AS pending, sum(status = 'FAILED') AS failed, \
                         min(CASE WHEN status <> 'FAILED' THEN id END) AS low FROM {pending} GROUP BY house) p ON p.house = h.house ORDER BY h.house"
);

impl OverviewStore for SqliteStore {
    fn progress(&self, since: Option<Seen>) -> Reply<'_, Progress> {
        on!(self.work, self.deadline, "progress", |c| {
            let ends = sqlx::query(self.tables.sql(ENDS)).fetch_one(&mut *c).await?;
            let end = |n: usize| ends.try_get::<Option<i64>, _>(n);
            let seen = Seen { receipt: end(0)?.unwrap_or(0), attempt: end(1)?.unwrap_or(0) };
            let mut out = Progress { seen, log: end(2)?.zip(end(3)?), ..Progress::default() };
            let Some(since) = since else { return Ok(out) };
            (out.delivered, out.failed_attempts) = sqlx::query_as(self.tables.sql(DONE))
                .bind(since.receipt)
                .bind(seen.receipt)
                .bind(since.attempt)
                .bind(seen.attempt)
                .bind(MOST_RECEIPTS)
                .fetch_one(&mut *c)
                .await?;
            out.latencies_ms = sqlx::query_scalar(self.tables.sql(LATENCIES))
                .bind(since.receipt)
                .bind(seen.receipt)
                .bind(MOST_LATENCIES)
                .fetch_all(&mut *c)
                .await?;
            Ok(out)
        })
    }

    fn instances(&self) -> Reply<'_, Vec<InstanceRow>> {
        on!(self.work, self.deadline, "instances", |c| {
            let rows = sqlx::query(self.tables.sql(INSTANCES)).fetch_all(&mut *c).await?;
            let row = |r: &SqliteRow| {
                Ok(InstanceRow {
                    instance: text(r, 0)?,
                    started_ms: r.try_get(1)?,
                    lease_left_ms: r.try_get(2)?,
                    houses: text_or_null(r, 3)?,
                    run_houses: text_or_null(r, 4)?,
                    owned: r.try_get(5)?,
                })
            };
            Ok(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn lag(&self) -> Reply<'_, Vec<HouseLag>> {
        on!(self.work, self.deadline, "lag of houses", |c| {
            let rows = sqlx::query(self.tables.sql(LAG)).fetch_all(&mut *c).await?;
            let row = |r: &SqliteRow| {
                Ok(HouseLag {
                    house: r.try_get(0)?,
                    owner: text_or_null(r, 1)?,
                    alive: r.try_get(2)?,
                    epoch: r.try_get(3)?,
                    pending: r.try_get(4)?,
                    failed: r.try_get(5)?,
                    oldest_ms: r.try_get::<Option<i64>, _>(6)?.map(|ms| ms.max(0)),
                })
            };
            Ok(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?)
        })
    }
}
