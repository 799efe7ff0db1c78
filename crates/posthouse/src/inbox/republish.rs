//! Retries by way of the broker: what is due is sent to the consumer's own queue, and run when it comes out of it, by whichever
//! process takes it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc;

use super::incoming::RETRY;
use super::process::Claim;
use super::{Inbox, Incoming};
use crate::store::{Backend, RunFailed};
use crate::transport::{Delivery, Outcome, Token, Transport, scheme_of};
use crate::{Envelope, Error, Route};

/// How long a send may take.
const SEND: Duration = Duration::from_secs(10);

/// Where copies are sent.
#[derive(Debug)]
pub(super) struct Republish {
    transport: Arc<dyn Transport>,
    route: Arc<Route>,
}

impl<DB: Backend> Inbox<DB> {
    /// Has the retry worker send what is due to the consumer's **own** queue, instead of running it itself from the stored copy.
    /// Other consumers of the first exchange or topic must not get these copies: they have handled the message long ago.
    ///
    /// The load of retries is shared among the queue's consumers, and a message waits its turn there. The copy has the same id,
    /// so the inbox knows it, and a header `posthouse-retry`, by which it is run however long it waited. While one is on its way
    /// none is sent a second time, unless it is gone for [`republish_wait`](crate::InboxSettings::republish_wait). A send that
    /// fails is no attempt.
    ///
    /// ```no_run
    /// # #[cfg(all(feature = "sqlite", feature = "rabbitmq"))]
    /// # fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
    /// use posthouse::{Route, transport::RabbitMq};
    ///
    /// let inbox = inbox.republish(RabbitMq::new("amqp://localhost")?, Route::to("amqp:/inventory.deduct"))?;
    /// # let _ = inbox;
    /// # Ok(()) }
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// [`Error::Config`] if the transport can't send to this route.
    pub fn republish(mut self, transport: impl Transport, route: Route) -> Result<Self, Error> {
        let mut problems: Vec<String> =
            route.problems().into_iter().map(|(field, why)| format!("republish.{field}: {why}")).collect();
        if scheme_of(&route.to).is_empty() {
            problems.push(format!("republish.to: {:?}, must be scheme:address, as in \"amqp:/inventory.deduct\"", route.to));
        } else if let Err(why) = transport.check(&route) {
            problems.push(format!("republish: {why}"));
        }
        if !problems.is_empty() {
            return Err(Error::Config(problems.join("; ")));
        }
        self.republish = Some(Arc::new(Republish { transport: Arc::new(transport), route: Arc::new(route) }));
        Ok(self)
    }
}

#[cfg(any(feature = "rabbitmq", feature = "kafka", feature = "nats", feature = "axum"))]
impl<DB: Backend> Inbox<DB> {
    /// Whether the retry worker sends what is due to the consumer's queue.
    pub(crate) fn republishes(&self) -> bool {
        self.republish.is_some()
    }
}

impl Republish {
    /// Sends a copy of a row that the retry worker has taken.
    pub(super) async fn send<DB: Backend>(&self, inbox: &Inbox<DB>, id: &str, last: Claim) -> Result<(), Error> {
        let Some(copy) = inbox.store().show(inbox.consumer(), id).await? else { return Ok(()) };
        let created_at = SystemTime::UNIX_EPOCH + Duration::from_micros(u64::try_from(copy.row.first_us).unwrap_or(0));
        let write = async |version, wait, error: Option<&str>| {
            let failed = RunFailed { attempts: last.attempts, claims: last.claims, wait, error };
            inbox.fail(id, version, &failed).await
        };
        let incoming = match Incoming::restored(copy) {
            Ok(incoming) => incoming,
            Err(why) => return write(last.version, None, Some(&why)).await.map(drop),
        };
        // Written before it is sent, so that none is sent twice while the queue is long, and a copy that comes back is known.
        if !write(last.version, Some(inbox.settings().republish_wait), None).await? {
            return Ok(());
        }
        let version = last.version + 1;
        let mut headers = incoming.headers;
        headers.insert(RETRY, version.to_string());
        let envelope = Envelope {
            id: 0,
            message_id: id.into(),
            kind: incoming.kind,
            destination: self.route.to.clone(),
            key: incoming.key,
            payload: incoming.payload,
            content_type: incoming.content_type,
            headers,
            created_at,
            deliver_at: None,
            attempt: u32::try_from(last.attempts).unwrap_or(0).saturating_add(1),
        };
        // By the back-off of a first failure: nothing is wrong with the message.
        let pause = inbox.settings().retry.wait(1, fastrand::f64());
        let (wait, failure) = match self.deliver(envelope).await {
            Outcome::Delivered => return Ok(()),
            Outcome::Rejected(failure) => (None, failure),
            Outcome::Retry { after, error } => (Some(after.unwrap_or(pause)), error),
            Outcome::Unavailable(failure) | Outcome::NoAnswer(failure) => (Some(pause), failure),
            Outcome::HeldBack => (Some(pause), "held back".into()),
        };
        let error = format!("could not be sent to the consumer's own queue: {}", failure.error);
        tracing::warn!(consumer = inbox.consumer(), message_id = id, error, again_in = ?wait, "a message could not be republished");
        write(version, wait, Some(&crate::error::storable(&error, super::process::ERROR_TEXT))).await.map(drop)
    }

    async fn deliver(&self, envelope: Envelope) -> Outcome {
        let deadline = Instant::now() + SEND;
        let (sender, mut answers) = mpsc::unbounded_channel();
        let token = Token { id: 0, try_number: 1, answers: Some(sender), span: None };
        let delivery = Delivery::new(envelope, self.route.clone(), deadline, false, token);
        let both = async { tokio::join!(self.transport.send(vec![delivery]), answers.recv()).1 };
        match tokio::time::timeout_at(deadline.into(), both).await {
            Ok(Some(answer)) => answer.outcome,
            Ok(None) | Err(_) => Outcome::NoAnswer(format!("no answer within {SEND:?}").into()),
        }
    }
}
