//! Changing the number of houses.

use futures_util::future::join_all;
use posthouse::store::{Action, Coverage, House};
use posthouse::{Error, Message};

use crate::store::tables::{ALL, Fresh, StoreDb, done, ids, on_all_stores, publish_on, setback};

on_all_stores!(resizing_keeps_every_row_and_every_key_together);

async fn resizing_keeps_every_row_and_every_key_together<T: StoreDb>(db: &Fresh<T>) {
    if T::HOUSES == 1 {
        let refused = db.store.resize(4).await.unwrap_err();
        assert!(matches!(refused, Error::Config(_)) && refused.to_string().contains("one house"), "{refused}");
        assert_eq!(db.store.resize(1).await.unwrap(), 0);
        return;
    }
    let lease = std::time::Duration::from_secs(3600);
    db.store.join("a", &Coverage::default(), lease).await.unwrap();
    let epochs = db.store.take("a", &ALL, 100).await.unwrap();
    let highest = epochs.iter().map(|t| t.epoch).max().unwrap();
    // A session that has published before: whatever it keeps prepared must follow.
    let mut conn = db.place.pool.acquire().await.unwrap();
    for houses in [3u16, 64, 1, 8] {
        let before = db.eligible().await;
        let mut open = db.outbox.begin().await.unwrap();
        publish_on::<T>(&db.outbox, &mut open, Message::to("open").key("k")).await.unwrap();
        let publish = |n: usize| {
            let outbox = db.outbox.clone();
            async move { outbox.publish_alone(Message::to("d").key(n % 10)).await.map(drop) }
        };
        let (resized, committed, published) =
            tokio::join!(db.store.resize(houses), open.commit(), join_all((0..30).map(publish)));
        committed.unwrap();
        published.into_iter().collect::<Result<Vec<()>, _>>().unwrap();
        assert!(resized.unwrap() >= before.len() as u64);
        T::run(&mut conn, db.sql("INSERT INTO {message} (destination, message_key) VALUES ('d', '3')")).await.unwrap();
        db.run("INSERT INTO {message} (destination) VALUES ('unkeyed')").await;

        assert_eq!(db.store.check().await.unwrap().1, houses);
        let all = db.store.houses().await.unwrap();
        assert_eq!(all.iter().map(|h| h.house).collect::<Vec<_>>(), (0..i32::from(houses)).collect::<Vec<_>>());
        assert!(all.iter().all(|h| h.owner.is_none() && h.epoch > highest), "epochs never restart: {all:?}");
        let rows = db.eligible().await;
        assert_eq!(rows.len(), before.len() + 33, "no row is lost");
        let wrong = "SELECT count(*) FROM {pending} p JOIN {message} m ON m.id = p.id WHERE p.house <> {HOUSE}";
        assert_eq!(db.int(wrong).await, 0, "every publisher uses the new number");
        assert!(rows.iter().all(|t| (0..i32::from(houses)).contains(&t.house.0)));
        assert!(
            before.iter().all(|t| rows.iter().any(|r| r.id == t.id && r.version > t.version)),
            "outcomes under way are refused"
        );
        // Rows of a key still follow each other.
        for key in 0..10 {
            let of_key = db
                .ints(&format!("SELECT id FROM {{message}} WHERE destination = 'd' AND message_key = '{key}' ORDER BY id"))
                .await;
            let of_key: Vec<i64> = of_key.into_iter().flatten().collect();
            let chain: Vec<Option<i64>> = of_key.iter().map(|id| rows.iter().find(|t| t.id == *id).unwrap().before).collect();
            let expected: Vec<Option<i64>> =
                std::iter::once(None).chain(of_key.iter().copied().map(Some)).take(of_key.len()).collect();
            assert_eq!(chain, expected);
        }
    }
    // The rows can be worked on where they are now, whatever they are.
    let rows = db.eligible().await;
    assert_eq!(db.store.delivered("a", &[done(&rows[0])]).await.unwrap(), [rows[0].id]);
    assert_eq!(db.store.setback("a", &[setback(&rows[1], None)]).await.unwrap(), [rows[1].id]);
    db.store.resize(5).await.unwrap();
    assert_eq!(db.status(rows[0].id).await, "SENT");
    assert_eq!(db.status(rows[1].id).await, "FAILED");
    assert_eq!(db.store.act(&[rows[1].id], &Action::Requeue, "ann").await.unwrap(), [rows[1].id]);
    let marks = db.marks().await;
    assert!(marks.iter().any(|m| m.house == House(4)));
    assert!(ids(&db.eligible().await).contains(&rows[1].id));
}
