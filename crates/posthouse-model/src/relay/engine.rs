//! What `relay/engine.rs` and its neighbours do in memory, under their names there.

use super::state::{
    Breaker, Call, HouseState, KEYS, Kind, Lag, MESSAGES, Passed, Queue, Read, Recent, Row, Setback, State, Step, Thin, Try, Tx,
    Window, places,
};
use super::{Ordering, Protection, Scenario};

/// How a row was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Ahead,
    Behind,
}

/// A read of one statement.
fn begin(kind: Kind, rows: [Option<Thin>; MESSAGES], upto: u8) -> Read {
    Read { kind, rows, probe: 0, upto, changes: 0, unfiltered: true, same_life: true }
}

/// One instance in a state.
pub(super) struct Engine<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) state: &'a mut State,
    pub(super) i: usize,
}

impl std::ops::Deref for Engine<'_> {
    type Target = super::state::Instance;

    fn deref(&self) -> &Self::Target {
        &self.state.instances[self.i]
    }
}

impl std::ops::DerefMut for Engine<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.state.instances[self.i]
    }
}

impl Engine<'_> {
    fn lacks(&self, protection: Protection) -> bool {
        self.scenario.lacks(protection)
    }

    fn key_of(&self, place: usize) -> Option<usize> {
        self.rows[place].filter(|row| row.queued).and_then(|_| self.scenario.keys[place]).map(usize::from)
    }

    fn enter(&mut self, place: usize, step: Step) {
        if let Some(row) = &mut self.rows[place] {
            row.step = step;
        }
    }

    /// `Engine::keeps`.
    pub(super) fn keeps(&self) -> bool {
        self.house.is_some_and(|h| !h.draining)
    }

    // reading.rs

    /// `Engine::excluded`.
    fn excluded(&self) -> Option<u8> {
        (self.lag != Lag::None).then_some(0)
    }

    /// `Engine::poll`.
    pub(super) fn poll(&mut self) {
        let Some(house) = self.house else { return };
        if self.lag == Lag::Unknown {
            self.lag = Lag::From(house.mark);
        }
        let excluded = self.excluded();
        let (rows, probe, upto) = self.state.poll(self.scenario, house.mark, excluded);
        let changes = self.state.changes;
        let unfiltered = excluded.is_none();
        self.woken = false;
        self.fast = Some(Read { kind: Kind::Poll, rows, probe, upto, changes, unfiltered, same_life: true });
    }

    /// `Engine::read_due`.
    pub(super) fn read_due(&mut self) {
        let rows = self.state.due(self.scenario);
        self.fast = Some(begin(Kind::Due, rows, 0));
    }

    /// `Engine::read_keys`.
    pub(super) fn read_keys(&mut self) {
        let keys = std::mem::take(&mut self.key_reads);
        let counts = self.changes == Some(self.state.changes) || self.lacks(Protection::PassedHeedsOperators);
        let mut rows = [None; MESSAGES];
        for key in (0..KEYS).filter(|key| keys[*key]) {
            let passed = if counts { self.passed[key].upto } else { 0 };
            self.state.of_key(self.scenario, key as u8, passed, &mut rows);
        }
        self.fast = Some(begin(Kind::Keys, rows, 0));
    }

    /// `Destination::wants_rows`.
    pub(super) fn wants_rows(&self) -> bool {
        let busy = |step: Step| step.waits() || matches!(step, Step::Loaded | Step::Claiming(_) | Step::Sending(_));
        self.lag != Lag::None
            && match self.breaker {
                Breaker::Closed => true,
                Breaker::Open { waiting } => !waiting && !self.rows.iter().flatten().any(|row| busy(row.step)),
            }
    }

    /// `Engine::read_destination`.
    pub(super) fn read_destination(&mut self) {
        let Some(house) = self.house else { return };
        let after = match self.lag {
            Lag::From(after) => after,
            Lag::None | Lag::Unknown => house.mark,
        };
        self.lag = Lag::From(after);
        let rows = self.state.of_destination(self.scenario, after, 0);
        self.fast = Some(begin(Kind::Destination, rows, after));
    }

    /// `Engine::read_changes`.
    pub(super) fn read_changes(&mut self) {
        let touched = self.state.touched_since(self.changes.unwrap_or(0));
        let upto = self.changes_seen;
        self.fast = Some(begin(Kind::Changes(touched), [None; MESSAGES], upto));
    }

    /// `Engine::sweep`: the full one, which finds all that the near one does.
    pub(super) fn sweep(&mut self) {
        let Some(house) = self.house else { return };
        if self.breaker == Breaker::Closed && self.lag != Lag::None {
            self.lag = Lag::From(0);
        }
        let rows = self.state.sweep(self.scenario, house.mark, self.excluded());
        self.slow = Some(begin(Kind::Sweep, rows, 0));
    }

    /// `Engine::on_read`.
    pub(super) fn on_read(&mut self, read: &Read) {
        match read.kind {
            Kind::Poll => {
                if self.changes.is_none() {
                    self.keys_touched(u8::MAX);
                }
                self.admit_all(read, Found::Ahead);
                if let Some(house) = self.house.as_mut().filter(|_| read.same_life) {
                    house.polled_out |= read.unfiltered;
                    house.mark = house.mark.max(read.upto);
                }
                self.settle();
                if self.changes.is_none() {
                    self.changes = Some(read.changes);
                }
                self.changes_seen = self.changes_seen.max(read.changes);
            }
            Kind::Due => {
                self.admit_all(read, Found::Behind);
                if let Some(house) = self.house.as_mut().filter(|_| read.same_life) {
                    house.due_read = true;
                }
                self.settle();
            }
            Kind::Keys | Kind::Sweep => self.admit_all(read, Found::Behind),
            Kind::Destination => self.on_destination_read(read),
            Kind::Changes(touched) => {
                self.changes = Some(read.upto);
                self.keys_touched(touched);
                for place in places(touched) {
                    let key = self.scenario.keys[place].map(usize::from);
                    if let Some(key) = key {
                        self.leave_out(key);
                    }
                    if self.rows[place].is_some_and(|row| row.step.waits()) {
                        if let Some(key) = self.key_of(place) {
                            self.key_set_back(key, place);
                        }
                        self.forget(place);
                    }
                    if let Some(key) = key.filter(|_| self.keeps()) {
                        self.key_reads[key] = true;
                    }
                }
            }
        }
        // `Recent::prune`.
        let slow = read.kind == Kind::Sweep;
        for recent in &mut self.recent {
            *(if slow { &mut recent.slow } else { &mut recent.fast }) = false;
            if !recent.is_there() {
                *recent = Recent::default();
            }
        }
    }

    fn admit_all(&mut self, read: &Read, found: Found) {
        for (place, thin) in read.rows.iter().enumerate() {
            if let Some(thin) = thin {
                self.admit(place, *thin, found);
            }
        }
    }

    /// `HouseState::settle`.
    fn settle(&mut self) {
        let Some(house) = self.house.as_mut().filter(|h| h.polled_out && h.due_read) else { return };
        house.suspect = false;
        for window in &mut house.windows {
            *window = window.filter(|w| w.open > 0);
        }
    }

    /// `Engine::on_destination_read`.
    fn on_destination_read(&mut self, read: &Read) {
        if read.same_life && self.lag != Lag::None {
            let last = read.rows.iter().rposition(Option::is_some).map_or(read.upto, |place| place as u8 + 1);
            self.lag = Lag::From(last.max(read.upto));
        }
        let before = self.lag;
        self.admit_all(read, Found::Behind);
        if self.lag == before && (self.breaker == Breaker::Closed || self.has_room()) {
            self.lag = Lag::None;
        }
    }

    // ordering.rs

    /// `Destination::has_room`, where only an open breaker leaves none.
    fn has_room(&self) -> bool {
        self.breaker == Breaker::Closed || !self.rows.iter().flatten().any(|row| row.step.waits())
    }

    /// The destination's cursor goes back to before this row.
    fn pass_over(&mut self, place: usize) {
        if self.lacks(Protection::LagCursor) {
            self.lag = Lag::From(self.house.map_or(0, |h| h.mark));
            return;
        }
        let before = place as u8;
        self.lag = Lag::From(match self.lag {
            Lag::From(cursor) => cursor.min(before),
            Lag::None | Lag::Unknown => before,
        });
    }

    /// `Engine::admit`.
    fn admit(&mut self, place: usize, thin: Thin, found: Found) {
        let recent = self.recent[place].is_there() && !self.lacks(Protection::Recent);
        if self.rows[place].is_some() || recent || !self.keeps() {
            return;
        }
        if thin.destination == 0 && ((found == Found::Ahead && self.lag != Lag::None) || !self.has_room()) {
            self.pass_over(place);
            return;
        }
        let key = self.scenario.keys[place].map(usize::from).filter(|_| thin.keyed && self.scenario.ordering != Ordering::None);
        let Some(key) = key else {
            self.insert(place, thin, false);
            self.ready(place);
            return;
        };
        if let Some(before) = usize::from(thin.before).checked_sub(1) {
            if self.rows[before].is_some_and(|row| row.outdated) {
                return;
            }
            match self.rows[before].map(|row| row.step) {
                Some(Step::Delivered(_)) => {}
                Some(Step::SetBack(..)) => return,
                Some(_) => {
                    if let Some(row) = &mut self.rows[before] {
                        row.queued = true;
                    }
                    if self.keys[key].chain == 0 {
                        let flies = |place: &usize| {
                            self.key_of(*place) == Some(key)
                                && self.rows[*place].is_some_and(|r| matches!(r.step, Step::Sending(_)))
                        };
                        let flying = (0..MESSAGES).filter(flies).fold(0, |set, place| set | 1 << place);
                        let queue = &mut self.keys[key];
                        queue.chain = 1 << before;
                        queue.active |= 1 << before;
                        queue.flying = flying;
                    }
                }
                None if self.recent[before].is_there() && self.recent[before].delivered => {}
                None => return,
            }
        }
        let queue = &mut self.keys[key];
        queue.more |= found == Found::Behind;
        if queue.broken {
            queue.more = true;
            return;
        }
        queue.chain |= 1 << place;
        self.insert(place, thin, true);
        self.advance(key);
    }

    /// `Engine::insert`.
    fn insert(&mut self, place: usize, thin: Thin, queued: bool) {
        let most = self.scenario.concurrency;
        let mut suspect = false;
        if !self.lacks(Protection::Claims)
            && let Some(house) = self.house.as_mut().filter(|h| h.suspect)
        {
            let window = house.windows[usize::from(thin.destination)].get_or_insert(Window { left: most, open: 0 });
            suspect = window.left > 0;
            if suspect {
                window.left -= 1;
                window.open += 1;
            }
        }
        self.rows[place] = Some(Row {
            step: Step::Chained,
            thin: Thin { before: 0, ..thin },
            queued,
            suspect,
            claimed: false,
            outdated: false,
            follows: false,
        });
    }

    fn is_pipelined(&self) -> bool {
        self.scenario.ordering == Ordering::Pipelined
    }

    /// `Engine::advance`.
    fn advance(&mut self, key: usize) {
        loop {
            let queue = self.keys[key];
            let Some(next) = places(queue.chain & !queue.active).next().filter(|_| !queue.broken) else { return };
            let alone = |place: usize| {
                let together = self.is_pipelined() || self.lacks(Protection::OneOfAKey);
                self.rows[place].is_none_or(|row| row.suspect || row.thin.claims > 0 || !together)
            };
            if queue.active != 0 && (alone(next) || places(queue.active).any(alone)) {
                return;
            }
            self.keys[key].active |= 1 << next;
            self.ready(next);
        }
    }

    /// `Engine::key_sent`.
    fn key_sent(&mut self, place: usize) -> bool {
        let Some(key) = self.key_of(place).filter(|_| self.is_pipelined()) else { return false };
        let queue = &mut self.keys[key];
        if *queue == Queue::default() {
            return false;
        }
        let follows = queue.flying != 0;
        queue.flying |= 1 << place;
        follows
    }

    /// `Engine::key_broken`.
    fn key_broken(&mut self, place: usize) -> bool {
        let Some(key) = self.key_of(place).filter(|_| self.is_pipelined()) else { return false };
        let known = self.keys[key].broken;
        self.break_queue(key, place);
        known
    }

    /// `Engine::break_queue`.
    fn break_queue(&mut self, key: usize, but: usize) {
        if self.keys[key] == Queue::default() {
            return;
        }
        if self.lacks(Protection::FollowersGoBack) {
            return self.leave_queue(key, but);
        }
        let queue = &mut self.keys[key];
        queue.broken = true;
        queue.flying &= !(1 << but);
        let chain = std::mem::take(&mut queue.chain) & !queue.flying & !(1 << but);
        for place in places(chain) {
            match self.rows[place] {
                Some(row) if row.step.waits() || row.step == Step::Loaded => {
                    if row.claimed {
                        self.unclaim(place);
                    } else {
                        self.forget(place);
                    }
                }
                _ => {}
            }
        }
        self.key_mended(key);
    }

    /// What a relay without that protection would do.
    fn leave_queue(&mut self, key: usize, place: usize) {
        let queue = &mut self.keys[key];
        queue.chain &= !(1 << place);
        queue.active &= !(1 << place);
        queue.flying &= !(1 << place);
        self.advance(key);
    }

    /// `Engine::key_mended`.
    fn key_mended(&mut self, key: usize) {
        if self.keys[key].broken && self.keys[key].flying == 0 {
            self.keys[key] = Queue::default();
            self.key_reads[key] = true;
        }
    }

    /// `Engine::key_returned`.
    fn key_returned(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        if row.claimed {
            self.unclaim(place);
            return;
        }
        if self.breaker != Breaker::Closed {
            self.pass_over(place);
        }
        self.forget(place);
    }

    /// `Engine::key_delivered`.
    fn key_delivered(&mut self, key: usize, place: usize) {
        let passed = &mut self.passed[key];
        if !passed.left_out {
            passed.upto = passed.upto.max(place as u8 + 1);
        }
        let queue = &mut self.keys[key];
        queue.chain &= !(1 << place);
        queue.active &= !(1 << place);
        queue.flying &= !(1 << place);
        if queue.broken {
            self.key_mended(key);
        } else if queue.chain == 0 {
            let more = std::mem::take(queue).more;
            self.key_reads[key] |= more;
        } else {
            self.advance(key);
        }
    }

    /// `Engine::key_set_back`.
    fn key_set_back(&mut self, key: usize, place: usize) {
        if self.lacks(Protection::FollowersGoBack) {
            return self.leave_queue(key, place);
        }
        if self.is_pipelined() {
            return self.break_queue(key, place);
        }
        let queue = std::mem::take(&mut self.keys[key]);
        for other in places(queue.chain) {
            if other != place && self.rows[other].is_some_and(|row| row.step.waits()) {
                self.forget(other);
            }
        }
    }

    /// `Engine::keys_touched`, for the keys of these messages. From here on what was requeued is in its place again.
    fn keys_touched(&mut self, touched: u8) {
        let published =
            (0..MESSAGES).filter(|place| self.state.messages[*place].tx != Tx::None).fold(0, |set, place| set | 1 << place);
        for place in places(touched & published) {
            let Some(key) = self.scenario.keys[place] else { continue };
            if self.state.pending[place].is_some_and(|row| row.keyed) {
                self.state.messages[place].may_pass &= published;
            }
            if self.lacks(Protection::OutdatedRows) {
                continue;
            }
            for other in 0..self.scenario.messages() {
                let same = self.scenario.keys[other] == Some(key);
                if let Some(row) = self.rows[other].as_mut().filter(|row| same && row.thin.keyed) {
                    row.outdated = true;
                }
            }
        }
    }

    /// `Passed::leave_out`.
    fn leave_out(&mut self, key: usize) {
        if !self.lacks(Protection::PassedHeedsOperators) {
            self.passed[key] = Passed { upto: 0, left_out: true };
        }
    }

    // engine.rs

    /// `Engine::forget`.
    pub(super) fn forget(&mut self, place: usize) {
        let Some(row) = self.rows[place].take() else { return };
        let destination = usize::from(row.thin.destination);
        let Some(house) = self.house.as_mut().filter(|_| row.suspect) else { return };
        let Some(window) = &mut house.windows[destination] else { return };
        window.open = window.open.saturating_sub(1);
        if window.open > 0 {
            return;
        }
        if !house.suspect {
            house.windows[destination] = None;
        }
        for held in 0..MESSAGES {
            let waits = |row: &Row| row.step == Step::Held && usize::from(row.thin.destination) == destination;
            if self.rows[held].as_ref().is_some_and(waits) {
                self.ready(held);
            }
        }
    }

    /// `Engine::ready`.
    fn ready(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        let window = self.house.and_then(|h| h.windows[usize::from(row.thin.destination)]);
        let claims = row.thin.claims > 0 && !self.lacks(Protection::Claims);
        if claims && row.thin.claims >= self.scenario.max_claims {
            self.give_up_claims(place);
        } else if !row.suspect && !claims && window.is_some_and(|w| w.open > 0) {
            self.enter(place, Step::Held);
        } else if row.suspect || claims {
            self.enter(place, Step::MustClaim);
        } else {
            self.enter(place, Step::Ready);
        }
    }

    /// `Engine::gain`.
    pub(super) fn gain(&mut self, expired: bool) {
        self.house = Some(HouseState {
            mark: 0,
            suspect: expired,
            windows: [None; 2],
            polled_out: false,
            due_read: false,
            draining: false,
        });
        self.new_life();
    }

    fn new_life(&mut self) {
        let instance = &mut **self;
        for read in [&mut instance.fast, &mut instance.slow].into_iter().flatten() {
            read.same_life = false;
        }
    }

    /// `HouseEvent::Lost`.
    pub(super) fn lose_house(&mut self) {
        self.house = None;
        self.new_life();
        self.drop_waiting();
    }

    /// `Engine::drop_waiting`.
    pub(super) fn drop_waiting(&mut self) {
        let dropped = |row: &Row| row.step.waits() || row.step == Step::Loaded;
        let drop: Vec<usize> = (0..MESSAGES).filter(|place| self.rows[*place].as_ref().is_some_and(dropped)).collect();
        for place in drop {
            match self.rows[place] {
                Some(row) if row.claimed => self.unclaim(place),
                _ => self.forget(place),
            }
        }
        // `Engine::forget_keys`.
        for queue in &mut self.keys {
            let Queue { active, flying, more, .. } = *queue;
            *queue = if flying == 0 { Queue::default() } else { Queue { chain: 0, active, flying, broken: true, more } };
        }
        self.key_reads = Default::default();
        for passed in &mut self.passed {
            passed.upto = 0;
        }
        if self.lag != Lag::None {
            self.lag = Lag::Unknown;
        }
    }

    // dispatch.rs

    /// `Destination::may_send`.
    fn may_send(&self, destination: u8) -> bool {
        let flies = |row: &&Row| row.thin.destination == destination && matches!(row.step, Step::Sending(_));
        let in_flight = self.rows.iter().flatten().filter(flies).count();
        let limit = match self.breaker {
            Breaker::Open { waiting } if destination == 0 => usize::from(!waiting),
            _ => usize::from(self.scenario.concurrency),
        };
        in_flight < limit
    }

    /// `Engine::claim_suspects`: whether it claims this row now.
    pub(super) fn may_claim(&self, row: &Row) -> bool {
        let busy = |row: &Row| row.claimed || matches!(row.step, Step::Claiming(_));
        row.step == Step::MustClaim
            && self.covered
            && self.may_send(row.thin.destination)
            && !self.rows.iter().flatten().any(busy)
    }

    /// `Engine::on_claimed`.
    pub(super) fn on_claimed(&mut self, place: usize, claimed: bool) {
        if !claimed {
            if let Some(key) = self.key_of(place) {
                self.key_set_back(key, place);
            }
            self.forget(place);
            return;
        }
        if let Some(row) = &mut self.rows[place] {
            row.thin.claims += 1;
            row.claimed = true;
            row.step = Step::Loaded;
        }
        if !self.keeps() {
            self.unclaim(place);
        }
    }

    /// `Engine::send`: whether it hands this row to its transport now.
    pub(super) fn may_send_row(&self, place: usize, row: &Row) -> bool {
        let loaded = row.step == Step::Loaded || (row.step == Step::Ready && !self.scenario.loads);
        let earlier = |place: usize| self.rows[place].is_some_and(|row| matches!(row.step, Step::Ready | Step::Loaded));
        // Those of a key are loaded and handed over in the order in which they were let go.
        let turn = !self.is_pipelined() || !(0..place).any(|n| self.scenario.keys[n] == self.scenario.keys[place] && earlier(n));
        loaded && turn && (self.covered || self.lacks(Protection::LeaseCoversSend)) && self.may_send(row.thin.destination)
    }

    /// `Engine::send`.
    pub(super) fn send(&mut self, place: usize) {
        let i = self.i;
        self.state.sends(i, place);
        let follows = self.key_sent(place);
        if let Some(row) = &mut self.rows[place] {
            row.follows = follows;
            row.step = Step::Sending(Try::Under);
        }
        if let Some(key) = self.key_of(place).filter(|_| !follows) {
            self.shut[key] = false;
        }
        if self.lacks(Protection::ConfirmedOnly) {
            self.conclude_delivered(place);
        }
    }

    /// `Engine::put_back`.
    fn put_back(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        if row.claimed {
            self.unclaim(place);
        } else if self.keeps() {
            self.enter(place, Step::Ready);
        } else {
            self.forget(place);
        }
    }

    /// `Engine::unclaim`.
    fn unclaim(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        let claims = row.thin.claims.saturating_sub(1);
        self.set_back(place, Setback { attempts: row.thin.attempts, claims, failed: false, leave_key: false });
    }

    /// `Engine::give_up_claims`.
    fn give_up_claims(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        let leave_key = row.thin.keyed && self.scenario.skip;
        self.set_back(place, Setback { attempts: row.thin.attempts, claims: row.thin.claims, failed: true, leave_key });
    }

    // outcome.rs

    /// `Engine::conclude` with `Outcome::Delivered`.
    pub(super) fn conclude_delivered(&mut self, place: usize) {
        self.breaker = Breaker::Closed;
        self.enter(place, Step::Delivered(Call::Asked));
        if let Some(key) = self.key_of(place) {
            self.key_delivered(key, place);
        }
    }

    /// `Engine::conclude` with `Outcome::HeldBack`.
    pub(super) fn conclude_held_back(&mut self, place: usize) {
        self.key_broken(place);
        self.key_returned(place);
    }

    /// `Engine::conclude` with `Outcome::Retry`.
    pub(super) fn conclude_retry(&mut self, place: usize) {
        if self.key_broken(place) {
            self.key_returned(place);
        } else {
            self.breaker = Breaker::Closed;
            self.failed_attempt(place);
        }
    }

    /// A pipelining transport lets nothing pass what has failed (`Transport::pipelines`).
    pub(super) fn shut(&mut self, place: usize) {
        if let Some(key) = self.key_of(place).filter(|_| self.is_pipelined() && !self.lacks(Protection::HoldsBack)) {
            self.shut[key] = true;
        }
    }

    /// What a pipelining transport does next with a message: whether earlier ones of its key have been answered, and whether it is
    /// held back.
    pub(super) fn in_line(&self, place: usize, row: &Row) -> (bool, bool) {
        let Some(key) = self.scenario.keys[place].filter(|_| self.is_pipelined()) else { return (true, false) };
        let under = |n: &usize| self.rows[*n].is_some_and(|row| row.step == Step::Sending(Try::Under));
        let first = !(0..place).filter(under).any(|n| self.scenario.keys[n] == Some(key));
        (first, row.follows && self.shut[usize::from(key)])
    }

    /// `Engine::conclude` with `Outcome::NoAnswer`.
    pub(super) fn conclude_no_answer(&mut self, place: usize) {
        if self.breaker == Breaker::Closed {
            self.conclude_retry(place);
        } else {
            self.conclude_unavailable(place);
        }
    }

    /// `Engine::failed_attempt`.
    fn failed_attempt(&mut self, place: usize) {
        let Some(row) = self.rows[place] else { return };
        self.state.messages[place].failures += 1;
        let attempts = row.thin.attempts + 1;
        let failed = attempts >= self.scenario.max_attempts;
        let setback = Setback {
            attempts,
            claims: row.thin.claims - u8::from(row.claimed),
            failed,
            leave_key: failed && row.thin.keyed && self.scenario.skip,
        };
        self.set_back(place, setback);
    }

    /// `Engine::conclude` with `Outcome::Unavailable`, where the one destination is the first.
    pub(super) fn conclude_unavailable(&mut self, place: usize) {
        self.breaker = Breaker::Open { waiting: true };
        if self.is_pipelined() && self.key_of(place).is_some() {
            self.key_broken(place);
            self.key_returned(place);
        } else {
            self.put_back(place);
        }
        self.shed();
    }

    /// `Engine::shed`.
    fn shed(&mut self) {
        let mut kept = None;
        let cursors = std::mem::take(&mut self.lag);
        let mut cursor = if let Lag::From(cursor) = cursors { Some(cursor) } else { None };
        for place in 0..MESSAGES {
            let Some(row) = self.rows[place].filter(|r| matches!(r.step, Step::Ready | Step::Loaded)) else { continue };
            if row.claimed {
                self.unclaim(place);
            } else if kept.is_none() && !(self.is_pipelined() && self.key_of(place).is_some()) {
                kept = Some(place);
            } else {
                cursor = Some(cursor.map_or(place as u8, |known| known.min(place as u8)));
                if let Some(key) = self.key_of(place) {
                    self.key_set_back(key, place);
                }
                self.forget(place);
            }
        }
        let mark = self.house.map(|h| h.mark);
        if self.lacks(Protection::LagCursor) {
            cursor = mark;
        }
        self.lag = cursor.or(mark).map_or(Lag::Unknown, Lag::From);
        if let Some(place) = kept {
            self.enter(place, Step::Ready);
        }
    }

    /// `Engine::set_back`.
    fn set_back(&mut self, place: usize, setback: Setback) {
        self.enter(place, Step::SetBack(setback, Call::Asked));
        if let Some(key) = self.key_of(place) {
            self.key_set_back(key, place);
        }
    }

    /// `Engine::on_delivered`.
    pub(super) fn on_delivered(&mut self, place: usize, gone: bool) {
        if let Some(key) =
            self.scenario.keys[place].map(usize::from).filter(|_| !gone && self.rows[place].is_some_and(|r| r.queued))
        {
            self.leave_out(key);
        }
        self.finished(place, true);
    }

    /// `Engine::on_set_back`.
    pub(super) fn on_set_back(&mut self, place: usize, leave_key: bool, changed: bool) {
        let keyed = self.rows[place].is_some_and(|row| row.thin.keyed);
        if let Some(key) = self.scenario.keys[place].map(usize::from).filter(|_| keyed && (leave_key || !changed)) {
            self.key_reads[key] = true;
        }
        self.finished(place, false);
    }

    /// `Engine::finished`.
    fn finished(&mut self, place: usize, delivered: bool) {
        let row = self.rows[place];
        let outdated = row.is_some_and(|row| row.outdated);
        if let Some(key) = self.scenario.keys[place].filter(|_| outdated && row.is_some_and(|row| row.thin.keyed)) {
            self.key_reads[usize::from(key)] = true;
        }
        let delivered = delivered && !outdated;
        self.forget(place);
        let recent = Recent { fast: self.fast.is_some(), slow: self.slow.is_some(), delivered };
        self.recent[place] = if recent.is_there() { recent } else { Recent::default() };
    }
}
