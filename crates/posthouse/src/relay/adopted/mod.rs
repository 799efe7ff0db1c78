//! Adopted tables: rows of other applications' tables are claimed, sent, and what came of them is written back.
//!
//! | file | what it does |
//! |---|---|
//! | `pass.rs` | one scan of one table |
//! | `message.rs` | what a row says: where it goes and what is sent |
//! | `stats.rs` | what can be seen from outside |
//!
//! Unlike Posthouse's own tables these have no houses that belong to an instance: every live instance scans every table, and a
//! row belongs to whoever has claimed it. So no table is without an instance as long as one lives.

mod message;
mod pass;
mod stats;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{RwLock, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::destination::Destination;
use super::{Directory, RunCounts, RunEnd, RunOutcome, Trace, directory, told};
use crate::store::Backend;
use crate::store::adopted::{AdoptedStore, Found, Source};
use crate::transport::Transport;
use crate::transport::local::{Local, LocalError};
use crate::{Adopted, Envelope, Error, ErrorKind, Headers, Outbox, RelaySettings, Route};

pub use stats::{AdoptedCoverage, AdoptedStats, AdoptedTableStats};

/// How often the catalogue is asked for new tables, and rows are counted.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// Builds an [`AdoptedRelay`].
#[must_use = "an adopted table is scanned only after start()"]
pub struct AdoptedRelayBuilder {
    store: StoreMaker,
    name: String,
    mapping: Adopted,
    settings: RelaySettings,
    routes: HashMap<String, Route>,
    transports: HashMap<String, Arc<dyn Transport>>,
    local: Local,
    continuous: bool,
    trace: Option<Trace>,
}

type StoreMaker = Box<dyn FnOnce(Duration) -> Option<Arc<dyn AdoptedStore>> + Send>;

impl fmt::Debug for AdoptedRelayBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedRelayBuilder").field("name", &self.name).field("mapping", &self.mapping).finish_non_exhaustive()
    }
}

impl AdoptedRelayBuilder {
    /// The relay's settings: of them the name of the instance, `send_timeout`, `lease_margin`, `database_timeout` and
    /// `default_route` are used.
    pub fn settings(mut self, settings: RelaySettings) -> Self {
        self.settings = settings;
        self
    }

    /// Adds a transport; `name` is the scheme of the addresses it serves (`http` serves `https` too).
    pub fn transport(mut self, name: impl Into<String>, transport: impl Transport) -> Self {
        self.transports.insert(name.into(), Arc::new(transport));
        self
    }

    /// Says where a destination name leads.
    pub fn route(mut self, destination: impl Into<String>, route: Route) -> Self {
        self.routes.insert(destination.into(), route);
        self
    }

    /// Handles `local:{name}` with a function that takes the whole [`Envelope`].
    pub fn local_envelope<F, Fut, E>(mut self, name: impl Into<String>, handler: F) -> Self
    where
        F: Fn(Envelope) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<LocalError> + 'static,
    {
        self.local.on_envelope(name.into(), handler);
        self
    }

    /// Makes the span of each send, as [`RelayBuilder::trace_context`](crate::RelayBuilder::trace_context).
    pub fn trace_context(mut self, make: impl Fn(&mut Headers) -> tracing::Span + Send + Sync + 'static) -> Self {
        self.trace = Some(Trace(Arc::new(make)));
        self
    }

    /// Whether tables are scanned all the time, which is the default, or only by [`AdoptedRelay::run_once`].
    pub fn continuous(mut self, on: bool) -> Self {
        self.continuous = on;
        self
    }

    /// Checks the mapping, and the catalogue if the database can be reached, and starts. A database that can't be reached now is
    /// tried again in the background.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem, also those of the mapping with the tables; [`Error::Schema`] where Posthouse's own
    /// tables are missing.
    pub async fn start(self) -> Result<AdoptedRelay, Error> {
        let (shared, continuous) = self.shared()?;
        match shared.discover().await {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::Unavailable => {
                tracing::warn!(source = shared.name, error = %e, "the database can't be reached; scanning starts and keeps trying");
            }
            Err(e) => return Err(e),
        }
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(supervise(shared.clone(), stopped, continuous));
        Ok(AdoptedRelay { shared, stop, task: Some(task) })
    }

