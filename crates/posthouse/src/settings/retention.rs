//! How long what is done with stays in the database, and where it goes then.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

use super::or_never;

const DAY: Duration = Duration::from_secs(86_400);

/// How long delivered messages and what is written down about them stay in the database, and where they go then.
///
/// Used under `[retention]` in the configuration file. Ages are counted by the database's clock. What isn't delivered is never
/// removed, however old: neither pending messages nor FAILED ones.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RetentionSettings {
    /// Messages that were delivered, counted from when they were published. `None` (`"never"` in a file) keeps all. 7 days by
    /// default; 1 s to 100 years, as all terms here.
    #[serde(with = "or_never")]
    pub sent: Option<Duration>,
    /// Receipts: when which instance delivered which messages. 30 days by default, or as long as `sent` if that is longer.
    #[serde(with = "or_never")]
    pub receipts: Option<Duration>,
    /// Failed attempts of messages that are delivered by now. 30 days by default, or as long as `sent` if that is longer.
    #[serde(with = "or_never")]
    pub attempts: Option<Duration>,
    /// Dedup keys. One that is gone can be published with once more. 30 days by default, or as long as `sent` if that is longer.
    #[serde(with = "or_never")]
    pub dedup: Option<Duration>,
    /// What operators did. Never by default.
    #[serde(with = "or_never")]
    pub audit: Option<Duration>,
    /// How often it is looked for what is over its term. 1 hour by default; 1 s to 30 days.
    #[serde(with = "humantime_serde")]
    pub every: Duration,
    /// The longest that one round works; the next one goes on where it stopped. 10 minutes by default; at least 1 s.
    #[serde(with = "humantime_serde")]
    pub budget: Duration,
    /// Where messages are written before they are removed: `file:///directory` or `s3://bucket/prefix`. None: nowhere, they are
    /// gone.
    pub archive: Option<String>,
    /// What archives are written as.
    pub format: ArchiveFormat,
    /// How the bucket of an `s3://` archive is reached.
    pub s3: S3Settings,
}

impl fmt::Debug for RetentionSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetentionSettings").field("sent", &self.sent).field("archive", &self.archive).finish_non_exhaustive()
    }
}

/// What archives are written as.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ArchiveFormat {
    /// One JSON object per line, compressed with zstd: `.ndjson.zst`.
    #[default]
    Ndjson,
    /// Apache Parquet, its pages compressed with zstd: `.parquet`. Needs the feature `parquet`.
    Parquet,
}

impl ArchiveFormat {
    /// How the names of its files end.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Ndjson => "ndjson.zst",
            Self::Parquet => "parquet",
        }
    }
}

/// How a bucket is reached. What is left out is taken from the variables that AWS's own tools use: `AWS_ACCESS_KEY_ID`,
/// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct S3Settings {
    /// `https://host` of a service that speaks S3; AWS by default. With one, the bucket stands in the path of its addresses.
    pub endpoint: Option<String>,
    /// Region; `us-east-1` if nothing says another one.
    pub region: Option<String>,
    /// Access key.
    pub access_key: Option<String>,
    /// Secret key.
    pub secret_key: Option<String>,
    /// Token of temporary credentials.
    pub session_token: Option<String>,
}

impl fmt::Debug for S3Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Settings").field("endpoint", &self.endpoint).field("region", &self.region).finish_non_exhaustive()
    }
}

/// As it is written: a term that is left out depends on `sent`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename = "RetentionSettings")]
struct Written {
    sent: Option<Term>,
    receipts: Option<Term>,
    attempts: Option<Term>,
    dedup: Option<Term>,
    audit: Option<Term>,
    #[serde(default, with = "humantime_serde")]
    every: Option<Duration>,
    #[serde(default, with = "humantime_serde")]
    budget: Option<Duration>,
    archive: Option<String>,
    #[serde(default)]
    format: ArchiveFormat,
    #[serde(default)]
    s3: S3Settings,
}

#[derive(Deserialize)]
#[serde(transparent)]
struct Term(#[serde(with = "or_never")] Option<Duration>);

impl<'de> Deserialize<'de> for RetentionSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let written = Written::deserialize(deserializer)?;
        let mut out = written.sent.map_or_else(Self::default, |sent| Self::after(sent.0));
        let terms = [
            (&mut out.receipts, written.receipts),
            (&mut out.attempts, written.attempts),
            (&mut out.dedup, written.dedup),
            (&mut out.audit, written.audit),
        ];
        for (term, given) in terms {
            if let Some(given) = given {
                *term = given.0;
            }
        }
        out.every = written.every.unwrap_or(out.every);
        out.budget = written.budget.unwrap_or(out.budget);
        Ok(Self { archive: written.archive, format: written.format, s3: written.s3, ..out })
    }
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self::after(Some(7 * DAY))
    }
}

impl RetentionSettings {
    /// The defaults for messages that stay this long; None keeps all.
    pub fn after(sent: Option<Duration>) -> Self {
        let beside = sent.map(|sent| sent.max(30 * DAY));
        Self {
            sent,
            receipts: beside,
            attempts: beside,
            dedup: beside,
            audit: None,
            every: Duration::from_secs(3_600),
            budget: Duration::from_secs(600),
            archive: None,
            format: ArchiveFormat::default(),
            s3: S3Settings::default(),
        }
    }

