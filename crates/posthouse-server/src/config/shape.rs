//! Which keys there are and what each may hold, so that every mistake is found at once and told in our own words.
//!
//! Values are the library's types in the end; a test below keeps this list and those types together.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use super::expand::expand;
use super::problem::{Problem, join};
use super::redact::{self, REDACTED};
use super::watch::Watches;

/// What a key may hold.
#[derive(Debug)]
pub(super) enum Shape {
    Text,
    /// Text that is never shown.
    Secret,
    /// Texts that are never shown.
    Secrets,
    /// Text whose secret parts are never shown.
    Url,
    /// Texts whose secret parts are never shown.
    Urls,
    /// URLs with commas between them, in which every name before an `@` is a secret.
    Servers,
    /// Text, a number or true or false, kept as text and never shown.
    Property,
    /// Any value that JSON has too, never shown.
    Any,
    /// The same, shown.
    Free,
    Bool,
    Whole(i64, i64),
    Number,
    /// A number, or a length of time in quotes: which one, the key beside it decides.
    Amount,
    Duration,
    /// A length of time, or "never".
    Term,
    Texts,
    OneOf(&'static [&'static str]),
    Table(Keys),
    /// One of these words, or a table.
    WordOr(&'static [&'static str], Keys),
    /// Tables without names of their own: `[[groups]]` one below the other, or a list of `{ … }`.
    Tables(Keys),
    /// A table with names of the user's own.
    Named(&'static Shape),
}

type Keys = &'static [(&'static str, Shape)];

const U32: Shape = Shape::Whole(0, u32::MAX as i64);
const SIZE: Shape = Shape::Whole(0, i64::MAX);

const RETRY: Keys = &[("max_attempts", U32), ("base", Shape::Duration), ("factor", Shape::Number), ("cap", Shape::Duration)];
const HTTP_ROUTE: Keys = &[
    ("method", Shape::Text),
    ("content_type", Shape::Text),
    ("authorization", Shape::Secret),
    ("headers", Shape::Named(&Shape::Secret)),
    ("signing_keys", Shape::Secrets),
];
const CLOUDEVENTS: Keys =
    &[("mode", Shape::OneOf(&["binary", "structured"])), ("source", Shape::Text), ("default_type", Shape::Text)];
