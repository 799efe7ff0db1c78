//! What is published and what is delivered: [`Message`], [`Event`], [`Envelope`] and their parts.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::Error;

/// The identity of a message, the same on every resend; a receiver recognises duplicates by it.
///
/// Any text of 1 to 255 bytes without NUL. New ones are UUIDs of version 7, which sort by time of creation.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MessageId(String);

impl MessageId {
    /// Makes a fresh id.
    pub fn generate() -> Self {
        Self(uuid::Uuid::now_v7().to_string())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for MessageId {
    fn from(id: String) -> Self {
        Self(id)
    }
}

impl From<&str> for MessageId {
    fn from(id: &str) -> Self {
        Self(id.to_owned())
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Header names and values of a message, sent along by every transport that has headers.
///
/// Names are compared as written. `traceparent` and `tracestate` carry the trace context.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Headers(BTreeMap<String, String>);

impl Headers {
    /// No headers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a header, replacing one of the same name.
    pub fn insert(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), value.into());
    }

    /// The value of a header.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// All headers, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// True when there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn to_json(&self) -> Option<String> {
        // A map of strings always serializes.
        (!self.0.is_empty()).then(|| serde_json::to_string(&self.0).unwrap_or_default())
    }

    /// Reads headers as they are stored: a JSON object. Numbers, booleans and null written by other languages become text.
    #[cfg(any(feature = "relay", feature = "inbox", feature = "testing"))]
    pub(crate) fn from_json(text: &str) -> Result<Self, String> {
        let raw: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut headers = BTreeMap::new();
        for (name, value) in raw {
            let value = match value {
                serde_json::Value::String(s) => s,
                serde_json::Value::Null => String::new(),
                other => other.to_string(),
            };
            headers.insert(name, value);
        }
        Ok(Self(headers))
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect())
    }
}

/// When a delayed message becomes due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    At(SystemTime),
    In(Duration),
}

/// An immutable fact to deliver to one destination.
///
/// ```
/// use posthouse::Message;
/// let m = Message::to("inventory.deduct").typed("order.placed").key("order-7").json(&serde_json::json!({ "sku": "A1", "count": 2 }));
/// ```
#[derive(Debug, Clone)]
#[must_use = "a message does nothing until it is published"]
pub struct Message {
    pub(crate) id: Option<MessageId>,
    pub(crate) kind: String,
    pub(crate) destination: String,
    pub(crate) key: Option<String>,
    pub(crate) payload: Result<Vec<u8>, String>,
    pub(crate) content_type: Cow<'static, str>,
    pub(crate) headers: Headers,
    pub(crate) due: Option<Due>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) dedup_key: Option<String>,
}

impl Message {
    /// A message for `destination`: a route name (`orders`) or `transport:address` (`https://…`, `local:send-email`).
    pub fn to(destination: impl Into<String>) -> Self {
        Self {
            id: None,
            kind: String::new(),
            destination: destination.into(),
            key: None,
            payload: Ok(Vec::new()),
            content_type: Cow::Borrowed("application/octet-stream"),
            headers: Headers::new(),
            due: None,
            max_attempts: None,
            dedup_key: None,
        }
    }

    /// The type of the message, as receivers know it (`order.placed.v1`).
    pub fn typed(mut self, kind: impl Into<String>) -> Self {
        self.kind = kind.into();
        self
    }

    /// The ordering key: messages of one (destination, key) are delivered in the order in which they were published.
    pub fn key(mut self, key: impl ToString) -> Self {
        self.key = Some(key.to_string());
        self
    }

    /// Sets the payload to `value` as JSON. If that fails, `publish` reports it.
    pub fn json<T: Serialize + ?Sized>(mut self, value: &T) -> Self {
        self.payload = serde_json::to_vec(value).map_err(|e| e.to_string());
        self.content_type = Cow::Borrowed("application/json");
        self
    }

