//! Payloads and headers, for people and for programs.

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::ops::payload::dump;
use crate::output::{self, clean, clean_lines};

/// How much of a payload is shown unless all of it is asked for.
const CUT: usize = 4 << 10;

/// What `--json` prints of a payload.
#[derive(Serialize)]
pub(crate) struct Document<'a> {
    payload: Payload<'a>,
    payload_encoding: &'static str,
    payload_bytes: usize,
    payload_cut: bool,
}

/// JSON goes along as it was written; Value would change the order of keys and large numbers.
#[derive(Serialize)]
#[serde(untagged)]
enum Payload<'a> {
    Json(&'a RawValue),
    Text(&'a str),
    Hex(String),
}

/// The payload as JSON if it is JSON, else as text, else as hex; cut unless `full`.
pub(crate) fn document(all: &[u8], full: bool) -> Document<'_> {
    let cut = if full { all.len() } else { all.len().min(CUT) };
    let shown = &all[..cut];
    let (payload_encoding, payload) = match (serde_json::from_slice(shown), whole_text(shown, cut < all.len())) {
        (Ok(raw), _) => ("json", Payload::Json(raw)),
        (_, Some(text)) => ("text", Payload::Text(text)),
        _ => ("hex", Payload::Hex(hex(shown))),
    };
    Document { payload, payload_encoding, payload_bytes: all.len(), payload_cut: cut < all.len() }
}

/// Text, even when the cut went through its last character.
fn whole_text(bytes: &[u8], cut: bool) -> Option<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(e) if cut && e.error_len().is_none() => std::str::from_utf8(&bytes[..e.valid_up_to()]).ok(),
        Err(_) => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Headers as they are stored: a JSON object.
pub(crate) fn say_headers(headers: &str) {
    output::say("\nheaders");
    match serde_json::from_str::<serde_json::Map<String, Value>>(headers) {
        Ok(map) => {
            for (name, value) in map {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                output::say(&format!("  {}: {}", clean(&name), clean(&value)));
            }
        }
        Err(_) => output::say(&format!("  {}", clean(headers))),
    }
}

pub(crate) fn say(content_type: &str, all: &[u8], full: bool) {
    output::say(&format!("\npayload ({}, {})", clean(content_type), output::bytes(all.len() as i64)));
    if all.is_empty() {
        return;
    }
    // JSON is laid out before it is cut, so that the beginning of a large document is readable too.
    let pretty = std::str::from_utf8(all).ok().and_then(output::pretty_json);
    let whole = pretty.as_deref().map_or(all, str::as_bytes);
    let cut = if full { whole.len() } else { whole.len().min(CUT) };
    let shown = &whole[..cut];
    match whole_text(shown, cut < whole.len()) {
        Some(text) => {
            let text = clean_lines(text);
            output::say(&text.split('\n').map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n"));
        }
        None => output::say(&dump(shown).split('\n').map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n")),
    }
    if cut < whole.len() {
        output::say(&format!("  … {} more; --full shows all", output::bytes((whole.len() - cut) as i64)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_inside_a_character_leaves_text() {
        assert_eq!(whole_text(&"ää".as_bytes()[..3], true), Some("ä"));
        assert_eq!(whole_text(&"ää".as_bytes()[..3], false), None);
        assert_eq!(whole_text(&[b'a', 0xff, b'b'], true), None);
    }

    #[test]
    fn binary_is_dumped_without_control_characters() {
        assert_eq!(dump(b"\x1b[2J\xffab"), format!("000000  {:<47}  .[2J.ab", "1b 5b 32 4a ff 61 62"));
    }
}
