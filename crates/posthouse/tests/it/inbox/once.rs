//! One message, one effect.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use posthouse::inbox::{Handled, HandlerError};
use posthouse::store::InboxStatus;
use posthouse::{Error, ErrorKind, Message, Tx, testing};

use super::{Fixture, at, effect, order, process, quick, until};
use crate::support::{MySql, Postgres, SOON, Sqlite, TestDb, on_all_databases, wait_for};

on_all_databases!(
    a_duplicate_has_no_effect,
    two_consumers_handle_their_own_copies,
    an_id_stays_known_however_old_it_is,
    what_a_handler_publishes_goes_out_once,
    a_handler_that_goes_on_after_the_end_of_its_transaction_is_not_believed,
    first_time_in_the_callers_own_transaction,
    first_time_refuses_what_it_cant_do,
    dropped_at_every_point_it_has_its_effect_once,
    it_can_be_spawned,
);

async fn a_duplicate_has_no_effect<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    assert_eq!(f.process(&order("m1")).await, Handled::Processed);
    for redelivered in [false, true] {
        let called = AtomicUsize::new(0);
        let again = f
            .inbox
            .process(&order("m1").redelivered(redelivered), async |_: &mut Tx<T::Db>| {
                called.fetch_add(1, Ordering::Relaxed);
                Ok::<_, HandlerError>(())
            })
            .await;
        assert_eq!(again.unwrap(), Handled::Duplicate);
        assert_eq!(called.into_inner(), 0);
    }
    assert_eq!(f.effects().await, 1);
    let shown = f.shown("m1").await;
    assert_eq!(shown.row.status, InboxStatus::Success);
    assert_eq!((shown.row.kind.as_str(), shown.row.attempts, shown.row.claims), ("order.placed", 0, 0));
    assert_eq!(shown.row.source.as_deref(), Some(r#"{"exchange":"orders","from":"rabbitmq","routing_key":"order.placed"}"#));
    assert_eq!((shown.payload, shown.content_type, shown.row.next_attempt_us, shown.row.last_error), (None, None, None, None));
    assert!(shown.row.success_us.unwrap() >= shown.row.first_us - 1_000);
    // One whose run was written down first leaves the same.
    assert_eq!(f.process(&order("m2").redelivered(true)).await, Handled::Processed);
    let shown = f.shown("m2").await;
    assert_eq!((shown.row.status, shown.row.claims, shown.row.owner), (InboxStatus::Success, 0, None));
    assert_eq!((shown.payload, shown.row.next_attempt_us), (None, None));
    assert_eq!(f.effects().await, 2);
}

/// L9.
async fn two_consumers_handle_their_own_copies<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let other = f.beside(f.place.pool.clone(), "Inventory", quick());
    assert_eq!(f.process(&order("m1")).await, Handled::Processed);
    assert_eq!(process::<T>(&other, &f.effects, &order("m1")).await.unwrap(), Handled::Processed);
    assert_eq!(process::<T>(&other, &f.effects, &order("m1")).await.unwrap(), Handled::Duplicate);
    assert_eq!(f.effects().await, 2);
}

/// T14: no part of the table has a uniqueness of its own.
async fn an_id_stays_known_however_old_it_is<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    assert_eq!(f.process(&order("m1")).await, Handled::Processed);
    let table = f.table();
    let old = if T::NAME == "sqlite" { "0" } else { "'1999-12-31 23:59:59'" };
    T::execute(&f.place.pool, format!("UPDATE {table} SET first_at = {old}, last_at = {old}, success_at = {old}")).await;
    for n in 0..50 {
        assert_eq!(f.process(&order(&format!("other-{n}"))).await, Handled::Processed);
    }
    assert_eq!(f.process(&order("m1")).await, Handled::Duplicate);
}

/// T10.
async fn what_a_handler_publishes_goes_out_once<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let outbox = f.inbox.outbox();
    let run = async |fail: bool, redelivered: bool| {
        f.inbox
            .process(&order("m1").redelivered(redelivered), async |tx: &mut Tx<T::Db>| {
                tx.publish(Message::to("stock.deducted")).await?;
                if fail { Err(HandlerError::retry("not yet")) } else { Ok(()) }
            })
            .await
            .unwrap()
    };
    let published = async || {
        let mut conn = f.place.pool.acquire().await.unwrap();
        testing::published_in(outbox, &mut conn).await.unwrap().len()
    };
    until(at(run(true, false).await)).await;
    assert_eq!(published().await, 0);
    assert_eq!(run(false, true).await, Handled::Processed);
    assert_eq!(published().await, 1);
    assert_eq!(run(false, true).await, Handled::Duplicate);
    assert_eq!(published().await, 1);
}

