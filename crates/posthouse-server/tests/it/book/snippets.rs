//! The Rust in the documentation, compiled, and run where there is something to run. `blocks.rs` looks for each block here, or in
//! another file of the tests and examples: what differs from all of them is a mistake.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use posthouse::{Message, Outbox, Relay};
use serde_json::json;

use super::pages::PostgresDatabase;
use crate::support::{Dir, MySqlDatabase, PATIENCE, runtime, wait_for};

type Failure = Box<dyn std::error::Error>;

/// docs/quick-start-sqlite.md.
mod sqlite {
    use std::time::Duration;

    use posthouse::{Message, Outbox, Relay};
    use serde_json::json;

    #[tokio::main]
    async fn main() -> Result<(), Box<dyn std::error::Error>> {
        let pool = sqlx::SqlitePool::connect("sqlite:shop.db?mode=rwc").await?;
        sqlx::query("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL)").execute(&pool).await?;

        let outbox = Outbox::new(pool);
        outbox.migrate().await?;
        let relay = Relay::builder(&outbox)
            .local("send-mail", |order: serde_json::Value| async move {
                println!("mail about {order}");
                Ok::<_, std::io::Error>(())
            })
            .start()
            .await?;

        let mut tx = outbox.begin().await?;
        sqlx::query("INSERT INTO orders (item) VALUES (?)").bind("lamp").execute(&mut *tx).await?;
        outbox.publish(&mut tx, Message::to("local:send-mail").key("lamp").json(&json!({ "item": "lamp" }))).await?;
        outbox.commit(tx).await?; // both rows, or none

        tokio::signal::ctrl_c().await?; // the relay works until then
        relay.shutdown(Duration::from_secs(30)).await;
        Ok(())
    }

    pub(super) fn run() {
        main().unwrap();
    }
}

/// docs/quick-start-postgresql.md.
mod postgresql {
    use std::time::Duration;

    use posthouse::{Message, Outbox, Relay};
    use serde_json::json;

    #[tokio::main]
    async fn main() -> Result<(), Box<dyn std::error::Error>> {
        let pool = sqlx::PgPool::connect(&std::env::var("SHOP_DATABASE_URL")?).await?;
        sqlx::query("CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, item text NOT NULL)").execute(&pool).await?;

        let outbox = Outbox::new(pool);
        outbox.migrate().await?;
        let relay = Relay::builder(&outbox)
            .local("send-mail", |order: serde_json::Value| async move {
                println!("mail about {order}");
                Ok::<_, std::io::Error>(())
            })
            .start()
            .await?;

        let mut tx = outbox.begin().await?;
        sqlx::query("INSERT INTO orders (item) VALUES ($1)").bind("lamp").execute(&mut *tx).await?;
        outbox.publish(&mut tx, Message::to("local:send-mail").key("lamp").json(&json!({ "item": "lamp" }))).await?;
        outbox.commit(tx).await?; // both rows, or none

        tokio::signal::ctrl_c().await?; // the relay works until then
        relay.shutdown(Duration::from_secs(30)).await;
        Ok(())
    }

    pub(super) fn run() {
        main().unwrap();
    }
}

/// docs/quick-start-mysql.md.
mod mysql {
    use std::time::Duration;

    use posthouse::{Message, Outbox, Relay};
    use serde_json::json;

    #[tokio::main]
    async fn main() -> Result<(), Box<dyn std::error::Error>> {
        let pool = sqlx::MySqlPool::connect(&std::env::var("SHOP_DATABASE_URL")?).await?;
        sqlx::query("CREATE TABLE IF NOT EXISTS orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, item TEXT NOT NULL)")
            .execute(&pool)
            .await?;

        let outbox = Outbox::new(pool);
        outbox.migrate().await?;
        let relay = Relay::builder(&outbox)
            .local("send-mail", |order: serde_json::Value| async move {
                println!("mail about {order}");
                Ok::<_, std::io::Error>(())
            })
            .start()
            .await?;

        let mut tx = outbox.begin().await?;
        sqlx::query("INSERT INTO orders (item) VALUES (?)").bind("lamp").execute(&mut *tx).await?;
        outbox.publish(&mut tx, Message::to("local:send-mail").key("lamp").json(&json!({ "item": "lamp" }))).await?;
        outbox.commit(tx).await?; // both rows, or none

        tokio::signal::ctrl_c().await?; // the relay works until then
        relay.shutdown(Duration::from_secs(30)).await;
        Ok(())
    }

    pub(super) fn run() {
        main().unwrap();
    }
}

/// Not a test by itself: one of the programs above, in a process of its own, as it would be started.
#[test]
fn child() {
    match std::env::var("POSTHOUSE_BOOK").as_deref() {
        Ok("sqlite") => sqlite::run(),
        Ok("postgresql") => postgresql::run(),
        Ok("mysql") => mysql::run(),
        _ => {}
    }
}

