//! What people want of a group: run it, stop it, pause it. They ask in the database, and every instance sees it there.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use posthouse::RunCounts;
use posthouse::store::{RunFilter, RunRow, RunStatus, RunStore};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::commands::user;
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::groups;
use crate::output::{self, clean, count};

/// How often the request is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// Runs of one request at most.
const PAGE: u32 = 1_000;

/// `within`: an instance must have taken it by then; None: nobody waits for it.
pub(super) async fn run(global: &Global, databases: &[Database], name: &str, within: Option<Duration>) -> Result<(), Failure> {
    let asked = futures_util::future::join_all(databases.iter().map(|d| one(d, name, within))).await;
    let (mut told, mut failure) = (Vec::new(), None::<Failure>);
    for (database, asked) in databases.iter().zip(asked) {
        let (value, line, failed) = match asked {
            Ok((value, line, failed)) => (value, line, failed),
            Err(e) => (json!({ "database": database.name, "error": e.text }), String::new(), Some(e)),
        };
        told.push(value);
        if !global.json && !line.is_empty() {
            output::say(&line);
        }
        if let Some(e) = failed {
            failure = Some(match failure {
                None => e,
                Some(other) => other.and(e),
            });
        }
    }
    if global.json {
        output::json(&json!({ "group": name, "databases": told }));
    }
    match failure {
        None => Ok(()),
        Some(failure) => Err(Failure { printed: true, ..failure }),
    }
}

/// Asks in one database, and waits: the document, the line for people, and the failure if it wasn't done.
async fn one(database: &Database, name: &str, within: Option<Duration>) -> Result<(Value, String, Option<Failure>), Failure> {
    let (store, ..) = database.ready().await?;
    let runs = store.runs();
    let failure = |e: posthouse::Error| database.failure(&e);
    let request = groups::ask(store.as_ref(), &user(), name).await.map_err(failure)?;
    let mut told = json!({ "database": database.name, "request": request });
    let Some(within) = within else {
        told["status"] = json!(RunStatus::Requested);
        let line = format!("{}: asked for a run of {} (request {request})", clean(&database.name), clean(name));
        return Ok((told, line, None));
    };
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(100));
    let asked = Instant::now();
    let rows = loop {
        let rows = rows(runs, request).await.map_err(failure)?;
        let Some(own) = rows.iter().find(|r| r.id == request) else {
            return Err(Failure::not_so(format!("database {:?}: request {request} is gone", database.name)));
        };
        if own.status.is_over() {
            break rows;
        }
        let taken: Vec<&RunRow> = rows.iter().filter(|r| r.request == Some(request)).collect();
        if taken.is_empty() && asked.elapsed() > within {
            // Whoever comes later must not run what nobody waits for.
            let why = "nobody took it, so it was withdrawn";
            runs.close(request, RunStatus::Discarded, RunCounts::default(), Some(why)).await.map_err(failure)?;
            spinner.finish_and_clear();
            let why = format!(
                "database {:?}: no live instance with a group {name:?} took the request within {}; is a relay running?",
                database.name,
                output::span(within)
            );
            return Err(Failure::not_so(why));
        }
        let ended = taken.iter().filter(|r| r.status.is_over()).count();
        let messages: i64 = taken.iter().map(|r| r.messages).sum();
        spinner.set_message(match taken.len() {
            0 => format!("{name}: waiting for an instance to take it"),
            n => format!("{name}: {}, {ended} done, {}", count(n, "instance"), count(messages as usize, "message")),
        });
        tokio::time::sleep(LOOK).await;
    };
    spinner.finish_and_clear();
    Ok(outcome(database, name, request, &rows, told))
}

async fn rows(runs: &dyn RunStore, request: i64) -> Result<Vec<RunRow>, posthouse::Error> {
    runs.list(&RunFilter { request: Some(request), limit: PAGE, ..RunFilter::default() }).await
}

fn outcome(database: &Database, name: &str, request: i64, rows: &[RunRow], mut told: Value) -> (Value, String, Option<Failure>) {
    let Some(own) = rows.iter().find(|r| r.id == request) else { return (told, String::new(), None) };
    let of_instances: Vec<&RunRow> = rows.iter().filter(|r| r.id != request).collect();
    told["status"] = json!(own.status);
    told["messages"] = own.messages.into();
    told["delivered"] = own.delivered.into();
    told["retried"] = own.retried.into();
    told["failed"] = own.failed.into();
    told["error"] = json!(own.error);
    told["runs"] = json!(of_instances);
    let took = own.ended_us.map_or(0, |ended| ended - own.requested_us);
    let line = format!(
        "{}: {} {} in {} on {}: {} sent, {} to retry, {} failed",
        clean(&database.name),
        clean(name),
        own.status.as_str(),
        output::span(Duration::from_micros(took.unsigned_abs())),
        count(of_instances.iter().filter(|r| r.status != RunStatus::Discarded).count(), "instance"),
        own.delivered,
        own.retried,
        own.failed,
    );
    let failed = (own.status != RunStatus::Done).then(|| {
        let why = own.error.as_deref().map(|e| format!(": {e}")).unwrap_or_default();
        Failure::not_so(format!("database {:?}: the run of {name:?} is {}{why}", database.name, own.status.as_str()))
    });
    (told, line, failed)
}

pub(super) async fn stop(global: &Global, databases: &[Database], name: &str) -> Result<(), Failure> {
    let mut told = Vec::new();
    for database in databases {
        let (store, ..) = database.ready().await?;
        groups::tell_to_stop(store.as_ref(), &user(), name).await.map_err(|e| database.failure(&e))?;
        told.push(json!({ "database": database.name, "group": name, "stopped": true }));
        if !global.json {
            output::say(&format!("{}: runs of {} that are going now are told to stop", clean(&database.name), clean(name)));
        }
    }
    if global.json {
        output::json(&json!({ "group": name, "databases": told }));
    }
    Ok(())
}

pub(super) async fn pause(global: &Global, databases: &[Database], name: &str, paused: bool) -> Result<(), Failure> {
    let mut told = Vec::new();
    for database in databases {
        let (store, ..) = database.ready().await?;
        let changed = groups::set_paused(store.as_ref(), &user(), name, paused).await.map_err(|e| database.failure(&e))?;
        told.push(json!({ "database": database.name, "group": name, "paused": paused, "changed": changed }));
        if !global.json {
            let what = match (paused, changed) {
                (true, true) => "is paused",
                (true, false) => "was paused already",
                (false, true) => "goes on",
                (false, false) => "was not paused",
            };
            output::say(&format!("{}: {} {what}", clean(&database.name), clean(name)));
        }
    }
    if global.json {
        output::json(&json!({ "group": name, "databases": told }));
    }
    Ok(())
}
