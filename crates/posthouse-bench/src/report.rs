//! Tables for people, one JSON object for programs.

use comfy_table::{Table, presets};
use serde::Serialize;

/// Collects rows and prints them at the end.
pub(crate) struct Report {
    json: bool,
    rows: Vec<Row>,
}

/// One measured line. Rates are per second.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) database: &'static str,
    pub(crate) what: String,
    /// What Posthouse did.
    pub(crate) ours: f64,
    /// What the database allows.
    pub(crate) limit: f64,
    /// ours / limit, the median of the rounds' own ratios.
    pub(crate) ratio: f64,
    /// The smallest and the largest ratio of a round.
    pub(crate) ratio_min: f64,
    pub(crate) ratio_max: f64,
    pub(crate) unit: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wal_bytes_per_message: Option<f64>,
}

#[derive(Serialize)]
struct Machine {
    cores: usize,
    memory_gib: f64,
    system: String,
}

impl Report {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, rows: Vec::new() }
    }

    pub(crate) fn add(&mut self, row: Row) {
        if !self.json {
            eprintln!("{}: {}: {:.0} of {:.0} {} ({:.2})", row.database, row.what, row.ours, row.limit, row.unit, row.ratio);
        }
        self.rows.push(row);
    }

    pub(crate) fn print(&self) {
        let command: Vec<String> = std::env::args().skip(1).collect();
        if self.json {
            let all = serde_json::json!({ "machine": machine(), "command": format!("posthouse-bench {}", command.join(" ")), "rows": self.rows });
            println!("{all:#}");
            return;
        }
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(vec!["database", "what", "ours", "limit", "unit", "ratio", "min–max", "WAL B/message"]);
        for r in &self.rows {
            table.add_row(vec![
                r.database.to_owned(),
                r.what.clone(),
                format!("{:.0}", r.ours),
                format!("{:.0}", r.limit),
                r.unit.to_owned(),
                format!("{:.2}", r.ratio),
                format!("{:.2}–{:.2}", r.ratio_min, r.ratio_max),
                r.wal_bytes_per_message.map_or_else(String::new, |w| format!("{w:.0}")),
            ]);
        }
        println!("{table}");
    }
}

fn machine() -> Machine {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: f64 = memory.lines().next().and_then(|l| l.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0.0);
    Machine {
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        memory_gib: kib / (1 << 20) as f64,
        system: std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
    }
}

/// Median, smallest and largest of some figures.
pub(crate) fn spread(mut figures: Vec<f64>) -> (f64, f64, f64) {
    figures.sort_by(f64::total_cmp);
    match figures.as_slice() {
        [] => (f64::NAN, f64::NAN, f64::NAN),
        all => (all[all.len() / 2], all[0], all[all.len() - 1]),
    }
}
