//! One exchange: its channel, what is in flight on it, and what came of it.
//!
//! # Which message does an answer belong to?
//!
//! **Confirmations** name the message. **Returned messages** don't: lapin attaches each to the confirmation that it hands out
//! next, which with several in flight is often another message's (those of a `multiple` confirmation come in the order of a
//! hash table). So a returned message is recognised by its message id and routing key, and a positive confirmation counts
//! only when no return for that message can be under way any more. The broker sends the return before the confirmation, so
//! lapin attaches it, at the latest, within the batch of confirmations that it is handing out when the message's own comes.
//! [`Lane::settle`] therefore waits for lapin to finish that batch ([`fence`]), and reads what it brought, before it believes.
//! Of two messages in flight with one id and one routing key both count as returned: a duplicate at worst.
//!
//! **A closed channel** concerns everything that is unconfirmed on it, but is one message's fault. Each exchange has its own
//! channel, so another exchange's messages are never in flight on it. A missing exchange, or one without permission, fails all
//! of them, and a size limit those above it. Otherwise, the innocent ones must not be charged with an attempt: all go again on
//! a new channel, one at a time, until one is alone when the channel closes. Those that the broker had taken are sent twice.
//!
//! A new channel is *proven* by one message, sent alone, before it gets more. A missing exchange or permission shows there,
//! and costs one message's way instead of a whole batch's; and lapin holds nothing more for a channel that the broker has
//! closed, which would concern the other exchanges: for a publish after the channel's end the broker closes the connection.

use std::collections::{HashMap, VecDeque};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, Stream, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, timeout};

use super::answer::{self, Cause, Guilty};
use super::job::Job;
use super::link::{Link, Live};
use super::topology::{self, Topology};
use crate::transport::Outcome;

/// Messages in flight on one channel, and as many may wait for it: more than a relay's largest concurrency makes little sense,
/// as RabbitMQ's throughput no longer grows from some hundreds on.
pub(super) const IN_FLIGHT: usize = 4_096;

/// How often deadlines and blocking are looked at.
const TICK: Duration = Duration::from_millis(50);

/// An answer must be there this long before the deadline, so that it comes before the relay gives up.
const EARLY: Duration = Duration::from_millis(100);

/// How long messages that are in flight when the broker blocks publishing still wait for their confirmation.
const BLOCKED: Duration = Duration::from_secs(1);

/// How long a declaration that failed is not tried again.
const DECLARE_AGAIN: Duration = Duration::from_secs(1);

/// How long closing a channel may take.
const CLOSE: Duration = Duration::from_secs(1);

type Confirm = Pin<Box<dyn Future<Output = (u64, lapin::Result<Confirmation>)> + Send>>;

/// Publishes to one exchange.
pub(super) struct Lane {
    exchange: ShortString,
    link: Arc<Link>,
    jobs: mpsc::Receiver<Job>,
    /// To be sent, in order.
    waiting: VecDeque<Job>,
    /// To be sent one at a time: one of them may be what closed the channel.
    suspects: VecDeque<Job>,
    channel: Option<Open>,
    in_flight: HashMap<u64, Sent>,
    confirms: FuturesUnordered<Confirm>,
    /// Those in flight whose delivery has not been answered yet.
    unanswered: usize,
    published: u64,
    declared: HashMap<Topology, Declared>,
}

struct Open {
    live: Arc<Live>,
    channel: Arc<Channel>,
    /// Has confirmed something.
    proven: bool,
    /// What is in flight is a suspect.
    suspect: bool,
    /// The broker closes or has closed it.
    closing: bool,
    cause: Option<Cause>,
}

struct Sent {
    /// None when the delivery was answered before the confirmation came. It stays known, since lapin may attach another
    /// message's return to its confirmation.
    job: Option<Job>,
    at: Instant,
    returned: Option<String>,
}

enum Declared {
    Done,
    Failed(String, Instant),
}

impl Lane {
    pub(super) fn new(exchange: &str, link: Arc<Link>, jobs: mpsc::Receiver<Job>) -> Self {
        Self {
            exchange: ShortString::from(exchange),
            link,
            jobs,
            waiting: VecDeque::new(),
            suspects: VecDeque::new(),
            channel: None,
            in_flight: HashMap::new(),
            confirms: FuturesUnordered::new(),
            unanswered: 0,
            published: 0,
            declared: HashMap::new(),
        }
    }

