//! An account with exactly the grants of docs/sql-contract.md can publish, and nothing else.

use posthouse::{Message, MessageId};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, PgPool};

use crate::support::{MySql, Place, Postgres, TestDb, outbox_at};

const CONTRACT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/sql-contract.md");

/// The grants that the page gives for a database, one statement each, in its order.
fn documented(database: &str) -> Vec<String> {
    let page = std::fs::read_to_string(CONTRACT).expect("docs/sql-contract.md");
    let (_, section) = page.split_once("## Grants").expect("the section about grants");
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
    let grants: Vec<_> = documented("PostgreSQL")
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
    let grants: Vec<_> = documented("MySQL and MariaDB")
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
