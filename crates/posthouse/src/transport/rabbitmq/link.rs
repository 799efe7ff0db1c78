//! The connection: made when it is needed, shared by all that asks for it, given up when the broker is silent. Consumers have
//! one of their own each.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::tcp::{AMQPUriTcpExt, RustlsConnector, RustlsConnectorConfig, TLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{AsyncTcpStream, Channel, Connection, ConnectionProperties, ErrorKind, Event};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::RabbitMqSettings;
use crate::Error;
use crate::transport::tls;

/// After a failed connect none is tried for this long, twice as long after the next, at most [`BACKOFF_CAP`]; who asks
/// meanwhile gets the error of the one before. The relay's breaker waits longer for each destination; this bounds what many
/// destinations do together.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_CAP: Duration = Duration::from_secs(2);

/// How long a polite close may take.
const CLOSE: Duration = Duration::from_secs(2);

/// Makes and keeps one connection.
pub(crate) struct Link {
    settings: RabbitMqSettings,
    uri: AMQPUri,
    live: Mutex<Option<Arc<Live>>>,
    dial: tokio::sync::Mutex<Dial>,
}

/// What is known of connects that failed.
#[derive(Default)]
struct Dial {
    failures: u32,
    last: Option<(Instant, String)>,
}

/// One connection.
pub(crate) struct Live {
    connection: Connection,
    socket: Socket,
    state: Arc<Mutex<Signs>>,
    events: JoinHandle<()>,
}

/// What the broker has let know.
#[derive(Default)]
struct Signs {
    /// Why it takes nothing (`connection.blocked`), and since when.
    blocked: Option<(String, Instant)>,
    last_confirm: Option<Instant>,
    /// Its `max_message_size`, known once it has refused a message: AMQP has no way to ask for it.
    max_message_size: Option<usize>,
}

impl Link {
    /// Doesn't connect.
    ///
    /// # Errors
    /// [`Error::Config`] with every problem of the settings.
    pub(crate) fn new(settings: RabbitMqSettings) -> Result<Self, Error> {
        let problems = settings.problems();
        if !problems.is_empty() {
            let all: Vec<_> = problems.iter().map(|(field, why)| format!("{field}: {why}")).collect();
            return Err(Error::Config(all.join("; ")));
        }
        let uri = settings.uri().map_err(|why| Error::Config(format!("url: {why}")))?;
        Ok(Self { settings, uri, live: Mutex::default(), dial: Default::default() })
    }

    /// `host:port`, for error texts.
    pub(crate) fn broker(&self) -> String {
        let authority = &self.uri.authority;
        match authority.host.contains(':') {
            true => format!("RabbitMQ at [{}]:{}", authority.host, authority.port),
            false => format!("RabbitMQ at {}:{}", authority.host, authority.port),
        }
    }

    pub(crate) fn vhost(&self) -> &str {
        &self.uri.vhost
    }

    /// Deadline of a call on the connection.
    pub(crate) fn call_timeout(&self) -> Duration {
        self.settings.connect_timeout
    }

    /// Why the broker takes nothing, and since when.
    pub(super) fn blocked(&self) -> Option<(String, Instant)> {
        self.current().and_then(|live| live.signs().blocked.clone())
    }

    fn current(&self) -> Option<Arc<Live>> {
        locked(&self.live).clone().filter(|live| live.is_up())
    }

    /// The connection, which is made if there is none. Those who ask at the same time wait for one attempt and share its error.
    ///
    /// # Errors
    /// Why there is none: the broker is unavailable.
    pub(crate) async fn live(&self) -> Result<Arc<Live>, String> {
        if let Some(live) = self.current() {
            return Ok(live);
        }
        let asked = Instant::now();
        let mut dial = self.dial.lock().await;
        if let Some(live) = self.current() {
            return Ok(live);
        }
        let backoff = (BACKOFF_FIRST * 2u32.pow(dial.failures.saturating_sub(1).min(10))).min(BACKOFF_CAP);
        if let Some((at, why)) = &dial.last
            && (*at >= asked || at.elapsed() < backoff)
        {
            return Err(why.clone());
        }
        match self.connect().await {
            Ok(live) => {
                *dial = Dial::default();
                tracing::debug!(broker = self.broker(), "connected");
                *locked(&self.live) = Some(live.clone());
                Ok(live)
            }
            Err(why) => {
                dial.failures = dial.failures.saturating_add(1);
                dial.last = Some((Instant::now(), why.clone()));
                Err(why)
            }
        }
    }

