//! Robots of DingTalk groups (自定义机器人).

use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::http::{code, hmac_sha256};
use crate::alerts::notice::Letter;

/// A message takes 20 000 bytes, escapes included.
const TEXT: usize = 8_000;

/// Plain text, in which nothing from a message can be markup or call anybody.
pub(super) fn body(letter: &Letter) -> Value {
    json!({ "msgtype": "text", "text": { "content": letter.text(TEXT) } })
}

/// The time in milliseconds, and the HMAC of it and the secret with the secret, as parameters of the address.
pub(super) fn sign(url: &mut Url, secret: &str, now: Duration) {
    let timestamp = now.as_millis().to_string();
    let sign = hmac_sha256(secret, &format!("{timestamp}\n{secret}"));
    url.query_pairs_mut().append_pair("timestamp", &timestamp).append_pair("sign", &sign);
}

/// It says 200 whatever comes of it.
pub(super) fn verdict(body: &[u8]) -> Result<(), String> {
    code(body, "errcode", "errmsg")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_that_of_other_implementations() {
        let mut url = Url::parse("https://oapi.example/robot/send?access_token=x").unwrap();
        sign(&mut url, "this is secret", Duration::from_millis(1_700_000_000_000));
        let pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        assert_eq!(pairs[0], ("access_token".into(), "x".into()));
        assert_eq!(pairs[1], ("timestamp".into(), "1700000000000".into()));
        assert_eq!(pairs[2], ("sign".into(), "sSFWELbV2YwjdDQhWZwTcWlX5BWUx5J6TPpsZmuPii0=".into()));
        assert_eq!(verdict(br#"{"errcode":0,"errmsg":"ok"}"#), Ok(()));
        let refused = verdict(br#"{"errcode":310000,"errmsg":"sign not match"}"#).unwrap_err();
        assert!(refused.contains("310000") && refused.contains("sign not match"), "{refused}");
        assert!(verdict(b"<html>").is_err() && verdict(b"{}").is_err());
    }
}
