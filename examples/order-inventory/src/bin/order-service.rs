//! Takes orders over HTTP. `POST /orders` writes the order and the message about it in one PostgreSQL transaction; the relay in
//! the same process sends the message and repeats it until the broker has confirmed.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use order_inventory::{Broker, DeductStock, EXCHANGE, QUEUE, TOPIC, asked_to_stop, setting, start_log};
use posthouse::transport::{Kafka, RabbitMq};
use posthouse::{Event as _, Outbox, RabbitMqRoute, Relay, Route};
use serde::Deserialize;
use sqlx::{PgPool, Postgres};

#[derive(Debug, Deserialize)]
struct NewOrder {
    sku: String,
    count: i32,
}

type Failure = (StatusCode, String);

fn failed(e: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, e.to_string())
}

async fn place(
    State(outbox): State<Outbox<Postgres>>,
    Json(new): Json<NewOrder>,
) -> Result<(StatusCode, Json<serde_json::Value>), Failure> {
    let mut tx = outbox.begin().await.map_err(failed)?;
    let order: i64 = sqlx::query_scalar("INSERT INTO orders (sku, count) VALUES ($1, $2) RETURNING id")
        .bind(&new.sku)
        .bind(new.count)
        .fetch_one(&mut *tx)
        .await
        .map_err(failed)?;
    outbox.publish(&mut tx, &DeductStock { order, sku: new.sku, count: new.count }).await.map_err(failed)?;
    if new.count < 1 {
        // The transaction is dropped: neither the order nor its message exists.
        return Err((StatusCode::UNPROCESSABLE_ENTITY, "count: must be at least 1".into()));
    }
    outbox.commit(tx).await.map_err(failed)?;
    Ok((StatusCode::CREATED, Json(serde_json::json!({ "order": order }))))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    start_log();
    let pool = PgPool::connect(&setting("ORDERS_DATABASE_URL", "postgres://localhost/orders")).await?;
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS orders \
         (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sku text NOT NULL, count integer NOT NULL)",
    )
    .execute(&pool)
    .await?;
    let outbox = Outbox::new(pool);
    outbox.migrate().await?;

    let relay = Relay::builder(&outbox);
    let relay = match Broker::from_env()? {
        Broker::RabbitMq(url) => {
            // Declares the exchange, and the inventory's queue, so that the two services may be started in any order.
            let mut topology = RabbitMqRoute::default();
            topology.declare = true;
            topology.queue = Some(QUEUE.into());
            let route = Route::to(format!("amqp:{EXCHANGE}/deduct")).rabbitmq(topology);
            relay.transport("amqp", RabbitMq::new(&*url)?).route(DeductStock::DESTINATION, route)
        }
        Broker::Kafka(brokers) => {
            let route = Route::to(format!("kafka:{TOPIC}"));
            relay.transport("kafka", Kafka::new(&*brokers)?).route(DeductStock::DESTINATION, route)
        }
    };
    let relay = relay.start().await?;

    let app = Router::new().route("/orders", post(place)).with_state(outbox);
    let listener = tokio::net::TcpListener::bind(setting("LISTEN", "127.0.0.1:8080")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).with_graceful_shutdown(asked_to_stop()).await?;
    // What is in flight is finished; what isn't sent yet stays in the database for the next start.
    relay.shutdown(Duration::from_secs(30)).await;
    Ok(())
}
