//! Which instance takes which houses, and what becomes of those that nobody takes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use posthouse::store::{Backend, House};
use posthouse::{Group, Message, Outbox, Relay, RelaySettings, Run, RunEnd, Trigger};

use super::{Log, Recorder, manual, publish, quick, with_houses};
use crate::support::{MySql, Place, Postgres, SOON, TestDb, bounded, on_all_databases, pending, scale, wait_for};

on_all_databases!(what_is_wrong_with_groups_is_told_at_the_start, messages_in_houses_that_do_not_exist_are_told,);

fn group(name: &str, houses: &str) -> Group {
    Group::new(name).houses(houses).unwrap()
}

async fn start<DB: Backend>(outbox: &Outbox<DB>, settings: RelaySettings, groups: &[Group], log: &Log) -> Relay {
    let builder = Relay::builder(outbox).settings(settings).transport("test", Recorder(log.clone()));
    groups.iter().cloned().fold(builder, posthouse::RelayBuilder::group).start().await.unwrap()
}

async fn what_is_wrong_with_groups_is_told_at_the_start<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let refused = async |groups: &[Group]| {
        let builder = groups.iter().cloned().fold(Relay::builder(&outbox), posthouse::RelayBuilder::group);
        builder.start().await.unwrap_err().to_string()
    };
    let mut wrong = manual("0-3").limit(0).concurrency(0);
    wrong.then = Some("nobody".into());
    let told = refused(&[wrong, group("b", "2-5"), group("b", "7")]).await;
    for part in [
        "groups.\"manual\".limit: 0, must be at least 1",
        "groups.\"manual\".concurrency: 0",
        "groups.\"manual\".then: names no group \"nobody\"",
        "groups.\"b\".houses: 2-3 also belong to group \"manual\"",
        "groups.\"b\".name: two groups have this name",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let there_are = if T::NAME == "sqlite" { 1 } else { 8 };
    let told = refused(&[group("a", "0"), group("b", "3-9")]).await;
    assert!(
        told.contains("groups.\"b\".houses: 3-9 go up to 9") && told.contains(&format!("houses 0 to {}", there_are - 1)),
        "{told}"
    );
    assert!(!told.contains("\"a\""), "{told}");

    // One whose database says which tables it is for is for these.
    let mut named = group("named", "all");
    named.databases = vec!["elsewhere".into()];
    let told = refused(&[named, group("b", "0")]).await;
    assert!(told.contains("0 also belong to group \"named\""), "{told}");
}

async fn messages_in_houses_that_do_not_exist_are_told<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    publish::<T>(&outbox, (0..10).map(|n| Message::to("test:a").payload(n.to_string()))).await;
    let table = outbox.tables().name("pending");
    let first = T::number(outbox.pool(), format!("SELECT min(id) FROM {table}")).await;
    for (house, ids) in [(-5, "0, 1, 2"), (99, "3")] {
        let ids = ids.split(", ").map(|n| (first + n.parse::<i64>().unwrap()).to_string()).collect::<Vec<_>>().join(", ");
        T::execute(outbox.pool(), format!("UPDATE {table} SET house = {house} WHERE id IN ({ids})")).await;
    }
    let relay = start(&outbox, quick(), &[], &log).await;
    let expected = [(House(-5), 3), (House(99), 1)];
    wait_for("them to be found", SOON, async || relay.stats().orphaned == expected).await;
    let warnings = relay.stats().warnings();
    assert!(matches!(&warnings[..], [one] if one.contains("house -5 (3 messages), house 99 (1 message)")), "{warnings:?}");
    log.wait_len(6).await;
    assert_eq!(relay.stats().uncovered, None);
    // What the warning says to do.
    relay.store().resize(relay.store().check().await.unwrap().1).await.unwrap();
    log.wait_len(10).await;
    wait_for("the warning to go", SOON, async || relay.stats().warnings().is_empty()).await;
    relay.shutdown(Duration::from_secs(5)).await;
}

macro_rules! with_several_houses {
    ($($name:ident),+ $(,)?) => {
        mod several { $( mod $name {
            use super::super::*;
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn postgres() { bounded($name::<Postgres>()).await }
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn mysql() { bounded($name::<MySql>()).await }
        } )+ }
    };
}

with_several_houses!(
    houses_nobody_covers_are_named_and_wait,
    an_instance_of_the_version_before_takes_all,
    fewer_houses_than_a_group_has_are_found_at_the_next_start,
);

