//! What an inbox asks of a database: [`InboxRows`] on a connection, [`InboxStore`] for people.

#[cfg(feature = "inbox")]
mod asked {
    use std::fmt;
    use std::time::Duration;

    use futures_util::future::BoxFuture;
    use serde::{Deserialize, Serialize};

    use crate::Error;
    use crate::store::{Listed, Tables};

    /// The states of a received message.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
    pub enum InboxStatus {
        /// It had its effect.
        Success,
        /// It failed and waits for its next run.
        PendingRetry,
        /// A run is under way (or was, when its process died).
        Retrying,
        /// Given up, or set aside as unreadable; a person decides.
        Failed,
    }

    impl InboxStatus {
        /// As it is written in SQL.
        pub fn as_str(self) -> &'static str {
            match self {
                Self::Success => "SUCCESS",
                Self::PendingRetry => "PENDING_RETRY",
                Self::Retrying => "RETRYING",
                Self::Failed => "FAILED",
            }
        }

        /// Anything else than the four, which only another program can have written, counts as given up.
        pub(crate) fn parse(text: &str) -> Self {
            match text {
                "SUCCESS" => Self::Success,
                "PENDING_RETRY" => Self::PendingRetry,
                "RETRYING" => Self::Retrying,
                _ => Self::Failed,
            }
        }
    }

    /// The parts of a message that are only kept while it isn't done.
    #[doc(hidden)]
    #[derive(Debug, Clone)]
    pub struct Copied<'a> {
        pub(crate) key: Option<String>,
        pub(crate) content_type: String,
        pub(crate) headers: Option<String>,
        pub(crate) payload: &'a [u8],
    }

    /// A row to insert. Its times follow from its status; of a SUCCESS only consumer, id, type and source are written.
    #[doc(hidden)]
    #[derive(Debug, Clone)]
    pub struct NewRow<'a> {
        pub(crate) consumer: &'a str,
        pub(crate) id: &'a str,
        pub(crate) status: InboxStatus,
        pub(crate) kind: &'a str,
        pub(crate) source: Option<&'a str>,
        pub(crate) copy: Option<&'a Copied<'a>>,
        pub(crate) attempts: i32,
        pub(crate) claims: i32,
        /// Until it is due, or until its lease ends.
        pub(crate) wait: Duration,
        pub(crate) owner: Option<&'a str>,
        pub(crate) error: Option<&'a str>,
    }

    /// One row by its whole key.
    #[doc(hidden)]
    #[derive(Debug, Clone, Copy)]
    pub struct RowKey<'a> {
        pub(crate) consumer: &'a str,
        pub(crate) id: &'a str,
        /// Guards every change.
        pub(crate) version: i32,
    }

    /// Where a known message stands.
    #[doc(hidden)]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Standing {
        pub(crate) status: InboxStatus,
        /// Its time has come, or its lease has ended.
        pub(crate) due: bool,
        /// Microseconds since 1970 UTC.
        pub(crate) next_us: Option<i64>,
        pub(crate) version: i32,
        pub(crate) attempts: i32,
        pub(crate) claims: i32,
    }

    /// What a run that was claimed came to, if not to success.
    #[doc(hidden)]
    #[derive(Debug, Clone)]
    pub struct RunFailed<'a> {
        pub(crate) attempts: i32,
        pub(crate) claims: i32,
        /// Until the next run; None: FAILED.
        pub(crate) wait: Option<Duration>,
        /// None: the error before stays.
        pub(crate) error: Option<&'a str>,
    }

    /// A row that a worker took.
    #[doc(hidden)]
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct TakenRow {
        pub(crate) id: String,
        pub(crate) version: i32,
        pub(crate) attempts: i32,
        pub(crate) claims: i32,
    }

    /// A received message, as the lists show it.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    #[non_exhaustive]
    pub struct InboxRow {
        /// Which consumer received it.
        pub consumer: String,
        /// Message id.
        pub message_id: String,
        /// Where it stands.
        pub status: InboxStatus,
        /// Type.
        #[serde(rename = "type")]
        pub kind: String,
        /// Where it came from (JSON).
        pub source: Option<String>,
        /// Failed runs.
        pub attempts: i32,
        /// Runs without a result.
        pub claims: i32,
        /// Counts the changes of this row.
        pub version: i32,
        /// Next run (of a running one: when its lease ends), microseconds since 1970 UTC.
        pub next_attempt_us: Option<i64>,
        /// Who is running it.
        pub owner: Option<String>,
        /// Last error.
        pub last_error: Option<String>,
        /// When it was first seen, microseconds since 1970 UTC.
        pub first_us: i64,
        /// When it last changed, microseconds since 1970 UTC.
        pub last_us: i64,
        /// When it had its effect, microseconds since 1970 UTC.
        pub success_us: Option<i64>,
    }

    /// One received message with everything that is kept of it.
    #[derive(Debug, Clone, PartialEq, Serialize)]
    #[non_exhaustive]
    pub struct InboxDetail {
        /// The row.
        #[serde(flatten)]
        pub row: InboxRow,
        /// Ordering key.
        pub key: Option<String>,
        /// Media type; None once it succeeded.
        pub content_type: Option<String>,
        /// Headers, as stored (JSON).
        pub headers: Option<String>,
        /// Payload bytes; None once it succeeded.
        #[serde(skip)]
        pub payload: Option<Vec<u8>>,
    }

    /// Which received messages a list shows.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct InboxFilter {
        /// Only this consumer.
        pub consumer: Option<String>,
        /// Only this status.
        pub status: Option<InboxStatus>,
        /// Only this type.
        pub kind: Option<String>,
        /// Only those first seen at this time or later, microseconds since 1970 UTC.
        pub first_after_us: Option<i64>,
        /// Only those first seen before this time, microseconds since 1970 UTC.
        pub first_before_us: Option<i64>,
        /// Only those with this text in message id, type, key, last error, source or payload, byte for byte.
        pub text: Option<String>,
        /// Payloads are not searched for text.
        pub sealed: bool,
        /// How long to search when no index leads to what is wanted. None: [`LIST_TIME`](crate::store::LIST_TIME), with text
        /// [`TEXT_TIME`](crate::store::TEXT_TIME).
        pub within: Option<Duration>,
        /// Only those after this consumer and message id (where the page before says that the next one begins).
        pub after: Option<(String, String)>,
        /// At most this many. 1 to 10 000.
        pub limit: u32,
    }

    /// What an operator does to received messages.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum InboxAction {
        /// Run it again from the start, now. Applies to FAILED ones and to ones that wait for a retry.
        Requeue,
        /// Give it up: FAILED, and never run again unless requeued. Applies to everything that isn't done; a run that is
        /// under way is rolled back at its end.
        Skip,
    }

    impl InboxAction {
        /// As the audit log names it.
        pub fn name(self) -> &'static str {
            match self {
                Self::Requeue => "inbox requeue",
                Self::Skip => "inbox skip",
            }
        }
    }

    /// How many received messages there are that aren't done, per consumer and status.
    #[derive(Debug, Clone, PartialEq, Eq, Serialize)]
    pub struct InboxBacklog {
        /// Consumer.
        pub consumer: String,
        /// PENDING_RETRY, RETRYING or FAILED.
        pub status: InboxStatus,
        /// Messages.
        pub messages: i64,
        /// When the oldest was first seen, microseconds since 1970 UTC.
        pub oldest_us: i64,
        /// How long ago that was by the database's clock, in microseconds.
        pub age_us: i64,
    }

    /// A page of received messages; the next one begins behind a consumer and message id.
    pub type InboxPage = Listed<InboxRow, (String, String)>;

    /// What people ask of the inboxes of a set of tables. Every call has a deadline inside.
    pub trait InboxStore: Send + Sync + fmt::Debug {
        /// Received messages by consumer and message id.
        fn list<'a>(&'a self, filter: &'a InboxFilter) -> BoxFuture<'a, Result<InboxPage, Error>>;
        /// One received message.
        fn show<'a>(&'a self, consumer: &'a str, message_id: &'a str) -> BoxFuture<'a, Result<Option<InboxDetail>, Error>>;
        /// Applies an action to messages of a consumer, with an audit line each; answers the ids it applied to.
        fn act<'a>(
            &'a self,
            consumer: &'a str,
            message_ids: &'a [String],
            action: InboxAction,
            actor: &'a str,
        ) -> BoxFuture<'a, Result<Vec<String>, Error>>;
        /// What isn't done, by consumer and status.
        fn backlog(&self) -> BoxFuture<'_, Result<Vec<InboxBacklog>, Error>>;
    }

    macro_rules! ask {
        ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $out:ty;)*) => {
            $(
                $(#[$doc])*
                #[doc(hidden)]
                fn $name<'c>(
                    conn: &'c mut Self::Connection,
                    tables: &'c Tables,
                    $($arg: $type),*
                ) -> impl Future<Output = Result<$out, Error>> + Send + 'c;
            )*
        };
    }

    /// The rows of an inbox; each call is one step on a connection inside a transaction.
    pub trait InboxRows: sqlx::Database {
        /// Begins a transaction and leaves a mark in it that goes with it. One text, so that the mark costs no round trip.
        #[doc(hidden)]
        const INBOX_BEGIN: &'static str;

        /// A pool like the user's for the worker's own connections, set up as its statements need.
        #[doc(hidden)]
        fn inbox_pool(pool: &sqlx::Pool<Self>, deadline: Duration, connections: u32) -> sqlx::Pool<Self>;

        ask! {
            /// Inserts a row; false when there is one for this consumer and id. The transaction stays usable.
            fn inbox_insert(row: &'c NewRow<'c>) -> bool;
            /// Whether this is still the transaction that [`INBOX_BEGIN`](Self::INBOX_BEGIN) began; asked once, at its end. An
            /// error of kind Database says that it isn't, too. What ends a transaction behind the handler's back: an error
            /// (PostgreSQL, where COMMIT then quietly rolls back), or the server, and the statements that follow are on their
            /// own (a deadlock or DDL on MySQL, a full disk on SQLite).
            fn inbox_marked() -> bool;
            /// Begins a transaction where the server has ended this one and a rollback without one would be an error, which
            /// leaves the driver believing that it is in one.
            fn inbox_resume() -> ();
            /// Where a message stands; None when it isn't known.
            fn inbox_standing(consumer: &'c str, id: &'c str) -> Option<Standing>;
            /// Says that a run begins: RETRYING, claims + 1, version + 1, with a fresh lease.
            fn inbox_claim(key: RowKey<'c>, owner: &'c str, lease: Duration) -> bool;
            /// Says that a run succeeded: SUCCESS, version + 1, its copy removed.
            fn inbox_succeed(key: RowKey<'c>) -> bool;
            /// Says that a run, or the wait for one, came to nothing: PENDING_RETRY or FAILED, version + 1.
            fn inbox_fail(key: RowKey<'c>, failed: &'c RunFailed<'c>) -> bool;
            /// Makes a due row that waits a SUCCESS, for a caller that has the effect in this transaction.
            fn inbox_adopt(consumer: &'c str, id: &'c str) -> bool;
            /// Takes due rows, oldest first, passing over those that others are taking: RETRYING, version + 1, with a lease.
            fn inbox_take(consumer: &'c str, owner: &'c str, lease: Duration, limit: u32) -> Vec<TakenRow>;
            /// Renews the leases of rows that are still this owner's.
            fn inbox_renew(consumer: &'c str, owner: &'c str, ids: &'c [String], lease: Duration) -> ();
            /// Removes successes older than this, from the oldest that is not older than `from_us` on, passing over those that
            /// others are removing; how many, and when the last of them succeeded.
            fn inbox_purge(consumer: &'c str, older: Duration, from_us: i64, limit: u32) -> (u64, Option<i64>);
            /// Everything that is kept of one message.
            fn inbox_read(consumer: &'c str, id: &'c str) -> Option<InboxDetail>;
            /// Rows that the filter wants, up to this key and this one included.
            fn inbox_list(filter: &'c InboxFilter, upto: Option<&'c (String, String)>) -> Vec<InboxRow>;
            /// The key of the last of the next `n` rows among which the filter looks; None: there are fewer.
            fn inbox_step(filter: &'c InboxFilter, n: u32) -> Option<(String, String)>;
            /// Applies an action to one row, with an audit line.
            fn inbox_act(consumer: &'c str, id: &'c str, action: InboxAction, actor: &'c str) -> bool;
            /// What isn't done.
            fn inbox_backlog() -> Vec<InboxBacklog>;
        }
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(crate) fn micros(d: Duration) -> i64 {
        i64::try_from(d.as_micros()).unwrap_or(i64::MAX)
    }

    /// The `detail` of an audit line about a received message.
    pub(crate) fn audit_detail(consumer: &str, id: &str) -> String {
        serde_json::json!({ "consumer": consumer, "message_id": id }).to_string()
    }
}

#[cfg(feature = "inbox")]
pub use asked::*;

/// Without the feature `inbox` nothing is asked.
#[cfg(not(feature = "inbox"))]
#[doc(hidden)]
pub trait InboxRows {}

#[cfg(not(feature = "inbox"))]
impl<DB> InboxRows for DB {}
