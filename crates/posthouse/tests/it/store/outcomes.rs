//! Writing outcomes back: each is guarded by house, id and version.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{Attempt, Done, House, Setback};

use crate::store::tables::{Fresh, StoreDb, done, ids, on_all_stores, setback, sorted};

on_all_stores!(
    delivered_rows_are_gone_and_have_a_receipt,
    delivered_is_guarded_by_house_and_version,
    a_large_batch_is_delivered_at_once,
    a_setback_waits_and_is_logged,
    a_setback_without_wait_is_failed,
    a_failed_row_may_leave_its_key,
    a_setback_is_guarded_by_version,
    any_error_text_can_be_recorded,
    a_claim_marks_rows_before_they_are_sent,
);

async fn delivered_rows_are_gone_and_have_a_receipt<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..20).map(|n| Message::to("d").key(n))).await;
    let rows = db.eligible().await;
    let batch: Vec<Done> = rows.iter().take(15).map(done).collect();
    let gone = db.store.delivered("instance-a", &batch).await.unwrap();
    assert_eq!(sorted(gone), published[..15]);
    assert_eq!(ids(&db.eligible().await), published[15..]);
    let houses: std::collections::HashSet<House> = rows.iter().take(15).map(|t| t.house).collect();
    assert_eq!(db.int("SELECT count(*) FROM {receipt}").await, houses.len() as i64, "one per house");
    for id in &published[..15] {
        let shown = db.store.show(*id).await.unwrap().unwrap();
        assert_eq!(shown.row.status, "SENT");
        let (at, by) = shown.delivered.expect("a receipt");
        assert_eq!(by, "instance-a");
        assert!(at >= shown.row.created_at_ms, "delivered at {at}, created at {}", shown.row.created_at_ms);
    }
    assert_eq!(db.store.show(published[15]).await.unwrap().unwrap().delivered, None);
    assert!(db.store.delivered("instance-a", &batch).await.unwrap().is_empty(), "a second time there is nothing to remove");
    assert_eq!(db.int("SELECT count(*) FROM {receipt}").await, houses.len() as i64);
    assert!(db.store.delivered("instance-a", &[]).await.unwrap().is_empty());
}

async fn delivered_is_guarded_by_house_and_version<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..3).map(|n| Message::to("d").key(n))).await;
    let rows = db.eligible().await;
    let mut batch: Vec<Done> = rows.iter().map(done).collect();
    batch[0].version += 1;
    batch[1].house = House(batch[1].house.0 + 1);
    assert_eq!(db.store.delivered("i", &batch).await.unwrap(), [published[2]], "only what is as it was read");
    assert_eq!(ids(&db.eligible().await), published[..2]);
    assert!(db.store.show(published[2]).await.unwrap().unwrap().delivered.is_some());
    assert!(db.store.show(published[0]).await.unwrap().unwrap().delivered.is_none());
}

async fn a_large_batch_is_delivered_at_once<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..5_000).map(|_| Message::to("d"))).await;
    let batch: Vec<Done> = db.eligible().await.iter().map(done).collect();
    assert_eq!(sorted(db.store.delivered("i", &batch).await.unwrap()), published);
    assert_eq!(db.int("SELECT count(*) FROM {pending}").await, 0);
}

fn logged(setback: Setback) -> Setback {
    Setback {
        error: "503 Service Unavailable".into(),
        attempt: Some(Attempt { outcome: "retry", response: Some("try later 😀".into()), took: Duration::from_millis(1_234) }),
        ..setback
    }
}

async fn a_setback_waits_and_is_logged<T: StoreDb>(db: &Fresh<T>) {
    let id = db.publish_one(Message::to("d").key("k").max_attempts(5)).await;
    let thin = db.thin(id).await;
    assert_eq!(thin.max_attempts, Some(5));
    let first = logged(Setback { claims: 2, ..setback(&thin, Some(Duration::ZERO)) });
    assert_eq!(db.store.setback("instance-a", &[first]).await.unwrap(), [id]);

    let again = db.thin(id).await;
    assert_eq!((again.attempts, again.claims, again.max_attempts), (1, 2, Some(5)));
    assert_ne!(again.version, thin.version);
    assert!(again.due.is_some());
    assert_eq!(again.key, thin.key);
    let second = Setback { attempt: None, attempts: 1, ..setback(&again, Some(Duration::from_secs(3600))) };
    assert_eq!(db.store.setback("instance-b", &[second]).await.unwrap(), [id]);
    assert!(db.eligible().await.is_empty());

    let shown = db.store.show(id).await.unwrap().unwrap();
    assert_eq!(shown.row.status, "PENDING");
    assert_eq!((shown.row.attempts, shown.row.claims), (1, 2));
    assert_eq!(shown.row.last_error.as_deref(), Some("it did not work"));
    assert!(shown.row.next_attempt_ms.unwrap() > shown.row.created_at_ms + 3_000_000);
    assert_eq!(shown.history.len(), 1, "what isn't counted isn't logged");
    let line = &shown.history[0];
    assert_eq!((line.attempt, line.outcome.as_str(), line.took_ms), (1, "retry", 1_234));
    assert_eq!(line.error, "503 Service Unavailable");
    assert_eq!(line.response.as_deref(), Some("try later 😀"));
    assert_eq!(line.instance, "instance-a");
}

