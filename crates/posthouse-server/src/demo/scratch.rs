//! The directory of a demo's files, gone when the demo is.

use std::path::{Path, PathBuf};

use super::Failure;

/// A fresh directory that is removed on drop unless it is kept.
#[derive(Debug)]
pub(super) struct Scratch {
    dir: PathBuf,
    keep: bool,
}

impl Scratch {
    pub(super) fn new(keep: bool) -> Result<Self, Failure> {
        let dir = std::env::temp_dir().join(format!("posthouse-demo-{}-{:08x}", std::process::id(), fastrand::u32(..)));
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        // Fails if there is one already: never works in, nor removes, what somebody else has put there.
        builder
            .create(&dir)
            .map_err(Failure::io(format!("can't create {} (set TMPDIR to a directory that can be written)", dir.display())))?;
        Ok(Self { dir, keep })
    }

    pub(super) fn path(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        if let Err(e) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("posthouse demo: {} is left behind: {e}", self.dir.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_go_with_the_demo_unless_they_are_kept() {
        for keep in [false, true] {
            let scratch = Scratch::new(keep).unwrap();
            let dir = scratch.path().to_owned();
            std::fs::write(dir.join("shop.db"), "x").unwrap();
            drop(scratch);
            assert_eq!(dir.exists(), keep);
        }
    }
}
