//! The steps of a partition on its way out.
//!
//! Messages that aren't delivered are copied to the kept table *before* the partition leaves the log, so that whoever looks for
//! one finds it in one of the two at every moment: the log is looked at first. Transactions that published into the partition and
//! commit late are waited for before that, and once more by the detaching; what comes all the same is copied afterwards. Only
//! then is it compared for good, and what stands nowhere else is never dropped.

use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "archive")]
use super::archive::{File, Source};
use super::round::Round;
use super::{Progress, Retention};
use crate::Error;
#[cfg(feature = "archive")]
use crate::store::Shelf;
use crate::store::{ArchiveFilter, Partition, Retired, Step};

/// How often it is tried to detach a partition in one round, and how long it waits before the next time.
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(200);

pub(super) fn found(partition: &Partition) -> Retired {
    Retired {
        number: partition.number,
        low: partition.low,
        high: partition.high,
        step: Step::Found,
        survivors: 0,
        amount: 0,
        found_ms: 0,
        step_ms: 0,
    }
}

impl Retention {
    /// Goes on with a partition; false when it can't go yet.
    pub(super) async fn take_out(&self, mut retired: Retired, round: &mut Round<'_>) -> Result<bool, Error> {
        let store = self.store.retention();
        let number = retired.number;
        while retired.step != Step::Dropped {
            let next = match retired.step {
                Step::Found => match self.detach(number).await? {
                    None => Step::Detached,
                    Some(why) => {
                        round.report.waiting.push((number, why));
                        return Ok(false);
                    }
                },
                Step::Detached => {
                    retired.survivors = store.keep(number).await?;
                    Step::Kept
                }
                Step::Kept => {
                    if self.has_archive() && !self.archive_partition(&retired, round).await? {
                        return Ok(false);
                    }
                    retired.amount = store.count(number).await?;
                    Step::Archived
                }
                Step::Archived => {
                    if let Err(why) = self.verify_partition(&retired).await? {
                        // It is written once more, since nothing is gone.
                        store.advance(&Retired { step: Step::Kept, ..retired }).await?;
                        return Err(Error::Archive(why));
                    }
                    Step::Verified
                }
                Step::Verified => match store.discard(number).await? {
                    0 => {
                        self.archives_removed(number).await?;
                        Step::Dropped
                    }
                    left => {
                        tracing::warn!(partition = number, messages = left, "messages that aren't delivered are still in it");
                        Step::Detached
                    }
                },
                Step::Dropped => break,
            };
            if !round.goes_on(Progress::Done(number, next)) {
                return Ok(false);
            }
            retired.step = next;
            store.advance(&retired).await?;
            if next == Step::Dropped {
                round.report.partitions.push(retired.clone());
            }
            if !round.goes_on(Progress::Noted(number, next)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes a partition out of the log; answers why it can't.
    async fn detach(&self, number: i64) -> Result<Option<String>, Error> {
        let store = self.store.retention();
        if let Some(why) = store.held(number).await? {
            return Ok(Some(why));
        }
        store.keep(number).await?;
        for attempt in 0..TRIES {
            let began = Instant::now();
            if store.detach(number, attempt).await? {
                return Ok(None);
            }
            // Publishers get on meanwhile.
            tokio::time::sleep(began.elapsed().max(PAUSE).mul_f64(0.75 + 0.5 * fastrand::f64())).await;
        }
        Ok(Some("a transaction that used the log has not ended; look for long ones".into()))
    }

    /// Writes what is in it to the archive, but for what is kept; false when the round is over.
    #[cfg(feature = "archive")]
    async fn archive_partition(&self, retired: &Retired, round: &mut Round<'_>) -> Result<bool, Error> {
        let store = self.store.retention();
        let shelf = Shelf::Partition(retired.number);
        let done = store.archives(&ArchiveFilter { part: Some(retired.number), limit: 1, ..ArchiveFilter::default() }).await?;
        // Files are written in the order of their ids. One that was not finished is written anew.
        let mut after = match done.first() {
            Some(file) if file.written_ms.is_some() => file.high,
            Some(file) => file.low - 1,
            None => i64::MIN,
        };
        loop {
            if round.is_over() {
                return Ok(false);
            }
            match self.write_file(Source::All(shelf), after, None, round).await? {
                File::Written(file, _) => after = file.high,
                File::Nothing => return Ok(true),
                File::Stopped => return Ok(false),
            }
        }
    }

    #[cfg(not(feature = "archive"))]
    async fn archive_partition(&self, _: &Retired, _: &mut Round<'_>) -> Result<bool, Error> {
        Ok(true)
    }

    /// Reads its files back and counts; or what is wrong with them, where that is sure.
    async fn verify_partition(&self, retired: &Retired) -> Result<Result<(), String>, Error> {
        let store = self.store.retention();
        let mut filter = ArchiveFilter { part: Some(retired.number), limit: 1_000, ..ArchiveFilter::default() };
        let mut amount = 0;
        let mut files = 0;
        loop {
            let page = store.archives(&filter).await?;
            for file in &page {
                files += 1;
                match self.read_back(file).await? {
                    Ok(ids) => amount += i64::try_from(ids.len()).unwrap_or(i64::MAX),
                    Err(why) => {
                        // This one and all behind it.
                        self.forget_from(retired.number, file.low).await?;
                        return Ok(Err(why));
                    }
                }
            }
            match page.last() {
                Some(last) if page.len() == 1_000 => filter.before = Some(last.id),
                _ => break,
            }
        }
        if (files > 0 || self.has_archive()) && amount != retired.amount {
            self.forget_from(retired.number, i64::MIN).await?;
            return Ok(Err(format!(
                "{amount} messages of partition {} are in the archive, and {} should be; it is written anew",
                retired.number, retired.amount
            )));
        }
        Ok(Ok(()))
    }

    async fn forget_from(&self, number: i64, low: i64) -> Result<(), Error> {
        let store = self.store.retention();
        let filter = ArchiveFilter { part: Some(number), limit: 10_000, ..ArchiveFilter::default() };
        for file in store.archives(&filter).await?.into_iter().filter(|file| file.low >= low) {
            store.forget(file.id).await?;
        }
        Ok(())
    }

    async fn archives_removed(&self, number: i64) -> Result<(), Error> {
        let store = self.store.retention();
        let filter = ArchiveFilter { part: Some(number), open: true, limit: 1_000, ..ArchiveFilter::default() };
        loop {
            let open = store.archives(&filter).await?;
            for mut file in open.iter().cloned() {
                file.removed_ms = Some(0);
                store.note(&file).await?;
            }
            if open.len() < 1_000 {
                return Ok(());
            }
        }
    }
}