const RABBITMQ_ROUTE: Keys = &[
    ("persistent", Shape::Bool),
    ("priority", Shape::Whole(0, u8::MAX as i64)),
    ("expiration", Shape::Duration),
    ("app_id", Shape::Text),
    ("headers", Shape::Named(&Shape::Any)),
    ("declare", Shape::Bool),
    ("exchange_type", Shape::OneOf(&["topic", "direct", "fanout", "headers"])),
    ("queue", Shape::Text),
    ("queue_type", Shape::OneOf(&["classic", "quorum"])),
];
const ROUTE: Keys = &[
    ("to", Shape::Url),
    ("retry", Shape::Table(RETRY)),
    ("ordering", Shape::OneOf(&["strict", "pipelined", "none"])),
    ("on_exhausted", Shape::OneOf(&["block", "skip"])),
    ("concurrency", U32),
    ("rate", Shape::Number),
    ("cloudevents", Shape::Table(CLOUDEVENTS)),
    ("http", Shape::Table(HTTP_ROUTE)),
    ("rabbitmq", Shape::Table(RABBITMQ_ROUTE)),
];
const RELAY: Keys = &[
    ("instance", Shape::Text),
    ("lease", Shape::Duration),
    ("heartbeat", Shape::Duration),
    ("send_timeout", Shape::Duration),
    ("lease_margin", Shape::Duration),
    ("idle_poll", Shape::Duration),
    ("near_sweep", Shape::Duration),
    ("full_sweep", Shape::Duration),
    ("database_timeout", Shape::Duration),
    ("batch", U32),
    ("memory", SIZE),
    ("max_claims", U32),
    ("runs_retention", Shape::Duration),
    ("default_route", Shape::Table(ROUTE)),
];
const TRIGGER: Keys = &[("every", Shape::Duration), ("rate", Shape::Duration), ("cron", Shape::Text), ("tz", Shape::Text)];
const GROUP: Keys = &[
    ("name", Shape::Text),
    ("databases", Shape::Texts),
    ("tables", Shape::Texts),
    ("houses", Shape::Text),
    ("trigger", Shape::WordOr(&["continuous", "manual", "external"], TRIGGER)),
    ("limit", SIZE),
    ("concurrency", U32),
    ("budget", Shape::Duration),
    ("when_busy", Shape::OneOf(&["serial", "discard", "cover"])),
    ("misfire", Shape::OneOf(&["skip", "once"])),
    ("retries", U32),
    ("then", Shape::Text),
];
const ALERT: Keys = &[
    ("rule", Shape::Text),
    ("name", Shape::Text),
    ("enabled", Shape::Bool),
    ("threshold", Shape::Amount),
    ("recover", Shape::Amount),
    ("interval", Shape::Duration),
    ("for", Shape::Duration),
    ("repeat", Shape::Duration),
    ("recovery", Shape::Bool),
    ("channels", Shape::Texts),
    ("databases", Shape::Texts),
    ("destination", Shape::Text),
    ("consumer", Shape::Text),
    ("queue", Shape::Text),
];
pub(super) const HTTP: Shape = Shape::Table(&[
    ("kind", Shape::Text),
    ("allow_private", Shape::Bool),
    ("allow", Shape::Texts),
    ("response_limit", SIZE),
    ("connect_timeout", Shape::Duration),
    ("user_agent", Shape::Text),
]);
pub(super) const RABBITMQ: Shape = Shape::Table(&[
    ("kind", Shape::Text),
    ("url", Shape::Url),
    ("heartbeat", Shape::Duration),
    ("connect_timeout", Shape::Duration),
    ("connection_name", Shape::Text),
    ("ca_file", Shape::Text),
    ("watch", Shape::Texts),
]);
pub(super) const KAFKA: Shape = Shape::Table(&[
    ("kind", Shape::Text),
    ("brokers", Shape::Servers),
    ("properties", Shape::Named(&Shape::Property)),
    ("watch", Shape::Tables(&[("group", Shape::Text), ("topics", Shape::Texts)])),
]);
pub(super) const NATS: Shape = Shape::Table(&[
    ("kind", Shape::Text),
    ("url", Shape::Servers),
    ("credentials", Shape::Text),
    ("ca_file", Shape::Text),
    ("connect_timeout", Shape::Duration),
    ("watch", Shape::Tables(&[("stream", Shape::Text), ("consumers", Shape::Texts)])),
]);
const S3: Keys = &[
    ("endpoint", Shape::Url),
    ("region", Shape::Text),
    ("access_key", Shape::Secret),
    ("secret_key", Shape::Secret),
    ("session_token", Shape::Secret),
];
const RETENTION: Keys = &[
    ("sent", Shape::Term),
    ("receipts", Shape::Term),
    ("attempts", Shape::Term),
    ("dedup", Shape::Term),
    ("audit", Shape::Term),
    ("every", Shape::Duration),
    ("budget", Shape::Duration),
    ("archive", Shape::Text),
    ("format", Shape::OneOf(&["ndjson", "parquet"])),
    ("s3", Shape::Table(S3)),
];
const DATABASE: Shape = Shape::Table(&[
    ("url", Shape::Url),
    ("prefix", Shape::Text),
    ("tables", Shape::Texts),
    ("schema", Shape::Text),
    ("houses", Shape::Whole(1, posthouse::store::MAX_HOUSES as i64)),
    ("retention", Shape::Table(RETENTION)),
]);
const XXL_JOB: Keys = &[
    ("admins", Shape::Urls),
    ("app_name", Shape::Text),
    ("access_token", Shape::Secret),
    ("allow_anonymous", Shape::Bool),
    ("listen", Shape::Text),
    ("advertise", Shape::Url),
    ("data_dir", Shape::Text),
    ("log_retention", Shape::Duration),
    ("callback_retry", Shape::Duration),
];
const TELEMETRY: Keys = &[
    ("otlp_endpoint", Shape::Url),
    ("interval", Shape::Duration),
    ("timeout", Shape::Duration),
    ("headers", Shape::Named(&Shape::Secret)),
    ("resource", Shape::Named(&Shape::Text)),
];
const ADOPTED_STATE: Keys = &[
    ("column", Shape::Text),
    ("pending", Shape::Free),
    ("null", Shape::Bool),
    ("sending", Shape::Free),
    ("sent", Shape::Free),
    ("failed", Shape::Free),
    ("resend_failed", Shape::Bool),
];
const ADOPTED: Keys = &[
    ("preset", Shape::OneOf(&["producer_message", "local_task_message", "mq_state"])),
    ("databases", Shape::Texts),
    ("schema", Shape::Text),
    ("table", Shape::Text),
    ("id", Shape::Text),
    ("state", Shape::Table(ADOPTED_STATE)),
    ("message_id", Shape::Text),
    ("destination", Shape::Url),
    ("notify", Shape::Table(&[("type", Shape::Text), ("config", Shape::Text), ("transport", Shape::Text)])),
    ("key", Shape::Text),
    ("payload", Shape::Free),
    ("type", Shape::Text),
    ("content_type", Shape::Text),
    ("attempts", Shape::Text),
    ("max_attempts", Shape::Text),
    ("next_attempt", Shape::Text),
    ("error", Shape::Text),
    ("version", Shape::Text),
    ("created", Shape::Text),
    ("updated", Shape::Text),
    ("house", Shape::Text),
    ("unsent_after", Shape::Duration),
    ("stuck_after", Shape::Duration),
    ("retry", Shape::Table(RETRY)),
    ("on_exhausted", Shape::OneOf(&["block", "skip"])),
    ("max_claims", U32),
    ("batch", U32),
    ("concurrency", U32),
    ("lease", Shape::Duration),
    ("interval", Shape::Duration),
];
const SERVER: Keys = &[
    ("listen", Shape::Text),
    ("allow_public", Shape::Bool),
    ("token", Shape::Secret),
    ("viewer_token", Shape::Secret),
    ("metrics_token", Shape::Secret),
    ("session_key", Shape::Secret),
    ("session", Shape::Duration),
    ("trusted_proxy_header", Shape::Text),
    ("trusted_proxies", Shape::Texts),
    ("operators", Shape::Texts),
    ("hosts", Shape::Texts),
    ("trace_url", Shape::Url),
    ("alerts_retention", Shape::Duration),
];
const MASK: Keys = &[
    ("destinations", Shape::Texts),
    ("consumers", Shape::Texts),
    ("hide", Shape::Bool),
    ("paths", Shape::Texts),
    ("headers", Shape::Texts),
];
const ADOPTED_SHAPE: Shape = Shape::Table(ADOPTED);
const ROUTE_SHAPE: Shape = Shape::Table(ROUTE);
/// The whole file, but for transports: what they hold depends on their kind.
pub(super) const FILE: Shape = Shape::Table(&[
    ("databases", Shape::Named(&DATABASE)),
    ("transports", Shape::Named(&Shape::Table(&[]))),
    ("routes", Shape::Named(&ROUTE_SHAPE)),
    ("groups", Shape::Tables(GROUP)),
    ("adopted", Shape::Named(&ADOPTED_SHAPE)),
    ("alerts", Shape::Tables(ALERT)),
    ("channels", Shape::Named(&Shape::Table(&[]))),
    ("relay", Shape::Table(RELAY)),
    ("retention", Shape::Table(RETENTION)),
    ("server", Shape::Table(SERVER)),
    ("masks", Shape::Tables(MASK)),
    ("telemetry", Shape::Table(TELEMETRY)),
    ("xxl_job", Shape::Table(XXL_JOB)),
]);

