//! Objects of a module's version as they are written to a runtime cluster, as far as the module alone determines them, and
//! the changes by an upgrade to another version. Pure.

mod changes;
mod fields;
mod review;
mod risks;
mod shared;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::Serialize;
use serde_json::Value;
use tidewatch_api::{
    Manager, Manifest, ManifestSpec,
    key::KymaKey,
    names::{annotation, label},
};
use tidewatch_cluster::kinds::{KindCache, Kinds};

pub use changes::{ManagerChange, ObjectChange, Upgrade};
pub use fields::FieldChange;
pub use review::{Review, review};
pub use risks::{Risk, RiskCode};
pub use shared::{ComparedVersion, Conflict, conflicts};

pub use super::render::RenderError;
use super::{
    injected::SecretData,
    inventory::ObjectKey,
    ready::manager_of,
    render::{RenderSettings, RenderedObject, render},
};

/// Parts of the written objects that differ between Kymas or receivers, and that a preview leaves out.
pub const LEFT_OUT: [&str; 2] = [
    "the label app.kubernetes.io/component and the annotation operator.kyma-project.io/owned-by, which name the Manifest",
    "the image pull secret of the receiver",
];

/// A version of a module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VersionContent {
    /// Objects of the layer `raw-manifest`.
    pub objects: Vec<Value>,
    /// References of the images in the component descriptor.
    pub images: Vec<String>,
    /// The default module CR of the ModuleTemplate.
    pub default_cr: Option<Value>,
    /// The manager that the ModuleTemplate names.
    pub manager: Option<Manager>,
}

/// An object in a report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectIdentity {
    /// API group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Namespace; `None` for cluster-scoped kinds, and if only the runtime cluster knows the scope of the kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
}

/// The objects of a version as they are written to a runtime cluster, without the parts of [`LEFT_OUT`].
#[derive(Clone, Debug, PartialEq)]
pub struct AppliedObjects {
    rendered: Vec<RenderedObject>,
    /// The workload that decides on the readiness of the module.
    pub manager: Option<ObjectIdentity>,
    /// Kinds whose scope only the cluster knows, so that the namespaces of their objects are those of the version.
    pub undecided: BTreeSet<String>,
}

impl VersionContent {
    /// The objects of the version, without repetitions: of several objects with equal group, kind, namespace and name, the
    /// engine writes the first one.
    pub fn packed(&self) -> impl Iterator<Item = &Value> {
        let mut seen = BTreeSet::new();
        self.objects.iter().filter(move |object| seen.insert(ObjectKey::of(object)))
    }

    /// Renders the objects as the engine writes them: in the order of their stages, with namespaces by the scope of the
    /// kinds of Kubernetes and of the module's own CRDs, with the images of the component descriptor, ownership labels and
    /// annotations, and without status and other state of a server.
    ///
    /// # Errors
    /// An object is malformed, and no runtime cluster would get the version.
    pub fn applied(&self) -> Result<AppliedObjects, RenderError> {
        let manifest = self.manifest();
        let kinds = kinds_of(self.objects.iter());
        let secrets = SecretData::new();
        let settings = RenderSettings { manifest: &manifest, pull_secret: None, secrets: &secrets, kinds: &kinds };
        let mut rendered = render(&self.objects, &settings)?;
        rendered.iter_mut().for_each(|object| leave_out_owner(&mut object.body));
        let manager = manager_of(&manifest, rendered.iter().map(|object| (&object.key, object.version.as_str())));
        let manager = manager.map(|manager| ObjectIdentity::new(&manager.key, &manager.version));
        let undecided = rendered.iter().filter(|object| !object.served);
        let undecided = undecided.map(|object| kind_of(&object.key.group, &object.key.kind)).collect();
        Ok(AppliedObjects { rendered, manager, undecided })
    }

    /// A Manifest of this version, without a Kyma.
    fn manifest(&self) -> Manifest {
        let images = Some(self.images.clone().into());
        let manager = self.manager.clone().map(Into::into);
        let spec = ManifestSpec { localized_images: images, manager, ..ManifestSpec::default() };
        Manifest::new("", spec)
    }
}

/// Kinds that are known without a runtime cluster: those of Kubernetes, and of the CRDs among these objects.
fn kinds_of<'a>(objects: impl Iterator<Item = &'a Value>) -> Kinds {
    let mut kinds = KindCache::default().of(&KymaKey::new("", ""), 0);
    objects.for_each(|object| kinds.define(object));
    kinds
}

/// Removes what names the Manifest.
fn leave_out_owner(body: &mut Value) {
    for (member, key) in [("labels", label::COMPONENT), ("annotations", annotation::OWNED_BY)] {
        if let Some(members) = body["metadata"][member].as_object_mut() {
            members.remove(key);
        }
    }
}

/// `<kind>.<group>`, as kubectl names kinds.
fn kind_of(group: &str, kind: &str) -> String {
    let dot = if group.is_empty() { "" } else { "." };
    format!("{kind}{dot}{group}")
}

impl AppliedObjects {
    /// The objects in the order of their application.
    pub fn bodies(&self) -> impl Iterator<Item = &Value> {
        self.rendered.iter().map(|object| &object.body)
    }

    /// Objects by identity.
    fn by_key(&self) -> BTreeMap<&ObjectKey, &RenderedObject> {
        self.rendered.iter().map(|object| (&object.key, object)).collect()
    }
}

impl ObjectIdentity {
    fn new(key: &ObjectKey, version: &str) -> Self {
        let ObjectKey { group, kind, namespace, name } = key;
        let slash = if group.is_empty() { "" } else { "/" };
        Self {
            api_version: format!("{group}{slash}{version}"),
            kind: kind.clone(),
            namespace: Some(namespace.clone()).filter(|namespace| !namespace.is_empty()),
            name: name.clone(),
        }
    }

    fn of_rendered(object: &RenderedObject) -> Self {
        Self::new(&object.key, &object.version)
    }
}

impl fmt::Display for ObjectIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, namespace, name, .. } = self;
        write!(f, "{kind} ")?;
        namespace.iter().try_for_each(|namespace| write!(f, "{namespace}/"))?;
        f.write_str(name)
    }
}
