//! Upgrades of agents in stages: a new image reaches a share of the runtimes, then a larger one, and stops by itself when those that have
//! it do worse than the others.
//!
//! `rollout` is how far it is, and what each runtime gets in it; `decide` is what comes next: both pure. `table` remembers how each
//! runtime stands, `store` keeps the roll-out in a ConfigMap of KCP, and `task` carries it on. What a step changes is stored before it
//! takes effect, so that a receiver that ends anywhere is continued by the next one.

mod course;
mod decide;
mod flags;
mod metrics;
mod rollout;
mod store;
mod table;
mod task;

pub use course::Course;
pub use flags::{Flags, InvalidShare, InvalidStages, Share, Stages};
pub use metrics::Metrics;
pub use store::{CONFIG_MAP, Keep};
pub use task::{Rooms, Upgrade};

pub(super) use rollout::{Decided, Image, Rollout};