    /// Runs until nobody can send to it any more and everything is answered.
    pub(super) async fn run(mut self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut arrived = Vec::new();
        let mut open = true;
        loop {
            self.publish().await;
            let backlog = self.waiting.len() + self.suspects.len();
            if !open && backlog + self.unanswered == 0 {
                break;
            }
            let room = (IN_FLIGHT * 2).saturating_sub(backlog + self.in_flight.len());
            tokio::select! {
                taken = self.jobs.recv_many(&mut arrived, room), if open && room > 0 => {
                    open = taken > 0;
                    self.waiting.extend(arrived.drain(..));
                }
                Some(confirmed) = self.confirms.next(), if !self.confirms.is_empty() => self.settle(confirmed),
                _ = ticks.tick(), if backlog + self.in_flight.len() > 0 => self.look_at_the_clock(),
            }
        }
        if let Some(open) = &self.channel
            && self.link.blocked().is_none()
        {
            let _ = timeout(CLOSE, open.channel.close(200, "OK".into())).await;
        }
    }

    /// Publishes what may be in flight, on a channel that is opened if there is none.
    async fn publish(&mut self) {
        self.look_at_the_channel();
        while let Some((job, suspect)) = self.next_job() {
            if let Some((reason, _)) = self.link.blocked() {
                job.delivery.unavailable(answer::blocked(&self.link, &reason));
                continue;
            }
            if let Err(why) = self.open().await {
                job.delivery.unavailable(why.clone());
                // The same would come of each of them.
                for job in self.suspects.drain(..).chain(self.waiting.drain(..)) {
                    job.delivery.unavailable(why.clone());
                }
                return;
            }
            let ready = match self.fits(&job) {
                Ok(()) => self.declare(&job).await,
                refused => refused,
            };
            match ready {
                Ok(()) => self.start(job, suspect),
                Err(outcome) => job.delivery.answer(outcome),
            }
            self.look_at_the_channel();
        }
    }

    /// The next message that may be in flight, and whether it is a suspect.
    fn next_job(&mut self) -> Option<(Job, bool)> {
        let (alone, closing) = self.channel.as_ref().map_or((true, false), |c| (!c.proven || c.suspect, c.closing));
        let limit = if alone || !self.suspects.is_empty() { 1 } else { IN_FLIGHT };
        if closing || self.unanswered >= limit {
            return None;
        }
        let suspect = self.suspects.pop_front().map(|job| (job, true));
        suspect.or_else(|| self.waiting.pop_front().map(|job| (job, false)))
    }

    /// A channel that is closed is left when it is known why, or when nothing on it waits for an answer.
    fn look_at_the_channel(&mut self) {
        let Some(open) = &mut self.channel else { return };
        if self.unanswered == 0 {
            open.suspect = false;
        }
        // Those in flight have an error to come.
        open.closing |= !open.channel.status().connected();
        if open.closing && (open.cause.is_some() || self.unanswered == 0) {
            let cause = open.cause.take();
            self.channel_closed(cause);
        }
    }

