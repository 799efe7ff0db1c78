//! Whether the consumer gets messages when there are any, and why not.

use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode as Code;

use crate::consumer::running::Link;

/// So long it may take to join the group before that counts as something wrong.
const JOINING: Duration = Duration::from_secs(10);

/// So long commits may fail before that counts as something wrong.
const MOVING: Duration = Duration::from_secs(5);

/// What is known, from errors that librdkafka reports and from asking.
#[derive(Debug)]
pub(super) struct Health {
    link: Link,
    brokers: String,
    since: Instant,
    /// The group has given it its partitions, or none because others have them.
    joined: bool,
    /// Brokers answer, and have every topic.
    reachable: bool,
    /// Why not, as asking found out.
    missing: Option<String>,
    /// The group doesn't take it.
    refused: Option<String>,
    /// The last error of a connection since.
    trouble: Option<String>,
    /// Since when commits fail, and why. Nothing new begins then.
    uncommitted: Option<(Instant, String)>,
    shown: Option<bool>,
}

impl Health {
    pub(super) fn new(link: Link, brokers: &str) -> Self {
        Self {
            link,
            brokers: brokers.to_owned(),
            since: Instant::now(),
            joined: false,
            reachable: false,
            missing: None,
            refused: None,
            trouble: None,
            uncommitted: None,
            shown: None,
        }
    }

    pub(super) fn is_reachable(&self) -> bool {
        self.reachable
    }

    /// An error that librdkafka reports, with its words.
    pub(super) fn error(&mut self, code: Code, reason: &str) {
        let reason = crate::error::storable(reason, 1_000);
        match code {
            // Follows the error that says why.
            Code::AllBrokersDown => {
                self.reachable = false;
                self.missing = None;
                self.trouble.get_or_insert(reason);
            }
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::TopicAuthorizationFailed => {
                self.reachable = false;
                self.trouble = Some(reason);
            }
            Code::GroupAuthorizationFailed | Code::ClusterAuthorizationFailed | Code::InconsistentGroupProtocol => {
                self.joined = false;
                self.refused = Some(reason);
            }
            Code::PollExceeded => {
                self.joined = false;
                self.trouble = Some(reason);
            }
            _ => self.trouble = Some(reason),
        }
    }

    pub(super) fn joined(&mut self) {
        self.joined = true;
        self.refused = None;
    }

    pub(super) fn lost(&mut self) {
        self.joined = false;
    }

    /// What a commit came to.
    pub(super) fn committed(&mut self, error: Option<String>) {
        match error {
            None => self.uncommitted = None,
            Some(error) => {
                self.uncommitted = Some((self.uncommitted.take().map_or_else(Instant::now, |(since, _)| since), error))
            }
        }
    }

    /// Why commits fail; one that fails while partitions move is nothing.
    fn commits_fail(&self) -> Option<&str> {
        self.uncommitted.as_ref().filter(|(since, _)| since.elapsed() > MOVING).map(|(_, error)| error.as_str())
    }

    /// What asking the brokers for the topics came to.
    pub(super) fn asked(&mut self, result: Result<(), String>) {
        self.reachable = result.is_ok();
        self.missing = result.err();
    }

    /// Tells how it stands. `held` is why a partition can't be read.
    pub(super) fn show(&mut self, held: Option<&str>) -> bool {
        let up = self.joined && self.reachable && self.refused.is_none() && held.is_none() && self.commits_fail().is_none();
        if up {
            self.trouble = None;
            if self.shown != Some(true) {
                tracing::info!(target: "posthouse::kafka", brokers = self.brokers, "consuming");
            }
            self.link.up();
        } else {
            let why = self.why(held);
            // At first it isn't, as joining takes a while.
            let known = self.missing.is_some() || self.trouble.is_some() || self.refused.is_some() || held.is_some();
            if self.shown.is_none() && !known && self.since.elapsed() < JOINING {
                return false;
            }
            if self.shown != Some(false) {
                tracing::warn!(target: "posthouse::kafka", why, "not consuming");
            }
            self.link.down(why);
        }
        self.shown = Some(up);
        up
    }

    fn why(&self, held: Option<&str>) -> String {
        let brokers = &self.brokers;
        if let Some(why) = self.refused.as_deref().or(held) {
            return format!("Kafka ({brokers}): {why}");
        }
        if let (true, Some(error)) = (self.reachable, self.commits_fail()) {
            return format!("Kafka ({brokers}): offsets can't be committed, so nothing new is begun: {error}");
        }
        match (&self.missing, &self.trouble) {
            (Some(missing), Some(trouble)) if !self.reachable => format!("Kafka ({brokers}): {missing}; last error: {trouble}"),
            (Some(missing), None) if !self.reachable => format!("Kafka ({brokers}): {missing}"),
            (_, Some(trouble)) => format!("Kafka ({brokers}): {trouble}"),
            (_, None) => format!("Kafka ({brokers}): not a member of the group yet"),
        }
    }
}
