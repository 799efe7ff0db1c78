//! The receivers: a process each, with an inbox in a second database.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Args;
use posthouse::consumer::{Consumer, RabbitMqConsumer};
use posthouse::inbox::{Handler, HandlerError, Inbox, Incoming};
use posthouse::transport::RabbitMqSettings;
use posthouse::{ConsumerOrder, ConsumerSettings, InboxSettings, Retry, Tx};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, PgPool, Postgres, Row};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::ACCOUNTS;
use super::broker::QUEUES;
use super::check::{Arrival, Balance};
use super::content::{Booking, TYPE};

/// How many of 100 runs of the handler fail although nothing is wrong.
const FAIL_PERCENT: u32 = 3;

/// What a process of this kind is told. For the fault run alone.
#[derive(Debug, Args)]
pub(crate) struct ConsumerArgs {
    /// URL of its database.
    #[arg(long)]
    into: String,
    /// URL of the broker.
    #[arg(long)]
    broker: String,
    /// Its name in the rows it writes.
    #[arg(long)]
    name: String,
    /// The name under which its inbox remembers, if not the queue's.
    #[arg(long)]
    memory: Option<String>,
}

/// Makes the tables.
pub(super) async fn prepare(pool: &PgPool) -> Result<(), String> {
    posthouse::migrate(pool).await.map_err(|e| e.to_string())?;
    let accounts: Vec<_> = ACCOUNTS.iter().map(|name| format!("('{name}', 0, 0)")).collect();
    let tables = format!(
        "CREATE TABLE account (name text PRIMARY KEY, seq bigint NOT NULL, amount bigint NOT NULL); \
         INSERT INTO account VALUES {}; \
         CREATE TABLE effect (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id text, type text, message_key text, \
                              payload bytea, consumer text, at timestamptz DEFAULT clock_timestamp())",
        accounts.join(", ")
    );
    sqlx::raw_sql(AssertSqlSafe(tables)).execute(pool).await.map_err(|e| e.to_string())?;
    Ok(())
}

/// The effect of a message. No unique key keeps it from coming twice: that is the inbox's business.
struct Book {
    consumer: String,
}

impl Handler<Postgres> for Book {
    type Message = Incoming;

    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }

    async fn handle(&self, tx: &mut Tx<Postgres>, m: Incoming) -> Result<(), HandlerError> {
        let booking = Booking::read(&m.payload).ok_or_else(|| HandlerError::reject("no booking"))?;
        sqlx::query("INSERT INTO effect (message_id, type, message_key, payload, consumer) VALUES ($1, $2, $3, $4, $5)")
            .bind(&m.message_id)
            .bind(&m.kind)
            .bind(&m.key)
            .bind(&m.payload)
            .bind(&self.consumer)
            .execute(&mut **tx)
            .await?;
        sqlx::query("UPDATE account SET seq = seq + $1, amount = amount + $2 WHERE name = $3")
            .bind(i64::from(m.key.is_some()))
            .bind(booking.amount)
            .bind(&booking.account)
            .execute(&mut **tx)
            .await?;
        if fastrand::u32(0..100) < FAIL_PERCENT {
            // What was written above is rolled back.
            return Err(HandlerError::retry("a failure that was asked for"));
        }
        Ok(())
    }
}

fn inbox(pool: PgPool, args: &ConsumerArgs, queue: &str) -> Result<Inbox<Postgres>, posthouse::Error> {
    let mut settings = InboxSettings::default();
    // Faults come closer together than in life: they must not use up what is there for a message that is at fault itself.
    settings.retry = Retry::new(10_000, Duration::from_millis(100), Duration::from_secs(1));
    settings.max_claims = 1_000;
    settings.handler_timeout = Duration::from_secs(2);
    settings.database_timeout = Duration::from_secs(2);
    settings.interval = Duration::from_millis(200);
    settings.lease = Duration::from_secs(4);
    let memory = args.memory.as_ref().map_or_else(|| queue.to_owned(), |memory| format!("{queue}-{memory}"));
    let inbox = Inbox::builder(pool, memory).settings(settings).build()?;
    Ok(inbox.on(TYPE, Book { consumer: args.name.clone() }))
}

async fn start(pool: &PgPool, args: &ConsumerArgs, queue: &str) -> Result<Consumer, posthouse::Error> {
    let mut settings = ConsumerSettings::default();
    settings.concurrency = 16;
    if queue == "keyed" {
        settings.order = ConsumerOrder::Key;
    }
    let mut broker = RabbitMqSettings::from(args.broker.as_str());
    broker.heartbeat = Duration::from_secs(2);
    broker.connect_timeout = Duration::from_secs(2);
    let consumer = RabbitMqConsumer::new(broker, queue)?.settings(settings);
    consumer.start(&inbox(pool.clone(), args, queue)?).await
}

/// Tries until it works: the database may be away just now.
async fn started(pool: &PgPool, args: &ConsumerArgs, queue: &str) -> Consumer {
    loop {
        match start(pool, args, queue).await {
            Ok(consumer) => return consumer,
            Err(e) => eprintln!("{queue}: {e}"),
        }
        sleep(Duration::from_millis(200)).await;
    }
}

/// A receiver's process, until SIGTERM.
pub(crate) async fn run(args: &ConsumerArgs) -> Result<(), String> {
    let mut terminated = signal(SignalKind::terminate()).map_err(|e| e.to_string())?;
    let options = PgPoolOptions::new().max_connections(40).acquire_timeout(Duration::from_secs(2));
    let pool = options.connect_lazy(&args.into).map_err(|e| e.to_string())?;
    let mut consumers = Vec::new();
    for queue in QUEUES {
        tokio::select! {
            consumer = started(&pool, args, queue) => consumers.push(consumer),
            _ = terminated.recv() => return Ok(()),
        }
    }
    terminated.recv().await;
    for consumer in consumers {
        consumer.shutdown(Duration::from_secs(3)).await;
    }
    Ok(())
}

/// How many effects there are, and how many messages of the inbox aren't done.
pub(super) async fn progress(pool: &PgPool) -> Result<(i64, i64), sqlx::Error> {
    sqlx::query_as("SELECT (SELECT count(*) FROM effect), (SELECT count(*) FROM posthouse_inbox WHERE status <> 'SUCCESS')")
        .fetch_one(pool)
        .await
}

/// All effects, in their order.
pub(super) async fn effects(pool: &PgPool) -> Result<Vec<Arrival>, sqlx::Error> {
    let rows = sqlx::query("SELECT message_id, type, message_key, payload FROM effect ORDER BY n").fetch_all(pool).await?;
    let arrival = |row: &sqlx::postgres::PgRow| {
        Ok(Arrival { id: row.try_get(0)?, kind: row.try_get(1)?, key: row.try_get(2)?, payload: row.try_get(3)? })
    };
    rows.iter().map(arrival).collect()
}

/// Where the accounts stand.
pub(super) async fn balances(pool: &PgPool) -> Result<BTreeMap<String, Balance>, sqlx::Error> {
    let rows: Vec<(String, i64, i64)> = sqlx::query_as("SELECT name, seq, amount FROM account").fetch_all(pool).await?;
    Ok(rows.into_iter().map(|(name, seq, amount)| (name, Balance { seq, amount })).collect())
}
