//! Runs what was taken: how much at once, what waits for what, and when the broker gets its answer.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::inbox::{Handled, Inbox, Incoming, PurgeHold};
use crate::settings::{ConsumerOrder, ConsumerSettings};
use crate::store::Backend;
use crate::{Error, ErrorKind};

/// A message that the inbox could neither handle nor write down is given back after this long, twice as long after each
/// further one in a row, at most [`LATER_CAP`]: as long as a database takes to come back.
const LATER_FIRST: Duration = Duration::from_millis(100);
const LATER_CAP: Duration = Duration::from_secs(30);

/// The longest wait of a message that [stays](Answerable::stays) here meanwhile. Only those that were taken do, so their tries
/// are few.
const HERE_CAP: Duration = Duration::from_secs(5);

/// How often a message that holds back the later ones of its key is asked about, at first and at most. Its retry worker runs it
/// when it is due, in this process or another.
const ASK_FIRST: Duration = Duration::from_millis(20);
const ASK_CAP: Duration = Duration::from_secs(1);

/// What the broker is told of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is settled: acknowledge.
    Done,
    /// It will never be taken ([`MissingId::Reject`](crate::MissingId::Reject)): reject, without a further delivery.
    Refused(String),
    /// Nothing is written, or nobody knows: deliver it again, after this time.
    Later(Duration),
}

/// One delivery of a message, to be answered. One that is dropped unanswered must be delivered again by its broker.
pub(crate) trait Answerable: Send + 'static {
    /// Says how the inbox has settled it, before its answer. More than once where a failed one is waited for.
    fn settled(&mut self, handled: Handled) {
        let _ = handled;
    }

    /// Tells the broker.
    fn answer(self: Box<Self>, answer: Answer) -> BoxFuture<'static, ()>;

    /// Resolves when this delivery is somebody else's, or void: then it isn't run (again), and is dropped unanswered.
    fn gone(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    /// While the inbox can neither handle it nor write it down, it is kept and tried again here, instead of being given back:
    /// where it can't be given back, or where that would cost its place before later messages, or one of few deliveries.
    fn stays(&self) -> bool {
        false
    }
}

/// An inbox of any database.
pub(crate) trait Sink: fmt::Debug + Send + Sync + 'static {
    fn handle<'a>(&'a self, incoming: &'a Incoming) -> BoxFuture<'a, Result<Handled, Error>>;
    fn consumer(&self) -> &str;
    fn hold_purge(&self) -> PurgeHold;
    #[cfg(any(feature = "kafka", feature = "nats"))]
    fn retention_at_least(&self, replay: Option<Duration>, what: &str) -> bool;
}

impl<DB: Backend> Sink for Inbox<DB> {
    fn handle<'a>(&'a self, incoming: &'a Incoming) -> BoxFuture<'a, Result<Handled, Error>> {
        Box::pin(Inbox::handle(self, incoming))
    }

    fn consumer(&self) -> &str {
        Inbox::consumer(self)
    }

    fn hold_purge(&self) -> PurgeHold {
        Inbox::hold_purge(self)
    }

    #[cfg(any(feature = "kafka", feature = "nats"))]
    fn retention_at_least(&self, replay: Option<Duration>, what: &str) -> bool {
        Inbox::retention_at_least(self, replay, what)
    }
}

/// What a consumer has done since it started.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) processed: AtomicU64,
    pub(crate) duplicates: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) given_back: AtomicU64,
    pub(crate) refused: AtomicU64,
}

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Intake(Arc<Shared>);

struct Shared {
    sink: Arc<dyn Sink>,
    settings: ConsumerSettings,
    counts: Counts,
    /// A permit per message that is taken and not answered.
    taken: Arc<Semaphore>,
    /// A permit per handler that runs.
    running: Semaphore,
    /// Messages behind one that is running, by what they wait for. An entry is there while its lane has a task.
    lanes: Mutex<HashMap<Lane, VecDeque<Job>>>,
    tasks: Mutex<JoinSet<()>>,
    /// Errors of the inbox in a row.
    errors: AtomicU64,
    stop: watch::Sender<bool>,
}

/// What messages that wait for each other have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Lane {
    Source(String),
    Key(String),
}

struct Job {
    incoming: Incoming,
    delivery: Box<dyn Answerable>,
    place: Place,
}

/// Room for one message that is taken and not yet answered.
#[derive(Debug)]
pub(crate) struct Place {
    _permit: OwnedSemaphorePermit,
}

