//! `[xxl_job]`: the executor for an XXL-JOB admin.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value as Json, json};
use toml::{Table, Value};
use url::Url;

use super::problem::Problem;
use super::redact::{self, REDACTED};
use super::shape::Walk;

/// The token that the admin's own configuration file comes with: everybody knows it.
const WELL_KNOWN_TOKEN: &str = "default_token";

/// What an executor's name may take; the admin's own form allows no more either.
const LONGEST_NAME: usize = 64;

/// The shortest times that `log_retention` and `callback_retry` may be, and the longest.
const RETENTION: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(10 * 365 * 86_400));
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// `[xxl_job]`, checked.
#[derive(Clone)]
pub(crate) struct XxlJobConfig {
    /// Base addresses of admins, context path included, tried in this order.
    pub(crate) admins: Vec<Url>,
    /// The executor's name, by which the admin knows its group.
    pub(crate) app_name: String,
    /// What both sides must know. Empty: whoever reaches the address may start and stop runs.
    pub(crate) access_token: String,
    pub(crate) allow_anonymous: bool,
    pub(crate) listen: SocketAddr,
    /// How the admin reaches us; without it, the address that is listened on.
    pub(crate) advertise: Option<Url>,
    /// Where logs of runs and results that no admin has taken yet are kept.
    pub(crate) data_dir: PathBuf,
    /// How long the log of a run is kept.
    pub(crate) log_retention: Duration,
    /// How often a result that no admin took is told again.
    pub(crate) callback_retry: Duration,
}

impl std::fmt::Debug for XxlJobConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("XxlJobConfig").field("app_name", &self.app_name).field("listen", &self.listen).finish_non_exhaustive()
    }
}

impl XxlJobConfig {
    /// What only needs an admin, a name and a token.
    pub(crate) fn new() -> Self {
        Self {
            admins: Vec::new(),
            app_name: String::new(),
            access_token: String::new(),
            allow_anonymous: false,
            listen: SocketAddr::from(([127, 0, 0, 1], 9999)),
            advertise: None,
            data_dir: PathBuf::from("xxl-job"),
            log_retention: Duration::from_secs(30 * 86_400),
            callback_retry: Duration::from_secs(30),
        }
    }

    /// As it would be written in the file, without secrets.
    pub(super) fn shown(&self) -> Json {
        let time = |d: Duration| humantime::format_duration(d).to_string();
        json!({
            "admins": self.admins.iter().map(|a| redact::url(a.as_str())).collect::<Vec<_>>(),
            "app_name": self.app_name,
            "access_token": if self.access_token.is_empty() { "" } else { REDACTED },
            "allow_anonymous": self.allow_anonymous,
            "listen": self.listen,
            "advertise": self.advertise.as_ref().map(Url::as_str),
            "data_dir": self.data_dir,
            "log_retention": time(self.log_retention),
            "callback_retry": time(self.callback_retry),
        })
    }
}

/// The section, if there is one. Problems with it are told to `walk`.
pub(super) fn section(walk: &mut Walk<'_>, value: Option<Value>) -> Option<XxlJobConfig> {
    let Some(Value::Table(table)) = value else { return None };
    let mut out = XxlJobConfig::new();
    let mut section = Section { walk, table: &table };
    section.needed("admins", "admins = [\"http://127.0.0.1:8080/xxl-job-admin\"]");
    section.needed("app_name", "app_name = \"posthouse\"");
    if let Some(Value::Array(admins)) = table.get("admins") {
        if admins.is_empty() {
            section.wrong("admins", "names no admin", "admins = [\"http://127.0.0.1:8080/xxl-job-admin\"]");
        }
        for admin in admins.iter().filter_map(Value::as_str) {
            match address(admin) {
                Ok(admin) => out.admins.push(admin),
                Err(why) => section.wrong("admins", why, "admins = [\"http://127.0.0.1:8080/xxl-job-admin\"]"),
            }
        }
    }
    if let Some(name) = section.text("app_name") {
        let good = (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
        if !good {
            let reason = format!("must be 1 to {LONGEST_NAME} ASCII characters without spaces");
            section.wrong("app_name", reason, "app_name = \"posthouse\", as in the admin's executor group");
        }
        out.app_name = name;
    }
    section.token(&mut out);
    if let Some(listen) = section.text("listen") {
        match listen.parse() {
            Ok(listen) => out.listen = listen,
            Err(_) => section.wrong("listen", "must be an IP address and a port", "listen = \"127.0.0.1:9999\""),
        }
    }
    if let Some(advertised) = section.text("advertise") {
        match address(&advertised) {
            Ok(url) => out.advertise = Some(url),
            Err(why) => section.wrong("advertise", why, "advertise = \"http://posthouse.example:9999/\""),
        }
    } else if out.listen.ip().is_unspecified() && !section.told("advertise") {
        let reason = format!("is missing: the admin can't be given the address {}", out.listen.ip());
        section.missing("advertise", reason, "advertise = \"http://posthouse.example:9999/\", as the admin reaches this machine");
    }
    if let Some(dir) = section.text("data_dir") {
        if dir.is_empty() {
            section.wrong("data_dir", "names no directory", "data_dir = \"/var/lib/posthouse/xxl-job\"");
        }
        out.data_dir = PathBuf::from(dir);
    }
    section.time("log_retention", RETENTION, &mut out.log_retention);
    section.time("callback_retry", RETRY, &mut out.callback_retry);
    Some(out)
}

/// An address with room for a path below it.
fn address(text: &str) -> Result<Url, &'static str> {
    let Ok(url) = Url::parse(text) else { return Err("is no complete http:// or https:// URL") };
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !text.contains("://") {
        return Err("is no complete http:// or https:// URL");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("must end with a path: nothing may stand behind \"?\" or \"#\"");
    }
    Ok(url)
}

