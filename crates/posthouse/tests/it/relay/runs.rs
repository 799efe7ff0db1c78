//! Houses of groups that aren't continuous are sent from only in runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use posthouse::store::Backend;
use posthouse::transport::{Delivery, Transport, from_fn};
use posthouse::{Group, Message, Outbox, Relay, RelaySettings, Run, RunEnd, RunOutcome, Trigger};
use tokio::sync::watch;

use super::{Log, Recorder, held, manual, patient, publish, quick, with_houses};
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, on_all_databases, pending, wait_for};

on_all_databases!(
    a_run_sends_what_was_there_and_no_more,
    what_fails_waits_for_the_next_run,
    a_limit_counts_messages_that_are_taken_up,
    a_stopped_run_finishes_what_is_in_flight,
    a_group_has_no_more_in_flight_than_it_may,
    a_run_does_not_wait_for_a_destination_that_is_down,
    runs_that_make_no_sense_are_refused,
);

async fn start<DB: Backend>(outbox: &Outbox<DB>, settings: RelaySettings, group: Group, transport: impl Transport) -> Relay {
    Relay::builder(outbox).settings(settings).group(group).transport("test", transport).start().await.unwrap()
}

/// Messages, delivered, retried, failed, and the end.
fn told(outcome: &RunOutcome) -> ([u64; 4], RunEnd) {
    let counts = outcome.counts;
    ([counts.messages, counts.delivered, counts.retried, counts.failed], outcome.end.clone())
}

/// Of several keys and of none, numbered.
fn numbered(range: std::ops::Range<usize>) -> impl Iterator<Item = Message> {
    range.map(|n| {
        let message = Message::to("test:a").payload(n.to_string());
        if n.is_multiple_of(3) { message } else { message.key(n % 7) }
    })
}

async fn a_run_sends_what_was_there_and_no_more<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, numbered(0..300)).await;
    publish::<T>(&outbox, [Message::to("test:a").payload("later").deliver_in(Duration::from_secs(3600))]).await;
    let relay = start(&outbox, patient(), manual("all"), transport).await;
    // A commit through this outbox wakes the relay.
    publish::<T>(&outbox, numbered(300..310)).await;
    relay.drain_once().await;
    assert_eq!(log.len(), 0, "closed houses send nothing");

    let run = relay.run(Run::of("manual"));
    let meanwhile = async {
        wait_for("in flight", SOON, async || log.len() > 0).await;
        publish::<T>(&outbox, numbered(310..400)).await;
        release.send_replace(true);
    };
    let (outcome, ()) = tokio::join!(run, meanwhile);
    assert_eq!(told(&outcome), ([310, 310, 0, 0], RunEnd::Done));
    assert_eq!((log.len(), pending::<T>(&outbox).await), (310, 91));
    publish::<T>(&outbox, numbered(400..410)).await;
    relay.drain_once().await;
    assert_eq!(log.len(), 310, "closed again");
    let outcome = relay.run(Run::of("manual")).await;
    assert_eq!(told(&outcome), ([100, 100, 0, 0], RunEnd::Done));
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (410, 410, 0), "in the order of each key, over both runs");
    assert_eq!(told(&relay.run(Run::of("manual")).await), ([0; 4], RunEnd::Done));
    assert_eq!(pending::<T>(&outbox).await, 1, "what is not due yet");
    relay.shutdown(Duration::from_secs(5)).await;
}

