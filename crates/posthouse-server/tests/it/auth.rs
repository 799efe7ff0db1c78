//! Who may look and act: tokens, logins, other sites, and that no secret gets out.

use serde_json::{Value, json};

use crate::support::{Client, Dir, Got, Receiver, Running, ph, posthouse, wait_for};

const OPERATOR: &str = "s3cr3t-operator-token";
const VIEWER: &str = "s3cr3t-viewer-token";
const MESSAGES: &str = "/api/v1/databases/main/messages";

struct World {
    dir: Dir,
    relay: Running,
}

/// A relay on SQLite.
fn world(server: &str, rest: &str) -> World {
    let dir = Dir::new();
    let config = format!("[databases.main]\nurl = \"sqlite:main.db\"\n[server]\nlisten = \"127.0.0.1:0\"\n{server}\n{rest}");
    dir.write("posthouse.toml", &config);
    ph(&dir, &["migrate"]).code(0);
    let relay = Running::start(&mut posthouse(&dir));
    World { dir, relay }
}

impl World {
    fn client(&self) -> Client {
        Client::new(&self.relay.address)
    }
}

fn requeue(client: &Client) -> Got {
    client.post(&format!("{MESSAGES}/requeue"), &json!({ "ids": [1] }))
}

#[track_caller]
fn guarded(got: &Got) {
    let policy = got.header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(got.header("x-content-type-options"), "nosniff");
    assert_eq!(got.header("referrer-policy"), "no-referrer");
    assert_eq!(got.header("cache-control"), "no-store");
    assert!(got.header("access-control-allow-origin").is_empty());
}

#[test]
fn the_local_user_may_act_and_no_other_site_may() {
    let w = world("hosts = [\"posthouse.test\"]", "");
    let client = w.client();
    let me = client.get("/api/v1/whoami").status(200).json();
    assert_eq!((me["name"].as_str(), me["role"].as_str()), (Some("local"), Some("operator")));
    let csrf = me["csrf"].as_str().unwrap();
    assert!(csrf.len() > 20);
    for answer in [
        client.get("/"),
        client.get("/api/v1/openapi.json"),
        client.get("/metrics"),
        client.get("/nothing"),
        client.get("/healthz"),
    ] {
        guarded(&answer);
    }

    let own = client.with("x-csrf-token", csrf);
    requeue(&own).status(200);
    requeue(&client).status(403);
    requeue(&client.with("x-csrf-token", "guessed")).status(403);
    let form = |client: &Client, csrf: &str| {
        let body = format!("a=b&csrf={csrf}");
        client.send("POST", &format!("{MESSAGES}/requeue"), "application/x-www-form-urlencoded", body)
    };
    // The token is taken from the form; what follows isn't JSON.
    assert_eq!(form(&client, csrf).json()["kind"], "invalid");
    form(&client, "guessed").status(403);

    // A page of another site, which has the token all the same.
    for (name, value) in [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ] {
        requeue(&own.with(name, value)).status(403);
    }
    requeue(&own.with("origin", &format!("http://{}", w.relay.address))).status(200);
    requeue(&own.with("sec-fetch-site", "same-origin")).status(200);
    // It can't use what it can't read either, but a link leads here.
    let foreign = client.with("sec-fetch-site", "cross-site");
    foreign.with("sec-fetch-mode", "no-cors").get("/api/v1/databases").status(403);
    foreign.with("sec-fetch-mode", "navigate").get("/").status(200);
    // A name of theirs that leads to this address.
    for host in ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", ""] {
        client.with("host", host).get("/api/v1/whoami").status(403);
    }
    for host in ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "posthouse.test:8420"] {
        client.with("host", host).get("/api/v1/whoami").status(200);
    }
    // Everybody behind a proxy would be the local user.
    client.with("x-forwarded-for", "192.0.2.1").get("/api/v1/whoami").status(403);
}

