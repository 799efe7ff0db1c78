//! [`AlertStore`]: what the one that judges alerts asks, and people who look at them.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::Reply;
use crate::Error;

/// The duty of the instance that judges the alerts of a set of tables.
pub const ALERTS: &str = "alerts";

/// Attempts from which on a message counts as retried often.
pub const RETRIED_OFTEN: i32 = 3;

/// At most this many lines of the attempt log, and received messages of a consumer, are looked at for a share.
pub const SHARE_ROWS: i64 = 50_000;

/// Consumers whose share is asked for.
pub const SHARE_CONSUMERS: usize = 200;

/// Notices that are read at once.
pub const NOTICES: i64 = 500;

/// Events that are removed at once.
pub const OLD_EVENTS: i64 = 500;

/// An alert that isn't fine: it is firing, or waits for the rule's time. What is fine has no row.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AlertRow {
    /// Name of the rule.
    pub rule: String,
    /// What it is about: a destination, a consumer, an instance; empty where that is the database.
    pub subject: String,
    /// False: it waits for the rule's time.
    pub firing: bool,
    /// Since when it has been so, microseconds since 1970 UTC.
    pub since_us: i64,
    /// What was measured last: messages, a share (0 to 1), or seconds, as the rule has it.
    pub value: f64,
    /// The rule's threshold at that time.
    pub threshold: f64,
    /// More for people.
    pub detail: Option<String>,
    /// When it was measured last, microseconds since 1970 UTC.
    pub seen_us: i64,
    /// When a notice was last written, microseconds since 1970 UTC. None: nobody has been told.
    pub told_us: Option<i64>,
}

impl AlertRow {
    /// How it stands.
    pub fn standing(&self) -> AlertStanding {
        AlertStanding {
            firing: self.firing,
            since_us: self.since_us,
            value: self.value,
            threshold: self.threshold,
            detail: self.detail.clone(),
            told_us: self.told_us,
        }
    }
}

/// What nobody wants to be told of for a while.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AlertSilence {
    /// Name of the rule; empty: all rules.
    pub rule: String,
    /// What it is about; empty: all that the rule is about.
    pub subject: String,
    /// When it began, microseconds since 1970 UTC.
    pub since_us: i64,
    /// When it ends, microseconds since 1970 UTC.
    pub until_us: i64,
    /// Who wanted it.
    pub actor: String,
    /// Why.
    pub reason: String,
}

impl AlertSilence {
    /// Whether it is about this alert.
    pub fn covers(&self, rule: &str, subject: &str) -> bool {
        (self.rule.is_empty() || self.rule == rule) && (self.subject.is_empty() || self.subject == subject)
    }
}

/// What one instance knows and the one that judges has to be told.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertReport {
    /// What it is.
    pub rule: String,
    /// What it is about.
    pub subject: String,
    /// How much.
    pub value: f64,
    /// More for people.
    pub detail: Option<String>,
}

/// All that there is to judge by, beside what is measured.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct AlertWatch {
    /// The database's clock, microseconds since 1970 UTC.
    pub now_us: i64,
    /// The instance that judges; None while there is none.
    pub judge: Option<String>,
    /// What isn't fine, by rule and subject.
    pub alerts: Vec<AlertRow>,
    /// Silences that haven't ended.
    pub silences: Vec<AlertSilence>,
    /// What instances reported: which one, how long ago, what.
    pub reports: Vec<(String, Duration, AlertReport)>,
}

/// How an alert stands after it was judged.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertStanding {
    /// False: it waits for the rule's time.
    pub firing: bool,
    /// Since when it has been so, microseconds since 1970 UTC.
    pub since_us: i64,
    /// What was measured.
    pub value: f64,
    /// The rule's threshold.
    pub threshold: f64,
    /// More for people.
    pub detail: Option<String>,
    /// When a notice was last written, microseconds since 1970 UTC.
    pub told_us: Option<i64>,
}

