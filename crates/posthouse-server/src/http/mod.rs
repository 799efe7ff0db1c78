//! Health, readiness and metrics over HTTP.

mod auth;
mod guard;
mod limit;
mod login;
mod metrics;
mod ready;
mod server;
mod who;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use posthouse::store::{Backlog, Store};
use posthouse::{AdoptedRelay, AdoptedStats, Relay, RelayStats};
#[cfg(feature = "xxl-job")]
use posthouse::{Run, RunReport};
use serde::{Deserialize, Serialize};

use crate::api;
use crate::config::Config;
use crate::database::Database;
use crate::failure::Failure;
use crate::health::{self, Health};
use crate::ops::Refused;
use crate::ops::bulk::Bulks;
use posthouse::store::InboxStore;

use self::auth::Auth;
pub(crate) use self::server::Server;
pub(crate) use self::who::{By, Role, Who};

/// How old the backlog that metrics tell may be: counting it reads the whole pending set.
const BACKLOG_AGE: Duration = Duration::from_secs(10);

/// How long a scrape waits for a new backlog before it tells the old one.
const BACKLOG_WAIT: Duration = Duration::from_secs(3);

/// What the endpoints tell about.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) config: Arc<Config>,
    /// Where destination names lead, without secrets.
    pub(crate) routes: BTreeMap<String, String>,
    pub(crate) databases: Vec<Arc<ServedRelay>>,
    pub(crate) adopted: Vec<Arc<ServedAdopted>>,
    /// Whether this process relays; otherwise it only shows.
    pub(crate) relaying: bool,
    /// Actions that are going in the background.
    pub(crate) bulks: Bulks,
    /// Told to stop.
    pub(crate) draining: AtomicBool,
}

/// One database (one set of tables), and its relay where there is one.
#[derive(Debug)]
pub(crate) struct ServedRelay {
    pub(crate) name: String,
    pub(crate) database: Arc<Database>,
    /// For pages and the API. Connects when it is asked something.
    pub(crate) people: Arc<dyn Store>,
    /// None before it has started and after it has stopped.
    relay: Mutex<Option<Relay>>,
    backlog: tokio::sync::Mutex<Counted>,
}

/// One mapping of adopted tables in one database.
#[derive(Debug)]
pub(crate) struct ServedAdopted {
    pub(crate) database: String,
    pub(crate) name: String,
    /// None before it has started and after it has stopped.
    relay: Mutex<Option<AdoptedRelay>>,
}

impl ServedAdopted {
    pub(crate) fn new(database: &str, name: &str) -> Self {
        Self { database: database.to_owned(), name: name.to_owned(), relay: Mutex::default() }
    }

    pub(crate) fn started(&self, relay: AdoptedRelay) {
        *self.relay() = Some(relay);
    }

    /// Takes it out, to shut it down.
    pub(crate) fn take(&self) -> Option<AdoptedRelay> {
        self.relay().take()
    }

    fn relay(&self) -> std::sync::MutexGuard<'_, Option<AdoptedRelay>> {
        // Nothing panics while it is held.
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> Option<AdoptedStats> {
        self.relay().as_ref().map(AdoptedRelay::stats)
    }

    /// A means to ask for scans. None while it isn't running.
    #[cfg(feature = "xxl-job")]
    pub(crate) fn scans(&self) -> Option<posthouse::AdoptedScans> {
        self.relay().as_ref().map(AdoptedRelay::scans)
    }
}

#[derive(Debug, Default)]
struct Counted {
    tried: Option<Instant>,
    at: Option<Instant>,
    backlog: Vec<Backlog>,
}

impl ServedRelay {
    pub(crate) fn new(database: Arc<Database>) -> Self {
        let (name, people) = (database.name.clone(), database.store_for_people());
        Self { name, database, people, relay: Mutex::default(), backlog: tokio::sync::Mutex::default() }
    }

    /// What consumers received. Connects when it is asked something.
    pub(crate) fn inbox(&self) -> Result<Arc<dyn InboxStore>, Failure> {
        self.database.inbox()
    }

    pub(crate) fn started(&self, relay: Relay) {
        *self.relay() = Some(relay);
    }

    /// Takes the relay out, to shut it down.
    pub(crate) fn take(&self) -> Option<Relay> {
        self.relay().take()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.relay().is_some()
    }

    fn relay(&self) -> std::sync::MutexGuard<'_, Option<Relay>> {
        // Nothing panics while it is held.
        self.relay.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> Option<RelayStats> {
        self.relay().as_ref().map(Relay::stats)
    }

    /// Asks its relay for a run. None while there is no relay.
    #[cfg(feature = "xxl-job")]
    pub(crate) fn trigger(&self, run: Run) -> Option<impl Future<Output = Result<RunReport, posthouse::Error>> + Send + use<>> {
        self.relay().as_ref().map(|relay| relay.trigger(run))
    }

