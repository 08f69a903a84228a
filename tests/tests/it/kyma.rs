//! The Kyma reconcile on real control planes (`acceptance.md` 35, 38, 41-46, 48, and C4 "status stable when idle").

use anyhow::Context as _;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_api::{
    KymaStatus, Manifest, ModuleTemplate, State,
    names::{annotation, finalizer, label},
};
use tidewatch_testing::{
    artefacts, bed,
    landscape::{Options, catalog::template, until},
};

use crate::{
    support::{SingleRuntime, TestResult, is_canary, is_renewal, module, quick_options},
    sync::sum,
};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");
/// Transitions of event paths, by their new state.
const PATH_TRANSITIONS: &str = "tidewatch_path_transitions_total";

/// `acceptance.md` C2 38 and 46.
#[tokio::test]
async fn a_selected_module_gets_a_manifest_and_a_deselected_one_loses_it() -> TestResult {
    let setup = SingleRuntime::start("select", &[KEDA]).await?;
    setup.skr_status("an empty Kyma that is ready", |status| status.state() == State::Ready).await?;
    setup.runtime.select(&["keda"]).await?;
    let status = setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    let keda = module(&status, "keda").context("the module")?;
    assert_eq!((keda.version.as_deref(), keda.channel.as_deref()), (Some("1.0.0"), Some("regular")));
    assert_eq!(keda.manifest, None);
    let manifest = setup.manifest().await?;
    let name = |status: &KymaStatus| module(status, "keda")?.manifest.as_ref()?.metadata.as_ref()?.name.clone();
    let is_ready = |status: &KymaStatus| status.state() == State::Ready && name(status).is_some();
    let status = setup.kcp_status("the Manifest in the status", is_ready).await?;
    assert_eq!(name(&status), Some(manifest.name_any()));
    assert_eq!(manifest.labels()[label::MODULE_NAME], "keda");
    assert_eq!(manifest.labels()[label::CHANNEL], "regular");
    assert_eq!(manifest.spec.version.as_deref(), Some("1.0.0"));
    let digest = artefacts::layer_digest("kyma-project.io/module/keda", "1.0.0");
    assert_eq!(
        (&manifest.spec.install.source["type"], &manifest.spec.install.source["ref"]),
        (&json!("oci-dir"), &json!(digest))
    );
    assert_eq!(manifest.spec.localized_images.as_deref(), Some(&vec!["example.test/keda:1.0.0".to_owned()]));
    assert_eq!(manifest.spec.resource().context("the default CR")?["kind"], "Sample");
    assert!(manifest.owner_references().iter().any(|owner| owner.kind == "Kyma" && owner.name == setup.runtime.name()));

    setup.runtime.select(&[]).await?;
    let status = setup.skr_status("the module to go", |status| module(status, "keda").is_none()).await?;
    assert_eq!(status.state(), State::Ready);
    assert!(setup.manifests().await?.is_empty());
    Ok(())
}

/// `acceptance.md` C2 50.
#[tokio::test]
async fn a_manifest_has_exactly_the_content_of_its_template() -> TestResult {
    let setup = SingleRuntime::start("surplus", &[KEDA]).await?;
    setup.runtime.select(&["keda"]).await?;
    let templates = Api::<ModuleTemplate>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    let set_default_cr = async |spec: &Value, manager: &Value| {
        let mut template = template("keda", "1.0.0");
        template["spec"]["data"]["spec"] = spec.clone();
        template["spec"]["manager"] = manager.clone();
        let params = PatchParams::apply("operator").force();
        templates.patch("keda-1.0.0", &params, &Patch::Apply(&template)).await
    };
    let manifest_becomes = async |description: &str, spec: &Value, manager: &Value| {
        until(description, async || {
            let Some(manifest) = setup.manifests().await?.pop() else { return Ok(None) };
            let whole = serde_json::to_value(&manifest.spec)?;
            let same = whole["resource"]["spec"] == *spec && whole["manager"] == *manager;
            Ok(same.then(|| manifest.name_any()))
        })
        .await
    };
    let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": "x", "name": "keda"});
    let own = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "keda"});
    let more = json!({"replicas": 2, "logging": {"level": "debug"}, "parts": [{"name": "a", "size": 1}]});
    let less = json!({"replicas": 2, "parts": [{"name": "a"}]});
    set_default_cr(&more, &manager).await?;
    manifest_becomes("the content of the template", &more, &manager).await?;
    set_default_cr(&less, &own).await?;
    let name = manifest_becomes("the reduced content of the template", &less, &own).await?;

    let manifests = Api::<Manifest>::namespaced(setup.landscape.operator(), setup.landscape.namespace());
    for added in [json!({"resource": {"spec": {"evil": true}}}), json!({"manager": {"namespace": "evil"}})] {
        manifests.patch(&name, &PatchParams::default(), &Patch::Merge(json!({"spec": added}))).await?;
        manifest_becomes("the Manifest to be restored", &less, &own).await?;
    }

    // The user pins the version that is installed.
    let pin = json!({"metadata": {"annotations": {"version.operator.kyma-project.io/keda": "1.0.0"}}});
    setup.runtime.patch_kyma(&pin).await?;
    until("no channel on the Manifest", async || {
        Ok((!manifests.get(&name).await?.labels().contains_key(label::CHANNEL)).then_some(()))
    })
    .await?;
    setup.becomes_idle().await?;
    let marks = (setup.landscape.kcp().audit_mark()?, setup.runtime.cluster().audit_mark()?);
    // A further reconcile writes nothing.
    set_default_cr(&json!({"replicas": 3, "parts": [{"name": "a"}]}), &own).await?;
    manifest_becomes("the new number", &json!({"replicas": 3, "parts": [{"name": "a"}]}), &own).await?;
    setup.after_canaries(marks.1, 4).await?;
    let writes = setup.landscape.kcp().writes_since(marks.0)?;
    // Other tests write to KCP as well.
    let namespace = setup.landscape.namespace();
    let writes: Vec<_> =
        writes.iter().filter(|write| write.resource == "manifests" && write.namespace == namespace).collect();
    assert_eq!(writes.len(), 1, "{writes:?}");
    Ok(())
}

