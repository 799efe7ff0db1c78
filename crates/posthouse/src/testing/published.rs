//! What is published and not delivered yet.

use serde::de::DeserializeOwned;
use sqlx::{Connection, Decode, Row, Type};

use crate::store::{Backend, Tables};
use crate::{Error, Headers, MessageId, Outbox};

/// A message that is published and not delivered yet, as [`published`] finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The identity that receivers will see.
    pub message_id: MessageId,
    /// The type.
    pub kind: String,
    /// The destination it was published to.
    pub destination: String,
    /// The ordering key.
    pub key: Option<String>,
    /// The payload, byte for byte.
    pub payload: Vec<u8>,
    /// Media type of the payload.
    pub content_type: String,
    /// Headers.
    pub headers: Headers,
}

impl Published {
    /// The payload, decoded from JSON.
    ///
    /// # Errors
    /// When the payload is not JSON, or not that of a `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.payload)
    }
}

/// Every message in the default tables that is published and not delivered yet, as this connection sees it: also what its own
/// transaction published and has not committed. In the order of publishing; FAILED ones are among them.
///
/// Takes the connection itself: `&mut *tx` of a [`Tx`](crate::Tx) or a transaction of sqlx's. It reads the tables, which an
/// account that may only publish can't.
///
/// ```no_run
/// # async fn f(outbox: posthouse::Outbox<sqlx::Sqlite>) -> Result<(), posthouse::Error> {
/// let mut tx = outbox.begin().await?;
/// // … the code under test …
/// let published = posthouse::testing::published(&mut *tx).await?;
/// assert!(published.iter().all(|m| m.destination == "orders"));
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Database`], for example when the tables are missing; [`Error::Invalid`] for a row that plain SQL wrote and that
/// can't be decoded.
pub async fn published<C>(conn: &mut C) -> Result<Vec<Published>, Error>
where
    C: Connection,
    C::Database: Backend,
{
    let tables = Tables::new(C::Database::DEFAULT_SCHEMA, "posthouse_", C::Database::QUOTE)?;
    C::Database::published(conn, &tables).await
}

/// [`published`] for the tables of an outbox that has another schema or prefix.
///
/// # Errors
/// As [`published`].
pub async fn published_in<DB: Backend>(outbox: &Outbox<DB>, conn: &mut DB::Connection) -> Result<Vec<Published>, Error> {
    DB::published(conn, outbox.tables()).await
}

/// Reads a row of id, message_id, type, destination, message_key, payload, content_type, headers: every text as its bytes.
pub(crate) fn published_row<R: Row>(row: &R) -> Result<Published, Error>
where
    usize: sqlx::ColumnIndex<R>,
    i64: for<'r> Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: for<'r> Decode<'r, R::Database> + Type<R::Database>,
{
    let id: i64 = row.try_get(0)?;
    let text = |column: usize, field: &'static str| -> Result<Option<String>, Error> {
        let bytes: Option<Vec<u8>> = row.try_get(column)?;
        bytes
            .map(String::from_utf8)
            .transpose()
            .map_err(|_| Error::invalid(field, format!("the text in row {id} of the message log is not UTF-8")))
    };
    let headers = match text(7, "headers")? {
        None => Headers::new(),
        Some(json) => Headers::from_json(&json)
            .map_err(|e| Error::invalid("headers", format!("not a JSON object in row {id} of the message log: {e}")))?,
    };
    Ok(Published {
        message_id: MessageId::from(text(1, "message_id")?.unwrap_or_default()),
        kind: text(2, "type")?.unwrap_or_default(),
        destination: text(3, "destination")?.unwrap_or_default(),
        key: text(4, "message_key")?,
        payload: row.try_get(5)?,
        content_type: text(6, "content_type")?.unwrap_or_default(),
        headers,
    })
}
