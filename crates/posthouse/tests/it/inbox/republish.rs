//! Retries by way of the consumer's own queue.

use std::time::Duration;

use posthouse::inbox::{Handled, HandlerError, Inbox, Incoming};
use posthouse::store::InboxStatus;
use posthouse::testing::{Script, ScriptedDelivery};
use posthouse::transport::Outcome;
use posthouse::{Route, Tx};

use super::{Fixture, process};
use crate::support::{TestDb, on_all_databases};

on_all_databases!(
    what_is_due_is_sent_to_the_own_queue_and_run_when_it_comes_back,
    a_copy_that_waits_in_a_long_queue_is_not_sent_again,
    a_copy_that_is_gone_is_sent_again,
    a_send_that_fails_is_no_attempt,
    what_can_never_be_sent_is_given_up,
    an_older_copy_is_not_run_twice,
);

struct Scene<T: TestDb> {
    f: Fixture<T>,
    inbox: Inbox<T::Db>,
    queue: Script,
}

impl<T: TestDb> Scene<T> {
    /// With one message that failed and is due.
    async fn new(queue: Script) -> Self {
        let f = Fixture::<T>::new().await;
        let inbox = f.inbox.clone().republish(queue.clone(), Route::to("amqp:/own")).unwrap();
        let failed = f.fail(&Self::first(), || HandlerError::retry("not yet")).await;
        assert!(matches!(failed, Handled::WillRetry(_)));
        f.all_due().await;
        Self { f, inbox, queue }
    }

    fn first() -> Incoming {
        Incoming::new("1", r#"{"a":1}"#).typed("t").key("k").header("tenant", "acme")
    }

    /// As it comes out of the queue.
    fn copy(delivery: &ScriptedDelivery) -> Incoming {
        let m = &delivery.message;
        let mut copy = Incoming::new(m.message_id.as_str(), m.payload.clone()).typed(&*m.kind).content_type(&*m.content_type);
        copy.key = m.key.clone();
        copy.headers = m.headers.clone();
        copy
    }

    async fn run(&self, incoming: &Incoming) -> Handled {
        process::<T>(&self.inbox, &self.f.effects, incoming).await.unwrap()
    }
}

async fn what_is_due_is_sent_to_the_own_queue_and_run_when_it_comes_back<T: TestDb>() {
    let s = Scene::<T>::new(Script::new()).await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
    let [sent] = &s.queue.deliveries()[..] else { panic!("{:?}", s.queue.deliveries()) };
    assert_eq!((&*sent.address, sent.message.message_id.as_str(), &*sent.message.kind), ("/own", "1", "t"));
    assert_eq!((sent.message.key.as_deref(), sent.message.headers.get("tenant")), (Some("k"), Some("acme")));
    assert_eq!(sent.message.payload, br#"{"a":1}"#);
    // The broker delivers the first copy once more: it is not that one's turn.
    assert!(matches!(s.run(&Scene::<T>::first().redelivered(true)).await, Handled::WillRetry(_)));
    assert_eq!(s.f.effects().await, 0);
    assert_eq!(s.run(&Scene::<T>::copy(sent)).await, Handled::Processed);
    assert_eq!(s.run(&Scene::<T>::copy(sent)).await, Handled::Duplicate);
    assert_eq!((s.f.effects().await, s.f.shown("1").await.row.attempts), (1, 1));
}

async fn a_copy_that_waits_in_a_long_queue_is_not_sent_again<T: TestDb>() {
    let s = Scene::<T>::new(Script::new()).await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
    for _ in 0..3 {
        assert_eq!(s.inbox.run_due().await.unwrap(), 0);
    }
    assert_eq!(s.queue.deliveries().len(), 1);
    // It fails again: due after its back-off, and sent again then.
    let copy = Scene::<T>::copy(&s.queue.deliveries()[0]);
    let effects = s.f.effects.clone();
    let failed = s.inbox.process(&copy, async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
        super::effect::<T>(tx, &effects, "1").await;
        Err(HandlerError::retry("still not"))
    });
    assert!(matches!(failed.await.unwrap(), Handled::WillRetry(_)));
    s.f.all_due().await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
    let sent = s.queue.deliveries();
    assert_eq!((sent.len(), sent[1].message.attempt), (2, 3), "the third run is asked for");
    assert_eq!(s.run(&Scene::<T>::copy(&sent[1])).await, Handled::Processed);
    assert_eq!((s.f.effects().await, s.f.shown("1").await.row.attempts), (1, 2));
}

async fn a_copy_that_is_gone_is_sent_again<T: TestDb>() {
    let s = Scene::<T>::new(Script::new()).await;
    s.inbox.run_due().await.unwrap();
    // As if republish_wait had passed.
    s.f.all_due().await;
    assert_eq!(s.inbox.run_due().await.unwrap(), 1);
    assert_eq!(s.queue.deliveries().len(), 2);
    assert_eq!(s.run(&Scene::<T>::copy(&s.queue.deliveries()[1])).await, Handled::Processed);
}

async fn a_send_that_fails_is_no_attempt<T: TestDb>() {
    let queue = Script::new()
        .then(Outcome::Unavailable("closed".into()))
        .then(Outcome::Retry { after: Some(Duration::from_millis(1)), error: "full".into() })
        .then(Outcome::NoAnswer("silence".into()));
    let s = Scene::<T>::new(queue).await;
    for (round, why) in ["closed", "full", "silence"].into_iter().enumerate() {
        assert_eq!(s.inbox.run_due().await.unwrap(), 1);
        let row = s.f.shown("1").await.row;
        assert_eq!((row.attempts, row.claims, row.status), (1, 0, InboxStatus::PendingRetry), "{round}");
        assert!(row.last_error.as_deref().is_some_and(|e| e.contains(why)), "{row:?}");
        s.f.all_due().await;
    }
    s.inbox.run_due().await.unwrap();
    assert_eq!(s.run(&Scene::<T>::copy(&s.queue.deliveries()[3])).await, Handled::Processed);
}

async fn what_can_never_be_sent_is_given_up<T: TestDb>() {
    let s = Scene::<T>::new(Script::new().then(Outcome::Rejected("too large".into()))).await;
    s.inbox.run_due().await.unwrap();
    let row = s.f.shown("1").await.row;
    assert_eq!(row.status, InboxStatus::Failed);
    assert!(row.last_error.unwrap().contains("too large"));
}

async fn an_older_copy_is_not_run_twice<T: TestDb>() {
    let s = Scene::<T>::new(Script::new()).await;
    s.inbox.run_due().await.unwrap();
    s.f.all_due().await;
    s.inbox.run_due().await.unwrap();
    let sent = s.queue.deliveries();
    // The first comes late: the second is on its way, so it is that one's turn.
    assert!(matches!(s.run(&Scene::<T>::copy(&sent[0])).await, Handled::WillRetry(_)));
    assert_eq!(s.run(&Scene::<T>::copy(&sent[1])).await, Handled::Processed);
    assert_eq!(s.run(&Scene::<T>::copy(&sent[0])).await, Handled::Duplicate);
    assert_eq!(s.f.effects().await, 1);
}
