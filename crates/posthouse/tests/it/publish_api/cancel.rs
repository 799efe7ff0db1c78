//! D16: a future that is dropped between BEGIN and COMMIT leaves no transaction open and publishes nothing.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;

use posthouse::{Error, Message, Outbox, Tx};
use tokio::sync::Notify;

use super::{count, destinations, insert, orders};
use crate::support::{Place, TestDb, on_all_databases, outbox_at};

on_all_databases!(
    dropped_at_every_point_it_leaves_all_or_nothing,
    a_branch_of_select_that_loses_publishes_nothing,
    an_aborted_task_publishes_nothing,
);

/// The same tables through a pool of one connection: whoever comes next gets the connection that was left behind.
async fn one_connection<T: TestDb>(place: &Place<T::Db>) -> Outbox<T::Db> {
    let pool = sqlx::pool::PoolOptions::<T::Db>::new()
        .max_connections(1)
        .connect_with((*place.pool.connect_options()).clone())
        .await
        .unwrap();
    outbox_at(pool, place.schema.as_deref())
}

/// Polls a future until it has been pending `times` times, then drops it; answers its output if it was ready before.
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

/// Writes in a statement of its own on the one connection, and looks from another one whether that is committed.
async fn assert_usable<T: TestDb>(one: &Outbox<T::Db>, beside: &Outbox<T::Db>, table: &str, id: usize, when: &str) {
    let mut conn = one.pool().acquire().await.unwrap();
    T::execute_in(&mut conn, format!("INSERT INTO {table} (id) VALUES ({id})")).await;
    drop(conn);
    let seen = T::number(beside.pool(), format!("SELECT count(*) FROM {table} WHERE id = {id}")).await;
    assert_eq!(seen, 1, "a transaction was left open on the connection, {when}");
    T::execute(beside.pool(), format!("DELETE FROM {table} WHERE id = {id}")).await;
}

async fn dropped_at_every_point_it_leaves_all_or_nothing<T: TestDb>() {
    const PROBE: usize = 1_000_000;
    let place = T::place().await;
    let beside = place.outbox();
    beside.migrate().await.unwrap();
    let table = orders::<T>(&beside).await;
    let one = one_connection::<T>(&place).await;
    for times in 1.. {
        let run = one.transaction(async |tx: &mut Tx<T::Db>| {
            insert::<T>(tx, &table, times).await;
            tx.publish(Message::to(format!("order-{times}")).dedup_key(times.to_string())).await?;
            tx.publish(Message::to(format!("mail-{times}"))).await?;
            Ok::<(), Error>(())
        });
        let finished = polled(run, times).await;
        let when = format!("dropped while pending for the {times}th time");
        assert_usable::<T>(&one, &beside, &table, PROBE, &when).await;
        // The COMMIT itself may have been on its way.
        let placed = T::number(beside.pool(), format!("SELECT count(*) FROM {table} WHERE id = {times}")).await;
        let expected: Vec<_> = if placed == 1 { vec![format!("order-{times}"), format!("mail-{times}")] } else { vec![] };
        assert_eq!(destinations::<T>(&beside).await, expected, "{when}");
        let keys = count::<T>(&beside, &beside.tables().name("dedup")).await;
        assert_eq!(keys, placed, "{when}");
        if let Some(result) = finished {
            result.unwrap();
            assert_eq!(placed, 1);
            assert!(times > 1, "it was never pending");
            return;
        }
        for name in ["pending", "message", "dedup"] {
            T::execute(beside.pool(), format!("DELETE FROM {}", beside.tables().name(name))).await;
        }
    }
}

async fn a_branch_of_select_that_loses_publishes_nothing<T: TestDb>() {
    let place = T::place().await;
    let beside = place.outbox();
    beside.migrate().await.unwrap();
    let table = orders::<T>(&beside).await;
    let one = one_connection::<T>(&place).await;
    for biased_to_the_transaction in [true, false] {
        let published = Notify::new();
        let run = one.transaction(async |tx: &mut Tx<T::Db>| {
            insert::<T>(tx, &table, 1).await;
            tx.publish(Message::to("orders")).await?;
            published.notify_one();
            std::future::pending::<Result<(), Error>>().await
        });
        if biased_to_the_transaction {
            tokio::select! {
                biased;
                _ = run => unreachable!("it waits for ever"),
                () = published.notified() => {}
            }
        } else {
            // Ready at once: the transaction isn't even begun.
            tokio::select! {
                biased;
                () = std::future::ready(()) => {}
                _ = run => unreachable!("it waits for ever"),
            }
        }
        assert_usable::<T>(&one, &beside, &table, 2, "lost to another branch").await;
        assert_eq!(count::<T>(&beside, &table).await, 0);
        assert_eq!(destinations::<T>(&beside).await, Vec::<String>::new());
    }
    one.publish_alone(Message::to("next")).await.unwrap();
    assert_eq!(destinations::<T>(&beside).await, ["next"]);
}

async fn an_aborted_task_publishes_nothing<T: TestDb>() {
    let place = T::place().await;
    let beside = place.outbox();
    beside.migrate().await.unwrap();
    let table = orders::<T>(&beside).await;
    let one = one_connection::<T>(&place).await;
    let published = std::sync::Arc::new(Notify::new());
    let task = tokio::spawn({
        let (one, published) = (one.clone(), published.clone());
        async move {
            one.transaction(async |tx: &mut Tx<T::Db>| {
                tx.publish(Message::to("orders")).await?;
                published.notify_one();
                std::future::pending::<Result<(), Error>>().await
            })
            .await
        }
    });
    published.notified().await;
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_usable::<T>(&one, &beside, &table, 2, "aborted").await;
    assert_eq!(destinations::<T>(&beside).await, Vec::<String>::new());
}
