//! Publishing: a message is written in the caller's own transaction, and sent after its commit.

#[cfg(feature = "macros")]
pub mod transactional;
mod tx;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::Pool;
use tokio::sync::Notify;

use crate::message::{Checked, IntoMessage, Limits, MessageId};
use crate::store::{Backend, DEFAULT_HOUSES, InsertStatement, MAX_HOUSES, Tables};
use crate::{Error, Headers};

pub use tx::{Commit, Tx};

/// Publishes messages into one set of tables. Cheap to clone.
///
/// ```no_run
/// # async fn f(pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
/// use posthouse::{Message, Outbox};
///
/// let outbox = Outbox::new(pool.clone());
/// let mut tx = outbox.begin().await?;
/// sqlx::query("INSERT INTO orders (id) VALUES (7)").execute(&mut *tx).await?;
/// outbox.publish(&mut tx, Message::to("inventory.deduct").key(7).json(&serde_json::json!({ "order": 7 }))).await?;
/// outbox.commit(tx).await?; // commits, then wakes the relay
/// # Ok(()) }
/// ```
pub struct Outbox<DB: Backend> {
    inner: Arc<Inner<DB>>,
}

struct Inner<DB: Backend> {
    pool: Pool<DB>,
    tables: Tables,
    limits: Limits,
    houses: u16,
    notify: bool,
    trace: Option<TraceContext>,
    wake: Arc<Wake>,
    notifier: Notifier,
}

type TraceContext = Arc<dyn Fn(&mut Headers) + Send + Sync>;

impl<DB: Backend> Clone for Outbox<DB> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

impl<DB: Backend> fmt::Debug for Outbox<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("database", &<DB as sqlx::Database>::NAME)
            .field("tables", &self.inner.tables)
            .finish_non_exhaustive()
    }
}

/// Tells the relay in this process that there may be something to read.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    pub(crate) notify: Notify,
    /// A message was published in a transaction whose commit can't be seen.
    hinted: AtomicBool,
    /// Counts publishes.
    published: AtomicU64,
}

impl Wake {
    /// A commit was seen.
    pub(crate) fn committed(&self) {
        self.notify.notify_one();
    }

    /// A publish was seen whose commit may come any moment, or never.
    fn hint(&self) {
        self.published.fetch_add(1, Ordering::Relaxed);
        if !self.hinted.swap(true, Ordering::Relaxed) {
            self.notify.notify_one();
        }
    }

    /// Takes the hint.
    #[cfg(feature = "relay")]
    pub(crate) fn take_hint(&self) -> bool {
        self.hinted.swap(false, Ordering::Relaxed)
    }
}

/// Settings of an [`Outbox`] that differ from the defaults.
pub struct OutboxBuilder<DB: Backend> {
    pool: Pool<DB>,
    schema: Option<String>,
    prefix: String,
    limits: Limits,
    houses: u16,
    notify: bool,
    trace: Option<TraceContext>,
}

impl<DB: Backend> fmt::Debug for OutboxBuilder<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboxBuilder").field("schema", &self.schema).field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

impl<DB: Backend> OutboxBuilder<DB> {
    /// The schema (PostgreSQL; `public` by default) or database (MySQL; the connection's own by default) of the tables.
    /// SQLite has none.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The prefix of the tables' names; `posthouse_` by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// What `publish` accepts.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// How many houses a first migration makes: 1 to 4096, 64 by default. SQLite always has one.
    pub fn houses(mut self, houses: u16) -> Self {
        self.houses = houses;
        self
    }

    /// Whether a commit tells relays in other processes (PostgreSQL alone, debounced, after the commit). On by default.
    pub fn notify(mut self, on: bool) -> Self {
        self.notify = on;
        self
    }

    /// Called for each message at publish to add the current trace context (`traceparent`, `tracestate`) to its headers.
    pub fn trace_context(mut self, inject: impl Fn(&mut Headers) + Send + Sync + 'static) -> Self {
        self.trace = Some(Arc::new(inject));
        self
    }

    /// Checks the settings.
    pub fn build(self) -> Result<Outbox<DB>, Error> {
        if !(1..=MAX_HOUSES).contains(&self.houses) {
            return Err(Error::Config(format!("houses {}: must be 1 to {MAX_HOUSES}", self.houses)));
        }
        if !DB::SCHEMAS
            && let Some(schema) = &self.schema
        {
            return Err(Error::Config(format!(
                "schema {schema:?}: {} has none; the tables are in the file that the pool opens, so leave the setting out",
                <DB as sqlx::Database>::NAME
            )));
        }
        let schema = self.schema.as_deref().or(DB::DEFAULT_SCHEMA);
        Ok(Outbox {
            inner: Arc::new(Inner {
                tables: Tables::new(schema, &self.prefix, DB::QUOTE)?,
                pool: self.pool,
                limits: self.limits,
                houses: self.houses,
                notify: self.notify,
                trace: self.trace,
                wake: Arc::default(),
                notifier: Notifier::default(),
            }),
        })
    }
}

