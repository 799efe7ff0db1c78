//! Houses of groups with an external trigger: they are taken for a run, and belong to nobody in between.

use std::time::Duration;

use posthouse::store::Backend;
use posthouse::transport::Transport;
use posthouse::{Group, Message, Outbox, Relay, RelaySettings, Run, RunEnd, Trigger};

use super::{Log, Recorder, held, patient, publish, quick, with_houses};
use crate::support::{SOON, TestDb, on_all_databases, pending, wait_for};

on_all_databases!(houses_belong_to_a_run_alone, of_two_runs_that_want_a_house_one_takes_place);

fn external() -> Group {
    Group::new("external").trigger(Trigger::External)
}

async fn start<DB: Backend>(outbox: &Outbox<DB>, mut settings: RelaySettings, name: &str, transport: impl Transport) -> Relay {
    settings.instance = Some(name.into());
    let relay = Relay::builder(outbox).settings(settings).group(external()).transport("test", transport).start().await.unwrap();
    wait_for("a lease", SOON, async || relay.stats().instance.is_some()).await;
    relay
}

/// How many houses are somebody's.
async fn owned<T: TestDb>(outbox: &Outbox<T::Db>) -> i64 {
    T::number(outbox.pool(), format!("SELECT count(*) FROM {} WHERE owner IS NOT NULL", outbox.tables().name("house"))).await
}

async fn houses_belong_to_a_run_alone<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let all = if T::NAME == "sqlite" { 1 } else { 8 };
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, (0..40).map(|n| Message::to("test:a").key(n % 5).payload(n.to_string()))).await;
    // Many heartbeats go by, and the lease is no longer than the run.
    let mut settings = patient();
    settings.heartbeat = Duration::from_millis(50);
    let relay = start(&outbox, settings, "one", transport).await;
    relay.drain_once().await;
    assert_eq!((owned::<T>(&outbox).await, log.len(), relay.stats().uncovered), (0, 0, None), "covered, and nobody's");

    let run = relay.run(Run::of("external"));
    let meanwhile = async {
        wait_for("in flight", SOON, async || log.len() > 0).await;
        let beat = relay.stats().passes["membership"];
        wait_for("some more heartbeats", SOON, async || relay.stats().passes["membership"] > beat + Duration::from_millis(200))
            .await;
        assert_eq!((owned::<T>(&outbox).await, relay.stats().houses), (all, all as u32), "nothing is given back meanwhile");
        release.send_replace(true);
    };
    let (outcome, ()) = tokio::join!(run, meanwhile);
    assert_eq!((outcome.counts.delivered, outcome.end), (40, RunEnd::Done));
    wait_for("them to be given back", SOON, async || owned::<T>(&outbox).await == 0).await;
    assert_eq!((log.len(), log.order_violations()), (40, 0));

    // The process is told to end in the middle.
    release.send_replace(false);
    publish::<T>(&outbox, (0..10).map(|_| Message::to("test:a"))).await;
    let run = relay.run(Run::of("external"));
    wait_for("in flight", SOON, async || log.len() == 50).await;
    let (outcome, (), ()) = tokio::join!(run, relay.shutdown(SOON), async {
        release.send_replace(true);
    });
    assert_eq!((outcome.counts.delivered, outcome.end), (10, RunEnd::Stopped));
    assert_eq!((owned::<T>(&outbox).await, pending::<T>(&outbox).await), (0, 0));
}

async fn of_two_runs_that_want_a_house_one_takes_place<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let several = T::NAME != "sqlite";
    let log = Log::default();
    let (release, transport) = held(&log);
    let one = start(&outbox, patient(), "one", transport).await;
    let (other_release, transport) = held(&log);
    let other = start(&outbox, patient(), "other", transport).await;
    publish::<T>(&outbox, (0..40).map(|n| Message::to("test:a").payload(n.to_string()))).await;
    let houses = |text: &str| if several { text.parse().unwrap() } else { "0".parse().unwrap() };
    let (first, second) = (Run::of("external").houses(houses("0-4")), Run::of("external").houses(houses("4-7")));
    // Whoever comes first, the other one is told at once.
    let (mut first, mut second) = (std::pin::pin!(one.run(first)), std::pin::pin!(other.run(second)));
    let (refused, holder, shared) = tokio::select! {
        outcome = &mut first => (outcome, "other", "4-7"),
        outcome = &mut second => (outcome, "one", "0-4"),
    };
    let RunEnd::Lost(why) = &refused.end else { panic!("{refused:?}") };
    let named = if several { "4" } else { "0" };
    assert!(why.contains(&format!("houses: {named} by instance \"{holder}-")), "{why}");
    assert_eq!(refused.counts.messages, 0);
    release.send_replace(true);
    other_release.send_replace(true);
    let done = if holder == "one" { first.await } else { second.await };
    let left = pending::<T>(&outbox).await as u64;
    assert_eq!((done.counts.delivered, done.end), (40 - left, RunEnd::Done), "all of {shared}");

    // Now the other may.
    wait_for("the houses to be free", SOON, async || owned::<T>(&outbox).await == 0).await;
    let all = if holder == "one" { other.run(Run::of("external")) } else { one.run(Run::of("external")) };
    assert_eq!(all.await.counts.delivered, left);
    assert_eq!((log.len(), log.distinct()), (40, 40));

    // One that dies in a run is no holder once its lease has ended.
    drop(one);
    other.shutdown(Duration::from_secs(5)).await;
    let (_held, transport) = held(&log);
    let mut brief = quick();
    brief.lease = Duration::from_secs(2);
    brief.send_timeout = Duration::from_secs(1);
    let dies = start(&outbox, brief, "dies", transport).await;
    publish::<T>(&outbox, [Message::to("test:a").payload("x")]).await;
    let before = log.len();
    let run = dies.run(Run::of("external"));
    wait_for("in flight", SOON, async || log.len() > before).await;
    drop(dies);
    drop(run);
    let heir = start(&outbox, quick(), "heir", Recorder(log.clone())).await;
    wait_for("the lease to end", SOON, async || {
        let outcome = heir.run(Run::of("external")).await;
        if let RunEnd::Lost(why) = &outcome.end {
            assert!(why.contains("\"dies-"), "{why}");
        }
        outcome.end == RunEnd::Done && outcome.counts.delivered == 1
    })
    .await;
    heir.shutdown(Duration::from_secs(5)).await;
}
