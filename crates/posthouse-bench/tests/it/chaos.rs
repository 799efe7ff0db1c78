//! The fault run as a user starts it: every promise is kept while everything breaks, and however it ends, it leaves nothing.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Long enough for any machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn chaos(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthouse-bench"));
    command.arg("chaos").args(arguments).stdin(Stdio::null());
    command
}

#[test]
fn every_promise_is_kept_while_everything_breaks() {
    let soak = std::env::var_os("POSTHOUSE_SOAK").is_some();
    let seconds = if soak { "600" } else { "30" };
    let output = chaos(&["--json", "--seconds", seconds]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{}\n{said}", output.status, String::from_utf8_lossy(&output.stdout));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{said}\n{report:#}");
    assert_eq!(report["kept"], true);
    let counts: BTreeMap<_, _> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["what"].as_str().unwrap(), row["count"].as_f64().unwrap() as u64))
        .collect();
    // It was not an easy run.
    let faults: Vec<_> = counts.iter().filter(|(what, _)| what.starts_with("fault: ")).collect();
    assert_eq!(faults.len(), 16);
    assert!(faults.iter().all(|(_, count)| **count > 0), "{faults:?}");
    assert!(counts["messages committed"] > 100, "{counts:?}");
    assert!(counts["messages rolled back"] > 0, "{counts:?}");
    // In a short run on a busy machine it may happen that nothing is under way when something breaks.
    if soak {
        assert!(counts["commits without an answer"] > 0 && counts["duplicate deliveries"] > 0, "{counts:?}");
    }
    assert_eq!(counts["effects"], counts["messages committed"]);
}

/// A run whose progress is read.
struct Run {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Run {
    fn start() -> Self {
        let mut child = chaos(&["--seconds", "600"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Reads on until it says this.
    fn wait_for(&mut self, text: &str) {
        let mut said = Vec::new();
        for line in &mut self.lines {
            said.push(line.unwrap());
            if said.last().unwrap().contains(text) {
                return;
            }
        }
        panic!("{text:?} is not in:\n{}", said.join("\n"));
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// Directories of its servers.
    fn homes(&self) -> Vec<PathBuf> {
        let own = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/services/own"));
        let mine = format!("-{}-", self.child.id());
        let all = std::fs::read_dir(own).into_iter().flatten().map(|entry| entry.unwrap().path());
        all.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().contains(&mine))).collect()
    }

    /// Its children, and the processes that work for it: each by its number and its start.
    fn processes(&self) -> Vec<(u32, String)> {
        let homes = self.homes();
        let mut out = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let (Some((parent, start)), Ok(line)) = (stat(pid), std::fs::read(entry.path().join("cmdline"))) else { continue };
            let line = String::from_utf8_lossy(&line);
            if parent == self.child.id() || homes.iter().any(|home| line.contains(&*home.file_name().unwrap().to_string_lossy()))
            {
                out.push((pid, start));
            }
        }
        out
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // After a failed assertion; otherwise it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parent and time of the start of a process that is alive.
fn stat(pid: u32) -> Option<(u32, String)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    (fields[0] != "Z").then_some((fields[1].parse().ok()?, fields[19].to_owned()))
}

#[track_caller]
fn wait_until(what: &str, mut met: impl FnMut() -> bool) {
    let started = Instant::now();
    while !met() {
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_run_leaves_nothing() {
    let mut run = Run::start();
    run.wait_for("messages arrive");
    let processes = run.processes();
    // Three relays, two receivers, two servers and who waits to remove them.
    assert!(processes.len() >= 9, "{processes:?}");
    assert_eq!(run.homes().len(), 2);
    run.signal("KILL");
    run.child.wait().unwrap();
    wait_until("its processes are gone", || {
        processes.iter().all(|(pid, start)| stat(*pid).is_none_or(|(_, other)| other != *start))
    });
    wait_until("its directories are gone", || run.homes().is_empty());
}

#[test]
fn an_interrupted_run_ends_at_once_and_leaves_nothing() {
    let mut run = Run::start();
    // In the middle of starting its servers.
    wait_until("its servers have directories", || run.homes().len() == 2);
    run.signal("INT");
    run.wait_for("stopped before the end");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    assert!(run.homes().is_empty(), "{:?}", run.homes());
    wait_until("its processes are gone", || run.processes().is_empty());
}
