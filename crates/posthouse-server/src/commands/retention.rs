//! `posthouse retention`.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use comfy_table::{Cell, CellAlignment};
use indicatif::ProgressBar;
use posthouse::RetentionSettings;
use posthouse::retention::{Plan, Progress, Report, Retention};
use posthouse::store::{ArchiveFilter, Beside, Partition};
use serde_json::{Value, json};

use super::load;
use super::relay::Signals;
use crate::cli::{Global, RetentionCommand};
use crate::database::Database;
use crate::failure::Failure;
use crate::ops::retention::{Standing, fate, standing, step, term};
use crate::output::{self, clean, count};

/// How long `--dry-run` counts.
const COUNT: Duration = Duration::from_secs(30);

/// A run that a person waits for has no end of its own.
const NO_END: Duration = Duration::from_secs(30 * 86_400);

pub(crate) async fn run(global: &Global, command: RetentionCommand) -> Result<(), Failure> {
    let config = load(global)?;
    let databases = config.sources().iter().map(|(name, d)| Database::open(name, d)).collect::<Result<Vec<_>, _>>()?;
    match command {
        RetentionCommand::Run { dry_run: true } => plan(global, &databases).await,
        RetentionCommand::Run { dry_run: false } => take_out(global, &databases).await,
        RetentionCommand::Status { limit } => status(global, &databases, limit).await,
        RetentionCommand::Verify { limit } => verify(global, &databases, limit).await,
    }
}

/// Those databases of which something is to be removed.
fn with_retention(databases: &[Database]) -> Result<Vec<(&Database, &RetentionSettings)>, Failure> {
    let some: Vec<_> = databases.iter().filter_map(|d| Some((d, d.retention_settings()?))).collect();
    if some.is_empty() {
        return Err(Failure::usage(
            "nothing is ever removed: the configuration has no [retention]; write one, for example with sent = \"7d\"",
        ));
    }
    Ok(some)
}

/// The first failure, after all databases had their turn.
fn all(failures: Vec<Failure>, printed: bool) -> Result<(), Failure> {
    let failure = failures.into_iter().reduce(Failure::and);
    failure.map_or(Ok(()), |failure| Err(Failure { printed, ..failure }))
}

async fn take_out(global: &Global, databases: &[Database]) -> Result<(), Failure> {
    let mut signals = Signals::new()?;
    let (mut told, mut failures) = (Vec::new(), Vec::new());
    for (database, settings) in with_retention(databases)? {
        let result = take_out_of(database, settings, &mut signals).await;
        let (report, stopped) = match result {
            Ok(done) => done,
            Err(failure) => {
                told.push(json!({ "database": database.name, "error": failure.text }));
                failures.push(failure);
                continue;
            }
        };
        let mut line = json!(report);
        line["database"] = database.name.clone().into();
        line["messages"] = report.messages().into();
        told.push(line);
        if !global.json {
            print_report(&database.name, &report);
        }
        let why = if report.busy {
            Some("another instance is at it; what it leaves can be looked at with `posthouse retention status`".to_owned())
        } else if stopped {
            Some("stopped; the next run goes on there".to_owned())
        } else {
            let waiting = report.waiting.iter().map(|(number, why)| format!("partition {number} can't go yet: {why}"));
            Some(report.problems.iter().cloned().chain(waiting).collect::<Vec<_>>().join("\n")).filter(|text| !text.is_empty())
        };
        if let Some(why) = why {
            failures.push(Failure::not_so(format!("database {:?}: {why}", database.name)));
        }
        if stopped {
            break;
        }
    }
    if global.json {
        output::json(&json!({ "databases": told }));
    }
    all(failures, global.json)
}

