//! The statements, each at the one moment at which it takes effect. Named after those in `store/postgres/relay.rs`, which
//! the other databases have likewise.

use super::state::{Due, INSTANCES, MESSAGES, Owner, Pending, Setback, State, Status, Thin, Tx, places};
use super::{Protection, Scenario};

impl State {
    /// Whether the statements of others see the pending row. With [`Protection::CommittedOnly`] taken out, they see it before its
    /// transaction has committed.
    fn row(&self, scenario: &Scenario, place: usize) -> Option<Pending> {
        let visible = self.messages[place].tx == Tx::Committed || scenario.lacks(Protection::CommittedOnly);
        self.pending[place].filter(|_| visible)
    }

    /// `INSERT INTO posthouse_message`, and its trigger.
    pub(super) fn insert(&mut self, place: usize, scenario: &Scenario) {
        self.messages[place].tx = Tx::Open;
        if scenario.lacks(Protection::PendingWithMessage) {
            self.messages[place].owed = true;
        } else {
            self.enqueue(place, scenario);
        }
    }

    /// The trigger `posthouse_enqueue`.
    pub(super) fn enqueue(&mut self, place: usize, scenario: &Scenario) {
        let keyed = scenario.keys[place].is_some();
        let (status, due) = (Status::Pending, Due::Fresh);
        self.pending[place] = Some(Pending { status, due, attempts: 0, claims: 0, destination: 0, keyed });
    }

    /// A row's version has changed: whatever was read of it is out of date.
    fn bump(&mut self, place: usize) {
        for instance in &mut self.instances {
            if let Some(row) = &mut instance.rows[place] {
                row.thin.current = false;
            }
            for read in [&mut instance.fast, &mut instance.slow].into_iter().flatten() {
                if let Some(thin) = &mut read.rows[place] {
                    thin.current = false;
                }
            }
        }
    }

    /// `BEFORE`, or the subquery of the same name in the other reads: the nearest lower pending row of the key, whatever its
    /// status, above `passed`.
    pub(super) fn before(&self, scenario: &Scenario, place: usize, passed: u8) -> u8 {
        if scenario.lacks(Protection::Predecessor) {
            return 0;
        }
        let of_key = |other: &usize| {
            let row = self.row(scenario, *other).filter(|r| r.keyed && scenario.keys[*other] == scenario.keys[place]);
            row.is_some_and(|r| r.status != Status::Failed || !scenario.lacks(Protection::FailedBlocks))
        };
        (usize::from(passed)..place).rev().find(of_key).map_or(0, |other| other as u8 + 1)
    }

    fn thin(row: Pending, before: u8) -> Thin {
        let Pending { attempts, claims, destination, keyed, .. } = row;
        Thin { current: true, attempts, claims, destination, keyed, before }
    }

    /// `POLL`: rows above the mark, linked within the read (`Ahead::link`); those that must be asked for; the highest id.
    pub(super) fn poll(&self, scenario: &Scenario, mark: u8, excluded: Option<u8>) -> ([Option<Thin>; MESSAGES], u8, u8) {
        let (mut rows, mut probe, mut highest) = ([None; MESSAGES], 0, mark);
        let mut last = [0u8; MESSAGES];
        for (place, linked) in rows.iter_mut().enumerate().skip(mark.into()) {
            let Some(row) = self.row(scenario, place) else { continue };
            highest = place as u8 + 1;
            if excluded == Some(row.destination) || !(row.keyed || row.is_eligible()) {
                continue;
            }
            let mut before = 0;
            if let (true, Some(key)) = (row.keyed, scenario.keys[place]) {
                let above = std::mem::replace(&mut last[usize::from(key)], place as u8 + 1);
                if above > 0 && excluded.is_none() {
                    before = if scenario.lacks(Protection::Predecessor) { 0 } else { above };
                } else if row.is_eligible() {
                    probe |= 1 << place;
                }
            }
            if row.is_eligible() {
                *linked = Some(Self::thin(row, before));
            }
        }
        (rows, probe, highest)
    }

