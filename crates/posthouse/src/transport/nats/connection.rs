//! The connection to the server: made when it is needed, given up when it is lost.
//!
//! The client library can reconnect by itself, but then it keeps messages whose outcome was told long ago for later, never
//! tells what became of those that were in flight, and remembers them for good. So a connection that was lost is replaced as a
//! whole. What its command buffer still held ([`BUFFER`] messages at most) may go out if the library gets through once more
//! before it notices that it isn't needed: duplicates, with the `Nats-Msg-Id` by which the stream recognises them.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::jetstream::{self, ContextBuilder};
use async_nats::{ConnectError, ConnectErrorKind, ConnectOptions, Event, ServerError};
use tokio::sync::{Mutex, broadcast, watch};

use super::settings::{Login, NatsSettings, Servers};
use crate::Error;
use crate::error::storable;
use crate::transport::tls;

/// Messages that the client library holds before they are written to the connection.
const BUFFER: usize = 2_048;

/// The library gives a connection up when three pings in a row came back unanswered: after 6 s of silence, which is less than
/// the default deadline of a send (10 s).
const PING: Duration = Duration::from_secs(2);

/// The library's own limits, which must never be the first to be reached: the relay bounds what is in flight, and each
/// delivery has a deadline.
const MOST_IN_FLIGHT: usize = 1_000_000;
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Subjects denied between two looks at the channel at most; what is missed runs into its deadline.
const DENIALS: usize = 256;

/// How long the last messages may take on their way out when the transport is closed.
const CLOSE: Duration = Duration::from_secs(5);

/// Where connections come from.
#[derive(Debug)]
pub(crate) struct Link {
    settings: NatsSettings,
    /// The servers as they may be shown.
    pub(crate) servers: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    current: Option<Arc<Connection>>,
    /// When the last try ended that failed, and why.
    failed: Option<(Instant, String)>,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) context: jetstream::Context,
    /// Why it is lost, as soon as it is.
    lost: watch::Receiver<Option<String>>,
    denied: broadcast::Sender<Denied>,
}

/// The server lets this account not publish to this subject.
#[derive(Debug, Clone)]
pub(crate) struct Denied(pub(crate) String);

impl Connection {
    /// Resolves with the reason when the connection is lost.
    pub(crate) async fn lost(&self) -> String {
        let mut lost = self.lost.clone();
        match lost.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => "the client library ended".into(),
        }
    }

    /// Denials from now on.
    pub(crate) fn denials(&self) -> broadcast::Receiver<Denied> {
        self.denied.subscribe()
    }

    fn is_lost(&self) -> bool {
        self.lost.borrow().is_some() || self.lost.has_changed().is_err()
    }
}

