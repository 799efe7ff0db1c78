//! The checker: compares what was committed, what the broker took and what the receivers did. It knows nothing of how messages
//! get from one to the other.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::content::{Booking, TYPE};

/// What the publisher knows of a transaction's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Committed,
    /// It was rolled back, or broke before a commit was asked for.
    RolledBack,
    /// The connection broke during the commit.
    Unknown,
}

/// What a publisher did, by its own record.
#[derive(Debug, Clone)]
pub(super) struct Published {
    pub(super) booking: Booking,
    pub(super) outcome: Outcome,
}

/// A message as it came somewhere.
#[derive(Debug, Clone)]
pub(super) struct Arrival {
    pub(super) id: String,
    pub(super) kind: String,
    pub(super) key: Option<String>,
    pub(super) payload: Vec<u8>,
}

/// Where an account stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Balance {
    /// Keyed bookings.
    pub(super) seq: i64,
    pub(super) amount: i64,
}

/// What was found when everything had come to rest.
#[derive(Debug, Clone, Default)]
pub(super) struct Evidence {
    pub(super) published: Vec<Published>,
    /// The sender's business rows.
    pub(super) booked: Vec<Booking>,
    /// What the broker took, in its order, duplicates included.
    pub(super) arrived: Vec<Arrival>,
    /// The receivers' business rows, in the order of their effects.
    pub(super) effects: Vec<Arrival>,
    pub(super) sender: BTreeMap<String, Balance>,
    pub(super) receiver: BTreeMap<String, Balance>,
    /// Rows of the outbox that aren't delivered.
    pub(super) pending: u64,
    /// Those of them that are FAILED.
    pub(super) given_up: u64,
    /// Rows of the inbox that aren't done.
    pub(super) unfinished: u64,
    /// Relays and consumers that ended although nobody ended them.
    pub(super) ended: Vec<String>,
}

/// One line of the result.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) what: &'static str,
    pub(super) count: u64,
    /// None: nothing is promised about it.
    pub(super) promised: Option<u64>,
    /// Some of what is wrong.
    pub(super) examples: Vec<String>,
}

impl Line {
    pub(super) fn broken(&self) -> bool {
        self.promised.is_some_and(|promised| promised != self.count)
    }
}

/// How many are named.
const EXAMPLES: usize = 10;

/// All lines, those about promises last.
pub(super) fn check(evidence: &Evidence) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut told = |what, count: usize| lines.push(Line { what, count: count as u64, promised: None, examples: vec![] });
    let known: HashMap<&str, &Published> = evidence.published.iter().map(|p| (&*p.booking.id, p)).collect();
    let booked: HashSet<&str> = evidence.booked.iter().map(|b| &*b.id).collect();
    let of = |outcome| evidence.published.iter().filter(move |p| p.outcome == outcome);
    let first_arrivals = firsts(&evidence.arrived);
    let first_effects = firsts(&evidence.effects);
    told("messages committed", booked.len());
    told("messages rolled back", evidence.published.len().saturating_sub(booked.len()));
    told("commits without an answer", of(Outcome::Unknown).count());
    told("of these, committed", of(Outcome::Unknown).filter(|p| booked.contains(&*p.booking.id)).count());
    told("deliveries", evidence.arrived.len());
    told("duplicate deliveries", evidence.arrived.len() - first_arrivals.len());
    told("effects", evidence.effects.len());

    let mut never = |what, found: Vec<String>| {
        let count = found.len() as u64;
        lines.push(Line { what, count, promised: Some(0), examples: found.into_iter().take(EXAMPLES).collect() });
    };
    let ids = |of: &[&Arrival]| of.iter().map(|a| a.id.clone()).collect::<HashSet<_>>();
    let (arrived, effected) = (ids(&first_arrivals), ids(&first_effects));
    let booked_without = |there: &HashSet<String>| {
        let missing = evidence.booked.iter().filter(|b| !there.contains(&b.id));
        missing.map(described).collect::<Vec<_>>()
    };
    let without_commit =
        |of: &[&Arrival]| of.iter().filter(|a| !booked.contains(&*a.id)).map(|a| a.id.clone()).collect::<Vec<_>>();
    never("lost before the broker", booked_without(&arrived));
    never("lost before the effect", booked_without(&effected));
    never("sent without a commit", without_commit(&first_arrivals));
    never("effects without a commit", without_commit(&first_effects));
    never("effects more than once", more_than_once(&evidence.effects));
    never("delivered out of order", out_of_order(&first_arrivals, &known));
    never("effects out of order", out_of_order(&first_effects, &known));
    never("deliveries with other content", changed(&evidence.arrived, &known));
    never("effects with other content", changed(&evidence.effects, &known));
    never("accounts that differ", differing(evidence));
    let mut missing: Vec<_> =
        of(Outcome::Committed).filter(|p| !booked.contains(&*p.booking.id)).map(|p| described(&p.booking)).collect();
    missing.extend(of(Outcome::RolledBack).filter(|p| booked.contains(&*p.booking.id)).map(|p| described(&p.booking)));
    let other = evidence.booked.iter().filter(|b| known.get(&*b.id).is_none_or(|p| p.booking != **b)).map(described);
    never("business rows other than committed", missing.into_iter().chain(other).collect());
    let mut left = |what, count| lines.push(Line { what, count, promised: Some(0), examples: vec![] });
    left("still pending", evidence.pending);
    left("given up (FAILED)", evidence.given_up);
    left("unfinished in the inbox", evidence.unfinished);
    lines.push(Line {
        what: "processes that ended by themselves",
        count: evidence.ended.len() as u64,
        promised: Some(0),
        examples: evidence.ended.clone(),
    });
    lines
}

