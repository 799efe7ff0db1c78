//! What stands where in a record.

use std::collections::HashMap;

use rdkafka::message::{Headers as _, Message};

use crate::consumer::decode::Received;

/// A record as it came off the wire; [`KafkaConsumer`](super::KafkaConsumer) has the table.
pub(super) fn received(record: &impl Message) -> Received {
    let mut out = Received { payload: record.payload().unwrap_or_default().to_vec(), ..Received::default() };
    match record.key().map(std::str::from_utf8) {
        None => {}
        Some(Ok(key)) => out.key = Some(key.to_owned()),
        Some(Err(_)) => {
            let bytes = record.key().unwrap_or_default();
            out.key = Some(bytes.iter().fold("\\x".to_owned(), |text, byte| text + &format!("{byte:02x}")));
            out.malformed = Some("the record's key is not UTF-8".into());
        }
    }
    let Some(headers) = record.headers() else { return out };
    let mut left: HashMap<&str, usize> = HashMap::new();
    for header in headers.iter() {
        *left.entry(header.key).or_default() += 1;
    }
    let all = left.clone();
    for header in headers.iter() {
        let left = left.entry(header.key).or_default();
        let name = match *left {
            // The last of a name counts, as in Kafka's own clients.
            0 | 1 => header.key.to_owned(),
            _ => format!("{}[{}]", header.key, all[header.key] - *left),
        };
        *left = left.saturating_sub(1);
        out.headers.push((name, header.value.unwrap_or_default().to_vec()));
    }
    out
}

#[cfg(test)]
mod tests {
    use rdkafka::Timestamp;
    use rdkafka::message::{Header, OwnedHeaders, OwnedMessage};

    use super::*;
    use crate::inbox::Source;
    use crate::settings::IdFrom;

    fn record(payload: Option<&[u8]>, key: Option<&[u8]>, headers: &[(&str, Option<&[u8]>)]) -> Received {
        let mut all = OwnedHeaders::new();
        for (key, value) in headers {
            all = all.insert(Header { key, value: *value });
        }
        let [payload, key] = [payload, key].map(|bytes| bytes.map(<[u8]>::to_vec));
        received(&OwnedMessage::new(payload, key, "t".into(), Timestamp::NotAvailable, 1, 2, Some(all)))
    }

    #[test]
    fn nothing_of_a_record_is_lost() {
        let got = record(
            Some(b"\x00\xff"),
            Some("ü".as_bytes()),
            &[("a", Some(b"1")), ("b", None), ("a", Some(b"2")), ("a", Some(b"3")), ("c", Some(b"\xff"))],
        );
        assert_eq!((&*got.payload, got.key.as_deref(), &got.malformed), (&b"\x00\xff"[..], Some("ü"), &None));
        let got = got.incoming(&IdFrom::Message, Source::Kafka { topic: "t".into(), partition: 1, offset: 2 });
        let headers: Vec<_> = got.headers.iter().collect();
        assert_eq!(headers, [("a", "3"), ("a[0]", "1"), ("a[1]", "2"), ("b", ""), ("c", "\\xff")]);
        assert!(got.malformed.unwrap().contains("\"c\""));
    }

    #[test]
    fn a_tombstone_has_an_empty_payload() {
        let got = record(None, None, &[("posthouse-message-id", Some(b"7")), ("posthouse-type", Some(b"t"))]);
        let got = got.incoming(&IdFrom::Message, Source::Kafka { topic: "t".into(), partition: 1, offset: 2 });
        assert_eq!((got.message_id.as_deref(), &*got.kind, &*got.payload, got.key), (Some("7"), "t", &b""[..], None));
    }

    #[test]
    fn a_key_that_is_not_text_makes_the_record_malformed_and_is_kept() {
        let got = record(Some(b"x"), Some(&[0xff, 0]), &[("posthouse-message-id", Some(b"7"))]);
        let got = got.incoming(&IdFrom::Message, Source::Kafka { topic: "t".into(), partition: 1, offset: 2 });
        assert_eq!(got.key.as_deref(), Some("\\xff00"));
        assert!(got.malformed.unwrap().contains("key"));
    }
}
