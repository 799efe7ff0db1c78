//! [`RetentionStore`]: what taking old rows out of a database asks of it, and the rows that tell about it.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Reply;

/// A range partition of the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Partition {
    /// Its number: ids divided by the size of a partition.
    pub number: i64,
    /// The first id that belongs into it.
    pub low: i64,
    /// The first id that belongs into the next one.
    pub high: i64,
    /// Rows in it, as the database estimates them; None where it has no idea.
    pub rows: Option<i64>,
    /// What it takes on the disk, in bytes.
    pub bytes: Option<i64>,
    /// When its newest message was published, milliseconds since 1970 UTC; None when it is empty.
    pub newest_ms: Option<i64>,
    /// How old its newest message is by the database's clock, in milliseconds; None when it is empty.
    pub newest_age_ms: Option<i64>,
    /// Whether ids are given out in it, or will be.
    pub current: bool,
}

impl Partition {
    /// Whether all in it is older than this, and nothing more will come.
    pub fn is_over(&self, term: Duration) -> bool {
        !self.current && self.newest_age_ms.is_none_or(|age| u128::try_from(age).is_ok_and(|age| age > term.as_millis()))
    }
}

/// How far a partition is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[non_exhaustive]
pub enum Step {
    /// It is to go. Messages that aren't delivered are copied before it is detached.
    Found,
    /// It is no part of the log any more.
    Detached,
    /// All messages of it that aren't delivered are in the table of those that were kept.
    Kept,
    /// The others are in an archive, if there is one.
    Archived,
    /// The archive was read back.
    Verified,
    /// It is gone.
    Dropped,
}

impl Step {
    /// As it is written in SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Found => "FOUND",
            Self::Detached => "DETACHED",
            Self::Kept => "KEPT",
            Self::Archived => "ARCHIVED",
            Self::Verified => "VERIFIED",
            Self::Dropped => "DROPPED",
        }
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    /// What this version doesn't know is done once more, from after the detaching on: each step can be.
    pub(crate) fn parse(text: &str) -> Self {
        match text {
            "FOUND" => Self::Found,
            "KEPT" => Self::Kept,
            "ARCHIVED" => Self::Archived,
            "VERIFIED" => Self::Verified,
            "DROPPED" => Self::Dropped,
            _ => Self::Detached,
        }
    }
}

/// A partition on its way out, or one that went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Retired {
    /// Its number.
    pub number: i64,
    /// The first id that belonged into it.
    pub low: i64,
    /// The first id that belonged into the next one.
    pub high: i64,
    /// How far it is.
    pub step: Step,
    /// Messages of it that weren't delivered, and were kept.
    pub survivors: i64,
    /// Messages that went with it; 0 as long as they aren't counted.
    pub amount: i64,
    /// When it was found, milliseconds since 1970 UTC.
    pub found_ms: i64,
    /// When its last step was done, milliseconds since 1970 UTC.
    pub step_ms: i64,
}

/// Where messages lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shelf {
    /// The log.
    Message,
    /// The table of those that outlived their partition.
    Kept,
    /// A partition that was detached, without those of its rows that were kept.
    Partition(i64),
}

impl Serialize for Shelf {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl Shelf {
    /// As it is written in SQL, and the name of a directory in an archive. A partition was in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Message | Self::Partition(_) => "message",
            Self::Kept => "kept",
        }
    }

    /// What this version doesn't know was in the log.
    pub(crate) fn parse(text: &str, part: Option<i64>) -> Self {
        match (text, part) {
            (_, Some(number)) => Self::Partition(number),
            ("kept", None) => Self::Kept,
            _ => Self::Message,
        }
    }

    pub(crate) fn part(self) -> Option<i64> {
        match self {
            Self::Partition(number) => Some(number),
            _ => None,
        }
    }
}

