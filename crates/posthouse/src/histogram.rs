//! How times are counted: in a few fixed buckets, so that figures of several processes can be added up.

use std::time::Duration;

/// How many bounds there are.
const BOUNDS: usize = 18;

/// Times, counted by how long they were.
///
/// The buckets are the same for everything: see [`BOUNDS`](Self::BOUNDS). What is longer than the last bound is counted too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Histogram {
    /// One more than there are bounds: the last is for what is longer than all of them.
    counts: [u64; BOUNDS + 1],
    sum: Duration,
}

impl Histogram {
    /// The upper bounds of the buckets, each included: 1, 2.5 and 5 ms, and so on up to 10 s, then 30 s, 1 min, 5 min, 30 min and
    /// 2 h.
    pub const BOUNDS: [Duration; BOUNDS] = [
        Duration::from_millis(1),
        Duration::from_micros(2_500),
        Duration::from_millis(5),
        Duration::from_millis(10),
        Duration::from_millis(25),
        Duration::from_millis(50),
        Duration::from_millis(100),
        Duration::from_millis(250),
        Duration::from_millis(500),
        Duration::from_secs(1),
        Duration::from_millis(2_500),
        Duration::from_secs(5),
        Duration::from_secs(10),
        Duration::from_secs(30),
        Duration::from_secs(60),
        Duration::from_secs(300),
        Duration::from_secs(1_800),
        Duration::from_secs(7_200),
    ];

    #[cfg(any(feature = "relay", feature = "inbox"))]
    pub(crate) fn record(&mut self, took: Duration) {
        self.counts[Self::BOUNDS.partition_point(|bound| *bound < took)] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// How many times were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// All of them together.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// How many were counted in each bucket, in the order of [`BOUNDS`](Self::BOUNDS), and at the end those that were longer.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// What was counted since an earlier snapshot of the same histogram; all of it when that one is of another, because it was
    /// started anew meanwhile.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut out = *self;
        for (count, before) in out.counts.iter_mut().zip(earlier.counts) {
            match count.checked_sub(before) {
                Some(left) => *count = left,
                None => return *self,
            }
        }
        out.sum = self.sum.saturating_sub(earlier.sum);
        out
    }

    /// The time that this share of them (0 to 1) didn't exceed, estimated within its bucket as Prometheus does. None when nothing
    /// was counted. What is longer than the last bound is told as that bound.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = share.clamp(0.0, 1.0) * self.count() as f64;
        let (mut below, mut low) = (0, Duration::ZERO);
        for (count, bound) in self.counts.iter().zip(Self::BOUNDS) {
            if *count > 0 && (below + count) as f64 >= rank {
                let within = ((rank - below as f64) / *count as f64).clamp(0.0, 1.0);
                return Some(low + (bound - low).mul_f64(within));
            }
            below += count;
            low = bound;
        }
        (self.count() > 0).then_some(low)
    }
}

#[cfg(all(test, any(feature = "relay", feature = "inbox")))]
mod tests {
    use super::*;

    fn of(times: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        times.iter().for_each(|ms| histogram.record(Duration::from_millis(*ms)));
        histogram
    }

    #[test]
    fn a_time_counts_in_the_first_bucket_that_holds_it() {
        let mut histogram = of(&[0, 1, 7_200_000, 7_200_001]);
        histogram.record(Duration::from_nanos(1_000_001));
        assert_eq!(histogram.counts()[..2], [2, 1], "a bound belongs to its bucket");
        assert_eq!(histogram.counts()[BOUNDS - 1..], [1, 1]);
        assert_eq!(histogram.count(), 5);
        assert_eq!(histogram.sum(), Duration::from_millis(14_400_002) + Duration::from_nanos(1_000_001));
    }

    #[test]
    fn quantiles_lie_within_their_buckets() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        let histogram = of(&[2_000; 100]);
        for share in [0.0, 0.01, 0.5, 1.0] {
            let found = histogram.quantile(share).unwrap();
            assert!((1_000..=2_500).contains(&found.as_millis()), "{share}: {found:?}");
        }
        let halves = of(&[[3; 50], [30; 50]].concat());
        assert_eq!(halves.quantile(0.75), Some(Duration::from_micros(37_500)), "half-way between 25 and 50 ms");
        let mixed = of(&[3, 3, 3, 400]);
        assert!(mixed.quantile(0.75).unwrap() <= Duration::from_millis(5));
        assert!(mixed.quantile(0.76).unwrap() > Duration::from_millis(250));
        assert_eq!(of(&[90_000_000]).quantile(0.5), Some(Duration::from_secs(7_200)));
    }

    #[test]
    fn the_difference_of_snapshots_is_what_came_between() {
        let before = of(&[1, 30]);
        let after = of(&[1, 30, 30, 400]);
        assert_eq!(after.since(&before), of(&[30, 400]));
        assert_eq!(of(&[400]).since(&before), of(&[400]), "of a relay that was started anew");
    }
}
