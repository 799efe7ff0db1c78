//! The HTTP receiver: the suite's feed, and what is peculiar to it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use axum::Router;
use posthouse::consumer::{Consumer, RunningWebhooks, Webhooks};
use posthouse::inbox::{Inbox, Source};
use posthouse::testing::deliver;
use posthouse::transport::{Http, HttpSettings, Outcome};
use posthouse::webhook::{Key, Verifier};
use posthouse::{ConsumerOrder, ConsumerSettings, Envelope, Error, HttpRoute, Message, MissingId, Relay, Retry, Route};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};

use super::away::Away;
use super::{Bench, Feed, PATIENCE, Script, message, with};
use crate::inbox::quick;
use crate::support::{Postgres, SOON, TestDb, bounded, pending, wait_for};
use posthouse_faults::{Mode, Proxy};

/// An address at which the last receiver answers.
#[derive(Clone)]
pub(super) struct FromHttp(Arc<Shared>);

struct Shared {
    listener: std::net::TcpListener,
    at: SocketAddr,
    http: Http,
    /// Ends the server of the last receiver, after the requests that it has.
    stop: Mutex<Arc<Notify>>,
    /// Messages that are sent and not answered with 2xx or 4xx.
    open: AtomicU64,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop.lock().unwrap().notify_one();
    }
}

impl FromHttp {
    fn serve(&self, webhooks: &RunningWebhooks) {
        let stop = Arc::new(Notify::new());
        std::mem::replace(&mut *self.0.stop.lock().unwrap(), stop.clone()).notify_one();
        let app: Router = Router::new().nest("/hooks", webhooks.router());
        let listener = TcpListener::from_std(self.0.listener.try_clone().unwrap()).unwrap();
        tokio::spawn(async move {
            axum::serve(listener, app).with_graceful_shutdown(async move { stop.notified().await }).await.unwrap();
        });
    }

    fn url(&self) -> String {
        format!("http://{}/hooks", self.0.at)
    }

    /// As a relay does it: again and again, counting attempts.
    async fn send_by(&self, m: &Envelope, route: Route) -> Outcome {
        self.0.open.fetch_add(1, SeqCst);
        let mut m = m.clone();
        let outcome = loop {
            match deliver(&self.0.http, m.clone(), route.clone(), PATIENCE).await {
                Outcome::Retry { after, .. } => {
                    m.attempt += 1;
                    // What was asked for, in a hurry.
                    tokio::time::sleep(after.unwrap_or_default().min(Duration::from_millis(20))).await;
                }
                Outcome::Unavailable(_) | Outcome::NoAnswer(_) | Outcome::HeldBack => {}
                outcome @ (Outcome::Delivered | Outcome::Rejected(_)) => break outcome,
            }
        };
        self.0.open.fetch_sub(1, SeqCst);
        outcome
    }
}

/// Sends a request as it stands, and returns the response: status, head in lower case, and body.
async fn raw(at: SocketAddr, head: &str, body: &[u8]) -> (u16, String, String) {
    let mut stream = TcpStream::connect(at).await.expect("connect");
    let length = body.len();
    let head = format!("{head}host: test\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(&[head.as_bytes(), body].concat()).await.expect("write");
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.expect("a response");
    let response = String::from_utf8(response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{response:?}"));
    (head[9..12].parse().unwrap(), head.to_ascii_lowercase(), body.to_owned())
}

impl Feed for FromHttp {
    /// Each is sent when the one before is answered.
    const IN_HAND: usize = 1;

    async fn new() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let mut settings = HttpSettings::default();
        settings.allow = vec!["127.0.0.1".into()];
        let http = Http::new(settings).unwrap();
        Self(Arc::new(Shared { listener, at, http, stop: Mutex::default(), open: AtomicU64::new(0) }))
    }

    async fn consume(&self, inbox: &Inbox<sqlx::Sqlite>, settings: ConsumerSettings) -> Consumer {
        let webhooks = Webhooks::new().unsigned().settings(settings).start(inbox).await.expect("start");
        self.serve(&webhooks);
        webhooks.into()
    }

    async fn send(&self, m: &Envelope, change: impl FnOnce(Route) -> Route + Send) {
        assert_eq!(self.send_by(m, change(Route::to(self.url()))).await, Outcome::Delivered);
    }

    async fn send_raw(&self, payload: &[u8]) {
        let (status, ..) = raw(self.0.at, "POST /hooks HTTP/1.1\r\n", payload).await;
        assert!(matches!(status, 202 | 422), "{status}");
    }

    async fn unacknowledged(&self) -> u64 {
        self.0.open.load(SeqCst)
    }

    fn check_source(&self, source: &Source) {
        assert_eq!(*source, Source::Http { url: format!("//{}/hooks", self.0.at) });
    }
}

const KEY: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const POST: &str = "POST /hooks HTTP/1.1\r\nposthouse-type: t\r\n";

fn with_id(id: &str) -> String {
    format!("{POST}idempotency-key: {id}\r\n")
}

/// Signed so many seconds ago.
fn signed(key: &str, id: &str, ago: u64, body: &[u8]) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() - ago;
    let signature = Key::new(key).unwrap().sign(id, now, body);
    format!("{POST}webhook-id: {id}\r\nwebhook-timestamp: {now}\r\nwebhook-signature: {signature}\r\n")
}

