//! `posthouse completions`.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;

/// Writes the script of a shell to stdout.
pub(crate) fn run(shell: Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "posthouse", &mut script);
    crate::output::say(String::from_utf8_lossy(&script).trim_end());
}
