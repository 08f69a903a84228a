//! The ConfigMap of KCP in which the upgrade stands: changed only as it was read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, ObjectMeta, PostParams},
};
use thiserror::Error;
use tidewatch_shared::names::annotation;

use super::{Rollout, rollout::ReadRollout};

/// Name of the ConfigMap in the receiver's namespace.
pub const CONFIG_MAP: &str = "tidewatch-agent-upgrade";

/// Why it was not read or not written.
#[derive(Debug, Error)]
pub enum Keep {
    /// The control plane refused or did not answer.
    #[error("the control plane could not be asked for the ConfigMap {CONFIG_MAP}")]
    Api(#[source] Box<kube::Error>),
}

impl From<kube::Error> for Keep {
    fn from(error: kube::Error) -> Self {
        Self::Api(Box::new(error))
    }
}

/// What stands there.
#[derive(Clone, Debug)]
pub(super) enum Held {
    /// Nothing.
    None,
    /// What can be read.
    Good(Box<Kept>),
    /// Something else; it is never written over.
    Refused,
}

/// The content, as it was read.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) rollout: Rollout,
    /// What others have noted on it stays when it is written.
    metadata: ObjectMeta,
}

impl Held {
    pub(super) fn of(map: Option<&ConfigMap>) -> Self {
        let Some(map) = map else { return Self::None };
        match Kept::of(map) {
            Ok(kept) => Self::Good(Box::new(kept)),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::error!(
                    error,
                    "The ConfigMap {CONFIG_MAP} is refused; agents stay as they are until it is mended or deleted"
                );
                Self::Refused
            }
        }
    }

    /// The version that it was read at; empty where there is none.
    pub(super) fn version(&self) -> &str {
        match self {
            Self::Good(kept) => kept.metadata.resource_version.as_deref().unwrap_or_default(),
            Self::None | Self::Refused => "",
        }
    }
}

impl Kept {
    fn of(map: &ConfigMap) -> Result<Self, ReadRollout> {
        let rollout = Rollout::read(map.data.as_ref().unwrap_or(&BTreeMap::new()))?;
        Ok(Self { rollout, metadata: ObjectMeta { managed_fields: None, ..map.metadata.clone() } })
    }

    /// Whether an operator has confirmed that everybody shall get this image, whatever fails.
    pub(super) fn confirms(&self, target: &str) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(annotation::CONFIRM_AGENT_IMAGE)).is_some_and(|image| image == target)
    }

    pub(super) fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Reads and writes it.
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

    /// What stands there now. By a list, which needs no more rights than the watch that follows.
    pub(super) async fn read(&self) -> Result<Held, Keep> {
        let params = ListParams::default().fields(&format!("metadata.name={CONFIG_MAP}"));
        let found = self.api.list(&params).await?;
        Ok(Held::of(found.items.iter().find(|map| map.name_any() == CONFIG_MAP)))
    }

    /// Writes it over what was read, or where nothing was; false when something else is there by now.
    pub(super) async fn write(&self, held: &Held, rollout: &Rollout) -> Result<bool, Keep> {
        let map = |metadata| ConfigMap { metadata, data: Some(rollout.write()), ..ConfigMap::default() };
        let params = PostParams::default();
        let written = match held {
            Held::Good(kept) => self.api.replace(CONFIG_MAP, &params, &map(kept.metadata.clone())).await,
            Held::None | Held::Refused => {
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