/// What the server rolled back must not be taken for done: it would be acknowledged, and lost.
async fn a_handler_that_goes_on_after_the_end_of_its_transaction_is_not_believed<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    // As a server does after a deadlock, behind the driver's back; and once more with another transaction in its place.
    let (gone, another) = ("ROLLBACK", "ROLLBACK; BEGIN");
    for (id, redelivered, end) in [("m1", false, gone), ("m2", true, gone), ("m3", false, another), ("m4", true, another)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |tx: &mut Tx<T::Db>| {
                effect::<T>(tx, &f.effects, id).await;
                T::execute_in(tx, end.into()).await;
                Ok::<_, HandlerError>(())
            })
            .await
            .unwrap();
        at(handled);
        let error = f.shown(id).await.row.last_error.unwrap();
        assert!(error.contains("return such errors"), "{error}");
        assert_eq!(f.effects().await, 0);
    }
}

/// In PostgreSQL an error ends the transaction, but COMMIT of what is left of it is no error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_that_was_swallowed_on_postgres_is_found() {
    let f = Fixture::<Postgres>::new().await;
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |tx: &mut Tx<sqlx::Postgres>| {
                effect::<Postgres>(tx, &f.effects, id).await;
                Postgres::try_execute_in(tx, "SELECT 1/0".into()).await.unwrap_err();
                Ok::<_, HandlerError>(())
            })
            .await;
        at(handled.unwrap());
        assert_eq!(f.shown(id).await.row.attempts, 1);
    }
    assert_eq!(f.effects().await, 0);
}

/// MariaDB rolls the whole transaction of a deadlock's victim back, and goes on without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_that_was_swallowed_on_mysql_is_found() {
    let f = Fixture::<MySql>::new().await;
    let locks = f.inbox.outbox().tables().name("locks");
    MySql::execute(&f.place.pool, format!("CREATE TABLE {locks} (id INT PRIMARY KEY, n INT NOT NULL) ENGINE = InnoDB")).await;
    let rows: Vec<_> = (0..100).map(|id| format!("({id}, 0)")).collect();
    MySql::execute(&f.place.pool, format!("INSERT INTO {locks} VALUES {}", rows.join(", "))).await;
    let touch = |which: &str| format!("UPDATE {locks} SET n = n + 1 WHERE {which}");
    let waiting = format!("SELECT COUNT(*) FROM information_schema.processlist WHERE INFO = '{}'", touch("id = 0"));
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |tx: &mut Tx<sqlx::MySql>| {
                // The other one has changed more rows, so it is this one that is rolled back.
                let mut other = f.place.pool.begin().await.unwrap();
                MySql::execute_in(&mut other, touch("id > 0")).await;
                MySql::execute_in(tx, touch("id = 0")).await;
                let waits = touch("id = 0");
                let other = tokio::spawn(async move {
                    MySql::execute_in(&mut other, waits).await;
                    other.rollback().await.unwrap();
                });
                wait_for("the other one to wait", SOON, async || MySql::number(&f.place.pool, waiting.clone()).await == 1).await;
                let victim = MySql::try_execute_in(tx, touch("id = 1")).await.unwrap_err();
                assert_eq!(posthouse::Error::from(victim).kind(), ErrorKind::Conflict);
                other.await.unwrap();
                Ok::<_, HandlerError>(())
            })
            .await;
        at(handled.unwrap());
        let error = f.shown(id).await.row.last_error.unwrap();
        assert!(error.contains("return such errors"), "{error}");
    }
    assert_eq!(MySql::number(&f.place.pool, format!("SELECT COUNT(*) FROM {locks} WHERE n > 0")).await, 0);
}

/// What is found out at the commit is the message's failure as well, and counts as an attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_is_refused_is_a_failure() {
    refused_commit::<Postgres>().await;
    refused_commit::<Sqlite>().await;
}

async fn refused_commit<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (parent, child) = (f.inbox.outbox().tables().name("parent"), f.inbox.outbox().tables().name("child"));
    T::execute(&f.place.pool, format!("CREATE TABLE {parent} (id INT PRIMARY KEY)")).await;
    let references = format!("REFERENCES {parent} (id) DEFERRABLE INITIALLY DEFERRED");
    T::execute(&f.place.pool, format!("CREATE TABLE {child} (id INT {references})")).await;
    for (id, redelivered) in [("m1", false), ("m2", true)] {
        let handled = f
            .inbox
            .process(&order(id).redelivered(redelivered), async |tx: &mut Tx<T::Db>| {
                effect::<T>(tx, &f.effects, id).await;
                T::execute_in(tx, format!("INSERT INTO {child} VALUES (7)")).await;
                Ok::<_, HandlerError>(())
            })
            .await;
        at(handled.unwrap());
        let row = f.shown(id).await.row;
        assert_eq!(row.attempts, 1);
        assert!(row.last_error.as_ref().is_some_and(|e| e.contains("refused the commit")), "{:?}", row.last_error);
    }
    assert_eq!(f.effects().await, 0);
    // The connections are as good as before.
    T::execute(&f.place.pool, format!("INSERT INTO {parent} VALUES (7)")).await;
    assert_eq!(f.process(&order("m3")).await, Handled::Processed);
}

