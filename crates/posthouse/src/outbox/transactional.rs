//! `#[posthouse::transactional]`: functions that open or join a transaction and publish what they return. Feature `macros`.
//!
//! ```
//! # #[cfg(feature = "sqlite")]
//! # mod shop {
//! use posthouse::{Error, Message, Outbox, Tx};
//! use sqlx::Sqlite;
//!
//! #[posthouse::transactional]
//! async fn place(tx: &mut Tx<Sqlite>, order: i64) -> Result<(i64, Message), Error> {
//!     sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(order).execute(&mut **tx).await?;
//!     Ok((order, Message::to("orders").key(order)))
//! }
//!
//! async fn checkout(outbox: &Outbox<Sqlite>) -> Result<(), Error> {
//!     // Opens a transaction, publishes the message, commits, and wakes the relay.
//!     let first: i64 = place(outbox, 7).await?;
//!
//!     // Joins: what it does and publishes is part of this transaction.
//!     let mut tx = outbox.begin().await?;
//!     let second = place(&mut tx, 8).await?;
//!     let third = place(&mut tx, 9).await?;
//!     tx.commit().await
//! }
//! # }
//! ```
//!
//! The function is `async` (a method, too), takes a `&mut Tx<DB>` first, and returns a `Result`. Who calls it gives it a
//! `&Outbox<DB>` or a `&mut Tx<DB>` instead, and gets back what is left when the messages are published:
//!
//! | the function returns | published | the caller gets |
//! |---|---|---|
//! | `Result<M, E>` | `M` | `Result<(), E>` |
//! | `Result<(T, M), E>` | `M` | `Result<T, E>` |
//!
//! `M` is what there is to tell ([`Messages`]): a [`Message`], an [`Event`](crate::Event), an array or a `Vec` of them, or an
//! `Option` of one. A function that has nothing to tell doesn't compile. A `Vec` may be empty, and an `Option` be `None`: a batch
//! with nothing to do, or an update that changes nothing, is no news; that there may be some is in the type. `E` is any error that
//! an [`Error`] converts into.
//!
//! # When it fails
//!
//! Called with an outbox, it rolls back. In a transaction that it joined, what it did so far can't be undone alone. So the `Tx`
//! becomes *rollback-only*: whoever commits it gets [`Error::RollbackOnly`] with the reason, and it is rolled back, also if the
//! error was dropped on the way, or the call was (by a timeout), or it panicked. In an inbox's handler the message then counts
//! as failed, and is run again.
//!
//! # In a handler of an inbox
//!
//! ```
//! # #[cfg(all(feature = "sqlite", feature = "inbox"))]
//! # mod stock {
//! use posthouse::inbox::{Handler, HandlerError};
//! use posthouse::{Message, Tx};
//! use sqlx::Sqlite;
//!
//! struct Deduct;
//!
//! impl Handler<Sqlite> for Deduct {
//!     type Message = i64;
//!     async fn handle(&self, tx: &mut Tx<Sqlite>, order: i64) -> Result<(), HandlerError> {
//!         deduct(tx, order).await // consumed, deducted and published in one transaction
//!     }
//! }
//!
//! #[posthouse::transactional]
//! async fn deduct(tx: &mut Tx<Sqlite>, order: i64) -> Result<Message, HandlerError> {
//!     sqlx::query("UPDATE stock SET count = count - 1").execute(&mut **tx).await?;
//!     Ok(Message::to("stock.deducted").key(order))
//! }
//! # }
//! ```
//!
//! # Good to know
//!
//! - To use a `tx: &mut Tx<DB>` again after a call, lend it: `place(&mut *tx, 8)`.
//! - Generics, lifetimes, where clauses, visibility, attributes and documentation of the function stay as they are. The future
//!   is `Send` when the body's is, and what it returns.
//! - A method of a trait can't be transactional, because its first argument's type changes; let it call a function that is.
//! - `return` and `?` in the body end the body; the messages of an `Ok` are published after it.

use std::fmt::Display;

use super::{Outbox, Tx};
use crate::store::Backend;
use crate::{Error, IntoMessage, Message};

/// What a transactional function is called with: `&Outbox<DB>`, then it opens a transaction and commits it, or `&mut Tx<DB>`, then
/// it joins that one.
#[diagnostic::on_unimplemented(
    message = "a transactional function is called with an outbox or a transaction of one, not with `{Self}`",
    label = "give it `&outbox` (opens and commits) or `&mut tx` (joins)",
    note = "a `tx: &mut Tx<DB>` that is used again is lent: `&mut *tx`; a `Tx` comes from `Outbox::begin`"
)]
pub trait OutboxOrTx<'a, DB: Backend>: sealed::OutboxOrTx {
    #[doc(hidden)]
    fn start(self) -> Start<'a, DB>;
}

