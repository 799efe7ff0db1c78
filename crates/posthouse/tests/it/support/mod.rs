//! What the tests share: a fresh set of tables in each database, and one way to write a test for all of them.

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthouse::store::{Backend, Done, House, HouseRow, KeyHash, Mark, Poll, Setback, Store, Thin};
use posthouse::{Envelope, Error, Message, Outbox};

#[cfg(feature = "mysql")]
pub(crate) use mysql::MySql;
#[cfg(feature = "postgres")]
pub(crate) use postgres::Postgres;
#[cfg(feature = "sqlite")]
pub(crate) use sqlite::Sqlite;

/// Longer than any call of these tests takes on a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) type Connection<T> = <<T as TestDb>::Db as sqlx::Database>::Connection;

/// A kind of database that the tests run on.
pub(crate) trait TestDb: Debug + Sized + Send + Sync + 'static {
    type Db: Backend;

    /// How many houses it has when 8 are asked for.
    const HOUSES: usize;
    /// An instant long past, as SQL.
    const PAST: &'static str;
    /// `MESSAGE_ID`'s house, as SQL over the columns of the log `m`.
    const HOUSE_OF: &'static str;

    /// An empty place, without tables.
    async fn empty() -> Self;
    /// The pool of that place.
    fn pool(&self) -> &sqlx::Pool<Self::Db>;
    /// The schema to name, where the place is one.
    fn schema(&self) -> Option<String> {
        None
    }
    /// Removes the place.
    async fn remove(self);
    /// Runs one statement, answers how many rows it changed.
    async fn run(conn: &mut Connection<Self>, sql: String) -> Result<u64, sqlx::Error>;
    /// The first column of what a query finds.
    async fn ints(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<i64>>, sqlx::Error>;
    /// The first column of what a query finds.
    async fn texts(conn: &mut Connection<Self>, sql: String) -> Result<Vec<Option<String>>, sqlx::Error>;
    /// Makes the next message get this id.
    async fn next_id(fresh: &Fresh<Self>, id: i64);
}

/// A migrated set of tables of a test's own, with 8 houses where the database has houses.
#[derive(Debug)]
pub(crate) struct Fresh<T: TestDb> {
    pub(crate) place: T,
    pub(crate) outbox: Outbox<T::Db>,
    pub(crate) store: Arc<dyn Store>,
}

/// An outbox in a place that may not have its tables yet.
pub(crate) fn outbox_in<T: TestDb>(place: &T) -> Outbox<T::Db> {
    let mut builder = Outbox::builder(place.pool().clone()).houses(8);
    if let Some(schema) = place.schema() {
        builder = builder.schema(schema);
    }
    builder.build().expect("valid names")
}

impl<T: TestDb> Fresh<T> {
    pub(crate) async fn new() -> Self {
        let place = T::empty().await;
        let outbox = outbox_in(&place);
        outbox.migrate().await.expect("a first migration");
        let store = T::Db::store(outbox.pool(), outbox.tables(), DEADLINE);
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

    pub(crate) async fn try_run(&self, template: &str) -> Result<u64, sqlx::Error> {
        let mut conn = self.place.pool().acquire().await?;
        T::run(&mut conn, self.sql(template)).await
    }

    pub(crate) async fn run(&self, template: &str) -> u64 {
        self.try_run(template).await.unwrap_or_else(|e| panic!("{template}: {e}"))
    }

    pub(crate) async fn ints(&self, template: &str) -> Vec<Option<i64>> {
        let mut conn = self.place.pool().acquire().await.expect("a connection");
        T::ints(&mut conn, self.sql(template)).await.unwrap_or_else(|e| panic!("{template}: {e}"))
    }

    pub(crate) async fn int(&self, template: &str) -> i64 {
        self.ints(template).await.first().copied().flatten().unwrap_or_else(|| panic!("{template}: no number"))
    }

    pub(crate) async fn texts(&self, template: &str) -> Vec<Option<String>> {
        let mut conn = self.place.pool().acquire().await.expect("a connection");
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
pub(crate) async fn publish_on<T: TestDb>(
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

/// Asks again and again until the condition holds; for what happens in other tasks at a time nobody can name.
#[allow(dead_code, reason = "for the modules about the relay")]
pub(crate) async fn wait_for<F: Future<Output = bool>>(what: &str, deadline: Duration, mut holds: impl FnMut() -> F) {
    let started = Instant::now();
    while !holds().await {
        assert!(started.elapsed() < deadline, "{what}: not so within {deadline:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The address of a database server for tests.
#[cfg(any(feature = "postgres", feature = "mysql"))]
fn url(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!("{variable} is not set: start the databases and set it with  eval \"$(scripts/services start && scripts/services env)\"")
    })
}

/// Makes `postgres::x`, `mysql::x` and `sqlite::x` out of `async fn x<T: TestDb>(db: &Fresh<T>)`, each with fresh tables.
/// They are removed when the test has passed.
macro_rules! on_all_databases {
    ($($test:ident),* $(,)?) => {
        $crate::support::on_database!("postgres", postgres, Postgres, $($test),*);
        $crate::support::on_database!("mysql", mysql, MySql, $($test),*);
        $crate::support::on_database!("sqlite", sqlite, Sqlite, $($test),*);
    };
}
pub(crate) use on_all_databases;

macro_rules! on_database {
    ($feature:literal, $name:ident, $db:ident, $($test:ident),*) => {
        #[cfg(feature = $feature)]
        mod $name {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $test() {
                    let db = $crate::support::Fresh::<$crate::support::$db>::new().await;
                    super::$test(&db).await;
                    $crate::support::TestDb::remove(db.place).await;
                }
            )*
        }
    };
}
pub(crate) use on_database;

/// The statements of [`TestDb`] that read alike for every driver.
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
use statements;

fn unique(what: &str) -> String {
    format!("{what}_{}_{}", std::process::id(), posthouse::MessageId::generate().as_str().replace('-', ""))
}
