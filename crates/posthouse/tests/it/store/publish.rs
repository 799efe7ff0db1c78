//! A message is there exactly when its transaction committed, byte for byte.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use posthouse::{Error, Message};
use sqlx::Connection as _;

use crate::store::tables::{Fresh, StoreDb, ids, on_all_stores, publish_on};

on_all_stores!(
    what_was_published_is_loaded_byte_for_byte,
    nothing_is_left_of_what_did_not_commit,
    publish_needs_a_transaction,
    publish_many_keeps_order_and_count,
    a_dedup_key_publishes_once,
    a_dedup_key_publishes_once_when_used_at_the_same_time,
    a_dedup_key_is_free_again_after_a_rollback,
    a_plain_insert_publishes,
    a_plain_insert_has_limits_too,
    every_publisher_agrees_on_the_house,
    a_delayed_message_waits,
);

async fn what_was_published_is_loaded_byte_for_byte<T: StoreDb>(db: &Fresh<T>) {
    let all_bytes: Vec<u8> = (0..=255).collect();
    let big: Vec<u8> = (0..1_000_000u32).map(|n| (n % 251) as u8).collect();
    let published = [
        ("orders", Some("order-7"), "order.placed.v1", "application/json", r#"{"a":1}"#.as_bytes().to_vec()),
        ("🏤 驿站", Some("👩‍👩‍👧‍👦 clé Ключ"), "zażółć", "text/plain; charset=utf-8", "😀 𝒳 \u{10ffff}".as_bytes().to_vec()),
        ("https://example.org/a?b=%20'\"`\\", Some("שלום مرحبا \u{202e}"), "a\tb\n", "x", "\u{200f}שלום".as_bytes().to_vec()),
        ("binary", None, "", "application/octet-stream", all_bytes),
        ("big", None, "", "application/octet-stream", big),
        ("empty", Some(" "), "", "application/octet-stream", Vec::new()),
        ("zeros", None, "", "application/octet-stream", vec![0; 3]),
    ];
    let began = SystemTime::now();
    for (destination, key, kind, content_type, payload) in published {
        let mut message = Message::to(destination)
            .typed(kind)
            .content_type(content_type)
            .payload(payload.clone())
            .header("traceparent", "00-1-2-03")
            .header("naïve 😀", "\"quoted\"\r\n\\");
        if let Some(key) = key {
            message = message.key(key);
        }
        let mut tx = db.outbox.begin().await.unwrap();
        let message_id = tx.publish(message).await.unwrap();
        tx.commit().await.unwrap();

        let thin = db.eligible().await.pop().unwrap();
        assert_eq!(thin.destination, destination);
        assert_eq!(thin.key.is_some(), key.is_some());
        assert!(thin.size as usize > payload.len(), "{} with headers is more than {}", thin.size, payload.len());
        assert_eq!((thin.attempts, thin.claims, thin.before, thin.due), (0, 0, None, None));
        let envelope = db.load_one(thin.id).await;
        assert_eq!(envelope.id, thin.id);
        assert_eq!(envelope.message_id, message_id);
        assert_eq!(envelope.destination, destination);
        assert_eq!(envelope.key.as_deref(), key);
        assert_eq!(envelope.kind, kind);
        assert_eq!(envelope.content_type, content_type);
        assert!(envelope.payload == payload, "the payload for {destination}");
        assert_eq!(envelope.headers.get("traceparent"), Some("00-1-2-03"));
        assert_eq!(envelope.headers.get("naïve 😀"), Some("\"quoted\"\r\n\\"));
        assert_eq!(envelope.headers.len(), 2);
        // The database may be on a machine whose clock is a little off, but not by hours.
        let off = envelope.created_at.duration_since(began).unwrap_or_else(|e| e.duration());
        assert!(off < Duration::from_secs(600), "created_at is off by {off:?}");
    }
}

async fn nothing_is_left_of_what_did_not_commit<T: StoreDb>(db: &Fresh<T>) {
    let mut tx = db.outbox.begin().await.unwrap();
    tx.publish(Message::to("rolled-back")).await.unwrap();
    tx.rollback().await.unwrap();

    let mut tx = db.outbox.begin().await.unwrap();
    tx.publish(Message::to("dropped")).await.unwrap();
    drop(tx);

    let failed: Result<(), Error> = db
        .outbox
        .transaction(async |tx| {
            tx.publish(Message::to("failed")).await?;
            Err(Error::Config("no".into()))
        })
        .await;
    assert!(failed.is_err());

    let mut tx = db.outbox.begin().await.unwrap();
    tx.publish(Message::to("kept")).await.unwrap();
    let mut savepoint = (*tx).begin().await.unwrap();
    publish_on::<T>(&db.outbox, &mut savepoint, Message::to("savepoint")).await.unwrap();
    savepoint.rollback().await.unwrap();
    let mut savepoint = (*tx).begin().await.unwrap();
    publish_on::<T>(&db.outbox, &mut savepoint, Message::to("kept-too")).await.unwrap();
    savepoint.commit().await.unwrap();
    tx.commit().await.unwrap();

    let rows = db.eligible().await;
    assert_eq!(rows.iter().map(|t| t.destination.as_str()).collect::<Vec<_>>(), ["kept", "kept-too"]);
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 2);
}

