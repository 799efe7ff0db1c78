//! When a trigger is due.

use std::time::Duration;

use super::{Cron, CronError};
use crate::Trigger;

/// A trigger that is ready to be asked. All times are microseconds since 1970 UTC.
#[derive(Debug, Clone)]
pub(crate) enum Due {
    /// Never by itself.
    Asked,
    /// This long after the end of a run.
    After(i64),
    /// At times that don't depend on runs.
    Times(Times),
}

/// Times that all instances agree on, whenever they began.
#[derive(Debug, Clone)]
pub(crate) enum Times {
    /// The multiples of this since 1970.
    Rate(i64),
    Cron(Box<Cron>),
}

impl Due {
    pub(crate) fn of(trigger: &Trigger) -> Result<Self, CronError> {
        let us = |period: Duration| i64::try_from(period.as_micros()).unwrap_or(i64::MAX).max(1);
        Ok(match trigger {
            Trigger::Continuous | Trigger::Manual | Trigger::External => Self::Asked,
            Trigger::Every(period) => Self::After(us(*period)),
            Trigger::Rate(period) => Self::Times(Times::Rate(us(*period))),
            Trigger::Cron { cron, tz } => Self::Times(Times::Cron(Box::new(Cron::parse(cron, tz)?))),
        })
    }
}

impl Times {
    /// The first one after a moment.
    pub(crate) fn next_after(&self, after: i64) -> Option<i64> {
        match self {
            Self::Rate(period) => after.div_euclid(*period).checked_add(1)?.checked_mul(*period),
            Self::Cron(cron) => cron.next_after(after),
        }
    }

    /// The last one after `after` and up to `now`.
    pub(crate) fn last_within(&self, after: i64, now: i64) -> Option<i64> {
        let due = |from: i64| self.next_after(from).filter(|due| *due <= now);
        let mut last = due(after)?;
        // Something comes after `last`, nothing after `now`: halve what is between them.
        let mut end = now;
        while let Some(next) = due(last) {
            let middle = next + (end - next) / 2;
            match due(middle) {
                Some(later) => last = later,
                None => {
                    last = next;
                    end = middle;
                }
            }
        }
        Some(last)
    }
}

/// A period of a trigger at least: what is due more often is continuous.
const SHORTEST: Duration = Duration::from_millis(100);

const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// What is wrong with a trigger, each with its field.
pub(crate) fn problems(trigger: &Trigger) -> Vec<(String, String)> {
    let period = |field: &str, period: Duration| {
        if period < SHORTEST || period > LONGEST {
            Some((field.to_owned(), format!("{period:?}, must be {SHORTEST:?} to 366 days")))
        } else if !period.as_micros().is_multiple_of(1_000) {
            Some((field.to_owned(), format!("{period:?}, must be whole milliseconds")))
        } else {
            None
        }
    };
    let problem = match trigger {
        Trigger::Every(p) => period("trigger.every", *p),
        Trigger::Rate(p) => period("trigger.rate", *p),
        Trigger::Cron { cron, tz } => Cron::parse(cron, tz).err().map(|e| (format!("trigger.{}", e.field), e.reason)),
        _ => None,
    };
    problem.into_iter().collect()
}

impl Trigger {
    /// The next times at which it is due after a moment, in microseconds since 1970 UTC: those of a rate or a cron expression.
    /// Other triggers have no such times.
    pub fn due_after(&self, after_us: i64, how_many: usize) -> Vec<i64> {
        let Ok(Due::Times(times)) = Due::of(self) else { return Vec::new() };
        let next = |after: &i64| times.next_after(*after);
        std::iter::successors(next(&after_us), next).take(how_many).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_has_the_same_times_for_everybody() {
        let times = Times::Rate(5_000_000);
        for (after, next) in [(0, 5), (4_999_999, 5), (5_000_000, 10), (-1, 0)] {
            assert_eq!(times.next_after(after), Some(next * 1_000_000), "{after}");
        }
        assert_eq!(Times::Rate(2).next_after(i64::MAX - 1), None, "behind the end of time");
    }

    #[test]
    fn the_last_time_is_found_without_counting() {
        let second = Times::Cron(Box::new(Cron::parse("* * * * * *", "UTC").unwrap()));
        let month = 30 * 86_400_000_000;
        assert_eq!(second.last_within(0, month), Some(month));
        assert_eq!(second.last_within(0, month + 999_999), Some(month));
        assert_eq!(second.last_within(month, month), None);
        let daily = Times::Cron(Box::new(Cron::parse("0 0 4 * * *", "UTC").unwrap()));
        let hour = 3_600_000_000;
        assert_eq!(daily.last_within(0, 3 * hour), None);
        assert_eq!(daily.last_within(0, 4 * hour), Some(4 * hour));
        assert_eq!(daily.last_within(4 * hour, 5 * hour), None);
        assert_eq!(daily.last_within(0, 240 * hour + 1), Some(220 * hour));
        let burst = Times::Cron(Box::new(Cron::parse("* 59 4 * * *", "UTC").unwrap()));
        assert_eq!(burst.last_within(0, 240 * hour), Some(221 * hour - 1_000_000));
        for (period, now) in [(7, 100), (3, 9), (1, 5)] {
            assert_eq!(Times::Rate(period).last_within(0, now), Some(now / period * period));
        }
    }

    #[test]
    fn periods_have_limits() {
        let fields = |trigger: Trigger| problems(&trigger).into_iter().map(|(field, _)| field).collect::<Vec<_>>();
        let none: [&str; 0] = [];
        assert_eq!(fields(Trigger::Every(Duration::from_millis(100))), none);
        assert_eq!(fields(Trigger::Every(Duration::from_millis(99))), ["trigger.every"]);
        assert_eq!(fields(Trigger::Rate(LONGEST)), none);
        assert_eq!(fields(Trigger::Rate(LONGEST + Duration::from_millis(1))), ["trigger.rate"]);
        assert_eq!(fields(Trigger::Rate(Duration::from_micros(100_500))), ["trigger.rate"]);
        let cron = |cron: &str, tz: &str| Trigger::Cron { cron: cron.into(), tz: tz.into() };
        assert_eq!(fields(cron("0 0 4 * * *", "UTC")), none);
        assert_eq!(fields(cron("0 0 25 * * *", "UTC")), ["trigger.cron"]);
        assert_eq!(fields(cron("0 0 4 * * *", "Nowhere")), ["trigger.tz"]);
        assert_eq!(cron("0 0 4 * * *", "Asia/Shanghai").due_after(0, 2), [20 * 3_600_000_000, 44 * 3_600_000_000]);
        assert_eq!(Trigger::Manual.due_after(0, 2), [0; 0]);
    }
}
