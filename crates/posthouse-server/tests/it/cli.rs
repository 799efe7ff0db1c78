//! The verbs, against PostgreSQL.

use serde_json::{Value, json};

use crate::support::{Dir, Schema, on_postgres, ph, posthouse, run, run_with_stdin};

/// A directory with a configuration and migrated tables.
fn migrated(rest: &str) -> (Dir, Schema) {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(rest));
    ph(&dir, &["migrate"]).code(0);
    (dir, schema)
}

const ORDERS: &str = "[routes.orders]\nto = \"https://orders.example/\"\n";

#[test]
fn migrate_tells_version_and_houses_and_can_run_again() {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(""));
    let sql = ph(&dir, &["migrate", "--print"]).code(0).stdout;
    assert!(sql.contains("CREATE TABLE") && sql.contains(&schema.name));
    let ran = ph(&dir, &["relay", "--check"]).code(2);
    assert!(ran.stderr.contains("posthouse migrate"), "{}", ran.stderr);
    for _ in 0..2 {
        let ran = ph(&dir, &["migrate"]).code(0);
        assert_eq!(ran.stdout, "main: schema version 5, 4 houses\n");
    }
    let told = ph(&dir, &["migrate", "--json"]).code(0).json();
    assert_eq!(told, json!({ "databases": [{ "database": "main", "schema_version": 5, "houses": 4 }] }));
}

#[test]
fn missing_tables_are_told_by_every_verb() {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(ORDERS));
    for args in [&["publish", "orders", "{}"][..], &["messages", "list"], &["houses", "list"], &["relay"], &["relay", "--check"]]
    {
        let ran = ph(&dir, args).code(2);
        assert!(ran.stderr.contains("run `posthouse migrate`"), "{args:?}: {}", ran.stderr);
    }
}

