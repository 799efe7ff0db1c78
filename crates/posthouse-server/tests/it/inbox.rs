//! What consumers received, against PostgreSQL.

use serde_json::{Value, json};

use crate::support::{Client, Dir, Running, Schema, on_postgres, ph, posthouse, run, wait_for};

/// Migrated tables with one message of each kind, and what `rest` adds.
fn received(rest: &str) -> (Dir, Schema) {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(""));
    ph(&dir, &["migrate"]).code(0);
    let table = format!("\"{}\".posthouse_inbox", schema.name);
    let far = "'9999-12-31 00:00Z'";
    let rows = format!(
        r#"INSERT INTO {table} (consumer, message_id, status, type, source, headers, payload, content_type, attempts, claims, next_attempt_at, last_error, success_at) VALUES
        ('billing', 'done', 'SUCCESS', 'order.placed', NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, now()),
        ('inventory', 'done', 'SUCCESS', 'order.placed', NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, now()),
        ('inventory', 'failed', 'FAILED', 'order.placed', '{{"from":"rabbitmq","exchange":"orders","routing_key":"eu"}}', '{{"tenant":"acme"}}',
            convert_to('{{"z":1.00,"a":[ ]}}', 'UTF8'), 'application/json', 5, 0, {far}, 'out of stock', NULL),
        ('inventory', 'odd', 'FAILED', 'odd', NULL, NULL, '\x1b5b324aff', 'application/octet-stream', 1, 3, {far}, 'bad bytes', NULL),
        ('inventory', 'waiting', 'PENDING_RETRY', 'order.placed', NULL, NULL, '7', 'application/json', 1, 0, now() + interval '5 minutes', 'busy', NULL)"#
    );
    on_postgres(&schema.url, rows);
    if !rest.is_empty() {
        on_postgres(&schema.url, rest.replace("{inbox}", &table));
    }
    (dir, schema)
}

fn ids(list: &Value) -> Vec<String> {
    let rows = list["messages"].as_array().unwrap();
    rows.iter().map(|r| format!("{}/{}", r["consumer"].as_str().unwrap(), r["message_id"].as_str().unwrap())).collect()
}

#[test]
fn what_was_received_is_listed_filtered_and_paged() {
    let (dir, _schema) = received("");
    let list = |args: &[&str]| {
        let all: Vec<&str> = ["inbox", "list", "--json"].iter().chain(args).copied().collect();
        ph(&dir, &all).code(0).json()
    };
    let all = ["billing/done", "inventory/done", "inventory/failed", "inventory/odd", "inventory/waiting"];
    assert_eq!(ids(&list(&[])), all);
    assert_eq!(ids(&list(&["--consumer", "inventory"])), all[1..]);
    assert_eq!(ids(&list(&["--status", "pending_retry"])), all[4..]);
    assert_eq!(ids(&list(&["--type", "odd", "--status", "FAILED"])), all[3..4]);
    assert_eq!(ids(&list(&["--consumer", "nobody"])), [""; 0]);
    let page = list(&["--limit", "2"]);
    assert_eq!(
        (ids(&page), &page["next_after"]),
        (all[..2].iter().map(|s| (*s).to_owned()).collect(), &json!(["inventory", "done"]))
    );
    assert_eq!(ids(&list(&["--after", "inventory", "done"])), all[2..]);
    assert_eq!(list(&["--limit", "9"])["next_after"], json!(null));

    let ran = ph(&dir, &["inbox", "list"]).code(0);
    assert!(ran.stdout.starts_with("MESSAGE ID") && ran.stdout.contains("CONSUMER"), "{}", ran.stdout);
    assert!(
        ran.stdout.contains("out of stock") && ran.stdout.contains("in 4 min") && ran.stdout.contains("1+3"),
        "{}",
        ran.stdout
    );
    let ran = ph(&dir, &["inbox", "list", "--limit", "1", "--consumer", "inventory"]).code(0);
    assert!(
        ran.stdout.starts_with("received by inventory\nMESSAGE ID") && ran.stdout.contains("--after inventory done"),
        "{}",
        ran.stdout
    );
    assert_eq!(ph(&dir, &["inbox", "list", "--consumer", "nobody"]).code(0).stdout, "no messages\n");
    ph(&dir, &["inbox", "list", "--status", "SENT"]).code(2);
    ph(&dir, &["inbox", "list", "--after", "inventory"]).code(2);
    ph(&dir, &["inbox", "list", "--limit", "0"]).code(2);
}

