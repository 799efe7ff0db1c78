//! Posthouse's protocols as state machines, all of whose states can be gone through. See `docs/model.md`.

mod digest;
pub mod inbox;
pub mod relay;
mod search;

pub use search::{Live, Stuck, settles};
