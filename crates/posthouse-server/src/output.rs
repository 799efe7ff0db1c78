//! What people see: tables, times, sizes, and text from elsewhere made harmless.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, SystemTime};

use comfy_table::{Attribute, Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, presets};
use serde::Serialize;

/// True for characters that steer a terminal or reorder what is read on it: C0, DEL, C1, line separators, bidi controls.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Text from a message, an error or a file on one line, with everything that steers a terminal written out.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if steers(c) && c.is_ascii() => {
                // Writing to a String can't fail.
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c if steers(c) => {
                let _ = write!(out, "\\u{{{:x}}}", c as u32);
            }
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// [`clean`], but line breaks stay.
pub(crate) fn clean_lines(text: &str) -> String {
    text.split('\n').map(clean).collect::<Vec<_>>().join("\n")
}

/// Prints one JSON document. What steers a terminal is escaped here too; JSON has such characters only inside strings.
pub(crate) fn json(value: &impl Serialize) {
    let text = match serde_json::to_string_pretty(value) {
        Ok(text) => text,
        Err(e) => unreachable!("our own values are JSON: {e}"),
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => out.push(c),
            // Only between tokens (of a payload that goes along as it was written): inside strings they are escaped.
            '\t' | '\r' => out.push(' '),
            c if steers(c) => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    say(&out);
}

/// JSON text laid out for people, with every key and number as it was written. None when it isn't JSON.
pub(crate) fn pretty_json(text: &str) -> Option<String> {
    serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
    let mut out = String::with_capacity(text.len() * 2);
    let mut depth = 0_usize;
    let line = |out: &mut String, depth: usize| {
        out.push('\n');
        out.extend(std::iter::repeat_n("  ", depth));
    };
    let mut rest = text.chars().peekable();
    let (mut quoted, mut escaped) = (false, false);
    while let Some(c) = rest.next() {
        if quoted {
            out.push(c);
            quoted = escaped || c != '"';
            escaped = !escaped && c == '\\';
            continue;
        }
        match c {
            _ if c.is_ascii_whitespace() => {}
            '"' => {
                quoted = true;
                out.push(c);
            }
            '{' | '[' => {
                out.push(c);
                while rest.next_if(char::is_ascii_whitespace).is_some() {}
                match rest.next_if(|next| matches!(next, '}' | ']')) {
                    Some(close) => out.push(close),
                    None => {
                        depth += 1;
                        line(&mut out, depth);
                    }
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut out, depth);
                out.push(c);
            }
            ',' => {
                out.push(c);
                line(&mut out, depth);
            }
            ':' => out.push_str(": "),
            c => out.push(c),
        }
    }
    Some(out)
}

/// Prints a line of the result. A reader that went away (`| head`) is not an error of ours.
pub(crate) fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.write_all(b"\n"));
}

/// Whether colours are wanted on stdout.
pub(crate) fn coloured() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// A table that fits the terminal; with nobody watching it is as wide as its content.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_truncation_indicator("…");
    let coloured = coloured();
    table.set_header(header.iter().map(|h| {
        let cell = Cell::new(h.to_uppercase());
        if coloured { cell.add_attribute(Attribute::Dim) } else { cell }
    }));
    table
}

/// How wide the terminal is; None when the result goes elsewhere.
pub(crate) fn terminal_width() -> Option<u16> {
    Table::new().width().filter(|_| std::io::stdout().is_terminal())
}

