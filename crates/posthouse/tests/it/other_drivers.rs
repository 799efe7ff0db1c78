//! `insert_statement` run by drivers other than the library's own way of publishing, inside transactions of theirs.
//! The conversions of `Param` are the recipes of docs/sql-contract.md.

use std::time::Duration;

use posthouse::store::{InsertStatement, Param};
use posthouse::testing::{Script, published_in};
use posthouse::{Error, Message, Outbox, Relay};

use crate::relay::quick;
use crate::support::{MySql, Postgres, Sqlite, TestDb};

fn message() -> Message {
    Message::to("test:订单 🏤")
        .typed("order.placed")
        .key("ключ ' \" \\ %")
        .payload((0..=255).collect::<Vec<u8>>())
        .content_type("x/y")
        .header("naïve", "\"quoted\" 😀")
        .max_attempts(7)
}

/// Messages that use what `message` doesn't.
fn bare() -> Message {
    Message::to("test:bare").deliver_in(Duration::from_millis(1))
}

/// A relay delivers what the other driver committed, as it would after `publish`.
async fn delivered<T: TestDb>(outbox: &Outbox<T::Db>, statements: &[InsertStatement]) {
    let script = Script::new();
    let relay = Relay::builder(outbox).settings(quick()).transport("test", script.clone()).start().await.unwrap();
    let mut conn = outbox.pool().acquire().await.unwrap();
    while !published_in(outbox, &mut conn).await.unwrap().is_empty() {
        relay.drain_once().await;
    }
    let mut seen = script.deliveries();
    seen.sort_by_key(|d| d.message.id);
    assert_eq!(seen.len(), statements.len());
    for (statement, delivery) in statements.iter().zip(&seen) {
        assert_eq!(delivery.message.message_id, statement.message_id);
    }
    let first = &seen[0].message;
    assert_eq!((first.destination.as_str(), first.kind.as_str()), ("test:订单 🏤", "order.placed"));
    assert_eq!((first.key.as_deref(), first.content_type.as_str()), (Some("ключ ' \" \\ %"), "x/y"));
    assert_eq!(first.payload, (0..=255).collect::<Vec<u8>>());
    assert_eq!(first.headers.get("naïve"), Some("\"quoted\" 😀"));
    let (message, name) = (outbox.tables().name("message"), "max_attempts = 7");
    let limits = T::number(outbox.pool(), format!("SELECT count(*) FROM {message} WHERE {name}")).await;
    assert_eq!(limits, 1);
    relay.shutdown(Duration::from_secs(5)).await;
}

fn postgres_value(param: &Param) -> &(dyn tokio_postgres::types::ToSql + Sync) {
    match param {
        Param::Text(text) => text,
        Param::Bytes(bytes) => bytes,
        Param::Int(int) => int,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokio_postgres_publishes() {
    let place = Postgres::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    let (mut client, connection) = tokio_postgres::connect(&place.url, tokio_postgres::NoTls).await.unwrap();
    let connection = tokio::spawn(connection);
    async fn run(tx: &tokio_postgres::Transaction<'_>, statement: &InsertStatement) -> u64 {
        let params: Vec<_> = statement.params.iter().map(postgres_value).collect();
        tx.execute(&statement.sql, &params).await.unwrap()
    }

    let tx = client.transaction().await.unwrap();
    run(&tx, &outbox.insert_statement(Message::to("test:rolled back")).unwrap()).await;
    tx.rollback().await.unwrap();

    let tx = client.transaction().await.unwrap();
    let once = || Message::to("test:once").dedup_key("once").payload([0, 255]).header("a", "b").max_attempts(3);
    let statements: Vec<_> = [message(), bare(), once()].map(|m| outbox.insert_statement(m).unwrap()).into();
    for statement in &statements {
        assert_eq!(run(&tx, statement).await, 1);
    }
    let again = outbox.insert_statement(once()).unwrap();
    assert_eq!(again.message_id.as_str(), "once");
    assert_eq!(run(&tx, &again).await, 0, "a used dedup key inserts nothing");
    tx.commit().await.unwrap();

    delivered::<Postgres>(&outbox, &statements).await;
    drop(client);
    connection.await.unwrap().unwrap();
}

fn mysql_value(param: Param) -> mysql_async::Value {
    match param {
        Param::Text(text) => text.into(),
        Param::Bytes(bytes) => bytes.into(),
        Param::Int(int) => int.into(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_async_publishes() {
    use mysql_async::prelude::Queryable;

    let place = MySql::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    let mut conn = mysql_async::Conn::from_url(&place.url).await.unwrap();
    async fn run(tx: &mut mysql_async::Transaction<'_>, statement: &InsertStatement) {
        let params: Vec<_> = statement.params.iter().cloned().map(mysql_value).collect();
        tx.exec_drop(&statement.sql, params).await.unwrap();
    }

    let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
    run(&mut tx, &outbox.insert_statement(Message::to("test:rolled back")).unwrap()).await;
    tx.rollback().await.unwrap();

    let statements: Vec<_> = [message(), bare()].map(|m| outbox.insert_statement(m).unwrap()).into();
    let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
    for statement in &statements {
        run(&mut tx, statement).await;
    }
    tx.commit().await.unwrap();
    assert_needs_two_statements(outbox.insert_statement(Message::to("a").dedup_key("k")));

    delivered::<MySql>(&outbox, &statements).await;
    conn.disconnect().await.unwrap();
}

/// SQLite through sqlx's own queries: a second driver would link a second copy of SQLite.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_query_publishes_on_sqlite() {
    let outbox = Sqlite::fresh().await;
    async fn run(tx: &mut sqlx::SqliteConnection, statement: &InsertStatement) {
        let mut query = sqlx::query(sqlx::AssertSqlSafe(statement.sql.clone()));
        for param in statement.params.iter().cloned() {
            query = match param {
                Param::Text(text) => query.bind(text),
                Param::Bytes(bytes) => query.bind(bytes),
                Param::Int(int) => query.bind(int),
            };
        }
        query.execute(tx).await.unwrap();
    }

    let mut tx = outbox.pool().begin().await.unwrap();
    run(&mut tx, &outbox.insert_statement(Message::to("test:rolled back")).unwrap()).await;
    tx.rollback().await.unwrap();

    let statements: Vec<_> = [message(), bare()].map(|m| outbox.insert_statement(m).unwrap()).into();
    let mut tx = outbox.pool().begin().await.unwrap();
    for statement in &statements {
        run(&mut tx, statement).await;
    }
    tx.commit().await.unwrap();
    assert_needs_two_statements(outbox.insert_statement(Message::to("a").dedup_key("k")));

    delivered::<Sqlite>(&outbox, &statements).await;
}

#[track_caller]
fn assert_needs_two_statements(refused: Result<InsertStatement, Error>) {
    match refused {
        Err(Error::Invalid { field: "dedup_key", reason }) => assert!(reason.contains("two statements"), "{reason}"),
        other => panic!("expected a refusal, got {other:?}"),
    }
}
