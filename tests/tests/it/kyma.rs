//! The Kyma reconcile on real control planes (`acceptance.md` 35, 38, 41-46, 48, and C4 "status stable when idle").

use anyhow::Context as _;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{KymaStatus, Manifest, ModuleTemplate, State},
    names::{annotation, finalizer, label},
};
use tidewatch_tests::{
    bed,
    landscape::{Options, catalog::template, until},
};

use crate::support::{One, Tested, is_canary, is_renewal, module, quick};

const KEDA: (&str, &str, &str) = ("keda", "1.0.0", "1.1.0");

#[tokio::test]
async fn a_selected_module_becomes_a_manifest_and_a_deselected_one_goes() -> Tested {
    let one = One::start("select", &[KEDA]).await?;
    one.skr_status("an empty Kyma that is ready", |status| status.state() == State::Ready).await?;
    one.runtime.select(&["keda"]).await?;
    let status = one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    let keda = module(&status, "keda").context("the module")?;
    // Nobody installs it yet, and the status does not say otherwise.
    assert_eq!(
        (keda.state, keda.version.as_deref(), keda.channel.as_deref()),
        (State::Processing, Some("1.0.0"), Some("regular"))
    );
    assert_eq!(keda.manifest, None);
    let status = one.kcp_status("the module", |status| module(status, "keda").is_some()).await?;
    assert_eq!(status.state(), State::Processing);

    let manifests = one.manifests().await?;
    let [manifest] = &manifests[..] else { panic!("one Manifest, not {}", manifests.len()) };
    assert_eq!(
        module(&status, "keda").and_then(|keda| keda.manifest.as_ref()?.metadata.as_ref()?.name.clone()),
        Some(manifest.name_any())
    );
    assert_eq!(manifest.labels()[label::MODULE_NAME], "keda");
    assert_eq!(manifest.labels()[label::CHANNEL], "regular");
    assert_eq!(manifest.spec.version.as_deref(), Some("1.0.0"));
    assert_eq!(manifest.spec.install.source["type"], "oci-dir");
    assert_eq!(manifest.spec.resource().context("the default CR")?["kind"], "Sample");
    assert!(manifest.owner_references().iter().any(|owner| owner.kind == "Kyma" && owner.name == one.runtime.name()));

    one.runtime.select(&[]).await?;
    let status = one.skr_status("the module to go", |status| module(status, "keda").is_none()).await?;
    assert_eq!(status.state(), State::Ready);
    assert!(one.manifests().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_manifest_has_what_its_template_says_and_no_more() -> Tested {
    let one = One::start("surplus", &[KEDA]).await?;
    one.runtime.select(&["keda"]).await?;
    let templates = Api::<ModuleTemplate>::namespaced(one.landscape.operator(), one.landscape.namespace());
    let says = async |spec: &Value, manager: &Value| {
        let mut template = template("keda", "1.0.0");
        template["spec"]["data"]["spec"] = spec.clone();
        template["spec"]["manager"] = manager.clone();
        let params = PatchParams::apply("operator").force();
        templates.patch("keda-1.0.0", &params, &Patch::Apply(&template)).await
    };
    let installs = async |what: &str, spec: &Value, manager: &Value| {
        until(what, async || {
            let Some(manifest) = one.manifests().await?.pop() else { return Ok(None) };
            let whole = serde_json::to_value(&manifest.spec)?;
            let same = whole["resource"]["spec"] == *spec && whole["manager"] == *manager;
            Ok(same.then(|| manifest.name_any()))
        })
        .await
    };
    let manager = json!({"group": "apps", "version": "v1", "kind": "Deployment", "namespace": "x", "name": "keda"});
    let own = json!({"group": "apps", "version": "v1", "kind": "Deployment", "name": "keda"});
    let (more, less) = (
        json!({"replicas": 2, "logging": {"level": "debug"}, "parts": [{"name": "a", "size": 1}]}),
        json!({"replicas": 2, "parts": [{"name": "a"}]}),
    );
    says(&more, &manager).await?;
    installs("what the template says", &more, &manager).await?;
    says(&less, &own).await?;
    let name = installs("what it still says of the same version", &less, &own).await?;

    let manifests = Api::<Manifest>::namespaced(one.landscape.operator(), one.landscape.namespace());
    for added in [json!({"resource": {"spec": {"evil": true}}}), json!({"manager": {"namespace": "evil"}})] {
        manifests.patch(&name, &PatchParams::default(), &Patch::Merge(json!({"spec": added}))).await?;
        installs("the Manifest as it was", &less, &own).await?;
    }

    // The user fixes the version that is installed.
    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "version": "1.0.0"}]}})).await?;
    until("no channel on the Manifest", async || {
        Ok((!manifests.get(&name).await?.labels().contains_key(label::CHANNEL)).then_some(()))
    })
    .await?;
    one.quiet().await?;
    let marks = (one.landscape.kcp().audit_mark()?, one.runtime.cluster().audit_mark()?);
    // A pass over it finds nothing to do.
    says(&json!({"replicas": 3, "parts": [{"name": "a"}]}), &own).await?;
    installs("the new number", &json!({"replicas": 3, "parts": [{"name": "a"}]}), &own).await?;
    one.after_canaries(marks.1, 4).await?;
    let writes = one.landscape.kcp().writes_since(marks.0)?;
    // Other tests write there, too.
    let namespace = one.landscape.namespace();
    let writes: Vec<_> =
        writes.iter().filter(|write| write.resource == "manifests" && write.namespace == namespace).collect();
    assert_eq!(writes.len(), 1, "{writes:?}");
    Ok(())
}

