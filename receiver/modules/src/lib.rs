//! What is installed in the runtimes: reconcilers of Kymas, Manifests and the catalog, and tasks of the whole fleet.

pub mod ca_rotation;
pub mod catalog;
pub mod event_path;
pub mod forward;
pub mod kyma;
#[cfg(test)]
mod layers;
pub mod mandatory;
pub mod manifest;
pub mod module_rollout;
pub mod module_secrets;
mod requeues;
pub mod windows;
