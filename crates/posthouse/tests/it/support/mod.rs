//! Fresh tables in real databases, and waiting for conditions.
#![allow(dead_code, reason = "each test module uses its own part")]

pub(crate) mod broker;
pub(crate) mod certificates;
pub(crate) mod proxy;
mod waste;

use std::time::{Duration, Instant};

use posthouse::Outbox;
use posthouse::store::{Backend, MessageFilter, MessageRow, Store};
use sqlx::{AssertSqlSafe, MySqlPool, PgPool, SqlitePool};
use waste::Waste;

/// How long a test waits for something that should happen soon. Wide: the machine may be busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A database the tests run on.
pub(crate) trait TestDb: Sized + Send + Sync + 'static {
    type Db: Backend;
    const NAME: &'static str;
    /// A pool on a server (or file) of this kind, in a database, schema or file of its own.
    fn place() -> impl Future<Output = Place<Self::Db>> + Send;
    /// A pool by address, for child processes and proxies.
    fn connect(url: &str) -> impl Future<Output = sqlx::Pool<Self::Db>> + Send;
    /// Runs statements that take no values.
    fn execute(pool: &sqlx::Pool<Self::Db>, sql: String) -> impl Future<Output = ()> + Send;
    /// Runs statements inside a transaction.
    fn execute_in(conn: &mut <Self::Db as sqlx::Database>::Connection, sql: String) -> impl Future<Output = ()> + Send;
    /// Runs statements inside a transaction; their error.
    fn try_execute_in(
        conn: &mut <Self::Db as sqlx::Database>::Connection,
        sql: String,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
    /// One number.
    fn number(pool: &sqlx::Pool<Self::Db>, sql: String) -> impl Future<Output = i64> + Send;

    /// One number, inside a transaction.
    fn number_in(conn: &mut <Self::Db as sqlx::Database>::Connection, sql: String) -> impl Future<Output = i64> + Send;
    /// The type to cast to for a 64-bit integer.
    const BIGINT: &'static str;

    /// Fresh, migrated tables.
    fn fresh() -> impl Future<Output = Outbox<Self::Db>> + Send {
        async {
            let outbox = Self::place().await.outbox();
            outbox.migrate().await.expect("migrate");
            outbox
        }
    }
}

/// Where a test's tables are.
pub(crate) struct Place<DB: Backend> {
    pub(crate) pool: sqlx::Pool<DB>,
    pub(crate) url: String,
    pub(crate) schema: Option<String>,
}

impl<DB: Backend> Place<DB> {
    pub(crate) fn outbox(&self) -> Outbox<DB> {
        outbox_at(self.pool.clone(), self.schema.as_deref())
    }
}

pub(crate) fn outbox_at<DB: Backend>(pool: sqlx::Pool<DB>, schema: Option<&str>) -> Outbox<DB> {
    let builder = Outbox::builder(pool);
    match schema {
        Some(schema) => builder.schema(schema),
        None => builder,
    }
    .build()
    .expect("outbox")
}

pub(crate) fn server_url(variable: &str) -> String {
    std::env::var(variable)
        .unwrap_or_else(|_| panic!("{variable} is not set; run: scripts/services start && eval \"$(scripts/services env)\""))
}

fn fresh_name() -> String {
    format!("t_{:016x}", fastrand::u64(..))
}

