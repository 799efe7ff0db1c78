//! `nats:` destinations: messages into JetStream streams.

mod answer;
pub(crate) mod connection;
mod message;
mod pending;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::context::{PublishAckFuture, PublishError};
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::time::{Instant, sleep_until, timeout_at};

use self::connection::{Connection, Denied, Link};
pub use self::pending::NatsPending;
pub use self::settings::NatsSettings;
use super::{Delivery, Transport};
use crate::{Error, Route};

/// Sends messages to NATS JetStream: the address is the subject, and a stream must cover it.
///
/// # The message
/// The payload as it is, and the message's headers, except those named `Nats-…` (they tell the server what to do),
/// `Posthouse-…` and `Content-Type`, which are set here:
///
/// | header | value |
/// | --- | --- |
/// | `Nats-Msg-Id` | the message id, the same on every resend: within its duplicate window (2 minutes unless set) the stream keeps one |
/// | `Content-Type` | the message's content type |
/// | `posthouse-attempt` | which attempt this is, from 1 |
/// | `posthouse-type` | the message's type, if it has one |
/// | `posthouse-key` | the ordering key, if it has one |
///
/// In id, type and key, `%`, `"` and every byte that is not visible ASCII are percent-encoded. With
/// [`Route::cloudevents`](crate::Route::cloudevents) the attributes of a CloudEvent come as `ce-…` headers, or the payload is the whole event.
///
/// # The outcome
/// | what happens | outcome |
/// | --- | --- |
/// | the stream acknowledges, as a duplicate as well | delivered |
/// | no stream covers the subject; the account may not publish to it; the stream refuses (full with `discard: new`, sealed, …) | try again |
/// | larger than the server's `max_payload` or the stream's `max_msg_size`; no subject to publish to; headers not allowed in NATS | rejected |
/// | no connection: name not found, refused, TLS, wrong user; connection lost or no acknowledgement by the deadline; JetStream is down | unavailable |
///
/// # The connection
/// One, made when the first message is sent and again after it was lost. A server that falls silent is noticed within about 6 s.
/// In a cluster, list several servers in the URL: servers that the cluster announces are not used.
#[derive(Debug)]
pub struct Nats(Link);

impl Nats {
    /// Checks the settings. Connects when the first message is sent.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<NatsSettings>) -> Result<Self, Error> {
        Ok(Self(Link::new(settings.into())?))
    }
}

impl Transport for Nats {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Some(left) = batch.iter().map(Delivery::time_left).min() else { return };
            // A little earlier than the relay gives up, so that this answer, which says more, comes first.
            let deadline = Instant::now() + left - (left / 20).min(Duration::from_millis(100));
            let connection = match timeout_at(deadline, self.0.get()).await {
                Ok(Ok(connection)) => connection,
                Ok(Err(why)) => return unavailable(batch, &why),
                Err(_) => return unavailable(batch, &format!("no connection to {} by the deadline", self.0.servers)),
            };
            Batch::new(&self.0, connection, batch).send(deadline).await;
        })
    }

    fn check(&self, route: &Route) -> Result<(), String> {
        message::check_subject(super::address_of(&route.to))
    }

    /// Acknowledgements come one round trip and one disk write after the message, so many must be under way.
    fn concurrency(&self) -> u32 {
        1_000
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.0.close())
    }
}

fn unavailable(deliveries: impl IntoIterator<Item = Delivery>, why: &str) {
    for delivery in deliveries {
        delivery.unavailable(why);
    }
}

/// Deliveries that are sent together, over one connection.
struct Batch<'l> {
    link: &'l Link,
    connection: Arc<Connection>,
    /// None: answered.
    deliveries: Vec<Option<Delivery>>,
    /// How many are not answered yet.
    open: usize,
    /// Acknowledgements to come, with the position of their delivery.
    acks: FuturesUnordered<BoxFuture<'static, (usize, Acknowledged)>>,
}

type Acknowledged = <PublishAckFuture as IntoFuture>::Output;

impl<'l> Batch<'l> {
    fn new(link: &'l Link, connection: Arc<Connection>, batch: Vec<Delivery>) -> Self {
        let deliveries: Vec<_> = batch.into_iter().map(Some).collect();
        Self { link, connection, open: deliveries.len(), deliveries, acks: FuturesUnordered::new() }
    }

    /// Publishes all, then answers each as its acknowledgement comes.
    async fn send(mut self, deadline: Instant) {
        let connection = self.connection.clone();
        // From before the first is sent, so that no denial is missed.
        let mut denials = connection.denials();
        let mut lost = Box::pin(connection.lost());
        let mut late = std::pin::pin!(sleep_until(deadline));
        let published = tokio::select! {
            biased;
            () = self.publish() => Ok(()),
            why = &mut lost => Err(why),
            () = &mut late => Err(format!("{} takes no messages: nothing could be written by the deadline", self.link.servers)),
        };
        if let Err(why) = published {
            self.link.retire(&connection).await;
            return self.give_up(&why);
        }
        while self.open > 0 {
            tokio::select! {
                biased;
                Some((n, acknowledged)) = self.acks.next() => self.acknowledged(n, acknowledged),
                Ok(Denied(subject)) = denials.recv() => self.denied(&subject),
                why = &mut lost => {
                    let why = format!("{why} before the acknowledgement came, so whether the message is stored is unknown; it goes again");
                    return self.give_up(&why);
                }
                () = &mut late => {
                    // The library would remember the unanswered ones for as long as the connection lives.
                    self.link.retire(&connection).await;
                    let why = format!(
                        "no acknowledgement from {} by the deadline (relay.send_timeout): its stream has no leader or a slow disk, \
                         or no stream covers the subject and something else listens there",
                        self.link.servers
                    );
                    return self.give_up(&why);
                }
            }
        }
    }

    async fn publish(&mut self) {
        for n in 0..self.deliveries.len() {
            let Some(delivery) = &mut self.deliveries[n] else { continue };
            let message = match message::build(delivery) {
                Ok(message) => message,
                Err(why) => {
                    self.answer(n, |d| d.rejected(why));
                    continue;
                }
            };
            match self.connection.context.send_publish(delivery.address().to_owned(), message).await {
                Ok(ack) => self.acks.push(ack.into_future().map(move |acknowledged| (n, acknowledged)).boxed()),
                Err(e) => self.refused(n, &e),
            }
        }
    }

    fn acknowledged(&mut self, n: usize, acknowledged: Acknowledged) {
        match acknowledged {
            Ok(_) => self.answer(n, Delivery::delivered),
            Err(e) => self.refused(n, &e),
        }
    }

    fn refused(&mut self, n: usize, e: &PublishError) {
        let servers = self.link.servers.as_str();
        self.answer(n, |d| {
            let outcome = answer::of_error(d.address(), servers, e);
            d.answer(outcome);
        });
    }

    fn denied(&mut self, subject: &str) {
        let why = format!("this user may not publish to subject {subject:?}; grant it, or correct the route's `to`");
        for n in 0..self.deliveries.len() {
            if self.deliveries[n].as_ref().is_some_and(|d| d.address() == subject) {
                self.answer(n, |d| d.retry(&*why, None));
            }
        }
    }

    fn give_up(&mut self, why: &str) {
        unavailable(self.deliveries.iter_mut().filter_map(Option::take), why);
    }

    fn answer(&mut self, n: usize, how: impl FnOnce(Delivery)) {
        if let Some(delivery) = self.deliveries[n].take() {
            self.open -= 1;
            how(delivery);
        }
    }
}
