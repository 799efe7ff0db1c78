//! MySQL or MariaDB: a database per test.

use sqlx::mysql::{MySqlConnectOptions, MySqlPool, MySqlPoolOptions};

use super::{Connection, DEADLINE, Fresh, TestDb, unique, url};

#[derive(Debug)]
pub(crate) struct MySql {
    pool: MySqlPool,
    database: String,
}

impl TestDb for MySql {
    type Db = sqlx::MySql;

    const HOUSES: usize = 8;
    const PAST: &'static str = "'2000-01-01 00:00:00'";
    const HOUSE_OF: &'static str = "{house_of}(m.destination, m.message_key, m.message_id)";

    async fn empty() -> Self {
        let options: MySqlConnectOptions = url("POSTHOUSE_TEST_MYSQL_URL").parse().expect("POSTHOUSE_TEST_MYSQL_URL");
        let database = unique("t");
        let pool = |options| MySqlPoolOptions::new().max_connections(12).acquire_timeout(DEADLINE).connect_with(options);
        let first = pool(options.clone()).await.expect("the server that POSTHOUSE_TEST_MYSQL_URL names (scripts/services start)");
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {database}")))
            .execute(&first)
            .await
            .expect("create a database");
        first.close().await;
        Self { pool: pool(options.database(&database)).await.expect("the new database"), database }
    }

    fn pool(&self) -> &MySqlPool {
        &self.pool
    }

    async fn remove(self) {
        let drop = format!("DROP DATABASE {}", self.database);
        sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&self.pool).await.expect("drop the database");
        self.pool.close().await;
    }

    async fn run(conn: &mut Connection<Self>, sql: String) -> Result<u64, sqlx::Error> {
        Ok(sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(conn).await?.rows_affected())
    }

    async fn ints(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<i64>>, sqlx::Error> {
        let sql = format!("SELECT CAST(x AS SIGNED) FROM ({}) q", with_column(&sql));
        sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(conn).await
    }

    async fn texts(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<String>>, sqlx::Error> {
        // Columns of bytes and of characters alike.
        let sql = format!("SELECT CONVERT(x USING utf8mb4) FROM ({}) q", with_column(&sql));
        sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(conn).await
    }

    async fn next_id(fresh: &Fresh<Self>, id: i64) {
        fresh.run(&format!("ALTER TABLE {{message}} AUTO_INCREMENT = {id}")).await;
        fresh.store.upkeep().await.expect("partitions for the new ids");
    }
}

/// Names the one column of a query `x`. An ORDER BY within a derived table needs a LIMIT to be kept.
fn with_column(sql: &str) -> String {
    let (select, rest) = sql.split_once(" FROM ").unwrap_or((sql, ""));
    let from = if rest.is_empty() { String::new() } else { format!(" FROM {rest}") };
    format!("{select} AS x{from} LIMIT 1000000")
}
