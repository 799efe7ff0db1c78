//! What was taken out of one partition, what of it may be committed, and what may have killed an earlier owner.

use std::collections::BTreeMap;

/// Begins the metadata of a commit.
const BEGUN: &str = "posthouse begun<";

/// What is committed for a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// Everything below is finished.
    pub(super) offset: i64,
    /// Nothing from here on was ever begun. Committed before it is, in the metadata.
    pub(super) begun: i64,
}

impl Mark {
    pub(super) fn metadata(self) -> String {
        format!("{BEGUN}{}", self.begun)
    }
}

/// What the group had committed for a partition when it was assigned.
#[derive(Debug, Clone, Copy)]
pub(super) enum Found<'a> {
    Nothing,
    Mark {
        offset: i64,
        metadata: &'a str,
    },
    /// Nobody could say.
    Unknown,
}

/// One partition while it is assigned.
#[derive(Debug)]
pub(super) struct Offsets {
    /// Messages that are taken and not finished, in the order in which they were taken; their offsets usually, but not after
    /// a topic was made anew.
    in_hand: BTreeMap<u64, i64>,
    taken: u64,
    /// Behind the last one that was taken.
    position: Option<i64>,
    /// What lies below may have been running when an earlier owner died. None: not known.
    suspect: Option<i64>,
    /// What the brokers have confirmed.
    confirmed: Option<Mark>,
    /// How far beyond the position a commit allows to begin.
    ahead: i64,
}

impl Offsets {
    pub(super) fn new(found: Found<'_>, ahead: i64) -> Self {
        let (suspect, confirmed) = match found {
            Found::Nothing => (Some(i64::MIN), None),
            Found::Unknown => (None, None),
            Found::Mark { offset, metadata } => match metadata.strip_prefix(BEGUN).and_then(|at| at.parse().ok()) {
                Some(begun) => (Some(begun), Some(Mark { offset, begun })),
                // Another client's.
                None => (Some(i64::MIN), None),
            },
        };
        Self { in_hand: BTreeMap::new(), taken: 0, position: None, suspect, confirmed, ahead }
    }

    /// Whether an earlier owner may have begun something that isn't finished.
    pub(super) fn has_suspects(&self) -> bool {
        self.suspect.is_none_or(|suspect| self.confirmed.is_some_and(|mark| mark.offset < suspect))
    }

    /// Where the partition ended when it was assigned: what came later, nobody has begun.
    pub(super) fn ended_at(&mut self, end: i64) {
        self.suspect = Some(self.suspect.map_or(end, |suspect| suspect.min(end)));
    }

    /// Whether a commit has said that the message at this offset may begin.
    pub(super) fn may_take(&self, offset: i64) -> bool {
        self.confirmed.is_some_and(|mark| offset < mark.begun)
    }

    /// Takes the message at this offset: its number, and whether it may have killed an earlier owner.
    pub(super) fn take(&mut self, offset: i64) -> (u64, bool) {
        let suspect = *self.suspect.get_or_insert(offset.saturating_add(self.ahead));
        self.taken += 1;
        self.in_hand.insert(self.taken, offset);
        self.position = Some(offset.saturating_add(1));
        (self.taken, offset < suspect)
    }

    pub(super) fn finish(&mut self, number: u64) {
        self.in_hand.remove(&number);
    }

    pub(super) fn confirm(&mut self, mark: Mark) {
        self.confirmed = Some(mark);
    }

    /// What to commit now, if anything. `next` is the offset of a message that was read and not taken yet.
    pub(super) fn due(&self, next: Option<i64>) -> Option<Mark> {
        let at = next.or(self.position)?;
        let offset = self.finished_below(at);
        let begun = self.begun_below().max(at.saturating_add(self.ahead)).max(self.suspect_below(offset));
        let mark = Mark { offset, begun };
        let changed = self.confirmed.is_none_or(|confirmed| confirmed.offset != mark.offset);
        (changed || self.is_urgent(next)).then_some(mark)
    }

    /// Whether what may begin is running out.
    pub(super) fn is_urgent(&self, next: Option<i64>) -> bool {
        let Some(at) = next.or(self.position) else { return false };
        self.confirmed.is_none_or(|confirmed| at.saturating_add(self.ahead / 2) >= confirmed.begun)
    }

    /// What to commit when the partition is left. With nothing running any more, nothing of it can kill this process.
    pub(super) fn last(&self, running: bool) -> Option<Mark> {
        let offset = self.finished_below(self.position.or(self.confirmed.map(|mark| mark.offset))?);
        let begun = if running { self.begun_below() } else { i64::MIN };
        let mark = Mark { offset, begun: begun.max(offset).max(self.suspect_below(offset)) };
        (self.confirmed != Some(mark)).then_some(mark)
    }

    fn finished_below(&self, at: i64) -> i64 {
        self.in_hand.values().next().copied().unwrap_or(at)
    }

    /// What an earlier owner may have begun stays suspect until it is finished.
    fn suspect_below(&self, finished: i64) -> i64 {
        self.suspect.filter(|suspect| finished < *suspect).unwrap_or(i64::MIN)
    }

