//! The log of each run, for people: one file per run, which the admin reads in pieces.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use super::wire::{LogPiece, shown};

/// A log that has this many bytes ends, but for the lines that say how the run ended.
const LARGEST: u64 = 1 << 20;

/// The admin is given at most this much at once; it asks for the rest.
const PIECE: usize = 256 << 10;

/// Logs of runs in one directory.
#[derive(Debug, Clone)]
pub(super) struct Logs {
    dir: PathBuf,
    /// Runs whose logs still grow.
    open: Arc<Mutex<BTreeSet<i64>>>,
}

impl Logs {
    pub(super) fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir, open: Arc::default() })
    }

    /// Ids are numbers, so that no path can be made of them.
    fn path(&self, log_id: i64) -> PathBuf {
        self.dir.join(format!("{log_id}.log"))
    }

    fn growing(&self) -> MutexGuard<'_, BTreeSet<i64>> {
        // Nothing panics while it is held.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new log. An old one with this id belongs to an admin that began to count anew.
    pub(super) fn start(&self, log_id: i64) -> RunLog {
        let path = self.path(log_id);
        let file = File::create(&path)
            .map_err(|e| tracing::warn!(path = %path.display(), error = %e, "the log of a run can't be written"))
            .ok();
        self.growing().insert(log_id);
        RunLog(Arc::new(Inner { log_id, logs: self.clone(), writer: Mutex::new(Writer { file, bytes: 0, full: false }) }))
    }

    /// Lines of a log from `from` on.
    pub(super) fn read(&self, log_id: i64, from: i64) -> LogPiece {
        // Asked before reading: what is written in between is read the next time.
        let growing = self.growing().contains(&log_id);
        match File::open(self.path(log_id)) {
            Ok(file) => {
                piece(file, from, growing).unwrap_or_else(|e| none(from, format!("the log can't be read: {e}"), !growing))
            }
            // Nothing has been written yet.
            Err(_) if growing => none(from, String::new(), false),
            Err(_) => none(from, "there is no log of this run here; old ones are removed".into(), true),
        }
    }

    /// Removes logs that were last written to longer ago than this.
    pub(super) fn sweep(&self, retention: Duration) -> io::Result<usize> {
        let Some(limit) = SystemTime::now().checked_sub(retention) else { return Ok(0) };
        let mut removed = 0;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let Some(log_id) = id(&entry.path(), "log") else { continue };
            let old = entry.metadata().and_then(|m| m.modified()).is_ok_and(|written| written < limit);
            if old && !self.growing().contains(&log_id) {
                fs::remove_file(entry.path())?;
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// The id that a file of ours is named after.
pub(super) fn id(path: &Path, extension: &str) -> Option<i64> {
    if path.extension()? != extension {
        return None;
    }
    path.file_stem()?.to_str()?.parse().ok()
}

fn none(from: i64, log_content: String, is_end: bool) -> LogPiece {
    LogPiece { from_line_num: from, to_line_num: 0, log_content, is_end }
}

fn piece(file: File, from: i64, growing: bool) -> io::Result<LogPiece> {
    let mut reader = BufReader::new(file);
    let (mut number, mut content, mut more) = (0, String::new(), false);
    let mut line = Vec::new();
    loop {
        line.clear();
        reader.read_until(b'\n', &mut line)?;
        // A line without an end is being written.
        if line.last() != Some(&b'\n') {
            break;
        }
        if number + 1 >= from && content.len() + line.len() > PIECE && !content.is_empty() {
            more = true;
            break;
        }
        number += 1;
        if number >= from {
            content.push_str(&String::from_utf8_lossy(&line));
        }
    }
    Ok(LogPiece { from_line_num: from, to_line_num: number, log_content: content, is_end: !growing && !more })
}

/// The log of one run. Ends with its last clone.
#[derive(Debug, Clone)]
pub(crate) struct RunLog(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    log_id: i64,
    logs: Logs,
    writer: Mutex<Writer>,
}

#[derive(Debug)]
struct Writer {
    file: Option<File>,
    bytes: u64,
    full: bool,
}

impl RunLog {
    /// Adds a line, unless the log is full.
    pub(crate) fn line(&self, text: &str) {
        self.write(text, false);
    }

    /// Adds a line that says how the run ended, however long the log is.
    pub(super) fn end(&self, text: &str) {
        self.write(text, true);
    }

    fn write(&self, text: &str, always: bool) {
        // Nothing panics while it is held.
        let mut writer = self.0.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if writer.full && !always {
            return;
        }
        let line = format!("{} {}\n", humantime::format_rfc3339_seconds(SystemTime::now()), shown(text));
        if !always && writer.bytes + line.len() as u64 > LARGEST {
            writer.full = true;
            writer.put("… (this log is full)\n");
            return;
        }
        writer.put(&line);
    }
}

impl Writer {
    fn put(&mut self, line: &str) {
        self.bytes += line.len() as u64;
        // In one piece, so that a reader sees whole lines. A disk that is full doesn't end the run.
        if let Some(file) = &mut self.file
            && let Err(e) = file.write_all(line.as_bytes())
        {
            tracing::warn!(error = %e, "the log of a run can't be written");
            self.file = None;
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.logs.growing().remove(&self.log_id);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Place;
    use super::*;

    #[test]
    fn lines_are_counted_from_one_and_the_end_is_told_when_all_was_read() {
        let place = Place::new();
        let logs = Logs::open(place.path().to_owned()).unwrap();
        let log = logs.start(5);
        assert_eq!(logs.read(5, 1), none(1, String::new(), false));
        for text in ["one", "two", "<three>"] {
            log.line(text);
        }
        let texts =
            |p: &LogPiece| -> Vec<String> { p.log_content.lines().map(|l| l.split_once(' ').unwrap().1.to_owned()).collect() };
        let all = logs.read(5, 1);
        assert_eq!(
            (texts(&all), all.from_line_num, all.to_line_num, all.is_end),
            (vec!["one".into(), "two".into(), "‹three›".into()], 1, 3, false)
        );
        assert_eq!(logs.read(5, 0).to_line_num, 3);
        let last = logs.read(5, 3);
        assert_eq!((texts(&last), last.from_line_num, last.to_line_num), (vec!["‹three›".to_owned()], 3, 3));
        let behind = logs.read(5, 4);
        assert_eq!((behind.log_content.as_str(), behind.to_line_num, behind.is_end), ("", 3, false));
        drop(log);
        assert!(logs.read(5, 4).is_end && logs.read(5, 1).is_end);
        let unknown = logs.read(6, 1);
        assert!(unknown.is_end && unknown.log_content.contains("no log of this run"), "{unknown:?}");
    }

    #[test]
    fn a_log_is_bounded_and_read_in_pieces() {
        let place = Place::new();
        let logs = Logs::open(place.path().to_owned()).unwrap();
        let log = logs.start(1);
        for _ in 0..3000 {
            log.line(&"x".repeat(1000));
        }
        log.end("the end");
        drop(log);
        assert!(fs::metadata(logs.path(1)).unwrap().len() < LARGEST + 200);
        let (mut from, mut pieces, mut text) = (1, 0, String::new());
        loop {
            let piece = logs.read(1, from);
            assert!(piece.log_content.len() <= PIECE);
            text.push_str(&piece.log_content);
            pieces += 1;
            from = piece.to_line_num + 1;
            if piece.is_end {
                break;
            }
        }
        assert_eq!(text.as_bytes(), fs::read(logs.path(1)).unwrap());
        assert!(pieces > 3 && text.ends_with("the end\n") && text.contains("this log is full"), "{pieces}");
    }

    #[test]
    fn old_logs_are_removed_and_nothing_else() {
        let place = Place::new();
        let logs = Logs::open(place.path().to_owned()).unwrap();
        drop(logs.start(1));
        let growing = logs.start(2);
        fs::write(place.path().join("notes.txt"), "mine").unwrap();
        assert_eq!(logs.sweep(Duration::from_secs(3600)).unwrap(), 0);
        let long_ago = SystemTime::now() - Duration::from_secs(7200);
        for name in ["1.log", "2.log", "notes.txt"] {
            File::open(place.path().join(name)).unwrap().set_modified(long_ago).unwrap();
        }
        assert_eq!(logs.sweep(Duration::from_secs(3600)).unwrap(), 1);
        assert!(!logs.path(1).exists() && logs.path(2).exists() && place.path().join("notes.txt").exists());
        drop(growing);
        assert_eq!(logs.sweep(Duration::from_secs(3600)).unwrap(), 1);
    }
}
