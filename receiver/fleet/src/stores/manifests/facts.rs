//! Facts about a Manifest that readers of all Manifests need, also of runtimes in other replicas' shards.

use kube::ResourceExt as _;
use tidewatch_api::{
    Manifest, Resource, Shared, State,
    names::{annotation, label},
};
use tidewatch_cluster::labels::is_true;

use super::reduced::{Flags, ReducedManifest};

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
        let text = |text: Option<&'a Shared<String>>| text.map(|text| text.as_str());
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
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        matches!(self.flags.state, Some(State::Ready | State::Warning))
    }
}
