//! Takeover from lifecycle-manager, runtime by runtime, and the way back: our CRDs replace lifecycle-manager's in place,
//! although those still list a version that ours lack, and at no time do both controllers act on one Kyma.

mod judge;
mod lifecycle_manager;

use ::http::StatusCode;
use anyhow::{Context as _, Result};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{ConfigMap, Secret, ServiceAccount},
        rbac::v1::ClusterRole,
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    core::{ApiResource, DynamicObject, GroupVersionKind},
};
use serde_json::{Value, json};
use tidewatch_api::{
    Kyma, ModuleTemplate, State,
    crds::runtime_crds,
    names::{AGENT_DEPLOYMENT, AGENT_OBJECT, IDENTITY_SECRET, SKR_NAMESPACE, annotation, finalizer, label},
};
use tidewatch_testing::{
    bed,
    contract_client::ContractClient,
    control_plane::{Cluster, ClusterUser},
    http,
    landscape::{AGENT_IMAGE, DEADLINE, Landscape, Options, Runtime, until},
};

use self::{
    judge::{Actor, Judge},
    lifecycle_manager::{LifecycleManager, OURS},
};
use crate::{
    load::KEDA,
    support::{Fleet, Isolation, SingleRuntime, TestResult, module, quick_options},
};

/// Installs lifecycle-manager's CRDs in a runtime, with both versions and `v1beta1` among the stored ones.
async fn install_lifecycle_managers_crds(name: &str) -> Result<()> {
    let cluster = bed::shared().await?.runtime(name).await?;
    let api = Api::<CustomResourceDefinition>::all(cluster.client_as(ClusterUser::Other).await?);
    for crd in runtime_crds() {
        let mut old = crd.clone();
        let mut beta1 = old.spec.versions[0].clone();
        beta1.name = "v1beta1".to_owned();
        // Store `v1beta1` first, as old installations did.
        (beta1.storage, beta1.served) = (true, true);
        old.spec.versions[0].storage = false;
        old.spec.versions.push(beta1);
        let created = api.create(&PostParams::default(), &old).await?;
        until("v1beta1 to be stored", async || {
            let stored = api
                .get(&created.name_any())
                .await?
                .status
                .and_then(|status| status.stored_versions)
                .unwrap_or_default();
            Ok(stored.contains(&"v1beta1".to_owned()).then_some(()))
        })
        .await?;
        if crd.spec.names.kind == "ModuleTemplate" {
            cluster.ensure_namespace(SKR_NAMESPACE).await?;
            stored_in_v1beta1(&cluster).await?.create(&PostParams::default(), &older_template()?).await?;
        }
        let versions = json!({"spec": {"versions": old.spec.versions.iter().map(|version| {
            let mut version = version.clone();
            (version.storage, version.served) = (version.name == "v1beta2", version.name == "v1beta2");
            version
        }).collect::<Vec<_>>()}});
        api.patch(&created.name_any(), &PatchParams::default(), &Patch::Merge(versions)).await?;
    }
    Ok(())
}

/// A ModuleTemplate of the runtime's user.
fn older_template() -> Result<DynamicObject> {
    let template = json!({"apiVersion": "operator.kyma-project.io/v1beta1", "kind": "ModuleTemplate",
        "metadata": {"name": "older", "annotations": {"user": "text"}}, "spec": {"descriptor": {}}});
    Ok(serde_json::from_value(template)?)
}

async fn stored_in_v1beta1(cluster: &Cluster) -> Result<Api<DynamicObject>> {
    let kind = GroupVersionKind::gvk("operator.kyma-project.io", "v1beta1", "ModuleTemplate");
    let client = cluster.client_as(ClusterUser::Other).await?;
    Ok(Api::namespaced_with(client, SKR_NAMESPACE, &ApiResource::from_gvk(&kind)))
}

