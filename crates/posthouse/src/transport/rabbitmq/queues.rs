//! How much waits in queues.

use std::fmt;

use lapin::options::QueueDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{Error as LapinError, ErrorKind};
use tokio::time::timeout;

use super::RabbitMqSettings;
use super::link::Link;
use crate::Error;
use crate::error::storable;
use crate::transport::Waiting;

/// Looks into queues of a RabbitMQ broker without taking anything out of them, on a connection of its own.
///
/// ```no_run
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let queues = posthouse::transport::RabbitMqQueues::new("amqp://localhost")?;
/// println!("{} messages wait", queues.waiting("inventory.deduct").await?.messages);
/// # Ok(()) }
/// ```
pub struct RabbitMqQueues {
    link: Link,
}

impl fmt::Debug for RabbitMqQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqQueues").field("broker", &self.link.broker()).finish_non_exhaustive()
    }
}

impl RabbitMqQueues {
    /// Checks the settings. Connects when it is asked something, and keeps the connection.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<RabbitMqSettings>) -> Result<Self, Error> {
        let mut settings = settings.into();
        settings.connection_name = format!("{} (queues)", settings.connection_name);
        Ok(Self { link: Link::new(settings)? })
    }

    /// Messages that are ready in a queue (those that a consumer holds unacknowledged are not among them), and its consumers.
    /// Answers within twice the `connect_timeout`.
    ///
    /// # Errors
    /// Why it can't be told, in a sentence without secrets.
    pub async fn waiting(&self, queue: &str) -> Result<Waiting, String> {
        let name = ShortString::try_new(queue).map_err(|_| format!("the name {queue:?} has more than 255 bytes"))?;
        let live = self.link.live().await?;
        let limit = self.link.call_timeout();
        let ask = async {
            // A queue that isn't there costs the channel.
            let channel = live.open_channel().await?;
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            let found = channel.queue_declare(name, passive, FieldTable::default()).await?;
            let waiting = Waiting { messages: found.message_count().into(), consumers: Some(found.consumer_count().into()) };
            channel.close(200, "OK".into()).await?;
            Ok(waiting)
        };
        match timeout(limit, ask).await {
            Ok(Ok(waiting)) => Ok(waiting),
            Ok(Err(e)) => Err(self.explain(queue, &e)),
            Err(_) => {
                // The other end may be gone without a word; the next question finds out on a new connection.
                live.cut();
                Err(format!("{} did not answer within {limit:?} (connect_timeout)", self.link.broker()))
            }
        }
    }

    fn explain(&self, queue: &str, error: &LapinError) -> String {
        let broker = self.link.broker();
        match error.kind() {
            ErrorKind::ProtocolError(e) if e.get_id() == 404 => {
                format!("{broker} has no queue {queue:?} in the virtual host {:?}", self.link.vhost())
            }
            ErrorKind::ProtocolError(e) => {
                format!("{broker} doesn't tell about {queue:?}: {}", storable(e.get_message().as_str(), 300))
            }
            _ => format!("the connection to {broker} was lost: {}", storable(&error.to_string(), 300)),
        }
    }

    /// Closes the connection.
    pub async fn close(&self) {
        self.link.close().await;
    }
}
