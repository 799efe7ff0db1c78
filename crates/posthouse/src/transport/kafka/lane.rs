//! One producer with everything around it: taking records, answering deliveries, deadlines, and a new producer after a
//! fatal error. Each lane has a thread, which is the only one that polls.

use std::collections::{HashMap, HashSet, VecDeque};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::error::RDKafkaErrorCode as Code;
use rdkafka::producer::{BaseRecord, Producer as _, PurgeConfig};
use tokio::sync::Notify;
use tokio::time::timeout_at;

use super::drain::Prober;
use super::producer::{self, Producer, Sent, Trouble};
use super::settings::{KafkaSettings, Lane as Kind};
use super::{answer, record};
use crate::transport::content::content;
use crate::transport::{Delivery, Outcome};

/// How long a poll waits; deadlines are looked at in between.
const POLL: Duration = Duration::from_millis(20);

/// How long a poll waits while somebody waits for its end.
const POLL_DRAINING: Duration = Duration::from_millis(1);

/// A key counts as opened for this long at most; brokers know a producer for a day after its last record
/// (`producer.id.expiration.ms`).
const OPENED: Duration = Duration::from_secs(3600);

/// So many opened keys are remembered. One that is forgotten costs its next record a round trip.
const OPENED_KEYS: usize = 100_000;

/// A delivery is answered this long before its deadline at most.
const EARLIER: Duration = Duration::from_millis(100);

/// Records that a drain has left in the queue (sent back by retries) are given up again after this time.
const PURGE_AGAIN: Duration = Duration::from_millis(50);

/// After this many records in a row a sending task lets others run.
const YIELD: usize = 256;

/// Deliveries with about the same deadline that are looked at together.
const BATCH: usize = 512;

/// Longest wait for reports when a transport is closed. The relay's own deadlines are usually shorter.
const FLUSH: Duration = Duration::from_secs(10);

/// How long after that the reports of what was given up may take.
const LAST_REPORTS: Duration = Duration::from_secs(1);

/// A follower of a failed message comes within the time that a message may be in flight: a lease at most, which is 1 h at most.
const REMEMBER: Duration = Duration::from_secs(3600);

pub(super) struct Lane {
    pub(super) shared: Arc<Shared>,
    /// Batches enter one after the other, also where one has to wait.
    turn: tokio::sync::Mutex<()>,
}

pub(super) struct Shared {
    pub(super) kind: Kind,
    pub(super) settings: Arc<KafkaSettings>,
    state: Mutex<State>,
    /// For the thread while there is no producer to poll.
    work: Condvar,
    /// For tasks: a report came (if `waiting`), or the phase changed.
    pub(super) changed: Notify,
    waiting: AtomicUsize,
    /// Records whose report has not come.
    pub(super) unreported: AtomicUsize,
    pub(super) trouble: Trouble,
    /// Where records of refused batches go from an ordinary lane.
    alone: Option<Lane>,
    /// And from a pipelined one; made when it is needed first.
    prober: Mutex<Option<Prober>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// What goes before anything new.
    pub(super) backlog: VecDeque<Delivery>,
    /// Failed records of a pipelined lane, until all have been reported on.
    pub(super) failed: Vec<(Arc<Sent>, Code)>,
    /// Topics and keys of which a message failed and the next one that follows none hasn't come, with the time.
    pub(super) stopped: HashMap<Key, Instant>,
    /// Topics and keys of a pipelined lane whose partition has confirmed something of this producer; see `put`.
    pub(super) opened: HashSet<Key>,
    opened_since: Option<Instant>,
    /// Topics and keys that are not opened and of which one record is under way, and what waits for its report.
    pub(super) opening: HashMap<Key, VecDeque<Delivery>>,
    batches: VecDeque<Batch>,
    records: u64,
    /// The first deadline that the producer to be made will see.
    timeout: Option<Duration>,
}

