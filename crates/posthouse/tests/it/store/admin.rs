//! What people look at and change.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{Action, AuditFilter, MessageFilter, MessageStatus, Record, Setback, Store};

use crate::store::tables::{Fresh, StoreDb, done, ids, key_of, on_all_stores, setback, sorted};

on_all_stores!(
    requeue_tries_again_from_the_start,
    requeue_leaves_alone_what_is_not_waiting,
    skip_gives_up_and_frees_the_key,
    edit_sends_elsewhere,
    every_action_is_counted_and_can_be_asked_for,
    lists_show_every_status,
    lists_filter_and_page,
    lists_find_times_and_texts,
    searches_are_bounded_and_go_on,
    the_audit_log_is_paged_and_filtered,
    a_message_shows_everything,
    the_view_shows_every_status,
    the_backlog_counts_what_is_unfinished,
);

async fn requeue_tries_again_from_the_start<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..3).map(|_| Message::to("d").key("k"))).await;
    let head = db.thin(published[0]).await;
    db.store.setback("i", &[Setback { leave_key: true, attempts: 9, claims: 3, ..setback(&head, None) }]).await.unwrap();
    assert_eq!(db.thin(published[1]).await.before, None);
    assert_eq!(db.store.act(&published[..1], &Action::Requeue, "ann").await.unwrap(), published[..1]);
    let again = db.thin(published[0]).await;
    assert_eq!((again.attempts, again.claims, again.before), (0, 0, None));
    assert!(again.due.is_some());
    assert_eq!(again.key, head.key, "back in its key's queue");
    assert_eq!(db.thin(published[1]).await.before, Some(published[0]));
    assert!(again.version > head.version);

    // One that waits for its retry.
    db.store.setback("i", &[setback(&again, Some(Duration::from_secs(3600)))]).await.unwrap();
    assert_eq!(db.store.act(&published[..1], &Action::Requeue, "ann").await.unwrap(), published[..1]);
    assert_eq!(db.thin(published[0]).await.attempts, 0);
}

async fn requeue_leaves_alone_what_is_not_waiting<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..3).map(|_| Message::to("d"))).await;
    let rows = db.eligible().await;
    db.store.delivered("i", &[done(&rows[0])]).await.unwrap();
    db.store.claim("i", &[done(&rows[1])], Duration::from_secs(3600)).await.unwrap();
    let ids = [published[0], published[1], published[2], 999_999];
    assert!(db.store.act(&ids, &Action::Requeue, "ann").await.unwrap().is_empty(), "sent, in flight, fresh, unknown");
    assert_eq!(db.status(published[0]).await, "SENT");
    assert_eq!(db.status(published[1]).await, "SENDING");
    assert_eq!(db.thin(published[2]).await.version, rows[2].version);
    assert_eq!(db.int("SELECT count(*) FROM {audit}").await, 0);
}

async fn skip_gives_up_and_frees_the_key<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..2).map(|_| Message::to("d").key("k"))).await;
    let head = db.thin(published[0]).await;
    db.store.setback("i", &[setback(&head, Some(Duration::ZERO))]).await.unwrap();
    assert_eq!(db.store.act(&published[..1], &Action::Skip, "ann'; --").await.unwrap(), published[..1]);
    let shown = db.store.show(published[0]).await.unwrap().unwrap();
    assert_eq!(shown.row.status, "FAILED");
    assert_eq!(shown.row.last_error.as_deref(), Some("it did not work; skipped by ann'; --"));
    let rows = db.eligible().await;
    assert_eq!(ids(&rows), [published[1]]);
    assert_eq!(rows[0].before, None);
    // An outcome that was under way finds another version.
    assert!(db.store.delivered("i", &[done(&head)]).await.unwrap().is_empty());
    assert_eq!(db.store.act(&published[1..], &Action::Skip, "ann").await.unwrap(), published[1..]);
    let shown = db.store.show(published[1]).await.unwrap().unwrap();
    assert_eq!(shown.row.last_error.as_deref(), Some("skipped by ann"));
}

async fn edit_sends_elsewhere<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..2).map(|_| Message::to("d").key("k"))).await;
    let head = db.thin(published[0]).await;
    db.store.setback("i", &[setback(&head, None)]).await.unwrap();
    let edit = Action::Edit { destination: "wo anders 😀".into() };
    assert_eq!(db.store.act(&published[..1], &edit, "ann").await.unwrap(), published[..1]);
    let edited = db.thin(published[0]).await;
    assert_eq!(edited.destination, "wo anders 😀");
    assert_eq!((edited.house, &edited.key), (head.house, &head.key), "it keeps its place in the order");
    assert_eq!(db.thin(published[1]).await.before, Some(published[0]));
    assert_eq!(db.store.show(published[0]).await.unwrap().unwrap().row.destination, "wo anders 😀");
    assert_eq!(db.load_one(published[0]).await.destination, "d", "the log isn't changed");
    assert_eq!(db.texts("SELECT detail FROM {audit}").await, [Some("wo anders 😀".to_owned())]);
    assert_eq!(db.store.delivered("i", &[done(&edited)]).await.unwrap(), published[..1]);
}

