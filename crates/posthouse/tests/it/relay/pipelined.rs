//! `ordering = "pipelined"`: a key's messages are in flight together, and none overtakes one that failed.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use posthouse::transport::{Delivery, Transport, from_fn};
use posthouse::{Message, Ordering as Order, Outbox, Relay, Retry};
use tokio::sync::mpsc;

use super::{Log, quick, quick_route};
use crate::support::{SOON, TestDb, messages, on_all_databases, pending, scale, wait_for};

on_all_databases!(
    messages_of_a_key_are_in_flight_together,
    those_behind_a_failed_one_are_held_back_without_an_attempt,
    silence_is_counted_once_per_key,
    many_keys_and_many_failures_stay_in_order,
);

#[derive(Debug, Clone, Copy)]
enum Fate {
    Deliver,
    Retry,
    Down,
    Drop,
}

/// Keeps the contract of a transport that pipelines: one worker, in order, and what follows a failed one is held back.
#[derive(Debug)]
struct Pipe {
    queue: mpsc::UnboundedSender<Delivery>,
    /// Calls of `send` that are not finished: the relay makes one at a time.
    calls: AtomicUsize,
}

impl Pipe {
    fn new(log: Log, fate: impl Fn(&Delivery) -> Fate + Send + Sync + 'static) -> Self {
        let (queue, mut deliveries) = mpsc::unbounded_channel::<Delivery>();
        tokio::spawn(async move {
            let mut failed = HashSet::new();
            while let Some(delivery) = deliveries.recv().await {
                let key = delivery.message().key.clone();
                if !delivery.follows() {
                    failed.remove(&key);
                }
                if failed.contains(&key) {
                    delivery.held_back();
                    continue;
                }
                if fastrand::u8(..) < 40 {
                    tokio::task::yield_now().await;
                }
                match fate(&delivery) {
                    Fate::Deliver => {
                        log.add(&delivery);
                        delivery.delivered();
                        continue;
                    }
                    Fate::Retry => delivery.retry("not now", None),
                    Fate::Down => delivery.unavailable("down for a moment"),
                    Fate::Drop => drop(delivery),
                }
                failed.insert(key);
            }
        });
        Self { queue, calls: AtomicUsize::new(0) }
    }
}

impl Transport for Pipe {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            assert_eq!(self.calls.fetch_add(1, Ordering::SeqCst), 0, "one batch at a time");
            for delivery in batch {
                self.queue.send(delivery).unwrap();
                tokio::task::yield_now().await;
            }
            self.calls.fetch_sub(1, Ordering::SeqCst);
        })
    }

    fn pipelines(&self) -> bool {
        true
    }
}

async fn publish<T: TestDb>(outbox: &Outbox<T::Db>, key: &str, numbers: std::ops::RangeInclusive<usize>) {
    let messages: Vec<_> = numbers.map(|n| Message::to("orders").key(key).payload(n.to_string())).collect();
    let mut tx = outbox.begin().await.unwrap();
    outbox.publish_many(&mut tx, messages).await.unwrap();
    outbox.commit(tx).await.unwrap();
}

async fn messages_of_a_key_are_in_flight_together<T: TestDb>() {
    #[derive(Debug)]
    struct Gather(Mutex<Vec<Delivery>>, Log);
    impl Transport for Gather {
        fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
            let mut waiting = self.0.lock().unwrap();
            waiting.extend(batch);
            if waiting.len() == 10 {
                for (n, delivery) in waiting.drain(..).enumerate() {
                    assert_eq!(delivery.follows(), n > 0, "the first follows nobody");
                    self.1.add(&delivery);
                    delivery.delivered();
                }
            }
            Box::pin(std::future::ready(()))
        }
        fn pipelines(&self) -> bool {
            true
        }
    }
    let outbox = T::fresh().await;
    let log = Log::default();
    publish::<T>(&outbox, "k", 1..=10).await;
    let route = quick_route("test:a").ordering(Order::Pipelined);
    let gather = Gather(Mutex::default(), log.clone());
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", gather).route("orders", route).start().await.unwrap();
    log.wait_len(10).await;
    assert_eq!(log.order_violations(), 0);
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

