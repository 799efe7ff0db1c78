//! Which messages go, and which stay.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

use posthouse::store::{Action, MessageFilter, Partition};
use posthouse::{Message, RetentionSettings};

use super::{all_is_found, another, deliver, retention, round, scene, settings};
use crate::store::tables::{Fresh, StoreDb, done, on_all_stores};

on_all_stores!(what_is_not_delivered_stays, rows_go_one_by_one_where_messages_are_few, one_instance_at_a_time_does_it);

async fn ids<T: StoreDb>(db: &Fresh<T>) -> BTreeSet<i64> {
    let filter = MessageFilter { limit: 1_000, ..MessageFilter::default() };
    let rows = db.store.list(&filter).await.unwrap().rows;
    let ids: BTreeSet<i64> = rows.iter().map(|row| row.id).collect();
    assert_eq!(ids.len(), rows.len(), "each once");
    ids
}

/// A whole partition, where there are such. What it leaves is delivered or requeued like everything else, and goes in its turn.
async fn what_is_not_delivered_stays<T: StoreDb>(db: &Fresh<T>) {
    let scene = scene(db, true).await;
    let partitioned = T::NAME != "sqlite";

    let before = db.ints("SELECT id FROM {message} ORDER BY id").await;
    let plan = retention(db, settings()).plan(Duration::from_secs(60)).await.unwrap();
    if partitioned {
        let planned: Vec<(i64, i64)> = plan.partitions.iter().map(|(p, kept): &(Partition, i64)| (p.number, *kept)).collect();
        assert_eq!((planned, plan.removed), (vec![(0, 5)], 0));
        assert_eq!(db.int("SELECT count(*) FROM {retired}").await + db.int("SELECT count(*) FROM {kept}").await, 0);
    } else {
        assert_eq!(plan.removed, 6);
    }
    assert_eq!(db.ints("SELECT id FROM {message} ORDER BY id").await, before, "looking changes nothing");

    let report = round(db, RetentionSettings::after(None)).await;
    assert!(report.is_idle(), "{report:?}");
    let report = round(db, settings()).await;
    assert_eq!((report.messages(), report.unfinished, report.waiting.len()), (6, false, 0), "{report:?}");
    if partitioned {
        let gone = &report.partitions[0];
        assert_eq!((gone.number, gone.amount, gone.survivors), (0, 6, 5));
        let first = db.store.retention().partitions().await.unwrap().unwrap();
        assert_eq!(first.iter().map(|p| p.number).collect::<Vec<_>>(), [1]);
    }
    assert_eq!(ids(db).await, scene.remaining());
    all_is_found(db, &scene, "afterwards").await;
    for id in &scene.sent {
        assert!(db.store.show(*id).await.unwrap().is_none());
    }
    assert_eq!(db.status(scene.failed()).await, "FAILED");
    assert!(round(db, settings()).await.is_idle());
    assert_eq!(db.int("SELECT amount FROM {audit} WHERE action = 'retention'").await, 6);

    // The FAILED one is requeued, and delivered as it was published.
    assert_eq!(db.store.act(&[scene.failed()], &Action::Requeue, "ann").await.unwrap(), [scene.failed()]);
    let thin = db.thin(scene.failed()).await;
    assert_eq!(db.load_one(thin.id).await.payload, b"6");
    assert_eq!(db.store.delivered("i", &[done(&thin)]).await.unwrap(), [thin.id]);
    assert_eq!(db.status(thin.id).await, "SENT");
    assert_eq!(db.ints(&format!("SELECT id FROM {{outbox}} WHERE id = {} AND status = 'SENT'", thin.id)).await, [Some(thin.id)]);
    let report = round(db, settings()).await;
    assert_eq!((report.kept_removed, report.removed), if partitioned { (1, 0) } else { (0, 1) });
    assert!(db.store.show(thin.id).await.unwrap().is_none());
    let left: BTreeSet<i64> = scene.remaining().into_iter().filter(|id| *id != thin.id).collect();
    assert_eq!(ids(db).await, left);
}

/// All in the partition in which ids are given out.
async fn rows_go_one_by_one_where_messages_are_few<T: StoreDb>(db: &Fresh<T>) {
    let scene = scene(db, false).await;
    let plan = retention(db, settings()).plan(Duration::from_secs(60)).await.unwrap();
    assert_eq!((plan.removed, plan.partitions.len()), (6, 0));
    let report = round(db, settings()).await;
    assert_eq!((report.removed, report.partitions.len(), report.unfinished), (6, 0, false));
    assert_eq!(ids(db).await, scene.remaining());
    assert_eq!(db.int("SELECT count(*) FROM {message}").await, 7, "what stays is where it was");
    all_is_found(db, &scene, "afterwards").await;
    // Whatever house a row is in, it is seen.
    if T::NAME != "sqlite" {
        db.run(&format!("UPDATE {{pending}} SET house = 4000 WHERE id = {}", scene.open[0])).await;
        assert!(round(db, settings()).await.is_idle());
        assert_eq!(db.int(&format!("SELECT count(*) FROM {{message}} WHERE id = {}", scene.open[0])).await, 1);
    }
    // The rest goes when it is delivered.
    deliver(db, &scene.open).await;
    assert_eq!(round(db, settings()).await.removed, 5);
    assert_eq!(ids(db).await, scene.young.iter().copied().collect());
    db.publish_one(Message::to("d")).await;
}

async fn one_instance_at_a_time_does_it<T: StoreDb>(db: &Fresh<T>) {
    let scene = scene(db, false).await;
    assert!(db.store.duty(posthouse::retention::DUTY, "somebody", Duration::from_secs(3_600)).await.unwrap());
    let other = posthouse::retention::Retention::new(another(db), "orders", settings()).unwrap();
    let report = other.run(&mut |_| ControlFlow::Continue(())).await.unwrap();
    assert!(report.busy && report.messages() == 0);
    db.store.lay_down(posthouse::retention::DUTY, "somebody").await.unwrap();
    assert_eq!(other.run(&mut |_| ControlFlow::Continue(())).await.unwrap().removed, 6);
    assert!(db.store.duty(posthouse::retention::DUTY, "somebody", Duration::from_secs(3_600)).await.unwrap(), "it was laid down");
    all_is_found(db, &scene, "afterwards").await;
}
