//! What the catalog of a runtime shall hold, computed once per class.

use std::{collections::BTreeMap, fmt, sync::Arc};

use aws_lc_rs::digest;
use kube::core::{ApiResource, GroupVersionKind};
use serde::Serialize;
use serde_json::{Map, Value, json};
use thiserror::Error;
use tidewatch_shared::{
    api::{ModuleReleaseMeta, ModuleTemplate},
    hex,
    names::{GROUP, SKR_NAMESPACE, VERSION, label},
};

/// kubectl's copy of what was applied in KCP; it means nothing in a runtime.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Why a catalog cannot be computed.
#[derive(Debug, Error)]
pub enum ComputeError {
    /// A custom resource does not turn into JSON.
    #[error("{kind} {name} has no JSON form")]
    Serialize {
        /// Which kind.
        kind: Kind,
        /// Which object.
        name: String,
        /// Why.
        source: serde_json::Error,
    },
}

/// The two kinds of a catalog. Templates come first: they go in before the release metas that point to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// ModuleTemplate.
    Template,
    /// ModuleReleaseMeta.
    ReleaseMeta,
}

impl Kind {
    /// Both, in the order in which they go in.
    pub const ALL: [Self; 2] = [Self::Template, Self::ReleaseMeta];

    /// The plural name in the API's paths.
    #[must_use]
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Template => "moduletemplates",
            Self::ReleaseMeta => "modulereleasemetas",
        }
    }

    /// The kind in `kind`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Template => "ModuleTemplate",
            Self::ReleaseMeta => "ModuleReleaseMeta",
        }
    }

    /// How kube addresses it.
    #[must_use]
    pub fn api_resource(self) -> ApiResource {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, VERSION, self.name()), self.resource())
    }

    /// The kind with this plural name.
    #[must_use]
    pub fn of_resource(resource: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.resource() == resource)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.resource())
    }
}

/// An object of the catalog in a runtime; its namespace is always [`SKR_NAMESPACE`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// Its kind.
    pub kind: Kind,
    /// Its name. Shared: thousands of runtimes remember the same names.
    pub name: Arc<str>,
}

impl ObjectId {
    /// An id.
    #[must_use]
    pub fn new(kind: Kind, name: &str) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

/// SHA-256 of what an object shall be, as JSON with sorted keys.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// Hashes a value: the same content has the same hash, whatever the order of its keys was.
    #[must_use]
    pub fn of(value: &Value) -> Self {
        // `Value` keeps its keys sorted (no `preserve_order` anywhere) and prints each value in one way.
        let mut hash = [0; 32];
        hash.copy_from_slice(digest::digest(&digest::SHA256, value.to_string().as_bytes()).as_ref());
        Self(hash)
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

/// An object as it shall be in a runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Which object.
    pub id: ObjectId,
    /// The whole body of a server-side apply: type, name, namespace, labels, annotations and everything else that the
    /// object holds in KCP, less what belongs to KCP's copy alone.
    pub body: Value,
    /// Of `body`.
    pub hash: ContentHash,
    /// The templates that a release meta's channels point to.
    pub needs: Vec<Arc<str>>,
}

/// What all runtimes of one class shall have.
#[derive(Debug)]
pub struct Wanted {
    objects: BTreeMap<ObjectId, Arc<Desired>>,
    /// Hash of all objects' hashes, in their order.
    content: String,
}

impl Wanted {
    /// Makes a catalog of its objects.
    #[must_use]
    pub fn new(objects: impl IntoIterator<Item = Desired>) -> Self {
        let objects: BTreeMap<_, _> = objects.into_iter().map(|object| (object.id.clone(), Arc::new(object))).collect();
        let mut hash = digest::Context::new(&digest::SHA256);
        objects.values().for_each(|object| hash.update(&object.hash.0));
        Self { content: hex::encode(hash.finish().as_ref()), objects }
    }

    /// The objects, templates first.
    pub fn objects(&self) -> impl Iterator<Item = &Arc<Desired>> {
        self.objects.values()
    }

    /// The same for the same objects: names are part of their content.
    #[must_use]
    pub fn content(&self) -> &str {
        &self.content
    }

