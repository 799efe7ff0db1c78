//! The calls a service makes, where it makes them.

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use posthouse::testing;
use posthouse::{Error, Event, Message, MessageId, Outbox, Tx};
use serde::{Deserialize, Serialize};
use sqlx::{Connection as _, PgConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{count, destinations, insert, orders, published};
use crate::support::{Place, Postgres, TestDb, on_all_databases};

on_all_databases!(
    a_transaction_in_a_spawned_task,
    a_transaction_in_a_handler,
    a_transaction_that_borrows,
    typed_events,
    from_a_pool_transaction,
    what_a_transaction_published_is_seen_inside_it,
    default_tables_need_no_outbox,
);

async fn a_transaction_in_a_spawned_task<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = orders::<T>(&outbox).await;
    let task = tokio::spawn({
        let (outbox, table) = (outbox.clone(), table.clone());
        async move {
            let id = outbox
                .transaction(async |tx: &mut Tx<T::Db>| {
                    insert::<T>(tx, &table, 1).await;
                    tx.publish(Message::to("orders").key(1)).await
                })
                .await?;
            let refused = outbox
                .transaction(async |tx: &mut Tx<T::Db>| {
                    insert::<T>(tx, &table, 2).await;
                    tx.publish(Message::to("orders").key(2)).await?;
                    tx.publish(Message::to("")).await
                })
                .await;
            assert!(matches!(refused, Err(Error::Invalid { field: "destination", .. })), "{refused:?}");
            Ok::<MessageId, Error>(id)
        }
    });
    let id = task.await.unwrap().unwrap();
    let found = published::<T>(&outbox).await;
    assert_eq!(found.iter().map(|m| &m.message_id).collect::<Vec<_>>(), [&id]);
    assert_eq!(count::<T>(&outbox, &table).await, 1);
}

/// What a service answers with; `?` makes it of the library's errors.
struct Refusal(Error);

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        Self(e)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.0.to_string()).into_response()
    }
}

async fn place_order<T: TestDb>(
    State((outbox, table)): State<(Outbox<T::Db>, String)>,
    body: String,
) -> Result<(StatusCode, String), Refusal> {
    let id = outbox
        .transaction(async |tx: &mut Tx<T::Db>| {
            insert::<T>(tx, &table, 1).await;
            tx.publish(Message::to(body).payload("1")).await
        })
        .await?;
    Ok((StatusCode::CREATED, id.to_string()))
}

