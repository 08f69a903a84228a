//! The receiver's side of Kubernetes: watches of the control plane, reads and writes of single objects, leader election
//! and write fence, the recorder of Events, clients of runtime clusters, the kinds
//! that these serve, the versions in which they store them, and the status of their workloads.

mod body_deadline;
pub mod client;
pub(crate) mod kinds;
pub mod leader;
mod metrics;
pub(crate) mod object;
pub mod recorder;
mod request_meter;
pub mod runtime_access;
pub mod shards;
pub mod state_map;
pub(crate) mod stored_versions;
pub(crate) mod watch;
pub(crate) mod workload;
mod write_meter;

pub use metrics::Metrics;
pub use object::{FallbackMetrics, WriteBudgets, WriteMetrics};
pub use watch::{CommonKymaParts, CommonParts};

#[cfg(test)]
pub(crate) use write_meter::charge;
pub(crate) use write_meter::metered;
