//! What people see: tables, times, sizes, and text from elsewhere made harmless.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, SystemTime};

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
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
        if c != '\n' && steers(c) {
            let _ = write!(out, "\\u{:04x}", c as u32);
        } else {
            out.push(c);
        }
    }
    say(&out);
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
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    let coloured = coloured();
    table.set_header(header.iter().map(|h| {
        let cell = Cell::new(h.to_uppercase());
        if coloured { cell.add_attribute(Attribute::Dim) } else { cell }
    }));
    table
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
        "FAILED" => cell.fg(Color::Red),
        "SENT" => cell.fg(Color::Green),
        "SENDING" => cell.fg(Color::Yellow),
        _ => cell,
    }
}

fn now_ms() -> i64 {
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
    fn times_are_told_in_one_unit() {
        assert_eq!(relative_to(0, 500), "now");
        assert_eq!(relative_to(0, 3_000), "3 s ago");
        assert_eq!(relative_to(300_000, 0), "in 5 min");
        assert_eq!(relative_to(0, 3 * 86_400_000), "3 days ago");
    }
}
