//! Coverage of houses, houses taken all together, and rows in houses that nobody covers.

use std::time::Duration;

use futures_util::future::join_all;
use posthouse::store::{Backend, Coverage, Exactly, House, ORPHAN_ROWS};
use posthouse::{Houses, Message};

use crate::store::tables::{ALL, DEADLINE, Fresh, StoreDb, on_all_stores};

on_all_stores!(
    everybody_sees_what_an_instance_is_there_for,
    only_houses_that_are_asked_for_are_taken,
    houses_are_taken_all_together_or_not_at_all,
    of_two_that_want_a_house_one_gets_all_and_the_other_is_told,
    where_houses_end_is_read,
    rows_in_ranges_of_houses_are_found,
);

const LEASE: Duration = Duration::from_secs(3600);

async fn everybody_sees_what_an_instance_is_there_for<T: StoreDb>(db: &Fresh<T>) {
    let houses = |text: &str| text.parse::<Houses>().unwrap();
    let some = Coverage { takes: houses("0-3,7"), for_runs: houses("5") };
    let runs = Coverage { takes: Houses::of([]), for_runs: Houses::ALL };
    db.store.join("some", &some, LEASE).await.unwrap();
    db.store.join("runs", &runs, LEASE).await.unwrap();
    db.store.join("all", &Coverage::default(), LEASE).await.unwrap();
    // As an instance of the version before does.
    db.run("INSERT INTO {instance} (instance, lease_until) SELECT 'old', lease_until FROM {instance} WHERE instance = 'all'")
        .await;
    let mut live = db.store.renew("all", LEASE).await.unwrap().unwrap().live;
    live.sort_by(|a, b| a.name.cmp(&b.name));
    let seen: Vec<_> = live.into_iter().map(|l| (l.name, l.coverage)).collect();
    let expected = [("all", Coverage::default()), ("old", Coverage::default()), ("runs", runs), ("some", some)];
    assert_eq!(seen, expected.map(|(name, coverage)| (name.to_owned(), coverage)));
}

async fn only_houses_that_are_asked_for_are_taken<T: StoreDb>(db: &Fresh<T>) {
    db.store.join("a", &Coverage::default(), LEASE).await.unwrap();
    assert!(db.store.take("a", &[], 100).await.unwrap().is_empty());
    assert!(db.store.take("a", &[House(-1), House(99)], 100).await.unwrap().is_empty());
    let wanted = if T::HOUSES == 1 { vec![House(0)] } else { vec![House(2), House(5), House(6)] };
    let mut taken: Vec<House> = db.store.take("a", &wanted, 100).await.unwrap().iter().map(|t| t.house).collect();
    taken.sort();
    assert_eq!(taken, wanted);
}

async fn houses_are_taken_all_together_or_not_at_all<T: StoreDb>(db: &Fresh<T>) {
    let several = if T::HOUSES == 1 { vec![House(0)] } else { vec![House(5), House(2), House(3)] };
    assert_eq!(db.store.take_exactly("a", &several).await.unwrap(), Exactly::NoLease);
    for name in ["a", "b"] {
        db.store.join(name, &Coverage::default(), LEASE).await.unwrap();
    }
    let taken = |answer: Exactly| match answer {
        Exactly::Taken(mut taken) => {
            taken.sort_by_key(|t| t.house);
            taken
        }
        other => panic!("{other:?}"),
    };
    let first = taken(db.store.take_exactly("a", &several).await.unwrap());
    assert_eq!(first.len(), several.len());
    assert!(first.iter().all(|t| !t.expired));

    // One of them is enough to refuse all; the others stay free.
    let held = vec![(several[0], "a".to_owned())];
    let mut wanted = vec![several[0]];
    if T::HOUSES > 1 {
        wanted.push(House(7));
    }
    assert_eq!(db.store.take_exactly("b", &wanted).await.unwrap(), Exactly::Held(held));
    let owners = db.store.houses().await.unwrap();
    assert!(owners.iter().all(|h| h.owner.as_deref() == several.contains(&House(h.house)).then_some("a")), "{owners:?}");
    let missing = Exactly::Missing(vec![House(99), House(-1)]);
    assert_eq!(db.store.take_exactly("b", &[House(99), House(-1)]).await.unwrap(), missing);

    // What one has already it may take anew, and what a dead one had.
    let again = taken(db.store.take_exactly("a", &several).await.unwrap());
    assert!(again.iter().zip(&first).all(|(again, first)| again.epoch > first.epoch && !again.expired), "{again:?}");
    assert_eq!(db.run("UPDATE {instance} SET lease_until = {PAST} WHERE instance = 'a'").await, 1);
    assert_eq!(db.store.take_exactly("a", &several).await.unwrap(), Exactly::NoLease);
    let heir = taken(db.store.take_exactly("b", &several).await.unwrap());
    assert!(heir.iter().zip(&again).all(|(heir, before)| heir.epoch > before.epoch && heir.expired), "{heir:?}");
    for h in db.store.houses().await.unwrap().iter().filter(|h| several.contains(&House(h.house))) {
        let told = heir.iter().find(|t| t.house == House(h.house)).unwrap();
        assert_eq!((h.owner.as_deref(), h.epoch), (Some("b"), told.epoch));
    }
}

