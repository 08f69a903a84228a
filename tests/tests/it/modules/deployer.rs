//! Data of Secrets in KCP for the module `deployer` (`acceptance.md` C1 29).

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, api::core::v1::Secret};
use tidewatch_api::ModuleReleaseMeta;
use tidewatch_testing::{
    artefacts::{DEPLOYER, INJECTED, NOT_INJECTED},
    landscape::{Options, catalog::release_meta},
};

use super::*;

/// Waits until the module is in state Error in both Kymas, with this text at the end of its message.
async fn is_refused(setup: &SingleRuntime, text: &str) -> Result<()> {
    let whole = format!("inject-data-from-kcp transform failed: {text}");
    let holds = |status: &KymaStatus| {
        let deployer = module(status, DEPLOYER);
        deployer.is_some_and(|it| it.state == State::Error && it.message.as_deref() == Some(whole.as_str()))
    };
    setup.kcp_status(&whole, holds).await?;
    setup.skr_status(&whole, holds).await.map(drop)
}

/// Waits until the module's Secret in the runtime has exactly this value.
async fn gets(secrets: &Api<Secret>, value: &str) -> Result<()> {
    let expected = BTreeMap::from([(".dockerconfigjson".to_owned(), ByteString(value.as_bytes().to_vec()))]);
    until(&format!("the data {value}"), async || {
        Ok((secrets.get_opt(INJECTED).await?.and_then(|secret| secret.data).as_ref() == Some(&expected)).then_some(()))
    })
    .await
}

#[tokio::test]
async fn the_module_deployer_has_the_data_of_secrets_in_kcp_and_follows_them() -> TestResult {
    let receiver = vec![format!("--restricted-default-modules={DEPLOYER}")];
    let options = Options { receiver, ..quick_options() };
    let setup = SingleRuntime::with_options("deployer", &[(DEPLOYER, "1.0.0", "1.0.0")], options).await?;
    let kcp = setup.landscape.kcp().client().await?;
    let namespace = setup.landscape.namespace();
    let team = json!({"team": "a"});
    let labels = Patch::Merge(json!({"metadata": {"labels": team}}));
    setup.kcp_kymas().await?.patch(setup.runtime.name(), &PatchParams::default(), &labels).await?;
    let mut meta = release_meta(DEPLOYER, &[("regular", "1.0.0")]);
    meta["spec"]["kymaSelector"] = json!({"matchLabels": team});
    let metas = Api::<ModuleReleaseMeta>::namespaced(setup.landscape.operator(), namespace);
    metas.patch(DEPLOYER, &PatchParams::apply("operator").force(), &Patch::Apply(&meta)).await?;
    setup.runtime.start_agent().await?;
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    setup.runtime.select(&[DEPLOYER]).await?;
    is_refused(
        &setup,
        &format!("failed to fetch kcp secret {INJECTED:?}: failed to get secret {INJECTED}-{namespace}: Secret {INJECTED:?} not found"),
    )
    .await?;

    let sources = Api::<Secret>::namespaced(kcp, namespace);
    let source = json!({"metadata": {"name": INJECTED}, "stringData": {".dockerconfigjson": "first"}});
    sources.create(&PostParams::default(), &serde_json::from_value(source)?).await?;
    let label = label::MODULE_NAME;
    is_refused(&setup, &format!("kcp source secret is missing the required {label} label: secret={INJECTED}")).await?;
    let change = async |change: Value| sources.patch(INJECTED, &PatchParams::default(), &Patch::Merge(change)).await;
    change(json!({"metadata": {"labels": {label: "other"}}})).await?;
    is_refused(
        &setup,
        &format!("kcp source secret {label} label does not match the manifest module: secret={INJECTED} expected={DEPLOYER} actual=other"),
    )
    .await?;

    change(json!({"metadata": {"labels": {label: DEPLOYER}}})).await?;
    let secrets = Api::<Secret>::namespaced(setup.runtime.cluster().client().await?, SKR_NAMESPACE);
    gets(&secrets, "first").await?;
    let is_ready = |status: &KymaStatus| module(status, DEPLOYER).is_some_and(|it| it.state == State::Ready);
    setup.skr_status("the module to be ready", is_ready).await?;
    let own = secrets.get(NOT_INJECTED).await?.data.context("its data")?;
    assert_eq!(own, BTreeMap::from([("key".to_owned(), ByteString(b"own".to_vec()))]));
    change(json!({"stringData": {".dockerconfigjson": "second"}})).await?;
    gets(&secrets, "second").await?;
    assert_eq!(secrets.get(NOT_INJECTED).await?.data, Some(own));
    Ok(())
}
