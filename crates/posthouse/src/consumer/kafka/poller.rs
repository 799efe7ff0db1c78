//! The thread that polls: takes messages while there is room, commits what is finished, and looks how the brokers are.
//!
//! It is a thread of its own, as librdkafka calls back in it and it waits there: for handlers to finish when partitions are
//! revoked. It polls all the time, whether or not there is room, so slow handlers never make the group take it for dead:
//! messages have queues of their own by partition, which are polled only when there is.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use rdkafka::ClientConfig;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::{BorrowedMessage, Message as _};
use tokio::runtime::Handle;

use super::config::longest_pause;
use super::group::{Group, KafkaClient, Marks, committer};
use super::health::Health;
use super::partition::Partition;
use super::record::received;
use crate::consumer::decode::Received;
use crate::consumer::intake::{Intake, Place};
use crate::consumer::running::Link;
use crate::inbox::Source;
use crate::transport::kafka::settings::explain;

/// How long it waits for something to happen at most.
const TICK: Duration = Duration::from_millis(50);

/// How often finished offsets are committed; earlier when what may begin runs out.
const COMMIT: Duration = Duration::from_secs(1);

/// How often brokers are asked while something is wrong, and how long each time.
const ASK: Duration = Duration::from_secs(1);

/// How long a commit that is under way is waited for at the end.
const END_COMMIT: Duration = Duration::from_secs(3);

/// A commit allows to begin so many records beyond what was taken, or twice the prefetch: as many as take a while to use up.
const AHEAD: u32 = 1_000;

/// After so many messages in a row the events of the group are looked at.
const IN_A_ROW: usize = 500;

/// The pause before a new client, after one that can't go on; twice as long each time.
const NEW_CLIENT_FIRST: Duration = Duration::from_secs(1);
const NEW_CLIENT_CAP: Duration = Duration::from_secs(30);

/// What the thread shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Taking,
    /// Take nothing more, but stay in the group, as messages are running.
    Stopping,
    /// Commit and leave the group.
    Leaving,
    /// Leave at once.
    Abandoned,
}

/// Tells the thread. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Control(Arc<(AtomicU8, OnceLock<Thread>)>);

impl Control {
    pub(super) fn set(&self, phase: Phase) {
        self.0.0.fetch_max(phase as u8, SeqCst);
        if let Some(thread) = self.0.1.get() {
            thread.unpark();
        }
    }

    fn phase(&self) -> Phase {
        match self.0.0.load(SeqCst) {
            0 => Phase::Taking,
            1 => Phase::Stopping,
            2 => Phase::Leaving,
            _ => Phase::Abandoned,
        }
    }

    fn is_of_this_thread(&self) {
        // Set once, by the thread.
        let _ = self.0.1.set(std::thread::current());
    }
}

pub(super) struct Poller {
    pub(super) config: ClientConfig,
    pub(super) topics: Vec<String>,
    pub(super) intake: Intake,
    pub(super) link: Link,
    pub(super) control: Control,
    pub(super) runtime: Handle,
}

impl Poller {
    /// Polls until it shall leave.
    pub(super) fn run(self) {
        self.control.is_of_this_thread();
        // Handlers run there.
        let _runtime = self.runtime.enter();
        let mut pause = NEW_CLIENT_FIRST;
        loop {
            let why = match Session::start(&self) {
                Ok(mut session) => match session.run() {
                    Ok(()) => return,
                    Err(why) => {
                        session.client.context().leave_all();
                        why
                    }
                },
                Err(why) => why,
            };
            tracing::warn!(target: "posthouse::kafka", why, again_in = ?pause, "the consumer can't go on; a new client is made");
            self.link.down(why);
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if self.control.phase() >= Phase::Leaving {
                    return;
                }
                std::thread::park_timeout(TICK);
            }
            pause = (pause * 2).min(NEW_CLIENT_CAP);
        }
    }
}

/// A message that was read and not taken yet.
struct Read {
    offset: i64,
    received: Received,
}

/// The messages of a partition.
struct Queue {
    partition: Arc<Partition>,
    queue: PartitionQueue<Group>,
    read: VecDeque<Read>,
    /// Why it can't be read.
    held: Option<String>,
}

impl Queue {
    /// Reads a message if none is.
    fn read(&mut self) -> Option<i64> {
        if self.read.is_empty() {
            match self.queue.poll(Duration::ZERO) {
                None => {}
                Some(Ok(message)) => {
                    self.held = None;
                    self.read.push_back(read(&message));
                }
                Some(Err(error)) => {
                    let code = error.rdkafka_error_code();
                    let text = format!("topic {:?}, partition {}: {error}", self.partition.topic, self.partition.number);
                    tracing::debug!(target: "posthouse::kafka", "{text}");
                    if matches!(code, Some(Code::TopicAuthorizationFailed | Code::AutoOffsetReset)) {
                        self.held = Some(text);
                    }
                }
            }
        }
        self.next()
    }

