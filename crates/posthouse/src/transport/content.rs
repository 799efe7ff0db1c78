//! What is sent of a message: the payload as it is, or a CloudEvent, as the route says.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::IgnoredAny;

use super::Delivery;
use crate::settings::{CloudEvents, CloudEventsMode};
use crate::{Envelope, Route};

/// Media type of a structured CloudEvent, as the specification's examples write it.
const STRUCTURED: &str = "application/cloudevents+json; charset=UTF-8";

/// The attributes that we set, on any route: no header of a message may pass for one of them.
const OURS: [&str; 9] =
    ["specversion", "id", "source", "type", "time", "datacontenttype", "partitionkey", "traceparent", "tracestate"];

/// The last second of year 9999, after which RFC 3339 has no form.
const LAST_TIME: Duration = Duration::from_secs(253_402_300_799);

/// Content of a message as one transport sends it.
#[derive(Debug)]
pub(crate) struct Content<'d> {
    /// Media type of `payload`; empty when there is none to tell.
    pub(crate) content_type: Cow<'d, str>,
    /// The bytes to send.
    pub(crate) payload: Cow<'d, [u8]>,
    /// CloudEvents attributes that belong into headers, without the transport's prefix (`ce-`, `ce_`, …). Empty unless the
    /// route sends binary CloudEvents.
    pub(crate) attributes: Vec<(&'static str, Cow<'d, str>)>,
}

/// The content of a delivery.
///
/// # Errors
/// Why it can't be sent in the form that its route asks for: it can never work.
pub(crate) fn content(delivery: &Delivery) -> Result<Content<'_>, String> {
    of(delivery.message(), delivery.route().cloudevents.as_ref())
}

/// Whether a message's own header of this name must be left out, because it would stand where the route puts (or, in
/// structured mode, could put) an attribute. Names are compared without regard to case, as HTTP does.
pub(crate) fn is_attribute(route: &Route, prefix: &str, name: &str) -> bool {
    route.cloudevents.is_some()
        && name
            .split_at_checked(prefix.len())
            .is_some_and(|(p, rest)| p.eq_ignore_ascii_case(prefix) && OURS.iter().any(|ours| ours.eq_ignore_ascii_case(rest)))
}

/// Percent-encodes the value of an attribute for headers that hold visible ASCII, as the HTTP and NATS bindings ask:
/// space, `"`, `%` and everything outside U+0021 to U+007E.
#[cfg(any(feature = "http", feature = "nats"))]
pub(crate) fn percent_encoded(value: &str) -> String {
    let mut out = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'!'..=b'~' if !matches!(byte, b'"' | b'%') => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn of<'d>(message: &'d Envelope, cloudevents: Option<&'d CloudEvents>) -> Result<Content<'d>, String> {
    let mut content = Content {
        content_type: Cow::Borrowed(&message.content_type),
        payload: Cow::Borrowed(&message.payload),
        attributes: Vec::new(),
    };
    let Some(cloudevents) = cloudevents else { return Ok(content) };
    let attributes = attributes(message, cloudevents)?;
    match cloudevents.mode {
        CloudEventsMode::Binary => content.attributes = attributes,
        CloudEventsMode::Structured => {
            content.payload = Cow::Owned(document(message, attributes));
            content.content_type = Cow::Borrowed(STRUCTURED);
        }
    }
    Ok(content)
}

/// Attributes that are headers in binary mode.
fn attributes<'d>(message: &'d Envelope, cloudevents: &'d CloudEvents) -> Result<Vec<(&'static str, Cow<'d, str>)>, String> {
    let kind = if message.kind.is_empty() { &cloudevents.default_type } else { &message.kind };
    let mut out = vec![
        ("specversion", Cow::Borrowed("1.0")),
        ("id", Cow::Borrowed(message.message_id.as_str())),
        ("source", Cow::Borrowed(&*cloudevents.source)),
        ("type", Cow::Borrowed(&**kind)),
        ("time", Cow::Owned(rfc3339(message.created_at))),
    ];
    out.extend(message.key.as_deref().map(|key| ("partitionkey", Cow::Borrowed(key))));
    match out.iter().find(|(_, value)| !is_allowed(value)) {
        Some((name, _)) => Err(format!(
            "the CloudEvents attribute {name:?} would hold control characters or noncharacters, which CloudEvents don't allow; \
             publish such messages to a route without cloudevents"
        )),
        None => Ok(out),
    }
}