impl Link {
    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Config`] lists every problem.
    pub(crate) fn new(settings: NatsSettings) -> Result<Self, Error> {
        let problems = settings.problems();
        if !problems.is_empty() {
            let all: Vec<_> = problems.iter().map(|(field, why)| format!("{field}: {why}")).collect();
            return Err(Error::Config(all.join("; ")));
        }
        let servers = settings.servers().map_err(Error::Config)?.shown();
        Ok(Self { settings, servers, state: Mutex::default() })
    }

    /// The connection that stands, or a new one.
    ///
    /// # Errors
    /// Why there is none, as people will read it.
    pub(crate) async fn get(&self) -> Result<Arc<Connection>, String> {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(connection) = state.current.as_ref().filter(|c| !c.is_lost()) {
            return Ok(connection.clone());
        }
        // Those that waited while another tried have their answer too.
        if let Some((at, why)) = &state.failed
            && *at >= asked
        {
            return Err(why.clone());
        }
        state.current = None;
        match self.connect().await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                state.current = Some(connection.clone());
                Ok(connection)
            }
            Err(why) => {
                state.failed = Some((Instant::now(), why.clone()));
                Err(why)
            }
        }
    }

    /// Uses this connection for nothing new.
    pub(crate) async fn retire(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock().await;
        if state.current.as_ref().is_some_and(|c| Arc::ptr_eq(c, connection)) {
            state.current = None;
        }
    }

    pub(crate) async fn close(&self) {
        let Some(connection) = self.state.lock().await.current.take() else { return };
        let client = connection.context.client();
        let flushed = tokio::time::timeout(CLOSE, async {
            client.flush().await.map_err(|e| e.to_string())?;
            client.drain().await.map_err(|e| e.to_string())
        });
        if let Ok(Err(e)) = flushed.await {
            tracing::debug!(servers = self.servers, error = e, "the connection was closed without a flush");
        }
    }

    async fn connect(&self) -> Result<Connection, String> {
        let Servers { addresses, login } = self.settings.servers()?;
        let (lose, lost) = watch::channel(None);
        let (denied, _) = broadcast::channel(DENIALS);
        let deny = denied.clone();
        let servers = self.servers.clone();
        let mut options = ConnectOptions::new()
            .name("posthouse")
            .client_capacity(BUFFER)
            .connection_timeout(self.settings.connect_timeout)
            .ping_interval(PING)
            // Each server once at the start; after a loss, which ends this connection for us, no more than that.
            .max_reconnects(addresses.len())
            .ignore_discovered_servers()
            .event_callback(move |event| {
                on_event(event, &servers, &lose, &deny);
                std::future::ready(())
            });
        options = match login {
            Some(Login::Token(token)) => options.token(token),
            Some(Login::Password { user, password }) => options.user_and_password(user, password),
            None => options,
        };
        if let Some(file) = &self.settings.credentials {
            let read = options.credentials_file(file).await;
            options = read.map_err(|e| format!("can't read the credentials file {}: {e}", file.display()))?;
        }
        if let Some(file) = &self.settings.ca_file {
            // Without TLS, as a nats:// url lets the server choose, nobody would check who it is.
            options = options.add_root_certificates(file.clone()).require_tls(true);
        }
        // Name lookup has no limit of its own.
        let limit = self.settings.connect_timeout * addresses.len() as u32;
        let client = match tokio::time::timeout(limit, options.connect(addresses)).await {
            Ok(Ok(client)) => client,
            Ok(Err(e)) => return Err(self.explain(&e)),
            Err(_) => return Err(format!("can't connect to {} within {limit:?} (connect_timeout)", self.servers)),
        };
        let context = ContextBuilder::new().max_ack_inflight(MOST_IN_FLIGHT).timeout(LONGEST_WAIT).build(client);
        Ok(Connection { context, lost, denied })
    }

    fn explain(&self, e: &ConnectError) -> String {
        let servers = &self.servers;
        let cause = std::iter::successors(e.source(), |&e| e.source()).last().map(ToString::to_string).unwrap_or_default();
        let cause = storable(&cause, 300);
        match e.kind() {
            ConnectErrorKind::AuthorizationViolation => {
                format!(
                    "{servers} refused the user, password, token or credentials; correct them in the settings of the nats transport"
                )
            }
            ConnectErrorKind::Authentication => {
                format!("can't sign in to {servers}: {cause}; check the credentials file of the nats transport")
            }
            ConnectErrorKind::Dns => format!("can't connect to {servers}: the name was not found: {cause}"),
            ConnectErrorKind::Tls => format!("can't connect to {servers}: TLS failed: {cause}; correct ca_file, or give one"),
            ConnectErrorKind::TimedOut => {
                format!("can't connect to {servers}: no connection within {:?} (connect_timeout)", self.settings.connect_timeout)
            }
            // Also what a TLS handshake failed of.
            _ => format!("can't connect to {servers}: {}", tls::explain(&cause)),
        }
    }
}

fn on_event(event: Event, servers: &str, lose: &watch::Sender<Option<String>>, denied: &broadcast::Sender<Denied>) {
    let lose = |why: String| {
        // The first reason is the best.
        lose.send_if_modified(|lost| {
            let first = lost.is_none();
            if first {
                *lost = Some(why);
            }
            first
        });
    };
    match event {
        Event::Disconnected | Event::Closed => lose(format!("the connection to {servers} was lost")),
        Event::ServerError(ServerError::Other(text)) => match denied_subject(&text) {
            Some(subject) => drop(denied.send(Denied(subject.to_owned()))),
            // Without its inbox neither acknowledgements nor messages arrive.
            None if text.to_ascii_lowercase().starts_with("permissions violation for subscription") => {
                lose(format!(
                    "{servers} sends no acknowledgements and messages to this user ({}); let it subscribe to _INBOX.>",
                    storable(&text, 300)
                ));
            }
            // A disconnect follows where one is due.
            None => tracing::warn!(servers, error = storable(&text, 300), "the NATS server reports an error"),
        },
        _ => {}
    }
}

/// The subject of `Permissions Violation for Publish to "subject"`.
fn denied_subject(text: &str) -> Option<&str> {
    let start = "permissions violation for publish to";
    let rest = text.get(..start.len()).filter(|s| s.eq_ignore_ascii_case(start)).and(text.get(start.len()..))?;
    rest.trim().strip_prefix('"')?.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_denied_subject_is_read() {
        assert_eq!(denied_subject("Permissions Violation for Publish to \"a.b\""), Some("a.b"));
        assert_eq!(denied_subject("Permissions Violation for Publish to \"a.b\" using reply"), Some("a.b"));
        assert_eq!(denied_subject("Permissions Violation for Subscription to \"a.b\""), None);
        assert_eq!(denied_subject("ä"), None);
    }
}
