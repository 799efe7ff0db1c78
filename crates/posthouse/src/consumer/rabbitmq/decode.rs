//! What stands where in an AMQP message.

use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Map, Number, Value};

use crate::consumer::decode::Received;
use crate::inbox::{Incoming, Source, hex};
use crate::settings::IdFrom;
use crate::transport::rabbitmq::{CORRELATION_ID, EXPIRATION, PRIORITY, REPLY_TO};

/// How often a quorum queue has got it back, which it counts in this header.
pub(super) fn returns(delivery: &Delivery) -> i128 {
    let count = delivery.properties.headers().as_ref().and_then(|headers| headers.inner().get("x-delivery-count"));
    count.and_then(whole).unwrap_or(0)
}

pub(super) fn incoming(delivery: Delivery, id_from: &IdFrom) -> Incoming {
    let redelivered = delivery.redelivered || returns(&delivery) > 0;
    let properties = delivery.properties;
    let mut received = Received {
        message_id: properties.message_id().as_ref().map(ToString::to_string),
        kind: properties.kind().as_ref().map(ToString::to_string),
        content_type: properties.content_type().as_ref().map(ToString::to_string),
        payload: delivery.data,
        redelivered,
        ..Default::default()
    };
    if let Some(headers) = properties.headers() {
        put_headers(&mut received, headers);
    }
    let texts = [
        (CORRELATION_ID, properties.correlation_id()),
        (REPLY_TO, properties.reply_to()),
        (EXPIRATION, properties.expiration()),
        ("content-encoding", properties.content_encoding()),
        ("amqp-app-id", properties.app_id()),
        ("amqp-user-id", properties.user_id()),
    ];
    let texts = texts.into_iter().filter_map(|(name, text)| Some((name, text.as_ref()?.to_string())));
    let numbers = [
        (PRIORITY, properties.priority().map(|priority| priority.to_string())),
        ("amqp-timestamp", properties.timestamp().map(|seconds| seconds.to_string())),
    ];
    let numbers = numbers.into_iter().filter_map(|(name, text)| Some((name, text?)));
    // After the headers, of which they replace those of the same name.
    received.headers.extend(texts.chain(numbers).map(|(name, text)| (name.to_owned(), text.into_bytes())));
    let source = Source::RabbitMq { exchange: delivery.exchange.to_string(), routing_key: delivery.routing_key.to_string() };
    received.incoming(id_from, source)
}

fn put_headers(received: &mut Received, headers: &FieldTable) {
    for (name, value) in headers {
        let name = name.to_string();
        let bytes = match value {
            AMQPValue::LongString(text) => text.as_bytes().to_vec(),
            AMQPValue::ByteArray(bytes) => bytes.as_slice().to_vec(),
            value => {
                let mut odd = false;
                let value = json(value, &mut odd);
                if odd {
                    received.malformed = Some(format!("header {name:?} holds bytes that are not UTF-8"));
                }
                match value {
                    Value::String(text) => text,
                    other => other.to_string(),
                }
                .into_bytes()
            }
        };
        received.headers.push((name, bytes));
    }
}

/// A value as JSON. `odd` is set when there are bytes in it that aren't UTF-8; they are kept as `\x` and hexadecimal digits.
fn json(value: &AMQPValue, odd: &mut bool) -> Value {
    let mut text = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => {
            *odd = true;
            hex("\\x", bytes).into()
        }
    };
    match value {
        AMQPValue::Void => Value::Null,
        AMQPValue::Boolean(truth) => (*truth).into(),
        AMQPValue::Float(number) => float(number.to_string()),
        AMQPValue::Double(number) => float(number.to_string()),
        AMQPValue::DecimalValue(decimal) => decimal_digits(decimal.value, decimal.scale).into(),
        AMQPValue::ShortString(short) => short.as_str().into(),
        AMQPValue::LongString(long) => text(long.as_bytes()),
        AMQPValue::ByteArray(bytes) => text(bytes.as_slice()),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(|value| json(value, odd)).collect(),
        AMQPValue::FieldTable(table) => {
            Value::Object(table.into_iter().map(|(name, value)| (name.to_string(), json(value, odd))).collect::<Map<_, _>>())
        }
        number => whole(number).and_then(Number::from_i128).map_or(Value::Null, Value::Number),
    }
}

