//! Adopted tables: tables of other applications whose rows are sent, by a mapping of their columns.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{OnExhausted, RelaySettings, Retry};

/// Which columns of another application's table say what, so that Posthouse can send its rows beside that application.
///
/// `[adopted.NAME]` in the configuration file. A preset fills everything; each field that is given replaces the preset's, and an
/// empty text takes it away. Nothing is ever changed in the table's structure.
///
/// ```
/// use posthouse::{Adopted, AdoptedPreset};
///
/// let mut prizes = Adopted::preset(AdoptedPreset::MqState);
/// prizes.table = "user_strategy_export_*".into();
/// prizes.destination = Some("kafka:lottery_invoice".into());
/// assert_eq!(prizes.problems(), []);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Adopted {
    /// A layout that is known: it fills what isn't given here.
    pub preset: Option<AdoptedPreset>,
    /// The databases in which the table is, by their names in the configuration file. Empty: all. An embedded relay has one.
    pub databases: Vec<String>,
    /// The schema (PostgreSQL) or database (MySQL) of the table; by default where Posthouse's own tables are.
    pub schema: Option<String>,
    /// The table, or a pattern that ends with `*`, which stands for digits: `user_strategy_export_*`.
    pub table: String,
    /// The column that names a row: any type that compares, with a primary key or unique index on it alone.
    pub id: Option<String>,
    /// The column that says how far a row is, and its codes.
    pub state: AdoptedState,
    /// The column with the message id. By default it is made of the table's name and the row's id.
    pub message_id: Option<String>,
    /// Where a row goes: a text in which `{column}` stands for the row's value: `kafka:lottery_invoice`,
    /// `amqp:{exchange}/{routing_key}`, `{destination}`.
    pub destination: Option<String>,
    /// In the place of a destination: columns that say how to notify whom.
    pub notify: Option<AdoptedNotify>,
    /// The column with the ordering key: a row is sent when every row of its key with a lower id is finished.
    pub key: Option<String>,
    /// What is sent.
    pub payload: Option<AdoptedPayload>,
    /// The message's type, a text as for `destination`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// The payload's media type, a text as for `destination`. By default `application/json` for a payload that is built or a JSON
    /// column, else `application/octet-stream`.
    pub content_type: Option<String>,
    /// The column that counts failed attempts. Without it they are counted in Posthouse's own table.
    pub attempts: Option<String>,
    /// The column with the row's own limit of attempts.
    pub max_attempts: Option<String>,
    /// The column with the time of the next attempt, in the time zone of the database server. Without it that is kept in
    /// Posthouse's own table.
    pub next_attempt: Option<String>,
    /// The column for the last error.
    pub error: Option<String>,
    /// The column with a number that every writer raises and compares.
    pub version: Option<String>,
    /// The column with the time at which the row was made.
    pub created: Option<String>,
    /// The column with the time of the last change; it is set with each write.
    pub updated: Option<String>,
    /// The column with a house number: instances begin with different ones.
    pub house: Option<String>,
    /// Only pending rows that were made longer ago than this are sent; those in the failed state at once. Needs `created`.
    #[serde(with = "humantime_serde")]
    pub unsent_after: Option<Duration>,
    /// Rows that the application has left in the sending state for longer than this are sent. Needs `updated`.
    #[serde(with = "humantime_serde")]
    pub stuck_after: Option<Duration>,
    /// When and how often to try again; by default as the route says.
    pub retry: Option<Retry>,
    /// What a row that is given up does to the later ones of its key: `block` by default.
    pub on_exhausted: OnExhausted,
    /// A row during whose sending this many processes died is given up. 1 to 100; 3 by default.
    pub max_claims: Option<u32>,
    /// Most rows per claim. 1 to 1 000; 100 by default.
    pub batch: Option<u32>,
    /// Rows of one table that an instance works on at once. 1 to 10 000; 200 by default.
    pub concurrency: Option<u32>,
    /// How long a claimed row stays this instance's own; it is renewed meanwhile. At least 1.5 × `relay.send_timeout` and 1 s;
    /// 30 s by default.
    #[serde(with = "humantime_serde")]
    pub lease: Option<Duration>,
    /// How long to wait after a scan that found nothing. 10 ms to 1 h; 1 s by default.
    #[serde(with = "humantime_serde")]
    pub interval: Option<Duration>,
}

