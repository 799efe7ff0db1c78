//! `[transports.NAME]` with `kind = "kafka"`.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, DefaultProducerContext};
use serde::{Deserialize, Serialize};

/// How to reach Kafka: settings of the [`Kafka`](super::Kafka) transport, and of the consumer.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct KafkaSettings {
    /// Brokers to ask first: `host:9092,host2:9092`.
    pub brokers: String,
    /// Any librdkafka property (`security.protocol`, `sasl.username`, `compression.type`, `session.timeout.ms`, …); sending and
    /// consuming each leave out what is for the other. Values are never shown. Those that the guarantee rests on (`acks`,
    /// `enable.idempotence`, `enable.auto.commit`, …) can't be set.
    pub properties: BTreeMap<String, String>,
}

impl From<&str> for KafkaSettings {
    fn from(brokers: &str) -> Self {
        Self { brokers: brokers.into(), ..Self::default() }
    }
}

impl fmt::Debug for KafkaSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be passwords.
        f.debug_struct("KafkaSettings").field("brokers", &self.brokers).field("properties", &self.properties.keys()).finish()
    }
}

impl KafkaSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = self.problems_alone(refused);
        if out.is_empty()
            && let Err(e) = self.try_out()
        {
            out.push(("properties".into(), explain(&e)));
        }
        out
    }

    /// What is wrong with the brokers, and with each property for itself. `refused` says why one can't be set.
    pub(crate) fn problems_alone(&self, refused: impl Fn(&str, &str) -> Option<&'static str>) -> Vec<(String, String)> {
        let mut out = Vec::new();
        if self.brokers.trim().is_empty() {
            out.push(("brokers".into(), "is empty, must name at least one broker: \"host:9092\"".into()));
        } else {
            for broker in self.brokers.split(',').map(str::trim).filter(|b| !is_broker(b)) {
                // A login has no place here, and isn't shown if it is there.
                let broker = broker.rsplit_once('@').map_or(broker, |(_, host)| host);
                out.push(("brokers".into(), format!("{broker:?} must be of the form host:port, without a login")));
            }
        }
        for (name, value) in &self.properties {
            if let Some(why) = refused(name.trim(), value) {
                out.push((format!("properties.{:?}", name.trim()), why.into()));
            }
        }
        // librdkafka stops at the first bad one, so it is asked about each alone, and about all together when each is good.
        let alone = |name: &str, value: &str| ClientConfig::new().set(name, value).create_native_config().map(drop);
        for (name, value) in &self.properties {
            if refused(name.trim(), value).is_none()
                && let Err(e) = alone(name.trim(), value)
            {
                out.push((format!("properties.{:?}", name.trim()), explain(&e)));
            }
        }
        out
    }

    /// Makes a producer that knows no broker, so that nothing is connected to: librdkafka then checks how the properties
    /// relate and whether files such as certificates can be read.
    fn try_out(&self) -> Result<(), KafkaError> {
        let mut config = self.config(Lane::Ordinary, SHORTEST_TIMEOUT);
        config.remove("bootstrap.servers");
        config.create::<BaseProducer<DefaultProducerContext>>().map(drop)
    }

    /// What librdkafka is told for one of the producers. Records that aren't confirmed within `timeout` are given up.
    pub(super) fn config(&self, lane: Lane, timeout: Duration) -> ClientConfig {
        let mut config = ClientConfig::new();
        // What it logs is handed to `tracing`; below warnings it says nothing that people here could use.
        config.set_log_level(RDKafkaLogLevel::Warning);
        for (name, value) in DEFAULTS {
            config.set(*name, *value);
        }
        if lane == Lane::Pipelined && !self.sets("batch.size") {
            config.set("batch.size", PIPELINED_BATCH);
        }
        for (name, value) in &self.properties {
            // An alias of a default replaces it: librdkafka would take the one that comes last, in no particular order.
            if name.trim() == "queue.buffering.max.ms" {
                config.remove("linger.ms");
            }
            config.set(name.trim(), value);
        }
        config.set("bootstrap.servers", self.brokers.trim());
        config.set("acks", "all");
        config.set("enable.idempotence", "true");
        // The most with which a broker recognises repeated and missing batches.
        config.set("max.in.flight.requests.per.connection", "5");
        match lane {
            Lane::Ordinary => {}
            Lane::Alone => {
                config.set("batch.num.messages", "1");
            }
            Lane::Pipelined => {
                config.set("enable.gapless.guarantee", "true");
            }
        }
        let timeout = match lane {
            // librdkafka sends on behind a record whose time is up, so here none is ever up; see `lane`.
            Lane::Pipelined => Duration::ZERO,
            Lane::Ordinary | Lane::Alone => timeout.max(SHORTEST_TIMEOUT),
        };
        config.set("message.timeout.ms", timeout.as_millis().min(i32::MAX as u128).to_string());
        config
    }

    fn sets(&self, name: &str) -> bool {
        self.properties.keys().any(|n| n.trim() == name)
    }
}

