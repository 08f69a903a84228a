//! Shared types of all layers: keys, pause, take-over, caches of the control plane, content of polled files, error classes,
//! limits, addresses of hosts, shards, replicas, their questions to each other, and small maps. No IO, except that the root
//! certificates of the system are read at the start.

pub mod addresses;
pub mod body_missing;
pub(crate) mod clock;
pub mod error_class;
pub mod error_levels;
pub(crate) mod flags;
pub(crate) mod foreign_text;
pub(crate) mod frame_limiter;
pub mod key;
pub mod kymas;
pub mod labels;
pub(crate) mod last_good;
pub mod limits;
pub mod manifests;
pub mod pause;
pub mod peers;
pub mod plans;
pub(crate) mod random;
pub mod replica;
pub mod shard;
pub mod short_map;
pub mod stores;
pub mod system_roots;
pub mod takeover;
pub mod unread;
pub mod versions;
