//! The retry worker.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use posthouse::inbox::{Handled, Handler, HandlerError, Inbox, Incoming};
use posthouse::store::{InboxAction, InboxStatus};
use posthouse::{InboxSettings, Tx};
use tokio::sync::Semaphore;

use super::{Fixture, at, quick, try_effect};
use crate::support::{SOON, TestDb, on_all_databases, scale, wait_for};

on_all_databases!(
    it_runs_what_is_due_until_it_works,
    one_bad_row_fails_alone,
    what_isnt_due_stays_as_it_is,
    two_workers_run_each_message_once,
    leases_are_renewed_while_a_handler_runs,
    whoever_lost_its_claim_changes_nothing,
    what_a_dead_worker_left_is_run,
    a_message_that_killed_enough_isnt_run,
    shutting_down_costs_no_attempts,
    shutting_down_waits_for_what_is_running,
    other_consumers_messages_are_left_alone,
);

/// A handler that does as the payload says.
struct Scripted<T> {
    effects: String,
    calls: Arc<AtomicUsize>,
    /// A run that waits takes a permit of it.
    gate: Arc<Semaphore>,
    database: PhantomData<fn(T)>,
}

impl<T: TestDb> Handler<T::Db> for Scripted<T> {
    type Message = String;
    async fn handle(&self, tx: &mut Tx<T::Db>, m: String) -> Result<(), HandlerError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        try_effect::<T>(tx, &self.effects, &m).await?;
        match m.as_str() {
            "bad" => Err(HandlerError::retry("bad as ever")),
            "wait" => {
                self.gate.acquire().await.expect("the gate is never closed").forget();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

struct Scene<T: TestDb> {
    f: Fixture<T>,
    inbox: Inbox<T::Db>,
    calls: Arc<AtomicUsize>,
    gate: Arc<Semaphore>,
}

impl<T: TestDb> Scene<T> {
    async fn new(settings: InboxSettings) -> Self {
        let f = Fixture::<T>::with(settings).await;
        let (calls, gate) = (Arc::<AtomicUsize>::default(), Arc::new(Semaphore::new(0)));
        let inbox = f.inbox.clone().on("scripted", scripted::<T>(&f, &calls, &gate));
        Self { f, inbox, calls, gate }
    }

    /// Another process's inbox.
    async fn other(&self, settings: InboxSettings) -> Inbox<T::Db> {
        let inbox = self.f.beside(T::connect(&self.f.place.url).await, "inventory", settings);
        inbox.on("scripted", scripted::<T>(&self.f, &self.calls, &self.gate))
    }

    /// A message that failed once and waits.
    async fn failed(&self, id: &str, payload: &str) {
        let message = Incoming::new(id, format!("{payload:?}")).typed("scripted");
        at(self.f.fail(&message, || HandlerError::retry_after(Duration::from_secs(3_600), "not yet")).await);
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Waits until a run of this message has begun (in SQLite nothing else can be written then).
    async fn running(&self, calls: usize) {
        wait_for("the handler to run", SOON, async || self.calls() >= calls).await;
    }
}

fn scripted<T: TestDb>(f: &Fixture<T>, calls: &Arc<AtomicUsize>, gate: &Arc<Semaphore>) -> Scripted<T> {
    Scripted { effects: f.effects.clone(), calls: calls.clone(), gate: gate.clone(), database: PhantomData }
}

async fn it_runs_what_is_due_until_it_works<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    for n in 0..5 {
        s.failed(&format!("good-{n}"), &format!("good-{n}")).await;
    }
    s.failed("bad", "bad").await;
    s.f.all_due().await;
    let worker = s.inbox.start_worker().await.unwrap();
    for n in 0..5 {
        let id = format!("good-{n}");
        s.f.wait_status(&id, InboxStatus::Success).await;
        let shown = s.f.shown(&id).await;
        assert_eq!((shown.row.attempts, shown.row.claims, shown.payload), (1, 0, None));
        assert_eq!(s.f.effects_of(&id).await, 1);
    }
    // Once failed above, and at last at the limit of three.
    s.f.wait_status("bad", InboxStatus::Failed).await;
    let shown = s.f.shown("bad").await;
    assert_eq!((shown.row.attempts, shown.row.claims, shown.row.owner), (3, 0, None));
    assert_eq!(shown.row.last_error.as_deref(), Some("bad as ever"));
    assert_eq!(s.f.effects_of("bad").await, 0);
    assert_eq!(s.calls(), 5 + 2);
    worker.shutdown(SOON).await;
    // What it ran is known to whoever gets the message again.
    let again = Incoming::new("good-1", "\"good-1\"").typed("scripted").redelivered(true);
    assert_eq!(s.inbox.handle(&again).await.unwrap(), Handled::Duplicate);
}

/// P8.
async fn one_bad_row_fails_alone<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    for n in 0..4 {
        s.failed(&format!("good-{n}"), "good").await;
    }
    for id in ["headers", "source", "copy", "payload"] {
        s.failed(id, "good").await;
    }
    let table = s.f.table();
    if T::NAME == "postgres" {
        // Its columns hold only JSON.
        T::execute(&s.f.place.pool, format!("UPDATE {table} SET headers = '[1]' WHERE message_id = 'headers'")).await;
        T::execute(&s.f.place.pool, format!("UPDATE {table} SET payload = NULL WHERE message_id = 'source'")).await;
    } else {
        T::execute(&s.f.place.pool, format!("UPDATE {table} SET headers = '{{' WHERE message_id = 'headers'")).await;
        T::execute(&s.f.place.pool, format!("UPDATE {table} SET source = '{{' WHERE message_id = 'source'")).await;
    }
    T::execute(&s.f.place.pool, format!("UPDATE {table} SET payload = NULL WHERE message_id = 'copy'")).await;
    let seven = if T::NAME == "sqlite" { "CAST('7' AS BLOB)" } else { "'7'" };
    T::execute(&s.f.place.pool, format!("UPDATE {table} SET payload = {seven} WHERE message_id = 'payload'")).await;
    s.f.all_due().await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 8);
    for n in 0..4 {
        assert_eq!(s.f.status(&format!("good-{n}")).await, InboxStatus::Success);
    }
    for (id, said) in [("headers", "headers"), ("source", ""), ("copy", "no copy"), ("payload", "the payload is not")] {
        let shown = s.f.shown(id).await;
        assert_eq!(shown.row.status, InboxStatus::Failed, "{id}");
        assert!(shown.row.last_error.as_deref().unwrap().contains(said), "{:?}", shown.row);
    }
}

/// P9: looking costs nothing.
async fn what_isnt_due_stays_as_it_is<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    s.failed("later", "good").await;
    assert_eq!(s.inbox.handle(&Incoming::new("unknown", "7").typed("nothing")).await.unwrap(), Handled::Failed);
    assert_eq!(s.f.process(&Incoming::new("done", "7")).await, Handled::Processed);
    let before = [s.f.shown("later").await, s.f.shown("unknown").await, s.f.shown("done").await];
    let worker = s.inbox.start_worker().await.unwrap();
    for _ in 0..20 {
        assert_eq!(s.inbox.run_due().await.unwrap(), 0);
    }
    worker.shutdown(SOON).await;
    assert_eq!([s.f.shown("later").await, s.f.shown("unknown").await, s.f.shown("done").await], before);
    assert_eq!(s.calls(), 0);
}