/// Keeps these columns as wide as their content, so that the others share what is left.
pub(crate) fn unbroken(table: &mut Table, names: &[&str]) {
    if terminal_width().is_none() {
        return;
    }
    let header: Vec<String> = table.header().into_iter().flat_map(Row::cell_iter).map(Cell::content).collect();
    for (index, name) in header.iter().enumerate() {
        if names.contains(&name.as_str())
            && let Some(column) = table.column_mut(index)
        {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
    }
}

/// Prints a table, without the padding at the left and the blanks at the ends of lines.
pub(crate) fn print_table(mut table: Table) {
    let columns = table.column_count();
    for index in 0..columns {
        if let Some(column) = table.column_mut(index) {
            column.set_padding((0, if index + 1 == columns { 0 } else { 2 }));
        }
    }
    say(&table.trim_fmt());
}

/// A cell with a status in its colour.
pub(crate) fn status(status: &str) -> Cell {
    let cell = Cell::new(clean(status));
    if !coloured() {
        return cell;
    }
    match status {
        "FAILED" | "LOST" | "TIMEOUT" => cell.fg(Color::Red),
        "SENT" | "SUCCESS" | "DONE" => cell.fg(Color::Green),
        "SENDING" | "RETRYING" | "RUNNING" | "REQUESTED" => cell.fg(Color::Yellow),
        _ => cell,
    }
}

pub(crate) fn now_ms() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}

/// `3 s ago`, `in 5 min`.
pub(crate) fn relative(ms: i64) -> String {
    relative_to(ms, now_ms())
}

fn relative_to(ms: i64, now: i64) -> String {
    let away = ms - now;
    let text = span(Duration::from_millis(away.unsigned_abs()));
    match away {
        -999..=999 => "now".into(),
        _ if away < 0 => format!("{text} ago"),
        _ => format!("in {text}"),
    }
}

/// A length of time in its largest fitting unit.
pub(crate) fn span(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 => format!("{} ms", d.as_millis()),
        1..120 => format!("{s} s"),
        120..7200 => format!("{} min", s / 60),
        7200..172_800 => format!("{} h", s / 3600),
        _ => format!("{} days", s / 86400),
    }
}

/// A moment for people: UTC to the second, and how far away it is.
pub(crate) fn moment(ms: i64) -> String {
    let at = u64::try_from(ms).map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms / 1000 * 1000));
    match at {
        Ok(at) => format!("{} ({})", humantime::format_rfc3339_seconds(at), relative(ms)),
        Err(_) => "before 1970".into(),
    }
}

/// `812 B`, `4.0 KiB`, `2.5 MiB`.
pub(crate) fn bytes(n: i64) -> String {
    let f = n as f64;
    match n {
        ..1024 => format!("{n} B"),
        1024..1_048_576 => format!("{:.1} KiB", f / 1024.0),
        _ => format!("{:.1} MiB", f / 1_048_576.0),
    }
}

/// `1 message`, `3 messages`.
pub(crate) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_from_outside_can_steer_the_terminal() {
        assert_eq!(clean("plain ü 信"), "plain ü 信");
        assert_eq!(clean("\u{1b}[2Jx\u{9b}31m\u{7f}\n\t\u{202e}"), "\\x1b[2Jx\\u{9b}31m\\x7f\\n\\t\\u{202e}");
        assert_eq!(clean_lines("a\n\u{1b}b"), "a\n\\x1bb");
    }

    #[test]
    fn json_is_laid_out_and_not_changed() {
        let text = "{\"z\":1.0000000000000000001, \"a\" : [ ],\"s\":\"x \\\" {,:\\\\\",\"n\":[1,{}]}";
        let expected =
            "{\n  \"z\": 1.0000000000000000001,\n  \"a\": [],\n  \"s\": \"x \\\" {,:\\\\\",\n  \"n\": [\n    1,\n    {}\n  ]\n}";
        assert_eq!(pretty_json(text).unwrap(), expected);
        assert_eq!(pretty_json(" 5 ").unwrap(), "5");
        assert_eq!(pretty_json("{a"), None);
    }

    #[test]
    fn times_are_told_in_one_unit() {
        assert_eq!(relative_to(0, 500), "now");
        assert_eq!(relative_to(0, 3_000), "3 s ago");
        assert_eq!(relative_to(300_000, 0), "in 5 min");
        assert_eq!(relative_to(0, 3 * 86_400_000), "3 days ago");
    }
}