#[test]
fn one_message_is_shown_with_all_that_is_kept() {
    let (dir, _schema) = received("");
    let shown = ph(&dir, &["inbox", "show", "failed"]).code(0).stdout;
    for text in [
        "consumer:     inventory",
        "status:       FAILED",
        "source:       rabbitmq: exchange orders, routing key eu",
        "attempts:     5",
        "last error:   out of stock",
        "  tenant: acme",
        "  {\n    \"z\": 1.00,\n    \"a\": []\n  }",
    ] {
        assert!(shown.contains(text), "{text}: {shown}");
    }
    let told = ph(&dir, &["inbox", "show", "failed", "--json"]).code(0);
    assert!(told.stdout.contains("\"z\":1.00"), "{}", told.stdout);
    let told = told.json();
    assert_eq!((&told["payload_encoding"], &told["payload"]["a"]), (&json!("json"), &json!([])));
    assert_eq!((&told["status"], &told["consumer"]), (&json!("FAILED"), &json!("inventory")));
    let odd = ph(&dir, &["inbox", "show", "odd"]).code(0).stdout;
    assert!(odd.contains("000000  1b 5b 32 4a ff") && !odd.contains('\x1b') && odd.contains("claims:       3"), "{odd}");
    assert_eq!(ph(&dir, &["inbox", "show", "odd", "--json"]).code(0).json()["payload"], "1b5b324aff");

    let ran = ph(&dir, &["inbox", "show", "done"]).code(1);
    assert!(ran.stderr.contains("choose one with --consumer: billing, inventory"), "{}", ran.stderr);
    let shown = ph(&dir, &["inbox", "show", "done", "--consumer", "billing"]).code(0).stdout;
    assert!(shown.contains("status:       SUCCESS") && shown.contains("no payload"), "{shown}");
    assert_eq!(ph(&dir, &["inbox", "show", "done", "--consumer", "billing", "--json"]).code(0).json().get("payload"), None);
    let ran = ph(&dir, &["inbox", "show", "nope"]).code(1);
    assert!(ran.stderr.contains("has received a message \"nope\""), "{}", ran.stderr);
    let ran = ph(&dir, &["inbox", "show", "failed", "--consumer", "inventroy"]).code(1);
    assert!(ran.stderr.contains("did you mean \"inventory\"?"), "{}", ran.stderr);
}

#[test]
fn messages_are_requeued_and_skipped() {
    let (dir, _schema) = received("");
    let shown = |id: &str| ph(&dir, &["inbox", "show", id, "--consumer", "inventory", "--json"]).code(0).json();
    let ran = ph(&dir, &["inbox", "requeue", "failed", "--actor", "mia"]).code(0);
    assert_eq!(ran.stdout, "requeued 1 message\n");
    assert_eq!((&shown("failed")["status"], &shown("failed")["attempts"]), (&json!("PENDING_RETRY"), &json!(0)));
    let ran = ph(&dir, &["inbox", "skip", "waiting", "--actor", "mia"]).code(0);
    assert_eq!(ran.stdout, "skipped 1 message\n");
    assert_eq!(shown("waiting")["last_error"], "busy; skipped by mia");
    // What is done stays done.
    let ran = ph(&dir, &["inbox", "requeue", "done", "--consumer", "inventory"]).code(1);
    assert!(ran.stderr.contains("left as they are: done; only FAILED messages"), "{}", ran.stderr);
    let ran = ph(&dir, &["inbox", "requeue", "done"]).code(1);
    assert!(ran.stderr.contains("choose one with --consumer"), "{}", ran.stderr);
    let ran = ph(&dir, &["inbox", "skip", "odd", "failed"]).code(2);
    assert!(ran.stderr.contains("give --yes"), "{}", ran.stderr);
    let told = ph(&dir, &["inbox", "skip", "odd", "done", "--consumer", "inventory", "--yes", "--json"]).code(1).json();
    assert_eq!((&told["changed"], &told["unchanged"]), (&json!(["odd"]), &json!(["done"])));
    ph(&dir, &["inbox", "requeue", "nope"]).code(1);
    ph(&dir, &["inbox", "requeue"]).code(2);
    ph(&dir, &["inbox", "requeue", "odd", "--status", "FAILED"]).code(2);
    ph(&dir, &["inbox", "requeue", "odd", "--all", "--status", "FAILED"]).code(2);
}

