//! One scan of one table: rows are claimed in the order of their ids, sent as far as their destinations have room, and what came
//! of them is written back in batches.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;

use super::message::{Outgoing, outgoing};
use super::{Budget, Shared, until_true};
use crate::relay::destination::Destination;
use crate::store::adopted::{Ask, Claim, Row, Settle, Settled, Source, What};
use crate::transport::{Answer, Delivery, Outcome, Token, Transport, shown};
use crate::{Envelope, Error, ErrorKind, Retry, Route, RunCounts};

/// A transport that misses the deadline gets this long to say so itself.
const GRACE: Duration = Duration::from_millis(500);

/// The longest wait a receiver may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(30 * 86_400);

/// Rows during whose sending a process has died, sent in one pass; more follow in the next.
const SUSPECTS: usize = 50;

/// Ids read ahead, as a multiple of a batch.
const AHEAD: usize = 4;

/// How often a row whose lock somebody else has is passed over before it is waited for.
const PATIENT_AFTER: u32 = 10;

/// How long a row is left alone whose owner's table refuses what is to be written.
const ASIDE: Duration = Duration::from_secs(3600);

/// In a process one row at a time is sent during whose sending a process has died: so that it alone is to blame if this one dies.
static SUSPECT: Mutex<()> = Mutex::const_new(());

/// A claimed row.
#[derive(Debug)]
struct Held {
    row: Row,
    destination: String,
    route: Arc<Route>,
    /// Until when it is ours, by this process's clock.
    until: Instant,
    state: State,
}

#[derive(Debug)]
enum State {
    Waiting(Box<Envelope>),
    Sending {
        deadline: Instant,
    },
    /// What came of it is to be written; how often its lock was in somebody else's hands.
    Done {
        what: What,
        passed_over: u32,
    },
}

struct Pass<'a> {
    shared: &'a Shared,
    source: &'a Source,
    budget: &'a Budget,
    stop: watch::Receiver<bool>,
    /// By number, in the order in which they were claimed.
    held: BTreeMap<i64, Held>,
    numbers: i64,
    answers: mpsc::UnboundedReceiver<Answer>,
    answer: mpsc::UnboundedSender<Answer>,
    sends: JoinSet<()>,
    /// Ids that were read and not claimed yet.
    ahead: VecDeque<String>,
    reads: Reads,
    suspects: VecDeque<String>,
    renewed: Instant,
    write_after: Instant,
    write_failures: u32,
    counts: RunCounts,
    error: Option<Error>,
}

/// What is left to read: rows whose claim ran out, then the others by id, with houses from the instance's own onwards first.
#[derive(Debug)]
enum Reads {
    Expired,
    Forward { after: Option<String>, houses: Option<(i64, bool)> },
    Done,
}

pub(super) async fn run(
    shared: &Shared,
    source: &Source,
    budget: &Budget,
    stop: watch::Receiver<bool>,
) -> Result<RunCounts, Error> {
    let (answer, answers) = mpsc::unbounded_channel();
    let mut pass = Pass {
        shared,
        source,
        budget,
        stop,
        held: BTreeMap::new(),
        numbers: 0,
        answers,
        answer,
        sends: JoinSet::new(),
        ahead: VecDeque::new(),
        reads: Reads::Expired,
        suspects: VecDeque::new(),
        renewed: Instant::now(),
        write_after: Instant::now(),
        write_failures: 0,
        counts: RunCounts::default(),
        error: None,
    };
    pass.work().await;
    pass.one_by_one().await;
    pass.in_flight();
    match pass.error.take() {
        Some(e) => Err(e),
        None => Ok(pass.counts),
    }
}