/// The producers of one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// For routes whose messages wait for each other in the relay, or don't have to.
    Ordinary,
    /// One record per batch: for records of a batch that was refused as a whole.
    Alone,
    /// For routes with `ordering = "pipelined"`.
    Pipelined,
}

/// `message.timeout.ms` is at least this, and `linger.ms` must be less. (Answers don't wait for it: see `lane`.)
const SHORTEST_TIMEOUT: Duration = Duration::from_secs(1);

/// A refused batch of a pipelined route is tried again record by record, so it is kept short.
const PIPELINED_BATCH: &str = "65536";

/// Where librdkafka's defaults suit a relay less. Each can be set otherwise.
const DEFAULTS: &[(&str, &str)] = &[
    ("client.id", "posthouse"),
    // The relay hands over whole batches; longer waiting only adds to the latency (the default is 5).
    ("linger.ms", "1"),
    // The partition of a key is the one that the Java clients choose (the default is CRC-32).
    ("partitioner", "murmur2_random"),
    // How long a topic may be unknown before its records are given up (30 s): less than relay.send_timeout, which would
    // otherwise end the wait without saying why.
    ("topic.metadata.propagation.max.ms", "3000"),
    // A broker that is back is found within a second or so (10 s).
    ("reconnect.backoff.max.ms", "1000"),
    // A connection whose other end is gone is noticed (60 s, 30 s, false).
    ("socket.timeout.ms", "10000"),
    ("socket.connection.setup.timeout.ms", "5000"),
    ("socket.keepalive.enable", "true"),
];

/// Why a property can't be set.
fn refused(name: &str, value: &str) -> Option<&'static str> {
    Some(match name {
        "acks" | "request.required.acks" => "can't be set: a message counts as delivered when all in-sync replicas have it",
        "enable.idempotence" => "can't be set: without it a retry inside the client could change the order of a key",
        "enable.gapless.guarantee" => "can't be set: it is on for routes with ordering = \"pipelined\", and only there",
        "max.in.flight" | "max.in.flight.requests.per.connection" => {
            "can't be set: with more than 5, brokers don't recognise repeated and missing batches"
        }
        "transactional.id" | "transaction.timeout.ms" => {
            "can't be set: records are not sent in transactions; receivers recognise duplicates by posthouse-message-id"
        }
        "message.timeout.ms" | "delivery.timeout.ms" => "can't be set: it follows relay.send_timeout, which can",
        "bootstrap.servers" | "metadata.broker.list" => "can't be set here: it is the setting `brokers`",
        "delivery.report.only.error" => "can't be set: a message counts as delivered when its report says so",
        "dr_cb" | "dr_msg_cb" | "error_cb" | "log_cb" | "stats_cb" | "opaque" | "log.queue" | "partitioner_cb"
        | "msg_order_cmp" => "can't be set: it belongs to the connection between librdkafka and this program",
        "queuing.strategy" => "can't be set: the order of a key rests on it (fifo)",
        "partitioner" if value.trim() == "random" => {
            "can't be \"random\": only messages of one partition keep their order, so a key needs a partition of its own"
        }
        _ => return None,
    })
}

