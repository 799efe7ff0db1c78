//! What arrives, and what each way to fail is answered with.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant, UNIX_EPOCH};

use posthouse::testing::{deliver, deliver_batch};
use posthouse::transport::{Kafka, Outcome, Transport};
use posthouse::{Error, Route};

use super::{
    PATIENCE, client, create_topic, fresh_name, kafka, kafka_with, message, pipelined, records, rejected, retry, settings, to,
    topic, unavailable, url,
};
use crate::support::bounded;

#[tokio::test]
async fn the_record_carries_the_message() {
    let topic = topic(1, &[]).await;
    let mut m = message(Some("kunde-ä"), vec![0, 1, 255]);
    m.message_id = "id %ä".into();
    m.kind = "order placed".into();
    m.attempt = 3;
    m.content_type = "application/x-orders".into();
    m.created_at = UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
    m.headers = [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("X-Umlaut", "ä"),
        ("empty", ""),
        ("ce_own", "kept where no CloudEvents are sent"),
        // None of these may get through.
        ("Content-Type", "text/forged"),
        ("Posthouse-Attempt", "forged"),
        ("posthouse-anything", "forged"),
    ]
    .into_iter()
    .collect();
    assert_eq!(deliver(&kafka(), m, to(&topic), PATIENCE).await, Outcome::Delivered);
    let mut plain = message(None, "");
    plain.message_id = "plain".into();
    assert_eq!(deliver(&kafka(), plain, to(&topic), PATIENCE).await, Outcome::Delivered);

    let found = records(client(&url(), &[]), &topic).await;
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].key.as_deref(), Some("kunde-ä"));
    assert_eq!(found[0].value, [0, 1, 255]);
    assert_eq!(found[0].timestamp, Some(1_700_000_000_123));
    let expected: BTreeMap<&str, &str> = [
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("X-Umlaut", "ä"),
        ("empty", ""),
        ("ce_own", "kept where no CloudEvents are sent"),
        ("content-type", "application/x-orders"),
        ("posthouse-message-id", "id %ä"),
        ("posthouse-type", "order placed"),
        ("posthouse-attempt", "3"),
    ]
    .into();
    assert_eq!(found[0].headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<BTreeMap<_, _>>(), expected);
    assert_eq!((found[1].key.as_deref(), found[1].text().as_str()), (None, ""));
    let expected: BTreeMap<&str, &str> =
        [("content-type", "application/octet-stream"), ("posthouse-message-id", "plain"), ("posthouse-attempt", "1")].into();
    assert_eq!(found[1].headers.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect::<BTreeMap<_, _>>(), expected);
}

#[tokio::test]
async fn settings_and_routes_are_checked_without_a_connection() {
    let Err(Error::Config(why)) = Kafka::new(settings("nowhere", &[("acks", "0"), ("sasl.pasword", "s3cret")])) else {
        panic!("expected an error")
    };
    assert!(why.contains("brokers: \"nowhere\"") && why.contains("acks") && why.contains("sasl.pasword"), "{why}");
    assert!(!why.contains("s3cret"), "{why}");
    let kafka = Kafka::new("nowhere.invalid:1").unwrap();
    assert_eq!(kafka.check(&to("orders.v1")), Ok(()));
    assert!(kafka.check(&to("a b")).unwrap_err().contains("\"a b\" is not a Kafka topic"));
    assert!(kafka.check(&Route::to("kafka:")).is_err());
    assert!(kafka.pipelines());
    assert!(!format!("{:?}", Kafka::new(settings("a:1", &[("sasl.password", "s3cret")])).unwrap()).contains("s3cret"));
}

