//! Reads a request, and hands it to the intake.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{OriginalUri, Request};
use axum::http::header::{CONTENT_LENGTH, HOST};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use futures_util::StreamExt;
use tokio::time::timeout;

use super::answer::{Reply, Waiting};
use crate::consumer::decode::Received;
use crate::consumer::intake::Intake;
use crate::inbox::Source;
use crate::webhook::{Refused, Verifier};

/// How long a request waits for a place: a moment, as its sender waits too.
const PLACE: Duration = Duration::from_secs(1);

/// The body must be there within this time.
const BODY: Duration = Duration::from_secs(30);

/// Where a message's id may be, the first one first. Of these only the first is signed.
const IDS: [&str; 3] = ["webhook-id", "posthouse-message-id", "idempotency-key"];

/// Headers that say nothing of the message, or that are nobody's business later.
const LEFT_OUT: [&str; 19] = [
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "webhook-signature",
];

/// Receives requests. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Receiver {
    intake: Intake,
    verifier: Option<Arc<Verifier>>,
    body_limit: usize,
}

impl Receiver {
    pub(super) fn new(intake: Intake, verifier: Option<Verifier>, body_limit: usize) -> Self {
        Self { intake, verifier: verifier.map(Arc::new), body_limit }
    }

    pub(super) async fn receive(self, request: Request) -> Reply {
        match self.take(request).await {
            Ok(reply) | Err(reply) => reply,
        }
    }

    async fn take(&self, request: Request) -> Result<Reply, Reply> {
        let (parts, body) = request.into_parts();
        // Whoever doesn't sign at all need not send a body.
        let signed = self.verifier.as_ref().map(|verifier| Ok((verifier, Signed::of(&parts.headers)?)));
        let signed = signed.transpose().map_err(Reply::NotBelieved)?;
        let body = match timeout(BODY, self.read(&parts.headers, body)).await {
            Ok(body) => body?,
            Err(_) => return Err(Reply::TooSlow),
        };
        if let Some((verifier, signed)) = signed {
            verifier.verify(signed.id, signed.timestamp, signed.signatures, &body).map_err(Reply::NotBelieved)?;
        }
        let Ok(place) = timeout(PLACE, self.intake.place()).await else { return Err(Reply::NoPlace) };
        let url = called(&parts);
        let incoming =
            received(&parts.headers, body).incoming(&self.intake.settings().id_from, Source::Http { url: url.clone() });
        let (waiting, told) = Waiting::new();
        // It is handled to its end there, also when this request is dropped because its sender has gone.
        self.intake.take(place, &url, incoming, waiting);
        told.await.map_err(|_| Reply::Ended)
    }

    async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Vec<u8>, Reply> {
        let limit = self.body_limit;
        let announced = headers.get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<usize>().ok());
        if announced.is_some_and(|bytes| bytes > limit) {
            return Err(Reply::TooLarge(limit));
        }
        let mut out = Vec::new();
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|_| Reply::BrokenOff)?;
            if chunk.len() > limit - out.len() {
                return Err(Reply::TooLarge(limit));
            }
            out.extend_from_slice(&chunk);
        }
        Ok(out)
    }
}

/// The headers of a signature.
#[derive(Debug, Clone, Copy)]
struct Signed<'h> {
    id: &'h str,
    timestamp: &'h str,
    signatures: &'h str,
}

impl<'h> Signed<'h> {
    fn of(headers: &'h HeaderMap) -> Result<Self, Refused> {
        // Of two it would be open which one is signed and which one used.
        let only = |name: &'static str| {
            let mut values = headers.get_all(name).iter();
            let only = values.next().filter(|_| values.next().is_none());
            only.and_then(|value| value.to_str().ok()).ok_or(Refused::Malformed(name))
        };
        Ok(Self { id: only("webhook-id")?, timestamp: only("webhook-timestamp")?, signatures: only("webhook-signature")? })
    }
}

fn received(headers: &HeaderMap, payload: Vec<u8>) -> Received {
    let mut received = Received { payload, encoded: true, ..Received::default() };
    if let Some(name) = IDS.into_iter().find(|name| headers.contains_key(*name)) {
        if headers.get_all(name).iter().count() > 1 {
            received.malformed = Some(format!("the header {name} came several times"));
        }
        received.message_id = headers.get(name).and_then(text);
    }
    let attempt = headers.get("posthouse-attempt").and_then(text).and_then(|attempt| attempt.parse::<u64>().ok());
    received.redelivered = attempt.is_some_and(|attempt| attempt > 1);
    for name in headers.keys().map(|name| name.as_str()).filter(|name| !LEFT_OUT.contains(name)) {
        let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        received.headers.push((name.to_owned(), values.join(&b", "[..])));
    }
    received
}

fn text(value: &HeaderValue) -> Option<String> {
    std::str::from_utf8(value.as_bytes()).ok().map(str::to_owned)
}

/// The address that was called: no scheme, as a proxy may have changed it; no query, as there may be secrets in it.
fn called(parts: &Parts) -> String {
    let path = parts.extensions.get::<OriginalUri>().map_or_else(|| parts.uri.path(), |uri| uri.path());
    let host = parts.headers.get(HOST).and_then(text).unwrap_or_default();
    format!("//{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inbox::Incoming;
    use crate::settings::IdFrom;

    fn incoming(pairs: &[(&'static str, &'static str)]) -> Incoming {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        received(&headers, Vec::new()).incoming(&IdFrom::Message, Source::Http { url: String::new() })
    }

    #[test]
    fn the_id_comes_from_the_signed_header_first() {
        let all = [
            ("ce-specversion", "1.0"),
            ("ce-id", "4"),
            ("ce-source", "/s"),
            ("idempotency-key", "3"),
            ("posthouse-message-id", "2"),
            ("webhook-id", "1%2E5%20%C3%A4"),
        ];
        let mut expected = ["/s 4", "3", "2", "1.5 ä"].into_iter();
        for n in 3..=6 {
            assert_eq!(incoming(&all[..n]).message_id.as_deref(), expected.next());
        }
        assert_eq!(incoming(&[("x", "y")]).message_id, None);
    }

    #[test]
    fn what_comes_twice_is_joined_and_of_two_ids_none_is_taken() {
        let twice = incoming(&[("x", "1"), ("x", "2"), ("webhook-id", "a")]);
        assert_eq!((twice.headers.get("x"), twice.malformed), (Some("1, 2"), None));
        assert!(incoming(&[("webhook-id", "a"), ("webhook-id", "b")]).malformed.unwrap().contains("webhook-id"));
    }

    #[test]
    fn secrets_and_the_connection_are_left_out() {
        let pairs: Vec<_> = LEFT_OUT.into_iter().map(|name| (name, "s3cret")).collect();
        assert!(incoming(&pairs).headers.is_empty());
    }

    #[test]
    fn only_a_repeated_attempt_counts_as_redelivered() {
        for (attempt, redelivered) in [("1", false), ("2", true), ("", false), ("x", false)] {
            assert_eq!(incoming(&[("posthouse-attempt", attempt)]).redelivered, redelivered, "{attempt}");
        }
    }
}
