//! What a row says: where it goes, and what is sent.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Shared;
use crate::settings::{Part, Template};
use crate::store::adopted::{Kind, Row, Source};
use crate::{Adopted, AdoptedNotify, AdoptedPayload, Envelope, Headers, MessageId, Route};

/// The parts of a mapping that are put together for each row.
#[derive(Debug)]
pub(super) struct Words {
    destination: Option<Template>,
    notify: Option<AdoptedNotify>,
    kind: Template,
    content_type: Option<Template>,
    payload: Vec<(String, String)>,
    /// The payload is one column as it is.
    plain: bool,
    message_id: Option<String>,
}

impl Words {
    /// Of a mapping without problems.
    pub(super) fn of(mapping: &Adopted) -> Self {
        let template = |text: &Option<String>| text.as_deref().and_then(|text| Template::parse(text).ok());
        let (plain, payload) = match &mapping.payload {
            Some(AdoptedPayload::Column(column)) => (true, vec![(column.clone(), column.clone())]),
            Some(AdoptedPayload::Columns { columns }) => (false, columns.iter().map(|c| (c.clone(), c.clone())).collect()),
            Some(AdoptedPayload::Fields { fields }) => {
                (false, fields.iter().map(|(name, column)| (name.clone(), column.clone())).collect())
            }
            None => (false, Vec::new()),
        };
        Self {
            destination: template(&mapping.destination),
            notify: mapping.notify.clone(),
            kind: template(&mapping.kind).unwrap_or_default(),
            content_type: template(&mapping.content_type),
            payload,
            plain,
            message_id: mapping.message_id.clone(),
        }
    }

    /// The one destination of all rows, if there is one.
    pub(super) fn fixed_destination(&self) -> Option<&str> {
        self.destination.as_ref().and_then(Template::fixed)
    }
}

/// A row on its way.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) envelope: Envelope,
    pub(super) destination: String,
    pub(super) route: Arc<Route>,
}

/// `notify_config`.
#[derive(Debug, Deserialize)]
struct Config {
    mq: Option<Mq>,
    http: Option<Http>,
}

#[derive(Debug, Deserialize)]
struct Mq {
    topic: String,
    #[serde(default)]
    exchange: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Http {
    url: String,
    method: Option<String>,
    content_type: Option<String>,
    authorization: Option<String>,
}

struct Values<'r> {
    source: &'r Source,
    row: &'r Row,
}

impl Values<'_> {
    fn bytes(&self, column: &str) -> Option<&[u8]> {
        self.row.values.get(self.source.position(column)?)?.as_deref()
    }

    fn text(&self, column: &str) -> Result<String, String> {
        let bytes = self.bytes(column).ok_or_else(|| format!("column {column} is NULL"))?;
        String::from_utf8(bytes.to_vec()).map_err(|_| format!("column {column} holds no text"))
    }

    fn filled(&self, template: &Template) -> Result<String, String> {
        template.0.iter().try_fold(String::new(), |mut out, part| {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Column(column) => out.push_str(&self.text(column)?),
            }
            Ok(out)
        })
    }

    /// A value as JSON.
    fn json(&self, column: &str) -> Result<Box<RawValue>, String> {
        let raw = |text: String| RawValue::from_string(text).map_err(|e| format!("column {column}: {e}"));
        let quoted = |text: &str| serde_json::value::to_raw_value(text).map_err(|e| format!("column {column}: {e}"));
        let kind = self.source.position(column).map(|n| self.source.message[n].kind);
        let Some(bytes) = self.bytes(column) else { return raw("null".into()) };
        match kind {
            Some(Kind::Binary) => quoted(&bytes.iter().map(|b| format!("{b:02x}")).collect::<String>()),
            Some(Kind::Int | Kind::UnsignedInt | Kind::Number | Kind::Bool | Kind::Json) => {
                let text = self.text(column)?;
                // Not every number that a database knows is one in JSON (NaN).
                raw(text.clone()).or_else(|_| quoted(&text))
            }
            _ => quoted(&self.text(column)?),
        }
    }
}

