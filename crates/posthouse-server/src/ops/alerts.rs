//! Alerts: silence, and end a silence.

use std::time::Duration;

use super::{Refused, operator};
use crate::config::{ALL_ALERTS, Config, suggest};
use crate::http::{ServedRelay, Who};

/// The longest silence.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// The name of a rule as it is stored: all of them go by the empty one.
fn stored<'n>(config: &Config, name: &'n str) -> Result<&'n str, Refused> {
    match name {
        "" | ALL_ALERTS => Ok(""),
        _ => known(config, name).map(|()| name).map_err(|why| Refused::field("rule", why)),
    }
}

/// Whether there is a rule of this name; if not, what there is.
pub(crate) fn known(config: &Config, name: &str) -> Result<(), String> {
    let known: Vec<&str> = config.alerts.iter().map(|rule| rule.name.as_str()).collect();
    if known.contains(&name) {
        return Ok(());
    }
    Err(match suggest(name, known.iter().copied().chain([ALL_ALERTS])) {
        Some(meant) => format!("there is no rule {name:?}; did you mean {meant:?}?"),
        None => format!("there is no rule {name:?}; there are {ALL_ALERTS}, {}", known.join(", ")),
    })
}

/// Tells nobody about a rule (empty: all) and a subject (empty: all of the rule) for this long.
pub(crate) async fn silence(
    config: &Config,
    relay: &ServedRelay,
    who: &Who,
    (rule, subject): (&str, &str),
    time: Duration,
    reason: &str,
) -> Result<(), Refused> {
    operator(who)?;
    if time.is_zero() || time > LONGEST {
        return Err(Refused::field("time", "must be more than 0 and at most a year"));
    }
    Ok(relay.people.alerts().silence(stored(config, rule)?, subject, time, &who.name, reason).await?)
}

/// Ends a silence; false when there is none. One of a rule that isn't there any more can be ended too.
pub(crate) async fn unsilence(relay: &ServedRelay, who: &Who, rule: &str, subject: &str) -> Result<bool, Refused> {
    operator(who)?;
    let rule = if rule == ALL_ALERTS { "" } else { rule };
    Ok(relay.people.alerts().unsilence(rule, subject, &who.name).await?)
}
