//! Processes that die at any moment. A child of the test binary publishes or relays; it is killed with SIGKILL.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use posthouse::store::Backend;
use posthouse::transport::{Delivery, from_fn};
use posthouse::{Message, Outbox, Relay};

use super::quick;
use crate::support::{MySql, Postgres, SOON, Sqlite, TestDb, messages, on_all_databases, outbox_at, pending, scale, wait_for};

/// The lease of a child's relay.
pub(super) const CHILD_LEASE: Duration = Duration::from_millis(1_500);

on_all_databases!(killed_at_random_points_nothing_is_lost, message_that_kills_its_process_ends_failed);

/// Not a test by itself: what a child process runs. The test harness calls it with the name of this function as a filter.
#[test]
fn child() {
    let Ok(role) = std::env::var("POSTHOUSE_CHILD") else { return };
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

async fn play<T: TestDb>(role: &str, url: &str, schema: Option<&str>) {
    if role == "clock" {
        let clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        say(&format!("clock {}", clock.as_secs()));
    }
    let outbox = outbox_at::<T::Db>(T::connect(url).await, schema);
    let poison = role == "poison";
    let transport = from_fn(move |d: Delivery| {
        let m = d.message();
        let payload = String::from_utf8_lossy(&m.payload).into_owned();
        if poison && payload == "poison" {
            std::process::abort();
        }
        say(&format!("got {} {} {}", m.message_id, m.key.as_deref().unwrap_or("-"), payload));
        async move { if payload == "retry" { d.retry("not now", Some(Duration::from_secs(3600))) } else { d.delivered() } }
    });
    let mut settings = quick();
    settings.lease = CHILD_LEASE;
    settings.heartbeat = Duration::from_millis(200);
    settings.send_timeout = Duration::from_millis(800);
    let relay = Relay::builder(&outbox).settings(settings).transport("test", transport).start().await.expect("relay");
    if role == "clock" {
        for message in [
            Message::to("test:a").id("retry").payload("retry"),
            Message::to("test:a").id("later").deliver_in(Duration::from_secs(3600)),
        ] {
            outbox.publish_alone(message).await.expect("publish");
        }
        std::future::pending::<()>().await;
    }
    if poison {
        say("ready");
        std::future::pending::<()>().await;
    }
    let start: u64 = std::env::var("POSTHOUSE_CHILD_START").unwrap().parse().unwrap();
    say("ready");
    for n in start.. {
        let id = format!("m{n}");
        let result = publish(&outbox, n, &id).await;
        match result {
            Ok(true) => say(&format!("committed {id}")),
            Ok(false) => say(&format!("undone {id}")),
            // The commit's answer never came: it may or may not be there.
            Err(_) => {}
        }
    }
    relay.shutdown(Duration::from_secs(1)).await;
}

/// Publishes one message in a transaction; every seventh is rolled back.
async fn publish<DB: Backend>(outbox: &Outbox<DB>, n: u64, id: &str) -> Result<bool, posthouse::Error> {
    let mut tx = outbox.begin().await?;
    outbox.publish(&mut tx, Message::to("test:a").id(id).key(n % 5).payload(n.to_string())).await?;
    if n % 7 == 3 {
        tx.rollback().await?;
        return Ok(false);
    }
    say(&format!("maybe {id}"));
    tx.commit().await?;
    Ok(true)
}

fn spawn<T: TestDb>(role: &str, url: &str, schema: Option<&str>, start: u64) -> Child {
    spawn_with::<T>(role, url, schema, start, &[])
}

pub(super) fn spawn_with<T: TestDb>(
    role: &str,
    url: &str,
    schema: Option<&str>,
    start: u64,
    environment: &[(&str, String)],
) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "relay::crash::child", "--nocapture", "--test-threads=1"])
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .env("POSTHOUSE_CHILD", role)
        .env("POSTHOUSE_CHILD_URL", url)
        .env("POSTHOUSE_CHILD_DB", T::NAME)
        .env("POSTHOUSE_CHILD_START", start.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some(schema) = schema {
        command.env("POSTHOUSE_CHILD_SCHEMA", schema);
    }
    command.spawn().expect("child")
}

