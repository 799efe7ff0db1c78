//! What arrives of a message, and what can't be sent.

use std::time::{Duration, SystemTime};

use lapin::types::{AMQPValue, FieldArray, FieldTable};
use posthouse::transport::{Outcome, Transport};
use posthouse::{MessageId, Route};
use serde_json::json;

use super::*;
use crate::support::bounded;

#[tokio::test]
async fn every_property_and_header_type_arrives() {
    let rig = Rig::new().await;
    let (exchange, queue) = (rig.exchange().await, rig.queue("q", &[("x-max-priority", AMQPValue::LongLongInt(9))]).await);
    rig.bind(&queue, "a.b/c").await;
    let mut message = message("snow ☃\0".as_bytes());
    message.message_id = MessageId::from("id-7");
    message.kind = "order.placed.v1".into();
    message.key = Some("order-7 ☃".into());
    message.content_type = "application/json".into();
    message.created_at = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_900);
    message.attempt = 3;
    for (name, value) in [
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("correlation-id", "correlated"),
        ("amqp-reply-to", "answers"),
        ("tenant", "from the message"),
        ("empty", ""),
    ] {
        message.headers.insert(name, value);
    }
    let route = with(&format!("{exchange}/a.b/c"), |r| {
        r.app_id = Some("shop".into());
        r.priority = Some(4);
        r.expiration = Some(Duration::from_secs(60));
        r.headers = [
            ("tenant", json!("from the route")),
            ("text", json!("té")),
            ("yes", json!(true)),
            ("large", json!(i64::MAX)),
            ("small", json!(-1)),
            ("half", json!(0.5)),
            ("nothing", json!(null)),
            ("list", json!([1, "two", [false], null])),
            ("table", json!({ "inner": { "n": 1.25 } })),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    });
    let transport = transport();
    assert_eq!(deliver(&transport, message, route, PATIENCE).await, Outcome::Delivered);

    let got = rig.take(&queue).await.expect("it is in the queue");
    assert_eq!(got.data, "snow ☃\0".as_bytes());
    assert_eq!(got.routing_key.as_str(), "a.b/c");
    let p = &got.properties;
    let short = |s: &Option<lapin::types::ShortString>| s.as_ref().map(ToString::to_string).unwrap_or_default();
    assert_eq!(short(p.message_id()), "id-7");
    assert_eq!(short(p.kind()), "order.placed.v1");
    assert_eq!(short(p.content_type()), "application/json");
    assert_eq!(short(p.correlation_id()), "correlated");
    assert_eq!(short(p.reply_to()), "answers");
    assert_eq!(short(p.app_id()), "shop");
    assert_eq!(short(p.expiration()), "60000");
    assert_eq!(*p.priority(), Some(4));
    assert_eq!(*p.delivery_mode(), Some(2), "persistent");
    assert_eq!(*p.timestamp(), Some(1_700_000_000));

    let table = |entries: Vec<(&str, AMQPValue)>| {
        let mut table = FieldTable::default();
        for (name, value) in entries {
            table.insert(name.into(), value);
        }
        table
    };
    let expected = table(vec![
        ("traceparent", text("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
        ("tenant", text("from the message")),
        ("empty", text("")),
        ("text", text("té")),
        ("yes", AMQPValue::Boolean(true)),
        ("large", AMQPValue::LongLongInt(i64::MAX)),
        ("small", AMQPValue::LongLongInt(-1)),
        ("half", AMQPValue::Double(0.5)),
        ("nothing", AMQPValue::Void),
        (
            "list",
            AMQPValue::FieldArray(FieldArray::from(vec![
                AMQPValue::LongLongInt(1),
                text("two"),
                AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::Boolean(false)])),
                AMQPValue::Void,
            ])),
        ),
        (
            "table",
            AMQPValue::FieldTable(table(vec![("inner", AMQPValue::FieldTable(table(vec![("n", AMQPValue::Double(1.25))])))])),
        ),
        ("posthouse-key", text("order-7 ☃")),
        ("posthouse-attempt", AMQPValue::LongLongInt(3)),
    ]);
    assert_eq!(p.headers().as_ref(), Some(&expected));
    transport.close().await;
}

#[tokio::test]
async fn a_message_overrides_its_route_and_a_route_may_be_transient() {
    let rig = Rig::new().await;
    let queue = rig.queue("q", &[]).await;
    let mut message = message("");
    message.headers.insert("amqp-priority", "255");
    message.headers.insert("amqp-expiration", "4294967295");
    let route = with(&format!("/{queue}"), |r| {
        r.persistent = false;
        r.priority = Some(1);
        r.expiration = Some(Duration::from_secs(1));
    });
    assert_eq!(deliver(&transport(), message, route, PATIENCE).await, Outcome::Delivered);
    let got = rig.take(&queue).await.expect("it is in the queue");
    assert_eq!(got.data, b"");
    assert_eq!(*got.properties.delivery_mode(), Some(1));
    assert_eq!(*got.properties.priority(), Some(255));
    assert_eq!(got.properties.expiration().as_ref().map(ToString::to_string).as_deref(), Some("4294967295"));
    assert!(got.properties.kind().is_none() && got.properties.app_id().is_none());
}