/// Keys that people may know from the description of later versions.
const LATER: [&str; 1] = ["inbox"];

/// Goes through the file, expands variables, collects problems, and takes out what is wrong.
pub(super) struct Walk<'a> {
    pub(super) env: &'a dyn Fn(&str) -> Option<String>,
    pub(super) problems: Vec<Problem>,
    /// Every leaf that was there, as it may be shown.
    pub(super) shown: BTreeMap<String, String>,
    /// Names of keys that were wrong, and what they may have been meant to be: relations with them can't be judged.
    pub(super) doubtful: BTreeSet<String>,
    /// Names of transports that were wrong: routes to them can't be judged.
    pub(super) broken: BTreeSet<String>,
    /// Names of databases that were wrong: what names them can't be judged.
    pub(super) broken_databases: BTreeSet<String>,
    /// Where each of the groups is: by its name, or else by its number.
    pub(super) groups: Vec<String>,
    /// Where each of the alerts is: by its name or rule, or else by its number.
    pub(super) alerts: Vec<String>,
    /// What of brokers is looked at.
    pub(super) watch: Watches,
}

impl<'a> Walk<'a> {
    pub(super) fn new(env: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self {
            env,
            problems: Vec::new(),
            shown: BTreeMap::new(),
            doubtful: BTreeSet::new(),
            broken: BTreeSet::new(),
            broken_databases: BTreeSet::new(),
            groups: Vec::new(),
            alerts: Vec::new(),
            watch: Watches::new(),
        }
    }

