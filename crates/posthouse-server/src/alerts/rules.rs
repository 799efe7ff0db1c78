//! What there is to watch, and the rules about it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::http::ready::PARTITIONS;
use crate::output::span;

/// What a rule is about. Each alert of a rule is about one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum About {
    Database,
    Destination,
    Consumer,
    Queue,
    Instance,
}

/// What a value counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// These things.
    Count(&'static str),
    /// 0 to 1.
    Share,
    /// Seconds.
    Time,
}

impl Unit {
    /// A value for people.
    pub(crate) fn text(self, value: f64) -> String {
        match self {
            Self::Count(what) if value == 1.0 => format!("1 {what}"),
            Self::Count(what) => format!("{} {what}s", rounded(value)),
            Self::Share => format!("{} %", rounded(value * 100.0)),
            Self::Time => span(Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)),
        }
    }

    /// A value as it is written in the configuration.
    fn written(self, value: f64) -> Value {
        match self {
            Self::Time => {
                humantime::format_duration(Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)).to_string().into()
            }
            _ if value.fract() == 0.0 && value.abs() < 1e15 => (value as i64).into(),
            _ => value.into(),
        }
    }
}

/// To two digits behind the point, without those that say nothing.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// What is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    OutboxBacklog,
    OutboxFailed,
    OutboxRetryShare,
    OutboxOldest,
    InboxBacklog,
    InboxFailed,
    InboxRetryShare,
    InboxOldest,
    QueueDepth,
    DestinationDown,
    HousesUncovered,
    MessagesOrphaned,
    MessagesMissing,
    RelayNotRunning,
    LeaseLost,
    PartitionsLow,
    TablesBroken,
    DatabaseUnreachable,
}

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// How often people are told again.
const REPEAT: Duration = Duration::from_secs(4 * 3600);

