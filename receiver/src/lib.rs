//! The receiver: verifies the agents' events and reconciles the runtimes they come from.

pub mod key;
