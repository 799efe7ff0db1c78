//! What messages are sent to: a place of its own in each kind of receiver, and the raw loop that sets the limit.

mod http;
mod kafka;
mod nats;
mod rabbitmq;

use clap::ValueEnum;
use posthouse::transport::Transport;

pub(crate) use self::http::Http;
pub(crate) use self::kafka::Kafka;
pub(crate) use self::nats::Nats;
pub(crate) use self::rabbitmq::RabbitMq;
use crate::database::{HOW_TO_SET, Kind};
use crate::meter::{Meter, Spent, Thread};
use crate::report::Report;

/// The kinds of receivers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum To {
    Rabbitmq,
    Kafka,
    Nats,
    /// A small server inside the bench.
    Http,
}

impl To {
    /// The variable that names the server.
    fn variable(self) -> Option<&'static str> {
        match self {
            To::Rabbitmq => Some(rabbitmq::VARIABLE),
            To::Kafka => Some(kafka::VARIABLE),
            To::Nats => Some(nats::VARIABLE),
            To::Http => None,
        }
    }
}

/// Whether a server is named; says so when it isn't.
fn is_named(name: &str, variable: Option<&'static str>, report: &mut Report) -> bool {
    let missing = variable.filter(|variable| std::env::var_os(variable).is_none());
    if let Some(variable) = missing {
        report.skip(format!("{name}: {variable} is not set; {HOW_TO_SET}"));
    }
    missing.is_none()
}

/// The receivers to measure; says which are left out because nothing names their server.
pub(crate) fn named(to: Option<To>, report: &mut Report) -> Vec<To> {
    let to = to.map_or_else(|| To::value_variants().to_vec(), |to| vec![to]);
    let name = |to: To| to.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
    to.into_iter().filter(|to| is_named(&name(*to), to.variable(), report)).collect()
}

/// The databases and receivers to measure, likewise.
pub(crate) fn pairs(from: &[Kind], to: Option<To>, report: &mut Report) -> Vec<(Kind, To)> {
    let from: Vec<_> = from.iter().copied().filter(|kind| is_named(kind.name(), kind.variable(), report)).collect();
    let to = named(to, report);
    from.iter().flat_map(|from| to.iter().map(|to| (*from, *to))).collect()
}

/// Messages for a raw loop, the same as those that Posthouse sends, headers included.
#[derive(Debug, Clone)]
pub(crate) struct Load {
    pub(crate) n: usize,
    pub(crate) payload: Vec<u8>,
    /// Distinct keys; None: messages have no key.
    pub(crate) keys: Option<usize>,
    /// How many may be unconfirmed at a time.
    pub(crate) in_flight: usize,
    /// Tells this load's message ids from another's.
    run: u32,
}

/// The content type of a [`posthouse::Message`] made with `payload`.
const CONTENT_TYPE: &str = "application/octet-stream";

impl Load {
    pub(crate) fn new(n: usize, payload: usize, keys: Option<usize>, in_flight: usize) -> Self {
        Self { n, payload: vec![b'x'; payload], keys, in_flight, run: fastrand::u32(..) }
    }

    /// The id of a message, as long as one that Posthouse makes.
    fn id(&self, n: usize) -> String {
        format!("{:08x}-0000-7000-8000-{n:012x}", self.run)
    }

    fn key(&self, n: usize) -> Option<String> {
        self.keys.map(|keys| (n % keys).to_string())
    }
}

/// A kind of receiver.
pub(crate) trait Receiver: Sized {
    /// What it is called.
    const NAME: &'static str;
    /// The name of the transport, and so the scheme of its addresses.
    const SCHEME: &'static str;
    /// Messages per round where nothing else is said.
    const MESSAGES: usize = 100_000;
    type Transport: Transport;

    /// Makes a queue, topic, stream or server of its own.
    async fn prepare() -> Self;
    /// What a route's `to` says.
    fn to(&self) -> String;
    fn transport(&self) -> Self::Transport;
    /// Publishes everything and waits until everything is confirmed. One message before, which isn't measured, makes the
    /// connection.
    async fn publish(&self, load: &Load) -> Spent;
    /// How many messages have arrived since [`clear`](Self::clear).
    async fn arrived(&self) -> usize;
    /// Removes what has arrived.
    async fn clear(&mut self);
    /// Its thread in this process, whose CPU time isn't ours.
    fn thread(&self) -> Option<Thread> {
        None
    }
    /// Removes what [`prepare`](Self::prepare) made.
    async fn remove(self);

    fn meter(&self) -> Meter {
        Meter::start(self.thread())
    }
}
