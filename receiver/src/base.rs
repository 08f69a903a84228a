//! Shared types of all layers: pause, take-over, caches of the control plane, error classes, limits, replicas, and their questions
//! to each other. No IO.

pub mod body_missing;
pub(crate) mod digest;
pub mod error_class;
pub(crate) mod flags;
pub mod kymas;
pub mod labels;
pub mod limits;
pub mod manifests;
pub mod pause;
pub mod peers;
pub mod plans;
pub mod replica;
pub mod stores;
pub mod takeover;
pub mod unread;
pub mod versions;
