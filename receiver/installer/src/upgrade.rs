//! Upgrades agents in stages: a new image reaches a growing share of the runtimes, and halts by itself when upgraded
//! runtimes fare worse than the others.
//!
//! Pure modules: `state` is the progress of an upgrade and the image of each runtime in it, `members` and `summary` describe
//! the runtimes of a replica and of the fleet, `decide` computes the next step. `table` assesses each runtime over time,
//! `assessor` those of a replica, `store` reads the state from a ConfigMap of KCP, `handle` shares it with the installer, and
//! `task` drives the upgrade. A step is stored before it takes effect, so that another receiver can continue from any point.

mod assessor;
mod decide;
mod flags;
mod handle;
mod members;
mod metrics;
mod state;
mod store;
mod summary;
mod table;
mod task;

pub use flags::Flags;
pub use handle::UpgradeHandle;
pub use metrics::Metrics;
pub use store::CONFIG_MAP;
pub use task::Upgrade;

pub(super) use state::{Image, ImageDecision, UpgradeState};
