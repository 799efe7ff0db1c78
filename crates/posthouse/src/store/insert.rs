//! A statement that publishes, for drivers other than sqlx.

/// The statement that publishes one message, for any driver: run it inside your transaction.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct InsertStatement {
    /// SQL with `$1 …` (PostgreSQL) or `?` (MySQL, SQLite) placeholders.
    pub sql: String,
    /// The values, in the order of the placeholders.
    pub params: Vec<Param>,
    /// The message's id, as receivers will see it.
    pub message_id: crate::MessageId,
}

/// A value of an [`InsertStatement`].
#[derive(Debug, Clone, PartialEq)]
pub enum Param {
    /// Text, or NULL.
    Text(Option<String>),
    /// Bytes. MySQL's VARBINARY columns take text as bytes.
    Bytes(Vec<u8>),
    /// A 64-bit integer, or NULL.
    Int(Option<i64>),
}
