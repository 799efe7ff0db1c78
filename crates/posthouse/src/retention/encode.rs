//! How messages are written into files, and read from them.

use std::io::{BufRead, BufReader, Write};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::store::LogRow;
use crate::{ArchiveFormat, Error};

/// Rows of a file, by and by.
pub type Rows<'b> = Box<dyn Iterator<Item = Result<LogRow, Error>> + 'b>;

/// Reads the messages in a file of an archive, for example to look for one or to publish some once more.
///
/// # Errors
/// It is no such file. What is wrong further behind comes in its place.
pub fn read(bytes: &[u8], format: ArchiveFormat) -> Result<Rows<'_>, Error> {
    match format {
        ArchiveFormat::Ndjson => {
            let plain = zstd::stream::read::Decoder::new(bytes).map_err(unreadable)?;
            Ok(Box::new(BufReader::new(plain).split(b'\n').map(|line| parse(&line.map_err(unreadable)?))))
        }
        #[cfg(feature = "parquet")]
        ArchiveFormat::Parquet => super::parquet::read(bytes),
        #[cfg(not(feature = "parquet"))]
        ArchiveFormat::Parquet => Err(no_parquet()),
    }
}

#[cfg(not(feature = "parquet"))]
fn no_parquet() -> Error {
    Error::Config("retention.format: this was built without the feature \"parquet\"".into())
}

pub(super) fn unreadable(e: impl std::fmt::Display) -> Error {
    Error::Archive(format!("can't be read: {e}"))
}

pub(super) fn unwritable(e: impl std::fmt::Display) -> Error {
    Error::Archive(format!("messages can't be written: {e}"))
}

/// A file in the making, in memory.
pub(super) enum Encoder {
    Ndjson(zstd::stream::write::Encoder<'static, Vec<u8>>),
    #[cfg(feature = "parquet")]
    Parquet(super::parquet::Encoder),
}

impl Encoder {
    pub(super) fn new(format: ArchiveFormat) -> Result<Self, Error> {
        match format {
            ArchiveFormat::Ndjson => {
                let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 0).map_err(unwritable)?;
                encoder.include_checksum(true).map_err(unwritable)?;
                Ok(Self::Ndjson(encoder))
            }
            #[cfg(feature = "parquet")]
            ArchiveFormat::Parquet => Ok(Self::Parquet(super::parquet::Encoder::new()?)),
            #[cfg(not(feature = "parquet"))]
            ArchiveFormat::Parquet => Err(no_parquet()),
        }
    }

    pub(super) fn push(&mut self, rows: &[LogRow]) -> Result<(), Error> {
        match self {
            Self::Ndjson(encoder) => {
                for row in rows {
                    let mut line = serde_json::to_vec(&line(row))?;
                    line.push(b'\n');
                    encoder.write_all(&line).map_err(unwritable)?;
                }
                Ok(())
            }
            #[cfg(feature = "parquet")]
            Self::Parquet(encoder) => encoder.push(rows),
        }
    }

    /// Bytes so far.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Ndjson(encoder) => encoder.get_ref().len(),
            #[cfg(feature = "parquet")]
            Self::Parquet(encoder) => encoder.len(),
        }
    }

    pub(super) fn finish(self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Ndjson(encoder) => encoder.finish().map_err(unwritable),
            #[cfg(feature = "parquet")]
            Self::Parquet(encoder) => encoder.finish(),
        }
    }
}

/// One line. The payload is base64, whatever it is: nothing else holds every payload as it was.
#[derive(Serialize, Deserialize)]
struct Line {
    id: i64,
    message_id: String,
    #[serde(rename = "type")]
    kind: String,
    destination: String,
    key: Option<String>,
    payload: String,
    content_type: String,
    headers: Option<Box<RawValue>>,
    created_at: String,
    deliver_at: Option<String>,
    max_attempts: Option<i32>,
}

fn time(us: i64) -> String {
    let end = if us < 0 { jiff::Timestamp::MIN } else { jiff::Timestamp::MAX };
    jiff::Timestamp::from_microsecond(us).unwrap_or(end).to_string()
}

