//! Connects the registry of modules with the control plane: its credentials from a Secret, and the Kymas that wait for
//! a component descriptor.

use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tidewatch_shared::plan::Work;
use tokio_util::sync::CancellationToken;

use crate::{
    controllers::kyma::ComponentLayers,
    fleet::{
        queue::{Priority, WorkSet},
        table::RuntimeTable,
    },
    kube::object,
    oci::registry::Registry,
};

/// Key of the credentials in their Secret.
const KEY: &str = ".dockerconfigjson";
/// Kymas that are enqueued at once after a change of a component; further ones are paced.
const AT_ONCE: usize = 20;

/// Enqueues the Kymas that wait for a component whenever its lookup changes, for ever.
pub(super) async fn enqueue_waiting(
    layers: Arc<ComponentLayers>,
    fleet: RuntimeTable,
    per_second: u32,
) -> &'static str {
    let work = WorkSet::of(&[Work::Kyma]);
    loop {
        let mut waiting: Vec<_> = layers.changed().await.into_iter().collect();
        let paced = waiting.split_off(waiting.len().min(AT_ONCE));
        for key in waiting {
            fleet.enqueue(&key, work, Priority::User);
        }
        fleet.enqueue_paced(paced, work, per_second);
    }
}

/// Watch on the Secret with the registry's credentials.
pub(super) struct CredentialsWatch {
    api: Api<Secret>,
    name: String,
    registry: Registry,
}

impl CredentialsWatch {
    /// Reads the Secret once, so that lookups do not fail until the watch has started; it may also be created later.
    ///
    /// # Errors
    /// The control plane refused the request or did not respond.
    pub(super) async fn open(client: Client, namespace: &str, name: &str, registry: Registry) -> kube::Result<Self> {
        let watch = Self { api: Api::namespaced(client, namespace), name: name.to_owned(), registry };
        watch.set(object::get_by_list(&watch.api, name).await?.as_ref());
        Ok(watch)
    }

    /// Runs until the watch ends, which it never does by itself.
    pub(super) async fn run(self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut secrets = object::watch(self.api.clone(), &self.name, "Secret of the registry's credentials");
        while let Some(secret) = secrets.next().await {
            self.set(secret.as_ref());
        }
        "watch of the registry's credentials"
    }

    /// Replaces the credentials. Invalid ones do not replace the last valid ones.
    fn set(&self, secret: Option<&Secret>) {
        let content = secret.and_then(|secret| secret.data.as_ref()?.get(KEY));
        match self.registry.set_credentials(content.map(|content| content.0.as_slice())) {
            Ok(true) => {
                tracing::info!(secret = self.name, exists = content.is_some(), "Credentials of the registry changed")
            }
            Ok(false) => {}
            Err(error) => tracing::error!(
                %error, secret = self.name, "Credentials of the registry are not usable, the last valid ones stay in use"
            ),
        }
    }
}
