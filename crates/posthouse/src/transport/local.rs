//! `local:` destinations: async functions in the same process.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

use super::{Delivery, Outcome, Transport};
use crate::Envelope;

/// What a local handler says when it fails. Any error converts into "try again".
#[derive(Debug)]
pub struct LocalError(Outcome);

impl LocalError {
    /// Try again with back-off.
    pub fn retry(error: impl fmt::Display) -> Self {
        Self(Outcome::Retry { after: None, error: error.to_string().into() })
    }

    /// It can never work: FAILED at once.
    pub fn reject(error: impl fmt::Display) -> Self {
        Self(Outcome::Rejected(error.to_string().into()))
    }

    /// What it depends on is down: no attempt is counted, the breaker opens.
    pub fn unavailable(error: impl fmt::Display) -> Self {
        Self(Outcome::Unavailable(error.to_string().into()))
    }
}

impl<E: std::error::Error> From<E> for LocalError {
    fn from(e: E) -> Self {
        Self::retry(e)
    }
}

type Handler = Arc<dyn Fn(&Envelope) -> BoxFuture<'static, Result<(), LocalError>> + Send + Sync>;

/// The `local` transport: a handler per address.
#[derive(Default)]
pub(crate) struct Local {
    handlers: HashMap<String, Handler>,
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.handlers.keys()).finish()
    }
}

impl Local {
    /// Registers a handler that gets the payload decoded from JSON.
    pub(crate) fn on<M, F, Fut, E>(&mut self, address: String, f: F)
    where
        M: DeserializeOwned,
        F: Fn(M) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<LocalError> + 'static,
    {
        let handler: Handler = Arc::new(move |envelope| match serde_json::from_slice(&envelope.payload) {
            Ok(message) => {
                let running = f(message);
                Box::pin(async move { running.await.map_err(Into::into) })
            }
            Err(e) => Box::pin(async move { Err(LocalError::reject(format!("payload is not what the handler takes: {e}"))) }),
        });
        self.handlers.insert(address, handler);
    }

    /// Registers a handler that gets the whole envelope.
    pub(crate) fn on_envelope<F, Fut, E>(&mut self, address: String, f: F)
    where
        F: Fn(Envelope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<LocalError> + 'static,
    {
        let handler: Handler = Arc::new(move |envelope| {
            let running = f(envelope.clone());
            Box::pin(async move { running.await.map_err(Into::into) })
        });
        self.handlers.insert(address, handler);
    }
}

impl Transport for Local {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        // A handler that panics takes its delivery with it, which answers "try again"; spawned tasks keep the panic from the others.
        let mut running = tokio::task::JoinSet::new();
        for delivery in batch {
            match self.handlers.get(delivery.address()) {
                None => {
                    let error = format!(
                        "no local handler named {:?} in this process; register it with RelayBuilder::local, then requeue",
                        delivery.address()
                    );
                    delivery.retry(error, None);
                }
                Some(handler) => {
                    let handler = handler.clone();
                    running.spawn(async move {
                        let handled = handler(delivery.message());
                        let left = delivery.time_left();
                        match tokio::time::timeout(left, handled).await {
                            Ok(Ok(())) => delivery.delivered(),
                            Ok(Err(LocalError(outcome))) => delivery.answer(outcome),
                            Err(_) => {
                                delivery.retry(format!("handler did not finish within {left:.1?} (relay.send_timeout)"), None)
                            }
                        }
                    });
                }
            }
        }
        Box::pin(async move { while running.join_next().await.is_some() {} })
    }
}
