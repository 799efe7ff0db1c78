//! What librdkafka is told for a consumer.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, DefaultConsumerContext};

use crate::transport::KafkaSettings;
use crate::transport::kafka::settings::explain;

/// Where librdkafka's defaults suit this consumer less. Each can be set otherwise.
const DEFAULTS: &[(&str, &str)] = &[
    ("client.id", "posthouse"),
    // A group that is new begins with the oldest record, or what was sent before its first start would be lost (latest).
    ("auto.offset.reset", "earliest"),
    ("isolation.level", "read_committed"),
    // A member that joins or leaves disturbs only the partitions that move (range,roundrobin: all of them).
    ("partition.assignment.strategy", "cooperative-sticky"),
    // How soon a topic is found that is made later, or partitions that are added (5 min).
    ("topic.metadata.refresh.interval.ms", "5000"),
    // Read ahead per partition, beyond what is taken: 1 000 records or 4 MiB, and looked at again at once when there is room
    // (100 000, 64 MiB, 1 s).
    ("queued.min.messages", "1000"),
    ("queued.max.messages.kbytes", "4096"),
    ("fetch.queue.backoff.ms", "10"),
    // A broker that is back is found within a second or so (10 s).
    ("reconnect.backoff.max.ms", "1000"),
    // A connection whose other end is gone is noticed (60 s, 30 s, false).
    ("socket.timeout.ms", "10000"),
    ("socket.connection.setup.timeout.ms", "5000"),
    ("socket.keepalive.enable", "true"),
];

/// Why a property can't be set.
fn refused(name: &str, _value: &str) -> Option<&'static str> {
    Some(match name {
        "enable.auto.commit" | "auto.commit.enable" | "enable.auto.offset.store" | "offset.store.method" => {
            "can't be set: an offset is committed when everything below it is finished"
        }
        "group.id" => "can't be set here: it is the group that the consumer is made with",
        "bootstrap.servers" | "metadata.broker.list" => "can't be set here: it is the setting `brokers`",
        "enable.partition.eof" => "can't be set: nothing here asks for the end of a partition",
        "rebalance_cb" | "offset_commit_cb" | "consume_cb" | "error_cb" | "log_cb" | "stats_cb" | "opaque" | "log.queue" => {
            "can't be set: it belongs to the connection between librdkafka and this program"
        }
        _ => return None,
    })
}

/// What is wrong with these settings for a consumer, each with the field's path.
pub(super) fn problems(kafka: &KafkaSettings, group: &str) -> Vec<(String, String)> {
    let mut out = kafka.problems_alone(refused);
    if out.is_empty() {
        // One that knows no broker, so that nothing is connected to.
        let mut config = config(kafka, group);
        config.remove("bootstrap.servers");
        if let Err(e) = config.create::<BaseConsumer<DefaultConsumerContext>>() {
            out.push(("properties".into(), explain(&e)));
        }
    }
    out
}

pub(super) fn config(kafka: &KafkaSettings, group: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    // What it logs is handed to `tracing`; below warnings it says nothing that people here could use.
    config.set_log_level(RDKafkaLogLevel::Warning);
    for (name, value) in DEFAULTS {
        config.set(*name, *value);
    }
    for (name, value) in &kafka.properties {
        config.set(name.trim(), value);
    }
    // There the brokers decide it, and librdkafka refuses it.
    if config.get("group.protocol").is_some_and(|protocol| protocol.trim().eq_ignore_ascii_case("consumer"))
        && !kafka.properties.keys().any(|name| name.trim() == "partition.assignment.strategy")
    {
        config.remove("partition.assignment.strategy");
    }
    config.set("bootstrap.servers", kafka.brokers.trim());
    config.set("group.id", group);
    config.set("enable.auto.commit", "false");
    config.set("enable.auto.offset.store", "false");
    config
}

/// The longest time between two polls, after which the group takes a consumer for dead.
pub(super) fn longest_pause(config: &ClientConfig) -> Duration {
    let ms = config.get("max.poll.interval.ms").and_then(|ms| ms.trim().parse().ok()).unwrap_or(300_000);
    Duration::from_millis(ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(properties: &[(&str, &str)]) -> KafkaSettings {
        let mut settings = KafkaSettings::from("a:1");
        settings.properties = properties.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        settings
    }

    #[test]
    fn what_the_guarantee_rests_on_cannot_be_set() {
        for name in ["enable.auto.commit", "auto.commit.enable", "enable.auto.offset.store", "group.id", "bootstrap.servers"] {
            let found = problems(&settings(&[(name, "true")]), "g");
            assert_eq!(found.len(), 1, "{name}: {found:?}");
            assert!(found[0].0.contains(name) && found[0].1.contains("can't be set"), "{found:?}");
        }
        let config = config(&settings(&[]), "g");
        assert_eq!((config.get("enable.auto.commit"), config.get("group.id")), (Some("false"), Some("g")));
    }

    #[test]
    fn other_properties_of_a_consumer_can_be_set_and_are_checked() {
        for good in [
            &[("group.instance.id", "a"), ("session.timeout.ms", "6000"), ("max.poll.interval.ms", "6000")][..],
            &[("auto.offset.reset", "latest"), ("partition.assignment.strategy", "range")],
            &[("group.protocol", "consumer")],
            // The same settings as for sending.
            &[("compression.type", "lz4"), ("security.protocol", "plaintext")],
        ] {
            assert_eq!(problems(&settings(good), "g"), [], "{good:?}");
        }
        // Good alone, bad together.
        let found = problems(&settings(&[("session.timeout.ms", "60000"), ("max.poll.interval.ms", "6000")]), "g");
        assert_eq!(found.len(), 1, "{found:?}");
        let found = problems(&settings(&[("sasl.pasword", "s3cret")]), "g");
        assert!(found.len() == 1 && !format!("{found:?}").contains("s3cret"), "{found:?}");
    }

    #[test]
    fn the_longest_pause_is_what_the_property_says() {
        assert_eq!(longest_pause(&config(&settings(&[]), "g")), Duration::from_secs(300));
        assert_eq!(longest_pause(&config(&settings(&[("max.poll.interval.ms", "6000")]), "g")), Duration::from_secs(6));
    }
}
