//! `posthouse destinations`: what waits in the databases, and how the running relay finds its destinations.

mod ask;
mod table;

use std::collections::BTreeMap;

use posthouse::store::Backlog;
use serde::Serialize;
use serde_json::{Value, json};

pub(super) use self::ask::{get, parts, reachable, relay};
use super::load;
use crate::cli::Global;
use crate::config::redact_url;
use crate::database::Database;
use crate::failure::Failure;
use crate::health::{Health, State};
use crate::output::{self, clean};

/// One destination of one database.
#[derive(Debug, Default, Serialize)]
struct Line {
    database: String,
    destination: String,
    to: String,
    /// None: no relay has anything to tell about it.
    state: Option<State>,
    since: Option<String>,
    down_seconds: Option<f64>,
    pending: i64,
    failed: i64,
    /// Of those that are pending; FAILED ones wait for a person.
    oldest_pending_seconds: Option<f64>,
    in_flight: Option<u64>,
    delivered: Option<u64>,
    last_confirm_seconds: Option<f64>,
    last_error: Option<String>,
}

impl Line {
    /// Failing first, then by name.
    fn order(&self) -> impl Ord + use<> {
        let trouble = match self.state {
            Some(State::Down) => 0,
            Some(State::Blocked) => 1,
            _ if self.failed > 0 => 2,
            _ if self.last_error.is_some() => 3,
            _ => 4,
        };
        (trouble, self.database.clone(), self.destination.clone())
    }

    fn add(&mut self, row: &Backlog) {
        if row.status == "FAILED" {
            self.failed += row.messages;
        } else {
            self.pending += row.messages;
            let age = row.oldest_ms as f64 / 1000.0;
            self.oldest_pending_seconds = Some(self.oldest_pending_seconds.unwrap_or(0.0).max(age));
        }
    }

    fn tell(&mut self, live: Health) {
        self.to = live.to;
        self.state = Some(live.state);
        self.since = live.since;
        self.down_seconds = live.down_seconds;
        self.in_flight = Some(live.in_flight);
        self.delivered = Some(live.delivered);
        self.last_confirm_seconds = live.last_confirm_seconds;
        self.last_error = live.error;
    }
}

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let config = load(global)?;
    let databases = config.sources().iter().map(|(name, d)| Database::open(name, d)).collect::<Result<Vec<_>, _>>()?;
    let address = ask::reachable(config.server.listen);
    let counted = futures_util::future::join_all(databases.iter().map(backlog));
    let (live, counted) = tokio::join!(ask::relay(&config.server), counted);

    // A relay of another configuration may listen there; it knows other databases.
    let (mut live, why) = match live {
        Ok(live) => (live.databases, None),
        Err(why) => (BTreeMap::new(), Some(why)),
    };
    let (mut lines, mut told, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    if let Some(why) = &why {
        notes.push(format!("no relay answers at {address} ({why}): only the database's side is shown"));
    }
    let mut failure: Option<Failure> = None;
    for (database, counted) in databases.iter().zip(counted) {
        let relay = live.remove(&database.name);
        if why.is_none() && !matches!(relay, Some(Some(_))) {
            let what = if relay.is_some() { "runs no relay for" } else { "doesn't know" };
            notes.push(format!(
                "the posthouse at {address} {what} database {:?}: only the database's side is shown",
                database.name
            ));
        }
        let mut line = json!({ "name": database.name });
        let relay = relay.flatten();
        line["relay"] = relay.as_ref().map_or(Value::Null, |r| json!({ "instance": r.instance }));
        let rows = match counted {
            Ok(rows) => rows,
            Err(e) => {
                line["error"] = e.text.clone().into();
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
                Vec::new()
            }
        };
        told.push(line);
        lines.extend(joined(&database.name, &config.leads(), &rows, relay.map(|r| r.destinations).unwrap_or_default()));
    }
    lines.sort_by_cached_key(Line::order);
    for note in notes {
        eprintln!("note: {}", clean(&note));
    }
    if global.json {
        output::json(&json!({ "listen": address, "relay_error": why, "databases": told, "destinations": lines }));
    } else if failure.is_none() || !lines.is_empty() {
        table::print(&lines);
    }
    match failure {
        None => Ok(()),
        Some(failure) => Err(Failure { printed: true, ..failure }),
    }
}

async fn backlog(database: &Database) -> Result<Vec<Backlog>, Failure> {
    let (store, ..) = database.ready().await?;
    store.backlog().await.map_err(|e| database.failure(&e))
}

/// Routes, what waits in a database, and what its relay tells, by the name that may be shown.
fn joined(database: &str, routes: &BTreeMap<String, String>, rows: &[Backlog], live: Vec<Health>) -> Vec<Line> {
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    for (name, to) in routes {
        lines.entry(redact_url(name)).or_default().to.clone_from(to);
    }
    for row in rows {
        lines.entry(redact_url(&row.destination)).or_default().add(row);
    }
    for health in live {
        lines.entry(health.destination.clone()).or_default().tell(health);
    }
    let named = lines.into_iter().map(|(destination, line)| {
        let to = if line.to.is_empty() { destination.clone() } else { line.to.clone() };
        Line { database: database.to_owned(), destination, to, ..line }
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(destination: &str, status: &str, messages: i64, oldest_ms: i64) -> Backlog {
        Backlog { destination: destination.into(), status: status.into(), messages, oldest_ms }
    }

    fn health(destination: &str, state: State) -> Health {
        Health {
            destination: destination.into(),
            to: "nats:x".into(),
            state,
            since: None,
            down_seconds: None,
            error: None,
            in_flight: 1,
            waiting: 2,
            delivered: 3,
            last_confirm_seconds: None,
        }
    }

    #[test]
    fn both_sides_meet_under_the_name_that_may_be_shown() {
        let routes = BTreeMap::from([("idle".to_owned(), "nats:idle".to_owned())]);
        let rows = [
            row("https://x/?a=1", "PENDING", 2, 5_000),
            row("https://x/?a=2", "SENDING", 1, 9_000),
            row("https://x/?a=2", "FAILED", 4, 99_000),
        ];
        let lines = joined("main", &routes, &rows, vec![health("https://x/?a=[redacted]", State::Ok)]);
        assert_eq!(lines.len(), 2, "{lines:?}");
        let (hook, idle) = (&lines[0], &lines[1]);
        assert_eq!((hook.pending, hook.failed, hook.oldest_pending_seconds), (3, 4, Some(9.0)));
        assert_eq!((hook.state, hook.in_flight, hook.to.as_str()), (Some(State::Ok), Some(1), "nats:x"));
        assert_eq!((idle.state, idle.pending, idle.to.as_str()), (None, 0, "nats:idle"));
    }

    #[test]
    fn those_that_need_a_person_come_first() {
        let rows = [row("f", "FAILED", 1, 0), row("a", "PENDING", 1, 0)];
        let mut unsure = health("e", State::Ok);
        unsure.error = Some("503".into());
        let live = vec![health("b", State::Blocked), health("z", State::Down), health("c", State::Ok), unsure];
        let mut lines = joined("main", &BTreeMap::new(), &rows, live);
        lines.sort_by_cached_key(Line::order);
        let order: Vec<&str> = lines.iter().map(|l| l.destination.as_str()).collect();
        assert_eq!(order, ["z", "b", "f", "e", "a", "c"]);
    }
}
