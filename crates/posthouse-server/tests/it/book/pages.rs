//! Pages that are followed from top to bottom, as a reader would. What stands above a block says what is done with it:
//!
//! | comment | |
//! |---|---|
//! | `<!-- test: file NAME -->` | the block is a file of this name |
//! | `<!-- test: file NAME, started by COMMAND -->` | and a server, which goes on running to the end of the page |
//! | `<!-- test: run -->` | the lines are run by a shell, or the SQL by the page's database, and must work |
//! | `<!-- test: run until TEXT -->` | the same, again and again until TEXT is in what it prints |
//! | `<!-- test: start -->` | the last line is a server that goes on running to the end of the page |
//!
//! Addresses and databases of the page become those of the test.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use sqlx::Connection;

use super::markdown::{Block, Page, blocks, pages};
use super::sql::Kind;
use crate::support::{Dir, MySqlDatabase, PATIENCE, on_mysql, on_postgres, posthouse, run, runtime, unique, variable, wait_for};

/// The pages, and on which database each is followed.
const FOLLOWED: [(&str, Kind); 6] = [
    ("README.md", Kind::Sqlite),
    ("README.zh-CN.md", Kind::Sqlite),
    ("docs/http-api.md", Kind::Sqlite),
    ("docs/quick-start-sqlite.md", Kind::Sqlite),
    ("docs/quick-start-postgresql.md", Kind::Postgres),
    ("docs/quick-start-mysql.md", Kind::MySql),
];

/// What a page takes for granted: a relay with this configuration.
const GIVEN: [(&str, &str); 1] = [(
    "docs/http-api.md",
    "[databases.shop]\nurl = \"sqlite:shop.db\"\n[routes.\"inventory.deduct\"]\nto = \"http://127.0.0.1:9000/\"\n\
     [server]\nlisten = \"127.0.0.1:8420\"\ntoken = \"a-token-for-this-page\"\n",
)];

/// The token of the server that is given.
const TOKEN: &str = "a-token-for-this-page";

/// The addresses that pages write.
const RECEIVER: &str = "9000";
const SERVER: &str = "8420";

/// The variable in which pages keep the address of their database.
const DATABASE: &str = "SHOP_DATABASE_URL";

fn follows(block: &Block) -> bool {
    ["file ", "run", "start"].iter().any(|what| block.directive.starts_with(what))
}

/// A port that nobody listens on, and below those that the system gives out by itself.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = u16::try_from(std::process::id() % 5_000).unwrap() * 2 + 20_000;
    let mut tries = (0..10_000).map(|_| start + NEXT.fetch_add(1, Ordering::Relaxed) % 2_000);
    tries.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a port")
}

/// A PostgreSQL database of a page's own.
pub(super) struct PostgresDatabase {
    server: String,
    name: String,
    pub(super) url: String,
}

impl PostgresDatabase {
    pub(super) fn new() -> Self {
        let server = variable("POSTHOUSE_TEST_POSTGRES_URL");
        let name = unique("book");
        on_postgres(&server, format!("CREATE DATABASE {name}"));
        let mut url = url::Url::parse(&server).unwrap();
        url.set_path(&name);
        Self { server, name, url: url.into() }
    }
}

impl Drop for PostgresDatabase {
    fn drop(&mut self) {
        let (url, sql) = (self.server.clone(), format!("DROP DATABASE {} WITH (FORCE)", self.name));
        // A failed test may leave it in use; its name is never used again.
        let _ = std::thread::spawn(move || on_postgres(&url, sql)).join();
    }
}

