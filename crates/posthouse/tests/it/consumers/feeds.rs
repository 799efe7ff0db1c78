//! The sources of the suite: one kind per consumer, each with a queue, topic, stream or address of its own.

use posthouse::consumer::Consumer;
use posthouse::inbox::{Inbox, Source};
use posthouse::{ConsumerSettings, Envelope, Route};

/// A source of messages. Cheap to clone.
pub(super) trait Feed: Clone + Send + Sync + 'static {
    /// Messages that a consumer takes although their handlers don't run yet, if there are more than enough.
    const IN_HAND: usize;
    fn new() -> impl Future<Output = Self> + Send;
    /// Starts a consumer of it.
    fn consume(&self, inbox: &Inbox<sqlx::Sqlite>, settings: ConsumerSettings) -> impl Future<Output = Consumer> + Send;
    /// Sends through Posthouse's own transport, by a route that `change` made of the plain one, until it is delivered.
    fn send(&self, m: &Envelope, change: impl FnOnce(Route) -> Route + Send) -> impl Future<Output = ()> + Send;
    /// Sends the same message a second time, also where the broker would drop what it had already.
    fn send_again(&self, m: &Envelope) -> impl Future<Output = ()> + Send {
        self.send(m, |route| route)
    }
    /// Sends without expecting an answer in time, again and again until one says delivered.
    fn offer(&self, m: &Envelope) -> impl Future<Output = ()> + Send {
        self.send(m, |route| route)
    }
    /// Sends bytes without an id, type or header, as others might.
    fn send_raw(&self, payload: &[u8]) -> impl Future<Output = ()> + Send;
    /// How many messages the broker still has for the consumer, delivered or not.
    fn unacknowledged(&self) -> impl Future<Output = u64> + Send;
    /// Whether a message says rightly where it came from.
    fn check_source(&self, source: &Source);
}