fn described(booking: &Booking) -> String {
    format!("{} (account {}, number {})", booking.id, booking.account, booking.seq)
}

/// The first of each id, in order.
fn firsts(all: &[Arrival]) -> Vec<&Arrival> {
    let mut seen = HashSet::new();
    all.iter().filter(|a| seen.insert(&*a.id)).collect()
}

fn more_than_once(effects: &[Arrival]) -> Vec<String> {
    let mut seen = HashSet::new();
    effects.iter().filter(|a| !seen.insert(&*a.id)).map(|a| a.id.clone()).collect()
}

/// Keyed messages that came after a later one of their key.
fn out_of_order(firsts: &[&Arrival], known: &HashMap<&str, &Published>) -> Vec<String> {
    let mut highest: HashMap<&str, i64> = HashMap::new();
    let mut out = Vec::new();
    for booking in firsts.iter().filter_map(|a| known.get(&*a.id)).map(|p| &p.booking) {
        let Some(key) = booking.key() else { continue };
        let highest = highest.entry(key).or_default();
        if booking.seq < *highest {
            out.push(format!("{} after number {highest}", described(booking)));
        }
        *highest = (*highest).max(booking.seq);
    }
    out
}

/// Compared byte for byte with what the publisher meant. (Those nobody published are counted elsewhere.)
fn changed(all: &[Arrival], known: &HashMap<&str, &Published>) -> Vec<String> {
    let differs = |a: &&Arrival| {
        known
            .get(&*a.id)
            .is_some_and(|p| a.payload != p.booking.payload() || a.key.as_deref() != p.booking.key() || a.kind != TYPE)
    };
    all.iter().filter(differs).map(|a| a.id.clone()).collect()
}

