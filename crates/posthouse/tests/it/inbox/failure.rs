//! What becomes of a message whose handler fails.

use std::time::{Duration, SystemTime};

use posthouse::inbox::{Handled, HandlerError, Inbox, Incoming};
use posthouse::store::{InboxAction, InboxStatus};
use posthouse::{Error, ErrorKind, Tx};

use super::{Fixture, at, effect, order, quick, until};
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, on_all_databases, wait_for};

on_all_databases!(
    an_error_leaves_nothing_but_its_record,
    a_failed_one_is_run_when_its_time_has_come,
    at_the_limit_it_is_failed_for_good,
    handlers_say_what_becomes_of_it,
    any_error_text_can_be_recorded,
    a_handler_that_hangs_is_given_up,
    a_redelivered_one_is_written_down_before_it_runs,
    a_crash_loop_ends_in_failed,
    where_nothing_can_be_recorded_the_caller_is_told,
);

async fn an_error_leaves_nothing_but_its_record<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let incoming = order("m1").key("k").header("h", "v").content_type("application/json; x=y");
    let before = SystemTime::now();
    let due = at(f.fail(&incoming, || HandlerError::retry("no stock")).await);
    assert_eq!(f.effects().await, 0);
    let shown = f.shown("m1").await;
    assert_eq!((shown.row.status, shown.row.attempts, shown.row.claims), (InboxStatus::PendingRetry, 1, 0));
    assert_eq!(shown.row.last_error.as_deref(), Some("no stock"));
    assert_eq!(shown.payload.as_deref(), Some(&incoming.payload[..]));
    assert_eq!(shown.headers.as_deref(), Some(r#"{"h":"v"}"#));
    assert_eq!((shown.key.as_deref(), shown.content_type.as_deref()), (Some("k"), Some("application/json; x=y")));
    assert_eq!((shown.row.kind.as_str(), shown.row.success_us), ("order.placed", None));
    // The first wait is between half the base and the base (40 ms), by the database's clock, which is this machine's.
    let wait = due.duration_since(before).unwrap();
    assert!(wait >= Duration::from_millis(19) && wait < Duration::from_millis(41) + SOON, "{wait:?}");
    let in_row = shown.row.next_attempt_us.unwrap() as u128;
    assert_eq!(due.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros(), in_row);
}

/// L10, T11: not a duplicate; and a broker that is early does not undo the back-off.
async fn a_failed_one_is_run_when_its_time_has_come<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let hour = Duration::from_secs(3_600);
        let due = at(f.fail(&order(id), || HandlerError::retry_after(hour, "no stock")).await);
        let early = f.process(&order(id).redelivered(redelivered)).await;
        assert_eq!(at(early), due);
        assert_eq!((f.effects_of(id).await, f.shown(id).await.row.attempts), (0, 1));
        f.all_due().await;
        assert_eq!(f.process(&order(id).redelivered(redelivered)).await, Handled::Processed);
        let shown = f.shown(id).await;
        assert_eq!((shown.row.status, shown.payload, shown.headers), (InboxStatus::Success, None, None));
        assert_eq!((shown.row.attempts, shown.row.claims, shown.row.next_attempt_us), (1, 0, None));
        assert_eq!(f.process(&order(id)).await, Handled::Duplicate);
        assert_eq!(f.effects_of(id).await, 1);
    }
}

async fn at_the_limit_it_is_failed_for_good<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for attempt in 1..=2 {
        let due = at(f.fail(&order("m1"), || HandlerError::retry("no")).await);
        assert_eq!(f.shown("m1").await.row.attempts, attempt);
        until(due).await;
    }
    assert_eq!(f.fail(&order("m1"), || HandlerError::retry("the last straw")).await, Handled::Failed);
    let shown = f.shown("m1").await;
    assert_eq!((shown.row.status, shown.row.attempts), (InboxStatus::Failed, 3));
    assert_eq!(shown.row.last_error.as_deref(), Some("the last straw"));
    assert!(shown.payload.is_some(), "its copy is kept");
    assert_eq!(f.process(&order("m1")).await, Handled::Failed);
    assert_eq!(f.process(&order("m1").redelivered(true)).await, Handled::Failed);
    assert_eq!(f.effects().await, 0);
    // Requeued, a redelivery runs it.
    f.inbox.store().act("inventory", &["m1".into()], InboxAction::Requeue, "ann").await.unwrap();
    assert_eq!(f.process(&order("m1")).await, Handled::Processed);
}

