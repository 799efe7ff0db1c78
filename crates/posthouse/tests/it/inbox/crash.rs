//! Processes that die at any moment. A child of the test binary consumes; it is killed with SIGKILL, or kills itself.

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use posthouse::inbox::{Handled, Handler, HandlerError, Incoming};
use posthouse::store::{Backend, InboxStatus};
use posthouse::{InboxSettings, Tx};

use super::{Fixture, quick, try_effect};
use crate::support::{MySql, Postgres, SOON, Sqlite, TestDb, dies, on_all_databases, outbox_at, scale, wait_for};

on_all_databases!(killed_at_random_points_each_has_its_effect_once, a_message_that_kills_its_process_ends_failed);

/// Messages the child receives again and again until they are acknowledged.
const MESSAGES: usize = 150;

fn settings() -> InboxSettings {
    let mut s = quick();
    // Short enough that what a killed process held comes back within the test.
    s.lease = Duration::from_millis(400);
    s.handler_timeout = Duration::from_millis(300);
    s.database_timeout = Duration::from_millis(5_000);
    s
}

/// Not a test by itself: what a child process runs. The test harness calls it with the name of this function as a filter.
#[test]
fn child() {
    let Ok(role) = std::env::var("POSTHOUSE_INBOX_CHILD") else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let url = std::env::var("POSTHOUSE_CHILD_URL").unwrap();
    let schema = std::env::var("POSTHOUSE_CHILD_SCHEMA").ok();
    runtime.block_on(async {
        match std::env::var("POSTHOUSE_CHILD_DB").unwrap().as_str() {
            "postgres" => play::<Postgres>(&role, &url, schema.as_deref()).await,
            "mysql" => play::<MySql>(&role, &url, schema.as_deref()).await,
            _ => play::<Sqlite>(&role, &url, schema.as_deref()).await,
        }
    });
}

/// One line of the child's report, written at once so that it survives the kill.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // The parent may be gone already.
    let _ = writeln!(out, "@{line}");
    let _ = out.flush();
}

struct Consume<T> {
    effects: String,
    database: std::marker::PhantomData<fn(T)>,
}

impl<T: TestDb> Handler<T::Db> for Consume<T> {
    type Message = String;
    async fn handle(&self, tx: &mut Tx<T::Db>, m: String) -> Result<(), HandlerError> {
        say(&format!("run {m}"));
        try_effect::<T>(tx, &self.effects, &m).await?;
        if m.starts_with("poison") {
            std::process::abort();
        }
        if fastrand::u8(..) < 25 {
            return Err(HandlerError::retry("one in ten"));
        }
        Ok(())
    }
}

async fn play<T: TestDb>(role: &str, url: &str, schema: Option<&str>) {
    let outbox = outbox_at::<T::Db>(T::connect(url).await, schema);
    let mut settings = settings();
    settings.retry.max_attempts = 1_000;
    let effects = outbox.tables().name("effects");
    let handler = Consume::<T> { effects, database: std::marker::PhantomData };
    let inbox = posthouse::inbox::Inbox::of(&outbox, "inventory", settings).unwrap().on("consume", handler);
    let worker = inbox.start_worker().await.expect("worker");
    say("ready");
    if role == "worker" {
        std::future::pending::<()>().await;
    }
    // A broker that redelivers whatever isn't acknowledged; and now and then something that is.
    let acknowledged: HashSet<String> = std::env::var("POSTHOUSE_CHILD_DONE").unwrap().split(',').map(str::to_owned).collect();
    let redelivered = std::env::var("POSTHOUSE_CHILD_ROUND").unwrap() != "0";
    let tasks = (0..4).map(|task| {
        let (inbox, acknowledged) = (inbox.clone(), acknowledged.clone());
        tokio::spawn(async move {
            for n in (task..MESSAGES).step_by(4) {
                let id = format!("m{n}");
                if !acknowledged.contains(&id) || fastrand::u8(..) < 50 {
                    deliver(&inbox, &id, redelivered).await;
                }
            }
        })
    });
    futures_util::future::join_all(tasks).await;
    say("end");
    std::future::pending::<()>().await;
    worker.shutdown(Duration::from_secs(1)).await;
}

async fn deliver<DB: Backend>(inbox: &posthouse::inbox::Inbox<DB>, id: &str, redelivered: bool) {
    let incoming = Incoming::new(id, format!("{id:?}")).typed("consume").redelivered(redelivered);
    match inbox.handle(&incoming).await {
        Ok(Handled::Processed | Handled::Duplicate | Handled::WillRetry(_)) => say(&format!("ack {id}")),
        Ok(other) => say(&format!("wrong {id} {other:?}")),
        // Not acknowledged, so it comes again.
        Err(_) => {}
    }
}

