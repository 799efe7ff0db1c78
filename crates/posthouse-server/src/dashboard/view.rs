//! What all pages are made of: the frame around them, times, badges, links, and answers when something is wrong.

use std::time::{Duration, SystemTime};

use askama::Template;
use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use posthouse::store::Listed;

use super::assets::EDITION;
use crate::api::status;
use crate::http::{By, Role, Served, Who};
use crate::ops::Refused;
use crate::output::{self, clean, now_ms};

/// Where in the dashboard a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Overview,
    Messages,
    Inbox,
    Houses,
    Groups,
    Alerts,
    Retention,
    Audit,
}

impl Place {
    const ALL: [Self; 8] =
        [Self::Overview, Self::Messages, Self::Inbox, Self::Houses, Self::Groups, Self::Alerts, Self::Retention, Self::Audit];

    fn name(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Messages => "Messages",
            Self::Inbox => "Inbox",
            Self::Houses => "Houses",
            Self::Groups => "Groups",
            Self::Alerts => "Alerts",
            Self::Retention => "Retention",
            Self::Audit => "Audit",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Overview => "/",
            Self::Messages => "/messages",
            Self::Inbox => "/inbox",
            Self::Houses => "/houses",
            Self::Groups => "/groups",
            Self::Alerts => "/alerts",
            Self::Retention => "/retention",
            Self::Audit => "/audit",
        }
    }
}

/// A link in the menu.
pub(super) struct Entry {
    pub(super) name: &'static str,
    pub(super) href: String,
    pub(super) here: bool,
}

/// What is around every page.
pub(super) struct Frame {
    pub(super) title: String,
    pub(super) menu: Vec<Entry>,
    /// Empty: there is only one.
    pub(super) databases: Vec<Choice>,
    /// The chosen database, as it stands in links; empty: none, or there is only one.
    pub(super) db: String,
    /// Whether "all databases" can be chosen.
    pub(super) all: bool,
    pub(super) who: String,
    /// Whether somebody logged in, who can log out.
    pub(super) logged_in: bool,
    /// Whether there is a name to show.
    pub(super) known: bool,
    pub(super) operator: bool,
    pub(super) csrf: String,
    pub(super) edition: &'static str,
    pub(super) version: &'static str,
    pub(super) relaying: bool,
}

/// What a list's page tells beyond its rows; None when there is nothing to say.
pub(super) fn stopped<T, N>(page: &Listed<T, N>) -> Option<&'static str> {
    page.stopped.then_some("The search stopped at its time limit; the next page goes on where it stopped.")
}

/// Something that can be chosen.
pub(super) struct Choice {
    pub(super) value: String,
    pub(super) label: String,
    pub(super) chosen: bool,
}

impl Choice {
    pub(super) fn new(value: &str, chosen: &str) -> Self {
        Self { value: value.to_owned(), label: shown(value), chosen: value == chosen }
    }
}

impl Frame {
    /// `database`: the chosen one; `all`: it may also be none.
    pub(super) fn new(served: &Served, who: &Who, place: Place, title: &str, database: Option<&str>, all: bool) -> Self {
        let several = served.databases.len() > 1;
        let db = database.filter(|_| several).unwrap_or_default().to_owned();
        let entry =
            |one: &Place| Entry { name: one.name(), href: Href::new(one.path()).add("db", &db).done(), here: *one == place };
        let names = served.databases.iter().filter(|_| several);
        Self {
            title: title.to_owned(),
            menu: Place::ALL.iter().map(entry).collect(),
            databases: names.map(|d| Choice::new(&d.name, &db)).collect(),
            db,
            all,
            who: shown(&who.name),
            logged_in: who.by == By::Login,
            known: who.by != By::Local,
            operator: who.role == Role::Operator,
            csrf: who.csrf.clone(),
            edition: &EDITION,
            version: env!("CARGO_PKG_VERSION"),
            relaying: served.relaying,
        }
    }
}

