//! What RabbitMQ's answers mean, in outcomes and words.

use lapin::ErrorKind;
use lapin::protocol::AMQPErrorKind;

use super::job::Job;
use super::link::Link;
use crate::error::storable;
use crate::transport::Outcome;

/// Why something on a channel failed.
#[derive(Debug)]
pub(super) enum Cause {
    /// The connection is lost; in words.
    Connection(String),
    /// The broker closed the channel, with this reply code and text.
    Channel { code: u16, text: String },
}

/// Whose fault it is that a channel was closed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Guilty {
    /// Each message to this exchange would do it.
    All,
    /// Those whose payload is larger than this.
    Larger(usize),
    /// Those with this routing key.
    RoutingKey(String),
    Unknown,
}

/// None: the channel was found closed, for a reason that this error doesn't tell.
pub(super) fn cause(error: &lapin::Error, link: &Link) -> Option<Cause> {
    match error.kind() {
        ErrorKind::ProtocolError(e) => match e.kind() {
            AMQPErrorKind::Soft(_) => Some(Cause::Channel { code: e.get_id(), text: e.get_message().to_string() }),
            AMQPErrorKind::Hard(_) => {
                Some(Cause::Connection(format!("{} closed the connection: {}", link.broker(), e.get_message())))
            }
        },
        ErrorKind::InvalidChannelState(..) | ErrorKind::InvalidChannel(_) => None,
        _ => Some(Cause::Connection(format!("the connection to {} broke before it confirmed: {error}", link.broker()))),
    }
}

/// Whose fault a closed channel is, from its reply code and text.
pub(super) fn guilty(code: u16, text: &str) -> Guilty {
    match code {
        404 => Guilty::All,
        // "access to topic 'KEY' in exchange 'X' in vhost 'V' refused for user 'U'": of topic permissions.
        403 => match text.split_once("access to topic '").and_then(|(_, rest)| rest.split_once("' in exchange '")) {
            Some((key, _)) => Guilty::RoutingKey(key.to_owned()),
            None => Guilty::All,
        },
        406 => match size_limit(text) {
            Some(max) => Guilty::Larger(max),
            None => Guilty::Unknown,
        },
        _ => Guilty::Unknown,
    }
}

/// "message size 2000 is larger than configured max size 1000".
fn size_limit(text: &str) -> Option<usize> {
    let (_, limit) = text.split_once("is larger than configured max size ")?;
    limit.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// What a closed channel means for a message that is to blame.
pub(super) fn channel_closed(link: &Link, exchange: impl std::fmt::Display, job: &Job, code: u16, text: &str) -> Outcome {
    let error = match code {
        404 => format!(
            "RabbitMQ has no exchange \"{exchange}\" in virtual host {:?}; declare it, or set rabbitmq.declare = true in the route",
            link.vhost()
        ),
        403 => format!("RabbitMQ refuses this user's messages: {text}; grant the permission to write"),
        406 if let Some(max) = size_limit(text) => return Outcome::Rejected(too_large(job.payload.len(), max).into()),
        _ => format!("RabbitMQ closed the channel on this message: {}", storable(text, 500)),
    };
    Outcome::Retry { after: None, error: error.into() }
}

pub(super) fn too_large(bytes: usize, max: usize) -> String {
    format!("the payload has {bytes} bytes, RabbitMQ takes {max} at most (max_message_size); raise it, or send less")
}

pub(super) fn headers_too_large(bytes: usize, max: usize) -> String {
    format!("headers and properties have {bytes} bytes, RabbitMQ takes {max} at most (frame_max); raise it, or send less")
}

pub(super) fn blocked(link: &Link, reason: &str) -> String {
    format!("{} blocks publishing ({}) until it has resources again", link.broker(), storable(reason, 200))
}

/// The broker gave the message back: mandatory, but no queue took it.
pub(super) fn returned(exchange: impl std::fmt::Display, job: &Job, why: &str) -> Outcome {
    let exchange = exchange.to_string();
    let key = &job.routing_key;
    let error = if exchange.is_empty() {
        format!(
            "RabbitMQ returned the message ({why}): there is no queue \"{key}\"; declare it, or set rabbitmq.declare = true in the route"
        )
    } else {
        format!(
            "RabbitMQ returned the message ({why}): no queue is bound to exchange \"{exchange}\" with routing key \"{key}\"; \
             bind one, or correct the route"
        )
    };
    Outcome::Retry { after: None, error: error.into() }
}

/// The broker could not take responsibility for the message.
pub(super) fn nack(exchange: impl std::fmt::Display, job: &Job) -> Outcome {
    let error = format!(
        "RabbitMQ refused the message to exchange \"{exchange}\" with routing key \"{}\": a queue is full \
         (x-overflow = reject-publish) or has failed; look at its length and limits",
        job.routing_key
    );
    Outcome::Retry { after: None, error: error.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reply_tells_whose_fault_it_is() {
        assert_eq!(guilty(404, "NOT_FOUND - no exchange 'x' in vhost '/'"), Guilty::All);
        assert_eq!(guilty(403, "ACCESS_REFUSED - access to exchange 'x' in vhost '/' refused for user 'u'"), Guilty::All);
        assert_eq!(
            guilty(403, "ACCESS_REFUSED - access to topic 'a.b' in exchange 'x' in vhost '/' refused for user 'u'"),
            Guilty::RoutingKey("a.b".into())
        );
        let text = "PRECONDITION_FAILED - message size 2000 is larger than configured max size 1000";
        assert_eq!(guilty(406, text), Guilty::Larger(1000));
        assert_eq!(guilty(406, "PRECONDITION_FAILED - invalid message"), Guilty::Unknown);
    }
}
