//! One set of tables: what the database says about itself, and what the configuration makes of it.

use std::time::Duration;

use posthouse::store::{Backlog, Examination, Finding, LogFacts, SCHEMA_VERSION, Store};
use posthouse::{Houses, RetentionSettings};

use super::Examined;
use crate::config::{Config, check, redact_url};
use crate::database::Database;
use crate::failure::{Exit, Failure};
use crate::http::ready::PARTITIONS;
use crate::output::{self, count};

/// Clocks that differ by more than this (in milliseconds) are told.
const CLOCKS: i64 = 2_000;

/// A log that nothing is removed from is told when it is older than this (in days) or larger than that (in bytes).
const OLD: i64 = 30;
const LARGE: i64 = 1 << 30;

const DAY: i64 = 86_400_000;

/// How much longer than its term the log may go back beside the times between rounds.
const LATE: Duration = Duration::from_secs(86_400);

pub(super) async fn examine(config: &Config, database: &Database) -> Examined {
    let mut out = Examined::new(format!("database {}", database.name));
    if let Err(failure) = database.reach().await {
        out.unreachable = failure.exit == Exit::Unreachable;
        out.findings.push(unreached(&failure));
        return out;
    }
    out.findings.push(Finding::ok("connection", database.shown.clone()));
    let store = database.store();
    let before = output::now_ms();
    let found = match store.examine().await {
        Ok(found) => found,
        Err(e) => {
            out.findings.push(Finding::error("tables", e.to_string(), "look at the error, and run this again"));
            return out;
        }
    };
    let after = output::now_ms();
    out.what = Some(found.server.clone());
    if !schema(database, &found, &mut out.findings) {
        return out;
    }
    clocks(found.now_ms, before, after, &mut out.findings);
    partitions(found.partitions_ahead, &mut out.findings);
    out.findings.extend(found.findings.iter().cloned());
    let (_, houses) = found.schema.unwrap_or_default();
    if let Err(e) = houses_and_messages(config, store.as_ref(), houses, &mut out.findings).await {
        out.findings.push(Finding::error("messages", e.to_string(), "look at the error, and run this again"));
    }
    if let Some(log) = &found.log {
        out.findings.push(growth(log, found.now_ms, database.retention_settings()));
    }
    out
}

fn unreached(failure: &Failure) -> Finding {
    let fix = match failure.exit {
        Exit::Unreachable => "start it, or correct host and port in its url",
        _ => "correct user, password and database in its url",
    };
    Finding::error("connection", failure.text.clone(), fix)
}

/// Whether there are tables to look at.
fn schema(database: &Database, found: &Examination, findings: &mut Vec<Finding>) -> bool {
    let Some((version, houses)) = found.schema else {
        findings.push(Finding::error("migration", "there are no tables here", "run `posthouse migrate`"));
        return false;
    };
    findings.push(match version {
        _ if version < SCHEMA_VERSION => Finding::error(
            "migration",
            format!("the tables are of version {version}, this program needs version {SCHEMA_VERSION}"),
            "run `posthouse migrate`; relays of the version before go on working meanwhile",
        ),
        _ if version > SCHEMA_VERSION => Finding::ok(
            "migration",
            format!("the tables are of version {version}, newer than this program (version {SCHEMA_VERSION}), which uses them as they are"),
        ),
        _ => Finding::ok("migration", format!("version {version}, {}", count(houses.into(), "house"))),
    });
    if let Some(expected) = database.expected_houses()
        && expected != houses
    {
        findings.push(Finding::error(
            "houses",
            format!("the configuration says houses = {expected}, the database has {houses}: no relay starts"),
            "change the configuration, or run `posthouse houses resize`",
        ));
    }
    // What older tables lack would be told once more as missing.
    version >= SCHEMA_VERSION
}

