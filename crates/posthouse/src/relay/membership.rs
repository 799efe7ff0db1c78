//! Keeps the lease and shares out houses, in a task and on a connection of its own.
//!
//! Every live instance computes the same fair shares from the same rows: whoever has more gives some back (after
//! draining them), whoever has less takes what is free or whose owner's lease ran out. Houses that the same instances are
//! there for are shared out among these.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::Shared;
use super::clock::Clock;
use crate::store::{Coverage, Exactly, House, Live, Membership, Taken};
use crate::{Error, Houses};

pub(super) const NAME: &str = "membership";

/// What the engine is told.
#[derive(Debug)]
pub(super) enum HouseEvent {
    /// Read these from now on.
    Gained(Vec<Taken>),
    /// Stop reading these, finish what is in flight, then say [`Report::Drained`].
    Release(Vec<House>),
    /// How many houses are this instance's share, when that has changed. Said after what could be taken of it has been gained.
    Share(usize),
    /// These belong to somebody else now.
    Lost(Vec<House>),
    /// The name under which outcomes are written from now on.
    Instance(String),
    /// What became of taking the houses of a run, by its number.
    Exactly(u64, Result<Vec<Taken>, String>),
}

/// What the engine says.
#[derive(Debug)]
pub(super) enum Report {
    /// Nothing of these is in memory any more.
    Drained(Vec<House>),
    /// A run needs all of these, which are nobody's share. Answered with [`HouseEvent::Exactly`].
    Take(u64, Houses),
    /// The engine has stopped: give everything back and leave.
    Leave,
}

/// How this instance has a house.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// As part of its share.
    Kept,
    /// Until it is drained.
    Draining,
    /// For a run: it is not balanced, and given back when the run says so.
    ForRun,
}

/// A joiner's or heir's missing houses are looked for this often until it has its share.
const EAGER: Duration = Duration::from_millis(250);

struct Member {
    shared: Arc<Shared>,
    to_engine: mpsc::UnboundedSender<HouseEvent>,
    lease: watch::Sender<Option<Instant>>,
    instance: Option<String>,
    /// Houses this instance owns.
    owned: HashMap<House, Held>,
    /// The share that the engine knows of.
    share: Option<usize>,
    /// How many houses there are, as the last beat saw them.
    houses: u16,
    coverage: Coverage,
}

pub(super) async fn run(
    shared: Arc<Shared>,
    to_engine: mpsc::UnboundedSender<HouseEvent>,
    mut reports: mpsc::UnboundedReceiver<Report>,
    lease: watch::Sender<Option<Instant>>,
) -> &'static str {
    let coverage = super::coverage::of(&shared.groups);
    let mut member = Member { shared, to_engine, lease, instance: None, owned: HashMap::new(), share: None, houses: 0, coverage };
    let mut failures = 0u32;
    let mut next = Instant::now();
    loop {
        tokio::select! {
            report = reports.recv() => match report {
                Some(Report::Drained(houses)) => {
                    member.release(houses).await;
                    continue;
                }
                Some(Report::Take(run, houses)) => {
                    let answer = member.take_exactly(&houses).await;
                    member.tell(HouseEvent::Exactly(run, answer));
                    continue;
                }
                Some(Report::Leave) => {
                    member.leave().await;
                    return NAME;
                }
                // The engine ended in the midst of its sends, which may still arrive: nobody else may send before the lease ends.
                None => return NAME,
            },
            () = tokio::time::sleep_until(next.into()) => {}
        }
        let heartbeat = member.shared.settings.heartbeat;
        next = Instant::now()
            + match member.beat().await {
                Ok(wait) => {
                    failures = 0;
                    member.shared.stats().pass(NAME);
                    wait.min(heartbeat)
                }
                Err(e) => {
                    failures += 1;
                    let wait = (Duration::from_millis(100) * failures.min(20)).min(heartbeat);
                    tracing::warn!(error = %e, again_in = ?wait, "could not renew the lease");
                    wait
                }
            };
    }
}

