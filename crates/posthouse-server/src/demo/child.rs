//! Child processes of the demo: they are told things on stdin and report on stdout, one JSON object per line.
//!
//! A child ends when its stdin does, so it can't outlive its parent however that ends, SIGKILL included.

use std::fmt::Write as _;
use std::io::Write as _;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use super::{Cook, Failure, Role};

/// A child that was asked to end is killed after this.
const PATIENCE: Duration = Duration::from_secs(5);

/// Lines of a child's log that are shown when it ended by itself.
const LOG_LINES: usize = 10;

/// A running child, which reports `R`. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Child<R> {
    role: Role,
    process: tokio::process::Child,
    /// None once it was asked to end.
    stdin: Option<ChildStdin>,
    reports: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
    report: PhantomData<R>,
}

/// What a child needs to know from the start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup<'a> {
    pub(super) dir: &'a Path,
    pub(super) port: u16,
    pub(super) seed: u64,
    pub(super) cook: Option<Cook>,
}

impl<R: DeserializeOwned> Child<R> {
    pub(super) fn start(role: Role, setup: Setup<'_>) -> Result<Self, Failure> {
        let name = role.name();
        let program = std::env::current_exe().map_err(Failure::io("can't find the path of this program"))?;
        let log = setup.dir.join(format!("{name}.log"));
        let stderr = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&log)
            .map_err(Failure::io(format!("can't write {}", log.display())))?;
        let mut command = Command::new(program);
        command
            .args(["demo", "--role", name, "--port", &setup.port.to_string(), "--seed", &setup.seed.to_string(), "--dir"])
            .arg(setup.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .kill_on_drop(true);
        if let Some(cook) = setup.cook {
            command.args(["--cook", cook.name()]);
        }
        // Ctrl-C goes to the parent alone, which ends the children in its own way and doesn't mistake it for their failure.
        #[cfg(unix)]
        command.process_group(0);
        let mut process = command.spawn().map_err(Failure::io(format!("can't start the {name} process")))?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Failure::Child { name, what: "has no pipes".into(), log: String::new() });
        };
        Ok(Self { role, process, stdin: Some(stdin), reports: BufReader::new(stdout).lines(), log, report: PhantomData })
    }

    /// Its next report. Safe to cancel. That it ended, or said something else, is a failure.
    pub(super) async fn next(&mut self) -> Result<R, Failure> {
        let name = self.role.name();
        match self.reports.next_line().await.map_err(Failure::io(format!("can't read from the {name} process")))? {
            Some(line) => serde_json::from_str(&line).map_err(|e| Failure::Child {
                name,
                what: format!("reported {line:?}: {e}"),
                log: String::new(),
            }),
            None => {
                let what = match tokio::time::timeout(PATIENCE, self.process.wait()).await {
                    Ok(Ok(status)) => format!("ended unexpectedly ({status})"),
                    _ => "closed its output".into(),
                };
                Err(Failure::Child { name, what, log: self.last_words() })
            }
        }
    }

    fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let mut out = String::new();
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            // Writing to a String can't fail.
            let _ = write!(out, "\n  {line}");
        }
        out
    }

    /// Tells it something.
    pub(super) async fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let Some(stdin) = &mut self.stdin else { return Ok(()) };
        let told = stdin.write_all(format!("{line}\n").as_bytes()).await;
        told.map_err(Failure::io(format!("can't write to the {} process", self.role.name())))
    }

    /// SIGKILL: it gets no chance to finish or to clean up anything. Gone when this resolves.
    pub(super) async fn kill(&mut self) -> Result<(), Failure> {
        let killed = match self.process.try_wait() {
            Ok(Some(_)) => Ok(()),
            Ok(None) => self.process.kill().await,
            Err(e) => Err(e),
        };
        killed.map_err(Failure::io(format!("can't kill the {} process", self.role.name())))
    }

    /// Closes its stdin, which asks it to end, and waits until it has.
    pub(super) async fn stop(&mut self) -> Result<(), Failure> {
        self.stdin = None;
        let ended = async {
            // Read on, so that it can't hang on a full pipe while it finishes.
            while let Ok(Some(_)) = self.reports.next_line().await {}
            self.process.wait().await
        };
        match tokio::time::timeout(PATIENCE, ended).await {
            Ok(ended) => ended.map(drop).map_err(Failure::io(format!("can't wait for the {} process", self.role.name()))),
            Err(_) => self.kill().await,
        }
    }
}

/// In a child: what the parent says. Ends when the parent does.
pub(super) fn parent() -> mpsc::UnboundedReceiver<String> {
    let (to, lines) = mpsc::unbounded_channel();
    // A thread of its own, as a blocked read can't be cancelled: it ends with the process.
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(line) = line else { break };
            if to.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// In a child: reports to the parent.
pub(super) fn say(report: &impl Serialize) {
    let mut out = std::io::stdout().lock();
    // Fails only when the parent is gone, which ends this process anyway.
    let _ = serde_json::to_writer(&mut out, report)
        .map_err(std::io::Error::from)
        .and_then(|()| out.write_all(b"\n"))
        .and_then(|()| out.flush());
}
