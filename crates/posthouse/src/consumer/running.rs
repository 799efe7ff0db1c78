//! The handle of a running consumer.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::intake::{Intake, Sink};
use crate::Error;
use crate::inbox::{Inbox, PurgeHold, SharedWorker};
use crate::settings::ConsumerSettings;
use crate::store::Backend;

/// How long closing a connection may take after the grace of a shutdown.
const CLOSE: Duration = Duration::from_secs(5);

/// A consumer that runs in this process. Dropped without [`shutdown`](Self::shutdown), it stops at once, and its broker
/// delivers again what it had not acknowledged.
#[must_use = "a consumer that is dropped stops"]
pub struct Consumer {
    intake: Intake,
    link: Link,
    stop: watch::Sender<Option<Instant>>,
    task: JoinHandle<()>,
    worker: Option<SharedWorker>,
}

/// How a consumer is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerStatus {
    /// It is subscribed and gets messages when there are any.
    pub connected: bool,
    /// Why it isn't, or wasn't the last time.
    pub last_error: Option<String>,
    /// Messages that are taken and not acknowledged.
    pub in_hand: usize,
    /// Messages that had their effect, since the start of this consumer, as all the following.
    pub processed: u64,
    /// Messages that had their effect before.
    pub duplicates: u64,
    /// Messages whose run failed and that are run again.
    pub failures: u64,
    /// Messages that are given up or were set aside.
    pub failed: u64,
    /// How often a message could neither be handled nor be written down, and went back or was kept to be tried again.
    pub given_back: u64,
    /// Messages that were rejected ([`MissingId::Reject`](crate::MissingId::Reject)).
    pub refused: u64,
}

/// What a consumer's loop says about its connection. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Link {
    sink: Arc<dyn Sink>,
    state: Arc<Mutex<LinkState>>,
}

#[derive(Debug)]
struct LinkState {
    last_error: Option<String>,
    /// What the broker couldn't deliver while it was away may be duplicates of what the inbox knows; None when it is connected.
    away: Option<PurgeHold>,
}

impl Link {
    fn new(sink: Arc<dyn Sink>) -> Self {
        let away = Some(sink.hold_purge());
        Self { sink, state: Arc::new(Mutex::new(LinkState { last_error: None, away })) }
    }

    /// Subscribed.
    pub(crate) fn up(&self) {
        self.state().away = None;
    }

    /// Not subscribed, and why.
    pub(crate) fn down(&self, why: impl Into<String>) {
        let mut state = self.state();
        state.last_error = Some(why.into());
        if state.away.is_none() {
            state.away = Some(self.sink.hold_purge());
        }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a consumer's loop works with.
///
/// It takes messages ([`Intake::place`], then [`Intake::take`]) until [`Stop::asked`] resolves. Then it unsubscribes, calls
/// [`Intake::stop`] with that deadline, and keeps its connection until that is done, as acknowledgements go over it.
#[derive(Debug)]
pub(crate) struct Loop {
    pub(crate) intake: Intake,
    pub(crate) link: Link,
    pub(crate) stop: Stop,
}

/// When to stop.
#[derive(Debug, Clone)]
pub(crate) struct Stop(watch::Receiver<Option<Instant>>);

impl Stop {
    /// Waits until the consumer shall stop, and says by when it has to have.
    pub(crate) async fn asked(&mut self) -> Instant {
        let asked = self.0.wait_for(Option::is_some).await.map(|deadline| *deadline);
        match asked {
            Ok(deadline) => deadline.unwrap_or_else(Instant::now),
            // The handle was dropped, and this task is aborted.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Consumer {
    /// Starts the inbox's retry worker and a consumer's loop.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that can't hold, [`Error::Schema`] if the tables are missing or too old.
    pub(crate) async fn start<DB, F>(
        inbox: &Inbox<DB>,
        settings: ConsumerSettings,
        run: impl FnOnce(Loop) -> F,
    ) -> Result<Self, Error>
    where
        DB: Backend,
        F: Future<Output = ()> + Send + 'static,
    {
        let problems = settings.problems();
        if !problems.is_empty() {
            let lines: Vec<_> = problems.into_iter().map(|(field, why)| format!("consumer.{field}: {why}")).collect();
            return Err(Error::Config(lines.join("; ")));
        }
        #[cfg(feature = "relay")]
        if settings.order == crate::settings::ConsumerOrder::Key && inbox.republishes() {
            return Err(Error::Config(
                "consumer.order: in key order a failed message waits in its place, and a copy of it sent to the end of the queue would \
                 wait for itself; choose another order, or an inbox that doesn't republish"
                    .into(),
            ));
        }
        let worker = inbox.shared_worker().await?;
        let sink: Arc<dyn Sink> = Arc::new(inbox.clone());
        let intake = Intake::new(sink.clone(), settings);
        let link = Link::new(sink);
        let (stop, asked) = watch::channel(None);
        let task = tokio::spawn(run(Loop { intake: intake.clone(), link: link.clone(), stop: Stop(asked) }));
        Ok(Self { intake, link, stop, task, worker: Some(worker) })
    }

    /// How it is doing now.
    pub fn status(&self) -> ConsumerStatus {
        let (connected, last_error) = {
            let state = self.link.state();
            (state.away.is_none(), state.last_error.clone())
        };
        let counts = self.intake.counts();
        ConsumerStatus {
            connected,
            last_error,
            in_hand: self.intake.in_hand(),
            processed: counts.processed.load(Relaxed),
            duplicates: counts.duplicates.load(Relaxed),
            failures: counts.failures.load(Relaxed),
            failed: counts.failed.load(Relaxed),
            given_back: counts.given_back.load(Relaxed),
            refused: counts.refused.load(Relaxed),
        }
    }

    /// Takes nothing more, gives back what isn't running, and waits for what is, for up to `grace`; what isn't done by then is
    /// rolled back, and delivered again to whoever consumes next. Then the retry worker stops in the same way.
    pub async fn shutdown(mut self, grace: Duration) {
        let deadline = Instant::now() + grace;
        self.intake.start_no_more();
        self.stop.send_replace(Some(deadline));
        // The loop keeps to the deadline itself; the rest is for closing its connection.
        if tokio::time::timeout_at(deadline + CLOSE, &mut self.task).await.is_err() {
            tracing::warn!("a consumer did not close its connection in time and was cut off");
        }
        if let Some(worker) = self.worker.take() {
            worker.shutdown(deadline.saturating_duration_since(Instant::now())).await;
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
        self.intake.abort();
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("status", &self.status()).finish_non_exhaustive()
    }
}
