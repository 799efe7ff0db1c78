//! What a fault run runs: servers of its own, proxies before them, relays and receivers. And how each of it is broken.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::Duration;

use posthouse::Outbox;
use posthouse_faults::{Kind as ServerKind, Mode, Proxy, SKEW, Server, mortal, signal, skewing_library};
use sqlx::pool::PoolOptions;
use sqlx::{PgPool, Pool, Postgres};
use tokio::process::Child;
use tokio::sync::Mutex as Turn;
use tokio::time::{Instant, sleep, timeout};

use super::plan::{Cast, Fault, Kind};
use super::source::Source;
use super::{ChaosArgs, Sabotage, broker, receiver};
use crate::program;

/// Of the relays. Short, so that a minute holds many of them.
const LEASE: Duration = Duration::from_secs(6);

/// Of every link, each way: as between two sites. Without it hardly anything is under way when something breaks.
const LATENCY: Mode = Mode::Slow(Duration::from_millis(8));

/// How long a process may take to end in good order.
const GRACE: Duration = Duration::from_secs(15);

/// A server and whose turn it is to break it.
struct Breakable {
    server: Server,
    turn: Turn<()>,
}

impl Breakable {
    async fn start(kind: ServerKind) -> Result<Self, String> {
        Ok(Self { server: Server::start(kind, "").await?, turn: Turn::new(()) })
    }

    async fn restart(&self) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        self.server.restart().await
    }

    async fn kill(&self, away: Duration) -> Result<(), String> {
        let _turn = self.turn.lock().await;
        self.server.kill().await?;
        sleep(away).await;
        self.server.start_again().await
    }
}

/// The way from one client to one server.
struct Link {
    name: String,
    proxy: Proxy,
    turn: Turn<()>,
}

impl Link {
    async fn spoil(&self, mode: Mode, lasts: Duration) {
        let _turn = self.turn.lock().await;
        self.proxy.set(mode);
        sleep(lasts).await;
        self.proxy.set(LATENCY);
    }
}

/// A relay or a receiver.
struct Process {
    name: String,
    program: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    /// Held by who breaks it.
    child: Turn<Option<Child>>,
}

/// A library that makes clocks wrong, and by how many seconds.
type Clock<'a> = Option<(&'a Path, i64)>;

impl Process {
    fn new(name: String, program: &Path, arguments: Vec<OsString>, directory: &Path) -> Result<Self, String> {
        let log = directory.join(format!("{name}.log"));
        let process = Self { name, program: program.to_owned(), arguments, log, child: Turn::new(None) };
        let child = process.spawn(None)?;
        *process.child.try_lock().map_err(|e| e.to_string())? = Some(child);
        Ok(process)
    }

