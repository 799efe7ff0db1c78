//! The Kafka consumer.
//!
//! | file | what it does |
//! |---|---|
//! | `poller.rs` | the thread that polls: takes, commits, looks how the brokers are |
//! | `group.rs` | partitions that come and go, reports of commits |
//! | `partition.rs` | a partition while it is ours, and the messages taken out of it |
//! | `offsets.rs` | what may be committed, and what may have killed an earlier owner |
//! | `record.rs` | what stands where in a record |
//! | `health.rs` | whether it gets messages, and why not |
//! | `config.rs` | what librdkafka is told |
//! | `retention.rs` | how long a topic's records can come again |

mod config;
mod group;
mod health;
mod offsets;
mod partition;
mod poller;
mod record;
mod retention;

use std::time::Duration;

use rdkafka::ClientConfig;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use self::poller::{Control, Phase, Poller};
use super::Consumer;
use super::intake::Sink;
use super::running::Loop;
use crate::Error;
use crate::inbox::Inbox;
use crate::settings::{ConsumerOrder, ConsumerSettings};
use crate::store::Backend;
use crate::transport::KafkaSettings;
use crate::transport::kafka::record::check_topic;

/// How long to wait before brokers are asked again for a topic's retention.
const ASK_RETENTION: Duration = Duration::from_secs(30);

/// Consumes topics as a member of a consumer group: each record is handled once by the inbox, and its offset committed after
/// that.
///
/// ```no_run
/// # #[cfg(feature = "sqlite")]
/// # async fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// use posthouse::consumer::KafkaConsumer;
///
/// let consumer = KafkaConsumer::new("localhost:9092", "inventory", ["stock.deduct"])?.start(&inbox).await?;
/// // …
/// consumer.shutdown(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// # fn main() {}
/// ```
///
/// # The message
/// | of the message | of the record |
/// |---|---|
/// | id | header `posthouse-message-id`; of CloudEvents `ce_source` and `ce_id` together; or what [`IdFrom`](crate::IdFrom) says |
/// | type | header `posthouse-type`; of CloudEvents `ce_type` |
/// | key | the key, which must be UTF-8; without one: header `posthouse-key`, of CloudEvents `ce_partitionkey` |
/// | payload | the value; of a tombstone (no value) empty |
/// | content type | header `content-type` |
/// | headers | the headers; a null value is empty. Of several with one name the last has that name, the earlier ones are `NAME[0]`, `NAME[1]`, … |
/// | source | [`Source::Kafka`](crate::inbox::Source::Kafka): topic, partition, offset |
///
/// A record whose key or header isn't UTF-8 is set aside as FAILED with its bytes, and so is one without an id, unless
/// [`MissingId`](crate::MissingId) says otherwise.
///
/// # The offset
/// An offset is committed when everything below it in its partition is finished: every second, more often under load, when a
/// partition is revoked, and at the end. So what was running or done behind a slow message comes again after a crash, and is
/// then a duplicate without an effect.
///
/// | the inbox says | the record |
/// |---|---|
/// | done, a duplicate, given up, or to be run again by the retry worker | finished |
/// | refused ([`MissingId::Reject`](crate::MissingId::Reject)) | finished: Kafka has no rejection. It is logged, counted, and stays in its topic |
/// | nothing could be written down (the database is away) | stays where it is, and is tried again here, every 5 s at most. Nothing behind it is committed |
///
/// # Order
/// [`ConsumerOrder::Source`] unless the settings say otherwise: one partition's records one after the other, as many partitions
/// at once as `concurrency` says. A failed one is run again later, out of turn, and its partition goes on. With
/// [`ConsumerOrder::Key`] a failed one holds back its key, until it worked or its attempts are used up, and at last, when
/// `prefetch` is used up by what waits behind it, this consumer.
///
/// # Members that come and go
/// What is running in a partition that is revoked is waited for, up to 30 s or half of `max.poll.interval.ms`; what isn't
/// running is dropped, and is the next owner's. What still runs then may be handled by both, and has its effect once. Slow
/// handlers don't cost a consumer its membership: it polls all the time. At most `prefetch` messages are taken at once, and
/// about 1 000 records or 4 MiB per partition read ahead of that (`queued.min.messages`, `queued.max.messages.kbytes`).
///
/// # Messages that kill processes
/// Kafka doesn't say that a record was delivered before. So each commit says in its metadata up to where messages may have
/// begun, and none begins before a commit says so. Whoever has the partition next treats what lies below as
/// [redelivered](crate::inbox::Incoming::redelivered): it is written down before it runs, and is FAILED when
/// [`max_claims`](crate::InboxSettings::max_claims) processes died while they ran it. That is up to 1 000 records (or twice the
/// prefetch) per partition that were there after a crash, and none after a shutdown in good order. (The metadata takes up to 36
/// bytes; brokers that allow less, by `offset.metadata.max.bytes`, can't be consumed from, and the status says so.)
///
/// # Properties
/// [`KafkaSettings`] are those of the sending side. A consumer differs from librdkafka's defaults in these:
///
/// | property | here |
/// |---|---|
/// | `auto.offset.reset` | `earliest`: a new group begins with the oldest record |
/// | `isolation.level` | `read_committed` |
/// | `partition.assignment.strategy` | `cooperative-sticky`; set `range,roundrobin` to join members of other programs that have it so |
/// | `topic.metadata.refresh.interval.ms` | `5000`: a topic that is made later is found so soon |
/// | `enable.auto.commit`, `enable.auto.offset.store` | `false`, can't be set |
///
/// For static membership set `group.instance.id`, another one in each process.
#[derive(Debug, Clone)]
pub struct KafkaConsumer {
    kafka: KafkaSettings,
    group: String,
    topics: Vec<String>,
    settings: ConsumerSettings,
}