    fn next(&self) -> Option<i64> {
        self.read.front().map(|read| read.offset)
    }
}

fn read(message: &BorrowedMessage<'_>) -> Read {
    Read { offset: message.offset(), received: received(message) }
}

/// One client's time.
struct Session<'a> {
    poller: &'a Poller,
    /// Before the client, as each has it.
    queues: Vec<Queue>,
    client: Arc<KafkaClient>,
    committer: mpsc::Sender<Marks>,
    /// Where to begin, so that each partition has its turn.
    turn: usize,
    place: Option<Place>,
    waiting: Option<BoxFuture<'static, Place>>,
    waker: Waker,
    committed: Instant,
    asked: Option<Instant>,
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<'a> Session<'a> {
    fn start(poller: &'a Poller) -> Result<Self, String> {
        let thread = std::thread::current();
        let brokers = poller.config.get("bootstrap.servers").unwrap_or_default();
        let ahead = i64::from(AHEAD.max(2 * poller.intake.settings().prefetch));
        let health = Health::new(poller.link.clone(), brokers);
        let group = Group::new(health, thread.clone(), ahead, longest_pause(&poller.config));
        let mut client: BaseConsumer<Group> = poller.config.create_with_context(group).map_err(|e| explain(&e))?;
        let woken = thread.clone();
        client.set_nonempty_callback(move || woken.unpark());
        let client = Arc::new(client);
        client.context().is_of(&client);
        client.subscribe(&poller.topics.iter().map(String::as_str).collect::<Vec<_>>()).map_err(|e| e.to_string())?;
        let committer = committer(&client).map_err(|e| format!("no thread could be started: {e}"))?;
        Ok(Self {
            poller,
            queues: Vec::new(),
            client,
            committer,
            turn: 0,
            place: None,
            waiting: None,
            waker: Waker::from(Arc::new(Unpark(thread))),
            committed: Instant::now(),
            asked: None,
        })
    }

    fn group(&self) -> &Group {
        self.client.context()
    }

    /// Until the poller shall leave; an error when this client can't go on.
    fn run(&mut self) -> Result<(), String> {
        loop {
            self.poll_group()?;
            let more = match self.poller.control.phase() {
                Phase::Taking => self.take(),
                Phase::Stopping => {
                    (self.place, self.waiting) = (None, None);
                    false
                }
                Phase::Leaving => {
                    self.end_commit();
                    return Ok(());
                }
                Phase::Abandoned => {
                    self.group().leave_all();
                    return Ok(());
                }
            };
            self.commit();
            self.ask();
            if !more {
                std::thread::park_timeout(TICK);
            }
        }
    }

    /// Events: partitions that come and go, reports of commits, errors. Messages have their own queues.
    fn poll_group(&mut self) -> Result<(), String> {
        let mut nothing = 0;
        // None is also the answer to an event that was dealt with.
        while nothing < 2 {
            match self.client.poll(Duration::ZERO) {
                None => nothing += 1,
                Some(Ok(message)) => {
                    let message = (message.topic().to_owned(), message.partition(), read(&message));
                    self.keep(message)?;
                }
                Some(Err(KafkaError::MessageConsumptionFatal(code))) => {
                    let why = self.client.client().fatal_error().map_or_else(|| code.to_string(), |(_, why)| why);
                    return Err(why);
                }
                // Its words went to the context.
                Some(Err(_)) => {}
            }
            self.queues.retain(|queue| !queue.partition.is_gone());
            for (partition, queue) in self.client.context().newly_assigned() {
                self.queues.push(Queue { partition, queue, read: VecDeque::new(), held: None });
            }
        }
        Ok(())
    }

    /// A message that came among the events. None should; one that was passed over would be lost.
    fn keep(&mut self, (topic, number, read): (String, i32, Read)) -> Result<(), String> {
        let mut queues = self.queues.iter_mut();
        match queues.find(|queue| queue.partition.topic == topic && queue.partition.number == number) {
            Some(queue) => {
                queue.read.push_back(read);
                Ok(())
            }
            None => Err(format!("a record of {topic}/{number} came, which this consumer has no queue for")),
        }
    }

    /// Takes messages while there is room; true when there may be more to take at once.
    fn take(&mut self) -> bool {
        let mut taken = 0;
        let mut wanted = false;
        loop {
            let before = taken;
            for n in 0..self.queues.len() {
                let at = (self.turn + n) % self.queues.len();
                match self.take_from(at) {
                    Take::Taken => taken += 1,
                    Take::Full => {
                        wanted = true;
                        self.turn = at;
                        break;
                    }
                    Take::Nothing => {}
                }
            }
            self.turn = self.turn.wrapping_add(usize::from(!wanted));
            if taken == before || wanted || taken >= IN_A_ROW {
                break;
            }
        }
        if wanted {
            return self.wait_for_place();
        }
        // Not kept from others while there is nothing to take.
        (self.place, self.waiting) = (None, None);
        taken >= IN_A_ROW
    }

    fn take_from(&mut self, at: usize) -> Take {
        let poller = self.poller;
        let partitions = self.queues.len();
        let queue = &mut self.queues[at];
        let Some(offset) = queue.read() else { return Take::Nothing };
        if !queue.partition.offsets().may_take(offset) || !has_room(&poller.intake, &queue.partition, partitions) {
            return Take::Nothing;
        }
        let Some(place) = self.place.take().or_else(|| poller.intake.place_now()) else { return Take::Full };
        let Some(Read { offset, received }) = queue.read.pop_front() else { return Take::Nothing };
        let partition = &queue.partition;
        let (taken, suspect) = partition.take(offset);
        let received = Received { redelivered: suspect, ..received };
        let source = Source::Kafka { topic: partition.topic.clone(), partition: partition.number, offset };
        let incoming = received.incoming(&poller.intake.settings().id_from, source);
        poller.intake.take(place, &partition.lane, incoming, taken);
        Take::Taken
    }

    /// Has this thread woken when there is room; true if there is by now.
    fn wait_for_place(&mut self) -> bool {
        let intake = &self.poller.intake;
        let waiting = self.waiting.get_or_insert_with(|| {
            let intake = intake.clone();
            Box::pin(async move { intake.place().await })
        });
        match Pin::new(waiting).poll(&mut Context::from_waker(&self.waker)) {
            Poll::Ready(place) => {
                (self.place, self.waiting) = (Some(place), None);
                true
            }
            Poll::Pending => false,
        }
    }

    fn commit(&mut self) {
        let urgent = self.queues.iter().any(|queue| queue.partition.offsets().is_urgent(queue.next()));
        if !urgent && self.committed.elapsed() < COMMIT || !self.group().may_commit() {
            return;
        }
        self.committed = Instant::now();
        let marks = self.queues.iter().filter_map(|queue| {
            let mark = queue.partition.offsets().due(queue.next())?;
            Some((queue.partition.clone(), mark))
        });
        let marks: Vec<_> = marks.collect();
        if !marks.is_empty() {
            self.group().commit(&self.committer, marks);
        }
    }

    /// Waits for the commit that is under way. The last one is made when the client closes, as for any partition that is left.
    fn end_commit(&self) {
        let until = Instant::now() + END_COMMIT;
        while Instant::now() < until && self.group().is_committing() && self.group().health().is_reachable() {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// While something is wrong, asks the brokers for the topics.
    fn ask(&mut self) {
        let held = self.queues.iter().find_map(|queue| queue.held.clone());
        if self.group().health().show(held.as_deref()) || self.asked.is_some_and(|asked| asked.elapsed() < ASK) {
            return;
        }
        let result = self.poller.topics.iter().try_for_each(|topic| {
            let found = self.client.fetch_metadata(Some(topic), ASK).map_err(|e| format!("can't be reached ({e})"))?;
            let Some(found) = found.topics().first() else { return Err("does not answer".into()) };
            let code = found.error().map(Code::from);
            match code {
                None if !found.partitions().is_empty() => Ok(()),
                None | Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::LeaderNotAvailable) => {
                    Err(format!("topic {topic:?} doesn't exist; create it or correct the consumer's topics"))
                }
                Some(Code::TopicAuthorizationFailed) => Err(format!(
                    "this user may not read topic {topic:?}; grant it READ and DESCRIBE on the topic, and READ on the group"
                )),
                Some(code) => Err(format!("topic {topic:?}: {code}")),
            }
        });
        self.asked = Some(Instant::now());
        let mut health = self.client.context().health();
        health.asked(result);
        health.show(held.as_deref());
    }
}

enum Take {
    Taken,
    /// There is one, and no room.
    Full,
    Nothing,
}

/// Whether this partition may have one more of the places. One whose messages are slow doesn't get the last quarter, which is
/// shared evenly, so that it can't hold up the others.
fn has_room(intake: &Intake, partition: &Partition, partitions: usize) -> bool {
    let prefetch = intake.settings().prefetch as usize;
    let free = prefetch.saturating_sub(intake.in_hand());
    free > prefetch / 4 || partition.live() < (prefetch / partitions).max(1)
}
