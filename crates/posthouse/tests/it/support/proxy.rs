//! A TCP proxy on loopback that can fall silent or cut, to be put before a database.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Bytes pass.
    Open,
    /// Connections stay open and new ones are accepted, but nothing passes: a peer that vanished without a word.
    Silent,
    /// What the client sends passes; the first answer to it closes the connection instead.
    Unanswered,
    /// Connections are closed, and new ones at once.
    Cut,
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    mode: watch::Sender<Mode>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (mode, watched) = watch::channel(Mode::Open);
        let task = tokio::spawn(async move {
            let mut links = tokio::task::JoinSet::new();
            loop {
                let Ok((client, _)) = listener.accept().await else { continue };
                links.spawn(link(client, target.clone(), watched.clone()));
            }
        });
        Self { address, mode, task }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn link(client: TcpStream, target: String, mode: watch::Receiver<Mode>) {
    if *mode.borrow() == Mode::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = server.into_split();
    tokio::select! {
        () = pass(client_in, server_out, mode.clone(), false) => {}
        () = pass(server_in, client_out, mode.clone(), true) => {}
        () = until_cut(mode) => {}
    }
}

async fn until_cut(mut mode: watch::Receiver<Mode>) {
    let _ = mode.wait_for(|m| *m == Mode::Cut).await;
}

async fn pass(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut mode: watch::Receiver<Mode>,
    answers: bool,
) {
    let mut buffer = vec![0; 16 << 10];
    loop {
        let Ok(n) = from.read(&mut buffer).await else { return };
        if n == 0 {
            // A silent link hides the end as well.
            if *mode.borrow() == Mode::Silent {
                tokio::time::sleep(Duration::from_secs(3600)).await;
            }
            return;
        }
        // What is read while silent is never passed on: the peer that had it is gone.
        if *mode.borrow() == Mode::Silent {
            let _ = mode.wait_for(|m| *m != Mode::Silent).await;
            return;
        }
        // What is sent after the mode was set doesn't pass, whether or not the link has noticed yet.
        let now = *mode.borrow();
        if now == Mode::Cut || answers && now == Mode::Unanswered {
            return;
        }
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
