//! The receivers of the suite: one kind per transport, each with an address of its own.

use std::collections::BTreeMap;

use async_nats::jetstream;
use futures_util::StreamExt;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use posthouse::Route;
use posthouse::transport::{Http, HttpSettings, Kafka, Nats, RabbitMq, Transport};

use super::PATIENCE;
use crate::http::{Reply, Server, status};
use crate::support::broker::{Kind, test_url};

/// A port on which nobody listens.
const CLOSED: &str = "127.0.0.1:9";

/// What a receiver got, in the words of the message rather than of the transport.
#[derive(Debug, Clone, Default)]
pub(super) struct Received {
    pub(super) id: String,
    pub(super) kind: Option<String>,
    pub(super) key: Option<String>,
    pub(super) content_type: Option<String>,
    pub(super) payload: Vec<u8>,
    /// All headers, names in lower case.
    pub(super) headers: BTreeMap<String, String>,
}

/// A receiver.
pub(super) trait Target: Sized + Send + Sync + 'static {
    /// What its transport puts before the names of CloudEvents attributes.
    const CLOUDEVENTS: &'static str;
    /// Whether messages of one batch arrive in order.
    const IN_ORDER: bool;
    /// The scheme of its addresses.
    const SCHEME: &'static str;
    type Transport: Transport;
    fn new() -> impl Future<Output = Self> + Send;
    fn transport() -> Self::Transport;
    /// A transport whose receiver isn't there, and a route to it.
    fn dead() -> (Self::Transport, Route);
    fn route(&self) -> Route;
    /// An address at the same receiver at which nothing takes messages.
    fn nowhere(&self) -> Route;
    /// What it got so far, waiting until that are `n`; in order where there is one.
    fn received(&self, n: usize) -> impl Future<Output = Vec<Received>> + Send;
}

fn fresh_name() -> String {
    format!("suite-{:016x}", fastrand::u64(..))
}

/// Undoes percent-encoding.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        if let (b'%', Some(hex)) = (first, tail.get(..2)) {
            bytes.push(u8::from_str_radix(std::str::from_utf8(hex).unwrap(), 16).unwrap());
            rest = &tail[2..];
        } else {
            bytes.push(*first);
            rest = tail;
        }
    }
    String::from_utf8(bytes).unwrap()
}

pub(super) struct ToHttp {
    good: Server,
    gone: Server,
}

impl Target for ToHttp {
    const CLOUDEVENTS: &'static str = "ce-";
    const IN_ORDER: bool = false;
    const SCHEME: &'static str = "http";
    type Transport = Http;

    async fn new() -> Self {
        Self { good: Server::new(status("204 No Content", "", "")).await, gone: Server::new(not_found()).await }
    }

    fn transport() -> Http {
        let mut settings = HttpSettings::default();
        settings.allow = vec!["127.0.0.1".into()];
        Http::new(settings).unwrap()
    }

    fn dead() -> (Http, Route) {
        (Self::transport(), Route::to(format!("http://user:hunter2@{CLOSED}/hook")))
    }

    fn route(&self) -> Route {
        Route::to(self.good.url("/hook"))
    }

    fn nowhere(&self) -> Route {
        Route::to(self.gone.url("/nowhere"))
    }

    async fn received(&self, n: usize) -> Vec<Received> {
        let until = std::time::Instant::now() + PATIENCE;
        while self.good.seen().len() < n {
            assert!(std::time::Instant::now() < until, "{} of {n} requests", self.good.seen().len());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let seen = self.good.seen().into_iter().map(|request| {
            let header = |name: &str| request.header(name).map(decoded);
            Received {
                id: header("posthouse-message-id").unwrap(),
                kind: header("posthouse-type"),
                key: header("posthouse-key"),
                content_type: request.header("content-type").map(str::to_owned),
                payload: request.body.clone(),
                headers: request.headers.clone(),
            }
        });
        seen.collect()
    }
}

fn not_found() -> Reply {
    status("404 Not Found", "", "no such hook")
}

pub(super) struct ToRabbitMq {
    channel: lapin::Channel,
    _connection: lapin::Connection,
    queue: String,
}

impl Target for ToRabbitMq {
    const CLOUDEVENTS: &'static str = "cloudEvents:";
    const IN_ORDER: bool = true;
    const SCHEME: &'static str = "amqp";
    type Transport = RabbitMq;

