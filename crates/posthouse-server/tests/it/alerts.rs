//! Alerts of running relays, channels as they go over the wire, and the commands.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use posthouse::webhook::Verifier;
use serde_json::{Value, json};
use sha2::Sha256;

use crate::config::{one, problems};
use crate::support::{Dir, Running, Schema, on_postgres, ph, posthouse, wait_for};

const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SECRET: &str = "SEChunter2";

/// What arrived, and where.
type Seen = Arc<Mutex<Vec<(String, Value)>>>;

/// Receivers that check what they get as the real ones do.
struct Chats {
    address: SocketAddr,
    seen: Seen,
    _runtime: tokio::runtime::Runtime,
}

fn hmac(key: &str, text: &str) -> String {
    BASE64.encode(Hmac::<Sha256>::new_from_slice(key.as_bytes()).unwrap().chain_update(text).finalize().into_bytes())
}

async fn chat(
    State(seen): State<Seen>,
    Path(kind): Path<String>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    bytes: Bytes,
) -> (StatusCode, String) {
    let body: Value = serde_json::from_slice(&bytes).unwrap();
    let parameter = |name: &str| query.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value);
    let header = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    assert_eq!(header("content-type"), "application/json; charset=utf-8");
    let answer = match kind.as_str() {
        "webhook" => {
            let verifier = Verifier::new([KEY]).unwrap();
            let verified =
                verifier.verify(header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"), &bytes);
            let good = verified.is_ok() && header("x-team") == "ops";
            (if good { StatusCode::NO_CONTENT } else { StatusCode::UNAUTHORIZED }, "no".into())
        }
        "slack" => {
            let good = body["text"].is_string() && body["blocks"][0]["text"]["type"] == "mrkdwn";
            if good { (StatusCode::OK, "ok".to_owned()) } else { (StatusCode::BAD_REQUEST, "invalid_blocks".to_owned()) }
        }
        "dingtalk" => {
            let time = parameter("timestamp");
            let good = parameter("access_token") == "hunter2"
                && parameter("sign") == hmac(SECRET, &format!("{time}\n{SECRET}"))
                && time.len() == 13
                && body["msgtype"] == "text"
                && body["text"]["content"].is_string();
            let told = if good {
                json!({ "errcode": 0, "errmsg": "ok" })
            } else {
                json!({ "errcode": 310000, "errmsg": "sign not match" })
            };
            (StatusCode::OK, told.to_string())
        }
        "feishu" => {
            let time = body["timestamp"].as_str().unwrap_or_default().to_owned();
            let good = body["sign"] == hmac(&format!("{time}\n{SECRET}"), "")
                && time.len() == 10
                && body["msg_type"] == "post"
                && body["content"]["post"]["zh_cn"]["content"][0][0]["tag"] == "text";
            let told =
                if good { json!({ "code": 0, "msg": "success" }) } else { json!({ "code": 19021, "msg": "sign match fail" }) };
            (StatusCode::OK, told.to_string())
        }
        "wecom" => {
            let good = parameter("key") == "hunter2" && body["msgtype"] == "text" && body["text"]["content"].is_string();
            let told = if good {
                json!({ "errcode": 0, "errmsg": "ok" })
            } else {
                json!({ "errcode": 93000, "errmsg": "invalid webhook url" })
            };
            (StatusCode::OK, told.to_string())
        }
        _ => (StatusCode::NOT_FOUND, "hunter2 is not here".into()),
    };
    seen.lock().unwrap().push((kind, body));
    answer
}

impl Chats {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let seen = Seen::default();
        let app = Router::new().route("/{kind}", axum::routing::post(chat)).with_state(seen.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, seen, _runtime: runtime }
    }

    /// State and subject of each alert that arrived at the webhook.
    fn told(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        let alerts =
            seen.iter().filter(|(kind, _)| kind == "webhook").flat_map(|(_, d)| d["data"]["alerts"].as_array().unwrap().clone());
        alerts
            .map(|a| {
                format!("{} {} {}", a["state"].as_str().unwrap(), a["rule"].as_str().unwrap(), a["subject"].as_str().unwrap())
            })
            .collect()
    }
}

