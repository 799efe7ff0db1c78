//! Parts of payloads and headers that people must not see.
//!
//! A mask says which messages it is about, and hides their payload, or single values in it by JSON path. What can't be masked
//! safely, because it isn't JSON, is hidden as a whole.

use std::fmt::Write as _;
use std::iter::Peekable;
use std::str::Chars;

use posthouse::store::destination_matches;

/// JSON that is nested deeper than this can't be masked, so it is hidden.
const DEPTH: u32 = 128;

/// What stands where a value was.
pub(crate) const MASKED: &str = "[masked]";

/// A step of a path: from one value to some of those in it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Name(String),
    Index(usize),
    /// Every value of an object or array.
    Any,
    /// Values of this name however deep they are.
    Deep(String),
}

/// A JSON path: `$`, then any of `.name`, `['name']`, `[0]`, `.*`, `[*]`, `..name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path(Vec<Step>);

impl Path {
    /// Reads a path; the reason if it is none.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut rest = text.strip_prefix('$').ok_or("a path begins with $")?.chars().peekable();
        let mut steps = Vec::new();
        while let Some(c) = rest.next() {
            steps.push(match c {
                '.' if rest.next_if_eq(&'.').is_some() => Step::Deep(word(&mut rest)?),
                '.' if rest.next_if_eq(&'*').is_some() => Step::Any,
                '.' => Step::Name(word(&mut rest)?),
                '[' => bracket(&mut rest)?,
                other => return Err(format!("{other:?} is not expected here; write .name, ['name'], [0], [*] or ..name")),
            });
        }
        if steps.is_empty() {
            return Err("it names the whole payload; write hide = true for that".into());
        }
        Ok(Self(steps))
    }
}

fn word(rest: &mut Peekable<Chars<'_>>) -> Result<String, String> {
    let mut name = String::new();
    while let Some(c) = rest.next_if(|c| !matches!(c, '.' | '[' | ']' | '*' | '\'' | '"') && !c.is_whitespace()) {
        name.push(c);
    }
    if name.is_empty() { Err("a name is missing; one with special characters stands like ['this one']".into()) } else { Ok(name) }
}

fn bracket(rest: &mut Peekable<Chars<'_>>) -> Result<Step, String> {
    let step = match rest.peek() {
        Some('*') => {
            rest.next();
            Step::Any
        }
        Some(quote @ ('\'' | '"')) => {
            let quote = *quote;
            rest.next();
            let mut name = String::new();
            loop {
                match rest.next() {
                    Some(c) if c == quote => break,
                    Some('\\') => name.extend(rest.next()),
                    Some(c) => name.push(c),
                    None => return Err(format!("{quote} is missing at the end of a name")),
                }
            }
            Step::Name(name)
        }
        _ => {
            let mut digits = String::new();
            while let Some(c) = rest.next_if(char::is_ascii_digit) {
                digits.push(c);
            }
            Step::Index(digits.parse().map_err(|_| "within [ ] there stands a number, * or a name in quotes")?)
        }
    };
    if rest.next() == Some(']') { Ok(step) } else { Err("] is missing".into()) }
}

/// One mask.
#[derive(Debug, Clone, Default)]
pub(crate) struct Mask {
    /// Patterns of destinations: names of routes, or addresses.
    pub(crate) destinations: Vec<String>,
    /// Patterns of consumers, for received messages.
    pub(crate) consumers: Vec<String>,
    /// Nothing of the payload is shown.
    pub(crate) hide: bool,
    pub(crate) paths: Vec<Path>,
    /// Names of headers, in lower case.
    pub(crate) headers: Vec<String>,
}

/// All masks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Masks(pub(crate) Vec<Mask>);

/// What is hidden of one message.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hidden<'a> {
    all: bool,
    paths: Vec<&'a Path>,
    headers: Vec<&'a str>,
}

impl Masks {
    /// What is hidden of a message with one of these destinations: published, effective, where its route leads.
    pub(crate) fn of_message(&self, destinations: &[&str]) -> Hidden<'_> {
        self.hidden(|mask| match (&mask.destinations[..], &mask.consumers[..]) {
            ([], []) => true,
            (patterns, _) => patterns.iter().any(|p| destinations.iter().any(|d| destination_matches(p, d))),
        })
    }

    /// What is hidden of a received message.
    pub(crate) fn of_received(&self, consumer: &str) -> Hidden<'_> {
        self.hidden(|mask| match (&mask.destinations[..], &mask.consumers[..]) {
            ([], []) => true,
            (_, patterns) => patterns.iter().any(|p| destination_matches(p, consumer)),
        })
    }

    fn hidden(&self, about: impl Fn(&Mask) -> bool) -> Hidden<'_> {
        let mut hidden = Hidden::default();
        for mask in self.0.iter().filter(|mask| about(mask)) {
            hidden.all |= mask.hide;
            hidden.paths.extend(&mask.paths);
            hidden.headers.extend(mask.headers.iter().map(String::as_str));
        }
        hidden
    }

    /// Patterns of the destinations whose payloads are hidden in whole or in part.
    pub(crate) fn sealed(&self) -> Vec<String> {
        let about = self.0.iter().filter(|m| m.hide || !m.paths.is_empty());
        let mut out = Vec::new();
        for mask in about {
            if mask.destinations.is_empty() && mask.consumers.is_empty() {
                out.push("*".into());
            }
            out.extend(mask.destinations.iter().cloned());
        }
        out
    }

    /// Whether payloads that consumers received are hidden, in whole or in part, of any of them.
    pub(crate) fn seals_received(&self) -> bool {
        self.0.iter().any(|m| (m.hide || !m.paths.is_empty()) && (!m.consumers.is_empty() || m.destinations.is_empty()))
    }
}

