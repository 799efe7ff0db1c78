//! What a round would do.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::Retention;
use super::round::CHUNK;
use super::rows::PAGE;
use crate::Error;
use crate::store::{Beside, Partition, Retired, Shelf, Step};

/// What a round would do, as things are. Looking changes nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// Partitions that would be finished, having been begun.
    pub begun: Vec<Retired>,
    /// Partitions that would go, each with the number of messages in it that aren't delivered and would be kept.
    pub partitions: Vec<(Partition, i64)>,
    /// Messages that would go one by one.
    pub removed: i64,
    /// Messages that outlived their partition, are delivered by now, and would go.
    pub kept_removed: i64,
    /// Rows of what is written down beside messages that would go.
    pub beside: Vec<(Beside, i64)>,
    /// Whether counting stopped before its end, because it took long: there are at least as many.
    pub at_least: bool,
}

impl Plan {
    /// Messages that would go; those in partitions as the database estimates them.
    pub fn messages(&self) -> i64 {
        let partition = |(p, kept): &(Partition, i64)| (p.rows.unwrap_or(0) - kept).max(0);
        self.partitions.iter().map(partition).sum::<i64>() + self.removed + self.kept_removed
    }
}

impl Retention {
    /// What [`run`](Self::run) would do, counted for at most this long.
    ///
    /// # Errors
    /// A database that can't be reached.
    pub async fn plan(&self, budget: Duration) -> Result<Plan, Error> {
        let store = self.store.retention();
        let until = Instant::now() + budget;
        let mut plan = Plan::default();
        if let Some(partitions) = store.partitions().await? {
            plan.begun = store.retired(10_000).await?.into_iter().filter(|r| r.step != Step::Dropped).collect();
            if let Some(term) = self.settings.sent {
                let new = |p: &Partition| plan.begun.iter().all(|b| b.number != p.number);
                for partition in partitions.into_iter().filter(|p| p.is_over(term)).filter(new).collect::<Vec<_>>() {
                    let survivors = store.survivors(partition.low, partition.high).await?;
                    plan.partitions.push((partition, survivors));
                }
            }
        }
        if let Some(term) = self.settings.sent {
            if let Some(boundary) = store.boundary(term).await?
                && boundary.one_by_one
            {
                let between = (boundary.from.saturating_sub(1), boundary.young);
                plan.removed = self.count_old(Shelf::Message, between, term, until, &mut plan.at_least).await?;
            }
            if plan.begun.is_empty() {
                plan.kept_removed = self.count_old(Shelf::Kept, (i64::MIN, i64::MAX), term, until, &mut plan.at_least).await?;
            }
        }
        for what in Beside::ALL {
            let Some(term) = self.settings.term(what) else { continue };
            let (mut after, mut rows) = (String::new(), 0);
            loop {
                let page = store.expired(what, term, &after, CHUNK).await?;
                rows += i64::try_from(page.keys.len()).unwrap_or(i64::MAX);
                let Some(last) = page.last else { break };
                after = last;
                if Instant::now() >= until {
                    plan.at_least = true;
                    break;
                }
            }
            if rows > 0 {
                plan.beside.push((what, rows));
            }
        }
        Ok(plan)
    }

    async fn count_old(
        &self,
        shelf: Shelf,
        (mut after, below): (i64, i64),
        term: Duration,
        until: Instant,
        at_least: &mut bool,
    ) -> Result<i64, Error> {
        let mut rows = 0;
        loop {
            let page = self.store.retention().old(shelf, after, below, term, PAGE).await?;
            let Some(last) = page.last else { return Ok(rows) };
            rows += i64::try_from(page.rows.len()).unwrap_or(i64::MAX);
            after = last;
            if Instant::now() >= until {
                *at_least = true;
                return Ok(rows);
            }
        }
    }
}
