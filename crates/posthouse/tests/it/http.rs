//! The `http` transport against a real server on the loopback interface.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::testing::{deliver, deliver_batch};
use posthouse::transport::{Failure, Http, HttpSettings, Outcome};
use posthouse::webhook::{Refused, Verifier};
use posthouse::{CloudEvents, Envelope, Error, HttpRoute, Route};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Long enough for any machine; tests that wait for a deadline set their own.
const PATIENCE: Duration = Duration::from_secs(20);

/// A request as the server saw it; header names in lower case.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    method: String,
    target: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }
}

/// How the server answers a request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// Writes this and keeps the connection.
    Keep(String),
    /// Writes this and closes.
    Close(String),
    /// Writes this and holds the connection until the other side closes.
    Hang(String),
    /// Writes this, then body bytes for as long as the other side takes them.
    Endless(String),
    /// Waits for the signal, then answers 200.
    After(Arc<Notify>),
    /// Answers 200 and gives the signal.
    Signal(Arc<Notify>),
}

/// A complete response with a length.
pub(crate) fn status(line: &str, headers: &str, body: &str) -> Reply {
    Reply::Keep(format!("HTTP/1.1 {line}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()))
}

pub(crate) struct Server {
    at: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<AtomicUsize>,
    /// Bytes of an endless body that went out before the other side closed.
    sent: Arc<AtomicUsize>,
    closed: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    pub(crate) async fn new(reply: Reply) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let connections = Arc::new(AtomicUsize::new(0));
        let sent = Arc::new(AtomicUsize::new(0));
        let closed = Arc::new(Notify::new());
        let (s, c, n, e) = (seen.clone(), connections.clone(), sent.clone(), closed.clone());
        let task = tokio::spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                c.fetch_add(1, Ordering::SeqCst);
                let (reply, seen, sent, closed) = (reply.clone(), s.clone(), n.clone(), e.clone());
                open.spawn(async move {
                    serve(stream, reply, &seen, &sent).await;
                    closed.notify_one();
                });
            }
        });
        Self { at, seen, connections, sent, closed, task }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.at)
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    fn only(&self) -> Seen {
        let seen = self.seen();
        assert_eq!(seen.len(), 1, "{seen:?}");
        seen[0].clone()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

async fn serve(stream: TcpStream, reply: Reply, seen: &Mutex<Vec<Seen>>, sent: &AtomicUsize) {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read_request(&mut stream).await {
        seen.lock().unwrap().push(request);
        match &reply {
            Reply::Keep(text) => stream.write_all(text.as_bytes()).await.unwrap(),
            Reply::Close(text) => {
                stream.write_all(text.as_bytes()).await.unwrap();
                return;
            }
            Reply::Hang(text) => {
                stream.write_all(text.as_bytes()).await.unwrap();
                // Reads until the client closes.
                let _ = stream.read_to_end(&mut Vec::new()).await;
                return;
            }
            Reply::Endless(text) => {
                stream.write_all(text.as_bytes()).await.unwrap();
                while let Ok(n) = stream.write(&[b'x'; 8192]).await {
                    sent.fetch_add(n, Ordering::SeqCst);
                }
                return;
            }
            Reply::After(signal) => {
                signal.notified().await;
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            }
            Reply::Signal(signal) => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                signal.notify_one();
            }
        }
    }
}

async fn read_request(stream: &mut BufReader<TcpStream>) -> Option<Seen> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.trim_end().split("\r\n");
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let mut headers = BTreeMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").unwrap_or((line.trim_end_matches(':'), ""));
        let twice = headers.insert(name.to_ascii_lowercase(), value.to_owned());
        assert_eq!(twice, None, "{name} came twice");
    }
    let mut body = vec![0; headers.get("content-length").map_or(0, |n| n.parse().unwrap())];
    stream.read_exact(&mut body).await.ok()?;
    Some(Seen { method, target, headers, body })
}

/// A transport that may call the loopback interface.
fn http() -> Http {
    http_with(|_| {})
}

