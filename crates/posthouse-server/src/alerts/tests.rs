//! Judges of several instances on one database, look by look, with a receiver that does as it is told.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use posthouse::Message;
use posthouse::store::{AlertFilter, AlertKind};
use serde_json::Value;
use sqlx::{Connection, SqliteConnection};
use tokio::sync::watch;

use super::channels::Channels;
use super::judge::Judge;
use crate::config;
use crate::database::Database;
use crate::http::Served;

/// A directory that goes with the test.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        // What stays behind lies under the system's own.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Default)]
struct Receiver {
    status: AtomicU16,
    /// Identifiers and documents that arrived.
    seen: Mutex<Vec<(String, Value)>>,
    /// Held back while true.
    held: watch::Sender<bool>,
}

async fn answer(State(receiver): State<Arc<Receiver>>, headers: HeaderMap, body: Bytes) -> StatusCode {
    let id = headers.get("webhook-id").and_then(|id| id.to_str().ok()).unwrap_or_default().to_owned();
    receiver.seen.lock().unwrap().push((id, serde_json::from_slice(&body).unwrap()));
    let mut held = receiver.held.subscribe();
    // The sender lives as long as the receiver.
    let _ = held.wait_for(|held| !held).await;
    StatusCode::from_u16(receiver.status.load(Ordering::SeqCst)).unwrap()
}

impl Receiver {
    /// State and subject of each alert that arrived, in the order of arrival.
    fn told(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        let alerts = seen.iter().flat_map(|(_, document)| document["data"]["alerts"].as_array().unwrap().clone());
        alerts.map(|a| format!("{} {}", a["state"].as_str().unwrap(), a["subject"].as_str().unwrap())).collect()
    }
}

/// A SQLite database with one rule, and a webhook.
struct World {
    receiver: Arc<Receiver>,
    served: Arc<Served>,
    channels: Arc<Channels>,
    file: PathBuf,
    _place: Place,
}