/// What a transactional function can publish: a [`Message`], an [`Event`](crate::Event), an array or a `Vec` of them, or an
/// `Option` of one.
#[diagnostic::on_unimplemented(
    message = "this transactional function returns nothing to publish: `{Self}` is no message",
    label = "nothing to publish",
    note = "it returns `Result<M, E>`, or `Result<(T, M), E>` and the caller gets `T`; `M` is a `Message`, an `Event`, or a `Vec`, array or `Option` of them",
    note = "what publishes nothing needs no `#[posthouse::transactional]`: use `Outbox::transaction`, or take a `&mut Tx<DB>`"
)]
pub trait Messages {
    #[doc(hidden)]
    fn into_messages(self) -> Vec<Message>;
}

#[diagnostic::do_not_recommend]
impl<M: IntoMessage> Messages for M {
    fn into_messages(self) -> Vec<Message> {
        vec![self.into_message()]
    }
}

impl<M: IntoMessage> Messages for Vec<M> {
    fn into_messages(self) -> Vec<Message> {
        self.into_iter().map(IntoMessage::into_message).collect()
    }
}

impl<M: IntoMessage, const N: usize> Messages for [M; N] {
    fn into_messages(self) -> Vec<Message> {
        self.into_iter().map(IntoMessage::into_message).collect()
    }
}

impl<M: IntoMessage> Messages for Option<M> {
    fn into_messages(self) -> Vec<Message> {
        self.into_iter().map(IntoMessage::into_message).collect()
    }
}

/// What a transactional function may return in `Ok`: [`Messages`], or a pair of something for the caller and messages.
#[diagnostic::on_unimplemented(
    message = "this transactional function returns nothing to publish: `{Self}` is no message",
    label = "nothing to publish",
    note = "it returns `Result<M, E>`, or `Result<(T, M), E>` and the caller gets `T`; `M` is a `Message`, an `Event`, or a `Vec`, array or `Option` of them",
    note = "what publishes nothing needs no `#[posthouse::transactional]`: use `Outbox::transaction`, or take a `&mut Tx<DB>`"
)]
pub trait Returned {
    /// What the caller gets.
    type Value;
    #[doc(hidden)]
    fn split(self) -> (Self::Value, Vec<Message>);
}

#[diagnostic::do_not_recommend]
impl<M: Messages> Returned for M {
    type Value = ();
    fn split(self) -> ((), Vec<Message>) {
        ((), self.into_messages())
    }
}

impl<T, M: Messages> Returned for (T, M) {
    type Value = T;
    fn split(self) -> (T, Vec<Message>) {
        (self.0, self.1.into_messages())
    }
}

/// The error of a transactional function.
#[diagnostic::on_unimplemented(
    message = "the error of a transactional function must be made of posthouse's own: `{Self}` isn't",
    label = "no `From<posthouse::Error>`",
    note = "publishing and committing can fail, too; add `impl From<posthouse::Error> for {Self}`"
)]
pub trait FromError {
    #[doc(hidden)]
    fn from_error(e: Error) -> Self;
}

#[diagnostic::do_not_recommend]
impl<E: From<Error>> FromError for E {
    fn from_error(e: Error) -> Self {
        e.into()
    }
}

/// The result of a transactional function.
#[diagnostic::on_unimplemented(
    message = "a transactional function returns a `Result`, and not `{Self}`",
    label = "no `Result`",
    note = "it returns `Result<M, E>`, or `Result<(T, M), E>` and the caller gets `T`; `M` is what it publishes"
)]
pub trait Outcome {
    /// What the caller gets: the result without the messages.
    type Answer;
    #[doc(hidden)]
    type Value;
    #[doc(hidden)]
    type Error: FromError;
    #[doc(hidden)]
    fn split(self) -> Result<(Self::Value, Vec<Message>), Self::Error>;
    #[doc(hidden)]
    fn answer(answer: Result<Self::Value, Self::Error>) -> Self::Answer;
}

impl<R: Returned, E: FromError> Outcome for Result<R, E> {
    type Answer = Result<R::Value, E>;
    type Value = R::Value;
    type Error = E;
    fn split(self) -> Result<(R::Value, Vec<Message>), E> {
        self.map(Returned::split)
    }
    fn answer(answer: Result<R::Value, E>) -> Self::Answer {
        answer
    }
}

/// The type behind the first argument.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "the first argument of a transactional function is `tx: &mut posthouse::Tx<DB>`, and not a reference to `{Self}`",
    label = "no `posthouse::Tx`"
)]
pub trait IsTx: sealed::IsTx {
    type Database: Backend;
}

impl<DB: Backend> IsTx for Tx<DB> {
    type Database = DB;
}

impl<'a, DB: Backend> OutboxOrTx<'a, DB> for &'a Outbox<DB> {
    fn start(self) -> Start<'a, DB> {
        Start::Open(self)
    }
}

impl<'a, DB: Backend> OutboxOrTx<'a, DB> for &'a mut Tx<DB> {
    fn start(self) -> Start<'a, DB> {
        Start::Join(self)
    }
}

mod sealed {
    use super::{Backend, Outbox, Tx};

    pub trait OutboxOrTx {}
    impl<DB: Backend> OutboxOrTx for &Outbox<DB> {}
    impl<DB: Backend> OutboxOrTx for &mut Tx<DB> {}

