//! Settings that an embedded relay and the server's configuration file share.

mod adopted;
mod cloudevents;
#[cfg(feature = "inbox")]
mod consumer;
mod group;
#[cfg(feature = "inbox")]
mod inbox;
mod or_never;
mod rabbitmq;
mod retention;

use std::time::Duration;

pub use adopted::{Adopted, AdoptedNotify, AdoptedPayload, AdoptedPreset, AdoptedState, StateCode};
#[cfg(feature = "relay")]
pub(crate) use adopted::{Part, Template};
pub use cloudevents::{CloudEvents, CloudEventsMode};
#[cfg(feature = "inbox")]
pub use consumer::{ConsumerOrder, ConsumerSettings, IdFrom};
pub use group::{Group, Houses, Misfire, Trigger, WhenBusy};
#[cfg(feature = "inbox")]
pub use inbox::{InboxSettings, MissingId};
pub use rabbitmq::{ExchangeType, QueueType, RabbitMqRoute};
pub use retention::{ArchiveFormat, RetentionSettings, S3Settings};
#[cfg(feature = "archive")]
pub(crate) use retention::{ArchivePlace, place};
use serde::{Deserialize, Serialize};

/// Where messages of one destination name go, and how.
///
/// Used under `[routes."name"]` in the configuration file and by [`RelayBuilder::route`](crate::RelayBuilder::route).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Route {
    /// `transport:address`; empty means that the destination name is itself an address.
    pub to: String,
    /// When and how often to try again.
    pub retry: Retry,
    /// Whether a key's messages wait for each other.
    pub ordering: Ordering,
    /// What a message that used up its attempts does to the later ones of its key.
    pub on_exhausted: OnExhausted,
    /// How many messages may be in flight to this destination from one instance. 1 to 10 000; by default what suits the
    /// transport ([`Transport::concurrency`](crate::transport::Transport::concurrency): 32 for `http` and `local`).
    pub concurrency: Option<u32>,
    /// At most this many sends per second from one instance; unlimited when absent.
    pub rate: Option<f64>,
    /// Send as CloudEvents 1.0; absent: the payload as it is.
    pub cloudevents: Option<CloudEvents>,
    /// HTTP request details; used by the `http` transport alone.
    pub http: HttpRoute,
    /// RabbitMQ message properties and topology; used by the `rabbitmq` transport alone.
    pub rabbitmq: RabbitMqRoute,
}

impl Route {
    /// A route to `transport:address` with every setting at its default.
    pub fn to(address: impl Into<String>) -> Self {
        Self { to: address.into(), ..Self::default() }
    }

    /// Sets when and how often to try again.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// Sets what exhaustion does to the key's queue.
    pub fn on_exhausted(mut self, then: OnExhausted) -> Self {
        self.on_exhausted = then;
        self
    }

    /// Sets the ordering of keyed messages.
    pub fn ordering(mut self, ordering: Ordering) -> Self {
        self.ordering = ordering;
        self
    }

    /// Sets how many messages may be in flight.
    pub fn concurrency(mut self, n: u32) -> Self {
        self.concurrency = Some(n);
        self
    }

    /// Limits sends per second.
    pub fn rate(mut self, per_second: f64) -> Self {
        self.rate = Some(per_second);
        self
    }

    /// Sets the HTTP request details.
    pub fn http(mut self, http: HttpRoute) -> Self {
        self.http = http;
        self
    }

    /// Sends as CloudEvents.
    pub fn cloudevents(mut self, cloudevents: CloudEvents) -> Self {
        self.cloudevents = Some(cloudevents);
        self
    }

    /// Sets RabbitMQ message properties and topology.
    pub fn rabbitmq(mut self, rabbitmq: RabbitMqRoute) -> Self {
        self.rabbitmq = rabbitmq;
        self
    }

    /// What is wrong with these settings, each with the field's path below the route.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = self.retry.problems();
        if let Some(n) = self.concurrency
            && !(1..=10_000).contains(&n)
        {
            out.push(("concurrency".into(), format!("{n}, must be 1 to 10000")));
        }
        if let Some(rate) = self.rate
            && !(rate.is_finite() && rate > 0.0)
        {
            out.push(("rate".into(), format!("{rate}, must be more than 0 per second")));
        }
        out.extend(self.cloudevents.iter().flat_map(CloudEvents::problems));
        let structured = self.cloudevents.as_ref().is_some_and(|c| c.mode == CloudEventsMode::Structured);
        if structured && self.http.content_type.is_some() {
            let why =
                "can't be set where cloudevents.mode is structured, which has a content type of its own; remove one of the two";
            out.push(("http.content_type".into(), why.into()));
        }
        out.extend(self.http.problems());
        out.extend(self.rabbitmq.problems());
        out
    }
}