async fn a_transaction_in_a_handler<T: TestDb>() {
    let outbox = T::fresh().await;
    let table = orders::<T>(&outbox).await;
    let app = Router::new().route("/orders", post(place_order::<T>)).with_state((outbox.clone(), table.clone()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let call = async |body: &str| {
        let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
        let request =
            format!("POST /orders HTTP/1.1\r\nhost: {at}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let long = "x".repeat(256);
    let refused = call(&long).await;
    assert!(refused.starts_with("HTTP/1.1 500") && refused.contains("destination: 256 bytes, the limit is 255"), "{refused}");
    assert_eq!(count::<T>(&outbox, &table).await, 0);
    let placed = call("orders").await;
    assert!(placed.starts_with("HTTP/1.1 201"), "{placed}");
    let found = published::<T>(&outbox).await;
    assert!(placed.ends_with(found[0].message_id.as_str()), "{placed}");
    assert_eq!((found.len(), count::<T>(&outbox, &table).await), (1, 1));
    server.abort();
}

/// The closure may use what is around it by reference, and an error of the service's own.
async fn a_transaction_that_borrows<T: TestDb>() {
    #[derive(Debug, PartialEq)]
    enum OrderError {
        SoldOut,
        Other(String),
    }
    impl From<Error> for OrderError {
        fn from(e: Error) -> Self {
            Self::Other(e.to_string())
        }
    }
    let outbox = T::fresh().await;
    let (name, mut tries) = (String::from("orders"), 0);
    let mut place = async |left: u32| {
        tries += 1;
        let borrowed = &name;
        outbox
            .transaction(async |tx: &mut Tx<T::Db>| {
                tx.publish(Message::to(borrowed)).await?;
                if left == 0 { Err(OrderError::SoldOut) } else { Ok(borrowed.len()) }
            })
            .await
    };
    assert_eq!(place(0).await, Err(OrderError::SoldOut));
    assert_eq!(place(1).await, Ok(6));
    assert_eq!(tries, 2);
    assert_eq!(destinations::<T>(&outbox).await, ["orders"]);
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct OrderPlaced {
    order: u64,
    note: String,
}

impl Event for OrderPlaced {
    const TYPE: &'static str = "order.placed.v1";
    const DESTINATION: &'static str = "orders";
    fn key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

#[derive(Serialize)]
struct Tick;

impl Event for Tick {
    const TYPE: &'static str = "tick";
    const DESTINATION: &'static str = "clock";
}

async fn typed_events<T: TestDb>() {
    let outbox = T::fresh().await;
    let events: Vec<_> = (1..=3).map(|order| OrderPlaced { order, note: "é🐎".into() }).collect();
    let mut tx = outbox.begin().await.unwrap();
    let first = tx.publish(&events[0]).await.unwrap();
    outbox.publish_many(&mut tx, &events[1..]).await.unwrap();
    tx.publish(&Tick).await.unwrap();
    tx.commit().await.unwrap();

    let found = published::<T>(&outbox).await;
    assert_eq!(found.len(), 4);
    assert_eq!(found[0].message_id, first);
    for (event, m) in events.iter().zip(&found) {
        assert_eq!((m.kind.as_str(), m.destination.as_str()), ("order.placed.v1", "orders"));
        assert_eq!((m.key.clone(), m.content_type.as_str()), (event.key(), "application/json"));
        assert_eq!(&m.json::<OrderPlaced>().unwrap(), event);
    }
    assert_eq!((found[3].kind.as_str(), &found[3].key, found[3].payload.as_slice()), ("tick", &None, &b"null"[..]));
    assert!(found[3].json::<OrderPlaced>().is_err());
}

/// A transaction that sqlx began: on the pool, on one of its connections, and a savepoint within.
async fn from_a_pool_transaction<T: TestDb>() {
    let outbox = T::fresh().await;
    let mut tx: sqlx::Transaction<'static, T::Db> = outbox.pool().begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("pool")).await.unwrap();
    outbox.commit(tx).await.unwrap();

    let mut conn = outbox.pool().acquire().await.unwrap();
    let mut tx = conn.begin().await.unwrap();
    outbox.publish(&mut tx, Message::to("connection")).await.unwrap();
    let mut savepoint = tx.begin().await.unwrap();
    outbox.publish(&mut savepoint, Message::to("savepoint")).await.unwrap();
    savepoint.commit().await.unwrap();
    tx.commit().await.unwrap();
    outbox.committed();
    drop(conn);
    assert_eq!(destinations::<T>(&outbox).await, ["pool", "connection", "savepoint"]);
}

/// A service's function that takes a plain connection of one database, and an own connection outside of any pool.
#[tokio::test]
async fn from_a_plain_connection() {
    async fn place(outbox: &Outbox<sqlx::Postgres>, conn: &mut PgConnection, order: i32) -> Result<MessageId, Error> {
        sqlx::query("SELECT $1::integer").bind(order).execute(&mut *conn).await?;
        outbox.publish(conn, Message::to("orders").key(order)).await
    }
    let place_of: Place<_> = Postgres::place().await;
    let outbox = place_of.outbox();
    outbox.migrate().await.unwrap();
    let mut conn = PgConnection::connect(&place_of.url).await.unwrap();
    let refused = place(&outbox, &mut conn, 1).await;
    assert!(matches!(refused, Err(Error::NotInTransaction)), "{refused:?}");
    let mut tx = conn.begin().await.unwrap();
    place(&outbox, &mut tx, 2).await.unwrap();
    tx.commit().await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    place(&outbox, &mut tx, 3).await.unwrap();
    tx.commit().await.unwrap();
    let keys: Vec<_> = published::<Postgres>(&outbox).await.into_iter().filter_map(|m| m.key).collect();
    assert_eq!(keys, ["2", "3"]);
}

async fn what_a_transaction_published_is_seen_inside_it<T: TestDb>() {
    let outbox = T::fresh().await;
    outbox.publish_alone(Message::to("before")).await.unwrap();
    let mut tx = outbox.begin().await.unwrap();
    let every_byte: Vec<u8> = (0..=255).collect();
    let message = Message::to("订单 🏤")
        .typed("zażółć")
        .key("ключ ' \" \\ %")
        .payload(every_byte.clone())
        .content_type("x/y")
        .header("naïve", "\"quoted\" 😀");
    let id = tx.publish(message).await.unwrap();
    tx.publish(Message::to("empty").payload("").deliver_in(std::time::Duration::from_secs(3600))).await.unwrap();
    let seen = testing::published_in(&outbox, &mut tx).await.unwrap();
    assert_eq!(seen.iter().map(|m| m.destination.as_str()).collect::<Vec<_>>(), ["before", "订单 🏤", "empty"]);
    let m = &seen[1];
    assert_eq!((&m.message_id, m.kind.as_str(), m.key.as_deref()), (&id, "zażółć", Some("ключ ' \" \\ %")));
    assert_eq!((&m.payload, m.content_type.as_str(), m.headers.len()), (&every_byte, "x/y", 1));
    assert_eq!(m.headers.get("naïve"), Some("\"quoted\" 😀"));
    assert!(seen[2].headers.is_empty() && seen[2].payload.is_empty() && seen[2].key.is_none());
    tx.rollback().await.unwrap();
    assert_eq!(destinations::<T>(&outbox).await, ["before"]);

    T::execute(
        outbox.pool(),
        format!("INSERT INTO {} (destination, headers) VALUES ('sql', '[1]')", outbox.tables().name("message")),
    )
    .await;
    let mut conn = outbox.pool().acquire().await.unwrap();
    let undecodable = testing::published_in(&outbox, &mut conn).await;
    assert!(matches!(undecodable, Err(Error::Invalid { field: "headers", .. })), "{undecodable:?}");
}

async fn default_tables_need_no_outbox<T: TestDb>() {
    let place = T::place().await;
    let pool = if T::NAME == "postgres" {
        // The default tables are in the schema public, which the tests of this database share: so in a database of its own.
        let name = place.schema.clone().expect("a name of the test's own");
        T::execute(&place.pool, format!("CREATE DATABASE {name}")).await;
        let (server, _) = place.url.rsplit_once('/').expect("a URL with a database");
        T::connect(&format!("{server}/{name}")).await
    } else {
        place.pool.clone()
    };
    posthouse::migrate(&pool).await.unwrap();
    let outbox = Outbox::new(pool.clone());
    let mut tx = outbox.begin().await.unwrap();
    tx.publish(&OrderPlaced { order: 7, note: String::new() }).await.unwrap();
    let seen = testing::published(&mut *tx).await.unwrap();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].json::<OrderPlaced>().unwrap().order, 7);
    tx.rollback().await.unwrap();
    assert_eq!(destinations::<T>(&outbox).await, Vec::<String>::new());
    pool.close().await;
    if T::NAME == "postgres" {
        T::execute(&place.pool, format!("DROP DATABASE {} WITH (FORCE)", place.schema.expect("a name"))).await;
    }
}
