//! What a key may hold, and the walk over a file by the keys of `keys.rs`, so that every mistake is found at once and told in our
//! own words.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use super::expand::expand;
use super::keys::Keys;
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
                Shape::Table(keys) => match keys.iter().find(|(name, ..)| *name == key) {
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
                    Some((_, inner, ..)) => inner,
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
        } else if let Some(meant) = suggest(key, keys.iter().map(|(name, ..)| *name)) {
            self.doubtful.insert(meant.to_owned());
            Problem { reason: format!("unknown key; did you mean {meant:?}?"), ..problem }
        } else {
            let all: Vec<_> = keys.iter().map(|(name, ..)| *name).collect();
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
            let keys: Vec<&str> = keys.iter().map(|(name, ..)| *name).collect();
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
                    let keys: Vec<&str> = keys.iter().map(|(name, ..)| *name).collect();
                    format!("write one of {}, or a table with {}", words.join(", "), keys.join(", "))
                }
                Shape::Tables(keys) => {
                    let keys: Vec<&str> = keys.iter().map(|(name, ..)| *name).collect();
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
    use super::*;

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
