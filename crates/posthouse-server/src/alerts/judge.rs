//! One task per database: of all instances one judges its alerts and sends the notices.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use posthouse::store::{ALERTS, AlertChange, AlertStanding, AlertWatch, NoticeOutcome, OLD_EVENTS, OpenNotice, Store};
use posthouse::{Error, ErrorKind};
use tokio::sync::watch;

use super::channels::Channels;
use super::local::{Reach, Reporter};
use super::measure::{self, Measured};
use super::notice::Notice;
use super::rules::{About, Kind, Rule};
use super::state::{self, Sample};
use crate::http::{Served, ServedRelay};
use crate::output::now_ms;

/// How long the duty lasts without being renewed: what another instance waits when the one that judges dies.
const LEASE: Duration = Duration::from_secs(30);

/// The longest time between two looks, so that the duty is renewed in time.
const LONGEST_TICK: Duration = Duration::from_secs(10);

/// Who sends notices is given this long to say what came of it; then they are sent again. Longer than a channel may take.
pub(super) const SENDING: Duration = Duration::from_secs(60);

/// Notices of one message.
const TOGETHER: usize = 10;

/// Messages through one channel at each look.
const MESSAGES: usize = 5;

/// Waits between tries: from here, twice as long each time, up to there.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// A notice that no channel took for this long is given up.
const GIVE_UP: Duration = Duration::from_secs(86_400);

/// How often old events are removed, and in how many steps at most.
const TIDY: Duration = Duration::from_secs(3600);
const TIDY_STEPS: u32 = 20;

/// A look that took longer than this isn't repeated before so many times as long.
const LONG: Duration = Duration::from_secs(1);
const REST: u32 = 10;

/// Judges one database.
pub(super) struct Judge {
    /// Of this process.
    pub(super) instance: String,
    pub(super) served: Arc<Served>,
    pub(super) database: Arc<ServedRelay>,
    /// Those that are in effect for this database.
    pub(super) rules: Vec<Rule>,
    pub(super) channels: Arc<Channels>,
    memory: Memory,
}

/// What a process keeps in memory. What must not be lost is in the database.
#[derive(Default)]
struct Memory {
    /// When each rule is looked at next.
    next: Vec<Option<Instant>>,
    reporter: Reporter,
    reach: Reach,
    /// Whether this process is the one.
    judges: bool,
    /// An error that was told in the log already.
    told: Option<String>,
    tidied: Option<Instant>,
    /// Notices about a database that can't be reached.
    held: VecDeque<Held>,
}

/// A notice that stands in no database.
struct Held {
    notice: Notice,
    channel: String,
    attempts: u32,
    next: Instant,
}

impl Judge {
    pub(super) fn new(
        instance: &str,
        served: &Arc<Served>,
        database: &Arc<ServedRelay>,
        rules: Vec<Rule>,
        channels: &Arc<Channels>,
    ) -> Self {
        Self {
            instance: instance.to_owned(),
            served: served.clone(),
            database: database.clone(),
            memory: Memory { next: vec![None; rules.len()], ..Memory::default() },
            rules,
            channels: channels.clone(),
        }
    }

