//! What becomes of an alert, given how it stood and what was measured. No clock, no I/O.

use posthouse::store::{AlertChange, AlertKind, AlertNews, AlertStanding};

use super::rules::Rule;

/// Something that was measured.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    /// What it is about; empty where that is the database.
    pub(crate) subject: String,
    pub(crate) value: f64,
    /// More for people.
    pub(crate) detail: Option<String>,
}

impl Sample {
    /// Of what there is nothing any more.
    pub(crate) fn nothing(subject: &str) -> Self {
        Self { subject: subject.to_owned(), value: 0.0, detail: None }
    }
}

/// Judges one alert at a moment of the database's clock. None: it was fine and is fine.
///
/// ```text
/// fine ──bad──> waiting ──bad for long enough──> firing ──good──> fine
///   ^───────────not bad──────────┘                 └──still not good, told long ago──> told again
/// ```
/// Between bad and good nothing changes: what waits goes back to fine, what fires goes on.
pub(crate) fn judge(
    rule: &Rule,
    before: Option<&AlertStanding>,
    sample: &Sample,
    silenced: bool,
    now_us: i64,
) -> Option<AlertChange> {
    let Sample { subject, value, detail } = sample;
    let change = |standing, news| Some(AlertChange { rule: rule.name.clone(), subject: subject.clone(), standing, news });
    let standing = |firing, since_us, told_us| {
        Some(AlertStanding { firing, since_us, value: *value, threshold: rule.threshold, detail: detail.clone(), told_us })
    };
    let news = |kind, since_us, tell: bool| {
        Some(AlertNews {
            kind,
            since_us,
            value: *value,
            threshold: rule.threshold,
            detail: detail.clone(),
            silenced,
            channels: if tell { rule.channels.clone() } else { Vec::new() },
        })
    };
    let fire =
        |since_us| change(standing(true, since_us, (!silenced).then_some(now_us)), news(AlertKind::Fired, since_us, !silenced));
    let long_enough = |since_us: i64| now_us.saturating_sub(since_us) >= micros(rule.wait);
    let Some(row) = before else {
        return match rule.is_bad(*value) {
            false => None,
            true if long_enough(now_us) => fire(now_us),
            true => change(standing(false, now_us, None), None),
        };
    };
    if !row.firing {
        return match rule.is_bad(*value) {
            false => change(None, None),
            true if long_enough(row.since_us) => fire(row.since_us),
            true => change(standing(false, row.since_us, None), None),
        };
    }
    if rule.is_good(*value) {
        // Who was told that it fires is told that it is over, silence or not.
        return change(None, news(AlertKind::Recovered, row.since_us, row.told_us.is_some() && rule.recovery));
    }
    match row.told_us {
        _ if silenced => change(standing(true, row.since_us, row.told_us), None),
        // The silence under which it began to fire has ended.
        None => fire(row.since_us),
        Some(told_us) if !rule.repeat.is_zero() && now_us.saturating_sub(told_us) >= micros(rule.repeat) => {
            change(standing(true, row.since_us, Some(now_us)), news(AlertKind::Repeated, row.since_us, true))
        }
        Some(_) => change(standing(true, row.since_us, row.told_us), None),
    }
}

/// An alert that nobody judges any more. Nobody is told that it is over, which nobody knows.
pub(crate) fn end(rule: &str, subject: &str, before: &AlertStanding) -> AlertChange {
    let news = before.firing.then(|| AlertNews {
        kind: AlertKind::Ended,
        since_us: before.since_us,
        value: before.value,
        threshold: before.threshold,
        detail: Some("its rule was changed or turned off".into()),
        silenced: false,
        channels: Vec::new(),
    });
    AlertChange { rule: rule.to_owned(), subject: subject.to_owned(), standing: None, news }
}

