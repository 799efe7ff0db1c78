//! Who we are and what we may do, asked of a broker that cares.

use std::time::{Duration, Instant};

use posthouse::Route;
use posthouse::testing::deliver;
use posthouse::transport::{Kafka, Outcome};
use rdkafka::ClientConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{PATIENCE, client, create_topic, message, pipelined, retry, settings, to, unavailable};
use crate::support::bounded;
use crate::support::broker::Broker;

/// `admin` may do everything, `writer` may write to topics that begin with "mine", `nobody` may do nothing.
const CONF: &str = r#"
listener.security.protocol.map=CLIENT:SASL_PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.client.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_admin="adminpw" user_writer="writerpw" user_nobody="nobodypw";
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:admin;User:ANONYMOUS
"#;

fn login<'a>(user: &'a str, password: &'a str) -> [(&'static str, &'a str); 4] {
    [("security.protocol", "sasl_plaintext"), ("sasl.mechanisms", "PLAIN"), ("sasl.username", user), ("sasl.password", password)]
}

fn kafka(broker: &Broker, user: &str, password: &str) -> Kafka {
    Kafka::new(settings(broker.url(), &login(user, password))).unwrap()
}

fn admin(broker: &Broker) -> ClientConfig {
    client(broker.url(), &login("admin", "adminpw"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_and_missing_permissions_say_so() {
    bounded(async {
        let broker = Broker::kafka_with(CONF).await;
        create_topic(&admin(&broker), "theirs", 1, &[]).await;

        for route in [to, pipelined] {
            let send = |user: &'static str, password: &'static str| {
                let kafka = kafka(&broker, user, password);
                async move { deliver(&kafka, message(Some("k"), "x"), route("theirs"), Duration::from_secs(6)).await }
            };
            assert_eq!(send("admin", "adminpw").await, Outcome::Delivered);

            let error = unavailable(send("writer", "wr0ng").await).error;
            println!("{error}");
            assert!(error.to_lowercase().contains("authentication") && error.contains(broker.url()), "{error}");
            assert!(!error.contains("wr0ng"), "{error}");

            let error = retry(send("nobody", "nobodypw").await).error;
            println!("{error}");
            assert!(error.contains("doesn't let us"), "{error}");
        }
    })
    .await;
}

/// Lets a user do something with a topic: CreateAcls of the Kafka protocol, version 1, on the open listener.
async fn allow(broker: &Broker, user: &str, topic: &str, operation: u8) {
    const CREATE_ACLS: [u8; 4] = [0, 30, 0, 1];
    const TOPIC: u8 = 2;
    const LITERAL: u8 = 3;
    const ALLOW: u8 = 3;
    let text = |text: &str| [&(text.len() as i16).to_be_bytes(), text.as_bytes()].concat();
    let mut request = [&CREATE_ACLS[..], &[0, 0, 0, 1], &text("test"), &[0, 0, 0, 1, TOPIC], &text(topic), &[LITERAL]].concat();
    request.extend([text(&format!("User:{user}")), text("*"), vec![operation, ALLOW]].concat());
    let mut stream = TcpStream::connect(("127.0.0.1", broker.port() + 1)).await.unwrap();
    stream.write_all(&[&(request.len() as i32).to_be_bytes(), &request[..]].concat()).await.unwrap();
    let mut answer = vec![0; stream.read_i32().await.unwrap() as usize];
    stream.read_exact(&mut answer).await.unwrap();
    // Correlation id, throttle time, one result: error code, message.
    assert_eq!(answer[8..14], [0, 0, 0, 1, 0, 0], "{answer:?}");
}

const WRITE: u8 = 4;
const DESCRIBE: u8 = 8;

/// B3: not being allowed to produce at all is a fatal error to the producer, which is replaced each time. The permission
/// comes, and it goes on.
async fn fatal(route: fn(&str) -> Route) {
    let broker = Broker::kafka_with(CONF).await;
    create_topic(&admin(&broker), "theirs", 1, &[]).await;
    allow(&broker, "nobody", "theirs", DESCRIBE).await;
    let kafka = kafka(&broker, "nobody", "nobodypw");
    for _ in 0..3 {
        let error = retry(deliver(&kafka, message(Some("k"), "x"), route("theirs"), PATIENCE).await).error;
        assert!(error.contains("IDEMPOTENT_WRITE"), "{error}");
    }
    allow(&broker, "nobody", "theirs", WRITE).await;
    let asked = Instant::now();
    // The broker may take a moment to hear of it.
    while deliver(&kafka, message(Some("k"), "x"), route("theirs"), PATIENCE).await != Outcome::Delivered {
        assert!(asked.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_with_a_fatal_error_is_replaced() {
    bounded(fatal(to)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_with_a_fatal_error_is_replaced_pipelined() {
    bounded(fatal(pipelined)).await;
}
