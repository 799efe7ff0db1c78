//! The drivers of the peers that Rust publishes for: Posthouse, the plain loop, and Debezium. The bench starts itself for
//! them, so that they are processes like the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use posthouse::testing::observed;
use posthouse::transport::{Outcome, RabbitMq};
use posthouse::{Message, Outbox, Relay, Route};
use serde_json::{Value, json};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Postgres, Transaction};
use tokio::sync::{Mutex, mpsc};

use super::debezium::Debezium;
use super::driver::Config;
use super::skip_locked::SkipLocked;
use super::{Name, at, unix_micros};
use crate::database::must;

const ORDERS: &str = "CREATE TABLE bench_orders (id bigint PRIMARY KEY, customer text NOT NULL)";
const ORDER: &str = "INSERT INTO bench_orders (id, customer) VALUES ($1, 'customer')";

/// What is measured.
pub(super) trait Peer: Sized + Send + Sync + 'static {
    /// Makes its tables; answers its version.
    fn prepare(&self) -> impl Future<Output = Result<String, String>> + Send;
    /// A transaction of one business row, and a message if there is a body.
    fn transaction(&self, order: i64, body: Option<String>) -> impl Future<Output = Result<(), String>> + Send;
    fn run(&self) -> impl Future<Output = Result<(), String>> + Send;
    fn stop(&self) -> impl Future<Output = Result<(), String>> + Send;
    /// What isn't finished by the tables.
    fn pending(&self) -> impl Future<Output = Result<i64, String>> + Send;
    /// How many messages the broker has confirmed; None if only the sender knows.
    fn confirmed(&self) -> Option<u64>;
}

/// Obeys until it is told to quit.
pub(crate) async fn serve(name: Name, config: &str, home: Option<&std::path::Path>, java: Option<&std::path::Path>) {
    let config: Config = must("configuration", serde_json::from_str(config));
    // Beside the publishers, senders need connections.
    let connections = 2 * config.connections as u32 + 4;
    let pool = PgPoolOptions::new().max_connections(connections).min_connections(config.connections as u32);
    let pool = must("PostgreSQL", pool.connect(&config.database).await);
    match name {
        Name::Posthouse => obey(&config, &pool, Ours::new(&config, pool.clone())).await,
        Name::SkipLocked => obey(&config, &pool, SkipLocked::new(&config, pool.clone())).await,
        Name::Debezium => {
            let (Some(home), Some(java)) = (home, java) else { return must("debezium", Err("needs --home and --java")) };
            obey(&config, &pool, must("debezium", Debezium::new(&config, pool.clone(), home, java))).await;
        }
        other => must("driver", Err(format!("{other:?} has one of its own"))),
    }
}

/// The publishers of one driver.
struct Publishers<P> {
    peer: P,
    payload: usize,
    orders: AtomicI64,
    numbers: AtomicUsize,
}

async fn obey<P: Peer>(config: &Config, pool: &PgPool, peer: P) {
    let publishers =
        Arc::new(Publishers { peer, payload: config.payload, orders: AtomicI64::new(0), numbers: AtomicUsize::new(0) });
    let (sender, mut stdin) = mpsc::unbounded_channel();
    // A thread, because nothing else in the workspace needs tokio's own.
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    while let Some(line) = stdin.recv().await {
        if line == "quit" {
            break;
        }
        let mut words = line.split(' ');
        let what = words.next().unwrap_or_default();
        let numbers: Vec<f64> = words.filter_map(|word| word.parse().ok()).collect();
        let answer = match publishers.clone().answer(pool, what, &numbers).await {
            Ok(mut answer) => {
                answer["done"] = json!(what);
                answer
            }
            Err(error) => json!({ "error": error }),
        };
        println!("{answer}");
    }
    // Nothing is left running when it is told to go, or when the bench is gone.
    let _ = publishers.peer.stop().await;
}

impl<P: Peer> Publishers<P> {
    async fn answer(self: Arc<Self>, pool: &PgPool, what: &str, numbers: &[f64]) -> Result<Value, String> {
        match (what, numbers) {
            ("prepare", []) => {
                at("orders", sqlx::query(ORDERS).execute(pool).await)?;
                Ok(json!({ "version": self.peer.prepare().await? }))
            }
            ("business", &[n, c]) => self.many(n as usize, c as usize, false).await,
            ("publish", &[n, c]) => self.many(n as usize, c as usize, true).await,
            ("load", &[n, rate, c]) => self.load(n as usize, rate, c as usize).await,
            ("run", []) => self.peer.run().await.map(|()| json!({})),
            ("confirmed", []) => Ok(json!({ "confirmed": self.peer.confirmed() })),
            ("pending", []) => Ok(json!({ "pending": self.peer.pending().await? })),
            ("stop", []) => self.peer.stop().await.map(|()| json!({})),
            _ => Err(format!("no such command: {what} {numbers:?}")),
        }
    }

    async fn transaction(&self, body: Option<String>) -> Result<(), String> {
        self.peer.transaction(self.orders.fetch_add(1, Relaxed), body).await
    }

