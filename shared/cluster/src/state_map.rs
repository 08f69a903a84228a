//! ConfigMap of KCP with the state of a task: replaced only at the resourceVersion that was read, so that a task of
//! another receiver is never overwritten. A write counts once the watch returns it.

use std::{collections::BTreeMap, time::Duration};

use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use thiserror::Error;
use tidewatch_kit::log_error;
use tokio::time::{Instant, timeout};

use super::object;

/// Delay after a failed write.
pub const RETRY: Duration = Duration::from_secs(5);
/// Timeout of one request to KCP.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Failure to read the ConfigMap.
#[derive(Debug, Error)]
#[error("read the ConfigMap {name} in the control plane")]
pub struct ReadStateMapError {
    name: &'static str,
    source: kube::Error,
}

/// One ConfigMap, and the writes to it.
pub struct StateMap {
    api: Api<ConfigMap>,
    name: &'static str,
    /// Metadata as last read, whose parts of others a write preserves; `None` without a ConfigMap.
    metadata: Option<ObjectMeta>,
    /// resourceVersion that was replaced: the next write waits for the watch to return another one.
    replaced: Option<String>,
    /// See [`Self::has_written`].
    has_written: bool,
    not_before: Instant,
}

impl StateMap {
    /// The client must be fenced, so that only the active receiver writes.
    pub fn new(client: Client, namespace: &str, name: &'static str) -> Self {
        let api = Api::namespaced(client, namespace);
        Self { api, name, metadata: None, replaced: None, has_written: false, not_before: Instant::now() }
    }

    /// Reads the ConfigMap; `None` if it does not exist.
    ///
    /// # Errors
    /// [`ReadStateMapError`].
    pub async fn read(&mut self) -> Result<Option<ConfigMap>, ReadStateMapError> {
        let read = object::get_by_list(&self.api, self.name).await;
        let map = read.map_err(|source| ReadStateMapError { name: self.name, source })?;
        self.observe(map.as_ref());
        Ok(map)
    }

    /// Yields the ConfigMap after each change, and `None` while it does not exist; never ends by itself.
    pub fn watch(&self) -> BoxStream<'static, Option<ConfigMap>> {
        object::watch(self.api.clone(), self.name, format!("ConfigMap {}", self.name))
    }

    /// Takes over the ConfigMap from the watch. A deleted one may be created again.
    pub fn observe(&mut self, map: Option<&ConfigMap>) {
        self.has_written = false;
        if map.is_none() {
            self.replaced = None;
            if self.exists() {
                tracing::warn!("ConfigMap {} was deleted, it is created again", self.name);
            }
        }
        self.metadata = map.map(|map| ObjectMeta { managed_fields: None, ..map.metadata.clone() });
    }

    /// Returns whether the ConfigMap exists.
    pub const fn exists(&self) -> bool {
        self.metadata.is_some()
    }

    /// Sets or removes an annotation with the next write.
    pub fn annotate(&mut self, key: &str, value: Option<String>) {
        let Some(annotations) = self.metadata.as_mut().and_then(|metadata| metadata.annotations.as_mut()) else {
            return;
        };
        match value {
            Some(value) => drop(annotations.insert(key.to_owned(), value)),
            None => drop(annotations.remove(key)),
        }
    }

    /// resourceVersion as last read; empty without a ConfigMap.
    fn version(&self) -> &str {
        self.metadata.as_ref().and_then(|metadata| metadata.resource_version.as_deref()).unwrap_or_default()
    }

    /// Returns whether the ConfigMap may be replaced: the watch has returned the last write, and no failed one was a moment ago.
    pub fn is_writable(&self, now: Instant) -> bool {
        now >= self.not_before && self.replaced.as_deref() != Some(self.version())
    }

    /// Returns whether this process wrote the state that the watch returns next.
    pub const fn has_written(&self) -> bool {
        self.has_written
    }

    /// Replaces the ConfigMap, or creates it. Returns the outcome: `written`, `conflict` if it has changed since it was read, or
    /// `failed`; a failed write is retried by the caller after a delay.
    pub async fn write(&mut self, data: BTreeMap<String, String>) -> &'static str {
        match timeout(REQUEST_TIMEOUT, self.request(data)).await {
            Ok(Ok(is_written)) => {
                self.replaced = Some(self.version().to_owned());
                self.has_written = is_written;
                if is_written { "written" } else { "conflict" }
            }
            Ok(Err(error)) => self.failed(&error),
            Err(late) => self.failed(&late),
        }
    }

    async fn request(&self, data: BTreeMap<String, String>) -> kube::Result<bool> {
        let params = PostParams::default();
        let metadata = self.metadata.clone().unwrap_or_default();
        let metadata = ObjectMeta { name: Some(self.name.to_owned()), ..metadata };
        let map = ConfigMap { metadata, data: Some(data), ..ConfigMap::default() };
        let written = match self.exists() {
            true => self.api.replace(self.name, &params, &map).await,
            false => self.api.create(&params, &map).await,
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn failed(&mut self, error: &(dyn std::error::Error + 'static)) -> &'static str {
        self.not_before = Instant::now() + RETRY;
        log_error!(warn, error, config_map = self.name, "State could not be written, the write is retried");
        "failed"
    }
}
