//! `[[groups]]`: sets of houses with a trigger of their own.

use std::collections::BTreeMap;

use posthouse::schedule::time_zones;
use posthouse::{Group, Houses, Trigger};
use toml::{Table, Value};

use super::problem::{Problem, join};
use super::shape::{Walk, suggest};
use super::{Config, DatabaseConfig, typed};

/// One `[[groups]]`.
#[derive(Debug)]
pub(super) struct Written {
    /// Where it is in the file.
    pub(super) at: String,
    /// Its name, if it has one, whatever else is wrong with it.
    name: Option<String>,
    /// None: something is wrong with it, and has been told.
    pub(super) group: Option<Group>,
}

/// Reads what the walk has left.
pub(super) fn read(walk: &mut Walk<'_>, value: Option<Value>) -> Vec<Written> {
    let Some(Value::Array(items)) = value else { return Vec::new() };
    let several = items.len() > 1;
    let paths = std::mem::take(&mut walk.groups);
    let mut out = Vec::new();
    for (at, item) in paths.into_iter().zip(items) {
        let Value::Table(mut table) = item else { continue };
        let name = table.get("name").and_then(Value::as_str).map(str::to_owned);
        let below = format!("{at}.");
        let troubled = |walk: &Walk<'_>| walk.problems.iter().any(|p| p.path.starts_with(&below));
        if several && name.is_none() && !walk.problems.iter().any(|p| p.path == join(&at, "name")) {
            walk.problems.push(Problem::new(join(&at, "name"), None, "is missing").fix("name = \"orders\""));
        }
        trigger(walk, &at, &mut table);
        // With a part left out it would be another group.
        let group = if troubled(walk) { None } else { typed(walk, &at, Value::Table(table)) };
        out.push(Written { at, name, group });
    }
    out
}

/// What a trigger that is a table must have.
fn trigger(walk: &mut Walk<'_>, at: &str, table: &mut Table) {
    let at = join(at, "trigger");
    let below = format!("{at}.");
    let Some(Value::Table(trigger)) = table.get("trigger") else { return };
    if walk.problems.iter().any(|p| p.path.starts_with(&below)) {
        return;
    }
    let has: Vec<&str> = ["every", "rate", "cron"].into_iter().filter(|key| trigger.contains_key(*key)).collect();
    let problem = |reason: String| {
        let fix = "write { every = \"5s\" }, { rate = \"5s\" } or { cron = \"0 */5 * * * *\", tz = \"Asia/Shanghai\" }";
        Problem::new(&at, None, reason).fix(fix)
    };
    match has[..] {
        [] => walk.problems.push(problem("has none of every, rate and cron".into())),
        [one] if one != "cron" && trigger.contains_key("tz") => walk.problems.push(
            Problem::new(join(&at, "tz"), walk.shown.get(&join(&at, "tz")).cloned(), "has no effect without cron")
                .fix("remove it"),
        ),
        [_] => {}
        _ => walk.problems.push(problem(format!("has {}, must have one of them", has.join(" and ")))),
    }
}

