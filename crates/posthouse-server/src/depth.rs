//! How much waits in brokers behind the relay: queues of RabbitMQ, lag of Kafka's consumer groups, pending messages of NATS
//! consumers. Looked at now and then in the background, so that nobody who asks waits for a broker.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
#[cfg(feature = "kafka")]
use posthouse::transport::KafkaLag;
#[cfg(feature = "nats")]
use posthouse::transport::NatsPending;
#[cfg(feature = "rabbitmq")]
use posthouse::transport::RabbitMqQueues;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use crate::config::{Config, TransportConfig, Watched};
use crate::failure::Failure;
use crate::http::Served;

/// How often each is looked at.
const PERIOD: Duration = Duration::from_secs(15);

/// Questions to one broker at a time.
const AT_ONCE: usize = 4;

/// How long connections may take to end.
const CLOSE: Duration = Duration::from_secs(3);

/// What waits in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Depth {
    /// The name of its transport.
    pub(crate) transport: String,
    /// `rabbitmq`, `kafka` or `nats`.
    pub(crate) kind: &'static str,
    /// The queue, topic or stream.
    pub(crate) name: String,
    /// Who receives from it: Kafka's group, the durable consumer of NATS. None for queues.
    pub(crate) group: Option<String>,
    /// How many messages wait. None: not known, see `error`.
    pub(crate) messages: Option<u64>,
    /// How many receive from it at the moment, where the broker says so.
    pub(crate) consumers: Option<u64>,
    /// Why it isn't known.
    pub(crate) error: Option<String>,
    /// When it was looked at last. None: not yet.
    pub(crate) at: Option<Instant>,
}

/// What was found last.
#[derive(Debug, Default)]
pub(crate) struct Depths(Mutex<Vec<Depth>>);

impl Depths {
    /// Everything that is watched, in a lasting order.
    pub(crate) fn all(&self) -> Vec<Depth> {
        self.list().clone()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Depth>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self, place: usize, told: Told) {
        let mut list = self.list();
        let Some(depth) = list.get_mut(place) else { return };
        let Depth { transport, name, group, .. } = &*depth;
        let (found, error) = match told {
            Ok(found) => (Some(found), None),
            Err(why) => (None, Some(why)),
        };
        match (&depth.error, &error) {
            (None, Some(why)) => tracing::warn!(transport, name, group, error = why, "what waits there can't be told"),
            (Some(_), None) => tracing::info!(transport, name, group, "what waits there can be told again"),
            _ => {}
        }
        depth.messages = found.map(|(messages, _)| messages);
        depth.consumers = found.and_then(|(_, consumers)| consumers);
        depth.error = error;
        depth.at = Some(Instant::now());
    }
}

/// How many wait, and how many receive, where that is known; or why it can't be told.
type Told = Result<(u64, Option<u64>), String>;

/// Asks one broker, on connections of its own.
trait Asks: Send + Sync {
    fn ask<'a>(&'a self, watched: &'a Watched) -> BoxFuture<'a, Told>;
    fn close(&self) -> BoxFuture<'_, ()>;
}

#[cfg(feature = "rabbitmq")]
impl Asks for RabbitMqQueues {
    fn ask<'a>(&'a self, watched: &'a Watched) -> BoxFuture<'a, Told> {
        Box::pin(async { self.waiting(&watched.name).await.map(|w| (w.messages, w.consumers)) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(RabbitMqQueues::close(self))
    }
}

#[cfg(feature = "kafka")]
impl Asks for KafkaLag {
    fn ask<'a>(&'a self, watched: &'a Watched) -> BoxFuture<'a, Told> {
        let group = watched.group.as_deref().unwrap_or_default();
        Box::pin(async move { self.waiting(group, &watched.name).await.map(|w| (w.messages, w.consumers)) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(KafkaLag::close(self))
    }
}

#[cfg(feature = "nats")]
impl Asks for NatsPending {
    fn ask<'a>(&'a self, watched: &'a Watched) -> BoxFuture<'a, Told> {
        let consumer = watched.group.as_deref().unwrap_or_default();
        Box::pin(async move { self.waiting(&watched.name, consumer).await.map(|w| (w.messages, w.consumers)) })
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(NatsPending::close(self))
    }
}

/// None: it isn't a broker.
fn asks(settings: &TransportConfig) -> Result<Option<Arc<dyn Asks>>, posthouse::Error> {
    Ok(match settings {
        TransportConfig::Http(_) => None,
        #[cfg(feature = "rabbitmq")]
        TransportConfig::RabbitMq(settings) => Some(Arc::new(RabbitMqQueues::new(settings.clone())?)),
        #[cfg(feature = "kafka")]
        TransportConfig::Kafka(settings) => Some(Arc::new(KafkaLag::new(settings.clone())?)),
        #[cfg(feature = "nats")]
        TransportConfig::Nats(settings) => Some(Arc::new(NatsPending::new(settings.clone())?)),
    })
}

/// Looks at everything that is watched, each broker in a task of its own: one that doesn't answer holds up no other.
pub(crate) struct Watching {
    tasks: JoinSet<()>,
    brokers: Vec<Arc<dyn Asks>>,
}

impl Watching {
    /// Connects to nothing where nothing is watched.
    pub(crate) fn start(config: &Config, served: &Arc<Served>) -> Result<Self, Failure> {
        let mut out = Self { tasks: JoinSet::new(), brokers: Vec::new() };
        for (transport, watched) in &config.watch {
            let Some(settings) = config.transports.get(transport) else { continue };
            let asking = asks(settings).map_err(|e| Failure::of(&format!("watch of transport {transport:?}"), &e))?;
            let Some(asking) = asking.filter(|_| !watched.is_empty()) else { continue };
            let mut list = served.depths.list();
            let first = list.len();
            list.extend(watched.iter().map(|w| Depth {
                transport: transport.clone(),
                kind: settings.kind(),
                name: w.name.clone(),
                group: w.group.clone(),
                messages: None,
                consumers: None,
                error: None,
                at: None,
            }));
            drop(list);
            let watched: Vec<(usize, Watched)> = (first..).zip(watched.iter().cloned()).collect();
            out.brokers.push(asking.clone());
            out.tasks.spawn(watch(asking, watched, served.clone()));
        }
        Ok(out)
    }

    /// Ends it all.
    pub(crate) async fn stop(mut self) {
        self.tasks.shutdown().await;
        let closing = futures_util::future::join_all(self.brokers.iter().map(|broker| broker.close()));
        // What is left ends with the process.
        let _ = tokio::time::timeout(CLOSE, closing).await;
    }
}

async fn watch(asking: Arc<dyn Asks>, watched: Vec<(usize, Watched)>, served: Arc<Served>) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Each answer comes within its own deadline.
        let all = futures_util::stream::iter(&watched);
        all.for_each_concurrent(AT_ONCE, async |(place, watched)| served.depths.found(*place, asking.ask(watched).await)).await;
    }
}
