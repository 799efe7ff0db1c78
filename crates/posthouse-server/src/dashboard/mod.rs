//! The dashboard: pages for people, made on the server.
//!
//! | file | what it shows |
//! |---|---|
//! | `overview.rs` | how things are, and how they were in the last hour |
//! | `messages.rs` | the outbox: list, one message, what can be done about it |
//! | `inbox.rs` | what consumers received, likewise |
//! | `bulk.rs` | doing something to all that a filter finds |
//! | `houses.rs` | houses and instances |
//! | `groups.rs` | groups and their runs |
//! | `alerts.rs` | what fires, silences, rules, what happened |
//! | `retention.rs` | what goes, what went, and where to |
//! | `audit.rs` | who did what |
//! | `events.rs`, `history.rs` | what is new, as it comes; what was |
//! | `view.rs` | what all pages are made of |
//!
//! Everything from outside is cleaned of what steers or reorders text ([`view::shown`]) and escaped by the templates; scripts and styles
//! come only from the files under `assets/` (`http/guard.rs` tells browsers so). Pages answer soon whatever the database does: lists are bounded, the log is never counted,
//! and a database that is down is said to be down within the page.

mod alerts;
mod assets;
mod audit;
mod bulk;
mod events;
mod groups;
mod history;
mod houses;
mod inbox;
mod messages;
mod overview;
mod payload;
mod retention;
mod view;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};

pub(crate) use self::history::{History, Sampler};
use self::view::Oops;
use crate::http::{Served, ServedRelay};

type Shared = Arc<Served>;

/// How long a page waits for one database before it says that there is no answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Rows on a page, unless it is asked for more.
const ROWS: u32 = 50;

/// The pages. Who asks is found out before.
pub(crate) fn routes() -> Router<Shared> {
    Router::new()
        .route("/", get(overview::page))
        .route("/history", get(events::history))
        .route("/events", get(events::stream))
        .route("/messages", get(messages::list))
        .route("/messages/bulk", get(bulk::ask).post(bulk::begin))
        .route("/messages/{id}", get(messages::detail))
        .route("/messages/{id}/payload", get(messages::payload))
        .route("/messages/{id}/act", post(messages::act))
        .route("/inbox", get(inbox::list))
        .route("/inbox/bulk", get(bulk::ask_inbox).post(bulk::begin_inbox))
        .route("/inbox/message", get(inbox::detail))
        .route("/inbox/message/payload", get(inbox::payload))
        .route("/inbox/act", post(inbox::act))
        .route("/bulk/{id}", get(bulk::progress))
        .route("/bulk/{id}/stop", post(bulk::stop))
        .route("/houses", get(houses::page))
        .route("/groups", get(groups::page))
        .route("/groups/act", post(groups::act))
        .route("/runs", get(groups::runs))
        .route("/alerts", get(alerts::page))
        .route("/alerts/act", post(alerts::act))
        .route("/retention", get(retention::page))
        .route("/audit", get(audit::page))
}

/// Scripts and styles. Open to everybody: the form to log in with needs them too.
pub(crate) fn assets() -> Router<Shared> {
    Router::new().route("/assets/{name}", get(assets::plain)).route("/assets/{edition}/{name}", get(assets::asset))
}

/// The database of this name. None: none was named, and there are several.
fn one_of<'s>(served: &'s Served, name: &str) -> Result<Option<&'s Arc<ServedRelay>>, Oops> {
    match (name, &served.databases[..]) {
        ("", [only]) => Ok(Some(only)),
        ("", _) => Ok(None),
        _ => match served.databases.iter().find(|d| d.name == name) {
            Some(found) => Ok(Some(found)),
            None => Err(Oops::missing(format!("there is no database {name:?}"))),
        },
    }
}

/// The database of this name, or the first.
fn first_of<'s>(served: &'s Served, name: &str) -> Result<&'s Arc<ServedRelay>, Oops> {
    let first = || served.databases.first().ok_or_else(|| Oops::missing("there is no database"));
    one_of(served, name)?.map_or_else(first, Ok)
}

/// What a database answers, within a page's patience; otherwise a sentence that says what is wrong.
async fn asked<T, E: Into<crate::ops::Refused>>(
    database: &ServedRelay,
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(e)) => Err(view::shown(&e.into().text)),
        Err(_) => Err(format!("database {:?}: no answer within {} s", database.name, PATIENCE.as_secs())),
    }
}
