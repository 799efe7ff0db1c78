//! For the tests of services that publish, and of transports. Feature `testing`.
//!
//! - [`published`]: what a transaction published, seen from inside it. No relay, no commit.
//! - [`Script`] (with the feature `relay`): a transport that answers as told and writes down what it was given.
//! - [`deliver`] (with the feature `relay`): one message through a transport, without a relay or a database.
//! - [`observed`] (with the feature `relay`): a transport whose answers are watched.
//! - [`Envelope::for_test`](crate::Envelope::for_test): a message as transports and receivers get it.
//!
//! # A test of a service
//!
//! Two tests: one asks what `place_order` publishes and rolls back, the other lets a relay deliver it to a broker that is
//! busy at first.
//!
//! ```
//! # #[cfg(all(feature = "sqlite", feature = "relay"))]
//! # mod example {
//! use std::time::Duration;
//!
//! use posthouse::testing::{self, Script};
//! use posthouse::transport::Outcome;
//! use posthouse::{Error, Message, Outbox, Relay, Retry, Route};
//! use sqlx::SqliteConnection;
//!
//! // What is tested: the service's own code.
//! async fn place_order(outbox: &Outbox<sqlx::Sqlite>, tx: &mut SqliteConnection, order: i64) -> Result<(), Error> {
//!     sqlx::query("INSERT INTO orders (id) VALUES (?)").bind(order).execute(&mut *tx).await?;
//!     let message = Message::to("inventory.deduct").typed("order.placed").key(order);
//!     outbox.publish(tx, message.json(&serde_json::json!({ "order": order }))).await?;
//!     Ok(())
//! }
//!
//! # pub
//! async fn an_order_publishes_one_message(outbox: Outbox<sqlx::Sqlite>) -> Result<(), Error> {
//!     let mut tx = outbox.begin().await?;
//!     place_order(&outbox, &mut tx, 7).await?;
//!
//!     let published = testing::published(&mut *tx).await?;
//!     assert_eq!(published.len(), 1);
//!     assert_eq!(published[0].destination, "inventory.deduct");
//!     assert_eq!(published[0].key.as_deref(), Some("7"));
//!     assert_eq!(published[0].json::<serde_json::Value>().unwrap()["order"], 7);
//!     tx.rollback().await
//! }
//!
//! # pub
//! async fn a_busy_broker_gets_the_message_again(outbox: Outbox<sqlx::Sqlite>) -> Result<(), Error> {
//!     let script = Script::new().then(Outcome::Retry { after: None, error: "busy".into() }).then(Outcome::Delivered);
//!     let soon = Duration::from_millis(1);
//!     let relay = Relay::builder(&outbox)
//!         .transport("amqp", script.clone())
//!         .route("inventory.deduct", Route::to("amqp:inventory").retry(Retry::new(5, soon, soon)))
//!         .start()
//!         .await?;
//!
//!     let mut tx = outbox.begin().await?;
//!     place_order(&outbox, &mut tx, 7).await?;
//!     tx.commit().await?;
//!
//!     // Sends what is due, writes the outcomes down; a message that waits for its next attempt is left.
//!     let mut conn = outbox.pool().acquire().await?;
//!     while !testing::published(&mut *conn).await?.is_empty() {
//!         relay.drain_once().await;
//!     }
//!     let attempts: Vec<u32> = script.deliveries().iter().map(|d| d.message.attempt).collect();
//!     assert_eq!(attempts, [1, 2]);
//!     assert_eq!(script.deliveries()[0].message.message_id, script.deliveries()[1].message.message_id);
//!     relay.shutdown(Duration::from_secs(5)).await;
//!     Ok(())
//! }
//! # }
//! # #[cfg(all(feature = "sqlite", feature = "relay"))]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), posthouse::Error> {
//! #     let file = std::env::temp_dir().join(format!("posthouse-doc-{}.sqlite", posthouse::MessageId::generate()));
//! #     let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&file).create_if_missing(true);
//! #     let outbox = posthouse::Outbox::new(sqlx::SqlitePool::connect_with(options).await?);
//! #     outbox.migrate().await?;
//! #     sqlx::query("CREATE TABLE orders (id INTEGER PRIMARY KEY)").execute(outbox.pool()).await?;
//! #     example::an_order_publishes_one_message(outbox.clone()).await?;
//! #     example::a_busy_broker_gets_the_message_again(outbox.clone()).await?;
//! #     outbox.pool().close().await;
//! #     std::fs::remove_file(file).expect("the file was made");
//! #     Ok(())
//! # }
//! # #[cfg(not(all(feature = "sqlite", feature = "relay")))]
//! # fn main() {}
//! ```

#[cfg(feature = "relay")]
mod deliver;
#[cfg(feature = "relay")]
mod observed;
mod published;
#[cfg(feature = "relay")]
mod script;

#[cfg(feature = "relay")]
pub use deliver::{deliver, deliver_batch, deliver_pipelined};
#[cfg(feature = "relay")]
pub use observed::observed;
pub(crate) use published::published_row;
pub use published::{Published, published, published_in};
#[cfg(feature = "relay")]
pub use script::{Script, ScriptedDelivery};
