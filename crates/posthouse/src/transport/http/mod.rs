//! `http:` and `https:` destinations: one request per message.

mod address;
mod answer;
mod request;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use reqwest::header::HeaderValue;
use reqwest::{Client, Response, redirect};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use self::address::{Resolver, Rule};
use super::{Delivery, Outcome, Transport};
use crate::Error;
use crate::error::storable;

/// A response body after a 2xx is read up to here, so that the connection can be used again; beyond, a new one is cheaper.
const DRAIN_BYTES: usize = 16 << 10;

/// How long a confirmed message waits for the rest of its response.
const DRAIN_TIME: Duration = Duration::from_secs(1);

/// Idle connections are closed before the usual servers close them (60 s and more), so that a request rarely meets a
/// connection that is just being closed: that would count as a failed attempt.
const IDLE: Duration = Duration::from_secs(30);

/// Settings of the [`Http`] transport. `[transports.http]` in the configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct HttpSettings {
    /// Allows every address, private ones and cloud metadata services included. Only where every destination is written
    /// by people you trust with the relay's network. False by default.
    pub allow_private: bool,
    /// Addresses (`192.168.1.7`) and networks (`10.0.0.0/8`, `fd00::/8`) that may be called although they are not public.
    pub allow: Vec<String>,
    /// How many bytes of a failed request's response are kept for the attempt log; the rest is not read.
    /// At most 1 MiB; 4 KiB by default.
    pub response_limit: usize,
    /// A connection, name lookup and TLS handshake included, must stand within this time, or the destination counts as
    /// down. Keep it below `relay.send_timeout`, which ends the wait as a failed attempt. 5 s by default.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Value of the `User-Agent` header. `posthouse/<version>` by default.
    pub user_agent: String,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            allow_private: false,
            allow: Vec::new(),
            response_limit: 4 << 10,
            connect_timeout: Duration::from_secs(5),
            user_agent: concat!("posthouse/", env!("CARGO_PKG_VERSION")).into(),
        }
    }
}

impl HttpSettings {
    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let mut say = |field: &str, why: String| out.push((field.to_owned(), why));
        for why in Rule::new(self.allow_private, &self.allow).err().unwrap_or_default() {
            say("allow", why);
        }
        if self.response_limit > 1 << 20 {
            say("response_limit", format!("{}, must be at most 1048576 (1 MiB)", self.response_limit));
        }
        if self.connect_timeout < Duration::from_millis(1) || self.connect_timeout > Duration::from_secs(3600) {
            say("connect_timeout", format!("{:?}, must be 1 ms to 1 h", self.connect_timeout));
        }
        if HeaderValue::from_str(&self.user_agent).is_err() {
            say("user_agent", format!("{:?}, must be text without control characters", self.user_agent));
        }
        out
    }
}

/// Sends each message as one HTTP/1.1 request to the URL that is its destination or its route's `to`.
///
/// # The request
/// Method, content type, `Authorization` and fixed headers come from [`HttpRoute`](crate::HttpRoute); user and password in the
/// URL become an `Authorization` header if the route sets none. The body is the payload. The message's headers (the trace
/// context `traceparent` and `tracestate` among them) are sent along and replace fixed ones of the same name. Not sent
/// along are those that belong to the connection or the route: `Connection`, `Keep-Alive`, `Proxy-…`, `TE`, `Trailer`,
/// `Transfer-Encoding`, `Upgrade`, `Expect`, `Content-Length`, `Content-Type`, `Host`, `Authorization`; nor the names below.
///
/// | header | value |
/// | --- | --- |
/// | `Idempotency-Key`, `Posthouse-Message-Id` | the message id, the same on every resend |
/// | `Posthouse-Attempt` | which attempt this is, from 1 |
/// | `Posthouse-Type` | the message's type, if it has one |
/// | `Posthouse-Key` | the ordering key, if it has one |
///
/// In id, type and key, `%` and every byte that is not visible ASCII are percent-encoded.
///
/// [`HttpRoute::signing_keys`](crate::HttpRoute::signing_keys) add `webhook-id` (the message id, a full stop encoded as well), `webhook-timestamp` (seconds
/// since 1970, of this attempt, by this machine's clock) and `webhook-signature`, one signature per key;
/// [`webhook`](crate::webhook) helps to verify them. Messages can't set these headers, signed or not.
///
/// With [`Route::cloudevents`](crate::Route::cloudevents) the attributes of a CloudEvent come as `ce-…` headers, encoded as the HTTP binding of
/// CloudEvents says, or the body is the whole event. A message's own `ce-…` headers are sent along as further attributes, except
/// those named like the ones that are set here.
///
/// # The outcome
/// The status decides as soon as it is there, even if the rest of the response is slow, endless or broken off; the body is
/// only kept for people to read.
///
/// | response | outcome |
/// | --- | --- |
/// | 2xx | delivered |
/// | 400, 410, 413, 414, 415, 422 | rejected |
/// | any other status, 3xx included (redirects are not followed) | try again, after `Retry-After` (24 h at most) if given |
/// | not HTTP, or the connection broke after the request was sent | try again |
/// | none by the deadline | try again; unavailable if the destination was down already |
/// | no connection: name not found, refused, unreachable, TLS, `connect_timeout` | unavailable |
/// | no request possible: URL, method or header not allowed in HTTP; address refused | rejected |
///
/// # The address rule
/// Only public addresses are called, unless [`HttpSettings::allow`] says more, whether the URL names them in any notation or
/// a host name resolves to them (one refused address among several is enough). Proxies in the environment are ignored, as
/// they would make the connection to an address that was never checked.
pub struct Http(Arc<Inner>);

