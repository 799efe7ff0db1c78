//! When groups run: cron expressions, and what a group does when its trigger is due.
//!
//! | file | what it does |
//! |---|---|
//! | `cron.rs` | cron expressions with seconds, in a named time zone |
//! | `due.rs` | when a trigger is due |
//! | `plan.rs` | what one group does next: due, busy, missed, retried, stopped |

mod cron;
mod due;
mod plan;

use serde::{Deserialize, Serialize};

pub use cron::{Cron, CronError, time_zones};
pub(crate) use due::problems;
pub(crate) use plan::{Ask, Do, Ended, Plan};

/// Why a run took place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Cause {
    /// The delay after the run before was over.
    Every,
    /// Its rate.
    Rate,
    /// Its cron expression.
    Cron,
    /// Somebody asked for it.
    Manual,
    /// A scheduler outside asked for it.
    External,
    /// It makes up for times that were missed.
    Misfire,
    /// It tries again what a failed run left.
    Retry,
    /// Another group's run was done.
    After,
    /// Houses came from an instance that had not finished its run.
    Takeover,
}

impl Cause {
    /// As it is written in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Every => "every",
            Self::Rate => "rate",
            Self::Cron => "cron",
            Self::Manual => "manual",
            Self::External => "external",
            Self::Misfire => "misfire",
            Self::Retry => "retry",
            Self::After => "after",
            Self::Takeover => "takeover",
        }
    }
}