    async fn connect(&self) -> Result<Arc<Live>, String> {
        let broker = self.broker();
        let mut uri = self.uri.clone();
        uri.query.heartbeat = Some(u16::try_from(self.settings.heartbeat.as_secs()).unwrap_or(u16::MAX));
        let tls = match uri.scheme {
            AMQPScheme::AMQP => None,
            AMQPScheme::AMQPS => Some(self.tls().map_err(|why| format!("can't connect to {broker}: {why}"))?),
        };
        let properties = ConnectionProperties::default()
            .with_connection_name(self.settings.connection_name.as_str().into())
            .with_client_property("product".into(), "posthouse".into())
            .with_client_property("version".into(), env!("CARGO_PKG_VERSION").into());
        let runtime = lapin::runtime::default_runtime().map_err(|e| e.to_string())?;

        // lapin's thread would wait for ever for a broker that takes the connection and says nothing. The socket is ours as
        // well, and is shut down when it is dropped, however this ends.
        let socket = Socket::default();
        let opened = socket.clone();
        let limit = self.settings.connect_timeout;
        let open = Connection::connector(
            uri,
            runtime,
            async move |uri: AMQPUri, runtime| {
                let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
                let dialled = timeout(limit, plain.connect_with_config_async(TLSConfig::default(), &runtime)).await;
                let stream = dialled.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                if let AsyncTcpStream::Plain(stream) = &stream {
                    stream.get_ref().set_nodelay(true)?;
                    opened.keep(try_clone(stream.get_ref())?);
                }
                match &tls {
                    None => Ok(stream),
                    Some(tls) => Ok(stream.into_rustls(tls, &uri.authority.host).await?),
                }
            },
            properties,
        );
        let connection = match timeout(limit, open).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(e)) => {
                socket.shut();
                return Err(self.refused(&e));
            }
            Err(_) => {
                socket.shut();
                return Err(format!("{broker} did not complete the connection within {limit:?} (connect_timeout)"));
            }
        };
        let state = Arc::new(Mutex::new(Signs::default()));
        let mut listener = Box::pin(connection.events_listener());
        let signs = state.clone();
        let events = tokio::spawn(async move {
            while let Some(event) = listener.next().await {
                match event {
                    Event::ConnectionBlocked(reason) => {
                        tracing::warn!(broker, reason, "the broker blocks publishing");
                        locked(&signs).blocked = Some((reason, Instant::now()));
                    }
                    Event::ConnectionUnblocked => {
                        tracing::info!(broker, "the broker takes messages again");
                        locked(&signs).blocked = None;
                    }
                    _ => {}
                }
            }
        });
        Ok(Arc::new(Live { connection, socket, state, events }))
    }

    /// Whom to trust. With a `ca_file` the system's certificates aren't looked for: there may be none.
    fn tls(&self) -> Result<RustlsConnector, String> {
        let trusted = match self.settings.certificates().map_err(|why| format!("ca_file {why}"))? {
            Some(certificates) => RustlsConnectorConfig::default().with_parsable_certificates(certificates),
            None => RustlsConnectorConfig::new_with_native_certs()
                .map_err(|e| format!("the system's certificates can't be read ({e}); name those to trust as ca_file"))?,
        };
        trusted.connector_with_no_client_auth().map_err(|e| e.to_string())
    }

    /// Why there is no connection, in words.
    fn refused(&self, error: &lapin::Error) -> String {
        let broker = self.broker();
        match error.kind() {
            ErrorKind::ProtocolError(e) if e.get_id() == 403 => format!(
                "{broker} refused the login of user {:?}: {}; correct user and password in the url",
                self.uri.authority.userinfo.username,
                e.get_message()
            ),
            ErrorKind::ProtocolError(e) => format!(
                "{broker} refused the virtual host {:?}: {}; create it and grant the user access, or correct the url",
                self.uri.vhost,
                e.get_message()
            ),
            ErrorKind::IOError(e) => match e.kind() {
                io::ErrorKind::ConnectionRefused => format!("{broker} refused the connection; is it running, and on this port?"),
                io::ErrorKind::TimedOut => {
                    format!("{broker} can't be reached within {:?} (connect_timeout)", self.settings.connect_timeout)
                }
                io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => format!(
                    "{broker} closed the connection during the handshake ({e}); it may be starting or stopping, or not speak {}",
                    self.uri.scheme
                ),
                _ if e.to_string().contains("lookup address") => {
                    format!("the host name {:?} of RabbitMQ can't be resolved ({e}); correct the url", self.uri.authority.host)
                }
                _ => format!("can't connect to {broker}: {}", tls::explain(&e.to_string())),
            },
            // A TLS listener answers with an alert, if it doesn't just hang up.
            ErrorKind::ParsingError(_) => {
                format!("{broker} does not speak {} on this port; correct the url, perhaps to amqps://", self.uri.scheme)
            }
            _ => format!("can't connect to {broker}: {error}"),
        }
    }

    /// Closes politely, within a deadline.
    pub(crate) async fn close(&self) {
        let live = locked(&self.live).take();
        if let Some(live) = live
            && live.is_up()
        {
            // Dropping what is left shuts the socket down, so nothing is lost by not waiting longer.
            let _ = timeout(CLOSE, live.connection.close(200, "OK".into())).await;
        }
    }
}