fn http_with(change: impl FnOnce(&mut HttpSettings)) -> Http {
    let mut settings = HttpSettings::default();
    settings.allow = vec!["127.0.0.0/8".into()];
    change(&mut settings);
    Http::new(settings).unwrap()
}

fn message() -> Envelope {
    Envelope::for_test("orders", "{}")
}

async fn send(http: &Http, url: &str) -> Outcome {
    deliver(http, message(), Route::to(url), PATIENCE).await
}

#[track_caller]
fn retry(outcome: Outcome) -> (Option<Duration>, Failure) {
    match outcome {
        Outcome::Retry { after, error } => (after, error),
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

#[track_caller]
fn no_answer(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::NoAnswer(failure) => failure,
        other => panic!("expected NoAnswer, got {other:?}"),
    }
}

#[tokio::test]
async fn the_status_decides() {
    let http = http();
    for line in ["200 OK", "201 Created", "202 Accepted", "204 No Content", "299 Custom"] {
        let server = Server::new(status(line, "", "")).await;
        assert_eq!(send(&http, &server.url("/")).await, Outcome::Delivered, "{line}");
    }
    for line in [
        "400 Bad Request",
        "410 Gone",
        "413 Payload Too Large",
        "414 URI Too Long",
        "415 Unsupported Media Type",
        "422 Unprocessable Content",
    ] {
        let server = Server::new(status(line, "retry-after: 1\r\n", "because")).await;
        let failure = rejected(send(&http, &server.url("/a")).await);
        assert!(failure.error.contains(&line[..3]) && failure.error.contains(&server.url("/a")), "{}", failure.error);
        assert_eq!(failure.response.as_deref(), Some("because"));
    }
    for line in [
        "300 Multiple Choices",
        "304 Not Modified",
        "401 Unauthorized",
        "403 Forbidden",
        "404 Not Found",
        "405 Method Not Allowed",
        "408 Request Timeout",
        "409 Conflict",
        "425 Too Early",
        "429 Too Many Requests",
        "499 Custom",
        "500 Internal Server Error",
        "501 Not Implemented",
        "503 Service Unavailable",
        "599 Custom",
    ] {
        let server = Server::new(status(line, "", "")).await;
        let (after, failure) = retry(send(&http, &server.url("/")).await);
        assert_eq!((after, failure.response), (None, None), "{line}");
        assert!(failure.error.contains(&line[..3]), "{}", failure.error);
    }
}

#[tokio::test]
async fn the_request_carries_route_and_message() {
    let server = Server::new(status("200 OK", "", "")).await;
    let mut route = Route::to(server.url("/hooks/7?a=b%20c"));
    route.http.method = "PUT".into();
    route.http.authorization = Some("Bearer t0ken".into());
    route.http.headers =
        [("X-Tenant", "acme"), ("X-Both", "route"), ("Host", "example.com")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let mut m = Envelope::for_test("orders", vec![0, 1, 255]);
    m.message_id = "id %ä".into();
    m.kind = "order placed".into();
    m.key = Some("customer-7".into());
    m.attempt = 3;
    m.content_type = "application/x-orders".into();
    m.headers = [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "a=b"),
        ("x-both", "message"),
        ("X-Umlaut", "ä"),
        // None of these may get through.
        ("Authorization", "Bearer forged"),
        ("Content-Type", "text/forged"),
        ("Content-Length", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
        ("Host", "forged"),
        ("Upgrade", "h2c"),
        ("Expect", "100-continue"),
        ("Idempotency-Key", "forged"),
        ("Posthouse-Attempt", "forged"),
        ("Posthouse-Anything", "forged"),
    ]
    .into_iter()
    .collect();
    assert_eq!(deliver(&http(), m, route, PATIENCE).await, Outcome::Delivered);

    let seen = server.only();
    assert_eq!((seen.method.as_str(), seen.target.as_str()), ("PUT", "/hooks/7?a=b%20c"));
    assert_eq!(seen.body, [0, 1, 255]);
    let version = concat!("posthouse/", env!("CARGO_PKG_VERSION"));
    let expected: BTreeMap<&str, &str> = [
        ("accept", "*/*"),
        ("authorization", "Bearer t0ken"),
        ("content-length", "3"),
        ("content-type", "application/x-orders"),
        ("host", "example.com"),
        ("idempotency-key", "id%20%25%C3%A4"),
        ("posthouse-attempt", "3"),
        ("posthouse-key", "customer-7"),
        ("posthouse-message-id", "id%20%25%C3%A4"),
        ("posthouse-type", "order%20placed"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "a=b"),
        ("user-agent", version),
        ("x-both", "message"),
        ("x-tenant", "acme"),
        ("x-umlaut", "ä"),
    ]
    .into();
    assert_eq!(seen.headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<BTreeMap<_, _>>(), expected);
}

#[tokio::test]
async fn a_route_can_send_cloudevents_in_both_modes() {
    let mut m = Envelope::for_test("orders", r#"{"sku":"A1"}"#);
    m.content_type = "application/json".into();
    m.message_id = "id %\"\u{e4}".into();
    m.key = Some("customer 7".into());
    m.created_at = std::time::UNIX_EPOCH + Duration::from_millis(1_522_949_420_089);
    m.headers = [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        // An extension of the publisher's own.
        ("ce-comexampletenant", "acme"),
        ("ce-id", "forged"),
        ("Ce-Source", "forged"),
        ("ce-time", "forged"),
        ("ce-datacontenttype", "text/forged"),
    ]
    .into_iter()
    .collect();

    let server = Server::new(status("200 OK", "", "")).await;
    let route = Route::to(server.url("/")).cloudevents(CloudEvents::binary("https://example.com/shop"));
    assert_eq!(deliver(&http(), m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let seen = server.only();
    assert_eq!((seen.header("content-type"), &*seen.body), (Some("application/json"), &br#"{"sku":"A1"}"#[..]));
    let attributes: BTreeMap<_, _> =
        seen.headers.iter().filter_map(|(name, v)| Some((name.strip_prefix("ce-")?, v.as_str()))).collect();
    let expected = [
        ("comexampletenant", "acme"),
        ("id", "id%20%25%22%C3%A4"),
        ("partitionkey", "customer%207"),
        ("source", "https://example.com/shop"),
        ("specversion", "1.0"),
        ("time", "2018-04-05T17:30:20.089Z"),
        ("type", "message"),
    ];
    assert_eq!(attributes, expected.into());
    assert_eq!(seen.header("traceparent"), m.headers.get("traceparent"));

    let server = Server::new(status("200 OK", "", "")).await;
    let mut route = Route::to(server.url("/")).cloudevents(CloudEvents::structured("/shop"));
    route.http.headers.insert("Content-Type".into(), "text/forged".into());
    assert_eq!(deliver(&http(), m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let seen = server.only();
    assert_eq!(seen.header("content-type"), Some("application/cloudevents+json; charset=UTF-8"));
    assert!(seen.header("ce-id").is_none() && seen.header("ce-time").is_none(), "{seen:?}");
    let expected = serde_json::json!({
        "specversion": "1.0", "id": "id %\"\u{e4}", "source": "/shop", "type": "message", "time": "2018-04-05T17:30:20.089Z",
        "partitionkey": "customer 7", "datacontenttype": "application/json",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "data": { "sku": "A1" },
    });
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&seen.body).unwrap(), expected);

    // What can't be a CloudEvent is told, not mended.
    m.key = Some("a\nb".into());
    let route = Route::to(server.url("/")).cloudevents(CloudEvents::default());
    let failure = rejected(deliver(&http(), m, route, PATIENCE).await);
    assert!(failure.error.contains("\"partitionkey\""), "{}", failure.error);
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn requests_are_signed_with_every_key_of_the_route() {
    let (old, new) = ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD");
    let other = "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
    let signed = |server: &Server, keys: &[&str]| {
        let mut route = Route::to(server.url("/"));
        route.http.signing_keys = keys.iter().map(|&k| k.to_owned()).collect();
        route
    };
    let forged = |mut m: Envelope| {
        for name in ["webhook-id", "Webhook-Timestamp", "webhook-signature"] {
            m.headers.insert(name, "forged");
        }
        m
    };
    let headers =
        |seen: &Seen| ["webhook-id", "webhook-timestamp", "webhook-signature"].map(|n| seen.header(n).map(str::to_owned));

    let server = Server::new(status("200 OK", "", "")).await;
    let mut m = forged(Envelope::for_test("orders", vec![0, 0xff, b'{']));
    m.message_id = "a.b %".into();
    assert_eq!(deliver(&http(), m.clone(), signed(&server, &[old, new]), PATIENCE).await, Outcome::Delivered);
    let seen = server.only();
    let [Some(id), Some(time), Some(signatures)] = headers(&seen) else { panic!("{seen:?}") };
    assert_eq!((&*id, seen.header("posthouse-message-id"), signatures.split(' ').count()), ("a%2Eb%20%25", Some("a.b%20%25"), 2));
    for keys in [&[old][..], &[new], &[other, new]] {
        Verifier::new(keys).unwrap().verify(&id, &time, &signatures, &seen.body).unwrap();
    }
    let verify = |keys: &[&str], id: &str, body: &[u8]| Verifier::new(keys).unwrap().verify(id, &time, &signatures, body);
    assert_eq!(verify(&[other], &id, &seen.body), Err(Refused::NoMatch));
    assert_eq!(verify(&[old], "another", &seen.body), Err(Refused::NoMatch));
    assert_eq!(verify(&[old], &id, b"another"), Err(Refused::NoMatch));

    // What is signed is what is sent, also where that is not the payload.
    let server = Server::new(status("200 OK", "", "")).await;
    let route = signed(&server, &[old]).cloudevents(CloudEvents::structured("/shop"));
    assert_eq!(deliver(&http(), m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let seen = server.only();
    let [Some(id), Some(time), Some(signatures)] = headers(&seen) else { panic!("{seen:?}") };
    Verifier::new([old]).unwrap().verify(&id, &time, &signatures, &seen.body).unwrap();

    // Without keys nothing looks signed.
    let server = Server::new(status("200 OK", "", "")).await;
    assert_eq!(deliver(&http(), m.clone(), Route::to(server.url("/")), PATIENCE).await, Outcome::Delivered);
    assert_eq!(headers(&server.only()), [None, None, None]);

    let route = signed(&server, &["whsec_s3cret"]);
    assert!(!format!("{route:?}").contains("s3cret"));
    let error = rejected(deliver(&http(), m, route, PATIENCE).await).error;
    assert!(error.contains("http.signing_keys") && !error.contains("s3cret"), "{error}");
}

#[tokio::test]
async fn the_defaults_are_a_post_of_the_messages_type_and_the_url_may_hold_credentials() {
    let server = Server::new(status("200 OK", "", "")).await;
    let http = http_with(|s| s.user_agent = "courier/2".into());
    let url = server.url("/").replace("http://", "http://user:p%40ss@");
    assert_eq!(send(&http, &url).await, Outcome::Delivered);
    let seen = server.only();
    assert_eq!(seen.method, "POST");
    assert_eq!(seen.header("content-type"), Some("application/octet-stream"));
    assert_eq!(seen.header("authorization"), Some("Basic dXNlcjpwQHNz"));
    assert_eq!(seen.header("user-agent"), Some("courier/2"));
    assert_eq!((seen.header("posthouse-key"), seen.header("posthouse-type")), (None, None));

    let server = Server::new(status("200 OK", "", "")).await;
    let mut route = Route::to(server.url("/").replace("http://", "http://user:pass@"));
    route.http.authorization = Some("Bearer t0ken".into());
    route.http.content_type = Some("text/plain".into());
    assert_eq!(deliver(&http, message(), route, PATIENCE).await, Outcome::Delivered);
    assert_eq!(server.only().header("authorization"), Some("Bearer t0ken"));
    assert_eq!(server.only().header("content-type"), Some("text/plain"));
}

#[tokio::test]
async fn an_empty_payload_is_an_empty_body() {
    let http = http();
    for (method, length) in [("POST", Some("0")), ("PUT", Some("0")), ("GET", None)] {
        let server = Server::new(status("200 OK", "", "")).await;
        let mut route = Route::to(server.url("/"));
        route.http.method = method.into();
        assert_eq!(deliver(&http, Envelope::for_test("orders", ""), route, PATIENCE).await, Outcome::Delivered);
        assert_eq!(server.only().header("content-length"), length, "{method}");
    }
}

#[tokio::test]
async fn what_http_cannot_carry_is_rejected_by_name_and_never_sent() {
    let server = Server::new(status("200 OK", "", "")).await;
    let http = http();
    let with_header = |name: &str, value: &str| {
        let mut m = message();
        m.headers.insert(name, value);
        m
    };
    let route = |change: fn(&mut HttpRoute)| {
        let mut route = Route::to(server.url("/"));
        change(&mut route.http);
        route
    };
    let mut odd_type = message();
    odd_type.content_type = "text/\nplain".into();
    for (m, route, named) in [
        (with_header("x y", "v"), route(|_| {}), "\"x y\""),
        (with_header("x-split", "s3cret\r\nx-injected: 1"), route(|_| {}), "\"x-split\""),
        (odd_type, route(|_| {}), "content type"),
        (message(), route(|h| h.method = "GET /".into()), "\"GET /\""),
        (message(), route(|h| h.method = "CONNECT".into()), "\"CONNECT\""),
        (message(), route(|h| h.authorization = Some("s3cret\n".into())), "http.authorization"),
        (message(), route(|h| h.content_type = Some("s3cret\n".into())), "http.content_type"),
        (message(), route(|h| drop(h.headers.insert("X-Api-Key".into(), "s3cret\0".into()))), "\"X-Api-Key\""),
        (message(), route(|h| drop(h.headers.insert("Content-Length".into(), "5".into()))), "\"Content-Length\""),
        (message(), route(|h| drop(h.headers.insert("".into(), "5".into()))), "\"\""),
        (message(), Route::to("http://"), "URL"),
        (message(), Route::to("http://127.0.0.1:99999/s3cret"), "URL"),
        (message(), Route::to("ftp:ftp://127.0.0.1/"), "ftp"),
    ] {
        let error = rejected(deliver(&http, m, route, PATIENCE).await).error;
        assert!(error.contains(named) && !error.contains("s3cret"), "{named}: {error}");
    }
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn retry_after_is_honoured_in_both_forms() {
    let http = http();
    let date = "date: Sun, 06 Nov 1994 08:49:00 GMT\r\n";
    for (line, headers, seconds) in [
        ("503 Service Unavailable", "retry-after: 17\r\n".to_owned(), 17),
        ("429 Too Many Requests", "retry-after: 1000000\r\n".to_owned(), 86_400),
        ("404 Not Found", "retry-after: 0\r\n".to_owned(), 0),
        ("302 Found", "retry-after: 5\r\nlocation: /b\r\n".to_owned(), 5),
        ("503 Service Unavailable", format!("{date}retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n"), 37),
        ("503 Service Unavailable", format!("{date}retry-after: Sun, 06 Nov 1994 08:48:00 GMT\r\n"), 0),
        // Without the server's own time, this is long past.
        ("503 Service Unavailable", "retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n".to_owned(), 0),
    ] {
        let server = Server::new(status(line, &headers, "")).await;
        let (after, _) = retry(send(&http, &server.url("/")).await);
        assert_eq!(after, Some(Duration::from_secs(seconds)), "{line} {headers:?}");
    }
}

#[tokio::test]
async fn the_deadline_holds_for_the_body_too() {
    let http = http();
    // An answer that comes later is replaced by "no answer by the deadline".
    let timeout = Duration::from_secs(1);

    let server = Server::new(Reply::Hang(String::new())).await;
    let failure = no_answer(deliver(&http, message(), Route::to(server.url("/")), timeout).await);
    assert!(failure.error.contains("no complete response within 1.0s"), "{}", failure.error);

    let server = Server::new(Reply::Hang("HTTP/1.1 500 Oops\r\nretry-after: 9\r\ncontent-length: 100\r\n\r\nhalf".into())).await;
    let (after, failure) = retry(deliver(&http, message(), Route::to(server.url("/")), timeout).await);
    assert!(failure.error.contains("500") && failure.error.contains("no complete response within 1.0s"), "{}", failure.error);
    assert_eq!((after, failure.response.as_deref()), (Some(Duration::from_secs(9)), Some("half")));
    tokio::time::timeout(PATIENCE, server.closed.notified()).await.expect("the connection is dropped");

    let server = Server::new(Reply::Hang("HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n".into())).await;
    rejected(deliver(&http, message(), Route::to(server.url("/")), timeout).await);
}

#[tokio::test]
async fn a_2xx_is_a_confirmation_whatever_becomes_of_its_body() {
    let http = http();
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf";
    for reply in [
        Reply::Hang(head.into()),
        Reply::Close(head.into()),
        Reply::Endless("HTTP/1.1 200 OK\r\n\r\n".into()),
        Reply::Close("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense".into()),
    ] {
        let server = Server::new(reply.clone()).await;
        assert_eq!(send(&http, &server.url("/")).await, Outcome::Delivered, "{reply:?}");
        tokio::time::timeout(PATIENCE, server.closed.notified()).await.expect("the connection is dropped");
    }
    // The deadline is nearer than the time a confirmed message waits for its body.
    let server = Server::new(Reply::Hang(head.into())).await;
    let outcome = deliver(&http, message(), Route::to(server.url("/")), Duration::from_millis(500)).await;
    assert_eq!(outcome, Outcome::Delivered);
}

#[tokio::test]
async fn an_endless_body_is_cut_while_it_comes() {
    for limit in [0, 1, 4096, 100_000] {
        let server = Server::new(Reply::Endless("HTTP/1.1 500 Oops\r\n\r\n".into())).await;
        let http = http_with(|s| s.response_limit = limit);
        let (_, failure) = retry(send(&http, &server.url("/")).await);
        assert_eq!(failure.response.unwrap_or_default(), "x".repeat(limit));
        tokio::time::timeout(PATIENCE, server.closed.notified()).await.expect("the connection is dropped");
        // What went out beyond the limit sat in socket buffers.
        let sent = server.sent.load(Ordering::SeqCst);
        assert!(sent < 64 << 20, "{sent}");
    }
}

#[tokio::test]
async fn a_captured_body_is_text_that_can_be_stored() {
    let http = http_with(|s| s.response_limit = 8);
    for (body, kept) in [("a\0b", "a\u{fffd}b"), ("12345678", "12345678"), ("123456789", "12345678"), ("äääää", "ääää")]
    {
        let server = Server::new(status("500 Oops", "", body)).await;
        let (_, failure) = retry(send(&http, &server.url("/")).await);
        assert_eq!(failure.response.as_deref(), Some(kept));
    }
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let target = Server::new(status("200 OK", "", "")).await;
    for line in ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let location = format!("location: {}?token=s3cret\r\n", target.url("/b").replace("http://", "http://u:s3cret@"));
        let server = Server::new(status(line, &location, "")).await;
        let (_, failure) = retry(send(&http(), &server.url("/a")).await);
        assert!(failure.error.contains("redirects are not followed"), "{}", failure.error);
        assert!(failure.error.contains(&target.url("/b")) && !failure.error.contains("s3cret"), "{}", failure.error);
    }
    let far = format!("location: /{}\r\n", "b".repeat(10_000));
    let server = Server::new(status("302 Found", &far, "")).await;
    let (_, failure) = retry(send(&http(), &server.url("/a")).await);
    assert!(failure.error.contains("/bbb") && failure.error.len() < 600, "{}", failure.error);
    assert_eq!(target.connections(), 0);
}

#[tokio::test]
async fn private_addresses_are_refused_however_they_are_written() {
    let server = Server::new(status("200 OK", "", "")).await;
    let port = server.at.port();
    let strict = Http::new(HttpSettings::default()).unwrap();
    for host in [
        "127.0.0.1",
        "127.0.0.1.",
        "localhost",
        "LOCALHOST",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "0",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
    ] {
        for scheme in ["http", "https"] {
            let error = rejected(send(&strict, &format!("{scheme}://{host}:{port}/")).await).error;
            assert!(error.contains("transports.http.allow"), "{scheme} {host}: {error}");
        }
    }
    assert_eq!(server.connections(), 0);

    // The same server is called once it is allowed, literally and by name.
    for allow in ["127.0.0.0/8", "127.0.0.1", "::ffff:127.0.0.1"] {
        let http = http_with(|s| s.allow = vec![allow.into()]);
        assert_eq!(send(&http, &server.url("/")).await, Outcome::Delivered, "{allow}");
    }
    let http = http_with(|s| s.allow = vec!["127.0.0.0/8".into(), "::1".into()]);
    assert_eq!(send(&http, &format!("http://localhost:{port}/")).await, Outcome::Delivered);
    let http = http_with(|s| s.allow_private = true);
    assert_eq!(send(&http, &format!("http://2130706433:{port}/")).await, Outcome::Delivered);
    // Another network does not help.
    let http = http_with(|s| s.allow = vec!["10.0.0.0/8".into()]);
    rejected(send(&http, &server.url("/")).await);
}

#[tokio::test]
async fn settings_that_cannot_hold_are_named() {
    let mut settings = HttpSettings::default();
    settings.allow = vec!["10.0.0.0/33".into(), "10.0.0.0/8".into(), "db.internal".into()];
    settings.response_limit = (1 << 20) + 1;
    settings.connect_timeout = Duration::ZERO;
    settings.user_agent = "a\nb".into();
    let Err(Error::Config(text)) = Http::new(settings) else { panic!("expected Error::Config") };
    for part in ["\"10.0.0.0/33\"", "\"db.internal\"", "response_limit", "connect_timeout", "user_agent"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let read = |text| serde_json::from_str::<HttpSettings>(text);
    let settings = read(r#"{"allow": ["10.0.0.0/8"], "connect_timeout": "2s"}"#).unwrap();
    assert_eq!(settings.connect_timeout, Duration::from_secs(2));
    assert!(read(r#"{"alow": []}"#).unwrap_err().to_string().contains("alow"));
}

#[tokio::test]
async fn no_connection_means_unavailable() {
    let http = http_with(|s| s.connect_timeout = Duration::from_millis(200));

    // A port that was free a moment ago and is held by nobody.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = listener.local_addr().unwrap();
    drop(listener);
    let failure = unavailable(send(&http, &format!("http://{closed}/")).await);
    assert!(failure.error.contains(&format!("can't connect to http://{closed}/")), "{}", failure.error);
    assert!(failure.error.to_lowercase().contains("refused"), "{}", failure.error);

    // ".invalid" never resolves (RFC 6761).
    let http_dns = http_with(|_| {});
    let failure = unavailable(send(&http_dns, "http://posthouse.invalid/").await);
    assert!(failure.error.contains("can't connect to http://posthouse.invalid/"), "{}", failure.error);

    // Not TLS.
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", plain.local_addr().unwrap());
    let speaks_no_tls = async {
        let (mut stream, _) = plain.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    };
    let (outcome, ()) = tokio::join!(send(&http_dns, &url), speaks_no_tls);
    unavailable(outcome);

    // The kernel accepts the connection; nobody answers the TLS handshake.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let failure = unavailable(send(&http, &format!("https://{}/", mute.local_addr().unwrap())).await);
    assert!(failure.error.contains("no connection within 200ms"), "{}", failure.error);
}

#[tokio::test]
async fn a_connection_that_breaks_after_the_request_is_tried_again() {
    let http = http();
    for text in ["", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\ncontent-le", "nonsense\r\n\r\n", "HTTP/1.1 99999 What\r\n\r\n"] {
        let server = Server::new(Reply::Close(text.into())).await;
        let (after, failure) = retry(send(&http, &server.url("/")).await);
        assert_eq!(after, None);
        assert!(failure.error.contains("gave no valid response"), "{text:?}: {}", failure.error);
        assert_eq!(server.seen().len(), 1, "sent once, and again only by the relay");
    }
    let server = Server::new(Reply::Close("HTTP/1.1 500 Oops\r\ncontent-length: 100\r\n\r\nhalf".into())).await;
    let (_, failure) = retry(send(&http, &server.url("/")).await);
    assert!(failure.error.contains("500") && failure.error.contains("broke off"), "{}", failure.error);
    assert_eq!(failure.response.as_deref(), Some("half"));
}

#[tokio::test]
async fn connections_are_kept() {
    let http = http();
    for reply in [
        status("204 No Content", "", ""),
        status("200 OK", "", r#"{"ok":true}"#),
        status("500 Oops", "", "sorry"),
        Reply::Keep("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n".into()),
    ] {
        let server = Server::new(reply.clone()).await;
        for _ in 0..20 {
            send(&http, &server.url("/")).await;
        }
        assert_eq!((server.seen().len(), server.connections()), (20, 1), "{reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_endpoint_holds_up_nothing_else_in_its_batch() {
    // The slow one answers only after the fast one did: one after the other, in this order, would never end.
    let signal = Arc::new(Notify::new());
    let slow = Server::new(Reply::After(signal.clone())).await;
    let fast = Server::new(Reply::Signal(signal)).await;
    let batch = vec![(message(), Route::to(slow.url("/"))), (message(), Route::to(fast.url("/")))];
    let mut outcomes = deliver_batch(&http(), batch, PATIENCE).await;
    outcomes.sort_by_key(|(position, _)| *position);
    assert_eq!(outcomes, [(0, Outcome::Delivered), (1, Outcome::Delivered)]);
}

#[tokio::test]
async fn a_hanging_endpoint_is_answered_last_and_alone() {
    let hanging = Server::new(Reply::Hang(String::new())).await;
    let fast = Server::new(status("200 OK", "", "")).await;
    let batch = vec![(message(), Route::to(hanging.url("/"))), (message(), Route::to(fast.url("/")))];
    let outcomes = deliver_batch(&http(), batch, Duration::from_secs(1)).await;
    assert_eq!(outcomes[0], (1, Outcome::Delivered));
    assert_eq!(outcomes[1].0, 0);
    assert!(no_answer(outcomes[1].1.clone()).error.contains("no complete response"), "{outcomes:?}");
}

#[tokio::test]
async fn secrets_are_in_no_error_and_no_debug_output() {
    let http = http_with(|s| s.connect_timeout = Duration::from_millis(200));
    let answers = Server::new(status("500 Oops", "", "")).await;
    let breaks = Server::new(Reply::Close(String::new())).await;
    let hangs = Server::new(Reply::Hang(String::new())).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = free.local_addr().unwrap();
    drop(free);
    for at in [
        answers.at.to_string(),
        breaks.at.to_string(),
        hangs.at.to_string(),
        closed.to_string(),
        "10.0.0.1".to_owned(),
        "posthouse.invalid".to_owned(),
        "127.0.0.1:99999".to_owned(),
    ] {
        let mut route = Route::to(format!("http://user:s3cret@{at}/path?token=s3cret#s3cret"));
        route.http.authorization = Some("Bearer s3cret".into());
        route.http.headers.insert("X-Api-Key".into(), "s3cret".into());
        assert!(!format!("{:?}", route.http).contains("s3cret"));
        let outcome = deliver(&http, message(), route, Duration::from_secs(2)).await;
        assert_ne!(outcome, Outcome::Delivered);
        assert!(!format!("{outcome:?}").contains("s3cret"), "{at}: {outcome:?}");
    }
    let debug = format!("{http:?}");
    assert!(debug.starts_with("Http") && debug.contains("127.0.0.0/8"), "{debug}");
}
