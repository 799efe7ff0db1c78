//! What rules are judged by: asked of the database once for all rules that need it, or known by this instance.

use std::collections::BTreeMap;
use std::time::Duration;

use posthouse::RelayStats;
use posthouse::store::{AlertReport, InboxWaiting, OutboxWaiting, RetryShare, Store};

use super::rules::{About, Kind, Rule};
use super::state::Sample;
use crate::config::redact_url;
use crate::depth::Depth;

/// Alerts of a rule at most; what is beyond is summed under one name. Whoever publishes can write new destinations.
const SUBJECTS: usize = 100;

/// The name under which the others are summed.
const OTHERS: &str = "(others)";

/// What a subject takes in the database.
const SUBJECT: usize = 255;

/// A share is none where so few messages were retried: one of one would be all of them.
const RETRIED: i64 = 10;

/// The time that shares are about.
pub(super) const SHARE: Duration = Duration::from_secs(3600);

/// Reports of an instance that are older than this don't count: it reports several times within it.
const FRESH: Duration = Duration::from_secs(60);

/// What the judge knows at one moment. What wasn't asked for or couldn't be had is None, and its rules aren't judged.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) outbox: Option<Vec<OutboxWaiting>>,
    pub(super) inbox: Option<Vec<InboxWaiting>>,
    pub(super) outbox_retries: Option<RetryShare>,
    pub(super) inbox_retries: Option<Vec<(String, RetryShare)>>,
    pub(super) queues: Option<Vec<Depth>>,
    /// Instances whose lease is valid.
    pub(super) live: Option<Vec<String>>,
    /// Of the judge's own relay.
    pub(super) own: Option<RelayStats>,
    /// Of all instances, the judge's own included.
    pub(super) reports: Option<Vec<(String, AlertReport)>>,
}

impl Measured {
    /// Asks for what these rules need. What can't be had is left out, and told in the log.
    pub(super) async fn take(store: &dyn Store, rules: &[&Rule], database: &str) -> Self {
        let needs = |kinds: &[Kind]| rules.iter().any(|rule| kinds.contains(&rule.kind));
        let failed = |e: &posthouse::Error| tracing::warn!(database, error = %e, "alerts: not all could be measured");
        let alerts = store.alerts();
        let mut out = Self::default();
        if needs(&[Kind::OutboxBacklog, Kind::OutboxFailed, Kind::OutboxOldest]) {
            out.outbox = alerts.outbox_waiting().await.inspect_err(failed).ok();
        }
        if needs(&[Kind::InboxBacklog, Kind::InboxFailed, Kind::InboxOldest]) {
            out.inbox = alerts.inbox_waiting().await.inspect_err(failed).ok();
        }
        if needs(&[Kind::OutboxRetryShare]) {
            out.outbox_retries = alerts.outbox_retries(SHARE).await.inspect_err(failed).ok();
        }
        if needs(&[Kind::InboxRetryShare]) {
            out.inbox_retries = alerts.inbox_retries(SHARE).await.inspect_err(failed).ok();
        }
        if needs(&[Kind::RelayNotRunning]) {
            out.live = store.runs().watch().await.inspect_err(failed).ok().map(|watch| watch.live);
        }
        out
    }

