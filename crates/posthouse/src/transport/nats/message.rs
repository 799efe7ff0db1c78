//! Makes the NATS message of a delivery.

use std::borrow::Cow;

use async_nats::HeaderMap;
use async_nats::header::{HeaderName, HeaderValue, NATS_MESSAGE_ID};
use async_nats::jetstream::message::PublishMessage;

use crate::CloudEventsMode;
use crate::error::storable;
use crate::transport::Delivery;
use crate::transport::content::{content, is_attribute, percent_encoded};

/// What the NATS binding of CloudEvents puts before the name of an attribute.
const ATTRIBUTE: &str = "ce-";

/// Whether a message may be published to this subject.
pub(super) fn check_subject(subject: &str) -> Result<(), String> {
    let shown = storable(subject, 200);
    if subject.is_empty() || subject.split('.').any(str::is_empty) {
        return Err(format!(
            "{shown:?} is no subject: it has an empty part; write names with a full stop between them, as in nats:orders.created"
        ));
    }
    if subject.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(format!("{shown:?} is no subject: it has a space or a control character"));
    }
    if subject.contains(['*', '>']) {
        return Err(format!("{shown:?} is no subject to publish to: it has a wildcard (* or >)"));
    }
    // Whoever can write a destination could delete streams by it.
    let first = subject.split('.').next().unwrap_or_default();
    if first == "_INBOX" || first.starts_with('$') && first != "$KV" {
        return Err(format!("{shown:?} is a subject of the NATS server itself, which messages may not be sent to"));
    }
    Ok(())
}

/// The message, or why there can't be one. Takes the payload out of the delivery, which has no further use for it.
pub(super) fn build(delivery: &mut Delivery) -> Result<PublishMessage, String> {
    check_subject(delivery.address())?;
    let content = content(delivery)?;
    let message = delivery.message();
    let mut headers = HeaderMap::new();
    for (name, value) in message.headers.iter() {
        if is_ours(name) || is_attribute(delivery.route(), ATTRIBUTE, name) {
            continue;
        }
        let what = || format!("the message's header {:?}", storable(name, 100));
        let name: HeaderName = name.parse().map_err(|_| format!("{}: the name is not allowed in NATS", what()))?;
        headers.insert(name, value_of(&what(), value)?);
    }
    if !content.content_type.is_empty() {
        headers.insert("Content-Type", value_of("the message's content type", &content.content_type)?);
    }
    for (name, value) in &content.attributes {
        headers.insert(format!("{ATTRIBUTE}{name}").as_str(), percent_encoded(value));
    }
    // This binding, unlike others, has no other place for it.
    let binary = delivery.route().cloudevents.as_ref().is_some_and(|c| c.mode == CloudEventsMode::Binary);
    if binary && !content.content_type.is_empty() {
        headers.insert("ce-datacontenttype", percent_encoded(&content.content_type));
    }
    headers.insert(NATS_MESSAGE_ID, percent_encoded(message.message_id.as_str()));
    headers.insert("posthouse-attempt", message.attempt.to_string());
    if !message.kind.is_empty() {
        headers.insert("posthouse-type", percent_encoded(&message.kind));
    }
    if let Some(key) = &message.key {
        headers.insert("posthouse-key", percent_encoded(key));
    }
    let written = match content.payload {
        Cow::Owned(payload) => Some(payload),
        Cow::Borrowed(_) => None,
    };
    let payload = written.unwrap_or_else(|| std::mem::take(&mut delivery.envelope.payload));
    Ok(PublishMessage::build().headers(headers).payload(payload.into()))
}

/// Whether a message header of this name is left out. `Nats-…` headers tell the server what to do (`Nats-Rollup` empties a
/// stream), which is not for whoever may publish.
fn is_ours(name: &str) -> bool {
    let starts = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    starts("nats-") || starts("posthouse-") || name.eq_ignore_ascii_case("content-type")
}

/// A header value; the error names the header and never shows the value.
fn value_of(what: &str, value: &str) -> Result<HeaderValue, String> {
    value.parse().map_err(|_| format!("{what}: the value has a line break, which NATS does not allow"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_are_checked() {
        for good in ["orders", "orders.created", "a.b.c-d_e.ä", "$KV.bucket.key"] {
            assert_eq!(check_subject(good), Ok(()));
        }
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a b",
            "a\tb",
            "a\n",
            "a.*",
            "a.>",
            "*",
            "$JS.API.STREAM.DELETE.orders",
            "$SYS.a",
            "_INBOX.a",
        ] {
            assert!(check_subject(bad).unwrap_err().starts_with(&format!("{bad:?} is")), "{bad}");
        }
    }
}
