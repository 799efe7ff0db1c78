//! Runs of groups, as they are recorded.

use std::time::Duration;

use posthouse::RunCounts;
use posthouse::schedule::Cause;
use posthouse::store::{Coverage, GroupRow, NewRun, RunFilter, RunRow, RunStatus, RunStore};

use crate::store::tables::{DEADLINE, Fresh, StoreDb, on_all_stores};
use crate::support::{MySql, Postgres};

on_all_stores!(
    a_run_is_recorded_from_begin_to_end,
    due_times_never_move_back,
    groups_are_paused_and_stopped,
    a_request_is_seen_until_it_is_closed,
    the_next_group_waits_for_the_last_instance,
    runs_of_dead_instances_are_lost,
    runs_are_listed_by_group_and_page,
    old_runs_are_removed,
    names_have_limits,
);

const LEASE: Duration = Duration::from_secs(3600);

const HOUR: i64 = 3_600_000_000;

fn new_run<'a>(group: &'a str, instance: &'a str) -> NewRun<'a> {
    NewRun { group, cause: Cause::Manual, instance, due_us: None, request: None }
}

async fn all(runs: &dyn RunStore) -> Vec<RunRow> {
    runs.list(&RunFilter { limit: 100, ..RunFilter::default() }).await.unwrap()
}

async fn group(runs: &dyn RunStore, name: &str) -> GroupRow {
    runs.watch().await.unwrap().groups.into_iter().find(|g| g.group == name).unwrap_or_default()
}

fn counts(messages: u64, delivered: u64, retried: u64, failed: u64) -> RunCounts {
    let mut counts = RunCounts::default();
    (counts.messages, counts.delivered, counts.retried, counts.failed) = (messages, delivered, retried, failed);
    counts
}

async fn join<T: StoreDb>(db: &Fresh<T>, instance: &str) {
    db.store.join(instance, &Coverage::default(), LEASE).await.unwrap();
}

async fn a_run_is_recorded_from_begin_to_end<T: StoreDb>(db: &Fresh<T>) {
    join(db, "a").await;
    let runs = db.store.runs();
    let now = runs.watch().await.unwrap().now_us;
    let due = now / 1_000_000 * 1_000_000;
    let id = runs.begin(&NewRun { cause: Cause::Cron, due_us: Some(due), ..new_run("g", "a") }).await.unwrap();
    let going = all(runs).await.remove(0);
    assert_eq!((going.id, going.status, going.group.as_str(), going.cause.as_str()), (id, RunStatus::Running, "g", "cron"));
    assert_eq!((going.instance.as_deref(), going.due_us, going.ended_us), (Some("a"), Some(due), None));
    assert!(going.started_us.unwrap() >= now && going.started_us.unwrap() < now + HOUR, "{going:?} at {now}");
    assert!(runs.end(id, RunStatus::Failed, counts(9, 4, 3, 2), Some("no\0thing")).await.unwrap());
    let ended = all(runs).await.remove(0);
    assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Failed, Some("no\u{fffd}thing")));
    assert_eq!((ended.messages, ended.delivered, ended.retried, ended.failed), (9, 4, 3, 2));
    assert!(ended.ended_us >= ended.started_us);
    assert!(!runs.end(id, RunStatus::Done, counts(0, 0, 0, 0), None).await.unwrap(), "it ended already");
    assert_eq!(all(runs).await.remove(0).status, RunStatus::Failed);

    // One that was begun without its instance knowing is no other run.
    let unknown = runs.begin(&new_run("g", "a")).await.unwrap();
    let other = runs.begin(&new_run("h", "a")).await.unwrap();
    let known = runs.begin(&new_run("g", "a")).await.unwrap();
    let status = async |id| all(runs).await.into_iter().find(|r| r.id == id).unwrap().status;
    assert_eq!(
        (status(unknown).await, status(other).await, status(known).await),
        (RunStatus::Lost, RunStatus::Running, RunStatus::Running)
    );

    let id = runs.discard(&new_run("g", "a"), "it was going").await.unwrap();
    let row = all(runs).await.remove(0);
    assert_eq!((row.id, row.status, row.error.as_deref()), (id, RunStatus::Discarded, Some("it was going")));
    assert!(row.started_us.is_none() && row.ended_us.is_some());
}

