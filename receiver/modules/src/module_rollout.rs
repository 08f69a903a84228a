//! Ring rollout of modules: a moved channel, or a moved mandatory version, reaches growing shares of the runtimes, and
//! halts by itself when upgraded modules fail.
//!
//! [`tidewatch_select::module_rollout`] assesses the runtimes of a rollout and computes its next step, so that no more can fail
//! than the limit allows. `task` drives the rollouts, and persists them in a ConfigMap of KCP. A step is stored before it takes
//! effect, so that another receiver can continue from any point. Manifests record which runtimes were upgraded, and from which
//! state.

mod grants;
mod metrics;
mod task;

pub use metrics::Metrics;
pub use task::{Dependencies, ModuleRollouts};
