//! Queues and exchanges that are there, aren't, or refuse.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use posthouse::transport::{Outcome, Transport};
use tokio::sync::Notify;

use super::*;
use crate::support::broker::Broker;
use crate::support::{bounded, scale};

/// L1: the broker acknowledges what it returns.
#[tokio::test]
async fn what_no_queue_takes_is_not_delivered() {
    let rig = Rig::new().await;
    let exchange = rig.exchange().await;
    let transport = transport();
    let outcome = send(&transport, &format!("{exchange}/nobody")).await;
    says(retry(&outcome), &["312 NO_ROUTE", &format!("\"{exchange}\""), "\"nobody\"", "bind one"]);
    let outcome = send(&transport, "/no-such-queue").await;
    says(retry(&outcome), &["312 NO_ROUTE", "no queue \"no-such-queue\""]);
}

/// L1, with many in flight: each return is attributed to the message it belongs to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_return_belongs_to_one_message_of_many() {
    bounded(async {
        let rig = Rig::new().await;
        let (exchange, queue) = (rig.exchange().await, rig.queue("q", &[]).await);
        rig.bind(&queue, "bound").await;
        let transport = transport();
        let mut delivered = HashSet::new();
        for _ in 0..20 * scale() {
            let batch = (0..500)
                .map(|_| {
                    let key = if fastrand::u8(..) < 100 { "unbound" } else { "bound" };
                    (message("x"), route(&format!("{exchange}/{key}")))
                })
                .collect::<Vec<_>>();
            let bound: Vec<bool> = batch.iter().map(|(_, route)| route.to.ends_with("/bound")).collect();
            for ((id, outcome), bound) in send_all(&transport, batch).await.into_iter().zip(bound) {
                if bound {
                    assert_eq!(outcome, Outcome::Delivered);
                    delivered.insert(id);
                } else {
                    says(retry(&outcome), &["NO_ROUTE"]);
                }
            }
        }
        assert_eq!(rig.ids(&queue).await, delivered);
    })
    .await;
}

/// L2: the binding goes in the middle of it. What counts as delivered is in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_binding_removed_while_publishing_loses_nothing() {
    bounded(async {
        let rig = Rig::new().await;
        let (exchange, queue) = (rig.exchange().await, rig.queue("q", &[]).await);
        let transport = transport();
        let (mut delivered, mut returned) = (HashSet::new(), 0);
        for _ in 0..5 {
            rig.bind(&queue, "k").await;
            let batch: Vec<_> = (0..2_000).map(|_| (message("x"), route(&format!("{exchange}/k")))).collect();
            let unbind = async {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
                let (q, x) = (queue.as_str().into(), exchange.into());
                rig.channel.queue_unbind(q, x, "k".into(), FieldTable::default()).await.expect("unbind");
            };
            let (outcomes, ()) = tokio::join!(send_all(&transport, batch), unbind);
            for (id, outcome) in outcomes {
                if outcome == Outcome::Delivered {
                    delivered.insert(id);
                } else {
                    says(retry(&outcome), &["NO_ROUTE"]);
                    returned += 1;
                }
            }
        }
        assert!(returned > 0 && !delivered.is_empty(), "{returned} returned, {} delivered", delivered.len());
        let there = rig.ids(&queue).await;
        assert_eq!(delivered.difference(&there).count(), 0);
    })
    .await;
}

/// L2: a deleted queue, then a new one.
#[tokio::test]
async fn a_deleted_queue_is_noticed_and_a_new_one_as_well() {
    let rig = Rig::new().await;
    let queue = rig.queue("q", &[]).await;
    let transport = transport();
    let to = format!("/{queue}");
    assert_eq!(send(&transport, &to).await, Outcome::Delivered);
    rig.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.expect("delete");
    says(retry(&send(&transport, &to).await), &["NO_ROUTE"]);
    rig.queue("q", &[]).await;
    assert_eq!(send(&transport, &to).await, Outcome::Delivered);
}

#[tokio::test]
async fn a_full_queue_refuses() {
    let rig = Rig::new().await;
    let limits = [("x-max-length", AMQPValue::LongLongInt(10)), ("x-overflow", text("reject-publish"))];
    let queue = rig.queue("q", &limits).await;
    let transport = transport();
    let batch = (0..50).map(|_| (message("x"), route(&format!("/{queue}")))).collect();
    let mut delivered = HashSet::new();
    for (id, outcome) in send_all(&transport, batch).await {
        if outcome == Outcome::Delivered {
            delivered.insert(id);
        } else {
            says(retry(&outcome), &["refused", &queue, "reject-publish"]);
        }
    }
    assert!((10..50).contains(&delivered.len()), "{}", delivered.len());
    assert_eq!(rig.ids(&queue).await, delivered);
    assert_eq!(send(&transport, &format!("/{queue}")).await, Outcome::Delivered, "there is room again");
}