    async fn new() -> Self {
        let connection = lapin::Connection::connect(&test_url(Kind::RabbitMq), Default::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        let queue = fresh_name();
        let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
        channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await.unwrap();
        Self { channel, _connection: connection, queue }
    }

    fn transport() -> RabbitMq {
        RabbitMq::new(&*test_url(Kind::RabbitMq)).unwrap()
    }

    fn dead() -> (RabbitMq, Route) {
        (RabbitMq::new(&*format!("amqp://user:hunter2@{CLOSED}")).unwrap(), Route::to("amqp:/queue"))
    }

    fn route(&self) -> Route {
        Route::to(format!("amqp:/{}", self.queue))
    }

    fn nowhere(&self) -> Route {
        Route::to(format!("amqp:/{}-nowhere", self.queue))
    }

    async fn received(&self, n: usize) -> Vec<Received> {
        let mut out = Vec::new();
        while out.len() < n {
            let Some(got) = self.channel.basic_get(self.queue.as_str().into(), BasicGetOptions { no_ack: true }).await.unwrap()
            else {
                tokio::task::yield_now().await;
                continue;
            };
            let properties = &got.properties;
            let text = |value: &AMQPValue| match value {
                AMQPValue::LongString(text) => text.to_string(),
                other => format!("{other:?}"),
            };
            let headers: BTreeMap<_, _> = properties
                .headers()
                .iter()
                .flat_map(|table| table.inner())
                .map(|(name, value)| (name.as_str().to_lowercase(), text(value)))
                .collect();
            out.push(Received {
                id: properties.message_id().as_ref().unwrap().to_string(),
                kind: properties.kind().as_ref().map(ToString::to_string),
                key: headers.get("posthouse-key").cloned(),
                content_type: properties.content_type().as_ref().map(ToString::to_string),
                payload: got.data.clone(),
                headers,
            });
        }
        out
    }
}

pub(super) struct ToKafka {
    topic: String,
}

impl Target for ToKafka {
    const CLOUDEVENTS: &'static str = "ce_";
    const IN_ORDER: bool = true;
    const SCHEME: &'static str = "kafka";
    type Transport = Kafka;

    async fn new() -> Self {
        Self { topic: crate::kafka::topic(1, &[]).await }
    }

    fn transport() -> Kafka {
        Kafka::new(&*test_url(Kind::Kafka)).unwrap()
    }

    fn dead() -> (Kafka, Route) {
        let mut settings = posthouse::transport::KafkaSettings::from(CLOSED);
        for (name, value) in [("security.protocol", "sasl_plaintext"), ("sasl.mechanism", "PLAIN")] {
            settings.properties.insert(name.into(), value.into());
        }
        settings.properties.insert("sasl.username".into(), "user".into());
        settings.properties.insert("sasl.password".into(), "hunter2".into());
        (Kafka::new(settings).unwrap(), Route::to("kafka:topic"))
    }

    fn route(&self) -> Route {
        Route::to(format!("kafka:{}", self.topic))
    }

    fn nowhere(&self) -> Route {
        Route::to(format!("kafka:{}-nowhere", self.topic))
    }

    async fn received(&self, n: usize) -> Vec<Received> {
        let records = crate::kafka::records(crate::kafka::client(&test_url(Kind::Kafka), &[]), &self.topic).await;
        assert!(records.len() >= n, "{} of {n}: a confirmed record can be read", records.len());
        let received = records.into_iter().map(|record| Received {
            id: record.headers["posthouse-message-id"].clone(),
            kind: record.headers.get("posthouse-type").cloned(),
            key: record.key,
            content_type: record.headers.get("content-type").cloned(),
            payload: record.value,
            headers: record.headers.into_iter().map(|(name, value)| (name.to_lowercase(), value)).collect(),
        });
        received.collect()
    }
}

pub(super) struct ToNats {
    stream: jetstream::stream::Stream,
    name: String,
}

impl Target for ToNats {
    const CLOUDEVENTS: &'static str = "ce-";
    const IN_ORDER: bool = false;
    const SCHEME: &'static str = "nats";
    type Transport = Nats;

    async fn new() -> Self {
        let js = jetstream::new(async_nats::connect(test_url(Kind::Nats)).await.unwrap());
        let name = fresh_name();
        let config = jetstream::stream::Config { name: name.clone(), subjects: vec![name.clone()], ..Default::default() };
        Self { stream: js.create_stream(config).await.unwrap(), name }
    }

    fn transport() -> Nats {
        Nats::new(&*test_url(Kind::Nats)).unwrap()
    }

    fn dead() -> (Nats, Route) {
        (Nats::new(&*format!("nats://user:hunter2@{CLOSED}")).unwrap(), Route::to("nats:subject"))
    }

    fn route(&self) -> Route {
        Route::to(format!("nats:{}", self.name))
    }

    fn nowhere(&self) -> Route {
        Route::to(format!("nats:{}.nowhere", self.name))
    }

    async fn received(&self, n: usize) -> Vec<Received> {
        let ack_policy = jetstream::consumer::AckPolicy::None;
        let config = jetstream::consumer::pull::Config { ack_policy, ..Default::default() };
        let consumer = self.stream.create_consumer(config).await.unwrap();
        let mut messages = consumer.messages().await.unwrap();
        let mut out = Vec::new();
        while out.len() < n {
            let m = tokio::time::timeout(PATIENCE, messages.next()).await.expect("in time").expect("one more").unwrap();
            let headers: BTreeMap<String, String> = m
                .headers
                .iter()
                .flat_map(|h| h.iter())
                .map(|(name, values)| (name.to_string().to_lowercase(), values[0].to_string()))
                .collect();
            out.push(Received {
                id: decoded(&headers["nats-msg-id"]),
                kind: headers.get("posthouse-type").map(|v| decoded(v)),
                key: headers.get("posthouse-key").map(|v| decoded(v)),
                content_type: headers.get("content-type").cloned(),
                payload: m.payload.to_vec(),
                headers,
            });
        }
        out
    }
}