    pub trait IsTx {}
    impl<DB: Backend> IsTx for Tx<DB> {}
}

/// How a call starts.
#[doc(hidden)]
#[derive(Debug)]
pub enum Start<'a, DB: Backend> {
    Open(&'a Outbox<DB>),
    Join(&'a mut Tx<DB>),
}

/// A call of a transactional function, while its body runs.
#[doc(hidden)]
#[derive(Debug)]
pub struct Call<'a, DB: Backend>(Kind<'a, DB>);

#[derive(Debug)]
enum Kind<'a, DB: Backend> {
    Opened(Tx<DB>),
    Joined(Joined<'a, DB>),
}

impl<'a, DB: Backend> Call<'a, DB> {
    pub async fn begin(place: impl OutboxOrTx<'a, DB>, function: &'static str) -> Result<Self, Error> {
        Self::start(place.start(), function).await
    }

    async fn start(start: Start<'a, DB>, function: &'static str) -> Result<Self, Error> {
        Ok(Self(match start {
            Start::Open(outbox) => Kind::Opened(outbox.begin().await?),
            Start::Join(tx) => Kind::Joined(Joined { tx, function, ended: false }),
        }))
    }

    pub fn tx(&mut self) -> &mut Tx<DB> {
        match &mut self.0 {
            Kind::Opened(tx) => tx,
            Kind::Joined(joined) => joined.tx,
        }
    }

    /// Ends the call after its body; `said` is the text of the body's error, if it has one.
    pub async fn end<O: Outcome>(self, outcome: O, said: impl FnOnce(&O::Error) -> Option<String>) -> O::Answer {
        let answer = match (self.0, outcome.split()) {
            (Kind::Opened(tx), Ok((value, messages))) => {
                commit(tx, messages).await.map(|()| value).map_err(FromError::from_error)
            }
            (Kind::Opened(tx), Err(e)) => {
                roll_back(tx).await;
                Err(e)
            }
            (Kind::Joined(mut joined), Ok((value, messages))) => match publish(joined.tx, messages).await {
                Ok(()) => {
                    joined.ended = true;
                    Ok(value)
                }
                Err(e) => {
                    joined.failed(Some(e.to_string()));
                    Err(FromError::from_error(e))
                }
            },
            (Kind::Joined(joined), Err(e)) => {
                joined.failed(said(&e));
                Err(e)
            }
        };
        O::answer(answer)
    }
}

/// Says of an async block what it returns: `return returns::<T>()`, never reached, before everything else.
#[doc(hidden)]
pub fn returns<T>() -> T {
    unreachable!("it stands where nothing comes by")
}

async fn publish<DB: Backend>(tx: &mut Tx<DB>, messages: Vec<Message>) -> Result<(), Error> {
    let outbox = tx.outbox().clone();
    outbox.publish_many(tx, messages).await.map(drop)
}

async fn commit<DB: Backend>(mut tx: Tx<DB>, messages: Vec<Message>) -> Result<(), Error> {
    match publish(&mut tx, messages).await {
        Ok(()) => tx.commit().await,
        Err(e) => {
            roll_back(tx).await;
            Err(e)
        }
    }
}

async fn roll_back<DB: Backend>(tx: Tx<DB>) {
    // Dropping rolls back as well; this way the connection is clean before it goes back to the pool.
    if let Err(e) = tx.rollback().await {
        tracing::debug!(error = %e, "rollback failed");
    }
}

/// A joined transaction. Dropped before the call ended well, it makes it rollback-only.
#[derive(Debug)]
struct Joined<'a, DB: Backend> {
    tx: &'a mut Tx<DB>,
    function: &'static str,
    ended: bool,
}

impl<DB: Backend> Joined<'_, DB> {
    fn failed(mut self, said: Option<String>) {
        let said = said.map(|said| format!(": {said}")).unwrap_or_default();
        self.refuse(&format!("failed{said}"), false);
        self.ended = true;
    }

    fn refuse(&mut self, how: &str, cut_off: bool) {
        self.tx.refuse(format!("{}, which had joined this transaction, {how}", self.function), cut_off);
    }
}

impl<DB: Backend> Drop for Joined<'_, DB> {
    fn drop(&mut self) {
        if !self.ended {
            self.refuse(if std::thread::panicking() { "panicked" } else { "was dropped before it ended" }, true);
        }
    }
}

/// The text of an error that may have none: `(&Said(&e)).said()` finds [`SaysSo`] first, where the error is `Display`, and
/// [`SaysNothing`] else.
#[doc(hidden)]
#[derive(Debug)]
pub struct Said<'a, E>(pub &'a E);

#[doc(hidden)]
pub trait SaysSo {
    fn said(&self) -> Option<String>;
}

impl<E: Display> SaysSo for Said<'_, E> {
    fn said(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

#[doc(hidden)]
pub trait SaysNothing {
    fn said(&self) -> Option<String>;
}

impl<E> SaysNothing for &Said<'_, E> {
    fn said(&self) -> Option<String> {
        None
    }
}
