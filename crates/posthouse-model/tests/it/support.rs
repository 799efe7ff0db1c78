//! How a model is gone through.

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use posthouse_model::{Live, settles};
use stateright::{Checker, HasDiscoveries, Model};

/// All properties hold in all states, and from each of them all is settled in the end.
pub(crate) fn holds<M>(name: &str, model: M)
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

/// A model with something taken out doesn't keep this property.
pub(crate) fn breaks<M>(property: &'static str, name: &str, mutant: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Hash + PartialEq + Debug + Send + Sync,
    M::Action: Clone + PartialEq + Debug + Send + Sync,
{
    let checker = mutant.checker().finish_when(HasDiscoveries::AllOf([property].into())).spawn_bfs().join();
    let states = checker.unique_state_count();
    let found = checker.discovery(property);
    let steps = found.unwrap_or_else(|| panic!("{name}: {property:?} holds all the same, in {states} states")).into_actions();
    println!("{name}: {property:?} breaks, for example: {steps:?}");
}

/// A model with something taken out gets into states from which not all is settled in the end.
pub(crate) fn sticks<M>(name: &str, mutant: &M)
where
    M: Live,
    M::State: Clone + Hash,
    M::Action: Clone + Debug,
{
    match settles(mutant) {
        Ok(states) => panic!("{name}: all is settled all the same, in {states} states"),
        Err(stuck) => println!("{name}: {stuck}"),
    }
}
