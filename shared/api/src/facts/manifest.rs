//! Facts about a Manifest that readers of all Manifests need, also of runtimes in other replicas' shards.

use std::sync::Arc;

use kube::ResourceExt as _;

use crate::{
    Manifest, Resource, State,
    key::ManifestKey,
    labels::is_true,
    names::{annotation, label},
};

/// A Manifest without its body, at one resourceVersion. Its label names a Kyma, and no owner reference names another one.
#[derive(Debug)]
pub struct ReducedManifest {
    /// Namespace and name.
    pub key: ManifestKey,
    /// resourceVersion.
    pub object_version: Option<Box<str>>,
    /// Uid in the owner references, if there are any.
    pub owner: Option<Arc<String>>,
    /// Kyma that the label names.
    pub kyma: Arc<String>,
    module: Option<Arc<String>>,
    channel: Option<Arc<String>>,
    version: Option<Arc<String>>,
    mark: Option<Arc<String>>,
    operation: Option<Arc<String>>,
    synced: Option<Arc<Vec<Resource>>>,
    flags: Flags,
}

/// Facts of one value each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Flags {
    /// State in the status; `None` without a status.
    pub state: Option<State>,
    /// The label of mandatory modules is set.
    pub is_mandatory: bool,
    /// The label `skip-reconciliation` is set. It stops the reconciles, unless the selector turns it around.
    pub is_skipped: bool,
    /// The annotation of unmanaged modules is set.
    pub is_unmanaged: bool,
    /// It is being deleted.
    pub is_deleting: bool,
    /// The layer that the spec names is applied.
    pub is_synced: bool,
}

impl ReducedManifest {
    /// Reduces a Manifest; `None` if its label names no Kyma, or its owner references have several uids. `share` returns
    /// a text that all equal ones share.
    pub fn of(key: ManifestKey, manifest: &Manifest, mut share: impl FnMut(&str) -> Arc<String>) -> Option<Self> {
        let facts = ManifestFacts::from(manifest);
        let mut uids = manifest.owner_references().iter().map(|owner| owner.uid.as_str());
        let owner = uids.next();
        if uids.any(|uid| Some(uid) != owner) {
            return None;
        }
        let kyma = share(facts.kyma?);
        let mut share = |text: Option<&str>| text.map(&mut share);
        Some(Self {
            key,
            object_version: manifest.metadata.resource_version.as_deref().map(Into::into),
            owner: share(owner),
            kyma,
            module: share(facts.module),
            channel: share(facts.channel),
            version: share(facts.version),
            mark: share(facts.mark),
            operation: share(facts.operation),
            synced: manifest.status.as_ref().and_then(|status| status.synced.clone()),
            flags: facts.flags,
        })
    }
}

/// Facts about a Manifest, read from the object or from its reduced form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManifestFacts<'a> {
    /// Kyma that the label names.
    pub kyma: Option<&'a str>,
    /// Module that the label names.
    pub module: Option<&'a str>,
    /// Channel that the version came from, by the label; `None` for a pinned version.
    pub channel: Option<&'a str>,
    /// Version of the module.
    pub version: Option<&'a str>,
    /// Annotation with the rollout by which the module got its version.
    pub mark: Option<&'a str>,
    /// Last operation in the status, if it is being deleted or in the state Warning.
    pub operation: Option<&'a str>,
    /// Objects that were applied to the runtime.
    pub synced: &'a [Resource],
    /// Facts of one value.
    pub flags: Flags,
}

impl<'a> From<&'a Manifest> for ManifestFacts<'a> {
    fn from(manifest: &'a Manifest) -> Self {
        let labels = manifest.labels();
        let label = |key: &str| labels.get(key).map(String::as_str);
        let annotation = |key: &str| manifest.annotations().get(key).map(String::as_str);
        let status = manifest.status.as_ref();
        let is_deleting = manifest.metadata.deletion_timestamp.is_some();
        Self {
            kyma: label(label::KYMA_NAME),
            module: label(label::MODULE_NAME),
            channel: label(label::CHANNEL),
            version: manifest.spec.version.as_deref(),
            mark: annotation(annotation::ROLLOUT),
            operation: status
                .filter(|status| is_deleting || status.state == State::Warning)
                .and_then(|status| status.last_operation.as_ref())
                .map(|last| last.operation.as_str()),
            synced: status.map(|status| status.synced()).unwrap_or_default(),
            flags: Flags {
                state: status.map(|status| status.state),
                is_mandatory: is_true(Some(labels), label::MANDATORY_MODULE),
                is_skipped: is_true(Some(labels), label::SKIP_RECONCILIATION),
                is_unmanaged: annotation(annotation::UNMANAGED) == Some("true"),
                is_deleting,
                is_synced: manifest.is_synced(),
            },
        }
    }
}

impl<'a> From<&'a ReducedManifest> for ManifestFacts<'a> {
    fn from(reduced: &'a ReducedManifest) -> Self {
        let text = |text: Option<&'a Arc<String>>| text.map(|text| text.as_str());
        Self {
            kyma: Some(reduced.kyma.as_str()),
            module: text(reduced.module.as_ref()),
            channel: text(reduced.channel.as_ref()),
            version: text(reduced.version.as_ref()),
            mark: text(reduced.mark.as_ref()),
            operation: text(reduced.operation.as_ref()),
            synced: reduced.synced.as_ref().map(|synced| synced.as_slice()).unwrap_or_default(),
            flags: reduced.flags,
        }
    }
}

impl ManifestFacts<'_> {
    /// Returns true for a module that is ready, or in a warning state.
    pub fn is_healthy(&self) -> bool {
        matches!(self.flags.state, Some(State::Ready | State::Warning))
    }
}
