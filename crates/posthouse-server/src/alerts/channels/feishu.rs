//! Robots of Feishu and Lark groups (自定义机器人).

use std::time::Duration;

use serde_json::{Value, json};

use super::http::{code, hmac_sha256};
use crate::alerts::notice::{Letter, cut};

/// A request takes 20 KiB, escapes included.
const TEXT: usize = 8_000;

/// A title takes little room.
const TITLE: usize = 200;

/// A post: in its text parts nothing calls anybody, which `<at …>` does in a message of kind text.
pub(super) fn body(letter: &Letter, secret: Option<&str>, now: Duration) -> Value {
    let text = letter.text(TEXT);
    // A part without any text isn't taken.
    let part = |line: &str| json!([{ "tag": "text", "text": if line.is_empty() { " " } else { line } }]);
    let lines: Vec<Value> = text.lines().map(part).collect();
    let mut body = json!({
        "msg_type": "post",
        "content": { "post": { "zh_cn": { "title": cut(&letter.title, TITLE), "content": lines } } },
    });
    if let Some(secret) = secret {
        let timestamp = now.as_secs().to_string();
        body["sign"] = sign(secret, &timestamp).into();
        body["timestamp"] = timestamp.into();
    }
    body
}

/// The HMAC of nothing, with time and secret as its key.
fn sign(secret: &str, timestamp: &str) -> String {
    hmac_sha256(&format!("{timestamp}\n{secret}"), "")
}

/// It says 200 whatever comes of it.
pub(super) fn verdict(body: &[u8]) -> Result<(), String> {
    code(body, "code", "msg")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_other_implementations() {
        assert_eq!(sign("this is secret", "1700000000"), "OfGzRzoUICBOoc8wVra1e4A1hPfbZ9zqXozA8CWVUuY=");
        assert_eq!(verdict(br#"{"code":0,"msg":"success","data":{},"StatusCode":0}"#), Ok(()));
        assert!(verdict(br#"{"code":19021,"msg":"sign match fail"}"#).unwrap_err().contains("19021: sign match fail"));
    }
}
