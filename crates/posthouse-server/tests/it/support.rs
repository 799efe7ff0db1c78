//! Running the program, a schema and a directory per test, and a receiver that does as it is told.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant, SystemTime};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use serde_json::Value;
use sqlx::Connection;

/// Long enough for any machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A name that no other test, in no other process, has.
pub(crate) fn unique(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros();
    format!("{what}_{:x}_{}_{}", now & 0xffff_ffff, std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A directory that goes with the test.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(unique("posthouse"));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // What stays behind lies under target.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What came of a run.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    #[track_caller]
    pub(crate) fn code(self, expected: i32) -> Self {
        assert_eq!(self.code, expected, "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }
}

/// The program in a directory, without the environment's own configuration.
pub(crate) fn posthouse(dir: &Dir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthouse"));
    command.current_dir(dir.path()).stdin(Stdio::null());
    for name in ["POSTHOUSE_CONFIG", "POSTHOUSE_DATABASE_URL", "RUST_LOG"] {
        command.env_remove(name);
    }
    command
}

pub(crate) fn run(command: &mut Command) -> Ran {
    let out = command.output().unwrap();
    Ran {
        code: out.status.code().unwrap_or(-1),
        stdout: String::from_utf8(out.stdout).unwrap(),
        stderr: String::from_utf8(out.stderr).unwrap(),
    }
}

/// Runs `posthouse ARGS…` in a directory.
pub(crate) fn ph(dir: &Dir, args: &[&str]) -> Ran {
    run(posthouse(dir).args(args))
}

pub(crate) fn run_with_stdin(command: &mut Command, input: &[u8]) -> Ran {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let out = child.wait_with_output().unwrap();
    Ran {
        code: out.status.code().unwrap_or(-1),
        stdout: String::from_utf8(out.stdout).unwrap(),
        stderr: String::from_utf8(out.stderr).unwrap(),
    }
}

/// A PostgreSQL schema of a test's own.
pub(crate) struct Schema {
    pub(crate) url: String,
    pub(crate) name: String,
}

impl Schema {
    pub(crate) fn new() -> Self {
        let url = variable("POSTHOUSE_TEST_POSTGRES_URL");
        Self { url, name: unique("srv") }
    }

    /// A configuration with this database, named `main`, and what else is wanted.
    pub(crate) fn config(&self, rest: &str) -> String {
        format!("[databases.main]\nurl = {:?}\nschema = {:?}\nhouses = 4\n{rest}", self.url, self.name)
    }
}

impl Drop for Schema {
    fn drop(&mut self) {
        let (url, sql) = (self.url.clone(), format!("DROP SCHEMA IF EXISTS \"{}\" CASCADE", self.name));
        // A failed test may leave it in use; its name is never used again.
        let _ = std::thread::spawn(move || on_postgres(&url, sql)).join();
    }
}

/// Runs SQL of the test's own.
pub(crate) fn on_postgres(url: &str, sql: String) {
    runtime().block_on(async {
        let mut conn = sqlx::PgConnection::connect(url).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut conn).await.unwrap();
    });
}

pub(crate) fn on_mysql(url: &str, sql: String) {
    runtime().block_on(async {
        let mut conn = sqlx::MySqlConnection::connect(url).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut conn).await.unwrap();
    });
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// A MySQL or MariaDB database of a test's own.
pub(crate) struct MySqlDatabase {
    server: String,
    name: String,
    pub(crate) url: String,
}

impl MySqlDatabase {
    pub(crate) fn new() -> Self {
        let server = variable("POSTHOUSE_TEST_MYSQL_URL");
        let name = unique("srv");
        on_mysql(&server, format!("CREATE DATABASE {name}"));
        let mut url = url::Url::parse(&server).unwrap();
        url.set_path(&name);
        Self { server, name, url: url.into() }
    }

    /// Runs a statement in it.
    pub(crate) fn execute(&self, sql: &str) {
        on_mysql(&self.url, sql.to_owned());
    }
}

impl Drop for MySqlDatabase {
    fn drop(&mut self) {
        let (url, sql) = (self.server.clone(), format!("DROP DATABASE {}", self.name));
        // As for a schema.
        let _ = std::thread::spawn(move || on_mysql(&url, sql)).join();
    }
}

/// A server that the tests need. Without it they fail: a test that is left out proves nothing.
pub(crate) fn variable(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set; start the servers and set it with: eval \"$(scripts/services env)\""))
}

/// Waits until `met` gives something, and fails with `what` when it takes too long.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut met: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = met() {
            return value;
        }
        assert!(started.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        // Soon at first, then less and less often: asking costs the processors that others wait for.
        std::thread::sleep((started.elapsed() / 10).clamp(Duration::from_millis(20), Duration::from_millis(100)));
    }
}

