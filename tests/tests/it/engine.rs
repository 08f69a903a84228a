//! The engine of modules without a control plane: a client, and Secrets of the cluster.

use anyhow::{Context as _, Result};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Secret};
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use serde_json::{from_value, json};
use tidewatch_api::{ManifestSpec, State};
use tidewatch_engine::{End, SecretStore, Store as _, testing::check_store};
use tidewatch_testing::{bed, modules::folder};

use self::install_module::{Version, install, settle};
use crate::{sample::Plain, support::TestResult};

#[path = "../../../shared/engine/examples/install_module.rs"]
#[expect(dead_code, reason = "its main is that of the example")]
mod install_module;

const NAMESPACE: &str = "kyma-system";
const MANAGER: &str = "sample-manager";

fn version(of: &str) -> Result<Version> {
    Version::parse(&std::fs::read_to_string(folder("sample", of).join("manifest.yaml"))?)
}

#[tokio::test]
async fn a_module_is_installed_upgraded_and_removed_with_nothing_but_a_client() -> TestResult {
    let plain = Plain::start("engine").await?;
    let client = || plain.client.clone();
    let store = SecretStore::new(client(), NAMESPACE);
    let deployments = Api::<Deployment>::namespaced(client(), NAMESPACE);
    for name in ["1.0.0", "1.1.0"] {
        let version = version(name)?;
        assert_eq!(install(client(), "sample", &version).await?, End::Ready(None), "{name}");
        let record = store.get("sample").await?.context("a record")?;
        assert!(record.is_synced() && record.status.as_ref().is_some_and(|status| status.state == State::Ready));
        let before = deployments.get(MANAGER).await?.metadata.resource_version;
        // Another process begins without memory.
        assert_eq!(install(client(), "sample", &version).await?, End::Ready(None), "{name}");
        let again = store.get("sample").await?.context("a record")?;
        assert_eq!(again.metadata.resource_version, record.metadata.resource_version, "it rests");
        assert_eq!(deployments.get(MANAGER).await?.metadata.resource_version, before, "it rests");
    }
    let record = store.get("sample").await?.context("a record")?;
    assert!(store.delete(&record).await?.is_some(), "its finalizers hold it");
    assert_eq!(settle(client(), &store, "sample", &version("1.1.0")?).await?, End::Gone);
    assert!(deployments.get_opt(MANAGER).await?.is_none());
    let left = Api::<Secret>::namespaced(client(), NAMESPACE).list(&ListParams::default()).await?;
    assert_eq!(left.items.len(), 0, "{left:?}");
    Ok(())
}

#[tokio::test]
async fn secrets_of_a_real_api_server_keep_the_contract_of_stores() -> TestResult {
    tidewatch_testing::install_crypto();
    let cluster = bed::shared().await?.runtime("one").await?;
    let namespace = "engine-store";
    cluster.ensure_namespace(namespace).await?;
    let client = cluster.client().await?;
    let foreign: Secret = from_value(json!({"metadata": {"name": "first"}, "stringData": {"manifest.json.gz": "x"}}))?;
    Api::<Secret>::namespaced(client.clone(), namespace).create(&PostParams::default(), &foreign).await?;
    let store = SecretStore::new(client, namespace);
    let spec: ManifestSpec = from_value(json!({"remote": false, "install": {"name": "file", "source": {}}}))?;
    let [first, second, third] = ["first", "second", "third"].map(|name| store.set(name, spec.clone()));
    check_store(&store, first.await?, second.await?, third.await?, || ()).await;
    Ok(())
}
