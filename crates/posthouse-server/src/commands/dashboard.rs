//! `posthouse dashboard`: the HTTP server without relays.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::load;
use super::relay::Signals;
use crate::cli::Global;
use crate::dashboard::Sampler;
use crate::database::Database;
use crate::depth::Watching;
use crate::failure::Failure;
use crate::http::{Served, Server};

pub(crate) async fn run(global: &Global) -> Result<(), Failure> {
    let config = Arc::new(load(global)?);
    let databases =
        config.sources().iter().map(|(name, d)| Database::open(name, d).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
    let mut signals = Signals::new()?;
    let served = Arc::new(Served::new(&config, &databases, Vec::new(), false));
    let server = Server::start(&served).await?;
    let watching = Watching::start(&config, &served)?;
    #[cfg(feature = "otlp")]
    let otlp = crate::metrics::Otlp::start(&served)?;
    let sampler = Sampler::start(&served);
    eprintln!("dashboard on http://{}; Ctrl-C ends it", server.address);
    signals.next().await;
    served.draining.store(true, Ordering::Relaxed);
    #[cfg(feature = "otlp")]
    if let Some(otlp) = otlp {
        otlp.stop().await;
    }
    sampler.stop().await;
    watching.stop().await;
    server.stop().await;
    Ok(())
}