/// L2: the broker closes the channel for a missing exchange. Nothing else is disturbed, and it goes on when the exchange comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_exchange_disturbs_no_other() {
    bounded(async {
        let (rig, later) = (Rig::new().await, Rig::new().await);
        let (exchange, queue) = (rig.exchange().await, rig.queue("q", &[]).await);
        rig.bind(&queue, "#").await;
        let transport = transport();
        for _ in 0..5 {
            let batch = (0..500)
                .flat_map(|_| {
                    [(message("x"), route(&format!("{}/k", later.name))), (message("x"), route(&format!("{exchange}/k")))]
                })
                .collect();
            for (i, (_, outcome)) in send_all(&transport, batch).await.into_iter().enumerate() {
                if i % 2 == 1 {
                    assert_eq!(outcome, Outcome::Delivered);
                } else {
                    let vhost = "in virtual host \"posthouse\"";
                    says(retry(&outcome), &["no exchange", &later.name, vhost, "rabbitmq.declare = true"]);
                }
            }
        }
        later.exchange().await;
        let late = later.queue("q", &[]).await;
        later.bind(&late, "k").await;
        assert_eq!(send(&transport, &format!("{}/k", later.name)).await, Outcome::Delivered);
    })
    .await;
}

/// L2: an exchange deleted under load. What counts as delivered is in a queue; the other exchange's messages are delivered or
/// counted as nothing, and all goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exchange_deleted_while_publishing_loses_nothing() {
    bounded(async {
        let (doomed, other) = (Rig::new().await, Rig::new().await);
        let (doomed_queue, other_queue) = (doomed.queue("q", &[]).await, other.queue("q", &[]).await);
        other.exchange().await;
        other.bind(&other_queue, "#").await;
        let transport = transport();
        let mut delivered = [HashSet::new(), HashSet::new()];
        let (mut missing, mut lost_connections) = (0, 0);
        for _ in 0..5 {
            doomed.exchange().await;
            doomed.bind(&doomed_queue, "#").await;
            let (first_sent, gone) = (Notify::new(), AtomicBool::new(false));
            let delete = async {
                first_sent.notified().await;
                // At a different point each time.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(..20))).await;
                let name = doomed.name.as_str().into();
                doomed.channel.exchange_delete(name, ExchangeDeleteOptions::default()).await.expect("delete");
                gone.store(true, Relaxed);
            };
            // Until the exchange is gone, and once more.
            let send = async {
                let mut outcomes = Vec::new();
                loop {
                    let last = gone.load(Relaxed);
                    let batch = (0..300)
                        .flat_map(|_| [&doomed, &other].map(|rig| (message("x"), route(&format!("{}/k", rig.name)))))
                        .collect();
                    outcomes.extend(send_all(&transport, batch).await);
                    first_sent.notify_one();
                    if last {
                        return outcomes;
                    }
                }
            };
            let (outcomes, ()) = tokio::join!(send, delete);
            for (i, (id, outcome)) in outcomes.into_iter().enumerate() {
                match outcome {
                    Outcome::Delivered => drop(delivered[i % 2].insert(id)),
                    Outcome::Unavailable(_) => lost_connections += 1,
                    other if i % 2 == 0 => {
                        // Its bindings go first.
                        let error = retry(&other);
                        assert!(error.contains("no exchange") || error.contains("NO_ROUTE"), "{error}");
                        missing += 1;
                    }
                    other => panic!("a message to the other exchange: {other:?}"),
                }
            }
        }
        println!("{missing} found no exchange, {lost_connections} lost their connection");
        assert!(missing > 0);
        for (delivered, (rig, queue)) in delivered.iter().zip([(&doomed, &doomed_queue), (&other, &other_queue)]) {
            let there = rig.ids(queue).await;
            assert!(!delivered.is_empty());
            assert_eq!(delivered.difference(&there).count(), 0);
        }
        assert_eq!(send(&transport, &format!("{}/k", other.name)).await, Outcome::Delivered);
    })
    .await;
}

/// One message makes the broker close the channel, for a reason that names no message: it alone gets the blame.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_closes_the_channel_harms_no_other() {
    bounded(async {
        let rig = Rig::new().await;
        let queue = rig.queue("q", &[]).await;
        let transport = transport();
        for _ in 0..3 {
            let mut batch: Vec<_> = (0..100).map(|_| (message("x"), route(&format!("/{queue}")))).collect();
            // A pseudo-queue that only the channel with its consumer may use.
            batch[60].0.headers.insert("amqp-reply-to", "amq.rabbitmq.reply-to");
            let mut delivered = HashSet::new();
            for (i, (id, outcome)) in send_all(&transport, batch).await.into_iter().enumerate() {
                if i == 60 {
                    says(retry(&outcome), &["closed the channel on this message", "PRECONDITION_FAILED"]);
                } else {
                    assert_eq!(outcome, Outcome::Delivered, "{i}");
                    delivered.insert(id);
                }
            }
            assert_eq!(rig.ids(&queue).await, delivered);
        }
    })
    .await;
}