#[test]
fn what_is_published_can_be_listed_and_shown() {
    let (dir, _schema) = migrated(ORDERS);
    let id =
        ph(&dir, &["publish", "orders", "{\"a\":[1,2]}", "--key", "k1", "--type", "order.placed", "--header", "x=y=z"]).code(0);
    let id = id.stdout.trim().to_owned();
    let given = ph(&dir, &["publish", "orders", "plain", "--id", "my-id", "--in", "5m", "--max-attempts", "3"]).code(0);
    assert_eq!(given.stdout, "my-id\n");

    let all = ph(&dir, &["messages", "list", "--json"]).code(0).json();
    let rows = all["messages"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert_eq!((&rows[0]["message_id"], &rows[1]["message_id"]), (&json!("my-id"), &json!(id)), "newest first");
    assert_eq!(rows[1]["key"], "k1");
    let ran = ph(&dir, &["messages", "list"]).code(0);
    assert!(ran.stdout.starts_with("ROW") && ran.stdout.contains("PENDING") && ran.stdout.contains("in 4 min"), "{}", ran.stdout);

    let count = |args: &[&str]| {
        let all: Vec<&str> = ["messages", "list", "--json"].iter().chain(args).copied().collect();
        ph(&dir, &all).code(0).json()["messages"].as_array().unwrap().len()
    };
    assert_eq!(count(&["--key", "k1"]), 1);
    assert_eq!(count(&["--id", "my-id"]), 1);
    assert_eq!(count(&["--status", "failed"]), 0);
    assert_eq!(count(&["--destination", "other"]), 0);
    assert_eq!(count(&["--limit", "1"]), 1);
    let row = rows[0]["id"].to_string();
    assert_eq!(count(&["--before", &row]), 1);

    for name in [&id, &rows[1]["id"].to_string()] {
        let ran = ph(&dir, &["messages", "show", name]).code(0);
        for text in [&id, "order.placed", "k1", "  x: y=z", "\"a\": [", "application/json"] {
            assert!(ran.stdout.contains(text), "{text}: {}", ran.stdout);
        }
    }
    let shown = ph(&dir, &["messages", "show", &id, "--json"]).code(0).json();
    assert_eq!(shown["payload"], json!({ "a": [1, 2] }));
    assert_eq!(shown["headers"], json!({ "x": "y=z" }).to_string(), "as stored");
    // Laid out otherwise and with keys in another order than a parser would give.
    ph(&dir, &["publish", "orders", "{\"z\":1.00,\t\"a\":[ ]}", "--id", "raw"]).code(0);
    assert!(ph(&dir, &["messages", "show", "raw"]).stdout.contains("{\n    \"z\": 1.00,\n    \"a\": []\n  }"));
    let ran = ph(&dir, &["messages", "show", "raw", "--json"]).code(0);
    assert!(ran.stdout.contains("\"z\":1.00") && ran.json()["payload"] == json!({ "z": 1.0, "a": [] }), "{}", ran.stdout);
    let ran = ph(&dir, &["messages", "show", "nope"]).code(1);
    assert!(ran.stderr.contains("no message \"nope\""), "{}", ran.stderr);
}

#[test]
fn a_payload_comes_from_stdin_byte_for_byte_and_is_shown_cut() {
    let (dir, _schema) = migrated(ORDERS);
    let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
    let ran = run_with_stdin(posthouse(&dir).args(["publish", "orders", "-", "--id", "binary"]), &bytes).code(0);
    assert_eq!(ran.stdout, "binary\n");
    let shown = ph(&dir, &["messages", "show", "binary"]).code(0).stdout;
    assert!(shown.contains("000000  00 01 02") && shown.contains("--full shows all") && !shown.contains('\x1b'), "{shown}");
    let shown = ph(&dir, &["messages", "show", "binary", "--json", "--full"]).code(0).json();
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(
        (&shown["payload"], &shown["payload_encoding"], &shown["payload_cut"]),
        (&json!(hex), &json!("hex"), &json!(false))
    );
}

#[test]
fn nothing_in_a_message_steers_the_terminal() {
    let (dir, _schema) = migrated("");
    let evil = "\u{1b}[2J\u{9b}31m\u{202e}";
    let destination = format!("https://x.example/{evil}");
    let header = format!("h{evil}={evil}");
    let id = format!("id{evil}");
    ph(&dir, &["publish", &destination, evil, "--key", evil, "--type", evil, "--header", &header, "--id", &id]).code(0);
    for args in [
        &["messages", "list"][..],
        &["messages", "list", "--json"],
        &["messages", "show", &id],
        &["messages", "show", &id, "--json"],
        &["messages", "requeue", evil],
        &["messages", "requeue", "--all", "--status", "FAILED", "--destination", evil, "--json"],
    ] {
        let ran = ph(&dir, args);
        let all = format!("{}{}", ran.stdout, ran.stderr);
        assert!(!all.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{args:?}: {all:?}");
    }
    let told = ph(&dir, &["messages", "list", "--json"]).code(0).json();
    assert_eq!(told["messages"][0]["message_id"], id, "escaped, not changed");
}

#[test]
fn a_dedup_key_publishes_once() {
    let (dir, _schema) = migrated(ORDERS);
    for _ in 0..2 {
        let ran = ph(&dir, &["publish", "orders", "{}", "--dedup-key", "once"]).code(0);
        assert_eq!(ran.stdout, "once\n");
    }
    assert_eq!(ph(&dir, &["messages", "list", "--json"]).code(0).json()["messages"].as_array().unwrap().len(), 1);
}

#[test]
fn a_destination_that_leads_nowhere_is_refused() {
    let (dir, _schema) = migrated(ORDERS);
    let ran = ph(&dir, &["publish", "ordres", "{}"]).code(2);
    assert!(ran.stderr.contains("did you mean \"orders\"?"), "{}", ran.stderr);
    ph(&dir, &["publish", "kafka:x", "{}"]).code(2);
    ph(&dir, &["publish", "ordres", "{}", "--any-destination"]).code(0);
    ph(&dir, &["publish", "https://x.example/", "{}"]).code(0);
    let ran = ph(&dir, &["publish", "orders", "{}", "--key", "k", "--in", "5m"]).code(2);
    assert!(ran.stderr.contains("can't be combined with a key"), "{}", ran.stderr);
}

#[test]
fn messages_are_skipped_requeued_and_edited() {
    let (dir, _schema) = migrated(ORDERS);
    for id in ["a", "b", "c"] {
        ph(&dir, &["publish", "orders", "{}", "--id", id]).code(0);
    }
    let status = |id: &str| -> Value { ph(&dir, &["messages", "show", id, "--json"]).code(0).json()["status"].clone() };
    let ran = ph(&dir, &["messages", "skip", "a", "--actor", "mia"]).code(0);
    assert_eq!(ran.stdout, "skipped 1 message\n");
    assert_eq!(status("a"), "FAILED");
    assert!(ph(&dir, &["messages", "show", "a"]).stdout.contains("skipped by mia"));
    // A fresh message waits for no retry, so there is nothing to requeue.
    let ran = ph(&dir, &["messages", "requeue", "b"]).code(1);
    assert!(ran.stderr.contains("only FAILED messages"), "{}", ran.stderr);
    let told = ph(&dir, &["messages", "requeue", "a", "b", "--yes", "--json"]).code(1).json();
    assert_eq!((told["changed"].as_array().unwrap().len(), told["unchanged"].as_array().unwrap().len()), (1, 1));
    assert_eq!(status("a"), "PENDING");

    let ran = ph(&dir, &["messages", "edit", "c", "--destination", "nowhere"]).code(2);
    assert!(ran.stderr.contains("--any-destination"), "{}", ran.stderr);
    ph(&dir, &["messages", "edit", "c", "--destination", "https://other.example/"]).code(0);
    assert_eq!(ph(&dir, &["messages", "show", "c", "--json"]).json()["destination"], "https://other.example/");
}

#[test]
fn bulk_work_goes_through_all_pages_and_asks_first() {
    let (dir, schema) = migrated(ORDERS);
    // More than one page, published as plain SQL does it.
    let sql = format!(
        "INSERT INTO \"{}\".posthouse_message (message_id, type, destination, payload, content_type) \
         SELECT 'm' || n, '', CASE WHEN n <= 1100 THEN 'orders' ELSE 'other' END, '', 'text/plain' FROM generate_series(1, 1103) n",
        schema.name
    );
    on_postgres(&schema.url, sql);
    let ran = ph(&dir, &["messages", "skip", "--all", "--status", "PENDING"]).code(2);
    assert!(ran.stderr.contains("give --yes"), "{}", ran.stderr);
    let ran = ph(&dir, &["messages", "skip", "--all", "--status", "PENDING", "--destination", "orders", "--yes"]).code(0);
    assert_eq!(ran.stdout, "skipped 1100 messages\n");
    let told = ph(&dir, &["messages", "requeue", "--all", "--status", "FAILED", "--yes", "--json"]).code(0).json();
    assert_eq!(told, json!({ "action": "requeue", "changed": 1100, "unchanged": 0 }));
    let ran = ph(&dir, &["messages", "requeue", "--all", "--status", "FAILED", "--destination", "order", "--yes"]).code(1);
    assert!(ran.stderr.contains("did you mean \"orders\"?"), "{}", ran.stderr);
    ph(&dir, &["messages", "requeue", "--all", "--status", "SENT", "--yes"]).code(2);
    ph(&dir, &["messages", "requeue", "--all", "--yes"]).code(2);
    ph(&dir, &["messages", "requeue", "1", "--all", "--status", "FAILED"]).code(2);
    ph(&dir, &["messages", "requeue", "1", "--status", "FAILED"]).code(2);
    ph(&dir, &["messages", "requeue"]).code(2);
}

#[test]
fn houses_are_listed_in_runs_and_resized() {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(ORDERS).replace("houses = 4\n", ""));
    ph(&dir, &["migrate"]).code(0);
    ph(&dir, &["publish", "orders", "{}"]).code(0);
    let ran = ph(&dir, &["houses", "list"]).code(0);
    assert!(ran.stdout.contains("0-63") && ran.stdout.contains("64 houses, 1 pending, 0 live owners"), "{}", ran.stdout);
    let ran = ph(&dir, &["houses", "resize", "8"]).code(2);
    assert!(ran.stderr.contains("give --yes"), "{}", ran.stderr);
    let ran = ph(&dir, &["houses", "resize", "8", "--yes"]).code(0);
    assert_eq!(ran.stdout, "main: 8 houses, 1 pending message re-housed\n");
    let told = ph(&dir, &["houses", "list", "--json"]).code(0).json();
    assert_eq!(told["houses"].as_array().unwrap().len(), 8);
    ph(&dir, &["houses", "resize", "0", "--yes"]).code(2);
    // A configuration that expects another number is told, before anything starts.
    dir.write("posthouse.toml", &schema.config(ORDERS));
    let ran = ph(&dir, &["relay", "--check"]).code(2);
    assert!(ran.stderr.contains("houses = 4, the database has 8"), "{}", ran.stderr);
}

#[test]
fn check_tells_what_would_run() {
    let (dir, _schema) = migrated(ORDERS);
    let ran = ph(&dir, &["relay", "--check"]).code(0);
    for text in [
        "lease          20s",
        "main",
        "orders",
        "https://orders.example/",
        "ok: 1 database and 1 route; one instance uses 8 connections",
    ] {
        assert!(ran.stdout.contains(text), "{text}: {}", ran.stdout);
    }
    let told = ph(&dir, &["relay", "--check", "--json"]).code(0).json();
    assert_eq!((&told["ok"], &told["databases"][0]["houses"]), (&json!(true), &json!(4)));
}

#[test]
fn exit_codes_tell_scripts_what_happened() {
    let dir = Dir::new();
    // Port 1 is nobody's, so the connection is refused at once.
    let gone = "postgres://u:hunter2@127.0.0.1:1/db";
    for args in [
        &["migrate"][..],
        &["publish", "https://x.example/", "{}"],
        &["messages", "list"],
        &["houses", "list"],
        &["relay", "--check"],
        &["relay", "--check", "--json"],
    ] {
        let ran = run(posthouse(&dir).args(args).args(["--database", gone])).code(3);
        assert!(ran.stderr.contains("can't be reached") && ran.stderr.contains("efused"), "{args:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("hunter2") && !ran.stdout.contains("hunter2"));
    }
    let told = run(posthouse(&dir).args(["messages", "list", "--json", "--database", gone])).code(3).json();
    assert_eq!(told["error"]["kind"], "unreachable");
    ph(&dir, &["nonsense"]).code(2);
    ph(&dir, &["--version"]).code(0);
    ph(&dir, &["--help"]).code(0);
    let schema = Schema::new();
    let mut url = url::Url::parse(&schema.url).unwrap();
    url.set_path("/no_such_database_here");
    ph(&dir, &["messages", "list", "--database", url.as_str()]).code(2);
}
