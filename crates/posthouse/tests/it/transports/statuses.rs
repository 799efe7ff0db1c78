//! What each kind of fault at a real broker looks like to the people who look into the database, and that it stays with its own
//! destination.

use std::collections::HashMap;
use std::time::Duration;

use posthouse::store::MessageRow;
use posthouse::transport::{Http, HttpSettings, Kafka, Nats, RabbitMq};
use posthouse::{Message, Relay, Retry, Route};

use super::targets::{Target, ToHttp, ToKafka, ToNats, ToRabbitMq};
use crate::relay::quick;
use crate::support::broker::{Kind, test_url};
use crate::support::{Postgres, SOON, TestDb, bounded, messages, wait_for};

/// What must be seen of a message.
enum Seen {
    Sent,
    /// Attempts used up, with this in its error.
    Failed(&'static str),
    /// FAILED by its first attempt.
    Rejected(&'static str),
    /// Waiting, no attempt counted, with this in its destination's error.
    Waiting(&'static str),
}
use Seen::{Failed, Rejected, Sent, Waiting};

/// A name that no resolver knows (RFC 6761).
const NO_HOST: &str = "no-such-host.invalid";

fn wrong_login(url: &str) -> String {
    let (_, place) = url.split_once('@').expect("a URL with a login");
    format!("amqp://posthouse:hunter2@{place}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_has_its_status_and_its_text_and_stays_where_it_is() {
    bounded(async {
        let (http, amqp, kafka, nats) = (ToHttp::new().await, ToRabbitMq::new().await, ToKafka::new().await, ToNats::new().await);
        let (rabbit_url, nats_url) = (test_url(Kind::RabbitMq), test_url(Kind::Nats));
        let large_topic = crate::kafka::topic(1, &[("max.message.bytes", "1000")]).await;
        let outbox = Postgres::fresh().await;
        let mut settings = quick();
        settings.send_timeout = Duration::from_secs(5);
        settings.lease = Duration::from_secs(12);
        settings.heartbeat = Duration::from_secs(2);
        let mut allow = HttpSettings::default();
        allow.allow = vec!["127.0.0.1".into()];
        let rabbit = |url: &str| RabbitMq::new(url).unwrap();
        let mut builder = Relay::builder(&outbox)
            .settings(settings)
            .transport("http", Http::new(allow).unwrap())
            .transport("amqp", rabbit(&rabbit_url))
            .transport("amqp-login", rabbit(&wrong_login(&rabbit_url)))
            .transport("amqp-vhost", rabbit(&format!("{}-nowhere", rabbit_url)))
            .transport("amqp-port", rabbit("amqp://u:hunter2@127.0.0.1:9"))
            .transport("amqp-dns", rabbit(&format!("amqp://u:hunter2@{NO_HOST}")))
            .transport("kafka", Kafka::new(&*test_url(Kind::Kafka)).unwrap())
            .transport("kafka-port", Kafka::new("127.0.0.1:9").unwrap())
            .transport("kafka-dns", Kafka::new(&*format!("{NO_HOST}:9092")).unwrap())
            .transport("nats", Nats::new(&*nats_url).unwrap())
            .transport("nats-port", Nats::new("nats://u:hunter2@127.0.0.1:9").unwrap())
            .transport("nats-dns", Nats::new(&*format!("nats://{NO_HOST}")).unwrap());
        let again = |route: Route| route.retry(Retry::new(2, Duration::from_millis(20), Duration::from_millis(50)));
        let to = |address: &str| again(Route::to(address));
        let cases: Vec<(&str, Route, usize, Seen)> = vec![
            ("http", again(http.route()), 2, Sent),
            ("amqp", again(amqp.route()), 2, Sent),
            ("kafka", again(kafka.route()), 2, Sent),
            ("nats", again(nats.route()), 2, Sent),
            ("http-404", again(http.nowhere()), 2, Failed("404")),
            ("http-port", to("http://127.0.0.1:9/"), 2, Waiting("can't connect")),
            ("http-dns", to("http://no-such-host.invalid/"), 2, Waiting("can't connect")),
            ("http-address", to("http://169.254.169.254/"), 2, Rejected("169.254.169.254")),
            ("amqp-unbound", to("amqp:amq.topic/nobody.listens"), 2, Failed("nobody.listens")),
            ("amqp-queue", again(amqp.nowhere()), 2, Failed("nowhere")),
            ("amqp-exchange", to("amqp:no.such.exchange/x"), 2, Failed("no.such.exchange")),
            ("amqp-login", to("amqp-login:/q"), 2, Waiting("user")),
            ("amqp-vhost", to("amqp-vhost:/q"), 2, Waiting("nowhere")),
            ("amqp-port", to("amqp-port:/q"), 2, Waiting("127.0.0.1:9")),
            ("amqp-dns", to("amqp-dns:/q"), 2, Waiting(NO_HOST)),
            ("kafka-topic", again(kafka.nowhere()), 2, Failed("nowhere")),
            ("kafka-large", to(&format!("kafka:{large_topic}")), 5_000, Rejected("large")),
            ("kafka-port", to("kafka-port:t"), 2, Waiting("127.0.0.1:9")),
            ("kafka-dns", to("kafka-dns:t"), 2, Waiting(NO_HOST)),
            ("nats-stream", again(nats.nowhere()), 2, Failed("nowhere")),
            ("nats-large", again(nats.route()), 2 << 20, Rejected("too large")),
            ("nats-port", to("nats-port:s"), 2, Waiting("127.0.0.1:9")),
            ("nats-dns", to("nats-dns:s"), 2, Waiting(NO_HOST)),
        ];
        for (name, route, ..) in &cases {
            builder = builder.route(*name, route.clone());
        }
        // Every broker that isn't there doesn't keep the relay from starting.
        let relay = builder.start().await.unwrap();
        for (name, _, size, _) in &cases {
            outbox.publish_alone(Message::to(*name).key("k").payload(vec![b'x'; *size])).await.unwrap();
        }
        let as_expected = |rows: &HashMap<String, MessageRow>, errors: &HashMap<String, String>| {
            let wrong = cases.iter().filter_map(|(name, _, _, seen)| {
                let row = &rows[*name];
                let told = row.last_error.clone().unwrap_or_default();
                let down = errors.get(*name).cloned().unwrap_or_default();
                let right = match seen {
                    Sent => row.status == "SENT",
                    Failed(text) => row.status == "FAILED" && row.attempts == 2 && told.contains(text),
                    Rejected(text) => row.status == "FAILED" && row.attempts == 1 && told.contains(text),
                    Waiting(text) => row.status == "PENDING" && row.attempts == 0 && down.contains(text),
                };
                (!right).then(|| format!("{name}: {} after {} attempts: {told} | {down}", row.status, row.attempts))
            });
            wrong.collect::<Vec<_>>()
        };
        let mut wrong = Vec::new();
        let until = std::time::Instant::now() + SOON * 2;
        while std::time::Instant::now() < until {
            let rows = messages(&**relay.store()).await.into_iter().map(|row| (row.destination.clone(), row)).collect();
            let stats = relay.stats();
            let error = |(name, d): (&String, &posthouse::DestinationStats)| Some((name.clone(), d.last_error.clone()?));
            let errors: HashMap<String, String> = stats.destinations.iter().filter_map(error).collect();
            assert!(errors.values().all(|e| !e.contains("hunter2")), "{errors:?}");
            wrong = as_expected(&rows, &errors);
            if wrong.is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
        // The good ones go on beside all that.
        for name in ["http", "amqp", "kafka", "nats"] {
            outbox.publish_alone(Message::to(name).key("k").payload("again")).await.unwrap();
        }
        wait_for("the good ones", SOON, async || {
            let rows = messages(&**relay.store()).await;
            rows.iter().filter(|row| row.status == "SENT").count() == 8
        })
        .await;
        relay.shutdown(Duration::from_secs(10)).await;
    })
    .await;
}
