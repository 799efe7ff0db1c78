//! Alerts: rules, how they stand, and telling people, for those without a monitoring system.
//!
//! Of all instances one judges a database, under the duty `alerts`. How an alert stands, what happened and whom to tell is written
//! in one transaction that holds only while the instance has the duty. A notice is sent from what is written, so that it
//! survives the process: it may be sent twice, never lost.
//!
//! | file | what it holds |
//! |---|---|
//! | `rules.rs` | what is watched, and the rules that hold when nobody says anything else |
//! | `state.rs` | what becomes of an alert; no clock, no I/O |
//! | `measure.rs` | what rules are judged by |
//! | `local.rs` | what only this instance knows |
//! | `judge.rs` | the task of each database |
//! | `notice.rs` | what people are told |
//! | `channels/` | ways to tell them |

pub(crate) mod channels;
mod judge;
mod local;
mod measure;
pub(crate) mod notice;
pub(crate) mod rules;
mod state;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use self::channels::Channels;
use self::judge::Judge;
use crate::config::Config;
use crate::failure::Failure;
use crate::http::Served;

/// How long the end may take.
const END: Duration = Duration::from_secs(3);

/// The running judges.
pub(crate) struct Alerts {
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Alerts {
    /// Connects to nothing before the first look.
    pub(crate) fn start(config: &Config, served: &Arc<Served>) -> Result<Self, Failure> {
        let channels = Arc::new(Channels::new(&config.channels)?);
        let instance = instance(config);
        let (stop, stopped) = watch::channel(false);
        let mut tasks = JoinSet::new();
        for database in &served.databases {
            let rules = config.rules_of(&database.name);
            if !rules.is_empty() {
                tasks.spawn(Judge::new(&instance, served, database, rules, &channels).run(stopped.clone()));
            }
        }
        Ok(Self { stop, tasks })
    }

    /// Gives the duties back, so that others need not wait.
    pub(crate) async fn stop(mut self) {
        self.stop.send_replace(true);
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        // Duties that weren't given back end with their leases.
        let _ = tokio::time::timeout(END, ended).await;
        self.tasks.shutdown().await;
    }
}

/// The name of this process among all that judge: no other process has it, nor did this one when it ran before.
fn instance(config: &Config) -> String {
    let named = config.relay.instance.clone();
    let name = named.unwrap_or_else(|| whoami::hostname().unwrap_or_else(|_| "posthouse".into()));
    format!("{}-{}-{:06x}", notice::cut(&name, 120), std::process::id(), fastrand::u32(0..1 << 24))
}
