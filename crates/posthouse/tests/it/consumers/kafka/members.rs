//! Members of the group that come, go, and are slow.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use posthouse::ConsumerOrder;
use posthouse::consumer::Consumer;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use tokio::sync::Semaphore;

use super::super::{Bench, PATIENCE, Script, with};
use super::{FromKafka, RawRecord};
use crate::inbox::quick;
use crate::support::{SOON, bounded, wait_for};

const PARTITIONS: i32 = 6;

/// Members join, leave in good order and vanish while messages stream; under both ways of sharing out.
async fn each_message_has_its_effect_once(strategy: &str) {
    let bench = Bench::of(FromKafka::with(PARTITIONS).await, quick(), |script| script).await;
    let feed = bench.feed.clone();
    let total = 1_200;
    let sending = tokio::spawn(async move {
        for n in (0..total).step_by(20) {
            let some = (n..n + 20).map(|n| RawRecord::new(&n.to_string()).partition(n % PARTITIONS));
            feed.produce(some.collect()).await;
        }
    });
    let mut settings = with(4, 20);
    settings.order = ConsumerOrder::Source;
    let start = async || bench.feed.start(&bench.inbox(), settings.clone(), &[("partition.assignment.strategy", strategy)]).await;
    let first = start().await;
    wait_for("the first to work", PATIENCE, async || first.status().processed > 50).await;
    let second = start().await;
    wait_for("the second to work", PATIENCE, async || second.status().processed > 50).await;
    first.shutdown(SOON).await;
    let third = start().await;
    wait_for("the third to work", PATIENCE, async || third.status().processed > 20).await;
    // Vanishes with what it has in hand.
    drop(second);
    wait_for("all effects", PATIENCE * 2, async || bench.fixture.effects().await >= i64::from(total)).await;
    sending.await.unwrap();
    bench.wait_acknowledged().await;
    assert_eq!(bench.fixture.effects().await, i64::from(total));
    for n in 0..total {
        assert_eq!(bench.fixture.effects_of(&n.to_string()).await, 1, "{n}");
    }
    third.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_with_cooperative_sharing() {
    bounded(each_message_has_its_effect_once("cooperative-sticky")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_with_eager_sharing() {
    bounded(each_message_has_its_effect_once("range,roundrobin")).await;
}

/// A second member gets the partition only when what was running in it is finished, and committed; the rest is the second's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_when_a_partition_is_revoked_is_finished_first_and_nothing_else_is_begun() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromKafka>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        bench.feed.produce((0..10).map(|n| RawRecord::new(&n.to_string()).partition(0)).collect()).await;
        let mut settings = with(4, 20);
        settings.order = ConsumerOrder::Source;
        let first = bench.consume(settings.clone()).await;
        wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
        wait_for("the rest to wait", PATIENCE, async || first.status().in_hand == 10).await;

        // The group hands the only partition to whoever has joined when the first leaves.
        let stopping = tokio::spawn(first.shutdown(SOON));
        let second = bench.consume(settings).await;
        gate.add_permits(1);
        stopping.await.unwrap();
        assert_eq!(bench.fixture.effects().await, 1, "nothing else was begun");
        gate.add_permits(1_000);
        bench.wait_effects(10).await;
        bench.wait_acknowledged().await;
        let status = second.status();
        assert_eq!((handled(&second), status.duplicates), (9, 0), "{status:?}");
        assert!(bench.script.seen().iter().all(|m| !m.redelivered), "left in good order");
        second.shutdown(SOON).await;
    })
    .await;
}

