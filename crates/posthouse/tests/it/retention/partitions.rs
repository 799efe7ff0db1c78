//! Partitions: cut off at every step, with publishers, old transactions and a relay beside it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthouse::store::Step;
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Relay};

use super::{Dir, PARTITION, age, all_is_found, cut_off, next_partition, retention, round, scene, settings};
use crate::store::tables::{Fresh, StoreDb, on_store, publish_on};
use crate::support::{SOON, wait_for};

macro_rules! where_there_are_partitions {
    ($($test:ident),* $(,)?) => {
        on_store!(postgres, Postgres, $($test),*);
        on_store!(mysql, MySql, $($test),*);
    };
}

where_there_are_partitions!(
    a_round_that_is_cut_off_goes_on,
    who_commits_late_loses_nothing,
    what_stands_nowhere_else_is_not_dropped,
    publishers_are_not_held_up,
    a_relay_beside_it_misses_nothing,
);

/// At each step, before and after it is written down. Every message is found at any moment, and ends up in one place.
async fn a_round_that_is_cut_off_goes_on<T: StoreDb>(db: &Fresh<T>) {
    let (scene, dir) = (scene(db, true).await, Dir::new());
    // Detached; noted; kept and noted; archived and noted; read back; noted; dropped.
    for n in [0, 1, 2, 3, 0, 1, 0] {
        assert!(cut_off(db, dir.settings(), n).await);
        all_is_found(db, &scene, &format!("cut off at step {n}")).await;
    }
    assert!(!cut_off(db, dir.settings(), 100).await);
    all_is_found(db, &scene, "afterwards").await;
    let retired = db.store.retention().retired(10).await.unwrap();
    assert_eq!(retired.iter().map(|r| (r.number, r.step, r.amount, r.survivors)).collect::<Vec<_>>(), [(0, Step::Dropped, 6, 5)]);
    assert_eq!(dir.ids(), scene.sent);
    assert!(round(db, dir.settings()).await.is_idle());
    let verdicts = retention(db, dir.settings()).verify(10).await.unwrap();
    assert!(verdicts.len() == 1 && verdicts[0].problem.is_none() && verdicts[0].file.removed_ms.is_some(), "{verdicts:?}");
    let parts = db.store.retention().partitions().await.unwrap().unwrap();
    assert_eq!(parts.iter().map(|p| p.number).collect::<Vec<_>>(), [1]);
}

/// A transaction that published into the partition long ago and hasn't committed yet.
async fn who_commits_late_loses_nothing<T: StoreDb>(db: &Fresh<T>) {
    let mut scene = scene(db, false).await;
    age(db).await;
    let mut late = db.outbox.begin().await.unwrap();
    publish_on::<T>(&db.outbox, &mut late, Message::to("late").json(&"late")).await.unwrap();
    // Without changing the table, which would wait for it.
    if T::NAME == "mysql" {
        db.run(&format!("INSERT INTO {{message}} (id, destination) VALUES ({PARTITION}, 'd')")).await;
    } else {
        next_partition(db).await;
        db.publish_one(Message::to("d")).await;
    }
    scene.young.push(PARTITION);
    let report = round(db, settings()).await;
    assert_eq!((report.waiting.len(), report.partitions.len()), (1, 0), "{report:?}");
    all_is_found(db, &scene, "while it waits").await;

    late.commit().await.unwrap();
    let found = async || db.ints("SELECT id FROM {pending} WHERE destination = 'late'").await[0].unwrap();
    let id = found().await;
    assert_eq!(db.load_one(id).await.payload, b"\"late\"");
    let report = round(db, settings()).await;
    assert_eq!((report.partitions.len(), report.partitions[0].survivors, report.messages()), (1, 7, 7), "{report:?}");
    assert_eq!(db.load_one(id).await.payload, b"\"late\"");
    assert_eq!(db.status(id).await, "PENDING");
}

/// The last look before a partition is dropped: whatever became of the copies, a message that isn't delivered keeps it.
async fn what_stands_nowhere_else_is_not_dropped<T: StoreDb>(db: &Fresh<T>) {
    let scene = scene(db, true).await;
    assert!(cut_off(db, settings(), 0).await, "it is detached");
    db.run("DELETE FROM {kept}").await;
    let store = db.store.retention();
    let open = scene.open.len() as i64;
    assert_eq!(store.discard(0).await.unwrap(), open, "so many are only there");
    assert_eq!(store.count(0).await.unwrap(), 11, "all of it is there");
    assert_eq!(store.keep(0).await.unwrap(), open);
    all_is_found(db, &scene, "kept").await;
    assert_eq!(store.discard(0).await.unwrap(), 0);
    all_is_found(db, &scene, "dropped").await;
}

