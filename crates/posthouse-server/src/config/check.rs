//! How settings relate to each other.

use std::collections::{BTreeMap, BTreeSet};

use posthouse::transport::Transport;
use posthouse::{Adopted, Ordering, Route};
use url::Url;

use super::groups::among;
use super::problem::{Problem, join};
use super::redact;
use super::shape::{Walk, suggest};
use super::{Config, DatabaseConfig, TransportConfig, server};
use crate::database::Target;

pub(super) fn relations(config: &Config, walk: &mut Walk<'_>) {
    let mut found = Vec::new();
    told(config.relay.problems(), "relay", walk, &mut found);
    if let Some(retention) = &config.retention {
        told(retention.problems(), "retention", walk, &mut found);
    }
    for (name, database) in config.databases.iter().filter(|(_, d)| d.retention != config.retention) {
        if let Some(retention) = &database.retention {
            told(retention.problems(), &join(&join("databases", name), "retention"), walk, &mut found);
        }
    }
    for (name, settings) in &config.transports {
        let at = join("transports", name);
        told(settings.problems(), &at, walk, &mut found);
        if let Some(connect_timeout) = settings.connect_timeout()
            && connect_timeout >= config.relay.send_timeout
        {
            let reason = format!(
                "must be less than relay.send_timeout ({}), or a receiver that can't be reached counts as a failed attempt",
                humantime::format_duration(config.relay.send_timeout)
            );
            let path = join(&at, "connect_timeout");
            let value = walk.shown.get(&path).cloned();
            let value = value.or_else(|| Some(format!("\"{}\"", humantime::format_duration(connect_timeout))));
            if !doubtful(walk, "connect_timeout") && !doubtful(walk, "send_timeout") {
                found.push(Problem::new(path, value, reason).fix("lower connect_timeout or raise relay.send_timeout"));
            }
        }
    }
    let mut made = Made::default();
    for (name, route) in &config.routes {
        let at = join("routes", name);
        told(route.problems(), &at, walk, &mut found);
        if !walk.problems.iter().any(|p| p.path == join(&at, "to")) {
            address(&at, name, route, config, walk, &mut made, &mut found);
        }
    }
    for (name, mapping) in &config.adopted {
        adopted(&join("adopted", name), mapping, config, walk, &mut found);
    }
    if config.relay.default_route.ordering == Ordering::Pipelined {
        let path = "relay.default_route.ordering";
        let reason = "can't hold for every address: the transport \"http\" can't keep a key's messages in order this way";
        let problem = Problem::new(path, walk.shown.get(path).cloned(), reason);
        found.push(problem.fix("give the destinations that need it a [routes.\"name\"] with this ordering"));
    }
    let mut seen = BTreeMap::new();
    for (name, database) in &config.databases {
        let at = join("databases", name);
        if name.contains('/') {
            let reason = "the name must not contain '/', which stands between a database and the prefix of its tables";
            found.push(Problem::new(&at, None, reason));
        }
        self::database(&at, database, &walk.shown, &mut found);
        let Ok(target) = Target::parse(&database.url) else { continue };
        for prefix in database.prefixes() {
            let same = (target.identity(), database.schema.clone().or_else(|| target.default_schema()), prefix.clone());
            if let Some(other) = seen.insert(same, name)
                && other != name
            {
                let reason =
                    format!("has the same tables as {}: their messages would be sent twice over", join("databases", other));
                found.push(
                    Problem::new(join("databases", name), None, reason).fix("remove one of the two, or give it its own prefix"),
                );
            }
        }
    }
    server::relations(&config.server, |key| doubtful(walk, key), walk, &mut found);
    walk.problems.extend(found);
}

/// What is wrong with one mapping of adopted tables.
fn adopted(at: &str, mapping: &Adopted, config: &Config, walk: &Walk<'_>, out: &mut Vec<Problem>) {
    told(mapping.problems(), at, walk, out);
    told(mapping.problems_beside(&config.relay), at, walk, out);
    let path = join(at, "databases");
    let shown = walk.shown.get(&path).cloned();
    let known: Vec<&str> = config.databases.keys().map(String::as_str).collect();
    for name in &mapping.databases {
        if !known.contains(&name.as_str()) {
            let meant = suggest(name, known.iter().copied()).map(|m| format!("; did you mean {m:?}?")).unwrap_or_default();
            let problem = Problem::new(&path, shown.clone(), format!("there is no database {name:?}{meant}"));
            out.push(problem.fix(format!("the databases are {}", known.join(", "))));
        }
    }
    let meant = |name: &&String| among(&mapping.databases, name);
    for name in config.databases.keys().filter(meant) {
        if matches!(config.databases.get(name).map(|d| Target::parse(&d.url)), Some(Ok(Target::Sqlite(_)))) {
            let reason = format!("{name:?} is SQLite, which locks whole files and no single rows");
            let fix = "name databases of MySQL, MariaDB or PostgreSQL";
            out.push(Problem::new(&path, shown.clone(), reason).fix(fix));
        }
    }
    // One that is the same for all rows can be judged now.
    let path = join(at, "destination");
    if let Some(to) = mapping.complete().destination.filter(|to| !to.contains(['{', '}']))
        && !walk.broken.contains(to.split_once(':').map_or("", |(scheme, _)| scheme))
        && let Err(why) = destination(&to, config)
    {
        out.push(Problem::new(&path, walk.shown.get(&path).cloned(), why));
    }
}

