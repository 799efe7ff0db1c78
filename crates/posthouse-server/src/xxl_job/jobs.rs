//! Runs of jobs: one at a time for each job, the others wait, don't take place, or take its place.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::log::Logs;
use super::results::Results;
use super::scan::{HANDLER, Plan, Scans, Stop, Why};
use super::wire::{Block, FAILED, Form, OK, RunRequest, TIMEOUT};

/// How many runs of one job may wait.
const LONGEST_QUEUE: usize = 1000;

/// How long a run may take to finish what is in flight once it is told to stop. Then it is cut off.
const STOP_WITHIN: Duration = Duration::from_secs(30);

/// The only kind of job that is run: one whose code is here. All others bring a script along.
const BEAN: &str = "BEAN";

/// All jobs that have something to do.
pub(super) struct Jobs {
    scans: Arc<dyn Scans>,
    logs: Logs,
    results: Arc<Results>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    jobs: HashMap<i64, Job>,
    /// No more runs are taken.
    ending: bool,
    /// One for each job that has something to do.
    workers: JoinSet<()>,
}

/// One job.
#[derive(Default)]
struct Job {
    /// Tells the run that is going to stop.
    running: Option<watch::Sender<Option<Why>>>,
    queue: VecDeque<Accepted>,
    /// Somebody works on it, or is about to.
    has_worker: bool,
}

struct Accepted {
    run: RunRequest,
    plan: Plan,
}

impl Job {
    fn is_busy(&self) -> bool {
        self.running.is_some() || !self.queue.is_empty()
    }

    fn stop(&self, why: Why) {
        if let Some(running) = &self.running {
            tell(running, why);
        }
    }
}

/// The first reason stays.
fn tell(running: &watch::Sender<Option<Why>>, why: Why) {
    running.send_if_modified(|told| match told {
        Some(_) => false,
        None => {
            *told = Some(why);
            true
        }
    });
}

/// Cut off when nobody waits for it any more.
struct Cut<T>(JoinHandle<T>);

