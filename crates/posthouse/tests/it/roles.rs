//! An account with exactly the grants of docs/sql-contract.md can publish, or consume, and nothing else.

use std::time::Duration;

use posthouse::inbox::{Handled, Handler, HandlerError, Inbox, Incoming};
use posthouse::store::{Backend, InboxStatus};
use posthouse::{InboxSettings, Message, MessageId, Retry, Tx};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, PgPool};

use crate::support::{MySql, Place, Postgres, SOON, TestDb, outbox_at, wait_for};

const CONTRACT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sql-contract.md");

/// The grants that the page gives under a heading for a database, one statement each, in its order.
fn documented(heading: &str, database: &str) -> Vec<String> {
    let page = std::fs::read_to_string(CONTRACT).expect("docs/sql-contract.md");
    let (_, section) = page.split_once(&format!("\n{heading}\n")).expect("the section about grants");
    let (_, section) = section.split_once(&format!("\n{database}:\n\n```sql\n")).expect("a block of SQL");
    let (block, _) = section.split_once("```").expect("the end of the block");
    let lines: Vec<_> = block.lines().filter(|line| !line.starts_with("--")).collect();
    lines.join("\n").split(';').map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()).collect()
}

/// Each one is refused for want of a privilege, as `code` says.
async fn refused<DB>(pool: &sqlx::Pool<DB>, code: &str, statements: &[String])
where
    DB: sqlx::Database,
    for<'c> &'c sqlx::Pool<DB>: Executor<'c, Database = DB>,
{
    for statement in statements {
        let Err(e) = pool.execute(sqlx::raw_sql(AssertSqlSafe(statement.clone()))).await else { panic!("may do: {statement}") };
        let found = e.as_database_error().and_then(|d| d.code()).unwrap_or_default().into_owned();
        assert_eq!(found, code, "{statement}: {e}");
    }
}