/// Both partitions are revoked when a member joins: running messages are finished before, and those behind them are not begun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_joins_waits_for_what_runs_in_the_partitions_it_gets() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let script = |script| Script { gate: Some(gate.clone()), ..script };
        let bench = Bench::of(FromKafka::with(2).await, quick(), script).await;
        bench.feed.produce((0..20).map(|n| RawRecord::new(&n.to_string()).partition(n % 2)).collect()).await;
        let mut settings = with(4, 40);
        settings.order = ConsumerOrder::Source;
        let eager = [("partition.assignment.strategy", "range")];
        let first = bench.feed.start(&bench.inbox(), settings.clone(), &eager).await;
        wait_for("one to run", PATIENCE, async || bench.script.running.load(SeqCst) >= 1).await;
        wait_for("all to be taken", PATIENCE, async || first.status().in_hand == 20).await;
        let second = bench.feed.start(&bench.inbox(), settings, &eager).await;
        // The group waits for the first, and goes on waiting.
        let mut since = tokio::time::Instant::now();
        wait_for("the group to wait", PATIENCE, async || {
            if !group(&bench.feed).await.1.contains("Preparing") {
                since = tokio::time::Instant::now();
            }
            since.elapsed() > Duration::from_secs(3)
        })
        .await;
        // One in each partition.
        gate.add_permits(2);
        wait_for("the second to have a partition", PATIENCE, async || second.status().in_hand > 0).await;
        assert_eq!((handled(&first), handled(&second)), (2, 0), "nothing else was begun");
        gate.add_permits(1_000);
        bench.wait_effects(20).await;
        bench.wait_acknowledged().await;
        assert_eq!((handled(&first), handled(&second)), (11, 9));
        assert_eq!(first.status().duplicates + second.status().duplicates, 0, "committed when it was handed over");
        first.shutdown(SOON).await;
        second.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_slower_than_the_group_allows_between_polls_keeps_its_partition() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let mut inbox = quick();
        inbox.handler_timeout = Duration::from_secs(60);
        let bench = Bench::<FromKafka>::with(inbox, |script| Script { gate: Some(gate.clone()), ..script }).await;
        bench.feed.produce((0..5).map(|n| RawRecord::new(&n.to_string()).partition(0)).collect()).await;
        let mut settings = with(1, 2);
        settings.order = ConsumerOrder::Source;
        let interval = [("max.poll.interval.ms", "6000")];
        let consumer = bench.feed.start(&bench.inbox(), settings, &interval).await;
        wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
        // Longer than the interval, with the prefetch used up all the time.
        let since = tokio::time::Instant::now();
        wait_for("the interval to be over", PATIENCE, async || {
            assert!(consumer.status().connected, "{:?}", consumer.status());
            since.elapsed() > Duration::from_secs(9)
        })
        .await;
        assert_eq!(members(&bench.feed).await, 1);
        gate.add_permits(1_000);
        bench.wait_effects(5).await;
        bench.wait_acknowledged().await;
        assert_eq!(bench.script.ids(), ["0", "1", "2", "3", "4"], "none was run twice");
        consumer.shutdown(SOON).await;
        wait_for("the group to be left", PATIENCE, async || members(&bench.feed).await == 0).await;
    })
    .await;
}

/// Messages that a consumer ran. SQLite has one writer, so now and then one fails and is run again by the retry worker.
fn handled(consumer: &Consumer) -> u64 {
    consumer.status().processed + consumer.status().failures
}

async fn members(feed: &FromKafka) -> usize {
    group(feed).await.0
}

/// How many members the group has, and its state.
async fn group(feed: &FromKafka) -> (usize, String) {
    let (config, group) = (feed.reader(), feed.group.clone());
    tokio::task::spawn_blocking(move || {
        let reader: BaseConsumer = config.create().unwrap();
        let groups = reader.fetch_group_list(Some(&group), PATIENCE).unwrap();
        groups.groups().first().map_or((0, String::new()), |group| (group.members().len(), group.state().to_owned()))
    })
    .await
    .unwrap()
}

/// Two with one static identity: the older one is fenced, and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_member_keeps_its_partitions_over_a_restart() {
    bounded(async {
        let bench = Bench::<FromKafka>::new().await;
        let instance = [("group.instance.id", "one")];
        let mut settings = with(1, 10);
        settings.order = ConsumerOrder::Source;
        let first = bench.feed.start(&bench.inbox(), settings.clone(), &instance).await;
        bench.feed.produce(vec![RawRecord::new("0")]).await;
        bench.wait_effects(1).await;
        let second = bench.feed.start(&bench.inbox(), settings, &instance).await;
        wait_for("the first to be fenced", PATIENCE, async || {
            !first.status().connected && first.status().last_error.unwrap_or_default().contains("instance")
        })
        .await;
        drop(first);
        bench.feed.produce(vec![RawRecord::new("1")]).await;
        bench.wait_effects(2).await;
        second.shutdown(SOON).await;
    })
    .await;
}
