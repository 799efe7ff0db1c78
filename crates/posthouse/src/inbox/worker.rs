//! The retry worker: runs again what failed, and what a process that died left behind.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::handler::ByType;
use super::process::{Claim, step};
use super::{Inbox, Incoming};
use crate::Error;
use crate::store::{Backend, RunFailed, TakenRow};

/// The longest pause after passes that failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// How long giving rows back may take at the end, all together.
const GIVE_BACK: Duration = Duration::from_secs(5);

/// A retry worker in this process; made by [`Inbox::start_worker`]. Dropped without [`shutdown`](Self::shutdown), it stops at
/// once, and what it was running is run again when its lease ends.
#[must_use = "a worker that is dropped stops"]
pub struct InboxWorker {
    stop: watch::Sender<bool>,
    passes: JoinHandle<()>,
    renewals: JoinHandle<()>,
    purges: JoinHandle<()>,
    give_back: Arc<dyn Fn() -> futures_util::future::BoxFuture<'static, ()> + Send + Sync>,
}

impl fmt::Debug for InboxWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InboxWorker").finish_non_exhaustive()
    }
}

impl Drop for InboxWorker {
    fn drop(&mut self) {
        self.passes.abort();
        self.renewals.abort();
        self.purges.abort();
    }
}

impl InboxWorker {
    /// Takes nothing more and waits for what is running, for up to `grace`; what isn't done by then is rolled back. What it had
    /// taken is due again at once, without an attempt.
    pub async fn shutdown(mut self, grace: Duration) {
        self.stop.send_replace(true);
        // Each of its steps stands on its own.
        self.purges.abort();
        if tokio::time::timeout(grace, &mut self.passes).await.is_err() {
            tracing::warn!(?grace, "messages were still running at the end of the time for shutting down; they are rolled back");
            self.passes.abort();
            // Until their transactions are dropped.
            let _ = (&mut self.passes).await;
        }
        self.renewals.abort();
        if tokio::time::timeout(GIVE_BACK, (self.give_back)()).await.is_err() {
            tracing::warn!("could not give messages back; they are run again when their lease ends");
        }
    }
}

/// A share of the one retry worker that all clones of an inbox have together; made by [`Inbox::shared_worker`]. The worker stops
/// with its last share: when that is shut down in an orderly way, when it is dropped at once.
#[derive(Debug, Clone)]
#[must_use = "a worker stops when its last share is dropped"]
pub struct SharedWorker(Arc<InboxWorker>);

impl SharedWorker {
    /// Gives this share up. The last one shuts the worker down, as [`InboxWorker::shutdown`] does; others return at once.
    pub async fn shutdown(self, grace: Duration) {
        if let Some(worker) = Arc::into_inner(self.0) {
            worker.shutdown(grace).await;
        }
    }
}

/// A row that this worker took.
#[derive(Debug, Clone, Copy)]
struct Held {
    version: i32,
    attempts: i32,
    /// Without the run that may have begun.
    claims: i32,
}

pub(super) struct Worker<DB: Backend> {
    /// Runs handlers, on the user's pool.
    pub(super) inbox: Inbox<DB>,
    /// Takes rows, renews leases and removes old rows, on connections of its own: handlers can't keep those from it.
    pub(super) own: Inbox<DB>,
    owner: String,
    held: Mutex<HashMap<String, Held>>,
    stop: watch::Receiver<bool>,
}

impl<DB: Backend> Inbox<DB> {
    /// Starts the retry worker of this consumer in this process. Any number of them may run, in any number of processes.
    ///
    /// It runs messages that are due with the handlers registered so far; register those of all types that may fail. What fails
    /// in this process, through this inbox or a clone of it, is run as soon as it is due; what others left behind is found at
    /// the next [`interval`](crate::InboxSettings::interval). It also removes rows of old successes, see
    /// [`retention`](crate::InboxSettings::retention).
    ///
    /// # Errors
    /// [`Error::Schema`] if the tables are missing or older than the inbox.
    pub async fn start_worker(&self) -> Result<InboxWorker, Error> {
        self.check().await?;
        let (stop, stopped) = watch::channel(false);
        let worker = Arc::new(self.worker(stopped));
        let (passing, renewing, purging, giving) = (worker.clone(), worker.clone(), worker.clone(), worker);
        Ok(InboxWorker {
            stop,
            passes: tokio::spawn(async move { passing.run().await }),
            renewals: tokio::spawn(async move { renewing.renew().await }),
            purges: tokio::spawn(async move { purging.purge().await }),
            give_back: Arc::new(move || {
                let worker = giving.clone();
                Box::pin(async move { worker.give_back().await })
            }),
        })
    }

