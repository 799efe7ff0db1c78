//! Messages out of a NATS JetStream stream.

mod durable;
mod hand;
mod message;

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::pull::BatchConfig;
use async_nats::jetstream::context::ContextBuilder;
use async_nats::jetstream::{Context, Message};
use async_nats::{Subject, Subscriber};
use futures_util::StreamExt;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, sleep_until, timeout};

use self::durable::Durable;
use self::hand::{Delivery, Hand};
use self::message::FromServer;
use super::Consumer;
use super::intake::Intake;
use super::running::{Link as Status, Loop, Stop};
use crate::Error;
use crate::inbox::Inbox;
use crate::settings::{ConsumerOrder, ConsumerSettings};
use crate::store::Backend;
use crate::transport::NatsSettings;
use crate::transport::nats::connection::{Connection, Denied, Link};

/// A question to the server must be answered within this time.
const ANSWERED: Duration = Duration::from_secs(5);

/// How long one request for messages stands.
const EXPIRES: Duration = Duration::from_secs(30);

/// The server says this often that a request stands, if it has no messages.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// After so long without a word it has forgotten the request.
const SILENCE: Duration = Duration::from_secs(12);

/// How long messages that are on their way may take to come in when the consumer stops, to be given back.
const DRAINED: Duration = Duration::from_secs(1);

/// When nothing came for so long, nothing is on its way, unless server or machine are very busy: such messages come again after
/// `ack_wait`.
const QUIET: Duration = Duration::from_millis(250);

/// The pause after a failure, twice as long after each further one in a row, and the longest.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_CAP: Duration = Duration::from_secs(5);

/// Consumes a NATS JetStream stream through a durable pull consumer.
///
/// ```no_run
/// # #[cfg(feature = "sqlite")]
/// # async fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// use posthouse::consumer::NatsConsumer;
///
/// let consumer = NatsConsumer::new("nats://localhost", "ORDERS", "inventory")?.start(&inbox).await?;
/// // …
/// consumer.shutdown(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// # fn main() {}
/// ```
///
/// Processes that consume by the same durable name share its messages out among themselves.
///
/// # The durable consumer
/// Made where it is missing, again too after it was deleted: all messages from the start of the stream (they are duplicates
/// where the inbox knows them), explicit acknowledgement, any number of deliveries, `ack_wait` long enough for a handler at its
/// deadline, `max_ack_pending` ten times [`prefetch`](ConsumerSettings::prefetch), at least 1 000. One that exists is used as
/// it is. It must be a pull consumer with explicit acknowledgement and payloads; if it isn't, the [status](Consumer::status)
/// says so. The stream must exist; until it does, that says so too.
///
/// # The message
/// | of the message | from |
/// |---|---|
/// | id | `Nats-Msg-Id`, else `posthouse-message-id`, else the CloudEvent's |
/// | type, key | `posthouse-type`, `posthouse-key`, else the CloudEvent's `type`, `partitionkey` |
/// | content type | `Content-Type` |
/// | headers | all; the values of one that comes several times are joined with `, ` |
///
/// Ids, types, keys and CloudEvents attributes are percent-decoded, as the [`Nats`](crate::transport::Nats) transport encodes
/// them. The client library reads headers in UTF-8 only: a message with others breaks the connection whenever it is delivered.
///
/// # The answer
/// | what the inbox says | answer to the server |
/// |---|---|
/// | settled: processed, a duplicate, recorded as failed | `+ACK`. It isn't confirmed; where it gets lost, the message is delivered again and is a duplicate |
/// | nothing could be written (the database is away) | `-NAK` with a delay, 0.1 s to 30 s |
/// | refused ([`MissingId::Reject`](crate::MissingId::Reject)) | `+TERM`: never delivered again |
/// | it runs, or waits to | `+WPI` three times in `ack_wait`, so that it is delivered to no other |
/// | this consumer stops before it ran, or while it does | `-NAK` |
/// | the process died | nothing: it is delivered again after `ack_wait`, and its run is written down before it begins |
///
/// An existing consumer's `max_deliver` ends deliveries after so many, whether or not the message was settled: it is lost for
/// this inbox then. A warning says so. With [`ConsumerOrder`](crate::ConsumerOrder), a message that was given back comes after
/// those that were delivered in the meantime.
///
/// # The connection
/// One, made again whenever it is lost; the answers to what is in hand go over the new one.
#[derive(Debug)]
#[must_use = "it does nothing before it is started"]
pub struct NatsConsumer {
    link: Link,
    stream: String,
    durable: String,
    subjects: Vec<String>,
    settings: ConsumerSettings,
}

