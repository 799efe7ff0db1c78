//! The outbox and the relay: what holds, and what breaks it.

use posthouse_model::relay::{Budget, Never, Ordering, Protection, Scenario, Sometimes};

use crate::support::{self, holds};

const LOST: &str = "no committed message is lost";
const UNCOMMITTED: &str = "only what is committed is sent";
const EARLY: &str = "FAILED only when the tries are used up";
const ORDER: &str = "first deliveries of a key are in order";
const ONCE: &str = "no duplicate";
const ONE_SENDER: &str = "one sender at a time";

/// Without the protection, the scenario breaks this property.
fn breaks(property: &'static str, without: Protection, scenario: Scenario) {
    support::breaks(property, &format!("without {without:?}"), Scenario { without: vec![without], ..scenario });
}

/// Without the protection, not all is settled in the end.
fn sticks(without: Protection, scenario: Scenario) {
    support::sticks(&format!("without {without:?}"), &Scenario { without: vec![without], ..scenario });
}

/// Commits in any order, rollbacks, and reads whose answers are out of date.
fn commits() -> Scenario {
    Scenario {
        keys: vec![None, Some(0), Some(0)],
        slow_reads: true,
        budget: Budget { rollbacks: 1, ..Budget::default() },
        never: vec![Never::Overtaken, Never::Duplicate, Never::Late, Never::TwoSenders],
        ..Scenario::default()
    }
}

/// A receiver that refuses, requests and confirmations that get lost or come late.
fn failures() -> Scenario {
    Scenario {
        slow_reads: true,
        budget: Budget { refusals: 1, losses: 1, ..Budget::default() },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Duplicate, Sometimes::Failed],
        ..Scenario::default()
    }
}

/// An operator who skips a message and requeues it.
fn skipping() -> Scenario {
    Scenario {
        keys: vec![Some(0); 3],
        only: Some(0),
        budget: Budget { skips: 1, requeues: 1, ..Budget::default() },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Failed],
        ..Scenario::default()
    }
}

/// Operators that send a message somewhere else while it is on its way.
fn editing() -> Scenario {
    Scenario { budget: Budget { edits: 1, late: 1, ..Budget::default() }, ..Scenario::default() }
}

/// A transport that keeps the order of a key's messages.
fn pipelined() -> Scenario {
    Scenario {
        keys: vec![Some(0); 3],
        ordering: Ordering::Pipelined,
        concurrency: 3,
        budget: Budget { refusals: 1, ..Budget::default() },
        ..Scenario::default()
    }
}

/// A receiver that is down.
fn outage() -> Scenario {
    Scenario {
        keys: vec![None, Some(0), Some(0)],
        concurrency: 2,
        budget: Budget { outages: 2, ..Budget::default() },
        never: vec![Never::Overtaken, Never::Duplicate],
        ..Scenario::default()
    }
}

/// Two relays, one of which is cut off for longer than its lease.
fn cut_off() -> Scenario {
    Scenario {
        instances: 2,
        budget: Budget { cut_offs: 1, ..Budget::default() },
        never: vec![Never::Overtaken, Never::TwoSenders],
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Duplicate],
        ..Scenario::default()
    }
}

/// Two relays, one of which gives its house to the other.
fn handover() -> Scenario {
    Scenario {
        instances: 2,
        budget: Budget { handovers: 1, ..Budget::default() },
        never: vec![Never::Overtaken, Never::Duplicate, Never::TwoSenders],
        ..Scenario::default()
    }
}

/// Two relays, and a message that kills whoever sends it.
fn poison() -> Scenario {
    Scenario {
        instances: 2,
        keys: vec![None, None],
        poison: Some(0),
        never: vec![Never::TwoSenders],
        sometimes: vec![Sometimes::Failed],
        ..Scenario::default()
    }
}

#[test]
fn without_faults_each_message_arrives_once_and_in_order() {
    let scenario = Scenario {
        slow_reads: true,
        loads: true,
        never: vec![Never::Overtaken, Never::Duplicate, Never::Late, Never::TwoSenders],
        ..Scenario::default()
    };
    holds("no faults", scenario);
}

#[test]
fn commits_in_any_order_lose_and_reorder_nothing() {
    holds("commits in any order", commits());
    breaks(UNCOMMITTED, Protection::CommittedOnly, commits());
    sticks(Protection::Sweep, commits());
    breaks(ONCE, Protection::Recent, commits());
    breaks(
        LOST,
        Protection::PendingWithMessage,
        Scenario { budget: Budget { publishers: 1, ..Budget::default() }, ..Scenario::default() },
    );
    breaks(LOST, Protection::ConfirmedOnly, Scenario::default());
    let unheard = Scenario { budget: Budget { hints: 1, ..Budget::default() }, ..Scenario::default() };
    holds("lost hints", unheard.clone());
    sticks(Protection::IdlePoll, unheard);
}

#[test]
fn failures_lose_and_reorder_nothing() {
    holds("failures", failures());
    breaks(ORDER, Protection::Predecessor, failures());
    breaks(ORDER, Protection::FailedBlocks, failures());
    breaks(ORDER, Protection::FollowersGoBack, failures());
    breaks(ORDER, Protection::OneOfAKey, Scenario { concurrency: 2, ..failures() });
}

