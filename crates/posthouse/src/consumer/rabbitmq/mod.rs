//! Consumes a RabbitMQ queue: subscribes, hands over what arrives, answers, and subscribes again when that has ended.

mod decode;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, BasicRejectOptions,
    QueueDeclareOptions,
};
use lapin::protocol::AMQPErrorKind;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::{Acker, Channel, ErrorKind};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::intake::{Answer, Answerable, Intake, Place};
use super::running::{self, Consumer, Loop};
use crate::Error;
use crate::error::storable;
use crate::inbox::Inbox;
use crate::message::MAX_NAME;
use crate::settings::{ConsumerOrder, ConsumerSettings, QueueType};
use crate::store::Backend;
use crate::transport::RabbitMqSettings;
use crate::transport::rabbitmq::link::{Link, Live};

/// How long after a subscription has ended it is tried again: at first, twice as long after each further try in vain, at most
/// [`PAUSE_CAP`]. From a half of it to all of it at random, so that the consumers of a broker don't come back together.
const PAUSE_FIRST: Duration = Duration::from_millis(200);
const PAUSE_CAP: Duration = Duration::from_secs(5);

/// Takes messages out of a RabbitMQ queue, has an [`Inbox`] handle each once, and acknowledges it after the commit.
///
/// ```no_run
/// # #[cfg(feature = "sqlite")]
/// # async fn f(inbox: posthouse::Inbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// use std::time::Duration;
/// use posthouse::consumer::RabbitMqConsumer;
///
/// let consumer = RabbitMqConsumer::new("amqp://localhost", "inventory.deduct")?
///     .start(&inbox) // which has the handlers: Inbox::on
///     .await?;
/// println!("{:?}", consumer.status());
/// consumer.shutdown(Duration::from_secs(30)).await;
/// # Ok(()) }
/// # fn main() {}
/// ```
///
/// # What is taken from where
///
/// | of the message | from |
/// |---|---|
/// | id | as the [settings](ConsumerSettings::id_from) say: by default the property `message_id`, then the header `posthouse-message-id`, then a CloudEvent's source and id |
/// | type | the property `type`, then the header `posthouse-type`, then a CloudEvent's type |
/// | key | the header `posthouse-key`, then a CloudEvent's `partitionkey` |
/// | content type | the property `content_type`; of a structured CloudEvent its data's |
/// | payload | the body; of a structured CloudEvent its data |
/// | [`Source`](crate::inbox::Source) | exchange and routing key under which it was published |
/// | redelivered | the broker's flag, or the header `x-delivery-count` above 0. `x-death` alone does not count: such a message was dead-lettered or waited in a delay queue, which kills no process |
///
/// Headers keep their names. A text stays as it is; so do bytes that are UTF-8. Everything else is written as JSON: numbers,
/// truth values, `null` (no value), arrays and tables at any depth, so that `x-death` can be read. A decimal is its digits, a
/// time its seconds. Bytes that aren't UTF-8 can't be a header: they are kept as `\x` and their hexadecimal digits, and the
/// message is set aside as FAILED with its payload.
///
/// These properties become headers, which replace headers of the same name; the first four are the names from which the
/// [`RabbitMq`](crate::transport::RabbitMq) transport takes them:
///
/// | property | header |
/// |---|---|
/// | `correlation_id` | `correlation-id` |
/// | `reply_to` | `amqp-reply-to` |
/// | `priority` | `amqp-priority` |
/// | `expiration` | `amqp-expiration` |
/// | `timestamp` | `amqp-timestamp`, in seconds since 1970 |
/// | `content_encoding` | `content-encoding` |
/// | `app_id` | `amqp-app-id` |
/// | `user_id` | `amqp-user-id` |
///
/// # What the broker is told
///
/// | what became of it | answer |
/// |---|---|
/// | its effect is committed, was before, or its failure is recorded (and will be run again from the copy, or is FAILED) | `basic.ack` |
/// | it has no id and [`MissingId::Reject`](crate::MissingId::Reject) is set | `basic.reject` without requeue: it goes to the queue's dead-letter exchange, if there is one |
/// | the database is away, so that it can be neither handled nor written down | after a pause (0.1 s to 30 s) `basic.nack` with requeue; see below for those that are kept instead |
/// | the process, the connection or the channel is gone | none: the broker delivers it again |
///
/// Instead of going back while the database is away, a message stays here unacknowledged, and is tried again after the same
/// pauses,
///
/// - if it was returned before in a quorum queue. Such a queue counts returns, and beyond its `delivery-limit` (20 from
///   RabbitMQ 4.0 on, if nothing else is set) it drops or dead-letters the message;
/// - if messages wait for each other ([`ConsumerOrder::Source`], [`ConsumerOrder::Key`]), because RabbitMQ would deliver
///   later ones meanwhile.
///
/// # The connection
///
/// A consumer has a connection of its own, on which at most [`prefetch`](ConsumerSettings::prefetch) messages are
/// unacknowledged. It subscribes again, after 0.1 s to 5 s, for as long as it takes: when the broker isn't there, also at the
/// start; when the connection is lost; when the broker closes the channel, for example because a message was not acknowledged
/// within its `consumer_timeout`; when the broker ends the subscription, because the queue was deleted or moved; and until the
/// queue is there. Meanwhile [`Consumer::status`] says so, and why. What was not acknowledged is delivered again; if
/// it had its effect, that is a duplicate. A peer that vanished without a word is noticed after two
/// [heartbeats](RabbitMqSettings::heartbeat), that is 20 s by default.
///
/// # Queues
///
/// Classic and quorum queues. With [`ConsumerOrder::Key`] or `Source` and several processes, make the queue a single active
/// consumer's (`x-single-active-consumer`): then one process gets all, and the next one takes over when it is gone. A consumer
/// that keeps an order gives back what it had in hand all at once, when it is done with what it was running, so that the order
/// holds across that. Streams are not supported: they know no negative acknowledgement.
///
/// One kind of message stops a consumer: one with a property or a header's *name* that isn't UTF-8, which the AMQP library
/// doesn't take. The consumer is not subscribed then, says so in its status, and tries again; the message stays in the queue
/// until somebody takes it out (or, in a quorum queue, until `delivery-limit`).
///
/// How long an id is kept by the inbox and how long a message may stay in a queue can't be compared here, as a queue doesn't
/// tell: mind it where messages are put into a queue again from an archive.
pub struct RabbitMqConsumer {
    link: Link,
    queue: ShortString,
    declare: Option<QueueType>,
    settings: ConsumerSettings,
}

