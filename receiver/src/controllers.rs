//! The reconcilers, each in the steps fetch, validate, build, apply, status.

pub mod ca_rotation;
pub mod catalog;
pub mod event_path;
pub mod evidence;
pub mod forward;
pub mod installer;
pub mod kyma;
pub mod mandatory;
pub mod manifest;
pub mod module_rollout;
pub mod module_secrets;
pub(crate) mod pending_removal;
pub mod pull_secret;
pub(crate) mod requeues;
pub mod rings;
pub mod status;
pub mod watcher;
pub mod windows;
