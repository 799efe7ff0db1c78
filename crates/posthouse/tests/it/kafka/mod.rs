//! The `kafka` transport against real brokers.

mod faults;
mod outcomes;
mod pipelined;
mod security;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use posthouse::transport::{Failure, Kafka, KafkaSettings, Outcome};
use posthouse::{Envelope, Ordering, Route};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::support::broker::{Kind, test_url};

/// Long enough for any machine; tests that wait for a deadline set their own.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn url() -> String {
    test_url(Kind::Kafka)
}

fn kafka() -> Kafka {
    kafka_with(&[])
}

fn kafka_with(properties: &[(&str, &str)]) -> Kafka {
    Kafka::new(settings(&url(), properties)).unwrap()
}

pub(crate) fn settings(brokers: &str, properties: &[(&str, &str)]) -> KafkaSettings {
    let mut settings = KafkaSettings::from(brokers);
    settings.properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    settings
}

pub(crate) fn client(brokers: &str, properties: &[(&str, &str)]) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    for (name, value) in properties {
        config.set(*name, *value);
    }
    config
}

pub(crate) fn fresh_name() -> String {
    format!("t-{:016x}", fastrand::u64(..))
}

/// A new topic on the shared broker.
pub(crate) async fn topic(partitions: i32, config: &[(&str, &str)]) -> String {
    let name = fresh_name();
    create_topic(&client(&url(), &[]), &name, partitions, config).await;
    name
}

pub(crate) async fn create_topic(client: &ClientConfig, name: &str, partitions: i32, config: &[(&str, &str)]) {
    let admin: AdminClient<DefaultClientContext> = client.create().unwrap();
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
    for (key, value) in config {
        topic = topic.set(key, value);
    }
    let options = AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE));
    for result in admin.create_topics([&topic], &options).await.unwrap() {
        result.unwrap();
    }
}

/// A record as a consumer sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) key: Option<String>,
    pub(crate) value: Vec<u8>,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) timestamp: Option<i64>,
}

impl Record {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.value).into_owned()
    }
}

/// Everything in a topic at the moment, partition by partition.
pub(crate) async fn records(client: ClientConfig, topic: &str) -> Vec<Record> {
    let topic = topic.to_owned();
    tokio::task::spawn_blocking(move || read(client, &topic)).await.unwrap()
}

fn read(mut client: ClientConfig, topic: &str) -> Vec<Record> {
    let consumer: BaseConsumer = client.set("group.id", "reader").set("enable.auto.commit", "false").create().unwrap();
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).unwrap();
    let mut out = Vec::new();
    for partition in metadata.topics()[0].partitions() {
        let (low, high) = consumer.fetch_watermarks(topic, partition.id(), PATIENCE).unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition_offset(topic, partition.id(), Offset::Offset(low)).unwrap();
        consumer.assign(&list).unwrap();
        let until = Instant::now() + PATIENCE;
        let mut next = low;
        while next < high {
            assert!(Instant::now() < until, "partition {} ends at {high}, read up to {next}", partition.id());
            let Some(message) = consumer.poll(Duration::from_millis(100)) else { continue };
            let message = message.unwrap();
            let headers = message.headers().map_or_else(BTreeMap::new, |headers| {
                let text = |bytes: Option<&[u8]>| String::from_utf8(bytes.unwrap_or_default().to_vec()).unwrap();
                headers.iter().map(|h| (h.key.to_owned(), text(h.value))).collect()
            });
            next = message.offset() + 1;
            out.push(Record {
                key: message.key().map(|key| String::from_utf8(key.to_vec()).unwrap()),
                value: message.payload().unwrap_or_default().to_vec(),
                headers,
                timestamp: message.timestamp().to_millis(),
            });
        }
    }
    out
}

fn to(topic: &str) -> Route {
    Route::to(format!("kafka:{topic}"))
}

fn pipelined(topic: &str) -> Route {
    to(topic).ordering(Ordering::Pipelined)
}

fn message(key: Option<&str>, payload: impl Into<Vec<u8>>) -> Envelope {
    let mut m = Envelope::for_test("orders", payload);
    m.key = key.map(str::to_owned);
    m
}

#[track_caller]
fn retry(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Retry { error, .. } => error,
        other => panic!("expected Retry, got {other:?}"),
    }
}

#[track_caller]
fn rejected(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Rejected(failure) => failure,
        other => panic!("expected Rejected, got {other:?}"),
    }
}

#[track_caller]
fn unavailable(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Unavailable(failure) => failure,
        other => panic!("expected Unavailable, got {other:?}"),
    }
}
