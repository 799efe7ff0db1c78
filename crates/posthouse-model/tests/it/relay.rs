//! The outbox and the relay: what holds, and what breaks it.

use posthouse_model::relay::{Budget, Never, Protection, Scenario, Sometimes};

use crate::support::{self, holds};

const NO_FAULT: Budget = Budget {
    crashes: 0,
    cut_offs: 0,
    overruns: 0,
    refusals: 0,
    losses: 0,
    late: 0,
    lost_answers: 0,
    outages: 0,
    edits: 0,
    requeues: 0,
    skips: 0,
    handovers: 0,
    rollbacks: 0,
    publishers: 0,
    hints: 0,
};

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
        budget: Budget { rollbacks: 1, ..NO_FAULT },
        never: vec![Never::Overtaken, Never::Duplicate, Never::Late, Never::TwoSenders],
        ..Scenario::default()
    }
}

/// A receiver that refuses, requests and confirmations that get lost or come late.
fn failures() -> Scenario {
    Scenario {
        slow_reads: true,
        budget: Budget { refusals: 1, losses: 1, ..NO_FAULT },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Duplicate, Sometimes::Failed],
        ..Scenario::default()
    }
}

/// Operators that requeue and skip, on a route whose FAILED messages leave the queue.
fn skipping() -> Scenario {
    Scenario {
        keys: vec![Some(0); 3],
        skip: true,
        max_attempts: 1,
        budget: Budget { refusals: 1, requeues: 1, ..NO_FAULT },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Failed],
        ..Scenario::default()
    }
}

/// Operators that send a message somewhere else while it is on its way.
fn editing() -> Scenario {
    Scenario {
        loads: true,
        budget: Budget { edits: 1, late: 1, refusals: 1, ..NO_FAULT },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Failed],
        ..Scenario::default()
    }
}

/// A receiver that is down.
fn outage() -> Scenario {
    Scenario {
        keys: vec![None, Some(0), Some(0)],
        concurrency: 2,
        budget: Budget { outages: 2, ..NO_FAULT },
        never: vec![Never::Overtaken, Never::Duplicate],
        ..Scenario::default()
    }
}

/// Two relays, one of which is cut off for longer than its lease.
fn cut_off() -> Scenario {
    Scenario {
        instances: 2,
        budget: Budget { cut_offs: 1, ..NO_FAULT },
        never: vec![Never::Overtaken, Never::TwoSenders],
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Duplicate],
        ..Scenario::default()
    }
}

/// Two relays, one of which gives its house to the other.
fn handover() -> Scenario {
    Scenario {
        instances: 2,
        budget: Budget { handovers: 1, ..NO_FAULT },
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
        Scenario { budget: Budget { publishers: 1, ..NO_FAULT }, ..Scenario::default() },
    );
    breaks(LOST, Protection::ConfirmedOnly, Scenario::default());
    let unheard = Scenario { budget: Budget { hints: 1, ..NO_FAULT }, ..Scenario::default() };
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

#[test]
fn late_answers_and_lost_answers_of_the_database_lose_and_reorder_nothing() {
    let late = Scenario {
        budget: Budget { late: 2, lost_answers: 1, ..NO_FAULT },
        sometimes: vec![Sometimes::AllDelivered, Sometimes::Late],
        ..Scenario::default()
    };
    holds("late answers", late);
}

#[test]
fn what_operators_do_loses_nothing_and_keeps_the_order() {
    holds("skipping", skipping());
    breaks(ORDER, Protection::PassedHeedsOperators, skipping());
    holds("editing", editing());
    breaks(LOST, Protection::VersionOfDelete, editing());
    breaks(EARLY, Protection::VersionOfSetback, Scenario { budget: Budget { refusals: 2, ..editing().budget }, ..editing() });
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
        budget: Budget { cut_offs: 1, overruns: 1, ..NO_FAULT },
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
    holds("ordering none", Scenario { serialised: true, strict: false, concurrency: 2, ..free });
}