/// Reads the child's report until it ends (it is killed meanwhile).
pub(super) fn lines(child: &mut Child) -> std::sync::mpsc::Receiver<String> {
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

/// Every committed message is delivered, no rolled-back one ever, first deliveries of a key in order, pending ends empty.
async fn killed_at_random_points_nothing_is_lost<T: TestDb>() {
    let place = T::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    let (mut committed, mut undone, mut maybe) = (HashSet::new(), HashSet::new(), HashSet::new());
    let mut got: Vec<(String, String, u64)> = Vec::new();
    let kills = if scale() > 1 { 50 } else { 5 };
    let mut note = |line: &str, got: &mut Vec<(String, String, u64)>| {
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some("committed"), Some(id)) => drop(committed.insert(id.to_owned())),
            (Some("maybe"), Some(id)) => drop(maybe.insert(id.to_owned())),
            (Some("undone"), Some(id)) => drop(undone.insert(id.to_owned())),
            (Some("got"), Some(id)) => {
                if let (Some(key), Some(n)) = (words.next(), words.next().and_then(|n| n.parse().ok())) {
                    got.push((id.to_owned(), key.to_owned(), n));
                }
            }
            _ => {}
        }
    };
    for round in 0..kills {
        let (url, schema) = (place.url.clone(), place.schema.clone());
        let heard = tokio::task::spawn_blocking(move || {
            let mut child = spawn::<T>("both", &url, schema.as_deref(), round * 1_000_000);
            let told = lines(&mut child);
            let mut heard = Vec::new();
            // Random, by what it said: between the first line and some hundreds later.
            let end = 1 + fastrand::usize(0..400);
            while let Ok(line) = told.recv_timeout(SOON) {
                heard.push(line);
                if heard.len() >= end {
                    break;
                }
            }
            child.kill().expect("kill");
            child.wait().expect("wait");
            heard.extend(told.iter());
            heard
        })
        .await
        .unwrap();
        assert!(!heard.is_empty(), "the child said nothing in round {round}");
        for line in heard {
            note(&line, &mut got);
        }
    }
    // The last one lives in this process and clears up.
    let log = super::Log::default();
    let relay = Relay::builder(&outbox).settings(quick()).transport("test", super::Recorder(log.clone())).start().await.unwrap();
    wait_for("pending ends empty", SOON * 3, async || pending::<T>(&outbox).await == 0).await;
    for seen in log.seen() {
        let n = String::from_utf8(seen.payload).unwrap().parse().unwrap();
        got.push((seen.message_id, seen.key.unwrap(), n));
    }
    relay.shutdown(Duration::from_secs(5)).await;
    let delivered: HashSet<&String> = got.iter().map(|(id, ..)| id).collect();
    let lost: Vec<_> = committed.iter().filter(|id| !delivered.contains(id)).collect();
    assert_eq!(lost, Vec::<&String>::new(), "lost");
    assert!(
        delivered.iter().all(|id| maybe.contains(*id) && !undone.contains(*id)),
        "a message that was never committed was delivered"
    );
    assert!(committed.len() > 50, "only {} committed; the test says little", committed.len());
    let (mut first, mut last) = (HashSet::new(), HashMap::new());
    for (id, key, n) in got {
        if first.insert(id)
            && let Some(before) = last.insert(key.clone(), n)
        {
            assert!(before < n, "key {key}: {n} after {before}");
        }
    }
}

/// 2.4, P9: over the claims cap it is FAILED; everything else is delivered.
async fn message_that_kills_its_process_ends_failed<T: TestDb>() {
    let place = T::place().await;
    let outbox = place.outbox();
    outbox.migrate().await.unwrap();
    // In SQLite's one house the poison lies behind more messages than one instance can have had in flight.
    for i in 0..80 {
        outbox.publish_alone(Message::to("test:a").id(format!("good{i}")).payload("fine")).await.unwrap();
        if i == 60 {
            outbox.publish_alone(Message::to("test:a").id("poison").payload("poison")).await.unwrap();
        }
    }
    let store = T::Db::store(outbox.pool(), outbox.tables(), Duration::from_secs(5), None);
    let mut deaths = 0;
    let mut got = HashSet::new();
    loop {
        let rows = messages(&*store).await;
        let open = rows.iter().filter(|m| m.status == "PENDING" || m.status == "SENDING").count();
        let done = open == 0 && rows.iter().any(|m| m.status == "FAILED");
        if done {
            break;
        }
        assert!(deaths < 12, "still killing after {deaths} deaths: {rows:#?}");
        let (url, schema) = (place.url.clone(), place.schema.clone());
        let mut child = tokio::task::spawn_blocking(move || spawn::<T>("poison", &url, schema.as_deref(), 0)).await.unwrap();
        let told = lines(&mut child);
        // It dies of the poison, or has nothing left to do.
        wait_for("a death or the end", SOON * 2, async || {
            let over = child.try_wait().expect("wait").is_some();
            let rows = messages(&*store).await;
            over || rows.iter().all(|m| m.status == "SENT" || m.status == "FAILED")
        })
        .await;
        match child.try_wait().expect("wait") {
            Some(_) => deaths += 1,
            None => {
                child.kill().expect("kill");
                child.wait().expect("wait");
            }
        }
        got.extend(told.iter().filter_map(|l| l.strip_prefix("got ").and_then(|l| l.split(' ').next()).map(str::to_owned)));
    }
    let failed: Vec<_> = messages(&*store).await.into_iter().filter(|m| m.status == "FAILED").collect();
    assert_eq!(failed.len(), 1, "only the poison fails: {failed:#?}");
    assert_eq!(failed[0].message_id, "poison");
    assert!(failed[0].last_error.as_deref().unwrap_or_default().contains("processes died"), "{failed:?}");
    assert_eq!(got.iter().filter(|id| id.starts_with("good")).count(), 80, "everything else is delivered");
    assert!((3..=7).contains(&deaths), "{deaths} deaths for a cap of 3 claims and at least one before the first claim");
}
