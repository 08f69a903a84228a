//! Shared types of all layers: pause, take-over, caches of the control plane, versions, replicas, and their questions to each
//! other. No IO.

pub(crate) mod digest;
pub mod kymas;
pub mod manifests;
pub mod pause;
pub mod peers;
pub mod plans;
pub mod stores;
pub mod takeover;
pub mod unread;
pub mod versions;