/// A retry that is due while the run still goes is not made by it, and nothing passes it.
async fn what_fails_waits_for_the_next_run<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, released) = watch::channel(false);
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        l.add(&d);
        let (payload, attempt) = (String::from_utf8_lossy(&d.message().payload).into_owned(), d.message().attempt);
        let mut released = released.clone();
        async move {
            match payload.as_str() {
                "0" if attempt == 1 => d.retry("not yet", None),
                "hopeless" => d.rejected("never"),
                "slow" => {
                    let _ = released.wait_for(|released| *released).await;
                    d.delivered();
                }
                _ => d.delivered(),
            }
        }
    });
    let keyed = |n: usize| Message::to("test:a").key("k").payload(n.to_string());
    publish::<T>(&outbox, (0..5).map(keyed)).await;
    publish::<T>(&outbox, ["hopeless", "slow", "quick"].map(|text| Message::to("test:a").payload(text))).await;
    let relay = start(&outbox, patient(), manual("all"), transport).await;
    let run = relay.run(Run::of("manual"));
    let meanwhile = async {
        wait_for("the failures", SOON, async || relay.stats().retried == 1 && relay.stats().failed == 1).await;
        let due = match T::NAME {
            "postgres" => "status = 'PENDING' AND due_at < clock_timestamp()",
            "mysql" => "status = 'PENDING' AND due_at < UTC_TIMESTAMP(6)",
            _ => "status = 'PENDING' AND due_at < unixepoch('subsec') * 1000",
        };
        let due = format!("SELECT count(*) FROM {} WHERE {due}", outbox.tables().name("pending"));
        wait_for("the retry to be due", SOON, async || T::number(outbox.pool(), due.clone()).await == 1).await;
        // An operator makes the relay look at the key.
        relay.store().act(&[relay_row(&relay, "3").await], &posthouse::store::Action::Requeue, "test").await.unwrap();
        release.send_replace(true);
    };
    let (outcome, ()) = tokio::join!(run, meanwhile);
    assert_eq!(told(&outcome), ([4, 2, 1, 1], RunEnd::Done));
    assert_eq!(["0", "1", "hopeless", "slow", "quick"].map(|text| log.count(text)), [1, 0, 1, 1, 1]);
    assert_eq!(told(&relay.run(Run::of("manual")).await), ([5, 5, 0, 0], RunEnd::Done));
    assert_eq!(log.payloads()[4..], ["0", "0", "1", "2", "3", "4"][1..]);
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn relay_row(relay: &Relay, payload: &str) -> i64 {
    for row in crate::support::messages(&**relay.store()).await {
        if relay.store().show(row.id).await.unwrap().unwrap().payload == payload.as_bytes() {
            return row.id;
        }
    }
    panic!("no message {payload}");
}

async fn a_limit_counts_messages_that_are_taken_up<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let l = log.clone();
    let transport = from_fn(move |d: Delivery| {
        l.add(&d);
        let bad = d.message().payload == b"bad";
        async move { if bad { d.retry("bad", Some(Duration::from_secs(3600))) } else { d.delivered() } }
    });
    publish::<T>(&outbox, numbered(0..30)).await;
    let relay = start(&outbox, quick(), manual("all").limit(10), transport).await;
    assert_eq!(told(&relay.run(Run::of("manual")).await), ([10, 10, 0, 0], RunEnd::Limit), "the group's own");
    assert_eq!(log.len(), 10);
    assert_eq!(told(&relay.run(Run::of("manual").limit(20)).await), ([20, 20, 0, 0], RunEnd::Done), "just as many as there are");
    assert_eq!((log.distinct(), log.order_violations()), (30, 0));

    // A key whose first message fails holds up its others, and no place in the run.
    let of_bad_key = |n: usize| Message::to("test:a").key("bad").payload(if n == 0 { "bad" } else { "behind it" });
    publish::<T>(&outbox, (0..20).map(of_bad_key)).await;
    publish::<T>(&outbox, numbered(30..60)).await;
    assert_eq!(told(&relay.run(Run::of("manual").limit(12)).await), ([12, 11, 1, 0], RunEnd::Limit));
    assert_eq!(told(&relay.run(Run::of("manual").limit(100)).await), ([19, 19, 0, 0], RunEnd::Done));
    assert_eq!((log.count("bad"), log.count("behind it")), (1, 0));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_stopped_run_finishes_what_is_in_flight<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, numbered(0..60)).await;
    let mut settings = patient();
    settings.default_route.concurrency = Some(4);
    let relay = start(&outbox, settings, manual("all"), transport).await;
    let (stop, stopped) = watch::channel(false);
    let run = relay.run(Run::of("manual").stop(stopped));
    let meanwhile = async {
        wait_for("in flight", SOON, async || log.len() == 4).await;
        stop.send_replace(true);
        wait_for("the rest to be let go", SOON, async || relay.stats().in_memory == 4).await;
        release.send_replace(true);
    };
    let (outcome, ()) = tokio::join!(run, meanwhile);
    assert_eq!(told(&outcome), ([4, 4, 0, 0], RunEnd::Stopped));
    assert_eq!((log.len(), pending::<T>(&outbox).await), (4, 56));
    assert_eq!(told(&relay.run(Run::of("manual")).await), ([56, 56, 0, 0], RunEnd::Done));
    assert_eq!((log.distinct(), log.order_violations()), (60, 0));

    // So is one whose relay is shut down.
    publish::<T>(&outbox, numbered(60..80)).await;
    release.send_replace(false);
    let run = relay.run(Run::of("manual"));
    wait_for("in flight", SOON, async || log.len() == 64).await;
    let (outcome, (), ()) = tokio::join!(run, relay.shutdown(SOON), async {
        release.send_replace(true);
    });
    assert_eq!(told(&outcome), ([4, 4, 0, 0], RunEnd::Stopped));
    assert_eq!((log.len(), pending::<T>(&outbox).await), (64, 16), "what was in flight is done, and nothing else");
}