    /// `DUE`.
    pub(super) fn due(&self, scenario: &Scenario) -> [Option<Thin>; MESSAGES] {
        self.every(scenario, |_, row| row.due == Due::Now && row.status != Status::Failed)
    }

    /// `OF_DESTINATION`.
    pub(super) fn of_destination(&self, scenario: &Scenario, after: u8, destination: u8) -> [Option<Thin>; MESSAGES] {
        self.every(scenario, |place, row| place as u8 >= after && row.destination == destination && row.is_eligible())
    }

    fn every(&self, scenario: &Scenario, wanted: impl Fn(usize, &Pending) -> bool) -> [Option<Thin>; MESSAGES] {
        std::array::from_fn(|place| {
            let row = self.row(scenario, place).filter(|row| wanted(place, row))?;
            let before = if row.keyed { self.before(scenario, place, 0) } else { 0 };
            Some(Self::thin(row, before))
        })
    }

    /// `OF_KEYS` for one key, from behind what has passed (`Ahead::of_keys`).
    pub(super) fn of_key(&self, scenario: &Scenario, key: u8, passed: u8, rows: &mut [Option<Thin>; MESSAGES]) {
        let mut before = 0;
        for (place, found) in rows.iter_mut().enumerate().skip(usize::from(passed)) {
            let keyed = |row: &Pending| row.keyed && scenario.keys[place] == Some(key);
            let Some(row) = self.row(scenario, place).filter(keyed) else { continue };
            if row.is_eligible() {
                *found = Some(Self::thin(row, if scenario.lacks(Protection::Predecessor) { 0 } else { before }));
            }
            before = place as u8 + 1;
        }
    }

    /// `SWEEP`: below the mark, rows without a key and the first of each key.
    pub(super) fn sweep(&self, scenario: &Scenario, mark: u8, excluded: Option<u8>) -> [Option<Thin>; MESSAGES] {
        self.every(scenario, |place, row| {
            (place as u8) < mark
                && row.is_eligible()
                && excluded != Some(row.destination)
                && (!row.keyed || self.before(scenario, place, 0) == 0)
        })
    }

    /// `DELIVERED`: whether there was a row of that version.
    pub(super) fn delete(&mut self, scenario: &Scenario, place: usize, current: bool) -> bool {
        let found = self.pending[place].is_some() && (current || scenario.lacks(Protection::VersionOfDelete));
        if found {
            self.pending[place] = None;
            self.bump(place);
        }
        found
    }

    /// `SETBACK`: whether there was a row of that version.
    pub(super) fn set_back(&mut self, scenario: &Scenario, place: usize, current: bool, setback: Setback) -> bool {
        let fenced = !scenario.lacks(Protection::VersionOfSetback);
        let Some(row) = self.pending[place].as_mut().filter(|_| current || !fenced) else { return false };
        (row.status, row.due) = if setback.failed { (Status::Failed, Due::Never) } else { (Status::Pending, Due::Later) };
        (row.attempts, row.claims) = (setback.attempts, setback.claims);
        row.keyed &= !setback.leave_key;
        let message = &mut self.messages[place];
        if setback.leave_key {
            message.may_pass = u8::MAX;
        }
        let used_up = message.failures >= scenario.max_attempts || setback.claims >= scenario.max_claims;
        self.seen.failed_early |= setback.failed && !used_up;
        self.bump(place);
        true
    }

    /// `CLAIM`: whether there was a row of that version. The one who claims knows the new version.
    pub(super) fn claim(&mut self, i: usize, place: usize, current: bool) -> bool {
        let Some(row) = self.pending[place].as_mut().filter(|_| current) else { return false };
        (row.status, row.due) = (Status::Sending, Due::Later);
        row.claims += 1;
        self.bump(place);
        if let Some(row) = &mut self.instances[i].rows[place] {
            row.thin.current = true;
        }
        true
    }