    /// What a rule is judged by. None: it can't be judged now. `firing` are subjects that keep a place of their own.
    pub(super) fn samples(&self, rule: &Rule, firing: &[&str]) -> Option<Vec<Sample>> {
        let one = |value: f64, detail: Option<String>| vec![Sample { subject: String::new(), value, detail }];
        let samples = match rule.kind {
            Kind::OutboxBacklog => {
                let all = self.outbox_of(rule)?;
                let sum = all.iter().map(|w| w.waiting).sum::<i64>();
                let most = all.iter().max_by_key(|w| w.waiting).filter(|w| w.waiting > 0);
                one(sum as f64, most.map(|w| format!("{} of them for {}", w.waiting, redact_url(&w.destination))))
            }
            Kind::OutboxOldest => {
                let oldest = self.outbox_of(rule)?.into_iter().filter_map(|w| Some((w.oldest?, w))).max_by_key(|(age, _)| *age);
                let detail = oldest.map(|(_, w)| format!("it is for {}", redact_url(&w.destination)));
                one(oldest.map_or(0.0, |(age, _)| age.as_secs_f64()), detail)
            }
            Kind::OutboxFailed => {
                let of = |w: &OutboxWaiting| (redact_url(&w.destination), w.failed as f64, None);
                self.outbox_of(rule)?.into_iter().map(of).map(sample).collect()
            }
            Kind::OutboxRetryShare => one(share(self.outbox_retries?), None),
            Kind::InboxBacklog => self.inbox_of(rule, |w| w.waiting as f64)?,
            Kind::InboxFailed => self.inbox_of(rule, |w| w.failed as f64)?,
            Kind::InboxOldest => self.inbox_of(rule, |w| w.oldest.unwrap_or_default().as_secs_f64())?,
            Kind::InboxRetryShare => {
                let all = self.inbox_retries.as_ref()?.iter().filter(|(consumer, _)| rule.is_about(consumer));
                all.map(|(consumer, found)| (consumer.clone(), share(*found), None)).map(sample).collect()
            }
            Kind::QueueDepth => {
                let of = |d: &Depth| Some((queue(d), d.messages? as f64, None));
                let all = self.queues.as_ref()?.iter().filter(|d| rule.is_about(&d.name));
                all.filter_map(of).map(sample).collect()
            }
            Kind::DestinationDown | Kind::LeaseLost => self.reported(rule)?,
            Kind::MessagesMissing => {
                let sum = self.reported(rule)?.iter().map(|s| s.value).sum();
                one(sum, None)
            }
            Kind::RelayNotRunning => one(self.live.as_ref()?.len() as f64, None),
            Kind::HousesUncovered => {
                let uncovered = self.own.as_ref()?.uncovered.as_ref();
                let houses = uncovered.and_then(|u| u.houses.count()).unwrap_or(0);
                one(f64::from(houses), uncovered.map(|u| format!("houses {}", u.houses)))
            }
            Kind::MessagesOrphaned => {
                let orphaned = &self.own.as_ref()?.orphaned;
                let houses: Vec<String> = orphaned.iter().map(|(house, _)| house.to_string()).collect();
                let detail = (!houses.is_empty()).then(|| format!("houses {}", houses.join(", ")));
                one(orphaned.iter().map(|(_, rows)| *rows as f64).sum(), detail)
            }
            // None: the log isn't partitioned, or nobody has looked yet.
            Kind::PartitionsLow => one(f64::from(self.own.as_ref()?.partitions_ahead?), None),
            Kind::TablesBroken => {
                let problems = &self.own.as_ref()?.problems;
                one(problems.len() as f64, (!problems.is_empty()).then(|| problems.join("; ")))
            }
            // Judged by each instance for itself: a database that can't be reached can't hold what became of it.
            Kind::DatabaseUnreachable => return None,
        };
        Some(if rule.kind.about() == About::Database { samples } else { bounded(rule, samples, firing) })
    }

    /// Whether what a subject is about is there, and can't be measured at the moment.
    pub(super) fn is_unknown(&self, rule: &Rule, subject: &str) -> bool {
        rule.kind == Kind::QueueDepth
            && self.queues.iter().flatten().any(|d| d.messages.is_none() && rule.is_about(&d.name) && queue(d) == subject)
    }

    fn outbox_of(&self, rule: &Rule) -> Option<Vec<&OutboxWaiting>> {
        Some(self.outbox.as_ref()?.iter().filter(|w| rule.is_about(&w.destination)).collect())
    }

    fn inbox_of(&self, rule: &Rule, value: fn(&InboxWaiting) -> f64) -> Option<Vec<Sample>> {
        let all = self.inbox.as_ref()?.iter().filter(|w| rule.is_about(&w.consumer));
        Some(all.map(|w| (w.consumer.clone(), value(w), None)).map(sample).collect())
    }

    fn reported(&self, rule: &Rule) -> Option<Vec<Sample>> {
        let all = self.reports.as_ref()?.iter().filter(|(_, report)| report.rule == rule.kind.name());
        let about = all.filter(|(_, report)| rule.is_about(&report.subject));
        Some(about.map(|(_, r)| (r.subject.clone(), r.value, r.detail.clone())).map(sample).collect())
    }
}

/// What people call a queue, or what a group has before it.
fn queue(depth: &Depth) -> String {
    let behind = depth.group.as_ref().map(|group| format!(" ({group})")).unwrap_or_default();
    format!("{}:{}{behind}", depth.transport, depth.name)
}

fn sample((subject, value, detail): (String, f64, Option<String>)) -> Sample {
    Sample { subject: crate::alerts::notice::cut(&subject.replace('\0', "\u{fffd}"), SUBJECT), value, detail }
}

fn share(found: RetryShare) -> f64 {
    if found.retried < RETRIED { 0.0 } else { found.retried as f64 / found.messages.max(found.retried) as f64 }
}

/// One sample for each subject, and few subjects: those that fire stay, then come the worst. What is beyond is summed, or of shares
/// and times the worst is told.
fn bounded(rule: &Rule, samples: Vec<Sample>, firing: &[&str]) -> Vec<Sample> {
    let sums = matches!(rule.kind.unit(), super::rules::Unit::Count(_));
    let join = |one: &mut Sample, other: Sample, sums: bool| {
        let worse = other.value > one.value;
        if worse || one.detail.is_none() {
            one.detail = other.detail;
        }
        one.value = if sums { one.value + other.value } else { one.value.max(other.value) };
    };
    let mut joined: BTreeMap<String, Sample> = BTreeMap::new();
    for other in samples {
        match joined.get_mut(&other.subject) {
            // Of what several instances say about one destination the worst counts.
            Some(one) => join(one, other, sums && rule.kind != Kind::LeaseLost),
            None => {
                joined.insert(other.subject.clone(), other);
            }
        }
    }
    let mut ranked: Vec<Sample> = joined.into_values().collect();
    if ranked.len() <= SUBJECTS {
        return ranked;
    }
    let fires = |s: &Sample| firing.contains(&s.subject.as_str());
    ranked.sort_by(|a, b| {
        let urgency = fires(b).cmp(&fires(a)).then(b.value.total_cmp(&a.value));
        urgency.then_with(|| a.subject.cmp(&b.subject))
    });
    let mut others = Sample::nothing(OTHERS);
    for sample in ranked.split_off(SUBJECTS) {
        join(&mut others, sample, sums);
    }
    ranked.push(others);
    ranked
}

