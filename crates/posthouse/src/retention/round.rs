//! One round.

use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;

use super::{Progress, Report, Retention, Watch};
use crate::store::{Beside, Record, Step};
use crate::{Error, RetentionSettings};

/// Keys that are looked at, and rows that are removed, at once.
pub(super) const CHUNK: u32 = 1_000;

/// Between two chunks others have the database for as long as the last chunk took, and at least and at most this long.
const BREATH: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));

/// What a round has at hand.
pub(super) struct Round<'w> {
    pub(super) report: Report,
    until: Instant,
    watch: Watch<'w>,
    told: bool,
}

impl Round<'_> {
    /// Tells how far it is; false when it is to stop here.
    pub(super) fn goes_on(&mut self, progress: Progress) -> bool {
        self.told |= (self.watch)(progress) == ControlFlow::Break(());
        if self.told {
            self.report.unfinished = true;
        }
        !self.told
    }

    /// Whether it was told to stop.
    #[cfg(feature = "archive")]
    pub(super) fn is_told(&self) -> bool {
        self.told
    }

    /// Whether no more is to be begun.
    pub(super) fn is_over(&mut self) -> bool {
        let over = self.told || Instant::now() >= self.until;
        self.report.unfinished |= over;
        over
    }
}

/// Others get their turn.
pub(super) async fn breathe(began: Instant) {
    tokio::time::sleep(began.elapsed().clamp(BREATH.0, BREATH.1)).await;
}

impl RetentionSettings {
    pub(super) fn term(&self, what: Beside) -> Option<Duration> {
        match what {
            Beside::Receipts => self.receipts,
            Beside::Attempts => self.attempts,
            Beside::Dedup => self.dedup,
            Beside::Audit => self.audit,
        }
    }
}

impl Retention {
    pub(super) async fn round(&self, until: Instant, watch: Watch<'_>) -> Result<Report, Error> {
        let mut round = Round { report: Report::default(), until, watch, told: false };
        // What is wrong with an archive keeps what would go into it, and nothing else.
        match self.messages(&mut round).await {
            Ok(()) => {}
            Err(Error::Archive(why)) => round.report.problems.push(why),
            Err(e) => return Err(e),
        }
        for what in Beside::ALL {
            if let Some(term) = self.settings.term(what)
                && !round.is_over()
            {
                let rows = self.clear(what, term, &mut round).await?;
                if rows > 0 {
                    round.report.beside.push((what, rows));
                }
            }
        }
        if round.report.messages() > 0 {
            let detail = format!("{} partition(s), {} file(s)", round.report.partitions.len(), round.report.files);
            let amount = Some(round.report.messages());
            self.store.record(&Record { actor: "retention", action: "retention", detail: &detail, amount }).await?;
        }
        Ok(round.report)
    }

    async fn messages(&self, round: &mut Round<'_>) -> Result<(), Error> {
        let store = self.store.retention();
        let partitioned = store.partitions().await?;
        let mut waiting = false;
        if partitioned.is_some() {
            // What was begun is finished, whatever the settings are by now. The lowest goes first.
            let mut begun: Vec<_> = store.retired(10_000).await?.into_iter().filter(|r| r.step != Step::Dropped).collect();
            begun.sort_unstable_by_key(|r| r.number);
            let mut over = Vec::new();
            if let (Some(term), Some(partitions)) = (self.settings.sent, &partitioned) {
                let new = |number| begun.iter().all(|b| b.number != number);
                over.extend(partitions.iter().filter(|p| p.is_over(term) && new(p.number)).cloned());
            }
            for retired in begun {
                waiting |= round.is_over() || !self.take_out(retired, round).await?;
                if waiting {
                    break;
                }
            }
            for partition in over {
                if waiting || round.is_over() {
                    waiting = true;
                    break;
                }
                store.retire(&partition).await?;
                waiting |= !self.take_out(super::partition::found(&partition), round).await?;
            }
        }
        if round.is_over() {
            return Ok(());
        }
        self.one_by_one(waiting, round).await
    }

    /// Removes what is over its term of what is written down beside messages.
    async fn clear(&self, what: Beside, term: Duration, round: &mut Round<'_>) -> Result<i64, Error> {
        let store = self.store.retention();
        let cursor = || self.cursors.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Ids come in the order of their age, keys don't.
        let mut after = if what == Beside::Dedup { cursor().get(&what).cloned() } else { None }.unwrap_or_default();
        let mut removed = 0;
        loop {
            let began = Instant::now();
            let page = store.expired(what, term, &after, CHUNK).await?;
            if !page.keys.is_empty() {
                let rows = i64::try_from(store.clear(what, term, &page.keys).await?).unwrap_or(i64::MAX);
                removed += rows;
                if !round.goes_on(Progress::Removed(rows)) {
                    break;
                }
            }
            match page.last {
                Some(last) => after = last,
                None => {
                    after.clear();
                    break;
                }
            }
            if round.is_over() {
                break;
            }
            breathe(began).await;
        }
        cursor().insert(what, after);
        Ok(removed)
    }
}