#[test]
fn without_a_token_nobody_comes_in_and_a_viewer_changes_nothing() {
    let server = format!("token = \"{OPERATOR}\"\nviewer_token = \"{VIEWER}\"\nmetrics_token = \"s3cr3t-metrics-token\"");
    let w = world(&server, "[[groups]]\nname = \"nightly\"\ntrigger = \"manual\"");
    let client = w.client();
    let (operator, viewer) = (client.bearer(OPERATOR), client.bearer(VIEWER));
    let document = operator.get("/api/v1/openapi.json").status(200).json();
    let id = publish(&operator);
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let path =
            path.replace("{database}", "main").replace("{group}", "nightly").replace("{consumer}", "c").replace("{id}", &id);
        for (method, told) in methods.as_object().unwrap() {
            let method = method.to_uppercase();
            client.send(&method, &path, "application/json", "{}").status(401);
            let wrong = client.bearer("s3cr3t-wrong").send(&method, &path, "application/json", "{}").status;
            assert!([401, 429].contains(&wrong), "{method} {path}: {wrong}");
            if method == "GET" {
                assert!([200, 400, 403, 404].contains(&viewer.get(&path).status), "{path}");
                continue;
            }
            tried += 1;
            // Right or wrong, it isn't even looked at.
            for body in ["{}", "{\"ids\": [1], \"destination\": \"x\"}"] {
                let got = viewer.send(&method, &path, "application/json", body).status(403);
                assert_eq!(got.json()["kind"], "forbidden", "{path} {told}");
            }
        }
    }
    assert!(tried >= 12, "{tried}");
    viewer.get(&format!("{MESSAGES}/{id}")).status(200);
    viewer.get(&format!("{MESSAGES}/{id}/payload")).status(403);
    let audit = operator.get("/api/v1/databases/main/audit").status(200).json();
    assert_eq!(audit["lines"].as_array().unwrap().len(), 1, "only that it was published: {audit}");
    assert_eq!((audit["lines"][0]["action"].as_str(), audit["lines"][0]["actor"].as_str()), (Some("publish"), Some("token")));

    // Metrics have a token of their own, which opens nothing else.
    let scraper = client.bearer("s3cr3t-metrics-token");
    for path in ["/metrics", "/destinations"] {
        client.get(path).status(401);
        scraper.get(path).status(200);
        viewer.get(path).status(200);
    }
    scraper.get("/api/v1/databases").status(401);
    assert_eq!(client.get("/readyz").json().as_object().unwrap().len(), 1, "no names of anything");
    assert!(viewer.get("/readyz").json()["databases"].is_object());
    client.get("/healthz").status(200);
}

/// The row id of a new message that nobody sends yet.
fn publish(operator: &Client) -> String {
    let message = json!({ "destination": "https://x.example/", "deliver_in_ms": 3_600_000, "any_destination": true });
    operator.post(MESSAGES, &message).status(201);
    let rows = operator.get(&format!("{MESSAGES}?limit=1")).json();
    rows["messages"][0]["id"].to_string()
}

#[test]
fn people_log_in_with_a_form_and_out_again() {
    let w = world(&format!("token = \"{OPERATOR}\"\nviewer_token = \"{VIEWER}\""), "");
    let client = w.client();
    let sent = client.get("/?a=b").status(303);
    assert_eq!(sent.header("location"), "/login?next=%2F%3Fa%3Db");
    let part = client.with("hx-request", "true").get("/").status(401);
    assert_eq!(part.header("hx-redirect"), "/login");
    let page = client.get("/login?next=%2Fmessages%22%3E%3Cscript%3E").status(200);
    guarded(&page);
    assert!(page.text.contains("type=\"password\"") && !page.text.contains("<script"), "{}", page.text);

    let log_in = |client: &Client, token: &str, next: &str| {
        let body = format!("token={token}&name=ann&next={next}");
        client.send("POST", "/login", "application/x-www-form-urlencoded", body)
    };
    log_in(&client.with("origin", "https://evil.example"), OPERATOR, "/").status(403);
    let done = log_in(&client, OPERATOR, "//evil.example/").status(303);
    assert_eq!(done.header("location"), "/");
    let line = done.header("set-cookie").to_owned();
    assert!(line.contains("HttpOnly") && line.contains("SameSite=Strict") && !line.contains("Secure"), "{line}");
    assert!(!line.contains(OPERATOR), "{line}");
    let secure = log_in(&client.with("x-forwarded-proto", "https"), VIEWER, "/").status(303);
    assert!(secure.header("set-cookie").contains("; Secure"));

    let cookie = |line: &str| line.split(';').next().unwrap().to_owned();
    let ann = client.with("cookie", &cookie(&line));
    let me = ann.get("/api/v1/whoami").status(200).json();
    assert_eq!((me["name"].as_str(), me["role"].as_str()), (Some("ann (login)"), Some("operator")));
    requeue(&ann).status(403);
    requeue(&ann.with("x-csrf-token", me["csrf"].as_str().unwrap())).status(200);
    let viewer = client.with("cookie", &cookie(secure.header("set-cookie")));
    let viewer_csrf = viewer.get("/api/v1/whoami").json()["csrf"].as_str().unwrap().to_owned();
    requeue(&viewer.with("x-csrf-token", &viewer_csrf)).status(403);
    requeue(&ann.with("x-csrf-token", &viewer_csrf)).status(403);

    let log_out =
        |client: &Client, csrf: &str| client.send("POST", "/logout", "application/x-www-form-urlencoded", format!("csrf={csrf}"));
    log_out(&viewer, "").status(403);
    let out = log_out(&viewer, &viewer_csrf).status(303);
    assert!(out.header("set-cookie").contains("Max-Age=0"), "{}", out.header("set-cookie"));

    // After some wrong ones not even the right one lets in for a while; who is in stays in.
    let wrong = (0..1_000).find(|_| log_in(&client, "wrong", "/").status == 429);
    assert!(wrong.is_some_and(|n| n >= 10), "{wrong:?}");
    let limited = log_in(&client, OPERATOR, "/").status(429);
    assert_eq!(limited.header("retry-after"), "60");
    ann.get("/api/v1/whoami").status(200);
    client.bearer(OPERATOR).get("/api/v1/whoami").status(200);
    assert_eq!(client.bearer("wrong").get("/api/v1/whoami").status, 429);
}

