//! The last hour: what all instances did, looked at every few seconds, for the charts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use posthouse::store::{Backlog, Progress, Seen};
use serde::Serialize;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use crate::http::{Served, ServedRelay};
use crate::output::now_ms;

/// How often is looked.
const EVERY: Duration = Duration::from_secs(5);

/// How much is kept of each database.
const KEPT: usize = 720;

/// How long a look at one database may take. A slower one is not known at that moment.
const PATIENCE: Duration = Duration::from_secs(4);

/// Browsers that are told of what is new at a time.
pub(super) const LISTENERS: usize = 64;

/// One moment of one database, or of all together. None: not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// Milliseconds since 1970 UTC.
    pub(super) at: i64,
    /// Messages per second, by row ids.
    pub(super) published: Option<f64>,
    /// Messages per second, by receipts.
    pub(super) delivered: Option<f64>,
    /// Failed attempts per second.
    pub(super) failed: Option<f64>,
    /// Milliseconds from publishing to the confirmation: the median of batches.
    pub(super) median: Option<f64>,
    /// The longest of them.
    pub(super) longest: Option<f64>,
    /// Age of the oldest message that isn't delivered, in seconds.
    pub(super) oldest: Option<f64>,
    /// Messages that aren't delivered and not given up.
    pub(super) pending: Option<i64>,
}

/// What is known of one database besides its samples.
#[derive(Debug, Clone, Default)]
pub(super) struct Standing {
    /// How many rows the log has, judged by its lowest and highest id.
    pub(super) log: Option<i64>,
    /// What isn't delivered, and when that was counted; None: never.
    pub(super) backlog: Option<(Arc<[Backlog]>, Instant)>,
    /// Why the last look gave nothing.
    pub(super) error: Option<String>,
}

#[derive(Debug, Default)]
struct Kept {
    all: VecDeque<Sample>,
    of: BTreeMap<String, (Standing, VecDeque<Sample>)>,
}

/// What was seen. Bounded: an hour of each database.
#[derive(Debug)]
pub(crate) struct History {
    kept: Mutex<Kept>,
    /// Counts the looks; None when there will be no more.
    looks: watch::Sender<Option<u64>>,
    pub(super) listeners: Arc<Semaphore>,
}

impl Default for History {
    fn default() -> Self {
        let looks = watch::Sender::new(Some(0));
        Self { kept: Mutex::default(), looks, listeners: Arc::new(Semaphore::new(LISTENERS)) }
    }
}

impl History {
    /// The samples of a database, or of all together.
    pub(super) fn samples(&self, database: Option<&str>) -> Vec<Sample> {
        let kept = self.kept();
        match database {
            None => kept.all.iter().copied().collect(),
            Some(name) => kept.of.get(name).map(|(_, samples)| samples.iter().copied().collect()).unwrap_or_default(),
        }
    }

    pub(super) fn newest(&self, database: Option<&str>) -> Option<Sample> {
        let kept = self.kept();
        match database {
            None => kept.all.back().copied(),
            Some(name) => kept.of.get(name).and_then(|(_, samples)| samples.back().copied()),
        }
    }

    pub(super) fn standing(&self, database: &str) -> Standing {
        self.kept().of.get(database).map(|(standing, _)| standing.clone()).unwrap_or_default()
    }

    pub(super) fn looks(&self) -> watch::Receiver<Option<u64>> {
        self.looks.subscribe()
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Kept> {
        // Nothing panics while it is held.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, all: Sample, of: Vec<(String, Standing, Sample)>) {
        fn push(samples: &mut VecDeque<Sample>, sample: Sample) {
            if samples.len() == KEPT {
                samples.pop_front();
            }
            samples.push_back(sample);
        }
        let mut kept = self.kept();
        push(&mut kept.all, all);
        for (name, standing, sample) in of {
            let (known, samples) = kept.of.entry(name).or_default();
            // What was is better than nothing while it can't be asked.
            let backlog = standing.backlog.or_else(|| known.backlog.take());
            *known = Standing { log: standing.log.or(known.log), backlog, error: standing.error };
            push(samples, sample);
        }
        drop(kept);
        self.looks.send_modify(|n| *n = n.map(|n| n + 1));
    }
}

/// The task that looks.
pub(crate) struct Sampler {
    served: Arc<Served>,
    task: JoinHandle<()>,
}

impl Sampler {
    pub(crate) fn start(served: &Arc<Served>) -> Self {
        let served = served.clone();
        let task = tokio::spawn({
            let served = served.clone();
            async move {
                let mut last: Vec<Last> = served.databases.iter().map(|_| Last::default()).collect();
                let mut every = tokio::time::interval(EVERY);
                every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
                loop {
                    every.tick().await;
                    look(&served, &mut last).await;
                }
            }
        });
        Self { served, task }
    }

