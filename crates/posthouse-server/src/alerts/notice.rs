//! What people are told.

use std::time::Duration;

use minijinja::{Environment, UndefinedBehavior, context};
use posthouse::store::{AlertEvent, AlertKind, AlertNews};
use serde::Serialize;

use super::rules::Kind;
use crate::output::{clean, span};

/// One event of one alert, for people.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Notice {
    /// Identifies the event within its database; the same when it is sent again.
    pub(crate) id: String,
    pub(crate) state: State,
    /// Name of the rule.
    pub(crate) rule: String,
    /// What it is about; empty where that is the database.
    pub(crate) subject: String,
    pub(crate) database: String,
    pub(crate) value: f64,
    pub(crate) value_text: String,
    pub(crate) threshold: f64,
    pub(crate) threshold_text: String,
    /// When it began, RFC 3339.
    pub(crate) since: String,
    /// When this happened, RFC 3339.
    pub(crate) at: String,
    /// How long it had been so, for people.
    pub(crate) lasted: String,
    /// One sentence without its full stop.
    pub(crate) summary: String,
    /// More, where there is more.
    pub(crate) detail: String,
    /// What to do.
    pub(crate) hint: String,
    /// The instance that judged it.
    pub(crate) instance: String,
}

/// What a notice says about an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Firing,
    Repeated,
    Recovered,
    /// Nothing happened: somebody tries a channel.
    Test,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Firing => "FIRING",
            Self::Repeated => "STILL FIRING",
            Self::Recovered => "RECOVERED",
            Self::Test => "TEST",
        }
    }
}

impl Notice {
    /// Of an event in a database. `kind` is what its rule watches, where that is still known.
    pub(crate) fn of(event: &AlertEvent, kind: Option<Kind>, database: &str) -> Self {
        let news = AlertNews {
            kind: event.kind,
            since_us: event.since_us,
            value: event.value,
            threshold: event.threshold,
            detail: event.detail.clone(),
            silenced: false,
            channels: Vec::new(),
        };
        let about = (event.rule.as_str(), event.subject.as_str(), database);
        Self::new(format!("{database}/{}", event.id), about, kind, &news, event.at_us, &event.instance)
    }

    /// Of what happened to the alert of a rule about a subject in a database, at a moment.
    pub(crate) fn new(
        id: String,
        (rule, subject, database): (&str, &str, &str),
        kind: Option<Kind>,
        news: &AlertNews,
        at_us: i64,
        instance: &str,
    ) -> Self {
        let state = match news.kind {
            AlertKind::Fired => State::Firing,
            AlertKind::Repeated => State::Repeated,
            _ => State::Recovered,
        };
        let unit = |value: f64| kind.map_or_else(|| value.to_string(), |kind| kind.unit().text(value));
        let lasted = Duration::from_micros(u64::try_from(at_us - news.since_us).unwrap_or(0));
        let subject = clean(subject).into_owned();
        let is =
            kind.map_or_else(|| format!("{rule} {subject} in {database}"), |kind| kind.sentence(news.value, &subject, database));
        let over = state == State::Recovered;
        Self {
            id,
            state,
            rule: rule.to_owned(),
            database: database.to_owned(),
            value: news.value,
            value_text: unit(news.value),
            threshold: news.threshold,
            threshold_text: unit(news.threshold),
            since: rfc3339(news.since_us),
            at: rfc3339(at_us),
            lasted: span(lasted),
            summary: if over { format!("it is over: {is}") } else { is },
            detail: news.detail.as_deref().map(|text| clean(text).into_owned()).unwrap_or_default(),
            hint: if over { String::new() } else { kind.map(Kind::hint).unwrap_or_default().to_owned() },
            instance: instance.to_owned(),
            subject,
        }
    }

    /// With which somebody tries a channel.
    pub(crate) fn test(instance: &str, now_us: i64) -> Self {
        Self {
            id: format!("test/{now_us}"),
            state: State::Test,
            rule: "test".into(),
            subject: String::new(),
            database: String::new(),
            value: 0.0,
            value_text: "0".into(),
            threshold: 0.0,
            threshold_text: "0".into(),
            since: rfc3339(now_us),
            at: rfc3339(now_us),
            lasted: span(Duration::ZERO),
            summary: "somebody tries this channel with `posthouse alerts test`; nothing is wrong".into(),
            detail: String::new(),
            hint: String::new(),
            instance: instance.to_owned(),
        }
    }

    /// One line.
    pub(crate) fn title(&self) -> String {
        let subject = if self.subject.is_empty() { String::new() } else { format!(" {}", self.subject) };
        let database = if self.database.is_empty() { String::new() } else { format!(" ({})", self.database) };
        format!("[{}] {}{subject}{database}", self.state.word(), self.rule)
    }

    /// What is told where no template says otherwise.
    fn plain(&self) -> String {
        let mut text = format!("{}\n{}", self.title(), self.summary);
        if !matches!(self.state, State::Test) {
            text.push_str(&format!("\nthreshold {}, since {} ({})", self.threshold_text, self.since, self.lasted));
        }
        for (what, more) in [("", &self.detail), ("what to do: ", &self.hint)] {
            if !more.is_empty() {
                text.push_str(&format!("\n{what}{more}"));
            }
        }
        text
    }
}

