//! The fault run: everything is broken while messages flow, and then the books are settled.

mod broker;
mod check;
mod content;
mod plan;
mod publisher;
mod receiver;
mod source;
mod stage;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::{Args, ValueEnum};
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};

use self::check::{Evidence, Line, Outcome, Published};
use self::publisher::Publisher;
pub(crate) use self::receiver::{ConsumerArgs, run as run_consumer};
use self::source::Source;
use self::stage::Stage;
use crate::database::Kind;
use crate::report::{Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
Publishers write business rows and messages in one transaction each; some are rolled back. Several `posthouse relay` processes \
send them to RabbitMQ; several receivers with an inbox write effects into a second database. Meanwhile, by a plan that follows \
from the seed: relays and receivers are killed, stopped, paused beyond their lease and started with wrong clocks; sessions of the \
database are ended; database and broker are restarted and killed; links become slow, fall silent, lose answers, are cut.

Then faults stop, and when everything has come to rest a checker compares what was committed, what the broker took (a queue \
keeps a copy of everything, in order) and what the receivers did. Exit code 1 when a promise is broken.

Database and broker are the run's own, started by scripts/services on free ports and removed at the end, also after Ctrl-C and \
when the run is killed. From PostgreSQL by default; `--database mysql`: from MariaDB, to a second database in PostgreSQL.";

/// Accounts that are booked on; also the keys.
const ACCOUNTS: [&str; 24] = [
    "a01", "a02", "a03", "a04", "a05", "a06", "a07", "a08", "a09", "a10", "a11", "a12", "a13", "a14", "a15", "a16", "a17", "a18",
    "a19", "a20", "a21", "a22", "a23", "a24",
];

const PUBLISHERS: usize = 8;

/// Longer than a relay waits at most between two tries of a broker that was away (30 s and a quarter).
const STALL: Duration = Duration::from_secs(40);

/// See [`self`].
#[derive(Debug, Clone, Args)]
pub(crate) struct ChaosArgs {
    /// How long things are broken.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    minutes: u32,
    /// The same in seconds.
    #[arg(long, conflicts_with = "minutes", value_parser = clap::value_parser!(u32).range(30..=600_000))]
    seconds: Option<u32>,
    /// What the plan of faults follows from; random by default, and printed.
    #[arg(long)]
    seed: Option<u64>,
    /// Relay processes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    relays: u32,
    /// Receiver processes.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=20))]
    consumers: u32,
    /// Transactions per second of all publishers together.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rate: u32,
    /// Seconds until everything must have come to rest once nothing is broken any more.
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Put configuration and logs here, and leave them.
    #[arg(long, value_name = "DIRECTORY")]
    keep: Option<std::path::PathBuf>,
    /// The server's program; the one beside this one by default.
    #[arg(long, value_name = "FILE")]
    posthouse: Option<std::path::PathBuf>,
    /// Break a promise on purpose, to see the checker say so.
    #[arg(long, value_enum)]
    sabotage: Option<Sabotage>,
}

/// Ways to break a promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sabotage {
    /// Rows of the pending set are deleted by SQL.
    Lose,
    /// Each receiver process has a memory of its own.
    Twice,
    /// The relays' route for keyed messages has no ordering.
    Disorder,
    /// Publishers send what they roll back.
    RolledBack,
    /// Payloads in the log are changed by SQL.
    Garble,
}

impl Sabotage {
    /// What an administrator should never do.
    fn sql(self) -> Option<&'static str> {
        match self {
            Sabotage::Lose => Some(
                "DELETE FROM posthouse_pending WHERE id = (SELECT id FROM (SELECT max(id) AS id FROM posthouse_pending) newest)",
            ),
            Sabotage::Garble => Some(
                "UPDATE posthouse_message SET payload = '{}' \
                 WHERE id = (SELECT id FROM (SELECT max(id) AS id FROM posthouse_pending) newest)",
            ),
            Sabotage::Twice | Sabotage::Disorder | Sabotage::RolledBack => None,
        }
    }
}

/// Answers the exit code.
pub(crate) async fn run(database: Option<Kind>, args: &ChaosArgs, report: &mut Report) -> i32 {
    let on = async {
        match database.unwrap_or(Kind::Postgres) {
            Kind::Postgres => perform::<sqlx::Postgres>(args, report).await,
            Kind::Mysql => perform::<sqlx::MySql>(args, report).await,
            Kind::Sqlite => {
                eprintln!("--database sqlite: a fault run needs a database with a server, postgres or mysql");
                std::process::exit(2)
            }
        }
    };
    // Dropping it ends the processes and removes the servers.
    let ended = tokio::select! {
        ended = on => ended,
        () = asked_to_stop() => {
            eprintln!("stopped before the end; servers and processes are gone");
            return 130;
        }
    };
    match ended {
        Ok(kept) => i32::from(!kept),
        Err(e) => {
            eprintln!("the fault run could not be done: {e}");
            3
        }
    }
}