    fn body(&self, number: usize, intended: u64) -> String {
        let mut body = format!("{number:010} {intended:016} {}", "x".repeat(self.payload));
        body.truncate(self.payload);
        body
    }

    async fn many(self: Arc<Self>, n: usize, c: usize, publish: bool) -> Result<Value, String> {
        let first = self.numbers.fetch_add(if publish { n } else { 0 }, Relaxed);
        let started = Instant::now();
        self.spread(n, c, move |publishers, i| async move {
            publishers.transaction(publish.then(|| publishers.body(first + i, unix_micros()))).await
        })
        .await?;
        Ok(json!({ "seconds": started.elapsed().as_secs_f64(), "first": first }))
    }

    async fn load(self: Arc<Self>, n: usize, rate: f64, c: usize) -> Result<Value, String> {
        let first = self.numbers.fetch_add(n, Relaxed);
        let committed: Arc<Vec<AtomicU64>> = Arc::new((0..n).map(|_| AtomicU64::new(0)).collect());
        let start = unix_micros() + 1_000;
        let times = committed.clone();
        self.spread(n, c, move |publishers, i| {
            let times = times.clone();
            async move {
                let intended = start + (i as f64 / rate * 1e6) as u64;
                tokio::time::sleep(Duration::from_micros(intended.saturating_sub(unix_micros()))).await;
                publishers.transaction(Some(publishers.body(first + i, intended))).await?;
                times[i].store(unix_micros(), Relaxed);
                Ok(())
            }
        })
        .await?;
        let committed: Vec<u64> = committed.iter().map(|time| time.load(Relaxed)).collect();
        Ok(json!({ "first": first, "committed": committed }))
    }

    /// Does `n` things, `c` at a time, numbered from 0.
    async fn spread<F, D>(self: Arc<Self>, n: usize, c: usize, what: F) -> Result<(), String>
    where
        F: Fn(Arc<Self>, usize) -> D + Clone + Send + 'static,
        D: Future<Output = Result<(), String>> + Send + 'static,
    {
        let next = Arc::new(AtomicUsize::new(0));
        let tasks = (0..c).map(|_| {
            let (publishers, next, what) = (self.clone(), next.clone(), what.clone());
            tokio::spawn(async move {
                loop {
                    let i = next.fetch_add(1, Relaxed);
                    if i >= n {
                        return Ok::<_, String>(());
                    }
                    what(publishers.clone(), i).await?;
                }
            })
        });
        for done in join_all(tasks).await {
            at("publisher", done)??;
        }
        Ok(())
    }
}

/// Begins the transaction that each of these peers adds its message to.
pub(super) async fn begin(pool: &PgPool, order: i64) -> Result<Transaction<'static, Postgres>, String> {
    let mut tx = at("begin", pool.begin().await)?;
    at("order", sqlx::query(ORDER).bind(order).execute(&mut *tx).await)?;
    Ok(tx)
}

/// Posthouse as its documentation shows it: a relay inside the service, all settings left at their defaults.
struct Ours {
    outbox: Outbox<Postgres>,
    config: Config,
    confirmed: Arc<AtomicU64>,
    relay: Mutex<Option<Relay>>,
}

impl Ours {
    fn new(config: &Config, pool: PgPool) -> Self {
        Self { outbox: Outbox::new(pool), config: config.clone(), confirmed: Arc::default(), relay: Mutex::default() }
    }
}

impl Peer for Ours {
    async fn prepare(&self) -> Result<String, String> {
        at("migrate", self.outbox.migrate().await)?;
        Ok(env!("CARGO_PKG_VERSION").to_owned())
    }

    async fn transaction(&self, order: i64, body: Option<String>) -> Result<(), String> {
        let mut tx = at("begin", self.outbox.begin().await)?;
        at("order", sqlx::query(ORDER).bind(order).execute(&mut *tx).await)?;
        if let Some(body) = body {
            at("publish", tx.publish(Message::to("bench").typed("order.placed").payload(body)).await)?;
        }
        at("commit", tx.commit().await)
    }

    async fn run(&self) -> Result<(), String> {
        let confirmed = self.confirmed.clone();
        let transport = observed(at("transport", RabbitMq::new(&*self.config.amqp))?, move |_, outcome| {
            confirmed.fetch_add(u64::from(*outcome == Outcome::Delivered), Relaxed);
        });
        let route = Route::to(format!("amqp:/{}", self.config.queue));
        let relay = Relay::builder(&self.outbox).transport("amqp", transport).route("bench", route).start().await;
        *self.relay.lock().await = Some(at("relay", relay)?);
        Ok(())
    }

    async fn stop(&self) -> Result<(), String> {
        if let Some(relay) = self.relay.lock().await.take() {
            relay.shutdown(Duration::from_secs(30)).await;
        }
        Ok(())
    }

    async fn pending(&self) -> Result<i64, String> {
        at("pending", sqlx::query_scalar("SELECT count(*) FROM posthouse_pending").fetch_one(self.outbox.pool()).await)
    }

    fn confirmed(&self) -> Option<u64> {
        Some(self.confirmed.load(Relaxed))
    }
}
