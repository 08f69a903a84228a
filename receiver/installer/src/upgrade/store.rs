//! ConfigMap in KCP with the state of the upgrade, replaced only at the resourceVersion that was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ObjectMeta;
use tidewatch_api::names::annotation;
use tidewatch_kit::error_levels;

use super::UpgradeState;

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-agent-upgrade";

/// ConfigMap as last read.
#[derive(Clone, Debug)]
pub(super) enum Snapshot {
    /// It does not exist.
    Absent,
    /// It contains a valid state. A write preserves the metadata of others.
    Valid { state: UpgradeState, metadata: Box<ObjectMeta> },
    /// It contains an invalid state, and is never overwritten.
    Invalid,
}

impl Snapshot {
    /// Reads the ConfigMap of a receiver that is configured with this image.
    pub(super) fn of(map: Option<&ConfigMap>, image: &str) -> Self {
        let Some(map) = map else { return Self::Absent };
        match UpgradeState::from_data(map.data.as_ref().unwrap_or(&BTreeMap::new())) {
            Ok(mut state) => {
                if state.restrict_to_repository_of(image) {
                    tracing::warn!(
                        image,
                        "ConfigMap {CONFIG_MAP} names an image of another repository than --agent-image, which is ignored"
                    );
                }
                let metadata = ObjectMeta { managed_fields: None, ..map.metadata.clone() };
                Self::Valid { state, metadata: Box::new(metadata) }
            }
            Err(error) => {
                tracing::error!(
                    error = error_levels::own(&error),
                    cause = error_levels::cause(&error),
                    "ConfigMap {CONFIG_MAP} is invalid, agents keep their images until it is corrected or deleted"
                );
                Self::Invalid
            }
        }
    }

    /// Metadata of a valid state, which a write preserves.
    pub(super) fn metadata(&self) -> Option<&ObjectMeta> {
        match self {
            Self::Valid { metadata, .. } => Some(metadata),
            Self::Absent | Self::Invalid => None,
        }
    }

    /// resourceVersion of a valid state; otherwise empty.
    pub(super) fn version(&self) -> &str {
        self.metadata().and_then(|metadata| metadata.resource_version.as_deref()).unwrap_or_default()
    }

    /// Returns whether an operator confirmed this image for all runtimes in spite of failures.
    pub(super) fn confirms(&self, target: &str) -> bool {
        let annotations = self.metadata().and_then(|metadata| metadata.annotations.as_ref());
        annotations.and_then(|all| all.get(annotation::CONFIRM_AGENT_IMAGE)).is_some_and(|image| image == target)
    }
}
