//! What is committed, and what comes again.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use posthouse::ConsumerOrder;
use posthouse::store::InboxStatus;
use tokio::sync::Semaphore;

use super::super::{Bench, PATIENCE, Script, with};
use super::{FromKafka, RawRecord};
use crate::inbox::quick;
use crate::support::{SOON, bounded, wait_for};
use posthouse::ConsumerSettings;

fn records(ids: std::ops::Range<usize>) -> Vec<RawRecord> {
    ids.map(|n| RawRecord::new(&n.to_string()).partition(0)).collect()
}

fn of(order: ConsumerOrder) -> ConsumerSettings {
    let mut settings = with(4, 50);
    settings.order = order;
    settings
}

/// A failing key is waited for in key order, so its message is a slow one that occupies no transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_behind_a_slow_message_is_committed_and_what_was_done_there_has_no_second_effect() {
    bounded(async {
        let mut inbox = quick();
        inbox.retry.max_attempts = 1_000;
        let bench = Bench::<FromKafka>::with(inbox, |script| script.failing("5", usize::MAX)).await;
        bench.feed.produce(records(0..20).into_iter().enumerate().map(|(n, r)| r.key(n.to_string())).collect()).await;
        let consumer = bench.consume(of(ConsumerOrder::Key)).await;
        bench.wait_effects(19).await;
        wait_for("a commit", PATIENCE, async || bench.feed.committed().await[0].offset == Some(5)).await;
        // Several more commits could have come.
        let more = bench.script.ids().len();
        wait_for("it to be tried again", PATIENCE, async || bench.script.ids().len() > more + 2).await;
        assert_eq!(bench.feed.committed().await[0].offset, Some(5));
        // Killed, as far as the broker is concerned: what was done behind it comes again.
        drop(consumer);
        bench.script.failures.lock().unwrap().clear();
        let next = bench.consume(of(ConsumerOrder::Key)).await;
        bench.wait_acknowledged().await;
        bench.wait_effects(20).await;
        let status = next.status();
        assert!(status.duplicates >= 14, "{status:?}");
        next.shutdown(SOON).await;
    })
    .await;
}

/// Written before anything begins, and taken back when all is well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_have_killed_the_last_owner_is_redelivered_and_nothing_else() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromKafka>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        bench.feed.produce(records(0..10)).await;
        let redelivered = || bench.script.seen().last().unwrap().redelivered;

        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        wait_for("the first to run", PATIENCE, async || bench.script.running.load(SeqCst) == 1).await;
        assert!(!redelivered(), "nobody had the partition before");
        // Before it ran, a commit said that it might.
        let committed = bench.feed.committed().await.remove(0);
        assert!(committed.offset == Some(0) && committed.metadata.contains("begun"), "{committed:?}");
        drop(consumer);

        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        wait_for("it to run again", PATIENCE, async || bench.script.seen().len() == 2).await;
        assert!(redelivered(), "it may have killed the last owner");
        assert_eq!(bench.fixture.shown("0").await.row.claims, 1, "written down before it runs");
        gate.add_permits(1_000);
        bench.wait_effects(10).await;
        consumer.shutdown(SOON).await;

        bench.feed.produce(records(10..20)).await;
        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        bench.wait_effects(20).await;
        assert!(!redelivered(), "the last owner left in good order");
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_message_does_not_block_its_partition() {
    bounded(async {
        let bench = Bench::<FromKafka>::with(quick(), |script| script.failing("3", usize::MAX)).await;
        let mut all = records(0..20);
        // Neither does what can't be read at all, nor what has no value.
        all[5].headers.insert("x".into(), vec![0xff]);
        all[6].key = Some(vec![0xff]);
        all[7].payload = None;
        bench.feed.produce(all).await;
        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        bench.wait_effects(17).await;
        bench.wait_acknowledged().await;
        bench.fixture.wait_status("3", InboxStatus::Failed).await;
        for id in ["5", "6"] {
            let set_aside = bench.fixture.shown(id).await;
            assert_eq!((set_aside.row.status, set_aside.payload.as_deref()), (InboxStatus::Failed, Some(&b"{}"[..])), "{id}");
        }
        assert_eq!(bench.fixture.shown("6").await.key.as_deref(), Some("\\xff"));
        assert!(bench.script.seen().iter().any(|m| m.message_id.as_deref() == Some("7") && m.payload.is_empty()));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_keep_their_order_and_run_beside_each_other() {
    bounded(async {
        let bench = Bench::of(FromKafka::with(3).await, quick(), |script| script).await;
        let all = (0..300).map(|n| RawRecord::new(&n.to_string()).partition(n % 3));
        bench.feed.produce(all.collect()).await;
        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        bench.wait_effects(300).await;
        let ids: Vec<i32> = bench.script.ids().iter().map(|id| id.parse().unwrap()).collect();
        for partition in 0..3 {
            let of_it: Vec<_> = ids.iter().filter(|id| *id % 3 == partition).collect();
            assert!(of_it.len() == 100 && of_it.is_sorted(), "{partition}: {of_it:?}");
        }
        assert!(!ids.is_sorted(), "one partition after the other");
        assert!(bench.script.most.load(SeqCst) > 1 || ids.windows(2).any(|pair| pair[0] % 3 != pair[1] % 3));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_is_taken_than_the_prefetch_out_of_a_long_topic() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromKafka>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        let payload = "x".repeat(1_000).into_bytes();
        let all = records(0..10_000).into_iter().map(|r| RawRecord { payload: Some(payload.clone()), ..r });
        bench.feed.produce(all.collect()).await;
        let consumer = bench.consume(of(ConsumerOrder::Source)).await;
        wait_for("the prefetch to be used", PATIENCE, async || consumer.status().in_hand == 50).await;
        let mut done = 0;
        while done < 500 {
            gate.add_permits(20);
            done += 20;
            wait_for("them to be done", PATIENCE, async || {
                assert!(consumer.status().in_hand <= 50);
                consumer.status().processed == done
            })
            .await;
        }
        consumer.shutdown(std::time::Duration::from_millis(100)).await;
        assert_eq!(bench.feed.committed().await[0].offset, Some(500));
    })
    .await;
}

/// One slow partition leaves places for the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_stands_still_does_not_stop_the_others() {
    bounded(async {
        let mut inbox = quick();
        inbox.retry.max_attempts = 1_000;
        let feed = FromKafka::with(2).await;
        let bench = Bench::of(feed, inbox, |script| script.failing("stuck", usize::MAX)).await;
        let stuck = RawRecord::new("stuck").partition(0).key("k");
        let behind = (0..200).map(|n| RawRecord::new(&format!("behind {n}")).partition(0).key("k"));
        bench.feed.produce([stuck].into_iter().chain(behind).collect()).await;
        let consumer = bench.consume(of(ConsumerOrder::Key)).await;
        wait_for("it to take its share", PATIENCE, async || consumer.status().in_hand >= 30).await;
        bench.feed.produce((0..200).map(|n| RawRecord::new(&n.to_string()).partition(1)).collect()).await;
        bench.wait_effects(200).await;
        bench.script.failures.lock().unwrap().clear();
        bench.wait_effects(401).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}
