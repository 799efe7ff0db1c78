//! How fast messages leave: a raw read+delete loop, then a relay with a transport that confirms at once.

use std::time::{Duration, Instant};

use posthouse::transport::{Delivery, Transport};
use posthouse::{Message, Outbox, Relay, Route};

use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::report::{Compared, Figure, Report, Row, median};

/// Confirms everything at once.
#[derive(Debug)]
pub(crate) struct Null;

impl Transport for Null {
    fn send(&self, batch: Vec<Delivery>) -> futures_util::future::BoxFuture<'_, ()> {
        for delivery in batch {
            delivery.delivered();
        }
        Box::pin(std::future::ready(()))
    }
}

pub(crate) async fn run(kind: Kind, n: usize, payload: usize, keys: usize, rounds: usize, report: &mut Report) {
    for keys in [None, Some(keys)] {
        match kind {
            Kind::Postgres => drain::<sqlx::Postgres>(n, payload, keys, rounds, report).await,
            Kind::Mysql => drain::<sqlx::MySql>(n, payload, keys, rounds, report).await,
            Kind::Sqlite => drain::<sqlx::Sqlite>(n, payload, keys, rounds, report).await,
        }
    }
}

async fn drain<DB: Rig>(n: usize, payload: usize, keys: Option<usize>, rounds: usize, report: &mut Report) {
    let outbox = DB::fresh(CONNECTIONS).await;
    let (mut ours, mut limits, mut wals) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        fill(&outbox, n, payload, keys).await;
        let started = Instant::now();
        let drained = must("raw drain", DB::raw_drain(&outbox, 2_000).await);
        assert_eq!(drained, n, "the raw loop drains what was published");
        let limit = n as f64 / started.elapsed().as_secs_f64();

        fill(&outbox, n, payload, keys).await;
        let before = DB::wal(&outbox).await;
        ours.push(relayed(&outbox, n).await);
        if let (Some(before), Some(after)) = (before, DB::wal(&outbox).await) {
            wals.push((after - before) as f64 / n as f64);
        }
        limits.push(limit);
    }
    report.add(Row {
        database: DB::KIND.name(),
        what: keys.map_or_else(|| "drain, unkeyed".to_owned(), |k| format!("drain, {k} keys")),
        unit: "messages/s",
        compared: Some(Compared::new(&ours, &limits)),
        figures: if wals.is_empty() {
            Vec::new()
        } else {
            vec![Figure { name: "wal_bytes_per_message", title: "WAL B/message", value: median(&wals) }]
        },
    });
    DB::remove(outbox).await;
}

/// A relay sends the `n` messages of [`fill`] to a transport that confirms at once; messages per second.
pub(crate) async fn relayed<DB: Rig>(outbox: &Outbox<DB>, n: usize) -> f64 {
    let started = Instant::now();
    let relay =
        Relay::builder(outbox).transport("null", Null).route("bench", Route::to("null:").concurrency(4_000)).start().await;
    let relay = must("relay", relay);
    relay.drain_once().await;
    let rate = n as f64 / started.elapsed().as_secs_f64();
    let delivered = relay.stats().delivered;
    relay.shutdown(Duration::from_secs(10)).await;
    assert_eq!(delivered, n as u64, "the relay drains what was published");
    rate
}

/// Publishes `n` messages to the destination `bench`.
pub(crate) async fn fill<DB: Rig>(outbox: &Outbox<DB>, n: usize, payload: usize, keys: Option<usize>) {
    let body = vec![b'x'; payload];
    for chunk in (0..n).collect::<Vec<_>>().chunks(1_000) {
        let mut tx = must("begin", outbox.begin().await);
        let messages = chunk.iter().map(|i| {
            let m = Message::to("bench").payload(body.clone());
            match keys {
                Some(keys) => m.key(i % keys),
                None => m,
            }
        });
        must("publish", outbox.publish_many(&mut tx, messages).await);
        must("commit", tx.commit().await);
    }
}