struct Inner {
    client: Client,
    rule: Arc<Rule>,
    response_limit: usize,
    connect_timeout: Duration,
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("rule", &self.0.rule).finish_non_exhaustive()
    }
}

impl Http {
    /// Checks the settings and loads the system's root certificates.
    pub fn new(settings: HttpSettings) -> Result<Self, Error> {
        let problems = settings.problems();
        if !problems.is_empty() {
            let all: Vec<_> = problems.iter().map(|(field, why)| format!("transports.http.{field}: {why}")).collect();
            return Err(Error::Config(all.join("; ")));
        }
        let rule = Rule::new(settings.allow_private, &settings.allow).map_err(|bad| Error::Config(bad.join("; ")))?;
        let rule = Arc::new(rule);
        let client = Client::builder()
            .user_agent(settings.user_agent)
            .redirect(redirect::Policy::none())
            .no_proxy()
            .dns_resolver(Resolver(rule.clone()))
            .connect_timeout(settings.connect_timeout)
            .pool_idle_timeout(IDLE)
            .tcp_nodelay(true)
            .build()
            .map_err(|e| {
                let cause = address::causes(&e).last().map(ToString::to_string).unwrap_or_default();
                Error::Config(format!(
                    "transports.http: TLS can't be set up: {cause}; install the system's root certificates \
                     (package ca-certificates) or point SSL_CERT_FILE at them"
                ))
            })?;
        Ok(Self(Arc::new(Inner {
            client,
            rule,
            response_limit: settings.response_limit,
            connect_timeout: settings.connect_timeout,
        })))
    }
}

impl Transport for Http {
    fn send(&self, batch: Vec<Delivery>) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            // A task each, so that a panic costs one message and the requests use every core. Dropping the set ends them.
            let mut running = JoinSet::new();
            for mut delivery in batch {
                let inner = self.0.clone();
                running.spawn(async move {
                    let outcome = inner.attempt(&mut delivery).await;
                    delivery.answer(outcome);
                });
            }
            while running.join_next().await.is_some() {}
        })
    }
}

impl Inner {
    async fn attempt(&self, delivery: &mut Delivery) -> Outcome {
        let left = delivery.time_left();
        // A little earlier than the relay gives up, so that this answer, which says more, comes first.
        let deadline = Instant::now() + left - (left / 20).min(Duration::from_millis(100));
        let late = format!("no complete response within {:.1}s", left.as_secs_f64());
        let request = match request::build(&self.client, &self.rule, delivery) {
            Ok(request) => request,
            Err(why) => return Outcome::Rejected(why.into()),
        };
        let url = request.url().clone();
        let mut response = match timeout_at(deadline, self.client.execute(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(e)) => return answer::of_error(&url, e, self.connect_timeout),
            Err(_) => {
                let error = format!("{late} from {} (relay.send_timeout)", request::shown(&url));
                return Outcome::NoAnswer(error.into());
            }
        };
        let status = response.status();
        let mut body = Vec::new();
        if status.is_success() {
            let until = deadline.min(Instant::now() + DRAIN_TIME);
            // However this ends, the message is confirmed.
            let _ = timeout_at(until, read(&mut response, DRAIN_BYTES, &mut body)).await;
            return Outcome::Delivered;
        }
        let cut_short = match timeout_at(deadline, read(&mut response, self.response_limit, &mut body)).await {
            Ok(Ok(())) => String::new(),
            Ok(Err(_)) => "; its response broke off".to_owned(),
            Err(_) => format!("; {late} (relay.send_timeout)"),
        };
        let body = (!body.is_empty()).then(|| storable(&String::from_utf8_lossy(&body), self.response_limit));
        answer::of_response(&url, status, response.headers(), body, &cut_short)
    }
}

/// Reads the body into `body` until it ends or `limit` bytes are there. What was read stays there if this is cancelled.
async fn read(response: &mut Response, limit: usize, body: &mut Vec<u8>) -> Result<(), reqwest::Error> {
    while body.len() < limit
        && let Some(chunk) = response.chunk().await?
    {
        let room = limit - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
    }
    Ok(())
}