/// What happened to an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum AlertKind {
    /// It began to fire.
    Fired,
    /// It is still firing.
    Repeated,
    /// It is fine again.
    Recovered,
    /// It isn't judged any more: its rule was changed or turned off.
    Ended,
}

impl AlertKind {
    /// As it is written in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fired => "FIRED",
            Self::Repeated => "REPEATED",
            Self::Recovered => "RECOVERED",
            Self::Ended => "ENDED",
        }
    }

    pub(crate) fn parse(text: &str) -> Self {
        match text {
            "FIRED" => Self::Fired,
            "REPEATED" => Self::Repeated,
            "RECOVERED" => Self::Recovered,
            _ => Self::Ended,
        }
    }
}

/// Something that happened to an alert, to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertNews {
    /// What.
    pub kind: AlertKind,
    /// Since when the alert had been so, microseconds since 1970 UTC.
    pub since_us: i64,
    /// What was measured.
    pub value: f64,
    /// The rule's threshold.
    pub threshold: f64,
    /// More for people.
    pub detail: Option<String>,
    /// Nobody is told because somebody silenced it.
    pub silenced: bool,
    /// Channels through which it is told.
    pub channels: Vec<String>,
}

/// What becomes of one alert.
#[derive(Debug, Clone, PartialEq)]
pub struct AlertChange {
    /// Name of the rule.
    pub rule: String,
    /// What it is about.
    pub subject: String,
    /// How it stands now. None: it is fine, or isn't judged any more.
    pub standing: Option<AlertStanding>,
    /// What there is to tell.
    pub news: Option<AlertNews>,
}

/// Something that happened to an alert.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct AlertEvent {
    /// Row id.
    pub id: i64,
    /// When, microseconds since 1970 UTC.
    pub at_us: i64,
    /// Name of the rule.
    pub rule: String,
    /// What it is about.
    pub subject: String,
    /// What happened.
    pub kind: AlertKind,
    /// Since when the alert had been so, microseconds since 1970 UTC.
    pub since_us: i64,
    /// What was measured.
    pub value: f64,
    /// The rule's threshold.
    pub threshold: f64,
    /// More for people.
    pub detail: Option<String>,
    /// The instance that judged it.
    pub instance: String,
    /// Nobody was told because somebody had silenced it.
    pub silenced: bool,
    /// What became of its notices.
    pub notices: Vec<AlertNotice>,
}

/// A notice of an event through one channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AlertNotice {
    /// Name of the channel.
    pub channel: String,
    /// Tries so far.
    pub attempts: i32,
    /// When it was sent, microseconds since 1970 UTC.
    pub sent_us: Option<i64>,
    /// When it is tried next, microseconds since 1970 UTC. None: it was sent, or given up.
    pub due_us: Option<i64>,
    /// The last error.
    pub error: Option<String>,
}

/// Which events a list shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AlertFilter {
    /// Only those of this rule.
    pub rule: Option<String>,
    /// Only ids below this one (the last of the page before).
    pub before: Option<i64>,
    /// At most this many. 1 to 10 000.
    pub limit: u32,
}

/// A notice that is still to be sent.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct OpenNotice {
    /// Through this channel.
    pub channel: String,
    /// Tries so far.
    pub attempts: i32,
    /// Its time has come.
    pub due: bool,
    /// Since when it has been waiting.
    pub age: Duration,
    /// Of this event, whose own notices are left out.
    pub event: AlertEvent,
}

/// What came of sending notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeOutcome<'a> {
    /// The channel took them.
    Sent,
    /// It didn't; they are tried again after this time.
    Retry(&'a str, Duration),
    /// They aren't tried again.
    GivenUp(&'a str),
}

/// What isn't delivered, of one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxWaiting {
    /// Effective destination.
    pub destination: String,
    /// Messages that are due or were tried; delayed ones whose time hasn't come don't count.
    pub waiting: i64,
    /// FAILED messages.
    pub failed: i64,
    /// How long the oldest of those that wait has been due.
    pub oldest: Option<Duration>,
}

