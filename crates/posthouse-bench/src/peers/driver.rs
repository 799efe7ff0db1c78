//! A process that runs one peer, and the protocol it obeys: see `peers/node/main.js`.

use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// For one answer; the longest is that to `publish`.
const PATIENCE: Duration = Duration::from_secs(600);

/// For the end, after `quit`.
const END: Duration = Duration::from_secs(60);

/// What every driver is told.
#[derive(Debug, Clone, Serialize, serde::Deserialize)]
pub(super) struct Config {
    /// URL of a database of its own.
    pub(super) database: String,
    pub(super) amqp: String,
    /// A durable queue; there is a direct exchange of this name that it is bound to, too.
    pub(super) queue: String,
    /// Bytes.
    pub(super) payload: usize,
    /// That publishers use.
    pub(super) connections: usize,
}

#[derive(Debug)]
pub(super) struct Driver {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Driver {
    /// A driver ends when its stdin does, so also with this process.
    pub(super) fn start(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(|e| format!("{:?}: {e}", command.as_std().get_program()))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else { return Err("no pipes".to_owned()) };
        Ok(Self { child, stdin, stdout: BufReader::new(stdout).lines() })
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Has one command obeyed.
    pub(super) async fn ask(&mut self, command: &str) -> Result<Value, String> {
        let failed = |what: String| format!("{command}: {what}");
        self.stdin.write_all(format!("{command}\n").as_bytes()).await.map_err(|e| failed(e.to_string()))?;
        let line = match tokio::time::timeout(PATIENCE, self.stdout.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return Err(failed("the driver ended".to_owned())),
            Ok(Err(e)) => return Err(failed(e.to_string())),
            Err(_) => return Err(failed(format!("no answer within {PATIENCE:?}"))),
        };
        let answer: Value = serde_json::from_str(&line).map_err(|e| failed(format!("{e}: {line}")))?;
        match answer["error"].as_str() {
            Some(error) => Err(failed(error.to_owned())),
            None => Ok(answer),
        }
    }

    /// Asks for a figure.
    pub(super) async fn number(&mut self, command: &str, field: &str) -> Result<f64, String> {
        let answer = self.ask(command).await?;
        answer[field].as_f64().ok_or_else(|| format!("{command}: no {field} in {answer}"))
    }

    pub(super) async fn quit(mut self) -> Result<(), String> {
        self.stdin.write_all(b"quit\n").await.map_err(|e| format!("quit: {e}"))?;
        match tokio::time::timeout(END, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(other) => Err(format!("quit: {other:?}")),
            Err(_) => Err(format!("quit: it still runs after {END:?}")),
        }
    }
}
