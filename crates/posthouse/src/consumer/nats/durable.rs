//! The durable consumer on the server: found, or made.

use std::error::Error as StdError;
use std::time::Duration;

use async_nats::datetime::DateTime;
use async_nats::jetstream::consumer::{AckPolicy, Config, Info, pull};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{ConsumerCreateStrictErrorKind, Stream};
use async_nats::jetstream::{Context, ErrorCode};

use super::Wanted;
use crate::error::storable;

/// Unacknowledged messages of a consumer that is made here, for each that one process takes. More processes may share it, and
/// those that wait for a redelivery count as well.
const SHARED_BY: i64 = 10;

/// At least so many; the server's own default.
const ACK_PENDING: i64 = 1_000;

/// What the server does where a consumer doesn't say.
const ACK_WAIT: Duration = Duration::from_secs(30);

/// A durable consumer as it is on the server.
#[derive(Debug)]
pub(super) struct Durable {
    /// When it was made: another one of the same name was made at another time.
    pub(super) created: DateTime,
    /// What isn't acknowledged, nor said to be worked on, for this long, is delivered again.
    pub(super) ack_wait: Duration,
    /// The most messages that may be asked for at once.
    pub(super) max_batch: usize,
    /// The longest that asking may last.
    pub(super) max_expires: Duration,
    /// The most deliveries of one message, if there is a limit.
    pub(super) max_deliver: Option<i64>,
    /// How long the stream keeps a message, if there is a limit.
    pub(super) max_age: Option<Duration>,
}

/// Finds the consumer, or makes it.
///
/// # Errors
/// Why there is none that can be used, as people will read it.
pub(super) async fn find_or_make(context: &Context, wanted: &Wanted) -> Result<Durable, String> {
    let Wanted { stream, durable, .. } = wanted;
    let found = context.get_stream(stream).await.map_err(|e| match e.kind() {
        GetStreamErrorKind::JetStream(e) if e.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            format!("there is no JetStream stream {stream:?}; create it, or correct the name")
        }
        _ => failed(&format!("the stream {stream:?} could not be looked up"), &e),
    })?;
    let info = match look_up(&found, durable).await? {
        Some(info) => info,
        None => {
            match found.create_consumer_strict(config(wanted)).await {
                Ok(_) => tracing::info!(stream, durable, "the durable consumer was created"),
                // Another process was quicker.
                Err(e) if e.kind() == ConsumerCreateStrictErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed(&format!("the consumer {durable:?} could not be created"), &e)),
            }
            look_up(&found, durable)
                .await?
                .ok_or_else(|| format!("the consumer {durable:?} was deleted as soon as it was made"))?
        }
    };
    check(&info.config).map_err(|why| format!("the consumer {durable:?} of the stream {stream:?} {why}"))?;
    let config = &info.config;
    let waits = config.backoff.iter().copied().chain([config.ack_wait]).filter(|wait| !wait.is_zero());
    let limit = |max: Duration| (!max.is_zero()).then_some(max);
    Ok(Durable {
        created: info.created,
        ack_wait: waits.min().unwrap_or(ACK_WAIT),
        max_batch: usize::try_from(config.max_batch).ok().filter(|&max| max > 0).unwrap_or(usize::MAX),
        max_expires: limit(config.max_expires).unwrap_or(Duration::MAX),
        max_deliver: (config.max_deliver > 0).then_some(config.max_deliver),
        max_age: limit(found.cached_info().config.max_age),
    })
}

/// When the consumer was made, if it is there.
///
/// # Errors
/// The server didn't say.
pub(super) async fn created(context: &Context, wanted: &Wanted) -> Result<Option<DateTime>, String> {
    let stream = context.get_stream_no_info(&wanted.stream).await.map_err(|e| e.to_string())?;
    Ok(look_up(&stream, &wanted.durable).await?.map(|info| info.created))
}

async fn look_up<I>(stream: &Stream<I>, durable: &str) -> Result<Option<Info>, String> {
    match stream.consumer_info(durable).await {
        Ok(info) => Ok(Some(info)),
        Err(e) if matches!(e.kind(), ConsumerInfoErrorKind::NotFound | ConsumerInfoErrorKind::StreamNotFound) => Ok(None),
        Err(e) => Err(failed(&format!("the consumer {durable:?} could not be looked up"), &e)),
    }
}

fn config(wanted: &Wanted) -> pull::Config {
    let mut config = pull::Config {
        durable_name: Some(wanted.durable.clone()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: wanted.ack_wait,
        // A message may be given back for as long as the database is away.
        max_deliver: -1,
        max_ack_pending: (i64::from(wanted.prefetch) * SHARED_BY).max(ACK_PENDING),
        ..pull::Config::default()
    };
    match &*wanted.subjects {
        // Servers before 2.10 know no list.
        [one] => config.filter_subject = one.clone(),
        all => config.filter_subjects = all.to_vec(),
    }
    config
}

/// What is wrong with a consumer that others made.
fn check(config: &Config) -> Result<(), String> {
    if config.deliver_subject.is_some() {
        return Err("is a push consumer, which can't be pulled from; choose another durable name, or delete it".into());
    }
    if config.ack_policy != AckPolicy::Explicit {
        return Err(format!(
            "has the ack policy {:?}, with which messages are lost; it must be Explicit: choose another durable name, or make it again",
            config.ack_policy
        ));
    }
    if config.headers_only {
        return Err("delivers headers without payloads (headers_only); choose another durable name, or make it again".into());
    }
    Ok(())
}

fn failed(what: &str, e: &dyn StdError) -> String {
    let mut causes: Vec<String> = Vec::new();
    for cause in std::iter::successors(Some(e), |&e| e.source()).map(ToString::to_string) {
        // The library repeats causes in what is above them.
        if !causes.last().is_some_and(|above| above.ends_with(&cause)) {
            causes.push(cause);
        }
    }
    let cause = causes.join(": ");
    let hint = if cause.contains("no responders") { "; JetStream is not enabled there, or has no leader" } else { "" };
    storable(&format!("{what}: {cause}{hint}"), 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consumers_that_would_lose_something_are_refused() {
        let good = Config { ack_policy: AckPolicy::Explicit, ..Config::default() };
        assert_eq!(check(&good), Ok(()));
        for (bad, word) in [
            (Config { deliver_subject: Some("a".into()), ..good.clone() }, "push"),
            (Config { ack_policy: AckPolicy::None, ..good.clone() }, "None"),
            (Config { ack_policy: AckPolicy::All, ..good.clone() }, "All"),
            (Config { headers_only: true, ..good.clone() }, "headers_only"),
        ] {
            assert!(check(&bad).unwrap_err().contains(word), "{bad:?}");
        }
    }
}
