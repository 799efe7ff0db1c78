//! What the two database files say. Nothing here is counted in memory: a process that was killed has no memory.

use std::path::Path;

use serde::Serialize;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row, SqliteConnection};

use super::{Failure, inventory, shop, sqlite};

/// Messages by status, in the words that people see.
const STATUSES: &str = "SELECT status, count(*) FROM posthouse_outbox GROUP BY status";

const CALLS: &str = "SELECT count(*), count(fault), count(*) FILTER (WHERE outcome = 'duplicate') FROM inventory.call";

/// Committed orders without an effect.
const LOST: &str =
    "SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT 1 FROM inventory.processed p WHERE p.message_id = o.message_id)";

/// Effects without a committed order.
const PHANTOM: &str =
    "SELECT count(*) FROM inventory.processed p WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.message_id = p.message_id)";

/// Orders without a message, and messages without an order.
const UNPAIRED: &str = "SELECT (SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT 1 FROM posthouse_message m WHERE m.message_id = o.message_id)) \
    + (SELECT count(*) FROM posthouse_message m WHERE NOT EXISTS (SELECT 1 FROM orders o WHERE o.message_id = m.message_id))";

/// Messages whose first call came before an earlier order of the same customer had its effect. Stricter than the order of
/// the effects: not even a call that fails may overtake.
const OUT_OF_ORDER: &str = "SELECT count(*) FROM (SELECT customer, order_id, min(id) AS first FROM inventory.call GROUP BY message_id) c \
    WHERE EXISTS (SELECT 1 FROM inventory.processed p WHERE p.customer = c.customer AND p.order_id < c.order_id AND p.call > c.first)";

/// Pieces by which the stock differs from what the committed orders must have left of it.
const STOCK_OFF: &str = "SELECT coalesce(sum(abs(s.at_first - s.pieces - coalesce(o.pieces, 0))), 0) FROM inventory.stock s \
    LEFT JOIN (SELECT sku, sum(pieces) AS pieces FROM orders GROUP BY sku) o ON o.sku = s.sku";

/// Both files, open for reading.
#[derive(Debug)]
pub(super) struct Books {
    db: SqliteConnection,
}

/// How things stand during the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Glance {
    pub(super) committed: u64,
    pub(super) rolled_back: u64,
    pub(super) pending: u64,
    pub(super) sent: u64,
    pub(super) failed: u64,
    pub(super) calls: u64,
    pub(super) faults: u64,
    pub(super) duplicates: u64,
    pub(super) applied: u64,
}

/// What there is to compare at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Totals {
    pub(super) orders_committed: u64,
    pub(super) orders_rolled_back: u64,
    pub(super) messages: u64,
    /// Not delivered at the end.
    pub(super) messages_pending: u64,
    pub(super) messages_failed: u64,
    /// Orders without a message and messages without an order.
    pub(super) unpaired: u64,
    pub(super) calls_received: u64,
    pub(super) failures_injected: u64,
    pub(super) duplicates_absorbed: u64,
    pub(super) effects_applied: u64,
    pub(super) lost: u64,
    pub(super) phantom: u64,
    pub(super) out_of_order: u64,
    /// Pieces by which the stock is wrong.
    pub(super) stock_off: u64,
}

impl Books {
    pub(super) async fn open(dir: &Path) -> Result<Self, Failure> {
        let mut db = sqlite(&shop::file(dir)).connect().await?;
        let inventory = inventory::file(dir);
        sqlx::query("ATTACH DATABASE ? AS inventory").bind(inventory.to_string_lossy()).execute(&mut db).await?;
        Ok(Self { db })
    }

    async fn number(&mut self, sql: &'static str) -> Result<u64, Failure> {
        let n: i64 = sqlx::query_scalar(sql).fetch_one(&mut self.db).await?;
        Ok(n.unsigned_abs())
    }

    async fn count(&mut self, table: &'static str) -> Result<u64, Failure> {
        // Only this file's own names come here.
        let n: i64 = sqlx::query_scalar(AssertSqlSafe(format!("SELECT count(*) FROM {table}"))).fetch_one(&mut self.db).await?;
        Ok(n.unsigned_abs())
    }

    pub(super) async fn glance(&mut self) -> Result<Glance, Failure> {
        let mut glance = Glance {
            committed: self.count("orders").await?,
            rolled_back: self.count("rolled_back").await?,
            applied: self.count("inventory.processed").await?,
            ..Glance::default()
        };
        for row in sqlx::query(STATUSES).fetch_all(&mut self.db).await? {
            let n = row.try_get::<i64, _>(1)?.unsigned_abs();
            match row.try_get(0)? {
                "SENT" => glance.sent += n,
                "FAILED" => glance.failed += n,
                // SENDING too: it isn't delivered.
                _ => glance.pending += n,
            }
        }
        (glance.calls, glance.faults, glance.duplicates) = self.calls().await?;
        Ok(glance)
    }

    async fn calls(&mut self) -> Result<(u64, u64, u64), Failure> {
        let (calls, faults, duplicates): (i64, i64, i64) = sqlx::query_as(CALLS).fetch_one(&mut self.db).await?;
        Ok((calls.unsigned_abs(), faults.unsigned_abs(), duplicates.unsigned_abs()))
    }

    /// Adds up. Nobody writes any more by then.
    pub(super) async fn totals(&mut self) -> Result<Totals, Failure> {
        let glance = self.glance().await?;
        Ok(Totals {
            orders_committed: glance.committed,
            orders_rolled_back: glance.rolled_back,
            messages: self.count("posthouse_message").await?,
            messages_pending: glance.pending,
            messages_failed: glance.failed,
            unpaired: self.number(UNPAIRED).await?,
            calls_received: glance.calls,
            failures_injected: glance.faults,
            duplicates_absorbed: glance.duplicates,
            effects_applied: glance.applied,
            lost: self.number(LOST).await?,
            phantom: self.number(PHANTOM).await?,
            out_of_order: self.number(OUT_OF_ORDER).await?,
            stock_off: self.number(STOCK_OFF).await?,
        })
    }

    pub(super) async fn close(self) -> Result<(), Failure> {
        Ok(self.db.close().await?)
    }
}
