//! The dashboard's pages, asked as a browser asks. What a browser makes of them is in `browser.rs`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support::{Dir, PATIENCE, Running, Schema, on_postgres, ph, posthouse, wait_for};

/// An answer with its headers in lower case.
struct Answer {
    status: u16,
    headers: String,
    body: String,
}

fn connect(running: &Running) -> TcpStream {
    let stream = TcpStream::connect(&running.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn get(running: &Running, path: &str) -> Answer {
    ask(running, "GET", path, "", "")
}

/// `headers`: whole lines.
fn ask(running: &Running, method: &str, path: &str, headers: &str, body: &str) -> Answer {
    let mut stream = connect(running);
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n{body}",
        running.address,
        body.len()
    )
    .unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    Answer { status: head.split(' ').nth(1).unwrap().parse().unwrap(), headers: head.to_lowercase(), body: body.to_owned() }
}

/// A page, which must be there.
#[track_caller]
fn page(running: &Running, path: &str) -> String {
    let answer = get(running, path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    answer.body
}

/// Migrated tables in PostgreSQL and a dashboard over them.
fn dashboard(rest: &str) -> (Dir, Schema, Running) {
    let (dir, schema) = (Dir::new(), Schema::new());
    dir.write("posthouse.toml", &schema.config(&format!("[server]\nlisten = \"127.0.0.1:0\"\n{rest}")));
    ph(&dir, &["migrate"]).code(0);
    let running = Running::dashboard(&mut posthouse(&dir));
    (dir, schema, running)
}

const SCRIPT: &str = "<script>alert(1)</script>";
const IMAGE: &str = "\"'><img src=x onerror=alert(1)>";
const TURNED: &str = "evil\u{202e}gpj.exe\u{2066}\u{200f}";

/// Nothing in a page is what somebody wrote into the database, unless it is text.
#[track_caller]
fn harmless(path: &str, body: &str) {
    // What a form sends back must be what it was; nobody sees it, unless it is what they typed.
    let mut parts = body.split(" value=\"");
    let first = parts.next().unwrap_or_default().to_owned();
    let body = parts.fold(first, |text, part| text + part.split_once('"').map_or("", |(_, rest)| rest));
    let body = body.as_str();
    for bad in
        ["<script>", "<img src=x", "onerror=alert(1)>", "</textarea", "=\"javascript:", "\0", "\u{202e}", "\u{2066}", "\u{200f}"]
    {
        assert!(!body.contains(bad), "{path} has {bad:?}: {body}");
    }
    let scripts: Vec<&str> = body.match_indices("<script").map(|(at, _)| &body[at..body.len().min(at + 60)]).collect();
    assert!(scripts.iter().all(|s| s.starts_with("<script src=\"/assets/")), "{path}: {scripts:?}");
    assert!(!body.contains(" style=") && !body.contains(" onclick="), "{path} has what its own policy forbids");
}

#[test]
fn whatever_is_stored_is_shown_as_text() {
    let (_dir, schema, running) = dashboard("trace_url = \"https://traces.example/{trace_id}\"\n");
    let q = |text: &str| format!("'{}'", text.replace('\'', "''"));
    let s = &schema.name;
    let everywhere = [SCRIPT, IMAGE, TURNED].concat();
    let headers = serde_json::json!({
        SCRIPT: IMAGE, "turned": TURNED, "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    });
    let message = |id: &str, payload: &str| {
        format!(
            "INSERT INTO \"{s}\".posthouse_message (message_id, type, destination, message_key, payload, content_type, headers) \
             VALUES ({0}, {0}, {0}, {0}, {payload}, {0}, {1})",
            q(id),
            q(&headers.to_string())
        )
    };
    let payload = q(&format!("{everywhere}</pre></textarea><a href=\"javascript:alert(1)\">"));
    let failed = format!(
        "UPDATE \"{s}\".posthouse_pending SET status = 'FAILED', due_at = '9999-12-31', last_error = {0}; \
         INSERT INTO \"{s}\".posthouse_attempt (row_id, attempt, instance, outcome, error, response, took_ms) \
            SELECT id, 1, {0}, {0}, {0}, {0}, 5 FROM \"{s}\".posthouse_pending; \
         INSERT INTO \"{s}\".posthouse_audit (change, actor, action, row_id, house, detail) \
            SELECT 1, {0}, {0}, id, 0, {0} FROM \"{s}\".posthouse_pending; \
         INSERT INTO \"{s}\".posthouse_instance (instance, lease_until) VALUES ({0}, now() + interval '1 hour'); \
         UPDATE \"{s}\".posthouse_house SET owner = {0}; \
         INSERT INTO \"{s}\".posthouse_group (group_name, paused_at) VALUES (left({0}, 60), now()); \
         INSERT INTO \"{s}\".posthouse_alert (rule, subject, firing, since, value, threshold, detail, seen_at) VALUES (left({0}, 60), {0}, true, now(), 1, 1, {0}, now()); \
         INSERT INTO \"{s}\".posthouse_alert_event (rule, subject, kind, since, value, threshold, instance, silenced) VALUES ({0}, {0}, 'FIRED', now(), 1, 1, {0}, false); \
         INSERT INTO \"{s}\".posthouse_alert_silence (rule, subject, ends_at, actor, reason) VALUES ({0}, '', now() + interval '1 hour', {0}, {0}); \
         INSERT INTO \"{s}\".posthouse_archive (location, shelf, low, high, amount, bytes, sha256) VALUES ({0}, {0}, 1, 2, 3, 4, {0}); \
         INSERT INTO \"{s}\".posthouse_run (group_name, cause, status, instance, error) VALUES ({0}, {0}, 'FAILED', {0}, {0}); \
         INSERT INTO \"{s}\".posthouse_inbox (consumer, message_id, status, type, source, message_key, content_type, headers, payload, last_error, next_attempt_at) \
            VALUES ({0}, {0}, 'FAILED', {0}, {1}, {0}, {0}, {1}, convert_to({0}, 'UTF8'), {0}, '9999-12-31')",
        q(&everywhere),
        q(&headers.to_string())
    );
    let rows = [
        message(&everywhere, &format!("convert_to({payload}, 'UTF8')")),
        message(&format!("{everywhere}2"), "'\\xff003c7363726970743e00fe'::bytea"),
        message(&format!("{everywhere}3"), "convert_to(repeat('<script>', 131072), 'UTF8')"),
        failed,
    ];
    on_postgres(&schema.url, rows.join("; "));
    let id = url::form_urlencoded::byte_serialize(everywhere.as_bytes()).collect::<String>();
    let one = format!("/inbox/message?consumer={id}&id={id}");
    wait_for("the overview knows the destination", || page(&running, "/").contains("&#60;img").then_some(()));
    let pages = [
        "/",
        "/messages",
        "/messages?status=FAILED",
        "/messages/1",
        "/messages/2",
        "/messages/3",
        "/inbox",
        &one,
        "/houses",
        "/groups",
        "/runs",
        "/alerts",
        "/retention",
        "/audit",
    ];
    for path in pages {
        let body = page(&running, path);
        harmless(path, &body);
        assert!(body.contains("&#60;script&#62;alert(1)"), "{path} shows it: {body}");
        assert!(body.contains("\\u{202e}"), "{path} writes out what turns text: {body}");
        assert!(body.len() < 2_000_000, "{path}: {}", body.len());
    }
    let detail = page(&running, "/messages/1");
    assert!(detail.contains("https://traces.example/4bf92f3577b34da6a3ce929d0e0e4736"), "{detail}");
    let bytes = page(&running, "/messages/2");
    assert!(bytes.contains("not UTF-8") && bytes.contains("ff 00 3c 73"), "{bytes}");
    let large = page(&running, "/messages/3");
    assert!(large.contains("only its beginning is shown") && large.len() < 1_000_000, "{}", large.len());
    // What was asked for comes back in the page as well.
    for path in [
        "/messages?text=",
        "/messages?key=",
        "/messages?status=",
        "/messages?db=",
        "/audit?actor=",
        "/inbox?consumer=",
        "/runs?group=",
    ] {
        let answer = get(&running, &format!("{path}{id}"));
        assert!([200, 404].contains(&answer.status), "{path}: {}", answer.status);
        harmless(path, &answer.body);
    }
    // As a file it is what it is, and no browser runs it.
    let file = get(&running, "/messages/1/payload");
    assert!(
        file.headers.contains("content-disposition: attachment") && file.headers.contains("application/octet-stream"),
        "{}",
        file.headers
    );
    assert!(file.body.starts_with(SCRIPT));
}

#[test]
fn pages_are_bounded_and_say_what_is_wrong() {
    let (_dir, schema, running) = dashboard("");
    let s = &schema.name;
    on_postgres(
        &schema.url,
        format!(
            "INSERT INTO \"{s}\".posthouse_message (destination, message_key) SELECT 'orders', 'k' || n FROM generate_series(1, 120) n; \
             INSERT INTO \"{s}\".posthouse_audit (change, actor, action, row_id, house) SELECT 0, 'a', 'x', 0, -1 FROM generate_series(1, 120)"
        ),
    );
    let rows = |body: &str| body.matches("<th scope=\"row\"").count();
    let first = page(&running, "/messages");
    assert_eq!(rows(&first), 50, "{first}");
    let link = |body: &str, rel: &str| {
        let before = body.split(&format!("\" rel=\"{rel}\"")).next().filter(|b| b.len() < body.len())?;
        Some(before.rsplit("href=\"").next()?.replace("&#38;", "&").replace("&amp;", "&"))
    };
    assert_eq!(link(&first, "prev"), None);
    let second = page(&running, &link(&first, "next").unwrap());
    let third = page(&running, &link(&second, "next").unwrap());
    assert_eq!((rows(&second), rows(&third), link(&third, "next")), (50, 20, None));
    let ids = |body: &str| {
        body.split("/messages/").skip(1).filter_map(|s| s.split(['"', '?']).next()?.parse::<i64>().ok()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&page(&running, &link(&third, "prev").unwrap())), ids(&second), "back again");
    assert_eq!(ids(&page(&running, &link(&second, "prev").unwrap())), ids(&first));
    let audit = page(&running, "/audit");
    assert_eq!(rows(&audit), 50);

    for (path, status, text) in [
        ("/messages?db=nowhere", 404, "there is no database"),
        ("/messages/999999", 404, "has no message"),
        ("/messages/no-such-id", 404, "there is no message"),
        ("/messages?status=LOST", 200, "must be PENDING, SENDING, SENT or FAILED"),
        ("/messages?from=yesterday", 200, "must be a date and time"),
        ("/messages?before=x&trail=%5B", 200, "orders"),
        ("/inbox?status=SENT", 200, "must be SUCCESS"),
        ("/inbox/message?consumer=a&id=b", 404, "has received no message"),
        ("/bulk/77", 404, "there is no bulk action"),
        ("/messages/bulk?action=requeue", 400, "needs a status"),
        ("/messages/bulk?action=requeue&status=SENT", 409, "delivered"),
        ("/messages/bulk?action=explode&status=FAILED", 400, "there is no action"),
        ("/assets/x/none.js", 404, "no such file"),
    ] {
        let answer = get(&running, path);
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        assert!(answer.body.contains(text), "{path}: {}", answer.body);
    }
    // On a slow machine the search may stop and go on with the next page.
    let mut found = page(&running, "/messages?key=k7");
    while rows(&found) == 0 {
        found = page(&running, &link(&found, "next").unwrap_or_else(|| panic!("nothing is found: {found}")));
    }
    assert_eq!(rows(&found), 1, "{found}");

    for path in ["/", "/messages", "/messages/1", "/messages/1/payload", "/messages/999999", "/houses", "/history"] {
        let headers = get(&running, path).headers;
        for wanted in [
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; \
             form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
            "x-content-type-options: nosniff",
            "cache-control: no-store",
        ] {
            assert!(headers.contains(wanted), "{path} without {wanted}: {headers}");
        }
    }
    let script = first.split("<script src=\"").nth(1).unwrap().split('"').next().unwrap();
    assert!(get(&running, script).headers.contains("immutable"));
    assert!(get(&running, "/assets/other/app.js").headers.contains("no-store"));
}

#[test]
fn a_database_that_is_down_is_said_to_be_and_the_others_go_on() {
    let (dir, schema) = (Dir::new(), Schema::new());
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    dir.write("posthouse.toml", &schema.config(""));
    ph(&dir, &["migrate"]).code(0);
    let gone = format!("[databases.gone]\nurl = \"postgres://u:hidden@{closed}/x\"\n");
    let rest = "[server]\nlisten = \"127.0.0.1:0\"\n[routes.orders]\nto = \"http://127.0.0.1:1/\"\n";
    dir.write("posthouse.toml", &schema.config(&(gone + rest)));
    ph(&dir, &["--database", "main", "publish", "orders", "{}"]).code(0);
    let running = Running::dashboard(&mut posthouse(&dir));
    let overview = wait_for("both are known", || {
        let body = page(&running, "/");
        (body.contains("panel bad") && body.contains("orders")).then_some(body)
    });
    assert!(overview.contains("<strong>gone</strong>") && !overview.contains("hidden@"), "{overview}");
    for path in ["messages", "inbox", "houses", "groups", "runs", "retention", "audit"] {
        let began = Instant::now();
        let body = page(&running, &format!("/{path}?db=gone"));
        assert!(body.contains("role=\"alert\"") && !body.contains("hidden@"), "{path}: {body}");
        assert!(began.elapsed() < Duration::from_secs(20), "{path} took {:?}", began.elapsed());
        let body = page(&running, &format!("/{path}?db=main"));
        assert!(!body.contains("role=\"alert\""), "{path}: {body}");
    }
}

#[test]
fn a_viewer_sees_everything_and_can_do_nothing() {
    let (token, viewer) = ("an-operator-token-of-tests", "a-viewer-token-of-tests");
    let (_dir, schema, running) = dashboard(&format!("token = \"{token}\"\nviewer_token = \"{viewer}\"\n"));
    let s = &schema.name;
    on_postgres(
        &schema.url,
        format!(
            "INSERT INTO \"{s}\".posthouse_message (destination) VALUES ('orders'); \
             UPDATE \"{s}\".posthouse_pending SET status = 'FAILED', due_at = '9999-12-31'; \
             INSERT INTO \"{s}\".posthouse_group (group_name) VALUES ('nightly'); \
             INSERT INTO \"{s}\".posthouse_inbox (consumer, message_id, status, next_attempt_at) VALUES ('c', 'm', 'FAILED', '9999-12-31')"
        ),
    );
    let stranger = get(&running, "/messages");
    assert!([303, 401].contains(&stranger.status) && !stranger.body.contains("orders"), "{}", stranger.body);
    assert_eq!(get(&running, "/assets/app.css").status, 200, "the form to log in with needs it");
    let as_who = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let act = "Content-Type: application/x-www-form-urlencoded\r\n";
    for (path, button) in [
        ("/messages?status=FAILED", "Requeue all"),
        ("/messages/1", "Requeue…"),
        ("/inbox?status=FAILED", "Requeue all"),
        ("/inbox/message?consumer=c&id=m", "Requeue…"),
        ("/groups", "Pause nightly"),
        ("/alerts", "Silence…"),
    ] {
        let seen = |token: &str| ask(&running, "GET", path, &as_who(token), "");
        let (operator, viewer) = (seen(token), seen(viewer));
        assert_eq!((operator.status, viewer.status), (200, 200), "{path}");
        assert!(operator.body.contains(button), "{path}: {}", operator.body);
        assert!(!viewer.body.contains(button) && !viewer.body.contains("hx-post"), "{path}: {}", viewer.body);
        assert!(viewer.body.contains("(viewer)"), "{path}: {}", viewer.body);
    }
    for (path, body) in [
        ("/messages/1/act", "action=requeue"),
        ("/messages/bulk", "action=requeue&status=FAILED"),
        ("/inbox/act", "action=requeue&consumer=c&id=m"),
        ("/inbox/bulk", "action=requeue&status=FAILED"),
        ("/groups/act", "action=pause&group=nightly"),
        ("/alerts/act", "action=silence&time=1h"),
        ("/bulk/1/stop", ""),
    ] {
        assert_eq!(ask(&running, "POST", path, &(as_who(viewer) + act), body).status, 403, "{path}");
    }
    assert_eq!(ask(&running, "GET", "/messages/bulk?action=requeue&status=FAILED", &as_who(viewer), "").status, 403);
    let audit = ask(&running, "GET", "/audit", &as_who(viewer), "");
    assert!(audit.body.contains("Nothing was done"), "{}", audit.body);
    let done = ask(&running, "POST", "/messages/1/act", &(as_who(token) + act), "action=requeue");
    assert!(done.status == 200 && done.body.contains("requeued"), "{}", done.body);
}

/// A stream of events, after its headers.
fn listen(running: &Running) -> (u16, BufReader<TcpStream>) {
    let mut stream = connect(running);
    write!(stream, "GET /events HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\n\r\n", running.address).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    (line.split(' ').nth(1).unwrap().parse().unwrap(), reader)
}

#[test]
fn events_come_to_a_bounded_number_and_end_with_the_server() {
    let (_dir, _schema, running) = dashboard("");
    let mut all: Vec<_> = (0..64).map(|_| listen(&running)).collect();
    assert!(all.iter().all(|(status, _)| *status == 200));
    assert_eq!(listen(&running).0, 503, "one more than the most");
    // Who goes makes room.
    all.pop();
    wait_for("a place is free", || {
        let (status, reader) = listen(&running);
        (status == 200).then(|| all.push((status, reader)))
    });
    let (_, first) = &mut all[0];
    let mut said = String::new();
    while !said.contains("\"oldest\":") {
        assert!(first.read_line(&mut said).unwrap() > 0, "it ended: {said}");
    }
    assert!(said.contains("event: sample") && said.contains("\"delivered\":"), "{said}");
    let history: serde_json::Value = serde_json::from_str(&page(&running, "/history")).unwrap();
    assert!(!history.as_array().unwrap().is_empty(), "{history}");
    running.signal("TERM");
    let ended = Instant::now();
    assert_eq!(running.ended().0, 0);
    let mut rest = Vec::new();
    all[0].1.read_to_end(&mut rest).unwrap();
    assert!(ended.elapsed() < Duration::from_secs(20), "listeners don't hold it up: {:?}", ended.elapsed());
}