    /// Looks again and again, until it is told to stop.
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let tick = tick(&self.rules);
        // So that many databases and instances don't look at the same moments.
        let mut wait = tick.mul_f64(fastrand::f64());
        loop {
            tokio::select! {
                // An error means that who would say so is gone.
                _ = stop.wait_for(|stop| *stop) => break,
                () = tokio::time::sleep(wait) => {}
            }
            wait = tick;
            // Not cut off by a stop, which waits a little: a notice that is being sent would be sent again.
            if std::panic::AssertUnwindSafe(self.pass()).catch_unwind().await.is_err() {
                tracing::error!(database = self.database.name, "judging alerts panicked; it goes on");
            }
        }
        // What this instance said doesn't count any more; after a while it wouldn't anyway.
        let _ = self.memory.reporter.take_back(&*self.database.people, &self.instance).await;
        if self.memory.judges {
            // Others take over at the end of the lease if this doesn't work.
            let _ = self.store().lay_down(ALERTS, &self.instance).await;
        }
    }

    fn store(&self) -> &dyn Store {
        &*self.database.people
    }

    /// One look.
    pub(super) async fn pass(&mut self) {
        let looked = self.look().await;
        match looked {
            Ok(()) => self.memory.told = None,
            Err(e) => {
                self.memory.judges = false;
                let text = e.to_string();
                // The same again is no news.
                if self.memory.told.as_ref() != Some(&text) {
                    tracing::warn!(database = self.database.name, error = text, "alerts can't be judged at the moment");
                    self.memory.told = Some(text);
                }
            }
        }
        self.deliver_held().await;
    }

    async fn look(&mut self) -> Result<(), Error> {
        let database = self.database.clone();
        let store = &*database.people;
        let asked = Instant::now();
        let took = store.duty(ALERTS, &self.instance, LEASE).await;
        self.reached(took.as_ref().err(), asked);
        let judges = took?;
        if judges != self.memory.judges {
            tracing::debug!(database = database.name, judges, "who judges alerts has changed");
            self.memory.judges = judges;
        }
        let stats = database.stats();
        if let Some(stats) = &stats {
            self.memory.reporter.report(store, &self.instance, stats).await?;
        }
        if !judges {
            return Ok(());
        }
        let now = Instant::now();
        let due = |next: &Option<Instant>| next.is_none_or(|at| at <= now);
        let due: Vec<usize> = self.memory.next.iter().enumerate().filter(|(_, next)| due(next)).map(|(n, _)| n).collect();
        if !due.is_empty() {
            let rules: Vec<&Rule> = due.iter().filter_map(|n| self.rules.get(*n)).collect();
            let mut measured = Measured::take(store, &rules, &database.name).await;
            measured.own = stats;
            measured.queues = Some(self.served.depths.all());
            // The clock is read after all was measured.
            let mut watch = store.alerts().watch().await?;
            measured.reports = Some(measure::fresh(std::mem::take(&mut watch.reports)));
            let changes = changes(&self.rules, &rules, &watch, &measured);
            // Counting may have taken longer than the lease.
            let written = changes.is_empty()
                || store.duty(ALERTS, &self.instance, LEASE).await? && store.alerts().judged(&self.instance, &changes).await?;
            if !written {
                self.memory.judges = false;
                return Ok(());
            }
            let took = now.elapsed();
            let rest = if took > LONG { took * REST } else { Duration::ZERO };
            for n in due {
                let interval = self.rules.get(n).map_or(LONGEST_TICK, |rule| rule.interval);
                // A tick that comes a little early counts.
                let next = now + interval.max(rest).mul_f64(0.9);
                if let Some(place) = self.memory.next.get_mut(n) {
                    *place = Some(next);
                }
            }
        }
        self.deliver(store).await?;
        if self.memory.tidied.is_none_or(|at| at.elapsed() > TIDY) {
            for _ in 0..TIDY_STEPS {
                if store.alerts().tidy_alerts(self.served.config.alerts_retention).await? < OLD_EVENTS.unsigned_abs() {
                    break;
                }
            }
            self.memory.tidied = Some(Instant::now());
        }
        Ok(())
    }

    /// Sends what is to be sent, each channel on its own: one that doesn't answer holds up no other.
    async fn deliver(&self, store: &dyn Store) -> Result<(), Error> {
        let mut channels: BTreeMap<String, Vec<OpenNotice>> = BTreeMap::new();
        for notice in store.alerts().open_notices().await? {
            channels.entry(notice.channel.clone()).or_default().push(notice);
        }
        let sending = channels.iter().map(|(channel, notices)| self.deliver_to(store, channel, notices));
        futures_util::future::try_join_all(sending).await.map(|_| ())
    }

    /// In the order of events: what comes later waits for what comes first.
    async fn deliver_to(&self, store: &dyn Store, name: &str, mut open: &[OpenNotice]) -> Result<(), Error> {
        let alerts = store.alerts();
        let ids = |notices: &[OpenNotice]| notices.iter().map(|n| n.event.id).collect::<Vec<_>>();
        let Some(channel) = self.channels.get(name) else {
            let why = "there is no channel of this name any more";
            return alerts.sent(name, &ids(open), NoticeOutcome::GivenUp(why)).await;
        };
        for _ in 0..MESSAGES {
            let together = open.iter().take(TOGETHER).take_while(|n| n.due).count();
            let (now, later) = open.split_at(together);
            let Some(first) = now.first() else { break };
            open = later;
            let events = ids(now);
            if !alerts.sending(&self.instance, name, &events, SENDING).await? {
                break;
            }
            let kind = |rule: &str| self.rules.iter().find(|r| r.name == rule).map(|r| r.kind);
            let notices = now.iter().map(|n| Notice::of(&n.event, kind(&n.event.rule), &self.database.name)).collect();
            let Err(refused) = channel.tell(notices).await else {
                alerts.sent(name, &events, NoticeOutcome::Sent).await?;
                continue;
            };
            tracing::warn!(
                database = self.database.name,
                channel = name,
                error = refused.why,
                "a notice of an alert could not be sent"
            );
            let outcome = if first.age > GIVE_UP {
                NoticeOutcome::GivenUp(&refused.why)
            } else {
                let tries = u32::try_from(first.attempts).unwrap_or(0);
                NoticeOutcome::Retry(&refused.why, back_off(tries).max(refused.after.unwrap_or_default()))
            };
            alerts.sent(name, &events, outcome).await?;
            break;
        }
        Ok(())
    }

    /// Judges whether the database can be reached.
    fn reached(&mut self, error: Option<&Error>, asked: Instant) {
        let Some(rule) = self.rules.iter().find(|rule| rule.kind == Kind::DatabaseUnreachable) else { return };
        let away = error.filter(|e| e.kind() == ErrorKind::Unavailable);
        // Another error says that something was there to answer.
        let (now, now_us) = (Instant::now(), now_ms() * 1_000);
        let why = away.map(ToString::to_string);
        let Some(news) = self.memory.reach.tell(rule, &self.instance, away.is_none(), why, (asked, now), now_us) else { return };
        let about = (rule.name.as_str(), self.instance.as_str(), self.database.name.as_str());
        let id = format!("{}/{}/{now_us}", self.database.name, self.instance);
        let notice = Notice::new(id, about, Some(rule.kind), &news, now_us, &self.instance);
        for channel in &news.channels {
            self.memory.held.push_back(Held { notice: notice.clone(), channel: channel.clone(), attempts: 0, next: now });
        }
    }

    async fn deliver_held(&mut self) {
        let mut left = VecDeque::new();
        while let Some(mut held) = self.memory.held.pop_front() {
            // What comes later through a channel waits for what comes first.
            let waits = held.next > Instant::now() || left.iter().any(|other: &Held| other.channel == held.channel);
            let Some(channel) = self.channels.get(&held.channel) else { continue };
            if waits {
                left.push_back(held);
                continue;
            }
            if let Err(refused) = channel.tell(vec![held.notice.clone()]).await {
                tracing::warn!(
                    database = self.database.name,
                    channel = held.channel,
                    error = refused.why,
                    "a notice of an alert could not be sent"
                );
                held.next = Instant::now() + back_off(held.attempts).max(refused.after.unwrap_or_default());
                held.attempts += 1;
                left.push_back(held);
            }
        }
        self.memory.held = left;
    }
}

