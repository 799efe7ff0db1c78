//! `peers`: what it measures is there, of each, and every message arrived. Foreign ones only with `POSTHOUSE_SOAK`.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn peers(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthouse-bench"));
    command.args(["peers", "--json"]).args(arguments).stdin(Stdio::null());
    command.output().expect("it runs")
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}", output.status);
    println!("{said}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn check(report: &Value, names: &[&str], messages: f64) {
    let rows = report["rows"].as_array().expect("rows");
    let what: Vec<_> = rows.iter().filter_map(|row| row["what"].as_str()).collect();
    assert_eq!(what, names, "skipped: {}", report["skipped"]);
    for row in rows {
        let figure = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert!(figure("messages") >= messages, "{row}");
        for name in ["drain", "sustained", "transaction_alone_us", "transaction_with_us", "p50", "rate"] {
            assert!(figure(name) > 0.0, "{name} in {row}");
        }
        assert!(figure("p50") <= figure("p99"), "{row}");
    }
    let about: Vec<_> = report["about"].as_array().expect("about").iter().filter_map(|row| row["peer"].as_str()).collect();
    assert_eq!(about, names);
}

#[test]
fn posthouse_and_the_plain_loop_are_measured_alike() {
    let report = report(&peers(&["-n", "20", "--only", "posthouse,skip-locked", "--seconds", "1", "--idle", "1"]));
    // 20 in comparing transactions, 20 of a backlog, 20 beside the sender, and a load.
    check(&report, &["posthouse", "skip-locked"], 61.0);
}

#[test]
fn every_peer_delivers_everything() {
    if std::env::var_os("POSTHOUSE_SOAK").is_none() {
        return;
    }
    let report = report(&peers(&["-n", "200", "--seconds", "2", "--idle", "2"]));
    let all = ["posthouse", "skip-locked", "graphile-worker", "pg-boss", "river", "gruelbox", "namastack", "debezium"];
    check(&report, &all, 601.0);
}

#[test]
fn only_postgresql_is_measured() {
    let output = peers(&["--database", "mysql"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("peers: only PostgreSQL is measured"), "{output:?}");
}
