//! What a dashboard asks about the tables as a whole.

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use crate::store::{HouseLag, InstanceRow, MOST_LATENCIES, MOST_RECEIPTS, OverviewStore, Progress, Reply, Seen, on};

// Plan: one end of each primary key; of the log, of each partition.
const ENDS: &str = "SELECT (SELECT max(id) FROM {receipt}), (SELECT max(id) FROM {attempt}), (SELECT min(id) FROM {message}), \
            (SELECT max(id) FROM {message})";

// Plan: the primary keys from the newest down to what was seen.
const DONE: &str = "SELECT coalesce((SELECT sum(cardinality(r.ids)) FROM (SELECT ids FROM {receipt} WHERE id > $1 AND id <= $2 \
                      ORDER BY id DESC LIMIT $5) r), 0)::bigint, \
            (SELECT count(*) FROM (SELECT FROM {attempt} WHERE id > $3 AND id <= $4 ORDER BY id DESC LIMIT $5) a)";

// Plan: the same, then one row of the log each, by its primary key.
const LATENCIES: &str = "SELECT (extract(epoch FROM r.at - m.created_at) * 1000)::bigint \
       FROM (SELECT at, low FROM {receipt} WHERE id > $1 AND id <= $2 ORDER BY id DESC LIMIT $3) r \
      CROSS JOIN LATERAL (SELECT created_at, deliver_at FROM {message} WHERE id = r.low LIMIT 1) m WHERE m.deliver_at IS NULL";

// A row for each instance of the last day, and the houses: both are few.
const INSTANCES: &str = "SELECT i.instance, (extract(epoch FROM i.started_at) * 1000)::bigint, \
            (extract(epoch FROM i.lease_until - clock_timestamp()) * 1000)::bigint, i.houses, i.run_houses, \
            (SELECT count(*) FROM {house} h WHERE h.owner = i.instance) FROM {instance} i ORDER BY i.instance LIMIT 1000";

// Plan: pending read once and grouped; then, for each house, one row of the log (or of what outlived it) by its primary key.
const LAG: &str = "SELECT h.house, h.owner, coalesce(i.lease_until > clock_timestamp(), false), h.epoch, coalesce(p.pending, 0), coalesce(p.failed, 0), \
            (extract(epoch FROM clock_timestamp() - coalesce((SELECT created_at FROM {message} m WHERE m.id = p.low), \
                (SELECT created_at FROM {kept} k WHERE k.id = p.low))) * 1000)::bigint \
       FROM {house} h LEFT JOIN {instance} i ON i.instance = h.owner \
       LEFT JOIN (SELECT house, count(*) FILTER (WHERE status <> 'FAILED') AS pending, count(*) FILTER (WHERE status = 'FAILED') AS failed, \
                         min(id) FILTER (WHERE status <> 'FAILED') AS low FROM {pending} GROUP BY house) p ON p.house = h.house ORDER BY h.house";

impl OverviewStore for PostgresStore {
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
            let row = |r: &PgRow| {
                Ok(InstanceRow {
                    instance: r.try_get(0)?,
                    started_ms: r.try_get(1)?,
                    lease_left_ms: r.try_get(2)?,
                    houses: r.try_get(3)?,
                    run_houses: r.try_get(4)?,
                    owned: r.try_get(5)?,
                })
            };
            Ok(rows.iter().map(row).collect::<Result<_, sqlx::Error>>()?)
        })
    }

    fn lag(&self) -> Reply<'_, Vec<HouseLag>> {
        on!(self.work, self.deadline, "lag of houses", |c| {
            let rows = sqlx::query(self.tables.sql(LAG)).fetch_all(&mut *c).await?;
            let row = |r: &PgRow| {
                Ok(HouseLag {
                    house: r.try_get(0)?,
                    owner: r.try_get(1)?,
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
