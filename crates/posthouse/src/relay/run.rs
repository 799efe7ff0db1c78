//! Runs: the houses of a group that isn't continuous are sent from only while one goes.

use tokio::sync::{oneshot, watch};

use super::{Command, Relay};
use crate::Houses;

/// A run that is asked for: of a group, or of a part of its houses.
#[derive(Debug, Clone)]
#[must_use = "a run takes place when it is given to Relay::run"]
pub struct Run {
    pub(crate) group: String,
    pub(crate) houses: Option<Houses>,
    pub(crate) limit: Option<u64>,
    pub(crate) stop: Option<watch::Receiver<bool>>,
}

impl Run {
    /// A run of all houses of this group that the instance owns. Of a group with an external trigger: of all of the group's
    /// houses, which are taken for it.
    pub fn of(group: impl Into<String>) -> Self {
        Self { group: group.into(), houses: None, limit: None, stop: None }
    }

    /// Only these of the group's houses.
    pub fn houses(mut self, houses: Houses) -> Self {
        self.houses = Some(houses);
        self
    }

    /// At most this many messages are taken up; the group's own limit when this isn't called.
    pub fn limit(mut self, messages: u64) -> Self {
        self.limit = Some(messages);
        self
    }

    /// Once this is true (or its sender is gone), no more messages are taken up, and the run ends when those in flight are done.
    pub fn stop(mut self, stop: watch::Receiver<bool>) -> Self {
        self.stop = Some(stop);
        self
    }
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunOutcome {
    /// What it did.
    pub counts: RunCounts,
    /// Why it ended.
    pub end: RunEnd,
}

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunCounts {
    /// Messages it took up. Those whose destination was found to be down are among them, and in none of the others.
    pub messages: u64,
    /// Messages confirmed by their receivers.
    pub delivered: u64,
    /// Attempts that failed and will be tried again.
    pub retried: u64,
    /// Messages that became FAILED.
    pub failed: u64,
}

/// Why a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RunEnd {
    /// All that was there when it began was tried, or waits for a destination that is down.
    Done,
    /// Its limit was reached, and there was more.
    Limit,
    /// It was told to stop, or the relay was.
    Stopped,
    /// It couldn't begin, or lost some of its houses: why. What it had of other houses is done.
    Lost(String),
}

impl Relay {
    /// Runs a group that isn't continuous once: sends what is there and due in its houses, from the smallest id, and answers
    /// what came of it. What is published meanwhile, and what becomes due meanwhile, waits for the next run.
    ///
    /// Of the group's houses, these are the ones that this instance owns; the other instances have theirs. Of a group with an
    /// external trigger all are taken first, or the run doesn't take place because another instance has one of them.
    ///
    /// Dropping the future doesn't stop the run; see [`Run::stop`].
    pub async fn run(&self, run: Run) -> RunOutcome {
        let (done, outcome) = oneshot::channel();
        let gone = |why: &str| RunOutcome { counts: RunCounts::default(), end: RunEnd::Lost(why.into()) };
        if self.commands.send(Command::Run(run, done)).is_err() {
            return gone("the relay has been shut down");
        }
        outcome.await.unwrap_or_else(|_| gone("the relay's loops were started anew"))
    }
}