/// Whether a key (or one that this may have been meant to be) was wrong itself.
fn doubtful(walk: &Walk<'_>, key: &str) -> bool {
    walk.doubtful.contains(key)
}

/// The library's own findings, with what was written.
fn told(problems: Vec<(String, String)>, at: &str, walk: &Walk<'_>, out: &mut Vec<Problem>) {
    for (field, why) in problems {
        let path = format!("{at}.{field}");
        let key = field.rsplit('.').next().unwrap_or(&field);
        // A relation with a setting that is wrong itself can't be judged yet.
        if doubtful(walk, key) || walk.doubtful.iter().any(|k| k.len() > 3 && why.contains(k.as_str())) {
            continue;
        }
        let shown = walk.shown.get(&path).cloned();
        // Where the library's text begins with the value, that stands before it here already.
        let value_first = shown.is_some() && why.starts_with(|c: char| c.is_ascii_digit() || c == '"');
        let reason = match (why.split_once(", must "), why.split_once("; ")) {
            (Some((_, rest)), _) if value_first => format!("must {rest}"),
            (None, Some((_, rest))) if value_first => rest.to_owned(),
            _ => why,
        };
        out.push(Problem::new(path, shown, reason));
    }
}

/// Transports that routes are checked with, each made when the first route asks for it.
#[derive(Default)]
struct Made<'c>(BTreeMap<&'c str, Result<Box<dyn Transport>, String>>);

impl<'c> Made<'c> {
    /// None where the settings have problems, which are told elsewhere.
    fn get(&mut self, name: &'c str, settings: &TransportConfig) -> Option<&Result<Box<dyn Transport>, String>> {
        if !settings.problems().is_empty() {
            return None;
        }
        Some(self.0.entry(name).or_insert_with(|| settings.build().map_err(|e| e.to_string())))
    }
}

/// Where a route leads, and whether that transport can do what the route asks for.
fn address<'c>(
    at: &str,
    name: &str,
    route: &Route,
    config: &'c Config,
    walk: &Walk<'_>,
    made: &mut Made<'c>,
    out: &mut Vec<Problem>,
) {
    let path = join(at, "to");
    let to = if route.to.is_empty() { name } else { &route.to };
    let shown = walk.shown.get(&path).cloned();
    let problem = |reason: String| Problem::new(&path, shown.clone(), reason);
    if route.to.is_empty() && !name.contains(':') {
        out.push(problem("is missing".into()).fix("to = \"https://host/path\""));
        return;
    }
    if walk.broken.contains(to.split_once(':').map_or("", |(scheme, _)| scheme)) {
        return;
    }
    let (name, settings) = match transport_of(to, config) {
        Ok(found) => found,
        Err((reason, fix)) => {
            out.push(problem(reason).fix(fix));
            return;
        }
    };
    if let Err((reason, fix)) = form(to, route, name, settings, made) {
        out.push(problem(reason).fix(fix));
    }
    if route.ordering == Ordering::Pipelined
        && let Some(Ok(transport)) = made.get(name, settings)
        && !transport.pipelines()
    {
        let all = config.transports.iter();
        let able: Vec<&str> = all
            .filter(|(name, settings)| made.get(name, settings).is_some_and(|t| t.as_ref().is_ok_and(|t| t.pipelines())))
            .map(|(name, _)| name.as_str())
            .collect();
        let path = join(at, "ordering");
        let reason = format!("the transport {name:?} ({}) can't keep a key's messages in order this way", settings.kind());
        let fix = if able.is_empty() {
            "write ordering = \"strict\"; no transport that is configured can do it".to_owned()
        } else {
            format!("write ordering = \"strict\"; the transports that can are {}", able.join(", "))
        };
        out.push(Problem::new(&path, walk.shown.get(&path).cloned(), reason).fix(fix));
    }
}