async fn two_workers_run_each_message_once<T: TestDb>() {
    let mut settings = quick();
    settings.batch = 7;
    let s = Scene::<T>::new(settings.clone()).await;
    let messages = if T::NAME == "sqlite" { 30 } else { 60 * scale() };
    for n in 0..messages {
        s.failed(&format!("m{n}"), &format!("m{n}")).await;
    }
    s.f.all_due().await;
    let other = s.other(settings).await;
    let workers = [s.inbox.start_worker().await.unwrap(), other.start_worker().await.unwrap()];
    wait_for("all of them to succeed", SOON, async || s.f.count(InboxStatus::Success).await == messages as i64).await;
    for worker in workers {
        worker.shutdown(SOON).await;
    }
    assert_eq!((s.f.effects().await, s.calls()), (messages as i64, messages), "each was run once");
}

async fn leases_are_renewed_while_a_handler_runs<T: TestDb>() {
    let mut settings = quick();
    settings.lease = Duration::from_millis(600);
    let s = Scene::<T>::new(settings.clone()).await;
    for n in 0..2 {
        s.failed(&format!("m{n}"), if n == 0 { "wait" } else { "good" }).await;
    }
    s.f.all_due().await;
    let worker = s.inbox.start_worker().await.unwrap();
    s.running(1).await;
    let other = s.other(settings).await.start_worker().await.unwrap();
    if T::NAME != "sqlite" {
        // As its one writer is the handler, SQLite can neither renew nor take.
        let first = s.f.shown("m0").await.row;
        wait_for("three leases", SOON, async || {
            let now = s.f.shown("m0").await.row;
            assert_eq!((now.status, now.version, &now.owner), (InboxStatus::Retrying, first.version, &first.owner));
            now.next_attempt_us.unwrap() > first.next_attempt_us.unwrap() + 1_800_000
        })
        .await;
    }
    s.gate.add_permits(1);
    s.f.wait_status("m0", InboxStatus::Success).await;
    s.f.wait_status("m1", InboxStatus::Success).await;
    worker.shutdown(SOON).await;
    other.shutdown(SOON).await;
    assert_eq!(s.f.effects().await, 2);
    assert_eq!(s.calls(), 2, "nobody else ran it meanwhile");
}

