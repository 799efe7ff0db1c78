//! `cloudevents` of a route.

use serde::{Deserialize, Serialize};

/// How a route sends messages as CloudEvents 1.0 (<https://github.com/cloudevents/spec>).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CloudEvents {
    /// Attributes in headers (`binary`, the default) or everything in one JSON document (`structured`).
    pub mode: CloudEventsMode,
    /// The attribute `source`: who sends, as a URI reference. `/posthouse` by default.
    pub source: String,
    /// The attribute `type` of messages that have none. `message` by default.
    pub default_type: String,
}

/// Where the attributes of a CloudEvent stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CloudEventsMode {
    /// Attributes in the transport's headers, the payload as it is.
    #[default]
    Binary,
    /// One JSON document with attributes and payload (`application/cloudevents+json`).
    Structured,
}

impl Default for CloudEvents {
    fn default() -> Self {
        Self { mode: CloudEventsMode::Binary, source: "/posthouse".into(), default_type: "message".into() }
    }
}

impl CloudEvents {
    /// Attributes in headers, sent by `source`.
    pub fn binary(source: impl Into<String>) -> Self {
        Self { source: source.into(), ..Self::default() }
    }

    /// One JSON document, sent by `source`.
    pub fn structured(source: impl Into<String>) -> Self {
        Self { mode: CloudEventsMode::Structured, ..Self::binary(source) }
    }

    pub(super) fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        let long = |text: &str| text.is_empty() || text.len() > crate::message::MAX_NAME;
        // What RFC 3986 allows nowhere in a URI; receivers parse the source as one.
        let foreign = |c: char| !c.is_ascii_graphic() || "\"<>\\^`{|}".contains(c);
        if long(&self.source) || self.source.contains(foreign) {
            let why = format!("{:?}, must be a URI or a path such as \"/shop\", of 1 to 255 bytes, percent-encoded", self.source);
            out.push(("cloudevents.source".into(), why));
        }
        if long(&self.default_type) || self.default_type.contains(char::is_control) {
            let why = format!("{:?}, must be 1 to 255 bytes without control characters", self.default_type);
            out.push(("cloudevents.default_type".into(), why));
        }
        out
    }
}
