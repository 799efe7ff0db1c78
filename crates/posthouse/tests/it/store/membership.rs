//! Leases, and who owns which house.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;
use posthouse::store::{Backend, Coverage, House, Store};

use crate::store::tables::{ALL, DEADLINE, Fresh, StoreDb, on_all_stores};

on_all_stores!(
    a_live_instance_takes_and_releases_houses,
    a_lease_that_ran_out_is_never_renewed,
    houses_of_a_dead_instance_are_taken_as_expired,
    leaving_gives_everything_back,
    two_instances_never_own_one_house,
    only_live_instances_take_houses,
    upkeep_forgets_instances_that_are_long_gone,
);

const LEASE: Duration = Duration::from_secs(3600);

async fn owners(store: &dyn Store) -> Vec<Option<String>> {
    store.houses().await.unwrap().into_iter().map(|h| h.owner).collect()
}

async fn expire<T: StoreDb>(db: &Fresh<T>, instance: &str) {
    assert_eq!(db.run(&format!("UPDATE {{instance}} SET lease_until = {{PAST}} WHERE instance = '{instance}'")).await, 1);
}

async fn a_live_instance_takes_and_releases_houses<T: StoreDb>(db: &Fresh<T>) {
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    let members = db.store.renew("a", LEASE).await.unwrap().unwrap();
    assert_eq!(members.live.len(), 1);
    assert_eq!((members.live[0].name.as_str(), &members.live[0].coverage), ("a", &Coverage::default()));
    assert!(members.live[0].left <= LEASE && members.live[0].left > LEASE - Duration::from_secs(600), "{members:?}");
    assert_eq!(members.houses.len(), T::HOUSES);
    assert!(members.houses.iter().all(|h| h.1.is_none()));
    assert!(members.houses.is_sorted_by_key(|h| h.0));

    let taken = db.store.take("a", &ALL, 1).await.unwrap();
    assert_eq!(taken.len(), 1);
    assert!(!taken[0].expired, "it was free");
    assert_eq!(db.store.take("a", &ALL, 100).await.unwrap().len(), T::HOUSES - 1, "what it has it doesn't take again");
    assert!(db.store.take("a", &ALL, 100).await.unwrap().is_empty());
    let members = db.store.renew("a", LEASE).await.unwrap().unwrap();
    assert!(members.houses.iter().all(|h| h.1.as_deref() == Some("a")));
    let epoch = members.houses.iter().find(|h| h.0 == taken[0].house).unwrap().2;
    assert_eq!(epoch, taken[0].epoch);

    db.store.release("b", &[taken[0].house]).await.unwrap();
    assert!(db.store.take("a", &ALL, 1).await.unwrap().is_empty(), "nobody gives back what is another's");
    db.store.release("a", &[taken[0].house]).await.unwrap();
    let again = db.store.take("a", &ALL, 100).await.unwrap();
    assert_eq!(again.len(), 1);
    assert_eq!((again[0].house, again[0].expired), (taken[0].house, false));
    assert!(again[0].epoch > taken[0].epoch);
    db.store.release("a", &[]).await.unwrap();
}

async fn a_lease_that_ran_out_is_never_renewed<T: StoreDb>(db: &Fresh<T>) {
    assert!(db.store.renew("nobody", LEASE).await.unwrap().is_none());
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    db.store.join("b", &Coverage::default(), LEASE).await.unwrap();
    assert!(db.store.join("a", &Coverage::default(), LEASE).await.is_err(), "a name is used once");
    expire(db, "a").await;
    assert!(db.store.renew("a", LEASE).await.unwrap().is_none());
    assert!(db.store.renew("a", LEASE).await.unwrap().is_none(), "and stays so");
    let members = db.store.renew("b", LEASE).await.unwrap().unwrap();
    assert_eq!(members.live.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["b"]);
}

async fn houses_of_a_dead_instance_are_taken_as_expired<T: StoreDb>(db: &Fresh<T>) {
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    db.store.join("b", &Coverage::default(), LEASE).await.unwrap();
    let first = db.store.take("a", &ALL, 100).await.unwrap();
    assert!(db.store.take("b", &ALL, 100).await.unwrap().is_empty(), "the owner lives");
    expire(db, "a").await;
    let second = db.store.take("b", &ALL, 100).await.unwrap();
    assert_eq!(second.len(), T::HOUSES);
    assert!(second.iter().all(|t| t.expired));
    let before: HashMap<House, i64> = first.iter().map(|t| (t.house, t.epoch)).collect();
    assert!(second.iter().all(|t| t.epoch > before[&t.house]), "epochs grow: {first:?} {second:?}");
    // What the dead one says later changes nothing.
    db.store.release("a", &first.iter().map(|t| t.house).collect::<Vec<_>>()).await.unwrap();
    db.store.leave("a").await.unwrap();
    assert!(owners(&*db.store).await.iter().all(|o| o.as_deref() == Some("b")));
    let houses = db.store.houses().await.unwrap();
    assert!(houses.iter().all(|h| h.alive));
    expire(db, "b").await;
    assert!(db.store.houses().await.unwrap().iter().all(|h| !h.alive && h.owner.as_deref() == Some("b")));
}

