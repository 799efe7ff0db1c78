//! The relay: reads pending messages, sends them, writes the outcome back.
//!
//! | file | what it does |
//! |---|---|
//! | `membership.rs` | keeps the lease, shares out houses |
//! | `coverage.rs` | houses that nobody sees to, and messages in them |
//! | `clock.rs` | the database's clock, by which latencies are told |
//! | `engine.rs` | the one loop that owns all state in memory; I/O runs in tasks of its own |
//! | `reading.rs` | which rows to read next |
//! | `ordering.rs` | which of them may go |
//! | `destination.rs` | limits, breaker and backlog of one destination |
//! | `dispatch.rs` | loading content, suspects, handing to transports |
//! | `outcome.rs` | what came of it, written back |
//! | `run.rs` | runs of groups that aren't continuous |
//! | `schedule.rs` | runs groups when their triggers are due |
//! | `stats.rs` | what can be seen from outside |
//! | `adopted/` | tables of other applications |

mod adopted;
mod clock;
mod coverage;
mod destination;
mod dispatch;
mod engine;
mod membership;
mod ordering;
mod outcome;
mod reading;
mod run;
mod schedule;
mod stats;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use crate::outbox::Wake;
use crate::store::{Backend, House, SCHEMA_VERSION, Store};
use crate::transport::local::{Local, LocalError};
use crate::transport::{Transport, scheme_of};
use crate::{Envelope, Error, ErrorKind, Group, Headers, Ordering, Outbox, RelaySettings, Route};

pub use adopted::{AdoptedCoverage, AdoptedRelay, AdoptedRelayBuilder, AdoptedScans, AdoptedStats, AdoptedTableStats};
pub use run::{Run, RunCounts, RunEnd, RunOutcome};
pub use schedule::RunReport;
pub use stats::{AttemptCounts, BreakerState, Connections, DestinationStats, GroupStats, LastRun, RelayStats, Uncovered};

/// Routes and transports: where a destination name leads.
#[derive(Debug)]
pub(crate) struct Directory {
    routes: HashMap<String, Arc<Route>>,
    fallback: Route,
    transports: HashMap<String, Arc<dyn Transport>>,
}

impl Directory {
    /// The route of a destination name. A name without one is taken as an address; whether there is a transport for it shows when it is sent.
    fn route(&self, destination: &str) -> Arc<Route> {
        match self.routes.get(destination) {
            Some(route) => route.clone(),
            None => Arc::new(Route { to: destination.to_owned(), ..self.fallback.clone() }),
        }
    }

    fn transport(&self, to: &str) -> Option<&Arc<dyn Transport>> {
        let scheme = match scheme_of(to) {
            "https" => "http",
            other => other,
        };
        self.transports.get(scheme)
    }

    /// The names of some transports, for people.
    fn names(&self, which: impl Fn(&dyn Transport) -> bool) -> String {
        let mut names: Vec<_> = self.transports.iter().filter(|(_, t)| which(t.as_ref())).map(|(n, _)| n.as_str()).collect();
        names.sort_unstable();
        names.join(", ")
    }
}

/// Builds a [`Relay`] that runs inside this process.
///
/// ```no_run
/// # async fn f(pool: sqlx::SqlitePool) -> Result<(), posthouse::Error> {
/// use posthouse::{Outbox, Relay};
///
/// let outbox = Outbox::new(pool);
/// outbox.migrate().await?;
/// let relay = Relay::builder(&outbox)
///     .local("send-email", |mail: serde_json::Value| async move {
///         println!("sending {mail}");
///         Ok::<_, std::io::Error>(())
///     })
///     .start()
///     .await?;
/// // … serve requests …
/// relay.shutdown(std::time::Duration::from_secs(30)).await;
/// # Ok(()) }
/// ```
#[must_use = "a relay runs only after start()"]
pub struct RelayBuilder {
    store: StoreMaker,
    wake: Arc<Wake>,
    settings: RelaySettings,
    routes: HashMap<String, Route>,
    transports: HashMap<String, Arc<dyn Transport>>,
    local: Local,
    expected_houses: Option<u16>,
    groups: Vec<Group>,
    scans: Vec<(String, AdoptedScans)>,
    trace: Option<Trace>,
}

/// Makes the span of a send.
#[derive(Clone)]
pub(crate) struct Trace(Arc<dyn Fn(&mut Headers) -> tracing::Span + Send + Sync>);

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").finish_non_exhaustive()
    }
}

