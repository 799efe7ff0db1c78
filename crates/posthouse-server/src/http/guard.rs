//! What every request passes: who asks, whether their own page sent it, and what browsers are told about the answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use super::auth::{Auth, Mode, Stranger};
use super::login;
use super::who::{By, Role, Who};
use crate::api::refusal;
use crate::ops::{Refusal, Refused};

/// A form with the field `csrf` has at most this many bytes.
const FORM: usize = 64 << 10;

/// Nothing from elsewhere, no inline scripts, no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; font-src 'self'; \
     form-action 'self'; frame-ancestors 'none'; base-uri 'none'";

/// Tells browsers what an answer must not be used for.
pub(super) async fn told(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        // A file that never changes says so itself.
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

/// Lets those read metrics and states of destinations who may.
pub(super) async fn measured(State(auth): State<Arc<Auth>>, request: Request, next: Next) -> Response {
    if auth.may_measure(request.headers(), peer(&request)) {
        return next.run(request).await;
    }
    let text = "metrics and states of destinations need server.metrics_token or a token that may look: Authorization: Bearer …\n";
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], text).into_response()
}

/// Finds out who asks, refuses strangers, and refuses changes that viewers or other sites ask for.
pub(super) async fn known(State(auth): State<Arc<Auth>>, request: Request, next: Next) -> Response {
    match checked(&auth, request).await {
        Ok(request) => next.run(request).await,
        Err(response) => response,
    }
}

async fn checked(auth: &Auth, mut request: Request) -> Result<Request, Response> {
    let api = request.uri().path().starts_with("/api/");
    let refuse = |refused: Refused| if api { refusal(&refused) } else { login::refused(&refused) };
    let forbidden = |text: &str| refuse(Refused::new(Refusal::Forbidden, text));
    if auth.mode == Mode::Local
        && let Err(why) = local(auth, &request)
    {
        return Err(forbidden(why));
    }
    let who = match auth.who(request.headers(), peer(&request)) {
        Ok(who) => who,
        Err(why) => return Err(stranger(auth, why, &request, api)),
    };
    if changes(request.method()) {
        if who.by != By::Token {
            if !own_page(auth, request.headers()) {
                return Err(forbidden("another site sent this"));
            }
            let (again, token) = csrf(request).await.map_err(refuse)?;
            request = again;
            if !bool::from(token.as_bytes().ct_eq(who.csrf.as_bytes())) {
                return Err(forbidden(
                    "the CSRF token is missing or not the one of this session: reload the page, or send the one that \
                     /api/v1/whoami tells as X-CSRF-Token",
                ));
            }
        }
        if who.role == Role::Viewer && request.uri().path() != login::LOGOUT {
            return Err(forbidden("you may look but not change anything: that takes the role operator"));
        }
    }
    request.extensions_mut().insert::<Who>(who);
    Ok(request)
}

/// Everything but these may change something.
fn changes(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Without a token everybody who can connect may act, so the request must be meant for this machine and come from it.
fn local(auth: &Auth, request: &Request) -> Result<(), &'static str> {
    let headers = request.headers();
    if ["forwarded", "x-forwarded-for", "x-real-ip", "via"].iter().any(|name| headers.contains_key(*name)) {
        return Err(
            "this came through a proxy, and without server.token or server.trusted_proxy_header everybody behind it could act",
        );
    }
    // A name of somebody else's that leads to this address makes a browser take their pages for ours (DNS rebinding).
    let named = host(headers, request.uri()).is_some_and(|h| {
        let name =
            h.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit())).map_or(h.as_str(), |(name, _)| name);
        let name = name.trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost")
            || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback() || ip == auth.listen)
            || auth.hosts.iter().any(|known| known.eq_ignore_ascii_case(name))
    });
    if !named {
        return Err("the Host header names another machine; add it to server.hosts if it is a name of this one");
    }
    // Pages of other sites may lead here, but not use what is here.
    let site = headers.get("sec-fetch-site").and_then(|v| v.to_str().ok());
    let navigates = headers.get("sec-fetch-mode").and_then(|v| v.to_str().ok()) == Some("navigate");
    match site {
        Some("cross-site" | "same-site") if !navigates => Err("another site sent this"),
        _ => Ok(()),
    }
}

fn host(headers: &HeaderMap, uri: &Uri) -> Option<String> {
    let named = headers.get(header::HOST).and_then(|v| v.to_str().ok()).map(str::to_owned);
    uri.authority().map(ToString::to_string).or(named)
}

/// Whether a change was asked for by a page of this server, or by no page at all.
pub(super) fn own_page(auth: &Auth, headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    // A browser says it itself, whatever names proxies use between each other.
    if let Some(site) = text("sec-fetch-site") {
        return matches!(site, "same-origin" | "none");
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let Some((_, from)) = origin.to_str().ok().and_then(|o| o.split_once("://")) else { return false };
    let bare = from.rsplit_once(':').map_or(from, |(name, _)| name);
    [text("host"), text("x-forwarded-host")].into_iter().flatten().any(|name| name.eq_ignore_ascii_case(from))
        || auth.hosts.iter().any(|known| known.eq_ignore_ascii_case(bare) || known.eq_ignore_ascii_case(from))
}

/// The token that came with a change: as a header, or as a field of a form.
async fn csrf(request: Request) -> Result<(Request, String), Refused> {
    if let Some(token) = request.headers().get("x-csrf-token") {
        let token = token.to_str().unwrap_or_default().to_owned();
        return Ok((request, token));
    }
    let content = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if !content.starts_with("application/x-www-form-urlencoded") {
        return Ok((request, String::new()));
    }
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, FORM)
        .await
        .map_err(|_| Refused::new(Refusal::Invalid, format!("a form may have {FORM} bytes")).limit(FORM as u64))?;
    let token = url::form_urlencoded::parse(&body).find(|(name, _)| name == "csrf").map(|(_, value)| value.into_owned());
    Ok((Request::from_parts(parts, Body::from(body)), token.unwrap_or_default()))
}

/// The other end of the connection.
pub(super) fn peer(request: &Request) -> IpAddr {
    let info = request.extensions().get::<ConnectInfo<SocketAddr>>();
    // Without it nobody is trusted: it is no address that anything can have.
    info.map_or(IpAddr::from([0, 0, 0, 0]), |ConnectInfo(address)| address.ip())
}

fn stranger(auth: &Auth, why: Stranger, request: &Request, api: bool) -> Response {
    if auth.mode == Mode::Closed {
        let text =
            "pages and API are closed: this address is public, and neither server.token nor server.trusted_proxy_header is set";
        let refused = Refused::new(Refusal::Forbidden, text);
        return if api { refusal(&refused) } else { login::refused(&refused) };
    }
    let limited = why == Stranger::Limited;
    if api {
        let (status, text) = if limited {
            (StatusCode::TOO_MANY_REQUESTS, "too many wrong tokens from this address; wait a minute")
        } else if why == Stranger::Wrong {
            (StatusCode::UNAUTHORIZED, "the token is not one of this server's")
        } else {
            (StatusCode::UNAUTHORIZED, "a token is needed: Authorization: Bearer …")
        };
        let mut response = refusal(&Refused::new(Refusal::Forbidden, text));
        *response.status_mut() = status;
        let (name, value) =
            if limited { (header::RETRY_AFTER, "60") } else { (header::WWW_AUTHENTICATE, "Bearer realm=\"posthouse\"") };
        response.headers_mut().insert(name, HeaderValue::from_static(value));
        return response;
    }
    login::needed(auth, request)
}