/// The one JSON document of structured mode.
fn document<'d>(message: &'d Envelope, mut attributes: Vec<(&'static str, Cow<'d, str>)>) -> Vec<u8> {
    if !message.content_type.is_empty() && is_allowed(&message.content_type) {
        attributes.push(("datacontenttype", Cow::Borrowed(&message.content_type)));
    }
    for name in ["traceparent", "tracestate"] {
        // A value that no attribute may hold is no trace context either.
        attributes.extend(message.headers.get(name).filter(|v| is_allowed(v)).map(|v| (name, Cow::Borrowed(v))));
    }
    let payload = &message.payload;
    let mut out = Vec::with_capacity(payload.len() * 4 / 3 + 512);
    for (name, value) in attributes {
        out.push(if out.is_empty() { b'{' } else { b',' });
        // Names are plain ASCII; a string always has a JSON form, and a Vec takes every write.
        out.extend_from_slice(format!("\"{name}\":{}", serde_json::Value::from(&*value)).as_bytes());
    }
    if payload.is_empty() {
        // No data.
    } else if is_json(&message.content_type) && holds_json(payload) {
        // As it is: parsing and writing it again would change large numbers, repeated names and their order.
        out.extend_from_slice(b",\"data\":");
        out.extend_from_slice(payload);
    } else {
        out.extend_from_slice(format!(",\"data_base64\":\"{}\"", BASE64.encode(payload)).as_bytes());
    }
    out.push(b'}');
    out
}

/// `application/json`, `text/json` and any subtype that ends in `+json`, with or without parameters.
fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    matches!(essence.split_once('/'), Some((_, subtype)) if subtype == "json" || subtype.ends_with("+json"))
}

fn holds_json(payload: &[u8]) -> bool {
    std::str::from_utf8(payload).is_ok_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok())
}

/// Whether a CloudEvents string may hold this: no control characters, no noncharacters.
fn is_allowed(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() || matches!(c, '\u{fdd0}'..='\u{fdef}') || u32::from(c) & 0xfffe == 0xfffe)
}

