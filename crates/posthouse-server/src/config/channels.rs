//! `[channels.NAME]`: ways to tell people about alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use lettre::message::Mailbox;
use posthouse::webhook::Key;
use serde_json::{Value as Json, json};
use toml::{Table, Value};
use url::Url;

use super::keys::{self, Keys};
use super::problem::{Problem, join};
use super::redact::REDACTED;
use super::shape::{Shape, Walk, suggest};
use super::show::hidden;
use crate::alerts::notice;

/// How long a channel may take, and the shortest and longest that can be asked for. A notice that was sent and couldn't be recorded
/// is sent again after a minute, so that it must be known by then.
const TIMEOUT: Duration = Duration::from_secs(10);
const TIMEOUTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(45));

/// One channel, checked.
#[derive(Debug, Clone)]
pub(crate) struct ChannelConfig {
    pub(crate) kind: ChannelKind,
    /// How each notice reads; None: the built-in text.
    pub(crate) template: Option<String>,
    pub(crate) timeout: Duration,
}

/// What a channel needs to know.
#[derive(Debug, Clone)]
pub(crate) enum ChannelKind {
    Log,
    Smtp(SmtpSettings),
    Post(PostSettings),
}

/// Channels that are one POST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PostKind {
    Webhook,
    Slack,
    DingTalk,
    Feishu,
    WeCom,
}

/// Of a channel over HTTP.
#[derive(Clone)]
pub(crate) struct PostSettings {
    pub(crate) kind: PostKind,
    /// A secret: whoever knows it can send.
    pub(crate) url: Url,
    /// What DingTalk and Feishu are signed with.
    pub(crate) secret: Option<String>,
    /// What webhooks are signed with.
    pub(crate) signing_keys: Vec<String>,
    pub(crate) headers: BTreeMap<String, String>,
}

impl std::fmt::Debug for PostSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PostSettings").field("kind", &self.kind).finish_non_exhaustive()
    }
}

/// Of a channel that sends mail.
#[derive(Clone)]
pub(crate) struct SmtpSettings {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) tls: SmtpTls,
    pub(crate) from: Mailbox,
    pub(crate) to: Vec<Mailbox>,
    pub(crate) login: Option<(String, String)>,
    pub(crate) ca_file: Option<String>,
}

impl std::fmt::Debug for SmtpSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SmtpSettings").field("host", &self.host).field("port", &self.port).finish_non_exhaustive()
    }
}

/// How a mail server is talked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SmtpTls {
    /// In the clear, which only this machine hears.
    None,
    /// Encrypted before anything is said that matters, or not at all.
    StartTls,
    /// Encrypted from the start.
    Tls,
}

impl SmtpTls {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::StartTls => "starttls",
            Self::Tls => "tls",
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::None => 25,
            Self::StartTls => 587,
            Self::Tls => 465,
        }
    }
}

impl PostKind {
    fn name(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Slack => "slack",
            Self::DingTalk => "dingtalk",
            Self::Feishu => "feishu",
            Self::WeCom => "wecom",
        }
    }
}

impl ChannelKind {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::Smtp(_) => "smtp",
            Self::Post(settings) => settings.kind.name(),
        }
    }
}

pub(super) const KINDS: [&str; 7] = ["webhook", "slack", "dingtalk", "feishu", "wecom", "smtp", "log"];

impl ChannelConfig {
    /// The one that there is where none is configured.
    pub(crate) fn log() -> Self {
        Self { kind: ChannelKind::Log, template: None, timeout: TIMEOUT }
    }

    /// As it would be written in the file, without secrets.
    pub(super) fn shown(&self) -> Json {
        let mut shown = match &self.kind {
            ChannelKind::Log => json!({}),
            ChannelKind::Smtp(s) => json!({
                "host": s.host,
                "port": s.port,
                "tls": s.tls.name(),
                "from": s.from.to_string(),
                "to": s.to.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "username": s.login.as_ref().map(|(name, _)| name),
                "password": s.login.as_ref().map(|_| REDACTED),
                "ca_file": s.ca_file,
            }),
            ChannelKind::Post(s) => json!({
                "url": format!("{}://{}/{REDACTED}", s.url.scheme(), s.url.host_str().unwrap_or_default()),
                "secret": s.secret.as_ref().map(|_| REDACTED),
                "signing_keys": (s.kind == PostKind::Webhook).then(|| vec![REDACTED; s.signing_keys.len()]),
                "headers": (s.kind == PostKind::Webhook).then(|| hidden(s.headers.keys())),
            }),
        };
        shown["kind"] = self.kind.name().into();
        shown["template"] = json!(self.template);
        shown["timeout"] = humantime::format_duration(self.timeout).to_string().into();
        shown
    }
}

