//! Taking over from the incumbent, runtime by runtime, and back: its CRDs give way to ours in place, although they still list a version
//! that ours have not, and at no moment do both act on one Kyma.

mod incumbent;
mod judge;

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
};
use serde_json::{Value, json};
use tidewatch_shared::{
    api::{Kyma, State, crds::runtime_crds},
    names::{AGENT_DEPLOYMENT, AGENT_OBJECT, IDENTITY_SECRET, SKR_NAMESPACE, annotation, finalizer, label},
};
use tidewatch_tests::{
    bed,
    control_plane::{Cluster, Person},
    http,
    landscape::{AGENT_IMAGE, DEADLINE, Landscape, Options, Runtime, until},
    speaker::Speaker,
};

use self::{
    incumbent::{Incumbent, OURS},
    judge::{Actor, Judge},
};
use crate::{
    load::KEDA,
    support::{Ground, Nothing, One, Tested, module, quick},
};

/// A runtime in which the incumbent was: its CRDs with both versions, `v1beta1` among the stored ones, and an object of a user's.
async fn old_definitions(name: &str) -> Result<()> {
    let cluster = bed::shared().await?.runtime(name).await?;
    let api = Api::<CustomResourceDefinition>::all(cluster.client_as(Person::Other).await?);
    for crd in runtime_crds() {
        let mut old = crd.clone();
        let mut beta1 = old.spec.versions[0].clone();
        beta1.name = "v1beta1".to_owned();
        // Stored first as v1beta1, as it was years ago.
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
        let versions = json!({"spec": {"versions": old.spec.versions.iter().map(|version| {
            let mut version = version.clone();
            (version.storage, version.served) = (version.name == "v1beta2", version.name == "v1beta2");
            version
        }).collect::<Vec<_>>()}});
        api.patch(&created.name_any(), &PatchParams::default(), &Patch::Merge(versions)).await?;
    }
    Ok(())
}

#[tokio::test]
async fn our_crds_take_the_place_of_the_incumbents() -> Tested {
    old_definitions("takeover").await?;
    let one = One::without_agent("takeover", &[("keda", "1.0.0", "1.1.0")]).await?;
    one.skr_status("readiness", |status| status.state() == State::Ready).await?;
    let api = Api::<CustomResourceDefinition>::all(one.runtime.cluster().client().await?);
    for crd in runtime_crds() {
        let there = api.get(&crd.name_any()).await?;
        let versions: Vec<_> = there.spec.versions.iter().map(|version| version.name.as_str()).collect();
        assert_eq!(versions, ["v1beta2"], "{}", crd.name_any());
        let stored = there.status.and_then(|status| status.stored_versions);
        assert_eq!(stored, Some(vec!["v1beta2".to_owned()]), "{}", crd.name_any());
    }
    Ok(())
}

/// A receiver of the Kymas with our label, which waits for the incumbent to be quiet.
fn gradual() -> Options {
    let receiver = vec![format!("--kyma-selector={}={}", OURS.0, OURS.1), "--takeover-quiet-seconds=10".to_owned()];
    Options { receiver, ..quick() }
}

