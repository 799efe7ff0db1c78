//! [`Tx`]: a transaction that wakes the relay when it commits.

use std::ops::{AsyncFnOnce, Deref, DerefMut};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::{ConnectOptions as _, Transaction};
use tokio::runtime::Handle;

use super::Outbox;
use crate::Error;
use crate::store::Backend;

/// A transaction begun by [`Outbox::begin`]. Derefs to the connection, so it can be used wherever sqlx takes one.
///
/// Dropped without [`commit`](Self::commit), it rolls back, also when a future that holds it is dropped half-way. With MySQL,
/// where the driver may lose step when a statement is dropped, the connection then goes back to the pool only after a check,
/// and is closed when it fails. That covers a `Tx` that is dropped together with its statement; a statement that is dropped
/// alone (`select!`, a timeout around one query) while the transaction goes on is not covered: roll back after it.
///
/// A function under `#[posthouse::transactional]` (feature `macros`) that joins a `Tx` and fails makes it *rollback-only*:
/// whoever commits it then gets [`Error::RollbackOnly`], and it rolls back, also where the function's error was dropped.
pub struct Tx<DB: Backend> {
    /// None only once it is over.
    inner: Option<Transaction<'static, DB>>,
    outbox: Outbox<DB>,
    rollback_only: Option<RollbackOnly>,
    /// Trace headers of the message that is handled in it, for what is published.
    trace: Vec<(&'static str, String)>,
}

/// Why a transaction can't be committed any more.
#[derive(Debug)]
struct RollbackOnly {
    why: String,
    /// A statement may still be on its way.
    cut_off: bool,
}

impl<DB: Backend> std::fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").field("outbox", &self.outbox).finish_non_exhaustive()
    }
}

/// Whatever takes the transaction out takes the `Tx` as well.
const THERE: &str = "a Tx holds its transaction until it is used up";

impl<DB: Backend> Deref for Tx<DB> {
    type Target = DB::Connection;
    fn deref(&self) -> &Self::Target {
        self.inner.as_ref().expect(THERE)
    }
}

impl<DB: Backend> DerefMut for Tx<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        self.inner.as_mut().expect(THERE)
    }
}

/// For what wants a transaction of sqlx's. Its own `commit` is a plain one, which wakes nobody.
impl<DB: Backend> TryFrom<Tx<DB>> for Transaction<'static, DB> {
    type Error = Error;

    /// # Errors
    /// [`Error::RollbackOnly`]; then it is rolled back.
    fn try_from(mut tx: Tx<DB>) -> Result<Self, Error> {
        match tx.refusal() {
            Some(refused) => Err(refused),
            None => Ok(tx.inner.take().expect(THERE)),
        }
    }
}

impl<DB: Backend> Drop for Tx<DB> {
    fn drop(&mut self) {
        if !DB::STATEMENTS_CAN_BE_DROPPED
            && let Some(inner) = self.inner.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(give_back(inner, self.outbox.pool().clone()));
        }
    }
}