async fn whoever_lost_its_claim_changes_nothing<T: TestDb>() {
    if T::NAME == "sqlite" {
        // While a handler runs, nobody else can write, so no claim can be lost.
        return;
    }
    let s = Scene::<T>::new(quick()).await;
    for (n, fails) in [false, true].into_iter().enumerate() {
        let id = format!("m{n}");
        s.failed(&id, "wait").await;
        s.f.all_due().await;
        let running = tokio::spawn({
            let inbox = s.inbox.clone();
            async move { inbox.run_due().await.unwrap() }
        });
        s.running(n + 1).await;
        // Somebody else takes it over: an operator, or a worker after the lease.
        let skipped = s.inbox.store().act("inventory", std::slice::from_ref(&id), InboxAction::Skip, "ann").await.unwrap();
        assert_eq!(skipped, std::slice::from_ref(&id));
        let skipped = s.f.shown(&id).await;
        if fails {
            running.abort();
            let _ = running.await;
        } else {
            s.gate.add_permits(1);
            assert_eq!(running.await.unwrap(), 1);
        }
        assert_eq!(s.f.shown(&id).await, skipped);
        assert_eq!(s.f.effects().await, 0, "its effect was rolled back");
    }
}

async fn what_a_dead_worker_left_is_run<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    s.failed("m1", "good").await;
    s.failed("m2", "good").await;
    s.f.all_due().await;
    // Taken, and in one of them a run had begun, when the process died.
    let table = s.f.table();
    let died = format!("UPDATE {table} SET status = 'RETRYING', owner = 'gone', version = version + 1");
    T::execute(&s.f.place.pool, died).await;
    T::execute(&s.f.place.pool, format!("UPDATE {table} SET claims = 2 WHERE message_id = 'm2'")).await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 2);
    for id in ["m1", "m2"] {
        let shown = s.f.shown(id).await;
        assert_eq!((shown.row.status, shown.row.attempts, shown.row.claims), (InboxStatus::Success, 1, 0));
    }
    assert_eq!(s.f.effects().await, 2);
}

async fn a_message_that_killed_enough_isnt_run<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    s.failed("killer", "good").await;
    s.failed("good", "good").await;
    s.f.all_due().await;
    let table = s.f.table();
    T::execute(&s.f.place.pool, format!("UPDATE {table} SET status = 'RETRYING', claims = 3 WHERE message_id = 'killer'")).await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 2);
    let shown = s.f.shown("killer").await;
    assert_eq!((shown.row.status, shown.row.attempts), (InboxStatus::Failed, 1));
    assert!(shown.row.last_error.unwrap().contains("3 processes died"));
    assert_eq!((s.calls(), s.f.status("good").await), (1, InboxStatus::Success));
    // A person who found out why gives it all its chances again.
    s.inbox.store().act("inventory", &["killer".into()], InboxAction::Requeue, "ann").await.unwrap();
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
    assert_eq!(s.f.status("killer").await, InboxStatus::Success);
}

/// P9.
async fn shutting_down_costs_no_attempts<T: TestDb>() {
    let mut settings = quick();
    settings.concurrency = 1;
    let s = Scene::<T>::new(settings).await;
    for id in ["m1", "m2", "m3"] {
        s.failed(id, "wait").await;
    }
    s.f.all_due().await;
    let worker = s.inbox.start_worker().await.unwrap();
    s.running(1).await;
    worker.shutdown(Duration::from_millis(50)).await;
    for id in ["m1", "m2", "m3"] {
        let row = s.f.shown(id).await.row;
        assert_eq!((row.status, row.attempts, row.claims, row.owner), (InboxStatus::PendingRetry, 1, 0, None), "{id}");
    }
    assert_eq!((s.calls(), s.f.effects().await), (1, 0));
    // Due at once, not when a lease ends.
    s.gate.add_permits(3);
    assert_eq!(s.inbox.run_due().await.unwrap(), 3);
    assert_eq!((s.calls(), s.f.effects().await), (4, 3));
}

async fn shutting_down_waits_for_what_is_running<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    s.failed("m1", "wait").await;
    s.f.all_due().await;
    let worker = s.inbox.start_worker().await.unwrap();
    s.running(1).await;
    let shutdown = tokio::spawn(worker.shutdown(SOON));
    tokio::task::yield_now().await;
    s.gate.add_permits(1);
    shutdown.await.unwrap();
    assert_eq!((s.f.status("m1").await, s.f.effects().await), (InboxStatus::Success, 1));
}

async fn other_consumers_messages_are_left_alone<T: TestDb>() {
    let s = Scene::<T>::new(quick()).await;
    s.failed("m1", "good").await;
    s.f.all_due().await;
    let billing = s.f.beside(s.f.place.pool.clone(), "billing", quick()).on("scripted", scripted::<T>(&s.f, &s.calls, &s.gate));
    assert_eq!(billing.run_due().await.unwrap(), 0);
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
}
