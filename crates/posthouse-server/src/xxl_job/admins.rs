//! Calls to admins.

use std::fmt;
use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use reqwest::{Client, StatusCode, redirect};
use url::Url;

use super::wire::{APP_NAME, JSON, OK, Reply, TOKEN};
use crate::config::redact_url;

/// How long one admin may take.
const DEADLINE: Duration = Duration::from_secs(3);

/// An answer is a code and a sentence; what is longer is a page.
const LARGEST_ANSWER: usize = 64 << 10;

/// Admins, tried in their order. They share one database, so that one of them is enough.
#[derive(Debug)]
pub(super) struct Admins {
    all: Vec<Url>,
    client: Client,
    token: Option<HeaderValue>,
    app_name: HeaderValue,
}

/// Why an admin didn't do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failed {
    /// It did not answer, or it is not there.
    Away(String),
    /// It answered, and the answer was no.
    Refused(String),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Away(why) => write!(f, "can't be reached: {why}"),
            Self::Refused(why) => write!(f, "refuses: {why}"),
        }
    }
}

impl Admins {
    pub(super) fn new(all: Vec<Url>, token: &str, app_name: &str) -> Result<Self, String> {
        let header = |text: &str| HeaderValue::from_str(text).map_err(|e| e.to_string());
        let mut token = if token.is_empty() { None } else { Some(header(token)?) };
        if let Some(token) = &mut token {
            token.set_sensitive(true);
        }
        let client = Client::builder()
            .user_agent(concat!("posthouse/", env!("CARGO_PKG_VERSION")))
            // Where an admin sends a browser (to its login) nothing of ours is taken.
            .redirect(redirect::Policy::none())
            .no_proxy()
            .connect_timeout(DEADLINE)
            .timeout(DEADLINE)
            .build()
            .map_err(|e| format!("no HTTP client can be made: {}", causes(&e)))?;
        Ok(Self { all, client, token, app_name: header(app_name)? })
    }

    /// Asks one after another until one says yes; else what each of them said.
    pub(super) async fn first(&self, path: &str, body: &str) -> Result<(), Vec<(String, Failed)>> {
        let mut failed = Vec::new();
        for admin in &self.all {
            match self.call(admin, path, body).await {
                Ok(()) => return Ok(()),
                Err(why) => failed.push((redact_url(admin.as_str()), why)),
            }
        }
        Err(failed)
    }

    async fn call(&self, admin: &Url, path: &str, body: &str) -> Result<(), Failed> {
        let url = format!("{}/api/{path}", admin.as_str().trim_end_matches('/'));
        let mut request = self.client.post(url).header(CONTENT_TYPE, JSON).header(APP_NAME, &self.app_name);
        if let Some(token) = &self.token {
            request = request.header(TOKEN, token);
        }
        let mut response = request.body(body.to_owned()).send().await.map_err(|e| Failed::Away(causes(&e)))?;
        let status = response.status();
        let to = response.headers().get(LOCATION).and_then(|to| to.to_str().ok()).map(redact_url);
        let mut bytes = Vec::new();
        while let Some(part) = response.chunk().await.map_err(|e| Failed::Away(causes(&e)))? {
            if bytes.len() + part.len() > LARGEST_ANSWER {
                return Err(Failed::Refused(format!(
                    "it answers {status} with a large page: is the path of this address right?"
                )));
            }
            bytes.extend_from_slice(&part);
        }
        match serde_json::from_slice::<Reply>(&bytes) {
            Ok(reply) if reply.code == i64::from(OK) => Ok(()),
            Ok(reply) => Err(Failed::Refused(reply.msg.unwrap_or_else(|| format!("code {}", reply.code)))),
            Err(_)
                if matches!(status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT) =>
            {
                Err(Failed::Away(format!("it answers {status}")))
            }
            Err(_) => {
                let to = to.map(|to| format!(" to {to}")).unwrap_or_default();
                Err(Failed::Refused(format!("it answers {status}{to} and no result: is the path of this address right?")))
            }
        }
    }
}

/// What each admin said, for a log line.
pub(super) fn told(failed: &[(String, Failed)]) -> String {
    failed.iter().map(|(admin, why)| format!("{admin} {why}")).collect::<Vec<_>>().join("; ")
}

/// An error and what lies behind it; the address stands before it already.
fn causes(e: &reqwest::Error) -> String {
    if e.is_timeout() {
        return format!("no answer within {} s", DEADLINE.as_secs());
    }
    let mut last: &dyn std::error::Error = e;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
