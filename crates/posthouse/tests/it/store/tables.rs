//! A fresh set of tables in each database, what the tests ask of it, and one way to write a test for all of them.

use std::sync::Arc;
use std::time::Duration;

use posthouse::store::{Backend, Done, House, HouseRow, KeyHash, Mark, Poll, Setback, Store, Thin};
use posthouse::{Envelope, Error, Message, Outbox};

use crate::support::{MySql, Place, Postgres, Sqlite, TestDb};

/// Longer than any call of these tests takes on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// Every house there is in these tests.
pub(crate) const ALL: [House; 8] = [House(0), House(1), House(2), House(3), House(4), House(5), House(6), House(7)];

pub(crate) type Connection<T> = <<T as TestDb>::Db as sqlx::Database>::Connection;

/// What the store tests need to know about a kind of database, beyond a place in it.
pub(crate) trait StoreDb: TestDb {
    /// How many houses it has when 8 are asked for.
    const HOUSES: usize;
    /// An instant long past, as SQL.
    const PAST: &'static str;
    /// The house of a row of the log `m`, as SQL.
    const HOUSE_OF: &'static str = "{house_of}(m.destination, m.message_key, m.message_id)";

    /// An UPDATE of `created_at` in its own words for now, a day, a second.
    fn created(sql: &str) -> String;
    /// Runs one statement, answers how many rows it changed.
    async fn run(conn: &mut Connection<Self>, sql: String) -> Result<u64, sqlx::Error>;
    /// The first column of what a query finds.
    async fn ints(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<i64>>, sqlx::Error>;
    /// The first column of what a query finds.
    async fn texts(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<String>>, sqlx::Error>;
    /// Makes the next message get this id.
    async fn next_id(fresh: &Fresh<Self>, id: i64);
    /// Removes a place and everything in it.
    async fn remove(place: &Place<Self::Db>);
}

/// A migrated set of tables of a test's own, with 8 houses where the database has houses.
pub(crate) struct Fresh<T: StoreDb> {
    pub(crate) place: Place<T::Db>,
    pub(crate) outbox: Outbox<T::Db>,
    pub(crate) store: Arc<dyn Store>,
}

/// An outbox in a place that may not have its tables yet.
pub(crate) fn outbox_in<T: StoreDb>(place: &Place<T::Db>) -> Outbox<T::Db> {
    let mut builder = Outbox::builder(place.pool.clone()).houses(8);
    if let Some(schema) = &place.schema {
        builder = builder.schema(schema);
    }
    builder.build().expect("valid names")
}

impl<T: StoreDb> Fresh<T> {
    pub(crate) async fn new() -> Self {
        let place = T::place().await;
        let outbox = outbox_in::<T>(&place);
        outbox.migrate().await.expect("a first migration");
        let store = T::Db::store(outbox.pool(), outbox.tables(), DEADLINE, None);
        Self { place, outbox, store }
    }

    /// Fills in the names of tables: `{x}` becomes the qualified name of x, `{PAST}` and `{HOUSE}` the database's own SQL.
    pub(crate) fn sql(&self, template: &str) -> String {
        let mut out = String::new();
        let mut rest = template;
        while let Some((before, after)) = rest.split_once('{') {
            let (name, after) = after.split_once('}').expect("a closing brace");
            out.push_str(before);
            match name {
                "PAST" => out.push_str(T::PAST),
                "HOUSE" => out.push_str(&self.sql(T::HOUSE_OF)),
                name => out.push_str(&self.outbox.tables().name(name)),
            }
            rest = after;
        }
        out + rest
    }

    /// Removes the tables and where they are.
    pub(crate) async fn remove(self) {
        T::remove(&self.place).await;
        self.place.pool.close().await;
    }

    pub(crate) async fn try_run(&self, template: &str) -> Result<u64, sqlx::Error> {
        let mut conn = self.place.pool.acquire().await?;
        T::run(&mut conn, self.sql(template)).await
    }

    pub(crate) async fn run(&self, template: &str) -> u64 {
        self.try_run(template).await.unwrap_or_else(|e| panic!("{template}: {e}"))
    }

    /// Statements as they are.
    pub(crate) async fn run_text(&self, sql: &str) {
        T::execute(&self.place.pool, sql.to_owned()).await;
    }

    pub(crate) async fn ints(&self, template: &str) -> Vec<Option<i64>> {
        let mut conn = self.place.pool.acquire().await.expect("a connection");
        T::ints(&mut conn, self.sql(template)).await.unwrap_or_else(|e| panic!("{template}: {e}"))
    }

    pub(crate) async fn int(&self, template: &str) -> i64 {
        self.ints(template).await.first().copied().flatten().unwrap_or_else(|| panic!("{template}: no number"))
    }

    pub(crate) async fn texts(&self, template: &str) -> Vec<Option<String>> {
        let mut conn = self.place.pool.acquire().await.expect("a connection");
        T::texts(&mut conn, self.sql(template)).await.unwrap_or_else(|e| panic!("{template}: {e}"))
    }

    /// Publishes in one transaction, in this order; answers the row ids.
    pub(crate) async fn publish(&self, messages: impl IntoIterator<Item = Message>) -> Vec<i64> {
        let before = self.ints("SELECT max(id) FROM {message}").await[0].unwrap_or(0);
        let mut tx = self.outbox.begin().await.expect("begin");
        self.outbox.publish_many(&mut tx, messages).await.expect("publish");
        tx.commit().await.expect("commit");
        self.ints(&format!("SELECT id FROM {{message}} WHERE id > {before} ORDER BY id")).await.into_iter().flatten().collect()
    }

    pub(crate) async fn publish_one(&self, message: Message) -> i64 {
        self.publish([message]).await[0]
    }

    /// One mark per house.
    pub(crate) async fn marks(&self) -> Vec<Mark> {
        let houses: Vec<HouseRow> = self.store.houses().await.expect("houses");
        houses.iter().map(|h| Mark { house: House(h.house), after: 0, upto: i64::MAX }).collect()
    }

    pub(crate) async fn all_houses(&self) -> Vec<House> {
        self.marks().await.iter().map(|m| m.house).collect()
    }

    pub(crate) async fn poll(&self) -> Poll {
        self.store.poll(&self.marks().await, 100_000, &[]).await.expect("poll")
    }

    /// Every eligible row, by id.
    pub(crate) async fn eligible(&self) -> Vec<Thin> {
        by_id(self.poll().await.rows)
    }

    /// The one eligible row with this id.
    pub(crate) async fn thin(&self, id: i64) -> Thin {
        let rows = self.eligible().await;
        rows.iter().find(|t| t.id == id).cloned().unwrap_or_else(|| panic!("{id} is not among {:?}", ids(&rows)))
    }

    pub(crate) async fn load_one(&self, id: i64) -> Envelope {
        let mut loaded = self.store.load(&[id]).await.expect("load");
        assert_eq!(loaded.len(), 1, "message {id}");
        loaded.remove(0).1.expect("a message that can be decoded")
    }

    pub(crate) async fn status(&self, id: i64) -> String {
        self.store.show(id).await.expect("show").expect("a message").row.status
    }
}

/// Publishing one message on a connection that is in a transaction.
pub(crate) async fn publish_on<T: StoreDb>(
    outbox: &Outbox<T::Db>,
    conn: &mut Connection<T>,
    message: Message,
) -> Result<posthouse::MessageId, Error> {
    outbox.publish(conn, message).await
}

pub(crate) fn by_id(mut rows: Vec<Thin>) -> Vec<Thin> {
    rows.sort_by_key(|t| t.id);
    rows
}

pub(crate) fn ids(rows: &[Thin]) -> Vec<i64> {
    rows.iter().map(|t| t.id).collect()
}

pub(crate) fn sorted(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids
}

pub(crate) fn done(t: &Thin) -> Done {
    Done { house: t.house, id: t.id, version: t.version }
}

pub(crate) fn key_of(t: &Thin) -> (House, KeyHash) {
    (t.house, t.key.clone().expect("a keyed row"))
}

/// A failed attempt that isn't logged; change what the test is about.
pub(crate) fn setback(t: &Thin, wait: Option<Duration>) -> Setback {
    Setback {
        row: done(t),
        attempts: t.attempts + 1,
        claims: t.claims,
        wait,
        leave_key: false,
        error: "it did not work".into(),
        attempt: None,
    }
}

/// Makes `postgres::x`, `mysql::x` and `sqlite::x` out of `async fn x<T: StoreDb>(db: &Fresh<T>)`, each with fresh tables.
/// They are removed when the test has passed.
macro_rules! on_all_stores {
    ($($test:ident),* $(,)?) => {
        $crate::store::tables::on_store!(postgres, Postgres, $($test),*);
        $crate::store::tables::on_store!(mysql, MySql, $($test),*);
        $crate::store::tables::on_store!(sqlite, Sqlite, $($test),*);
    };
}
pub(crate) use on_all_stores;

macro_rules! on_store {
    ($name:ident, $db:ident, $($test:ident),*) => {
        mod $name {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let db = $crate::store::tables::Fresh::<$crate::support::$db>::new().await;
                    super::$test(&db).await;
                    db.remove().await;
                }
            )*
        }
    };
}
pub(crate) use on_store;

