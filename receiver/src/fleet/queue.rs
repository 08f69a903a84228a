//! Which Kyma is worked on next: keyed by Kyma, each at most once in work, coalescing, fair, with priorities and backoff.
//!
//! Pure: time comes in as an argument and randomness from a seed. `hub` holds the queue in one lock with the fleet.

mod outcome;
mod schedule;
mod wanted;
mod works;

pub use outcome::Outcome;
pub use wanted::{Drift, MAX_DRIFT, Priority, Wanted};
pub use works::Works;

pub(crate) use schedule::{Later, Queue};
