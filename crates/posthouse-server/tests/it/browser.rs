//! The dashboard in a browser: each page and each action, on a large and a small screen, light and dark, with the keyboard.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Dir, Receiver, Running, Schema, on_postgres, ph, posthouse, wait_for};

/// Messages that are given up: enough for an action on all of them to be seen at work.
const FAILED: u32 = 2_000;

#[test]
fn every_page_and_every_action_in_a_browser() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser");
    assert!(
        here.join("node_modules").exists(),
        "Chromium and Playwright are missing; install them with: scripts/services browser"
    );
    let (dir, schema, receiver) = (Dir::new(), Schema::new(), Receiver::start());
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let databases = |more: &str, others: &str| {
        schema.config(&format!(
            "[databases.shop]\nurl = \"sqlite://shop.db\"\n{more}\n[transports.http]\nallow = [\"127.0.0.1\"]\n\
             [routes.orders]\nto = \"http://{}/\"\n[routes.invoices]\nto = \"http://{closed}/\"\n[routes.returns]\nto = \"http://{}/\"\n\
             [relay]\nidle_poll = \"50ms\"\n[server]\nlisten = \"127.0.0.1:0\"\ntrace_url = \"https://traces.example/{{trace_id}}\"\n\
             [[groups]]\nname = \"nightly\"\ndatabases = [\"main\"]\ntrigger = \"manual\"\n\
             [[groups]]\nname = \"always\"\ndatabases = [{others}]\n\
             [[alerts]]\nrule = \"outbox_failed\"\nthreshold = 1\nfor = \"0s\"\ninterval = \"1s\"\n",
            receiver.address, receiver.address
        ))
    };
    dir.write("posthouse.toml", &databases("", "\"shop\""));
    ph(&dir, &["migrate"]).code(0);
    on_postgres(&schema.url, rows(&schema.name));
    ph(&dir, &["--database", "shop", "publish", "invoices", "{\"invoice\":17}", "--key", "customer-9"]).code(0);
    ph(&dir, &["--database", "shop", "publish", "orders", "{\"order\":1}"]).code(0);
    // One that can't be reached, beside the two that work.
    dir.write(
        "posthouse.toml",
        &databases(&format!("[databases.gone]\nurl = \"postgres://u:hidden@{closed}/x\"\n"), "\"shop\", \"gone\""),
    );
    let relay = Running::start(&mut posthouse(&dir));
    wait_for("the message that can be delivered", || (receiver.seen().len() == 1).then_some(()));

    let shots = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("browser");
    std::fs::create_dir_all(&shots).unwrap();
    let chromium = std::env::var("POSTHOUSE_TEST_CHROMIUM").unwrap_or_else(|_| "/usr/bin/chromium".into());
    let walk = Command::new("node")
        .arg(here.join("walk.mjs"))
        .env("BASE", format!("http://{}", relay.address))
        .env("CHROMIUM", chromium)
        .env("SHOTS", &shots)
        .env("FAILED", FAILED.to_string())
        .env("POSTHOUSE", env!("CARGO_BIN_EXE_posthouse"))
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("node can't be started: {e}; install it, see CONTRIBUTING.md"));
    let said = format!("{}{}", String::from_utf8_lossy(&walk.stdout), String::from_utf8_lossy(&walk.stderr));
    assert!(walk.status.success(), "{said}\n{}", relay.log());
    println!("{said}");
}

/// What the pages show: messages in each state, with attempts, and what was received.
fn rows(schema: &str) -> String {
    let t = |table: &str| format!("\"{schema}\".posthouse_{table}");
    let (message, pending, attempt, inbox) = (t("message"), t("pending"), t("attempt"), t("inbox"));
    let headers = r#"{"tenant":"acme","traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#;
    format!(
        r#"INSERT INTO {message} (type, destination, message_key, payload, headers, created_at)
             SELECT 'order.returned', 'returns', 'order-' || n, convert_to('{{"order":' || n || ',"lines":[{{"sku":"A-1","amount":2}}],"note":"<script>alert(1)</script> مرحبا"}}', 'UTF8'),
                    '{headers}', now() - interval '3 hours' + n * interval '1 second' FROM generate_series(1, {FAILED}) n;
           UPDATE {pending} SET status = 'FAILED', due_at = '9999-12-31', attempts = 3, last_error = 'HTTP 422 from http://returns.internal/: {{"error":"unknown SKU A-1"}}';
           INSERT INTO {attempt} (row_id, attempt, at, instance, outcome, error, response, took_ms)
             SELECT id, a, now() - interval '2 hours' + a * interval '5 minutes', 'relay-1', 'retry', 'HTTP 503 from http://returns.internal/', '<h1>down</h1>', 120
               FROM {pending}, generate_series(1, 3) a WHERE id > {FAILED} - 5;
           INSERT INTO {message} (type, destination, message_key, payload) SELECT 'order.placed', 'orders', 'order-' || n, convert_to('{{"order":' || n || '}}', 'UTF8') FROM generate_series(1, 60) n;
           INSERT INTO {message} (type, destination, payload, content_type) VALUES ('blob', 'orders', '\xff00fe3c', 'application/octet-stream');
           INSERT INTO {inbox} (consumer, message_id, status, type, source, headers, payload, content_type, attempts, next_attempt_at, last_error, success_at)
             SELECT 'billing', 'done-' || n, 'SUCCESS', 'order.placed', NULL, NULL, NULL, NULL, 0, NULL, NULL, now() FROM generate_series(1, 70) n;
           INSERT INTO {inbox} (consumer, message_id, status, type, source, headers, payload, content_type, attempts, next_attempt_at, last_error)
             SELECT 'inventory', 'failed-' || n, 'FAILED', 'order.placed', '{{"from":"rabbitmq","exchange":"orders","routing_key":"eu"}}', '{{"tenant":"acme"}}',
                    convert_to('{{"order":' || n || '}}', 'UTF8'), 'application/json', 5, '9999-12-31', 'out of stock' FROM generate_series(1, 40) n"#
    )
}
