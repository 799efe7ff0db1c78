//! `posthouse doctor`: what is wrong, and what to do about it. Changes nothing.

mod brokers;
mod database;

use comfy_table::{Cell, Color};
use posthouse::store::{Finding, Severity};
use serde::Serialize;
use serde_json::json;

use super::{destinations, load};
use crate::cli::Global;
use crate::config::Config;
use crate::database::Database;
use crate::failure::Failure;
use crate::output::{self, clean};

/// What was found about one thing.
#[derive(Debug, Serialize)]
struct Examined {
    /// `database orders`, `transport amqp`, `relay`.
    about: String,
    /// What it is, where that is known: the server's version.
    what: Option<String>,
    findings: Vec<Finding>,
    #[serde(skip)]
    unreachable: bool,
}

impl Examined {
    fn new(about: String) -> Self {
        Self { about, what: None, findings: Vec::new(), unreachable: false }
    }

    fn worst(&self) -> Severity {
        self.findings.iter().map(|f| f.severity).max().unwrap_or(Severity::Ok)
    }
}

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let config = load(global)?;
    let databases = config.sources().iter().map(|(name, d)| Database::open(name, d)).collect::<Result<Vec<_>, _>>()?;
    let spinner = indicatif::ProgressBar::new_spinner().with_message("looking");
    spinner.enable_steady_tick(std::time::Duration::from_millis(100));
    let (mut all, brokers, relay) = tokio::join!(
        futures_util::future::join_all(databases.iter().map(|d| database::examine(&config, d))),
        brokers::examine(&config),
        relay(&config)
    );
    spinner.finish_and_clear();
    all.extend(brokers);
    all.extend(relay);
    let worst = all.iter().map(Examined::worst).max().unwrap_or(Severity::Ok);
    let unreachable = all.iter().any(|e| e.unreachable);
    if global.json {
        output::json(&json!({ "ok": worst < Severity::Error, "worst": worst, "examined": all }));
    } else {
        for one in &all {
            print(one);
        }
        let count = |severity| all.iter().flat_map(|e| &e.findings).filter(|f| f.severity == severity).count();
        let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
        output::say(&match (errors, warnings) {
            (0, 0) => "all is well".to_owned(),
            _ => format!("{} and {}", output::count(errors, "error"), output::count(warnings, "warning")),
        });
    }
    match worst {
        Severity::Error => {
            let text = "something is wrong, see above";
            let failure = if unreachable { Failure::unreachable(text) } else { Failure::not_so(text) };
            Err(Failure { printed: true, ..failure })
        }
        _ => Ok(()),
    }
}

fn print(one: &Examined) {
    let what = one.what.as_ref().map(|w| format!("  {}", clean(w))).unwrap_or_default();
    output::say(&format!("{}{what}", clean(&one.about)));
    let mut table = output::table(&["", "looked at", "found"]);
    // Its lines say enough without a header.
    table.set_header(Vec::<Cell>::new());
    for finding in &one.findings {
        let (mark, colour) = match finding.severity {
            Severity::Ok => ("ok", Color::Green),
            Severity::Warning => ("warning", Color::Yellow),
            Severity::Error => ("error", Color::Red),
        };
        let mark = Cell::new(mark);
        let mark = if output::coloured() { mark.fg(colour) } else { mark };
        let fix = finding.fix.as_ref().map(|fix| format!("\n→ {}", clean(fix))).unwrap_or_default();
        table.add_row([mark, Cell::new(finding.check), Cell::new(format!("{}{fix}", clean(&finding.text)))]);
    }
    output::print_table(table);
    output::say("");
}

/// Whether a relay answers at `server.listen`, and whether it is ready.
async fn relay(config: &Config) -> Option<Examined> {
    let mut out = Examined::new("relay".into());
    let address = destinations::reachable(config.server.listen);
    out.what = Some(address.to_string());
    out.findings.push(match destinations::relay(&config.server).await {
        Ok(told) => {
            let without: Vec<&str> = told.databases.iter().filter(|(_, d)| d.is_none()).map(|(name, _)| name.as_str()).collect();
            if without.is_empty() {
                Finding::ok("relay", "it runs and answers")
            } else {
                let text = format!("it answers, but doesn't relay for {}", without.join(", "));
                Finding::warning("relay", text, "look at /readyz and its log for the reason")
            }
        }
        // It may well run on another machine.
        Err(why) => Finding::warning(
            "relay",
            format!("none answers at {address}: {why}"),
            "start `posthouse relay`, or look on the machine where it runs",
        ),
    });
    Some(out)
}