async fn due_times_never_move_back<T: StoreDb>(db: &Fresh<T>) {
    let runs = db.store.runs();
    let fired = async || group(runs, "g").await.fired_us;
    assert_eq!(fired().await, None);
    runs.seen("g", 5_000_000).await.unwrap();
    assert_eq!(fired().await, Some(5_000_000));
    runs.seen("g", 4_000_000).await.unwrap();
    assert_eq!(fired().await, Some(5_000_000));
    for (cause, due, expected) in [
        (Cause::Rate, 6_000_000, 6_000_000),
        (Cause::Misfire, 7_000_000, 7_000_000),
        (Cause::Cron, 3_000_000, 7_000_000),
        (Cause::Retry, 9_000_000, 7_000_000),
        (Cause::Every, 9_000_000, 7_000_000),
    ] {
        runs.begin(&NewRun { cause, due_us: Some(due), ..new_run("g", "a") }).await.unwrap();
        assert_eq!(fired().await, Some(expected), "{cause:?}");
    }
    runs.discard(&NewRun { cause: Cause::Rate, due_us: Some(8_000_000), ..new_run("g", "a") }, "").await.unwrap();
    assert_eq!(fired().await, Some(8_000_000), "it has been seen to");
}

async fn groups_are_paused_and_stopped<T: StoreDb>(db: &Fresh<T>) {
    let runs = db.store.runs();
    assert!(!runs.pause("g", false).await.unwrap(), "it wasn't paused");
    assert_eq!(group(runs, "g").await.paused_us, None);
    assert!(runs.pause("g", true).await.unwrap());
    let since = group(runs, "g").await.paused_us.unwrap();
    assert!(!runs.pause("g", true).await.unwrap());
    assert_eq!(group(runs, "g").await.paused_us, Some(since), "since the first time");
    assert!(runs.pause("g", false).await.unwrap());
    assert!(!runs.pause("g", false).await.unwrap());
    runs.seen("g", 5_000_000).await.unwrap();
    assert!(runs.pause("g", true).await.unwrap());
    runs.stop("g").await.unwrap();
    let first = group(runs, "g").await;
    assert!(first.paused_us.is_some() && first.stopped_us.is_some() && first.fired_us == Some(5_000_000), "{first:?}");
    tokio::time::sleep(Duration::from_millis(5)).await;
    runs.stop("g").await.unwrap();
    assert!(group(runs, "g").await.stopped_us > first.stopped_us);
    runs.stop("h").await.unwrap();
    assert!(group(runs, "h").await.stopped_us.is_some());
}

async fn a_request_is_seen_until_it_is_closed<T: StoreDb>(db: &Fresh<T>) {
    join(db, "a").await;
    join(db, "b").await;
    let runs = db.store.runs();
    let id = runs.request("g").await.unwrap();
    let watch = runs.watch().await.unwrap();
    assert_eq!(watch.requests.iter().map(|r| (r.id, r.group.as_str(), r.after)).collect::<Vec<_>>(), [(id, "g", false)]);
    assert!(watch.requests[0].requested_us <= watch.now_us && watch.requests[0].requested_us > watch.now_us - HOUR);
    let mut live = watch.live.clone();
    live.sort_unstable();
    assert_eq!(live, ["a", "b"]);
    let of_a = runs.begin(&NewRun { request: Some(id), ..new_run("g", "a") }).await.unwrap();
    runs.begin(&new_run("g", "b")).await.unwrap();
    assert_eq!(runs.watch().await.unwrap().requests.len(), 1, "others may not have seen it");
    let rows = runs.list(&RunFilter { request: Some(id), limit: 9, ..RunFilter::default() }).await.unwrap();
    assert_eq!(rows.iter().map(|r| r.id).collect::<Vec<_>>(), [of_a, id]);
    assert!(runs.close(id, RunStatus::Done, counts(3, 2, 1, 0), None).await.unwrap());
    assert!(!runs.close(id, RunStatus::Failed, counts(0, 0, 0, 0), None).await.unwrap());
    assert!(runs.watch().await.unwrap().requests.is_empty());
    let closed = all(runs).await.into_iter().find(|r| r.id == id).unwrap();
    assert_eq!((closed.status, closed.messages, closed.instance), (RunStatus::Done, 3, None));
    assert_eq!(runs.request("g").await.unwrap(), closed.id + 3, "numbers go on");
}

