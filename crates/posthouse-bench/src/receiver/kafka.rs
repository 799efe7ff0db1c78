//! A topic of its own.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use posthouse::transport;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{DeliveryResult, Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, NoCustomPartitioner, Producer, ProducerContext};

use super::{CONTENT_TYPE, Load, Receiver};
use crate::database::{fresh_name, must, url};
use crate::meter::{Meter, Spent};

pub(super) const VARIABLE: &str = "POSTHOUSE_TEST_KAFKA_URL";

/// Several, as topics in production have, so that records of one batch of ours go into several of the client's.
const PARTITIONS: i32 = 4;

/// How long the broker may take for an administrative request.
const PATIENCE: Duration = Duration::from_secs(30);

/// The raw loop takes in reports each time it has produced so many records.
const POLL_EVERY: usize = 256;

#[derive(Debug)]
pub(crate) struct Kafka {
    topic: String,
    /// What had arrived at the last [`clear`](Receiver::clear).
    before: usize,
}

fn config() -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", url(VARIABLE));
    config
}

fn admin() -> (AdminClient<DefaultClientContext>, AdminOptions) {
    let options = AdminOptions::new().request_timeout(Some(PATIENCE)).operation_timeout(Some(PATIENCE));
    (must("Kafka", config().create()), options)
}

/// The end of all partitions together.
fn end(topic: &str) -> usize {
    let consumer: BaseConsumer = must("consumer", config().create());
    let ends = (0..PARTITIONS).map(|p| must("watermarks", consumer.fetch_watermarks(topic, p, PATIENCE)).1);
    usize::try_from(ends.sum::<i64>()).unwrap_or(0)
}

async fn blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    must("task", tokio::task::spawn_blocking(f).await)
}

impl Receiver for Kafka {
    const NAME: &'static str = "kafka";
    const SCHEME: &'static str = "kafka";
    type Transport = transport::Kafka;

    async fn prepare() -> Self {
        let topic = fresh_name();
        let (admin, options) = admin();
        let new = NewTopic::new(&topic, PARTITIONS, TopicReplication::Fixed(1));
        for created in must("topic", admin.create_topics([&new], &options).await) {
            must("topic", created.map_err(|(topic, code)| format!("{topic}: {code}")));
        }
        Self { topic, before: 0 }
    }

    fn to(&self) -> String {
        format!("kafka:{}", self.topic)
    }

    fn transport(&self) -> Self::Transport {
        must("transport", transport::Kafka::new(&*url(VARIABLE)))
    }

    /// In flight is what the client's own queue holds.
    async fn publish(&self, load: &Load) -> Spent {
        let (topic, load) = (self.topic.clone(), load.clone());
        blocking(move || produce(&topic, &load)).await
    }

    async fn arrived(&self) -> usize {
        let topic = self.topic.clone();
        blocking(move || end(&topic)).await - self.before
    }

    /// The broker removes nothing at once: what is there is no longer counted.
    async fn clear(&mut self) {
        self.before += self.arrived().await;
    }

    async fn remove(self) {
        let (admin, options) = admin();
        must("delete", admin.delete_topics(&[&self.topic], &options).await);
    }
}

/// Counts confirmations.
#[derive(Debug, Default)]
struct Confirmed(AtomicUsize);

impl ClientContext for Confirmed {}

impl ProducerContext<NoCustomPartitioner> for Confirmed {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        must("confirm", result.as_ref().map_err(|(e, _)| e));
        self.0.fetch_add(1, Relaxed);
    }
}

fn produce(topic: &str, load: &Load) -> Spent {
    let mut config = config();
    config.set("acks", "all").set("enable.idempotence", "true").set("partitioner", "murmur2_random");
    let producer: BaseProducer<Confirmed> = must("producer", config.create_with_context(Confirmed::default()));
    let confirmed = || producer.context().0.load(Relaxed);
    let send = |n: usize| {
        let key = load.key(n);
        loop {
            let mut record = BaseRecord::<[u8], [u8]>::to(topic).payload(&load.payload).headers(headers(load, n));
            if let Some(key) = &key {
                record = record.key(key.as_bytes());
            }
            match producer.send(record) {
                Ok(()) => return,
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                    producer.poll(Duration::from_millis(10));
                }
                Err((e, _)) => must("produce", Err(e)),
            }
        }
    };
    let wait_for = |n: usize| {
        while confirmed() < n {
            producer.poll(Duration::from_millis(10));
        }
    };
    send(load.n);
    wait_for(1);

    let meter = Meter::start(None);
    for n in 0..load.n {
        send(n);
        if n % POLL_EVERY == 0 {
            producer.poll(Duration::ZERO);
        }
    }
    wait_for(load.n + 1);
    meter.stop()
}

fn headers(load: &Load, n: usize) -> OwnedHeaders {
    OwnedHeaders::new_with_capacity(3)
        .insert(Header { key: "content-type", value: Some(CONTENT_TYPE) })
        .insert(Header { key: "posthouse-message-id", value: Some(&load.id(n)) })
        .insert(Header { key: "posthouse-attempt", value: Some("1") })
}
