//! The Kafka consumer: what the suite needs of it, and what is peculiar to it.

mod deaths;
mod members;
mod offsets;
mod outages;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use posthouse::consumer::{Consumer, KafkaConsumer};
use posthouse::inbox::{Inbox, Source};
use posthouse::store::Backend;
use posthouse::testing::deliver;
use posthouse::transport::{Kafka, KafkaSettings, Outcome};
use posthouse::{ConsumerSettings, Envelope, Route};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{Feed, PATIENCE};
use crate::kafka::{client, create_topic, fresh_name, settings, url};

/// A topic on the shared brokers, or own ones, and a group that reads it.
#[derive(Clone)]
pub(super) struct FromKafka {
    brokers: String,
    topic: String,
    group: String,
    kafka: Arc<Kafka>,
}

/// What the group has committed for a partition, and where the partition ends.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Committed {
    offset: Option<i64>,
    metadata: String,
    low: i64,
    high: i64,
}

impl FromKafka {
    async fn with(partitions: i32) -> Self {
        Self::on(&url(), partitions).await
    }

    async fn on(brokers: &str, partitions: i32) -> Self {
        let feed = Self::without_topic(brokers);
        create_topic(&client(brokers, &[]), &feed.topic, partitions, &[]).await;
        feed
    }

    fn without_topic(brokers: &str) -> Self {
        let kafka = Arc::new(Kafka::new(brokers).unwrap());
        Self { brokers: brokers.into(), topic: fresh_name(), group: fresh_name(), kafka }
    }

    /// Quick to notice what happens in the group.
    fn settings(&self, properties: &[(&str, &str)]) -> KafkaSettings {
        let mut all = settings(&self.brokers, properties);
        for (name, value) in
            [("session.timeout.ms", "6000"), ("heartbeat.interval.ms", "500"), ("topic.metadata.refresh.interval.ms", "500")]
        {
            all.properties.entry(name.into()).or_insert(value.into());
        }
        all
    }

    async fn start<DB: Backend>(&self, inbox: &Inbox<DB>, settings: ConsumerSettings, properties: &[(&str, &str)]) -> Consumer {
        let consumer = KafkaConsumer::new(self.settings(properties), &self.group, [&self.topic]).unwrap();
        consumer.settings(settings).start(inbox).await.unwrap()
    }

    fn reader(&self) -> ClientConfig {
        let mut config = client(&self.brokers, &[("enable.auto.commit", "false")]);
        config.set("group.id", &self.group);
        config
    }

    async fn committed(&self) -> Vec<Committed> {
        let (config, topic) = (self.reader(), self.topic.clone());
        tokio::task::spawn_blocking(move || {
            let reader: BaseConsumer = config.create().unwrap();
            let metadata = reader.fetch_metadata(Some(&topic), PATIENCE).unwrap();
            let partitions: Vec<_> = metadata.topics()[0].partitions().iter().map(|p| p.id()).collect();
            let mut list = TopicPartitionList::new();
            for partition in &partitions {
                list.add_partition(&topic, *partition);
            }
            let list = reader.committed_offsets(list, PATIENCE).unwrap();
            let found = partitions.iter().map(|partition| {
                let (low, high) = reader.fetch_watermarks(&topic, *partition, PATIENCE).unwrap();
                let entry = list.find_partition(&topic, *partition).unwrap();
                let offset = match entry.offset() {
                    Offset::Offset(offset) => Some(offset),
                    _ => None,
                };
                Committed { offset, metadata: entry.metadata().to_owned(), low, high }
            });
            found.collect()
        })
        .await
        .unwrap()
    }

    /// Puts records into a partition: key, headers and value as they are.
    async fn produce(&self, records: Vec<RawRecord>) {
        let (config, topic) = (client(&self.brokers, &[]), self.topic.clone());
        tokio::task::spawn_blocking(move || {
            let producer: BaseProducer = config.create().unwrap();
            for raw in &records {
                let mut headers = rdkafka::message::OwnedHeaders::new();
                for (key, value) in &raw.headers {
                    headers = headers.insert(rdkafka::message::Header { key, value: Some(value) });
                }
                let mut record = BaseRecord::<[u8], [u8]>::to(&topic).headers(headers);
                record.key = raw.key.as_deref();
                record.payload = raw.payload.as_deref();
                record.partition = raw.partition;
                while let Err((error, again)) = producer.send(record) {
                    assert_eq!(error.rdkafka_error_code(), Some(rdkafka::error::RDKafkaErrorCode::QueueFull));
                    producer.poll(Duration::from_millis(10));
                    record = again;
                }
            }
            producer.flush(PATIENCE).unwrap();
        })
        .await
        .unwrap();
    }
}

#[derive(Debug, Clone, Default)]
struct RawRecord {
    partition: Option<i32>,
    key: Option<Vec<u8>>,
    payload: Option<Vec<u8>>,
    headers: HashMap<String, Vec<u8>>,
}

impl RawRecord {
    fn new(id: &str) -> Self {
        let headers = [("posthouse-message-id", id), ("posthouse-type", "t")];
        let headers = headers.map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()));
        Self { payload: Some(b"{}".to_vec()), headers: headers.into(), ..Self::default() }
    }

    fn key(self, key: impl AsRef<[u8]>) -> Self {
        Self { key: Some(key.as_ref().to_vec()), ..self }
    }

    fn partition(self, partition: i32) -> Self {
        Self { partition: Some(partition), ..self }
    }
}

impl Feed for FromKafka {
    const IN_HAND: usize = usize::MAX;

    async fn new() -> Self {
        Self::with(1).await
    }

    async fn consume(&self, inbox: &Inbox<sqlx::Sqlite>, settings: ConsumerSettings) -> Consumer {
        self.start(inbox, settings, &[]).await
    }

    async fn send(&self, m: &Envelope, change: impl FnOnce(Route) -> Route + Send) {
        let route = change(Route::to(format!("kafka:{}", self.topic)));
        assert_eq!(deliver(&*self.kafka, m.clone(), route, PATIENCE).await, Outcome::Delivered);
    }

    async fn send_raw(&self, payload: &[u8]) {
        self.produce(vec![RawRecord { payload: Some(payload.to_vec()), ..RawRecord::default() }]).await;
    }

    async fn unacknowledged(&self) -> u64 {
        let left = |p: Committed| u64::try_from(p.high - p.offset.unwrap_or(p.low)).unwrap();
        self.committed().await.into_iter().map(left).sum()
    }

    fn check_source(&self, source: &Source) {
        let Source::Kafka { topic, partition, offset } = source else { panic!("{source:?}") };
        assert_eq!((topic, *partition), (&self.topic, 0));
        assert!(*offset >= 0);
    }
}