impl Hidden<'_> {
    /// Nothing of the payload may be shown.
    pub(crate) fn all(&self) -> bool {
        self.all
    }

    /// Not all of the payload may be shown.
    pub(crate) fn payload(&self) -> bool {
        self.all || !self.paths.is_empty()
    }

    /// Something of it may not be shown.
    pub(crate) fn any(&self) -> bool {
        self.payload() || !self.headers.is_empty()
    }

    /// Whether this header's value is hidden.
    pub(crate) fn header(&self, name: &str) -> bool {
        self.headers.iter().any(|hidden| name.eq_ignore_ascii_case(hidden))
    }

    /// JSON without the values that are hidden, everything else as it was written. None: it isn't JSON, so nothing is known
    /// about what is in it.
    pub(crate) fn masked(&self, payload: &[u8]) -> Option<String> {
        let text = std::str::from_utf8(payload).ok()?;
        // Checks all of it, however deep it is nested; the masker gives up where that is too deep for its stack.
        serde_json::from_str::<serde::de::IgnoredAny>(text).ok()?;
        let mut masker = Masker { rest: text.trim(), out: String::with_capacity(text.len()), depth: 0 };
        let begin = self.paths.iter().map(|path| &path.0[..]).collect();
        masker.value(begin)?;
        Some(masker.out)
    }
}

/// Copies JSON, but for masked values. It is known to be valid; where it turns out not to be, the answer is None.
struct Masker<'t> {
    rest: &'t str,
    out: String,
    depth: u32,
}

impl<'t> Masker<'t> {
    /// `open`: what is left of each path that leads here.
    fn value(&mut self, open: Vec<&[Step]>) -> Option<()> {
        if open.iter().any(|steps| steps.is_empty()) {
            let mut skipped = Masker { rest: self.rest, out: String::new(), depth: self.depth };
            skipped.value(Vec::new())?;
            self.rest = skipped.rest;
            let _ = write!(self.out, "\"{MASKED}\"");
            return Some(());
        }
        match self.rest.bytes().next()? {
            b'{' => self.items('}', |masker, _| {
                let raw = masker.string()?;
                let name: String = serde_json::from_str(raw).ok()?;
                masker.out.push_str(raw);
                masker.blank();
                masker.take(':')?;
                masker.blank();
                masker.value(inside(&open, |step| {
                    matches!(step, Step::Any) || matches!(step, Step::Name(n) | Step::Deep(n) if *n == name)
                }))
            }),
            b'[' => self.items(']', |masker, index| {
                masker.value(inside(&open, |step| matches!(step, Step::Any) || matches!(step, Step::Index(n) if *n == index)))
            }),
            b'"' => {
                let raw = self.string()?;
                self.out.push_str(raw);
                Some(())
            }
            _ => {
                let end = self.rest.find([',', '}', ']', ' ', '\t', '\r', '\n']).unwrap_or(self.rest.len());
                let (scalar, rest) = self.rest.split_at(end);
                self.out.push_str(scalar);
                self.rest = rest;
                Some(())
            }
        }
    }

    /// What stands between brackets, with commas between.
    fn items(&mut self, close: char, item: impl FnMut(&mut Self, usize) -> Option<()>) -> Option<()> {
        self.depth += 1;
        if self.depth > DEPTH {
            return None;
        }
        self.inner(close, item)?;
        self.depth -= 1;
        Some(())
    }

    fn inner(&mut self, close: char, mut item: impl FnMut(&mut Self, usize) -> Option<()>) -> Option<()> {
        self.any()?;
        self.blank();
        if self.rest.starts_with(close) {
            return self.any();
        }
        for index in 0.. {
            item(self, index)?;
            self.blank();
            if self.rest.starts_with(close) {
                return self.any();
            }
            self.take(',')?;
            self.blank();
        }
        None
    }

    /// A string with its quotes.
    fn string(&mut self) -> Option<&'t str> {
        let mut escaped = false;
        let inner = self.rest.strip_prefix('"')?;
        let end = inner.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        })?;
        let (raw, rest) = self.rest.split_at(end + 2);
        self.rest = rest;
        Some(raw)
    }

    fn any(&mut self) -> Option<()> {
        let c = self.rest.chars().next()?;
        self.take(c)
    }

    fn take(&mut self, c: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(c)?;
        self.out.push(c);
        Some(())
    }

    fn blank(&mut self) {
        let rest = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
        self.out.push_str(&self.rest[..self.rest.len() - rest.len()]);
        self.rest = rest;
    }
}