/// O4.
async fn those_behind_a_failed_one_are_held_back_without_an_attempt<T: TestDb>() {
    let outbox = T::fresh().await;
    let (log, broken) = (Log::default(), Arc::new(AtomicBool::new(true)));
    let b = broken.clone();
    let pipe = Pipe::new(log.clone(), move |d| {
        let it = d.message().payload == b"3" && d.message().key.as_deref() == Some("k");
        if it && b.load(Ordering::SeqCst) { Fate::Retry } else { Fate::Deliver }
    });
    publish::<T>(&outbox, "k", 1..=20).await;
    publish::<T>(&outbox, "other", 1..=20).await;
    let retry = Retry::new(10_000, Duration::from_millis(20), Duration::from_millis(100));
    let route = quick_route("test:a").ordering(Order::Pipelined).retry(retry);
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", pipe).route("orders", route).start().await.unwrap();
    wait_for("three failures", SOON, async || relay.stats().retried >= 3).await;
    wait_for("the other key", SOON, async || log.len() == 22).await;
    let rows = messages(&**relay.store()).await;
    let waiting: Vec<_> = rows.iter().filter(|m| m.status != "SENT").collect();
    assert_eq!(waiting.len(), 18, "3 to 20 of k");
    assert_eq!(waiting.iter().filter(|m| m.attempts > 0).count(), 1, "only the one that failed is blamed");
    broken.store(false, Ordering::SeqCst);
    log.wait_len(40).await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!((log.len(), log.distinct()), (40, 40));
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn silence_is_counted_once_per_key<T: TestDb>() {
    #[derive(Debug)]
    struct Mute(Pipe, Mutex<Vec<Delivery>>, AtomicUsize);
    impl Transport for Mute {
        fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
            let mut heard = Vec::new();
            for delivery in batch {
                // Of the first five it never says anything.
                if self.2.fetch_add(1, Ordering::SeqCst) < 5 {
                    self.1.lock().unwrap().push(delivery);
                } else {
                    heard.push(delivery);
                }
            }
            self.0.send(heard)
        }
        fn pipelines(&self) -> bool {
            true
        }
    }
    let outbox = T::fresh().await;
    let log = Log::default();
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let a = attempts.clone();
    let pipe = Pipe::new(log.clone(), move |d| {
        a.lock().unwrap().push(d.message().attempt);
        Fate::Deliver
    });
    publish::<T>(&outbox, "k", 1..=5).await;
    let route = quick_route("test:a").ordering(Order::Pipelined);
    let mute = Mute(pipe, Mutex::default(), AtomicUsize::new(0));
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", mute).route("orders", route).start().await.unwrap();
    log.wait_len(5).await;
    assert_eq!(log.order_violations(), 0);
    assert_eq!(*attempts.lock().unwrap(), [2, 1, 1, 1, 1]);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn many_keys_and_many_failures_stay_in_order<T: TestDb>() {
    let outbox = T::fresh().await;
    let (keys, per_key) = (20, 100 * scale());
    let log = Log::default();
    let pipe = Pipe::new(log.clone(), |_| match fastrand::u16(..1_000) {
        0..80 => Fate::Retry,
        80..82 => Fate::Down,
        82..90 => Fate::Drop,
        _ => Fate::Deliver,
    });
    let retry = Retry::new(10_000, Duration::from_millis(1), Duration::from_millis(20));
    let route = quick_route("test:a").ordering(Order::Pipelined).retry(retry).concurrency(200);
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", pipe).route("orders", route).start().await.unwrap();
    for part in 0..per_key / 10 {
        for key in 0..keys {
            publish::<T>(&outbox, &key.to_string(), part * 10 + 1..=part * 10 + 10).await;
        }
    }
    // A breaker that opens makes everything wait for its probe.
    wait_for("all", SOON * 3 * scale() as u32, async || pending::<T>(&outbox).await == 0).await;
    assert_eq!(log.distinct(), keys * per_key);
    assert_eq!(log.order_violations(), 0);
    // With "block" nothing is passed over: the first arrivals of a key are 1, 2, 3, …
    let mut next = vec![1; keys];
    let mut seen = HashSet::new();
    for s in log.seen() {
        if seen.insert(s.message_id) {
            let key: usize = s.key.unwrap().parse().unwrap();
            let n: usize = String::from_utf8_lossy(&s.payload).parse().unwrap();
            assert_eq!(n, next[key], "key {key}");
            next[key] += 1;
        }
    }
    relay.shutdown(Duration::from_secs(5)).await;
}

/// A transport that can't keep the promise is refused, and the error says what to do.
#[tokio::test]
async fn a_transport_that_cannot_pipeline_is_refused() {
    let outbox = crate::support::Sqlite::fresh().await;
    let route = quick_route("test:a").ordering(Order::Pipelined);
    let relay =
        Relay::builder(&outbox).transport("test", from_fn(|d| async move { d.delivered() })).route("orders", route).start().await;
    let error = relay.unwrap_err().to_string();
    assert!(error.contains("routes.\"orders\".ordering") && error.contains("strict"), "{error}");
}
