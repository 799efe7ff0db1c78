//! Several instances share the houses.

use std::time::{Duration, Instant};

use posthouse::store::Backend;
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Outbox, Relay};

use super::{Log, Recorder, quick};
use crate::support::{SOON, TestDb, on_all_databases, pending, wait_for};

on_all_databases!(
    every_message_is_sent_once_while_instances_come_and_go_gracefully,
    houses_of_a_dead_instance_move_within_its_lease,
    graceful_stop_hands_over_at_once,
    slow_handler_keeps_its_lease,
    lost_lease_is_noticed_and_joined_again,
    an_instance_without_houses_has_nothing_to_drain,
    wrong_number_of_houses_refuses_to_start,
);

async fn relay<DB: Backend>(outbox: &Outbox<DB>, log: &Log) -> Relay {
    Relay::builder(outbox).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap()
}

/// T1, T7, O5: two join under load, one stops gracefully; no loss, no duplicate, no order violation.
async fn every_message_is_sent_once_while_instances_come_and_go_gracefully<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let first = relay(&outbox, &log).await;
    let n = 3_000;
    let publisher = tokio::spawn({
        let outbox = outbox.clone();
        async move {
            for i in 0..n / 10 {
                let mut tx = outbox.begin().await.unwrap();
                let ten = (i * 10..i * 10 + 10).map(|i| Message::to("test:a").key(i % 97).payload(i.to_string()));
                outbox.publish_many(&mut tx, ten).await.unwrap();
                tx.commit().await.unwrap();
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    });
    log.wait_len(n / 10).await;
    let second = relay(&outbox, &log).await;
    log.wait_len(n / 4).await;
    let third = relay(&outbox, &log).await;
    if T::NAME != "sqlite" {
        wait_for("even shares", SOON, async || {
            let shares = [&first, &second, &third].map(|r| r.stats().houses);
            shares.iter().sum::<u32>() == 64 && shares.iter().all(|s| (21..=22).contains(s))
        })
        .await;
    }
    first.shutdown(Duration::from_secs(10)).await;
    publisher.await.unwrap();
    log.wait_len(n).await;
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    assert_eq!((log.len(), log.distinct()), (n, n));
    assert_eq!(log.order_violations(), 0);
    second.shutdown(Duration::from_secs(10)).await;
    third.shutdown(Duration::from_secs(10)).await;
}

/// A dead instance's houses move within lease + 2 s.
async fn houses_of_a_dead_instance_move_within_its_lease<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let first = relay(&outbox, &log).await;
    wait_for("first owns", SOON, async || first.stats().houses > 0).await;
    let all = first.stats().houses;
    drop(first); // Dies without a word.
    let died = Instant::now();
    let second = relay(&outbox, &log).await;
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    wait_for("all houses moved", SOON, async || second.stats().houses == all).await;
    let took = died.elapsed();
    assert!(took < quick().lease + Duration::from_secs(2), "{took:?}");
    log.wait_len(1).await;
    second.shutdown(Duration::from_secs(5)).await;
}

async fn graceful_stop_hands_over_at_once<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let mut long = quick();
    long.lease = Duration::from_secs(600);
    let first = Relay::builder(&outbox).settings(long).transport("test", Recorder(log.clone())).start().await.unwrap();
    wait_for("first owns", SOON, async || first.stats().houses > 0).await;
    first.shutdown(Duration::from_secs(10)).await;
    let second = relay(&outbox, &log).await;
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    // With a lease of ten minutes, only a release can explain it.
    log.wait_len(1).await;
    second.shutdown(Duration::from_secs(5)).await;
}

