//! What a dashboard asks about the tables as a whole.

use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::MySqlStore;
use super::relay::{int, text, text_or_null};
use crate::store::{HouseLag, InstanceRow, MOST_LATENCIES, MOST_RECEIPTS, OverviewStore, Progress, Reply, Seen, on};

// Plan: one end of each primary key; of the log, of each partition.
const ENDS: &str = "SELECT (SELECT MAX(id) FROM {receipt}), (SELECT MAX(id) FROM {attempt}), (SELECT MIN(id) FROM {message}), \
            (SELECT MAX(id) FROM {message})";

// Plan: the primary keys from the newest down to what was seen.
const DONE: &str = "SELECT CAST(COALESCE((SELECT SUM(JSON_LENGTH(r.ids)) FROM (SELECT ids FROM {receipt} WHERE id > ? AND id <= ? \
                      ORDER BY id DESC LIMIT ?) r), 0) AS SIGNED), \
            (SELECT COUNT(*) FROM (SELECT id FROM {attempt} WHERE id > ? AND id <= ? ORDER BY id DESC LIMIT ?) a)";

// Plan: the same, then one row of the log each, by its primary key.
const LATENCIES: &str = "SELECT TIMESTAMPDIFF(MICROSECOND, m.created_at, r.at) DIV 1000 \
       FROM (SELECT at, low FROM {receipt} WHERE id > ? AND id <= ? ORDER BY id DESC LIMIT ?) r \
      STRAIGHT_JOIN {message} m FORCE INDEX (PRIMARY) ON m.id = r.low WHERE m.deliver_at IS NULL";

// A row for each instance of the last day, and its houses by the index on owner: both are few.
const INSTANCES: &str = "SELECT i.instance, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', i.started_at) DIV 1000, \
            TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), i.lease_until) DIV 1000, i.houses, i.run_houses, \
            (SELECT COUNT(*) FROM {house} h WHERE h.owner = i.instance) FROM {instance} i ORDER BY i.instance LIMIT 1000";

// Plan: pending read once and grouped; then, for each house, one row of the log (or of what outlived it) by its primary key.
const LAG: &str = "SELECT h.house, h.owner, CAST(COALESCE(i.lease_until > UTC_TIMESTAMP(6), 0) AS SIGNED), h.epoch, COALESCE(p.pending, 0), \
            COALESCE(p.failed, 0), TIMESTAMPDIFF(MICROSECOND, COALESCE((SELECT created_at FROM {message} m WHERE m.id = p.low), \
                (SELECT created_at FROM {kept} k WHERE k.id = p.low)), UTC_TIMESTAMP(6)) DIV 1000 \
       FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner \
       LEFT JOIN (SELECT house, CAST(SUM(status <> 'FAILED') AS SIGNED) AS pending, CAST(SUM(status = 'FAILED') AS SIGNED) AS failed, \
                         MIN(CASE WHEN status <> 'FAILED' THEN id END) AS low FROM {pending} GROUP BY house) p ON p.house = h.house ORDER BY h.house";

impl OverviewStore for MySqlStore {
    fn progress(&self, since: Option<Seen>) -> Reply<'_, Progress> {
        on!(self.work, self.deadline, "progress", |c| {
            let ends = sqlx::query(self.tables.sql(ENDS)).fetch_one(&mut *c).await?;
            let end = |n: usize| ends.try_get::<Option<i64>, _>(n);
            let seen = Seen { receipt: end(0)?.unwrap_or(0), attempt: end(1)?.unwrap_or(0) };
            let mut out = Progress { seen, log: end(2)?.zip(end(3)?), ..Progress::default() };
            let Some(since) = since else { return Ok(out) };
            let done = sqlx::query(self.tables.sql(DONE))
                .bind(since.receipt)
                .bind(seen.receipt)
                .bind(MOST_RECEIPTS)
                .bind(since.attempt)
                .bind(seen.attempt)
                .bind(MOST_RECEIPTS)
                .fetch_one(&mut *c)
                .await?;
            (out.delivered, out.failed_attempts) = (int(&done, 0)?, int(&done, 1)?);
            let latencies = sqlx::query(self.tables.sql(LATENCIES))
                .bind(since.receipt)
                .bind(seen.receipt)
                .bind(MOST_LATENCIES)
                .fetch_all(&mut *c)
                .await?;
            out.latencies_ms = latencies.iter().map(|r| int(r, 0)).collect::<Result<_, _>>()?;
            Ok(out)
        })
    }

    fn instances(&self) -> Reply<'_, Vec<InstanceRow>> {
        on!(self.work, self.deadline, "instances", |c| {
            let rows = sqlx::query(self.tables.sql(INSTANCES)).fetch_all(&mut *c).await?;
            let row = |r: &MySqlRow| {
                Ok(InstanceRow {
                    instance: text(r, 0)?,
                    started_ms: int(r, 1)?,
                    lease_left_ms: int(r, 2)?,
                    houses: text_or_null(r, 3)?,
                    run_houses: text_or_null(r, 4)?,
                    owned: int(r, 5)?,
                })
            };
            Ok(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn lag(&self) -> Reply<'_, Vec<HouseLag>> {
        on!(self.work, self.deadline, "lag of houses", |c| {
            let rows = sqlx::query(self.tables.sql(LAG)).fetch_all(&mut *c).await?;
            let row = |r: &MySqlRow| {
                Ok(HouseLag {
                    house: r.try_get(0)?,
                    owner: text_or_null(r, 1)?,
                    alive: int(r, 2)? == 1,
                    epoch: int(r, 3)?,
                    pending: int(r, 4)?,
                    failed: int(r, 5)?,
                    oldest_ms: r.try_get::<Option<i64>, _>(6)?.map(|ms| ms.max(0)),
                })
            };
            Ok(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?)
        })
    }
}