impl<DB: Backend> Outbox<DB> {
    /// An outbox in the default tables (`posthouse_…`).
    pub fn new(pool: Pool<DB>) -> Self {
        match Self::builder(pool).build() {
            Ok(outbox) => outbox,
            Err(e) => unreachable!("the defaults are valid: {e}"),
        }
    }

    /// Other tables, limits, or houses than the defaults.
    pub fn builder(pool: Pool<DB>) -> OutboxBuilder<DB> {
        OutboxBuilder {
            pool,
            schema: None,
            prefix: "posthouse_".into(),
            limits: Limits::default(),
            houses: DEFAULT_HOUSES,
            notify: true,
            trace: None,
        }
    }

    /// The names of its tables.
    pub fn tables(&self) -> &Tables {
        &self.inner.tables
    }

    /// The pool it was made with.
    pub fn pool(&self) -> &Pool<DB> {
        &self.inner.pool
    }

    /// What a relay asks of the database, for lists and operator actions where no relay runs. It makes connections of its
    /// own when they are needed; `deadline` is the longest that one call takes.
    #[cfg(feature = "relay")]
    pub fn store(&self, deadline: Duration) -> Arc<dyn crate::store::Store> {
        DB::store(&self.inner.pool, &self.inner.tables, deadline, None)
    }

    /// The same for people who look now and then: with at most this many connections (beside one for leases, which only relays
    /// use), each closed a minute after its last use.
    #[cfg(feature = "relay")]
    pub fn store_for_people(&self, deadline: Duration, connections: u32) -> Arc<dyn crate::store::Store> {
        DB::store(&self.inner.pool, &self.inner.tables, deadline, Some(connections.max(1)))
    }

    /// The same tables and settings through another pool.
    #[cfg(feature = "inbox")]
    pub(crate) fn with_pool(&self, pool: Pool<DB>) -> Self {
        let i = &self.inner;
        Self {
            inner: Arc::new(Inner {
                pool,
                tables: i.tables.clone(),
                limits: i.limits,
                houses: i.houses,
                notify: i.notify,
                trace: i.trace.clone(),
                wake: i.wake.clone(),
                notifier: Notifier::default(),
            }),
        }
    }

    /// How often something was published in this process: whoever sees the same number before and after knows that nothing
    /// was in between.
    #[cfg(feature = "inbox")]
    pub(crate) fn published(&self) -> u64 {
        self.inner.wake.published.load(Ordering::Relaxed)
    }

    #[cfg(feature = "relay")]
    pub(crate) fn wake(&self) -> Arc<Wake> {
        self.inner.wake.clone()
    }

    /// Creates or upgrades the tables. Safe when many processes do it at once; a newer schema is left alone.
    pub async fn migrate(&self) -> Result<(), Error> {
        DB::migrate(&self.inner.pool, &self.inner.tables, self.inner.houses).await
    }

    /// The SQL that a first [`migrate`](Self::migrate) runs, for people with their own migration tool.
    pub fn migration_sql(&self) -> String {
        self.migration_sql_from(0)
    }

    /// The SQL that [`migrate`](Self::migrate) runs on tables of schema version `from`; empty when they are new enough.
    pub fn migration_sql_from(&self, from: i32) -> String {
        DB::migration_text(&self.inner.tables, self.inner.houses, from)
    }

    /// Writes a message inside the transaction that `conn` is in; it is sent after that transaction commits.
    ///
    /// Refuses a connection that isn't in a transaction begun through sqlx. With a dedup key that was used before,
    /// nothing is written and the id of the first message comes back.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the field and the limit; [`Error::NotInTransaction`]; [`Error::Database`].
    pub async fn publish(&self, conn: &mut DB::Connection, message: impl IntoMessage) -> Result<MessageId, Error> {
        if !DB::in_transaction(conn).await? {
            return Err(Error::NotInTransaction);
        }
        let checked = self.check(message)?;
        let id = checked.id.clone();
        DB::insert(conn, &self.inner.tables, vec![checked]).await?;
        self.inner.wake.hint();
        Ok(id)
    }

