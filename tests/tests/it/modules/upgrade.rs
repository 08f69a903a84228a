//! Upgrades of installed modules.

use super::*;

#[tokio::test]
async fn a_moved_channel_upgrades_a_module_and_prunes_dropped_objects() -> TestResult {
    let modules = ModuleRuntime::start("module-upgrade", &[("sample", &["1.0.0", "1.1.0", "2.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let bindings = || async { named::<ClusterRoleBinding>(Api::all(modules.client().await?)).await };
    let before = bindings().await?;
    modules.point("sample", "1.1.0").await?;
    modules.becomes("sample", "1.1.0", State::Ready).await?;
    let after = bindings().await?;
    assert!(before.len() == 1 && after.len() == 1 && before != after, "{before:?} {after:?}");
    let samples = modules.samples("v1alpha1", "Sample").await?;
    let default: Value = samples.get("default").await?.data["spec"].clone();

    // A CRD with another storage version.
    modules.point("sample", "2.0.0").await?;
    modules.becomes("sample", "2.0.0", State::Ready).await?;
    let crds = Api::<CustomResourceDefinition>::all(modules.client().await?);
    let definition = crds.get("samples.operator.kyma-project.io").await?;
    let stored = definition.spec.versions.iter().find(|version| version.storage).map(|version| version.name.as_str());
    assert_eq!(stored, Some("v1beta1"));
    assert_eq!(samples.get("default").await?.data["spec"], default, "the default module CR is the user's");
    modules.leave().await?;
    Ok(())
}