    /// One of them.
    #[must_use]
    pub fn get(&self, id: &ObjectId) -> Option<&Arc<Desired>> {
        self.objects.get(id)
    }
}

/// A template as it shall be in a runtime.
///
/// # Errors
/// [`ComputeError`].
pub fn template(template: &ModuleTemplate) -> Result<Desired, ComputeError> {
    let body = carried(Kind::Template, template.metadata.name.as_deref(), template)?;
    Ok(desired(Kind::Template, body, Vec::new()))
}

/// A release meta as it shall be in a runtime: with these channels only (channel → template).
///
/// # Errors
/// [`ComputeError`].
pub fn release_meta(meta: &ModuleReleaseMeta, channels: &BTreeMap<&str, String>) -> Result<Desired, ComputeError> {
    let mut body = carried(Kind::ReleaseMeta, meta.metadata.name.as_deref(), meta)?;
    if let Some(Value::Array(entries)) = body.pointer_mut("/spec/channels") {
        entries.retain(|entry| entry["channel"].as_str().is_some_and(|channel| channels.contains_key(channel)));
    }
    Ok(desired(Kind::ReleaseMeta, body, channels.values().map(|name| name.as_str().into()).collect()))
}

fn desired(kind: Kind, body: Value, needs: Vec<Arc<str>>) -> Desired {
    let id = ObjectId::new(kind, body["metadata"]["name"].as_str().unwrap_or_default());
    Desired { id, hash: ContentHash::of(&body), body, needs }
}

/// The object as JSON, so that no field is lost, with metadata made anew: nothing that KCP's API server or KCP's
/// controllers keep on it (versions, owners, finalizers, managed fields) has a meaning elsewhere.
fn carried(kind: Kind, name: Option<&str>, object: &impl Serialize) -> Result<Value, ComputeError> {
    let name = name.unwrap_or_default();
    let mut body = serde_json::to_value(object).map_err(|source| ComputeError::Serialize {
        kind,
        name: name.to_owned(),
        source,
    })?;
    let strings = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut labels: Map<String, Value> = strings(&body["metadata"]["labels"]);
    labels.insert(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.into());
    let mut annotations = strings(&body["metadata"]["annotations"]);
    annotations.remove(LAST_APPLIED);
    let mut metadata = json!({"name": name, "namespace": SKR_NAMESPACE, "labels": labels});
    if !annotations.is_empty() {
        metadata["annotations"] = Value::Object(annotations);
    }
    body["apiVersion"] = format!("{GROUP}/{VERSION}").into();
    body["kind"] = kind.name().into();
    body["metadata"] = metadata;
    if let Some(members) = body.as_object_mut() {
        members.remove("status");
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(metadata: Value) -> ModuleReleaseMeta {
        serde_json::from_value(json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
            "metadata": metadata, "spec": {"moduleName": "m", "ocmComponentName": "kyma-project.io/module/m",
                "channels": [{"channel": "regular", "version": "1.0.0"}, {"channel": "fast", "version": "2.0.0"}]}}))
        .unwrap()
    }

    #[test]
    fn labels_and_annotations_travel_and_what_is_kcps_own_does_not() {
        let full =
            meta(json!({"name": "m", "namespace": "kcp-system", "uid": "u", "resourceVersion": "1", "generation": 4,
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["f"], "managedFields": [{"manager": "x"}],
            "ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x"}],
            "labels": {"l": "1", "operator.kyma-project.io/managed-by": "lifecycle-manager"},
            "annotations": {"a": "1", LAST_APPLIED: "{}"}}));
        let desired = release_meta(&full, &BTreeMap::from([("fast", "m-2.0.0".to_owned())])).unwrap();
        assert_eq!(
            desired.body,
            json!({"apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta",
                "metadata": {"name": "m", "namespace": "kyma-system", "annotations": {"a": "1"},
                    "labels": {"l": "1", "operator.kyma-project.io/managed-by": "kyma"}},
                "spec": {"moduleName": "m", "ocmComponentName": "kyma-project.io/module/m",
                    "channels": [{"channel": "fast", "version": "2.0.0"}]}})
        );
        assert_eq!(desired.needs, [Arc::from("m-2.0.0")]);
        assert_eq!(desired.id.to_string(), "modulereleasemetas/m");
    }

    #[test]
    fn the_hash_follows_the_content_and_nothing_else() {
        let channels = BTreeMap::from([("fast", "m-2.0.0".to_owned())]);
        let hash = |metadata| release_meta(&meta(metadata), &channels).unwrap().hash;
        let plain = hash(json!({"name": "m", "resourceVersion": "1"}));
        assert_eq!(plain, hash(json!({"resourceVersion": "2", "name": "m", "finalizers": ["f"]})));
        assert_ne!(plain, hash(json!({"name": "m", "labels": {"l": "1"}})));
        assert_ne!(plain, hash(json!({"name": "m", "annotations": {"a": "1"}})));
        let none = release_meta(&meta(json!({"name": "m"})), &BTreeMap::new()).unwrap().hash;
        assert_ne!(plain, none);
    }
}