    fn say(&mut self, problem: Problem, key: &str) {
        self.problems.push(problem);
        self.doubtful.insert(key.to_owned());
    }

    /// Checks a table against the keys it may have.
    pub(super) fn table(&mut self, path: &str, shape: &Shape, table: &mut Table) {
        let names: Vec<String> = table.keys().cloned().collect();
        for key in names {
            let at = join(path, &key);
            let inner = match shape {
                Shape::Named(inner) => inner,
                Shape::Table(keys) => match keys.iter().find(|(name, _)| *name == key) {
                    // `to` makes no sense where every destination brings its own address.
                    Some(_) if at == "relay.default_route.to" => {
                        self.say(
                            Problem::new(&at, None, "has no effect: a destination without a route is itself an address")
                                .fix("remove it, or add a [routes.\"name\"] with this \"to\""),
                            "to",
                        );
                        table.remove(&key);
                        continue;
                    }
                    Some((_, inner)) => inner,
                    None => {
                        self.unknown(path, &key, keys);
                        table.remove(&key);
                        continue;
                    }
                },
                _ => continue,
            };
            if path == "transports" || path == "channels" {
                continue;
            }
            if let Some(value) = table.get_mut(&key)
                && !self.value(&at, &key, inner, value)
            {
                table.remove(&key);
            }
        }
    }

    fn unknown(&mut self, path: &str, key: &str, keys: Keys) {
        let at = join(path, key);
        let general = if path.starts_with("databases.") { format!("databases.*.{key}") } else { at.clone() };
        let problem = Problem::new(&at, None, "");
        let problem = if LATER.contains(&general.as_str()) {
            Problem { reason: "not available in this version".into(), ..problem }.fix("remove it")
        } else if let Some(meant) = suggest(key, keys.iter().map(|(name, _)| *name)) {
            self.doubtful.insert(meant.to_owned());
            Problem { reason: format!("unknown key; did you mean {meant:?}?"), ..problem }
        } else {
            let all: Vec<_> = keys.iter().map(|(name, _)| *name).collect();
            Problem { reason: "unknown key".into(), ..problem }.fix(format!("the keys here are {}", all.join(", ")))
        };
        self.say(problem, key);
    }

    /// Checks each of several tables.
    fn tables(&mut self, at: &str, keys: Keys, items: &mut [Value]) {
        for (place, item) in items.iter_mut().enumerate() {
            let Value::Table(table) = item else { continue };
            let text = |key: &str| table.get(key).and_then(Value::as_str).filter(|name| !name.is_empty());
            let named = text("name").or_else(|| text("rule").filter(|_| at == "alerts")).map(|name| join(at, name));
            // Two of one name are told apart by their numbers.
            let taken = |path: &String| self.groups.contains(path) || self.alerts.contains(path);
            let path = named.filter(|path| !taken(path)).unwrap_or_else(|| format!("{at}[{place}]"));
            match at {
                "groups" => self.groups.push(path.clone()),
                "alerts" => self.alerts.push(path.clone()),
                _ => {}
            }
            self.table(&path, &Shape::Table(keys), table);
        }
    }

