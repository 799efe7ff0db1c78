//! Settings of an inbox.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Retry;

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
    /// Of an inbox that [republishes](crate::Inbox::republish): how long a copy may wait in the consumer's queue before
    /// another one is sent. Longer than the queue ever is. 1 hour by default; 1 s to 30 days.
    #[serde(with = "humantime_serde")]
    pub republish_wait: Duration,
}

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
            if value < Duration::from_millis(least) || value > Duration::from_secs(86_400) {
                out.push((name.into(), format!("{value:?}, must be {least} ms to 1 day")));
            }
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