async fn every_action_is_counted_and_can_be_asked_for<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish([Message::to("d").key("k"), Message::to("d")]).await;
    let rows = db.eligible().await;
    let start = db.poll().await.changes;
    assert!(db.store.changes(start).await.unwrap().is_empty());
    db.store.act(&published, &Action::Edit { destination: "e".into() }, "ann").await.unwrap();
    let first = db.poll().await.changes;
    assert!(first > start);
    db.store.act(&published[..1], &Action::Skip, "bob").await.unwrap();
    let second = db.poll().await.changes;
    assert!(second > first);

    let mut changes = db.store.changes(start).await.unwrap();
    changes.sort_by_key(|c| c.id);
    assert_eq!(changes.iter().map(|c| c.id).collect::<Vec<_>>(), [published[0], published[0], published[1]]);
    for change in &changes {
        let row = rows.iter().find(|t| t.id == change.id).unwrap();
        assert_eq!((change.house, &change.key), (row.house, &row.key), "the key it has (or had)");
    }
    let since = db.store.changes(first).await.unwrap();
    assert_eq!(since.len(), 1);
    assert_eq!(crate::store::tables::key_of(&rows[0]), (since[0].house, since[0].key.clone().unwrap()));
    assert_eq!(key_of(&rows[0]).1, since[0].key.clone().unwrap());
    assert!(db.store.changes(second).await.unwrap().is_empty());
    let lines = db.texts("SELECT action FROM {audit} ORDER BY id").await;
    assert_eq!(lines.iter().flatten().collect::<Vec<_>>(), ["edit", "edit", "skip"]);
    let actors = db.texts("SELECT actor FROM {audit} ORDER BY id").await;
    assert_eq!(actors.iter().flatten().collect::<Vec<_>>(), ["ann", "ann", "bob"]);
}

/// One message per status: (pending, sending, sent, failed).
async fn one_of_each<T: StoreDb>(db: &Fresh<T>) -> [i64; 4] {
    let published = db.publish((0..4).map(|n| Message::to("d").key(n).typed("t").payload("12345"))).await;
    let rows = db.eligible().await;
    db.store.claim("i", &[done(&rows[1])], Duration::from_secs(3600)).await.unwrap();
    db.store.delivered("i", &[done(&rows[2])]).await.unwrap();
    db.store.setback("i", &[setback(&rows[3], None)]).await.unwrap();
    published.try_into().unwrap()
}

async fn list(store: &dyn Store, filter: MessageFilter) -> Vec<i64> {
    store
        .list(&MessageFilter { limit: if filter.limit == 0 { 100 } else { filter.limit }, ..filter })
        .await
        .unwrap()
        .rows
        .iter()
        .map(|r| r.id)
        .collect()
}

async fn lists_show_every_status<T: StoreDb>(db: &Fresh<T>) {
    let [pending, sending, sent, failed] = one_of_each(db).await;
    let all = db.store.list(&MessageFilter { limit: 100, ..MessageFilter::default() }).await.unwrap().rows;
    let found: Vec<_> = all.iter().map(|r| (r.id, r.status.as_str())).collect();
    assert_eq!(found, [(failed, "FAILED"), (sent, "SENT"), (sending, "SENDING"), (pending, "PENDING")]);
    for row in &all {
        assert_eq!((row.destination.as_str(), row.kind.as_str(), row.size), ("d", "t", 5));
        assert!(row.key.is_some() && (0..T::HOUSES as i32).contains(&row.house));
    }
    for (status, id) in [
        (MessageStatus::Pending, pending),
        (MessageStatus::Sending, sending),
        (MessageStatus::Sent, sent),
        (MessageStatus::Failed, failed),
    ] {
        assert_eq!(list(&*db.store, MessageFilter { status: Some(status), ..MessageFilter::default() }).await, [id]);
    }
}