/// What is wrong with groups, between them, and with what they name.
pub(super) fn relations(config: &Config, written: &[Written], walk: &Walk<'_>, out: &mut Vec<Problem>) {
    let broken: Vec<&str> = written.iter().filter(|w| w.group.is_none()).filter_map(|w| w.name.as_deref()).collect();
    let mut sound: Vec<Group> = Vec::new();
    let mut places: Vec<&str> = Vec::new();
    for w in written {
        let Some(group) = &w.group else { continue };
        let mut group = group.clone();
        if sound.iter().any(|other| other.name == group.name) {
            let path = join(&w.at, "name");
            let reason = "two groups have this name; give one of them another";
            out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason));
            // So that what else is wrong with it is told of the right one.
            group.name = format!("{}{SECOND}{}", group.name, sound.len());
        }
        let adopted = group.tables.iter().any(|table| config.adopted.contains_key(table));
        group.tables.retain(|table| !config.adopted.contains_key(table));
        if adopted && group.tables.is_empty() {
            if !group.houses.is_all() {
                let path = join(&w.at, "houses");
                let reason = "are those of Posthouse's own tables, and this group names adopted ones alone";
                out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason).fix("remove it"));
            }
            // It shares no house with any other.
            group.houses = Houses::of([]);
        }
        sound.push(group);
        places.push(&w.at);
    }
    for (path, why) in Group::problems_of(&sound) {
        let place = |g: &Group| path.strip_prefix(&format!("groups.{:?}.", g.name)).map(str::to_owned);
        let Some((place, field)) = sound.iter().enumerate().find_map(|(n, g)| Some((n, place(g)?))) else { continue };
        let group = &sound[place];
        if field == "houses" && group.houses.is_empty() {
            continue;
        }
        if field == "then" && group.then.as_deref().is_some_and(|then| broken.contains(&then)) {
            continue;
        }
        let fix = match (field.as_str(), &group.trigger) {
            ("then", _) => meant(group.then.as_deref(), written.iter().filter_map(|w| w.name.as_deref())),
            ("trigger.tz", Trigger::Cron { tz, .. }) => meant(Some(tz), time_zones().iter().map(String::as_str)),
            _ => None,
        };
        let path = format!("{}.{field}", places[place]);
        let shown = walk.shown.get(&path).cloned();
        // Where the library's text begins with the value, that stands before it here already.
        let why = match why.split_once(", must ") {
            Some((value, rest)) if shown.is_some() && !value.contains(' ') => format!("must {rest}"),
            _ => without_marks(&why),
        };
        let problem = Problem::new(path, shown, why);
        out.push(match fix {
            Some(fix) => problem.fix(fix),
            None => problem,
        });
    }
    for (name, mapping) in &config.adopted {
        let naming: Vec<&Written> =
            written.iter().filter(|w| w.group.as_ref().is_some_and(|g| g.tables.contains(name))).collect();
        for (place, w) in naming.iter().enumerate() {
            let Some(group) = &w.group else { continue };
            let mut mapped = config.databases.keys().filter(|d| among(&mapping.databases, d));
            let shared = |d: &&String| {
                among(&group.databases, d)
                    && naming[..place].iter().filter_map(|w| w.group.as_ref()).any(|g| among(&g.databases, d))
            };
            if let Some(database) = mapped.find(shared) {
                let path = join(&w.at, "tables");
                let reason = format!("another group names the adopted tables {name:?} of database {database:?} already");
                out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason).fix("name them in one group"));
            }
        }
    }
    let before = out.len();
    for w in written {
        let Some(group) = &w.group else { continue };
        names(config, group, &w.at, walk, out);
    }
    if out.len() > before {
        return;
    }
    if written.is_empty() || written.iter().any(|w| w.group.is_none()) {
        return;
    }
    for (name, database) in &config.databases {
        let missed: Vec<&str> = database
            .prefixes()
            .iter()
            .filter(|prefix| !sound.iter().any(|g| works_on(g, name, prefix)))
            .map(String::as_str)
            .collect();
        let whole = missed.len() == database.prefixes().len();
        let reason = match missed[..] {
            [] => continue,
            _ if whole => "no group works on it, so nothing of it would be sent".to_owned(),
            _ => format!("no group works on its tables {}, so nothing of them would be sent", missed.join(", ")),
        };
        let fix = format!("add a [[groups]] with databases = [{name:?}], or leave databases and tables out of one");
        out.push(Problem::new(join("databases", name), None, reason).fix(fix));
    }
}

/// Stands between the name of a second group of one name and its number, while it is checked.
const SECOND: char = '‡';

fn without_marks(text: &str) -> String {
    let mut parts = text.split(SECOND);
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| all + part.trim_start_matches(|c: char| c.is_ascii_digit()))
}

fn meant<'n>(name: Option<&str>, known: impl IntoIterator<Item = &'n str>) -> Option<String> {
    // Names of zones are found whatever their case, and suggested as they are written.
    let known: Vec<&str> = known.into_iter().collect();
    let lower: Vec<String> = known.iter().map(|k| k.to_lowercase()).collect();
    let found = suggest(name?, lower.iter().map(String::as_str))?;
    let place = lower.iter().position(|k| k == found)?;
    Some(format!("did you mean {:?}?", known[place]))
}

/// Databases, tables and houses that a group names must be there.
fn names(config: &Config, group: &Group, at: &str, walk: &Walk<'_>, out: &mut Vec<Problem>) {
    let known: Vec<&str> = config.databases.keys().map(String::as_str).collect();
    let mut say = |key: &str, reason: String, name: &str, known: &[&str]| {
        let path = join(at, key);
        let fix = meant(Some(name), known.iter().copied()).unwrap_or_else(|| format!("there are {}", known.join(", ")));
        out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason).fix(fix));
    };
    for name in group.databases.iter().filter(|name| !config.databases.contains_key(*name)) {
        if !walk.broken_databases.contains(name) {
            say("databases", format!("there is no database {name:?}"), name, &known);
        }
    }
    let databases: Vec<(&String, &DatabaseConfig)> =
        config.databases.iter().filter(|(name, _)| among(&group.databases, name)).collect();
    let mut prefixes: Vec<&str> = databases.iter().flat_map(|(_, d)| d.prefixes()).map(String::as_str).collect();
    let mapped =
        config.adopted.iter().filter(|(_, m)| m.databases.is_empty() || databases.iter().any(|(d, _)| m.databases.contains(d)));
    prefixes.extend(mapped.map(|(name, _)| name.as_str()));
    if !prefixes.is_empty() && walk.broken_databases.is_empty() {
        for table in group.tables.iter().filter(|t| !prefixes.contains(&t.as_str())) {
            say(
                "tables",
                format!("no database of this group has tables with the prefix {table:?}, and no adopted ones go by that name"),
                table,
                &prefixes,
            );
        }
    }
    let Some(highest) = group.houses.highest() else { return };
    for (name, database) in databases.iter().filter(|(name, d)| d.prefixes().iter().any(|prefix| works_on(group, name, prefix))) {
        if let Some(houses) = database.houses.filter(|houses| highest >= *houses) {
            let path = join(at, "houses");
            let reason = format!("go up to {highest}, and database {name:?} has the houses 0 to {}", houses.saturating_sub(1));
            out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason));
        }
    }
}

