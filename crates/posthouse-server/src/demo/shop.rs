//! The order service: an order and its message are one transaction, so there is never one without the other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use posthouse::{ErrorKind, Message, MessageId, Outbox};
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{Sqlite, SqlitePool};
use tokio::sync::watch;

use super::{Cook, DESTINATION, Failure, MOST_PIECES, Order, SKUS, sqlite};

const TABLES: &str = "
CREATE TABLE orders (
    id         INTEGER PRIMARY KEY,
    customer   TEXT NOT NULL,
    sku        TEXT NOT NULL,
    pieces     INTEGER NOT NULL,
    message_id TEXT NOT NULL UNIQUE
) STRICT;
-- Written after the rollback, in a transaction of its own: the rolled back one leaves no trace.
CREATE TABLE rolled_back (id INTEGER PRIMARY KEY, message_id TEXT NOT NULL UNIQUE) STRICT;
";

/// One in this many orders is rolled back on purpose.
const ROLLED_BACK: u64 = 10;

/// All orders come within about this time, or sooner if there are few.
const OPENING_HOURS: Duration = Duration::from_secs(6);

/// The longest mean wait between two orders.
const QUIET: Duration = Duration::from_millis(20);

/// How often an order is tried while other processes write to the file.
const TRIES: u32 = 20;

/// Orders placed so far, the rolled back ones included.
pub(super) type Placed = u64;

pub(super) fn file(dir: &Path) -> PathBuf {
    dir.join("shop.db")
}

/// Opens the shop's file, as the shop and the relay do.
pub(super) async fn open(dir: &Path) -> Result<Outbox<Sqlite>, Failure> {
    let pool = SqlitePoolOptions::new().max_connections(2).connect_with(sqlite(&file(dir))).await?;
    Ok(Outbox::new(pool))
}

/// The order service.
#[derive(Debug)]
pub(super) struct Shop {
    outbox: Outbox<Sqlite>,
    rng: fastrand::Rng,
    orders: u64,
    cook: Option<Cook>,
}

impl Shop {
    /// A shop on a new file.
    pub(super) async fn new(dir: &Path, orders: u64, seed: u64, cook: Option<Cook>) -> Result<Self, Failure> {
        let outbox = open(dir).await?;
        outbox.migrate().await?;
        sqlx::raw_sql(TABLES).execute(outbox.pool()).await?;
        Ok(Self { outbox, rng: fastrand::Rng::with_seed(seed), orders, cook })
    }

    /// Takes all orders and closes.
    pub(super) async fn take_orders(mut self, placed: watch::Sender<Placed>) -> Result<(), Failure> {
        // Few enough that most have several orders on their way at once, so that order matters.
        let customers = (self.orders / 20).clamp(4, 40);
        let pace = OPENING_HOURS.div_f64(self.orders as f64).min(QUIET);
        for id in 1..=self.orders {
            // Customers come when they like: part of the play, nothing waits for it.
            tokio::time::sleep(pace.mul_f64(2.0 * self.rng.f64())).await;
            let order = Order {
                id,
                customer: format!("customer-{}", self.rng.u64(1..=customers)),
                sku: SKUS[self.rng.usize(..SKUS.len())].to_owned(),
                pieces: self.rng.u32(1..=MOST_PIECES),
            };
            let fails = self.rng.u64(..ROLLED_BACK) == 0;
            self.place(&order, fails).await?;
            placed.send_replace(id);
        }
        Ok(())
    }

    /// For closing: files are removed when nobody has them open.
    pub(super) fn pool(&self) -> SqlitePool {
        self.outbox.pool().clone()
    }

    async fn place(&self, order: &Order, fails: bool) -> Result<(), Failure> {
        let message_id = MessageId::generate();
        let mut tries = 0;
        while let Err(e) = self.try_place(order, &message_id, fails).await {
            tries += 1;
            // Another process was writing all the time: nothing of the order was written, so it can be placed again.
            if e.kind() != ErrorKind::Conflict || tries == TRIES {
                return Err(e.into());
            }
        }
        if fails {
            sqlx::query("INSERT INTO rolled_back (id, message_id) VALUES (?, ?)")
                .bind(order.id as i64)
                .bind(message_id.as_str())
                .execute(self.outbox.pool())
                .await?;
            if self.cook == Some(Cook::Phantom) {
                self.outbox.publish_alone(message(order, &message_id)).await?;
            }
        }
        Ok(())
    }

    async fn try_place(&self, order: &Order, message_id: &MessageId, fails: bool) -> Result<(), posthouse::Error> {
        let mut tx = self.outbox.begin().await?;
        sqlx::query("INSERT INTO orders (id, customer, sku, pieces, message_id) VALUES (?, ?, ?, ?, ?)")
            .bind(order.id as i64)
            .bind(&order.customer)
            .bind(&order.sku)
            .bind(order.pieces)
            .bind(message_id.as_str())
            .execute(&mut *tx)
            .await?;
        self.outbox.publish(&mut tx, message(order, message_id)).await?;
        if fails { tx.rollback().await } else { self.outbox.commit(tx).await }
    }
}

/// Keyed by customer: what one customer orders is deducted in the order of placing.
fn message(order: &Order, id: &MessageId) -> Message {
    Message::to(DESTINATION).typed("order.placed.v1").id(id.clone()).key(&order.customer).json(order)
}
