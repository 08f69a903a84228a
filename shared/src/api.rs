//! The custom resources of `operator.kyma-project.io/v1beta2`, one file per kind.
//!
//! An object that was read, changed and written again has every other member as it was read, whoever wrote it:
//!
//! * what the CRD requires is a plain field, everything else an [`Option`], so that absent, `[]` and `{}` stay apart; what an
//!   absent member means is told by a method of the same name or by `is_…`;
//! * members that these types do not know are kept in a field `other`;
//! * what is not ours to understand (component descriptors, module CRs, layer sources) stays [`serde_json::Value`].
//!
//! The schemas that come from these types are finished in [`crds`].

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
    module_release_meta::{Channel, Mandatory, ModuleReleaseMeta, ModuleReleaseMetaSpec, ModuleVersion},
    module_template::{CustomStateCheck, Icon, Info, Link, ModuleTemplate, ModuleTemplateSpec},
    parts::{
        Condition, ConditionStatus, CustomResourcePolicy, Gvk, LastOperation, Manager, Other, PartialMeta,
        TrackingObject,
    },
    state::{State, UnknownState},
    watcher::{Gateway, ServiceInfo, WatchField, WatchableGvr, Watcher, WatcherSpec, WatcherStatus},
};
