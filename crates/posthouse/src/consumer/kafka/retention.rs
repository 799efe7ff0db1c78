//! How long a topic's records can come again, which the inbox must remember their ids for.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

const DEADLINE: Duration = Duration::from_secs(10);

/// How long a record can be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Replay {
    For(Duration),
    /// The topic keeps its records (or the last one of each key) for ever.
    Always,
}

/// Says nothing: what matters is in the results.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "posthouse::kafka", %error, "{reason}");
    }
}

/// The retention of a topic; an error where the brokers can't be asked, or don't allow it (DESCRIBE_CONFIGS).
pub(super) async fn retention_of(config: &ClientConfig, topic: &str) -> Result<Replay, String> {
    let admin: AdminClient<Quiet> = config.create_with_context(Quiet).map_err(|e| e.to_string())?;
    let options = AdminOptions::new().request_timeout(Some(DEADLINE));
    let described = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &options).await;
    // Ends its thread, which takes a moment.
    drop(tokio::task::spawn_blocking(move || drop(admin)));
    let described = described.map_err(|e| e.to_string())?;
    let Some(described) = described.into_iter().next() else { return Err("no answer".into()) };
    read(&described.map_err(|code| code.to_string())?)
}

fn read(config: &ConfigResource) -> Result<Replay, String> {
    let value = |name: &str| config.get(name).and_then(|entry| entry.value.as_deref());
    if value("cleanup.policy") == Some("compact") {
        return Ok(Replay::Always);
    }
    match value("retention.ms").map(str::parse::<i64>) {
        Some(Ok(ms)) => Ok(u64::try_from(ms).map_or(Replay::Always, |ms| Replay::For(Duration::from_millis(ms)))),
        _ => Err("it has no retention.ms".into()),
    }
}

/// Warns where a topic's records can come again after the inbox has forgotten their ids. `remembered` is how long it keeps them;
/// None: for ever.
pub(super) fn warn_if_forgotten_earlier(topic: &str, replay: Replay, remembered: Option<Duration>) -> bool {
    let Some(remembered) = remembered else { return false };
    let replayed = match replay {
        Replay::Always => "for ever".to_owned(),
        Replay::For(time) if time > remembered => format!("for {}", humantime::format_duration(time)),
        Replay::For(_) => return false,
    };
    tracing::warn!(
        topic,
        "records of this topic can be read again {replayed} (retention.ms), and the inbox forgets their ids after {}: one that is \
         read again later has its effect a second time; keep ids in the inbox as long as the topic keeps records",
        humantime::format_duration(remembered)
    );
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_that_outlives_the_inbox_is_warned_about() {
        let day = Duration::from_secs(86_400);
        for (replay, remembered, warned) in [
            (Replay::For(day), Some(day), false),
            (Replay::For(day + Duration::from_millis(1)), Some(day), true),
            (Replay::Always, Some(day), true),
            (Replay::Always, None, false),
        ] {
            assert_eq!(warn_if_forgotten_earlier("t", replay, remembered), warned, "{replay:?} {remembered:?}");
        }
    }
}