/// Exponential back-off with jitter and a cap, and an attempt limit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Retry {
    /// A message is FAILED after this many failed attempts. 1 to 10 000; 10 by default.
    pub max_attempts: u32,
    /// Wait after the first failure. 1 s by default.
    #[serde(with = "humantime_serde")]
    pub base: Duration,
    /// Each wait is this many times the one before. 2 by default.
    pub factor: f64,
    /// Never wait longer than this. 10 min by default.
    #[serde(with = "humantime_serde")]
    pub cap: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Self { max_attempts: 10, base: Duration::from_secs(1), factor: 2.0, cap: Duration::from_secs(600) }
    }
}

impl Retry {
    /// Gives up after `max_attempts`, waiting `base` at first and `cap` at most.
    pub fn new(max_attempts: u32, base: Duration, cap: Duration) -> Self {
        Self { max_attempts, base, cap, ..Self::default() }
    }

    /// The wait after the `failed`-th failed attempt (from 1), for a `roll` drawn evenly from [0, 1).
    ///
    /// "Equal jitter": half of the exponential wait is fixed, half is random, so that retries neither come at once
    /// nor in step. See "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    pub fn wait(&self, failed: u32, roll: f64) -> Duration {
        let exponent = f64::from(failed.saturating_sub(1).min(1_000));
        let full = (self.base.as_secs_f64() * self.factor.powf(exponent)).min(self.cap.as_secs_f64());
        Duration::from_secs_f64(full * (0.5 + 0.5 * roll))
    }

    fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        if !(1..=crate::message::MAX_ATTEMPTS).contains(&self.max_attempts) {
            out.push((
                "retry.max_attempts".into(),
                format!("{}, must be 1 to {}", self.max_attempts, crate::message::MAX_ATTEMPTS),
            ));
        }
        if self.base.is_zero() || self.base > self.cap {
            out.push((
                "retry.base".into(),
                format!("{:?}, must be more than 0 and at most retry.cap ({:?})", self.base, self.cap),
            ));
        }
        if self.cap > Duration::from_secs(30 * 86400) {
            out.push(("retry.cap".into(), format!("{:?}, must be at most 30 days", self.cap)));
        }
        if !(self.factor >= 1.0 && self.factor <= 100.0) {
            out.push(("retry.factor".into(), format!("{}, must be 1 to 100", self.factor)));
        }
        out
    }
}

/// Whether the messages of a key wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Ordering {
    /// A keyed message is sent when every earlier one of its key has been confirmed.
    #[default]
    Strict,
    /// A key's messages are sent one behind the other without waiting for confirmations, where the transport keeps their
    /// order and lets none overtake one that was refused (`kafka` does; for others it is an error at the start).
    Pipelined,
    /// Keys are sent along, but nothing waits.
    None,
}

/// What a FAILED message does to the later ones of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnExhausted {
    /// They wait until a person requeues or skips the failed one.
    #[default]
    Block,
    /// The failed one leaves its key's queue and they go on.
    Skip,
}

/// How the `http` transport makes the request of one route.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HttpRoute {
    /// Request method. `POST` by default.
    pub method: String,
    /// Overrides the message's content type.
    pub content_type: Option<String>,
    /// Value of the `Authorization` header (secret: never shown).
    pub authorization: Option<String>,
    /// Headers set on each request, before those of the message.
    pub headers: std::collections::BTreeMap<String, String>,
    /// Keys that sign each request as Standard Webhooks describes (`whsec_` and Base64 of 24 to 64 bytes; secret: never
    /// shown). With two, both sign, so that a receiver can change from one to the other. None by default: not signed.
    pub signing_keys: Vec<String>,
}

impl Default for HttpRoute {
    fn default() -> Self {
        Self {
            method: "POST".into(),
            content_type: None,
            authorization: None,
            headers: Default::default(),
            signing_keys: Vec::new(),
        }
    }
}

/// Signing keys of a route at most: one in use, one to change to, and some room.
const SIGNING_KEYS: usize = 5;

impl HttpRoute {
    fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        if self.signing_keys.len() > SIGNING_KEYS {
            out.push(("http.signing_keys".into(), format!("{} keys, must be at most {SIGNING_KEYS}", self.signing_keys.len())));
        }
        for (n, key) in self.signing_keys.iter().enumerate() {
            if !key.strip_prefix("whsec_").and_then(base64_bytes).is_some_and(|bytes| (24..=64).contains(&bytes)) {
                let why =
                    "must be \"whsec_\" and the Base64 (with padding) of 24 to 64 bytes, as `openssl rand -base64 32` makes it";
                out.push((format!("http.signing_keys[{n}]"), why.into()));
            }
        }
        out
    }
}

