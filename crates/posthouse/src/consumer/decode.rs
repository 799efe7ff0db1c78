//! What stands where in a received message: one that Posthouse sent, a CloudEvent of anybody, or one with none of that.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::inbox::{Incoming, Source};
use crate::settings::IdFrom;

/// What the bindings of CloudEvents put before attribute names in headers: HTTP and NATS, Kafka, AMQP (two spellings).
const ATTRIBUTE: [&str; 4] = ["ce-", "ce_", "cloudEvents:", "cloudEvents_"];

/// A message as it came off the wire. What its protocol has a place for is in the fields, all else in `headers`.
#[derive(Debug, Default)]
pub(crate) struct Received {
    pub(crate) message_id: Option<String>,
    pub(crate) kind: Option<String>,
    pub(crate) key: Option<String>,
    pub(crate) content_type: Option<String>,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) payload: Vec<u8>,
    /// Ids, types, keys and CloudEvents attributes are percent-encoded in headers (HTTP, NATS).
    pub(crate) encoded: bool,
    pub(crate) redelivered: bool,
    /// What is wrong with it already.
    pub(crate) malformed: Option<String>,
}

impl Received {
    /// The message, under the id that `id_from` says.
    ///
    /// | | in this order |
    /// |---|---|
    /// | id | the protocol's own (`message_id`, `Nats-Msg-Id`), `posthouse-message-id`; of CloudEvents `source` and `id` together, which only together tell events apart |
    /// | type | the protocol's own, `posthouse-type`, of CloudEvents `type` |
    /// | key | the protocol's own, `posthouse-key`, of CloudEvents `partitionkey` |
    ///
    /// The payload of a structured CloudEvent is its data, byte for byte; its other attributes become headers `ce-NAME`.
    pub(crate) fn incoming(self, id_from: &IdFrom, source: Source) -> Incoming {
        let encoded = self.encoded;
        let text = |value: &str| if encoded { percent_decoded(value) } else { value.to_owned() };
        let mut incoming = Incoming::without_id(self.payload).source(source).redelivered(self.redelivered);
        incoming.malformed = self.malformed;
        for (name, value) in self.headers {
            incoming = incoming.header_bytes(name, &value);
        }
        incoming.content_type = self.content_type.or_else(|| header(&incoming, "content-type")).unwrap_or_default();
        let mut attributes = BTreeMap::new();
        for (name, value) in incoming.headers.iter() {
            if let Some(attribute) = attribute(name) {
                attributes.insert(attribute, text(value));
            }
        }
        if !attributes.contains_key("specversion") {
            // Headers that look like it, of something else.
            attributes.clear();
        }
        if essence(&incoming.content_type) == "application/cloudevents+json" {
            match structured(&incoming.payload) {
                Ok(event) => {
                    incoming.content_type = event.content_type;
                    incoming.payload = event.data;
                    for (name, value) in &event.attributes {
                        let trace = matches!(&**name, "traceparent" | "tracestate");
                        let name = if trace { name.clone() } else { format!("ce-{name}") };
                        if incoming.headers.get(&name).is_none() {
                            incoming.headers.insert(name, value);
                        }
                    }
                    attributes.extend(event.attributes);
                }
                Err(why) => incoming = incoming.malformed(format!("the CloudEvent can't be read: {why}")),
            }
        }
        for name in ["traceparent", "tracestate"] {
            if let (None, Some(value)) = (incoming.headers.get(name), attributes.get(name)) {
                incoming.headers.insert(name, value);
            }
        }
        let of = |own: Option<String>, name: &str| {
            own.filter(|own| !own.is_empty()).or_else(|| header(&incoming, name)).map(|value| text(&value))
        };
        let id = of(self.message_id, "posthouse-message-id");
        let kind = of(self.kind, "posthouse-type");
        let key = of(self.key, "posthouse-key");
        let event_id = || Some(format!("{} {}", attributes.get("source")?, attributes.get("id")?));
        incoming.message_id = match id_from {
            IdFrom::Message => id.or_else(event_id),
            IdFrom::Header(name) => header(&incoming, name),
            IdFrom::Json(pointer) => scalar(&incoming.payload, pointer),
        };
        incoming.kind = kind.or_else(|| attributes.get("type").cloned()).unwrap_or_default();
        incoming.key = key.or_else(|| attributes.get("partitionkey").cloned());
        incoming
    }
}

/// The value of a header, its name compared without regard to case.
fn header(incoming: &Incoming, name: &str) -> Option<String> {
    let found = incoming
        .headers
        .get(name)
        .or_else(|| incoming.headers.iter().find(|(there, _)| there.eq_ignore_ascii_case(name)).map(|(_, value)| value));
    found.map(str::to_owned)
}

