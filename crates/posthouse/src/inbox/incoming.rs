//! [`Incoming`]: a message as it was received.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use super::HandlerError;
use crate::error::storable;
use crate::message::MAX_NAME;
use crate::store::{Copied, InboxDetail};
use crate::{Headers, MessageId};

/// The header of copies that were sent to the consumer's own queue.
pub(super) const RETRY: &str = "posthouse-retry";

/// Where a message came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "from", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Source {
    /// A RabbitMQ queue.
    RabbitMq {
        /// Exchange.
        exchange: String,
        /// Routing key.
        routing_key: String,
    },
    /// A Kafka topic.
    Kafka {
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// Offset.
        offset: i64,
    },
    /// A NATS stream.
    Nats {
        /// Subject.
        subject: String,
    },
    /// An HTTP request.
    Http {
        /// The address that was called.
        url: String,
    },
}

/// A message as it was received: made by a consumer, or by hand.
///
/// ```
/// use posthouse::inbox::{Incoming, Source};
///
/// let incoming = Incoming::new("order-7", r#"{"sku":"A1"}"#)
///     .typed("stock.deduct.v1")
///     .source(Source::Nats { subject: "stock.deduct".into() });
/// # let _ = incoming;
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Incoming {
    /// The identity by which a duplicate is recognised; None when it came without one.
    pub message_id: Option<String>,
    /// Its type, by which a registered handler is found.
    pub kind: String,
    /// Ordering key.
    pub key: Option<String>,
    /// The payload, byte for byte.
    pub payload: Vec<u8>,
    /// Media type of the payload.
    pub content_type: String,
    /// Headers.
    pub headers: Headers,
    /// Where it came from.
    pub source: Option<Source>,
    /// It was delivered before, and perhaps killed the process that handled it. Its run is written down before it begins.
    pub redelivered: bool,
    /// Why it can't be handled as it is; such a message is stored as FAILED, with its bytes.
    pub malformed: Option<String>,
}

impl Incoming {
    /// A message with an id.
    pub fn new(message_id: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        Self { message_id: Some(message_id.into()), ..Self::without_id(payload) }
    }

    /// A message without an id; see [`MissingId`](crate::MissingId) for what becomes of it.
    pub fn without_id(payload: impl Into<Vec<u8>>) -> Self {
        Self {
            message_id: None,
            kind: String::new(),
            key: None,
            payload: payload.into(),
            content_type: "application/json".into(),
            headers: Headers::new(),
            source: None,
            redelivered: false,
            malformed: None,
        }
    }

    /// Sets the type.
    #[must_use]
    pub fn typed(mut self, kind: impl Into<String>) -> Self {
        self.kind = kind.into();
        self
    }

    /// Sets the ordering key.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the media type; `application/json` by default.
    #[must_use]
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = content_type.into();
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name, value);
        self
    }

    /// Adds a header as it was on the wire. If it isn't UTF-8 the message is [`malformed`](Self::malformed), and the value is
    /// kept as `\x` and its bytes in hexadecimal, so that nothing of it is lost.
    #[must_use]
    pub fn header_bytes(mut self, name: impl Into<String>, value: &[u8]) -> Self {
        let name = name.into();
        match std::str::from_utf8(value) {
            Ok(text) => self.header(name, text),
            Err(_) => {
                self.headers.insert(&*name, hex("\\x", value));
                self.malformed(format!("header {name:?} is not UTF-8"))
            }
        }
    }

    /// Says where it came from.
    #[must_use]
    pub fn source(mut self, source: Source) -> Self {
        self.source = Some(source);
        self
    }

    /// Says whether it was delivered before.
    #[must_use]
    pub fn redelivered(mut self, redelivered: bool) -> Self {
        self.redelivered = redelivered;
        self
    }

    /// Says that it can't be handled as it is, and why.
    #[must_use]
    pub fn malformed(mut self, why: impl Into<String>) -> Self {
        self.malformed = Some(why.into());
        self
    }

    /// The payload, decoded from JSON.
    ///
    /// # Errors
    /// One that [rejects](HandlerError::reject): what can't be read now can't be read later.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, HandlerError> {
        serde_json::from_slice(&self.payload)
            .map_err(|e| HandlerError::reject(format!("the payload is not what the handler takes: {e}")))
    }

    /// Which version of its row it is a copy of, if it was sent to the consumer's own queue to be run again.
    pub(super) fn retry_of(&self) -> Option<i32> {
        self.headers.get(RETRY)?.parse().ok()
    }

    /// Its id, if it has one that can be stored.
    pub(super) fn usable_id(&self) -> Option<&str> {
        self.message_id.as_deref().filter(|id| !id.is_empty() && fits(id))
    }

    /// An id that the same content has each time.
    pub(super) fn hashed_id(&self) -> String {
        let mut hash = Sha256::new();
        let parts =
            [self.message_id.as_deref().map(str::as_bytes), Some(self.kind.as_bytes()), self.key.as_deref().map(str::as_bytes)];
        for part in parts.into_iter().chain([Some(self.payload.as_slice())]) {
            // With its length before it, so that no two messages run together to the same bytes; none differs from empty.
            hash.update(part.map_or(u64::MAX, |p| p.len() as u64).to_be_bytes());
            hash.update(part.unwrap_or_default());
        }
        hex("sha256:", &hash.finalize())
    }

    /// As it is stored.
    pub(super) fn stored(&self) -> Stored<'_> {
        let mut exact = Map::new();
        let mut fitting = |name: &str, text: &str| {
            if fits(text) {
                return text.to_owned();
            }
            exact.insert(name.into(), text.into());
            storable(text, MAX_NAME)
        };
        if let Some(id) = &self.message_id {
            fitting("message_id", id);
        }
        let kind = fitting("type", &self.kind);
        let key = self.key.as_deref().map(|key| fitting("message_key", key));
        let content_type = fitting("content_type", &self.content_type);
        let mut source = match self.source.as_ref().map(serde_json::to_value) {
            Some(Ok(Value::Object(source))) => source,
            _ => Map::new(),
        };
        if !exact.is_empty() {
            source.insert("exact".into(), exact.into());
        }
        Stored {
            kind,
            source: (!source.is_empty()).then(|| Value::from(source).to_string()),
            copy: Copied { key, content_type, headers: self.headers.to_json(), payload: &self.payload },
        }
    }

    /// Out of its stored copy; what is wrong with a copy that can't be run.
    pub(super) fn restored(detail: InboxDetail) -> Result<Self, String> {
        let Some(payload) = detail.payload else { return Err("there is no copy of this message to run".into()) };
        let headers = match detail.headers.as_deref() {
            None => Headers::new(),
            Some(json) => Headers::from_json(json).map_err(|e| format!("the stored headers can't be read: {e}"))?,
        };
        let source: Value = match detail.row.source.as_deref() {
            None => Value::Null,
            Some(json) => serde_json::from_str(json).map_err(|e| format!("the stored source can't be read: {e}"))?,
        };
        let exact = |name: &str| source["exact"][name].as_str().map(str::to_owned);
        let mut out = Self::new(detail.row.message_id, payload);
        out.kind = exact("type").unwrap_or(detail.row.kind);
        out.key = exact("message_key").or(detail.key);
        out.content_type = exact("content_type").or(detail.content_type).unwrap_or_default();
        out.headers = headers;
        out.source = Source::deserialize(&source).ok();
        Ok(out)
    }
}

