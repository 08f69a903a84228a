//! Work queue keyed by Kyma or by Manifest: each key is reconciled at most once at a time; coalescing, fair between
//! runtimes, with priorities and backoff.
//!
//! Pure: time is an argument and randomness comes from a seed. The runtime table holds the queue of the Kymas of all shards
//! under one lock; [`manifest_queue`](super::manifest_queue) holds that of the Manifests under another, so that neither delays
//! the other.

mod schedule;
mod work;

pub use work::{Drift, MAX_DRIFTED_OBJECTS, Priority, QueuedWork, ReconcileOutcome, WorkSet};

pub(crate) use schedule::{DelayReason, Queue};
pub(crate) use work::{Verdict, merge_into};
