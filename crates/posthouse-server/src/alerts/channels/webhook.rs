//! A webhook of one's own: a JSON document, signed as Standard Webhooks describes it.

use std::time::Duration;

use posthouse::webhook::Key;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::alerts::notice::Letter;

/// The text takes at most this many bytes.
const TEXT: usize = 64 << 10;

pub(super) fn body(letter: &Letter) -> Value {
    json!({
        "type": "posthouse.alert",
        "timestamp": letter.notices.last().map(|notice| notice.at.as_str()),
        "data": { "title": letter.title, "text": letter.text(TEXT), "alerts": letter.notices },
    })
}

/// The headers `webhook-id`, which is the same when the letter is sent again, `webhook-timestamp`, and with keys
/// `webhook-signature`.
pub(super) fn sign(headers: &mut HeaderMap, keys: &[Key], letter: &Letter, now: Duration, body: &[u8]) {
    let id = id(letter);
    let signatures: Vec<String> = keys.iter().map(|key| key.sign(&id, now.as_secs(), body)).collect();
    let all = [("webhook-id", id), ("webhook-timestamp", now.as_secs().to_string()), ("webhook-signature", signatures.join(" "))];
    for (name, value) in all.into_iter().filter(|(_, value)| !value.is_empty()) {
        // Digits, letters and Base64 are always a value.
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Identifies a letter by what is in it; holds no full stop.
pub(super) fn id(letter: &Letter) -> String {
    let ids: Vec<&str> = letter.notices.iter().map(|notice| notice.id.as_str()).collect();
    let hash = Sha256::digest(ids.join("\n"));
    let hex: String = hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("alert_{hex}")
}
