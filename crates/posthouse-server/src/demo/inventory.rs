//! The inventory service: a receiver that keeps its own books right although its calls come twice and it fails a third of them.
//!
//! The effect and the id of the message that caused it are one transaction, so a message has one effect however often it comes.
//! Everything it is called with is written down, the failures it was told to play included.

use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::relay::SEND_TIMEOUT;
use super::{Cook, Failure, MOST_PIECES, Order, SKUS, child, sqlite};

const TABLES: &str = "
CREATE TABLE IF NOT EXISTS stock (
    sku      TEXT PRIMARY KEY,
    at_first INTEGER NOT NULL,
    pieces   INTEGER NOT NULL CHECK (pieces >= 0)
) STRICT;
-- The effects, by the message that caused them; call says in which order they came.
CREATE TABLE IF NOT EXISTS processed (
    message_id TEXT PRIMARY KEY,
    order_id   INTEGER NOT NULL,
    customer   TEXT NOT NULL,
    call       INTEGER NOT NULL UNIQUE
) STRICT;
CREATE INDEX IF NOT EXISTS processed_customer ON processed (customer, order_id);
-- Every call, and what it was answered with when that was a failure on purpose.
CREATE TABLE IF NOT EXISTS call (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL,
    order_id   INTEGER NOT NULL,
    customer   TEXT NOT NULL,
    outcome    TEXT NOT NULL CHECK (outcome IN ('refused', 'applied', 'duplicate', 'dropped')),
    fault      TEXT
) STRICT;
CREATE INDEX IF NOT EXISTS call_message ON call (message_id);
";

/// Said by the parent: apply the next call, but don't answer it.
pub(super) const HOLD: &str = "hold";

/// A hanging call is answered when nobody waits any more.
const HANG: Duration = SEND_TIMEOUT.saturating_mul(2);

/// What a call's work takes, in milliseconds.
const WORK: std::ops::Range<u64> = 5..25;

/// How long it tries to get its port back after a restart.
const PORT_PATIENCE: Duration = Duration::from_secs(5);

/// What the inventory's process reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum InventoryReport {
    /// It takes calls at this port.
    Listening(u16),
    /// So many effects, since it was started.
    Applied(u64),
    /// The call that was to be held: it is applied, and its caller waits.
    Held { order: u64 },
}

/// How a call fails, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    ErrorBefore,
    BusyBefore,
    ErrorAfter,
    HangBefore,
    HangAfter,
    /// Held for the parent, which kills the caller meanwhile.
    Held,
}

impl Fault {
    /// A third of all calls fail. Depends on nothing but its arguments, so that a seed gives the same failures
    /// whatever the timing of a run is.
    fn of(seed: u64, order: u64, nth: u64) -> Option<Self> {
        // Odd constants spread the arguments over all bits, or neighbours would draw alike.
        let mixed = seed ^ order.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ nth.wrapping_mul(0xd1b5_4a32_d192_ed03);
        match fastrand::Rng::with_seed(mixed).u32(..60) {
            0..=7 => Some(Self::ErrorBefore),
            8..=11 => Some(Self::BusyBefore),
            12..=17 => Some(Self::ErrorAfter),
            18 => Some(Self::HangBefore),
            19 => Some(Self::HangAfter),
            _ => None,
        }
    }

    /// Nothing was done when it fails.
    fn is_before(self) -> bool {
        matches!(self, Self::ErrorBefore | Self::BusyBefore | Self::HangBefore)
    }

    fn hangs(self) -> bool {
        matches!(self, Self::HangBefore | Self::HangAfter | Self::Held)
    }

    fn status(self) -> StatusCode {
        match self {
            Self::ErrorBefore | Self::ErrorAfter => StatusCode::INTERNAL_SERVER_ERROR,
            Self::BusyBefore | Self::HangBefore | Self::HangAfter | Self::Held => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::ErrorBefore => "500 before",
            Self::BusyBefore => "503 before",
            Self::ErrorAfter => "500 after",
            Self::HangBefore => "hang before",
            Self::HangAfter => "hang after",
            Self::Held => "held",
        }
    }
}

pub(super) fn file(dir: &Path) -> PathBuf {
    dir.join("inventory.db")
}

/// Work for the clerk.
#[derive(Debug)]
enum Work {
    Call { message_id: String, order: Order, answer: oneshot::Sender<Option<Fault>> },
    Hold,
}

/// Receives until the parent closes stdin.
pub(super) async fn run(dir: &Path, port: u16, seed: u64, cook: Option<Cook>) -> Result<(), Failure> {
    let mut parent = child::parent();
    let mut db = sqlite(&file(dir)).connect().await?;
    sqlx::raw_sql(TABLES).execute(&mut db).await?;
    // More than all orders can ask for; whatever a restart finds stays.
    let enough = 100_000 * i64::from(MOST_PIECES);
    for sku in SKUS {
        sqlx::query("INSERT INTO stock (sku, at_first, pieces) VALUES (?, ?, ?) ON CONFLICT DO NOTHING")
            .bind(sku)
            .bind(enough)
            .bind(enough)
            .execute(&mut db)
            .await?;
    }
    let listener = listen(port).await?;
    let port = listener.local_addr().map_err(Failure::io("can't tell the port"))?.port();
    child::say(&InventoryReport::Listening(port));

    let (to_clerk, work) = mpsc::channel(64);
    let clerk = Clerk { db, seed, cook, hold: false, applied: 0 };
    let app = Router::new().route("/deduct", post(deduct)).with_state(to_clerk.clone());
    tokio::select! {
        served = axum::serve(listener, app) => served.map_err(Failure::io("can't take calls")),
        ended = clerk.run(work) => ended,
        () = async {
            while let Some(line) = parent.recv().await {
                if line == HOLD && to_clerk.send(Work::Hold).await.is_err() {
                    break;
                }
            }
        } => Ok(()),
    }
}

