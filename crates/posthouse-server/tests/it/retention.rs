//! `posthouse retention`, and the relay that does it by itself.

use serde_json::{Value, json};

use crate::support::{Client, Dir, Running, Schema, on_postgres, ph, posthouse, run, wait_for};

const OPEN: &str = "\n[routes.orders]\nto = \"https://orders.example/\"\n";

/// `sent` messages that were delivered long ago, and one that never was.
fn old(dir: &Dir, schema: &Schema, sent: usize) {
    for n in 0..=sent {
        ph(dir, &["publish", "orders", &n.to_string()]).code(0);
    }
    let t = |name: &str| format!("\"{}\".posthouse_{name}", schema.name);
    let first = format!("(SELECT max(id) FROM {})", t("message"));
    on_postgres(
        &schema.url,
        format!(
            "DELETE FROM {} WHERE id < {first}; UPDATE {} SET created_at = '2000-01-01'; \
             UPDATE {} SET status = 'FAILED', due_at = '9999-12-31'",
            t("pending"),
            t("message"),
            t("pending")
        ),
    );
}

fn of(ran: &Value) -> &Value {
    &ran["databases"][0]
}

#[test]
fn what_is_over_its_term_goes_and_can_be_looked_at() {
    let (dir, schema) = (Dir::new(), Schema::new());
    let archive = dir.path().join("old");
    dir.write("posthouse.toml", &schema.config(OPEN));
    ph(&dir, &["migrate"]).code(0);
    old(&dir, &schema, 3);
    let ran = ph(&dir, &["retention", "run"]).code(2);
    assert!(ran.stderr.contains("nothing is ever removed"), "{}", ran.stderr);
    let ran = ph(&dir, &["retention", "status"]).code(0);
    assert!(ran.stdout.contains("there is no [retention]") && ran.stdout.contains("current"), "{}", ran.stdout);

    let settings = format!("{OPEN}[retention]\nsent = \"7d\"\narchive = \"file://{}\"\n", archive.display());
    dir.write("posthouse.toml", &schema.config(&settings));
    let told = ph(&dir, &["retention", "run", "--dry-run", "--json"]).code(0).json();
    assert_eq!((&of(&told)["removed"], &of(&told)["messages_are_estimated"]), (&json!(3), &json!(false)));
    let ran = ph(&dir, &["retention", "run", "--dry-run"]).code(0);
    assert!(ran.stdout.contains("main: 3 messages would go one by one"), "{}", ran.stdout);
    assert!(!archive.exists(), "looking writes nothing");

    let ran = ph(&dir, &["retention", "run"]).code(0);
    assert!(ran.stdout.contains("main: 3 messages went one by one"), "{}", ran.stdout);
    let ran = ph(&dir, &["retention", "run"]).code(0);
    assert_eq!(ran.stdout, "main: nothing is over its term\n");
    let left = ph(&dir, &["messages", "list", "--json"]).code(0).json();
    assert_eq!((left["messages"].as_array().unwrap().len(), &left["messages"][0]["status"]), (1, &json!("FAILED")));

    let told = ph(&dir, &["retention", "status", "--json"]).code(0).json();
    let file = &of(&told)["archives"][0];
    assert_eq!(
        (&file["amount"], &of(&told)["sent"], &of(&told)["partitions"][0]["current"]),
        (&json!(3), &json!("7days"), &json!(true))
    );
    let path = file["location"].as_str().unwrap().strip_prefix("file://").unwrap().to_owned();
    let ran = ph(&dir, &["retention", "verify"]).code(0);
    assert_eq!(ran.stdout, "main: 1 of 1 file as written, with 3 messages\n");
    std::fs::write(&path, "something else").unwrap();
    let ran = ph(&dir, &["retention", "verify", "--json"]).code(1);
    assert!(of(&ran.json())["files"][0]["problem"].as_str().unwrap().contains("checksum"), "{}", ran.stdout);

    // An archive that can't be written keeps everything.
    old(&dir, &schema, 1);
    std::fs::remove_dir_all(&archive).unwrap();
    std::fs::write(&archive, "in the way").unwrap();
    let ran = ph(&dir, &["retention", "run"]).code(1);
    assert!(ran.stderr.contains("can't be written"), "{}", ran.stderr);
    let left = ph(&dir, &["messages", "list", "--json"]).code(0).json();
    assert_eq!(left["messages"].as_array().unwrap().len(), 3);
}

