//! Rings of a staged change, which reaches growing shares of the runtimes: the shares, the order of the runtimes, the next ring,
//! and the rules that both changes have in common. Pure.
//!
//! The upgrade of agents and the rollout of modules use it; each has its own state, assessment and halt.

mod order;
mod rules;
mod shares;

pub use order::{Candidate, Order, Ring, rank};
pub use rules::{Criteria, MAX_NAMED, Rules, first_names};
pub use shares::{ParseRingsError, ParseShareError, Rings, Share};
