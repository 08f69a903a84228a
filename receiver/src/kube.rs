//! The receiver's side of Kubernetes: watches of the control plane, leader election and write fence, the recorder of Events, and
//! clients of runtime clusters.

pub(crate) mod client;
pub(crate) mod follow;
pub mod leader;
mod metrics;
pub(crate) mod object;
pub mod record;
pub mod runtime_access;

pub use metrics::Metrics;
