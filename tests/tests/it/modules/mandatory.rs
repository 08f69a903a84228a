//! Mandatory modules: every runtime has them, whatever its user selects (`acceptance.md` C1 23, C2 47 and 54 to 56).

use tidewatch_api::{
    ModuleReleaseMeta,
    names::{annotation::OCM_COMPONENT_NAME, finalizer},
};
use tidewatch_testing::landscape::{DEADLINE, catalog::template};

use super::*;
use crate::catalog::{
    event_note,
    guard::{confirm, create_more_kymas, removal_is_held},
};

impl ModuleRuntime {
    fn release_metas(&self) -> Api<ModuleReleaseMeta> {
        Api::namespaced(self.setup.landscape.operator(), self.setup.landscape.namespace())
    }

    /// Makes a version of a module mandatory.
    async fn require(&self, module: &str, version: &str) -> Result<()> {
        let meta = json!({
            "apiVersion": "operator.kyma-project.io/v1beta2", "kind": "ModuleReleaseMeta", "metadata": {"name": module},
            "spec": {"moduleName": module, "ocmComponentName": format!("kyma-project.io/module/{module}"),
                     "mandatory": {"version": version}}});
        self.release_metas().patch(module, &PatchParams::apply("operator").force(), &Patch::Apply(&meta)).await?;
        Ok(())
    }

    /// Waits until the Manifest of a mandatory module is Ready in this version.
    async fn runs(&self, module: &str, version: &str) -> Result<Manifest> {
        until(&format!("the mandatory module {module} {version}"), async || {
            let manifest = self.manifest(module).await?;
            let is_ready = manifest.status.as_ref().is_some_and(|status| status.state == State::Ready);
            let is_applied = manifest.annotations().contains_key(annotation::SYNC_OCI_REF);
            Ok((is_ready && is_applied && manifest.spec.version.as_deref() == Some(version)).then_some(manifest))
        })
        .await
    }

    /// Waits until the receiver's metrics of mandatory modules are exactly these.
    async fn mandatory_metrics_are(&self, expected: &[String]) -> Result<()> {
        let is_it = |page: &str| {
            let samples = page.lines().filter(|line| line.starts_with("lifecycle_mgr_mandatory_module"));
            samples.eq(expected.iter().map(String::as_str)).then_some(())
        };
        let waited =
            self.setup.landscape.with_receiver(async |receiver| receiver.metrics_until(DEADLINE, is_it).await).await?;
        waited.with_context(|| format!("waited for: {expected:?}"))
    }

    /// Waits until the runtime has no Manifest.
    async fn manifest_goes(&self) -> Result<()> {
        until("the Manifest to go", async || Ok(self.setup.manifests().await?.is_empty().then_some(()))).await
    }

    /// Waits until a release meta is gone.
    async fn release_meta_goes(&self, module: &str) -> Result<()> {
        let metas = self.release_metas();
        let is_gone = async || Ok(metas.get_opt(module).await?.is_none().then_some(()));
        until(&format!("the release meta of {module} to go"), is_gone).await
    }
}

#[tokio::test]
async fn a_mandatory_module_is_installed_upgraded_and_removed_with_its_release_meta() -> TestResult {
    let modules = ModuleRuntime::start("mandatory", &[]).await?;
    let setup = &modules.setup;
    for version in ["1.0.0", "1.1.0"] {
        modules.publish("sample", version).await?;
    }
    // Modules that cannot be installed affect no other.
    modules.require("absent", "1.0.0").await?;
    let unpublished = Patch::Apply(template("unpublished", "1.0.0"));
    let templates = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    templates.patch("unpublished-1.0.0", &PatchParams::apply("operator"), &unpublished).await?;
    modules.require("unpublished", "1.0.0").await?;
    modules.require("sample", "1.0.0").await?;

    let manifest = modules.runs("sample", "1.0.0").await?;
    let labels = manifest.labels();
    let kyma = setup.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!((labels.get(label::CHANNEL), &*labels[label::MANDATORY_MODULE]), (None, "true"));
    assert_eq!((&labels[label::KYMA_NAME], &*labels[label::MODULE_NAME]), (&kyma.name_any(), "sample"));
    assert_eq!(manifest.annotations()[OCM_COMPONENT_NAME], "kyma-project.io/module/sample");
    assert_eq!(manifest.owner_references()[0].uid, kyma.uid().unwrap());
    let samples = modules.samples("v1alpha1", "Sample").await?;
    until("the default module CR to be Ready", async || {
        Ok((samples.get("default").await?.data["status"]["state"] == "Ready").then_some(()))
    })
    .await?;
    let note = event_note(setup, "LeftOutOfCatalog", ("ModuleReleaseMeta", "absent")).await?;
    assert!(note.contains("no template of the mandatory version 1.0.0"), "{note}");
    let note = event_note(setup, "MandatoryModuleFailed", ("ModuleReleaseMeta", "unpublished")).await?;
    assert!(note.contains("unpublished"), "{note}");
    modules.release_metas().delete("absent", &DeleteParams::default()).await?;
    modules.release_metas().delete("unpublished", &DeleteParams::default()).await?;

    // It is in no status, and in no catalog of the runtime.
    let is_plain = |status: &KymaStatus| status.state() == State::Ready && status.modules().is_empty();
    setup.kcp_status("Ready without modules", is_plain).await?;
    setup.skr_status("Ready without modules", is_plain).await?;
    let client = modules.client().await?;
    let metas = Api::<ModuleReleaseMeta>::namespaced(client.clone(), SKR_NAMESPACE).list(&Default::default()).await?;
    let templates = Api::<ModuleTemplate>::namespaced(client, SKR_NAMESPACE).list(&Default::default()).await?;
    assert_eq!((metas.items.len(), templates.items.len()), (0, 0));
    modules.release_meta_goes("absent").await?;
    modules.release_meta_goes("unpublished").await?;
    let state = |state: &str, value: u8| {
        let kyma = setup.runtime.name();
        format!(
            r#"lifecycle_mgr_mandatory_module_state{{kyma_name="{kyma}",module_name="sample",state="{state}"}} {value}"#
        )
    };
    let ready = [("Ready", 1), ("Processing", 0), ("Error", 0), ("Deleting", 0), ("Warning", 0)];
    let ready = ready.map(|(name, value)| state(name, value));
    let count = |count: u8| vec![format!("lifecycle_mgr_mandatory_modules {count}")];
    modules.mandatory_metrics_are(&[count(1), ready.to_vec()].concat()).await?;

    // A user who lists it is warned, and changes nothing.
    setup.runtime.select(&["sample"]).await?;
    modules.says("sample", State::Warning, "no templates were found").await?;
    setup.runtime.select(&[]).await?;
    setup.skr_status("Ready without modules", is_plain).await?;
    assert_eq!(modules.manifest("sample").await?.uid(), manifest.uid());

    modules.require("sample", "1.1.0").await?;
    modules.runs("sample", "1.1.0").await?;

    let meta = modules.release_metas().get("sample").await?;
    assert_eq!(meta.finalizers(), [finalizer::MANDATORY_MODULE]);
    modules.release_metas().delete("sample", &DeleteParams::default()).await?;
    modules.manifest_goes().await?;
    modules.is_clean().await?;
    modules.release_meta_goes("sample").await?;
    modules.mandatory_metrics_are(&count(0)).await?;
    Ok(())
}