/// Text from outside, on one line, with everything written out that steers or reorders text. Templates escape it besides.
pub(super) fn shown(text: &str) -> String {
    clean(text).into_owned()
}

/// The same, cut after this many characters.
pub(super) fn short(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", clean(&text[..at])),
        None => shown(text),
    }
}

/// An address of a page, put together from what it asks for.
pub(super) struct Href(String);

impl Href {
    pub(super) fn new(path: &str) -> Self {
        Self(path.to_owned())
    }

    /// Leaves out what is empty.
    pub(super) fn add(mut self, name: &str, value: &str) -> Self {
        if !value.is_empty() {
            self.0.push(if self.0.contains('?') { '&' } else { '?' });
            self.0.push_str(name);
            self.0.push('=');
            self.0.extend(url::form_urlencoded::byte_serialize(value.as_bytes()));
        }
        self
    }

    pub(super) fn done(self) -> String {
        self.0
    }
}

/// A moment: as people say it, and exactly.
#[derive(Clone)]
pub(super) struct When {
    pub(super) text: String,
    pub(super) exact: String,
}

impl When {
    pub(super) fn ms(ms: i64) -> Self {
        let at = u64::try_from(ms).map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
        let exact = at.map_or_else(|_| "before 1970".into(), |at| humantime::format_rfc3339_millis(at).to_string());
        Self { text: output::relative(ms), exact }
    }

    pub(super) fn us(us: i64) -> Self {
        Self::ms(us / 1_000)
    }

    /// How long ago, on a clock that isn't ours.
    pub(super) fn ago(age_ms: i64) -> Self {
        Self::ms(now_ms() - age_ms)
    }
}

/// A length of time in milliseconds.
pub(super) fn span(ms: i64) -> String {
    output::span(Duration::from_millis(ms.unsigned_abs()))
}

/// `12 345`: digits in groups, so that they are read at a glance.
pub(super) fn number(n: i64) -> String {
    let digits = n.unsigned_abs().to_string();
    let mut out = String::from(if n < 0 { "−" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push('\u{202f}');
        }
        out.push(digit);
    }
    out
}

/// A count of which only the size matters: `≈ 1.2 million`.
pub(super) fn about(n: i64) -> String {
    let f = n as f64;
    match n {
        ..10_000 => format!("≈ {}", number(n)),
        10_000..1_000_000 => format!("≈ {} k", number(n / 1_000)),
        1_000_000..1_000_000_000 => format!("≈ {:.1} M", f / 1e6),
        _ => format!("≈ {:.1} G", f / 1e9),
    }
}

/// `12.3/s`.
pub(super) fn rate(per_second: f64) -> String {
    if per_second >= 100.0 { format!("{}/s", number(per_second.round() as i64)) } else { format!("{per_second:.1}/s") }
}

/// A status, and the kind of badge it gets.
pub(super) struct Badge {
    pub(super) text: String,
    pub(super) kind: &'static str,
}

pub(super) fn badge(status: &str) -> Badge {
    let kind = match status {
        "FAILED" | "LOST" | "TIMEOUT" | "FIRING" | "down" | "expired" => "bad",
        "SENDING" | "RETRYING" | "PENDING_RETRY" | "RUNNING" | "REQUESTED" | "blocked" | "STOPPED" | "DISCARDED" | "paused"
        | "pending" | "silenced" | "goes" => "warn",
        "SENT" | "SUCCESS" | "DONE" | "ok" | "live" | "current" => "good",
        _ => "plain",
    };
    Badge { text: shown(status), kind }
}

/// A page out of its template.
pub(super) fn page(template: &impl Template) -> Response {
    match template.render() {
        Ok(text) => Html(text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("the page can't be made: {e}\n")).into_response(),
    }
}

/// A page that can't be shown, and why.
#[derive(Debug)]
pub(super) struct Oops {
    status: StatusCode,
    text: String,
}

impl Oops {
    pub(super) fn missing(text: impl Into<String>) -> Self {
        Self { status: StatusCode::NOT_FOUND, text: text.into() }
    }
}

