//! The executor for an XXL-JOB admin: its settings, and the program with an admin. What goes over the wire in which generation
//! is tested beside the executor.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};

use crate::adopted::{ALL, Prizes};
use crate::config::{one, print, problems};
use crate::support::{Dir, PATIENCE, Receiver, Running, Schema, ph, posthouse, wait_for};

const DATABASE: &str = "[databases.a]\nurl = \"postgres://u@h/d\"\n";
const GOOD: &str = "[xxl_job]\nadmins = [\"http://admin.example/xxl-job-admin\"]\napp_name = \"posthouse\"\n";

#[test]
fn everything_wrong_with_the_section_is_told_at_once() {
    let found = problems(&format!(
        "{DATABASE}[xxl_job]\nadmins = [\"admin.example\", \"http://a/?x=1\"]\napp_name = \"two words\"\nlisten = \"localhost\"\n\
         advertise = \"posthouse.example:9999\"\ndata_dir = \"\"\nlog_retention = \"5m\"\ncallback_retry = \"1ms\"\nlogdir = 1\n"
    ));
    let paths: Vec<&str> = found.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(
        paths,
        [
            "xxl_job.access_token",
            "xxl_job.admins",
            "xxl_job.admins",
            "xxl_job.advertise",
            "xxl_job.app_name",
            "xxl_job.callback_retry",
            "xxl_job.data_dir",
            "xxl_job.listen",
            "xxl_job.log_retention",
            "xxl_job.logdir",
        ],
        "{found:#?}"
    );
    let none = problems(&format!("{DATABASE}[xxl_job]\n"));
    let paths: Vec<&str> = none.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(paths, ["xxl_job.access_token", "xxl_job.admins", "xxl_job.app_name"], "{none:?}");
    assert!(none.iter().all(|(_, why)| why.contains("is missing")), "{none:?}");
}

#[test]
fn a_mistyped_key_is_told_once() {
    one(
        "[xxl_job]\nadmin = [\"http://a/\"]\napp_name = \"x\"\naccess_token = \"t\"",
        "xxl_job.admin",
        &["did you mean", "admins"],
    );
    one(&format!("{GOOD}acces_token = \"t\""), "xxl_job.acces_token", &["did you mean", "access_token"]);
    one(&format!("{GOOD}access_token = 5"), "xxl_job.access_token", &["must be text in quotes"]);
}

#[test]
fn the_door_has_a_lock_unless_somebody_says_that_it_has_none() {
    for (token, word) in
        [("", "is missing"), ("access_token = \"\"", "is empty"), ("access_token = \"default_token\"", "everybody knows")]
    {
        one(&format!("{GOOD}{token}"), "xxl_job.access_token", &[word, "allow_anonymous = true"]);
        let allowed = print(&format!("{DATABASE}{GOOD}{token}\nallow_anonymous = true")).code(0);
        assert!(!allowed.stdout.contains("default_token"), "{}", allowed.stdout);
    }
    one(&format!("{GOOD}access_token = \"a\\nb\""), "xxl_job.access_token", &["HTTP header"]);
    one(&format!("{GOOD}access_token = \" a\""), "xxl_job.access_token", &["HTTP header"]);
    print(&format!("{DATABASE}{GOOD}access_token = \"t\"")).code(0);
}

#[test]
fn an_address_that_cannot_be_told_to_the_admin_needs_another() {
    let public = format!("{GOOD}access_token = \"t\"\nlisten = \"0.0.0.0:9999\"\n");
    one(&public, "xxl_job.advertise", &["is missing", "0.0.0.0"]);
    print(&format!("{DATABASE}{public}advertise = \"http://posthouse.example:9999\"")).code(0);
    print(&format!("{DATABASE}{GOOD}access_token = \"t\"\nlisten = \"10.1.2.3:9999\"")).code(0);
}

