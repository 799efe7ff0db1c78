//! What admins ask for over HTTP.
//!
//! Every answer has the status 200; what came of it is in its body.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use subtle::ConstantTimeEq;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::jobs::Jobs;
use super::log::Logs;
use super::wire::{APP_NAME, Answer, Form, HTML, JobRequest, LARGEST_BODY, LogRequest, RunRequest, TOKEN};

/// How long a body may take to arrive.
const BODY_WITHIN: Duration = Duration::from_secs(30);

/// Requests without the token are warned of at most this often.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// What requests are answered from.
pub(super) struct Door {
    /// Empty: everybody may come in.
    pub(super) token: String,
    pub(super) app_name: String,
    pub(super) jobs: Arc<Jobs>,
    pub(super) logs: Logs,
    pub(super) warned: Mutex<Option<Instant>>,
}

pub(super) fn router(door: Arc<Door>) -> Router {
    Router::new().fallback(handle).with_state(door)
}

async fn handle(State(door): State<Arc<Door>>, request: Request) -> Response {
    let answer = door.answer(request).await.unwrap_or_else(Answer::failed);
    let text = match serde_json::to_string(&answer) {
        Ok(text) => text,
        Err(e) => unreachable!("our own values are JSON: {e}"),
    };
    ([(header::CONTENT_TYPE, HTML)], text).into_response()
}

impl Door {
    async fn answer(&self, request: Request) -> Result<Answer, String> {
        if request.method() != Method::POST {
            return Err("only POST is answered here".into());
        }
        // Before anything is read of a body that may be large.
        self.admit(request.headers())?;
        let path = request.uri().path().trim_matches('/').to_owned();
        let body = match timeout(BODY_WITHIN, to_bytes(request.into_body(), LARGEST_BODY)).await {
            Ok(Ok(body)) => body,
            Ok(Err(_)) => return Err(format!("the body broke off or is larger than {} MiB", LARGEST_BODY >> 20)),
            Err(_) => return Err(format!("the body did not arrive within {} s", BODY_WITHIN.as_secs())),
        };
        match path.as_str() {
            // Its body says nothing, and is not always there.
            "beat" => Ok(Answer::ok()),
            "idleBeat" => {
                let job: JobRequest = parse(&body)?;
                if self.jobs.is_idle(job.job_id) { Ok(Answer::ok()) } else { Err("a run of this job is going or waits".into()) }
            }
            "run" | "trigger" => {
                let run: RunRequest = parse(&body)?;
                let form = if path == "trigger" { Form::Object } else { Form::Array };
                let jobs = self.jobs.clone();
                // In one go: an admin that hangs up must not leave a run behind that is kept and never run.
                spawn_blocking(move || jobs.run(run, form)).await.map_err(|e| e.to_string()).map(Answer::from)
            }
            "kill" => {
                let job: JobRequest = parse(&body)?;
                let jobs = self.jobs.clone();
                spawn_blocking(move || jobs.kill(job.job_id)).await.map_err(|e| e.to_string())?;
                Ok(Answer::ok())
            }
            "log" => {
                let wanted: LogRequest = parse(&body)?;
                let logs = self.logs.clone();
                let piece =
                    spawn_blocking(move || logs.read(wanted.log_id, wanted.from_line_num)).await.map_err(|e| e.to_string())?;
                serde_json::to_value(piece).map(Answer::with).map_err(|e| e.to_string())
            }
            other => Err(format!("there is no /{other} here")),
        }
    }

    /// Whether a request comes from an admin of ours, and is meant for us. Only the newest generation says for whom it is.
    fn admit(&self, headers: &HeaderMap) -> Result<(), String> {
        if !self.token.is_empty() {
            let given = headers.get(TOKEN).map(|v| v.as_bytes()).unwrap_or_default();
            if !bool::from(given.ct_eq(self.token.as_bytes())) {
                self.warn();
                return Err("the access token is wrong".into());
            }
        }
        match headers.get(APP_NAME) {
            Some(name) if name.as_bytes() != self.app_name.as_bytes() => {
                Err(format!("this is the executor {:?}, and was asked as another", self.app_name))
            }
            _ => Ok(()),
        }
    }

    fn warn(&self) {
        let Ok(mut warned) = self.warned.lock() else { return };
        if warned.is_none_or(|at| at.elapsed() > WARN_EVERY) {
            *warned = Some(Instant::now());
            tracing::warn!("a request with a wrong access token was refused; more of them in the next minute are not told");
        }
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| format!("the request can't be read: {e}"))
}
