//! `posthouse alerts`.

use comfy_table::{Cell, Color, Row};
use posthouse::store::{AlertEvent, AlertFilter, AlertKind, AlertRow, AlertSilence, AlertWatch};
use serde_json::{Value, json};

use super::{actor_named, load, one_database};
use crate::alerts::channels::Channels;
use crate::alerts::notice::Notice;
use crate::alerts::rules::Rule;
use crate::cli::{Alerts, Global, WhichAlert};
use crate::config::{ALL_ALERTS, Config, suggest};
use crate::database::Database;
use crate::failure::{Exit, Failure};
use crate::ops::alerts::{LONGEST, known};
use crate::output::{self, clean, count, now_ms};

pub(crate) async fn run(global: &Global, command: Alerts) -> Result<(), Failure> {
    let config = load(global)?;
    match command {
        Alerts::List { history: true, rule, limit, before } => history(global, &config, rule, limit, before).await,
        Alerts::List { rule, .. } => list(global, &config, rule.as_deref()).await,
        Alerts::Test { channels } => test(global, &config, &channels).await,
        Alerts::Silence { silence, time, reason } => {
            if time.is_zero() || time > LONGEST {
                return Err(Failure::usage("--for must be more than 0 and at most a year"));
            }
            let rule = rule_named(&config, &silence.rule)?;
            let subject = silence.subject.clone().unwrap_or_default();
            let actor = actor_named(silence.actor.as_deref());
            let done = everywhere(&config, async |database| {
                let (store, ..) = database.ready().await?;
                store.alerts().silence(&rule, &subject, time, &actor, &reason).await.map_err(|e| database.failure(&e))?;
                Ok(true)
            });
            told(global, &silence, "silenced", done.await)
        }
        Alerts::Unsilence { silence } => {
            let rule = rule_named(&config, &silence.rule)?;
            let subject = silence.subject.clone().unwrap_or_default();
            let actor = actor_named(silence.actor.as_deref());
            let done = everywhere(&config, async |database| {
                let (store, ..) = database.ready().await?;
                store.alerts().unsilence(&rule, &subject, &actor).await.map_err(|e| database.failure(&e))
            });
            told(global, &silence, "no longer silenced", done.await)
        }
    }
}

/// The name of a rule as it is stored: all of them go by the empty one.
fn rule_named(config: &Config, name: &str) -> Result<String, Failure> {
    if name == ALL_ALERTS {
        return Ok(String::new());
    }
    known(config, name).map_err(Failure::usage)?;
    Ok(name.to_owned())
}

/// Does something in every configured database, one after another; what came of it in each.
async fn everywhere(
    config: &Config,
    mut work: impl AsyncFnMut(&Database) -> Result<bool, Failure>,
) -> Vec<(String, Result<bool, Failure>)> {
    let mut out = Vec::new();
    for (name, database) in config.sources() {
        let done = match Database::open(&name, &database) {
            Ok(database) => work(&database).await,
            Err(e) => Err(e),
        };
        out.push((name, done));
    }
    out
}

/// What came of it; a failure where it failed somewhere or changed nothing anywhere.
fn told(global: &Global, silence: &WhichAlert, what: &str, done: Vec<(String, Result<bool, Failure>)>) -> Result<(), Failure> {
    let about = match &silence.subject {
        Some(subject) => format!("{} {subject}", silence.rule),
        None => silence.rule.clone(),
    };
    let changed = done.iter().any(|(_, result)| matches!(result, Ok(true)));
    let mut lines = Vec::new();
    let mut failure: Option<Failure> = None;
    for (name, result) in done {
        let mut line = json!({ "name": name, "changed": matches!(result, Ok(true)) });
        match result {
            Ok(changed) if !global.json => {
                let what = if changed { what } else { "was not silenced" };
                output::say(&format!("{}: {} {what}", clean(&name), clean(&about)));
            }
            Ok(_) => {}
            Err(e) => {
                line["error"] = e.text.clone().into();
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
            }
        }
        lines.push(line);
    }
    if global.json {
        output::json(&json!({ "rule": silence.rule, "subject": silence.subject, "databases": lines }));
    }
    match failure {
        Some(failure) => Err(Failure { printed: true, ..failure }),
        None if !changed => Err(Failure { printed: true, ..Failure::not_so(format!("{about} was silenced nowhere")) }),
        None => Ok(()),
    }
}

