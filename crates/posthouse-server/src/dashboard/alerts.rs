//! Alerts: what fires, what is silenced, the rules, and what happened.

use askama::Template;
use axum::Form;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use posthouse::store::{AlertEvent, AlertFilter, AlertKind, AlertNotice, AlertRow, AlertSilence, AlertWatch};
use serde::Deserialize;

use super::view::{Badge, Frame, Href, Notice, Oops, Place, Trail, When, badge, page as shown_page, short, shown};
use super::{ROWS, Shared, asked, first_of};
use crate::alerts::rules::Rule;
use crate::config::{ALL_ALERTS, Config};
use crate::http::Who;
use crate::ops::{self, Refused};

/// Alerts, silences and rules on the page, of each so many.
const LINES: usize = 200;

/// How long a silence can be chosen to last.
const TIMES: [(&str, &str); 5] =
    [("1h", "1 hour"), ("4h", "4 hours"), ("1day", "1 day"), ("7days", "7 days"), ("30days", "30 days")];

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Asked {
    db: String,
    /// Of what happened: where the page begins.
    before: String,
    trail: String,
}

#[derive(Template)]
#[template(path = "alerts.html")]
struct Alerts {
    frame: Frame,
    here: String,
    events: String,
    error: Option<String>,
    judge: Option<String>,
    alerts: Vec<Line>,
    silences: Vec<Silence>,
    rules: Vec<RuleLine>,
    times: [(&'static str, &'static str); 5],
    history: Vec<Event>,
    newer: Option<String>,
    older: Option<String>,
    /// It is the first page of what happened.
    first: bool,
}

/// An alert that isn't fine.
struct Line {
    state: Badge,
    rule: String,
    raw_rule: String,
    subject: String,
    raw_subject: String,
    /// What is so.
    sentence: String,
    detail: Option<String>,
    since: When,
    told: Option<When>,
    silenced: bool,
}

struct Silence {
    rule: String,
    raw_rule: String,
    subject: String,
    raw_subject: String,
    until: When,
    by: String,
    reason: String,
}

struct RuleLine {
    name: String,
    threshold: String,
    interval: String,
    wait: String,
    channels: String,
}

