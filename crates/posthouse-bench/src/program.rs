//! The program under test.

use std::path::{Path, PathBuf};

use crate::database::must;

/// The server's program: the one that is named, else the one in the directory of this one. Without it the run ends.
pub(crate) fn posthouse(named: Option<&Path>) -> PathBuf {
    let here = must("find this program", std::env::current_exe());
    let beside = || here.with_file_name(format!("posthouse{}", std::env::consts::EXE_SUFFIX));
    let program = named.map_or_else(beside, Path::to_owned);
    if !program.exists() {
        eprintln!(
            "there is no {}; build it with `cargo build -p posthouse-server`, or name it with --posthouse",
            program.display()
        );
        std::process::exit(3);
    }
    must("find the server's program", program.canonicalize())
}
