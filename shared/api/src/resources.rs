//! The custom resources of `operator.kyma-project.io/v1beta2`, one file per kind.
//!
//! Reading an object, changing it and writing it back preserves all other members, regardless of their writer:
//!
//! * Members that the CRD requires are plain fields, all others are an [`Option`], so that absent, `[]` and `{}` remain
//!   distinct. A method of the same name, or `is_…`, applies the default for an absent member.
//! * Members unknown to these types are kept in the field `other`.
//! * Members that this crate does not interpret (component descriptors, module CRs, layer sources) are
//!   [`serde_json::Value`]s.
//!
//! The doc comments of the types are the descriptions in the CRDs, as `kubectl explain` shows them. [`crds`] completes
//! the derived schemas.

pub mod crds;
mod kyma;
mod manifest;
mod module_release_meta;
mod module_template;
mod parts;
mod schema;
mod state;
mod watcher;

pub use self::{
    kyma::{Kyma, KymaSpec, KymaStatus, Module, ModuleStatus},
    manifest::{ImageSpec, ImageType, Install, Manifest, ManifestSpec, ManifestStatus, Resource},
    module_release_meta::{Channel, Mandatory, ModuleReleaseMeta, ModuleReleaseMetaSpec, ModuleVersion, Withdrawal},
    module_template::{CustomStateCheck, Icon, Info, Link, ModuleTemplate, ModuleTemplateSpec},
    parts::{Condition, CustomResourcePolicy, Gvk, LastOperation, Manager, Other, PartialMeta, TrackingObject},
    state::State,
    watcher::{Gateway, ServiceInfo, WatchField, WatchableGvr, Watcher, WatcherSpec, WatcherStatus},
};