    /// The retry worker that this inbox and its clones have together in this process: the first call starts it, later ones share
    /// it, and it stops with its last share. So every consumer of an inbox can ask for it.
    ///
    /// It runs with the handlers of the inbox that started it. An inbox that has got another handler since it was cloned is no
    /// longer one of these clones: it starts a worker of its own, which takes what is due from the same table. So register all
    /// handlers first, then clone.
    ///
    /// # Errors
    /// As [`start_worker`](Self::start_worker).
    pub async fn shared_worker(&self) -> Result<SharedWorker, Error> {
        let mut slot = self.handlers.worker.lock().await;
        if let Some(worker) = slot.upgrade() {
            return Ok(SharedWorker(worker));
        }
        let worker = Arc::new(self.start_worker().await?);
        *slot = Arc::downgrade(&worker);
        Ok(SharedWorker(worker))
    }

    /// One pass of a retry worker: runs what is due now, up to a batch, and answers how many messages that were. For tests, and
    /// for programs with a scheduler of their own. Dropped half-way, what it was running is run again when its lease ends.
    ///
    /// # Errors
    /// The database's, where the due messages could not be taken.
    pub async fn run_due(&self) -> Result<usize, Error> {
        let (_stop, stopped) = watch::channel(false);
        let worker = Arc::new(self.worker(stopped));
        let renewing = worker.clone();
        let mut renewals = JoinSet::new();
        renewals.spawn(async move { renewing.renew().await });
        worker.pass().await
    }

    /// Fails unless the tables are there and new enough.
    ///
    /// # Errors
    /// [`Error::Schema`].
    pub async fn check(&self) -> Result<(), Error> {
        match self.store().backlog().await {
            Err(e @ Error::Database(_)) if e.kind() == crate::ErrorKind::Database => Err(Error::Schema(format!(
                "{} can't be read; run `posthouse migrate`, or call posthouse::migrate ({e})",
                self.tables().name("inbox")
            ))),
            other => other.map(|_| ()),
        }
    }

    fn worker(&self, stop: watch::Receiver<bool>) -> Worker<DB> {
        // One to take rows, one to renew leases, one to remove old rows.
        let connections = 2 + u32::from(self.settings().retention.is_some());
        let pool = DB::inbox_pool(self.outbox.pool(), self.settings().database_timeout, connections);
        let own = Self { outbox: self.outbox.with_pool(pool), ..self.clone() };
        // A name no other worker has, so that none renews what another one took.
        let owner = format!("{}-{:06x}", self.owner(), fastrand::u32(..) & 0xff_ffff);
        Worker { inbox: self.clone(), own, owner, held: Mutex::default(), stop }
    }
}