impl fmt::Debug for Intake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Intake")
            .field("consumer", &self.0.sink.consumer())
            .field("in_hand", &self.in_hand())
            .finish_non_exhaustive()
    }
}

#[allow(dead_code, reason = "each consumer uses its own part")]
impl Intake {
    pub(crate) fn new(sink: Arc<dyn Sink>, settings: ConsumerSettings) -> Self {
        Self(Arc::new(Shared {
            sink,
            counts: Counts::default(),
            taken: Arc::new(Semaphore::new(settings.prefetch as usize)),
            running: Semaphore::new(settings.concurrency as usize),
            lanes: Mutex::default(),
            tasks: Mutex::default(),
            errors: AtomicU64::new(0),
            stop: watch::Sender::new(false),
            settings,
        }))
    }

    pub(crate) fn settings(&self) -> &ConsumerSettings {
        &self.0.settings
    }

    /// The inbox that it runs messages through.
    #[cfg(any(feature = "kafka", feature = "nats"))]
    pub(crate) fn sink(&self) -> &Arc<dyn Sink> {
        &self.0.sink
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.0.counts
    }

    /// Messages that are taken and not answered.
    pub(crate) fn in_hand(&self) -> usize {
        (self.0.settings.prefetch as usize).saturating_sub(self.0.taken.available_permits())
    }

    /// Waits until one more message may be taken.
    pub(crate) async fn place(&self) -> Place {
        let Ok(permit) = self.0.taken.clone().acquire_owned().await else {
            // Never closed.
            return std::future::pending().await;
        };
        Place { _permit: permit }
    }

    /// A place if there is one now.
    #[cfg(feature = "kafka")]
    pub(crate) fn place_now(&self) -> Option<Place> {
        self.0.taken.clone().try_acquire_owned().ok().map(|permit| Place { _permit: permit })
    }

    /// Runs a message and answers it. `source` names the queue, stream or partition that it came from.
    ///
    /// Messages that wait for each other run in the order of these calls.
    pub(crate) fn take(&self, place: Place, source: &str, incoming: Incoming, delivery: impl Answerable) {
        let job = Job { incoming, delivery: Box::new(delivery), place };
        let lane = match self.0.settings.order {
            ConsumerOrder::None => None,
            ConsumerOrder::Source => Some(Lane::Source(source.to_owned())),
            ConsumerOrder::Key => job.incoming.key.clone().map(Lane::Key),
        };
        let Some(lane) = lane else {
            let this = self.clone();
            self.spawn(async move {
                this.run(job, false).await;
            });
            return;
        };
        let mut lanes = locked(&self.0.lanes);
        if let Some(waiting) = lanes.get_mut(&lane) {
            waiting.push_back(job);
            return;
        }
        lanes.insert(lane.clone(), VecDeque::from([job]));
        drop(lanes);
        let this = self.clone();
        self.spawn(async move { this.run_lane(&lane).await });
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = locked(&self.0.tasks);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    async fn run_lane(&self, lane: &Lane) {
        let holds_back = matches!(lane, Lane::Key(_));
        loop {
            let next = {
                let mut lanes = locked(&self.0.lanes);
                let next = lanes.get_mut(lane).and_then(VecDeque::pop_front);
                if next.is_none() {
                    lanes.remove(lane);
                }
                next
            };
            let Some(job) = next else { return };
            if !self.run(job, holds_back).await {
                // What is behind it must not go first: it goes back as well, to be delivered after it.
                for job in locked(&self.0.lanes).remove(lane).unwrap_or_default() {
                    self.spawn(async move { job.delivery.answer(Answer::Later(Duration::ZERO)).await });
                }
                return;
            }
        }
    }

    /// Runs one message until it may be answered, and answers it; false when it goes back. With `until_final` a failed one
    /// is waited for until it is done or given up.
    async fn run(&self, mut job: Job, until_final: bool) -> bool {
        let shared = &*self.0;
        let mut pause = ASK_FIRST;
        let mut pause_here = LATER_FIRST;
        let mut stop = shared.stop.subscribe();
        let mut gone = job.delivery.gone();
        let answer = loop {
            let handled = {
                let permit = tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => break Answer::Later(Duration::ZERO),
                    () = &mut gone => return true,
                    permit = shared.running.acquire() => permit,
                };
                if permit.is_err() {
                    let _ = stop.wait_for(|stop| *stop).await;
                    break Answer::Later(Duration::ZERO);
                }
                let handled = shared.sink.handle(&job.incoming).await;
                drop(permit);
                handled
            };
            if let Ok(handled) = handled {
                job.delivery.settled(handled);
            }
            match handled {
                Ok(Handled::WillRetry(_)) if until_final => {
                    if pause == ASK_FIRST {
                        shared.counts.failures.fetch_add(1, Relaxed);
                    }
                    tokio::select! {
                        _ = stop.wait_for(|stop| *stop) => break Answer::Later(Duration::ZERO),
                        () = &mut gone => return true,
                        () = tokio::time::sleep(pause) => pause = (pause * 2).min(ASK_CAP),
                    }
                }
                other => {
                    let stays = job.delivery.stays();
                    match self.judge(other, stays.then_some(&mut pause_here)) {
                        Answer::Later(pause) if stays => tokio::select! {
                            _ = stop.wait_for(|stop| *stop) => break Answer::Later(Duration::ZERO),
                            () = &mut gone => return true,
                            () = tokio::time::sleep(pause) => {}
                        },
                        answer => break answer,
                    }
                }
            }
        };
        let settled = !matches!(answer, Answer::Later(_));
        job.delivery.answer(answer).await;
        drop(job.place);
        settled
    }

