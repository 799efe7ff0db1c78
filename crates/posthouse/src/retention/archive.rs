//! Where messages are written before they go: a directory or a bucket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::StatusCode;
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::encode::{Encoder, read};
use super::round::Round;
use super::{Progress, Retention};
use crate::settings::{ArchivePlace, place};
use crate::store::{ArchiveRow, RowSize, Shelf};
use crate::{ArchiveFormat, Error, RetentionSettings, S3Settings};

/// A file is closed when it has this many bytes.
const FILE: usize = 64 << 20;

/// The most payload bytes and messages that are read from the database at once.
const BATCH: (i64, usize) = (8 << 20, 500);

/// The most that one request to a bucket takes, and how long its signature counts.
const REQUEST: Duration = Duration::from_secs(120);

/// How often a request to a bucket is tried, and the pause after the first time.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(300);

/// A directory or bucket that files are written to.
pub(super) struct Archive {
    /// With a slash at the end.
    base: String,
    format: ArchiveFormat,
    s3: S3Settings,
}

/// What came of writing a file.
pub(super) enum File {
    /// It is there, with these messages.
    Written(ArchiveRow, Vec<i64>),
    /// There was nothing to write.
    Nothing,
    /// The round is to stop.
    Stopped,
}

/// Which rows go into files.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// All of a shelf.
    All(Shelf),
    /// Those of a shelf that are older than this and not pending, with ids below this.
    Old(Shelf, Duration, i64),
}

impl Source {
    fn shelf(self) -> Shelf {
        match self {
            Self::All(shelf) | Self::Old(shelf, ..) => shelf,
        }
    }
}

/// What lies beside each file, so that it can be told what it is without the database.
#[derive(Serialize)]
struct Manifest<'a> {
    file: &'a str,
    shelf: Shelf,
    low: i64,
    high: i64,
    messages: i64,
    bytes: i64,
    sha256: &'a str,
    format: ArchiveFormat,
}

impl Archive {
    pub(super) fn open(name: &str, settings: &RetentionSettings) -> Result<Option<Self>, Error> {
        let Some(archive) = &settings.archive else { return Ok(None) };
        let base = match place(archive).map_err(|why| Error::Config(format!("retention.archive: {why}")))? {
            ArchivePlace::Directory(path) => format!("file://{}", path.display()),
            ArchivePlace::Bucket { bucket, prefix } => format!("s3://{bucket}/{prefix}"),
        };
        let archive =
            Self { base: format!("{}/{name}/", base.trim_end_matches('/')), format: settings.format, s3: settings.s3.clone() };
        if archive.base.starts_with("s3://") {
            credentials(&archive.s3)?;
        }
        Ok(Some(archive))
    }

    fn location(&self, shelf: Shelf, low: i64, high: i64) -> String {
        format!("{}{}/{low:019}-{high:019}.{}", self.base, shelf.as_str(), self.format.extension())
    }

    /// Whether it could have written this.
    pub(super) fn has(&self, location: &str) -> bool {
        location.starts_with(&self.base) && location.ends_with(self.format.extension())
    }
}

fn failed(location: &str, why: impl std::fmt::Display) -> Error {
    Error::Archive(format!("{location}: {why}"))
}

/// As a whole or not at all.
async fn put(s3: &S3Settings, location: &str, bytes: Vec<u8>) -> Result<(), Error> {
    if let Some(path) = location.strip_prefix("file://") {
        let path = PathBuf::from(path);
        let written = tokio::task::spawn_blocking(move || write(&path, &bytes)).await;
        return written
            .unwrap_or_else(|e| Err(io::Error::other(e)))
            .map_err(|e| failed(location, format!("can't be written: {e}")));
    }
    let response = request(s3, location, |bucket, credentials, key, http| {
        let url = bucket.put_object(Some(credentials), key).sign(REQUEST);
        http.put(url).body(bytes.clone())
    });
    let response = response.await?;
    let status = response.status();
    if status.is_success() { Ok(()) } else { Err(failed(location, refused(response, "can't be written").await)) }
}

/// None: there is no such file.
async fn get(s3: &S3Settings, location: &str) -> Result<Option<Vec<u8>>, Error> {
    if let Some(path) = location.strip_prefix("file://") {
        let path = PathBuf::from(path);
        let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
        return match read.unwrap_or_else(|e| Err(io::Error::other(e))) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(location, format!("can't be read: {e}"))),
        };
    }
    let response =
        request(s3, location, |bucket, credentials, key, http| http.get(bucket.get_object(Some(credentials), key).sign(REQUEST)));
    let response = response.await?;
    match response.status() {
        StatusCode::NOT_FOUND => Ok(None),
        status if status.is_success() => {
            let bytes = response.bytes().await.map_err(|e| failed(location, format!("can't be read: {}", e.without_url())))?;
            Ok(Some(bytes.to_vec()))
        }
        _ => Err(failed(location, refused(response, "can't be read").await)),
    }
}