impl Pass<'_> {
    fn destinations(&self) -> std::sync::MutexGuard<'_, HashMap<String, Destination>> {
        self.shared.destinations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stopping(&self) -> bool {
        *self.stop.borrow() || self.error.is_some()
    }

    /// Claims, sends and writes back until nothing is left.
    async fn work(&mut self) {
        loop {
            self.take_answers();
            self.give_up_waiting(Instant::now());
            if self.stopping() {
                self.release_waiting();
            }
            self.write_back().await;
            self.renew().await;
            if !self.stopping() {
                self.claim().await;
            }
            let wake = self.send();
            self.in_flight();
            let nothing_more = self.stopping() || (self.ahead.is_empty() && matches!(self.reads, Reads::Done));
            if self.held.is_empty() && (nothing_more || self.budget.left() == 0) {
                return;
            }
            self.wait(wake).await;
        }
    }

    async fn wait(&mut self, wake: Instant) {
        let mut stop = self.stop.clone();
        let stopping = self.stopping();
        let want_more = !stopping && self.wants() > 0 && (!self.ahead.is_empty() || !matches!(self.reads, Reads::Done));
        let written = self.held.values().any(|h| matches!(h.state, State::Done { .. }));
        if want_more || (written && self.write_after <= Instant::now()) {
            return;
        }
        let wake = if written { wake.min(self.write_after) } else { wake };
        tokio::select! {
            biased;
            answer = self.answers.recv() => {
                if let Some(answer) = answer {
                    self.answered(answer);
                    // Those that come together are written together.
                    tokio::task::yield_now().await;
                }
            }
            () = until_true(&mut stop), if !stopping => {}
            Some(ended) = self.sends.join_next(), if !self.sends.is_empty() => {
                if let Err(e) = ended && e.is_panic() {
                    tracing::error!(source = self.shared.name, error = %e, "a transport panicked; its messages are tried again");
                }
            }
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }

    /// How many rows may be claimed now.
    fn wants(&self) -> usize {
        let room = self.shared.mapping.concurrency().saturating_sub(self.held.len());
        let batch = self.shared.mapping.batch().min(self.shared.mapping.concurrency());
        // Not one by one as they are done.
        if room < batch.div_ceil(2) {
            return 0;
        }
        let mut n = room.min(self.shared.mapping.batch()).min(self.budget.left());
        if let Some(name) = self.shared.words.fixed_destination()
            && let Some(d) = self.destinations().get(name)
            && d.is_down()
        {
            // One probe, when it is time.
            n = n.min(d.may_send(Instant::now())).min(usize::from(self.held.is_empty()));
        }
        n
    }

    /// Destinations that rows should not be claimed for now.
    fn without(&self) -> Vec<String> {
        if !self.source.excludes() {
            return Vec::new();
        }
        let mut waiting: HashMap<&str, usize> = HashMap::new();
        for held in self.held.values().filter(|h| matches!(h.state, State::Waiting(_))) {
            *waiting.entry(&held.destination).or_default() += 1;
        }
        let now = Instant::now();
        let all = self.destinations();
        let closed = all.iter().filter(|(name, d)| {
            let waiting = waiting.get(name.as_str()).copied().unwrap_or(0);
            if d.is_down() { d.may_send(now) == 0 || waiting > 0 } else { waiting >= d.concurrency() }
        });
        // A statement has an end; the others cost a claim each.
        closed.map(|(name, _)| name.clone()).take(500).collect()
    }

    async fn claim(&mut self) {
        let n = self.wants();
        if n == 0 {
            // Of one destination, which is down: there is nothing to do before the next probe.
            if self.held.is_empty() && self.budget.left() > 0 {
                self.ahead.clear();
                self.reads = Reads::Done;
            }
            return;
        }
        let without = self.without();
        if self.ahead.is_empty()
            && let Err(e) = self.read_ahead(&without).await
        {
            self.error = Some(e);
            return;
        }
        let n = self.budget.take(n.min(self.ahead.len()));
        let ids: Vec<String> = self.ahead.drain(..n.min(self.ahead.len())).collect();
        if ids.is_empty() {
            return;
        }
        match self.claim_ids(&ids, false).await {
            Ok(claimed) => self.budget.give_back(n - claimed),
            Err(e) => {
                self.budget.give_back(n);
                self.error = Some(e);
            }
        }
    }

    /// Reads more ids; none are left when `reads` is done.
    async fn read_ahead(&mut self, without: &[String]) -> Result<(), Error> {
        let limit = self.shared.mapping.batch() * AHEAD;
        while self.ahead.is_empty() {
            match &mut self.reads {
                Reads::Done => return Ok(()),
                Reads::Expired => {
                    self.ahead = self.shared.store.expired(self.source).await?.into();
                    let houses = self.source.has_houses().then(|| (i64::from(fastrand::u8(..10)), true));
                    self.reads = Reads::Forward { after: None, houses };
                }
                Reads::Forward { after, houses } => {
                    let ask = Ask { after: after.clone(), houses: *houses, without: without.to_vec(), limit };
                    let ids = self.shared.store.candidates(self.source, &ask).await?;
                    *after = ids.last().cloned();
                    if ids.len() < limit {
                        // The houses below come after those from the first one on.
                        self.reads = match *houses {
                            Some((first, true)) => Reads::Forward { after: None, houses: Some((first, false)) },
                            _ => Reads::Done,
                        };
                    }
                    self.ahead = ids.into();
                }
            }
        }
        Ok(())
    }

    /// Claims these rows; how many it were. A conflict with the owner's transactions is tried again.
    async fn claim_ids(&mut self, ids: &[String], suspects: bool) -> Result<usize, Error> {
        let claim = Claim { owner: self.shared.owner.clone(), lease: self.shared.mapping.claim_lease(), suspects };
        let mut tries = 0;
        let (taken, asked) = loop {
            let asked = Instant::now();
            match self.shared.store.claim(self.source, ids, &claim).await {
                Ok(taken) => break (taken, asked),
                Err(e) if e.kind() == ErrorKind::Conflict && tries < 5 => {
                    tries += 1;
                    tokio::time::sleep(Duration::from_millis(5) * 2u32.pow(tries)).await;
                }
                Err(e) => return Err(e),
            }
        };
        if taken.too_long > 0 {
            tracing::error!(
                table = self.source.name,
                rows = taken.too_long,
                "ids longer than 255 bytes: these rows can't be claimed, and are not sent"
            );
            self.table(|t| t.too_long += taken.too_long as u64);
        }
        self.suspects.extend(taken.suspects);
        let claimed = taken.rows.len();
        self.counts.messages += claimed as u64;
        for row in taken.rows {
            self.hold(row, asked + self.shared.mapping.claim_lease());
        }
        Ok(claimed)
    }

    fn hold(&mut self, row: Row, until: Instant) {
        self.numbers += 1;
        let (state, destination, route) = match outgoing(self.shared, self.source, &row) {
            _ if row.claims > self.shared.mapping.max_claims() => {
                let died = row.claims - 1;
                let error = format!(
                    "{died} processes died while sending this row (adopted.{}.max_claims); look at what its receiver does with it, \
                     then set it back to pending",
                    self.shared.name
                );
                tracing::error!(table = self.source.name, row = row.id, "{error}");
                (State::Done { what: What::Failed { error, counted: false }, passed_over: 0 }, String::new(), Arc::default())
            }
            Ok(Outgoing { envelope, destination, route }) => (State::Waiting(Box::new(envelope)), destination, route),
            // It can't become better by itself.
            Err(error) => {
                (State::Done { what: What::Failed { error, counted: true }, passed_over: 0 }, String::new(), Arc::default())
            }
        };
        self.held.insert(self.numbers, Held { row, destination, route, until, state });
    }

    /// Hands waiting rows to their transports as far as there is room; when to look again.
    fn send(&mut self) -> Instant {
        let now = Instant::now();
        let timeout = self.shared.settings.send_timeout;
        let needed = timeout + self.shared.settings.lease_margin;
        let mut wake = now + Duration::from_secs(1);
        let mut batches: Vec<(Arc<dyn Transport>, Vec<Delivery>)> = Vec::new();
        let mut all = self.shared.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        for (number, held) in &mut self.held {
            match &held.state {
                State::Sending { deadline } => {
                    wake = wake.min(*deadline);
                    continue;
                }
                State::Done { .. } => continue,
                State::Waiting(_) => {}
            }
            // It is renewed first.
            if held.until < now + needed {
                wake = wake.min(now + Duration::from_millis(50));
                continue;
            }
            let d = all.entry(held.destination.clone()).or_insert_with(|| {
                let transport = self.shared.directory.transport(&held.route.to).cloned();
                Destination::new(held.destination.clone(), held.route.clone(), transport, now)
            });
            if d.may_send(now) == 0 {
                if d.is_down() {
                    // Nothing of a destination that is down waits in memory.
                    let wait = d.probe_at().map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
                    // Not all of them at the moment of the probe.
                    let wait = wait + Duration::from_millis(fastrand::u64(100..600));
                    held.state = State::Done { what: What::Release { wait }, passed_over: 0 };
                    wake = now;
                }
                continue;
            }
            let Some(transport) = d.transport.clone() else {
                let name = shown(&held.destination);
                let error = format!(
                    "no route or transport for destination {name:?} here; add [routes.{name:?}] or name a configured transport"
                );
                held.state = State::Done { what: retry(&held.row, held.route.retry, self.shared, error, None), passed_over: 0 };
                wake = now;
                continue;
            };
            if let Err(at) = d.take_rate(now) {
                wake = wake.min(at);
                continue;
            }
            d.in_flight += 1;
            let deadline = now + timeout;
            let until = deadline + GRACE.min(self.shared.settings.lease_margin);
            wake = wake.min(until);
            let State::Waiting(envelope) = std::mem::replace(&mut held.state, State::Sending { deadline: until }) else {
                continue;
            };
            let mut envelope = *envelope;
            let span = self.shared.trace.as_ref().map(|trace| (trace.0)(&mut envelope.headers));
            let token = Token { id: *number, try_number: 0, answers: Some(self.answer.clone()), span };
            let delivery = Delivery::new(envelope, held.route.clone(), deadline, false, token);
            match batches.iter_mut().find(|(t, _)| Arc::ptr_eq(t, &transport)) {
                Some((_, batch)) => batch.push(delivery),
                None => batches.push((transport, vec![delivery])),
            }
        }
        drop(all);
        for (transport, batch) in batches {
            self.sends.spawn(async move { transport.send(batch).await });
        }
        wake
    }

    fn take_answers(&mut self) {
        while let Ok(answer) = self.answers.try_recv() {
            self.answered(answer);
        }
    }

    fn answered(&mut self, answer: Answer) {
        // A late answer to a try that was given up changes nothing: numbers are never used twice.
        if self.held.get(&answer.id).is_some_and(|held| matches!(held.state, State::Sending { .. })) {
            self.conclude(answer.id, answer.outcome);
        }
    }

    /// Gives up on tries whose transport said nothing.
    fn give_up_waiting(&mut self, now: Instant) {
        let late = |held: &Held| matches!(held.state, State::Sending { deadline } if deadline <= now);
        let late: Vec<i64> = self.held.iter().filter(|(_, held)| late(held)).map(|(number, _)| *number).collect();
        for number in late {
            let timeout = self.shared.settings.send_timeout;
            self.conclude(number, Outcome::NoAnswer(format!("no answer within {timeout:?} (relay.send_timeout)").into()));
        }
    }

    fn conclude(&mut self, number: i64, outcome: Outcome) {
        let shared = self.shared;
        let Some(held) = self.held.get_mut(&number) else { return };
        let mut all = shared.destinations.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(d) = all.get_mut(&held.destination) else { return };
        let now = Instant::now();
        d.in_flight = d.in_flight.saturating_sub(1);
        let (mut unavailable, mut rejected, retries) = (false, false, held.route.retry);
        let what = match outcome {
            Outcome::Delivered => {
                d.confirmed(now);
                What::Sent
            }
            Outcome::NoAnswer(failure) if d.is_down() => {
                unavailable = true;
                down(d, &failure.error, now)
            }
            Outcome::Unavailable(failure) => {
                unavailable = true;
                down(d, &failure.error, now)
            }
            Outcome::Retry { after, error } => {
                d.refused(&error.error);
                retry(&held.row, retries, shared, error.error, after)
            }
            Outcome::NoAnswer(error) => {
                d.refused(&error.error);
                retry(&held.row, retries, shared, error.error, None)
            }
            Outcome::Rejected(error) => {
                d.refused(&error.error);
                rejected = true;
                What::Failed { error: error.error, counted: true }
            }
            Outcome::HeldBack => What::Release { wait: Duration::ZERO },
        };
        let attempt = Some(held.row.attempts.saturating_add(1));
        match &what {
            What::Sent => d.attempts.add(attempt, |c| &mut c.delivered),
            What::Retry { .. } => d.attempts.add(attempt, |c| &mut c.retried),
            What::Failed { .. } if rejected => d.attempts.add(attempt, |c| &mut c.rejected),
            What::Failed { .. } => d.attempts.add(attempt, |c| &mut c.failed),
            _ if unavailable => d.attempts.add(None, |c| &mut c.unavailable),
            _ => {}
        }
        held.state = State::Done { what, passed_over: 0 };
        drop(all);
        if unavailable {
            self.table(|t| t.unavailable += 1);
        }
    }

    fn table(&self, change: impl FnOnce(&mut super::AdoptedTableStats)) {
        change(self.shared.stats().tables.entry(self.source.name.clone()).or_default());
    }

    fn in_flight(&self) {
        let n = self.held.values().filter(|h| matches!(h.state, State::Sending { .. })).count() as u64;
        self.table(|t| t.in_flight = n);
    }

    /// Rows that wait in memory are given back.
    fn release_waiting(&mut self) {
        for held in self.held.values_mut().filter(|h| matches!(h.state, State::Waiting(_))) {
            held.state = State::Done { what: What::Release { wait: Duration::ZERO }, passed_over: 0 };
        }
    }

    /// Writes what came of rows. What can't be written is tried again, in the end only as long as the rows are ours.
    async fn write_back(&mut self) {
        let now = Instant::now();
        if now < self.write_after {
            return;
        }
        let mut rows = Vec::new();
        let mut numbers = Vec::new();
        let mut patient = false;
        // After a failure one by one, so that a row that can't be written stands alone.
        let most = if self.write_failures > 1 { 1 } else { 500 };
        for (number, held) in &self.held {
            let State::Done { what, passed_over } = &held.state else { continue };
            if *passed_over >= PATIENT_AFTER {
                if numbers.is_empty() {
                    patient = true;
                } else {
                    continue;
                }
            }
            rows.push(Settle { row: held.row.clone(), what: what.clone() });
            numbers.push(*number);
            if patient || numbers.len() >= most {
                break;
            }
        }
        if rows.is_empty() {
            return;
        }
        let owner = (self.shared.owner.as_str(), self.shared.mapping.claim_lease());
        match self.shared.store.settle(self.source, owner, &rows, patient).await {
            Ok(settled) => {
                // As long as one is being looked for that can't be written, they go one by one.
                self.write_failures = if rows.len() == 1 && self.held.len() > 1 { self.write_failures.min(2) } else { 0 };
                for ((number, row), settled) in numbers.into_iter().zip(rows).zip(settled) {
                    self.settled(number, &row.what, settled);
                }
            }
            Err(e) => {
                self.write_failures += 1;
                let wait =
                    (Duration::from_millis(20) * 2u32.pow(self.write_failures.min(7))).mul_f64(0.75 + 0.5 * fastrand::f64());
                self.write_after = Instant::now() + wait;
                if self.write_failures > 2 {
                    tracing::warn!(table = self.source.name, rows = rows.len(), error = %e, again_in = ?wait, "could not write back what came of rows");
                    self.shared.failed(Some(&self.source.name), &e);
                }
                let refused = !matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::Conflict);
                if let ([number], true, true) = (numbers.as_slice(), refused, self.write_failures > 4) {
                    self.refused(*number, &e);
                    return;
                }
                // Somebody else may have it by now; who takes it sends it again.
                let now = Instant::now();
                let lost = |number: &i64| self.held.get(number).is_some_and(|held| held.until < now);
                let given_up: Vec<i64> = if self.stopping() || self.write_failures > 20 {
                    numbers.into_iter().filter(lost).collect()
                } else {
                    Vec::new()
                };
                for number in given_up {
                    self.held.remove(&number);
                    self.error.get_or_insert(Error::Timeout { what: "write-back", after: self.shared.mapping.claim_lease() });
                }
            }
        }
    }

    /// The owner's table refuses what came of a row. It is noted in Posthouse's own, so that it isn't sent again and again.
    fn refused(&mut self, number: i64, e: &Error) {
        let Some(held) = self.held.get_mut(&number) else { return };
        let State::Done { what, .. } = &mut held.state else { return };
        if matches!(what, What::SetAside { .. }) {
            self.held.remove(&number);
            self.error.get_or_insert(Error::Timeout { what: "write-back", after: self.shared.mapping.claim_lease() });
            return;
        }
        let was = match what {
            What::Sent => "it was sent",
            _ => "it was not sent",
        };
        let error = format!("{was}, and that can't be written into its row: {e}");
        tracing::error!(table = self.source.name, row = held.row.id, again_in = ?ASIDE, "{error}");
        *what = What::SetAside { wait: ASIDE, error };
        self.write_failures = 0;
        self.write_after = Instant::now();
    }

    fn settled(&mut self, number: i64, what: &What, settled: Settled) {
        match settled {
            Settled::Locked => {
                if let Some(Held { state: State::Done { passed_over, .. }, .. }) = self.held.get_mut(&number) {
                    *passed_over += 1;
                }
                self.write_after = Instant::now() + Duration::from_millis(10);
                return;
            }
            Settled::Stale => self.table(|t| t.stale += 1),
            Settled::Written => match what {
                What::Sent => {
                    self.counts.delivered += 1;
                    self.table(|t| t.sent += 1);
                }
                What::Retry { .. } => {
                    self.counts.retried += 1;
                    self.table(|t| t.retried += 1);
                }
                What::Failed { .. } => {
                    self.counts.failed += 1;
                    self.table(|t| t.failed += 1);
                }
                What::Release { .. } | What::SetAside { .. } => {}
            },
        }
        self.held.remove(&number);
    }

    /// Renews the claims on all rows that are held, each third of a lease.
    async fn renew(&mut self) {
        let lease = self.shared.mapping.claim_lease();
        let now = Instant::now();
        let needed = self.shared.settings.send_timeout + self.shared.settings.lease_margin;
        // Those that wait so long that what is left does not cover a send, too.
        let short = self.held.values().any(|h| matches!(h.state, State::Waiting(_)) && h.until < now + needed);
        let due = if short { Duration::from_millis(100) } else { lease / 3 };
        if self.held.is_empty() {
            self.renewed = now;
            return;
        }
        if now.duration_since(self.renewed) < due {
            return;
        }
        self.renewed = now;
        let ids: Vec<String> = self.held.values().map(|h| h.row.id.clone()).collect();
        match self.shared.store.renew(self.source, &self.shared.owner, &ids, lease).await {
            Ok(ours) => {
                let ours: std::collections::HashSet<String> = ours.into_iter().collect();
                self.held.retain(|_, held| {
                    if ours.contains(&held.row.id) {
                        held.until = now + lease;
                        return true;
                    }
                    // What waits belongs to somebody else now; the others are told so when they are written back.
                    !matches!(held.state, State::Waiting(_))
                });
            }
            Err(e) => {
                tracing::warn!(table = self.source.name, error = %e, "claims could not be renewed");
                self.shared.failed(Some(&self.source.name), &e);
            }
        }
    }

    /// Rows during whose sending a process has died, each alone.
    async fn one_by_one(&mut self) {
        for _ in 0..SUSPECTS {
            if self.stopping() || self.budget.left() == 0 {
                return;
            }
            let Some(id) = self.suspects.pop_front() else { return };
            let alone = SUSPECT.lock().await;
            let n = self.budget.take(1);
            match self.claim_ids(&[id], true).await {
                Ok(claimed) => self.budget.give_back(n - claimed.min(n)),
                Err(e) => self.error = Some(e),
            }
            self.ahead.clear();
            self.reads = Reads::Done;
            self.work().await;
            drop(alone);
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        // Of a pass that was given up: what it had in flight counts no more.
        for held in self.held.values().filter(|h| matches!(h.state, State::Sending { .. })) {
            if let Some(d) = self.destinations().get_mut(&held.destination) {
                d.in_flight = d.in_flight.saturating_sub(1);
            }
        }
    }
}

/// The destination is down: its rows wait without a counted attempt.
fn down(d: &mut Destination, error: &str, now: Instant) -> What {
    if d.down(error, now) {
        tracing::warn!(destination = shown(&d.name), error, "destination is down; its rows wait, no attempts are counted");
    }
    let wait = d.probe_at().map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
    What::Release { wait }
}

/// A failed attempt, or the last one.
fn retry(row: &Row, of_route: Retry, shared: &Shared, error: String, after: Option<Duration>) -> What {
    let retry = shared.mapping.retry.unwrap_or(of_route);
    let failed = row.attempts.saturating_add(1);
    if failed >= row.max_attempts.unwrap_or(retry.max_attempts) {
        return What::Failed { error, counted: true };
    }
    let wait = retry.wait(failed, fastrand::f64()).max(after.unwrap_or_default().min(LONGEST_WAIT));
    What::Retry { wait, error }
}