/// The state column of an adopted table and what its values mean.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct AdoptedState {
    /// The column.
    pub column: Option<String>,
    /// Values of rows that are to be sent.
    pub pending: Option<Vec<StateCode>>,
    /// Whether NULL is one of them.
    pub null: Option<bool>,
    /// The value of a row that is being sent. Without one, claims are kept in Posthouse's own table alone.
    pub sending: Option<StateCode>,
    /// The value of a row that was sent.
    pub sent: Option<StateCode>,
    /// The value of a row that is given up.
    pub failed: Option<StateCode>,
    /// Whether rows that are found in the failed state, not given up by Posthouse itself, are sent.
    pub resend_failed: Option<bool>,
}

/// A value of a state column.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StateCode {
    /// Of a boolean column.
    Bool(bool),
    /// Of a column of whole numbers.
    Number(i64),
    /// Of a column of text.
    Text(String),
}

impl fmt::Display for StateCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(b) => write!(f, "{b}"),
            Self::Number(n) => write!(f, "{n}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// What the message of a row contains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AdoptedPayload {
    /// The value of this column, byte for byte.
    Column(String),
    /// A JSON object with these columns under their own names.
    Columns {
        /// The columns, in this order.
        columns: Vec<String>,
    },
    /// A JSON object with columns under other names.
    Fields {
        /// Columns by the names that they have in the object.
        fields: std::collections::BTreeMap<String, String>,
    },
}

/// Columns that say how to notify whom, as in `local_task_message`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct AdoptedNotify {
    /// The column that says `http`, or `rabbit_mq`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The column with JSON: `{"mq": {"topic", "exchange"}, "http": {"url", "method", "contentType", "authorization"}}`.
    pub config: String,
    /// The transport for `rabbit_mq`; `amqp` by default.
    #[serde(default = "amqp")]
    pub transport: String,
}

fn amqp() -> String {
    "amqp".into()
}

impl AdoptedNotify {
    /// These two columns, and the transport `amqp`.
    pub fn new(kind: impl Into<String>, config: impl Into<String>) -> Self {
        Self { kind: kind.into(), config: config.into(), transport: amqp() }
    }
}

/// A table layout that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AdoptedPreset {
    /// Messages for RabbitMQ with exchange, routing key, retry count and version.
    ProducerMessage,
    /// Notifications over HTTP or RabbitMQ, with house numbers.
    LocalTaskMessage,
    /// Business rows with a column `mq_state`: NULL or 0 unsent, 1 sent, 2 failed.
    MqState,
}

