//! The service as a process, on the real PostgreSQL and RabbitMQ.

use std::process::Stdio;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

const SOON: Duration = Duration::from_secs(60);

fn url(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set; run: eval \"$(scripts/services env)\""))
}

/// A database of its own, so that the test starts from nothing.
async fn database() -> String {
    let server = url("POSTHOUSE_TEST_POSTGRES_URL");
    let name = format!("orders_{:016x}", fastrand::u64(..));
    let admin = sqlx::PgPool::connect(&server).await.unwrap();
    sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await.unwrap();
    let (base, _) = server.rsplit_once('/').unwrap();
    format!("{base}/{name}")
}

#[tokio::test]
async fn an_order_is_told_and_a_refused_one_is_not() {
    tokio::time::timeout(SOON, async {
        let broker = url("POSTHOUSE_TEST_RABBITMQ_URL");
        let mut service = tokio::process::Command::new(env!("CARGO_BIN_EXE_orders-rabbitmq"))
            .env("DATABASE_URL", database().await)
            .env("AMQP_URL", &broker)
            .env("LISTEN", "127.0.0.1:0")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(service.stdout.take().unwrap()).lines();
        let line = lines.next_line().await.unwrap().expect("the address it listens on");
        let orders = format!("{}/orders", line.strip_prefix("listening on ").unwrap());

        let http = reqwest::Client::new();
        let refused = http.post(&orders).json(&json!({ "customer": "ann", "item": "lamp", "count": 0 })).send().await.unwrap();
        assert_eq!(refused.status(), 422);
        let mut placed = Vec::new();
        for count in 1..=3 {
            let order = json!({ "customer": "ann", "item": "lamp", "count": count });
            let answer: Value = http.post(&orders).json(&order).send().await.unwrap().json().await.unwrap();
            placed.push(answer["order"].as_i64().unwrap());
        }
        let shown: Value = http.get(format!("{orders}/{}", placed[0])).send().await.unwrap().json().await.unwrap();
        assert_eq!(shown["item"], "lamp");

        let connection = Connection::connect(&broker, ConnectionProperties::default()).await.unwrap();
        // The queue is there once the first message has been sent; asking for one that isn't closes the channel.
        let mut consumer = loop {
            let channel = connection.create_channel().await.unwrap();
            let options = BasicConsumeOptions::default();
            match channel.basic_consume("inventory".into(), "".into(), options, FieldTable::default()).await {
                Ok(consumer) => break consumer,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let mut told = Vec::new();
        while told.len() < 3 {
            let delivery = consumer.next().await.unwrap().unwrap();
            let event: Value = serde_json::from_slice(&delivery.data).unwrap();
            delivery.ack(BasicAckOptions::default()).await.unwrap();
            assert_eq!(delivery.properties.kind().as_ref().map(|k| k.as_str()), Some("order.placed.v1"));
            // Other runs of this test share the queue.
            if let Some(order) = event["order"].as_i64().filter(|o| placed.contains(o)) {
                told.push(order);
            }
        }
        assert_eq!(told, placed, "in the order in which they were placed");
        service.kill().await.unwrap();
    })
    .await
    .expect("in time");
}
