//! Destinations for people: one table, and below it the errors where the terminal has no room for them beside it.

use std::time::Duration;

use comfy_table::{Attribute, Cell, CellAlignment, Color, Row};

use super::Line;
use crate::health::State;
use crate::output::{self, clean, count, span};

/// A terminal of this width has room for addresses and errors in the table.
const WIDE: u16 = 160;

/// A destination takes at most this many lines in the table.
const LINES: usize = 4;

pub(super) fn print(lines: &[Line]) {
    if lines.is_empty() {
        output::say("no destinations: no routes are configured and nothing is pending");
        return;
    }
    let wide = output::terminal_width().is_none_or(|w| w >= WIDE);
    // A column that would be empty takes no room from the others.
    let several = lines.iter().any(|l| l.database != lines[0].database);
    let routed = lines.iter().any(|l| l.to != l.destination);
    let live = lines.iter().any(|l| l.state.is_some());
    let errors = lines.iter().any(|l| l.last_error.is_some());
    let mut header = Vec::new();
    header.extend(several.then_some("database"));
    header.push("destination");
    header.extend((wide && routed).then_some("to"));
    header.extend(["state", "pending", "failed", "oldest"]);
    header.extend(live.then_some("in flight"));
    header.extend(live.then_some("confirmed"));
    header.extend((wide && errors).then_some("last error"));
    let mut table = output::table(&header);
    for line in lines {
        let mut cells = Vec::new();
        if several {
            cells.push(Cell::new(clean(&line.database)));
        }
        if wide || line.to == line.destination {
            cells.push(Cell::new(clean(&line.destination)));
        } else {
            cells.push(Cell::new(format!("{}\n→ {}", clean(&line.destination), clean(&line.to))));
        }
        if wide && routed {
            cells.push(Cell::new(if line.to == line.destination { "".into() } else { clean(&line.to) }));
        }
        cells.push(state(line));
        let number = |n: i64| Cell::new(n).set_alignment(CellAlignment::Right);
        cells.push(number(line.pending));
        cells.push(failed(line.failed));
        cells.push(Cell::new(line.oldest_pending_seconds.map(time).unwrap_or_default()));
        if live {
            cells.push(line.in_flight.map_or_else(|| Cell::new(""), |n| number(n as i64)));
            cells.push(Cell::new(line.last_confirm_seconds.map(|s| format!("{} ago", time(s))).unwrap_or_default()));
        }
        if wide && errors {
            cells.push(Cell::new(clean(line.last_error.as_deref().unwrap_or(""))));
        }
        let mut row = Row::from(cells);
        row.max_height(LINES);
        table.add_row(row);
    }
    output::unbroken(&mut table, &["STATE", "PENDING", "FAILED", "OLDEST", "IN FLIGHT", "CONFIRMED"]);
    output::print_table(table);
    if errors && !wide {
        print_errors(lines, several);
    }
    output::say(&format!("\n{}", summary(lines)));
}

fn print_errors(lines: &[Line], several: bool) {
    let mut table = output::table(&["destination", "last error"]);
    for line in lines {
        let Some(error) = &line.last_error else { continue };
        let name = if several { format!("{} {}", line.database, line.destination) } else { line.destination.clone() };
        table.add_row([clean(&name), clean(error)]);
    }
    output::say("");
    output::print_table(table);
}

/// The state and how long it has been so.
fn state(line: &Line) -> Cell {
    let Some(state) = line.state else { return Cell::new("-") };
    let text = match line.down_seconds {
        Some(seconds) => format!("{} {}", state.word(), time(seconds)),
        None => state.word().to_owned(),
    };
    let cell = Cell::new(text);
    match state {
        _ if !output::coloured() => cell,
        State::Down => cell.fg(Color::Red).add_attribute(Attribute::Bold),
        State::Blocked => cell.fg(Color::Yellow),
        State::Ok => cell.fg(Color::Green),
    }
}

fn failed(n: i64) -> Cell {
    let cell = Cell::new(n).set_alignment(CellAlignment::Right);
    if n > 0 && output::coloured() { cell.fg(Color::Red) } else { cell }
}

fn time(seconds: f64) -> String {
    span(Duration::from_secs_f64(seconds.max(0.0)))
}

/// `3 destinations, 1 down, 12 pending, 2 failed`.
fn summary(lines: &[Line]) -> String {
    let mut text = count(lines.len(), "destination");
    for state in [State::Down, State::Blocked] {
        let n = lines.iter().filter(|l| l.state == Some(state)).count();
        if n > 0 {
            text.push_str(&format!(", {n} {}", state.word()));
        }
    }
    let sum = |of: fn(&Line) -> i64| lines.iter().map(of).sum::<i64>();
    text.push_str(&format!(", {} pending, {} failed", sum(|l| l.pending), sum(|l| l.failed)));
    text
}
