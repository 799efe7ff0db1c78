//! What is written down beside messages has terms of its own.

use std::time::Duration;

use posthouse::store::Beside;
use posthouse::{Message, RetentionSettings};

use super::{retention, round};
use crate::store::tables::{Fresh, StoreDb, on_all_stores};

on_all_stores!(each_kind_of_row_has_its_term);

async fn each_kind_of_row_has_its_term<T: StoreDb>(db: &Fresh<T>) {
    let id = db.publish([Message::to("d"), Message::to("d").dedup_key("young"), Message::to("d").dedup_key("old")]).await;
    let (open, sent) = (id[0], id[1]);
    super::deliver(db, &id[1..]).await;
    let receipt = |at: &str| {
        let ids = if T::NAME == "postgres" { ("'{1}'", "'{0}'") } else { ("'[1]'", "'[0]'") };
        format!(
            "INSERT INTO {{receipt}} (house, at, instance, low, ids, versions) VALUES (0, {at}, 'i', 1, {}, {})",
            ids.0, ids.1
        )
    };
    let attempt = |row: i64, at: &str| {
        format!(
            "INSERT INTO {{attempt}} (row_id, attempt, at, instance, outcome, error, took_ms) VALUES ({row}, 1, {at}, 'i', 'retry', 'e', 1)"
        )
    };
    let audit = |at: &str| {
        let change = if T::NAME == "mysql" { "`change`" } else { "change" };
        format!("INSERT INTO {{audit}} ({change}, at, actor, action, row_id, house) VALUES (0, {at}, 'a', 'skip', 1, 0)")
    };
    let now = match T::NAME {
        "postgres" => "clock_timestamp()",
        "mysql" => "UTC_TIMESTAMP(6)",
        _ => "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
    };
    let past = "{PAST}".to_owned();
    for at in [past.as_str(), past.as_str(), now] {
        for statement in [receipt(at), attempt(open, at), attempt(sent, at), audit(at)] {
            let statement = statement.replace("'{1}'", "ARRAY[1]").replace("'{0}'", "ARRAY[0]");
            db.run(&statement).await;
        }
    }
    db.run("UPDATE {dedup} SET created_at = {PAST} WHERE dedup_key = 'old'").await;

    let mut all = RetentionSettings::after(Some(Duration::from_secs(3_600)));
    all.audit = Some(Duration::from_secs(3_600));
    let wanted = vec![(Beside::Receipts, 2), (Beside::Attempts, 2), (Beside::Dedup, 1), (Beside::Audit, 2)];
    let plan = retention(db, all.clone()).plan(Duration::from_secs(30)).await.unwrap();
    assert_eq!(plan.beside, wanted);
    let kept = round(db, RetentionSettings::after(None)).await;
    assert!(kept.is_idle(), "{kept:?}");
    let mut without_audit = all.clone();
    without_audit.audit = None;
    assert_eq!(round(db, without_audit).await.beside, wanted[..3]);
    assert_eq!(round(db, all.clone()).await.beside, wanted[3..]);
    assert!(round(db, all).await.is_idle());

    assert_eq!(db.int("SELECT count(*) FROM {receipt}").await, 1);
    assert_eq!(db.int(&format!("SELECT count(*) FROM {{attempt}} WHERE row_id = {open}")).await, 3, "it isn't delivered");
    assert_eq!(db.int(&format!("SELECT count(*) FROM {{attempt}} WHERE row_id = {sent}")).await, 1);
    assert_eq!(db.int("SELECT count(*) FROM {audit}").await, 1);
    assert_eq!(db.texts("SELECT dedup_key FROM {dedup}").await, [Some("young".to_owned())]);
}
