//! Rings of a change that reaches growing shares of the runtimes: the shares, the order of the runtimes, and the next
//! ring. Pure.
//!
//! The upgrade of agents and the rollout of modules use it; each has its own state, assessment and halt.

mod order;
mod shares;

pub use order::Ring;
pub use shares::{ParseRingsError, ParseShareError, Rings, Share};

pub use order::{Candidate, Order, rank};