/// While an old transaction has the log open it can't go; nobody who publishes waits longer than the lock timeout either way.
async fn publishers_are_not_held_up<T: StoreDb>(db: &Fresh<T>) {
    scene(db, true).await;
    let (stop, slowest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let publisher = {
        let (outbox, stop, slowest) = (db.outbox.clone(), stop.clone(), slowest.clone());
        tokio::spawn(async move {
            let mut published = 0;
            while !stop.load(Ordering::Relaxed) {
                let began = Instant::now();
                outbox.publish_alone(Message::to("d")).await.unwrap();
                slowest.fetch_max(began.elapsed().as_millis() as u64, Ordering::Relaxed);
                published += 1;
            }
            published
        })
    };
    let mut old = db.place.pool.begin().await.unwrap();
    T::number_in(&mut old, db.sql(&format!("SELECT CAST(count(*) AS {}) FROM {{message}}", T::BIGINT))).await;
    let report = round(db, settings()).await;
    assert_eq!((report.waiting.len(), report.partitions.len()), (1, 0), "{report:?}");
    let with = slowest.swap(0, Ordering::Relaxed);
    old.rollback().await.unwrap();
    let gone = async || round(db, settings()).await.partitions.len() == 1;
    // PostgreSQL finishes it when no older snapshot is left in the whole database, of other tests too.
    wait_for("the partition to go", 3 * SOON, gone).await;
    stop.store(true, Ordering::Relaxed);
    let published: u64 = publisher.await.unwrap();
    let without = slowest.load(Ordering::Relaxed);
    println!("{}: of {published} inserts the slowest took {with} ms beside an old transaction, {without} ms without", T::NAME);
    // PostgreSQL waits for 100 ms, MySQL for 1 s, and the machine may be busy. A round takes several times as long.
    assert!(with.max(without) < 2_500 && published > 0, "{with} ms, {without} ms");
}

/// A relay works off the backlog of a partition that goes meanwhile.
async fn a_relay_beside_it_misses_nothing<T: StoreDb>(db: &Fresh<T>) {
    let all = db.publish((0..400).map(|n| Message::to("stub:d").json(&n))).await;
    age(db).await;
    next_partition(db).await;
    db.publish_one(Message::to("stub:d").json(&400)).await;
    let arrived: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let gone = Arc::new(AtomicBool::new(false));
    let (log, quick) = (arrived.clone(), gone.clone());
    let transport = from_fn(move |d: Delivery| {
        let (log, quick) = (log.clone(), quick.clone());
        async move {
            // So that there is something left to do at each step: half of them wait for the last one.
            while log.lock().unwrap().len() >= 200 && !quick.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            *log.lock().unwrap().entry(String::from_utf8(d.message().payload.clone()).unwrap()).or_default() += 1;
            d.delivered();
        }
    });
    let mut settings_of_relay = crate::relay::patient();
    settings_of_relay.batch = 20;
    settings_of_relay.memory = 1 << 20;
    settings_of_relay.default_route.concurrency = Some(4);
    let relay = Relay::builder(&db.outbox).settings(settings_of_relay).transport("stub", transport).start().await.unwrap();
    wait_for("the first", SOON, async || !arrived.lock().unwrap().is_empty()).await;
    let began = arrived.lock().unwrap().len();
    wait_for("the partition to go", 3 * SOON, async || round(db, settings()).await.partitions.len() == 1).await;
    gone.store(true, Ordering::Relaxed);
    let ended = arrived.lock().unwrap().len();
    wait_for("all", SOON, async || arrived.lock().unwrap().len() == all.len() + 1).await;
    println!("{}: {began} had arrived when it began, {ended} when the partition was gone", T::NAME);
    assert!(ended < all.len(), "there was nothing left to miss");
    assert_eq!(relay.stats().missing, 0);
    relay.shutdown(SOON).await;
    assert_eq!(db.int("SELECT count(*) FROM {pending}").await, 0);
    // What had to be kept is delivered, and goes.
    assert!(db.int("SELECT count(*) FROM {kept}").await > 0);
    assert!(round(db, settings()).await.kept_removed > 0);
    assert_eq!(db.int("SELECT count(*) FROM {kept}").await, 0);
}