async fn first_time_in_the_callers_own_transaction<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let outbox = f.inbox.outbox();
    for (round, expected) in [("rolled back", true), ("committed", true), ("again", false)] {
        let mut tx = outbox.begin().await.unwrap();
        assert_eq!(f.inbox.first_time(&mut tx, &order("m1")).await.unwrap(), expected, "{round}");
        assert!(!f.inbox.first_time(&mut tx, &order("m1")).await.unwrap(), "twice in one transaction");
        // The transaction is usable after both answers.
        effect::<T>(&mut tx, &f.effects, round).await;
        match round {
            "rolled back" => tx.rollback().await.unwrap(),
            _ => tx.commit().await.unwrap(),
        }
    }
    assert_eq!(f.effects().await, 2);
    assert_eq!(f.process(&order("m1")).await, Handled::Duplicate);
    // T11: one that waits for its retry is no duplicate once it is due.
    let due = at(f.fail(&order("m2"), || HandlerError::retry_after(Duration::from_millis(500), "no")).await);
    let mut tx = outbox.begin().await.unwrap();
    assert!(!f.inbox.first_time(&mut tx, &order("m2")).await.unwrap());
    tx.rollback().await.unwrap();
    until(due).await;
    let mut tx = outbox.begin().await.unwrap();
    assert!(f.inbox.first_time(&mut tx, &order("m2")).await.unwrap());
    tx.commit().await.unwrap();
    assert_eq!(f.status("m2").await, InboxStatus::Success);
}

async fn first_time_refuses_what_it_cant_do<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let mut conn = f.place.pool.acquire().await.unwrap();
    let outside = f.inbox.first_time(&mut conn, &order("m1")).await;
    assert!(matches!(outside, Err(Error::NotInTransaction)), "{outside:?}");
    drop(conn);
    let mut tx = f.inbox.outbox().begin().await.unwrap();
    let refused = f.inbox.first_time(&mut tx, &order("m1").malformed("odd")).await;
    assert!(matches!(&refused, Err(Error::Invalid { field: "message_id", reason }) if reason.contains("odd")), "{refused:?}");
    let refused = f.inbox.first_time(&mut tx, &order(&"x".repeat(256))).await;
    assert!(matches!(&refused, Err(Error::Invalid { field: "message_id", reason }) if reason.contains("255")), "{refused:?}");
    tx.commit().await.unwrap();
    assert!(f.found("m1").await.is_none());
}

/// Polls a future until it has been pending `times` times, then drops it.
async fn polled<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut pending = 0;
    std::future::poll_fn(move |context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => {
            pending += 1;
            if pending < times { Poll::Pending } else { Poll::Ready(None) }
        }
    })
    .await
}

/// D16. A busy machine may answer before it is asked whether it has, so a run that came to its end is no proof that there
/// were no more points: the same one is tried again.
async fn dropped_at_every_point_it_has_its_effect_once<T: TestDb>() {
    const TRIES: usize = 20;
    let f = Fixture::<T>::new().await;
    for redelivered in [false, true] {
        let (mut times, mut finished) = (1, 0);
        for n in 0.. {
            let id = format!("{redelivered}-{n}");
            let incoming = order(&id).redelivered(redelivered);
            let result = polled(process::<T>(&f.inbox, &f.effects, &incoming), times).await;
            if result.is_none() {
                // The claim of a run stays until it is due. (A commit may be on its way still, hence the loop.)
                let again = loop {
                    f.all_due().await;
                    match f.process(&order(&id)).await {
                        Handled::WillRetry(_) => {}
                        other => break other,
                    }
                };
                assert!(
                    matches!(again, Handled::Processed | Handled::Duplicate),
                    "dropped while pending {times} times: {again:?}"
                );
            }
            assert_eq!(f.effects_of(&id).await, 1, "dropped while pending {times} times");
            match result {
                None => (times, finished) = (times + 1, 0),
                Some(result) => {
                    assert_eq!(result.unwrap(), Handled::Processed);
                    finished += 1;
                }
            }
            if finished == TRIES {
                assert!(times > 1, "it was never pending");
                break;
            }
        }
    }
}

async fn it_can_be_spawned<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let (inbox, effects) = (f.inbox.clone(), f.effects.clone());
    let task = tokio::spawn(async move {
        let incoming = order("m1");
        let id = incoming.message_id.clone().unwrap();
        assert_eq!(process::<T>(&inbox, &effects, &incoming).await?, Handled::Processed);
        process::<T>(&inbox, &effects, &order(&format!("{id}-2"))).await
    });
    assert_eq!(task.await.unwrap().unwrap(), Handled::Processed);
    assert_eq!(f.effects().await, 2);
}