impl NatsConsumer {
    /// The consumer `durable` of a stream. Takes a URL or [`NatsSettings`]. Doesn't connect here.
    ///
    /// # Errors
    /// [`Error::Config`] for settings and names that can't hold.
    pub fn new(server: impl Into<NatsSettings>, stream: impl Into<String>, durable: impl Into<String>) -> Result<Self, Error> {
        let (stream, durable) = (stream.into(), durable.into());
        for (what, name) in [("stream", &stream), ("durable", &durable)] {
            check_name(name).map_err(|why| Error::Config(format!("{what}: {name:?} {why}")))?;
        }
        let link = Link::new(server.into())?;
        Ok(Self { link, stream, durable, subjects: Vec::new(), settings: ConsumerSettings::default() })
    }

    /// Only messages of these subjects (`orders.*`); all by default. Goes into a durable consumer that is made; one that exists
    /// keeps its own.
    pub fn subjects<S: Into<String>>(mut self, subjects: impl IntoIterator<Item = S>) -> Self {
        self.subjects = subjects.into_iter().map(Into::into).collect();
        self
    }

    /// How messages are taken: how many at once, in which order, by which id.
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Starts consuming, and the inbox's retry worker. The server may be away: it is asked again until it is there.
    ///
    /// # Errors
    /// [`Error::Config`] for settings that can't hold, [`Error::Schema`] if the tables are missing or too old.
    pub async fn start<DB: Backend>(self, inbox: &Inbox<DB>) -> Result<Consumer, Error> {
        let wanted = Wanted {
            stream: self.stream,
            durable: self.durable,
            subjects: self.subjects,
            // Even where nobody can say that it is being worked on, it comes again only when its run has ended.
            ack_wait: inbox.settings().run_lease(),
            prefetch: self.settings.prefetch,
        };
        let link = self.link;
        Consumer::start(inbox, self.settings, move |Loop { intake, link: status, stop }| {
            let prefetch = wanted.prefetch as usize;
            let spare = prefetch - intake.settings().concurrency as usize;
            let step = (prefetch / 4).min(spare + 1).max(1);
            let subscription = Subscription {
                link,
                wanted,
                intake,
                status,
                hand: Hand::new(),
                prefetch,
                step,
                last: None,
                life: 0,
                good: false,
            };
            subscription.run(stop)
        })
        .await
    }
}

/// A name that the server allows for streams and consumers.
fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > 255 {
        return Err("must have 1 to 255 bytes".into());
    }
    if name.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '.' | '*' | '>' | '/' | '\\')) {
        return Err("must have no full stop, *, >, slash, backslash or white space".into());
    }
    Ok(())
}

/// What is consumed, and how its durable consumer is made.
#[derive(Debug)]
struct Wanted {
    stream: String,
    durable: String,
    subjects: Vec<String>,
    ack_wait: Duration,
    prefetch: u32,
}

struct Subscription {
    link: Link,
    wanted: Wanted,
    intake: Intake,
    status: Status,
    hand: Hand,
    prefetch: usize,
    /// Messages are asked for when there is room for so many: not each by itself, and before handlers run out of them.
    step: usize,
    /// The durable consumer as it was last seen.
    last: Option<Durable>,
    /// Counts the consumers of this name that were made one after the other.
    life: u64,
    /// It was subscribed since the last failure.
    good: bool,
}

/// A pull subscription that stands.
struct Session {
    connection: Arc<Connection>,
    context: Context,
    subscriber: Subscriber,
    inbox: Subject,
}

