//! The relay's process: settings that are quick enough to watch, and a report whenever something changed.

use std::path::Path;
use std::time::Duration;

use posthouse::transport::{Http, HttpSettings};
use posthouse::{Ordering, Relay, RelaySettings, RelayStats, Retry, Route};
use serde::{Deserialize, Serialize};

use super::{Cook, DESTINATION, Failure, child, shop};

/// How long a relay's house stays its own after it was killed.
pub(super) const LEASE: Duration = Duration::from_secs(3);

/// No answer within this is a failed attempt.
pub(super) const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// How often it looks whether there is news for its parent.
const REPORT: Duration = Duration::from_millis(50);

/// What the relay's process reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RelayReport {
    /// It has joined and owns the house, so it sends.
    pub(super) works: bool,
    /// How many tries found the receiver down. The first opens the breaker, and then it is one probe at a time.
    pub(super) unavailable: u64,
}

impl From<&RelayStats> for RelayReport {
    fn from(stats: &RelayStats) -> Self {
        Self { works: stats.houses > 0, unavailable: stats.unavailable }
    }
}

fn settings() -> RelaySettings {
    let mut settings = RelaySettings::default();
    settings.lease = LEASE;
    settings.heartbeat = Duration::from_millis(500);
    settings.send_timeout = SEND_TIMEOUT;
    settings.lease_margin = Duration::from_millis(300);
    // The orders come from another process, and SQLite can't tell this one about them.
    settings.idle_poll = Duration::from_millis(50);
    settings
}

fn route(port: u16, cook: Option<Cook>) -> Route {
    let ordering = if cook == Some(Cook::Order) { Ordering::None } else { Ordering::Strict };
    Route::to(format!("http://127.0.0.1:{port}/deduct"))
        .retry(Retry::new(50, Duration::from_millis(50), Duration::from_millis(500)))
        .ordering(ordering)
        .concurrency(16)
}

/// Relays until the parent closes stdin.
pub(super) async fn run(dir: &Path, port: u16, cook: Option<Cook>) -> Result<(), Failure> {
    let mut http = HttpSettings::default();
    http.allow = vec!["127.0.0.1".into()];
    http.connect_timeout = SEND_TIMEOUT / 2;
    let mut parent = child::parent();
    let outbox = shop::open(dir).await?;
    let relay = Relay::builder(&outbox)
        .settings(settings())
        .transport("http", Http::new(http)?)
        .route(DESTINATION, route(port, cook))
        .start()
        .await?;
    let mut told = None;
    let mut tick = tokio::time::interval(REPORT);
    loop {
        tokio::select! {
            line = parent.recv() => if line.is_none() { break },
            _ = tick.tick() => {
                let now = RelayReport::from(&relay.stats());
                if told != Some(now) {
                    child::say(&now);
                    told = Some(now);
                }
            }
        }
    }
    relay.shutdown(SEND_TIMEOUT * 2).await;
    outbox.pool().close().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_hold() {
        assert_eq!(settings().problems(), []);
        assert_eq!(route(1, None).problems(), []);
    }
}