/// How long between two looks: the shortest interval of a rule comes out even.
fn tick(rules: &[Rule]) -> Duration {
    let shortest = rules.iter().map(|rule| rule.interval).min().unwrap_or(LONGEST_TICK);
    let parts = (shortest.as_secs_f64() / LONGEST_TICK.as_secs_f64()).ceil().max(1.0);
    shortest.div_f64(parts)
}

/// The wait after so many tries that came to nothing, and one more.
fn back_off(tries: u32) -> Duration {
    RETRY.0.saturating_mul(2_u32.saturating_pow(tries)).min(RETRY.1)
}

/// What becomes of alerts by what was measured for rules that are due.
fn changes(rules: &[Rule], due: &[&Rule], watch: &AlertWatch, measured: &Measured) -> Vec<AlertChange> {
    let mut out = Vec::new();
    for rule in due {
        let rows = watch.alerts.iter().filter(|row| row.rule == rule.name);
        let before = rows.map(|row| (row.subject.as_str(), row.standing())).collect();
        let silenced = |subject: &str| watch.silences.iter().any(|s| s.covers(&rule.name, subject));
        out.extend(changes_of(rule, before, measured, silenced, watch.now_us));
    }
    let known = |name: &str| rules.iter().any(|rule| rule.name == name);
    let ended = watch.alerts.iter().filter(|row| !known(&row.rule));
    out.extend(ended.map(|row| state::end(&row.rule, &row.subject, &row.standing())));
    out
}

