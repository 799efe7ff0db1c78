//! A message as RabbitMQ gets it: properties, headers, payload.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable, LongString, ShortString};
use serde_json::Value;

use super::address;
use crate::message::MAX_NAME;
use crate::transport::content::{content, is_attribute};
use crate::transport::{Delivery, address_of};
use crate::{RabbitMqRoute, Route};

/// Message headers that become properties, and are not sent as headers.
pub(crate) const CORRELATION_ID: &str = "correlation-id";
pub(crate) const REPLY_TO: &str = "amqp-reply-to";
pub(crate) const PRIORITY: &str = "amqp-priority";
pub(crate) const EXPIRATION: &str = "amqp-expiration";

/// Headers in which RabbitMQ expects a list of further routing keys ("sender-selected distribution"); a text there closes the
/// channel.
const ROUTING: [&str; 2] = ["CC", "BCC"];

/// What stands before the name of a CloudEvents attribute, in AMQP 1.0's binding, which RabbitMQ users follow in 0-9-1 too.
const CLOUD_EVENTS: &str = "cloudEvents:";

/// A delivery, ready to be published.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) delivery: Delivery,
    pub(super) routing_key: ShortString,
    pub(super) properties: BasicProperties,
    /// Shared with the publish under way, so that it can be repeated.
    pub(super) payload: Arc<Vec<u8>>,
    /// Bytes that the properties take, which must fit into one frame.
    pub(super) properties_size: usize,
}

/// What is wrong with a route, as far as can be told without a broker.
pub(super) fn check(route: &Route) -> Result<(), String> {
    let address = address::parse(address_of(&route.to))?;
    if address.exchange.is_empty() && route.rabbitmq.queue.is_some() {
        return Err(format!(
            "rabbitmq.queue binds a queue to an exchange, but the address {:?} sends straight to a queue; remove rabbitmq.queue",
            address_of(&route.to)
        ));
    }
    for name in ROUTING {
        if route.rabbitmq.headers.get(name).is_some_and(|value| !is_list_of_texts(value)) {
            return Err(format!("rabbitmq.headers.{name} must be a list of routing keys, as RabbitMQ routes by it"));
        }
    }
    Ok(())
}

impl Job {
    /// The exchange, and what to publish to it. Takes the payload out of the delivery. None: it can never be sent, which the
    /// delivery has been told.
    pub(super) fn new(mut delivery: Delivery) -> Option<(String, Self)> {
        match build(&delivery) {
            Ok((exchange, routing_key, properties, payload, properties_size)) => {
                let payload = payload.unwrap_or_else(|| std::mem::take(&mut delivery.envelope.payload));
                Some((exchange, Self { delivery, routing_key, properties, payload: Arc::new(payload), properties_size }))
            }
            Err(why) => {
                delivery.rejected(why);
                None
            }
        }
    }
}

type Built = (String, ShortString, BasicProperties, Option<Vec<u8>>, usize);

fn build(delivery: &Delivery) -> Result<Built, String> {
    let address = address::parse(delivery.address())?;
    let (exchange, routing_key) = (address.exchange.to_owned(), ShortString::from(address.routing_key));
    let content = content(delivery)?;
    let message = delivery.message();
    let route = &delivery.route().rabbitmq;
    let header = |name| message.headers.get(name);
    let mut size = 0;
    let mut short = |what: &str, text: &str| {
        size += 1 + text.len();
        ShortString::try_new(text).map_err(|_| format!("{what} has {} bytes; RabbitMQ takes {MAX_NAME} at most", text.len()))
    };

    let mut properties = BasicProperties::default()
        .with_delivery_mode(if route.persistent { 2 } else { 1 })
        .with_timestamp(message.created_at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs()))
        .with_message_id(short("the message id", message.message_id.as_str())?);
    if !message.kind.is_empty() {
        properties = properties.with_type(short("the type", &message.kind)?);
    }
    if !content.content_type.is_empty() {
        properties = properties.with_content_type(short("the content type", &content.content_type)?);
    }
    if let Some(app_id) = &route.app_id {
        properties = properties.with_app_id(short("rabbitmq.app_id", app_id)?);
    }
    if let Some(id) = header(CORRELATION_ID) {
        properties = properties.with_correlation_id(short("the header correlation-id", id)?);
    }
    if let Some(queue) = header(REPLY_TO) {
        properties = properties.with_reply_to(short("the header amqp-reply-to", queue)?);
    }
    let priority = match header(PRIORITY) {
        Some(text) => Some(text.parse().map_err(|_| format!("the header {PRIORITY} is {text:?}, must be 0 to 255"))?),
        None => route.priority,
    };
    if let Some(priority) = priority {
        properties = properties.with_priority(priority);
    }
    let expiration = match header(EXPIRATION) {
        Some(text) => {
            let too_much = || format!("the header {EXPIRATION} is {text:?}, must be whole milliseconds, at most {}", u32::MAX);
            Some(text.parse::<u32>().map_err(|_| too_much())?)
        }
        // A route's is checked not to be more.
        None => route.expiration.map(|after| u32::try_from(Duration::as_millis(&after)).unwrap_or(u32::MAX)),
    };
    if let Some(expiration) = expiration {
        properties = properties.with_expiration(short("the expiration", &expiration.to_string())?);
    }

    let headers = headers(delivery, route, &content.attributes)?;
    size += table_size(&headers);
    let properties = properties.with_headers(headers);
    let payload = match content.payload {
        std::borrow::Cow::Owned(payload) => Some(payload),
        std::borrow::Cow::Borrowed(_) => None,
    };
    // Two bytes of flags, delivery mode, priority, timestamp.
    Ok((exchange, routing_key, properties, payload, size + 12))
}