async fn lists_filter_and_page<T: StoreDb>(db: &Fresh<T>) {
    let published =
        db.publish((0..30).map(|n| Message::to(["a", "A"][n % 2]).key(["k", "K", "k "][n % 3]).id(format!("id-{n}")))).await;
    let newest_first: Vec<i64> = published.iter().rev().copied().collect();
    let mut paged = Vec::new();
    let mut before = None;
    loop {
        let page = list(&*db.store, MessageFilter { before, limit: 7, ..MessageFilter::default() }).await;
        assert!(page.len() <= 7);
        let Some(last) = page.last() else { break };
        before = Some(*last);
        paged.extend(page);
    }
    assert_eq!(paged, newest_first);
    let a = list(&*db.store, MessageFilter { destination: Some("a".into()), ..MessageFilter::default() }).await;
    assert_eq!(a.len(), 15);
    let pending_k = MessageFilter { key: Some("k".into()), status: Some(MessageStatus::Pending), ..MessageFilter::default() };
    assert_eq!(list(&*db.store, pending_k).await.len(), 10);
    let one = MessageFilter { message_id: Some("id-7".into()), ..MessageFilter::default() };
    assert_eq!(list(&*db.store, one).await, [published[7]]);
    db.store.act(&published[..1], &Action::Edit { destination: "moved".into() }, "ann").await.unwrap();
    let moved = MessageFilter { destination: Some("moved".into()), ..MessageFilter::default() };
    assert_eq!(list(&*db.store, moved).await, [published[0]], "by where it goes now");
}

async fn lists_find_times_and_texts<T: StoreDb>(db: &Fresh<T>) {
    let published = db
        .publish((0..40).map(|n| {
            let message = Message::to("d").id(format!("id-{n}")).payload(format!("ä{n}ö").into_bytes());
            if n % 2 == 0 { message.key(format!("key{n}")) } else { message.typed(format!("type{n}")) }
        }))
        .await;
    let text = |text: &str| MessageFilter { text: Some(text.into()), ..MessageFilter::default() };
    for (wanted, n) in [("id-17", 17), ("key22", 22), ("type23", 23), ("ä31ö", 31)] {
        assert_eq!(list(&*db.store, text(wanted)).await, [published[n]], "{wanted}");
    }
    assert!(list(&*db.store, text("KEY22")).await.is_empty(), "byte for byte");
    let head = db.thin(published[5]).await;
    db.store.setback("i", &[setback(&head, None)]).await.unwrap();
    assert_eq!(list(&*db.store, text("did not")).await, [published[5]], "in the error");
    let failed = MessageFilter { status: Some(MessageStatus::Failed), ..text("ä") };
    assert_eq!(list(&*db.store, failed).await, [published[5]]);
    // What is found by a sealed payload alone is not found; by another field it is. The published destination counts too.
    db.store.act(&published[31..32], &Action::Edit { destination: "elsewhere".into() }, "ann").await.unwrap();
    for sealed in ["d", "else*", "*"] {
        let sealed = MessageFilter { sealed: vec![sealed.into()], ..text("ä31ö") };
        assert!(list(&*db.store, sealed).await.is_empty());
    }
    assert_eq!(list(&*db.store, MessageFilter { sealed: vec!["x".into()], ..text("ä31ö") }).await, [published[31]]);
    assert_eq!(list(&*db.store, MessageFilter { sealed: vec!["*".into()], ..text("id-31") }).await, [published[31]]);

    // Three days, a day's messages each. The last of the first day has the highest id of all: its statement took that long.
    for (day, ids) in [(2, &published[..20]), (1, &published[20..39]), (0, &published[39..])] {
        let (low, high) = (ids[0], ids[ids.len() - 1]);
        db.run(&T::created(&format!("{{message}} SET created_at = %NOW% - {day} * %DAY% WHERE id BETWEEN {low} AND {high}")))
            .await;
    }
    db.run(&T::created(&format!("{{message}} SET created_at = %NOW% - 1 * %DAY% - 5 * %SECOND% WHERE id = {}", published[38])))
        .await;
    let at = async |n: usize| db.store.show(published[n]).await.unwrap().unwrap().row.created_at_ms;
    let between = |from: Option<i64>, to: Option<i64>| MessageFilter {
        created_after_ms: from,
        created_before_ms: to,
        ..MessageFilter::default()
    };
    let (second, third) = (at(20).await, at(39).await);
    let newest_first = |ids: &[i64]| ids.iter().rev().copied().collect::<Vec<_>>();
    assert_eq!(list(&*db.store, between(Some(third), None)).await, [published[39]]);
    assert_eq!(list(&*db.store, between(Some(second), Some(third))).await, newest_first(&published[20..38]));
    let late = [published[38]].into_iter().chain(newest_first(&published[..20])).collect::<Vec<_>>();
    assert_eq!(list(&*db.store, between(None, Some(second))).await, late, "also the one that committed late");
    assert!(list(&*db.store, between(Some(third + 60_000), None)).await.is_empty());
    assert!(list(&*db.store, between(None, Some(at(0).await))).await.is_empty());
    let pending = MessageFilter { status: Some(MessageStatus::Pending), limit: 3, ..between(None, Some(second)) };
    assert_eq!(list(&*db.store, pending).await, late[..3]);
    db.run("DELETE FROM {pending}").await;
    db.run("DELETE FROM {message}").await;
    assert!(list(&*db.store, between(Some(0), Some(third))).await.is_empty());
}