#[test]
fn what_is_in_effect_is_shown_without_secrets() {
    let text = format!(
        "{DATABASE}[xxl_job]\nadmins = [\"http://u:hunter2@admin.example/xxl-job-admin\"]\napp_name = \"posthouse\"\naccess_token = \"hunter2\"\n"
    );
    let shown = print(&text).code(0);
    for line in [
        "listen = \"127.0.0.1:9999\"",
        "log_retention = \"30days\"",
        "callback_retry = \"30s\"",
        "data_dir = \"xxl-job\"",
        "allow_anonymous = false",
        "access_token = \"[redacted]\"",
    ] {
        assert!(shown.stdout.contains(line), "{line}: {}", shown.stdout);
    }
    assert!(!shown.stdout.contains("hunter2"), "{}", shown.stdout);
    let wrong = print(&text.replace("http://u", "htp://u").replace("app_name", "app_nam")).code(2);
    assert!(!wrong.stderr.contains("hunter2") && wrong.stderr.contains("[redacted]"), "{}", wrong.stderr);
    assert!(!print(DATABASE).code(0).stdout.contains("xxl_job"), "nothing is there without the section");
}

/// An admin: it takes what it is told while it is open, and counts.
struct Admin {
    address: SocketAddr,
    told: Arc<Told>,
    // Ends the server when dropped.
    _runtime: tokio::runtime::Runtime,
}

#[derive(Default)]
struct Told {
    away: Mutex<bool>,
    all: Mutex<Vec<(String, Value)>>,
}

impl Admin {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let told = Arc::new(Told::default());
        let app = Router::new().fallback(take).with_state(told.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, told, _runtime: runtime }
    }

    fn away(&self, away: bool) {
        *self.told.away.lock().unwrap() = away;
    }

    fn told(&self, path: &str) -> Vec<Value> {
        let all = self.told.all.lock().unwrap();
        all.iter().filter(|(at, _)| at == &format!("/xxl-job-admin/api/{path}")).map(|(_, body)| body.clone()).collect()
    }

    /// The result of a run.
    fn result(&self, log_id: i64) -> (i64, String) {
        wait_for(&format!("the result of run {log_id}"), || {
            let mut results = self.told("callback").into_iter().flat_map(|body| body.as_array().unwrap().clone());
            let found = results.rfind(|r| r["logId"] == log_id)?;
            Some((found["handleCode"].as_i64().unwrap(), found["handleMsg"].as_str().unwrap().to_owned()))
        })
    }

    /// Where the executors are that have registered, in this order.
    fn executors(&self, count: usize) -> Vec<String> {
        wait_for("registrations", || {
            let mut all: Vec<String> = Vec::new();
            for body in self.told("registry") {
                let address = body["registryValue"].as_str().unwrap().to_owned();
                if !all.contains(&address) {
                    all.push(address);
                }
            }
            (all.len() == count).then_some(all)
        })
    }
}

async fn take(State(told): State<Arc<Told>>, uri: Uri, body: String) -> (StatusCode, &'static str) {
    if *told.away.lock().unwrap() {
        return (StatusCode::SERVICE_UNAVAILABLE, "");
    }
    told.all.lock().unwrap().push((uri.path().to_owned(), serde_json::from_str(&body).unwrap()));
    (StatusCode::OK, "{\"code\":200,\"msg\":null}")
}