/// Whether somebody listens there; a server of ours, whether it is ready.
fn listens(port: u16, ours: bool) -> bool {
    let Ok(mut conn) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    if !ours {
        return true;
    }
    let mut answer = String::new();
    let asked = conn
        .set_read_timeout(Some(PATIENCE))
        .and_then(|()| write!(conn, "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
    asked.and_then(|()| conn.read_to_string(&mut answer)).is_ok() && answer.split(' ').nth(1) == Some("200")
}

struct Stage {
    dir: Dir,
    kind: Kind,
    receiver: u16,
    server: u16,
    url: String,
    /// With the file that has what they print.
    started: Vec<(Child, PathBuf)>,
    _postgres: Option<PostgresDatabase>,
    _mysql: Option<MySqlDatabase>,
}

impl Drop for Stage {
    fn drop(&mut self) {
        for (child, _) in &mut self.started {
            // Each is a process that this page started.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Stage {
    fn new(kind: Kind) -> Self {
        let postgres = (kind == Kind::Postgres).then(PostgresDatabase::new);
        let mysql = (kind == Kind::MySql).then(MySqlDatabase::new);
        let url = postgres.as_ref().map(|d| d.url.clone()).or(mysql.as_ref().map(|d| d.url.clone()));
        let url = url.unwrap_or_else(|| "sqlite:shop.db".into());
        Self {
            dir: Dir::new(),
            kind,
            receiver: port(),
            server: port(),
            url,
            started: Vec::new(),
            _postgres: postgres,
            _mysql: mysql,
        }
    }

    /// With this test's own addresses.
    fn own(&self, text: &str) -> String {
        let mut text = text.replace(RECEIVER, &self.receiver.to_string()).replace(SERVER, &self.server.to_string());
        if text.contains("[databases.") && !text.contains("[server]") {
            text += &format!("\n[server]\nlisten = \"127.0.0.1:{}\"\n", self.server);
        }
        text
    }

    fn shell(&self, script: &str) -> Command {
        // These are set already, to the test's own. And what a server refuses is an error here.
        let set = |line: &str| [DATABASE, "TOKEN"].iter().any(|name| line.starts_with(&format!("export {name}=")));
        let script: String = self.own(script).lines().filter(|line| !set(line)).map(|line| format!("{line}\n")).collect();
        let script = if script.contains("curl ") {
            format!("curl() {{ command curl -sS --fail-with-body \"$@\"; }}\n{script}")
        } else {
            script
        };
        let program = posthouse(&self.dir);
        let mut path = vec![Path::new(program.get_program()).parent().unwrap().to_owned()];
        path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap()));
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", script.trim()]).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env("PATH", std::env::join_paths(path).unwrap()).env(DATABASE, &self.url).env("TOKEN", TOKEN);
        command.env("NO_COLOR", "1");
        for name in ["POSTHOUSE_CONFIG", "POSTHOUSE_DATABASE_URL", "RUST_LOG"] {
            command.env_remove(name);
        }
        command
    }

    fn sql(&self, text: &str) {
        match self.kind {
            Kind::Postgres => on_postgres(&self.url, text.to_owned()),
            Kind::MySql => on_mysql(&self.url, text.to_owned()),
            Kind::Sqlite => runtime().block_on(async {
                let file = format!("sqlite:{}", self.dir.path().join("shop.db").display());
                let mut conn = sqlx::SqliteConnection::connect(&file).await.unwrap();
                sqlx::raw_sql(sqlx::AssertSqlSafe(text.to_owned())).execute(&mut conn).await.unwrap();
            }),
        }
    }

    /// Runs the lines before the last one, and starts that.
    fn start(&mut self, place: &str, lines: &str) {
        let (before, line) = lines.trim().rsplit_once('\n').unwrap_or(("", lines.trim()));
        self.run(place, before);
        let log = self.dir.path().join(format!("started-{}.log", self.started.len()));
        let out = std::fs::File::create(&log).unwrap();
        let child = self.shell(&format!("exec {line}")).stdout(out.try_clone().unwrap()).stderr(out).spawn().unwrap();
        self.started.push((child, log.clone()));
        let port = if line.starts_with("posthouse") { self.server } else { self.receiver };
        let (child, _) = self.started.last_mut().unwrap();
        wait_for(&format!("{place}: {line} listens"), || {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{place}: {line} ended: {ended:?}\n{}", std::fs::read_to_string(&log).unwrap());
            listens(port, line.starts_with("posthouse")).then_some(())
        });
    }

    fn run(&self, place: &str, lines: &str) {
        let ran = run(&mut self.shell(lines));
        assert!(ran.code == 0, "{place}: exit code {}\n{}{}", ran.code, ran.stdout, ran.stderr);
    }

    fn follow(&mut self, block: &Block) {
        match block.directive.split_once(' ').unwrap_or((&block.directive, "")) {
            ("file", name) => {
                let (name, command) = name.split_once(", started by ").unwrap_or((name, ""));
                self.dir.write(name, &self.own(&block.text));
                if !command.is_empty() {
                    self.start(&block.place(), command);
                }
            }
            ("start", "") => self.start(&block.place(), &block.text),
            ("run", "") if block.info == "sql" => self.sql(&block.text),
            ("run", "") => self.run(&block.place(), &block.text),
            ("run", until) => {
                let text = until.strip_prefix("until ").unwrap_or_else(|| panic!("{}: {until:?}", block.place()));
                let mut last = String::new();
                let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    wait_for(&format!("{}: {text:?} is printed", block.place()), || {
                        let ran = run(&mut self.shell(&block.text));
                        last = format!("{}{}", ran.stdout, ran.stderr);
                        ran.stdout.contains(text).then_some(())
                    });
                }));
                assert!(seen.is_ok(), "{}: {text:?} is not printed: {last}", block.place());
            }
            (other, _) => panic!("{}: {other:?} is nothing that can be done", block.place()),
        }
    }
}

