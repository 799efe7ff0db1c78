//! What the channels over HTTP have in common: one POST of a JSON document.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use posthouse::webhook::Key;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Client, StatusCode, redirect};
use serde_json::Value;
use sha2::Sha256;
use url::Url;

use super::{NotTaken, dingtalk, feishu, slack, webhook, wecom};
use crate::alerts::notice::{Letter, Notice, cut};
use crate::config::{PostKind, PostSettings};
use crate::output::clean;

/// An answer is a few words; what is longer isn't read.
const ANSWER: usize = 16 << 10;

/// How much of an answer is told.
const TOLD: usize = 200;

/// The longest time that a channel may ask to be left alone for.
const LONGEST: Duration = Duration::from_secs(3600);

/// For all channels over HTTP.
pub(super) fn client() -> Result<Client, String> {
    Client::builder()
        .user_agent(concat!("posthouse/", env!("CARGO_PKG_VERSION")))
        // The address of a webhook is a secret, and is told to nobody else.
        .redirect(redirect::Policy::none())
        .no_proxy()
        .build()
        .map_err(|e| format!("no HTTP client can be made: {}", causes(&e)))
}

/// A channel over HTTP.
pub(super) struct Post {
    client: Client,
    url: Url,
    kind: PostKind,
    /// Of DingTalk and Feishu.
    secret: Option<String>,
    /// Of webhooks.
    keys: Vec<Key>,
    headers: HeaderMap,
}

impl std::fmt::Debug for Post {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Post").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl Post {
    pub(super) fn new(settings: &PostSettings, client: &Client) -> Result<Self, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in &settings.headers {
            let name = HeaderName::try_from(name.as_str()).map_err(|_| format!("{name:?} is no name of a header"))?;
            let mut value =
                HeaderValue::try_from(value.as_str()).map_err(|_| format!("the value of header {name} can't be sent"))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let keys = settings.signing_keys.iter().map(|key| Key::new(key)).collect::<Result<_, _>>().map_err(|e| e.to_string())?;
        let url = settings.url.clone();
        Ok(Self { client: client.clone(), url, kind: settings.kind, secret: settings.secret.clone(), keys, headers })
    }

    pub(super) async fn send(&self, notices: Vec<Notice>, template: Option<&str>) -> Result<(), NotTaken> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let secret = self.secret.as_deref();
        let mut url = self.url.clone();
        let mut headers = self.headers.clone();
        let letter = |notices| Letter::new(notices, template);
        let body = match self.kind {
            PostKind::Slack => slack::body(&letter(slack::escaped(notices))).to_string(),
            PostKind::DingTalk => {
                if let Some(secret) = secret {
                    dingtalk::sign(&mut url, secret, now);
                }
                dingtalk::body(&letter(notices)).to_string()
            }
            PostKind::Feishu => feishu::body(&letter(notices), secret, now).to_string(),
            PostKind::WeCom => wecom::body(&letter(notices)).to_string(),
            PostKind::Webhook => {
                let letter = letter(notices);
                let body = webhook::body(&letter).to_string();
                webhook::sign(&mut headers, &self.keys, &letter, now, body.as_bytes());
                body
            }
        };
        let request = self.client.post(url).header(CONTENT_TYPE, "application/json; charset=utf-8").headers(headers).body(body);
        let mut response = request.send().await.map_err(|e| NotTaken::because(causes(&e)))?;
        let (status, after) = (response.status(), after(response.headers()));
        let mut bytes = Vec::new();
        while let Some(part) = response.chunk().await.map_err(|e| NotTaken::because(causes(&e)))? {
            bytes.extend_from_slice(&part[..part.len().min(ANSWER - bytes.len())]);
            if bytes.len() == ANSWER {
                break;
            }
        }
        let verdict = match self.kind {
            PostKind::Slack | PostKind::Webhook => Ok(()),
            PostKind::DingTalk => dingtalk::verdict(&bytes),
            PostKind::Feishu => feishu::verdict(&bytes),
            PostKind::WeCom => wecom::verdict(&bytes),
        };
        match (status.is_success(), verdict) {
            (true, Ok(())) => Ok(()),
            (true, Err(why)) => Err(NotTaken { why, after }),
            (false, _) => Err(NotTaken { why: refused(status, &bytes), after }),
        }
    }
}

fn refused(status: StatusCode, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = cut(clean(text.trim()).as_ref(), TOLD);
    if text.is_empty() { format!("it answers {status}") } else { format!("it answers {status}: {text}") }
}

/// A code that isn't zero in an answer that says 200 all the same.
pub(super) fn code(body: &[u8], code: &str, message: &str) -> Result<(), String> {
    let Ok(answer) = serde_json::from_slice::<Value>(body) else {
        return Err(format!(
            "it answers something else than its own API does: {}",
            cut(clean(&String::from_utf8_lossy(body)).as_ref(), TOLD)
        ));
    };
    match answer[code].as_i64() {
        Some(0) => Ok(()),
        Some(number) => {
            Err(format!("{code} {number}: {}", cut(clean(answer[message].as_str().unwrap_or("no reason given")).as_ref(), TOLD)))
        }
        None => Err(format!("it answers without {code}: {}", cut(clean(&String::from_utf8_lossy(body)).as_ref(), TOLD))),
    }
}

/// Base64 of an HMAC with SHA-256.
pub(super) fn hmac_sha256(key: &str, text: &str) -> String {
    let mac = match Hmac::<Sha256>::new_from_slice(key.as_bytes()) {
        Ok(mac) => mac.chain_update(text),
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    BASE64.encode(mac.finalize().into_bytes())
}

fn after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST))
}

/// An error and what lies behind it, without the address.
fn causes(e: &reqwest::Error) -> String {
    let mut text = match () {
        () if e.is_connect() => "can't be reached".to_owned(),
        () if e.is_timeout() => "no answer in time".to_owned(),
        () => "the request failed".to_owned(),
    };
    let mut source = std::error::Error::source(e);
    while let Some(cause) = source {
        // Only the outermost error quotes the address.
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}