    /// Checks and expands one value; false when it is to be taken out.
    fn value(&mut self, at: &str, key: &str, shape: &Shape, value: &mut Value) -> bool {
        if let (Shape::Table(_) | Shape::Named(_), Value::Table(table)) = (shape, &mut *value) {
            self.table(at, shape, table);
            return true;
        }
        match (shape, &mut *value) {
            (Shape::WordOr(_, keys), Value::Table(table)) => {
                self.table(at, &Shape::Table(keys), table);
                return true;
            }
            (Shape::Tables(keys), Value::Array(items)) if items.iter().all(Value::is_table) => {
                self.tables(at, keys, items);
                return true;
            }
            _ => {}
        }
        let shown = show(shape, value);
        self.shown.insert(at.to_owned(), shown.clone());
        let mut good = true;
        for text in texts(value) {
            if !text.contains("${") {
                continue;
            }
            match expand(text, self.env) {
                Ok(expanded) => *text = expanded,
                Err(problems) => {
                    good = false;
                    for (reason, fix) in problems {
                        self.say(Problem::new(at, Some(shown.clone()), reason).fix(fix), key);
                    }
                }
            }
        }
        if !good {
            return false;
        }
        if shown.contains("${") {
            convert(shape, value);
        }
        match fits(shape, value) {
            Ok(()) => true,
            Err((reason, fix)) => {
                let fix = if matches!(shape, Shape::Tables(_)) { fix.replace("NAME", key) } else { fix };
                let problem = Problem::new(at, Some(shown), reason);
                self.say(if fix.is_empty() { problem } else { problem.fix(fix) }, key);
                false
            }
        }
    }
}

fn texts(value: &mut Value) -> Vec<&mut String> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(items) => items.iter_mut().flat_map(texts).collect(),
        Value::Table(table) => table.iter_mut().flat_map(|(_, inner)| texts(inner)).collect(),
        _ => Vec::new(),
    }
}

/// A value as it may be shown.
fn show(shape: &Shape, value: &Value) -> String {
    match (shape, value) {
        // A reference to a secret is none, and says which variable is meant.
        (Shape::Secret | Shape::Url | Shape::Servers | Shape::Property | Shape::Any, Value::String(text))
            if is_reference(text) =>
        {
            format!("{text:?}")
        }
        (Shape::Secrets, Value::Array(items)) if items.iter().all(|i| i.as_str().is_some_and(is_reference)) => value.to_string(),
        (Shape::Url, Value::String(text)) => format!("{:?}", redact::url(text)),
        (Shape::Urls, Value::Array(items)) if items.iter().all(Value::is_str) => {
            let shown = items.iter().filter_map(Value::as_str).map(|u| if is_reference(u) { u.into() } else { redact::url(u) });
            Value::Array(shown.map(Value::String).collect()).to_string()
        }
        (Shape::Servers, Value::String(text)) => format!("{:?}", redact::servers(text)),
        (Shape::Secret | Shape::Secrets | Shape::Property | Shape::Any, _) => REDACTED.into(),
        // Nobody knows what stands where a table should be: a URL with its password, perhaps.
        (Shape::Url | Shape::Urls | Shape::Servers | Shape::Table(_) | Shape::Named(_) | Shape::Tables(_), _) => REDACTED.into(),
        (_, Value::Table(_)) => "{…}".into(),
        (_, Value::String(text)) => format!("{text:?}"),
        (_, other) => other.to_string(),
    }
}

fn is_reference(text: &str) -> bool {
    text.starts_with("${") && text.ends_with('}') && text.matches(['{', '}', '$']).count() == 3 && !text.contains(":-")
}

/// The environment holds only text; what was made of a variable becomes what is wanted, if it can.
fn convert(shape: &Shape, value: &mut Value) {
    let Value::String(text) = value else { return };
    let text = text.trim();
    let converted = match shape {
        Shape::Whole(..) => text.parse().ok().map(Value::Integer),
        Shape::Number => text.parse().ok().map(Value::Float),
        Shape::Bool => text.parse().ok().map(Value::Boolean),
        _ => None,
    };
    if let Some(converted) = converted {
        *value = converted;
    }
}

