//! The executor against an admin that sends and takes what those of the three generations do, byte for byte, over real HTTP.
//! What is scanned is scripted here; the relays' own side is tested with the program as a whole.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::Instant;
use url::Url;

use super::XxlJob;
use super::log::RunLog;
use super::scan::{Counts, Scans, Stop, Unit};
use crate::config::XxlJobConfig;

pub(super) const SOON: Duration = Duration::from_secs(30);

/// A directory that goes with the test.
pub(super) struct Place(PathBuf);

impl Place {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("posthouse-xxl-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // What stays behind lies under the system's own.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits until something is there.
async fn wait_for<T>(what: &str, mut met: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(found) = met() {
            return found;
        }
        assert!(Instant::now() < until, "not within {SOON:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

// ---------------------------------------------------------------- what is scanned

/// Two databases with 50 units in all. Runs go on until they are let go, or told to stop.
pub(super) struct Script {
    open: watch::Sender<bool>,
    /// Units of runs that have begun, by database.
    taken: Mutex<Vec<(String, Unit)>>,
    /// How runs ended: `done` or `stopped`.
    ended: Mutex<Vec<&'static str>>,
}

impl Script {
    pub(super) fn new(open: bool) -> Arc<Self> {
        Arc::new(Self { open: watch::channel(open).0, taken: Mutex::default(), ended: Mutex::default() })
    }

    pub(super) fn taken(&self) -> Vec<(String, Unit)> {
        self.taken.lock().unwrap().clone()
    }

    fn ended(&self) -> Vec<&'static str> {
        self.ended.lock().unwrap().clone()
    }
}

fn house(n: u16) -> Unit {
    Unit { table: "posthouse_".into(), house: Some(n) }
}

impl Scans for Script {
    fn databases(&self, group: &str, only: &[String]) -> Result<Vec<String>, String> {
        let all = match group {
            "lottery" => vec!["b".to_owned(), "a".to_owned()],
            "one" | "broken" | "stubborn" => vec!["one".to_owned()],
            _ => return Err(format!("there is no group {group:?}")),
        };
        match only.iter().find(|name| !all.contains(name)) {
            Some(name) => Err(format!("group {group} has no database {name}")),
            None if only.is_empty() => Ok(all),
            None => Ok(only.to_vec()),
        }
    }

    fn units<'s>(&'s self, _group: &'s str, database: &'s str) -> BoxFuture<'s, Result<Vec<Unit>, String>> {
        let tables = ["lottery_1", "lottery_0"].map(|t| Unit { table: t.into(), house: None });
        let units = match database {
            "a" => (0..32).rev().map(house).collect(),
            "b" => (0..16).map(house).chain(tables).collect(),
            _ => vec![house(0)],
        };
        Box::pin(async move { Ok(units) })
    }

    fn run<'s>(
        &'s self,
        group: &'s str,
        database: &'s str,
        units: Vec<Unit>,
        mut stop: Stop,
        log: RunLog,
    ) -> BoxFuture<'s, (Counts, Result<(), String>)> {
        Box::pin(async move {
            let sent = units.len() as u64;
            self.taken.lock().unwrap().extend(units.into_iter().map(|unit| (database.to_owned(), unit)));
            log.line("the script goes on");
            let mut open = self.open.subscribe();
            let how = tokio::select! {
                _ = open.wait_for(|open| *open) => "done",
                () = stop.told(), if group != "stubborn" => "stopped",
            };
            self.ended.lock().unwrap().push(how);
            match group {
                "broken" => (Counts { waiting: 2, ..Counts::default() }, Err("house 0 belongs to relay-<2>".into())),
                _ => (Counts { sent, ..Counts::default() }, Ok(())),
            }
        })
    }
}

// ---------------------------------------------------------------- an admin

/// A generation of admins: what they call things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Generation {
    trigger: &'static str,
    /// The name of the date when they ask for a log and take a result.
    date: &'static str,
    /// Whether results come in an object, and requests say for whom they are.
    object: bool,
}

const A: Generation = Generation { trigger: "/run", date: "logDateTim", object: false };
const C: Generation = Generation { trigger: "/trigger", date: "logDateTime", object: true };

/// What an admin was sent.
#[derive(Debug, Clone)]
struct Sent {
    path: String,
    headers: HeaderMap,
    body: String,
}

impl Sent {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().unwrap())
    }
}

struct Admin {
    address: SocketAddr,
    inner: Arc<AdminInner>,
}