fn micros(time: &str) -> Result<i64, Error> {
    Ok(time.parse::<jiff::Timestamp>().map_err(unreadable)?.as_microsecond())
}

fn line(row: &LogRow) -> Line {
    // As it was written, but on one line: JSON has line breaks only between tokens. What isn't JSON becomes a string.
    let headers = row.headers.as_deref().map(|text| {
        let text = text.replace(['\n', '\r'], " ");
        RawValue::from_string(text.clone())
            .or_else(|_| serde_json::value::to_raw_value(&text))
            .unwrap_or_else(|_| RawValue::NULL.to_owned())
    });
    Line {
        id: row.id,
        message_id: row.message_id.clone(),
        kind: row.kind.clone(),
        destination: row.destination.clone(),
        key: row.key.clone(),
        payload: BASE64_STANDARD.encode(&row.payload),
        content_type: row.content_type.clone(),
        headers,
        created_at: time(row.created_us),
        deliver_at: row.deliver_us.map(time),
        max_attempts: row.max_attempts,
    }
}

fn parse(line: &[u8]) -> Result<LogRow, Error> {
    let line: Line = serde_json::from_slice(line).map_err(unreadable)?;
    Ok(LogRow {
        id: line.id,
        message_id: line.message_id,
        kind: line.kind,
        destination: line.destination,
        key: line.key,
        payload: BASE64_STANDARD.decode(&line.payload).map_err(unreadable)?,
        content_type: line.content_type,
        headers: line.headers.map(|headers| headers.get().to_owned()),
        created_us: micros(&line.created_at)?,
        deliver_us: line.deliver_at.as_deref().map(micros).transpose()?,
        max_attempts: line.max_attempts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: i64) -> LogRow {
        LogRow {
            id,
            message_id: format!("m{id}"),
            kind: "order.placed".into(),
            destination: "inventory".into(),
            key: None,
            payload: Vec::new(),
            content_type: "application/json".into(),
            headers: None,
            created_us: 1_700_000_000_123_456,
            deliver_us: None,
            max_attempts: None,
        }
    }

    fn rows() -> Vec<LogRow> {
        vec![
            LogRow { payload: b"{\"a\": 1}\n".to_vec(), key: Some("k\u{2028}\"".into()), ..row(1) },
            LogRow { payload: (0..=255).collect(), headers: Some(r#"{"b":1.10,"a":{}}"#.into()), ..row(2) },
            LogRow { deliver_us: Some(-1), max_attempts: Some(3), created_us: 0, ..row(i64::MAX) },
        ]
    }

    #[test]
    fn what_is_read_is_what_was_written() {
        for format in [ArchiveFormat::Ndjson, ArchiveFormat::Parquet] {
            if format == ArchiveFormat::Parquet && !cfg!(feature = "parquet") {
                continue;
            }
            let mut encoder = Encoder::new(format).unwrap();
            encoder.push(&rows()[..1]).unwrap();
            encoder.push(&rows()[1..]).unwrap();
            let bytes = encoder.finish().unwrap();
            let found: Vec<LogRow> = read(&bytes, format).unwrap().map(Result::unwrap).collect();
            assert_eq!(found, rows(), "{format:?}");
            let cut = &bytes[..bytes.len() - 5];
            assert!(read(cut, format).is_err() || read(cut, format).unwrap().any(|row| row.is_err()), "{format:?} cut off");
        }
    }

    #[test]
    fn a_line_is_for_people_too() {
        let odd = LogRow { headers: Some("{\n \"a\": 1}".into()), payload: b"hi".to_vec(), ..row(7) };
        assert_eq!(
            serde_json::to_string(&line(&odd)).unwrap(),
            r#"{"id":7,"message_id":"m7","type":"order.placed","destination":"inventory","key":null,"payload":"aGk=","content_type":"application/json","headers":{  "a": 1},"created_at":"2023-11-14T22:13:20.123456Z","deliver_at":null,"max_attempts":null}"#
        );
        assert_eq!(line(&LogRow { headers: Some("{".into()), ..row(7) }).headers.unwrap().get(), "\"{\"");
    }
}
