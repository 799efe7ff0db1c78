//! Handlers, and what they say when they fail.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use super::process::Run;
use super::{InboxWorker, Incoming};
use crate::store::Backend;
use crate::{Error, ErrorKind, Tx};

/// What a handler says when it fails: what becomes of the message. Any error converts into "try again".
#[derive(Debug)]
pub struct HandlerError {
    pub(super) verdict: Verdict,
    pub(super) text: String,
    /// Another transaction was in the way; running it again at once may do.
    pub(super) conflict: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Retry(Option<Duration>),
    Reject,
    Snooze(Duration),
}

impl HandlerError {
    /// Try again with back-off, until the attempts are used up.
    pub fn retry(error: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Retry(None), text: error.to_string(), conflict: false }
    }

    /// Try again after this time instead of the back-off; counts as an attempt.
    pub fn retry_after(after: Duration, error: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Retry(Some(after)), ..Self::retry(error) }
    }

    /// It can never work: FAILED at once.
    pub fn reject(error: impl fmt::Display) -> Self {
        Self { verdict: Verdict::Reject, ..Self::retry(error) }
    }

    /// Not now: run it again after this time. No failure, so no attempt is counted, and it may go on for ever.
    pub fn snooze(after: Duration) -> Self {
        Self { verdict: Verdict::Snooze(after), ..Self::retry("") }
    }
}

impl fmt::Display for HandlerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<E: std::error::Error + 'static> From<E> for HandlerError {
    fn from(e: E) -> Self {
        let mut text = e.to_string();
        let mut conflict = false;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&e);
        while let Some(this) = cause {
            let said = this.to_string();
            if !text.contains(&said) {
                text = format!("{text}: {said}");
            }
            conflict |= match (this.downcast_ref::<Error>(), this.downcast_ref::<sqlx::Error>()) {
                (Some(e), _) => e.kind() == ErrorKind::Conflict,
                (_, Some(e)) => Error::kind_of(e) == ErrorKind::Conflict,
                _ => false,
            };
            cause = this.source();
        }
        Self { verdict: Verdict::Retry(None), text, conflict }
    }
}

/// Handles the messages of one type; registered with [`Inbox::on`](super::Inbox::on).
///
/// ```
/// use posthouse::Tx;
/// use posthouse::inbox::{Handler, HandlerError};
///
/// #[derive(serde::Deserialize)]
/// struct Deduct { sku: String, count: i64 }
///
/// struct DeductStock { allow_negative: bool }
///
/// impl Handler<sqlx::Sqlite> for DeductStock {
///     type Message = Deduct;
///     async fn handle(&self, tx: &mut Tx<sqlx::Sqlite>, m: Deduct) -> Result<(), HandlerError> {
///         let done = sqlx::query("UPDATE stock SET count = count - ?1 WHERE sku = ?2 AND (?3 OR count >= ?1)")
///             .bind(m.count).bind(&m.sku).bind(self.allow_negative)
///             .execute(&mut **tx).await?; // a database error: try again
///         if done.rows_affected() == 0 {
///             return Err(HandlerError::reject(format!("not enough of {}", m.sku)));
///         }
///         Ok(())
///     }
/// }
/// ```
pub trait Handler<DB: Backend>: Send + Sync + 'static {
    /// What the payload is decoded to.
    type Message: DeserializeOwned + Send;

    /// Has the effect, inside the transaction that also holds the message's id. It must not commit, and an error of the
    /// database must be returned: after one, the transaction may be gone.
    fn handle(&self, tx: &mut Tx<DB>, message: Self::Message) -> impl Future<Output = Result<(), HandlerError>> + Send;

    /// Decodes the message: the payload as JSON, unless a handler does it in another way. For the whole message use
    /// `type Message = Incoming` and return a clone of it.
    ///
    /// # Errors
    /// [`HandlerError::reject`] for a message that can't be read.
    fn decode(&self, incoming: &Incoming) -> Result<Self::Message, HandlerError> {
        incoming.json()
    }
}

