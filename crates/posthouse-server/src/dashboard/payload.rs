//! Payloads and headers as pages show them.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use posthouse::store::{InboxDetail, MessageDetail};
use serde_json::{Map, Value};

use super::view::shown;
use crate::config::Config;
use crate::mask::Hidden;
use crate::ops::payload::{self, Form};
use crate::output;

/// A payload as a page shows it.
pub(super) struct Content {
    pub(super) kind: String,
    pub(super) size: String,
    pub(super) text: String,
    /// What is not as it was: cut, hidden, masked, no text.
    pub(super) notes: Vec<&'static str>,
}

/// Everything that was sent along.
pub(super) struct Sent {
    /// None: it isn't kept.
    pub(super) content: Option<Content>,
    pub(super) headers: Vec<(String, String)>,
    /// All of the payload may be seen.
    pub(super) whole: bool,
}

pub(super) fn of_message(config: &Config, message: &MessageDetail) -> Sent {
    let hidden = payload::hidden_of(config, &message.row.destination, &message.published_to);
    sent(&hidden, Some((&message.content_type, &message.payload)), message.headers.as_deref())
}

pub(super) fn of_received(config: &Config, received: &InboxDetail) -> Sent {
    let kind = received.content_type.as_deref().unwrap_or_default();
    let bytes = received.payload.as_deref().map(|bytes| (kind, bytes));
    sent(&config.masks.of_received(&received.row.consumer), bytes, received.headers.as_deref())
}

fn sent(hidden: &Hidden<'_>, payload: Option<(&str, &[u8])>, headers: Option<&str>) -> Sent {
    Sent {
        content: payload.map(|(kind, bytes)| content(hidden, kind, bytes)),
        headers: payload::headers(hidden, headers),
        whole: payload.is_some() && !hidden.payload(),
    }
}

fn content(hidden: &Hidden<'_>, kind: &str, bytes: &[u8]) -> Content {
    let told = payload::shown(hidden, bytes);
    let notes = [
        (told.form == Form::Hidden, "hidden by the configuration"),
        (told.form == Form::Hex, "not UTF-8, shown as bytes"),
        (told.masked && told.form != Form::Hidden, "some values are masked by the configuration"),
        (told.cut, "only its beginning is shown"),
    ];
    Content {
        kind: shown(kind),
        size: output::bytes(told.bytes as i64),
        text: told.text,
        notes: notes.into_iter().filter(|(so, _)| *so).map(|(_, note)| note).collect(),
    }
}

/// The trace that a W3C `traceparent` header names.
pub(super) fn trace(headers: Option<&str>) -> Option<String> {
    let map: Map<String, Value> = serde_json::from_str(headers?).ok()?;
    let (_, parent) = map.iter().find(|(name, _)| name.eq_ignore_ascii_case("traceparent"))?;
    let id = parent.as_str()?.split('-').nth(1)?;
    let valid = id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()) && id.bytes().any(|b| b != b'0');
    valid.then(|| id.to_ascii_lowercase())
}

/// Bytes as a file that no browser runs or shows.
pub(super) fn file(name: &str, bytes: Vec<u8>) -> Response {
    let kind = HeaderValue::from_static("application/octet-stream");
    let disposition = format!("attachment; filename=\"{name}.bin\"");
    ([(header::CONTENT_TYPE, kind)], [(header::CONTENT_DISPOSITION, disposition)], bytes).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_as_it_was_is_said() {
        let notes = |bytes: &[u8]| content(&Hidden::default(), "x", bytes).notes;
        assert_eq!(notes(b"{}"), [""; 0]);
        assert_eq!(notes(b"\xff"), ["not UTF-8, shown as bytes"]);
        assert_eq!(notes(&vec![b'a'; 1 << 20]), ["only its beginning is shown"]);
    }

    #[test]
    fn a_trace_is_known_by_its_header() {
        let of = |value: &str| trace(Some(&format!("{{\"Traceparent\":\"{value}\"}}")));
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        assert_eq!(of(&format!("00-{id}-00f067aa0ba902b7-01")).as_deref(), Some(id));
        for bad in ["", "00", "00-xyz-1-01", "00-00000000000000000000000000000000-00f067aa0ba902b7-01", "00-<script>-1-01"] {
            assert_eq!(of(bad), None, "{bad}");
        }
        assert_eq!(trace(None), None);
    }
}