async fn leaving_gives_everything_back<T: StoreDb>(db: &Fresh<T>) {
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    db.store.take("a", &ALL, 100).await.unwrap();
    db.store.leave("a").await.unwrap();
    assert!(owners(&*db.store).await.iter().all(Option::is_none));
    assert_eq!(db.int("SELECT count(*) FROM {instance}").await, 0);
    assert!(db.store.renew("a", LEASE).await.unwrap().is_none());
    db.store.join("b", &Coverage::default(), LEASE).await.unwrap();
    let taken = db.store.take("b", &ALL, 100).await.unwrap();
    assert!(taken.len() == T::HOUSES && taken.iter().all(|t| !t.expired), "given back, not expired");
    db.store.leave("nobody").await.unwrap();
}

async fn two_instances_never_own_one_house<T: StoreDb>(db: &Fresh<T>) {
    // Each with connections of its own, as processes have.
    let stores: Vec<_> = (0..4).map(|_| T::Db::store(db.outbox.pool(), db.outbox.tables(), DEADLINE, None)).collect();
    let mut epochs: HashMap<House, i64> = HashMap::new();
    for round in 0..5 {
        let taken = join_all(stores.iter().enumerate().map(|(n, store)| async move {
            let name = format!("r{round}-i{n}");
            store.join(&name, &Coverage::default(), LEASE).await.unwrap();
            let mut taken = Vec::new();
            for _ in 0..3 {
                taken.extend(store.take(&name, &ALL, 1).await.unwrap());
                taken.extend(store.take(&name, &ALL, 2).await.unwrap());
            }
            (name, taken)
        }))
        .await;
        let mut owner: HashMap<House, &str> = HashMap::new();
        for (name, taken) in &taken {
            for t in taken {
                assert_eq!(owner.insert(t.house, name), None, "house {} has two owners", t.house);
                assert!(t.epoch > epochs.insert(t.house, t.epoch).unwrap_or(0), "the epoch of house {} did not grow", t.house);
                assert_eq!(t.expired, round > 0 && round % 2 == 0, "round {round}");
            }
        }
        assert_eq!(owner.len(), T::HOUSES);
        for h in db.store.houses().await.unwrap() {
            assert_eq!(h.owner.as_deref(), owner.get(&House(h.house)).copied());
        }
        for (name, _) in &taken {
            if round % 2 == 0 {
                db.store.leave(name).await.unwrap();
            } else {
                expire(db, name).await;
            }
        }
    }
}

async fn only_live_instances_take_houses<T: StoreDb>(db: &Fresh<T>) {
    assert!(db.store.take("nobody", &ALL, 100).await.unwrap().is_empty());
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    expire(db, "a").await;
    assert!(db.store.take("a", &ALL, 100).await.unwrap().is_empty());
    assert!(owners(&*db.store).await.iter().all(Option::is_none));
    db.store.join("b", &Coverage::default(), LEASE).await.unwrap();
    assert!(db.store.take("b", &ALL, 0).await.unwrap().is_empty());
}

async fn upkeep_forgets_instances_that_are_long_gone<T: StoreDb>(db: &Fresh<T>) {
    for name in ["owner", "gone", "alive"] {
        db.store.join(name, &Coverage::default(), LEASE).await.unwrap();
    }
    db.store.take("owner", &ALL, 100).await.unwrap();
    expire(db, "owner").await;
    expire(db, "gone").await;
    db.store.upkeep().await.unwrap();
    let left = db.texts("SELECT instance FROM {instance} ORDER BY instance").await;
    assert_eq!(left.iter().flatten().collect::<Vec<_>>(), ["alive", "owner"], "a house still names its owner");
}

mod postgres_only {
    use super::*;
    use crate::support::{Postgres, SOON, wait_for};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_renewal_that_is_under_way_counts() {
        let db = Fresh::<Postgres>::new().await;
        db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
        db.store.join("b", &Coverage::default(), LEASE).await.unwrap();
        db.store.take("a", &ALL, 100).await.unwrap();
        // Asked for in time, written, and not yet committed when the old lease ends.
        db.run("UPDATE {instance} SET lease_until = clock_timestamp() - interval '1 second' WHERE instance = 'a'").await;
        let mut renewal = db.outbox.begin().await.unwrap();
        let renew = db.sql("UPDATE {instance} SET lease_until = clock_timestamp() + interval '1 hour' WHERE instance = 'a'");
        <Postgres as StoreDb>::run(&mut renewal, renew).await.unwrap();

        let store = db.store.clone();
        let take = tokio::spawn(async move { store.take("b", &ALL, 100).await });
        let blocked = format!(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{}%'",
            db.outbox.tables().schema().unwrap()
        );
        wait_for("the take to wait for the renewal, or to end", SOON, async || take.is_finished() || db.int(&blocked).await > 0)
            .await;
        renewal.commit().await.unwrap();
        assert!(take.await.unwrap().unwrap().is_empty(), "a lives");
        db.remove().await;
    }
}
