//! Actions on everything that a filter finds: how far they are, and stopping them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::views::BulkAction;
use super::{Answer, Problem};
use crate::http::{Served, Who};
use crate::ops::{Refused, operator};

/// Actions that are going or have ended within an hour, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct BulkActions {
    actions: Vec<BulkAction>,
}

fn number(id: &str) -> Result<u64, Refused> {
    id.parse().map_err(|_| Refused::field("id", format!("{id:?} is no number")))
}

/// What is going in the background of this process, and what has ended lately.
#[utoipa::path(get, path = "/bulk", tag = "bulk", responses((status = 200, body = BulkActions), (status = "default", body = Problem)))]
pub(super) async fn list(State(served): State<Arc<Served>>) -> Answer<BulkActions> {
    Ok(Json(BulkActions { actions: served.bulks.list().into_iter().map(Into::into).collect() }))
}

/// How far one is.
#[utoipa::path(get, path = "/bulk/{id}", tag = "bulk", params(("id" = u64, Path)),
    responses((status = 200, body = BulkAction), (status = "default", body = Problem)))]
pub(super) async fn show(State(served): State<Arc<Served>>, Path(id): Path<String>) -> Answer<BulkAction> {
    let id = number(&id)?;
    let progress =
        served.bulks.get(id).ok_or_else(|| Refused::missing(format!("there is no bulk action number {id} (any more)")))?;
    Ok(Json(progress.into()))
}

/// Tells one to stop. What it has changed stays changed.
#[utoipa::path(post, path = "/bulk/{id}/stop", tag = "bulk", params(("id" = u64, Path)),
    responses((status = 200, body = BulkAction), (status = "default", body = Problem)))]
pub(super) async fn stop(State(served): State<Arc<Served>>, who: Who, Path(id): Path<String>) -> Answer<BulkAction> {
    operator(&who)?;
    Ok(Json(served.bulks.stop(&who, number(&id)?)?.into()))
}