impl<T> Drop for Cut<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Jobs {
    pub(super) fn new(scans: Arc<dyn Scans>, logs: Logs, results: Arc<Results>) -> Arc<Self> {
        Arc::new(Self { scans, logs, results, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up a run, or says why not. Once it has returned Ok there will be a result.
    ///
    /// Touches the disk.
    pub(super) fn run(self: &Arc<Self>, run: RunRequest, form: Form) -> Result<(), String> {
        let glue = run.glue_type();
        if glue != BEAN {
            tracing::warn!(job_id = run.job_id, glue, "a job with a script is refused");
            return Err(format!(
                "glue type {glue} is refused: posthouse runs no scripts; make it a {BEAN} job with the handler {HANDLER}"
            ));
        }
        if run.handler() != HANDLER {
            return Err(format!("there is no handler {:?} here; the handler is {HANDLER}", run.handler()));
        }
        let plan = Plan::new(self.scans.as_ref(), run.params(), run.shard()?)?;
        self.results.accept(&run, form)?;
        let (log_id, job_id) = (run.log_id, run.job_id);
        let covered = match self.enter(Accepted { run, plan }) {
            Ok(covered) => covered,
            Err(why) => {
                self.results.forget(log_id);
                return Err(why);
            }
        };
        tracing::info!(job_id, log_id, "a run of an XXL-JOB admin is taken up");
        self.not_run(covered, "a later run of this job takes its place (COVER_EARLY)");
        Ok(())
    }

    /// Puts a run into its job's queue. Those that it takes the place of come back.
    fn enter(self: &Arc<Self>, accepted: Accepted) -> Result<VecDeque<Accepted>, String> {
        let mut state = self.state();
        if state.ending {
            return Err("posthouse ends".into());
        }
        let job_id = accepted.run.job_id;
        let job = state.jobs.entry(job_id).or_default();
        let was_busy = job.is_busy();
        let mut covered = VecDeque::new();
        match accepted.run.block() {
            Block::Discard if was_busy => return Err("the last run of this job is still going (DISCARD_LATER)".into()),
            Block::Cover if was_busy => {
                covered = std::mem::take(&mut job.queue);
                job.stop(Why::Covered);
            }
            Block::Serial if job.queue.len() >= LONGEST_QUEUE => {
                return Err(format!("{LONGEST_QUEUE} runs of this job wait already"));
            }
            Block::Discard | Block::Cover | Block::Serial => {}
        }
        job.queue.push_back(accepted);
        if !std::mem::replace(&mut job.has_worker, true) {
            while state.workers.try_join_next().is_some() {}
            state.workers.spawn(self.clone().work(job_id));
        }
        Ok(covered)
    }

    fn not_run(&self, runs: impl IntoIterator<Item = Accepted>, why: &str) {
        for Accepted { run, .. } in runs {
            self.results.ended(run.log_id, FAILED, &format!("not run: {why}"));
        }
    }

    /// Whether a job has nothing to do.
    pub(super) fn is_idle(&self, job_id: i64) -> bool {
        !self.state().jobs.get(&job_id).is_some_and(Job::is_busy)
    }

    /// Stops the run of a job that is going and drops those that wait.
    ///
    /// Touches the disk.
    pub(super) fn kill(&self, job_id: i64) {
        let waiting = match self.state().jobs.get_mut(&job_id) {
            Some(job) => {
                job.stop(Why::Killed);
                std::mem::take(&mut job.queue)
            }
            None => return,
        };
        self.not_run(waiting, "stopped by the admin while it waited");
    }

    /// Takes no more runs, lets those that go finish until `until` and stops them then.
    pub(super) async fn end(&self, until: Instant, stop_within: Duration) {
        let (waiting, mut workers) = {
            let mut state = self.state();
            state.ending = true;
            let waiting: Vec<Accepted> = state.jobs.values_mut().flat_map(|job| std::mem::take(&mut job.queue)).collect();
            (waiting, std::mem::take(&mut state.workers))
        };
        self.not_run(waiting, "posthouse ends");
        if timeout_at(until, all(&mut workers)).await.is_ok() {
            return;
        }
        tracing::info!("runs of the XXL-JOB admin are stopped: the time for their end is over");
        self.state().jobs.values().for_each(|job| job.stop(Why::Ending));
        if timeout(stop_within, all(&mut workers)).await.is_err() {
            tracing::warn!(runs = workers.len(), "runs that don't end are cut off; they are told as failed after the next start");
            workers.shutdown().await;
        }
    }

    /// Runs what a job has to do, one after the other.
    async fn work(self: Arc<Self>, job_id: i64) {
        while let Some((accepted, tell, stop)) = self.next(job_id) {
            self.one(accepted, tell, stop).await;
        }
    }

    fn next(&self, job_id: i64) -> Option<(Accepted, watch::Sender<Option<Why>>, Stop)> {
        let mut state = self.state();
        let job = state.jobs.get_mut(&job_id)?;
        let Some(accepted) = job.queue.pop_front() else {
            state.jobs.remove(&job_id);
            return None;
        };
        let (tell, stop) = Stop::new();
        job.running = Some(tell.clone());
        Some((accepted, tell, stop))
    }

    async fn one(&self, Accepted { run, plan }: Accepted, running: watch::Sender<Option<Why>>, stop: Stop) {
        let log = self.logs.start(run.log_id);
        let shard = run.shard().unwrap_or((0, 1));
        let part = if shard.1 > 1 { format!(", part {} of {}", shard.0 + 1, shard.1) } else { String::new() };
        log.line(&format!("run {} of job {} starts: {HANDLER} {}{part}", run.log_id, run.job_id, run.params()));
        let began = Instant::now();
        let mut scan = Cut(tokio::spawn(plan.run(self.scans.clone(), stop.clone(), log.clone())));
        let limit = async {
            match run.timeout_s() {
                Some(s) => {
                    sleep(Duration::from_secs(s)).await;
                    tell(&running, Why::Timeout(s));
                }
                None => std::future::pending().await,
            }
        };
        let mut stopped = stop.clone();
        let ended = tokio::select! {
            ended = &mut scan.0 => Some(ended),
            () = limit => None,
            () = stopped.told() => None,
        };
        let ended = match ended {
            Some(ended) => Some(ended),
            None => {
                if let Some(why) = stop.why() {
                    log.line(&why.to_string());
                }
                timeout(STOP_WITHIN, &mut scan.0).await.ok()
            }
        };
        let (mut parts, errors) = match ended {
            Some(Ok((counts, errors))) => (vec![counts.to_string()], errors),
            Some(Err(e)) => {
                tracing::error!(log_id = run.log_id, error = %e, "a run of an XXL-JOB admin broke off");
                (Vec::new(), vec!["the run broke off by a fault of posthouse; its log tells more".to_owned()])
            }
            None => (Vec::new(), vec![format!("did not end within {} s and was cut off", STOP_WITHIN.as_secs())]),
        };
        let why = stop.why();
        let code = match &why {
            Some(Why::Timeout(_)) => TIMEOUT,
            Some(_) => FAILED,
            None if errors.is_empty() => OK,
            None => FAILED,
        };
        parts.extend(errors);
        let message = why.map(|why| why.to_string()).into_iter().chain(parts).collect::<Vec<_>>().join("; ");
        log.end(&format!("the run ends after {}: {code} {message}", crate::output::span(began.elapsed())));
        tracing::info!(job_id = run.job_id, log_id = run.log_id, code, message, "a run of an XXL-JOB admin has ended");
        self.results.ended(run.log_id, code, &message);
    }
}

async fn all(workers: &mut JoinSet<()>) {
    while workers.join_next().await.is_some() {}
}
