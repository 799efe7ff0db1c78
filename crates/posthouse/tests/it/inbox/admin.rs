//! What people look at and change.

use std::time::Duration;

use posthouse::inbox::{Handled, HandlerError, Incoming};
use posthouse::store::{InboxAction, InboxFilter, InboxStatus};

use super::{Fixture, at, order, process, quick};
use crate::support::{TestDb, on_all_databases};

on_all_databases!(
    lists_filter_and_page,
    searches_are_bounded_and_go_on,
    actions_apply_where_they_can,
    every_action_leaves_an_audit_line,
    the_backlog_is_counted
);

/// One of each: done, waiting, failed; and one of another consumer.
async fn some<T: TestDb>() -> Fixture<T> {
    let f = Fixture::<T>::new().await;
    assert_eq!(f.process(&order("done")).await, Handled::Processed);
    at(f.fail(&order("waiting"), || HandlerError::retry_after(Duration::from_secs(60), "busy")).await);
    assert_eq!(f.fail(&Incoming::new("failed", "7").typed("odd"), || HandlerError::reject("never")).await, Handled::Failed);
    let billing = f.beside(f.place.pool.clone(), "billing", quick());
    assert_eq!(process::<T>(&billing, &f.effects, &order("done")).await.unwrap(), Handled::Processed);
    f
}

fn filter() -> InboxFilter {
    InboxFilter { limit: 100, ..InboxFilter::default() }
}

async fn lists_filter_and_page<T: TestDb>() {
    let f = some::<T>().await;
    let store = f.inbox.store();
    let list = async |filter: InboxFilter| -> Vec<(String, String)> {
        store.list(&filter).await.unwrap().rows.into_iter().map(|r| (r.consumer, r.message_id)).collect()
    };
    let pair = |consumer: &str, id: &str| (consumer.to_owned(), id.to_owned());
    let all = [pair("billing", "done"), pair("inventory", "done"), pair("inventory", "failed"), pair("inventory", "waiting")];
    assert_eq!(list(filter()).await, all);
    assert_eq!(list(InboxFilter { consumer: Some("inventory".into()), ..filter() }).await, all[1..]);
    assert_eq!(list(InboxFilter { consumer: Some("Inventory".into()), ..filter() }).await, []);
    assert_eq!(list(InboxFilter { kind: Some("odd".into()), ..filter() }).await, all[2..3]);
    for (status, expected) in [
        (InboxStatus::Success, &all[..2]),
        (InboxStatus::Failed, &all[2..3]),
        (InboxStatus::PendingRetry, &all[3..]),
        (InboxStatus::Retrying, &[][..]),
    ] {
        assert_eq!(list(InboxFilter { status: Some(status), ..filter() }).await, expected);
    }
    let mut paged = Vec::new();
    loop {
        let page = list(InboxFilter { after: paged.last().cloned(), limit: 1, ..filter() }).await;
        if page.is_empty() {
            break;
        }
        paged.extend(page);
    }
    assert_eq!(paged, all);
    assert!(store.show("inventory", "nothing").await.unwrap().is_none());
    let waiting = store.show("inventory", "waiting").await.unwrap().unwrap().row;
    assert_eq!((waiting.attempts, waiting.last_error.as_deref()), (1, Some("busy")));
    let failed = store.show("inventory", "failed").await.unwrap().unwrap().row;
    assert_eq!(failed.next_attempt_us, None);
}

