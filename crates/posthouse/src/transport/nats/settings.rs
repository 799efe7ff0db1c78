//! `[transports.NAME]` with `kind = "nats"`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use async_nats::ServerAddr;
use serde::{Deserialize, Serialize};

/// Settings of the [`Nats`](super::Nats) transport.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct NatsSettings {
    /// `nats://user:password@host:4222`, `nats://token@host`, `tls://…`; several servers of one cluster, separated by commas,
    /// with the same user. Special characters in user, password and token are percent-encoded. Passwords and tokens are never
    /// shown.
    pub url: String,
    /// A `.creds` file (JWT and key), instead of a user in the URL. Read on each connect.
    pub credentials: Option<PathBuf>,
    /// PEM file with the certificates to trust, instead of the system's. Read on each connect, which then is made with TLS
    /// only.
    pub ca_file: Option<PathBuf>,
    /// A connection must stand within this time, for each server of `url`. 5 s by default.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
}

impl Default for NatsSettings {
    fn default() -> Self {
        Self { url: String::new(), credentials: None, ca_file: None, connect_timeout: Duration::from_secs(5) }
    }
}

impl From<&str> for NatsSettings {
    fn from(url: &str) -> Self {
        Self { url: url.into(), ..Self::default() }
    }
}

impl fmt::Debug for NatsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsSettings")
            .field("servers", &self.servers().ok().map(|servers| servers.shown()))
            .field("credentials", &self.credentials)
            .field("ca_file", &self.ca_file)
            .field("connect_timeout", &self.connect_timeout)
            .finish()
    }
}

/// What `url` says.
pub(super) struct Servers {
    /// Without user and password: the client library would write them into its debug log.
    pub(super) addresses: Vec<ServerAddr>,
    pub(super) login: Option<Login>,
}

/// Who we are to the server.
#[derive(PartialEq, Eq)]
pub(super) enum Login {
    Token(String),
    Password { user: String, password: String },
}

impl Servers {
    /// The servers as they may be shown.
    pub(super) fn shown(&self) -> String {
        let all: Vec<_> = self.addresses.iter().map(|a| format!("{}://{}:{}", a.scheme(), a.host(), a.port())).collect();
        all.join(", ")
    }
}

impl NatsSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let mut say = |field: &str, why: &str| out.push((field.to_owned(), why.to_owned()));
        match self.servers() {
            Err(why) => say("url", &why),
            Ok(servers) if servers.login.is_some() && self.credentials.is_some() => {
                say("credentials", "can't be combined with a user or token in the url; remove one of the two");
            }
            Ok(_) => {}
        }
        if self.connect_timeout < Duration::from_millis(1) || self.connect_timeout > Duration::from_secs(3600) {
            say("connect_timeout", &format!("{:?}, must be 1 ms to 1 h", self.connect_timeout));
        }
        out
    }

    /// Reads `url`. The error never shows it.
    pub(super) fn servers(&self) -> Result<Servers, String> {
        let mut servers = Servers { addresses: Vec::new(), login: None };
        for one in self.url.split(',').map(str::trim) {
            if one.is_empty() {
                return Err("is empty; give a server, such as \"nats://host:4222\"".into());
            }
            let address: ServerAddr = one.parse().map_err(|e| format!("can't be read ({e}); write \"nats://host:4222\""))?;
            if !matches!(address.scheme(), "nats" | "tls") || address.host().is_empty() {
                return Err("must be nats://host:port or tls://host:port".into());
            }
            let login = match (address.username().map(decoded), address.password().map(decoded)) {
                (None, None) => None,
                (Some(Some(token)), None) => Some(Login::Token(token)),
                (Some(Some(user)), Some(Some(password))) => Some(Login::Password { user, password }),
                _ => {
                    return Err(
                        "has a user, password or token that isn't percent-encoded UTF-8, or a password without a user".into()
                    );
                }
            };
            if login.is_some() {
                if servers.login.is_some() && servers.login != login {
                    return Err("has different users or passwords for its servers; one login is used for all of them".into());
                }
                servers.login = login;
            }
            let mut url = address.into_inner();
            // Only for URLs without a host, which were refused above.
            let _ = (url.set_username(""), url.set_password(None));
            servers.addresses.push(ServerAddr::from_url(url).map_err(|e| e.to_string())?);
        }
        Ok(servers)
    }
}

/// Percent-decoded; none if that is not UTF-8, or not percent-encoded.
fn decoded(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        out.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_and_the_bad_ones_named_without_being_shown() {
        let servers = |url: &str| NatsSettings::from(url).servers();
        let one = servers("nats://us%40er:p%40ss@h1:1, tls://h2").ok().unwrap();
        assert_eq!(one.shown(), "nats://h1:1, tls://h2:4222");
        assert!(one.login == Some(Login::Password { user: "us@er".into(), password: "p@ss".into() }));
        assert!(one.addresses.iter().all(|a| a.username().is_none() && a.password().is_none()));
        assert!(servers("t0ken@h1").ok().unwrap().login == Some(Login::Token("t0ken".into())));
        assert!(servers("[::1]:4222").ok().unwrap().login.is_none());
        for bad in [
            "",
            "nats://h1,",
            "http://s3cret@h1",
            "ws://h1",
            "nats://a:s3cret@h1:99999",
            "nats://a:s3cret@h1,nats://b:s3cret@h2",
            "nats://:s3cret@h1",
            "nats://%ff:s3cret@h1",
        ] {
            let settings = NatsSettings::from(bad);
            let problems = settings.problems();
            assert_eq!(problems.len(), 1, "{bad}: {problems:?}");
            assert!(problems[0].0 == "url" && !format!("{problems:?}{settings:?}").contains("s3cret"), "{bad}: {problems:?}");
        }
        let mut settings = NatsSettings::from("nats://a:s3cret@h1");
        settings.credentials = Some("a.creds".into());
        settings.connect_timeout = Duration::ZERO;
        let fields: Vec<_> = settings.problems().into_iter().map(|(field, _)| field).collect();
        assert_eq!(fields, ["credentials", "connect_timeout"]);
        assert!(!format!("{settings:?}").contains("s3cret"));
    }
}
