//! A program that only publishes, as a cloud function does: it may be frozen or end after each call, so no relay can live in it.
//! A `posthouse relay` elsewhere, or another service's, sends what it leaves in the outbox.
//!
//! Such a program needs no more than `posthouse = { version = "0.1", default-features = false, features = ["postgres"] }`, which
//! brings no broker's client and no HTTP client.

use posthouse::{Message, Outbox};
use sqlx::postgres::PgPoolOptions;

/// What lives from one call to the next, as long as the function isn't ended.
#[derive(Debug, Clone)]
pub struct Function {
    outbox: Outbox<sqlx::Postgres>,
}

impl Function {
    /// At the cold start. Connects at the first call: one connection is enough for one call at a time.
    ///
    /// # Errors
    ///
    /// What is wrong with the address.
    pub fn new(database_url: &str) -> Result<Self, posthouse::Error> {
        let pool = PgPoolOptions::new().max_connections(1).connect_lazy(database_url)?;
        Ok(Self { outbox: Outbox::new(pool) })
    }

    /// Answers what arrived (an event, a request). Called again with the same event, it publishes nothing more.
    ///
    /// # Errors
    ///
    /// What the database says, and what is wrong with the message. Then nothing was published.
    pub async fn handle(&self, event_id: &str, user: i64) -> Result<(), posthouse::Error> {
        let mut tx = self.outbox.begin().await?;
        let visit = "INSERT INTO visits (event_id, user_id) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        sqlx::query(visit).bind(event_id).bind(user).execute(&mut *tx).await?;
        let message = Message::to("visits").typed("user.visited.v1").key(user).dedup_key(event_id);
        self.outbox.publish(&mut tx, message.json(&serde_json::json!({ "user": user }))).await?;
        self.outbox.commit(tx).await
    }
}
