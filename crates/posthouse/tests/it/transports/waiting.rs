//! How much waits in brokers, and what is told where that can't be said.

use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::{self, stream};
use posthouse::transport::{KafkaLag, NatsPending, RabbitMqQueues, RabbitMqSettings};

use crate::support::bounded;
use crate::support::broker::{Kind, test_url};
use posthouse_faults::{Mode, Proxy};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_durable_consumer_has_messages_before_it() {
    bounded(async {
        let url = test_url(Kind::Nats);
        let js = jetstream::new(async_nats::connect(&url).await.unwrap());
        let name = format!("t_{:016x}", fastrand::u64(..));
        let config = stream::Config { subjects: vec![format!("{name}.>")], name: name.clone(), ..Default::default() };
        let stream = js.create_stream(config).await.unwrap();
        let durable = pull::Config { durable_name: Some("stock".into()), ..Default::default() };
        stream.create_consumer(durable).await.unwrap();
        for n in 0..3 {
            js.publish(format!("{name}.{n}"), "x".into()).await.unwrap().await.unwrap();
        }
        let pending = NatsPending::new(url.as_str()).unwrap();
        let waiting = pending.waiting(&name, "stock").await.unwrap();
        assert_eq!((waiting.messages, waiting.consumers), (3, None));
        let error = pending.waiting(&name, "nobody").await.unwrap_err();
        assert!(error.contains("no consumer \"nobody\""), "{error}");
        let error = pending.waiting("no_such_stream", "stock").await.unwrap_err();
        assert!(error.contains("no stream \"no_such_stream\""), "{error}");
        pending.close().await;
        js.delete_stream(&name).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_be_told_is_said_without_secrets() {
    bounded(async {
        let queues = RabbitMqQueues::new(test_url(Kind::RabbitMq).as_str()).unwrap();
        let missing = queues.waiting("no-such-queue").await.unwrap_err();
        assert!(missing.contains("has no queue \"no-such-queue\""), "{missing}");
        // The broker has closed the channel, and the connection goes on.
        assert_eq!(queues.waiting("no-such-queue").await.unwrap_err(), missing);
        let lag = KafkaLag::new(test_url(Kind::Kafka).as_str()).unwrap();
        let error = lag.waiting("g", "no-such-topic").await.unwrap_err();
        assert!(error.contains("no topic \"no-such-topic\""), "{error}");

        // Brokers that aren't there, and one that takes connections and says nothing.
        let gone = RabbitMqQueues::new("amqp://u:hunter2@127.0.0.1:9/v").unwrap();
        let lost = NatsPending::new("nats://hunter2@127.0.0.1:9").unwrap();
        let away = KafkaLag::new("127.0.0.1:9").unwrap();
        let silent = Proxy::start("127.0.0.1:9".into()).await;
        silent.set(Mode::Silent);
        let mut settings = RabbitMqSettings::from(format!("amqp://u:hunter2@{}/v", silent.address).as_str());
        settings.connect_timeout = Duration::from_millis(300);
        let mute = RabbitMqQueues::new(settings).unwrap();
        let told = tokio::join!(gone.waiting("q"), lost.waiting("s", "c"), away.waiting("g", "t"), mute.waiting("q"));
        for error in [told.0, told.1, told.2, told.3].map(Result::unwrap_err) {
            assert!(!error.is_empty() && !error.contains("hunter2"), "{error}");
        }
        tokio::join!(queues.close(), lag.close(), away.close());
    })
    .await;
}
