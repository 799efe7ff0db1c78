//! [`Tx`]: a transaction that wakes the relay when it commits.

use std::ops::{AsyncFnOnce, Deref, DerefMut};

use sqlx::Transaction;

use super::Outbox;
use crate::Error;
use crate::store::Backend;

/// A transaction begun by [`Outbox::begin`]. Derefs to the connection, so it can be used wherever sqlx takes one.
///
/// Dropped without [`commit`](Self::commit), it rolls back.
pub struct Tx<DB: Backend> {
    inner: Transaction<'static, DB>,
    outbox: Outbox<DB>,
}

impl<DB: Backend> std::fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").field("outbox", &self.outbox).finish_non_exhaustive()
    }
}

impl<DB: Backend> Deref for Tx<DB> {
    type Target = DB::Connection;
    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

impl<DB: Backend> DerefMut for Tx<DB> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.inner
    }
}

impl<DB: Backend> From<Tx<DB>> for Transaction<'static, DB> {
    fn from(tx: Tx<DB>) -> Self {
        tx.inner
    }
}

impl<DB: Backend> Tx<DB> {
    /// Commits, then wakes the relay. See [`Outbox::commit`].
    pub async fn commit(self) -> Result<(), Error> {
        self.outbox.clone().commit(self.inner).await
    }

    /// Rolls back; nothing is sent.
    pub async fn rollback(self) -> Result<(), Error> {
        Ok(self.inner.rollback().await?)
    }

    /// Publishes in this transaction. See [`Outbox::publish`].
    pub async fn publish(&mut self, message: impl crate::IntoMessage) -> Result<crate::MessageId, Error> {
        let outbox = self.outbox.clone();
        outbox.publish(&mut self.inner, message).await
    }
}

impl<DB: Backend> Outbox<DB> {
    /// Begins a transaction (SQLite: `BEGIN IMMEDIATE`, so that it can't fail half-way because another one writes).
    pub async fn begin(&self) -> Result<Tx<DB>, Error> {
        Ok(Tx { inner: self.inner.pool.begin_with(DB::BEGIN).await?, outbox: self.clone() })
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
                    tracing::debug!(error = %rollback, "rollback failed; the connection is closed");
                }
                Err(e)
            }
        }
    }
}