/// What isn't done, of one consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InboxWaiting {
    /// Consumer.
    pub consumer: String,
    /// Received messages that are to be run again, or are running.
    pub waiting: i64,
    /// FAILED ones.
    pub failed: i64,
    /// How long ago the oldest of those that wait was received.
    pub oldest: Option<Duration>,
}

/// How many messages there were in a time, and how many of them were tried [`RETRIED_OFTEN`] times or more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RetryShare {
    /// Messages.
    pub messages: i64,
    /// Those that were retried often.
    pub retried: i64,
}

/// Alerts of a set of tables. Every call has a deadline inside.
pub trait AlertStore: Send + Sync + fmt::Debug {
    /// The clock, who judges, what isn't fine, silences, reports.
    fn watch(&self) -> Reply<'_, AlertWatch>;
    /// Writes how alerts stand and what there is to tell, with the notices, all or nothing; false, and nothing is written, unless
    /// `judge` has the duty [`ALERTS`].
    fn judged<'a>(&'a self, judge: &'a str, changes: &'a [AlertChange]) -> Reply<'a, bool>;
    /// Replaces what an instance reported.
    fn report<'a>(&'a self, instance: &'a str, reports: &'a [AlertReport]) -> Reply<'a, ()>;

    /// Notices that are to be sent, by event, up to [`NOTICES`].
    fn open_notices(&self) -> Reply<'_, Vec<OpenNotice>>;
    /// Says before it is done that notices are sent: another try is made when the lease ends and nobody has said what came of it.
    /// False, and nothing is written, unless `judge` has the duty [`ALERTS`].
    fn sending<'a>(&'a self, judge: &'a str, channel: &'a str, events: &'a [i64], lease: Duration) -> Reply<'a, bool>;
    /// Says what came of it. What is over stays so.
    fn sent<'a>(&'a self, channel: &'a str, events: &'a [i64], outcome: NoticeOutcome<'a>) -> Reply<'a, ()>;

    /// What isn't delivered, by destination. Reads the whole pending set.
    fn outbox_waiting(&self) -> Reply<'_, Vec<OutboxWaiting>>;
    /// What isn't done, by consumer.
    fn inbox_waiting(&self) -> Reply<'_, Vec<InboxWaiting>>;
    /// Messages that were published or failed an attempt within this time. Looks at up to [`SHARE_ROWS`] failed attempts.
    fn outbox_retries(&self, within: Duration) -> Reply<'_, RetryShare>;
    /// Received messages that had their effect or failed within this time, by consumer: of up to [`SHARE_CONSUMERS`], up to
    /// [`SHARE_ROWS`] of each.
    fn inbox_retries(&self, within: Duration) -> Reply<'_, Vec<(String, RetryShare)>>;

    /// Events by descending id, with what became of their notices.
    fn events<'a>(&'a self, filter: &'a AlertFilter) -> Reply<'a, Vec<AlertEvent>>;
    /// Silences a rule (empty: all) and a subject (empty: all of the rule) for this long, with an audit line; one that is there
    /// already is replaced.
    fn silence<'a>(&'a self, rule: &'a str, subject: &'a str, time: Duration, actor: &'a str, reason: &'a str) -> Reply<'a, ()>;
    /// Ends a silence, with an audit line; false when there is none.
    fn unsilence<'a>(&'a self, rule: &'a str, subject: &'a str, actor: &'a str) -> Reply<'a, bool>;
    /// Removes up to [`OLD_EVENTS`] events older than this with their notices, silences that are over, and reports of instances
    /// that are gone; answers how many events.
    fn tidy_alerts(&self, older: Duration) -> Reply<'_, u64>;
}

/// Looks for the first row of a log that is recent, where rows are (nearly) in the order of their ids.
#[derive(Debug)]
pub(crate) struct Bisect {
    low: i64,
    high: i64,
    found: Option<i64>,
}

impl Bisect {
    /// Between the lowest and the highest id there are.
    pub(crate) fn new(low: i64, high: i64) -> Self {
        Self { low, high, found: None }
    }

