//! The inbox: a message that is received twice has its effect once. Feature `inbox`.
//!
//! The id of a message is inserted in the same transaction as its effect: both are there, or neither. A duplicate finds the
//! id and has no effect. A failure is rolled back, written down with a copy of the message, and run again by a retry worker
//! until it works or its attempts are used up.
//!
//! ```no_run
//! # #[cfg(feature = "sqlite")]
//! # async fn f(pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
//! use posthouse::inbox::{Handled, HandlerError, Inbox, Incoming};
//! use posthouse::{Message, Tx};
//!
//! #[derive(serde::Deserialize)]
//! struct Deduct { sku: String, count: i64 }
//!
//! async fn deduct(tx: &mut Tx<sqlx::Sqlite>, m: Deduct) -> Result<(), HandlerError> {
//!     sqlx::query("UPDATE stock SET count = count - ? WHERE sku = ?").bind(m.count).bind(&m.sku).execute(&mut **tx).await?;
//!     // Emitted with the effect, or not at all; and not again for a duplicate.
//!     tx.publish(Message::to("stock.deducted").key(&m.sku)).await?;
//!     Ok(())
//! }
//!
//! let inbox = Inbox::new(pool, "inventory")?.on_fn("stock.deduct.v1", deduct);
//! inbox.outbox().migrate().await?;
//! let worker = inbox.start_worker().await?; // runs what failed again
//!
//! // For each message that arrives, from wherever:
//! let incoming = Incoming::new("order-7", r#"{"sku":"A1","count":2}"#).typed("stock.deduct.v1");
//! match inbox.handle(&incoming).await? { // an error: negatively acknowledge with a delay
//!     Handled::Processed | Handled::Duplicate | Handled::WillRetry(_) | Handled::Failed => { /* acknowledge */ }
//! }
//! worker.shutdown(std::time::Duration::from_secs(30)).await;
//! # Ok(()) }
//! # fn main() {}
//! ```
//!
//! # When to acknowledge
//!
//! | result | meaning | the message |
//! |---|---|---|
//! | [`Processed`](Handled::Processed) | it had its effect, committed | acknowledge |
//! | [`Duplicate`](Handled::Duplicate) | it had it before; the handler was not called | acknowledge |
//! | [`Failed`](Handled::Failed) | given up, now or before; kept for a person | acknowledge |
//! | [`WillRetry`](Handled::WillRetry) | it failed, and is run again at this time | acknowledge if a retry worker with its handler runs for this consumer; if not, negatively acknowledge with a delay, and it is run when it comes after that time |
//! | `Err`, kind `Invalid` | [`MissingId::Reject`](crate::MissingId::Reject) refused it | reject |
//! | any other `Err` | nothing is written, or nobody knows | negatively acknowledge with a delay: it is a duplicate then, or run |
//!
//! # What a handler must keep to
//!
//! Its effect is in the transaction it is given; what it does elsewhere may happen more often than once. It doesn't end that
//! transaction (COMMIT, ROLLBACK; on MySQL, DDL does), and returns errors of the database: after one the transaction is gone,
//! which is found out before the commit, but on MySQL and SQLite what it writes from then on is outside of any transaction. It
//! may be called several times for one message, also within one call of `process`, where another transaction was in the way.
//!
//! | file | what it does |
//! |---|---|
//! | `incoming.rs` | a message as it was received, and its stored copy |
//! | `process.rs` | one message, once |
//! | `handler.rs` | registered handlers, and what they say when they fail |
//! | `worker.rs` | runs again what failed |
//! | `alarm.rs` | when this process's own retries are due |
//! | `retention.rs` | removes rows of old successes |
//! | `republish.rs` | sends what is due to the consumer's own queue instead |
//! | `stats.rs` | what can be seen from outside |
//! | `admin.rs` | what people look at and change |

mod admin;
mod alarm;
mod handler;
mod incoming;
mod process;
#[cfg(feature = "relay")]
mod republish;
mod retention;
mod stats;
mod worker;

use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde::de::DeserializeOwned;
use sqlx::Pool;

use crate::message::MAX_NAME;
use crate::settings::InboxSettings;
use crate::store::{Backend, InboxStatus, InboxStore, Tables};
use crate::{Error, Headers, Outbox, Tx};

