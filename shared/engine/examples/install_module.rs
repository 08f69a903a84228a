//! Installs a module into the cluster of the current kubeconfig, and waits until it is ready:
//! `cargo run -p tidewatch-engine --example install_module -- <module> <file of YAML documents>`.
//! The record of the module is a Secret in the namespace kyma-system, which has to exist.

use std::{env, fs, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::future::{BoxFuture, FutureExt as _, ready};
use kube::Client;
use serde_json::{Value, from_value, json};
use tidewatch_api::{Manifest, key::KymaKey};
use tidewatch_engine::{Cluster, Content, End, Engine, ModuleObjects, Next, Request, SecretStore};
use tidewatch_oci::{digest::Digest, layer::documents};
use tokio::time::sleep;

/// Objects of one version, with the digest of their text.
pub(crate) struct Version {
    digest: String,
    objects: Arc<Vec<Value>>,
}

impl Version {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        Ok(Self { digest: Digest::of(text.as_bytes()).to_string(), objects: Arc::new(documents(text)?) })
    }
}

impl Content for Version {
    fn objects<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, ModuleObjects> {
        let is_this = manifest.spec.install.source["ref"] == self.digest;
        let other = || ModuleObjects::Failed("another process has set another version".to_owned());
        ready(if is_this { ModuleObjects::Ready(self.objects.clone()) } else { other() }).boxed()
    }
}

/// Sets the version of a module.
pub(crate) async fn install(client: Client, module: &str, version: &Version) -> Result<End> {
    let spec = json!({"remote": false, "install": {"name": "file", "source": {"ref": version.digest}}});
    let store = SecretStore::new(client.clone(), "kyma-system");
    store.set(module, from_value(spec)?).await?;
    settle(client, &store, module, version).await
}

/// Reconciles a module until it is ready or gone, or until only a change from outside helps.
pub(crate) async fn settle(client: Client, store: &SecretStore, module: &str, version: &Version) -> Result<End> {
    let engine = Engine::default();
    let cluster = Cluster { key: KymaKey::new("", "this cluster"), client, revision: 1 };
    while let Some(manifest) = store.get(module).await? {
        let outcome = engine.reconcile(Request::new(manifest, &cluster, store, version)).await?;
        match (outcome.end, outcome.next) {
            (end @ (End::Ready(_) | End::Gone | End::Failed(_) | End::Blocked(_)), _) | (end, Next::OnChange) => {
                return Ok(end);
            }
            (_, Next::After(delay)) => sleep(delay).await,
            (_, Next::Retry { min_backoff, .. }) => sleep(min_backoff.unwrap_or(Duration::from_secs(1))).await,
        }
    }
    Ok(End::Gone)
}

#[tokio::main]
async fn main() -> Result<()> {
    let module = env::args().nth(1).context("the first argument is the name of the module")?;
    let file = env::args().nth(2).context("the second argument is a file")?;
    let version = Version::parse(&fs::read_to_string(file)?)?;
    let end = install(Client::try_default().await?, &module, &version).await?;
    anyhow::ensure!(matches!(end, End::Ready(_)), "{module}: {end:?}");
    Ok(())
}