    /// Sets the payload to these bytes, as they are.
    pub fn payload(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.payload = Ok(bytes.into());
        self
    }

    /// The media type of the payload.
    pub fn content_type(mut self, content_type: impl Into<Cow<'static, str>>) -> Self {
        self.content_type = content_type.into();
        self
    }

    /// Adds a header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name, value);
        self
    }

    /// Sends it no earlier than `at`. Can't be combined with a key.
    pub fn deliver_at(mut self, at: SystemTime) -> Self {
        self.due = Some(Due::At(at));
        self
    }

    /// Sends it no earlier than `after` from now, by the database's clock. Can't be combined with a key.
    pub fn deliver_in(mut self, after: Duration) -> Self {
        self.due = Some(Due::In(after));
        self
    }

    /// After this many failed attempts the message is FAILED; overrides the route's limit. 1 to 10 000.
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// Publishes at most one message with this key per set of tables (for as long as dedup keys are kept).
    ///
    /// Unless [`id`](Self::id) is set, the dedup key is the message id too, so both calls return the same id.
    pub fn dedup_key(mut self, key: impl Into<String>) -> Self {
        self.dedup_key = Some(key.into());
        self
    }

    /// Sets the id; by default a fresh one is made.
    pub fn id(mut self, id: impl Into<MessageId>) -> Self {
        self.id = Some(id.into());
        self
    }
}

/// A typed event: a struct that knows its type, destination and key.
///
/// ```
/// # use serde::Serialize;
/// #[derive(Serialize)]
/// struct OrderPlaced { order: u64 }
/// impl posthouse::Event for OrderPlaced {
///     const TYPE: &'static str = "order.placed.v1";
///     const DESTINATION: &'static str = "orders";
///     fn key(&self) -> Option<String> { Some(self.order.to_string()) }
/// }
/// ```
pub trait Event: Serialize {
    /// The type of the message.
    const TYPE: &'static str;
    /// Where it goes.
    const DESTINATION: &'static str;
    /// The ordering key; none by default.
    fn key(&self) -> Option<String> {
        None
    }
}

/// A reference to an event is one, too.
impl<E: Event> Event for &E {
    const TYPE: &'static str = E::TYPE;
    const DESTINATION: &'static str = E::DESTINATION;
    fn key(&self) -> Option<String> {
        E::key(self)
    }
}

/// What `publish` takes: a [`Message`], or an [`Event`] (also by reference).
pub trait IntoMessage {
    /// Makes the message.
    fn into_message(self) -> Message;
}

impl IntoMessage for Message {
    fn into_message(self) -> Message {
        self
    }
}

#[diagnostic::do_not_recommend]
impl<E: Event> IntoMessage for E {
    fn into_message(self) -> Message {
        let mut m = Message::to(E::DESTINATION).typed(E::TYPE).json(&self);
        m.key = self.key();
        m
    }
}

/// What `publish` accepts, in bytes. Everything is checked before anything is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Limits {
    /// Payload size. 8 MiB by default: half of the smallest default packet limit among the supported databases
    /// (`max_allowed_packet`, 16 MiB in MariaDB).
    pub payload: usize,
    /// All header names and values together. 64 KiB by default.
    pub headers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { payload: 8 << 20, headers: 64 << 10 }
    }
}

/// The longest destination, key, type, message id, dedup key and content type, in bytes: what every supported database can index.
pub const MAX_NAME: usize = 255;

/// The most attempts a message may ask for.
pub const MAX_ATTEMPTS: u32 = 10_000;

/// A checked message, ready to be written. Only the outbox makes it.
#[doc(hidden)]
#[derive(Debug)]
pub struct Checked {
    pub(crate) id: MessageId,
    pub(crate) kind: String,
    pub(crate) destination: String,
    pub(crate) key: Option<String>,
    pub(crate) payload: Vec<u8>,
    pub(crate) content_type: Cow<'static, str>,
    pub(crate) headers: Option<String>,
    pub(crate) due: Option<Due>,
    pub(crate) max_attempts: Option<i32>,
    pub(crate) dedup_key: Option<String>,
}