async fn a_group_has_no_more_in_flight_than_it_may<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let log = Log::default();
    let (n, m, l) = (now.clone(), most.clone(), log.clone());
    let transport = from_fn(move |d: Delivery| {
        m.fetch_max(n.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        l.add(&d);
        let n = n.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            n.fetch_sub(1, Ordering::SeqCst);
            d.delivered();
        }
    });
    // More than may be in memory of the group at once, and than one destination has room for.
    let messages =
        |from: usize| (from..from + 600).map(|n| Message::to(format!("test:{}", n % 3)).key(n % 90).payload(n.to_string()));
    publish::<T>(&outbox, messages(0)).await;
    let relay = start(&outbox, quick(), manual("all").concurrency(5), transport).await;
    assert_eq!(told(&relay.run(Run::of("manual")).await), ([600, 600, 0, 0], RunEnd::Done));
    assert!((2..=5).contains(&most.load(Ordering::SeqCst)), "{most:?} at once");
    relay.shutdown(Duration::from_secs(5)).await;

    // A continuous group as well.
    most.store(0, Ordering::SeqCst);
    let continuous = Group::new("continuous").concurrency(4);
    let (n, m, l) = (now.clone(), most.clone(), log.clone());
    let transport = from_fn(move |d: Delivery| {
        m.fetch_max(n.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        l.add(&d);
        let n = n.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            n.fetch_sub(1, Ordering::SeqCst);
            d.delivered();
        }
    });
    let relay = start(&outbox, quick(), continuous, transport).await;
    publish::<T>(&outbox, messages(600)).await;
    relay.drain_once().await;
    assert!((2..=4).contains(&most.load(Ordering::SeqCst)), "{most:?} at once");
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (1_200, 1_200, 0));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_run_does_not_wait_for_a_destination_that_is_down<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (up, l) = (watch::Sender::new(false), log.clone());
    let is_up = up.subscribe();
    let transport = from_fn(move |d: Delivery| {
        let available = *is_up.borrow() || d.message().destination != "test:down";
        if available {
            l.add(&d);
        }
        async move { if available { d.delivered() } else { d.unavailable("down") } }
    });
    publish::<T>(&outbox, (0..50).map(|n| Message::to("test:down").key(format!("down {}", n % 3)).payload(n.to_string()))).await;
    publish::<T>(&outbox, (0..50).map(|n| Message::to("test:up").key(n % 3).payload(n.to_string()))).await;
    let relay = start(&outbox, quick(), manual("all"), transport).await;
    let outcome = relay.run(Run::of("manual")).await;
    assert_eq!((outcome.counts.delivered, outcome.counts.retried, outcome.end), (50, 0, RunEnd::Done));
    assert!((51..=100).contains(&outcome.counts.messages), "those that were tried are told: {:?}", outcome.counts);
    assert_eq!(pending::<T>(&outbox).await, 50);
    up.send_replace(true);
    wait_for("the others to be sent", SOON, async || {
        // While it counts as down, a run sends one message to see whether it is up.
        relay.run(Run::of("manual")).await;
        pending::<T>(&outbox).await == 0
    })
    .await;
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (100, 100, 0));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn runs_that_make_no_sense_are_refused<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, numbered(0..4)).await;
    let relay = start(&outbox, patient(), manual("0"), transport).await;
    let why = async |run: Run| match relay.run(run).await.end {
        RunEnd::Lost(why) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(Run::of("nightly")).await.contains("no group \"nightly\" here; there are: manual"));
    let text = why(Run::of("manual").houses("0-1".parse().unwrap())).await;
    assert!(text.contains("has the houses 0, and not all of 0-1"), "{text}");
    relay.shutdown(Duration::from_secs(5)).await;

    let relay = start(&outbox, patient(), Group::new("all"), Recorder(log.clone())).await;
    relay.drain_once().await;
    let RunEnd::Lost(why) = relay.run(Run::of("all")).await.end else { panic!("a run of a continuous group") };
    assert!(why.contains("continuous"), "{why}");
    relay.shutdown(Duration::from_secs(5)).await;
    drop(release);

    // Two at once.
    let (release, transport) = held(&log);
    publish::<T>(&outbox, numbered(4..20)).await;
    let relay = start(&outbox, patient(), manual("all"), transport).await;
    let before = log.len();
    let first = relay.run(Run::of("manual"));
    let second = async {
        wait_for("in flight", SOON, async || log.len() > before).await;
        let second = relay.run(Run::of("manual")).await;
        release.send_replace(true);
        second
    };
    let (first, second) = tokio::join!(first, second);
    assert!(matches!(second.end, RunEnd::Lost(why) if why.contains("are in another run")));
    assert_eq!(told(&first), ([16, 16, 0, 0], RunEnd::Done));
    relay.shutdown(Duration::from_secs(5)).await;
}

