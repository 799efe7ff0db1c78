//! The relay on real databases, one behaviour per file.

mod breaker;
mod clock;
mod crash;
mod delivery;
mod exact;
mod figures;
mod groups;
mod idle;
mod instances;
mod order;
mod outage;
mod pipelined;
mod retry;
mod runs;
mod schedule;
mod snapshot;
mod starvation;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::transport::{Delivery, Transport, from_fn};
use posthouse::{Group, Message, Outbox, RelaySettings, Retry, Route, Trigger};
use tokio::sync::watch;

use crate::support::{TestDb, wait_for};

/// Quick settings for tests: a short lease, quick retries.
pub(crate) fn quick() -> RelaySettings {
    let mut s = RelaySettings::default();
    s.lease = Duration::from_secs(3);
    s.heartbeat = Duration::from_millis(300);
    s.send_timeout = Duration::from_millis(1_500);
    s.lease_margin = Duration::from_millis(300);
    s.default_route = quick_route("");
    s
}

/// Quick, but for messages that a test holds in flight.
pub(crate) fn patient() -> RelaySettings {
    let mut s = quick();
    s.lease = Duration::from_secs(60);
    s.send_timeout = Duration::from_secs(50);
    s
}

/// A transport that writes arrivals down and confirms them once it is told to.
pub(crate) fn held(log: &Log) -> (watch::Sender<bool>, impl Transport + use<>) {
    let (release, released) = watch::channel(false);
    let log = log.clone();
    let transport = from_fn(move |d: Delivery| {
        log.add(&d);
        let mut released = released.clone();
        async move {
            // The test is over when its sender is gone.
            if released.wait_for(|released| *released).await.is_ok() {
                d.delivered();
            }
        }
    });
    (release, transport)
}

/// Tables with so many houses, where the database has houses.
pub(crate) async fn with_houses<T: TestDb>(houses: u16) -> Outbox<T::Db> {
    let place = T::place().await;
    let mut builder = Outbox::builder(place.pool.clone()).houses(houses);
    if let Some(schema) = &place.schema {
        builder = builder.schema(schema);
    }
    let outbox = builder.build().unwrap();
    outbox.migrate().await.unwrap();
    outbox
}

/// A group that is sent from only in runs.
pub(crate) fn manual(houses: &str) -> Group {
    Group::new("manual").houses(houses).unwrap().trigger(Trigger::Manual)
}

pub(crate) async fn publish<T: TestDb>(outbox: &Outbox<T::Db>, messages: impl IntoIterator<Item = Message>) {
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, messages).await.unwrap();
    tx.commit().await.unwrap();
}

pub(crate) fn quick_route(to: &str) -> Route {
    Route::to(to).retry(Retry::new(3, Duration::from_millis(20), Duration::from_millis(100)))
}

/// What one message was seen as, in the order of arrival.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) id: i64,
    pub(crate) message_id: String,
    pub(crate) key: Option<String>,
    pub(crate) payload: Vec<u8>,
    pub(crate) destination: String,
    pub(crate) attempt: u32,
}

/// Writes down every arrival; shared by the relays of a test.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<Seen>>>);

impl Log {
    pub(crate) fn add(&self, delivery: &Delivery) {
        let m = delivery.message();
        self.0.lock().unwrap().push(Seen {
            id: m.id,
            message_id: m.message_id.to_string(),
            key: m.key.clone(),
            payload: m.payload.clone(),
            destination: m.destination.clone(),
            attempt: m.attempt,
        });
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(crate) fn payloads(&self) -> Vec<String> {
        self.seen().into_iter().map(|s| String::from_utf8_lossy(&s.payload).into_owned()).collect()
    }

    pub(crate) fn count(&self, payload: &str) -> usize {
        self.payloads().iter().filter(|p| *p == payload).count()
    }

    pub(crate) fn distinct(&self) -> usize {
        self.seen().into_iter().map(|s| s.message_id).collect::<std::collections::HashSet<_>>().len()
    }

    pub(crate) async fn wait_len(&self, n: usize) {
        wait_for(&format!("{n} arrivals"), crate::support::SOON, async || self.len() >= n).await;
    }

    /// First arrivals of each key must come in the order of `sequence`, which is the number in the payload.
    pub(crate) fn order_violations(&self) -> usize {
        let mut last: HashMap<String, i64> = HashMap::new();
        let mut first = std::collections::HashSet::new();
        let mut wrong = 0;
        for seen in self.seen() {
            let (Some(key), true) = (seen.key, first.insert(seen.message_id)) else { continue };
            let sequence: i64 = String::from_utf8_lossy(&seen.payload).parse().expect("a number");
            if last.insert(key, sequence).is_some_and(|before| before > sequence) {
                wrong += 1;
            }
        }
        wrong
    }
}

/// A transport that writes arrivals down and confirms them.
#[derive(Debug, Clone)]
pub(crate) struct Recorder(pub(crate) Log);

impl Transport for Recorder {
    fn send(&self, batch: Vec<Delivery>) -> futures_util::future::BoxFuture<'_, ()> {
        for delivery in batch {
            self.0.add(&delivery);
            delivery.delivered();
        }
        Box::pin(std::future::ready(()))
    }
}
