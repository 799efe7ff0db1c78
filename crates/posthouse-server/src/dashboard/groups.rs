//! Groups and their runs.

use askama::Template;
use axum::Form;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use posthouse::store::{RunFilter, RunRow, RunStatus};
use serde::Deserialize;

use super::view::{Badge, Frame, Href, Notice, Oops, Place, Trail, When, badge, number, page as shown_page, short, shown, span};
use super::{ROWS, Shared, asked, first_of};
use crate::config::trigger_text;
use crate::http::Who;
use crate::ops;
use crate::output::now_ms;

/// Runs on the page of groups.
const LOOK: u32 = 20;

/// Groups on the page. A database knows more only of configurations that are long gone.
const GROUPS: usize = 200;

#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    db: String,
    /// Of runs: only of this group.
    #[serde(default)]
    group: String,
    /// Of runs: where the page begins.
    #[serde(default)]
    before: String,
    #[serde(default)]
    trail: String,
}

#[derive(Template)]
#[template(path = "groups.html")]
struct Groups {
    frame: Frame,
    here: String,
    events: String,
    error: Option<String>,
    groups: Vec<Line>,
    /// Whether there are any in the configuration.
    configured: bool,
    runs: Vec<Run>,
    all_runs: String,
}

/// A group.
struct Line {
    name: String,
    raw: String,
    houses: String,
    trigger: String,
    next: Option<When>,
    paused: Option<When>,
    running: usize,
    last: Option<Run>,
    runs: String,
    /// It has runs that can be asked for here.
    can_run: bool,
}

/// A run.
struct Run {
    id: i64,
    group: String,
    cause: String,
    status: Badge,
    began: When,
    took: String,
    delivered: String,
    retried: String,
    failed: String,
    instance: Option<String>,
    error: Option<String>,
}

impl Run {
    fn of(run: &RunRow) -> Self {
        let took = match (run.started_us, run.ended_us) {
            (Some(began), Some(ended)) if run.status != RunStatus::Lost => span((ended - began) / 1_000),
            (Some(began), None) if run.status == RunStatus::Running => span(now_ms() - began / 1_000),
            _ => "–".into(),
        };
        Self {
            id: run.id,
            group: shown(&run.group),
            cause: shown(&run.cause),
            status: badge(run.status.as_str()),
            began: When::us(run.started_us.unwrap_or(run.requested_us)),
            took,
            delivered: number(run.delivered),
            retried: number(run.retried),
            failed: number(run.failed),
            instance: run.instance.as_deref().map(shown),
            error: run.error.as_deref().map(|e| short(e, 300)),
        }
    }
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let mut page = Groups {
        frame: Frame::new(&served, &who, Place::Groups, "Groups and runs", Some(&database.name), false),
        here: Href::new("/groups").add("db", &query.db).done(),
        events: Href::new("/events").add("db", &query.db).done(),
        error: None,
        groups: Vec::new(),
        configured: !served.config.groups.is_empty(),
        runs: Vec::new(),
        all_runs: Href::new("/runs").add("db", &query.db).done(),
    };
    let filter = RunFilter { limit: LOOK, ..RunFilter::default() };
    let (lines, runs) = tokio::join!(
        asked(database, ops::groups::list(&served.config, database)),
        asked(database, database.people.runs().list(&filter))
    );
    match (lines, runs) {
        (Ok(lines), Ok(runs)) => {
            page.groups = lines.into_iter().take(GROUPS).map(|line| Line::of(line, &query.db)).collect();
            page.runs = runs.iter().map(Run::of).collect();
        }
        (Err(e), _) | (_, Err(e)) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}

impl Line {
    fn of(line: ops::groups::Line, db: &str) -> Self {
        let group = line.group.as_ref();
        Self {
            houses: match group {
                Some(g) if g.houses.is_empty() => "–".into(),
                Some(g) => g.houses.to_string(),
                None => "?".into(),
            },
            trigger: group.map_or_else(|| "not configured here".into(), |g| shown(&trigger_text(&g.trigger))),
            next: line.next_due_us.map(When::us),
            paused: line.row.paused_us.map(When::us),
            running: line.running(),
            last: line.last().map(Run::of),
            runs: Href::new("/runs").add("db", db).add("group", &line.name).done(),
            can_run: ops::groups::runnable(group.map(|g| &g.trigger), &line.name).is_ok(),
            name: shown(&line.name),
            raw: line.name,
        }
    }
}

#[derive(Template)]
#[template(path = "runs.html")]
struct Runs {
    frame: Frame,
    here: String,
    events: String,
    error: Option<String>,
    group: Option<String>,
    groups: String,
    runs: Vec<Run>,
    newer: Option<String>,
    older: Option<String>,
    first: bool,
}

pub(super) async fn runs(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let filter = RunFilter {
        group: Some(query.group.clone()).filter(|g| !g.is_empty()),
        before: query.before.parse().ok(),
        limit: ROWS,
        ..RunFilter::default()
    };
    let href = |before: &str, trail: &str| {
        Href::new("/runs").add("db", &query.db).add("group", &query.group).add("before", before).add("trail", trail).done()
    };
    let trail = Trail::parse(&query.trail);
    let mut page = Runs {
        frame: Frame::new(&served, &who, Place::Groups, "Runs", Some(&database.name), false),
        here: href(&query.before, &query.trail),
        events: Href::new("/events").add("db", &query.db).done(),
        error: None,
        group: filter.group.as_deref().map(shown),
        groups: Href::new("/groups").add("db", &query.db).done(),
        runs: Vec::new(),
        newer: trail.back().map(|(before, trail)| href(&before, &trail)),
        older: None,
        first: filter.before.is_none(),
    };
    match asked(database, database.people.runs().list(&filter)).await {
        Ok(runs) => {
            // A full page may have another one behind it.
            let next = runs.last().filter(|_| runs.len() == ROWS as usize);
            page.older = next.map(|last| href(&last.id.to_string(), &trail.onward(&query.before)));
            page.runs = runs.iter().map(Run::of).collect();
        }
        Err(e) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}

#[derive(Debug, Deserialize)]
pub(super) struct Act {
    #[serde(default)]
    db: String,
    group: String,
    action: String,
}

/// Run now, stop, pause, resume.
pub(super) async fn act(State(served): State<Shared>, who: Who, Form(act): Form<Act>) -> Response {
    let database = match first_of(&served, &act.db) {
        Ok(database) => database,
        Err(oops) => return oops.into_response(),
    };
    let (config, name) = (&served.config, act.group.as_str());
    let said = match act.action.as_str() {
        "run" => {
            ops::groups::run(config, database, &who, name).await.map(|id| format!("a run of {name} was asked for (request {id})"))
        }
        "stop" => ops::groups::stop(config, database, &who, name)
            .await
            .map(|()| format!("runs of {name} that are going now are told to stop")),
        "pause" | "resume" => {
            let paused = act.action == "pause";
            ops::groups::pause(config, database, &who, name, paused).await.map(|changed| match (paused, changed) {
                (true, true) => format!("{name} is paused"),
                (true, false) => format!("{name} was paused already"),
                (false, true) => format!("{name} goes on"),
                (false, false) => format!("{name} was not paused"),
            })
        }
        other => Err(ops::Refused::field("action", format!("there is no action {other:?}"))),
    };
    match said {
        Ok(text) => Notice::done(shown(&text)),
        Err(refused) => Notice::not_done(&refused),
    }
}
