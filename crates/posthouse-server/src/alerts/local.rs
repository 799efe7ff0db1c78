//! What only this instance knows: it reports it to the one that judges, and judges itself whether a database can be reached.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use posthouse::store::{AlertReport, AlertStanding, Store};
use posthouse::{BreakerState, RelayStats};

use super::rules::{Kind, Rule};
use super::state::{self, Sample};
use crate::config::redact_url;

/// How often what is reported is told again, so that it counts.
const AGAIN: Duration = Duration::from_secs(15);

/// Leases that were lost, and rows that were found missing, count for this long.
const COUNTS: Duration = Duration::from_secs(600);

/// At most this many destinations are reported.
const DESTINATIONS: usize = 200;

/// What of a counter was added lately.
#[derive(Debug, Default)]
struct Lately(VecDeque<(Instant, u64)>);

impl Lately {
    fn of(&mut self, counter: u64, now: Instant) -> u64 {
        // A relay that was started anew counts from 0.
        if self.0.back().is_some_and(|(_, last)| *last > counter) {
            self.0.clear();
        }
        if self.0.back().is_none_or(|(_, last)| *last != counter) {
            self.0.push_back((now, counter));
        }
        // The newest of those that are too old to count is what the others are added to.
        while self.0.len() > 1 && self.0.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) > COUNTS) {
            self.0.pop_front();
        }
        let old = self.0.front().filter(|(at, _)| now.saturating_duration_since(*at) > COUNTS || self.0.len() > 1);
        counter - old.map_or(0, |(_, then)| *then).min(counter)
    }
}

/// Of one database.
#[derive(Debug, Default)]
pub(super) struct Reporter {
    leases: Lately,
    missing: Lately,
    told: Vec<AlertReport>,
    at: Option<Instant>,
}

impl Reporter {
    /// Tells the judge what this instance knows, if there is anything to tell.
    pub(super) async fn report(&mut self, store: &dyn Store, instance: &str, stats: &RelayStats) -> Result<(), posthouse::Error> {
        let now = Instant::now();
        let reports = self.known(instance, stats, now);
        let of = |all: &[AlertReport]| all.iter().map(|r| (r.rule.clone(), r.subject.clone())).collect::<Vec<_>>();
        let same = of(&reports) == of(&self.told);
        let recent = self.at.is_some_and(|at| now.saturating_duration_since(at) < AGAIN);
        // What is fine costs nothing.
        if same && (recent || reports.is_empty()) {
            return Ok(());
        }
        store.alerts().report(instance, &reports).await?;
        (self.told, self.at) = (reports, Some(now));
        Ok(())
    }

    /// Takes back what was told.
    pub(super) async fn take_back(&mut self, store: &dyn Store, instance: &str) -> Result<(), posthouse::Error> {
        if self.told.is_empty() {
            return Ok(());
        }
        store.alerts().report(instance, &[]).await
    }

    fn known(&mut self, instance: &str, stats: &RelayStats, now: Instant) -> Vec<AlertReport> {
        let report = |kind: Kind, subject: &str, value: f64, detail: Option<String>| AlertReport {
            rule: kind.name().into(),
            subject: subject.to_owned(),
            value,
            detail,
        };
        let mut down: Vec<AlertReport> = Vec::new();
        for (name, d) in &stats.destinations {
            let BreakerState::Open(since) = d.breaker else { continue };
            let why = d.blocked.clone().or_else(|| d.last_error.clone());
            let seconds = now.saturating_duration_since(since).as_secs_f64();
            let name = super::notice::cut(&redact_url(name).replace('\0', "\u{fffd}"), 255);
            match down.iter_mut().find(|r| r.subject == name) {
                Some(other) => other.value = other.value.max(seconds),
                None => down.push(report(Kind::DestinationDown, &name, seconds, why)),
            }
        }
        down.sort_by(|a, b| b.value.total_cmp(&a.value).then_with(|| a.subject.cmp(&b.subject)));
        down.truncate(DESTINATIONS);
        let leases = self.leases.of(stats.leases_lost, now);
        let missing = self.missing.of(stats.missing, now);
        if leases > 0 {
            down.push(report(Kind::LeaseLost, instance, leases as f64, None));
        }
        if missing > 0 {
            down.push(report(Kind::MessagesMissing, "", missing as f64, None));
        }
        down
    }
}