impl Member {
    /// Renews (or joins), then balances; answers when to come back at the latest.
    async fn beat(&mut self) -> Result<Duration, Error> {
        let settings = &self.shared.settings;
        let lease = settings.lease;
        // Measured from before the question: the answer may have been long on its way.
        let asked = Instant::now();
        let name = match &self.instance {
            Some(name) => name.clone(),
            None => {
                let name = unique_name(settings.instance.as_deref());
                self.shared.store.join(&name, &self.coverage, lease).await?;
                self.instance = Some(name.clone());
                self.shared.stats().instance = Some(name.clone());
                self.tell(HouseEvent::Instance(name.clone()));
                tracing::info!(instance = name, "joined");
                name
            }
        };
        let renewing = Instant::now();
        let Some(members) = self.shared.store.renew(&name, lease).await? else {
            self.lost_lease();
            return Ok(Duration::ZERO);
        };
        let read = Clock::read(members.now, renewing, Instant::now());
        self.shared.clock.send_modify(|clock| *clock = Some(clock.map_or(read, |before| before.or(read))));
        self.lease.send_replace(Some(asked + lease));
        self.shared.stats().lease_until = Some(asked + lease);
        self.balance(&name, &members).await
    }

    fn lost_lease(&mut self) {
        tracing::warn!(instance = self.instance, "the lease ran out; its houses may have other owners, joining again");
        self.lease.send_replace(None);
        self.instance = None;
        self.share = None;
        let lost = self.owned.drain().map(|(house, _)| house).collect();
        self.tell(HouseEvent::Lost(lost));
        let mut stats = self.shared.stats();
        stats.instance = None;
        stats.leases_lost += 1;
        drop(stats);
        self.tell_owned();
    }

    async fn balance(&mut self, name: &str, members: &Membership) -> Result<Duration, Error> {
        self.houses = members.houses.len() as u16;
        super::coverage::judge(&self.shared, members);
        let mine: HashSet<House> = members.houses.iter().filter(|h| h.1.as_deref() == Some(name)).map(|h| h.0).collect();
        let lost: Vec<House> = self.owned.keys().filter(|h| !mine.contains(h)).copied().collect();
        if !lost.is_empty() {
            self.owned.retain(|h, _| mine.contains(h));
            self.tell(HouseEvent::Lost(lost));
        }
        // Ours in the database but not here: an answer to "take" that never arrived. Give them back to take them properly.
        let unknown: Vec<House> = mine.iter().filter(|h| !self.owned.contains_key(h)).copied().collect();
        if !unknown.is_empty() {
            self.shared.store.release(name, &unknown).await?;
        }

        let shares = shares(members, name);
        let mut wait = self.shared.settings.heartbeat;
        let mut taken: Vec<Taken> = Vec::new();
        let mut surplus: Vec<House> = Vec::new();
        for (houses, share) in &shares {
            let mut kept: Vec<House> = houses.iter().filter(|h| self.owned.get(h) == Some(&Held::Kept)).copied().collect();
            if kept.len() > *share {
                surplus.extend(kept.split_off(*share));
            }
            if kept.len() < *share {
                let missing = share - kept.len();
                let found = self.shared.store.take(name, houses, missing).await?;
                // Told at once: should the next call fail, these are ours all the same.
                self.owned.extend(found.iter().map(|t| (t.house, Held::Kept)));
                if found.len() < missing {
                    wait = EAGER;
                }
                taken.extend(&found);
                if !found.is_empty() {
                    self.tell(HouseEvent::Gained(found));
                }
            }
        }
        if !taken.is_empty() {
            tracing::info!(instance = name, taken = taken.len(), owned = self.owned.len(), "took houses");
        }
        if !surplus.is_empty() {
            for house in &surplus {
                self.owned.insert(*house, Held::Draining);
            }
            self.tell(HouseEvent::Release(surplus));
        }
        let share = shares.iter().map(|(_, share)| share).sum();
        if self.share != Some(share) {
            self.share = Some(share);
            self.tell(HouseEvent::Share(share));
        }
        self.tell_owned();
        // Be there when the next lease of an owner runs out.
        let owners: HashSet<&str> = members.houses.iter().filter_map(|h| h.1.as_deref()).collect();
        let others = members.live.iter().filter(|live| live.name != name && owners.contains(live.name.as_str()));
        if let Some(expiry) = others.map(|live| live.left).min() {
            wait = wait.min(expiry + Duration::from_millis(50));
        }
        Ok(wait)
    }

