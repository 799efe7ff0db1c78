//! The end of a demo: the books as a table or as JSON, and whether they balance.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Color, Table, presets};
use serde::Serialize;

use super::UNBALANCED;
use super::books::Totals;

/// What a demo ended with.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) balanced: bool,
    /// Which books don't balance, in words.
    pub(super) problems: Vec<String>,
    pub(super) seed: u64,
    pub(super) orders_placed: u64,
    #[serde(flatten)]
    pub(super) totals: Totals,
    pub(super) relay_kills: u32,
    pub(super) receiver_restarts: u32,
    pub(super) seconds: f64,
    /// Where the files are, if they were kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) files: Option<PathBuf>,
}

/// What happened besides what is in the files.
#[derive(Debug, Default)]
pub(super) struct Course {
    pub(super) seed: u64,
    pub(super) placed: u64,
    pub(super) relay_kills: u32,
    pub(super) receiver_restarts: u32,
    pub(super) took: Duration,
    /// Some: it was given up after this.
    pub(super) gave_up: Option<Duration>,
    pub(super) files: Option<PathBuf>,
}

impl Report {
    pub(super) fn new(totals: Totals, course: Course) -> Self {
        let problems = problems(&totals, &course);
        Self {
            balanced: problems.is_empty(),
            problems,
            seed: course.seed,
            orders_placed: course.placed,
            totals,
            relay_kills: course.relay_kills,
            receiver_restarts: course.receiver_restarts,
            seconds: (course.took.as_secs_f64() * 10.0).round() / 10.0,
            files: course.files,
        }
    }

    /// Prints it to stdout. The exit code says whether the books balance.
    pub(super) fn print(&self, json: bool) -> ExitCode {
        let text = if json {
            // Numbers and texts; only a path that isn't Unicode could fail, and the report is worth more than it.
            serde_json::to_string(self)
                .unwrap_or_else(|e| format!("{{\"balanced\":{},\"error\":{:?}}}", self.balanced, e.to_string()))
        } else {
            self.text()
        };
        // Whoever reads it may have gone; the exit code says it as well.
        let _ = writeln!(std::io::stdout(), "{text}");
        if self.balanced { ExitCode::SUCCESS } else { ExitCode::from(UNBALANCED) }
    }

    fn text(&self) -> String {
        let verdict = if self.balanced {
            "The books balance: every committed order had its effect once, in order; no other order had any.".to_owned()
        } else {
            format!("The books DO NOT balance:\n  {}", self.problems.join("\n  "))
        };
        let files = self.files.as_ref().map(|f| format!("\nFiles: {}", f.display())).unwrap_or_default();
        let (orders, seed) = (self.orders_placed, self.seed);
        format!("{}\n{verdict}{files}\nAgain with the same orders: posthouse demo --orders {orders} --seed {seed}", self.table())
    }

    fn table(&self) -> Table {
        let t = &self.totals;
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        let mut row = |what: &str, value: String, check: Option<(bool, String)>| {
            let check = match check {
                Some((true, _)) => Cell::new("ok").fg(Color::Green),
                Some((false, why)) => Cell::new(why).fg(Color::Red),
                None => Cell::new(""),
            };
            table.add_row([Cell::new(what), Cell::new(value).set_alignment(CellAlignment::Right), check]);
        };
        let mut count = |what: &str, n: u64, must: Option<u64>| {
            row(what, n.to_string(), must.map(|must| (n == must, format!("WRONG: must be {must}"))));
        };
        count("orders committed", t.orders_committed, None);
        count("orders rolled back", t.orders_rolled_back, None);
        count("messages", t.messages, Some(t.orders_committed));
        count("still pending", t.messages_pending, Some(0));
        count("failed for good", t.messages_failed, Some(0));
        count("calls received", t.calls_received, None);
        count("failures injected", t.failures_injected, None);
        count("duplicates absorbed", t.duplicates_absorbed, None);
        count("effects applied", t.effects_applied, Some(t.orders_committed));
        count("lost", t.lost, Some(0));
        count("phantom", t.phantom, Some(0));
        count("out of order", t.out_of_order, Some(0));
        count("pieces the stock is off", t.stock_off, Some(0));
        count("relay kills", self.relay_kills.into(), None);
        count("receiver restarts", self.receiver_restarts.into(), None);
        row("time", format!("{:.1} s", self.seconds), None);
        table
    }
}

/// Every book that doesn't balance.
fn problems(t: &Totals, course: &Course) -> Vec<String> {
    let mut out = Vec::new();
    let mut must = |holds: bool, otherwise: String| {
        if !holds {
            out.push(otherwise);
        }
    };
    if let Some(after) = course.gave_up {
        must(false, format!("not everything was delivered within {after:?}"));
    }
    let orders = t.orders_committed + t.orders_rolled_back;
    must(orders == course.placed, format!("orders: {} were placed, {orders} were committed or rolled back", course.placed));
    must(t.messages_pending == 0, format!("pending: {} messages were not delivered", t.messages_pending));
    must(t.messages_failed == 0, format!("failed: {} messages were given up", t.messages_failed));
    must(
        t.messages == t.orders_committed && t.unpaired == 0,
        format!(
            "messages: {} for {} committed orders, {} of either without the other",
            t.messages, t.orders_committed, t.unpaired
        ),
    );
    must(
        t.effects_applied == t.orders_committed,
        format!("effects: {} for {} committed orders", t.effects_applied, t.orders_committed),
    );
    must(t.lost == 0, format!("lost: {} committed orders had no effect", t.lost));
    must(t.phantom == 0, format!("phantom: {} effects belong to no committed order", t.phantom));
    must(t.out_of_order == 0, format!("order: {} messages overtook an earlier one of their customer", t.out_of_order));
    must(t.stock_off == 0, format!("stock: it differs by {} pieces from what the committed orders leave", t.stock_off));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balanced() -> (Totals, Course) {
        let totals = Totals { orders_committed: 9, orders_rolled_back: 1, messages: 9, effects_applied: 9, ..Totals::default() };
        (totals, Course { placed: 10, ..Course::default() })
    }

    #[test]
    fn every_book_can_fail() {
        let (good, course) = balanced();
        assert_eq!(problems(&good, &course), [] as [&str; 0]);
        type Spoil = fn(&mut Totals);
        let wrong: [(&str, Spoil); 10] = [
            ("orders", |t| t.orders_rolled_back = 0),
            ("pending", |t| t.messages_pending = 1),
            ("failed", |t| t.messages_failed = 1),
            ("messages", |t| t.messages = 10),
            ("messages", |t| t.unpaired = 2),
            ("effects", |t| t.effects_applied = 8),
            ("lost", |t| t.lost = 1),
            ("phantom", |t| t.phantom = 1),
            ("order", |t| t.out_of_order = 1),
            ("stock", |t| t.stock_off = 1),
        ];
        for (book, spoil) in wrong {
            let mut totals = good;
            spoil(&mut totals);
            let found = problems(&totals, &course);
            assert_eq!(found.len(), 1, "{book}: {found:?}");
            assert!(found[0].starts_with(&format!("{book}: ")), "{book}: {found:?}");
        }
        let late = Course { gave_up: Some(Duration::from_secs(70)), ..course };
        assert_eq!(problems(&good, &late), ["not everything was delivered within 70s"]);
    }
}
