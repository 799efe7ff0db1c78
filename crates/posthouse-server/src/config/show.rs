//! `--print-config`: what is in effect, defaults included, without secrets.

use std::collections::BTreeSet;
use std::time::Duration;

use posthouse::{RetentionSettings, Route};
use serde_json::{Map, Value, json};

use super::redact::{self, REDACTED};
use crate::alerts::rules::Rule;

use super::{Config, DatabaseConfig, TransportConfig, Watched};

/// In days where it is some: a year is no number of months.
fn days(time: Duration) -> String {
    const DAY: u64 = 86_400;
    match time.as_secs() {
        secs if secs > 0 && secs.is_multiple_of(DAY) && time.subsec_nanos() == 0 => format!("{}days", secs / DAY),
        _ => humantime::format_duration(time).to_string(),
    }
}

impl Config {
    /// The effective configuration as one value, secrets redacted.
    pub(crate) fn shown(&self) -> Value {
        let databases: Map<_, _> = self.databases.iter().map(|(name, d)| (name.clone(), database(d))).collect();
        let mut transports: Map<_, _> = self.transports.iter().map(|(name, t)| (name.clone(), t.shown())).collect();
        for (name, watched) in &self.watch {
            transports[name]["watch"] = shown_watch(watched, self.transports.get(name).map(TransportConfig::kind));
        }
        let routes: Map<_, _> = self
            .routes
            .iter()
            .map(|(name, r)| {
                let mut shown = route(r);
                shown["to"] = redact::url(if r.to.is_empty() { name } else { &r.to }).into();
                (name.clone(), shown)
            })
            .collect();
        let adopted: Map<_, _> = self
            .adopted
            .iter()
            .map(|(name, mapping)| {
                let mapping = mapping.complete();
                let mut shown = json!(mapping);
                if let Some(destination) = &mapping.destination {
                    shown["destination"] = redact::url(destination).into();
                }
                (name.clone(), shown)
            })
            .collect();
        let mut relay = json!(self.relay);
        relay["default_route"] = route(&self.relay.default_route);
        if let Some(default) = relay["default_route"].as_object_mut() {
            default.remove("to");
        }
        let mut out = json!({ "databases": databases, "transports": transports, "routes": routes, "adopted": adopted, "relay": relay, "server": self.server });
        out["channels"] = self.channels.iter().map(|(name, c)| (name.clone(), c.shown())).collect::<Map<_, _>>().into();
        out["alerts"] = self.alerts.iter().map(Rule::shown).collect();
        out["server"]["alerts_retention"] = days(self.alerts_retention).into();
        if let Some(settings) = &self.retention {
            out["retention"] = retention(settings);
        }
        if !self.groups.is_empty() {
            out["groups"] = json!(self.groups);
        }
        if !self.written_masks.is_empty() {
            out["masks"] = json!(self.written_masks);
        }
        #[cfg(feature = "otlp")]
        if let Some(telemetry) = &self.telemetry {
            out["telemetry"] = telemetry.shown();
        }
        #[cfg(feature = "xxl-job")]
        if let Some(xxl_job) = &self.xxl_job {
            out["xxl_job"] = xxl_job.shown();
        }
        without_nulls(&mut out);
        out
    }

    /// [`shown`](Self::shown) as it would be written in the file.
    pub(crate) fn shown_toml(&self) -> String {
        toml::to_string(&self.shown()).unwrap_or_else(|e| format!("# can't be written as TOML: {e}\n"))
    }
}

/// What is watched, as it is written.
fn shown_watch(watched: &BTreeSet<Watched>, kind: Option<&str>) -> Value {
    let one = |Watched { name, group }: &Watched| match (group, kind) {
        (None, _) => json!(name),
        (Some(consumer), Some("nats")) => json!({ "stream": name, "consumers": [consumer] }),
        (Some(group), _) => json!({ "group": group, "topics": [name] }),
    };
    watched.iter().map(one).collect()
}

fn database(database: &DatabaseConfig) -> Value {
    let mut shown = json!(database);
    shown["url"] = redact::url(&database.url).into();
    if let Some(settings) = &database.retention {
        shown["retention"] = retention(settings);
    }
    shown
}

fn retention(settings: &RetentionSettings) -> Value {
    let mut shown = json!(settings);
    let s3 = &settings.s3;
    if let Some(endpoint) = &s3.endpoint {
        shown["s3"]["endpoint"] = redact::url(endpoint).into();
    }
    for (key, value) in [("access_key", &s3.access_key), ("secret_key", &s3.secret_key), ("session_token", &s3.session_token)] {
        if value.is_some() {
            shown["s3"][key] = REDACTED.into();
        }
    }
    shown
}

fn route(route: &Route) -> Value {
    let mut shown = json!(route);
    if route.http.authorization.is_some() {
        shown["http"]["authorization"] = REDACTED.into();
    }
    shown["http"]["headers"] = hidden(route.http.headers.keys());
    shown["http"]["signing_keys"] = vec![REDACTED; route.http.signing_keys.len()].into();
    shown["rabbitmq"]["headers"] = hidden(route.rabbitmq.headers.keys());
    shown
}

/// Names, without what they stand for.
pub(super) fn hidden<'n>(names: impl Iterator<Item = &'n String>) -> Value {
    names.map(|name| (name.clone(), Value::from(REDACTED))).collect::<Map<_, _>>().into()
}

/// TOML has no null: a setting that isn't set isn't there.
fn without_nulls(value: &mut Value) {
    if let Value::Object(map) = value {
        map.retain(|_, v| !v.is_null());
        map.values_mut().for_each(without_nulls);
    } else if let Value::Array(items) = value {
        items.iter_mut().for_each(without_nulls);
    }
}