#[tokio::test]
async fn our_crds_replace_lifecycle_managers_in_place() -> TestResult {
    install_lifecycle_managers_crds("takeover").await?;
    let setup = SingleRuntime::without_agent("takeover", &[("keda", "1.0.0", "1.1.0")]).await?;
    setup.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let api = Api::<CustomResourceDefinition>::all(setup.runtime.cluster().client().await?);
    for crd in runtime_crds() {
        let there = api.get(&crd.name_any()).await?;
        let versions: Vec<_> = there.spec.versions.iter().map(|version| version.name.as_str()).collect();
        assert_eq!(versions, ["v1beta2"], "{}", crd.name_any());
        let stored = there.status.and_then(|status| status.stored_versions);
        assert_eq!(stored, Some(vec!["v1beta2".to_owned()]), "{}", crd.name_any());
    }
    let templates = Api::<ModuleTemplate>::namespaced(setup.runtime.user(), SKR_NAMESPACE);
    assert_eq!(templates.get("older").await?.annotations()["user"], "text", "no object is lost");
    Ok(())
}

/// Options of a receiver that selects the Kymas with our label, and waits until lifecycle-manager has stopped writing.
pub(crate) fn takeover_options() -> Options {
    let receiver = vec![format!("--kyma-selector={}={}", OURS.0, OURS.1), "--takeover-quiet-seconds=10".to_owned()];
    Options { receiver, ..quick_options() }
}

