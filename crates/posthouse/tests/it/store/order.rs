//! What keeps the messages of a key in order.

use std::time::Duration;

use posthouse::Message;
use posthouse::store::Mark;

use crate::store::tables::{Fresh, StoreDb, by_id, done, ids, key_of, on_all_stores, setback};

on_all_stores!(
    before_is_the_nearest_lower_pending_row_of_the_key,
    keys_that_look_alike_are_different_keys,
    a_sweep_returns_only_heads,
    of_keys_reads_the_lowest_rows_of_each_key,
);

async fn before_is_the_nearest_lower_pending_row_of_the_key<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish(["a", "b", "a", "b", "a"].map(|k| Message::to("d").key(k))).await;
    let unkeyed = db.publish_one(Message::to("d")).await;
    let before = async || by_id(db.poll().await.rows).iter().map(|t| (t.id, t.before)).collect::<Vec<_>>();
    let [a1, b1, a2, b2, a3] = published[..] else { panic!("{published:?}") };
    let expected = [(a1, None), (b1, None), (a2, Some(a1)), (b2, Some(b1)), (a3, Some(a2)), (unkeyed, None)];
    assert_eq!(before().await, expected);

    // Also when the mark hides the lower row, and when that one waits or has failed.
    let marks: Vec<Mark> = db.marks().await.iter().map(|m| Mark { after: a1, ..*m }).collect();
    let above = by_id(db.store.poll(&marks, 100, &[]).await.unwrap().rows);
    assert_eq!(above.iter().find(|t| t.id == a2).unwrap().before, Some(a1));
    let head = db.thin(a1).await;
    db.store.setback("i", &[setback(&head, Some(Duration::from_secs(3600)))]).await.unwrap();
    assert_eq!(db.thin(a2).await.before, Some(a1));
    db.run(&format!("UPDATE {{pending}} SET due_at = {{PAST}} WHERE id = {a1}")).await;
    let head = db.thin(a1).await;
    db.store.setback("i", &[setback(&head, None)]).await.unwrap();
    assert_eq!(db.thin(a2).await.before, Some(a1), "on_exhausted = block");

    // Delivered in the middle: the next nearest.
    let middle = db.thin(a2).await;
    assert_eq!(db.store.delivered("i", &[done(&middle)]).await.unwrap(), [a2]);
    assert_eq!(db.thin(a3).await.before, Some(a1));
}

async fn keys_that_look_alike_are_different_keys<T: StoreDb>(db: &Fresh<T>) {
    let keys = ["e", "E", "é", "e\u{301}", "e ", " e", "e\t", "ß", "ss", "ı", "i", "1", "01", "1.0", "ａ", "a"];
    db.publish(keys.map(|k| Message::to("d").key(k))).await;
    // The same text, divided differently between destination and key.
    db.publish([Message::to("d1").key("2"), Message::to("d").key("12"), Message::to("d12").key("")].into_iter().take(2)).await;
    db.publish(["D", "d ", "ｄ"].map(|d| Message::to(d).key("e"))).await;
    let rows = db.eligible().await;
    assert_eq!(rows.len(), keys.len() + 5);
    for t in &rows {
        assert_eq!(t.before, None, "{t:?}");
    }
    let distinct: std::collections::HashSet<_> = rows.iter().map(key_of).collect();
    assert_eq!(distinct.len(), rows.len());
    for t in &rows {
        assert_eq!(ids(&db.store.of_keys(&[key_of(t)], 10).await.unwrap()), [t.id]);
    }
}

async fn a_sweep_returns_only_heads<T: StoreDb>(db: &Fresh<T>) {
    let published = db.publish((0..30).map(|n| Message::to("d").key(n % 3))).await;
    let unkeyed = db.publish([Message::to("d"), Message::to("d")]).await;
    let marks = db.marks().await;
    let sweep = async |marks: &[Mark]| {
        let rows = by_id(db.store.sweep(marks, 100, &[]).await.unwrap());
        assert!(rows.iter().all(|t| t.before.is_none()));
        ids(&rows)
    };
    assert_eq!(sweep(&marks).await, [&published[..3], &unkeyed[..]].concat());

    // A head that waits is no head to be sent, and its followers stay behind it.
    let head = db.thin(published[0]).await;
    db.store.setback("i", &[setback(&head, Some(Duration::from_secs(3600)))]).await.unwrap();
    assert_eq!(sweep(&marks).await, [&published[1..3], &unkeyed[..]].concat());
    // A head outside the marks still is the head.
    let above: Vec<Mark> = marks.iter().map(|m| Mark { after: published[2], ..*m }).collect();
    assert_eq!(sweep(&above).await, unkeyed);
    let below: Vec<Mark> = marks.iter().map(|m| Mark { upto: published[1], ..*m }).collect();
    assert_eq!(sweep(&below).await, [published[1]], "rows up to the mark's end, which is included");
    // The limit is per house, in the order of ids.
    let per_house = db.store.sweep(&marks, 1, &[]).await.unwrap();
    let houses: std::collections::HashSet<_> = per_house.iter().map(|t| t.house).collect();
    assert_eq!(houses.len(), per_house.len());
}

async fn of_keys_reads_the_lowest_rows_of_each_key<T: StoreDb>(db: &Fresh<T>) {
    // More keys than fit into one statement of any store.
    let published = db.publish((0..450).map(|n| Message::to("d").key(n % 150))).await;
    let rows = db.eligible().await;
    let keys: Vec<_> = rows.iter().take(150).map(key_of).collect();
    let found = by_id(db.store.of_keys(&keys, 2).await.unwrap());
    assert_eq!(ids(&found), published[..300]);
    for t in &found[150..] {
        assert_eq!(t.before, Some(t.id - (found[150].id - found[0].id)), "the row of the same key one round earlier");
    }
    assert_eq!(ids(&db.store.of_keys(&keys[3..4], 10).await.unwrap()).len(), 3);
    assert!(db.store.of_keys(&[], 10).await.unwrap().is_empty());
}