    fn spawn(&self, clock: Clock<'_>) -> Result<Child, String> {
        let said = |e: std::io::Error| format!("{}: {e}", self.name);
        let log = std::fs::OpenOptions::new().create(true).append(true).open(&self.log).map_err(said)?;
        let mut command = mortal(&self.program);
        command
            .args(&self.arguments)
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(said)?)
            .stderr(log);
        for name in ["POSTHOUSE_CONFIG", "POSTHOUSE_DATABASE_URL", "RUST_LOG"] {
            command.env_remove(name);
        }
        if let Some((library, seconds)) = clock {
            command.env("LD_PRELOAD", library).env(SKEW, seconds.to_string());
        }
        command.spawn().map_err(said)
    }

    async fn kill(&self, away: Duration) -> Result<(), String> {
        let mut child = self.child.lock().await;
        if let Some(mut child) = child.take() {
            child.kill().await.map_err(|e| format!("{}: {e}", self.name))?;
        }
        sleep(away).await;
        *child = Some(self.spawn(None)?);
        Ok(())
    }

    /// SIGTERM; it is killed when it takes too long.
    async fn end(child: &mut Option<Child>) -> Result<(), String> {
        let Some(mut child) = child.take() else { return Ok(()) };
        if let Some(pid) = child.id() {
            signal(pid, "TERM").await?;
        }
        if timeout(GRACE, child.wait()).await.is_err() {
            child.kill().await.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    async fn restart(&self, away: Duration, clock: Clock<'_>) -> Result<(), String> {
        let mut child = self.child.lock().await;
        Self::end(&mut child).await?;
        sleep(away).await;
        *child = Some(self.spawn(clock)?);
        Ok(())
    }

    async fn pause(&self, lasts: Duration) -> Result<(), String> {
        let child = self.child.lock().await;
        let Some(pid) = child.as_ref().and_then(Child::id) else { return Ok(()) };
        signal(pid, "STOP").await?;
        sleep(lasts).await;
        signal(pid, "CONT").await
    }

    /// If it has ended although nobody ended it: how, and what it said last. It is started again.
    fn ended(&self) -> Result<Option<String>, String> {
        let Ok(mut child) = self.child.try_lock() else { return Ok(None) };
        let Some(status) = child.as_mut().and_then(|child| child.try_wait().transpose()) else { return Ok(None) };
        let status = status.map_err(|e| format!("{}: {e}", self.name))?;
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last = log.lines().last().unwrap_or_default();
        *child = Some(self.spawn(None)?);
        Ok(Some(format!("{}: {status}: {last}", self.name)))
    }
}

/// Everything. Dropped, it is gone.
pub(super) struct Stage<DB: Source> {
    relays: Vec<Process>,
    consumers: Vec<Process>,
    links: Vec<Link>,
    pub(super) sender: Pool<DB>,
    pub(super) receiver: PgPool,
    /// The sender's first, the receivers' last; in PostgreSQL both are on one server.
    databases: Vec<Breakable>,
    broker: Breakable,
    library: PathBuf,
    /// How often which fault took place.
    done: Mutex<BTreeMap<Kind, u64>>,
}

impl<DB: Source> Stage<DB> {
    pub(super) async fn set_up(args: &ChaosArgs) -> Result<Self, String> {
        let posthouse = program::posthouse(args.posthouse.as_deref());
        let this = std::env::current_exe().map_err(|e| e.to_string())?;
        let second = async {
            match DB::SERVER {
                ServerKind::Postgres => Ok(None),
                _ => Breakable::start(ServerKind::Postgres).await.map(Some),
            }
        };
        let (first, second, broker) =
            tokio::try_join!(Breakable::start(DB::SERVER), second, Breakable::start(ServerKind::RabbitMq))?;
        // It goes with the server, unless it shall stay.
        let directory = args.keep.clone().unwrap_or_else(|| first.server.home().join("run"));
        std::fs::create_dir_all(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        let directory = directory.canonicalize().map_err(|e| format!("{}: {e}", directory.display()))?;
        let library = skewing_library(&directory)?;

        let sender = pool::<DB>(first.server.url())?;
        Outbox::new(sender.clone()).migrate().await.map_err(|e| format!("the sender's outbox: {e}"))?;
        DB::prepare(&sender).await.map_err(|e| format!("the sender's tables: {e}"))?;
        let databases: Vec<_> = [Some(first), second].into_iter().flatten().collect();
        let [.., last] = &databases[..] else { return Err("there is no database".into()) };
        let maker = pool::<Postgres>(last.server.url())?;
        sqlx::query("CREATE DATABASE receiver").execute(&maker).await.map_err(|e| format!("the receivers' database: {e}"))?;
        maker.close().await;
        let receiver = pool::<Postgres>(&of_receiver(last.server.url()))?;
        receiver::prepare(&receiver).await.map_err(|e| format!("the receivers' tables: {e}"))?;
        broker::prepare(broker.server.url()).await.map_err(|e| format!("the broker's queues: {e}"))?;

        let mut links = Vec::new();
        let mut link = async |name: String, server: &Server, kind: ServerKind| {
            let proxy = Proxy::start(format!("127.0.0.1:{}", server.port())).await;
            proxy.set(LATENCY);
            let url = kind.url(proxy.address.port());
            links.push(Link { name, proxy, turn: Turn::new(()) });
            url
        };
        link("publishers to database".into(), &databases[0].server, DB::SERVER).await;
        let mut relays = Vec::new();
        for n in 0..args.relays {
            let name = format!("relay-{n}");
            let database = link(format!("{name} to database"), &databases[0].server, DB::SERVER).await;
            let queues = link(format!("{name} to broker"), &broker.server, ServerKind::RabbitMq).await;
            let file = directory.join(format!("{name}.toml"));
            std::fs::write(&file, configuration(&name, &database, &queues, args.sabotage)).map_err(|e| e.to_string())?;
            let arguments = ["relay".into(), "--drain".into(), "5s".into(), "-c".into(), file.into()];
            relays.push(Process::new(name, &posthouse, arguments.into(), &directory)?);
        }
        let mut consumers = Vec::new();
        for n in 0..args.consumers {
            let name = format!("consumer-{n}");
            let database = of_receiver(&link(format!("{name} to database"), &last.server, ServerKind::Postgres).await);
            let queues = link(format!("{name} to broker"), &broker.server, ServerKind::RabbitMq).await;
            let mut arguments: Vec<OsString> = vec!["chaos-consumer".into()];
            for (option, value) in [("--into", &database), ("--broker", &queues), ("--name", &name)] {
                arguments.extend([option.into(), value.into()]);
            }
            if args.sabotage == Some(Sabotage::Twice) {
                arguments.extend(["--memory".into(), name.clone().into()]);
            }
            consumers.push(Process::new(name, &this, arguments, &directory)?);
        }
        Ok(Self { relays, consumers, links, sender, receiver, databases, broker, library, done: Mutex::default() })
    }

    pub(super) fn cast(&self) -> Cast {
        Cast {
            relays: self.relays.len(),
            consumers: self.consumers.len(),
            databases: self.databases.len(),
            links: self.links.len(),
            lease: LEASE,
        }
    }

    /// The sender's database as publishers reach it.
    pub(super) fn publishers_url(&self) -> String {
        DB::SERVER.url(self.links[0].proxy.address.port())
    }

    pub(super) fn broker_url(&self) -> &str {
        self.broker.server.url()
    }

    pub(super) fn done(&self) -> BTreeMap<Kind, u64> {
        self.done.lock().map(|done| done.clone()).unwrap_or_default()
    }

    /// Whom it hits.
    pub(super) fn target(&self, fault: &Fault) -> String {
        match fault.kind {
            Kind::KillRelay | Kind::StopRelay | Kind::PauseRelay | Kind::SkewRelay => self.relays[fault.target].name.clone(),
            Kind::KillConsumer | Kind::PauseConsumer | Kind::SkewConsumer => self.consumers[fault.target].name.clone(),
            Kind::KillBackends | Kind::RestartDatabase | Kind::KillDatabase => {
                if fault.target == 0 { DB::SERVER } else { ServerKind::Postgres }.name().into()
            }
            Kind::RestartBroker | Kind::KillBroker => ServerKind::RabbitMq.name().into(),
            Kind::SlowLink | Kind::SilentLink | Kind::UnansweredLink | Kind::CutLink => self.links[fault.target].name.clone(),
        }
    }

    /// Breaks something, and mends it when its time is over.
    pub(super) async fn inflict(&self, fault: Fault) -> Result<(), String> {
        let Fault { kind, target, lasts, by, .. } = fault;
        let clock = Some((self.library.as_path(), by));
        match kind {
            Kind::KillRelay => self.relays[target].kill(lasts).await?,
            Kind::StopRelay => self.relays[target].restart(lasts, None).await?,
            Kind::PauseRelay => self.relays[target].pause(lasts).await?,
            Kind::SkewRelay => self.relays[target].restart(lasts, clock).await?,
            Kind::KillConsumer => self.consumers[target].kill(lasts).await?,
            Kind::PauseConsumer => self.consumers[target].pause(lasts).await?,
            Kind::SkewConsumer => self.consumers[target].restart(lasts, clock).await?,
            Kind::KillBackends => self.end_sessions(target, by).await?,
            Kind::RestartDatabase => self.databases[target].restart().await?,
            Kind::KillDatabase => self.databases[target].kill(lasts).await?,
            Kind::RestartBroker => self.broker.restart().await?,
            Kind::KillBroker => self.broker.kill(lasts).await?,
            Kind::SlowLink => self.links[target].spoil(Mode::Slow(Duration::from_millis(by.unsigned_abs())), lasts).await,
            Kind::SilentLink => self.links[target].spoil(Mode::Silent, lasts).await,
            Kind::UnansweredLink => self.links[target].spoil(Mode::Unanswered, lasts).await,
            Kind::CutLink => self.links[target].spoil(Mode::Cut, lasts).await,
        }
        if let Ok(mut done) = self.done.lock() {
            *done.entry(kind).or_default() += 1;
        }
        Ok(())
    }

    /// Waits for the database if it is away just now.
    async fn end_sessions(&self, database: usize, count: i64) -> Result<(), String> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let ended = match database {
                0 => DB::end_sessions(&self.sender, count).await,
                _ => Postgres::end_sessions(&self.receiver, count).await,
            };
            match ended {
                Ok(1..) => return Ok(()),
                Err(e) if Instant::now() > until => return Err(format!("ending sessions: {e}")),
                _ => sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Relays and receivers that ended although nobody ended them.
    pub(super) fn ended(&self) -> Result<Vec<String>, String> {
        let ended = self.relays.iter().chain(&self.consumers).map(Process::ended);
        Ok(ended.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    /// Ends relays and receivers in good order.
    pub(super) async fn stop(&self) -> Result<(), String> {
        for process in self.relays.iter().chain(&self.consumers) {
            Process::end(&mut *process.child.lock().await).await?;
        }
        Ok(())
    }
}

/// For this process's own questions, directly.
fn pool<DB: sqlx::Database>(url: &str) -> Result<Pool<DB>, String> {
    let options = PoolOptions::new().max_connections(3).acquire_timeout(Duration::from_secs(5));
    options.connect_lazy(url).map_err(|e| format!("{url}: {e}"))
}

fn of_receiver(url: &str) -> String {
    url.rsplit_once('/').map_or_else(|| url.to_owned(), |(server, _)| format!("{server}/receiver"))
}

/// Times are short, so that a minute holds many of them. Limits that count deaths and attempts are high: faults come closer
/// together than in life, and would use up what is there for a message that is at fault itself.
fn configuration(name: &str, database: &str, broker: &str, sabotage: Option<Sabotage>) -> String {
    let ordering = if sabotage == Some(Sabotage::Disorder) { "none" } else { "strict" };
    let retry = r#"{ max_attempts = 10000, base = "100ms", cap = "2s" }"#;
    let exchange = broker::EXCHANGE;
    format!(
        r#"[databases.sender]
url = "{database}"

[transports.amqp]
kind = "rabbitmq"
url = "{broker}"
heartbeat = "2s"
connect_timeout = "2s"

# It is there by itself, and must fit the time for a send.
[transports.http]
connect_timeout = "2s"

[routes.keyed]
to = "amqp:{exchange}/keyed"
ordering = "{ordering}"
retry = {retry}

[routes.loose]
to = "amqp:{exchange}/loose"
retry = {retry}

[relay]
instance = "{name}"
lease = "{}s"
heartbeat = "1s"
send_timeout = "3s"
lease_margin = "500ms"
idle_poll = "200ms"
full_sweep = "5s"
database_timeout = "3s"
max_claims = 100

[server]
listen = "127.0.0.1:0"
"#,
        LEASE.as_secs()
    )
}
