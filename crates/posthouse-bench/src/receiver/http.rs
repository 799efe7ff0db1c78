//! A small server in a thread of its own that answers 204 to everything.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use posthouse::transport;
use posthouse::transport::HttpSettings;
use reqwest::Client;
use reqwest::header::CONTENT_TYPE as HEADER;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::{CONTENT_TYPE, Load, Receiver};
use crate::database::must;
use crate::meter::{Spent, Thread};

#[derive(Debug)]
pub(crate) struct Http {
    address: SocketAddr,
    arrived: Arc<AtomicUsize>,
    thread: Option<Thread>,
    stop: oneshot::Sender<()>,
    running: std::thread::JoinHandle<()>,
}

impl Receiver for Http {
    const NAME: &'static str = "http";
    const SCHEME: &'static str = "http";
    const MESSAGES: usize = 30_000;
    type Transport = transport::Http;

    async fn prepare() -> Self {
        let arrived = Arc::new(AtomicUsize::new(0));
        let (stop, stopped) = oneshot::channel();
        let (started, ready) = oneshot::channel();
        let count = arrived.clone();
        let running = std::thread::spawn(move || {
            let runtime = must("runtime", tokio::runtime::Builder::new_current_thread().enable_all().build());
            runtime.block_on(serve(count, started, stopped));
        });
        let (address, thread) = must("the HTTP receiver", ready.await);
        Self { address, arrived, thread, stop, running }
    }

    fn to(&self) -> String {
        format!("http://{}/bench", self.address)
    }

    fn transport(&self) -> Self::Transport {
        let mut settings = HttpSettings::default();
        settings.allow = vec![self.address.ip().to_string()];
        must("transport", transport::Http::new(settings))
    }

    async fn publish(&self, load: &Load) -> Spent {
        let client = must("client", Client::builder().no_proxy().build());
        let poster = Arc::new(Poster { client, url: self.to(), load: load.clone(), next: AtomicUsize::new(0) });
        poster.post(load.n).await;

        let meter = self.meter();
        let mut workers = JoinSet::new();
        for _ in 0..load.in_flight {
            let poster = poster.clone();
            workers.spawn(async move {
                loop {
                    let n = poster.next.fetch_add(1, Relaxed);
                    if n >= poster.load.n {
                        return;
                    }
                    poster.post(n).await;
                }
            });
        }
        workers.join_all().await;
        meter.stop()
    }

    async fn arrived(&self) -> usize {
        self.arrived.load(Relaxed)
    }

    async fn clear(&mut self) {
        self.arrived.store(0, Relaxed);
    }

    fn thread(&self) -> Option<Thread> {
        self.thread.clone()
    }

    async fn remove(self) {
        // It is gone already when it has panicked, which `join` tells.
        let _ = self.stop.send(());
        must("the HTTP receiver", self.running.join().map_err(|_| "panicked"));
    }
}

/// What the tasks of the raw loop share.
#[derive(Debug)]
struct Poster {
    client: Client,
    url: String,
    load: Load,
    next: AtomicUsize,
}

impl Poster {
    async fn post(&self, n: usize) {
        let load = &self.load;
        let id = load.id(n);
        let mut request = self.client.post(&self.url).header(HEADER, CONTENT_TYPE).body(load.payload.clone());
        request = request.header("Idempotency-Key", &id).header("Posthouse-Message-Id", &id).header("Posthouse-Attempt", "1");
        if let Some(key) = load.key(n) {
            request = request.header("Posthouse-Key", key);
        }
        let response = must("response", must("request", request.send().await).error_for_status());
        // So that the connection can be used again.
        must("response", response.bytes().await);
    }
}

async fn serve(
    arrived: Arc<AtomicUsize>,
    started: oneshot::Sender<(SocketAddr, Option<Thread>)>,
    stopped: oneshot::Receiver<()>,
) {
    let answer = move |_: Bytes| {
        arrived.fetch_add(1, Relaxed);
        std::future::ready(StatusCode::NO_CONTENT)
    };
    let listener = must("listen", TcpListener::bind("127.0.0.1:0").await);
    let address = must("listen", listener.local_addr());
    // Nobody waits any more when the bench ends.
    let _ = started.send((address, Thread::current()));
    tokio::select! {
        served = axum::serve(listener, Router::new().fallback(answer)) => must("serve", served),
        _ = stopped => {}
    }
}
