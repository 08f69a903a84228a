//! ConfigMap in KCP with the state of the upgrade, replaced only at the resourceVersion that was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{ObjectMeta, PostParams},
};
use thiserror::Error;
use tidewatch_shared::names::annotation;

use super::UpgradeState;
use crate::{base::error_levels, kube::object};

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-agent-upgrade";

/// Failure to read or write the ConfigMap.
#[derive(Debug, Error)]
#[error("read or write the ConfigMap {CONFIG_MAP} in the control plane")]
pub struct StoreError(#[from] kube::Error);

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

    fn metadata(&self) -> Option<&ObjectMeta> {
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

/// Reads the ConfigMap.
pub(super) async fn read(maps: &Api<ConfigMap>, image: &str) -> Result<Snapshot, StoreError> {
    Ok(Snapshot::of(object::get_by_list(maps, CONFIG_MAP).await?.as_ref(), image))
}

/// Replaces the state that was read, or creates the ConfigMap. Returns `false` on a conflict.
pub(super) async fn write(
    maps: &Api<ConfigMap>,
    snapshot: &Snapshot,
    state: &UpgradeState,
) -> Result<bool, StoreError> {
    let map = |metadata| ConfigMap { metadata, data: Some(state.to_data()), ..ConfigMap::default() };
    let params = PostParams::default();
    let written = match snapshot {
        Snapshot::Valid { metadata, .. } => maps.replace(CONFIG_MAP, &params, &map(*metadata.clone())).await,
        Snapshot::Absent | Snapshot::Invalid => {
            let metadata = ObjectMeta { name: Some(CONFIG_MAP.to_owned()), ..ObjectMeta::default() };
            maps.create(&params, &map(metadata)).await
        }
    };
    match written {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
