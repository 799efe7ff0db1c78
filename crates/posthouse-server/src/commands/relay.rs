//! `posthouse relay`: relays for all databases, and the HTTP server beside them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use posthouse::retention::Retention;
use posthouse::{AdoptedRelayBuilder, Relay, RelayBuilder};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{groups, load};
use crate::alerts::Alerts;
use crate::cli::{Global, RelayArgs};
use crate::config::{Config, among, redact_url};
use crate::dashboard::Sampler;
use crate::database::Database;
use crate::depth::Watching;
use crate::failure::Failure;
use crate::http::{Served, ServedAdopted, Server};
use crate::output::{self, clean, count};

pub(crate) async fn run(global: &Global, args: RelayArgs) -> Result<(), Failure> {
    let config = load(global)?;
    if args.print_config {
        if global.json {
            output::json(&config.shown());
        } else {
            output::say(config.shown_toml().trim_end());
        }
        return Ok(());
    }
    let databases =
        config.sources().iter().map(|(name, d)| Database::open(name, d).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
    if args.check {
        return check(global, &config, &databases).await;
    }
    serve(&Arc::new(config), &databases, args.drain).await
}

/// A relay with its transports and routes. Each has transports of its own, so that no database waits for another.
fn builder(config: &Config, database: &Database) -> Result<RelayBuilder, Failure> {
    let mut builder = database.relay().settings(config.relay.clone());
    for (name, settings) in &config.transports {
        builder = settings.add_to(name, builder).map_err(|e| Failure::of(&format!("transport {name:?}"), &e))?;
    }
    for (name, route) in &config.routes {
        builder = builder.route(name, route.clone());
    }
    for group in config.groups_of(&database.name) {
        builder = builder.group(group);
    }
    Ok(builder)
}

/// A mapping of adopted tables in a database.
struct Scanned<'d> {
    /// Where claims are kept.
    database: &'d Database,
    name: String,
    /// The group in whose runs it is scanned. None: all the time.
    group: Option<String>,
    builder: AdoptedRelayBuilder,
}

/// The scans of adopted tables: each mapping in each of its databases. Of a database with several sets of Posthouse's own tables
/// the first one keeps the claims.
fn adopted<'d>(config: &Config, databases: &'d [Arc<Database>]) -> Result<Vec<Scanned<'d>>, Failure> {
    let mut out = Vec::new();
    for (name, mapping) in &config.adopted {
        for database in config.databases.keys().filter(|d| among(&mapping.databases, d)) {
            let source = config.source_of_adopted(database);
            let Some(place) = databases.iter().find(|d| Some(&d.name) == source.as_ref()) else { continue };
            let group = config.group_of_adopted(database, name).map(|g| g.name.clone());
            let mut builder = place.adopted(name, mapping).settings(config.relay.clone()).continuous(group.is_none());
            for (transport, settings) in &config.transports {
                let built = settings.build().map_err(|e| Failure::of(&format!("transport {transport:?}"), &e))?;
                builder = builder.transport(transport, built);
            }
            for (destination, route) in &config.routes {
                builder = builder.route(destination, route.clone());
            }
            out.push(Scanned { database: place, name: name.clone(), group, builder });
        }
    }
    Ok(out)
}

