//! What people do with messages, groups and the audit log: once, for the pages, the HTTP API and, where it fits, the commands.
//!
//! Everything that changes something takes [`Who`] does it, refuses viewers, and leaves an audit line.

pub(crate) mod alerts;
pub(crate) mod audit;
pub(crate) mod bulk;
pub(crate) mod groups;
pub(crate) mod inbox;
pub(crate) mod messages;
pub(crate) mod payload;
pub(crate) mod retention;

use posthouse::{Error, ErrorKind};

use crate::failure::{Exit, Failure};
use crate::http::{Role, Who};

/// Messages per transaction: large enough to be quick, small enough not to hold up relays and workers.
pub(crate) const CHUNK: u32 = 500;

/// Messages that are counted one by one, when no statistics tell how many there are.
pub(crate) const COUNTED: u64 = 100_000;

/// Why something that was asked for was not done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) kind: Refusal,
    /// One sentence for a person, without a full stop.
    pub(crate) text: String,
    /// The field that is wrong, where it is one.
    pub(crate) field: Option<&'static str>,
    /// The most (or the only values) that it may be.
    pub(crate) limit: Option<u64>,
}

/// What kind of refusal it is, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The request itself is wrong.
    Invalid,
    /// Not with this role.
    Forbidden,
    /// There is no such thing.
    Missing,
    /// Not in the state that it is in.
    Conflict,
    /// Too much of it is under way.
    Busy,
    /// It has more bytes than it may have.
    Large,
    /// The database can't be reached, or doesn't answer in time.
    Unavailable,
    /// Anything else.
    Failed,
}

impl Refused {
    pub(crate) fn new(kind: Refusal, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), field: None, limit: None }
    }

    /// A field of the request is wrong.
    pub(crate) fn field(field: &'static str, text: impl Into<String>) -> Self {
        Self { field: Some(field), ..Self::new(Refusal::Invalid, text) }
    }

    pub(crate) fn limit(self, limit: u64) -> Self {
        Self { limit: Some(limit), ..self }
    }

    pub(crate) fn missing(text: impl Into<String>) -> Self {
        Self::new(Refusal::Missing, text)
    }
}

impl From<Error> for Refused {
    fn from(e: Error) -> Self {
        let kind = match e.kind() {
            ErrorKind::Invalid => Refusal::Invalid,
            ErrorKind::Conflict => Refusal::Conflict,
            // Tables that are missing are for a person to make; until then this can't be had.
            ErrorKind::Unavailable | ErrorKind::Config => Refusal::Unavailable,
            _ => Refusal::Failed,
        };
        let field = if let Error::Invalid { field, .. } = &e { Some(*field) } else { None };
        Self { field, ..Self::new(kind, e.to_string()) }
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        let kind = match failure.exit {
            Exit::Unreachable => Refusal::Unavailable,
            Exit::Usage => Refusal::Invalid,
            Exit::NotSo => Refusal::Failed,
        };
        Self::new(kind, failure.text)
    }
}

/// Refuses people who may only look. Every change begins with it.
pub(crate) fn operator(who: &Who) -> Result<(), Refused> {
    match who.role {
        Role::Operator => Ok(()),
        Role::Viewer => {
            Err(Refused::new(Refusal::Forbidden, "you may look but not change anything: that takes the role operator"))
        }
    }
}

/// How many messages a filter finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) messages: u64,
    /// There are more, which were not counted.
    pub(crate) more: bool,
}

impl Counted {
    /// `1 200 messages`, `more than 100 000 messages`.
    pub(crate) fn text(self) -> String {
        let digits = self.messages.to_string();
        let mut grouped = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                grouped.push('\u{202f}');
            }
            grouped.push(digit);
        }
        let s = if self.messages == 1 { "" } else { "s" };
        format!("{}{grouped} message{s}", if self.more { "more than " } else { "" })
    }
}

/// What an action on messages that were named came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Acted<Id> {
    pub(crate) changed: Vec<Id>,
    pub(crate) unchanged: Vec<Id>,
    /// Why it may leave messages out.
    pub(crate) why: &'static str,
}

/// The longest text that a filter compares with: what messages' own names may have.
const MAX_NAME: usize = 255;

/// The most rows that one page of a list may have.
pub(crate) const PAGE: u32 = 1_000;

/// Checks a page's size.
pub(crate) fn page(limit: Option<u32>, default: u32) -> Result<u32, Refused> {
    match limit.unwrap_or(default) {
        limit @ 1..=PAGE => Ok(limit),
        limit => Err(Refused::field("limit", format!("must be 1 to {PAGE}, not {limit}")).limit(PAGE.into())),
    }
}

/// Text that can be asked for: databases have no NUL in texts, and nothing that they hold is longer.
pub(crate) fn plain(field: &'static str, text: Option<&str>) -> Result<(), Refused> {
    match text {
        Some(text) if text.contains('\0') => Err(Refused::field(field, format!("{field}: must not contain NUL"))),
        Some(text) if text.len() > MAX_NAME => {
            Err(Refused::field(field, format!("{field}: may have {MAX_NAME} bytes, not {}", text.len())).limit(MAX_NAME as u64))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_at_a_glance() {
        let text = |messages, more| Counted { messages, more }.text();
        assert_eq!(text(1, false), "1 message");
        assert_eq!(text(999, false), "999 messages");
        assert_eq!(text(1_200, false), "1\u{202f}200 messages");
        assert_eq!(text(100_000, true), "more than 100\u{202f}000 messages");
    }
}