    /// Checks the mapping against the catalogue, and tells what was found, without sending anything.
    ///
    /// # Errors
    /// As [`start`](Self::start), and where the database can't be reached.
    pub async fn check(self) -> Result<AdoptedCoverage, Error> {
        let (shared, _) = self.shared()?;
        shared.discover().await?;
        Ok(shared.stats().coverage.clone())
    }

    fn shared(self) -> Result<(Arc<Shared>, bool), Error> {
        let Self { store, name, mapping, settings, routes, mut transports, local, continuous, trace } = self;
        transports.entry("local".into()).or_insert_with(|| Arc::new(local));
        let mut problems = settings.problems();
        let at = |(field, why): (String, String)| (format!("adopted.{name}.{field}"), why);
        problems.extend(mapping.problems().into_iter().map(at));
        problems.extend(mapping.problems_beside(&settings).into_iter().map(at));
        let store = store(settings.database_timeout);
        if store.is_none() {
            let why = "SQLite locks whole files and no single rows; tables are adopted in MySQL, MariaDB and PostgreSQL";
            problems.push((format!("adopted.{name}.databases"), why.into()));
        }
        let directory = directory(routes, &settings, transports, &mut problems);
        told(problems)?;
        // Its absence has been told.
        let Some(store) = store else { return Err(Error::Config(format!("adopted.{name}.databases"))) };
        let mapping = mapping.complete();
        Ok((
            Arc::new(Shared {
                // A name no other one has, so that none writes back what another one claimed.
                owner: super::membership::unique_name(settings.instance.as_deref()),
                words: message::Words::of(&mapping),
                mapping,
                name,
                settings,
                directory,
                store,
                trace,
                sources: Mutex::default(),
                destinations: Mutex::default(),
                stats: Mutex::default(),
                passes: RwLock::default(),
            }),
            continuous,
        ))
    }
}

/// What the scans of one mapping share.
#[derive(Debug)]
struct Shared {
    owner: String,
    name: String,
    mapping: Adopted,
    words: message::Words,
    settings: RelaySettings,
    directory: Directory,
    store: Arc<dyn AdoptedStore>,
    trace: Option<Trace>,
    sources: Mutex<Vec<Arc<Source>>>,
    destinations: Mutex<HashMap<String, Destination>>,
    stats: Mutex<AdoptedStats>,
    /// Held by every pass; shutdown waits for them.
    passes: RwLock<()>,
}

impl Shared {
    fn stats(&self) -> std::sync::MutexGuard<'_, AdoptedStats> {
        // Nothing panics while it is held; half-updated figures would be harmless too.
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sources(&self) -> Vec<Arc<Source>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the catalogue which tables there are. Tells what is new about them.
    async fn discover(&self) -> Result<(), Error> {
        self.store.check().await?;
        let Found { sources, tables, problems, gaps, differences, indexes } = self.store.discover(&self.mapping).await?;
        if !problems.is_empty() {
            let lines: Vec<String> = problems.iter().map(|p| format!("adopted.{}.{p}", self.name)).collect();
            return Err(Error::Config(lines.join("\n")));
        }
        let connections = self.store.connections();
        let coverage = AdoptedCoverage { connections, tables, gaps, differences, missing_indexes: indexes };
        let mut stats = self.stats();
        if stats.coverage != coverage {
            tracing::info!(source = self.name, tables = coverage.tables.join(", "), "adopted tables");
            if !coverage.gaps.is_empty() {
                tracing::warn!(source = self.name, missing = coverage.gaps.join(", "), "the numbering of the tables has gaps");
            }
            for difference in &coverage.differences {
                tracing::warn!(source = self.name, "{difference}");
            }
            for index in &coverage.missing_indexes {
                tracing::warn!(
                    source = self.name,
                    "no index fits the reads of this table, which then go through all of its rows; its owner should add: {index}"
                );
            }
            stats.coverage = coverage;
        }
        for source in &sources {
            stats.tables.entry(source.name.clone()).or_default();
        }
        drop(stats);
        *self.sources.lock().unwrap_or_else(PoisonError::into_inner) = sources.into_iter().map(Arc::new).collect();
        Ok(())
    }

    fn failed(&self, table: Option<&str>, e: &Error) {
        let mut stats = self.stats();
        stats.database_errors += 1;
        stats.database_error = Some(e.to_string());
        if let Some(table) = table {
            stats.tables.entry(table.to_owned()).or_default().last_error = Some(e.to_string());
        }
    }