fn rfc3339(us: i64) -> String {
    let since_epoch = Duration::from_micros(u64::try_from(us).unwrap_or(0));
    humantime::format_rfc3339_seconds(std::time::SystemTime::UNIX_EPOCH + since_epoch).to_string()
}

/// The notices of one message and how they read.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) title: String,
    /// Each notice's own text.
    pub(crate) texts: Vec<String>,
    pub(crate) notices: Vec<Notice>,
}

impl Letter {
    /// With a channel's template, if it has one. One that can't be filled in is left out: people are told all the same.
    pub(crate) fn new(notices: Vec<Notice>, template: Option<&str>) -> Self {
        let text = |notice: &Notice| match template.map(|template| fill(template, notice)) {
            None => notice.plain(),
            Some(Ok(text)) => text,
            Some(Err(why)) => format!("{}\n(the channel's template can't be filled in: {why})", notice.plain()),
        };
        let title = match &notices[..] {
            [one] => one.title(),
            several => {
                let of = |state: &[State]| several.iter().filter(|n| state.contains(&n.state)).count();
                let (firing, over) = (of(&[State::Firing, State::Repeated]), of(&[State::Recovered]));
                let parts = [(firing, "firing"), (over, "recovered")].into_iter().filter(|(n, _)| *n > 0);
                let parts: Vec<String> = parts.map(|(n, what)| format!("{n} {what}")).collect();
                format!("[posthouse] {}", parts.join(", "))
            }
        };
        Self { title, texts: notices.iter().map(text).collect(), notices }
    }

    /// All texts, in at most this many bytes: where that is too little, each is cut, so that none is left out.
    pub(crate) fn text(&self, most: usize) -> String {
        const GAP: &str = "\n\n";
        let all = self.texts.join(GAP);
        if all.len() <= most {
            return all;
        }
        let each = most / self.texts.len().max(1) - GAP.len();
        self.texts.iter().map(|text| cut(text, each)).collect::<Vec<_>>().join(GAP)
    }
}

/// The start of a text that takes at most this many bytes; what was cut is marked.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let mut end = most.saturating_sub('…'.len_utf8());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

/// Fills a template in.
fn fill(template: &str, notice: &Notice) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    // A name that doesn't exist is a mistake and not an empty text.
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL));
    environment
        .render_str(template, context! { title => notice.title(), text => notice.plain(), ..minijinja::value::Serde(notice) })
}

/// Steps that a template may take: one that never ends isn't waited for.
const FUEL: u64 = 100_000;

/// What is wrong with a template.
pub(crate) fn problem(template: &str) -> Option<String> {
    let mut notice = Notice::test("instance", 0);
    for state in [State::Firing, State::Repeated, State::Recovered, State::Test] {
        notice.state = state;
        if let Err(e) = fill(template, &notice) {
            let line = e.line().map(|line| format!("line {line}: ")).unwrap_or_default();
            return Some(format!("{line}{}", e.detail().map_or_else(|| e.kind().to_string(), |d| format!("{}: {d}", e.kind()))));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(state: State, subject: &str) -> Notice {
        Notice { state, subject: subject.into(), database: "orders".into(), rule: "outbox_failed".into(), ..Notice::test("i", 0) }
    }

    #[test]
    fn templates_are_filled_in_and_mistakes_are_found_before() {
        let template = "{{ state|upper }} {{ rule }} {{ subject }}{% if value > 3 %} much{% endif %}";
        let letter = Letter::new(vec![notice(State::Firing, "invoices")], Some(template));
        assert_eq!(letter.text(1000), "FIRING outbox_failed invoices");
        assert_eq!(problem(template), None);
        assert_eq!(problem("{{ title }}\n{{ text }}"), None);
        assert!(problem("{{ nothing }}").is_some_and(|why| why.contains("undefined")));
        assert!(problem("a\n{{ state").is_some_and(|why| why.contains("line 2")));
        assert!(problem("{{ state|nofilter }}").is_some());
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}";
        assert!(problem(endless).is_some());
    }

    #[test]
    fn several_are_told_together_and_long_texts_are_cut() {
        let letter =
            Letter::new(vec![notice(State::Firing, "a"), notice(State::Repeated, "b"), notice(State::Recovered, "c")], None);
        assert_eq!(letter.title, "[posthouse] 2 firing, 1 recovered");
        assert!(letter.text(10_000).contains("[STILL FIRING] outbox_failed b (orders)"));
        assert_eq!(cut("äää", 6), "äää");
        assert_eq!(cut("äääää", 9), "äää…");
        let short = letter.text(200);
        assert!(short.len() <= 200 && short.contains("outbox_failed a") && short.contains("outbox_failed c"), "{short}");
        assert_eq!(Letter::new(vec![notice(State::Recovered, "")], None).title, "[RECOVERED] outbox_failed (orders)");
    }
}
