//! Tables for people, one JSON object for programs.

use std::collections::BTreeSet;
use std::path::Path;

use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Collects rows and prints them at the end.
pub(crate) struct Report {
    json: bool,
    rows: Vec<Row>,
    about: Option<About>,
    skipped: Vec<String>,
    /// What belongs to no row: in JSON.
    notes: Map<String, Value>,
    /// And for people.
    texts: Vec<String>,
}

/// What is to be known about the things measured that isn't a figure: a table of its own.
#[derive(Debug)]
pub(crate) struct About {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl About {
    pub(crate) fn new(what: &'static str, titles: impl Iterator<Item = &'static str>) -> Self {
        Self { header: [what].into_iter().chain(titles).collect(), rows: Vec::new() }
    }

    pub(crate) fn add(&mut self, name: String, texts: impl Iterator<Item = String>) {
        self.rows.push([name].into_iter().chain(texts).collect());
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(&self.header);
        table.add_rows(&self.rows);
        table
    }

    fn objects(&self) -> Vec<Value> {
        let object = |row: &Vec<String>| {
            Value::Object(self.header.iter().map(|h| (*h).into()).zip(row.iter().map(|t| json!(t))).collect())
        };
        self.rows.iter().map(object).collect()
    }
}

/// One measured line.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) database: &'static str,
    pub(crate) what: String,
    /// Of what is compared, or of the figures if nothing is.
    pub(crate) unit: &'static str,
    pub(crate) compared: Option<Compared>,
    pub(crate) figures: Vec<Figure>,
}

/// What Posthouse did beside what is possible. All are medians over the rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Compared {
    ours: f64,
    limit: f64,
    /// ours / limit: the median of the rounds' own ratios.
    ratio: f64,
    /// The smallest and the largest ratio of a round.
    ratio_min: f64,
    ratio_max: f64,
}

impl Compared {
    /// From the figures of each round.
    pub(crate) fn new(ours: &[f64], limits: &[f64]) -> Self {
        let (ratio, ratio_min, ratio_max) = spread(ours.iter().zip(limits).map(|(ours, limit)| ours / limit).collect());
        Self { ours: median(ours), limit: median(limits), ratio, ratio_min, ratio_max }
    }
}

/// A further figure of a row.
#[derive(Debug, Clone)]
pub(crate) struct Figure {
    /// Its name in JSON.
    pub(crate) name: &'static str,
    /// Its column; empty: only in JSON.
    pub(crate) title: &'static str,
    pub(crate) value: f64,
}

#[derive(Serialize)]
struct Machine {
    cores: usize,
    memory_gib: f64,
    system: String,
}

impl Report {
    pub(crate) fn new(json: bool) -> Self {
        Self { json, rows: Vec::new(), about: None, skipped: Vec::new(), notes: Map::new(), texts: Vec::new() }
    }

    pub(crate) fn add(&mut self, row: Row) {
        if !self.json {
            let figures = match &row.compared {
                Some(c) => format!("{} of {} {} ({:.2})", shown(c.ours), shown(c.limit), row.unit, c.ratio),
                None => row.figures.iter().map(|f| format!("{} {}", f.title, shown(f.value))).collect::<Vec<_>>().join(", "),
            };
            eprintln!("{}: {}: {figures}", row.database, row.what);
        }
        self.push(row);
    }

    /// Adds a row without telling at once.
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// A field of the JSON object, beside the rows.
    pub(crate) fn note(&mut self, name: &str, value: Value) {
        self.notes.insert(name.to_owned(), value);
    }

    /// A line below the table.
    pub(crate) fn say(&mut self, text: String) {
        self.texts.push(text);
    }

    /// Says what can't be measured, once.
    pub(crate) fn skip(&mut self, why: String) {
        if !self.skipped.contains(&why) {
            eprintln!("skipped: {why}");
            self.skipped.push(why);
        }
    }

