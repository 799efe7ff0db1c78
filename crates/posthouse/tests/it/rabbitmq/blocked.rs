//! B1: an alarm of the broker.

use std::time::{Duration, Instant};

use posthouse::transport::{Outcome, Transport};

use super::*;
use crate::support::broker::{Broker, evaluate};
use crate::support::{SOON, bounded, wait_for};

pub(super) async fn administer(broker: &Broker, expression: &str) {
    assert_eq!(evaluate(broker.url(), expression).await, "ok", "{expression}");
}

const ALARM: &str = "rabbit_alarm:set_alarm({{resource_limit, memory, node()}, []}).";
const NO_ALARM: &str = "rabbit_alarm:clear_alarm({resource_limit, memory, node()}).";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_alarm_spends_no_attempt_and_ends() {
    bounded(async {
        let broker = Broker::rabbitmq().await;
        let rig = Rig::at(broker.url()).await;
        let queue = rig.queue("q", &[]).await;
        let to = format!("/{queue}");
        let transport = RabbitMq::new(broker.url()).expect("settings");
        assert_eq!(send(&transport, &to).await, Outcome::Delivered);
        assert_eq!(transport.blocked(), None);

        administer(&broker, ALARM).await;
        let started = Instant::now();
        let batch = (0..100).map(|_| (message("x"), route(&to))).collect();
        let outcomes = send_all(&transport, batch).await;
        let took = started.elapsed();
        assert!(outcomes.iter().any(|(_, outcome)| *outcome != Outcome::Delivered), "the alarm is on");
        for outcome in outcomes.iter().map(|(_, outcome)| outcome).filter(|outcome| **outcome != Outcome::Delivered) {
            says(unavailable(outcome), &["blocks publishing", "memory"]);
        }
        assert!(took < PATIENCE / 2, "answered after {took:?}, long before the deadline");
        says(&transport.blocked().expect("blocked"), &["memory"]);
        // The next is answered at once.
        let started = Instant::now();
        says(unavailable(&send(&transport, &to).await), &["blocks publishing"]);
        assert!(started.elapsed() < PATIENCE / 2, "{:?}", started.elapsed());

        administer(&broker, NO_ALARM).await;
        wait_for("unblocked", SOON, async || transport.blocked().is_none()).await;
        assert_eq!(send(&transport, &to).await, Outcome::Delivered);

        // Shutdown completes while it is blocked.
        administer(&broker, ALARM).await;
        // The broker may take one more before the alarm has got around.
        wait_for("blocked", SOON, async || send(&transport, &to).await != Outcome::Delivered).await;
        unavailable(&send(&transport, &to).await);
        let started = Instant::now();
        transport.close().await;
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    })
    .await;
}