impl AdoptedPreset {
    fn filled(self) -> Adopted {
        let some = |text: &str| Some(text.to_owned());
        let code = |text: &str| StateCode::Text(text.into());
        let number = StateCode::Number;
        match self {
            Self::ProducerMessage => Adopted {
                table: "producer_message".into(),
                id: some("id"),
                state: AdoptedState {
                    column: some("status"),
                    pending: Some(vec![code("PENDING")]),
                    sending: Some(code("SENDING")),
                    sent: Some(code("SENT")),
                    failed: Some(code("FAILED")),
                    ..AdoptedState::default()
                },
                message_id: some("message_id"),
                destination: some("amqp:{exchange}/{routing_key}"),
                payload: Some(AdoptedPayload::Column("content".into())),
                content_type: some("application/json"),
                attempts: some("retry_count"),
                max_attempts: some("max_retry_count"),
                next_attempt: some("next_retry_time"),
                error: some("error_msg"),
                version: some("version"),
                created: some("create_time"),
                updated: some("update_time"),
                stuck_after: Some(Duration::from_secs(300)),
                ..Adopted::default()
            },
            Self::LocalTaskMessage => Adopted {
                table: "local_task_message".into(),
                id: some("id"),
                state: AdoptedState {
                    column: some("status"),
                    pending: Some(vec![number(0)]),
                    sending: Some(number(1)),
                    sent: Some(number(2)),
                    failed: Some(number(3)),
                    resend_failed: Some(true),
                    ..AdoptedState::default()
                },
                message_id: some("task_id"),
                notify: Some(AdoptedNotify::new("notify_type", "notify_config")),
                payload: Some(AdoptedPayload::Column("parameter_json".into())),
                kind: some("{task_name}"),
                content_type: some("application/json"),
                created: some("create_time"),
                updated: some("update_time"),
                house: some("house_number"),
                ..Adopted::default()
            },
            Self::MqState => Adopted {
                table: "user_strategy_export_*".into(),
                id: some("uuid"),
                state: AdoptedState {
                    column: some("mq_state"),
                    pending: Some(vec![number(0)]),
                    null: Some(true),
                    sent: Some(number(1)),
                    failed: Some(number(2)),
                    resend_failed: Some(true),
                    ..AdoptedState::default()
                },
                message_id: some("uuid"),
                key: some("uuid"),
                destination: some("kafka:lottery_invoice"),
                payload: Some(AdoptedPayload::Columns {
                    columns: [
                        "u_id",
                        "activity_id",
                        "order_id",
                        "strategy_id",
                        "award_id",
                        "award_type",
                        "award_name",
                        "award_content",
                        "uuid",
                    ]
                    .map(String::from)
                    .to_vec(),
                }),
                content_type: some("application/json"),
                created: some("create_time"),
                updated: some("update_time"),
                unsent_after: Some(Duration::from_secs(60)),
                ..Adopted::default()
            },
        }
    }
}

/// Names of the roles that are single columns, and where they are.
macro_rules! columns {
    ($of:expr) => {
        [
            ("id", &$of.id),
            ("state.column", &$of.state.column),
            ("message_id", &$of.message_id),
            ("key", &$of.key),
            ("attempts", &$of.attempts),
            ("max_attempts", &$of.max_attempts),
            ("next_attempt", &$of.next_attempt),
            ("error", &$of.error),
            ("version", &$of.version),
            ("created", &$of.created),
            ("updated", &$of.updated),
            ("house", &$of.house),
        ]
    };
}

impl Adopted {
    /// The mapping of a known layout.
    pub fn preset(preset: AdoptedPreset) -> Self {
        Self { preset: Some(preset), ..Self::default() }
    }

    /// A mapping of this table, still without columns.
    pub fn table(table: impl Into<String>) -> Self {
        Self { table: table.into(), ..Self::default() }
    }

    /// The complete mapping: what is given, and for the rest the preset.
    pub fn complete(&self) -> Self {
        let mut given = self.clone();
        if let Some(preset) = given.preset.take() {
            let preset = preset.filled();
            if given.table.is_empty() {
                given.table = preset.table;
            }
            // One of the two says where a row goes.
            if given.destination.is_none() && given.notify.is_none() {
                given.destination = preset.destination;
                given.notify = preset.notify;
            }
            macro_rules! fill {
                ($($field:ident).+) => {
                    if given.$($field).+.is_none() {
                        given.$($field).+ = preset.$($field).+;
                    }
                };
            }
            fill!(id);
            fill!(state.column);
            fill!(state.pending);
            fill!(state.null);
            fill!(state.sending);
            fill!(state.sent);
            fill!(state.failed);
            fill!(state.resend_failed);
            fill!(message_id);
            fill!(key);
            fill!(payload);
            fill!(kind);
            fill!(content_type);
            fill!(attempts);
            fill!(max_attempts);
            fill!(next_attempt);
            fill!(error);
            fill!(version);
            fill!(created);
            fill!(updated);
            fill!(house);
            fill!(unsent_after);
            fill!(stuck_after);
        }
        let none = |text: &mut Option<String>| {
            if text.as_ref().is_some_and(String::is_empty) {
                *text = None;
            }
        };
        for text in [
            &mut given.schema,
            &mut given.id,
            &mut given.state.column,
            &mut given.message_id,
            &mut given.destination,
            &mut given.key,
            &mut given.kind,
            &mut given.content_type,
            &mut given.attempts,
            &mut given.max_attempts,
            &mut given.next_attempt,
            &mut given.error,
            &mut given.version,
            &mut given.created,
            &mut given.updated,
            &mut given.house,
        ] {
            none(text);
        }
        for code in [&mut given.state.sending, &mut given.state.failed] {
            if *code == Some(StateCode::Text(String::new())) {
                *code = None;
            }
        }
        given.max_claims.get_or_insert(3);
        given.batch.get_or_insert(100);
        given.concurrency.get_or_insert(200);
        given.lease.get_or_insert(Duration::from_secs(30));
        given.interval.get_or_insert(Duration::from_secs(1));
        given.unsent_after = given.unsent_after.filter(|d| !d.is_zero());
        given.stuck_after = given.stuck_after.filter(|d| !d.is_zero());
        given
    }