async fn serve(config: &Arc<Config>, databases: &[Arc<Database>], drain: Duration) -> Result<(), Failure> {
    // Installed first, so that a signal during the start is not lost.
    let mut signals = Signals::new()?;
    let builders = databases.iter().map(|d| builder(config, d)).collect::<Result<Vec<_>, _>>()?;
    let takers = databases.iter().filter_map(|d| d.retention().transpose()).collect::<Result<Vec<_>, _>>()?;
    let adopted = adopted(config, databases)?;
    let scans = adopted.iter().map(|s| Arc::new(ServedAdopted::new(&s.database.name, &s.name))).collect();
    let served = Arc::new(Served::new(config, databases, scans, true));
    let server = Server::start(&served).await?;
    let watching = Watching::start(config, &served)?;
    #[cfg(feature = "otlp")]
    let otlp = crate::metrics::Otlp::start(&served)?;

    let alerts = Alerts::start(config, &served)?;
    let sampler = Sampler::start(&served);

    let mut executor = Executor::none();
    let mut retention = Vec::new();
    let started = async {
        start(databases, builders, adopted, &served).await?;
        executor = Executor::start(config, &served).await?;
        retention = keep_out(takers);
        Ok(())
    };
    let result = tokio::select! {
        started = started => match started {
            Ok(()) => {
                signals.next().await;
                Ok(())
            }
            Err(failure) => Err(failure),
        },
        () = signals.next() => Ok(()),
    };
    served.draining.store(true, Ordering::Relaxed);
    for task in retention {
        // It can be cut off anywhere; what ends it is no news.
        task.abort();
        let _ = task.await;
    }
    if served.databases.iter().any(|d| d.is_running()) {
        tracing::info!(deadline = ?drain, "stopping: what is in flight is finished; a second signal stops at once");
    }
    tokio::select! {
        () = stop(&served, executor, drain) => {}
        () = signals.next() => {
            return Err(Failure::not_so("stopped at once; what was in flight stays pending and is sent again"));
        }
    }
    #[cfg(feature = "otlp")]
    if let Some(otlp) = otlp {
        otlp.stop().await;
    }
    sampler.stop().await;
    alerts.stop().await;
    watching.stop().await;
    server.stop().await;
    if result.is_ok() {
        tracing::info!("stopped");
    }
    result
}

/// Takes old rows out of each database, now and then.
fn keep_out(takers: Vec<Retention>) -> Vec<JoinHandle<()>> {
    takers.into_iter().map(|retention| tokio::spawn(async move { retention.repeat().await })).collect()
}

/// Stops everything that sends.
async fn stop(served: &Served, executor: Executor, drain: Duration) {
    let deadline = Instant::now() + drain;
    // Its runs are runs of the relays.
    executor.end_runs(deadline).await;
    let relays: Vec<Relay> = served.databases.iter().filter_map(|d| d.take()).collect();
    let scans: Vec<_> = served.adopted.iter().filter_map(|a| a.take()).collect();
    let left = deadline.saturating_duration_since(Instant::now());
    tokio::join!(
        futures_util::future::join_all(relays.into_iter().map(|r| r.shutdown(left))),
        futures_util::future::join_all(scans.into_iter().map(|s| s.shutdown(left))),
        executor.shutdown()
    );
}

/// The executor for an XXL-JOB admin, where there is one.
#[cfg(feature = "xxl-job")]
struct Executor(Option<crate::xxl_job::XxlJob>);

#[cfg(feature = "xxl-job")]
impl Executor {
    fn none() -> Self {
        Self(None)
    }

    async fn start(config: &Config, served: &Arc<Served>) -> Result<Self, Failure> {
        let Some(settings) = &config.xxl_job else { return Ok(Self(None)) };
        let scans = Arc::new(crate::xxl_job::Relays::new(config, served.clone()));
        crate::xxl_job::XxlJob::start(settings, scans).await.map(|started| Self(Some(started)))
    }

    async fn end_runs(&self, deadline: Instant) {
        if let Some(executor) = &self.0 {
            executor.end_runs(deadline).await;
        }
    }

    async fn shutdown(self) {
        if let Some(executor) = self.0 {
            executor.shutdown().await;
        }
    }
}

#[cfg(not(feature = "xxl-job"))]
struct Executor;

#[cfg(not(feature = "xxl-job"))]
impl Executor {
    fn none() -> Self {
        Self
    }

    async fn start(_: &Config, _: &Arc<Served>) -> Result<Self, Failure> {
        Ok(Self)
    }

    async fn end_runs(&self, _: Instant) {}

    async fn shutdown(self) {}
}