/// What would close the channel or the connection is not sent, and what is sent beside it is not disturbed.
#[tokio::test]
async fn what_amqp_cannot_carry_is_rejected() {
    let rig = Rig::new().await;
    let queue = rig.queue("q", &[]).await;
    let to = route(&format!("/{queue}"));
    let header = |name: &str, value: &str| {
        let mut m = message("x");
        m.headers.insert(name, value);
        (m, to.clone())
    };
    let long = "x".repeat(256);
    let batch = vec![
        (message("x"), to.clone()),
        header("amqp-priority", "256"),
        header("amqp-expiration", "1.5"),
        header("amqp-expiration", "4294967296"),
        header("CC", "elsewhere"),
        header(&long, "x"),
        header("correlation-id", &long),
        header("large", &"x".repeat(131_072)),
        (message("x"), route("no-slash")),
        (message("x"), route("/")),
        (message("x"), to.clone()),
    ];
    let count = batch.len();
    let outcomes = send_all(&transport(), batch).await;
    assert_eq!((&outcomes[0].1, &outcomes[count - 1].1), (&Outcome::Delivered, &Outcome::Delivered));
    let errors: Vec<_> = outcomes[1..count - 1].iter().map(|(_, outcome)| rejected(outcome)).collect();
    for (error, part) in errors.iter().zip([
        "0 to 255",
        "whole milliseconds",
        "at most 4294967295",
        "CC is reserved",
        "name has 256 bytes",
        "correlation-id has 256 bytes",
        "frame_max",
        "exchange/routing.key",
        "neither exchange nor queue",
    ]) {
        says(error, &[part]);
    }
    assert_eq!(rig.ids(&queue).await.len(), 2);
}

/// The largest headers that fit into a frame do arrive: the estimate is not too careful by more than a few bytes.
#[tokio::test]
async fn headers_up_to_a_frame_arrive() {
    let rig = Rig::new().await;
    let queue = rig.queue("q", &[]).await;
    let mut largest = message("x");
    largest.headers.insert("large", "x".repeat(130_800));
    let outcome = deliver(&transport(), largest, route(&format!("/{queue}")), PATIENCE).await;
    assert_eq!(outcome, Outcome::Delivered);
}

#[test]
fn a_wrong_route_is_refused_at_the_start() {
    let transport = RabbitMq::new("amqp://localhost").expect("settings");
    let check = |route: &Route| transport.check(route);
    assert_eq!(check(&route("orders/placed")), Ok(()));
    assert_eq!(check(&route("/mails")), Ok(()));
    says(&check(&route("orders")).unwrap_err(), &["\"orders\" has no slash", "\"/queue\""]);
    says(&check(&route(&format!("{}/k", "x".repeat(256)))).unwrap_err(), &["256 bytes"]);
    let queue = |r: &mut RabbitMqRoute| {
        r.declare = true;
        r.queue = Some("q".into());
    };
    assert_eq!(check(&with("orders/placed", queue)), Ok(()));
    says(&check(&with("/mails", queue)).unwrap_err(), &["remove rabbitmq.queue"]);
    let cc = |value| move |r: &mut RabbitMqRoute| drop(r.headers.insert("CC".into(), value));
    assert_eq!(check(&with("orders/placed", cc(json!(["a", "b"])))), Ok(()));
    says(&check(&with("orders/placed", cc(json!("a")))).unwrap_err(), &["must be a list"]);
}

/// P3, O-limits: the broker's size limit fails those above it at once, and costs the others nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_brokers_limit_is_rejected() {
    bounded(async {
        let broker = crate::support::broker::Broker::rabbitmq_with("max_message_size = 1000\n").await;
        let rig = Rig::at(broker.url()).await;
        let queue = rig.queue("q", &[]).await;
        let transport = RabbitMq::new(broker.url()).expect("settings");
        for round in 0..3 {
            let sizes: Vec<usize> = (0..200).map(|i| if i % 50 == 25 { 1_001 } else { 1_000 }).collect();
            let batch = sizes.iter().map(|n| (message(vec![b'x'; *n]), route(&format!("/{queue}")))).collect();
            let mut delivered = HashSet::new();
            for ((id, outcome), size) in send_all(&transport, batch).await.into_iter().zip(sizes) {
                if size > 1_000 {
                    says(rejected(&outcome), &["1001 bytes", "1000 at most", "max_message_size"]);
                } else {
                    assert_eq!(outcome, Outcome::Delivered, "round {round}");
                    delivered.insert(id);
                }
            }
            assert_eq!(rig.ids(&queue).await, delivered);
        }
        transport.close().await;
    })
    .await;
}