/// The columns of a message that come from the message itself.
#[derive(Debug)]
pub(super) struct Stored<'a> {
    pub(super) kind: String,
    pub(super) source: Option<String>,
    pub(super) copy: Copied<'a>,
}

/// Whether a text column holds it as it is.
fn fits(text: &str) -> bool {
    text.len() <= MAX_NAME && !text.contains('\0')
}

pub(crate) fn hex(prefix: &str, bytes: &[u8]) -> String {
    bytes.iter().fold(prefix.to_owned(), |out, byte| out + &format!("{byte:02x}"))
}

/// Under which id a message is handled.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admitted<'a> {
    Handle(Cow<'a, str>),
    /// Not handled, but kept.
    Quarantine {
        id: Cow<'a, str>,
        why: String,
    },
}

impl<'a> Admitted<'a> {
    pub(super) fn quarantine(incoming: &'a Incoming, why: String) -> Self {
        let id = match incoming.usable_id() {
            Some(id) => id.into(),
            None => MessageId::generate().to_string().into(),
        };
        Self::Quarantine { id, why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{InboxRow, InboxStatus};

    fn round(incoming: &Incoming) -> Incoming {
        let stored = incoming.stored();
        for text in [Some(&stored.kind), stored.copy.key.as_ref(), Some(&stored.copy.content_type)].into_iter().flatten() {
            assert!(fits(text), "{text:?}");
        }
        let row = InboxRow {
            consumer: "c".into(),
            message_id: incoming.message_id.clone().unwrap(),
            status: InboxStatus::Failed,
            kind: stored.kind,
            source: stored.source,
            attempts: 0,
            claims: 0,
            version: 0,
            next_attempt_us: None,
            owner: None,
            last_error: None,
            first_us: 0,
            last_us: 0,
            success_us: None,
        };
        Incoming::restored(InboxDetail {
            row,
            key: stored.copy.key,
            content_type: Some(stored.copy.content_type),
            headers: stored.copy.headers,
            payload: Some(stored.copy.payload.to_vec()),
        })
        .unwrap()
    }

    #[test]
    fn what_is_stored_comes_back_as_it_was() {
        let plain = Incoming::new("1", [0, 255]).typed("t").key("k").header("a", "😀\0").source(Source::Kafka {
            topic: "t".into(),
            partition: 1,
            offset: i64::MAX,
        });
        assert_eq!(round(&plain), plain);
        let odd = Incoming::new("1", "").typed("t\0").key("k".repeat(300)).content_type("ü".repeat(200));
        assert_eq!(round(&odd), odd);
    }

    #[test]
    fn a_hashed_id_tells_contents_apart() {
        let a = Incoming::without_id("bc").typed("a");
        assert_eq!(
            a.hashed_id(),
            a.clone().header("x-death", "2").redelivered(true).hashed_id(),
            "what a broker adds is left out"
        );
        assert_ne!(a.hashed_id(), Incoming::without_id("c").typed("ab").hashed_id());
        assert_ne!(a.hashed_id(), a.clone().key("").hashed_id());
        assert_ne!(a.hashed_id(), Incoming::new("\0", "bc").typed("a").hashed_id());
        assert!(a.hashed_id().len() <= MAX_NAME);
    }

    #[test]
    fn a_header_that_is_not_text_makes_the_message_malformed_and_is_kept() {
        let odd = Incoming::new("1", "").header_bytes("good", b"text").header_bytes("bad", &[0xff, 0x00]);
        assert_eq!(odd.headers.get("good"), Some("text"));
        assert_eq!(odd.headers.get("bad"), Some("\\xff00"));
        assert!(odd.malformed.unwrap().contains("bad"));
    }

    #[test]
    fn ids_that_can_be_stored() {
        for (id, usable) in [("", false), ("a\0", false), (&*"x".repeat(256), false), (&*"x".repeat(255), true), ("ä 😀", true)]
        {
            assert_eq!(Incoming::new(id, "").usable_id().is_some(), usable, "{id:?}");
        }
    }
}