/// How many bytes standard Base64 with padding stands for; none if it is not that. Settings are checked without the `http`
/// feature too, which brings the decoder.
fn base64_bytes(text: &str) -> Option<usize> {
    let digits = text.trim_end_matches('=');
    let padding = text.len() - digits.len();
    let valid = text.len().is_multiple_of(4)
        && padding <= 2
        && digits.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/'));
    valid.then(|| text.len() / 4 * 3 - padding)
}

impl std::fmt::Debug for HttpRoute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Header values may be secrets (API keys), so only names are shown.
        f.debug_struct("HttpRoute")
            .field("method", &self.method)
            .field("content_type", &self.content_type)
            .field("authorization", &self.authorization.as_ref().map(|_| "[redacted]"))
            .field("headers", &self.headers.keys())
            .field("signing_keys", &self.signing_keys.len())
            .finish()
    }
}

/// How a relay works: leases, deadlines, polling, memory. `[relay]` in the configuration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct RelaySettings {
    /// Name of this instance in tables and logs; host name and process id by default.
    pub instance: Option<String>,
    /// How long an instance's houses stay its own after its last heartbeat. 20 s by default.
    #[serde(with = "humantime_serde")]
    pub lease: Duration,
    /// How often the lease is renewed; at most a third of the lease. 4 s by default.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Deadline of one send, body included. 10 s by default.
    #[serde(with = "humantime_serde")]
    pub send_timeout: Duration,
    /// What must be left of the lease beyond `send_timeout` for a send to start. 1 s by default.
    #[serde(with = "humantime_serde")]
    pub lease_margin: Duration,
    /// Longest time between two reads when nothing wakes the relay. 1 s by default.
    #[serde(with = "humantime_serde")]
    pub idle_poll: Duration,
    /// How often recent ids are read again for transactions that committed late. 500 ms by default.
    #[serde(with = "humantime_serde")]
    pub near_sweep: Duration,
    /// How often the whole pending set is read; stretched so that it takes less than 2 % of the time. 30 s by default.
    #[serde(with = "humantime_serde")]
    pub full_sweep: Duration,
    /// Deadline of one database call. 10 s by default.
    #[serde(with = "humantime_serde")]
    pub database_timeout: Duration,
    /// Most rows per read. 2 000 by default.
    pub batch: u32,
    /// Most payload bytes in memory. 64 MiB by default; one larger message is still sent, alone.
    pub memory: usize,
    /// A message during whose sending this many processes died is FAILED. 3 by default.
    pub max_claims: u32,
    /// How long runs of groups are kept in the table of runs. 30 days by default; at least 1 minute.
    #[serde(with = "humantime_serde")]
    pub runs_retention: Duration,
    /// Settings of destinations that have no route of their own.
    pub default_route: Route,
}

impl Default for RelaySettings {
    fn default() -> Self {
        Self {
            instance: None,
            lease: Duration::from_secs(20),
            heartbeat: Duration::from_secs(4),
            send_timeout: Duration::from_secs(10),
            lease_margin: Duration::from_secs(1),
            idle_poll: Duration::from_secs(1),
            near_sweep: Duration::from_millis(500),
            full_sweep: Duration::from_secs(30),
            database_timeout: Duration::from_secs(10),
            batch: 2_000,
            memory: 64 << 20,
            max_claims: 3,
            runs_retention: Duration::from_secs(30 * 86_400),
            default_route: Route::default(),
        }
    }
}