/// The database's clock decides; a machine whose clock is off shows wrong times in its log, and people wrong ages.
fn clocks(database: i64, before: i64, after: i64, findings: &mut Vec<Finding>) {
    let away = if database < before { before - database } else { (database - after).max(0) };
    findings.push(if away > CLOCKS {
        let side = if database < before { "behind" } else { "ahead of" };
        Finding::warning(
            "clock",
            format!("the database's clock is {:.1} s {side} this machine's", away as f64 / 1000.0),
            "synchronise both (NTP); delivery goes by the database's clock alone, but logs and delays that applications compute differ",
        )
    } else {
        Finding::ok("clock", "the database's clock and this machine's agree")
    });
}

fn partitions(ahead: Option<u32>, findings: &mut Vec<Finding>) {
    let Some(ahead) = ahead else { return };
    findings.push(match ahead {
        0 => Finding::error(
            "partitions",
            "no partition of the message log is ready ahead: publishing fails when the current one is full",
            "start a relay, which makes them; its log says what keeps it from that",
        ),
        _ if ahead < PARTITIONS => Finding::warning(
            "partitions",
            format!("only {} of the message log ready ahead", count(ahead as usize, "partition")),
            "start a relay, which makes them; its log says what keeps it from that",
        ),
        _ => Finding::ok("partitions", format!("{} ready ahead", count(ahead as usize, "partition"))),
    });
}

async fn houses_and_messages(
    config: &Config,
    store: &dyn Store,
    houses: u16,
    findings: &mut Vec<Finding>,
) -> Result<(), posthouse::Error> {
    let backlog = store.backlog().await?;
    let waiting: i64 = backlog.iter().filter(|b| b.status != "FAILED").map(|b| b.messages).sum();
    let live: Vec<_> = store.overview().instances().await?.into_iter().filter(|i| i.lease_left_ms > 0).collect();
    if live.is_empty() {
        let text = format!("no instance relays for this database; {} there", waits(waiting));
        findings.push(Finding::warning("instances", text, "start `posthouse relay` or a service with an embedded relay"));
    } else {
        findings.push(Finding::ok("instances", format!("{} alive, {}", count(live.len(), "instance"), waits(waiting))));
        let of = |text: Option<&str>, none: Houses| text.map_or(none, |t| t.parse().unwrap_or(Houses::of([])));
        let covered = live.iter().fold(Houses::of([]), |all, i| {
            all.union(&of(i.houses.as_deref(), Houses::ALL)).union(&of(i.run_houses.as_deref(), Houses::of([])))
        });
        let uncovered = Houses::of((0..houses).filter(|h| !covered.contains(i32::from(*h))));
        findings.push(if uncovered.is_empty() {
            Finding::ok("houses", "every house is covered by a live instance")
        } else {
            Finding::error(
                "houses",
                format!("houses {uncovered} are covered by no live instance: their messages are not sent"),
                "start an instance with a group that has them",
            )
        });
    }
    let strays = store.rows_in(&[(i32::MIN, -1), (i32::from(houses), i32::MAX)]).await?;
    if !strays.is_empty() {
        let told: Vec<String> = strays.iter().map(|(house, rows)| format!("{rows} in house {house}")).collect();
        findings.push(Finding::error(
            "houses",
            format!("messages lie in houses that don't exist: {}", told.join(", ")),
            format!("run `posthouse houses resize {houses}`, which gives them theirs"),
        ));
    }
    destinations(config, &backlog, findings);
    Ok(())
}

fn waits(messages: i64) -> String {
    match messages {
        0 => "nothing waits".into(),
        1 => "1 message waits".into(),
        n => format!("{n} messages wait"),
    }
}

fn destinations(config: &Config, backlog: &[Backlog], findings: &mut Vec<Finding>) {
    let before = findings.len();
    for row in backlog.iter().filter(|b| b.status != "FAILED") {
        // Without a file nobody knows the relay's routes.
        if config.file.is_none() {
            break;
        }
        if let Err(why) = check::destination(&row.destination, config) {
            let shown = redact_url(&row.destination);
            findings.push(Finding::error(
                "destinations",
                format!("{} for {shown:?} can't be sent anywhere: {why}", count(row.messages as usize, "message")),
                format!("add [routes.{shown:?}] to the configuration, or send them elsewhere with `posthouse messages edit`"),
            ));
        }
    }
    if findings.len() == before {
        findings.push(Finding::ok("destinations", "all messages that wait have one"));
    }
    for row in backlog.iter().filter(|b| b.status == "FAILED") {
        let shown = redact_url(&row.destination);
        findings.push(Finding::warning(
            "failed",
            format!("{} for {shown:?} FAILED, the oldest {} ago", count(row.messages as usize, "message"), age(row.oldest_ms)),
            "look at the errors with `posthouse messages list --status FAILED`, then `requeue`, `edit` or `skip` them",
        ));
    }
}

