//! Takes out of the database what was delivered long ago. What isn't delivered never goes.
//!
//! | file | what it does |
//! |---|---|
//! | `round.rs` | one round: partitions, rows one by one, what is written down beside messages |
//! | `partition.rs` | the steps of a partition on its way out |
//! | `rows.rs` | rows that go one by one |
//! | `plan.rs` | what a round would do |
//! | `archive.rs` | where messages are written before they go, with the feature `archive` |
//! | `encode.rs` | how they are written |
//! | `parquet.rs` | how they are written as Parquet |
//!
//! PostgreSQL, MySQL and MariaDB: a partition of the log whose newest message is over its term is taken out of the log as a whole.
//! Where messages are so few that this would take long, and in SQLite, rows go one by one. Either way what is pending or FAILED
//! stays, and is delivered or requeued as before.
//!
//! ```no_run
//! # async fn f(outbox: posthouse::Outbox<sqlx::Postgres>) -> Result<(), posthouse::Error> {
//! use std::time::Duration;
//!
//! use posthouse::RetentionSettings;
//! use posthouse::retention::Retention;
//!
//! let mut settings = RetentionSettings::after(Some(Duration::from_secs(14 * 86_400)));
//! settings.budget = Duration::from_secs(60);
//! let retention = Retention::new(outbox.store(Duration::from_secs(10)), "orders", settings)?;
//! let report = retention.run(&mut |_| std::ops::ControlFlow::Continue(())).await?;
//! println!("{} messages are gone", report.messages());
//! # Ok(()) }
//! ```

#[cfg(feature = "archive")]
mod archive;
#[cfg(feature = "archive")]
mod encode;
#[cfg(feature = "parquet")]
mod parquet;
mod partition;
mod plan;
mod round;
mod rows;

use std::collections::HashMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

#[cfg(feature = "archive")]
use self::archive::Archive;
#[cfg(feature = "archive")]
pub use self::encode::{Rows, read};
pub use self::plan::Plan;
use crate::store::{ArchiveFilter, ArchiveRow, Beside, Retired, Step, Store};
use crate::{Error, RetentionSettings};

/// The duty that a round has while it works.
pub const DUTY: &str = "retention";

/// How long a round's duty outlives its process.
const LEASE: Duration = Duration::from_secs(60);

/// What can't go yet is tried again after this.
const SOON: Duration = Duration::from_secs(300);

/// Takes old rows out of one database.
pub struct Retention {
    store: Arc<dyn Store>,
    settings: RetentionSettings,
    #[cfg(feature = "archive")]
    archive: Option<Archive>,
    owner: String,
    /// Where the next round goes on with rows that aren't in the order of their age.
    cursors: Mutex<HashMap<Beside, String>>,
}

impl fmt::Debug for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retention").field("settings", &self.settings).field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// What a round is doing. It asks with each whether it may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// A step of a partition is done, and not yet written down.
    Done(i64, Step),
    /// A step of a partition is written down.
    Noted(i64, Step),
    /// Messages are on their way into an archive: how many of the file so far.
    Archiving(i64),
    /// A file of an archive was written and read back.
    Written,
    /// Rows went: messages, or what is written down beside them.
    Removed(i64),
}

/// Called now and then while a round works; `Break` ends it at that point. The next round goes on there.
pub type Watch<'w> = &'w mut (dyn FnMut(Progress) -> ControlFlow<()> + Send);

/// What a round did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Another instance is at it, so nothing was done.
    pub busy: bool,
    /// Partitions that are gone now.
    pub partitions: Vec<Retired>,
    /// Partitions that are to go and can't yet, and why.
    pub waiting: Vec<(i64, String)>,
    /// Messages that went one by one.
    pub removed: i64,
    /// Messages that had outlived their partition, were delivered since, and went.
    pub kept_removed: i64,
    /// Rows of what is written down beside messages that went.
    pub beside: Vec<(Beside, i64)>,
    /// Files that were written to the archive.
    pub files: i64,
    /// Their size in bytes.
    pub bytes: i64,
    /// Whether it stopped before all was done: its time was over, or it was told to.
    pub unfinished: bool,
    /// What went wrong. Nothing is removed that wasn't archived before.
    pub problems: Vec<String>,
}

impl Report {
    /// Messages that are gone.
    pub fn messages(&self) -> i64 {
        self.partitions.iter().map(|p| p.amount).sum::<i64>() + self.removed + self.kept_removed
    }

    /// Whether nothing was there to do.
    pub fn is_idle(&self) -> bool {
        let beside: i64 = self.beside.iter().map(|(_, rows)| rows).sum();
        self.partitions.is_empty()
            && self.waiting.is_empty()
            && self.messages() + beside + self.files == 0
            && self.problems.is_empty()
    }
}

/// Whether a file of an archive is as it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Verdict {
    /// The file.
    #[serde(flatten)]
    pub file: ArchiveRow,
    /// What is wrong with it; None when nothing is.
    pub problem: Option<String>,
}