#[tokio::test]
async fn a_moved_channel_moves_its_followers() -> Tested {
    let one = One::start("channel", &[KEDA, ("warden", "2.0.0", "2.1.0")]).await?;
    let modules = json!([{"name": "keda"}, {"name": "warden", "channel": "fast"}]);
    one.runtime.patch_kyma(&json!({"spec": {"modules": modules}})).await?;
    let version = |name: &'static str, version: &'static str| {
        move |status: &KymaStatus| module(status, name).and_then(|module| module.version.as_deref()) == Some(version)
    };
    one.skr_status("both modules", |status| version("keda", "1.0.0")(status) && version("warden", "2.1.0")(status))
        .await?;
    one.landscape.write_channels("keda", &[("regular", "1.1.0"), ("fast", "1.1.0")]).await?;
    let status = one.skr_status("the new version", version("keda", "1.1.0")).await?;
    assert!(version("warden", "2.1.0")(&status));
    // 43: a downgrade is refused, what runs stays, and the message says why.
    one.landscape.write_channels("keda", &[("regular", "1.0.0"), ("fast", "1.1.0")]).await?;
    let status = one
        .skr_status("the refusal", |status| module(status, "keda").is_some_and(|keda| keda.state == State::Warning))
        .await?;
    let keda = module(&status, "keda").context("the module")?;
    assert_eq!(keda.version.as_deref(), Some("1.1.0"));
    assert!(keda.message.is_some(), "{keda:?}");
    let versions: Vec<_> = one.manifests().await?.into_iter().filter_map(|manifest| manifest.spec.version).collect();
    assert!(versions.contains(&"1.1.0".to_owned()) && !versions.contains(&"1.0.0".to_owned()), "{versions:?}");
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_resolved_is_an_error_of_that_module_alone() -> Tested {
    let one = One::start("unresolved", &[KEDA]).await?;
    one.landscape.write_channels("nowhere", &[("regular", "9.9.9")]).await?;
    let modules = json!([
        {"name": "keda"}, {"name": "unknown"}, {"name": "nowhere"}, {"name": "keda-fixed", "version": "1.0.0"},
    ]);
    one.runtime.patch_kyma(&json!({"spec": {"modules": modules}})).await?;
    // The release meta may come to the receiver after the event of the change.
    let is_told = |status: &KymaStatus| {
        let message = module(status, "nowhere").and_then(|nowhere| nowhere.message.as_deref());
        status.modules().len() == 4 && message.is_some_and(|message| message.contains("9.9.9"))
    };
    let status = one.skr_status("all four modules", is_told).await?;
    assert_eq!(status.state(), State::Error);
    let names: Vec<_> = status.modules().iter().map(|module| module.name.as_str()).collect();
    assert_eq!(names, ["keda", "keda-fixed", "nowhere", "unknown"], "sorted by name");
    assert_eq!(module(&status, "keda").map(|keda| keda.state), Some(State::Processing));
    for (name, word) in [("unknown", "ModuleReleaseMeta"), ("nowhere", "9.9.9"), ("keda-fixed", "ModuleReleaseMeta")] {
        let failed = module(&status, name).context("a module")?;
        let message = failed.message.as_deref().unwrap_or_default();
        assert!(matches!(failed.state, State::Error | State::Warning) && message.contains(word), "{failed:?}");
    }
    assert_eq!(one.manifests().await?.len(), 1);
    // A channel that the module has not, and back.
    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "rapid"}]}})).await?;
    let failed = |status: &KymaStatus| module(status, "keda").is_some_and(|keda| keda.state == State::Error);
    one.skr_status("the unknown channel", |status| status.modules().len() == 1 && failed(status)).await?;
    assert_eq!(one.manifests().await?.len(), 1, "a lookup that failed uninstalls nothing");
    one.runtime.patch_kyma(&json!({"spec": {"modules": [{"name": "keda", "channel": "fast"}]}})).await?;
    one.skr_status("the module again", |status| !failed(status) && status.state() == State::Processing).await?;
    Ok(())
}