impl Live {
    pub(super) fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// Bytes that fit into one frame.
    pub(super) fn frame_max(&self) -> usize {
        self.connection.configuration().frame_max() as usize
    }

    pub(crate) async fn open_channel(&self) -> lapin::Result<Channel> {
        self.connection.create_channel().await
    }

    pub(super) fn confirmed(&self) {
        self.signs().last_confirm = Some(Instant::now());
    }

    pub(super) fn max_message_size(&self) -> Option<usize> {
        self.signs().max_message_size
    }

    pub(super) fn set_max_message_size(&self, bytes: usize) {
        self.signs().max_message_size = Some(bytes);
    }

    /// A confirmation that is long overdue: if there was no other on the whole connection since `sent`, the peer may have
    /// vanished without a word, and the next message shall find out on a new connection instead of waiting for heartbeats.
    pub(super) fn give_up_if_silent_since(&self, sent: Instant) {
        if self.signs().last_confirm.is_none_or(|at| at < sent) {
            tracing::warn!("no confirmation from RabbitMQ: the connection is given up");
            self.socket.shut();
        }
    }

    /// Cuts it off: the broker takes back at once, and all together, what was unacknowledged on it.
    pub(crate) fn cut(&self) {
        self.socket.shut();
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        locked(&self.state)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.events.abort();
        self.socket.shut();
    }
}

/// A second handle to the connection's socket.
#[derive(Clone, Default)]
struct Socket(Arc<Mutex<(Option<TcpStream>, bool)>>);

impl Socket {
    fn keep(&self, stream: TcpStream) {
        let mut slot = locked(&self.0);
        if slot.1 {
            let _ = stream.shutdown(Shutdown::Both);
        }
        slot.0 = Some(stream);
    }

    /// Ends lapin's thread, which sees the connection closed. It may be already.
    fn shut(&self) {
        let mut slot = locked(&self.0);
        slot.1 = true;
        if let Some(stream) = &slot.0 {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(unix)]
fn try_clone(stream: &tokio::net::TcpStream) -> io::Result<TcpStream> {
    use std::os::fd::AsFd;
    Ok(stream.as_fd().try_clone_to_owned()?.into())
}

#[cfg(windows)]
fn try_clone(stream: &tokio::net::TcpStream) -> io::Result<TcpStream> {
    use std::os::windows::io::AsSocket;
    Ok(stream.as_socket().try_clone_to_owned()?.into())
}

/// A panic elsewhere leaves nothing half done here.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
