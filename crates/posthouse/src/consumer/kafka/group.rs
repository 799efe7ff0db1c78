//! What the group gives and takes, and what librdkafka reports. All of it is called in the thread that polls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::thread::Thread;
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::{Offset, TopicPartitionList};

use super::health::Health;
use super::offsets::{Found, Mark, Offsets};
use super::partition::Partition;

/// How long the group's offsets are waited for when partitions are assigned.
const LOOK_UP: Duration = Duration::from_secs(5);

/// What is running when partitions are revoked is waited for this long at most, and half the time that the group allows.
const LET_FINISH: Duration = Duration::from_secs(30);

/// How long no commit is begun after one that failed; what it said is said again then.
const PAUSE: Duration = Duration::from_millis(200);

pub(super) type KafkaClient = BaseConsumer<Group>;

/// A partition and the queue its messages come in.
pub(super) type Assigned = (Arc<Partition>, PartitionQueue<Group>);

/// What to commit.
pub(super) type Marks = Vec<(Arc<Partition>, Mark)>;

pub(super) struct Group {
    pub(super) health: Mutex<Health>,
    client: OnceLock<Weak<KafkaClient>>,
    state: Mutex<State>,
    poller: Thread,
    ahead: i64,
    let_finish: Duration,
}

#[derive(Default)]
struct State {
    partitions: Vec<Arc<Partition>>,
    /// For the poller. (Queues keep their client, which keeps this, so they don't stay here.)
    assigned: Vec<Assigned>,
    /// One is under way.
    committing: bool,
    /// None before.
    pause: Option<Instant>,
}

impl Group {
    pub(super) fn new(health: Health, poller: Thread, ahead: i64, longest_pause: Duration) -> Self {
        Self {
            health: Mutex::new(health),
            client: OnceLock::new(),
            state: Mutex::default(),
            poller,
            ahead,
            let_finish: LET_FINISH.min(longest_pause / 2),
        }
    }

    pub(super) fn is_of(&self, client: &Arc<KafkaClient>) {
        // Set once, before the first poll.
        let _ = self.client.set(Arc::downgrade(client));
    }

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was assigned since the last call.
    pub(super) fn newly_assigned(&self) -> Vec<Assigned> {
        std::mem::take(&mut self.state().assigned)
    }

    pub(super) fn is_committing(&self) -> bool {
        self.state().committing
    }

    /// Whether a commit may be begun now.
    pub(super) fn may_commit(&self) -> bool {
        let state = self.state();
        !state.committing && state.pause.is_none_or(|until| until <= Instant::now())
    }

    pub(super) fn commit(&self, committer: &mpsc::Sender<Marks>, marks: Vec<(Arc<Partition>, Mark)>) {
        // Before it is sent: it may be done with at once.
        self.state().committing = true;
        if committer.send(marks).is_err() {
            self.state().committing = false;
        }
    }

    fn committed(&self, result: Result<(), KafkaError>, marks: Marks) {
        self.health().committed(result.as_ref().err().map(KafkaError::to_string));
        let mut state = self.state();
        state.committing = false;
        match result {
            Ok(()) => marks.into_iter().for_each(|(partition, mark)| partition.offsets().confirm(mark)),
            Err(error) => {
                tracing::debug!(target: "posthouse::kafka", %error, "a commit failed");
                state.pause = Some(Instant::now() + PAUSE);
            }
        }
        drop(state);
        self.poller.unpark();
    }

    fn assign(&self, client: &KafkaClient, list: &TopicPartitionList) {
        let mut asked = TopicPartitionList::new();
        for partition in list.elements() {
            asked.add_partition(partition.topic(), partition.partition());
        }
        if asked.count() > 0 {
            let found = client.committed_offsets(asked, LOOK_UP);
            if let Err(error) = &found {
                tracing::debug!(target: "posthouse::kafka", %error, "the group's offsets could not be looked up");
            }
            let queues = self.client.get().and_then(Weak::upgrade);
            for partition in list.elements() {
                let (topic, number) = (partition.topic(), partition.partition());
                let found = found.as_ref().ok().and_then(|list| list.find_partition(topic, number));
                // It panics at metadata that isn't text, which other clients may write.
                let metadata = found.as_ref().map(|found| catch_unwind(AssertUnwindSafe(|| found.metadata().to_owned())));
                let metadata = metadata.and_then(Result::ok).unwrap_or_default();
                let found = match found.map(|found| (found.error(), found.offset())) {
                    Some((Ok(()), Offset::Offset(offset))) => Found::Mark { offset, metadata: &metadata },
                    Some((Ok(()), _)) => Found::Nothing,
                    Some((Err(_), _)) | None => Found::Unknown,
                };
                let mut offsets = Offsets::new(found, self.ahead);
                if offsets.has_suspects()
                    && let Ok((_, end)) = client.fetch_watermarks(topic, number, LOOK_UP)
                {
                    offsets.ended_at(end);
                }
                let partition = Arc::new(Partition::new(topic, number, offsets, self.poller.clone()));
                // Before librdkafka begins to fetch, so that all its messages come here.
                let queue = queues.as_ref().and_then(|client| client.split_partition_queue(topic, number));
                let mut state = self.state();
                state.partitions.push(partition.clone());
                if let Some(mut queue) = queue {
                    let poller = self.poller.clone();
                    queue.set_nonempty_callback(move || poller.unpark());
                    state.assigned.push((partition, queue));
                }
            }
        }
        self.health().joined();
    }

