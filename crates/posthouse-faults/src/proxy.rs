//! A TCP proxy on loopback that can be slow, fall silent or cut, to be put before a server.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What becomes of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// They pass.
    Open,
    /// They pass, each piece so much later.
    Slow(Duration),
    /// Connections stay open and new ones are accepted, but nothing passes: a peer that vanished without a word.
    Silent,
    /// What the client sends passes; the first answer to it closes the connection instead.
    Unanswered,
    /// Connections are closed, and new ones at once.
    Cut,
}

/// Listens until it is dropped; so do its connections live.
#[derive(Debug)]
pub struct Proxy {
    /// Where clients connect to.
    pub address: SocketAddr,
    mode: watch::Sender<Mode>,
    task: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// Before a server, by host and port; open at first.
    ///
    /// # Panics
    /// No port on loopback can be had.
    pub async fn start(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (mode, watched) = watch::channel(Mode::Open);
        let task = tokio::spawn(async move {
            let mut links = tokio::task::JoinSet::new();
            loop {
                let Ok((client, _)) = listener.accept().await else { continue };
                while links.try_join_next().is_some() {}
                links.spawn(link(client, target.clone(), watched.clone()));
            }
        });
        Self { address, mode, task }
    }

    /// From now on, for connections that there are and for new ones.
    pub fn set(&self, mode: Mode) {
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
    for end in [&client, &server] {
        // What passes is small and waited for. Without it, it is only slower.
        let _ = end.set_nodelay(true);
    }
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
        // What is read while silent is never passed on: the peer that had it is gone. Silence hides an end as well.
        if *mode.borrow() == Mode::Silent {
            let _ = mode.wait_for(|m| *m != Mode::Silent).await;
            return;
        }
        if n == 0 {
            return;
        }
        // What is sent after the mode was set doesn't pass, whether or not the link has noticed yet.
        let now = *mode.borrow();
        match now {
            Mode::Cut => return,
            Mode::Unanswered if answers => return,
            Mode::Slow(by) => tokio::time::sleep(by).await,
            _ => {}
        }
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