    /// Scans one table once.
    async fn pass(&self, source: &Source, budget: &Budget, stop: &watch::Receiver<bool>) -> Result<RunCounts, Error> {
        let _running = self.passes.read().await;
        let result = pass::run(self, source, budget, stop.clone()).await;
        match &result {
            Ok(_) => {
                let mut stats = self.stats();
                stats.database_error = None;
                let table = stats.tables.entry(source.name.clone()).or_default();
                table.last_scan = Some(Instant::now());
                table.last_error = None;
            }
            Err(e) => self.failed(Some(&source.name), e),
        }
        result
    }

    async fn count(&self, source: &Source) {
        match self.store.pending(source).await {
            Ok(pending) => self.stats().tables.entry(source.name.clone()).or_default().pending = Some(pending),
            Err(e) => self.failed(Some(&source.name), &e),
        }
    }
}

/// How many messages a run may still take up.
#[derive(Debug)]
struct Budget(Option<AtomicU64>);

impl Budget {
    fn new(limit: Option<u64>) -> Self {
        Self(limit.map(AtomicU64::new))
    }

    fn left(&self) -> usize {
        self.0.as_ref().map_or(usize::MAX, |left| usize::try_from(left.load(Relaxed)).unwrap_or(usize::MAX))
    }

    /// Sets aside up to `n`.
    fn take(&self, n: usize) -> usize {
        let Some(left) = &self.0 else { return n };
        let mut taken = 0;
        // Always Ok: the closure never refuses.
        let _ = left.fetch_update(Relaxed, Relaxed, |left| {
            taken = n.min(usize::try_from(left).unwrap_or(usize::MAX));
            Some(left - taken as u64)
        });
        taken
    }

    fn give_back(&self, n: usize) {
        if let Some(left) = &self.0 {
            left.fetch_add(n as u64, Relaxed);
        }
    }
}

/// Scans adopted tables of one database. Dropping it stops everything at once, and claims end with their lease;
/// [`shutdown`](Self::shutdown) drains first.
///
/// ```no_run
/// # #[cfg(feature = "mysql")]
/// # async fn f(pool: sqlx::MySqlPool, kafka: impl posthouse::transport::Transport) -> Result<(), posthouse::Error> {
/// use posthouse::{Adopted, AdoptedPreset, AdoptedRelay, Outbox};
///
/// let outbox = Outbox::new(pool); // Posthouse's own tables, in the same database
/// outbox.migrate().await?;
/// let prizes = AdoptedRelay::builder(&outbox, "prizes", Adopted::preset(AdoptedPreset::MqState))
///     .transport("kafka", kafka)
///     .start()
///     .await?;
/// // … serve requests …
/// prizes.shutdown(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct AdoptedRelay {
    shared: Arc<Shared>,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

/// Asks an [`AdoptedRelay`] for scans: what a group's runs do with its tables, see [`RelayBuilder::scan`](crate::RelayBuilder::scan).
#[derive(Debug, Clone)]
pub struct AdoptedScans {
    shared: Arc<Shared>,
    stop: watch::Receiver<bool>,
}

