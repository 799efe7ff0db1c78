//! `posthouse publish`.

use std::io::Read;

use posthouse::{ErrorKind, Limits, Message};
use serde_json::json;

use super::{known_destination, load, one_database};
use crate::cli::{Global, PublishArgs};
use crate::failure::Failure;
use crate::output::{self, clean};

pub(crate) async fn run(global: &Global, args: PublishArgs) -> Result<(), Failure> {
    let config = load(global)?;
    let database = one_database(&config)?;
    known_destination(&config, &args.destination, args.any_destination)?;
    let payload = if args.payload == "-" { stdin()? } else { args.payload.into_bytes() };

    let content_type = args.content_type.unwrap_or_else(|| {
        let json = serde_json::from_slice::<serde::de::IgnoredAny>(&payload).is_ok();
        if json { "application/json" } else { "application/octet-stream" }.to_owned()
    });
    let mut message = Message::to(&args.destination).payload(payload).content_type(content_type);
    if let Some(key) = args.key {
        message = message.key(key);
    }
    if let Some(kind) = args.kind {
        message = message.typed(kind);
    }
    for (name, value) in args.headers {
        message = message.header(name, value);
    }
    if let Some(id) = args.id {
        message = message.id(id);
    }
    if let Some(key) = args.dedup_key {
        message = message.dedup_key(key);
    }
    if let Some(attempts) = args.max_attempts {
        message = message.max_attempts(attempts);
    }
    if let Some(after) = args.after {
        message = message.deliver_in(after);
    }
    database.reach().await?;
    let id = match database.publish(message).await {
        Ok(id) => id,
        Err(e) if e.kind() == ErrorKind::Database => {
            // Missing tables are the usual reason, and the database's own words for that say nothing about what to do.
            database.ready().await?;
            return Err(database.failure(&e));
        }
        Err(e) if e.kind() == ErrorKind::Invalid => return Err(Failure::usage(e.to_string())),
        Err(e) => return Err(database.failure(&e)),
    };
    if global.json {
        output::json(&json!({ "message_id": id, "destination": args.destination }));
    } else {
        output::say(&clean(id.as_str()));
    }
    Ok(())
}

fn stdin() -> Result<Vec<u8>, Failure> {
    // One byte more than fits is enough for the message's own check to refuse it.
    let most = Limits::default().payload as u64 + 1;
    let mut payload = Vec::new();
    std::io::stdin()
        .lock()
        .take(most)
        .read_to_end(&mut payload)
        .map_err(|e| Failure::usage(format!("stdin can't be read: {e}")))?;
    Ok(payload)
}