fn follow(path: &str) {
    let (_, kind) = FOLLOWED.iter().find(|(page, _)| *page == path).unwrap();
    let page: Page = pages().into_iter().find(|page| page.path == path).unwrap_or_else(|| panic!("{path}"));
    let all: Vec<Block> = blocks(&page).into_iter().filter(follows).collect();
    assert!(!all.is_empty(), "{path}: nothing to follow");
    let mut stage = Stage::new(*kind);
    if let Some((_, config)) = GIVEN.iter().find(|(page, _)| *page == path) {
        stage.dir.write("posthouse.toml", &stage.own(config));
        stage.start(path, "posthouse migrate\nposthouse relay");
    }
    for block in &all {
        stage.follow(block);
    }
    if all.iter().any(|block| block.info == "python") {
        wait_for(&format!("{path}: a message is delivered"), || {
            let sent = run(&mut stage.shell("posthouse messages list --status SENT --json"));
            sent.stdout.contains("\"message_id\"").then_some(())
        });
    }
    for (child, log) in &mut stage.started {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "{path}: a server ended: {ended:?}: {}", std::fs::read_to_string(log).unwrap());
    }
}

#[test]
fn the_readme_can_be_followed() {
    follow("README.md");
}

#[test]
fn the_readme_in_chinese_can_be_followed() {
    follow("README.zh-CN.md");
}

#[test]
fn what_the_page_about_the_api_asks_for_is_served() {
    follow("docs/http-api.md");
}

#[test]
fn the_quick_start_on_sqlite_can_be_followed() {
    follow("docs/quick-start-sqlite.md");
}

#[test]
fn the_quick_start_on_postgres_can_be_followed() {
    follow("docs/quick-start-postgresql.md");
}

#[test]
fn the_quick_start_on_mysql_can_be_followed() {
    follow("docs/quick-start-mysql.md");
}

#[test]
fn every_page_with_something_to_follow_is_followed() {
    let with: Vec<String> = pages().into_iter().filter(|page| blocks(page).iter().any(follows)).map(|page| page.path).collect();
    let mut followed = FOLLOWED.map(|(page, _)| page);
    followed.sort_unstable();
    assert_eq!(with, followed);
}