#[tokio::test]
async fn a_moved_channel_updates_its_followers() -> TestResult {
    let setup = SingleRuntime::start("channel", &[KEDA, ("warden", "2.0.0", "2.1.0")]).await?;
    let modules = json!([{"name": "keda"}, {"name": "warden", "channel": "fast"}]);
    setup.runtime.patch_kyma(&json!({"spec": {"modules": modules}})).await?;
    let version = |name: &'static str, version: &'static str| {
        move |status: &KymaStatus| module(status, name).and_then(|module| module.version.as_deref()) == Some(version)
    };
    setup
        .skr_status("both modules", |status| version("keda", "1.0.0")(status) && version("warden", "2.1.0")(status))
        .await?;
    setup.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    let status = setup.skr_status("the new version", version("keda", "1.1.0")).await?;
    assert!(version("warden", "2.1.0")(&status));
    let installed = |status: &KymaStatus| module(status, "keda").is_some_and(|keda| keda.manifest.is_some());
    setup.kcp_status("the Manifest", |status| installed(status) && version("keda", "1.1.0")(status)).await?;
    // 43: a downgrade is refused, the installed version stays, and the message gives the reason.
    setup.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.1.0")]).await?;
    let status = setup
        .skr_status("the refusal", |status| module(status, "keda").is_some_and(|keda| keda.state == State::Warning))
        .await?;
    let keda = module(&status, "keda").context("the module")?;
    assert_eq!(keda.version.as_deref(), Some("1.1.0"));
    assert!(keda.message.is_some(), "{keda:?}");
    let versions: Vec<_> = setup.manifests().await?.into_iter().filter_map(|manifest| manifest.spec.version).collect();
    assert!(versions.contains(&"1.1.0".to_owned()) && !versions.contains(&"1.0.0".to_owned()), "{versions:?}");
    Ok(())
}

#[tokio::test]
async fn an_unresolvable_module_is_in_error_and_affects_no_other() -> TestResult {
    let setup = SingleRuntime::start("unresolved", &[KEDA]).await?;
    setup.landscape.write_channels("nowhere", &[("regular", "9.9.9")]).await?;
    let modules = json!([
        {"name": "keda"}, {"name": "unknown"}, {"name": "nowhere"}, {"name": "keda-pinned"},
    ]);
    let pin = json!({"version.operator.kyma-project.io/keda-pinned": "1.0.0"});
    setup.runtime.patch_kyma(&json!({"metadata": {"annotations": pin}, "spec": {"modules": modules}})).await?;
    // The release meta may reach the receiver after the event of the change.
    let is_resolved = |status: &KymaStatus| {
        let message = module(status, "nowhere").and_then(|nowhere| nowhere.message.as_deref());
        status.modules().len() == 4 && message.is_some_and(|message| message.contains("9.9.9"))
    };
    let status = setup.skr_status("all four modules", is_resolved).await?;
    assert_eq!(status.state(), State::Error);
    let names: Vec<_> = status.modules().iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names, ["keda", "keda-pinned", "nowhere", "unknown"], "sorted by name");
    // It may be ready by the time at which the others are in error.
    let is_unaffected = |state: State| matches!(state, State::Processing | State::Ready);
    assert!(module(&status, "keda").is_some_and(|keda| is_unaffected(keda.state)), "{status:?}");
    for (name, state, word) in [
        ("unknown", State::Warning, "ModuleReleaseMeta"),
        ("nowhere", State::Error, "9.9.9"),
        ("keda-pinned", State::Warning, "ModuleReleaseMeta"),
    ] {
        let failed = module(&status, name).context("a module")?;
        let message = failed.message.as_deref().unwrap_or_default();
        assert!(failed.state == state && message.contains(word), "{failed:?}");
    }
    setup.manifest().await?;
    // Select a channel that the module lacks, and then return to the former one.
    setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "rapid"}]}})).await?;
    let failed = |status: &KymaStatus| module(status, "keda").is_some_and(|keda| keda.state == State::Error);
    setup.skr_status("the unknown channel", |status| status.modules().len() == 1 && failed(status)).await?;
    assert_eq!(setup.manifests().await?.len(), 1, "a failed lookup uninstalls nothing");
    setup.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "fast"}]}})).await?;
    setup.skr_status("the module again", |status| !failed(status) && is_unaffected(status.state())).await?;
    Ok(())
}

