//! What one group does next. No I/O and no clock of its own: whoever drives it says what time it is and what came of runs.

use super::due::{Due, Times};
use super::{Cause, CronError};
use crate::{Group, Misfire, WhenBusy};

/// A time that is noticed at most this much later has been seen: the process was busy, or took over from one that stopped.
pub(crate) const LATE: i64 = 30_000_000;

/// The wait before the first retry.
const RETRY: i64 = 1_000_000;

/// Why there is to be a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ask {
    pub(crate) cause: Cause,
    /// When it was due.
    pub(crate) due: Option<i64>,
    /// The row that asked for it.
    pub(crate) request: Option<i64>,
    /// Who waits for it in this process.
    pub(crate) ticket: Option<u64>,
    /// Runs before it that failed and that it tries again.
    pub(crate) attempt: u32,
}

impl Ask {
    pub(crate) fn new(cause: Cause) -> Self {
        Self { cause, due: None, request: None, ticket: None, attempt: 0 }
    }

    fn due(cause: Cause, due: i64) -> Self {
        Self { due: Some(due), ..Self::new(cause) }
    }

    /// Whether somebody wants to know what came of it.
    fn is_awaited(&self) -> bool {
        self.request.is_some() || self.ticket.is_some()
    }
}

/// What is to be done now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Do {
    /// Begin a run, and say [`Plan::ended`] when it has.
    Begin(Ask),
    /// There is no run for this one, and this is why.
    Discard(Ask, &'static str),
    /// Stop the run that is going.
    Stop,
    /// A run was done: the child's turn.
    Follow(Ask),
}

/// What came of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Done,
    /// It ended with an error.
    Failed,
    /// It was stopped, or took too long.
    Cut,
}

#[derive(Debug)]
struct Going {
    ask: Ask,
    stopped: bool,
}

/// The state of one group on one instance.
#[derive(Debug)]
pub(crate) struct Plan {
    due: Due,
    when_busy: WhenBusy,
    misfire: Misfire,
    retries: u32,
    paused: bool,
    /// When its trigger is due next.
    next: Option<i64>,
    retry: Option<(i64, Ask)>,
    running: Option<Going>,
    waiting: Option<Ask>,
}

const WAITS: &str = "a run of the group was waiting already";
const GOES: &str = "a run of the group was going";
const COVERED: &str = "a later run took its place";
const STOPPED: &str = "the group was stopped while it waited";

impl Plan {
    pub(crate) fn new(group: &Group) -> Result<Self, CronError> {
        Ok(Self {
            due: Due::of(&group.trigger)?,
            when_busy: group.when_busy,
            misfire: group.misfire,
            retries: group.retries,
            paused: false,
            next: None,
            retry: None,
            running: None,
            waiting: None,
        })
    }

    /// Begins to keep time. `seen` is the last due time that somebody saw to; None: nobody ever did, so nothing was missed.
    pub(crate) fn start(&mut self, now: i64, seen: Option<i64>) -> Vec<Do> {
        if self.paused { Vec::new() } else { self.catch_up(now, seen, LATE) }
    }

    fn catch_up(&mut self, now: i64, seen: Option<i64>, late: i64) -> Vec<Do> {
        match &self.due {
            Due::Asked => {}
            Due::After(_) if self.running.is_some() => {}
            Due::After(_) => self.next = Some(now),
            Due::Times(times) => {
                self.next = times.next_after(now);
                let missed = seen.and_then(|seen| times.last_within(seen, now));
                return missed.map_or_else(Vec::new, |due| self.noticed(now, due, late));
            }
        }
        Vec::new()
    }

