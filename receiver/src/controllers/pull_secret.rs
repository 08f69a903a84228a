//! Image pull secrets of the agent and of the modules: watched in KCP, and copied to every runtime when they change.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use prometheus_client::metrics::gauge::Gauge;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    fleet::{
        queue::{Priority, WorkSet},
        table::RuntimeTable,
    },
    kube::object,
};

/// Type of the Secret that kubelets accept.
const TYPE: &str = "kubernetes.io/dockerconfigjson";
/// Only key of the Secret.
const KEY: &str = ".dockerconfigjson";
/// Maximum size of the value in bytes.
const MAX_BYTES: usize = 65_536;
/// Runtimes enqueued per second after a change.
const RUNTIMES_PER_SECOND: u32 = 50;

/// Content for every runtime, empty if there is none; clones share it.
#[derive(Clone, Debug, Default)]
pub struct PullSecret(Arc<ArcSwapOption<Value>>);

impl PullSecret {
    /// Type and data of the Secret in a runtime.
    pub(crate) fn content(&self) -> Option<Arc<Value>> {
        self.0.load_full()
    }

    /// A secret with this content.
    #[cfg(test)]
    pub(crate) fn fixed(content: Value) -> Self {
        Self(Arc::new(ArcSwapOption::from_pointee(content)))
    }

    /// Takes over the Secret of KCP and returns whether the content changed. A missing or invalid Secret changes
    /// nothing: the last valid content stays.
    fn take(&self, secret: Option<&Secret>, is_usable: &Gauge) -> bool {
        let taken = secret.ok_or("the Secret is missing").and_then(content);
        is_usable.set(taken.is_ok().into());
        match taken {
            Ok(content) => {
                let changed = self.0.load().as_deref() != Some(&content);
                if changed {
                    self.0.store(Some(Arc::new(content)));
                }
                changed
            }
            Err(error) => {
                tracing::error!(error, "Image pull secret is not usable, the last valid one stays in use");
                false
            }
        }
    }
}

fn content(secret: &Secret) -> Result<Value, &'static str> {
    if secret.type_.as_deref() != Some(TYPE) {
        return Err("the Secret is not of type kubernetes.io/dockerconfigjson");
    }
    let data = secret.data.as_ref().and_then(|data| data.get(KEY)).ok_or("the Secret has no key .dockerconfigjson")?;
    if data.0.len() > MAX_BYTES {
        return Err("the Secret is larger than 65536 bytes");
    }
    // Other keys are not copied to runtimes.
    Ok(json!({"type": TYPE, "data": {KEY: data}}))
}

/// Watch on a Secret in KCP.
pub struct PullSecretWatch {
    api: Api<Secret>,
    name: String,
    pull_secret: PullSecret,
    fleet: RuntimeTable,
    purpose: Purpose,
}

/// Purpose of a pull secret.
#[derive(Clone, Debug)]
pub struct Purpose {
    /// Work of every runtime after a change.
    pub work: WorkSet,
    /// 1 while the Secret is usable, 0 otherwise.
    pub is_usable: Gauge,
}

impl PullSecretWatch {
    /// Reads the Secret once, so that nothing is installed without it; it may also be created later.
    ///
    /// # Errors
    /// The control plane refused the request or did not respond.
    pub async fn open(
        client: Client,
        namespace: &str,
        name: &str,
        fleet: RuntimeTable,
        purpose: Purpose,
    ) -> kube::Result<(Self, PullSecret)> {
        let (api, pull_secret) = (Api::<Secret>::namespaced(client, namespace), PullSecret::default());
        pull_secret.take(object::get_by_list(&api, name).await?.as_ref(), &purpose.is_usable);
        Ok((Self { api, name: name.to_owned(), pull_secret: pull_secret.clone(), fleet, purpose }, pull_secret))
    }

    /// Runs until the watch ends, which it never does by itself.
    pub async fn run(self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut secrets = object::watch(self.api, &self.name, "image pull secret");
        while let Some(secret) = secrets.next().await {
            if self.pull_secret.take(secret.as_ref(), &self.purpose.is_usable) {
                tracing::info!(secret = self.name, "Image pull secret changed, every runtime is enqueued");
                self.fleet.enqueue_all(self.purpose.work, Priority::Catalog, RUNTIMES_PER_SECOND);
            }
        }
        "watch of an image pull secret"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(kind: &str, key: &str, bytes: usize) -> Secret {
        let data = [(key.to_owned(), k8s_openapi::ByteString(vec![b'x'; bytes]))].into();
        Secret { type_: Some(kind.to_owned()), data: Some(data), ..Secret::default() }
    }

    #[test]
    fn invalid_secret_does_not_replace_the_last_valid_one() {
        let (pull_secret, metrics) = (PullSecret::default(), Gauge::default());
        assert!(!pull_secret.take(None, &metrics) && pull_secret.content().is_none());
        assert!(pull_secret.take(Some(&secret(TYPE, KEY, 3)), &metrics));
        let first = pull_secret.content().unwrap();
        assert_eq!(*first, json!({"type": TYPE, "data": {KEY: "eHh4"}}));
        assert!(!pull_secret.take(Some(&secret(TYPE, KEY, 3)), &metrics), "unchanged content");
        for bad in [secret("Opaque", KEY, 3), secret(TYPE, "auth", 3), secret(TYPE, KEY, MAX_BYTES + 1)] {
            assert!(!pull_secret.take(Some(&bad), &metrics));
        }
        assert!(!pull_secret.take(None, &metrics));
        assert_eq!(pull_secret.content(), Some(first));
        assert!(pull_secret.take(Some(&secret(TYPE, KEY, 4)), &metrics));
    }
}
