//! tokio-postgres: `InsertStatement` inside a transaction of it.

use posthouse::store::{InsertStatement, Param};
use posthouse::{Message, Outbox};
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Transaction};

/// Why an order was not placed.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Publishes inside this transaction.
///
/// # Errors
///
/// What the database says.
pub async fn publish(tx: &Transaction<'_>, statement: &InsertStatement) -> Result<(), tokio_postgres::Error> {
    let params = statement.params.iter().map(|param| match param {
        Param::Text(text) => text as &(dyn ToSql + Sync),
        Param::Bytes(bytes) => bytes,
        Param::Int(int) => int,
    });
    tx.execute(&statement.sql, &params.collect::<Vec<_>>()).await?;
    Ok(())
}

/// The order and its message commit together, or neither does.
///
/// # Errors
///
/// What the database says, and what is wrong with the message.
pub async fn place_order(client: &mut Client, outbox: &Outbox<sqlx::Postgres>, id: i64, item: &str) -> Result<(), Failure> {
    let message = Message::to("orders").typed("order.placed.v1").key(id).json(&serde_json::json!({ "order": id, "item": item }));
    let statement = outbox.insert_statement(message)?;
    let tx = client.transaction().await?;
    tx.execute("INSERT INTO orders (id, item) VALUES ($1, $2)", &[&id, &item]).await?;
    publish(&tx, &statement).await?;
    tx.commit().await?;
    Ok(())
}