/// `acceptance.md` C2 48.
#[tokio::test]
async fn a_kyma_with_the_skip_label_is_not_reconciled_until_the_label_is_removed() -> TestResult {
    let setup = SingleRuntime::start("skip", &[KEDA]).await?;
    setup.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let kymas = setup.kcp_kymas().await?;
    let labelled = |value: serde_json::Value| json!({"metadata": {"labels": {label::SKIP_RECONCILIATION: value}}});
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!("True")))).await?;
    setup.becomes_idle().await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.runtime.select(&["keda"]).await?;
    let writes = setup.after_canaries(mark, 4).await?;
    let ours: Vec<_> =
        writes.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    assert!(setup.manifests().await?.is_empty());
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!(null)))).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn the_users_selection_survives_the_deletion_of_the_runtimes_kyma() -> TestResult {
    const PIN: &str = "version.operator.kyma-project.io/keda";
    let setup = SingleRuntime::start("survive", &[KEDA]).await?;
    let selection = json!({"channel": "fast", "modules": [{"name": "keda"}]});
    setup.runtime.patch_kyma(&json!({"metadata": {"annotations": {PIN: "1.0.0"}}, "spec": selection})).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    until("the accepted spec in KCP", async || {
        let kyma = setup.runtime.kcp_kyma().await?.context("the Kyma")?;
        Ok(kyma.annotations().get(annotation::ACCEPTED_SPEC).filter(|spec| spec.contains("1.0.0")).cloned())
    })
    .await?;
    let before = setup.runtime.skr_kyma().await?.context("the Kyma")?;
    let api = kube::Api::<tidewatch_api::Kyma>::namespaced(setup.runtime.cluster().client().await?, "kyma-system");
    api.delete("default", &DeleteParams::default()).await?;
    let after = until("the Kyma to come back", async || {
        Ok(setup.runtime.skr_kyma().await?.filter(|kyma| kyma.uid() != before.uid()))
    })
    .await?;
    assert_eq!((after.spec.channel.as_str(), after.spec.modules()), ("fast", before.spec.modules()));
    assert_eq!(after.annotations()[PIN], "1.0.0");
    assert_eq!(setup.manifest().await?.spec.version.as_deref(), Some("1.0.0"));
    Ok(())
}

