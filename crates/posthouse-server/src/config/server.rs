//! `[server]`: where pages, API and metrics are, and who may see and do what there.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::http::HeaderName;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::problem::Problem;
use super::secret::Secret;
use super::shape::Walk;
use super::typed;

/// A token shorter than this could be guessed.
const TOKEN: usize = 16;

/// `[server]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ServerConfig {
    pub(crate) listen: SocketAddr,
    /// Metrics and states of destinations may be read by everybody who reaches the address.
    pub(crate) allow_public: bool,
    /// Who knows it may look and act.
    pub(crate) token: Option<Secret>,
    /// Who knows it may look.
    pub(crate) viewer_token: Option<Secret>,
    /// Who knows it may read metrics and states of destinations.
    pub(crate) metrics_token: Option<Secret>,
    /// What logins are signed with. None: made anew by each process.
    pub(crate) session_key: Option<Secret>,
    /// How long a login lasts.
    #[serde(with = "humantime_serde")]
    pub(crate) session: Duration,
    /// The header in which a proxy says who asks.
    pub(crate) trusted_proxy_header: Option<String>,
    /// Addresses and networks of such proxies.
    pub(crate) trusted_proxies: Vec<String>,
    /// Names that the proxy says, of those who may act. `*`: all of them.
    pub(crate) operators: Vec<String>,
    /// Names under which the server is known, beside its address.
    pub(crate) hosts: Vec<String>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8420)),
            allow_public: false,
            token: None,
            viewer_token: None,
            metrics_token: None,
            session_key: None,
            session: Duration::from_secs(12 * 3600),
            trusted_proxy_header: None,
            trusted_proxies: vec!["127.0.0.1".into(), "::1".into()],
            operators: Vec::new(),
            hosts: Vec::new(),
        }
    }
}

impl ServerConfig {
    /// Whether anybody can be told from anybody else.
    pub(crate) fn knows_people(&self) -> bool {
        self.token.is_some() || self.viewer_token.is_some() || self.trusted_proxy_header.is_some()
    }

    /// The networks of trusted proxies.
    pub(crate) fn proxies(&self) -> Vec<IpNet> {
        self.trusted_proxies.iter().filter_map(|text| network(text)).collect()
    }
}

fn network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

pub(super) fn section(walk: &mut Walk<'_>, value: Option<Value>) -> ServerConfig {
    let Some(Value::Table(mut table)) = value else { return ServerConfig::default() };
    let listen = table.remove("listen");
    let mut out: ServerConfig = typed(walk, "server", Value::Table(table)).unwrap_or_default();
    if let Some(text) = listen.as_ref().and_then(Value::as_str) {
        match text.parse() {
            Ok(listen) => out.listen = listen,
            Err(_) => walk.problems.push(
                Problem::new("server.listen", walk.shown.get("server.listen").cloned(), "must be an IP address and a port")
                    .fix("listen = \"127.0.0.1:8420\", or \"[::1]:8420\""),
            ),
        }
    }
    out
}

/// What is wrong with these settings together.
pub(super) fn relations(server: &ServerConfig, doubtful: impl Fn(&str) -> bool, walk: &Walk<'_>, out: &mut Vec<Problem>) {
    let shown = |path: &str| walk.shown.get(path).cloned();
    for (path, secret) in [
        ("server.token", &server.token),
        ("server.viewer_token", &server.viewer_token),
        ("server.metrics_token", &server.metrics_token),
        ("server.session_key", &server.session_key),
    ] {
        let Some(secret) = secret else { continue };
        let length = secret.expose().len();
        if length < TOKEN {
            let reason = format!("has {length} bytes, which can be guessed; it must have {TOKEN} or more");
            out.push(Problem::new(path, shown(path), reason).fix("make one, for example with: openssl rand -hex 32"));
        } else if !secret.expose().bytes().all(|b| b.is_ascii_graphic()) {
            let reason = "must be printable ASCII without blanks, or it could not be sent in a header";
            out.push(Problem::new(path, shown(path), reason).fix("make one, for example with: openssl rand -hex 32"));
        }
    }
    let same = |a: &Option<Secret>, b: &Option<Secret>| a.is_some() && a == b;
    for (path, secret) in [("server.viewer_token", &server.viewer_token), ("server.metrics_token", &server.metrics_token)] {
        if same(secret, &server.token) {
            let reason = "is the same as server.token, so everybody who has it may act";
            out.push(Problem::new(path, shown(path), reason).fix("give it another value"));
        }
    }
    if server.session < Duration::from_secs(60) || server.session > Duration::from_secs(90 * 86_400) {
        out.push(Problem::new("server.session", shown("server.session"), "must be 1 minute to 90 days"));
    }
    let path = "server.trusted_proxy_header";
    match &server.trusted_proxy_header {
        Some(name) if HeaderName::try_from(name).is_err() => {
            let problem = Problem::new(path, shown(path), "is no name of a header");
            out.push(problem.fix("trusted_proxy_header = \"X-Forwarded-User\""));
        }
        Some(name) if ["authorization", "cookie", "host", "origin"].contains(&name.to_ascii_lowercase().as_str()) => {
            let problem = Problem::new(path, shown(path), "can't say who asks: everybody can send it");
            out.push(problem.fix("trusted_proxy_header = \"X-Forwarded-User\", which the proxy must set itself"));
        }
        None if !server.operators.is_empty() && !doubtful("trusted_proxy_header") => {
            let reason = "has no effect without trusted_proxy_header: nobody says who asks";
            out.push(
                Problem::new("server.operators", shown("server.operators"), reason).fix("set trusted_proxy_header, or remove it"),
            );
        }
        _ => {}
    }
    let path = "server.trusted_proxies";
    for text in server.trusted_proxies.iter().filter(|text| network(text).is_none()) {
        let problem = Problem::new(path, shown(path), format!("{text:?} is neither an IP address nor a network"));
        out.push(problem.fix("write addresses or networks, such as \"10.0.0.7\" or \"10.0.0.0/8\""));
    }
    let listen = server.listen;
    let told = ["allow_public", "token", "viewer_token", "trusted_proxy_header"].iter().any(|key| doubtful(key));
    if !listen.ip().is_loopback() && !server.allow_public && !server.knows_people() && !told {
        let reason = "can be reached from other machines, and nothing says who may look and act there";
        out.push(Problem::new("server.listen", Some(format!("\"{listen}\"")), reason).fix(
            "set token = \"${POSTHOUSE_TOKEN}\" (or trusted_proxy_header behind a proxy that knows who asks), \
             or listen = \"127.0.0.1:8420\"; allow_public = true opens health and metrics alone",
        ));
    }
}