async fn destinations<T: TestDb>(place: &Place<T::Db>) -> Vec<String> {
    let outbox = place.outbox();
    let mut conn = place.pool.acquire().await.unwrap();
    let found = posthouse::testing::published_in(&outbox, &mut conn).await.unwrap();
    found.into_iter().map(|m| m.destination).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_on_postgres_can_publish_and_no_more() {
    let place = Postgres::place().await;
    let owner = place.outbox();
    owner.migrate().await.unwrap();
    let schema = place.schema.clone().unwrap();
    let role = format!("shop_{schema}");
    Postgres::execute(&place.pool, format!("CREATE ROLE {role} LOGIN")).await;
    let grants: Vec<_> = documented("## Grants", "PostgreSQL")
        .into_iter()
        .map(|g| {
            assert!(g.ends_with(" TO shop"), "{g}");
            g.replace(" TO shop", &format!(" TO {role}"))
                .replace("SCHEMA public", &format!("SCHEMA {schema}"))
                .replace("posthouse_", &format!("{schema}.posthouse_"))
        })
        .collect();
    let [usage, publish, dedup, returning] = &grants[..] else { panic!("{grants:#?}") };
    Postgres::execute(&place.pool, format!("{usage}; {publish}")).await;

    let options = (*place.pool.connect_options()).clone().username(&role);
    let pool = PgPool::connect_with(options).await.unwrap();
    let shop = outbox_at(pool.clone(), Some(&schema));
    let table = |name: &str| format!("{schema}.posthouse_{name}");
    let message = table("message");

    // The library, one and many, and plain SQL.
    shop.publish_alone(Message::to("one").key("k").header("a", "b").max_attempts(3)).await.unwrap();
    let mut tx = shop.begin().await.unwrap();
    shop.publish_many(&mut tx, [Message::to("two"), Message::to("three")]).await.unwrap();
    tx.commit().await.unwrap();
    Postgres::execute(&pool, format!("INSERT INTO {message} (destination) VALUES ('plain')")).await;
    assert_eq!(destinations::<Postgres>(&place).await, ["one", "two", "three", "plain"]);

    // A dedup key and RETURNING need their own grants.
    let denied = shop.publish_alone(Message::to("once").dedup_key("k")).await.unwrap_err();
    assert!(matches!(&denied, posthouse::Error::Database(e) if e.as_database_error().unwrap().code().unwrap() == "42501"));
    let with_id = format!("INSERT INTO {message} (destination) VALUES ('id') RETURNING id");
    refused(&pool, "42501", std::slice::from_ref(&with_id)).await;
    Postgres::execute(&place.pool, dedup.clone()).await;
    for _ in 0..2 {
        assert_eq!(shop.publish_alone(Message::to("once").dedup_key("k")).await.unwrap(), MessageId::from("k"));
    }
    let mut tx = shop.begin().await.unwrap();
    shop.publish_many(&mut tx, [Message::to("no").dedup_key("k"), Message::to("many").dedup_key("l")]).await.unwrap();
    tx.commit().await.unwrap();
    Postgres::execute(&place.pool, returning.clone()).await;
    Postgres::execute(&pool, with_id).await;
    assert_eq!(destinations::<Postgres>(&place).await, ["one", "two", "three", "plain", "once", "many", "id"]);

    // With every documented grant there is nothing else it may do.
    let mut statements = vec![
        format!("SELECT payload FROM {message}"),
        format!("SELECT * FROM {message}"),
        format!("SELECT count(destination) FROM {message}"),
        format!("INSERT INTO {message} (destination) VALUES ('a') RETURNING payload"),
        format!("INSERT INTO {message} (id, destination) OVERRIDING SYSTEM VALUE VALUES (1, 'a')"),
        format!("INSERT INTO {message} (destination, created_at) VALUES ('a', now())"),
        format!("UPDATE {message} SET destination = 'a'"),
        format!("INSERT INTO {} (house, id, destination, size) VALUES (0, 1, 'a', 0)", table("pending")),
        format!("SELECT message_id FROM {}", table("dedup")),
        format!("SELECT {}()", table("enqueue")),
        format!("CREATE TABLE {} (a int)", table("mine")),
    ];
    let relations: Vec<String> = sqlx::query_scalar(
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
          WHERE n.nspname = $1 AND c.relkind IN ('r', 'p', 'v') ORDER BY 1",
    )
    .bind(&schema)
    .fetch_all(&place.pool)
    .await
    .unwrap();
    assert!(relations.contains(&"posthouse_outbox".to_owned()) && relations.len() > 10, "{relations:?}");
    for name in relations {
        statements.push(format!("SELECT * FROM {schema}.{name}"));
        if name != "posthouse_outbox" {
            statements.push(format!("DELETE FROM {schema}.{name}"));
            statements.push(format!("TRUNCATE {schema}.{name}"));
            statements.push(format!("DROP TABLE {schema}.{name}"));
        }
    }
    refused(&pool, "42501", &statements).await;

    pool.close().await;
    Postgres::execute(&place.pool, format!("DROP SCHEMA {schema} CASCADE; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_on_mysql_can_publish_and_no_more() {
    let place = MySql::place().await;
    let owner = place.outbox();
    owner.migrate().await.unwrap();
    let (_, database) = place.url.rsplit_once('/').unwrap();
    let account = format!("'shop_{database}'@'%'");
    MySql::execute(&place.pool, format!("CREATE USER {account} IDENTIFIED BY 'posthouse'")).await;
    let grants: Vec<_> = documented("## Grants", "MySQL and MariaDB")
        .into_iter()
        .map(|g| {
            assert!(g.ends_with(" TO 'shop'@'%'"), "{g}");
            g.replace("'shop'@'%'", &account).replace("ON shop.", &format!("ON {database}."))
        })
        .collect();
    let [publish, dedup] = &grants[..] else { panic!("{grants:#?}") };
    MySql::execute(&place.pool, publish.clone()).await;

    let options = (*place.pool.connect_options()).clone().username(&format!("shop_{database}")).password("posthouse");
    let pool = MySqlPool::connect_with(options).await.unwrap();
    let shop = outbox_at(pool.clone(), None);

    shop.publish_alone(Message::to("one").key("k").header("a", "b").max_attempts(3)).await.unwrap();
    let mut tx = shop.begin().await.unwrap();
    shop.publish_many(&mut tx, [Message::to("two"), Message::to("three")]).await.unwrap();
    tx.commit().await.unwrap();
    MySql::execute(&pool, "INSERT INTO posthouse_message (destination) VALUES ('plain')".into()).await;
    assert_eq!(destinations::<MySql>(&place).await, ["one", "two", "three", "plain"]);

    shop.publish_alone(Message::to("once").dedup_key("k")).await.unwrap_err();
    MySql::execute(&place.pool, dedup.clone()).await;
    for _ in 0..2 {
        assert_eq!(shop.publish_alone(Message::to("once").dedup_key("k")).await.unwrap(), MessageId::from("k"));
    }
    let mut tx = shop.begin().await.unwrap();
    shop.publish_many(&mut tx, [Message::to("no").dedup_key("k"), Message::to("many").dedup_key("l")]).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(destinations::<MySql>(&place).await, ["one", "two", "three", "plain", "once", "many"]);

    let mut statements: Vec<_> = [
        "SELECT payload FROM posthouse_message",
        "SELECT id FROM posthouse_message",
        "UPDATE posthouse_message SET destination = 'a'",
        "INSERT INTO posthouse_message (id, destination) VALUES (1, 'a')",
        "INSERT INTO posthouse_message (destination, created_at) VALUES ('a', '2000-01-01')",
        "INSERT INTO posthouse_pending (house, id, destination, size) VALUES (0, 1, 'a', 0)",
        "SELECT dedup_key FROM posthouse_dedup",
        "SELECT posthouse_hash('a', 'b', 'c')",
        "CREATE TABLE mine (a INT)",
    ]
    .map(str::to_owned)
    .into();
    let relations: Vec<String> = sqlx::query_scalar(
        "SELECT CONVERT(table_name USING utf8mb4) AS name FROM information_schema.tables WHERE table_schema = DATABASE()",
    )
    .fetch_all(&place.pool)
    .await
    .unwrap();
    assert!(relations.contains(&"posthouse_outbox".to_owned()) && relations.len() > 10, "{relations:?}");
    for name in relations {
        statements.push(format!("SELECT * FROM {name}"));
        statements.push(format!("DELETE FROM {name}"));
        statements.push(format!("DROP {} {name}", if name == "posthouse_outbox" { "VIEW" } else { "TABLE" }));
    }
    // SQLSTATE 42000, access denied: which of the kinds of denial it is depends on what was asked for.
    refused(&pool, "42000", &statements).await;

    pool.close().await;
    MySql::execute(&place.pool, format!("DROP USER {account}; DROP DATABASE {database}")).await;
}

struct Works;

impl<DB: Backend> Handler<DB> for Works {
    type Message = i64;
    async fn handle(&self, _: &mut Tx<DB>, _: i64) -> Result<(), HandlerError> {
        Ok(())
    }
}

/// With everything but the right to delete: messages have their effect once, failures are run again, and nothing comes of the
/// retention; then with that right.
async fn consumes<T: TestDb>(owner: &Place<T::Db>, pool: sqlx::Pool<T::Db>, delete: String) {
    let mut settings = InboxSettings::default();
    settings.retry = Retry::new(5, Duration::from_millis(40), Duration::from_millis(100));
    settings.interval = Duration::from_millis(20);
    settings.retention = Some(Duration::from_secs(1));
    settings.purge_grace = Duration::ZERO;
    let inbox = Inbox::of(&outbox_at(pool, owner.schema.as_deref()), "shop", settings).unwrap();
    let inbox = inbox.on("count", Works);
    let works = async |_: &mut Tx<T::Db>| -> Result<(), HandlerError> { Ok(()) };
    let fails = async |_: &mut Tx<T::Db>| -> Result<(), HandlerError> { Err(HandlerError::retry("not yet")) };
    let status = async |id: &str| inbox.store().show("shop", id).await.unwrap().map(|d| d.row.status);
    let message = |id: &str| Incoming::new(id, "7").typed("count");

    assert_eq!(inbox.process(&message("old"), works).await.unwrap(), Handled::Processed);
    assert_eq!(inbox.process(&message("old"), works).await.unwrap(), Handled::Duplicate);
    assert_eq!(inbox.process(&message("again").redelivered(true), works).await.unwrap(), Handled::Processed);
    let worker = inbox.shared_worker().await.unwrap();
    // Long enough for the first one to be old, and for many tries to remove it.
    for n in 0..15 {
        let id = format!("failing-{n}");
        assert!(matches!(inbox.process(&message(&id), fails).await.unwrap(), Handled::WillRetry(_)));
        wait_for("the retry", SOON, async || status(&id).await == Some(InboxStatus::Success)).await;
        tokio::time::sleep(Duration::from_millis(80)).await;
    }
    assert_eq!(status("old").await, Some(InboxStatus::Success));
    T::execute(&owner.pool, delete).await;
    wait_for("the old one to go", SOON, async || status("old").await.is_none()).await;
    worker.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_on_postgres_needs_no_more_than_documented() {
    let place = Postgres::place().await;
    place.outbox().migrate().await.unwrap();
    let schema = place.schema.clone().unwrap();
    let role = format!("eats_{schema}");
    Postgres::execute(&place.pool, format!("CREATE ROLE {role} LOGIN")).await;
    let grants: Vec<_> = documented("### Consumers", "PostgreSQL")
        .into_iter()
        .map(|g| {
            assert!(g.ends_with(" TO inventory"), "{g}");
            g.replace(" TO inventory", &format!(" TO {role}"))
                .replace("SCHEMA public", &format!("SCHEMA {schema}"))
                .replace("posthouse_", &format!("{schema}.posthouse_"))
        })
        .collect();
    let [usage, consume, delete] = &grants[..] else { panic!("{grants:#?}") };
    Postgres::execute(&place.pool, format!("{usage}; {consume}")).await;
    let options = (*place.pool.connect_options()).clone().username(&role);
    let pool = PgPool::connect_with(options).await.unwrap();
    let statements = [
        format!("DELETE FROM {schema}.posthouse_inbox"),
        format!("SELECT * FROM {schema}.posthouse_message"),
        format!("SELECT * FROM {schema}.posthouse_audit"),
    ];
    refused(&pool, "42501", &statements).await;
    consumes::<Postgres>(&place, pool.clone(), delete.clone()).await;
    refused(&pool, "42501", &[format!("TRUNCATE {schema}.posthouse_inbox"), statements[1].clone()]).await;
    pool.close().await;
    Postgres::execute(&place.pool, format!("DROP SCHEMA {schema} CASCADE; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_on_mysql_needs_no_more_than_documented() {
    let place = MySql::place().await;
    place.outbox().migrate().await.unwrap();
    let (_, database) = place.url.rsplit_once('/').unwrap();
    let account = format!("'eats_{database}'@'%'");
    MySql::execute(&place.pool, format!("CREATE USER {account} IDENTIFIED BY 'posthouse'")).await;
    let grants: Vec<_> = documented("### Consumers", "MySQL and MariaDB")
        .into_iter()
        .map(|g| {
            assert!(g.ends_with(" TO 'inventory'@'%'"), "{g}");
            g.replace("'inventory'@'%'", &account).replace("ON inventory.", &format!("ON {database}."))
        })
        .collect();
    let [consume, delete] = &grants[..] else { panic!("{grants:#?}") };
    MySql::execute(&place.pool, consume.clone()).await;
    let options = (*place.pool.connect_options()).clone().username(&format!("eats_{database}")).password("posthouse");
    let pool = MySqlPool::connect_with(options).await.unwrap();
    let statements = ["DELETE FROM posthouse_inbox", "SELECT * FROM posthouse_message", "SELECT * FROM posthouse_audit"];
    refused(&pool, "42000", &statements.map(str::to_owned)).await;
    consumes::<MySql>(&place, pool.clone(), delete.clone()).await;
    pool.close().await;
    MySql::execute(&place.pool, format!("DROP USER {account}; DROP DATABASE {database}")).await;
}