impl Kind {
    pub(crate) const ALL: [Self; 18] = [
        Self::OutboxBacklog,
        Self::OutboxFailed,
        Self::OutboxRetryShare,
        Self::OutboxOldest,
        Self::InboxBacklog,
        Self::InboxFailed,
        Self::InboxRetryShare,
        Self::InboxOldest,
        Self::QueueDepth,
        Self::DestinationDown,
        Self::HousesUncovered,
        Self::MessagesOrphaned,
        Self::MessagesMissing,
        Self::RelayNotRunning,
        Self::LeaseLost,
        Self::PartitionsLow,
        Self::TablesBroken,
        Self::DatabaseUnreachable,
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OutboxBacklog => "outbox_backlog",
            Self::OutboxFailed => "outbox_failed",
            Self::OutboxRetryShare => "outbox_retry_share",
            Self::OutboxOldest => "outbox_oldest",
            Self::InboxBacklog => "inbox_backlog",
            Self::InboxFailed => "inbox_failed",
            Self::InboxRetryShare => "inbox_retry_share",
            Self::InboxOldest => "inbox_oldest",
            Self::QueueDepth => "queue_depth",
            Self::DestinationDown => "destination_down",
            Self::HousesUncovered => "houses_uncovered",
            Self::MessagesOrphaned => "messages_orphaned",
            Self::MessagesMissing => "messages_missing",
            Self::RelayNotRunning => "relay_not_running",
            Self::LeaseLost => "lease_lost",
            Self::PartitionsLow => "partitions_low",
            Self::TablesBroken => "tables_broken",
            Self::DatabaseUnreachable => "database_unreachable",
        }
    }

    pub(crate) fn about(self) -> About {
        match self {
            Self::OutboxFailed | Self::DestinationDown => About::Destination,
            Self::InboxBacklog | Self::InboxFailed | Self::InboxRetryShare | Self::InboxOldest => About::Consumer,
            Self::QueueDepth => About::Queue,
            Self::LeaseLost => About::Instance,
            _ => About::Database,
        }
    }

    /// The key that narrows it, where there is one.
    pub(crate) fn narrowed_by(self) -> Option<&'static str> {
        match self {
            Self::OutboxBacklog | Self::OutboxFailed | Self::OutboxOldest | Self::DestinationDown => Some("destination"),
            Self::InboxBacklog | Self::InboxFailed | Self::InboxRetryShare | Self::InboxOldest => Some("consumer"),
            Self::QueueDepth => Some("queue"),
            _ => None,
        }
    }

    pub(crate) fn unit(self) -> Unit {
        match self {
            Self::OutboxRetryShare | Self::InboxRetryShare => Unit::Share,
            Self::OutboxOldest | Self::InboxOldest | Self::DestinationDown | Self::DatabaseUnreachable => Unit::Time,
            Self::HousesUncovered => Unit::Count("house"),
            Self::RelayNotRunning => Unit::Count("instance"),
            Self::LeaseLost => Unit::Count("lease"),
            Self::PartitionsLow => Unit::Count("partition"),
            Self::TablesBroken => Unit::Count("problem"),
            _ => Unit::Count("message"),
        }
    }

    /// Whether little is bad: it fires below the threshold, not at or above it.
    pub(crate) fn little_is_bad(self) -> bool {
        matches!(self, Self::RelayNotRunning | Self::PartitionsLow)
    }

    /// (threshold, how often it is looked at, how long it must be so).
    fn defaults(self) -> (f64, Duration, Duration) {
        match self {
            Self::OutboxBacklog => (10_000.0, 30 * SECOND, 5 * MINUTE),
            Self::OutboxFailed | Self::InboxFailed => (1.0, 30 * SECOND, MINUTE),
            Self::OutboxRetryShare | Self::InboxRetryShare => (0.2, MINUTE, 5 * MINUTE),
            Self::OutboxOldest | Self::InboxOldest => (600.0, 30 * SECOND, MINUTE),
            Self::InboxBacklog => (1_000.0, 30 * SECOND, 5 * MINUTE),
            Self::QueueDepth => (10_000.0, 30 * SECOND, 5 * MINUTE),
            Self::DestinationDown | Self::DatabaseUnreachable => (60.0, 15 * SECOND, Duration::ZERO),
            Self::HousesUncovered | Self::MessagesOrphaned | Self::TablesBroken => (1.0, 30 * SECOND, MINUTE),
            Self::RelayNotRunning => (1.0, 15 * SECOND, MINUTE),
            Self::MessagesMissing | Self::LeaseLost => (1.0, 30 * SECOND, Duration::ZERO),
            Self::PartitionsLow => (f64::from(PARTITIONS), MINUTE, 5 * MINUTE),
        }
    }

    /// Where an alert is over, if the rule doesn't say: at four fifths of the threshold, or at the threshold itself where
    /// little is bad.
    pub(crate) fn recover(self, threshold: f64) -> f64 {
        if self.little_is_bad() { threshold } else { threshold * 0.8 }
    }

    /// What is so, as a sentence without its full stop.
    pub(crate) fn sentence(self, value: f64, subject: &str, database: &str) -> String {
        let v = self.unit().text(value);
        let wait = if value == 1.0 { "waits" } else { "wait" };
        match self {
            Self::OutboxBacklog => format!("{v} {wait} in the outbox of {database}"),
            Self::OutboxFailed => format!("{v} FAILED for {subject} in {database}"),
            Self::OutboxRetryShare => format!("{v} of the messages of the last hour were tried 3 times or more in {database}"),
            Self::OutboxOldest => format!("the oldest message that isn't delivered has waited {v} in {database}"),
            Self::InboxBacklog => format!("{v} {wait} to be run again by consumer {subject} in {database}"),
            Self::InboxFailed => format!("{v} FAILED at consumer {subject} in {database}"),
            Self::InboxRetryShare => {
                format!("{v} of what consumer {subject} did in the last hour was run 3 times or more in {database}")
            }
            Self::InboxOldest => {
                format!("the oldest message that consumer {subject} hasn't done has waited {v} in {database}")
            }
            Self::QueueDepth => format!("{v} {wait} in {subject}"),
            Self::DestinationDown => format!("{subject} has been down for {v} (database {database})"),
            Self::HousesUncovered => format!("{v} of {database} are covered by no live instance"),
            Self::MessagesOrphaned => {
                format!("{v} of {database} are in houses that no live instance covers, or that don't exist")
            }
            Self::MessagesMissing => format!("{v} of {database} stand in the pending set without a row in the log"),
            Self::RelayNotRunning => format!("{v} with a valid lease for {database}"),
            Self::LeaseLost => format!("instance {subject} lost {v} in {database} within ten minutes"),
            Self::PartitionsLow => format!("{v} of the log are ready ahead in {database}"),
            Self::TablesBroken => format!("{v} with the tables of {database}"),
            Self::DatabaseUnreachable => format!("{database} hasn't been reached for {v}, by {subject}"),
        }
    }

    /// What a person does about it.
    pub(crate) fn hint(self) -> &'static str {
        match self {
            Self::OutboxBacklog | Self::OutboxOldest => "posthouse destinations",
            Self::OutboxFailed => "posthouse messages list --status FAILED",
            Self::OutboxRetryShare => "posthouse messages list --status PENDING",
            Self::InboxBacklog | Self::InboxOldest | Self::InboxRetryShare => "posthouse inbox list --status PENDING_RETRY",
            Self::InboxFailed => "posthouse inbox list --status FAILED",
            Self::QueueDepth => "look at the consumers of the queue",
            Self::DestinationDown => "posthouse destinations; messages wait, and no attempts are counted",
            Self::HousesUncovered | Self::MessagesOrphaned => "start an instance with a group that has these houses",
            Self::MessagesMissing => "find out who removed rows of the log; the messages can't be sent",
            Self::RelayNotRunning => "posthouse houses list; the log of the instances says why they have no lease",
            Self::LeaseLost => "look at the load of the database and of the instance: renewing the lease took too long",
            Self::PartitionsLow => "publishing fails when there are none; the log of the relay says why it can't make them",
            Self::TablesBroken => "follow what the detail says",
            Self::DatabaseUnreachable => "look at the database and the network to it",
        }
    }
}