fn fits(shape: &Shape, value: &mut Value) -> Result<(), (String, String)> {
    let wanted = match shape {
        Shape::Text | Shape::Secret | Shape::Url | Shape::Servers => "text in quotes",
        Shape::Bool => "true or false",
        Shape::Whole(..) => "a whole number",
        Shape::Number => "a number",
        Shape::Amount => "a number, or a length of time in quotes",
        Shape::Duration => "a length of time in quotes, such as \"500ms\", \"10s\", \"5m\"",
        Shape::Term => "a length of time in quotes, such as \"7d\", or \"never\"",
        Shape::Texts | Shape::Urls | Shape::Secrets => "a list of texts, such as [\"a\", \"b\"]",
        Shape::Property => "text, a number, or true or false",
        Shape::Any | Shape::Free => "text, a number, true or false, a list or a table",
        Shape::OneOf(_) => "one of the words below, in quotes",
        Shape::Table(_) | Shape::Named(_) => "a table",
        Shape::WordOr(..) => "one of the words below in quotes, or a table",
        Shape::Tables(_) => "tables",
    };
    match (shape, &mut *value) {
        (Shape::Text | Shape::Secret | Shape::Url | Shape::Servers | Shape::Property, Value::String(_))
        | (Shape::Bool, Value::Boolean(_))
        | (Shape::Amount, Value::Integer(_) | Value::Float(_) | Value::String(_)) => Ok(()),
        (Shape::Property, Value::Integer(_) | Value::Float(_) | Value::Boolean(_)) => {
            *value = Value::String(value.to_string());
            Ok(())
        }
        (Shape::Property, Value::Table(_)) => Err((
            format!("is a table, must be {wanted}"),
            "a name with dots in it stands in quotes: \"security.protocol\" = \"ssl\"".into(),
        )),
        (Shape::Any | Shape::Free, inner) => match no_json(inner) {
            None => Ok(()),
            Some(what) => Err((format!("is or holds {what}, must be {wanted}"), String::new())),
        },
        (Shape::Whole(low, high), Value::Integer(n)) => {
            if (low..=high).contains(&&*n) {
                Ok(())
            } else if *high == i64::MAX {
                Err((format!("must be at least {low}"), String::new()))
            } else {
                Err((format!("must be {low} to {high}"), String::new()))
            }
        }
        (Shape::Number, Value::Float(_)) => Ok(()),
        (Shape::Number, Value::Integer(n)) => {
            *value = Value::Float(*n as f64);
            Ok(())
        }
        (Shape::Term, Value::String(text)) if text == "never" => Ok(()),
        (Shape::Duration | Shape::Term, Value::String(text)) => match humantime::parse_duration(text) {
            Ok(_) => Ok(()),
            Err(e) => Err((
                format!("is no length of time: {e}"),
                match shape {
                    Shape::Term => "write a number and a unit, such as \"7d\", or \"never\"".into(),
                    _ => "write a number and a unit, such as \"500ms\", \"10s\", \"5m\"".into(),
                },
            )),
        },
        (Shape::Texts | Shape::Urls | Shape::Secrets, Value::Array(items)) if items.iter().all(Value::is_str) => Ok(()),
        (Shape::OneOf(words) | Shape::WordOr(words, _), Value::String(text)) if words.contains(&text.as_str()) => Ok(()),
        (Shape::WordOr(words, keys), Value::String(text)) => {
            let meant = suggest(text, words.iter().copied()).map(|w| format!("; did you mean {w:?}?")).unwrap_or_default();
            let keys: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
            Err((format!("must be one of {}, or a table with {}{meant}", words.join(", "), keys.join(", ")), String::new()))
        }
        (Shape::OneOf(words), Value::String(text)) => {
            let meant = suggest(text, words.iter().copied()).map(|w| format!("; did you mean {w:?}?")).unwrap_or_default();
            Err((format!("must be one of {}{meant}", words.join(", ")), String::new()))
        }
        (_, other) => {
            let fix = match shape {
                Shape::OneOf(words) => format!("write one of {}", words.join(", ")),
                Shape::WordOr(words, keys) => {
                    let keys: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
                    format!("write one of {}, or a table with {}", words.join(", "), keys.join(", "))
                }
                Shape::Tables(keys) => {
                    let keys: Vec<&str> = keys.iter().map(|(name, _)| *name).collect();
                    format!("write [[NAME]] above the keys of each, or a list of tables, with some of {}", keys.join(", "))
                }
                _ => String::new(),
            };
            Err((format!("is {}, must be {wanted}", kind(other)), fix))
        }
    }
}

