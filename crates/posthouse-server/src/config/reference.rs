//! What can be configured: every key with its type, default, limits and meaning, told from what a file is checked by.

use serde::Serialize;
use serde_json::{Value as Json, json};
use toml::{Table, Value};

use super::keys::{FILE, Keys};
use super::masks::MaskConfig;
use super::shape::Shape;
use super::{Config, channels, parse, transport};

/// What is the same for many keys, so that it stands once.
const SAME: [(&str, &str); 2] = [("relay.default_route", "`[routes.NAME]`"), ("databases.NAME.retention", "`[retention]`")];

/// A table of the file.
#[derive(Debug, Serialize)]
pub(crate) struct Section {
    /// As it is written in the file: `[routes.NAME]`.
    pub(crate) heading: String,
    pub(crate) about: &'static str,
    pub(crate) limits: &'static str,
    pub(crate) entries: Vec<Entry>,
}

/// A key of a table.
#[derive(Debug, Serialize)]
pub(crate) struct Entry {
    /// With the table: `routes.NAME.retry.base`.
    pub(crate) path: String,
    /// Within the table: `retry.base`.
    pub(crate) key: String,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Whether there has to be one.
    pub(crate) needed: bool,
    /// As it would be written.
    pub(crate) default: Option<String>,
    pub(crate) limits: &'static str,
    pub(crate) about: &'static str,
}

/// Every table of the file, in the order in which the program knows them. Kinds that this program was built without are left out.
pub(crate) fn sections() -> Vec<Section> {
    FILE.iter()
        .flat_map(|(name, shape, about, limits)| {
            let table = |kinds: &[&str], heading: String, keys: Keys| {
                let sample = sample(name, kinds.first().copied().unwrap_or_default());
                let defaults = defaults(name, &sample)?;
                let at = if matches!(shape, Shape::Named(_)) { format!("{name}.NAME") } else { (*name).to_owned() };
                let mut entries = Vec::new();
                rows(&at, "", keys, &sample, &defaults, &mut entries);
                Some(Section { heading, about, limits, entries })
            };
            let of_kinds = |kinds: &[&str], keys: Keys| {
                let all: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
                table(kinds, format!("[{name}.NAME] with kind = {}", all.join(" or ")), keys)
            };
            match (*name, shape) {
                ("transports", _) => transport::KINDS
                    .iter()
                    .filter_map(|kind| of_kinds(&[kind], transport::kind(kind).ok()?.keys))
                    .collect::<Vec<_>>(),
                ("channels", _) => [&["webhook"][..], &["slack", "wecom"], &["dingtalk", "feishu"], &["smtp"], &["log"]]
                    .iter()
                    .filter_map(|kinds| of_kinds(kinds, channels::keys_of(kinds[0])))
                    .collect(),
                (_, Shape::Named(Shape::Table(keys))) => table(&[], format!("[{name}.NAME]"), keys).into_iter().collect(),
                (_, Shape::Tables(keys)) => table(&[], format!("[[{name}]]"), keys).into_iter().collect(),
                (_, Shape::Table(keys)) => table(&[], format!("[{name}]"), keys).into_iter().collect(),
                _ => Vec::new(),
            }
        })
        .collect()
}

/// The smallest table that can be: with the keys without which it is refused, and none besides.
fn sample(name: &str, kind: &str) -> Table {
    let text = match (name, kind) {
        ("databases", _) => "url = \"postgres://user@host/db\"",
        ("routes", _) => "to = \"https://host/path\"",
        ("adopted", _) => {
            "table = \"job\"\nid = \"id\"\nstate = { column = \"state\", pending = [\"NEW\"], sent = \"DONE\" }\n\
             destination = \"https://host/path\"\npayload = \"body\""
        }
        ("alerts", _) => "rule = \"outbox_backlog\"",
        ("telemetry", _) => "otlp_endpoint = \"http://host:4318\"",
        ("xxl_job", _) => "admins = [\"http://host/xxl-job-admin\"]\napp_name = \"posthouse\"\naccess_token = \"secret\"",
        ("transports", "http") => "kind = \"http\"",
        ("transports", "rabbitmq") => "kind = \"rabbitmq\"\nurl = \"amqp://host\"",
        ("transports", "kafka") => "kind = \"kafka\"\nbrokers = \"host:9092\"",
        ("transports", "nats") => "kind = \"nats\"\nurl = \"nats://host\"",
        ("channels", "log") => "kind = \"log\"",
        ("channels", "smtp") => "kind = \"smtp\"\nhost = \"host\"\nfrom = \"a@host\"\nto = [\"b@host\"]",
        ("channels", kind) => {
            return [("kind", kind), ("url", "https://host/")].map(|(k, v)| (k.to_owned(), v.into())).into_iter().collect();
        }
        _ => "",
    };
    // Our own text, which a test reads.
    text.parse().unwrap_or_default()
}

