//! What the documentation says is tried out: every block of every page is run, parsed, or found in a file that other tests run; every
//! link leads somewhere. Command lines and configuration files are read by a test of the program itself (`src/book.rs`), which knows
//! them better.
//!
//! A comment right above a block says how it is tried, where that doesn't follow from its kind: `<!-- test: run -->` and so on, see
//! `pages.rs`.

mod blocks;
mod links;
pub(crate) mod markdown;
mod pages;
mod snippets;
mod sql;

use self::markdown::root;
use crate::support::{Dir, ph};

/// `UPDATE=1` writes the page anew.
#[test]
#[cfg(all(feature = "rabbitmq", feature = "kafka", feature = "nats", feature = "xxl-job", feature = "otlp"))]
fn the_configuration_reference_is_what_the_program_says() {
    let told = ph(&Dir::new(), &["config", "--markdown"]).code(0).stdout;
    let page = root().join("docs/configuration-reference.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&page, &told).unwrap();
    }
    let written = std::fs::read_to_string(&page).unwrap_or_default();
    let differs = told.lines().zip(written.lines().chain(std::iter::repeat(""))).find(|(told, written)| told != written);
    assert!(told == written, "{}: run this test with UPDATE=1 and look at what changed; first: {differs:#?}", page.display());
}

#[test]
fn the_figures_of_the_readmes_are_those_that_were_measured() {
    let check = std::process::Command::new(root().join("scripts/figures")).arg("--check").output();
    let check = check.expect("scripts/figures (Python 3)");
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stderr));
}

#[test]
fn keys_of_the_configuration_are_explained_in_a_terminal() {
    let dir = Dir::new();
    let told = ph(&dir, &["config", "relay.lease"]).code(0).stdout;
    assert!(told.contains("time; default \"20s\"; at most 1h") && !told.contains("heartbeat\n"), "{told}");
    let told = ph(&dir, &["config", "routes.orders.retry", "--json"]).code(0).json();
    let keys: Vec<&str> = told["tables"][0]["entries"].as_array().unwrap().iter().map(|e| e["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["retry", "retry.max_attempts", "retry.base", "retry.factor", "retry.cap"]);
    assert!(ph(&dir, &["config", "relay.leese"]).code(1).stderr.contains("did you mean \"relay.lease\"?"));
}