impl Subscription {
    async fn run(mut self, mut stop: Stop) {
        let mut pause = PAUSE;
        let mut said = String::new();
        let deadline = loop {
            let why = tokio::select! {
                biased;
                deadline = stop.asked() => break deadline,
                session = self.subscribe() => match session {
                    Ok(session) => match self.consume(session, &mut stop).await {
                        Ok(()) => return,
                        Err(why) => why,
                    },
                    Err(why) => why,
                },
            };
            self.hand.down();
            if std::mem::take(&mut self.good) {
                pause = PAUSE;
                said.clear();
            }
            if why != said {
                let Wanted { stream, durable, .. } = &self.wanted;
                tracing::warn!(stream, durable, servers = self.link.servers, why, "not subscribed; trying again");
                said.clone_from(&why);
            }
            self.status.down(why);
            tokio::select! {
                biased;
                deadline = stop.asked() => break deadline,
                () = sleep(pause) => pause = (pause * 2).min(PAUSE_CAP),
            }
        };
        // Nobody hears the answers; what they are about is delivered again.
        self.hand.close();
        self.intake.stop(deadline).await;
        self.link.close().await;
    }

    async fn subscribe(&mut self) -> Result<Session, String> {
        let connection = self.link.get().await?;
        let client = connection.context.client();
        let context = ContextBuilder::new().timeout(ANSWERED).build(client.clone());
        let mut denials = connection.denials();
        let found = tokio::select! {
            biased;
            why = connection.lost() => return Err(why),
            Ok(denied) = denials.recv() => return Err(not_allowed(&denied)),
            found = durable::find_or_make(&context, &self.wanted) => found?,
        };
        if self.last.as_ref().is_none_or(|last| last.created != found.created) {
            self.life += 1;
            self.warn_of_limits(&found);
        }
        self.last = Some(found);
        let inbox = Subject::from(client.new_inbox());
        let subscriber = client.subscribe(inbox.clone()).await.map_err(|e| e.to_string())?;
        self.hand.open(client, self.life);
        self.status.up();
        Ok(Session { connection, context, subscriber, inbox })
    }

    fn warn_of_limits(&self, found: &Durable) {
        let Wanted { stream, durable, .. } = &self.wanted;
        if let Some(max_deliver) = found.max_deliver {
            tracing::warn!(
                stream,
                durable,
                max_deliver,
                "a message that was delivered max_deliver times is not delivered again, settled or not: it is lost for this inbox; \
                 set max_deliver to -1"
            );
        }
        self.intake.sink().retention_at_least(found.max_age, &format!("max_age of stream {stream}"));
    }

    /// Takes messages until it shall stop, which it then has.
    ///
    /// # Errors
    /// Why the subscription ended.
    async fn consume(&mut self, mut session: Session, stop: &mut Stop) -> Result<(), String> {
        let connection = session.connection.clone();
        let mut denials = connection.denials();
        let mut lost = std::pin::pin!(connection.lost());
        let mut progress = self.progress();
        let mut asked = 0_usize;
        let mut heard = Instant::now();
        loop {
            let room = self.prefetch.saturating_sub(self.hand.len() + asked);
            if room >= self.step {
                if asked == 0 {
                    heard = Instant::now();
                }
                asked += self.ask(&session, room).await?;
            }
            tokio::select! {
                biased;
                deadline = stop.asked() => {
                    self.stop(session, asked, deadline).await;
                    return Ok(());
                }
                why = &mut lost => return Err(why),
                Ok(denied) = denials.recv() => return Err(not_allowed(&denied)),
                _ = progress.tick() => {
                    self.hand.progress().await;
                    if self.hand.len() > 0 {
                        self.still_the_same(&session).await?;
                    }
                }
                message = session.subscriber.next() => {
                    let Some(message) = message else { return Err("the subscription ended".into()) };
                    heard = Instant::now();
                    self.good = true;
                    match FromServer::read(message, &session.context)? {
                        FromServer::Message(message) => {
                            asked = asked.saturating_sub(1);
                            self.take(*message).await;
                        }
                        FromServer::Expired(left) => asked = asked.saturating_sub(left.unwrap_or(asked)),
                        FromServer::Alive => {}
                    }
                }
                () = self.hand.freed() => self.hand.give_back().await,
                () = sleep_until(heard + SILENCE), if asked > 0 => {
                    return Err(format!("{} said nothing for {SILENCE:?}", self.link.servers));
                }
            }
        }
    }
}