type Mails = Arc<Mutex<Vec<String>>>;

/// A mail server that takes what it gets, after a login: one conversation.
fn converse(from: impl BufRead, mut to: impl Write, mails: &Mails) {
    let mut say = |text: &str| {
        // The client may be gone.
        let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
    };
    say("220 mail.test ESMTP\r\n");
    let (mut all, mut inside) = (String::new(), false);
    for line in from.lines().map_while(Result::ok) {
        all.push_str(&line);
        all.push('\n');
        let verb = line.split([' ', ':']).next().unwrap_or_default().to_uppercase();
        match (inside, verb.as_str()) {
            (true, _) if line == "." => {
                inside = false;
                mails.lock().unwrap().push(std::mem::take(&mut all));
                say("250 taken\r\n");
            }
            (true, _) => {}
            (false, "EHLO") => say("250-mail.test\r\n250-8BITMIME\r\n250 AUTH PLAIN LOGIN\r\n"),
            (false, "AUTH") if line.ends_with(&BASE64.encode("\0me\0hunter2")) => say("235 welcome\r\n"),
            (false, "AUTH") => say("535 5.7.8 who are you?\r\n"),
            (false, "DATA") => {
                inside = true;
                say("354 go on\r\n");
            }
            (false, "QUIT") => {
                say("221 bye\r\n");
                break;
            }
            (false, _) => say("250 fine\r\n"),
        }
    }
}

/// One on a port of its own.
fn mail_server() -> (u16, Mails) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mails = Mails::default();
    let into = mails.clone();
    std::thread::spawn(move || {
        for conn in listener.incoming().map_while(Result::ok) {
            converse(BufReader::new(conn.try_clone().unwrap()), conn, &into);
        }
    });
    (port, mails)
}

/// One behind TLS, for one conversation, with a certificate for the address and its authority in `ca.pem`.
struct TlsMails {
    port: u16,
    mails: Mails,
    server: Child,
}

impl TlsMails {
    /// Makes what it needs in a directory that has nothing of it yet.
    fn certificates(dir: &Dir) {
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        dir.write(
            "leaf.ext",
            "subjectAltName = IP:127.0.0.1\nbasicConstraints = critical, CA:FALSE\nextendedKeyUsage = serverAuth\n",
        );
        for made in [
            format!("req -x509 {key} -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"),
            format!("req {key} -subj /CN=server -keyout leaf.key -out leaf.csr"),
            "x509 -req -days 2 -in leaf.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile leaf.ext -out leaf.pem".to_owned(),
        ] {
            assert!(Self::openssl(dir, &made).stdout(Stdio::null()).status().unwrap().success(), "{made}");
        }
    }

    fn openssl(dir: &Dir, args: &str) -> Command {
        let mut command = Command::new("openssl");
        command.args(args.split(' ')).current_dir(dir.path()).stderr(Stdio::null());
        command
    }

    fn start(dir: &Dir) -> Self {
        // Nobody else is given this port for a while.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let serve = format!("s_server -quiet -accept 127.0.0.1:{port} -cert leaf.pem -key leaf.key");
        let mut server = Self::openssl(dir, &serve).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (from, to) = (BufReader::new(server.stdout.take().unwrap()), server.stdin.take().unwrap());
        let mails = Mails::default();
        let into = mails.clone();
        std::thread::spawn(move || converse(from, to, &into));
        Self { port, mails, server }
    }
}

