//! Processes that don't outlive their parent, and signals.

use std::path::Path;

use tokio::process::Command;

/// A command whose process is killed when its parent dies, however that dies. (The kernel does it, for a stopped process too.)
///
/// The kernel means the parent's *thread*: spawn it from one that lives as long as the process does.
pub fn mortal(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program).kill_on_drop(true);
    // Ctrl-C goes to the parent alone, which ends its children in its own way.
    command.process_group(0);
    command
}

/// Sends a signal (`STOP`, `CONT`, `TERM`, …) to a process.
///
/// # Errors
/// It doesn't exist, or isn't ours.
pub async fn signal(pid: u32, name: &str) -> Result<(), String> {
    let output = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).output().await;
    match output {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("kill -{name} {pid}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(e) => Err(format!("kill: {e}")),
    }
}