/// Later ones replace earlier ones of the same name: what identifies the message comes last.
fn headers(
    delivery: &Delivery,
    route: &RabbitMqRoute,
    attributes: &[(&str, std::borrow::Cow<'_, str>)],
) -> Result<FieldTable, String> {
    let message = delivery.message();
    let name = |name: &str| {
        ShortString::try_new(name)
            .map_err(|_| format!("a header's name has {} bytes; RabbitMQ takes {MAX_NAME} at most", name.len()))
    };
    let mut table = FieldTable::default();
    for (key, value) in &route.headers {
        table.insert(name(key)?, typed(value)?);
    }
    for (key, value) in message.headers.iter() {
        if matches!(key, CORRELATION_ID | REPLY_TO | PRIORITY | EXPIRATION) || is_attribute(delivery.route(), CLOUD_EVENTS, key) {
            continue;
        }
        if ROUTING.contains(&key) {
            return Err(format!("the header {key} is reserved: RabbitMQ routes by it and takes no text there; rename it"));
        }
        table.insert(name(key)?, text(value));
    }
    for (attribute, value) in attributes {
        table.insert(name(&format!("{CLOUD_EVENTS}{attribute}"))?, text(value));
    }
    if let Some(key) = &message.key {
        table.insert("posthouse-key".into(), text(key));
    }
    table.insert("posthouse-attempt".into(), AMQPValue::LongLongInt(message.attempt.into()));
    Ok(table)
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

/// A JSON value as the AMQP type that holds all of it.
fn typed(value: &Value) -> Result<AMQPValue, String> {
    Ok(match value {
        Value::Null => AMQPValue::Void,
        Value::Bool(truth) => AMQPValue::Boolean(*truth),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => AMQPValue::LongLongInt(whole),
            None => AMQPValue::Double(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(value) => text(value),
        Value::Array(values) => {
            let values: Result<Vec<_>, _> = values.iter().map(typed).collect();
            AMQPValue::FieldArray(FieldArray::from(values?))
        }
        Value::Object(entries) => {
            let mut table = FieldTable::default();
            for (name, value) in entries {
                let name = ShortString::try_new(name.as_str()).map_err(|_| {
                    format!("rabbitmq.headers: a name has {} bytes; RabbitMQ takes {MAX_NAME} at most", name.len())
                })?;
                table.insert(name, typed(value)?);
            }
            AMQPValue::FieldTable(table)
        }
    })
}

fn is_list_of_texts(value: &Value) -> bool {
    value.as_array().is_some_and(|values| values.iter().all(Value::is_string))
}

/// Bytes of a table in a frame: its length, and per entry name, type and value.
fn table_size(table: &FieldTable) -> usize {
    4 + table.inner().iter().map(|(name, value)| 1 + name.as_str().len() + value_size(value)).sum::<usize>()
}

/// Bytes of the types made here.
fn value_size(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) => 1,
        AMQPValue::LongString(text) => 4 + text.len(),
        AMQPValue::FieldArray(values) => 4 + values.as_slice().iter().map(value_size).sum::<usize>(),
        AMQPValue::FieldTable(table) => table_size(table),
        _ => 8,
    }
}