impl fmt::Debug for RabbitMqConsumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqConsumer")
            .field("broker", &self.link.broker())
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

impl RabbitMqConsumer {
    /// A consumer of a queue; `broker` is a URL (`amqp://user:password@host:5672/vhost`, `amqps://` for TLS) or all of the
    /// connection's settings. Nothing is connected yet.
    ///
    /// # Errors
    /// [`Error::Config`] with every problem of the settings, [`Error::Invalid`] unless the queue's name has 1 to 255 bytes.
    pub fn new(broker: impl Into<RabbitMqSettings>, queue: impl Into<String>) -> Result<Self, Error> {
        let queue = queue.into();
        let link = Link::new(broker.into())?;
        match ShortString::try_new(queue.as_str()) {
            Ok(queue) if !queue.as_str().is_empty() => {
                Ok(Self { link, queue, declare: None, settings: ConsumerSettings::default() })
            }
            _ => Err(Error::invalid("queue", format!("its name has {} bytes, must have 1 to {MAX_NAME}", queue.len()))),
        }
    }

    /// Replaces the settings.
    #[must_use]
    pub fn settings(mut self, settings: ConsumerSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Declares the queue, durable and of this type, each time before subscribing. Without this, a queue that isn't there is
    /// waited for.
    #[must_use]
    pub fn declare(mut self, queue_type: QueueType) -> Self {
        self.declare = Some(queue_type);
        self
    }

    /// Starts consuming, and the inbox's retry worker with it. It doesn't fail when the broker is away, see
    /// [`Consumer::status`].
    ///
    /// # Errors
    /// [`Error::Config`] for settings that can't hold, [`Error::Schema`] if the inbox's tables are missing or too old.
    pub async fn start<DB: Backend>(self, inbox: &Inbox<DB>) -> Result<Consumer, Error> {
        Consumer::start(inbox, self.settings.clone(), |work| self.run(work)).await
    }

    async fn run(self, work: Loop) {
        let Loop { intake, link: report, mut stop } = work;
        let mut current = None;
        let deadline = tokio::select! {
            deadline = stop.asked() => deadline,
            never = self.keep_consuming(&intake, &report, &mut current) => match never {},
        };
        let limit = self.link.call_timeout();
        if let Some(subscription) = &mut current {
            subscription.wind_up(limit).await;
        }
        intake.stop(deadline).await;
        if let Some(subscription) = current {
            // What is still unacknowledged goes back with it.
            let _ = timeout(limit, subscription.channel.close(200, "OK".into())).await;
        }
        self.link.close().await;
    }

    async fn keep_consuming(&self, intake: &Intake, report: &running::Link, current: &mut Option<Subscription>) -> Infallible {
        let mut in_vain = 0;
        loop {
            let why = match self.subscribe(intake).await {
                Ok(subscription) => {
                    let subscription = current.insert(subscription);
                    report.up();
                    tracing::info!(queue = self.queue.as_str(), broker = self.link.broker(), "subscribed");
                    let since = Instant::now();
                    let why = self.consume(intake, subscription).await;
                    *current = None;
                    if since.elapsed() > PAUSE_CAP {
                        in_vain = 0;
                    }
                    why
                }
                Err(why) => why,
            };
            tracing::warn!(queue = self.queue.as_str(), error = why, "not subscribed");
            report.down(why);
            let pause = (PAUSE_FIRST * 2u32.pow(in_vain)).min(PAUSE_CAP);
            in_vain = (in_vain + 1).min(16);
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        }
    }

    async fn subscribe(&self, intake: &Intake) -> Result<Subscription, String> {
        let live = self.link.live().await?;
        let settings = intake.settings();
        let subscribing = async {
            let channel = live.open_channel().await?;
            if let Some(queue_type) = self.declare {
                let mut arguments = FieldTable::default();
                if queue_type == QueueType::Quorum {
                    arguments.insert("x-queue-type".into(), AMQPValue::LongString(LongString::from("quorum")));
                }
                let durable = QueueDeclareOptions { durable: true, ..Default::default() };
                channel.queue_declare(self.queue.clone(), durable, arguments).await?;
            }
            let prefetch = u16::try_from(settings.prefetch).unwrap_or(u16::MAX);
            channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
            let options = BasicConsumeOptions::default();
            let arriving = channel.basic_consume(self.queue.clone(), "".into(), options, FieldTable::default()).await?;
            Ok::<_, lapin::Error>((channel, arriving))
        };
        let limit = self.link.call_timeout();
        match timeout(limit, subscribing).await {
            Ok(Ok((channel, arriving))) => Ok(Subscription {
                arriving,
                channel,
                live: live.clone(),
                waiting: VecDeque::new(),
                in_order: settings.order != ConsumerOrder::None,
                ended: watch::Sender::new(()),
            }),
            Ok(Err(e)) => Err(self.lost(&e)),
            Err(_) => {
                // Who doesn't answer this may have vanished.
                self.link.close().await;
                Err(format!("{} did not take the subscription within {limit:?} (connect_timeout)", self.link.broker()))
            }
        }
    }

    /// Hands over what arrives, until the subscription has ended; why it has.
    async fn consume(&self, intake: &Intake, subscription: &mut Subscription) -> String {
        loop {
            tokio::select! {
                biased;
                // Listened to even when there is no room, as its end shows here; the prefetch bounds what can arrive.
                next = subscription.arriving.next() => match next {
                    Some(Ok(delivery)) => subscription.waiting.push_back(delivery),
                    Some(Err(e)) => return self.lost(&e),
                    None => {
                        return format!(
                            "{} ended the subscription of queue \"{}\": it was deleted, or has moved to another node",
                            self.link.broker(),
                            self.queue
                        );
                    }
                },
                place = intake.place(), if !subscription.waiting.is_empty() => {
                    if let Some(delivery) = subscription.waiting.pop_front() {
                        self.take(intake, place, delivery, subscription);
                    }
                }
            }
        }
    }

    fn take(&self, intake: &Intake, place: Place, delivery: Delivery, subscription: &Subscription) {
        let taken = Taken {
            acker: delivery.acker.clone(),
            in_order: subscription.in_order,
            was_returned: decode::returns(&delivery) > 0,
            ended: subscription.ended.subscribe(),
            limit: self.link.call_timeout(),
        };
        let incoming = decode::incoming(delivery, &intake.settings().id_from);
        intake.take(place, self.queue.as_str(), incoming, taken);
    }

    /// Why there is no subscription, or no longer.
    fn lost(&self, error: &lapin::Error) -> String {
        let (broker, queue) = (self.link.broker(), &self.queue);
        match error.kind() {
            ErrorKind::ProtocolError(e) if matches!(e.kind(), AMQPErrorKind::Hard(_)) => {
                format!("{broker} closed the connection: {}", storable(e.get_message().as_str(), 500))
            }
            ErrorKind::ProtocolError(e) => {
                let text = storable(e.get_message().as_str(), 500);
                match e.get_id() {
                    404 => format!(
                        "{broker} has no queue \"{queue}\" in virtual host {:?} ({text}); it is waited for: declare it, or correct \
                         the name",
                        self.link.vhost()
                    ),
                    403 => format!("{broker} refused queue \"{queue}\": {text}; grant the user the permission to read it"),
                    406 if text.contains("acknowledgement") => format!(
                        "{broker} gave up waiting for an acknowledgement and delivers again: {text}; raise its \
                         consumer_timeout, or lower prefetch or the inbox's handler_timeout"
                    ),
                    406 if self.declare.is_some() => {
                        format!(
                            "{broker} refused to declare queue \"{queue}\": {text}; agree with what is there, or don't declare it"
                        )
                    }
                    _ => format!("{broker} closed the channel of queue \"{queue}\": {text}"),
                }
            }
            ErrorKind::ParsingError(_) => format!(
                "a message in queue \"{queue}\" can't be read: a property or the name of a header is not UTF-8. Nothing is consumed \
                 until it is taken out of the queue by other means ({broker}: {error})"
            ),
            _ => format!("the connection to {broker} broke: {error}"),
        }
    }
}

/// One subscription, on a channel of its own.
struct Subscription {
    arriving: lapin::Consumer,
    channel: Channel,
    /// What has arrived and has no place yet.
    waiting: VecDeque<Delivery>,
    in_order: bool,
    /// Dropped or sent to when what is held for a while shall go back at once.
    ended: watch::Sender<()>,
    live: Arc<Live>,
}

impl Subscription {
    /// Takes nothing more. What isn't in the intake goes back at once, so that others can have it; but in order mode it goes
    /// back with what runs, when the channel is closed: otherwise another consumer could have later messages before those.
    async fn wind_up(&mut self, limit: Duration) {
        self.ended.send_replace(());
        if self.in_order {
            return;
        }
        let cancelling = async {
            self.channel.basic_cancel(self.arriving.tag(), BasicCancelOptions::default()).await?;
            while let Some(arrived) = self.arriving.next().await {
                self.waiting.push_back(arrived?);
            }
            for delivery in self.waiting.drain(..) {
                delivery.acker.nack(BasicNackOptions { requeue: true, ..Default::default() }).await?;
            }
            Ok::<_, lapin::Error>(())
        };
        match timeout(limit, cancelling).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::debug!(error = %e, "the subscription was gone before it could be cancelled"),
            Err(_) => tracing::debug!("the broker did not answer the cancellation of the subscription"),
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        // lapin would cancel the subscription first and close the channel then. Between the two another consumer could get
        // messages that come after those in hand.
        if self.in_order && self.channel.status().connected() {
            self.live.cut();
        }
    }
}

/// A delivery, to be answered on the channel that it came over: on another one its number means another message.
struct Taken {
    acker: Acker,
    in_order: bool,
    /// A quorum queue has counted a return of it.
    was_returned: bool,
    ended: watch::Receiver<()>,
    limit: Duration,
}

impl Answerable for Taken {
    fn answer(mut self: Box<Self>, answer: Answer) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Answer::Later(after) = answer {
                if self.in_order {
                    // It goes back with the channel.
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(after) => {}
                    _ = self.ended.changed() => {}
                }
            }
            let telling = async {
                match answer {
                    Answer::Done => self.acker.ack(BasicAckOptions::default()).await,
                    Answer::Refused(_) => self.acker.reject(BasicRejectOptions { requeue: false }).await,
                    Answer::Later(_) => self.acker.nack(BasicNackOptions { requeue: true, ..Default::default() }).await,
                }
            };
            match timeout(self.limit, telling).await {
                Ok(Ok(true)) => {}
                other => tracing::debug!(answer = ?other, "the channel is gone; the broker delivers the message again"),
            }
        })
    }

    fn stays(&self) -> bool {
        self.in_order || self.was_returned
    }
}
