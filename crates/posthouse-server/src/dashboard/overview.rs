//! How things are, and how they were in the last hour.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;
use posthouse::store::Backlog;
use serde::Deserialize;
use serde_json::Value;

use super::view::{Badge, Frame, Href, Oops, Place, When, about, badge, number, page as shown_page, rate, short, shown, span};
use super::{Shared, history, one_of};
use crate::config::redact_url;
use crate::health::{self, State as Health};
use crate::http::{Served, ServedRelay, Who, ready};

/// Destinations on the page. Those that need a person come first.
const DESTINATIONS: usize = 100;

/// Databases that are named at the top. Those that need a person come first.
const TROUBLES: usize = 20;

/// Characters of an error in a table.
const ERROR: usize = 160;

#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    db: String,
}

#[derive(Template)]
#[template(path = "overview.html")]
struct Overview {
    frame: Frame,
    here: String,
    history: String,
    events: String,
    troubles: Vec<Trouble>,
    more_troubles: usize,
    tiles: Vec<Tile>,
    pace: Vec<Tile>,
    counted: Option<String>,
    destinations: Vec<Destination>,
    more_destinations: usize,
    /// Whether lines name their database.
    several: bool,
    databases: Vec<Line>,
}

/// Something that a person should see to.
struct Trouble {
    database: Option<String>,
    text: String,
    bad: bool,
}

/// A number with its name.
struct Tile {
    name: &'static str,
    value: String,
    note: String,
    href: Option<String>,
    bad: bool,
}

struct Destination {
    database: String,
    name: String,
    href: Option<String>,
    to: Option<String>,
    state: Badge,
    since: Option<When>,
    pending: String,
    failed: i64,
    failed_text: String,
    in_flight: Option<String>,
    delivered: Option<String>,
    error: Option<String>,
    order: (Health, bool, bool),
}

struct Line {
    name: String,
    href: String,
    state: Badge,
    pending: String,
    failed: String,
    oldest: String,
    published: String,
    delivered: String,
    error: Option<String>,
}

/// One database, as it is known at the moment.
struct Known<'s> {
    database: &'s ServedRelay,
    standing: history::Standing,
    newest: Option<history::Sample>,
}

impl Known<'_> {
    fn backlog(&self) -> impl Iterator<Item = &Backlog> {
        self.standing.backlog.iter().flat_map(|(lines, _)| lines.iter())
    }

    fn messages(&self, wanted: impl Fn(&Backlog) -> bool) -> Option<i64> {
        self.standing.backlog.as_ref().map(|_| self.backlog().filter(|b| wanted(b)).map(|b| b.messages).sum())
    }

    fn oldest(&self) -> Option<i64> {
        self.backlog().filter(|b| b.status != "FAILED").map(|b| b.oldest_ms).max()
    }
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(asked): Query<Asked>) -> Result<Response, Oops> {
    let chosen = one_of(&served, &asked.db)?;
    let databases = served.databases.iter().filter(|d| chosen.is_none_or(|one| one.name == d.name));
    let known: Vec<Known<'_>> = databases.map(|database| known(&served, database)).collect();
    let db = chosen.map(|d| d.name.as_str()).filter(|_| served.databases.len() > 1).unwrap_or_default();
    let several = known.len() > 1;
    let newest = served.history.newest(chosen.map(|d| d.name.as_str()));
    let troubles = troubles(&served, &known);
    let mut destinations = destinations(&served, &known);
    let more_destinations = destinations.len().saturating_sub(DESTINATIONS);
    destinations.truncate(DESTINATIONS);
    let counted = known.iter().filter_map(|k| k.standing.backlog.as_ref().map(|(_, at)| at.elapsed())).max();
    let databases = if several { known.iter().map(line).collect() } else { Vec::new() };
    Ok(shown_page(&Overview {
        frame: Frame::new(&served, &who, Place::Overview, "Overview", chosen.map(|d| d.name.as_str()), true),
        here: Href::new("/").add("db", db).done(),
        history: Href::new("/history").add("db", db).done(),
        events: Href::new("/events").add("db", db).done(),
        more_troubles: troubles.len().saturating_sub(TROUBLES),
        troubles: troubles.into_iter().take(TROUBLES).collect(),
        tiles: tiles(&known, db),
        pace: pace(newest),
        counted: counted.filter(|age| *age > Duration::from_secs(20)).map(|age| span(age.as_millis() as i64)),
        destinations,
        more_destinations,
        several,
        databases,
    }))
}

fn known<'s>(served: &Served, database: &'s ServedRelay) -> Known<'s> {
    Known { database, standing: served.history.standing(&database.name), newest: served.history.newest(Some(&database.name)) }
}