/// RFC 3339 in UTC with milliseconds.
fn rfc3339(time: SystemTime) -> String {
    let time = time.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + LAST_TIME);
    humantime::format_rfc3339_millis(time).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Headers;

    fn message(content_type: &str, payload: &[u8]) -> Envelope {
        Envelope {
            id: 7,
            message_id: "A234-1234-1234".into(),
            kind: "order.placed.v1".into(),
            destination: "orders".into(),
            key: None,
            payload: payload.to_vec(),
            content_type: content_type.into(),
            headers: Headers::new(),
            created_at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_522_949_420_089),
            deliver_at: None,
            attempt: 1,
        }
    }

    /// The structured document, read back.
    fn structured(message: &Envelope) -> serde_json::Value {
        let how = CloudEvents::structured("/shop");
        let content = of(message, Some(&how)).unwrap();
        assert_eq!(content.content_type, "application/cloudevents+json; charset=UTF-8");
        assert!(content.attributes.is_empty());
        serde_json::from_slice(&content.payload).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&content.payload)))
    }

    #[test]
    fn without_cloudevents_nothing_is_changed() {
        let m = message("text/plain", b"hello");
        let content = of(&m, None).unwrap();
        assert_eq!((&*content.content_type, &*content.payload), ("text/plain", &b"hello"[..]));
        assert!(content.attributes.is_empty() && matches!(content.payload, Cow::Borrowed(_)));
    }

    #[test]
    fn binary_mode_has_the_attributes_beside_an_untouched_payload() {
        let mut m = message("text/plain", b"hello");
        m.key = Some("customer-7".into());
        m.headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        let how = CloudEvents::binary("https://example.com/shop");
        let content = of(&m, Some(&how)).unwrap();
        let attributes: Vec<_> = content.attributes.iter().map(|(name, value)| (*name, &**value)).collect();
        let expected = [
            ("specversion", "1.0"),
            ("id", "A234-1234-1234"),
            ("source", "https://example.com/shop"),
            ("type", "order.placed.v1"),
            ("time", "2018-04-05T17:30:20.089Z"),
            ("partitionkey", "customer-7"),
        ];
        assert_eq!(attributes, expected);
        assert_eq!((&*content.content_type, &*content.payload), ("text/plain", &b"hello"[..]));
        assert!(matches!(content.payload, Cow::Borrowed(_)), "large payloads are not copied");

        m.kind.clear();
        let content = of(&m, Some(&how)).unwrap();
        assert!(content.attributes.contains(&("type", Cow::Borrowed("message"))));
    }

    #[test]
    fn structured_mode_is_one_document() {
        let mut m = message("application/json", br#"{"appinfoA":"abc","appinfoB":123}"#);
        m.key = Some("k\"1".into());
        m.headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        m.headers.insert("tracestate", "a=b");
        m.headers.insert("id", "forged");
        let expected = serde_json::json!({
            "specversion": "1.0", "id": "A234-1234-1234", "source": "/shop", "type": "order.placed.v1",
            "time": "2018-04-05T17:30:20.089Z", "datacontenttype": "application/json", "partitionkey": "k\"1",
            "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b",
            "data": { "appinfoA": "abc", "appinfoB": 123 },
        });
        assert_eq!(structured(&m), expected);
    }

    #[test]
    fn json_stays_json_byte_for_byte_and_the_rest_is_base64() {
        for (content_type, payload) in [
            ("application/json", "{\"n\": 123456789012345678901234567890.10, \"b\": 1, \"a\": 2, \"a\": 3}"),
            ("Application/JSON; charset=utf-8", "null"),
            ("application/vnd.order+json", "\"\\ud83d\\ude00 \u{e4}\""),
            ("text/json", " [1] "),
        ] {
            let m = message(content_type, payload.as_bytes());
            let how = CloudEvents::structured("/shop");
            let content = of(&m, Some(&how)).unwrap();
            let text = std::str::from_utf8(&content.payload).unwrap();
            assert!(text.ends_with(&format!(",\"data\":{payload}}}")), "{text}");
            assert!(structured(&m).get("data_base64").is_none());
        }
        for (content_type, payload, base64) in [
            ("application/json", &b"{\"broken\""[..], "eyJicm9rZW4i"),
            ("application/json", b"1}, \"id\":\"forged\"", "MX0sICJpZCI6ImZvcmdlZCI="),
            ("application/json", b"\"\xff\"", "Iv8i"),
            ("application/octet-stream", b"\x00\xff", "AP8="),
            ("application/xml", b"<much/>", "PG11Y2gvPg=="),
            ("application/jsonl", b"1", "MQ=="),
            ("json", b"1", "MQ=="),
        ] {
            let document = structured(&message(content_type, payload));
            assert_eq!((document["data_base64"].as_str(), document.get("data")), (Some(base64), None), "{content_type}");
        }
        let document = structured(&message("application/json", b""));
        assert_eq!((document.get("data_base64"), document.get("data")), (None, None));
    }

    #[test]
    fn text_that_cloudevents_cannot_hold_is_refused_and_a_broken_trace_left_out() {
        let how = CloudEvents::binary("/shop");
        for bad in ["a\nb", "\u{85}", "\u{fdd0}", "\u{1ffff}"] {
            let mut m = message("text/plain", b"");
            m.message_id = bad.into();
            assert!(of(&m, Some(&how)).unwrap_err().contains("\"id\""), "{bad:?}");
            let mut m = message("text/plain", b"");
            m.key = Some(bad.into());
            assert!(of(&m, Some(&how)).unwrap_err().contains("\"partitionkey\""), "{bad:?}");
            let mut m = message("text/plain", b"");
            m.headers.insert("traceparent", bad);
            assert_eq!(structured(&m).get("traceparent"), None);
        }
        let mut m = message("text/plain", b"");
        m.key = Some("Euro \u{20ac} \u{1f600}".into());
        assert_eq!(structured(&m)["partitionkey"], "Euro \u{20ac} \u{1f600}");
    }

    #[test]
    fn headers_that_stand_where_attributes_do_are_recognised() {
        let plain = Route::to("kafka:a");
        let events = Route::to("kafka:a").cloudevents(CloudEvents::default());
        assert!(is_attribute(&events, "ce-", "ce-id") && is_attribute(&events, "ce-", "CE-SpecVersion"));
        assert!(is_attribute(&events, "cloudEvents:", "cloudEvents:type") && is_attribute(&events, "ce_", "ce_partitionkey"));
        for other in ["ce-subject", "id", "ce_id", "ce-", "", "ä"] {
            assert!(!is_attribute(&events, "ce-", other), "{other}");
        }
        assert!(!is_attribute(&plain, "ce-", "ce-id"));
    }

    #[cfg(any(feature = "http", feature = "nats"))]
    #[test]
    fn values_are_percent_encoded_as_the_binding_says() {
        for (value, expected) in [
            ("Euro \u{20ac} \u{1f600}", "Euro%20%E2%82%AC%20%F0%9F%98%80"),
            ("a\"b%c", "a%22b%25c"),
            ("!~/:?#", "!~/:?#"),
            ("\u{7f}\n", "%7F%0A"),
        ] {
            assert_eq!(percent_encoded(value), expected);
        }
    }

    #[test]
    fn times_are_utc_with_milliseconds_and_never_panic() {
        let at = |ms: u64| rfc3339(SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_399_999), "2000-02-28T23:59:59.999Z");
        assert_eq!(at(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(999_999_999_999_999), "9999-12-31T23:59:59.000Z");
    }
}