    /// Ends it, and tells those who listen that nothing more comes.
    pub(crate) async fn stop(self) {
        self.task.abort();
        // Aborted is how it ends.
        let _ = self.task.await;
        self.served.history.looks.send_replace(None);
    }
}

/// Where the last look at a database ended.
#[derive(Default)]
struct Last {
    seen: Option<(Seen, Option<i64>, Instant)>,
}

/// What a look at one database gave.
struct Looked {
    standing: Standing,
    sample: Sample,
    latencies: Vec<i64>,
}

async fn look(served: &Served, last: &mut [Last]) {
    let at = now_ms();
    let looked = join_all(served.databases.iter().zip(last).map(|(database, last)| one(database, last, at))).await;
    let mut all = Sample { at, ..Sample::default() };
    let mut latencies = Vec::new();
    let mut of = Vec::new();
    for (database, looked) in served.databases.iter().zip(looked) {
        let Looked { standing, sample, latencies: its } = looked;
        add(&mut all.published, sample.published);
        add(&mut all.delivered, sample.delivered);
        add(&mut all.failed, sample.failed);
        all.pending = sum(all.pending, sample.pending);
        all.oldest = match (all.oldest, sample.oldest) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
        latencies.extend(its);
        of.push((database.name.clone(), standing, sample));
    }
    (all.median, all.longest) = spread(latencies);
    served.history.add(all, of);
}

async fn one(database: &ServedRelay, last: &mut Last, at: i64) -> Looked {
    let mut sample = Sample { at, ..Sample::default() };
    let (mut standing, mut latencies) = (Standing::default(), Vec::new());
    let since = last.seen.map(|(seen, ..)| seen);
    match tokio::time::timeout(PATIENCE, database.people.overview().progress(since)).await {
        Ok(Ok(progress)) => {
            let now = Instant::now();
            standing.log = Some(progress.log.map_or(0, |(low, high)| high - low + 1));
            rates(&mut sample, last, &progress, now);
            last.seen = Some((progress.seen, progress.log.map(|(_, high)| high), now));
            latencies = progress.latencies_ms;
        }
        // The next look counts on from here, and its rates are over the time since.
        Ok(Err(e)) => standing.error = Some(e.to_string()),
        Err(_) => standing.error = Some(format!("no answer within {} s", PATIENCE.as_secs())),
    }
    if standing.error.is_none()
        && let Some((backlog, age)) = database.backlog().await
        && age < Duration::from_secs(60)
    {
        standing.backlog = Instant::now().checked_sub(age).map(|at| (backlog.as_slice().into(), at));
        let unfinished = || backlog.iter().filter(|b| b.status != "FAILED");
        sample.pending = Some(unfinished().map(|b| b.messages).sum());
        sample.oldest = Some(unfinished().map(|b| b.oldest_ms).max().unwrap_or(0) as f64 / 1_000.0);
    }
    (sample.median, sample.longest) = spread(latencies.clone());
    Looked { standing, sample, latencies }
}

fn rates(sample: &mut Sample, last: &Last, progress: &Progress, now: Instant) {
    let Some((_, newest, then)) = last.seen else { return };
    let seconds = now.saturating_duration_since(then).as_secs_f64();
    if seconds <= 0.0 {
        return;
    }
    // Rates to the hundredth: more digits would only be noise on the wire.
    let rate = |n: i64| Some((n.max(0) as f64 / seconds * 100.0).round() / 100.0);
    let before = newest.unwrap_or(0);
    sample.published = rate(progress.log.map_or(0, |(low, high)| high - before.max(low - 1)));
    sample.delivered = rate(progress.delivered);
    sample.failed = rate(progress.failed_attempts);
}

fn add(sum: &mut Option<f64>, n: Option<f64>) {
    if let Some(n) = n {
        *sum = Some(sum.unwrap_or(0.0) + n);
    }
}

pub(super) fn sum(a: Option<i64>, b: Option<i64>) -> Option<i64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// The median and the highest.
fn spread(mut latencies: Vec<i64>) -> (Option<f64>, Option<f64>) {
    latencies.sort_unstable();
    let of = |n: Option<&i64>| n.map(|ms| (*ms).max(0) as f64);
    (of(latencies.get(latencies.len() / 2)), of(latencies.last()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_is_kept_and_no_more() {
        let history = History::default();
        for at in 0..(KEPT as i64 + 5) {
            let sample = Sample { at, ..Sample::default() };
            history.add(sample, vec![("a".into(), Standing { log: (at == 0).then_some(7), ..Standing::default() }, sample)]);
        }
        for kept in [history.samples(None), history.samples(Some("a"))] {
            assert_eq!((kept.len(), kept[0].at), (KEPT, 5));
        }
        assert_eq!(history.standing("a").log, Some(7), "what was known stays known");
        assert!(history.samples(Some("b")).is_empty());
        assert_eq!(*history.looks().borrow(), Some(KEPT as u64 + 5));
    }

    #[test]
    fn rates_are_over_the_time_since_the_last_look() {
        let then = Instant::now();
        let now = then + Duration::from_secs(10);
        let mut progress = Progress::default();
        (progress.log, progress.delivered, progress.failed_attempts) = (Some((1, 150)), 30, 1);
        let rated = |last: Option<i64>, progress: &Progress| {
            let mut sample = Sample::default();
            rates(&mut sample, &Last { seen: Some((Seen::default(), last, then)) }, progress, now);
            (sample.published, sample.delivered, sample.failed)
        };
        assert_eq!(rated(Some(100), &progress), (Some(5.0), Some(3.0), Some(0.1)));
        assert_eq!(rated(None, &progress).0, Some(15.0), "the log was empty");
        progress.log = Some((141, 150));
        assert_eq!(rated(Some(100), &progress).0, Some(1.0), "older ids may have gone with their partition");
        progress.log = None;
        assert_eq!(rated(Some(100), &progress).0, Some(0.0));
        let mut first = Sample::default();
        rates(&mut first, &Last::default(), &progress, now);
        assert_eq!(first, Sample::default(), "nothing is known at the first look");
    }

    #[test]
    fn the_middle_and_the_longest() {
        assert_eq!(spread(vec![]), (None, None));
        assert_eq!(spread(vec![5, 1, 90]), (Some(5.0), Some(90.0)));
        assert_eq!(spread(vec![-3]), (Some(0.0), Some(0.0)), "clocks differ");
    }
}