/// A file with this table, under the name `name` where it needs one.
fn file(name: &str, table: &Table) -> Table {
    let of = |name: &str, inner: Value| Value::Table(Table::from_iter([(name.to_owned(), inner)]));
    let mut file = Table::from_iter([("databases".to_owned(), of("name", Value::Table(sample("databases", ""))))]);
    let inner = Value::Table(table.clone());
    let value = match FILE.iter().find(|(known, ..)| *known == name).map(|(_, shape, ..)| shape) {
        Some(Shape::Named(_)) => of("name", inner),
        Some(Shape::Tables(_)) => Value::Array(vec![inner]),
        _ => inner,
    };
    file.insert(name.to_owned(), value);
    file
}

/// What a table with only its needed keys comes to. None: this program can't have such a table.
fn defaults(name: &str, sample: &Table) -> Option<Json> {
    if name == "masks" {
        return Some(json!(MaskConfig::default()));
    }
    let mut sample = sample.clone();
    if name == "routes" {
        sample.insert("cloudevents".into(), Value::Table(Table::new()));
    }
    let config: Config = parse(file(name, &sample), &|_| None).ok()?;
    let mut shown = config.shown();
    Some(match name {
        // What all rules have alike.
        "alerts" => {
            let rules = shown["alerts"].as_array()?.clone();
            let mut alike = rules.first()?.clone();
            alike.as_object_mut()?.retain(|key, value| rules.iter().all(|rule| rule[key.as_str()] == *value));
            alike
        }
        "groups" => shown["groups"][0].take(),
        _ if matches!(FILE.iter().find(|(known, ..)| *known == name), Some((_, Shape::Named(_), ..))) => {
            shown[name]["name"].take()
        }
        _ => shown[name].take(),
    })
}

/// The keys of a table and of those in it.
fn rows(at: &str, within: &str, keys: Keys, sample: &Table, defaults: &Json, out: &mut Vec<Entry>) {
    for (name, shape, about, limits) in keys {
        let key = if within.is_empty() { (*name).to_owned() } else { format!("{within}.{name}") };
        let path = format!("{at}.{key}");
        let same = SAME.iter().find(|(same, _)| *same == path).map(|(_, of)| of);
        let default = defaults.get(name).and_then(written);
        let inner = match shape {
            Shape::Table(inner) | Shape::WordOr(_, inner) | Shape::Tables(inner) => Some(*inner),
            _ => None,
        };
        let kind = same.map_or_else(|| kind(shape), |of| format!("table, as {of}"));
        let needed = sample.contains_key(*name) && inner.is_none();
        out.push(Entry { path, key: key.clone(), kind, needed, default: default.filter(|_| !needed), limits, about });
        if let Some(inner) = inner.filter(|_| same.is_none()) {
            let below = sample.get(*name).and_then(Value::as_table).cloned().unwrap_or_default();
            rows(at, &key, inner, &below, defaults.get(name).unwrap_or(&Json::Null), out);
        }
    }
}

/// A default as it would be written in the file; None where there is nothing to write.
fn written(value: &Json) -> Option<String> {
    match value {
        Json::Null | Json::Object(_) => None,
        Json::String(text) => Some(format!("{text:?}")),
        other => Some(other.to_string()),
    }
}

