//! Why a command did not do what was asked, and the exit code that says so to scripts.

use std::process::ExitCode;

use posthouse::{Error, ErrorKind};
use serde::Serialize;
use serde_json::json;

use crate::config::Problem;
use crate::database::is_configuration;
use crate::output;

/// The exit codes other than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Exit {
    /// 1: the thing asked for is not so.
    NotSo = 1,
    /// 2: usage or configuration.
    Usage = 2,
    /// 3: a needed service can't be reached.
    Unreachable = 3,
}

/// A command's failure: one sentence, or a list of configuration problems.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) text: String,
    pub(crate) problems: Vec<Problem>,
    /// The command has printed its document, which tells what is not so: there is to be one document only.
    pub(crate) printed: bool,
}

impl Failure {
    pub(crate) fn new(exit: Exit, text: impl Into<String>) -> Self {
        Self { exit, text: text.into(), problems: Vec::new(), printed: false }
    }

    pub(crate) fn not_so(text: impl Into<String>) -> Self {
        Self::new(Exit::NotSo, text)
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(Exit::Usage, text)
    }

    pub(crate) fn unreachable(text: impl Into<String>) -> Self {
        Self::new(Exit::Unreachable, text)
    }

    /// Both, with the more serious exit code.
    pub(crate) fn and(self, other: Self) -> Self {
        Self::new(self.exit.max(other.exit), format!("{}\nerror: {}", self.text, other.text))
    }

    /// An error of the library; `what` says where it came from (`database "orders"`).
    pub(crate) fn of(what: &str, e: &Error) -> Self {
        let exit = match e.kind() {
            _ if matches!(e, Error::Database(e) if is_configuration(e)) => Exit::Usage,
            ErrorKind::Invalid | ErrorKind::Config => Exit::Usage,
            ErrorKind::Unavailable => Exit::Unreachable,
            _ => Exit::NotSo,
        };
        let hint = match e.kind() {
            ErrorKind::Conflict => "; it is locked by another transaction, try again",
            _ => "",
        };
        let text = if what.is_empty() { format!("{e}{hint}") } else { format!("{what}: {e}{hint}") };
        Self::new(exit, text)
    }

    /// Tells people on stderr and, with `--json`, programs on stdout.
    pub(crate) fn report(&self, json: bool) -> ExitCode {
        let mut text = format!("error: {}\n", output::clean_lines(&self.text));
        for problem in &self.problems {
            text.push_str(&format!("\n{problem}"));
        }
        eprint!("{text}");
        if json && !self.printed {
            output::json(&json!({ "error": { "kind": self.exit, "message": self.text, "problems": self.problems } }));
        }
        ExitCode::from(self.exit as u8)
    }
}