impl Message {
    pub(crate) fn check(self, limits: &Limits) -> Result<Checked, Error> {
        let payload = self.payload.map_err(|e| Error::invalid("payload", format!("can't be written as JSON: {e}")))?;
        if payload.len() > limits.payload {
            return Err(Error::invalid(
                "payload",
                format!("{} bytes, the limit is {} (Limits::payload)", payload.len(), limits.payload),
            ));
        }
        name("destination", &self.destination, 1)?;
        name("type", &self.kind, 0)?;
        name("content_type", &self.content_type, 1)?;
        if let Some(key) = &self.key {
            name("message_key", key, 1)?;
            if self.due.is_some() {
                return Err(Error::invalid(
                    "deliver_at",
                    "can't be combined with a key: a delayed message would hold up every later message of its key; \
                     leave out one of the two",
                ));
            }
        }
        if let Some(key) = &self.dedup_key {
            name("dedup_key", key, 1)?;
        }
        if let Some(id) = &self.id {
            name("message_id", id.as_str(), 1)?;
        }
        let max_attempts = match self.max_attempts {
            Some(n) if n == 0 || n > MAX_ATTEMPTS => {
                return Err(Error::invalid("max_attempts", format!("{n}, must be 1 to {MAX_ATTEMPTS}")));
            }
            other => other.map(|n| n as i32),
        };
        let mut size = 0;
        for (k, v) in self.headers.iter() {
            if k.is_empty() {
                return Err(Error::invalid("headers", "a header name is empty"));
            }
            if k.contains('\0') || v.contains('\0') {
                return Err(Error::invalid("headers", format!("header {k:?} contains NUL, which text columns can't hold")));
            }
            size += k.len() + v.len();
        }
        if size > limits.headers {
            return Err(Error::invalid("headers", format!("{size} bytes, the limit is {} (Limits::headers)", limits.headers)));
        }
        // The range every supported database can store.
        let too_late = match self.due {
            Some(Due::At(at)) => at > SystemTime::UNIX_EPOCH + MAX_DUE,
            Some(Due::In(after)) => after > MAX_DUE,
            None => false,
        };
        if too_late {
            return Err(Error::invalid("deliver_at", "lies beyond the year 2970"));
        }
        let id = match (self.id, &self.dedup_key) {
            (Some(id), _) => id,
            (None, Some(key)) => MessageId(key.clone()),
            (None, None) => MessageId::generate(),
        };
        Ok(Checked {
            id,
            kind: self.kind,
            destination: self.destination,
            key: self.key,
            payload,
            content_type: self.content_type,
            headers: self.headers.to_json(),
            due: self.due,
            max_attempts,
            dedup_key: self.dedup_key,
        })
    }
}

const MAX_DUE: Duration = Duration::from_secs(1000 * 365 * 24 * 3600);

fn name(field: &'static str, text: &str, min: usize) -> Result<(), Error> {
    if text.len() < min {
        return Err(Error::invalid(field, "is empty"));
    }
    if text.len() > MAX_NAME {
        return Err(Error::invalid(field, format!("{} bytes, the limit is {MAX_NAME}", text.len())));
    }
    if text.contains('\0') {
        return Err(Error::invalid(field, "contains NUL, which text columns can't hold"));
    }
    Ok(())
}

/// A message as it was read from the log, on its way to a receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Envelope {
    /// Row id: the order in which messages of one key are delivered.
    pub id: i64,
    /// The identity that receivers see, the same on every resend.
    pub message_id: MessageId,
    /// The type.
    pub kind: String,
    /// The destination it is sent to now (an operator may have changed it).
    pub destination: String,
    /// The ordering key.
    pub key: Option<String>,
    /// The payload, byte for byte.
    pub payload: Vec<u8>,
    /// Media type of the payload.
    pub content_type: String,
    /// Headers.
    pub headers: Headers,
    /// When it was published, by the database's clock.
    pub created_at: SystemTime,
    /// When it is to be delivered at the earliest; None: at once.
    pub deliver_at: Option<SystemTime>,
    /// Which attempt this is, starting at 1.
    pub attempt: u32,
}

