//! Scanning through the relays of this process.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use posthouse::store::RunStatus;
use posthouse::{Group, Houses, Run, RunCounts, RunReport, Trigger};
use tokio::sync::watch;

use super::log::RunLog;
use super::scan::{Counts, Scans, Stop, Unit};
use crate::config::{Config, database_of};
use crate::http::{Served, ServedRelay};

/// The groups that an outside scheduler runs, and the relays that do it.
pub(crate) struct Relays {
    served: Arc<Served>,
    groups: Vec<Group>,
    /// For each set of tables its groups, as they are there, and the prefix.
    sources: BTreeMap<String, (Vec<Group>, String)>,
    /// For each mapping of adopted tables in a database the group in whose runs it is scanned.
    adopted: BTreeMap<(String, String), String>,
}

impl Relays {
    pub(crate) fn new(config: &Config, served: Arc<Served>) -> Self {
        let sources = config.sources().into_iter().map(|(name, d)| (name.clone(), (config.groups_of(&name), d.prefix)));
        let adopted = served.adopted.iter().filter_map(|a| {
            let group = config.group_of_adopted(database_of(&a.database), &a.name)?;
            Some(((a.database.clone(), a.name.clone()), group.name.clone()))
        });
        let adopted = adopted.collect();
        let out = Self { groups: config.groups.clone(), sources: sources.collect(), adopted, served };
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
        let works = self.sources.iter().filter(|(_, (groups, _))| groups.iter().any(|g| g.name == group.name));
        let all: Vec<String> = works.map(|(name, _)| name.clone()).collect();
        // A database with several sets of tables stands for all of them.
        let named = |source: &str, name: &str| source == name || database_of(source) == name;
        match only.iter().find(|name| !all.iter().any(|source| named(source, name))) {
            Some(name) => Err(format!("group {:?} has no database {name:?}; it has {}", group.name, all.join(", "))),
            None if only.is_empty() => Ok(all),
            None => Ok(all.into_iter().filter(|source| only.iter().any(|name| named(source, name))).collect()),
        }
    }

    fn units<'s>(&'s self, group: &'s str, database: &'s str) -> BoxFuture<'s, Result<Vec<Unit>, String>> {
        Box::pin(async move {
            self.group(group)?;
            let (groups, prefix) = self.sources.get(database).ok_or("it is not configured")?;
            let mut units = Vec::new();
            if let Some(houses) = groups.iter().find(|g| g.name == group).map(|g| &g.houses).filter(|h| !h.is_empty()) {
                let store = self.relay(database)?.store().ok_or_else(not_running)?;
                let (_, count) = store.check().await.map_err(|e| e.to_string())?;
                let all = (0..count).filter(|house| houses.contains(i32::from(*house)));
                units.extend(all.map(|house| Unit { table: prefix.clone(), house: Some(house) }));
            }
            for adopted in self.served.adopted.iter().filter(|a| a.database == database) {
                if self.adopted.get(&(adopted.database.clone(), adopted.name.clone())).is_some_and(|g| g == group) {
                    let tables = adopted.scans().ok_or_else(not_running)?.tables().await.map_err(|e| e.to_string())?;
                    units.extend(tables.into_iter().map(|t| Unit { table: format!("{}/{t}", adopted.name), house: None }));
                }
            }
            Ok(units)
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
            let houses = Houses::of(units.iter().filter_map(|unit| unit.house));
            let tables = units.into_iter().filter(|unit| unit.house.is_none()).map(|unit| unit.table);
            let run = Run::of(group).houses(houses).adopted(tables).stop(told);
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