fn micros(d: std::time::Duration) -> i64 {
    i64::try_from(d.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::alerts::rules::Kind;

    const S: i64 = 1_000_000;

    /// An alert over time.
    struct Life {
        rule: Rule,
        row: Option<AlertStanding>,
        silenced: bool,
        told: Vec<(i64, AlertKind, bool)>,
    }

    impl Life {
        fn new(change: impl FnOnce(&mut Rule)) -> Self {
            let mut rule = Rule::of(Kind::OutboxBacklog);
            rule.channels = vec!["ops".into()];
            (rule.threshold, rule.recover) = (100.0, 80.0);
            (rule.wait, rule.repeat) = (Duration::from_secs(10), Duration::from_secs(60));
            change(&mut rule);
            Self { rule, row: None, silenced: false, told: Vec::new() }
        }

        /// Measures at a second; whether it fires then.
        fn at(&mut self, second: i64, value: f64) -> bool {
            let sample = Sample { subject: String::new(), value, detail: None };
            if let Some(change) = judge(&self.rule, self.row.as_ref(), &sample, self.silenced, second * S) {
                assert_eq!(change.rule, "outbox_backlog");
                self.row = change.standing;
                if let Some(news) = change.news {
                    self.told.push((second, news.kind, !news.channels.is_empty()));
                }
            }
            self.row.as_ref().is_some_and(|s| s.firing)
        }
    }

    #[test]
    fn it_fires_when_it_was_bad_for_long_enough_and_once() {
        let mut a = Life::new(|_| {});
        assert!(!a.at(0, 99.9));
        assert!(a.row.is_none(), "fine has no row");
        assert!(!a.at(1, 100.0) && a.row.is_some());
        assert!(!a.at(10, 500.0));
        assert!(a.at(11, 100.0));
        assert!(a.at(12, 100.0) && a.at(20, 1e9));
        assert_eq!(a.told, [(11, AlertKind::Fired, true)]);
        assert_eq!(a.row.as_ref().map(|s| (s.since_us, s.value)), Some((S, 1e9)), "since it was bad, with the last value");
        let mut at_once = Life::new(|rule| rule.wait = Duration::ZERO);
        assert!(at_once.at(5, 100.0));
    }

    #[test]
    fn what_was_bad_for_a_moment_is_forgotten() {
        let mut a = Life::new(|_| {});
        a.at(0, 100.0);
        assert!(!a.at(9, 99.0) && a.row.is_none());
        assert!(!a.at(10, 100.0) && !a.at(19, 100.0));
        assert!(a.at(20, 100.0));
    }

    #[test]
    fn it_is_over_only_below_the_second_threshold() {
        let mut a = Life::new(|rule| rule.wait = Duration::ZERO);
        a.at(0, 100.0);
        assert!(a.at(1, 99.0) && a.at(2, 80.0) && a.at(3, 101.0) && a.at(4, 80.0));
        assert!(!a.at(5, 79.9));
        assert!(a.row.is_none());
        assert!(!a.at(6, 99.0));
        assert_eq!(a.told, [(0, AlertKind::Fired, true), (5, AlertKind::Recovered, true)]);
        let mut quiet = Life::new(|rule| (rule.wait, rule.recovery) = (Duration::ZERO, false));
        quiet.at(0, 100.0);
        quiet.at(1, 0.0);
        assert_eq!(quiet.told, [(0, AlertKind::Fired, true), (1, AlertKind::Recovered, false)]);
    }

    #[test]
    fn little_is_bad_where_the_rule_says_so() {
        let mut a = Life::new(|rule| {
            *rule = Rule {
                name: rule.name.clone(),
                channels: rule.channels.clone(),
                wait: Duration::ZERO,
                ..Rule::of(Kind::PartitionsLow)
            };
            rule.recover = 12.0;
        });
        assert!(!a.at(0, 8.0));
        assert!(a.at(1, 7.0) && a.at(2, 11.0));
        assert!(!a.at(3, 12.0));
    }

    #[test]
    fn it_is_told_again_after_a_while() {
        let mut a = Life::new(|rule| rule.wait = Duration::ZERO);
        for second in (0..200).step_by(7) {
            a.at(second, 100.0);
        }
        let again = AlertKind::Repeated;
        assert_eq!(a.told, [(0, AlertKind::Fired, true), (63, again, true), (126, again, true), (189, again, true)]);
        let mut never = Life::new(|rule| (rule.wait, rule.repeat) = (Duration::ZERO, Duration::ZERO));
        never.at(0, 100.0);
        never.at(1_000_000, 100.0);
        assert_eq!(never.told.len(), 1);
    }

    #[test]
    fn silence_keeps_quiet_until_it_ends() {
        let mut a = Life::new(|rule| rule.wait = Duration::ZERO);
        a.silenced = true;
        assert!(a.at(0, 100.0) && a.at(100, 100.0));
        assert_eq!(a.told, [(0, AlertKind::Fired, false)], "it stands in the history");
        a.silenced = false;
        assert!(a.at(101, 100.0));
        assert_eq!(a.told.last(), Some(&(101, AlertKind::Fired, true)));
        // Silenced while it fires: no repetition, but the end is told.
        a.silenced = true;
        a.at(500, 100.0);
        a.at(501, 0.0);
        assert_eq!(a.told.len(), 3);
        assert_eq!(a.told.last(), Some(&(501, AlertKind::Recovered, true)));
        // What nobody was told of isn't told to be over.
        a.at(600, 100.0);
        a.at(601, 0.0);
        assert_eq!(a.told[3..], [(600, AlertKind::Fired, false), (601, AlertKind::Recovered, false)]);
    }
}