impl RelaySettings {
    /// What is wrong with these settings and how they relate, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let mut say = |field: &str, why: String| out.push((field.to_owned(), why));
        if self.heartbeat.is_zero() || self.heartbeat * 3 > self.lease {
            say(
                "heartbeat",
                format!("{:?}, must be more than 0 and at most a third of lease ({:?})", self.heartbeat, self.lease),
            );
        }
        if self.send_timeout.is_zero() || self.send_timeout + self.lease_margin + self.heartbeat > self.lease {
            say(
                "send_timeout",
                format!(
                    "{:?}; send_timeout + lease_margin ({:?}) + heartbeat ({:?}) must be at most lease ({:?}), or no send could start late in a lease",
                    self.send_timeout, self.lease_margin, self.heartbeat, self.lease
                ),
            );
        }
        if self.lease > Duration::from_secs(3600) {
            say("lease", format!("{:?}, must be at most 1 h", self.lease));
        }
        for (name, value) in [("idle_poll", self.idle_poll), ("near_sweep", self.near_sweep), ("full_sweep", self.full_sweep)] {
            if value < Duration::from_millis(1) || value > Duration::from_secs(3600) {
                say(name, format!("{value:?}, must be 1 ms to 1 h"));
            }
        }
        if self.database_timeout < Duration::from_millis(100) {
            say("database_timeout", format!("{:?}, must be at least 100 ms", self.database_timeout));
        }
        if !(1..=5_000).contains(&self.batch) {
            say("batch", format!("{}, must be 1 to 5000", self.batch));
        }
        if self.memory < 1 << 20 {
            say("memory", format!("{}, must be at least 1048576 (1 MiB)", self.memory));
        }
        if !(1..=100).contains(&self.max_claims) {
            say("max_claims", format!("{}, must be 1 to 100", self.max_claims));
        }
        if self.runs_retention < Duration::from_secs(60) {
            say("runs_retention", format!("{:?}, must be at least 1 minute", self.runs_retention));
        }
        if let Some(name) = &self.instance
            && (name.is_empty() || name.len() > 100 || name.contains(char::is_control))
        {
            say("instance", "must be 1 to 100 bytes without control characters".into());
        }
        for (field, why) in self.default_route.problems() {
            say(&format!("default_route.{field}"), why);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_cap_and_jitter_takes_at_most_half() {
        let r = Retry::new(5, Duration::from_secs(1), Duration::from_secs(10));
        assert_eq!(r.wait(1, 0.0), Duration::from_millis(500));
        assert_eq!(r.wait(1, 1.0), Duration::from_secs(1));
        assert_eq!(r.wait(3, 1.0), Duration::from_secs(4));
        assert_eq!(r.wait(5, 1.0), Duration::from_secs(10));
        assert_eq!(r.wait(u32::MAX, 0.0), Duration::from_secs(5));
    }

    #[test]
    fn cloudevents_settings_that_cannot_hold_are_named() {
        let fields = |r: Route| r.problems().into_iter().map(|(field, _)| field).collect::<Vec<_>>();
        let route = |c: CloudEvents| Route::to("https://example.com/").cloudevents(c);
        let none: [&str; 0] = [];
        for source in ["/shop", "https://example.com/shop?a=b#c", "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66", "mailto:a@b.c"]
        {
            assert_eq!(fields(route(CloudEvents::binary(source))), none, "{source}");
        }
        let long = "x".repeat(256);
        for source in ["", "a b", "a\nb", "/ä", "<a>", &long] {
            assert_eq!(fields(route(CloudEvents::binary(source))), ["cloudevents.source"], "{source}");
        }
        let no_type = CloudEvents { default_type: String::new(), ..CloudEvents::default() };
        assert_eq!(fields(route(no_type)), ["cloudevents.default_type"]);
        let override_type = |mut r: Route| {
            r.http.content_type = Some("text/plain".into());
            r
        };
        assert_eq!(fields(override_type(route(CloudEvents::binary("/shop")))), none);
        assert_eq!(fields(override_type(route(CloudEvents::structured("/shop")))), ["http.content_type"]);
    }

    #[test]
    fn signing_keys_are_checked_without_being_shown() {
        let problems = |keys: &[&str]| {
            let mut route = Route::to("https://example.com/");
            route.http.signing_keys = keys.iter().map(|&k| k.to_owned()).collect();
            route.problems()
        };
        let fields = |keys: &[&str]| problems(keys).into_iter().map(|(field, _)| field).collect::<Vec<_>>();
        let good = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let none: [&str; 0] = [];
        assert_eq!(fields(&[good; 5]), none);
        assert_eq!(fields(&[good; 6]), ["http.signing_keys"]);
        // 24 and 64 bytes are in, 23 and 65 are out.
        let key = |digits: usize, padding: &str| format!("whsec_{}{padding}", "B".repeat(digits));
        for good in [key(32, ""), key(86, "==")] {
            assert_eq!(fields(&[&good]), none, "{good}");
        }
        for bad in
            [key(31, "="), key(87, "="), key(32, "==="), key(33, ""), key(30, "*+"), good.replace("whsec_", ""), "whsec_".into()]
        {
            assert_eq!(fields(&[good, &bad]), ["http.signing_keys[1]"], "{bad}");
            assert!(bad.len() < 10 || !format!("{:?}", problems(&[&bad])).contains(&bad[6..]), "the key is shown");
        }
    }

    #[test]
    fn a_lease_that_cannot_cover_a_send_is_refused() {
        assert_eq!(RelaySettings::default().problems(), []);
        let fields = |s: RelaySettings| s.problems().into_iter().map(|p| p.0).collect::<Vec<_>>();
        let s = RelaySettings { send_timeout: Duration::from_secs(15), ..Default::default() };
        assert_eq!(fields(s.clone()), [] as [&str; 0], "15 + 1 + 4 = 20 is just enough");
        assert_eq!(fields(RelaySettings { send_timeout: Duration::from_millis(15_001), ..s }), ["send_timeout"]);
        let s = RelaySettings { heartbeat: Duration::from_secs(7), send_timeout: Duration::from_secs(1), ..Default::default() };
        assert_eq!(fields(s), ["heartbeat"]);
    }
}
