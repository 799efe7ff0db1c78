//! Rows of old successes are removed, and nothing else.

use std::time::Duration;

use posthouse::InboxSettings;
use posthouse::inbox::{Handled, HandlerError, Inbox};
use posthouse::store::InboxStatus;

use super::{Fixture, at, order, process, quick};
use crate::support::{SOON, TestDb, on_all_databases, scale, wait_for};

on_all_databases!(
    old_successes_go_and_everything_else_stays,
    a_duplicate_within_the_retention_is_still_one,
    nothing_goes_before_the_grace_is_over,
    nothing_goes_while_a_consumer_is_away,
    two_workers_share_the_work,
    what_gets_old_goes,
);

fn keeping(retention: Duration) -> InboxSettings {
    let mut s = quick();
    s.retention = Some(retention);
    s.purge_grace = Duration::ZERO;
    s
}

const HOUR: Duration = Duration::from_secs(3_600);

/// Lets rows have succeeded this long ago.
async fn backdate<T: TestDb>(f: &Fixture<T>, condition: &str, minutes: u32) {
    let at = match T::NAME {
        "postgres" => format!("clock_timestamp() - interval '{minutes} minutes'"),
        "mysql" => format!("UTC_TIMESTAMP(6) - INTERVAL {minutes} MINUTE"),
        _ => format!("CAST(strftime('%s', 'now') AS INTEGER) * 1000 - {minutes} * 60000"),
    };
    let sql = format!("UPDATE {} SET success_at = {at} WHERE status = 'SUCCESS' AND {condition}", f.table());
    T::execute(&f.place.pool, sql).await;
}

async fn known<T: TestDb>(f: &Fixture<T>) -> Vec<(String, String)> {
    let filter = posthouse::store::InboxFilter { limit: 10_000, ..Default::default() };
    f.inbox.store().list(&filter).await.unwrap().rows.into_iter().map(|r| (r.consumer, r.message_id)).collect()
}

async fn worker<T: TestDb>(inbox: &Inbox<T::Db>) -> posthouse::inbox::InboxWorker {
    inbox.start_worker().await.unwrap()
}

async fn old_successes_go_and_everything_else_stays<T: TestDb>() {
    let f = Fixture::<T>::with(keeping(HOUR)).await;
    for id in ["old-1", "old-2", "young-1", "young-2"] {
        assert_eq!(f.process(&order(id)).await, Handled::Processed);
    }
    at(f.fail(&order("waiting"), || HandlerError::retry_after(HOUR, "busy")).await);
    at(f.fail(&order("running"), || HandlerError::retry_after(HOUR, "busy")).await);
    assert_eq!(f.fail(&order("failed"), || HandlerError::reject("never")).await, Handled::Failed);
    let billing = f.beside(f.place.pool.clone(), "billing", quick());
    assert_eq!(process::<T>(&billing, &f.effects, &order("old-1")).await.unwrap(), Handled::Processed);
    let table = f.table();
    T::execute(&f.place.pool, format!("UPDATE {table} SET status = 'RETRYING' WHERE message_id = 'running'")).await;
    backdate(&f, "message_id LIKE 'old%'", 61).await;
    backdate(&f, "message_id = 'young-1'", 59).await;
    // Even where somebody wrote a time of success to rows that are none.
    let aged = match T::NAME {
        "sqlite" => "first_at = 1000, last_at = 1000, success_at = 1000",
        _ => "first_at = '2000-01-01', last_at = '2000-01-01', success_at = '2000-01-01'",
    };
    T::execute(&f.place.pool, format!("UPDATE {table} SET {aged} WHERE status <> 'SUCCESS'")).await;
    let worker = worker::<T>(&f.inbox).await;
    wait_for("the old ones to go", SOON, async || !known(&f).await.iter().any(|(c, id)| c == "inventory" && id == "old-2")).await;
    worker.shutdown(SOON).await;
    let left: Vec<_> = known(&f).await;
    let left: Vec<_> = left.iter().map(|(c, id)| (c.as_str(), id.as_str())).collect();
    let stays = ["failed", "running", "waiting", "young-1", "young-2"].map(|id| ("inventory", id));
    assert_eq!(left, [&[("billing", "old-1")][..], &stays[..]].concat());
}

async fn a_duplicate_within_the_retention_is_still_one<T: TestDb>() {
    let f = Fixture::<T>::with(keeping(HOUR)).await;
    for id in ["old", "young"] {
        assert_eq!(f.process(&order(id)).await, Handled::Processed);
    }
    backdate(&f, "message_id = 'old'", 61).await;
    backdate(&f, "message_id = 'young'", 59).await;
    let worker = worker::<T>(&f.inbox).await;
    wait_for("the old one to go", SOON, async || f.found("old").await.is_none()).await;
    assert_eq!(f.process(&order("young")).await, Handled::Duplicate);
    assert_eq!((f.effects_of("young").await, f.effects().await), (1, 2));
    worker.shutdown(SOON).await;
}

