//! How settings relate to each other.

use std::collections::BTreeMap;

use posthouse::Route;
use url::Url;

use super::problem::{Problem, join};
use super::redact;
use super::shape::{Walk, suggest};
use super::{Config, DatabaseConfig};
use crate::database::Target;

pub(super) fn relations(config: &Config, walk: &mut Walk<'_>) {
    let mut found = Vec::new();
    told(config.relay.problems(), "relay", walk, &mut found);
    for (name, settings) in &config.transports {
        let at = join("transports", name);
        told(settings.problems(), &at, walk, &mut found);
        if settings.connect_timeout >= config.relay.send_timeout {
            let reason = format!(
                "must be less than relay.send_timeout ({}), or a receiver that can't be reached counts as a failed attempt",
                humantime::format_duration(config.relay.send_timeout)
            );
            let path = join(&at, "connect_timeout");
            let value = walk.shown.get(&path).cloned();
            let value = value.or_else(|| Some(format!("\"{}\"", humantime::format_duration(settings.connect_timeout))));
            if !doubtful(walk, "connect_timeout") && !doubtful(walk, "send_timeout") {
                found.push(Problem::new(path, value, reason).fix("lower connect_timeout or raise relay.send_timeout"));
            }
        }
    }
    for (name, route) in &config.routes {
        let at = join("routes", name);
        told(route.problems(), &at, walk, &mut found);
        if !walk.problems.iter().any(|p| p.path == join(&at, "to")) {
            address(&at, name, route, config, walk, &mut found);
        }
    }
    let mut seen = BTreeMap::new();
    for (name, database) in &config.databases {
        self::database(&join("databases", name), database, &walk.shown, &mut found);
        if let Ok(target) = Target::parse(&database.url) {
            let same = (target.identity(), database.schema.clone().or_else(|| target.default_schema()), database.prefix.clone());
            if let Some(other) = seen.insert(same, name) {
                let reason =
                    format!("has the same tables as {}: their messages would be sent twice over", join("databases", other));
                found.push(
                    Problem::new(join("databases", name), None, reason).fix("remove one of the two, or give it its own prefix"),
                );
            }
        }
    }
    let listen = config.server.listen;
    if !listen.ip().is_loopback() && !config.server.allow_public && !doubtful(walk, "allow_public") {
        let reason = "can be reached from other machines, and this version has no authentication: everybody there could read \
                      health and metrics, names of destinations included";
        found.push(
            Problem::new("server.listen", Some(format!("\"{listen}\"")), reason)
                .fix("listen = \"127.0.0.1:8420\", or allow_public = true if a firewall or proxy guards it"),
        );
    }
    walk.problems.extend(found);
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
        // The library's text begins with the value, which stands before it here when it was written.
        let reason = match (&shown, why.split_once(", must ").or_else(|| why.split_once("; "))) {
            (Some(_), Some((_, rest))) if why.contains(", must ") => format!("must {rest}"),
            (Some(_), Some((_, rest))) => rest.to_owned(),
            _ => why,
        };
        out.push(Problem::new(path, shown, reason));
    }
}

/// Where a route leads.
fn address(at: &str, name: &str, route: &Route, config: &Config, walk: &Walk<'_>, out: &mut Vec<Problem>) {
    let path = join(at, "to");
    let to = if route.to.is_empty() { name } else { &route.to };
    let shown = walk.shown.get(&path).cloned();
    let problem = |reason: String| Problem::new(&path, shown.clone(), reason);
    if route.to.is_empty() && !name.contains(':') {
        out.push(problem("is missing".into()).fix("to = \"https://host/path\""));
        return;
    }
    match transport_of(to, config) {
        Err((reason, fix)) => out.push(problem(reason).fix(fix)),
        Ok(()) => {
            let url = if to.starts_with("http:") || to.starts_with("https:") {
                to
            } else {
                to.split_once(':').map_or(to, |(_, address)| address)
            };
            let good =
                Url::parse(url).is_ok_and(|u| matches!(u.scheme(), "http" | "https") && u.has_host() && url.contains("://"));
            if !good {
                out.push(problem("is no complete http:// or https:// URL".into()).fix("to = \"https://host/path\""));
            }
        }
    }
}

/// Whether an address names a transport that is there; the reason and the fix if not.
fn transport_of(to: &str, config: &Config) -> Result<(), (String, String)> {
    let known: Vec<&str> = config.transports.keys().map(String::as_str).collect();
    let Some((scheme, _)) = to.split_once(':') else {
        return Err(("names no transport".into(), format!("write transport:address; the transports are {}", known.join(", "))));
    };
    if scheme == "https" || config.transports.contains_key(scheme) {
        return Ok(());
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
        format!("the transports are {} (http serves https:// too); others are added as [transports.NAME]", known.join(", ")),
    ))
}

/// Whether a destination leads somewhere, by this configuration.
pub(crate) fn destination(name: &str, config: &Config) -> Result<(), String> {
    if config.routes.contains_key(name) {
        return Ok(());
    }
    if name.contains(':') {
        return transport_of(name, config).map_err(|(reason, fix)| format!("{reason}; {fix}"));
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
    for (key, name, longest) in [("prefix", Some(&database.prefix), 32), ("schema", database.schema.as_ref(), 63)] {
        let Some(name) = name else { continue };
        let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b == b'_');
        let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        if !first || !rest || name.len() > longest {
            let reason = format!("must be 1 to {longest} characters out of a-z, 0-9 and _, not starting with a digit");
            out.push(Problem::new(path(key), written(key), reason));
        }
    }
}
