//! Groups: run now, stop, pause, resume. They are asked for in the database, and every instance sees it there.

use posthouse::store::{GroupRow, Record, RunFilter, RunRow, RunStatus, Store};
use posthouse::{Error, Group, Trigger};

use super::{Refusal, Refused, operator};
use crate::config::Config;
use crate::http::{ServedRelay, Who};

/// Of each group so many runs are looked at: those that are going, and the last one that ended.
const LOOK: u32 = 50;

/// A group of one database.
pub(crate) struct Line {
    pub(crate) name: String,
    /// None: only the database knows of it.
    pub(crate) group: Option<Group>,
    pub(crate) row: GroupRow,
    /// The latest runs.
    pub(crate) runs: Vec<RunRow>,
    pub(crate) next_due_us: Option<i64>,
}

impl Line {
    /// Instances that are running it.
    pub(crate) fn running(&self) -> usize {
        self.runs.iter().filter(|r| r.status == RunStatus::Running).count()
    }

    /// The last run that ended.
    pub(crate) fn last(&self) -> Option<&RunRow> {
        self.runs.iter().find(|r| r.status.is_over() && r.instance.is_some())
    }
}

/// The groups that are configured for a database, and others that it knows of.
pub(crate) async fn of(store: &dyn Store, groups: Vec<Group>) -> Result<Vec<Line>, Error> {
    let watch = store.runs().watch().await?;
    let mut named: Vec<(String, Option<Group>)> = groups.into_iter().map(|g| (g.name.clone(), Some(g))).collect();
    for row in &watch.groups {
        if named.iter().all(|(name, _)| *name != row.group) {
            named.push((row.group.clone(), None));
        }
    }
    let mut out = Vec::new();
    for (name, group) in named {
        let filter = RunFilter { group: Some(name.clone()), limit: LOOK, ..RunFilter::default() };
        let runs = store.runs().list(&filter).await?;
        let row = watch.groups.iter().find(|row| row.group == name).cloned().unwrap_or_default();
        let due = group.as_ref().filter(|_| row.paused_us.is_none()).map(|g| g.trigger.due_after(watch.now_us, 1));
        let next_due_us = due.and_then(|due| due.first().copied());
        out.push(Line { name, group, row, runs, next_due_us });
    }
    Ok(out)
}

/// [`of`] a database that is served.
pub(crate) async fn list(config: &Config, relay: &ServedRelay) -> Result<Vec<Line>, Refused> {
    Ok(of(relay.people.as_ref(), config.groups_of(&relay.name)).await?)
}

/// A group must be one that this database has; `runs`: one whose runs can be asked for.
fn group(config: &Config, relay: &ServedRelay, name: &str, runs: bool) -> Result<(), Refused> {
    let group = config.group(name).map_err(Refused::missing)?;
    if runs {
        runnable(group.map(|g| &g.trigger), name)?;
    }
    if group.is_some() && config.groups_of(&relay.name).iter().all(|g| g.name != name) {
        return Err(Refused::missing(format!("group {name:?} doesn't work on database {:?}", relay.name)));
    }
    Ok(())
}

/// Refuses a group whose runs can't be asked for.
pub(crate) fn runnable(trigger: Option<&Trigger>, name: &str) -> Result<(), Refused> {
    let why = match trigger {
        Some(Trigger::Continuous) => "is continuous: it is sent from all the time, and has no runs",
        Some(Trigger::External) => "is run by a scheduler outside, which owns its runs",
        _ => return Ok(()),
    };
    Err(Refused::new(Refusal::Conflict, format!("group {name:?} {why}")))
}

/// Asks all instances for a run; answers the id of the request, by which its runs are listed.
pub(crate) async fn ask(store: &dyn Store, actor: &str, name: &str) -> Result<i64, Error> {
    let request = store.runs().request(name).await?;
    store.record(&Record { actor, action: "group run", detail: name, amount: None }).await?;
    Ok(request)
}

/// Tells all instances to stop the runs that are going now.
pub(crate) async fn tell_to_stop(store: &dyn Store, actor: &str, name: &str) -> Result<(), Error> {
    store.runs().stop(name).await?;
    store.record(&Record { actor, action: "group stop", detail: name, amount: None }).await
}

/// Pauses a group, or lets it go on; false when it was so already.
pub(crate) async fn set_paused(store: &dyn Store, actor: &str, name: &str, paused: bool) -> Result<bool, Error> {
    let changed = store.runs().pause(name, paused).await?;
    if changed {
        let action = if paused { "group pause" } else { "group resume" };
        store.record(&Record { actor, action, detail: name, amount: None }).await?;
    }
    Ok(changed)
}

/// [`ask`], for somebody who must be allowed to.
pub(crate) async fn run(config: &Config, relay: &ServedRelay, who: &Who, name: &str) -> Result<i64, Refused> {
    operator(who)?;
    group(config, relay, name, true)?;
    Ok(ask(relay.people.as_ref(), &who.name, name).await?)
}

/// [`tell_to_stop`], for somebody who must be allowed to.
pub(crate) async fn stop(config: &Config, relay: &ServedRelay, who: &Who, name: &str) -> Result<(), Refused> {
    operator(who)?;
    group(config, relay, name, true)?;
    Ok(tell_to_stop(relay.people.as_ref(), &who.name, name).await?)
}

/// [`set_paused`], for somebody who must be allowed to.
pub(crate) async fn pause(config: &Config, relay: &ServedRelay, who: &Who, name: &str, paused: bool) -> Result<bool, Refused> {
    operator(who)?;
    group(config, relay, name, false)?;
    Ok(set_paused(relay.people.as_ref(), &who.name, name, paused).await?)
}