fn spawn<T: TestDb>(f: &Fixture<T>, role: &str, round: usize, done: &HashSet<String>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "inbox::crash::child", "--nocapture", "--test-threads=1"])
        .env("POSTHOUSE_INBOX_CHILD", role)
        .env("POSTHOUSE_CHILD_URL", &f.place.url)
        .env("POSTHOUSE_CHILD_DB", T::NAME)
        .env("POSTHOUSE_CHILD_ROUND", round.to_string())
        .env("POSTHOUSE_CHILD_DONE", done.iter().cloned().collect::<Vec<_>>().join(","))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some(schema) = &f.place.schema {
        command.env("POSTHOUSE_CHILD_SCHEMA", schema);
    }
    command.spawn().expect("child")
}

/// Reads the child's report until it ends (it is killed meanwhile).
fn lines(child: &mut Child) -> Receiver<String> {
    let (tell, told) = std::sync::mpsc::channel();
    let out = child.stdout.take().expect("stdout");
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines() {
            let Ok(line) = line else { return };
            // The harness prints without a line feed before the first line.
            if let Some((_, said)) = line.split_once('@')
                && tell.send(said.to_owned()).is_err()
            {
                return;
            }
        }
    });
    told
}

async fn killed_at_random_points_each_has_its_effect_once<T: TestDb>() {
    let f = Fixture::<T>::with(settings()).await;
    let mut done = HashSet::new();
    let kills = if scale() > 1 { 30 } else { 4 };
    for round in 0.. {
        let last = round >= kills;
        let mut child = spawn(&f, "consume", round, &done);
        let heard = tokio::task::spawn_blocking(move || {
            let told = lines(&mut child);
            let mut heard = Vec::new();
            // Random, by what it said: between the first line and some tens later. At last until it is through.
            let end = 1 + fastrand::usize(0..150);
            while let Ok(line) = told.recv_timeout(SOON) {
                let through = line == "end";
                heard.push(line);
                if through || !last && heard.len() >= end {
                    break;
                }
            }
            (child, told, heard)
        });
        let (mut child, told, mut heard) = heard.await.unwrap();
        if last {
            assert_eq!(heard.last().map(String::as_str), Some("end"));
            let waiting = async || f.count(InboxStatus::Success).await == MESSAGES as i64;
            wait_for("every message to succeed", SOON, waiting).await;
        }
        child.kill().expect("kill");
        child.wait().expect("wait");
        heard.extend(told.iter());
        assert!(!heard.is_empty(), "the child said nothing in round {round}");
        for line in heard {
            assert!(!line.starts_with("wrong"), "{line}");
            done.extend(line.strip_prefix("ack ").map(str::to_owned));
        }
        // What was acknowledged is here, whatever happened to the process.
        for id in &done {
            assert!(f.found(id).await.is_some(), "{id} was acknowledged and is lost");
        }
        if last {
            break;
        }
    }
    assert_eq!(f.effects().await, MESSAGES as i64);
    for n in 0..MESSAGES {
        assert_eq!(f.effects_of(&format!("m{n}")).await, 1, "m{n}");
    }
}

/// Two poisons among good ones, all of them in one worker's batch: only the poisons fail.
async fn a_message_that_kills_its_process_ends_failed<T: TestDb>() {
    let f = Fixture::<T>::with(settings()).await;
    let mut ids: Vec<String> = (0..10).map(|n| format!("good-{n}")).collect();
    ids.insert(2, "poison-1".into());
    ids.insert(5, "poison-2".into());
    for id in &ids {
        let message = Incoming::new(&**id, format!("{id:?}")).typed("consume");
        let _ = f.fail(&message, || HandlerError::retry("not yet")).await;
    }
    let mut deaths = 0;
    let finished = async || {
        let left = f.count(InboxStatus::PendingRetry).await + f.count(InboxStatus::Retrying).await;
        left == 0
    };
    while !finished().await {
        assert!(deaths < 20, "it goes on for ever");
        let mut child = spawn(&f, "worker", 0, &HashSet::new());
        let told = lines(&mut child);
        deaths += i32::from(dies(&mut child, SOON, &finished).await);
        drop(told);
    }
    for id in &ids {
        let row = f.shown(id).await.row;
        let poison = id.starts_with("poison");
        assert_eq!(row.status, if poison { InboxStatus::Failed } else { InboxStatus::Success }, "{row:?}");
        if poison {
            assert!(row.last_error.as_deref().unwrap().contains("processes died"), "{row:?}");
        }
        assert_eq!(f.effects_of(id).await, i64::from(!poison), "{id}");
    }
    assert!((4..=7).contains(&deaths), "{deaths} deaths of two poisons with three claims each");
}