async fn list(global: &Global, config: &Config, rule: Option<&str>) -> Result<(), Failure> {
    if let Some(rule) = rule {
        rule_named(config, rule)?;
    }
    let mut documents = Vec::new();
    let mut found: Vec<(String, AlertWatch, Vec<Rule>)> = Vec::new();
    let mut failure: Option<Failure> = None;
    for (name, database) in config.sources() {
        let looked = async {
            let database = Database::open(&name, &database)?;
            let (store, ..) = database.ready().await?;
            store.alerts().watch().await.map_err(|e| database.failure(&e))
        };
        match looked.await {
            Ok(mut watch) => {
                let wanted = |name: &str| rule.is_none_or(|rule| rule == name || rule == ALL_ALERTS);
                watch.alerts.retain(|row| wanted(&row.rule));
                watch.silences.retain(|silence| silence.rule.is_empty() || wanted(&silence.rule));
                let rules: Vec<Rule> = config.rules_of(&name).into_iter().filter(|rule| wanted(&rule.name)).collect();
                documents.push(document(&name, &watch, &rules));
                found.push((name, watch, rules));
            }
            Err(e) => {
                documents.push(json!({ "name": name, "error": e.text }));
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
            }
        }
    }
    if global.json {
        output::json(&json!({ "databases": documents }));
    } else {
        print(&found);
    }
    failure.map_or(Ok(()), |failure| Err(Failure { printed: true, ..failure }))
}