/// Merges labels into a Kyma in KCP as the operator.
async fn mark(landscape: &Landscape, runtime: &Runtime, labels: Value) -> Result<()> {
    let kymas = Api::<Kyma>::namespaced(landscape.operator(), landscape.namespace());
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    kymas.patch(runtime.name(), &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Assigns a Kyma to our receiver.
pub(crate) async fn take_over(landscape: &Landscape, runtime: &Runtime) -> Result<()> {
    mark(landscape, runtime, json!({OURS.0: OURS.1, label::HAND_BACK: null})).await
}

/// Requests the hand-back of a Kyma, and waits until it is done.
pub(crate) async fn request_hand_back(landscape: &Landscape, runtime: &Runtime) -> Result<()> {
    mark(landscape, runtime, json!({label::HAND_BACK: label::HAND_BACK_REQUESTED})).await?;
    hand_back_is_done(runtime).await
}

async fn hand_back_is_done(runtime: &Runtime) -> Result<()> {
    until(&format!("{} to be handed back", runtime.name()), async || {
        let kyma = runtime.kcp_kyma().await?.context("the Kyma")?;
        Ok(kyma.labels().get(label::HAND_BACK).is_some_and(|value| value == label::HAND_BACK_DONE).then_some(()))
    })
    .await
}

/// The image of the agent's container, and its whole pod template.
async fn agent_container(cluster: &Cluster) -> Result<(String, Value)> {
    let deployment =
        Api::<Deployment>::namespaced(cluster.client().await?, SKR_NAMESPACE).get(AGENT_DEPLOYMENT).await?;
    let pod = deployment.spec.and_then(|spec| spec.template.spec).context("a pod")?;
    let image = pod.containers[0].image.clone().context("an image")?;
    Ok((image, serde_json::to_value(pod)?))
}

/// Checks that none of our objects is left in the runtime, and that lifecycle-manager's objects are intact.
async fn lifecycle_managers_state_is_intact(runtime: &Runtime) -> Result<()> {
    let client = runtime.cluster().client().await?;
    assert!(Api::<ConfigMap>::namespaced(client.clone(), SKR_NAMESPACE).get_opt(AGENT_OBJECT).await?.is_none());
    assert!(Api::<ServiceAccount>::namespaced(client.clone(), SKR_NAMESPACE).get_opt(AGENT_OBJECT).await?.is_none());
    assert!(Api::<ClusterRole>::all(client.clone()).get_opt(AGENT_OBJECT).await?.is_none());
    let (image, pod) = agent_container(runtime.cluster()).await?;
    assert_eq!(image, "theirs:1");
    assert!(pod["containers"][0]["args"].is_null() && pod["serviceAccountName"].is_null(), "{pod}");
    let secret = Api::<Secret>::namespaced(client, SKR_NAMESPACE).get(IDENTITY_SECRET).await?;
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
    let kyma = runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(kyma.finalizers(), [finalizer::KYMA], "lifecycle-manager removes its finalizer itself");
    assert!(!kyma.annotations().contains_key(annotation::INPUTS), "{:?}", kyma.annotations());
    assert!(!kyma.annotations().contains_key(annotation::ACCEPTED_SPEC), "{:?}", kyma.annotations());
    let status = kyma.status.context("a status")?;
    for ours in ["EventPath", "RuntimeAccess", "Paused"] {
        assert!(status.condition(ours).is_none(), "{ours} is left and would never change again");
    }
    Ok(())
}

/// Starts runtimes that lifecycle-manager manages, beside our receiver.
async fn start_beside_lifecycle_manager(name: &str, runtimes: usize) -> Result<(Fleet, LifecycleManager)> {
    let (mut fleet, clusters) = Fleet::prepare(name, runtimes, takeover_options()).await?;
    fleet.register(clusters.clone()).await?;
    let clusters: Vec<_> = clusters.iter().map(AsRef::as_ref).collect();
    let lifecycle_manager = LifecycleManager::start(&fleet.landscape, &clusters).await?;
    Ok((fleet, lifecycle_manager))
}

#[tokio::test]
async fn runtimes_are_taken_over_and_handed_back_without_overlapping_writes() -> TestResult {
    let (fleet, lifecycle_manager) = start_beside_lifecycle_manager("gradual", 2).await?;
    let (landscape, [first, second]) = (&fleet.landscape, [&fleet.members[0], &fleet.members[1]]);
    let judges = [Judge::begin(landscape, &first.runtime)?, Judge::begin(landscape, &second.runtime)?];
    for member in [first, second] {
        lifecycle_manager.reconciles_twice(member.runtime.name()).await?;
    }

    take_over(landscape, &first.runtime).await?;
    first.path_proven().await?;
    first.delivers(&["keda"]).await?;
    assert_eq!(agent_container(first.runtime.cluster()).await?.0, AGENT_IMAGE);
    // The other runtime is unaffected.
    lifecycle_manager.reconciles_twice(second.runtime.name()).await?;
    assert_eq!(judges[1].actors()?, [Actor::LifecycleManager]);
    take_over(landscape, &second.runtime).await?;
    second.path_proven().await?;

    request_hand_back(landscape, &first.runtime).await?;
    lifecycle_manager.reconciles_twice(first.runtime.name()).await?;
    lifecycle_managers_state_is_intact(&first.runtime).await?;
    let written = first.runtime.skr_kyma().await?.context("the Kyma in the runtime")?;
    assert_eq!(written.spec.modules().len(), 1, "the user's selection stays");
    second.delivers(&["keda"]).await?;

    // Take over a second time, as if it were the first.
    take_over(landscape, &first.runtime).await?;
    first.path_proven().await?;
    first.delivers(&[]).await?;
    let theirs = Actor::LifecycleManager;
    let ours = Actor::Us;
    assert_eq!(judges[0].actors()?, [theirs, ours, theirs, ours]);
    assert_eq!(judges[1].actors()?, [theirs, ours]);
    assert_eq!(lifecycle_manager.failures(), Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn a_takeover_or_hand_back_continues_after_a_receiver_restart() -> TestResult {
    let (fleet, lifecycle_manager) = start_beside_lifecycle_manager("midway", 1).await?;
    let landscape = &fleet.landscape;
    let member = fleet.only();
    let runtime = &member.runtime;
    let cluster = member.runtime.cluster();
    let judge = Judge::begin(landscape, runtime)?;
    lifecycle_manager.reconciles_twice(runtime.name()).await?;

    // Kill the receiver as soon as the takeover has begun.
    let maps = Api::<ConfigMap>::namespaced(cluster.client().await?, SKR_NAMESPACE);
    take_over(landscape, runtime).await?;
    until("the take-over to begin", async || Ok(maps.get_opt(AGENT_OBJECT).await?.map(drop))).await?;
    landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    landscape.start_receiver().await?;
    member.path_proven().await?;
    member.delivers(&["keda"]).await?;

    // Shut down the receiver as soon as the hand-back has begun; a standby is waiting.
    let next = landscape.start_standby("next", landscape.event_port()).await?;
    let deployments = Api::<Deployment>::namespaced(cluster.client().await?, SKR_NAMESPACE);
    mark(landscape, runtime, json!({label::HAND_BACK: label::HAND_BACK_REQUESTED})).await?;
    until("the agent to go", async || Ok(deployments.get_opt(AGENT_DEPLOYMENT).await?.is_none().then_some(()))).await?;
    let ended = landscape.with_receiver(async |receiver| receiver.sigterm(DEADLINE).await).await??;
    assert!(ended.success(), "{ended}");
    next.ready(DEADLINE).await?;
    hand_back_is_done(runtime).await?;
    lifecycle_manager.reconciles_twice(runtime.name()).await?;
    lifecycle_managers_state_is_intact(runtime).await?;
    assert_eq!(judge.actors()?, [Actor::LifecycleManager, Actor::Us, Actor::LifecycleManager]);
    assert_eq!(lifecycle_manager.failures(), Vec::<String>::new());
    Ok(())
}

/// Returns the fleet report of the receiver.
async fn fleet_report(setup: &SingleRuntime) -> Result<Value> {
    let admin =
        setup.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    Ok(serde_json::from_str(&http::get(admin, "/fleet", DEADLINE).await?.1)?)
}

#[tokio::test]
async fn removing_the_selector_label_ends_the_running_reconcile() -> TestResult {
    let options = Options { proxied: true, ..takeover_options() };
    let setup = SingleRuntime::isolated_without_agent(Isolation::Shared, "taken-off", &[KEDA], options).await?;
    take_over(&setup.landscape, &setup.runtime).await?;
    setup.runtime.start_agent().await?;
    until("the Kyma in the runtime", async || setup.runtime.skr_kyma().await).await?;
    setup.runtime.select(&["keda"]).await?;
    setup.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    setup.becomes_idle().await?;

    // Interrupt a reconcile that would write: its requests to the runtime stay unanswered.
    let proxy = &setup.runtime.proxies().context("the proxies")?.receiver;
    proxy.black_hole();
    setup.runtime.select(&[]).await?;
    until("the reconcile to begin", async || {
        Ok((fleet_report(&setup).await?["runtimes"][0]["inWork"] == true).then_some(()))
    })
    .await?;
    mark(&setup.landscape, &setup.runtime, json!({OURS.0: "lifecycle-manager"})).await?;
    until("the Kyma to be gone", async || Ok((fleet_report(&setup).await?["summary"]["kymas"] == 0).then_some(())))
        .await?;
    let judge = Judge::begin(&setup.landscape, &setup.runtime)?.without_agent();
    proxy.resume();

    // The agent's runtime is no longer known: its connection is closed, and its requests are refused.
    setup.receiver_metric_reaches("tidewatch_gateway_connections_ended_total", &["out"], 1).await?;
    setup.receiver_metric_reaches("tidewatch_gateway_requests_refused_total", &["unknown-runtime"], 1).await?;
    let ca = setup.landscape.ca();
    let domain = setup.landscape.trust_domain();
    let contract_client = ContractClient::new(ca, ca, domain, setup.runtime.id(), &setup.landscape.agents_authority())?;
    assert_eq!(contract_client.send(&contract_client.event(1, 1)?).await?.status(), StatusCode::NOT_FOUND);
    assert_eq!(setup.manifests().await?.len(), 1, "the interrupted reconcile deleted nothing");
    assert_eq!(judge.actors()?, Vec::<Actor>::new());

    // Given back, the Kyma is reconciled like a new one.
    take_over(&setup.landscape, &setup.runtime).await?;
    setup.skr_status("the change", |status| status.modules().is_empty()).await?;
    Ok(())
}
