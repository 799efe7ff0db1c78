//! Sending: the [`Transport`] trait and the transports that come with the library.
//!
//! A transport gets [`Delivery`] values and answers each one. Nothing leaves the pending set before an answer says
//! that the receiver confirmed, and a delivery that is dropped unanswered counts as "try again", so a faulty
//! transport can cause duplicates but no loss.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

#[cfg(doc)]
use crate::Ordering;
use crate::{Envelope, Route};

#[cfg(any(feature = "http", feature = "rabbitmq", feature = "kafka", feature = "nats"))]
pub(crate) mod content;
#[cfg(feature = "http")]
pub(crate) mod http;
#[cfg(feature = "kafka")]
pub(crate) mod kafka;
pub(crate) mod local;
#[cfg(feature = "nats")]
pub(crate) mod nats;
#[cfg(feature = "rabbitmq")]
pub(crate) mod rabbitmq;
#[cfg(any(feature = "nats", feature = "rabbitmq"))]
mod tls;
#[cfg(any(feature = "nats", feature = "rabbitmq", feature = "kafka"))]
mod waiting;

#[cfg(feature = "http")]
pub use crate::webhook;
#[cfg(feature = "http")]
pub use http::{Http, HttpSettings};
#[cfg(feature = "kafka")]
pub use kafka::{Kafka, KafkaLag, KafkaSettings};
pub use local::LocalError;
#[cfg(feature = "nats")]
pub use nats::{Nats, NatsPending, NatsSettings};
#[cfg(feature = "rabbitmq")]
pub use rabbitmq::{RabbitMq, RabbitMqQueues, RabbitMqSettings};
#[cfg(any(feature = "nats", feature = "rabbitmq", feature = "kafka"))]
pub use waiting::Waiting;

/// What came of one try to deliver a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The receiver confirmed.
    Delivered,
    /// This message failed and may work later: one attempt is counted, and it waits at least `after`.
    Retry {
        /// What the receiver asked for (`Retry-After`).
        after: Option<Duration>,
        /// Why.
        error: Failure,
    },
    /// It can never work: FAILED at once.
    Rejected(Failure),
    /// The destination is down: no attempt is counted, the breaker opens.
    Unavailable(Failure),
    /// The receiver said nothing in time. Counts as [`Retry`](Self::Retry), unless the destination is known to be down: silence
    /// is no sign that it is up again, so then it counts as [`Unavailable`](Self::Unavailable).
    NoAnswer(Failure),
    /// Not sent, because an earlier message of its key failed while both were in flight ([`Ordering::Pipelined`]): no
    /// attempt is counted, and it goes again after that one.
    HeldBack,
}

/// Why a try failed, as people will read it in the attempt log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// One sentence that a person can act on.
    pub error: String,
    /// The start of the receiver's response, if there was one.
    pub response: Option<String>,
}

impl<S: Into<String>> From<S> for Failure {
    fn from(error: S) -> Self {
        Self { error: error.into(), response: None }
    }
}

/// Sends messages to one kind of receiver. Knows nothing of databases.
///
/// `send` resolves when the whole batch has been accepted, which is how a transport applies back-pressure; answers
/// come through the deliveries, in any order, before or after that. Every delivery has a [`deadline`](Delivery::deadline):
/// the relay gives up on it then, and a later answer is ignored.
///
/// ```
/// use posthouse::transport::{Delivery, Transport};
///
/// #[derive(Debug)]
/// struct Stdout;
/// impl Transport for Stdout {
///     fn send(&self, batch: Vec<Delivery>) -> futures_util::future::BoxFuture<'_, ()> {
///         Box::pin(async move {
///             for delivery in batch {
///                 println!("{} {}", delivery.message().kind, delivery.address());
///                 delivery.delivered();
///             }
///         })
///     }
/// }
/// ```
pub trait Transport: Send + Sync + fmt::Debug + 'static {
    /// Takes messages to send.
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()>;

    /// What is wrong with a route to this transport, as far as can be told without a connection. Asked when a relay starts.
    ///
    /// # Errors
    /// One sentence about the route's address or settings.
    fn check(&self, route: &Route) -> Result<(), String> {
        let _ = route;
        Ok(())
    }

    /// How many messages may be in flight to one destination where its route doesn't say.
    fn concurrency(&self) -> u32 {
        32
    }

    /// Whether routes with [`Ordering::Pipelined`] may lead here. Such a transport gets one `send` after the other, each
    /// after the one before has resolved; it sends each key's messages in the order in which it got them; and it lets
    /// none overtake one that failed: it answers [`Outcome::HeldBack`] for every delivery that
    /// [follows](Delivery::follows) a failed one of the same address and key.
    fn pipelines(&self) -> bool {
        false
    }

    /// Why the receiver asks to be sent nothing at the moment, though it is connected (RabbitMQ's `connection.blocked`).
    fn blocked(&self) -> Option<String> {
        None
    }

    /// Hands what is still buffered to the receiver and closes. Called once, after the last `send` resolved.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

impl Transport for Box<dyn Transport> {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        (**self).send(batch)
    }

    fn check(&self, route: &Route) -> Result<(), String> {
        (**self).check(route)
    }

    fn concurrency(&self) -> u32 {
        (**self).concurrency()
    }

    fn pipelines(&self) -> bool {
        (**self).pipelines()
    }

    fn blocked(&self) -> Option<String> {
        (**self).blocked()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        (**self).close()
    }
}