    fn begun_below(&self) -> i64 {
        self.in_hand.values().max().map_or(i64::MIN, |offset| offset.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(offset: i64, begun: i64) -> Mark {
        Mark { offset, begun }
    }

    #[test]
    fn only_what_is_finished_without_a_gap_is_committed() {
        let mut offsets = Offsets::new(Found::Nothing, 100);
        assert_eq!(offsets.due(None), None, "nothing is known");
        assert_eq!(offsets.due(Some(40)), Some(mark(40, 140)));
        offsets.confirm(mark(40, 140));
        // Offsets have gaps: compaction, transactions.
        let numbers = [40, 41, 45, 46].map(|offset| offsets.take(offset).0);
        offsets.finish(numbers[2]);
        offsets.finish(numbers[1]);
        assert_eq!(offsets.due(None), None, "the first is not finished");
        offsets.finish(numbers[0]);
        assert_eq!(offsets.due(None), Some(mark(46, 147)));
        offsets.finish(numbers[3]);
        assert_eq!(offsets.due(None), Some(mark(47, 147)));
        offsets.confirm(mark(47, 147));
        assert_eq!(offsets.due(None), None);
    }

    #[test]
    fn nothing_begins_before_a_commit_says_so() {
        let mut offsets = Offsets::new(Found::Nothing, 100);
        assert!(!offsets.may_take(0) && offsets.is_urgent(Some(0)));
        offsets.confirm(mark(0, 100));
        assert!(offsets.may_take(99) && !offsets.may_take(100));
        let first = offsets.take(0).0;
        assert!(!offsets.is_urgent(Some(49)) && offsets.is_urgent(Some(50)));
        assert_eq!(offsets.due(Some(50)), Some(mark(0, 150)));
        offsets.finish(first);
        assert_eq!(offsets.due(Some(1)), Some(mark(1, 101)));
    }

    #[test]
    fn what_an_earlier_owner_may_have_begun_is_suspect() {
        let suspects = |found, offsets: [i64; 3]| {
            let mut all = Offsets::new(found, 100);
            offsets.map(|offset| all.take(offset).1)
        };
        let metadata = mark(7, 20).metadata();
        assert_eq!(suspects(Found::Mark { offset: 7, metadata: &metadata }, [7, 19, 20]), [true, true, false]);
        assert_eq!(suspects(Found::Nothing, [0, 1, 2]), [false; 3]);
        assert_eq!(suspects(Found::Mark { offset: 7, metadata: "another client's" }, [7, 8, 9]), [false; 3]);
        assert_eq!(suspects(Found::Unknown, [7, 106, 107]), [true, true, false]);
    }

    #[test]
    fn what_came_after_an_owner_died_is_not_suspect() {
        let metadata = mark(7, 20).metadata();
        for (found, end, suspects) in [
            (Found::Mark { offset: 7, metadata: &metadata }, 10, 10),
            (Found::Mark { offset: 7, metadata: &metadata }, 30, 20),
            (Found::Unknown, 10, 10),
        ] {
            let mut offsets = Offsets::new(found, 100);
            assert!(offsets.has_suspects());
            offsets.ended_at(end);
            assert_eq!((offsets.take(suspects - 1).1, offsets.take(suspects).1), (true, false), "{found:?} {end}");
        }
        let metadata = mark(7, 7).metadata();
        assert!(!Offsets::new(Found::Mark { offset: 7, metadata: &metadata }, 100).has_suspects());
        assert!(!Offsets::new(Found::Nothing, 100).has_suspects());
    }

    #[test]
    fn a_partition_left_in_peace_leaves_nothing_suspect() {
        let mut offsets = Offsets::new(Found::Nothing, 100);
        assert_eq!(offsets.last(false), None);
        offsets.confirm(mark(0, 100));
        assert_eq!(offsets.last(false), Some(mark(0, 0)), "nothing was taken");
        let numbers = [0, 1, 2].map(|offset| offsets.take(offset).0);
        offsets.finish(numbers[0]);
        assert_eq!(offsets.last(true), Some(mark(1, 3)));
        assert_eq!(offsets.last(false), Some(mark(1, 1)));
        offsets.finish(numbers[1]);
        offsets.finish(numbers[2]);
        assert_eq!(offsets.last(true), Some(mark(3, 3)));
        offsets.confirm(mark(3, 3));
        assert_eq!(offsets.last(false), None);
    }

    #[test]
    fn a_topic_made_anew_begins_below_what_was_committed() {
        let metadata = mark(5_000, 5_100).metadata();
        let mut offsets = Offsets::new(Found::Mark { offset: 5_000, metadata: &metadata }, 100);
        let old = offsets.take(5_000).0;
        let new = offsets.take(0).0;
        offsets.finish(old);
        assert_eq!(offsets.due(None), Some(mark(0, 5_100)));
        offsets.finish(new);
        assert_eq!(offsets.due(None), Some(mark(1, 5_100)));
    }

    #[test]
    fn what_is_suspect_stays_so_until_it_is_finished() {
        let metadata = mark(7, 5_000).metadata();
        let of = || Offsets::new(Found::Mark { offset: 7, metadata: &metadata }, 100);
        let mut offsets = of();
        assert_eq!(offsets.last(false), None, "nothing was taken, and nothing changes");
        let first = offsets.take(7).0;
        assert_eq!(offsets.last(false), None);
        offsets.finish(first);
        assert_eq!((offsets.last(false), offsets.due(None)), (Some(mark(8, 5_000)), Some(mark(8, 5_000))));
        let last = offsets.take(4_999).0;
        offsets.finish(last);
        assert_eq!(offsets.last(false), Some(mark(5_000, 5_000)));
    }
}
