//! Kubernetes clusters, without Kyma's rules: bounded clients, reads and writes of single objects, the kinds that a cluster
//! serves and the versions in which it stores them, Leases and write fences, and the status of workloads.
//!
//! | Modules | Content |
//! |---|---|
//! | [`client`], [`leader`] | the client of the control plane: deadlines, counted requests, Leases, write fence |
//! | [`runtime_access`] | kubeconfigs as data, clients of runtimes, forbidden addresses, limits on responses |
//! | [`object`] | single objects: compared, converged, repaired within a budget |
//! | [`kinds`], [`stored_versions`] | the kinds that a cluster serves, and the versions in which it stores objects |
//! | [`workload`] | faults of pods; pure |
//! | [`flags`], [`limits`], [`error_class`], [`lookup`] | parsers of flags, shared limits, classes of errors, keys of caches |

pub mod body_deadline;
pub mod body_missing;
pub mod client;
pub mod error_class;
pub mod flags;
pub mod kinds;
pub mod leader;
pub mod limits;
pub mod lookup;
mod measured;
mod metrics;
pub mod object;
mod request_labels;
pub mod runtime_access;
pub mod state_map;
pub mod stored_versions;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod workload;
mod write_meter;

pub use metrics::Metrics;
pub use object::{FallbackMetrics, WriteBudgets, WriteMetrics};
pub use write_meter::{charge, metered};
