//! Who somebody is: tokens, logins, and what a proxy says.

use std::net::IpAddr;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use hmac::{Hmac, KeyInit, Mac};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::limit::Limiter;
use super::who::{By, Role, Who};
use crate::config::{Secret, ServerConfig};
use crate::output::now_ms;

/// The cookie of a login.
pub(super) const COOKIE: &str = "posthouse_session";

/// The longest name of a person, in characters.
const NAME: usize = 60;

/// Who says who somebody is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nobody: who can connect is on this machine, and may act.
    Local,
    /// Tokens, logins, a proxy.
    Known,
    /// Nobody can be told from anybody else, and the address is public: pages and API are closed.
    Closed,
}

/// Why somebody isn't let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stranger {
    /// Says nothing of who they are.
    Nobody,
    /// What they say isn't so.
    Wrong,
    /// Too many tried wrong tokens from there lately.
    Limited,
}

/// What tells people apart.
#[derive(Debug)]
pub(super) struct Auth {
    pub(super) mode: Mode,
    operator: Option<Secret>,
    viewer: Option<Secret>,
    metrics: Option<Secret>,
    key: [u8; 32],
    session: Duration,
    proxy: Option<HeaderName>,
    proxies: Vec<IpNet>,
    operators: Vec<String>,
    pub(super) hosts: Vec<String>,
    pub(super) listen: IpAddr,
    /// Metrics may be read by everybody.
    open_metrics: bool,
    pub(super) limiter: Limiter,
}

/// What a login's cookie says.
#[derive(Debug, Serialize, Deserialize)]
struct Session {
    name: String,
    role: Role,
    /// Milliseconds since 1970 UTC.
    until: i64,
    /// Makes every login's own CSRF token.
    nonce: String,
}

impl Auth {
    pub(super) fn new(server: &ServerConfig) -> Self {
        let loopback = server.listen.ip().is_loopback();
        let mode = match (server.knows_people(), loopback) {
            (true, _) => Mode::Known,
            (false, true) => Mode::Local,
            (false, false) => Mode::Closed,
        };
        // A change of a token ends the logins that it gave.
        let mut key = Hmac::<Sha256>::new_from_slice(&random()).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        if let Some(configured) = &server.session_key {
            key = Hmac::new_from_slice(configured.expose().as_bytes())
                .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        }
        for token in [&server.token, &server.viewer_token] {
            key.update(&digest(token.as_ref().map_or("", Secret::expose)));
        }
        Self {
            mode,
            operator: server.token.clone(),
            viewer: server.viewer_token.clone(),
            metrics: server.metrics_token.clone(),
            key: key.finalize().into_bytes().into(),
            session: server.session,
            proxy: server.trusted_proxy_header.as_ref().and_then(|name| HeaderName::try_from(name).ok()),
            proxies: server.proxies(),
            operators: server.operators.clone(),
            hosts: server.hosts.iter().map(|h| h.to_ascii_lowercase()).collect(),
            listen: server.listen.ip(),
            open_metrics: server.metrics_token.is_none() && (loopback || server.allow_public),
            limiter: Limiter::default(),
        }
    }

    /// Whether a login form can be of use.
    pub(super) fn has_login(&self) -> bool {
        self.operator.is_some() || self.viewer.is_some()
    }

    /// Who asks.
    pub(super) fn who(&self, headers: &HeaderMap, peer: IpAddr) -> Result<Who, Stranger> {
        match self.mode {
            Mode::Local => return Ok(self.known("local".into(), Role::Operator, By::Local, "local")),
            Mode::Closed => return Err(Stranger::Nobody),
            Mode::Known => {}
        }
        if let Some(token) = bearer(headers) {
            let Some(role) = self.role_of(token) else {
                return Err(if self.limiter.failed(peer) { Stranger::Limited } else { Stranger::Wrong });
            };
            let name = actor(headers).map_or_else(|| "token".into(), |name| format!("{name} (token)"));
            return Ok(self.known(name, role, By::Token, ""));
        }
        if let Some(session) = self.session(headers) {
            return Ok(self.known(session.name, session.role, By::Login, &session.nonce));
        }
        match self.proxied(headers, peer) {
            Some(name) => {
                let role = if self.operators.iter().any(|o| o == "*" || *o == name) { Role::Operator } else { Role::Viewer };
                let own = format!("proxy {name}");
                Ok(self.known(name, role, By::Proxy, &own))
            }
            None => Err(Stranger::Nobody),
        }
    }

    fn known(&self, name: String, role: Role, by: By, own: &str) -> Who {
        // A token is sent by a program on purpose, which no other site can make a browser do.
        let csrf = if by == By::Token { String::new() } else { self.sign(&format!("csrf {own}")) };
        Who { name, role, by, csrf }
    }

    /// The role that a token gives. Both are compared, so that the time it takes says nothing.
    pub(super) fn role_of(&self, token: &str) -> Option<Role> {
        let (operator, viewer) = (same(&self.operator, token), same(&self.viewer, token));
        if operator {
            Some(Role::Operator)
        } else if viewer {
            Some(Role::Viewer)
        } else {
            None
        }
    }

