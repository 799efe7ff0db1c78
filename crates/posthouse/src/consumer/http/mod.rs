//! Messages in HTTP requests.

mod answer;
mod request;

use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::routing::{MethodRouter, post};

use self::request::Receiver;
use super::running::Loop;
use super::{Consumer, ConsumerStatus};
use crate::inbox::Inbox;
use crate::settings::ConsumerSettings;
use crate::store::Backend;
use crate::webhook::Verifier;
use crate::{Error, Limits};

/// Receives webhooks: an [axum](https://docs.rs/axum/0.8) route that hands what is posted to it to an inbox, and answers when
/// the inbox has settled it.
///
/// ```no_run
/// # #[cfg(feature = "sqlite")]
/// # async fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// use posthouse::consumer::Webhooks;
/// use posthouse::webhook::Verifier;
///
/// let webhooks = Webhooks::new()
///     .verify(Verifier::new(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])?)
///     .start(&inbox)
///     .await?;
/// let app: axum::Router = axum::Router::new().nest("/hooks", webhooks.router());
/// // axum::serve(listener, app).with_graceful_shutdown(…).await; then:
/// webhooks.shutdown(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// # fn main() {}
/// ```
///
/// # The message
/// | of the message | from |
/// |---|---|
/// | id | `webhook-id`, else `posthouse-message-id`, else `idempotency-key`, else the CloudEvent's |
/// | type, key | `posthouse-type`, `posthouse-key`, else the CloudEvent's `type`, `partitionkey` |
/// | content type | `content-type` |
/// | headers | all but those of the connection (`host`, `accept`, `user-agent`, …) and those with secrets (`authorization`, `cookie`); the values of one that comes several times are joined with `, ` |
/// | source | the address that was called, without the scheme (a proxy may have changed it) and the query (there may be secrets in it) |
///
/// Ids, types, keys and CloudEvents attributes are percent-decoded, as the `http` transport encodes them. A request with
/// `posthouse-attempt` above 1 counts as redelivered.
///
/// A signature covers the id, the time and the body, and no other header. Whoever can read a request of the last five minutes
/// can send it again with another type or key; as its id stays, it has no second effect
/// ([`id_from`](ConsumerSettings::id_from) a header would give that up). Receive over TLS.
///
/// # The answer
/// | status | when | the sender |
/// |---|---|---|
/// | 200 | it had its effect, committed now or (`posthouse-outcome: duplicate`) before | has delivered it |
/// | 202 | its failure is recorded: it is run again here (`posthouse-outcome: retry`), or given up (`failed`) | has delivered it |
/// | 400 | the body broke off | sends it again, if it is still there |
/// | 401 | signature missing or wrong, or older than the [tolerance](Verifier::tolerance) | sends it again, signed anew |
/// | 405 | another method than POST | |
/// | 408 | the body was not there within 30 s | sends it again |
/// | 413 | the body is larger than [`body_limit`](Self::body_limit) | gives it up |
/// | 422 | refused ([`MissingId::Reject`](crate::MissingId::Reject)) | gives it up |
/// | 503 with `Retry-After` | nothing is written (the database is away), there is no place for it ([`prefetch`](ConsumerSettings::prefetch) requests are in hand), or this receiver has stopped | sends it again |
///
/// A request whose sender goes away is handled to its end all the same: sent again it is a duplicate. Keep the sender's
/// deadline above the inbox's [`handler_timeout`](crate::InboxSettings::handler_timeout), or it repeats what is still running.
/// Where messages of a key wait for each other ([`ConsumerOrder::Key`](crate::ConsumerOrder::Key)), so do their requests; a
/// failed one is answered at once and holds back those behind it.
#[derive(Debug)]
#[must_use = "it does nothing before it is started"]
pub struct Webhooks {
    verifier: Option<Verifier>,
    unsigned: bool,
    body_limit: usize,
    settings: ConsumerSettings,
}

