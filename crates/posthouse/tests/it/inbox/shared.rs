//! One retry worker for all that share an inbox, woken by what fails in its process.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posthouse::inbox::{Handled, Handler, HandlerError, Inbox, Incoming};
use posthouse::store::{InboxAction, InboxStatus};
use posthouse::{InboxSettings, Tx};

use super::{Fixture, at, quick, try_effect};
use crate::support::{SOON, TestDb, on_all_databases, wait_for};

on_all_databases!(
    what_fails_here_is_run_when_it_is_due,
    what_is_requeued_here_is_run_at_once,
    clones_share_one_worker,
    another_handler_makes_another_worker,
);

/// Fails as often as the payload says, then works.
struct Failing<T> {
    effects: String,
    calls: Arc<AtomicUsize>,
    /// Runs at once, and the most there were.
    running: Arc<[AtomicUsize; 2]>,
    database: PhantomData<fn(T)>,
}

impl<T: TestDb> Handler<T::Db> for Failing<T> {
    type Message = usize;
    async fn handle(&self, tx: &mut Tx<T::Db>, times: usize) -> Result<(), HandlerError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let [now, most] = &*self.running;
        most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        // Long enough for another worker to take the next message meanwhile.
        tokio::time::sleep(Duration::from_millis(30)).await;
        now.fetch_sub(1, Ordering::Relaxed);
        try_effect::<T>(tx, &self.effects, "failing").await?;
        match call {
            1 if times > 0 => Err(HandlerError::retry("not yet")),
            n if n <= times => Err(HandlerError::snooze(Duration::from_millis(60))),
            _ => Ok(()),
        }
    }
}

/// A worker that looks of its own accord once an hour.
fn hourly() -> InboxSettings {
    let mut s = quick();
    s.interval = Duration::from_secs(3_600);
    s.batch = 1;
    s.concurrency = 1;
    s
}

struct Scene<T: TestDb> {
    f: Fixture<T>,
    inbox: Inbox<T::Db>,
    calls: Arc<AtomicUsize>,
    running: Arc<[AtomicUsize; 2]>,
}

impl<T: TestDb> Scene<T> {
    async fn new() -> Self {
        let f = Fixture::<T>::with(hourly()).await;
        let (calls, running) = (Arc::<AtomicUsize>::default(), Arc::default());
        let inbox = f.inbox.clone().on("failing", failing::<T>(&f, &calls, &running));
        Self { f, inbox, calls, running }
    }

    /// Waits until the worker has looked and found nothing.
    async fn idle(&self) {
        let waits = Incoming::new("first", "0").typed("failing");
        at(self.f.fail(&waits, || HandlerError::retry_after(Duration::from_millis(1), "at once")).await);
        self.f.wait_status("first", InboxStatus::Success).await;
        self.calls.store(0, Ordering::Relaxed);
    }
}

fn failing<T: TestDb>(f: &Fixture<T>, calls: &Arc<AtomicUsize>, running: &Arc<[AtomicUsize; 2]>) -> Failing<T> {
    Failing { effects: f.effects.clone(), calls: calls.clone(), running: running.clone(), database: PhantomData }
}

async fn what_fails_here_is_run_when_it_is_due<T: TestDb>() {
    let s = Scene::<T>::new().await;
    let worker = s.inbox.shared_worker().await.unwrap();
    s.idle().await;
    let began = Instant::now();
    // Through a clone: failed here, snoozed twice by the worker's runs.
    let handled = s.inbox.clone().handle(&Incoming::new("m", "3").typed("failing")).await.unwrap();
    assert!(matches!(handled, Handled::WillRetry(_)), "{handled:?}");
    s.f.wait_status("m", InboxStatus::Success).await;
    // The least back-off is half of the 40 ms; two snoozes.
    assert!(began.elapsed() >= Duration::from_millis(120), "{:?}", began.elapsed());
    assert_eq!((s.calls.load(Ordering::Relaxed), s.f.shown("m").await.row.attempts), (4, 1));
    worker.shutdown(SOON).await;
}

async fn what_is_requeued_here_is_run_at_once<T: TestDb>() {
    let s = Scene::<T>::new().await;
    let worker = s.inbox.shared_worker().await.unwrap();
    s.idle().await;
    let given_up = Incoming::new("m", "0").typed("failing");
    assert_eq!(s.f.fail(&given_up, || HandlerError::reject("never")).await, Handled::Failed);
    s.inbox.store().act("inventory", &["m".into()], InboxAction::Requeue, "ann").await.unwrap();
    s.f.wait_status("m", InboxStatus::Success).await;
    worker.shutdown(SOON).await;
}

async fn clones_share_one_worker<T: TestDb>() {
    let s = Scene::<T>::new().await;
    // At once, so that they meet.
    let asking = (0..4).map(|_| {
        let inbox = s.inbox.clone();
        tokio::spawn(async move { inbox.shared_worker().await.unwrap() })
    });
    let mut shares = Vec::new();
    for asked in asking.collect::<Vec<_>>() {
        shares.push(asked.await.unwrap());
    }
    s.idle().await;
    for n in 0..8 {
        let message = Incoming::new(format!("m-{n}"), "0").typed("failing");
        at(s.f.fail(&message, || HandlerError::retry_after(Duration::from_millis(50), "not yet")).await);
    }
    for n in 0..8 {
        s.f.wait_status(&format!("m-{n}"), InboxStatus::Success).await;
    }
    // The worker runs one message at a time; two workers would run two.
    assert_eq!(s.running[1].load(Ordering::Relaxed), 1);
    let last = shares.pop().unwrap();
    for share in shares {
        share.shutdown(SOON).await;
    }
    s.calls.store(0, Ordering::Relaxed);
    let handled = s.inbox.handle(&Incoming::new("m1", "1").typed("failing")).await.unwrap();
    assert!(matches!(handled, Handled::WillRetry(_)), "{handled:?}");
    s.f.wait_status("m1", InboxStatus::Success).await;
    last.shutdown(SOON).await;
    s.calls.store(0, Ordering::Relaxed);
    let handled = s.inbox.handle(&Incoming::new("m2", "1").typed("failing")).await.unwrap();
    assert!(matches!(handled, Handled::WillRetry(_)), "{handled:?}");
    // The last share is gone, so nobody runs it until somebody asks for a worker again.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((s.f.status("m2").await, s.calls.load(Ordering::Relaxed)), (InboxStatus::PendingRetry, 1));
    let again = s.inbox.shared_worker().await.unwrap();
    s.f.wait_status("m2", InboxStatus::Success).await;
    again.shutdown(SOON).await;
}

async fn another_handler_makes_another_worker<T: TestDb>() {
    let s = Scene::<T>::new().await;
    let first = s.inbox.shared_worker().await.unwrap();
    s.idle().await;
    let calls = Arc::<AtomicUsize>::default();
    let more = s.inbox.clone().on("another", failing::<T>(&s.f, &calls, &s.running));
    first.shutdown(SOON).await;
    let own = more.shared_worker().await.unwrap();
    let handled = more.handle(&Incoming::new("m", "1").typed("another")).await.unwrap();
    assert!(matches!(handled, Handled::WillRetry(_)), "{handled:?}");
    s.f.wait_status("m", InboxStatus::Success).await;
    wait_for("both runs", SOON, async || calls.load(Ordering::Relaxed) == 2).await;
    own.shutdown(SOON).await;
}
