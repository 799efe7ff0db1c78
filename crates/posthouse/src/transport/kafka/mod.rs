//! `kafka:` destinations: an idempotent producer, and a second one for routes with `ordering = "pipelined"`.

mod answer;
mod drain;
mod lag;
mod lane;
mod producer;
pub(crate) mod record;
pub(crate) mod settings;

use std::fmt;
use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use rdkafka::config::RDKafkaLogLevel;

pub use self::lag::KafkaLag;
use self::lane::Lane;
pub use self::settings::KafkaSettings;
use super::{Delivery, Transport, address_of};
use crate::{Error, Ordering, Route};

/// What librdkafka logs. What comes of it for messages is told elsewhere, so most of it is for those who look for details.
pub(crate) fn log(level: RDKafkaLogLevel, facility: &str, line: &str) {
    match level {
        RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
            tracing::warn!(target: "posthouse::kafka", "librdkafka: {facility}: {line}");
        }
        _ => tracing::debug!(target: "posthouse::kafka", "librdkafka: {facility}: {line}"),
    }
}

/// Sends each message as one record to the topic that is its address: `kafka:topic`.
///
/// The producer is idempotent and asks for the confirmation of all in-sync replicas (`acks=all`). Topics are not created,
/// unless the brokers do that.
///
/// # The record
/// The key is the message key (none: no key), the value is the payload, the timestamp is when the message was published.
/// The partition of a key is the one that Kafka's Java clients choose (`partitioner`).
///
/// | header | value |
/// | --- | --- |
/// | those of the message (`traceparent`, `tracestate` among them) | as they are; not sent along: `content-type`, `posthouse-…`, and `ce_…` on routes that set it |
/// | `ce_…` | CloudEvents attributes, on routes with binary CloudEvents |
/// | `content-type` | media type of the value |
/// | `posthouse-message-id` | the message id, the same on every resend |
/// | `posthouse-type` | the message's type, if it has one |
/// | `posthouse-attempt` | which attempt this is, from 1 |
///
/// # The outcome
/// | report | outcome |
/// | --- | --- |
/// | without an error | delivered |
/// | too large for this client or the topic; not what the topic takes (`INVALID_RECORD` and such) | rejected |
/// | topic unknown for 3 s (`topic.metadata.propagation.max.ms`), no permission to write | try again |
/// | any other answer of a broker about this record | try again |
/// | none by the deadline; connection refused or lost; name not found; TLS or authentication failed; not enough replicas | unavailable |
///
/// A broker refuses batches as a whole. The records of a refused batch are sent again one by one, and only what comes of
/// that counts. A record that was given up without a report may be in the topic: then its message is sent once more.
/// What is not confirmed by the deadline leaves the client at about that time, so that old copies don't pile up in
/// an outage; one sent late is a duplicate, and no more than that.
///
/// A fatal error of the producer, which would otherwise need a restart, makes the transport build a new one when every record of
/// the old one has been reported on.
///
/// # `ordering = "pipelined"`
/// Such routes have a producer of their own, which stops when a batch fails (`enable.gapless.guarantee`). Brokers refuse what
/// is under way behind a failed batch, but only in partitions where they know the producer: so a key has one record under
/// way until one was confirmed, and many from then on. What was queued behind a failed record comes back: messages of its key
/// are held back, all others go out again in their order from a new producer. That takes about a second, in which every
/// pipelined route of the transport waits. A record that isn't confirmed by its deadline stops the others too, as unavailable:
/// one topic without a leader halts all pipelined routes.
pub struct Kafka {
    settings: Arc<KafkaSettings>,
    /// Made when the first message needs them, because each has a thread.
    ordinary: OnceLock<Lane>,
    pipelined: OnceLock<Lane>,
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kafka").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Kafka {
    /// Checks the settings. Connects when the first message is sent.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<KafkaSettings>) -> Result<Self, Error> {
        let settings = settings.into();
        let problems = settings.problems();
        if !problems.is_empty() {
            let all: Vec<_> = problems.iter().map(|(field, why)| format!("{field}: {why}")).collect();
            return Err(Error::Config(all.join("; ")));
        }
        Ok(Self { settings: Arc::new(settings), ordinary: OnceLock::new(), pipelined: OnceLock::new() })
    }

    fn lane(&self, ordering: Ordering) -> &Lane {
        match ordering {
            Ordering::Pipelined => self.pipelined.get_or_init(|| Lane::start(&self.settings, settings::Lane::Pipelined)),
            Ordering::Strict | Ordering::None => {
                self.ordinary.get_or_init(|| Lane::start(&self.settings, settings::Lane::Ordinary))
            }
        }
    }
}

impl Transport for Kafka {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (pipelined, ordinary): (Vec<_>, Vec<_>) =
                batch.into_iter().partition(|d| d.route().ordering == Ordering::Pipelined);
            let ordinary = async {
                if !ordinary.is_empty() {
                    self.lane(Ordering::Strict).send(ordinary).await;
                }
            };
            let pipelined = async {
                if !pipelined.is_empty() {
                    self.lane(Ordering::Pipelined).send(pipelined).await;
                }
            };
            tokio::join!(ordinary, pipelined);
        })
    }

    fn check(&self, route: &Route) -> Result<(), String> {
        record::check_topic(address_of(&route.to))
    }

    /// 5 000: a few batches of records of the usual sizes.
    fn concurrency(&self) -> u32 {
        5_000
    }

    fn pipelines(&self) -> bool {
        true
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let close = async |lane: Option<&Lane>| {
                if let Some(lane) = lane {
                    lane.close().await;
                }
            };
            tokio::join!(close(self.ordinary.get()), close(self.pipelined.get()));
        })
    }
}
