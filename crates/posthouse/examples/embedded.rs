//! An order service with the relay in the same process, on a SQLite file.
//!
//! Three orders are tried. Two commit, each with a message in the same transaction; one rolls back, and its message with it.
//! The handler of the messages fails once on purpose, so that a retry can be seen.
//!
//! ```text
//! cargo run -p posthouse --example embedded --features sqlite,relay
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::{Message, Outbox, Relay, Retry, Route, Tx};
use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tokio::sync::mpsc;

/// What the service writes and the handler reads.
#[derive(Debug, Serialize, Deserialize)]
struct OrderPlaced {
    order: i64,
    item: String,
}

/// Why an order was not placed.
#[derive(Debug)]
enum OrderError {
    SoldOut,
    Posthouse(posthouse::Error),
}

impl From<posthouse::Error> for OrderError {
    fn from(e: posthouse::Error) -> Self {
        Self::Posthouse(e)
    }
}

impl From<sqlx::Error> for OrderError {
    fn from(e: sqlx::Error) -> Self {
        Self::Posthouse(e.into())
    }
}

impl std::fmt::Display for OrderError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SoldOut => f.write_str("sold out"),
            Self::Posthouse(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for OrderError {}

/// One transaction: the order and its message commit together, or neither does.
async fn place_order(outbox: &Outbox<sqlx::Sqlite>, order: i64, item: &str) -> Result<(), OrderError> {
    outbox
        .transaction(async |tx: &mut Tx<sqlx::Sqlite>| {
            sqlx::query("INSERT INTO orders (id, item) VALUES (?, ?)").bind(order).bind(item).execute(&mut **tx).await?;
            let placed = OrderPlaced { order, item: item.to_owned() };
            tx.publish(Message::to("mail").typed("order.placed.v1").key(order).json(&placed)).await?;
            // Found out after the message was written; the rollback takes it back.
            if item == "lantern" { Err(OrderError::SoldOut) } else { Ok(()) }
        })
        .await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::temp_dir().join(format!("posthouse-embedded-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let file = SqliteConnectOptions::new().filename(dir.join("orders.db")).create_if_missing(true);
    let pool = SqlitePoolOptions::new().connect_with(file).await?;
    sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL)").execute(&pool).await?;

    let outbox = Outbox::new(pool.clone());
    outbox.migrate().await?;

    // The handler tells the main function what it did, which then knows when to stop.
    let (sent, mut done) = mpsc::unbounded_channel();
    let failed_once = Arc::new(AtomicBool::new(false));
    let relay = Relay::builder(&outbox)
        .route("mail", Route::to("local:send-mail").retry(Retry::new(5, Duration::from_millis(200), Duration::from_secs(10))))
        .local("send-mail", move |m: OrderPlaced| {
            let (sent, failed_once) = (sent.clone(), failed_once.clone());
            async move {
                if m.order == 1 && !failed_once.swap(true, Ordering::Relaxed) {
                    println!("order {}: the mail server hiccups, this will be tried again", m.order);
                    return Err(std::io::Error::other("mail server hiccup"));
                }
                println!("order {}: mail about one {} sent", m.order, m.item);
                // The receiver is gone only when the program is about to end.
                let _ = sent.send(m.order);
                Ok(())
            }
        })
        .start()
        .await?;

    for (order, item) in [(1, "saddle"), (2, "lantern"), (3, "bridle")] {
        match place_order(&outbox, order, item).await {
            Ok(()) => println!("order {order}: committed"),
            Err(e) => println!("order {order}: rolled back ({e})"),
        }
    }

    // A real service would serve requests here until it is told to stop.
    for _ in 0..2 {
        tokio::time::timeout(Duration::from_secs(30), done.recv()).await?;
    }
    // Finishes what is in flight, writes the outcomes, gives the houses back.
    relay.shutdown(Duration::from_secs(30)).await;

    println!("\nwhat the view posthouse_outbox says:");
    let rows: Vec<(i64, String, String)> =
        sqlx::query_as("SELECT id, message_key, status FROM posthouse_outbox ORDER BY id").fetch_all(&pool).await?;
    for (id, key, status) in rows {
        println!("  message {id}, key {key}: {status}");
    }
    pool.close().await;
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