/// A key's messages are under way together, and none gets there before one that has failed.
#[test]
fn a_pipelined_key_stays_in_order() {
    let piped = pipelined();
    holds("pipelined", piped.clone());
    breaks(ORDER, Protection::HoldsBack, piped.clone());
    breaks(ORDER, Protection::FollowersGoBack, piped.clone());
    let budget = Budget { outages: 1, refusals: 1, losses: 1, ..Budget::default() };
    holds("pipelined, outage", Scenario { keys: vec![Some(0); 2], budget, ..piped });
}

#[test]
fn late_answers_and_lost_answers_of_the_database_lose_and_reorder_nothing() {
    let late = Scenario {
        budget: Budget { late: 2, lost_answers: 1, ..Budget::default() },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Late],
        ..Scenario::default()
    };
    holds("late answers", late);
}

#[test]
fn what_is_requeued_is_in_its_place_again() {
    holds("skipped and requeued", skipping());
    breaks(ORDER, Protection::PassedHeedsOperators, skipping());
    breaks(ORDER, Protection::OutdatedRows, skipping());
}

#[test]
fn what_operators_do_loses_nothing_and_keeps_the_order() {
    holds("editing", editing());
    breaks(LOST, Protection::VersionOfDelete, editing());
    let refused = Budget { edits: 1, refusals: 2, ..Budget::default() };
    breaks(EARLY, Protection::VersionOfSetback, Scenario { budget: refused, ..editing() });
    breaks(LOST, Protection::TryNumbers, editing());
}

#[test]
fn an_outage_loses_and_reorders_nothing() {
    holds("outage", outage());
    // What was left out for a destination is remembered, and swept as well: one of the two is enough.
    let one = Scenario { keys: vec![None, None], serialised: true, ..outage() };
    holds("outage, without LagCursor", Scenario { without: vec![Protection::LagCursor], ..outage() });
    support::sticks("without LagCursor and Sweep", &Scenario { without: vec![Protection::LagCursor, Protection::Sweep], ..one });
}

#[test]
fn two_relays_never_send_one_message_together() {
    holds("cut off", cut_off());
    breaks(ONE_SENDER, Protection::LeaseCoversSend, cut_off());
    breaks(ONE_SENDER, Protection::NoLateRenewal, cut_off());
    breaks(ONE_SENDER, Protection::TakesOnlyExpired, cut_off());
    holds("handover", handover());
    breaks(ONE_SENDER, Protection::ReleasesDrained, handover());
}

#[test]
fn a_message_that_kills_its_process_fails_in_the_end() {
    holds("poison", poison());
    sticks(Protection::Claims, poison());
}

/// As guarantees.md says: what was in flight may come twice, and late. First deliveries stay in order.
#[test]
fn a_process_that_outlives_its_lease_duplicates_late_and_no_more() {
    let paused = Scenario {
        budget: Budget { cut_offs: 1, overruns: 1, ..Budget::default() },
        never: vec![Never::Overtaken],
        sometimes: vec![Sometimes::AllDelivered, Sometimes::TwoSenders, Sometimes::Late],
        ..cut_off()
    };
    holds("paused", paused);
}

#[test]
fn order_needs_serialised_writers_and_a_route_that_keeps_it() {
    let free = Scenario {
        serialised: false,
        never: vec![Never::Duplicate],
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Overtaken],
        ..Scenario::default()
    };
    holds("writers that are not serialised", free.clone());
    holds("ordering none", Scenario { serialised: true, ordering: Ordering::None, concurrency: 2, ..free });
}

/// Larger bounds, and faults of several kinds together. Only with `POSTHOUSE_SOAK`: a million states take 15 s of a processor.
#[test]
fn several_kinds_of_faults_together() {
    if std::env::var_os("POSTHOUSE_SOAK").is_none() {
        println!("skipped without POSTHOUSE_SOAK");
        return;
    }
    let budget = Budget { refusals: 1, ..skipping().budget };
    holds("skipped and requeued, with a refusal", Scenario { budget, ..skipping() });
    let budget = Budget { refusals: 1, ..editing().budget };
    holds("edited, with a refusal", Scenario { loads: true, budget, ..editing() });
    let budget = Budget { cut_offs: 1, late: 1, refusals: 1, ..Budget::default() };
    holds("one relay that loses its house and gets it back", Scenario { instances: 1, slow_reads: true, budget, ..cut_off() });
    let budget = Budget { cut_offs: 1, refusals: 1, losses: 1, ..Budget::default() };
    let keys = vec![Some(0), Some(0), Some(1)];
    holds("the same with two keys", Scenario { instances: 1, loads: true, keys, concurrency: 2, budget, ..cut_off() });
    let budget = Budget { outages: 1, refusals: 1, ..Budget::default() };
    holds("outage, with a refusal", Scenario { slow_reads: true, budget, ..outage() });
    let budget = Budget { cut_offs: 1, outages: 1, refusals: 1, losses: 1, ..Budget::default() };
    holds("pipelined, cut off", Scenario { keys: vec![Some(0); 2], budget, ..pipelined() });
    holds("handover, with slow reads", Scenario { slow_reads: true, ..handover() });
    let budget = Budget { cut_offs: 1, overruns: 1, refusals: 1, ..Budget::default() };
    let sometimes = vec![Sometimes::AllDelivered, Sometimes::TwoSenders, Sometimes::Late];
    holds("paused, with a refusal", Scenario { budget, never: vec![Never::Overtaken], sometimes, ..cut_off() });
}
