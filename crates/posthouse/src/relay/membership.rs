//! Keeps the lease and shares out houses, in a task and on a connection of its own.
//!
//! Every live instance computes the same fair shares from the same rows: whoever has more gives some back (after
//! draining them), whoever has less takes what is free or whose owner's lease ran out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::Shared;
use crate::Error;
use crate::store::{House, Membership, Taken};

pub(super) const NAME: &str = "membership";

/// What the engine is told.
#[derive(Debug)]
pub(super) enum HouseEvent {
    /// Read these from now on.
    Gained(Vec<Taken>),
    /// Stop reading these, finish what is in flight, then say [`Report::Drained`].
    Release(Vec<House>),
    /// How many houses are this instance's share, when that has changed.
    Share(usize),
    /// These belong to somebody else now.
    Lost(Vec<House>),
    /// The name under which outcomes are written from now on.
    Instance(String),
}

/// What the engine says.
#[derive(Debug)]
pub(super) enum Report {
    /// Nothing of these is in memory any more.
    Drained(Vec<House>),
    /// The engine has stopped: give everything back and leave.
    Leave,
}

/// A joiner's or heir's missing houses are looked for this often until it has its share.
const EAGER: Duration = Duration::from_millis(250);

struct Member {
    shared: Arc<Shared>,
    to_engine: mpsc::UnboundedSender<HouseEvent>,
    lease: watch::Sender<Option<Instant>>,
    instance: Option<String>,
    /// Houses this instance owns; true while they are being drained.
    owned: HashMap<House, bool>,
    /// The share that the engine knows of.
    share: Option<usize>,
}

pub(super) async fn run(
    shared: Arc<Shared>,
    to_engine: mpsc::UnboundedSender<HouseEvent>,
    mut reports: mpsc::UnboundedReceiver<Report>,
    lease: watch::Sender<Option<Instant>>,
) -> &'static str {
    let mut member = Member { shared, to_engine, lease, instance: None, owned: HashMap::new(), share: None };
    let mut failures = 0u32;
    let mut next = Instant::now();
    loop {
        tokio::select! {
            report = reports.recv() => match report {
                Some(Report::Drained(houses)) => {
                    member.release(houses).await;
                    continue;
                }
                Some(Report::Leave) | None => {
                    member.leave().await;
                    return NAME;
                }
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
                self.shared.store.join(&name, lease).await?;
                self.instance = Some(name.clone());
                self.shared.stats().instance = Some(name.clone());
                self.tell(HouseEvent::Instance(name.clone()));
                tracing::info!(instance = name, "joined");
                name
            }
        };
        let Some(members) = self.shared.store.renew(&name, lease).await? else {
            self.lost_lease();
            return Ok(Duration::ZERO);
        };
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
        stats.houses = 0;
    }

    async fn balance(&mut self, name: &str, members: &Membership) -> Result<Duration, Error> {
        let mut live: Vec<&str> = members.live.iter().map(|(n, _)| n.as_str()).collect();
        live.sort_unstable();
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

        let share = share(members.houses.len(), &live, name);
        if self.share != Some(share) {
            self.share = Some(share);
            self.tell(HouseEvent::Share(share));
        }
        let mut kept: Vec<House> = self.owned.iter().filter(|(_, draining)| !**draining).map(|(h, _)| *h).collect();
        if kept.len() > share {
            kept.sort_unstable();
            let surplus = kept.split_off(share);
            for house in &surplus {
                self.owned.insert(*house, true);
            }
            self.tell(HouseEvent::Release(surplus));
        }
        let mut wait = self.shared.settings.heartbeat;
        if kept.len() < share {
            let taken = self.shared.store.take(name, share - kept.len()).await?;
            self.owned.extend(taken.iter().map(|t| (t.house, false)));
            if kept.len() + taken.len() < share {
                wait = EAGER;
            }
            if !taken.is_empty() {
                tracing::info!(instance = name, taken = taken.len(), owned = self.owned.len(), "took houses");
                self.tell(HouseEvent::Gained(taken));
            }
        }
        self.shared.stats().houses = self.owned.len() as u32;
        // Be there when the next lease of an owner runs out.
        let owners: HashSet<&str> = members.houses.iter().filter_map(|h| h.1.as_deref()).collect();
        let others = members.live.iter().filter(|(n, _)| n != name && owners.contains(n.as_str()));
        if let Some(expiry) = others.map(|(_, left)| *left).min() {
            wait = wait.min(expiry + Duration::from_millis(50));
        }
        Ok(wait)
    }

    async fn release(&mut self, houses: Vec<House>) {
        let Some(name) = self.instance.clone() else { return };
        // Drained in an earlier life of this lease, and taken anew since: still in use.
        let houses: Vec<House> = houses.into_iter().filter(|h| self.owned.get(h) == Some(&true)).collect();
        match self.shared.store.release(&name, &houses).await {
            Ok(()) => {
                for house in &houses {
                    self.owned.remove(house);
                }
                self.shared.stats().houses = self.owned.len() as u32;
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

    fn tell(&self, event: HouseEvent) {
        // The engine is gone only when everything is being torn down.
        let _ = self.to_engine.send(event);
    }
}

/// An even share of the houses; the first instances by name get one more where it doesn't come out even.
fn share(houses: usize, live: &[&str], name: &str) -> usize {
    let Some(place) = live.iter().position(|n| *n == name) else { return 0 };
    houses / live.len() + usize::from(place < houses % live.len())
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

    #[test]
    fn shares_add_up_and_differ_by_at_most_one() {
        for houses in 0..70 {
            for n in 1..9 {
                let names: Vec<String> = (0..n).map(|i| format!("i{i}")).collect();
                let live: Vec<&str> = names.iter().map(String::as_str).collect();
                let shares: Vec<usize> = live.iter().map(|name| share(houses, &live, name)).collect();
                assert_eq!(shares.iter().sum::<usize>(), houses);
                assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            }
        }
        assert_eq!(share(64, &["a"], "b"), 0, "an instance that others don't see as live owns nothing");
    }
}