    /// Makes sure that there is a channel.
    async fn open(&mut self) -> Result<(), String> {
        if self.channel.is_some() {
            return Ok(());
        }
        let live = self.link.live().await?;
        let opening = async {
            let channel = live.open_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        };
        let channel = match timeout(self.link.call_timeout(), opening).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(e)) => return Err(format!("{} opened no channel: {e}", self.link.broker())),
            Err(_) => {
                return Err(format!(
                    "{} opened no channel within {:?} (connect_timeout)",
                    self.link.broker(),
                    self.link.call_timeout()
                ));
            }
        };
        self.declared.clear();
        self.channel =
            Some(Open { live, channel: Arc::new(channel), proven: false, suspect: false, closing: false, cause: None });
        Ok(())
    }

    fn forget_channel(&mut self) {
        self.channel = None;
        self.confirms = FuturesUnordered::new();
        self.in_flight.clear();
        self.unanswered = 0;
    }

    /// What is known not to fit is not sent: the broker would close the channel or the connection.
    fn fits(&self, job: &Job) -> Result<(), Outcome> {
        let Some(open) = &self.channel else { return Ok(()) };
        if let Some(max) = open.live.max_message_size()
            && job.payload.len() > max
        {
            return Err(Outcome::Rejected(answer::too_large(job.payload.len(), max).into()));
        }
        // A frame has 8 bytes around its content, and the content header's fixed part has 12.
        let max = open.live.frame_max().saturating_sub(20);
        if job.properties_size > max {
            return Err(Outcome::Rejected(answer::headers_too_large(job.properties_size, max).into()));
        }
        Ok(())
    }

    /// Declares what the route wants, once per channel, on a channel of its own: a conflict closes the channel it shows on.
    async fn declare(&mut self, job: &Job) -> Result<(), Outcome> {
        let Some(topology) = topology::wanted(&self.exchange, job) else { return Ok(()) };
        match self.declared.get(&topology) {
            Some(Declared::Done) => return Ok(()),
            Some(Declared::Failed(why, at)) if at.elapsed() < DECLARE_AGAIN => {
                return Err(Outcome::Retry { after: None, error: why.clone().into() });
            }
            _ => {}
        }
        let Some(live) = self.channel.as_ref().map(|open| open.live.clone()) else { return Ok(()) };
        let declared = timeout(self.link.call_timeout(), topology.declare(&live)).await;
        let error = match declared {
            Ok(Ok(())) => {
                self.declared.insert(topology, Declared::Done);
                return Ok(());
            }
            Ok(Err(e)) => e,
            Err(_) => {
                let why = format!("{} did not answer to a declaration within {:?}", self.link.broker(), self.link.call_timeout());
                return Err(Outcome::Unavailable(why.into()));
            }
        };
        match answer::cause(&error, &self.link) {
            Some(Cause::Channel { text, .. }) => {
                let why = topology.refused(&text);
                self.declared.insert(topology, Declared::Failed(why.clone(), Instant::now()));
                Err(Outcome::Retry { after: None, error: why.into() })
            }
            Some(Cause::Connection(why)) => Err(Outcome::Unavailable(why.into())),
            None => Err(Outcome::Unavailable(format!("{} is not reachable: {error}", self.link.broker()).into())),
        }
    }

    /// Hands a message to lapin when the returned future is polled, which the next look at the confirmations does.
    fn start(&mut self, job: Job, suspect: bool) {
        let Some(open) = &mut self.channel else { return };
        open.suspect |= suspect;
        self.published += 1;
        let number = self.published;
        let (channel, exchange, routing_key) = (open.channel.clone(), self.exchange.clone(), job.routing_key.clone());
        let (payload, properties) = (job.payload.clone(), job.properties.clone());
        self.confirms.push(Box::pin(async move {
            let options = BasicPublishOptions { mandatory: true, immediate: false };
            let sent = channel.basic_publish(exchange, routing_key, options, &payload, properties).await;
            let confirmed = match sent {
                Ok(confirm) => confirm.await,
                Err(e) => Err(e),
            };
            (number, confirmed)
        }));
        self.in_flight.insert(number, Sent { job: Some(job), at: Instant::now(), returned: None });
        self.unanswered += 1;
    }

    /// Takes in everything that lapin has handed out. See the module's documentation for why in this way.
    fn settle(&mut self, first: (u64, lapin::Result<Confirmation>)) {
        let mut round = vec![first];
        ready(&mut self.confirms, &mut round);
        while !round.is_empty() {
            if let Some(open) = &self.channel {
                fence(&open.channel);
            }
            let mut later = Vec::new();
            ready(&mut self.confirms, &mut later);
            for (_, confirmed) in round.iter().chain(&later) {
                self.note_return(confirmed);
            }
            for (number, confirmed) in round {
                self.conclude(number, confirmed);
            }
            round = later;
        }
        self.look_at_the_channel();
    }

    /// Marks the message that a confirmation brings back, which need not be the one it confirms.
    fn note_return(&mut self, confirmed: &lapin::Result<Confirmation>) {
        let Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) = confirmed else { return };
        let id = returned.delivery.properties.message_id().as_ref().map(ShortString::as_str);
        let key = &returned.delivery.routing_key;
        let is_it = |job: &Job| job.routing_key == *key && Some(job.delivery.message().message_id.as_str()) == id;
        for sent in self.in_flight.values_mut().filter(|sent| sent.job.as_ref().is_some_and(is_it)) {
            sent.returned = Some(format!("{} {}", returned.reply_code, returned.reply_text));
        }
    }

    fn conclude(&mut self, number: u64, confirmed: lapin::Result<Confirmation>) {
        let Some(open) = &mut self.channel else { return };
        if confirmed.is_ok() {
            open.proven = true;
            open.live.confirmed();
        }
        let error = match confirmed {
            Ok(confirmation) => {
                let Some(sent) = self.in_flight.remove(&number) else { return };
                // Answered already, before the confirmation came.
                let Some(job) = sent.job else { return };
                self.unanswered -= 1;
                let outcome = match (confirmation, sent.returned) {
                    (_, Some(why)) => {
                        // Its binding may have been removed since it was declared.
                        if let Some(topology) = topology::wanted(&self.exchange, &job) {
                            self.declared.remove(&topology);
                        }
                        answer::returned(&self.exchange, &job, &why)
                    }
                    (Confirmation::Ack(_), None) => Outcome::Delivered,
                    (Confirmation::Nack(_), None) => answer::nack(&self.exchange, &job),
                    // Can't be: each channel is in confirm mode before it is used.
                    (Confirmation::NotRequested, None) => Outcome::Unavailable("the channel is not in confirm mode".into()),
                };
                job.delivery.answer(outcome);
                return;
            }
            Err(error) => error,
        };
        open.closing = true;
        match answer::cause(&error, &self.link) {
            Some(cause) => {
                open.cause.get_or_insert(cause);
            }
            // Not sent, since the channel was closed already. The others' errors will say why.
            None => {
                if let Some(job) = self.in_flight.remove(&number).and_then(|sent| sent.job) {
                    self.unanswered -= 1;
                    self.waiting.push_front(job);
                }
            }
        }
    }

    /// The channel is gone, and so is the answer to everything unconfirmed on it.
    fn channel_closed(&mut self, cause: Option<Cause>) {
        let live = self.channel.as_ref().map(|open| open.live.clone());
        let alone = self.in_flight.len() == 1;
        let mut lost: Vec<_> = std::mem::take(&mut self.in_flight).into_iter().collect();
        lost.sort_unstable_by_key(|(number, _)| *number);
        let lost: Vec<Job> = lost.into_iter().filter_map(|(_, sent)| sent.job).collect();
        self.forget_channel();
        let (code, text) = match cause {
            None => {
                self.waiting.extend(lost);
                return;
            }
            Some(Cause::Connection(why)) => {
                for job in lost {
                    job.delivery.unavailable(why.clone());
                }
                return;
            }
            Some(Cause::Channel { code, text }) => (code, text),
        };
        let guilty = answer::guilty(code, &text);
        if let Guilty::Larger(max) = guilty
            && let Some(live) = live
        {
            live.set_max_message_size(max);
        }
        if matches!(guilty, Guilty::All) {
            // It holds for those that wait, too.
            for job in lost.into_iter().chain(self.suspects.drain(..)).chain(self.waiting.drain(..)) {
                let outcome = answer::channel_closed(&self.link, &self.exchange, &job, code, &text);
                job.delivery.answer(outcome);
            }
            return;
        }
        let mut innocent = VecDeque::new();
        for job in lost {
            let is_it = match &guilty {
                Guilty::All => true,
                Guilty::Larger(max) => job.payload.len() > *max,
                Guilty::RoutingKey(key) => job.routing_key.as_str() == key,
                Guilty::Unknown => alone,
            };
            if is_it || alone {
                let outcome = answer::channel_closed(&self.link, &self.exchange, &job, code, &text);
                job.delivery.answer(outcome);
            } else {
                innocent.push_back(job);
            }
        }
        match guilty {
            Guilty::Unknown => {
                innocent.append(&mut self.suspects);
                self.suspects = innocent;
            }
            _ => {
                innocent.append(&mut self.waiting);
                self.waiting = innocent;
            }
        }
    }

    /// Answers what will not be confirmed in time.
    fn look_at_the_clock(&mut self) {
        let (now, early) = (Instant::now(), EARLY);
        let late = |job: &Job| job.delivery.deadline().saturating_duration_since(now) <= early;
        let blocked = self.link.blocked().filter(|(_, since)| now.duration_since(*since) >= BLOCKED);
        let mut silent_since: Option<Instant> = None;
        for sent in self.in_flight.values_mut() {
            let why = match (&sent.job, &blocked) {
                (Some(_), Some((reason, _))) => answer::blocked(&self.link, reason),
                (Some(job), None) if late(job) => {
                    silent_since = silent_since.max(Some(sent.at));
                    format!("{} has not confirmed within {:.1?}", self.link.broker(), now.duration_since(sent.at))
                }
                _ => continue,
            };
            if let Some(job) = sent.job.take() {
                self.unanswered -= 1;
                job.delivery.unavailable(why);
            }
        }
        for queue in [&mut self.waiting, &mut self.suspects] {
            if !queue.iter().any(late) {
                continue;
            }
            for job in std::mem::take(queue) {
                if late(&job) {
                    job.delivery.unavailable(format!("{} took no message in time", self.link.broker()));
                } else {
                    queue.push_back(job);
                }
            }
        }
        if let (Some(open), Some(since)) = (&self.channel, silent_since) {
            open.live.give_up_if_silent_since(since);
        }
    }
}

/// Waits for lapin to finish the batch of confirmations that it is handing out, if any: it does that under a lock, which
/// `wait_for_confirms` takes at its first poll and releases. What that one waits for itself doesn't matter here.
fn fence(channel: &Channel) {
    // It returns messages only of confirmations that were dropped unread, of which there are none on a channel in use.
    let _ = channel.wait_for_confirms().now_or_never();
}

/// Takes everything that is ready. Ends only when the set had nothing more to poll: a set may also pause by itself, and says so
/// by waking its task.
fn ready<T>(confirms: &mut FuturesUnordered<impl Future<Output = T>>, into: &mut Vec<T>) {
    struct Woken(AtomicBool);
    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    let mut confirms = pin!(confirms);
    loop {
        match confirms.as_mut().poll_next(&mut context) {
            Poll::Ready(Some(confirmed)) => into.push(confirmed),
            Poll::Ready(None) => return,
            Poll::Pending if woken.0.swap(false, Ordering::SeqCst) => {}
            Poll::Pending => return,
        }
    }
}
