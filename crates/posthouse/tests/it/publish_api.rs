//! Publishing as services do it: in tasks and handlers, with typed events, on every kind of connection and transaction.

mod cancel;
mod commit;
mod isolation;
mod shapes;
mod texts;
mod trace;

use posthouse::testing::{self, Published};
use posthouse::{Outbox, Tx};

use crate::support::TestDb;

/// A table of the service's own, beside the outbox's.
async fn orders<T: TestDb>(outbox: &Outbox<T::Db>) -> String {
    let orders = outbox.tables().name("orders");
    T::execute(outbox.pool(), format!("CREATE TABLE {orders} (id INTEGER PRIMARY KEY)")).await;
    orders
}

async fn count<T: TestDb>(outbox: &Outbox<T::Db>, table: &str) -> i64 {
    T::number(outbox.pool(), format!("SELECT count(*) FROM {table}")).await
}

/// What is published and committed.
pub(crate) async fn published<T: TestDb>(outbox: &Outbox<T::Db>) -> Vec<Published> {
    let mut conn = outbox.pool().acquire().await.unwrap();
    testing::published_in(outbox, &mut conn).await.unwrap()
}

async fn destinations<T: TestDb>(outbox: &Outbox<T::Db>) -> Vec<String> {
    published::<T>(outbox).await.into_iter().map(|m| m.destination).collect()
}

async fn insert<T: TestDb>(tx: &mut Tx<T::Db>, orders: &str, id: usize) {
    T::execute_in(tx, format!("INSERT INTO {orders} (id) VALUES ({id})")).await;
}
