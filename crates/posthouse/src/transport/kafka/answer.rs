//! What an error of librdkafka or a broker means for a message.

use rdkafka::error::RDKafkaErrorCode as Code;

use crate::transport::Outcome;

/// Brokers judge batches. Refused for what is in it, a batch may be to blame for one record of many, or for its length
/// alone, so each of its records is sent again in a batch of its own, and only what comes of that counts.
pub(super) fn blames_batch(code: Code) -> bool {
    code == Code::InvalidDifferentRecord || is_rejection(code)
}

/// The record itself is refused: what it holds or its size.
fn is_rejection(code: Code) -> bool {
    matches!(
        code,
        Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidMessageSize
            | Code::InvalidRecord
            | Code::InvalidTimestamp
            | Code::UnsupportedForMessageFormat
            | Code::PolicyViolation
    )
}

/// The record was given up because of another one, or with its producer; it may have arrived nevertheless.
pub(super) fn is_innocent(code: Code) -> bool {
    matches!(
        code,
        Code::PurgeQueue
            | Code::PurgeInflight
            | Code::Fatal
            | Code::Retry
            | Code::GaplessGuarantee
            | Code::OutOfOrderSequenceNumber
            | Code::UnknownProducerId
            | Code::InvalidProducerEpoch
            | Code::Inconsistent
    )
}

/// The outcome of a record that failed. `where_` names the brokers, `trouble` is the last error of a connection.
pub(super) fn of(code: Code, topic: &str, where_: &str, trouble: Option<&str>) -> Outcome {
    let retry = |error: String| Outcome::Retry { after: None, error: error.into() };
    match code {
        Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
            retry(format!("topic {topic:?} doesn't exist in Kafka ({where_}); create it or correct the route"))
        }
        Code::InvalidTopic => Outcome::Rejected(format!("Kafka ({where_}) takes no topic {topic:?}; correct the route").into()),
        Code::TopicAuthorizationFailed => {
            retry(format!("Kafka ({where_}) doesn't let us write to topic {topic:?}; grant this user WRITE and DESCRIBE on it"))
        }
        Code::ClusterAuthorizationFailed => retry(format!(
            "Kafka ({where_}) doesn't let us produce (cluster authorization failed); grant this user IDEMPOTENT_WRITE on the cluster"
        )),
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => Outcome::Rejected(
            format!(
                "the record is larger than Kafka ({where_}) takes in topic {topic:?}; raise max.message.bytes of the topic \
                 and the property message.max.bytes here, or send less"
            )
            .into(),
        ),
        code if is_rejection(code) || code == Code::InvalidDifferentRecord => {
            Outcome::Rejected(format!("Kafka ({where_}) refuses the record in topic {topic:?}: {code}").into())
        }
        code if is_of_the_brokers(code) => unavailable(where_, &code.to_string(), trouble),
        code => retry(format!("Kafka ({where_}) answered for topic {topic:?}: {code}")),
    }
}

/// The outcome where there was no answer in time, or none can come any more.
pub(super) fn unavailable(where_: &str, what: &str, trouble: Option<&str>) -> Outcome {
    let error = match trouble {
        Some(trouble) => format!("no confirmation from Kafka ({where_}): {what}; last error: {trouble}{}", advice(trouble)),
        None => format!("no confirmation from Kafka ({where_}): {what}"),
    };
    Outcome::Unavailable(error.into())
}

/// What librdkafka's words leave out.
fn advice(trouble: &str) -> &'static str {
    if trouble.contains("certificate verify failed") {
        "; the certificate isn't trusted, or is for another name: correct the property ssl.ca.location, or the names in brokers"
    } else if trouble.ends_with("brokers are down") {
        // Any other reason would be an error of its own, and shown instead.
        "; they close connections without a word: if they run, correct the property security.protocol"
    } else {
        ""
    }
}

/// Not about this record or its topic: brokers can't be reached, can't work, or don't know us.
fn is_of_the_brokers(code: Code) -> bool {
    // Codes below 0 are librdkafka's own: timed out, connection lost, purged, …
    (code as i32) < 0
        || matches!(
            code,
            Code::LeaderNotAvailable
                | Code::NotLeaderForPartition
                | Code::RequestTimedOut
                | Code::BrokerNotAvailable
                | Code::ReplicaNotAvailable
                | Code::NetworkException
                | Code::NotEnoughReplicas
                | Code::NotEnoughReplicasAfterAppend
                | Code::OutOfOrderSequenceNumber
                | Code::UnknownProducerId
                | Code::InvalidProducerEpoch
                | Code::KafkaStorageError
                | Code::SaslAuthenticationFailed
                | Code::UnsupportedSASLMechanism
                | Code::FencedLeaderEpoch
                | Code::UnknownLeaderEpoch
                | Code::ThrottlingQuotaExceeded
        )
}
