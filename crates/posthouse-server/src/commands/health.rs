//! `posthouse health`: what a probe over HTTP would be told, for machines without another program to ask with.

use serde_json::{Value, json};

use super::{destinations, load};
use crate::cli::Global;
use crate::failure::Failure;
use crate::output;

pub(crate) async fn run(global: &Global, live: bool) -> Result<(), Failure> {
    let server = load(global)?.server;
    let address = destinations::reachable(server.listen);
    let path = if live { "/healthz" } else { "/readyz" };
    let answer = destinations::get(&server, path)
        .await
        .map_err(|why| Failure::unreachable(format!("nothing is known of what runs at {address}: {why}")))?;
    let told = destinations::parts(&answer).and_then(|(status, body)| document(live, status, body));
    let (good, document) =
        told.ok_or_else(|| Failure::unreachable(format!("what answers at {address} is no posthouse of this version")))?;
    if global.json {
        output::json(&document);
    }
    if !good {
        return Err(Failure { printed: true, ..Failure::not_so(format!("not ready: {}", reasons(&document))) });
    }
    if !global.json {
        output::say(if live { "alive" } else { "ready" });
    }
    Ok(())
}

/// Whether all is well, and the document that says so; None if it isn't the answer of a posthouse.
fn document(live: bool, status: u16, body: &[u8]) -> Option<(bool, Value)> {
    if live {
        return (status == 200 && body == b"ok\n").then(|| (true, json!({ "alive": true })));
    }
    let document: Value = serde_json::from_slice(body).ok()?;
    let ready = document["ready"].as_bool()?;
    (status == if ready { 200 } else { 503 }).then_some((ready, document))
}

/// Why a relay isn't ready, by database.
fn reasons(document: &Value) -> String {
    let databases = document["databases"].as_object().into_iter().flatten();
    let told: Vec<String> = databases
        .filter_map(|(name, database)| {
            let reasons: Vec<&str> = database["reasons"].as_array()?.iter().filter_map(Value::as_str).collect();
            (!reasons.is_empty()).then(|| format!("{name}: {}", reasons.join(", ")))
        })
        .collect();
    match (told.is_empty(), document["draining"] == true) {
        (_, true) => "it is stopping".into(),
        (true, _) => "it doesn't say why".into(),
        _ => told.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_posthouse_is_believed() {
        assert_eq!(document(true, 200, b"ok\n").map(|(good, _)| good), Some(true));
        assert_eq!(document(false, 200, b"{\"ready\":true}").map(|(good, _)| good), Some(true));
        assert_eq!(document(false, 503, b"{\"ready\":false}").map(|(good, _)| good), Some(false));
        for (live, status, body) in [
            (true, 200, "<html>"),
            (true, 500, "ok\n"),
            (false, 200, "ok\n"),
            (false, 200, "{}"),
            (false, 404, "{\"ready\":true}"),
            (false, 200, "{\"ready\":false}"),
        ] {
            assert!(document(live, status, body.as_bytes()).is_none(), "{status} {body}");
        }
    }

    #[test]
    fn reasons_are_told_by_database() {
        let told = json!({ "ready": false, "databases": {
            "a": { "reasons": ["starting"] }, "b": { "reasons": [] }, "c": { "reasons": ["no lease", "old"] } } });
        assert_eq!(reasons(&told), "a: starting; c: no lease, old");
        assert_eq!(reasons(&json!({ "ready": false })), "it doesn't say why");
        assert_eq!(reasons(&json!({ "ready": false, "draining": true, "databases": {} })), "it is stopping");
    }
}