/// An `async fn(&mut Tx<DB>, M) -> Result<(), HandlerError>`; see [`Inbox::on_fn`](super::Inbox::on_fn).
pub trait HandlerFn<'a, DB: Backend, M>: Send + Sync {
    /// What it returns.
    type Future: Future<Output = Result<(), HandlerError>> + Send + 'a;
    /// Calls it.
    fn call(&self, tx: &'a mut Tx<DB>, message: M) -> Self::Future;
}

impl<'a, DB, M, F, Fut> HandlerFn<'a, DB, M> for F
where
    DB: Backend,
    F: Fn(&'a mut Tx<DB>, M) -> Fut + Send + Sync,
    Fut: Future<Output = Result<(), HandlerError>> + Send + 'a,
{
    type Future = Fut;
    fn call(&self, tx: &'a mut Tx<DB>, message: M) -> Fut {
        self(tx, message)
    }
}

/// A function as a [`Handler`].
pub(super) struct ByFn<F, M>(pub(super) F, pub(super) PhantomData<fn(M)>);

impl<DB, M, F> Handler<DB> for ByFn<F, M>
where
    DB: Backend,
    M: DeserializeOwned + Send + 'static,
    F: for<'a> HandlerFn<'a, DB, M> + 'static,
{
    type Message = M;
    async fn handle(&self, tx: &mut Tx<DB>, message: M) -> Result<(), HandlerError> {
        self.0.call(tx, message).await
    }
}

/// A [`Handler`] of any message type.
trait Registered<DB: Backend>: Send + Sync {
    fn run<'a>(&'a self, tx: &'a mut Tx<DB>, incoming: &'a Incoming) -> BoxFuture<'a, Result<(), HandlerError>>;
}

impl<DB: Backend, H: Handler<DB>> Registered<DB> for H {
    fn run<'a>(&'a self, tx: &'a mut Tx<DB>, incoming: &'a Incoming) -> BoxFuture<'a, Result<(), HandlerError>> {
        Box::pin(async move {
            let message = self.decode(incoming)?;
            self.handle(tx, message).await
        })
    }
}

/// The registered handlers by type, and the retry worker that is shared by whoever has exactly these.
pub(super) struct Handlers<DB: Backend> {
    by_type: HashMap<String, Arc<dyn Registered<DB>>>,
    pub(super) worker: Slot,
}

/// Where the shared worker is found, while there is one.
pub(super) type Slot = tokio::sync::Mutex<Weak<InboxWorker>>;

/// A clone is made to add a handler to; the worker goes on with those that it has.
impl<DB: Backend> Clone for Handlers<DB> {
    fn clone(&self) -> Self {
        Self { by_type: self.by_type.clone(), worker: Slot::default() }
    }
}

impl<DB: Backend> Default for Handlers<DB> {
    fn default() -> Self {
        Self { by_type: HashMap::new(), worker: Slot::default() }
    }
}

impl<DB: Backend> Handlers<DB> {
    pub(super) fn add(&mut self, kind: String, handler: impl Handler<DB>) {
        self.by_type.insert(kind, Arc::new(handler));
    }

    /// The types that have a handler.
    pub(super) fn kinds(&self) -> impl Iterator<Item = &str> {
        self.by_type.keys().map(String::as_str)
    }
}

/// The registered handler of a message's type.
pub(super) struct ByType<'a, DB: Backend> {
    pub(super) handlers: &'a Handlers<DB>,
    pub(super) incoming: &'a Incoming,
}

impl<DB: Backend> Run<DB> for ByType<'_, DB> {
    fn incoming(&self) -> &Incoming {
        self.incoming
    }

    async fn run(&mut self, tx: &mut Tx<DB>) -> Result<(), HandlerError> {
        let kind = &self.incoming.kind;
        let Some(handler) = self.handlers.by_type.get(kind) else {
            return Err(HandlerError::reject(format!(
                "no handler is registered for type {kind:?}; register one with Inbox::on, then requeue this message"
            )));
        };
        // A panic is a failure of this message, and not the end of the worker.
        match AssertUnwindSafe(handler.run(tx, self.incoming)).catch_unwind().await {
            Ok(result) => result,
            Err(panic) => {
                let said = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
                let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                Err(HandlerError::retry(format!("the handler panicked: {said}")))
            }
        }
    }
}