/// Ends with Ctrl-C, or SIGTERM.
async fn asked_to_stop() {
    let (Ok(mut interrupted), Ok(mut terminated)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupted.recv() => {}
        _ = terminated.recv() => {}
    }
}

/// True if every promise was kept.
async fn perform<DB: Source>(args: &ChaosArgs, report: &mut Report) -> Result<bool, String> {
    let length = Duration::from_secs(args.seconds.unwrap_or(args.minutes * 60).into());
    let seed = args.seed.unwrap_or_else(|| fastrand::u32(..).into());
    eprintln!("seed {seed}: starting servers and processes");
    let stage = Stage::<DB>::set_up(args).await?;
    let record = Arc::new(Mutex::new(Vec::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let mut publishers = JoinSet::new();
    for number in 0..PUBLISHERS {
        let publisher = Publisher {
            number,
            random: fastrand::Rng::with_seed(seed.wrapping_add(number as u64 + 1)),
            url: stage.publishers_url(),
            pace: Duration::from_secs(1) * PUBLISHERS as u32 / args.rate,
            sabotage: args.sabotage,
            record: record.clone(),
            stop: stop.clone(),
        };
        publishers.spawn(publisher.run::<DB>());
    }
    first_effect(&stage).await?;
    let mut ended = Vec::new();
    break_things(&stage, args, seed, length, &record, &mut ended).await?;
    stop.store(true, Relaxed);
    while let Some(publisher) = publishers.join_next().await {
        publisher.map_err(|e| format!("a publisher: {e}"))?;
    }
    let since = Instant::now();
    eprintln!("{:>6.1} s  nothing is broken any more", length.as_secs_f64());
    come_to_rest(&stage, Duration::from_secs(args.patience), &mut ended).await?;
    let rest = since.elapsed();
    stage.stop().await?;
    let evidence = gather(&stage, &record, ended).await?;
    let lines = check::check(&evidence);
    Ok(tell(&lines, &stage, seed, length, rest, report))
}

/// Everything works before anything is broken.
async fn first_effect<DB: Source>(stage: &Stage<DB>) -> Result<(), String> {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        if let [process, ..] = &stage.ended()?[..] {
            return Err(format!("ended before the first fault: {process}"));
        }
        match receiver::progress(&stage.receiver).await {
            Ok((1.., _)) => return Ok(()),
            Err(e) if Instant::now() > until => return Err(format!("the receivers' database: {e}")),
            Ok(_) if Instant::now() > until => return Err("nothing arrived before the first fault".into()),
            _ => sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn break_things<DB: Source>(
    stage: &Stage<DB>,
    args: &ChaosArgs,
    seed: u64,
    length: Duration,
    record: &Mutex<Vec<Published>>,
    ended: &mut Vec<String>,
) -> Result<(), String> {
    let plan = plan::plan(seed, length, stage.cast());
    eprintln!("seed {seed}: messages arrive; {} faults in {} s", plan.len(), length.as_secs());
    let mut plan = plan.into_iter().peekable();
    let started = Instant::now();
    // In this task, so that processes are children of a thread that stays.
    let mut running: FuturesUnordered<BoxFuture<'_, Result<(), String>>> = FuturesUnordered::new();
    let mut ticks = interval(Duration::from_millis(100));
    loop {
        tokio::select! {
            Some(done) = running.next() => done?,
            _ = ticks.tick() => {
                while let Some(fault) = plan.next_if(|fault| fault.at <= started.elapsed()) {
                    let committed = committed(record);
                    let target = stage.target(&fault);
                    eprintln!("{:>6.1} s  {target}: {fault}; {committed} messages committed", fault.at.as_secs_f64());
                    running.push(stage.inflict(fault).boxed());
                }
                if let Some(sql) = args.sabotage.and_then(Sabotage::sql) {
                    // The database may be away just now.
                    running.push(DB::execute(&stage.sender, sql).map(|_| Ok(())).boxed());
                }
                for process in stage.ended()? {
                    eprintln!("          ended by itself: {process}");
                    ended.push(process);
                }
                if started.elapsed() >= length {
                    break;
                }
            }
        }
    }
    while let Some(done) = running.next().await {
        done?;
    }
    Ok(())
}

fn committed(record: &Mutex<Vec<Published>>) -> usize {
    record.lock().map_or(0, |record| record.iter().filter(|p| p.outcome == Outcome::Committed).count())
}

/// Waits until all is delivered and done, or nothing moves any more.
async fn come_to_rest<DB: Source>(stage: &Stage<DB>, patience: Duration, ended: &mut Vec<String>) -> Result<(), String> {
    let look = async || -> Result<[i64; 6], String> {
        let said = |e: sqlx::Error| e.to_string();
        let (booked, pending, failed) = DB::progress(&stage.sender).await.map_err(said)?;
        let (effects, unfinished) = receiver::progress(&stage.receiver).await.map_err(said)?;
        let waiting = broker::waiting(stage.broker_url()).await.map_err(|e| e.to_string())?;
        Ok([booked, pending, failed, effects, unfinished, waiting.into()])
    };
    let (started, mut moved, mut said) = (Instant::now(), Instant::now(), Instant::now());
    let mut last = [0; 6];
    loop {
        ended.extend(stage.ended()?);
        let now = timeout(Duration::from_secs(20), look()).await.map_err(|_| "no answer".to_owned()).and_then(|now| now);
        match now {
            Ok(now @ [booked, pending, failed, effects, unfinished, waiting]) => {
                if pending == failed && unfinished == 0 && waiting == 0 && effects >= booked {
                    return Ok(());
                }
                if now != last {
                    (moved, last) = (Instant::now(), now);
                }
                if said.elapsed() > Duration::from_secs(5) {
                    said = Instant::now();
                    eprintln!(
                        "          {pending} pending, {waiting} in queues, {unfinished} to be run again, {effects} of {booked} done"
                    );
                }
            }
            Err(e) if started.elapsed() > patience => return Err(format!("servers don't answer: {e}")),
            Err(_) => {}
        }
        if moved.elapsed() > STALL || started.elapsed() > patience {
            eprintln!("          nothing is waited for any longer");
            return Ok(());
        }
        sleep(Duration::from_millis(250)).await;
    }
}

async fn gather<DB: Source>(stage: &Stage<DB>, record: &Mutex<Vec<Published>>, ended: Vec<String>) -> Result<Evidence, String> {
    let said = |e: sqlx::Error| e.to_string();
    let (_, pending, given_up) = DB::progress(&stage.sender).await.map_err(said)?;
    let (_, unfinished) = receiver::progress(&stage.receiver).await.map_err(said)?;
    let published = record.lock().map_err(|e| e.to_string())?.clone();
    Ok(Evidence {
        published,
        booked: DB::booked(&stage.sender).await.map_err(said)?,
        arrived: broker::log(stage.broker_url()).await?,
        effects: receiver::effects(&stage.receiver).await.map_err(said)?,
        sender: DB::balances(&stage.sender).await.map_err(said)?,
        receiver: receiver::balances(&stage.receiver).await.map_err(said)?,
        pending: pending.unsigned_abs(),
        given_up: given_up.unsigned_abs(),
        unfinished: unfinished.unsigned_abs(),
        ended,
    })
}

/// Reports; true if every promise was kept.
fn tell<DB: Source>(lines: &[Line], stage: &Stage<DB>, seed: u64, length: Duration, rest: Duration, report: &mut Report) -> bool {
    let database = DB::KIND.name();
    let figure = |name, value: u64| Figure { name, title: name, value: value as f64 };
    let done = stage.done();
    for (kind, _) in plan::KINDS {
        let figures = vec![figure("count", done.get(&kind).copied().unwrap_or_default())];
        report.push(Row { database, what: format!("fault: {}", kind.name()), unit: "count", compared: None, figures });
    }
    for line in lines {
        let mut figures = vec![figure("count", line.count)];
        figures.extend(line.promised.map(|promised| figure("promised", promised)));
        report.push(Row { database, what: line.what.into(), unit: "count", compared: None, figures });
    }
    let broken: Vec<_> = lines.iter().filter(|line| line.broken()).collect();
    let examples = broken.iter().map(|line| json!({ "what": line.what, "count": line.count, "examples": line.examples }));
    report.note("seed", json!(seed));
    report.note("seconds", json!(length.as_secs()));
    report.note("seconds_to_rest", json!((rest.as_secs_f64() * 10.0).round() / 10.0));
    report.note("kept", json!(broken.is_empty()));
    report.note("broken", examples.collect());
    for line in &broken {
        report.say(format!("BROKEN: {}: {}, promised is 0", line.what, line.count));
        for example in &line.examples {
            report.say(format!("        {example}"));
        }
    }
    let verdict = if broken.is_empty() { "every promise was kept" } else { "PROMISES WERE BROKEN" };
    report.say(format!(
        "seed {seed}, {} s of faults, {:.1} s until all had come to rest: {verdict}",
        length.as_secs(),
        rest.as_secs_f64()
    ));
    broken.is_empty()
}
