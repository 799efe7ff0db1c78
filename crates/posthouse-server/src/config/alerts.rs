//! `[[alerts]]`: changes of the rules that hold anyway, and rules beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use toml::{Table, Value};

use super::channels::ChannelConfig;
use super::groups::{among, database_of};
use super::problem::{Problem, join};
use super::shape::{Walk, suggest};
use super::{Config, DatabaseConfig};
use crate::alerts::channels::LOG;
use crate::alerts::rules::{Kind, Rule, Unit};

/// How long the history of alerts is kept.
pub(super) const RETENTION: Duration = Duration::from_secs(90 * 86_400);
const RETENTIONS: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(10 * 365 * 86_400));

/// How often a rule may be looked at.
const INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(3600));

/// The longest that `for` and `repeat` may be.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// Stands for all rules where one silences them.
pub(crate) const ALL: &str = "all";

/// `server.alerts_retention`.
pub(super) fn retention(walk: &mut Walk<'_>, file: &Table) -> Duration {
    let value = file.get("server").and_then(|server| server.get("alerts_retention")).and_then(Value::as_str);
    let Some(Ok(time)) = value.map(humantime::parse_duration) else { return RETENTION };
    if time < RETENTIONS.0 || time > RETENTIONS.1 {
        let path = "server.alerts_retention";
        let shown = walk.shown.get(path).cloned();
        walk.problems.push(Problem::new(path, shown, "must be 1h to 10 years").fix("alerts_retention = \"90d\""));
    }
    time
}

/// The rules in effect, those that are turned off included.
pub(super) fn section(
    walk: &mut Walk<'_>,
    value: Option<Value>,
    channels: &mut BTreeMap<String, ChannelConfig>,
    broken: &BTreeSet<String>,
    databases: &BTreeMap<String, DatabaseConfig>,
) -> Vec<Rule> {
    let told: Vec<String> =
        if channels.is_empty() && broken.is_empty() { vec![LOG.to_owned()] } else { channels.keys().cloned().collect() };
    channels.entry(LOG.to_owned()).or_insert_with(ChannelConfig::log);
    let items = match value {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    };
    let paths = std::mem::take(&mut walk.alerts);
    let mut written: Vec<Rule> = Vec::new();
    for (at, item) in paths.into_iter().zip(items) {
        let Value::Table(table) = item else { continue };
        let names = Names { channels, broken, databases };
        let Some(rule) = (Section { walk, at: &at, table: &table }).read(&names) else { continue };
        if written.iter().any(|other| other.name == rule.name) {
            let key = if table.contains_key("name") { "name" } else { "rule" };
            let path = join(&at, key);
            let reason = "another alert goes by this name";
            let shown = walk.shown.get(&path).cloned();
            walk.problems.push(Problem::new(path, shown, reason).fix("give it a name of its own: name = \"…\""));
            continue;
        }
        written.push(rule);
    }
    let missing = Kind::ALL.into_iter().filter(|kind| written.iter().all(|rule| rule.name != kind.name()));
    let mut rules: Vec<Rule> = missing.map(Rule::of).collect();
    rules.append(&mut written);
    for rule in &mut rules {
        if rule.channels.is_empty() {
            rule.channels.clone_from(&told);
        }
    }
    let place = |rule: &Rule| Kind::ALL.iter().position(|kind| *kind == rule.kind);
    rules.sort_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.name.cmp(&b.name)));
    rules
}

/// What a rule can name.
struct Names<'n> {
    channels: &'n BTreeMap<String, ChannelConfig>,
    broken: &'n BTreeSet<String>,
    databases: &'n BTreeMap<String, DatabaseConfig>,
}

struct Section<'s, 'w> {
    walk: &'s mut Walk<'w>,
    at: &'s str,
    table: &'s Table,
}

