//! The reconcilers, each in the steps fetch, validate, build, apply, status.

pub mod ca_rotation;
pub mod catalog;
pub mod event_path;
pub mod forward;
pub mod kyma;
pub mod mandatory;
pub mod manifest;
pub mod module_rollout;
pub mod module_secrets;
pub(crate) mod requeues;
pub mod status;
pub mod windows;
