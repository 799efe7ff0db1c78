//! The form by which people log in with a token.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Form, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use serde::Deserialize;

use super::auth::{Auth, is_secure, log_out};
use super::guard::own_page;
use crate::api::status;
use crate::ops::{Refusal, Refused};

/// Where people log in.
pub(super) const LOGIN: &str = "/login";

/// Where people log out. Viewers may.
pub(super) const LOGOUT: &str = "/logout";

#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    next: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Given {
    #[serde(default)]
    token: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    next: String,
}

/// The form.
pub(super) async fn form(State(auth): State<Arc<Auth>>, Query(asked): Query<Asked>) -> Response {
    if !auth.has_login() {
        return to("/");
    }
    page(StatusCode::OK, &asked.next, "")
}

/// What was written into the form.
pub(super) async fn log_in(
    State(auth): State<Arc<Auth>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    Form(given): Form<Given>,
) -> Response {
    if !own_page(&auth, &headers) {
        return refused(&Refused::new(Refusal::Forbidden, "another site sent this"));
    }
    // Asked first: who is limited learns nothing about the token.
    if auth.limiter.limited(peer.ip()) {
        let mut response =
            page(StatusCode::TOO_MANY_REQUESTS, &given.next, "Too many wrong tokens from your address. Wait a minute.");
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("60"));
        return response;
    }
    let Some(role) = auth.role_of(given.token.trim()) else {
        auth.limiter.failed(peer.ip());
        tracing::warn!(peer = %peer.ip(), "a login with a wrong token");
        return page(StatusCode::UNAUTHORIZED, &given.next, "This token is not one of this server's.");
    };
    with_cookie(to(own_path(&given.next)), &auth.log_in(&given.name, role, is_secure(&headers)))
}

/// Ends a login in this browser.
pub(super) async fn log_out_of(headers: HeaderMap) -> Response {
    with_cookie(to(LOGIN), &log_out(is_secure(&headers)))
}

fn with_cookie(mut response: Response, cookie: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(cookie) {
        response.headers_mut().append(header::SET_COOKIE, value);
    }
    response
}

fn to(path: &str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, path)]).into_response()
}

/// A path of this server, and of no other.
fn own_path(next: &str) -> &str {
    let own = next.starts_with('/') && !next.starts_with("//") && next.bytes().all(|b| b.is_ascii_graphic() && b != b'\\');
    if own { next } else { "/" }
}

/// What somebody who isn't logged in is answered.
pub(super) fn needed(auth: &Auth, request: &Request) -> Response {
    if !auth.has_login() {
        let text = "the proxy in front of this server doesn't say who you are (server.trusted_proxy_header)";
        let mut response = refused(&Refused::new(Refusal::Forbidden, text));
        *response.status_mut() = StatusCode::UNAUTHORIZED;
        return response;
    }
    let looks = matches!(*request.method(), Method::GET | Method::HEAD);
    let here = if looks { request.uri().path_and_query().map_or("/", |p| p.as_str()) } else { "/" };
    let next: String = url::form_urlencoded::byte_serialize(here.as_bytes()).collect();
    let location = format!("{LOGIN}?next={next}");
    // A part of a page would show the form in its place: the whole page has to go there.
    if request.headers().contains_key("hx-request") {
        return (StatusCode::UNAUTHORIZED, [("hx-redirect", LOGIN.to_owned())]).into_response();
    }
    let navigates = request.headers().get("sec-fetch-mode").is_none_or(|mode| mode == "navigate");
    if looks && navigates { to(&location) } else { page(StatusCode::UNAUTHORIZED, "/", "Log in first.") }
}

/// A page that says why something isn't done.
pub(super) fn refused(refused: &Refused) -> Response {
    let text = format!(
        "{HEAD}<main class=\"login\"><h1>Posthouse</h1><p role=\"alert\">{}</p><p><a href=\"/\">Back</a></p></main></body></html>",
        escaped(&refused.text)
    );
    (status(refused.kind), Html(text)).into_response()
}

const HEAD: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
     <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>Posthouse</title>\
     <link rel=\"stylesheet\" href=\"/assets/app.css\"></head><body>";

fn page(status: StatusCode, next: &str, problem: &str) -> Response {
    let problem = if problem.is_empty() { String::new() } else { format!("<p role=\"alert\">{}</p>", escaped(problem)) };
    let text = format!(
        "{HEAD}<main class=\"login\"><h1>Posthouse</h1>{problem}<form method=\"post\" action=\"{LOGIN}\">\
         <input type=\"hidden\" name=\"next\" value=\"{}\">\
         <label for=\"token\">Token</label>\
         <input id=\"token\" name=\"token\" type=\"password\" autocomplete=\"current-password\" required autofocus>\
         <label for=\"name\">Your name, for the audit log</label>\
         <input id=\"name\" name=\"name\" type=\"text\" autocomplete=\"name\" maxlength=\"60\">\
         <button type=\"submit\">Log in</button></form></main></body></html>",
        escaped(own_path(next))
    );
    (status, Html(text)).into_response()
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::own_path;

    #[test]
    fn a_login_leads_to_this_server_alone() {
        for (next, leads) in [
            ("/messages?status=FAILED", "/messages?status=FAILED"),
            ("", "/"),
            ("//evil.example", "/"),
            ("/\\evil.example", "/"),
            ("https://evil.example", "/"),
            ("/a\r\nSet-Cookie: x", "/"),
        ] {
            assert_eq!(own_path(next), leads, "{next:?}");
        }
    }
}