impl Section<'_, '_> {
    /// One `[[alerts]]`; None when it can't be told what it is about, which has been told.
    fn read(mut self, names: &Names<'_>) -> Option<Rule> {
        let kind = self.kind()?;
        let mut rule = Rule::of(kind);
        if let Some(name) = self.text("name") {
            self.name(kind, &name);
            rule.name = name;
        }
        let given = self.amount("threshold", kind.unit());
        if let Some(threshold) = given {
            rule.threshold = threshold;
            rule.recover = kind.recover(threshold);
            let sound = match kind.unit() {
                Unit::Share => threshold > 0.0 && threshold <= 1.0,
                Unit::Count(_) | Unit::Time => threshold > 0.0,
            };
            if !sound {
                let reason = if kind.unit() == Unit::Share { "must be more than 0 and at most 1" } else { "must be more than 0" };
                self.wrong("threshold", reason, "");
            }
        }
        if let Some(recover) = self.amount("recover", kind.unit()) {
            rule.recover = recover;
            let threshold = kind.unit().text(rule.threshold);
            if kind.little_is_bad() && recover < rule.threshold {
                self.wrong("recover", format!("must be at least the threshold ({threshold}), below which it fires"), "");
            } else if !kind.little_is_bad() && (recover > rule.threshold || recover <= 0.0) {
                self.wrong(
                    "recover",
                    format!("must be more than 0, and at most the threshold ({threshold}), from which on it fires"),
                    "",
                );
            }
        }
        self.time("interval", INTERVALS, &mut rule.interval);
        self.time("for", (Duration::ZERO, LONGEST), &mut rule.wait);
        self.time("repeat", (Duration::ZERO, LONGEST), &mut rule.repeat);
        if !rule.repeat.is_zero() && rule.repeat < rule.interval {
            let interval = humantime::format_duration(rule.interval);
            let key = if self.table.contains_key("repeat") { "repeat" } else { "interval" };
            self.wrong(key, format!("repeat must be at least the interval ({interval}), or 0s for never"), "");
        }
        rule.recovery = self.table.get("recovery").and_then(Value::as_bool).unwrap_or(rule.recovery);
        rule.enabled = self.table.get("enabled").and_then(Value::as_bool).unwrap_or(rule.enabled);
        rule.channels = self.channels(names);
        rule.databases = self.databases(names);
        for key in ["destination", "consumer", "queue"] {
            let Some(pattern) = self.text(key) else { continue };
            if kind.narrowed_by() == Some(key) {
                rule.only = Some(pattern);
            } else {
                let fix = kind.narrowed_by().map_or_else(|| "remove it".into(), |key| format!("this rule is narrowed by {key}"));
                self.wrong(key, format!("has no effect: the rule {} isn't about that", kind.name()), &fix);
            }
        }
        Some(rule)
    }

    fn text(&self, key: &str) -> Option<String> {
        self.table.get(key).and_then(Value::as_str).map(str::to_owned)
    }