/// Starts all side by side: one whose database is slow or down doesn't hold up the others.
async fn start(
    databases: &[Arc<Database>],
    builders: Vec<RelayBuilder>,
    adopted: Vec<Scanned<'_>>,
    served: &Served,
) -> Result<(), Failure> {
    let mut scanned: HashMap<&str, Vec<(Scanned<'_>, &Arc<ServedAdopted>)>> = HashMap::new();
    for (scan, place) in adopted.into_iter().zip(&served.adopted) {
        scanned.entry(&scan.database.name).or_default().push((scan, place));
    }
    let starting = databases.iter().zip(builders).zip(&served.databases).map(|((database, mut builder), place)| {
        let scanned = scanned.remove(database.name.as_str()).unwrap_or_default();
        async move {
            let scans = scanned.into_iter().map(|(scan, place)| async move {
                let relay = scan.builder.start().await.map_err(|e| database.failure(&e))?;
                let scans = relay.scans();
                place.started(relay);
                tracing::info!(database = database.name, adopted = scan.name, group = scan.group, "adopted tables are scanned");
                Ok::<_, Failure>((scan.group, scans))
            });
            // A group's runs begin with its relay.
            for started in futures_util::future::join_all(scans).await {
                if let (Some(group), scans) = started? {
                    builder = builder.scan(group, scans);
                }
            }
            let relay = builder.start().await.map_err(|e| database.failure(&e))?;
            place.started(relay);
            tracing::info!(database = database.name, url = database.shown, "relay started");
            Ok(())
        }
    });
    let failures = futures_util::future::join_all(starting).await.into_iter().filter_map(Result::err);
    failures.reduce(Failure::and).map_or(Ok(()), Err)
}

/// SIGINT and SIGTERM, each time they come.
pub(super) struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    pub(super) fn new() -> Result<Self, Failure> {
        use tokio::signal::unix::{SignalKind, signal};
        let told = |e: std::io::Error| Failure::not_so(format!("signals can't be received: {e}"));
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(told)?,
            interrupt: signal(SignalKind::interrupt()).map_err(told)?,
        })
    }

    #[cfg(unix)]
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    #[cfg(not(unix))]
    pub(super) fn new() -> Result<Self, Failure> {
        Ok(Self {})
    }

    #[cfg(not(unix))]
    pub(super) async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn check(global: &Global, config: &Config, databases: &[Arc<Database>]) -> Result<(), Failure> {
    // Transports and channels are made as `relay` makes them, which finds what only the machine can tell (root certificates).
    crate::alerts::channels::Channels::new(&config.channels)?;
    for database in databases {
        drop(builder(config, database)?);
        drop(database.retention()?);
    }
    let answers = futures_util::future::join_all(databases.iter().map(|d| d.ready())).await;
    let mut told = Vec::new();
    let mut failure: Option<Failure> = None;
    for (database, answer) in databases.iter().zip(answers) {
        let mut line = json!({ "name": database.name, "url": database.shown, "connections": database.connections() });
        match answer {
            Ok((_, version, houses)) => {
                line["schema_version"] = version.into();
                line["houses"] = houses.into();
            }
            Err(e) => {
                line["error"] = e.text.clone().into();
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
            }
        }
        told.push(line);
    }
    let mut coverage = Vec::new();
    for Scanned { database, name, group, builder } in adopted(config, databases)? {
        let mut line = json!({ "name": name, "database": database.name, "group": group });
        match builder.check().await {
            Ok(found) => {
                line["connections"] = found.connections.into();
                line["tables"] = found.tables.into();
                line["gaps"] = found.gaps.into();
                line["differences"] = found.differences.into();
                line["missing_indexes"] = found.missing_indexes.into();
            }
            Err(e) => {
                let e = database.failure(&e);
                line["error"] = e.text.clone().into();
                failure = Some(match failure {
                    None => e,
                    Some(other) => other.and(e),
                });
            }
        }
        coverage.push(line);
    }
    if global.json {
        output::json(&json!({
            "ok": failure.is_none(), "adopted": coverage, "relay": config.shown()["relay"], "listen": config.server.listen,
            "databases": told, "groups": groups::planned(config), "routes": config.shown()["routes"], "transports": config.shown()["transports"],
            "xxl_job": config.shown()["xxl_job"], "brokers_checked": false,
        }));
    } else {
        checked(config, &told, &coverage, failure.is_none());
    }
    match failure {
        None => Ok(()),
        Some(failure) => Err(Failure { printed: true, ..failure }),
    }
}

