//! The `nats` transport against real servers: the shared one, and own ones that are stopped, killed and guarded.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, UNIX_EPOCH};

use async_nats::jetstream::stream::{Config, DiscardPolicy, Stream};
use async_nats::jetstream::{self, Context};
use futures_util::StreamExt;
use posthouse::testing::{deliver, deliver_batch};
use posthouse::transport::{Failure, Nats, NatsSettings, Outcome, Transport};
use posthouse::{BreakerState, CloudEvents, Envelope, Error, Message, Relay, Route};

use crate::relay::quick;
use crate::support::broker::{Broker, Kind, test_url};
use crate::support::proxy::{Mode, Proxy};
use crate::support::{Postgres, SOON, TestDb, bounded, messages, pending, scale, wait_for};

/// Long enough for any machine; tests that wait for a deadline set their own.
const PATIENCE: Duration = Duration::from_secs(20);

fn transport(url: &str) -> Nats {
    Nats::new(url).expect("settings")
}

async fn jetstream(url: &str) -> Context {
    jetstream::new(async_nats::connect(url).await.expect("connect"))
}

/// A fresh stream over `NAME.>`.
async fn stream(js: &Context, change: impl FnOnce(&mut Config)) -> Stream {
    let name = format!("t_{:016x}", fastrand::u64(..));
    let mut config = Config { subjects: vec![format!("{name}.>")], name, ..Config::default() };
    change(&mut config);
    js.create_stream(config).await.expect("create a stream")
}

fn subject(stream: &Stream, rest: &str) -> String {
    format!("{}.{rest}", stream.cached_info().config.name)
}

fn to(stream: &Stream, rest: &str) -> Route {
    Route::to(format!("nats:{}", subject(stream, rest)))
}

fn message() -> Envelope {
    Envelope::for_test("orders", "{}")
}

/// Message ids and payloads in a stream, in order.
async fn stored(stream: &mut Stream) -> Vec<(String, String)> {
    let count = stream.info().await.expect("info").state.messages as usize;
    let config = jetstream::consumer::pull::Config::default();
    let consumer = stream.create_consumer(config).await.expect("consumer");
    let mut out = Vec::new();
    let mut all = consumer.messages().await.expect("messages");
    while out.len() < count {
        let m = tokio::time::timeout(PATIENCE, all.next()).await.expect("in time").expect("one more").expect("message");
        m.ack().await.expect("ack");
        let id = m.headers.as_ref().and_then(|h| h.get("Nats-Msg-Id")).map(|v| v.to_string()).unwrap_or_default();
        out.push((id, String::from_utf8_lossy(&m.payload).into_owned()));
    }
    out
}

#[track_caller]
fn retry(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Retry { after: None, error } => error,
        other => panic!("expected Retry, got {other:?}"),
    }
}

#[track_caller]
fn rejected(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Rejected(failure) => failure,
        other => panic!("expected Rejected, got {other:?}"),
    }
}

#[track_caller]
fn unavailable(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Unavailable(failure) => failure,
        other => panic!("expected Unavailable, got {other:?}"),
    }
}