    fn texts(&self, key: &str) -> Vec<String> {
        let items = self.table.get(key).and_then(Value::as_array).into_iter().flatten();
        items.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    fn wrong(&mut self, key: &str, reason: impl Into<String>, fix: &str) {
        let path = join(self.at, key);
        let shown = self.walk.shown.get(&path).cloned();
        let problem = Problem::new(path, shown, reason);
        self.walk.problems.push(if fix.is_empty() { problem } else { problem.fix(fix) });
    }

    fn kind(&mut self) -> Option<Kind> {
        let all = Kind::ALL.map(Kind::name);
        let fix = format!("the rules are {}", all.join(", "));
        let Some(name) = self.text("rule") else {
            let (path, below) = (join(self.at, "rule"), format!("{}.", self.at));
            let told = |p: &Problem| p.path == path || p.path.starts_with(&below) && p.reason.contains("\"rule\"");
            if !self.walk.problems.iter().any(told) {
                self.wrong("rule", "is missing", &fix);
            }
            return None;
        };
        let kind = Kind::named(&name);
        if kind.is_none() {
            match suggest(&name, all) {
                Some(meant) => self.wrong("rule", format!("there is no such rule; did you mean {meant:?}?"), &fix),
                None => self.wrong("rule", "there is no such rule", &fix),
            }
        }
        kind
    }

    fn name(&mut self, kind: Kind, name: &str) {
        if !(1..=64).contains(&name.len()) || name.contains(char::is_control) {
            self.wrong("name", "must have 1 to 64 bytes, and no control characters", "");
        } else if name == ALL {
            self.wrong("name", "stands for all rules where one silences them", "give it another name");
        } else if Kind::named(name).is_some_and(|other| other != kind) {
            self.wrong("name", "is that of another rule", "give it another name");
        }
    }

    /// A value in a rule's unit.
    fn amount(&mut self, key: &str, unit: Unit) -> Option<f64> {
        let value = match self.table.get(key)? {
            Value::Integer(n) => Ok(*n as f64),
            Value::Float(n) => Ok(*n),
            Value::String(text) => Err(text.clone()),
            _ => return None,
        };
        let found = match (unit, value) {
            (Unit::Time, Err(text)) => humantime::parse_duration(&text).ok().map(|time| time.as_secs_f64()),
            (Unit::Time, Ok(_)) => None,
            (_, Ok(number)) => Some(number),
            (_, Err(text)) => text.trim().parse().ok(),
        };
        let found = found.filter(|number| number.is_finite());
        if found.is_none() {
            match unit {
                Unit::Time => {
                    self.wrong(key, "must be a length of time in quotes, for this rule", "write \"500ms\", \"10s\", \"5m\"")
                }
                Unit::Share => self.wrong(key, "must be a number from 0 to 1, for this rule", "0.2 is a fifth"),
                Unit::Count(what) => self.wrong(key, format!("must be a number of {what}s, for this rule"), ""),
            }
        }
        found
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

    fn channels(&mut self, names: &Names<'_>) -> Vec<String> {
        let channels = self.texts("channels");
        let known: Vec<&str> = names.channels.keys().map(String::as_str).collect();
        for name in &channels {
            if known.contains(&name.as_str()) || names.broken.contains(name) {
                continue;
            }
            let meant = suggest(name, known.iter().copied()).map(|m| format!("; did you mean {m:?}?")).unwrap_or_default();
            let fix = format!("there are {}; others are added as [channels.NAME]", known.join(", "));
            self.wrong("channels", format!("there is no channel {name:?}{meant}"), &fix);
        }
        if self.table.contains_key("channels") && channels.is_empty() {
            self.wrong("channels", "names no channel", "enabled = false turns the rule off");
        }
        channels
    }

    fn databases(&mut self, names: &Names<'_>) -> Vec<String> {
        let databases = self.texts("databases");
        let mut known: Vec<String> = names.databases.keys().cloned().collect();
        known.extend(names.databases.iter().flat_map(|(name, d)| d.sources(name)).map(|(source, _)| source));
        known.dedup();
        for name in &databases {
            if known.contains(name) || self.walk.broken_databases.contains(name) {
                continue;
            }
            let meant = suggest(name, known.iter().map(String::as_str)).map(|m| format!("; did you mean {m:?}?"));
            let fix = format!("the databases are {}", known.join(", "));
            self.wrong("databases", format!("there is no database {name:?}{}", meant.unwrap_or_default()), &fix);
        }
        databases
    }
}

impl Config {
    /// The rules that are judged for a source. Queues belong to no database: they are judged for the first one.
    pub(crate) fn rules_of(&self, source: &str) -> Vec<Rule> {
        let about = |rule: &Rule, source: &str| among(&rule.databases, source) || among(&rule.databases, database_of(source));
        let sources = self.sources();
        let first = |rule: &Rule| sources.iter().map(|(name, _)| name.as_str()).find(|name| about(rule, name));
        let judged = |rule: &&Rule| {
            rule.enabled && if rule.kind == Kind::QueueDepth { first(rule) == Some(source) } else { about(rule, source) }
        };
        self.alerts.iter().filter(judged).cloned().collect()
    }
}
