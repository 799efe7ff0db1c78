//! Payloads and headers, shown safely.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use posthouse::store::{InboxDetail, MessageDetail};
use serde_json::{Map, Value};

use super::view::shown;
use crate::config::Config;
use crate::output::{self, clean_lines};

/// How much of a payload stands in a page, in bytes. The rest is in the file.
const CUT: usize = 64 << 10;

/// How much of bytes that are no text stands in a page.
const DUMP: usize = 4 << 10;

/// A payload as a page shows it.
pub(super) struct Content {
    pub(super) kind: String,
    pub(super) size: String,
    pub(super) text: String,
    /// What is not as it was: cut, hidden, masked, no text.
    pub(super) note: Option<String>,
}

/// A header as a page shows it.
pub(super) struct Header {
    pub(super) name: String,
    pub(super) value: String,
}

/// The payload of a message, and whether all of it may be seen.
pub(super) fn of_message(_config: &Config, message: &MessageDetail) -> (Content, bool) {
    (content(&message.content_type, &message.payload), true)
}

/// The payload of a received message, if it is still kept, and whether all of it may be seen.
pub(super) fn of_received(_config: &Config, received: &InboxDetail) -> (Option<Content>, bool) {
    let kind = received.content_type.as_deref().unwrap_or_default();
    (received.payload.as_deref().map(|bytes| content(kind, bytes)), true)
}

/// Bytes as text where they are text, JSON laid out; as a dump otherwise.
fn content(content_type: &str, bytes: &[u8]) -> Content {
    let mut out = Content { kind: shown(content_type), size: output::bytes(bytes.len() as i64), text: String::new(), note: None };
    match std::str::from_utf8(bytes) {
        Ok(text) => {
            let pretty = output::pretty_json(text);
            let text = pretty.as_deref().unwrap_or(text);
            let (start, rest) = cut(text);
            out.text = clean_lines(start);
            out.note = (rest > 0).then(|| format!("{} more, see the file", output::bytes(rest as i64)));
        }
        Err(_) => {
            let start = &bytes[..bytes.len().min(DUMP)];
            out.text = crate::commands::payload::dump(start);
            let rest = bytes.len() - start.len();
            let more = if rest > 0 { format!("; {} more, see the file", output::bytes(rest as i64)) } else { String::new() };
            out.note = Some(format!("not UTF-8, shown as bytes{more}"));
        }
    }
    out
}

/// The start that is shown, cut between characters, and how many bytes are left out.
fn cut(text: &str) -> (&str, usize) {
    let end = text.floor_char_boundary(CUT);
    (&text[..end], text.len() - end)
}

/// The headers of a message by name.
pub(super) fn headers(_config: &Config, message: &MessageDetail) -> Vec<Header> {
    message.headers.as_deref().map(parse).unwrap_or_default()
}

/// The headers of a received message by name.
pub(super) fn received_headers(_config: &Config, received: &InboxDetail) -> Vec<Header> {
    received.headers.as_deref().map(parse).unwrap_or_default()
}

/// Headers as they are stored: a JSON object.
fn parse(text: &str) -> Vec<Header> {
    let header = |(name, value): (String, Value)| Header {
        name: shown(&name),
        value: shown(&value.as_str().map_or_else(|| value.to_string(), str::to_owned)),
    };
    match serde_json::from_str::<Map<String, Value>>(text) {
        Ok(map) => map.into_iter().map(header).collect(),
        Err(_) => vec![Header { name: "(not an object)".into(), value: shown(text) }],
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
    fn anything_is_shown_without_what_steers() {
        let text = content("text/plain", "a\u{202e}b\n\0<script>".as_bytes());
        assert_eq!((text.text.as_str(), text.note), ("a\\u{202e}b\n\\x00<script>", None));
        assert_eq!(content("application/json", b"{\"a\":1.50}").text, "{\n  \"a\": 1.50\n}");
        let bytes = content("x", b"\xff<script>");
        assert!(bytes.text.contains("ff 3c 73") && bytes.note.unwrap().starts_with("not UTF-8"));
        let large = content("text/plain", "ä".repeat(CUT).as_bytes());
        assert_eq!((large.text.len(), large.note.as_deref()), (CUT, Some("64.0 KiB more, see the file")));
        assert!(content("x", &vec![0xff; 1 << 20]).text.len() < 8 * DUMP);
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
