//! Whole Kubernetes control planes as plain processes on loopback, without root.

pub mod apiserver;
pub mod audit;
pub mod binaries;
pub mod cluster;
pub mod credentials;
pub mod etcd;
pub mod workloads;

pub use apiserver::Admission;
pub use binaries::{Binaries, Tool};
pub use cluster::Cluster;
pub use credentials::ClusterUser;
