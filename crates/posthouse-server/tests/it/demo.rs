//! `posthouse demo`: its books balance, every way to cook them is noticed, and nothing of it is left behind.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A directory for the files of one test's demo.
struct Dir(PathBuf);

impl Dir {
    fn new(test: &str) -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("demo-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn entries(&self) -> Vec<PathBuf> {
        std::fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().path()).collect()
    }

    /// `posthouse demo`, with its files here.
    fn demo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_posthouse"));
        command.arg("demo").args(args).env("TMPDIR", &self.0).stdin(Stdio::null());
        command
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // Only tidiness.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The one JSON object on stdout.
fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("stdout isn't one JSON object: {e}\n{output:?}"))
}

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report}"))
}

#[test]
fn the_books_balance() {
    let dir = Dir::new("books");
    let output = dir.demo(&["--orders", "120", "--seed", "7", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = report(&output);
    let n = |field| number(&report, field);
    assert_eq!(report["balanced"], true);
    assert_eq!(report["problems"], serde_json::json!([]));
    assert_eq!(n("seed"), 7);
    assert_eq!(n("orders_committed") + n("orders_rolled_back"), 120);
    assert!(n("orders_rolled_back") > 0, "{report}");
    assert_eq!(n("messages"), n("orders_committed"));
    assert_eq!(n("effects_applied"), n("orders_committed"));
    for zero in ["messages_pending", "messages_failed", "unpaired", "lost", "phantom", "out_of_order", "stock_off"] {
        assert_eq!(n(zero), 0, "{zero} in {report}");
    }
    // It was not an easy run.
    assert!(n("failures_injected") > n("calls_received") / 5, "{report}");
    assert!(n("duplicates_absorbed") > 0, "{report}");
    assert_eq!(n("relay_kills"), 1);
    assert_eq!(n("receiver_restarts"), 1);
    assert_eq!(dir.entries(), [] as [PathBuf; 0], "the files are gone");
}

#[test]
fn every_cooked_book_is_noticed() {
    let cooked = [
        ("lost", ["effects", "lost", "stock"].as_slice()),
        ("twice", &["stock"]),
        ("phantom", &["messages", "effects", "phantom", "stock"]),
        ("order", &["order"]),
    ];
    let dir = Dir::new("cooked");
    let running = cooked.map(|(cook, expected)| {
        let mut command = dir.demo(&["--orders", "60", "--seed", "7", "--json", "--cook", cook]);
        (cook, expected, command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    });
    for (cook, expected, child) in running {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{cook}: {output:?}");
        let report = report(&output);
        assert_eq!(report["balanced"], false, "{cook}: {report}");
        let problems = report["problems"].as_array().unwrap();
        let books: Vec<_> = problems.iter().map(|p| p.as_str().unwrap().split(':').next().unwrap()).collect();
        assert_eq!(books, expected, "{cook}: {report}");
    }
}

#[test]
fn kept_files_can_be_looked_at() {
    let dir = Dir::new("kept");
    let output = dir.demo(&["--orders", "4", "--seed", "7", "--json", "--keep"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let files = PathBuf::from(report(&output)["files"].as_str().unwrap());
    assert_eq!(dir.entries(), std::slice::from_ref(&files));
    for file in ["shop.db", "inventory.db", "relay.log", "inventory.log"] {
        assert!(files.join(file).exists(), "{file}");
    }
}

#[test]
fn it_is_a_usage_error_to_place_no_orders() {
    let output = Dir::new("usage").demo(&["--orders", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// Ends of the parent; looked at through /proc.
#[cfg(target_os = "linux")]
mod ended {
    use std::io::{BufRead, BufReader};
    use std::process::Child;
    use std::time::{Duration, Instant};

    use super::*;

    /// Starts a demo and waits until its relay has been killed and replaced, so that all its processes run.
    fn busy(dir: &Dir) -> Child {
        let mut child = dir.demo(&["--seed", "7"]).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let seen = lines.any(|line| line.unwrap().contains("relay killed"));
        assert!(seen, "it ended before: {:?}", child.wait());
        // Goes on being read, or it would break on a closed pipe.
        std::thread::spawn(move || lines.for_each(drop));
        child
    }

    /// Processes that work in the directory.
    fn processes(dir: &Dir) -> Vec<String> {
        let dir = dir.0.to_str().unwrap();
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = all.filter_map(|p| std::fs::read(p.path().join("cmdline")).ok());
        lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(|line| line.contains(dir)).collect()
    }

    fn signal(name: &str, child: &Child) {
        assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
    }

    /// Relay and inventory. One of them may just be down: the demo kills them, too.
    fn wait_for_both(dir: &Dir) {
        let until = Instant::now() + Duration::from_secs(20);
        while processes(dir).len() != 2 {
            assert!(Instant::now() < until, "{:?}", processes(dir));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn interrupted_it_leaves_nothing() {
        for name in ["-INT", "-TERM"] {
            let dir = Dir::new(&format!("interrupted{name}"));
            let mut child = busy(&dir);
            wait_for_both(&dir);
            signal(name, &child);
            assert_eq!(child.wait().unwrap().code(), Some(130));
            assert_eq!(processes(&dir), [] as [String; 0]);
            assert_eq!(dir.entries(), [] as [PathBuf; 0]);
        }
    }

    #[test]
    fn its_children_do_not_outlive_it() {
        let dir = Dir::new("killed");
        let mut child = busy(&dir);
        wait_for_both(&dir);
        child.kill().unwrap();
        child.wait().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !processes(&dir).is_empty() {
            assert!(Instant::now() < until, "still there: {:?}", processes(&dir));
            // They aren't this process's children, so there is nothing to wait on.
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