impl AdoptedScans {
    /// The name of the mapping.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The tables that there are, in the same order for every instance.
    ///
    /// # Errors
    /// The database can't be reached, or the mapping doesn't fit the tables.
    pub async fn tables(&self) -> Result<Vec<String>, Error> {
        if self.shared.sources().is_empty() {
            self.shared.discover().await?;
        }
        let mut names: Vec<String> = self.shared.sources().iter().map(|s| s.name.clone()).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// As [`AdoptedRelay::run_once`], of these tables alone where some are named.
    pub async fn run_once(&self, limit: Option<u64>, tables: Option<&[String]>, stop: &watch::Receiver<bool>) -> RunOutcome {
        let mut counts = RunCounts::default();
        if self.shared.sources().is_empty()
            && let Err(e) = self.shared.discover().await
        {
            self.shared.failed(None, &e);
            return RunOutcome { counts, end: RunEnd::Lost(e.to_string()) };
        }
        let budget = Budget::new(limit);
        let both = Stop::of(stop.clone(), self.stop.clone());
        let wanted = |source: &Arc<Source>| tables.is_none_or(|tables| tables.contains(&source.name));
        let sources: Vec<_> = in_turn(self.shared.sources(), &self.shared.owner).into_iter().filter(wanted).collect();
        let scans = sources.iter().map(|source| async {
            let mut counts = RunCounts::default();
            loop {
                match self.shared.pass(source, &budget, &both.seen).await {
                    Ok(more) => {
                        add(&mut counts, more);
                        // Only the lowest row of a key goes in a pass.
                        let again = source.is_ordered() && more.delivered > 0;
                        if !again || *both.seen.borrow() || budget.left() == 0 {
                            return (counts, None);
                        }
                    }
                    Err(e) => return (counts, Some(e)),
                }
            }
        });
        let mut lost = None;
        for (more, error) in join_all(scans).await {
            add(&mut counts, more);
            lost = lost.or(error);
        }
        let end = match lost {
            Some(e) => RunEnd::Lost(e.to_string()),
            None if *both.seen.borrow() => RunEnd::Stopped,
            None if budget.left() == 0 => RunEnd::Limit,
            None => RunEnd::Done,
        };
        RunOutcome { counts, end }
    }
}

impl AdoptedRelay {
    /// Scans the tables of `mapping` in the database of `outbox`, under a name that stands in logs and figures.
    pub fn builder<DB: Backend>(outbox: &Outbox<DB>, name: impl Into<String>, mapping: Adopted) -> AdoptedRelayBuilder {
        let (pool, tables) = (outbox.pool().clone(), outbox.tables().clone());
        AdoptedRelayBuilder {
            store: Box::new(move |deadline| DB::adopted(&pool, &tables, deadline).map(|handle| handle.0)),
            name: name.into(),
            mapping,
            settings: RelaySettings::default(),
            routes: HashMap::new(),
            transports: HashMap::new(),
            local: Local::default(),
            continuous: true,
            trace: None,
        }
    }

    /// Scans every table once: takes up what is there and due, from the smallest id, up to `limit` messages, sends it, and writes
    /// back what came of it. Once `stop` is true nothing more is taken up, and it ends when what is in flight is done.
    ///
    /// It may run beside the continuous scans, and beside other instances: a row belongs to whoever has claimed it.
    pub async fn run_once(&self, limit: Option<u64>, stop: &watch::Receiver<bool>) -> RunOutcome {
        self.scans().run_once(limit, None, stop).await
    }

    /// A means to ask for scans, for those who don't own it.
    pub fn scans(&self) -> AdoptedScans {
        AdoptedScans { shared: self.shared.clone(), stop: self.stop.subscribe() }
    }