    /// The answer to what came of a run. `here` is the pause of a message that stays, which doubles.
    fn judge(&self, handled: Result<Handled, Error>, here: Option<&mut Duration>) -> Answer {
        let shared = &*self.0;
        let count = |counter: &AtomicU64| {
            shared.errors.store(0, Relaxed);
            counter.fetch_add(1, Relaxed);
            Answer::Done
        };
        match handled {
            Ok(Handled::Processed) => count(&shared.counts.processed),
            Ok(Handled::Duplicate) => count(&shared.counts.duplicates),
            Ok(Handled::WillRetry(_)) => count(&shared.counts.failures),
            Ok(Handled::Failed) => count(&shared.counts.failed),
            Err(e) if e.kind() == ErrorKind::Invalid => {
                tracing::warn!(consumer = shared.sink.consumer(), error = %e, "a message was refused");
                shared.counts.refused.fetch_add(1, Relaxed);
                Answer::Refused(e.to_string())
            }
            Err(e) => {
                let errors = shared.errors.fetch_add(1, Relaxed).min(16) as u32;
                let longest = match here {
                    Some(pause) => std::mem::replace(pause, (*pause * 2).min(HERE_CAP)),
                    None => LATER_FIRST.saturating_mul(2u32.saturating_pow(errors)).min(LATER_CAP),
                };
                let later = longest.mul_f64(0.5 + fastrand::f64() / 2.0);
                tracing::warn!(consumer = shared.sink.consumer(), error = %e, again_in = ?later, "a message could not be handled and is tried again");
                shared.counts.given_back.fetch_add(1, Relaxed);
                Answer::Later(later)
            }
        }
    }

    /// Starts no further handler; what isn't running is given back by [`stop`](Self::stop), when its consumer has unsubscribed.
    pub(crate) fn start_no_more(&self) {
        self.0.running.close();
    }

    /// Gives back what isn't running, waits for what is, and ends it at `deadline`: its transaction is rolled back and its
    /// delivery dropped unanswered. False when something had to be ended. Nothing may be taken from here on.
    pub(crate) async fn stop(&self, deadline: Instant) -> bool {
        self.0.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *locked(&self.0.tasks));
        let done = tokio::time::timeout_at(deadline, async {
            loop {
                while tasks.join_next().await.is_some() {}
                // A lane that ends answers what stood behind it in tasks of their own.
                tasks = std::mem::take(&mut *locked(&self.0.tasks));
                if tasks.is_empty() {
                    return;
                }
            }
        });
        let done = done.await.is_ok();
        if !done {
            let messages = self.in_hand();
            tracing::warn!(
                consumer = self.0.sink.consumer(),
                messages,
                "messages were still running at the end of the time for stopping; they are rolled back and delivered again"
            );
            tasks.shutdown().await;
            self.drop_waiting();
        }
        done
    }
}

impl Intake {
    /// Ends everything now, and what would be taken from here on.
    pub(crate) fn abort(&self) {
        self.0.stop.send_replace(true);
        locked(&self.0.tasks).abort_all();
        self.drop_waiting();
    }

    /// Drops, unanswered, what stood behind something that was ended.
    fn drop_waiting(&self) {
        let waiting = std::mem::take(&mut *locked(&self.0.lanes));
        drop(waiting);
    }
}

/// Nothing panics while one of these is locked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
