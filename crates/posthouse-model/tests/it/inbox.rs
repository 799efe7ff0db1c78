//! The inbox: what holds, and what breaks it.

use posthouse_model::inbox::{Budget, Protection, Scenario};

use crate::support::{self, holds};

const LOST: &str = "no message is lost";
const EFFECT: &str = "a success has had its effect";
const ONCE: &str = "one effect at most";

/// Without the protection, the scenario breaks this property.
fn breaks(property: &'static str, without: Protection, scenario: Scenario) {
    support::breaks(property, &format!("without {without:?}"), Scenario { without: vec![without], ..scenario });
}

fn faults() -> Scenario {
    let crashes = 1 + u8::from(std::env::var_os("POSTHOUSE_SOAK").is_some());
    let budget = Budget { crashes, failures: 2, unknown_commits: 1, unrecorded: 1, stalls: 1, purges: 0 };
    Scenario { budget, ..Scenario::default() }
}

#[test]
fn a_message_has_its_effect_once_whatever_fails() {
    holds("inbox", faults());
    breaks(EFFECT, Protection::OneTransaction, faults());
    breaks(ONCE, Protection::UniqueId, faults());
    breaks(LOST, Protection::CommitsBeforeAnswer, faults());
    breaks(LOST, Protection::RecordsBeforeAnswer, faults());
    breaks(ONCE, Protection::VersionOfSuccess, faults());
}

#[test]
fn a_message_that_kills_its_consumer_fails_in_the_end() {
    let poison = Scenario { poison: true, ..Scenario::default() };
    holds("inbox, poison", poison.clone());
    let mutant = Scenario { without: vec![Protection::ClaimsRedelivered], ..poison };
    support::sticks("without ClaimsRedelivered", &mutant);
}

/// As guarantees.md says: a duplicate that comes after retention is a new message.
#[test]
fn what_is_forgotten_too_early_has_its_effect_again() {
    let budget = Budget { purges: 1, ..Budget::default() };
    holds("inbox, purged", Scenario { budget, twice: true, ..Scenario::default() });
}
