//! Partitions of the log in PostgreSQL.

use posthouse::Message;

use crate::store::tables::{Fresh, on_store};
use crate::support::Postgres;

on_store!(postgres, Postgres, few_are_made_at_first_and_some_with_each_round);

async fn few_are_made_at_first_and_some_with_each_round(db: &Fresh<Postgres>) {
    let round = async || {
        let done = db.store.upkeep().await.unwrap();
        (done.created, done.ahead.unwrap())
    };
    for ahead in [12, 16, 20, 24, 28, 32] {
        assert_eq!(round().await, (4, ahead));
    }
    assert_eq!(round().await, (0, 32));
    // Ids that ran ahead of all partitions get theirs at once.
    db.run("ALTER TABLE {message} ALTER id RESTART WITH 400000001").await;
    assert!(db.outbox.publish_alone(Message::to("a")).await.is_err(), "no partition for it yet");
    assert_eq!(round().await, (9, 8));
    db.outbox.publish_alone(Message::to("a")).await.unwrap();
}