/// L2: and the others go on; it is there as soon as the topic is.
async fn missing_topic(route: fn(&str) -> Route) {
    let (there, missing) = (topic(1, &[]).await, fresh_name());
    let kafka = kafka();
    let asked = Instant::now();
    let (first, others) = tokio::join!(
        // Less than relay.send_timeout.
        deliver(&kafka, message(Some("k"), "lost?"), route(&missing), Duration::from_secs(9)),
        async {
            let mut slowest = Duration::ZERO;
            while asked.elapsed() < Duration::from_secs(2) {
                let started = Instant::now();
                assert_eq!(deliver(&kafka, message(Some("k"), "x"), route(&there), PATIENCE).await, Outcome::Delivered);
                slowest = slowest.max(started.elapsed());
            }
            slowest
        }
    );
    let error = retry(first).error;
    println!("missing topic: {error} after {:?}; others took up to {others:?}", asked.elapsed());
    assert!(error.contains(&missing) && error.contains("doesn't exist"), "{error}");
    assert!(others < Duration::from_secs(1), "{others:?}");

    create_topic(&client(&url(), &[]), &missing, 1, &[]).await;
    let created = Instant::now();
    while deliver(&kafka, message(Some("k"), "found"), route(&missing), PATIENCE).await != Outcome::Delivered {
        assert!(created.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("delivered {:?} after the topic was made", created.elapsed());
    let found: Vec<_> = records(client(&url(), &[]), &missing).await.iter().map(super::Record::text).collect();
    assert_eq!(found, ["found"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_topic_is_tried_again() {
    bounded(missing_topic(to)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_topic_is_tried_again_pipelined() {
    bounded(missing_topic(pipelined)).await;
}

/// P3: by the client's limit, and by the topic's. What was in one batch with it, and the batch that is only too long as
/// a whole, get through.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_large_is_rejected_and_takes_nobody_along() {
    let topic = topic(1, &[("max.message.bytes", "4000")]).await;
    let kafka = kafka();
    let error = rejected(deliver(&kafka, message(None, vec![b'x'; 1_100_000]), to(&topic), PATIENCE).await).error;
    assert!(error.contains("larger") && error.contains(&topic), "{error}");
    let batch = (0..100).map(|i| (message(None, vec![b'x'; if i == 50 { 5_000 } else { 200 }]), to(&topic))).collect();
    let mut outcomes: HashMap<_, _> = deliver_batch(&kafka, batch, PATIENCE).await.into_iter().collect();
    let error = rejected(outcomes.remove(&50).unwrap()).error;
    assert!(error.contains("larger") && error.contains(&topic), "{error}");
    assert!(outcomes.values().all(|o| *o == Outcome::Delivered), "{outcomes:?}");
    assert_eq!(records(client(&url(), &[]), &topic).await.len(), 99);
}

/// A compacted topic takes no record without a key, and says so of a whole batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_record_is_rejected_and_takes_nobody_along() {
    let topic = topic(1, &[("cleanup.policy", "compact")]).await;
    let kafka = kafka();
    let key = |i| if i == 7 { None } else { Some("k") };
    let batch = (0..20).map(|i| (message(key(i), i.to_string()), to(&topic))).collect();
    let mut outcomes: HashMap<_, _> = deliver_batch(&kafka, batch, PATIENCE).await.into_iter().collect();
    rejected(outcomes.remove(&7).unwrap());
    assert!(outcomes.values().all(|o| *o == Outcome::Delivered), "{outcomes:?}");
}

/// L4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_brokers_are_unavailable_by_the_deadline() {
    // Bound and not listening: nobody else gets the port.
    let port = tokio::net::TcpSocket::new_v4().unwrap();
    port.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = port.local_addr().unwrap().to_string();
    for (brokers, why) in [(closed.as_str(), "refused"), ("no-such-host.invalid:9092", "resolve")] {
        for route in [to("orders"), pipelined("orders")] {
            let kafka = Kafka::new(brokers).unwrap();
            let deadline = Duration::from_secs(2);
            let started = Instant::now();
            let send = deliver(&kafka, message(Some("k"), "x"), route.clone(), deadline);
            let error = unavailable(send.await).error;
            println!("{error} after {:?}", started.elapsed());
            assert!(error.contains(brokers) && error.to_lowercase().contains(why), "{error}");
            kafka.close().await;
        }
    }
}

/// The queue has room for a few records: the rest wait, in their order.
async fn full_queue(route: fn(&str) -> Route) {
    let topic = topic(3, &[]).await;
    let kafka = kafka_with(&[("queue.buffering.max.messages", "10")]);
    let batch = |start: usize| -> Vec<_> {
        (start..start + 1_000).map(|i| (message(Some(&(i % 7).to_string()), i.to_string()), route(&topic))).collect()
    };
    let started = Instant::now();
    let (a, b) = tokio::join!(deliver_batch(&kafka, batch(0), PATIENCE), deliver_batch(&kafka, batch(1_000), PATIENCE));
    println!("2 000 records through a queue of 10 in {:?}", started.elapsed());
    assert!(a.iter().chain(&b).all(|(_, o)| *o == Outcome::Delivered));
    let mut last = HashMap::new();
    let found = records(client(&url(), &[]), &topic).await;
    assert_eq!(found.len(), 2_000);
    for record in found {
        let number: usize = record.text().parse().unwrap();
        if let Some(before) = last.insert((record.key.clone(), number / 1_000), number) {
            assert!(before < number, "{before} before {number}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_keeps_the_order() {
    bounded(full_queue(to)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_keeps_the_order_pipelined() {
    bounded(full_queue(pipelined)).await;
}

/// L20.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_hands_over_what_is_queued_and_answers_everything() {
    let topic = topic(1, &[]).await;
    let kafka = kafka_with(&[("linger.ms", "500")]);
    assert_eq!(deliver(&kafka, message(None, "first"), to(&topic), PATIENCE).await, Outcome::Delivered);
    let batch = (0..200).map(|i| (message(None, i.to_string()), to(&topic))).collect();
    // Polled second: then all is in the queue, and the batch lingers.
    let (outcomes, ()) = tokio::join!(deliver_batch(&kafka, batch, PATIENCE), kafka.close());
    let delivered = outcomes.iter().filter(|(_, o)| *o == Outcome::Delivered).count();
    assert_eq!((outcomes.len(), delivered), (200, 200), "{outcomes:?}");
    assert_eq!(records(client(&url(), &[]), &topic).await.len(), 201);
    unavailable(deliver(&kafka, message(None, "late"), to(&topic), PATIENCE).await);
}