#[cfg(feature = "testing")]
impl Envelope {
    /// A message as a relay would hand it to a transport on the first attempt, for tests of transports and receivers.
    ///
    /// The fields are public: set what the test is about.
    #[expect(clippy::disallowed_methods, reason = "no database is asked")]
    pub fn for_test(destination: impl Into<String>, payload: impl Into<Vec<u8>>) -> Self {
        Self {
            id: 1,
            message_id: MessageId::generate(),
            kind: String::new(),
            destination: destination.into(),
            key: None,
            payload: payload.into(),
            content_type: "application/octet-stream".into(),
            headers: Headers::new(),
            created_at: SystemTime::now(),
            deliver_at: None,
            attempt: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(m: Message) -> (&'static str, String) {
        match m.check(&Limits::default()) {
            Err(Error::Invalid { field, reason }) => (field, reason),
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    #[test]
    fn every_limit_is_named_and_holds_at_its_boundary() {
        let ok = "x".repeat(MAX_NAME);
        let long = "x".repeat(MAX_NAME + 1);
        assert!(Message::to(&*ok).key(&ok).typed(&*ok).dedup_key(&*ok).check(&Limits::default()).is_ok());
        assert_eq!(refused(Message::to(&*long)).0, "destination");
        assert_eq!(refused(Message::to("")).0, "destination");
        assert_eq!(refused(Message::to("a").key(&long)).0, "message_key");
        assert_eq!(refused(Message::to("a").key("")).0, "message_key");
        assert_eq!(refused(Message::to("a").typed(&*long)).0, "type");
        assert_eq!(refused(Message::to("a").dedup_key(&*long)).0, "dedup_key");
        assert_eq!(refused(Message::to("a").id(&*long)).0, "message_id");
        assert_eq!(refused(Message::to("a\0")).0, "destination");
        assert_eq!(refused(Message::to("a").max_attempts(0)).0, "max_attempts");
        assert_eq!(refused(Message::to("a").max_attempts(MAX_ATTEMPTS + 1)).0, "max_attempts");
        assert!(Message::to("a").max_attempts(MAX_ATTEMPTS).check(&Limits::default()).is_ok());
        let limits = Limits::default();
        assert!(Message::to("a").payload(vec![0; limits.payload]).check(&limits).is_ok());
        let (field, reason) = refused(Message::to("a").payload(vec![0; limits.payload + 1]));
        assert_eq!(field, "payload");
        assert!(reason.contains(&limits.payload.to_string()), "{reason}");
        assert!(Message::to("a").header("h", "v".repeat(limits.headers - 1)).check(&limits).is_ok());
        assert_eq!(refused(Message::to("a").header("h", "v".repeat(limits.headers))).0, "headers");
        assert_eq!(refused(Message::to("a").header("h", "\0")).0, "headers");
        assert_eq!(refused(Message::to("a").key("k").deliver_in(Duration::from_secs(1))).0, "deliver_at");
        let bad: BTreeMap<(u8, u8), u8> = [((1, 2), 3)].into();
        assert_eq!(refused(Message::to("a").json(&bad)).0, "payload");
    }

    #[cfg(feature = "relay")]
    #[test]
    fn headers_written_by_other_languages_become_text() {
        let h = Headers::from_json(r#"{"a":"x","n":1,"b":true,"z":null}"#).unwrap();
        assert_eq!(h.get("a"), Some("x"));
        assert_eq!(h.get("n"), Some("1"));
        assert_eq!(h.get("b"), Some("true"));
        assert_eq!(h.get("z"), Some(""));
        assert!(Headers::from_json("[1]").is_err());
    }
}
