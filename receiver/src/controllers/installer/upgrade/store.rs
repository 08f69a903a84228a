//! ConfigMap in KCP with the state of the upgrade, replaced only at the resourceVersion that was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, ObjectMeta, PostParams},
};
use thiserror::Error;
use tidewatch_shared::names::annotation;

use super::{UpgradeState, state::ParseStateError};

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
    /// It contains a valid state.
    Valid(Box<StoredState>),
    /// It contains an invalid state, and is never overwritten.
    Invalid,
}

/// Valid state as it was read.
#[derive(Clone, Debug)]
pub(super) struct StoredState {
    pub(super) state: UpgradeState,
    /// Metadata of others is preserved by a write.
    metadata: ObjectMeta,
}

impl Snapshot {
    pub(super) fn of(map: Option<&ConfigMap>) -> Self {
        let Some(map) = map else { return Self::Absent };
        match StoredState::of(map) {
            Ok(stored) => Self::Valid(Box::new(stored)),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    error,
                    "ConfigMap {CONFIG_MAP} is invalid, agents keep their images until it is corrected or deleted"
                );
                Self::Invalid
            }
        }
    }

    /// resourceVersion of a valid state; otherwise empty.
    pub(super) fn version(&self) -> &str {
        match self {
            Self::Valid(stored) => stored.metadata.resource_version.as_deref().unwrap_or_default(),
            Self::Absent | Self::Invalid => "",
        }
    }
}

impl StoredState {
    fn of(map: &ConfigMap) -> Result<Self, ParseStateError> {
        let state = UpgradeState::from_data(map.data.as_ref().unwrap_or(&BTreeMap::new()))?;
        Ok(Self { state, metadata: ObjectMeta { managed_fields: None, ..map.metadata.clone() } })
    }

    /// Returns whether an operator confirmed this image for all runtimes in spite of failures.
    pub(super) fn confirms(&self, target: &str) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(annotation::CONFIRM_AGENT_IMAGE)).is_some_and(|image| image == target)
    }

    pub(super) fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Client of the ConfigMap.
#[derive(Clone)]
pub(super) struct Store {
    api: Api<ConfigMap>,
}

impl Store {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace) }
    }

    pub(super) const fn api(&self) -> &Api<ConfigMap> {
        &self.api
    }

    /// Reads the ConfigMap with a list request, which needs the same right as the watch that follows.
    pub(super) async fn read(&self) -> Result<Snapshot, StoreError> {
        let params = ListParams::default().fields(&format!("metadata.name={CONFIG_MAP}"));
        let found = self.api.list(&params).await?;
        Ok(Snapshot::of(found.items.iter().find(|map| map.name_any() == CONFIG_MAP)))
    }

    /// Replaces the state that was read, or creates the ConfigMap. Returns `false` on a conflict.
    pub(super) async fn write(&self, snapshot: &Snapshot, state: &UpgradeState) -> Result<bool, StoreError> {
        let map = |metadata| ConfigMap { metadata, data: Some(state.to_data()), ..ConfigMap::default() };
        let params = PostParams::default();
        let written = match snapshot {
            Snapshot::Valid(stored) => self.api.replace(CONFIG_MAP, &params, &map(stored.metadata.clone())).await,
            Snapshot::Absent | Snapshot::Invalid => {
                let metadata = ObjectMeta { name: Some(CONFIG_MAP.to_owned()), ..ObjectMeta::default() };
                self.api.create(&params, &map(metadata)).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}
