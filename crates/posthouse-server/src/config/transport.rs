//! `[transports.NAME]`: one type for all kinds of transports.

use std::time::Duration;

use posthouse::transport::{Http, HttpSettings, Transport};
#[cfg(feature = "kafka")]
use posthouse::transport::{Kafka, KafkaSettings};
#[cfg(feature = "nats")]
use posthouse::transport::{Nats, NatsSettings};
#[cfg(feature = "rabbitmq")]
use posthouse::transport::{RabbitMq, RabbitMqSettings};
use posthouse::{Error, RelayBuilder};
use serde_json::{Value, json};
use toml::Table;

use super::keys::{self, Keys};
#[cfg(feature = "kafka")]
use super::problem::join;
use super::shape::{Walk, suggest};
#[cfg(feature = "kafka")]
use super::show::hidden;
use super::typed;

/// What `kind` may be.
pub(super) const KINDS: [&str; 4] = ["http", "rabbitmq", "kafka", "nats"];

/// A kind that this program has: what its table may hold, and what it must.
pub(super) struct Kind {
    name: &'static str,
    pub(super) keys: Keys,
    /// The key without which there is nowhere to send to, and an example of it.
    pub(super) needed: Option<(&'static str, &'static str)>,
}

impl Kind {
    pub(super) fn name(&self) -> &'static str {
        self.name
    }
}

/// The kind of this name; the reason and the fix when there is none.
pub(super) fn kind(name: &str) -> Result<Kind, (String, String)> {
    let (name, built, keys, needed) = match name {
        "http" => ("http", true, keys::HTTP, None),
        "rabbitmq" => {
            let example = "url = \"amqp://user:password@host:5672/vhost\"";
            ("rabbitmq", cfg!(feature = "rabbitmq"), keys::RABBITMQ, Some(("url", example)))
        }
        "kafka" => ("kafka", cfg!(feature = "kafka"), keys::KAFKA, Some(("brokers", "brokers = \"host:9092,host2:9092\""))),
        "nats" => ("nats", cfg!(feature = "nats"), keys::NATS, Some(("url", "url = \"nats://user:password@host:4222\""))),
        "local" => {
            return Err((
                "local handlers exist only inside a service with an embedded relay".into(),
                "remove this table; the relay in that service needs none".into(),
            ));
        }
        other => {
            let meant = if other == "amqp" { Some("rabbitmq") } else { suggest(other, KINDS) };
            let meant = meant.map(|m| format!("; did you mean {m:?}?")).unwrap_or_default();
            return Err((format!("no such kind of transport{meant}"), format!("the kinds are {}", KINDS.join(", "))));
        }
    };
    if built {
        Ok(Kind { name, keys, needed })
    } else {
        Err((
            format!("this posthouse was built without {name}"),
            format!("use one that was built with it (cargo feature {name:?}), or remove this transport and its routes"),
        ))
    }
}

/// The kind that a transport without one is likely to be, from its name.
pub(super) fn likely_kind(name: &str) -> &'static str {
    match name {
        "amqp" | "amqps" => "rabbitmq",
        _ => suggest(name, KINDS).unwrap_or("http"),
    }
}

/// Settings of one transport, of whichever kind.
#[derive(Debug, Clone)]
pub(crate) enum TransportConfig {
    Http(HttpSettings),
    #[cfg(feature = "rabbitmq")]
    RabbitMq(RabbitMqSettings),
    #[cfg(feature = "kafka")]
    Kafka(KafkaSettings),
    #[cfg(feature = "nats")]
    Nats(NatsSettings),
}

impl TransportConfig {
    /// The settings in a table whose keys have been checked.
    pub(super) fn of(kind: &Kind, walk: &mut Walk<'_>, at: &str, table: Table) -> Option<Self> {
        let value = toml::Value::Table(table);
        match kind.name {
            #[cfg(feature = "rabbitmq")]
            "rabbitmq" => typed(walk, at, value).map(Self::RabbitMq),
            #[cfg(feature = "kafka")]
            "kafka" => typed(walk, at, value).map(Self::Kafka),
            #[cfg(feature = "nats")]
            "nats" => typed(walk, at, value).map(Self::Nats),
            _ => typed(walk, at, value).map(Self::Http),
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Http(_) => "http",
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(_) => "rabbitmq",
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => "kafka",
            #[cfg(feature = "nats")]
            Self::Nats(_) => "nats",
        }
    }

    /// Whether messages go through a broker.
    pub(crate) fn is_broker(&self) -> bool {
        !matches!(self, Self::Http(_))
    }

    /// What is wrong with the settings, each with the field's path.
    pub(super) fn problems(&self) -> Vec<(String, String)> {
        match self {
            Self::Http(settings) => settings.problems(),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => settings.problems(),
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => settings.problems().into_iter().map(|(field, why)| (quoted(&field), why)).collect(),
            #[cfg(feature = "nats")]
            Self::Nats(settings) => settings.problems(),
        }
    }

    /// How long a connection may take, where that is a setting.
    pub(super) fn connect_timeout(&self) -> Option<Duration> {
        match self {
            Self::Http(settings) => Some(settings.connect_timeout),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => Some(settings.connect_timeout),
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => None,
            #[cfg(feature = "nats")]
            Self::Nats(settings) => Some(settings.connect_timeout),
        }
    }