type StoreMaker = Box<dyn FnOnce(Duration) -> Arc<dyn Store> + Send>;

impl fmt::Debug for RelayBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayBuilder")
            .field("settings", &self.settings)
            .field("routes", &self.routes)
            .field("transports", &self.transports)
            .finish_non_exhaustive()
    }
}

impl RelayBuilder {
    /// Replaces all settings.
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

    /// Handles `local:{name}` with a function that takes the payload, decoded from JSON.
    /// A payload that can't be decoded is FAILED at once; an error means "try again"
    /// (see [`LocalError`](crate::transport::LocalError) for other answers).
    pub fn local<M, F, Fut, E>(mut self, name: impl Into<String>, handler: F) -> Self
    where
        M: DeserializeOwned,
        F: Fn(M) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<LocalError> + 'static,
    {
        self.local.on(name.into(), handler);
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

    /// Makes the span of each send out of the message's headers, and may put that span's context into the headers that are sent.
    /// The span lasts until the receiver has answered. Without it, the receiver continues the trace at whoever published.
    ///
    /// With the crates `opentelemetry` and `tracing-opentelemetry`:
    ///
    /// ```no_run
    /// # #[cfg(feature = "sqlite")]
    /// # fn f(outbox: posthouse::Outbox<sqlx::Sqlite>) {
    /// use opentelemetry::propagation::{Extractor, Injector};
    /// use posthouse::{Headers, Relay};
    /// use tracing_opentelemetry::OpenTelemetrySpanExt;
    ///
    /// struct Carrier<'a>(&'a mut Headers);
    /// impl Extractor for Carrier<'_> {
    ///     fn get(&self, key: &str) -> Option<&str> {
    ///         self.0.get(key)
    ///     }
    ///     fn keys(&self) -> Vec<&str> {
    ///         self.0.iter().map(|(name, _)| name).collect()
    ///     }
    /// }
    /// impl Injector for Carrier<'_> {
    ///     fn set(&mut self, key: &str, value: String) {
    ///         self.0.insert(key, value);
    ///     }
    /// }
    ///
    /// let relay = Relay::builder(&outbox).trace_context(|headers| {
    ///     let mut carrier = Carrier(headers);
    ///     opentelemetry::global::get_text_map_propagator(|p| {
    ///         let span = tracing::info_span!("send");
    ///         let _ = span.set_parent(p.extract(&carrier));
    ///         p.inject_context(&span.context(), &mut carrier);
    ///         span
    ///     })
    /// });
    /// # let _ = relay; }
    /// # fn main() {}
    /// ```
    pub fn trace_context(mut self, make: impl Fn(&mut Headers) -> tracing::Span + Send + Sync + 'static) -> Self {
        self.trace = Some(Trace(Arc::new(make)));
        self
    }

    /// Refuses to start when the database has another number of houses.
    pub fn expect_houses(mut self, houses: u16) -> Self {
        self.expected_houses = Some(houses);
        self
    }

    /// Adds a group of houses. The instance takes the houses of its groups and no others; without any group it takes all, and
    /// sends from them all the time. What a group says about databases and tables is not looked at here: a relay works on one.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # fn f(outbox: posthouse::Outbox<sqlx::Sqlite>) -> Result<(), String> {
    /// use posthouse::{Group, Relay, Trigger};
    ///
    /// let relay = Relay::builder(&outbox)
    ///     .group(Group::new("orders").houses("0-47")?)
    ///     .group(Group::new("reports").houses("48-63")?.trigger(Trigger::Manual).limit(500));
    /// # let _ = relay; Ok(()) }
    /// ```
    pub fn group(mut self, group: Group) -> Self {
        self.groups.push(group);
        self
    }

    /// Scans adopted tables in the runs of a group that isn't continuous: beside its houses, or instead of them where it has none.
    /// Each instance that has the group scans them in its runs; a row belongs to whoever claims it. A run's limit holds for the
    /// houses together and for each mapping.
    pub fn scan(mut self, group: impl Into<String>, tables: AdoptedScans) -> Self {
        self.scans.push((group.into(), tables));
        self
    }

    /// Checks settings, routes and tables, and starts. A database that can't be reached now is tried again in the background;
    /// missing tables and settings that can't hold are errors.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem; [`Error::Schema`].
    pub async fn start(self) -> Result<Relay, Error> {
        let Self { store, wake, settings, routes, mut transports, local, expected_houses, mut groups, scans, trace } = self;
        transports.entry("local".into()).or_insert_with(|| Arc::new(local));
        let mut problems = settings.problems();
        for group in &mut groups {
            group.databases.clear();
            group.tables.clear();
        }
        problems.extend(Group::problems_of(&groups));
        // With adopted tables a group needs no houses.
        let scanning = |name: &str| scans.iter().any(|(group, _)| group == name);
        for group in groups.iter().filter(|g| g.houses.is_empty() && scanning(&g.name)) {
            let path = format!("groups.{:?}.houses", group.name);
            problems.retain(|(field, _)| *field != path);
        }
        for (name, tables) in &scans {
            if !groups.iter().any(|g| g.name == *name && !g.is_continuous()) {
                let why = format!("no group {name:?} has runs in which {:?} could be scanned", tables.name());
                problems.push((format!("groups.{name:?}.tables"), why));
            }
        }
        let directory = directory(routes, &settings, transports, &mut problems);
        told(problems)?;
        let store = store(settings.database_timeout);
        match store.check().await {
            Ok((version, _)) if version < SCHEMA_VERSION => {
                return Err(Error::Schema(format!(
                    "the tables are of version {version}, and this program needs version {SCHEMA_VERSION}; run `posthouse migrate`, or \
                     call posthouse::migrate: instances of the version before go on working"
                )));
            }
            Ok((_, houses)) => {
                let mut problems = houses_missing(&groups, houses);
                if let Some(expected) = expected_houses
                    && expected != houses
                {
                    problems.push(format!(
                        "houses: the configuration says {expected}, the database has {houses}; they are set once, at the first migration. \
                         Change the configuration, or run `posthouse houses resize {expected}`"
                    ));
                }
                if !problems.is_empty() {
                    return Err(Error::Config(problems.join("\n")));
                }
            }
            Err(e) if e.kind() == ErrorKind::Unavailable => {
                tracing::warn!(error = %e, "the database can't be reached; the relay starts and keeps trying");
            }
            Err(e) => return Err(e),
        }
        let (stats, covered, owned) = (Mutex::default(), watch::Sender::new(None), watch::Sender::new(None));
        let clock = watch::Sender::new(None);
        let shared = Arc::new(Shared { store, wake, settings, directory, groups, scans, owned, trace, stats, clock, covered });
        let (commands, inbox) = mpsc::unbounded_channel();
        let (asks, asked) = mpsc::unbounded_channel();
        let (stop, stopped) = watch::channel(false);
        let told = Told {
            commands: Arc::new(tokio::sync::Mutex::new(inbox)),
            engine: commands.clone(),
            asked: Arc::new(tokio::sync::Mutex::new(asked)),
            stop: stopped,
        };
        let task = tokio::spawn(supervise(shared.clone(), told));
        Ok(Relay { shared, commands, asks, stop, task: Some(task) })
    }
}

/// Where destinations lead; what is wrong with that is added to the problems.
fn directory(
    routes: HashMap<String, Route>,
    settings: &RelaySettings,
    transports: HashMap<String, Arc<dyn Transport>>,
    problems: &mut Vec<(String, String)>,
) -> Directory {
    for (name, route) in &routes {
        problems.extend(route.problems().into_iter().map(|(field, why)| (format!("routes.{name:?}.{field}"), why)));
    }
    let routes: HashMap<_, _> = routes
        .into_iter()
        .map(|(name, mut route)| {
            if route.to.is_empty() {
                route.to = name.clone();
            }
            (name, Arc::new(route))
        })
        .collect();
    let directory = Directory { routes, fallback: settings.default_route.clone(), transports };
    for (name, route) in &directory.routes {
        let Some(transport) = directory.transport(&route.to) else {
            let known = directory.names(|_| true);
            problems.push((format!("routes.{name:?}.to"), format!("{:?} names no transport; there are {known}", route.to)));
            continue;
        };
        if let Err(why) = transport.check(route) {
            problems.push((format!("routes.{name:?}"), why));
        }
        if route.ordering == Ordering::Pipelined && !transport.pipelines() {
            let why = match directory.names(|t| t.pipelines()) {
                none if none.is_empty() => String::new(),
                able => format!(", or send to one of the transports that can: {able}"),
            };
            let why = format!("pipelined needs a transport that lets no message overtake a failed one; write strict{why}");
            problems.push((format!("routes.{name:?}.ordering"), why));
        }
    }
    directory
}

/// All problems at once.
fn told(mut problems: Vec<(String, String)>) -> Result<(), Error> {
    if !problems.is_empty() {
        problems.sort();
        let text: Vec<_> = problems.into_iter().map(|(field, why)| format!("{field}: {why}")).collect();
        return Err(Error::Config(text.join("\n")));
    }
    Ok(())
}

/// The groups with houses that the database doesn't have, one line each.
fn houses_missing(groups: &[Group], houses: u16) -> Vec<String> {
    let high = groups.iter().filter_map(|g| Some((g, g.houses.highest().filter(|highest| *highest >= houses)?)));
    high.map(|(group, highest)| {
        format!(
            "groups.{:?}.houses: {} go up to {highest}, and the database has the houses 0 to {}; change the group, or the number \
             of houses with `posthouse houses resize {}`",
            group.name,
            group.houses,
            houses.saturating_sub(1),
            u32::from(highest) + 1,
        )
    })
    .collect()
}

/// What the loops of one relay share.
#[derive(Debug)]
pub(crate) struct Shared {
    store: Arc<dyn Store>,
    wake: Arc<Wake>,
    settings: RelaySettings,
    directory: Directory,
    /// None: all houses, all the time.
    groups: Vec<Group>,
    /// Adopted tables, and the group in whose runs they are scanned.
    scans: Vec<(String, AdoptedScans)>,
    /// The houses of this instance, without those that it is giving away. None while it has no lease.
    owned: watch::Sender<Option<HashSet<House>>>,
    trace: Option<Trace>,
    stats: Mutex<RelayStats>,
    /// The database's clock, as renewals read it.
    clock: watch::Sender<Option<clock::Clock>>,
    /// The coverage that the last renewal told.
    covered: watch::Sender<Option<coverage::Covered>>,
}

impl Shared {
    fn stats(&self) -> std::sync::MutexGuard<'_, RelayStats> {
        // Nothing panics while it is held; half-updated figures would be harmless too.
        self.stats.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// What a [`Relay`] asks of its engine.
#[derive(Debug)]
pub(crate) enum Command {
    /// Answer when everything that is due now has been sent and written back.
    Drain(oneshot::Sender<()>),
    /// Run a group once.
    Run(Run, oneshot::Sender<RunOutcome>),
    /// A continuous group is paused, or not.
    Pause(String, bool),
}

/// How the loops are told what to do.
#[derive(Debug, Clone)]
struct Told {
    commands: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Command>>>,
    /// The other end of `commands`.
    engine: mpsc::UnboundedSender<Command>,
    asked: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<schedule::Asked>>>,
    stop: watch::Receiver<bool>,
}

/// A running relay. Dropping it stops everything at once; [`shutdown`](Self::shutdown) drains first.
pub struct Relay {
    shared: Arc<Shared>,
    commands: mpsc::UnboundedSender<Command>,
    asks: mpsc::UnboundedSender<schedule::Asked>,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").field("store", &self.shared.store.kind()).finish_non_exhaustive()
    }
}

impl Relay {
    /// A relay for the messages of `outbox`; commits through this outbox (and its clones) wake it at once.
    pub fn builder<DB: Backend>(outbox: &Outbox<DB>) -> RelayBuilder {
        let (pool, tables) = (outbox.pool().clone(), outbox.tables().clone());
        RelayBuilder {
            store: Box::new(move |deadline| DB::store(&pool, &tables, deadline, None)),
            wake: outbox.wake(),
            settings: RelaySettings::default(),
            routes: HashMap::new(),
            transports: HashMap::new(),
            local: Local::default(),
            expected_houses: None,
            groups: Vec::new(),
            scans: Vec::new(),
            trace: None,
        }
    }

