//! The receiver's side of Kubernetes: watches of the control plane, reads and writes of single objects, leader election
//! and write fence, the recorder of Events, and clients of runtime clusters.

pub mod client;
pub mod leader;
mod metrics;
pub(crate) mod object;
pub mod recorder;
pub mod runtime_access;
pub(crate) mod watch;

pub use metrics::Metrics;
pub use object::{WriteBudgets, WriteMetrics};
