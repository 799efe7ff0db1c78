//! Removes the rows of messages that had their effect long ago, so that the table doesn't grow forever.
//!
//! A row that is gone makes a duplicate a new message. So nothing is removed while something may still be delivered again:
//! not before [`retention`](crate::InboxSettings::retention) has passed, and not until a consumer that was away has been back
//! for [`purge_grace`](crate::InboxSettings::purge_grace).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::process::step;
use super::worker::Worker;
use super::{Inbox, Shared};
use crate::Error;
use crate::store::Backend;

/// Rows removed by one transaction: few enough to take milliseconds.
const CHUNK: u32 = 500;

/// The shortest and the longest time between two rounds. Each asks the index for what is old enough.
const ROUNDS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(60));

/// Between two chunks others have the database for as long as the last chunk took, and at least and at most this long.
const BREATH: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(2));

/// Whether messages may be on their way that were delivered before.
#[derive(Debug)]
pub(super) struct Replay(watch::Sender<Away>);

#[derive(Debug, Clone, Copy)]
struct Away {
    /// Consumers that are away.
    holds: usize,
    /// When the last of them came back.
    since: Instant,
}

impl Default for Replay {
    fn default() -> Self {
        Self(watch::Sender::new(Away { holds: 0, since: Instant::now() }))
    }
}

impl Replay {
    /// When what was held back has been delivered, for a worker that began then; None while a consumer is away.
    fn over(&self, began: Instant, grace: Duration) -> Option<Instant> {
        let away = *self.0.borrow();
        (away.holds == 0).then(|| away.since.max(began) + grace)
    }

    async fn wait(&self, began: Instant, grace: Duration) {
        let mut changes = self.0.subscribe();
        loop {
            changes.mark_unchanged();
            let over = self.over(began, grace);
            if over.is_some_and(|over| over <= Instant::now()) {
                return;
            }
            let sleep = async {
                match over {
                    Some(over) => tokio::time::sleep_until(over).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = sleep => {}
                // The sender is borrowed from the inbox.
                _ = changes.changed() => {}
            }
        }
    }
}

/// While there is one, the retry workers of this inbox remove no old rows, and for
/// [`purge_grace`](crate::InboxSettings::purge_grace) after the last one is dropped. Made by [`Inbox::hold_purge`].
#[must_use = "it holds as long as it is kept"]
pub struct PurgeHold(Arc<Shared>);

impl fmt::Debug for PurgeHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PurgeHold").field(&self.0.consumer).finish()
    }
}

impl Drop for PurgeHold {
    fn drop(&mut self) {
        self.0.replay.0.send_modify(|away| *away = Away { holds: away.holds.saturating_sub(1), since: Instant::now() });
    }
}

impl<DB: Backend> Inbox<DB> {
    /// Keeps the retry workers of this inbox and its clones from removing old rows, until it is dropped and
    /// [`purge_grace`](crate::InboxSettings::purge_grace) is over.
    ///
    /// For consumers, while they have no connection to their broker: what it couldn't deliver meanwhile may be duplicates.
    pub fn hold_purge(&self) -> PurgeHold {
        self.shared.replay.0.send_modify(|away| away.holds += 1);
        PurgeHold(self.shared.clone())
    }

    /// Whether [`retention`](crate::InboxSettings::retention) covers the longest time after which a message can be delivered
    /// again (None: for ever); logs a warning with both figures if it doesn't. `what` names where that time comes from
    /// (`retention.ms of topic orders`).
    ///
    /// For consumers, which can ask their broker: a Kafka topic's retention plus the length of a segment, the `max_age` of a
    /// NATS stream, a queue's time to live.
    pub fn retention_at_least(&self, replay: Option<Duration>, what: &str) -> bool {
        let enough = self.settings().retention.is_none_or(|kept| replay.is_some_and(|replay| kept >= replay));
        if !enough {
            tracing::warn!(
                consumer = self.consumer(),
                retention = ?self.settings().retention.unwrap_or_default(),
                replay = replay.map_or_else(|| "for ever".into(), |replay| format!("{replay:?}")),
                what,
                "messages can be delivered again after the inbox has forgotten them, and would have their effect twice; \
                 make inbox.retention longer than replay"
            );
        }
        enough
    }
}

impl<DB: Backend> Worker<DB> {
    /// Removes what is old enough, now and then.
    pub(super) async fn purge(self: Arc<Self>) {
        let (inbox, settings) = (&self.inbox, self.inbox.settings());
        let Some(retention) = settings.retention else { return };
        let began = Instant::now();
        let pause = (retention / 20).clamp(ROUNDS.0, ROUNDS.1);
        let mut said = String::new();
        loop {
            inbox.shared.replay.wait(began, settings.purge_grace).await;
            match self.purge_round(retention, began).await {
                Ok(0) => {}
                Ok(removed) => tracing::debug!(consumer = inbox.consumer(), removed, "removed rows of old successes"),
                // An account that may not delete is refused each time; it is said once.
                Err(e) if e.to_string() == said => {}
                Err(e) => {
                    said = e.to_string();
                    tracing::warn!(
                        consumer = inbox.consumer(),
                        error = said,
                        again_in = ?pause,
                        "could not remove rows of old successes, so they stay; this needs the right to DELETE in {}, or inbox.retention = \"never\"",
                        inbox.tables().name("inbox")
                    );
                }
            }
            // Not all processes at once.
            tokio::time::sleep(pause.mul_f64(0.75 + 0.5 * fastrand::f64())).await;
        }
    }

    /// Chunk by chunk, from the oldest on; others' chunks are passed over.
    async fn purge_round(&self, retention: Duration, began: Instant) -> Result<u64, Error> {
        let (own, grace) = (&self.own, self.inbox.settings().purge_grace);
        let (mut removed, mut from_us) = (0, 0);
        loop {
            let chunk_began = Instant::now();
            let (rows, last_us) = step!(own, "removing rows of old successes", |tx| {
                DB::inbox_purge(tx, own.tables(), own.consumer(), retention, from_us, CHUNK).await
            })?;
            removed += rows;
            let over = self.inbox.shared.replay.over(began, grace);
            let Some(last_us) = last_us.filter(|_| rows == u64::from(CHUNK) && over.is_some_and(|o| o <= Instant::now())) else {
                return Ok(removed);
            };
            // What is removed may stay in the index for a while, and isn't walked over again.
            from_us = last_us;
            tokio::time::sleep(chunk_began.elapsed().clamp(BREATH.0, BREATH.1)).await;
        }
    }
}
