//! Posthouse and other ways of doing what it does, side by side.

mod arrivals;
mod debezium;
mod driver;
mod footprint;
mod install;
mod logical;
mod ours;
mod skip_locked;

use std::time::{Duration, Instant};

use clap::ValueEnum;
use tokio::process::Command;

use self::arrivals::Arrivals;
use self::driver::{Config, Driver};
use self::footprint::{Counts, Server, cpu};
use self::install::{Installed, install};
use self::logical::Logical;
pub(crate) use self::ours::serve;
use crate::PeersArgs;
use crate::database::{HOW_TO_SET, Kind, fresh_name};
use crate::latency::percentile;
use crate::report::{About, Figure, Report, Row, median};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
Posthouse, the plain loop with a status column and SKIP LOCKED, graphile-worker, pg-boss, River, gruelbox's transaction-outbox,
namastack-outbox and Debezium Server, one after the other, on the same PostgreSQL and the same RabbitMQ, each in a fresh database
and to a fresh durable queue, each message persistent and confirmed. Each is driven by a small program of ours, through its public
API, in its own language, at the settings its documentation recommends for throughput (docs/peers.md says which and why):

  alone, with    a transaction of one business row, without and with a message, on one connection, in turn, in blocks (µs)
  WAL            bytes of write-ahead log for adding a message, and for delivering it
  drain          a backlog of N messages is there, the sender starts: messages/s from the first tenth to the last, all in the
                 queue and their confirms seen by the sender; CPU of the sender and of the database, in seconds per 1 000
  sustained      messages/s while publishers write as fast as they can and the sender sends, until all are confirmed
  p50 p95 p99    ms from when a publish should have begun to a consumer's getting the message, at half the sustained rate, and
                 the same from the commit (0 if the message was quicker than the commit's answer)
  idle           statements (or transactions) per second, and CPU of sender and database, in percent of a core, when there is
                 nothing to do

Foreign peers are installed into target/peers at first use, at pinned versions. One that can't be had is skipped, with the
reason. Publishers and sender of a peer are one process (Debezium Server is a second one).";

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Name {
    Posthouse,
    /// The plain loop.
    SkipLocked,
    GraphileWorker,
    PgBoss,
    River,
    Gruelbox,
    Namastack,
    Debezium,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl Name {
    /// Its failure is a failure of the bench.
    fn is_own(self) -> bool {
        matches!(self, Name::Posthouse | Name::SkipLocked)
    }

    /// What it promises beyond the figures, as [`GUARANTEES`] names it. Of what was measured: settings could change some.
    fn guarantees(self) -> [&'static str; 4] {
        match self {
            Name::Posthouse => ["yes (measured without)", "houses move, 20 s", "yes", "kept until retention"],
            Name::SkipLocked => ["no", "rows stay SENDING, by hand", "no", "kept, by hand"],
            Name::GraphileWorker => ["by named queue (measured without)", "locked jobs, 4 h", "no", "deleted"],
            Name::PgBoss => ["by queue policy (measured without)", "expired jobs, 15 min", "no", "kept 7 days"],
            Name::River => ["no (in its paid edition)", "stuck jobs, 1 h", "no", "kept 24 h"],
            Name::Gruelbox => {
                ["by topic, then only by polling (measured without)", "flush, here 10 s", "by request id", "deleted"]
            }
            Name::Namastack => ["yes (measured without)", "partitions move, 30 s", "no", "deleted (a setting)"],
            Name::Debezium => ["yes, of all", "at its restart, from the log", "no", "deleted with the insert"],
        }
    }
}

const GUARANTEES: [&str; 4] = ["order per key", "a killed sender's messages go on", "inbox for consumers", "delivered messages"];

/// Adds what went wrong where.
pub(super) fn at<T, E: std::fmt::Display>(what: &str, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

pub(super) fn unix_micros() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |elapsed| elapsed.as_micros() as u64)
}

/// For everything that waits for messages.
const PATIENCE: Duration = Duration::from_secs(300);

/// Blocks of the comparison of transactions, of each kind.
const BLOCKS: u32 = 10;

/// The start of a load, not counted, in seconds.
const WARM_UP: f64 = 2.0;

/// Before the idle time is measured, for what the load has left; not longer than that time.
const QUIET: Duration = Duration::from_secs(3);

pub(crate) async fn run(args: &PeersArgs, only: Option<Kind>, report: &mut Report) {
    if only.is_some_and(|kind| kind != Kind::Postgres) {
        report.skip("peers: only PostgreSQL is measured, for that is what all of them know".to_owned());
        return;
    }
    let named = |variable: &str| std::env::var(variable).map_err(|_| format!("peers: {variable} is not set; {HOW_TO_SET}"));
    let (database, amqp) = match (named("POSTHOUSE_TEST_POSTGRES_URL"), named("POSTHOUSE_TEST_RABBITMQ_URL")) {
        (Ok(database), Ok(amqp)) => (database, amqp),
        (Err(why), _) | (_, Err(why)) => return report.skip(why),
    };
    let names = if args.only.is_empty() { Name::value_variants() } else { &args.only };
    let mut about = About::new("peer", ["version"].into_iter().chain(GUARANTEES));
    for name in names {
        match measure(*name, args, &database, &amqp).await {
            Ok((version, row)) => {
                about.add(name.to_string(), [version].into_iter().chain(name.guarantees().map(str::to_owned)));
                report.add(row);
            }
            Err(why) if name.is_own() => {
                eprintln!("{name}: {why}");
                std::process::exit(1);
            }
            Err(why) => report.skip(format!("{name}: {why}")),
        }
    }
    report.about(about);
}

async fn measure(name: Name, args: &PeersArgs, database: &str, amqp: &str) -> Result<(String, Row), String> {
    let installed = install(name).await?;
    let mut server = Server::connect(database).await?;
    let mut url = database.to_owned();
    let mut logical = None;
    if name == Name::Debezium && server.wal_level().await? != "logical" {
        eprintln!("{name}: starting a PostgreSQL with wal_level = logical");
        let own = Logical::start().await?;
        url = own.url();
        server = Server::connect(&url).await?;
        logical = Some(own);
    }
    let place = fresh_name();
    server.create(&place).await?;
    let config = Config {
        database: with_database(&url, &place)?,
        amqp: amqp.to_owned(),
        queue: place.clone(),
        payload: args.payload as usize,
        connections: args.publishers as usize,
    };
    let measured = in_place(name, &installed, args, &server, &config).await;
    // Also after a failure.
    server.drop(&place).await?;
    if let Some(own) = logical {
        own.remove().await?;
    }
    measured
}

/// The URL with another database.
fn with_database(url: &str, name: &str) -> Result<String, String> {
    let end = url.find('?').unwrap_or(url.len());
    let authority = url.find("://").map(|at| at + 3).ok_or_else(|| format!("{url} is not a URL"))?;
    let path = url[authority..end].find('/').map_or(end, |at| authority + at);
    Ok(format!("{}/{name}{}", &url[..path], &url[end..]))
}

async fn in_place(
    name: Name,
    installed: &Installed,
    args: &PeersArgs,
    server: &Server,
    config: &Config,
) -> Result<(String, Row), String> {
    let arrivals = Arrivals::prepare(&config.amqp, &config.queue).await?;
    let mut driver = Driver::start(command(name, installed, config)?)?;
    let measured = Measure { name, args, server, config, arrivals: &arrivals }.all(&mut driver).await;
    let ended = driver.quit().await;
    arrivals.remove().await?;
    let measured = measured?;
    ended?;
    Ok(measured)
}

fn command(name: Name, installed: &Installed, config: &Config) -> Result<Command, String> {
    let json = at("configuration", serde_json::to_string(config))?;
    Ok(match installed {
        Installed::Own(more) => {
            let mut command = Command::new(at("this program", std::env::current_exe())?);
            command.args(["peer", &name.to_string(), &json]).args(more);
            command
        }
        Installed::Json(program, before, place) => {
            let mut command = Command::new(program);
            command.args(before).arg(json).current_dir(place);
            command
        }
        Installed::Java(class, classes) => {
            let options: sqlx::postgres::PgConnectOptions = at("URL", config.database.parse())?;
            let (host, port) = (options.get_host(), options.get_port());
            let jdbc = format!("jdbc:postgresql://{host}:{port}/{}", options.get_database().unwrap_or_default());
            let mut command = Command::new("java");
            command.args(["-Xmx512m", "-cp", classes, class, &jdbc, options.get_username(), &config.amqp, &config.queue]);
            command.args([config.payload.to_string(), config.connections.to_string()]);
            command
        }
    })
}

/// The clock and the CPU times at some point.
#[derive(Debug, Clone, Copy)]
struct Moment {
    /// Messages that have yet to arrive.
    left: u64,
    at: Instant,
    sender: f64,
    database: f64,
}

impl Moment {
    fn now(left: u64, sender: Option<u32>, server: &Server) -> Self {
        Self { left, at: Instant::now(), sender: cpu(sender), database: cpu(server.postmaster) }
    }
}

struct Measure<'a> {
    name: Name,
    args: &'a PeersArgs,
    server: &'a Server,
    config: &'a Config,
    arrivals: &'a Arrivals,
}