#[test]
fn bulk_work_goes_through_all_pages_and_asks_first() {
    // More than one page of each of two consumers.
    let (dir, _schema) = received(
        "INSERT INTO {inbox} (consumer, message_id, status, type, payload, next_attempt_at) \
         SELECT CASE WHEN n <= 700 THEN 'billing' ELSE 'orders' END, 'm' || n, 'FAILED', CASE WHEN n % 2 = 0 THEN 'even' ELSE 'odd' END, '7', \
                '9999-12-31 00:00Z' FROM generate_series(1, 1300) n",
    );
    let all = ["inbox", "requeue", "--all", "--status", "failed"];
    let with = |args: &[&'static str]| ph(&dir, &[&all[..], args].concat());
    let ran = with(&[]).code(2);
    assert!(ran.stderr.contains("give --yes"), "{}", ran.stderr);
    let ran = with(&["--consumer", "billing", "--type", "even", "--yes"]).code(0);
    assert_eq!(ran.stdout, "requeued 350 messages\n");
    let told = with(&["--consumer", "billing", "--yes", "--json"]).code(0).json();
    assert_eq!(told, json!({ "action": "requeue", "changed": 350, "unchanged": 0 }));
    assert_eq!(with(&["--yes"]).code(0).stdout, "requeued 602 messages\n");
    assert_eq!(with(&["--yes"]).code(0).stdout, "requeued 0 messages\n");
    let ran = ph(&dir, &["inbox", "skip", "--all", "--status", "PENDING_RETRY", "--type", "odd", "--yes"]).code(0);
    assert_eq!(ran.stdout, "skipped 651 messages\n");
    let ran = with(&["--consumer", "order", "--yes"]).code(1);
    assert!(ran.stderr.contains("did you mean \"orders\"?"), "{}", ran.stderr);
    ph(&dir, &["inbox", "skip", "--all", "--status", "SUCCESS", "--yes"]).code(2);
    ph(&dir, &["inbox", "requeue", "--all", "--status", "RETRYING", "--yes"]).code(2);
    ph(&dir, &["inbox", "requeue", "--all", "--yes"]).code(2);
}

#[test]
fn the_api_shows_and_acts_on_what_was_received() {
    let (dir, schema) = received(
        "INSERT INTO {inbox} (consumer, message_id, status, type, payload, next_attempt_at) \
         SELECT 'orders', 'm' || n, 'FAILED', 'even', '7', '9999-12-31 00:00Z' FROM generate_series(1, 30) n",
    );
    dir.write(
        "posthouse.toml",
        &schema
            .config("\n[server]\nlisten = \"127.0.0.1:0\"\ntoken = \"0123456789abcdef\"\nviewer_token = \"fedcba9876543210\"\n"),
    );
    let relay = Running::start(&mut posthouse(&dir));
    let client = Client::new(&relay.address).bearer("0123456789abcdef").with("x-actor", "mia");
    let url = "/api/v1/databases/main/inbox";

    let page = client.get(&format!("{url}?limit=2")).status(200).json();
    assert_eq!(
        (ids(&page), &page["next_after"]),
        (vec!["billing/done".to_owned(), "inventory/done".into()], &json!({ "consumer": "inventory", "message_id": "done" }))
    );
    let next = client.get(&format!("{url}?limit=2&after_consumer=inventory&after_id=done")).status(200).json();
    assert_eq!(ids(&next), ["inventory/failed", "inventory/odd"]);
    for wrong in ["?after_consumer=inventory", "?limit=0", "?status=SENT", "?within_ms=0", "?colour=red"] {
        client.get(&format!("{url}{wrong}")).status(400);
    }
    let found = client.get(&format!("{url}?text=out+of+stock")).status(200).json();
    assert_eq!(ids(&found), ["inventory/failed"]);
    let count = |filter: &str| client.get(&format!("{url}/count?{filter}")).status(200).json();
    assert_eq!(count("status=FAILED&consumer=orders"), json!({ "messages": 30, "more": false }));

    let shown = client.get(&format!("{url}/inventory/failed")).status(200).json();
    assert_eq!((&shown["status"], &shown["payload"]["form"], &shown["attempts"]), (&json!("FAILED"), &json!("json"), &json!(5)));
    let raw = client.get(&format!("{url}/inventory/failed/payload")).status(200);
    assert_eq!((raw.text.as_str(), raw.header("content-type")), ("{\"z\":1.00,\"a\":[ ]}", "application/octet-stream"));
    client.get(&format!("{url}/inventory/done/payload")).status(404);
    client.get(&format!("{url}/inventory/nope")).status(404);

    let act = |verb: &str, ids: Value| client.post(&format!("{url}/{verb}"), &json!({ "consumer": "inventory", "ids": ids }));
    let changed = act("requeue", json!(["failed", "done"])).status(200).json();
    assert_eq!((&changed["changed"], &changed["unchanged"]), (&json!(["failed"]), &json!(["done"])));
    let changed = act("skip", json!(["waiting"])).status(200).json();
    assert_eq!(changed["changed"], json!(["waiting"]));
    act("requeue", json!([])).status(400);
    let shown = client.get(&format!("{url}/inventory/waiting")).json();
    assert_eq!((&shown["status"], &shown["last_error"]), (&json!("FAILED"), &json!("busy; skipped by mia (token)")));
    let viewer = Client::new(&relay.address).bearer("fedcba9876543210");
    viewer.post(&format!("{url}/skip"), &json!({ "consumer": "inventory", "ids": ["odd"] })).status(403);
    viewer.get(&format!("{url}/inventory/failed/payload")).status(403);

    let filter = json!({ "status": "FAILED", "consumer": "orders" });
    let bulk = |confirmed: Value| {
        client.post(&format!("{url}/bulk"), &json!({ "action": "requeue", "filter": filter, "confirmed": confirmed }))
    };
    client
        .post(&format!("{url}/bulk"), &json!({ "action": "requeue", "filter": {}, "confirmed": { "messages": 1 } }))
        .status(400);
    let started = bulk(json!({ "messages": 30 })).status(202).json();
    let ended = wait_for("it is done", || {
        let told = client.get(&format!("/api/v1/bulk/{}", started["id"])).status(200).json();
        told["finished"].as_bool().unwrap().then_some(told)
    });
    assert_eq!((&ended["changed"], &ended["error"]), (&json!(30), &Value::Null), "{ended}");
    assert_eq!(count("status=PENDING_RETRY&consumer=orders")["messages"], 30);
    let audit = client.get("/api/v1/databases/main/audit?actor=mia+(token)&limit=100").status(200).json();
    let actions: Vec<&str> = audit["lines"].as_array().unwrap().iter().filter_map(|l| l["action"].as_str()).collect();
    assert!(actions.iter().any(|a| a.contains("requeue")) && actions.iter().any(|a| a.contains("skip")), "{actions:?}");
}

#[test]
fn nothing_in_a_received_message_steers_the_terminal() {
    let (dir, _schema) = received(
        "INSERT INTO {inbox} (consumer, message_id, status, type, source, headers, payload, content_type, last_error, next_attempt_at) \
         SELECT e, e, 'FAILED', e, to_json(e), json_build_object(e, e), convert_to(e, 'UTF8'), e, e, '9999-12-31 00:00Z' \
           FROM (SELECT 'x' || chr(27) || '[2J' || chr(155) || '31m' || chr(8238)) AS t (e)",
    );
    let evil = "x\u{1b}[2J\u{9b}31m\u{202e}";
    for args in [
        &["inbox", "list"][..],
        &["inbox", "list", "--consumer", evil, "--limit", "1"],
        &["inbox", "list", "--json"],
        &["inbox", "show", evil],
        &["inbox", "show", evil, "--json"],
        &["inbox", "show", "failed", "--consumer", evil],
        &["inbox", "requeue", evil],
        &["inbox", "requeue", "nothing", evil, "--yes"],
        &["inbox", "skip", "done", "--consumer", evil],
    ] {
        let ran = ph(&dir, args);
        let all = format!("{}{}", ran.stdout, ran.stderr);
        assert!(!all.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{args:?}: {all:?}");
    }
}

#[test]
fn missing_tables_and_databases_are_told() {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(""));
    let ran = ph(&dir, &["inbox", "list"]).code(2);
    assert!(ran.stderr.contains("run `posthouse migrate`"), "{}", ran.stderr);
    // Port 1 is nobody's, so the connection is refused at once.
    let gone = "postgres://u:hunter2@127.0.0.1:1/db";
    let ran = run(posthouse(&dir).args(["inbox", "list", "--json", "--database", gone])).code(3);
    assert!(!ran.stderr.contains("hunter2") && ran.json()["error"]["kind"] == "unreachable", "{}", ran.stderr);
}
