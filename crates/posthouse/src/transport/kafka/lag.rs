//! How far consumer groups are behind.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::KafkaSettings;
use super::settings::explain;
use crate::Error;
use crate::error::storable;
use crate::transport::Waiting;

/// What one answer may take, all questions to brokers together.
const DEADLINE: Duration = Duration::from_secs(10);

type Client = BaseConsumer<Asking>;

/// Tells how far consumer groups of a Kafka cluster are behind. It joins no group and reads no record.
///
/// ```no_run
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let lag = posthouse::transport::KafkaLag::new("localhost:9092")?;
/// println!("{} records wait", lag.waiting("invoices", "lottery_invoice").await?.messages);
/// # Ok(()) }
/// ```
pub struct KafkaLag {
    settings: KafkaSettings,
    /// A client belongs to one group.
    clients: Mutex<HashMap<String, Arc<Client>>>,
}

impl fmt::Debug for KafkaLag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaLag").field("settings", &self.settings).finish_non_exhaustive()
    }
}

struct Asking;

impl ClientContext for Asking {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        super::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "posthouse::kafka", %error, "{reason}");
    }
}

impl ConsumerContext for Asking {}

impl KafkaLag {
    /// Checks the settings. Connects when it is asked something, and keeps the connections.
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
        Ok(Self { settings, clients: Mutex::default() })
    }

    /// Records of a topic above what a group has committed, and the group's members. A partition for which the group has
    /// committed nothing counts from its first record. Answers within 10 s.
    ///
    /// # Errors
    /// Why it can't be told, in a sentence without secrets; also when the group has committed nothing at all for this topic.
    pub async fn waiting(&self, group: &str, topic: &str) -> Result<Waiting, String> {
        let client = self.client(group).map_err(|e| explain(&e))?;
        let (group, topic) = (group.to_owned(), topic.to_owned());
        // librdkafka waits for brokers on the calling thread.
        let asked = tokio::task::spawn_blocking(move || ask(&client, &group, &topic));
        asked.await.unwrap_or_else(|e| Err(format!("the question was given up: {e}")))
    }

    fn client(&self, group: &str) -> Result<Arc<Client>, KafkaError> {
        // Nothing panics while it is held.
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(group) {
            return Ok(client.clone());
        }
        let client = Arc::new(self.config(group).create_with_context(Asking)?);
        clients.insert(group.to_owned(), Arc::clone(&client));
        Ok(client)
    }

    fn config(&self, group: &str) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set_log_level(RDKafkaLogLevel::Warning);
        config.set("client.id", "posthouse").set("reconnect.backoff.max.ms", "1000").set("socket.keepalive.enable", "true");
        for (name, value) in &self.settings.properties {
            config.set(name.trim(), value);
        }
        config.set("bootstrap.servers", self.settings.brokers.trim());
        config.set("group.id", group);
        config.set("enable.auto.commit", "false");
        config
    }

    /// Ends the connections.
    pub async fn close(&self) {
        let clients = std::mem::take(&mut *self.clients.lock().unwrap_or_else(PoisonError::into_inner));
        // Ends their threads, which takes a moment. One that is being asked ends with its answer.
        let _ = tokio::task::spawn_blocking(move || drop(clients)).await;
    }
}

fn ask(client: &Client, group: &str, topic: &str) -> Result<Waiting, String> {
    let until = Instant::now() + DEADLINE;
    let left = || until.saturating_duration_since(Instant::now());
    // What has been reported meanwhile would gather for ever: nothing else asks this client for its events.
    while client.poll(Duration::ZERO).is_some() {}

    let metadata = client.fetch_metadata(Some(topic), left()).map_err(|e| told(&e))?;
    let found = metadata.topics().iter().find(|t| t.name() == topic);
    let partitions: Vec<i32> = match found.map(|t| (t.error().map(Code::from), t.partitions())) {
        Some((None, partitions)) if !partitions.is_empty() => partitions.iter().map(|p| p.id()).collect(),
        Some((Some(Code::TopicAuthorizationFailed), _)) => return Err(format!("this user may not describe the topic {topic:?}")),
        _ => return Err(format!("there is no topic {topic:?}")),
    };
    let list = |offset: Offset| {
        let mut list = TopicPartitionList::with_capacity(partitions.len());
        for partition in &partitions {
            list.add_partition_offset(topic, *partition, offset).map_err(|e| told(&e))?;
        }
        Ok::<_, String>(list)
    };
    let committed = client.committed_offsets(list(Offset::Invalid)?, left()).map_err(|e| told(&e))?;
    // Asked for after what is committed, so that no lag comes out negative.
    let first = client.offsets_for_times(list(Offset::Beginning)?, left()).map_err(|e| told(&e))?;
    let next = client.offsets_for_times(list(Offset::End)?, left()).map_err(|e| told(&e))?;

    let mut any = false;
    let mut messages = 0;
    for partition in &partitions {
        let first = offset(&first, topic, *partition)?.unwrap_or(0);
        let next = offset(&next, topic, *partition)?.unwrap_or(0);
        let committed = offset(&committed, topic, *partition)?;
        any |= committed.is_some();
        // What retention has removed is read by nobody any more.
        let from = committed.map_or(first, |c| c.max(first));
        messages += u64::try_from(next - from).unwrap_or(0);
    }
    if !any {
        return Err(format!("the group {group:?} has committed nothing for the topic {topic:?}"));
    }
    let groups = client.fetch_group_list(Some(group), left());
    let consumers = groups.ok().and_then(|g| g.groups().first().map(|g| g.members().len() as u64));
    Ok(Waiting { messages, consumers })
}

/// The offset of one partition; None when there is none.
fn offset(list: &TopicPartitionList, topic: &str, partition: i32) -> Result<Option<i64>, String> {
    let Some(found) = list.find_partition(topic, partition) else {
        return Err(format!("no broker answered for partition {partition} of the topic {topic:?}"));
    };
    found.error().map_err(|e| format!("partition {partition} of the topic {topic:?}: {}", told(&e)))?;
    match found.offset() {
        Offset::Offset(offset) => Ok(Some(offset)),
        _ => Ok(None),
    }
}

fn told(error: &KafkaError) -> String {
    match error.rdkafka_error_code() {
        Some(Code::BrokerTransportFailure | Code::AllBrokersDown | Code::OperationTimedOut | Code::Resolve) => {
            "no broker can be reached".into()
        }
        Some(Code::GroupAuthorizationFailed) => "this user may not describe the group".into(),
        _ => storable(&error.to_string(), 300),
    }
}
