//! When groups run.
//!
//! | file | what it does |
//! |---|---|
//! | `cron.rs` | cron expressions with seconds, in a named time zone |
//! | `plan.rs` | what one group does next: due, busy, missed, retried, stopped |

mod cron;

pub use cron::{Cron, CronError, time_zones};
