//! What COMMIT says decides, and where it says nothing, what the database holds.

use std::time::Duration;

use posthouse::testing::Script;
use posthouse::{Error, ErrorKind, Message, Relay, Tx};
use sqlx::Connection as _;

use super::{count, destinations, insert, orders};
use crate::relay::{Log, Recorder, quick};
use crate::support::{MySql, Postgres, TestDb, on_all_databases, outbox_at};
use posthouse_faults::{Mode, Proxy};

on_all_databases!(a_connection_is_used_again_after_a_commit, a_commit_that_fails_sends_nothing);

/// L13. A [`Tx`] and a transaction of sqlx's are used up by their commit; the connection isn't.
async fn a_connection_is_used_again_after_a_commit<T: TestDb>() {
    let outbox = T::fresh().await;
    let script = Script::new();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", script.clone()).start().await.unwrap();
    let mut conn = outbox.pool().acquire().await.unwrap();

    let mut tx = conn.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:1")).await.unwrap();
    tx.commit().await.unwrap();
    let refused = outbox.publish(&mut conn, Message::to("test:after a commit")).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");

    let mut tx = conn.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:rolled back")).await.unwrap();
    tx.rollback().await.unwrap();
    let refused = outbox.publish(&mut conn, Message::to("test:after a rollback")).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");

    let mut tx = conn.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:dropped")).await.unwrap();
    drop(tx);
    let refused = outbox.publish(&mut conn, Message::to("test:after a drop")).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");

    let mut tx = conn.begin().await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    outbox.publish(&mut savepoint, Message::to("test:savepoint")).await.unwrap();
    savepoint.rollback().await.unwrap();
    outbox.publish(&mut tx, Message::to("test:2")).await.unwrap();
    tx.commit().await.unwrap();
    drop(conn);

    relay.drain_once().await;
    let sent: Vec<_> = script.deliveries().into_iter().map(|d| d.message.destination).collect();
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(sent.contains(&"test:1".into()) && sent.contains(&"test:2".into()), "{sent:?}");
    relay.shutdown(Duration::from_secs(5)).await;
}

async fn a_commit_that_fails_sends_nothing<T: TestDb>() {
    let outbox = T::fresh().await;
    let script = Script::new();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", script.clone()).start().await.unwrap();
    relay.drain_once().await;
    let table = orders::<T>(&outbox).await;
    let child = outbox.tables().name("lines");
    let mut tx = outbox.begin().await.unwrap();
    insert::<T>(&mut tx, &table, 1).await;
    if T::NAME == "mysql" {
        // There are no checks at the commit: the server ends the connection.
        let id = T::number_in(&mut tx, "SELECT CAST(connection_id() AS SIGNED)".into()).await;
        tx.publish(Message::to("test:a")).await.unwrap();
        T::execute(outbox.pool(), format!("KILL CONNECTION {id}")).await;
    } else {
        // A foreign key that is checked at the commit, and doesn't hold.
        T::execute_in(
            &mut tx,
            format!(
                "CREATE TABLE {child} (id INTEGER PRIMARY KEY, parent INTEGER REFERENCES {table} (id) DEFERRABLE INITIALLY DEFERRED)"
            ),
        )
        .await;
        T::execute_in(&mut tx, format!("INSERT INTO {child} (id, parent) VALUES (1, 99)")).await;
        tx.publish(Message::to("test:a")).await.unwrap();
    }
    let failed = outbox.commit(tx).await;
    assert!(matches!(failed, Err(Error::Database(_))), "{failed:?}");
    relay.drain_once().await;
    assert_eq!(script.deliveries(), []);
    assert_eq!(count::<T>(&outbox, &table).await, 0);
    assert_eq!(destinations::<T>(&outbox).await, Vec::<String>::new());

    // The connections that are left behind are fit for the next transaction.
    for n in 0..20 {
        outbox.publish_alone(Message::to("test:next").payload(n.to_string())).await.unwrap();
    }
    relay.drain_once().await;
    assert_eq!(script.deliveries().len(), 20);
    relay.shutdown(Duration::from_secs(5)).await;
}

/// The server commits and its answer is lost: the caller gets an error, and the relay, which asks the database, delivers.
async fn a_commit_whose_answer_is_lost_is_delivered<T: TestDb>() {
    let place = T::place().await;
    let direct = place.outbox();
    direct.migrate().await.unwrap();
    let log = Log::default();
    let relay = Relay::builder(&direct).settings(quick()).transport("test", Recorder(log.clone())).start().await.unwrap();
    let address = place.url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
    let proxy = Proxy::start(address.clone()).await;
    let through = T::connect(&place.url.replace(&address, &proxy.address.to_string())).await;
    let outbox = outbox_at(through, place.schema.as_deref());

    let mut tx = outbox.begin().await.unwrap();
    tx.publish(Message::to("test:a").payload("lost")).await.unwrap();
    proxy.set(Mode::Cut);
    let failed = tx.commit().await.unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Unavailable, "{failed}");

    proxy.set(Mode::Open);
    let answered = outbox
        .transaction(async |tx: &mut Tx<T::Db>| {
            tx.publish(Message::to("test:a").payload("committed")).await?;
            proxy.set(Mode::Unanswered);
            Ok::<(), Error>(())
        })
        .await;
    assert_eq!(answered.unwrap_err().kind(), ErrorKind::Unavailable);
    log.wait_len(1).await;
    relay.drain_once().await;
    assert_eq!(log.payloads(), ["committed"]);
    relay.shutdown(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_delivered_on_postgres() {
    crate::support::bounded(a_commit_whose_answer_is_lost_is_delivered::<Postgres>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_delivered_on_mysql() {
    crate::support::bounded(a_commit_whose_answer_is_lost_is_delivered::<MySql>()).await;
}