/// Binds the port. After a restart another program may have it for a moment: it was open to all meanwhile.
async fn listen(port: u16) -> Result<TcpListener, Failure> {
    let until = tokio::time::Instant::now() + PORT_PATIENCE;
    loop {
        match TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse && tokio::time::Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(e) => return Err(Failure::io(format!("can't listen at 127.0.0.1:{port}"))(e)),
        }
    }
}

async fn deduct(State(clerk): State<mpsc::Sender<Work>>, headers: HeaderMap, Json(order): Json<Order>) -> StatusCode {
    let Some(message_id) = headers.get("posthouse-message-id").and_then(|id| id.to_str().ok()) else {
        return StatusCode::BAD_REQUEST;
    };
    // What a service like this does besides its books.
    tokio::time::sleep(Duration::from_millis(fastrand::u64(WORK))).await;
    let (answer, answered) = oneshot::channel();
    let work = Work::Call { message_id: message_id.to_owned(), order, answer };
    if clerk.send(work).await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    match answered.await {
        Ok(None) => StatusCode::NO_CONTENT,
        Ok(Some(fault)) => {
            if fault.hangs() {
                tokio::time::sleep(HANG).await;
            }
            fault.status()
        }
        // Not written down: not confirmed.
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Writes the books, one call after the other. A task of its own: a caller that hangs up can't leave a transaction half done.
struct Clerk {
    db: SqliteConnection,
    seed: u64,
    cook: Option<Cook>,
    hold: bool,
    applied: u64,
}

impl Clerk {
    async fn run(mut self, mut work: mpsc::Receiver<Work>) -> Result<(), Failure> {
        while let Some(work) = work.recv().await {
            match work {
                Work::Hold => self.hold = true,
                Work::Call { message_id, order, answer } => {
                    let fault = self.book(&message_id, &order).await?;
                    // The caller may have hung up; what is written stays.
                    let _ = answer.send(fault);
                }
            }
        }
        Ok(())
    }

    async fn book(&mut self, message_id: &str, order: &Order) -> Result<Option<Fault>, Failure> {
        let mut tx = self.db.begin_with("BEGIN IMMEDIATE").await?;
        let nth: i64 =
            sqlx::query_scalar("SELECT count(*) FROM call WHERE message_id = ?").bind(message_id).fetch_one(&mut *tx).await?;
        let fault = if self.hold { Some(Fault::Held) } else { Fault::of(self.seed, order.id, nth as u64) };
        let mut outcome = match fault {
            Some(f) if f.is_before() => "refused",
            _ if self.cook == Some(Cook::Lost) && order.id % 10 == 3 => "dropped",
            _ => "applied",
        };
        let call = sqlx::query("INSERT INTO call (message_id, order_id, customer, outcome, fault) VALUES (?, ?, ?, ?, ?)")
            .bind(message_id)
            .bind(order.id as i64)
            .bind(&order.customer)
            .bind(outcome)
            .bind(fault.map(Fault::name))
            .execute(&mut *tx)
            .await?
            .last_insert_rowid();
        if outcome == "applied" {
            let fresh = sqlx::query(
                "INSERT INTO processed (message_id, order_id, customer, call) VALUES (?, ?, ?, ?) ON CONFLICT (message_id) DO NOTHING",
            )
            .bind(message_id)
            .bind(order.id as i64)
            .bind(&order.customer)
            .bind(call)
            .execute(&mut *tx)
            .await?
            .rows_affected()
                == 1;
            if fresh || self.cook == Some(Cook::Twice) {
                sqlx::query("UPDATE stock SET pieces = pieces - ? WHERE sku = ?")
                    .bind(order.pieces)
                    .bind(&order.sku)
                    .execute(&mut *tx)
                    .await?;
            }
            if !fresh {
                outcome = "duplicate";
                sqlx::query("UPDATE call SET outcome = ? WHERE id = ?").bind(outcome).bind(call).execute(&mut *tx).await?;
            }
        }
        tx.commit().await?;
        if outcome == "applied" {
            self.applied += 1;
            child::say(&InventoryReport::Applied(self.applied));
        }
        if fault == Some(Fault::Held) {
            self.hold = false;
            child::say(&InventoryReport::Held { order: order.id });
        }
        Ok(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_third_of_the_calls_fail_in_every_way_and_a_seed_fixes_which() {
        for seed in [0, 1, 7, u64::MAX] {
            let faults: Vec<_> = (1..=3_000).flat_map(|order| (0..2).map(move |nth| Fault::of(seed, order, nth))).collect();
            let share = faults.iter().flatten().count() as f64 / faults.len() as f64;
            assert!((0.31..0.36).contains(&share), "{share} with seed {seed}");
            for kind in [Fault::ErrorBefore, Fault::BusyBefore, Fault::ErrorAfter, Fault::HangBefore, Fault::HangAfter] {
                assert!(faults.contains(&Some(kind)), "{kind:?} with seed {seed}");
            }
        }
        let some = |seed| (1..100).map(|order| Fault::of(seed, order, 0)).collect::<Vec<_>>();
        assert_eq!(some(7), some(7));
        assert_ne!(some(7), some(8));
    }
}