/// A running relay, or a dashboard without one.
pub(crate) struct Running {
    child: Child,
    pub(crate) address: String,
    log: Arc<Mutex<String>>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    /// Starts a relay and waits until it tells its address.
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::started(command.arg("relay"))
    }

    /// The same for `posthouse dashboard`.
    pub(crate) fn dashboard(command: &mut Command) -> Self {
        Self::started(command.arg("dashboard"))
    }

    fn started(command: &mut Command) -> Self {
        let mut child = command.env("NO_COLOR", "1").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let log = Arc::new(Mutex::new(String::new()));
        let (tell, told) = mpsc::channel();
        let into = log.clone();
        let reader = std::thread::spawn(move || {
            let mut line = String::new();
            while stderr.read_line(&mut line).is_ok_and(|n| n > 0) {
                if let Some((_, rest)) = line.split_once("dashboard on http://") {
                    // The test may have stopped waiting.
                    let _ = tell.send(rest.split(['/', ';']).next().unwrap_or_default().to_owned());
                }
                into.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        let address = told.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no address: {}", log.lock().unwrap()));
        Self { child, address, log, reader: Some(reader) }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Status and body of an endpoint.
    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        let mut conn = std::net::TcpStream::connect(&self.address).unwrap();
        conn.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(conn, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        conn.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn wait_ready(&self) {
        wait_for("the relay is ready", || (self.get("/readyz").0 == 200).then_some(()));
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// Waits for the end; exit code and log.
    pub(crate) fn ended(mut self) -> (i32, String) {
        let status = wait_for("the relay ends", || self.child.try_wait().unwrap());
        // The pipe ends with the process.
        self.reader.take().unwrap().join().unwrap();
        (status.code().unwrap_or(-1), self.log())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Ends it when a test failed; after `ended` there is nothing left to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the server answered.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
}

impl Got {
    #[track_caller]
    pub(crate) fn status(self, expected: u16) -> Self {
        assert_eq!(self.status, expected, "{}", self.text);
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }
}

/// Asks a server over HTTP, with headers that go with each request.
pub(crate) struct Client {
    base: String,
    headers: Vec<(String, String)>,
    client: reqwest::Client,
    runtime: Arc<tokio::runtime::Runtime>,
}

impl Client {
    pub(crate) fn new(address: &str) -> Self {
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        Self { base: format!("http://{address}"), headers: Vec::new(), client, runtime: Arc::new(runtime()) }
    }

    /// The same with a header.
    pub(crate) fn with(&self, name: &str, value: &str) -> Self {
        let mut headers = self.headers.clone();
        headers.push((name.to_owned(), value.to_owned()));
        Self { base: self.base.clone(), headers, client: self.client.clone(), runtime: self.runtime.clone() }
    }

    pub(crate) fn bearer(&self, token: &str) -> Self {
        self.with("authorization", &format!("Bearer {token}"))
    }

    pub(crate) fn send(&self, method: &str, path: &str, content: &str, body: impl Into<String>) -> Got {
        let mut request = self.client.request(method.parse().unwrap(), format!("{}{path}", self.base)).timeout(PATIENCE);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        if !content.is_empty() {
            request = request.header("content-type", content).body(body.into());
        }
        self.runtime.block_on(async {
            let answer = request.send().await.unwrap();
            let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
            Got { status, headers, text: answer.text().await.unwrap() }
        })
    }

    pub(crate) fn get(&self, path: &str) -> Got {
        self.send("GET", path, "", "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Got {
        self.send("POST", path, "application/json", body.to_string())
    }
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) message_id: String,
    pub(crate) body: Vec<u8>,
}

/// An HTTP server that answers each request with the status it is told to.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    state: Arc<Answers>,
    // Ends the server when dropped.
    _runtime: tokio::runtime::Runtime,
}

struct Answers {
    status: AtomicU16,
    seen: Mutex<Vec<Seen>>,
    /// Held back while false.
    open: tokio::sync::watch::Sender<bool>,
}

impl Receiver {
    pub(crate) fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let state =
            Arc::new(Answers { status: AtomicU16::new(200), seen: Mutex::default(), open: tokio::sync::watch::channel(true).0 });
        let app = Router::new().fallback(answer).with_state(state.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self { address, state, _runtime: runtime }
    }

    pub(crate) fn answer_with(&self, status: u16) {
        self.state.status.store(status, Ordering::SeqCst);
    }

    /// Whether answers go out, or wait.
    pub(crate) fn open(&self, open: bool) {
        self.state.open.send_replace(open);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }
}

async fn answer(State(state): State<Arc<Answers>>, headers: HeaderMap, body: axum::body::Bytes) -> StatusCode {
    let message_id = headers.get("posthouse-message-id").and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned();
    state.seen.lock().unwrap().push(Seen { message_id, body: body.to_vec() });
    let mut open = state.open.subscribe();
    // The sender lives as long as the state.
    let _ = open.wait_for(|open| *open).await;
    StatusCode::from_u16(state.status.load(Ordering::SeqCst)).unwrap()
}