impl Drop for TlsMails {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[test]
fn every_channel_is_told_in_its_own_way() {
    let (dir, chats, (port, mails)) = (Dir::new(), Chats::start(), mail_server());
    let at = |path: &str| format!("http://{}/{path}", chats.address);
    let config = |ding: &str, secret: &str, password: &str| {
        format!(
            "[databases.a]\nurl = \"sqlite://a.db\"\n\
             [channels.hook]\nkind = \"webhook\"\nurl = \"{}\"\nsigning_keys = [{KEY:?}]\nheaders = {{ X-Team = \"ops\" }}\n\
             [channels.slack]\nkind = \"slack\"\nurl = \"{}\"\ntemplate = \"*{{{{ state }}}}* {{{{ rule }}}}\"\n\
             [channels.ding]\nkind = \"dingtalk\"\nurl = \"{}\"\nsecret = {secret:?}\n\
             [channels.feishu]\nkind = \"feishu\"\nurl = \"{}\"\nsecret = {secret:?}\n\
             [channels.wecom]\nkind = \"wecom\"\nurl = \"{}\"\n\
             [channels.mail]\nkind = \"smtp\"\nhost = \"127.0.0.1\"\nport = {}\ntls = \"none\"\nfrom = \"Posthouse <ph@a.example>\"\n\
             to = [\"x@a.example\", \"y@a.example\"]\nusername = \"me\"\npassword = {password:?}\n\
             [channels.log]\nkind = \"log\"\n",
            at("webhook"),
            at("slack"),
            ding,
            at("feishu"),
            at("wecom?key=hunter2"),
            port,
        )
    };
    let ding = at("dingtalk?access_token=hunter2");
    dir.write("posthouse.toml", &config(&ding, SECRET, "hunter2"));
    let ran = ph(&dir, &["alerts", "test", "--json"]).code(0);
    let told = ran.json();
    assert_eq!((&told["ok"], told["channels"].as_array().unwrap().len()), (&json!(true), 7), "{told}");
    assert!(ran.stderr.contains("nothing is wrong"), "the log: {}", ran.stderr);
    {
        let seen = chats.seen.lock().unwrap();
        let of = |kind: &str| seen.iter().find(|(k, _)| k == kind).unwrap().1.clone();
        assert_eq!(of("webhook")["data"]["alerts"][0]["state"], "test");
        assert_eq!(of("webhook")["type"], "posthouse.alert");
        assert_eq!(of("slack")["blocks"][0]["text"]["text"], "*test* test");
        assert!(of("dingtalk")["text"]["content"].as_str().unwrap().starts_with("[TEST] test\n"));
        let got = mails.lock().unwrap();
        let [mail] = &got[..] else { panic!("{got:?}") };
        for part in [
            "MAIL FROM:<ph@a.example>",
            "RCPT TO:<x@a.example>",
            "RCPT TO:<y@a.example>",
            "Subject: [TEST] test",
            "Message-ID: <alert_",
        ] {
            assert!(mail.contains(part), "{part}: {mail}");
        }
    }

    // What each says when it doesn't like it, and no secret in it.
    dir.write("posthouse.toml", &config(&ding, "another", "wrong").replace("X-Team", "X-Other"));
    let ran = ph(&dir, &["alerts", "test", "hook", "ding", "feishu", "mail", "--json"]).code(1);
    let told = ran.json();
    let errors: Vec<&str> = told["channels"].as_array().unwrap().iter().map(|c| c["error"].as_str().unwrap()).collect();
    for (error, part) in errors.iter().zip(["401", "310000: sign not match", "19021: sign match fail", "who are you?"]) {
        assert!(error.contains(part), "{errors:?}");
    }
    let away = config("http://127.0.0.1:1/?access_token=hunter2", SECRET, "hunter2");
    dir.write("posthouse.toml", &away.replace("tls = \"none\"", "tls = \"starttls\""));
    let ran = ph(&dir, &["alerts", "test", "ding", "mail"]).code(1);
    assert!(ran.stdout.contains("can't be reached"), "{}", ran.stdout);
    assert_eq!(mails.lock().unwrap().len(), 1, "nothing is sent in the clear where it was to be encrypted");
    assert!(!ran.stdout.contains("hunter2") && !ran.stderr.contains("hunter2"), "{ran:?}");
    let shown = ph(&dir, &["relay", "--print-config"]).code(0).stdout;
    assert!(!shown.contains("hunter2") && !shown.contains(KEY) && shown.contains("[channels.ding]"), "{shown}");
    let unknown = ph(&dir, &["alerts", "test", "dong"]).code(2).stderr;
    assert!(unknown.contains("did you mean \"ding\"?"), "{unknown}");
}

#[test]
fn three_relays_tell_once_across_restarts_and_takeovers() {
    let (dir, schema, chats) = (Dir::new(), Schema::new(), Chats::start());
    let config = schema.config(&format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[channels.ops]\nkind = \"webhook\"\nurl = \"http://{}/webhook\"\nsigning_keys = [{KEY:?}]\n\
         headers = {{ X-Team = \"ops\" }}\n[[alerts]]\nrule = \"outbox_failed\"\nfor = \"0s\"\ninterval = \"200ms\"\n\
         [[alerts]]\nrule = \"destination_down\"\nthreshold = \"10ms\"\ninterval = \"200ms\"\n[routes.dead]\nto = \"http://127.0.0.1:1/\"\n\
         [transports.http]\nallow = [\"127.0.0.1\"]\n",
        chats.address
    ));
    dir.write("posthouse.toml", &config);
    ph(&dir, &["migrate"]).code(0);
    let mut relays: Vec<Running> = (0..3).map(|_| Running::start(&mut posthouse(&dir))).collect();
    relays.iter().for_each(Running::wait_ready);
    let list = || ph(&dir, &["alerts", "list", "--json"]).code(0).json()["databases"][0].clone();
    let judge = wait_for("somebody judges", || list()["judge"].as_str().map(str::to_owned));