/// A message as it lies in the log: what an archive holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogRow {
    /// Row id.
    pub id: i64,
    /// Message id.
    pub message_id: String,
    /// Type.
    pub kind: String,
    /// Destination that it was published to.
    pub destination: String,
    /// Ordering key.
    pub key: Option<String>,
    /// Payload.
    pub payload: Vec<u8>,
    /// Media type.
    pub content_type: String,
    /// Headers, as stored (JSON).
    pub headers: Option<String>,
    /// When it was published, microseconds since 1970 UTC.
    pub created_us: i64,
    /// Before when it was not to be sent, microseconds since 1970 UTC.
    pub deliver_us: Option<i64>,
    /// Its own limit of attempts.
    pub max_attempts: Option<i32>,
}

/// A row that may go: its id, and the bytes of its payload and headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowSize {
    /// Row id.
    pub id: i64,
    /// Bytes.
    pub size: i64,
}

/// A page of rows, seen in one snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OldPage {
    /// Rows over their term that have no pending row.
    pub rows: Vec<RowSize>,
    /// The last row that was looked at. None: there are no more.
    pub last: Option<i64>,
}

/// Looks for the first id whose message is young, in ids that are given out by and by: so a binary search finds it, save for
/// what was published at about the same time. The caller asks for the first row at or behind `next`, and whether it is old.
#[derive(Debug)]
pub(crate) struct Bisection {
    low: i64,
    high: i64,
    /// The first young id so far.
    young: Option<i64>,
}

impl Bisection {
    pub(crate) fn new(lowest: i64, highest: i64) -> Self {
        Self { low: lowest, high: highest + 1, young: None }
    }

    /// Where to look next; None when it is found.
    pub(crate) fn next(&self) -> Option<i64> {
        (self.low < self.high).then(|| self.low + (self.high - self.low) / 2)
    }

    pub(crate) fn seen(&mut self, at: i64, found: Option<(i64, bool)>) {
        match found {
            Some((id, true)) if id < self.high => self.low = id + 1,
            Some((id, false)) if id < self.high => (self.high, self.young) = (at, Some(id)),
            _ => self.high = at,
        }
    }

    /// The answer. `size` is that of a partition, where there are such.
    pub(crate) fn boundary(&self, highest: i64, size: Option<i64>) -> Boundary {
        let young = self.young.unwrap_or(highest + 1);
        Boundary {
            young,
            highest,
            from: size.map_or(i64::MIN, |size| young.min(highest) / size * size),
            one_by_one: size.is_none_or(|size| highest - young < size),
        }
    }
}

/// How the log lies to a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Boundary {
    /// The first id whose message is younger than the term; the one after the highest if none is.
    pub young: i64,
    /// The highest id there is.
    pub highest: i64,
    /// The first id from which rows go one by one: where partitions age out as a whole, that of the partition that `young` is in.
    pub from: i64,
    /// Whether rows go one by one there: since all that is younger than the term has room in one partition, waiting for it to
    /// age out would take long.
    pub one_by_one: bool,
}

/// A file of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ArchiveRow {
    /// Row id; 0 before it is written.
    pub id: i64,
    /// Its address.
    pub location: String,
    /// Where its messages were.
    pub shelf: Shelf,
    /// The id of its first message.
    pub low: i64,
    /// The id of its last message.
    pub high: i64,
    /// How many messages there are in it.
    pub amount: i64,
    /// Its size.
    pub bytes: i64,
    /// Its checksum, in hexadecimal digits.
    pub sha256: String,
    /// When it was written and read back, milliseconds since 1970 UTC.
    pub written_ms: Option<i64>,
    /// When its messages had been removed from the database, milliseconds since 1970 UTC.
    pub removed_ms: Option<i64>,
}

/// Which files of archives are listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArchiveFilter {
    /// Only of this partition.
    pub part: Option<i64>,
    /// Only those whose messages are still in the database.
    pub open: bool,
    /// Only ids below this one (the last of the page before).
    pub before: Option<i64>,
    /// At most this many. 1 to 10 000.
    pub limit: u32,
}

/// What is written down beside messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Beside {
    /// Receipts of delivered batches.
    Receipts,
    /// Failed attempts. Those of messages that aren't delivered stay.
    Attempts,
    /// Dedup keys.
    Dedup,
    /// What operators did.
    Audit,
}