    /// What the relay did and how it stands.
    pub fn stats(&self) -> RelayStats {
        let mut stats = self.shared.stats().clone();
        let store = &self.shared.store;
        let (open, idle) = store.open();
        stats.connections = Connections { most: store.connections(), open, idle };
        stats
    }

    /// The store it works on, for lists and operator actions.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.shared.store
    }

    /// Resolves when every message that was due has been sent (or has failed) and the outcome is written.
    /// Messages that wait for a retry, or whose destination is down, are left; so are those of houses that other instances own.
    /// An instance to which no house falls has nothing to do, and resolves as soon as it knows that. Meant for tests and one-shot runs.
    pub async fn drain_once(&self) {
        let (done, wait) = oneshot::channel();
        // The engine is gone only after shutdown, when there is nothing to wait for.
        if self.commands.send(Command::Drain(done)).is_ok() {
            let _ = wait.await;
        }
    }

    /// Stops taking messages, waits for those in flight, writes their outcomes, gives the houses back.
    /// After `deadline` what is left is abandoned: it stays pending and is sent again by whoever takes the houses.
    pub async fn shutdown(mut self, deadline: Duration) {
        self.stop.send_replace(true);
        let Some(mut task) = self.task.take() else { return };
        if tokio::time::timeout(deadline, &mut task).await.is_err() {
            tracing::warn!(?deadline, "shutdown deadline passed; what is in flight stays pending and will be sent again");
            task.abort();
            // Resolves at once: an aborted task is dropped at its next await.
            let _ = task.await;
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Runs the relay's loops until shutdown; if one ends in a panic, all are started anew, with back-off, under a new lease.
async fn supervise(shared: Arc<Shared>, told: Told) {
    let mut wait = Duration::from_millis(100);
    loop {
        let mut set = tokio::task::JoinSet::new();
        set.spawn(run_once(shared.clone(), told.clone()));
        match set.join_next().await {
            Some(Ok(())) | None => return,
            Some(Err(e)) => {
                shared.stats().restarts += 1;
                tracing::error!(error = %e, again_in = ?wait, "a loop of the relay panicked; all its loops start again");
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_secs(30));
            }
        }
    }
}

/// One life of the loops: membership, engine, schedule, upkeep, listener. Ends when the engine has drained after `stop`.
async fn run_once(shared: Arc<Shared>, Told { commands, engine, asked, stop }: Told) {
    let (to_engine, from_membership) = mpsc::unbounded_channel();
    let (to_membership, from_engine) = mpsc::unbounded_channel();
    let (lease, lease_seen) = watch::channel(None);
    let mut commands = commands.lock().await;
    shared.owned.send_replace(None);
    // Owned here: dropping this future (abort, panic of one) ends them all.
    let mut others = tokio::task::JoinSet::new();
    // Those that have something to do after the engine.
    let mut awaited = vec![membership::NAME];
    others.spawn(membership::run(shared.clone(), to_engine, from_engine, lease));
    others.spawn(upkeep(shared.clone()));
    others.spawn(coverage::orphans(shared.clone()));
    others.spawn(listen(shared.clone()));
    if !shared.groups.is_empty() {
        awaited.push(schedule::NAME);
        others.spawn(schedule::run(shared.clone(), engine, asked, stop.clone()));
    }
    let engine = engine::run(shared.clone(), from_membership, to_membership, lease_seen, &mut commands, stop);
    tokio::pin!(engine);
    loop {
        tokio::select! {
            () = &mut engine => break,
            Some(ended) = others.join_next() => match ended {
                Ok(name) => awaited.retain(|other| *other != name),
                Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                Err(_) => {}
            }
        }
    }
    // The engine has told the membership to leave, and what came of runs; give them the chance.
    while !awaited.is_empty() {
        let Some(Ok(name)) = others.join_next().await else { break };
        awaited.retain(|other| *other != name);
    }
}

/// Partitions ahead, and other upkeep of the store.
async fn upkeep(shared: Arc<Shared>) -> &'static str {
    const PERIOD: Duration = Duration::from_secs(60);
    const WARN_BELOW: u32 = 8;
    loop {
        let wait = match shared.store.upkeep().await {
            Ok(done) => {
                if let Some(ahead) = done.ahead
                    && ahead < WARN_BELOW
                {
                    tracing::warn!(
                        ahead,
                        "few partitions of the message log are ready ahead; publishing fails when they run out"
                    );
                }
                let mut stats = shared.stats();
                stats.partitions_ahead = done.ahead;
                if stats.problems != done.problems {
                    for problem in &done.problems {
                        tracing::error!("{problem}");
                    }
                    stats.problems = done.problems;
                }
                stats.pass("upkeep");
                PERIOD
            }
            Err(e) => {
                tracing::warn!(error = %e, "upkeep failed, will be tried again");
                Duration::from_secs(5)
            }
        };
        tokio::time::sleep(wait).await;
    }
}

/// Wakes the engine when another process published.
async fn listen(shared: Arc<Shared>) -> &'static str {
    let heard = || {
        shared.wake.committed();
    };
    let mut wait = Duration::from_millis(100);
    loop {
        let started = std::time::Instant::now();
        if let Err(e) = shared.store.listen(&heard).await {
            tracing::debug!(error = %e, "not listening for notifications; polling goes on");
        }
        if started.elapsed() > Duration::from_secs(60) {
            wait = Duration::from_millis(100);
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(Duration::from_secs(10));
    }
}
