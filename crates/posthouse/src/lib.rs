//! **Posthouse** makes "change my database *and* tell the world" one reliable step: a transactional outbox.
//!
//! A message is a row that commits or rolls back with your own rows. After the commit a *relay* sends it, and sends it again
//! until the receiver confirms. So a committed message is not lost, a rolled back one is never sent, and a receiver may see a
//! message twice: it recognises the second one by the message id, which stays the same.
//!
//! # Quick start
//!
//! Publishing and a relay in the same process, on SQLite (features `sqlite` and `relay`):
//!
//! ```no_run
//! # #[cfg(all(feature = "sqlite", feature = "relay"))]
//! # async fn quick_start() -> Result<(), Box<dyn std::error::Error>> {
//! use posthouse::{Message, Outbox, Relay};
//!
//! let outbox = Outbox::new(sqlx::SqlitePool::connect("sqlite:orders.db").await?);
//! outbox.migrate().await?;
//! let relay = Relay::builder(&outbox)
//!     .local("send-mail", |order: serde_json::Value| async move {
//!         println!("sending mail about {order}");
//!         Ok::<_, std::io::Error>(())
//!     })
//!     .start()
//!     .await?;
//!
//! let mut tx = outbox.begin().await?;
//! sqlx::query("INSERT INTO orders (id) VALUES (7)").execute(&mut *tx).await?;
//! outbox.publish(&mut tx, Message::to("local:send-mail").key(7).json(&serde_json::json!({ "order": 7 }))).await?;
//! outbox.commit(tx).await?; // commits, then wakes the relay
//!
//! relay.shutdown(std::time::Duration::from_secs(30)).await;
//! # Ok(()) }
//! # fn main() {}
//! ```
//!
//! The same with `sqlx::PgPool` or `sqlx::MySqlPool`. A service that only publishes needs no relay in it: leave the feature
//! `relay` out, and run the `posthouse` program or another process with a relay on the same tables.
//!
//! # Features
//!
//! None is on by default; at least one database is needed.
//!
//! | feature | what it adds |
//! |---|---|
//! | `postgres` | PostgreSQL 13 and newer |
//! | `mysql` | MariaDB 10.6 and newer, MySQL 8.0.16 and newer |
//! | `sqlite` | SQLite 3.40 and newer, in a file |
//! | `relay` | the relay, the `Transport` trait, and `local:` handlers |
//! | `inbox` | the inbox: what is received has its effect once; see the module `inbox` |
//! | `http` | the `http` transport for `http://` and `https://` addresses; brings in `relay` |
//! | `rabbitmq` | the [`RabbitMq`](transport::RabbitMq) transport; brings in `relay`; with `inbox`: a consumer of queues |
//! | `kafka` | the [`Kafka`](transport::Kafka) transport (librdkafka, built with it); brings in `relay`; with `inbox`: a consumer of topics |
//! | `nats` | the [`Nats`](transport::Nats) transport for JetStream; brings in `relay`; with `inbox`: a consumer of streams |
//! | `axum` | a route that receives webhooks into the inbox; brings in `inbox` |
//! | `macros` | `#[posthouse::transactional]`: functions that join a transaction or open one, and publish what they return |
//! | `testing` | the module `testing`: what a transaction published, a scripted transport; for tests of services |
//!
//! # Where to go next
//!
//! - Publishing: [`Outbox`], [`Message`], [`Event`] for typed events, [`Tx`], [`Outbox::transaction`].
//! - The declarative way: `#[posthouse::transactional]`, explained in the module `transactional` (feature `macros`).
//! - Several databases and tables: [`Router`] says where a key belongs.
//! - From another driver: [`Outbox::insert_statement`]. From another language: one plain `INSERT` into `posthouse_message`.
//! - Delivering: [`RelayBuilder`], [`RelaySettings`], [`Route`], [`Retry`], and [`RelayStats`] to see how it goes.
//! - Sending at certain times: [`Group`], [`Trigger`], [`Relay::trigger`]; the module [`schedule`] for cron expressions.
//! - Sending elsewhere: [`transport::Transport`], or [`transport::from_fn`] for a function.
//! - Receiving: the module `inbox` (feature `inbox`), and `consumer` for brokers (features `inbox` and the broker's).
//! - Lists and operator actions: [`store::Store`], from [`Outbox::store`] or [`Relay::store`].
//! - Testing a service that publishes: the module `testing` (feature `testing`).
//! - Errors: [`Error`] and what a caller can do about one, [`Error::kind`].
//! - What is guaranteed and under which conditions: `docs/guarantees.md` in the repository; how it works inside:
//!   `docs/ARCHITECTURE.md`.
//!
//! A complete small program: `cargo run -p posthouse --example embedded --features sqlite,relay`.

// Documentation of a nightly compiler, such as docs.rs makes, tells which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
compile_error!(
    "posthouse needs a database: enable at least one of the features \"postgres\", \"mysql\", \"sqlite\", \
     for example posthouse = { version = \"0.1\", features = [\"postgres\", \"relay\"] }"
);

#[cfg(all(feature = "inbox", any(feature = "rabbitmq", feature = "kafka", feature = "nats", feature = "axum")))]
pub mod consumer;
mod error;
mod histogram;
#[cfg(feature = "inbox")]
pub mod inbox;
pub mod message;
mod outbox;
#[cfg(feature = "relay")]
mod relay;
#[cfg(feature = "relay")]
pub mod retention;
mod router;
#[cfg(feature = "relay")]
pub mod schedule;
mod settings;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "relay")]
pub mod transport;
#[cfg(any(feature = "http", feature = "axum"))]
pub mod webhook;

pub use error::{Error, ErrorKind};
pub use histogram::Histogram;
#[cfg(feature = "inbox")]
pub use inbox::Inbox;
pub use message::{Envelope, Event, Headers, IntoMessage, Limits, Message, MessageId};
#[cfg(feature = "macros")]
pub use outbox::transactional;
pub use outbox::{Commit, Outbox, OutboxBuilder, Tx, migrate};
/// Makes a function open or join a transaction and publish what it returns. See the module
/// [`transactional`](mod@transactional).
#[cfg(feature = "macros")]
pub use posthouse_macros::transactional;
#[cfg(feature = "relay")]
pub use relay::{
    AdoptedCoverage, AdoptedRelay, AdoptedRelayBuilder, AdoptedScans, AdoptedStats, AdoptedTableStats, AttemptCounts,
    BreakerState, Connections, DestinationStats, GroupStats, LastRun, Relay, RelayBuilder, RelayStats, Run, RunCounts, RunEnd,
    RunOutcome, RunReport, Uncovered,
};
pub use router::{MAX_PLACES, Place, Router};
pub use settings::{
    Adopted, AdoptedNotify, AdoptedPayload, AdoptedPreset, AdoptedState, ArchiveFormat, CloudEvents, CloudEventsMode,
    ExchangeType, Group, Houses, HttpRoute, Misfire, OnExhausted, Ordering, QueueType, RabbitMqRoute, RelaySettings,
    RetentionSettings, Retry, Route, S3Settings, StateCode, Trigger, WhenBusy,
};
#[cfg(feature = "inbox")]
pub use settings::{ConsumerOrder, ConsumerSettings, IdFrom, InboxSettings, MissingId};

/// The package's README, whose example is compiled too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