/// What kind of value it is, for people.
fn kind(shape: &Shape) -> String {
    let words = |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    match shape {
        Shape::Text | Shape::Url | Shape::Servers => "text".into(),
        Shape::Secret => "secret".into(),
        Shape::Secrets => "list of secrets".into(),
        Shape::Urls | Shape::Texts => "list of texts".into(),
        Shape::Property => "secret: text, number, true or false".into(),
        Shape::Any => "secret: any value".into(),
        Shape::Free => "any value".into(),
        Shape::Bool => "true or false".into(),
        Shape::Whole(..) => "whole number".into(),
        Shape::Number => "number".into(),
        Shape::Amount => "number or time".into(),
        Shape::Duration | Shape::Term => "time".into(),
        Shape::OneOf(all) => words(all),
        Shape::WordOr(all, _) => format!("{}, or a table", words(all)),
        Shape::Table(_) => "table".into(),
        Shape::Tables(_) => "list of tables".into(),
        Shape::Named(inner) => format!("table of names, each {}", kind(inner)),
    }
}

/// Whether a key is meant by what somebody asks for: a path, or the beginning of one. `NAME` stands for any name.
pub(crate) fn meant(path: &str, asked: &str) -> bool {
    let mut path = path.split('.');
    asked.split('.').all(|part| path.next().is_some_and(|known| known == part || known == "NAME"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::problem::Problem;
    use super::*;

    /// Every table with the name of its first key in the file, and what its smallest form is.
    fn tables() -> Vec<(&'static str, Table, Section)> {
        let sections = sections();
        let kind = |section: &Section| section.heading.split('"').nth(1).unwrap_or_default().to_owned();
        let name =
            |section: &Section| FILE.iter().map(|(name, ..)| *name).find(|name| meant(&section.entries[0].path, name)).unwrap();
        sections.into_iter().map(|section| (name(&section), sample(name(&section), &kind(&section)), section)).collect()
    }

    fn set(table: &mut Table, key: &str, value: Option<Value>) {
        match key.split_once('.') {
            Some((first, rest)) => {
                let inner = table.entry(first).or_insert_with(|| Value::Table(Table::new()));
                if !inner.is_table() {
                    *inner = Value::Table(Table::new());
                }
                set(inner.as_table_mut().unwrap(), rest, value);
            }
            None => match value {
                Some(value) => drop(table.insert(key.to_owned(), value)),
                None => drop(table.remove(key)),
            },
        }
    }

    /// What is wrong about a key, with this value or without one.
    fn problems(name: &str, sample: &Table, key: &str, value: Option<Value>) -> Vec<Problem> {
        let mut table = sample.clone();
        set(&mut table, key, value);
        let all = parse(file(name, &table), &|_| None).err().unwrap_or_default();
        all.into_iter().filter(|problem| problem.path == key || problem.path.ends_with(&format!(".{key}"))).collect()
    }

    #[test]
    fn every_key_is_explained() {
        let sections = sections();
        for section in &sections {
            assert!(section.about.ends_with('.'), "{}: no sentence", section.heading);
            for entry in &section.entries {
                let about = entry.about;
                assert!(about.len() >= 5 && about.ends_with(['.', '…']), "{}: no sentence: {about:?}", entry.path);
                assert!(!about.contains('|') && !entry.limits.contains('|'), "{}: breaks the table", entry.path);
            }
        }
        // All tables, and all kinds where all are built in.
        for (name, ..) in FILE {
            assert!(
                sections.iter().any(|section| meant(&section.entries[0].path, name)) || cfg!(not(feature = "xxl-job")),
                "{name}"
            );
        }
    }

    #[test]
    fn needed_keys_are_needed_and_others_are_not() {
        for (name, sample, section) in tables() {
            if name != "masks" {
                assert!(parse(file(name, &sample), &|_| None).is_ok(), "{}: more is needed", section.heading);
            }
            for entry in section.entries.iter().filter(|entry| entry.needed) {
                assert!(!problems(name, &sample, &entry.key, None).is_empty(), "{} is not needed", entry.path);
            }
        }
    }

    /// The least and the most that are allowed, as values of the file, and what lies just beyond.
    fn bounds(shape: &Shape, limits: &str) -> Vec<(Value, Value)> {
        let first = limits.split([',', ';']).next().unwrap_or_default();
        let (low, high) = match first.split_once(" to ") {
            Some((low, high)) => (Some((low, true)), Some(high)),
            None => (
                first
                    .strip_prefix("at least ")
                    .map(|low| (low, true))
                    .or(first.strip_prefix("more than ").map(|low| (low, false))),
                first.strip_prefix("at most "),
            ),
        };
        let mut out = Vec::new();
        match shape {
            Shape::Duration | Shape::Term => {
                let time = |text: &str| humantime::parse_duration(text).unwrap_or_else(|e| panic!("{limits}: {e}"));
                let text = |time: Duration| Value::String(humantime::format_duration(time).to_string());
                let step = Duration::from_millis(1);
                if let Some((low, at)) = low {
                    out.push(if at {
                        (text(time(low)), text(time(low) - step))
                    } else {
                        (text(time(low) + step), text(time(low)))
                    });
                }
                out.extend(high.map(|high| (text(time(high)), text(time(high) + step))));
            }
            Shape::Whole(..) => {
                let number = |text: &str| text.parse::<i64>().unwrap_or_else(|e| panic!("{limits}: {e}"));
                out.extend(low.map(|(low, _)| (number(low).into(), (number(low) - 1).into())));
                out.extend(high.map(|high| (number(high).into(), (number(high) + 1).into())));
            }
            Shape::Number => {
                let number = |text: &str| text.parse::<f64>().unwrap_or_else(|e| panic!("{limits}: {e}"));
                if let Some((low, at)) = low {
                    let low = number(low);
                    out.push(if at { (low.into(), (low - 0.01).into()) } else { ((low + 0.01).into(), low.into()) });
                }
                out.extend(high.map(|high| (number(high).into(), (number(high) + 0.01).into())));
            }
            _ => {}
        }
        out
    }

    fn shape_of(keys: Keys, key: &str) -> Option<&'static Shape> {
        let (first, rest) = key.split_once('.').map_or((key, None), |(first, rest)| (first, Some(rest)));
        let (_, shape, ..) = keys.iter().find(|(name, ..)| *name == first)?;
        match (rest, shape) {
            (None, shape) => Some(shape),
            (Some(rest), Shape::Table(inner) | Shape::WordOr(_, inner)) => shape_of(inner, rest),
            _ => None,
        }
    }

    /// Keys whose limits depend on others, so that the last good value needs another one beside it.
    const TOGETHER: [(&str, &str, &str); 4] = [
        ("base", "retry.cap", "30days"),
        ("timeout", "interval", "1h"),
        ("repeat", "interval", "1s"),
        ("connect_timeout", "", ""),
    ];

    #[test]
    fn limits_are_kept() {
        let mut tried = 0;
        for (name, mut sample, section) in tables() {
            if name == "groups" {
                // A continuous one may not have most of them.
                sample.insert("trigger".into(), "manual".into());
            }
            let keys = match FILE.iter().find(|(known, ..)| *known == name).map(|(_, shape, ..)| shape) {
                _ if name == "transports" => transport::kind(section.heading.split('"').nth(1).unwrap()).ok().unwrap().keys,
                _ if name == "channels" => channels::keys_of(section.heading.split('"').nth(1).unwrap()),
                Some(Shape::Named(Shape::Table(keys)) | Shape::Table(keys) | Shape::Tables(keys)) => keys,
                _ => panic!("{name}"),
            };
            for entry in &section.entries {
                let Some(shape) = shape_of(keys, &entry.key) else { continue };
                for (last, beyond) in bounds(shape, entry.limits) {
                    tried += 1;
                    let mut sample = sample.clone();
                    let shown = (entry.path.as_str(), beyond.to_string());
                    assert!(!problems(name, &sample, &entry.key, Some(beyond)).is_empty(), "{shown:?} is allowed");
                    for (key, beside, value) in TOGETHER {
                        if entry.key.ends_with(key) && !beside.is_empty() && shape_of(keys, beside).is_some() {
                            set(&mut sample, beside, Some(value.into()));
                        }
                    }
                    let refused = problems(name, &sample, &entry.key, Some(last.clone()));
                    let others = |problem: &Problem| ["lease", "send_timeout"].iter().any(|other| problem.reason.contains(other));
                    assert!(refused.iter().all(others), "{}: {last} is refused: {refused:?}", entry.path);
                }
            }
        }
        assert!(tried > 60, "only {tried} limits were tried");
    }

    #[test]
    fn a_key_is_found_by_its_path() {
        assert!(meant("routes.NAME.retry.base", "routes.orders.retry"));
        assert!(meant("relay.lease", "relay.lease") && !meant("relay.lease_margin", "relay.lease"));
        assert!(!meant("relay.lease", "relay.lease.x"));
    }
}
