//! How much waits in a broker for those that receive from it.

/// What waits in one queue, or in one topic or stream for one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Messages that wait.
    pub messages: u64,
    /// Who receives them at the moment; None where the broker doesn't say.
    pub consumers: Option<u64>,
}
