//! The engine of modules without a control plane: a client, and Secrets of the cluster.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use futures::{
    FutureExt as _,
    future::{BoxFuture, ready},
};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Secret};
use kube::{Api, Client, api::ListParams};
use serde_json::{Value, from_value, json};
use tidewatch_api::{Manifest, ManifestSpec, State, key::KymaKey};
use tidewatch_engine::{
    Cluster, Content, End, Engine, ModuleObjects, Next, Request, SecretStore, Store as _, testing::check_store,
};
use tidewatch_oci::layer::documents;
use tidewatch_tests::modules::folder;
use tokio::time::sleep;

use self::install_module::install;
use crate::{sample::Plain, support::TestResult};

#[path = "../../../shared/engine/examples/install_module.rs"]
#[expect(dead_code, reason = "its main is that of the example")]
mod install_module;

const NAMESPACE: &str = "kyma-system";

/// Objects of one version.
struct Objects(Arc<Vec<Value>>);

impl Content for Objects {
    fn objects<'a>(&'a self, _manifest: &'a Manifest) -> BoxFuture<'a, ModuleObjects> {
        ready(ModuleObjects::Ready(self.0.clone())).boxed()
    }
}

fn text(version: &str) -> Result<String> {
    Ok(std::fs::read_to_string(folder("sample", version).join("manifest.yaml"))?)
}

/// Reconciles a deleted module until its record is gone.
async fn remove(client: Client, store: &SecretStore, module: &str, text: &str) -> Result<()> {
    let engine = Engine::default();
    let content = Objects(Arc::new(documents(text)?));
    let cluster = Cluster { key: KymaKey::new("", "this-cluster"), client, revision: 1 };
    while let Some(manifest) = store.get(module).await? {
        let outcome = engine.reconcile(Request::new(manifest, &cluster, store, &content)).await?;
        match (outcome.end, outcome.next) {
            (End::Gone, _) => return Ok(()),
            (_, Next::After(delay)) => sleep(delay).await,
            (_, Next::Retry { .. }) => sleep(Duration::from_millis(500)).await,
            (end, Next::OnChange) => anyhow::bail!("the removal rests: {end:?}"),
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_module_is_installed_upgraded_and_removed_with_nothing_but_a_client() -> TestResult {
    let plain = Plain::start("engine").await?;
    let client = plain.client.clone();
    let store = SecretStore::new(client.clone(), NAMESPACE);
    let deployments = Api::<Deployment>::namespaced(client.clone(), NAMESPACE);
    for version in ["1.0.0", "1.1.0"] {
        assert_eq!(install(client.clone(), "sample", &text(version)?).await?, End::Ready(None), "{version}");
        let record = store.get("sample").await?.context("a record")?;
        assert!(record.is_synced() && record.status.as_ref().is_some_and(|status| status.state == State::Ready));
        let before = deployments.get("sample-manager").await?.metadata.resource_version;
        // Another process begins without memory.
        assert_eq!(install(client.clone(), "sample", &text(version)?).await?, End::Ready(None), "{version}");
        let again = store.get("sample").await?.context("a record")?;
        assert_eq!(again.metadata.resource_version, record.metadata.resource_version, "it rests");
        assert_eq!(deployments.get("sample-manager").await?.metadata.resource_version, before);
    }
    let record = store.get("sample").await?.context("a record")?;
    assert!(store.delete(&record).await?.is_some(), "its finalizers hold it");
    remove(client.clone(), &store, "sample", &text("1.1.0")?).await?;
    assert!(deployments.get_opt("sample-manager").await?.is_none());
    assert!(store.get("sample").await?.is_none());
    let left = Api::<Secret>::namespaced(client, NAMESPACE).list(&ListParams::default()).await?;
    assert_eq!(left.items.len(), 0, "{left:?}");
    Ok(())
}

#[tokio::test]
async fn secrets_of_a_real_api_server_keep_the_contract_of_stores() -> TestResult {
    let plain = Plain::start("engine-store").await?;
    let store = SecretStore::new(plain.client.clone(), NAMESPACE);
    let spec: ManifestSpec = from_value(json!({"remote": false, "install": {"name": "file", "source": {}}}))?;
    let [first, second, third] = ["first", "second", "third"].map(|name| store.set(name, spec.clone()));
    check_store(&store, first.await?, second.await?, third.await?, || ()).await;
    Ok(())
}