/// Asks an executor, and reads what it says.
fn ask(executor: &str, path: &str, body: &Value) -> Value {
    let host = executor.trim_start_matches("http://").trim_end_matches('/');
    let (mut conn, body) = (TcpStream::connect(host).unwrap(), body.to_string());
    conn.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        conn,
        "POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nXXL-JOB-ACCESS-TOKEN: t\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    conn.read_to_string(&mut answer).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

/// Triggers a run of group `lottery`: part `index` of `total`.
fn trigger(executor: &str, log_id: i64, (index, total): (u32, u32)) {
    let run = json!({
        "jobId": 3, "logId": log_id, "logDateTime": 5, "executorHandler": "posthouseScan", "executorParams": "lottery",
        "executorBlockStrategy": "SERIAL_EXECUTION", "glueType": "BEAN", "broadcastIndex": index, "broadcastTotal": total,
    });
    let answer = ask(executor, "/run", &run);
    assert_eq!(answer["code"], 200, "{answer}");
}

/// Four houses of a group that an admin runs, and a receiver.
struct World {
    dir: Dir,
    schema: Schema,
    receiver: Receiver,
    admin: Admin,
    /// More keys of the database, and tables of the file.
    more: (&'static str, &'static str),
    /// The set of tables that is published to.
    tables: &'static str,
}

impl World {
    fn new(more: (&'static str, &'static str), tables: &'static str) -> Self {
        let (receiver, admin) = (Receiver::start(), Admin::start());
        let world = Self { dir: Dir::new(), schema: Schema::new(), receiver, admin, more, tables };
        world.configure(&world.dir);
        ph(&world.dir, &["migrate"]).code(0);
        world
    }

    fn configure(&self, dir: &Dir) {
        let (to, admin) = (self.receiver.address, self.admin.address);
        let rest = format!(
            "{}[transports.http]\nallow = [\"127.0.0.1\"]\nconnect_timeout = \"1s\"\n[routes.orders]\nto = \"http://{to}/\"\n\
             [server]\nlisten = \"127.0.0.1:0\"\n\
             [[groups]]\nname = \"lottery\"\ntrigger = \"external\"\n\
             [xxl_job]\nadmins = [\"http://{admin}/xxl-job-admin\"]\napp_name = \"posthouse\"\naccess_token = \"t\"\n\
             listen = \"127.0.0.1:0\"\ncallback_retry = \"100ms\"\n{}",
            self.more.0, self.more.1
        );
        dir.write("posthouse.toml", &self.schema.config(&rest));
    }

    fn publish(&self, ids: &[&str]) {
        for id in ids {
            ph(&self.dir, &["--database", self.tables, "publish", "orders", "{}", "--id", id]).code(0);
        }
    }

    fn pending(&self) -> usize {
        let listed =
            ph(&self.dir, &["--database", self.tables, "messages", "list", "--status", "PENDING", "--json"]).code(0).json();
        listed["messages"].as_array().unwrap().len()
    }
}

fn start(dir: &Dir) -> Running {
    let relay = Running::start(&mut posthouse(dir));
    relay.wait_ready();
    relay
}

#[test]
fn parts_of_a_broadcast_are_sent_by_their_instances_and_only_when_the_admin_says_so() {
    let w = World::new(("", ""), "main");
    w.publish(&["a", "b", "c", "d", "e", "f", "g", "h"]);
    let other = Dir::new();
    w.configure(&other);
    let first = start(&w.dir);
    let one = w.admin.executors(1).remove(0);
    let second = start(&other);
    let two = w.admin.executors(2).into_iter().find(|e| *e != one).unwrap();
    assert_eq!((w.receiver.seen().len(), w.pending()), (0, 8), "nobody has triggered anything");

    trigger(&one, 1, (0, 2));
    trigger(&two, 2, (1, 2));
    let sent = |(code, message): (i64, String)| -> usize {
        assert_eq!(code, 200, "{message}");
        message.split(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(sent(w.admin.result(1)) + sent(w.admin.result(2)), 8);
    let mut ids: Vec<String> = w.receiver.seen().into_iter().map(|s| s.message_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["a", "b", "c", "d", "e", "f", "g", "h"]);
    assert_eq!(w.pending(), 0);
    let log = ask(&one, "/log", &json!({ "logId": 1, "logDateTim": 5, "fromLineNum": 1 }));
    let text = log["content"]["logContent"].as_str().unwrap();
    assert!(text.contains("group lottery, database main: 2 units of 4: posthouse_ houses 0,2"), "{text}");
    assert_eq!(log["data"]["isEnd"], true, "{log}");
    // The runs are in the database's own list, too.
    let runs = ph(&w.dir, &["runs", "list", "--json"]).code(0).stdout;
    assert_eq!(runs.matches("\"external\"").count(), 2, "{runs}");

    // While one instance has the houses, the other can't have them; and what is going is finished before the end.
    w.receiver.open(false);
    w.publish(&["i"]);
    trigger(&one, 3, (0, 1));
    wait_for("the request arrives", || (w.receiver.seen().len() == 9).then_some(()));
    trigger(&two, 4, (0, 1));
    let (code, message) = w.admin.result(4);
    assert!(code == 500 && message.contains("group lottery, database main: ") && message.contains("by instance"), "{message}");
    first.signal("TERM");
    wait_for("it takes its registration back", || (w.admin.told("registryRemove").len() == 1).then_some(()));
    w.receiver.open(true);
    let (code, log) = first.ended();
    assert_eq!(code, 0, "{log}");
    assert_eq!(sent(w.admin.result(3)), 1);
    trigger(&two, 5, (0, 1));
    assert_eq!(sent(w.admin.result(5)), 0, "it is free again, and nothing is left");
    second.signal("TERM");
    assert_eq!(second.ended().0, 0);
    assert_eq!(w.admin.told("registryRemove").len(), 2);
}

#[test]
fn a_process_that_is_killed_tells_later_how_its_runs_ended_and_loses_nothing() {
    // A lease that is short enough to be waited for.
    let relay = "[relay]\nlease = \"5s\"\nheartbeat = \"500ms\"\nsend_timeout = \"3s\"\n";
    let w = World::new(("tables = [\"a_\", \"b_\"]\n", relay), "main/b_");
    w.receiver.open(false);
    w.publish(&["a"]);
    let relay = start(&w.dir);
    let executor = w.admin.executors(1).remove(0);
    // A run of nothing ends while no admin is there.
    w.admin.away(true);
    let nothing = json!({ "jobId": 4, "logId": 1, "executorHandler": "posthouseScan",
        "executorParams": "{\"group\":\"lottery\",\"databases\":[\"main\"]}", "broadcastIndex": 5, "broadcastTotal": 9 });
    assert_eq!(ask(&executor, "/run", &nothing)["code"], 200);
    let log = || ask(&executor, "/log", &json!({ "logId": 1, "fromLineNum": 1 }));
    wait_for("it ends", || (log()["data"]["isEnd"] == true).then_some(()));
    trigger(&executor, 2, (0, 1));
    wait_for("the request arrives", || (!w.receiver.seen().is_empty()).then_some(()));
    relay.signal("KILL");
    relay.ended();
    assert_eq!((w.admin.told("callback").len(), w.pending()), (0, 1));

    w.admin.away(false);
    w.receiver.open(true);
    let relay = start(&w.dir);
    let executor = w.admin.executors(2).remove(1);
    assert_eq!(w.admin.result(1).0, 200);
    let (code, message) = w.admin.result(2);
    assert!(code == 500 && message.contains("posthouse ended before this run did"), "{message}");
    // The dead one's houses are its own until its lease ends.
    let mut log_id = 3;
    wait_for("a run takes place", || {
        trigger(&executor, log_id, (0, 1));
        let (code, message) = w.admin.result(log_id);
        log_id += 1;
        assert!(code == 200 || message.contains("by instance"), "{message}");
        (code == 200).then_some(())
    });
    assert_eq!(w.pending(), 0);
    assert!(w.receiver.seen().iter().all(|s| s.message_id == "a"));
    relay.signal("INT");
    assert_eq!(relay.ended().0, 0);
}

#[test]
fn adopted_tables_are_dealt_out_whole() {
    let (w, admin, other) = (Prizes::new(), Admin::start(), Dir::new());
    let rest = format!(
        "[[groups]]\nname = \"lottery\"\ntables = [\"prizes\"]\ntrigger = \"external\"\n\
         [xxl_job]\nadmins = [\"http://{}/xxl-job-admin\"]\napp_name = \"posthouse\"\naccess_token = \"t\"\nlisten = \"127.0.0.1:0\"\n",
        admin.address
    );
    w.configure(&w.dir, &rest);
    w.configure(&other, &rest);
    ph(&w.dir, &["migrate"]).code(0);
    let relays = [start(&w.dir), start(&other)];
    let executors = admin.executors(2);
    assert_eq!(w.sent(), [""; 0], "nobody has triggered anything");
    for (place, executor) in executors.iter().enumerate() {
        trigger(executor, place as i64 + 1, (place as u32, 2));
    }
    for log_id in [1, 2] {
        let (code, message) = admin.result(log_id);
        assert!(code == 200 && message.starts_with("2 sent"), "{message}");
    }
    assert_eq!(w.sent(), ALL);
    let log = ask(&executors[0], "/log", &json!({ "logId": 1, "logDateTim": 5, "fromLineNum": 1 }));
    let text = log["content"]["logContent"].as_str().unwrap();
    assert!(text.contains("1 unit of 2: prizes/user_strategy_export_00"), "{text}");
    for relay in relays {
        relay.signal("TERM");
        assert_eq!(relay.ended().0, 0);
    }
}
