//! One thing that is wrong in the configuration.

use std::fmt;

use serde::Serialize;

use crate::output::clean;

/// Where it is, what is there, why that can't be, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    pub(crate) path: String,
    /// As written, unless it is or may hold a secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    pub(crate) reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fix: Option<String>,
}

impl Problem {
    pub(crate) fn new(path: impl Into<String>, value: Option<String>, reason: impl Into<String>) -> Self {
        Self { path: path.into(), value, reason: reason.into(), fix: None }
    }

    pub(crate) fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => writeln!(f, "  {} = {}", clean(&self.path), clean(value))?,
            None => writeln!(f, "  {}", clean(&self.path))?,
        }
        writeln!(f, "      {}", clean(&self.reason))?;
        if let Some(fix) = &self.fix {
            writeln!(f, "      fix: {}", clean(fix))?;
        }
        Ok(())
    }
}

/// A path below which keys are written as TOML writes them: quoted where they must be.
pub(crate) fn join(path: &str, key: &str) -> String {
    let bare = !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
    let key = if bare { key.to_owned() } else { format!("{key:?}") };
    if path.is_empty() { key } else { format!("{path}.{key}") }
}
