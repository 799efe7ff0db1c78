//! PostgreSQL: a schema per test.

use sqlx::postgres::{PgPool, PgPoolOptions};

use super::{Connection, DEADLINE, Fresh, TestDb, statements, unique, url};

#[derive(Debug)]
pub(crate) struct Postgres {
    pool: PgPool,
    schema: String,
}

impl TestDb for Postgres {
    type Db = sqlx::Postgres;

    const HOUSES: usize = 8;
    const PAST: &'static str = "timestamptz '2000-01-01 00:00:00Z'";
    const HOUSE_OF: &'static str = "{house_of}(m.destination, m.message_key, m.message_id)";

    async fn empty() -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(12)
            .acquire_timeout(DEADLINE)
            .connect(&url("POSTHOUSE_TEST_POSTGRES_URL"))
            .await
            .expect("the server that POSTHOUSE_TEST_POSTGRES_URL names (scripts/services start)");
        Self { pool, schema: unique("t") }
    }

    fn pool(&self) -> &PgPool {
        &self.pool
    }

    fn schema(&self) -> Option<String> {
        Some(self.schema.clone())
    }

    async fn remove(self) {
        let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", self.schema);
        sqlx::raw_sql(sqlx::AssertSqlSafe(drop)).execute(&self.pool).await.expect("drop the schema");
        self.pool.close().await;
    }

    statements!();

    async fn next_id(fresh: &Fresh<Self>, id: i64) {
        fresh.run(&format!("ALTER TABLE {{message}} ALTER id RESTART WITH {id}")).await;
        fresh.store.upkeep().await.expect("partitions for the new ids");
    }
}
