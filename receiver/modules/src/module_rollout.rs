//! Ring rollout of modules: a moved channel, or a moved mandatory version, reaches growing shares of the runtimes, and
//! halts by itself when upgraded modules fail.
//!
//! Pure modules: `members` assesses the runtimes of a rollout, `decide` computes its next step and the runtimes that get
//! the version now, so that no more can fail than the limit allows. `store` persists the rollouts in a ConfigMap of KCP,
//! and `task` drives them. A step is stored before it takes effect, so that another receiver can continue from any
//! point; which runtimes were upgraded, and from which state, is recorded in their Manifests. `view` shows the rollouts to
//! operators.

mod grants;
mod metrics;
mod task;

pub use metrics::Metrics;
pub use task::{Dependencies, RolloutTask};
