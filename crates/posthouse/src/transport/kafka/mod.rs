//! `kafka:` destinations.

mod settings;

use futures_util::future::BoxFuture;

pub use self::settings::KafkaSettings;
use super::{Delivery, Transport};
use crate::Error;

/// Sends messages to Apache Kafka.
#[derive(Debug)]
pub struct Kafka {
    settings: KafkaSettings,
}

impl Kafka {
    /// Checks the settings. Connects when the first message is sent.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub fn new(settings: impl Into<KafkaSettings>) -> Result<Self, Error> {
        let settings = settings.into();
        let problems = settings.problems();
        if !problems.is_empty() {
            let all: Vec<_> = problems.iter().map(|(field, why)| format!("{field}: {why}")).collect();
            return Err(Error::Config(all.join("; ")));
        }
        Ok(Self { settings })
    }
}

impl Transport for Kafka {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            for delivery in batch {
                delivery.unavailable(format!("not written yet: {:?}", self.settings));
            }
        })
    }
}