    /// Takes all of these houses for a run, or none: then why.
    async fn take_exactly(&mut self, wanted: &Houses) -> Result<Vec<Taken>, String> {
        let Some(name) = self.instance.clone() else { return Err("this instance has no lease at the moment".into()) };
        let houses: Vec<House> = (0..self.houses).filter(|h| wanted.contains(i32::from(*h))).map(|h| House(h.into())).collect();
        if houses.is_empty() {
            return Err(format!("there is none of the houses {wanted}; the database has {}", self.houses));
        }
        // A share of the instance, or what another run has not given back yet.
        if let Some(house) = houses.iter().find(|h| self.owned.contains_key(h)) {
            return Err(format!("house {house} is in use by this instance itself"));
        }
        match self.shared.store.take_exactly(&name, &houses).await {
            Ok(Exactly::Taken(taken)) => {
                self.owned.extend(taken.iter().map(|t| (t.house, Held::ForRun)));
                self.tell_owned();
                Ok(taken)
            }
            Ok(Exactly::Held(held)) => {
                let mut owners: BTreeMap<&str, Vec<u16>> = BTreeMap::new();
                for (house, owner) in &held {
                    owners.entry(owner).or_default().extend(u16::try_from(house.0));
                }
                let told = owners.into_iter().map(|(owner, houses)| format!("{} by instance {owner:?}", Houses::of(houses)));
                Err(format!("other instances are working on houses: {}", told.collect::<Vec<_>>().join(", ")))
            }
            Ok(Exactly::NoLease) => Err("this instance's lease has run out".into()),
            Ok(Exactly::Missing(houses)) => {
                let missing: Vec<String> = houses.iter().map(House::to_string).collect();
                Err(format!("the database has no house {}", missing.join(", ")))
            }
            // Should they have been taken after all, the next beat finds them as unknown and gives them back.
            Err(e) => Err(format!("the houses could not be taken: {e}")),
        }
    }

    async fn release(&mut self, houses: Vec<House>) {
        let Some(name) = self.instance.clone() else { return };
        // Drained in an earlier life of this lease, and taken anew since: still in use.
        let given_back = [Some(&Held::Draining), Some(&Held::ForRun)];
        let houses: Vec<House> = houses.into_iter().filter(|h| given_back.contains(&self.owned.get(h))).collect();
        match self.shared.store.release(&name, &houses).await {
            Ok(()) => {
                for house in &houses {
                    self.owned.remove(house);
                }
                self.tell_owned();
            }
            // Not owned by the engine any more, but in the database; the next beat finds them as unknown and gives them back.
            Err(e) => {
                for house in &houses {
                    self.owned.remove(house);
                }
                tracing::warn!(error = %e, "could not release houses, will be tried again");
            }
        }
    }

    async fn leave(&mut self) {
        if let Some(name) = self.instance.take()
            && let Err(e) = self.shared.store.leave(&name).await
        {
            tracing::warn!(error = %e, "could not give the houses back; others take them when the lease runs out");
        }
        self.shared.stats().instance = None;
    }

    /// Says which houses are this instance's.
    fn tell_owned(&self) {
        self.shared.stats().houses = self.owned.len() as u32;
        let kept = self.owned.iter().filter(|(_, held)| **held == Held::Kept).map(|(house, _)| *house).collect();
        let kept = self.instance.is_some().then_some(kept);
        self.shared.owned.send_if_modified(|known| {
            let changed = *known != kept;
            *known = kept;
            changed
        });
    }

    fn tell(&self, event: HouseEvent) {
        // The engine is gone only when everything is being torn down.
        let _ = self.to_engine.send(event);
    }
}

/// This instance's part of the houses: for each set of houses that the same live instances are there for, these houses and how
/// many of them are its share.
///
/// Within a set the shares differ by at most one. Where it doesn't come out even, those get one more that have least so far, the
/// first by name of those with equally many.
fn shares(members: &Membership, name: &str) -> Vec<(Vec<House>, usize)> {
    let mut live: Vec<&Live> = members.live.iter().collect();
    live.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let mut classes: BTreeMap<Vec<usize>, Vec<House>> = BTreeMap::new();
    for (house, ..) in &members.houses {
        let takers: Vec<usize> = (0..live.len()).filter(|n| live[*n].coverage.takes.contains(house.0)).collect();
        classes.entry(takers).or_default().push(*house);
    }
    // Sets of few first: what only they can take counts when the others are shared out.
    let mut classes: Vec<(Vec<usize>, Vec<House>)> = classes.into_iter().collect();
    classes.sort_by_key(|(takers, _)| takers.len());
    let mut so_far = vec![0; live.len()];
    let mut out = Vec::new();
    for (takers, houses) in classes {
        let mut one_more = takers.clone();
        one_more.sort_by_key(|n| (so_far[*n], *n));
        one_more.truncate(houses.len() % takers.len().max(1));
        for n in &takers {
            let share = houses.len() / takers.len() + usize::from(one_more.contains(n));
            so_far[*n] += share;
            if live[*n].name == name {
                out.push((houses.clone(), share));
            }
        }
    }
    out
}

