//! What happens when all records of a stopped producer have been reported on.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseProducer, BaseRecord, NoCustomPartitioner, Producer as _, ProducerContext, PurgeConfig};

use super::lane::{Drain, Phase, Shared, key_of};
use super::settings::Lane as Kind;
use super::{answer, record};
use crate::transport::content::content;
use crate::transport::{Delivery, Outcome};

impl Shared {
    /// Answers what failed, keeps what goes out again, and opens the lane.
    pub(super) fn settle(&self, drain: Drain) {
        let Drain { producer, late, .. } = drain;
        let fatal = producer.client().fatal_error();
        // Errors that concern every record, such as a missing permission, as opposed to the one for a failed batch.
        let of_all = fatal.map(|(code, _)| code).filter(|&code| !answer::is_innocent(code));

        let mut failed = std::mem::take(&mut self.state().failed);
        failed.sort_unstable_by_key(|(sent, _)| sent.number);
        let mut again = Vec::new();
        let mut keys_again = HashSet::new();
        let mut prober = self.prober();
        for (sent, code) in failed {
            let Some(delivery) = sent.take() else { continue };
            let key = key_of(&delivery);
            if key.as_ref().is_some_and(|key| self.state().stopped.contains_key(key)) {
                delivery.held_back();
                continue;
            }
            let waits = key.as_ref().is_some_and(|key| keys_again.contains(key));
            if !late && (waits || (answer::is_innocent(code) && of_all.is_none())) {
                keys_again.extend(key);
                again.push(delivery);
                continue;
            }
            let outcome = if late {
                self.unavailable("none by the deadline (relay.send_timeout)")
            } else if answer::blames_batch(code) {
                prober.get_or_insert_with(|| Prober::new(self)).outcome(self, &delivery, sent.number)
            } else {
                self.outcome(of_all.filter(|_| answer::is_innocent(code)).unwrap_or(code), delivery.address())
            };
            match outcome {
                Outcome::Delivered => delivery.delivered(),
                outcome => self.fail(&mut self.state(), delivery, outcome),
            }
        }
        drop(prober);

        let mut state = self.state();
        state.opened.clear();
        for (key, waiting) in std::mem::take(&mut state.opening) {
            let stopped = state.stopped.contains_key(&key);
            for delivery in waiting {
                if stopped { delivery.held_back() } else { again.push(delivery) }
            }
        }
        again.extend(std::mem::take(&mut state.backlog));
        state.backlog = again.into();
        if matches!(state.phase, Phase::Draining(_)) {
            // Never the same producer: records were taken from its queue, so to the broker the next one would seem to have
            // lost its predecessors.
            state.phase = Phase::Idle;
        }
        drop(state);
        self.changed.notify_waiters();
    }
}

/// Sends single records of a refused batch, one after the other.
pub(super) struct Prober(Result<BaseProducer<Verdict>, KafkaError>);

/// The record that was reported on last, by its number, and what came of it.
#[derive(Default)]
struct Verdict(Mutex<Option<(u64, Result<(), Code>)>>);

impl Verdict {
    fn last(&self) -> MutexGuard<'_, Option<(u64, Result<(), Code>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Verdict {
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "posthouse::kafka", %error, "{reason}");
    }
}

impl ProducerContext<NoCustomPartitioner> for Verdict {
    type DeliveryOpaque = Box<u64>;

    fn delivery(&self, result: &DeliveryResult<'_>, number: Box<u64>) {
        let result = match result {
            Ok(_) => Ok(()),
            Err((error, _)) => Err(error.rdkafka_error_code().unwrap_or(Code::Unknown)),
        };
        *self.last() = Some((*number, result));
    }
}

impl Prober {
    fn new(shared: &Shared) -> Self {
        let mut config = shared.settings.config(Kind::Alone, Duration::ZERO);
        // Nothing comes that waiting would join to it.
        config.remove("queue.buffering.max.ms").set("linger.ms", "0").set("message.timeout.ms", "0");
        // One at a time keeps its order without, and librdkafka takes half a second to become idempotent.
        config.set("enable.idempotence", "false").remove("max.in.flight.requests.per.connection");
        Self(config.create_with_context(Verdict::default()))
    }

    /// Blocks the lane's thread, as nothing else may go out meanwhile.
    fn outcome(&self, shared: &Shared, delivery: &Delivery, number: u64) -> Outcome {
        let producer = match &self.0 {
            Ok(producer) => producer,
            Err(e) => return shared.unavailable(&format!("no producer could be made: {e}")),
        };
        if delivery.time_left().is_zero() {
            return shared.unavailable("none by the deadline (relay.send_timeout)");
        }
        let content = match content(delivery) {
            Ok(content) => content,
            Err(why) => return Outcome::Rejected(why.into()),
        };
        let mut record: BaseRecord<'_, [u8], [u8], Box<u64>> = BaseRecord::with_opaque_to(delivery.address(), Box::new(number))
            .payload(&*content.payload)
            .timestamp(record::timestamp(delivery))
            .headers(record::headers(delivery, &content));
        if let Some(key) = &delivery.message().key {
            record = record.key(key.as_bytes());
        }
        if let Err((error, _)) = producer.send(record) {
            return shared.outcome(error.rdkafka_error_code().unwrap_or(Code::Unknown), delivery.address());
        }
        let verdict = loop {
            producer.poll(Duration::from_millis(1));
            // An earlier one's report may come late.
            if let Some((of, verdict)) = *producer.context().last()
                && of == number
            {
                break verdict;
            }
            if delivery.time_left().is_zero() || matches!(shared.state().phase, Phase::Closing) {
                producer.purge(PurgeConfig::default().queue().inflight());
                return shared.unavailable("none by the deadline (relay.send_timeout)");
            }
        };
        match verdict {
            Ok(()) => Outcome::Delivered,
            Err(code) => shared.outcome(code, delivery.address()),
        }
    }
}