async fn of_two_that_want_a_house_one_gets_all_and_the_other_is_told<T: StoreDb>(db: &Fresh<T>) {
    let stores: Vec<_> = (0..3).map(|_| T::Db::store(db.outbox.pool(), db.outbox.tables(), DEADLINE, None)).collect();
    // Each two of them have a house in common.
    let wanted: [&[House]; 3] =
        if T::HOUSES == 1 { [&ALL[..1]; 3] } else { [&ALL[..5], &ALL[3..], &[House(7), House(0), House(4)]] };
    for (n, store) in stores.iter().enumerate() {
        store.join(&format!("i{n}"), &Coverage::default(), LEASE).await.unwrap();
    }
    for round in 0..10 {
        let answers = join_all((0..3).map(|n| {
            let n = (n + round) % 3;
            let store = &stores[n];
            async move { (n, store.take_exactly(&format!("i{n}"), wanted[n]).await.unwrap()) }
        }))
        .await;
        let won: Vec<usize> = answers.iter().filter(|(_, a)| matches!(a, Exactly::Taken(_))).map(|(n, _)| *n).collect();
        let [winner] = won[..] else { panic!("{answers:?}") };
        let name = format!("i{winner}");
        for (n, answer) in answers.iter().filter(|(n, _)| *n != winner) {
            let common = wanted[*n].iter().filter(|h| wanted[winner].contains(h)).map(|h| (*h, name.clone()));
            let mut common: Vec<_> = common.collect();
            common.sort();
            let Exactly::Held(mut held) = answer.clone() else { panic!("{answer:?}") };
            held.sort();
            assert_eq!(held, common);
        }
        let owned = db.store.houses().await.unwrap().into_iter().filter(|h| h.owner.is_some());
        let mut owned: Vec<House> = owned.map(|h| House(h.house)).collect();
        owned.sort();
        let mut expected = wanted[winner].to_vec();
        expected.sort();
        assert_eq!(owned, expected, "the others have none");
        db.store.release(&name, wanted[winner]).await.unwrap();
    }
}

async fn where_houses_end_is_read<T: StoreDb>(db: &Fresh<T>) {
    let houses = &ALL[..T::HOUSES];
    let empty = db.store.ends(houses).await.unwrap();
    assert!(empty.houses.len() == T::HOUSES && empty.houses.iter().all(|h| h.1 == 0), "{empty:?}");
    let ids = db.publish((0..40).map(|n| Message::to("d").key(n))).await;
    let ends = db.store.ends(houses).await.unwrap();
    let rows = db.eligible().await;
    for (house, end) in &ends.houses {
        assert_eq!(*end, rows.iter().filter(|t| t.house == *house).map(|t| t.id).max().unwrap_or(0), "house {house}");
    }
    assert_eq!(ends.houses.iter().map(|h| h.1).max(), ids.last().copied());
    // One clock with the due times.
    db.publish_one(Message::to("d").deliver_in(Duration::from_millis(1))).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let due = db.eligible().await.iter().filter_map(|t| t.due).max().expect("it is due by now");
    let later = db.store.ends(houses).await.unwrap().now;
    assert!(ends.now <= due && due <= later, "{} {due} {later}", ends.now);
}

async fn rows_in_ranges_of_houses_are_found<T: StoreDb>(db: &Fresh<T>) {
    let everywhere = [(i32::MIN, -1), (0, i32::MAX)];
    assert!(db.store.rows_in(&everywhere).await.unwrap().is_empty());
    let ids = db.publish((0..12).map(|_| Message::to("d"))).await;
    for (place, house) in [(0, -2_147_483_648i64), (1, -7), (2, -7), (3, -1), (4, 2_147_483_647), (5, 300)] {
        db.run(&format!("UPDATE {{pending}} SET house = {house} WHERE id = {}", ids[place])).await;
    }
    let found = |rows: Vec<(House, u64)>| rows.into_iter().map(|(house, n)| (house.0, n)).collect::<Vec<_>>();
    let strays = db.store.rows_in(&[(i32::MIN, -1), (8, i32::MAX)]).await.unwrap();
    assert_eq!(found(strays), [(i32::MIN, 1), (-7, 2), (-1, 1), (300, 1), (i32::MAX, 1)]);
    assert_eq!(found(db.store.rows_in(&[(-6, -2), (300, 300)]).await.unwrap()), [(300, 1)]);
    let all = db.store.rows_in(&everywhere).await.unwrap();
    assert_eq!(all.iter().map(|h| h.1).sum::<u64>(), 12, "{all:?}");
    assert!(all.iter().all(|h| h.1 < ORPHAN_ROWS));
    // A resize gives every message a house that there is.
    db.store.resize(T::HOUSES as u16).await.unwrap();
    assert!(db.store.rows_in(&[(i32::MIN, -1), (8, i32::MAX)]).await.unwrap().is_empty());
}