/// The channels that are sound, and the names of those that aren't.
pub(super) fn section(walk: &mut Walk<'_>, value: Option<Value>) -> (BTreeMap<String, ChannelConfig>, BTreeSet<String>) {
    let (mut sound, mut broken) = (BTreeMap::new(), BTreeSet::new());
    let Some(Value::Table(tables)) = value else { return (sound, broken) };
    for (name, value) in tables {
        match one(walk, &name, value) {
            Some(channel) => {
                sound.insert(name, channel);
            }
            None => {
                broken.insert(name);
            }
        }
    }
    (sound, broken)
}

/// What the table of a channel of this kind may hold.
pub(super) fn keys_of(kind: &str) -> Keys {
    match kind {
        "webhook" => keys::WEBHOOK,
        "dingtalk" | "feishu" => keys::SIGNED,
        "smtp" => keys::SMTP,
        "log" => keys::LOG,
        _ => keys::PLAIN,
    }
}

/// One channel; None when what is wrong with it has been told.
fn one(walk: &mut Walk<'_>, name: &str, value: Value) -> Option<ChannelConfig> {
    let at = join("channels", name);
    let Value::Table(mut table) = value else {
        walk.problems.push(Problem::new(at, None, "must be a table").fix(format!("write [channels.{name}]")));
        return None;
    };
    if !(1..=64).contains(&name.len()) || name.contains(char::is_control) {
        walk.problems.push(Problem::new(&at, None, "the name must have 1 to 64 bytes, and no control characters"));
        return None;
    }
    let before = walk.problems.len();
    let kind = match table.get("kind") {
        Some(Value::String(kind)) if KINDS.contains(&kind.as_str()) => kind.clone(),
        given => {
            let path = join(&at, "kind");
            let shown = given.and_then(Value::as_str).map(|kind| format!("{kind:?}"));
            let meant = given.and_then(Value::as_str).and_then(|kind| suggest(kind, KINDS));
            let reason = match (given, meant) {
                (None, _) => "is missing".to_owned(),
                (_, Some(meant)) => format!("there is no such kind; did you mean {meant:?}?"),
                (_, None) => "there is no such kind".to_owned(),
            };
            walk.problems.push(Problem::new(path, shown, reason).fix(format!("the kinds are {}", KINDS.join(", "))));
            return None;
        }
    };
    walk.table(&at, &Shape::Table(keys_of(&kind)), &mut table);
    let mut section = Section { walk, at: &at, table: &table };
    let template = section.text("template");
    if let Some(why) = template.as_deref().and_then(notice::problem) {
        section.wrong("template", format!("can't be filled in: {why}"), "docs/alerts.md lists what it can name");
    }
    let timeout = section.timeout();
    let kind = match kind.as_str() {
        "log" => Some(ChannelKind::Log),
        "smtp" => section.smtp().map(ChannelKind::Smtp),
        kind => section.post(kind).map(ChannelKind::Post),
    };
    (walk.problems.len() == before).then_some(())?;
    Some(ChannelConfig { kind: kind?, template, timeout })
}

struct Section<'s, 'w> {
    walk: &'s mut Walk<'w>,
    at: &'s str,
    table: &'s Table,
}

impl Section<'_, '_> {
    fn text(&self, key: &str) -> Option<String> {
        self.table.get(key).and_then(Value::as_str).map(str::to_owned)
    }

    fn wrong(&mut self, key: &str, reason: impl Into<String>, fix: &str) {
        let path = join(self.at, key);
        let shown = self.walk.shown.get(&path).cloned();
        self.walk.problems.push(Problem::new(path, shown, reason).fix(fix));
    }

    /// A key that there must be; one that was wrong or mistyped has been told.
    fn needed(&mut self, key: &str, example: &str) -> Option<String> {
        let value = self.text(key);
        if value.is_none() {
            self.miss(key, example);
        }
        value
    }

    fn miss(&mut self, key: &str, example: &str) {
        let (path, below) = (join(self.at, key), format!("{}.", self.at));
        let mistyped = format!("{key:?}");
        let told = |p: &Problem| p.path == path || p.path.starts_with(&below) && p.reason.contains(&mistyped);
        if !self.walk.problems.iter().any(told) {
            self.walk.problems.push(Problem::new(path, None, "is missing").fix(example));
        }
    }