/// What is left of paths one value further in.
fn inside<'p>(open: &[&'p [Step]], goes: impl Fn(&Step) -> bool) -> Vec<&'p [Step]> {
    let mut out = Vec::new();
    for steps in open {
        let Some((step, rest)) = steps.split_first() else { continue };
        if goes(step) {
            out.push(rest);
        }
        if matches!(step, Step::Deep(_)) {
            out.push(*steps);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(paths: &[&str], json: &str) -> Option<String> {
        let paths: Vec<Path> = paths.iter().map(|p| Path::parse(p).unwrap()).collect();
        Hidden { paths: paths.iter().collect(), ..Hidden::default() }.masked(json.as_bytes())
    }

    #[test]
    fn values_are_masked_by_path_and_the_rest_stays_as_written() {
        for (paths, json, expected) in [
            (
                &["$.card.number"][..],
                r#"{"card": {"number": "4111", "x":1.0000000000000000001}}"#,
                r#"{"card": {"number": "[masked]", "x":1.0000000000000000001}}"#,
            ),
            (&["$.a"], r#"{"a":{"b":[1,"}",{"c":"\"]"}]},"z":null}"#, r#"{"a":"[masked]","z":null}"#),
            (&["$.a"], r#"{"b":{"a":1},"a":2,"a":3}"#, r#"{"b":{"a":1},"a":"[masked]","a":"[masked]"}"#),
            (
                &["$..pw"],
                r#"{"pw":1,"l":[{"pw":{"pw":2}},[{"x":{"pw":3}}]]}"#,
                r#"{"pw":"[masked]","l":[{"pw":"[masked]"},[{"x":{"pw":"[masked]"}}]]}"#,
            ),
            (&["$..u.pw"], r#"{"u":{"pw":1,"u":{"pw":2}},"pw":3}"#, r#"{"u":{"pw":"[masked]","u":{"pw":"[masked]"}},"pw":3}"#),
            (&["$.l[*].n"], r#"{"l":[{"n":1},{"n":2},3]}"#, r#"{"l":[{"n":"[masked]"},{"n":"[masked]"},3]}"#),
            (&["$[1]"], "[ 1 , 2 , 3 ]", "[ 1 , \"[masked]\" , 3 ]"),
            (&["$.*"], r#"{"a":1,"b":[]}"#, r#"{"a":"[masked]","b":"[masked]"}"#),
            (&["$['a.b']['c\\'d']"], r#"{"a.b":{"c'd":1}}"#, r#"{"a.b":{"c'd":"[masked]"}}"#),
            // Escapes don't get a name past its mask.
            (&["$.password"], r#"{"pass\u0077ord":"x"}"#, r#"{"pass\u0077ord":"[masked]"}"#),
            (&["$.a"], " \n{\"b\":\"\\\\\"}\n ", "{\"b\":\"\\\\\"}"),
            (&["$.a"], "[]", "[]"),
            (&["$.a"], "true", "true"),
        ] {
            assert_eq!(masked(paths, json).as_deref(), Some(expected), "{paths:?} {json}");
        }
    }

    #[test]
    fn what_is_no_json_can_not_be_masked() {
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for text in ["", "{", "{\"a\":1} x", "{\"a\":1}\n{\"a\":2}", "a=1", &deep] {
            assert_eq!(masked(&["$.a"], text), None, "{text:.20}");
        }
        assert_eq!(Hidden::default().masked(b"{\"a\":\"\xff\"}"), None);
    }

    #[test]
    fn paths_that_mean_nothing_are_refused() {
        for text in ["", "a", "$", "$.", "$..", "$a", "$[", "$[a]", "$['a]", "$.a b", "$[-1]", "$..*", "$.a[0"] {
            assert!(Path::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn masks_are_about_the_messages_they_name() {
        let mask = |destinations: &[&str], consumers: &[&str]| Mask {
            destinations: destinations.iter().map(ToString::to_string).collect(),
            consumers: consumers.iter().map(ToString::to_string).collect(),
            hide: true,
            headers: vec!["authorization".into()],
            ..Mask::default()
        };
        let pay = Masks(vec![mask(&["pay.*"], &[])]);
        assert!(pay.of_message(&["orders", "pay.card"]).all());
        assert!(!pay.of_message(&["orders"]).payload());
        assert!(!pay.of_received("pay.card").payload(), "it is about destinations");
        assert!(pay.of_message(&["pay.x"]).header("Authorization"));
        assert_eq!((pay.sealed(), pay.seals_received()), (vec!["pay.*".to_owned()], false));
        let received = Masks(vec![mask(&[], &["stock"])]);
        assert!(received.of_received("stock").all() && !received.of_message(&["stock"]).all());
        assert_eq!((received.sealed(), received.seals_received()), (vec![], true));
        let all = Masks(vec![mask(&[], &[])]);
        assert!(all.of_message(&["x"]).all() && all.of_received("y").all());
        assert_eq!((all.sealed(), all.seals_received()), (vec!["*".to_owned()], true));
    }
}