struct AdminInner {
    /// None: it is not there, as far as anybody can tell.
    generation: Mutex<Option<Generation>>,
    /// Results that contain this are refused.
    refuses: Mutex<Option<String>>,
    sent: Mutex<Vec<Sent>>,
}

impl Admin {
    async fn start(generation: Option<Generation>) -> Self {
        let inner =
            Arc::new(AdminInner { generation: Mutex::new(generation), refuses: Mutex::default(), sent: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().fallback(admin).with_state(inner.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Self { address, inner }
    }

    fn url(&self) -> Url {
        format!("http://{}/xxl-job-admin", self.address).parse().unwrap()
    }

    fn is(&self, generation: Option<Generation>) {
        *self.inner.generation.lock().unwrap() = generation;
    }

    fn refuses(&self, text: &str) {
        *self.inner.refuses.lock().unwrap() = Some(text.to_owned());
    }

    /// What it was sent to a path, whatever came of it.
    fn sent(&self, path: &str) -> Vec<Sent> {
        self.inner.sent.lock().unwrap().iter().filter(|s| s.path == format!("/xxl-job-admin/api/{path}")).cloned().collect()
    }

    /// The results it took, in order.
    fn results(&self) -> Vec<Value> {
        let all = self.sent("callback");
        let items = |sent: &Sent| -> Vec<Value> {
            let body: Value = serde_json::from_str(&sent.body).unwrap();
            body.get("callbackList").unwrap_or(&body).as_array().unwrap().clone()
        };
        all.iter().filter(|s| s.header("taken") == "yes").flat_map(items).collect()
    }

    async fn result(&self, log_id: i64) -> Value {
        wait_for(&format!("the result of {log_id}"), || self.results().into_iter().find(|r| r["logId"] == log_id)).await
    }
}

async fn admin(State(inner): State<Arc<AdminInner>>, uri: Uri, mut headers: HeaderMap, body: Bytes) -> Response {
    let body = String::from_utf8(body.to_vec()).unwrap();
    let generation = *inner.generation.lock().unwrap();
    let refuses = inner.refuses.lock().unwrap().as_ref().is_some_and(|text| body.contains(text));
    let right_form = |g: Generation| !uri.path().ends_with("/callback") || body.starts_with('{') == g.object;
    let taken = generation.is_some_and(right_form) && !refuses;
    headers.insert("taken", if taken { "yes" } else { "no" }.parse().unwrap());
    inner.sent.lock().unwrap().push(Sent { path: uri.path().to_owned(), headers, body });
    match generation {
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Some(_) if taken => r#"{"code":200}"#.into_response(),
        Some(_) => r#"{"code":500,"msg":"no"}"#.into_response(),
    }
}

// ---------------------------------------------------------------- an executor

struct Rig {
    place: Place,
    admin: Admin,
    script: Arc<Script>,
    xxl: XxlJob,
}

pub(super) fn config(place: &Place, admins: Vec<Url>) -> XxlJobConfig {
    XxlJobConfig {
        admins,
        app_name: "posthouse".into(),
        access_token: "s3cret".into(),
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        data_dir: place.path().to_owned(),
        callback_retry: Duration::from_millis(100),
        ..XxlJobConfig::new()
    }
}

impl Rig {
    async fn new(generation: Generation, open: bool) -> Self {
        let (place, admin, script) = (Place::new(), Admin::start(Some(generation)).await, Script::new(open));
        let xxl = XxlJob::start(&config(&place, vec![admin.url()]), script.clone()).await.unwrap();
        Self { place, admin, script, xxl }
    }

    async fn ask(&self, path: &str, body: &str) -> Value {
        ask(self.xxl.address(), path, "s3cret", body).await
    }

    /// Triggers a run and expects it to be taken.
    async fn trigger(&self, log_id: i64, change: &[(&str, Value)]) {
        let answer = self.ask("/run", &run(log_id, change)).await;
        assert_eq!(answer["code"], 200, "{answer}");
    }

    async fn refused(&self, log_id: i64, change: &[(&str, Value)]) -> String {
        let answer = self.ask("/run", &run(log_id, change)).await;
        assert_eq!(answer["code"], 500, "{answer}");
        answer["msg"].as_str().unwrap().to_owned()
    }

    /// Waits until so many runs have begun.
    async fn begun(&self, runs: usize) {
        wait_for("runs have begun", || (self.script.taken().len() >= runs).then_some(())).await;
    }

    async fn shutdown(self) -> (Place, Admin) {
        end(self.xxl).await;
        (self.place, self.admin)
    }
}

pub(super) async fn end(xxl: XxlJob) {
    xxl.end_runs(Instant::now() + SOON).await;
    xxl.shutdown().await;
}

/// A run of job 3 in group `one`, with what is to be different.
pub(super) fn run(log_id: i64, change: &[(&str, Value)]) -> String {
    let mut run = json!({
        "jobId": 3, "executorHandler": "posthouseScan", "executorParams": "one", "executorBlockStrategy": "SERIAL_EXECUTION",
        "executorTimeout": 0, "logId": log_id, "logDateTime": 1_586_629_003_729_i64, "glueType": "BEAN", "glueSource": "",
        "glueUpdatetime": 1_586_629_003_727_i64, "broadcastIndex": 0, "broadcastTotal": 1,
    });
    for (key, value) in change {
        run[*key] = value.clone();
    }
    run.to_string()
}

/// Sends bytes and reads an answer: its head and its body.
async fn raw(to: SocketAddr, request: &[u8]) -> (String, String) {
    let talk = async {
        let mut conn = TcpStream::connect(to).await.unwrap();
        // A body that is too large is answered before it has been read, and then there may be nobody to write to.
        let _ = conn.write_all(request).await;
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let lines = head.lines().filter_map(|l| l.split_once(": "));
                let mut length =
                    lines.filter(|(name, _)| name.eq_ignore_ascii_case("content-length")).map(|(_, n)| n.parse().unwrap());
                let length: usize = length.next_back().unwrap();
                if body.len() >= length {
                    return (head.to_owned(), body.to_owned());
                }
            }
            assert_ne!(conn.read_buf(&mut bytes).await.unwrap(), 0, "the answer is not whole: {text}");
        }
    };
    tokio::time::timeout(SOON, talk).await.unwrap()
}

async fn ask(to: SocketAddr, path: &str, token: &str, body: &str) -> Value {
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: {to}\r\nXXL-JOB-ACCESS-TOKEN: {token}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let (head, body) = raw(to, request.as_bytes()).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    serde_json::from_str(&body).unwrap()
}

// ---------------------------------------------------------------- the wire, generation by generation

/// A request as the admin's Java client writes it.
fn java(generation: Generation, to: SocketAddr, path: &str, body: &str) -> Vec<u8> {
    let app_name = if generation.object { "XXL-JOB-APPNAME: posthouse\r\n" } else { "" };
    format!(
        "POST {path} HTTP/1.1\r\nconnection: Keep-Alive\r\nContent-Type: application/json;charset=UTF-8\r\n\
         Accept-Charset: application/json;charset=UTF-8\r\nXXL-JOB-ACCESS-TOKEN: s3cret\r\n{app_name}User-Agent: Java/17.0.9\r\n\
         Host: {to}\r\nAccept: text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Registration, a run from its trigger to its result, its log and the end, as one generation has it.
async fn conforms(generation: Generation) {
    const OK: &str = r#"{"code":200,"msg":null,"content":null,"data":null}"#;
    let rig = Rig::new(generation, true).await;
    let to = rig.xxl.address();
    let registered = wait_for("a registration", || rig.admin.sent("registry").into_iter().next()).await;
    let registration = format!(r#"{{"registryGroup":"EXECUTOR","registryKey":"posthouse","registryValue":"http://{to}/"}}"#);
    assert_eq!(registered.body, registration);
    let from_us = |sent: &Sent| {
        assert_eq!(sent.header("xxl-job-access-token"), "s3cret");
        assert_eq!(sent.header("xxl-job-appname"), "posthouse");
        assert_eq!(sent.header("content-type"), "application/json;charset=UTF-8");
    };
    from_us(&registered);

    let ask = async |path: &str, body: &str| -> String {
        let (head, body) = raw(to, &java(generation, to, path, body)).await;
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.lines().any(|l| l == "content-type: text/html;charset=UTF-8"), "{head}");
        body
    };
    assert_eq!(ask("/beat", "").await, OK);
    assert_eq!(ask("/beat", "\"\"").await, OK);
    assert_eq!(ask("/idleBeat", r#"{"jobId":3}"#).await, OK);
    let body = r#"{"jobId":3,"executorHandler":"posthouseScan","executorParams":"lottery","executorBlockStrategy":"SERIAL_EXECUTION","executorTimeout":0,"logId":87,"logDateTime":1589447542244,"glueType":"BEAN","glueSource":"","glueUpdatetime":1589445790000,"broadcastIndex":0,"broadcastTotal":1}"#;
    assert_eq!(ask(generation.trigger, body).await, OK);
    rig.admin.result(87).await;
    let taken: Vec<Sent> = rig.admin.sent("callback");
    assert_eq!(taken.len(), 1, "{taken:?}");
    from_us(&taken[0]);
    let date = generation.date;
    let item = format!(
        r#"[{{"logId":87,"{date}":1589447542244,"handleCode":200,"handleMsg":"50 sent, 0 to be tried again, 0 FAILED"}}]"#
    );
    assert_eq!(taken[0].body, if generation.object { format!(r#"{{"callbackList":{item}}}"#) } else { item });

    let log: Value =
        serde_json::from_str(&ask("/log", &format!(r#"{{"{date}":1589447542244,"logId":87,"fromLineNum":2}}"#)).await).unwrap();
    assert_eq!((&log["code"], &log["content"]), (&json!(200), &log["data"]));
    let log = &log["data"];
    assert_eq!((&log["fromLineNum"], &log["isEnd"]), (&json!(2), &json!(true)), "{log}");
    let lines: Vec<&str> = log["logContent"].as_str().unwrap().lines().collect();
    assert_eq!(log["toLineNum"], lines.len() + 1);
    let text = lines.join("\n");
    for part in ["database a: 32 units of 32: posthouse_ houses 0-31", "database b: 18 units of 18", "50 sent", "the run ends"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(ask("/kill", r#"{"jobId":3}"#).await, OK);
    assert!(ask("/nothing", "{}").await.starts_with(r#"{"code":500,"msg":"there is no /nothing here""#));
    assert!(ask(generation.trigger, "{}").await.starts_with(r#"{"code":500,"msg":"the request can't be read"#));

    let (_place, admin) = rig.shutdown().await;
    let removed = admin.sent("registryRemove");
    assert_eq!(removed.iter().map(|s| s.body.as_str()).collect::<Vec<_>>(), [registration]);
    from_us(&removed[0]);
}

#[tokio::test]
async fn admins_up_to_3_4_are_served() {
    // Their replies to us differ, which we don't read; what they send and take is the same from 2.3.0 on.
    conforms(A).await;
}

#[tokio::test]
async fn admins_from_3_5_are_served() {
    conforms(C).await;
}

#[tokio::test]
async fn an_admin_that_changed_its_generation_gets_results_in_its_new_form() {
    for (before, after) in [(A, C), (C, A)] {
        let rig = Rig::new(before, false).await;
        rig.ask(before.trigger, &run(1, &[])).await;
        rig.begun(1).await;
        rig.admin.is(Some(after));
        rig.script.open.send_replace(true);
        let result = rig.admin.result(1).await;
        assert_eq!(result[after.date], 1_586_629_003_729_i64, "{result}");
        rig.shutdown().await;
    }
}

// ---------------------------------------------------------------- the door

#[tokio::test]
async fn only_who_knows_the_token_comes_in() {
    let rig = Rig::new(A, true).await;
    let to = rig.xxl.address();
    for token in ["", "s3cre", "s3cretx", "S3cret", "default_token"] {
        for path in ["/run", "/trigger", "/kill", "/log", "/beat", "/idleBeat", "/other"] {
            let answer = ask(to, path, token, &run(1, &[])).await;
            assert_eq!((&answer["code"], &answer["msg"]), (&json!(500), &json!("the access token is wrong")), "{path} {token}");
        }
    }
    let (_, body) = raw(
        to,
        format!("POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{}", run(1, &[]).len(), run(1, &[])).as_bytes(),
    )
    .await;
    assert!(body.contains("the access token is wrong"), "{body}");
    let other =
        "POST /beat HTTP/1.1\r\nHost: x\r\nXXL-JOB-ACCESS-TOKEN: s3cret\r\nXXL-JOB-APPNAME: other\r\nContent-Length: 0\r\n\r\n";
    assert!(raw(to, other.as_bytes()).await.1.contains(r#""code":500"#));
    let get = "GET /beat HTTP/1.1\r\nHost: x\r\nXXL-JOB-ACCESS-TOKEN: s3cret\r\n\r\n";
    assert!(raw(to, get.as_bytes()).await.1.contains("only POST"));
    assert!(rig.script.taken().is_empty());
    rig.shutdown().await;
}

#[tokio::test]
async fn without_a_token_everybody_comes_in_if_that_is_allowed() {
    let (place, admin, script) = (Place::new(), Admin::start(Some(A)).await, Script::new(true));
    let config = XxlJobConfig { access_token: String::new(), allow_anonymous: true, ..config(&place, vec![admin.url()]) };
    let xxl = XxlJob::start(&config, script).await.unwrap();
    let registered = wait_for("a registration", || admin.sent("registry").into_iter().next()).await;
    assert!(!registered.headers.contains_key("xxl-job-access-token"));
    assert_eq!(ask(xxl.address(), "/run", "whatever", &run(1, &[])).await["code"], 200);
    admin.result(1).await;
    end(xxl).await;
}

#[tokio::test]
async fn scripts_and_unknown_handlers_groups_and_parameters_are_refused() {
    let rig = Rig::new(A, true).await;
    for glue in ["GLUE_GROOVY", "GLUE_SHELL", "GLUE_PYTHON", "GLUE_PHP", "GLUE_NODEJS", "GLUE_POWERSHELL", "bean", ""] {
        let why = rig.refused(1, &[("glueType", json!(glue)), ("glueSource", json!("touch /tmp/x"))]).await;
        assert!(why.contains("posthouse runs no scripts"), "{glue}: {why}");
    }
    for (change, part) in [
        (("executorHandler", json!("demoJobHandler")), "no handler \"demoJobHandler\""),
        (("executorHandler", Value::Null), "the handler is posthouseScan"),
        (("executorParams", json!("lotery")), "no group \"lotery\""),
        (("executorParams", json!("")), "names no group"),
        (("executorParams", json!(r#"{"group":"one","databases":["x"]}"#)), "has no database x"),
        (("broadcastTotal", json!(-9)), ""),
    ] {
        let answer = rig.ask("/run", &run(2, std::slice::from_ref(&change))).await;
        if part.is_empty() {
            assert_eq!(answer["code"], 200, "{answer}");
        } else {
            assert!(answer["msg"].as_str().unwrap().contains(part), "{part}: {answer}");
        }
    }
    let why = rig.refused(3, &[("broadcastIndex", json!(3)), ("broadcastTotal", json!(3))]).await;
    assert!(why.contains("no part 3"), "{why}");
    rig.admin.result(2).await;
    assert_eq!(rig.admin.results().len(), 1, "what is refused has no result");
    rig.shutdown().await;
}

#[tokio::test]
async fn bodies_are_taken_up_to_five_mebibytes() {
    let rig = Rig::new(A, true).await;
    let padded = |bytes: usize| format!("{}{}", run(1, &[]), " ".repeat(bytes - run(1, &[]).len()));
    let answer = rig.ask("/run", &padded((5 << 20) + 1)).await;
    assert!(answer["msg"].as_str().unwrap().contains("larger than 5 MiB"), "{answer}");
    assert_eq!(rig.ask("/run", &padded(5 << 20)).await["code"], 200);
    rig.admin.result(1).await;
    rig.shutdown().await;
}

// ---------------------------------------------------------------- runs

#[tokio::test]
async fn three_parts_of_a_broadcast_cover_fifty_units_once() {
    let rig = Rig::new(A, true).await;
    for index in 0..3 {
        // As three instances would get them: jobs of the same number in three executors don't wait for each other.
        let change = [
            ("jobId", json!(10 + index)),
            ("executorParams", json!("lottery")),
            ("broadcastIndex", json!(index)),
            ("broadcastTotal", json!(3)),
        ];
        rig.trigger(100 + index, &change).await;
    }
    let mut sent = 0;
    for index in 0..3 {
        let result = rig.admin.result(100 + index).await;
        let message = result["handleMsg"].as_str().unwrap();
        let part: u64 = message.split(' ').next().unwrap().parse().unwrap();
        assert!((16..=18).contains(&part), "{message}");
        sent += part;
    }
    assert_eq!(sent, 50);
    let mut times: BTreeMap<(String, Unit), usize> = BTreeMap::new();
    for unit in rig.script.taken() {
        *times.entry(unit).or_default() += 1;
    }
    assert!(times.len() == 50 && times.values().all(|n| *n == 1), "{times:?}");
    rig.shutdown().await;
}

#[tokio::test]
async fn runs_of_a_job_wait_for_each_other_and_those_of_others_dont() {
    let rig = Rig::new(A, false).await;
    rig.trigger(1, &[]).await;
    rig.begun(1).await;
    rig.trigger(2, &[]).await;
    rig.trigger(3, &[("executorBlockStrategy", json!("whatever"))]).await;
    let twice = rig.refused(2, &[]).await;
    assert!(twice.contains("run 2 was triggered already"), "{twice}");
    assert!(rig.refused(1, &[]).await.contains("already"), "the one that runs, too");
    assert_eq!(rig.ask("/idleBeat", r#"{"jobId":3}"#).await["code"], 500);
    assert_eq!(rig.ask("/idleBeat", r#"{"jobId":4}"#).await["code"], 200);
    rig.trigger(4, &[("jobId", json!(4))]).await;
    rig.begun(2).await;
    assert_eq!(rig.script.taken().len(), 2, "2 and 3 wait");
    rig.script.open.send_replace(true);
    for log_id in [1, 2, 3, 4] {
        assert_eq!(rig.admin.result(log_id).await["handleCode"], 200);
    }
    let order: Vec<i64> = rig.admin.results().iter().map(|r| r["logId"].as_i64().unwrap()).filter(|id| *id != 4).collect();
    assert_eq!(order, [1, 2, 3]);
    wait_for("it is idle", || rig.xxl.jobs.is_idle(3).then_some(())).await;
    rig.shutdown().await;
}

#[tokio::test]
async fn discard_later_refuses_the_new_run() {
    let rig = Rig::new(A, false).await;
    let discard = [("executorBlockStrategy", json!("DISCARD_LATER"))];
    rig.trigger(1, &discard).await;
    rig.begun(1).await;
    assert!(rig.refused(2, &discard).await.contains("DISCARD_LATER"));
    rig.script.open.send_replace(true);
    rig.admin.result(1).await;
    wait_for("it is idle", || rig.xxl.jobs.is_idle(3).then_some(())).await;
    rig.trigger(2, &discard).await;
    rig.admin.result(2).await;
    rig.shutdown().await;
}

#[tokio::test]
async fn cover_early_stops_the_run_that_is_going() {
    let rig = Rig::new(A, false).await;
    rig.trigger(1, &[]).await;
    rig.begun(1).await;
    rig.trigger(2, &[]).await;
    rig.trigger(3, &[("executorBlockStrategy", json!("COVER_EARLY"))]).await;
    rig.begun(2).await;
    let covered = rig.admin.result(1).await;
    assert_eq!(covered["handleCode"], 500);
    assert!(covered["handleMsg"].as_str().unwrap().starts_with("stopped: a later run of this job"), "{covered}");
    let waited = rig.admin.result(2).await;
    assert!(waited["handleCode"] == 500 && waited["handleMsg"].as_str().unwrap().starts_with("not run: a later run"), "{waited}");
    rig.script.open.send_replace(true);
    assert_eq!(rig.admin.result(3).await["handleCode"], 200);
    assert_eq!(rig.script.ended(), ["stopped", "done"]);
    rig.shutdown().await;
}

#[tokio::test]
async fn kill_stops_what_runs_and_what_waits() {
    let rig = Rig::new(A, false).await;
    rig.trigger(1, &[]).await;
    rig.begun(1).await;
    rig.trigger(2, &[]).await;
    rig.trigger(3, &[("jobId", json!(4))]).await;
    rig.begun(2).await;
    assert_eq!(rig.ask("/kill", r#"{"jobId":3}"#).await["code"], 200);
    let killed = rig.admin.result(1).await;
    assert_eq!(
        (&killed["handleCode"], &killed["handleMsg"]),
        (&json!(500), &json!("stopped by the admin; 1 sent, 0 to be tried again, 0 FAILED"))
    );
    let waited = rig.admin.result(2).await;
    assert!(waited["handleCode"] == 500 && waited["handleMsg"].as_str().unwrap().contains("while it waited"), "{waited}");
    assert_eq!(rig.ask("/kill", r#"{"jobId":3}"#).await["code"], 200, "nothing is there to be stopped");
    assert_eq!(rig.script.ended(), ["stopped"], "the other job goes on");
    rig.script.open.send_replace(true);
    assert_eq!(rig.admin.result(3).await["handleCode"], 200);
    rig.shutdown().await;
}

#[tokio::test]
async fn a_run_that_takes_too_long_is_stopped_with_the_code_of_a_timeout() {
    let rig = Rig::new(A, false).await;
    rig.trigger(1, &[("executorTimeout", json!(1))]).await;
    let late = rig.admin.result(1).await;
    assert_eq!(
        (&late["handleCode"], &late["handleMsg"]),
        (&json!(502), &json!("stopped after its timeout of 1 s; 1 sent, 0 to be tried again, 0 FAILED"))
    );
    assert_eq!(rig.script.ended(), ["stopped"]);
    rig.shutdown().await;
}

#[tokio::test]
async fn an_error_is_told_and_harmless_in_a_page() {
    let rig = Rig::new(A, true).await;
    rig.trigger(1, &[("executorParams", json!("broken,one"))]).await;
    let failed = rig.admin.result(1).await;
    assert_eq!(failed["handleCode"], 500);
    assert_eq!(
        failed["handleMsg"],
        "1 sent, 0 to be tried again, 0 FAILED, 2 wait for destinations that are down; group broken, database one: house 0 belongs to relay-‹2›"
    );
    rig.shutdown().await;
}

// ---------------------------------------------------------------- admins that are away, and ends

#[tokio::test]
async fn the_first_admin_that_takes_it_is_enough() {
    let (place, script) = (Place::new(), Script::new(true));
    let (away, refuses, takes, last) =
        (Admin::start(None).await, Admin::start(Some(A)).await, Admin::start(Some(A)).await, Admin::start(Some(A)).await);
    refuses.refuses("\"");
    let gone: Url = "http://127.0.0.1:1/xxl-job-admin".parse().unwrap();
    let admins = vec![gone, away.url(), refuses.url(), takes.url(), last.url()];
    let xxl = XxlJob::start(&config(&place, admins), script).await.unwrap();
    wait_for("a registration", || takes.sent("registry").into_iter().next()).await;
    assert_eq!(ask(xxl.address(), "/run", "s3cret", &run(1, &[])).await["code"], 200);
    takes.result(1).await;
    end(xxl).await;
    assert_eq!((away.sent("callback").len(), refuses.sent("callback").len(), takes.sent("callback").len()), (1, 1, 1));
    assert!(last.sent("registry").is_empty() && last.sent("callback").is_empty() && last.sent("registryRemove").is_empty());
    assert_eq!(takes.sent("registryRemove").len(), 1);
}

#[tokio::test]
async fn one_result_that_is_never_taken_holds_up_no_other() {
    let rig = Rig::new(A, true).await;
    rig.admin.refuses("\"logId\":13,");
    rig.admin.is(None);
    for log_id in 12..16 {
        rig.trigger(log_id, &[("jobId", json!(log_id))]).await;
    }
    wait_for("it was told", || (!rig.admin.sent("callback").is_empty()).then_some(())).await;
    wait_for("all are done", || (rig.script.ended().len() == 4).then_some(())).await;
    rig.admin.is(Some(A));
    for log_id in [12, 14, 15] {
        rig.admin.result(log_id).await;
    }
    rig.trigger(16, &[]).await;
    rig.admin.result(16).await;
    assert!(rig.admin.results().iter().all(|r| r["logId"] != 13));
    let (place, _admin) = rig.shutdown().await;
    assert!(place.path().join("results/13.json").exists(), "it is kept");
    assert!(!place.path().join("results/12.json").exists());
}

#[test]
fn results_outlive_an_admin_that_is_away_and_the_process() {
    let place = Place::new();
    let outside = Runtime::new().unwrap();
    let admin = outside.block_on(Admin::start(None));
    let script = Script::new(false);
    let config = config(&place, vec![admin.url()]);
    let start = || XxlJob::start(&config, script.clone());

    // The first process: three runs end while no admin is there, one goes on and one waits. Then everything stops at once.
    let first = Runtime::new().unwrap();
    let xxl = first.block_on(async {
        let xxl = start().await.unwrap();
        for log_id in 1..4 {
            ask(xxl.address(), "/trigger", "s3cret", &run(log_id, &[])).await;
            wait_for("it begins", || (script.taken().len() == usize::try_from(log_id).unwrap()).then_some(())).await;
            ask(xxl.address(), "/kill", "s3cret", r#"{"jobId":3}"#).await;
            wait_for("it ends", || xxl.jobs.is_idle(3).then_some(())).await;
        }
        for log_id in 4..6 {
            ask(xxl.address(), "/run", "s3cret", &run(log_id, &[])).await;
        }
        wait_for("the fourth begins", || (script.taken().len() == 4).then_some(())).await;
        // It tries again and again.
        let before = admin.sent("callback").len();
        wait_for("results are told again", || (admin.sent("callback").len() > before + 2).then_some(())).await;
        xxl
    });
    first.shutdown_timeout(SOON);
    drop(xxl);
    assert!(admin.results().is_empty());

    // The second one tells how they ended, in the form in which they were asked for, and in order.
    outside.block_on(async {
        admin.is(Some(C));
        let xxl = start().await.unwrap();
        for log_id in 1..4 {
            let result = admin.result(log_id).await;
            assert!(result["handleCode"] == 500 && result["handleMsg"].as_str().unwrap().starts_with("stopped by"), "{result}");
        }
        for log_id in 4..6 {
            let result = admin.result(log_id).await;
            assert!(
                result["handleCode"] == 500 && result["handleMsg"].as_str().unwrap().contains("ended before this run did"),
                "{result}"
            );
        }
        let order: Vec<i64> = admin.results().iter().map(|r| r["logId"].as_i64().unwrap()).collect();
        assert_eq!(order, [1, 2, 3, 4, 5]);
        end(xxl).await;
        assert_eq!(std::fs::read_dir(place.path().join("results")).unwrap().count(), 1, "only the lock is left");
        // The third one has nothing to tell.
        let xxl = start().await.unwrap();
        end(xxl).await;
        assert_eq!(admin.results().len(), 5);
    });
}

#[tokio::test]
async fn at_the_end_runs_finish_and_everything_is_told() {
    let rig = Rig::new(A, false).await;
    wait_for("a registration", || rig.admin.sent("registry").into_iter().next()).await;
    rig.trigger(1, &[]).await;
    rig.begun(1).await;
    rig.trigger(2, &[]).await;
    let Rig { place: _place, admin, script, xxl } = rig;
    let to = xxl.address();
    let ending = tokio::spawn(end(xxl));
    wait_for("it is gone for the admin", || admin.sent("registryRemove").into_iter().next()).await;
    let waited = admin.result(2).await;
    assert!(waited["handleCode"] == 500 && waited["handleMsg"] == "not run: posthouse ends", "{waited}");
    let refused = ask(to, "/run", "s3cret", &run(3, &[])).await;
    assert_eq!((&refused["code"], &refused["msg"]), (&json!(500), &json!("posthouse ends")));
    assert!(!ending.is_finished(), "the first run is still going");
    script.open.send_replace(true);
    ending.await.unwrap();
    assert_eq!(admin.result(1).await["handleCode"], 200);
    assert_eq!(script.ended(), ["done"]);
}

#[tokio::test]
async fn at_the_end_runs_that_take_too_long_are_stopped_and_told() {
    let rig = Rig::new(A, false).await;
    rig.trigger(1, &[]).await;
    rig.begun(1).await;
    let Rig { place: _place, admin, script, xxl } = rig;
    // A quarter of it is for what is in flight.
    xxl.end_runs(Instant::now() + Duration::from_secs(4)).await;
    xxl.shutdown().await;
    assert_eq!(script.ended(), ["stopped"]);
    let stopped = admin.result(1).await;
    assert!(
        stopped["handleCode"] == 500 && stopped["handleMsg"].as_str().unwrap().starts_with("stopped: posthouse ends"),
        "{stopped}"
    );
}

#[test]
fn at_the_end_runs_that_do_not_stop_are_cut_off_and_told_by_the_next_process() {
    let place = Place::new();
    let script = Script::new(false);
    let outside = Runtime::new().unwrap();
    let admin = outside.block_on(Admin::start(Some(A)));
    let config = config(&place, vec![admin.url()]);
    Runtime::new().unwrap().block_on(async {
        let xxl = XxlJob::start(&config, script.clone()).await.unwrap();
        ask(xxl.address(), "/run", "s3cret", &run(1, &[("executorParams", json!("stubborn"))])).await;
        wait_for("it begins", || (!script.taken().is_empty()).then_some(())).await;
        xxl.end_runs(Instant::now() + Duration::from_millis(200)).await;
        xxl.shutdown().await;
        assert!(admin.results().is_empty());
    });
    outside.block_on(async {
        let xxl = XxlJob::start(&config, script.clone()).await.unwrap();
        let result = admin.result(1).await;
        assert!(result["handleMsg"].as_str().unwrap().contains("ended before this run did"), "{result}");
        end(xxl).await;
    });
    assert!(script.ended().is_empty(), "it was cut off");
}

#[tokio::test]
async fn a_directory_in_use_and_a_port_in_use_are_told() {
    let rig = Rig::new(A, true).await;
    let again = XxlJob::start(&config(&rig.place, vec![rig.admin.url()]), rig.script.clone()).await.err().unwrap();
    assert!(again.text.contains("xxl_job.data_dir") && again.text.contains("another process"), "{}", again.text);
    let place = Place::new();
    let taken = XxlJobConfig { listen: rig.xxl.address(), ..config(&place, vec![rig.admin.url()]) };
    let taken = XxlJob::start(&taken, rig.script.clone()).await.err().unwrap();
    assert!(taken.text.contains("xxl_job.listen"), "{}", taken.text);
    rig.shutdown().await;
}
