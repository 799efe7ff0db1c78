//! L8: odd headers, and where messages have been.

use lapin::options::QueueDeclareOptions;
use lapin::types::{ByteArray, DecimalValue, FieldArray};

use super::*;
use crate::support::bounded;

fn table(entries: &[(&str, AMQPValue)]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in entries {
        table.insert((*name).into(), value.clone());
    }
    table
}

fn properties(id: &str, headers: FieldTable) -> BasicProperties {
    BasicProperties::default().with_message_id(id.into()).with_type("t".into()).with_headers(headers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_of_every_type_arrive() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let headers = [
            ("text", text("ä"), "ä"),
            ("bytes", AMQPValue::ByteArray(ByteArray::from(b"b".to_vec())), "b"),
            ("null", AMQPValue::Void, "null"),
            ("bool", AMQPValue::Boolean(false), "false"),
            ("i8", AMQPValue::ShortShortInt(-8), "-8"),
            ("u8", AMQPValue::ShortShortUInt(8), "8"),
            ("i16", AMQPValue::ShortInt(-16), "-16"),
            ("i32", AMQPValue::LongInt(-32), "-32"),
            ("i64", AMQPValue::LongLongInt(i64::MIN), "-9223372036854775808"),
            ("f32", AMQPValue::Float(0.1), "0.1"),
            ("f64", AMQPValue::Double(-2.5), "-2.5"),
            ("decimal", AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 1_999 }), "19.99"),
            ("time", AMQPValue::Timestamp(1_700_000_000), "1700000000"),
            (
                "list",
                AMQPValue::FieldArray(FieldArray::from(vec![text("x"), AMQPValue::Void, AMQPValue::LongInt(1)])),
                r#"["x",null,1]"#,
            ),
            (
                "table",
                AMQPValue::FieldTable(table(&[("in", AMQPValue::FieldTable(table(&[("n", text("y"))])))])),
                r#"{"in":{"n":"y"}}"#,
            ),
        ];
        let sent: Vec<_> = headers.iter().map(|(name, value, _)| (*name, value.clone())).collect();
        bench.feed.client().await.publish(&bench.feed.queue, properties("1", table(&sent)), b"{}").await;
        bench.wait_effects(1).await;
        let got = bench.script.seen().pop().unwrap();
        for (name, _, shown) in headers {
            assert_eq!(got.headers.get(name), Some(shown), "{name}");
        }
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// What isn't UTF-8 is set aside with its bytes, and acknowledged only then; what comes behind it isn't disturbed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_that_is_not_utf8_sets_its_message_aside() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let odd = || AMQPValue::LongString(LongString::from(vec![0xff, 0xfe]));
        let nested = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(table(&[("deep", odd())]))]));
        let client = bench.feed.client().await;
        for (id, value) in [("odd", odd()), ("nested", nested)] {
            client.publish(&bench.feed.queue, properties(id, table(&[("h", value)])), b"\x00\xff raw").await;
        }
        bench.send(&message("good")).await;
        bench.wait_effects(1).await;
        for (id, kept) in [("odd", r"\\xfffe"), ("nested", r"xfffe")] {
            bench.fixture.wait_status(id, InboxStatus::Failed).await;
            let row = bench.fixture.shown(id).await;
            assert_eq!(row.payload.as_deref(), Some(&b"\x00\xff raw"[..]));
            assert!(row.headers.as_deref().is_some_and(|h| h.contains(kept)), "{:?}", row.headers);
            assert!(row.row.last_error.as_deref().is_some_and(|why| why.contains("UTF-8")), "{:?}", row.row.last_error);
        }
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// A message that expired in another queue: its `x-death` can be read, and it was not redelivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_lettered_message_says_so_and_is_no_redelivery() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        let client = bench.feed.client().await;
        let before = format!("{}-delay", bench.feed.queue);
        let arguments = table(&[
            ("x-message-ttl", AMQPValue::LongInt(1)),
            ("x-dead-letter-exchange", text("")),
            ("x-dead-letter-routing-key", text(&bench.feed.queue)),
        ]);
        let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
        client.channel.queue_declare(before.as_str().into(), options, arguments).await.unwrap();
        client.publish(&before, properties("1", FieldTable::default()), b"{}").await;
        bench.wait_effects(1).await;
        let got = bench.script.seen().pop().unwrap();
        let deaths: serde_json::Value = serde_json::from_str(got.headers.get("x-death").unwrap()).unwrap();
        assert_eq!(
            (&deaths[0]["queue"], &deaths[0]["reason"], &deaths[0]["count"]),
            (&before.into(), &"expired".into(), &1.into())
        );
        assert!(!got.redelivered);
        consumer.shutdown(SOON).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_message_goes_to_the_dead_letter_exchange() {
    bounded(async {
        let dead = FromRabbitMq::with(&[]).await;
        let feed =
            FromRabbitMq::with(&[("x-dead-letter-exchange", text("")), ("x-dead-letter-routing-key", text(&dead.queue))]).await;
        let mut settings = quick();
        settings.missing_id = MissingId::Reject;
        let bench = feed.bench(Fixture::with(settings).await, |script| script);
        let consumer = bench.consume(ConsumerSettings::default()).await;
        bench.feed.send_raw(b"raw").await;
        wait_for("the refusal", PATIENCE, async || dead.count("messages_ready").await == 1).await;
        bench.wait_acknowledged().await;
        assert_eq!(bench.fixture.count(InboxStatus::Failed).await, 0);
        consumer.shutdown(SOON).await;
    })
    .await;
}