    /// Whether `TAKE` finds the house free; and whether its last owner's lease had run out.
    pub(super) fn take(&self, scenario: &Scenario, i: usize) -> Option<bool> {
        let free = match self.owner {
            Owner::Free => Some(false),
            Owner::Gone { leased } => (!leased).then_some(true),
            Owner::Of(other) if usize::from(other) != i => {
                let expired = !self.instances[usize::from(other)].leased;
                (expired || scenario.lacks(Protection::TakesOnlyExpired)).then_some(true)
            }
            Owner::Of(_) => None,
        };
        free.filter(|_| self.instances[i].leased)
    }

    /// `UPDATE posthouse_house SET owner = NULL WHERE owner = …`.
    pub(super) fn release(&mut self, i: usize) {
        if self.owner == Owner::Of(i as u8) {
            self.owner = Owner::Free;
        }
    }

    /// A process's name is of no use any more.
    pub(super) fn abandon(&mut self, i: usize) {
        if self.owner == Owner::Of(i as u8) {
            self.owner = Owner::Gone { leased: self.instances[i].leased };
        }
        self.instances[i].leased = false;
    }

    /// `admin::act`: an operator's action on a row, in one transaction with its audit line and the change counter.
    pub(super) fn act(&mut self, place: usize, change: impl FnOnce(&mut Pending)) {
        let Some(row) = &mut self.pending[place] else { return };
        change(row);
        self.changes += 1;
        self.touched[place] = self.changes;
        self.bump(place);
    }

    /// What operators touched since.
    pub(super) fn touched_since(&self, changes: u8) -> u8 {
        (0..MESSAGES).filter(|place| self.touched[*place] > changes).fold(0, |set, place| set | 1 << place)
    }

    /// Something got to a destination.
    pub(super) fn arrive(&mut self, scenario: &Scenario, place: usize, destination: u8) {
        let message = &mut self.messages[place];
        let first = message.arrived == [false; 2];
        self.seen.uncommitted |= message.tx != Tx::Committed;
        self.seen.duplicate |= std::mem::replace(&mut message.arrived[usize::from(destination)], true);
        let Some(key) = scenario.keys[place] else { return };
        let of_key = |other: &usize| scenario.keys[*other] == Some(key) && self.messages[*other].tx == Tx::Committed;
        if first {
            let earlier =
                |other: usize| self.messages[other].may_pass & 1 << place == 0 && self.messages[other].arrived == [false; 2];
            self.seen.overtaken |= (0..place).filter(of_key).any(earlier);
        } else {
            self.seen.late |=
                (place + 1..scenario.messages()).filter(of_key).any(|other| self.messages[other].arrived != [false; 2]);
        }
    }

    /// An instance begins to send. Another one that has a try under way is doing so too.
    pub(super) fn sends(&mut self, i: usize, place: usize) {
        let under_way = |other: usize| {
            use super::state::{Step, Try};
            let row = self.instances[other].rows[place];
            row.is_some_and(|r| matches!(r.step, Step::Sending(Try::Under | Try::Arrived)))
        };
        self.seen.two_senders |= (0..INSTANCES).any(|other| other != i && under_way(other));
    }

    /// A read's rows, asked for what stands before them: the second statement of the forward read.
    pub(super) fn probe(&mut self, scenario: &Scenario, i: usize) {
        let Some(mut read) = self.instances[i].fast else { return };
        // What has passed counts only for a statement that saw no more operator actions than were dealt with.
        let counts = self.instances[i].changes == Some(read.changes) || scenario.lacks(Protection::PassedHeedsOperators);
        for place in places(read.probe) {
            let passed = scenario.keys[place].map_or(0, |key| self.instances[i].passed[usize::from(key)].upto);
            let before = self.before(scenario, place, if counts && passed <= place as u8 { passed } else { 0 });
            if let Some(thin) = &mut read.rows[place] {
                thin.before = before;
            }
        }
        read.probe = 0;
        self.instances[i].fast = Some(read);
    }
}
