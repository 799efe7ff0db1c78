//! Wall clocks that are wrong.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable that says by how many seconds a process's wall clock is off, for a process that is started with the
/// [library](skewing_library) in `LD_PRELOAD`.
pub const SKEW: &str = "SKEWED_CLOCK";

/// Builds the library that skews a child's wall clock into a directory, with the C compiler that links Rust programs.
///
/// # Errors
/// There is no `cc`, or it failed.
pub fn skewing_library(directory: &Path) -> Result<PathBuf, String> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/skewed_clock.c");
    let built = directory.join("skewed_clock.so");
    let output = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&built).args([source, "-ldl"]).output();
    let output = output.map_err(|e| format!("the C compiler cc: {e}"))?;
    if !output.status.success() {
        return Err(format!("cc {source}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(built)
}
