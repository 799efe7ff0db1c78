//! Telling admins how runs ended: in batches, in order, and again until one of them takes it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::admins::{Admins, Failed, told};
use super::shelf::{Kept, Outcome, Shelf};
use super::wire::{self, FAILED, Form, RunRequest, Told};
use crate::output::now_ms;

/// At most so many results, and so many bytes of their texts, go into one request.
const BATCH: usize = 50;
const BATCH_BYTES: usize = 512 << 10;

/// Results that were refused are tried one by one, so many at a time, so that what an admin never takes costs little.
const REFUSED_AT_ONCE: usize = 20;

/// After this long nobody waits for a result any more: the admin has given up on the run by itself.
const GIVE_UP: Duration = Duration::from_secs(7 * 86_400);

/// Results of runs, and what is to become of them.
#[derive(Debug)]
pub(super) struct Results {
    shelf: Shelf,
    state: Mutex<State>,
    /// There is something new to tell.
    new: Notify,
    retry: Duration,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// Ids of all runs that are kept: waiting, running, and with a result.
    known: BTreeMap<i64, Kept>,
    /// Results not told yet, by their place.
    fresh: BTreeMap<u64, i64>,
    /// Results that an admin refused. Who was tried goes to the end.
    refused: Vec<i64>,
}

/// How a round of telling went.
#[derive(Debug, PartialEq, Eq)]
enum Round {
    /// Nothing is left that an admin may take.
    Done,
    /// No admin can be reached.
    Away,
}

