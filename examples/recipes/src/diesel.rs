//! diesel-async: `InsertStatement` inside a transaction of Diesel.

use diesel::sql_types::{BigInt, Binary, Nullable, Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use posthouse::store::{InsertStatement, Param};
use posthouse::{Message, Outbox};

/// Why an order was not placed.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Publishes inside the transaction that this connection is in.
///
/// # Errors
///
/// What the database says.
pub async fn publish(conn: &mut AsyncPgConnection, statement: InsertStatement) -> Result<(), diesel::result::Error> {
    let mut query = diesel::sql_query(statement.sql).into_boxed();
    for param in statement.params {
        query = match param {
            Param::Text(text) => query.bind::<Nullable<Text>, _>(text),
            Param::Bytes(bytes) => query.bind::<Binary, _>(bytes),
            Param::Int(int) => query.bind::<Nullable<BigInt>, _>(int),
        };
    }
    query.execute(conn).await?;
    Ok(())
}

/// The order and its message commit together, or neither does.
///
/// # Errors
///
/// What the database says, and what is wrong with the message.
pub async fn place_order(
    conn: &mut AsyncPgConnection,
    outbox: &Outbox<sqlx::Postgres>,
    id: i64,
    item: &str,
) -> Result<(), Failure> {
    let message = Message::to("orders").typed("order.placed.v1").key(id).json(&serde_json::json!({ "order": id, "item": item }));
    let statement = outbox.insert_statement(message)?;
    conn.transaction::<_, Failure, _>(async |conn| {
        diesel::sql_query("INSERT INTO orders (id, item) VALUES ($1, $2)")
            .bind::<BigInt, _>(id)
            .bind::<Text, _>(item)
            .execute(conn)
            .await?;
        publish(conn, statement).await?;
        Ok(())
    })
    .await
}