/// What becomes of the alerts of one rule. `before`: what isn't fine, by subject.
fn changes_of(
    rule: &Rule,
    mut before: BTreeMap<&str, AlertStanding>,
    measured: &Measured,
    silenced: impl Fn(&str) -> bool,
    now_us: i64,
) -> Vec<AlertChange> {
    let known: Vec<&str> = before.keys().copied().collect();
    let Some(samples) = measured.samples(rule, &known) else { return Vec::new() };
    let mut out = Vec::new();
    for sample in &samples {
        let row = before.remove(sample.subject.as_str());
        out.extend(state::judge(rule, row.as_ref(), sample, silenced(&sample.subject), now_us));
    }
    for (subject, row) in before {
        if rule.kind.about() == About::Database {
            out.push(state::end(&rule.name, subject, &row));
        } else if !measured.is_unknown(rule, subject) {
            out.extend(state::judge(rule, Some(&row), &Sample::nothing(subject), silenced(subject), now_us));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::depth::Depth;

    #[test]
    fn looks_and_tries_come_at_even_distances() {
        let of = |seconds: f64| {
            let rule = Rule { interval: Duration::from_secs_f64(seconds), ..Rule::of(Kind::OutboxFailed) };
            tick(&[rule, Rule { interval: Duration::from_secs(3600), ..Rule::of(Kind::OutboxBacklog) }]).as_secs_f64()
        };
        assert_eq!((of(0.2), of(10.0), of(15.0), of(30.0)), (0.2, 10.0, 7.5, 10.0));
        let waits: Vec<u64> = (0..11).map(|tries| back_off(tries).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(back_off(u32::MAX), RETRY.1);
    }

    /// A broker that doesn't answer ends no alert; a queue that is watched no more does.
    #[test]
    fn what_cannot_be_measured_stays_as_it_is() {
        let rule = Rule { wait: Duration::ZERO, ..Rule::of(Kind::QueueDepth) };
        let standing =
            AlertStanding { firing: true, since_us: 1, value: 1e9, threshold: rule.threshold, detail: None, told_us: Some(1) };
        let of = |queues: Option<Vec<Depth>>| {
            let measured = Measured { queues, ..Measured::default() };
            let before = BTreeMap::from([("rabbit:orders", standing.clone())]);
            changes_of(&rule, before, &measured, |_| false, 2).into_iter().map(|change| change.standing).collect::<Vec<_>>()
        };
        let depth = |messages| Depth {
            transport: "rabbit".into(),
            kind: "rabbitmq",
            name: "orders".into(),
            group: None,
            messages,
            consumers: None,
            error: None,
            at: None,
        };
        assert!(of(None).is_empty(), "nothing was measured at all");
        assert!(of(Some(vec![depth(None)])).is_empty(), "it could not be measured");
        assert_eq!(of(Some(vec![depth(Some(0))])), [None], "it is empty");
        assert_eq!(of(Some(Vec::new())), [None], "it isn't watched any more");
        let still = of(Some(vec![depth(Some(1_000_000_000))]));
        assert!(still.iter().all(|after| after.as_ref().is_some_and(|a| a.firing)), "{still:?}");
    }
}
