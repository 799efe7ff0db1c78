//! The loop that most write for themselves: a status column, `FOR UPDATE SKIP LOCKED`, an UPDATE when it is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use sqlx::Row;
use sqlx::postgres::PgPool;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;

use super::at;
use super::driver::Config;
use super::ours::{Peer, begin};

/// One sends while the other reads and writes.
const LOOPS: usize = 2;

/// Rows that one statement claims: so many that statements cost little beside sends, as the batches of the job queues.
const BATCH: i64 = 500;

/// While there is nothing to do. Loops like this usually sleep for a second; with less, it costs more when idle and waits less.
const POLL: Duration = Duration::from_millis(100);

const TABLE: &str = "\
CREATE TABLE bench_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status text NOT NULL DEFAULT 'PENDING',
    destination text NOT NULL,
    payload text NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON bench_outbox (id) WHERE status = 'PENDING'";

const INSERT: &str = "INSERT INTO bench_outbox (destination, payload) VALUES ($1, $2)";

/// Uses the partial index, both to find and to leave.
const CLAIM: &str = "\
UPDATE bench_outbox SET status = 'SENDING', attempts = attempts + 1, updated_at = now()
WHERE id IN (SELECT id FROM bench_outbox WHERE status = 'PENDING' ORDER BY id FOR UPDATE SKIP LOCKED LIMIT $1)
RETURNING id, destination, payload";

const DONE: &str = "UPDATE bench_outbox SET status = 'SENT', updated_at = now() WHERE id = ANY($1)";

pub(super) struct SkipLocked {
    config: Config,
    pool: PgPool,
    confirmed: Arc<AtomicU64>,
    running: Mutex<Option<Running>>,
}

struct Running {
    stop: watch::Sender<bool>,
    loops: Vec<JoinHandle<Result<Channel, String>>>,
    connection: Connection,
}

impl SkipLocked {
    pub(super) fn new(config: &Config, pool: PgPool) -> Self {
        Self { config: config.clone(), pool, confirmed: Arc::default(), running: Mutex::default() }
    }
}

impl Peer for SkipLocked {
    async fn prepare(&self) -> Result<String, String> {
        at("table", sqlx::raw_sql(TABLE).execute(&self.pool).await)?;
        Ok("of this bench".to_owned())
    }

    async fn transaction(&self, order: i64, body: Option<String>) -> Result<(), String> {
        let mut tx = begin(&self.pool, order).await?;
        if let Some(body) = body {
            let insert = sqlx::query(INSERT).bind(&self.config.queue).bind(body);
            at("outbox", insert.execute(&mut *tx).await)?;
        }
        at("commit", tx.commit().await)
    }

    async fn run(&self) -> Result<(), String> {
        let connection = at("RabbitMQ", Connection::connect(&self.config.amqp, ConnectionProperties::default()).await)?;
        let (stop, stopped) = watch::channel(false);
        let mut loops = Vec::new();
        for _ in 0..LOOPS {
            let channel = at("channel", connection.create_channel().await)?;
            at("confirms", channel.confirm_select(ConfirmSelectOptions::default()).await)?;
            loops.push(tokio::spawn(forward(self.pool.clone(), channel, stopped.clone(), self.confirmed.clone())));
        }
        *self.running.lock().await = Some(Running { stop, loops, connection });
        Ok(())
    }

    async fn stop(&self) -> Result<(), String> {
        let Some(running) = self.running.lock().await.take() else { return Ok(()) };
        running.stop.send_replace(true);
        let mut channels = Vec::new();
        for ended in join_all(running.loops).await {
            channels.push(at("loop", ended)??);
        }
        // A channel that is dropped before closes itself at the same time, and one of the two fails.
        let closed = at("close", running.connection.close(200, "OK".into()).await);
        drop(channels);
        closed
    }

    async fn pending(&self) -> Result<i64, String> {
        let count = "SELECT count(*) FROM bench_outbox WHERE status <> 'SENT'";
        at("pending", sqlx::query_scalar(count).fetch_one(&self.pool).await)
    }

    fn confirmed(&self) -> Option<u64> {
        Some(self.confirmed.load(Relaxed))
    }
}

async fn forward(
    pool: PgPool,
    channel: Channel,
    mut stopped: watch::Receiver<bool>,
    confirmed: Arc<AtomicU64>,
) -> Result<Channel, String> {
    while !*stopped.borrow() {
        let rows = at("claim", sqlx::query(CLAIM).bind(BATCH).fetch_all(&pool).await)?;
        if rows.is_empty() {
            // Whichever comes first.
            let _ = tokio::time::timeout(POLL, stopped.changed()).await;
            continue;
        }
        let mut confirms = Vec::new();
        for row in &rows {
            let (id, destination, payload): (i64, String, String) = (row.get(0), row.get(1), row.get(2));
            let properties = BasicProperties::default().with_delivery_mode(2).with_message_id(id.to_string().into());
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let publish = channel.basic_publish("".into(), destination.into(), options, payload.as_bytes(), properties);
            confirms.push(at("publish", publish.await)?);
        }
        for confirmation in at("confirm", try_join_all(confirms).await)? {
            if !matches!(confirmation, Confirmation::Ack(None)) {
                return Err(format!("{confirmation:?}"));
            }
        }
        confirmed.fetch_add(rows.len() as u64, Relaxed);
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        at("done", sqlx::query(DONE).bind(&ids).execute(&pool).await)?;
    }
    Ok(channel)
}
