//! When this process's own retries are due, so that its retry worker needn't find out by looking.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Times that are this close are one: a pass takes all that is due.
const TICK: Duration = Duration::from_millis(5);

/// The database may count in whole milliseconds, rounded.
const MARGIN: Duration = Duration::from_millis(2);

/// Times that are remembered. What lies behind them is found by the worker's interval.
const MOST: usize = 4_096;

/// The times at which retries are due that this process wrote down. A hint: nothing depends on it but how soon they are run.
#[derive(Debug)]
pub(super) struct Alarm {
    start: Instant,
    /// In ticks since the start.
    times: Mutex<BTreeSet<u64>>,
    earlier: Notify,
}

impl Default for Alarm {
    fn default() -> Self {
        Self { start: Instant::now(), times: Mutex::default(), earlier: Notify::new() }
    }
}

impl Alarm {
    /// Nothing panics while the lock is held, so a poisoned set is as good as any.
    fn times(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something is due this long from now, as it was written a moment ago.
    pub(super) fn set(&self, wait: Duration) {
        let from_start = self.start.elapsed().saturating_add(wait).saturating_add(MARGIN);
        let Ok(tick) = u64::try_from(from_start.as_nanos().div_ceil(TICK.as_nanos())) else { return };
        let mut times = self.times();
        let first = times.first().is_none_or(|earliest| tick < *earliest);
        times.insert(tick);
        if times.len() > MOST {
            times.pop_last();
        }
        drop(times);
        if first {
            self.earlier.notify_one();
        }
    }

    /// Forgets what is due by now: a pass begins, and takes it.
    pub(super) fn begin_pass(&self) {
        let now = self.start.elapsed().as_nanos() / TICK.as_nanos();
        let Ok(now) = u64::try_from(now) else { return };
        let mut times = self.times();
        let later = times.split_off(&(now + 1));
        *times = later;
    }

    fn next(&self) -> Option<Instant> {
        let tick = *self.times().first()?;
        self.start.checked_add(Duration::from_nanos(tick.checked_mul(u64::try_from(TICK.as_nanos()).ok()?)?))
    }

    /// Waits until something is due, or until `latest`.
    pub(super) async fn wait(&self, latest: Instant) {
        loop {
            let until = self.next().map_or(latest, |next| next.min(latest));
            tokio::select! {
                () = tokio::time::sleep_until(until) => return,
                () = self.earlier.notified() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next_ms(alarm: &Alarm) -> Option<u128> {
        alarm.next().map(|next| (next - alarm.start).as_millis())
    }

    #[test]
    fn each_time_is_kept_and_the_earliest_goes_first() {
        let alarm = Alarm::default();
        assert_eq!(next_ms(&alarm), None);
        for s in [300, 100, 200] {
            alarm.set(Duration::from_secs(s));
        }
        alarm.set(Duration::MAX);
        for s in [100, 200, 300] {
            let next = next_ms(&alarm).unwrap();
            assert!((s * 1_000 + 2..s * 1_000 + 30_000).contains(&next), "never before its time: {next}");
            alarm.begin_pass();
            assert_eq!(next_ms(&alarm), Some(next), "what isn't due yet is not forgotten");
            alarm.times().pop_first();
        }
        alarm.set(Duration::ZERO);
        std::thread::sleep(2 * TICK);
        alarm.begin_pass();
        assert_eq!(next_ms(&alarm), None);
    }

    #[tokio::test]
    async fn a_wait_ends_when_something_is_due_earlier() {
        let alarm = std::sync::Arc::new(Alarm::default());
        let waiting = tokio::spawn({
            let alarm = alarm.clone();
            async move { alarm.wait(Instant::now() + Duration::from_secs(3_600)).await }
        });
        // It waits by now, for what comes in an hour.
        tokio::task::yield_now().await;
        alarm.set(Duration::from_millis(20));
        tokio::time::timeout(Duration::from_secs(20), waiting).await.unwrap().unwrap();
        assert!(alarm.start.elapsed() >= Duration::from_millis(20));
        let alarm = Alarm::default();
        alarm.set(Duration::from_secs(3_600));
        alarm.wait(Instant::now() + Duration::from_millis(1)).await;
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let alarm = Alarm::default();
        for n in (0..10_000).rev() {
            alarm.set(Duration::from_secs(n));
        }
        assert_eq!(alarm.times().len(), MOST);
        assert!(next_ms(&alarm).unwrap() < 30_000, "the earliest are kept");
    }
}
