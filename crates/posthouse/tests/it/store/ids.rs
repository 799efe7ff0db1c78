//! Row ids beyond 32 bits, and beyond what a double can hold.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::{Action, MessageFilter};

use crate::store::tables::{Fresh, StoreDb, by_id, done, ids, key_of, on_all_stores, setback};

on_all_stores!(ids_beyond_32_bits, ids_beyond_53_bits, ids_are_never_given_out_twice);

async fn ids_beyond_32_bits<T: StoreDb>(db: &Fresh<T>) {
    around(db, 1 << 31).await;
    around(db, 1 << 32).await;
}

async fn ids_beyond_53_bits<T: StoreDb>(db: &Fresh<T>) {
    around(db, 1 << 53).await;
}

async fn around<T: StoreDb>(db: &Fresh<T>, middle: i64) {
    T::next_id(db, middle - 3).await;
    let published = db.publish((0..7).map(|_| Message::to("d").key("k").payload("x"))).await;
    assert_eq!(published, (middle - 3..middle + 4).collect::<Vec<_>>());
    let rows = db.eligible().await;
    assert_eq!(ids(&rows), published);
    for pair in rows.windows(2) {
        assert_eq!(pair[1].before, Some(pair[0].id));
    }
    assert!(db.poll().await.houses.iter().any(|h| h.max_id == middle + 3));
    assert_eq!(db.load_one(middle + 1).await.id, middle + 1);
    assert_eq!(ids(&by_id(db.store.of_keys(&[key_of(&rows[0])], 100).await.unwrap())), published);

    assert_eq!(db.store.claim("i", &[done(&rows[4])], Duration::ZERO).await.unwrap(), [middle + 1]);
    assert_eq!(db.store.setback("i", &[setback(&rows[3], Some(Duration::ZERO))]).await.unwrap(), [middle]);
    assert_eq!(db.store.setback("i", &[setback(&rows[5], None)]).await.unwrap(), [middle + 2]);
    assert_eq!(db.store.act(&[middle + 2], &Action::Requeue, "ann").await.unwrap(), [middle + 2]);
    let page = db.store.due(&db.all_houses().await, (-1, 0), 10, &[]).await.unwrap();
    assert_eq!(ids(&by_id(page.rows)), [middle, middle + 1, middle + 2]);
    let listed = db.store.list(&MessageFilter { limit: 3, before: Some(middle + 3), ..MessageFilter::default() }).await.unwrap();
    assert_eq!(listed.rows.iter().map(|r| r.id).collect::<Vec<_>>(), [middle + 2, middle + 1, middle]);
    let last = db.thin(middle + 3).await;
    assert_eq!(db.store.delivered("i", &[done(&last)]).await.unwrap(), [middle + 3]);
    let shown = db.store.show(middle + 3).await.unwrap().unwrap();
    assert!(shown.row.status == "SENT" && shown.delivered.is_some());
    db.run("DELETE FROM {pending}").await;
}

async fn ids_are_never_given_out_twice<T: StoreDb>(db: &Fresh<T>) {
    let first = db.publish([Message::to("d"), Message::to("d")]).await;
    db.run("DELETE FROM {pending}").await;
    db.run(&format!("DELETE FROM {{message}} WHERE id = {}", first[1])).await;
    let next = db.publish_one(Message::to("d")).await;
    assert!(next > first[1], "{next} after {first:?}");
}