/// Sorted numbers of the houses that this instance owns.
async fn houses_of(relay: &Relay) -> Vec<i32> {
    let name = relay.stats().instance;
    let all = relay.store().houses().await.unwrap();
    all.into_iter().filter(|h| h.owner.is_some() && h.owner == name).map(|h| h.house).collect()
}

async fn houses_nobody_covers_are_named_and_wait<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let mut settings = quick();
    settings.lease = Duration::from_secs(2);
    settings.send_timeout = Duration::from_secs(1);
    let a = start(&outbox, settings.clone(), &[group("low", "0-3"), group("middle", "4-5")], &log).await;
    let b = start(&outbox, settings.clone(), &[group("high", "6-7"), group("middle", "4-5")], &log).await;
    wait_for("shares", SOON, async || (a.stats().houses, b.stats().houses) == (5, 3)).await;
    assert!(houses_of(&a).await.starts_with(&[0, 1, 2, 3]) && houses_of(&b).await.ends_with(&[6, 7]));
    assert_eq!((a.stats().uncovered, b.stats().uncovered), (None, None));
    publish::<T>(&outbox, (0..80).map(|n| Message::to("test:a").key(n).payload(n.to_string()))).await;
    log.wait_len(80).await;
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;

    drop(a); // Dies without a word.
    wait_for("its houses to be named", SOON, async || b.stats().uncovered.is_some_and(|u| u.houses.to_string() == "0-3")).await;
    let told = b.stats().uncovered.unwrap().to_string();
    assert!(told.starts_with("houses 0-3 are covered by no live instance") && told.contains("start an instance"), "{told}");
    wait_for("what both covered", SOON, async || houses_of(&b).await == [4, 5, 6, 7]).await;
    publish::<T>(&outbox, (80..160).map(|n| Message::to("test:a").key(n).payload(n.to_string()))).await;
    let table = outbox.tables().name("pending");
    let theirs = T::number(outbox.pool(), format!("SELECT count(*) FROM {table} WHERE house < 4")).await;
    assert!(theirs > 10, "{theirs}");
    log.wait_len(160 - theirs as usize).await;
    b.drain_once().await;
    assert_eq!(pending::<T>(&outbox).await, theirs, "nobody takes a house that isn't of its groups");

    // One that starts now says so, and finds what lies there.
    let c = start(&outbox, settings.clone(), &[group("high", "6-7")], &log).await;
    wait_for("them to be found", SOON, async || c.stats().orphaned.iter().map(|h| h.1).sum::<u64>() == theirs as u64).await;
    assert!(c.stats().warnings()[0].contains("house 0 ("), "{:?}", c.stats().warnings());
    // An external group covers them, though nobody owns them.
    let external = [group("low", "0-3").trigger(Trigger::External)];
    let d = start(&outbox, settings, &external, &log).await;
    for relay in [&b, &c, &d] {
        wait_for("all to be covered", SOON, async || relay.stats().uncovered.is_none() && relay.stats().warnings().is_empty())
            .await;
    }
    assert_eq!((pending::<T>(&outbox).await, d.stats().houses), (theirs, 0));
    let outcome = d.run(Run::of("low")).await;
    assert_eq!((outcome.counts.delivered, outcome.end), (theirs as u64, RunEnd::Done));
    assert_eq!((log.len(), log.distinct()), (160, 160));
    for relay in [b, c, d] {
        relay.shutdown(Duration::from_secs(5)).await;
    }
}

async fn an_instance_of_the_version_before_takes_all<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let instance = outbox.tables().name("instance");
    let hour = match T::NAME {
        "postgres" => "clock_timestamp() + interval '1 hour'",
        _ => "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
    };
    T::execute(outbox.pool(), format!("INSERT INTO {instance} (instance, lease_until) VALUES ('old', {hour})")).await;
    let relay = start(&outbox, quick(), &[group("low", "0-3")], &log).await;
    wait_for("its share", SOON, async || relay.stats().houses == 2).await;
    assert!(houses_of(&relay).await.iter().all(|h| *h < 4));
    assert_eq!(relay.stats().uncovered, None, "the other takes them");
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn fewer_houses_than_a_group_has_are_found_at_the_next_start<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    publish::<T>(&outbox, (0..40).map(|n| Message::to("test:a").key(n).payload(n.to_string()))).await;
    let groups = [group("low", "0-3").trigger(Trigger::Manual), group("high", "4-7").trigger(Trigger::Manual)];
    let relay = start(&outbox, quick(), &groups, &log).await;
    relay.store().resize(3).await.unwrap();
    relay.shutdown(Duration::from_secs(5)).await;
    let refused = Relay::builder(&outbox).group(group("high", "4-7")).start().await.unwrap_err().to_string();
    assert!(
        refused.contains("4-7 go up to 7, and the database has the houses 0 to 2") && refused.contains("resize 8"),
        "{refused}"
    );
    let relay = start(&outbox, quick(), &[group("low", "0-1"), group("high", "2")], &log).await;
    log.wait_len(40).await;
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    assert_eq!((log.len(), log.distinct()), (40, 40), "no message is lost");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// One set of tables, and the instances that work on it.
struct Set<DB: Backend> {
    outbox: Outbox<DB>,
    log: Log,
    relays: Vec<Relay>,
}