/// Rolls back on a connection that may be out of step with its server, and sees to it that the pool gets it only if it isn't.
async fn give_back<DB: Backend>(mut tx: Transaction<'static, DB>, pool: sqlx::Pool<DB>) {
    const AGAIN: Duration = Duration::from_secs(1);
    if DB::in_step(&mut tx).await {
        if let Err(e) = tx.rollback().await {
            tracing::debug!(error = %e, "rollback failed; the pool tests the connection");
        }
        return;
    }
    tracing::debug!("a transaction was dropped in the middle of a statement; its connection is closed");
    loop {
        match pool.connect_options().connect().await {
            Ok(mut fresh) => {
                // The pool shall make its next connection itself, with what its owner does to new ones. So it gets one back
                // that its test shows to be gone.
                DB::end_session(&mut fresh).await;
                // There is no other way to get a connection out of a transaction of sqlx's.
                std::mem::swap(&mut *tx, &mut fresh);
                // Closes the socket, whereupon the server rolls back.
                drop(fresh);
                return;
            }
            Err(_) if pool.is_closed() => return,
            Err(e) => {
                tracing::warn!(error = %e, "can't connect, to close a connection that was dropped in the middle of a statement");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

/// A BEGIN on its way. sqlx 0.9.0 counts a transaction only once the server has answered, and rolls back only those it
/// counted: dropped before, it would give the pool a connection inside a transaction. So this is never dropped half-way.
struct Beginning<DB: Backend>(Option<BoxFuture<'static, Result<Transaction<'static, DB>, sqlx::Error>>>);

impl<DB: Backend> Future for Beginning<DB> {
    type Output = Result<Transaction<'static, DB>, sqlx::Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let begun = match &mut self.0 {
            Some(begin) => begin.as_mut().poll(context),
            None => unreachable!("polled after it was ready"),
        };
        if begun.is_ready() {
            self.0 = None;
        }
        begun
    }
}

impl<DB: Backend> Drop for Beginning<DB> {
    fn drop(&mut self) {
        if let Some(begin) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            // Dropped once it has begun, a transaction rolls back.
            runtime.spawn(begin);
        }
    }
}

/// What [`Outbox::commit`] takes: a [`Tx`], or a transaction that sqlx began.
#[diagnostic::on_unimplemented(message = "`{Self}` is no transaction that an outbox can commit")]
pub trait Commit<DB: Backend>: sealed::Sealed {
    /// Commits, and wakes nobody.
    #[doc(hidden)]
    fn end(self) -> impl Future<Output = Result<(), Error>> + Send;
}

mod sealed {
    pub trait Sealed {}
    impl<DB: crate::store::Backend> Sealed for super::Tx<DB> {}
    impl<DB: crate::store::Backend> Sealed for super::Transaction<'_, DB> {}
}

impl<DB: Backend> Commit<DB> for Transaction<'_, DB> {
    async fn end(self) -> Result<(), Error> {
        Ok(self.commit().await?)
    }
}

/// The one way in which a `Tx` is committed.
impl<DB: Backend> Commit<DB> for Tx<DB> {
    async fn end(mut self) -> Result<(), Error> {
        if let Some(refused) = self.refusal() {
            if let Err(e) = self.rollback().await {
                tracing::debug!(error = %e, "rollback failed");
            }
            return Err(refused);
        }
        Ok(self.inner.take().expect(THERE).commit().await?)
    }
}

impl<DB: Backend> Tx<DB> {
    /// Commits, then wakes the relay. See [`Outbox::commit`].
    pub async fn commit(self) -> Result<(), Error> {
        self.outbox.clone().commit(self).await
    }

    /// Rolls back; nothing is sent.
    pub async fn rollback(mut self) -> Result<(), Error> {
        if self.cut_off() {
            // What a dropped `Tx` goes through makes sure of the connection.
            return Ok(());
        }
        Ok(self.inner.take().expect(THERE).rollback().await?)
    }

    /// What a commit would answer, where it would be refused without asking the database.
    pub(crate) fn refusal(&self) -> Option<Error> {
        self.rollback_only.as_ref().map(|r| Error::RollbackOnly(r.why.clone()))
    }

    /// Whether a joined call was dropped, maybe in the middle of a statement.
    pub(crate) fn cut_off(&self) -> bool {
        self.rollback_only.as_ref().is_some_and(|r| r.cut_off)
    }

    /// From now on it can only be rolled back. The first reason is the one that is told.
    #[cfg(feature = "macros")]
    pub(crate) fn refuse(&mut self, why: String, cut_off: bool) {
        match &mut self.rollback_only {
            Some(first) => first.cut_off |= cut_off,
            none => *none = Some(RollbackOnly { why, cut_off }),
        }
    }

    /// The outbox that began it.
    #[cfg(feature = "macros")]
    pub(crate) fn outbox(&self) -> &Outbox<DB> {
        &self.outbox
    }

