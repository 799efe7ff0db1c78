//! RabbitMQ queues: the suite's source, and what is peculiar to them.

mod answers;
mod content;
mod faults;
mod order;

use std::sync::Arc;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Connection};
use posthouse::consumer::RabbitMqConsumer;
use posthouse::inbox::Source;
use posthouse::testing::deliver;
use posthouse::transport::{Outcome, RabbitMq, RabbitMqSettings};
use posthouse::{QueueType, Route};

use super::*;
use crate::support::broker::{Broker, Kind, evaluate, test_url};
use posthouse_faults::Proxy;

/// A queue of its own, gone some time after the test.
#[derive(Clone)]
pub(super) struct FromRabbitMq {
    broker: String,
    /// How consumers reach it.
    by: RabbitMqSettings,
    queue: String,
    transport: Arc<RabbitMq>,
}

/// A channel of its own connection.
struct Client {
    _connection: Connection,
    channel: Channel,
}

impl Client {
    async fn at(url: &str) -> Self {
        let connection = Connection::connect(url, Default::default()).await.expect("RabbitMQ");
        let channel = connection.create_channel().await.expect("channel");
        channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
        Self { _connection: connection, channel }
    }

    async fn declare(&self, queue: &str, arguments: &[(&str, AMQPValue)], durable: bool) {
        let mut table = FieldTable::default();
        for (name, value) in arguments {
            table.insert((*name).into(), value.clone());
        }
        let options = QueueDeclareOptions { durable, ..Default::default() };
        self.channel.queue_declare(queue.into(), options, table).await.expect("queue");
    }

    async fn publish(&self, queue: &str, properties: BasicProperties, payload: &[u8]) {
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let confirm = self.channel.basic_publish("".into(), queue.into(), options, payload, properties).await.expect("publish");
        let confirmation = confirm.await.expect("a confirmation");
        assert!(confirmation.is_ack() && confirmation.take_message().is_none(), "{queue} has it");
    }
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

fn type_of(queue_type: QueueType) -> AMQPValue {
    text(if queue_type == QueueType::Quorum { "quorum" } else { "classic" })
}

impl FromRabbitMq {
    /// A queue of the shared broker.
    async fn with(arguments: &[(&str, AMQPValue)]) -> Self {
        let feed = Self::at(&test_url(Kind::RabbitMq));
        let mut arguments = arguments.to_vec();
        arguments.push(("x-expires", AMQPValue::LongInt(600_000)));
        // A quorum queue must be durable.
        let durable = arguments.iter().any(|(name, _)| *name == "x-queue-type");
        feed.client().await.declare(&feed.queue, &arguments, durable).await;
        feed
    }

    /// A queue that isn't declared.
    fn at(url: &str) -> Self {
        let transport = Arc::new(RabbitMq::new(url).expect("settings"));
        Self { broker: url.into(), by: url.into(), queue: format!("t-{:016x}", fastrand::u64(..)), transport }
    }

    async fn client(&self) -> Client {
        Client::at(&self.broker).await
    }

    /// Has consumers reach the broker through a proxy.
    async fn by_proxy(&mut self) -> Proxy {
        let address = self.broker.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
        let proxy = Proxy::start(address.clone()).await;
        self.by = self.broker.replace(&address, &proxy.address.to_string()).as_str().into();
        proxy
    }

    fn consumer(&self) -> RabbitMqConsumer {
        RabbitMqConsumer::new(self.by.clone(), self.queue.as_str()).expect("settings")
    }

    /// `messages_ready`, `messages_unacknowledged`, `messages` of a classic queue.
    async fn count(&self, which: &str) -> u64 {
        let vhost = self.broker.rsplit('/').next().expect("a virtual host");
        let expression = format!(
            "{{ok, Q}} = rabbit_amqqueue:lookup({{resource, <<\"{vhost}\">>, queue, <<\"{}\">>}}), \
             [{{_, N}}] = rabbit_amqqueue:info(Q, [{which}]), N.",
            self.queue
        );
        evaluate(&self.broker, &expression).await.parse().expect("a number")
    }

    fn bench(self, fixture: Fixture<Sqlite>, script: impl FnOnce(Script) -> Script) -> Bench<Self> {
        let script = script(Script::new(&fixture.effects));
        Bench { feed: self, fixture, script }
    }
}

impl Feed for FromRabbitMq {
    const IN_HAND: usize = usize::MAX;

    async fn new() -> Self {
        Self::with(&[]).await
    }

    async fn consume(&self, inbox: &Inbox<Db>, settings: ConsumerSettings) -> Consumer {
        self.consumer().settings(settings).start(inbox).await.expect("start")
    }

    async fn send(&self, m: &Envelope, change: impl FnOnce(Route) -> Route + Send) {
        let route = change(Route::to(format!("amqp:/{}", self.queue)));
        // A broker may be away meanwhile.
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            match deliver(&*self.transport, m.clone(), route.clone(), SOON).await {
                Outcome::Delivered => return,
                other => assert!(std::time::Instant::now() < deadline, "{other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn send_raw(&self, payload: &[u8]) {
        self.client().await.publish(&self.queue, BasicProperties::default(), payload).await;
    }

    async fn unacknowledged(&self) -> u64 {
        self.count("messages").await
    }

    fn check_source(&self, source: &Source) {
        assert_eq!(*source, Source::RabbitMq { exchange: String::new(), routing_key: self.queue.clone() });
    }
}

async fn wait_connected(consumer: &Consumer) {
    wait_for("the subscription", PATIENCE, async || consumer.status().connected).await;
}

async fn wait_down(consumer: &Consumer, says: &str) {
    wait_for(&format!("the status to say {says:?}"), PATIENCE, async || {
        let status = consumer.status();
        !status.connected && status.last_error.is_some_and(|why| why.contains(says))
    })
    .await;
}