#[derive(Default)]
pub(super) enum Phase {
    /// There is no producer; one is made when a record needs it.
    #[default]
    Idle,
    Ready(Arc<Producer>),
    /// Takes no records until every one has been reported on.
    Draining(Drain),
    /// A producer can't be made; the next record tries again.
    Broken(String),
    Closing,
    Closed,
}

#[derive(Clone)]
pub(super) struct Drain {
    pub(super) producer: Arc<Producer>,
    /// The producer's records must be answered: there is no more time.
    pub(super) late: bool,
    since: Instant,
}

/// A topic and a message key: what keeps its order.
pub(super) type Key = (String, String);

/// Deliveries that are watched together.
struct Batch {
    deadline: Instant,
    late: bool,
    sent: Vec<Arc<Sent>>,
    unanswered: Arc<AtomicUsize>,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.shared.end();
    }
}

impl Lane {
    pub(super) fn start(settings: &Arc<KafkaSettings>, kind: Kind) -> Self {
        let alone = (kind == Kind::Ordinary).then(|| Self::start(settings, Kind::Alone));
        let shared = Arc::new(Shared {
            kind,
            settings: settings.clone(),
            state: Mutex::default(),
            work: Condvar::new(),
            changed: Notify::new(),
            waiting: AtomicUsize::new(0),
            unreported: AtomicUsize::new(0),
            trouble: Trouble::default(),
            alone,
            prober: Mutex::default(),
        });
        let name = match kind {
            Kind::Ordinary => "kafka",
            Kind::Alone => "kafka-alone",
            Kind::Pipelined => "kafka-pipe",
        };
        let of_thread = shared.clone();
        if let Err(e) = std::thread::Builder::new().name(name.into()).spawn(move || run(&of_thread)) {
            shared.state().phase = Phase::Closed;
            tracing::error!(error = %e, "could not start the thread of the Kafka producer");
        }
        Self { shared, turn: tokio::sync::Mutex::new(()) }
    }

    /// Resolves when each is in the producer's queue or answered.
    pub(super) async fn send(&self, batch: Vec<Delivery>) {
        let _turn = self.turn.lock().await;
        for (n, mut delivery) in batch.into_iter().enumerate() {
            if n % YIELD == YIELD - 1 {
                tokio::task::yield_now().await;
            }
            let by = answer_by(&delivery);
            while let Some(refused) = self.shared.offer(delivery, by) {
                delivery = refused;
                self.shared.waiting.fetch_add(1, SeqCst);
                let mut changed = pin!(self.shared.changed.notified());
                changed.as_mut().enable();
                // It may have become possible before we began to listen.
                let again = self.shared.offer(delivery, by);
                let Some(refused) = again else {
                    self.shared.waiting.fetch_sub(1, SeqCst);
                    break;
                };
                delivery = refused;
                // Its time may be up: then the next offer answers it.
                let _ = timeout_at(by.into(), changed).await;
                self.shared.waiting.fetch_sub(1, SeqCst);
            }
        }
    }

    /// Waits for the reports, but not for ever; then answers what is left.
    pub(super) async fn close(&self) {
        let until = tokio::time::Instant::now() + FLUSH;
        self.shared.wait_until(until, |shared| shared.is_empty()).await;
        if let Some(alone) = &self.shared.alone {
            alone.shared.wait_until(until, Shared::is_empty).await;
            alone.shared.end();
        }
        self.shared.end();
        let until = tokio::time::Instant::now() + LAST_REPORTS * 2;
        self.shared.wait_until(until, |shared| matches!(shared.state().phase, Phase::Closed)).await;
        if let Some(alone) = &self.shared.alone {
            alone.shared.wait_until(until, |shared| matches!(shared.state().phase, Phase::Closed)).await;
        }
    }
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Nothing is left half done where something could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_empty(&self) -> bool {
        self.unreported.load(SeqCst) == 0 && self.state().backlog.is_empty()
    }