/// T2: sends take most of the lease, all of them together several times the lease; it is renewed meanwhile.
async fn slow_handler_keeps_its_lease<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let l = log.clone();
    let slow = from_fn(move |d: Delivery| {
        let log = l.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(900)).await;
            log.add(&d);
            d.delivered();
        }
    });
    let mut settings = quick();
    settings.lease = Duration::from_secs(2);
    settings.send_timeout = Duration::from_millis(1_200);
    settings.default_route.concurrency = Some(1);
    let first = Relay::builder(&outbox).settings(settings).transport("test", slow).start().await.unwrap();
    for i in 0..6 {
        outbox.publish_alone(Message::to("test:a").payload(i.to_string())).await.unwrap();
    }
    wait_for("in flight", SOON, async || first.stats().in_flight > 0).await;
    log.wait_len(6).await;
    wait_for("completion", SOON, async || pending::<T>(&outbox).await == 0).await;
    assert_eq!(log.len(), 6, "once each");
    assert_eq!(first.stats().leases_lost, 0);
    first.shutdown(Duration::from_secs(5)).await;
}

/// T7, T9: somebody else ends the lease; the instance notices, lets go, and joins again under another name.
async fn lost_lease_is_noticed_and_joined_again<T: TestDb>() {
    let outbox = T::fresh().await;
    let log = Log::default();
    let first = relay(&outbox, &log).await;
    wait_for("first owns", SOON, async || first.stats().houses > 0).await;
    let (name, all) = (first.stats().instance.unwrap(), first.stats().houses);
    let table = outbox.tables().name("instance");
    T::execute(outbox.pool(), format!("DELETE FROM {table}")).await;
    wait_for("joined again", SOON, async || {
        let stats = first.stats();
        stats.leases_lost == 1 && stats.houses == all && stats.instance.as_ref() != Some(&name)
    })
    .await;
    outbox.publish_alone(Message::to("test:a").payload("x")).await.unwrap();
    log.wait_len(1).await;
    first.shutdown(Duration::from_secs(5)).await;
}

async fn wrong_number_of_houses_refuses_to_start<T: TestDb>() {
    let outbox = T::fresh().await;
    let refused = Relay::builder(&outbox).expect_houses(7).start().await.unwrap_err();
    assert!(refused.to_string().contains("houses resize 7"), "{refused}");
    let mut bad = quick();
    bad.send_timeout = Duration::from_secs(3);
    bad.heartbeat = Duration::from_secs(2);
    let refused = Relay::builder(&outbox).settings(bad).start().await.unwrap_err().to_string();
    assert!(refused.contains("send_timeout") && refused.contains("heartbeat"), "T13, all at once: {refused}");
}

async fn an_instance_without_houses_has_nothing_to_drain<T: TestDb>() {
    let place = T::place().await;
    let mut builder = Outbox::builder(place.pool.clone()).houses(1);
    if let Some(schema) = &place.schema {
        builder = builder.schema(schema);
    }
    let outbox = builder.build().unwrap();
    outbox.migrate().await.unwrap();
    let named = |name: &str| {
        let mut settings = quick();
        settings.instance = Some(name.to_owned());
        settings
    };
    // The one house goes to the first by name, and the message in it stays there.
    let holds = from_fn(|d: Delivery| async move {
        std::future::pending::<()>().await;
        drop(d);
    });
    let first = Relay::builder(&outbox).settings(named("a")).transport("test", holds).start().await.unwrap();
    outbox.publish_alone(Message::to("test:a")).await.unwrap();
    wait_for("in flight", SOON, async || first.stats().in_flight == 1).await;
    let log = Log::default();
    let second = Relay::builder(&outbox).settings(named("b")).transport("test", Recorder(log.clone())).start().await.unwrap();
    tokio::time::timeout(SOON, second.drain_once()).await.expect("nothing is due to an instance without a house");
    assert_eq!((log.len(), second.stats().houses), (0, 0));
    // Once it has the house, it has its message to send.
    first.shutdown(Duration::ZERO).await;
    wait_for("the house", SOON, async || second.stats().houses == 1).await;
    tokio::time::timeout(SOON, second.drain_once()).await.expect("drained");
    assert_eq!(log.len(), 1);
    second.shutdown(Duration::from_secs(5)).await;
}