    /// What is wrong with these settings, as far as can be told without the database, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let it = self.complete();
        let mut out = Vec::new();
        let mut say = |field: &str, why: String| out.push((field.to_owned(), why));
        let stem = it.table.strip_suffix('*').unwrap_or(&it.table);
        if stem.is_empty() || stem.contains('*') || it.table.contains('\0') {
            let why = "must be the name of a table, or one that ends with * for digits, such as user_strategy_export_*";
            say("table", format!("{:?}, {why}", it.table));
        }
        for (field, what) in [("id", &it.id), ("state.column", &it.state.column)] {
            if what.is_none() {
                say(field, "is missing: name the column".into());
            }
        }
        for (field, column) in columns!(it) {
            if column.as_ref().is_some_and(|c| c.contains('\0')) {
                say(field, "has a NUL in it".into());
            }
        }
        let pending = it.state.pending.as_deref().unwrap_or_default();
        if pending.is_empty() && it.state.null != Some(true) {
            say("state.pending", "is missing: the values of rows that are to be sent, or null = true".into());
        }
        if it.state.sent.is_none() {
            say("state.sent", "is missing: the value of a row that was sent".into());
        }
        let mut seen: Vec<(&StateCode, &str)> = pending.iter().map(|code| (code, "state.pending")).collect();
        for (field, code) in
            [("state.sending", &it.state.sending), ("state.sent", &it.state.sent), ("state.failed", &it.state.failed)]
        {
            let Some(code) = code else { continue };
            match seen.iter().find(|(other, _)| *other == code) {
                Some((_, other)) => say(field, format!("{code}, is the same as {other}; each state needs a value of its own")),
                None => seen.push((code, field)),
            }
        }
        if it.state.resend_failed == Some(true) && it.state.failed.is_none() {
            say("state.resend_failed", "needs state.failed".into());
        }
        match (&it.destination, &it.notify) {
            (None, None) => {
                say("destination", "is missing: where rows go, such as kafka:topic or amqp:{exchange}/{routing_key}".into())
            }
            (Some(_), Some(_)) => say("notify", "is given together with destination; remove one of the two".into()),
            _ => {}
        }
        for (field, text) in [("destination", &it.destination), ("type", &it.kind), ("content_type", &it.content_type)] {
            if let Some(Err(why)) = text.as_deref().map(Template::parse) {
                say(field, why);
            }
        }
        match &it.payload {
            None => say("payload", "is missing: a column, or { columns = [...] } for a JSON object".into()),
            Some(AdoptedPayload::Column(column)) if column.is_empty() => say("payload", "names no column".into()),
            Some(AdoptedPayload::Columns { columns }) if columns.is_empty() => say("payload.columns", "is empty".into()),
            Some(AdoptedPayload::Fields { fields }) if fields.is_empty() => say("payload.fields", "is empty".into()),
            Some(_) => {}
        }
        if it.unsent_after.is_some() && it.created.is_none() {
            say("unsent_after", "needs created: the column with the time at which a row was made".into());
        }
        if it.stuck_after.is_some() && (it.updated.is_none() || it.state.sending.is_none()) {
            say("stuck_after", "needs updated and state.sending".into());
        }
        if let Some(retry) = it.retry {
            out.extend(retry.problems());
        }
        let mut say = |field: &str, why: String| out.push((field.to_owned(), why));
        for (field, value, most) in
            [("max_claims", it.max_claims, 100), ("batch", it.batch, 1_000), ("concurrency", it.concurrency, 10_000)]
        {
            if let Some(value) = value
                && !(1..=most).contains(&value)
            {
                say(field, format!("{value}, must be 1 to {most}"));
            }
        }
        if let Some(interval) = it.interval
            && !(Duration::from_millis(10)..=Duration::from_secs(3600)).contains(&interval)
        {
            say("interval", format!("{interval:?}, must be 10 ms to 1 h"));
        }
        if let Some(lease) = it.lease
            && lease > Duration::from_secs(3600)
        {
            say("lease", format!("{lease:?}, must be at most 1 h"));
        }
        out
    }
    /// What is wrong with these settings beside those of the relay, each with the field's path.
    pub fn problems_beside(&self, relay: &RelaySettings) -> Vec<(String, String)> {
        let lease = self.lease();
        let least = (relay.send_timeout + relay.lease_margin).mul_f64(1.5);
        if lease >= least {
            return Vec::new();
        }
        let why = format!("{lease:?}, must be at least 1.5 × (relay.send_timeout + relay.lease_margin), which is {least:?}");
        vec![("lease".into(), why)]
    }

    fn lease(&self) -> Duration {
        self.lease.unwrap_or(Duration::from_secs(30))
    }
}