/// The balances of both sides, and what the bookings come to.
fn differing(evidence: &Evidence) -> Vec<String> {
    let mut sums: BTreeMap<&str, Balance> = BTreeMap::new();
    for booking in &evidence.booked {
        let sum = sums.entry(&booking.account).or_insert(Balance { seq: 0, amount: 0 });
        sum.amount += booking.amount;
        sum.seq += i64::from(booking.seq > 0);
    }
    let zero = Balance { seq: 0, amount: 0 };
    let names: HashSet<&str> =
        evidence.sender.keys().chain(evidence.receiver.keys()).map(|n| &**n).chain(sums.keys().copied()).collect();
    let mut out: Vec<_> = names
        .into_iter()
        .filter_map(|name| {
            let sum = sums.get(name).copied().unwrap_or(zero);
            let [sender, receiver] = [&evidence.sender, &evidence.receiver].map(|side| side.get(name).copied().unwrap_or(zero));
            let differ = sum != sender || sum != receiver;
            differ.then(|| format!("{name}: booked {sum:?}, sender {sender:?}, receiver {receiver:?}"))
        })
        .collect();
    out.sort();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Account a has three keyed bookings, b an unkeyed one; one more was rolled back, and the fate of one was unknown.
    fn sound() -> Evidence {
        let booking = |id: &str, account: &str, seq| Booking { id: id.into(), account: account.into(), seq, amount: 10 };
        let booked = vec![booking("a1", "a", 1), booking("a2", "a", 2), booking("a3", "a", 3), booking("b1", "b", 0)];
        let mut published: Vec<_> =
            booked.iter().map(|b| Published { booking: b.clone(), outcome: Outcome::Committed }).collect();
        published[2].outcome = Outcome::Unknown;
        published.push(Published { booking: booking("r", "a", 3), outcome: Outcome::RolledBack });
        let arrivals: Vec<_> = booked.iter().map(arrival).collect();
        let balances: BTreeMap<_, _> =
            [("a".to_owned(), Balance { seq: 3, amount: 30 }), ("b".to_owned(), Balance { seq: 0, amount: 10 })].into();
        Evidence {
            published,
            booked,
            // A duplicate of an earlier one may come late.
            arrived: arrivals.iter().cloned().chain([arrivals[0].clone()]).collect(),
            effects: arrivals,
            sender: balances.clone(),
            receiver: balances,
            ..Evidence::default()
        }
    }

    fn arrival(b: &Booking) -> Arrival {
        Arrival { id: b.id.clone(), kind: TYPE.into(), key: b.key().map(Into::into), payload: b.payload() }
    }

    /// The promises that are broken after `spoil`.
    #[track_caller]
    fn broken(spoil: impl FnOnce(&mut Evidence)) -> Vec<&'static str> {
        let mut evidence = sound();
        spoil(&mut evidence);
        let lines = check(&evidence);
        lines.iter().filter(|l| l.broken()).inspect(|l| assert!(l.count > 0)).map(|l| l.what).collect()
    }

    #[test]
    fn a_sound_run_breaks_nothing() {
        assert_eq!(broken(|_| {}), [""; 0]);
        let lines = check(&sound());
        let count = |what| lines.iter().find(|l| l.what == what).unwrap().count;
        assert_eq!(
            ["messages committed", "messages rolled back", "commits without an answer", "of these, committed"].map(count),
            [4, 1, 1, 1]
        );
        assert_eq!(["deliveries", "duplicate deliveries", "effects"].map(count), [5, 1, 4]);
    }

    #[test]
    fn a_lost_message_is_seen() {
        // Also one whose publisher never learnt that it was committed.
        for id in ["a2", "a3", "b1"] {
            assert_eq!(broken(|e| e.arrived.retain(|a| a.id != id)), ["lost before the broker"]);
            assert_eq!(broken(|e| e.effects.retain(|a| a.id != id)), ["lost before the effect"]);
        }
    }

    #[test]
    fn what_was_rolled_back_must_not_come() {
        let ghost = arrival(&sound().published[4].booking);
        assert_eq!(broken(|e| e.arrived.push(ghost.clone())), ["sent without a commit"]);
        assert_eq!(broken(|e| e.effects.push(ghost.clone())), ["effects without a commit"]);
        assert_eq!(broken(|e| e.arrived.push(Arrival { id: "nobody's".into(), ..ghost.clone() })), ["sent without a commit"]);
    }

    #[test]
    fn a_second_effect_is_seen() {
        assert_eq!(broken(|e| e.effects.push(e.effects[1].clone())), ["effects more than once"]);
    }

    #[test]
    fn an_overtaken_message_is_seen() {
        assert_eq!(broken(|e| e.arrived.swap(0, 1)), ["delivered out of order"]);
        assert_eq!(broken(|e| e.arrived.swap(0, 2)), ["delivered out of order"]);
        assert_eq!(broken(|e| e.effects.swap(1, 2)), ["effects out of order"]);
        // There is no order between keys.
        assert_eq!(broken(|e| e.arrived.swap(2, 3)), [""; 0]);
    }

    #[test]
    fn changed_content_is_seen() {
        assert_eq!(broken(|e| e.arrived[1].payload[0] ^= 1), ["deliveries with other content"]);
        assert_eq!(broken(|e| e.arrived[1].key = None), ["deliveries with other content"]);
        assert_eq!(broken(|e| e.arrived[3].key = Some("b".into())), ["deliveries with other content"]);
        assert_eq!(broken(|e| e.arrived[3].kind.clear()), ["deliveries with other content"]);
        assert_eq!(broken(|e| _ = e.effects[2].payload.pop()), ["effects with other content"]);
    }

    #[test]
    fn accounts_must_agree() {
        assert_eq!(broken(|e| e.receiver.get_mut("b").unwrap().amount += 1), ["accounts that differ"]);
        assert_eq!(broken(|e| _ = e.sender.remove("a")), ["accounts that differ"]);
    }

    #[test]
    fn the_database_must_have_what_was_committed_and_nothing_else() {
        let rows = "business rows other than committed";
        assert!(broken(|e| _ = e.booked.remove(0)).contains(&rows));
        assert!(broken(|e| e.booked.push(e.published[4].booking.clone())).contains(&rows));
        assert!(broken(|e| e.booked[1].amount = 11).contains(&rows));
        // A commit without an answer may be either.
        let without = broken(|e| {
            e.booked.retain(|b| b.id != "a3");
            e.arrived.retain(|a| a.id != "a3");
            e.effects.retain(|a| a.id != "a3");
            for side in [&mut e.sender, &mut e.receiver] {
                side.insert("a".into(), Balance { seq: 2, amount: 20 });
            }
        });
        assert_eq!(without, [""; 0]);
    }

    #[test]
    fn what_is_left_is_seen() {
        assert_eq!(broken(|e| e.pending = 1), ["still pending"]);
        assert_eq!(broken(|e| e.given_up = 1), ["given up (FAILED)"]);
        assert_eq!(broken(|e| e.unfinished = 1), ["unfinished in the inbox"]);
        assert_eq!(broken(|e| e.ended.push("relay 1".into())), ["processes that ended by themselves"]);
    }
}