fn whole(value: &AMQPValue) -> Option<i128> {
    Some(match value {
        AMQPValue::ShortShortInt(n) => (*n).into(),
        AMQPValue::ShortShortUInt(n) => (*n).into(),
        AMQPValue::ShortInt(n) => (*n).into(),
        AMQPValue::ShortUInt(n) => (*n).into(),
        AMQPValue::LongInt(n) => (*n).into(),
        AMQPValue::LongUInt(n) => (*n).into(),
        AMQPValue::LongLongInt(n) => (*n).into(),
        AMQPValue::Timestamp(n) => (*n).into(),
        _ => return None,
    })
}

/// A number from its shortest digits, so that a single-precision one doesn't get more; what JSON has no number for is a text.
fn float(digits: String) -> Value {
    digits.parse().ok().and_then(Number::from_f64).map_or(Value::String(digits), Value::Number)
}

fn decimal_digits(value: u32, scale: u8) -> String {
    let scale = usize::from(scale);
    let digits = format!("{value:0>width$}", width = scale + 1);
    match digits.split_at(digits.len() - scale) {
        (whole, "") => whole.to_owned(),
        (whole, fraction) => format!("{whole}.{fraction}"),
    }
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::types::{ByteArray, DecimalValue, FieldArray, LongString, ShortString};

    use super::*;

    fn delivery(headers: Vec<(&str, AMQPValue)>, redelivered: bool) -> Delivery {
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert(name.into(), value);
        }
        let mut delivery = Delivery::mock(1, "ex".into(), "key".into(), redelivered, b"{}".to_vec());
        delivery.properties = BasicProperties::default().with_message_id("1".into()).with_headers(table);
        delivery
    }

    fn decoded(headers: Vec<(&str, AMQPValue)>) -> Incoming {
        incoming(delivery(headers, false), &IdFrom::Message)
    }

    fn text(value: &str) -> AMQPValue {
        AMQPValue::LongString(LongString::from(value))
    }

    fn table(entries: Vec<(&str, AMQPValue)>) -> AMQPValue {
        let mut table = FieldTable::default();
        for (name, value) in entries {
            table.insert(name.into(), value);
        }
        AMQPValue::FieldTable(table)
    }

    #[test]
    fn a_header_of_each_type_can_be_read() {
        let decimal = |value, scale| AMQPValue::DecimalValue(DecimalValue { value, scale });
        for (value, shown) in [
            (text("ä \" text"), "ä \" text"),
            (text(""), ""),
            (AMQPValue::ShortString(ShortString::from("short")), "short"),
            (AMQPValue::ByteArray(ByteArray::from(b"bytes".to_vec())), "bytes"),
            (AMQPValue::Void, "null"),
            (AMQPValue::Boolean(true), "true"),
            (AMQPValue::ShortShortInt(-1), "-1"),
            (AMQPValue::ShortShortUInt(255), "255"),
            (AMQPValue::ShortInt(i16::MIN), "-32768"),
            (AMQPValue::ShortUInt(u16::MAX), "65535"),
            (AMQPValue::LongInt(i32::MIN), "-2147483648"),
            (AMQPValue::LongUInt(u32::MAX), "4294967295"),
            (AMQPValue::LongLongInt(i64::MIN), "-9223372036854775808"),
            (AMQPValue::Timestamp(u64::MAX), "18446744073709551615"),
            (AMQPValue::Float(0.1), "0.1"),
            (AMQPValue::Double(1.5e300), "1.5e+300"),
            (AMQPValue::Double(f64::NAN), "NaN"),
            (AMQPValue::Double(f64::NEG_INFINITY), "-inf"),
            (decimal(1_234, 2), "12.34"),
            (decimal(5, 3), "0.005"),
            (decimal(7, 0), "7"),
            (
                AMQPValue::FieldArray(FieldArray::from(vec![text("a\"b"), AMQPValue::Void, AMQPValue::Float(2.5)])),
                r#"["a\"b",null,2.5]"#,
            ),
            (table(vec![("n", AMQPValue::LongInt(1)), ("t", table(vec![("d", decimal(15, 1))]))]), r#"{"n":1,"t":{"d":"1.5"}}"#),
        ] {
            let got = decoded(vec![("h", value.clone())]);
            assert_eq!((got.headers.get("h"), got.malformed), (Some(shown), None), "{value:?}");
        }
    }

    #[test]
    fn bytes_that_are_not_text_are_kept_wherever_they_are() {
        let odd = || AMQPValue::LongString(LongString::from(vec![0xff, b'a']));
        for (value, shown) in [
            (odd(), "\\xff61"),
            (AMQPValue::ByteArray(ByteArray::from(vec![0xc3])), "\\xc3"),
            (AMQPValue::FieldArray(FieldArray::from(vec![odd()])), r#"["\\xff61"]"#),
            (table(vec![("deep", table(vec![("er", odd())]))]), r#"{"deep":{"er":"\\xff61"}}"#),
        ] {
            let got = decoded(vec![("a", text("before")), ("h", value.clone()), ("z", text("after"))]);
            assert_eq!(got.headers.get("h"), Some(shown), "{value:?}");
            assert!(got.malformed.as_deref().is_some_and(|why| why.contains("\"h\"")), "{:?}", got.malformed);
        }
    }

    #[test]
    fn only_a_delivery_that_ended_in_nothing_counts_as_redelivered() {
        let count = |n| vec![("x-delivery-count", n)];
        let death = || {
            vec![("x-death", AMQPValue::FieldArray(FieldArray::from(vec![table(vec![("count", AMQPValue::LongLongInt(3))])])))]
        };
        for (headers, flag, redelivered, returned) in [
            (vec![], false, false, false),
            (vec![], true, true, false),
            (count(AMQPValue::LongLongInt(0)), false, false, false),
            (count(AMQPValue::LongLongInt(1)), false, true, true),
            (count(AMQPValue::LongUInt(2)), true, true, true),
            (count(text("2")), false, false, false),
            (death(), false, false, false),
        ] {
            let it = delivery(headers, flag);
            assert_eq!(returns(&it) > 0, returned, "{it:?}");
            assert_eq!(incoming(delivery_like(&it), &IdFrom::Message).redelivered, redelivered, "{it:?}");
        }
        assert_eq!(decoded(death()).headers.get("x-death"), Some(r#"[{"count":3}]"#));
    }

    fn delivery_like(it: &Delivery) -> Delivery {
        let mut same = Delivery::mock(1, "ex".into(), "key".into(), it.redelivered, Vec::new());
        same.properties = it.properties.clone();
        same
    }

    #[test]
    fn properties_come_under_the_names_by_which_they_are_sent() {
        let mut it = delivery(vec![("correlation-id", text("of the header")), ("amqp-user-id", text("kept"))], false);
        it.properties = it
            .properties
            .with_type("t".into())
            .with_content_type("text/plain".into())
            .with_correlation_id("c".into())
            .with_reply_to("r".into())
            .with_priority(7)
            .with_expiration("5000".into())
            .with_timestamp(12)
            .with_content_encoding("gzip".into())
            .with_app_id("app".into());
        let got = incoming(it, &IdFrom::Message);
        assert_eq!((got.message_id.as_deref(), &*got.kind, &*got.content_type), (Some("1"), "t", "text/plain"));
        assert_eq!(got.source, Some(Source::RabbitMq { exchange: "ex".into(), routing_key: "key".into() }));
        for (name, value) in [
            ("correlation-id", "c"),
            ("amqp-reply-to", "r"),
            ("amqp-priority", "7"),
            ("amqp-expiration", "5000"),
            ("amqp-timestamp", "12"),
            ("content-encoding", "gzip"),
            ("amqp-app-id", "app"),
            ("amqp-user-id", "kept"),
        ] {
            assert_eq!(got.headers.get(name), Some(value), "{name}");
        }
    }
}