/// Whether an address has the form that its transport takes; the reason and the fix if not.
fn form<'c>(
    to: &str,
    route: &Route,
    name: &'c str,
    settings: &TransportConfig,
    made: &mut Made<'c>,
) -> Result<(), (String, String)> {
    if settings.is_broker() {
        let mut route = route.clone();
        route.to = to.to_owned();
        let fix = || format!("addresses of this transport look like {}", settings.addresses(name));
        return match made.get(name, settings) {
            Some(Ok(transport)) => transport.check(&route).map_err(|reason| (reason, fix())),
            Some(Err(why)) => Err((format!("the transport {name:?} can't be made: {why}"), "mend its settings".into())),
            None => Ok(()),
        };
    }
    let url = if to.starts_with("http:") || to.starts_with("https:") {
        to
    } else {
        to.split_once(':').map_or(to, |(_, address)| address)
    };
    let good = Url::parse(url).is_ok_and(|u| matches!(u.scheme(), "http" | "https") && u.has_host() && url.contains("://"));
    if good { Ok(()) } else { Err(("is no complete http:// or https:// URL".into(), "to = \"https://host/path\"".into())) }
}

/// The transport that an address names; the reason and the fix if there is none.
fn transport_of<'c>(to: &str, config: &'c Config) -> Result<(&'c str, &'c TransportConfig), (String, String)> {
    let known: Vec<&str> = config.transports.keys().map(String::as_str).collect();
    let Some((scheme, _)) = to.split_once(':') else {
        return Err(("names no transport".into(), format!("write transport:address; the transports are {}", known.join(", "))));
    };
    let name = if scheme == "https" { "http" } else { scheme };
    if let Some((name, settings)) = config.transports.get_key_value(name) {
        return Ok((name, settings));
    }
    if scheme == "local" {
        return Err((
            "local handlers exist only inside a service with an embedded relay".into(),
            "run the relay in that service, or send to an https:// address".into(),
        ));
    }
    let meant =
        suggest(scheme, known.iter().copied().chain(["https"])).map(|m| format!("; did you mean {m:?}?")).unwrap_or_default();
    Err((
        format!("there is no transport {scheme:?}{meant}"),
        format!("the transports are {} (http serves https:// too); others are added as [transports.{scheme}]", known.join(", ")),
    ))
}

/// Whether a destination leads somewhere, by this configuration.
pub(crate) fn destination(name: &str, config: &Config) -> Result<(), String> {
    if config.routes.contains_key(name) {
        return Ok(());
    }
    if name.contains(':') {
        let checked = transport_of(name, config)
            .and_then(|(transport, settings)| form(name, &config.relay.default_route, transport, settings, &mut Made::default()));
        return checked.map_err(|(reason, fix)| format!("{reason}; {fix}"));
    }
    let known: Vec<&str> = config.routes.keys().map(String::as_str).collect();
    Err(match suggest(name, known.iter().copied()) {
        Some(meant) => format!("there is no route of this name; did you mean {meant:?}?"),
        None if known.is_empty() => "it is no address (transport:…) and no route is configured".into(),
        None => format!("it is no address (transport:…) and there is no route of this name; there are {}", known.join(", ")),
    })
}

/// What is wrong with one database.
pub(super) fn database(at: &str, database: &DatabaseConfig, shown: &BTreeMap<String, String>, out: &mut Vec<Problem>) {
    let written = |key: &str| shown.get(&join(at, key)).cloned();
    let path = |key: &str| if shown.is_empty() { at.to_owned() } else { join(at, key) };
    let url = written("url").or_else(|| Some(redact::url(&database.url)));
    match Target::parse(&database.url) {
        Err((reason, fix)) => out.push(Problem::new(path("url"), url, reason).fix(fix)),
        Ok(Target::Sqlite(_)) => {
            if database.schema.is_some() {
                out.push(Problem::new(path("schema"), written("schema"), "SQLite has no schemas").fix("remove it"));
            }
            if database.houses.is_some_and(|n| n != 1) {
                out.push(Problem::new(path("houses"), written("houses"), "SQLite always has one house").fix("remove it"));
            }
        }
        Ok(_) => {}
    }
    if let Some(tables) = &database.tables {
        if shown.contains_key(&join(at, "prefix")) {
            out.push(Problem::new(path("prefix"), written("prefix"), "is one of tables, where that is given").fix("remove it"));
        }
        if tables.is_empty() {
            let fix = "tables = [\"a_\", \"b_\"], or remove it for one set of tables";
            out.push(Problem::new(path("tables"), written("tables"), "must name at least one prefix").fix(fix));
        }
        let mut named = BTreeSet::new();
        if let Some(twice) = tables.iter().find(|prefix| !named.insert(*prefix)) {
            out.push(Problem::new(path("tables"), written("tables"), format!("names {twice:?} twice")));
        }
    }
    let prefixes =
        database.prefixes().iter().map(|prefix| (if database.tables.is_some() { "tables" } else { "prefix" }, prefix, 32));
    for (key, name, longest) in prefixes.chain(database.schema.iter().map(|schema| ("schema", schema, 63))) {
        let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_');
        let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if !first || !rest || name.len() > longest {
            let reason = format!("must be 1 to {longest} characters out of a-z, 0-9 and _, not starting with a digit");
            out.push(Problem::new(path(key), written(key), reason));
        }
    }
}