    fn revoke(&self, client: &KafkaClient, list: &TopicPartitionList) {
        let leaving: Vec<_> = {
            let mut state = self.state();
            let leaves = |p: &mut Arc<Partition>| list.find_partition(&p.topic, p.number).is_some();
            let leaving = state.partitions.extract_if(.., leaves).collect();
            state.assigned.retain(|(partition, _)| list.find_partition(&partition.topic, partition.number).is_none());
            leaving
        };
        let lost = client.assignment_lost();
        leaving.iter().for_each(|partition| partition.leave());
        if lost {
            self.health().lost();
            tracing::warn!(target: "posthouse::kafka", partitions = leaving.len(), "the group has given this consumer's partitions to others");
            return;
        }
        let until = Instant::now() + self.let_finish;
        let running = || leaving.iter().map(|partition| partition.live()).sum::<usize>();
        // A commit on its way must not come after the last one.
        while running() > 0 || self.is_committing() && self.health().is_reachable() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    target: "posthouse::kafka",
                    messages = running(),
                    "handlers still run for partitions that go to another member; it waits for them, or finds their messages done"
                );
                break;
            }
            std::thread::park_timeout(left.min(Duration::from_millis(50)));
        }
        let marks: Vec<_> = leaving
            .into_iter()
            .filter_map(|partition| {
                let mark = partition.offsets().last(partition.live() > 0)?;
                Some((partition, mark))
            })
            .collect();
        // Where nobody can be reached it would wait long, in vain.
        if !marks.is_empty()
            && self.health().is_reachable()
            && let Err(error) = client.commit(&self::list(&marks), CommitMode::Sync)
        {
            tracing::debug!(target: "posthouse::kafka", %error, "the last commit of partitions failed; what is finished comes again");
        }
    }

    /// Nothing of any partition is begun from here on.
    pub(super) fn leave_all(&self) {
        let mut state = self.state();
        state.assigned.clear();
        for partition in state.partitions.drain(..) {
            partition.leave();
        }
    }
}

/// A thread that commits what it is sent, as librdkafka reports on a commit only to who waits for it. It ends with the sender.
pub(super) fn committer(client: &Arc<KafkaClient>) -> std::io::Result<mpsc::Sender<Marks>> {
    let client = Arc::downgrade(client);
    let (committer, to_commit) = mpsc::channel::<Marks>();
    let thread = std::thread::Builder::new().name("posthouse-kafka-commit".into());
    thread.spawn(move || {
        for mut marks in to_commit {
            let Some(client) = client.upgrade() else { return };
            marks.retain(|(partition, _)| !partition.is_gone());
            let result = if marks.is_empty() { Ok(()) } else { client.commit(&list(&marks), CommitMode::Sync) };
            client.context().committed(result, marks);
        }
    })?;
    Ok(committer)
}

fn list(marks: &[(Arc<Partition>, Mark)]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(marks.len());
    for (partition, mark) in marks {
        let mut entry = list.add_partition(&partition.topic, partition.number);
        // Only one that is not a number can't be set.
        let _ = entry.set_offset(Offset::Offset(mark.offset));
        entry.set_metadata(mark.metadata());
    }
    list
}

impl ClientContext for Group {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        crate::transport::kafka::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "posthouse::kafka", %error, "{reason}");
        self.health().error(error.rdkafka_error_code().unwrap_or(Code::Unknown), reason);
    }
}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, client: &KafkaClient, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => self.assign(client, list),
            Rebalance::Revoke(list) => self.revoke(client, list),
            Rebalance::Error(error) => {
                tracing::warn!(target: "posthouse::kafka", %error, "partitions could not be shared out");
            }
        }
    }
}