struct Section<'s, 'w> {
    walk: &'s mut Walk<'w>,
    table: &'s Table,
}

impl Section<'_, '_> {
    fn text(&self, key: &str) -> Option<String> {
        self.table.get(key).and_then(Value::as_str).map(str::to_owned)
    }

    fn wrong(&mut self, key: &str, reason: impl Into<String>, fix: &str) {
        let path = format!("xxl_job.{key}");
        let shown = self.walk.shown.get(&path).cloned();
        let problem = Problem::new(path, shown, reason);
        self.walk.problems.push(if fix.is_empty() { problem } else { problem.fix(fix) });
    }

    fn missing(&mut self, key: &str, reason: impl Into<String>, fix: &str) {
        self.walk.problems.push(Problem::new(format!("xxl_job.{key}"), None, reason).fix(fix));
    }

    /// Whether a key that isn't there was there, and wrong or mistyped: that has been told.
    fn told(&self, key: &str) -> bool {
        let path = format!("xxl_job.{key}");
        let mistyped = format!("{key:?}");
        self.walk.problems.iter().any(|p| p.path == path || p.path.starts_with("xxl_job.") && p.reason.contains(&mistyped))
    }

    fn needed(&mut self, key: &str, example: &str) {
        if !self.table.contains_key(key) && !self.told(key) {
            self.missing(key, "is missing", example);
        }
    }

    /// Who reaches an executor decides when messages are sent, so the door is locked unless somebody says that it is not.
    fn token(&mut self, out: &mut XxlJobConfig) {
        const FIX: &str = "access_token = \"${XXL_JOB_TOKEN}\", as in the admin's configuration; \
                           allow_anonymous = true if nobody else can reach this address";
        out.allow_anonymous = self.table.get("allow_anonymous").and_then(Value::as_bool).unwrap_or_default();
        let given = self.text("access_token");
        let doubtful = self.told("access_token") || self.told("allow_anonymous");
        out.access_token = given.clone().unwrap_or_default();
        if out.access_token.bytes().any(|b| !(b' '..=b'~').contains(&b)) || out.access_token.trim() != out.access_token {
            self.wrong("access_token", "goes into an HTTP header: must be ASCII, without spaces around it", FIX);
            return;
        }
        if out.allow_anonymous || doubtful {
            return;
        }
        match given.as_deref() {
            None => self.missing(
                "access_token",
                "is missing: without it everybody who reaches the executor can start and stop runs",
                FIX,
            ),
            Some("") => self.wrong("access_token", "is empty: everybody who reaches the executor could start and stop runs", FIX),
            Some(WELL_KNOWN_TOKEN) => {
                self.wrong("access_token", "is the one that the admin comes with, which everybody knows", FIX);
            }
            Some(_) => {}
        }
    }

    fn time(&mut self, key: &str, (low, high): (Duration, Duration), into: &mut Duration) {
        let Some(Ok(time)) = self.text(key).map(|text| humantime::parse_duration(&text)) else { return };
        if (low..=high).contains(&time) {
            *into = time;
        } else {
            let shown = humantime::format_duration;
            self.wrong(key, format!("must be {} to {}", shown(low), shown(high)), "");
        }
    }
}
