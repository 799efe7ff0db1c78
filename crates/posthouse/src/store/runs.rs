//! [`RunStore`]: what the scheduler and people ask about runs of groups.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Reply;
use crate::schedule::Cause;
use crate::{Error, RunCounts};

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum RunStatus {
    /// All instances are asked for a run; none has taken it, or some are still at it.
    Requested,
    /// It is going.
    Running,
    /// All that was there was tried, or as much as the group's limit allows.
    Done,
    /// It ended with an error.
    Failed,
    /// It took longer than its budget.
    Timeout,
    /// Somebody stopped it, or its instance was shut down.
    Stopped,
    /// It did not take place.
    Discarded,
    /// Its instance died.
    Lost,
}

impl RunStatus {
    /// As it is written in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requested => "REQUESTED",
            Self::Running => "RUNNING",
            Self::Done => "DONE",
            Self::Failed => "FAILED",
            Self::Timeout => "TIMEOUT",
            Self::Stopped => "STOPPED",
            Self::Discarded => "DISCARDED",
            Self::Lost => "LOST",
        }
    }

    /// Anything that this version doesn't know is over.
    pub(crate) fn parse(text: &str) -> Self {
        match text {
            "REQUESTED" => Self::Requested,
            "RUNNING" => Self::Running,
            "DONE" => Self::Done,
            "FAILED" => Self::Failed,
            "TIMEOUT" => Self::Timeout,
            "STOPPED" => Self::Stopped,
            "DISCARDED" => Self::Discarded,
            _ => Self::Lost,
        }
    }

    /// Whether nothing more comes of it.
    pub fn is_over(self) -> bool {
        !matches!(self, Self::Requested | Self::Running)
    }

    /// What several runs that one request led to came to, taken together: the worst that is worth a person's attention.
    pub fn of_all(all: impl IntoIterator<Item = Self>) -> Option<Self> {
        let rank = |status: &Self| match status {
            Self::Requested | Self::Running => 7,
            Self::Failed => 6,
            Self::Lost => 5,
            Self::Timeout => 4,
            Self::Stopped => 3,
            Self::Done => 2,
            Self::Discarded => 1,
        };
        all.into_iter().max_by_key(rank)
    }
}

/// A run of a group on one instance, or a request that all instances run it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RunRow {
    /// Row id.
    pub id: i64,
    /// Group.
    pub group: String,
    /// Why it took place; see [`Cause`].
    pub cause: String,
    /// Where it stands.
    pub status: RunStatus,
    /// The instance that ran it. None: a request.
    pub instance: Option<String>,
    /// The request that it belongs to.
    pub request: Option<i64>,
    /// When its trigger was due, microseconds since 1970 UTC.
    pub due_us: Option<i64>,
    /// When the row was written, microseconds since 1970 UTC.
    pub requested_us: i64,
    /// When it began, microseconds since 1970 UTC.
    pub started_us: Option<i64>,
    /// When it ended, microseconds since 1970 UTC.
    pub ended_us: Option<i64>,
    /// Messages it took up.
    pub messages: i64,
    /// Messages confirmed.
    pub delivered: i64,
    /// Attempts that failed and will be tried again.
    pub retried: i64,
    /// Messages that became FAILED.
    pub failed: i64,
    /// Why it ended as it did, or didn't take place.
    pub error: Option<String>,
}

/// Which runs a list shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunFilter {
    /// Only this group.
    pub group: Option<String>,
    /// Only this request and the runs it led to.
    pub request: Option<i64>,
    /// Only ids below this one (the last of the page before).
    pub before: Option<i64>,
    /// At most this many. 1 to 10 000.
    pub limit: u32,
}

/// What instances have to know of a group beyond their configuration. All in microseconds since 1970 UTC.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupRow {
    /// Its name.
    pub group: String,
    /// The last time at which its trigger was due and somebody saw to it.
    pub fired_us: Option<i64>,
    /// Since when it has been paused.
    pub paused_us: Option<i64>,
    /// Runs that began before this are to stop.
    pub stopped_us: Option<i64>,
}

/// A run that is asked for of all instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunRequest {
    /// Row id.
    pub id: i64,
    /// Group.
    pub group: String,
    /// Because another group's run was done, not because a person wants it.
    pub after: bool,
    /// When the trigger was due that led to it.
    pub due_us: Option<i64>,
    /// When it was asked for.
    pub requested_us: i64,
}

/// All that the scheduler has to look at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunWatch {
    /// The database's clock, microseconds since 1970 UTC.
    pub now_us: i64,
    /// Groups that something is known of.
    pub groups: Vec<GroupRow>,
    /// Requests that aren't closed.
    pub requests: Vec<RunRequest>,
    /// Live instances.
    pub live: Vec<String>,
}

