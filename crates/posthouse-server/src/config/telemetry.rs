//! `[telemetry]`: metrics to an OpenTelemetry collector.

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value as Json, json};
use toml::{Table, Value};
use url::Url;

use super::problem::{Problem, join};
use super::redact;
use super::shape::Walk;
use super::show::hidden;

/// The shortest and the longest `interval` and `timeout`.
const INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));
const TIMEOUT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

const ENDPOINT: &str = "otlp_endpoint = \"http://127.0.0.1:4318\"";

/// `[telemetry]`, checked.
#[derive(Clone)]
pub(crate) struct TelemetryConfig {
    /// The base address of the collector, as it is written.
    pub(crate) endpoint: Url,
    /// How often metrics are sent.
    pub(crate) interval: Duration,
    /// How long the collector may take.
    pub(crate) timeout: Duration,
    pub(crate) headers: HeaderMap,
    /// Resource attributes.
    pub(crate) resource: BTreeMap<String, String>,
}

impl std::fmt::Debug for TelemetryConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Headers are secrets.
        f.debug_struct("TelemetryConfig").field("endpoint", &redact::url(self.endpoint.as_str())).finish_non_exhaustive()
    }
}

impl TelemetryConfig {
    /// As it would be written in the file, without secrets.
    pub(super) fn shown(&self) -> Json {
        let time = |d: Duration| humantime::format_duration(d).to_string();
        let names: Vec<String> = self.headers.keys().map(|name| name.as_str().to_owned()).collect();
        json!({
            "otlp_endpoint": redact::url(self.endpoint.as_str()),
            "interval": time(self.interval),
            "timeout": time(self.timeout),
            "headers": hidden(names.iter()),
            "resource": self.resource,
        })
    }
}

/// The section, if there is one. Problems with it are told to `walk`.
pub(super) fn section(walk: &mut Walk<'_>, value: Option<Value>) -> Option<TelemetryConfig> {
    let Some(Value::Table(table)) = value else { return None };
    let before = walk.problems.len();
    let interval = time(walk, &table, "interval", INTERVAL, Duration::from_secs(30));
    let timeout = time(walk, &table, "timeout", TIMEOUT, Duration::from_secs(5));
    if timeout > interval && walk.problems.len() == before {
        wrong(walk, "timeout", "must not be longer than interval", "lower timeout or raise interval");
    }
    let headers = headers(walk, &table);
    let resource = table.get("resource").and_then(Value::as_table);
    let resource = resource.into_iter().flatten().filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
    let resource = resource.collect();
    let endpoint = endpoint(walk, &table)?;
    Some(TelemetryConfig { endpoint, interval, timeout, headers, resource })
}

fn wrong(walk: &mut Walk<'_>, key: &str, reason: impl Into<String>, fix: &str) {
    let path = format!("telemetry.{key}");
    let shown = walk.shown.get(&path).cloned();
    let problem = Problem::new(path, shown, reason);
    walk.problems.push(if fix.is_empty() { problem } else { problem.fix(fix) });
}

fn endpoint(walk: &mut Walk<'_>, table: &Table) -> Option<Url> {
    let Some(text) = table.get("otlp_endpoint").and_then(Value::as_str) else {
        // A wrong or mistyped one has been told.
        if !walk.problems.iter().any(|p| p.path.starts_with("telemetry.")) {
            walk.problems.push(Problem::new("telemetry.otlp_endpoint", None, "is missing").fix(ENDPOINT));
        }
        return None;
    };
    let good = |url: &Url| matches!(url.scheme(), "http" | "https") && url.has_host() && text.contains("://");
    let Some(url) = Url::parse(text).ok().filter(good) else {
        wrong(walk, "otlp_endpoint", "is no complete http:// or https:// URL", ENDPOINT);
        return None;
    };
    if url.query().is_some() || url.fragment().is_some() {
        wrong(walk, "otlp_endpoint", "must end with a path: nothing may stand behind \"?\" or \"#\"", ENDPOINT);
        return None;
    }
    if url.port() == Some(4317) {
        let reason = "is the port for gRPC, and metrics are sent over HTTP";
        wrong(walk, "otlp_endpoint", reason, "name the collector's port for HTTP, 4318 unless configured otherwise");
        return None;
    }
    Some(url)
}

fn headers(walk: &mut Walk<'_>, table: &Table) -> HeaderMap {
    let mut out = HeaderMap::new();
    for (name, value) in table.get("headers").and_then(Value::as_table).into_iter().flatten() {
        let Some(value) = value.as_str() else { continue };
        let parsed = (HeaderName::try_from(name.as_str()), HeaderValue::from_str(value));
        match parsed {
            (Ok(name), Ok(mut value)) => {
                value.set_sensitive(true);
                out.insert(name, value);
            }
            (Err(_), _) => wrong(walk, &join("headers", name), "is no name that an HTTP header can have", ""),
            (_, Err(_)) => wrong(walk, &join("headers", name), "has characters that an HTTP header can't have", ""),
        }
    }
    out
}

fn time(walk: &mut Walk<'_>, table: &Table, key: &str, (low, high): (Duration, Duration), usual: Duration) -> Duration {
    let given = table.get(key).and_then(Value::as_str).and_then(|text| humantime::parse_duration(text).ok());
    let Some(time) = given else { return usual };
    if !(low..=high).contains(&time) {
        let shown = humantime::format_duration;
        wrong(walk, key, format!("must be {} to {}", shown(low), shown(high)), "");
    }
    time
}
