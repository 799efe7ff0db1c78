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
