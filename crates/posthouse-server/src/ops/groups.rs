//! Groups: run now, stop, pause, resume. They are asked for in the database, and every instance sees it there.

use posthouse::store::{Record, Store};
use posthouse::{Error, Trigger};

use super::{Refusal, Refused, operator};
use crate::config::Config;
use crate::http::{ServedRelay, Who};

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
