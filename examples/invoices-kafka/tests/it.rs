//! The service as a process, on the real MariaDB and Kafka.

use std::process::Stdio;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::message::{Headers, Message};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

const SOON: Duration = Duration::from_secs(60);

fn url(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set; run: eval \"$(scripts/services env)\""))
}

/// A database of its own, so that the test starts from nothing.
async fn database(name: &str) -> String {
    let server = url("POSTHOUSE_TEST_MYSQL_URL");
    let admin = sqlx::MySqlPool::connect(&server).await.unwrap();
    sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await.unwrap();
    let (base, _) = server.rsplit_once('/').unwrap();
    format!("{base}/{name}")
}

#[tokio::test]
async fn a_settled_draw_is_told_once_and_in_order() {
    tokio::time::timeout(SOON, async {
        let brokers = url("POSTHOUSE_TEST_KAFKA_URL");
        let name = format!("invoices_{:016x}", fastrand::u64(..));
        let admin: AdminClient<_> = ClientConfig::new().set("bootstrap.servers", &brokers).create().unwrap();
        admin.create_topics([&NewTopic::new(&name, 2, TopicReplication::Fixed(1))], &AdminOptions::new()).await.unwrap();
        let mut service = tokio::process::Command::new(env!("CARGO_BIN_EXE_invoices-kafka"))
            .env("DATABASE_URL", database(&name).await)
            .env("KAFKA_BROKERS", &brokers)
            .env("KAFKA_TOPIC", &name)
            .env("LISTEN", "127.0.0.1:0")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(service.stdout.take().unwrap()).lines();
        let line = lines.next_line().await.unwrap().expect("the address it listens on");
        let settle = format!("{}/draws/7/settle", line.strip_prefix("listening on ").unwrap());

        let tickets: Vec<Value> = (1..=50).map(|n| json!({ "customer": format!("c{}", n % 3), "amount": n })).collect();
        let http = reqwest::Client::new();
        let answer: Value = http.post(&settle).json(&tickets).send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["invoices"], 50);
        assert_eq!(http.post(&settle).json(&tickets).send().await.unwrap().status(), 409, "a draw is settled once");

        let consumer: StreamConsumer = ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .set("group.id", &name)
            .set("auto.offset.reset", "earliest")
            .create()
            .unwrap();
        consumer.subscribe(&[&name]).unwrap();
        let mut last = std::collections::HashMap::new();
        for _ in 0..50 {
            let record = consumer.recv().await.unwrap();
            let invoice: Value = serde_json::from_slice(record.payload().unwrap()).unwrap();
            let customer = invoice["customer"].as_str().unwrap().to_owned();
            assert_eq!(record.key(), Some(customer.as_bytes()));
            assert!(record.headers().unwrap().iter().any(|h| h.key == "posthouse-message-id"));
            let amount = invoice["amount"].as_i64().unwrap();
            assert!(last.insert(customer, amount).is_none_or(|before| before < amount), "in order, and once");
        }
        service.kill().await.unwrap();
    })
    .await
    .expect("in time");
}