/// Whether a name is in a list; an empty one stands for all.
pub(crate) fn among(names: &[String], name: &str) -> bool {
    names.is_empty() || names.iter().any(|n| n == name)
}

/// The database of a source: of several sets of tables each is named after its database and its prefix.
pub(crate) fn database_of(source: &str) -> &str {
    source.split_once('/').map_or(source, |(database, _)| database)
}

/// Whether a group has something to do in a set of tables.
fn works_on(group: &Group, database: &str, prefix: &str) -> bool {
    among(&group.databases, database) && among(&group.tables, prefix)
}

impl Config {
    /// The groups that work on a source.
    pub(crate) fn groups_of(&self, source: &str) -> Vec<Group> {
        let Some((_, config)) = self.sources().into_iter().find(|(name, _)| name == source) else { return Vec::new() };
        let database = database_of(source);
        let own = |g: &&Group| works_on(g, database, &config.prefix);
        let mut groups: Vec<Group> = self.groups.iter().filter(own).cloned().collect();
        if self.source_of_adopted(database).as_deref() == Some(source) {
            // A continuous one has no runs to scan them in: they are scanned all the time.
            let scans = |g: &&Group| {
                !own(g) && g.trigger != Trigger::Continuous && self.adopted.keys().any(|name| self.scans(g, database, name))
            };
            groups.extend(self.groups.iter().filter(scans).cloned().map(|mut group| {
                group.houses = Houses::of([]);
                group
            }));
        }
        groups
    }

    /// The source in whose tables claims on adopted ones are kept: the first of its database.
    pub(crate) fn source_of_adopted(&self, database: &str) -> Option<String> {
        self.sources().into_iter().map(|(name, _)| name).find(|name| database_of(name) == database)
    }

    fn scans(&self, group: &Group, database: &str, mapping: &str) -> bool {
        let mapped = self.adopted.get(mapping).is_some_and(|m| among(&m.databases, database));
        mapped && group.tables.iter().any(|t| t == mapping) && among(&group.databases, database)
    }

    /// The group in whose runs an adopted mapping is scanned in a database; None: all the time.
    pub(crate) fn group_of_adopted(&self, database: &str, mapping: &str) -> Option<&Group> {
        self.groups.iter().find(|g| g.trigger != Trigger::Continuous && self.scans(g, database, mapping))
    }

    /// The houses of a group, for people: those of Posthouse's own tables, so none where it names adopted ones alone.
    pub(crate) fn houses_of(&self, group: &Group) -> String {
        let adopted = !group.tables.is_empty() && group.tables.iter().all(|table| self.adopted.contains_key(table));
        if adopted { "-".into() } else { group.houses.to_string() }
    }

    /// A group that a person named.
    pub(crate) fn group(&self, name: &str) -> Result<Option<&Group>, String> {
        let known: BTreeMap<&str, &Group> = self.groups.iter().map(|g| (g.name.as_str(), g)).collect();
        match known.get(name) {
            Some(group) => Ok(Some(group)),
            // They may be those of a service with a relay in it.
            None if known.is_empty() => Ok(None),
            None => Err(match meant(Some(name), known.keys().copied()) {
                Some(meant) => format!("there is no group {name:?}; {meant}"),
                None => format!("there is no group {name:?}; there are {}", known.into_keys().collect::<Vec<_>>().join(", ")),
            }),
        }
    }
}

/// A trigger as one line.
pub(crate) fn trigger_text(trigger: &Trigger) -> String {
    let time = |d: &std::time::Duration| humantime::format_duration(*d).to_string();
    match trigger {
        Trigger::Continuous => "continuous".into(),
        Trigger::Manual => "manual".into(),
        Trigger::External => "external".into(),
        Trigger::Every(period) => format!("{} after a run", time(period)),
        Trigger::Rate(period) => format!("every {}", time(period)),
        Trigger::Cron { cron, tz } => format!("{cron} ({tz})"),
        _ => "?".into(),
    }
}