impl Retention {
    /// For one database. `name` is the directory of this database in the archive.
    ///
    /// # Errors
    /// Settings that can't hold, or a name that can't be a path.
    pub fn new(store: Arc<dyn Store>, name: &str, settings: RetentionSettings) -> Result<Self, Error> {
        if let Some((field, why)) = settings.problems().into_iter().next() {
            return Err(Error::Config(format!("retention.{field}: {why}")));
        }
        let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains(['\\', '\0']);
        if !name.split('/').all(plain) {
            return Err(Error::Config(format!("retention: {name:?} can't be the name of a directory in an archive")));
        }
        #[cfg(feature = "archive")]
        let archive = Archive::open(name, &settings)?;
        Ok(Self {
            store,
            settings,
            #[cfg(feature = "archive")]
            archive,
            owner: uuid::Uuid::now_v7().to_string(),
            cursors: Mutex::default(),
        })
    }

    /// Its settings.
    pub fn settings(&self) -> &RetentionSettings {
        &self.settings
    }

    /// One round: takes out what is over its term, within [`budget`](RetentionSettings::budget). Only one instance does it at a
    /// time; the others are told so.
    ///
    /// # Errors
    /// A database that can't be reached or refuses. What goes wrong with an archive is in the report.
    pub async fn run(&self, watch: Watch<'_>) -> Result<Report, Error> {
        if !self.store.duty(DUTY, &self.owner, LEASE).await? {
            return Ok(Report { busy: true, ..Report::default() });
        }
        let renew = async {
            loop {
                tokio::time::sleep(LEASE / 4).await;
                match self.store.duty(DUTY, &self.owner, LEASE).await {
                    Ok(true) => {}
                    Ok(false) => break,
                    // The lease outlives a few of these.
                    Err(e) => tracing::warn!(error = %e, "could not renew the duty of retention"),
                }
            }
        };
        let until = Instant::now() + self.settings.budget;
        let result = tokio::select! {
            result = self.round(until, watch) => result,
            () = renew => Err(Error::Config("another instance has taken over retention, because this one's lease ran out".into())),
        };
        // If it can't be laid down it ends by itself.
        if let Err(e) = self.store.lay_down(DUTY, &self.owner).await {
            tracing::debug!(error = %e, "could not lay down the duty of retention");
        }
        result
    }

    /// Rounds, one after the other, for as long as it is polled. It can be dropped at any moment.
    pub async fn repeat(&self) {
        for warning in self.settings.warnings() {
            tracing::warn!(warning, "retention");
        }
        let mut said = String::new();
        // Not at once: a process that dies at its start would do nothing else.
        let mut pause = self.settings.every.min(Duration::from_secs(60));
        loop {
            tokio::time::sleep(pause.mul_f64(0.75 + 0.5 * fastrand::f64())).await;
            pause = self.settings.every;
            match self.run(&mut |_| ControlFlow::Continue(())).await {
                Ok(report) if report.busy => {}
                Ok(report) => {
                    for (number, why) in &report.waiting {
                        tracing::info!(partition = number, why, "a partition of the log can't go yet");
                    }
                    let problems = report.problems.join("; ");
                    if !problems.is_empty() && problems != said {
                        tracing::warn!(problems, again_in = ?pause, "retention: what could not be archived stays");
                    }
                    said = problems;
                    if report.messages() > 0 {
                        tracing::info!(messages = report.messages(), files = report.files, "old messages are gone");
                    }
                    if !report.waiting.is_empty() {
                        pause = pause.min(SOON);
                    }
                    if report.unfinished && report.problems.is_empty() {
                        // Others have the database for a while, and then it goes on.
                        pause = self.settings.budget.min(self.settings.every);
                    }
                }
                Err(e) if e.to_string() == said => {}
                Err(e) => {
                    said = e.to_string();
                    tracing::warn!(error = said, again_in = ?pause, "retention failed, so old rows stay");
                }
            }
        }
    }

    /// Reads files of the archive back, newest first, and tells of each whether it is as it was written.
    ///
    /// # Errors
    /// A database that can't be reached, or no archive.
    pub async fn verify(&self, limit: u32) -> Result<Vec<Verdict>, Error> {
        let filter = ArchiveFilter { limit, ..ArchiveFilter::default() };
        let mut out = Vec::new();
        for file in self.store.retention().archives(&filter).await? {
            if file.written_ms.is_some() {
                out.push(self.verdict(file).await);
            }
        }
        Ok(out)
    }

    /// Reads one file back.
    pub async fn verdict(&self, file: ArchiveRow) -> Verdict {
        let problem = match self.read_back(&file).await {
            Ok(read) => read.err(),
            Err(e) => Some(e.to_string()),
        };
        Verdict { file, problem }
    }

    /// The ids in a file; or what is wrong with it, where that is sure.
    #[cfg(feature = "archive")]
    async fn read_back(&self, file: &ArchiveRow) -> Result<Result<Vec<i64>, String>, Error> {
        archive::read_back(&self.settings, file).await
    }

    #[cfg(not(feature = "archive"))]
    async fn read_back(&self, file: &ArchiveRow) -> Result<Result<Vec<i64>, String>, Error> {
        Err(Error::Archive(format!("{} can't be read: this was built without the feature \"archive\"", file.location)))
    }

    #[cfg(feature = "archive")]
    fn has_archive(&self) -> bool {
        self.archive.is_some()
    }

    #[cfg(not(feature = "archive"))]
    fn has_archive(&self) -> bool {
        false
    }
}
