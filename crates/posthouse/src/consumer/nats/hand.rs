//! Deliveries that are not answered yet: their answers, and the word to the server that they are being worked on.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::jetstream::AckKind;
use async_nats::{Client, Subject};
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::consumer::intake::{Answer, Answerable};

/// How long an answer waits for a connection. By then the message has usually been delivered again.
const PATIENCE: Duration = Duration::from_secs(60);

/// All deliveries of a consumer that are not answered. Cheap to clone.
#[derive(Clone)]
pub(super) struct Hand(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// One fewer is held.
    freed: Notify,
    way: watch::Sender<Way>,
}

#[derive(Default)]
struct State {
    next: u64,
    held: HashMap<u64, Reply>,
    /// Dropped unanswered.
    dropped: Vec<Reply>,
}

/// Where answers to one delivery go.
#[derive(Clone)]
struct Reply {
    subject: Subject,
    /// Which life of the durable consumer delivered it. One that was deleted and made again gives the same numbers to other
    /// messages, so an answer to a delivery of its former life would be taken for an answer to one of those.
    life: u64,
}

/// How answers get to the server.
enum Way {
    /// Not at the moment.
    Down,
    /// By this connection, for deliveries of this life.
    Open { client: Client, life: u64 },
    /// Not any more.
    Closed,
}

impl fmt::Debug for Hand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hand").field("held", &self.len()).finish_non_exhaustive()
    }
}

impl Hand {
    pub(super) fn new() -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), freed: Notify::new(), way: watch::Sender::new(Way::Down) }))
    }

    pub(super) fn len(&self) -> usize {
        self.state().held.len()
    }

    /// Resolves when fewer are held than before; perhaps once without a reason.
    pub(super) async fn freed(&self) {
        self.0.freed.notified().await;
    }

    /// Answers go this way from now on.
    pub(super) fn open(&self, client: Client, life: u64) {
        self.0.way.send_replace(Way::Open { client, life });
    }

    /// Answers wait.
    pub(super) fn down(&self) {
        self.0.way.send_replace(Way::Down);
    }

    /// Answers are dropped.
    pub(super) fn close(&self) {
        self.0.way.send_replace(Way::Closed);
    }

    /// `in_order`: it keeps its place before later ones, and isn't given back while it can be tried again here.
    pub(super) fn hold(&self, subject: Subject, life: u64, in_order: bool) -> Delivery {
        let reply = Reply { subject, life };
        let mut state = self.state();
        state.next += 1;
        let id = state.next;
        state.held.insert(id, reply.clone());
        Delivery { hand: self.clone(), id, reply, in_order, answered: false }
    }

    /// Says of everything that is held that it is being worked on.
    pub(super) async fn progress(&self) {
        let held = self.state().held.values().cloned().collect();
        self.say(held, AckKind::Progress).await;
    }

    /// Gives back what was dropped unanswered.
    pub(super) async fn give_back(&self) {
        let dropped = std::mem::take(&mut self.state().dropped);
        self.say(dropped, AckKind::Nak(None)).await;
    }

    async fn say(&self, of: Vec<Reply>, kind: AckKind) {
        let (client, life) = match &*self.0.way.borrow() {
            Way::Open { client, life } => (client.clone(), *life),
            // What comes again in any case.
            Way::Down | Way::Closed => return,
        };
        for reply in of.into_iter().filter(|reply| reply.life == life) {
            publish(&client, reply.subject, kind).await;
        }
    }

    async fn answer(&self, id: u64, reply: &Reply, kind: AckKind) {
        let mut ways = self.0.way.subscribe();
        let client = match ways.wait_for(|way| !matches!(way, Way::Down)).await.as_deref() {
            Ok(Way::Open { client, life }) if *life == reply.life => client.clone(),
            _ => return,
        };
        // From here on it isn't said to be worked on, which would undo a delay.
        self.let_go(id);
        publish(&client, reply.subject.clone(), kind).await;
    }

    fn let_go(&self, id: u64) {
        if self.state().held.remove(&id).is_some() {
            self.0.freed.notify_one();
        }
    }

    /// Nothing panics while it is locked.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn publish(client: &Client, subject: Subject, kind: AckKind) {
    if let Err(e) = client.publish(subject, kind.into()).await {
        // It is delivered again.
        tracing::debug!(error = %e, "an answer did not get to the server");
    }
}

/// One delivery. Dropped unanswered it is given back by [`Hand::give_back`].
pub(super) struct Delivery {
    hand: Hand,
    id: u64,
    reply: Reply,
    in_order: bool,
    answered: bool,
}

impl Answerable for Delivery {
    fn answer(mut self: Box<Self>, answer: Answer) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let kind = match answer {
                Answer::Done => AckKind::Ack,
                Answer::Refused(_) => AckKind::Term,
                // Dropped: a consumer that stops must not get it back itself.
                Answer::Later(Duration::ZERO) => return,
                Answer::Later(after) => AckKind::Nak(Some(after)),
            };
            if timeout(PATIENCE, self.hand.answer(self.id, &self.reply, kind)).await.is_err() {
                tracing::debug!("an answer found no connection in time");
            }
            self.answered = true;
        })
    }

    fn stays(&self) -> bool {
        self.in_order
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if !self.answered {
            self.hand.state().dropped.push(self.reply.clone());
        }
        self.hand.let_go(self.id);
    }
}
