//! librdkafka's producer and what it tells: reports, errors, log lines.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseProducer, NoCustomPartitioner, ProducerContext};

use super::lane::Shared;
use crate::transport::Delivery;

pub(super) type Producer = BaseProducer<Context>;

/// Makes a producer; it connects in its own threads.
pub(super) fn create(config: &ClientConfig, shared: &Arc<Shared>) -> Result<Arc<Producer>, KafkaError> {
    let context = Context { shared: Arc::downgrade(shared), producer: OnceLock::new() };
    let producer: Arc<Producer> = Arc::new(config.create_with_context(context)?);
    // Set once, here.
    let _ = rdkafka::producer::Producer::context(&*producer).producer.set(Arc::downgrade(&producer));
    Ok(producer)
}

/// Where librdkafka's reports go. Called in the thread that polls.
pub(super) struct Context {
    shared: Weak<Shared>,
    producer: OnceLock<Weak<Producer>>,
}

impl Context {
    fn producer(&self) -> Option<Arc<Producer>> {
        self.producer.get().and_then(Weak::upgrade)
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        super::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.trouble.note(&error, reason);
    }
}

impl ProducerContext<NoCustomPartitioner> for Context {
    type DeliveryOpaque = Arc<Sent>;

    fn delivery(&self, result: &DeliveryResult<'_>, sent: Arc<Sent>) {
        let Some(shared) = self.shared.upgrade() else { return };
        match result {
            Ok(_) => {
                shared.trouble.clear();
                if let Some(delivery) = sent.take() {
                    shared.on_success(&delivery);
                    delivery.delivered();
                }
            }
            Err((error, _)) => {
                let code = error.rdkafka_error_code().unwrap_or(Code::Unknown);
                shared.on_failure(self.producer().as_deref(), sent, code);
            }
        }
        shared.on_report();
    }
}

/// A delivery whose record librdkafka has. Its answer may come before the report: at its deadline.
#[derive(Debug)]
pub(super) struct Sent {
    /// Counts the records of a lane.
    pub(super) number: u64,
    delivery: Mutex<Option<Delivery>>,
    /// How many of its [`Batch`](super::lane::Batch) are unanswered.
    unanswered: Arc<AtomicUsize>,
}

impl Sent {
    pub(super) fn new(number: u64, delivery: Delivery, unanswered: Arc<AtomicUsize>) -> Self {
        unanswered.fetch_add(1, Relaxed);
        Self { number, delivery: Mutex::new(Some(delivery)), unanswered }
    }

    /// For whoever answers it; none if somebody has.
    pub(super) fn take(&self) -> Option<Delivery> {
        let delivery = self.delivery().take();
        if delivery.is_some() {
            self.unanswered.fetch_sub(1, Relaxed);
        }
        delivery
    }

    pub(super) fn delivery(&self) -> std::sync::MutexGuard<'_, Option<Delivery>> {
        self.delivery.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The last error of a connection since a record was confirmed, for people who wonder why there is no confirmation.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    known: AtomicBool,
    last: Mutex<Option<String>>,
}

impl Trouble {
    fn note(&self, error: &KafkaError, reason: &str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        // "All brokers are down" follows the error that says why.
        if last.is_none() || error.rdkafka_error_code() != Some(Code::AllBrokersDown) {
            *last = Some(crate::error::storable(reason, 1_000));
        }
        self.known.store(true, Relaxed);
    }

    fn clear(&self) {
        if self.known.swap(false, Relaxed) {
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    pub(super) fn text(&self) -> Option<String> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