impl Bench<FromHttp> {
    async fn start(&self, webhooks: Webhooks) -> Consumer {
        let running = webhooks.start(&self.inbox()).await.expect("start");
        self.feed.serve(&running);
        running.into()
    }

    async fn raw(&self, head: &str, body: &[u8]) -> (u16, String, String) {
        raw(self.feed.0.at, head, body).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_signed_is_taken() {
    bounded(async {
        let bench = Bench::<FromHttp>::new().await;
        let consumer = bench.start(Webhooks::new().verify(Verifier::new([KEY]).unwrap())).await;
        let good = signed(KEY, "m1", 0, b"{}");
        let twice = format!("{good}webhook-id: m2\r\n");
        for (what, head, body) in [
            ("without any", with_id("m1"), &b"{}"[..]),
            (
                "without a signature",
                good.split_inclusive("\r\n").filter(|l| !l.starts_with("webhook-signature")).collect(),
                b"{}",
            ),
            ("by another key", signed(OTHER, "m1", 0, b"{}"), b"{}"),
            ("of another body", good.clone(), b"{ }"),
            ("of another id", good.replace("m1", "m2"), b"{}"),
            ("too old", signed(KEY, "m1", 400, b"{}"), b"{}"),
            ("with two ids", twice, b"{}"),
        ] {
            let (status, ..) = bench.raw(&head, body).await;
            assert_eq!(status, 401, "{what}");
        }
        assert!(bench.script.seen().is_empty() && bench.fixture.found("m1").await.is_none());
        // Another id beside it doesn't count: it isn't signed.
        let (status, head, _) = bench.raw(&format!("{good}posthouse-message-id: m2\r\n"), b"{}").await;
        assert_eq!((status, head.contains("posthouse-outcome: processed")), (200, true), "{head}");
        let (status, head, _) = bench.raw(&format!("{good}posthouse-message-id: m3\r\n"), b"{}").await;
        assert_eq!((status, head.contains("posthouse-outcome: duplicate")), (200, true), "{head}");
        let (status, ..) = bench.raw(&signed(KEY, "a%2Eb%20%C3%A4", 0, b"{}"), b"{}").await;
        assert_eq!((status, bench.script.ids()), (200, vec!["m1".to_owned(), "a.b ä".to_owned()]));
        consumer.shutdown(SOON).await;

        // Nobody is open to all by oversight.
        let Err(Error::Config(text)) = Webhooks::new().start(&bench.inbox()).await else { panic!("it started") };
        assert!(text.contains(".unsigned()"), "{text}");
        assert!(Webhooks::new().verify(Verifier::new([KEY]).unwrap()).unsigned().start(&bench.inbox()).await.is_err());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_too_large_is_refused() {
    bounded(async {
        let bench = Bench::<FromHttp>::new().await;
        let consumer = bench.start(Webhooks::new().unsigned().body_limit(1_000)).await;
        assert_eq!(bench.raw(&with_id("fits"), &[b'x'; 1_000]).await.0, 200);
        assert_eq!(bench.raw(&with_id("announced"), &[b'x'; 1_001]).await.0, 413);
        let mut stream = TcpStream::connect(bench.feed.0.at).await.unwrap();
        let head = format!("{}host: test\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n", with_id("in parts"));
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..3 {
            stream.write_all(format!("190\r\n{}\r\n", "x".repeat(400)).as_bytes()).await.unwrap();
        }
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 413");
        // A relay gives it up: it can never work.
        let mut large = message("large");
        large.payload = vec![b'x'; 300_000];
        let outcome = bench.feed.send_by(&large, Route::to(bench.feed.url())).await;
        assert!(matches!(&outcome, Outcome::Rejected(failure) if failure.error.contains("413")), "{outcome:?}");
        assert_eq!(bench.script.ids(), ["fits"]);
        consumer.shutdown(SOON).await;

        // What an outbox publishes by default is taken by default, in its largest form.
        let consumer = bench.start(Webhooks::new().unsigned()).await;
        let mut largest = message("largest");
        largest.payload = vec![0xff; posthouse::Limits::default().payload];
        bench.feed.send(&largest, |route| route.cloudevents(posthouse::CloudEvents::structured("/shop"))).await;
        assert!(bench.script.seen().last().unwrap().payload == largest.payload);
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_outcome_has_its_answer() {
    bounded(async {
        let mut settings = quick();
        settings.missing_id = MissingId::Reject;
        let bench = Bench::<FromHttp>::with(settings, |script| script.failing("fails", usize::MAX)).await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let unknown = with_id("unknown").replace("type: t", "type: nobody's");
        let odd = format!("{}x: \u{e4}\r\n", with_id("odd"));
        let odd: Vec<u8> = odd.chars().map(|c| c as u8).collect();
        for (what, head, status, outcome) in [
            ("processed", with_id("works"), 200, "processed"),
            ("a duplicate", with_id("works"), 200, "duplicate"),
            ("run again", with_id("fails"), 202, "retry"),
            ("without a handler", unknown.clone(), 202, "failed"),
            ("given up before", unknown, 202, "failed"),
        ] {
            let (got, head, body) = bench.raw(&head, b"{}").await;
            assert_eq!(got, status, "{what}: {body}");
            assert!(head.contains(&format!("posthouse-outcome: {outcome}")), "{what}: {head}");
        }
        let (status, _, body) = bench.raw(POST, b"{}").await;
        assert_eq!((status, body.contains("message id")), (422, true), "{body}");
        assert_eq!(bench.raw(&with_id("got").replace("POST", "GET"), b"").await.0, 405);
        // Latin-1: kept for a person, and not sent for ever.
        let mut stream = TcpStream::connect(bench.feed.0.at).await.unwrap();
        stream.write_all(&[&odd, &b"host: test\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"[..]].concat()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 202") && answer.contains("posthouse-outcome: failed"), "{answer}");
        let status = consumer.status();
        assert_eq!((status.processed, status.duplicates, status.refused, status.connected), (1, 1, 1, true), "{status:?}");
        consumer.shutdown(SOON).await;

        // One that has stopped sends its senders elsewhere.
        let (status, head, _) = bench.raw(&with_id("late"), b"{}").await;
        assert_eq!((status, head.contains("retry-after: 1")), (503, true), "{head}");
        assert!(bench.fixture.found("late").await.is_none());
        // Dropped, the same.
        let other = FromHttp::new().await;
        let webhooks = Webhooks::new().unsigned().start(&bench.inbox()).await.unwrap();
        other.serve(&webhooks);
        assert_eq!(raw(other.0.at, &with_id("early"), b"{}").await.0, 200);
        drop(webhooks);
        assert_eq!(raw(other.0.at, &with_id("late"), b"{}").await.0, 503);
        assert!(bench.fixture.found("late").await.is_none());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_place_it_says_when_to_come_again() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromHttp>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        let consumer = bench.consume(with(1, 1)).await;
        let first = tokio::spawn({
            let at = bench.feed.0.at;
            async move { raw(at, &with_id("1"), b"{}").await.0 }
        });
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        let (status, head, _) = bench.raw(&with_id("2"), b"{}").await;
        assert_eq!((status, head.contains("retry-after: 1")), (503, true), "{head}");
        gate.add_permits(2);
        assert_eq!((first.await.unwrap(), bench.raw(&with_id("2"), b"{}").await.0), (200, 200));
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_key_order_a_failed_one_is_answered_at_once_and_those_behind_it_at_the_latest_when_it_stops() {
    bounded(async {
        let mut settings = quick();
        settings.retry = Retry::new(3, Duration::from_secs(600), Duration::from_secs(600));
        let bench = Bench::<FromHttp>::with(settings, |script| script.failing("1", usize::MAX)).await;
        let mut settings = with(4, 10);
        settings.order = ConsumerOrder::Key;
        let consumer = bench.consume(settings).await;
        let keyed = |id: &str| format!("{}posthouse-key: k\r\n", with_id(id));
        assert_eq!(bench.raw(&keyed("1"), b"{}").await.0, 202);
        let behind = tokio::spawn({
            let (at, head) = (bench.feed.0.at, keyed("2"));
            async move { raw(at, &head, b"{}").await.0 }
        });
        wait_for("both to be in hand", PATIENCE, async || consumer.status().in_hand == 2).await;
        // Other keys go on.
        assert_eq!(bench.raw(&with_id("3"), b"{}").await.0, 200);
        assert_eq!(bench.script.ids(), ["1", "3"]);
        consumer.shutdown(SOON).await;
        assert_eq!(behind.await.unwrap(), 503);

        // And when what they are behind is ended.
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromHttp>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        let mut settings = with(4, 10);
        settings.order = ConsumerOrder::Key;
        let consumer = bench.consume(settings).await;
        let both = ["1", "2"].map(|id| {
            let (at, head) = (bench.feed.0.at, keyed(id));
            tokio::spawn(async move { raw(at, &head, b"{}").await.0 })
        });
        wait_for("both to be in hand", PATIENCE, async || consumer.status().in_hand == 2).await;
        wait_for("one to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        consumer.shutdown(Duration::from_millis(50)).await;
        for request in both {
            assert_eq!(request.await.unwrap(), 503);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_goes_away_does_not_end_the_run() {
    bounded(async {
        let gate = Arc::new(Semaphore::new(0));
        let bench = Bench::<FromHttp>::with(quick(), |script| Script { gate: Some(gate.clone()), ..script }).await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let mut stream = TcpStream::connect(bench.feed.0.at).await.unwrap();
        let head = format!("{}host: test\r\ncontent-length: 2\r\n\r\n{{}}", with_id("1"));
        stream.write_all(head.as_bytes()).await.unwrap();
        wait_for("it to run", PATIENCE, async || bench.script.seen().len() == 1).await;
        drop(stream);
        // A request on the same server that comes later is answered, so the other one's end was seen.
        assert_eq!(bench.raw("GET /hooks HTTP/1.1\r\n", b"").await.0, 405);
        gate.add_permits(1);
        bench.wait_effects(1).await;
        assert_eq!((bench.raw(&with_id("1"), b"{}").await.0, bench.script.seen().len()), (200, 1));
        assert_eq!(consumer.status().in_hand, 0);
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_database_is_away_nothing_is_called_received() {
    bounded(async {
        let (away, feed) = (Away::new().await, FromHttp::new().await);
        let webhooks = Webhooks::new().unsigned().start(&away.inbox).await.unwrap();
        feed.serve(&webhooks);
        assert_eq!(raw(feed.0.at, &with_id("1"), b"{}").await.0, 200);
        away.proxy.set(Mode::Cut);
        let (status, head, body) = raw(feed.0.at, &with_id("2"), b"{}").await;
        assert_eq!((status, head.contains("retry-after: ")), (503, true), "{head}");
        assert_eq!(body, "not handled; send it again", "nothing of the database");
        assert!(away.fixture.found("2").await.is_none());
        away.proxy.set(Mode::Open);
        wait_for("200", PATIENCE, async || raw(feed.0.at, &with_id("2"), b"{}").await.0 == 200).await;
        assert_eq!((away.fixture.effects().await, webhooks.status().given_back >= 1), (2, true));
        webhooks.shutdown(SOON).await;
    })
    .await;
}

/// From one database to the other, with a lost answer between them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_a_relay_it_has_its_effect_once_though_the_answer_is_lost() {
    bounded(async {
        let bench = Bench::<FromHttp>::new().await;
        let consumer = bench.start(Webhooks::new().verify(Verifier::new([OTHER, KEY]).unwrap())).await;
        let proxy = Proxy::start(bench.feed.0.at.to_string()).await;
        proxy.set(Mode::Unanswered);
        let outbox = Postgres::fresh().await;
        let mut http = HttpSettings::default();
        http.allow = vec!["127.0.0.1".into()];
        let mut signing = HttpRoute::default();
        signing.signing_keys = vec![KEY.into()];
        let retry = Retry::new(10_000, Duration::from_millis(20), Duration::from_millis(100));
        let route = Route::to(format!("http://{}/hooks", proxy.address)).retry(retry).http(signing);
        let relay = Relay::builder(&outbox)
            .settings(crate::relay::quick())
            .transport("http", Http::new(http).unwrap())
            .route("hooks", route)
            .start()
            .await
            .unwrap();
        outbox.publish_alone(Message::to("hooks").id("a.b ä").typed("t").key("k").json(&7)).await.unwrap();
        bench.wait_effects(1).await;
        wait_for("the lost answer", PATIENCE, async || consumer.status().processed == 1).await;
        proxy.set(Mode::Open);
        wait_for("the second answer", PATIENCE, async || pending::<Postgres>(&outbox).await == 0).await;
        let status = consumer.status();
        assert!(status.duplicates >= 1 && status.processed == 1, "{status:?}");
        assert_eq!((bench.fixture.effects().await, bench.fixture.effects_of("a.b ä").await), (1, 1));
        let got = bench.script.seen().remove(0);
        assert_eq!((got.key.as_deref(), &*got.payload), (Some("k"), &b"7"[..]));
        relay.shutdown(SOON).await;
        consumer.shutdown(SOON).await;
    })
    .await;
}
