//! B4, P10: lost connections, brokers that restart or fall silent, queues that go and come.

use lapin::options::QueueDeleteOptions;

use super::*;
use crate::support::bounded;
use posthouse_faults::Mode;

/// Restarted and killed with messages in hand and in the queue: each has its effect once.
async fn restarts(queue_type: QueueType) {
    let broker = Broker::rabbitmq().await;
    let feed = FromRabbitMq::at(broker.url());
    feed.client().await.declare(&feed.queue, &[("x-queue-type", type_of(queue_type))], true).await;
    let bench = feed.bench(Fixture::with(quick()).await, |script| script);
    let consumer = bench.consume(with(2, 20)).await;
    let sending = tokio::spawn({
        let feed = bench.feed.clone();
        async move {
            for n in 0..600 {
                feed.send(&message(&n.to_string()), |route| route).await;
            }
        }
    });
    wait_for("some to be done", PATIENCE, async || consumer.status().processed >= 50).await;
    // Which also brings the queue to its disk, before it is killed.
    broker.restart().await;
    wait_for("more to be done", PATIENCE, async || consumer.status().processed >= 200).await;
    broker.kill().await;
    wait_for("the loss to be told", PATIENCE, async || !consumer.status().connected).await;
    broker.start().await;
    sending.await.unwrap();
    bench.wait_effects(600).await;
    wait_connected(&consumer).await;
    consumer.shutdown(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_classic_queue_is_consumed_across_restarts() {
    bounded(restarts(QueueType::Classic)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_queue_is_consumed_across_restarts() {
    bounded(restarts(QueueType::Quorum)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_is_deleted_and_made_again_is_consumed_again() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        bench.send(&message("1")).await;
        bench.wait_effects(1).await;
        let client = bench.feed.client().await;
        client.channel.queue_delete(bench.feed.queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_down(&consumer, "has no queue").await;
        client.declare(&bench.feed.queue, &[("x-expires", AMQPValue::LongInt(600_000))], false).await;
        wait_connected(&consumer).await;
        bench.send(&message("2")).await;
        bench.wait_effects(2).await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// It starts without a broker, and without a queue, and says which of them it waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_starts_before_its_broker_and_its_queue() {
    bounded(async {
        let mut feed = FromRabbitMq::at(&test_url(Kind::RabbitMq));
        let proxy = feed.by_proxy().await;
        proxy.set(Mode::Cut);
        let bench = feed.bench(Fixture::with(quick()).await, |script| script);
        let consumer = bench.consume(ConsumerSettings::default()).await;
        wait_down(&consumer, "closed the connection during the handshake").await;
        proxy.set(Mode::Open);
        wait_down(&consumer, &format!("has no queue \"{}\"", bench.feed.queue)).await;
        // Stopping doesn't wait for either.
        tokio::time::timeout(SOON, consumer.shutdown(SOON * 10)).await.expect("a shutdown in time");
        let declaring = bench.feed.consumer().declare(QueueType::Quorum).start(&bench.inbox()).await.unwrap();
        wait_connected(&declaring).await;
        bench.send(&message("1")).await;
        bench.wait_effects(1).await;
        let client = bench.feed.client().await;
        client.channel.queue_delete(bench.feed.queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_for("the loss", PATIENCE, async || declaring.status().last_error.is_some_and(|why| why.contains("deleted"))).await;
        wait_connected(&declaring).await;
        bench.send(&message("2")).await;
        bench.wait_effects(2).await;
        declaring.shutdown(SOON).await;
        client.channel.queue_delete(bench.feed.queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_falls_silent_is_noticed_after_two_heartbeats() {
    bounded(async {
        let mut feed = FromRabbitMq::with(&[]).await;
        let proxy = feed.by_proxy().await;
        feed.by.heartbeat = Duration::from_secs(1);
        let bench = feed.bench(Fixture::with(quick()).await, |script| script);
        let consumer = bench.consume(ConsumerSettings::default()).await;
        bench.send(&message("1")).await;
        bench.wait_effects(1).await;
        proxy.set(Mode::Silent);
        let silent = std::time::Instant::now();
        wait_for("the silence to be noticed", PATIENCE, async || !consumer.status().connected).await;
        let took = silent.elapsed();
        assert!(took < Duration::from_secs(6), "{took:?}");
        proxy.set(Mode::Open);
        bench.send(&message("2")).await;
        bench.wait_effects(2).await;
        bench.wait_acknowledged().await;
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// The broker closes the channel of who keeps a message for too long; the others on it come again, and none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledgement_that_is_overdue_costs_a_subscription_and_no_message() {
    bounded(async {
        let broker = Broker::rabbitmq().await;
        let timeouts = "application:set_env(rabbit, consumer_timeout, 500), \
                        application:set_env(rabbit, channel_tick_interval, 200).";
        evaluate(broker.url(), timeouts).await;
        let feed = FromRabbitMq::at(broker.url());
        feed.client().await.declare(&feed.queue, &[], false).await;
        let gate = Arc::new(Semaphore::new(0));
        let bench = feed.bench(Fixture::with(quick()).await, |script| Script { gate: Some(gate.clone()), ..script });
        let consumer = bench.consume(with(1, 3)).await;
        for id in ["1", "2", "3"] {
            bench.send(&message(id)).await;
        }
        let overdue = async || consumer.status().last_error.is_some_and(|why| why.contains("consumer_timeout"));
        wait_for("the broker's patience to end", PATIENCE, overdue).await;
        let limits = "application:set_env(rabbit, consumer_timeout, 60000).";
        evaluate(broker.url(), limits).await;
        gate.add_permits(1_000);
        bench.wait_effects(3).await;
        bench.wait_acknowledged().await;
        wait_connected(&consumer).await;
        let status = consumer.status();
        assert!(!status.last_error.clone().unwrap_or_default().contains("unknown delivery tag"), "{status:?}");
        consumer.shutdown(SOON).await;
    })
    .await;
}

/// A property that isn't UTF-8, which the AMQP library doesn't take: the consumer says what is the matter for as long as the
/// message is there, and goes on when it isn't.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_not_amqp_is_told_of() {
    bounded(async {
        let bench = Bench::<FromRabbitMq>::new().await;
        let vhost = bench.feed.broker.rsplit('/').next().unwrap();
        let publish = format!(
            "Content = rabbit_basic:build_content(rabbit_basic:properties([{{message_id, <<255>>}}]), <<\"odd\">>), \
             {{ok, M}} = rabbit_basic:message({{resource, <<\"{vhost}\">>, exchange, <<>>}}, <<\"{}\">>, Content), \
             rabbit_basic:publish(rabbit_basic:delivery(false, false, M, undefined)), ok.",
            bench.feed.queue
        );
        assert_eq!(evaluate(&bench.feed.broker, &publish).await, "ok");
        wait_for("it to be there", PATIENCE, async || bench.feed.count("messages_ready").await == 1).await;
        let consumer = bench.consume(ConsumerSettings::default()).await;
        wait_down(&consumer, "not UTF-8").await;
        assert_eq!(bench.feed.count("messages").await, 1, "it isn't lost");
        let client = bench.feed.client().await;
        // Only what isn't with the consumer at the moment can be taken out.
        wait_for("it to be taken out", PATIENCE, async || {
            client.channel.queue_purge(bench.feed.queue.as_str().into(), Default::default()).await.unwrap();
            bench.feed.count("messages").await == 0
        })
        .await;
        bench.send(&message("1")).await;
        bench.wait_effects(1).await;
        consumer.shutdown(SOON).await;
    })
    .await;
}