impl Beside {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Receipts, Self::Attempts, Self::Dedup, Self::Audit];

    /// As people call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Receipts => "receipts",
            Self::Attempts => "attempts",
            Self::Dedup => "dedup",
            Self::Audit => "audit",
        }
    }
}

/// A page of [`Beside`]: what of it is over its term.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Expired {
    /// The keys of the rows that may go, as text.
    pub keys: Vec<String>,
    /// The last key that was looked at, to go on behind. None: there is nothing more that could be over its term.
    pub last: Option<String>,
}

/// What taking old rows out of a database asks of it. Every call has a deadline inside.
///
/// Everything here may be cut off at any moment and be called again.
pub trait RetentionStore: Send + Sync + fmt::Debug {
    /// The partitions of the log up to the current one, and how many there are ahead of it. None where the log isn't partitioned.
    fn partitions(&self) -> Reply<'_, Option<Vec<Partition>>>;
    /// Partitions on their way out, and those that went, the newest first; all that aren't gone are among them.
    fn retired(&self, limit: u32) -> Reply<'_, Vec<Retired>>;
    /// Writes down that a partition is to go.
    fn retire<'a>(&'a self, partition: &'a Partition) -> Reply<'a, ()>;
    /// Writes down that a partition has got as far as this.
    fn advance<'a>(&'a self, retired: &'a Retired) -> Reply<'a, ()>;
    /// How many messages that aren't delivered have ids from `low` to below `high`.
    fn survivors(&self, low: i64, high: i64) -> Reply<'_, i64>;
    /// Copies messages that aren't delivered from a partition to the kept table; answers how many of them are there.
    fn keep(&self, number: i64) -> Reply<'_, i64>;
    /// Why a partition can't be detached now, for example because somebody has published into it and not committed yet.
    fn held(&self, number: i64) -> Reply<'_, Option<String>>;
    /// Tries once to take a partition out of the log, or to finish that. Nobody who publishes waits for longer than the lock
    /// timeout. False: somebody holds the table, or its rows have to be looked at again.
    fn detach(&self, number: i64, attempt: u32) -> Reply<'_, bool>;
    /// How many messages of a detached partition aren't kept.
    fn count(&self, number: i64) -> Reply<'_, i64>;
    /// Removes a detached partition, unless a message in it isn't delivered and not kept; answers how many such there are.
    fn discard(&self, number: i64) -> Reply<'_, i64>;
    /// Rows of a shelf with ids above `after`, and up to `upto`, by id.
    fn sizes(&self, shelf: Shelf, after: i64, upto: i64, limit: u32) -> Reply<'_, Vec<RowSize>>;
    /// Messages with these ids (ascending), by id.
    fn rows<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, Vec<LogRow>>;
    /// How the log lies to a term; None when it is empty.
    fn boundary(&self, term: Duration) -> Reply<'_, Option<Boundary>>;
    /// Looks at rows with ids above `after` and below `below`: which are older than the term and have no pending row.
    fn old(&self, shelf: Shelf, after: i64, below: i64, term: Duration, limit: u32) -> Reply<'_, OldPage>;
    /// Removes rows, as far as they have no pending row; answers how many.
    fn remove<'a>(&'a self, shelf: Shelf, ids: &'a [i64]) -> Reply<'a, u64>;
    /// Files of archives, the newest first.
    fn archives<'a>(&'a self, filter: &'a ArchiveFilter) -> Reply<'a, Vec<ArchiveRow>>;
    /// Writes down a file of an archive, by its location: before it is written, when it was, when its messages are removed. A time
    /// that is given stands for now.
    fn note<'a>(&'a self, file: &'a ArchiveRow) -> Reply<'a, ()>;
    /// Forgets a file of an archive.
    fn forget(&self, id: i64) -> Reply<'_, ()>;
    /// A page of what is written down beside messages, behind the key `after`.
    fn expired<'a>(&'a self, what: Beside, term: Duration, after: &'a str, limit: u32) -> Reply<'a, Expired>;
    /// Removes rows of what is written down beside messages, as far as they are over their term; answers how many.
    fn clear<'a>(&'a self, what: Beside, term: Duration, keys: &'a [String]) -> Reply<'a, u64>;
}