/// Starts a program, waits until its message arrived, and stops it as a terminal does.
fn works(name: &str, url: &str) {
    let dir = Dir::new();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "book::snippets::child", "--nocapture", "--test-threads=1"])
        .current_dir(dir.path())
        .env("POSTHOUSE_BOOK", name)
        .env("SHOP_DATABASE_URL", url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let (tell, told) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            // The test may have stopped waiting.
            let _ = tell.send(line);
        }
    });
    let mut said = Vec::new();
    while !said.iter().any(|line: &String| line.contains("mail about {\"item\":\"lamp\"}")) {
        match told.recv_timeout(PATIENCE) {
            Ok(line) => said.push(line),
            Err(_) => {
                let _ = child.kill();
                panic!("{name}: no mail, but {said:?}, {:?}", child.wait());
            }
        }
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = wait_for("the program ends", || child.try_wait().unwrap());
    assert!(status.success(), "{name}: {status}");
    reader.join().unwrap();
}

#[test]
fn the_program_for_sqlite_works() {
    works("sqlite", "");
}

#[test]
fn the_program_for_postgres_works() {
    works("postgresql", &PostgresDatabase::new().url);
}

#[test]
fn the_program_for_mysql_works() {
    works("mysql", &MySqlDatabase::new().url);
}

/// README.md.
#[test]
fn the_first_lines_of_the_readme_publish() {
    async fn readme(pool: sqlx::SqlitePool) -> Result<(), Failure> {
        let outbox = Outbox::new(pool); // sqlx::PgPool, MySqlPool or SqlitePool
        outbox.migrate().await?;
        let relay = Relay::builder(&outbox)
            .local("send-mail", |order: serde_json::Value| async move {
                println!("sending mail about {order}");
                Ok::<_, std::io::Error>(())
            })
            .start()
            .await?;

        let mut tx = outbox.begin().await?;
        sqlx::query("INSERT INTO orders (id) VALUES (7)").execute(&mut *tx).await?;
        outbox.publish(&mut tx, Message::to("local:send-mail").key(7).json(&json!({ "order": 7 }))).await?;
        outbox.commit(tx).await?; // commits, then wakes the relay

        relay.shutdown(Duration::from_secs(30)).await;
        Ok(())
    }

    let dir = Dir::new();
    runtime().block_on(async {
        let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}?mode=rwc", dir.path().join("x.db").display())).await.unwrap();
        sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY)").execute(&pool).await.unwrap();
        readme(pool.clone()).await.unwrap();
        let published: Vec<String> =
            sqlx::query_scalar("SELECT destination FROM posthouse_outbox").fetch_all(&pool).await.unwrap();
        assert_eq!(published, ["local:send-mail"]);
        pool.close().await;
    });
}

