//! Who we are and what we may do, asked of a broker that cares.

use std::time::Duration;

use posthouse::testing::deliver;
use posthouse::transport::{Kafka, Outcome};
use rdkafka::ClientConfig;

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

/// B3: not being allowed to produce at all is a fatal error to the producer. The permission comes, and it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_with_a_fatal_error_is_replaced() {
    bounded(async {
        let broker = Broker::kafka_with(CONF).await;
        create_topic(&admin(&broker), "theirs", 1, &[]).await;
        let kafka = kafka(&broker, "nobody", "nobodypw");
        for route in [to, pipelined] {
            for _ in 0..3 {
                let error = retry(deliver(&kafka, message(Some("k"), "x"), route("theirs"), PATIENCE).await).error;
                assert!(error.contains("doesn't let us"), "{error}");
            }
        }
    })
    .await;
}