/// What of a page of ids, each with whether it is over its term, may go; and where to go on. `stays` are those that may not.
pub(crate) fn expired_ids(page: &[(i64, bool)], stays: impl Fn(usize) -> bool, limit: u32) -> Expired {
    let old = page.iter().take_while(|(_, old)| *old).count();
    let keys = page[..old].iter().enumerate().filter(|(n, _)| !stays(*n)).map(|(_, (id, _))| id.to_string()).collect();
    // Ids are given out by and by: behind the first young one there is nothing old.
    let more = old == limit as usize;
    Expired { keys, last: page.last().filter(|_| more).map(|(id, _)| id.to_string()) }
}

/// Keys of rows that are numbers.
pub(crate) fn numbers(keys: &[String]) -> Vec<i64> {
    keys.iter().filter_map(|key| key.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_young_one_is_found_over_gaps() {
        // Ids and whether they are old.
        let look = |rows: &[(i64, bool)]| {
            let (lowest, highest) = (rows[0].0, rows[rows.len() - 1].0);
            let mut search = Bisection::new(lowest, highest);
            while let Some(at) = search.next() {
                search.seen(at, rows.iter().find(|r| r.0 >= at).copied());
            }
            search.boundary(highest, Some(10))
        };
        let young = |rows: &[(i64, bool)]| look(rows).young;
        assert_eq!(young(&[(5, true), (900, true), (901, false), (2000, false)]), 901);
        assert_eq!(young(&[(5, false), (7, false)]), 5);
        assert_eq!(young(&[(5, true), (7, true)]), 8);
        assert_eq!(young(&[(5, true), (7, false)]), 7);
        let b = look(&[(1, true), (12, true), (14, false), (23, false)]);
        assert_eq!((b.from, b.one_by_one), (10, true));
        assert!(!look(&[(1, true), (12, true), (13, false), (24, false)]).one_by_one);
        assert_eq!(look(&[(3, true), (4, true), (50, false)]).from, 50, "not that of a gap before it");
        assert_eq!(look(&[(3, true), (19, true)]).from, 10, "all is old, and the next id would be in another partition");
    }

    #[test]
    fn a_page_ends_at_the_first_young_row() {
        let all = |_: usize| false;
        let page = expired_ids(&[(1, true), (2, true), (3, false), (4, true)], all, 4);
        assert_eq!((page.keys, page.last), (vec!["1".to_owned(), "2".into()], None));
        let page = expired_ids(&[(1, true), (2, true)], |n| n == 0, 2);
        assert_eq!((page.keys, page.last), (vec!["2".to_owned()], Some("2".into())));
        assert_eq!(expired_ids(&[(1, true)], all, 2).last, None);
    }

    #[test]
    fn steps_are_written_and_read_and_unknown_ones_are_done_again() {
        for step in [Step::Found, Step::Detached, Step::Kept, Step::Archived, Step::Verified, Step::Dropped] {
            assert_eq!(Step::parse(step.as_str()), step);
        }
        assert_eq!(Step::parse("COPIED"), Step::Detached);
    }

    #[test]
    fn a_partition_is_over_when_its_newest_message_is() {
        let term = Duration::from_millis(100);
        let of = |newest_age_ms, current| Partition {
            number: 0,
            low: 0,
            high: 1,
            rows: None,
            bytes: None,
            newest_ms: newest_age_ms,
            newest_age_ms,
            current,
        };
        assert!(of(Some(101), false).is_over(term));
        assert!(!of(Some(100), false).is_over(term));
        assert!(!of(Some(-5), false).is_over(term), "from the future");
        assert!(!of(Some(101), true).is_over(term));
        assert!(of(None, false).is_over(term));
        assert!(!of(None, true).is_over(term));
    }
}
