//! Removal, and the resources that block it.

use tidewatch_testing::landscape::DEADLINE;

use super::*;

#[tokio::test]
async fn user_resources_block_the_removal_and_are_named() -> TestResult {
    let modules = ModuleRuntime::start("blocked", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.create_sample("mine").await?;
    modules.setup.runtime.select(&[]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/mine").await?;
    // The operator still runs, and the default module CR is still there.
    let samples = modules.samples("v1alpha1", "Sample").await?;
    assert!(samples.get("default").await?.metadata.deletion_timestamp.is_none());
    assert_eq!(modules.kubelet.running("sample-operator").len(), 1);
    samples.delete("mine", &DeleteParams::default()).await?;
    modules.is_clean().await?;
    Ok(())
}

#[tokio::test]
async fn a_module_whose_removal_is_blocked_is_upgraded_and_can_be_listed_again() -> TestResult {
    let modules = ModuleRuntime::start("blocked-upgrade", &[("sample", &["1.0.0", "1.1.0", "2.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.create_sample("mine").await?;
    modules.setup.runtime.select(&[]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/mine").await?;
    // To a CRD with another storage version, with the manager of that version; the removal stays blocked.
    modules.point("sample", "2.0.0").await?;
    modules.becomes("sample", "2.0.0", State::Deleting).await?;
    let crds = Api::<CustomResourceDefinition>::all(modules.client().await?);
    until("the CRD of the new version", async || {
        let definition = crds.get("samples.operator.kyma-project.io").await?;
        let is_stored = definition.spec.versions.iter().any(|version| version.storage && version.name == "v1beta1");
        Ok(is_stored.then_some(()))
    })
    .await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/mine").await?;
    let leaving = modules.manifest("sample").await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/mine").await?;
    assert_eq!(modules.manifest("sample").await?.metadata.uid, leaving.metadata.uid);

    let samples = modules.samples("v1beta1", "Sample").await?;
    samples.delete("mine", &DeleteParams::default()).await?;
    modules.becomes("sample", "2.0.0", State::Ready).await?;
    let installed = modules.manifest("sample").await?;
    assert_ne!(installed.metadata.uid, leaving.metadata.uid, "the module is installed anew");
    assert!(samples.get("default").await?.metadata.deletion_timestamp.is_none());
    modules.leave().await?;
    Ok(())
}

impl ModuleRuntime {
    /// Publishes a version of the sample module whose CRD the API server refuses, and whose default module CR has a version
    /// that this CRD alone has.
    async fn publish_refused(&self) -> Result<()> {
        let changed = tempfile::tempdir()?;
        for entry in std::fs::read_dir(folder("sample", "2.0.0"))? {
            let entry = entry?;
            let text = std::fs::read_to_string(entry.path())?;
            let text =
                text.replace("2.0.0", "3.0.0").replace("v1beta1", "v1").replace("scope: Namespaced", "scope: Cluster");
            std::fs::write(changed.path().join(entry.file_name()), text)?;
        }
        self.publish_folder(changed.path()).await
    }
}

/// `acceptance.md` C1 15 and 16.
#[tokio::test]
async fn a_module_is_repaired_and_upgraded_while_its_default_module_cr_terminates() -> TestResult {
    let modules = ModuleRuntime::start("default-held", &[("sample", &["1.0.0", "2.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let samples = modules.samples("v1alpha1", "Sample").await?;
    let hold = Patch::Merge(json!({"metadata": {"finalizers": ["example.test/hold"]}}));
    samples.patch("default", &PatchParams::default(), &hold).await?;
    modules.setup.runtime.select(&[]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/default (finalizer example.test/hold)").await?;

    let deployments = Api::<Deployment>::namespaced(modules.client().await?, SKR_NAMESPACE);
    modules.setup.becomes_idle().await?;
    for _ in 0..2 {
        let manager = deployments.get("sample-manager").await?;
        deployments.delete("sample-manager", &DeleteParams::default()).await?;
        let begun = std::time::Instant::now();
        until("the manager to come back", async || {
            Ok(deployments.get_opt("sample-manager").await?.filter(|found| found.uid() != manager.uid()))
        })
        .await?;
        assert!(begun.elapsed().as_secs() < 10, "no event caused it: {:?}", begun.elapsed());
    }

    modules.point("sample", "2.0.0").await?;
    modules.becomes("sample", "2.0.0", State::Deleting).await?;
    let upgraded = "tidewatch.local/sample-operator:2.0.0";
    until("the manager of the new version", async || {
        let manager = json!(deployments.get("sample-manager").await?);
        let image = &manager["spec"]["template"]["spec"]["containers"][0]["image"];
        Ok((image == upgraded).then_some(()))
    })
    .await?;
    let leaving = modules.manifest("sample").await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/default").await?;
    let release = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    samples.patch("default", &PatchParams::default(), &release).await?;
    modules.becomes("sample", "2.0.0", State::Ready).await?;
    assert_ne!(modules.manifest("sample").await?.metadata.uid, leaving.metadata.uid, "the module is installed anew");

    // A removal does not depend on a version that could not be applied.
    modules.publish_refused().await?;
    modules.point("sample", "3.0.0").await?;
    modules.says("sample", State::Error, "apply CustomResourceDefinition samples.operator.kyma-project.io").await?;
    modules.leave().await?;
    Ok(())
}

/// `acceptance.md` C1 22, and the adoption of a module that the user installed by hand.
#[tokio::test]
async fn an_unmanaged_module_keeps_its_objects_and_is_managed_again() -> TestResult {
    let modules = ModuleRuntime::start("unmanaged", &[("sample", &["1.0.0"])]).await?;
    let setup = &modules.setup;
    let kyma = modules.setup.runtime.name();
    // Without them there are no metrics of a Kyma.
    let labelled = json!({"metadata": {"labels": {label::INSTANCE_ID: "i-1"},
        "annotations": {annotation::SKR_DOMAIN: "shoot.example.test"}}});
    setup.kcp_kymas().await?.patch(kyma, &PatchParams::default(), &Patch::Merge(labelled)).await?;
    setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let manage = async |managed: bool| {
        setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "sample", "managed": managed}]}})).await
    };
    let is_unmanaged = async |value: u8| {
        let sample = |labels: String, value: u8| {
            move |page: &str| {
                let has = |line: &str| {
                    labels.split(' ').all(|label| line.contains(label)) && line.ends_with(&format!(" {value}"))
                };
                page.lines().any(has)
            }
        };
        let module = sample(
            format!(r#"lifecycle_mgr_module_state{{ kyma_name="{kyma}" module_name="sample" state="Unmanaged""#),
            value,
        );
        let of_kyma = sample(format!(r#"lifecycle_mgr_kyma_state{{ kyma_name="{kyma}" state="Ready""#), 1);
        let both = |page: &str| (module(page) && of_kyma(page)).then_some(());
        let waited =
            setup.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, both).await).await?;
        waited.with_context(|| format!("waited for: Unmanaged {value}, and a Kyma that is Ready"))
    };
    let deployments = Api::<Deployment>::namespaced(modules.client().await?, SKR_NAMESPACE);
    let no_manifest =
        async || until("no Manifest", async || Ok(setup.manifests().await?.is_empty().then_some(()))).await;
    manage(false).await?;
    no_manifest().await?;
    assert_eq!(modules.objects().await?, Vec::<String>::new(), "no object has our label");
    assert!(deployments.get("sample-manager").await?.metadata.deletion_timestamp.is_none());
    is_unmanaged(1).await?;
    manage(true).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    assert!(!modules.objects().await?.is_empty(), "all objects have our label");
    is_unmanaged(0).await?;

    // Disabled while it is unmanaged, it stays.
    manage(false).await?;
    no_manifest().await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("no module", |status| status.modules().is_empty()).await?;
    // As one that the user installed, whose version is not known.
    let by_hand = Patch::Merge(json!({"metadata": {"annotations": {annotation::OWNED_BY: null}}}));
    let before = deployments.patch("sample-manager", &PatchParams::default(), &by_hand).await?;
    setup.runtime.select(&["sample"]).await?;
    modules.says("sample", State::Warning, "the module was installed by hand and is left as it is").await?;
    let now = deployments.get("sample-manager").await?;
    assert_eq!((now.metadata.generation, now.labels()), (before.metadata.generation, before.labels()));
    let adopt = Patch::Merge(json!({"metadata": {"annotations": {annotation::ADOPT: "true"}}}));
    deployments.patch("sample-manager", &PatchParams::default(), &adopt).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.leave().await?;
    Ok(())
}

#[tokio::test]
async fn a_receiver_killed_during_install_and_removal_completes_both() -> TestResult {
    let modules = ModuleRuntime::start("module-kills", &[("sample", &["1.0.0"])]).await?;
    let restart = async || {
        modules.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
        modules.setup.landscape.start_receiver().await
    };
    let crds = Api::<CustomResourceDefinition>::all(modules.client().await?);
    let exists = async |name: &str| anyhow::Ok(crds.get_metadata_opt(name).await?.is_some());
    let definition = "samples.operator.kyma-project.io";
    modules.setup.runtime.select(&["sample"]).await?;
    until("the CRD of the module", async || Ok(exists(definition).await?.then_some(()))).await?;
    restart().await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let samples = modules.samples("v1alpha1", "Sample").await?;
    modules.setup.runtime.select(&[]).await?;
    until("the default module CR to go", async || {
        Ok(samples
            .get_opt("default")
            .await
            .ok()
            .flatten()
            .is_none_or(|it| it.metadata.deletion_timestamp.is_some())
            .then_some(()))
    })
    .await?;
    restart().await?;
    modules.is_clean().await?;
    Ok(())
}

#[tokio::test]
async fn an_inventory_older_than_the_runtime_is_completed_before_the_removal() -> TestResult {
    let modules = ModuleRuntime::start("older-inventory", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    modules.create_sample("mine").await?;
    // As after a restore of the control plane from a backup.
    modules.setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    let manifest = modules.manifest("sample").await?;
    let manifests = modules.manifests().await?;
    let account = json!([{"group": "", "version": "v1", "kind": "ServiceAccount", "name": "sample-manager",
                          "namespace": SKR_NAMESPACE}]);
    let older = Patch::Merge(json!({"status": {"synced": account}}));
    manifests.patch_status(&manifest.name_any(), &PatchParams::default(), &older).await?;
    modules.setup.runtime.select(&[]).await?;
    modules.setup.landscape.start_receiver().await?;
    modules.says("sample", State::Deleting, "Sample kyma-system/mine").await?;
    modules.samples("v1alpha1", "Sample").await?.delete("mine", &DeleteParams::default()).await?;
    modules.is_clean().await?;
    Ok(())
}

#[tokio::test]
async fn a_deleted_kyma_takes_its_modules_along() -> TestResult {
    let modules = ModuleRuntime::start("kyma-goes", &[("sample", &["1.0.0"])]).await?;
    modules.setup.runtime.select(&["sample"]).await?;
    modules.becomes("sample", "1.0.0", State::Ready).await?;
    let kymas = modules.setup.kcp_kymas().await?;
    kymas.delete(modules.setup.runtime.name(), &DeleteParams::default()).await?;
    until("the Kyma to go", async || Ok(modules.setup.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    assert_eq!(modules.objects().await?, Vec::<String>::new());
    Ok(())
}
