//! Many at once: one effect, and nobody sees a conflict.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use posthouse::Tx;
use posthouse::inbox::{Handled, HandlerError, Inbox};
use posthouse::store::InboxStatus;
use sqlx::Executor as _;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::Barrier;

use super::{Fixture, effect, order, process, quick, try_effect};
use crate::support::{MySql, Postgres, SOON, TestDb, bounded, on_all_databases, scale, wait_for};

on_all_databases!(
    ten_consumers_and_five_copies_of_each_have_one_effect,
    different_ids_at_once_are_no_deadlock,
    copies_that_wait_for_one_that_rolls_back,
    failures_and_successes_of_one_id_at_once,
    redelivered_copies_at_once_have_one_effect,
);

/// Through pools of their own, as processes have.
async fn ten_consumers_and_five_copies_of_each_have_one_effect<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    let messages = if T::NAME == "sqlite" { 20 } else { 60 * scale() };
    let mut tasks = Vec::new();
    for consumer in 0..10 {
        let inbox = f.beside(T::connect(&f.place.url).await, "inventory", quick());
        let effects = f.effects.clone();
        tasks.push(tokio::spawn(async move {
            let mut processed = 0;
            // Each copy reaches two of them, at nearly the same time.
            for n in (0..messages * 5).filter(|n| n % 5 == consumer % 5) {
                let id = format!("m{}", n / 5);
                // No error reaches the caller, and none of them is told to wait.
                match process::<T>(&inbox, &effects, &order(&id).redelivered(false)).await.unwrap() {
                    Handled::Processed => processed += 1,
                    Handled::Duplicate => {}
                    other => panic!("{id}: {other:?}"),
                }
            }
            processed
        }));
    }
    let processed: usize = join_all(tasks).await.into_iter().map(Result::unwrap).sum();
    assert_eq!(processed, messages);
    assert_eq!(f.effects().await, messages as i64);
    assert_eq!(f.count(InboxStatus::Success).await, messages as i64);
}

/// D4: new ids between those of others, each transaction held open until all have begun.
async fn different_ids_at_once_are_no_deadlock<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    // SQLite has one writer, so there they can't be open together.
    let at_once = if T::NAME == "sqlite" { 1 } else { 8 };
    let rounds = 5 * scale();
    let inboxes: Vec<Inbox<T::Db>> = vec![
        f.inbox.clone(),
        f.beside(T::connect(&f.place.url).await, "inventory", quick()),
        f.beside(f.place.pool.clone(), "billing", quick()),
    ];
    for round in 0..rounds {
        let barrier = Arc::new(Barrier::new(at_once));
        let all = (0..at_once).map(|n| {
            let (inbox, barrier, effects) = (inboxes[n % 3].clone(), barrier.clone(), f.effects.clone());
            async move {
                // Not in order, so that each falls into a gap before or behind those of the others.
                let id = format!("{}-{round}", (n * 37) % at_once);
                let calls = AtomicUsize::new(0);
                let handled = inbox
                    .process(&order(&id), async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
                        let first = calls.fetch_add(1, Ordering::Relaxed) == 0;
                        try_effect::<T>(tx, &effects, &id).await?;
                        if first {
                            barrier.wait().await;
                        }
                        Ok(())
                    })
                    .await
                    .unwrap();
                assert_eq!(handled, Handled::Processed);
                calls.into_inner()
            }
        });
        let calls: usize = join_all(all).await.into_iter().sum();
        assert_eq!(calls, at_once, "no deadlock even inside");
    }
    assert_eq!(f.effects().await, (at_once * rounds) as i64);
}

/// D20: several wait for one that inserted the same new id first, and it rolls back.
async fn copies_that_wait_for_one_that_rolls_back<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for round in 0..5 * scale() {
        let id = format!("m{round}");
        let mut first = f.inbox.outbox().begin().await.unwrap();
        assert!(f.inbox.first_time(&mut first, &order(&id)).await.unwrap());
        let waiting: Vec<_> = (0..4)
            .map(|_| {
                let (inbox, effects, id) = (f.inbox.clone(), f.effects.clone(), id.clone());
                tokio::spawn(async move { process::<T>(&inbox, &effects, &order(&id)).await.unwrap() })
            })
            .collect();
        // So that they do wait; how long is of no matter.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(waiting.iter().all(|w| !w.is_finished()));
        first.rollback().await.unwrap();
        let handled: Vec<_> = join_all(waiting).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(handled.iter().filter(|h| **h == Handled::Processed).count(), 1, "{handled:?}");
        assert_eq!(handled.iter().filter(|h| **h == Handled::Duplicate).count(), 3, "{handled:?}");
        assert_eq!(f.effects_of(&id).await, 1);
    }
}

