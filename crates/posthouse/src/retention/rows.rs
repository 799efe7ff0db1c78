//! Rows that go one by one.

use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "archive")]
use super::archive::{File, Source};
use super::round::{CHUNK, Round, breathe};
use super::{Progress, Retention};
use crate::Error;
use crate::store::Shelf;
#[cfg(feature = "archive")]
use crate::store::{ArchiveFilter, ArchiveRow};

/// Rows that are looked at in one snapshot.
pub(super) const PAGE: u32 = 5_000;

/// The most that one file waits for more to be over their term.
#[cfg(feature = "archive")]
const PATIENCE: Duration = Duration::from_secs(86_400);

impl Retention {
    /// Old rows of the log, where partitions don't age out soon, and of the kept table.
    ///
    /// While a partition is on its way out (`waiting`) what is kept of it may still be in it too, so none of that goes.
    pub(super) async fn one_by_one(&self, waiting: bool, round: &mut Round<'_>) -> Result<(), Error> {
        self.finish_files(round).await?;
        let Some(term) = self.settings.sent else { return Ok(()) };
        if let Some(boundary) = self.store.retention().boundary(term).await?
            && boundary.one_by_one
        {
            let removed = self.shelf(Shelf::Message, (boundary.from.saturating_sub(1), boundary.young), term, round).await;
            round.report.removed += removed?;
        }
        if !waiting && !round.is_over() {
            let removed = self.shelf(Shelf::Kept, (i64::MIN, i64::MAX), term, round).await?;
            round.report.kept_removed += removed;
        }
        Ok(())
    }

    /// Old rows with ids between these two.
    async fn shelf(&self, shelf: Shelf, between: (i64, i64), term: Duration, round: &mut Round<'_>) -> Result<i64, Error> {
        if self.has_archive() {
            return self.archive_shelf(shelf, between, term, round).await;
        }
        let store = self.store.retention();
        let (mut after, below) = between;
        let mut removed = 0;
        while !round.is_over() {
            let page = store.old(shelf, after, below, term, PAGE).await?;
            let Some(last) = page.last else { break };
            let ids: Vec<i64> = page.rows.iter().map(|r| r.id).collect();
            removed += self.remove(shelf, &ids, round).await?;
            after = last;
        }
        Ok(removed)
    }

    /// Chunk by chunk; stops when the round is told to.
    pub(super) async fn remove(&self, shelf: Shelf, ids: &[i64], round: &mut Round<'_>) -> Result<i64, Error> {
        let mut removed = 0;
        for chunk in ids.chunks(CHUNK as usize) {
            let began = Instant::now();
            let rows = i64::try_from(self.store.retention().remove(shelf, chunk).await?).unwrap_or(i64::MAX);
            removed += rows;
            if !round.goes_on(Progress::Removed(rows)) {
                break;
            }
            breathe(began).await;
        }
        Ok(removed)
    }

    #[cfg(not(feature = "archive"))]
    async fn archive_shelf(&self, _: Shelf, _: (i64, i64), _: Duration, _: &mut Round<'_>) -> Result<i64, Error> {
        Ok(0)
    }

    #[cfg(not(feature = "archive"))]
    async fn finish_files(&self, _: &mut Round<'_>) -> Result<(), Error> {
        Ok(())
    }
}

#[cfg(feature = "archive")]
impl Retention {
    /// A file for so many rows, and then they go.
    async fn archive_shelf(
        &self,
        shelf: Shelf,
        between: (i64, i64),
        term: Duration,
        round: &mut Round<'_>,
    ) -> Result<i64, Error> {
        let store = self.store.retention();
        let (mut after, below) = between;
        let mut removed = 0;
        // A file every round would hold a few messages only. So few wait until the oldest is over its term by a good deal.
        let page = store.old(shelf, after, below, term, PAGE).await?;
        if page.rows.len() < PAGE as usize / 2
            && let Some(first) = page.rows.first()
        {
            let late = term + (term / 7).min(PATIENCE);
            if store.old(shelf, first.id - 1, first.id + 1, late, 1).await?.rows.is_empty() {
                return Ok(0);
            }
        }
        while !round.is_over() {
            match self.write_file(Source::Old(shelf, term, below), after, None, round).await? {
                File::Written(file, ids) => {
                    after = file.high;
                    removed += self.remove_filed(file, &ids, round).await?;
                }
                File::Nothing | File::Stopped => break,
            }
        }
        Ok(removed)
    }

    /// Removes what is in a file that was written.
    async fn remove_filed(&self, file: ArchiveRow, ids: &[i64], round: &mut Round<'_>) -> Result<i64, Error> {
        let removed = self.remove(file.shelf, ids, round).await?;
        if !round.is_told() {
            self.store.retention().note(&ArchiveRow { removed_ms: Some(0), ..file }).await?;
        }
        Ok(removed)
    }

    /// Goes on with files where a round was cut off.
    async fn finish_files(&self, round: &mut Round<'_>) -> Result<(), Error> {
        let store = self.store.retention();
        let filter = ArchiveFilter { open: true, limit: 1_000, ..ArchiveFilter::default() };
        let mut open = store.archives(&filter).await?;
        open.retain(|file| file.shelf.part().is_none());
        open.sort_unstable_by_key(|file| file.low);
        for file in open {
            if round.is_over() {
                break;
            }
            let (id, shelf) = (file.id, file.shelf);
            let removed = if file.written_ms.is_some() {
                // Some of its messages may be gone already, so it can't be written anew.
                let ids = self.read_back(&file).await?.map_err(Error::Archive)?;
                self.remove_filed(file, &ids, round).await?
            } else {
                // None of its messages has gone. The same ones are written to the same place, with those between them that are
                // delivered by now; or, where there is another archive by now, they are taken up like all others.
                let (between, location) = ((file.low - 1, file.high.saturating_add(1)), file.location);
                let same = self.archive.as_ref().is_some_and(|archive| archive.has(&location));
                let written = match self.settings.sent.filter(|_| same) {
                    Some(term) => self.write_file(Source::Old(shelf, term, between.1), between.0, Some(&location), round).await?,
                    None => File::Nothing,
                };
                match written {
                    File::Written(file, ids) => self.remove_filed(file, &ids, round).await?,
                    File::Nothing => {
                        store.forget(id).await?;
                        0
                    }
                    File::Stopped => 0,
                }
            };
            match shelf {
                Shelf::Kept => round.report.kept_removed += removed,
                _ => round.report.removed += removed,
            }
        }
        Ok(())
    }
}
