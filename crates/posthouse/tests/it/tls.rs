//! TLS to brokers: a message gets through to a server with a certificate of a trusted authority for its name, and to no other.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::jetstream;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use posthouse::testing::deliver;
use posthouse::transport::{Kafka, KafkaSettings, Nats, NatsSettings, Outcome, RabbitMq, RabbitMqSettings};
use posthouse::{Envelope, Ordering, Route};
use tokio::net::TcpStream;

use crate::kafka::{client, create_topic, records};
use crate::support::broker::{Broker, free_ports};
use crate::support::certificates::Certificates;
use crate::support::{SOON, bounded, wait_for};

/// The deadline of a delivery. Where there is no connection, Kafka's producer tries until then.
const PATIENCE: Duration = Duration::from_secs(6);

fn message() -> Envelope {
    Envelope::for_test("orders", "{}")
}

/// Nothing was sent, and the words say why.
#[track_caller]
fn refused(outcome: &Outcome, words: &[&str]) {
    let Outcome::Unavailable(failure) = outcome else { panic!("expected Unavailable, got {outcome:?}") };
    println!("{}", failure.error);
    for word in words {
        assert!(failure.error.contains(word), "{word:?} isn't in: {}", failure.error);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq() {
    bounded(async {
        let certificates = Certificates::new();
        let port = free_ports(1);
        let broker = Broker::rabbitmq_with(&format!(
            "listeners.ssl.local = 127.0.0.1:{port}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\nssl_options.keyfile = {}",
            certificates.authority().display(),
            certificates.server().display(),
            certificates.server_key().display()
        ))
        .await;
        // It opens the listener that is asked whether it is ready, then this one.
        wait_for("the TLS listener", SOON, async || TcpStream::connect(("127.0.0.1", port)).await.is_ok()).await;
        let plain = Connection::connect(broker.url(), ConnectionProperties::default()).await.expect("RabbitMQ");
        let channel = plain.create_channel().await.expect("channel");
        let (options, arguments) = (QueueDeclareOptions::default(), FieldTable::default());
        channel.queue_declare("tls".into(), options, arguments).await.expect("queue");

        let send = async |scheme: &str, address: &str, ca_file: Option<PathBuf>| {
            let url = format!("{scheme}://posthouse:posthouse@{address}/posthouse");
            let mut settings = RabbitMqSettings::from(url.as_str());
            settings.ca_file = ca_file;
            let transport = RabbitMq::new(settings).expect("settings");
            let message = message();
            let id = message.message_id.to_string();
            (id, deliver(&transport, message, Route::to("amqp:/tls"), PATIENCE).await)
        };
        // Two names of one listener.
        let (named, misnamed) = (format!("127.0.0.1:{port}"), format!("localhost:{port}"));
        let (_, outcome) = send("amqps", &named, None).await;
        refused(&outcome, &["isn't trusted", "UnknownIssuer", "ca_file"]);
        let (_, outcome) = send("amqps", &named, Some(certificates.stranger())).await;
        refused(&outcome, &["isn't trusted", "UnknownIssuer", "ca_file"]);
        let (_, outcome) = send("amqps", &misnamed, Some(certificates.authority())).await;
        refused(&outcome, &["is for another name", "localhost"]);
        // Only TLS gets through there, and elsewhere it doesn't.
        let (_, outcome) = send("amqp", &named, None).await;
        refused(&outcome, &["not speak amqp"]);
        let (_, outcome) = send("amqps", &format!("127.0.0.1:{}", broker.port()), Some(certificates.authority())).await;
        refused(&outcome, &["speaks no TLS"]);
        let (sent, outcome) = send("amqps", &named, Some(certificates.authority())).await;
        assert_eq!(outcome, Outcome::Delivered);

        let get = async || channel.basic_get("tls".into(), BasicGetOptions { no_ack: true }).await.expect("get");
        let received = get().await.expect("a message");
        assert_eq!(received.properties.message_id().as_ref().map(|id| id.as_str()), Some(sent.as_str()));
        assert!(get().await.is_none());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka() {
    bounded(async {
        let certificates = Certificates::new();
        let broker = Broker::kafka_with(&format!(
            "listener.security.protocol.map=CLIENT:SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT\nssl.keystore.type=PEM\nssl.keystore.location={}",
            certificates.server_key_and_certificate().display()
        ))
        .await;
        let inside = client(&format!("127.0.0.1:{}", broker.port() + 1), &[]);
        create_topic(&inside, "tls", 1, &[]).await;

        let send = async |protocol: &str, host: &str, ca_file: Option<PathBuf>, route: Route| {
            let mut settings = KafkaSettings::from(format!("{host}:{}", broker.port()).as_str());
            settings.properties.insert("security.protocol".into(), protocol.into());
            if let Some(file) = ca_file {
                settings.properties.insert("ssl.ca.location".into(), file.display().to_string());
            }
            let transport = Kafka::new(settings).expect("settings");
            deliver(&transport, message(), route, PATIENCE).await
        };
        let route = || Route::to("kafka:tls");
        // Each of these takes as long as it may.
        let (unknown, stranger, misnamed, plain) = tokio::join!(
            send("ssl", "127.0.0.1", None, route()),
            send("ssl", "127.0.0.1", Some(certificates.stranger()), route().ordering(Ordering::Pipelined)),
            send("ssl", "localhost", Some(certificates.authority()), route()),
            send("plaintext", "127.0.0.1", None, route()),
        );
        refused(&unknown, &["isn't trusted", "ssl.ca.location"]);
        refused(&stranger, &["isn't trusted", "ssl.ca.location"]);
        refused(&misnamed, &["is for another name"]);
        // Nobody gets in there without TLS.
        refused(&plain, &["security.protocol"]);
        for route in [route(), route().ordering(Ordering::Pipelined)] {
            assert_eq!(send("ssl", "127.0.0.1", Some(certificates.authority()), route).await, Outcome::Delivered);
        }
        assert_eq!(records(inside, "tls").await.len(), 2);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats() {
    bounded(async {
        let certificates = Certificates::new();
        let file = |path: PathBuf| path.display().to_string();
        let (certificate, key) = (file(certificates.server()), file(certificates.server_key()));
        let broker = Broker::nats_with(&format!("tls {{ cert_file: {certificate:?}, key_file: {key:?} }}")).await;
        let options = async_nats::ConnectOptions::new().add_root_certificates(certificates.authority());
        let jetstream = jetstream::new(options.connect(broker.url()).await.expect("connect"));
        let config = jetstream::stream::Config { name: "tls".into(), subjects: vec!["tls".into()], ..Default::default() };
        let mut stream = jetstream.create_stream(config).await.expect("stream");

        let send = async |scheme: &str, host: &str, ca_file: Option<PathBuf>| {
            let mut settings = NatsSettings::from(format!("{scheme}://{host}:{}", broker.port()).as_str());
            settings.ca_file = ca_file;
            let transport = Nats::new(settings).expect("settings");
            deliver(&transport, message(), Route::to("nats:tls"), PATIENCE).await
        };
        // The server asks for TLS also where the URL doesn't.
        for scheme in ["tls", "nats"] {
            refused(&send(scheme, "127.0.0.1", None).await, &["isn't trusted", "UnknownIssuer", "ca_file"]);
            refused(
                &send(scheme, "127.0.0.1", Some(certificates.stranger())).await,
                &["isn't trusted", "UnknownIssuer", "ca_file"],
            );
            refused(&send(scheme, "localhost", Some(certificates.authority())).await, &["is for another name", "localhost"]);
            assert_eq!(send(scheme, "127.0.0.1", Some(certificates.authority())).await, Outcome::Delivered);
        }
        assert_eq!(stream.info().await.expect("info").state.messages, 2);
        refused(&send("tls", "127.0.0.1", Some("/nowhere/ca.pem".into())).await, &["ca_file"]);
    })
    .await;
}

/// Whoever says what to trust wants TLS, also where a nats:// url would let the server choose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_without_tls() {
    bounded(async {
        let certificates = Certificates::new();
        let broker = Broker::nats().await;
        let mut settings = NatsSettings::from(broker.url());
        settings.ca_file = Some(certificates.authority());
        let transport = Nats::new(settings).expect("settings");
        refused(&deliver(&transport, message(), Route::to("nats:tls"), PATIENCE).await, &["speaks no TLS"]);
    })
    .await;
}
