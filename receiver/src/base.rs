//! Shared types of all layers: pause, take-over, caches of the control plane, content of polled files, error classes,
//! limits, replicas, their questions to each other, and small maps. No IO.

pub mod body_missing;
pub(crate) mod clock;
pub(crate) mod digest;
pub mod error_class;
pub(crate) mod flags;
pub(crate) mod foreign_text;
pub(crate) mod frame_limiter;
pub mod kymas;
pub mod labels;
pub(crate) mod last_good;
pub mod limits;
pub mod manifests;
pub mod pause;
pub mod peers;
pub mod plans;
pub mod replica;
pub mod short_map;
pub mod stores;
pub mod takeover;
pub mod unread;
pub mod versions;