/// Reports of instances that are still there.
pub(super) fn fresh(reports: Vec<(String, Duration, AlertReport)>) -> Vec<(String, AlertReport)> {
    reports.into_iter().filter(|(_, age, _)| *age <= FRESH).map(|(by, _, report)| (by, report)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(destination: &str, waiting: i64, failed: i64, oldest: Option<u64>) -> OutboxWaiting {
        OutboxWaiting { destination: destination.into(), waiting, failed, oldest: oldest.map(Duration::from_secs) }
    }

    fn rule(kind: Kind, only: Option<&str>) -> Rule {
        Rule { only: only.map(str::to_owned), ..Rule::of(kind) }
    }

    #[test]
    fn what_waits_is_summed_and_what_failed_is_told_by_destination() {
        let measured = Measured {
            outbox: Some(vec![
                waiting("a.x", 5, 0, Some(7)),
                waiting("a.y", 9, 2, Some(3)),
                waiting("https://h/?k=1", 1, 3, None),
                waiting("https://h/?k=2", 1, 4, None),
            ]),
            ..Measured::default()
        };
        let of = |kind, only| measured.samples(&rule(kind, only), &[]).unwrap();
        let backlog = of(Kind::OutboxBacklog, None);
        assert_eq!((backlog[0].value, backlog[0].detail.as_deref()), (16.0, Some("9 of them for a.y")));
        assert_eq!(of(Kind::OutboxBacklog, Some("a.*"))[0].value, 14.0);
        let oldest = of(Kind::OutboxOldest, None);
        assert_eq!((oldest[0].value, oldest[0].detail.as_deref()), (7.0, Some("it is for a.x")));
        let failed: Vec<(String, f64)> = of(Kind::OutboxFailed, None).into_iter().map(|s| (s.subject, s.value)).collect();
        let hook = "https://h/?k=[redacted]".to_owned();
        assert_eq!(failed, [("a.x".to_owned(), 0.0), ("a.y".to_owned(), 2.0), (hook, 7.0)], "no secret is a subject");
        assert_eq!(measured.samples(&rule(Kind::InboxFailed, None), &[]), None, "it wasn't measured");
    }

    #[test]
    fn few_subjects_have_a_place_of_their_own() {
        let outbox = (0..SUBJECTS as i64 + 20).map(|n| waiting(&format!("d{n:03}"), 0, n, None)).collect();
        let measured = Measured { outbox: Some(outbox), ..Measured::default() };
        let samples = measured.samples(&rule(Kind::OutboxFailed, None), &["d000"]).unwrap();
        assert_eq!(samples.len(), SUBJECTS + 1);
        assert!(samples.iter().any(|s| s.subject == "d000") && samples.iter().any(|s| s.subject == "d119"));
        let others = samples.iter().find(|s| s.subject == OTHERS).unwrap();
        assert_eq!(others.value, (1..=20).sum::<i64>() as f64);
    }

    #[test]
    fn of_what_instances_report_the_worst_counts() {
        let report = |by: &str, rule: Kind, subject: &str, value| {
            let report = AlertReport { rule: rule.name().into(), subject: subject.into(), value, detail: Some(by.into()) };
            (by.to_owned(), report)
        };
        let measured = Measured {
            reports: Some(vec![
                report("a", Kind::DestinationDown, "x", 5.0),
                report("b", Kind::DestinationDown, "x", 70.0),
                report("b", Kind::MessagesMissing, "", 2.0),
                report("a", Kind::MessagesMissing, "", 1.0),
            ]),
            ..Measured::default()
        };
        let down = measured.samples(&rule(Kind::DestinationDown, None), &[]).unwrap();
        assert_eq!(down, [Sample { subject: "x".into(), value: 70.0, detail: Some("b".into()) }]);
        assert_eq!(measured.samples(&rule(Kind::MessagesMissing, None), &[]).unwrap()[0].value, 3.0);
        let old = |seconds| ("a".to_owned(), Duration::from_secs(seconds), report("a", Kind::LeaseLost, "a", 1.0).1);
        assert_eq!(fresh(vec![old(59), old(61)]).len(), 1);
    }

    #[test]
    fn a_share_of_few_is_none() {
        let of = |messages, retried| share(RetryShare { messages, retried });
        assert_eq!(of(9, 9), 0.0);
        assert_eq!(of(10, 10), 1.0);
        assert_eq!(of(100, 25), 0.25);
        assert_eq!(of(5, 20), 1.0);
    }
}