    // Down for the instance that has the message's house, which may be another one than the judge.
    ph(&dir, &["publish", "dead", "{}"]).code(0);
    wait_for("the outage is told", || (chats.told() == ["firing destination_down dead"]).then_some(()));
    ph(&dir, &["messages", "skip", "--all", "--status", "PENDING", "--yes"]).code(0);
    wait_for("the failed message is told", || chats.told().contains(&"firing outbox_failed dead".to_owned()).then_some(()));

    // Killed before it has said that they were sent, it would rightly have them sent again.
    wait_for("it is written that they were told", || {
        let history = ph(&dir, &["alerts", "list", "--history", "--json"]).code(0).json();
        let sent = |e: &Value| e["notices"].as_array().unwrap().iter().all(|n| n["sent_us"].is_i64());
        history["events"].as_array().unwrap().iter().all(sent).then_some(())
    });

    // The judge is killed; its lease is over, and one that was started anew is there as well.
    let pid = |name: &str| name.rsplit('-').nth(1).unwrap().parse::<u32>().unwrap();
    let place = relays.iter().position(|r| r.pid() == pid(&judge)).unwrap();
    drop(relays.remove(place));
    on_postgres(&schema.url, format!("UPDATE \"{}\".posthouse_duty SET lease_until = now()", schema.name));
    relays.push(Running::start(&mut posthouse(&dir)));
    let second = wait_for("another one judges", || list()["judge"].as_str().filter(|j| *j != judge).map(str::to_owned));
    let looked = |than: i64| {
        wait_for("it has looked", || {
            let seen = list()["alerts"].as_array().unwrap().iter().find(|a| a["rule"] == "outbox_failed")?["seen_us"].as_i64()?;
            (seen > than).then_some(seen)
        })
    };
    let first = looked(0);
    looked(looked(first));
    assert_eq!(chats.told().iter().filter(|told| *told == "firing outbox_failed dead").count(), 1, "{:?}", chats.told());

