//! What every store has to do, one behaviour per file.

mod admin;
mod alerts;
mod duty;
mod groups;
mod house;
mod ids;
mod membership;
mod migrate;
mod order;
mod outcomes;
mod overview;
mod partitions;
mod problems;
mod publish;
mod reading;
mod runs;
pub(crate) mod tables;
