//! Whether what must happen in the end can be got in the way of for good.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::{BuildHasherDefault, Hash};

use stateright::Model;

use crate::digest::{Digested, digest};

/// A model of something that must come to an end once no more faults happen.
pub trait Live: Model {
    /// A step that need not happen.
    fn is_fault(action: &Self::Action) -> bool;

    /// All is done.
    fn is_settled(&self, state: &Self::State) -> bool;
}

/// States from which all can't be done any more, unless a fault helps.
#[derive(Debug)]
pub struct Stuck<A> {
    /// How many.
    pub states: usize,
    /// The steps to one that is reached with fewest.
    pub path: Vec<A>,
}

impl<A: fmt::Debug> fmt::Display for Stuck<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} states are never settled again, one of them after {:?}", self.states, self.path)
    }
}

/// Goes through all states, and looks whether from each of them a settled one can be reached *without a fault*. Answers how many
/// there are.
///
/// Together with fairness (a step that is possible again and again is taken some day) that is "in the end, all is settled", for
/// any number of faults that come to an end. `stateright`'s `eventually` can't say that of a model with cycles in it, such as
/// reads that find nothing.
///
/// # Errors
/// The states from which there is no way.
pub fn settles<M>(model: &M) -> Result<usize, Stuck<M::Action>>
where
    M: Live,
    M::State: Clone + Hash,
    M::Action: Clone,
{
    let mut known: HashMap<u128, u32, BuildHasherDefault<Digested>> = HashMap::default();
    let mut states = model.init_states();
    let mut parents: Vec<Option<(u32, M::Action)>> = vec![None; states.len()];
    for (n, state) in states.iter().enumerate() {
        known.insert(digest(state), n as u32);
    }
    // From where, without a fault, each state is reached.
    let mut back: Vec<(u32, u32)> = Vec::new();
    let (mut at, mut actions) = (0, Vec::new());
    while let Some(state) = states.get(at).cloned() {
        model.actions(&state, &mut actions);
        for action in actions.drain(..) {
            let Some(next) = model.next_state(&state, action.clone()) else { continue };
            let fault = M::is_fault(&action);
            let fresh = states.len() as u32;
            let number = match known.entry(digest(&next)) {
                Entry::Occupied(entry) => *entry.get(),
                Entry::Vacant(entry) => {
                    states.push(next);
                    parents.push(Some((at as u32, action)));
                    *entry.insert(fresh)
                }
            };
            if !fault {
                back.push((number, at as u32));
            }
        }
        at += 1;
    }
    drop(known);
    back.sort_unstable();
    let mut settles: Vec<bool> = states.iter().map(|state| model.is_settled(state)).collect();
    let mut open: Vec<u32> = (0..states.len() as u32).filter(|n| settles[*n as usize]).collect();
    while let Some(n) = open.pop() {
        let first = back.partition_point(|(to, _)| *to < n);
        for (_, from) in back[first..].iter().take_while(|(to, _)| *to == n) {
            if !std::mem::replace(&mut settles[*from as usize], true) {
                open.push(*from);
            }
        }
    }
    let Some(first) = settles.iter().position(|settled| !settled) else { return Ok(states.len()) };
    let mut path = Vec::new();
    let mut n = first;
    while let Some((parent, action)) = parents[n].clone() {
        path.push(action);
        n = parent as usize;
    }
    path.reverse();
    Err(Stuck { states: settles.iter().filter(|settled| !**settled).count(), path })
}