/// The message of a row, or why there is none.
pub(super) fn outgoing(shared: &Shared, source: &Source, row: &Row) -> Result<Outgoing, String> {
    let words = &shared.words;
    let values = Values { source, row };
    let (destination, route) = match (&words.destination, &words.notify) {
        (Some(template), _) => {
            let destination = values.filled(template).map_err(|why| format!("destination: {why}"))?;
            let route = shared.directory.route(&destination);
            (destination, route)
        }
        (None, Some(notify)) => notified(shared, &values, notify).map_err(|why| format!("notify: {why}"))?,
        (None, None) => return Err("destination: none".into()),
    };
    let payload = if words.plain {
        let column = words.payload.first().map_or("", |(_, column)| column);
        values.bytes(column).map(<[u8]>::to_vec).unwrap_or_default()
    } else {
        let mut object = String::from("{");
        for (i, (name, column)) in words.payload.iter().enumerate() {
            let name = serde_json::to_string(name).map_err(|e| format!("payload: {e}"))?;
            let value = values.json(column).map_err(|why| format!("payload: {why}"))?;
            object.push_str(if i == 0 { "" } else { "," });
            object.push_str(&format!("{name}:{value}"));
        }
        object.push('}');
        object.into_bytes()
    };
    let content_type = match &words.content_type {
        Some(template) => values.filled(template).map_err(|why| format!("content_type: {why}"))?,
        None => {
            let column = words.payload.first().and_then(|(_, column)| source.position(column));
            let json = !words.plain || column.is_some_and(|n| source.message[n].kind == Kind::Json);
            if json { "application/json".into() } else { "application/octet-stream".into() }
        }
    };
    let message_id = match &words.message_id {
        Some(column) => values.text(column).map_err(|why| format!("message_id: {why}"))?,
        None => format!("{}/{}", source.name, row.id),
    };
    let envelope = Envelope {
        // Where ids are no numbers, the message id names the row.
        id: row.id.parse().unwrap_or(0),
        message_id: MessageId::from(message_id),
        kind: values.filled(&words.kind).map_err(|why| format!("type: {why}"))?,
        destination: destination.clone(),
        key: row.key.clone(),
        payload,
        content_type,
        headers: Headers::new(),
        created_at: row.created_at,
        deliver_at: None,
        attempt: row.attempts.saturating_add(1),
    };
    Ok(Outgoing { envelope, destination, route })
}

/// Where a row goes that says so itself.
fn notified(shared: &Shared, values: &Values<'_>, notify: &AdoptedNotify) -> Result<(String, Arc<Route>), String> {
    let kind = values.text(&notify.kind)?;
    // What is in it may be secret, so nothing of it is quoted.
    let config: Config = serde_json::from_str(&values.text(&notify.config)?)
        .map_err(|e| format!("column {} is not the JSON that is expected there (line {})", notify.config, e.line()))?;
    match (kind.as_str(), config) {
        ("rabbit_mq" | "rabbitmq" | "mq", Config { mq: Some(mq), .. }) => {
            let destination = format!("{}:{}/{}", notify.transport, mq.exchange, mq.topic);
            let route = shared.directory.route(&destination);
            Ok((destination, route))
        }
        ("http", Config { http: Some(http), .. }) => {
            if !http.url.starts_with("http://") && !http.url.starts_with("https://") {
                return Err("http.url is no http:// or https:// URL".into());
            }
            let mut route = (*shared.directory.route(&http.url)).clone();
            if let Some(method) = http.method.filter(|m| !m.is_empty()) {
                route.http.method = method.to_uppercase();
            }
            route.http.content_type = http.content_type.filter(|c| !c.is_empty()).or(route.http.content_type);
            route.http.authorization = http.authorization.filter(|a| !a.is_empty()).or(route.http.authorization);
            Ok((http.url, Arc::new(route)))
        }
        (kind, _) => Err(format!("{} says {kind:?}, and {} has nothing about it", notify.kind, notify.config)),
    }
}