async fn searches_are_bounded_and_go_on<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..1_200).map(|n| Message::to(if n < 3 { "rare" } else { "often" }).key(n % 70))).await;
    let rows = db.eligible().await;
    let failed: Vec<Setback> = rows.iter().step_by(100).map(|row| setback(row, None)).collect();
    db.store.setback("i", &failed).await.unwrap();
    let sent: Vec<_> = rows.iter().skip(1).step_by(2).map(done).collect();
    db.store.delivered("i", &sent).await.unwrap();
    let all = |filter: MessageFilter| async move {
        let (mut found, mut stops, mut before) = (Vec::new(), 0, None);
        loop {
            let page = MessageFilter { before, limit: 90, within: Some(Duration::ZERO), ..filter.clone() };
            let listed = db.store.list(&page).await.unwrap();
            assert!(listed.rows.len() <= 90 && (!listed.stopped || listed.next.is_some()));
            found.extend(listed.rows.iter().map(|r| r.id));
            stops += usize::from(listed.stopped);
            before = listed.next;
            if before.is_none() {
                return (found, stops);
            }
        }
    };
    let newest_first = |ids: Vec<i64>| ids.into_iter().rev().collect::<Vec<_>>();
    let of = |first: usize, step: usize| published.iter().skip(first).step_by(step).copied().collect::<Vec<_>>();
    let status = |status| MessageFilter { status: Some(status), ..MessageFilter::default() };
    assert_eq!(all(status(MessageStatus::Failed)).await.0, newest_first(of(0, 100)));
    let pending: Vec<i64> = of(0, 2).into_iter().filter(|id| !of(0, 100).contains(id)).collect();
    assert_eq!(all(status(MessageStatus::Pending)).await.0, newest_first(pending.clone()));
    assert_eq!(all(status(MessageStatus::Sent)).await.0, newest_first(of(1, 2)));
    assert_eq!(all(MessageFilter::default()).await.0, newest_first(published.clone()));
    let rare = MessageFilter { destination: Some("rare".into()), ..MessageFilter::default() };
    let (found, stops) = all(rare.clone()).await;
    assert_eq!(found, newest_first(published[..3].to_vec()));
    assert!(stops >= 2, "with no time at all it stops after each step: {stops}");
    assert_eq!(all(MessageFilter { status: Some(MessageStatus::Pending), ..rare }).await.0, [published[2]]);
    let key = MessageFilter { key: Some("7".into()), ..MessageFilter::default() };
    assert_eq!(all(key.clone()).await.0, newest_first(of(7, 70)));
    let waiting = MessageFilter { status: Some(MessageStatus::Pending), ..key };
    let expected: Vec<i64> = of(7, 70).into_iter().filter(|id| pending.contains(id)).collect();
    assert_eq!(all(waiting).await.0, newest_first(expected));
    // Rows in a house that doesn't exist (any more) are listed with the others.
    if T::HOUSES > 1 {
        db.run(&format!("UPDATE {{pending}} SET house = 90 WHERE id = {}", pending[0])).await;
        assert_eq!(all(status(MessageStatus::Pending)).await.0, newest_first(pending));
    }
}