    fn timeout(&mut self) -> Duration {
        let Some(Ok(time)) = self.text("timeout").map(|text| humantime::parse_duration(&text)) else { return TIMEOUT };
        if time < TIMEOUTS.0 || time > TIMEOUTS.1 {
            let shown = humantime::format_duration;
            self.wrong("timeout", format!("must be {} to {}", shown(TIMEOUTS.0), shown(TIMEOUTS.1)), "timeout = \"10s\"");
        }
        time
    }

    fn post(&mut self, kind: &str) -> Option<PostSettings> {
        let (kind, example) = match kind {
            "slack" => (PostKind::Slack, "url = \"${SLACK_URL}\""),
            "dingtalk" => (PostKind::DingTalk, "url = \"${DINGTALK_URL}\""),
            "feishu" => (PostKind::Feishu, "url = \"${FEISHU_URL}\""),
            "wecom" => (PostKind::WeCom, "url = \"${WECOM_URL}\""),
            _ => (PostKind::Webhook, "url = \"https://host/path\""),
        };
        let url = self.needed("url", example)?;
        let Some(url) = Url::parse(&url).ok().filter(|u| matches!(u.scheme(), "http" | "https") && u.has_host()) else {
            self.wrong("url", "is no complete http:// or https:// URL", example);
            return None;
        };
        let signing_keys: Vec<String> = self
            .table
            .get("signing_keys")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        for key in &signing_keys {
            if let Err(e) = Key::new(key) {
                self.wrong("signing_keys", e.to_string(), "make one with: echo whsec_$(openssl rand -base64 32)");
            }
        }
        let mut headers = BTreeMap::new();
        for (name, value) in self.table.get("headers").and_then(Value::as_table).into_iter().flatten() {
            let value = value.as_str().unwrap_or_default();
            let sound = reqwest::header::HeaderName::try_from(name.as_str()).is_ok()
                && reqwest::header::HeaderValue::try_from(value).is_ok();
            if !sound {
                self.wrong(
                    &format!("headers.{name}"),
                    "can't be sent as a header of HTTP",
                    "headers = { Authorization = \"…\" }",
                );
            }
            headers.insert(name.clone(), value.to_owned());
        }
        let secret = self.text("secret").filter(|secret| !secret.is_empty());
        Some(PostSettings { kind, url, secret, signing_keys, headers })
    }

    fn smtp(&mut self) -> Option<SmtpSettings> {
        let host = self.needed("host", "host = \"mail.example.com\"");
        let tls = match self.text("tls").as_deref() {
            Some("tls") => SmtpTls::Tls,
            Some("none") => SmtpTls::None,
            _ => SmtpTls::StartTls,
        };
        if let Some(host) = &host {
            let here = host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
            if tls == SmtpTls::None && !here {
                let reason = "would send mail, and a password, for all in between to read; only to this machine";
                self.wrong("tls", reason, "tls = \"starttls\", or \"tls\"");
            }
        }
        let port = self.table.get("port").and_then(Value::as_integer).and_then(|port| u16::try_from(port).ok());
        let from = self.needed("from", "from = \"posthouse@example.com\"");
        let from = from.and_then(|text| self.mailbox("from", &text));
        let to: Vec<String> = self
            .table
            .get("to")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        if to.is_empty() {
            self.miss("to", "to = [\"ops@example.com\"]");
        }
        let to: Vec<Mailbox> = to.iter().filter_map(|text| self.mailbox("to", text)).collect();
        let login = match (self.text("username"), self.text("password")) {
            (Some(name), Some(password)) => Some((name, password)),
            (None, None) => None,
            (Some(_), None) => {
                self.miss("password", "password = \"${SMTP_PASSWORD}\"");
                None
            }
            (None, Some(_)) => {
                self.miss("username", "username = \"posthouse\"");
                None
            }
        };
        let ca_file = self.text("ca_file");
        Some(SmtpSettings { host: host?, port: port.unwrap_or(tls.port()), tls, from: from?, to, login, ca_file })
    }

    fn mailbox(&mut self, key: &str, text: &str) -> Option<Mailbox> {
        match text.parse() {
            Ok(mailbox) => Some(mailbox),
            Err(e) => {
                self.wrong(key, format!("{text:?} is no mail address: {e}"), "write name@host, or Name <name@host>");
                None
            }
        }
    }
}
