//! Brokers: the shared ones, and own instances that a test may kill and start again.

use std::process::Stdio;

use posthouse_faults::Server;
pub(crate) use posthouse_faults::{Kind, free_ports};
use tokio::io::AsyncWriteExt;

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
pub(crate) struct Broker(Server);

impl Broker {
    pub(crate) async fn rabbitmq() -> Self {
        Self::rabbitmq_with("").await
    }

    /// With more lines for `rabbitmq.conf`.
    pub(crate) async fn rabbitmq_with(conf: &str) -> Self {
        Self(Server::start(Kind::RabbitMq, conf).await.expect("RabbitMQ"))
    }

    pub(crate) async fn kafka() -> Self {
        Self::kafka_with("").await
    }

    /// With more lines for `server.properties`; the tests' listener is called CLIENT.
    pub(crate) async fn kafka_with(conf: &str) -> Self {
        Self(Server::start(Kind::Kafka, conf).await.expect("Kafka"))
    }

    pub(crate) async fn nats() -> Self {
        Self::nats_with("").await
    }

    /// With more lines for the server's configuration file.
    pub(crate) async fn nats_with(conf: &str) -> Self {
        Self(Server::start(Kind::Nats, conf).await.expect("NATS"))
    }

    pub(crate) fn url(&self) -> &str {
        self.0.url()
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.port()
    }

    /// Stops it in good order and starts it again: everything it holds is on its disk then.
    pub(crate) async fn restart(&self) {
        self.0.restart().await.expect("restart");
    }

    /// SIGKILL; returns when the process is gone. See [`Server::kill`] about what RabbitMQ forgets.
    pub(crate) async fn kill(&self) {
        self.0.kill().await.expect("kill");
    }

    /// Starts it again with the same data; returns when it answers.
    pub(crate) async fn start(&self) {
        self.0.start_again().await.expect("start");
    }

    /// What `scripts/services status` says.
    pub(crate) async fn status(&self) -> String {
        self.0.status().await.expect("status")
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let removed = self.0.remove();
        // A second panic would hide the first.
        if !std::thread::panicking() {
            removed.expect("remove the broker");
        }
    }
}