async fn the_audit_log_is_paged_and_filtered<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..3).map(|_| Message::to("d"))).await;
    db.store.act(&published, &Action::Skip, "ann").await.unwrap();
    db.store.act(&published[..1], &Action::Requeue, "bob").await.unwrap();
    let record = Record { actor: "Ann", action: "bulk skip", detail: "{\"a\":\"ä\"}", amount: Some(3) };
    db.store.record(&record).await.unwrap();
    let page = |filter: AuditFilter| async move { db.store.audits(&AuditFilter { limit: 2, ..filter }).await.unwrap() };
    let first = page(AuditFilter::default()).await;
    let line = &first.rows[0];
    assert_eq!((line.actor.as_str(), line.action.as_str(), line.row_id, line.amount), ("Ann", "bulk skip", None, Some(3)));
    assert_eq!(line.detail.as_deref(), Some("{\"a\":\"ä\"}"));
    assert_eq!((first.rows[1].action.as_str(), first.rows[1].row_id), ("requeue", Some(published[0])));
    assert!(!first.stopped);
    let second = page(AuditFilter { before: first.next, ..AuditFilter::default() }).await;
    let last = page(AuditFilter { before: second.next, ..AuditFilter::default() }).await;
    assert_eq!((second.rows.len(), last.rows.len(), last.next), (2, 1, None));
    let of = async |filter: AuditFilter| -> Vec<String> { page(filter).await.rows.into_iter().map(|l| l.action).collect() };
    assert_eq!(of(AuditFilter { actor: Some("bob".into()), ..AuditFilter::default() }).await, ["requeue"]);
    assert_eq!(of(AuditFilter { actor: Some("Ann".into()), ..AuditFilter::default() }).await, ["bulk skip"]);
    assert_eq!(of(AuditFilter { action: Some("skip".into()), ..AuditFilter::default() }).await, ["skip", "skip"]);
    assert_eq!(of(AuditFilter { row_id: Some(published[0]), ..AuditFilter::default() }).await, ["requeue", "skip"]);
}

async fn a_message_shows_everything<T: StoreDb>(db: &Fresh<T>) {
    let message = Message::to("d").key("k").typed("t").id("m-1").payload([0, 255]).content_type("x/y").header("h", "v");
    let id = db.publish_one(message).await;
    let shown = db.store.show(id).await.unwrap().unwrap();
    assert_eq!(shown.row.message_id, "m-1");
    assert_eq!((shown.row.key.as_deref(), shown.row.kind.as_str()), (Some("k"), "t"));
    assert_eq!((shown.content_type.as_str(), &shown.payload[..]), ("x/y", &[0, 255][..]));
    assert_eq!(shown.headers.as_deref(), Some(r#"{"h":"v"}"#));
    assert_eq!(shown.row.size as usize, 2 + r#"{"h":"v"}"#.len());
    assert_eq!((shown.row.next_attempt_ms, shown.row.last_error), (None, None));
    assert!(shown.history.is_empty() && shown.delivered.is_none());
    assert!(db.store.show(id + 1).await.unwrap().is_none());
}

async fn the_view_shows_every_status<T: StoreDb>(db: &Fresh<T>) {
    let [pending, sending, sent, failed] = one_of_each(db).await;
    for (status, id) in [("PENDING", pending), ("SENDING", sending), ("SENT", sent), ("FAILED", failed)] {
        assert_eq!(db.int(&format!("SELECT id FROM {{outbox}} WHERE status = '{status}'")).await, id);
        assert_eq!(db.texts(&format!("SELECT destination FROM {{outbox}} WHERE id = {id}")).await, [Some("d".to_owned())]);
    }
    assert_eq!(db.int("SELECT count(*) FROM {outbox}").await, 4);
    assert_eq!(
        db.texts(&format!("SELECT last_error FROM {{outbox}} WHERE id = {failed}")).await,
        [Some("it did not work".into())]
    );
    assert_eq!(db.int("SELECT count(*) FROM {outbox} WHERE created_at IS NULL OR message_id IS NULL").await, 0);
    assert_eq!(db.int("SELECT count(*) FROM {outbox} WHERE next_attempt_at IS NOT NULL").await, 1, "the one that is in flight");
    let houses = db.int("SELECT count(*) FROM {outbox} o JOIN {message} m ON m.id = o.id WHERE o.house = {HOUSE}").await;
    assert_eq!(houses, 4);
}

async fn the_backlog_counts_what_is_unfinished<T: StoreDb>(db: &Fresh<T>) {
    assert!(db.store.backlog().await.unwrap().is_empty());
    one_of_each(db).await;
    db.publish([Message::to("D"), Message::to("d")]).await;
    let mut lines: Vec<_> =
        db.store.backlog().await.unwrap().into_iter().map(|b| (b.destination, b.status, b.messages, b.oldest_ms)).collect();
    lines.sort();
    let counts: Vec<_> = lines.iter().map(|l| (l.0.as_str(), l.1.as_str(), l.2)).collect();
    assert_eq!(counts, [("D", "PENDING", 1), ("d", "FAILED", 1), ("d", "PENDING", 2), ("d", "SENDING", 1)]);
    assert!(lines.iter().all(|l| (0..600_000).contains(&l.3)), "{lines:?}");
    let houses = db.store.houses().await.unwrap();
    assert_eq!(houses.iter().map(|h| h.pending).sum::<i64>(), 5);
    assert_eq!(sorted(houses.iter().map(|h| i64::from(h.house)).collect()), (0..T::HOUSES as i64).collect::<Vec<_>>());
}