async fn world(rule: &str) -> World {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("posthouse-alerts-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let place = Place(std::env::temp_dir().join(name));
    std::fs::create_dir_all(&place.0).unwrap();
    let receiver = Arc::new(Receiver { status: AtomicU16::new(200), ..Receiver::default() });
    let app = Router::new().fallback(answer).with_state(receiver.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let (file, toml) = (place.0.join("a.db"), place.0.join("posthouse.toml"));
    let text = format!(
        "[databases.main]\nurl = \"sqlite://{}\"\n[channels.ops]\nkind = \"webhook\"\nurl = \"http://{address}/hook\"\ntimeout = \"20s\"\n{rule}",
        file.display()
    );
    std::fs::write(&toml, text).unwrap();
    let config = config::load(Some(&toml), None).unwrap_or_else(|e| panic!("{:?}", e.problems));
    let (name, settings) = config.sources().remove(0);
    let database = Arc::new(Database::open_or_create(&name, &settings).unwrap());
    database.migrate().await.unwrap();
    let channels = Arc::new(Channels::new(&config.channels).unwrap());
    let served = Arc::new(Served::new(&Arc::new(config), &[database], Vec::new(), true));
    World { receiver, served, channels, file, _place: place }
}

impl World {
    /// A process that has just started. Its rules are due at every look.
    fn judge(&self, instance: &str) -> Judge {
        let mut rules = self.served.config.rules_of("main");
        rules.retain(|rule| rule.kind.name() == "outbox_failed");
        rules.iter_mut().for_each(|rule| rule.interval = Duration::ZERO);
        Judge::new(instance, &self.served, &self.served.databases[0], rules, &self.channels)
    }

    async fn sql(&self, sql: &'static str) {
        let mut conn = SqliteConnection::connect(&format!("sqlite://{}", self.file.display())).await.unwrap();
        sqlx::query(sql).execute(&mut conn).await.unwrap();
        conn.close().await.unwrap();
    }

    async fn fail_one(&self) {
        self.served.databases[0].database.publish(Message::to("orders")).await.unwrap();
        self.sql("UPDATE posthouse_pending SET status = 'FAILED', due_at = 253402214400000").await;
    }

    async fn mend(&self) {
        self.sql("DELETE FROM posthouse_pending").await;
    }

    /// As if the holder's lease had run out.
    async fn let_duty_end(&self) {
        self.sql("UPDATE posthouse_duty SET lease_until = 0").await;
    }

    /// As if the time had come to try again.
    async fn let_notices_be_due(&self) {
        self.sql("UPDATE posthouse_alert_notice SET due_at = 0 WHERE due_at IS NOT NULL").await;
    }

    async fn history(&self) -> Vec<AlertKind> {
        let filter = AlertFilter { limit: 100, ..AlertFilter::default() };
        let events = self.served.databases[0].people.alerts().events(&filter).await.unwrap();
        events.iter().rev().map(|e| e.kind).collect()
    }
}

const AT_ONCE: &str = "[[alerts]]\nrule = \"outbox_failed\"\nfor = \"0s\"\n";

#[tokio::test]
async fn three_instances_tell_once_and_a_restart_tells_nothing() {
    let w = world(AT_ONCE).await;
    let (mut a, mut b, mut c) = (w.judge("a"), w.judge("b"), w.judge("c"));
    for judge in [&mut a, &mut b, &mut c] {
        judge.pass().await;
    }
    assert!(w.receiver.told().is_empty(), "nothing is wrong");
    w.fail_one().await;
    for _ in 0..3 {
        tokio::join!(b.pass(), c.pass(), a.pass());
    }
    assert_eq!(w.receiver.told(), ["firing orders"]);
    // The one that judges dies; all that is known stands in the database.
    drop(a);
    for _ in 0..3 {
        tokio::join!(b.pass(), c.pass());
    }
    w.let_duty_end().await;
    let mut again = w.judge("a2");
    for _ in 0..3 {
        tokio::join!(again.pass(), b.pass(), c.pass());
    }
    assert_eq!(w.receiver.told(), ["firing orders"]);
    w.mend().await;
    for _ in 0..3 {
        tokio::join!(c.pass(), again.pass(), b.pass());
    }
    assert_eq!(w.receiver.told(), ["firing orders", "recovered orders"]);
    assert_eq!(w.history().await, [AlertKind::Fired, AlertKind::Recovered]);
}

#[tokio::test]
async fn a_channel_that_fails_is_tried_again_in_order() {
    let w = world(AT_ONCE).await;
    let mut judge = w.judge("a");
    w.receiver.status.store(500, Ordering::SeqCst);
    w.fail_one().await;
    judge.pass().await;
    assert_eq!(w.receiver.told(), ["firing orders"]);
    w.mend().await;
    judge.pass().await;
    assert_eq!(w.receiver.told().len(), 1, "what comes later waits for what comes first");
    let open = w.served.databases[0].people.alerts().open_notices().await.unwrap();
    assert_eq!(open.iter().map(|n| (n.attempts, n.due)).collect::<Vec<_>>(), [(1, false), (0, true)]);
    let filter = AlertFilter { limit: 1, before: Some(open[1].event.id), ..AlertFilter::default() };
    let events = w.served.databases[0].people.alerts().events(&filter).await.unwrap();
    assert!(events[0].notices[0].error.as_ref().is_some_and(|why| why.contains("500")), "{events:?}");
    w.receiver.status.store(200, Ordering::SeqCst);
    w.let_notices_be_due().await;
    judge.pass().await;
    judge.pass().await;
    assert_eq!(w.receiver.told()[1..], ["firing orders", "recovered orders"], "together, and once");
    assert_eq!(w.receiver.seen.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn who_dies_while_sending_leads_to_a_second_notice_and_to_no_third() {
    let w = world(AT_ONCE).await;
    let mut a = w.judge("a");
    w.receiver.held.send_replace(true);
    w.fail_one().await;
    tokio::select! {
        () = a.pass() => unreachable!("the receiver doesn't answer"),
        () = async {
            while w.receiver.told().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        } => {}
    }
    // It is gone, and nobody knows whether the receiver took it.
    drop(a);
    w.receiver.held.send_replace(false);
    w.let_duty_end().await;
    let mut b = w.judge("b");
    b.pass().await;
    assert_eq!(w.receiver.told().len(), 1, "who sends it is given time to say what came of it");
    w.let_notices_be_due().await;
    b.pass().await;
    w.let_notices_be_due().await;
    b.pass().await;
    assert_eq!(w.receiver.told(), ["firing orders", "firing orders"]);
    let seen = w.receiver.seen.lock().unwrap();
    assert_eq!(seen[0].0, seen[1].0, "the receiver can tell that it is the same");
    assert!(seen[0].0.starts_with("alert_"), "{:?}", seen[0].0);
}

#[tokio::test]
async fn silence_waiting_repetition_and_a_rule_that_goes_away() {
    let w = world("[[alerts]]\nrule = \"outbox_failed\"\nfor = \"1h\"\nrepeat = \"1h\"\n").await;
    let alerts = || w.served.databases[0].people.alerts();
    let mut judge = w.judge("a");
    w.fail_one().await;
    judge.pass().await;
    assert_eq!(alerts().watch().await.unwrap().alerts.iter().map(|a| a.firing).collect::<Vec<_>>(), [false]);
    alerts().silence("outbox_failed", "orders", Duration::from_secs(3600), "ann", "").await.unwrap();
    // An hour passes.
    w.sql("UPDATE posthouse_alert SET since = since - 3600000").await;
    judge.pass().await;
    assert!(alerts().watch().await.unwrap().alerts[0].firing && w.receiver.told().is_empty(), "nobody is told");
    assert!(alerts().unsilence("outbox_failed", "orders", "ann").await.unwrap());
    judge.pass().await;
    judge.pass().await;
    assert_eq!(w.receiver.told(), ["firing orders"]);
    w.sql("UPDATE posthouse_alert SET told_at = told_at - 3600000").await;
    judge.pass().await;
    judge.pass().await;
    assert_eq!(w.receiver.told(), ["firing orders", "repeated orders"]);
    judge.rules[0].name = "another".into();
    judge.pass().await;
    let history = w.history().await;
    assert_eq!(history, [AlertKind::Fired, AlertKind::Fired, AlertKind::Repeated, AlertKind::Ended]);
    assert_eq!(w.receiver.told().len(), 2, "nobody knows that it is over");
}