    /// What it did and how it stands.
    pub fn stats(&self) -> AdoptedStats {
        let mut stats = self.shared.stats().clone();
        let destinations = self.shared.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        stats.destinations = destinations.iter().map(|(name, d)| (name.clone(), d.stats())).collect();
        stats
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Connections to the database that it opens at most.
    pub fn connections(&self) -> u32 {
        self.shared.store.connections()
    }

    /// Stops claiming rows, waits for those in flight, writes back what came of them, gives up claims on others. After `grace`
    /// what is left is abandoned: its claims end with their lease.
    pub async fn shutdown(mut self, grace: Duration) {
        self.stop.send_replace(true);
        let Some(mut task) = self.task.take() else { return };
        let shared = self.shared.clone();
        let all = async {
            // The loops, and then the runs that somebody else has asked for.
            let _ = (&mut task).await;
            drop(shared.passes.write().await);
            join_all(shared.directory.transports.values().map(|t| t.close())).await;
        };
        if tokio::time::timeout(grace, all).await.is_err() {
            tracing::warn!(
                source = self.shared.name,
                ?grace,
                "shutdown deadline passed; claims that are left end with their lease"
            );
            task.abort();
        }
    }
}

impl Drop for AdoptedRelay {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

fn add(counts: &mut RunCounts, more: RunCounts) {
    counts.messages += more.messages;
    counts.delivered += more.delivered;
    counts.retried += more.retried;
    counts.failed += more.failed;
}

/// Each instance begins with another table, so that they don't meet at the same rows.
fn in_turn(mut sources: Vec<Arc<Source>>, owner: &str) -> Vec<Arc<Source>> {
    if !sources.is_empty() {
        let first = owner.bytes().fold(7usize, |h, b| h.wrapping_mul(31).wrapping_add(b.into())) % sources.len();
        sources.rotate_left(first);
    }
    sources
}

/// True once one of two signals is, or its sender is gone.
#[derive(Debug)]
struct Stop {
    seen: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Stop {
    fn of(mut one: watch::Receiver<bool>, mut other: watch::Receiver<bool>) -> Self {
        let (told, seen) = watch::channel(*one.borrow() || *other.borrow());
        let task = tokio::spawn(async move {
            tokio::select! {
                () = until_true(&mut one) => {}
                () = until_true(&mut other) => {}
            }
            told.send_replace(true);
            // The receivers see the last value.
        });
        Self { seen, task }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Ends when the signal is true, or its sender is gone.
async fn until_true(signal: &mut watch::Receiver<bool>) {
    let _ = signal.wait_for(|on| *on).await;
}

/// A loop per table, and one that looks for new tables.
async fn supervise(shared: Arc<Shared>, stop: watch::Receiver<bool>, continuous: bool) {
    let mut loops: JoinSet<()> = JoinSet::new();
    let mut running: BTreeMap<String, watch::Sender<bool>> = BTreeMap::new();
    let mut wait = Duration::from_millis(200);
    let mut stopped = stop.clone();
    let mut known = !shared.sources().is_empty();
    loop {
        if !known {
            match shared.discover().await {
                Ok(()) => known = true,
                Err(e) => {
                    shared.failed(None, &e);
                    tracing::warn!(source = shared.name, error = %e, again_in = ?wait, "adopted tables can't be looked up");
                }
            }
        }
        let sources = in_turn(shared.sources(), &shared.owner);
        running.retain(|name, _| sources.iter().any(|s| s.name == *name));
        if continuous {
            for source in &sources {
                if !running.contains_key(&source.name) {
                    let (end, ended) = watch::channel(false);
                    running.insert(source.name.clone(), end);
                    loops.spawn(scan(shared.clone(), source.name.clone(), stop.clone(), ended));
                }
            }
        }
        let pause = if known { LOOK_AGAIN } else { wait };
        wait = if known { Duration::from_millis(200) } else { (wait * 2).min(Duration::from_secs(30)) };
        let due = tokio::time::sleep(pause);
        tokio::pin!(due);
        loop {
            tokio::select! {
                () = until_true(&mut stopped) => {
                    while loops.join_next().await.is_some() {}
                    return;
                }
                () = &mut due => break,
                Some(ended) = loops.join_next(), if !loops.is_empty() => {
                    if let Err(e) = ended && e.is_panic() {
                        shared.stats().restarts += 1;
                        tracing::error!(source = shared.name, error = %e, "the loop of a table panicked; it starts again");
                        // Which one is not known: all that ended are started again.
                        running.retain(|_, end| !end.is_closed());
                    }
                }
            }
        }
        // New tables, and how many rows are left.
        known = false;
        if !continuous {
            for source in shared.sources() {
                shared.count(&source).await;
            }
        }
    }
}

/// Scans one table again and again.
async fn scan(shared: Arc<Shared>, table: String, stop: watch::Receiver<bool>, mut ended: watch::Receiver<bool>) {
    let mut stopped = stop.clone();
    let mut failures = 0u32;
    let mut counted: Option<Instant> = None;
    let interval = shared.mapping.interval();
    loop {
        // As the catalogue described it last.
        let Some(source) = shared.sources().into_iter().find(|s| s.name == table) else { return };
        let wait = match shared.pass(&source, &Budget::new(None), &stop).await {
            Ok(counts) => {
                failures = 0;
                if counted.is_none_or(|at| at.elapsed() > LOOK_AGAIN / 2) {
                    shared.count(&source).await;
                    counted = Some(Instant::now());
                }
                // What was done makes room for more, or lets the next of a key go.
                if counts.delivered > 0 { Duration::ZERO } else { interval.mul_f64(0.75 + 0.5 * fastrand::f64()) }
            }
            Err(e) => {
                failures += 1;
                let wait = (Duration::from_millis(100) * 2u32.pow(failures.min(8))).min(Duration::from_secs(20));
                tracing::warn!(source = shared.name, table, error = %e, again_in = ?wait, "a scan failed");
                wait.mul_f64(0.75 + 0.5 * fastrand::f64())
            }
        };
        tokio::select! {
            () = until_true(&mut stopped) => return,
            // The table is gone.
            _ = ended.changed() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}
