//! Brokers that die and come back.
