//! Secrets of KCP whose data the module `deployer` gets: a Secret of the module with the annotation
//! `operator.kyma-project.io/inject-data-from-kcp` is written with the data of the Secret of the same name in KCP.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
};

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kube::{
    Api, Client, ResourceExt as _,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt as _, watcher},
};
use parking_lot::Mutex;
use serde_json::Value;
use tidewatch_api::{Manifest, key::ManifestKey, names::label};
use tidewatch_cluster::object;
use tidewatch_engine::{SecretData, SecretsError, wants_injected_data};
use tidewatch_fleet::{manifest_queue::ManifestQueue, stores::manifests::Manifests, watch::WatchBackoff};
use tidewatch_kit::log_error;
use tokio_util::sync::CancellationToken;

/// The only module whose Secrets get data of KCP.
pub const MODULE: &str = "deployer";
/// Secrets of one layer that get data: each is read with every reconcile of the Manifest.
const MAX_SECRETS: usize = 16;
/// Maximal number of remembered names of Secrets, far more than all versions of the module need. Beyond it, a change of any
/// Secret counts.
const MAX_NAMES: usize = 1_000;
/// Manifests enqueued per second after a change.
const MANIFESTS_PER_SECOND: u32 = 50;

/// Reads the Secrets of KCP. Clones share one state.
#[derive(Clone)]
pub struct ModuleSecrets {
    api: Api<Secret>,
    namespace: String,
    /// Names of the Secrets that were read or sought.
    names: Arc<Mutex<BTreeSet<String>>>,
}

impl ModuleSecrets {
    /// Reads Secrets of this namespace of KCP.
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), namespace: namespace.to_owned(), names: Arc::default() }
    }

    /// Returns the data for the annotated Secrets among the objects of a layer.
    pub(crate) async fn data(&self, manifest: &Manifest, objects: &[Value]) -> Result<SecretData, SecretsError> {
        let mut data = SecretData::new();
        if !is_of_module(manifest) {
            return Ok(data);
        }
        for name in
            objects.iter().filter(|object| wants_injected_data(object)).filter_map(|it| it["metadata"]["name"].as_str())
        {
            if data.len() >= MAX_SECRETS {
                return Err(invalid(&format!("the module has more than {MAX_SECRETS} secrets with the annotation")));
            }
            // Before it is read, so that no change is missed.
            self.remember(name);
            data.insert(name.to_owned(), self.read(name).await?);
        }
        Ok(data)
    }

    async fn read(&self, name: &str) -> Result<BTreeMap<String, ByteString>, SecretsError> {
        let key = label::MODULE_NAME;
        let failed = |error| SecretsError::Request("read a Secret in the control plane", error);
        let Some(secret) = object::get_by_list(&self.api, name).await.map_err(failed)? else {
            let namespace = &self.namespace;
            return Err(invalid(&format!(
                "failed to fetch kcp secret {name:?}: failed to get secret {name}-{namespace}: Secret {name:?} not found"
            )));
        };
        match secret.labels().get(key).map(String::as_str) {
            None => Err(invalid(&format!("kcp source secret is missing the required {key} label: secret={name}"))),
            Some(MODULE) => Ok(secret.data.unwrap_or_default()),
            Some(other) => Err(invalid(&format!(
                "kcp source secret {key} label does not match the manifest module: secret={name} expected={MODULE} actual={other}"
            ))),
        }
    }

    fn remember(&self, name: &str) {
        let mut names = self.names.lock();
        if names.len() < MAX_NAMES {
            names.insert(name.to_owned());
        }
    }

    /// True for a Secret whose data a Manifest may have, or may wait for.
    fn is_relevant(&self, name: &str) -> bool {
        let names = self.names.lock();
        names.len() >= MAX_NAMES || names.contains(name)
    }

    /// Enqueues the Manifests of the module after each change of a relevant Secret, and after each list. It keeps no
    /// content. Runs until the watch ends, which it never does by itself.
    pub async fn run(self, manifests: Manifests, queue: ManifestQueue, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let api = Api::<PartialObjectMeta<Secret>>::namespaced(self.api.clone().into_client(), &self.namespace);
        let changes = watcher(api, watcher::Config::default()).backoff(WatchBackoff::default()).inspect_err(|error| {
            log_error!(warn, error, "Watch of the Secrets of the module deployer failed");
        });
        let mut changes = pin!(changes);
        while let Some(change) = changes.next().await {
            let is_relevant = match change {
                Ok(watcher::Event::Apply(secret) | watcher::Event::Delete(secret)) => {
                    self.is_relevant(&secret.name_any())
                }
                Ok(watcher::Event::InitDone) => true,
                Ok(watcher::Event::Init | watcher::Event::InitApply(_)) | Err(_) => false,
            };
            if is_relevant {
                queue.enqueue_paced(keys(&manifests), MANIFESTS_PER_SECOND);
            }
        }
        "watch of the Secrets of the module deployer"
    }
}

/// The error for Secrets of the module that cannot be written. The texts are those of lifecycle-manager.
fn invalid(why: &str) -> SecretsError {
    SecretsError::Invalid(format!("inject-data-from-kcp transform failed: {why}"))
}

/// True for the Manifests of the module.
fn is_of_module(manifest: &Manifest) -> bool {
    manifest.labels().get(label::MODULE_NAME).is_some_and(|module| module == MODULE)
}

fn keys(manifests: &Manifests) -> Vec<ManifestKey> {
    let of_module = manifests.of_module(MODULE);
    of_module.iter().map(|manifest| manifest.key()).collect()
}
