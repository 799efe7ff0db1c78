//! An order service: `POST /orders` writes the order and a message about it in one PostgreSQL transaction; the relay in the
//! same process sends the message to RabbitMQ and repeats it until RabbitMQ has confirmed.

use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use posthouse::transport::RabbitMq;
use posthouse::{Event, Outbox, RabbitMqRoute, Relay, Route};
use serde::{Deserialize, Serialize};
use sqlx::{PgPool, Postgres};

/// What a customer sends.
#[derive(Debug, Deserialize)]
struct NewOrder {
    customer: String,
    item: String,
    count: i32,
}

/// What the others are told: its type, where it goes and its key belong to it.
#[derive(Debug, Serialize)]
struct OrderPlaced {
    order: i64,
    customer: String,
    item: String,
    count: i32,
}

impl Event for OrderPlaced {
    const TYPE: &'static str = "order.placed.v1";
    const DESTINATION: &'static str = "orders";
    /// One customer's orders are told in the order in which they were placed.
    fn key(&self) -> Option<String> {
        Some(self.customer.clone())
    }
}

#[derive(Debug, Clone)]
struct App {
    pool: PgPool,
    outbox: Outbox<Postgres>,
}

type Failure = (StatusCode, String);

fn failed(e: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, e.to_string())
}

async fn place(State(app): State<App>, Json(new): Json<NewOrder>) -> Result<(StatusCode, Json<serde_json::Value>), Failure> {
    let mut tx = app.outbox.begin().await.map_err(failed)?;
    let order: i64 = sqlx::query_scalar("INSERT INTO orders (customer, item, count) VALUES ($1, $2, $3) RETURNING id")
        .bind(&new.customer)
        .bind(&new.item)
        .bind(new.count)
        .fetch_one(&mut *tx)
        .await
        .map_err(failed)?;
    let event = OrderPlaced { order, customer: new.customer, item: new.item, count: new.count };
    app.outbox.publish(&mut tx, &event).await.map_err(failed)?;
    if event.count < 1 {
        // The transaction is dropped: neither the order nor its message exists.
        return Err((StatusCode::UNPROCESSABLE_ENTITY, "count: must be at least 1".into()));
    }
    app.outbox.commit(tx).await.map_err(failed)?;
    Ok((StatusCode::CREATED, Json(serde_json::json!({ "order": order }))))
}

async fn show(State(app): State<App>, Path(order): Path<i64>) -> Result<Json<serde_json::Value>, Failure> {
    let found: Option<(String, String, i32)> = sqlx::query_as("SELECT customer, item, count FROM orders WHERE id = $1")
        .bind(order)
        .fetch_optional(&app.pool)
        .await
        .map_err(failed)?;
    let (customer, item, count) = found.ok_or((StatusCode::NOT_FOUND, format!("there is no order {order}")))?;
    Ok(Json(serde_json::json!({ "order": order, "customer": customer, "item": item, "count": count })))
}

fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let pool = PgPool::connect(&setting("DATABASE_URL", "postgres://localhost/orders")).await?;
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
         customer text NOT NULL, item text NOT NULL, count integer NOT NULL)",
    )
    .execute(&pool)
    .await?;
    let outbox = Outbox::new(pool.clone());
    outbox.migrate().await?;

    // Declares the exchange, and a queue that gets everything, so that the example needs no other program. In a real system
    // the consumers declare their own queues.
    let mut topology = RabbitMqRoute::default();
    topology.declare = true;
    topology.queue = Some("inventory".into());
    let relay = Relay::builder(&outbox)
        .transport("amqp", RabbitMq::new(&*setting("AMQP_URL", "amqp://guest:guest@localhost:5672"))?)
        .route("orders", Route::to("amqp:shop.orders/order.placed").rabbitmq(topology))
        .start()
        .await?;

    let app = Router::new().route("/orders", post(place)).route("/orders/{order}", get(show)).with_state(App { pool, outbox });
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
