//! Groups that run when their triggers are due, and when somebody asks.

use std::time::Duration;

use posthouse::store::{Backend, RunFilter, RunRow, RunStatus};
use posthouse::transport::Transport;
use posthouse::{Group, GroupStats, Message, Misfire, Outbox, Relay, RelayBuilder, RelaySettings, RunReport, Trigger, WhenBusy};

use super::{Log, Recorder, held, manual, patient, publish, quick, with_houses};
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, on_all_databases, pending, wait_for};

on_all_databases!(
    a_fixed_delay_begins_again_after_the_end,
    a_rate_and_cron_keep_the_databases_time,
    a_busy_group_makes_the_next_run_wait,
    a_busy_group_leaves_the_next_run_out,
    a_busy_group_gives_way_to_the_next_run,
    times_that_were_missed_are_made_up_for_once,
    a_run_that_takes_too_long_is_cut,
    a_run_that_ends_with_an_error_is_tried_again,
    a_paused_group_waits,
    a_group_is_stopped,
    a_run_that_its_instance_left_is_done_by_the_heir,
    what_cannot_be_triggered_says_so,
);

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

with_several_houses!(a_request_is_run_by_every_instance, the_next_group_follows_what_is_done);

fn attentive(mut settings: RelaySettings) -> RelaySettings {
    settings.idle_poll = Duration::from_millis(50);
    settings
}

fn builder<DB: Backend>(outbox: &Outbox<DB>, transport: impl Transport) -> RelayBuilder {
    Relay::builder(outbox).settings(attentive(patient())).transport("test", transport)
}

async fn start<DB: Backend>(outbox: &Outbox<DB>, group: Group, log: &Log) -> Relay {
    builder(outbox, Recorder(log.clone())).group(group).start().await.unwrap()
}

fn group(trigger: Trigger) -> Group {
    Group::new("g").trigger(trigger)
}

/// Oldest first.
async fn runs(relay: &Relay) -> Vec<RunRow> {
    let mut rows = relay.store().runs().list(&RunFilter { limit: 1_000, ..RunFilter::default() }).await.unwrap();
    rows.reverse();
    rows
}

async fn ended(relay: &Relay) -> Vec<RunRow> {
    runs(relay).await.into_iter().filter(|r| r.status.is_over()).collect()
}

fn stats(relay: &Relay) -> GroupStats {
    relay.groups().remove(0).1
}

fn messages(from: usize, n: usize) -> impl Iterator<Item = Message> {
    (from..from + n).map(|i| Message::to("test:a").payload(i.to_string()))
}