/// What only databases with several houses show.
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
    a_group_that_is_stuck_does_not_hold_up_another,
    a_house_that_is_lost_ends_the_run_after_the_others,
    a_handover_waits_for_the_run
);

/// To the same destination, more than there is room for in memory.
async fn a_group_that_is_stuck_does_not_hold_up_another<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let table = outbox.tables().name("pending");
    publish::<T>(&outbox, (0..1_600).map(|n| Message::to("test:a").payload(n.to_string()))).await;
    let stuck = T::number(outbox.pool(), format!("SELECT count(*) FROM {table} WHERE house < 4")).await;
    let log = Log::default();
    let (release, released) = watch::channel(false);
    let l = log.clone();
    let first = Arc::new(AtomicUsize::new(0));
    let (f, expected) = (first.clone(), 1_600 - stuck as usize);
    let transport = from_fn(move |d: Delivery| {
        let (mut released, log, first) = (released.clone(), l.clone(), f.clone());
        async move {
            // The first ones are those of the group whose run begins first.
            if first.fetch_add(1, Ordering::SeqCst) < 2 {
                let _ = released.wait_for(|released| *released).await;
            }
            log.add(&d);
            d.delivered();
        }
    });
    let relay = Relay::builder(&outbox)
        .settings(patient())
        .group(manual("0-3").concurrency(2))
        .group(Group::new("other").houses("4-7").unwrap().trigger(Trigger::Manual))
        .transport("test", transport)
        .start()
        .await
        .unwrap();
    let run = relay.run(Run::of("manual"));
    let other = async {
        // Its two are in flight, and stay there.
        wait_for("the stuck ones", SOON, async || first.load(Ordering::SeqCst) == 2).await;
        let other = relay.run(Run::of("other")).await;
        release.send_replace(true);
        other
    };
    let (run, other) = tokio::join!(run, other);
    assert_eq!(told(&other), ([expected as u64, expected as u64, 0, 0], RunEnd::Done));
    assert_eq!(told(&run), ([stuck as u64, stuck as u64, 0, 0], RunEnd::Done));
    assert_eq!((log.len(), log.distinct()), (1_600, 1_600));
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_house_that_is_lost_ends_the_run_after_the_others<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, (0..40).map(|n| Message::to("test:a").payload(n.to_string()))).await;
    let tables = |name: &str| outbox.tables().name(name);
    let theirs = T::number(outbox.pool(), format!("SELECT count(*) FROM {} WHERE house = 3", tables("pending"))).await as u64;
    let mut settings = patient();
    settings.default_route.concurrency = Some(4);
    let relay = start(&outbox, settings, manual("all"), transport).await;
    let run = relay.run(Run::of("manual"));
    let meanwhile = async {
        wait_for("in flight", SOON, async || log.len() == 4).await;
        let hour =
            if T::NAME == "postgres" { "clock_timestamp() + interval '1 hour'" } else { "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR" };
        let thief = format!("INSERT INTO {} (instance, lease_until, houses) VALUES ('thief', {hour}, '')", tables("instance"));
        T::execute(outbox.pool(), thief).await;
        T::execute(outbox.pool(), format!("UPDATE {} SET owner = 'thief', epoch = epoch + 1 WHERE house = 3", tables("house")))
            .await;
        wait_for("it to be noticed", SOON, async || relay.stats().houses == 7).await;
        release.send_replace(true);
    };
    let (outcome, ()) = tokio::join!(run, meanwhile);
    assert!(matches!(&outcome.end, RunEnd::Lost(why) if why.contains("houses 3 were lost")), "{outcome:?}");
    let delivered = outcome.counts.delivered;
    // What was in flight of it is among them.
    assert!((40 - theirs..=44 - theirs).contains(&delivered) && outcome.counts.messages == delivered, "{theirs} {outcome:?}");
    assert_eq!(pending::<T>(&outbox).await as u64, 40 - delivered);
    assert_eq!(log.len(), log.distinct());
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_handover_waits_for_the_run<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let (release, transport) = held(&log);
    publish::<T>(&outbox, numbered(0..40)).await;
    let mut settings = patient();
    settings.default_route.concurrency = Some(4);
    let relay = start(&outbox, settings.clone(), manual("all"), transport).await;
    let run = relay.run(Run::of("manual"));
    let meanwhile = async {
        wait_for("in flight", SOON, async || log.len() == 4).await;
        let second = start(&outbox, settings, manual("all"), Recorder(log.clone())).await;
        wait_for("the second to be seen", SOON, async || second.stats().passes.contains_key("membership")).await;
        release.send_replace(true);
        second
    };
    let (outcome, second) = tokio::join!(run, meanwhile);
    assert_eq!(told(&outcome), ([40, 40, 0, 0], RunEnd::Done));
    wait_for("even shares", SOON, async || (relay.stats().houses, second.stats().houses) == (4, 4)).await;
    publish::<T>(&outbox, numbered(40..80)).await;
    let (one, other) = tokio::join!(relay.run(Run::of("manual")), second.run(Run::of("manual")));
    assert_eq!((one.counts.delivered + other.counts.delivered, one.end, other.end), (40, RunEnd::Done, RunEnd::Done));
    assert_eq!((log.len(), log.distinct(), log.order_violations()), (80, 80, 0));
    relay.shutdown(Duration::from_secs(5)).await;
    second.shutdown(Duration::from_secs(5)).await;
}