impl KafkaConsumer {
    /// A member of this consumer group for these topics. `kafka` is brokers to ask first (`host:9092,host2:9092`), or settings.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(
        kafka: impl Into<KafkaSettings>,
        group: impl Into<String>,
        topics: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Self, Error> {
        let (kafka, group) = (kafka.into(), group.into());
        let mut topics: Vec<String> = topics.into_iter().map(Into::into).collect();
        topics.sort();
        topics.dedup();
        let mut problems = Vec::new();
        if group.is_empty() || group.contains('\0') {
            problems.push(("group".to_owned(), format!("{group:?}, must have a character, and no NUL")));
        } else {
            problems.extend(config::problems(&kafka, &group));
        }
        if topics.is_empty() {
            problems.push(("topics".into(), "are empty, must be at least one".into()));
        }
        problems.extend(topics.iter().filter_map(|topic| Some(("topics".to_owned(), check_topic(topic).err()?))));
        if !problems.is_empty() {
            let lines: Vec<_> = problems.into_iter().map(|(field, why)| format!("kafka.{field}: {why}")).collect();
            return Err(Error::Config(lines.join("; ")));
        }
        let settings = ConsumerSettings { order: ConsumerOrder::Source, ..ConsumerSettings::default() };
        Ok(Self { kafka, group, topics, settings })
    }

    /// Replaces all settings, also the order, which is [`ConsumerOrder::Source`] without them.
    #[must_use]
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Starts it, and the inbox's retry worker. Brokers that can't be reached and topics that don't exist are waited for;
    /// [`Consumer::status`] says so.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that can't hold, [`Error::Schema`] if the inbox's tables are missing or too old.
    pub async fn start<DB: Backend>(self, inbox: &Inbox<DB>) -> Result<Consumer, Error> {
        let config = config::config(&self.kafka, &self.group);
        Consumer::start(inbox, self.settings, move |consumer| run(consumer, config, self.topics)).await
    }
}

/// Has the thread leave the group at once where the consumer is dropped.
struct Abandon(Control);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.set(Phase::Abandoned);
    }
}

async fn run(mut consumer: Loop, config: ClientConfig, topics: Vec<String>) {
    let control = Control::default();
    let (end, ended) = oneshot::channel::<()>();
    let poller = Poller {
        config: config.clone(),
        topics: topics.clone(),
        intake: consumer.intake.clone(),
        link: consumer.link.clone(),
        control: control.clone(),
        runtime: Handle::current(),
    };
    let polling = std::thread::Builder::new().name("posthouse-kafka".into()).spawn(move || {
        let _end = end;
        poller.run();
    });
    if let Err(e) = polling {
        tracing::error!(target: "posthouse::kafka", error = %e, "no thread to consume in");
        consumer.link.down(format!("no thread could be started: {e}"));
        consumer.stop.asked().await;
        return;
    }
    let abandon = Abandon(control.clone());
    let deadline = tokio::select! {
        deadline = consumer.stop.asked() => deadline,
        never = compare_retention(&**consumer.intake.sink(), &config, &topics) => match never {},
    };
    control.set(Phase::Stopping);
    consumer.intake.stop(deadline).await;
    control.set(Phase::Leaving);
    let _ = ended.await;
    drop(abandon);
}

/// Looks once for each topic whether it keeps records longer than the inbox their ids.
async fn compare_retention(sink: &dyn Sink, config: &ClientConfig, topics: &[String]) -> std::convert::Infallible {
    let mut left = topics.to_vec();
    while !left.is_empty() {
        let mut unknown = Vec::new();
        for topic in left {
            match retention::retention_of(config, &topic).await {
                Ok(replay) => {
                    sink.retention_at_least(replay, &format!("retention.ms and segment.ms of topic {topic}"));
                }
                Err(error) => {
                    tracing::debug!(target: "posthouse::kafka", topic, error, "the topic's retention can't be looked up");
                    unknown.push(topic);
                }
            }
        }
        left = unknown;
        tokio::time::sleep(ASK_RETENTION).await;
    }
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_problem_is_listed() {
        let error = KafkaConsumer::new("localhost", "", ["a b"]).unwrap_err().to_string();
        assert!(error.contains("group") && error.contains("a b"), "{error}");
        let error = KafkaConsumer::new("localhost", "g", Vec::<String>::new()).unwrap_err().to_string();
        assert!(error.contains("host:port") && error.contains("kafka.topics"), "{error}");
    }

    #[test]
    fn the_order_is_that_of_the_partition_unless_the_settings_say_otherwise() {
        let consumer = KafkaConsumer::new("localhost:9092", "g", ["t", "t"]).unwrap();
        assert_eq!((consumer.settings.order, consumer.topics.len()), (ConsumerOrder::Source, 1));
        assert_eq!(consumer.settings(ConsumerSettings::default()).settings.order, ConsumerOrder::None);
    }
}