/// What was done, and whether somebody stopped it.
async fn take_out_of(
    database: &Database,
    settings: &RetentionSettings,
    signals: &mut Signals,
) -> Result<(Report, bool), Failure> {
    database.ready().await?;
    let mut settings = settings.clone();
    settings.budget = NO_END;
    let retention = database.retention_with(settings)?;
    for warning in retention.settings().warnings() {
        tracing::warn!(database = database.name, warning, "retention");
    }
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let stop = AtomicBool::new(false);
    let mut removed = 0;
    let mut watch = |progress: Progress| {
        match progress {
            Progress::Noted(number, step) => bar.set_message(format!("partition {number}: {}", step.as_str().to_lowercase())),
            Progress::Archiving(messages) => bar.set_message(format!("{messages} messages into the archive")),
            Progress::Removed(rows) => {
                removed += rows;
                bar.set_message(format!("{removed} rows removed"));
            }
            _ => {}
        }
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let run = retention.run(&mut watch);
    tokio::pin!(run);
    let mut stopped = false;
    let report = loop {
        tokio::select! {
            report = &mut run => break report,
            () = signals.next() => {
                // Once more ends it at once, which leaves nothing half done either.
                if stopped {
                    return Err(Failure::not_so("stopped at once; the next run goes on there"));
                }
                stopped = true;
                stop.store(true, Ordering::Relaxed);
            }
        }
    };
    bar.finish_and_clear();
    Ok((report.map_err(|e| database.failure(&e))?, stopped))
}

fn print_report(name: &str, report: &Report) {
    if report.is_idle() && !report.busy {
        output::say(&format!("{}: nothing is over its term", clean(name)));
        return;
    }
    for p in &report.partitions {
        output::say(&format!(
            "{}: partition {} (ids {} to {}) is gone with {}; {} kept",
            clean(name),
            p.number,
            p.low,
            p.high - 1,
            messages(p.amount),
            messages(p.survivors)
        ));
    }
    for (rows, what) in [(report.removed, "one by one"), (report.kept_removed, "that had outlived their partition")] {
        if rows > 0 {
            output::say(&format!("{}: {} went {what}", clean(name), messages(rows)));
        }
    }
    print_beside(name, &report.beside, "went");
    if report.files > 0 {
        let files = count(usize::try_from(report.files).unwrap_or(0), "file");
        output::say(&format!("{}: {files} written to the archive, {}", clean(name), output::bytes(report.bytes)));
    }
}

fn messages(n: i64) -> String {
    count(usize::try_from(n).unwrap_or(0), "message")
}

fn print_beside(name: &str, beside: &[(Beside, i64)], verb: &str) {
    for (what, rows) in beside {
        let rows = count(usize::try_from(*rows).unwrap_or(0), "row");
        output::say(&format!("{}: {rows} of {} {verb}", clean(name), what.as_str()));
    }
}

async fn plan(global: &Global, databases: &[Database]) -> Result<(), Failure> {
    let (mut told, mut failures) = (Vec::new(), Vec::new());
    for (database, settings) in with_retention(databases)? {
        let planned = async {
            database.ready().await?;
            let retention = database.retention_with(settings.clone())?;
            retention.plan(COUNT).await.map_err(|e| database.failure(&e))
        };
        match planned.await {
            Ok(plan) => {
                if !global.json {
                    print_plan(&database.name, settings, &plan);
                }
                let mut line = json!(plan);
                line["database"] = database.name.clone().into();
                line["messages"] = plan.messages().into();
                line["messages_are_estimated"] = (!plan.partitions.is_empty()).into();
                told.push(line);
            }
            Err(failure) => {
                told.push(json!({ "database": database.name, "error": failure.text }));
                failures.push(failure);
            }
        }
    }
    if global.json {
        output::json(&json!({ "databases": told }));
    }
    all(failures, global.json)
}

fn print_plan(name: &str, settings: &RetentionSettings, plan: &Plan) {
    let name = clean(name);
    let to = settings.archive.as_deref().map_or("nowhere: they are gone then".into(), clean);
    for begun in &plan.begun {
        output::say(&format!("{name}: partition {} would be finished, from {} on", begun.number, begun.step.as_str()));
    }
    for (p, survivors) in &plan.partitions {
        let rows = p.rows.map_or_else(|| "an unknown number of messages".into(), |rows| format!("about {}", messages(rows)));
        let bytes = p.bytes.map(|b| format!(", {}", output::bytes(b))).unwrap_or_default();
        output::say(&format!(
            "{name}: partition {} (ids {} to {}) would go with {rows}{bytes}; {} would be kept",
            p.number,
            p.low,
            p.high - 1,
            messages(*survivors)
        ));
    }
    let least = if plan.at_least { "at least " } else { "" };
    for (rows, what) in [(plan.removed, "one by one"), (plan.kept_removed, "that had outlived their partition")] {
        if rows > 0 {
            output::say(&format!("{name}: {least}{} would go {what}", messages(rows)));
        }
    }
    print_beside(&name, &plan.beside, "would go");
    if plan.messages() + i64::try_from(plan.begun.len() + plan.partitions.len()).unwrap_or(0) > 0 {
        output::say(&format!("{name}: archived to {to}"));
    } else if plan.beside.is_empty() {
        output::say(&format!("{name}: nothing is over its term"));
    }
}

async fn status(global: &Global, databases: &[Database], limit: u32) -> Result<(), Failure> {
    let (mut lines, mut failures) = (Vec::new(), Vec::new());
    for database in databases {
        match standing_of(database, limit).await {
            Ok(standing) => {
                if !global.json {
                    print_status(database, &standing);
                }
                lines.push(told(database, &standing));
            }
            Err(failure) => {
                lines.push(json!({ "database": database.name, "error": failure.text }));
                failures.push(failure);
            }
        }
    }
    if global.json {
        output::json(&json!({ "databases": lines }));
    }
    all(failures, global.json)
}

/// As JSON, for programs.
fn told(database: &Database, standing: &Standing) -> Value {
    let sent = database.retention_settings().and_then(|s| s.sent);
    let partitions: Option<Vec<Value>> = standing.partitions.as_ref().map(|partitions| {
        let line = |p: &Partition| {
            let mut line = json!(p);
            line["over"] = sent.is_some_and(|term| p.is_over(term)).into();
            line
        };
        partitions.iter().map(line).collect()
    });
    let term = |d: Duration| humantime::format_duration(d).to_string();
    json!({
        "database": database.name, "configured": database.retention_settings().is_some(), "sent": sent.map(term),
        "archive": database.retention_settings().and_then(|s| s.archive.clone()), "partitions": partitions,
        "retired": standing.retired, "archives": standing.archives,
    })
}

async fn standing_of(database: &Database, limit: u32) -> Result<Standing, Failure> {
    let (store, ..) = database.ready().await?;
    standing(&*store, limit, None).await.map_err(|e| database.failure(&e))
}

fn print_status(database: &Database, status: &Standing) {
    let settings = database.retention_settings();
    let name = clean(&database.name);
    match settings {
        None => output::say(&format!("{name}: nothing is removed, as there is no [retention]")),
        Some(settings) => {
            let sent = term(settings.sent);
            let archive = settings.archive.as_deref().map_or("no archive".into(), |to| format!("archive {}", clean(to)));
            output::say(&format!("{name}: delivered messages stay {sent}; {archive}"));
        }
    }
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    match &status.partitions {
        None => output::say("the log has no partitions: rows go one by one"),
        Some(partitions) => {
            let mut table = output::table(&["partition", "first id", "rows (about)", "size", "newest", "next"]);
            for p in partitions {
                table.add_row([
                    right(p.number.to_string()),
                    right(p.low.to_string()),
                    right(p.rows.map_or_else(|| "?".into(), |n| n.to_string())),
                    right(p.bytes.map(output::bytes).unwrap_or_default()),
                    Cell::new(p.newest_ms.map_or_else(|| "(empty)".into(), output::relative)),
                    Cell::new(fate(p, settings.and_then(|s| s.sent))),
                ]);
            }
            output::print_table(table);
        }
    }
    if !status.retired.is_empty() {
        output::say("");
        let mut table = output::table(&["went", "first id", "messages", "kept", "step", "when"]);
        for r in &status.retired {
            table.add_row([
                right(r.number.to_string()),
                right(r.low.to_string()),
                right(r.amount.to_string()),
                right(r.survivors.to_string()),
                Cell::new(step(r.step)),
                Cell::new(output::relative(r.step_ms)),
            ]);
        }
        output::print_table(table);
    }
    if !status.archives.is_empty() {
        output::say("");
        let mut table = output::table(&["messages", "size", "written", "file"]);
        for a in &status.archives {
            table.add_row([
                right(a.amount.to_string()),
                right(output::bytes(a.bytes)),
                Cell::new(a.written_ms.map_or_else(|| "not yet".into(), output::relative)),
                Cell::new(clean(&a.location)),
            ]);
        }
        output::print_table(table);
    }
}

async fn verify(global: &Global, databases: &[Database], limit: u32) -> Result<(), Failure> {
    let (mut told, mut failures) = (Vec::new(), Vec::new());
    for database in databases {
        let verified = async {
            let (store, ..) = database.ready().await?;
            let settings = database.retention_settings().cloned().unwrap_or_default();
            let retention: Retention = database.retention_with(settings)?;
            let files = store.retention().archives(&ArchiveFilter { limit, ..ArchiveFilter::default() }).await;
            let files = files.map_err(|e| database.failure(&e))?;
            let bar = super::progress(files.len() as u64);
            let mut verdicts = Vec::new();
            for file in files.into_iter().filter(|file| file.written_ms.is_some()) {
                verdicts.push(retention.verdict(file).await);
                bar.inc(1);
            }
            bar.finish_and_clear();
            Ok::<_, Failure>(verdicts)
        };
        match verified.await {
            Ok(verdicts) => {
                let bad = verdicts.iter().filter(|v| v.problem.is_some()).count();
                if !global.json {
                    for problem in verdicts.iter().filter_map(|v| v.problem.as_deref()) {
                        output::say(&format!("{}: {}", clean(&database.name), clean(problem)));
                    }
                    let good: i64 = verdicts.iter().filter(|v| v.problem.is_none()).map(|v| v.file.amount).sum();
                    output::say(&format!(
                        "{}: {} of {} as written, with {}",
                        clean(&database.name),
                        verdicts.len() - bad,
                        count(verdicts.len(), "file"),
                        messages(good)
                    ));
                }
                told.push(json!({ "database": database.name, "files": verdicts }));
                if bad > 0 {
                    let text = format!("database {:?}: {} not as written", database.name, count(bad, "file"));
                    failures.push(Failure::not_so(text));
                }
            }
            Err(failure) => {
                told.push(json!({ "database": database.name, "error": failure.text }));
                failures.push(failure);
            }
        }
    }
    if global.json {
        output::json(&json!({ "databases": told }));
    }
    all(failures, global.json)
}
