//! Reads the server's acknowledgement, or the lack of one, into an outcome.

use std::error::Error as StdError;

use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};

use crate::error::storable;
use crate::transport::Outcome;

/// Errors of a stream that no later try can mend: the message, or its headers, are too large for it.
const NEVER: [ErrorCode; 2] = [ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM, ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM];

/// Errors of the server, whatever stream or message it is.
const DOWN: [ErrorCode; 6] = [
    ErrorCode::CLUSTER_NOT_ACTIVE,
    ErrorCode::CLUSTER_NOT_AVAILABLE,
    ErrorCode::CLUSTER_NOT_LEADER,
    ErrorCode::INSUFFICIENT_RESOURCES,
    ErrorCode::JETSTREAM_NOT_ENABLED,
    ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT,
];

/// What came of a message that the server did not acknowledge.
pub(super) fn of_error(subject: &str, servers: &str, error: &PublishError) -> Outcome {
    let cause = storable(&error.source().map_or_else(|| error.to_string(), ToString::to_string), 300);
    match error.kind() {
        PublishErrorKind::StreamNotFound => {
            let error = format!(
                "no JetStream stream covers subject {subject:?}; create one (and enable JetStream), or correct the route's `to`"
            );
            Outcome::Retry { after: None, error: error.into() }
        }
        PublishErrorKind::MaxPayloadExceeded => {
            let error = format!("too large for the NATS server, headers included ({cause}); raise its max_payload, or send less");
            Outcome::Rejected(error.into())
        }
        PublishErrorKind::WrongLastMessageId | PublishErrorKind::WrongLastSequence | PublishErrorKind::Other => {
            let code = error.source().and_then(|e| e.downcast_ref::<jetstream::Error>()).map(jetstream::Error::error_code);
            let refused = format!("the stream of subject {subject:?} did not take the message: {cause}");
            match code {
                Some(code) if NEVER.contains(&code) => Outcome::Rejected(refused.into()),
                Some(code) if DOWN.contains(&code) => {
                    Outcome::Unavailable(format!("JetStream of {servers} is down: {cause}").into())
                }
                Some(_) => Outcome::Retry { after: None, error: refused.into() },
                None => {
                    let error = format!(
                        "what answered on subject {subject:?} is no JetStream stream ({cause}); create a stream that covers it, \
                         or correct the route's `to`"
                    );
                    Outcome::Retry { after: None, error: error.into() }
                }
            }
        }
        PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe | PublishErrorKind::MaxAckPending => {
            Outcome::Unavailable(format!("the connection to {servers} broke: {cause}").into())
        }
    }
}
