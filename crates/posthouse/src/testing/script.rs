//! A transport that does as it is told.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::future::BoxFuture;

use crate::Envelope;
use crate::transport::{Delivery, Outcome, Transport};

/// A transport for tests: answers each delivery with the next outcome of its script, at once, and writes it down.
///
/// Outcomes given with [`on`](Self::on) go to deliveries for that destination; those given with [`then`](Self::then) to
/// whatever comes next. When the script has nothing (more) to say, the receiver confirms, unless
/// [`otherwise`](Self::otherwise) says something else.
///
/// Messages of different keys and destinations come in no fixed order: use `on` where that matters.
///
/// Clones share one script: give the relay a clone, keep one to ask and to add to.
///
/// ```
/// # async fn f(outbox: posthouse::Outbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// # #[cfg(feature = "sqlite")] {
/// use posthouse::testing::Script;
/// use posthouse::transport::Outcome;
///
/// let script = Script::new()
///     .on("orders", Outcome::Unavailable("closed for lunch".into()))
///     .on("mails", Outcome::Rejected("no such address".into()));
/// let relay = posthouse::Relay::builder(&outbox)
///     .transport("amqp", script.clone())
///     .route("orders", posthouse::Route::to("amqp:orders"))
///     .route("mails", posthouse::Route::to("amqp:mails"))
///     .start()
///     .await?;
/// outbox.publish_alone(posthouse::Message::to("orders").payload("7")).await?;
/// relay.drain_once().await;
/// assert_eq!(script.deliveries().len(), 1);
/// # }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Script {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next: VecDeque<Outcome>,
    by_destination: HashMap<String, VecDeque<Outcome>>,
    otherwise: Option<Outcome>,
    deliveries: Vec<ScriptedDelivery>,
}

/// One delivery that a [`Script`] was given, and what it answered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScriptedDelivery {
    /// The message; [`Envelope::attempt`] says which attempt it was.
    pub message: Envelope,
    /// The address within the transport (`inventory` for `amqp:inventory`).
    pub address: String,
    /// The answer.
    pub outcome: Outcome,
}

impl Script {
    /// A receiver that confirms everything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Answers a coming delivery with this outcome, after those that were given before.
    pub fn then(self, outcome: Outcome) -> Self {
        self.state().next.push_back(outcome);
        self
    }

    /// Answers a coming delivery for this destination (as it was published to, `inventory.deduct`) with this outcome, after
    /// those that were given before.
    pub fn on(self, destination: impl Into<String>, outcome: Outcome) -> Self {
        self.state().by_destination.entry(destination.into()).or_default().push_back(outcome);
        self
    }

    /// What is answered where the script says nothing. [`Outcome::Delivered`] unless it is set.
    pub fn otherwise(self, outcome: Outcome) -> Self {
        self.state().otherwise = Some(outcome);
        self
    }

    /// Everything that was given to it, in the order in which it came.
    pub fn deliveries(&self) -> Vec<ScriptedDelivery> {
        self.state().deliveries.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn outcome(&mut self, destination: &str) -> Outcome {
        self.by_destination
            .get_mut(destination)
            .and_then(VecDeque::pop_front)
            .or_else(|| self.next.pop_front())
            .or_else(|| self.otherwise.clone())
            .unwrap_or(Outcome::Delivered)
    }
}

impl Transport for Script {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        for delivery in batch {
            let outcome = {
                let mut state = self.state();
                let outcome = state.outcome(&delivery.message().destination);
                state.deliveries.push(ScriptedDelivery {
                    message: delivery.message().clone(),
                    address: delivery.address().to_owned(),
                    outcome: outcome.clone(),
                });
                outcome
            };
            delivery.answer(outcome);
        }
        Box::pin(std::future::ready(()))
    }
}
