//! Lists for people: pages that are bounded in time, whatever is asked for.

use std::time::Duration;

/// A page of a list, and how to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T, N = i64> {
    /// The rows, in the list's order.
    pub rows: Vec<T>,
    /// Where the next page begins (`before`, `after`); None when nothing lies behind this one.
    pub next: Option<N>,
    /// The search came to its bound before the page was full: what lies behind `next` was not looked at.
    pub stopped: bool,
}

impl<T, N> Listed<T, N> {
    /// A page that ends where its limit was reached, or where there is nothing more.
    pub(crate) fn page(rows: Vec<T>, limit: u32, next: impl FnOnce(&T) -> N) -> Self {
        let next = rows.last().filter(|_| rows.len() >= limit as usize).map(next);
        Self { rows, next, stopped: false }
    }

    /// Says that the search ended at its bound; None: it came to the end.
    #[cfg(feature = "relay")]
    pub(crate) fn stop_at(&mut self, reached: Option<N>) {
        self.stopped = reached.is_some();
        self.next = reached;
    }
}

/// How long a list searches for rows that no index leads to, unless its filter says so.
pub const LIST_TIME: Duration = Duration::from_millis(150);

/// The same for text, which is searched for in payloads too.
pub const TEXT_TIME: Duration = Duration::from_secs(2);

/// Lines of the audit log that one page looks through at most.
pub const AUDIT_SCAN: u32 = 20_000;

/// Whether a destination is one of those that a pattern stands for: `*` is any text, everything else is itself.
pub fn destination_matches(pattern: &str, destination: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == destination };
    let Some(mut left) = destination.strip_prefix(first) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    true
}

/// How far creation times may lie from the order of ids. Ids are given when a row is written, and a row's time is that of its
/// statement: one that inserts for long, or commits late, leaves rows with old times among newer ones. A search by time looks
/// this much further on both sides, and then at each row's own time.
#[cfg(feature = "relay")]
const MARGIN_MS: i64 = 15_000;

/// Rows that a step looks at where most of them are not wanted: few at first, since nobody knows how long that takes, then more.
const STEP: u32 = 500;

/// The same where payloads are searched: a single one may have megabytes.
const TEXT_STEP: u32 = 50;

/// The most rows that a step looks at.
const MOST: u32 = 10_000;

/// How a search shares out its time.
struct Pace {
    started: std::time::Instant,
    within: Duration,
    step: u32,
}

impl Pace {
    /// `step`: rows that the first step looks at.
    fn new(within: Option<Duration>, text: bool, step: u32) -> Self {
        let usual = if text { TEXT_TIME } else { LIST_TIME };
        let step = if text { TEXT_STEP } else { step };
        Self { started: std::time::Instant::now(), within: within.unwrap_or(usual), step }
    }

    /// Whether there is time for another step; its size follows from how long the one before took.
    fn another(&mut self, step_began: std::time::Instant) -> bool {
        let took = step_began.elapsed();
        if took < self.within / 10 {
            self.step = (self.step * 2).min(MOST);
        } else if took > self.within / 3 {
            self.step = (self.step / 2).max(TEXT_STEP);
        }
        self.started.elapsed() < self.within
    }
}

#[cfg(feature = "relay")]
mod messages {
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    use std::collections::HashMap;
    use std::future::Future;
    use std::time::Instant;

    use super::{Listed, MARGIN_MS, Pace, STEP, destination_matches};
    use crate::Error;
    use crate::store::{MessageFilter, MessageRow, MessageStatus};

    /// A pending row, as far as it tells whether the rest of it is wanted.
    #[derive(Debug)]
    pub(crate) struct Candidate {
        #[cfg_attr(not(any(feature = "postgres", feature = "mysql")), expect(dead_code, reason = "SQLite has one house"))]
        pub(crate) house: i32,
        pub(crate) id: i64,
        pub(crate) status: String,
        pub(crate) destination: String,
    }

    /// Pending rows by descending id, without a gap.
    #[derive(Debug)]
    pub(crate) struct Chunk {
        pub(crate) rows: Vec<Candidate>,
        /// What lies below this id was not looked at; None: nothing does.
        pub(crate) floor: Option<i64>,
    }

