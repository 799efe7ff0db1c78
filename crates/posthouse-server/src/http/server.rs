//! The HTTP server: bound before anything starts, stopped after everything has.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{Served, router};
use crate::failure::Failure;

/// How long answers may take to finish once all else has stopped.
const END: Duration = Duration::from_secs(1);

/// A running HTTP server.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    served: Arc<Served>,
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Server {
    /// Binds the address and answers from now on.
    pub(crate) async fn start(served: &Arc<Served>) -> Result<Self, Failure> {
        let listen = served.config.server.listen;
        let listener = TcpListener::bind(listen).await.map_err(|e| {
            Failure::usage(format!("server.listen: {listen} can't be used: {e}; is another posthouse running here?"))
        })?;
        let address = listener.local_addr().unwrap_or(listen);
        tracing::info!(%address, "health and metrics over HTTP");
        if !address.ip().is_loopback() {
            let pages = if served.config.server.knows_people() { "to those who log in" } else { "to nobody" };
            tracing::info!(%address, pages, "this address can be reached from other machines");
        }
        let (end, ended) = oneshot::channel::<()>();
        let app = router(served.clone()).into_make_service_with_connect_info::<SocketAddr>();
        let task = tokio::spawn(async move {
            let until = async move {
                // An error means that the other side is gone, which ends the server too.
                let _ = ended.await;
            };
            if let Err(e) = axum::serve(listener, app).with_graceful_shutdown(until).await {
                tracing::error!(error = %e, "the HTTP server ended");
            }
        });
        Ok(Self { address, served: served.clone(), end, task })
    }

    /// Stops what goes on in the background, and lets answers finish, for a moment.
    pub(crate) async fn stop(self) {
        self.served.bulks.close().await;
        // The receiver is gone only when the server has ended by itself.
        let _ = self.end.send(());
        let mut task = self.task;
        if tokio::time::timeout(END, &mut task).await.is_err() {
            task.abort();
        }
    }
}
