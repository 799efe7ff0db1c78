//! Commands of the bench as a user starts them.

mod chaos;
mod peers;