impl Default for Webhooks {
    fn default() -> Self {
        Self::new()
    }
}

impl Webhooks {
    /// A receiver that must be told what to [verify](Self::verify), or that it [needn't](Self::unsigned).
    pub fn new() -> Self {
        // Whatever an outbox may publish, as the document of a structured CloudEvent (Base64) as well.
        let body_limit = Limits::default().payload / 3 * 4 + Limits::default().headers;
        Self { verifier: None, unsigned: false, body_limit, settings: ConsumerSettings::default() }
    }

    /// Takes only what is signed as [Standard Webhooks](https://www.standardwebhooks.com/) describes, with a key of this
    /// verifier.
    pub fn verify(mut self, verifier: Verifier) -> Self {
        self.verifier = Some(verifier);
        self
    }

    /// Takes what anybody sends, who can reach it: for networks where nobody else can, or behind something that checks.
    pub fn unsigned(mut self) -> Self {
        self.unsigned = true;
        self
    }

    /// The largest body, in bytes. By default (10.7 MiB) large enough for the largest payload that an outbox publishes by
    /// default, as a structured CloudEvent too.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// How messages are taken: how many at once, in which order, by which id.
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Starts the inbox's retry worker, and takes requests from here on.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that can't hold, and unless exactly one of [`verify`](Self::verify) and
    /// [`unsigned`](Self::unsigned) is set; [`Error::Schema`] if the tables are missing or too old.
    pub async fn start<DB: Backend>(self, inbox: &Inbox<DB>) -> Result<RunningWebhooks, Error> {
        match (&self.verifier, self.unsigned) {
            (None, false) => {
                return Err(Error::Config(
                    "webhooks that anybody can send are refused: give a verifier with .verify(…), or say with .unsigned() that \
                     this is meant"
                        .into(),
                ));
            }
            (Some(_), true) => return Err(Error::Config("webhooks: .verify(…) and .unsigned() contradict each other".into())),
            _ => {}
        }
        let mut started = None;
        let consumer = Consumer::start(inbox, self.settings, |Loop { intake, link, mut stop }| {
            started = Some(intake.clone());
            link.up();
            async move {
                let deadline = stop.asked().await;
                link.down("it has stopped");
                intake.stop(deadline).await;
            }
        })
        .await?;
        // The closure above has run.
        let intake = started.ok_or_else(|| Error::Config("webhooks: not started".into()))?;
        Ok(RunningWebhooks { consumer, receiver: Receiver::new(intake, self.verifier, self.body_limit) })
    }
}

/// A receiver of webhooks that runs in this process. Its routes answer 503 when it is shut down or dropped.
#[derive(Debug)]
#[must_use = "a receiver that is dropped stops"]
pub struct RunningWebhooks {
    consumer: Consumer,
    receiver: Receiver,
}

impl RunningWebhooks {
    /// A router with the route `/` alone, to be nested: `.nest("/hooks", webhooks.router())` takes `POST /hooks`.
    pub fn router<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        Router::new().route("/", self.method_router())
    }

    /// The same for one path: `.route("/hooks/{tenant}", webhooks.method_router())`.
    pub fn method_router<S: Clone + Send + Sync + 'static>(&self) -> MethodRouter<S> {
        let receiver = self.receiver.clone();
        post(move |request: Request| async move { receiver.receive(request).await })
    }

    /// How it is doing now.
    pub fn status(&self) -> ConsumerStatus {
        self.consumer.status()
    }

    /// As [`Consumer::shutdown`]: requests that come now are answered 503. Let the server stop accepting first, so that they
    /// reach another process.
    pub async fn shutdown(self, grace: Duration) {
        self.consumer.shutdown(grace).await;
    }
}

/// The handle alone, beside those of other consumers.
impl From<RunningWebhooks> for Consumer {
    fn from(running: RunningWebhooks) -> Self {
        running.consumer
    }
}
