//! Own brokers for tests of failures: they come, die at once, and come back in the same place.

use std::net::{Ipv4Addr, TcpStream};

use crate::support::bounded;
use crate::support::broker::Broker;

async fn dies_and_returns(broker: Broker) {
    let listens = || TcpStream::connect((Ipv4Addr::LOCALHOST, broker.port())).is_ok();
    let running = format!("running, pid {}", pid(&broker).await);
    assert!(listens());
    assert!(broker.status().await.contains(broker.url()));

    broker.kill().await;
    assert!(!listens());
    assert!(broker.status().await.contains("not running"));

    broker.start().await;
    assert!(listens());
    let status = broker.status().await;
    assert!(status.contains("running, pid ") && !status.contains(&running), "another process: {status}");
}

async fn pid(broker: &Broker) -> String {
    let status = broker.status().await;
    let (_, pid) = status.split_once("running, pid ").unwrap_or_else(|| panic!("{status}"));
    pid.split_inclusive(',').next().expect("a pid").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq() {
    bounded(async { dies_and_returns(Broker::rabbitmq().await).await }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka() {
    bounded(async { dies_and_returns(Broker::kafka().await).await }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats() {
    bounded(async { dies_and_returns(Broker::nats().await).await }).await;
}
