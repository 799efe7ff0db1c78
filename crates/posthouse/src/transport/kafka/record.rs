//! What a record looks like.

use std::time::UNIX_EPOCH;

use rdkafka::message::{Header, OwnedHeaders};

use crate::transport::Delivery;
use crate::transport::content::{Content, is_attribute};

/// Prefix of CloudEvents attributes, as the CloudEvents binding for Kafka has it.
const CLOUDEVENTS: &str = "ce_";

/// What is wrong with the name of a topic, by the rule of Kafka's own clients and brokers.
pub(crate) fn check_topic(topic: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if topic.is_empty() || topic.len() > 249 || topic == "." || topic == ".." || !topic.chars().all(allowed) {
        return Err(format!(
            "{topic:?} is not a Kafka topic: 1 to 249 letters, digits, '.', '_' and '-', and neither \".\" nor \"..\""
        ));
    }
    Ok(())
}

/// Headers that messages can't set themselves.
fn is_reserved(name: &str, with_attributes: bool) -> bool {
    let starts = |prefix: &str| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    name.eq_ignore_ascii_case("content-type") || starts("posthouse-") || (with_attributes && starts(CLOUDEVENTS))
}

/// The headers of a record; [`Kafka`](super::Kafka) has the table.
pub(super) fn headers(delivery: &Delivery, content: &Content<'_>) -> OwnedHeaders {
    let message = delivery.message();
    let mut headers = OwnedHeaders::new_with_capacity(message.headers.len() + content.attributes.len() + 4);
    let mut add = |key: &str, value: &str| {
        let so_far = std::mem::take(&mut headers);
        headers = so_far.insert(Header { key, value: Some(value) });
    };
    for (name, value) in message.headers.iter() {
        if !is_reserved(name, !content.attributes.is_empty()) && !is_attribute(delivery.route(), CLOUDEVENTS, name) {
            add(name, value);
        }
    }
    for (name, value) in &content.attributes {
        add(&format!("{CLOUDEVENTS}{name}"), value);
    }
    if !content.content_type.is_empty() {
        add("content-type", &content.content_type);
    }
    add("posthouse-message-id", message.message_id.as_str());
    if !message.kind.is_empty() {
        add("posthouse-type", &message.kind);
    }
    add("posthouse-attempt", &message.attempt.to_string());
    headers
}

/// Milliseconds since 1970.
pub(super) fn timestamp(delivery: &Delivery) -> i64 {
    let since = delivery.message().created_at.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_millis().try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_are_checked_up_to_their_limits() {
        for good in ["a", "orders.v1_x-Y9", &"x".repeat(249), "..."] {
            assert_eq!(check_topic(good), Ok(()), "{good}");
        }
        for bad in ["", ".", "..", "a b", "a/b", "ä", "a:b", "a\0", &"x".repeat(250)] {
            assert!(check_topic(bad).is_err(), "{bad}");
        }
    }
}
