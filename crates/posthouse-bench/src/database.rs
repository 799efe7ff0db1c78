//! A fresh set of tables in each database.

use clap::ValueEnum;
use posthouse::store::Backend;
use posthouse::{Outbox, Tx};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::SqlitePoolOptions;
use sqlx::{AssertSqlSafe, Row};

/// Connections of a pool where the number is not what is measured: sqlx's default.
pub(crate) const CONNECTIONS: u32 = 10;

/// The databases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Postgres,
    Mysql,
    Sqlite,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Postgres => "postgres",
            Kind::Mysql => "mysql",
            Kind::Sqlite => "sqlite",
        }
    }

    /// The variable that names the server; SQLite has none.
    pub(crate) fn variable(self) -> Option<&'static str> {
        match self {
            Kind::Postgres => Some("POSTHOUSE_TEST_POSTGRES_URL"),
            Kind::Mysql => Some("POSTHOUSE_TEST_MYSQL_URL"),
            Kind::Sqlite => None,
        }
    }
}

/// The server that a variable names.
pub(crate) fn url(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        eprintln!("{variable} is not set; {HOW_TO_SET}");
        std::process::exit(3)
    })
}

pub(crate) const HOW_TO_SET: &str = "run: scripts/services start && eval \"$(scripts/services env)\"";

/// Ends the run with what went wrong: a figure of a failed run is worth nothing.
pub(crate) fn must<T, E: std::fmt::Display>(what: &str, result: Result<T, E>) -> T {
    result.unwrap_or_else(|e| {
        eprintln!("{what}: {e}");
        std::process::exit(1)
    })
}

/// A name that nobody else uses.
pub(crate) fn fresh_name() -> String {
    format!("bench_{:08x}", fastrand::u32(..))
}