/// The statements of [`StoreDb`] that read alike for two of the drivers.
macro_rules! statements {
    () => {
        async fn run(conn: &mut Connection<Self>, sql: String) -> Result<u64, sqlx::Error> {
            Ok(sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(conn).await?.rows_affected())
        }

        async fn ints(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<i64>>, sqlx::Error> {
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(conn).await
        }

        async fn texts(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<String>>, sqlx::Error> {
            sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_all(conn).await
        }
    };
}

impl StoreDb for Postgres {
    const HOUSES: usize = 8;
    const PAST: &'static str = "timestamptz '2000-01-01 00:00:00Z'";

    fn created(sql: &str) -> String {
        in_words(sql, "now()", "interval '1 day'", "interval '1 second'")
    }

    statements!();

    async fn next_id(fresh: &Fresh<Self>, id: i64) {
        fresh.run(&format!("ALTER TABLE {{message}} ALTER id RESTART WITH {id}")).await;
        fresh.store.upkeep().await.expect("partitions for the new ids");
    }

    async fn remove(place: &Place<Self::Db>) {
        let schema = place.schema.as_deref().expect("a schema of the test's own");
        Self::execute(&place.pool, format!("DROP SCHEMA {schema} CASCADE")).await;
    }
}

impl StoreDb for MySql {
    const HOUSES: usize = 8;
    const PAST: &'static str = "'2000-01-01 00:00:00'";

    fn created(sql: &str) -> String {
        // `- 2 * INTERVAL 1 DAY` is no MySQL.
        let sql = sql.replace(" * %DAY%", " DAY").replace(" * %SECOND%", " SECOND").replace("- ", "- INTERVAL ");
        in_words(&sql, "UTC_TIMESTAMP(6)", "", "")
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
        // Upkeep follows ids as they grow; it can't leap, because partitions in MySQL have no gaps. So the log gets one
        // partition that holds everything.
        fresh.run("ALTER TABLE {message} PARTITION BY RANGE (id) (PARTITION p9999999 VALUES LESS THAN (MAXVALUE))").await;
        fresh.run(&format!("ALTER TABLE {{message}} AUTO_INCREMENT = {id}")).await;
    }

    async fn remove(place: &Place<Self::Db>) {
        let (_, name) = place.url.rsplit_once('/').expect("a URL with a database");
        Self::execute(&place.pool, format!("DROP DATABASE {name}")).await;
    }
}

fn in_words(sql: &str, now: &str, day: &str, second: &str) -> String {
    format!("UPDATE {}", sql.replace("%NOW%", now).replace("%DAY%", day).replace("%SECOND%", second))
}

/// Names the one column of a query `x`. An ORDER BY within a derived table needs a LIMIT to be kept.
fn with_column(sql: &str) -> String {
    let (select, rest) = sql.split_once(" FROM ").unwrap_or((sql, ""));
    let from = if rest.is_empty() { String::new() } else { format!(" FROM {rest}") };
    format!("{select} AS x{from} LIMIT 1000000")
}

impl StoreDb for Sqlite {
    const HOUSES: usize = 1;
    const PAST: &'static str = "946684800000";
    const HOUSE_OF: &'static str = "0";

    fn created(sql: &str) -> String {
        in_words(sql, "(unixepoch() * 1000)", "86400000", "1000")
    }

    statements!();

    async fn next_id(fresh: &Fresh<Self>, id: i64) {
        // The row is only there after a first insert.
        fresh.publish_one(Message::to("first")).await;
        let name = fresh.outbox.tables().name("message").replace('"', "");
        fresh.run(&format!("UPDATE sqlite_sequence SET seq = {} WHERE name = '{name}'", id - 1)).await;
        fresh.run("DELETE FROM {pending}").await;
        fresh.run("DELETE FROM {message}").await;
    }

    async fn remove(place: &Place<Self::Db>) {
        place.pool.close().await;
        let path = place.pool.connect_options().get_filename().to_owned();
        for end in ["", "-wal", "-shm"] {
            let mut name = path.clone().into_os_string();
            name.push(end);
            match std::fs::remove_file(&name) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("{}: {e}", name.display()),
                _ => {}
            }
        }
    }
}