#[derive(Debug)]
struct Wrapped(std::io::Error);

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("could not deduct")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

async fn handlers_say_what_becomes_of_it<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    assert_eq!(f.fail(&order("rejected"), || HandlerError::reject("not for me")).await, Handled::Failed);
    let shown = f.shown("rejected").await;
    assert_eq!((shown.row.attempts, shown.row.last_error.as_deref()), (1, Some("not for me")));

    let hour = Duration::from_secs(3_600);
    let due = at(f.fail(&order("later"), || HandlerError::retry_after(hour, "busy")).await);
    assert!(due > SystemTime::now() + hour - SOON && due < SystemTime::now() + hour + SOON);
    assert_eq!(f.shown("later").await.row.attempts, 1);

    for _ in 0..5 {
        let due = at(f.fail(&order("snoozed"), || HandlerError::snooze(Duration::from_millis(1))).await);
        assert_eq!(f.shown("snoozed").await.row.attempts, 0, "more often than there are attempts");
        until(due).await;
    }
    assert_eq!(f.shown("snoozed").await.row.last_error, None);
    assert_eq!(f.process(&order("snoozed")).await, Handled::Processed);

    at(f.fail(&order("never"), || HandlerError::retry_after(Duration::MAX, "busy")).await);
    at(f.fail(&order("not now"), || HandlerError::snooze(Duration::MAX)).await);

    // Any error, with its causes.
    let fire = || Wrapped(std::io::Error::other("disk on fire"));
    let wrapped = f.inbox.process(&order("wrapped"), async |_: &mut Tx<T::Db>| Err(fire())).await.unwrap();
    at(wrapped);
    assert_eq!(f.shown("wrapped").await.row.last_error.as_deref(), Some("could not deduct: disk on fire"));

    // What can't be read now can't be read later.
    let incoming = Incoming::new("garbled", "{");
    let garbled = f
        .inbox
        .process(&incoming, async |_: &mut Tx<T::Db>| -> Result<(), HandlerError> {
            incoming.json::<i64>()?;
            Ok(())
        })
        .await;
    assert_eq!(garbled.unwrap(), Handled::Failed);
}

/// D7, D8.
async fn any_error_text_can_be_recorded<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let many = "😀".repeat(300_000);
    let texts = ["nul \u{0} inside", "", "😀 müßte 漢字 \u{202e}rtl", "';--\\\"", &many, "\u{fffd}\u{7f}\u{1}"];
    for (n, text) in texts.into_iter().enumerate() {
        for redelivered in [false, true] {
            let id = format!("m{n}-{redelivered}");
            at(f.fail(&order(&id).redelivered(redelivered), || HandlerError::retry(text)).await);
            let recorded = f.shown(&id).await.row.last_error.unwrap();
            assert!(recorded.len() <= 2_000 && !recorded.contains('\u{0}'));
            let start: String = text.replace('\u{0}', "\u{fffd}").chars().take(100).collect();
            assert!(recorded.starts_with(&start), "{recorded:?}");
        }
    }
}

/// P5.
async fn a_handler_that_hangs_is_given_up<T: TestDb>() {
    let mut settings = quick();
    settings.handler_timeout = Duration::from_millis(200);
    let f = Fixture::<T>::with(settings).await;
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |tx: &mut Tx<T::Db>| {
                effect::<T>(tx, &f.effects, id).await;
                std::future::pending::<Result<(), HandlerError>>().await
            })
            .await
            .unwrap();
        at(handled);
        let error = f.shown(id).await.row.last_error.unwrap();
        assert!(error.contains("handler_timeout"), "{error}");
        assert_eq!(f.effects().await, 0);
    }
}

async fn a_redelivered_one_is_written_down_before_it_runs<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |_: &mut Tx<T::Db>| {
                // From another connection: what is committed.
                let table = f.table();
                let running =
                    format!("SELECT count(*) FROM {table} WHERE message_id = '{id}' AND status = 'RETRYING' AND claims = 1");
                let seen = T::number(&f.place.pool, running).await;
                assert_eq!(seen, i64::from(redelivered), "first deliveries pay nothing");
                Ok::<_, HandlerError>(())
            })
            .await;
        assert_eq!(handled.unwrap(), Handled::Processed);
    }
}