    /// Only the lane's thread asks.
    pub(super) fn prober(&self) -> MutexGuard<'_, Option<Prober>> {
        self.prober.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn wait_until(&self, deadline: tokio::time::Instant, holds: impl Fn(&Self) -> bool) {
        self.waiting.fetch_add(1, SeqCst);
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if holds(self) || timeout_at(deadline, changed).await.is_err() {
                break;
            }
        }
        self.waiting.fetch_sub(1, SeqCst);
    }

    fn end(&self) {
        let mut state = self.state();
        if !matches!(state.phase, Phase::Closed) {
            // The thread, which polls the producer, lets go of it last.
            state.phase = Phase::Closing;
        }
        drop(state);
        self.work.notify_all();
        self.changed.notify_waiters();
    }

    pub(super) fn unavailable(&self, what: &str) -> Outcome {
        answer::unavailable(&self.settings.brokers, what, self.trouble.text().as_deref())
    }

    pub(super) fn outcome(&self, code: Code, topic: &str) -> Outcome {
        answer::of(code, topic, &self.settings.brokers, self.trouble.text().as_deref())
    }

    /// Takes a delivery, into the producer's queue or to its answer; returns one that can't be taken at the moment.
    fn offer(&self, delivery: Delivery, by: Instant) -> Option<Delivery> {
        let mut state = self.state();
        if let Some(delivery) = self.held_back(&mut state, delivery) {
            if Instant::now() >= by {
                let why = match state.phase {
                    Phase::Ready(_) => "no place in the producer's queue by the deadline (relay.send_timeout)",
                    _ => "the producer was being replaced until the deadline (relay.send_timeout)",
                };
                let outcome = self.unavailable(why);
                self.fail(&mut state, delivery, outcome);
                return None;
            }
            if !state.backlog.is_empty() {
                return Some(delivery);
            }
            return self.put(&mut state, delivery);
        }
        None
    }

    /// Answers a delivery that follows a failed one.
    fn held_back(&self, state: &mut State, delivery: Delivery) -> Option<Delivery> {
        if self.kind == Kind::Pipelined
            && !state.stopped.is_empty()
            && let Some(key) = key_of(&delivery)
        {
            if !delivery.follows() {
                state.stopped.remove(&key);
            } else if state.stopped.contains_key(&key) {
                delivery.held_back();
                return None;
            }
        }
        Some(delivery)
    }

    /// Answers with a failure; on a pipelined lane nothing of the key goes out before the relay begins anew with it.
    pub(super) fn fail(&self, state: &mut State, delivery: Delivery, outcome: Outcome) {
        if self.kind == Kind::Pipelined
            && let Some(key) = key_of(&delivery)
        {
            let now = Instant::now();
            if state.stopped.len() > 1_000 && state.stopped.len().is_power_of_two() {
                state.stopped.retain(|_, since| now.duration_since(*since) < REMEMBER);
            }
            state.stopped.insert(key, now);
        }
        delivery.answer(outcome);
    }

    /// The same, without a look at what comes before it.
    fn put(&self, state: &mut State, delivery: Delivery) -> Option<Delivery> {
        let producer = match &state.phase {
            Phase::Ready(producer) => producer.clone(),
            Phase::Idle => {
                if state.timeout.is_none() {
                    state.timeout = Some(delivery.time_left());
                    self.work.notify_all();
                }
                return Some(delivery);
            }
            Phase::Draining(_) => return Some(delivery),
            Phase::Broken(why) => {
                let outcome = self.unavailable(why);
                state.phase = Phase::Idle;
                self.fail(state, delivery, outcome);
                return None;
            }
            Phase::Closing | Phase::Closed => {
                let outcome = self.unavailable("the transport is closed");
                self.fail(state, delivery, outcome);
                return None;
            }
        };
        let mut opens = None;
        if self.kind == Kind::Pipelined
            && let Some(key) = key_of(&delivery)
            && !state.opened.contains(&key)
        {
            // A broker that has confirmed something of a producer in a partition refuses batches that aren't its next, so
            // those behind a refused one. One that knows nothing of it yet takes any: then a key has one record under way.
            if let Some(waiting) = state.opening.get_mut(&key) {
                waiting.push_back(delivery);
                return None;
            }
            opens = Some(key);
        }
        let deadline = answer_by(&delivery);
        let fits = |b: &Batch| b.sent.len() < BATCH && b.deadline <= deadline && deadline < b.deadline + POLL;
        if !state.batches.back().is_some_and(fits) {
            state.batches.push_back(Batch { deadline, late: false, sent: Vec::new(), unanswered: Arc::default() });
        }
        state.records += 1;
        let number = state.records;
        let batch = state.batches.back_mut().expect("one was there or has been added");
        let sent = Arc::new(Sent::new(number, delivery, batch.unanswered.clone()));
        let error = match self.produce(&producer, &sent) {
            Ok(()) => {
                batch.sent.push(sent);
                state.opening.extend(opens.map(|key| (key, VecDeque::new())));
                return None;
            }
            Err(error) => error,
        };
        // Nobody else has it.
        let delivery = sent.take()?;
        match error {
            NotProduced::Content(why) => self.fail(state, delivery, Outcome::Rejected(why.into())),
            // The thread sees the fatal error after its poll, and replaces the producer.
            NotProduced::Code(Code::QueueFull | Code::Fatal) => return Some(delivery),
            NotProduced::Code(code) => {
                let outcome = self.outcome(code, delivery.address());
                self.fail(state, delivery, outcome);
            }
        }
        None
    }

    fn produce(&self, producer: &Producer, sent: &Arc<Sent>) -> Result<(), NotProduced> {
        // librdkafka copies what it is given before it returns.
        let slot = sent.delivery();
        let Some(delivery) = slot.as_ref() else { return Ok(()) };
        let content = content(delivery).map_err(NotProduced::Content)?;
        let mut record: BaseRecord<'_, [u8], [u8], Arc<Sent>> = BaseRecord::with_opaque_to(delivery.address(), sent.clone())
            .payload(&*content.payload)
            .timestamp(record::timestamp(delivery))
            .headers(record::headers(delivery, &content));
        if let Some(key) = &delivery.message().key {
            record = record.key(key.as_bytes());
        }
        self.unreported.fetch_add(1, SeqCst);
        producer.send(record).map_err(|(error, _)| {
            self.unreported.fetch_sub(1, SeqCst);
            NotProduced::Code(error.rdkafka_error_code().unwrap_or(Code::Unknown))
        })
    }

    /// A report came, with whatever result.
    pub(super) fn on_report(&self) {
        self.unreported.fetch_sub(1, SeqCst);
        if self.waiting.load(SeqCst) > 0 {
            self.changed.notify_waiters();
        }
    }

    /// A record was confirmed.
    pub(super) fn on_success(&self, delivery: &Delivery) {
        if self.kind != Kind::Pipelined {
            return;
        }
        let mut state = self.state();
        if state.opening.is_empty() {
            return;
        }
        let Some((key, waiting)) = key_of(delivery).and_then(|key| state.opening.remove_entry(&key)) else { return };
        state.opened.insert(key);
        state.backlog.extend(waiting);
        drop(state);
        self.work_off();
    }

    /// A record failed after it was queued.
    pub(super) fn on_failure(&self, producer: Option<&Producer>, sent: Arc<Sent>, code: Code) {
        if self.kind == Kind::Pipelined {
            let mut state = self.state();
            let ready = matches!(state.phase, Phase::Ready(_));
            if ready && matches!(code, Code::UnknownTopic | Code::UnknownPartition | Code::TopicAuthorizationFailed) {
                // Of the topic as a whole, found out before anything was sent: every record of it fails, nothing overtakes.
                let Some(delivery) = sent.take() else { return };
                let key = key_of(&delivery);
                if key.as_ref().is_some_and(|key| state.stopped.contains_key(key)) {
                    delivery.held_back();
                } else {
                    let outcome = self.outcome(code, delivery.address());
                    self.fail(&mut state, delivery, outcome);
                }
                for follower in key.and_then(|key| state.opening.remove(&key)).into_iter().flatten() {
                    follower.held_back();
                }
                return;
            }
            state.failed.push((sent, code));
            if let Phase::Ready(producer) = &state.phase {
                let producer = producer.clone();
                state.phase = Phase::Draining(Drain { producer: producer.clone(), late: false, since: Instant::now() });
                drop(state);
                // What is queued behind it must not go out. What is on its way to the broker gets its report.
                producer.purge(PurgeConfig::default().queue());
            }
            return;
        }
        let Some(delivery) = sent.take() else { return };
        if self.kind == Kind::Ordinary
            && answer::blames_batch(code)
            && let Some(alone) = &self.alone
        {
            alone.shared.state().backlog.push_back(delivery);
            alone.shared.work.notify_all();
            return;
        }
        // A fatal error says why the others were given up.
        let fatal = producer.filter(|_| answer::is_innocent(code)).and_then(|p| p.client().fatal_error());
        let code = fatal.map_or(code, |(code, _)| code);
        let outcome = self.outcome(code, delivery.address());
        delivery.answer(outcome);
    }

    /// The producer will send nothing any more.
    pub(super) fn on_fatal(&self, producer: &Arc<Producer>, reason: &str) {
        tracing::warn!("the Kafka producer has stopped and is replaced when all its records are reported on: {reason}");
        let mut state = self.state();
        if matches!(&state.phase, Phase::Ready(p) if Arc::ptr_eq(p, producer)) {
            state.phase = Phase::Draining(Drain { producer: producer.clone(), late: false, since: Instant::now() });
        }
    }

    /// Answers what isn't confirmed by its deadline.
    fn expire(&self, now: Instant) {
        let mut late = Vec::new();
        let mut any_late = false;
        let mut state = self.state();
        // Brokers forget producers after a while without records.
        let since = *state.opened_since.get_or_insert(now);
        if now.duration_since(since) > OPENED || state.opened.len() > OPENED_KEYS {
            state.opened.clear();
            state.opened_since = Some(now);
        }
        state.batches.retain_mut(|batch| {
            if batch.unanswered.load(Relaxed) == 0 {
                return false;
            }
            if batch.deadline <= now && !batch.late {
                any_late = true;
                batch.late = true;
                // A pipelined lane answers them when the drain is through.
                if self.kind != Kind::Pipelined {
                    late.append(&mut batch.sent);
                }
            }
            true
        });
        if self.kind == Kind::Pipelined {
            if !any_late {
                return;
            }
            let producer = match &state.phase {
                Phase::Ready(producer) => producer.clone(),
                Phase::Draining(drain) => drain.producer.clone(),
                _ => return,
            };
            state.phase = Phase::Draining(Drain { producer: producer.clone(), late: true, since: now });
            drop(state);
            producer.purge(PurgeConfig::default().queue().inflight());
            return;
        }
        drop(state);
        let outcome = self.unavailable("none by the deadline (relay.send_timeout)");
        for delivery in late.iter().filter_map(|sent| sent.take()) {
            delivery.answer(outcome.clone());
        }
    }

    /// Puts what has waited into the producer's queue.
    fn work_off(&self) {
        let mut state = self.state();
        while let Some(delivery) = state.backlog.pop_front() {
            // Held back if an earlier one of its key failed since.
            let stopped = !state.stopped.is_empty() && key_of(&delivery).is_some_and(|key| state.stopped.contains_key(&key));
            if stopped {
                delivery.held_back();
            } else if delivery.time_left().is_zero() {
                let outcome = self.unavailable("none by the deadline (relay.send_timeout)");
                self.fail(&mut state, delivery, outcome);
            } else if let Some(delivery) = self.put(&mut state, delivery) {
                state.backlog.push_front(delivery);
                return;
            }
        }
        drop(state);
        self.changed.notify_waiters();
    }
}

