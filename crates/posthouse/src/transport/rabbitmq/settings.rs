//! `[transports.NAME]` with `kind = "rabbitmq"`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use lapin::uri::AMQPUri;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde::{Deserialize, Serialize};

use crate::message::MAX_NAME;

/// Settings of the [`RabbitMq`](super::RabbitMq) transport.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RabbitMqSettings {
    /// `amqp://user:password@host:5672/vhost`, or `amqps://` for TLS. The password is never shown. Without `/vhost` it is the
    /// virtual host `/`; in user, password and virtual host, special characters are percent-encoded.
    pub url: String,
    /// After two of these without a sign of life the connection counts as lost. Whole seconds, 1 s to 1 h; 10 s by default.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// A connection, name lookup and TLS handshake included, must stand within this time. Keep it below
    /// `relay.send_timeout`. 1 ms to 1 h; 5 s by default.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// The name that RabbitMQ's management shows for the connection. `posthouse` by default.
    pub connection_name: String,
    /// PEM file with the certificates to trust, instead of the system's. Read at each connect.
    pub ca_file: Option<PathBuf>,
}

impl Default for RabbitMqSettings {
    fn default() -> Self {
        Self {
            url: String::new(),
            heartbeat: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            connection_name: "posthouse".into(),
            ca_file: None,
        }
    }
}

impl From<&str> for RabbitMqSettings {
    fn from(url: &str) -> Self {
        Self { url: url.into(), ..Self::default() }
    }
}

impl fmt::Debug for RabbitMqSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqSettings").field("heartbeat", &self.heartbeat).finish_non_exhaustive()
    }
}

impl RabbitMqSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let mut say = |field: &str, why: String| out.push((field.to_owned(), why));
        if let Err(why) = self.uri() {
            say("url", why);
        }
        let hour = Duration::from_secs(3600);
        if self.heartbeat < Duration::from_secs(1) || self.heartbeat > hour || self.heartbeat.subsec_nanos() != 0 {
            say("heartbeat", format!("{:?}, must be whole seconds, 1 s to 1 h", self.heartbeat));
        }
        if self.connect_timeout < Duration::from_millis(1) || self.connect_timeout > hour {
            say("connect_timeout", format!("{:?}, must be 1 ms to 1 h", self.connect_timeout));
        }
        if self.connection_name.is_empty()
            || self.connection_name.len() > MAX_NAME
            || self.connection_name.contains(char::is_control)
        {
            say("connection_name", format!("must be 1 to {MAX_NAME} bytes without control characters"));
        }
        if let Some(file) = &self.ca_file {
            if let Err(why) = self.certificates() {
                say("ca_file", why);
            }
            if !self.url.starts_with("amqps://") {
                say("ca_file", format!("{} is used only with an amqps:// url", file.display()));
            }
        }
        out
    }

    /// The parsed `url`. Its text is never part of an error: what can't be parsed can't be freed of its password either.
    pub(super) fn uri(&self) -> Result<AMQPUri, String> {
        if self.url.is_empty() {
            return Err("is required: amqp://user:password@host:5672/vhost".into());
        }
        let Some((_, rest)) = self.url.split_once("://").filter(|(scheme, _)| matches!(*scheme, "amqp" | "amqps")) else {
            return Err("must begin with amqp:// or amqps://".into());
        };
        let mut uri: AMQPUri =
            self.url.parse().map_err(|e| format!("is not usable ({e}); write amqp://user:password@host:5672/vhost"))?;
        // The parser takes an IPv6 address for no host at all, which would silently mean localhost.
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        if let Some((v6, _)) = host.strip_prefix('[').and_then(|h| h.split_once(']')) {
            uri.authority.host = v6.to_owned();
        } else if host.is_empty() || host.starts_with(':') {
            return Err("names no host; write amqp://user:password@host:5672/vhost".into());
        }
        if uri.vhost.is_empty() {
            return Err("names the empty virtual host; leave out the last / for the default one, or name it (%2F is /)".into());
        }
        if uri.vhost.len() > MAX_NAME {
            return Err(format!("the virtual host has {} bytes, must be at most {MAX_NAME}", uri.vhost.len()));
        }
        Ok(uri)
    }

    /// The certificates of `ca_file`.
    pub(super) fn certificates(&self) -> Result<Option<Vec<CertificateDer<'static>>>, String> {
        let Some(file) = &self.ca_file else { return Ok(None) };
        let pem = std::fs::read(file).map_err(|e| format!("{} can't be read: {e}", file.display()))?;
        let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        match found {
            Ok(all) if !all.is_empty() => Ok(Some(all)),
            Ok(_) => Err(format!("{} holds no certificate in PEM form", file.display())),
            Err(e) => Err(format!("{} can't be understood: {e}", file.display())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(url: &str) -> Option<String> {
        RabbitMqSettings::from(url).problems().into_iter().next().map(|(field, why)| {
            assert_eq!(field, "url");
            why
        })
    }

    #[test]
    fn the_url_is_checked_and_never_shown() {
        assert_eq!(problem("amqp://localhost"), None);
        assert_eq!(problem("amqps://u:p@[::1]:5671/%2F?frame_max=8192"), None);
        for url in [
            "",
            "http://u:secret@h",
            "amqp:u:secret@h",
            "amqp://u:secret@h:99999",
            "amqp://u:secret@h/",
            "amqp://u:secret@:5672",
            "amqp://u:secret@h/v?heartbeat=secret",
        ] {
            let why = problem(url).unwrap_or_else(|| panic!("{url} is taken"));
            assert!(!why.contains("secret"), "{why}");
        }
    }

    #[test]
    fn an_ipv6_address_is_not_localhost() {
        let uri = RabbitMqSettings::from("amqp://u:p@[2001:db8::7]:5673/v").uri().expect("usable");
        assert_eq!((uri.authority.host.as_str(), uri.authority.port, uri.vhost.as_str()), ("2001:db8::7", 5673, "v"));
    }

    #[test]
    fn every_problem_is_told() {
        let settings = RabbitMqSettings {
            url: "amqp://h".into(),
            heartbeat: Duration::from_millis(1500),
            connect_timeout: Duration::ZERO,
            connection_name: String::new(),
            ca_file: Some("/nowhere/ca.pem".into()),
        };
        let fields: Vec<_> = settings.problems().into_iter().map(|p| p.0).collect();
        assert_eq!(fields, ["heartbeat", "connect_timeout", "connection_name", "ca_file", "ca_file"]);
    }
}
