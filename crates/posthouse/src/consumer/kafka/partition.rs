//! A partition from its assignment to its revocation, and the messages taken out of it.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::offsets::Offsets;
use crate::consumer::intake::{Answer, Answerable};

/// One assignment of a partition. Assigned to this consumer again, it is another one.
#[derive(Debug)]
pub(super) struct Partition {
    pub(super) topic: String,
    pub(super) number: i32,
    /// What its messages wait for each other by, in the order of their source.
    pub(super) lane: String,
    offsets: Mutex<Offsets>,
    /// Messages that are taken and neither answered nor dropped.
    live: AtomicUsize,
    gone: watch::Sender<bool>,
    /// Wants to know when there are fewer.
    poller: Thread,
}

impl Partition {
    pub(super) fn new(topic: &str, number: i32, offsets: Offsets, poller: Thread) -> Self {
        Self {
            topic: topic.to_owned(),
            number,
            // No topic has a slash in its name.
            lane: format!("{topic}/{number}"),
            offsets: Mutex::new(offsets),
            live: AtomicUsize::new(0),
            gone: watch::Sender::new(false),
            poller,
        }
    }

    /// Nothing panics while it is locked.
    pub(super) fn offsets(&self) -> MutexGuard<'_, Offsets> {
        self.offsets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn live(&self) -> usize {
        self.live.load(SeqCst)
    }

    /// It is another member's, or will be: nothing of it is begun from here on.
    pub(super) fn leave(&self) {
        self.gone.send_replace(true);
    }

    pub(super) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    /// Takes the message at this offset; whether it may have killed an earlier owner.
    pub(super) fn take(self: &Arc<Self>, offset: i64) -> (Taken, bool) {
        let (number, suspect) = self.offsets().take(offset);
        self.live.fetch_add(1, SeqCst);
        (Taken { partition: self.clone(), number, offset }, suspect)
    }
}

/// A message that was taken. Unless it is answered as finished, its offset is not committed, nor any behind it.
pub(super) struct Taken {
    partition: Arc<Partition>,
    number: u64,
    offset: i64,
}

impl Answerable for Taken {
    fn answer(self: Box<Self>, answer: Answer) -> BoxFuture<'static, ()> {
        match answer {
            Answer::Done => self.partition.offsets().finish(self.number),
            Answer::Refused(why) => {
                let (topic, partition, offset) = (&self.partition.topic, self.partition.number, self.offset);
                tracing::warn!(
                    topic,
                    partition,
                    offset,
                    why,
                    "Kafka has no rejection: a refused record is passed over, and stays in its topic"
                );
                self.partition.offsets().finish(self.number);
            }
            // Stopping: whoever has the partition next gets it.
            Answer::Later(_) => {}
        }
        drop(self);
        Box::pin(std::future::ready(()))
    }

    fn gone(&self) -> BoxFuture<'static, ()> {
        let mut gone = self.partition.gone.subscribe();
        Box::pin(async move {
            if gone.wait_for(|gone| *gone).await.is_err() {
                std::future::pending().await
            }
        })
    }

    fn stays(&self) -> bool {
        true
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.partition.live.fetch_sub(1, SeqCst);
        self.partition.poller.unpark();
    }
}