async fn the_next_group_waits_for_the_last_instance<T: StoreDb>(db: &Fresh<T>) {
    join(db, "a").await;
    join(db, "b").await;
    let runs = db.store.runs();
    let b = runs.begin(&new_run("g", "b")).await.unwrap();
    runs.begin(&new_run("other", "b")).await.unwrap();
    runs.begin(&new_run("g", "dead")).await.unwrap();
    assert!(!runs.follow("g", "a", "child", Some(7_000_000)).await.unwrap(), "b is at it");
    runs.end(b, RunStatus::Done, counts(0, 0, 0, 0), None).await.unwrap();
    assert!(runs.follow("g", "b", "child", Some(7_000_000)).await.unwrap());
    let requests = runs.watch().await.unwrap().requests;
    assert_eq!(requests.len(), 1);
    assert_eq!((requests[0].group.as_str(), requests[0].after, requests[0].due_us), ("child", true, Some(7_000_000)));
}

async fn runs_of_dead_instances_are_lost<T: StoreDb>(db: &Fresh<T>) {
    join(db, "a").await;
    join(db, "b").await;
    let runs = db.store.runs();
    let a = runs.begin(&new_run("g", "a")).await.unwrap();
    let b = runs.begin(&new_run("g", "b")).await.unwrap();
    let status = async |id| all(runs).await.into_iter().find(|r| r.id == id).unwrap().status;
    assert!(!runs.unfinished("h", "b").await.unwrap(), "another group");
    assert!(runs.unfinished("g", "b").await.unwrap());
    db.run("UPDATE {instance} SET lease_until = {PAST} WHERE instance = 'a'").await;
    assert_eq!((status(a).await, status(b).await), (RunStatus::Lost, RunStatus::Running));
    assert!(runs.unfinished("g", "b").await.unwrap(), "it died in the middle of it");
    runs.tidy(LEASE).await.unwrap();
    assert!(runs.unfinished("g", "b").await.unwrap(), "it began less than a minute ago: heirs may not have looked yet");
    db.run("UPDATE {run} SET started_at = {PAST}").await;
    runs.tidy(LEASE).await.unwrap();
    assert!(!runs.unfinished("g", "b").await.unwrap());
    assert_eq!((status(a).await, status(b).await), (RunStatus::Lost, RunStatus::Running));
    let lost = all(runs).await.into_iter().find(|r| r.id == a).unwrap();
    assert!(lost.ended_us.is_some());
    // It was only slow, and ends after all.
    assert!(runs.end(a, RunStatus::Done, counts(1, 1, 0, 0), None).await.unwrap());
    assert_eq!(status(a).await, RunStatus::Done);
    assert!(runs.unfinished("g", "a").await.unwrap() && !runs.unfinished("g", "b").await.unwrap(), "its own doesn't count");
}

async fn runs_are_listed_by_group_and_page<T: StoreDb>(db: &Fresh<T>) {
    let runs = db.store.runs();
    let mut ids = Vec::new();
    for n in 0..6 {
        ids.push(runs.discard(&new_run(if n % 2 == 0 { "even" } else { "odd" }, "a"), "").await.unwrap());
    }
    ids.reverse();
    let list = async |group: Option<&str>, before, limit| {
        let filter = RunFilter { group: group.map(Into::into), before, limit, ..RunFilter::default() };
        runs.list(&filter).await.unwrap().into_iter().map(|r| r.id).collect::<Vec<_>>()
    };
    assert_eq!(list(None, None, 100).await, ids);
    assert_eq!(list(None, None, 2).await, ids[..2]);
    assert_eq!(list(None, Some(ids[1]), 2).await, ids[2..4]);
    assert_eq!(list(Some("even"), None, 9).await, [ids[1], ids[3], ids[5]]);
    assert_eq!(list(Some("even"), Some(ids[3]), 9).await, [ids[5]]);
    assert_eq!(list(Some("none"), None, 9).await, [0; 0]);
}