/// The attribute that a header stands for.
fn attribute(name: &str) -> Option<String> {
    let rest = ATTRIBUTE.iter().find_map(|prefix| {
        let (head, rest) = name.split_at_checked(prefix.len())?;
        head.eq_ignore_ascii_case(prefix).then_some(rest)
    })?;
    Some(rest.to_ascii_lowercase())
}

/// A text, number or truth value inside of a JSON payload; a number as it is written, so that none is rounded to another.
fn scalar(payload: &[u8], pointer: &str) -> Option<String> {
    let mut at: &RawValue = serde_json::from_slice(payload).ok()?;
    for step in pointer.split('/').skip(1) {
        let step = step.replace("~1", "/").replace("~0", "~");
        at = match at.get().as_bytes().first()? {
            b'{' => serde_json::from_str::<BTreeMap<String, &RawValue>>(at.get()).ok()?.remove(&step)?,
            b'[' => serde_json::from_str::<Vec<&RawValue>>(at.get()).ok()?.get(step.parse::<usize>().ok()?).copied()?,
            _ => return None,
        };
    }
    match at.get().as_bytes().first()? {
        b'"' => serde_json::from_str(at.get()).ok(),
        b'{' | b'[' | b'n' => None,
        _ => Some(at.get().to_owned()),
    }
}

struct Structured {
    attributes: BTreeMap<String, String>,
    content_type: String,
    data: Vec<u8>,
}

fn structured(document: &[u8]) -> Result<Structured, String> {
    #[derive(Deserialize)]
    struct Event<'a>(#[serde(borrow)] BTreeMap<String, &'a RawValue>);
    let Event(mut fields) = serde_json::from_slice(document).map_err(|e| e.to_string())?;
    let data = match (fields.remove("data"), fields.remove("data_base64")) {
        (Some(_), Some(_)) => return Err("it has both data and data_base64".into()),
        (Some(json), None) => Some(json.get().as_bytes().to_vec()),
        (None, Some(base64)) => {
            let text: String = serde_json::from_str(base64.get()).map_err(|e| format!("data_base64: {e}"))?;
            Some(BASE64.decode(text).map_err(|e| format!("data_base64: {e}"))?)
        }
        (None, None) => None,
    };
    let mut attributes = BTreeMap::new();
    for (name, value) in fields {
        let value = match serde_json::from_str(value.get()).map_err(|e| e.to_string())? {
            Value::String(text) => text,
            Value::Null => continue,
            other => other.to_string(),
        };
        attributes.insert(name, value);
    }
    for name in ["specversion", "id", "source", "type"] {
        if attributes.get(name).is_none_or(String::is_empty) {
            return Err(format!("it has no {name}"));
        }
    }
    let content_type = attributes.remove("datacontenttype").unwrap_or_else(|| "application/json".into());
    Ok(Structured { attributes, content_type, data: data.unwrap_or_default() })
}

