//! How long a topic's records can come again, which the inbox must remember their ids for.

use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

const DEADLINE: Duration = Duration::from_secs(10);

/// Says nothing: what matters is in the results.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}
    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(target: "posthouse::kafka", %error, "{reason}");
    }
}

/// How long a record of a topic can be read again, None for ever; an error where the brokers can't be asked, or don't allow it (DESCRIBE_CONFIGS).
pub(super) async fn retention_of(config: &ClientConfig, topic: &str) -> Result<Option<Duration>, String> {
    let admin: AdminClient<Quiet> = config.create_with_context(Quiet).map_err(|e| e.to_string())?;
    let options = AdminOptions::new().request_timeout(Some(DEADLINE));
    let described = admin.describe_configs([&ResourceSpecifier::Topic(topic)], &options).await;
    // Ends its thread, which takes a moment.
    drop(tokio::task::spawn_blocking(move || drop(admin)));
    let described = described.map_err(|e| e.to_string())?;
    let Some(described) = described.into_iter().next() else { return Err("no answer".into()) };
    read(&described.map_err(|code| code.to_string())?)
}

fn read(config: &ConfigResource) -> Result<Option<Duration>, String> {
    let value = |name: &str| config.get(name).and_then(|entry| entry.value.as_deref());
    let ms = |name: &str| value(name).and_then(|text| text.parse::<i64>().ok());
    if value("cleanup.policy") == Some("compact") {
        return Ok(None);
    }
    let Some(retention) = ms("retention.ms") else { return Err("it has no retention.ms".into()) };
    // A segment goes as a whole, when its last record is old enough.
    let segment = u64::try_from(ms("segment.ms").unwrap_or(0)).unwrap_or(0);
    Ok(u64::try_from(retention).ok().map(|retention| Duration::from_millis(retention.saturating_add(segment))))
}