fn checked(config: &Config, databases: &[Value], adopted: &[Value], good: bool) {
    let relay = &config.relay;
    let time = humantime::format_duration;
    output::say(&format!("configuration  {}", config.file.as_ref().map_or("(none)".into(), |f| f.display().to_string())));
    output::say(&format!("instance       {}", clean(relay.instance.as_deref().unwrap_or("(host name and process id)"))));
    output::say(&format!(
        "lease          {}, renewed every {}; a send may take {}",
        time(relay.lease),
        time(relay.heartbeat),
        time(relay.send_timeout)
    ));
    output::say(&format!("memory         {} of payloads, {} rows per read", output::bytes(relay.memory as i64), relay.batch));
    output::say(&format!("http           {}", config.server.listen));
    let executor = &config.shown()["xxl_job"];
    if let (Some(name), Some(listen), Some(admins)) =
        (executor["app_name"].as_str(), executor["listen"].as_str(), executor["admins"].as_array())
    {
        let admins: Vec<&str> = admins.iter().filter_map(Value::as_str).collect();
        output::say(&format!("xxl-job        executor {:?} on {listen}, for {}", clean(name), clean(&admins.join(", "))));
    }

    output::say("");
    let mut table = output::table(&["database", "url", "schema", "houses", "connections"]);
    for d in databases {
        let text = |key: &str| match &d[key] {
            Value::Null => "-".to_owned(),
            Value::String(text) => clean(text).into_owned(),
            other => other.to_string(),
        };
        table.add_row([text("name"), text("url"), text("schema_version"), text("houses"), text("connections")]);
    }
    output::print_table(table);

    for source in adopted {
        let list = |key: &str| -> Vec<String> {
            source[key].as_array().into_iter().flatten().filter_map(Value::as_str).map(|text| clean(text).into_owned()).collect()
        };
        let at = |key: &str| clean(source[key].as_str().unwrap_or("-")).into_owned();
        output::say(&format!("\nadopted {} in {}: {}", at("name"), at("database"), count(list("tables").len(), "table")));
        for (what, key) in [
            ("table", "tables"),
            ("missing in the numbering", "gaps"),
            ("columns differ", "differences"),
            ("no index fits, its owner should run", "missing_indexes"),
        ] {
            for text in list(key) {
                output::say(&format!("  {what}: {text}"));
            }
        }
    }

    output::say("");
    let mut table = output::table(&["transport", "kind", "addresses", "reaches"]);
    for (name, settings) in &config.transports {
        let (addresses, reaches) = (settings.addresses(name), settings.reaches());
        table.add_row([clean(name), settings.kind().into(), clean(&addresses), clean(&reaches)].map(|c| c.into_owned()));
    }
    output::print_table(table);
    if config.has_brokers() {
        output::say("brokers are not connected to by this check");
    }

    if !config.groups.is_empty() {
        output::say("");
        groups::print_plan(config);
    }

    output::say("");
    if config.routes.is_empty() {
        output::say("no routes: every destination must be an address");
    } else {
        let mut table = output::table(&["route", "to", "attempts", "waits", "order", "in flight"]);
        for (name, route) in &config.routes {
            let to = if route.to.is_empty() { name } else { &route.to };
            table.add_row([
                clean(name).into_owned(),
                clean(&redact_url(to)).into_owned(),
                route.retry.max_attempts.to_string(),
                format!("{} to {}", time(route.retry.base), time(route.retry.cap)),
                format!("{:?}", route.ordering).to_lowercase(),
                route.concurrency.map_or_else(|| "(transport)".into(), |n| n.to_string()),
            ]);
        }
        output::print_table(table);
    }
    if good {
        let relays: u64 = databases.iter().filter_map(|d| d["connections"].as_u64()).sum();
        let connections = relays + adopted.iter().filter_map(|a| a["connections"].as_u64()).sum::<u64>();
        output::say(&format!(
            "\nok: {} and {}; one instance uses {}",
            count(databases.len(), "database"),
            count(config.routes.len(), "route"),
            count(connections as usize, "connection")
        ));
    }
}