    /// Publishes in this transaction. See [`Outbox::publish`].
    pub async fn publish(&mut self, message: impl crate::IntoMessage) -> Result<crate::MessageId, Error> {
        let outbox = self.outbox.clone();
        let mut message = message.into_message();
        if message.headers.get("traceparent").is_none() {
            for (name, value) in &self.trace {
                message.headers.insert(*name, value);
            }
        }
        outbox.publish(self, message).await
    }

    /// What is published from here on belongs to the trace that these headers tell of.
    #[cfg(feature = "inbox")]
    pub(crate) fn continue_trace(&mut self, headers: &crate::Headers) {
        let header = |name: &'static str| headers.get(name).map(|value| (name, value.to_owned()));
        self.trace = ["traceparent", "tracestate"].into_iter().filter_map(header).collect();
    }
}

impl<DB: Backend> Outbox<DB> {
    /// Begins a transaction (SQLite: `BEGIN IMMEDIATE`, so that it can't fail half-way because another one writes).
    ///
    /// The future may be dropped at any point. That is not so with `begin` of sqlx's pool on PostgreSQL and MySQL: dropped
    /// while BEGIN is on its way, it leaves the transaction open on a connection that goes back to the pool.
    pub async fn begin(&self) -> Result<Tx<DB>, Error> {
        self.begin_by(DB::BEGIN).await
    }

    /// [`begin`](Self::begin) by a statement that does more.
    pub(crate) async fn begin_by(&self, statement: &'static str) -> Result<Tx<DB>, Error> {
        let pool = self.inner.pool.clone();
        let begin = Beginning(Some(Box::pin(async move { pool.begin_with(statement).await })));
        Ok(Tx { inner: Some(begin.await?), outbox: self.clone(), rollback_only: None, trace: Vec::new() })
    }

    /// Runs `f` in a transaction: commits when it returns Ok, rolls back when it returns Err or is dropped.
    ///
    /// ```no_run
    /// # use posthouse::{Error, Message, Outbox, Tx};
    /// # async fn f(outbox: Outbox<sqlx::Sqlite>) -> Result<(), Error> {
    /// let id = outbox.transaction(async |tx: &mut Tx<sqlx::Sqlite>| {
    ///     sqlx::query("INSERT INTO orders (id) VALUES (7)").execute(&mut **tx).await?;
    ///     tx.publish(Message::to("orders").payload("7")).await
    /// }).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// The future is `Send`, so this works in spawned tasks and in handlers of web frameworks, also with what `f` borrows:
    ///
    /// ```no_run
    /// # use posthouse::{Error, Message, MessageId, Outbox, Tx};
    /// async fn place(outbox: Outbox<sqlx::Sqlite>, order: i64) -> Result<MessageId, Error> {
    ///     outbox.transaction(async |tx: &mut Tx<sqlx::Sqlite>| {
    ///         sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(order).execute(&mut **tx).await?;
    ///         tx.publish(Message::to("orders").key(order)).await
    ///     }).await
    /// }
    /// # async fn f(outbox: Outbox<sqlx::Sqlite>) -> Result<(), Box<dyn std::error::Error>> {
    /// let id = tokio::spawn(place(outbox, 7)).await??;
    /// # Ok(()) }
    /// ```
    pub async fn transaction<T, E, F>(&self, f: F) -> Result<T, E>
    where
        F: AsyncFnOnce(&mut Tx<DB>) -> Result<T, E>,
        E: From<Error>,
    {
        let mut tx = self.begin().await?;
        match f(&mut tx).await {
            Ok(value) => {
                tx.commit().await?;
                Ok(value)
            }
            Err(e) => {
                // Dropping rolls back as well; this way the connection is clean before it goes back to the pool.
                if let Err(rollback) = tx.rollback().await {
                    tracing::debug!(error = %rollback, "rollback failed");
                }
                Err(e)
            }
        }
    }
}