struct Event {
    at: When,
    what: Badge,
    rule: String,
    subject: String,
    value: String,
    told: String,
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let config = &served.config;
    let href =
        |before: &str, trail: &str| Href::new("/alerts").add("db", &query.db).add("before", before).add("trail", trail).done();
    let trail = Trail::parse(&query.trail);
    let rules = config.rules_of(&database.name);
    let mut page = Alerts {
        frame: Frame::new(&served, &who, Place::Alerts, "Alerts", Some(&database.name), false),
        here: href(&query.before, &query.trail),
        events: Href::new("/events").add("db", &query.db).done(),
        error: None,
        judge: None,
        alerts: Vec::new(),
        silences: Vec::new(),
        rules: rules.iter().take(LINES).map(RuleLine::of).collect(),
        times: TIMES,
        history: Vec::new(),
        newer: trail.back().map(|(before, trail)| href(&before, &trail)),
        older: None,
        first: query.before.is_empty(),
    };
    let filter = AlertFilter { rule: None, before: query.before.parse().ok(), limit: ROWS };
    let store = database.people.alerts();
    match tokio::join!(asked(database, store.watch()), asked(database, store.events(&filter))) {
        (Ok(watch), Ok(history)) => {
            page.judge = watch.judge.as_deref().map(shown);
            let mut alerts: Vec<&AlertRow> = watch.alerts.iter().collect();
            alerts.sort_by_key(|row| (!row.firing, row.since_us));
            page.alerts = alerts.into_iter().take(LINES).map(|row| Line::of(row, &watch, &rules, &database.name)).collect();
            page.silences = watch.silences.iter().take(LINES).map(Silence::of).collect();
            // A full page may have another one behind it.
            let next = history.last().filter(|_| history.len() == ROWS as usize);
            page.older = next.map(|last| href(&last.id.to_string(), &trail.onward(&query.before)));
            page.history = history.iter().map(|event| Event::of(event, config)).collect();
        }
        (Err(e), _) | (_, Err(e)) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}

impl Line {
    fn of(row: &AlertRow, watch: &AlertWatch, rules: &[Rule], database: &str) -> Self {
        let silenced = watch.silences.iter().any(|s| s.covers(&row.rule, &row.subject));
        let kind = rules.iter().find(|rule| rule.name == row.rule).map(|rule| rule.kind);
        Self {
            state: badge(match (row.firing, silenced) {
                (true, true) => "silenced",
                (true, false) => "FIRING",
                (false, _) => "pending",
            }),
            rule: shown(&row.rule),
            raw_rule: row.rule.clone(),
            subject: shown(&row.subject),
            raw_subject: row.subject.clone(),
            sentence: shown(&kind.map_or_else(|| row.value.to_string(), |kind| kind.sentence(row.value, &row.subject, database))),
            detail: row.detail.as_deref().map(|d| short(d, 300)),
            since: When::us(row.since_us),
            told: row.told_us.map(When::us),
            silenced,
        }
    }
}

impl Silence {
    fn of(silence: &AlertSilence) -> Self {
        Self {
            rule: if silence.rule.is_empty() { ALL_ALERTS.to_owned() } else { shown(&silence.rule) },
            raw_rule: silence.rule.clone(),
            subject: shown(&silence.subject),
            raw_subject: silence.subject.clone(),
            until: When::us(silence.until_us),
            by: shown(&silence.actor),
            reason: short(&silence.reason, 300),
        }
    }
}

impl RuleLine {
    fn of(rule: &Rule) -> Self {
        let told = rule.shown();
        let text = |key: &str| told[key].as_str().map_or_else(|| "–".to_owned(), shown);
        let channels = told["channels"].as_array().into_iter().flatten().filter_map(|c| c.as_str());
        Self {
            name: shown(&rule.name),
            threshold: rule.kind.unit().text(rule.threshold),
            interval: text("interval"),
            wait: text("for"),
            channels: shown(&channels.collect::<Vec<_>>().join(", ")),
        }
    }
}

impl Event {
    fn of(event: &AlertEvent, config: &Config) -> Self {
        let kind = config.alerts.iter().find(|rule| rule.name == event.rule).map(|rule| rule.kind);
        Self {
            at: When::us(event.at_us),
            what: Badge {
                text: event.kind.as_str().into(),
                kind: match event.kind {
                    AlertKind::Fired | AlertKind::Repeated => "bad",
                    AlertKind::Recovered => "good",
                    _ => "plain",
                },
            },
            rule: shown(&event.rule),
            subject: shown(&event.subject),
            value: kind.map_or_else(|| event.value.to_string(), |kind| kind.unit().text(event.value)),
            told: whom(event),
        }
    }
}

/// Whom an event was told, and through what it could not be.
fn whom(event: &AlertEvent) -> String {
    let notice = |n: &AlertNotice| match (n.sent_us, n.due_us, &n.error) {
        (Some(_), ..) => n.channel.clone(),
        (None, Some(_), None) => format!("{} (being sent)", n.channel),
        (None, Some(_), Some(error)) => format!("{} (tried {} times: {error})", n.channel, n.attempts.max(0)),
        (None, None, error) => format!("{} (given up: {})", n.channel, error.as_deref().unwrap_or("never tried")),
    };
    match (&event.notices[..], event.silenced) {
        ([], true) => "nobody (silenced)".into(),
        ([], false) => "nobody".into(),
        (notices, _) => short(&notices.iter().map(notice).collect::<Vec<_>>().join(", "), 300),
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Act {
    db: String,
    action: String,
    rule: String,
    subject: String,
    time: String,
    reason: String,
}

/// Silence, or end a silence.
pub(super) async fn act(State(served): State<Shared>, who: Who, Form(act): Form<Act>) -> Response {
    let database = match first_of(&served, &act.db) {
        Ok(database) => database,
        Err(oops) => return oops.into_response(),
    };
    let about = format!(
        "{}{}{}",
        if act.rule.is_empty() { ALL_ALERTS } else { &act.rule },
        if act.subject.is_empty() { "" } else { " of " },
        act.subject
    );
    let done = async {
        match act.action.as_str() {
            "silence" => {
                let time = humantime::parse_duration(&act.time)
                    .map_err(|_| Refused::field("time", format!("{:?} is no length of time, such as 4h", act.time)))?;
                ops::alerts::silence(&served.config, database, &who, (&act.rule, &act.subject), time, &act.reason).await?;
                Ok(format!("{about} is silenced for {}", act.time))
            }
            "unsilence" if ops::alerts::unsilence(database, &who, &act.rule, &act.subject).await? => {
                Ok(format!("{about} is no longer silenced"))
            }
            "unsilence" => Err(Refused::missing(format!("{about} was not silenced"))),
            other => Err(Refused::field("action", format!("there is no action {other:?}"))),
        }
    };
    match done.await {
        Ok(text) => Notice::done(shown(&text)),
        Err(refused) => Notice::not_done(&refused),
    }
}