#[tokio::test]
async fn a_skipped_kyma_gets_no_mandatory_module_and_a_deleted_one_loses_it() -> TestResult {
    let modules = ModuleRuntime::start("mandatory-skip", &[]).await?;
    let setup = &modules.setup;
    let kymas = modules.setup.kcp_kymas().await?;
    let skip = async |value: Value| {
        let labels = Patch::Merge(json!({"metadata": {"labels": {label::SKIP_RECONCILIATION: value}}}));
        kymas.patch(setup.runtime.name(), &PatchParams::default(), &labels).await
    };
    skip(json!("true")).await?;
    let parked = async |least| setup.receiver_metric_reaches("tidewatch_kyma_passes_total", &["parked"], least).await;
    parked(1).await?;
    modules.publish("sample", "1.0.0").await?;
    modules.require("sample", "1.0.0").await?;
    until("the finalizer", async || {
        Ok((!modules.release_metas().get("sample").await?.finalizers().is_empty()).then_some(()))
    })
    .await?;
    // The change has reached the Kyma.
    parked(2).await?;
    assert_eq!(setup.manifests().await?.len(), 0);
    skip(Value::Null).await?;
    modules.runs("sample", "1.0.0").await?;

    // The user's resources block its removal, and the Kyma names them.
    modules.create_sample("mine").await?;
    kymas.delete(setup.runtime.name(), &DeleteParams::default()).await?;
    let names_it = |status: &KymaStatus| {
        let operation = status.last_operation.as_ref().map(|last| last.operation.as_str()).unwrap_or_default();
        operation.contains("sample (waiting for module crs deletion: Sample kyma-system/mine)")
            && status.modules().is_empty()
    };
    setup.skr_status("the blocking resource", names_it).await?;
    modules.samples("v1alpha1", "Sample").await?.delete("mine", &DeleteParams::default()).await?;
    until("the Kyma to go", async || Ok(setup.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    assert_eq!(modules.objects().await?, Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn removal_of_a_mandatory_module_from_many_runtimes_waits_for_confirmation() -> TestResult {
    let modules = ModuleRuntime::start("mandatory-guard", &[]).await?;
    let setup = &modules.setup;
    modules.publish("sample", "1.0.0").await?;
    modules.require("sample", "1.0.0").await?;
    modules.runs("sample", "1.0.0").await?;
    create_more_kymas(setup).await?;
    modules.release_metas().delete("sample", &DeleteParams::default()).await?;
    let held = removal_is_held(setup).await?;
    assert_eq!((&held["module"], held["runtimes"].as_u64()), (&json!("sample"), Some(5)), "{held}");
    let note = event_note(setup, "RemovalHeld", ("ModuleReleaseMeta", "sample")).await?;
    assert!(note.contains("a removal of sample") && note.contains("from 5 of 5 runtimes"), "{note}");
    // A new process holds it as well.
    setup.landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    setup.landscape.start_receiver().await?;
    setup.becomes_idle().await?;
    let manifest = modules.manifest("sample").await?;
    assert_eq!(manifest.metadata.deletion_timestamp, None);
    assert_eq!(modules.release_metas().get("sample").await?.finalizers(), [finalizer::MANDATORY_MODULE]);

    confirm(setup, held["change"].as_str().context("a name")?).await?;
    modules.manifest_goes().await?;
    modules.is_clean().await?;
    modules.release_meta_goes("sample").await?;
    Ok(())
}
