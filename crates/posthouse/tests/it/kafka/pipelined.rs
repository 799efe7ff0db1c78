//! O4: what is behind a refused record of its key doesn't get into the topic before the relay has been told.

use std::collections::{HashMap, HashSet};

use posthouse::testing::deliver_pipelined;
use posthouse::transport::{Kafka, Outcome};
use posthouse::{Envelope, Route};

use super::{PATIENCE, Record, client, kafka_with, message, pipelined, records, rejected, topic, url};
use crate::support::{bounded, scale};

const KEYS: usize = 40;
const PER_KEY: usize = 30;
const LARGE: usize = 30_000;

/// Which record of a key is too large; none in three of four keys.
fn large_at(key: usize) -> Option<usize> {
    // 0 is the first record that this producer ever sends to the topic, when a broker knows nothing of it.
    key.is_multiple_of(4).then(|| key / 4 * 3 % PER_KEY)
}

fn payload(key: usize, n: usize) -> Vec<u8> {
    let text = format!("{n}:");
    let size = if large_at(key) == Some(n) { LARGE } else { 40 };
    text.into_bytes().into_iter().chain(std::iter::repeat(b'x')).take(size).collect()
}

/// Numbers of a key's records in the order in which they are in the topic.
fn per_key(found: &[Record]) -> HashMap<usize, Vec<usize>> {
    let mut out: HashMap<usize, Vec<usize>> = HashMap::new();
    for record in found {
        let key = record.key.as_ref().unwrap().parse().unwrap();
        let number = record.text().split(':').next().unwrap().parse().unwrap();
        out.entry(key).or_default().push(number);
    }
    out
}

fn first_deliveries(numbers: &[usize]) -> Vec<usize> {
    let mut seen = HashSet::new();
    numbers.iter().copied().filter(|n| seen.insert(*n)).collect()
}

async fn burst(kafka: &Kafka) {
    let topic = topic(3, &[("max.message.bytes", "20000")]).await;
    // Interleaved: the n-th of every key, then the next.
    let order: Vec<(usize, usize)> = (0..PER_KEY).flat_map(|n| (0..KEYS).map(move |key| (key, n))).collect();
    let batch =
        order.iter().map(|&(key, n)| (message(Some(&key.to_string()), payload(key, n)), pipelined(&topic), n > 0)).collect();
    let outcomes: HashMap<_, _> = deliver_pipelined(kafka, batch, PATIENCE).await.into_iter().collect();
    let found = per_key(&records(client(&url(), &[]), &topic).await);
    let mut duplicates = 0;
    for key in 0..KEYS {
        let end = large_at(key).unwrap_or(PER_KEY);
        let numbers = found.get(&key).cloned().unwrap_or_default();
        let first = first_deliveries(&numbers);
        duplicates += numbers.len() - first.len();
        assert_eq!(first, (0..end).collect::<Vec<_>>(), "key {key}, too large: {:?}", large_at(key));
        for n in 0..PER_KEY {
            let outcome = outcomes[&(n * KEYS + key)].clone();
            if n < end {
                assert_eq!(outcome, Outcome::Delivered, "key {key} record {n}");
            } else if n == end {
                rejected(outcome);
            } else {
                assert_eq!(outcome, Outcome::HeldBack, "key {key} record {n}");
            }
        }
    }
    println!("{duplicates} duplicates");

    // The relay begins anew behind the rejected one: the first follows none.
    let rest: Vec<(usize, usize)> = order.into_iter().filter(|&(key, n)| large_at(key).is_some_and(|at| n > at)).collect();
    let again = |&(key, n): &(usize, usize)| {
        (message(Some(&key.to_string()), payload(key, n)), pipelined(&topic), large_at(key) != Some(n - 1))
    };
    let outcomes = deliver_pipelined(kafka, rest.iter().map(again).collect(), PATIENCE).await;
    assert!(outcomes.iter().all(|(_, o)| *o == Outcome::Delivered), "{outcomes:?}");
    for (key, numbers) in per_key(&records(client(&url(), &[]), &topic).await) {
        let expected: Vec<_> = (0..PER_KEY).filter(|n| large_at(key) != Some(*n)).collect();
        assert_eq!(first_deliveries(&numbers), expected, "key {key}");
    }
}

/// With batches as they come, which are mostly too long for the topic as a whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_overtakes_a_record_that_the_broker_refuses() {
    bounded(async {
        for _ in 0..scale() {
            burst(&kafka_with(&[])).await;
        }
    })
    .await;
}

/// With batches that the topic takes, so that good ones follow the refused ones closely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_overtakes_where_batches_are_short() {
    bounded(async {
        for _ in 0..scale() {
            burst(&kafka_with(&[("batch.num.messages", "3"), ("linger.ms", "0")])).await;
        }
    })
    .await;
}

