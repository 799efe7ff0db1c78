//! Makes the HTTP request of a delivery.

use std::borrow::Cow;
use std::time::SystemTime;

use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Method, Request, Url};

use super::address::Rule;
use crate::error::storable;
use crate::settings::CloudEventsMode;
use crate::transport::Delivery;
use crate::transport::content::{Content, content, is_attribute, percent_encoded};
use crate::webhook::Key;

/// What the HTTP binding of CloudEvents puts before the name of an attribute.
const ATTRIBUTE: &str = "ce-";

/// Headers that belong to the connection or frame the body: neither a message nor a route can set them.
const CONNECTION: [&str; 11] = [
    "connection",
    "content-length",
    "expect",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Headers that a route can set and a message can't: they decide who is spoken to, as whom, and what the body is.
const OF_THE_ROUTE: [&str; 3] = ["authorization", "content-type", "host"];

/// Headers of a signed request: a message can't set them, so that none passes for signed.
const SIGNATURE: [&str; 3] = ["webhook-id", "webhook-timestamp", "webhook-signature"];

/// The request, or why there can't be one. Takes the payload out of the delivery, which has no further use for it.
pub(super) fn build(client: &Client, rule: &Rule, delivery: &mut Delivery) -> Result<Request, String> {
    let url = Url::parse(delivery.address()).map_err(|e| {
        // The text itself is not shown: a URL that can't be parsed can't be freed of its secrets either.
        format!("the address is not a usable URL ({e}); correct the route's `to`, or the destination")
    })?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(format!("can't send to {}: URLs; use http:// or https://", url.scheme()));
    }
    rule.check_literal(url.host_str().unwrap_or_default()).map_err(|refused| refused.to_string())?;
    let method = &delivery.route.http.method;
    let method = match Method::from_bytes(method.as_bytes()) {
        Ok(Method::CONNECT) | Err(_) => {
            return Err(format!("{method:?} is not a method to send messages with; correct the route's http.method"));
        }
        Ok(method) => method,
    };
    // The builder turns user and password of the URL into an Authorization header, which the route's replaces.
    let mut request = client.request(method, url).build().map_err(|e| format!("can't make the request: {}", e.without_url()))?;
    let content = content(delivery)?;
    set_headers(request.headers_mut(), delivery, &content)?;
    let written = match content.payload {
        Cow::Owned(body) => Some(body),
        Cow::Borrowed(_) => None,
    };
    let body = written.unwrap_or_else(|| std::mem::take(&mut delivery.envelope.payload));
    if body.is_empty() && matches!(*request.method(), Method::POST | Method::PUT | Method::PATCH) {
        // Left out by the client for an empty body, without which some servers answer 411 (RFC 9110, 8.6).
        request.headers_mut().insert(CONTENT_LENGTH, 0.into());
    }
    let keys = &delivery.route.http.signing_keys;
    if !keys.is_empty() {
        sign(request.headers_mut(), keys, delivery.envelope.message_id.as_str(), &body)?;
    }
    *request.body_mut() = Some(body.into());
    Ok(request)
}