/// Neither the grace of a worker that waits long nor the one of a worker that waits a little is cut short.
async fn nothing_goes_before_the_grace_is_over<T: TestDb>() {
    let mut patient = keeping(HOUR);
    patient.purge_grace = HOUR;
    let f = Fixture::<T>::with(patient).await;
    assert_eq!(f.process(&order("old")).await, Handled::Processed);
    backdate(&f, "1 = 1", 120).await;
    let waiting = worker::<T>(&f.inbox).await;
    let mut short = keeping(Duration::from_secs(1));
    short.purge_grace = Duration::from_millis(400);
    let soon = f.beside(f.place.pool.clone(), "inventory", short);
    let began = std::time::Instant::now();
    let soon = worker::<T>(&soon).await;
    wait_for("the grace of the other one to be over", SOON, async || f.found("old").await.is_none()).await;
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
    waiting.shutdown(SOON).await;
    soon.shutdown(SOON).await;
}

async fn nothing_goes_while_a_consumer_is_away<T: TestDb>() {
    let mut settings = keeping(Duration::from_secs(1));
    settings.purge_grace = Duration::from_millis(300);
    let f = Fixture::<T>::with(settings).await;
    assert_eq!(f.process(&order("old")).await, Handled::Processed);
    backdate(&f, "1 = 1", 120).await;
    let (first, second) = (f.inbox.hold_purge(), f.inbox.clone().hold_purge());
    let worker = worker::<T>(&f.inbox).await;
    drop(first);
    // Rounds are 50 ms apart, and the grace after the start and after the first hold is over.
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert!(f.found("old").await.is_some());
    let back = std::time::Instant::now();
    drop(second);
    wait_for("the old one to go", SOON, async || f.found("old").await.is_none()).await;
    assert!(back.elapsed() >= Duration::from_millis(300), "{:?}", back.elapsed());
    worker.shutdown(SOON).await;
}

/// Several chunks, two processes, and messages that arrive meanwhile.
async fn two_workers_share_the_work<T: TestDb>() {
    let f = Fixture::<T>::with(keeping(HOUR)).await;
    let old = 3_300 * scale();
    let rows: Vec<_> = (0..old).map(|n| format!("('inventory', 'old-{n}', 'SUCCESS')")).collect();
    for rows in rows.chunks(1_000) {
        let sql = format!("INSERT INTO {} (consumer, message_id, status) VALUES {}", f.table(), rows.join(", "));
        T::execute(&f.place.pool, sql).await;
    }
    backdate(&f, "1 = 1", 61).await;
    let other = f.beside(T::connect(&f.place.url).await, "inventory", keeping(HOUR));
    let workers = [worker::<T>(&f.inbox).await, worker::<T>(&other).await];
    for n in 0..20 {
        assert_eq!(f.process(&order(&format!("new-{n}"))).await, Handled::Processed);
    }
    wait_for("all old ones to go", SOON, async || f.count(InboxStatus::Success).await == 20).await;
    for worker in workers {
        worker.shutdown(SOON).await;
    }
    assert_eq!(f.process(&order("new-7")).await, Handled::Duplicate);
}

async fn what_gets_old_goes<T: TestDb>() {
    let f = Fixture::<T>::with(keeping(Duration::from_secs(1))).await;
    let worker = worker::<T>(&f.inbox).await;
    let began = std::time::Instant::now();
    assert_eq!(f.process(&order("m")).await, Handled::Processed);
    assert_eq!(f.process(&order("m")).await, Handled::Duplicate);
    wait_for("it to get old", SOON, async || f.found("m").await.is_none()).await;
    assert!(began.elapsed() >= Duration::from_secs(1));
    worker.shutdown(SOON).await;
}

async fn warns_of<T: TestDb>(retention: Option<Duration>, replay: impl Into<Option<Duration>>) -> bool {
    let mut settings = quick();
    settings.retention = retention;
    let f = Fixture::<T>::with(settings).await;
    !f.inbox.retention_at_least(replay.into(), "retention.ms of topic orders")
}

#[tokio::test]
async fn a_retention_that_is_too_short_is_told() {
    use crate::support::Sqlite;
    assert!(warns_of::<Sqlite>(Some(HOUR), HOUR + Duration::from_secs(1)).await);
    assert!(!warns_of::<Sqlite>(Some(HOUR), HOUR).await);
    assert!(warns_of::<Sqlite>(Some(HOUR), None).await, "what is never too old to come again");
    assert!(!warns_of::<Sqlite>(None, None).await);
    assert!(!warns_of::<Sqlite>(None, Duration::MAX).await);
}