impl Subscription {
    /// Asks for up to so many messages, and says for how many.
    async fn ask(&self, session: &Session, messages: usize) -> Result<usize, String> {
        let limits = self.last.as_ref().map_or((usize::MAX, Duration::MAX), |last| (last.max_batch, last.max_expires));
        let batch = messages.min(limits.0);
        let expires = EXPIRES.min(limits.1);
        let request =
            BatchConfig { batch, expires: Some(expires), idle_heartbeat: HEARTBEAT.min(expires / 2), ..BatchConfig::default() };
        let request = serde_json::to_vec(&request).map_err(|e| e.to_string())?;
        let subject = format!("$JS.API.CONSUMER.MSG.NEXT.{}.{}", self.wanted.stream, self.wanted.durable);
        let client = session.connection.context.client();
        client.publish_with_reply(subject, session.inbox.clone(), request.into()).await.map_err(|e| e.to_string())?;
        Ok(batch)
    }

    async fn take(&self, message: Message) {
        // There is one, or will be in a moment: no more are asked for than there is room.
        let place = self.intake.place().await;
        let Some(reply) = message.reply.clone() else { return };
        let in_order = self.intake.settings().order != ConsumerOrder::None;
        let delivery = self.hand.hold(reply, self.life, in_order);
        let incoming = message::incoming(message, &self.intake.settings().id_from);
        self.intake.take(place, &self.wanted.stream, incoming, delivery);
    }

    /// Ticks three times in the time after which the server delivers again.
    fn progress(&self) -> Interval {
        let ack_wait = self.last.as_ref().map_or(self.wanted.ack_wait, |last| last.ack_wait);
        let mut progress = interval((ack_wait / 3).max(Duration::from_millis(10)));
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        progress
    }

    /// Makes sure that what is in hand was delivered by the consumer that is there now, also while nothing is asked for.
    async fn still_the_same(&self, session: &Session) -> Result<(), String> {
        let created = durable::created(&session.context, &self.wanted).await?;
        if created.is_some() && created == self.last.as_ref().map(|last| last.created) {
            return Ok(());
        }
        Err(format!("the consumer {:?} of the stream {:?} was deleted", self.wanted.durable, self.wanted.stream))
    }

    /// Takes nothing more, gives back what isn't running, and closes the connection when what runs has its answer.
    async fn stop(&mut self, mut session: Session, asked: usize, deadline: Instant) {
        let (hand, connection) = (&self.hand, session.connection.clone());
        let given_back = async {
            let late = self.late(&mut session, asked).await;
            drop(late);
            hand.give_back().await;
        };
        let mut progress = self.progress();
        let telling = async {
            loop {
                progress.tick().await;
                hand.progress().await;
            }
        };
        let mut stopped = std::pin::pin!(async { tokio::join!(self.intake.stop(deadline), given_back) });
        tokio::select! {
            _ = &mut stopped => {}
            () = telling => {}
            _ = connection.lost() => {
                hand.close();
                stopped.await;
            }
        }
        // What gave up waiting in the meantime, and what was ended at the deadline.
        hand.give_back().await;
        hand.close();
        self.link.close().await;
    }
}

impl Subscription {
    /// Ends the subscription, with what comes in meanwhile: what the server has begun to send would be lost to one that ends at
    /// once, until `ack_wait` is over; and given back before the end it would come here again.
    async fn late(&self, session: &mut Session, asked: usize) -> Vec<Delivery> {
        let mut late = Vec::new();
        let until = Instant::now() + DRAINED;
        while late.len() < asked && Instant::now() < until && self.one_more(session, QUIET, &mut late).await {}
        let _ = session.subscriber.drain().await;
        while self.one_more(session, DRAINED, &mut late).await {}
        late
    }

    /// False when nothing comes for so long, or ever again.
    async fn one_more(&self, session: &mut Session, patience: Duration, late: &mut Vec<Delivery>) -> bool {
        let Ok(Some(message)) = timeout(patience, session.subscriber.next()).await else { return false };
        if let Ok(FromServer::Message(message)) = FromServer::read(message, &session.context)
            && let Some(reply) = message.reply.clone()
        {
            late.push(self.hand.hold(reply, self.life, false));
        }
        true
    }
}

fn not_allowed(Denied(subject): &Denied) -> String {
    format!("this user may not publish to {subject:?}; a consumer needs $JS.API.STREAM.INFO, $JS.API.CONSUMER and $JS.ACK")
}