async fn publish_needs_a_transaction<T: StoreDb>(db: &Fresh<T>) {
    let mut conn = db.place.pool.acquire().await.unwrap();
    let refused = publish_on::<T>(&db.outbox, &mut conn, Message::to("orders")).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");
    let refused = db.outbox.publish_many(&mut conn, [Message::to("orders")]).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");
    drop(conn);
    assert!(db.eligible().await.is_empty());
    db.outbox.publish_alone(Message::to("orders")).await.unwrap();
    assert_eq!(db.eligible().await.len(), 1);
}

async fn publish_many_keeps_order_and_count<T: StoreDb>(db: &Fresh<T>) {
    // More rows than any driver has bind parameters.
    const COUNT: usize = 20_000;
    let mut tx = db.outbox.begin().await.unwrap();
    let messages = (0..COUNT).map(|n| Message::to("many").key(n % 7).payload(n.to_string()));
    let message_ids = tx_publish_many(db, &mut tx, messages).await;
    tx.commit().await.unwrap();
    assert_eq!(message_ids.iter().collect::<HashSet<_>>().len(), COUNT);

    let rows = db.eligible().await;
    assert_eq!(rows.len(), COUNT);
    let mut loaded = Vec::new();
    for chunk in ids(&rows).chunks(5_000) {
        loaded.extend(db.store.load(chunk).await.unwrap());
    }
    loaded.sort_by_key(|l| l.0);
    for (n, (_, envelope)) in loaded.into_iter().enumerate() {
        let envelope = envelope.unwrap();
        assert_eq!(envelope.payload, n.to_string().as_bytes(), "row ids follow the order of publishing");
        assert_eq!(envelope.message_id.as_str(), message_ids[n]);
    }

    // One that is refused leaves nothing of the others.
    let mut tx = db.outbox.begin().await.unwrap();
    let refused = db.outbox.publish_many(&mut tx, [Message::to("a"), Message::to("")]).await;
    assert!(matches!(refused, Err(Error::Invalid { field: "destination", .. })), "{refused:?}");
    tx.commit().await.unwrap();
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, COUNT as i64);
}

async fn tx_publish_many<T: StoreDb>(
    db: &Fresh<T>,
    tx: &mut posthouse::Tx<T::Db>,
    messages: impl IntoIterator<Item = Message>,
) -> Vec<String> {
    let ids = db.outbox.publish_many(tx, messages).await.unwrap();
    ids.iter().map(ToString::to_string).collect()
}

async fn a_dedup_key_publishes_once<T: StoreDb>(db: &Fresh<T>) {
    let message = || Message::to("orders").dedup_key("order-7-placed").payload("x");
    let first = db.outbox.publish_alone(message()).await.unwrap();
    let mut tx = db.outbox.begin().await.unwrap();
    assert_eq!(tx.publish(message()).await.unwrap(), first, "the id of the first message comes back");
    // The transaction goes on after a duplicate.
    tx.publish(Message::to("after")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(db.eligible().await.len(), 2);

    // Within one batch, next to old keys and to messages without one; the order stays.
    let batch = [
        Message::to("1").dedup_key("a"),
        Message::to("2"),
        Message::to("3").dedup_key("order-7-placed"),
        Message::to("4").dedup_key("a"),
        Message::to("5").dedup_key("A"),
        Message::to("6").dedup_key("a "),
    ];
    db.publish(batch).await;
    let destinations: Vec<_> = db.eligible().await.into_iter().skip(2).map(|t| t.destination).collect();
    assert_eq!(destinations, ["1", "2", "5", "6"]);
}

async fn a_dedup_key_publishes_once_when_used_at_the_same_time<T: StoreDb>(db: &Fresh<T>) {
    let publish = (0..8).map(|n| db.outbox.publish_alone(Message::to(format!("d{n}")).dedup_key("same")));
    for result in join_all(publish).await {
        assert_eq!(result.unwrap().as_str(), "same");
    }
    assert_eq!(db.eligible().await.len(), 1);
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 1);
}