fn document(name: &str, watch: &AlertWatch, rules: &[Rule]) -> Value {
    let alert = |row: &AlertRow| {
        let mut alert = json!(row);
        alert["silenced"] = watch.silences.iter().any(|s| s.covers(&row.rule, &row.subject)).into();
        alert
    };
    let rule = |rule: &Rule| {
        let mut shown = rule.shown();
        shown["name"] = rule.name.clone().into();
        let firing = watch.alerts.iter().any(|row| row.rule == rule.name && row.firing);
        let waiting = watch.alerts.iter().any(|row| row.rule == rule.name);
        shown["state"] = if firing {
            "firing"
        } else if waiting {
            "pending"
        } else {
            "ok"
        }
        .into();
        shown
    };
    json!({
        "name": name, "judge": watch.judge, "alerts": watch.alerts.iter().map(alert).collect::<Vec<_>>(),
        "silences": watch.silences, "rules": rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

fn print(found: &[(String, AlertWatch, Vec<Rule>)]) {
    let several = found.len() > 1;
    let header = |names: &[&'static str]| {
        let first = several.then_some("database");
        first.into_iter().chain(names.iter().copied()).collect::<Vec<_>>()
    };
    let mut table = output::table(&header(&["state", "rule", "subject", "since", "value", "threshold", "told"]));
    let mut rows = 0;
    for (name, watch, rules) in found {
        for row in &watch.alerts {
            rows += 1;
            let kind = rules.iter().find(|rule| rule.name == row.rule).map(|rule| rule.kind);
            let unit = |value: f64| kind.map_or_else(|| value.to_string(), |kind| kind.unit().text(value));
            let mut cells: Vec<Cell> = several.then(|| Cell::new(clean(name))).into_iter().collect();
            cells.push(state(row, &watch.silences));
            cells.push(Cell::new(clean(&row.rule)));
            cells.push(Cell::new(if row.subject.is_empty() { "-".into() } else { clean(&row.subject) }));
            cells.push(Cell::new(output::relative(row.since_us / 1_000)));
            cells.push(Cell::new(unit(row.value)));
            cells.push(Cell::new(unit(row.threshold)));
            cells.push(Cell::new(row.told_us.map_or_else(|| "-".into(), |us| output::relative(us / 1_000))));
            table.add_row(Row::from(cells));
        }
    }
    if rows > 0 {
        output::unbroken(&mut table, &["STATE", "RULE", "SINCE", "VALUE", "THRESHOLD", "TOLD"]);
        output::print_table(table);
    }
    let mut table = output::table(&header(&["silenced", "subject", "until", "by", "reason"]));
    let mut silences = 0;
    for (name, watch, _) in found {
        for s in &watch.silences {
            silences += 1;
            let mut cells: Vec<Cell> = several.then(|| Cell::new(clean(name))).into_iter().collect();
            cells.push(Cell::new(if s.rule.is_empty() { ALL_ALERTS.into() } else { clean(&s.rule) }));
            cells.push(Cell::new(if s.subject.is_empty() { "-".into() } else { clean(&s.subject) }));
            cells.push(Cell::new(output::relative(s.until_us / 1_000)));
            cells.push(Cell::new(clean(&s.actor)));
            cells.push(Cell::new(clean(&s.reason)));
            table.add_row(Row::from(cells));
        }
    }
    if silences > 0 {
        output::say(if rows > 0 { "\n" } else { "" });
        output::print_table(table);
    }
    for (name, watch, rules) in found {
        let firing = watch.alerts.iter().filter(|row| row.firing).count();
        let judge = match &watch.judge {
            Some(judge) => format!("judged by {}", clean(judge)),
            None => "judged by nobody: no `posthouse relay` is running".into(),
        };
        output::say(&format!(
            "{}{}: {firing} firing, {}, {judge}",
            if rows + silences > 0 { "\n" } else { "" },
            clean(name),
            count(rules.len(), "rule")
        ));
    }
}

fn state(row: &AlertRow, silences: &[AlertSilence]) -> Cell {
    let silenced = silences.iter().any(|s| s.covers(&row.rule, &row.subject));
    let (word, colour) = match (row.firing, silenced) {
        (true, true) => ("silenced", Color::Yellow),
        (true, false) => ("FIRING", Color::Red),
        (false, _) => ("pending", Color::Yellow),
    };
    let cell = Cell::new(word);
    if output::coloured() { cell.fg(colour) } else { cell }
}

async fn history(global: &Global, config: &Config, rule: Option<String>, limit: u32, before: Option<i64>) -> Result<(), Failure> {
    let database = one_database(config)?;
    let (store, ..) = database.ready().await?;
    // A rule that isn't configured any more has a history too.
    let filter = AlertFilter { rule: rule.filter(|rule| rule != ALL_ALERTS), before, limit };
    let events = store.alerts().events(&filter).await.map_err(|e| database.failure(&e))?;
    // A full page may have another one behind it.
    let next = events.last().filter(|_| events.len() == limit as usize).map(|e| e.id);
    if global.json {
        output::json(&json!({ "database": database.name, "events": events, "next_before": next }));
        return Ok(());
    }
    if events.is_empty() {
        output::say("nothing has happened");
        return Ok(());
    }
    let mut table = output::table(&["id", "when", "what", "rule", "subject", "value", "told"]);
    for e in &events {
        let kind = config.alerts.iter().find(|rule| rule.name == e.rule).map(|rule| rule.kind);
        let value = kind.map_or_else(|| e.value.to_string(), |kind| kind.unit().text(e.value));
        table.add_row(Row::from(vec![
            Cell::new(e.id),
            Cell::new(output::relative(e.at_us / 1_000)),
            happened(e.kind),
            Cell::new(clean(&e.rule)),
            Cell::new(if e.subject.is_empty() { "-".into() } else { clean(&e.subject) }),
            Cell::new(value),
            Cell::new(clean(&whom(e))),
        ]));
    }
    output::unbroken(&mut table, &["ID", "WHEN", "WHAT", "RULE", "VALUE"]);
    output::print_table(table);
    if let Some(next) = next {
        output::say(&format!("\nthere may be more: --before {next}"));
    }
    Ok(())
}

fn happened(kind: AlertKind) -> Cell {
    let cell = Cell::new(kind.as_str());
    match kind {
        _ if !output::coloured() => cell,
        AlertKind::Fired | AlertKind::Repeated => cell.fg(Color::Red),
        AlertKind::Recovered => cell.fg(Color::Green),
        _ => cell,
    }
}

/// Whom an event was told, and through what it could not be.
fn whom(event: &AlertEvent) -> String {
    if event.silenced && event.notices.is_empty() {
        return "nobody (silenced)".into();
    }
    let notice = |n: &posthouse::store::AlertNotice| match (n.sent_us, n.due_us, &n.error) {
        (Some(_), ..) => n.channel.clone(),
        (None, Some(_), None) => format!("{} (being sent)", n.channel),
        (None, Some(_), Some(error)) => format!("{} (tried {}: {error})", n.channel, count(n.attempts.max(0) as usize, "time")),
        (None, None, error) => format!("{} (given up: {})", n.channel, error.as_deref().unwrap_or("never tried")),
    };
    if event.notices.is_empty() { "nobody".into() } else { event.notices.iter().map(notice).collect::<Vec<_>>().join(", ") }
}

async fn test(global: &Global, config: &Config, named: &[String]) -> Result<(), Failure> {
    let channels = Channels::new(&config.channels)?;
    let known: Vec<&str> = channels.names().collect();
    if let Some(name) = named.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(Failure::usage(match suggest(name, known.iter().copied()) {
            Some(meant) => format!("there is no channel {name:?}; did you mean {meant:?}?"),
            None => format!("there is no channel {name:?}; there are {}", known.join(", ")),
        }));
    }
    let asked: Vec<&str> = if named.is_empty() { known } else { named.iter().map(String::as_str).collect() };
    let host = whoami::hostname().unwrap_or_else(|_| "unknown".into());
    let trying =
        asked.iter().filter_map(|name| channels.get(name).map(|channel| (*name, channel))).map(async |(name, channel)| {
            let notice = Notice::test(&host, now_ms() * 1_000);
            (name, channel.kind, channel.tell(vec![notice]).await)
        });
    let tried = futures_util::future::join_all(trying).await;
    let failed = tried.iter().filter(|(.., result)| result.is_err()).count();
    if global.json {
        let line = |(name, kind, result): &(&str, &str, Result<(), crate::alerts::channels::NotTaken>)| {
            let error = result.as_ref().err().map(|refused| &refused.why);
            json!({ "channel": name, "kind": kind, "ok": result.is_ok(), "error": error })
        };
        output::json(&json!({ "ok": failed == 0, "channels": tried.iter().map(line).collect::<Vec<_>>() }));
    } else {
        let mut table = output::table(&["channel", "kind", "result"]);
        for (name, kind, result) in &tried {
            let told = match result {
                Ok(()) => Cell::new("taken"),
                Err(refused) => Cell::new(clean(&refused.why)),
            };
            let told = match result {
                _ if !output::coloured() => told,
                Ok(()) => told.fg(Color::Green),
                Err(_) => told.fg(Color::Red),
            };
            table.add_row(Row::from(vec![Cell::new(clean(name)), Cell::new(kind), told]));
        }
        output::print_table(table);
    }
    if failed == 0 {
        return Ok(());
    }
    let text = format!("{} of {} did not take the test", failed, count(tried.len(), "channel"));
    Err(Failure { printed: true, ..Failure::new(Exit::NotSo, text) })
}