/// The answer of the service, without what it was asked: addresses are signed.
async fn refused(response: reqwest::Response, what: &str) -> String {
    let status = response.status();
    let text = response.text().await.unwrap_or_default();
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map_or("", |(code, _)| code);
    let code: String = code.chars().filter(char::is_ascii_alphanumeric).take(64).collect();
    format!("{what}: {status} {code}").trim_end().to_owned()
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn credentials(s3: &S3Settings) -> Result<Credentials, Error> {
    let keys = match (&s3.access_key, &s3.secret_key) {
        (Some(key), Some(secret)) => Some((key.clone(), secret.clone(), s3.session_token.clone())),
        (None, None) => variable("AWS_ACCESS_KEY_ID")
            .zip(variable("AWS_SECRET_ACCESS_KEY"))
            .map(|(key, secret)| (key, secret, variable("AWS_SESSION_TOKEN"))),
        _ => return Err(Error::Config("retention.s3: access_key and secret_key go together".into())),
    };
    match keys {
        Some((key, secret, Some(token))) => Ok(Credentials::new_with_token(key, secret, token)),
        Some((key, secret, None)) => Ok(Credentials::new(key, secret)),
        None => Err(Error::Config(
            "retention.s3: no credentials; set access_key and secret_key, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into(),
        )),
    }
}

/// Asks the service, several times when it can't be reached or is out of order.
async fn request(
    s3: &S3Settings,
    location: &str,
    make: impl Fn(&Bucket, &Credentials, &str, &reqwest::Client) -> reqwest::RequestBuilder,
) -> Result<reqwest::Response, Error> {
    let Some((name, key)) = location.strip_prefix("s3://").and_then(|rest| rest.split_once('/')) else {
        return Err(failed(location, "is no address of a file"));
    };
    let region = s3.region.clone().or_else(|| variable("AWS_REGION")).unwrap_or_else(|| "us-east-1".into());
    let (endpoint, style) = match &s3.endpoint {
        Some(endpoint) => (endpoint.clone(), UrlStyle::Path),
        None => (format!("https://s3.{region}.amazonaws.com"), UrlStyle::VirtualHost),
    };
    let wrong = |e: &dyn std::fmt::Display| Error::Config(format!("retention.s3: {endpoint:?}: {e}"));
    let url = endpoint.parse().map_err(|e| wrong(&e))?;
    let bucket = Bucket::new(url, style, name.to_owned(), region).map_err(|e| wrong(&e))?;
    let credentials = credentials(s3)?;
    let http = reqwest::Client::builder().timeout(REQUEST).build().map_err(|e| failed(location, e))?;
    let mut tried = 1;
    loop {
        let answer = make(&bucket, &credentials, key, &http).send().await;
        match answer {
            Ok(response) if tried == TRIES || !response.status().is_server_error() => return Ok(response),
            Err(e) if tried == TRIES => {
                let mut why = e.without_url().to_string();
                why.insert_str(0, "the service can't be reached: ");
                return Err(failed(location, why));
            }
            _ => tokio::time::sleep(PAUSE * tried * tried).await,
        }
        tried += 1;
    }
}

/// Under another name first, and to the disk.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;

    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no file name"));
    };
    std::fs::create_dir_all(directory)?;
    let part = directory.join(format!(".{}.{:016x}", name.to_string_lossy(), fastrand::u64(..)));
    let written = (|| {
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).open(&part)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        // Otherwise a power cut could take the name back.
        #[cfg(unix)]
        std::fs::File::open(directory)?.sync_all()?;
        Ok(())
    })();
    if written.is_err() {
        // What isn't there can't be removed.
        let _ = std::fs::remove_file(&part);
    }
    written
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The ids in a file; or what is wrong with it, where that is sure.
pub(super) async fn read_back(settings: &RetentionSettings, file: &ArchiveRow) -> Result<Result<Vec<i64>, String>, Error> {
    let Some(bytes) = get(&settings.s3, &file.location).await? else {
        return Ok(Err(format!("{} is gone", file.location)));
    };
    let file = file.clone();
    let read = tokio::task::spawn_blocking(move || judge(&file, &bytes)).await;
    read.map_err(|e| Error::Archive(e.to_string()))
}

fn judge(file: &ArchiveRow, bytes: &[u8]) -> Result<Vec<i64>, String> {
    let sha256 = hex(&Sha256::digest(bytes));
    if sha256 != file.sha256 {
        return Err(format!("{} is not as it was written: its checksum is {sha256}, not {}", file.location, file.sha256));
    }
    let format =
        if file.location.ends_with(ArchiveFormat::Parquet.extension()) { ArchiveFormat::Parquet } else { ArchiveFormat::Ndjson };
    let rows = read(bytes, format).map_err(|e| format!("{}: {e}", file.location))?;
    let ids: Vec<i64> =
        rows.map(|row| row.map(|row| row.id)).collect::<Result<_, _>>().map_err(|e| format!("{}: {e}", file.location))?;
    let ends = (ids.first().copied(), ids.last().copied());
    if ends != (Some(file.low), Some(file.high)) || i64::try_from(ids.len()) != Ok(file.amount) {
        return Err(format!("{} holds {} messages, not {}", file.location, ids.len(), file.amount));
    }
    Ok(ids)
}