    // One that is told to stop gives the duty back at once.
    let place = relays.iter().position(|r| r.pid() == pid(&second)).unwrap();
    let stopping = relays.remove(place);
    stopping.signal("TERM");
    assert_eq!(stopping.ended().0, 0);
    wait_for("a third one judges", || list()["judge"].as_str().filter(|j| *j != second).map(str::to_owned));
    ph(&dir, &["messages", "requeue", "--all", "--status", "FAILED", "--yes"]).code(0);
    wait_for("it is told that it is over", || chats.told().contains(&"recovered outbox_failed dead".to_owned()).then_some(()));
    assert_eq!(chats.told().iter().filter(|told| told.contains("outbox_failed")).count(), 2, "{:?}", chats.told());

    let silenced =
        ph(&dir, &["alerts", "silence", "outbox_failed", "dead", "--for", "2h", "--reason", "known", "--actor", "ann"]).code(0);
    assert_eq!(silenced.stdout, "main: outbox_failed dead silenced\n");
    assert!(ph(&dir, &["alerts", "silence", "outbox_faild", "--for", "2h"]).code(2).stderr.contains("did you mean"), "a typo");
    let shown = ph(&dir, &["alerts", "list"]).code(0).stdout;
    assert!(shown.contains("known") && shown.contains("ann") && shown.contains("judged by"), "{shown}");
    let history = ph(&dir, &["alerts", "list", "--history", "--rule", "outbox_failed", "--json"]).code(0).json();
    let kinds: Vec<&str> = history["events"].as_array().unwrap().iter().map(|e| e["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["RECOVERED", "FIRED"]);
    assert!(history["events"][0]["notices"][0]["sent_us"].is_i64(), "{history}");
    assert!(ph(&dir, &["alerts", "list", "--history"]).code(0).stdout.contains("RECOVERED"));
    ph(&dir, &["alerts", "unsilence", "outbox_failed", "dead"]).code(0);
    ph(&dir, &["alerts", "unsilence", "outbox_failed", "dead"]).code(1);
}

#[test]
fn what_is_wrong_with_rules_and_channels_is_told() {
    let alert = |rest: &str| format!("[channels.ops]\nkind = \"slack\"\nurl = \"https://h.example/hunter2\"\n[[alerts]]\n{rest}");
    one(&alert("rule = \"outbox_faild\""), "alerts.outbox_faild.rule", &["did you mean", "outbox_failed"]);
    one(&alert("threshold = 1"), "alerts[0].rule", &["is missing", "outbox_backlog"]);
    one(
        &alert("rule = \"outbox_failed\"\nchannels = [\"opps\"]"),
        "alerts.outbox_failed.channels",
        &["did you mean \\\"ops\\\""],
    );
    one(&alert("rule = \"outbox_failed\"\nthreshold = \"5m\""), "alerts.outbox_failed.threshold", &["number of messages"]);
    one(&alert("rule = \"outbox_oldest\"\nthreshold = 5"), "alerts.outbox_oldest.threshold", &["length of time"]);
    one(&alert("rule = \"outbox_retry_share\"\nthreshold = 20"), "alerts.outbox_retry_share.threshold", &["at most 1"]);
    one(&alert("rule = \"outbox_failed\"\nrecover = 2"), "alerts.outbox_failed.recover", &["at most the threshold (1 message)"]);
    one(&alert("rule = \"partitions_low\"\nrecover = 2"), "alerts.partitions_low.recover", &["at least the threshold"]);
    one(&alert("rule = \"lease_lost\"\ndestination = \"x\""), "alerts.lease_lost.destination", &["has no effect"]);
    one(&alert("rule = \"inbox_failed\"\ndestination = \"x\""), "alerts.inbox_failed.destination", &["narrowed by consumer"]);
    one(
        &alert("rule = \"outbox_failed\"\ndatabases = [\"b\"]"),
        "alerts.outbox_failed.databases",
        &["there is no database", "a"],
    );
    one(&alert("rule = \"outbox_failed\"\ninterval = \"1ms\""), "alerts.outbox_failed.interval", &["must be 100ms to 1h"]);
    one(&alert("rule = \"outbox_failed\"\nrepeat = \"1s\""), "alerts.outbox_failed.repeat", &["at least the interval"]);
    one(&alert("rule = \"outbox_failed\"\nname = \"all\""), "alerts.all.name", &["another name"]);
    one(&alert("rule = \"outbox_failed\"\nname = \"lease_lost\""), "alerts.lease_lost.name", &["another rule"]);
    let twice = alert("rule = \"outbox_failed\"\n[[alerts]]\nrule = \"outbox_failed\"\ndestination = \"x\"");
    one(&twice, "alerts[1].rule", &["name of its own"]);

    let channel = |rest: &str| format!("[channels.ops]\n{rest}");
    one(&channel("url = \"https://h.example/\""), "channels.ops.kind", &["is missing", "dingtalk"]);
    one(&channel("kind = \"dingtalkk\""), "channels.ops.kind", &["did you mean", "dingtalk"]);
    one(&channel("kind = \"slack\""), "channels.ops.url", &["is missing", "SLACK_URL"]);
    one(&channel("kind = \"slack\"\nurl = \"hooks.slack.com/hunter2\""), "channels.ops.url", &["[redacted]", "no complete"]);
    one(&channel("kind = \"slack\"\nurl = \"https://h.example/\"\nsecret = \"x\""), "channels.ops.secret", &["unknown key"]);
    one(&channel("kind = \"log\"\ntemplate = \"{{ stat }}\""), "channels.ops.template", &["undefined"]);
    one(&channel("kind = \"log\"\ntimeout = \"10m\""), "channels.ops.timeout", &["45s"]);
    one(
        &channel("kind = \"webhook\"\nurl = \"https://h.example/\"\nsigning_keys = [\"hunter2\"]"),
        "channels.ops.signing_keys",
        &["whsec_", "[redacted]"],
    );
    let mail = "kind = \"smtp\"\nhost = \"mail.example\"\nfrom = \"a@b.example\"\n";
    one(&channel(mail), "channels.ops.to", &["is missing"]);
    one(&channel(&format!("{mail}to = [\"no address\"]")), "channels.ops.to", &["no mail address"]);
    one(&channel(&format!("{mail}to = [\"c@d.example\"]\ntls = \"none\"")), "channels.ops.tls", &["starttls"]);
    one(&channel(&format!("{mail}to = [\"c@d.example\"]\nusername = \"x\"")), "channels.ops.password", &["is missing"]);
    let both = problems(
        "[databases.a]\nurl = \"sqlite://a.db\"\n[channels.ops]\nkind = \"slack\"\n[[alerts]]\nrule = \"outbox_failed\"\nchannels = [\"ops\"]",
    );
    assert_eq!(both.len(), 1, "what names a wrong channel isn't judged: {both:?}");
    one("[server]\nalerts_retention = \"1s\"", "server.alerts_retention", &["1h"]);
}

#[test]
fn rules_hold_when_nobody_says_anything() {
    let dir = Dir::new();
    dir.write(
        "posthouse.toml",
        "[databases.a]\nurl = \"sqlite://a.db\"\n[[alerts]]\nrule = \"outbox_failed\"\nenabled = false\n\
         [[alerts]]\nrule = \"outbox_failed\"\nname = \"invoices\"\ndestination = \"invoices.*\"\nthreshold = 10\n",
    );
    let shown = ph(&dir, &["relay", "--print-config", "--json"]).code(0).json();
    let rules = shown["alerts"].as_array().unwrap();
    let of = |name: &str| rules.iter().find(|r| r["name"] == name || r["name"].is_null() && r["rule"] == name).unwrap();
    assert_eq!(rules.len(), 19);
    assert_eq!((&of("outbox_failed")["enabled"], &of("outbox_backlog")["enabled"]), (&json!(false), &json!(true)));
    let invoices = of("invoices");
    assert_eq!(
        (&invoices["destination"], &invoices["recover"], &invoices["channels"]),
        (&json!("invoices.*"), &json!(8), &json!(["log"]))
    );
    assert_eq!(shown["channels"]["log"]["kind"], "log");
    assert_eq!(shown["server"]["alerts_retention"], "90days");
    // What is printed can be read again.
    let printed = ph(&dir, &["relay", "--print-config"]).code(0).stdout;
    dir.write("posthouse.toml", &printed);
    assert_eq!(ph(&dir, &["relay", "--print-config"]).code(0).stdout, printed);
    ph(&dir, &["migrate"]).code(0);
    let listed = ph(&dir, &["alerts", "list", "--json"]).code(0).json();
    assert_eq!(listed["databases"][0]["rules"].as_array().unwrap().len(), 18, "{listed}");
    assert!(ph(&dir, &["alerts", "list"]).code(0).stdout.contains("0 firing, 18 rules, judged by nobody"));
}

#[test]
fn mail_over_tls_goes_to_whom_the_certificate_names() {
    let dir = Dir::new();
    TlsMails::certificates(&dir);
    let ca = format!("ca_file = {:?}", dir.path().join("ca.pem"));
    for (host, ca, taken) in [("127.0.0.1", "", false), ("localhost", ca.as_str(), false), ("127.0.0.1", ca.as_str(), true)] {
        let server = TlsMails::start(&dir);
        dir.write(
            "posthouse.toml",
            &format!(
                "[databases.a]\nurl = \"sqlite://a.db\"\n[channels.mail]\nkind = \"smtp\"\nhost = {host:?}\nport = {}\ntls = \"tls\"\n{ca}\n\
                 from = \"ph@a.example\"\nto = [\"x@a.example\"]\nusername = \"me\"\npassword = \"hunter2\"\n",
                server.port
            ),
        );
        let ran = wait_for("the server listens", || {
            let ran = ph(&dir, &["alerts", "test"]);
            (!ran.stdout.contains("refused")).then_some(ran)
        });
        assert_eq!((ran.code == 0, server.mails.lock().unwrap().len() == 1), (taken, taken), "{ran:?}");
        assert!(taken || ran.stdout.to_lowercase().contains("certificate"), "{}", ran.stdout);
    }
}

#[test]
fn a_database_that_is_not_reached_is_told_by_who_does_not_reach_it() {
    let (dir, chats) = (Dir::new(), Chats::start());
    dir.write(
        "posthouse.toml",
        &format!(
            "[databases.a]\nurl = \"sqlite://a.db\"\n[databases.gone]\nurl = \"postgres://u@127.0.0.1:1/db\"\n[server]\nlisten = \"127.0.0.1:0\"\n\
             [relay]\ninstance = \"here\"\ndatabase_timeout = \"500ms\"\n[channels.ops]\nkind = \"webhook\"\nurl = \"http://{}/webhook\"\nsigning_keys = [{KEY:?}]\n\
             headers = {{ X-Team = \"ops\" }}\n[[alerts]]\nrule = \"database_unreachable\"\nthreshold = \"10ms\"\ninterval = \"200ms\"\n",
            chats.address
        ),
    );
    ph(&dir, &["migrate", "--database", "a"]).code(0);
    let relay = Running::start(&mut posthouse(&dir));
    let told = wait_for("it is told", || chats.told().first().cloned());
    assert!(told.starts_with("firing database_unreachable here-"), "{told}");
    let detail = chats.seen.lock().unwrap()[0].1["data"]["alerts"][0]["detail"].as_str().unwrap().to_owned();
    assert!(!detail.is_empty());
    relay.signal("TERM");
    let (code, log) = relay.ended();
    assert_eq!(code, 0, "{log}");
    assert!(log.contains("alerts can't be judged at the moment"), "{log}");
}
