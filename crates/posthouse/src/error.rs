//! The one error type of the library.

use std::time::Duration;

/// What can go wrong, with a sentence that says what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of a message breaks a limit or a rule; nothing was written.
    #[error("{field}: {reason}")]
    Invalid {
        /// The field of the message, as it is named in SQL (`payload`, `message_key`, …).
        field: &'static str,
        /// What is wrong and which limit it breaks.
        reason: String,
    },
    /// `publish` or `first_time` was given a connection that is not inside a transaction.
    #[error(
        "this needs a connection inside a transaction, so that the message commits or rolls back with your rows; \
         begin one first (a message that stands on its own is published with publish_alone)"
    )]
    NotInTransaction,
    /// A call that joined the transaction (see `#[posthouse::transactional]`) failed, and was then to be committed with it all
    /// the same. It was rolled back: nothing of it remains.
    #[error(
        "rolled back instead of committed: {0}; return that error to the one who commits, \
         or call it with the outbox, so that it has a transaction of its own"
    )]
    RollbackOnly(String),
    /// The payload could not be turned into JSON.
    #[error("payload: can't be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The database refused or could not be reached.
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    /// A call did not answer within its deadline.
    #[error("{what}: no answer within {after:?}")]
    Timeout {
        /// The call that was given up.
        what: &'static str,
        /// The deadline it was given.
        after: Duration,
    },
    /// The tables are missing, or were made by another version.
    #[error("schema: {0}")]
    Schema(String),
    /// A setting can't hold; the text names it and its limit.
    #[error("{0}")]
    Config(String),
    /// An archive can't be written or read, or what was read isn't what was written.
    #[error("archive: {0}")]
    Archive(String),
}

/// What a caller can do about an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The input is wrong; trying again gives the same answer.
    Invalid,
    /// A setting or the schema is wrong; a person has to change it.
    Config,
    /// A conflict with another transaction (serialization failure, deadlock, lock timeout, busy): run the whole transaction again.
    Conflict,
    /// The database could not be reached or did not answer in time, or an archive can't be used.
    Unavailable,
    /// The database refused for another reason.
    Database,
    /// A part of the transaction had failed, so all of it was rolled back; what to do about it depends on that failure.
    RolledBack,
}

impl Error {
    /// Sorts the error by what a caller can do about it. Decided by SQLSTATE and error numbers, never by text.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Invalid { .. } | Error::NotInTransaction | Error::Json(_) => ErrorKind::Invalid,
            Error::Schema(_) | Error::Config(_) => ErrorKind::Config,
            Error::RollbackOnly(_) => ErrorKind::RolledBack,
            Error::Timeout { .. } | Error::Archive(_) => ErrorKind::Unavailable,
            Error::Database(e) => database_kind(e),
        }
    }

    /// [`kind`](Self::kind) of an error of the database that isn't wrapped yet.
    #[cfg(any(feature = "inbox", feature = "relay"))]
    pub(crate) fn kind_of(e: &sqlx::Error) -> ErrorKind {
        database_kind(e)
    }

    pub(crate) fn invalid(field: &'static str, reason: impl Into<String>) -> Self {
        Error::Invalid { field, reason: reason.into() }
    }
}

fn database_kind(e: &sqlx::Error) -> ErrorKind {
    match e {
        sqlx::Error::Database(d) => {
            // SQLSTATE 40xxx: transaction rollback; 55P03: lock not available. MySQL reports 1205 as HY000, so its number decides.
            // SQLite's primary result codes 5 (BUSY) and 6 (LOCKED) are the low byte of the extended code.
            let code = d.code().unwrap_or_default();
            if code.starts_with("40") && code.len() == 5 || code == "55P03" {
                return ErrorKind::Conflict;
            }
            #[cfg(feature = "mysql")]
            if let Some(m) = d.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
                return match m.number() {
                    1205 | 1213 | 1020 => ErrorKind::Conflict,
                    1040 | 1053 | 1158..=1161 | 1927 | 2006 | 2013 => ErrorKind::Unavailable,
                    _ => ErrorKind::Database,
                };
            }
            #[cfg(feature = "sqlite")]
            if d.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some() {
                return match code.parse::<i32>().map(|c| c & 0xff) {
                    Ok(5 | 6) => ErrorKind::Conflict,
                    _ => ErrorKind::Database,
                };
            }
            // SQLSTATE 08: connection exception; 57P0x: server is shutting down or starting; 53300: too many connections.
            if code.starts_with("08") || code.starts_with("57P0") || code == "53300" {
                return ErrorKind::Unavailable;
            }
            ErrorKind::Database
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => ErrorKind::Unavailable,
        _ => ErrorKind::Database,
    }
}

/// Makes any text fit to be stored: NUL becomes U+FFFD, and the text is cut at `max` bytes on a character boundary.
/// Recording an error must never fail, whatever the error says.
#[cfg(any(feature = "relay", feature = "inbox"))]
pub(crate) fn storable(text: &str, max: usize) -> String {
    let mut out = if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text.to_owned() };
    if out.len() > max {
        let mut end = max;
        while !out.is_char_boundary(end) {
            end -= 1;
        }
        out.truncate(end);
    }
    out
}

#[cfg(all(test, feature = "relay"))]
mod tests {
    use super::*;

    #[test]
    fn stored_text_is_cut_on_a_character_and_has_no_nul() {
        assert_eq!(storable("a\0b", 10), "a\u{fffd}b");
        assert_eq!(storable("äää", 3), "ä");
        assert_eq!(storable("äää", 4), "ää");
        assert_eq!(storable("😀😀", 7), "😀");
        assert_eq!(storable("😀", 3), "");
        assert_eq!(storable("\0\0", 4), "\u{fffd}", "replacing NUL grows the text, so the cut comes after it");
    }
}
