//! The receiver's side of Kubernetes: watches of the control plane, leader election and write fence, the recorder of
//! Events, and clients of runtime clusters.

pub mod client;
pub mod leader;
mod metrics;
pub(crate) mod object;
pub mod recorder;
pub mod runtime_access;
pub(crate) mod watch;

pub use metrics::Metrics;