    /// Whether metrics and states of destinations may be read.
    pub(super) fn may_measure(&self, headers: &HeaderMap, peer: IpAddr) -> bool {
        if self.open_metrics {
            return true;
        }
        let scraper = bearer(headers).is_some_and(|token| same(&self.metrics, token));
        scraper || self.mode == Mode::Known && self.who(headers, peer).is_ok()
    }

    /// What a trusted proxy says. Two answers are none: one of them may be the client's own.
    fn proxied(&self, headers: &HeaderMap, peer: IpAddr) -> Option<String> {
        let name = self.proxy.as_ref()?;
        let peer = peer.to_canonical();
        if !self.proxies.iter().any(|net| net.contains(&peer)) {
            return None;
        }
        let mut all = headers.get_all(name).iter();
        let (one, none) = (all.next()?, all.next());
        none.is_none().then(|| one.to_str().ok().and_then(named)).flatten()
    }

    /// The cookie of a new login, and what else is in its line.
    pub(super) fn log_in(&self, name: &str, role: Role, secure: bool) -> String {
        let name = named(name).map_or_else(|| "login".to_owned(), |name| format!("{name} (login)"));
        let session = Session {
            name,
            role,
            until: now_ms().saturating_add(i64::try_from(self.session.as_millis()).unwrap_or(i64::MAX)),
            nonce: BASE64.encode(random()),
        };
        let said = BASE64.encode(serde_json::to_vec(&session).unwrap_or_default());
        let signed = format!("{said}.{}", self.sign(&said));
        format!("{COOKIE}={signed}; Max-Age={}{}", self.session.as_secs(), attributes(secure))
    }

    /// The login that a cookie proves.
    fn session(&self, headers: &HeaderMap) -> Option<Session> {
        let value = cookies(headers).find_map(|(name, value)| (name == COOKIE).then_some(value))?;
        let (said, signature) = value.split_once('.')?;
        if !bool::from(self.sign(said).as_bytes().ct_eq(signature.as_bytes())) {
            return None;
        }
        let session: Session = serde_json::from_slice(&BASE64.decode(said).ok()?).ok()?;
        (session.until > now_ms()).then_some(session)
    }

    fn sign(&self, text: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        mac.update(text.as_bytes());
        BASE64.encode(mac.finalize().into_bytes())
    }
}

/// Takes the cookie away.
pub(super) fn log_out(secure: bool) -> String {
    format!("{COOKIE}=; Max-Age=0{}", attributes(secure))
}

/// Scripts can't read it, other sites don't send it, and where there is TLS nobody on the way sees it.
fn attributes(secure: bool) -> String {
    format!("; Path=/; HttpOnly; SameSite=Strict{}", if secure { "; Secure" } else { "" })
}

/// Whether the person's own connection is encrypted, as far as a proxy says.
pub(super) fn is_secure(headers: &HeaderMap) -> bool {
    let says = |name: &str, what: &str| {
        headers.get(name).and_then(|v| v.to_str().ok()).is_some_and(|v| v.to_ascii_lowercase().replace('"', "").contains(what))
    };
    says("x-forwarded-proto", "https") || says("forwarded", "proto=https")
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

/// Who uses a token, in their own words.
fn actor(headers: &HeaderMap) -> Option<String> {
    named(headers.get("x-actor")?.to_str().ok()?)
}

/// A name as it goes into the audit log.
fn named(text: &str) -> Option<String> {
    let name: String = text.trim().chars().filter(|c| !c.is_control()).take(NAME).collect();
    (!name.is_empty()).then_some(name)
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|v| v.to_str().ok());
    lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='))
}