async fn a_crash_loop_ends_in_failed<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for claim in 1..=3 {
        let incoming = order("m1").redelivered(true);
        let mut run = Box::pin(f.inbox.process(&incoming, async |_: &mut Tx<T::Db>| {
            // Dropped below, as if the process had died: nothing is written afterwards.
            std::future::pending::<Result<(), HandlerError>>().await
        }));
        tokio::select! {
            _ = &mut run => unreachable!("it waits for ever"),
            () = wait_for("the claim", SOON, async || f.found("m1").await.is_some_and(|d| d.row.claims == claim)) => {}
        }
        drop(run);
        // Until the lease ends, the next delivery waits.
        at(f.process(&order("m1").redelivered(true)).await);
        f.all_due().await;
    }
    assert_eq!(f.process(&order("m1").redelivered(true)).await, Handled::Failed);
    let shown = f.shown("m1").await;
    assert_eq!((shown.row.status, shown.row.claims, shown.row.attempts), (InboxStatus::Failed, 3, 0));
    assert!(shown.row.last_error.unwrap().contains("3 processes died"));
    assert!(shown.payload.is_some());
    assert_eq!(f.effects().await, 0);
}

/// "Nothing is written" must not look like anything else.
async fn where_nothing_can_be_recorded_the_caller_is_told<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let table = f.table();
    let bare = table.rsplit('.').next().unwrap().replace("inbox", "gone");
    let away = if T::NAME == "mysql" {
        format!("RENAME TABLE {table} TO {bare}")
    } else {
        format!("ALTER TABLE {table} RENAME TO {bare}")
    };
    T::execute(&f.place.pool, away).await;
    let refused = f.inbox.process(&order("m2"), async |_: &mut Tx<T::Db>| Ok::<_, HandlerError>(())).await;
    assert!(matches!(refused, Err(Error::Database(_))), "{refused:?}");
    let missing = f.inbox.check().await;
    assert!(matches!(&missing, Err(Error::Schema(text)) if text.contains("posthouse migrate")), "{missing:?}");
    assert!(f.inbox.start_worker().await.is_err());
}

/// P9: a run whose connection goes away says nothing about the message.
async fn a_lost_connection_is_no_attempt<T: TestDb>(kill: &str) {
    let f = Fixture::<T>::new().await;
    let run = async |redelivered: bool| {
        f.inbox
            .process(&order("m1").redelivered(redelivered), async |tx: &mut Tx<T::Db>| {
                effect::<T>(tx, &f.effects, "m1").await;
                // It succeeds by failing.
                T::try_execute_in(tx, kill.to_owned()).await?;
                Ok::<_, HandlerError>(())
            })
            .await
    };
    let lost = run(false).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
    assert!(f.found("m1").await.is_none(), "it comes again from where it came");
    let lost = run(true).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
    let shown = f.shown("m1").await;
    assert_eq!((shown.row.status, shown.row.attempts, shown.row.claims), (InboxStatus::PendingRetry, 0, 1));
    f.all_due().await;
    assert_eq!(f.process(&order("m1").redelivered(true)).await, Handled::Processed);
    assert_eq!(f.effects().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_on_postgres_is_no_attempt() {
    bounded(a_lost_connection_is_no_attempt::<Postgres>("SELECT pg_terminate_backend(pg_backend_pid())")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_on_mysql_is_no_attempt() {
    bounded(a_lost_connection_is_no_attempt::<MySql>("KILL CONNECTION_ID()")).await;
}

#[tokio::test]
async fn settings_and_names_are_checked() {
    let pool = || sqlx::SqlitePool::connect_lazy("sqlite::memory:").unwrap();
    for bad in ["", "a\u{0}", &"x".repeat(256)] {
        assert!(matches!(Inbox::new(pool(), bad), Err(Error::Invalid { field: "consumer", .. })), "{bad:?}");
    }
    assert!(Inbox::new(pool(), "x".repeat(255)).is_ok());
    let mut settings = quick();
    settings.batch = 0;
    settings.lease = Duration::from_millis(1);
    settings.retry.max_attempts = 0;
    let refused = Inbox::builder(pool(), "c").settings(settings).build().unwrap_err().to_string();
    for field in ["inbox.batch", "inbox.lease", "inbox.retry.max_attempts"] {
        assert!(refused.contains(field), "{refused}");
    }
    assert!(Inbox::builder(pool(), "c").prefix("A-").build().is_err());
}
