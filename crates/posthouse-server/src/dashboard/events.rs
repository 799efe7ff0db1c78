//! What is new, as it comes: server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::Deserialize;

use super::history::LISTENERS;
use super::{Shared, one_of};

/// How often something is said when there is nothing to say, so that nobody in between closes the connection.
const ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Deserialize)]
pub(super) struct Which {
    #[serde(default)]
    db: String,
}

/// An event `sample` each time the databases were looked at. Ends with the server.
pub(super) async fn stream(State(served): State<Shared>, Query(which): Query<Which>) -> Response {
    let database = match one_of(&served, &which.db) {
        Ok(database) => database.map(|d| d.name.clone()),
        Err(oops) => return oops.into_response(),
    };
    let Ok(place) = served.history.listeners.clone().try_acquire_owned() else {
        let wait = [(header::RETRY_AFTER, "30")];
        return (StatusCode::SERVICE_UNAVAILABLE, wait, format!("{LISTENERS} browsers are listening, which is the most\n"))
            .into_response();
    };
    let mut looks = served.history.looks();
    // What is there now is in the page already.
    looks.mark_unchanged();
    let events = stream::unfold((served, looks, place), move |(served, mut looks, place)| {
        let database = database.clone();
        async move {
            loop {
                // The sender lives as long as what is served.
                looks.changed().await.ok()?;
                (*looks.borrow_and_update())?;
                let Some(sample) = served.history.newest(database.as_deref()) else { continue };
                let event = Event::default().event("sample").json_data(sample).ok()?;
                return Some((Ok::<_, Infallible>(event), (served, looks, place)));
            }
        }
    });
    // A proxy that collects answers would hold them back.
    ([("x-accel-buffering", "no")], Sse::new(events).keep_alive(KeepAlive::new().interval(ALIVE))).into_response()
}

/// The last hour, column by column, as the charts want it.
pub(super) async fn history(State(served): State<Shared>, Query(which): Query<Which>) -> Response {
    let database = match one_of(&served, &which.db) {
        Ok(database) => database.map(|d| d.name.clone()),
        Err(oops) => return oops.into_response(),
    };
    let no_store = [(header::CACHE_CONTROL, "no-store")];
    (no_store, axum::Json(served.history.samples(database.as_deref()))).into_response()
}