/// Later ones replace earlier ones of the same name: what identifies the message comes last.
fn set_headers(headers: &mut HeaderMap, delivery: &Delivery, content: &Content<'_>) -> Result<(), String> {
    let message = &delivery.envelope;
    let route = &delivery.route.http;

    headers.insert(CONTENT_TYPE, text("the message's content type", &content.content_type)?);
    for (name, value) in &route.headers {
        let what = || format!("the route's header {:?}", storable(name, 100));
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("{}: the name is not allowed in HTTP", what()))?;
        if CONNECTION.contains(&name.as_str()) {
            return Err(format!("{} belongs to the connection and can't be set; remove it", what()));
        }
        headers.insert(name, secret(&what(), value)?);
    }
    // A structured event says itself what its data is.
    let structured = delivery.route.cloudevents.as_ref().is_some_and(|c| c.mode == CloudEventsMode::Structured);
    if structured {
        headers.insert(CONTENT_TYPE, text("the content type", &content.content_type)?);
    } else if let Some(content_type) = &route.content_type {
        headers.insert(CONTENT_TYPE, text("the route's http.content_type", content_type)?);
    }
    if let Some(authorization) = &route.authorization {
        headers.insert(AUTHORIZATION, secret("the route's http.authorization", authorization)?);
    }
    for (name, value) in message.headers.iter() {
        let what = || format!("the message's header {:?}", storable(name, 100));
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("{}: the name is not allowed in HTTP", what()))?;
        if !is_ours(name.as_str()) && !is_attribute(&delivery.route, ATTRIBUTE, name.as_str()) {
            headers.insert(name, text(&what(), value)?);
        }
    }

    for (name, value) in &content.attributes {
        let what = format!("the CloudEvents attribute {name:?}");
        let name = HeaderName::from_bytes(format!("{ATTRIBUTE}{name}").as_bytes()).map_err(|e| format!("{what}: {e}"))?;
        headers.insert(name, text(&what, &percent_encoded(value))?);
    }

    let id = encoded_value(message.message_id.as_str());
    headers.insert("idempotency-key", id.clone());
    headers.insert("posthouse-message-id", id);
    headers.insert("posthouse-attempt", message.attempt.into());
    if !message.kind.is_empty() {
        headers.insert("posthouse-type", encoded_value(&message.kind));
    }
    if let Some(key) = &message.key {
        headers.insert("posthouse-key", encoded_value(key));
    }
    Ok(())
}

/// Signs what is sent now, with every key.
#[expect(clippy::disallowed_methods, reason = "the receiver compares with its own wall clock")]
fn sign(headers: &mut HeaderMap, keys: &[String], id: &str, body: &[u8]) -> Result<(), String> {
    // A full stop would leave open where the id ends in what is signed.
    let id = encoded(id).replace('.', "%2E");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let signatures =
        keys.iter().map(|key| Ok(Key::new(key).map_err(|e| format!("the route's http.signing_keys: {e}"))?.sign(&id, now, body)));
    let signatures = signatures.collect::<Result<Vec<_>, String>>()?.join(" ");
    headers.insert("webhook-id", text("the message id", &id)?);
    headers.insert("webhook-timestamp", now.into());
    headers.insert("webhook-signature", text("the signature", &signatures)?);
    Ok(())
}

/// Whether a message header of this (lower-case) name is left out.
fn is_ours(name: &str) -> bool {
    CONNECTION.contains(&name)
        || OF_THE_ROUTE.contains(&name)
        || SIGNATURE.contains(&name)
        || name == "idempotency-key"
        || name.starts_with("posthouse-")
}

/// A header value; the error names the header and never shows the value.
fn text(what: &str, value: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(value)
        .map_err(|_| format!("{what}: the value has characters that HTTP does not allow (control characters)"))
}

fn secret(what: &str, value: &str) -> Result<HeaderValue, String> {
    let mut value = text(what, value)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Percent-encodes all but visible ASCII, and `%` itself, so that decoding always gives the original.
fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn encoded_value(text: &str) -> HeaderValue {
    // Visible ASCII is always a valid value.
    HeaderValue::from_str(&encoded(text)).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// The URL as it may be shown: without user, password, query and fragment, and cut.
pub(super) fn shown(url: &Url) -> String {
    let port = url.port().map(|p| format!(":{p}")).unwrap_or_default();
    storable(&format!("{}://{}{port}{}", url.scheme(), url.host_str().unwrap_or_default(), url.path()), 300)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_text_is_valid_and_unambiguous() {
        for (text, expected) in [
            ("0198c0de-7000", "0198c0de-7000"),
            ("!~", "!~"),
            ("order 7", "order%207"),
            ("50%", "50%25"),
            ("%20", "%2520"),
            ("ä\n\u{7f}", "%C3%A4%0A%7F"),
        ] {
            assert_eq!(encoded(text), expected);
        }
    }

    #[test]
    fn shown_urls_keep_no_secrets() {
        let url = Url::parse("https://user:hunter2@example.com:8443/hooks/a?token=hunter2#hunter2").unwrap();
        assert_eq!(shown(&url), "https://example.com:8443/hooks/a");
        assert_eq!(shown(&Url::parse("http://[::1]/").unwrap()), "http://[::1]/");
    }
}
