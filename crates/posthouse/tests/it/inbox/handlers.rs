//! Registered handlers, by the type of the message.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use posthouse::Tx;
use posthouse::inbox::{Handled, Handler, HandlerError, Incoming};
use posthouse::store::{Backend, InboxAction, InboxStatus};
use serde::Deserialize;

use super::{Fixture, at, effect};
use crate::support::{TestDb, on_all_databases};

on_all_databases!(
    each_type_has_its_handler,
    a_type_without_a_handler_waits_for_a_person,
    a_payload_that_cant_be_decoded_is_failed_at_once,
    a_handler_may_decode_in_its_own_way,
    a_panic_is_a_failure,
);

#[derive(Debug, Deserialize)]
struct Deduct {
    sku: String,
}

/// A handler with state of its own.
struct Effect<T> {
    effects: String,
    calls: Arc<AtomicUsize>,
    database: std::marker::PhantomData<fn(T)>,
}

impl<T: TestDb> Effect<T> {
    fn new(f: &Fixture<T>) -> (Self, Arc<AtomicUsize>) {
        let calls = Arc::<AtomicUsize>::default();
        (Self { effects: f.effects.clone(), calls: calls.clone(), database: std::marker::PhantomData }, calls)
    }
}

impl<T: TestDb> Handler<T::Db> for Effect<T> {
    type Message = Deduct;
    async fn handle(&self, tx: &mut Tx<T::Db>, m: Deduct) -> Result<(), HandlerError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        effect::<T>(tx, &self.effects, &m.sku).await;
        Ok(())
    }
}

async fn snooze<DB: Backend>(_: &mut Tx<DB>, m: String) -> Result<(), HandlerError> {
    assert_eq!(m, "later");
    Err(HandlerError::snooze(std::time::Duration::from_secs(60)))
}

fn deduct(id: &str, kind: &str) -> Incoming {
    Incoming::new(id, r#"{"sku":"A1"}"#).typed(kind)
}

async fn each_type_has_its_handler<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (handler, calls) = Effect::<T>::new(&f);
    let inbox = f.inbox.clone().on("deduct", handler).on_fn("later", snooze::<T::Db>);
    assert_eq!(inbox.handle(&deduct("m1", "deduct")).await.unwrap(), Handled::Processed);
    assert_eq!(inbox.handle(&deduct("m1", "deduct")).await.unwrap(), Handled::Duplicate);
    assert_eq!((f.effects_of("A1").await, calls.load(Ordering::Relaxed)), (1, 1));
    at(inbox.handle(&Incoming::new("m2", r#""later""#).typed("later")).await.unwrap());
    assert_eq!(f.shown("m2").await.row.attempts, 0);
    // The one that was cloned has none.
    assert_eq!(f.inbox.handle(&deduct("m3", "deduct")).await.unwrap(), Handled::Failed);
}

async fn a_type_without_a_handler_waits_for_a_person<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (handler, _) = Effect::<T>::new(&f);
    let inbox = f.inbox.clone().on("deduct", handler);
    for kind in ["Deduct", "", "deduct "] {
        let id = format!("m-{kind}");
        assert_eq!(inbox.handle(&deduct(&id, kind)).await.unwrap(), Handled::Failed);
        let shown = f.shown(&id).await;
        assert_eq!((shown.row.status, shown.row.attempts), (InboxStatus::Failed, 1));
        let error = shown.row.last_error.unwrap();
        assert!(error.contains(&format!("{kind:?}")) && error.contains("requeue"), "{error}");
    }
    let (handler, calls) = Effect::<T>::new(&f);
    let inbox = inbox.on("Deduct", handler);
    assert_eq!(inbox.store().act("inventory", &["m-Deduct".into()], InboxAction::Requeue, "ann").await.unwrap(), ["m-Deduct"]);
    assert_eq!(inbox.run_due().await.unwrap(), 1);
    assert_eq!(f.status("m-Deduct").await, InboxStatus::Success);
    assert_eq!((f.effects().await, calls.load(Ordering::Relaxed)), (1, 1));
}

async fn a_payload_that_cant_be_decoded_is_failed_at_once<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (handler, calls) = Effect::<T>::new(&f);
    let inbox = f.inbox.clone().on("deduct", handler);
    for (n, payload) in [&b"{"[..], b"", b"{}", b"{\"sku\":7}", b"\xff", b"{\"sku\":\"A1\"} and more"].into_iter().enumerate() {
        let id = format!("m{n}");
        assert_eq!(inbox.handle(&Incoming::new(&*id, payload).typed("deduct")).await.unwrap(), Handled::Failed);
        let shown = f.shown(&id).await;
        assert!(shown.row.last_error.unwrap().contains("the payload is not what the handler takes"));
        assert_eq!(shown.payload.as_deref(), Some(payload));
    }
    assert_eq!(calls.load(Ordering::Relaxed), 0);
}

/// The whole message, whatever is in it.
struct Whole(Arc<AtomicBool>);

impl<DB: Backend> Handler<DB> for Whole {
    type Message = Incoming;
    fn decode(&self, incoming: &Incoming) -> Result<Incoming, HandlerError> {
        Ok(incoming.clone())
    }
    async fn handle(&self, _: &mut Tx<DB>, m: Incoming) -> Result<(), HandlerError> {
        assert_eq!((m.payload.as_slice(), m.headers.get("h"), m.key.as_deref()), (&[0xff, 0][..], Some("v"), Some("k")));
        if self.0.swap(true, Ordering::Relaxed) { Ok(()) } else { Err(HandlerError::retry("once more, from the copy")) }
    }
}

async fn a_handler_may_decode_in_its_own_way<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let inbox = f.inbox.clone().on("binary", Whole(Arc::default()));
    at(inbox.handle(&Incoming::new("m1", [0xff, 0]).typed("binary").header("h", "v").key("k")).await.unwrap());
    f.all_due().await;
    assert_eq!(inbox.run_due().await.unwrap(), 1);
    assert_eq!(f.status("m1").await, InboxStatus::Success);
}

async fn panics<DB: Backend>(_: &mut Tx<DB>, _: serde_json::Value) -> Result<(), HandlerError> {
    panic!("out of cheese")
}

async fn a_panic_is_a_failure<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let inbox = f.inbox.clone().on_fn("panics", panics::<T::Db>);
    at(inbox.handle(&Incoming::new("m1", "1").typed("panics")).await.unwrap());
    assert_eq!(f.shown("m1").await.row.last_error.as_deref(), Some("the handler panicked: out of cheese"));
    f.all_due().await;
    assert_eq!(inbox.run_due().await.unwrap(), 1);
    assert_eq!(f.shown("m1").await.row.attempts, 2);
}
