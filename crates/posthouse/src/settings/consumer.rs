//! Settings of a consumer.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a consumer takes messages out of its queue, topic or stream.
///
/// ```
/// use posthouse::{ConsumerSettings, ConsumerOrder};
///
/// let mut settings = ConsumerSettings::default();
/// settings.concurrency = 16;
/// settings.order = ConsumerOrder::Key;
/// settings.id_from = "json:/orderId".parse().unwrap();
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ConsumerSettings {
    /// Messages whose handlers run at once. 8 by default; 1 to 1 000. Each needs a connection of the inbox's pool.
    pub concurrency: u32,
    /// Messages that are taken and not yet acknowledged, running and waiting ones together. 100 by default; 1 to 10 000, and
    /// not less than `concurrency`.
    pub prefetch: u32,
    /// Which messages wait for each other.
    pub order: ConsumerOrder,
    /// By what a duplicate is recognised.
    pub id_from: IdFrom,
}

impl Default for ConsumerSettings {
    fn default() -> Self {
        Self { concurrency: 8, prefetch: 100, order: ConsumerOrder::default(), id_from: IdFrom::default() }
    }
}

impl ConsumerSettings {
    /// What is wrong with these settings, each with the field's name.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        if !(1..=1_000).contains(&self.concurrency) {
            out.push(("concurrency".into(), format!("{}, must be 1 to 1000", self.concurrency)));
        }
        if !(1..=10_000).contains(&self.prefetch) {
            out.push(("prefetch".into(), format!("{}, must be 1 to 10000", self.prefetch)));
        } else if self.prefetch < self.concurrency {
            let why =
                format!("{}, must be at least concurrency ({}), or some handlers never run", self.prefetch, self.concurrency);
            out.push(("prefetch".into(), why));
        }
        out
    }
}

/// Which messages of one consumer wait for each other.
///
/// The order is that in which this consumer gets them. Where several consumers share a queue, messages of one key reach
/// different ones; only what gives all messages of a key to one of them at a time (a Kafka partition, RabbitMQ's single active
/// consumer) makes it an order of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ConsumerOrder {
    /// None does: as many at once as `concurrency` says. A failed one is run again later, and others go on.
    #[default]
    None,
    /// Those of one queue, stream or partition are run one after another. A failed one is run again later, out of turn, and
    /// the others go on.
    Source,
    /// Those of one key are run one after another, and a failed one holds the later ones of its key back until it worked or is
    /// FAILED. Messages without a key wait for none.
    Key,
}

/// By what a duplicate is recognised: `message`, `header:NAME` or `json:POINTER`.
///
/// ```
/// use posthouse::IdFrom;
///
/// assert_eq!("json:/order/id".parse(), Ok(IdFrom::Json("/order/id".into())));
/// assert_eq!("header:x-request-id".parse(), Ok(IdFrom::Header("x-request-id".into())));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum IdFrom {
    /// The message id that the sender gave it.
    #[default]
    Message,
    /// The value of this header, compared without regard to case.
    Header(String),
    /// The text, number or truth value at this JSON pointer (RFC 6901) of the payload.
    Json(String),
}

impl FromStr for IdFrom {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "message" => Ok(Self::Message),
            Some(("header", name)) if !name.is_empty() => Ok(Self::Header(name.into())),
            Some(("json", pointer)) if pointer.starts_with('/') => Ok(Self::Json(pointer.into())),
            _ => Err(format!("{text:?}, must be \"message\", \"header:NAME\" or \"json:/path/to/field\"")),
        }
    }
}

impl fmt::Display for IdFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message => f.write_str("message"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Json(pointer) => write!(f, "json:{pointer}"),
        }
    }
}

impl TryFrom<String> for IdFrom {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<IdFrom> for String {
    fn from(from: IdFrom) -> Self {
        from.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_checked_by_name() {
        let with = |concurrency, prefetch| ConsumerSettings { concurrency, prefetch, ..Default::default() };
        assert!(ConsumerSettings::default().problems().is_empty());
        for (settings, field) in [(with(0, 1), "concurrency"), (with(8, 0), "prefetch"), (with(8, 7), "prefetch")] {
            assert!(settings.problems().iter().any(|(name, _)| name == field), "{settings:?}");
        }
    }

    #[test]
    fn id_from_reads_what_it_writes() {
        for text in ["message", "header:x", "json:/a/b"] {
            assert_eq!(text.parse::<IdFrom>().unwrap().to_string(), text);
        }
        for text in ["", "header:", "json:a", "json:", "path:/a", "Message"] {
            assert!(text.parse::<IdFrom>().is_err(), "{text}");
        }
    }
}
