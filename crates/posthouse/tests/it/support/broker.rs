//! Brokers: the shared ones, and own instances that a test may kill and start again.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use tokio::io::AsyncWriteExt;

/// A kind of broker, as `scripts/services` calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    RabbitMq,
    Kafka,
    Nats,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
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
            Self::Nats => 1,
        }
    }

    fn url(self, port: u16) -> String {
        match self {
            Self::RabbitMq => format!("amqp://posthouse:posthouse@127.0.0.1:{port}/posthouse"),
            Self::Kafka => format!("127.0.0.1:{port}"),
            Self::Nats => format!("nats://127.0.0.1:{port}"),
        }
    }
}

/// The shared instance of this kind.
pub(crate) fn test_url(kind: Kind) -> String {
    super::server_url(&format!("POSTHOUSE_TEST_{}_URL", kind.name().to_uppercase()))
}

/// Evaluates an Erlang expression on a RabbitMQ of `scripts/services`, whose port for that is the one after the main port.
pub(crate) async fn evaluate(url: &str, expression: &str) -> String {
    let port: u16 = url.split('@').nth(1).and_then(|rest| rest.split([':', '/']).nth(1)?.parse().ok()).expect("a port");
    let mut command = tokio::process::Command::new("erl_call");
    // Of two callers with one name the broker lets in the first.
    let (name, address) = (format!("t{:016x}", fastrand::u64(..)), format!("127.0.0.1:{}", port + 1));
    command.env_remove("ERL_LIBS").args(["-h", &name, "-address", &address, "-c", "posthouse", "-e"]);
    let mut call = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("erl_call, of Debian's erlang-base");
    let mut stdin = call.stdin.take().expect("stdin");
    stdin.write_all(format!("{expression}\n").as_bytes()).await.expect("write");
    drop(stdin);
    let output = call.wait_with_output().await.expect("erl_call");
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let value = said.strip_prefix("{ok, ").and_then(|said| said.strip_suffix('}')).map(str::to_owned);
    value.unwrap_or_else(|| panic!("{expression}: {said}"))
}

/// An own instance. Dropped, it is killed and its data removed.
pub(crate) struct Broker {
    kind: Kind,
    home: PathBuf,
    port: u16,
    conf: String,
    url: String,
}

impl Broker {
    pub(crate) async fn rabbitmq() -> Self {
        Self::rabbitmq_with("").await
    }

    /// With more lines for `rabbitmq.conf`.
    pub(crate) async fn rabbitmq_with(conf: &str) -> Self {
        Self::fresh(Kind::RabbitMq, conf).await
    }

    pub(crate) async fn kafka() -> Self {
        Self::kafka_with("").await
    }

    /// With more lines for `server.properties`; the tests' listener is called CLIENT.
    pub(crate) async fn kafka_with(conf: &str) -> Self {
        Self::fresh(Kind::Kafka, conf).await
    }

    pub(crate) async fn nats() -> Self {
        Self::nats_with("").await
    }

    /// With more lines for the server's configuration file.
    pub(crate) async fn nats_with(conf: &str) -> Self {
        Self::fresh(Kind::Nats, conf).await
    }

    async fn fresh(kind: Kind, conf: &str) -> Self {
        let port = free_ports(kind.ports());
        // `scripts/services` finds by this name what a killed test program has left.
        let home = root().join(format!("target/services/own/{}-{}-{port}", kind.name(), std::process::id()));
        let broker = Self { kind, home, port, conf: conf.to_owned(), url: kind.url(port) };
        broker.start().await;
        broker
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Stops it in good order and starts it again: everything it holds is on its disk then.
    pub(crate) async fn restart(&self) {
        self.services("stop").await;
        self.services("start").await;
    }

    /// SIGKILL; returns when the process is gone.
    ///
    /// RabbitMQ 3.10 (Debian 12) may not bring back a queue that was declared a few seconds before it is killed, nor the
    /// messages in it that it has confirmed: always so with quorum queues, now and then with classic durable ones. Declare the
    /// queue and [`restart`](Self::restart) before the first kill.
    pub(crate) async fn kill(&self) {
        self.services("kill").await;
    }

    /// Starts it again with the same data; returns when it answers.
    pub(crate) async fn start(&self) {
        self.services("start").await;
    }

    /// What `scripts/services status` says.
    pub(crate) async fn status(&self) -> String {
        let output = tokio::process::Command::from(self.command("status")).output().await.expect("scripts/services");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    async fn services(&self, action: &str) {
        let output = tokio::process::Command::from(self.command(action)).output().await.expect("scripts/services");
        assert_done(self.kind, action, &output);
    }

    fn command(&self, action: &str) -> Command {
        let mut command = Command::new(root().join("scripts/services"));
        let kind = self.kind.name().to_uppercase();
        command
            .args([action, self.kind.name()])
            .env("POSTHOUSE_SERVICES_HOME", &self.home)
            .env(format!("POSTHOUSE_{kind}_PORT"), self.port.to_string())
            .env(format!("POSTHOUSE_{kind}_CONF"), &self.conf)
            .stdin(Stdio::null());
        command
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let output = self.command("remove").output();
        let removed = std::fs::remove_dir_all(&self.home);
        // A second panic would hide the first.
        if !std::thread::panicking() {
            assert_done(self.kind, "remove", &output.expect("scripts/services"));
            removed.expect("remove the broker's directory");
        }
    }
}

fn assert_done(kind: Kind, action: &str, output: &Output) {
    assert!(
        output.status.success(),
        "scripts/services {action} {}: {}\n{}",
        kind.name(),
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// That many free ports in a row; the first is returned. They stay the broker's while it is down: below 32768 Linux gives
/// none to outgoing connections, which could otherwise take a killed broker's port.
pub(crate) fn free_ports(count: u16) -> u16 {
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
