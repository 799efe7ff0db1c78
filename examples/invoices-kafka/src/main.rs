//! A lottery's back office: `POST /draws/{draw}/settle` writes an invoice for each winning ticket and a message about each, all
//! in one MariaDB or MySQL transaction; the relay in the same process sends them to the Kafka topic `lottery_invoice`.

use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use posthouse::transport::Kafka;
use posthouse::{Event, Ordering, Outbox, Relay, Route};
use serde::{Deserialize, Serialize};
use sqlx::{MySql, MySqlPool};

/// A ticket that has won.
#[derive(Debug, Deserialize)]
struct Ticket {
    customer: String,
    amount: i64,
}

/// What accounting is told.
#[derive(Debug, Serialize)]
struct InvoiceIssued {
    draw: i64,
    number: u64,
    customer: String,
    amount: i64,
}

impl Event for InvoiceIssued {
    const TYPE: &'static str = "invoice.issued.v1";
    const DESTINATION: &'static str = "invoices";
    /// The record key: one customer's invoices are in one partition, in order.
    fn key(&self) -> Option<String> {
        Some(self.customer.clone())
    }
}

#[derive(Debug, Clone)]
struct App {
    outbox: Outbox<MySql>,
}

type Failure = (StatusCode, String);

fn failed(e: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, e.to_string())
}

async fn settle(
    State(app): State<App>,
    Path(draw): Path<i64>,
    Json(tickets): Json<Vec<Ticket>>,
) -> Result<Json<serde_json::Value>, Failure> {
    let mut tx = app.outbox.begin().await.map_err(failed)?;
    // Settling a draw twice would pay twice: its row is the lock.
    let fresh = sqlx::query("INSERT IGNORE INTO draw (id) VALUES (?)").bind(draw).execute(&mut *tx).await.map_err(failed)?;
    if fresh.rows_affected() == 0 {
        return Err((StatusCode::CONFLICT, format!("draw {draw} is settled already")));
    }
    let mut events = Vec::with_capacity(tickets.len());
    for Ticket { customer, amount } in tickets {
        let invoice = sqlx::query("INSERT INTO invoice (draw, customer, amount) VALUES (?, ?, ?)")
            .bind(draw)
            .bind(&customer)
            .bind(amount)
            .execute(&mut *tx)
            .await
            .map_err(failed)?;
        events.push(InvoiceIssued { draw, number: invoice.last_insert_id(), customer, amount });
    }
    app.outbox.publish_many(&mut tx, events.iter()).await.map_err(failed)?;
    app.outbox.commit(tx).await.map_err(failed)?;
    Ok(Json(serde_json::json!({ "draw": draw, "invoices": events.len() })))
}

fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let pool = MySqlPool::connect(&setting("DATABASE_URL", "mysql://root@localhost/invoices")).await?;
    for table in [
        "CREATE TABLE IF NOT EXISTS draw (id bigint PRIMARY KEY)",
        "CREATE TABLE IF NOT EXISTS invoice (number bigint unsigned AUTO_INCREMENT PRIMARY KEY, draw bigint NOT NULL, \
         customer varchar(100) NOT NULL, amount bigint NOT NULL)",
    ] {
        sqlx::query(table).execute(&pool).await?;
    }
    let outbox = Outbox::new(pool);
    outbox.migrate().await?;

    // A customer with many invoices in one draw need not wait for a confirmation between two of them, and still none
    // overtakes one that Kafka refused.
    let topic = setting("KAFKA_TOPIC", "lottery_invoice");
    let relay = Relay::builder(&outbox)
        .transport("kafka", Kafka::new(&*setting("KAFKA_BROKERS", "localhost:9092"))?)
        .route("invoices", Route::to(format!("kafka:{topic}")).ordering(Ordering::Pipelined))
        .start()
        .await?;

    let app = Router::new().route("/draws/{draw}/settle", post(settle)).with_state(App { outbox });
    let listener = tokio::net::TcpListener::bind(setting("LISTEN", "127.0.0.1:8080")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app)
        .with_graceful_shutdown(async {
            if tokio::signal::ctrl_c().await.is_err() {
                std::future::pending::<()>().await;
            }
        })
        .await?;
    // What is in flight is finished; what isn't sent yet stays in the database for the next start.
    relay.shutdown(Duration::from_secs(30)).await;
    Ok(())
}
