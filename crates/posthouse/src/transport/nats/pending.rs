//! How much waits in streams.

use std::fmt;
use std::time::Duration;

use async_nats::jetstream::ErrorCode;
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use tokio::time::timeout;

use super::NatsSettings;
use super::connection::Link;
use crate::Error;
use crate::error::storable;
use crate::transport::Waiting;

/// What one answer may take.
const DEADLINE: Duration = Duration::from_secs(10);

/// Tells how much waits in JetStream streams for durable consumers, on a connection of its own.
///
/// ```no_run
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let pending = posthouse::transport::NatsPending::new("nats://localhost")?;
/// println!("{} messages wait", pending.waiting("ORDERS", "stock").await?.messages);
/// # Ok(()) }
/// ```
pub struct NatsPending {
    link: Link,
}

impl fmt::Debug for NatsPending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsPending").field("servers", &self.link.servers).finish_non_exhaustive()
    }
}

impl NatsPending {
    /// Checks the settings. Connects when it is asked something, and keeps the connection.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<NatsSettings>) -> Result<Self, Error> {
        Ok(Self { link: Link::new(settings.into())? })
    }

    /// Messages of a stream that a consumer has not been given yet. Answers within 10 s.
    ///
    /// # Errors
    /// Why it can't be told, in a sentence without secrets.
    pub async fn waiting(&self, stream: &str, consumer: &str) -> Result<Waiting, String> {
        let servers = &self.link.servers;
        let ask = async {
            let connection = self.link.get().await?;
            let failed = |e: &dyn fmt::Display| format!("{servers} doesn't tell: {}", storable(&e.to_string(), 300));
            let found = connection.context.get_stream_no_info(stream).await.map_err(|e| failed(&e))?;
            let asked = tokio::select! {
                info = found.consumer_info(consumer) => info,
                why = connection.lost() => return Err(why),
            };
            let info = asked.map_err(|e| match e.kind() {
                ConsumerInfoErrorKind::NotFound => format!("the stream {stream:?} has no consumer {consumer:?}"),
                ConsumerInfoErrorKind::StreamNotFound => format!("there is no stream {stream:?}"),
                ConsumerInfoErrorKind::JetStream(e) if e.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                    format!("there is no stream {stream:?}")
                }
                _ => failed(&e),
            })?;
            Ok(Waiting { messages: info.num_pending, consumers: None })
        };
        match timeout(DEADLINE, ask).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("{servers} did not answer within {DEADLINE:?}")),
        }
    }

    /// Closes the connection.
    pub async fn close(&self) {
        self.link.close().await;
    }
}
