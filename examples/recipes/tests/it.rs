//! Runs every recipe, on PostgreSQL and SQLite, without a broker.

use std::time::Duration;

use diesel_async::{AsyncConnection as _, AsyncPgConnection};
use posthouse::testing::Script;
use posthouse::transport::Outcome;
use posthouse::{Message, Outbox, Relay, Retry, Route};
use recipes::{diesel, function::Function, sea_orm, tokio_postgres, transport::Lines};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool};

const SOON: Duration = Duration::from_millis(1);

/// A database of its own, in which the tables have their usual names.
struct Database {
    server: String,
    name: String,
    url: String,
}

impl Database {
    async fn new() -> Self {
        let server = std::env::var("POSTHOUSE_TEST_POSTGRES_URL")
            .expect("run: scripts/services start && eval \"$(scripts/services env)\"");
        let name = format!("recipes_{:08x}", fastrand::u32(..));
        let (base, _) = server.rsplit_once('/').expect("a URL with a database");
        let database = Self { url: format!("{base}/{name}"), name, server };
        database.on_server(format!("CREATE DATABASE {}", database.name)).await;
        database
    }

    async fn on_server(&self, sql: String) {
        let mut conn = PgConnection::connect(&self.server).await.expect("postgres");
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.expect("it works");
        conn.close().await.expect("close");
    }

    async fn remove(self) {
        self.on_server(format!("DROP DATABASE {} WITH (FORCE)", self.name)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_and_their_messages_commit_together_with_every_library() {
    let database = Database::new().await;
    let pool = PgPool::connect(&database.url).await.expect("postgres");
    let outbox = Outbox::new(pool.clone());
    outbox.migrate().await.expect("migrate");
    let tables = "CREATE TABLE orders (id bigint PRIMARY KEY, item text NOT NULL); \
                  CREATE TABLE visits (event_id text PRIMARY KEY, user_id bigint NOT NULL)";
    sqlx::raw_sql(tables).execute(&pool).await.expect("tables");

    // The second order of a number fails, and leaves no message.
    let db = sea_orm::connect(&database.url).await.expect("SeaORM");
    sea_orm::place_order(&db, &outbox, 1, "book").await.expect("placed");
    sea_orm::place_order(&db, &outbox, 1, "book").await.expect_err("it is there already");

    let mut conn = AsyncPgConnection::establish(&database.url).await.expect("Diesel");
    diesel::place_order(&mut conn, &outbox, 2, "书").await.expect("placed");
    diesel::place_order(&mut conn, &outbox, 2, "书").await.expect_err("it is there already");

    let (mut client, connection) =
        ::tokio_postgres::connect(&database.url, ::tokio_postgres::NoTls).await.expect("tokio-postgres");
    tokio::spawn(connection);
    tokio_postgres::place_order(&mut client, &outbox, 3, "книга").await.expect("placed");
    tokio_postgres::place_order(&mut client, &outbox, 3, "книга").await.expect_err("it is there already");

    let function = Function::new(&database.url).expect("an address");
    function.handle("event-1", 7).await.expect("published");
    function.handle("event-1", 7).await.expect("published before");

    // Somewhere else a relay sends it all; its broker is busy at first.
    let script = Script::new().then(Outcome::Retry { after: None, error: "busy".into() });
    let route = || Route::to("fake:x").retry(Retry::new(5, SOON, SOON));
    let relay = Relay::builder(&outbox).transport("fake", script.clone()).route("orders", route()).route("visits", route());
    let relay = relay.start().await.expect("relay");
    let all = async {
        while relay.stats().delivered < 4 {
            relay.drain_once().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all are delivered within a minute");
    relay.shutdown(Duration::from_secs(5)).await;
    let delivered = script.deliveries().into_iter().filter(|d| d.outcome == Outcome::Delivered);
    let mut told: Vec<_> = delivered
        .map(|d| (d.message.key.clone().unwrap_or_default(), String::from_utf8_lossy(&d.message.payload).into_owned()))
        .collect();
    told.sort();
    let order = |id: i64, item: &str| (id.to_string(), serde_json::json!({ "order": id, "item": item }).to_string());
    assert_eq!(told, [order(1, "book"), order(2, "书"), order(3, "книга"), ("7".into(), r#"{"user":7}"#.into())]);
    pool.close().await;
    database.remove().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transport_of_ones_own_writes_lines() {
    let directory = std::env::temp_dir().join(format!("recipes-{:08x}", fastrand::u32(..)));
    std::fs::create_dir_all(&directory).expect("a directory");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(directory.join("a.db")).create_if_missing(true);
    let outbox = Outbox::new(sqlx::SqlitePool::connect_with(options).await.expect("sqlite"));
    outbox.migrate().await.expect("migrate");
    let mut tx = outbox.begin().await.expect("begin");
    for (to, payload) in [("lines:a.txt", "one"), ("lines:a.txt", "two"), ("lines:../b.txt", "never")] {
        outbox.publish(&mut tx, Message::to(to).key("k").payload(payload)).await.expect("publish");
    }
    outbox.commit(tx).await.expect("commit");
    let relay = Relay::builder(&outbox).transport("lines", Lines::new(&directory)).start().await.expect("relay");
    relay.drain_once().await;
    let stats = relay.stats();
    assert_eq!((stats.delivered, stats.failed), (2, 1));
    relay.shutdown(Duration::from_secs(5)).await;
    assert_eq!(std::fs::read_to_string(directory.join("a.txt")).expect("the file"), "one\ntwo\n");
    outbox.pool().close().await;
    std::fs::remove_dir_all(directory).expect("removed");
}