async fn a_dedup_key_is_free_again_after_a_rollback<T: StoreDb>(db: &Fresh<T>) {
    let mut tx = db.outbox.begin().await.unwrap();
    tx.publish(Message::to("orders").dedup_key("k")).await.unwrap();
    tx.rollback().await.unwrap();
    db.outbox.publish_alone(Message::to("orders").dedup_key("k")).await.unwrap();
    assert_eq!(db.eligible().await.len(), 1);
}

async fn a_plain_insert_publishes<T: StoreDb>(db: &Fresh<T>) {
    db.run("INSERT INTO {message} (destination, payload) VALUES ('orders', '[1, \"ä\"]')").await;
    db.run("INSERT INTO {message} (destination, message_key, type, headers) VALUES ('orders', 'k', 't', '[1]')").await;
    let rows = db.eligible().await;
    assert_eq!(rows.len(), 2);
    assert_eq!((rows[0].key.is_some(), rows[1].key.is_some()), (false, true));
    let envelope = db.load_one(rows[0].id).await;
    assert_eq!(envelope.payload, "[1, \"ä\"]".as_bytes());
    assert_eq!(envelope.content_type, "application/json");
    assert!(!envelope.message_id.as_str().is_empty());
    assert_eq!(rows[0].size as usize, envelope.payload.len());
}

async fn a_plain_insert_has_limits_too<T: StoreDb>(db: &Fresh<T>) {
    let long = "x".repeat(256);
    for bad in [
        "(destination) VALUES ('')".to_owned(),
        format!("(destination) VALUES ('{long}')"),
        format!("(destination, message_key) VALUES ('a', '{long}')"),
        "(destination, headers) VALUES ('a', 'not json')".to_owned(),
        "(destination, max_attempts) VALUES ('a', 0)".to_owned(),
        "(destination) VALUES (NULL)".to_owned(),
    ] {
        assert!(db.try_run(&format!("INSERT INTO {{message}} {bad}")).await.is_err(), "{bad}");
    }
    assert_eq!(db.int("SELECT count(*) FROM {pending}").await, 0);
}

async fn every_publisher_agrees_on_the_house<T: StoreDb>(db: &Fresh<T>) {
    db.publish((0..100).map(|n| Message::to("many").key(format!("schlüssel {n}")))).await;
    db.publish((0..50).map(|_| Message::to("unkeyed"))).await;
    for n in 0..100 {
        db.run(&format!("INSERT INTO {{message}} (destination, message_key) VALUES ('many', 'schlüssel {n}')")).await;
    }
    db.run("INSERT INTO {message} (destination) VALUES ('unkeyed')").await;
    assert_eq!(db.int("SELECT count(*) FROM {pending} p JOIN {message} m ON m.id = p.id WHERE p.house = {HOUSE}").await, 251);
    let rows = db.eligible().await;
    let houses: HashSet<_> = rows.iter().map(|t| t.house).collect();
    assert_eq!(houses.len(), T::HOUSES, "251 messages use every house");
    let keys: HashSet<_> = rows.iter().filter_map(|t| t.key.as_ref().map(|k| (t.house, k.clone()))).collect();
    assert_eq!(keys.len(), 100, "both ways of publishing give a key the same hash");
}

async fn a_delayed_message_waits<T: StoreDb>(db: &Fresh<T>) {
    let hour = Duration::from_secs(3600);
    db.publish_one(Message::to("later").deliver_in(hour)).await;
    db.publish_one(Message::to("later").deliver_at(SystemTime::now() + 2 * hour)).await;
    let past = db.publish_one(Message::to("past").deliver_at(SystemTime::UNIX_EPOCH)).await;
    let poll = db.poll().await;
    assert_eq!(ids(&poll.rows), [past]);
    assert_eq!(poll.rows[0].due, Some(0));
    let all = db.all_houses().await;
    let page = db.store.due(&all, (-1, 0), 10, &[]).await.unwrap();
    assert_eq!(ids(&page.rows), [past]);
    let next = Duration::from_micros(page.next_due.unwrap() as u64);
    assert!(next <= hour && next > hour - Duration::from_secs(600), "{next:?}");
}
