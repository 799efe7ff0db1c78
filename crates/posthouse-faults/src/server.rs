//! Servers of a test's own, which it may kill and start again.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::root;

/// A kind of server, as `scripts/services` calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Postgres,
    MariaDb,
    RabbitMq,
    Kafka,
    Nats,
}

impl Kind {
    /// What `scripts/services` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::MariaDb => "mariadb",
            Self::RabbitMq => "rabbitmq",
            Self::Kafka => "kafka",
            Self::Nats => "nats",
        }
    }

    /// The main port and those `scripts/services` derives from it, which follow it.
    fn ports(self) -> u16 {
        match self {
            Self::RabbitMq => 2,
            Self::Kafka => 3,
            Self::Postgres | Self::MariaDb | Self::Nats => 1,
        }
    }

    /// Its URL at a port of this machine: the server's own, or that of a proxy before it.
    pub fn url(self, port: u16) -> String {
        match self {
            Self::Postgres => format!("postgres://posthouse@127.0.0.1:{port}/posthouse_test"),
            Self::MariaDb => format!("mysql://posthouse:posthouse@127.0.0.1:{port}/posthouse_test"),
            Self::RabbitMq => format!("amqp://posthouse:posthouse@127.0.0.1:{port}/posthouse"),
            Self::Kafka => format!("127.0.0.1:{port}"),
            Self::Nats => format!("nats://127.0.0.1:{port}"),
        }
    }
}

/// An own instance, run by `scripts/services`. It is killed and its data removed when this is dropped, and also when this
/// process dies.
#[derive(Debug)]
pub struct Server {
    kind: Kind,
    home: PathBuf,
    port: u16,
    conf: String,
    url: String,
    /// Removes it when its stdin ends. None once it has.
    janitor: Option<Child>,
}

impl Server {
    /// Starts one, with more lines for its configuration file; returns when it answers.
    ///
    /// # Errors
    /// What `scripts/services` says.
    pub async fn start(kind: Kind, conf: &str) -> Result<Self, String> {
        let port = free_ports(kind.ports());
        // `scripts/services` finds by this name what a test has left when the machine went down.
        let home = root().join(format!("target/services/own/{}-{}-{port}", kind.name(), std::process::id()));
        std::fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
        let mut server = Self { kind, home, port, conf: conf.to_owned(), url: kind.url(port), janitor: None };
        server.janitor = Some(server.janitor()?);
        server.start_again().await?;
        Ok(server)
    }

    /// Its URL, as the tests' environment variables have it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The port of its URL.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The directory it lives in.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Stops it in good order and starts it again: everything it holds is on its disk then.
    ///
    /// # Errors
    /// What `scripts/services` says.
    pub async fn restart(&self) -> Result<(), String> {
        self.services("stop").await?;
        self.start_again().await
    }

    /// SIGKILL; returns when the process is gone.
    ///
    /// RabbitMQ 3.10 (Debian 12) may not bring back a queue that was declared a few seconds before it is killed, nor the
    /// messages in it that it has confirmed: always so with quorum queues, now and then with classic durable ones. Declare the
    /// queue and [`restart`](Self::restart) before the first kill.
    ///
    /// # Errors
    /// What `scripts/services` says.
    pub async fn kill(&self) -> Result<(), String> {
        self.services("kill").await
    }

    /// Starts it again with the same data; returns when it answers.
    ///
    /// # Errors
    /// What `scripts/services` says.
    pub async fn start_again(&self) -> Result<(), String> {
        self.services("start").await
    }

    /// What `scripts/services status` says.
    ///
    /// # Errors
    /// The script can't be run.
    pub async fn status(&self) -> Result<String, String> {
        let output = tokio::process::Command::from(self.command("status")).output().await;
        let output = output.map_err(|e| format!("scripts/services: {e}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Kills it and removes its data, as dropping it does.
    ///
    /// # Errors
    /// It could not be removed.
    pub fn remove(&mut self) -> Result<(), String> {
        let Some(mut janitor) = self.janitor.take() else { return Ok(()) };
        drop(janitor.stdin.take());
        match janitor.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{} could not be removed: {status}", self.home.display())),
            Err(e) => Err(format!("{}: {e}", self.home.display())),
        }
    }

    /// A shell that waits for the end of its stdin, which this process holds alone, and then removes everything.
    fn janitor(&self) -> Result<Child, String> {
        const SCRIPT: &str =
            r#"trap '' HUP INT TERM; cat >/dev/null; scripts/services remove "$0"; end=$?; rm -rf -- "$1"; exit "$end""#;
        let mut command = Command::new("sh");
        self.at_home(&mut command);
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        // Its errors have nowhere to go when this process is gone.
        command
            .args(["-c", SCRIPT, self.kind.name()])
            .arg(&self.home)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().map_err(|e| format!("sh: {e}"))
    }

    async fn services(&self, action: &str) -> Result<(), String> {
        let output = tokio::process::Command::from(self.command(action)).output().await;
        let output = output.map_err(|e| format!("scripts/services: {e}"))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("scripts/services {action} {}: {}\n{said}", self.kind.name(), output.status))
    }

    fn command(&self, action: &str) -> Command {
        let mut command = Command::new("scripts/services");
        self.at_home(&mut command);
        // Ctrl-C must not end it half-way: the janitor waits for its lock.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command.args([action, self.kind.name()]).stdin(Stdio::null());
        command
    }

    fn at_home(&self, command: &mut Command) {
        let kind = self.kind.name().to_uppercase();
        command
            .current_dir(root())
            .env("POSTHOUSE_SERVICES_HOME", &self.home)
            .env(format!("POSTHOUSE_{kind}_PORT"), self.port.to_string())
            .env(format!("POSTHOUSE_{kind}_CONF"), &self.conf);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(why) = self.remove() {
            eprintln!("{why}");
        }
    }
}

/// That many free ports in a row; the first is returned. They stay the server's while it is down: below 32768 Linux gives
/// none to outgoing connections, which could otherwise take a killed server's port.
///
/// # Panics
/// There are none.
pub fn free_ports(count: u16) -> u16 {
    const FIRST: u16 = 10_000;
    const RANGE: u16 = 10_000;
    // No port twice in this process; another process begins elsewhere.
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let offset = (std::process::id() % u32::from(RANGE)) as u16;
    for _ in 0..RANGE / count {
        let taken = TAKEN.fetch_add(count, Ordering::Relaxed);
        let first = FIRST + (offset.wrapping_mul(37) % RANGE + taken) % RANGE;
        if (first..first + count).all(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()) {
            return first;
        }
    }
    panic!("no {count} free ports in a row");
}