/// Digests are compared, so that the time tells neither the content nor the length.
fn same(secret: &Option<Secret>, given: &str) -> bool {
    secret.as_ref().is_some_and(|secret| bool::from(digest(secret.expose()).ct_eq(&digest(given))))
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

fn random() -> [u8; 32] {
    let mut bytes = [0; 32];
    if let Err(e) = getrandom::fill(&mut bytes) {
        // Without it every session could be forged.
        panic!("the operating system gives no random bytes: {e}");
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn server(text: &str) -> ServerConfig {
        toml::from_str(text).unwrap()
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut out = HeaderMap::new();
        for (name, value) in pairs {
            out.append(*name, value.parse().unwrap());
        }
        out
    }

    fn cookie_of(line: &str) -> String {
        line.split(';').next().unwrap().to_owned()
    }

    const TOKENS: &str = "token = \"operator-token-0\"\nviewer_token = \"viewer-token-00\"";

    #[test]
    fn a_token_gives_its_role() {
        let auth = Auth::new(&server(TOKENS));
        let of = |value: &str| auth.who(&headers(&[("authorization", value)]), HERE).map(|w| w.role);
        assert_eq!(of("Bearer operator-token-0"), Ok(Role::Operator));
        assert_eq!(of("bearer viewer-token-00"), Ok(Role::Viewer));
        assert_eq!(of("Bearer operator-token-1"), Err(Stranger::Wrong));
        assert_eq!(of("Bearer "), Err(Stranger::Wrong));
        assert_eq!(of("Basic operator-token-0"), Err(Stranger::Nobody));
        assert_eq!(auth.who(&HeaderMap::new(), HERE).map(|w| w.role), Err(Stranger::Nobody));
        let named = auth.who(&headers(&[("authorization", "Bearer operator-token-0"), ("x-actor", "ci")]), HERE).unwrap();
        assert_eq!(named.name, "ci (token)");
    }

    #[test]
    fn a_login_ends_with_its_time_its_key_and_its_token() {
        let auth = Auth::new(&server(TOKENS));
        let line = auth.log_in("ann", Role::Viewer, true);
        for part in ["HttpOnly", "SameSite=Strict", "Secure", "Path=/", "Max-Age=43200"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(!auth.log_in("ann", Role::Viewer, false).contains("Secure"));
        let cookie = cookie_of(&line);
        let who = auth.who(&headers(&[("cookie", &format!("a=b; {cookie}"))]), HERE).unwrap();
        assert_eq!((who.name.as_str(), who.role, who.by), ("ann (login)", Role::Viewer, By::Login));
        let other = auth.who(&headers(&[("cookie", &cookie_of(&auth.log_in("ann", Role::Viewer, true)))]), HERE).unwrap();
        assert_ne!(who.csrf, other.csrf, "each login has its own");
        // Another process has another key, unless one is configured.
        let out = |auth: &Auth, cookie: &str| auth.who(&headers(&[("cookie", cookie)]), HERE).is_err();
        assert!(out(&Auth::new(&server(TOKENS)), &cookie));
        let keyed = format!("{TOKENS}\nsession_key = \"a-key-of-several-bytes\"");
        let cookie = cookie_of(&Auth::new(&server(&keyed)).log_in("ann", Role::Operator, true));
        assert!(!out(&Auth::new(&server(&keyed)), &cookie));
        assert!(out(&Auth::new(&server(&keyed.replace("operator-token-0", "operator-token-1"))), &cookie));
        // What it says can't be changed.
        let (said, signature) = cookie.strip_prefix("posthouse_session=").unwrap().split_once('.').unwrap();
        let text = String::from_utf8(BASE64.decode(said).unwrap()).unwrap();
        let forged = BASE64.encode(text.replace("ann", "bob"));
        assert!(out(&Auth::new(&server(&keyed)), &format!("{COOKIE}={forged}.{signature}")));
        let mut short = Auth::new(&server(&keyed));
        short.session = Duration::ZERO;
        assert!(out(&short, &cookie_of(&short.log_in("ann", Role::Operator, true))), "it has ended");
    }

    #[test]
    fn a_proxy_is_believed_only_where_it_is() {
        let auth =
            Auth::new(&server("trusted_proxy_header = \"X-User\"\ntrusted_proxies = [\"10.1.0.0/16\"]\noperators = [\"ann\"]"));
        let of = |peer: &str, pairs: &[(&'static str, &str)]| auth.who(&headers(pairs), peer.parse().unwrap());
        let ann = of("10.1.2.3", &[("x-user", "ann")]).unwrap();
        assert_eq!((ann.name.as_str(), ann.role), ("ann", Role::Operator));
        assert_eq!(of("::ffff:10.1.2.3", &[("x-user", "bob")]).unwrap().role, Role::Viewer);
        assert_ne!(ann.csrf, of("10.1.2.3", &[("x-user", "bob")]).unwrap().csrf);
        for (peer, pairs) in [
            ("10.2.0.1", &[("x-user", "ann")][..]),
            ("127.0.0.1", &[("x-user", "ann")]),
            ("10.1.2.3", &[]),
            ("10.1.2.3", &[("x-user", " ")]),
            ("10.1.2.3", &[("x-user", "ann"), ("x-user", "bob")]),
        ] {
            assert_eq!(of(peer, pairs).map(|w| w.name), Err(Stranger::Nobody), "{peer} {pairs:?}");
        }
    }

    #[test]
    fn metrics_are_open_only_where_that_was_meant() {
        let auth = |text: &str| Auth::new(&server(text));
        let far: IpAddr = "192.0.2.1".parse().unwrap();
        let none = HeaderMap::new();
        let scraper = headers(&[("authorization", "Bearer metrics-token-00")]);
        let viewer = headers(&[("authorization", "Bearer viewer-token-00")]);
        assert!(auth("").may_measure(&none, HERE));
        assert!(auth(TOKENS).may_measure(&none, HERE), "on the machine itself");
        let public = "listen = \"0.0.0.0:1\"\n";
        assert!(auth(&format!("{public}allow_public = true")).may_measure(&none, far));
        let tokens = auth(&format!("{public}{TOKENS}"));
        assert!(!tokens.may_measure(&none, far) && tokens.may_measure(&viewer, far) && !tokens.may_measure(&scraper, far));
        let measured = auth(&format!("{public}{TOKENS}\nallow_public = true\nmetrics_token = \"metrics-token-00\""));
        assert!(!measured.may_measure(&none, far) && measured.may_measure(&scraper, far) && measured.may_measure(&viewer, far));
        assert!(measured.who(&scraper, far).is_err(), "it gives nothing else");
    }
}
