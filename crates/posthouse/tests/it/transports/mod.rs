//! What every transport must do, against its real receiver. What is peculiar to one has its own tests.

mod statuses;
mod targets;
mod waiting;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use posthouse::testing::{deliver, deliver_batch};
use posthouse::transport::{Outcome, Transport};
use posthouse::{CloudEvents, Envelope, Message, Ordering, Relay};

use self::targets::{Target, ToHttp, ToKafka, ToNats, ToRabbitMq};
use crate::relay::quick;
use crate::support::{Postgres, SOON, TestDb, messages, pending, wait_for};

/// Long enough for any machine; tests that wait for a deadline set their own.
const PATIENCE: Duration = Duration::from_secs(30);

macro_rules! on_all_transports {
    ($($name:ident),+ $(,)?) => {
        on_all_transports!(@ http ToHttp $($name)+);
        on_all_transports!(@ rabbitmq ToRabbitMq $($name)+);
        on_all_transports!(@ kafka ToKafka $($name)+);
        on_all_transports!(@ nats ToNats $($name)+);
    };
    (@ $kind:ident $target:ident $($name:ident)+) => {
        mod $kind { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)] async fn $name() { crate::support::bounded(super::$name::<super::$target>()).await } )+ }
    };
}

on_all_transports!(
    everything_of_a_message_arrives,
    each_of_a_large_batch_is_answered_and_arrives,
    what_nobody_takes_is_not_delivered_and_disturbs_no_other,
    a_receiver_that_is_down_is_unavailable,
    closing_keeps_what_was_confirmed_and_answers_the_rest,
    cloudevents_in_headers,
    cloudevents_as_one_document,
    through_a_relay_everything_arrives_and_nothing_stays_pending,
);

fn message(payload: impl Into<Vec<u8>>) -> Envelope {
    Envelope::for_test("suite", payload)
}

async fn everything_of_a_message_arrives<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let every_byte: Vec<u8> = (0..=255).collect();
    let large = every_byte.repeat(400);
    for (n, payload) in [every_byte, large, b"{}".to_vec(), Vec::new()].into_iter().enumerate() {
        let mut m = message(payload.clone());
        m.message_id = format!("id %20 ä 💶 {n}").into();
        m.kind = "order.placed/ä".into();
        m.key = Some("Kunde „7“ 客户".into());
        m.content_type = "application/x-order".into();
        m.headers.insert("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        assert_eq!(deliver(&transport, m.clone(), target.route(), PATIENCE).await, Outcome::Delivered);
        let got = target.received(if T::SCHEME == "amqp" { 1 } else { n + 1 }).await.pop().unwrap();
        assert_eq!(got.id, m.message_id.as_str());
        assert_eq!(got.kind.as_deref(), Some("order.placed/ä"));
        assert_eq!(got.key, m.key);
        assert_eq!(got.content_type.as_deref(), Some("application/x-order"));
        assert_eq!(got.headers["traceparent"], "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        assert!(got.payload == payload, "{} bytes, got {}", payload.len(), got.payload.len());
    }
}

async fn each_of_a_large_batch_is_answered_and_arrives<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let batch: Vec<_> = (0..2_000).map(|n| (message(n.to_string()), target.route())).collect();
    let sent: Vec<String> = batch.iter().map(|(m, _)| m.message_id.to_string()).collect();
    let outcomes = deliver_batch(&transport, batch, PATIENCE).await;
    let delivered: BTreeSet<usize> = outcomes.iter().filter(|(_, o)| *o == Outcome::Delivered).map(|(n, _)| *n).collect();
    assert_eq!((outcomes.len(), delivered.len()), (2_000, 2_000), "each once");
    let got: Vec<String> = target.received(2_000).await.into_iter().map(|r| r.id).collect();
    if T::IN_ORDER {
        assert!(got == sent, "in the order of the batch");
    } else {
        assert!(got.into_iter().collect::<HashSet<_>>() == sent.into_iter().collect(), "the same ids");
    }
}

async fn what_nobody_takes_is_not_delivered_and_disturbs_no_other<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let batch = (0..20).map(|n| (message(n.to_string()), if n % 2 == 0 { target.route() } else { target.nowhere() })).collect();
    let outcomes: HashMap<usize, Outcome> = deliver_batch(&transport, batch, PATIENCE).await.into_iter().collect();
    for (n, outcome) in outcomes {
        match outcome {
            Outcome::Delivered => assert_eq!(n % 2, 0, "nobody took {n}"),
            Outcome::Retry { error, .. } => {
                assert_eq!(n % 2, 1, "{}", error.error);
                assert!(error.error.contains("nowhere"), "the error names the address: {}", error.error);
            }
            other => panic!("{n}: {other:?}"),
        }
    }
    assert_eq!(target.received(10).await.len(), 10);
}