fn age(ms: i64) -> String {
    output::span(std::time::Duration::from_millis(ms.unsigned_abs()))
}

/// What the log takes, against what removes it.
fn growth(log: &LogFacts, now_ms: i64, retention: Option<&RetentionSettings>) -> Finding {
    let old = (now_ms - log.first_ms).max(0);
    let days = old / DAY;
    let told = format!("the log goes back {days} days and takes {}", output::bytes(log.bytes));
    let per_day = if days > 0 { format!(", {} more a day", output::bytes(log.bytes / days)) } else { String::new() };
    let Some((settings, term)) = retention.and_then(|r| Some((r, r.sent?))) else {
        return if days > OLD || log.bytes > LARGE {
            Finding::warning(
                "growth",
                format!("{told}{per_day}; nothing removes it"),
                "give it a term: [retention] sent = \"7d\"",
            )
        } else {
            Finding::ok("growth", format!("{told}{per_day}"))
        };
    };
    // A partition may take as long again until its newest message is over the term, and a round or two may be late.
    let late = term.saturating_mul(2).saturating_add(settings.every * 2 + settings.budget + LATE);
    if i128::from(old) > late.as_millis() as i128 {
        let term = humantime::format_duration(term);
        let text = format!("{told}, though delivered messages go after {term}: its oldest is not delivered, or retention lags");
        Finding::warning(
            "growth",
            text,
            "look at `posthouse retention status`, and at the relay's log; `posthouse retention run` works to the end",
        )
    } else {
        Finding::ok("growth", told)
    }
}

#[cfg(test)]
mod tests {
    use posthouse::store::Severity;

    use super::*;

    fn one(look: impl FnOnce(&mut Vec<Finding>)) -> Severity {
        let mut findings = Vec::new();
        look(&mut findings);
        findings[0].severity
    }

    #[test]
    fn clocks_are_compared_within_the_time_that_asking_took() {
        assert_eq!(one(|f| clocks(5_000, 4_000, 6_000, f)), Severity::Ok);
        assert_eq!(one(|f| clocks(8_000, 4_000, 6_000, f)), Severity::Ok, "two seconds are nothing");
        assert_eq!(one(|f| clocks(8_001, 4_000, 6_000, f)), Severity::Warning);
        assert_eq!(one(|f| clocks(1_999, 4_000, 6_000, f)), Severity::Warning);
    }

    #[test]
    fn few_partitions_are_a_warning_and_none_an_error() {
        for (ahead, expected) in [(0, Severity::Error), (7, Severity::Warning), (8, Severity::Ok)] {
            assert_eq!(one(|f| partitions(Some(ahead), f)), expected);
        }
    }

    #[test]
    fn the_log_is_measured_against_its_term() {
        let log = |days: i64, bytes: i64| LogFacts::new(1, 9, 1_000 * DAY - days * DAY, 1_000 * DAY, bytes);
        let mut week = RetentionSettings::default();
        let look =
            |days, bytes, retention: Option<&RetentionSettings>| growth(&log(days, bytes), 1_000 * DAY, retention).severity;
        assert_eq!(look(30, 1 << 20, None), Severity::Ok);
        assert_eq!(look(31, 1 << 20, None), Severity::Warning);
        assert_eq!(look(1, LARGE + 1, None), Severity::Warning);
        assert_eq!(look(15, LARGE + 1, Some(&week)), Severity::Ok);
        assert_eq!(look(16, 1 << 20, Some(&week)), Severity::Warning);
        week.sent = None;
        assert_eq!(look(31, 1 << 20, Some(&week)), Severity::Warning, "never is as if there were none");
    }
}
