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
pub struct Tx<DB: Backend> {
    /// None only once it is over.
    inner: Option<Transaction<'static, DB>>,
    outbox: Outbox<DB>,
    /// Trace headers of the message that is handled in it, for what is published.
    trace: Vec<(&'static str, String)>,
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

impl<DB: Backend> From<Tx<DB>> for Transaction<'static, DB> {
    fn from(mut tx: Tx<DB>) -> Self {
        tx.inner.take().expect(THERE)
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

impl<DB: Backend> Tx<DB> {
    /// Commits, then wakes the relay. See [`Outbox::commit`].
    pub async fn commit(self) -> Result<(), Error> {
        self.outbox.clone().commit(self).await
    }

    /// Rolls back; nothing is sent.
    pub async fn rollback(self) -> Result<(), Error> {
        Ok(Transaction::from(self).rollback().await?)
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
        let pool = self.inner.pool.clone();
        let begin = Beginning(Some(Box::pin(async move { pool.begin_with(DB::BEGIN).await })));
        Ok(Tx { inner: Some(begin.await?), outbox: self.clone(), trace: Vec::new() })
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