pub use handler::{Handler, HandlerError, HandlerFn};
#[cfg(feature = "rabbitmq")]
pub(crate) use incoming::hex;
pub use incoming::{Incoming, Source};
pub use retention::PurgeHold;
pub use stats::InboxStats;
pub use worker::{InboxWorker, SharedWorker};

#[cfg(feature = "relay")]
use republish::Republish;

use handler::{ByFn, ByType, Handlers};

/// What came of a message. See [the table](self#when-to-acknowledge).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "it says whether the message may be acknowledged"]
pub enum Handled {
    /// It had its effect, now.
    Processed,
    /// It had its effect before; the handler was not called.
    Duplicate,
    /// It failed and waits, or another process is running it: the earliest time of the next run, by the database's clock.
    WillRetry(SystemTime),
    /// It is given up or set aside, and kept as FAILED for a person to look at.
    Failed,
}

/// Handles each message once, for one consumer. Cheap to clone.
///
/// Consumers with different names (services, usually) share a table without knowing of each other: each handles its own copy.
pub struct Inbox<DB: Backend> {
    outbox: Outbox<DB>,
    shared: Arc<Shared>,
    handlers: Arc<Handlers<DB>>,
    trace: Option<Trace>,
    #[cfg(feature = "relay")]
    republish: Option<Arc<Republish>>,
}

#[derive(Debug)]
struct Shared {
    consumer: String,
    settings: InboxSettings,
    /// Stands in rows that this process is running.
    owner: String,
    /// Wakes the retry workers of this process.
    alarm: alarm::Alarm,
    /// Keeps them from removing old rows.
    replay: retention::Replay,
    stats: Mutex<InboxStats>,
}

/// Makes the span of a handler's run out of a message's headers.
type Trace = Arc<dyn Fn(&Headers) -> tracing::Span + Send + Sync>;

impl<DB: Backend> Clone for Inbox<DB> {
    fn clone(&self) -> Self {
        Self {
            outbox: self.outbox.clone(),
            shared: self.shared.clone(),
            handlers: self.handlers.clone(),
            trace: self.trace.clone(),
            #[cfg(feature = "relay")]
            republish: self.republish.clone(),
        }
    }
}

