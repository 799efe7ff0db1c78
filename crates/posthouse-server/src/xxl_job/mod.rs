//! An executor for an XXL-JOB admin: it registers, runs scans when the admin says so, and tells how they ended.
//!
//! ```text
//! registry  ── says where we are ──────────────> admin
//! server  <── run, kill, idleBeat, beat, log ──  admin
//!    │
//!  jobs ── one run of a job at a time ──> scan ──> the relays of this process (`Scans`)
//!    │                                     └────> log: a file per run
//! results ── how runs ended, kept on the shelf until taken ──> admin
//! ```

mod admins;
mod jobs;
mod log;
#[cfg(test)]
mod peer;
mod registry;
mod relays;
mod results;
mod scan;
mod server;
mod shelf;
#[cfg(test)]
mod tests;
mod wire;

use std::future::Future;
#[cfg(test)]
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use self::admins::Admins;
use self::jobs::Jobs;
use self::log::Logs;
pub(crate) use self::relays::Relays;
use self::results::Results;
use self::scan::Scans;
use self::server::Door;
use crate::config::XxlJobConfig;
use crate::failure::Failure;

/// How often old logs are looked for.
const SWEEP: Duration = Duration::from_secs(3600);

/// A loop that broke off starts again after this long.
const AGAIN: Duration = Duration::from_secs(1);

/// The last calls to admins, and answers to theirs, may take this long.
const LAST_CALLS: Duration = Duration::from_secs(10);

/// A running executor.
pub(crate) struct XxlJob {
    #[cfg(test)]
    address: SocketAddr,
    jobs: Arc<Jobs>,
    registry: Loop,
    results: Loop,
    sweep: Loop,
    http: Loop,
}

/// A task that ends when told to.
struct Loop {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Loop {
    fn start<F: Future<Output = ()> + Send + 'static>(make: impl FnOnce(watch::Receiver<bool>) -> F) -> Self {
        let (stop, stopped) = watch::channel(false);
        Self { stop, task: tokio::spawn(make(stopped)) }
    }

    /// A loop that is started again when it panics.
    fn supervised<F: Future<Output = ()> + Send + 'static>(
        name: &'static str,
        make: impl Fn(watch::Receiver<bool>) -> F + Send + 'static,
    ) -> Self {
        Self::start(|stopped| async move {
            while let Err(e) = tokio::spawn(make(stopped.clone())).await {
                tracing::error!(name, error = %e, "a loop of the XXL-JOB executor broke off and is started again");
                sleep(AGAIN).await;
            }
        })
    }

    /// Tells it to end, and waits for that until the deadline.
    async fn end(mut self, within: Duration) {
        self.stop.send_replace(true);
        if timeout(within, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

impl XxlJob {
    /// Opens the door and registers. Nothing waits for an admin: one that is away is asked again.
    pub(crate) async fn start(config: &XxlJobConfig, scans: Arc<dyn Scans>) -> Result<Self, Failure> {
        let dir = &config.data_dir;
        let unusable = |e: std::io::Error| Failure::usage(format!("xxl_job.data_dir: {} can't be used: {e}", dir.display()));
        let logs = Logs::open(dir.join("logs")).map_err(unusable)?;
        let results = Arc::new(Results::open(dir.join("results"), config.callback_retry).map_err(unusable)?);
        let admins = Admins::new(config.admins.clone(), &config.access_token, &config.app_name);
        let admins = Arc::new(admins.map_err(|e| Failure::usage(format!("xxl_job: {e}")))?);
        let listen = config.listen;
        let listener = TcpListener::bind(listen).await.map_err(|e| {
            Failure::usage(format!("xxl_job.listen: {listen} can't be used: {e}; is another executor running here?"))
        })?;
        let address = listener.local_addr().unwrap_or(listen);
        if config.access_token.is_empty() && !address.ip().is_loopback() {
            tracing::warn!(%address, "everybody who reaches this address can start and stop runs (xxl_job.allow_anonymous)");
        }
        let advertised = config.advertise.as_ref().map_or_else(|| format!("http://{address}/"), |url| url.to_string());
        tracing::info!(%address, advertised, app_name = config.app_name, "executor for an XXL-JOB admin");

        let jobs = Jobs::new(scans, logs.clone(), results.clone());
        let door = Arc::new(Door {
            token: config.access_token.clone(),
            app_name: config.app_name.clone(),
            jobs: jobs.clone(),
            logs: logs.clone(),
            warned: Mutex::default(),
        });
        let http = Loop::start(|mut stopped| async move {
            let until = async move {
                // An error means that the executor is gone, which ends the server too.
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            if let Err(e) = axum::serve(listener, server::router(door)).with_graceful_shutdown(until).await {
                tracing::error!(error = %e, "the HTTP server of the XXL-JOB executor ended");
            }
        });
        let app_name = config.app_name.clone();
        let registry = {
            let admins = admins.clone();
            Loop::supervised("registry", move |stop| registry::run(admins.clone(), app_name.clone(), advertised.clone(), stop))
        };
        let results = Loop::supervised("results", move |stop| results.clone().run(admins.clone(), stop));
        let retention = config.log_retention;
        let sweep = Loop::supervised("log retention", move |stop| sweep(logs.clone(), retention, stop));
        Ok(Self {
            #[cfg(test)]
            address,
            jobs,
            registry,
            results,
            sweep,
            http,
        })
    }

    /// The address that is listened on.
    #[cfg(test)]
    fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more runs, and gives those that go until the deadline. Meanwhile the registration is taken back, so that the admin
    /// sends its runs elsewhere; logs can still be read.
    pub(crate) async fn end_runs(&self, deadline: Instant) {
        self.registry.stop.send_replace(true);
        // A run that is told to stop finishes what is in flight, which takes time too.
        let stop_within = deadline.saturating_duration_since(Instant::now()) / 4;
        self.jobs.end(deadline - stop_within, stop_within).await;
    }

    /// Tells what can be told, and is gone for the admin. What runs, is cut off: see [`end_runs`](Self::end_runs).
    pub(crate) async fn shutdown(self) {
        tokio::join!(self.registry.end(LAST_CALLS), self.results.end(LAST_CALLS), self.sweep.end(AGAIN));
        self.http.end(AGAIN).await;
    }
}

async fn sweep(logs: Logs, retention: Duration, mut stop: watch::Receiver<bool>) {
    let mut ticks = interval(SWEEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // The sender lives as long as the executor.
            _ = stop.wait_for(|stop| *stop) => return,
            _ = ticks.tick() => {}
        }
        let logs = logs.clone();
        match tokio::task::spawn_blocking(move || logs.sweep(retention)).await {
            Ok(Ok(0)) => {}
            Ok(Ok(removed)) => tracing::info!(removed, "old logs of runs are removed"),
            Ok(Err(e)) => tracing::warn!(error = %e, "old logs of runs can't be removed"),
            Err(e) => tracing::error!(error = %e, "looking for old logs broke off"),
        }
    }
}
