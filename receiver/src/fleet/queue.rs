//! Work queue keyed by Kyma: each Kyma is reconciled at most once at a time; coalescing, fair, with priorities and
//! backoff.
//!
//! Pure: time is an argument and randomness comes from a seed. The runtime table holds the queue and the fleet under
//! one lock.

mod outcome;
mod queued_work;
mod schedule;
mod work_set;

pub use outcome::ReconcileOutcome;
pub use queued_work::{Drift, MAX_DRIFTED_OBJECTS, Priority, QueuedWork};
pub use work_set::WorkSet;

pub(crate) use queued_work::merge_into;
pub(crate) use schedule::{DelayReason, Queue};
