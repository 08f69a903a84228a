//! Objects of a module as they are written to a cluster: those of the version, with ownership, localised images,
//! pull secret and namespace. Pure.
//!
//! `hooks` selects objects of Helm that are left out, `foreign` drops the fields that others fill, `string_data` converts the
//! text of Secrets, `pods` changes pod templates, and `pull_secret` adds the copies of the image pull secret.

mod foreign;
mod hooks;
mod pods;
mod pull_secret;
mod string_data;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use thiserror::Error;
use tidewatch_api::{
    Manifest,
    names::{annotation, label},
};
use tidewatch_cluster::kinds::Kinds;

use super::{
    content::PullSecret,
    image::Localizer,
    injected::{self, SecretData},
    inventory::{ObjectKey, owner_of, split_api_version},
    jobs,
    stage::{Stage, defined_kind},
};

pub(super) use hooks::{Hook, hook_of};
pub(super) use pods::{PULL_SECRET_VARIABLE, names_pull_secret, without_pull_secret};
pub(super) use string_data::leftovers;

/// Namespace of namespaced objects without one.
const DEFAULT_NAMESPACE: &str = "default";
/// Metadata that the API server or other controllers own.
const SERVER_OWNED: [&str; 8] = [
    "creationTimestamp",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

/// Scope of a kind in a runtime cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Namespaced.
    Namespaced,
    /// Cluster-scoped.
    Cluster,
    /// The runtime cluster does not serve the kind.
    NotServed,
}

impl Scope {
    /// The scope of a kind that was discovered before.
    fn of(kinds: &Kinds, group: &str, version: &str, kind: &str) -> Self {
        match kinds.served(group, version, kind) {
            Some(kind) if kind.namespaced => Self::Namespaced,
            Some(_) => Self::Cluster,
            None => Self::NotServed,
        }
    }
}

/// A rendered object.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RenderedObject {
    pub(super) key: ObjectKey,
    /// Version of its API group.
    pub(super) version: String,
    pub(super) stage: Stage,
    /// The runtime cluster serves the kind, or a CRD of the module defines it.
    pub(super) served: bool,
    /// Body of the server-side apply.
    pub(super) body: Value,
}

/// Inputs besides the objects.
pub(super) struct RenderSettings<'a> {
    pub(super) manifest: &'a Manifest,
    /// The image pull secret, if there is one.
    pub(super) pull_secret: Option<&'a PullSecret>,
    /// Data for Secrets of the version, from elsewhere.
    pub(super) secrets: &'a SecretData,
    /// Kinds of the objects, those of the module's own CRDs included.
    pub(super) kinds: &'a Kinds,
}

/// A version with an object that cannot be written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RenderError {
    /// The metadata is malformed.
    #[error("{0}: metadata.{1} is malformed")]
    Metadata(ObjectKey, &'static str),
    /// Kyma itself brings this CRD into every cluster.
    #[error("{0} belongs to Kyma itself: a module must not contain it")]
    Product(ObjectKey),
    /// A container has the variable of the pull secret already.
    #[error("{0}: the container {1} already has the variable {PULL_SECRET_VARIABLE}")]
    PullSecretVariable(ObjectKey, String),
}

/// Renders the objects of a version, ordered by stage. Within a stage ServiceAccounts come first, and the other objects keep
/// the given order. Of several objects with equal group, kind, namespace and name, the first one is kept.
///
/// # Errors
/// [`RenderError`].
pub(super) fn render(objects: &[Value], settings: &RenderSettings<'_>) -> Result<Vec<RenderedObject>, RenderError> {
    let defined: BTreeSet<_> = objects.iter().filter_map(defined_kind).collect();
    let images = settings.manifest.spec.localized_images.as_deref().map(Vec::as_slice).unwrap_or_default();
    let localizer = Localizer::new(images);
    let mut rendered = Vec::new();
    let mut keys = BTreeSet::new();
    for object in objects.iter().filter(|object| hook_of(object) != Some(Hook::LeftOut)) {
        let object = render_one(object, settings, &localizer, &defined)?;
        if object.key.is_of_product() {
            return Err(RenderError::Product(object.key));
        }
        if keys.insert(object.key.clone()) {
            rendered.push(object);
        }
    }
    for copy in pull_secret::copies(&rendered, settings.pull_secret) {
        let copy = render_one(&copy, settings, &localizer, &defined)?;
        // The module may bring a Secret of this name.
        if keys.insert(copy.key.clone()) {
            rendered.push(copy);
        }
    }
    let mut stages = BTreeMap::new();
    for object in rendered {
        stages.entry((object.stage, !object.key.is_service_account())).or_insert_with(Vec::new).push(object);
    }
    Ok(stages.into_values().flatten().collect())
}

