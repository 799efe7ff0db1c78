//! Charts of what was measured, as SVG: bars, one row under the other.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::database::must;

/// Distances in the picture, in its own units.
const CHARACTER: f64 = 7.2;
const BARS: f64 = 420.0;
const VALUES: f64 = 150.0;
const BAR: f64 = 12.0;
const ROW: f64 = 34.0;
const GROUP: f64 = 30.0;

/// Writes a picture beside each file.
pub(crate) fn run(files: &[PathBuf]) {
    for file in files {
        let name = file.display();
        let text = must(&format!("{name}"), std::fs::read_to_string(file));
        let measured: Value = must(&format!("{name}"), serde_json::from_str(&text));
        let Some(picture) = chart(&measured) else {
            eprintln!("{name}: it has no rows that could be drawn");
            std::process::exit(1);
        };
        let to = beside(file);
        must(&format!("{}", to.display()), std::fs::write(&to, picture));
        println!("{}", to.display());
    }
}

fn beside(file: &Path) -> PathBuf {
    file.with_extension("svg")
}

/// A row as it is drawn.
struct Bar {
    label: String,
    value: f64,
    /// In grey, below it: what is possible, or the 99th percentile of what `value` is the median of.
    grey: Option<f64>,
}

/// Rows of one unit share a scale.
fn chart(measured: &Value) -> Option<String> {
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for row in measured["rows"].as_array()? {
        let Some(bar) = bar(row) else { continue };
        let unit = row["unit"].as_str().unwrap_or_default();
        let unit = match (unit, bar.grey) {
            ("", _) => "CPU %".to_owned(),
            (unit, None) => unit.to_owned(),
            (unit, Some(_)) if row["p99"].is_number() => format!("{unit}; median, 99 % in grey"),
            (unit, Some(_)) => format!("{unit}; limit in grey"),
        };
        match groups.iter_mut().find(|(u, _)| *u == unit) {
            Some((_, bars)) => bars.push(bar),
            None => groups.push((unit, vec![bar])),
        }
    }
    if groups.is_empty() {
        return None;
    }
    let rows: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    let longest = groups.iter().flat_map(|(_, bars)| bars).map(|bar| bar.label.chars().count()).max().unwrap_or(0);
    let labels = longest as f64 * CHARACTER + 20.0;
    let width = labels + BARS + VALUES;
    let height = 64.0 + rows as f64 * ROW + groups.len() as f64 * GROUP;
    let title = escaped(measured["command"].as_str().unwrap_or("posthouse-bench"));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height}\" font-family=\"sans-serif\" font-size=\"13\" role=\"img\">\n\
         <title>{title}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"10\" y=\"24\" font-size=\"15\" font-weight=\"bold\" fill=\"#1b1f24\">{title}</text>\n"
    );
    let mut y = 44.0;
    for (unit, bars) in &groups {
        let largest = bars.iter().flat_map(|b| [Some(b.value), b.grey]).flatten().fold(0.0, f64::max);
        let scale = BARS / if largest > 0.0 { largest } else { 1.0 };
        y += GROUP;
        let _ = writeln!(svg, "<text x=\"{labels:.0}\" y=\"{:.0}\" fill=\"#57606a\">{}</text>", y - 10.0, escaped(unit));
        for bar in bars {
            let (text, width) = (y + BAR + 3.0, bar.value * scale);
            let _ = writeln!(
                svg,
                "<text x=\"{:.0}\" y=\"{text:.0}\" text-anchor=\"end\" fill=\"#1b1f24\">{}</text>",
                labels - 10.0,
                escaped(&bar.label)
            );
            if let Some(grey) = bar.grey {
                let _ = writeln!(
                    svg,
                    "<rect x=\"{labels:.0}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{BAR}\" fill=\"#d0d7de\"/>",
                    y + BAR,
                    grey * scale
                );
            }
            let _ = writeln!(
                svg,
                "<rect x=\"{labels:.0}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BAR}\" fill=\"#2f6fdb\"/>\n\
                 <text x=\"{:.0}\" y=\"{text:.0}\" fill=\"#1b1f24\">{}</text>",
                labels + (bar.grey.unwrap_or(0.0).max(bar.value)) * scale + 8.0,
                told(bar)
            );
            y += ROW;
        }
    }
    let _ = writeln!(svg, "</svg>");
    Some(svg)
}

/// What a row compares, or the first of its figures that says how much.
fn bar(row: &Value) -> Option<Bar> {
    let label = format!("{}: {}", row["database"].as_str()?, row["what"].as_str()?);
    if let Some(ours) = row["ours"].as_f64() {
        return Some(Bar { label, value: ours, grey: row["limit"].as_f64() });
    }
    if let Some(median) = row["p50"].as_f64() {
        return Some(Bar { label, value: median, grey: row["p99"].as_f64() });
    }
    let value = ["rate", "messages_per_second", "slowest_ms", "cpu_percent"].iter().find_map(|name| row[*name].as_f64())?;
    Some(Bar { label, value, grey: None })
}

fn told(bar: &Bar) -> String {
    let short = |v: f64| if v >= 100.0 { format!("{v:.0}") } else { format!("{v:.2}") };
    match bar.grey {
        Some(grey) => format!("{} | {}", short(bar.value), short(grey)),
        None => short(bar.value),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_become_bars_on_the_scale_of_their_unit() {
        let measured = json!({ "command": "posthouse-bench drain <&", "rows": [
            { "database": "postgres", "what": "drain", "unit": "messages/s", "ours": 50.0, "limit": 100.0 },
            { "database": "mysql", "what": "drain", "unit": "messages/s", "ours": 100.0, "limit": 200.0 },
            { "database": "mysql", "what": "limit", "unit": "per second", "rate": 7.0 },
            { "database": "mysql", "what": "nothing", "unit": "per second" },
            { "database": "mysql", "what": "latency", "unit": "ms", "rate": 9.0, "p50": 3.0, "p99": 30.0 },
        ]});
        let svg = chart(&measured).expect("a picture");
        for width in [BARS / 4.0, BARS / 2.0, BARS / 10.0, BARS] {
            assert!(svg.contains(&format!("width=\"{width:.1}\"")), "{width}: {svg}");
        }
        assert!(
            svg.contains("drain &lt;&amp;</title>")
                && svg.contains("50.00 | 100")
                && svg.contains("3.00 | 30.00")
                && !svg.contains("nothing"),
            "{svg}"
        );
        assert_eq!(svg.matches("fill=\"#2f6fdb\"").count(), 4);
        assert!(chart(&json!({ "rows": [] })).is_none());
    }
}
