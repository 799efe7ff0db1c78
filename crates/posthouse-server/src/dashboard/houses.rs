//! Houses and instances: who owns what, and what waits where.

use askama::Template;
use axum::extract::{Query, State};
use axum::response::Response;
use serde::Deserialize;

use super::view::{Badge, Frame, Href, Oops, Place, When, badge, number, page as shown_page, shown, span};
use super::{Shared, asked, first_of};
use crate::http::Who;

/// Houses on the page.
const HOUSES: usize = 512;

#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    db: String,
}

#[derive(Template)]
#[template(path = "houses.html")]
struct Houses {
    frame: Frame,
    here: String,
    events: String,
    error: Option<String>,
    instances: Vec<Instance>,
    houses: Vec<House>,
    /// Houses that are left out.
    more: usize,
    /// How many have something pending.
    waiting: usize,
}

struct Instance {
    name: String,
    here: bool,
    state: Badge,
    lease: String,
    started: When,
    owned: String,
    takes: String,
    for_runs: Option<String>,
}

struct House {
    number: i32,
    owner: Option<String>,
    state: Badge,
    epoch: i64,
    pending: String,
    failed: String,
    oldest: String,
    /// Nothing waits in it.
    quiet: bool,
}

pub(super) async fn page(State(served): State<Shared>, who: Who, Query(query): Query<Asked>) -> Result<Response, Oops> {
    let database = first_of(&served, &query.db)?;
    let overview = database.people.overview();
    let (instances, houses) = tokio::join!(asked(database, overview.instances()), asked(database, overview.lag()));
    let here = database.stats().and_then(|s| s.instance);
    let mut page = Houses {
        frame: Frame::new(&served, &who, Place::Houses, "Houses and instances", Some(&database.name), false),
        here: Href::new("/houses").add("db", &query.db).done(),
        events: Href::new("/events").add("db", &query.db).done(),
        error: None,
        instances: Vec::new(),
        houses: Vec::new(),
        more: 0,
        waiting: 0,
    };
    match (instances, houses) {
        (Ok(instances), Ok(houses)) => {
            page.instances = instances
                .into_iter()
                .map(|i| Instance {
                    here: here.as_ref() == Some(&i.instance),
                    state: badge(if i.lease_left_ms > 0 { "live" } else { "expired" }),
                    lease: if i.lease_left_ms > 0 {
                        format!("{} left", span(i.lease_left_ms))
                    } else {
                        format!("ended {} ago", span(i.lease_left_ms))
                    },
                    started: When::ms(i.started_ms),
                    owned: number(i.owned),
                    takes: i.houses.map_or_else(|| "all".into(), |h| if h.is_empty() { "none".into() } else { shown(&h) }),
                    for_runs: i.run_houses.map(|h| shown(&h)),
                    name: shown(&i.instance),
                })
                .collect();
            page.more = houses.len().saturating_sub(HOUSES);
            page.waiting = houses.iter().filter(|h| h.pending > 0).count();
            page.houses = houses
                .into_iter()
                .take(HOUSES)
                .map(|h| House {
                    number: h.house,
                    state: badge(match (&h.owner, h.alive) {
                        (None, _) => "free",
                        (Some(_), true) => "live",
                        (Some(_), false) => "expired",
                    }),
                    owner: h.owner.as_deref().map(shown),
                    epoch: h.epoch,
                    pending: number(h.pending),
                    failed: number(h.failed),
                    oldest: h.oldest_ms.map_or_else(|| "–".into(), span),
                    quiet: h.pending == 0 && h.failed == 0,
                })
                .collect();
        }
        (Err(e), _) | (_, Err(e)) => page.error = Some(e),
    }
    Ok(shown_page(&page))
}
