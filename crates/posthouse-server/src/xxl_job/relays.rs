//! Scanning through the relays of this process.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use posthouse::store::RunStatus;
use posthouse::{Group, Houses, Run, RunCounts, RunReport, Trigger};
use tokio::sync::watch;

use super::log::RunLog;
use super::scan::{Counts, Scans, Stop, Unit};
use crate::config::{Config, DatabaseConfig};
use crate::http::{Served, ServedRelay};

/// The groups that an outside scheduler runs, and the relays that do it. What has a relay of its own, a set of tables, counts as a
/// database here.
pub(crate) struct Relays {
    served: Arc<Served>,
    groups: Vec<Group>,
    sources: BTreeMap<String, Source>,
}

struct Source {
    prefix: String,
    /// The names of its groups.
    groups: Vec<String>,
}

impl Relays {
    pub(crate) fn new(config: &Config, served: Arc<Served>) -> Self {
        let source = |(name, config_of): (String, DatabaseConfig)| {
            let groups = config.groups_of(&name).into_iter().map(|g| g.name).collect();
            (name, Source { prefix: config_of.prefix, groups })
        };
        let sources = config.sources().into_iter().map(source).collect();
        let out = Self { served, groups: config.groups.clone(), sources };
        if out.external().is_empty() {
            tracing::warn!("an XXL-JOB admin can run nothing here: no [[groups]] has trigger = \"external\"");
        }
        out
    }

    fn external(&self) -> Vec<&str> {
        self.groups.iter().filter(|g| g.trigger == Trigger::External).map(|g| g.name.as_str()).collect()
    }

    fn group(&self, name: &str) -> Result<&Group, String> {
        match self.groups.iter().find(|g| g.name == name) {
            Some(group) if group.trigger == Trigger::External => Ok(group),
            Some(_) => Err(format!("group {name:?} is run by Posthouse itself: it must have trigger = \"external\"")),
            None => {
                let known = self.external();
                let known = if known.is_empty() { "none".into() } else { known.join(", ") };
                Err(format!("there is no group {name:?}; those with trigger = \"external\": {known}"))
            }
        }
    }

    fn relay(&self, database: &str) -> Result<&ServedRelay, String> {
        let found = self.served.databases.iter().find(|d| d.name == database);
        found.map(AsRef::as_ref).ok_or_else(|| "it is not configured".into())
    }
}

/// Why nothing can be asked of a database.
fn not_running() -> String {
    "its relay is not running".into()
}

impl Scans for Relays {
    fn databases(&self, group: &str, only: &[String]) -> Result<Vec<String>, String> {
        let group = self.group(group)?;
        let all: Vec<&String> =
            self.sources.iter().filter(|(_, s)| s.groups.contains(&group.name)).map(|(name, _)| name).collect();
        // Of several sets of tables each is named after its database and its prefix; a database's name stands for all of them.
        let meant =
            |name: &str, source: &str| source == name || source.split_once('/').is_some_and(|(database, _)| database == name);
        if let Some(name) = only.iter().find(|name| !all.iter().any(|source| meant(name, source))) {
            let all: Vec<&str> = all.iter().map(|name| name.as_str()).collect();
            return Err(format!("group {:?} has no database {name:?}; it has {}", group.name, all.join(", ")));
        }
        let wanted = all.into_iter().filter(|source| only.is_empty() || only.iter().any(|name| meant(name, source)));
        Ok(wanted.cloned().collect())
    }

    fn units<'s>(&'s self, group: &'s str, database: &'s str) -> BoxFuture<'s, Result<Vec<Unit>, String>> {
        Box::pin(async move {
            let houses = &self.group(group)?.houses;
            let store = self.relay(database)?.store().ok_or_else(not_running)?;
            let (_, count) = store.check().await.map_err(|e| e.to_string())?;
            let table = self.sources.get(database).map(|s| s.prefix.clone()).unwrap_or_default();
            let all = (0..count).filter(|house| houses.contains(i32::from(*house)));
            Ok(all.map(|house| Unit { table: table.clone(), house: Some(house) }).collect())
        })
    }

    fn run<'s>(
        &'s self,
        group: &'s str,
        database: &'s str,
        units: Vec<Unit>,
        mut stop: Stop,
        _log: RunLog,
    ) -> BoxFuture<'s, (Counts, Result<(), String>)> {
        Box::pin(async move {
            // When this future is dropped, so is this end, which stops the run too.
            let (tell, told) = watch::channel(false);
            let run = Run::of(group).houses(Houses::of(units.into_iter().filter_map(|unit| unit.house))).stop(told);
            let asked = self.relay(database).and_then(|relay| relay.trigger(run).ok_or_else(not_running));
            let mut asked = match asked {
                Ok(asked) => Box::pin(asked),
                Err(why) => return (Counts::default(), Err(why)),
            };
            let report = tokio::select! {
                report = &mut asked => report,
                () = stop.told() => {
                    tell.send_replace(true);
                    asked.await
                }
            };
            match report {
                Ok(report) => (counts(report.counts), result(report, stop.is_told())),
                Err(e) => (Counts::default(), Err(e.to_string())),
            }
        })
    }
}

fn counts(counts: RunCounts) -> Counts {
    let RunCounts { messages, delivered: sent, retried, failed, .. } = counts;
    Counts { sent, retried, failed, waiting: messages.saturating_sub(sent + retried + failed) }
}

fn result(report: RunReport, stopped: bool) -> Result<(), String> {
    match report.status {
        RunStatus::Done => Ok(()),
        // It was told to, and the one who told it says why.
        RunStatus::Stopped if stopped => Ok(()),
        status => Err(report.error.unwrap_or_else(|| format!("the run was {}", status.as_str()))),
    }
}