#[cfg(feature = "relay")]
impl Adopted {
    pub(crate) fn claim_lease(&self) -> Duration {
        self.lease()
    }

    pub(crate) fn interval(&self) -> Duration {
        self.interval.unwrap_or(Duration::from_secs(1))
    }

    pub(crate) fn batch(&self) -> usize {
        self.batch.unwrap_or(100) as usize
    }

    pub(crate) fn concurrency(&self) -> usize {
        self.concurrency.unwrap_or(200) as usize
    }

    pub(crate) fn max_claims(&self) -> u32 {
        self.max_claims.unwrap_or(3)
    }

    /// Every column that the mapping names, each with the field that names it. Of a complete mapping.
    pub(crate) fn columns(&self) -> Vec<(String, String)> {
        let mut out: Vec<(String, String)> =
            columns!(self).into_iter().filter_map(|(field, column)| Some((field.to_owned(), column.clone()?))).collect();
        let templates = [("destination", &self.destination), ("type", &self.kind), ("content_type", &self.content_type)];
        for (field, text) in templates {
            let parts = text.as_deref().and_then(|text| Template::parse(text).ok()).unwrap_or_default();
            out.extend(parts.columns().map(|column| (field.to_owned(), column.to_owned())));
        }
        if let Some(notify) = &self.notify {
            out.push(("notify.type".into(), notify.kind.clone()));
            out.push(("notify.config".into(), notify.config.clone()));
        }
        match &self.payload {
            Some(AdoptedPayload::Column(column)) => out.push(("payload".into(), column.clone())),
            Some(AdoptedPayload::Columns { columns }) => {
                out.extend(columns.iter().map(|column| ("payload.columns".into(), column.clone())));
            }
            Some(AdoptedPayload::Fields { fields }) => {
                out.extend(fields.iter().map(|(name, column)| (format!("payload.fields.{name}"), column.clone())));
            }
            None => {}
        }
        out
    }
}

/// A text in which `{column}` stands for a value; `{{` and `}}` are braces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Template(pub(crate) Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    Text(String),
    Column(String),
}