/// The client refuses it itself, before it is queued.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_overtakes_a_record_that_the_client_refuses() {
    bounded(async { burst(&kafka_with(&[("message.max.bytes", "20000"), ("batch.size", "10000")])).await }).await;
}

/// A message that follows none starts its key anew, others of the key in the same call go with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_is_held_back_until_one_follows_none() {
    bounded(async {
        let topic = topic(1, &[("max.message.bytes", "20000")]).await;
        let kafka = kafka_with(&[]);
        let send = async |numbers: &[(usize, usize, bool)]| {
            let batch = numbers
                .iter()
                .map(|&(n, size, follows)| {
                    let payload = format!("{n}:").into_bytes().into_iter().chain(std::iter::repeat(b'x')).take(size);
                    (message(Some("1"), payload.collect::<Vec<u8>>()), pipelined(&topic), follows)
                })
                .collect();
            let mut outcomes = deliver_pipelined(&kafka, batch, PATIENCE).await;
            outcomes.sort_by_key(|(n, _)| *n);
            outcomes.into_iter().map(|(_, outcome)| outcome).collect::<Vec<_>>()
        };
        let outcomes = send(&[(0, 40, false), (1, LARGE, true)]).await;
        assert_eq!(outcomes[0], Outcome::Delivered);
        rejected(outcomes[1].clone());
        // In flight when it failed, as the relay saw it.
        assert_eq!(send(&[(2, 40, true), (3, 40, true)]).await, [Outcome::HeldBack, Outcome::HeldBack]);
        assert_eq!(send(&[(2, 40, false), (3, 40, true)]).await, [Outcome::Delivered, Outcome::Delivered]);
        let found = per_key(&records(client(&url(), &[]), &topic).await);
        assert_eq!(found[&1], [0, 2, 3]);
    })
    .await;
}

/// Records of one key, one to a batch, as close behind each other as can be.
fn chain(topic: &str, key: &str, numbers: std::ops::Range<usize>, large: usize, size: usize) -> Vec<(Envelope, Route, bool)> {
    let start = numbers.start;
    numbers
        .map(|n| {
            let size = if n == large { size } else { 40 };
            let payload = format!("{n}:").into_bytes().into_iter().chain(std::iter::repeat(b'x')).take(size);
            (message(Some(key), payload.collect::<Vec<u8>>()), pipelined(topic), n > start)
        })
        .collect()
}

/// A broker takes any batch as the first of a producer, so also the one behind a refused first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_overtakes_the_first_record_of_all() {
    bounded(async {
        for _ in 0..3 * scale() {
            let topic = topic(1, &[("max.message.bytes", "20000")]).await;
            let kafka = kafka_with(&[("batch.num.messages", "1"), ("linger.ms", "0")]);
            let outcomes = deliver_pipelined(&kafka, chain(&topic, "1", 0..20, 0, LARGE), PATIENCE).await;
            assert_eq!(per_key(&records(client(&url(), &[]), &topic).await), HashMap::new());
            for (n, outcome) in outcomes {
                if n == 0 { drop(rejected(outcome)) } else { assert_eq!(outcome, Outcome::HeldBack) }
            }
        }
    })
    .await;
}

/// The report of the refused record comes behind thousands of others, when librdkafka could long have gone on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_overtakes_while_reports_are_many() {
    bounded(async {
        for _ in 0..5 * scale() {
            let topic = topic(1, &[("max.message.bytes", "100000")]).await;
            let kafka = kafka_with(&[]);
            // Opens the key's partition.
            let outcomes = deliver_pipelined(&kafka, chain(&topic, "1", 0..1, 9, 0), PATIENCE).await;
            assert_eq!(outcomes, [(0, Outcome::Delivered)]);
            let mut batch: Vec<_> = (0..3_000).map(|_| (message(None, "other"), pipelined(&topic), false)).collect();
            batch.extend(chain(&topic, "1", 1..100, 1, 200_000));
            batch.extend((0..1_000).map(|_| (message(None, "other"), pipelined(&topic), false)));
            let outcomes = deliver_pipelined(&kafka, batch, PATIENCE).await;
            assert_eq!(outcomes.iter().filter(|(_, o)| *o == Outcome::Delivered).count(), 4_000);
            assert_eq!(outcomes.iter().filter(|(_, o)| *o == Outcome::HeldBack).count(), 98);
            let mut found = records(client(&url(), &[]), &topic).await;
            found.retain(|record| record.key.is_some());
            assert_eq!(per_key(&found)[&1], [0]);
        }
    })
    .await;
}