#[test]
fn a_public_address_without_a_token_shows_no_pages() {
    let w = world("allow_public = true", "");
    drop(w.relay);
    let config = std::fs::read_to_string(w.dir.path().join("posthouse.toml")).unwrap();
    w.dir.write("posthouse.toml", &config.replace("127.0.0.1:0", "0.0.0.0:0"));
    let relay = Running::start(&mut posthouse(&w.dir));
    let client = Client::new(&relay.address.replace("0.0.0.0", "127.0.0.1"));
    for path in ["/", "/api/v1/databases", "/api/v1/whoami"] {
        client.get(path).status(403);
    }
    client.get("/metrics").status(200);
    client.get("/readyz");
    client.get("/login").status(303);
}

#[test]
fn secrets_appear_nowhere() {
    let receiver = Receiver::start();
    receiver.answer_with(500);
    let server = format!(
        "token = \"{OPERATOR}\"\nviewer_token = \"{VIEWER}\"\nmetrics_token = \"s3cr3t-metrics-token\"\nsession_key = \"s3cr3t-session-key\""
    );
    let rest = format!(
        "[transports.http]\nallow = [\"127.0.0.1\"]\n\
         [transports.amqp]\nkind = \"rabbitmq\"\nurl = \"amqp://u:s3cr3t-amqp@127.0.0.1:1/x\"\n\
         [routes.hook]\nto = \"http://u:s3cr3t-url@{0}/in?key=s3cr3t-query\"\n\
         [routes.hook.http]\nauthorization = \"Bearer s3cr3t-authorization\"\nsigning_keys = [\"whsec_czNjcjN0LXNpZ25pbmcta2V5LTAwMDAwMDAwMDA=\"]\n\
         [routes.hook.http.headers]\nX-Key = \"s3cr3t-header\"\n\
         [routes.queue]\nto = \"amqp:x/y\"\n[routes.queue.rabbitmq.headers]\nk = \"s3cr3t-property\"\n\
         [relay]\nidle_poll = \"50ms\"",
        receiver.address
    );
    let w = world(&server, &rest);
    let operator = w.client().bearer(OPERATOR);
    let direct = format!("http://u:s3cr3t-direct@{}/", receiver.address);
    for destination in ["hook", "queue", &direct] {
        operator.post(MESSAGES, &json!({ "destination": destination, "any_destination": true })).status(201);
    }
    let attempted = |path: String| {
        wait_for("an attempt that failed", || {
            let rows = operator.get(&path).json();
            rows["messages"].as_array().unwrap().iter().filter(|m| m["attempts"] != 0).count().ge(&2).then_some(rows)
        })
    };
    attempted(MESSAGES.to_owned());
    let mut told = Vec::new();
    for path in ["/metrics", "/readyz", "/destinations", "/login", "/", "/nothing", "/api/nothing", "/api/v1/openapi.json"] {
        told.push(operator.get(path).text);
        told.push(w.client().get(path).text);
    }
    for path in [
        "/api/v1/whoami",
        "/api/v1/databases",
        "/api/v1/destinations",
        "/api/v1/databases/main/overview",
        "/api/v1/databases/main/audit",
        "/api/v1/databases/s3cr/messages",
        MESSAGES,
    ] {
        told.push(operator.get(path).text);
    }
    for id in 1..=3 {
        told.push(operator.get(&format!("{MESSAGES}/{id}")).status(200).text);
    }
    told.push(w.client().bearer("s3cr3t-wrong").get(MESSAGES).text);
    told.push(w.client().send("POST", "/login", "application/x-www-form-urlencoded", "token=s3cr3t-wrong").text);
    told.push(operator.post(MESSAGES, &json!({ "destination": "amqp://u:s3cr3t-error@h/" })).status(400).text);
    for args in
        [&["relay", "--print-config"][..], &["relay", "--print-config", "--json"], &["relay", "--check"], &["destinations"]]
    {
        let ran = ph(&w.dir, args);
        told.extend([ran.stdout, ran.stderr]);
    }
    told.push(w.relay.log());
    for text in told {
        for secret in ["s3cr3t", "czNjcjN0"] {
            assert!(!text.contains(secret), "{text}");
        }
    }
}

#[test]
fn a_proxy_says_who_asks() {
    let w = world("trusted_proxy_header = \"X-User\"\noperators = [\"ann\"]", "");
    let client = w.client();
    client.get("/").status(401);
    client.get("/api/v1/whoami").status(401);
    let me = |name: &str| -> Value { client.with("x-user", name).get("/api/v1/whoami").status(200).json() };
    assert_eq!((me("ann")["role"].as_str(), me("bob")["role"].as_str()), (Some("operator"), Some("viewer")));
    let csrf = me("ann")["csrf"].as_str().unwrap().to_owned();
    requeue(&client.with("x-user", "ann")).status(403);
    requeue(&client.with("x-user", "ann").with("x-csrf-token", &csrf)).status(200);
    requeue(&client.with("x-user", "bob").with("x-csrf-token", me("bob")["csrf"].as_str().unwrap())).status(403);
}
