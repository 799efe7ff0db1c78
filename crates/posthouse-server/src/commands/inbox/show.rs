//! `posthouse inbox show`.

use posthouse::store::{InboxDetail, InboxStore};
use serde::Serialize;

use super::{named, resolve};
use crate::cli::Global;
use crate::commands::payload;
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean};

pub(super) async fn run(
    global: &Global,
    database: &Database,
    store: &dyn InboxStore,
    id: &str,
    consumer: Option<String>,
    full: bool,
) -> Result<(), Failure> {
    let consumers = named(database, store, consumer).await?;
    let detail = resolve(database, store, id, &consumers).await?;
    if global.json {
        let payload = detail.payload.as_deref().map(|all| payload::document(all, full));
        output::json(&Document { detail: &detail, payload });
    } else {
        for_people(&detail, full);
    }
    Ok(())
}

/// What `--json` prints; nothing of the payload once the message had its effect.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    detail: &'a InboxDetail,
    #[serde(flatten)]
    payload: Option<payload::Document<'a>>,
}

fn for_people(detail: &InboxDetail, full: bool) {
    let row = &detail.row;
    let line = |name: &str, value: &str| output::say(&format!("{:<14}{value}", format!("{name}:")));
    let moment = |us: i64| output::moment(us / 1_000);
    line("message id", &clean(&row.message_id));
    line("consumer", &clean(&row.consumer));
    line("status", row.status.as_str());
    if !row.kind.is_empty() {
        line("type", &clean(&row.kind));
    }
    if let Some(key) = &detail.key {
        line("key", &clean(key));
    }
    if let Some(source) = &row.source {
        line("source", &clean(&told(source)));
    }
    line("received", &moment(row.first_us));
    if let Some(at) = row.success_us {
        line("succeeded", &moment(at));
    } else if row.last_us != row.first_us {
        line("changed", &moment(row.last_us));
    }
    if let Some(next) = row.next_attempt_us {
        line("next try", &moment(next));
    }
    if let Some(owner) = &row.owner {
        line("run by", &clean(owner));
    }
    line("attempts", &row.attempts.to_string());
    if row.claims > 0 {
        line("claims", &format!("{} (runs without a result; of a running one with this run)", row.claims));
    }
    if let Some(error) = &row.last_error {
        line("last error", &clean(error));
    }
    if let Some(headers) = &detail.headers {
        payload::say_headers(headers);
    }
    match &detail.payload {
        Some(all) => payload::say(detail.content_type.as_deref().unwrap_or("no media type"), all, full),
        None => output::say("\nno payload: the copy of a message is kept until it has had its effect"),
    }
}

/// `rabbitmq: exchange orders, routing key order.placed`, from the JSON that is stored.
fn told(source: &str) -> String {
    let Ok(serde_json::Value::Object(mut fields)) = serde_json::from_str(source) else { return source.to_owned() };
    let text = |v: serde_json::Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let Some(from) = fields.remove("from").map(text) else { return source.to_owned() };
    let rest: Vec<String> =
        fields.into_iter().map(|(name, value)| format!("{} {}", name.replace('_', " "), text(value))).collect();
    format!("{from}: {}", rest.join(", "))
}

#[cfg(test)]
mod tests {
    use super::told;

    #[test]
    fn a_source_is_told_in_words() {
        let kafka = r#"{"from":"kafka","topic":"orders","partition":3,"offset":7}"#;
        assert_eq!(told(kafka), "kafka: offset 7, partition 3, topic orders");
        assert_eq!(told("{\"x\":1}"), "{\"x\":1}");
        assert_eq!(told("nonsense"), "nonsense");
    }
}