#[test]
fn the_relay_does_it_by_itself() {
    let (dir, schema) = (Dir::new(), Schema::new());
    let rest = format!(
        "{OPEN}[server]\nlisten = \"127.0.0.1:0\"\n[databases.main.retention]\nevery = \"1s\"\n[retention]\nsent = \"1h\"\n\
         archive = \"file://{}\"\n",
        dir.path().join("old").display()
    );
    dir.write("posthouse.toml", &schema.config(&rest));
    ph(&dir, &["migrate"]).code(0);
    old(&dir, &schema, 2);
    let relay = Running::start(&mut posthouse(&dir));
    let left = wait_for("old messages to go", || {
        let left = ph(&dir, &["messages", "list", "--json"]).code(0).json();
        Some(left["messages"].as_array().unwrap().len()).filter(|n| *n < 3)
    });
    assert_eq!(left, 1);

    // The API and the page show it.
    let client = Client::new(&relay.address);
    let url = "/api/v1/databases/main/retention";
    let told = wait_for("the file to be told", || {
        let told = client.get(url).status(200).json();
        told["files"][0]["removed_ms"].is_i64().then_some(told)
    });
    let of = |field: &str| told[field].clone();
    assert_eq!((of("configured"), of("sent_seconds"), of("next_before")), (json!(true), json!(3600), Value::Null));
    assert_eq!((&told["partitions"][0]["next"], &of("retired")), (&json!("current"), &json!([])));
    let messages: i64 = told["files"].as_array().unwrap().iter().map(|f| f["messages"].as_i64().unwrap()).sum();
    assert_eq!(messages, 2, "{told}");
    let first = client.get(&format!("{url}?limit=1")).status(200).json();
    let behind = client.get(&format!("{url}?limit=1&before={}", first["next_before"])).status(200).json();
    assert_eq!(behind["files"].as_array().unwrap().len(), told["files"].as_array().unwrap().len() - 1, "{behind}");
    client.get(&format!("{url}?limit=0")).status(400);
    client.get("/api/v1/databases/other/retention").status(404);
    let page = client.get("/retention").status(200).text;
    let location = told["files"][0]["location"].as_str().unwrap();
    for text in [location, "1h", "for ever", "current", "None yet."] {
        assert!(page.contains(text), "{text}: {page}");
    }
}

#[test]
fn a_database_says_what_is_different_and_secrets_are_not_shown() {
    let dir = Dir::new();
    dir.write(
        "posthouse.toml",
        "[databases.a]\nurl = \"postgres://u@h/a\"\n[databases.b]\nurl = \"postgres://u@h/b\"\n\
         [databases.b.retention]\nsent = \"never\"\ndedup = \"9d\"\n\
         [retention]\nsent = \"2d\"\narchive = \"s3://b/p\"\n[retention.s3]\naccess_key = \"AKIA1\"\nsecret_key = \"hunter2\"\n",
    );
    let ran = ph(&dir, &["relay", "--print-config", "--json"]).code(0);
    assert!(!ran.stdout.contains("hunter2") && !ran.stdout.contains("AKIA1"), "{}", ran.stdout);
    let (a, b) = (&ran.json()["databases"]["a"]["retention"], &ran.json()["databases"]["b"]["retention"]);
    assert_eq!((&a["sent"], &a["dedup"], &a["archive"]), (&json!("2days"), &json!("30days"), &json!("s3://b/p")));
    assert_eq!(
        (&b["sent"], &b["dedup"], &b["receipts"], &b["archive"]),
        (&json!("never"), &json!("9days"), &json!("never"), &json!("s3://b/p"))
    );

    dir.write(
        "posthouse.toml",
        "[databases.a]\nurl = \"postgres://u@h/a\"\n[retention]\nsent = \"0s\"\nevery = \"soon\"\narchive = \"/tmp\"\nformt = 1\n",
    );
    let ran = run(posthouse(&dir).args(["relay", "--print-config"])).code(2);
    for path in ["retention.sent", "retention.every", "retention.archive", "retention.formt"] {
        assert!(ran.stderr.contains(path), "{path} is missing: {}", ran.stderr);
    }
}
