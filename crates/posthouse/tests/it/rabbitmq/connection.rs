//! No connection, a bad one, a silent one, and its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posthouse::transport::{Outcome, RabbitMqSettings, Transport};
use tokio::net::TcpListener;

use super::*;
use crate::support::{SOON, bounded, wait_for};
use posthouse_faults::{Mode, Proxy};

fn at(url: &str) -> RabbitMq {
    RabbitMq::new(url).expect("settings")
}

/// Why no connection came about; without the password.
async fn refused(url: &str) -> String {
    let outcome = send(&at(url), "/q").await;
    let error = unavailable(&outcome).to_owned();
    assert!(!error.contains("s3cret"), "{error}");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_reason_is_told() {
    bounded(async {
        let url = test_url(Kind::RabbitMq);
        let broker = url.split('@').nth(1).expect("a login");
        let (address, vhost) = broker.split_once('/').expect("a virtual host");
        let error = refused(&format!("amqp://posthouse:s3cret@{broker}")).await;
        says(&error, &["refused the login of user \"posthouse\"", "ACCESS_REFUSED", address]);
        let login = url.strip_suffix(vhost).expect("the virtual host is the end");
        let error = refused(&format!("{login}elsewhere")).await;
        says(&error, &["refused the virtual host \"elsewhere\"", "NOT_ALLOWED", "create it"]);
        let error = refused("amqp://posthouse:s3cret@127.0.0.1:1/v").await;
        says(&error, &["127.0.0.1:1 refused the connection", "is it running"]);
        let error = refused("amqp://posthouse:s3cret@no-such-host.invalid/v").await;
        says(&error, &["\"no-such-host.invalid\"", "can't be resolved"]);
        let error = refused(&format!("amqps://posthouse:s3cret@{broker}")).await;
        says(&error, &[address]);
    })
    .await;
}

/// Something listens and says nothing: the deadline ends it.
#[tokio::test]
async fn a_silent_listener_costs_the_connect_timeout() {
    bounded(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let mut settings = RabbitMqSettings::from(format!("amqp://{}", listener.local_addr().expect("address")).as_str());
        settings.connect_timeout = Duration::from_millis(300);
        let transport = RabbitMq::new(settings).expect("settings");
        let started = Instant::now();
        let (outcome, accepted) = tokio::join!(send(&transport, "/q"), async {
            use tokio::io::AsyncReadExt;
            let (mut stream, _) = listener.accept().await.expect("accept");
            let mut buffer = Vec::new();
            stream.read_to_end(&mut buffer).await.map(|_| ())
        });
        says(unavailable(&outcome), &["did not complete the connection within 300ms"]);
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        accepted.expect("the socket is closed, not left behind");
    })
    .await;
}

/// Many messages to many exchanges while the broker is down: they share the attempts to connect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connects_are_shared() {
    bounded(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let url = format!("amqp://{}", listener.local_addr().expect("address"));
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = accepted.clone();
        let closing = tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        let transport = at(&url);
        let batch = (0..1_000).map(|i| (message("x"), route(&format!("x{}/k", i % 40)))).collect();
        for (_, outcome) in send_all(&transport, batch).await {
            says(unavailable(&outcome), &["closed the connection during the handshake"]);
        }
        let attempts = accepted.load(Ordering::SeqCst);
        assert!((1..=5).contains(&attempts), "{attempts} attempts");
        closing.abort();
    })
    .await;
}

/// P10, L16: the peer vanishes without a word, then is back at the same address. Nothing counts as delivered or as an attempt,
/// and the next message goes through long before heartbeats would have told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vanished_peer_is_given_up_at_the_deadline() {
    bounded(async {
        let rig = Rig::new().await;
        let queue = rig.queue("q", &[]).await;
        let url = test_url(Kind::RabbitMq);
        let address = url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
        let proxy = Proxy::start(address.clone()).await;
        let transport = at(&url.replace(&address, &proxy.address.to_string()));
        assert_eq!(send(&transport, &format!("/{queue}")).await, Outcome::Delivered);

        proxy.set(Mode::Silent);
        let batch = (0..100).map(|_| (message("x"), route(&format!("/{queue}")))).collect();
        for (_, outcome) in deliver_batch(&transport, batch, Duration::from_secs(1)).await {
            says(unavailable(&outcome), &["has not confirmed within"]);
        }
        proxy.set(Mode::Open);
        let started = Instant::now();
        // The old connection's end may be noticed by the first of them.
        let mut last = send(&transport, &format!("/{queue}")).await;
        if last != Outcome::Delivered {
            says(unavailable(&last), &["broke"]);
            last = send(&transport, &format!("/{queue}")).await;
        }
        assert_eq!(last, Outcome::Delivered);
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    })
    .await;
}

/// L16: the connection breaks with messages in flight: the broker has them, but its confirmation never arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_counts_no_attempt() {
    bounded(async {
        let rig = Rig::new().await;
        let queue = rig.queue("q", &[]).await;
        let url = test_url(Kind::RabbitMq);
        let address = url.split('@').nth(1).and_then(|rest| rest.split('/').next()).expect("host:port").to_owned();
        let proxy = Proxy::start(address.clone()).await;
        let transport = at(&url.replace(&address, &proxy.address.to_string()));
        for round in 0..5 {
            proxy.set(Mode::Open);
            // A connect that has just failed is not repeated at once.
            wait_for("the connection", SOON, async || send(&transport, &format!("/{queue}")).await == Outcome::Delivered).await;
            proxy.set(Mode::Unanswered);
            let batch = (0..1_000).map(|_| (message("x"), route(&format!("/{queue}")))).collect();
            for (_, outcome) in send_all(&transport, batch).await {
                let error = unavailable(&outcome);
                assert!(error.contains("broke before it confirmed") || error.contains("handshake"), "round {round}: {error}");
            }
        }
    })
    .await;
}

/// L20: closing waits for what is in flight, and says goodbye.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_flushes() {
    bounded(async {
        let rig = Rig::new().await;
        let queue = rig.queue("q", &[]).await;
        let transport = transport();
        assert_eq!(send(&transport, &format!("/{queue}")).await, Outcome::Delivered);
        let batch = (0..2_000).map(|_| (message("x"), route(&format!("/{queue}")))).collect::<Vec<_>>();
        let ids: HashSet<_> = batch.iter().map(|(m, _)| m.message_id.to_string()).collect();
        let mut sending = std::pin::pin!(send_all(&transport, batch));
        // Handed over, but not confirmed.
        assert!(futures_util::poll!(&mut sending).is_pending());
        let ((), outcomes) = tokio::join!(transport.close(), sending);
        let delivered: HashSet<_> = outcomes.into_iter().filter(|o| o.1 == Outcome::Delivered).map(|o| o.0).collect();
        assert_eq!(delivered, ids);
        rig.take(&queue).await.expect("the first one");
        assert_eq!(rig.ids(&queue).await, ids);
        says(unavailable(&send(&transport, &format!("/{queue}")).await), &["is being closed"]);
    })
    .await;
}