async fn searches_are_bounded_and_go_on<T: TestDb>() {
    let f = some::<T>().await;
    let store = f.inbox.store();
    let ids = async |filter: InboxFilter| -> Vec<String> {
        store.list(&filter).await.unwrap().rows.into_iter().map(|r| r.message_id).collect()
    };
    let text = |text: &str| InboxFilter { text: Some(text.into()), ..filter() };
    assert_eq!(ids(text("ail")).await, ["failed"], "in the id");
    assert_eq!(ids(text("odd")).await, ["failed"], "in the type");
    assert_eq!(ids(text("usy")).await, ["waiting"], "in the error");
    assert_eq!(ids(text("7")).await, ["failed"], "in the payload");
    assert!(ids(InboxFilter { sealed: true, ..text("7") }).await.is_empty(), "which may be sealed");
    assert_eq!(ids(InboxFilter { status: Some(InboxStatus::Failed), ..text("7") }).await, ["failed"]);
    let first_us = store.show("inventory", "waiting").await.unwrap().unwrap().row.first_us;
    let from = InboxFilter { first_after_us: Some(first_us), ..filter() };
    assert!(ids(from.clone()).await.contains(&"waiting".to_owned()));
    assert!(!ids(InboxFilter { first_before_us: Some(first_us), ..filter() }).await.contains(&"waiting".to_owned()));
    assert!(ids(InboxFilter { first_after_us: Some(first_us + 60_000_000), ..filter() }).await.is_empty());

    // Enough rows that a step doesn't reach the end; then the search goes on where it stopped, and finds each once.
    let mut tx = f.place.pool.begin().await.unwrap();
    for n in 0..120 {
        assert!(f.inbox.first_time(&mut tx, &Incoming::new(format!("z-{n:03}"), "{}")).await.unwrap());
    }
    tx.commit().await.unwrap();
    let (mut found, mut stops, mut after) = (Vec::new(), 0, None);
    loop {
        let page = InboxFilter { after, within: Some(Duration::ZERO), ..text("z-1") };
        let listed = store.list(&page).await.unwrap();
        assert_eq!(listed.stopped, listed.next.is_some(), "the page is never full");
        found.extend(listed.rows.into_iter().map(|r| r.message_id));
        stops += usize::from(listed.stopped);
        after = listed.next;
        if after.is_none() {
            break;
        }
    }
    assert!(stops >= 2, "{stops}");
    assert_eq!(found, (100..120).map(|n| format!("z-{n:03}")).collect::<Vec<_>>());
}

async fn actions_apply_where_they_can<T: TestDb>() {
    let f = some::<T>().await;
    let store = f.inbox.store();
    let every: Vec<String> = ["done", "failed", "waiting", "unknown"].map(str::to_owned).into();
    assert_eq!(store.act("inventory", &every, InboxAction::Requeue, "ann").await.unwrap(), ["failed", "waiting"]);
    for id in ["failed", "waiting"] {
        let row = f.shown(id).await.row;
        assert_eq!((row.status, row.attempts, row.claims), (InboxStatus::PendingRetry, 0, 0), "{id}");
    }
    assert_eq!(f.process(&Incoming::new("failed", "7")).await, Handled::Processed);
    assert_eq!(store.act("inventory", &every, InboxAction::Skip, "bob'; --").await.unwrap(), ["waiting"]);
    let row = f.shown("waiting").await.row;
    assert_eq!((row.status, row.last_error.as_deref()), (InboxStatus::Failed, Some("busy; skipped by bob'; --")));
    assert_eq!(f.process(&order("waiting")).await, Handled::Failed);
    // Another consumer's copy is another message.
    assert!(store.act("billing", &["waiting".to_owned()], InboxAction::Requeue, "ann").await.unwrap().is_empty());
}

async fn every_action_leaves_an_audit_line<T: TestDb>() {
    let f = some::<T>().await;
    let audit = f.inbox.outbox().tables().name("audit");
    let lines = async |condition: &str| T::number(&f.place.pool, format!("SELECT count(*) FROM {audit} WHERE {condition}")).await;
    let store = f.inbox.store();
    // A relay asks for actions after the last it knows; these are none of its business.
    let outbox = f.inbox.outbox().store(Duration::from_secs(30));
    store.act("inventory", &["failed".into(), "waiting".into(), "done".into()], InboxAction::Requeue, "änn").await.unwrap();
    store.act("inventory", &["failed".into()], InboxAction::Skip, "bob").await.unwrap();
    assert_eq!(lines("actor = 'änn' AND action = 'inbox requeue'").await, 2);
    assert_eq!(lines("actor = 'bob' AND action = 'inbox skip'").await, 1);
    assert_eq!(lines(r#"detail = '{"consumer":"inventory","message_id":"failed"}'"#).await, 2);
    assert!(outbox.changes(0).await.unwrap().is_empty());
}

async fn the_backlog_is_counted<T: TestDb>() {
    let f = some::<T>().await;
    let lines: Vec<_> = f.inbox.store().backlog().await.unwrap();
    let counted: Vec<_> = lines.iter().map(|l| (l.consumer.as_str(), l.status, l.messages)).collect();
    assert_eq!(counted, [("inventory", InboxStatus::Failed, 1), ("inventory", InboxStatus::PendingRetry, 1)]);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as i64;
    assert!(lines.iter().all(|l| (now - 600_000_000..now + 1_000_000).contains(&l.oldest_us)), "{lines:?}");
}