impl Retention {
    /// Writes a file of rows with ids above `after`: as many as have room in it. `location` is where it was to be before.
    pub(super) async fn write_file(
        &self,
        source: Source,
        mut after: i64,
        location: Option<&str>,
        round: &mut Round<'_>,
    ) -> Result<File, Error> {
        let Some(archive) = &self.archive else { return Ok(File::Nothing) };
        let store = self.store.retention();
        let shelf = source.shelf();
        let mut encoder = Encoder::new(archive.format)?;
        let mut ids: Vec<i64> = Vec::new();
        'file: loop {
            let (page, last) = match source {
                Source::All(shelf) => {
                    let page = store.sizes(shelf, after, i64::MAX, super::rows::PAGE).await?;
                    let last = page.last().map(|row| row.id);
                    (page, last)
                }
                Source::Old(shelf, term, below) => {
                    let page = store.old(shelf, after, below, term, super::rows::PAGE).await?;
                    (page.rows, page.last)
                }
            };
            let Some(last) = last else { break };
            for batch in batches(&page) {
                let rows = store.rows(shelf, &batch).await?;
                if rows.len() != batch.len() {
                    return Err(Error::Archive(format!(
                        "{} messages are gone that were to be archived",
                        batch.len() - rows.len()
                    )));
                }
                encoder.push(&rows)?;
                ids.extend(batch);
                if !round.goes_on(Progress::Archiving(i64::try_from(ids.len()).unwrap_or(i64::MAX))) {
                    return Ok(File::Stopped);
                }
                if encoder.len() >= FILE {
                    break 'file;
                }
            }
            after = last;
        }
        let (Some(&low), Some(&high)) = (ids.first(), ids.last()) else { return Ok(File::Nothing) };
        let bytes = encoder.finish()?;
        let mut file = ArchiveRow {
            id: 0,
            location: location.map_or_else(|| archive.location(shelf, low, high), str::to_owned),
            shelf,
            low,
            high,
            amount: i64::try_from(ids.len()).unwrap_or(i64::MAX),
            bytes: i64::try_from(bytes.len()).unwrap_or(i64::MAX),
            sha256: hex(&Sha256::digest(&bytes)),
            written_ms: None,
            removed_ms: None,
        };
        store.note(&file).await?;
        put(&archive.s3, &file.location, bytes).await?;
        let manifest = Manifest {
            file: file.location.rsplit('/').next().unwrap_or_default(),
            shelf,
            low,
            high,
            messages: file.amount,
            bytes: file.bytes,
            sha256: &file.sha256,
            format: archive.format,
        };
        put(&archive.s3, &format!("{}.json", file.location), serde_json::to_vec_pretty(&manifest)?).await?;
        // Those of a partition are read back all together, as a step of their own.
        if shelf.part().is_none() {
            read_back(&self.settings, &file).await?.map_err(Error::Archive)?;
        }
        file.written_ms = Some(0);
        store.note(&file).await?;
        round.report.files += 1;
        round.report.bytes += file.bytes;
        if !round.goes_on(Progress::Written) {
            return Ok(File::Stopped);
        }
        Ok(File::Written(file, ids))
    }
}

/// Ids that are read together: few enough that their messages have room in memory. One larger message goes alone.
fn batches(page: &[RowSize]) -> Vec<Vec<i64>> {
    let mut out: Vec<Vec<i64>> = Vec::new();
    let mut room = 0;
    for row in page {
        match out.last_mut() {
            Some(batch) if row.size <= room && batch.len() < BATCH.1 => batch.push(row.id),
            _ => {
                out.push(vec![row.id]);
                room = BATCH.0;
            }
        }
        room -= row.size;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_at_once_is_bounded() {
        let page =
            |sizes: &[i64]| -> Vec<RowSize> { sizes.iter().zip(1..).map(|(size, id)| RowSize { id, size: *size }).collect() };
        let mb = 1 << 20;
        assert_eq!(batches(&page(&[])), Vec::<Vec<i64>>::new());
        assert_eq!(batches(&page(&[100 * mb, 1, 7 * mb, mb, 9 * mb])), [vec![1], vec![2, 3], vec![4], vec![5]]);
        let many = batches(&page(&[0; 1001]));
        assert_eq!(many.iter().map(Vec::len).collect::<Vec<_>>(), [500, 500, 1]);
    }
}