enum NotProduced {
    Content(String),
    Code(Code),
}

/// A little before the relay gives up, so that this answer, which says more, comes first.
fn answer_by(delivery: &Delivery) -> Instant {
    delivery.deadline() - (delivery.time_left() / 20).min(EARLIER)
}

pub(super) fn key_of(delivery: &Delivery) -> Option<Key> {
    delivery.message().key.as_ref().map(|key| (delivery.address().to_owned(), key.clone()))
}

/// The thread of a lane.
fn run(shared: &Arc<Shared>) {
    let mut held = None;
    loop {
        let mut state = shared.state();
        if !state.backlog.is_empty() {
            drop(state);
            shared.work_off();
            state = shared.state();
        }
        match &state.phase {
            Phase::Idle => match state.timeout.take() {
                None => {
                    if state.backlog.is_empty() {
                        // Woken by the next record, or to end.
                        drop(shared.work.wait(state));
                    }
                }
                Some(timeout) => {
                    drop(state);
                    let created = producer::create(&shared.settings.config(shared.kind, timeout), shared);
                    let mut state = shared.state();
                    if matches!(state.phase, Phase::Idle) {
                        state.phase = match &created {
                            Ok(producer) => Phase::Ready(producer.clone()),
                            Err(e) => Phase::Broken(format!("no producer could be made: {e}")),
                        };
                    }
                    drop(state);
                    // Here goes the one before, if any: no other thread waits for its end.
                    held = created.ok();
                    shared.changed.notify_waiters();
                }
            },
            Phase::Broken(_) => drop(shared.work.wait_timeout(state, POLL)),
            Phase::Ready(producer) => {
                let producer = producer.clone();
                drop(state);
                let waited_for = shared.waiting.load(SeqCst) > 0;
                producer.poll(if waited_for { POLL_DRAINING } else { POLL });
                if waited_for {
                    // Only now the places of reported records are free.
                    shared.changed.notify_waiters();
                }
                if let Some((_, why)) = producer.client().fatal_error() {
                    shared.on_fatal(&producer, &why);
                }
                shared.expire(Instant::now());
            }
            Phase::Draining(drain) => {
                let mut drain = drain.clone();
                if shared.unreported.load(SeqCst) == 0 {
                    drop(state);
                    shared.settle(drain);
                    continue;
                }
                let again = drain.since.elapsed() > PURGE_AGAIN;
                if again {
                    drain.since = Instant::now();
                    state.phase = Phase::Draining(drain.clone());
                }
                drop(state);
                if again {
                    let flags = PurgeConfig::default().queue();
                    drain.producer.purge(if drain.late { flags.inflight() } else { flags });
                }
                drain.producer.poll(POLL_DRAINING);
                shared.expire(Instant::now());
            }
            Phase::Closing => {
                drop(state);
                break;
            }
            Phase::Closed => return,
        }
    }
    finish(shared, held);
}

/// Answers what is left and lets the producer go.
fn finish(shared: &Shared, producer: Option<Arc<Producer>>) {
    if let Some(producer) = &producer {
        producer.purge(PurgeConfig::default().queue().inflight());
        let until = Instant::now() + LAST_REPORTS;
        while shared.unreported.load(SeqCst) > 0 && Instant::now() < until {
            producer.poll(POLL_DRAINING);
        }
    }
    let mut state = shared.state();
    let sent = std::mem::take(&mut state.batches).into_iter().flat_map(|batch| batch.sent);
    let mut left: Vec<_> = sent.filter_map(|sent| sent.take()).collect();
    left.extend(std::mem::take(&mut state.failed).iter().filter_map(|(sent, _)| sent.take()));
    left.extend(std::mem::take(&mut state.opening).into_values().flatten());
    left.extend(std::mem::take(&mut state.backlog));
    state.phase = Phase::Closed;
    drop(state);
    let outcome = shared.unavailable("the transport was closed before it came");
    for delivery in left {
        delivery.answer(outcome.clone());
    }
    shared.changed.notify_waiters();
    shared.prober().take();
    drop(producer);
}