    /// Writes many messages in one round trip (one per 500 on SQLite and MySQL), in the order given.
    /// Nothing is written when one of them is refused.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub async fn publish_many<I>(&self, conn: &mut DB::Connection, messages: I) -> Result<Vec<MessageId>, Error>
    where
        I: IntoIterator,
        I::Item: IntoMessage,
    {
        if !DB::in_transaction(conn).await? {
            return Err(Error::NotInTransaction);
        }
        let mut checked = messages.into_iter().map(|m| self.check(m)).collect::<Result<Vec<_>, _>>()?;
        let ids = checked.iter().map(|m| m.id.clone()).collect();
        // Within one statement, every row sees a dedup key as fresh; so the second of a pair is left out here.
        let mut seen = std::collections::HashSet::new();
        checked.retain(|m| m.dedup_key.as_ref().is_none_or(|key| seen.insert(key.clone())));
        if !checked.is_empty() {
            DB::insert(conn, &self.inner.tables, checked).await?;
            self.inner.wake.hint();
        }
        Ok(ids)
    }

    /// Writes a message in a transaction of its own: it doesn't commit or roll back with anything else.
    ///
    /// # Errors
    /// As [`publish`](Self::publish).
    pub async fn publish_alone(&self, message: impl IntoMessage) -> Result<MessageId, Error> {
        let mut tx = self.begin().await?;
        let id = self.publish(&mut tx, message).await?;
        self.commit(tx).await?;
        Ok(id)
    }

    /// The statement that publishes `message`, for drivers other than sqlx; run it inside your transaction.
    ///
    /// # Errors
    /// [`Error::Invalid`], as [`publish`](Self::publish).
    pub fn insert_statement(&self, message: impl IntoMessage) -> Result<InsertStatement, Error> {
        DB::insert_statement(&self.inner.tables, self.check(message)?)
    }

    fn check(&self, message: impl IntoMessage) -> Result<Checked, Error> {
        let mut message = message.into_message();
        if let Some(inject) = &self.inner.trace {
            inject(&mut message.headers);
        }
        message.check(&self.inner.limits)
    }

    /// Commits, then wakes the relay of this process at once and those of other processes where the database can tell them.
    ///
    /// If COMMIT itself fails, its outcome is unknown: a message that did commit is found by the relay.
    ///
    /// # Errors
    /// [`Error::Database`]; [`Error::RollbackOnly`] for a [`Tx`] in which a joined call failed.
    pub async fn commit(&self, tx: impl Commit<DB>) -> Result<(), Error> {
        let result = tx.end().await;
        self.committed();
        result
    }

    /// Says that a transaction with messages was committed in another way.
    pub fn committed(&self) {
        self.inner.wake.committed();
        if self.inner.notify {
            self.inner.notifier.said(&self.inner.pool, &self.inner.tables);
        }
    }
}

/// Creates or upgrades the default tables.
pub async fn migrate<DB: Backend>(pool: &Pool<DB>) -> Result<(), Error> {
    Outbox::new(pool.clone()).migrate().await
}

/// Tells relays in other processes after a commit, in a statement of its own: at once, then at most once per [`DEBOUNCE`].
#[derive(Debug, Default)]
struct Notifier {
    state: Arc<Mutex<NotifierState>>,
}

#[derive(Debug, Default)]
struct NotifierState {
    /// There was a commit since the last notification began.
    pending: bool,
    task: Option<tokio::task::JoinHandle<()>>,
}

/// Long enough that a busy publisher costs few notifications, short enough not to be felt.
const DEBOUNCE: Duration = Duration::from_millis(5);

impl Notifier {
    fn said<DB: Backend>(&self, pool: &Pool<DB>, tables: &Tables) {
        if !DB::NOTIFIES {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let mut state = lock(&self.state);
        state.pending = true;
        if state.task.is_some() {
            return;
        }
        let (pool, tables, shared) = (pool.clone(), tables.clone(), self.state.clone());
        state.task = Some(runtime.spawn(async move {
            loop {
                {
                    let mut state = lock(&shared);
                    if !state.pending {
                        state.task = None;
                        return;
                    }
                    state.pending = false;
                }
                if let Err(e) = DB::notify(&pool, &tables).await {
                    // Only a hint: every relay polls as well.
                    tracing::debug!(error = %e, "could not notify other relays");
                }
                tokio::time::sleep(DEBOUNCE).await;
            }
        }));
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        if let Some(task) = lock(&self.state).task.take() {
            task.abort();
        }
    }
}

/// Nothing panics while the lock is held, so a poisoned state is as good as any.
fn lock(state: &Mutex<NotifierState>) -> std::sync::MutexGuard<'_, NotifierState> {
    state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