impl<DB: Backend> Set<DB> {
    fn live(&self) -> Vec<String> {
        self.relays.iter().filter_map(|r| r.stats().instance).collect()
    }
}

/// 8 sets of tables with up to 4 instances each, of which two are killed at a time and others are added.
async fn instances_come_and_go<T: TestDb>() {
    const SETS: usize = 8;
    const HOUSES: u16 = 4;
    let place: Place<T::Db> = T::place().await;
    let settings = quick();
    let groups = [group("even", "0,2"), group("odd", "1,3")];
    let mut sets = join_all((0..SETS).map(|n| {
        let builder = Outbox::builder(place.pool.clone()).houses(HOUSES).prefix(format!("s{n}_"));
        let builder = match &place.schema {
            Some(schema) => builder.schema(schema),
            None => builder,
        };
        let (settings, groups) = (&settings, &groups);
        async move {
            let outbox = builder.build().unwrap();
            outbox.migrate().await.unwrap();
            let log = Log::default();
            let relays = join_all((0..3).map(|_| start(&outbox, settings.clone(), groups, &log))).await;
            Set { outbox, log, relays }
        }
    }))
    .await;
    let messages = |from: usize| (from..from + 20).map(|n| Message::to("test:a").key(n % 9).payload(n.to_string()));
    let mut sent = 0;
    for _ in 0..3 {
        for set in &sets {
            publish::<T>(&set.outbox, messages(sent)).await;
        }
        sent += 20;
    }
    for set in &sets {
        set.log.wait_len(sent).await;
        assert_eq!(
            (set.log.len(), set.log.distinct(), set.log.order_violations()),
            (sent, sent, 0),
            "once each, while nobody dies"
        );
    }
    let bound = settings.lease + Duration::from_secs(2);
    for _ in 0..2 * scale() {
        // Connecting takes its time where all of this is one slow process, so nobody joins while it is measured.
        for set in &mut sets {
            let missing = 4 - set.relays.len();
            let added = join_all((0..missing).map(|_| start(&set.outbox, settings.clone(), &groups, &set.log))).await;
            set.relays.extend(added);
        }
        // The houses must be shared out first: otherwise there is nothing to move.
        for set in &sets {
            wait_for("even shares", SOON, async || set.relays.iter().all(|r| r.stats().houses == 1)).await;
            publish::<T>(&set.outbox, messages(sent)).await;
        }
        for set in &mut sets {
            drop(set.relays.drain(..2));
        }
        let killed = Instant::now();
        for set in &sets {
            publish::<T>(&set.outbox, messages(sent + 20)).await;
        }
        sent += 40;
        // From when on every house of a set is a living instance's.
        let mut owned: HashMap<usize, Duration> = HashMap::new();
        while owned.len() < SETS {
            for (n, set) in sets.iter().enumerate().filter(|(n, _)| !owned.contains_key(n)).collect::<Vec<_>>() {
                let asked = killed.elapsed();
                let houses = set.relays[0].store().houses().await.unwrap();
                let live = set.live();
                if houses.iter().all(|h| h.owner.as_ref().is_some_and(|owner| live.contains(owner))) {
                    owned.insert(n, asked);
                }
            }
            assert!(killed.elapsed() < SOON, "owned so far: {owned:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(owned.values().all(|took| *took < bound), "after {owned:?}, the bound is {bound:?}");
        assert!(owned.values().any(|took| *took > settings.heartbeat), "some must have been taken over: {owned:?}");
    }
    for set in &sets {
        wait_for("every message", SOON, async || set.log.distinct() == sent && pending::<T>(&set.outbox).await == 0).await;
        assert_eq!(set.log.order_violations(), 0);
    }
    let relays = sets.into_iter().flat_map(|set| set.relays);
    join_all(relays.map(|relay| relay.shutdown(Duration::from_secs(5)))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_house_is_without_an_owner_for_long_while_instances_come_and_go() {
    bounded(instances_come_and_go::<MySql>()).await;
}