    impl Chunk {
        /// Of the highest ids of all houses together: there are `limit` or all there are.
        pub(crate) fn of_all(rows: Vec<Candidate>, limit: u32) -> Self {
            let floor = rows.last().filter(|_| rows.len() >= limit as usize).map(|r| r.id);
            Self { rows, floor }
        }

        #[cfg(any(feature = "postgres", feature = "mysql"))]
        /// Of the highest ids of each house, up to `each` of them. Below the lowest row of a house that has more, nobody knows.
        pub(crate) fn of_houses(mut rows: Vec<Candidate>, each: u32) -> Self {
            let mut houses: HashMap<i32, (u32, i64)> = HashMap::new();
            for row in &rows {
                let (count, low) = houses.entry(row.house).or_insert((0, row.id));
                *count += 1;
                *low = row.id.min(*low);
            }
            let floor = houses.values().filter(|(count, _)| *count >= each).map(|(_, low)| *low).max();
            rows.retain(|r| floor.is_none_or(|floor| r.id >= floor));
            rows.sort_unstable_by_key(|r| std::cmp::Reverse(r.id));
            Self { rows, floor }
        }
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    /// Rows of each house that a step over all of them reads.
    pub(crate) fn each_house(step: u32) -> u32 {
        (step / 4).max(16)
    }

