//! Alerts: silence, and end a silence.

use std::time::Duration;

use super::{Refused, operator};
use crate::config::{ALL_ALERTS, Config};
use crate::http::{ServedRelay, Who};

/// The longest silence.
pub(crate) const LONGEST: Duration = Duration::from_secs(365 * 86_400);

/// The name of a rule as it is stored: all of them go by the empty one.
fn stored<'n>(config: &Config, name: &'n str) -> Result<&'n str, Refused> {
    match name {
        "" | ALL_ALERTS => Ok(""),
        _ if config.alerts.iter().any(|rule| rule.name == name) => Ok(name),
        _ => Err(Refused::field("rule", format!("there is no rule {name:?}"))),
    }
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
