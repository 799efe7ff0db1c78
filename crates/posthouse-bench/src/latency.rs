//! How long a message takes from its publish to its confirmation, under a load that comes at its own times.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use posthouse::testing::observed;
use posthouse::transport::Outcome;
use posthouse::{Message, Outbox, Relay, Route};
use tokio::sync::mpsc;

use crate::LatencyArgs;
use crate::database::{CONNECTIONS, Kind, Rig, must};
use crate::publish::make_orders;
use crate::receiver::{Http, Kafka, Nats, RabbitMq, Receiver, To};
use crate::report::{Figure, Report, Row};

/// For `--help`.
pub(crate) const ABOUT: &str = "\
From publish to confirmation, with a relay embedded in the process that publishes.

Several tasks run small business transactions: one row in an orders table, one message, commit. A clock gives each its times, in
turn, at a steady rate; a task that is late catches up, so that the load never waits for what it measures. Three times of each
message are reported:

  intended to confirmed   from when the publish should have begun until the receiver's confirmation is here
  commit to confirmed     from when the commit returned (0 if the confirmation was quicker)
  intended to commit      the publisher's own part: waiting for its turn, transaction, commit

The confirmation's time is when the transport's answer comes out of it, before the relay writes it to the database. All times
are of one clock. Without --rate, the same publishers run as fast as they can for 5 s, with the relay; half of what
gets through is the rate. The first 2 s of the load are not counted.";

/// The phase that finds out the capacity.
const CAPACITY: Duration = Duration::from_secs(5);

/// The start of the load, not counted.
const WARM_UP: f64 = 2.0;

/// For all confirmations, after the last publish.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often it says how far it is.
const PROGRESS: Duration = Duration::from_secs(5);

pub(crate) async fn run(from: Kind, to: To, args: &LatencyArgs, report: &mut Report) {
    match from {
        Kind::Postgres => run_from::<sqlx::Postgres>(to, args, report).await,
        Kind::Mysql => run_from::<sqlx::MySql>(to, args, report).await,
        Kind::Sqlite => run_from::<sqlx::Sqlite>(to, args, report).await,
    }
}

async fn run_from<DB: Rig>(to: To, args: &LatencyArgs, report: &mut Report) {
    match to {
        To::Rabbitmq => measure::<DB, RabbitMq>(args, report).await,
        To::Kafka => measure::<DB, Kafka>(args, report).await,
        To::Nats => measure::<DB, Nats>(args, report).await,
        To::Http => measure::<DB, Http>(args, report).await,
    }
}

/// When what happened to a message, in nanoseconds since `origin`; 0: not yet.
#[derive(Debug, Default)]
struct Times {
    committed: AtomicU64,
    confirmed: AtomicU64,
}

/// What publishers and transport write down.
#[derive(Debug)]
struct Notes {
    origin: Instant,
    /// Every confirmation, of both phases.
    confirmed: AtomicU64,
    /// Answers other than that.
    other: AtomicU64,
    /// The messages of the load.
    load: std::sync::OnceLock<Vec<Times>>,
}

impl Notes {
    fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    fn load(&self) -> &[Times] {
        self.load.get().map_or(&[], Vec::as_slice)
    }

    fn answered(&self, id: &str, outcome: &Outcome) {
        if *outcome != Outcome::Delivered {
            self.other.fetch_add(1, Relaxed);
            return;
        }
        let at = self.now();
        // Its number, if it is one of the load. Sent twice, the first confirmation counts.
        let times = id.strip_prefix(LOAD).and_then(|n| self.load().get(n.parse::<usize>().ok()?));
        if let Some(times) = times
            && times.confirmed.compare_exchange(0, at, Relaxed, Relaxed).is_err()
        {
            return;
        }
        self.confirmed.fetch_add(1, Relaxed);
    }

