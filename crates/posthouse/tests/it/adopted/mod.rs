//! Tables of other applications, in real databases beside those applications.

mod beside;
mod discovery;
mod faults;
mod layouts;
mod order;

use std::time::Duration;

use futures_util::future::BoxFuture;
use posthouse::transport::{Delivery, Transport};
use posthouse::{Adopted, AdoptedPayload, AdoptedRelay, AdoptedRelayBuilder, Outbox, RunOutcome, StateCode};
use tokio::sync::watch;

use crate::relay::{Log, Recorder, quick, quick_route};
use crate::support::{MySql, TestDb};

/// `on_both!(a)` makes the tests `postgres::a` and `mysql::a`.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod postgres { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<crate::support::Postgres>()).await } )+ }
        mod mysql { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<crate::support::MySql>()).await } )+ }
    };
}
pub(crate) use on_both;

/// The name of a table beside Posthouse's own.
fn beside<T: TestDb>(outbox: &Outbox<T::Db>, table: &str) -> String {
    match outbox.tables().schema() {
        Some(schema) => format!("{schema}.{table}"),
        None => table.to_owned(),
    }
}

/// A table of no particular application, its rows pending (0).
async fn jobs<T: TestDb>(outbox: &Outbox<T::Db>) -> String {
    let table = beside::<T>(outbox, "job");
    let mut sql = format!(
        "CREATE TABLE {table} (id varchar(40) PRIMARY KEY, grp varchar(40), body varchar(200), state int, note varchar(40), \
         made timestamp DEFAULT CURRENT_TIMESTAMP NOT NULL); "
    );
    sql += &format!("CREATE INDEX job_state ON {table} (state, id); CREATE INDEX job_grp ON {table} (grp, id)");
    T::execute(outbox.pool(), sql).await;
    table
}

async fn add<T: TestDb>(outbox: &Outbox<T::Db>, table: &str, rows: &[(&str, &str, &str)]) {
    let rows: Vec<String> = rows.iter().map(|(id, grp, body)| format!("('{id}', '{grp}', '{body}', 0)")).collect();
    T::execute(outbox.pool(), format!("INSERT INTO {table} (id, grp, body, state) VALUES {}", rows.join(", "))).await;
}

/// States of [`jobs`]: 0 pending, 1 sending, 2 sent, 3 failed.
fn mapping() -> Adopted {
    let mut it = Adopted::table("job");
    it.id = Some("id".into());
    it.state.column = Some("state".into());
    it.state.pending = Some(vec![StateCode::Number(0)]);
    it.state.sending = Some(StateCode::Number(1));
    it.state.sent = Some(StateCode::Number(2));
    it.state.failed = Some(StateCode::Number(3));
    it.message_id = Some("id".into());
    it.destination = Some("test:{grp}".into());
    it.payload = Some(AdoptedPayload::Column("body".into()));
    it.lease = Some(Duration::from_secs(3));
    it.interval = Some(Duration::from_millis(50));
    it.retry = Some(quick_route("").retry);
    it
}

/// A relay of the mapping with a transport for every scheme that the tests use.
fn relay<T: TestDb>(outbox: &Outbox<T::Db>, mapping: &Adopted, transport: impl Transport + Clone) -> AdoptedRelayBuilder {
    let mut builder = AdoptedRelay::builder(outbox, "jobs", mapping.clone()).settings(quick());
    for name in ["test", "amqp", "kafka", "http"] {
        builder = builder.transport(name, transport.clone());
    }
    builder
}

/// One scan, without a limit.
async fn once(relay: &AdoptedRelay) -> RunOutcome {
    let (_never, stop) = watch::channel(false);
    relay.run_once(None, &stop).await
}

/// Starts a relay that confirms everything, scans once, and tells what came of it.
async fn scanned<T: TestDb>(outbox: &Outbox<T::Db>, mapping: &Adopted) -> (Log, RunOutcome) {
    let log = Log::default();
    let relay = relay::<T>(outbox, mapping, Recorder(log.clone())).continuous(false).start().await.expect("start");
    let outcome = once(&relay).await;
    relay.shutdown(Duration::from_secs(10)).await;
    (log, outcome)
}

async fn count<T: TestDb>(outbox: &Outbox<T::Db>, table: &str, condition: &str) -> i64 {
    T::number(outbox.pool(), format!("SELECT count(*) FROM {table} WHERE {condition}")).await
}

/// Rows of Posthouse's own.
async fn own<T: TestDb>(outbox: &Outbox<T::Db>, condition: &str) -> i64 {
    count::<T>(outbox, &outbox.tables().name("adopted"), condition).await
}

/// Answers each delivery as a function of it says, in a task of its own.
#[derive(Clone)]
struct Answers<F>(F);

impl<F> std::fmt::Debug for Answers<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Answers")
    }
}

impl<F, Fut> Transport for Answers<F>
where
    F: Fn(Delivery) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        let mut running = tokio::task::JoinSet::new();
        for delivery in batch {
            let f = self.0.clone();
            running.spawn(async move { f(delivery).await });
        }
        Box::pin(async move { while running.join_next().await.is_some() {} })
    }
}

#[tokio::test]
async fn sqlite_says_that_it_adopts_no_tables() {
    let outbox = crate::support::Sqlite::fresh().await;
    let error = relay::<crate::support::Sqlite>(&outbox, &mapping(), Recorder(Log::default())).start().await.unwrap_err();
    assert!(error.to_string().contains("SQLite locks whole files"), "{error}");
}

/// A pool for an account that may only do this in the database of an outbox.
async fn account(outbox: &Outbox<sqlx::MySql>, grants: &[(&str, &str)]) -> sqlx::MySqlPool {
    let name = format!("u_{:012x}", fastrand::u64(..) & 0xffff_ffff_ffff);
    let mut sql = format!("CREATE USER {name} IDENTIFIED BY 'secret'; ");
    for (rights, table) in grants {
        sql += &format!("GRANT {rights} ON {table} TO {name}; ");
    }
    MySql::execute(outbox.pool(), sql).await;
    let options = (*outbox.pool().connect_options()).clone().username(&name).password("secret");
    sqlx::mysql::MySqlPoolOptions::new().connect_lazy_with(options)
}
