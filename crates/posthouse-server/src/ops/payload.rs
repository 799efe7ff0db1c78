//! Payloads and headers as pages and the API show them: masked, cut, and harmless whatever is in them.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::config::Config;
use crate::mask::{Hidden, MASKED};
use crate::output::{clean, clean_lines, pretty_json};

/// How much of a payload is shown.
pub(crate) const CUT: usize = 64 << 10;

/// How a payload is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Form {
    /// JSON, laid out.
    Json,
    /// Other text.
    Text,
    /// Offset, 16 bytes, and what of them is plain ASCII, per line.
    Hex,
    /// It is hidden.
    Hidden,
}

/// A payload as it may be shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Shown {
    pub(crate) form: Form,
    /// Without control characters other than line ends, and without what reorders text; HTML must still be escaped.
    pub(crate) text: String,
    /// Size of the payload in bytes.
    pub(crate) bytes: usize,
    /// Only its beginning is shown.
    pub(crate) cut: bool,
    /// Some values are masked.
    pub(crate) masked: bool,
}

/// What is hidden of a message with this effective destination, which was published to that one.
pub(crate) fn hidden_of<'c>(config: &'c Config, destination: &str, published_to: &str) -> Hidden<'c> {
    let lead =
        |name: &str| config.routes.get(name).map(|r| r.to.as_str()).filter(|to| !to.is_empty()).unwrap_or_default().to_owned();
    let leads = [lead(destination), lead(published_to)];
    config.masks.of_message(&[destination, published_to, &leads[0], &leads[1]])
}

/// A payload as it may be shown to anybody who may look.
pub(crate) fn shown(hidden: &Hidden<'_>, payload: &[u8]) -> Shown {
    let bytes = payload.len();
    let hidden_form = || Shown { form: Form::Hidden, text: String::new(), bytes, cut: false, masked: true };
    if hidden.all() {
        return hidden_form();
    }
    let masked = hidden.payload();
    let text = if masked {
        match hidden.masked(payload) {
            Some(text) => Some(text),
            None if payload.is_empty() => None,
            None => return hidden_form(),
        }
    } else {
        None
    };
    let text = text.as_deref().or_else(|| std::str::from_utf8(payload).ok());
    // JSON is laid out before it is cut, so that the beginning of a large document is readable too.
    let pretty = text.and_then(pretty_json);
    let (form, whole) = match (&pretty, text) {
        (Some(json), _) => (Form::Json, json.as_str()),
        (None, Some(text)) => (Form::Text, text),
        (None, None) => {
            let shown = &payload[..bytes.min(CUT / 4)];
            return Shown { form: Form::Hex, text: dump(shown), bytes, cut: shown.len() < bytes, masked };
        }
    };
    let end = (0..=whole.len().min(CUT)).rev().find(|at| whole.is_char_boundary(*at)).unwrap_or(0);
    Shown { form, text: clean_lines(&whole[..end]), bytes, cut: end < whole.len(), masked }
}

/// Headers as they may be shown: names and values, made harmless, in the order of their names.
pub(crate) fn headers(hidden: &Hidden<'_>, stored: Option<&str>) -> Vec<(String, String)> {
    let Some(stored) = stored else { return Vec::new() };
    let Ok(map) = serde_json::from_str::<Map<String, Value>>(stored) else {
        // Written past the library; whether a masked header is in it can't be told.
        let shown = if hidden.any() { MASKED.to_owned() } else { clean(stored).into_owned() };
        return vec![("(not an object)".into(), shown)];
    };
    let shown = |(name, value): (String, Value)| {
        let value = if hidden.header(&name) {
            MASKED.to_owned()
        } else {
            value.as_str().map_or_else(|| value.to_string(), str::to_owned)
        };
        (clean(&name).into_owned(), clean(&value).into_owned())
    };
    map.into_iter().map(shown).collect()
}

/// Offset, 16 bytes, and what of them is plain ASCII.
pub(crate) fn dump(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).enumerate().map(|(n, chunk)| {
        let hex: Vec<String> = chunk.iter().map(|b| format!("{b:02x}")).collect();
        let ascii: String = chunk.iter().map(|b| if (0x20..0x7f).contains(b) { char::from(*b) } else { '.' }).collect();
        format!("{:06x}  {:<47}  {ascii}", n * 16, hex.join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Mask, Masks, Path};

    fn plain(payload: &[u8]) -> Shown {
        shown(&Hidden::default(), payload)
    }

    #[test]
    fn every_payload_is_shown_harmlessly() {
        let json = plain(br#"{"b":1,"a":"<script>"}"#);
        assert_eq!((json.form, json.text.as_str()), (Form::Json, "{\n  \"b\": 1,\n  \"a\": \"<script>\"\n}"));
        let text = plain("a\u{202e}b\0\u{1b}[2J\nc".as_bytes());
        assert_eq!((text.form, text.text.as_str()), (Form::Text, "a\\u{202e}b\\x00\\x1b[2J\nc"));
        let binary = plain(b"\xff\x1b[2Jab");
        assert_eq!(binary.form, Form::Hex);
        assert!(binary.text.ends_with("..[2Jab"));
        let long = plain("ä".repeat(1 << 20).as_bytes());
        assert_eq!((long.form, long.bytes, long.cut, long.text.len()), (Form::Text, 2 << 20, true, CUT));
        assert!(plain(&vec![0xff; 1 << 20]).cut);
        assert_eq!((plain(b"").form, plain(b"").text.as_str()), (Form::Text, ""));
    }

    #[test]
    fn what_is_hidden_is_nowhere() {
        let masks = Masks(vec![Mask {
            paths: vec![Path::parse("$..pin").unwrap()],
            headers: vec!["authorization".into()],
            ..Mask::default()
        }]);
        let hidden = masks.of_message(&["d"]);
        let json = shown(&hidden, br#"{"pin":"7777","a":1}"#);
        assert_eq!((json.text.as_str(), json.masked), ("{\n  \"pin\": \"[masked]\",\n  \"a\": 1\n}", true));
        for unreadable in [&b"pin=7777"[..], b"\xff7777", b"{\"pin\":\"7777\""] {
            assert_eq!(shown(&hidden, unreadable).form, Form::Hidden);
            assert_eq!(shown(&hidden, unreadable).text, "");
        }
        let told = headers(&hidden, Some(r#"{"Authorization":"Bearer 7777","b":2}"#));
        assert_eq!(told, [("Authorization".to_owned(), MASKED.to_owned()), ("b".to_owned(), "2".to_owned())]);
        assert_eq!(headers(&hidden, Some("[\"7777\"]"))[0].1, MASKED);
    }
}