/// Merges labels into a Kyma in KCP, as its operator.
async fn mark(landscape: &Landscape, runtime: &Runtime, labels: Value) -> Result<()> {
    let kymas = Api::<Kyma>::namespaced(landscape.operator(), landscape.namespace());
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    kymas.patch(runtime.name(), &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Makes a Kyma ours.
async fn give(landscape: &Landscape, runtime: &Runtime) -> Result<()> {
    mark(landscape, runtime, json!({OURS.0: OURS.1, label::HAND_BACK: null})).await
}

/// Asks for the way back, and waits for the answer.
async fn take_back(landscape: &Landscape, runtime: &Runtime) -> Result<()> {
    mark(landscape, runtime, json!({label::HAND_BACK: label::HAND_BACK_ASKED})).await?;
    handed_back(runtime).await
}

async fn handed_back(runtime: &Runtime) -> Result<()> {
    until(&format!("{} to be handed back", runtime.name()), async || {
        let kyma = runtime.kcp_kyma().await?.context("the Kyma")?;
        Ok(kyma.labels().get(label::HAND_BACK).is_some_and(|value| value == label::HAND_BACK_DONE).then_some(()))
    })
    .await
}

/// The image and the rest of the container that runs as the agent.
async fn container(cluster: &Cluster) -> Result<(String, Value)> {
    let deployment =
        Api::<Deployment>::namespaced(cluster.client().await?, SKR_NAMESPACE).get(AGENT_DEPLOYMENT).await?;
    let pod = deployment.spec.and_then(|spec| spec.template.spec).context("a pod")?;
    let image = pod.containers[0].image.clone().context("an image")?;
    Ok((image, serde_json::to_value(pod)?))
}

/// Nothing of ours is left where the incumbent acts, and nothing of its own is harmed.
async fn is_the_incumbents(runtime: &Runtime) -> Result<()> {
    let client = runtime.cluster().client().await?;
    assert!(Api::<ConfigMap>::namespaced(client.clone(), SKR_NAMESPACE).get_opt(AGENT_OBJECT).await?.is_none());
    assert!(Api::<ServiceAccount>::namespaced(client.clone(), SKR_NAMESPACE).get_opt(AGENT_OBJECT).await?.is_none());
    assert!(Api::<ClusterRole>::all(client.clone()).get_opt(AGENT_OBJECT).await?.is_none());
    let (image, pod) = container(runtime.cluster()).await?;
    assert_eq!(image, "theirs:1");
    assert!(pod["containers"][0]["args"].is_null() && pod["serviceAccountName"].is_null(), "{pod}");
    let secret = Api::<Secret>::namespaced(client, SKR_NAMESPACE).get(IDENTITY_SECRET).await?;
    assert_eq!(secret.type_.as_deref(), Some("kubernetes.io/tls"));
    let kyma = runtime.kcp_kyma().await?.context("the Kyma")?;
    assert_eq!(kyma.finalizers(), [finalizer::KYMA], "which the incumbent takes off at its end");
    assert!(!kyma.annotations().contains_key(annotation::INPUTS), "{:?}", kyma.annotations());
    assert!(!kyma.annotations().contains_key(annotation::ACCEPTED_SPEC), "{:?}", kyma.annotations());
    let status = kyma.status.context("a status")?;
    for ours in ["EventPath", "RuntimeAccess", "Paused"] {
        assert!(status.condition(ours).is_none(), "{ours} would never change again");
    }
    Ok(())
}

/// Two runtimes of the incumbent's.
async fn beside(name: &str, runtimes: usize) -> Result<(Nothing, Incumbent)> {
    let (mut nothing, clusters) = Nothing::prepare(name, runtimes, gradual()).await?;
    nothing.register(clusters.clone()).await?;
    let clusters: Vec<_> = clusters.iter().map(AsRef::as_ref).collect();
    let incumbent = Incumbent::start(&nothing.landscape, &clusters).await?;
    Ok((nothing, incumbent))
}

#[tokio::test]
async fn runtimes_are_taken_over_one_by_one_and_back_and_never_do_both_act() -> Tested {
    let (nothing, incumbent) = beside("gradual", 2).await?;
    let (landscape, [first, second]) = (&nothing.landscape, [&nothing.members[0], &nothing.members[1]]);
    let judges = [Judge::begin(landscape, &first.runtime)?, Judge::begin(landscape, &second.runtime)?];
    for member in [first, second] {
        incumbent.acts_on(member.runtime.name()).await?;
    }

    give(landscape, &first.runtime).await?;
    first.proven().await?;
    first.delivers(&["keda"]).await?;
    assert_eq!(container(first.runtime.cluster()).await?.0, AGENT_IMAGE);
    // The other one is as it was.
    incumbent.acts_on(second.runtime.name()).await?;
    assert_eq!(judges[1].eras()?, [Actor::Incumbent]);
    give(landscape, &second.runtime).await?;
    second.proven().await?;

    take_back(landscape, &first.runtime).await?;
    incumbent.acts_on(first.runtime.name()).await?;
    is_the_incumbents(&first.runtime).await?;
    let written = first.runtime.skr_kyma().await?.context("the Kyma in the runtime")?;
    assert_eq!(written.spec.modules().len(), 1, "what the user selected stays");
    second.delivers(&["keda"]).await?;

    // And over again, as if it had never been ours.
    give(landscape, &first.runtime).await?;
    first.proven().await?;
    first.delivers(&[]).await?;
    let (theirs, ours) = (Actor::Incumbent, Actor::Us);
    assert_eq!(judges[0].eras()?, [theirs, ours, theirs, ours]);
    assert_eq!(judges[1].eras()?, [theirs, ours]);
    assert_eq!(incumbent.failures(), Vec::<String>::new());
    Ok(())
}

#[tokio::test]
async fn a_receiver_that_dies_on_the_way_over_or_back_is_followed_by_one_that_goes_on() -> Tested {
    let (nothing, incumbent) = beside("midway", 1).await?;
    let (landscape, member) = (&nothing.landscape, nothing.only());
    let (runtime, cluster) = (&member.runtime, member.runtime.cluster());
    let judge = Judge::begin(landscape, runtime)?;
    incumbent.acts_on(runtime.name()).await?;

    // Killed as soon as it has begun.
    let maps = Api::<ConfigMap>::namespaced(cluster.client().await?, SKR_NAMESPACE);
    give(landscape, runtime).await?;
    until("the take-over to begin", async || Ok(maps.get_opt(AGENT_OBJECT).await?.map(drop))).await?;
    landscape.with_receiver(async |receiver| receiver.kill9()).await?;
    landscape.start_receiver().await?;
    member.proven().await?;
    member.delivers(&["keda"]).await?;

    // Asked to go as soon as the agent is on its way out; another one has waited for its turn.
    let next = landscape.start_standby("next", landscape.event_port()).await?;
    let deployments = Api::<Deployment>::namespaced(cluster.client().await?, SKR_NAMESPACE);
    mark(landscape, runtime, json!({label::HAND_BACK: label::HAND_BACK_ASKED})).await?;
    until("the agent to go", async || Ok(deployments.get_opt(AGENT_DEPLOYMENT).await?.is_none().then_some(()))).await?;
    let ended = landscape.with_receiver(async |receiver| receiver.sigterm(DEADLINE).await).await??;
    assert!(ended.success(), "{ended}");
    next.ready(DEADLINE).await?;
    handed_back(runtime).await?;
    incumbent.acts_on(runtime.name()).await?;
    is_the_incumbents(runtime).await?;
    assert_eq!(judge.eras()?, [Actor::Incumbent, Actor::Us, Actor::Incumbent]);
    assert_eq!(incumbent.failures(), Vec::<String>::new());
    Ok(())
}

/// What the receiver shows of its fleet.
async fn fleet(one: &One) -> Result<Value> {
    let admin = one.landscape.with_receiver(async |receiver| receiver.admin()).await?.context("its admin listener")?;
    Ok(serde_json::from_str(&http::get(admin, "/fleet", DEADLINE).await?.1)?)
}

#[tokio::test]
async fn a_label_that_is_taken_off_ends_the_pass_that_is_under_way() -> Tested {
    let options = Options { proxied: true, ..gradual() };
    let one = One::on(Ground::Shared, "taken-off", &[KEDA], options).await?;
    give(&one.landscape, &one.runtime).await?;
    one.runtime.start_agent().await?;
    until("the Kyma in the runtime", async || one.runtime.skr_kyma().await).await?;
    one.runtime.select(&["keda"]).await?;
    one.skr_status("the module", |status| module(status, "keda").is_some()).await?;
    one.quiet().await?;

    // In the midst of a pass that would write: its requests to the runtime are not answered.
    let way = &one.runtime.ways().context("the proxies")?.receiver;
    way.black_hole();
    one.runtime.select(&[]).await?;
    until("the pass to begin", async || Ok((fleet(&one).await?["runtimes"][0]["inWork"] == true).then_some(())))
        .await?;
    mark(&one.landscape, &one.runtime, json!({OURS.0: "incumbent"})).await?;
    until("the Kyma to be gone", async || Ok((fleet(&one).await?["summary"]["kymas"] == 0).then_some(()))).await?;
    let judge = Judge::begin(&one.landscape, &one.runtime)?.without_agent();
    way.resume();

    // Its agent is nobody's: it is told so, its connection has ended, and its certificate serves no more.
    one.receiver_counts("tidewatch_gateway_connections_ended_total", &["out"], 1).await?;
    one.receiver_counts("tidewatch_gateway_requests_refused_total", &["unknown-runtime"], 1).await?;
    let (ca, domain) = (one.landscape.ca(), one.landscape.trust_domain());
    let speaker = Speaker::new(ca, ca, domain, one.runtime.id(), &one.landscape.agents_authority())?;
    assert_eq!(speaker.say(&speaker.event(1, 1)?).await?.status(), StatusCode::NOT_FOUND);
    assert_eq!(one.manifests().await?.len(), 1, "what the pass would have deleted");
    assert_eq!(judge.eras()?, Vec::<Actor>::new());

    // Given back, it is worked on as one of somebody else's.
    give(&one.landscape, &one.runtime).await?;
    one.skr_status("the change", |status| status.modules().is_empty()).await?;
    Ok(())
}
