//! Robots of WeCom groups (企业微信群机器人). Whoever knows the address may send; there is no signature.

use serde_json::{Value, json};

use super::http::code;
use crate::alerts::notice::Letter;

/// A message of kind text takes 2048 bytes.
const TEXT: usize = 2_048;

/// Plain text, in which nothing from a message can be markup or call anybody.
pub(super) fn body(letter: &Letter) -> Value {
    json!({ "msgtype": "text", "text": { "content": letter.text(TEXT) } })
}

/// It says 200 whatever comes of it.
pub(super) fn verdict(body: &[u8]) -> Result<(), String> {
    code(body, "errcode", "errmsg")
}