/// Whether a database can be reached. Kept in memory: the database itself can't tell.
#[derive(Debug, Default)]
pub(super) struct Reach {
    since: Option<Instant>,
    standing: Option<AlertStanding>,
}

impl Reach {
    /// Says whether it was reached when it was asked at that moment. `now_us` is this machine's clock. Answers what there is to tell.
    pub(super) fn tell(
        &mut self,
        rule: &Rule,
        instance: &str,
        reached: bool,
        why: Option<String>,
        (asked, now): (Instant, Instant),
        now_us: i64,
    ) -> Option<posthouse::store::AlertNews> {
        self.since = if reached { None } else { Some(self.since.unwrap_or(asked)) };
        let away = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let sample = Sample { subject: instance.to_owned(), value: away.as_secs_f64(), detail: why };
        let change = state::judge(rule, self.standing.as_ref(), &sample, false, now_us)?;
        self.standing = change.standing;
        change.news
    }
}

#[cfg(test)]
mod tests {
    use posthouse::store::AlertKind;

    use super::*;

    #[test]
    fn what_was_added_lately_counts_for_a_while() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lately = Lately::default();
        assert_eq!(lately.of(0, at(0)), 0);
        assert_eq!(lately.of(2, at(10)), 2);
        assert_eq!(lately.of(3, at(500)), 3);
        assert_eq!(lately.of(3, at(609)), 3);
        assert_eq!(lately.of(3, at(611)), 1, "the first two are too old");
        assert_eq!(lately.of(3, at(1_101)), 0);
        assert_eq!(lately.of(4, at(1_102)), 1);
        assert_eq!(lately.of(1, at(1_103)), 1, "a relay that was started anew");
        assert_eq!(lately.of(1, at(5_000)), 0);
    }

    #[test]
    fn only_trouble_is_reported() {
        let now = Instant::now() + Duration::from_secs(100);
        let mut stats = RelayStats::default();
        let mut reporter = Reporter::default();
        assert!(reporter.known("i", &stats, now).is_empty());
        let mut down = posthouse::DestinationStats::default();
        down.breaker = BreakerState::Open(now - Duration::from_secs(90));
        down.last_error = Some("refused".into());
        stats.destinations.insert("https://h/?key=hunter2".into(), down);
        stats.destinations.insert("fine".into(), posthouse::DestinationStats::default());
        (stats.leases_lost, stats.missing) = (1, 2);
        let known = reporter.known("i", &stats, now);
        let told: Vec<_> = known.iter().map(|r| (r.rule.as_str(), r.subject.as_str(), r.value)).collect();
        let hook = "https://h/?key=[redacted]";
        assert_eq!(told, [("destination_down", hook, 90.0), ("lease_lost", "i", 1.0), ("messages_missing", "", 2.0)]);
    }

    #[test]
    fn a_database_that_is_away_is_told_once_and_when_it_is_back() {
        let start = Instant::now();
        let mut reach = Reach::default();
        let rule = Rule { channels: vec!["ops".into()], ..Rule::of(Kind::DatabaseUnreachable) };
        let mut at = |seconds: u64, reached| {
            let now = start + Duration::from_secs(seconds);
            reach.tell(&rule, "i", reached, Some("why".into()), (now, now), seconds as i64 * 1_000_000).map(|news| news.kind)
        };
        assert_eq!(at(0, true), None);
        assert_eq!(at(10, false), None);
        assert_eq!(at(69, false), None);
        assert_eq!(at(70, false), Some(AlertKind::Fired));
        assert_eq!(at(80, false), None);
        assert_eq!(at(90, true), Some(AlertKind::Recovered));
        assert_eq!(at(100, false), None);
        assert_eq!(at(110, true), None);
    }
}