/// A database the rig can measure: how to get a fresh set of tables, and the raw loops that set the limit.
pub(crate) trait Rig: Backend {
    const KIND: Kind;
    /// A fresh, migrated set of tables, with a pool of at most `connections`.
    fn fresh(connections: u32) -> impl Future<Output = Outbox<Self>> + Send;
    /// Drops the tables and closes the pool.
    fn remove(outbox: Outbox<Self>) -> impl Future<Output = ()> + Send;
    /// Reads and deletes everything pending, one batch after the other on one connection; answers how many there were.
    fn raw_drain(outbox: &Outbox<Self>, batch: usize) -> impl Future<Output = Result<usize, sqlx::Error>> + Send;
    /// Runs one statement that takes no values.
    fn execute(outbox: &Outbox<Self>, sql: String) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
    /// A transaction with one row in `orders`, and perhaps one more plain row beside it.
    fn business(
        outbox: &Outbox<Self>,
        tx: &mut Tx<Self>,
        order: i64,
        plain: Option<&[u8]>,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
    /// Takes `count` of an article out of `bench_stock` and writes one row into `bench_movement`.
    fn deduct(
        tables: &StockTables,
        conn: &mut Self::Connection,
        order: i64,
        sku: &str,
        count: i64,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
    /// How many messages are pending.
    fn pending(outbox: &Outbox<Self>) -> impl Future<Output = Result<i64, sqlx::Error>> + Send;
    /// Position in the write-ahead log in bytes, where the database tells.
    fn wal(outbox: &Outbox<Self>) -> impl Future<Output = Option<i64>> + Send;
    /// Transactions (MySQL: statements) that the server has counted, where it does.
    fn statements_seen(outbox: &Outbox<Self>) -> impl Future<Output = Option<i64>> + Send;
    /// Makes a transaction that has just begun see the database as it is now, to its end.
    fn snapshot(outbox: &Outbox<Self>, tx: &mut Tx<Self>) -> impl Future<Output = Result<(), sqlx::Error>> + Send;
}

macro_rules! common {
    ($wal:expr, $seen:expr, $snapshot:expr) => {
        async fn execute(outbox: &Outbox<Self>, sql: String) -> Result<(), sqlx::Error> {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(outbox.pool()).await?;
            Ok(())
        }

        async fn business(outbox: &Outbox<Self>, tx: &mut Tx<Self>, order: i64, plain: Option<&[u8]>) -> Result<(), sqlx::Error> {
            let (one, two) = Self::statements();
            let orders = outbox.tables().name("bench_orders");
            sqlx::query(AssertSqlSafe(one.replace("{t}", &orders))).bind(order).bind("customer").execute(&mut **tx).await?;
            if let Some(payload) = plain {
                let plain = outbox.tables().name("bench_plain");
                sqlx::query(AssertSqlSafe(two.replace("{t}", &plain)))
                    .bind(order)
                    .bind("inventory.deduct")
                    .bind(payload)
                    .execute(&mut **tx)
                    .await?;
            }
            Ok(())
        }

        async fn deduct(
            tables: &StockTables,
            conn: &mut Self::Connection,
            order: i64,
            sku: &str,
            count: i64,
        ) -> Result<(), sqlx::Error> {
            let update = sqlx::query(AssertSqlSafe(tables.take.clone())).bind(count).bind(sku);
            let taken = update.execute(&mut *conn).await?.rows_affected();
            assert_eq!(taken, 1, "the article is there");
            let insert = sqlx::query(AssertSqlSafe(tables.movement.clone())).bind(order).bind(sku).bind(count);
            insert.execute(conn).await?;
            Ok(())
        }

        async fn pending(outbox: &Outbox<Self>) -> Result<i64, sqlx::Error> {
            let count = format!("SELECT count(*) FROM {}", outbox.tables().name("pending"));
            sqlx::query_scalar(AssertSqlSafe(count)).fetch_one(outbox.pool()).await
        }

        async fn wal(outbox: &Outbox<Self>) -> Option<i64> {
            let query: Option<&'static str> = $wal;
            sqlx::query_scalar(query?).fetch_one(outbox.pool()).await.ok()
        }

        async fn statements_seen(outbox: &Outbox<Self>) -> Option<i64> {
            let query: Option<&'static str> = $seen;
            sqlx::query_scalar(query?).fetch_one(outbox.pool()).await.ok()
        }

        async fn snapshot(outbox: &Outbox<Self>, tx: &mut Tx<Self>) -> Result<(), sqlx::Error> {
            let set: Option<&'static str> = $snapshot;
            if let Some(set) = set {
                sqlx::raw_sql(set).execute(&mut **tx).await?;
            }
            let read = format!("SELECT count(*) FROM {}", outbox.tables().name("house"));
            sqlx::query(AssertSqlSafe(read)).fetch_one(&mut **tx).await?;
            Ok(())
        }
    };
}

/// The statements of a handler that keeps a stock.
#[derive(Debug, Clone)]
pub(crate) struct StockTables {
    take: String,
    movement: String,
}

impl StockTables {
    /// Makes the tables, with `articles` articles (`sku-0` and on).
    pub(crate) async fn make<DB: Rig>(outbox: &Outbox<DB>, articles: u32) -> Self {
        let (stock, movement) = (outbox.tables().name("bench_stock"), outbox.tables().name("bench_movement"));
        let (serial, first) = match DB::KIND {
            Kind::Postgres => ("bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "$1"),
            Kind::Mysql => ("bigint AUTO_INCREMENT PRIMARY KEY", "?"),
            Kind::Sqlite => ("integer PRIMARY KEY AUTOINCREMENT", "?"),
        };
        let (second, third) = if first == "?" { ("?", "?") } else { ("$2", "$3") };
        let tables = format!(
            "CREATE TABLE {stock} (sku varchar(40) PRIMARY KEY, count bigint NOT NULL); \
             CREATE TABLE {movement} (id {serial}, order_id bigint NOT NULL, sku varchar(40) NOT NULL, count bigint NOT NULL)"
        );
        must("stock", DB::execute(outbox, tables).await);
        let rows: Vec<_> = (0..articles).map(|i| format!("('sku-{i}', 1000000)")).collect();
        must("stock", DB::execute(outbox, format!("INSERT INTO {stock} (sku, count) VALUES {}", rows.join(", "))).await);
        Self {
            take: format!("UPDATE {stock} SET count = count - {first} WHERE sku = {second}"),
            movement: format!("INSERT INTO {movement} (order_id, sku, count) VALUES ({first}, {second}, {third})"),
        }
    }
}

/// The two inserts of a business transaction in each dialect.
trait Statements {
    fn statements() -> (&'static str, &'static str);
}

const MARKED: (&str, &str) =
    ("INSERT INTO {t} (id, customer) VALUES (?, ?)", "INSERT INTO {t} (order_id, destination, payload) VALUES (?, ?, ?)");

impl Statements for sqlx::Postgres {
    fn statements() -> (&'static str, &'static str) {
        ("INSERT INTO {t} (id, customer) VALUES ($1, $2)", "INSERT INTO {t} (order_id, destination, payload) VALUES ($1, $2, $3)")
    }
}

impl Statements for sqlx::MySql {
    fn statements() -> (&'static str, &'static str) {
        MARKED
    }
}

impl Statements for sqlx::Sqlite {
    fn statements() -> (&'static str, &'static str) {
        MARKED
    }
}

impl Rig for sqlx::Postgres {
    const KIND: Kind = Kind::Postgres;

    async fn fresh(connections: u32) -> Outbox<Self> {
        let options = PgPoolOptions::new().max_connections(connections);
        let pool = must("postgres", options.connect(&url("POSTHOUSE_TEST_POSTGRES_URL")).await);
        let outbox = must("outbox", Outbox::builder(pool).schema(fresh_name()).notify(false).build());
        must("migrate", outbox.migrate().await);
        outbox
    }

    async fn remove(outbox: Outbox<Self>) {
        let schema = outbox.tables().schema().unwrap_or_default();
        // One table a statement: dropping all partitions in one would need a lock for each at a time.
        let tables = sqlx::query_scalar::<_, String>("SELECT tablename FROM pg_tables WHERE schemaname = $1").bind(schema);
        for table in must("tables", tables.fetch_all(outbox.pool()).await) {
            must("drop", Self::execute(&outbox, format!("DROP TABLE IF EXISTS {schema}.{table} CASCADE")).await);
        }
        must("drop", Self::execute(&outbox, format!("DROP SCHEMA {schema} CASCADE")).await);
        outbox.pool().close().await;
    }

    async fn raw_drain(outbox: &Outbox<Self>, batch: usize) -> Result<usize, sqlx::Error> {
        let (pending, message) = (outbox.tables().name("pending"), outbox.tables().name("message"));
        let read = format!(
            "SELECT p.house, p.id, m.payload, m.destination, m.message_id FROM {pending} p JOIN {message} m ON m.id = p.id \
             WHERE p.house = $1 AND p.id > $2 ORDER BY p.house, p.id LIMIT $3"
        );
        let delete = format!("DELETE FROM {pending} p USING unnest($2::bigint[]) AS d(id) WHERE p.house = $1 AND p.id = d.id");
        let mut conn = outbox.pool().acquire().await?;
        let houses: Vec<i32> = sqlx::query_scalar(AssertSqlSafe(format!("SELECT house FROM {}", outbox.tables().name("house"))))
            .fetch_all(&mut *conn)
            .await?;
        let mut total = 0;
        for house in houses {
            let mut mark = 0i64;
            loop {
                let rows = sqlx::query(AssertSqlSafe(read.clone()))
                    .bind(house)
                    .bind(mark)
                    .bind(batch as i64)
                    .fetch_all(&mut *conn)
                    .await?;
                let ids: Vec<i64> = rows.iter().map(|r| r.get(1)).collect();
                let Some(last) = ids.last() else { break };
                mark = *last;
                total += ids.len();
                sqlx::query(AssertSqlSafe(delete.clone())).bind(house).bind(&ids).execute(&mut *conn).await?;
            }
        }
        Ok(total)
    }

    common!(
        Some("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint"),
        Some("SELECT (xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = current_database()"),
        Some("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    );
}

/// The raw loop where parameters are marked by `?`.
macro_rules! raw_marked {
    () => {
        async fn raw_drain(outbox: &Outbox<Self>, batch: usize) -> Result<usize, sqlx::Error> {
            let (pending, message) = (outbox.tables().name("pending"), outbox.tables().name("message"));
            let read = format!(
                "SELECT p.house, p.id, m.payload, m.destination, m.message_id FROM {pending} p JOIN {message} m ON m.id = p.id \
                 WHERE p.house = ? AND p.id > ? ORDER BY p.house, p.id LIMIT ?"
            );
            let mut conn = outbox.pool().acquire().await?;
            let houses: Vec<i32> =
                sqlx::query_scalar(AssertSqlSafe(format!("SELECT house FROM {}", outbox.tables().name("house"))))
                    .fetch_all(&mut *conn)
                    .await?;
            let mut total = 0;
            for house in houses {
                let mut mark = 0i64;
                loop {
                    let rows = sqlx::query(AssertSqlSafe(read.clone()))
                        .bind(house)
                        .bind(mark)
                        .bind(batch as i64)
                        .fetch_all(&mut *conn)
                        .await?;
                    let ids: Vec<i64> = rows.iter().map(|r| r.get(1)).collect();
                    let Some(last) = ids.last() else { break };
                    mark = *last;
                    total += ids.len();
                    let marks = vec!["?"; ids.len()].join(",");
                    let delete = format!("DELETE FROM {pending} WHERE house = ? AND id IN ({marks})");
                    let mut query = sqlx::query(AssertSqlSafe(delete)).bind(house);
                    for id in &ids {
                        query = query.bind(id);
                    }
                    query.execute(&mut *conn).await?;
                }
            }
            Ok(total)
        }
    };
}

impl Rig for sqlx::MySql {
    const KIND: Kind = Kind::Mysql;

    async fn fresh(connections: u32) -> Outbox<Self> {
        let options = MySqlPoolOptions::new().max_connections(connections);
        let pool = must("mysql", options.connect(&url("POSTHOUSE_TEST_MYSQL_URL")).await);
        let outbox = must("outbox", Outbox::builder(pool).prefix(format!("{}_", fresh_name())).build());
        must("migrate", outbox.migrate().await);
        outbox
    }

    async fn remove(outbox: Outbox<Self>) {
        let prefix = outbox.tables().prefix();
        let of_type = async |kind: &'static str| -> Vec<String> {
            let names = sqlx::query_scalar(
                "SELECT CONVERT(table_name USING utf8mb4) FROM information_schema.tables \
                 WHERE table_schema = DATABASE() AND table_type = ? AND LEFT(table_name, ?) = ?",
            );
            must("tables", names.bind(kind).bind(prefix.len() as i64).bind(prefix).fetch_all(outbox.pool()).await)
        };
        for view in of_type("VIEW").await {
            must("drop", Self::execute(&outbox, format!("DROP VIEW `{view}`")).await);
        }
        for table in of_type("BASE TABLE").await {
            must("drop", Self::execute(&outbox, format!("DROP TABLE `{table}`")).await);
        }
        outbox.pool().close().await;
    }

    raw_marked!();
    // A transaction reads as of its first read, as long as nobody has chosen another level.
    common!(
        None,
        Some("SELECT CAST(variable_value AS signed) FROM information_schema.global_status WHERE variable_name = 'QUESTIONS'"),
        None
    );
}

impl Rig for sqlx::Sqlite {
    const KIND: Kind = Kind::Sqlite;

    async fn fresh(connections: u32) -> Outbox<Self> {
        let path = std::env::temp_dir().join(format!("{}.sqlite", fresh_name()));
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(path).create_if_missing(true);
        let pool = SqlitePoolOptions::new().max_connections(connections);
        let outbox = Outbox::new(must("sqlite", pool.connect_with(options).await));
        must("migrate", outbox.migrate().await);
        outbox
    }

    async fn remove(outbox: Outbox<Self>) {
        let file = outbox.pool().connect_options().get_filename().to_owned();
        outbox.pool().close().await;
        must("remove", std::fs::remove_file(file));
    }

    raw_marked!();
    common!(None, None, None);
}
