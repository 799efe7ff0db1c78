//! Settings of an inbox.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Retry, or_never};

/// What happens to a message whose id is missing or can't be stored (longer than 255 bytes, or with NUL in it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum MissingId {
    /// It is stored as FAILED under a generated id, with its bytes, for a person to look at.
    #[default]
    Quarantine,
    /// Its id is made from type, key, payload and the id it came with (SHA-256): the same content twice counts as one message.
    Hash,
    /// It is refused with [`Error::Invalid`](crate::Error::Invalid), for the caller to reject it where it came from.
    Reject,
}

/// How an inbox works: retries, deadlines, its retry worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct InboxSettings {
    /// When and how often a failed message is run again.
    pub retry: Retry,
    /// A message during whose run this many processes died is FAILED. 3 by default; 1 to 1 000.
    pub max_claims: u32,
    /// What happens to a message without a usable id.
    pub missing_id: MissingId,
    /// Deadline of one run of a handler; after it the run is rolled back and counts as failed. 30 s by default.
    #[serde(with = "humantime_serde")]
    pub handler_timeout: Duration,
    /// Deadline of one database call of the inbox's own; also how long it waits for another process that is handling the
    /// same message. 10 s by default.
    #[serde(with = "humantime_serde")]
    pub database_timeout: Duration,
    /// How often the retry worker looks for due messages. 1 s by default.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Messages the retry worker takes at a time. 32 by default; 1 to 1 000.
    pub batch: u32,
    /// Messages the retry worker runs at once. 4 by default; 1 to 1 000. Each needs a connection of the pool.
    pub concurrency: u32,
    /// How long what a retry worker took stays its own when it no longer says that it is alive; it says so three times as
    /// often. 20 s by default.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// How long a message that had its effect is remembered: a duplicate that comes later is a new message. Retry workers
    /// remove older rows; those of messages that aren't done, FAILED ones among them, stay. `None` (`"never"` in a file) keeps
    /// all. 15 days by default; 1 s to 100 years.
    ///
    /// It has to be longer than anything may deliver a message again. The default is for Kafka's: a topic with `retention.ms`
    /// and `segment.ms` at their 7 days holds a record for up to 14, and a consumer whose offsets are lost reads all of them.
    #[serde(with = "or_never")]
    pub retention: Option<Duration>,
    /// How long a retry worker removes nothing after its start, and after its consumer was connected again: a broker that
    /// held messages all that time first delivers again those whose acknowledgement it never got. 1 hour by default; up to 30 days.
    #[serde(with = "humantime_serde")]
    pub purge_grace: Duration,
    /// Of an inbox that [republishes](crate::Inbox::republish): how long a copy may wait in the consumer's queue before
    /// another one is sent. Longer than the queue ever is. 1 hour by default; 1 s to 30 days.
    #[serde(with = "humantime_serde")]
    pub republish_wait: Duration,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for InboxSettings {
    fn default() -> Self {
        Self {
            retry: Retry::default(),
            max_claims: 3,
            missing_id: MissingId::default(),
            handler_timeout: Duration::from_secs(30),
            database_timeout: Duration::from_secs(10),
            interval: Duration::from_secs(1),
            batch: 32,
            concurrency: 4,
            lease: Duration::from_secs(20),
            retention: Some(15 * DAY),
            purge_grace: Duration::from_secs(3_600),
            republish_wait: Duration::from_secs(3_600),
        }
    }
}

impl InboxSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = self.retry.problems();
        for (name, value) in [("max_claims", self.max_claims), ("batch", self.batch), ("concurrency", self.concurrency)] {
            if !(1..=1_000).contains(&value) {
                out.push((name.into(), format!("{value}, must be 1 to 1000")));
            }
        }
        for (name, value, least) in [
            ("handler_timeout", self.handler_timeout, 1),
            ("database_timeout", self.database_timeout, 100),
            ("interval", self.interval, 1),
            ("lease", self.lease, 300),
        ] {
            if value < Duration::from_millis(least) || value > DAY {
                out.push((name.into(), format!("{value:?}, must be {least} ms to 1 day")));
            }
        }
        if let Some(kept) = self.retention
            && !(Duration::from_secs(1)..=36_525 * DAY).contains(&kept)
        {
            out.push(("retention".into(), format!("{kept:?}, must be 1 s to 100 years, or \"never\"")));
        }
        if self.purge_grace > 30 * DAY {
            out.push(("purge_grace".into(), format!("{:?}, must be at most 30 days", self.purge_grace)));
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(30 * 86_400)).contains(&self.republish_wait) {
            out.push(("republish_wait".into(), format!("{:?}, must be 1 s to 30 days", self.republish_wait)));
        }
        out
    }

    /// How long a run is its process's own where nobody renews the lease: longer than the run can take.
    pub(crate) fn run_lease(&self) -> Duration {
        (self.handler_timeout + 2 * self.database_timeout).max(self.lease)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retention_is_a_length_of_time_or_never() {
        let read = |text: &str| serde_json::from_str::<InboxSettings>(text).map(|s| s.retention);
        assert_eq!(read("{}").unwrap(), Some(15 * DAY));
        assert_eq!(read(r#"{"retention":"36h"}"#).unwrap(), Some(Duration::from_secs(36 * 3_600)));
        for never in ["\"never\"", "null"] {
            assert_eq!(read(&format!("{{\"retention\":{never}}}")).unwrap(), None);
        }
        assert!(read(r#"{"retention":"soon"}"#).unwrap_err().to_string().contains("never"));
        for retention in [None, Some(3 * DAY)] {
            let settings = InboxSettings { retention, ..InboxSettings::default() };
            assert_eq!(read(&serde_json::to_string(&settings).unwrap()).unwrap(), retention);
        }
    }

    #[test]
    fn retention_has_limits() {
        let problems = |retention, purge_grace| {
            let settings = InboxSettings { retention, purge_grace, ..InboxSettings::default() };
            settings.problems().into_iter().map(|p| p.0).collect::<Vec<_>>()
        };
        assert!(problems(None, Duration::ZERO).is_empty());
        assert!(problems(Some(Duration::from_secs(1)), 30 * DAY).is_empty());
        assert_eq!(problems(Some(Duration::from_millis(999)), 31 * DAY), ["retention", "purge_grace"]);
        assert_eq!(problems(Some(Duration::MAX), Duration::ZERO), ["retention"]);
    }
}
