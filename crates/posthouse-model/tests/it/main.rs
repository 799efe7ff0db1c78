//! Goes through all states of the models. `--nocapture` shows how many there are, and how each protection's absence is found.

mod inbox;
mod relay;
mod support;