/// A rule, as it is in effect.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rule {
    /// By which it is known; a default goes by the name of its kind.
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// It fires from here on (below, where little is bad).
    pub(crate) threshold: f64,
    /// It is over below this (from here on, where little is bad).
    pub(crate) recover: f64,
    /// How often it is looked at.
    pub(crate) interval: Duration,
    /// How long it must be so before it fires.
    pub(crate) wait: Duration,
    /// How often people are told again while it fires; zero: never.
    pub(crate) repeat: Duration,
    /// Whether people are told when it is over.
    pub(crate) recovery: bool,
    /// Channels through which they are told.
    pub(crate) channels: Vec<String>,
    /// Databases (or their sets of tables) that it is about; empty: all.
    pub(crate) databases: Vec<String>,
    /// Only what is named like this: `*` stands for any text.
    pub(crate) only: Option<String>,
    pub(crate) enabled: bool,
}

impl Rule {
    /// What holds when nobody says anything else.
    pub(crate) fn of(kind: Kind) -> Self {
        let (threshold, interval, wait) = kind.defaults();
        Self {
            name: kind.name().into(),
            kind,
            threshold,
            recover: kind.recover(threshold),
            interval,
            wait,
            repeat: REPEAT,
            recovery: true,
            channels: Vec::new(),
            databases: Vec::new(),
            only: None,
            enabled: true,
        }
    }

    /// Whether a value is bad enough to fire.
    pub(crate) fn is_bad(&self, value: f64) -> bool {
        if self.kind.little_is_bad() { value < self.threshold } else { value >= self.threshold }
    }

    /// Whether a value is good enough to end an alert.
    pub(crate) fn is_good(&self, value: f64) -> bool {
        if self.kind.little_is_bad() { value >= self.recover } else { value < self.recover }
    }

    /// Whether it is about this destination, consumer or queue.
    pub(crate) fn is_about(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|pattern| matches(pattern, name))
    }

    /// As it would be written in the file.
    pub(crate) fn shown(&self) -> Value {
        let time = |d: Duration| humantime::format_duration(d).to_string();
        let mut shown = json!({
            "rule": self.kind.name(),
            "threshold": self.kind.unit().written(self.threshold),
            "recover": self.kind.unit().written(self.recover),
            "interval": time(self.interval),
            "for": time(self.wait),
            "repeat": time(self.repeat),
            "recovery": self.recovery,
            "channels": self.channels,
            "enabled": self.enabled,
        });
        if self.name != self.kind.name() {
            shown["name"] = self.name.clone().into();
        }
        if !self.databases.is_empty() {
            shown["databases"] = json!(self.databases);
        }
        if let (Some(key), Some(only)) = (self.kind.narrowed_by(), &self.only) {
            shown[key] = only.clone().into();
        }
        shown
    }
}

/// Whether a name is like a pattern, in which `*` stands for any text.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(place) = left.find(part) else { return false };
        left = &left[place + part.len()..];
    }
    left.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, expected) in [
            ("orders", "orders", true),
            ("orders", "orders.created", false),
            ("orders.*", "orders.created", true),
            ("orders.*", "orders.", true),
            ("orders.*", "old.orders.x", false),
            ("*", "", true),
            ("*.created", "orders.created", true),
            ("*.created", "orders.created.v2", false),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("ab*bc", "abc", false),
            ("*ü*", "müll", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn every_kind_has_a_name_and_a_rule_that_can_hold() {
        for kind in Kind::ALL {
            assert_eq!(Kind::named(kind.name()), Some(kind));
            let rule = Rule::of(kind);
            assert!(rule.is_bad(rule.threshold) != kind.little_is_bad(), "{rule:?}");
            assert!(!rule.is_good(rule.threshold) || kind.little_is_bad(), "{rule:?}");
            assert!(!kind.sentence(2.0, "s", "d").is_empty() && !kind.hint().is_empty());
        }
        let low = Rule::of(Kind::PartitionsLow);
        assert!(low.is_bad(7.0) && !low.is_bad(8.0) && low.is_good(8.0) && !low.is_good(7.0));
        let failed = Rule::of(Kind::OutboxFailed);
        assert!(failed.is_bad(1.0) && failed.is_good(0.0) && !failed.is_good(1.0));
    }

    #[test]
    fn values_are_told_in_their_unit() {
        assert_eq!(Kind::OutboxFailed.unit().text(1.0), "1 message");
        assert_eq!(Kind::OutboxFailed.unit().text(12.0), "12 messages");
        assert_eq!(Kind::OutboxRetryShare.unit().text(0.256_78), "25.68 %");
        assert_eq!(Kind::OutboxOldest.unit().text(660.0), "11 min");
        assert_eq!(Rule::of(Kind::OutboxOldest).shown()["threshold"], "10m");
        assert_eq!(Rule::of(Kind::OutboxBacklog).shown()["recover"], 8_000);
        assert_eq!(Rule::of(Kind::OutboxRetryShare).shown()["threshold"], 0.2);
    }
}