    /// Which rows a step reads in full.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Which<'a> {
        /// Of the log, from the first id to below the second.
        Range(i64, i64),
        /// Of the pending set.
        Pending(&'a [Candidate]),
        /// With this message id, below this id.
        MessageId(&'a str, i64),
    }

    /// A row, and where it was published to.
    #[derive(Debug)]
    pub(crate) struct Hit {
        pub(crate) row: MessageRow,
        pub(crate) published_to: String,
    }

    /// The steps of a search, which each database does in its own way.
    pub(crate) trait Search {
        /// The lowest of the next `n` ids of the log below one and from another on; None: there are fewer.
        fn log_step(&mut self, from: i64, below: i64, n: u32) -> impl Future<Output = Result<Option<i64>, Error>> + Send;
        /// The next pending rows (all statuses, or only FAILED ones) below an id and from another on, about `n` of them.
        fn pending_step(
            &mut self,
            failed: bool,
            from: i64,
            below: i64,
            n: u32,
        ) -> impl Future<Output = Result<Chunk, Error>> + Send;
        /// Those of these rows that the filter wants, by descending id.
        fn rows(
            &mut self,
            which: Which<'_>,
            filter: &MessageFilter,
            limit: u32,
        ) -> impl Future<Output = Result<Vec<Hit>, Error>> + Send;
        /// The lowest and the highest id of the log.
        fn ends(&mut self) -> impl Future<Output = Result<Option<(i64, i64)>, Error>> + Send;
        /// The first row of the log with this id or a higher one, and when it was created.
        fn created(&mut self, id: i64) -> impl Future<Output = Result<Option<(i64, i64)>, Error>> + Send;
    }

    /// A page of messages, bounded in time whatever the filter wants.
    ///
    /// The message id leads to its rows, a status other than SENT to the pending set, a time to a range of ids. What no index
    /// leads to is looked for step by step from the newest down, for as long as the time allows.
    pub(crate) async fn search<S: Search>(search: &mut S, filter: &MessageFilter) -> Result<Listed<MessageRow>, Error> {
        let limit = filter.limit as usize;
        let before = filter.before.unwrap_or(i64::MAX);
        if let Some(message_id) = &filter.message_id {
            let hits = search.rows(Which::MessageId(message_id, before), filter, filter.limit).await?;
            let full = hits.len() >= limit;
            let next = hits.last().filter(|_| full).map(|hit| hit.row.id);
            return Ok(Listed { rows: wanted(hits, filter).collect(), next, stopped: false });
        }
        let (from, mut below) = span(search, filter, before).await?;
        let plain =
            MessageFilter { limit: filter.limit, before: filter.before, within: filter.within, ..MessageFilter::default() };
        if *filter == (MessageFilter { sealed: filter.sealed.clone(), ..plain }) {
            let floor = search.log_step(from, below, filter.limit).await?.unwrap_or(from);
            let hits = search.rows(Which::Range(floor, below), filter, filter.limit).await?;
            return Ok(Listed::page(hits.into_iter().map(|hit| hit.row).collect(), filter.limit, |r: &MessageRow| r.id));
        }
        let picky = filter.destination.is_some() || filter.key.is_some();
        let mut pace = Pace::new(filter.within, filter.text.is_some(), if picky { filter.limit.max(STEP) } else { filter.limit });
        let mut rows: Vec<MessageRow> = Vec::new();
        loop {
            let began = Instant::now();
            // A hit may still turn out to be one of what must not be found by its text.
            let want = if filter.text.is_some() { u32::MAX } else { filter.limit - rows.len() as u32 };
            let (hits, floor) = match filter.status {
                None | Some(MessageStatus::Sent) => {
                    let floor = search.log_step(from, below, pace.step).await?;
                    (search.rows(Which::Range(floor.unwrap_or(from), below), filter, want).await?, floor)
                }
                Some(status) => {
                    let Chunk { rows: mut found, mut floor } =
                        search.pending_step(status == MessageStatus::Failed, from, below, pace.step).await?;
                    found.retain(|c| {
                        c.status == status.as_str() && filter.destination.as_ref().is_none_or(|d| *d == c.destination)
                    });
                    // Where each of them is wanted, no more are read in full than fit on the page.
                    let all = filter.text.is_none() && filter.key.is_none();
                    let fit = want.saturating_add(16) as usize;
                    if all && found.len() > fit {
                        found.truncate(fit);
                        floor = found.last().map(|c| c.id);
                    }
                    let hits =
                        if found.is_empty() { Vec::new() } else { search.rows(Which::Pending(&found), filter, want).await? };
                    (hits, floor)
                }
            };
            for row in wanted(hits, filter) {
                rows.push(row);
                if rows.len() >= limit {
                    let next = rows.last().map(|r| r.id);
                    return Ok(Listed { rows, next, stopped: false });
                }
            }
            let Some(floor) = floor else { return Ok(Listed { rows, next: None, stopped: false }) };
            below = floor;
            if !pace.another(began) {
                return Ok(Listed { rows, next: Some(below), stopped: true });
            }
        }
    }

    /// Hits, but for those that were found by a text in a payload which must not be searched.
    fn wanted(hits: Vec<Hit>, filter: &MessageFilter) -> impl Iterator<Item = MessageRow> {
        let sealed = |hit: &Hit| {
            let Some(text) = &filter.text else { return false };
            let r = &hit.row;
            let seen = [Some(&r.message_id), r.key.as_ref(), Some(&r.kind), Some(&r.destination), r.last_error.as_ref()];
            let elsewhere = seen.into_iter().flatten().any(|field| field.contains(text));
            let secret = |pattern: &String| {
                destination_matches(pattern, &r.destination) || destination_matches(pattern, &hit.published_to)
            };
            !elsewhere && filter.sealed.iter().any(secret)
        };
        hits.into_iter().filter(move |hit| !sealed(hit)).map(|hit| hit.row)
    }

    /// The ids that a filter's span of time can have: from the first on and below the second.
    async fn span<S: Search>(search: &mut S, filter: &MessageFilter, before: i64) -> Result<(i64, i64), Error> {
        let mut span = (0, before);
        if filter.created_after_ms.is_none() && filter.created_before_ms.is_none() {
            return Ok(span);
        }
        let Some(ends) = search.ends().await? else { return Ok(span) };
        if let Some(after) = filter.created_after_ms {
            // Rows that outlived their partition lie below the log's first id.
            span.0 = first_since(search, ends, after.saturating_sub(MARGIN_MS)).await?.filter(|id| *id > ends.0).unwrap_or(0);
            if span.0 == 0 && search.created(ends.1).await?.is_some_and(|(_, at)| at < after.saturating_sub(MARGIN_MS)) {
                // All of the log is older; what is written while this looks is not.
                span.0 = ends.1 + 1;
            }
        }
        if let Some(until) = filter.created_before_ms
            && let Some(id) = first_since(search, ends, until.saturating_add(MARGIN_MS)).await?
        {
            span.1 = span.1.min(id);
        }
        Ok(span)
    }

    /// The first id that was created at this time or later, by bisection over the primary key: ids grow with time (see
    /// [`MARGIN_MS`]), and no index over times has to be kept. None: all are older.
    async fn first_since<S: Search>(search: &mut S, (first, last): (i64, i64), ms: i64) -> Result<Option<i64>, Error> {
        match search.created(first).await? {
            Some((id, at)) if at >= ms => return Ok(Some(id)),
            Some(_) => {}
            None => return Ok(None),
        }
        // What is at `old` is older; at `new` it is not, or there is nothing.
        let (mut old, mut new) = (first, last + 1);
        while new - old > 1 {
            let middle = old + (new - old) / 2;
            match search.created(middle).await? {
                Some((id, at)) if id < new && at < ms => old = id,
                _ => new = middle,
            }
        }
        Ok(Some(new).filter(|id| *id <= last))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn candidate(house: i32, id: i64) -> Candidate {
            Candidate { house, id, status: "PENDING".into(), destination: "d".into() }
        }

        #[test]
        fn a_chunk_has_no_gap() {
            // House 1 has more below 40, so what the others have below that may have something of it in between.
            let rows = [(0, 90), (0, 10), (1, 80), (1, 60), (1, 40), (2, 50), (2, 30)].map(|(h, id)| candidate(h, id));
            let chunk = Chunk::of_houses(rows.into(), 3);
            assert_eq!(chunk.rows.iter().map(|r| r.id).collect::<Vec<_>>(), [90, 80, 60, 50, 40]);
            assert_eq!(chunk.floor, Some(40));
            let chunk = Chunk::of_houses(vec![candidate(0, 1), candidate(1, 2)], 3);
            assert_eq!((chunk.rows.len(), chunk.floor), (2, None));
        }
    }
}

#[cfg(feature = "relay")]
pub(crate) use messages::*;

#[cfg(feature = "inbox")]
mod received {
    use std::time::Instant;