/// A name no other life of any process has: outcomes and houses of an earlier life are not mistaken for this one's.
pub(super) fn unique_name(configured: Option<&str>) -> String {
    let base = configured.map_or_else(
        || {
            let host =
                std::fs::read_to_string("/proc/sys/kernel/hostname").ok().map(|h| h.trim().to_owned()).filter(|h| !h.is_empty());
            let mut host = host.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_else(|| "posthouse".into());
            host.truncate(64);
            format!("{host}-{}", std::process::id())
        },
        str::to_owned,
    );
    format!("{base}-{:06x}", fastrand::u32(..) & 0xff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(houses: u16, live: &[(String, Coverage)]) -> Membership {
        let left = Duration::from_secs(1);
        Membership {
            now: 0,
            live: live.iter().map(|(name, coverage)| Live { name: name.clone(), left, coverage: coverage.clone() }).collect(),
            houses: (0..houses).map(|h| (House(h.into()), None, 0)).collect(),
        }
    }

    /// How many houses of each set fall to each instance.
    fn all_shares(members: &Membership) -> Vec<usize> {
        members.live.iter().map(|live| shares(members, &live.name).iter().map(|(_, n)| n).sum()).collect()
    }

    fn takes(houses: &str) -> Coverage {
        Coverage { takes: houses.parse().unwrap(), ..Coverage::default() }
    }

    #[test]
    fn shares_add_up_and_differ_by_at_most_one() {
        for houses in 0..70 {
            for n in 1..9 {
                let live: Vec<_> = (0..n).map(|i| (format!("i{i}"), Coverage::default())).collect();
                let shares = all_shares(&members(houses, &live));
                assert_eq!(shares.iter().sum::<usize>(), usize::from(houses));
                assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            }
        }
        let one = members(64, &[("a".into(), Coverage::default())]);
        assert!(shares(&one, "b").is_empty(), "an instance that others don't see as live owns nothing");
    }

    #[test]
    fn houses_are_shared_among_those_that_take_them() {
        let live = [("a", "0-9"), ("b", "0-9,20-29"), ("c", "10-29"), ("d", "20-29")];
        let live: Vec<_> = live.map(|(name, houses)| (name.to_owned(), takes(houses))).into();
        let members = members(40, &live);
        assert_eq!(all_shares(&members).iter().sum::<usize>(), 30, "10 of the 40 are nobody's");
        let part = |name: &str| -> Vec<(String, usize)> {
            let text = |houses: &[House]| Houses::of(houses.iter().map(|h| h.0 as u16)).to_string();
            let mut part: Vec<_> = shares(&members, name).iter().map(|(houses, n)| (text(houses), *n)).collect();
            part.sort();
            part
        };
        assert_eq!(part("a"), [("0-9".into(), 5)]);
        assert_eq!(part("c")[0], ("10-19".into(), 10));
        // 20-29 is shared by three: the one more goes to d, which has nothing else.
        let third = |name: &str| part(name).into_iter().find(|p| p.0 == "20-29").unwrap().1;
        assert_eq!([third("b"), third("c"), third("d")], [3, 3, 4]);
    }

    #[test]
    fn what_does_not_come_out_even_falls_to_all_in_turn() {
        // Ten sets of one house each, shared by the same three: a set of its own each, as another instance takes it too.
        let mut live: Vec<_> = ["a", "b", "c"].map(|name| (name.to_owned(), takes("0-9"))).into();
        live.push(("d".into(), takes("0")));
        live.push(("e".into(), takes("1")));
        live.push(("f".into(), takes("2")));
        live.push(("g".into(), takes("3")));
        let shares = all_shares(&members(10, &live));
        assert_eq!(shares.iter().sum::<usize>(), 10);
        assert!(shares[..3].iter().all(|n| (2..=3).contains(n)), "{shares:?}");
    }

    #[test]
    fn houses_taken_for_runs_are_nobody_s_share() {
        let coverage = Coverage { takes: "0-3".parse().unwrap(), for_runs: "4-7".parse().unwrap() };
        assert_eq!(all_shares(&members(8, &[("a".into(), coverage)])), [4]);
    }
}