#[tokio::test]
async fn a_kyma_with_the_skip_label_is_frozen_until_the_label_goes() -> Tested {
    let one = One::start("skip", &[KEDA]).await?;
    one.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let kymas = one.kcp_kymas().await?;
    let labelled = |value: serde_json::Value| json!({"metadata": {"labels": {label::SKIP_RECONCILIATION: value}}});
    kymas.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!("True")))).await?;
    one.quiet().await?;
    let mark = one.runtime.cluster().audit_mark()?;
    one.runtime.select(&["keda"]).await?;
    let writes = one.after_canaries(mark, 4).await?;
    let ours: Vec<_> =
        writes.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    assert!(one.manifests().await?.is_empty());
    kymas.patch(one.runtime.name(), &PatchParams::default(), &Patch::Merge(labelled(json!(null)))).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    Ok(())
}

#[tokio::test]
async fn the_users_selection_survives_the_deletion_of_the_runtimes_kyma() -> Tested {
    let one = One::start("survive", &[KEDA]).await?;
    one.runtime.patch_kyma(&json!({"spec": {"channel": "fast", "modules": [{"name": "keda"}]}})).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    until("the accepted spec in KCP", async || {
        let kyma = one.runtime.kcp_kyma().await?.context("the Kyma")?;
        Ok(kyma.annotations().get(annotation::ACCEPTED_SPEC).filter(|spec| spec.contains("keda")).cloned())
    })
    .await?;
    let before = one.runtime.skr_kyma().await?.context("the Kyma")?;
    let api =
        kube::Api::<tidewatch_shared::api::Kyma>::namespaced(one.runtime.cluster().client().await?, "kyma-system");
    api.delete("default", &DeleteParams::default()).await?;
    let after = until("the Kyma to come back", async || {
        Ok(one.runtime.skr_kyma().await?.filter(|kyma| kyma.uid() != before.uid()))
    })
    .await?;
    assert_eq!((after.spec.channel.as_str(), after.spec.modules()), ("fast", before.spec.modules()));
    assert_eq!(one.manifests().await?.len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_deleted_kyma_takes_everything_along_and_goes_last() -> Tested {
    let one = One::start("deletion", &[KEDA]).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    // Somebody else holds the Manifest, as the module's operator would.
    let [manifest] = &one.manifests().await?[..] else { panic!("one Manifest") };
    let manifests = kube::Api::<tidewatch_shared::api::Manifest>::namespaced(
        one.landscape.kcp().client().await?,
        one.landscape.namespace(),
    );
    let held = |finalizers: serde_json::Value| Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
    manifests.patch(&manifest.name_any(), &PatchParams::default(), &held(json!(["example.test/held"]))).await?;
    let kymas = one.kcp_kymas().await?;
    assert!(kymas.get(one.runtime.name()).await?.finalizers().iter().any(|name| name == finalizer::KYMA));
    kymas.delete(one.runtime.name(), &DeleteParams::default()).await?;
    let blocked = |status: &KymaStatus| {
        let operation = status.last_operation.as_ref().map(|last| last.operation.as_str()).unwrap_or_default();
        status.state() == State::Deleting && operation.contains("waiting for modules to be deleted")
    };
    one.kcp_status("what blocks", blocked).await?;
    one.skr_status("what blocks", blocked).await?;
    assert!(one.runtime.skr_kyma().await?.is_some(), "the user sees what blocks");
    manifests.patch(&manifest.name_any(), &PatchParams::default(), &held(json!([]))).await?;
    until("the Kyma in KCP to go", async || Ok(one.runtime.kcp_kyma().await?.is_none().then_some(()))).await?;
    let client = one.runtime.cluster().client().await?;
    let crds =
        kube::Api::<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition>::all(
            client,
        );
    let left: Vec<_> = crds.list(&Default::default()).await?.items.into_iter().map(|crd| crd.name_any()).collect();
    assert!(!left.iter().any(|name| name.ends_with("operator.kyma-project.io")), "{left:?}");
    Ok(())
}

#[tokio::test]
async fn an_idle_landscape_writes_the_canary_and_nothing_else() -> Tested {
    // A machine that stands still for three intervals is a path that is not proven, which is written.
    let one = One::with("idle", &[KEDA], Options { heartbeat_seconds: 3, ..quick() }).await?;
    one.runtime.start_agent().await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    let is_proven = |status: &KymaStatus| status.condition("EventPath").is_some_and(|path| path.reason == "Proven");
    one.kcp_status("a proven path", is_proven).await?;
    let receiver = format!("system:serviceaccount:{}:", one.landscape.namespace());
    // What was written in the time of so many canaries, and is neither one nor a renewal of the receiver's Lease.
    let written = async |canaries| {
        let marks = (one.landscape.kcp().audit_mark()?, one.runtime.cluster().audit_mark()?);
        let mut written = one.after_canaries(marks.1, canaries).await?;
        written.retain(|write| !is_canary(write));
        let in_kcp = one.landscape.kcp().writes_since(marks.0)?;
        written.extend(in_kcp.into_iter().filter(|write| write.user.starts_with(&receiver) && !is_renewal(write)));
        anyhow::Ok(written)
    };
    until("both sides to be quiet", async || Ok(written(2).await?.is_empty().then_some(()))).await?;
    let written = written(4).await?;
    assert!(written.is_empty(), "{written:?}");
    Ok(())
}

#[tokio::test]
async fn a_receiver_works_only_on_the_kymas_that_it_selects() -> Tested {
    let selector = ["--kyma-selector", "example.test/shard=a"].map(str::to_owned).into();
    let one = One::with("selector", &[KEDA], Options { receiver: selector, ..quick() }).await?;
    // A second Kyma, selected, proves that this receiver works; the first one must stay as it was written.
    let bed = bed::shared().await?;
    let other = bed.runtime("selector-other").await?;
    let other = one.landscape.register(other).await?;
    let kymas = one.kcp_kymas().await?;
    let label = |value: serde_json::Value| Patch::Merge(json!({"metadata": {"labels": {"example.test/shard": value}}}));
    kymas.patch(other.name(), &PatchParams::default(), &label(json!("a"))).await?;
    until("the selected runtime's Kyma", async || other.skr_kyma().await).await?;
    let untouched = one.runtime.kcp_kyma().await?.context("the Kyma")?;
    assert!(untouched.status.is_none() && untouched.finalizers().is_empty(), "{untouched:?}");
    kymas.patch(one.runtime.name(), &PatchParams::default(), &label(json!("a"))).await?;
    until("the runtime's Kyma", async || one.runtime.skr_kyma().await).await?;
    bed.stop(other.name());
    Ok(())
}

#[tokio::test]
async fn a_paused_runtime_gets_its_changes_when_the_pause_ends() -> Tested {
    let one = One::start("pause", &[KEDA]).await?;
    one.quiet().await?;
    let kymas = one.kcp_kymas().await?;
    let pause = |value: serde_json::Value| Patch::Merge(json!({"metadata": {"labels": {label::PAUSE: value}}}));
    kymas.patch(one.runtime.name(), &PatchParams::default(), &pause(json!("true"))).await?;
    let mark = one.runtime.cluster().audit_mark()?;
    one.runtime.select(&["keda"]).await?;
    let writes = one.after_canaries(mark, 4).await?;
    let ours: Vec<_> =
        writes.iter().filter(|write| write.user.starts_with("system:serviceaccount:kube-system:")).collect();
    assert!(ours.is_empty(), "{ours:?}");
    let (_, page) = one.runtime.with_agent(async |agent| agent.get("/metrics").await).await??;
    let unsettled =
        page.lines().find(|line| line.starts_with("tidewatch_agent_events_unsettled")).context("the metric")?;
    assert_ne!(unsettled.rsplit(' ').next(), Some("0"), "the event is kept");
    kymas.patch(one.runtime.name(), &PatchParams::default(), &pause(json!(null))).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    Ok(())
}