async fn a_fixed_delay_begins_again_after_the_end<T: TestDb>() {
    const DELAY: Duration = Duration::from_millis(300);
    let outbox = with_houses::<T>(4).await;
    let log = Log::default();
    publish::<T>(&outbox, messages(0, 20)).await;
    let relay = start(&outbox, group(Trigger::Every(DELAY)), &log).await;
    log.wait_len(20).await;
    publish::<T>(&outbox, messages(20, 10)).await;
    log.wait_len(30).await;
    wait_for("the runs to be recorded", SOON, async || {
        ended(&relay).await.iter().map(|r| r.delivered).sum::<i64>() == 30 && pending::<T>(&outbox).await == 0
    })
    .await;
    let rows = ended(&relay).await;
    assert!(rows.iter().all(|r| r.cause == "every" && r.status == RunStatus::Done && r.error.is_none()), "{rows:?}");
    for two in rows.windows(2) {
        let between = two[1].started_us.unwrap() - two[0].ended_us.unwrap();
        // The end is written down a little after it was; without the delay there would be next to nothing between them.
        assert!(between >= DELAY.as_micros() as i64 - 100_000, "{between} µs between {two:?}");
    }
    // Counted a moment after they are on record.
    wait_for("the runs to be counted", SOON, async || {
        let stats = stats(&relay);
        stats.runs.get(&RunStatus::Done).is_some_and(|n| *n >= 2) && stats.houses > 0 && stats.last.is_some()
    })
    .await;
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_rate_and_cron_keep_the_databases_time<T: TestDb>() {
    for (trigger, cause, period) in [
        (Trigger::Rate(Duration::from_millis(400)), "rate", 400_000),
        (Trigger::Cron { cron: "* * * * * *".into(), tz: "Asia/Shanghai".into() }, "cron", 1_000_000),
    ] {
        let outbox = with_houses::<T>(4).await;
        let log = Log::default();
        let relay = start(&outbox, group(trigger), &log).await;
        wait_for("its first due time", SOON, async || stats(&relay).next_due_us.is_some()).await;
        publish::<T>(&outbox, messages(0, 5)).await;
        log.wait_len(5).await;
        wait_for("three runs", SOON, async || ended(&relay).await.len() >= 3).await;
        let rows = ended(&relay).await;
        assert!(rows.iter().all(|r| r.cause == cause), "{rows:?}");
        let due: Vec<i64> = rows.iter().filter_map(|r| r.due_us).collect();
        assert!(due.iter().all(|us| us % period == 0) && due.is_sorted_by(|a, b| a < b), "{due:?}");
        let early = rows.iter().filter(|r| r.started_us < r.due_us).count();
        assert_eq!(early, 0, "nothing runs before its time: {rows:?}");
        let watch = relay.store().runs().watch().await.unwrap();
        assert!(watch.groups[0].fired_us >= due.last().copied(), "{watch:?}");
        assert_eq!(rows.iter().map(|r| r.delivered).sum::<i64>(), 5);
        relay.shutdown(Duration::from_secs(5)).await;
    }
}

/// A run that is going, with one message held by its receiver, and another that waits for that one.
struct Busy<T: TestDb> {
    outbox: Outbox<T::Db>,
    relay: Relay,
    log: Log,
    release: tokio::sync::watch::Sender<bool>,
}

impl<T: TestDb> Busy<T> {
    async fn new(change: impl FnOnce(&mut Group)) -> (Self, impl Future<Output = RunReport>) {
        let outbox = with_houses::<T>(1).await;
        let log = Log::default();
        let (release, transport) = held(&log);
        let mut group = manual("all").concurrency(1);
        change(&mut group);
        publish::<T>(&outbox, messages(0, 2).map(|m| m.key("k"))).await;
        let relay = builder(&outbox, transport).group(group).start().await.unwrap();
        let first = trigger(&relay);
        log.wait_len(1).await;
        wait_for("the run to be recorded", SOON, async || runs(&relay).await.len() == 1).await;
        (Self { outbox, relay, log, release }, first)
    }

    /// The run has been told to stop: the message that waited, and was read together with the other, has gone back.
    async fn is_stopping(&self) {
        wait_for("the run to stop", SOON, async || self.relay.stats().in_memory == 1).await;
    }
}

/// Asked for at once.
fn trigger(relay: &Relay) -> impl Future<Output = RunReport> + use<> {
    let asked = relay.trigger("manual");
    async move { asked.await.unwrap() }
}

async fn a_busy_group_makes_the_next_run_wait<T: TestDb>() {
    let (busy, first) = Busy::<T>::new(|_| {}).await;
    let second = trigger(&busy.relay);
    wait_for("the second to wait", SOON, async || stats(&busy.relay).waiting).await;
    let third = trigger(&busy.relay).await;
    assert_eq!((third.status, third.error.as_deref()), (RunStatus::Discarded, Some("a run of the group was waiting already")));
    publish::<T>(&busy.outbox, messages(2, 1)).await;
    busy.release.send_replace(true);
    let (first, second) = (first.await, second.await);
    assert_eq!((first.status, first.counts.delivered), (RunStatus::Done, 2));
    assert_eq!((second.status, second.counts.delivered), (RunStatus::Done, 1), "it finds what came meanwhile");
    wait_for("all to be recorded", SOON, async || ended(&busy.relay).await.len() == 3).await;
    let mut all: Vec<_> = runs(&busy.relay).await.iter().map(|r| (r.status, r.delivered)).collect();
    all.sort_unstable();
    assert_eq!(all, [(RunStatus::Done, 1), (RunStatus::Done, 2), (RunStatus::Discarded, 0)]);
    busy.relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_busy_group_leaves_the_next_run_out<T: TestDb>() {
    let (busy, first) = Busy::<T>::new(|g| g.when_busy = WhenBusy::Discard).await;
    let second = trigger(&busy.relay).await;
    assert_eq!((second.status, second.error.as_deref()), (RunStatus::Discarded, Some("a run of the group was going")));
    busy.release.send_replace(true);
    assert_eq!(first.await.status, RunStatus::Done);
    busy.relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_busy_group_gives_way_to_the_next_run<T: TestDb>() {
    let (busy, first) = Busy::<T>::new(|g| g.when_busy = WhenBusy::Cover).await;
    let second = trigger(&busy.relay);
    wait_for("the second to wait", SOON, async || stats(&busy.relay).waiting).await;
    busy.is_stopping().await;
    assert_eq!(busy.log.len(), 1);
    busy.release.send_replace(true);
    let (first, second) = (first.await, second.await);
    assert_eq!((first.status, first.counts.delivered), (RunStatus::Stopped, 1), "what is in flight ends");
    assert_eq!((second.status, second.counts.delivered), (RunStatus::Done, 1));
    busy.relay.shutdown(Duration::from_secs(5)).await;
}

async fn times_that_were_missed_are_made_up_for_once<T: TestDb>() {
    let outbox = with_houses::<T>(4).await;
    let log = Log::default();
    let store = outbox.store(Duration::from_secs(10));
    let now = store.runs().watch().await.unwrap().now_us;
    // Once an hour, ten minutes ago.
    let minute = (now / 60_000_000 - 10).rem_euclid(60);
    let due = (now / 60_000_000 - 10) * 60_000_000;
    store.runs().seen("g", now - 5 * 3_600_000_000).await.unwrap();
    publish::<T>(&outbox, messages(0, 5)).await;
    let hourly = |misfire| {
        let mut group = group(Trigger::Cron { cron: format!("0 {minute} * * * *"), tz: "UTC".into() });
        group.misfire = misfire;
        group
    };
    let relay = start(&outbox, hourly(Misfire::Skip), &log).await;
    wait_for("the next time", SOON, async || stats(&relay).next_due_us.is_some()).await;
    // Would it run, it would have begun before this one.
    assert_eq!(relay.trigger("g").await.unwrap().counts.delivered, 5);
    let causes: Vec<String> = runs(&relay).await.into_iter().map(|r| r.cause).collect();
    assert_eq!(causes, ["manual"]);
    relay.shutdown(Duration::from_secs(5)).await;

    publish::<T>(&outbox, messages(5, 5)).await;
    let relay = start(&outbox, hourly(Misfire::Once), &log).await;
    log.wait_len(10).await;
    wait_for("the end of the run", SOON, async || ended(&relay).await.len() == 2).await;
    let made_up = ended(&relay).await.remove(1);
    assert_eq!((made_up.cause.as_str(), made_up.due_us, made_up.delivered), ("misfire", Some(due), 5));
    relay.shutdown(Duration::from_secs(5)).await;

    let relay = start(&outbox, hourly(Misfire::Once), &log).await;
    wait_for("the next time", SOON, async || stats(&relay).next_due_us.is_some()).await;
    relay.trigger("g").await.unwrap();
    let causes: Vec<String> = runs(&relay).await.into_iter().map(|r| r.cause).collect();
    assert_eq!(causes, ["manual", "misfire", "manual"], "somebody saw to it");
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_run_that_takes_too_long_is_cut<T: TestDb>() {
    let (busy, first) = Busy::<T>::new(|g| {
        g.budget = Some(Duration::from_millis(200));
        g.retries = 3;
    })
    .await;
    busy.is_stopping().await;
    busy.release.send_replace(true);
    let first = first.await;
    assert_eq!((first.status, first.counts.delivered), (RunStatus::Timeout, 1));
    assert_eq!(first.error.as_deref(), Some("it took longer than its budget of 200ms"));
    assert_eq!(pending::<T>(&busy.outbox).await, 1, "the next run has the rest");
    let second = trigger(&busy.relay).await;
    assert_eq!((second.status, second.counts.delivered), (RunStatus::Done, 1));
    let causes: Vec<String> = runs(&busy.relay).await.into_iter().map(|r| r.cause).collect();
    assert_eq!(causes, ["manual", "manual"], "what took too long is not tried again");
    busy.relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_run_that_ends_with_an_error_is_tried_again<T: TestDb>() {
    let outbox = with_houses::<T>(1).await;
    let log = Log::default();
    let mut group = manual("all");
    group.retries = 1;
    let relay = builder(&outbox, Recorder(log.clone())).group(group).start().await.unwrap();
    assert_eq!(relay.trigger("manual").await.unwrap().status, RunStatus::Done);
    publish::<T>(&outbox, messages(0, 3)).await;
    // The table in which runs look for messages is away for a while.
    let table = outbox.tables().name("pending");
    let away = table.replace("posthouse_pending", "posthouse_away");
    let bare = |name: &str| if T::NAME == "postgres" { name.rsplit('.').next().unwrap().to_owned() } else { name.to_owned() };
    // SQLite would change what else names it.
    let rename = |from: &str, to: &str| format!("ALTER TABLE {from} RENAME TO {}", bare(to));
    if T::NAME == "sqlite" {
        T::execute(outbox.pool(), "PRAGMA writable_schema = OFF".into()).await;
        let mut conn = outbox.pool().acquire().await.unwrap();
        T::execute_in(&mut conn, "PRAGMA legacy_alter_table = ON".into()).await;
        T::execute_in(&mut conn, rename(&table, &away)).await;
    } else {
        T::execute(outbox.pool(), rename(&table, &away)).await;
    }
    let report = relay.trigger("manual").await.unwrap();
    assert_eq!(report.status, RunStatus::Failed, "{report:?}");
    assert!(report.error.as_deref().is_some_and(|e| e.contains("pending")), "{report:?}");
    if T::NAME == "sqlite" {
        let mut conn = outbox.pool().acquire().await.unwrap();
        T::execute_in(&mut conn, "PRAGMA legacy_alter_table = ON".into()).await;
        T::execute_in(&mut conn, rename(&away, &table)).await;
    } else {
        T::execute(outbox.pool(), rename(&away, &table)).await;
    }
    log.wait_len(3).await;
    wait_for("the retry to be recorded", SOON, async || ended(&relay).await.len() == 3).await;
    let rows = ended(&relay).await;
    let told: Vec<_> = rows.iter().map(|r| (r.cause.as_str(), r.status, r.delivered)).collect();
    assert_eq!(told[1..], [("manual", RunStatus::Failed, 0), ("retry", RunStatus::Done, 3)]);
    let wait = rows[2].started_us.unwrap() - rows[1].ended_us.unwrap();
    assert!(wait >= 990_000, "{wait} µs");
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_paused_group_waits<T: TestDb>() {
    for trigger in [Trigger::Continuous, Trigger::Every(Duration::from_millis(100))] {
        let outbox = with_houses::<T>(4).await;
        let log = Log::default();
        let store = outbox.store(Duration::from_secs(10));
        store.runs().pause("g", true).await.unwrap();
        publish::<T>(&outbox, messages(0, 5)).await;
        let relay = start(&outbox, group(trigger.clone()), &log).await;
        wait_for("the pause to be seen", SOON, async || stats(&relay).paused && stats(&relay).houses > 0).await;
        // Longer than an idle relay takes to find messages.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!((log.len(), pending::<T>(&outbox).await), (0, 5), "{trigger:?}");
        store.runs().pause("g", false).await.unwrap();
        log.wait_len(5).await;
        assert!(!stats(&relay).paused);
        store.runs().pause("g", true).await.unwrap();
        wait_for("the pause to be seen", SOON, async || stats(&relay).paused && !stats(&relay).running).await;
        publish::<T>(&outbox, messages(5, 5)).await;
        if trigger == Trigger::Continuous {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert_eq!(log.len(), 5);
            store.runs().pause("g", false).await.unwrap();
        } else {
            assert_eq!(relay.trigger("g").await.unwrap().counts.delivered, 5, "what is asked for takes place");
        }
        log.wait_len(10).await;
        assert_eq!(log.distinct(), 10);
        relay.shutdown(Duration::from_secs(5)).await;
    }
}

async fn a_group_is_stopped<T: TestDb>() {
    let (busy, first) = Busy::<T>::new(|_| {}).await;
    let second = trigger(&busy.relay);
    wait_for("the second to wait", SOON, async || stats(&busy.relay).waiting).await;
    busy.relay.store().runs().stop("manual").await.unwrap();
    let second = second.await;
    assert_eq!(second.error.as_deref(), Some("the group was stopped while it waited"));
    busy.is_stopping().await;
    busy.release.send_replace(true);
    let first = first.await;
    assert_eq!((first.status, first.counts.delivered, first.error), (RunStatus::Stopped, 1, None));
    assert_eq!(pending::<T>(&busy.outbox).await, 1);
    // Of a later one it knows nothing.
    assert_eq!(trigger(&busy.relay).await.status, RunStatus::Done);
    busy.relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_run_that_its_instance_left_is_done_by_the_heir<T: TestDb>() {
    let outbox = with_houses::<T>(2).await;
    let log = Log::default();
    publish::<T>(&outbox, messages(0, 3)).await;
    let (_release, transport) = held(&Log::default());
    let mut settings = attentive(quick());
    settings.lease = Duration::from_millis(1_500);
    settings.heartbeat = Duration::from_millis(150);
    settings.send_timeout = Duration::from_millis(1_000);
    let started = |transport: Box<dyn FnOnce(RelayBuilder) -> RelayBuilder>| {
        transport(Relay::builder(&outbox).settings(settings.clone())).group(manual("all")).start()
    };
    let first = started(Box::new(|b| b.transport("test", transport))).await.unwrap();
    let _run = trigger(&first);
    wait_for("messages in flight", SOON, async || first.stats().in_flight == 3).await;
    wait_for("the run to be recorded", SOON, async || runs(&first).await.len() == 1).await;
    drop(first); // Dies without a word.
    let recorder = Recorder(log.clone());
    let heir = started(Box::new(|b| b.transport("test", recorder))).await.unwrap();
    log.wait_len(3).await;
    // One, or two where it got the houses one after the other.
    let mut rows = Vec::new();
    wait_for("its runs to be recorded", SOON, async || {
        rows = runs(&heir).await;
        rows.iter().all(|r| r.status != RunStatus::Running) && rows.iter().skip(1).map(|r| r.delivered).sum::<i64>() == 3
    })
    .await;
    let told: Vec<_> = rows.iter().map(|r| (r.cause.as_str(), r.status)).collect();
    assert_eq!(told[0], ("manual", RunStatus::Lost));
    assert!(told[1..].iter().all(|t| *t == ("takeover", RunStatus::Done)), "{told:?}");
    heir.shutdown(Duration::from_secs(5)).await;
}

async fn what_cannot_be_triggered_says_so<T: TestDb>() {
    let outbox = with_houses::<T>(4).await;
    let relay = start(&outbox, Group::new("g"), &Log::default()).await;
    let error = relay.trigger("g").await.unwrap_err().to_string();
    assert_eq!(error, "group: \"g\" is continuous, and has no runs");
    let error = relay.trigger("h").await.unwrap_err().to_string();
    assert_eq!(error, "group: there is no group \"h\" here");
    // Somebody asked all the same: it is closed, and says why.
    let store = relay.store().clone();
    let request = store.runs().request("g").await.unwrap();
    wait_for("the request to be closed", SOON, async || ended(&relay).await.iter().any(|r| r.id == request)).await;
    let closed = ended(&relay).await.into_iter().find(|r| r.id == request).unwrap();
    assert_eq!((closed.status, closed.error.as_deref()), (RunStatus::Discarded, Some("the group is continuous")));
    relay.shutdown(Duration::from_secs(5)).await;
    let wrong = group(Trigger::Cron { cron: "0 0 0 30 2 *".into(), tz: "UTC".into() });
    let error = builder(&outbox, Recorder(Log::default())).group(wrong).start().await.unwrap_err().to_string();
    assert_eq!(error, "groups.\"g\".trigger.cron: \"0 0 0 30 2 *\" never comes: there is no such day");
}

async fn a_request_is_run_by_every_instance<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let mut relays = Vec::new();
    for _ in 0..2 {
        relays.push(
            builder(&outbox, Recorder(log.clone())).settings(attentive(quick())).group(manual("all")).start().await.unwrap(),
        );
    }
    wait_for("even shares", SOON, async || relays.iter().all(|r| r.stats().houses == 4)).await;
    publish::<T>(&outbox, messages(0, 60)).await;
    let store = relays[0].store().clone();
    let request = store.runs().request("manual").await.unwrap();
    wait_for("the request to be closed", SOON, async || {
        runs(&relays[0]).await.iter().any(|r| r.id == request && r.status.is_over())
    })
    .await;
    let rows = runs(&relays[0]).await;
    let own = rows.iter().find(|r| r.id == request).unwrap();
    assert_eq!((own.status, own.messages, own.delivered), (RunStatus::Done, 60, 60));
    let answers: Vec<&RunRow> = rows.iter().filter(|r| r.request == Some(request)).collect();
    assert_eq!(answers.len(), 2, "{rows:?}");
    assert!(answers.iter().all(|r| r.status == RunStatus::Done && r.delivered > 0), "{answers:?}");
    assert_ne!(answers[0].instance, answers[1].instance);
    assert_eq!((log.len(), log.distinct()), (60, 60));
    // One that comes later has nothing to do with it.
    let third = builder(&outbox, Recorder(log.clone())).settings(attentive(quick())).group(manual("all")).start().await.unwrap();
    wait_for("it to look around", SOON, async || third.stats().passes.contains_key("schedule") && third.stats().houses > 0).await;
    assert!(runs(&third).await.iter().all(|r| r.instance != third.stats().instance));
    for relay in relays.into_iter().chain([third]) {
        relay.shutdown(Duration::from_secs(5)).await;
    }
}

async fn the_next_group_follows_what_is_done<T: TestDb>() {
    let outbox = with_houses::<T>(8).await;
    let log = Log::default();
    let mut first = manual("0-3");
    first.then = Some("second".into());
    let second = Group::new("second").houses("4-7").unwrap().trigger(Trigger::Manual);
    let relay = builder(&outbox, Recorder(log.clone())).group(first).group(second).start().await.unwrap();
    publish::<T>(&outbox, messages(0, 40)).await;
    let report = relay.trigger("manual").await.unwrap();
    assert!(report.counts.delivered > 0 && report.counts.delivered < 40, "{report:?}");
    log.wait_len(40).await;
    wait_for("all to be recorded", SOON, async || {
        let rows = runs(&relay).await;
        rows.len() == 3 && rows.iter().all(|r| r.status.is_over())
    })
    .await;
    let rows = runs(&relay).await;
    let after: Vec<&RunRow> = rows.iter().filter(|r| r.cause == "after").collect();
    assert!(after.len() == 2 && after.iter().all(|r| r.group == "second" && r.status == RunStatus::Done), "{rows:?}");
    assert_eq!(after[0].delivered, 40 - report.counts.delivered as i64);
    relay.shutdown(Duration::from_secs(5)).await;
}