impl Measure<'_> {
    async fn all(&self, driver: &mut Driver) -> Result<(String, Row), String> {
        let say = |text: &str| eprintln!("{}: {text}", self.name);
        let (n, c) = (u64::from(self.args.n), self.args.publishers);
        let mut figures = Vec::new();
        let mut add = |name, title, value| figures.push(Figure { name, title, value });

        say("making its tables");
        let version = driver.ask("prepare").await?["version"].as_str().unwrap_or_default().to_owned();
        let before = self.counts().await?;

        say("comparing transactions");
        let block = (self.args.n.min(1_000) / BLOCKS).max(1);
        let (mut alone, mut with) = (Vec::new(), Vec::new());
        for _ in 0..BLOCKS {
            alone.push(driver.number(&format!("business {block} 1"), "seconds").await? * 1e6 / f64::from(block));
            with.push(driver.number(&format!("publish {block} 1"), "seconds").await? * 1e6 / f64::from(block));
        }
        let mut published = u64::from(block * BLOCKS);
        let ratios: Vec<_> = with.iter().zip(&alone).map(|(with, alone)| with / alone).collect();

        say(&format!("publishing {n} messages"));
        let wal = self.server.wal().await?;
        driver.ask(&format!("business {n} {c}")).await?;
        let middle = self.server.wal().await?;
        driver.ask(&format!("publish {n} {c}")).await?;
        published += n;
        let add_wal = (self.server.wal().await? - middle - (middle - wal)) / n as f64;
        self.server.settle().await;

        say(&format!("delivering {published}"));
        let wal = self.server.wal().await?;
        let whole = Moment::now(published, driver.pid(), self.server);
        let (pid, run) = (driver.pid(), driver.ask("run"));
        // What has arrived by then isn't counted, nor is a start that takes long.
        let first = async {
            self.arrivals.wait_for((published / 10).max(1), PATIENCE).await?;
            Ok(Moment::now(published.saturating_sub(self.arrivals.waiting().await?), pid, self.server))
        };
        let (_, first) = futures_util::future::try_join(run, first).await?;
        self.arrivals.wait_for(published, PATIENCE).await?;
        self.confirmed(driver, published).await?;
        let last = Moment::now(0, driver.pid(), self.server);
        // So few that the first look has found most of them there.
        let from = if first.left < published / 2 { whole } else { first };
        let drain = from.left as f64 / (last.at - from.at).as_secs_f64();
        let per_thousand = |from_cpu: f64, to_cpu: f64| (to_cpu - from_cpu) * 1_000.0 / from.left as f64;
        let (sender, database) = (per_thousand(from.sender, last.sender), per_thousand(from.database, last.database));
        self.finished(driver).await?;
        let deliver_wal = (self.server.wal().await? - wal) / published as f64;

        say(&format!("publishing and delivering {n} messages"));
        let started = Instant::now();
        driver.ask(&format!("publish {n} {c}")).await?;
        published += n;
        self.arrivals.wait_for(published, PATIENCE).await?;
        self.confirmed(driver, published).await?;
        let sustained = n as f64 / started.elapsed().as_secs_f64();

        say("looking at what arrived");
        self.arrivals.consume().await?;
        self.arrivals.wait_consumed(published, PATIENCE).await?;

        let rate = (sustained / 2.0).max(1.0);
        let load = (rate * (WARM_UP + f64::from(self.args.seconds))).ceil() as u64;
        say(&format!("{load} messages, {rate:.0} per second"));
        let answer = driver.ask(&format!("load {load} {rate} {c}")).await?;
        published += load;
        self.arrivals.wait_consumed(published, PATIENCE).await?;
        let (mut whole, mut from_commit) = self.latencies(&answer, (rate * WARM_UP).ceil() as usize)?;
        whole.sort_by(f64::total_cmp);
        from_commit.sort_by(f64::total_cmp);

        say("idle");
        self.finished(driver).await?;
        let watch = Duration::from_secs(u64::from(self.args.idle));
        tokio::time::sleep(QUIET.min(watch)).await;
        let (counts, before_idle) = (self.counts().await?, Moment::now(0, driver.pid(), self.server));
        tokio::time::sleep(watch).await;
        let (after, after_idle) = (self.counts().await?, Moment::now(0, driver.pid(), self.server));
        let idle = (after_idle.at - before_idle.at).as_secs_f64();
        let percent = |before: f64, after: f64| (after - before) * 100.0 / idle;
        let (idle_sender, idle_database) =
            (percent(before_idle.sender, after_idle.sender), percent(before_idle.database, after_idle.database));
        driver.ask("stop").await?;

        let seen = self.arrivals.seen();
        if seen.strange > 0 || seen.times.len() as u64 != published {
            return Err(format!("{} of {published} messages arrived, and {} without a number", seen.times.len(), seen.strange));
        }
        add("drain", "drain/s", drain);
        add("sustained", "sustained/s", sustained);
        add("transaction_alone_us", "alone µs", median(&alone));
        add("transaction_with_us", "with µs", median(&with));
        add("transaction_ratio", "ratio", median(&ratios));
        add("wal_bytes_add", "WAL B add", add_wal);
        add("wal_bytes_deliver", "WAL B deliver", deliver_wal);
        add("cpu_seconds_per_1000_sender", "CPU s/1000", sender);
        add("cpu_seconds_per_1000_database", "database's", database);
        add("p50", "p50", percentile(&whole, 500));
        add("p95", "p95", percentile(&whole, 950));
        add("p99", "p99", percentile(&whole, 990));
        add("from_commit_p50", "from commit p50", percentile(&from_commit, 500));
        add("from_commit_p95", "", percentile(&from_commit, 950));
        add("from_commit_p99", "p99 ", percentile(&from_commit, 990));
        add("rate", "at/s", rate);
        if after.statements.is_nan() {
            add("idle_transactions", "idle tx/s", (after.transactions - counts.transactions) / idle);
        } else {
            add("idle_transactions", "", (after.transactions - counts.transactions) / idle);
            add("idle_statements", "idle statements/s", (after.statements - counts.statements) / idle);
        }
        add("idle_cpu_sender", "idle CPU %", idle_sender);
        add("idle_cpu_database", "database's %", idle_database);
        add("messages", "", published as f64);
        add("duplicates", "duplicates", seen.duplicates as f64);
        // Of other databases on the server, meanwhile: their part in WAL and CPU.
        add("others_transactions", "", after.others - before.others);
        if after.others - before.others > 0.05 * (after.transactions - before.transactions) {
            say("other databases of this server were busy meanwhile: WAL and the database's CPU are theirs, too");
        }
        Ok((version, Row { database: "postgres", what: self.name.to_string(), unit: "", compared: None, figures }))
    }

    /// The database of this peer has the name of its queue.
    async fn counts(&self) -> Result<Counts, String> {
        self.server.counts(&self.config.queue).await
    }

    /// Returns when the sender has got so many confirms.
    async fn confirmed(&self, driver: &mut Driver, n: u64) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let answer = driver.ask("confirmed").await?;
            match answer["confirmed"].as_u64() {
                Some(confirmed) if confirmed < n => {}
                // Those that don't tell wait for confirms, too, before they go on.
                _ => return Ok(()),
            }
            if Instant::now() > until {
                return Err(format!("{answer} of {n} within {PATIENCE:?}"));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Returns when nothing is left by the peer's own tables.
    async fn finished(&self, driver: &mut Driver) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = driver.number("pending", "pending").await?;
            if left == 0.0 {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(format!("{left} messages are unfinished in its tables after {PATIENCE:?}"));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// In milliseconds: from when a publish should have begun, and from its commit. The first ones aren't counted.
    fn latencies(&self, answer: &serde_json::Value, skip: usize) -> Result<(Vec<f64>, Vec<f64>), String> {
        let first = answer["first"].as_u64().ok_or("load: no first")?;
        let committed = answer["committed"].as_array().ok_or("load: no commits")?;
        let seen = self.arrivals.seen();
        let mut both = (Vec::new(), Vec::new());
        for (number, committed) in (first..).zip(committed).skip(skip) {
            let (intended, arrived) = *seen.times.get(&number).ok_or_else(|| format!("message {number} is missing"))?;
            let since = |from: u64| (arrived as f64 - from as f64) / 1e3;
            both.0.push(since(intended));
            // It may arrive before its publisher has learnt of the commit,
            both.1.push(since(committed.as_u64().ok_or("load: a commit without a time")?).max(0.0));
        }
        // but not before it should have been published.
        match both.0.iter().copied().reduce(f64::min) {
            Some(least) if least < 0.0 => {
                Err(format!("a message arrived {:.3} ms before it was published: two clocks differ", -least))
            }
            _ => Ok(both),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_gets_a_database_of_its_own() {
        let of = |url| with_database(url, "own").expect("a URL");
        assert_eq!(of("postgres://me@localhost:5432/shared"), "postgres://me@localhost:5432/own");
        assert_eq!(of("postgres://me@localhost/shared?sslmode=disable"), "postgres://me@localhost/own?sslmode=disable");
        assert_eq!(of("postgres://me@localhost"), "postgres://me@localhost/own");
    }
}