impl<DB: Backend> Worker<DB> {
    /// Nothing panics while the lock is held, so a poisoned map is as good as any.
    fn held(&self) -> std::sync::MutexGuard<'_, HashMap<String, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopping(&self) -> bool {
        *self.stop.borrow()
    }

    async fn run(self: Arc<Self>) {
        let settings = self.inbox.settings().clone();
        let mut stop = self.stop.clone();
        let mut failures = 0;
        while !self.stopping() {
            let alarm = &self.inbox.shared.alarm;
            alarm.begin_pass();
            let pause: futures_util::future::BoxFuture<'_, ()> = match self.pass().await {
                Ok(taken) => {
                    failures = 0;
                    if taken as u64 == u64::from(settings.batch) {
                        continue;
                    }
                    Box::pin(alarm.wait(Instant::now() + settings.interval))
                }
                Err(e) => {
                    failures += 1;
                    let pause = (settings.interval * failures.min(1_000)).min(LONGEST_PAUSE.max(settings.interval));
                    tracing::warn!(consumer = self.inbox.consumer(), error = %e, again_in = ?pause, "could not take messages to retry");
                    Box::pin(tokio::time::sleep(pause))
                }
            };
            // A sender that is gone is a worker that was dropped.
            tokio::select! {
                () = pause => {}
                changed = stop.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Takes a batch and runs it.
    async fn pass(self: &Arc<Self>) -> Result<usize, Error> {
        let settings = self.inbox.settings();
        let own = &self.own;
        let taken = step!(own, "taking messages to retry", |tx| {
            DB::inbox_take(tx, own.tables(), own.consumer(), &self.owner, settings.lease, settings.batch).await
        })?;
        let count = taken.len();
        self.held()
            .extend(taken.iter().map(|t| (t.id.clone(), Held { version: t.version, attempts: t.attempts, claims: t.claims })));
        // What was running when a process died may have killed it: alone, it takes nobody with it and gets no blame of others.
        let (suspects, calm): (Vec<_>, Vec<_>) = taken.into_iter().partition(|t| t.claims > 0);
        self.run_rows(calm, settings.concurrency as usize).await;
        self.run_rows(suspects, 1).await;
        Ok(count)
    }

    async fn run_rows(self: &Arc<Self>, rows: Vec<TakenRow>, at_once: usize) {
        let mut running = JoinSet::new();
        for row in rows {
            if running.len() >= at_once {
                running.join_next().await;
            }
            let worker = self.clone();
            running.spawn(async move { worker.run_row(row).await });
        }
        while running.join_next().await.is_some() {}
    }

    async fn run_row(&self, row: TakenRow) {
        if self.stopping() {
            // Given back at the end of the shutdown.
            return;
        }
        let id = row.id.clone();
        if let Err(e) = self.try_row(row).await {
            self.inbox.count(|stats| stats.errors += 1);
            tracing::warn!(consumer = self.inbox.consumer(), message_id = id, error = %e, "could not run a message again");
        }
        self.held().remove(&id);
    }

    async fn try_row(&self, row: TakenRow) -> Result<(), Error> {
        let inbox = &self.inbox;
        let last = Claim { version: row.version, attempts: row.attempts, claims: row.claims };
        if inbox.killed_enough(row.claims) {
            inbox.give_up(&row.id, last).await?;
            return Ok(());
        }
        #[cfg(feature = "relay")]
        if let Some(republish) = &inbox.republish {
            return republish.send(inbox, &row.id, last).await;
        }
        let Some(claim) = inbox.claim(&row.id, last, &self.owner, inbox.settings().lease).await? else {
            // Taken over or changed by an operator.
            return Ok(());
        };
        if let Some(held) = self.held().get_mut(&row.id) {
            held.version = claim.version;
        }
        let copy = inbox.store().show(inbox.consumer(), &row.id).await?;
        let Some(copy) = copy else { return Ok(()) };
        match Incoming::restored(copy) {
            Ok(incoming) => {
                let handled =
                    inbox.claimed(&row.id, claim, &mut ByType { handlers: &*inbox.handlers, incoming: &incoming }).await?;
                tracing::debug!(consumer = inbox.consumer(), message_id = row.id, ?handled, "ran a message again");
            }
            Err(why) => {
                let failed = RunFailed { attempts: claim.attempts, claims: 0, wait: None, error: Some(&why) };
                inbox.fail(&row.id, claim.version, &failed).await?;
            }
        }
        Ok(())
    }

    /// Keeps the leases of what was taken.
    async fn renew(self: Arc<Self>) {
        let lease = self.inbox.settings().lease;
        let mut next = Instant::now();
        let own = &self.own;
        loop {
            next = (next + lease / 3).max(Instant::now());
            tokio::time::sleep_until(next).await;
            let ids: Vec<String> = self.held().keys().cloned().collect();
            if ids.is_empty() {
                continue;
            }
            let renewed = step!(own, "renewing leases", |tx| {
                DB::inbox_renew(tx, own.tables(), own.consumer(), &self.owner, &ids, lease).await
            });
            if let Err(e) = renewed {
                tracing::warn!(consumer = own.consumer(), error = %e, "could not renew the leases of running messages");
            }
        }
    }

    /// Makes what is still held due again; a run that was cut off counts neither as an attempt nor as a claim.
    async fn give_back(&self) {
        let held: Vec<(String, Held)> = self.held().drain().collect();
        for (id, row) in held {
            let back = RunFailed { attempts: row.attempts, claims: row.claims, wait: Some(Duration::ZERO), error: None };
            if let Err(e) = self.inbox.fail(&id, row.version, &back).await {
                tracing::warn!(consumer = self.inbox.consumer(), message_id = id, error = %e, "could not give a message back");
            }
        }
    }
}