impl Template {
    /// # Errors
    /// What is wrong with the braces.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut chars = text.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '{' | '}' if chars.peek() == Some(&c) => {
                    chars.next();
                    plain.push(c);
                }
                '{' => {
                    let mut column = String::new();
                    loop {
                        match chars.next() {
                            Some('}') => break,
                            Some(c) if c != '{' => column.push(c),
                            _ => return Err(format!("{text:?}: a {{ without its }}; a brace itself is written twice")),
                        }
                    }
                    if column.is_empty() {
                        return Err(format!("{text:?}: {{}} names no column"));
                    }
                    if !plain.is_empty() {
                        parts.push(Part::Text(std::mem::take(&mut plain)));
                    }
                    parts.push(Part::Column(column));
                }
                '}' => return Err(format!("{text:?}: a }} without its {{; a brace itself is written twice")),
                c => plain.push(c),
            }
        }
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self(parts))
    }

    #[cfg(feature = "relay")]
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Column(column) => Some(column.as_str()),
            Part::Text(_) => None,
        })
    }

    /// The text, if no column is in it.
    #[cfg(feature = "relay")]
    pub(crate) fn fixed(&self) -> Option<&str> {
        match self.0.as_slice() {
            [] => Some(""),
            [Part::Text(text)] => Some(text),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_texts_with_columns() {
        let parts = |text: &str| Template::parse(text).map(|t| t.0);
        let (text, column) = (|t: &str| Part::Text(t.into()), |c: &str| Part::Column(c.into()));
        assert_eq!(parts("kafka:t"), Ok(vec![text("kafka:t")]));
        assert_eq!(parts("amqp:{exchange}/{key}"), Ok(vec![text("amqp:"), column("exchange"), text("/"), column("key")]));
        assert_eq!(parts("{{a}}{b}"), Ok(vec![text("{a}"), column("b")]));
        for bad in ["{", "{a", "a}", "{}", "{a{b}}"] {
            assert!(parts(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn presets_are_complete_and_single_fields_replace_theirs() {
        for preset in [AdoptedPreset::ProducerMessage, AdoptedPreset::LocalTaskMessage, AdoptedPreset::MqState] {
            assert_eq!(Adopted::preset(preset).problems(), [], "{preset:?}");
        }
        let toml = r#"{"preset":"mq_state","table":"prize_*","unsent_after":"5m","key":"",
            "state":{"pending":[0,7]},"payload":{"fields":{"uId":"u_id"}}}"#;
        let it = serde_json::from_str::<Adopted>(toml).unwrap().complete();
        assert_eq!((it.table.as_str(), it.id.as_deref(), it.key), ("prize_*", Some("uuid"), None));
        assert_eq!(it.unsent_after, Some(Duration::from_secs(300)));
        assert_eq!(it.state.pending, Some(vec![StateCode::Number(0), StateCode::Number(7)]));
        assert_eq!((it.state.null, it.state.sent), (Some(true), Some(StateCode::Number(1))));
    }

    #[test]
    fn all_problems_are_told_at_once_and_name_their_fields() {
        let mut it = Adopted::table("*");
        it.state.pending = Some(vec![StateCode::Number(1)]);
        it.state.sent = Some(StateCode::Number(1));
        it.state.resend_failed = Some(true);
        it.destination = Some("{".into());
        it.unsent_after = Some(Duration::from_secs(1));
        it.stuck_after = Some(Duration::from_secs(1));
        it.batch = Some(0);
        it.interval = Some(Duration::ZERO);
        it.retry = Some(Retry::new(0, Duration::from_secs(1), Duration::from_secs(1)));
        let fields: Vec<String> = it.problems().into_iter().map(|(field, _)| field).collect();
        for field in [
            "table",
            "id",
            "state.column",
            "state.sent",
            "state.resend_failed",
            "destination",
            "payload",
            "unsent_after",
            "stuck_after",
            "batch",
            "interval",
            "retry.max_attempts",
        ] {
            assert!(fields.iter().any(|f| f == field), "{field}: {fields:?}");
        }
    }
}