/// Some of the copies fail. Whatever comes first: at most one effect, and a record that agrees with it.
async fn failures_and_successes_of_one_id_at_once<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for round in 0..10 * scale() {
        let id = format!("m{round}");
        let copies = (0..6).map(|n| {
            let (inbox, effects, id) = (f.inbox.clone(), f.effects.clone(), id.clone());
            tokio::spawn(async move {
                inbox
                    .process(&order(&id), async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
                        try_effect::<T>(tx, &effects, &id).await?;
                        if n % 2 == 0 { Err(HandlerError::retry_after(Duration::from_secs(60), "no")) } else { Ok(()) }
                    })
                    .await
                    .unwrap()
            })
        });
        let handled: Vec<_> = join_all(copies).await.into_iter().map(Result::unwrap).collect();
        let processed = handled.iter().filter(|h| **h == Handled::Processed).count() as i64;
        assert!(processed <= 1, "{handled:?}");
        assert_eq!(f.effects_of(&id).await, processed, "{handled:?}");
        let expected = if processed == 1 { InboxStatus::Success } else { InboxStatus::PendingRetry };
        assert_eq!(f.status(&id).await, expected, "{handled:?}");
        f.all_due().await;
        let last = f.process(&order(&id)).await;
        assert_eq!(last, if processed == 1 { Handled::Duplicate } else { Handled::Processed });
        assert_eq!(f.effects_of(&id).await, 1);
    }
}

async fn redelivered_copies_at_once_have_one_effect<T: TestDb>() {
    let f = Fixture::<T>::new().await;
    for round in 0..5 * scale() {
        let id = format!("m{round}");
        let copies = (0..6).map(|n| {
            let (inbox, effects, id) = (f.inbox.clone(), f.effects.clone(), id.clone());
            tokio::spawn(async move { process::<T>(&inbox, &effects, &order(&id).redelivered(n % 3 > 0)).await.unwrap() })
        });
        let handled: Vec<_> = join_all(copies).await.into_iter().map(Result::unwrap).collect();
        // Those that came while one was running were told when its lease ends.
        assert!(!handled.contains(&Handled::Failed), "{handled:?}");
        wait_for("the effect", SOON, async || f.effects_of(&id).await == 1).await;
        assert_eq!(handled.iter().filter(|h| **h == Handled::Processed).count(), 1, "{handled:?}");
        assert_eq!(f.status(&id).await, InboxStatus::Success);
    }
}

/// D2: a level of isolation that every connection of the pool has. Handlers that change the same row conflict all the time.
async fn at_level<T: TestDb>(f: &Fixture<T>, pool: sqlx::Pool<T::Db>, level: &str) {
    let inbox = f.beside(pool, "inventory", quick());
    let counter = f.inbox.outbox().tables().name("counter");
    T::execute(&f.place.pool, format!("CREATE TABLE {counter} (n BIGINT NOT NULL)")).await;
    T::execute(&f.place.pool, format!("INSERT INTO {counter} (n) VALUES (0)")).await;
    let tasks = (0..4).map(|task| {
        let (inbox, effects, counter) = (inbox.clone(), f.effects.clone(), counter.clone());
        tokio::spawn(async move {
            for n in 0..15 {
                for redelivered in [false, true] {
                    let incoming = order(&format!("{task}-{n}-{redelivered}")).redelivered(redelivered);
                    let id = incoming.message_id.clone().unwrap();
                    let handled = inbox
                        .process(&incoming, async |tx: &mut Tx<T::Db>| -> Result<(), HandlerError> {
                            // Each reads what the others write.
                            T::try_execute_in(tx, format!("SELECT count(*) FROM {effects}")).await?;
                            T::try_execute_in(tx, format!("UPDATE {counter} SET n = n + 1")).await?;
                            try_effect::<T>(tx, &effects, &id).await?;
                            Ok(())
                        })
                        .await;
                    assert_eq!(handled.unwrap(), Handled::Processed, "{id}");
                    assert_eq!(process::<T>(&inbox, &effects, &incoming).await.unwrap(), Handled::Duplicate, "{id}");
                }
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap_or_else(|e| panic!("{level}: {e}"));
    }
    assert_eq!(T::number(&f.place.pool, format!("SELECT n FROM {counter}")).await, 120, "{level}");
    assert_eq!(f.effects().await, 120, "{level}");
    // And the same id at once.
    let copies = (0..8).map(|_| {
        let (inbox, effects) = (inbox.clone(), f.effects.clone());
        tokio::spawn(async move { process::<T>(&inbox, &effects, &order("same")).await.unwrap() })
    });
    let handled: Vec<_> = join_all(copies).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(handled.iter().filter(|h| **h == Handled::Processed).count(), 1, "{level}: {handled:?}");
    assert_eq!(f.effects_of("same").await, 1, "{level}");
    // first_time leaves the conflict to the caller, whose transaction it is.
    let mut tx = inbox.outbox().begin().await.unwrap();
    assert!(!inbox.first_time(&mut tx, &order("same")).await.unwrap(), "{level}");
    effect::<T>(&mut tx, &f.effects, "after").await;
    tx.commit().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_every_level_of_postgres() {
    bounded(async {
        for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
            let f = Fixture::<Postgres>::new().await;
            let session = format!("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}");
            let pool = PgPoolOptions::new().after_connect(move |conn, _| {
                let session = sqlx::AssertSqlSafe(session.clone());
                Box::pin(async move { conn.execute(sqlx::raw_sql(session)).await.map(|_| ()) })
            });
            at_level(&f, pool.connect_lazy(&f.place.url).unwrap(), level).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_every_level_of_mysql() {
    bounded(async {
        for level in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
            let f = Fixture::<MySql>::new().await;
            let session = format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}");
            let pool = MySqlPoolOptions::new().after_connect(move |conn, _| {
                let session = sqlx::AssertSqlSafe(session.clone());
                Box::pin(async move { conn.execute(sqlx::raw_sql(session)).await.map(|_| ()) })
            });
            at_level(&f, pool.connect_lazy(&f.place.url).unwrap(), level).await;
        }
    })
    .await;
}