    /// The same, to set it.
    pub(super) fn connect_timeout_mut(&mut self) -> Option<&mut Duration> {
        match self {
            Self::Http(settings) => Some(&mut settings.connect_timeout),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => Some(&mut settings.connect_timeout),
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => None,
            #[cfg(feature = "nats")]
            Self::Nats(settings) => Some(&mut settings.connect_timeout),
        }
    }

    /// The transport. Connects to nothing.
    pub(crate) fn build(&self) -> Result<Box<dyn Transport>, Error> {
        Ok(match self.clone() {
            Self::Http(settings) => Box::new(Http::new(settings)?),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => Box::new(RabbitMq::new(settings)?),
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => Box::new(Kafka::new(settings)?),
            #[cfg(feature = "nats")]
            Self::Nats(settings) => Box::new(Nats::new(settings)?),
        })
    }

    /// Gives a relay a transport of this kind.
    pub(crate) fn add_to(&self, name: &str, relay: RelayBuilder) -> Result<RelayBuilder, Error> {
        Ok(match self.clone() {
            Self::Http(settings) => relay.transport(name, Http::new(settings)?),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => relay.transport(name, RabbitMq::new(settings)?),
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => relay.transport(name, Kafka::new(settings)?),
            #[cfg(feature = "nats")]
            Self::Nats(settings) => relay.transport(name, Nats::new(settings)?),
        })
    }

    /// The settings without secrets.
    pub(super) fn shown(&self) -> Value {
        let mut shown = match self {
            Self::Http(settings) => json!(settings),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => {
                let mut shown = json!(settings);
                shown["url"] = super::redact::url(&settings.url).into();
                shown
            }
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => {
                json!({ "brokers": super::redact::servers(&settings.brokers), "properties": hidden(settings.properties.keys()) })
            }
            #[cfg(feature = "nats")]
            Self::Nats(settings) => {
                let mut shown = json!(settings);
                shown["url"] = super::redact::servers(&settings.url).into();
                shown
            }
        };
        shown["kind"] = self.kind().into();
        shown
    }

    /// How addresses of this transport look, for people.
    pub(crate) fn addresses(&self, name: &str) -> String {
        match self {
            Self::Http(_) if name == "http" => "http://… https://…".into(),
            Self::Http(_) => format!("{name}:https://…"),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(_) => format!("{name}:exchange/routing.key {name}:/queue"),
            #[cfg(feature = "kafka")]
            Self::Kafka(_) => format!("{name}:topic"),
            #[cfg(feature = "nats")]
            Self::Nats(_) => format!("{name}:subject"),
        }
    }

    /// The servers that it connects to first, as `host:port`; none for HTTP, which goes where addresses lead.
    pub(crate) fn servers(&self) -> Vec<String> {
        match self {
            Self::Http(_) => Vec::new(),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => server(&settings.url, 5672, 5671).into_iter().collect(),
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => settings.brokers.split(',').filter_map(|one| server(one, 9092, 9092)).collect(),
            #[cfg(feature = "nats")]
            Self::Nats(settings) => settings.url.split(',').filter_map(|one| server(one, 4222, 4222)).collect(),
        }
    }

    /// What it can reach, for people, without secrets.
    pub(crate) fn reaches(&self) -> String {
        match self {
            Self::Http(settings) if settings.allow_private => "every address".into(),
            Self::Http(settings) if settings.allow.is_empty() => "public addresses".into(),
            Self::Http(settings) => format!("public addresses, {}", settings.allow.join(", ")),
            #[cfg(feature = "rabbitmq")]
            Self::RabbitMq(settings) => super::redact::url(&settings.url),
            #[cfg(feature = "kafka")]
            Self::Kafka(settings) => super::redact::servers(&settings.brokers),
            #[cfg(feature = "nats")]
            Self::Nats(settings) => super::redact::servers(&settings.url),
        }
    }
}

/// Host and port of an address with or without a scheme; which port where none is written, depending on TLS.
#[cfg(any(feature = "rabbitmq", feature = "kafka", feature = "nats"))]
fn server(address: &str, port: u16, tls_port: u16) -> Option<String> {
    let address = address.trim();
    // A scheme that the URL standard doesn't know, so that none has a default port.
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let url = url::Url::parse(&format!("posthouse://{rest}")).ok()?;
    let port = url.port().unwrap_or(if scheme.ends_with('s') { tls_port } else { port });
    url.host_str().filter(|host| !host.is_empty()).map(|host| format!("{host}:{port}"))
}

/// The path of a property as it is written in the file: its name has dots in it.
#[cfg(feature = "kafka")]
fn quoted(field: &str) -> String {
    match field.strip_prefix("properties.") {
        Some(name) if !name.starts_with('"') => join("properties", name),
        _ => field.to_owned(),
    }
}

#[cfg(all(test, feature = "rabbitmq", feature = "kafka", feature = "nats"))]
mod tests {
    use super::server;

    #[test]
    fn servers_are_told_without_secrets() {
        for (address, told) in [
            ("amqp://user:secret@rabbit/shop", "rabbit:5672"),
            ("amqps://user:secret@rabbit/shop", "rabbit:5671"),
            ("amqp://[::1]:7/", "[::1]:7"),
            (" kafka-1:9093", "kafka-1:9093"),
            ("kafka-1", "kafka-1:9092"),
            ("nats://token@nats:1", "nats:1"),
        ] {
            let ports = if address.starts_with("amqp") { (5672, 5671) } else { (9092, 9092) };
            assert_eq!(server(address, ports.0, ports.1).as_deref(), Some(told));
        }
        assert_eq!(server("", 1, 1), None);
    }
}
