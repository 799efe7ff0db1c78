//! Runs whose result no admin has taken yet, on disk: one file each, from the moment that a run is accepted.
//!
//! So a result outlives an admin that is down and a process that ends, and a run that ended with its process is told as failed
//! by the next one. Files survive the process; nothing is flushed for the sake of a power failure, after which the admin gives
//! up on runs by itself.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::log::id;
use super::wire::Form;

/// A run that was accepted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) log_id: i64,
    pub(super) job_id: i64,
    /// The admin's date of it, in milliseconds.
    pub(super) date: i64,
    /// How its admin takes results.
    pub(super) form: Form,
    /// The place of its result among others; later ones have higher numbers.
    pub(super) place: u64,
    /// None: it waits or runs.
    pub(super) result: Option<Outcome>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Outcome {
    pub(super) code: u16,
    pub(super) message: String,
    /// In milliseconds since 1970.
    pub(super) at: i64,
}

#[derive(Debug)]
pub(super) struct Shelf {
    dir: PathBuf,
    /// Held as long as this process uses the directory.
    _lock: File,
}

impl Shelf {
    /// Opens a directory for this process alone, and reads what is there, in the order in which results came.
    pub(super) fn open(dir: PathBuf) -> io::Result<(Self, Vec<Kept>)> {
        fs::create_dir_all(&dir)?;
        let lock = File::create(dir.join("lock"))?;
        lock.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => io::Error::other("is used by another process"),
            TryLockError::Error(e) => e,
        })?;
        let mut all = Vec::new();
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let Some(log_id) = id(&path, "json") else { continue };
            match fs::read(&path).map_err(|e| e.to_string()).and_then(|b| serde_json::from_slice(&b).map_err(|e| e.to_string())) {
                Ok(kept) => {
                    let kept: Kept = kept;
                    if kept.log_id == log_id {
                        all.push(kept);
                    }
                }
                Err(error) => tracing::warn!(path = %path.display(), error, "the result of a run can't be read and stays unsaid"),
            }
        }
        all.sort_unstable_by_key(|k| (k.place, k.log_id));
        Ok((Self { dir, _lock: lock }, all))
    }

    fn path(&self, log_id: i64) -> PathBuf {
        self.dir.join(format!("{log_id}.json"))
    }

    /// Writes it, as a whole or not at all.
    pub(super) fn put(&self, kept: &Kept) -> io::Result<()> {
        let text = serde_json::to_vec(kept).map_err(io::Error::other)?;
        let new = self.dir.join(format!("{}.new", kept.log_id));
        fs::write(&new, text)?;
        fs::rename(new, self.path(kept.log_id))
    }

    pub(super) fn remove(&self, log_id: i64) -> io::Result<()> {
        match fs::remove_file(self.path(log_id)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Place;
    use super::*;

    fn kept(log_id: i64, place: u64) -> Kept {
        let result = Some(Outcome { code: 200, message: "ok".into(), at: 5 });
        Kept { log_id, job_id: 1, date: 2, form: Form::Object, place, result }
    }

    #[test]
    fn what_is_kept_is_there_again_in_its_order() {
        let place = Place::new();
        let (shelf, all) = Shelf::open(place.path().to_owned()).unwrap();
        assert!(all.is_empty());
        for (log_id, place) in [(1, 9), (2, 8), (30, 7), (-4, 6)] {
            shelf.put(&kept(log_id, place)).unwrap();
        }
        shelf.remove(2).unwrap();
        shelf.remove(2).unwrap();
        drop(shelf);
        fs::write(place.path().join("8.json"), "{").unwrap();
        fs::write(place.path().join("9.new"), "{").unwrap();
        let (_shelf, all) = Shelf::open(place.path().to_owned()).unwrap();
        assert_eq!(all, [kept(-4, 6), kept(30, 7), kept(1, 9)]);
    }

    #[test]
    fn a_directory_belongs_to_one_process() {
        let place = Place::new();
        let (first, _) = Shelf::open(place.path().to_owned()).unwrap();
        let refused = Shelf::open(place.path().to_owned()).unwrap_err();
        assert!(refused.to_string().contains("another process"), "{refused}");
        drop(first);
        Shelf::open(place.path().to_owned()).unwrap();
    }
}