    use super::{Listed, Pace, STEP};
    use crate::Error;
    use crate::store::{InboxFilter, InboxRow, InboxRows, InboxStatus, Tables};

    /// A page of received messages, bounded in time whatever the filter wants.
    ///
    /// By consumer, or all of them: the primary key in its order. Those that aren't done: an index of these alone. What no
    /// index leads to is looked for step by step, for as long as the time allows.
    pub(crate) async fn search_received<DB: InboxRows>(
        conn: &mut DB::Connection,
        tables: &Tables,
        filter: &InboxFilter,
    ) -> Result<Listed<InboxRow, (String, String)>, Error> {
        let key = |r: &InboxRow| (r.consumer.clone(), r.message_id.clone());
        let unfinished = filter.status.is_some_and(|s| s != InboxStatus::Success);
        let searches = filter.text.is_some()
            || filter.first_after_us.is_some()
            || filter.first_before_us.is_some()
            || !unfinished && (filter.status.is_some() || filter.kind.is_some());
        if !searches {
            return Ok(Listed::page(DB::inbox_list(conn, tables, filter, None).await?, filter.limit, key));
        }
        let mut pace = Pace::new(filter.within, filter.text.is_some(), filter.limit.max(STEP));
        let mut page = filter.clone();
        let mut rows: Vec<InboxRow> = Vec::new();
        loop {
            let began = Instant::now();
            let reached = DB::inbox_step(conn, tables, &page, pace.step).await?;
            page.limit = filter.limit - rows.len() as u32;
            rows.extend(DB::inbox_list(conn, tables, &page, reached.as_ref()).await?);
            if rows.len() >= filter.limit as usize {
                let next = rows.last().map(key);
                return Ok(Listed { rows, next, stopped: false });
            }
            let Some(reached) = reached else { return Ok(Listed { rows, next: None, stopped: false }) };
            page.after = Some(reached);
            if !pace.another(began) {
                return Ok(Listed { rows, next: page.after, stopped: true });
            }
        }
    }
}

#[cfg(feature = "inbox")]
pub(crate) use received::*;

#[cfg(test)]
mod tests {
    use super::destination_matches;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, destination, matches) in [
            ("orders", "orders", true),
            ("orders", "orders.paid", false),
            ("*", "", true),
            ("*", "anything", true),
            ("https://pay.example/*", "https://pay.example/a/b", true),
            ("https://pay.example/*", "https://pay.example", false),
            ("*.paid", "orders.paid", true),
            ("*.paid", "orders.paid.twice", false),
            ("amqp:*/card.*", "amqp:shop/card.charged", true),
            ("amqp:*/card.*", "amqp:shop/order", false),
            ("a*a", "a", false),
            ("a*b*c", "aXbXbXc", true),
            ("a*b*c", "acb", false),
        ] {
            assert_eq!(destination_matches(pattern, destination), matches, "{pattern} {destination}");
        }
    }
}
