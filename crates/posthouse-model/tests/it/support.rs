//! How a model is gone through.

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use posthouse_model::relay::{Protection, Scenario};
use posthouse_model::{Live, settles};
use stateright::{Checker, HasDiscoveries, Model};

/// All properties hold in all states, and from each of them all is settled in the end.
pub fn holds<M>(name: &str, model: M)
where
    M: Model + Live + Clone + Send + Sync + 'static,
    M::State: Clone + Hash + PartialEq + Debug + Send + Sync,
    M::Action: Clone + PartialEq + Debug + Send + Sync,
{
    let began = Instant::now();
    let checker = model.clone().checker().spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    for property in model.properties() {
        let found = checker.discovery(property.name).map(stateright::Path::into_actions);
        match found {
            Some(steps) if property.expectation.discovery_is_failure() => {
                panic!("{name}: {:?} does not hold, after {steps:?}", property.name)
            }
            None if !property.expectation.discovery_is_failure() => panic!("{name}: {:?} never happens", property.name),
            _ => {}
        }
    }
    let live = settles(&model).unwrap_or_else(|stuck| panic!("{name}: {stuck}"));
    // A property whose example has been found doesn't end the search, nor may anything else.
    assert_eq!(states, live, "{name}: the two searches differ");
    println!("{name}: {states} states, depth {depth}, {:?}", began.elapsed());
}

/// Without the protection the property doesn't hold, and with it it does (see the test that this stands in).
pub fn breaks(property: &'static str, without: Protection, scenario: Scenario) {
    let name = format!("without {without:?}");
    let mutant = Scenario { without: Some(without), ..scenario };
    let checker = mutant.checker().finish_when(HasDiscoveries::AllOf([property].into())).spawn_bfs().join();
    let found = checker.discovery(property);
    let states = checker.unique_state_count();
    let steps = found.unwrap_or_else(|| panic!("{name}: {property:?} holds all the same, in {states} states")).into_actions();
    println!("{name}: {property:?} breaks in {} steps: {steps:?}", steps.len());
}

/// Without the protection there are states from which not all is settled in the end.
pub fn sticks(without: Protection, scenario: Scenario) {
    let name = format!("without {without:?}");
    let mutant = Scenario { without: Some(without), ..scenario };
    match settles(&mutant) {
        Ok(states) => panic!("{name}: all is settled all the same, in {states} states"),
        Err(stuck) => println!("{name}: {stuck}"),
    }
}