#[tokio::test]
async fn a_deleted_kyma_goes_after_all_of_its_objects() -> TestResult {
    let setup = SingleRuntime::start("deletion", &[KEDA]).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    // A foreign finalizer holds the Manifest, as the module's operator would.
    let manifest = setup.manifest().await?;
    let manifests = kube::Api::<tidewatch_api::Manifest>::namespaced(
        setup.landscape.kcp().client().await?,
        setup.landscape.namespace(),
    );
    let held = |finalizers: serde_json::Value| Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
    manifests.patch(&manifest.name_any(), &PatchParams::default(), &held(json!(["example.test/held"]))).await?;
    let kymas = setup.kcp_kymas().await?;
    assert!(kymas.get(setup.runtime.name()).await?.finalizers().iter().any(|name| name == finalizer::KYMA));
    kymas.delete(setup.runtime.name(), &DeleteParams::default()).await?;
    let blocked = |status: &KymaStatus| {
        let operation = status.last_operation.as_ref().map(|last| last.operation.as_str()).unwrap_or_default();
        status.state() == State::Deleting && operation.contains("waiting for modules to be deleted")
    };
    setup.kcp_status("the blocking Manifest", blocked).await?;
    setup.skr_status("the blocking Manifest", blocked).await?;
    assert!(setup.runtime.skr_kyma().await?.is_some(), "the user can see the blocking Manifest");
    manifests.patch(&manifest.name_any(), &PatchParams::default(), &held(json!([]))).await?;
    until("the Kyma in KCP to go", async || Ok(setup.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    let client = setup.runtime.cluster().client().await?;
    let crds =
        kube::Api::<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition>::all(
            client,
        );
    let left: Vec<_> = crds.list(&Default::default()).await?.items.into_iter().map(|crd| crd.name_any()).collect();
    assert!(!left.iter().any(|name| name.ends_with("operator.kyma-project.io")), "{left:?}");
    Ok(())
}

#[tokio::test]
async fn an_idle_landscape_writes_only_the_canary() -> TestResult {
    let setup =
        SingleRuntime::with_options("idle", &[KEDA], Options { heartbeat_seconds: 3, ..quick_options() }).await?;
    setup.runtime.start_agent().await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    let is_proven = |status: &KymaStatus| status.condition("EventPath").is_some_and(|path| path.reason == "Proven");
    setup.kcp_status("a proven path", is_proven).await?;
    let receiver = format!("system:serviceaccount:{}:", setup.landscape.namespace());
    // Returns the writes during so many canaries, without the canaries and the renewals of the receiver's Lease.
    let written = async |canaries| {
        let marks = (setup.landscape.kcp().audit_mark()?, setup.runtime.cluster().audit_mark()?);
        let mut written = setup.after_canaries(marks.1, canaries).await?;
        written.retain(|write| !is_canary(write));
        let in_kcp = setup.landscape.kcp().writes_since(marks.0)?;
        written.extend(in_kcp.into_iter().filter(|write| write.user.starts_with(&receiver) && !is_renewal(write)));
        anyhow::Ok(written)
    };
    // A path that is lost because the machine stalls for three heartbeats is not idle: its conditions are written.
    let changes = async || Ok::<_, anyhow::Error>(sum(&setup.receiver_page().await?, PATH_TRANSITIONS, &[]));
    until("both sides to be idle", async || Ok(written(2).await?.is_empty().then_some(()))).await?;
    let written = until("a path that stays proven", async || {
        let before = changes().await?;
        // Conditions of an earlier loss may still be written.
        written(2).await?;
        let written = written(4).await?;
        Ok((before > 0 && changes().await? == before).then_some(written))
    })
    .await?;
    assert!(written.is_empty(), "{written:?}");
    Ok(())
}

#[tokio::test]
async fn a_receiver_reconciles_only_the_kymas_that_it_selects() -> TestResult {
    let selector = ["--kyma-selector", "example.test/shard=a"].map(str::to_owned).into();
    let setup =
        SingleRuntime::with_options("selector", &[KEDA], Options { receiver: selector, ..quick_options() }).await?;
    // A second, selected Kyma proves that this receiver works; the first one must stay as it was written.
    let bed = bed::shared().await?;
    let other = bed.runtime("selector-other").await?;
    let other = setup.landscape.register(other).await?;
    let kymas = setup.kcp_kymas().await?;
    let label = |value: serde_json::Value| Patch::Merge(json!({"metadata": {"labels": {"example.test/shard": value}}}));
    kymas.patch(other.name(), &PatchParams::default(), &label(json!("a"))).await?;
    until("the selected runtime's Kyma", async || other.skr_kyma().await).await?;
    let untouched = setup.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert!(untouched.status.is_none() && untouched.finalizers().is_empty(), "{untouched:?}");
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &label(json!("a"))).await?;
    until("the runtime's Kyma", async || setup.runtime.skr_kyma().await).await?;
    bed.stop(other.name());
    Ok(())
}

#[tokio::test]
async fn a_paused_runtime_gets_its_changes_when_the_pause_ends() -> TestResult {
    let setup = SingleRuntime::start("pause", &[KEDA]).await?;
    setup.becomes_idle().await?;
    let kymas = setup.kcp_kymas().await?;
    let pause = |value: serde_json::Value| Patch::Merge(json!({"metadata": {"labels": {label::PAUSE: value}}}));
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &pause(json!("true"))).await?;
    let mark = setup.runtime.cluster().audit_mark()?;
    setup.runtime.select(&["keda"]).await?;
    let writes = setup.after_canaries(mark, 4).await?;
    let ours: Vec<_> =
        writes.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    let (_, page) = setup.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    let unsettled =
        page.lines().find(|line| line.starts_with("tidewatch_agent_events_unsettled")).context("the metric")?;
    assert_ne!(unsettled.rsplit(' ').next(), Some("0"), "the event stays unsettled");
    kymas.patch(setup.runtime.name(), &PatchParams::default(), &pause(json!(null))).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    Ok(())
}
