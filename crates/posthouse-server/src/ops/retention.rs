//! How retention stands: partitions of the log, those that went, files of archives.

use std::time::Duration;

use posthouse::store::{ArchiveFilter, ArchiveRow, Partition, Retired, Step, Store};

/// How retention stands in a database.
#[derive(Debug)]
pub(crate) struct Standing {
    /// None where the log isn't partitioned.
    pub(crate) partitions: Option<Vec<Partition>>,
    /// Partitions on their way out, and those that went, the newest first.
    pub(crate) retired: Vec<Retired>,
    /// Files of archives, the newest first.
    pub(crate) archives: Vec<ArchiveRow>,
    /// `before` of the next page of files; None when this one was not full.
    pub(crate) next: Option<i64>,
}

/// Reads it. `limit`: partitions that went, and files. `before`: only files with lower ids.
pub(crate) async fn standing(store: &dyn Store, limit: u32, before: Option<i64>) -> Result<Standing, posthouse::Error> {
    let retention = store.retention();
    let archives = retention.archives(&ArchiveFilter { limit, before, ..ArchiveFilter::default() }).await?;
    let next = archives.last().filter(|_| archives.len() == limit as usize).map(|last| last.id);
    Ok(Standing { partitions: retention.partitions().await?, retired: retention.retired(limit).await?, archives, next })
}

/// How long something stays, for people.
pub(crate) fn term(term: Option<Duration>) -> String {
    term.map_or_else(|| "for ever".into(), |d| humantime::format_duration(d).to_string())
}

/// How far a partition is on its way out, for people.
pub(crate) fn step(step: Step) -> String {
    if step == Step::Dropped { "gone".into() } else { step.as_str().to_lowercase() }
}

/// What happens to a partition: `goes` when all in it is over the term, `current` where ids are given out, otherwise `stays`.
pub(crate) fn fate(partition: &Partition, sent: Option<Duration>) -> &'static str {
    match (sent.is_some_and(|term| partition.is_over(term)), partition.current) {
        (true, _) => "goes",
        (_, true) => "current",
        _ => "stays",
    }
}