    async fn wait_for(&self, confirmed: u64) {
        let until = Instant::now() + PATIENCE;
        while self.confirmed.load(Relaxed) < confirmed {
            if Instant::now() > until {
                let text = format!("{} of {confirmed} within {PATIENCE:?}", self.confirmed.load(Relaxed));
                must::<(), _>("confirmations", Err(text));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The ids of the load are this and a number.
const LOAD: &str = "load-";

/// What a publisher needs.
struct Publisher<DB: Rig> {
    outbox: Outbox<DB>,
    orders: AtomicI64,
    payload: Vec<u8>,
    keys: Option<u32>,
}

impl<DB: Rig> Publisher<DB> {
    /// A small business transaction.
    async fn publish(&self, id: Option<usize>) {
        let order = self.orders.fetch_add(1, Relaxed);
        let mut message = Message::to("bench").typed("order.placed").payload(self.payload.clone());
        if let Some(n) = id {
            message = message.id(format!("{LOAD}{n}"));
        }
        if let Some(keys) = self.keys {
            message = message.key(order % i64::from(keys));
        }
        let mut tx = must("begin", self.outbox.begin().await);
        must("order", DB::business(&self.outbox, &mut tx, order, None).await);
        must("publish", tx.publish(message).await);
        must("commit", tx.commit().await);
    }
}

async fn measure<DB: Rig, R: Receiver>(args: &LatencyArgs, report: &mut Report) {
    let what = match args.keys {
        Some(keys) => format!("to {}, {keys} keys", R::NAME),
        None => format!("to {}, unkeyed", R::NAME),
    };
    let say = |text: &str| eprintln!("{}: {what}: {text}", DB::KIND.name());
    let receiver = R::prepare().await;
    // Beside the publishers, the relay needs connections.
    let outbox = DB::fresh(args.publishers + CONNECTIONS).await;
    make_orders(&outbox).await;
    let notes = Arc::new(Notes {
        origin: Instant::now(),
        confirmed: AtomicU64::new(0),
        other: AtomicU64::new(0),
        load: std::sync::OnceLock::new(),
    });
    let seen = notes.clone();
    let transport = observed(receiver.transport(), move |id, outcome| seen.answered(id.as_str(), outcome));
    let builder = Relay::builder(&outbox).transport(R::SCHEME, transport).route("bench", Route::to(receiver.to()));
    let relay = must("relay", builder.start().await);
    let publisher = Arc::new(Publisher {
        outbox: outbox.clone(),
        orders: AtomicI64::new(0),
        payload: vec![b'x'; args.payload],
        keys: args.keys,
    });
    publisher.publish(None).await;
    notes.wait_for(1).await;

    let mut capacity = None;
    let rate = match args.rate {
        Some(rate) if rate.is_finite() && rate > 0.0 => rate,
        Some(rate) => must("--rate", Err(format!("{rate} is not a number of messages per second"))),
        None => {
            say("finding out the capacity");
            let most = find_capacity(&publisher, &notes, args.publishers).await;
            say(&format!("{most:.0} messages/s at most"));
            capacity = Some(most);
            most / 2.0
        }
    };

    let n = (rate * (WARM_UP + f64::from(args.seconds))).ceil() as usize;
    say(&format!("{n} messages, {rate:.0} per second"));
    must("load", notes.load.set((0..n).map(|_| Times::default()).collect()).map_err(|_| "is there already"));
    let already = notes.confirmed.load(Relaxed);
    let start = run_load(&publisher, &notes, args.publishers, rate, n).await;
    notes.wait_for(already + n as u64).await;
    let not_delivered = notes.other.load(Relaxed);
    relay.shutdown(Duration::from_secs(30)).await;

    let intended = |i: usize| start + (i as f64 / rate * 1e9) as u64;
    let counted = (rate * WARM_UP).ceil() as usize..n;
    let times = |from: fn(u64, &Times) -> (u64, u64)| -> Vec<f64> {
        let mut all: Vec<f64> = counted
            .clone()
            .map(|i| {
                let (from, to) = from(intended(i), &notes.load()[i]);
                to.saturating_sub(from) as f64 / 1e6
            })
            .collect();
        all.sort_by(f64::total_cmp);
        all
    };
    for (name, all) in [
        ("intended to confirmed", times(|intended, t| (intended, t.confirmed.load(Relaxed)))),
        ("commit to confirmed", times(|_, t| (t.committed.load(Relaxed), t.confirmed.load(Relaxed)))),
        ("intended to commit", times(|intended, t| (intended, t.committed.load(Relaxed)))),
    ] {
        let mut figures = Vec::new();
        let mut add = |name, title, value| figures.push(Figure { name, title, value });
        add("p50", "p50", percentile(&all, 500));
        add("p99", "p99", percentile(&all, 990));
        add("p99_9", "p99.9", percentile(&all, 999));
        add("max", "max", percentile(&all, 1_000));
        add("rate", "messages/s", rate);
        add("messages", "messages", all.len() as f64);
        if let Some(capacity) = capacity {
            add("capacity", "capacity", capacity);
        }
        // Tries that came to nothing, in all phases.
        add("not_delivered", "tries failed", not_delivered as f64);
        report.add(Row { database: DB::KIND.name(), what: format!("{what}: {name}"), unit: "ms", compared: None, figures });
    }
    receiver.remove().await;
    DB::remove(outbox).await;
}

/// What publishers and relay together manage in a second: as fast as they can, until everything is confirmed.
async fn find_capacity<DB: Rig>(publisher: &Arc<Publisher<DB>>, notes: &Arc<Notes>, publishers: u32) -> f64 {
    let already = notes.confirmed.load(Relaxed);
    let started = Instant::now();
    let tasks = (0..publishers).map(|_| {
        let publisher = publisher.clone();
        tokio::spawn(async move {
            let mut published = 0;
            while started.elapsed() < CAPACITY {
                publisher.publish(None).await;
                published += 1;
            }
            published
        })
    });
    let published: u64 = join_all(tasks).await.into_iter().map(|done| must("publisher", done)).sum();
    notes.wait_for(already + published).await;
    published as f64 / started.elapsed().as_secs_f64()
}

/// Publishes `n` messages, each at its time; answers when the first should have begun.
async fn run_load<DB: Rig>(publisher: &Arc<Publisher<DB>>, notes: &Arc<Notes>, publishers: u32, rate: f64, n: usize) -> u64 {
    let mut senders = Vec::new();
    let mut tasks = Vec::new();
    for _ in 0..publishers {
        let (sender, mut due) = mpsc::unbounded_channel();
        senders.push(sender);
        let (publisher, notes) = (publisher.clone(), notes.clone());
        tasks.push(tokio::spawn(async move {
            while let Some(n) = due.recv().await {
                publisher.publish(Some(n)).await;
                notes.load()[n].committed.store(notes.now(), Relaxed);
            }
        }));
    }
    let start = Instant::now();
    // A thread, because tokio's timers are only good to a millisecond.
    let clock = std::thread::spawn(move || {
        for i in 0..n {
            let at = start + Duration::from_secs_f64(i as f64 / rate);
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            // Gone only if a publisher has ended the process.
            let _ = senders[i % senders.len()].send(i);
        }
    });
    let mut all = join_all(tasks);
    let ended = loop {
        match tokio::time::timeout(PROGRESS, &mut all).await {
            Ok(ended) => break ended,
            Err(_) => {
                let confirmed = notes.load().iter().filter(|t| t.confirmed.load(Relaxed) > 0).count();
                eprintln!("  {confirmed} of {n}");
            }
        }
    };
    for publisher in ended {
        must("publisher", publisher);
    }
    must("clock", clock.join().map_err(|_| "panicked"));
    (start - notes.origin).as_nanos() as u64
}

/// The smallest of these, sorted, that is not less than so many of a thousand of them.
pub(crate) fn percentile(sorted: &[f64], per_mille: usize) -> f64 {
    let rank = (sorted.len() * per_mille).div_ceil(1_000);
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let all: Vec<f64> = (1..=1_000).map(f64::from).collect();
        assert_eq!([500, 990, 999, 1_000].map(|p| percentile(&all, p)), [500.0, 990.0, 999.0, 1_000.0]);
        assert_eq!([1, 500, 999].map(|p| percentile(&[7.0], p)), [7.0, 7.0, 7.0]);
        assert!(percentile(&[], 500).is_nan());
    }

    #[test]
    fn the_first_confirmation_of_a_message_counts() {
        let notes = Notes { origin: Instant::now(), confirmed: 0.into(), other: 0.into(), load: std::sync::OnceLock::new() };
        notes.answered("of-the-capacity-phase", &Outcome::Delivered);
        notes.load.set(vec![Times::default(), Times::default()]).expect("the first time");
        notes.answered("load-1", &Outcome::Unavailable("down".into()));
        assert_eq!(notes.load()[1].confirmed.load(Relaxed), 0);
        notes.answered("load-1", &Outcome::Delivered);
        let first = notes.load()[1].confirmed.load(Relaxed);
        notes.answered("load-1", &Outcome::Delivered);
        assert!(first > 0);
        assert_eq!(notes.load()[1].confirmed.load(Relaxed), first);
        assert_eq!((notes.confirmed.load(Relaxed), notes.other.load(Relaxed)), (2, 1));
        assert_eq!(notes.load()[0].confirmed.load(Relaxed), 0);
    }
}