/// What the readiness of relays says, and databases that don't answer: a line for each database, those that work not at all first.
fn troubles(served: &Served, known: &[Known<'_>]) -> Vec<Trouble> {
    let (_, document) = ready::document(served);
    let mut out = Vec::new();
    for k in known {
        let told = &document["databases"][&k.database.name];
        let list = |key: &str| told[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(shown);
        let mut all: Vec<String> = k.standing.error.iter().map(|e| shown(e)).chain(list("reasons")).collect();
        let bad = !all.is_empty();
        all.extend(list("warnings"));
        if !all.is_empty() {
            let database = (served.databases.len() > 1).then(|| shown(&k.database.name));
            out.push(Trouble { database, text: all.join("; "), bad });
        }
    }
    out.sort_by_key(|t| !t.bad);
    out
}

fn tiles(known: &[Known<'_>], db: &str) -> Vec<Tile> {
    let total = |status: &str| known.iter().map(|k| k.messages(|b| b.status == status)).fold(None, history::sum);
    let (pending, sending, failed) = (total("PENDING"), total("SENDING"), total("FAILED"));
    let log = known.iter().map(|k| k.standing.log).fold(None, history::sum);
    let sent = log.map(|log| (log - pending.unwrap_or(0) - sending.unwrap_or(0) - failed.unwrap_or(0)).max(0));
    let text = |n: Option<i64>| n.map_or_else(|| "?".to_owned(), number);
    let href = |status: &str| Some(Href::new("/messages").add("db", db).add("status", status).done());
    let oldest = known.iter().filter_map(Known::oldest).max();
    let here = known.iter().filter_map(|k| k.database.stats()).map(|s| s.in_flight as i64).reduce(|a, b| a + b);
    let in_flight = here.map(|n| format!("{} in flight here", number(n)));
    vec![
        Tile {
            name: "Pending",
            value: text(pending),
            note: oldest.map(|ms| format!("oldest {}", span(ms))).unwrap_or_default(),
            href: href("PENDING"),
            bad: false,
        },
        Tile { name: "Sending", value: text(sending), note: in_flight.unwrap_or_default(), href: href("SENDING"), bad: false },
        Tile {
            name: "Failed",
            value: text(failed),
            note: if failed.is_some_and(|n| n > 0) { "wait for a decision".into() } else { String::new() },
            href: href("FAILED"),
            bad: failed.is_some_and(|n| n > 0),
        },
        Tile {
            name: "Sent",
            value: sent.map_or_else(|| "?".to_owned(), about),
            note: "estimate, by row ids in the log".into(),
            href: href("SENT"),
            bad: false,
        },
    ]
}

/// What is going on now.
fn pace(newest: Option<history::Sample>) -> Vec<Tile> {
    let sample = newest.unwrap_or_default();
    let per_second = |n: Option<f64>| n.map_or_else(|| "–".to_owned(), rate);
    let tile = |name, value| Tile { name, value, note: String::new(), href: None, bad: false };
    vec![
        tile("Published", per_second(sample.published)),
        tile("Delivered", per_second(sample.delivered)),
        tile("Failed attempts", per_second(sample.failed)),
        tile("Commit to confirm", sample.median.map_or_else(|| "–".to_owned(), |ms| span(ms as i64))),
    ]
}

/// What is known of a destination: its health here, messages pending and FAILED, and its name where that has no secrets.
type Joined<'k> = (Option<health::Health>, i64, i64, Option<&'k str>);

fn destinations(served: &Served, known: &[Known<'_>]) -> Vec<Destination> {
    let now = Instant::now();
    let mut out = Vec::new();
    for k in known {
        let relay = k.database.stats();
        let mut joined: BTreeMap<String, Joined<'_>> = BTreeMap::new();
        for health in relay.iter().flat_map(|stats| health::all(stats, &served.routes, now)) {
            joined.insert(health.destination.clone(), (Some(health), 0, 0, None));
        }
        for line in k.backlog() {
            let name = redact_url(&line.destination);
            let secret = name != line.destination;
            let (_, pending, failed, raw) = joined.entry(name).or_default();
            *(if line.status == "FAILED" { failed } else { pending }) += line.messages;
            *raw = (!secret).then_some(&line.destination);
        }
        for (name, (health, pending, failed, raw)) in joined {
            let state = health.as_ref().map_or(Health::Ok, |h| h.state);
            let error = health.as_ref().and_then(|h| h.error.clone());
            let href = raw.map(|raw| {
                let status = if failed > 0 { "FAILED" } else { "" };
                Href::new("/messages").add("db", &k.database.name).add("destination", raw).add("status", status).done()
            });
            out.push(Destination {
                database: shown(&k.database.name),
                name: shown(&name),
                href,
                to: health.as_ref().map(|h| h.to.clone()).filter(|to| *to != name).map(|to| shown(&to)),
                state: health.as_ref().map_or_else(|| badge("–"), |h| badge(h.state.word())),
                since: health.as_ref().and_then(|h| h.down_seconds).map(|s| When::ago((s * 1_000.0) as i64)),
                pending: number(pending),
                failed,
                failed_text: number(failed),
                in_flight: health.as_ref().map(|h| number(h.in_flight as i64)),
                delivered: health.as_ref().map(|h| number(h.delivered as i64)),
                order: (state, failed == 0, error.is_none()),
                error: error.map(|e| short(&e, ERROR)),
            });
        }
    }
    out.sort_by(|a, b| a.order.cmp(&b.order).then_with(|| a.name.cmp(&b.name)).then_with(|| a.database.cmp(&b.database)));
    out
}

fn line(k: &Known<'_>) -> Line {
    let sample = k.newest.unwrap_or_default();
    let text = |n: Option<i64>| n.map_or_else(|| "?".to_owned(), number);
    let per_second = |n: Option<f64>| n.map_or_else(|| "–".to_owned(), rate);
    let error = k.standing.error.as_deref();
    Line {
        name: shown(&k.database.name),
        href: Href::new("/").add("db", &k.database.name).done(),
        state: badge(if error.is_some() { "down" } else { "ok" }),
        pending: text(k.messages(|b| b.status != "FAILED")),
        failed: text(k.messages(|b| b.status == "FAILED")),
        oldest: k.oldest().map_or_else(|| "–".to_owned(), span),
        published: per_second(sample.published),
        delivered: per_second(sample.delivered),
        error: error.map(|e| short(e, ERROR)),
    }
}