async fn old_runs_are_removed<T: StoreDb>(db: &Fresh<T>) {
    join(db, "a").await;
    let runs = db.store.runs();
    let old = runs.discard(&new_run("g", "a"), "").await.unwrap();
    let going = runs.begin(&new_run("g", "a")).await.unwrap();
    let asked = runs.request("g").await.unwrap();
    db.run("UPDATE {run} SET requested_at = {PAST}").await;
    let fresh = runs.discard(&new_run("g", "a"), "").await.unwrap();
    let young = runs.request("g").await.unwrap();
    assert_eq!(runs.tidy(LEASE).await.unwrap(), 2, "the old one, and the request that nobody answered");
    assert_eq!(all(runs).await.iter().map(|r| r.id).collect::<Vec<_>>(), [young, fresh, going]);
    assert_eq!(runs.tidy(LEASE).await.unwrap(), 0);
    assert_eq!(runs.watch().await.unwrap().requests.iter().map(|r| r.id).collect::<Vec<_>>(), [young]);
    let _ = (old, asked);
}

async fn names_have_limits<T: StoreDb>(db: &Fresh<T>) {
    let runs = db.store.runs();
    let long = "ü".repeat(32);
    assert!(runs.pause(&long, true).await.unwrap());
    assert_eq!(group(runs, &long).await.group, long);
    for wrong in ["", "a\0b", &"x".repeat(65)] {
        let error = runs.request(wrong).await.unwrap_err();
        assert_eq!(error.kind(), posthouse::ErrorKind::Invalid, "{error}");
        assert!(runs.pause(wrong, true).await.is_err() && runs.stop(wrong).await.is_err() && runs.seen(wrong, 1).await.is_err());
    }
}

/// C2: whatever time zone a session is set to, times are the same.
async fn other_sessions_see_the_same_times<T: StoreDb>(url_with_zone: impl Fn(&str) -> String) {
    let db = Fresh::<T>::new().await;
    let away = T::connect(&url_with_zone(&db.place.url)).await;
    let builder = posthouse::Outbox::builder(away.clone());
    let builder = match &db.place.schema {
        Some(schema) => builder.schema(schema),
        None => builder,
    };
    let away_store = builder.build().unwrap().store(DEADLINE);
    let (here, there) = (db.store.runs(), away_store.runs());
    let (now_here, now_there) = (here.watch().await.unwrap().now_us, there.watch().await.unwrap().now_us);
    assert!((now_here - now_there).abs() < HOUR / 2, "{now_here} and {now_there}");
    // A moment that doesn't exist on the clocks of Berlin, and one that comes twice.
    for due in [1_774_749_600_000_000, 1_792_888_200_000_000, now_here / 1_000 * 1_000] {
        there.seen("g", due).await.unwrap();
        assert_eq!(group(here, "g").await.fired_us, Some(due));
        assert_eq!(group(there, "g").await.fired_us, Some(due));
        db.run("DELETE FROM {group}").await;
        let id = here.begin(&NewRun { cause: Cause::Cron, due_us: Some(due), ..new_run("g", "a") }).await.unwrap();
        let row = all(there).await.into_iter().find(|r| r.id == id).unwrap();
        assert_eq!((row.due_us, group(there, "g").await.fired_us), (Some(due), Some(due)));
        assert!((row.started_us.unwrap() - now_here).abs() < HOUR / 2, "{row:?}");
    }
    drop(away_store);
    away.close().await;
    db.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_sessions_of_other_time_zones_agree() {
    other_sessions_see_the_same_times::<Postgres>(|url| {
        let joint = if url.contains('?') { '&' } else { '?' };
        format!("{url}{joint}options=-c%20TimeZone%3DEurope/Berlin")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_sessions_of_other_time_zones_agree() {
    other_sessions_see_the_same_times::<MySql>(|url| {
        let joint = if url.contains('?') { '&' } else { '?' };
        format!("{url}{joint}timezone=%2B08:00")
    })
    .await;
}