macro_rules! statements {
    () => {
        async fn execute(pool: &sqlx::Pool<Self::Db>, sql: String) {
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        }

        async fn execute_in(conn: &mut <Self::Db as sqlx::Database>::Connection, sql: String) {
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(conn).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        }

        async fn try_execute_in(conn: &mut <Self::Db as sqlx::Database>::Connection, sql: String) -> Result<(), sqlx::Error> {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await.map(|_| ())
        }

        async fn number(pool: &sqlx::Pool<Self::Db>, sql: String) -> i64 {
            let n: Option<i64> =
                sqlx::query_scalar(AssertSqlSafe(sql.clone())).fetch_one(pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
            n.unwrap_or(0)
        }

        async fn number_in(conn: &mut <Self::Db as sqlx::Database>::Connection, sql: String) -> i64 {
            let n: Option<i64> =
                sqlx::query_scalar(AssertSqlSafe(sql.clone())).fetch_one(conn).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
            n.unwrap_or(0)
        }
    };
}

pub(crate) struct Postgres;

impl TestDb for Postgres {
    type Db = sqlx::Postgres;
    const NAME: &'static str = "postgres";
    const BIGINT: &'static str = "bigint";

    async fn place() -> Place<Self::Db> {
        let (url, name) = (server_url("POSTHOUSE_TEST_POSTGRES_URL"), fresh_name());
        waste::later(Waste::Schema { url: url.clone(), name: name.clone() });
        Place { pool: Self::connect(&url).await, url, schema: Some(name) }
    }

    async fn connect(url: &str) -> PgPool {
        PgPool::connect_lazy(url).expect("postgres")
    }

    statements!();
}

pub(crate) struct MySql;

impl TestDb for MySql {
    type Db = sqlx::MySql;
    const NAME: &'static str = "mysql";
    const BIGINT: &'static str = "signed";

    async fn place() -> Place<Self::Db> {
        let server = server_url("POSTHOUSE_TEST_MYSQL_URL");
        let name = fresh_name();
        let admin = MySqlPool::connect(&server).await.expect("mysql");
        Self::execute(&admin, format!("CREATE DATABASE {name}")).await;
        waste::later(Waste::Database { server: server.clone(), name: name.clone() });
        let (base, _) = server.rsplit_once('/').expect("a URL with a database");
        let url = format!("{base}/{name}");
        Place { pool: Self::connect(&url).await, url, schema: None }
    }

    async fn connect(url: &str) -> MySqlPool {
        MySqlPool::connect_lazy(url).expect("mysql")
    }

    statements!();
}

pub(crate) struct Sqlite;

impl TestDb for Sqlite {
    type Db = sqlx::Sqlite;
    const NAME: &'static str = "sqlite";
    const BIGINT: &'static str = "integer";

    async fn place() -> Place<Self::Db> {
        let path = std::env::temp_dir().join(format!("posthouse-{}.sqlite", fresh_name()));
        let url = format!("sqlite://{}?mode=rwc", path.display());
        waste::later(Waste::File(path));
        Place { pool: Self::connect(&url).await, url, schema: None }
    }

    async fn connect(url: &str) -> SqlitePool {
        SqlitePool::connect_lazy(url).expect("sqlite")
    }

    statements!();
}

/// `on_all_databases!(a, b)` makes the tests `postgres::a`, `mysql::a`, `sqlite::a`, … of the generic functions `a`, `b`.
macro_rules! on_all_databases {
    ($($(#[$meta:meta])* $name:ident),+ $(,)?) => {
        mod postgres { $( $(#[$meta])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<crate::support::Postgres>()).await } )+ }
        mod mysql { $( $(#[$meta])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<crate::support::MySql>()).await } )+ }
        mod sqlite { $( $(#[$meta])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<crate::support::Sqlite>()).await } )+ }
    };
}
pub(crate) use on_all_databases;

/// No test hangs: this bounds each as a whole.
pub(crate) async fn bounded(test: impl Future<Output = ()>) {
    let limit = Duration::from_secs(120) * scale() as u32;
    tokio::time::timeout(limit, test).await.unwrap_or_else(|_| panic!("the test did not end within {limit:?}"));
}

/// Waits until the condition holds; panics with `what` after the deadline.
pub(crate) async fn wait_for(what: &str, deadline: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    loop {
        if condition().await {
            return;
        }
        assert!(started.elapsed() < deadline, "waited {deadline:?} in vain: {what}");
        // Soon at first, then less and less often: asking costs the processors that others wait for.
        tokio::time::sleep((started.elapsed() / 10).clamp(Duration::from_millis(5), Duration::from_millis(50))).await;
    }
}

/// Waits until a child process dies, true, or has nothing left to do; then it is killed.
pub(crate) async fn dies(child: &mut std::process::Child, deadline: Duration, mut finished: impl AsyncFnMut() -> bool) -> bool {
    let mut died = false;
    wait_for("the child to die or to finish", deadline, async || {
        died = child.try_wait().expect("wait").is_some();
        died || finished().await
    })
    .await;
    if !died {
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
    died
}

/// Pending rows of any status.
pub(crate) async fn pending<T: TestDb>(outbox: &Outbox<T::Db>) -> i64 {
    T::number(outbox.pool(), format!("SELECT count(*) FROM {}", outbox.tables().name("pending"))).await
}

/// Every message, newest first.
pub(crate) async fn messages(store: &dyn Store) -> Vec<MessageRow> {
    let filter = MessageFilter { limit: 10_000, ..MessageFilter::default() };
    store.list(&filter).await.expect("list").rows
}

/// How often the number of full-size runs is scaled: 1 in the ordinary run, more under `scripts/test --soak`.
pub(crate) fn scale() -> usize {
    std::env::var("POSTHOUSE_TEST_SCALE").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}
