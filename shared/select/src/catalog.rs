//! The catalog of KCP, as runtimes see it.
//!
//! `visibility` holds the visibility rules, `snapshot` the catalog of each visibility class, and `desired` the form of an object in
//! a runtime. `removal_guard` limits mass removals, `holds` is the effect of held ones, and `releases` the accepted state.
//! `rollout` paces moved channels.

mod content;
pub mod desired;
pub mod holds;
pub mod releases;
pub mod removal_guard;
pub mod retirement;
pub mod rollout;
pub mod selector;
pub mod snapshot;
mod target;
pub mod visibility;

pub use self::{
    content::content_id,
    releases::confirmations,
    rollout::{RolloutBoard, RolloutMark, RolloutSlot},
    target::{ChannelTarget, VersionSource, VisibilityLabels},
};
