//! `/api/v1`: what the pages show and do, for programs.

mod alerts;
mod bulk;
mod extract;
mod groups;
mod inbox;
mod messages;
mod publish;
mod retention;
mod system;
mod views;

use std::sync::Arc;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use utoipa::openapi::OpenApi;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi as _, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::http::Served;
use crate::ops::{Refusal, Refused};

/// Where all of it is.
const BASE: &str = "/api/v1";

/// Why something was not done.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(crate) struct Problem {
    /// One sentence for a person.
    pub(crate) error: String,
    /// `invalid`, `forbidden`, `missing`, `conflict`, `too_large`, `unavailable` or `failed`.
    pub(crate) kind: String,
    /// The field of the request that is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) field: Option<String>,
    /// The most that it may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) limit: Option<u64>,
}

/// The status of an answer that refuses something.
pub(crate) fn status(kind: Refusal) -> StatusCode {
    match kind {
        Refusal::Invalid => StatusCode::BAD_REQUEST,
        Refusal::Forbidden => StatusCode::FORBIDDEN,
        Refusal::Missing => StatusCode::NOT_FOUND,
        Refusal::Conflict | Refusal::Busy => StatusCode::CONFLICT,
        Refusal::Large => StatusCode::PAYLOAD_TOO_LARGE,
        Refusal::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Refusal::Failed => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// The answer that refuses something.
pub(crate) fn refusal(refused: &Refused) -> Response {
    let kind = match refused.kind {
        Refusal::Invalid => "invalid",
        Refusal::Forbidden => "forbidden",
        Refusal::Missing => "missing",
        Refusal::Conflict | Refusal::Busy => "conflict",
        Refusal::Large => "too_large",
        Refusal::Unavailable => "unavailable",
        Refusal::Failed => "failed",
    };
    let problem =
        Problem { error: refused.text.clone(), kind: kind.into(), field: refused.field.map(str::to_owned), limit: refused.limit };
    (status(refused.kind), Json(problem)).into_response()
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        refusal(&self)
    }
}

/// What a handler answers.
type Answer<T> = Result<Json<T>, Refused>;

#[derive(utoipa::OpenApi)]
#[openapi(
    info(title = "Posthouse", description = "Looks at messages, and acts on them, as the pages do.", license(name = "MIT OR Apache-2.0")),
    modifiers(&Token),
    security(("token" = []))
)]
struct Document;

struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "server.token (role operator) or server.viewer_token (role viewer). Browsers that are logged in, and programs on the \
             machine itself where no token is set, send what /api/v1/whoami tells as X-CSRF-Token with every change.",
        ));
        let components = document.components.get_or_insert_with(Default::default);
        components.add_security_scheme("token", SecurityScheme::Http(scheme.build()));
    }
}

/// The routes, and the document that describes them: one can't be without the other.
fn parts() -> (Router<Arc<Served>>, OpenApi) {
    let routes = OpenApiRouter::new()
        .routes(routes!(system::whoami))
        .routes(routes!(system::databases))
        .routes(routes!(system::overview))
        .routes(routes!(system::destinations))
        .routes(routes!(system::houses))
        .routes(routes!(system::instances))
        .routes(routes!(system::audit))
        .routes(routes!(retention::standing_of))
        .routes(routes!(messages::list, publish::publish))
        .routes(routes!(messages::count))
        .routes(routes!(messages::show))
        .routes(routes!(messages::payload))
        .routes(routes!(messages::requeue))
        .routes(routes!(messages::skip))
        .routes(routes!(messages::edit))
        .routes(routes!(messages::bulk))
        .routes(routes!(inbox::list))
        .routes(routes!(inbox::count))
        .routes(routes!(inbox::show))
        .routes(routes!(inbox::payload))
        .routes(routes!(inbox::requeue))
        .routes(routes!(inbox::skip))
        .routes(routes!(inbox::bulk))
        .routes(routes!(bulk::list))
        .routes(routes!(bulk::show))
        .routes(routes!(bulk::stop))
        .routes(routes!(groups::list))
        .routes(routes!(groups::run))
        .routes(routes!(groups::stop))
        .routes(routes!(groups::pause))
        .routes(routes!(groups::resume))
        .routes(routes!(groups::runs))
        .routes(routes!(alerts::list))
        .routes(routes!(alerts::silence))
        .routes(routes!(alerts::unsilence));
    OpenApiRouter::with_openapi(Document::openapi()).nest(BASE, routes).split_for_parts()
}

/// Everything below `/api`.
pub(crate) fn router() -> Router<Arc<Served>> {
    let (routes, document) = parts();
    // Written once: it doesn't change while the process lives.
    let text: Arc<str> = document.to_json().unwrap_or_else(|e| unreachable!("the document is JSON: {e}")).into();
    let told = get(move || async move { ([(header::CONTENT_TYPE, "application/json")], text.to_string()) });
    routes.route("/api/v1/openapi.json", told).route("/api/{*rest}", axum::routing::any(nothing))
}

async fn nothing() -> Refused {
    Refused::missing("there is nothing at this path; what there is, is told by /api/v1/openapi.json")
}