    fn terms(&self) -> [(&'static str, Option<Duration>); 5] {
        [
            ("sent", self.sent),
            ("receipts", self.receipts),
            ("attempts", self.attempts),
            ("dedup", self.dedup),
            ("audit", self.audit),
        ]
    }

    /// What is wrong with these settings, each with the field's path.
    pub fn problems(&self) -> Vec<(String, String)> {
        let mut out = Vec::new();
        for (name, term) in self.terms() {
            if let Some(term) = term
                && !(Duration::from_secs(1)..=36_525 * DAY).contains(&term)
            {
                out.push((name.to_owned(), format!("{term:?}, must be 1 s to 100 years, or \"never\"")));
            }
        }
        if !(Duration::from_secs(1)..=30 * DAY).contains(&self.every) {
            out.push(("every".into(), format!("{:?}, must be 1 s to 30 days", self.every)));
        }
        if !(Duration::from_secs(1)..=30 * DAY).contains(&self.budget) {
            out.push(("budget".into(), format!("{:?}, must be 1 s to 30 days", self.budget)));
        }
        if let Some(archive) = &self.archive
            && let Err(why) = place(archive)
        {
            out.push(("archive".into(), why));
        }
        if let Some(endpoint) = &self.s3.endpoint
            && !endpoint.starts_with("http://")
            && !endpoint.starts_with("https://")
        {
            out.push(("s3.endpoint".into(), format!("{endpoint:?}, must begin with https:// or http://")));
        }
        if self.format == ArchiveFormat::Parquet && !cfg!(feature = "parquet") {
            out.push(("format".into(), "this was built without the feature \"parquet\"; use \"ndjson\"".into()));
        }
        out
    }

    /// What may be as wanted and still deserves a word.
    pub fn warnings(&self) -> Vec<String> {
        let mut out = Vec::new();
        let shorter = |term: Option<Duration>| term.is_some_and(|term| self.sent.is_none_or(|sent| term < sent));
        if shorter(self.dedup) {
            out.push(
                "dedup is shorter than sent: a key can be published with again while its first message is still there".into(),
            );
        }
        for (name, term, what) in [("receipts", self.receipts, "delivered"), ("attempts", self.attempts, "tried in vain")] {
            if shorter(term) {
                out.push(format!("{name} is shorter than sent: of older messages it can't be told when they were {what}"));
            }
        }
        out
    }
}

/// Where an archive is.
#[cfg(feature = "archive")]
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ArchivePlace {
    Directory(std::path::PathBuf),
    Bucket { bucket: String, prefix: String },
}

#[cfg(not(feature = "archive"))]
fn place(_: &str) -> Result<(), String> {
    Err("this was built without the feature \"archive\"; leave it out, and what is removed is gone".into())
}

/// Takes an archive's address apart.
#[cfg(feature = "archive")]
pub(crate) fn place(archive: &str) -> Result<ArchivePlace, String> {
    // Names in a bucket are paths of addresses, where these have a meaning.
    let steps = |path: &str| path.split('/').any(|part| matches!(part, "." | ".."));
    if let Some(path) = archive.strip_prefix("file://") {
        if !path.starts_with('/') || steps(path) {
            return Err(format!(
                "{archive:?}, must be an absolute path without . and .., such as file:///var/lib/posthouse/archive"
            ));
        }
        return Ok(ArchivePlace::Directory(path.into()));
    }
    if let Some(rest) = archive.strip_prefix("s3://") {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        if bucket.is_empty() || steps(prefix) || prefix.contains("//") {
            return Err(format!("{archive:?}, must be s3://bucket or s3://bucket/prefix"));
        }
        return Ok(ArchivePlace::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() });
    }
    Err(format!("{archive:?}, must begin with file:// or s3://"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_that_are_left_out_follow_sent() {
        let read = |text: &str| serde_json::from_str::<RetentionSettings>(text).unwrap();
        assert_eq!(read("{}"), RetentionSettings::default());
        let s = read(r#"{"sent":"90d"}"#);
        assert_eq!((s.sent, s.receipts, s.dedup, s.audit), (Some(90 * DAY), Some(90 * DAY), Some(90 * DAY), None));
        let s = read(r#"{"sent":"never","attempts":"3d","audit":"1y"}"#);
        assert_eq!((s.sent, s.receipts, s.attempts, s.dedup), (None, None, Some(3 * DAY), None));
        assert!(s.audit.is_some());
        let s = read(r#"{"sent":"1d"}"#);
        assert_eq!((s.sent, s.receipts), (Some(DAY), Some(30 * DAY)));
        assert!(s.warnings().is_empty());
        let s = read(r#"{"sent":"10d","dedup":"9d"}"#);
        assert!(s.problems().is_empty() && s.warnings()[0].starts_with("dedup"), "{:?}", s.warnings());
        assert!(serde_json::from_str::<RetentionSettings>(r#"{"snet":"1d"}"#).is_err());
    }

    #[test]
    fn what_cannot_be_is_named() {
        let mut s = RetentionSettings::after(Some(Duration::ZERO));
        s.every = Duration::ZERO;
        s.s3.endpoint = Some("minio:9000".into());
        s.archive = Some("/var/lib".into());
        let fields: Vec<_> = s.problems().into_iter().map(|p| p.0).collect();
        assert_eq!(fields, ["sent", "every", "archive", "s3.endpoint"]);
    }

    #[cfg(feature = "archive")]
    #[test]
    fn an_archive_is_a_directory_or_a_bucket() {
        assert_eq!(place("file:///a/b"), Ok(ArchivePlace::Directory("/a/b".into())));
        let bucket = |prefix: &str| Ok(ArchivePlace::Bucket { bucket: "b".into(), prefix: prefix.into() });
        assert_eq!(place("s3://b"), bucket(""));
        assert_eq!(place("s3://b/c/d/"), bucket("c/d"));
        for wrong in ["file://a", "file:///a/../b", "s3://", "s3:///x", "s3://b/../x", "s3://b/a//b", "gs://b", "/a"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