/// What in a value JSON doesn't have.
fn no_json(value: &Value) -> Option<&'static str> {
    match value {
        Value::Datetime(_) => Some("a date"),
        Value::Float(n) if !n.is_finite() => Some("a number that is not finite"),
        Value::Array(items) => items.iter().find_map(no_json),
        Value::Table(table) => table.values().find_map(no_json),
        _ => None,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "text",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

/// The known name that is most like `name`, if one is near enough to have been meant.
pub(crate) fn suggest<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    known
        .into_iter()
        .map(|k| (strsim::osa_distance(&name.to_lowercase(), k), k))
        .filter(|(distance, k)| *distance <= 1.max(k.chars().count().min(name.chars().count()) / 3))
        .min()
        .map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use posthouse::transport::HttpSettings;
    use posthouse::{CloudEvents, Group, HttpRoute, RabbitMqRoute, RelaySettings, Retry, Route};
    use serde::Serialize;

    use super::*;

    fn same(settings: &impl Serialize, keys: Keys, own: &[&str]) {
        let json = serde_json::to_value(settings).unwrap();
        let theirs: BTreeSet<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let ours: BTreeSet<&str> = keys.iter().map(|(name, _)| *name).filter(|name| !own.contains(name)).collect();
        assert_eq!(ours, theirs);
    }

    #[test]
    fn the_keys_are_those_of_the_library() {
        same(&RelaySettings::default(), RELAY, &[]);
        same(&posthouse::Adopted::default(), ADOPTED, &[]);
        same(&posthouse::AdoptedState::default(), ADOPTED_STATE, &[]);
        same(&Route::default(), ROUTE, &[]);
        same(&Retry::default(), RETRY, &[]);
        same(&Group::default(), GROUP, &[]);
        same(&posthouse::RetentionSettings::default(), RETENTION, &[]);
        same(&posthouse::S3Settings::default(), S3, &[]);
        // How long alerts are kept is a setting of the whole.
        same(&super::super::ServerConfig::default(), SERVER, &["alerts_retention"]);
        same(&super::super::MaskConfig::default(), MASK, &[]);
        same(&HttpRoute::default(), HTTP_ROUTE, &[]);
        same(&CloudEvents::default(), CLOUDEVENTS, &[]);
        same(&RabbitMqRoute::default(), RABBITMQ_ROUTE, &[]);
        let transport = |settings: serde_json::Value, shape: Shape| {
            let Shape::Table(keys) = shape else { unreachable!() };
            same(&settings, keys, &["kind", "watch"]);
        };
        transport(serde_json::json!(HttpSettings::default()), HTTP);
        #[cfg(feature = "rabbitmq")]
        transport(serde_json::json!(posthouse::transport::RabbitMqSettings::default()), RABBITMQ);
        #[cfg(feature = "kafka")]
        transport(serde_json::json!(posthouse::transport::KafkaSettings::default()), KAFKA);
        #[cfg(feature = "nats")]
        transport(serde_json::json!(posthouse::transport::NatsSettings::default()), NATS);
    }

    #[test]
    fn near_names_are_suggested_and_far_ones_are_not() {
        let known = ["heartbeat", "lease", "lease_margin", "url"];
        assert_eq!(suggest("heartbeet", known), Some("heartbeat"));
        assert_eq!(suggest("Lease", known), Some("lease"));
        assert_eq!(suggest("ulr", known), Some("url"));
        assert_eq!(suggest("margin_of_lease", known), None);
        assert_eq!(suggest("xyz", known), None);
    }
}
