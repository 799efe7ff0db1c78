//! What comes in over a pull subscription.

use async_nats::StatusCode;
use async_nats::header::{self, HeaderValue};
use async_nats::jetstream::{Context, Message};

use crate::consumer::decode::Received;
use crate::error::storable;
use crate::inbox::{Incoming, Source};
use crate::settings::IdFrom;

/// Acknowledgements of messages go to subjects that begin so. What the server itself has to say is not to be answered, whereas
/// a message's headers may be made to look like that.
const ANSWER: &str = "$JS.ACK.";

/// How many of the requested messages don't come any more.
const LEFT: &str = "Nats-Pending-Messages";

pub(super) enum FromServer {
    Message(Box<Message>),
    /// A request has ended without this many messages.
    Expired(Option<usize>),
    /// Nothing at the moment.
    Alive,
}

impl FromServer {
    /// # Errors
    /// Why the server sends no more.
    pub(super) fn read(message: async_nats::Message, context: &Context) -> Result<Self, String> {
        if message.reply.as_deref().is_some_and(|reply| reply.starts_with(ANSWER)) {
            return Ok(Self::Message(Box::new(Message { message, context: context.clone() })));
        }
        let said = message.description.as_deref().unwrap_or_default();
        match message.status {
            Some(StatusCode::IDLE_HEARTBEAT) => Ok(Self::Alive),
            Some(StatusCode::TIMEOUT | StatusCode::NOT_FOUND) => {
                let left = message.headers.as_ref().and_then(|headers| headers.get(LEFT)).and_then(|v| v.as_str().parse().ok());
                Ok(Self::Expired(left))
            }
            Some(StatusCode::NO_RESPONDERS) => Err("the consumer is not there, or has no leader".into()),
            Some(status) => Err(storable(&format!("the server sends nothing more: {said} ({})", status.as_u16()), 300)),
            // Somebody else sends to our address.
            None => Ok(Self::Alive),
        }
    }
}

pub(super) fn incoming(message: Message, id_from: &IdFrom) -> Incoming {
    let redelivered = message.info().is_ok_and(|info| info.delivered > 1);
    let message = message.message;
    let headers = message.headers.unwrap_or_default();
    let joined = |values: &[HeaderValue]| values.iter().map(HeaderValue::as_str).collect::<Vec<_>>().join(", ").into_bytes();
    let received = Received {
        message_id: headers.get(header::NATS_MESSAGE_ID).map(ToString::to_string),
        headers: headers.iter().map(|(name, values)| (name.to_string(), joined(values))).collect(),
        payload: message.payload.to_vec(),
        encoded: true,
        redelivered,
        ..Received::default()
    };
    received.incoming(id_from, Source::Nats { subject: message.subject.to_string() })
}