    /// The store of its relay. None while there is no relay.
    #[cfg(feature = "xxl-job")]
    pub(crate) fn store(&self) -> Option<Arc<dyn Store>> {
        self.relay().as_ref().map(|r| r.store().clone())
    }

    /// The backlog and its age, counted again when it is old and the database answers soon.
    pub(crate) async fn backlog(&self) -> Option<(Vec<Backlog>, Duration)> {
        let mut counted = self.backlog.lock().await;
        if counted.tried.is_none_or(|t| t.elapsed() > BACKLOG_AGE) {
            // A database that doesn't answer isn't asked by every scrape.
            counted.tried = Some(Instant::now());
            match tokio::time::timeout(BACKLOG_WAIT, self.people.backlog()).await {
                Ok(Ok(backlog)) => {
                    counted.backlog = backlog;
                    counted.at = Some(Instant::now());
                }
                Ok(Err(e)) => tracing::debug!(database = self.name, error = %e, "the backlog can't be counted"),
                Err(_) => tracing::debug!(database = self.name, "counting the backlog takes long"),
            }
        }
        counted.at.map(|at| (counted.backlog.clone(), at.elapsed()))
    }
}

fn router(served: Arc<Served>) -> Router {
    let auth = Arc::new(Auth::new(&served.config.server));
    // Who asks must be known.
    let known = Router::new()
        .route(
            "/",
            get(|| async {
                "posthouse\n\n/healthz       the process is alive\n/readyz        its relays work\n/destinations  how destinations stand\n/metrics       for Prometheus\n"
            }),
        )
        .route(login::LOGOUT, post(login::log_out_of))
        .merge(api::router())
        .layer(from_fn_with_state(auth.clone(), guard::known));
    let measured = Router::new()
        .route("/destinations", get(destinations))
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(auth.clone(), guard::measured));
    let login = Router::new().route(login::LOGIN, get(login::form).post(login::log_in)).with_state(auth.clone());
    // Open to everybody who can connect.
    let open = Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz)).layer(Extension(auth));
    Router::new().merge(known).merge(measured).merge(open).with_state(served).merge(login).layer(from_fn(guard::told))
}

/// The whole document for those who may read metrics; for others whether it is so.
async fn readyz(State(served): State<Arc<Served>>, Extension(auth): Extension<Arc<Auth>>, request: Request) -> Response {
    let (ready, document) = ready::document(&served);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let all = auth.may_measure(request.headers(), guard::peer(&request));
    let document = if all { document } else { serde_json::json!({ "ready": ready }) };
    (status, JSON, format!("{document}\n")).into_response()
}

/// What a document of the moment is.
const JSON: [(header::HeaderName, &str); 2] = [(header::CACHE_CONTROL, "no-store"), (header::CONTENT_TYPE, "application/json")];

/// What `/destinations` answers and `posthouse destinations` reads.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Destinations {
    /// By database; None where no relay runs (yet, or any more).
    pub(crate) databases: BTreeMap<String, Option<RelayDestinations>>,
}

/// The destinations of one relay.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RelayDestinations {
    /// None while it has no lease.
    pub(crate) instance: Option<String>,
    /// Those that need a person first.
    pub(crate) destinations: Vec<Health>,
}

async fn destinations(State(served): State<Arc<Served>>) -> Response {
    let databases = served.databases.iter().map(|d| {
        let told = d.stats().map(|stats| RelayDestinations {
            destinations: health::all(&stats, &served.routes, Instant::now()),
            instance: stats.instance,
        });
        (d.name.clone(), told)
    });
    let document = Destinations { databases: databases.collect() };
    match serde_json::to_string(&document) {
        Ok(text) => (JSON, format!("{text}\n")).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("destinations can't be written: {e}\n")).into_response(),
    }
}

async fn metrics(State(served): State<Arc<Served>>) -> Response {
    match metrics::text(&served).await {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("metrics can't be written: {e}\n")).into_response(),
    }
}

impl Served {
    /// Of a configuration; nothing runs or connects yet.
    pub(crate) fn new(
        config: &Arc<Config>,
        databases: &[Arc<Database>],
        adopted: Vec<Arc<ServedAdopted>>,
        relaying: bool,
    ) -> Self {
        Self {
            config: config.clone(),
            routes: config.leads(),
            databases: databases.iter().map(|d| Arc::new(ServedRelay::new(d.clone()))).collect(),
            adopted,
            relaying,
            bulks: Bulks::default(),
            draining: AtomicBool::new(false),
        }
    }

    /// The database of this name.
    pub(crate) fn database(&self, name: &str) -> Result<&Arc<ServedRelay>, Refused> {
        self.databases.iter().find(|d| d.name == name).ok_or_else(|| {
            let known: Vec<&str> = self.databases.iter().map(|d| d.name.as_str()).collect();
            Refused::missing(format!("there is no database {name:?}; there are {}", known.join(", ")))
        })
    }

    fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}