/// An error of librdkafka about the properties, without their values, which may be secrets.
pub(crate) fn explain(error: &KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, why, _, value) => {
            // Its texts quote the value in double quotes.
            let why = if value.is_empty() { why.clone() } else { why.replace(value.as_str(), "…") };
            format!("librdkafka doesn't take it: {why}")
        }
        other => format!("librdkafka doesn't take them: {other}"),
    }
}

fn is_broker(text: &str) -> bool {
    // librdkafka also takes `protocol://host:port`.
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let Some((host, port)) = rest.rsplit_once(':') else { return false };
    let host_is_fine = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains(|c: char| c.is_whitespace() || c.is_control() || "/:@[]".contains(c)),
    };
    host_is_fine && port.parse::<u16>().is_ok_and(|p| p > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(brokers: &str, properties: &[(&str, &str)]) -> Vec<(String, String)> {
        let properties = properties.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        KafkaSettings { brokers: brokers.into(), properties }.problems()
    }

    #[test]
    fn brokers_are_a_list_of_host_and_port() {
        for good in ["localhost:9092", "a:1, b.example.com:65535", "[::1]:9092", "10.0.0.1:9092", "SSL://kafka:9093"] {
            assert_eq!(problems(good, &[]), [], "{good}");
        }
        for bad in
            ["", " ", "localhost", "localhost:", ":9092", "localhost:0", "a:65536", "a:9092,", "a b:9092", "[x]:9092", "::1:9092"]
        {
            let found = problems(bad, &[]);
            assert_eq!(found.len(), 1, "{bad}: {found:?}");
            assert_eq!(found[0].0, "brokers");
        }
    }

    #[test]
    fn what_the_guarantee_rests_on_cannot_be_set() {
        for name in [
            "acks",
            "request.required.acks",
            "enable.idempotence",
            "enable.gapless.guarantee",
            "max.in.flight",
            "max.in.flight.requests.per.connection",
            "transactional.id",
            "message.timeout.ms",
            "delivery.timeout.ms",
            "bootstrap.servers",
            "metadata.broker.list",
            "delivery.report.only.error",
            "dr_cb",
            "dr_msg_cb",
            "queuing.strategy",
        ] {
            let found = problems("a:1", &[(name, "1")]);
            assert_eq!(found.len(), 1, "{name}: {found:?}");
            assert!(found[0].0.contains(name) && found[0].1.contains("can't be set"), "{found:?}");
        }
        assert_eq!(problems("a:1", &[("partitioner", "random")]).len(), 1);
        assert_eq!(problems("a:1", &[("partitioner", "consistent"), ("linger.ms", "20"), ("compression.type", "lz4")]), []);
        assert_eq!(problems("a:1", &[("queue.buffering.max.ms", "20")]), []);
    }

    #[test]
    fn bad_properties_are_named_and_their_values_never_shown() {
        let found = problems("a:1", &[("sasl.pasword", "s3cret"), ("security.protocol", "hunter2"), ("linger.ms", "t0ken")]);
        assert_eq!(
            found.iter().map(|p| p.0.as_str()).collect::<Vec<_>>(),
            ["properties.\"linger.ms\"", "properties.\"sasl.pasword\"", "properties.\"security.protocol\""]
        );
        let found = format!("{found:?}");
        for secret in ["s3cret", "hunter2", "t0ken"] {
            assert!(!found.contains(secret), "{found}");
        }
        // Good alone, bad together.
        let found = problems("a:1", &[("linger.ms", "100000")]);
        assert_eq!(found.len(), 1, "{found:?}");
        let found = problems("a:1", &[("security.protocol", "ssl"), ("ssl.ca.location", "/nowhere/ca.pem")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, "properties");
    }
}
