//! **Posthouse** makes "change my database *and* tell the world" one reliable step.

#[cfg(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
compile_error!(
    "posthouse needs a database: enable at least one of the features \"postgres\", \"mysql\", \"sqlite\", \
     for example posthouse = { version = \"0.1\", features = [\"postgres\", \"relay\"] }"
);

mod error;
pub mod message;
mod outbox;
#[cfg(feature = "relay")]
mod relay;
mod settings;
pub mod store;
#[cfg(feature = "relay")]
pub mod transport;

pub use error::{Error, ErrorKind};
pub use message::{Envelope, Event, Headers, IntoMessage, Limits, Message, MessageId};
pub use outbox::{Outbox, OutboxBuilder, Tx, migrate};
#[cfg(feature = "relay")]
pub use relay::{BreakerState, DestinationStats, Relay, RelayBuilder, RelayStats};
pub use settings::{HttpRoute, OnExhausted, Ordering, RelaySettings, Retry, Route};