#[tokio::test]
async fn content_and_headers_arrive() {
    let url = test_url(Kind::Nats);
    let stream = stream(&jetstream(&url).await, |_| {}).await;
    let nats = transport(&url);
    let mut m = Envelope::for_test("orders", vec![0, 1, 255]);
    m.message_id = "id %ä".into();
    m.kind = "order placed".into();
    m.key = Some("customer\n7".into());
    m.attempt = 3;
    m.content_type = "application/x-orders".into();
    m.headers = [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("X-Umlaut", "ä b"),
        ("ce-id", "free without cloudevents"),
        // None of these may get through.
        ("Nats-Msg-Id", "forged"),
        ("nats-rollup", "all"),
        ("Nats-Expected-Stream", "forged"),
        ("Posthouse-Attempt", "forged"),
        ("content-type", "text/forged"),
    ]
    .into_iter()
    .collect();
    assert_eq!(deliver(&nats, m, to(&stream, "a"), PATIENCE).await, Outcome::Delivered);

    let seen = stream.get_raw_message(1).await.unwrap();
    assert_eq!((seen.subject.as_str(), &*seen.payload), (&*subject(&stream, "a"), &[0, 1, 255][..]));
    let headers: HashMap<String, String> = seen.headers.iter().map(|(n, v)| (n.to_string(), v[0].to_string())).collect();
    let expected = [
        ("Nats-Msg-Id", "id%20%25%C3%A4"),
        ("Content-Type", "application/x-orders"),
        ("posthouse-attempt", "3"),
        ("posthouse-type", "order%20placed"),
        ("posthouse-key", "customer%0A7"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("X-Umlaut", "ä b"),
        ("ce-id", "free without cloudevents"),
    ];
    assert_eq!(headers, expected.map(|(n, v)| (n.to_owned(), v.to_owned())).into());

    // Nothing at all is a message too.
    assert_eq!(deliver(&nats, Envelope::for_test("orders", ""), to(&stream, "a"), PATIENCE).await, Outcome::Delivered);
    assert_eq!(stream.get_raw_message(2).await.unwrap().payload.len(), 0);
}

#[tokio::test]
async fn a_route_can_send_cloudevents_in_both_modes() {
    let url = test_url(Kind::Nats);
    let stream = stream(&jetstream(&url).await, |_| {}).await;
    let nats = transport(&url);
    let mut m = Envelope::for_test("orders", r#"{"sku":"A1"}"#);
    m.content_type = "application/json; charset=utf-8".into();
    m.message_id = "e-1".into();
    m.kind = "order placed".into();
    m.created_at = UNIX_EPOCH + Duration::from_millis(1_522_949_420_089);
    m.headers.insert("ce-id", "forged");
    let route = to(&stream, "a").cloudevents(CloudEvents::binary("/shop"));
    assert_eq!(deliver(&nats, m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let seen = stream.get_raw_message(1).await.unwrap();
    assert_eq!(&*seen.payload, br#"{"sku":"A1"}"#);
    let attributes: HashMap<String, String> = seen
        .headers
        .iter()
        .filter_map(|(n, v)| Some((n.to_string().strip_prefix("ce-")?.to_owned(), v[0].to_string())))
        .collect();
    let expected = [
        ("specversion", "1.0"),
        ("id", "e-1"),
        ("source", "/shop"),
        ("type", "order%20placed"),
        ("time", "2018-04-05T17:30:20.089Z"),
        ("datacontenttype", "application/json;%20charset=utf-8"),
    ];
    assert_eq!(attributes, expected.map(|(n, v)| (n.to_owned(), v.to_owned())).into());

    m.message_id = "e-2".into();
    let route = to(&stream, "a").cloudevents(CloudEvents::structured("/shop"));
    assert_eq!(deliver(&nats, m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let seen = stream.get_raw_message(2).await.unwrap();
    let content_type = seen.headers.get("Content-Type").map(|v| v.to_string());
    assert_eq!(content_type.as_deref(), Some("application/cloudevents+json; charset=UTF-8"));
    assert!(seen.headers.get("ce-id").is_none());
    let event: serde_json::Value = serde_json::from_slice(&seen.payload).unwrap();
    assert_eq!((&event["id"], &event["data"]), (&"e-2".into(), &serde_json::json!({ "sku": "A1" })));

    m.key = Some("a\u{1}".into());
    let route = to(&stream, "a").cloudevents(CloudEvents::default());
    assert!(rejected(deliver(&nats, m, route, PATIENCE).await).error.contains("partitionkey"));
}

#[tokio::test]
async fn a_message_sent_twice_is_stored_once_and_delivered_both_times() {
    let url = test_url(Kind::Nats);
    let mut stream = stream(&jetstream(&url).await, |_| {}).await;
    let m = message();
    // Two connections, as two processes would have.
    for nats in [transport(&url), transport(&url)] {
        assert_eq!(deliver(&nats, m.clone(), to(&stream, "a"), PATIENCE).await, Outcome::Delivered);
    }
    assert_eq!(stored(&mut stream).await, [(m.message_id.to_string(), "{}".to_owned())]);
}

#[tokio::test]
async fn what_a_stream_will_not_take_says_so_and_holds_up_nothing_else() {
    let url = test_url(Kind::Nats);
    let js = jetstream(&url).await;
    let open = stream(&js, |_| {}).await;
    let small = stream(&js, |c| c.max_message_size = 1_000).await;
    let full = stream(&js, |c| (c.max_messages, c.discard) = (1, DiscardPolicy::New)).await;
    let nats = transport(&url);
    assert_eq!(deliver(&nats, message(), to(&full, "a"), PATIENCE).await, Outcome::Delivered);
    let nowhere = format!("nats:nowhere.{:016x}", fastrand::u64(..));
    let large = |n: usize| Envelope::for_test("orders", vec![b'x'; n]);
    let mut odd_name = message();
    odd_name.headers.insert("x y:", "s3cret");
    let mut odd_value = message();
    odd_value.headers.insert("x-split", "s3cret\r\nNats-Rollup: all");
    let batch = vec![
        (message(), Route::to(&*nowhere)),
        (large(2 << 20), to(&open, "a")),
        (large(2_000), to(&small, "a")),
        (message(), to(&full, "a")),
        (odd_name, to(&open, "a")),
        (odd_value, to(&open, "a")),
        (message(), Route::to("nats:orders.*")),
        (message(), Route::to("nats:$JS.API.STREAM.DELETE.orders")),
        (message(), to(&open, "b")),
        (large(2_000), to(&open, "b")),
    ];
    let mut outcomes = deliver_batch(&nats, batch, PATIENCE).await;
    outcomes.sort_by_key(|(n, _)| *n);
    let mut outcomes = outcomes.into_iter().map(|(_, outcome)| outcome);
    let mut next = || outcomes.next().unwrap();
    let says = |failure: Failure, parts: &[&str]| {
        assert!(parts.iter().all(|p| failure.error.contains(p)) && !failure.error.contains("s3cret"), "{}", failure.error);
    };
    says(retry(next()), &["no JetStream stream covers subject", &nowhere[5..], "create one"]);
    says(rejected(next()), &["too large", "max_payload", "1048576"]);
    says(rejected(next()), &["message size exceeds maximum", &subject(&small, "a")]);
    says(retry(next()), &["maximum messages exceeded", &subject(&full, "a")]);
    says(rejected(next()), &["x y:"]);
    says(rejected(next()), &["x-split"]);
    says(rejected(next()), &["orders.*", "wildcard"]);
    says(rejected(next()), &["$JS.API"]);
    assert_eq!((next(), next()), (Outcome::Delivered, Outcome::Delivered));
    assert!(nats.check(&Route::to("nats:orders.*")).is_err() && nats.check(&to(&open, "a")).is_ok());
}

/// The first one's acknowledgement never comes; if they were awaited one after the other, neither would the second one's.
#[tokio::test]
async fn acknowledgements_are_awaited_together() {
    let url = test_url(Kind::Nats);
    let js = jetstream(&url).await;
    let stream = stream(&js, |_| {}).await;
    let deaf = format!("deaf.{:016x}", fastrand::u64(..));
    let _listens = js.client().subscribe(deaf.clone()).await.unwrap();
    js.client().flush().await.unwrap();
    let batch = vec![(message(), Route::to(format!("nats:{deaf}"))), (message(), to(&stream, "a"))];
    let outcomes = deliver_batch(&transport(&url), batch, Duration::from_secs(1)).await;
    assert_eq!(outcomes[0], (1, Outcome::Delivered));
    let failure = unavailable(outcomes[1].1.clone());
    assert!(failure.error.contains("no acknowledgement") && failure.error.contains("deadline"), "{}", failure.error);
}

#[tokio::test]
async fn no_connection_means_unavailable() {
    // A port that was free a moment ago and is held by nobody.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    drop(listener);
    let error =
        unavailable(deliver(&transport(&format!("nats://u:s3cret@{at}")), message(), Route::to("nats:a"), PATIENCE).await).error;
    assert!(error.contains(&format!("can't connect to nats://{at}")) && error.to_lowercase().contains("refused"), "{error}");
    assert!(!error.contains("s3cret"), "{error}");

    // ".invalid" never resolves (RFC 6761).
    let error =
        unavailable(deliver(&transport("nats://posthouse.invalid"), message(), Route::to("nats:a"), PATIENCE).await).error;
    assert!(error.contains("posthouse.invalid:4222") && error.contains("name was not found"), "{error}");

    // Accepts and says nothing.
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut settings = NatsSettings::from(&*format!("nats://{}", mute.local_addr().unwrap()));
    settings.connect_timeout = Duration::from_millis(200);
    let error = unavailable(deliver(&Nats::new(settings).unwrap(), message(), Route::to("nats:a"), PATIENCE).await).error;
    assert!(error.contains("200ms (connect_timeout)"), "{error}");

    // The same, with all the patience in the world: the deadline counts.
    let mute = transport(&format!("nats://{}", mute.local_addr().unwrap()));
    let error = unavailable(deliver(&mute, message(), Route::to("nats:a"), Duration::from_secs(1)).await).error;
    assert!(error.contains("by the deadline"), "{error}");
    // Not HTTP's fault either, but no NATS server.
    let Err(Error::Config(text)) = Nats::new("nats://a:s3cret@h,http://h") else { panic!("expected Error::Config") };
    assert!(text.starts_with("url: ") && !text.contains("s3cret"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_and_their_permissions() {
    let broker = Broker::nats_with(
        r#"
        authorization {
          users = [
            { user: "boss", password: "b" }
            { user: "us@er", password: "p@ss", permissions: { publish: { deny: "secret.>" } } }
            { user: "deaf", password: "d", permissions: { subscribe: { deny: ">" } } }
          ]
        }"#,
    )
    .await;
    let at = |login: &str| broker.url().replace("nats://", &format!("nats://{login}@"));
    let boss = async_nats::ConnectOptions::with_user_and_password("boss".into(), "b".into());
    let js = jetstream::new(boss.connect(broker.url()).await.expect("connect"));
    for subjects in ["open.>", "secret.>"] {
        let config = Config { name: subjects[..4].into(), subjects: vec![subjects.into()], ..Config::default() };
        js.create_stream(config).await.unwrap();
    }
    for wrong in ["us%40er:s3cret", "nobody:s3cret", "s3cret"] {
        let error = unavailable(deliver(&transport(&at(wrong)), message(), Route::to("nats:open.a"), PATIENCE).await).error;
        assert!(error.contains("refused the user, password, token") && !error.contains("s3cret"), "{error}");
    }
    let nats = transport(&at("us%40er:p%40ss"));
    let batch = vec![(message(), Route::to("nats:secret.a")), (message(), Route::to("nats:open.a"))];
    let mut outcomes = deliver_batch(&nats, batch, PATIENCE).await;
    outcomes.sort_by_key(|(n, _)| *n);
    assert_eq!(outcomes.pop(), Some((1, Outcome::Delivered)));
    let error = retry(outcomes.remove(0).1).error;
    assert!(error.contains("may not publish to subject \"secret.a\""), "{error}");

    let error = unavailable(deliver(&transport(&at("deaf:d")), message(), Route::to("nats:open.a"), PATIENCE).await).error;
    assert!(error.contains("_INBOX"), "{error}");
}

/// P10: a peer that vanished without a word. What was in flight is answered by the deadline, and what comes then goes over a new
/// connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_is_given_up() {
    let url = test_url(Kind::Nats);
    let stream = stream(&jetstream(&url).await, |_| {}).await;
    let proxy = Proxy::start(url.strip_prefix("nats://").unwrap().to_owned()).await;
    let nats = transport(&format!("nats://{}", proxy.address));
    assert_eq!(deliver(&nats, message(), to(&stream, "a"), PATIENCE).await, Outcome::Delivered);
    proxy.set(Mode::Silent);
    let started = std::time::Instant::now();
    let error = unavailable(deliver(&nats, message(), to(&stream, "a"), Duration::from_secs(1)).await).error;
    assert!(error.contains("no acknowledgement") && started.elapsed() < PATIENCE / 2, "{error}");
    // Well before this deadline the pings tell; the new connection is silent too.
    let started = std::time::Instant::now();
    let error = unavailable(deliver(&nats, message(), to(&stream, "a"), PATIENCE).await).error;
    assert!(started.elapsed() < PATIENCE * 3 / 4, "{error}");
    proxy.set(Mode::Open);
    assert_eq!(deliver(&nats, message(), to(&stream, "a"), PATIENCE).await, Outcome::Delivered);

    // A connection that breaks is noticed at once, long before the deadline.
    proxy.set(Mode::Unanswered);
    let started = std::time::Instant::now();
    let error = unavailable(deliver(&nats, message(), to(&stream, "a"), PATIENCE).await).error;
    // The end may be noticed while sending, while waiting, or by the connection that was to follow.
    let told = ["lost before the acknowledgement came", "broke", "can't connect"].iter().any(|text| error.contains(text));
    assert!(told && started.elapsed() < PATIENCE / 2, "{error}");
    proxy.set(Mode::Open);
    assert_eq!(deliver(&nats, message(), to(&stream, "a"), PATIENCE).await, Outcome::Delivered);
    nats.close().await;
}

/// Start with the broker down: publishing goes on, the breaker says why, and everything flows when it comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_starts_without_its_broker() {
    bounded(async {
        let broker = Broker::nats().await;
        let mut stream = stream(&jetstream(broker.url()).await, |_| {}).await;
        let destination = to(&stream, "a").to;
        broker.kill().await;
        let outbox = Postgres::fresh().await;
        let relay = Relay::builder(&outbox).settings(quick()).transport("nats", transport(broker.url())).start().await.unwrap();
        for n in 0..20 {
            outbox.publish_alone(Message::to(&*destination).key(n % 3).payload(n.to_string())).await.unwrap();
        }
        wait_for("the breaker says why", SOON, async || {
            relay.stats().destinations.get(&destination).is_some_and(|d| {
                matches!(d.breaker, BreakerState::Open(_)) && d.last_error.as_deref().is_some_and(|e| e.contains("can't connect"))
            })
        })
        .await;
        assert!(messages(&**relay.store()).await.iter().all(|m| (m.status.as_str(), m.attempts) == ("PENDING", 0)));
        broker.start().await;
        wait_for("all delivered", SOON, async || pending::<Postgres>(&outbox).await == 0).await;
        assert_eq!(stored(&mut stream).await.len(), 20);
        relay.shutdown(Duration::from_secs(5)).await;
    })
    .await;
}

/// B5: hard kills and restarts while messages flow. None is lost, first deliveries keep each key's order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_again_and_again_nothing_is_lost() {
    bounded(async {
        const KEYS: usize = 40;
        let (total, kills) = (2_500 * scale(), 2 * scale().min(10));
        let broker = Broker::nats().await;
        let stream = stream(&jetstream(broker.url()).await, |_| {}).await;
        let destination = to(&stream, "a").to;
        let outbox = Postgres::fresh().await;
        let mut settings = quick();
        settings.default_route.concurrency = Some(200);
        let relay = Relay::builder(&outbox).settings(settings).transport("nats", transport(broker.url())).start().await.unwrap();
        let publish = async {
            for start in (0..total).step_by(500) {
                let chunk = (start..total.min(start + 500)).map(|n| {
                    let m = Message::to(&*destination).id(format!("m{n}")).payload(n.to_string());
                    // Half of them have no key and may overtake.
                    if n.is_multiple_of(2) { m.key(n % KEYS) } else { m }
                });
                let mut tx = outbox.begin().await.unwrap();
                outbox.publish_many(&mut tx, chunk).await.unwrap();
                tx.commit().await.unwrap();
            }
        };
        let disturb = async {
            for n in 1..=kills {
                let share = (total * n / (kills + 1)) as u64;
                wait_for("messages flow", SOON, async || relay.stats().delivered >= share).await;
                broker.kill().await;
                let before = relay.stats().unavailable;
                wait_for("the outage is noticed", SOON, async || relay.stats().unavailable > before).await;
                broker.start().await;
            }
        };
        tokio::join!(publish, disturb);
        let ids: HashSet<String> = (0..total).map(|n| format!("m{n}")).collect();
        wait_for("all delivered", SOON * 3, async || pending::<Postgres>(&outbox).await == 0).await;

        let stored =
            stored(&mut jetstream(broker.url()).await.get_stream(&stream.cached_info().config.name).await.unwrap()).await;
        let got: HashSet<String> = stored.iter().map(|(id, _)| id.clone()).collect();
        assert_eq!(ids.difference(&got).count(), 0, "lost");
        assert_eq!(got.difference(&ids).count(), 0, "from nowhere");
        let duplicates = stored.len() - got.len();
        let (mut last, mut first, mut wrong) = (HashMap::new(), HashSet::new(), 0);
        for (id, payload) in &stored {
            let n: usize = payload.parse().unwrap();
            if first.insert(id) && n.is_multiple_of(2) && last.insert(n % KEYS, n).is_some_and(|before| before > n) {
                wrong += 1;
            }
        }
        let stats = relay.stats();
        println!(
            "{total} messages, {kills} kills: 0 lost, {duplicates} stored twice, {} answers unavailable, {} retries",
            stats.unavailable, stats.retried
        );
        assert_eq!((duplicates, wrong), (0, 0), "stored twice, out of order");
        assert!(messages(&**relay.store()).await.iter().all(|m| m.attempts == 0), "no attempts while it was down");
        relay.shutdown(Duration::from_secs(5)).await;
    })
    .await;
}
