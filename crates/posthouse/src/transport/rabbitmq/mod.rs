//! `amqp:` destinations: RabbitMQ, by AMQP 0-9-1 with publisher confirms.

mod address;
mod answer;
mod job;
mod lane;
pub(crate) mod link;
mod queues;
mod settings;
mod topology;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::job::Job;
#[cfg(feature = "inbox")]
pub(crate) use self::job::{CORRELATION_ID, EXPIRATION, PRIORITY, REPLY_TO};
use self::lane::{IN_FLIGHT, Lane};
use self::link::Link;
pub use self::queues::RabbitMqQueues;
pub use self::settings::RabbitMqSettings;
use super::{Delivery, Transport};
use crate::{Error, Route};

/// Exchanges with a channel of their own at a time. The one that was not used for longest gives its channel up for another:
/// names of exchanges come from publishers, and RabbitMQ allows 2 047 channels per connection.
const LANES: usize = 64;

/// How long closing waits for what is in flight: longer than any delivery does with the default `relay.send_timeout`.
const CLOSE: Duration = Duration::from_secs(12);

/// Sends messages to RabbitMQ, by AMQP 0-9-1.
///
/// # The address
/// `exchange/routing.key`; the routing key is everything after the first `/`, may be empty and may contain `/`. Without an
/// exchange, `/queue`, the message goes straight into a queue. Exchanges and queues must be there, unless the route says
/// [`declare`](crate::RabbitMqRoute::declare).
///
/// # The message
/// The body is the payload.
///
/// | property | value |
/// | --- | --- |
/// | `message_id` | the message id, the same on every resend |
/// | `type` | the message's type, if it has one |
/// | `content_type` | the media type of the payload |
/// | `timestamp` | when it was published, by the database's clock, in seconds |
/// | `delivery_mode` | 2 (persistent), unless the route says otherwise |
/// | `app_id` | the route's |
/// | `correlation_id` | the message header `correlation-id` |
/// | `reply_to` | the message header `amqp-reply-to` |
/// | `priority` | the message header `amqp-priority`, or the route's |
/// | `expiration` | the message header `amqp-expiration` (milliseconds), or the route's |
///
/// Headers are, later ones replacing earlier ones: the route's with their types, the message's as text (except those in the
/// table above), CloudEvents attributes as `cloudEvents:NAME`, `posthouse-key` (text) and `posthouse-attempt` (integer, from
/// 1). `CC` and `BCC`, by which RabbitMQ routes, can be set only by the route.
///
/// # The outcome
/// Every message is published as mandatory and with publisher confirms.
///
/// | answer | outcome |
/// | --- | --- |
/// | confirmed, and not returned | delivered |
/// | returned: no queue is bound | try again |
/// | negative confirm: a queue is full (`reject-publish`) or failed | try again |
/// | exchange missing, permission missing, declaration in conflict | try again |
/// | payload over `max_message_size`, headers over `frame_max`, a name over 255 bytes | rejected |
/// | no connection: refused, name not found, login or virtual host refused | unavailable |
/// | connection lost, publishing blocked (memory or disk alarm), no confirm in time | unavailable |
///
/// # Connection and channels
/// One connection, made when a message needs it, with a channel for each exchange, so that what closes a channel concerns one
/// exchange's messages only.
pub struct RabbitMq {
    link: Arc<Link>,
    lanes: Mutex<Lanes>,
}

#[derive(Default)]
struct Lanes {
    open: HashMap<String, Entrance>,
    /// Counts uses, to find the lane that was not used for longest.
    uses: u64,
    tasks: JoinSet<()>,
    closed: bool,
}

/// Where messages for one exchange are handed in.
struct Entrance {
    jobs: mpsc::Sender<Job>,
    used: u64,
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMq").field("broker", &self.link.broker()).finish_non_exhaustive()
    }
}

impl RabbitMq {
    /// Checks the settings. Connects when the first message is sent.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<RabbitMqSettings>) -> Result<Self, Error> {
        Ok(Self { link: Arc::new(Link::new(settings.into())?), lanes: Mutex::default() })
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entrance for an exchange; None when this transport is closed.
    fn entrance(&self, exchange: &str) -> Option<mpsc::Sender<Job>> {
        let mut lanes = self.lanes();
        while lanes.tasks.try_join_next().is_some() {}
        if lanes.closed {
            return None;
        }
        lanes.uses += 1;
        let used = lanes.uses;
        if let Some(entrance) = lanes.open.get_mut(exchange)
            && !entrance.jobs.is_closed()
        {
            entrance.used = used;
            return Some(entrance.jobs.clone());
        }
        if lanes.open.len() >= LANES
            && let Some(oldest) = lanes.open.iter().min_by_key(|(_, entrance)| entrance.used).map(|(name, _)| name.clone())
        {
            // It answers what it has and ends.
            lanes.open.remove(&oldest);
        }
        let (jobs, arriving) = mpsc::channel(IN_FLIGHT);
        let lane = Lane::new(exchange, self.link.clone(), arriving);
        lanes.tasks.spawn(lane.run());
        lanes.open.insert(exchange.to_owned(), Entrance { jobs: jobs.clone(), used });
        Some(jobs)
    }
}

impl Transport for RabbitMq {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut by_exchange: HashMap<String, Vec<Job>> = HashMap::new();
            for (exchange, job) in batch.into_iter().filter_map(Job::new) {
                by_exchange.entry(exchange).or_default().push(job);
            }
            // Side by side, so that one exchange's full queue holds up no other's messages.
            join_all(by_exchange.into_iter().map(|(exchange, jobs)| async move {
                let entrance = self.entrance(&exchange);
                for job in jobs {
                    let refused = match &entrance {
                        Some(entrance) => entrance.send(job).await.err().map(|e| e.0),
                        None => Some(job),
                    };
                    if let Some(job) = refused {
                        job.delivery.unavailable("the connection to RabbitMQ is being closed");
                    }
                }
            }))
            .await;
        })
    }

    fn check(&self, route: &Route) -> Result<(), String> {
        job::check(route)
    }

    fn concurrency(&self) -> u32 {
        1_000
    }

    fn blocked(&self) -> Option<String> {
        self.link.blocked().map(|(reason, _)| reason)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let mut tasks = {
                let mut lanes = self.lanes();
                lanes.closed = true;
                lanes.open.clear();
                std::mem::take(&mut lanes.tasks)
            };
            let drained = async { while tasks.join_next().await.is_some() {} };
            if tokio::time::timeout(CLOSE, drained).await.is_err() {
                tracing::warn!("messages to RabbitMQ are still unconfirmed; they will be sent again");
            }
            self.link.close().await;
        })
    }
}