    /// The id from which on the next row is to be looked at.
    pub(crate) fn probe(&self) -> Option<i64> {
        (self.low <= self.high).then(|| self.low + (self.high - self.low) / 2)
    }

    /// The first row from `probe` on has this id, and is recent or not; None: there is none.
    pub(crate) fn saw(&mut self, probe: i64, row: Option<(i64, bool)>) {
        match row {
            Some((id, true)) => {
                self.found = Some(id);
                self.high = probe - 1;
            }
            Some((id, false)) => self.low = id.max(probe) + 1,
            None => self.high = probe - 1,
        }
    }

    /// The first recent row.
    pub(crate) fn found(self) -> Option<i64> {
        self.found
    }
}

/// Checks what a rule or a channel may be named.
pub(crate) fn checked_name<'a>(field: &'static str, name: &'a str, least: usize) -> Result<&'a str, Error> {
    if (least..=64).contains(&name.len()) && !name.contains('\0') {
        Ok(name)
    } else {
        Err(Error::invalid(field, format!("a name has {least} to 64 bytes and no NUL; {name:?} has {}", name.len())))
    }
}

/// Checks what an alert may be about.
pub(crate) fn checked_subject(subject: &str) -> Result<&str, Error> {
    if subject.len() <= 255 && !subject.contains('\0') {
        Ok(subject)
    } else {
        Err(Error::invalid("subject", format!("has at most 255 bytes and no NUL; this one has {}", subject.len())))
    }
}

/// A text for people, as it is stored.
pub(crate) fn stored_detail(text: Option<&str>) -> Option<String> {
    text.map(|text| crate::error::storable(text, 2_000))
}

/// The `detail` of an audit line about a silence.
pub(crate) fn silence_detail(rule: &str, subject: &str, more: &str) -> String {
    let rule = if rule.is_empty() { "all rules" } else { rule };
    let subject = if subject.is_empty() { String::new() } else { format!(" {subject}") };
    crate::error::storable(&format!("{rule}{subject}{more}"), 2_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_recent_row_is_found_with_few_looks() {
        let look = |ids: &[i64], recent_from: i64| {
            let mut bisect = Bisect::new(ids[0], ids[ids.len() - 1]);
            let mut looks = 0;
            while let Some(probe) = bisect.probe() {
                looks += 1;
                let row = ids.iter().copied().find(|id| *id >= probe);
                bisect.saw(probe, row.map(|id| (id, id >= recent_from)));
            }
            (bisect.found(), looks)
        };
        let ids: Vec<i64> = (1..=1_000).collect();
        for from in [1, 2, 500, 999, 1_000] {
            let (found, looks) = look(&ids, from);
            assert_eq!(found, Some(from));
            assert!(looks <= 11, "{looks}");
        }
        assert_eq!(look(&ids, 1_001).0, None);
        let gaps = [3, 4, 4_000_000_000, 4_000_000_007];
        for from in gaps {
            let (found, looks) = look(&gaps, from);
            assert_eq!(found, Some(from));
            assert!(looks <= 33, "{looks}");
        }
        assert_eq!(look(&[7], 7).0, Some(7));
        assert_eq!(look(&[7], 8).0, None);
    }

    #[test]
    fn a_silence_covers_what_it_names() {
        let silence = |rule: &str, subject: &str| AlertSilence {
            rule: rule.into(),
            subject: subject.into(),
            since_us: 0,
            until_us: 0,
            actor: String::new(),
            reason: String::new(),
        };
        assert!(silence("", "").covers("r", "s"));
        assert!(silence("r", "").covers("r", "s") && silence("r", "").covers("r", ""));
        assert!(!silence("r", "").covers("q", "s"));
        assert!(silence("r", "s").covers("r", "s") && !silence("r", "s").covers("r", "t") && !silence("r", "s").covers("r", ""));
        for kind in [AlertKind::Fired, AlertKind::Repeated, AlertKind::Recovered, AlertKind::Ended] {
            assert_eq!(AlertKind::parse(kind.as_str()), kind);
        }
    }
}