async fn a_receiver_that_is_down_is_unavailable<T: Target>() {
    let (transport, route) = T::dead();
    let started = Instant::now();
    let deadline = Duration::from_secs(10);
    let outcomes = deliver_batch(&transport, (0..5).map(|n| (message(n.to_string()), route.clone())).collect(), deadline).await;
    for (_, outcome) in outcomes {
        let Outcome::Unavailable(failure) = outcome else { panic!("{outcome:?}") };
        assert!(failure.error.contains("127.0.0.1:9"), "{}", failure.error);
        assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
    }
    assert!(started.elapsed() < deadline + Duration::from_secs(1));
    assert!(!format!("{transport:?}").contains("hunter2"));
    transport.close().await;
}

async fn closing_keeps_what_was_confirmed_and_answers_the_rest<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let batch: Vec<_> = (0..500).map(|n| (message(n.to_string()), target.route())).collect();
    let ids: Vec<String> = batch.iter().map(|(m, _)| m.message_id.to_string()).collect();
    // Close comes while most of them are on their way.
    let (outcomes, ()) = tokio::join!(deliver_batch(&transport, batch, PATIENCE), async {
        tokio::task::yield_now().await;
        transport.close().await;
    });
    assert_eq!(outcomes.len(), 500, "each is answered");
    let delivered: HashSet<String> =
        outcomes.iter().filter(|(_, o)| *o == Outcome::Delivered).map(|(n, _)| ids[*n].clone()).collect();
    let got: HashSet<String> = target.received(delivered.len()).await.into_iter().map(|r| r.id).collect();
    assert!(delivered.is_subset(&got), "nothing is called delivered that isn't there");
}

fn event() -> Envelope {
    let mut m = message("{\"order\":7}");
    m.content_type = "application/json".into();
    m.kind = "order.placed.v1".into();
    m.key = Some("customer-7".into());
    m
}

async fn cloudevents_in_headers<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let (m, route) = (event(), target.route().cloudevents(CloudEvents::binary("/shop")));
    assert_eq!(deliver(&transport, m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let got = target.received(1).await.remove(0);
    let attribute = |name: &str| {
        let name = format!("{}{name}", T::CLOUDEVENTS).to_lowercase();
        got.headers.get(&name).unwrap_or_else(|| panic!("{name} in {:?}", got.headers)).clone()
    };
    assert_eq!(attribute("specversion"), "1.0");
    assert_eq!(attribute("id"), m.message_id.as_str());
    assert_eq!(attribute("source"), "/shop");
    assert_eq!(attribute("type"), "order.placed.v1");
    assert_eq!(attribute("partitionkey"), "customer-7");
    assert!(attribute("time").ends_with('Z'));
    assert_eq!(got.content_type.as_deref(), Some("application/json"));
    assert_eq!(got.payload, m.payload);
}

async fn cloudevents_as_one_document<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let (mut m, route) = (event(), target.route().cloudevents(CloudEvents::structured("/shop")));
    m.headers.insert(format!("{}id", T::CLOUDEVENTS), "forged");
    assert_eq!(deliver(&transport, m.clone(), route, PATIENCE).await, Outcome::Delivered);
    let got = target.received(1).await.remove(0);
    assert!(got.content_type.as_deref().is_some_and(|t| t.starts_with("application/cloudevents+json")), "{got:?}");
    let document: serde_json::Value = serde_json::from_slice(&got.payload).unwrap();
    assert_eq!(document["id"], m.message_id.as_str());
    assert_eq!(document["source"], "/shop");
    assert_eq!(document["data"]["order"], 7);
    assert!(!got.headers.keys().any(|name| name.starts_with(&T::CLOUDEVENTS.to_lowercase())), "{:?}", got.headers);
}

/// T6: each transport with each kind of order, keyed and not.
async fn through_a_relay_everything_arrives_and_nothing_stays_pending<T: Target>() {
    let (target, transport) = (T::new().await, T::transport());
    let outbox = Postgres::fresh().await;
    let mut orders = vec![Ordering::Strict, Ordering::None];
    orders.extend(transport.pipelines().then_some(Ordering::Pipelined));
    let mut settings = quick();
    settings.send_timeout = Duration::from_secs(10);
    settings.lease = Duration::from_secs(20);
    settings.heartbeat = Duration::from_secs(2);
    let mut builder = Relay::builder(&outbox).settings(settings).transport(T::SCHEME, transport);
    for (n, order) in orders.iter().enumerate() {
        builder = builder.route(format!("route-{n}"), target.route().ordering(*order));
    }
    let relay = builder.start().await.unwrap();
    let mut sent = HashSet::new();
    for n in 0..300 {
        let mut m = Message::to(format!("route-{}", n % orders.len())).payload(n.to_string());
        if n % 2 == 0 {
            m = m.key(n % 20);
        }
        sent.insert(outbox.publish_alone(m).await.unwrap().to_string());
    }
    wait_for("an empty pending set", SOON * 2, async || pending::<Postgres>(&outbox).await == 0).await;
    assert!(messages(&**relay.store()).await.iter().all(|m| m.status == "SENT"));
    let got = target.received(300).await;
    assert_eq!(got.len(), 300, "once each, since nothing failed");
    assert_eq!(got.into_iter().map(|r| r.id).collect::<HashSet<_>>(), sent);
    relay.shutdown(Duration::from_secs(15)).await;
}