/// A run that begins, or that doesn't take place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewRun<'a> {
    /// Group.
    pub group: &'a str,
    /// Why.
    pub cause: Cause,
    /// By which instance.
    pub instance: &'a str,
    /// When its trigger was due, microseconds since 1970 UTC.
    pub due_us: Option<i64>,
    /// The request that it belongs to.
    pub request: Option<i64>,
}

impl NewRun<'_> {
    /// The due time that this sees to.
    pub(crate) fn sees_to(&self) -> Option<i64> {
        self.due_us.filter(|_| matches!(self.cause, Cause::Rate | Cause::Cron | Cause::Misfire))
    }
}

/// What people and the scheduler ask about runs of groups. Every call has a deadline inside.
pub trait RunStore: Send + Sync + fmt::Debug {
    /// The clock, groups, requests and instances, as they are now.
    fn watch(&self) -> Reply<'_, RunWatch>;
    /// Says that a run begins, and that its due time has been seen to; answers its id.
    fn begin<'a>(&'a self, run: &'a NewRun<'a>) -> Reply<'a, i64>;
    /// Says that a run does not take place and why, and that its due time has been seen to; answers its id.
    fn discard<'a>(&'a self, run: &'a NewRun<'a>, why: &'a str) -> Reply<'a, i64>;
    /// Says how a run ended; false when its row is gone or says so already.
    fn end<'a>(&'a self, id: i64, status: RunStatus, counts: RunCounts, error: Option<&'a str>) -> Reply<'a, bool>;
    /// Says that due times up to this one have been seen to.
    fn seen<'a>(&'a self, group: &'a str, due_us: i64) -> Reply<'a, ()>;
    /// Whether another instance is in the middle of a run of this group, or died in one.
    fn unfinished<'a>(&'a self, group: &'a str, instance: &'a str) -> Reply<'a, bool>;
    /// Asks all instances for a run of a group; answers the id of the request.
    fn request<'a>(&'a self, group: &'a str) -> Reply<'a, i64>;
    /// Asks all instances for a run of `child`, unless another live instance is still running `group`: then that one will.
    /// `due_us` is when the trigger was due that led to the run of `group`.
    fn follow<'a>(&'a self, group: &'a str, instance: &'a str, child: &'a str, due_us: Option<i64>) -> Reply<'a, bool>;
    /// Closes a request; false when it is closed already.
    fn close<'a>(&'a self, request: i64, status: RunStatus, counts: RunCounts, error: Option<&'a str>) -> Reply<'a, bool>;
    /// Tells all instances to stop the runs of a group that are going now.
    fn stop<'a>(&'a self, group: &'a str) -> Reply<'a, ()>;
    /// Pauses a group, or lets it go on; false when it was so already.
    fn pause<'a>(&'a self, group: &'a str, paused: bool) -> Reply<'a, bool>;
    /// Runs by descending id.
    fn list<'a>(&'a self, filter: &'a RunFilter) -> Reply<'a, Vec<RunRow>>;
    /// Marks runs of instances that died more than a minute ago as LOST, closes requests that nobody answered within an hour,
    /// and removes up to [`TIDY`] runs that are older than this; answers how many.
    fn tidy(&self, older: Duration) -> Reply<'_, u64>;
}

/// Runs that are removed at once.
pub const TIDY: u64 = 500;

/// What a request is closed with that nobody answered.
pub(crate) const UNANSWERED: &str = "no instance with this group ran it within an hour";

/// A counter as it is stored.
pub(crate) fn stored(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// An error as it is stored.
pub(crate) fn stored_error(error: Option<&str>) -> Option<String> {
    error.map(|e| crate::error::storable(e, 2_000))
}

/// Checks what a name of a group may be before it is written.
pub(crate) fn checked(group: &str) -> Result<&str, Error> {
    if (1..=64).contains(&group.len()) && !group.contains('\0') {
        Ok(group)
    } else {
        Err(Error::invalid("group", format!("a name has 1 to 64 bytes and no NUL; {group:?} has {}", group.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_several_runs_is_told() {
        use RunStatus::*;
        for (all, worst) in [
            (&[Done, Done, Discarded][..], Some(Done)),
            (&[Discarded, Discarded], Some(Discarded)),
            (&[Done, Stopped], Some(Stopped)),
            (&[Timeout, Stopped], Some(Timeout)),
            (&[Lost, Timeout], Some(Lost)),
            (&[Failed, Lost, Done], Some(Failed)),
            (&[Failed, Running], Some(Running)),
            (&[], None),
        ] {
            assert_eq!(RunStatus::of_all(all.iter().copied()), worst, "{all:?}");
        }
        for status in [Requested, Running, Done, Failed, Timeout, Stopped, Discarded, Lost] {
            assert_eq!(RunStatus::parse(status.as_str()), status);
            assert_eq!(status.is_over(), !matches!(status, Requested | Running));
        }
    }
}