impl<DB: Backend> fmt::Debug for Inbox<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("outbox", &self.outbox)
            .field("consumer", &self.shared.consumer)
            .field("handlers", &self.handlers.kinds().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

/// Settings of an [`Inbox`] that differ from the defaults.
#[derive(Debug)]
pub struct InboxBuilder<DB: Backend> {
    pool: Pool<DB>,
    consumer: String,
    schema: Option<String>,
    prefix: String,
    settings: InboxSettings,
}

impl<DB: Backend> InboxBuilder<DB> {
    /// The schema of the tables; see [`OutboxBuilder::schema`](crate::OutboxBuilder::schema).
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The prefix of the tables' names; `posthouse_` by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Replaces all settings.
    pub fn settings(mut self, settings: InboxSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the consumer's name, [`Error::Config`] for everything else that can't hold.
    pub fn build(self) -> Result<Inbox<DB>, Error> {
        let mut outbox = Outbox::builder(self.pool).prefix(self.prefix);
        if let Some(schema) = self.schema {
            outbox = outbox.schema(schema);
        }
        Inbox::of(&outbox.build()?, self.consumer, self.settings)
    }
}

impl<DB: Backend> Inbox<DB> {
    /// The inbox of a consumer in the default tables (`posthouse_…`).
    ///
    /// # Errors
    /// [`Error::Invalid`] unless the consumer's name has 1 to 255 bytes and no NUL.
    pub fn new(pool: Pool<DB>, consumer: impl Into<String>) -> Result<Self, Error> {
        Self::builder(pool, consumer).build()
    }

    /// Other tables or settings than the defaults.
    pub fn builder(pool: Pool<DB>, consumer: impl Into<String>) -> InboxBuilder<DB> {
        InboxBuilder {
            pool,
            consumer: consumer.into(),
            schema: None,
            prefix: "posthouse_".into(),
            settings: InboxSettings::default(),
        }
    }

    /// The inbox of a consumer in the tables of an outbox. Its handlers publish through that outbox, and a relay of it in this
    /// process is woken by their commits.
    ///
    /// # Errors
    /// As [`InboxBuilder::build`].
    pub fn of(outbox: &Outbox<DB>, consumer: impl Into<String>, settings: InboxSettings) -> Result<Self, Error> {
        let consumer = consumer.into();
        if consumer.is_empty() || consumer.len() > MAX_NAME || consumer.contains('\0') {
            return Err(Error::invalid("consumer", format!("{consumer:?} must have 1 to {MAX_NAME} bytes and no NUL")));
        }
        let problems = settings.problems();
        if !problems.is_empty() {
            let lines: Vec<_> = problems.into_iter().map(|(field, why)| format!("inbox.{field}: {why}")).collect();
            return Err(Error::Config(lines.join("; ")));
        }
        let owner = format!("{}-{:06x}", std::process::id(), fastrand::u32(..) & 0xff_ffff);
        let shared = Shared {
            consumer,
            settings,
            owner,
            alarm: alarm::Alarm::default(),
            replay: retention::Replay::default(),
            stats: Mutex::default(),
        };
        Ok(Self {
            outbox: outbox.clone(),
            shared: Arc::new(shared),
            handlers: Arc::default(),
            trace: None,
            #[cfg(feature = "relay")]
            republish: None,
        })
    }

    /// Makes the span that a handler runs in, out of the message's headers: where a service joins its own tracing to the trace
    /// of whoever sent the message. By default it is a span `posthouse.handle` with consumer, message id and type.
    ///
    /// With the crates `opentelemetry` and `tracing-opentelemetry`:
    ///
    /// ```no_run
    /// # #[cfg(feature = "sqlite")]
    /// # fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> posthouse::Inbox<sqlx::Sqlite> {
    /// use opentelemetry::propagation::Extractor;
    /// use tracing_opentelemetry::OpenTelemetrySpanExt;
    ///
    /// struct Carrier<'a>(&'a posthouse::Headers);
    /// impl Extractor for Carrier<'_> {
    ///     fn get(&self, key: &str) -> Option<&str> {
    ///         self.0.get(key)
    ///     }
    ///     fn keys(&self) -> Vec<&str> {
    ///         self.0.iter().map(|(name, _)| name).collect()
    ///     }
    /// }
    ///
    /// let inbox = inbox.trace_context(|headers| {
    ///     let parent = opentelemetry::global::get_text_map_propagator(|p| p.extract(&Carrier(headers)));
    ///     let span = tracing::info_span!("deduct");
    ///     let _ = span.set_parent(parent);
    ///     span
    /// });
    /// # inbox }
    /// # fn main() {}
    /// ```
    ///
    /// What a handler publishes through its [`Tx`] carries the trace context of the message that it handles, unless the
    /// outbox's own [`trace_context`](crate::OutboxBuilder::trace_context) puts the current one there.
    #[must_use]
    pub fn trace_context(mut self, make: impl Fn(&Headers) -> tracing::Span + Send + Sync + 'static) -> Self {
        self.trace = Some(Arc::new(make));
        self
    }

    /// Registers the handler of a type; one that was registered before is replaced.
    #[must_use]
    pub fn on(mut self, kind: impl Into<String>, handler: impl Handler<DB>) -> Self {
        Arc::make_mut(&mut self.handlers).add(kind.into(), handler);
        self
    }

    /// Registers an `async fn(&mut Tx<DB>, M) -> Result<(), HandlerError>` as the handler of a type. (What needs something
    /// of its own, a client or a setting, is a struct that implements [`Handler`].)
    #[must_use]
    pub fn on_fn<M, F>(self, kind: impl Into<String>, handler: F) -> Self
    where
        M: DeserializeOwned + Send + 'static,
        F: for<'a> HandlerFn<'a, DB, M> + 'static,
    {
        self.on(kind, ByFn(handler, PhantomData))
    }

    /// Its outbox: the same tables. `inbox.outbox().migrate()` makes them.
    pub fn outbox(&self) -> &Outbox<DB> {
        &self.outbox
    }

    /// The consumer's name.
    pub fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    /// Its settings.
    pub fn settings(&self) -> &InboxSettings {
        &self.shared.settings
    }

    /// What it did in this process, its clones and their retry workers included.
    pub fn stats(&self) -> InboxStats {
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, change: impl FnOnce(&mut InboxStats)) {
        // Nothing panics while it is held; half-updated figures would be harmless too.
        change(&mut self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Lists and operator actions, of all consumers in these tables.
    pub fn store(&self) -> Arc<dyn InboxStore> {
        Arc::new(admin::Admin(self.clone()))
    }

    fn tables(&self) -> &Tables {
        self.outbox.tables()
    }

    /// Of one database call.
    fn deadline(&self) -> std::time::Duration {
        self.shared.settings.database_timeout
    }

    fn owner(&self) -> &str {
        &self.shared.owner
    }

    /// Handles a message with `handler`, once: the message's id and what the handler does in `tx` commit together.
    ///
    /// A known message that is done or given up is answered without calling the handler; one that failed is run again when
    /// its time has come, however early it is redelivered. The handler is called again at once where another transaction was
    /// in the way (a deadlock, a serialization failure). When it fails, its transaction is rolled back, and the failure is
    /// recorded with a copy of the message in a transaction of its own.
    ///
    /// ```no_run
    /// # #[cfg(feature = "sqlite")]
    /// # async fn f(inbox: posthouse::inbox::Inbox<sqlx::Sqlite>, incoming: posthouse::inbox::Incoming) -> Result<(), posthouse::Error> {
    /// use posthouse::Tx;
    /// use posthouse::inbox::HandlerError;
    ///
    /// let handled = inbox.process(&incoming, async |tx: &mut Tx<sqlx::Sqlite>| -> Result<(), HandlerError> {
    ///     let order: i64 = incoming.json()?;
    ///     sqlx::query("UPDATE orders SET paid = 1 WHERE id = ?").bind(order).execute(&mut **tx).await?;
    ///     Ok(())
    /// }).await?;
    /// # Ok(()) }
    /// # fn main() {}
    /// ```
    ///
    /// The closure is cloned for each call, so what it captures is borrowed or can be cloned. The future is `Send`, so this
    /// works in spawned tasks, also with what the closure borrows.
    ///
    /// # Errors
    /// The message is neither done nor recorded, or nobody knows (the database didn't answer): negatively acknowledge it with
    /// a delay. [`Error::Invalid`] under [`MissingId::Reject`](crate::MissingId::Reject).
    ///
    /// Dropped half-way, nothing is committed, as after a crash.
    pub async fn process<E, F>(&self, incoming: &Incoming, handler: F) -> Result<Handled, Error>
    where
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<(), E> + Clone,
        E: Into<HandlerError>,
    {
        self.run(incoming, &mut process::Inline(incoming, handler)).await
    }

    /// Handles a message with the handler registered for its type. Without one, and when the payload can't be decoded, it is
    /// FAILED at once; requeued, it is run by whoever has the handler then.
    ///
    /// # Errors
    /// As [`process`](Self::process).
    pub async fn handle(&self, incoming: &Incoming) -> Result<Handled, Error> {
        self.run(incoming, &mut ByType { handlers: &*self.handlers, incoming }).await
    }

    /// Inserts the message's id in the caller's own transaction: true if it is new (or waits for a retry that is due), and the
    /// caller shall have the effect in this transaction; false if it is known. Failures are the caller's business.
    ///
    /// ```no_run
    /// # #[cfg(feature = "sqlite")]
    /// # async fn f(inbox: posthouse::inbox::Inbox<sqlx::Sqlite>, incoming: posthouse::inbox::Incoming) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = inbox.outbox().begin().await?;
    /// if inbox.first_time(&mut tx, &incoming).await? {
    ///     sqlx::query("UPDATE orders SET paid = 1 WHERE id = 7").execute(&mut *tx).await?;
    /// }
    /// tx.commit().await?;
    /// # Ok(()) }
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`Error::NotInTransaction`]; [`Error::Invalid`] for a message that is malformed or without a usable id (unless
    /// [`MissingId::Hash`](crate::MissingId::Hash) gives it one); [`Error::Database`], of kind `Conflict` where another
    /// transaction was in the way: run yours again.
    pub async fn first_time(&self, conn: &mut DB::Connection, incoming: &Incoming) -> Result<bool, Error> {
        if !DB::in_transaction(conn).await? {
            return Err(Error::NotInTransaction);
        }
        let id = self.id_of(incoming)?;
        let stored = incoming.stored();
        let row = self.new_row(&id, &stored, InboxStatus::Success);
        Ok(DB::inbox_insert(conn, self.tables(), &row).await?
            || DB::inbox_adopt(conn, self.tables(), self.consumer(), &id).await?)
    }
}