    /// A time that has come, maybe long ago.
    fn noticed(&mut self, now: i64, due: i64, late: i64) -> Vec<Do> {
        let cause = match &self.due {
            _ if now - due > late && self.misfire == Misfire::Once => Cause::Misfire,
            _ if now - due > late => return Vec::new(),
            Due::Times(Times::Cron(_)) => Cause::Cron,
            Due::Times(Times::Rate(_)) => Cause::Rate,
            Due::After(_) | Due::Asked => Cause::Every,
        };
        self.ask(Ask::due(cause, due))
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn wakes(&self) -> Option<i64> {
        let due = self.next.filter(|_| !self.paused);
        let retry = self.retry.as_ref().map(|(at, _)| *at);
        due.into_iter().chain(retry).min()
    }

    /// When its trigger is due next, as far as that is known.
    pub(crate) fn next_due(&self) -> Option<i64> {
        self.next.filter(|_| !self.paused)
    }

    /// Whether its times can be missed.
    pub(crate) fn keeps_times(&self) -> bool {
        matches!(self.due, Due::Times(_))
    }

    /// Whether something is still to come of a request.
    pub(crate) fn has(&self, request: i64) -> bool {
        let asks = self.running.iter().map(|going| &going.ask).chain(&self.waiting);
        asks.into_iter().any(|ask| ask.request == Some(request))
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused
    }

    /// What is due by now.
    pub(crate) fn tick(&mut self, now: i64) -> Vec<Do> {
        let mut out = Vec::new();
        if !self.paused
            && let Some(due) = self.next.filter(|due| *due <= now)
        {
            let mut last = due;
            self.next = None;
            if let Due::Times(times) = &self.due {
                last = times.last_within(due, now).unwrap_or(due);
                self.next = times.next_after(now);
            }
            out.extend(self.noticed(now, last, if self.next.is_some() { LATE } else { i64::MAX }));
        }
        if self.retry.as_ref().is_some_and(|(at, _)| *at <= now)
            && let Some((_, ask)) = self.retry.take()
        {
            out.extend(self.ask(ask));
        }
        out
    }

    /// There is to be a run.
    pub(crate) fn ask(&mut self, ask: Ask) -> Vec<Do> {
        let Some(running) = &mut self.running else { return vec![self.begin(ask)] };
        let policy = match ask.cause {
            // The one that is going may not know of the houses that came since.
            Cause::Takeover => WhenBusy::Serial,
            _ => self.when_busy,
        };
        match policy {
            WhenBusy::Discard => vec![Do::Discard(ask, GOES)],
            WhenBusy::Serial => match &self.waiting {
                None => {
                    self.waiting = Some(ask);
                    Vec::new()
                }
                Some(_) if ask.is_awaited() => vec![Do::Discard(ask, WAITS)],
                Some(_) => Vec::new(),
            },
            WhenBusy::Cover => {
                let mut out = Vec::new();
                if !std::mem::replace(&mut running.stopped, true) {
                    out.push(Do::Stop);
                }
                if let Some(before) = self.waiting.replace(ask) {
                    out.push(Do::Discard(before, COVERED));
                }
                out
            }
        }
    }

    fn begin(&mut self, ask: Ask) -> Do {
        // Whatever was to be tried again, this run does.
        self.retry = None;
        self.running = Some(Going { ask: ask.clone(), stopped: false });
        Do::Begin(ask)
    }

    /// The run that was going has ended.
    pub(crate) fn ended(&mut self, now: i64, how: Ended) -> Vec<Do> {
        let Some(going) = self.running.take() else { return Vec::new() };
        let mut out = Vec::new();
        if let Due::After(period) = self.due {
            self.next = now.checked_add(period);
        }
        match how {
            Ended::Done => out.push(Do::Follow(going.ask)),
            Ended::Failed if going.ask.attempt < self.retries => {
                let wait = RETRY << going.ask.attempt.min(20);
                let attempt = going.ask.attempt + 1;
                self.retry = Some((now + wait, Ask { attempt, due: going.ask.due, ..Ask::new(Cause::Retry) }));
            }
            Ended::Failed | Ended::Cut => {}
        }
        if let Some(next) = self.waiting.take() {
            out.push(self.begin(next));
        }
        out
    }

    /// Somebody wants the run that is going to end, and nothing to come of what waits.
    pub(crate) fn stop(&mut self) -> Vec<Do> {
        let mut out = Vec::new();
        self.retry = None;
        if let Some(running) = &mut self.running
            && !std::mem::replace(&mut running.stopped, true)
        {
            out.push(Do::Stop);
        }
        if let Some(waiting) = self.waiting.take() {
            out.push(Do::Discard(waiting, STOPPED));
        }
        out
    }

    /// From now on its trigger does nothing. What is going goes on, and what is asked for takes place.
    pub(crate) fn pause(&mut self) {
        self.paused = true;
    }

    /// Its trigger works again; what came meanwhile was missed.
    pub(crate) fn resume(&mut self, now: i64, seen: Option<i64>) -> Vec<Do> {
        if !std::mem::replace(&mut self.paused, false) {
            return Vec::new();
        }
        self.catch_up(now, seen, 0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Trigger;

    const S: i64 = 1_000_000;

    fn plan(trigger: Trigger, change: impl FnOnce(&mut Group)) -> Plan {
        let mut group = Group::new("g").trigger(trigger);
        change(&mut group);
        Plan::new(&group).unwrap()
    }

    fn secs(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    fn begin(cause: Cause, due: i64) -> Vec<Do> {
        vec![Do::Begin(Ask::due(cause, due * S))]
    }

    fn asked(n: i64) -> Ask {
        Ask { request: Some(n), ..Ask::new(Cause::Manual) }
    }

    fn follow(cause: Cause, due: i64) -> Do {
        Do::Follow(Ask::due(cause, due * S))
    }

    #[test]
    fn a_fixed_delay_counts_from_the_end_of_the_run_before() {
        let mut p = plan(Trigger::Every(secs(5)), |_| {});
        assert_eq!(p.start(100 * S, Some(0)), []);
        assert_eq!(p.tick(100 * S), begin(Cause::Every, 100));
        assert_eq!((p.tick(200 * S), p.wakes()), (vec![], None), "nothing is due while it runs");
        assert_eq!(p.ended(203 * S, Ended::Done), [follow(Cause::Every, 100)]);
        assert_eq!(p.wakes(), Some(208 * S));
        assert_eq!(p.tick(208 * S - 1), []);
        assert_eq!(p.tick(208 * S), begin(Cause::Every, 208));
        p.ended(209 * S, Ended::Failed);
        assert_eq!(p.tick(1_000 * S), begin(Cause::Every, 214), "however late it is noticed: nothing else was due since");
    }

    #[test]
    fn a_rate_counts_from_start_to_start() {
        let mut p = plan(Trigger::Rate(secs(5)), |_| {});
        assert_eq!(p.start(101 * S, None), []);
        assert_eq!(p.wakes(), Some(105 * S));
        assert_eq!(p.tick(105 * S), begin(Cause::Rate, 105));
        p.ended(108 * S, Ended::Done);
        assert_eq!(p.wakes(), Some(110 * S));
        assert_eq!(p.tick(111 * S), begin(Cause::Rate, 110));
    }

    #[test]
    fn cron_comes_at_its_times() {
        let mut p = plan(Trigger::Cron { cron: "0 * * * * *".into(), tz: "Asia/Shanghai".into() }, |_| {});
        assert_eq!(p.start(61 * S, Some(60 * S)), []);
        assert_eq!(p.tick(119 * S), []);
        assert_eq!(p.tick(120 * S), begin(Cause::Cron, 120));
        assert_eq!(p.next_due(), Some(180 * S));
    }

    #[test]
    fn of_several_times_that_passed_one_run_takes_care() {
        let mut p = plan(Trigger::Rate(secs(1)), |_| {});
        p.start(100 * S, None);
        assert_eq!(p.tick(104 * S), begin(Cause::Rate, 104));
        assert_eq!(p.wakes(), Some(105 * S));
    }

    #[test]
    fn serial_keeps_one_waiting() {
        let mut p = plan(Trigger::Rate(secs(5)), |_| {});
        p.start(0, None);
        assert_eq!(p.tick(5 * S), begin(Cause::Rate, 5));
        assert_eq!(p.tick(10 * S), []);
        assert!(p.is_waiting());
        assert_eq!(p.tick(15 * S), [], "what it would find, the one that waits finds");
        assert_eq!(p.ask(asked(1)), [Do::Discard(asked(1), WAITS)], "somebody wants to know");
        assert_eq!(p.ended(16 * S, Ended::Done), [follow(Cause::Rate, 5), begin(Cause::Rate, 10).remove(0)]);
        assert!(p.is_running() && !p.is_waiting());
        assert_eq!(p.ended(17 * S, Ended::Cut), []);
        assert!(!p.is_running());
    }

    #[test]
    fn discard_leaves_the_new_one_out() {
        let mut p = plan(Trigger::Rate(secs(5)), |g| g.when_busy = WhenBusy::Discard);
        p.start(0, None);
        assert_eq!(p.tick(5 * S), begin(Cause::Rate, 5));
        assert_eq!(p.tick(10 * S), [Do::Discard(Ask::due(Cause::Rate, 10 * S), GOES)]);
        assert_eq!(p.ended(11 * S, Ended::Cut), []);
        assert_eq!(p.tick(15 * S), begin(Cause::Rate, 15));
    }

    #[test]
    fn cover_stops_the_one_that_goes() {
        let mut p = plan(Trigger::Rate(secs(5)), |g| g.when_busy = WhenBusy::Cover);
        p.start(0, None);
        p.tick(5 * S);
        assert_eq!(p.tick(10 * S), [Do::Stop]);
        assert_eq!(p.tick(15 * S), [Do::Discard(Ask::due(Cause::Rate, 10 * S), COVERED)], "it is stopped once");
        assert_eq!(p.ended(16 * S, Ended::Cut), begin(Cause::Rate, 15));
    }

    #[test]
    fn missed_times_are_left_out_or_made_up_for_once() {
        for (misfire, expected) in [(Misfire::Skip, vec![]), (Misfire::Once, begin(Cause::Misfire, 600))] {
            let mut p = plan(Trigger::Rate(secs(60)), |g| g.misfire = misfire);
            assert_eq!(p.start(659 * S, Some(120 * S)), expected, "nobody was there");
            assert_eq!(p.wakes(), Some(660 * S));
            // The process was stopped for a while.
            let mut p = plan(Trigger::Rate(secs(60)), |g| g.misfire = misfire);
            p.start(110 * S, Some(60 * S));
            assert_eq!(p.tick(659 * S), expected);
            assert_eq!(p.wakes(), Some(660 * S));
            // Paused by a person.
            let mut p = plan(Trigger::Rate(secs(60)), |g| g.misfire = misfire);
            p.start(110 * S, Some(60 * S));
            p.pause();
            assert_eq!((p.tick(659 * S), p.wakes(), p.next_due()), (vec![], None, None));
            assert_eq!(p.resume(659 * S, Some(60 * S)), expected);
            assert_eq!(p.resume(659 * S, Some(60 * S)), [], "once");
            assert_eq!(p.wakes(), Some(660 * S));
        }
    }

    #[test]
    fn a_time_just_missed_is_none() {
        for (now, runs) in [(150, true), (151, false)] {
            let mut p = plan(Trigger::Rate(secs(60)), |_| {});
            let expected = if runs { begin(Cause::Rate, 120) } else { vec![] };
            assert_eq!(p.start(now * S, Some(60 * S)), expected, "at {now}");
            let mut p = plan(Trigger::Rate(secs(60)), |_| {});
            p.start(61 * S, Some(60 * S));
            assert_eq!(p.tick(now * S), expected, "at {now}");
        }
        let mut p = plan(Trigger::Rate(secs(60)), |_| {});
        assert_eq!(p.start(130 * S, Some(120 * S)), [], "somebody saw to it");
        let mut p = plan(Trigger::Rate(secs(60)), |g| g.misfire = Misfire::Once);
        assert_eq!(p.start(1_000 * S, None), [], "a new group has missed nothing");
    }

    #[test]
    fn a_failed_run_is_tried_again_with_longer_waits() {
        let mut p = plan(Trigger::Rate(secs(600)), |g| g.retries = 3);
        p.start(0, None);
        assert_eq!(p.tick(600 * S), begin(Cause::Rate, 600));
        let mut now = 600 * S;
        for (attempt, wait) in [(1, 1), (2, 2), (3, 4)] {
            assert_eq!(p.ended(now, Ended::Failed), []);
            now += wait * S;
            assert_eq!(p.wakes(), Some(now));
            assert_eq!(p.tick(now - 1), []);
            assert_eq!(p.tick(now), [Do::Begin(Ask { attempt, ..Ask::due(Cause::Retry, 600 * S) })]);
        }
        assert_eq!(p.ended(now, Ended::Failed), []);
        assert_eq!(p.wakes(), Some(1_200 * S), "that was the last one");
        p.tick(1_200 * S);
        p.ended(1_201 * S, Ended::Failed);
        assert_eq!(p.wakes(), Some(1_202 * S), "the next run counts anew");
        assert_eq!(p.ask(asked(1)), [Do::Begin(asked(1))]);
        p.ended(1_202 * S, Ended::Done);
        assert_eq!(p.wakes(), Some(1_800 * S), "a later run has done what was to be tried again");
        p.ask(asked(2));
        p.ended(1_300 * S, Ended::Cut);
        assert_eq!(p.wakes(), Some(1_800 * S), "what was stopped, or took too long, is not tried again");
    }

    #[test]
    fn a_retry_gives_way_to_a_run_that_goes_or_waits() {
        let mut p = plan(Trigger::Manual, |g| g.retries = 1);
        p.ask(asked(1));
        p.ask(asked(2));
        let waiting = p.ended(0, Ended::Failed);
        assert_eq!((waiting, p.wakes()), (vec![Do::Begin(asked(2))], None));
    }

    #[test]
    fn stop_ends_everything_but_the_schedule() {
        let mut p = plan(Trigger::Rate(secs(5)), |g| g.retries = 1);
        p.start(0, None);
        p.tick(5 * S);
        p.ask(asked(1));
        assert_eq!(p.stop(), [Do::Stop, Do::Discard(asked(1), STOPPED)]);
        assert_eq!(p.stop(), [], "once");
        assert_eq!(p.ended(6 * S, Ended::Cut), []);
        assert_eq!(p.tick(10 * S), begin(Cause::Rate, 10));
        p.ended(11 * S, Ended::Failed);
        p.stop();
        assert_eq!(p.wakes(), Some(15 * S), "no retry");
    }

    #[test]
    fn what_is_asked_for_takes_place_in_a_pause() {
        let mut p = plan(Trigger::Every(secs(5)), |_| {});
        p.start(0, None);
        p.pause();
        assert_eq!((p.tick(10 * S), p.wakes()), (vec![], None));
        assert_eq!(p.ask(asked(1)), [Do::Begin(asked(1))]);
        p.ended(11 * S, Ended::Done);
        assert_eq!((p.tick(20 * S), p.wakes()), (vec![], None));
        assert_eq!(p.resume(20 * S, None), []);
        assert_eq!(p.tick(20 * S), begin(Cause::Every, 20));
        // Paused before it began to keep time.
        let mut p = plan(Trigger::Rate(secs(60)), |g| g.misfire = Misfire::Once);
        p.pause();
        assert_eq!((p.start(659 * S, Some(60 * S)), p.wakes()), (vec![], None));
        assert_eq!(p.resume(659 * S, Some(60 * S)), begin(Cause::Misfire, 600));
    }

    #[test]
    fn it_knows_what_is_still_to_come_of_a_request() {
        let mut p = plan(Trigger::Manual, |_| {});
        p.ask(asked(1));
        p.ask(asked(2));
        assert!(p.has(1) && p.has(2) && !p.has(3));
        p.ended(0, Ended::Done);
        assert!(!p.has(1) && p.has(2));
    }

    #[test]
    fn houses_that_came_in_the_middle_of_a_run_get_one_of_their_own() {
        for when_busy in [WhenBusy::Serial, WhenBusy::Discard, WhenBusy::Cover] {
            let mut p = plan(Trigger::Manual, |g| g.when_busy = when_busy);
            let takeover = Ask::new(Cause::Takeover);
            assert_eq!(p.ask(takeover.clone()), [Do::Begin(takeover.clone())]);
            assert_eq!(p.ask(takeover.clone()), []);
            assert_eq!(p.ask(takeover.clone()), []);
            assert_eq!(p.ended(0, Ended::Cut), [Do::Begin(takeover)], "{when_busy:?}");
        }
    }

    #[test]
    fn the_end_of_a_run_says_what_comes_after_it() {
        let mut p = plan(Trigger::Manual, |_| {});
        p.ask(asked(7));
        assert_eq!(p.ended(0, Ended::Done), [Do::Follow(asked(7))]);
        p.ask(asked(8));
        assert_eq!(p.ended(0, Ended::Failed), []);
        p.ask(asked(9));
        assert_eq!(p.ended(0, Ended::Cut), []);
        assert_eq!(p.ended(0, Ended::Done), [], "there was none");
    }
}
