//! Work that one instance does for all.

use std::time::Duration;

use posthouse::store::Record;

use crate::store::tables::{Fresh, StoreDb, on_all_stores};

on_all_stores!(one_at_a_time_has_a_duty, a_duty_outlives_no_lease, an_action_is_recorded);

const LONG: Duration = Duration::from_secs(3600);

async fn one_at_a_time_has_a_duty<T: StoreDb>(db: &Fresh<T>) {
    let takes = async |duty, who| db.store.duty(duty, who, LONG).await.unwrap();
    assert!(takes("alerts", "a").await);
    assert!(!takes("alerts", "b").await, "it is a's");
    assert!(takes("alerts", "a").await, "it is renewed");
    assert!(takes("retention", "b").await, "another one");
    db.store.lay_down("alerts", "b").await.unwrap();
    assert!(!takes("alerts", "b").await, "who doesn't have it can't lay it down");
    db.store.lay_down("alerts", "a").await.unwrap();
    assert!(takes("alerts", "b").await);
    assert!(!takes("alerts", "a").await);
}

async fn a_duty_outlives_no_lease<T: StoreDb>(db: &Fresh<T>) {
    assert!(db.store.duty("alerts", "a", Duration::ZERO).await.unwrap());
    assert!(db.store.duty("alerts", "b", LONG).await.unwrap());
    assert!(!db.store.duty("alerts", "a", LONG).await.unwrap());
}

async fn an_action_is_recorded<T: StoreDb>(db: &Fresh<T>) {
    let record = Record { actor: "ann ü", action: "requeue", detail: "status FAILED", amount: Some(12) };
    db.store.record(&record).await.unwrap();
    db.store.record(&Record { amount: None, ..record }).await.unwrap();
    assert_eq!(db.int("SELECT count(*) FROM {audit} WHERE amount = 12 AND house = -1 AND detail = 'status FAILED'").await, 1);
    assert_eq!(db.int("SELECT count(*) FROM {audit} WHERE amount IS NULL").await, 1);
    assert!(db.store.changes(0).await.unwrap().is_empty(), "relays need not look at anything");
}