/// Keys of the objects as [`render`] writes them, with the versions of their API groups, in the given order. Copies of the
/// image pull secret are missing.
pub(super) fn keys<'a>(objects: &'a [Value], kinds: &Kinds) -> Vec<(ObjectKey, &'a str)> {
    let installed = objects.iter().filter(|object| hook_of(object) != Some(Hook::LeftOut));
    installed.map(|object| identity(object, kinds)).collect()
}

/// Identity of an object in a runtime cluster, with the version of its API group. An object of a kind that is not discovered
/// yet keeps its namespace.
pub(super) fn identity<'a>(object: &'a Value, kinds: &Kinds) -> (ObjectKey, &'a str) {
    let mut key = ObjectKey::of(object);
    let (_, version) = split_api_version(object["apiVersion"].as_str().unwrap_or_default());
    match Scope::of(kinds, &key.group, version, &key.kind) {
        Scope::Cluster => key.namespace.clear(),
        Scope::Namespaced if key.namespace.is_empty() => DEFAULT_NAMESPACE.clone_into(&mut key.namespace),
        Scope::Namespaced | Scope::NotServed => {}
    }
    (key, version)
}

fn render_one(
    object: &Value,
    settings: &RenderSettings<'_>,
    localizer: &Localizer<'_>,
    defined: &BTreeSet<(String, String)>,
) -> Result<RenderedObject, RenderError> {
    let mut body = object.clone();
    injected::inject(&mut body, settings.secrets);
    let given = ObjectKey::of(&body);
    let version = split_api_version(body["apiVersion"].as_str().unwrap_or_default()).1.to_owned();
    let scope = Scope::of(settings.kinds, &given.group, &version, &given.kind);
    set_metadata(&mut body, &given, scope, settings.manifest)?;
    if let Some(members) = body.as_object_mut() {
        members.remove("status");
    }
    let key = ObjectKey::of(&body);
    string_data::fold(&mut body, &key);
    foreign::drop_fields(&mut body, &key);
    if jobs::is_job(&key) {
        // Before the images are localised: another registry is no reason to run it again.
        body["metadata"]["annotations"][annotation::JOB] = jobs::content(&body).into();
    }
    if let Some(pod) = pods::pod_spec(&mut body, &key) {
        pods::localize(pod, localizer);
        if let Some(secret) = settings.pull_secret {
            pods::add_pull_secret(pod, &key, &secret.name, settings.manifest.spec.manager.as_deref())?;
        }
    }
    let stage = Stage::of_body(&key, &body, defined);
    Ok(RenderedObject { stage, served: scope != Scope::NotServed, version, key, body })
}

/// Sets ownership and namespace. The namespace of all modules gets no owner, since several modules may contain it.
fn set_metadata(body: &mut Value, key: &ObjectKey, scope: Scope, manifest: &Manifest) -> Result<(), RenderError> {
    let malformed = |member| RenderError::Metadata(key.clone(), member);
    let Some(metadata) = body["metadata"].as_object_mut() else { return Err(malformed("name")) };
    SERVER_OWNED.iter().for_each(|member| drop(metadata.remove(*member)));
    match scope {
        Scope::Cluster => drop(metadata.remove("namespace")),
        Scope::Namespaced if key.namespace.is_empty() => {
            metadata.insert("namespace".to_owned(), DEFAULT_NAMESPACE.into());
        }
        Scope::Namespaced | Scope::NotServed => {}
    }
    let labels = strings(metadata, "labels").ok_or_else(|| malformed("labels"))?;
    if !key.is_common_namespace() {
        labels.insert(label::MANAGED_BY.to_owned(), label::MANAGED_BY_SKR.into());
        labels.insert(label::COMPONENT.to_owned(), manifest.metadata.name.clone().into());
        labels.insert(label::PART_OF.to_owned(), label::PART_OF_KYMA.into());
    }
    let annotations = strings(metadata, "annotations").ok_or_else(|| malformed("annotations"))?;
    if !key.is_common_namespace() {
        annotations.insert(annotation::OWNED_BY.to_owned(), owner_of(manifest).into());
        annotations.insert(annotation::DISCLAIMER.to_owned(), annotation::DISCLAIMER_TEXT.into());
    }
    Ok(())
}

/// The member of the metadata, which is created if it is absent or null. `None` if it has a value that is no string.
fn strings<'a>(metadata: &'a mut Map<String, Value>, member: &str) -> Option<&'a mut Map<String, Value>> {
    let value = metadata.entry(member).or_insert(Value::Null);
    if value.is_null() {
        *value = json!({});
    }
    value.as_object_mut().filter(|members| members.values().all(Value::is_string))
}

#[cfg(test)]
mod tests;
