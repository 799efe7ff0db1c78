//! Time and CPU time of a piece of work.

use std::time::Instant;

/// The kernel counts CPU time in these (`USER_HZ`): 100 a second on every architecture that Linux runs servers on.
pub(crate) const TICKS: f64 = 100.0;

/// Runs from [`start`](Self::start) to [`stop`](Self::stop).
#[derive(Debug)]
pub(crate) struct Meter {
    at: Instant,
    cpu: f64,
    apart: Option<Thread>,
}

/// A thread of this process.
#[derive(Debug, Clone)]
pub(crate) struct Thread(u32);

impl Thread {
    /// The one that calls; None where there is no `/proc`.
    pub(crate) fn current() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
        Some(Self(stat.split(' ').next()?.parse().ok()?))
    }
}

/// What a piece of work took, in seconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spent {
    pub(crate) time: f64,
    /// User and system time of this process on all cores; NaN where there is no `/proc`.
    pub(crate) cpu: f64,
}

impl Meter {
    /// The CPU time of the thread `apart` is not counted.
    pub(crate) fn start(apart: Option<Thread>) -> Self {
        Self { cpu: cpu(apart.as_ref()), at: Instant::now(), apart }
    }

    pub(crate) fn stop(&self) -> Spent {
        Spent { time: self.at.elapsed().as_secs_f64(), cpu: cpu(self.apart.as_ref()) - self.cpu }
    }
}

fn cpu(apart: Option<&Thread>) -> f64 {
    let of_thread = apart.map_or(0.0, |Thread(id)| of(&format!("/proc/self/task/{id}/stat")));
    of("/proc/self/stat") - of_thread
}

fn of(file: &str) -> f64 {
    let stat = std::fs::read_to_string(file).unwrap_or_default();
    let fields = fields(&stat);
    // utime and stime.
    let ticks = |i: usize| fields.get(i)?.parse::<f64>().ok();
    ticks(11).zip(ticks(12)).map_or(f64::NAN, |(user, system)| (user + system) / TICKS)
}

/// The fields of a `stat` file of `/proc` behind the name, which stands in parentheses and may contain anything; the first is the
/// state.
pub(crate) fn fields(stat: &str) -> Vec<&str> {
    stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work() {
        let until = of("/proc/thread-self/stat") + 0.1;
        while of("/proc/thread-self/stat") < until {}
    }

    #[test]
    fn work_is_counted_except_that_of_the_thread_apart() {
        let (others, all) = std::thread::scope(|scope| {
            let apart = scope.spawn(|| {
                let meters = (Meter::start(Thread::current()), Meter::start(None));
                work();
                (meters.0.stop().cpu, meters.1.stop().cpu)
            });
            apart.join().expect("it works")
        });
        // Other tests of this process may work meanwhile, so more than it must is no error.
        assert!(all >= 0.1, "{all}");
        assert!(others <= all - 0.09, "{others} of {all}");
    }
}