    pub(crate) fn about(&mut self, about: About) {
        self.about = Some(about);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// What `--json` prints, into a file.
    pub(crate) fn write(&self, file: &Path) -> std::io::Result<()> {
        std::fs::write(file, format!("{:#}\n", self.object()))
    }

    pub(crate) fn print(&self) {
        if self.json {
            println!("{:#}", self.object());
        } else {
            println!("{}", self.table());
            if let Some(about) = &self.about {
                println!("{}", about.table());
            }
            for why in &self.skipped {
                println!("skipped: {why}");
            }
            for text in &self.texts {
                println!("{text}");
            }
        }
    }

    fn object(&self) -> Value {
        let command = command(std::env::args().skip(1));
        let rows: Vec<_> = self.rows.iter().map(Row::object).collect();
        let mut all = json!({
            "machine": machine(), "unix_seconds": unix_seconds(), "command": command, "rows": rows,
        });
        if let Some(about) = &self.about {
            all["about"] = json!(about.objects());
        }
        if !self.skipped.is_empty() {
            all["skipped"] = json!(self.skipped);
        }
        for (name, value) in &self.notes {
            all[name] = value.clone();
        }
        all
    }

    fn table(&self) -> Table {
        let compared = self.rows.iter().any(|r| r.compared.is_some());
        let mut seen = BTreeSet::new();
        let all = self.rows.iter().flat_map(|r| &r.figures).map(|f| f.title);
        let titles: Vec<_> = all.filter(|title| !title.is_empty() && seen.insert(*title)).collect();
        let mut header = vec!["database", "what"];
        let units = self.rows.iter().any(|r| !r.unit.is_empty());
        if compared {
            header.extend(["ours", "limit", "unit", "ratio", "min–max"]);
        } else if units {
            header.push("unit");
        }
        header.extend(&titles);
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(header);
        for row in &self.rows {
            let mut cells = vec![row.database.to_owned(), row.what.clone()];
            match &row.compared {
                Some(c) => cells.extend([
                    shown(c.ours),
                    shown(c.limit),
                    row.unit.to_owned(),
                    format!("{:.2}", c.ratio),
                    format!("{:.2}–{:.2}", c.ratio_min, c.ratio_max),
                ]),
                // Its unit stands under those of the others.
                None if compared => cells.extend(["", "", row.unit, "", ""].map(str::to_owned)),
                None if units => cells.push(row.unit.to_owned()),
                None => {}
            }
            cells.extend(titles.iter().map(|title| {
                row.figures.iter().find(|f| f.title == *title).map_or_else(String::new, |figure| shown(figure.value))
            }));
            table.add_row(cells);
        }
        table
    }
}

impl Row {
    fn object(&self) -> Value {
        let mut object = Map::new();
        object.insert("database".into(), json!(self.database));
        object.insert("what".into(), json!(self.what));
        object.insert("unit".into(), json!(self.unit));
        if let Some(Value::Object(compared)) = self.compared.as_ref().map(|c| json!(c)) {
            object.extend(compared);
        }
        object.extend(self.figures.iter().map(|f| (f.name.to_owned(), json!(f.value))));
        Value::Object(object)
    }
}

/// With as many digits as mean something.
fn shown(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// What to type for the same again; where the results go doesn't matter.
fn command(arguments: impl Iterator<Item = String>) -> String {
    let mut words = vec!["posthouse-bench".to_owned()];
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => drop(arguments.next()),
            other if other.starts_with("--out=") => {}
            _ => words.push(argument),
        }
    }
    words.join(" ")
}

fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn machine() -> Machine {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let system = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kib: f64 = memory.lines().next().and_then(|l| l.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0.0);
    Machine {
        cores: std::thread::available_parallelism().map_or(0, usize::from),
        memory_gib: kib / (1 << 20) as f64,
        // Without what whoever built it calls it.
        system: system.trim().split('-').next().unwrap_or_default().to_owned(),
    }
}

pub(crate) fn median(figures: &[f64]) -> f64 {
    spread(figures.to_vec()).0
}

/// Median, smallest and largest of some figures.
pub(crate) fn spread(mut figures: Vec<f64>) -> (f64, f64, f64) {
    figures.sort_by(f64::total_cmp);
    match figures.as_slice() {
        [] => (f64::NAN, f64::NAN, f64::NAN),
        all => ((all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0, all[0], all[all.len() - 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_programs_look_for() {
        let row = Row {
            database: "postgres",
            what: "drain".into(),
            unit: "messages/s",
            compared: Some(Compared::new(&[50.0, 90.0, 20.0], &[100.0, 100.0, 100.0])),
            figures: vec![Figure { name: "cpu", title: "", value: 2.0 }],
        };
        let expected = json!({
            "database": "postgres", "what": "drain", "unit": "messages/s",
            "ours": 50.0, "limit": 100.0, "ratio": 0.5, "ratio_min": 0.2, "ratio_max": 0.9, "cpu": 2.0,
        });
        assert_eq!(row.object(), expected);
    }

    #[test]
    fn rows_that_compare_nothing_stand_under_the_same_titles() {
        let row = |compared| Row {
            database: "postgres",
            what: "x".into(),
            unit: "ms",
            compared,
            figures: vec![Figure { name: "slowest", title: "slowest", value: 7.0 }],
        };
        let mut report = Report::new(true);
        report.add(row(Some(Compared::new(&[1.0], &[2.0]))));
        report.add(row(None));
        let table = report.table().to_string();
        let column = |line: &str, text: &str| line.split(['│', '┆']).position(|cell| cell.trim() == text);
        let lines: Vec<&str> = table.lines().filter(|line| line.contains('┆')).collect();
        for (title, value) in [("unit", "ms"), ("slowest", "7")] {
            let places: Vec<_> = [title, value, value].iter().zip(&lines).map(|(text, line)| column(line, text)).collect();
            assert!(places[0].is_some() && places.iter().all(|place| *place == places[0]), "{title}: {places:?}\n{table}");
        }
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(spread(vec![4.0, 1.0, 3.0, 2.0]), (2.5, 1.0, 4.0));
        assert_eq!(spread(vec![3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
    }

    #[test]
    fn the_command_is_told_without_where_its_results_went() {
        let told = |words: &str| command(words.split(' ').map(str::to_owned));
        assert_eq!(told("drain -n 10 --out a/b.json --json"), "posthouse-bench drain -n 10 --json");
        assert_eq!(told("drain --out=b.json"), "posthouse-bench drain");
    }

    #[test]
    fn figures_are_shown_with_the_digits_that_mean_something() {
        assert_eq!([0.0, 0.01234, 1.5, 42.0, 12_345.6].map(shown), ["0", "0.0123", "1.50", "42", "12346"]);
    }
}
