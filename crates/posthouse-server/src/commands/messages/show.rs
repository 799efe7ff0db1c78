//! `posthouse messages show`.

use std::time::Duration;

use comfy_table::{Cell, CellAlignment};
use posthouse::store::{MessageDetail, Store};
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::resolve;
use crate::cli::Global;
use crate::config::redact_url;
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean, clean_lines};

/// How much of a payload is shown unless all of it is asked for.
const CUT: usize = 4 << 10;

pub(super) async fn run(global: &Global, database: &Database, store: &dyn Store, name: &str, full: bool) -> Result<(), Failure> {
    let ids = resolve(database, store, name).await?;
    let [id] = ids[..] else {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        return Err(Failure::not_so(format!("several messages have the id {name:?}; choose a row: {}", ids.join(", "))));
    };
    let Some(detail) = store.show(id).await.map_err(|e| database.failure(&e))? else {
        return Err(Failure::not_so(format!("message {name:?} has just gone")));
    };
    if global.json {
        output::json(&document(&detail, full));
    } else {
        for_people(&detail, full);
    }
    Ok(())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    detail: &'a MessageDetail,
    payload: Payload<'a>,
    payload_encoding: &'static str,
    payload_bytes: usize,
    payload_cut: bool,
}

/// JSON goes along as it was written; Value would change the order of keys and large numbers.
#[derive(Serialize)]
#[serde(untagged)]
enum Payload<'a> {
    Json(&'a RawValue),
    Text(&'a str),
    Hex(String),
}

/// The payload as JSON if it is JSON, else as text, else as hex; cut unless `full`.
fn document(detail: &MessageDetail, full: bool) -> Document<'_> {
    let all = &detail.payload;
    let cut = if full { all.len() } else { all.len().min(CUT) };
    let shown = &all[..cut];
    let (payload_encoding, payload) = match (serde_json::from_slice(shown), whole_text(shown, cut < all.len())) {
        (Ok(raw), _) => ("json", Payload::Json(raw)),
        (_, Some(text)) => ("text", Payload::Text(text)),
        _ => ("hex", Payload::Hex(hex(shown))),
    };
    Document { detail, payload, payload_encoding, payload_bytes: all.len(), payload_cut: cut < all.len() }
}

/// Text, even when the cut went through its last character.
fn whole_text(bytes: &[u8], cut: bool) -> Option<&str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text),
        Err(e) if cut && e.error_len().is_none() => std::str::from_utf8(&bytes[..e.valid_up_to()]).ok(),
        Err(_) => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Offset, 16 bytes, and what of them is plain ASCII.
fn dump(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).enumerate().map(|(n, chunk)| {
        let hex: Vec<String> = chunk.iter().map(|b| format!("{b:02x}")).collect();
        let ascii: String = chunk.iter().map(|b| if (0x20..0x7f).contains(b) { char::from(*b) } else { '.' }).collect();
        format!("  {:06x}  {:<47}  {ascii}", n * 16, hex.join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn for_people(detail: &MessageDetail, full: bool) {
    let row = &detail.row;
    let line = |name: &str, value: &str| output::say(&format!("{:<14}{value}", format!("{name}:")));
    line("row", &row.id.to_string());
    line("message id", &clean(&row.message_id));
    line("status", &row.status);
    line("destination", &clean(&redact_url(&row.destination)));
    if !row.kind.is_empty() {
        line("type", &clean(&row.kind));
    }
    if let Some(key) = &row.key {
        line("key", &clean(key));
    }
    line("house", &row.house.to_string());
    line("created", &output::moment(row.created_at_ms));
    if let Some((at, by)) = &detail.delivered {
        line("delivered", &format!("{} by {}", output::moment(*at), clean(by)));
    }
    if let Some(next) = row.next_attempt_ms {
        line("next try", &output::moment(next));
    }
    line("attempts", &row.attempts.to_string());
    if row.claims > 0 {
        line("claims", &format!("{} (tries during which the process died)", row.claims));
    }
    if let Some(error) = &row.last_error {
        line("last error", &clean(error));
    }
    if let Some(headers) = &detail.headers {
        output::say("\nheaders");
        match serde_json::from_str::<serde_json::Map<String, Value>>(headers) {
            Ok(map) => {
                for (name, value) in map {
                    let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                    output::say(&format!("  {}: {}", clean(&name), clean(&value)));
                }
            }
            Err(_) => output::say(&format!("  {}", clean(headers))),
        }
    }
    payload(detail, full);
    history(detail);
}

fn payload(detail: &MessageDetail, full: bool) {
    let all = &detail.payload;
    output::say(&format!("\npayload ({}, {})", clean(&detail.content_type), output::bytes(all.len() as i64)));
    if all.is_empty() {
        return;
    }
    // JSON is laid out before it is cut, so that the beginning of a large document is readable too.
    let pretty = std::str::from_utf8(all).ok().and_then(output::pretty_json);
    let whole = pretty.as_deref().map_or(&all[..], str::as_bytes);
    let cut = if full { whole.len() } else { whole.len().min(CUT) };
    let shown = &whole[..cut];
    match whole_text(shown, cut < whole.len()) {
        Some(text) => {
            let text = clean_lines(text);
            output::say(&text.split('\n').map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n"));
        }
        None => output::say(&dump(shown)),
    }
    if cut < whole.len() {
        output::say(&format!("  … {} more; --full shows all", output::bytes((whole.len() - cut) as i64)));
    }
}

fn history(detail: &MessageDetail) {
    if detail.history.is_empty() {
        return;
    }
    output::say("\nattempts");
    let mut table = output::table(&["#", "when", "took", "outcome", "error", "by"]);
    for a in &detail.history {
        let took = output::span(Duration::from_millis(u64::try_from(a.took_ms).unwrap_or(0)));
        let error = match &a.response {
            Some(response) => format!("{}\nresponse: {}", clean(&a.error), clean(response)),
            None => clean(&a.error).into_owned(),
        };
        table.add_row(vec![
            Cell::new(a.attempt).set_alignment(CellAlignment::Right),
            Cell::new(output::relative(a.at_ms)),
            Cell::new(took),
            Cell::new(clean(&a.outcome)),
            Cell::new(error),
            Cell::new(clean(&a.instance)),
        ]);
    }
    output::print_table(table);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_inside_a_character_leaves_text() {
        assert_eq!(whole_text(&"ää".as_bytes()[..3], true), Some("ä"));
        assert_eq!(whole_text(&"ää".as_bytes()[..3], false), None);
        assert_eq!(whole_text(&[b'a', 0xff, b'b'], true), None);
    }

    #[test]
    fn binary_is_dumped_without_control_characters() {
        assert_eq!(dump(b"\x1b[2J\xffab"), format!("  000000  {:<47}  .[2J.ab", "1b 5b 32 4a ff 61 62"));
    }
}
