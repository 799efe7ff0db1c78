//! Scripts and styles, compiled in. Nothing is loaded from elsewhere.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

const JS: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";

/// Name, media type, content.
const ALL: [(&str, &str, &str); 7] = [
    ("app.css", CSS, include_str!("../../assets/app.css")),
    ("app.js", JS, include_str!("../../assets/app.js")),
    ("theme.js", JS, include_str!("../../assets/theme.js")),
    ("htmx.min.js", JS, include_str!("../../assets/htmx.min.js")),
    ("uplot.min.js", JS, include_str!("../../assets/uplot.min.js")),
    ("uplot.min.css", CSS, include_str!("../../assets/uplot.min.css")),
    ("icon.svg", "image/svg+xml", include_str!("../../assets/icon.svg")),
];

/// Changes when any of them does: it stands in their addresses, so that browsers may keep them.
pub(super) static EDITION: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = DefaultHasher::new();
    ALL.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
});

/// By name alone, for pages that don't know the edition.
pub(super) async fn plain(Path(name): Path<String>) -> Response {
    answer(&name, "no-cache")
}

pub(super) async fn asset(Path((edition, name)): Path<(String, String)>) -> Response {
    // A page of another version of this program may ask, and must not keep what it gets.
    answer(&name, if edition == *EDITION { "public, max-age=31536000, immutable" } else { "no-store" })
}

fn answer(name: &str, keep: &'static str) -> Response {
    match ALL.iter().find(|(known, ..)| *known == name) {
        Some((_, kind, content)) => ([(header::CONTENT_TYPE, *kind), (header::CACHE_CONTROL, keep)], *content).into_response(),
        None => (StatusCode::NOT_FOUND, "there is no such file\n").into_response(),
    }
}