/// A media type without its parameters.
fn essence(content_type: &str) -> String {
    content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Undoes percent-encoding; a text that isn't encoded (or not as UTF-8) stays as it is.
fn percent_decoded(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => out.push((high * 16 + low) as u8),
            _ => return text.to_owned(),
        }
    }
    String::from_utf8(out).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(received: Received) -> Incoming {
        received.incoming(&IdFrom::Message, Source::Nats { subject: "s".into() })
    }

    fn headers(pairs: &[(&str, &str)]) -> Vec<(String, Vec<u8>)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect()
    }

    #[test]
    fn what_the_protocol_says_goes_before_headers_and_those_before_attributes() {
        let all = |own: Option<&str>| Received {
            message_id: own.map(Into::into),
            kind: own.map(Into::into),
            key: own.map(Into::into),
            headers: headers(&[
                ("Posthouse-Message-Id", "h"),
                ("posthouse-type", "h"),
                ("posthouse-key", "h"),
                ("ce-specversion", "1.0"),
                ("ce-id", "c"),
                ("ce-source", "c"),
                ("ce-type", "c"),
                ("ce-partitionkey", "c"),
            ]),
            ..Default::default()
        };
        for (own, expected) in [(Some("own"), "own"), (None, "h"), (Some(""), "h")] {
            let got = decoded(all(own));
            assert_eq!((got.message_id.as_deref(), &*got.kind, got.key.as_deref()), (Some(expected), expected, Some(expected)));
        }
    }

    #[test]
    fn foreign_cloudevents_are_told_apart_by_source_and_id_in_all_bindings() {
        for prefix in ["ce-", "ce_", "CE-", "cloudEvents:", "cloudEvents_"] {
            let pairs = [
                ("specversion", "1.0"),
                ("id", "7"),
                ("source", "/a"),
                ("type", "t"),
                ("partitionkey", "k"),
                ("traceparent", "p"),
            ];
            let headers = pairs.map(|(name, value)| (format!("{prefix}{name}"), value.as_bytes().to_vec()));
            let got = decoded(Received { headers: headers.to_vec(), payload: b"x".to_vec(), ..Default::default() });
            assert_eq!((got.message_id.as_deref(), &*got.kind, got.key.as_deref()), (Some("/a 7"), "t", Some("k")));
            assert_eq!((got.headers.get("traceparent"), &*got.payload), (Some("p"), &b"x"[..]));
        }
        let others = Received { headers: headers(&[("ce-id", "7"), ("ce-type", "t")]), ..Default::default() };
        assert_eq!(decoded(others).message_id, None, "without specversion it is no CloudEvent");
    }

    #[test]
    fn structured_events_give_their_data_byte_for_byte() {
        let event = |data: &str| {
            Received {
            content_type: Some("application/cloudevents+json; charset=UTF-8".into()),
            payload: format!(r#"{{"specversion":"1.0","id":"7","source":"/a","type":"t","partitionkey":"k","traceparent":"p","extra":5{data}}}"#).into_bytes(),
            ..Default::default()
        }
        };
        let got = decoded(event(r#","data": {"n": 12345678901234567890123.10, "a" : 1,"a":2}"#));
        assert_eq!((got.message_id.as_deref(), &*got.kind, got.key.as_deref()), (Some("/a 7"), "t", Some("k")));
        assert_eq!(std::str::from_utf8(&got.payload), Ok(r#"{"n": 12345678901234567890123.10, "a" : 1,"a":2}"#));
        assert_eq!(got.content_type, "application/json");
        assert_eq!((got.headers.get("traceparent"), got.headers.get("ce-extra")), (Some("p"), Some("5")));

        let got = decoded(event(r#","datacontenttype":"image/png","data_base64":"AP8=""#));
        assert_eq!((&*got.payload, &*got.content_type), (&[0u8, 255][..], "image/png"));
        assert_eq!(decoded(event("")).payload, b"");
        for bad in [r#","data_base64":"%""#, r#","data_base64":"AA==","data":1"#, ","] {
            let got = decoded(event(bad));
            assert!(got.malformed.is_some() && got.payload.starts_with(b"{"), "{bad}: its bytes are kept");
        }
        let nothing =
            Received { content_type: Some("application/cloudevents+json".into()), payload: b"{}".to_vec(), ..Default::default() };
        assert!(decoded(nothing).malformed.unwrap().contains("no specversion"));
    }

    #[test]
    fn percent_encoding_is_undone_where_the_protocol_has_it() {
        let received = |encoded| Received {
            headers: headers(&[("posthouse-message-id", "a%20%E2%82%AC%25")]),
            encoded,
            ..Default::default()
        };
        assert_eq!(decoded(received(true)).message_id.unwrap(), "a \u{20ac}%");
        assert_eq!(decoded(received(false)).message_id.unwrap(), "a%20%E2%82%AC%25");
        for odd in ["100%", "%zz", "%ff", "%+1"] {
            assert_eq!(percent_decoded(odd), odd);
        }
    }

    #[test]
    fn the_id_is_taken_from_where_the_settings_say() {
        let from = |id_from: &str, payload: &str| {
            let received = Received {
                message_id: Some("own".into()),
                headers: headers(&[("X-Request-Id", "r")]),
                payload: payload.as_bytes().to_vec(),
                ..Default::default()
            };
            received.incoming(&id_from.parse().unwrap(), Source::Nats { subject: "s".into() }).message_id
        };
        assert_eq!(from("message", "").as_deref(), Some("own"));
        assert_eq!(from("header:x-request-id", "").as_deref(), Some("r"));
        assert_eq!(from("header:other", ""), None);
        assert_eq!(from("json:/order/id", r#"{"order":{"id":12}}"#).as_deref(), Some("12"));
        assert_eq!(from("json:/order/id", r#"{"order":{"id":"12"}}"#).as_deref(), Some("12"));
        let large = r#"{"order":{"id":123456789012345678901234567890}}"#;
        assert_eq!(from("json:/order/id", large).as_deref(), Some("123456789012345678901234567890"));
        assert_eq!(from("json:/a~1b/1", r#"{"a/b":[1,true]}"#).as_deref(), Some("true"));
        for none in [r#"{"order":{"id":null}}"#, r#"{"order":{"id":{}}}"#, "{}", "", "[", "\u{0}"] {
            assert_eq!(from("json:/order/id", none), None, "{none}");
        }
    }

    #[test]
    fn a_header_that_is_not_text_is_kept_and_makes_the_message_malformed() {
        let got =
            decoded(Received { headers: vec![("x".into(), vec![0xff])], message_id: Some("1".into()), ..Default::default() });
        assert!(got.malformed.is_some() && got.headers.get("x") == Some("\\xff"));
    }
}
