//! What tests and fault runs break things with: servers of their own that may be killed, a network that fails, processes that
//! don't outlive their parent, and clocks that are wrong.
//!
//! Everything here is on this machine: `scripts/services` runs the servers, and nothing but loopback is used.

mod clock;
mod process;
mod proxy;
mod server;

pub use clock::{SKEW, skewing_library};
pub use process::{mortal, signal};
pub use proxy::{Mode, Proxy};
pub use server::{Kind, Server, free_ports};

/// The workspace.
fn root() -> &'static std::path::Path {
    std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