/// docs/sql-contract.md: other drivers. Needs what the library's own tests need as well.
#[test]
fn other_drivers_publish_as_the_contract_says() {
    async fn on_postgres(
        client: &mut tokio_postgres::Client,
        outbox: &Outbox<sqlx::Postgres>,
        order: serde_json::Value,
    ) -> Result<(), Failure> {
        use posthouse::store::Param;
        use tokio_postgres::types::ToSql;

        fn value(param: &Param) -> &(dyn ToSql + Sync) {
            match param {
                Param::Text(text) => text,
                Param::Bytes(bytes) => bytes,
                Param::Int(int) => int,
            }
        }

        let tx = client.transaction().await?;
        tx.execute("INSERT INTO orders (id) VALUES ($1)", &[&7_i32]).await?;
        let statement = outbox.insert_statement(Message::to("inventory.deduct").key(7).json(&order))?;
        let values: Vec<_> = statement.params.iter().map(value).collect();
        tx.execute(&statement.sql, &values).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn on_mysql(
        conn: &mut mysql_async::Conn,
        outbox: &Outbox<sqlx::MySql>,
        order: serde_json::Value,
    ) -> Result<(), Failure> {
        use mysql_async::TxOpts;
        use mysql_async::prelude::Queryable;
        use posthouse::store::Param;

        fn value(param: Param) -> mysql_async::Value {
            match param {
                Param::Text(text) => text.into(),
                Param::Bytes(bytes) => bytes.into(),
                Param::Int(int) => int.into(),
            }
        }

        let mut tx = conn.start_transaction(TxOpts::default()).await?;
        let statement = outbox.insert_statement(Message::to("inventory.deduct").key(7).json(&order))?;
        let values: Vec<_> = statement.params.into_iter().map(value).collect();
        tx.exec_drop(statement.sql, values).await?;
        tx.commit().await?;
        Ok(())
    }

    let (postgres, mysql) = (PostgresDatabase::new(), MySqlDatabase::new());
    runtime().block_on(async {
        let pool = sqlx::PgPool::connect(&postgres.url).await.unwrap();
        sqlx::query("CREATE TABLE orders (id int)").execute(&pool).await.unwrap();
        let outbox = Outbox::new(pool.clone());
        outbox.migrate().await.unwrap();
        let (mut client, connection) = tokio_postgres::connect(&postgres.url, tokio_postgres::NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        on_postgres(&mut client, &outbox, json!({ "order": 7 })).await.unwrap();
        let keys: Vec<String> = sqlx::query_scalar("SELECT message_key FROM posthouse_outbox").fetch_all(&pool).await.unwrap();
        assert_eq!(keys, ["7"]);
        drop(client);
        connection.await.unwrap().unwrap();
        pool.close().await;

        let pool = sqlx::MySqlPool::connect(&mysql.url).await.unwrap();
        let outbox = Outbox::new(pool.clone());
        outbox.migrate().await.unwrap();
        let mut conn = mysql_async::Conn::from_url(&mysql.url).await.unwrap();
        on_mysql(&mut conn, &outbox, json!({ "order": 7 })).await.unwrap();
        let keys: Vec<String> = sqlx::query_scalar("SELECT message_key FROM posthouse_outbox").fetch_all(&pool).await.unwrap();
        assert_eq!(keys, ["7"]);
        conn.disconnect().await.unwrap();
        pool.close().await;
    });
}

/// Compiled alone: these name brokers that aren't there. The examples and the tests of transports and consumers run the like.
#[expect(dead_code, reason = "compiled, not run")]
mod compiled {
    use std::time::Duration;

    use posthouse::consumer::{Consumer, RabbitMqConsumer};
    use posthouse::inbox::HandlerError;
    use posthouse::transport::{Kafka, RabbitMq};
    use posthouse::{Adopted, AdoptedPreset, AdoptedRelay, ConsumerSettings, IdFrom, Inbox, Message, Outbox, Relay, Route, Tx};
    use sqlx::{MySql, PgPool, Postgres};

    use super::Failure;

    /// README.md.
    async fn to_a_broker(outbox: Outbox<Postgres>, mut tx: Tx<Postgres>, order: serde_json::Value) -> Result<Relay, Failure> {
        let relay = Relay::builder(&outbox)
            .transport("amqp", RabbitMq::new("amqp://user:password@localhost:5672")?)
            .route("orders", Route::to("amqp:shop.orders/order.placed"))
            .start()
            .await?;
        outbox.publish(&mut tx, Message::to("orders").key(7).json(&order)).await?;
        Ok(relay)
    }

    #[derive(serde::Deserialize)]
    struct DeductStock {
        count: i32,
        sku: String,
    }

    /// README.md.
    async fn once(pool: PgPool) -> Result<(), Failure> {
        async fn deduct(tx: &mut Tx<Postgres>, m: DeductStock) -> Result<(), HandlerError> {
            sqlx::query("UPDATE stock SET count = count - $1 WHERE sku = $2")
                .bind(m.count)
                .bind(&m.sku)
                .execute(&mut **tx)
                .await?;
            tx.publish(Message::to("stock.deducted").key(&m.sku)).await?; // goes out with the effect, or not at all
            Ok(())
        }

        let inbox = Inbox::new(pool, "inventory")?.on_fn("stock.deduct.v1", deduct);
        inbox.outbox().migrate().await?;
        let consumer = RabbitMqConsumer::new("amqp://user:password@localhost:5672", "inventory.deduct")?.start(&inbox).await?;
        // or KafkaConsumer, NatsConsumer, or Webhooks for a route of your axum server
        consumer.shutdown(Duration::from_secs(30)).await;
        Ok(())
    }

    /// docs/migrate-from-cap.md.
    async fn instead_of_cap(inbox: Inbox<Postgres>) -> Result<Consumer, Failure> {
        let mut settings = ConsumerSettings::default();
        settings.id_from = IdFrom::Header("cap-msg-id".into());
        let consumer = RabbitMqConsumer::new("amqp://user:password@localhost:5672", "inventory.v1")?.settings(settings);
        let consumer = consumer.start(&inbox).await?;
        Ok(consumer)
    }

    /// examples/lottery/README.md.
    async fn prizes(outbox: Outbox<MySql>, brokers: String) -> Result<AdoptedRelay, Failure> {
        let mut prizes = Adopted::preset(AdoptedPreset::MqState); // user_strategy_export_*, mq_state, uuid, …
        prizes.unsent_after = Some(Duration::from_secs(2)); // longer than the lottery's own first send takes
        let relay = AdoptedRelay::builder(&outbox, "prizes", prizes).transport("kafka", Kafka::new(&*brokers)?).start().await?;
        Ok(relay)
    }
}
