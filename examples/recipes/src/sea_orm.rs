//! SeaORM 2: `InsertStatement` inside a transaction of SeaORM.

use posthouse::store::{InsertStatement, Param};
use posthouse::{Message, Outbox};
use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, DbBackend, Statement, TransactionTrait, Value};

/// Why an order was not placed.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A pool of SeaORM.
///
/// # Errors
///
/// What the database says.
pub async fn connect(url: &str) -> Result<DatabaseConnection, sea_orm::DbErr> {
    sea_orm::Database::connect(url).await
}

/// Publishes inside this transaction.
///
/// # Errors
///
/// What the database says.
pub async fn publish(tx: &DatabaseTransaction, statement: InsertStatement) -> Result<(), sea_orm::DbErr> {
    let values = statement.params.into_iter().map(|param| match param {
        Param::Text(text) => Value::from(text),
        Param::Bytes(bytes) => Value::from(bytes),
        Param::Int(int) => Value::from(int),
    });
    tx.execute_raw(Statement::from_sql_and_values(DbBackend::Postgres, statement.sql, values)).await?;
    Ok(())
}

/// The order and its message commit together, or neither does.
///
/// # Errors
///
/// What the database says, and what is wrong with the message.
pub async fn place_order(db: &DatabaseConnection, outbox: &Outbox<sqlx::Postgres>, id: i64, item: &str) -> Result<(), Failure> {
    let tx = db.begin().await?;
    let order = "INSERT INTO orders (id, item) VALUES ($1, $2)";
    tx.execute_raw(Statement::from_sql_and_values(DbBackend::Postgres, order, [id.into(), item.into()])).await?;
    let message = Message::to("orders").typed("order.placed.v1").key(id).json(&serde_json::json!({ "order": id, "item": item }));
    publish(&tx, outbox.insert_statement(message)?).await?;
    tx.commit().await?;
    Ok(())
}