impl From<Refused> for Oops {
    fn from(refused: Refused) -> Self {
        Self { status: status(refused.kind), text: shown(&refused.text) }
    }
}

#[derive(Template)]
#[template(path = "oops.html")]
struct OopsPage<'a> {
    title: &'a str,
    text: &'a str,
    edition: &'a str,
}

impl IntoResponse for Oops {
    fn into_response(self) -> Response {
        let title = self.status.canonical_reason().unwrap_or("Error");
        (self.status, page(&OopsPage { title, text: &self.text, edition: &EDITION })).into_response()
    }
}

/// What came of an action, to be read out beside the page. `done`: the page looks again.
#[derive(Template)]
#[template(path = "notice.html")]
pub(super) struct Notice {
    pub(super) good: bool,
    pub(super) text: String,
}

impl Notice {
    pub(super) fn done(text: impl Into<String>) -> Response {
        ([("hx-trigger", "tick")], page(&Self { good: true, text: text.into() })).into_response()
    }

    pub(super) fn not_done(refused: &Refused) -> Response {
        (status(refused.kind), [("hx-trigger", "tick")], page(&Self { good: false, text: shown(&refused.text) })).into_response()
    }
}

/// How to get to the next page of a list and back: where the pages before began.
pub(super) struct Trail {
    began: Vec<String>,
}

/// Pages that can be gone back.
const TRAIL: usize = 40;

impl Trail {
    /// Out of an address. What can't be read is an empty one.
    pub(super) fn parse(text: &str) -> Self {
        Self { began: serde_json::from_str(text).unwrap_or_default() }
    }

    /// The trail behind the next page: `here` is where this one began, empty for the first.
    pub(super) fn onward(&self, here: &str) -> String {
        let mut began = self.began.clone();
        began.push(here.to_owned());
        let from = began.len().saturating_sub(TRAIL);
        // Texts are always JSON.
        serde_json::to_string(&began[from..]).unwrap_or_default()
    }

    /// Where the page before this one began, and the trail behind that; None on the first.
    pub(super) fn back(&self) -> Option<(String, String)> {
        let (last, rest) = self.began.split_last()?;
        let rest = if rest.is_empty() { String::new() } else { serde_json::to_string(rest).unwrap_or_default() };
        Some((last.clone(), rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_at_a_glance() {
        assert_eq!((number(0), number(999), number(-1_234_567)), ("0".into(), "999".into(), "−1\u{202f}234\u{202f}567".into()));
        assert_eq!(
            (about(9_999), about(12_345), about(10_055_000)),
            ("≈ 9\u{202f}999".into(), "≈ 12 k".into(), "≈ 10.1 M".into())
        );
        assert_eq!((rate(0.0), rate(12.34), rate(1234.5)), ("0.0/s".into(), "12.3/s".into(), "1\u{202f}235/s".into()));
    }

    #[test]
    fn addresses_carry_any_text() {
        let href = Href::new("/messages").add("db", "a/b_").add("key", "").add("text", "x&y=\u{202e}<\"'>").done();
        assert_eq!(href, "/messages?db=a%2Fb_&text=x%26y%3D%E2%80%AE%3C%22%27%3E");
    }

    #[test]
    fn a_trail_leads_back_page_by_page() {
        let first = Trail::parse("");
        assert!(first.back().is_none());
        let second = Trail::parse(&first.onward(""));
        let third = Trail::parse(&second.onward("950"));
        assert_eq!(third.back(), Some(("950".into(), "[\"\"]".into())));
        assert_eq!(second.back(), Some((String::new(), String::new())));
        let long = (0..100).fold(Trail::parse("no trail"), |t, n| Trail::parse(&t.onward(&n.to_string())));
        assert_eq!((long.began.len(), long.began[0].as_str()), (TRAIL, "60"));
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(short("äöü", 2), "äö…");
        assert_eq!(short("äö\n", 3), "äö\\n");
    }
}
