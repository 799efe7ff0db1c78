//! An error says which field it is about and which limit is broken, and nothing is written.

use std::collections::BTreeMap;
use std::time::Duration;

use posthouse::{Error, ErrorKind, Limits, Message, Outbox};

use super::destinations;
use crate::support::{TestDb, on_all_databases};

on_all_databases!(refusals_name_field_and_limit);

async fn refusals_name_field_and_limit<T: TestDb>() {
    let place = T::place().await;
    let mut limits = Limits::default();
    (limits.payload, limits.headers) = (1000, 100);
    let builder = Outbox::builder(place.pool.clone()).limits(limits);
    let builder = match &place.schema {
        Some(schema) => builder.schema(schema),
        None => builder,
    };
    let outbox = builder.build().unwrap();
    outbox.migrate().await.unwrap();
    let long = "é".repeat(128);
    let no_json: BTreeMap<(u8, u8), u8> = [((1, 2), 3)].into();
    let mut tx = outbox.begin().await.unwrap();
    for (message, field, words) in [
        (Message::to(""), "destination", vec![]),
        (Message::to(&*long), "destination", vec!["256 bytes", "255"]),
        (Message::to("a\0b"), "destination", vec!["NUL"]),
        (Message::to("a").key(""), "message_key", vec![]),
        (Message::to("a").key(&long), "message_key", vec!["256 bytes", "255"]),
        (Message::to("a").typed(&*long), "type", vec!["256 bytes", "255"]),
        (Message::to("a").id(&*long), "message_id", vec!["256 bytes", "255"]),
        (Message::to("a").dedup_key(&*long), "dedup_key", vec!["256 bytes", "255"]),
        (Message::to("a").content_type(long.clone()), "content_type", vec!["256 bytes", "255"]),
        (Message::to("a").payload(vec![0; 1001]), "payload", vec!["1001 bytes", "1000", "Limits::payload"]),
        (Message::to("a").json(&no_json), "payload", vec!["JSON"]),
        (Message::to("a").header("name", "x".repeat(97)), "headers", vec!["101 bytes", "100", "Limits::headers"]),
        (Message::to("a").max_attempts(10_001), "max_attempts", vec!["10001", "10000"]),
        (Message::to("a").key("k").deliver_in(Duration::from_secs(1)), "deliver_at", vec!["key"]),
    ] {
        let alone = tx.publish(message.clone()).await.unwrap_err();
        let text = alone.to_string();
        assert!(text.starts_with(&format!("{field}: ")), "{field}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
        assert_eq!(alone.kind(), ErrorKind::Invalid);
        let many = outbox.publish_many(&mut tx, [Message::to("good"), message.clone()]).await.unwrap_err();
        assert_eq!(many.to_string(), text);
        assert_eq!(outbox.insert_statement(message).unwrap_err().to_string(), text);
    }
    // The transaction goes on.
    tx.publish(Message::to("after")).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(destinations::<T>(&outbox).await, ["after"]);

    let mut conn = outbox.pool().acquire().await.unwrap();
    let refused = outbox.publish(&mut conn, Message::to("a")).await.unwrap_err();
    assert!(matches!(refused, Error::NotInTransaction));
    assert!(refused.to_string().contains("publish_alone"), "{refused}");
}