impl Results {
    /// Takes up what an earlier process left behind. Its runs ended with it.
    pub(super) fn open(dir: PathBuf, retry: Duration) -> io::Result<Self> {
        let (shelf, kept) = Shelf::open(dir)?;
        let mut state = State { next: kept.iter().map(|k| k.place + 1).max().unwrap_or_default(), ..State::default() };
        let (mut results, mut lost) = (0, 0);
        for kept in kept {
            results += usize::from(kept.result.is_some());
            if kept.result.is_some() {
                state.fresh.insert(kept.place, kept.log_id);
            } else {
                lost += 1;
            }
            state.known.insert(kept.log_id, kept);
        }
        if results + lost > 0 {
            tracing::info!(results, runs = lost, "results for the XXL-JOB admin and runs that didn't end were left behind");
        }
        let out = Self { shelf, state: Mutex::new(state), new: Notify::new(), retry };
        let lost: Vec<i64> = out.state().known.values().filter(|k| k.result.is_none()).map(|k| k.log_id).collect();
        for log_id in lost {
            out.ended(log_id, FAILED, "posthouse ended before this run did; what it had not sent is still pending");
        }
        Ok(out)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a run that is to be accepted. Once this has returned, there will be a result of it.
    ///
    /// Touches the disk.
    pub(super) fn accept(&self, run: &RunRequest, form: Form) -> Result<(), String> {
        let kept = {
            let mut state = self.state();
            if state.known.contains_key(&run.log_id) {
                return Err(format!("run {} was triggered already", run.log_id));
            }
            let kept = Kept { log_id: run.log_id, job_id: run.job_id, date: run.date(), form, place: 0, result: None };
            state.known.insert(run.log_id, kept.clone());
            kept
        };
        self.shelf.put(&kept).map_err(|e| {
            self.state().known.remove(&run.log_id);
            tracing::error!(log_id = run.log_id, error = %e, "a run is refused: it can't be kept on disk");
            format!("the run can't be kept on disk: {e}")
        })
    }

    /// Forgets a run of which nothing is to be told.
    pub(super) fn forget(&self, log_id: i64) {
        self.remove(log_id);
        self.state().known.remove(&log_id);
    }

    /// A run has ended, one way or the other.
    ///
    /// Touches the disk.
    pub(super) fn ended(&self, log_id: i64, code: u16, message: &str) {
        let message = wire::cut(&wire::shown(message));
        let kept = {
            let mut state = self.state();
            let place = state.next;
            let Some(kept) = state.known.get_mut(&log_id) else { return };
            kept.place = place;
            kept.result = Some(Outcome { code, message, at: now_ms() });
            let kept = kept.clone();
            state.next += 1;
            kept
        };
        if let Err(e) = self.shelf.put(&kept) {
            tracing::error!(log_id, error = %e, "the result of a run can't be kept on disk: it is lost if this process ends now");
        }
        self.state().fresh.insert(kept.place, log_id);
        self.new.notify_one();
    }

    fn remove(&self, log_id: i64) {
        if let Err(e) = self.shelf.remove(log_id) {
            tracing::warn!(log_id, error = %e, "a result that is told can't be removed: it will be told again");
        }
    }

    /// Results that no admin has taken yet.
    fn untold(&self) -> usize {
        let state = self.state();
        state.fresh.len() + state.refused.len()
    }

    /// Tells results until told to stop, and then those that are left, once.
    pub(super) async fn run(self: Arc<Self>, admins: Arc<Admins>, mut stop: watch::Receiver<bool>) {
        let mut again = Instant::now();
        let mut away = false;
        loop {
            // While no admin answers, a new result is no reason to ask before it is time.
            let woken = tokio::select! {
                // The sender lives as long as the executor.
                _ = stop.wait_for(|stop| *stop) => break,
                () = self.new.notified(), if !away => true,
                () = tokio::time::sleep_until(again) => false,
            };
            let mut round = self.tell(&admins).await;
            if !woken {
                if round == Round::Done {
                    round = self.tell_refused(&admins).await;
                }
                self.give_up();
                again = Instant::now() + self.retry;
            } else if round == Round::Away {
                again = Instant::now() + self.retry;
            }
            away = round == Round::Away;
        }
        self.tell(&admins).await;
        match self.untold() {
            0 => {}
            left => tracing::warn!(left, "results that no XXL-JOB admin took stay on disk and are told after the next start"),
        }
    }

    /// Tells everything that wasn't told yet, in order.
    async fn tell(&self, admins: &Admins) -> Round {
        loop {
            let batch = self.batch();
            if batch.is_empty() {
                return Round::Done;
            }
            match self.send(admins, &batch).await {
                Ok(()) => {}
                Err(Failed::Away(why)) => {
                    tracing::warn!(
                        results = self.untold(),
                        admins = why,
                        "no XXL-JOB admin takes results: they are kept on disk and told again"
                    );
                    return Round::Away;
                }
                Err(Failed::Refused(why)) => {
                    tracing::warn!(
                        results = batch.len(),
                        admins = why,
                        "the XXL-JOB admin refuses results: they are told again one by one"
                    );
                    let mut state = self.state();
                    for kept in &batch {
                        state.fresh.remove(&kept.place);
                        state.refused.push(kept.log_id);
                    }
                }
            }
        }
    }

    /// Tries some of the refused ones again, each alone: one that is never taken holds up no other.
    async fn tell_refused(&self, admins: &Admins) -> Round {
        let some: Vec<Kept> = {
            let mut state = self.state();
            let count = state.refused.len().min(REFUSED_AT_ONCE);
            state.refused.rotate_left(count);
            let first = state.refused.len() - count;
            state.refused[first..].iter().filter_map(|id| state.known.get(id)).cloned().collect()
        };
        for kept in some {
            match self.send(admins, std::slice::from_ref(&kept)).await {
                Ok(()) => {}
                Err(Failed::Away(_)) => return Round::Away,
                Err(Failed::Refused(why)) => tracing::debug!(log_id = kept.log_id, admins = why, "a result is refused again"),
            }
        }
        Round::Done
    }

    /// The next results that go into one request: those of one form.
    fn batch(&self) -> Vec<Kept> {
        let state = self.state();
        let mut out: Vec<Kept> = Vec::new();
        let mut bytes = 0;
        for kept in state.fresh.values().filter_map(|id| state.known.get(id)) {
            bytes += kept.result.as_ref().map_or(0, |r| r.message.len());
            let fits = |first: &Kept| out.len() < BATCH && bytes <= BATCH_BYTES && first.form == kept.form;
            if out.first().is_some_and(|first| !fits(first)) {
                break;
            }
            out.push(kept.clone());
        }
        out
    }

    /// Tells results to the first admin that takes them.
    ///
    /// They have the form in which their run was asked for. If nobody takes that, the other one is tried: the admin may be of
    /// another generation by now.
    async fn send(&self, admins: &Admins, batch: &[Kept]) -> Result<(), Failed> {
        let Some(form) = batch.first().map(|k| k.form) else { return Ok(()) };
        let results: Vec<Told<'_>> = batch
            .iter()
            .filter_map(|k| k.result.as_ref().map(|r| Told { log_id: k.log_id, date: k.date, code: r.code, message: &r.message }))
            .collect();
        let mut refused = false;
        let mut why = String::new();
        for form in [form, form.other()] {
            match admins.first("callback", &wire::callback(form, &results)).await {
                Ok(()) => {
                    let ids: BTreeSet<i64> = batch.iter().map(|k| k.log_id).collect();
                    // As long as an id is known no other run has it: the file is its own.
                    for id in &ids {
                        self.remove(*id);
                    }
                    let mut state = self.state();
                    state.refused.retain(|id| !ids.contains(id));
                    for kept in batch {
                        state.fresh.remove(&kept.place);
                        state.known.remove(&kept.log_id);
                    }
                    return Ok(());
                }
                Err(failed) => {
                    if why.is_empty() {
                        why = told(&failed);
                    }
                    if !failed.iter().any(|(_, f)| matches!(f, Failed::Refused(_))) {
                        break;
                    }
                    refused = true;
                }
            }
        }
        Err(if refused { Failed::Refused(why) } else { Failed::Away(why) })
    }

    /// Drops results that nobody waits for any more.
    fn give_up(&self) {
        let limit = now_ms().saturating_sub(i64::try_from(GIVE_UP.as_millis()).unwrap_or(i64::MAX));
        let old: Vec<i64> = {
            let mut state = self.state();
            let old: Vec<i64> =
                state.known.values().filter(|k| k.result.as_ref().is_some_and(|r| r.at < limit)).map(|k| k.log_id).collect();
            state.fresh.retain(|_, id| !old.contains(id));
            state.refused.retain(|id| !old.contains(id));
            old
        };
        for log_id in old {
            tracing::warn!(log_id, "no XXL-JOB admin took the result of this run in a week: it is dropped");
            self.forget(log_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Place, run};
    use super::*;

    fn request(log_id: i64) -> RunRequest {
        serde_json::from_str(&run(log_id, &[])).unwrap()
    }

    fn open(place: &Place) -> Results {
        Results::open(place.path().to_owned(), Duration::from_secs(1)).unwrap()
    }

    #[test]
    fn a_request_has_results_of_one_form_and_not_too_many() {
        let place = Place::new();
        let results = open(&place);
        let sizes = |results: &Results| {
            let mut out = Vec::new();
            loop {
                let batch = results.batch();
                if batch.is_empty() {
                    return out;
                }
                out.push((batch.len(), batch[0].form));
                for kept in &batch {
                    results.state().fresh.remove(&kept.place);
                    results.forget(kept.log_id);
                }
            }
        };
        for log_id in 0..120 {
            let form = if log_id == 110 { Form::Object } else { Form::Array };
            results.accept(&request(log_id), form).unwrap();
            results.ended(log_id, wire::OK, "");
        }
        assert_eq!(
            sizes(&results),
            [(50, Form::Array), (50, Form::Array), (10, Form::Array), (1, Form::Object), (9, Form::Array)]
        );
        for log_id in 0..45 {
            results.accept(&request(log_id), Form::Array).unwrap();
            results.ended(log_id, FAILED, &"x".repeat(20_000));
        }
        assert_eq!(sizes(&results), [(34, Form::Array), (11, Form::Array)], "15 000 bytes each");
    }

    #[test]
    fn what_nobody_took_for_a_week_is_dropped() {
        let place = Place::new();
        let results = open(&place);
        for log_id in 1..4 {
            results.accept(&request(log_id), Form::Array).unwrap();
        }
        results.ended(1, wire::OK, "");
        results.ended(2, wire::OK, "");
        let week = i64::try_from(GIVE_UP.as_millis()).unwrap();
        if let Some(kept) = results.state().known.get_mut(&1).and_then(|k| k.result.as_mut()) {
            kept.at -= week + 1;
        }
        results.give_up();
        let left: Vec<i64> = results.state().known.keys().copied().collect();
        assert_eq!((left, results.untold()), (vec![2, 3], 1));
        assert!(!place.path().join("1.json").exists() && place.path().join("2.json").exists());
    }
}