/// A transport made of a function that handles one message at a time; messages of a batch run side by side.
///
/// ```
/// let print = posthouse::transport::from_fn(|d: posthouse::transport::Delivery| async move {
///     println!("{}", d.message().message_id);
///     d.delivered();
/// });
/// ```
pub fn from_fn<F, Fut>(f: F) -> impl Transport
where
    F: Fn(Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    FromFn(Arc::new(f))
}

struct FromFn<F>(Arc<F>);

impl<F> fmt::Debug for FromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromFn")
    }
}

impl<F, Fut> Transport for FromFn<F>
where
    F: Fn(Delivery) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        // A task each: one that panics takes only its own delivery with it, which answers "try again".
        let mut running = tokio::task::JoinSet::new();
        for delivery in batch {
            let f = self.0.clone();
            running.spawn(async move { f(delivery).await });
        }
        Box::pin(async move { while running.join_next().await.is_some() {} })
    }
}

/// One message on its way, and the token through which its outcome is told.
///
/// Dropping it without an answer counts as [`Outcome::Retry`].
#[derive(Debug)]
#[must_use = "a delivery that is dropped unanswered is tried again"]
pub struct Delivery {
    pub(crate) envelope: Envelope,
    pub(crate) route: Arc<Route>,
    pub(crate) deadline: Instant,
    pub(crate) follows: bool,
    pub(crate) token: Token,
}

impl Delivery {
    pub(crate) fn new(envelope: Envelope, route: Arc<Route>, deadline: Instant, follows: bool, token: Token) -> Self {
        Self { envelope, route, deadline, follows, token }
    }

    /// True when an earlier message of its key was still in flight when the relay handed this one over. Only with
    /// [`Ordering::Pipelined`]; then a transport must not send it if that one has failed. A delivery of a key that
    /// follows none comes after every earlier one of its key has been answered.
    pub fn follows(&self) -> bool {
        self.follows
    }

    /// The message.
    pub fn message(&self) -> &Envelope {
        &self.envelope
    }

    /// The route it takes; [`Route::to`] is the complete `transport:address`.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The address within the transport: `https://…` for `https://…`, `send-email` for `local:send-email`.
    pub fn address(&self) -> &str {
        address_of(&self.route.to)
    }

    /// The relay gives this try up at this moment.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What is left until the deadline.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// The receiver confirmed.
    pub fn delivered(self) {
        self.answer(Outcome::Delivered);
    }

    /// Failed; try again with back-off, and not before `after`.
    pub fn retry(self, error: impl Into<Failure>, after: Option<Duration>) {
        let error = error.into();
        self.answer(Outcome::Retry { after, error });
    }

    /// Can never work.
    pub fn rejected(self, error: impl Into<Failure>) {
        let error = error.into();
        self.answer(Outcome::Rejected(error));
    }

    /// The destination is down.
    pub fn unavailable(self, error: impl Into<Failure>) {
        let error = error.into();
        self.answer(Outcome::Unavailable(error));
    }

    /// The receiver said nothing in time.
    pub fn no_answer(self, error: impl Into<Failure>) {
        let error = error.into();
        self.answer(Outcome::NoAnswer(error));
    }

    /// An earlier message of its key failed; this one was not sent.
    pub fn held_back(self) {
        self.answer(Outcome::HeldBack);
    }

    /// Answers with any outcome.
    pub fn answer(mut self, outcome: Outcome) {
        self.token.answer(outcome);
    }
}

/// A destination as it may stand in logs and in what health tells: URLs without user, password, query and fragment, where
/// secrets are.
pub(crate) fn shown(destination: &str) -> String {
    let Some((scheme, rest)) = destination.split_once("://") else { return destination.to_owned() };
    // A password may contain what usually ends it.
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{}", rest.split(['?', '#']).next().unwrap_or_default())
}

/// The scheme of `transport:address`.
pub(crate) fn scheme_of(to: &str) -> &str {
    to.split_once(':').map_or("", |(scheme, _)| scheme)
}

/// The address of `transport:address`; URLs keep their scheme.
pub(crate) fn address_of(to: &str) -> &str {
    match to.split_once(':') {
        Some(("http" | "https", _)) | None => to,
        Some((_, address)) => address,
    }
}

/// The answer to one delivery, on its way back to the relay.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) id: i64,
    /// Counts the relay's sends, so that a late answer to an earlier try is recognised.
    pub(crate) try_number: u64,
    pub(crate) outcome: Outcome,
}

/// Answers once; dropped unanswered it answers "try again".
#[derive(Debug)]
pub(crate) struct Token {
    pub(crate) id: i64,
    pub(crate) try_number: u64,
    pub(crate) answers: Option<mpsc::UnboundedSender<Answer>>,
    /// Closes with the answer.
    pub(crate) span: Option<tracing::Span>,
}

impl Token {
    pub(crate) fn answer(&mut self, outcome: Outcome) {
        self.span = None;
        if let Some(answers) = self.answers.take() {
            // The relay is gone only when it has shut down; the row stays pending and is sent again.
            let _ = answers.send(Answer { id: self.id, try_number: self.try_number, outcome });
        }
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.answer(Outcome::Retry {
            after: None,
            error: "the transport dropped this message without an answer (a panic or a lost task)".into(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_destinations_keep_no_secrets() {
        for (destination, expected) in [
            ("orders", "orders"),
            ("amqp:shop/order.placed", "amqp:shop/order.placed"),
            ("https://hooks.example/a/b?key=hunter2#x", "https://hooks.example/a/b"),
            ("https://u:hunter#2@hooks.example/a", "https://hooks.example/a"),
            ("internal:http://u:p@10.0.0.1/", "internal:http://10.0.0.1/"),
        ] {
            assert_eq!(shown(destination), expected);
        }
    }
}