#[tokio::test]
async fn a_route_declares_exchange_queue_and_binding() {
    let rig = Rig::new().await;
    let transport = transport();
    let queue = format!("{}-declared", rig.name);
    let to = with(&format!("{}/a.b", rig.name), |r| {
        r.declare = true;
        r.queue = Some(queue.clone());
    });
    assert_eq!(deliver(&transport, message("1"), to.clone(), PATIENCE).await, Outcome::Delivered);
    assert_eq!(rig.take(&queue).await.expect("it is in the queue").data, b"1");

    // The binding goes: the message comes back, and the next attempt finds everything declared again.
    let (q, x) = (queue.as_str().into(), rig.name.as_str().into());
    rig.channel.queue_unbind(q, x, "a.b".into(), FieldTable::default()).await.expect("unbind");
    says(retry(&deliver(&transport, message("2"), to.clone(), PATIENCE).await), &["NO_ROUTE"]);
    assert_eq!(deliver(&transport, message("2"), to.clone(), PATIENCE).await, Outcome::Delivered);

    // Another type than the one that is there.
    let fanout = with(&format!("{}/a.b", rig.name), |r| {
        r.declare = true;
        r.exchange_type = posthouse::ExchangeType::Fanout;
    });
    let batch = vec![(message("3"), to.clone()), (message("4"), fanout), (message("5"), to)];
    let outcomes = send_all(&transport, batch).await;
    assert_eq!(outcomes[0].1, Outcome::Delivered);
    says(retry(&outcomes[1].1), &["refused to declare exchange", "PRECONDITION_FAILED", "remove rabbitmq.declare"]);
    assert_eq!(outcomes[2].1, Outcome::Delivered, "a conflict concerns one route");
    rig.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.expect("delete");
    rig.channel.exchange_delete(rig.name.as_str().into(), ExchangeDeleteOptions::default()).await.expect("delete");
}

#[tokio::test]
async fn a_route_declares_a_queue_of_the_default_exchange() {
    let rig = Rig::new().await;
    for queue_type in [posthouse::QueueType::Classic, posthouse::QueueType::Quorum] {
        let queue = format!("{}-{queue_type:?}", rig.name);
        let to = with(&format!("/{queue}"), |r| {
            r.declare = true;
            r.queue_type = queue_type;
        });
        assert_eq!(deliver(&transport(), message("1"), to, PATIENCE).await, Outcome::Delivered);
        rig.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.expect("delete");
    }
}

/// More exchanges than channels that are kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_exchanges_take_turns() {
    bounded(async {
        let rig = Rig::new().await;
        let queue = rig.queue("q", &[]).await;
        let transport = transport();
        for round in 0..2 {
            let batch = (0..150).map(|i| (message("x"), route(&format!("{}-{i}/k", rig.name)))).collect();
            for (_, outcome) in send_all(&transport, batch).await {
                says(retry(&outcome), &["no exchange"]);
            }
            assert_eq!(send(&transport, &format!("/{queue}")).await, Outcome::Delivered, "round {round}");
        }
        transport.close().await;
    })
    .await;
}

/// The permission to write is missing for one exchange.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_permission_is_told() {
    bounded(async {
        let broker = Broker::rabbitmq().await;
        let rig = Rig::at(broker.url()).await;
        let (exchange, queue) = (rig.exchange().await, rig.queue("q", &[]).await);
        rig.bind(&queue, "#").await;
        let permit = |write: &str| {
            let bytes = |text: &str| format!("<<\"{text}\">>");
            let all = ["posthouse", "posthouse", ".*", write, ".*", "test"].map(bytes).join(",");
            format!("rabbit_auth_backend_internal:set_permissions({all}).")
        };
        super::blocked::administer(&broker, &permit("^amq.default$")).await;
        let transport = RabbitMq::new(broker.url()).expect("settings");
        let batch = (0..200)
            .flat_map(|_| [(message("x"), route(&format!("{exchange}/k"))), (message("x"), route(&format!("/{queue}")))])
            .collect();
        for (i, (_, outcome)) in send_all(&transport, batch).await.into_iter().enumerate() {
            if i % 2 == 0 {
                says(retry(&outcome), &["ACCESS_REFUSED", exchange, "permission to write"]);
            } else {
                assert_eq!(outcome, Outcome::Delivered);
            }
        }
        super::blocked::administer(&broker, &permit(".*")).await;
        assert_eq!(send(&transport, &format!("{exchange}/k")).await, Outcome::Delivered);
    })
    .await;
}
