//! The Secret with which the agent's image is pulled: read in KCP, and brought to every runtime as it changes there.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client, ResourceExt as _,
    api::ListParams,
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::Metrics;
use crate::fleet::{
    hub::Hub,
    queue::{Priority, Works},
};

/// The only type that kubelets and we take.
const TYPE: &str = "kubernetes.io/dockerconfigjson";
/// Its only key.
const KEY: &str = ".dockerconfigjson";
/// Bytes of it, at most.
const MOST: usize = 65_536;
/// Runtimes in one second that are brought a changed one.
const PER_SECOND: u32 = 50;

/// What every runtime gets of it; clones are the same. Empty where there is none.
#[derive(Clone, Debug, Default)]
pub struct Pulled(Arc<ArcSwapOption<Value>>);

impl Pulled {
    /// Type and data as they stand in the runtime's Secret.
    pub(super) fn content(&self) -> Option<Arc<Value>> {
        self.0.load_full()
    }

    /// Takes the Secret of KCP; false where it stays as it is. One that is gone or of no use changes nothing: the last good one stays.
    fn take(&self, secret: Option<&Secret>, metrics: &Metrics) -> bool {
        let taken = secret.ok_or("it is not there").and_then(content);
        metrics.pull_secret(taken.is_ok());
        match taken {
            Ok(content) => {
                let changed = self.0.load().as_deref() != Some(&content);
                if changed {
                    self.0.store(Some(Arc::new(content)));
                }
                changed
            }
            Err(why) => {
                tracing::error!(
                    why,
                    "The Secret with which agents' images are pulled is not taken; the last good one stays"
                );
                false
            }
        }
    }
}

fn content(secret: &Secret) -> Result<Value, &'static str> {
    if secret.type_.as_deref() != Some(TYPE) {
        return Err("it is not of the type kubernetes.io/dockerconfigjson");
    }
    let data = secret.data.as_ref().and_then(|data| data.get(KEY)).ok_or("it has no key .dockerconfigjson")?;
    if data.0.len() > MOST {
        return Err("it is too large");
    }
    // What else is in it is nobody's business in a runtime.
    Ok(json!({"type": TYPE, "data": {KEY: data}}))
}

/// Follows the Secret in KCP.
pub struct Follow {
    api: Api<Secret>,
    name: String,
    pulled: Pulled,
    hub: Hub,
    metrics: Metrics,
}

impl Follow {
    /// Reads it once, so that nothing is installed without it; it may come later.
    ///
    /// # Errors
    /// When the control plane cannot be asked.
    pub async fn open(
        client: Client,
        namespace: &str,
        name: &str,
        hub: Hub,
        metrics: Metrics,
    ) -> kube::Result<(Self, Pulled)> {
        let (api, pulled) = (Api::<Secret>::namespaced(client, namespace), Pulled::default());
        let found = api.list(&ListParams::default().fields(&format!("metadata.name={name}"))).await?;
        pulled.take(found.items.iter().find(|secret| secret.name_any() == name), &metrics);
        Ok((Self { api, name: name.to_owned(), pulled: pulled.clone(), hub, metrics }, pulled))
    }

    /// Runs for ever; returns only if the watch ends, which it never should.
    pub async fn run(self, synced: CancellationToken) -> &'static str {
        synced.cancelled().await;
        let mut secrets = watcher::watch_object(self.api, &self.name).default_backoff().boxed();
        while let Some(secret) = secrets.next().await {
            match secret {
                Ok(secret) => {
                    if self.pulled.take(secret.as_ref(), &self.metrics) {
                        tracing::info!("The Secret with which agents' images are pulled goes to all runtimes");
                        self.hub.want_all(Works::INSTALLER, Priority::Catalog, PER_SECOND);
                    }
                }
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, "Watch of the image pull secret failed");
                }
            }
        }
        "watch of the image pull secret"
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
    fn only_a_good_one_takes_the_place_of_the_last() {
        let (pulled, metrics) = (Pulled::default(), Metrics::default());
        assert!(!pulled.take(None, &metrics) && pulled.content().is_none());
        assert!(pulled.take(Some(&secret(TYPE, KEY, 3)), &metrics));
        let first = pulled.content().unwrap();
        assert_eq!(*first, json!({"type": TYPE, "data": {KEY: "eHh4"}}));
        assert!(!pulled.take(Some(&secret(TYPE, KEY, 3)), &metrics), "it is the same");
        for bad in [secret("Opaque", KEY, 3), secret(TYPE, "auth", 3), secret(TYPE, KEY, MOST + 1)] {
            assert!(!pulled.take(Some(&bad), &metrics));
        }
        assert!(!pulled.take(None, &metrics));
        assert_eq!(pulled.content(), Some(first));
        assert!(pulled.take(Some(&secret(TYPE, KEY, 4)), &metrics));
    }
}