async fn a_setback_without_wait_is_failed<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish([Message::to("d").key("k"), Message::to("d").key("k")]).await;
    let thin = db.thin(published[0]).await;
    let failed = logged(setback(&thin, None));
    assert_eq!(db.store.setback("i", &[failed]).await.unwrap(), [published[0]]);
    let shown = db.store.show(published[0]).await.unwrap().unwrap();
    assert_eq!(shown.row.status, "FAILED");
    assert_eq!(shown.row.next_attempt_ms, None);
    let rows = db.eligible().await;
    assert_eq!(ids(&rows), [published[1]]);
    assert_eq!(rows[0].before, Some(published[0]), "it keeps its place in the queue of its key");
    let houses = db.poll().await.houses;
    assert!(houses.iter().all(|h| h.next_due.is_none()), "nothing will be due: {houses:?}");
}

async fn a_failed_row_may_leave_its_key<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish([Message::to("d").key("k"), Message::to("d").key("k")]).await;
    let thin = db.thin(published[0]).await;
    let skipped = Setback { leave_key: true, ..setback(&thin, None) };
    assert_eq!(db.store.setback("i", &[skipped]).await.unwrap(), [published[0]]);
    assert_eq!(db.status(published[0]).await, "FAILED");
    assert_eq!(db.thin(published[1]).await.before, None);
}

async fn a_setback_is_guarded_by_version<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish([Message::to("d"), Message::to("d")]).await;
    let rows = db.eligible().await;
    let mut batch = vec![logged(setback(&rows[0], None)), logged(setback(&rows[1], None))];
    batch[0].row.version += 1;
    assert_eq!(db.store.setback("i", &batch).await.unwrap(), [published[1]]);
    assert_eq!(db.status(published[0]).await, "PENDING");
    assert!(db.store.show(published[0]).await.unwrap().unwrap().history.is_empty(), "what wasn't changed isn't logged");
    assert_eq!(db.int("SELECT count(*) FROM {attempt}").await, 1);
    assert!(db.store.setback("i", &[]).await.unwrap().is_empty());
}

async fn any_error_text_can_be_recorded<T: StoreDb>(db: &Fresh<T>) {
    // As the relay passes it: NUL replaced, cut on a character at 4 KiB.
    let texts = ["a\u{fffd}b", "", "'; DROP TABLE x; --", "\"\\\u{7f}\u{1}\r\n\t", &"😀".repeat(1024), "\u{202e}שלום"];
    let published = db.publish(texts.map(|_| Message::to("d"))).await;
    let rows = db.eligible().await;
    let batch: Vec<Setback> = rows
        .iter()
        .zip(texts)
        .map(|(t, text)| {
            let attempt = Attempt { outcome: "rejected", response: Some(text.into()), took: Duration::ZERO };
            Setback { error: text.into(), attempt: Some(attempt), ..setback(t, None) }
        })
        .collect();
    assert_eq!(sorted(db.store.setback("i", &batch).await.unwrap()), published);
    for (id, text) in published.iter().zip(texts) {
        let shown = db.store.show(*id).await.unwrap().unwrap();
        assert_eq!(shown.row.last_error.as_deref(), Some(text));
        assert_eq!(shown.history[0].error, text);
        assert_eq!(shown.history[0].response.as_deref(), Some(text));
    }
}

async fn a_claim_marks_rows_before_they_are_sent<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish([Message::to("d").key("k"), Message::to("d").key("k"), Message::to("d")]).await;
    let rows = db.eligible().await;
    let mut stale = done(&rows[2]);
    stale.version += 1;
    let claimed = db.store.claim("instance-a", &[done(&rows[0]), stale], Duration::from_secs(3600)).await.unwrap();
    assert_eq!(claimed, [published[0]]);
    assert_eq!(db.status(published[0]).await, "SENDING");
    assert_eq!(db.thin(published[1]).await.before, Some(published[0]));
    assert!(db.store.delivered("i", &[done(&rows[0])]).await.unwrap().is_empty(), "the version that was read is no more");

    // Whoever claimed it knows the next version, and what it wrote is accepted.
    let mut now = done(&rows[0]);
    now.version += 1;
    assert_eq!(db.store.delivered("i", &[now]).await.unwrap(), [published[0]]);

    // A claim that ran out is simply due again, one claim further.
    let second = db.thin(published[1]).await;
    db.store.claim("instance-a", &[done(&second)], Duration::ZERO).await.unwrap();
    let again = db.thin(published[1]).await;
    assert_eq!((again.claims, again.attempts), (1, 0));
    assert_eq!(again.version, second.version + 1);
}
